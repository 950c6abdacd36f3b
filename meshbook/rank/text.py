"""User text made fit to be sent: without lone surrogates, which UTF-8 cannot encode, and of bounded length."""

from __future__ import annotations

from meshbook.errors import escape_surrogates


def truncate(text: str, limit: int) -> str:
    """Return the beginning of a text, with an ellipsis if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[: max(0, limit - 1)]}…"


def sanitize_text(text: str, limit: int = 500) -> str:
    """Return both ends of a text, with lone surrogates escaped; also of an instance of a subclass of str."""
    if type(text) is str and len(text) <= limit and text.isascii():
        return text
    return escape_surrogates(str(text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"))
