"""Output of ranks folded as it comes: what becomes one, what waits, and for how long."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.fold.lines import LIVE_INTERVAL_S, MAX_AGE_S, LineFolder
from meshbook.fold.numbers import template_of
from meshbook.wire.messages import ClearOutput, Display, Line, Notice, RankDisplay, Text


@pytest.fixture
def folder():
    """Of two ranks."""
    return LineFolder(range(2))


@pytest.fixture
def lone():
    """Of one rank."""
    return LineFolder([0])


def out(text, stream="stdout"):
    return Text(stream, text)


def figure(content, **more):
    return Display({"text/plain": content}, **more)


def said(items):
    """Ordinary lines as (ranks, text)."""
    return [(item.ranks, item.text) for item in items if isinstance(item, Line) and not item.live]


def live(items):
    return [(item.ranks, item.text) for item in items if isinstance(item, Line) and item.live]


def notices(items):
    return [item.item.text for item in items if isinstance(item, RankDisplay) and isinstance(item.item, Notice)]


def final(*texts, **options):
    """What whole outputs of ranks 0, 1 and so on come to, in the end."""
    folder = LineFolder(range(len(texts)), **options)
    for rank, text in enumerate(texts):
        folder.feed(rank, [out(text)], 0.0)
    return folder.flush(0.0, final=True)


# ---------------------------------------------------------------------------------------------------------------------
# What becomes one


def test_a_line_that_all_ranks_said_is_shown_once():
    assert final(*["a\nb\n"] * 4) == [Line((0, 1, 2, 3), "stdout", "a"), Line((0, 1, 2, 3), "stdout", "b")]


def test_it_does_not_wait_once_all_have_said_it(folder):
    folder.feed(0, [out("a\n")], 0.0)
    assert folder.flush(0.0) == []
    folder.feed(1, [out("a\n")], 0.01)
    assert said(folder.flush(0.01)) == [((0, 1), "a")]


def test_lines_that_differ_in_numbers_are_one_with_the_number_of_each_rank():
    texts = [f"step 10 loss {loss}\n" for loss in ("2.31", "2.33", "97.4", "2.35")]
    assert said(final(*texts)) == [((0, 1, 2, 3), "step 10 loss {2.31, 2.33, 97.4, 2.35}")]


def test_lines_whose_numbers_do_not_go_into_one_are_shown_rank_by_rank_and_in_step():
    lines = said(final(*("".join(f"start {n}\npid {100 * n + 7 * rank}\n" for n in range(2)) for rank in range(9))))
    assert lines == [
        *[(tuple(range(9)), "start 0"), *(((rank,), f"pid {7 * rank}") for rank in range(9))],
        *[(tuple(range(9)), "start 1"), *(((rank,), f"pid {100 + 7 * rank}") for rank in range(9))],
    ]


def test_folding_can_be_limited_to_equal_lines_and_turned_off():
    texts = [f"same\nloss {rank}.5\nsame again\n" for rank in range(2)]
    assert said(final(*texts, folding="equal")) == [
        ((0, 1), "same"), ((0,), "loss 0.5"), ((1,), "loss 1.5"), ((0, 1), "same again"),
    ]  # fmt: skip
    by_rank = said(final(*texts, folding="off"))
    assert by_rank == [((rank,), line) for rank in range(2) for line in texts[rank].splitlines()]


@pytest.mark.parametrize(("folding", "shown"), [("equal", [((0, 1), "a 1"), ((2,), "a 2")]), ("off", None)])
def test_lines_in_progress_are_folded_as_others_are(folding, shown):
    folder = LineFolder(range(3), folding=folding)
    for rank, text in enumerate(("a 1", "a 1", "a 2")):
        folder.feed(rank, [out(text)], 0.0)
    assert live(folder.flush(0.2)) == (shown or [((0,), "a 1"), ((1,), "a 1"), ((2,), "a 2")])


def test_a_table_keeps_its_columns():
    rows = [[f"│ {row} │ {row * rank} │\n" for row in range(3)] for rank in range(2)]
    assert said(final(*map("".join, rows))) == [
        ((0, 1), "│ 0 │ 0 │"), ((0,), "│ 1 │ 0 │"), ((0,), "│ 2 │ 0 │"), ((1,), "│ 1 │ 1 │"), ((1,), "│ 2 │ 2 │"),
    ]  # fmt: skip


def test_lines_that_differ_in_words_stay_apart():
    assert said(final("a\n", "b\n", "a\n")) == [((0, 2), "a"), ((1,), "b")]


def test_what_one_rank_says_in_between_does_not_part_the_rest():
    texts = ["saving\nstep 1\nstep 2\nsaved\nstep 3\n"] + ["step 1\nstep 2\nstep 3\n"] * 3
    everyone = (0, 1, 2, 3)
    assert said(final(*texts)) == [
        ((0,), "saving"), (everyone, "step 1"), (everyone, "step 2"), ((0,), "saved"), (everyone, "step 3"),
    ]  # fmt: skip


def test_ranks_with_branches_meet_again():
    texts = ["start\neven\nend\n" if rank % 2 == 0 else "start\nodd\nodd too\nend\n" for rank in range(4)]
    assert said(final(*texts)) == [
        ((0, 1, 2, 3), "start"), ((0, 2), "even"), ((1, 3), "odd"), ((1, 3), "odd too"), ((0, 1, 2, 3), "end"),
    ]  # fmt: skip


def test_a_rank_that_is_one_line_behind_is_brought_into_step():
    assert said(final("tick\ntock\ntick\ntock\n", "tock\ntick\ntock\n")) == [
        ((0,), "tick"), ((0, 1), "tock"), ((0, 1), "tick"), ((0, 1), "tock"),
    ]  # fmt: skip


def test_stdout_and_stderr_are_never_one(folder):
    folder.feed(0, [out("a\n")], 0.0)
    folder.feed(1, [out("a\n", "stderr")], 0.0)
    lines = folder.flush(0.0, final=True)
    assert [(line.ranks, line.stream) for line in lines] == [((0,), "stdout"), ((1,), "stderr")]


def test_stdout_and_stderr_of_a_rank_keep_their_order(folder):
    for rank in range(2):
        folder.feed(rank, [out("a\n"), out("warn 1\n", "stderr"), out("b\n"), out("warn 2\n", "stderr")], 0.0)
    lines = folder.flush(0.0)
    assert [(line.stream, line.text) for line in lines] == [
        ("stdout", "a"), ("stderr", "warn 1"), ("stdout", "b"), ("stderr", "warn 2"),
    ]  # fmt: skip
    assert all(line.ranks == (0, 1) for line in lines)


def test_colours_are_kept_and_do_not_keep_lines_apart():
    assert said(final("\x1b[32mok\x1b[0m\n", "ok\n")) == [((0, 1), "\x1b[32mok\x1b[0m")]


def test_rows_of_data_are_shown_as_they_are_one_rank_after_the_other():
    rows = ["".join(f"{rank}{row}{column} " for column in range(10)) + "\n" for rank in range(2) for row in range(2)]
    lines = said(final("".join(rows[:2]) + "done\n", "".join(rows[2:]) + "done\n"))
    assert lines == [
        ((0,), rows[0][:-1]), ((0,), rows[1][:-1]), ((1,), rows[2][:-1]), ((1,), rows[3][:-1]), ((0, 1), "done"),
    ]  # fmt: skip


def test_text_is_put_together_across_pieces_of_any_size(folder):
    for character in "hello\nworld\n":
        folder.feed(0, [out(character)], 0.0)
    folder.feed(1, [out("hel"), out("lo\nwor"), out("ld\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0, 1), "hello"), ((0, 1), "world")]


def test_a_last_line_without_an_end_keeps_that():
    assert final("a\nb", "a\nb") == [Line((0, 1), "stdout", "a"), Line((0, 1), "stdout", "b", end="")]


def test_only_the_last_of_all_lines_may_lack_its_end():
    assert [(line.text, line.end) for line in final("a", "b")] == [("a", "\n"), ("b", "")]


def test_a_rank_that_takes_no_part_is_refused():
    with pytest.raises(KeyError):
        LineFolder(range(2)).feed(2, [out("a\n")], 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Waiting


def test_a_line_waits_for_the_others_but_not_for_long():
    folder = LineFolder(range(3))
    folder.feed(0, [out("a\n")], 1.0)
    folder.feed(1, [out("a\n")], 1.05)
    assert folder.flush(1.09) == []
    assert folder.next_deadline() == pytest.approx(1.0 + MAX_AGE_S)
    assert said(folder.flush(folder.next_deadline())) == [((0, 1), "a")]
    assert folder.next_deadline() is None


def test_a_rank_that_is_done_is_not_waited_for():
    folder = LineFolder(range(3))
    folder.rank_done(2)
    for rank in range(2):
        folder.feed(rank, [out("a\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0, 1), "a")]


def test_what_a_rank_said_before_it_was_done_is_not_lost(folder):
    folder.feed(0, [out("a\n")], 0.0)
    folder.rank_done(0)
    folder.feed(1, [out("a\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0, 1), "a")]


def test_a_lone_ranks_lines_wait_each_for_itself(folder):
    folder.feed(0, [out("a\nb\n")], 0.0)
    folder.feed(0, [out("c\n")], 0.5 * MAX_AGE_S)
    assert said(folder.flush(MAX_AGE_S)) == [((0,), "a"), ((0,), "b")]
    assert said(folder.flush(1.51 * MAX_AGE_S)) == [((0,), "c")]


def test_ranks_with_nothing_in_common_do_not_wait_for_each_other_for_ever(folder):
    for rank in range(2):
        folder.feed(rank, [out("".join(f"{'ab'[rank]} {'x' * number}\n" for number in range(200)))], 0.0)
    assert len(said(folder.flush(0.0))) == 200


def test_a_rank_that_went_on_is_not_waited_for(folder):
    folder.feed(0, [out("only me\nboth\n")], 0.0)
    folder.feed(1, [out("both\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0,), "only me"), ((0, 1), "both")]


def test_of_lines_without_a_partner_the_older_goes_first(folder):
    folder.feed(1, [out("from one\n")], 0.0)
    folder.feed(0, [out("from zero\n")], 0.01)
    assert folder.flush(0.5 * MAX_AGE_S) == []  # either might still say the other's line
    assert said(folder.flush(MAX_AGE_S)) == [((1,), "from one")]
    assert said(folder.flush(MAX_AGE_S + 0.01)) == [((0,), "from zero")]


def test_a_late_rank_is_not_taken_for_one_that_is_a_step_ahead():
    folder = LineFolder(range(4))
    for rank in range(3):
        folder.feed(rank, [out("step 1 loss 2.0\n")], 0.0)
    assert said(folder.flush(0.2)) == [((0, 1, 2), "step 1 loss 2.0")]
    folder.feed(3, [out("step 1 loss 2.1\n")], 0.3)
    for rank in range(3):
        folder.feed(rank, [out("step 2 loss 1.5\n")], 0.31)
    assert said(folder.flush(0.31)) == [((3,), "step 1 loss 2.1")]
    folder.feed(3, [out("step 2 loss 1.5\n")], 0.32)
    assert said(folder.flush(0.32)) == [((0, 1, 2, 3), "step 2 loss 1.5")]


def test_what_a_rank_missed_is_forgotten_once_it_is_in_step(folder):
    folder.feed(0, [out("step 1 loss 2.0\n")], 0.0)
    folder.flush(0.2)
    for rank in range(2):
        folder.feed(rank, [out("step 2 loss 1.5\n")], 0.3)
    folder.flush(0.3)
    # The next epoch: rank 1's line is that of the last epoch's step 1, which rank 1 missed, to the letter.
    folder.feed(0, [out("step 1 loss 1.0\n")], 0.4)
    folder.feed(1, [out("step 1 loss 2.0\n")], 0.4)
    assert said(folder.flush(0.4)) == [((0, 1), "step 1 loss {1.0, 2.0}")]


def epochs(delay_s, *, number=6):
    """What is shown of a loop in which rank 1 prints later than rank 0."""
    folder, shown = LineFolder(range(2)), []
    for epoch in range(number):
        began = 10.0 * epoch
        folder.feed(0, [out(f"epoch {epoch} done\n")], began)
        # as the host does: when a line is due, and after what is fed
        while (due := folder.next_deadline()) is not None and due < began + delay_s:
            shown += folder.flush(due)
        folder.feed(1, [out(f"epoch {epoch} done\n")], began + delay_s)
        shown += folder.flush(began + delay_s)
        while (due := folder.next_deadline()) is not None:
            shown += folder.flush(due)
    return said(shown)


@pytest.mark.parametrize(("delay_s", "num_split"), [(0.5, 0), (3.0, 1), (8.0, 2)])
def test_a_rank_that_is_late_in_each_round_of_a_loop_is_waited_for_from_the_next_round_on(delay_s, num_split):
    shown = epochs(delay_s * MAX_AGE_S)
    assert shown[: 2 * num_split] == [((rank,), f"epoch {n} done") for n in range(num_split) for rank in (0, 1)]
    assert shown[2 * num_split :] == [((0, 1), f"epoch {n} done") for n in range(num_split, 6)]


def test_a_rank_that_is_late_is_waited_for_also_where_the_others_have_gone_on_with_its_line():
    folder, shown, late = LineFolder(range(2)), [], 3.0 * MAX_AGE_S
    for epoch in range(4):  # a barrier behind each line: rank 0 prints the next one when rank 1 has printed this
        folder.feed(0, [out(f"epoch {epoch} done\n")], epoch * late)
        folder.feed(1, [out(f"epoch {epoch - 1} done\n")] if epoch else [], epoch * late)
        now = epoch * late
        shown += folder.flush(now)
        while (due := folder.next_deadline()) is not None and due < now + late:
            shown += folder.flush(due)
    folder.feed(1, [out("epoch 3 done\n")], 4 * late)
    shown += folder.flush(4 * late, final=True)
    assert [ranks for ranks, _ in said(shown)] == [(0,), (1,), (0, 1), (0, 1), (0, 1)]


def test_a_rank_that_is_later_than_that_keeps_nobody_waiting(folder):
    for epoch in range(9):
        folder.feed(0, [out(f"epoch {epoch}\n")], 100.0 * epoch)
        folder.flush(100.0 * epoch + 11 * MAX_AGE_S)
        folder.feed(1, [out(f"epoch {epoch}\n")], 100.0 * epoch + 50.0)
        folder.flush(100.0 * epoch + 90.0)
    folder.feed(0, [out("epoch 9\n")], 1000.0)
    assert folder.next_deadline() == 1000.0 + MAX_AGE_S


def test_a_burst_of_late_lines_counts_once(folder):
    folder.feed(0, [out("".join(f"line {n}\n" for n in range(20)))], 0.0)
    folder.flush(1.0)
    folder.feed(1, [out("".join(f"line {n}\n" for n in range(20)))], 2.0)
    folder.flush(5.0)
    folder.feed(0, [out("next\n")], 10.0)
    assert folder.next_deadline() == 10.0 + 4 * MAX_AGE_S


def test_a_rank_that_missed_a_step_is_not_taken_for_late(folder):
    folder.feed(0, [out("step 1 loss 2.0\n")], 0.0)
    assert said(folder.flush(0.2)) == [((0,), "step 1 loss 2.0")]
    for rank in range(2):
        folder.feed(rank, [out("step 2 loss 1.5\n")], 0.3)
    assert said(folder.flush(0.3)) == [((0, 1), "step 2 loss 1.5")]


def test_a_backlog_out_of_step_is_brought_into_step(folder):
    folder.feed(0, [out("begin\n")], 0.0)
    folder.flush(1.0)  # rank 1 is late: out of step from here
    folder.feed(0, [out("".join(f"step {step} loss {step}.5\n" for step in range(3, 8)))], 1.0)
    folder.feed(1, [out("".join(f"step {step} loss {step}.7\n" for step in range(1, 8)))], 1.0)
    assert said(folder.flush(1.0)) == [
        ((1,), "step 1 loss 1.7"),
        ((1,), "step 2 loss 2.7"),
        *(((0, 1), f"step {step} loss {{{step}.5, {step}.7}}") for step in range(3, 8)),
    ]


def test_a_flood_of_one_rank_does_not_wait_for_silent_ones():
    folder = LineFolder(range(4), limit_chars=10_000)
    folder.feed(2, [out("x" * 99 + "\n")] * 60, 0.0)
    assert len(said(folder.flush(0.0))) == 60


# ---------------------------------------------------------------------------------------------------------------------
# Displays and the like


def test_equal_displays_are_shown_once():
    folder = LineFolder(range(3))
    for rank in range(3):
        folder.feed(rank, [figure("A"), ClearOutput(wait=True), figure("B" if rank else "C")], 0.0)
    assert folder.flush(0.0, final=True) == [
        RankDisplay((0, 1, 2), figure("A")),
        RankDisplay((0, 1, 2), ClearOutput(wait=True)),
        RankDisplay((0,), figure("C")),
        RankDisplay((1, 2), figure("B")),
    ]


def test_a_display_and_the_text_around_it_keep_their_order(folder):
    for rank in range(2):
        folder.feed(rank, [out("before\nopen"), figure("A"), out("after\n")], 0.0)
    items = folder.flush(0.0)
    assert [item.text if isinstance(item, Line) else item.item for item in items] == [
        "before", "open", figure("A"), "after",
    ]  # fmt: skip


def test_an_update_elsewhere_does_not_end_a_line(lone):
    lone.feed(0, [out("loading"), figure("A", display_id="x", update=True), out(" done\n")], 0.0)
    items = lone.flush(0.0)
    assert [item.text for item in items if isinstance(item, Line)] == ["loading done"]


def test_displays_with_different_ids_are_different(folder):
    for rank in range(2):
        folder.feed(rank, [figure("A", display_id=str(rank))], 0.0)
    assert [item.ranks for item in folder.flush(0.0, final=True)] == [(0,), (1,)]


def test_notices_of_ranks_fold_too(folder):
    for rank in range(2):
        folder.feed(rank, [Notice("cut")], 0.0)
    assert folder.flush(0.0) == [RankDisplay((0, 1), Notice("cut"))]


def test_the_folder_lets_go_of_displays_that_are_out(folder):
    for number in range(50):
        for rank in range(2):
            folder.feed(rank, [figure(f"{number}")], 0.0)
        folder.flush(0.0)
    assert not any(queue.entries for queue in folder._aligner._queues.values())


# ---------------------------------------------------------------------------------------------------------------------
# Live lines


def test_bars_of_all_ranks_are_one_live_line():
    folder = LineFolder(range(4))
    for rank in range(4):
        folder.feed(rank, [out(f"\r{10 + rank}%|{'#' * rank:5}| {10 + rank}/100", "stderr")], 0.0)
    assert folder.flush(0.0) == []
    assert folder.flush(folder.next_deadline()) == [Line((0, 1, 2, 3), "stderr", "10…13%|     | 10…13/100", live=True)]


def test_a_live_line_moves_at_most_ten_times_a_second(lone):
    shown = []
    for millisecond in range(1000):
        lone.feed(0, [out(f"\r{millisecond}/1000")], millisecond / 1000)
        shown += live(lone.flush(millisecond / 1000))
    assert 8 <= len(shown) <= 1 / LIVE_INTERVAL_S
    assert shown[-1][1] >= "900/1000"


def test_a_live_line_that_stands_still_is_not_repeated(lone):
    lone.feed(0, [out("\r50%")], 0.0)
    assert live(lone.flush(MAX_AGE_S)) == [((0,), "50%")]
    assert lone.next_deadline() is None
    assert lone.flush(5.0) == []
    lone.feed(0, [out("\r50%")], 5.0)
    assert lone.flush(5.1) == []


def test_a_live_line_does_not_overtake_what_was_said_before_it(lone):
    lone.feed(0, [out("x" * 99 + "\n")] * 100 + [out("\r50%")], 0.0)
    assert not live(lone.flush(1.0, max_chars=1000))
    assert live(lone.flush(1.1)) == [((0,), "50%")]


def test_a_row_with_nothing_in_it_is_not_shown(lone):
    lone.feed(0, [out("\r")], 0.0)
    assert lone.flush(0.2) == []
    assert lone.next_deadline() is None


def test_the_last_state_of_a_live_line_is_shown_though_nothing_follows(lone):
    lone.feed(0, [out("\r50%")], 0.0)
    lone.flush(0.1)
    lone.feed(0, [out("\r60%")], 0.11)
    assert lone.flush(0.11) == []
    assert live(lone.flush(lone.next_deadline())) == [((0,), "60%")]


def test_a_line_that_is_slow_to_end_is_live_until_it_does(folder):
    for rank in range(2):
        folder.feed(rank, [out("loading...")], 0.0)
    assert folder.flush(0.5 * MAX_AGE_S) == []
    assert live(folder.flush(MAX_AGE_S)) == [((0, 1), "loading...")]
    for rank in range(2):
        folder.feed(rank, [out(" done\n")], 3.0)
    assert said(folder.flush(3.0)) == [((0, 1), "loading... done")]


def test_a_bar_that_ended_is_an_ordinary_line(folder):
    for rank in range(2):
        folder.feed(rank, [out("\r50%"), out("\r100%\n"), out("next\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0, 1), "100%"), ((0, 1), "next")]


def test_a_bar_whose_cell_ends_is_an_ordinary_line(lone):
    lone.feed(0, [out("\r50%\r100%\n")], 0.0)
    assert said(lone.flush(0.0, final=True)) == [((0,), "100%")]


def test_live_lines_come_after_what_was_said_before_them(folder):
    folder.feed(0, [out("before\n\r50%")], 0.0)
    assert folder.flush(0.5 * MAX_AGE_S) == []
    items = folder.flush(MAX_AGE_S)
    assert [(item.text, item.live) for item in items] == [("before", False), ("50%", True)]


def test_a_bar_that_leaves_the_others_is_told_apart_from_them(folder):
    for rank in range(2):
        folder.feed(rank, [out("\r50%")], 0.0)
    assert live(folder.flush(MAX_AGE_S)) == [((0, 1), "50%")]
    folder.feed(0, [out("\r100%\nnext\n")], 2 * MAX_AGE_S)
    folder.rank_done(0)
    folder.feed(1, [], 2 * MAX_AGE_S)
    assert live(folder.flush(3.5 * MAX_AGE_S)) == [
        ((1,), "50%")
    ]  # shown again: the ordinary lines took the shared one away


def test_a_bar_that_was_wiped_is_shown_as_wiped(lone):
    lone.feed(0, [out("\r50%")], 0.0)
    lone.flush(MAX_AGE_S)
    lone.feed(0, [out("\r    \r")], 2 * MAX_AGE_S)
    assert live(lone.flush(2 * MAX_AGE_S)) == [((0,), "")]
    assert lone.flush(0.5, final=True) == []


def test_a_bar_goes_on_below_a_display(lone):
    lone.feed(0, [out("\r50%"), figure("A"), out("\r60%")], 0.0)
    items = lone.flush(MAX_AGE_S)
    assert items == [RankDisplay((0,), figure("A")), Line((0,), "stdout", "60%", live=True)]


def test_after_the_output_was_cleared_live_lines_are_shown_again(lone):
    lone.feed(0, [out("\r50%")], 0.0)
    lone.flush(0.1)
    lone.feed(0, [ClearOutput()], 0.2)
    assert lone.flush(0.2) == [RankDisplay((0,), ClearOutput()), Line((0,), "stdout", "50%", live=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


def test_the_middle_of_a_flood_is_dropped_and_told_of():
    folder = LineFolder([3], limit_chars=10_000)
    for start in range(0, 1000, 10):
        folder.feed(3, [out("".join(f"line {number:4} {'x' * 40}\n" for number in range(start, start + 10)))], 0.0)
    items = folder.flush(0.0, final=True)
    texts = [text for _, text in said(items)]
    assert texts[0].startswith("line    0")
    assert texts[-1].startswith("line  999")
    (notice,) = notices(items)
    dropped = 1000 - len(texts)
    assert notice.startswith(f"… {dropped:,} lines (")
    assert notice.endswith("from rank 3 not shown; %mesh logs 3 shows the last of them")
    at = next(place for place, item in enumerate(items) if isinstance(item, RankDisplay))
    numbers = [int(text.split()[1]) for text in texts]
    assert numbers[:at] == list(range(at))
    assert numbers[at:] == list(range(at + dropped, 1000))


def test_a_flood_is_bounded_however_long_nobody_flushes():
    folder = LineFolder([0], limit_chars=10_000)
    for _ in range(100):
        folder.feed(0, [out("x" * 99 + "\n")] * 100, 0.0)
    queue = folder._aligner._queues[0]
    assert queue.num_chars < 50_000
    assert sum(map(len, queue.entries)) < 51_000


def test_one_piece_of_many_megabytes_is_not_taken_apart():
    folder = LineFolder([0], limit_chars=10_000)
    folder.feed(0, [out("first\n" + "x" * 99 + "\n" + "y\n" * 1_000_000 + "last\n")], 0.0)
    items = folder.flush(0.0, final=True)
    texts = [text for _, text in said(items)]
    assert texts[0] == "first"
    assert texts[-1] == "last"
    (notice,) = notices(items)
    assert f"… {1_000_003 - len(texts):,} lines (2.0 MB) from rank 0" in notice


def test_what_waits_after_a_flush_is_within_the_bound():
    folder = LineFolder(range(2), limit_chars=10_000)
    folder.feed(0, [out("x" * 99 + "\n")] * 300, 0.0)
    folder.flush(0.0, max_chars=100)
    assert folder._aligner._queues[0].num_chars <= 10_000


def test_ranks_that_flood_alike_stay_side_by_side():
    folder = LineFolder(range(4), limit_chars=10_000)
    shown = []
    for start in range(0, 3000, 50):
        for rank in range(4):
            chunk = "".join(f"line {number} {'x' * 40}\n" for number in range(start, start + 50))
            folder.feed(rank, [out(chunk)], start / 1000)
            if start > 200:
                shown += folder.flush(start / 1000, max_chars=400)
    shown += folder.flush(4.0, final=True)
    assert all(item.ranks == (0, 1, 2, 3) for item in shown)
    assert all("…" not in text for _, text in said(shown))
    assert notices(shown)
    assert said(shown)[-1][1].startswith("line 2999")


def test_a_rank_that_does_not_flood_loses_nothing():
    folder = LineFolder(range(2), limit_chars=10_000)
    for number in range(100):
        folder.feed(0, [out(f"calm {number}\n")], 0.0)
        folder.feed(1, [out("x" * 500 + "\n")] * 10, 0.0)
    items = folder.flush(0.0, final=True)
    assert [text for ranks, text in said(items) if 0 in ranks] == [f"calm {number}" for number in range(100)]
    assert all("from rank 1 not shown" in notice for notice in notices(items))


def test_displays_in_a_flood_are_counted_and_let_go():
    folder = LineFolder([0], limit_chars=10_000)
    for number in range(100):
        folder.feed(0, [figure(f"{number}" + "x" * 1000)], 0.0)
    items = folder.flush(0.0, final=True)
    (notice,) = notices(items)
    assert notice.startswith(f"… {101 - len(items)} displays (")
    assert not any(queue.entries for queue in folder._aligner._queues.values())


def test_a_flush_gives_no_more_than_it_is_asked_for(folder):
    for rank in range(2):
        folder.feed(rank, [out("".join(f"{rank} {number} {'x' * 90}\n" for number in range(1000)))], 0.0)
    first = folder.flush(1.0, max_chars=5000)
    assert 0 < sum(len(text) for _, text in said(first)) < 6000
    assert folder.next_deadline() <= 1.0
    assert len(said(first + folder.flush(1.0, final=True))) == 1000


# ---------------------------------------------------------------------------------------------------------------------
# For any output whatever

words = st.sampled_from(["", "tick", "tock", "save", "step {} loss {}", "rank {} of {}", "row" + " {}" * 10])
numbers = st.integers(0, 3)


@st.composite
def outputs(draw):
    """Lines of one rank: often alike, sometimes with numbers, sometimes with displays and stderr between."""
    lines = []
    for template in draw(st.lists(words, max_size=12)):
        lines.append(template.format(*(draw(numbers) for _ in range(template.count("{}")))))
    return [(draw(st.sampled_from(["stdout", "stdout", "stderr", "display"])), line) for line in lines]


@st.composite
def meetings(draw):
    """Several ranks' outputs, and in which order pieces of them come in, with flushes between."""
    common = draw(outputs())
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        plans.append(draw(st.one_of(st.just(common), outputs())))
    order = draw(st.permutations([rank for rank, plan in enumerate(plans) for _ in plan]))
    delays = [draw(st.sampled_from([0.0, 0.0, 0.03, 0.2])) for _ in order]
    return plans, list(zip(order, delays, strict=True))


def as_items(stream, line):
    return [figure(line)] if stream == "display" else [out(line + "\n", stream)]


def heard_from(rank, items):
    """What one rank said, read back from folded items: kind, words and, of a mergeable line, the rank's own numbers."""
    heard = []
    for item in items:
        if rank not in item.ranks:
            continue
        if isinstance(item, RankDisplay):
            heard.append(("display", item.item.data["text/plain"], ()))
            continue
        shape = template_of(item.first_text or item.text)
        own = list(shape.numbers)
        for varying in item.varying_numbers:
            own[varying.position] = varying.texts[item.ranks.index(rank)]
        heard.append((item.stream, shape.key, tuple(own)))
    return heard


def check_look_ahead(folder):
    """What the look-ahead keeps up to date entry by entry is what counting anew would give."""
    for queue in folder._aligner._queues.values():
        if queue.lookahead_keys is not None:
            ahead = queue.entries[queue.start + 1 : queue.lookahead_end]
            assert queue.lookahead_keys == Counter(folder._aligner._templates(entry).key for entry in ahead)


def as_said(plan):
    return [(stream, line, ()) if stream == "display" else (stream, *template_of(line)) for stream, line in plan]


@given(meetings())
def test_each_rank_is_heard_in_full_and_in_its_own_order(meeting):
    plans, order = meeting
    folder = LineFolder(range(len(plans)), mergeable=True)
    left = [list(plan) for plan in plans]
    now, items = 0.0, []
    for rank, delay in order:
        now += delay
        folder.feed(rank, as_items(*left[rank].pop(0)), now)
        if not left[rank]:
            folder.rank_done(rank)
        if delay:
            items += folder.flush(now)
            due = folder._aligner.next_deadline(MAX_AGE_S)
            assert due is None or due > now  # nothing waits longer than it may
            check_look_ahead(folder)
    items += folder.flush(now, final=True)
    for rank, plan in enumerate(plans):
        assert heard_from(rank, items) == as_said(plan)


def test_the_look_ahead_is_right_when_a_queue_ran_down_to_its_front(folder):
    folder.feed(0, [out("a\n")], 0.0)
    folder.feed(1, [out("tick\n")], 0.0)
    assert folder.flush(0.0) == []
    folder.feed(0, [out("tick\nx\n")], 0.0)
    folder.feed(1, [out("tock\n")], 0.0)
    assert said(folder.flush(0.0)) == [((0,), "a"), ((0, 1), "tick")]
    check_look_ahead(folder)


@given(st.lists(outputs(), min_size=1, max_size=4))
def test_ranks_that_say_the_same_speak_with_one_voice(plans):
    (plan, *_), num_ranks = plans, len(plans)
    folder = LineFolder(range(num_ranks))
    for rank in range(num_ranks):
        folder.feed(rank, list(itertools.chain.from_iterable(as_items(*one) for one in plan)), 0.0)
    items = folder.flush(0.0)
    assert len(items) == len(plan)
    assert all(item.ranks == tuple(range(num_ranks)) for item in items)


@given(meetings())
def test_a_fold_is_never_longer_than_what_was_said(meeting):
    plans, _ = meeting
    folder = LineFolder(range(len(plans)))
    for rank, plan in enumerate(plans):
        folder.feed(rank, list(itertools.chain.from_iterable(as_items(*one) for one in plan)), 0.0)
    items = folder.flush(0.0, final=True)
    assert max(map(len, plans)) <= len(items) <= sum(map(len, plans))


def test_a_line_of_all_ranks_is_small_on_the_wire():
    (line,) = final("loss 2\n", "loss 2\n", mergeable=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(line)) == {
        "type": "line", "ranks": [0, 1], "stream": "stdout", "text": "loss 2",
    }  # fmt: skip
