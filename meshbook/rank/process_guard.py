"""Protects the process of a rank from what user code may do to it: forked children, lost builtins, lost modules."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Callable
from types import BuiltinFunctionType, ModuleType
from typing import Final, NoReturn

from meshbook.rank.cells import tracebacks
from meshbook.wire.messages import Notice

# Saved separately, because the code that uses `_BUILTINS` runs when builtins are missing.
_is_callable: Final = callable
_BUILTINS: Final = [
    (name, thing) for name, thing in vars(builtins).items() if isinstance(thing, type | BuiltinFunctionType)
]


class ProcessGuard:
    """Restores what this process and its libraries need, where user code has overwritten it.

    That is: built-in functions that are no longer callable, and modules if all are missing. A user function that
    replaces a built-in one stays.
    """

    def __init__(self, notify: Callable[[Notice], None]) -> None:
        self._notify = notify
        self._modules: dict[str, ModuleType] = {}  # before the first cell

    def snapshot_modules(self) -> None:
        """Store the imported modules, unless that was done before."""
        self._modules = self._modules or dict(sys.modules)

    def restore(self) -> None:
        """Restore what is missing, with a notice. Call it after user code."""
        current = builtins.__dict__
        lost = [
            name
            for name, original in _BUILTINS
            if current.get(name) is not original and not _is_callable(current.get(name))
        ]
        if lost:
            current.update([(name, original) for name, original in _BUILTINS if name in lost])
            self._notify(
                Notice(
                    f"put back what the cell had made of builtins: {', '.join(lost)} could not be called any more, and "
                    "all code of this process needs them"
                )
            )
        if "sys" not in sys.modules:
            for name, module in self._modules.items():
                sys.modules.setdefault(name, module)
            self._notify(
                Notice(
                    "put modules back into sys.modules: the cell had cleared it, and without `sys` in it Python cannot "
                    "import anything. importlib.reload(module) loads one anew"
                )
            )


class ExitForkedChildren:
    """Exits a process that user code forks in this block at the block's end, as at the end of a script.

    Otherwise the child would continue as a second rank on its parent's sockets.
    """

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, _kind: object, error: BaseException | None, _tb: object) -> None:
        if os.getpid() != self._pid:
            _exit_child(error)


def _exit_child(error: BaseException | None) -> NoReturn:
    """Exit this process with the status that Python would use."""
    status = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code
            status = 0 if code is None else code if isinstance(code, int) else 1
            if isinstance(code, str):
                print(code, file=sys.stderr)
        elif error is not None:
            status = 1
            tracebacks.strip_meshbook_frames(error)
            traceback.print_exception(error)
    finally:
        os._exit(status & 0xFF)
