"""Rank sets as people write them, and call ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.ids import CallIds, format_ranks, name_ranks, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "none"),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 5), "0-2,5"),
        ((5, 2, 1, 0, 2), "0-2,5"),
        ((0, 2, 4), "0,2,4"),
        (range(512), "0-511"),
    ],
)
def test_ranks_are_written_as_spans(ranks, text):
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_written_reads_back(ranks):
    assert parse_ranks(format_ranks(ranks)) == tuple(sorted(ranks))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1))
def test_spans_may_overlap_and_come_in_any_order(spans):
    text = ", ".join(f"{low}-{low + length}" for low, length in spans)
    assert parse_ranks(text) == tuple(sorted({rank for low, length in spans for rank in range(low, low + length + 1)}))


def test_brackets_around_a_list_are_no_obstacle():
    assert parse_ranks("[0, 2-3]") == (0, 2, 3)


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "0:2", "1.5", "0,,1", "²"])
def test_what_is_no_list_of_ranks_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write it like 0 or 0,2-3"):
        parse_ranks(text)


def test_a_range_that_runs_backwards_is_shown_the_right_way_round():
    with pytest.raises(ValueError, match="'3-1' runs backwards; write 1-3"):
        parse_ranks("0,3-1")


def test_a_sentence_speaks_of_one_rank_or_of_several():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 3]) == "rank 3"
    assert name_ranks(iter([0, 1, 2, 5])) == "ranks 0-2,5"
    assert name_ranks([]) == "ranks none"


def test_two_clients_never_use_the_same_call_id():
    first, second = CallIds(), CallIds()
    ids = [source.next() for source in (first, second) for _ in range(100)]
    assert len(set(ids)) == 200


def test_a_client_counts_its_calls():
    ids = CallIds("ab")
    assert [ids.next(), ids.next()] == ["ab-1", "ab-2"]
