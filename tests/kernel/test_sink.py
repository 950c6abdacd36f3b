"""What becomes of a cell's output, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.errors import UsageError
from meshbook.kernel.sink import CellSink, OmittedDisplays
from meshbook.wire.messages import ClearOutput, Display, Line, Notice, RankDisplay
from tests.kernel.frontend import strip_ansi

ALL = (0, 1)


class Page:
    """What a front end would have on its page."""

    def __init__(self, ranks: tuple[int, ...] = ALL) -> None:
        self.now = 0.0
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.kept: list[RankDisplay] = []
        self.sink = CellSink(self._publish, ranks, on_omitted=self.kept.append, clock=lambda: self.now)

    def _publish(self, kind: str, content: dict[str, Any], /) -> None:
        self.messages.append((kind, content))

    def text(self) -> str:
        """Streams and displays as they read at the end, updates in place."""
        shown: list[tuple[str | None, str]] = []
        for kind, content in self.messages:
            if kind == "stream":
                shown.append((None, content["text"]))
            elif kind == "clear_output":
                shown.clear()
            else:
                name, text = content["transient"].get("display_id"), content["data"]["text/plain"]
                if kind == "display_data":
                    shown.append((name, text + "\n"))
                else:
                    shown = [(other, text + "\n" if other == name else before) for other, before in shown]
        return "".join(text for _, text in shown)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]


def line(text: str, ranks: tuple[int, ...] = ALL, **options: Any) -> Line:
    return Line(ranks, options.pop("stream", "stdout"), text, **options)


def bar(text: str, ranks: tuple[int, ...] = ALL) -> Line:
    return line(text, ranks, stream="stderr", live=True)


def shown(text: str, ranks: tuple[int, ...] = ALL, **options: Any) -> RankDisplay:
    return RankDisplay(ranks, Display({"text/plain": text}, **options))


def test_lines_of_one_stream_that_come_together_are_one_message() -> None:
    page = Page()
    page.sink((line("a"), line("b"), line("c", stream="stderr"), line("d", end="")))
    assert [(content["name"], content["text"]) for _, content in page.messages] == [
        ("stdout", "a\nb\n"),
        ("stderr", "c\n"),
        ("stdout", "d"),
    ]


def test_what_only_some_ranks_say_bears_their_numbers() -> None:
    page = Page((0, 1, 2))
    page.sink((line("x", (0, 2)),))
    assert "[0,2]" in page.text()


def test_a_notice_is_told_on_stderr() -> None:
    page = Page()
    page.sink((RankDisplay((1,), Notice("rank 1 was cut short")),))
    assert page.messages == [("stream", {"name": "stderr", "text": "[meshbook] rank 1 was cut short\n"})]


def test_a_progress_bar_is_one_block_that_is_updated_and_stays_where_it_began() -> None:
    page = Page()
    page.sink((bar("  0%| | 0/2"),))
    page.now = 1.0
    page.sink((line("step 1"), bar(" 50%|#| 1/2")))
    page.now = 2.0
    page.sink((line("100%|##| 2/2", stream="stderr"), line("after")))
    page.sink.close()
    assert page.text() == "100%|##| 2/2\nstep 1\nafter\n"
    assert page.kinds().count("display_data") == 1


def test_bars_are_drawn_at_most_ten_times_a_second_and_their_last_state_always() -> None:
    page = Page()
    for step in range(100):
        page.now = step / 1000
        page.sink((bar(f"{step}%|#| {step}/100"),))
    page.sink.close()
    assert len(page.messages) <= 3
    assert page.text() == "99%|#| 99/100\n"


def test_the_bars_of_ranks_that_differ_are_lines_of_one_block() -> None:
    page = Page()
    page.sink((bar("r0: 10%|#|", (0,)), bar("r1: 20%|#|", (1,))))
    page.now = 1.0
    page.sink((bar("30%|#|", ALL),))
    page.sink.close()
    assert page.text() == "30%|#|\n"


def test_bars_that_go_on_stand_in_the_order_of_ranks_whoever_spoke_last() -> None:
    page = Page()
    page.sink([bar("1/9")])
    for number, rank in enumerate((1, 0, 1)):
        page.now += 1
        page.sink([bar(f"{number + 2}/9", (rank,))])
        numbers = [row.split("[")[1][0] for row in strip_ansi(page.text()).splitlines() if "[" in row]
        assert numbers == ["0", "1"]


def test_a_bar_that_was_cleared_leaves_room_to_what_its_rank_says_next() -> None:
    page = Page()
    page.sink((bar("10%|#| 1/10"),))
    page.now = 1.0
    page.sink((line("done training", stream="stderr"),))
    page.sink.close()
    assert page.text().strip() == "done training"
    assert ("stream", {"name": "stderr", "text": "done training\n"}) in page.messages


def test_after_a_finished_bar_the_next_one_is_a_block_of_its_own() -> None:
    page = Page()
    for name in ("a", "b"):
        page.sink((bar(f"{name}: 1%|#|"),))
        page.now += 1.0
        page.sink((line(f"{name}: 100%|#|", stream="stderr"),))
        page.now += 1.0
    page.sink.close()
    assert page.text() == "a: 100%|#|\nb: 100%|#|\n"
    assert page.kinds().count("display_data") == 2


def test_a_display_of_all_ranks_bears_no_label_and_one_of_some_does() -> None:
    page = Page()
    page.sink((shown("equal"), shown("other", (1,))))
    assert page.text() == "equal\nrank 1:\nother\n"


def test_equal_displays_that_come_one_after_the_other_are_one_on_the_page() -> None:
    page = Page((0, 1, 2))
    page.sink((shown("figure", (1,)),))
    page.sink((line("meanwhile", (0, 1, 2)),))
    page.sink((shown("figure", (0, 2)),))
    assert page.text() == "ranks 0-2:\nfigure\nmeanwhile\n"


def test_equal_displays_of_one_rank_are_several() -> None:
    page = Page()
    page.sink((shown("figure", (1,)), shown("figure", (1,)), shown("figure", (0,))))
    assert page.text() == "ranks 0-1:\nfigure\nrank 1:\nfigure\n"


def test_an_update_reaches_a_display_that_was_folded_late() -> None:
    page = Page()
    page.sink((shown("figure", (1,), display_id="x"),))
    page.sink((shown("figure", (0,), display_id="x"),))
    page.sink((shown("new", ALL, display_id="x", update=True),))
    assert page.text() == "ranks 0-1:\nnew\n"


def test_of_many_different_displays_four_are_shown_and_the_others_are_kept_and_named() -> None:
    ranks = tuple(range(6))
    page = Page(ranks)
    page.sink(tuple(shown(f"figure {rank}", (rank,)) for rank in ranks))
    page.sink.close()
    assert "figure 3" in page.text()
    assert "figure 4" not in page.text()
    assert [display.ranks for display in page.kept] == [(4,), (5,)]
    assert "ranks 4-5" in page.text()
    assert "%mesh show 4" in page.text()


def test_many_displays_of_one_rank_are_not_taken_for_many_different_ones() -> None:
    page = Page()
    page.sink(tuple(shown(str(number)) for number in range(20)))
    page.sink.close()
    assert page.text() == "".join(f"{number}\n" for number in range(20))


def test_displays_that_ranks_made_side_by_side_come_in_the_order_of_ranks() -> None:
    page = Page()
    page.sink((shown("of 1", (1,)), shown("of 0", (0,)), line("between"), shown("next of 1", (1,))))
    assert page.text() == "rank 0:\nof 0\nrank 1:\nof 1\nbetween\nrank 1:\nnext of 1\n"


def test_what_was_left_out_can_be_had_by_rank() -> None:
    kept = OmittedDisplays()
    with pytest.raises(UsageError, match="shown already"):
        kept.for_ranks(ALL)
    kept.add(3, shown("of an earlier cell", (1,)))
    kept.add(4, shown("figure 5", (5,)))
    kept.add(4, shown("figure 4", (4,)))
    assert [one.ranks for _, one in kept.for_ranks((4, 5))] == [(4,), (5,)]
    with pytest.raises(UsageError, match="none of rank 1"):
        kept.for_ranks((1,))


def test_an_update_reaches_the_display_of_its_ranks_alone() -> None:
    page = Page()
    page.sink((shown("a0", (0,), display_id="x"), shown("a1", (1,), display_id="x")))
    page.sink((shown("b1", (1,), display_id="x", update=True),))
    assert page.text() == "rank 0:\na0\nrank 1:\nb1\n"


def test_when_all_ranks_clear_their_output_the_page_is_empty() -> None:
    page = Page()
    page.sink((line("a"), shown("b"), RankDisplay(ALL, ClearOutput()), line("c")))
    assert page.text() == "c\n"


def test_when_one_rank_clears_its_output_the_others_is_still_there() -> None:
    page = Page()
    page.sink((line("ours"), line("mine", (0,)), line("theirs", (1,)), RankDisplay((0,), ClearOutput())))
    assert "theirs" in page.text()
    assert "mine" not in page.text()
    assert "ours" in page.text()
