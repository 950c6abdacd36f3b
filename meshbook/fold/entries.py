"""Entries of the queues that `align` folds: lines as plain strings, anything else as strings that carry it.

All are str, so that runs of two queues are compared at C speed. A stdout line is stored as it is; any other entry
starts with one of four characters, none of which occurs in incoming text (`line_assembler.RESERVED_CHARS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from meshbook.fold.numbers import Fold, FoldMember, TextTemplate, fold, template_of, unfold
from meshbook.fold.truncation import Truncation
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, RankDisplay

_STDERR = "\0"  # followed by the line
_ITEM = "\1"  # followed by a digest: equal displays have equal entries
_TRUNCATION = "\2"  # followed by a number: a gap where entries were dropped
_FOLDED_LINE = "\3"  # followed by a number: a line folded by a host that is more than its text
_SPECIAL = frozenset((_STDERR, _ITEM, _TRUNCATION, _FOLDED_LINE))
# Prefix of a stderr line's key. No key of a stdout line starts with it, see `_SPECIAL`.
_STDERR_KEY = _STDERR

_encode = msgspec.msgpack.Encoder().encode
_numbers = itertools.count()


class RichEntry(str):
    """An entry that is more than a line's text."""

    template: TextTemplate
    num_chars: int


class ItemEntry(RichEntry):
    """A display, clear-output or notice."""

    item: Display | ClearOutput | Notice


class TruncationEntry(RichEntry):
    """A gap where entries were dropped."""

    truncation: Truncation


class FoldedLineEntry(RichEntry):
    """A line that a host has folded, with what its ranks wrote or without a line end."""

    line: Line
    member: FoldMember


def stderr_entry(text: str) -> str:
    return _STDERR + text


def item_entry(item: Display | ClearOutput | Notice) -> ItemEntry:
    packed = _encode(item)
    entry = ItemEntry(_ITEM + blake2b(packed, digest_size=16).hexdigest())
    entry.item, entry.num_chars, entry.template = item, len(packed), TextTemplate(str(entry), ())
    return entry


def truncation_entry() -> TruncationEntry:
    entry = TruncationEntry(f"{_TRUNCATION}{next(_numbers)}")
    # All gaps have one key, so sources align at them.
    entry.truncation, entry.num_chars, entry.template = Truncation(), 0, TextTemplate(_TRUNCATION, ())
    return entry


def folded_line_entry(line: Line) -> str:
    text = line.text.lstrip("".join(_SPECIAL)) if line.text[:1] in _SPECIAL else line.text
    is_stderr = line.stream == "stderr"
    if not line.varying_numbers and line.end:
        return stderr_entry(text) if is_stderr else text
    entry = FoldedLineEntry(f"{_FOLDED_LINE}{next(_numbers)}")
    template, entry.member = split_folded_line(line)
    entry.template = TextTemplate(_STDERR_KEY + template.key, template.numbers) if is_stderr else template
    entry.line, entry.num_chars = line, len(text)
    return entry


def is_special(entry: str) -> bool:
    """Whether an entry is not a plain stdout line."""
    return entry[:1] in _SPECIAL


def num_chars_of(entry: str) -> int:
    return entry.num_chars if isinstance(entry, RichEntry) else len(entry)


def stream_of(template: TextTemplate) -> str:
    """Return the stream of a line by the template of its entry."""
    return "stderr" if template.key[:1] == _STDERR_KEY else "stdout"


def member_of(entry: str, ranks: Ranks, template: TextTemplate) -> FoldMember:
    """Return a line's entry as member of a fold."""
    if isinstance(entry, FoldedLineEntry):
        return entry.member
    return FoldMember(ranks, entry[1:] if entry[:1] == _STDERR else entry, template.numbers)


def output_of(entry: str, ranks: Ranks, *, mergeable: bool) -> FoldedItem:
    """Return what an entry of these ranks is emitted as."""
    if not is_special(entry):
        return Line(ranks, "stdout", entry)
    match entry:
        case ItemEntry():
            return RankDisplay(ranks, entry.item)
        case TruncationEntry():
            return truncation_notice(entry.truncation)
        case FoldedLineEntry():
            line = msgspec.structs.replace(entry.line, live=False, end="\n")
            return line if mergeable else Line(line.ranks, line.stream, line.text)
        case _:
            return Line(ranks, "stderr", entry[1:])


def truncation_notice(truncation: Truncation) -> RankDisplay:
    return RankDisplay(tuple(sorted(truncation.ranks)), truncation.notice())


class LineTemplates:
    """The templates of entries; those of plain lines are computed once."""

    def __init__(self) -> None:
        self._templates: dict[str, TextTemplate] = {}

    def __call__(self, entry: str) -> TextTemplate:
        if isinstance(entry, RichEntry):
            return entry.template
        template = self._templates.get(entry)
        if template is None:
            if entry[:1] == _STDERR:
                template = template_of(entry[1:])
                template = TextTemplate(_STDERR_KEY + template.key, template.numbers)
            else:
                template = template_of(entry)
            if len(self._templates) > 4096:
                self._templates.clear()
            self._templates[entry] = template
        return template


def split_folded_line(line: Line) -> tuple[TextTemplate, FoldMember]:
    """Convert a folded line to a member of another fold. Varying numbers that do not fit its text are ignored."""
    text = line.first_text or line.text
    template = template_of(text)
    num_numbers, num_ranks = len(template.numbers), len(line.ranks)
    fitting = (one for one in line.varying_numbers if 0 <= one.position < num_numbers and len(one.texts) == num_ranks)
    return template, FoldMember(line.ranks, text, template.numbers, {one.position: one.texts for one in fitting})


def without_ranks(line: Line, ranks: Iterable[int]) -> Line | None:
    """Return a line as the other ranks wrote it; None: there are none."""
    excluded = set(ranks)
    remaining = tuple(rank for rank in line.ranks if rank not in excluded)
    if not remaining or len(remaining) == len(line.ranks):
        return line if remaining else None
    folded = None
    if line.varying_numbers:
        _, member = split_folded_line(line)
        members = [one for one in unfold(member.ranks, member.text, member.varying or {}) if one.ranks[0] in remaining]
        if len({template_of(one.text).key for one in members}) == 1:
            folded = fold(members, "ranges" if line.live else "all") or fold(members, "short")
    if folded is None:
        return msgspec.structs.replace(line, ranks=remaining)
    shown = line_of_fold(folded, line.stream, mergeable=True, live=line.live)
    return msgspec.structs.replace(shown, end=line.end)


def line_of_fold(folded: Fold, stream: str, *, mergeable: bool, live: bool = False) -> Line:
    """Convert a fold of lines to the `Line` to be sent."""
    assert stream in ("stdout", "stderr")
    if mergeable and folded.varying:
        text, varying = folded.first_text, folded.varying
        return Line(folded.ranks, stream, folded.text, live, first_text=text, varying_numbers=varying)  # type: ignore[arg-type]
    return Line(folded.ranks, stream, folded.text, live)  # type: ignore[arg-type]
