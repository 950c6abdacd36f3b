"""Displays in encodable form: by MIME type, as Jupyter has them."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

from meshbook.errors import escape_surrogates
from meshbook.rank.text import truncate

# Limit of one MIME type of one display. A front end stores every output in its page, so larger ones are impractical.
MAX_DISPLAY_BYTES: Final = 8 << 20

# Views of widgets: the objects behind them are on the rank, where no front end can reach them.
WIDGET_VIEW: Final = "application/vnd.jupyter.widget-view+json"

# What matplotlib writes into a figure anew each time: the time of day, and ids from random numbers, "m3f0c2b19aa".
_SVG_DATE: Final = re.compile(r"\s*<dc:date>[^<]*</dc:date>")
_SVG_ID: Final = re.compile(r'\bid="([A-Za-z]+)([0-9a-f]{10})"')


def encode_mime(mime: str, value: Any) -> Any:
    """Return a display's data of one MIME type in encodable form; bytes in base64, as in Jupyter."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        size = len(bytes(value))
        if size <= MAX_DISPLAY_BYTES:
            return base64.b64encode(bytes(value)).decode("ascii")
    elif isinstance(value, str):
        size = len(value)
        if size <= MAX_DISPLAY_BYTES:
            return escape_surrogates(with_stable_ids(value) if mime == "image/svg+xml" else value)
    else:
        return to_json_data(value)
    if mime == "text/plain":
        return escape_surrogates(truncate(str(value), MAX_DISPLAY_BYTES))
    return f"<{mime} of {size:,} bytes not shown: larger than {MAX_DISPLAY_BYTES:,}>"


def with_stable_ids(svg: str) -> str:
    """Return an SVG without its date and with ids made from its content, so that equal figures of ranks are equal.

    Figures that differ have other ids, because all figures of a page share one space of ids.
    """
    svg = _SVG_DATE.sub("", svg)
    ids = dict.fromkeys(kind + digits for kind, digits in _SVG_ID.findall(svg))
    if not ids:
        return svg
    pattern = re.compile(rf"\b(?:{'|'.join(ids)})\b")
    number = {name: str(index) for index, name in enumerate(ids)}
    content = hashlib.sha256(pattern.sub(lambda found: number[found[0]], svg).encode("utf-8", "replace")).hexdigest()[
        :10
    ]
    return pattern.sub(lambda found: f"{found[0][:-10]}{content}-{number[found[0]]}", svg)


def to_json_data(value: Any) -> Any:
    """Return structured data with JSON types only."""
    kind = type(value)
    if kind in (int, float, bool, type(None)):
        return value
    if kind is str or isinstance(value, str):
        return escape_surrogates(str(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(value)).decode("ascii")
    if isinstance(value, dict):
        return {str(key): to_json_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json_data(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    item: Callable[[], Any] | None = getattr(value, "item", None)  # a numpy number
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return to_json_data(item())
    return str(value)
