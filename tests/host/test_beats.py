"""What a host keeps of its ranks' beats, without ranks: for its own beats, and for when a rank cannot be asked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from meshbook.host.snapshots import SnapshotCollector, SnapshotTarget
from meshbook.wire import messages
from meshbook.wire.loop import Loop
from meshbook.wire.messages import CollectiveInfo, Health, RankMetrics, RankSnapshot, Scalar


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Remembering:
    """A looker whose ranks do not exist, its clock, and what it has reported."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reported: list[messages.SnapshotReply] = []
        self.looker = SnapshotCollector(Loop(self.clock), "here", lambda rank, body: None, self.reported.append)

    def of_dead(self, rank: int = 0, num_collectives: int = 64) -> RankSnapshot:
        """A snapshot of a rank whose process is gone: it has what was remembered, and nothing else."""
        command = messages.TakeSnapshots(call="a-1", ranks=(rank,), num_collectives=num_collectives)  # type: ignore[arg-type]
        self.looker.collect(command, b"", [SnapshotTarget(rank=rank, pid=1, beat_age_s=None, is_dead=True)])
        return self.reported[-1].snapshots[0]


@pytest.fixture
def host() -> Iterator[Remembering]:
    made = Remembering()
    yield made
    made.looker.close()


def collective(
    seq: int, began_s_ago: float, ended_s_ago: float | None, op: str = "all_reduce", generation: int = 1
) -> CollectiveInfo:
    ranks = (0, 1)
    return CollectiveInfo(op, "0", ranks, seq, generation=generation, began_s_ago=began_s_ago, ended_s_ago=ended_s_ago)  # type: ignore[arg-type]


def test_two_beats_between_two_of_the_hosts_are_told_as_one(host: Remembering) -> None:
    open_, ended = collective(1, began_s_ago=0.5, ended_s_ago=None), collective(1, began_s_ago=1.5, ended_s_ago=0.25)
    first, second = Scalar("x", 0, 1.0, 0.5), Scalar("x", 1, 2.0, 0.125)
    host.looker.add_metrics(RankMetrics(0, health=Health(gil_lag_s=2.0), scalars=(first,), collectives=(open_,)))
    host.clock.now += 1.0
    health = Health(gil_lag_s=0.5, num_steps=9)
    host.looker.add_metrics(RankMetrics(0, health=health, scalars=(second,), num_dropped=3, collectives=(ended,)))
    host.clock.now += 0.25
    (reports,) = host.looker.drain_metrics()
    assert [(scalar.step, scalar.age_s) for scalar in reports.scalars] == [(0, 1.5), (1, 0.125)]
    assert reports.collectives == (ended,)
    assert reports.health == Health(gil_lag_s=2.0, num_steps=9)
    assert (reports.age_s, reports.num_dropped) == (0.25, 3)
    assert host.looker.drain_metrics() == ()


def test_collectives_are_remembered_with_their_times_as_of_now(host: Remembering) -> None:
    reports = collective(1, began_s_ago=3.0, ended_s_ago=1.0), collective(2, began_s_ago=0.5, ended_s_ago=None)
    host.looker.add_metrics(RankMetrics(0, collectives=reports))
    host.clock.now += 10.0
    kept = host.of_dead().collectives
    assert [(seen.seq, seen.began_s_ago, seen.ended_s_ago) for seen in kept] == [(1, 13.0, 11.0), (2, 10.5, None)]


def test_of_many_the_last_are_remembered_and_those_that_are_open(host: Remembering) -> None:
    reports = [collective(seq, began_s_ago=1.0, ended_s_ago=None if seq == 7 else 0.5) for seq in range(1000)]
    host.looker.add_metrics(RankMetrics(0, collectives=tuple(reports)))
    assert [seen.seq for seen in host.of_dead().collectives] == [7, *range(937, 1000)]
    assert [seen.seq for seen in host.of_dead(num_collectives=2).collectives] == [7, 998, 999]


def test_sends_and_later_connections_with_the_same_number_are_others(host: Remembering) -> None:
    same = {"began_s_ago": 1.0, "ended_s_ago": 0.5}
    reports = (collective(1, **same), collective(1, op="send", **same), collective(1, generation=2, **same))  # type: ignore[arg-type]
    host.looker.add_metrics(RankMetrics(0, collectives=reports))
    assert len(host.of_dead().collectives) == 3


def test_a_new_process_of_a_rank_has_no_past(host: Remembering) -> None:
    reports = collective(1, began_s_ago=1.0, ended_s_ago=None)
    host.looker.add_metrics(RankMetrics(0, health=Health(num_collectives=5), collectives=(reports,)))
    assert host.of_dead().num_collectives == 5
    host.looker.rank_started(0)
    fresh = host.of_dead()
    assert (fresh.collectives, fresh.num_collectives, fresh.health) == ((), 0, None)


def test_a_host_that_cannot_send_does_not_gather_without_end(host: Remembering) -> None:
    beat = RankMetrics(
        0,
        scalars=tuple(Scalar("x", step, 1.0, 0.0) for step in range(4096)),
        collectives=tuple(collective(seq, began_s_ago=1.0, ended_s_ago=0.5) for seq in range(64)),
    )
    for number in range(20):
        numbered = tuple(msgspec.structs.replace(seen, generation=number) for seen in beat.collectives)
        host.looker.add_metrics(msgspec.structs.replace(beat, collectives=numbered))
    (reports,) = host.looker.drain_metrics()
    assert (len(reports.scalars), len(reports.collectives)) == (8192, 512)
    assert len(reports.scalars) + reports.num_dropped == 20 * 4096
