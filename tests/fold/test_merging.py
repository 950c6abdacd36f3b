"""Output that hosts have folded, folded again; and what a front end is sent of it."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.fold.lines import LIVE_INTERVAL_S, MAX_AGE_S, FoldMerger, LineFolder, OutputBudget
from meshbook.fold.numbers import template_of
from meshbook.wire.messages import (
    ClearOutput,
    Display,
    FoldedItem,
    Line,
    RankDisplay,
    Text,
    VaryingNumber,
)
from tests.fold.test_lines import live, notices, said

over_the_wire = msgspec.msgpack.Decoder(tuple[FoldedItem, ...])


def sent(items):
    """Items as they arrive after a journey."""
    return over_the_wire.decode(msgspec.msgpack.encode(items))


def line(text, *ranks, **more):
    return Line(ranks, "stdout", text, **more)


def host_fold(ranks, texts):
    """What a host gives of its ranks' whole outputs."""
    folder = LineFolder(ranks, mergeable=True)
    for rank in ranks:
        folder.feed(rank, [Text("stdout", texts[rank])], 0.0)
    return sent(folder.flush(0.0, final=True))


def merged(hosts, texts, **options):
    merger = FoldMerger(hosts, **options)
    for host, ranks in hosts.items():
        merger.feed(host, host_fold(ranks, texts), 0.0)
    return merger.flush(0.0, final=True)


def flat(texts):
    folder = LineFolder(range(len(texts)))
    for rank, text in enumerate(texts):
        folder.feed(rank, [Text("stdout", text)], 0.0)
    return folder.flush(0.0, final=True)


TWO_HOSTS = {0: (0, 1), 1: (2, 3)}


# ---------------------------------------------------------------------------------------------------------------------
# Merging


@pytest.fixture
def merger():
    return FoldMerger(TWO_HOSTS)


def test_numbers_of_hosts_become_one_range_and_the_outlier_is_found_among_all():
    texts = [f"loss {loss}\n" for loss in ("2.31", "97.4", "2.33", "2.35", "2.34", "2.32")]
    hosts = {0: (0, 1, 2), 1: (3, 4, 5)}
    assert said(host_fold((0, 1, 2), texts)) == [((0, 1, 2), "loss {2.31, 97.4, 2.33}")]
    assert merged(hosts, texts) == [line("loss 2.31…2.35 (median 2.33, rank 1: 97.4)", *range(6))]


def test_what_does_not_go_into_one_line_stays_as_the_hosts_have_folded_it():
    texts = [f"pid {7 * rank}\n" for rank in range(10)]
    lines = merged({0: tuple(range(5)), 1: tuple(range(5, 10))}, texts)
    assert lines == [line("pid {0, 7, 14, 21, 28}", *range(5)), line("pid {35, 42, 49, 56, 63}", *range(5, 10))]


def test_what_goes_to_the_client_carries_no_numbers_of_ranks():
    (one,) = merged(TWO_HOSTS, [f"loss {rank}\n" for rank in range(4)])
    assert (one.first_text, one.varying_numbers) == ("", ())
    (one,) = merged({0: (0, 1)}, ["loss 1\n", "loss 2\n"])
    assert (one.text, one.first_text, one.varying_numbers) == ("loss {1, 2}", "", ())


def test_a_merger_below_another_one_keeps_them():
    texts = [f"loss {rank}\n" for rank in range(4)]
    (one,) = merged(TWO_HOSTS, texts, mergeable=True)
    assert one.varying_numbers == (VaryingNumber(0, ("0", "1", "2", "3")),)
    (alone,) = merged({0: (0, 1)}, texts[:2], mergeable=True)
    assert alone.varying_numbers == (VaryingNumber(0, ("0", "1")),)


def test_what_only_some_ranks_of_some_hosts_said_stays_theirs():
    texts = ["saving\nstep\n", "step\n", "step\n", "step\n"]
    assert said(merged(TWO_HOSTS, texts)) == [((0,), "saving"), ((0, 1, 2, 3), "step")]


def test_parts_of_hosts_that_say_the_same_come_together():
    texts = ["even\n", "odd\n", "even\n", "odd\n"]
    assert said(merged(TWO_HOSTS, texts)) == [((0, 2), "even"), ((1, 3), "odd")]


def test_displays_of_hosts_are_one(merger):
    shown = Display({"text/plain": "A"})
    for host, ranks in TWO_HOSTS.items():
        merger.feed(host, sent([RankDisplay(ranks, shown)]), 0.0)
    assert merger.flush(0.0) == [RankDisplay((0, 1, 2, 3), shown)]


def test_a_last_line_without_an_end_keeps_that():
    assert merged(TWO_HOSTS, ["a\nb"] * 4) == [line("a", 0, 1, 2, 3), line("b", 0, 1, 2, 3, end="")]
    assert merged(TWO_HOSTS, [f"loss {rank}" for rank in range(4)])[-1].end == ""
    assert [one.end for one in merged(TWO_HOSTS, ["a\n", "a\n", "b", "b"])] == ["\n", ""]
    assert [one.end for one in merged(TWO_HOSTS, ["a", "a", "b\n", "b\n"])] == ["\n", "\n"]


def test_a_host_is_waited_for_but_not_for_long(merger):
    merger.feed(0, [line("a", 0, 1)], 1.0)
    assert merger.flush(1.05) == []
    assert merger.next_deadline() == pytest.approx(1.0 + MAX_AGE_S)
    assert said(merger.flush(merger.next_deadline())) == [((0, 1), "a")]
    merger.host_done(1)
    merger.feed(0, [line("b", 0, 1)], 2.0)
    assert said(merger.flush(2.0)) == [((0, 1), "b")]
    assert merger.next_deadline() is None


def test_a_host_that_was_late_is_not_folded_with_the_next_step(merger):

    def fold_of(host, step):
        texts = [f"step {step} loss {step}.{rank}\n" for rank in range(4)]
        return host_fold(TWO_HOSTS[host], texts)

    merger.feed(0, fold_of(0, 1), 0.0)
    assert said(merger.flush(1.0)) == [((0, 1), "step 1 loss {1.0, 1.1}")]
    merger.feed(1, fold_of(1, 1) + fold_of(1, 2), 1.0)
    merger.feed(0, fold_of(0, 2), 1.0)
    assert said(merger.flush(1.0)) == [
        ((2, 3), "step 1 loss {1.2, 1.3}"),
        ((0, 1, 2, 3), "step 2 loss {2.0, 2.1, 2.2, 2.3}"),
    ]


def test_a_flood_of_a_host_is_bounded_and_told_of():
    merger = FoldMerger(TWO_HOSTS, limit_chars=10_000)
    for start in range(0, 1000, 50):
        merger.feed(1, [line(f"{number} {'x' * 50}", 2 + number % 2) for number in range(start, start + 50)], 0.0)
    items = merger.flush(0.0, final=True)
    (notice,) = [item for item in items if isinstance(item, RankDisplay)]
    assert notice.ranks == (2, 3)
    assert notice.item.text.startswith(f"… {1001 - len(items):,} lines")


def test_a_host_that_speaks_nonsense_is_taken_at_its_word_and_no_further(merger):
    odd = [
        line(
            "loss 1…2",
            0,
            1,
            first_text="loss 1",
            varying_numbers=(VaryingNumber(7, ("1", "2")), VaryingNumber(0, ("1",)), VaryingNumber(-1, ())),
        ),
        line("\0\1\2\3", 0),
        line("a\4b", 0, 1, first_text="c", varying_numbers=(VaryingNumber(0, ("x", "y")),)),
        line("again", 0, live=True, first_text="no number", varying_numbers=(VaryingNumber(0, ("1",)),)),
    ]
    merger.feed(0, sent(odd), 0.0)
    merger.feed(1, sent([line("loss 3", 2, 3)]), 0.0)
    items = merger.flush(1.0) + merger.flush(2.0, final=True)
    assert {rank for item in items for rank in item.ranks} == {0, 1, 2, 3}


def test_live_lines_of_hosts_are_one():
    folders = {host: LineFolder(ranks, mergeable=True) for host, ranks in TWO_HOSTS.items()}
    merger = FoldMerger(TWO_HOSTS)
    for host, folder in folders.items():
        for rank in TWO_HOSTS[host]:
            folder.feed(rank, [Text("stderr", f"\r{10 + rank}%|{'#' * rank}| {10 + rank}/100")], 0.0)
        merger.feed(host, sent(folder.flush(MAX_AGE_S)), MAX_AGE_S)
    assert live(merger.flush(MAX_AGE_S)) == [((0, 1, 2, 3), "10…13%|| 10…13/100")]
    assert merger.next_deadline() is None
    folders[1].feed(3, [Text("stderr", "\r50%|##| 50/100")], 2 * MAX_AGE_S)
    merger.feed(1, sent(folders[1].flush(2 * MAX_AGE_S)), 2 * MAX_AGE_S)
    again = merger.flush(merger.next_deadline())
    assert live(again) == [((0, 1, 2, 3), "10…12% (rank 3: 50)|| 10…12 (rank 3: 50)/100")]


def test_live_lines_of_hosts_move_at_most_ten_times_a_second(merger):
    shown = []
    for millisecond in range(1000):
        merger.feed(millisecond % 2, [line(f"{millisecond}", 2 * (millisecond % 2), live=True)], millisecond / 1000)
        shown.append(len(live(merger.flush(millisecond / 1000))))
    assert sum(map(bool, shown)) <= 1 / LIVE_INTERVAL_S


def test_an_ordinary_line_takes_its_ranks_out_of_live_ones():
    merger = FoldMerger({0: (0, 1)})
    merger.feed(0, [line("50%", 0, 1, live=True)], 0.0)
    assert live(merger.flush(0.0)) == [((0, 1), "50%")]
    # The host says what is left of the live line after the ordinary one; the merger invents nothing.
    merger.feed(0, [line("done", 0)], 0.2)
    assert said(merger.flush(0.2)) == [((0,), "done")]
    merger.feed(0, [line("50%", 1, live=True)], 0.3)
    assert live(merger.flush(0.4)) == [((1,), "50%")]


def test_a_live_line_of_the_other_stream_is_left_alone():
    merger = FoldMerger({0: (0,)})
    merger.feed(0, [Line((0,), "stderr", "50%", live=True), line("hello", 0)], 0.0)
    items = merger.flush(0.0)
    assert (said(items), live(items)) == ([((0,), "hello")], [((0,), "50%")])


@st.composite
def worlds(draw, templates):
    """Each rank's text, equal but for numbers, and which host each rank is on."""
    lines = draw(templates)
    num_ranks = draw(st.integers(2, 6))
    number = st.integers(0, 30) | st.sampled_from([7, 1000])
    texts = [
        "".join(one.format(*(draw(number) for _ in range(one.count("{}")))) + "\n" for one in lines)
        for _ in range(num_ranks)
    ]
    owner = [draw(st.integers(0, 2)) for _ in range(num_ranks)]
    hosts = {host: tuple(rank for rank in range(num_ranks) if owner[rank] == host) for host in sorted(set(owner))}
    return lines, texts, hosts


no_line_twice = st.lists(
    st.sampled_from(["tick", "step {} loss {}.{}", "rank {} of {}", "lr {}e-{}", "{}%"]), unique=True, min_size=1
)
some_lines_often = st.lists(st.sampled_from(["tick", "step {} loss {}.{}", "rank {} of {}"]), min_size=1, max_size=6)


@given(worlds(no_line_twice))
def test_merging_hosts_is_folding_all_ranks_at_once(world):
    _, texts, hosts = world
    assert merged(hosts, texts) == flat(texts)


@given(worlds(some_lines_often))
def test_each_rank_is_heard_in_full_and_in_order_through_both_folds(world):
    lines, texts, hosts = world
    heard = merged(hosts, texts, mergeable=True)
    for rank, text in enumerate(texts):
        own = [item for item in heard if rank in item.ranks]
        assert len(own) == len(lines)
        for item, original in zip(own, text.splitlines(), strict=True):
            numbers = list(template_of(item.first_text or item.text).numbers)
            for varying in item.varying_numbers:
                numbers[varying.position] = varying.texts[item.ranks.index(rank)]
            assert tuple(numbers) == template_of(original).numbers


# ---------------------------------------------------------------------------------------------------------------------
# What a front end is sent


def test_ordinary_output_passes_untouched():
    budget = OutputBudget()
    items = [line(f"line {number}", 0, 1) for number in range(1000)]
    assert budget.admit(items, 0.0) == items
    assert budget.next_deadline() is None


def test_a_flood_is_cut_to_the_steady_rate():
    budget = OutputBudget(bytes_per_s=10_000, burst_bytes=20_000)
    passed = 0
    for hundredth in range(1000):
        items = budget.admit([line("x" * 99, 0)] * 50, hundredth / 100)
        passed += sum(len(item.text) + 1 for item in items if isinstance(item, Line))
    assert 20_000 + 80_000 < passed < 20_000 + 120_000


def test_every_line_of_a_flood_is_shown_or_counted():
    budget = OutputBudget(bytes_per_s=10_000, burst_bytes=20_000)
    shown = []
    for hundredth in range(300):
        shown += budget.admit([line("x" * 99, 0)] * 20, hundredth / 100)
    shown += budget.admit([], 3.0, final=True)
    counted = sum(int(notice.split()[1].replace(",", "")) for notice in notices(shown))
    assert len(said(shown)) + counted == 300 * 20


def test_messages_are_counted_as_a_front_end_gets_them():
    budget = OutputBudget(messages_per_s=1, burst_messages=3)
    lines = [line("a", 0), line("b", 0), Line((0,), "stderr", "c"), line("d", 0)]
    assert budget.admit(lines, 0.0) == lines  # three runs of lines of one stream
    assert budget.admit([line("e", 0)], 0.0) == []


def test_a_figure_is_a_message_and_a_large_one_passes_whole():
    budget = OutputBudget(bytes_per_s=1000, burst_bytes=1000)
    figure = RankDisplay((0,), Display({"image/png": "x" * 50_000, "application/json": {"a": 1}}))
    assert budget.admit([figure], 0.0) == [figure]
    assert budget.admit([figure], 10.0) == []  # still in debt for the first
    assert notices(budget.admit([], 60.0)) == ["… 1 display (50.0 kB) from rank 0 not shown"]


def test_what_was_cut_is_told_of_when_there_is_room_again_though_nothing_follows():
    budget = OutputBudget(bytes_per_s=1000, burst_bytes=1000)
    budget.admit([line("x" * 2000, 0)], 0.0)  # in debt
    assert budget.admit([line("lost", 2)], 0.01) == []
    when = budget.next_deadline()
    assert when is not None
    assert notices(budget.admit([], when - 0.01)) == []
    (notice,) = notices(budget.admit([], when))
    assert notice == "… 1 line (5 B) from rank 2 not shown; %mesh logs 2 shows the last of them"
    assert budget.next_deadline() is None


def test_output_goes_on_after_a_cut_with_the_notice_first():
    budget = OutputBudget(bytes_per_s=1000, burst_bytes=1000)
    budget.admit([line("x" * 2000, 0)], 0.0)  # in debt
    budget.admit([line("lost", 0)], 0.1)
    notice, after = budget.admit([line("after", 0)], 5.0)
    assert notices([notice])
    assert after == line("after", 0)


def test_the_end_of_a_flood_is_shown():
    budget = OutputBudget(bytes_per_s=1000, burst_bytes=1000)
    budget.admit([line("x" * 2000, 0)], 0.0)  # in debt
    items = budget.admit([line(f"line {number}", 0) for number in range(1000)], 0.01, final=True)
    assert notices(items) == ["… 980 lines (8.7 kB) from rank 0 not shown; %mesh logs 0 shows the last of them"]
    assert items[1:] == [line(f"line {number}", 0) for number in range(980, 1000)]


def test_a_few_lines_that_were_cut_last_are_shown_without_a_notice():
    budget = OutputBudget(bytes_per_s=1000, burst_bytes=1000)
    budget.admit([line("x" * 2000, 0)], 0.0)  # in debt
    budget.admit([line("end", 0)], 0.01)
    assert budget.admit([], 0.02, final=True) == [line("end", 0)]


def test_live_lines_and_clearing_always_pass():
    budget = OutputBudget(messages_per_s=1, burst_messages=1)
    budget.admit([line("a", 0)], 0.0)
    bar = line("50%", 0, live=True)
    assert budget.admit([bar], 0.0) == [bar]
    budget.admit([line("cut", 0)], 0.0)
    clear = RankDisplay((0,), ClearOutput())
    assert budget.admit([clear], 0.0) == [clear]  # and what was cut is cleared with the rest
    assert budget.next_deadline() is None


def test_a_flood_that_is_cut_keeps_within_what_jupyter_lets_pass():
    # jupyter_server: 1,000 messages/s and 1 MB/s, over windows of 3 s.
    budget = OutputBudget()
    sizes, counts = [], []
    for tick in range(200):  # 10 s
        items = budget.admit([line("x" * 79, 0)] * 5000, tick / 20)
        sizes.append(sum(len(item.text) + 1 for item in items if isinstance(item, Line)))
        streams = [item.stream if isinstance(item, Line) else str(place) for place, item in enumerate(items)]
        counts.append(len(list(itertools.groupby(streams))))
    for start in range(140):
        assert sum(sizes[start : start + 60]) < 3_000_000
        assert sum(counts[start : start + 60]) < 3_000
