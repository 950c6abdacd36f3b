"""Output of a cell, as a rank sends it and folded; and what a call came to on the ranks."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from meshbook.ids import Ranks
from meshbook.wire.messages.payloads import RankError, Value


class Text(Struct, tag="text", frozen=True, gc=False):
    """A piece of stdout or stderr as written: may hold part of a line, many lines, carriage returns."""

    stream: Literal["stdout", "stderr"]
    text: str


class Display(Struct, tag="display", frozen=True, gc=False):
    """A display_data message, or update_display_data if `update`."""

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str | None = None
    update: bool = False


class ClearOutput(Struct, tag="clear", frozen=True, gc=False):
    wait: bool = False


class Notice(Struct, tag="notice", frozen=True, gc=False):
    """A message of Meshbook's own in the output: text truncated, a rank that does not stop."""

    text: str


OutputItem = Text | Display | ClearOutput | Notice


class VaryingNumber(Struct, array_like=True, frozen=True, gc=False):
    """A number of a folded line that differs between its ranks."""

    position: int  # index among the line's numbers, counted from 0
    texts: tuple[str, ...]  # as each rank wrote it, in the order of the line's ranks


class Line(Struct, tag="line", frozen=True, gc=False, omit_defaults=True):
    """One folded line of text, printed by `ranks`: equal on all of them, or equal except for numbers.

    `text` is ready for display, without the ranks and the line end; where numbers differ it shows their range.
    """

    ranks: Ranks
    stream: Literal["stdout", "stderr"]
    text: str
    live: bool = False  # state of an unfinished line, such as a progress bar; replaces these ranks' earlier live lines
    end: str = "\n"  # "" where the last line of a cell had no line end
    first_text: str = ""  # the line as its first rank wrote it, if numbers differ
    # the differing numbers, so that lines of several hosts fold exactly, and some ranks' part can be taken out
    varying_numbers: tuple[VaryingNumber, ...] = ()


class RankDisplay(Struct, tag="rank_display", frozen=True, gc=False):
    """A display, a display update or clear_output, with the ranks that produced the same one."""

    ranks: Ranks
    item: Display | ClearOutput | Notice


FoldedItem = Line | RankDisplay


class Outcome(Struct, frozen=True, gc=False):
    """How a call ended on one rank; equal outcomes of several ranks are folded."""

    status: Literal["ok", "error", "interrupted", "lost", "skipped"]
    value: Value | None = None  # of the last expression; None: there was none
    error: RankError | None = None  # for "error" and "interrupted"; for "lost" a description of what is known
    bound_names: tuple[str, ...] = ()  # names of the namespace that the cell bound, changed or rebound
    deleted_names: tuple[str, ...] = ()  # names that the cell deleted
    next_input: str | None = None  # what the cell puts into the next one, by `set_next_input`
    groups_broken: bool = False  # a process group of this rank cannot be used until it is re-formed
    reply: Any = None  # the reply to a query (Complete, Inspect, PreviewNames): plain data


class OutcomeGroup(Struct, frozen=True, gc=False):
    """Ranks with the same outcome."""

    ranks: Ranks
    outcome: Outcome
