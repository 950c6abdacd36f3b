"""What a rank measures with each beat, on clocks that the test turns."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from meshbook.rank import probes
from meshbook.rank.probes import Probes
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel
from meshbook.rank.scalars import ScalarLog
from meshbook.rank.text import sanitize_text


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rank:
    """Probes of a rank, and all that they read."""

    def __init__(self) -> None:
        self.clock, self.cpu = Clock(), Clock()
        self.ring = CollectiveRing(clock=self.clock)
        self.log = ScalarLog(self.clock)
        self.label = GroupLabel("dp", (0, 1))
        self.probes = Probes(0, self.ring, self.log, clock=self.clock, cpu_clock=self.cpu)

    def begin(self, op: str = "all_reduce", peer: int | None = None) -> Any:
        return self.ring.begin(op, self.label, peer=peer)

    def news(self) -> list[tuple[str, int, bool]]:
        """What a beat tells of collectives: op, number, whether it is open."""
        reported = self.probes.measure("cpu").collectives
        return [(seen.op, seen.seq, seen.ended_s_ago is None) for seen in reported]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_cpu_is_counted_since_the_last_beat_in_percent_of_a_core(rank: Rank) -> None:
    rank.clock.now, rank.cpu.now = 2.0, 3.0
    assert rank.probes.measure("cpu").health.cpu_percent == 150.0  # type: ignore[union-attr]
    rank.clock.now = 3.0
    assert rank.probes.measure("cpu").health.cpu_percent == 0.0  # type: ignore[union-attr]


def test_the_longest_wait_for_the_interpreter_is_told_once(rank: Rank) -> None:
    for late_s in (0.001, 2.5, 0.3, -1.0):
        rank.probes.record_wakeup_delay(late_s)
    assert rank.probes.measure("cpu").health.gil_lag_s == 2.5  # type: ignore[union-attr]
    assert rank.probes.measure("cpu").health.gil_lag_s == 0.0  # type: ignore[union-attr]


def test_a_collective_is_told_when_it_begins_and_again_until_it_has_ended(rank: Rank) -> None:
    first = rank.begin()
    rank.ring.finish(first)
    second = rank.begin()
    assert rank.news() == [("all_reduce", 1, False), ("all_reduce", 2, True)]
    assert rank.news() == [("all_reduce", 2, True)]
    rank.ring.finish(second)
    assert rank.news() == [("all_reduce", 2, False)]
    assert rank.news() == []


def test_of_many_collectives_the_newest_are_told_and_those_that_are_open(rank: Rank) -> None:
    stuck = rank.begin("send", peer=1)
    for _ in range(3000):
        rank.ring.finish(rank.begin())
    reported = rank.probes.measure("cpu")
    assert reported.health.num_collectives == 3001  # type: ignore[union-attr]
    assert len(reported.collectives) == 64
    assert reported.collectives[-1].seq == 3000
    assert stuck.t_end is None  # forgotten by a ring of a thousand, and by the beat that began after it
    rank.begin("recv", peer=1)
    for _ in range(100):
        rank.ring.finish(rank.begin())
    reported = rank.probes.measure("cpu")
    assert (reported.collectives[0].op, reported.collectives[0].peer, len(reported.collectives)) == ("recv", 1, 65)


def test_a_collective_that_nobody_waited_for_is_asked_whether_it_has_ended(rank: Rank) -> None:
    ended: list[bool] = []
    rank.ring.set_completion_check(rank.begin(), lambda: bool(ended))
    assert rank.news() == [("all_reduce", 1, True)]
    ended.append(True)
    assert rank.news() == [("all_reduce", 1, False)]


def test_scalars_come_with_the_beat(rank: Rank) -> None:
    rank.log.log(None, {"loss": 0.5})
    reported = rank.probes.measure("cpu")
    assert [(scalar.name, scalar.value) for scalar in reported.scalars] == [("loss", 0.5)]
    assert reported.health.num_steps == 1  # type: ignore[union-attr]


class Cuda(types.SimpleNamespace):
    def __init__(self, *, initialised: bool) -> None:
        super().__init__(asked=[])
        self._initialised = initialised

    def is_initialized(self) -> bool:
        return self._initialised

    def get_device_properties(self, index: int) -> Any:
        self.asked.append(index)
        return types.SimpleNamespace(name="H100", uuid="abc", total_memory=80)

    def memory_stats(self, index: int) -> dict[str, int]:
        self.asked.append(index)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {
            "allocated_bytes.all.current": 3,
            "reserved_bytes.all.current": 5,
            "allocated_bytes.all.peak": 4,
        }

    broken = False


def test_a_gpu_is_asked_only_once_cuda_is_in_use_and_then_the_ranks_own(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(initialised=False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert rank.probes.measure("cuda:1").health.gpu is None  # type: ignore[union-attr]
    assert cuda.asked == []
    cuda._initialised = True
    gpu = rank.probes.measure("cuda:1").health.gpu  # type: ignore[union-attr]
    assert (gpu.name, gpu.allocated_bytes, gpu.reserved_bytes, gpu.peak_bytes, gpu.total_bytes) == ("H100", 3, 5, 4, 80)  # type: ignore[union-attr]
    assert set(cuda.asked) == {1}
    cuda.asked.clear()
    still = rank.probes.measure("cuda:1", is_progressing=lambda: False).health
    assert (still.gpu, cuda.asked) == (gpu, [])  # type: ignore[union-attr]
    cuda.broken = True
    assert rank.probes.measure("cuda:1").health.gpu is None  # type: ignore[union-attr]


def test_text_that_cannot_travel_is_made_to() -> None:
    assert sanitize_text("cell") == "cell"
    sanitize_text("\udcff" * 3).encode()
    assert len(sanitize_text("x" * 100_000)) < 600


def test_switched_off_the_ring_counts_and_notes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.are_probes_enabled()
    monkeypatch.setenv("MESHBOOK_PROBES", "0")
    assert not probes.are_probes_enabled()
    ring = CollectiveRing(detailed=False)
    tensor = types.SimpleNamespace(shape=(3,), dtype="torch.float32")
    collective = ring.begin("all_reduce", GroupLabel("dp", (0, 1)), [tensor])
    assert (collective.group_seq, collective.line, collective.shapes) == (1, None, ())
    assert ring.running() == (collective,)  # which is what Stop asks
