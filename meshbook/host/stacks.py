"""Where the user's part of a stack begins, and stacks as py-spy tells them. Pure.

A rank's main thread runs cells from a dozen frames of Meshbook's and the interpreter's own. They are the same on every
rank, say nothing, and would come first in every picture, so they are cut here, for stacks from inside and outside
alike.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from msgspec import structs

from meshbook.wire.messages import ACTOR_THREAD, MAX_END_FRAMES, MAX_THREADS, Frame, ThreadStack

_OWN_FOLDER = str(Path(__file__).resolve().parent.parent) + "/"
_ASYNCIO_FOLDER = str(Path(asyncio.__file__).resolve().parent) + "/"


def users_part(stack: ThreadStack, file: str | None) -> ThreadStack:
    """The stack from the running cell's frame on; or, where no frame is of the cell, from below Meshbook's own.

    Args:
        file: that the running cell was compiled under; None: something else runs, or it is not known.
    """
    if not stack.main:
        return structs.replace(stack, frames=stack.frames[_below_own(stack.frames) :]) if is_actors(stack) else stack
    frames = stack.frames
    first = next((place for place, frame in enumerate(frames) if frame.file == file), None) if file else None
    if first is None:
        first = _below_own(frames)
    if first <= stack.cut_at and stack.num_cut:
        return structs.replace(stack, frames=frames[first:], cut_at=stack.cut_at - first)
    return structs.replace(stack, frames=frames[first:], num_cut=0, cut_at=0)


def is_actors(stack: ThreadStack) -> bool:
    """Whether it is of a thread that runs an actor, and nothing was left out of it."""
    return stack.name.startswith(ACTOR_THREAD) and not stack.num_cut


def _below_own(frames: tuple[Frame, ...]) -> int:
    """Where the first unbroken run of Meshbook's frames ends; whatever is outside it (runpy) belongs to it."""
    own = next((place for place, frame in enumerate(frames) if frame.file.startswith(_OWN_FOLDER)), None)
    if own is None:
        return 0
    end = own
    while end < len(frames) and (
        frames[end].file.startswith((_OWN_FOLDER, _ASYNCIO_FOLDER)) or "/IPython/core/" in frames[end].file
    ):
        end += 1
    return end


def read_py_spy(output: bytes) -> tuple[ThreadStack, ...]:
    """What `py-spy dump --json` printed; the main thread first, Meshbook's own threads left out.

    Raises:
        ValueError: it is not that.
    """
    try:
        told = json.loads(output)
        stacks = [_thread(thread) for thread in told]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"py-spy's output cannot be read ({type(error).__name__}: {error})") from error
    kept = [stack for stack in stacks if not stack.name.startswith("meshbook-")]
    kept.sort(key=lambda stack: not stack.main)
    return tuple(kept[:MAX_THREADS])


def _thread(told: dict[str, Any]) -> ThreadStack:
    frames = [
        Frame(
            file=_text(frame["filename"]),
            line=int(frame["line"] or 0),
            function=_text(frame["name"]).rpartition(".")[2],  # it may be qualified; other stacks' are not
        )
        for frame in reversed(told["frames"])
    ]
    num_cut = max(0, len(frames) - 2 * MAX_END_FRAMES)
    if num_cut:
        frames = frames[:MAX_END_FRAMES] + frames[-MAX_END_FRAMES:]
    native_id = told.get("os_thread_id")
    return ThreadStack(
        name=_text(told.get("thread_name") or f"thread {native_id}"),
        frames=tuple(frames),
        main=native_id is not None and native_id == told.get("pid"),
        native_id=native_id,
        has_gil=bool(told.get("owns_gil")),
        active=bool(told.get("active")),
        num_cut=num_cut,
        cut_at=MAX_END_FRAMES if num_cut else 0,
    )


def _text(value: Any) -> str:
    return str(value)[:500].encode("utf-8", "replace").decode()
