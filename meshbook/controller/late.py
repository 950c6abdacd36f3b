"""What ranks print when no cell runs: threads that a cell has left behind, actors, ranks that end."""

from __future__ import annotations

import contextlib
import weakref
from typing import cast

from meshbook.controller.console import Console
from meshbook.controller.session import Session
from meshbook.ids import Ranks
from meshbook.wire import messages

_KEY = "late_output"


class LateOutput:
    """Shows it where its call was sent from; what actors print, where any were spawned, too.

    The ranks' hosts fold it, and cannot tell a thread's lines from an actor's.
    """

    def __init__(self, session: Session) -> None:
        self.of_everybody = False  # also what calls of other clients have left behind
        self.shown = True
        self._session = weakref.ref(session)
        self._ids = session.connection.ids
        self._console: Console | None = None
        session.connection.listeners.stray_output.append(self._show)

    def _show(self, report: messages.CallOutput) -> None:
        session = self._session()
        if session is None or not self.shown or not (self.of_everybody or self._ids.gave(report.call)):
            return
        self._print(session, report.items)

    def tell(self, ranks: Ranks, text: str) -> None:
        """Show people a notice about these ranks, of this program's own."""
        session = self._session()
        if session is not None:
            self._print(session, (messages.RankDisplay(ranks=ranks, item=messages.Notice(text)),))

    def _print(self, session: Session, items: tuple[messages.FoldedItem, ...]) -> None:
        if self._console is None:
            self._console = Console(session.axes.ranks if session.axes is not None else (), echo=True)
        with contextlib.suppress(Exception):  # the standard streams may be closed by now
            self._console(items)


def late_output(session: Session) -> LateOutput:
    """The one of a session; made when it is opened for a person or a program of theirs."""
    if _KEY not in session.extras:
        session.extras[_KEY] = LateOutput(session)
    return cast(LateOutput, session.extras[_KEY])
