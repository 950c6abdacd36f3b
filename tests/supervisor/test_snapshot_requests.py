"""Looks at ranks: whole when all hosts have told, and honest about those that have not."""

from __future__ import annotations

from meshbook.supervisor.snapshot_requests import SnapshotRequests
from meshbook.wire.messages import RankExited, RankInfo, RankSnapshot, SnapshotReply

HOST_OF = {0: 0, 1: 0, 2: 1, 3: 1}
KNOWN = {
    rank: RankInfo(rank=rank, state="busy", host=f"box{HOST_OF[rank]}", pid=100 + rank, cell="cell 7", line=3)
    for rank in HOST_OF
}


def reported(*ranks: int, call: str = "look") -> SnapshotReply:
    snapshots = tuple(RankSnapshot(rank=rank, host=f"box{HOST_OF[rank]}", source="inside") for rank in ranks)
    return SnapshotReply(call=call, snapshots=snapshots)  # type: ignore[arg-type]


def begun() -> SnapshotRequests:
    looks = SnapshotRequests()
    looks.begin("look", (0, 1, 2, 3), (0, 1))  # type: ignore[arg-type]
    return looks


def test_a_look_is_whole_when_every_host_has_told() -> None:
    looks = begun()
    assert not looks.add_reply(0, reported(1, 0))
    assert not looks.add_reply(0, reported(0, 1))  # twice is once
    assert not looks.add_reply(1, reported(2, 3, call="another"))
    assert looks.add_reply(1, reported(2, 3))
    seen = looks.finish("look", KNOWN, {}, HOST_OF)
    assert seen is not None
    assert [(one.rank, one.source) for one in seen.snapshots] == [(rank, "inside") for rank in range(4)]
    assert seen.silent_hosts == ()
    assert looks.finish("look", KNOWN, {}, HOST_OF) is None


def test_a_host_that_says_nothing_is_named_and_its_ranks_are_told_of_as_far_as_known() -> None:
    looks = begun()
    looks.add_reply(0, reported(0, 1))
    seen = looks.finish("look", KNOWN, {}, HOST_OF)
    assert seen is not None
    assert seen.silent_hosts == ("box1",)
    silent = seen.snapshots[3]
    assert (silent.source, silent.pid, silent.cell, silent.cell_line) == ("none", 103, "cell 7", 3)
    assert "box1 did not answer within 2.5 s" in (silent.problem or "")


def test_a_rank_that_is_gone_is_told_of_without_its_host() -> None:
    gone = RankExited(rank=2, pid=102, exit_code=None, signal=9, host="box1", last_lines=(), last_collective=None)
    looks = begun()
    looks.add_reply(0, reported(0, 1))
    assert looks.add_reply(1, reported(3))
    seen = looks.finish("look", KNOWN, {2: gone}, HOST_OF)
    assert seen is not None
    assert seen.snapshots[2].exited == gone
    assert seen.silent_hosts == ()


def test_a_host_that_ends_is_not_waited_for() -> None:
    looks = begun()
    assert looks.host_lost(1) == []
    assert looks.add_reply(0, reported(0, 1))
    looks = begun()
    looks.add_reply(0, reported(0, 1))
    assert looks.host_lost(1) == ["look"]


def test_hosts_that_share_a_machine_are_told_apart_when_one_is_silent() -> None:
    looks = begun()
    looks.add_reply(0, reported(0, 1))
    alike = {rank: RankInfo(rank=rank, state="busy", host="box") for rank in HOST_OF}
    seen = looks.finish("look", alike, {}, HOST_OF)
    assert seen is not None
    assert seen.silent_hosts == ("box (host 1)",)
    assert {one.host for one in seen.snapshots[2:]} == {"box (host 1)"}
