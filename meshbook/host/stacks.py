"""Trim stacks to the user's frames, and parse py-spy's output. Pure.

A rank's main thread runs cells below a dozen frames of Meshbook and the interpreter. They are the same on every rank,
carry no information, and would come first in every display, so they are removed here, for stacks from inside and
outside alike.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from msgspec import structs

from meshbook.wire.messages import ACTOR_THREAD_PREFIX, MAX_END_FRAMES, MAX_STACKS, Frame, ThreadStack

_MESHBOOK_FOLDER = str(Path(__file__).resolve().parent.parent) + "/"
_ASYNCIO_FOLDER = str(Path(asyncio.__file__).resolve().parent) + "/"


def trim_to_user_frames(stack: ThreadStack, file: str | None) -> ThreadStack:
    """Return the stack from the running cell's frame on; without such a frame, from below Meshbook's own.

    Args:
        file: the file name that the running cell was compiled with; None: something else runs, or it is not known.
    """
    if not stack.is_main:
        return (
            structs.replace(stack, frames=stack.frames[_first_user_frame(stack.frames) :])
            if is_actor_stack(stack)
            else stack
        )
    frames = stack.frames
    first = next((index for index, frame in enumerate(frames) if frame.file == file), None) if file else None
    if first is None:
        first = _first_user_frame(frames)
    if first <= stack.truncated_at and stack.num_truncated:
        return structs.replace(stack, frames=frames[first:], truncated_at=stack.truncated_at - first)
    return structs.replace(stack, frames=frames[first:], num_truncated=0, truncated_at=0)


def is_actor_stack(stack: ThreadStack) -> bool:
    """Whether a stack is of a thread that runs an actor, and not truncated."""
    return stack.name.startswith(ACTOR_THREAD_PREFIX) and not stack.num_truncated


def _first_user_frame(frames: tuple[Frame, ...]) -> int:
    """Return the index after the first contiguous run of Meshbook's frames, which drops those before it too (runpy)."""
    first_own = next((index for index, frame in enumerate(frames) if frame.file.startswith(_MESHBOOK_FOLDER)), None)
    if first_own is None:
        return 0
    end = first_own
    while end < len(frames) and (
        frames[end].file.startswith((_MESHBOOK_FOLDER, _ASYNCIO_FOLDER)) or "/IPython/core/" in frames[end].file
    ):
        end += 1
    return end


def parse_py_spy(output: bytes | str) -> tuple[ThreadStack, ...]:
    """Parse the output of `py-spy dump --json`; the main thread first, Meshbook's own threads left out.

    Raises:
        ValueError: the output has another form.
    """
    try:
        dump = json.loads(output)
        stacks = [_parse_thread(thread) for thread in dump]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"py-spy's output cannot be read ({type(error).__name__}: {error})") from error
    user_stacks = [stack for stack in stacks if not stack.name.startswith("meshbook-")]
    user_stacks.sort(key=lambda stack: not stack.is_main)
    return tuple(user_stacks[:MAX_STACKS])


def _parse_thread(thread: dict[str, Any]) -> ThreadStack:
    frames = [
        Frame(
            file=_text(frame["filename"]),
            line=int(frame["line"] or 0),
            # py-spy's may be qualified; those of other stacks are not
            function=_text(frame["name"]).rpartition(".")[2],
        )
        for frame in reversed(thread["frames"])
    ]
    num_cut = max(0, len(frames) - 2 * MAX_END_FRAMES)
    if num_cut:
        frames = frames[:MAX_END_FRAMES] + frames[-MAX_END_FRAMES:]
    native_id = thread.get("os_thread_id")
    return ThreadStack(
        name=_text(thread.get("thread_name") or f"thread {native_id}"),
        frames=tuple(frames),
        is_main=native_id is not None and native_id == thread.get("pid"),
        native_id=native_id,
        has_gil=bool(thread.get("owns_gil")),
        is_active=bool(thread.get("active")),
        num_truncated=num_cut,
        truncated_at=MAX_END_FRAMES if num_cut else 0,
    )


def _text(value: Any) -> str:
    return str(value)[:500].encode("utf-8", "replace").decode()
