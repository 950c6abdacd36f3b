"""After a cell that redefined a class of live actors: updates the actors' methods, and prints a message."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

from IPython.core.interactiveshell import InteractiveShell


class RedefinitionHook:
    """IPython's hook after every cell that runs in the notebook's own process."""

    _instances: ClassVar[weakref.WeakKeyDictionary[InteractiveShell, RedefinitionHook]] = weakref.WeakKeyDictionary()

    def __init__(self, shell: InteractiveShell) -> None:
        self._namespace = shell.user_ns
        self._events = shell.events
        self._installed = False

    @classmethod
    def of(cls, shell: InteractiveShell) -> RedefinitionHook:
        """Return the hook of a shell."""
        return cls._instances.setdefault(shell, cls(shell))

    def install(self) -> None:
        if not self._installed:
            self._events.register("post_run_cell", self._post_run_cell)
            self._installed = True

    def remove(self) -> None:
        if self._installed:
            self._events.unregister("post_run_cell", self._post_run_cell)
            self._installed = False

    def _post_run_cell(self, result: Any) -> None:
        if "meshbook.actors.procs" not in sys.modules:
            return  # no actor was spawned from this process; avoids the import
        from meshbook.actors.redefine import redefine_from

        for message in redefine_from(self._namespace):
            print(message)
