"""What one rank is doing according to its snapshot, and which operation it waits in.

Other ranks appear only as numbers in collectives; `findings` decides which rank is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from meshbook.diagnose import wait_sites
from meshbook.diagnose.source_files import cell_label, is_cell_file, is_user_file, library_of, sanitize_line, short_path
from meshbook.ids import CallId
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, POINT_TO_POINT, CollectiveInfo, Frame, RankSnapshot, ThreadStack

# Seconds without a heartbeat after which a rank without any other information counts as silent. Ranks send one per
# second.
SILENT_S = 5.0
# CPU use of a thread, in percent of a core, from which it counts as computing.
BUSY_PERCENT = 50.0
# Seconds that a thread must have waited for the GIL before another one is reported to keep it.
GIL_LAG_S = 1.0

# Libraries that wait for their own threads in C: a futex wait below their frames is work, not a lock of the user's.
_THREAD_POOL_LIBRARIES = frozenset(("torch", "numpy", "scipy", "triton"))

# What gloo prints before it aborts a process that receives more bytes than its tensor has.
_GLOO_SIZE_ERRORS = ("op.preamble.length <= op.nbytes", "Received data size doesn't match expected size")


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


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is doing.

    Attributes:
        kind: a kind of finding, or "collective", "forming", "sleep", "compute", "ended", "idle".
        phrase: follows "rank 3 ": "waits for a lock".
        location: the line of the user's code; None if unknown.
        op: the process-group operation that it waits in; None if it waits in none.
        sure: False if stacks are missing and this is inferred from less.
        asleep: whether it is known to use no CPU time now.
    """

    rank: int
    kind: str
    phrase: str
    location: SourceLocation | None = None
    op: CollectiveInfo | None = None
    sure: bool = True
    asleep: bool = False
    evidence: tuple[str, ...] = ()


def activity_of(snapshot: RankSnapshot) -> Activity:
    """Return what the rank of a snapshot is doing, whichever fields are missing."""
    exited_activity = _exited_activity(snapshot)
    if exited_activity is not None:
        return exited_activity
    process = snapshot.process
    main = main_stack(snapshot)
    at = user_location(snapshot)
    rank = snapshot.rank
    if process is not None and process.state in ("T", "t"):
        traced = " by a debugger" if process.state == "t" else ""
        return Activity(rank, "stopped", f"is stopped{traced}", at, current_op(snapshot), asleep=True)
    if snapshot.awaiting_input:
        return Activity(rank, "waits-for-input", "waits for the answer to input()", at, asleep=True)
    if snapshot.call is None:
        return _activity_without_call(snapshot)
    gil_holder = _gil_holder_activity(snapshot)
    if gil_holder is not None:
        return gil_holder
    if process is not None and process.state == "D":
        about = f" ({sanitize_line(process.syscall_target)})" if process.syscall_target else ""
        return Activity(rank, "disk-sleep", f"is in uninterruptible sleep{about}", at, asleep=True)
    if main is None:
        return _activity_without_stacks(snapshot)
    return _activity_from_stack(snapshot, main, at)


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


def innermost_cell_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame in a cell."""
    return next((frame for frame in reversed(frames) if is_cell_file(frame.file)), None)


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


def _exited_activity(snapshot: RankSnapshot) -> Activity | None:
    exited = snapshot.exited
    if exited is None:
        if snapshot.process is not None and snapshot.process.state in ("Z", "X"):
            return Activity(snapshot.rank, "killed", "has ended as a process", user_location(snapshot), asleep=True)
        return None
    exit_text = exited.description
    evidence = [f"its process {exited.pid} on {sanitize_line(exited.host, 80)} {exit_text}"]
    if exited.last_collective:
        evidence.append(f"its last collective: {sanitize_line(exited.last_collective)}")
    evidence += [f"it said last: {sanitize_line(line)}" for line in exited.last_lines[-3:] if line.strip()]
    if any(message in line for line in exited.last_lines for message in _GLOO_SIZE_ERRORS):
        phrase = "was ended by gloo, which received more data than the rank had room for: tensors differ in size"
        return Activity(snapshot.rank, "shape-mismatch", phrase, asleep=True, evidence=tuple(evidence))
    process = snapshot.process
    killed_for_memory = exited.oom_killed or (process is not None and process.oom_killed)
    kind, phrase = (
        ("out-of-memory", "was killed because memory ran out") if killed_for_memory else ("killed", exit_text)
    )
    return Activity(snapshot.rank, kind, phrase, user_location(snapshot), asleep=True, evidence=tuple(evidence))


def _activity_without_call(snapshot: RankSnapshot) -> Activity:
    rank = snapshot.rank
    silent = snapshot.beat_age_s is not None and snapshot.beat_age_s > SILENT_S
    if snapshot.source == "none" and not snapshot.stacks and silent:
        return _silent_activity(snapshot)
    if snapshot.last_cell is None and snapshot.last_status is None:
        return Activity(rank, "idle", "runs nothing", asleep=True)
    label = sanitize_line(snapshot.last_cell or "the last call", 80)
    where = user_location(snapshot) if snapshot.last_error else None
    match snapshot.last_status:
        case "error":
            error = sanitize_line(snapshot.last_error or "an exception")
            return Activity(rank, "ended", f"ended {label} with {error}", where, asleep=True)
        case "interrupted":
            return Activity(rank, "ended", f"was interrupted in {label}", where, asleep=True)
        case _:
            return Activity(rank, "ended", f"has ended {label}", where, asleep=True)


def _silent_activity(snapshot: RankSnapshot) -> Activity:
    since = f" for {format_duration(snapshot.beat_age_s)}" if snapshot.beat_age_s is not None else ""
    evidence = (f"no stack: {sanitize_line(snapshot.problem)}",) if snapshot.problem else ()
    return Activity(
        snapshot.rank,
        "rank-silent",
        f"has not been heard of{since}",
        user_location(snapshot),
        current_op(snapshot),
        evidence=evidence,
    )


def _activity_without_stacks(snapshot: RankSnapshot) -> Activity:
    """Return what a rank with a running call does if its main thread's stack is unknown."""
    op, where = current_op(snapshot), user_location(snapshot)
    evidence = (f"no stack: {sanitize_line(snapshot.problem)}",) if snapshot.problem else ()
    if op is not None:
        where = op_location(op, snapshot) or where
        return Activity(
            snapshot.rank, wait_sites.COLLECTIVE, f"waits in {op.op}", where, op, sure=False, evidence=evidence
        )
    if snapshot.source == "none" and (snapshot.beat_age_s or 0.0) > SILENT_S:
        return _silent_activity(snapshot)
    process = snapshot.process
    asleep = process is not None and process.state == "S"
    if process is not None and asleep and (site := wait_sites.site_of_syscall(process.syscall, process.syscall_target)):
        return Activity(
            snapshot.rank, site.kind, sanitize_line(site.phrase), where, sure=False, asleep=True, evidence=evidence
        )
    return Activity(snapshot.rank, wait_sites.COMPUTE, "is busy", where, sure=False, asleep=asleep, evidence=evidence)


def _gil_holder_activity(snapshot: RankSnapshot) -> Activity | None:
    """Return the activity of a rank on which one thread keeps the GIL; None if none does.

    Such a rank is sampled from outside the process, as no thread inside can respond.
    """
    lag = snapshot.health.gil_lag_s if snapshot.health is not None else 0.0
    if snapshot.source != "outside" and lag < GIL_LAG_S:
        return None
    for stack in snapshot.stacks:
        if stack.has_gil:
            frame = innermost_user_frame(stack.frames)
            thread = "" if stack.is_main else f" in its thread {sanitize_line(stack.name, 80)}"
            evidence = [f"its other threads cannot run, so it was looked at from outside{thread}"]
            return Activity(
                snapshot.rank,
                "gil-kept",
                f"keeps the interpreter lock{thread}",
                locate(frame, snapshot) or user_location(snapshot),
                evidence=tuple(evidence),
            )
    return None


def _activity_from_stack(snapshot: RankSnapshot, main: ThreadStack, where: SourceLocation | None) -> Activity:
    rank, process, op = snapshot.rank, snapshot.process, current_op(snapshot)
    innermost_user = max((n for n, frame in enumerate(main.frames) if is_user_file(frame.file)), default=-1)
    below = main.frames[innermost_user + 1 :]
    if innermost_user < 0:  # no user code on the stack: skip the frames that run cells
        start = max((n for n, frame in enumerate(main.frames) if _is_cell_runner(frame)), default=-1)
        below = main.frames[start + 1 :]
    known = wait_sites.outermost_site(below)
    in_backward = any((short_path(frame.file), frame.function) in wait_sites.AUTOGRAD_FRAMES for frame in below)
    if known is None and in_backward and op is not None:
        # DDP and FSDP wait in C++, on the thread that called backward().
        return Activity(rank, wait_sites.COLLECTIVE, f"waits in {op.op} of a backward pass", where, op, asleep=True)
    if known is not None:
        site, frame = known
        if site.kind == wait_sites.COLLECTIVE:
            if op is None and wait_sites.is_forming_group(below):
                return Activity(
                    rank, wait_sites.FORMING, "makes the connections of a process group", where, asleep=True
                )
            if op is None:  # between two operations, or in one that the ring does not record
                return Activity(rank, wait_sites.COMPUTE, f"is in {sanitize_line(frame.function, 60)}", where)
            return Activity(
                rank, wait_sites.COLLECTIVE, f"waits in {op.op}", where or op_location(op, snapshot), op, asleep=True
            )
        if site.kind == wait_sites.FORMING:
            phrase = f"makes a process group in {sanitize_line(frame.function, 60)}"
            return Activity(rank, wait_sites.FORMING, phrase, where, asleep=True)
        return _waiting_activity(snapshot, main, site, where)
    state = main.state or (process.state if process is not None else "")
    syscall = main.syscall or (process.syscall if process is not None else None)
    asleep = state == "S" or (not state and main.is_active is False)
    if asleep and (
        found := wait_sites.site_of_syscall(syscall, process.syscall_target if process is not None else None)
    ):
        # Operations on remote tensors run without a line of user code, and torch waits for their collectives in C++.
        in_torch = where is None or (below and library_of(below[0].file) == "torch")
        if found.kind != wait_sites.SLEEP and in_torch and op is not None:
            return Activity(rank, wait_sites.COLLECTIVE, f"waits in {op.op}", where, op, sure=False, asleep=True)
        if found.kind == "waits-for-lock" and below and library_of(below[0].file) in _THREAD_POOL_LIBRARIES:
            return Activity(rank, wait_sites.COMPUTE, f"waits in {library_of(below[0].file)}", where, asleep=True)
        return _waiting_activity(snapshot, main, found, where)
    if state == "S" and process is not None and process.children:
        return Activity(rank, "waits-for-subprocess", "waits for a subprocess", where, sure=False, asleep=True)
    inside = f" in {library_of(below[0].file)}" if below else ""
    return Activity(rank, wait_sites.COMPUTE, f"{'is' if asleep else 'computes'}{inside}", where, asleep=asleep)


def _waiting_activity(
    snapshot: RankSnapshot, main: ThreadStack, site: wait_sites.WaitSite, where: SourceLocation | None
) -> Activity:
    """Return the activity of a rank that waits outside the process groups, with evidence on what it waits for."""
    phrase, evidence, kind = site.phrase, [], site.kind
    if main.waits_on:
        phrase = f"waits for {sanitize_line(main.waits_on, 80)}"
    if main.held_by:
        evidence.append(f"held by its thread {sanitize_line(main.held_by, 80)}")
    if kind in ("waits-for-lock", "waits-for-thread"):
        for other in _other_waiting_threads(snapshot, main):
            other_location = locate(innermost_user_frame(other.frames), snapshot)
            same = main.waits_on is not None and main.waits_on == other.waits_on  # both wait behind a third one
            # Where one lock's name is known, the other's would be too: a thread without `waits_on` waits in C for
            # something else.
            locked = main.waits_on is None or other.waits_on is not None
            if kind == "waits-for-lock" and locked and not same:
                kind, phrase = "thread-deadlock", "has two threads that wait for each other's locks"
            evidence.append(
                f"its thread {sanitize_line(other.name, 80)} waits{' for a lock' if locked else ''} too "
                f"({other_location})"
            )
    if kind in ("waits-for-worker", "waits-for-subprocess", "waits-for-pipe", "waits-for-queue"):
        children = snapshot.process.children if snapshot.process is not None else ()
        phrase = {"Z": f"{phrase}, which has died", "T": f"{phrase}, which is stopped"}.get(
            next((state for _, state, _ in children if state in "ZT"), ""), phrase
        )
        for pid, state, command in children[:4]:
            state_texts = {"Z": "has died", "T": "is stopped", "R": "computes", "S": "sleeps", "D": "is in disk sleep"}
            evidence.append(
                f"child process {pid} {state_texts.get(state, 'is in state ' + sanitize_line(state, 4))}: "
                f"{sanitize_line(command, 80)}"
            )
    return Activity(snapshot.rank, kind, sanitize_line(phrase), where, asleep=True, evidence=tuple(evidence))


def _other_waiting_threads(snapshot: RankSnapshot, main: ThreadStack) -> list[ThreadStack]:
    """Return the other threads of this rank that wait for a lock in user code."""
    found = []
    for stack in snapshot.stacks:
        if stack is main or not stack.frames or innermost_user_frame(stack.frames) is None:
            continue
        frames = stack.frames
        innermost = max(n for n, frame in enumerate(frames) if is_user_file(frame.file))
        known = wait_sites.outermost_site(frames[innermost + 1 :])
        waits = known is not None and known[0].kind == "waits-for-lock"
        in_c = innermost == len(frames) - 1 and stack.syscall in ("futex", "futex_waitv") and stack.state != "R"
        if waits or in_c or (stack.waits_on or "").startswith("lock"):
            found.append(stack)
    return found


def _is_cell_runner(frame: Frame) -> bool:
    return library_of(frame.file) == "meshbook" and frame.function not in ("_input", "_getpass")


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


def format_duration(value: float | None) -> str:
    """Format a duration for readers: `0.4 s`, `12 s`, `3 min 20 s`."""
    if value is None:
        return "some time"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


_PLURAL_VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}


def conjugate(phrase: str, ranks: Sequence[int]) -> str:
    """Return a phrase about one rank in the form that fits these ranks: `waits for a lock`, `wait for a lock`."""
    if len(ranks) == 1:
        return phrase
    first, space, remainder = phrase.partition(" ")
    return f"{_PLURAL_VERBS.get(first, first.removesuffix('s'))}{space}{remainder}"
