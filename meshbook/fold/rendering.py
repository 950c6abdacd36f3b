"""Render folded lines with their ranks, values and failures: plain text with ANSI colours, and a little HTML.

All front ends (kernel, terminal, marimo, a repr) use these functions, so that output reads alike everywhere. Text of
ranks stays text: control sequences other than colours are made visible, and in HTML everything is escaped except an
object's own HTML representation.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshbook.errors import Failure, Released
from meshbook.fold.device_errors import dead_context_note
from meshbook.fold.numbers import ANSI_ESCAPE, fold_texts
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import Line, OutcomeGroup, Preview

# Distinct values shown as text; further ones are counted. If there are more, values that differ only in numbers become
# a range.
MAX_SHOWN = 8
# Distinct values shown as HTML, which takes more space: tables, figures.
MAX_SHOWN_HTML = 4
# Characters of an error message in the header above its traceback, which has the complete message.
MAX_HEADER_CHARS = 300

# Grey 118: JupyterLab ignores "dim", and renders bright black too dark to distinguish from text on white or to read on
# black. This grey has a contrast above 4 on both.
_DIM, _BOLD, _RESET = "\x1b[38;5;243m", "\x1b[1m", "\x1b[0m"
_ACCESS_HINT = "values[rank] shows one"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Characters that could move a terminal's cursor, change its title or hide text: C0 and C1 controls except tab and line
# end, and marks that change the direction of writing.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LABEL_HTML = '<div class="meshbook-ranks" style="opacity:.6;font-size:smaller">'


def render_line(line: Line, world_ranks: Ranks, *, colour: bool = True) -> str:
    """Return a line without its end, with a dim `[0-2] ` before it unless all ranks of the call printed it."""
    text = sanitize(line.text, colour=colour)
    if line.ranks != tuple(world_ranks):
        prefix = f"[{format_ranks(line.ranks)}] "
        shown = _dim(prefix, colour)
        # A colour that the rank left on must not affect the output of other ranks.
        reset = _RESET if colour and "\x1b" in text else ""
        text = shown + text.replace("\n", f"\n{' ' * len(prefix)}") + reset
    return text


def render_values(
    parts: Iterable[OutcomeGroup], world_ranks: Ranks, *, limit: int = MAX_SHOWN, colour: bool = True
) -> str:
    """Return the folded values of a call; "" if there are none.

    If equal on all ranks, the plain text as on one rank. Else each distinct value with its ranks, ordered by lowest
    rank, at most `limit` of them. If there are more, values that differ only in numbers are folded into a range. Ranks
    without a value (a cell that ends in a statement or in None) are not named.
    """
    return _render_texts(_distinct_values(parts), world_ranks, limit, colour)


def render_previews(
    parts: Iterable[tuple[Ranks, Preview]], world_ranks: Ranks, *, limit: int = MAX_SHOWN, colour: bool = True
) -> str:
    """Return the texts of previews that differ, as `render_values` does."""
    values = [_DistinctValue(ranks, one, True) for ranks, one in parts]
    return _render_texts(values, world_ranks, limit, colour, hint="")


def _render_texts(
    values: Sequence[_DistinctValue], world_ranks: Ranks, limit: int, colour: bool, hint: str = _ACCESS_HINT
) -> str:
    if not values:
        return ""
    entries = [(value.ranks, _value_text(value, colour)) for value in values]
    if len(entries) > limit:
        entries = fold_texts(entries)
    if len(entries) == 1 and entries[0][0] == tuple(world_ranks):
        return entries[0][1]
    return _render_blocks(entries, limit, colour, hint)


def render_errors(
    failures: Sequence[Failure],
    succeeded: Sequence[int] = (),
    lost: Sequence[int] | None = None,
    *,
    released: Sequence[Released] = (),
    colour: bool = True,
) -> list[str]:
    """Return the lines of a traceback that is folded over ranks.

    For each failure the header `ranks 0-1,3: ZeroDivisionError: division by zero` and its one traceback; then the ranks
    that waited for the failed ones, those that succeeded, and those that were lost.
    """
    lines: list[str] = []
    for failure in failures:
        if lines:
            lines.append("")
        message, _, details = failure.evalue.partition("\n")
        if len(message) > MAX_HEADER_CHARS:
            message = message[:MAX_HEADER_CHARS] + "…"
        whose = name_ranks(failure.ranks)
        title = f"{failure.ename}: {message}" if message else failure.ename
        lines.append(
            f"{_BOLD}{whose}:{_RESET} {sanitize(title)}" if colour else f"{whose}: {sanitize(title, colour=False)}"
        )
        # The traceback has the complete message. A rank that was released from a wait has none.
        if failure.traceback != (title,):  # that of an error without frames
            lines.extend(sanitize(entry, colour=colour) for entry in failure.traceback or details.splitlines())
        if note := dead_context_note(failure.ranks, failure.evalue):
            lines.append(note)
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
    """Return a call's values as HTML; None if none has HTML and no image differs between ranks.

    Each distinct value is labelled with its ranks, unless all ranks hold the same one; at most `limit` are shown, the
    others named. An object's own HTML is used unchanged, as in any notebook; all else is escaped.
    """
    return _render_html(_distinct_values(parts), world_ranks, limit)


def render_previews_html(
    parts: Iterable[tuple[Ranks, Preview]], world_ranks: Ranks, *, limit: int = MAX_SHOWN_HTML
) -> str | None:
    """Return previews that differ as HTML, as `render_values_html` does; None if none has HTML or an image."""
    return _render_html([_DistinctValue(ranks, one, True) for ranks, one in parts], world_ranks, limit, hint="")


def _render_html(
    values: Sequence[_DistinctValue], world_ranks: Ranks, limit: int, hint: str = _ACCESS_HINT
) -> str | None:
    everywhere = len(values) == 1 and values[0].ranks == tuple(world_ranks)
    # An image that all ranks share is sent to the front end as an image.
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
        blocks.append(f"{_LABEL_HTML}{html.escape(_more_values_text(len(not_shown), f' on {holders}', hint))}</div>")
    return "\n".join(blocks)


def sanitize(text: str, *, colour: bool = True) -> str:
    """Return a rank's text, safe to display: colours are retained if `colour`, control characters made visible."""
    if text.isascii() and text.isprintable():
        return text
    if "\x1b" in text:
        pieces = _COLOUR.split(text)
        colours = _COLOUR.findall(text) if colour else [""] * (len(pieces) - 1)
        cleaned = [_replace_controls(ANSI_ESCAPE.sub("", piece)) for piece in pieces]
        return "".join(piece + colour for piece, colour in zip(cleaned, [*colours, ""], strict=True))
    return _replace_controls(text)


def plain_text(text: str) -> str:
    """Return text without colours and other control sequences."""
    return sanitize(text, colour=False)


# ---------------------------------------------------------------------------------------------------------------------


class _DistinctValue(NamedTuple):
    """A distinct value and the ranks that hold it."""

    ranks: Ranks
    preview: Preview
    identical: bool  # False: the values differ although their texts do not


def _distinct_values(parts: Iterable[OutcomeGroup]) -> list[_DistinctValue]:
    """Return the values that differ for a reader. Ordered by lowest rank."""
    by_appearance: dict[tuple[str, str, str | None, str | None], dict[str | None, list[tuple[Ranks, Preview]]]] = {}
    for part in parts:
        if part.outcome.status != "ok" or part.outcome.value is None:
            continue
        preview = part.outcome.value.preview
        appearance = (preview.type, _preview_text(preview), preview.html, _image_html(preview))
        by_appearance.setdefault(appearance, {}).setdefault(preview.digest, []).append((part.ranks, preview))
    values: list[_DistinctValue] = []
    for by_digest in by_appearance.values():
        several = [one for group in by_digest.values() for one in group]
        ranks = tuple(sorted(rank for rank_set, _ in several for rank in rank_set))
        values.append(_DistinctValue(ranks, several[0][1], len(by_digest) == 1))
    return sorted(values, key=lambda one: one.ranks)


def _image_html(preview: Preview) -> str | None:
    """Return a value's image as HTML."""
    if "image/svg+xml" in preview.data:
        return str(preview.data["image/svg+xml"])
    for mime in ("image/png", "image/jpeg", "image/gif", "image/webp"):
        if mime in preview.data:
            return f'<img src="data:{mime};base64,{html.escape("".join(str(preview.data[mime]).split()))}"/>'
    return None


def _preview_text(preview: Preview) -> str:
    """Return a value's text; of a display of JSON the JSON itself, because its text is the same for all contents."""
    if preview.html is None and "application/json" in preview.data:
        return json.dumps(preview.data["application/json"], ensure_ascii=False)
    return preview.text


def _value_text(value: _DistinctValue, colour: bool) -> str:
    text = sanitize(_preview_text(value.preview), colour=colour)
    return text if value.identical else f"{text}  {_dim('(the ranks differ in what is not shown)', colour)}"


def _render_blocks(entries: Sequence[tuple[Ranks, str]], limit: int, colour: bool, hint: str) -> str:
    """Return one block per entry, prefixed with its ranks, with the texts in one column."""
    shown = entries[:limit]
    labels = [f"[{format_ranks(ranks)}] " for ranks, _ in shown]
    width = max(map(len, labels))
    blocks = [
        _dim(label, colour) + " " * (width - len(label)) + text.replace("\n", "\n" + " " * width)
        for label, (_, text) in zip(labels, shown, strict=True)
    ]
    if len(entries) > limit:
        blocks.append(f"… {_more_values_text(len(entries) - limit, '', hint)}")
    return "\n".join(blocks)


def _more_values_text(count: int, whose: str, hint: str) -> str:
    return f"{count:,} more distinct value{'' if count == 1 else 's'}{whose}" + (f"; {hint}" if hint else "")


def _dim(text: str, colour: bool) -> str:
    return f"{_DIM}{text}{_RESET}" if colour else text


def _replace_controls(text: str) -> str:
    """Replace control characters by symbols: the escape character by the symbol for `ESC`, and so on."""
    return _CONTROL_CHARS.sub(lambda found: _control_picture(ord(found[0])), text)


def _control_picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
