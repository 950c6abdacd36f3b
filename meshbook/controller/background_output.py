"""Output of ranks outside cells: threads that a cell started, actors, ranks that exit."""

from __future__ import annotations

import contextlib
import weakref
from typing import cast

from meshbook.controller.console import Console
from meshbook.controller.session import Session
from meshbook.ids import Ranks
from meshbook.wire import messages

_KEY = "late_output"


class BackgroundOutput:
    """Prints such output in the process that sent its call; actors' output also in every process that spawned actors.

    The ranks' hosts fold the output, and cannot distinguish a thread's lines from an actor's.
    """

    def __init__(self, session: Session) -> None:
        self.all_clients = False  # also the output of other clients' calls
        self.enabled = True
        self._session = weakref.ref(session)
        self._call_ids = session.connection.call_ids
        self._console: Console | None = None
        listeners = session.connection.listeners
        listeners.orphan_output.append(self._on_orphan_output)
        listeners.report_handlers[messages.MeshAnnounced] = lambda report: self.notify(report.ranks, report.text)

    def _on_orphan_output(self, report: messages.CallOutput) -> None:
        session = self._session()
        if session is None or not self.enabled or not (self.all_clients or self._call_ids.issued(report.call)):
            return
        self._print(session, report.items)

    def notify(self, ranks: Ranks, text: str) -> None:
        """Show the user a notice of this program's own about these ranks."""
        session = self._session()
        if session is not None:
            self._print(session, (messages.RankDisplay(ranks=ranks, item=messages.Notice(text)),))

    def _print(self, session: Session, items: tuple[messages.FoldedItem, ...]) -> None:
        ranks = session.axes.ranks if session.axes is not None else ()
        if self._console is None or self._console.ranks != ranks:
            self._console = Console(ranks, echo=True)
        with contextlib.suppress(Exception):  # the standard streams may be closed by now
            self._console(items)


def background_output_of(session: Session) -> BackgroundOutput:
    """Return the `BackgroundOutput` of a session, creating it on the first call.

    Called for sessions opened for a user or a user's program.
    """
    if _KEY not in session.extras:
        session.extras[_KEY] = BackgroundOutput(session)
    return cast(BackgroundOutput, session.extras[_KEY])
