"""What snapshots say of one rank: stacks, lines, operations, and whether it moved between two of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from meshbook.diagnose import wait_sites
from meshbook.diagnose.source_files import cell_label, is_cell_file, is_user_file, sanitize_line, short_path
from meshbook.ids import CallId
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, POINT_TO_POINT, CollectiveInfo, Frame, RankSnapshot, ThreadStack

# CPU use of a thread, in percent of a core, from which it counts as computing.
BUSY_PERCENT = 50.0


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A location in the user's code."""

    file: str
    line: int
    function: str = ""
    cell: str | None = None  # "cell 7", if it is in a cell whose name is known

    def __str__(self) -> str:
        where = (
            f"{self.cell}, line {self.line}"
            if self.cell
            else f"{short_path(sanitize_line(self.file))}, line {self.line}"
        )
        if self.function and not self.function.startswith("<"):
            where += f" in {sanitize_line(self.function, 60)}"
        return where


def with_actor_thread_as_main(snapshot: RankSnapshot) -> RankSnapshot:
    """Return the snapshot with a thread that runs an actor's endpoint as main thread, if the main one is idle."""
    if snapshot.call is not None or snapshot.exited is not None:
        return snapshot
    actor_stacks = [
        stack
        for stack in snapshot.stacks
        if not stack.is_main
        and stack.name.startswith(ACTOR_THREAD_PREFIX)
        and innermost_user_frame(stack.frames) is not None
    ]
    if not actor_stacks:
        return snapshot
    process = snapshot.process
    in_group = (
        stack
        for stack in actor_stacks
        if (known := wait_sites.outermost_site(stack.frames)) and known[0] is wait_sites.IN_COLLECTIVE
    )
    chosen = next(in_group, actor_stacks[0])
    rest = tuple(stack for stack in snapshot.stacks if stack is not chosen and not stack.is_main)
    return structs.replace(
        snapshot,
        call=CallId(chosen.name),
        cell=None,
        file=None,
        cell_line=None,
        running_s=None,
        # The recorded system call is that of the main thread.
        process=None if process is None else structs.replace(process, syscall=None, syscall_target=None),
        stacks=(structs.replace(chosen, is_main=True), *rest),
    )


def actor_endpoint_of(snapshot: RankSnapshot) -> tuple[str, str] | None:
    """Return the ("actor trainer", "step") that a rank runs, given what `with_actor_thread_as_main` returned."""
    if snapshot.call is None or not snapshot.call.startswith(ACTOR_THREAD_PREFIX):
        return None
    main = main_stack(snapshot)
    first = next((frame for frame in main.frames if is_user_file(frame.file)), None) if main is not None else None
    return None if first is None else (sanitize_line(snapshot.call, 80), sanitize_line(first.function, 60))


def main_stack(snapshot: RankSnapshot) -> ThreadStack | None:
    """Return the main thread's stack, or None if it is unknown."""
    named = [stack for stack in snapshot.stacks if stack.is_main]
    return next((stack for stack in named if stack.frames), None)


def innermost_user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code."""
    return next((frame for frame in reversed(frames) if is_user_file(frame.file)), None)


def locate(frame: Frame | None, snapshot: RankSnapshot) -> SourceLocation | None:
    """Return a frame's location, with its cell's name if it is in the running cell or the file name tells it."""
    if frame is None:
        return None
    if frame.file == snapshot.file:
        cell = snapshot.cell
    else:
        cell = cell_label(frame.file) or ("an earlier cell" if is_cell_file(frame.file) else None)
    return SourceLocation(frame.file, frame.line, frame.function, sanitize_line(cell, 80) if cell else None)


def user_location(snapshot: RankSnapshot) -> SourceLocation | None:
    """Return where the main thread is in user code: its innermost line, else the cell line of the last heartbeat."""
    main = main_stack(snapshot)
    frame = None if main is None else innermost_user_frame(main.frames)
    if frame is not None:
        return locate(frame, snapshot)
    label = snapshot.cell or snapshot.last_cell
    if snapshot.cell_line is not None and (snapshot.file or label):
        return SourceLocation(snapshot.file or "", snapshot.cell_line, "", sanitize_line(label, 80) if label else None)
    return None


def current_op(snapshot: RankSnapshot) -> CollectiveInfo | None:
    """Return the open operation that the main thread waits in, as far as it can be determined."""
    in_flight = [op for op in snapshot.collectives if op.ended_s_ago is None]
    if not in_flight:
        return None
    main = main_stack(snapshot)
    lines = {(frame.file, frame.line) for frame in main.frames} if main is not None else set()
    on_stack = [op for op in in_flight if op.frame is not None and (op.frame.file, op.frame.line) in lines]
    # A line on the stack identifies the operation. Otherwise choose the oldest: of several operations begun with
    # async_op=True, one may be waited for elsewhere.
    return (on_stack or in_flight)[-1 if on_stack else 0]


def in_flight_transfers(snapshot: RankSnapshot) -> tuple[CollectiveInfo, ...]:
    """Return the rank's sends and receives in flight, wherever the main thread is now."""
    return tuple(op for op in snapshot.collectives if op.ended_s_ago is None and op.op in POINT_TO_POINT)


def last_collective(snapshot: RankSnapshot) -> CollectiveInfo | None:
    """Return the last collective that the rank began, ended or not; sends and receives do not count."""
    return next((op for op in reversed(snapshot.collectives) if op.op not in POINT_TO_POINT), None)


def op_location(op: CollectiveInfo, snapshot: RankSnapshot) -> SourceLocation | None:
    return locate(op.frame, snapshot)


def has_moved(before: RankSnapshot | None, now: RankSnapshot) -> bool | None:
    """Whether a rank made progress between two snapshots; None if the earlier one or comparable data is missing.

    Progress is another collective, step or call, or another user line outside the innermost loop.
    """
    if before is None:
        return None
    if (before.call, before.num_collectives, _num_steps(before)) != (now.call, now.num_collectives, _num_steps(now)):
        return True
    earlier, later = main_stack(before), main_stack(now)
    if earlier is None or later is None:
        return None
    return _user_lines(earlier) != _user_lines(later)


def is_looping(before: RankSnapshot | None, now: RankSnapshot) -> bool:
    """Whether two snapshots show the rank in the same user functions, with no collective and no step in between."""
    if before is None or before.call is None or before.call != now.call:
        return False
    if (before.num_collectives, _num_steps(before)) != (now.num_collectives, _num_steps(now)):
        return False
    earlier, later = main_stack(before), main_stack(now)
    if earlier is None or later is None:
        return False
    first, second = innermost_user_frame(earlier.frames), innermost_user_frame(later.frames)
    # Compare the callers: a loop may call functions, and the two samples may fall into different ones.
    shared = [
        a
        for a, b in zip(_user_frames(earlier), _user_frames(later), strict=False)
        if (a.file, a.function) == (b.file, b.function)
    ]
    return bool(shared) and first is not None and second is not None


def since_last_collective_s(snapshot: RankSnapshot) -> float:
    """Return the seconds since the rank was last in a collective, or since its cell began."""
    last = [op.ended_s_ago if op.ended_s_ago is not None else 0.0 for op in snapshot.collectives]
    return min([*last, *([snapshot.running_s] if snapshot.running_s is not None else [])], default=0.0)


def is_busy(snapshot: RankSnapshot, before: RankSnapshot | None = None) -> bool:
    """Whether the rank uses a CPU."""
    main = main_stack(snapshot)
    if snapshot.health is not None and snapshot.health.cpu_percent >= BUSY_PERCENT:
        return True
    if before is not None and before.process is not None and snapshot.process is not None:
        return snapshot.process.cpu_s - before.process.cpu_s > 0.05
    if main is not None and (main.state == "R" or main.is_active):
        return True
    return snapshot.process is not None and snapshot.process.state == "R"


def _user_frames(stack: ThreadStack) -> list[Frame]:
    return [frame for frame in stack.frames if is_user_file(frame.file)]


def _user_lines(stack: ThreadStack) -> list[tuple[str, int]]:
    return [(frame.file, frame.line) for frame in _user_frames(stack)]


def _num_steps(snapshot: RankSnapshot) -> int:
    return snapshot.health.num_steps if snapshot.health is not None else 0
