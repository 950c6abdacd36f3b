"""How folded things read: lines with their ranks, values, failures. Plain text with ANSI colours, and a little HTML.

Whoever shows something of many ranks (kernel, terminal, marimo, a repr) takes the words from here, so that they read
alike everywhere. Text that ranks wrote stays text: control sequences other than colours are made visible, and in HTML
everything is escaped but what an object itself gave as its HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshbook.errors import Failure, Released
from meshbook.fold.numbers import ANSI_ESCAPE, fold_texts
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import FoldedItem, Line, OutcomeGroup, Preview, RankDisplay

# Distinct values shown in text; more are counted. Above as many, values that differ in numbers only become a range.
MAX_SHOWN = 8
# Distinct values shown as HTML, which takes room: tables, figures.
MAX_SHOWN_HTML = 4
# Characters of an error's message in the header above its traceback, which has all of it.
MAX_HEADER_CHARS = 300

# Grey 118: JupyterLab does not know "dim", and draws bright black so dark that it cannot be told from text on white and
# cannot be read on black. This one has a contrast above 4 on both.
_DIM, _BOLD, _RESET = "\x1b[38;5;243m", "\x1b[1m", "\x1b[0m"
_ACCESS_HINT = "values[rank] shows one"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# What could move a terminal's cursor, change its title or hide text: C0 and C1 controls but tab and line end, and the
# marks that turn the direction of writing around.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LABEL_HTML = '<div class="meshbook-ranks" style="opacity:.6;font-size:smaller">'


def render_line(line: Line, world_ranks: Ranks, *, colour: bool = True) -> str:
    """A line, without its end, and a dim `[0-2] ` before it unless all ranks of the call said it."""
    text = sanitize(line.text, colour=colour)
    if line.ranks != tuple(world_ranks):
        prefix = f"[{format_ranks(line.ranks)}] "
        shown = _dim(prefix, colour)
        # A colour that the rank left on is not to run into what other ranks say.
        reset = _RESET if colour and "\x1b" in text else ""
        text = shown + text.replace("\n", f"\n{' ' * len(prefix)}") + reset
    return text


def render_values(
    parts: Iterable[OutcomeGroup], world_ranks: Ranks, *, limit: int = MAX_SHOWN, colour: bool = True
) -> str:
    """The values of a call, folded; "" if there are none.

    Equal on all ranks: the bare text, as on one rank. Else each distinct value with the ranks that hold it, ordered by
    lowest rank, at most `limit` of them. Where there are more, those that differ in numbers only become their range.
    Ranks without a value (a cell that ends in a statement or in None) are not named.
    """
    values = _distinct_values(parts)
    if not values:
        return ""
    entries = [(value.ranks, _value_text(value, colour)) for value in values]
    if len(entries) > limit:
        entries = fold_texts(entries)
    if len(entries) == 1 and entries[0][0] == tuple(world_ranks):
        return entries[0][1]
    return _render_blocks(entries, limit, colour)


def render_errors(
    failures: Sequence[Failure],
    succeeded: Sequence[int] = (),
    lost: Sequence[int] | None = None,
    *,
    released: Sequence[Released] = (),
    colour: bool = True,
) -> list[str]:
    """Lines of a traceback in which many ranks speak with one voice.

    For each failure the header `ranks 0-1,3: ZeroDivisionError: division by zero` and its one traceback; then who
    waited for those that failed, who ran to the end, and who was lost.
    """
    lines: list[str] = []
    for failure in failures:
        if lines:
            lines.append("")
        message = failure.evalue.split("\n", 1)[0]
        if len(message) > MAX_HEADER_CHARS:
            message = message[:MAX_HEADER_CHARS] + "…"
        whose = name_ranks(failure.ranks)
        title = f"{failure.ename}: {message}" if message else failure.ename
        lines.append(
            f"{_BOLD}{whose}:{_RESET} {sanitize(title)}" if colour else f"{whose}: {sanitize(title, colour=False)}"
        )
        lines.extend(sanitize(entry, colour=colour) for entry in failure.traceback)
    if released:
        lines.append(render_released(released))
    if succeeded:
        its = "its" if len(set(succeeded)) == 1 else "their"
        lines.append(f"{name_ranks(succeeded)} ran to {its} end")
    if lost:
        was = "was" if len(set(lost)) == 1 else "were"
        lines.append(f"{name_ranks(lost)} {was} lost")
    return lines


def render_released(released: Sequence[Released]) -> str:
    """`ranks 0,2-3 waited in all_reduce at line 4 and were released; their variables are kept`."""
    waited = "; ".join(f"{name_ranks(one.ranks)} waited in {one.where}" for one in released)
    if len(released) == 1:
        single = len(released[0].ranks) == 1
        return f"{waited} and {'was' if single else 'were'} released; {'its' if single else 'their'} variables are kept"
    return f"{waited}; they were released, and their variables are kept"


def render_values_html(parts: Iterable[OutcomeGroup], world_ranks: Ranks, *, limit: int = MAX_SHOWN_HTML) -> str | None:
    """The values of a call as HTML; None if no rank's value has an HTML form, or is an image that others do not share.

    Each distinct value is labelled with its ranks, unless all ranks hold the same; at most `limit`, the others are
    named. An object's own HTML is taken as it is, like in any notebook; all else is escaped.
    """
    values = _distinct_values(parts)
    everywhere = len(values) == 1 and values[0].ranks == tuple(world_ranks)
    # An image that all ranks share goes to the front end as it is.
    html_forms = [value.preview.html or (None if everywhere else _image_html(value.preview)) for value in values]
    if not any(html_forms):
        return None
    blocks: list[str] = []
    for value, shown in zip(values[:limit], html_forms, strict=False):
        if shown is None:
            shown = f"<pre>{html.escape(_value_text(value, colour=False))}</pre>"
        label = "" if everywhere else f"{_LABEL_HTML}{html.escape(name_ranks(value.ranks))}</div>"
        blocks.append(f'<div class="meshbook-value">{label}{shown}</div>')
    if len(values) > limit:
        not_shown = values[limit:]
        holders = name_ranks(rank for value in not_shown for rank in value.ranks)
        blocks.append(
            f"{_LABEL_HTML}{html.escape(f'{_more_values_text(len(not_shown))} on {holders}; {_ACCESS_HINT}')}</div>"
        )
    return "\n".join(blocks)


class LiveStatus:
    """What a reader keeps of lines that are still being written: progress bars' latest states.

    Feed it all items of a call in order; draw `text` where the output ends, again whenever `take` says that it changed.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def update(self, item: FoldedItem) -> bool:
        """Whether the item changed what is to be drawn. A live line itself is not ordinary output."""
        if isinstance(item, RankDisplay):
            return False
        printed = set(item.ranks)
        remaining: list[Line] = []
        for line in self._lines:
            ranks = line.ranks if line.stream != item.stream else tuple(r for r in line.ranks if r not in printed)
            if ranks:
                remaining.append(line if ranks == line.ranks else Line(ranks, line.stream, line.text, live=True))
        if item.live and item.text:
            remaining.append(item)
        before, self._lines = self._lines, sorted(remaining, key=lambda line: (line.ranks, line.stream))
        return before != self._lines

    def text(self, world_ranks: Ranks, *, colour: bool = True) -> str:
        """The live lines, each with its ranks, joined by line ends; "" when there are none."""
        return "\n".join(render_line(line, world_ranks, colour=colour) for line in self._lines)


def sanitize(text: str, *, colour: bool = True) -> str:
    """Text of a rank, safe to be shown: colours stay unless told otherwise, other control characters become visible."""
    if text.isascii() and text.isprintable():
        return text
    if "\x1b" in text:
        pieces = _COLOUR.split(text)
        colours = _COLOUR.findall(text) if colour else [""] * (len(pieces) - 1)
        cleaned = [_replace_controls(ANSI_ESCAPE.sub("", piece)) for piece in pieces]
        return "".join(piece + colour for piece, colour in zip(cleaned, [*colours, ""], strict=True))
    return _replace_controls(text)


def plain_text(text: str) -> str:
    """Text without colours and other control sequences."""
    return sanitize(text, colour=False)


# ---------------------------------------------------------------------------------------------------------------------


class _DistinctValue(NamedTuple):
    """A distinct value and who holds it."""

    ranks: Ranks
    preview: Preview
    identical: bool  # False: values that differ where their texts do not


def _distinct_values(parts: Iterable[OutcomeGroup]) -> list[_DistinctValue]:
    """Distinct values by what a reader can tell apart. Ordered by lowest rank."""
    by_appearance: dict[tuple[str, str, str | None, str | None], dict[str | None, list[tuple[Ranks, Preview]]]] = {}
    for part in parts:
        if part.outcome.status != "ok" or part.outcome.value is None:
            continue
        preview = part.outcome.value.preview
        appearance = (preview.type, preview.text, preview.html, _image_html(preview))
        by_appearance.setdefault(appearance, {}).setdefault(preview.digest, []).append((part.ranks, preview))
    values: list[_DistinctValue] = []
    for by_digest in by_appearance.values():
        several = [one for group in by_digest.values() for one in group]
        ranks = tuple(sorted(rank for rank_set, _ in several for rank in rank_set))
        values.append(_DistinctValue(ranks, several[0][1], len(by_digest) == 1))
    return sorted(values, key=lambda one: one.ranks)


def _image_html(preview: Preview) -> str | None:
    """A value's picture as HTML."""
    if "image/svg+xml" in preview.data:
        return str(preview.data["image/svg+xml"])
    for mime in ("image/png", "image/jpeg", "image/gif", "image/webp"):
        if mime in preview.data:
            return f'<img src="data:{mime};base64,{html.escape("".join(str(preview.data[mime]).split()))}"/>'
    return None


def _value_text(value: _DistinctValue, colour: bool) -> str:
    text = sanitize(value.preview.text, colour=colour)
    return text if value.identical else f"{text}  {_dim('(the ranks differ in what is not shown)', colour)}"


def _render_blocks(entries: Sequence[tuple[Ranks, str]], limit: int, colour: bool) -> str:
    """One block for each entry, its ranks before it, texts in one column."""
    shown = entries[:limit]
    labels = [f"[{format_ranks(ranks)}] " for ranks, _ in shown]
    width = max(map(len, labels))
    blocks = [
        _dim(label, colour) + " " * (width - len(label)) + text.replace("\n", "\n" + " " * width)
        for label, (_, text) in zip(labels, shown, strict=True)
    ]
    if len(entries) > limit:
        blocks.append(f"… {_more_values_text(len(entries) - limit)}; {_ACCESS_HINT}")
    return "\n".join(blocks)


def _more_values_text(count: int) -> str:
    return f"{count:,} more distinct value{'' if count == 1 else 's'}"


def _dim(text: str, colour: bool) -> str:
    return f"{_DIM}{text}{_RESET}" if colour else text


def _replace_controls(text: str) -> str:
    """Control characters as pictures of themselves: the escape character as a picture of `ESC`, and so on."""
    return _CONTROL_CHARS.sub(lambda found: _control_picture(ord(found[0])), text)


def _control_picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
