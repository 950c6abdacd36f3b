"""Completion and inspection: merges this process's reply with the ranks' reply.

The merging is pure. Local completion must not touch a handle, which would query the ranks and might wait for them:
`completer_namespace` hides the handles from the completer, and the caller queries the ranks once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# IPython's metadata key for the types of completions.
TYPES_KEY = "_jupyter_types_experimental"

# Names joined by dots and simple subscripts, up to the cursor.
_EXPRESSION = re.compile(r"([^\W\d]\w*)(?:\.\w*|\[[^\[\]\n]*\])*\Z")
_completer_lock = threading.Lock()


def root_name(code: str, cursor: int) -> str | None:
    """Return the first name of the expression at the cursor: `model` of `y = model.fc.we|`."""
    end = cursor
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    found = _EXPRESSION.search(code[:end])
    return found.group(1) if found is not None else None


@contextmanager
def completer_namespace(completer: Any, namespace: Mapping[str, Any]) -> Iterator[None]:
    """Restrict the completer to this namespace during the block."""
    with _completer_lock:
        saved = completer.namespace, completer.global_namespace
        completer.namespace = completer.global_namespace = namespace
        try:
            yield
        finally:
            completer.namespace, completer.global_namespace = saved


def line_before(code: str, cursor: int) -> str:
    """Return the line that the cursor is in, up to it, without its indentation."""
    return code[:cursor].rpartition("\n")[2].lstrip()


def plain_reply(words: Sequence[str], line: str, cursor: int) -> dict[str, Any]:
    """Return the `complete_reply` content for words that replace the last word of a line, up to the cursor."""
    start = cursor - (len(line) - line.rfind(" ") - 1)
    return {"status": "ok", "matches": list(words), "cursor_start": start, "cursor_end": cursor, "metadata": {}}


def merge_completions(
    local: dict[str, Any], remote: Mapping[str, Any] | None, code: str, *, remote_first: bool
) -> dict[str, Any]:
    """Merge this process's `complete_reply` content with a rank's reply.

    If the two replace different ranges of the code, both are widened to their union.

    Args:
        remote: `matches`, `cursor_start`, `cursor_end`, `types`; None: no rank replied.
    """
    if not remote or not remote["matches"]:
        return local
    theirs = list(zip(remote["matches"], remote["types"], strict=True))
    start, end = remote["cursor_start"], remote["cursor_end"]
    ours: list[tuple[str, str]] = []
    if local["matches"]:
        kinds = {entry["text"]: entry.get("type", "") for entry in local["metadata"].get(TYPES_KEY, ())}
        ours = [(text, kinds.get(text, "")) for text in local["matches"]]
        low, high = min(start, local["cursor_start"]), max(end, local["cursor_end"])
        theirs = _widen(theirs, start, end, low, high, code)
        ours = _widen(ours, local["cursor_start"], local["cursor_end"], low, high, code)
        start, end = low, high
    merged = dict([*ours, *theirs] if not remote_first else [*theirs, *ours])
    for text, kind in [*ours, *theirs]:
        if kind and kind != "<unknown>":
            merged[text] = merged[text] if merged[text] not in ("", "<unknown>") else kind
    entries = [{"start": start, "end": end, "text": text, "type": kind} for text, kind in merged.items()]
    return {
        **local,
        "matches": list(merged),
        "cursor_start": start,
        "cursor_end": end,
        "metadata": {**local["metadata"], TYPES_KEY: [{**entry, "signature": ""} for entry in entries]},
    }


def _widen(
    matches: list[tuple[str, str]], start: int, end: int, low: int, high: int, code: str
) -> list[tuple[str, str]]:
    before, after = code[low:start], code[end:high]
    return [(f"{before}{text}{after}", kind) for text, kind in matches]
