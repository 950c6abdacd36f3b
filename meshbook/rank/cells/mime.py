"""Displays in encodable form: by MIME type, as Jupyter has them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

from meshbook.rank.text import escape_surrogates, truncate

# Limit of one MIME type of one display. A front end stores every output in its page, so larger ones are impractical.
MAX_DISPLAY_BYTES: Final = 8 << 20

# Views of widgets: the objects behind them are on the rank, where no front end can reach them.
WIDGET_VIEW: Final = "application/vnd.jupyter.widget-view+json"


def encode_mime(mime: str, value: Any) -> Any:
    """Return a display's data of one MIME type in encodable form; bytes in base64, as in Jupyter."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        size = len(bytes(value))
        if size <= MAX_DISPLAY_BYTES:
            return base64.b64encode(bytes(value)).decode("ascii")
    elif isinstance(value, str):
        size = len(value)
        if size <= MAX_DISPLAY_BYTES:
            return escape_surrogates(value)
    else:
        return to_json_data(value)
    if mime == "text/plain":
        return escape_surrogates(truncate(str(value), MAX_DISPLAY_BYTES))
    return f"<{mime} of {size:,} bytes not shown: larger than {MAX_DISPLAY_BYTES:,}>"


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
