"""What the supervisor knows of ranks: where they are, what their hosts said last, and how they ended."""

from __future__ import annotations

import pytest

from meshbook.supervisor.rank_table import RankTable, assign_hosts
from meshbook.wire import messages
from meshbook.wire.messages import RankExited, RankInfo


def table(num_ranks: int = 4, num_hosts: int = 2) -> RankTable:
    ranks = RankTable()
    ranks.assign(num_ranks, num_hosts)
    for host in range(num_hosts):
        ranks.host_ready(host, f"box{host}")
    return ranks


def exited(rank: int) -> RankExited:
    return RankExited(
        rank=rank, pid=9, exit_code=None, signal=9, host="box0", last_lines=(), last_collective=None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "num_hosts", "sizes"),
    [(4, 1, [4]), (4, 2, [2, 2]), (4, 3, [2, 1, 1]), (4, 4, [1] * 4), (10, 4, [3, 3, 2, 2]), (7, 5, [2, 2, 1, 1, 1])],
)
def test_ranks_are_spread_over_hosts_that_do_not_divide_them(world_size: int, num_hosts: int, sizes: list[int]) -> None:
    place = assign_hosts(world_size, num_hosts)
    assert list(place) == list(range(world_size))
    assert list(place.values()) == sorted(place.values())
    assert [list(place.values()).count(host) for host in range(num_hosts)] == sizes


def test_a_message_goes_once_to_each_host_of_its_ranks() -> None:
    assert table().send((0, 1, 3), messages.Exit()).hosts == (0, 1)
    assert table().send((2, 3), messages.Exit(), b"body").body == b"body"
    assert [table().on_host(host) for host in (0, 1)] == [(0, 1), (2, 3)]


def test_a_rank_is_starting_until_the_mesh_is_up_whatever_its_host_says() -> None:
    ranks, idle = table(), RankInfo(rank=0, state="idle", host="box0", pid=7)
    ranks.heartbeat([idle], 1.0, is_starting=True)
    assert (ranks.info(0).state, ranks.info(0).pid, ranks.reported_at(0)) == ("starting", 7, 1.0)
    ranks.start_finished()
    assert ranks.info(0).state == "idle"
    ranks.heartbeat([idle], 2.0, is_starting=False)
    assert (ranks.info(0), ranks.reported_at(0), ranks.reported_at(1)) == (idle, 2.0, 0.0)


def test_a_dead_rank_stays_dead_and_is_news_once() -> None:
    ranks = table()
    assert ranks.rank_exited(exited(1))
    assert not ranks.rank_exited(exited(1))
    assert not ranks.rank_exited(exited(7))
    ranks.heartbeat([RankInfo(rank=1, state="idle", host="box0")], 1.0, is_starting=False)
    assert (ranks.info(1).state, ranks.info(1).exit) == ("dead", "was killed by SIGKILL")
    assert (ranks.living, tuple(ranks.exited)) == ((0, 2, 3), (1,))


def test_a_resize_forgets_the_highest_ranks_and_adds_ranks_that_have_yet_to_start() -> None:
    ranks = table()
    ranks.leaving((3,))
    assert not ranks.rank_exited(exited(3))  # it was asked to end
    ranks.resize(3, (0, 1))
    assert (ranks.all, ranks.living, 3 in ranks) == ((0, 1, 2), (0, 1, 2), False)
    ranks.resize(5, (0, 1))
    assert (ranks.living, tuple(ranks.exited)) == ((0, 1, 2), (3, 4))
    assert [ranks.host_of(rank) for rank in (3, 4)] == [1, 0]
    assert (ranks.info(3).host, ranks.exited[3].description) == ("box1", "has not been started")
    ranks.restarting((3, 4))
    assert [ranks.info(rank).incarnation for rank in (3, 4)] == [1, 0]
