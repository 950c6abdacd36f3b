"""A snapshot of a rank, taken by its service thread: the stacks of all threads, the collectives, the running call.

Nothing here stops a thread or runs user code: frames are read while they run, and user-defined names are handled as
text. The host (`host.stacks`) separates Meshbook's frames from the user's, because it also reads stacks from outside
and must produce the same result.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from meshbook.clock import monotonic
from meshbook.ids import Ranks
from meshbook.rank import locks
from meshbook.rank.call_state import CallState, FinishedCall
from meshbook.rank.probes import describe_collective
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.rank.text import sanitize_text
from meshbook.wire.messages import (
    MAX_END_FRAMES,
    MAX_STACKS,
    REMOTE_OPERATION_FILE,
    ActiveEndpoint,
    CollectiveInfo,
    Frame,
    Health,
    RankSnapshot,
    ThreadStack,
)

if TYPE_CHECKING:
    from meshbook.rank.tensors.engine import CurrentOp

# Executes operations on remote tensors; it imports torch, so it cannot be imported here.
_ENGINE_FILE = "meshbook/rank/tensors/engine.py"

# Limit of open collectives reported beside the most recent ones.
_MAX_OPEN_COLLECTIVES = 64


class RunningCode(Protocol):
    """Where the running cell is: a CodeRunner."""

    running_file: str | None

    @property
    def awaited_coroutine(self) -> Any: ...


class Snapshotter:
    """Describes what this rank is doing. Service thread only."""

    def __init__(
        self,
        rank: int,
        main_thread: int,
        state: CallState,
        ring: CollectiveRing,
        running_code: RunningCode,
        *,
        is_awaiting_input: Callable[[], bool],
        current_operation: Callable[[], CurrentOp | None],
        forming_ranks: Callable[[], Ranks] = tuple,
    ) -> None:
        """
        Args:
            main_thread: identifier of the thread that runs cells.
            current_operation: returns the running operation on remote tensors.
            forming_ranks: returns the members of the process group that is being connected.
        """
        self._forming_ranks = forming_ranks
        self._rank, self._main_thread, self._state, self._ring = rank, main_thread, state, ring
        self._running_code = running_code
        self._is_awaiting_input, self._current_operation = is_awaiting_input, current_operation

    def take(
        self, *, health: Health | None, num_collectives: int, endpoints: tuple[ActiveEndpoint, ...] = ()
    ) -> RankSnapshot:
        """Return what this rank is doing now; the host adds what it knows better.

        Args:
            num_collectives: how many of the ring to report, beside the open ones.
            endpoints: the endpoints that the rank's actors are executing.
        """
        now = monotonic()
        running, finished = self._state.running, self._state.finished
        threads = tuple(collect_thread_stacks(self._main_thread, self._running_code.awaited_coroutine))
        cell = None if running is None else running.label or None
        file = self._running_code.running_file
        operation = self._current_operation()
        if operation is not None and operation.line is not None:
            threads = tuple(as_called_by_controller(operation, stack) if stack.is_main else stack for stack in threads)
            main = _main_stack(threads)
            file = operation.line.file if main is None or not main.frames else main.frames[0].file
            cell = operation.cells.get(file)
        last = self._ring.last
        snapshot = RankSnapshot(
            rank=self._rank,
            source="inside",
            cell=cell,
            file=None if file is None else sanitize_text(file),
            cell_line=None if file is None else _main_thread_cell_line(threads, file),
            stacks=threads,
            collectives=describe_ring(self._ring, num_collectives, now),
            num_collectives=0 if last is None else last.seq,
            forming=self._forming_ranks(),
            health=health,
            awaiting_input=self._is_awaiting_input(),
            endpoints=endpoints,
        )
        if finished is not None:
            snapshot = replace(snapshot, last_cell=finished.label or None, last_call=finished.call)
        if running is not None:
            return replace(snapshot, call=running.call, running_s=now - running.started_at)
        return snapshot if finished is None else _with_finished_call(snapshot, finished)


def describe_ring(ring: CollectiveRing, limit: int, now: float) -> tuple[CollectiveInfo, ...]:
    """Return the last `limit` collectives and all open ones, whatever their age; oldest first."""
    recorded = ring.snapshot()
    first_recent = max(0, len(recorded) - limit)
    old_open = [collective for collective in recorded[:first_recent] if collective.t_end is None]
    return tuple(
        describe_collective(collective, now)
        for collective in [*old_open[-_MAX_OPEN_COLLECTIVES:], *recorded[first_recent:]]
    )


def collect_thread_stacks(main_thread: int, awaited_coroutine: Any = None) -> list[ThreadStack]:
    """Return every thread's stack, the main one first, without Meshbook's own threads.

    Args:
        awaited_coroutine: the coroutine that the cell's event loop runs, if any: while it waits, the cell is on no
            stack.
    """
    thread_names = _thread_names()
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main_thread):
        name, native_id = thread_names.get(ident, (f"thread {ident}", None))
        if name.startswith("meshbook-"):
            continue
        main = ident == main_thread
        if main:
            native_id = os.getpid()  # in a forked process `threading` still has the parent's number of the main thread
        frames, num_cut, cut_at = _walk_stack(frame)
        if main and awaited_coroutine is not None and _is_in_event_loop(frames):
            inner = _awaited_frames(awaited_coroutine)
            frames, num_cut, cut_at = inner or frames, 0 if inner else num_cut, 0 if inner else cut_at
        waits_on, held_by = locks.find_awaited_lock(
            frame, {ident: thread_name for ident, (thread_name, _) in thread_names.items()}
        )
        found.append(
            ThreadStack(
                name=name,
                frames=frames,
                is_main=main,
                native_id=native_id,
                waits_on=None if waits_on is None else sanitize_text(waits_on),
                held_by=held_by,
                num_truncated=num_cut,
                truncated_at=cut_at,
            )
        )
        if len(found) == MAX_STACKS:
            break
    return found


def as_called_by_controller(operation: CurrentOp, stack: ThreadStack) -> ThreadStack:
    """Return the stack of an operation on remote tensors as if the controller's line had called it here.

    This replaces the rank's own frames around the operation, which are not informative.
    """
    engine_index = max(
        (index for index, frame in enumerate(stack.frames) if frame.file.endswith(_ENGINE_FILE)), default=-1
    )
    line, name = operation.line, operation.operation
    for index in range(engine_index + 1, len(stack.frames)):
        frame = stack.frames[index]
        if (describe_generated_line := operation.generated_code.get(frame.file)) is not None:
            engine_index, (name, inner) = index, describe_generated_line(frame.line)
            line = inner or line
            break
    if engine_index < 0 or line is None:
        return stack
    issuing_frames = (line, Frame(file=REMOTE_OPERATION_FILE, line=0, function=name))
    cut_at = stack.truncated_at - engine_index - 1 + len(issuing_frames)
    is_cut = stack.num_truncated > 0 and cut_at >= len(issuing_frames)
    return replace(
        stack,
        frames=(*issuing_frames, *stack.frames[engine_index + 1 :]),
        num_truncated=stack.num_truncated if is_cut else 0,
        truncated_at=cut_at if is_cut else 0,
    )


def _walk_stack(frame: FrameType | None) -> tuple[tuple[Frame, ...], int, int]:
    """Return a stack outermost first, how many frames of its middle are omitted, and where."""
    inner: list[tuple[CodeType, int | None]] = []
    outer: deque[tuple[CodeType, int | None]] = deque(maxlen=MAX_END_FRAMES)
    num_walked = 0
    while frame is not None:
        # the line is None while an instruction of the interpreter's own runs
        code_and_line = frame.f_code, frame.f_lineno
        if num_walked < MAX_END_FRAMES:
            inner.append(code_and_line)
        else:
            outer.append(code_and_line)
        num_walked += 1
        frame = frame.f_back
    num_cut = num_walked - len(inner) - len(outer)
    frames = tuple(_to_frame(*code_and_line) for code_and_line in [*reversed(outer), *reversed(inner)])
    return frames, num_cut, len(outer) if num_cut else 0


def _to_frame(code: CodeType, line: int | None) -> Frame:
    return Frame(
        file=sanitize_text(code.co_filename), line=line or code.co_firstlineno, function=sanitize_text(code.co_name)
    )


def _is_in_event_loop(frames: tuple[Frame, ...]) -> bool:
    """Whether a thread waits in asyncio and runs no task."""
    return any(frame.file == asyncio.base_events.__file__ for frame in frames) and frames[-1].file.endswith(
        ("selectors.py", "base_events.py")
    )


def _awaited_frames(coroutine: Any) -> tuple[Frame, ...]:
    """Return where a coroutine waits: its own frame, that of what it awaits, and so on."""
    frames: list[Frame] = []
    while coroutine is not None and len(frames) < 2 * MAX_END_FRAMES:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if isinstance(frame, FrameType):
                frames.append(_to_frame(frame.f_code, frame.f_lineno))
                coroutine = getattr(coroutine, f"{kind}_await" if kind != "gi" else "gi_yieldfrom", None)
                break
        else:
            break
    return tuple(frames)


def _thread_names() -> dict[int, tuple[str, int | None]]:
    """Return the names of threads and their native ids.

    Does not use `threading.enumerate`: a stopped or stuck thread may hold its lock.
    """
    names = {}
    for ident, thread in dict(threading._active).items():  # type: ignore[attr-defined]
        name = getattr(thread, "_name", None)  # not the property, which a subclass may override
        native_id = getattr(thread, "_native_id", None)
        thread_name = sanitize_text(name) if isinstance(name, str) else type(thread).__name__
        names[ident] = thread_name, native_id if isinstance(native_id, int) else None
    return names


def _main_thread_cell_line(stacks: tuple[ThreadStack, ...], file: str) -> int | None:
    """Return the line of the cell that the main thread executes, ignoring called functions."""
    main = _main_stack(stacks)
    return None if main is None else innermost_line(main.frames, file)


def _main_stack(stacks: tuple[ThreadStack, ...]) -> ThreadStack | None:
    return next((stack for stack in stacks if stack.is_main), None)


def innermost_line(frames: tuple[Frame, ...], file: str) -> int | None:
    return next((frame.line for frame in reversed(frames) if frame.file == file), None)


def _with_finished_call(snapshot: RankSnapshot, finished: FinishedCall) -> RankSnapshot:
    """Return the snapshot of an idle rank with the end of its last call, and where that failed."""
    snapshot = replace(snapshot, last_status=finished.outcome.status)
    error = finished.outcome.error
    if error is None:
        return snapshot
    text = sanitize_text(f"{error.ename}: {error.evalue}" if error.evalue else error.ename)
    snapshot = replace(snapshot, last_error=text)
    if snapshot.file is not None or not error.frames:
        return snapshot
    file = error.frames[0].file
    return replace(snapshot, file=file, cell_line=innermost_line(error.frames, file))
