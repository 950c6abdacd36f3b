"""Completion and inspection: what this process knows and what the ranks know, as one answer.

The merging is pure. Looking around here never asks a handle, whose answer would come from the ranks and might wait for
them: `completer_namespace` takes the handles out of the completer's sight, and the ranks are asked once, by the caller.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Key that front ends know of types of completions; IPython's own.
TYPES_KEY = "_jupyter_types_experimental"

# Names joined by dots and simple subscripts, up to the cursor.
_EXPRESSION = re.compile(r"([^\W\d]\w*)(?:\.\w*|\[[^\[\]\n]*\])*\Z")
_completer_lock = threading.Lock()


def root_name(code: str, cursor: int) -> str | None:
    """`model` of `y = model.fc.we|`: the name that the expression at the cursor begins with."""
    end = cursor
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    found = _EXPRESSION.search(code[:end])
    return found.group(1) if found is not None else None


@contextmanager
def completer_namespace(completer: Any, namespace: Mapping[str, Any]) -> Iterator[None]:
    """Let the completer look at this namespace, and at none other, while the block runs."""
    with _completer_lock:
        saved = completer.namespace, completer.global_namespace
        completer.namespace = completer.global_namespace = namespace
        try:
            yield
        finally:
            completer.namespace, completer.global_namespace = saved


def merge_completions(
    local: dict[str, Any], remote: Mapping[str, Any] | None, code: str, *, remote_first: bool
) -> dict[str, Any]:
    """Content of a `complete_reply` from this process's answer, which is one already, and a rank's.

    Where the two would replace different parts of the code, both are written for the larger part.

    Args:
        remote: `matches`, `cursor_start`, `cursor_end`, `types`; None: no rank answered.
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
