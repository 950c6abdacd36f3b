"""What one rank is doing according to its snapshot, and which operation it waits in.

Other ranks appear only as numbers in collectives; `findings` decides which rank is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshbook.diagnose import wait_sites
from meshbook.diagnose.snapshot_reader import (
    SourceLocation,
    current_op,
    innermost_user_frame,
    locate,
    main_stack,
    op_location,
    user_location,
)
from meshbook.diagnose.source_files import is_user_file, library_of, sanitize_line, short_path
from meshbook.wire.messages import CollectiveInfo, Frame, RankSnapshot, ThreadStack

# Seconds without a heartbeat after which a rank without any other information counts as silent. Ranks send one per
# second.
SILENT_S = 5.0
# Seconds that a thread must have waited for the GIL before another one is reported to keep it.
GIL_LAG_S = 1.0

# The part of a look from outside for which a thread waited for a processor, from which the rank's not answering is laid
# to that: a rank that only shares a processor with others answers meanwhile.
STARVED_SHARE = 0.8

# Libraries that wait for their own threads in C: a futex wait below their frames is work, not a lock of the user's.
_THREAD_POOL_LIBRARIES = frozenset(("torch", "numpy", "scipy", "triton"))

# What gloo prints before it aborts a process that receives more bytes than its tensor has.
_GLOO_SIZE_ERRORS = ("op.preamble.length <= op.nbytes", "Received data size doesn't match expected size")


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
        site = wait_sites.input_site(main.frames if main is not None else ())
        return Activity(rank, site.kind, site.phrase, at, asleep=True)
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


def _is_starved(snapshot: RankSnapshot) -> bool:
    """Whether a rank did not answer because a thread of it got no processor."""
    return snapshot.source != "inside" and 0.0 < STARVED_SHARE * snapshot.looked_s <= snapshot.starved_s


def _starved_activity(snapshot: RankSnapshot) -> Activity:
    looked = f"{format_duration(snapshot.starved_s)} of the {format_duration(snapshot.looked_s)} of a look"
    evidence = (f"a thread of it waited for a processor for {looked}, so what it does otherwise is not known",)
    return Activity(snapshot.rank, "starved", "gets no processor", user_location(snapshot), evidence=evidence)


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
    if _is_starved(snapshot):
        return _starved_activity(snapshot)
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
        if stack.has_gil and _is_starved(snapshot):
            return _starved_activity(snapshot)
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


@dataclass(frozen=True, slots=True)
class _StackSummary:
    """The main thread's stack, and what the patterns below look at."""

    snapshot: RankSnapshot
    main: ThreadStack
    location: SourceLocation | None
    op: CollectiveInfo | None  # the operation that it may wait in
    below: Sequence[Frame]  # frames of libraries below the user's line
    known: tuple[wait_sites.WaitSite, Frame] | None  # the outermost of them that waits
    state: str  # of the thread: "S"
    asleep: bool

    @property
    def library(self) -> str:
        """The library that the user's line calls; empty if it calls none."""
        return (library_of(self.below[0].file) or "") if self.below else ""

    def activity(
        self, kind: str, phrase: str, *, op: CollectiveInfo | None = None, sure: bool = True, asleep: bool = True
    ) -> Activity:
        return Activity(self.snapshot.rank, kind, phrase, self.location, op, sure=sure, asleep=asleep)


def _activity_from_stack(snapshot: RankSnapshot, main: ThreadStack, where: SourceLocation | None) -> Activity:
    process = snapshot.process
    innermost_user = max((n for n, frame in enumerate(main.frames) if is_user_file(frame.file)), default=-1)
    if innermost_user < 0:  # no user code on the stack: skip the frames that run cells
        innermost_user = max((n for n, frame in enumerate(main.frames) if _is_cell_runner(frame)), default=-1)
    below = main.frames[innermost_user + 1 :]
    state = main.state or (process.state if process is not None else "")
    asleep = state == "S" or (not state and main.is_active is False)
    known = wait_sites.outermost_site(below)
    stack = _StackSummary(snapshot, main, where, current_op(snapshot), below, known, state, asleep)
    activity = next(found for pattern in _STACK_PATTERNS if (found := pattern(stack)) is not None)
    # A wait that its frames show is one, whichever of its threads gets no processor.
    return _starved_activity(snapshot) if known is None and activity.op is None and _is_starved(snapshot) else activity


def _in_backward(stack: _StackSummary) -> Activity | None:
    """DDP and FSDP wait in C++, on the thread that called backward()."""
    if stack.known is not None or stack.op is None:
        return None
    if not any((short_path(frame.file), frame.function) in wait_sites.AUTOGRAD_FRAMES for frame in stack.below):
        return None
    return stack.activity(wait_sites.COLLECTIVE, f"waits in {stack.op.op} of a backward pass", op=stack.op)


def _in_process_group(stack: _StackSummary) -> Activity | None:
    if stack.known is None:
        return None
    site, frame = stack.known
    if site.kind == wait_sites.FORMING:
        return stack.activity(wait_sites.FORMING, f"makes a process group in {sanitize_line(frame.function, 60)}")
    if site.kind != wait_sites.COLLECTIVE:
        return None
    if stack.op is not None:
        location = stack.location or op_location(stack.op, stack.snapshot)
        return replace(stack.activity(site.kind, f"waits in {stack.op.op}", op=stack.op), location=location)
    if wait_sites.is_forming_group(stack.below):
        return stack.activity(wait_sites.FORMING, "makes the connections of a process group")
    # Between two operations, or in one that the ring does not record.
    return stack.activity(wait_sites.COMPUTE, f"is in {sanitize_line(frame.function, 60)}", asleep=False)


def _at_wait_site(stack: _StackSummary) -> Activity | None:
    return None if stack.known is None else _waiting_activity(stack, stack.known[0])


def _in_system_call(stack: _StackSummary) -> Activity | None:
    process = stack.snapshot.process
    syscall = stack.main.syscall or (process.syscall if process is not None else None)
    site = wait_sites.site_of_syscall(syscall, process.syscall_target if process is not None else None)
    if not stack.asleep or site is None:
        return None
    # Operations on remote tensors run without a line of user code, and torch waits for their collectives in C++.
    in_torch = stack.location is None or stack.library == "torch"
    if site.kind != wait_sites.SLEEP and in_torch and stack.op is not None:
        return stack.activity(wait_sites.COLLECTIVE, f"waits in {stack.op.op}", op=stack.op, sure=False)
    if site.kind == "waits-for-lock" and stack.library in _THREAD_POOL_LIBRARIES:
        return stack.activity(wait_sites.COMPUTE, f"waits in {stack.library}")
    return _waiting_activity(stack, site)


def _with_child_processes(stack: _StackSummary) -> Activity | None:
    process = stack.snapshot.process
    if stack.state != "S" or process is None or not process.children:
        return None
    return stack.activity("waits-for-subprocess", "waits for a subprocess", sure=False)


def _computing(stack: _StackSummary) -> Activity:
    inside = f" in {stack.library}" if stack.library else ""
    return stack.activity(wait_sites.COMPUTE, f"{'is' if stack.asleep else 'computes'}{inside}", asleep=stack.asleep)


# What a stack may show; the first that matches counts, and the last one always does.
_STACK_PATTERNS: tuple[Callable[[_StackSummary], Activity | None], ...] = (
    _in_backward,
    _in_process_group,
    _at_wait_site,
    _in_system_call,
    _with_child_processes,
    _computing,
)


def _waiting_activity(stack: _StackSummary, site: wait_sites.WaitSite) -> Activity:
    """Return the activity of a rank that waits outside the process groups, with evidence on what it waits for."""
    snapshot, main = stack.snapshot, stack.main
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
    return Activity(snapshot.rank, kind, sanitize_line(phrase), stack.location, asleep=True, evidence=tuple(evidence))


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
