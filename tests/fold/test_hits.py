"""Hits of a search in logs: one line for what ranks printed alike at about the same time, in each rank's order."""

from __future__ import annotations

import msgspec

from meshbook.fold.hits import HitFolder
from meshbook.wire.messages import Folding, Line, LogMatch


def hit(time: float, rank: int, text: str, *, matching: tuple[int, ...] = (0,)) -> LogMatch:
    return LogMatch(time, Line((rank,), "stdout", text), matching)


def folded(hits: list[LogMatch], folding: Folding = "numbers") -> list[tuple[float, tuple[int, ...], str]]:
    folder = HitFolder(folding)
    return [(one.time, one.line.ranks, one.line.text) for one in [*folder.feed(hits), *folder.pop()]]


def test_equal_lines_of_a_moment_are_one_with_all_ranks_and_the_first_time() -> None:
    hits = [hit(5.0, 1, "lost it"), hit(5.2, 0, "lost it"), hit(5.9, 3, "lost it"), hit(6.1, 2, "lost it")]
    assert folded(hits) == [(5.0, (0, 1, 3), "lost it"), (6.1, (2,), "lost it")]


def test_a_rank_that_says_the_same_twice_has_two_lines() -> None:
    hits = [hit(1.0, 0, "again"), hit(1.1, 0, "again"), hit(1.2, 1, "again"), hit(1.3, 1, "again")]
    assert folded(hits) == [(1.0, (0, 1), "again"), (1.1, (0, 1), "again")]


def test_lines_that_differ_in_numbers_show_what_each_rank_wrote_unless_only_equal_ones_are_folded() -> None:
    hits = [hit(1.0, rank, f"loss={2 + rank / 10}") for rank in range(3)]
    assert folded(hits) == [(1.0, (0, 1, 2), "loss={2.0, 2.1, 2.2}")]
    assert [ranks for _, ranks, _ in folded(hits, "equal")] == [(0,), (1,), (2,)]


def test_an_equal_line_is_joined_before_one_with_other_numbers() -> None:
    hits = [hit(1.0, 0, "step 1"), hit(1.1, 0, "step 2"), hit(1.2, 1, "step 2"), hit(1.3, 1, "step 3")]
    assert folded(hits) == [(1.0, (0,), "step 1"), (1.1, (0, 1), "step 2"), (1.3, (1,), "step 3")]


def test_the_order_of_each_ranks_lines_is_kept() -> None:
    hits = [hit(1.0, 0, "a"), hit(1.1, 0, "b"), hit(1.2, 1, "b"), hit(1.3, 1, "a")]
    assert folded(hits) == [(1.0, (0,), "a"), (1.1, (0, 1), "b"), (1.3, (1,), "a")]


def test_without_folding_each_ranks_line_is_its_own() -> None:
    assert len(folded([hit(1.0, 0, "same"), hit(1.0, 1, "same")], "off")) == 2


def test_blocks_of_lines_are_one_if_they_match_in_the_same_lines() -> None:
    first, same = hit(1.0, 0, "a\nb", matching=(1,)), hit(1.1, 1, "a\nb", matching=(1,))
    other = hit(1.2, 2, "a\nb", matching=(0,))
    assert [ranks for _, ranks, _ in folded([first, same, other])] == [(0, 1), (2,)]


def test_hosts_hits_folded_again_are_as_if_folded_at_once() -> None:
    hits = [hit(1.0 + rank / 100, rank, f"rank {rank} loss={rank % 3}") for rank in range(6)]
    hosts = []
    for begin in (0, 3):
        host = HitFolder(mergeable=True)
        hosts += [*host.feed(hits[begin : begin + 3]), *host.pop()]
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(hosts), type=list[LogMatch])
    assert folded(travelled) == folded(hits)


def test_hits_are_complete_when_later_ones_come() -> None:
    folder = HitFolder()
    assert folder.feed([hit(1.0, 0, "early")]) == []
    assert [one.line.text for one in folder.feed([hit(2.5, 0, "late")])] == ["early"]
