"""What actors print, shown where their mesh was started. The ranks' hosts fold it; here it is put on the screen."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from meshbook.controller.console import Console
from meshbook.wire import messages


class ActorOutput:
    """The output of a session's ranks that belongs to no running cell."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._stream = True
        self._console: Console | None = None
        session.connection.listeners.stray_output.append(self._show)

    def choose(self, stream: bool, window_s: float | None) -> None:
        """Show it here or not."""
        self._stream = stream

    def _show(self, report: messages.CallOutput) -> None:
        if not self._stream or len(self._session.connection.listeners.stray_output) > 1:
            return  # a notebook shows it itself
        if self._console is None:
            ranks = self._session.axes.ranks if self._session.axes is not None else ()
            self._console = Console(ranks, echo=True)
        with contextlib.suppress(Exception):
            self._console(report.items)
            sys.stdout.flush()


def of(session: Any) -> ActorOutput:
    """The one of a session; made on first use."""
    found = session.extras.get("actor_output")
    if found is None:
        found = session.extras["actor_output"] = ActorOutput(session)
    return found  # type: ignore[no-any-return]
