"""Cells that have run, whoever ran them: what they printed and how they ended, as far as the supervisor keeps it.

A cell that goes on without its client, because a kernel was killed or a page was closed, is found here afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.console import Console
from meshbook.controller.results import mime_bundle
from meshbook.controller.session import Session
from meshbook.controller.tables import format_lines, format_seconds
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import Display, FoldedItem, HistoryEntry, KeptCell, Line, RankDisplay

# Cells that a client hears of when it attaches; the others are marked in the history.
_MAX_NOTICES = 3
_ENDS = {"ok": "ended", "error": "failed", "interrupted": "was stopped", "lost": "lost a rank"}


class PastCell:
    """A cell that ran, or still runs, with what is kept of its output.

    Its repr is what it showed, as text; its ranks' values are shown, too, and cannot be fetched.

    Attributes:
        number: the cell's number in its notebook.
        ranks: the ranks that it ran on.
        source: its source.
        status: "running", "ok", "error", "interrupted" or "lost".
        seconds: how long it took, or has run until now.
        items: what it showed, folded: its output, then its value or its error.
        earlier: cells with the same number that ran before it: of another notebook, or of a kernel that was restarted.
    """

    def __init__(self, kept: KeptCell, *, now: float, earlier: tuple[PastCell, ...] = ()) -> None:
        entry = self._entry = kept.entry
        self.number, self.ranks, self.source, self.status = entry.number, entry.ranks, entry.source, entry.status
        self.seconds = now - entry.started_at if entry.seconds is None else entry.seconds
        self.earlier = earlier
        end = () if kept.finished is None else end_items(kept.finished, self.ranks, self.label)
        self.items = (*map(_without_display_id, kept.items), *end)

    @property
    def label(self) -> str:
        return _label(self._entry)

    @property
    def heading(self) -> str:
        """What it was, in a line: `cell 7 of 14:02:11 on ranks 0-1: ended after 41 s, 312 lines`."""
        began = time.strftime("%H:%M:%S", time.localtime(self._entry.started_at))
        end = (
            _describe_end(self._entry) if self.status != "running" else f"runs, for {format_seconds(self.seconds)} now"
        )
        return f"{self.label} of {began} on {name_ranks(self.ranks)}: {end}, {format_lines(self._entry.num_lines or 0)}"

    @property
    def text(self) -> str:
        """What it showed, as plain text."""
        console = Console(self.ranks, echo=False)
        console(self.items)
        return console.text

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.text}".rstrip("\n")


def fetch_past_cells(session: Session, number: int) -> tuple[PastCell, ...]:
    """Return the cells with this number whose output is kept, oldest first; there is at least one. Blocks.

    Raises:
        UsageError: there is none; the message says of which cells output is kept.
        MeshTimeout: the supervisor does not answer.
    """
    cells: list[PastCell] = []
    query = messages.QueryOutput(call=session.connection.next_call_id(), number=number)
    for kept in session.call_supervisor(query).kept:
        cells.append(PastCell(kept, now=time.time(), earlier=tuple(cells)))
    return tuple(cells)


def fetch_unattended(session: Session) -> messages.CommandReply:
    """Return the running cells (`open_calls`), and those that ended without their client (`history`). Blocks."""
    return session.call_supervisor(messages.QueryUnattended(call=session.connection.next_call_id()))


def acknowledge(session: Session, entries: Sequence[HistoryEntry]) -> None:
    """Have the supervisor report these cells, which ended without their client, to no other. Does not wait."""
    if entries and not session.connection.closed:
        session.connection.send(messages.AcknowledgeCells(calls=tuple(entry.call for entry in entries)))


def unattended_notices(unattended: Sequence[HistoryEntry], whose: str, show: Callable[[int | None], str]) -> list[str]:
    """Return sentences about cells that ended after their client was gone.

    Args:
        unattended: the cells, oldest first.
        whose: what they went on without: "the notebook".
        show: returns what shows the output of a cell with this number; None: what lists all cells.
    """
    notices = []
    for entry in unattended[-_MAX_NOTICES:]:
        what = f"its output ({format_lines(entry.num_lines)})" if entry.num_lines else "what it came to"
        notices.append(
            f"{_label(entry)} went on without {whose}: {_describe_end(entry)} · {what}: {show(entry.number)}"
        )
    if (more := len(unattended) - _MAX_NOTICES) > 0:
        notices.insert(0, f"{more} earlier cell{'s' if more > 1 else ''} went on without {whose} too: {show(None)}")
    return notices


def _label(entry: HistoryEntry) -> str:
    return f"cell {entry.number}" if entry.number is not None else entry.label or "a cell"


def _describe_end(entry: HistoryEntry) -> str:
    return f"{_ENDS.get(entry.status, entry.status)} after {format_seconds(entry.seconds or 0.0)}"


def end_items(finished: messages.CallFinished, ranks: Ranks, label: str) -> tuple[FoldedItem, ...]:
    """Return what a cell shows at its end: its values by rank, or its error."""
    if (error := error_from(finished, label)) is not None:
        text = "\n".join(getattr(render_error(error), "rendered", ()) or [f"{type(error).__name__}: {error}"])
        return (Line(ranks, "stderr", text),)
    parts = [part for part in finished.outcomes if part.outcome.value is not None]
    return (RankDisplay(ranks, Display(data=mime_bundle(parts, ranks))),) if parts else ()


def _without_display_id(item: FoldedItem) -> FoldedItem:
    """Return the item such that showing it again leaves the display that the cell itself showed as it is."""
    if isinstance(item, RankDisplay) and isinstance(item.item, Display) and item.item.display_id is not None:
        return RankDisplay(item.ranks, msgspec.structs.replace(item.item, display_id=None))
    return item
