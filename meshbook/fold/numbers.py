"""Text that is equal but for its numbers: how to tell, and how to show it as one.

`template_of` parts a text into its numbers and the rest; texts with one key differ in numbers at most. `fold` makes one
text of several: a number that is the same everywhere stays as it is, one that differs becomes the range `2.31…2.35`,
with those named that are far from it. The written form of numbers is kept: what is shown was written by some rank.

Folding folds is exact: a `Fold` carries what each rank wrote where ranks differ, so folding hosts' folds gives what
folding all ranks at once would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import VaryingNumber

# Stands for a number in a key, so it must not be in the text.
PLACEHOLDER = "\4"
# Texts longer than this are compared as they are: nobody reads a range in the middle of a page of text, and a dump of
# an array would be parted into thousands of numbers.
MAX_TEMPLATE_CHARS = 2000
# A line in which more numbers than this differ is a row of data, not a message with figures in it; ranges would hide
# the data. tqdm's bar has 7 numbers that may differ.
MAX_VARYING = 8
# A value further from the median than this many median deviations is named with its rank. For normal noise the median
# deviation is 0.67 standard deviations, so this is 6.7 of those.
OUTLIER_DEVIATIONS = 10.0
# More far values than this are not named one by one; the range takes them in.
MAX_OUTLIERS = 3

_DIGITS = r"(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+|\.(?= *[0-9\]-]))?(?:[eE][-+]?[0-9]+)?"  # what may follow the first ones
# A sign belongs to its number unless it follows a word, a number or a closing bracket: `x -3`, but `2024-01-02`, `a-1`.
# The pattern starts with a set of characters, so that the search skips what is not in it: 3 times the speed of an
# optional sign in front.
_NUMBER = re.compile(rf"([-+0-9](?:(?<=[0-9])|(?<![\w)\].%][-+])[0-9])[0-9]*{_DIGITS})")
# The same, and what is a number only in some lines: nan, inf, addresses. Slower, so used where those may be.
_NUMBER_OR_WORD = re.compile(
    rf"((?:(?<![\w)\].%])[-+])?(?:0[xX][0-9a-fA-F]+|[0-9]+{_DIGITS}|(?<!\w)(?i:nan|inf|infinity)(?!\w)))"
)
ANSI_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# What progress bars are drawn with: tqdm's blocks, rich's and pip's rules, Keras's and others' ASCII.
_BAR_CHARS = re.compile(r"[=#>.\-─━╸╺▀-▟\s]+")
_UNIT = re.compile(r"(?:[A-Za-zµ%°]{1,6}(?:/[A-Za-z]{1,4})?)?")  # GB, %, it/s


class TextTemplate(NamedTuple):
    """A text parted into its numbers and the rest."""

    key: str  # the text without numbers, ANSI codes and (where it has numbers) spaces, which pad them
    numbers: tuple[str, ...]  # as written, in order


class FoldMember(NamedTuple):
    """A text that ranks said, on its way into a fold: one rank's line, or another fold."""

    ranks: Ranks
    text: str  # as the first of the ranks wrote it
    numbers: tuple[str, ...]
    varying: Mapping[int, tuple[str, ...]] | None = None  # place of a number to what each rank wrote; None: all equal


class Fold(NamedTuple):
    """Several texts as one."""

    ranks: Ranks
    text: str  # to be shown, with ranges
    first_text: str  # as the first rank wrote it; "" where no number differs
    varying: tuple[VaryingNumber, ...]


def template_of(text: str) -> TextTemplate:
    """Part a text into its numbers and the rest."""
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
    """The same for a progress bar, whose drawn length says nothing that its numbers do not say."""
    template = template_of(text)
    return TextTemplate(_BAR_CHARS.sub("", template.key), template.numbers) if template.numbers else template


def make_member(ranks: Ranks, text: str) -> FoldMember:
    """A text as it was written."""
    return FoldMember(ranks, text, template_of(text).numbers)


def fold(members: Sequence[FoldMember], max_varying: int | None = MAX_VARYING) -> Fold | None:
    """Texts of one key as one text; None if more than `max_varying` numbers differ (None: as many as there are).

    Args:
        members: at least one, of disjoint ranks; the first one's text is what the fold is written like.
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
    """Texts of one key as one text, or, where too many numbers differ, those that are wholly equal as one each."""
    single = fold(members, max_varying)
    if single is not None:
        return [single]
    same: dict[object, list[FoldMember]] = {}
    for one in members:
        same.setdefault(one.ranks if one.varying else one.text, []).append(one)
    return [each for group in same.values() if (each := fold(group, None)) is not None]


def fold_texts(texts: Iterable[tuple[Ranks, str]], max_varying: int | None = MAX_VARYING) -> list[tuple[Ranks, str]]:
    """Texts of disjoint ranks, those that differ in numbers at most made one. Ordered by lowest rank."""
    members_by_key: dict[str, list[FoldMember]] = {}
    for ranks, text in sorted(texts, key=lambda pair: pair[0]):
        template = template_of(text)
        members_by_key.setdefault(template.key, []).append(FoldMember(ranks, text, template.numbers))
    folded = [one for members in members_by_key.values() for one in fold_all(members, max_varying)]
    return sorted(((one.ranks, one.text) for one in folded), key=lambda pair: pair[0])


def format_range(ranks: Ranks, written: Sequence[str]) -> tuple[str, str]:
    """What ranks wrote in one place, as one: the range, and the note that names who is far from it ("" if nobody is).

    `("2.31…2.35", "(rank 2: 97.4)")`. Infinite values and nan are always named. Addresses say nothing to anyone: `0x…`.
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
    except ValueError:  # not a number: another program's idea of a folded line
        return math.nan


def _number_pattern(text: str) -> re.Pattern[str]:
    lower = text.lower()
    return _NUMBER_OR_WORD if "nan" in lower or "inf" in lower or "0x" in lower else _NUMBER


def _collect_written(members: Sequence[FoldMember], ranks: Ranks, position: int) -> tuple[str, ...]:
    """What each rank of all members wrote in one place, in order of ranks."""
    words: list[str] = []
    for one in members:
        own = one.varying.get(position) if one.varying else None
        words += own or [one.numbers[position]] * len(one.ranks)
    order = [rank for one in members for rank in one.ranks]
    if order != list(ranks):  # hosts that hold ranks in turn
        by_rank = dict(zip(order, words, strict=True))
        words = [by_rank[rank] for rank in ranks]
    return tuple(words)


def _render_ranges(text: str, ranks: Ranks, varying: Sequence[VaryingNumber]) -> str:
    """The text with ranges for the numbers that differ."""
    spans = _number_spans(text)
    pieces: list[str] = []
    done = 0
    for differing in varying:
        start, stop = spans[differing.position]
        core, note = format_range(ranks, differing.texts)
        pieces += text[done:start], core
        done = stop
        if note:  # after the unit: 4.1…4.3GB (rank 2: 9.9)
            done = _UNIT.match(text, stop).end()  # type: ignore[union-attr]  # it matches the empty string too
            pieces += text[stop:done], " ", note
    pieces.append(text[done:])
    return "".join(pieces)


def _number_spans(text: str) -> list[tuple[int, int]]:
    """Where the numbers of a text are, ANSI codes counted in."""
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
    """Places of the few values that lie far from all others; none if they are not few."""
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
