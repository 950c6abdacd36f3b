"""A rank's look at itself: threads, deep stacks, hostile names, coroutines, collectives."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.ids import CallId
from meshbook.rank import snapshot
from meshbook.rank.call_state import CallState
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel
from meshbook.rank.snapshot import Snapshotter
from meshbook.wire import codec, messages
from meshbook.wire.messages import ThreadStack
from tests.budget import WAIT_S


class Standing:
    """A thread that stands still in `function` until the test is over."""

    def __init__(self, function: Callable[[Callable[[], None]], None], name: str = "worker") -> None:
        self._there, self._go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: function(self._stand), name=name, daemon=True)
        self.thread.start()
        assert self._there.wait(WAIT_S)

    def _stand(self) -> None:
        self._there.set()
        self._go.wait(WAIT_S)

    def stack(self) -> ThreadStack:
        assert self.thread.ident is not None
        return next(stack for stack in snapshot.collect_thread_stacks(self.thread.ident) if stack.is_main)

    def end(self) -> None:
        self._go.set()
        self.thread.join(WAIT_S)


@pytest.fixture
def stand() -> Iterator[Callable[..., Standing]]:
    made: list[Standing] = []

    def make(*args: Any, **kwargs: Any) -> Standing:
        made.append(Standing(*args, **kwargs))
        return made[-1]

    yield make
    for standing in made:
        standing.end()


def sendable(stack: ThreadStack) -> ThreadStack:
    """As it arrives on the other side; it would raise if it could not travel."""
    reported = messages.RankSnapshot(rank=0, stacks=(stack,))
    frames = codec.encode(messages.RankSnapshotReply(rank=0, call="a-1", snapshot=reported))  # type: ignore[arg-type]
    arrived = codec.rank_reports.decode(frames)
    assert isinstance(arrived, messages.RankSnapshotReply)
    return arrived.snapshot.stacks[0]


def test_a_stack_is_told_outermost_first_with_lines(stand: Callable[..., Standing]) -> None:
    def outer(wait: Callable[[], None]) -> None:
        inner(wait)

    def inner(wait: Callable[[], None]) -> None:
        wait()

    stack = stand(outer, name="a user's thread").stack()
    mine = [frame for frame in stack.frames if frame.file == __file__]
    assert [frame.function for frame in mine] == ["<lambda>", "outer", "inner", "_stand"]
    assert mine[1].line == outer.__code__.co_firstlineno + 1
    assert (stack.name, stack.num_truncated) == ("a user's thread", 0)


@pytest.fixture
def deep_recursion() -> Iterator[int]:
    """How deep the test may recurse. Asked for before `stand`, so that its threads have come back when it ends."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(6000)
    yield 5000
    sys.setrecursionlimit(limit)


def test_of_a_very_deep_stack_both_ends_are_kept_and_the_rest_is_counted(
    deep_recursion: int, stand: Callable[..., Standing]
) -> None:
    depth = deep_recursion

    def fall(wait: Callable[[], None], left: int = depth) -> None:
        fall(wait, left - 1) if left else wait()

    stack = sendable(stand(fall).stack())
    assert (len(stack.frames), stack.truncated_at) == (200, 100)
    assert depth - 200 < stack.num_truncated < depth
    assert stack.frames[0].function == "_bootstrap"
    assert "_stand" in [frame.function for frame in stack.frames[-5:]]


def test_hostile_names_are_text_that_can_travel(stand: Callable[..., Standing]) -> None:
    source = "def f(wait):\n    wait()\n"
    scope: dict[str, Any] = {"__name__": object()}
    exec(compile(source, "/tmp/\udcff<script>" + "x" * 5000, "exec"), scope)
    function = scope["f"]
    function.__code__ = function.__code__.replace(co_name="\ud800</pre>")
    standing = stand(function, name="\udcfe" + "y" * 5000)
    stack = sendable(standing.stack())
    assert any("</pre>" in frame.function and "<script>" in frame.file for frame in stack.frames)
    assert len(stack.name) < 600


def test_a_thread_whose_name_is_a_trap_is_named_by_what_it_is(stand: Callable[..., Standing]) -> None:
    standing = stand(lambda wait: wait())
    standing.thread._name = 3  # type: ignore[attr-defined]
    try:
        assert standing.stack().name == "Thread"
    finally:
        standing.thread._name = "worker"  # type: ignore[attr-defined]


def test_threads_of_meshbook_itself_are_left_out(stand: Callable[..., Standing]) -> None:
    stand(lambda wait: wait(), name="meshbook-service")
    stand(lambda wait: wait(), name="loader")
    names = [stack.name for stack in snapshot.collect_thread_stacks(threading.get_ident())]
    assert "loader" in names
    assert "meshbook-service" not in names
    assert names[0] == threading.current_thread().name


def test_a_cell_that_awaits_shows_where_though_it_is_on_no_stack() -> None:
    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def cell() -> None:
        await inner()

    coroutine = cell()

    def look(main: int) -> ThreadStack:
        """The main thread's stack once it waits in its loop, or after 30 s as it is then."""
        deadline = time.monotonic() + 30
        while True:
            waits = inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED
            stack = snapshot.collect_thread_stacks(main, coroutine)[0]
            if (waits and stack.frames[0].function == "cell") or time.monotonic() > deadline:
                return stack

    async def look_from_another_thread(main: int) -> ThreadStack:
        task = asyncio.ensure_future(coroutine)
        looked = await asyncio.to_thread(look, main)
        task.cancel()
        return looked

    stack = asyncio.run(look_from_another_thread(threading.get_ident()))
    assert [frame.function for frame in stack.frames] == ["cell", "inner"]
    assert stack.frames[1].line == inner.__code__.co_firstlineno + 1


def test_the_last_collectives_are_told_and_older_ones_that_are_open() -> None:
    ring, label = CollectiveRing(), GroupLabel("0", (0, 1))
    stuck = ring.begin("recv", label, peer=1)
    for _ in range(20):
        ring.finish(ring.begin("all_reduce", label))
    reported = snapshot.describe_ring(ring, 5, stuck.t_start + 7.0)
    assert [seen.op for seen in reported] == ["recv"] + ["all_reduce"] * 5
    assert (reported[0].peer, reported[0].began_s_ago, reported[0].ended_s_ago) == (1, 7.0, None)
    assert reported[-1].frame is not None
    assert reported[-1].frame.function == "test_the_last_collectives_are_told_and_older_ones_that_are_open"


def test_a_stack_that_changes_while_it_is_read_is_still_one() -> None:
    """A thread that calls and returns as fast as it can, looked at a thousand times."""
    ended = threading.Event()

    def fall(left: int) -> None:
        if left:
            fall(left - 1)

    def run() -> None:
        while not ended.is_set():
            fall(50)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert thread.ident is not None
        for _ in range(1000):
            stack = next(stack for stack in snapshot.collect_thread_stacks(thread.ident) if stack.is_main)
            assert all(frame.line > 0 for frame in stack.frames)
    finally:
        ended.set()
        thread.join(WAIT_S)


class Holder:
    def __init__(self) -> None:
        self.lock = threading.RLock()


class SharedHolder:
    lock = threading.RLock()


def wait_in_with(holder: Holder, there: threading.Event) -> None:
    there.set()
    with holder.lock:
        pass


def wait_in_with_of_one_line(lock: threading.Lock, there: threading.Event) -> None:
    there.set()
    with lock: pass  # noqa: E701  # fmt: skip


def wait_in_acquire(a: threading.Lock, there: threading.Event) -> None:
    there.set()
    a.acquire()
    a.release()


@pytest.mark.parametrize(
    ("function", "lock", "waits_on", "held_by"),
    [
        (wait_in_with, Holder(), "lock `holder.lock`", threading.main_thread().name),
        (wait_in_with, SharedHolder(), "lock `holder.lock`", threading.main_thread().name),
        (wait_in_with_of_one_line, threading.Lock(), "lock `lock`", None),
        (wait_in_acquire, threading.Lock(), "lock `a`", None),
    ],
)
def test_a_thread_that_waits_for_a_lock_tells_which_and_who_has_it(
    function: Callable[..., None], lock: Any, waits_on: str, held_by: str | None
) -> None:
    taken, there = getattr(lock, "lock", lock), threading.Event()
    taken.acquire()
    thread = threading.Thread(target=function, args=(lock, there), name="waiter", daemon=True)
    thread.start()
    assert there.wait(WAIT_S)
    deadline = time.monotonic() + 30
    try:
        while True:
            (reported,) = (
                stack for stack in snapshot.collect_thread_stacks(threading.get_ident()) if stack.name == "waiter"
            )
            if reported.waits_on is not None or time.monotonic() > deadline:
                break
    finally:
        taken.release()
        thread.join(WAIT_S)
    assert (reported.waits_on, reported.held_by) == (waits_on, held_by)


def test_looking_for_a_lock_runs_no_code_of_the_users(stand: Callable[..., Standing]) -> None:
    asked: list[str] = []

    class Trap:
        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise AttributeError(name)

        @property
        def acquire(self) -> Callable[[], None]:
            return self.wait  # the one call of the thread itself

        def __init__(self, wait: Callable[[], None]) -> None:
            self.wait = wait

    stand(lambda wait: Trap(wait).acquire()).stack()
    assert asked == []


class Idle:
    """A rank without a cell."""

    running_file: str | None = None
    awaited_coroutine = None


def take(state: CallState, code: Idle) -> messages.RankSnapshot:
    snapshotter = Snapshotter(
        0,
        threading.get_ident(),
        state,
        CollectiveRing(),
        code,
        is_awaiting_input=lambda: False,
        current_operation=lambda: None,
    )
    return snapshotter.take(health=None, num_collectives=5)


def test_an_idle_rank_tells_how_its_last_call_ended_and_where_it_failed() -> None:
    state, code = CallState(0), Idle()
    state.began(CallId("c-1"), "cell 7", now=snapshot.monotonic(), last_seq=0)
    code.running_file = __file__
    busy = take(state, code)
    assert (busy.call, busy.cell, busy.file, busy.last_status) == ("c-1", "cell 7", __file__, None)
    assert busy.cell_line is not None
    code.running_file = None
    frames = (messages.Frame(file="In[7]", line=3, function="<module>"), messages.Frame("lib.py", 9, "f"))
    error = messages.RankError(ename="ValueError", evalue="no", traceback=(), frames=frames)
    state.ended(CallId("c-1"), "cell 7", messages.Outcome(status="error", error=error))
    idle = take(state, code)
    assert (idle.call, idle.cell, idle.running_s) == (None, None, None)
    assert (idle.last_status, idle.last_cell, idle.last_call) == ("error", "cell 7", "c-1")
    assert (idle.last_error, idle.file, idle.cell_line) == ("ValueError: no", "In[7]", 3)
    state.began(CallId("c-2"), "", now=snapshot.monotonic(), last_seq=0)
    again = take(state, code)
    assert (again.call, again.cell, again.last_error, again.last_cell) == ("c-2", None, None, "cell 7")
