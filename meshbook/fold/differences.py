"""How numbers that differ between ranks are shown in the one line that stands for their lines.

Identifiers (a device, a port, a version, a path, a shape, a count) have no statistics, so what each rank wrote is
shown: `cuda:{0,1,1,3}` in the order of the ranks, or `1000 (rank 1: 999)` if most ranks agree. A range is shown only
for measurements of more than four distinct values: `loss 2.31…2.35 (median 2.33, rank 3: 97.4)`, and for each rank's
own number: `rank 0…7`. Where neither is possible in the space of a line, the lines are not folded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import VaryingNumber

# As many ranks have each its own number listed.
MAX_LISTED = 8
# As many distinct values are named with their ranks, beside the most frequent one.
MAX_NAMED = 3
# Characters by which a line may grow.
MAX_ADDED_CHARS = 100
# A value further from the median than this many median deviations is named with its rank. For normal noise the median
# deviation is 0.67 standard deviations, so this is 6.7 standard deviations.
OUTLIER_DEVIATIONS = 10.0

_UNIT = re.compile(r"(?:[A-Za-zµ%°]{1,6}(?:/[A-Za-z]{1,4})?)?")  # GB, %, it/s
# After an integer that was measured or counted in such numbers that nobody looks at each.
_UNIT_OF_MEASUREMENT = re.compile(
    r" ?(?:[KMGTkmgt]i?B|[KMG]?[bB]ytes|[num\u00b5]?s|sec|min|h|[KMG]?Hz|W|V|°?C|[KMGTP]?FLOP(?:S|/s)"
    r"|[A-Za-z]{1,7}/s(?:ec)?|tokens|samples)\b|%"
)
# What comes before a number that is a name, whatever its form.
_NAMED_BY = re.compile(
    r"(?i)\b(?:pid|port|rank|seed|id|uid|gid|version|cuda|device|node|host|job|epoch|step)[ =:#]*$|\bv$"
)
_FRACTION = re.compile(r"[.eE]|(?i:nan|inf)")
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?")
# A number is no number by itself in 10.0.0.4, 2.13.0, 2026-11-22, 13:00:03, 3f2a91c.
_JOINED_BEFORE, _JOINED_AFTER = re.compile(r"[0-9][.:-]$|[0-9a-f][a-f]$"), re.compile(r"[.:-][0-9]|[a-f][0-9a-f]")
# What words consist of beside letters and digits. A comma too, between digits.
_JOINING = frozenset("_.:/+-@#~")
# A progress bar: tqdm's blocks, rich's and pip's rules; and other texts that will change, with a part or a share.
_BAR = re.compile(r"[0-9]%\||[\u2501\u2578\u257a\u2580-\u259f]")
_PROGRESS = re.compile(rf"[0-9](?:%|/[0-9])|{_BAR.pattern}")
# A row of a table: a rule between its columns, or numbers in columns.
_TABLE_ROW = re.compile(r"[│┃║╎┆┊]|^\s*\||[0-9] {2,}[-+]?[0-9.]+ {2,}[-+]?[0-9]")


def show_all(text: str, spans: Sequence[tuple[int, int]], ranks: Ranks, varying: Sequence[VaryingNumber]) -> str | None:
    """Return the text of all ranks as one; None if what ranks wrote is better shown line by line.

    Args:
        text: as the first rank wrote it.
        spans: of all numbers in it.
        varying: the numbers that differ, in order.
    """
    if _BAR.search(text):
        return show_ranges(text, spans, ranks, varying)
    if _TABLE_ROW.search(text):
        return None
    shown = _show(text, spans, ranks, varying, shorten=False)
    return shown if shown is not None and len(shown) <= len(text) + MAX_ADDED_CHARS else None


def show_in_short(text: str, spans: Sequence[tuple[int, int]], ranks: Ranks, varying: Sequence[VaryingNumber]) -> str:
    """The same, whatever it leaves out: `{31, 30, 32, … 13 more}`."""
    shown = _show(text, spans, ranks, varying, shorten=True)
    assert shown is not None  # as it may be shortened
    return shown


def show_ranges(text: str, spans: Sequence[tuple[int, int]], ranks: Ranks, varying: Sequence[VaryingNumber]) -> str:
    """Return the text with a range for each number that differs, if it is one of progress; else as `show_in_short`."""
    if not _PROGRESS.search(text):
        return show_in_short(text, spans, ranks, varying)
    parts = ((_Part(*spans[one.position], one.texts), *_range(ranks, one.texts, with_median=False)) for one in varying)
    return _replace(text, parts)


class _Part(NamedTuple):
    """A part of the text that differs, and what each rank wrote there."""

    start: int
    stop: int
    words: Sequence[str]
    is_number: bool = True


def _show(
    text: str, spans: Sequence[tuple[int, int]], ranks: Ranks, varying: Sequence[VaryingNumber], *, shorten: bool
) -> str | None:
    found = []
    for part in _parts(text, spans, varying):
        shown = _show_part(text, part, ranks)
        if shown is None:
            if not shorten:
                return None
            few = list(dict.fromkeys(part.words))[: MAX_NAMED + 1]
            shown = f"{{{', '.join(few)}, … {len(part.words) - len(few)} more}}", ""
        found.append((part, *shown))
    return _replace(text, found)


def _parts(text: str, spans: Sequence[tuple[int, int]], varying: Sequence[VaryingNumber]) -> Iterator[_Part]:
    """Yield what differs: numbers, or the words that they are parts of: an address, a version, a path."""
    remaining = [(*spans[one.position], one.texts) for one in varying]
    while remaining:
        start, stop, words = remaining.pop(0)
        token = _word_around(text, start, stop)
        if token == (start, stop) or "\x1b" in text:
            yield _Part(start, stop, words)
            continue
        others = [one for one in remaining if one[1] <= token[1]]
        is_joined = _JOINED_BEFORE.search(text[token[0] : start]) or _JOINED_AFTER.match(text[stop : token[1]])
        if not others and not is_joined:
            yield _Part(start, stop, words)
            continue
        del remaining[: len(others)]
        inside = [(start, stop, words), *others]
        yield _Part(*token, [_rewrite(text, token, inside, at) for at in range(len(words))], is_number=False)


def _word_around(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the span of the word that a number is in."""
    while start and _is_in_word(text, start - 1):
        start -= 1
    while stop < len(text) and _is_in_word(text, stop):
        stop += 1
    return start, stop


def _is_in_word(text: str, at: int) -> bool:
    char = text[at]
    return (
        char.isalnum()
        or char in _JOINING
        or (char == "," and text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit())
    )


def _rewrite(text: str, token: tuple[int, int], numbers: Sequence[tuple[int, int, Sequence[str]]], index: int) -> str:
    """Return a word of the text as one rank wrote it."""
    pieces: list[str] = []
    done = token[0]
    for start, stop, words in numbers:
        pieces += text[done:start], words[index]
        done = stop
    return "".join((*pieces, text[done : token[1]]))


def _show_part(text: str, part: _Part, ranks: Ranks) -> tuple[str, str] | None:
    """Return what is shown in the place of a part, and a note behind it; None if it is too much."""
    words = part.words
    before = text[max(0, part.start - 12) : part.start]
    if _are_addresses(words) and before.endswith(" at "):
        return "0x…", ""
    is_inside = text[part.start - 1 : part.start] in _JOINING or text[part.stop : part.stop + 1] in _JOINING
    is_listed = len(words) <= MAX_LISTED
    if _are_own_ranks(words, ranks) and not (is_inside and is_listed):
        return f"{words[0]}…{words[-1]}", ""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    usual = max(counts, key=counts.__getitem__)
    are_few = len(counts) <= MAX_NAMED + 1
    if not are_few and _is_measured(text, part, before):
        return _range(ranks, words, with_median=part.is_number)
    if are_few and (not is_listed or 2 * counts[usual] > len(words) > 2):
        return usual, _name(ranks, words, [index for index, word in enumerate(words) if word != usual])
    if is_listed:
        between = "," if is_inside and not any("," in word for word in words) else ", "
        return "{" + between.join(words) + "}", ""
    return None


def _are_addresses(words: Sequence[str]) -> bool:
    return all(word[:2] in ("0x", "0X") for word in words)


def _are_own_ranks(words: Sequence[str], ranks: Ranks) -> bool:
    """Whether each rank wrote its own number, and none is left out between them."""
    is_range = words[0] == str(ranks[0]) and len(ranks) == ranks[-1] - ranks[0] + 1
    return is_range and [*words] == [*map(str, ranks)]


def _is_measured(text: str, part: _Part, before: str) -> bool:
    if not part.is_number:
        return all(_CLOCK.fullmatch(word) for word in part.words)
    if _NAMED_BY.search(before) or _are_addresses(part.words):
        return False
    return any(_FRACTION.search(word) for word in part.words) or bool(_UNIT_OF_MEASUREMENT.match(text, part.stop))


def _replace(text: str, parts: Iterable[tuple[_Part, str, str]]) -> str:
    pieces: list[str] = []
    done = 0
    for part, shown, note in parts:
        pieces += text[done : part.start], shown
        done = part.stop
        if note:  # behind the unit: 4.1…4.3GB (rank 2: 9.9)
            unit = _UNIT_OF_MEASUREMENT.match(text, part.stop) or _UNIT.match(text, part.stop)
            done = unit.end() if unit else part.stop
            pieces += text[part.stop : done], f" ({note})"
    pieces.append(text[done:])
    return "".join(pieces)


# ---- ranges


def _range(ranks: Ranks, words: Sequence[str], *, with_median: bool) -> tuple[str, str]:
    """Return the range of what ranks wrote, and a note with the median and outliers: `2.31…2.35`, `rank 2: 97.4`.

    Infinite values and nan are always named.
    """
    values = [_parse_number(word) for word in words]
    finite = [index for index, value in enumerate(values) if value - value == 0.0]
    if not finite:
        if all(_CLOCK.fullmatch(word) for word in words):
            return f"{min(words)}…{max(words)}", ""
        usual = max(words, key=words.count)
        return usual, _name(ranks, words, [index for index, word in enumerate(words) if word != usual])
    outliers = {finite[index] for index in _find_outliers([values[index] for index in finite])}
    inside = sorted((index for index in finite if index not in outliers), key=values.__getitem__)
    low, high = inside[0], inside[-1]
    notes = [_name(ranks, words, sorted(set(range(len(words))).difference(inside)))]
    if values[low] == values[high]:
        return words[low], notes[0]
    if with_median:
        notes.insert(0, f"median {words[inside[(len(inside) - 1) // 2]]}")
    return f"{words[low]}…{words[high]}", ", ".join(note for note in notes if note)


def _parse_number(word: str) -> float:
    try:
        return float(word.replace(",", "") if "," in word else word)
    except ValueError:  # not a number: a word, or a folded line from other software
        return math.nan


def _find_outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of values far from all others; empty if they are not few."""
    count = len(values)
    if count < 3:
        return []
    median = _median(sorted(values))
    distances = [abs(value - median) for value in values]
    limit = OUTLIER_DEVIATIONS * _median(sorted(distances))
    outliers = [index for index, distance in enumerate(distances) if distance > limit]
    if len(outliers) > max(1, count // 8) or len({values[index] for index in outliers}) > MAX_NAMED:
        return []
    return outliers


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else ordered[middle - 1] / 2 + ordered[middle] / 2


def _name(ranks: Ranks, words: Sequence[str], indices: Sequence[int]) -> str:
    by_word: dict[str, list[int]] = {}
    for index in indices:
        by_word.setdefault(words[index], []).append(ranks[index])
    return ", ".join(f"{name_ranks(whose)}: {word}" for word, whose in by_word.items())
