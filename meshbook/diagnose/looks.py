"""One rank at a time: what its snapshot says that it is doing, and for whom it waits.

Knows the other ranks only as numbers that collectives name; who is to blame is for `findings` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from meshbook.diagnose import places
from meshbook.diagnose.code import cell_of, is_cell, is_user, library_of, plain, short
from meshbook.ids import CallId
from meshbook.wire.messages import ACTOR_THREAD, POINT_TO_POINT, CollectiveSeen, Frame, RankSnapshot, ThreadStack

# Seconds without a beat after which a rank of which nothing can be seen counts as silent. It beats once a second.
SILENT_S = 5.0
# Part of a core that a thread must use to count as computing.
BUSY_PERCENT = 50.0
# Seconds for which a thread must have waited for the interpreter lock before somebody is said to keep it.
GIL_LAG_S = 1.0

# Libraries that wait for threads of their own in C: below one of their frames that is work, and no lock of the user's.
_THREADED = frozenset(("torch", "numpy", "scipy", "triton"))

# What gloo says before it ends a process that is sent more bytes than its tensor has.
_GLOO_SIZES = ("op.preamble.length <= op.nbytes", "Received data size doesn't match expected size")


@dataclass(frozen=True, slots=True)
class At:
    """A place in the user's code."""

    file: str
    line: int
    function: str = ""
    cell: str | None = None  # "cell 7", if it is in one whose name is known

    def __str__(self) -> str:
        where = f"{self.cell}, line {self.line}" if self.cell else f"{short(plain(self.file))}, line {self.line}"
        if self.function and not self.function.startswith("<"):
            where += f" in {plain(self.function, 60)}"
        return where


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank is doing.

    Attributes:
        what: a kind of finding, or "collective", "forming", "sleep", "compute", "ended", "idle".
        words: follows "rank 3 ": "waits for a lock".
        at: the user's line; None if nothing is known of it.
        op: the operation of a process group that it waits in; None if it waits in none.
        sure: False where stacks were missing and this is concluded from less.
        asleep: True if it is known to use no processor time now.
    """

    rank: int
    what: str
    words: str
    at: At | None = None
    op: CollectiveSeen | None = None
    sure: bool = True
    asleep: bool = False
    evidence: tuple[str, ...] = ()


def what_it_does(snapshot: RankSnapshot) -> Doing:
    """Reads one snapshot, whatever is missing in it."""
    gone = _gone(snapshot)
    if gone is not None:
        return gone
    process = snapshot.process
    main = main_stack(snapshot)
    at = place_in_user_code(snapshot)
    rank = snapshot.rank
    if process is not None and process.state in ("T", "t"):
        traced = " by a debugger" if process.state == "t" else ""
        return Doing(rank, "stopped", f"is stopped{traced}", at, current_op(snapshot), asleep=True)
    if snapshot.asking:
        return Doing(rank, "waits-for-input", "waits for the answer to input()", at, asleep=True)
    if snapshot.call is None:
        return _without_a_call(snapshot)
    keeper = _keeps_the_gil(snapshot)
    if keeper is not None:
        return keeper
    if process is not None and process.state == "D":
        about = f" ({plain(process.target)})" if process.target else ""
        return Doing(rank, "disk-sleep", f"is in uninterruptible sleep{about}", at, asleep=True)
    if main is None:
        return _without_stacks(snapshot)
    return _from_stack(snapshot, main, at)


def acting(snapshot: RankSnapshot) -> RankSnapshot:
    """Where nothing runs on the main thread and an actor is in an endpoint: that, as what the rank does."""
    if snapshot.call is not None or snapshot.exited is not None:
        return snapshot
    at_work = [
        stack
        for stack in snapshot.stacks
        if not stack.main and stack.name.startswith(ACTOR_THREAD) and user_frame(stack.frames) is not None
    ]
    if not at_work:
        return snapshot
    process = snapshot.process
    in_group = (stack for stack in at_work if (known := places.outermost(stack.frames)) and known[0] is places.GROUP)
    chosen = next(in_group, at_work[0])
    rest = tuple(stack for stack in snapshot.stacks if stack is not chosen and not stack.main)
    return structs.replace(
        snapshot,
        call=CallId(chosen.name),
        cell=None,
        file=None,
        cell_line=None,
        running_s=None,
        process=None if process is None else structs.replace(process, syscall=None, target=None),  # the main thread's
        stacks=(structs.replace(chosen, main=True), *rest),
    )


def endpoint_of(snapshot: RankSnapshot) -> tuple[str, str] | None:
    """The actor and the endpoint that a rank is in, of what `acting` gave: ("actor trainer", "step")."""
    if snapshot.call is None or not snapshot.call.startswith(ACTOR_THREAD):
        return None
    main = main_stack(snapshot)
    first = next((frame for frame in main.frames if is_user(frame.file)), None) if main is not None else None
    return None if first is None else (plain(snapshot.call, 80), plain(first.function, 60))


def main_stack(snapshot: RankSnapshot) -> ThreadStack | None:
    """The main thread's stack; None if it is not known."""
    named = [stack for stack in snapshot.stacks if stack.main]
    return next((stack for stack in named if stack.frames), None)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in reversed(frames) if is_user(frame.file)), None)


def cell_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame in a cell."""
    return next((frame for frame in reversed(frames) if is_cell(frame.file)), None)


def at(frame: Frame | None, snapshot: RankSnapshot) -> At | None:
    """A frame as a place, with the name of its cell if it is in the running one or tells itself."""
    if frame is None:
        return None
    if frame.file == snapshot.file:
        cell = snapshot.cell
    else:
        cell = cell_of(frame.file) or ("an earlier cell" if is_cell(frame.file) else None)
    return At(frame.file, frame.line, frame.function, plain(cell, 80) if cell else None)


def place_in_user_code(snapshot: RankSnapshot) -> At | None:
    """Where the main thread is in the user's code: its innermost line, or what the beats say of the cell."""
    main = main_stack(snapshot)
    frame = None if main is None else user_frame(main.frames)
    if frame is not None:
        return at(frame, snapshot)
    label = snapshot.cell or snapshot.last_cell
    if snapshot.cell_line is not None and (snapshot.file or label):
        return At(snapshot.file or "", snapshot.cell_line, "", plain(label, 80) if label else None)
    return None


def current_op(snapshot: RankSnapshot) -> CollectiveSeen | None:
    """The open operation that the main thread waits in, as far as can be told."""
    going = [op for op in snapshot.collectives if op.ended_s is None]
    if not going:
        return None
    main = main_stack(snapshot)
    lines = {(frame.file, frame.line) for frame in main.frames} if main is not None else set()
    here = [op for op in going if op.line is not None and (op.line.file, op.line.line) in lines]
    # The line says which: of several that were begun with async_op=True one may be waited for elsewhere, oldest first.
    return (here or going)[-1 if here else 0]


def open_transfers(snapshot: RankSnapshot) -> tuple[CollectiveSeen, ...]:
    """Its sends and receives that are under way, in whatever the main thread is now."""
    return tuple(op for op in snapshot.collectives if op.ended_s is None and op.op in POINT_TO_POINT)


def last_collective(snapshot: RankSnapshot) -> CollectiveSeen | None:
    """The last operation of a whole group that it began, ended or not."""
    return next((op for op in reversed(snapshot.collectives) if op.op not in POINT_TO_POINT), None)


def op_line(op: CollectiveSeen, snapshot: RankSnapshot) -> At | None:
    return at(op.line, snapshot)


def _gone(snapshot: RankSnapshot) -> Doing | None:
    exited = snapshot.exited
    if exited is None:
        if snapshot.process is not None and snapshot.process.state in ("Z", "X"):
            return Doing(snapshot.rank, "killed", "has ended as a process", place_in_user_code(snapshot), asleep=True)
        return None
    how = exited.how
    evidence = [f"its process {exited.pid} on {plain(exited.host, 80)} {how}"]
    if exited.last_collective:
        evidence.append(f"its last collective: {plain(exited.last_collective)}")
    evidence += [f"it said last: {plain(line)}" for line in exited.last_lines[-3:] if line.strip()]
    if any(sign in line for line in exited.last_lines for sign in _GLOO_SIZES):
        words = "was ended by gloo, which received more data than the rank had room for: tensors differ in size"
        return Doing(snapshot.rank, "shape-mismatch", words, asleep=True, evidence=tuple(evidence))
    process = snapshot.process
    killed_for_memory = exited.oom_killed or (process is not None and process.oom_killed)
    what, words = ("out-of-memory", "was killed because memory ran out") if killed_for_memory else ("killed", how)
    return Doing(snapshot.rank, what, words, place_in_user_code(snapshot), asleep=True, evidence=tuple(evidence))


def _without_a_call(snapshot: RankSnapshot) -> Doing:
    rank = snapshot.rank
    silent = snapshot.beat_age_s is not None and snapshot.beat_age_s > SILENT_S
    if snapshot.source == "none" and not snapshot.stacks and silent:
        return _silent(snapshot)
    if snapshot.last_cell is None and snapshot.finished is None:
        return Doing(rank, "idle", "runs nothing", asleep=True)
    label = plain(snapshot.last_cell or "the last call", 80)
    where = place_in_user_code(snapshot) if snapshot.error else None
    match snapshot.finished:
        case "error":
            error = plain(snapshot.error or "an exception")
            return Doing(rank, "ended", f"ended {label} with {error}", where, asleep=True)
        case "interrupted":
            return Doing(rank, "ended", f"was interrupted in {label}", where, asleep=True)
        case _:
            return Doing(rank, "ended", f"has ended {label}", where, asleep=True)


def _silent(snapshot: RankSnapshot) -> Doing:
    since = f" for {seconds(snapshot.beat_age_s)}" if snapshot.beat_age_s is not None else ""
    evidence = (f"no stack: {plain(snapshot.problem)}",) if snapshot.problem else ()
    return Doing(
        snapshot.rank,
        "rank-silent",
        f"has not been heard of{since}",
        place_in_user_code(snapshot),
        current_op(snapshot),
        evidence=evidence,
    )


def _without_stacks(snapshot: RankSnapshot) -> Doing:
    """It runs something, and its main thread's stack is not known."""
    op, where = current_op(snapshot), place_in_user_code(snapshot)
    evidence = (f"no stack: {plain(snapshot.problem)}",) if snapshot.problem else ()
    if op is not None:
        where = op_line(op, snapshot) or where
        return Doing(snapshot.rank, places.COLLECTIVE, f"waits in {op.op}", where, op, sure=False, evidence=evidence)
    if snapshot.source == "none" and (snapshot.beat_age_s or 0.0) > SILENT_S:
        return _silent(snapshot)
    process = snapshot.process
    asleep = process is not None and process.state == "S"
    if process is not None and asleep and (place := places.by_syscall(process.syscall, process.target)):
        return Doing(snapshot.rank, place.doing, plain(place.words), where, sure=False, asleep=True, evidence=evidence)
    return Doing(snapshot.rank, places.COMPUTE, "is busy", where, sure=False, asleep=asleep, evidence=evidence)


def _keeps_the_gil(snapshot: RankSnapshot) -> Doing | None:
    """A thread that has not let go of the interpreter lock, seen from outside because nobody inside could answer."""
    lag = snapshot.health.gil_lag_s if snapshot.health is not None else 0.0
    if snapshot.source != "outside" and lag < GIL_LAG_S:
        return None
    for stack in snapshot.stacks:
        if stack.has_gil:
            frame = user_frame(stack.frames)
            thread = "" if stack.main else f" in its thread {plain(stack.name, 80)}"
            evidence = [f"its other threads cannot run, so it was looked at from outside{thread}"]
            return Doing(
                snapshot.rank,
                "gil-kept",
                f"keeps the interpreter lock{thread}",
                at(frame, snapshot) or place_in_user_code(snapshot),
                evidence=tuple(evidence),
            )
    return None


def _from_stack(snapshot: RankSnapshot, main: ThreadStack, where: At | None) -> Doing:
    rank, process, op = snapshot.rank, snapshot.process, current_op(snapshot)
    innermost_user = max((n for n, frame in enumerate(main.frames) if is_user(frame.file)), default=-1)
    below = main.frames[innermost_user + 1 :]
    if innermost_user < 0:  # nothing of the user's is on the stack: skip what runs cells
        start = max((n for n, frame in enumerate(main.frames) if _runs_cells(frame)), default=-1)
        below = main.frames[start + 1 :]
    known = places.outermost(below)
    in_backward = any((short(frame.file), frame.function) in places.AUTOGRAD for frame in below)
    if known is None and in_backward and op is not None:
        # DDP and FSDP wait in C++, on the thread that called backward().
        return Doing(rank, places.COLLECTIVE, f"waits in {op.op} of a backward pass", where, op, asleep=True)
    if known is not None:
        place, frame = known
        if place.doing == places.COLLECTIVE:
            if op is None and places.is_forming(below):
                return Doing(rank, places.FORMING, "makes the connections of a process group", where, asleep=True)
            if op is None:  # between two operations, or in one that the ring does not see
                return Doing(rank, places.COMPUTE, f"is in {plain(frame.function, 60)}", where)
            return Doing(rank, places.COLLECTIVE, f"waits in {op.op}", where or op_line(op, snapshot), op, asleep=True)
        if place.doing == places.FORMING:
            words = f"makes a process group in {plain(frame.function, 60)}"
            return Doing(rank, places.FORMING, words, where, asleep=True)
        return _waiting(snapshot, main, place, where)
    state = main.state or (process.state if process is not None else "")
    syscall = main.syscall or (process.syscall if process is not None else None)
    asleep = state == "S" or (not state and main.active is False)
    if asleep and (found := places.by_syscall(syscall, process.target if process is not None else None)):
        # Operations on remote tensors run without a line of the user's, and torch waits for theirs in C++.
        in_torch = where is None or (below and library_of(below[0].file) == "torch")
        if found.doing != places.SLEEP and in_torch and op is not None:
            return Doing(rank, places.COLLECTIVE, f"waits in {op.op}", where, op, sure=False, asleep=True)
        if found.doing == "waits-for-lock" and below and library_of(below[0].file) in _THREADED:
            return Doing(rank, places.COMPUTE, f"waits in {library_of(below[0].file)}", where, asleep=True)
        return _waiting(snapshot, main, found, where)
    if state == "S" and process is not None and process.children:
        return Doing(rank, "waits-for-subprocess", "waits for a subprocess", where, sure=False, asleep=True)
    inside = f" in {library_of(below[0].file)}" if below else ""
    return Doing(rank, places.COMPUTE, f"{'is' if asleep else 'computes'}{inside}", where, asleep=asleep)


def _waiting(snapshot: RankSnapshot, main: ThreadStack, place: places.Place, where: At | None) -> Doing:
    """It waits outside the process groups; and what else is known of that."""
    words, evidence, what = place.words, [], place.doing
    if main.waits_on:
        words = f"waits for {plain(main.waits_on, 80)}"
    if main.held_by:
        evidence.append(f"held by its thread {plain(main.held_by, 80)}")
    if what in ("waits-for-lock", "waits-for-thread"):
        for other in _other_waiters(snapshot, main):
            there = at(user_frame(other.frames), snapshot)
            same = main.waits_on is not None and main.waits_on == other.waits_on  # both behind a third one
            # Where one lock's name is known, the other's would be too: a thread without waits in C for something else.
            locked = main.waits_on is None or other.waits_on is not None
            if what == "waits-for-lock" and locked and not same:
                what, words = "thread-deadlock", "has two threads that wait for each other's locks"
            evidence.append(f"its thread {plain(other.name, 80)} waits{' for a lock' if locked else ''} too ({there})")
    if what in ("waits-for-worker", "waits-for-subprocess", "waits-for-pipe", "waits-for-queue"):
        children = snapshot.process.children if snapshot.process is not None else ()
        words = {"Z": f"{words}, which has died", "T": f"{words}, which is stopped"}.get(
            next((state for _, state, _ in children if state in "ZT"), ""), words
        )
        for pid, state, command in children[:4]:
            told = {"Z": "has died", "T": "is stopped", "R": "computes", "S": "sleeps", "D": "is in disk sleep"}
            evidence.append(
                f"child process {pid} {told.get(state, 'is in state ' + plain(state, 4))}: {plain(command, 80)}"
            )
    return Doing(snapshot.rank, what, plain(words), where, asleep=True, evidence=tuple(evidence))


def _other_waiters(snapshot: RankSnapshot, main: ThreadStack) -> list[ThreadStack]:
    """Other threads of this rank that wait for a lock in a line of the user's."""
    found = []
    for stack in snapshot.stacks:
        if stack is main or not stack.frames or user_frame(stack.frames) is None:
            continue
        frames = stack.frames
        innermost = max(n for n, frame in enumerate(frames) if is_user(frame.file))
        known = places.outermost(frames[innermost + 1 :])
        waits = known is not None and known[0].doing == "waits-for-lock"
        in_c = innermost == len(frames) - 1 and stack.syscall in ("futex", "futex_waitv") and stack.state != "R"
        if waits or in_c or (stack.waits_on or "").startswith("lock"):
            found.append(stack)
    return found


def _runs_cells(frame: Frame) -> bool:
    return library_of(frame.file) == "meshbook" and frame.function not in ("_input", "_getpass")


def has_moved(before: RankSnapshot | None, now: RankSnapshot) -> bool | None:
    """Whether a rank got on between two looks; None: there was no earlier look, or nothing to compare.

    Another collective, another step, another call, another line outside the innermost loop: all count.
    """
    if before is None:
        return None
    if (before.call, before.num_collectives, _steps(before)) != (now.call, now.num_collectives, _steps(now)):
        return True
    earlier, later = main_stack(before), main_stack(now)
    if earlier is None or later is None:
        return None
    return _lines(earlier) != _lines(later)


def goes_round(before: RankSnapshot | None, now: RankSnapshot) -> bool:
    """Whether two looks found it busy in the same function of the user's, with no collective and no step between."""
    if before is None or before.call is None or before.call != now.call:
        return False
    if (before.num_collectives, _steps(before)) != (now.num_collectives, _steps(now)):
        return False
    earlier, later = main_stack(before), main_stack(now)
    if earlier is None or later is None:
        return False
    first, second = user_frame(earlier.frames), user_frame(later.frames)
    # Called from the same lines: a loop may call functions, and both looks need not find it in the same one.
    shared = [
        a for a, b in zip(_users(earlier), _users(later), strict=False) if (a.file, a.function) == (b.file, b.function)
    ]
    return bool(shared) and first is not None and second is not None


def quiet_s(snapshot: RankSnapshot) -> float:
    """Seconds since it last had to do with a collective, or since its cell began."""
    last = [op.ended_s if op.ended_s is not None else 0.0 for op in snapshot.collectives]
    return min([*last, *([snapshot.running_s] if snapshot.running_s is not None else [])], default=0.0)


def is_busy(snapshot: RankSnapshot, before: RankSnapshot | None = None) -> bool:
    """Whether it uses a processor."""
    main = main_stack(snapshot)
    if snapshot.health is not None and snapshot.health.cpu_percent >= BUSY_PERCENT:
        return True
    if before is not None and before.process is not None and snapshot.process is not None:
        return snapshot.process.cpu_s - before.process.cpu_s > 0.05
    if main is not None and (main.state == "R" or main.active):
        return True
    return snapshot.process is not None and snapshot.process.state == "R"


def _users(stack: ThreadStack) -> list[Frame]:
    return [frame for frame in stack.frames if is_user(frame.file)]


def _lines(stack: ThreadStack) -> list[tuple[str, int]]:
    return [(frame.file, frame.line) for frame in _users(stack)]


def _steps(snapshot: RankSnapshot) -> int:
    return snapshot.health.steps if snapshot.health is not None else 0


def seconds(value: float | None) -> str:
    """A duration as people say it: `0.4 s`, `12 s`, `3 min 20 s`."""
    if value is None:
        return "some time"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


_PLURALS = {"is": "are", "was": "were", "has": "have", "does": "do"}


def verb(words: str, ranks: Sequence[int]) -> str:
    """What one rank does, as many do it: `waits for a lock`, `wait for a lock`."""
    if len(ranks) == 1:
        return words
    first, space, rest = words.partition(" ")
    return f"{_PLURALS.get(first, first.removesuffix('s'))}{space}{rest}"
