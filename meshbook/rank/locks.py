"""Finds the lock that a thread waits for, by its name in the user's code, and the thread that holds it.

The interpreter does not report either: a thread in `with lock:` is a frame stopped at that instruction. So the source
of the instruction is read, and the name in it is looked up in the frame's scopes, without running user code.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import re
import threading
from collections import ChainMap
from collections.abc import Mapping
from types import FrameType
from typing import Any

from meshbook.rank.previews.static_values import resolve_statically

_LOCK_TYPE, _RLOCK_TYPE = type(threading.Lock()), type(threading.RLock())
_OWNER_PATTERN = re.compile(r"owner=(\d+)")

# Instructions at which a frame stops while it waits to enter a `with` block.
_WITH_ENTRY_OPS = ("BEFORE_WITH", "LOAD_SPECIAL")


def find_awaited_lock(frame: FrameType, thread_names: Mapping[int, str]) -> tuple[str | None, str | None]:
    """Return what a thread with this innermost frame waits for ("lock `a`"), and the name of the thread that holds it.

    Both are None if it waits for no lock, or if that cannot be determined. A plain Lock does not record its owner.

    Args:
        thread_names: of threads, by their identifiers.
    """
    code = frame.f_code
    if code.co_filename == threading.__file__:  # conditions, events, joins: the calling frames are more informative
        return None, None
    # Most frames wait for no lock, and reading their source from a disk that hangs would hang this thread.
    if "acquire" not in code.co_names and dis.opname[code.co_code[frame.f_lasti]] not in _WITH_ENTRY_OPS:
        return None, None
    expression = _lock_expression(frame)
    if expression is None:
        return None, None
    lock = resolve_statically(ChainMap(frame.f_locals, frame.f_globals), expression)
    if type(lock) not in (_LOCK_TYPE, _RLOCK_TYPE) or not _is_locked(lock):
        return None, None
    owner = _OWNER_PATTERN.search(repr(lock)) if type(lock) is _RLOCK_TYPE else None
    return f"lock `{ast.unparse(expression)[:80]}`", None if owner is None else thread_names.get(int(owner[1]))


def _lock_expression(frame: FrameType) -> ast.expr | None:
    """Return the `a` of `with a:` or of `a.acquire()`; None if the frame is at neither."""
    positions = list(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2 + 1))
    node = _parse_source_at(frame, positions[-1]) if positions else None
    if node is None:  # the position is the complete `with` statement; its expression was evaluated just before
        node = _parse_source_at(
            frame, next((position for position in reversed(positions) if position != positions[-1]), None)
        )
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("acquire", "__enter__"):
            return None
        return node.func.value
    return node if isinstance(node, ast.Name | ast.Attribute) else None


def _parse_source_at(frame: FrameType, position: tuple[int | None, ...] | None) -> ast.expr | None:
    """Return the expression at a source position: line, last line, columns in bytes. None if it is not one."""
    line, end_line, start, end = position or (None, None, None, None)
    if line is None or line != end_line or start is None or end is None:
        return None
    source = linecache.getline(frame.f_code.co_filename, line).encode()
    try:
        return ast.parse(source[start:end].decode().strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _is_locked(lock: Any) -> bool:
    return "<locked" in repr(lock)  # RLock has no locked() before Python 3.14
