"""What one source has printed and waits: bounded, let go of when it is out, and compared with what others printed."""

from __future__ import annotations

from meshbook.fold.entries import LineTemplates, item_entry, num_chars_of, output_of
from meshbook.fold.lag import LagDetector
from meshbook.fold.source_queue import SourceQueue
from meshbook.wire.messages import Display, RankDisplay


def queue(*lines: str, rank: int = 0, limit_chars: int = 1000, templates: LineTemplates | None = None) -> SourceQueue:
    made = SourceQueue((rank,), templates or LineTemplates(), limit_chars, per_entry_ranks=False)
    made.push(lines, sum(map(len, lines)), 0.0, special=False)
    return made


def test_what_is_popped_is_let_go_of_before_the_list_is_shortened() -> None:
    waiting = queue("before")
    figure = item_entry(Display({"text/plain": "figure"}, {}))
    waiting.push([figure], figure.num_chars, 1.0)
    waiting.push(["after"], 5, 2.0, special=False)
    assert not waiting.has_only_lines
    waiting.pop(1, len("before"))
    assert (len(waiting), waiting.front, waiting.oldest_arrival) == (2, figure, 1.0)
    waiting.pop(1, figure.num_chars)
    assert figure not in waiting.entries
    assert waiting.has_only_lines
    assert (waiting.front, waiting.num_chars, waiting.num_aged(2.5, 0.5)) == ("after", 5, 1)
    waiting.pop(1, 5)
    assert (waiting.entries, len(waiting), waiting.num_chars) == ([], 0, 0)


def test_equal_displays_are_equal_entries_and_come_out_as_they_went_in() -> None:
    display = Display({"text/plain": "x"}, {})
    one, other = item_entry(display), item_entry(Display({"text/plain": "x"}, {}))
    assert one == other
    assert one != item_entry(Display({"text/plain": "y"}, {}))
    assert output_of(one, (0, 1), mergeable=False) == RankDisplay((0, 1), display)


def test_a_queue_that_is_too_full_loses_its_middle_and_counts_it() -> None:
    waiting = queue(*(f"line {number}" for number in range(100)), limit_chars=300)
    assert waiting.is_too_full
    waiting.truncate(*waiting.truncation_range(), 1.0)
    assert not waiting.is_too_full
    assert waiting.num_chars == sum(map(num_chars_of, waiting.entries))
    assert (waiting.entries[0], waiting.entries[-1]) == ("line 0", "line 99")
    (gap,) = [entry for entry in waiting.entries if not entry.startswith("line")]
    notice = output_of(gap, (0,), mergeable=False)
    assert isinstance(notice, RankDisplay)
    assert f"… {101 - len(waiting)} lines" in notice.item.text  # type: ignore[union-attr]


def test_a_source_whose_line_went_out_without_it_is_behind_until_it_comes() -> None:
    templates = LineTemplates()
    late, ahead = queue(templates=templates), queue("step 1", "step 2", rank=1, templates=templates)
    lag = LagDetector([late, ahead], templates)
    lag.note_emitted([ahead], ["step 1"])
    ahead.pop(1, 6)
    assert not lag.is_aligned
    late.push(["step 1", "step 2"], 12, 1.0, special=False)
    assert lag.select_lagging([late, ahead]) == [late]
    late.pop(1, 6)
    assert lag.select_lagging([late, ahead]) == [late, ahead]
    lag.note_emitted([late, ahead], ["step 2"])
    assert lag.is_aligned
