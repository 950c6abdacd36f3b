"""Fold texts that are equal except for their numbers.

`template_of` splits a text into its numbers and the rest; texts with the same key differ at most in numbers. `fold`
makes one text of several: a number that is equal everywhere stays, one that differs becomes the range `2.31…2.35`, with
outliers named. Numbers are shown as some rank wrote them.

Folding folds is exact: a `Fold` carries what each rank wrote where ranks differ, so folding the folds of hosts gives
the same result as folding all ranks at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import VaryingNumber

# Represents a number in a key, so it must not occur in the text.
PLACEHOLDER = "\4"
# Longer texts are compared verbatim: a range in the middle of a page of text is of no use, and a dump of an array would
# be split into thousands of numbers.
MAX_TEMPLATE_CHARS = 2000
# A line in which more numbers differ is a row of data, not a message; ranges would hide the data. tqdm's bar has 7
# numbers that may differ.
MAX_VARYING = 8
# A value further from the median than this many median deviations is named with its rank. For normal noise the median
# deviation is 0.67 standard deviations, so this is 6.7 standard deviations.
OUTLIER_DEVIATIONS = 10.0
# More outliers than this are not named; the range includes them.
MAX_OUTLIERS = 3

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
_UNIT = re.compile(r"(?:[A-Za-zµ%°]{1,6}(?:/[A-Za-z]{1,4})?)?")  # GB, %, it/s


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


def fold(members: Sequence[FoldMember], max_varying: int | None = MAX_VARYING) -> Fold | None:
    """Fold texts with one key; None if more than `max_varying` numbers differ (None: no limit).

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
    if max_varying is not None and len(positions) > max_varying:
        return None
    varying = tuple(
        VaryingNumber(position, _collect_written(members, ranks, position)) for position in sorted(positions)
    )
    return Fold(ranks, _render_ranges(first.text, ranks, varying), first.text, varying)


def fold_all(members: Sequence[FoldMember], max_varying: int | None = MAX_VARYING) -> list[Fold]:
    """Fold texts with one key into one, or, if too many numbers differ, into one per distinct text."""
    single = fold(members, max_varying)
    if single is not None:
        return [single]
    same: dict[object, list[FoldMember]] = {}
    for one in members:
        same.setdefault(one.ranks if one.varying else one.text, []).append(one)
    return [each for group in same.values() if (each := fold(group, None)) is not None]


def fold_texts(texts: Iterable[tuple[Ranks, str]], max_varying: int | None = MAX_VARYING) -> list[tuple[Ranks, str]]:
    """Fold texts of disjoint ranks that differ at most in numbers. Ordered by lowest rank."""
    members_by_key: dict[str, list[FoldMember]] = {}
    for ranks, text in sorted(texts, key=lambda pair: pair[0]):
        template = template_of(text)
        members_by_key.setdefault(template.key, []).append(FoldMember(ranks, text, template.numbers))
    folded = [one for members in members_by_key.values() for one in fold_all(members, max_varying)]
    return sorted(((one.ranks, one.text) for one in folded), key=lambda pair: pair[0])


def format_range(ranks: Ranks, written: Sequence[str]) -> tuple[str, str]:
    """Return the range of what ranks wrote at one position, and a note that names outliers ("" if there are none).

    `("2.31…2.35", "(rank 2: 97.4)")`. Infinite values and nan are always named. Addresses are not informative: `0x…`.
    """
    if written.count(written[0]) == len(written):
        return written[0], ""
    if any(word[:2] in ("0x", "0X") for word in written):
        return "0x…", ""
    values = [_parse_number(word) for word in written]
    finite = [index for index, value in enumerate(values) if value - value == 0.0]
    if not finite:
        usual = max(written, key=written.count)
        return usual, _outlier_note(ranks, written, [index for index, word in enumerate(written) if word != usual])
    outliers = _find_outliers([values[index] for index in finite])
    named = {finite[index] for index in outliers}
    inside = [index for index in finite if index not in named]
    low = min(inside, key=values.__getitem__)
    high = max(inside, key=values.__getitem__)
    core = written[low] if values[low] == values[high] else f"{written[low]}…{written[high]}"
    outside = set(range(len(values))).difference(inside)
    return core, _outlier_note(ranks, written, sorted(outside))


def _parse_number(word: str) -> float:
    try:
        return float(word.replace(",", "") if "," in word else word)
    except ValueError:  # not a number: a folded line from other software
        return math.nan


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


def _render_ranges(text: str, ranks: Ranks, varying: Sequence[VaryingNumber]) -> str:
    """Return the text with ranges for the numbers that differ."""
    spans = _number_spans(text)
    pieces: list[str] = []
    done = 0
    for differing in varying:
        start, stop = spans[differing.position]
        core, note = format_range(ranks, differing.texts)
        pieces += text[done:start], core
        done = stop
        if note:  # after the unit: 4.1…4.3GB (rank 2: 9.9)
            done = _UNIT.match(text, stop).end()  # type: ignore[union-attr]  # matches the empty string too
            pieces += text[stop:done], " ", note
    pieces.append(text[done:])
    return "".join(pieces)


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


def _find_outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of values far from all others; empty if they are not few."""
    count = len(values)
    if count < 3:
        return []
    median = _median(sorted(values))
    distances = [abs(value - median) for value in values]
    limit = OUTLIER_DEVIATIONS * _median(sorted(distances))
    outliers = [index for index, distance in enumerate(distances) if distance > limit]
    if len(outliers) > max(1, count // 8) or len({values[index] for index in outliers}) > MAX_OUTLIERS:
        return []
    return outliers


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else ordered[middle - 1] / 2 + ordered[middle] / 2


def _outlier_note(ranks: Ranks, written: Sequence[str], indices: Sequence[int]) -> str:
    if not indices:
        return ""
    by_word: dict[str, list[int]] = {}
    for index in indices:
        by_word.setdefault(written[index], []).append(ranks[index])
    return "(" + ", ".join(f"{name_ranks(whose)}: {word}" for word, whose in by_word.items()) + ")"
