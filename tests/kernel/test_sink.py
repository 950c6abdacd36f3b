"""What becomes of a cell's output, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.errors import UsageError
from meshbook.fold.lines import LineFolder
from meshbook.kernel.displays import OmittedDisplays, PublishedDisplay
from meshbook.kernel.sink import CellSink
from meshbook.wire.messages import ClearOutput, Display, Line, Notice, RankDisplay, Text
from tests.kernel.frontend import strip_ansi

ALL = (0, 1)


class Page:
    """What a front end would have on its page."""

    def __init__(self, ranks: tuple[int, ...] = ALL) -> None:
        self.now = 0.0
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.omitted = OmittedDisplays()
        self.sink = CellSink(self._publish, ranks, omitted=self.omitted, cell=3, clock=lambda: self.now)

    def _publish(self, kind: str, content: dict[str, Any], /) -> None:
        self.messages.append((kind, content))

    def text(self) -> str:
        """Streams and displays as they read at the end, updates in place."""
        shown: list[tuple[str | None, str]] = []
        clears_next = False
        for kind, content in self.messages:
            if clears_next and kind != "update_display_data":
                shown.clear()
                clears_next = False
            if kind == "stream":
                shown.append((None, strip_ansi(content["text"])))
            elif kind == "clear_output":
                clears_next = content["wait"]
                shown = shown if clears_next else []
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


@pytest.fixture
def page() -> Page:
    return Page()


def test_lines_of_one_stream_that_come_together_are_one_message(page: Page) -> None:
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


def test_a_notice_is_a_display_of_its_own_and_no_error(page: Page) -> None:
    page.sink((RankDisplay((1,), Notice("rank 1 was cut short")),))
    ((kind, content),) = page.messages
    assert (kind, content["data"]["text/plain"]) == ("display_data", "[meshbook] rank 1 was cut short")
    assert "meshbook-notice" in content["data"]["text/html"]


def test_a_progress_bar_is_one_block_that_is_updated_and_stays_where_it_began(page: Page) -> None:
    page.sink((bar("  0%| | 0/2"),))
    page.now = 1.0
    page.sink((line("step 1"), bar(" 50%|#| 1/2")))
    page.now = 2.0
    page.sink((line("100%|##| 2/2", stream="stderr"), line("after")))
    page.sink.close()
    assert page.text() == "100%|##| 2/2\nstep 1\nafter\n"
    assert page.kinds().count("display_data") == 1


def test_bars_are_drawn_at_most_ten_times_a_second_and_their_last_state_always(page: Page) -> None:
    for step in range(100):
        page.now = step / 1000
        page.sink((bar(f"{step}%|#| {step}/100"),))
    page.sink.close()
    assert len(page.messages) <= 3
    assert page.text() == "99%|#| 99/100\n"


def test_the_bars_of_ranks_that_differ_are_lines_of_one_block(page: Page) -> None:
    page.sink((bar("r0: 10%|#|", (0,)), bar("r1: 20%|#|", (1,))))
    page.now = 1.0
    page.sink((bar("30%|#|", ALL),))
    page.sink.close()
    assert page.text() == "30%|#|\n"


def test_bars_that_go_on_stand_in_the_order_of_ranks_whoever_spoke_last(page: Page) -> None:
    page.sink([bar("1/9")])
    for number, rank in enumerate((1, 0, 1)):
        page.now += 1
        page.sink([bar(f"{number + 2}/9", (rank,))])
        numbers = [row.split("[")[1][0] for row in strip_ansi(page.text()).splitlines() if "[" in row]
        assert numbers == ["0", "1"]


def test_a_bar_that_was_cleared_leaves_room_to_what_its_rank_says_next(page: Page) -> None:
    page.sink((bar("10%|#| 1/10"),))
    page.now = 1.0
    page.sink((line("done training", stream="stderr"),))
    page.sink.close()
    assert page.text().strip() == "done training"
    assert ("stream", {"name": "stderr", "text": "done training\n"}) in page.messages


def test_after_a_finished_bar_the_next_one_is_a_block_of_its_own(page: Page) -> None:
    for name in ("a", "b"):
        page.sink((bar(f"{name}: 1%|#|"),))
        page.now += 1.0
        page.sink((line(f"{name}: 100%|#|", stream="stderr"),))
        page.now += 1.0
    page.sink.close()
    assert page.text() == "a: 100%|#|\nb: 100%|#|\n"
    assert page.kinds().count("display_data") == 2


def test_a_display_of_all_ranks_bears_no_label_and_one_of_some_does(page: Page) -> None:
    page.sink((shown("equal"), shown("other", (1,))))
    assert page.text() == "equal\nrank 1:\nother\n"


def test_equal_displays_that_come_one_after_the_other_are_one_on_the_page() -> None:
    page = Page((0, 1, 2))
    page.sink((shown("figure", (1,)),))
    page.sink((line("meanwhile", (0, 1, 2)),))
    page.sink((shown("figure", (0, 2)),))
    assert page.text() == "ranks 0-2:\nfigure\nmeanwhile\n"


def test_equal_displays_of_one_rank_are_several(page: Page) -> None:
    page.sink((shown("figure", (1,)), shown("figure", (1,)), shown("figure", (0,))))
    assert page.text() == "ranks 0-1:\nfigure\nrank 1:\nfigure\n"


def test_an_update_reaches_a_display_that_was_folded_late(page: Page) -> None:
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
    assert [display.ranks for _, display in page.omitted.for_ranks(ranks)] == [(4,), (5,)]
    assert "ranks 4-5" in page.text()
    assert "%mesh show 4" in page.text()


def test_many_displays_of_one_rank_are_not_taken_for_many_different_ones(page: Page) -> None:
    page.sink(tuple(shown(str(number)) for number in range(20)))
    page.sink.close()
    assert page.text() == "".join(f"{number}\n" for number in range(20))


def test_displays_that_ranks_made_side_by_side_come_in_the_order_of_ranks(page: Page) -> None:
    page.sink((shown("of 1", (1,)), shown("of 0", (0,)), line("between"), shown("next of 1", (1,))))
    assert page.text() == "rank 0:\nof 0\nrank 1:\nof 1\nbetween\nrank 1:\nnext of 1\n"


def test_displays_that_come_one_after_the_other_stand_in_the_order_of_ranks_and_are_updated_there() -> None:
    page = Page((0, 1, 2))
    for rank in (2, 0, 1):
        page.sink((shown(f"of {rank}", (rank,), display_id="x"),))
    assert page.text() == "rank 0:\nof 0\nrank 1:\nof 1\nrank 2:\nof 2\n"
    page.sink((shown("new of 2", (2,), display_id="x", update=True),))
    assert page.text() == "rank 0:\nof 0\nrank 1:\nof 1\nrank 2:\nnew of 2\n"
    page.sink((RankDisplay((0,), ClearOutput(False)),))
    assert page.text() == "rank 1:\nof 1\nrank 2:\nnew of 2\n"


def test_of_many_different_displays_those_of_the_first_ranks_are_shown_whoever_came_first() -> None:
    ranks = tuple(range(6))
    page = Page(ranks)
    for rank in (5, 3, 0, 4, 2, 1):
        page.sink((shown(f"of {rank}", (rank,), display_id="x"),))
    page.sink((shown("new of 5", (5,), display_id="x", update=True),))
    page.sink.close()
    assert page.text().startswith("rank 0:\nof 0\nrank 1:\nof 1\nrank 2:\nof 2\nrank 3:\nof 3\n")
    assert [display.ranks for _, display in page.omitted.for_ranks(ranks)] == [(4,), (5,)]
    assert "of 5" not in page.text()


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


def test_an_update_reaches_the_display_of_its_ranks_alone(page: Page) -> None:
    page.sink((shown("a0", (0,), display_id="x"), shown("a1", (1,), display_id="x")))
    page.sink((shown("b1", (1,), display_id="x", update=True),))
    assert page.text() == "rank 0:\na0\nrank 1:\nb1\n"


def test_when_all_ranks_clear_their_output_the_page_is_empty(page: Page) -> None:
    page.sink((line("a"), shown("b"), RankDisplay(ALL, ClearOutput()), line("c")))
    assert page.text() == "c\n"


def clear(*ranks: int, wait: bool = True) -> RankDisplay:
    return RankDisplay(ranks or ALL, ClearOutput(wait))


def test_when_one_rank_clears_its_output_the_others_is_still_there(page: Page) -> None:
    page.sink((line("ours"), line("mine", (0,)), line("theirs", (1,)), clear(0, wait=False)))
    assert page.text() == "[1] ours\n[1] theirs\n"


def test_a_page_that_is_to_be_cleared_with_the_next_output_stays_until_then(page: Page) -> None:
    page.sink((line("of 0", (0,)), line("of 1", (1,)), clear(wait=True)))
    assert page.text() == "[0] of 0\n[1] of 1\n"
    page.sink((line("new", (1,)),))
    assert page.text() == "[0] of 0\n[1] new\n"
    page.sink.close()
    assert page.text() == "[0] of 0\n[1] new\n"


def test_each_ranks_last_picture_is_there_also_where_ranks_clear_one_after_the_other() -> None:
    ranks = (0, 1, 2, 3)
    page = Page(ranks)
    for step in range(5):
        for rank in (2, 0, 3, 1):
            page.sink((clear(rank), line(f"step {step}", (rank,)), shown(f"figure {step}.{rank}", (rank,))))
    page.sink.close()
    text = page.text()
    assert sorted(row for row in text.splitlines() if "figure" in row) == [f"figure 4.{rank}" for rank in ranks]
    assert sorted(row for row in text.splitlines() if "step" in row) == [f"[{rank}] step 4" for rank in ranks]
    assert "not shown" not in text


def test_a_display_that_was_left_out_is_shown_once_there_is_room() -> None:
    ranks = tuple(range(6))
    page = Page(ranks)
    page.sink(tuple(shown(f"figure {rank}", (rank,)) for rank in ranks))
    page.sink((clear(0, 1), line("done", (0, 1))))
    page.sink.close()
    assert [row for row in page.text().splitlines() if "figure" in row] == [f"figure {rank}" for rank in (2, 3, 4, 5)]
    with pytest.raises(UsageError, match="shown already"):
        page.omitted.for_ranks(ranks)


def test_a_line_of_several_ranks_loses_the_numbers_of_one_that_clears() -> None:
    page = Page((0, 1, 2))
    folded = LineFolder((0, 1, 2), mergeable=True)
    for rank, loss in enumerate(("2.5", "97.0", "2.5")):
        folded.feed(rank, [Text("stdout", f"loss {loss}\n")], 0.0)
    page.sink(folded.flush(1.0))
    assert "97.0" in page.text()
    page.sink((clear(1), line("next", (1,))))
    assert page.text() == "[0,2] loss 2.5\n[1] next\n"


def test_an_equal_display_of_a_rank_that_came_later_stays_when_the_first_one_clears() -> None:
    page = Page((0, 1, 2))
    page.sink((shown("figure", (1,)),))
    page.sink((shown("figure", (0, 2)),))
    page.sink((clear(1), line("next", (1,))))
    assert page.text() == "ranks 0,2:\nfigure\n[1] next\n"


def test_a_finished_bar_and_a_notice_of_ranks_that_have_not_cleared_stay(page: Page) -> None:
    page.sink((bar("50%|#| 1/2", (1,)), RankDisplay((1,), Notice("cut short"))))
    page.now = 1.0
    page.sink((line("100%|##| 2/2", (1,), stream="stderr"),))
    page.now = 2.0
    page.sink((line("x", (0,)), clear(0), line("next", (0,))))
    page.sink.close()
    assert sorted(page.text().splitlines()) == ["[0] next", "[1] 100%|##| 2/2", "[meshbook] cut short"]


def test_a_display_that_ranks_update_differently_shows_each(page: Page) -> None:
    page.sink((shown("start", display_id="x"), line("after")))
    page.sink((shown("loss 2", (0,), display_id="x", update=True), shown("loss 3", (1,), display_id="x", update=True)))
    assert page.text() == "[0] loss 2\n[1] loss 3\nafter\n"
    page.sink((shown("end", ALL, display_id="x", update=True),))
    assert page.text() == "end\nafter\n"


def test_pictures_that_ranks_update_differently_are_one_above_the_other(page: Page) -> None:
    page.sink((shown("start", display_id="x"),))
    for rank in ALL:
        data = {"text/plain": "<Figure>", "image/png": f"png{rank}"}
        page.sink((RankDisplay((rank,), Display(data, display_id="x", update=True)),))
    kind, content = page.messages[-1]
    assert kind == "update_display_data"
    html = content["data"]["text/html"]
    assert html.index("rank 0") < html.index("png0") < html.index("rank 1") < html.index("png1")


def test_an_update_from_a_later_call_shows_each_ranks_own_too() -> None:
    displays: dict[tuple[int, str], PublishedDisplay] = {}
    messages: list[dict[str, Any]] = []
    for items in (
        [shown("start", display_id="x")],
        [shown("of 0", (0,), display_id="x", update=True), shown("of 1", (1,), display_id="x", update=True)],
    ):
        sink = CellSink(lambda _, content: messages.append(content), ALL, displays=displays)
        sink(items)
        sink.close()
    assert messages[-1]["data"]["text/plain"] == "[0] of 0\n[1] of 1"


def test_an_update_of_a_display_that_its_rank_has_cleared_has_no_effect(page: Page) -> None:
    page.sink((shown("start", display_id="x"), clear(0), line("next", (0,))))
    page.sink((shown("late", (0,), display_id="x", update=True),))
    assert page.text() == "rank 1:\nstart\n[0] next\n"
