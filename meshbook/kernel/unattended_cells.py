"""Cells that a notebook finds on a mesh: those that ended while it was away, and those that still run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from meshbook.controller.past_cells import acknowledge, fetch_unattended, unattended_notices
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.ids import name_ranks
from meshbook.wire.messages import OpenCall


class NoticeHandler(Protocol):
    """Receives a sentence for the user; calls `then`, if given, when it has been shown."""

    def __call__(self, text: str, then: Callable[[], object] = ..., /) -> object: ...


def report_cells(
    session: Session,
    *,
    origin: str,
    is_only_mesh: bool,
    on_notice: NoticeHandler,
    on_orphan: Callable[[Session, OpenCall], object],
) -> None:
    """Report the cells that ended without their client, until a user knows of them, and the cells that still run.

    Args:
        origin: whose the running ones are: "of another client".
        is_only_mesh: the notebook has no other mesh.
        on_orphan: called with a running cell whose client is gone, after the notice of it.
    """
    try:
        found = fetch_unattended(session)
    except MeshbookError:  # it does not answer, which the next cell on it reports
        return
    where = "" if is_only_mesh else f" -m {session.name}"

    def history(number: int | None) -> str:
        return f"%mesh history{'' if number is None else f' {number}'}{where}"

    for text in unattended_notices(found.history, "the notebook", history):
        on_notice(text, functools.partial(acknowledge, session, found.history))
    for call in found.open_calls:
        text = (
            f"{call.label or 'a cell'} {origin} still runs on {name_ranks(call.ranks)}, for {call.seconds:.0f} s now; "
            "%mesh interrupt stops it"
        )
        if call.number is not None:
            text += f"; its whole output until now: {history(call.number)}"
        if call.orphaned:
            on_notice(text, functools.partial(on_orphan, session, call))
        else:
            on_notice(text)
