"""Fold texts that are equal except for their numbers.

`template_of` splits a text into its numbers and the rest; texts with the same key differ at most in numbers. `fold`
makes one text of several: a number that is equal everywhere stays, and `differences` shows one that differs. Numbers
are shown as some rank wrote them.

Folding folds is exact: a `Fold` carries what each rank wrote where ranks differ, so folding the folds of hosts gives
the same result as folding all ranks at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from meshbook.fold.differences import show_all, show_in_short, show_ranges
from meshbook.ids import Ranks
from meshbook.wire.messages import VaryingNumber

# Represents a number in a key, so it must not occur in the text.
PLACEHOLDER = "\4"
# Longer texts are compared verbatim: a range in the middle of a page of text is of no use, and a dump of an array would
# be split into thousands of numbers.
MAX_TEMPLATE_CHARS = 2000
# A line in which more numbers differ is a row of data, not a message. tqdm's bar has 7 numbers that may differ.
MAX_VARYING = 8

# What may follow the leading digits.
_DIGITS = r"(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+|\.(?= *[0-9\]-]))?(?:[eE][-+]?[0-9]+)?"
# A sign belongs to its number unless it follows a word, a number or a closing bracket: `x -3`, but `2024-01-02`, `a-1`.
# The pattern starts with a character set, so that the search skips other characters: 3 times as fast as with an
# optional sign in front.
_NUMBER = re.compile(rf"([-+0-9](?:(?<=[0-9])|(?<![\w)\].%][-+])[0-9])[0-9]*{_DIGITS})")
# Also matches words that are numbers only in some lines: nan, inf, addresses. Slower, so used only where those may
# occur.
_NUMBER_OR_WORD = re.compile(
    rf"((?:(?<![\w)\].%])[-+])?(?:0[xX][0-9a-fA-F]+|[0-9]+{_DIGITS}|(?<!\w)(?i:nan|inf|infinity)(?!\w)))"
)
ANSI_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# Characters of progress bars: tqdm's blocks, rich's and pip's rules, ASCII of Keras and others.
_BAR_CHARS = re.compile(r"[=#>.\-─━╸╺▀-▟\s]+")


class TextTemplate(NamedTuple):
    """A text split into its numbers and the rest."""

    key: str  # the text without numbers, ANSI codes and (if it has numbers) spaces, which pad them
    numbers: tuple[str, ...]  # as written, in order


class FoldMember(NamedTuple):
    """An input of a fold: one rank's text, or another fold."""

    ranks: Ranks
    text: str  # as the first of the ranks wrote it
    numbers: tuple[str, ...]
    varying: Mapping[int, tuple[str, ...]] | None = None  # number's position -> what each rank wrote; None: all equal


class Fold(NamedTuple):
    """Several texts as one."""

    ranks: Ranks
    text: str  # for display, with ranges
    first_text: str  # as the first rank wrote it; "" if no number differs
    varying: tuple[VaryingNumber, ...]


def template_of(text: str) -> TextTemplate:
    """Split a text into its numbers and the rest."""
    if "\x1b" in text:
        text = ANSI_ESCAPE.sub("", text)
    if PLACEHOLDER in text:
        text = text.replace(PLACEHOLDER, "\N{REPLACEMENT CHARACTER}")
    if len(text) > MAX_TEMPLATE_CHARS:
        return TextTemplate(text, ())
    parts = _number_pattern(text).split(text)
    if len(parts) == 1:
        return TextTemplate(text, ())
    return TextTemplate(PLACEHOLDER.join(parts[::2]).replace(" ", ""), tuple(parts[1::2]))


def live_template_of(text: str) -> TextTemplate:
    """Return the template of a progress bar, without the drawn bar, which only repeats its numbers."""
    template = template_of(text)
    return TextTemplate(_BAR_CHARS.sub("", template.key), template.numbers) if template.numbers else template


def make_member(ranks: Ranks, text: str) -> FoldMember:
    """Return a fold member for a text as written."""
    return FoldMember(ranks, text, template_of(text).numbers)


# How differing numbers are shown: each, or not folded; each, or in short; as ranges (text that will change).
Showing = Literal["all", "short", "ranges"]


def fold(members: Sequence[FoldMember], showing: Showing = "all") -> Fold | None:
    """Fold texts with one key; None if, with "all", what ranks wrote does not go into one line.

    Args:
        members: at least one, of disjoint ranks; the fold is formatted like the text of the first one.
    """
    first = members[0]
    ranks = first.ranks if len(members) == 1 else tuple(sorted(rank for one in members for rank in one.ranks))
    positions = {
        position
        for position, column in enumerate(zip(*(one.numbers for one in members), strict=True))
        if column.count(column[0]) != len(column)
    }
    for one in members:
        if one.varying:
            positions.update(one.varying)
    if not positions:
        return Fold(ranks, first.text, "", ())
    if showing != "short" and len(positions) > MAX_VARYING:
        return None
    varying = tuple(
        VaryingNumber(position, _collect_written(members, ranks, position)) for position in sorted(positions)
    )
    show = {"all": show_all, "short": show_in_short, "ranges": show_ranges}[showing]
    text = show(first.text, _number_spans(first.text), ranks, varying)
    return None if text is None else Fold(ranks, text, first.text, varying)


def fold_all(members: Sequence[FoldMember], showing: Showing = "all") -> list[Fold]:
    """Fold texts with one key into one, or, if that is not possible, into one per distinct text."""
    single = fold(members, showing)
    if single is not None:
        return [single]
    same: dict[object, list[FoldMember]] = {}
    for one in members:
        same.setdefault(one.ranks if one.varying else one.text, []).append(one)
    return [each for group in same.values() if (each := fold(group, "short")) is not None]


def fold_texts(texts: Iterable[tuple[Ranks, str]]) -> list[tuple[Ranks, str]]:
    """Fold texts of disjoint ranks that differ at most in numbers. Ordered by lowest rank."""
    members_by_key: dict[str, list[FoldMember]] = {}
    for ranks, text in sorted(texts, key=lambda pair: pair[0]):
        template = template_of(text)
        members_by_key.setdefault(template.key, []).append(FoldMember(ranks, text, template.numbers))
    folded = [one for members in members_by_key.values() for one in fold_all(members)]
    return sorted(((one.ranks, one.text) for one in folded), key=lambda pair: pair[0])


def unfold(ranks: Ranks, first_text: str, varying: Mapping[int, tuple[str, ...]]) -> list[FoldMember]:
    """Return what each rank of a fold wrote, in order of ranks, formatted like the text of the first one."""
    spans = _number_spans(first_text)
    members = []
    for index, rank in enumerate(ranks):
        pieces: list[str] = []
        done = 0
        for position, texts in sorted(varying.items()):
            start, stop = spans[position]
            pieces += first_text[done:start], texts[index]
            done = stop
        members.append(make_member((rank,), "".join((*pieces, first_text[done:]))))
    return members


def _number_pattern(text: str) -> re.Pattern[str]:
    lower = text.lower()
    return _NUMBER_OR_WORD if "nan" in lower or "inf" in lower or "0x" in lower else _NUMBER


def _collect_written(members: Sequence[FoldMember], ranks: Ranks, position: int) -> tuple[str, ...]:
    """Return what each rank of all members wrote at one position, in order of ranks."""
    words: list[str] = []
    for one in members:
        own = one.varying.get(position) if one.varying else None
        words += own or [one.numbers[position]] * len(one.ranks)
    order = [rank for one in members for rank in one.ranks]
    if order != list(ranks):  # hosts with interleaved ranks
        by_rank = dict(zip(order, words, strict=True))
        words = [by_rank[rank] for rank in ranks]
    return tuple(words)


def _number_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of the numbers in a text, counting ANSI codes."""
    if "\x1b" not in text:
        return [found.span() for found in _number_pattern(text).finditer(text)]
    offsets: list[int] = []  # of each visible character in the text
    visible: list[str] = []
    done = 0
    for code in ANSI_ESCAPE.finditer(text):
        offsets.extend(range(done, code.start()))
        visible.append(text[done : code.start()])
        done = code.end()
    offsets.extend(range(done, len(text)))
    visible.append(text[done:])
    plain = "".join(visible)
    return [(offsets[found.start()], offsets[found.end() - 1] + 1) for found in _number_pattern(plain).finditer(plain)]
