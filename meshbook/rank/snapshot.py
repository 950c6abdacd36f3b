"""What a rank is doing, seen by its own service thread: the stacks of all threads, the collectives, the running call.

Nothing here stops a thread or runs user code: frames are read while they go on, and what a user has named is text.
Where Meshbook's own frames end and the user's begin is for the host to say (`host.stacks`), which reads stacks from
outside as well and must come to the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.clock import monotonic
from meshbook.ids import CallId
from meshbook.rank import locks
from meshbook.rank.probes import plain, seen
from meshbook.rank.ring import Ring
from meshbook.wire.messages import (
    MAX_END_FRAMES,
    MAX_THREADS,
    REMOTE_OPERATION,
    CollectiveSeen,
    EndpointSeen,
    Frame,
    Health,
    Outcome,
    RankSnapshot,
    ThreadStack,
)

if TYPE_CHECKING:
    from meshbook.rank.executor import Executor
    from meshbook.rank.tensors.engine import UnderWay

# Carries out operations on remote tensors; it cannot be imported here, for it has torch.
_ENGINE = "meshbook/rank/tensors/engine.py"

# Open collectives that are told beside the last ones.
_OPEN = 64


class Doing(NamedTuple):
    """The call on the main thread."""

    call: CallId
    label: str
    began_at: float  # monotonic


class Done(NamedTuple):
    """How the last call ended."""

    call: CallId
    label: str
    outcome: Outcome
    at: float  # monotonic


def take(
    executor: Executor,
    *,
    main_thread: int,
    health: Health | None,
    num_collectives: int,
    stacks: bool,
    endpoints: tuple[EndpointSeen, ...] = (),
) -> RankSnapshot:
    """What this rank is doing now; the host adds what it knows better. Called on the service thread.

    Args:
        main_thread: identifier of the thread that runs cells.
        num_collectives: of the ring, beside the open ones.
        endpoints: that the rank's actors are in.
    """
    now = monotonic()
    doing, done, file = executor.doing, executor.done, executor.shell.running_file
    cell = None if doing is None else doing.label or None
    operation = executor.under_way
    threads = tuple(thread_stacks(main_thread, executor.shell.awaiting)) if stacks else ()
    if operation is not None and operation.line is not None:
        threads = tuple(issued_by(operation, stack) if stack.main else stack for stack in threads)
        main = next((stack for stack in threads if stack.main), None)
        file = operation.line.file if main is None or not main.frames else main.frames[0].file
        cell = operation.cells.get(file)
    collectives = ring_seen(executor.ring, num_collectives, now)
    last = executor.ring.last
    error, error_file, error_line = _error(done) if doing is None else (None, None, None)
    return RankSnapshot(
        rank=executor.told.rank,
        source="inside",
        call=None if doing is None else doing.call,
        cell=cell,
        file=error_file if file is None else plain(file),
        cell_line=error_line if file is None else _line(threads, file),
        running_s=None if doing is None else now - doing.began_at,
        stacks=threads,
        collectives=collectives,
        num_collectives=0 if last is None else last.seq,
        health=health,
        asking=executor.asking,
        finished=None if done is None or doing is not None else done.outcome.status,
        finished_s=None if done is None or doing is not None else now - done.at,
        error=error,
        last_cell=None if done is None else done.label or None,
        last_call=None if done is None else done.call,
        endpoints=endpoints,
    )


def ring_seen(ring: Ring, limit: int, now: float) -> tuple[CollectiveSeen, ...]:
    """The last `limit` collectives and, whatever their age, those that are open; oldest first."""
    kept = ring.snapshot()
    split = max(0, len(kept) - limit)
    old_open = [collective for collective in kept[:split] if collective.t_end is None]
    return tuple(seen(collective, now) for collective in [*old_open[-_OPEN:], *kept[split:]])


def thread_stacks(main_thread: int, awaiting: Any = None) -> list[ThreadStack]:
    """Every thread's stack, the main one first; Meshbook's own threads left out.

    Args:
        awaiting: the coroutine that the cell's event loop runs, if any: while it waits, the cell is on no stack.
    """
    names = _names()
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main_thread):
        name, native_id = names.get(ident, (f"thread {ident}", None))
        if name.startswith("meshbook-"):
            continue
        main = ident == main_thread
        if main:
            native_id = os.getpid()  # a thread that lives on in a forked process keeps its old number in `threading`
        frames, num_cut, cut_at = _walk(frame)
        if main and awaiting is not None and _in_event_loop(frames):
            inner = _awaited(awaiting)
            frames, num_cut, cut_at = inner or frames, 0 if inner else num_cut, 0 if inner else cut_at
        waits_on, held_by = locks.waited_for(frame, {ident: told for ident, (told, _) in names.items()})
        found.append(
            ThreadStack(
                name=name,
                frames=frames,
                main=main,
                native_id=native_id,
                waits_on=None if waits_on is None else plain(waits_on),
                held_by=held_by,
                num_cut=num_cut,
                cut_at=cut_at,
            )
        )
        if len(found) == MAX_THREADS:
            break
    return found


def issued_by(operation: UnderWay, stack: ThreadStack) -> ThreadStack:
    """The stack of an operation on remote tensors, as if the line of the controller that issued it had called it here:
    what ranks have of their own around it says nothing to anybody."""
    own = max((place for place, frame in enumerate(stack.frames) if frame.file.endswith(_ENGINE)), default=-1)
    line, name = operation.line, operation.operation
    for place in range(own + 1, len(stack.frames)):
        frame = stack.frames[place]
        if (under_way := operation.generated.get(frame.file)) is not None:
            own, (name, inner) = place, under_way(frame.line)
            line = inner or line
            break
    if own < 0 or line is None:
        return stack
    lead = (line, Frame(file=REMOTE_OPERATION, line=0, function=name))
    cut_at = stack.cut_at - own - 1 + len(lead)
    is_cut = stack.num_cut > 0 and cut_at >= len(lead)
    return ThreadStack(
        name=stack.name,
        frames=(*lead, *stack.frames[own + 1 :]),
        main=stack.main,
        native_id=stack.native_id,
        waits_on=stack.waits_on,
        held_by=stack.held_by,
        num_cut=stack.num_cut if is_cut else 0,
        cut_at=cut_at if is_cut else 0,
    )


def _walk(frame: FrameType | None) -> tuple[tuple[Frame, ...], int, int]:
    """A stack outermost first; how many frames of its middle are left out; and where."""
    inner: list[tuple[CodeType, int | None]] = []
    outer: deque[tuple[CodeType, int | None]] = deque(maxlen=MAX_END_FRAMES)
    num_walked = 0
    while frame is not None:
        place = frame.f_code, frame.f_lineno  # the line is None while an interpreter's own instruction runs
        if num_walked < MAX_END_FRAMES:
            inner.append(place)
        else:
            outer.append(place)
        num_walked += 1
        frame = frame.f_back
    num_cut = num_walked - len(inner) - len(outer)
    frames = tuple(_told(*place) for place in [*reversed(outer), *reversed(inner)])
    return frames, num_cut, len(outer) if num_cut else 0


def _told(code: CodeType, line: int | None) -> Frame:
    return Frame(file=plain(code.co_filename), line=line or code.co_firstlineno, function=plain(code.co_name))


def _in_event_loop(frames: tuple[Frame, ...]) -> bool:
    """Whether a thread's innermost work is waiting in asyncio, and no task of it runs."""
    return any(frame.file == asyncio.base_events.__file__ for frame in frames) and frames[-1].file.endswith(
        ("selectors.py", "base_events.py")
    )


def _awaited(coroutine: Any) -> tuple[Frame, ...]:
    """Where a coroutine waits: itself, what it awaits, and so on."""
    frames: list[Frame] = []
    while coroutine is not None and len(frames) < 2 * MAX_END_FRAMES:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if isinstance(frame, FrameType):
                frames.append(_told(frame.f_code, frame.f_lineno))
                coroutine = getattr(coroutine, f"{kind}_await" if kind != "gi" else "gi_yieldfrom", None)
                break
        else:
            break
    return tuple(frames)


def _names() -> dict[int, tuple[str, int | None]]:
    """Names of threads, and the system's numbers of them.

    Not by `threading.enumerate`: its lock may be held by a thread that is stopped or stuck.
    """
    names = {}
    for ident, thread in dict(threading._active).items():  # type: ignore[attr-defined]
        name = getattr(thread, "_name", None)  # not the property, which a subclass may have made its own
        native_id = getattr(thread, "_native_id", None)
        told = plain(name) if isinstance(name, str) else type(thread).__name__
        names[ident] = told, native_id if isinstance(native_id, int) else None
    return names


def _line(stacks: tuple[ThreadStack, ...], file: str) -> int | None:
    """The line of the cell that the main thread is at, below whatever it called."""
    main = next((stack for stack in stacks if stack.main), None)
    return None if main is None else innermost(main.frames, file)


def innermost(frames: tuple[Frame, ...], file: str) -> int | None:
    return next((frame.line for frame in reversed(frames) if frame.file == file), None)


def _error(done: Done | None) -> tuple[str | None, str | None, int | None]:
    """Of the last call, if it failed: what was raised, and in which file and line of the cell."""
    error = None if done is None else done.outcome.error
    if error is None:
        return None, None, None
    text = plain(f"{error.ename}: {error.evalue}" if error.evalue else error.ename)
    if not error.frames:
        return text, None, None
    file = error.frames[0].file
    return text, file, innermost(error.frames, file)
