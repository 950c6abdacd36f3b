"""The ring of collectives, without torch: a tensor is whatever has a shape and a dtype."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from meshbook.rank.process_groups import ring as ring_module
from meshbook.rank.process_groups.ring import MAX_RECORDED_TENSORS, Collective, CollectiveRing, GroupLabel
from tests.budget import WAIT_S


class FakeTensor:
    def __init__(self, *shape: int, dtype: str = "torch.float32") -> None:
        self.shape = shape
        self.dtype = dtype


class Ticks:
    """A clock that is one second later each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


WORLD = (0, 1, 2, 3)


def begin(ring: CollectiveRing, op: str = "all_reduce", label: GroupLabel | None = None) -> Collective:
    return ring.begin(op, label or GroupLabel("0", WORLD), [FakeTensor(2, 3)])


def library(name: str, source: str, **names: object) -> types.ModuleType:
    """A module that was written elsewhere: its frames carry the file name `name`."""
    module = types.ModuleType("elsewhere")
    module.__dict__.update(names)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def ring() -> CollectiveRing:
    return CollectiveRing()


def test_a_collective_knows_what_was_called_on_which_group_and_where(ring: CollectiveRing) -> None:
    label = GroupLabel("dp", (1, 3))
    collective = ring.begin("all_reduce", label, [FakeTensor(2, 3), FakeTensor(4, dtype="torch.int64")])
    line = sys._getframe().f_lineno - 1
    assert (collective.op, collective.group, collective.group_ranks) == ("all_reduce", "dp", (1, 3))
    assert collective.shapes == ((2, 3), (4,))
    assert collective.dtypes == ("float32", "int64")
    assert collective.line == (__file__, line, "test_a_collective_knows_what_was_called_on_which_group_and_where")
    assert ring.last is collective


def test_it_runs_until_it_is_finished() -> None:
    ring = CollectiveRing(clock=Ticks())
    collective = begin(ring)
    assert collective.t_start == 1.0
    assert collective.t_end is None
    assert collective.seconds(now=4.5) == 3.5
    assert ring.running() == (collective,)
    ring.finish(collective)
    assert collective.t_end == 2.0
    assert collective.seconds() == 1.0
    assert collective.error is None
    assert ring.running() == ()


def test_only_its_first_end_counts() -> None:
    ring = CollectiveRing(clock=Ticks())
    collective = begin(ring)
    ring.finish(collective, RuntimeError("Connection closed by peer\nframe #0: ..."))
    ring.finish(collective)
    ring.finish(collective, "something else")
    assert collective.error == "RuntimeError: Connection closed by peer"
    assert collective.t_end == 2.0


def test_the_sequence_counts_on_the_rank_and_in_each_group(ring: CollectiveRing) -> None:
    world, pair = GroupLabel("0", WORLD), GroupLabel("1", (0, 1))
    made = [begin(ring, label=label) for label in (world, pair, world, pair, pair)]
    assert [collective.seq for collective in made] == [1, 2, 3, 4, 5]
    assert [(collective.group, collective.group_seq) for collective in made] == [
        ("0", 1),
        ("1", 1),
        ("0", 2),
        ("1", 2),
        ("1", 3),
    ]


def test_sends_and_receives_do_not_shift_the_count_that_members_are_compared_by() -> None:
    ring, world = CollectiveRing(), GroupLabel("0", WORLD)
    made = [ring.begin(op, world, peer=peer) for op, peer in (("send", 1), ("all_reduce", None), ("recv", 1))]
    counted = [(collective.op, collective.group_seq) for collective in made]
    assert counted == [("send", 1), ("all_reduce", 1), ("recv", 2)]


def test_new_connections_are_counted_from_one_again() -> None:
    ring, world = CollectiveRing(), GroupLabel("0", WORLD)
    before = [begin(ring, label=world) for _ in range(3)][-1]
    world.reset_counters(2)
    after = begin(ring, label=world)
    assert [(collective.generation, collective.group_seq) for collective in (before, after)] == [(0, 3), (2, 1)]


def test_only_the_last_ones_are_kept_in_the_order_they_began() -> None:
    ring = CollectiveRing(size=3)
    made = [begin(ring) for _ in range(5)]
    assert ring.snapshot() == tuple(made[2:])
    assert ring.size == 3


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CollectiveRing(size=0)


def test_the_users_line_is_the_innermost_outside_of_libraries(tmp_path: Path) -> None:
    ring = CollectiveRing(skip=[tmp_path / "torch"])
    torch = library(str(tmp_path / "torch" / "distributed.py"), "def call(f): return f()")
    trainer = library(str(tmp_path / "trainer.py"), "def step(call, f):\n    x = 1\n    return call(f)\n")
    inner = library(str(Path(ring_module.__file__).parent / "watched.py"), "def call(f): return f()")
    begin_in_library = library(
        str(tmp_path / "torch" / "c10d.py"), "def run(): return ring.begin('all_reduce', label)",
        ring=ring, label=GroupLabel("0", WORLD),
    )  # fmt: skip
    collective = trainer.step(torch.call, lambda: begin_in_library.run())
    # The lambda is this file's, and it is further in than the trainer.
    assert collective.line is not None
    assert collective.line.file == __file__
    collective = trainer.step(torch.call, begin_in_library.run)
    assert collective.line == (str(tmp_path / "trainer.py"), 3, "step")
    collective = trainer.step(inner.call, begin_in_library.run)
    assert collective.line == (str(tmp_path / "trainer.py"), 3, "step")


def test_files_can_be_skipped_later(ring: CollectiveRing, tmp_path: Path) -> None:
    torch = library(
        str(tmp_path / "torch" / "c10d.py"),
        "def run(): return ring.begin('x', label)",
        ring=ring,
        label=GroupLabel("0", WORLD),
    )
    assert torch.run().line.file == str(tmp_path / "torch" / "c10d.py")
    ring.skip_frames_of(tmp_path / "torch")
    assert torch.run().line.file == __file__


def test_a_thread_without_user_code_points_at_what_the_main_thread_runs(tmp_path: Path) -> None:
    """As autograd does, which runs a backward pass for CUDA on a thread of its own."""
    ring = CollectiveRing(skip=[tmp_path, threading.__file__])
    engine = library(
        str(tmp_path / "engine.py"), "def run(): made.append(ring.begin('x', label))",
        ring=ring, label=GroupLabel("0", WORLD), made=[],
    )  # fmt: skip
    thread = threading.Thread(target=engine.run)
    thread.start()
    thread.join(WAIT_S)
    (collective,) = engine.made
    assert collective.line.file == __file__
    assert collective.line.function == "test_a_thread_without_user_code_points_at_what_the_main_thread_runs"


def test_a_kept_collective_keeps_neither_tensors_nor_locals(ring: CollectiveRing) -> None:
    held: list[weakref.ref[FakeTensor]] = []

    def cell() -> None:
        tensor = FakeTensor(8)
        held.append(weakref.ref(tensor))
        ring.begin("all_reduce", GroupLabel("0", WORLD), [tensor])

    cell()
    gc.collect()
    assert held[0]() is None
    assert ring.last is not None
    assert ring.last.shapes == ((8,),)


def test_of_many_tensors_the_first_few_are_told() -> None:
    collective = CollectiveRing().begin(
        "all_reduce_coalesced", GroupLabel("0", WORLD), [FakeTensor(n) for n in range(100)]
    )
    assert collective.shapes == tuple((n,) for n in range(MAX_RECORDED_TENSORS))
    assert len(collective.dtypes) == MAX_RECORDED_TENSORS


def test_one_that_nobody_waits_for_is_asked_when_somebody_looks() -> None:
    ring = CollectiveRing(clock=Ticks())
    collective = begin(ring)
    answers = iter([False, True])
    ring.set_completion_check(collective, lambda: next(answers))
    assert ring.running() == (collective,)
    assert ring.running() == ()
    assert collective.t_end is not None
    assert ring.snapshot() == (collective,)  # and is not asked again


def test_one_whose_end_will_be_told_is_not_asked(ring: CollectiveRing) -> None:
    collective = begin(ring)
    ring.set_completion_check(collective, lambda: True)
    ring.set_completion_check(collective, None)
    assert ring.running() == (collective,)


def test_a_reader_in_another_thread_never_sees_a_torn_ring() -> None:
    ring = CollectiveRing(size=50)
    done = threading.Event()
    wrong: list[str] = []

    def look(check: Callable[[tuple[Collective, ...]], bool]) -> None:
        while not done.is_set():
            seen = ring.snapshot()
            if not check(seen):
                wrong.append(f"{[collective.seq for collective in seen]}")
                return

    def whole(seen: tuple[Collective, ...]) -> bool:
        numbers = [collective.seq for collective in seen]
        return len(seen) <= 50 and numbers == sorted(set(numbers)) and (not seen or numbers[-1] - numbers[0] < 2 * 50)

    readers = [threading.Thread(target=look, args=(whole,)) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        label = GroupLabel("0", WORLD)
        for _ in range(5000):
            ring.finish(begin(ring, label=label))
    finally:
        done.set()
        sys.setswitchinterval(before)
        for reader in readers:
            reader.join(WAIT_S)
    assert wrong == []


def test_two_threads_never_get_the_same_number() -> None:
    ring = CollectiveRing(size=4000)
    label = GroupLabel("0", WORLD)

    def many() -> None:
        for _ in range(1000):
            begin(ring, label=label)

    threads = [threading.Thread(target=many) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(before)
    assert [collective.seq for collective in ring.snapshot()] == list(range(1, 4001))
    assert sorted(collective.group_seq for collective in ring.snapshot()) == list(range(1, 4001))


def test_it_reads_like_a_sentence(ring: CollectiveRing) -> None:
    collective = begin(ring)
    assert repr(collective).startswith("<all_reduce #1 on 0 at ")
    assert repr(collective).endswith(": running>")
    ring.finish(collective, KeyboardInterrupt())
    assert repr(collective).endswith(": KeyboardInterrupt>")


# ---- collectives whose end has to be asked for


def _asked(ring: CollectiveRing, finished: Callable[[], bool], *, on_device: bool = False) -> Collective:
    collective = ring.begin("all_reduce", GroupLabel("0", (0, 1)))
    ring.set_completion_check(collective, finished, on_device=on_device)
    return collective


def _assert_triggered() -> bool:
    raise RuntimeError("CUDA error: device-side assert triggered\nmore of it")


def test_a_question_that_raises_leaves_the_end_of_its_collective_unknown_and_no_other(ring: CollectiveRing) -> None:
    failed, other = _asked(ring, _assert_triggered), _asked(ring, lambda: False)
    assert ring.running() == (other,)
    assert failed.error == ("whether it has ended is unknown: RuntimeError: CUDA error: device-side assert triggered")


def test_a_device_that_has_failed_once_is_asked_nothing_any_more() -> None:
    ring, asked = CollectiveRing(), []
    first = _asked(ring, _assert_triggered, on_device=True)
    assert ring.running() == ()
    second = _asked(ring, lambda: asked.append(1) or True, on_device=True)  # type: ignore[func-returns-value]
    assert ring.running() == ()
    assert (asked, second.error) == ([], first.error)


def test_while_a_graph_is_captured_the_device_is_asked_nothing() -> None:
    ring, asked = CollectiveRing(), []
    collective = _asked(ring, lambda: asked.append(1) or True, on_device=True)  # type: ignore[func-returns-value]
    ring.num_captures = 1
    assert ring.running() == (collective,)
    ring.num_captures = 0
    assert (ring.running(), asked) == ((), [1])


def test_what_a_rank_has_begun_is_counted_by_group_and_by_peer_and_anew_with_new_connections() -> None:
    ring, label = CollectiveRing(), GroupLabel("world", (0, 1, 2))
    for _ in range(3):
        ring.begin("all_reduce", label)
    sends = [ring.begin("send", label, peer=1), ring.begin("send", label, peer=2), ring.begin("send", label, peer=1)]
    ring.begin("recv", label)
    assert label.num_begun == 3
    assert [one.pair_seq for one in sends] == [1, 1, 2]
    assert label.p2p_counts == {(True, 1): 2, (True, 2): 1, (False, None): 1}
    label.reset_counters(2)
    assert (label.num_begun, label.p2p_counts) == (0, {})


def test_threads_beside_the_main_one_that_begin_collectives_are_known_while_they_live() -> None:
    ring, label = CollectiveRing(), GroupLabel("world", (0, 1))
    began, ends = threading.Event(), threading.Event()

    def run() -> None:
        ring.begin("all_reduce", label)
        began.set()
        ends.wait(WAIT_S)

    thread = threading.Thread(target=run)
    ring.begin("all_reduce", label)
    assert ring.other_threads() == ()
    thread.start()
    began.wait(WAIT_S)
    assert ring.other_threads() == (thread,)
    ends.set()
    thread.join()
    assert ring.other_threads() == ()


def test_a_thread_that_has_the_identifier_of_an_ended_one_has_begun_nothing() -> None:
    ring, label, ends = CollectiveRing(), GroupLabel("world", (0, 1)), threading.Event()
    ended = threading.Thread(target=ring.begin, args=("all_reduce", label))
    ended.start()
    ended.join()
    later = [threading.Thread(target=ends.wait, args=(WAIT_S,)) for _ in range(50)]
    for thread in later:
        thread.start()
    assert ended.ident in [thread.ident for thread in later]
    assert ring.other_threads() == ()
    ends.set()
    for thread in later:
        thread.join()


def test_what_nobody_has_waited_for_on_former_connections_runs_no_more(ring: CollectiveRing) -> None:
    world = GroupLabel("0", WORLD)
    left_open = begin(ring, label=world)
    ring.set_completion_check(left_open, lambda: False)  # as of gloo's reduce_scatter, which never says that it is done
    assert ring.running() == (left_open,)
    world.reset_counters(2)
    assert ring.running() == ()
    assert left_open.error == "its process group was formed anew"
