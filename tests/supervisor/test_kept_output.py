"""What is kept of cells' output: all of it while there is room, the latest of it where there is not. No processes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from meshbook.ids import CallId
from meshbook.supervisor.kept_output import ITEM_BYTES, MAX_BYTES, MAX_CELL_BYTES, KeptOutput
from meshbook.wire.messages import (
    CallFinished,
    ClearOutput,
    Display,
    FoldedItem,
    HistoryEntry,
    KeptCell,
    Line,
    NewOutput,
    Notice,
    Outcome,
    OutcomeGroup,
    Payload,
    Preview,
    QueryNewOutput,
    RankDisplay,
    RankError,
    Value,
    VaryingNumber,
)

RANKS = (0, 1)


def line(text: str, *ranks: int, **options: Any) -> Line:
    return Line(ranks or RANKS, "stdout", text, **options)


def image(content: str, *ranks: int, display_id: str | None = None, update: bool = False) -> RankDisplay:
    return RankDisplay(ranks or RANKS, Display({"image/png": content}, display_id=display_id, update=update))


def clear(*ranks: int, wait: bool = False) -> RankDisplay:
    return RankDisplay(ranks or RANKS, ClearOutput(wait=wait))


class Kept(KeptOutput):
    """With the history that the supervisor has beside it."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.entries: list[HistoryEntry] = []

    def begin(self, number: int, client: str = "one") -> str:
        call = f"{client}-{len(self.entries)}"
        self.began(call, number, RANKS, client)
        self.entries.append(HistoryEntry(number, f"cell {number}", "source", RANKS, 1000.0, None, "running", call=call))
        return call

    def end(self, call: str, *items: FoldedItem, now: float = 0.0, **outcome: Any) -> None:
        part = OutcomeGroup(RANKS, Outcome(**{"status": "ok", **outcome}))
        self.ended(CallFinished(call=call, outcomes=(part,), seconds=1.0, items=items), now)  # type: ignore[arg-type]

    def cell(self, *items: FoldedItem, number: int = 1) -> str:
        """A cell with this output that has ended."""
        call = self.begin(number)
        for item in items:
            self.printed(call, (item,), 0.0)
        self.end(call)
        return call

    def of(self, number: int = 1) -> KeptCell:
        """The latest cell with this number."""
        return self.find(number, self.entries)[-1]

    def has(self, number: int) -> bool:
        return bool(self.find(number, self.entries))


def as_received(items: tuple[FoldedItem, ...]) -> tuple[FoldedItem, ...]:
    """The items in memory of their own, as the supervisor decodes them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(items), type=tuple[FoldedItem, ...])


def texts(items: Iterable[FoldedItem]) -> list[str]:
    """What is there to be read, with the images' content."""
    found = []
    for item in items:
        if isinstance(item, Line):
            found.append(item.text)
        elif isinstance(item.item, Notice):
            found.append(item.item.text)
        elif isinstance(item.item, Display):
            found.append(str(item.item.data["image/png"]))
    return found


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_output_is_kept_in_order_with_what_came_at_the_end(kept: Kept) -> None:
    call = kept.begin(1)
    kept.printed(call, (line("first"), line("of one", 1)), 0.0)
    kept.printed("no cell", (line("elsewhere"),), 0.0)
    assert texts(kept.of().items) == ["first", "of one"]
    assert kept.of().finished is None
    kept.end(call, line("last"))
    assert texts(kept.of().items) == ["first", "of one", "last"]
    finished = kept.of().finished
    assert finished is not None
    assert finished.seconds == 1.0


def test_output_of_a_thread_that_outlives_its_cell_is_kept_with_it(kept: Kept) -> None:
    call = kept.cell(line("in time"))
    kept.printed(call, (line("late"),), 9.0)
    assert texts(kept.of().items) == ["in time", "late"]


def test_of_a_progress_bar_the_present_state_is_kept_and_of_one_that_stood_still_the_last(kept: Kept) -> None:
    call = kept.begin(1)
    for percent in range(100):
        kept.printed(call, (line(f"{percent}%", live=True),), 0.0)
    assert texts(kept.of().items) == ["99%"]
    kept.printed(call, (line("50% of one", 1, live=True),), 0.0)
    assert [(item.ranks, text) for item, text in zip(kept.of().items, texts(kept.of().items), strict=True)] == [
        ((0,), "99%"),
        ((1,), "50% of one"),
    ]
    kept.printed(call, (line("100%", 0),), 0.0)
    assert texts(kept.of().items) == ["100%", "50% of one"]
    kept.end(call)
    assert [(item.live, item.text) for item in kept.of().items if isinstance(item, Line)] == [
        (False, "100%"),
        (False, "50% of one"),
    ]


def test_what_all_ranks_clear_is_not_kept_and_with_wait_once_something_follows(kept: Kept) -> None:
    call = kept.begin(1)
    kept.printed(call, (line("old"), image("old"), clear(wait=True)), 0.0)
    assert texts(kept.of().items) == ["old", "old"]
    kept.printed(call, (line("new"),), 0.0)
    assert texts(kept.of().items) == ["new"]
    assert kept.mark(kept.entries)[0].num_lines == 1
    kept.printed(call, (clear(),), 0.0)
    assert texts(kept.of().items) == []
    assert kept.num_bytes == 0


def test_what_one_rank_clears_takes_its_numbers_out_of_lines_that_others_share(kept: Kept) -> None:
    numbers = (VaryingNumber(0, ("4", "2")),)
    folded = line("step {4, 2} of 5", first_text="step 4 of 5", varying_numbers=numbers)
    kept.cell(clear(0, 1, wait=True), folded, clear(0, wait=True), line("step 5 of 5", 0))
    lines = [item for item in kept.of().items if isinstance(item, Line)]
    assert [(one.ranks, one.text) for one in lines] == [((1,), "step 2 of 5"), ((0,), "step 5 of 5")]


def test_what_one_rank_clears_the_others_keep(kept: Kept) -> None:
    call = kept.begin(1)
    kept.printed(call, (line("of both"), line("of one", 1), image("of one", 1), line("40%", live=True)), 0.0)
    before = kept.num_bytes
    kept.printed(call, (clear(1, wait=True),), 0.0)
    assert kept.num_bytes == before
    kept.printed(call, (image("next", 1),), 0.0)
    assert [(item.ranks, text) for item, text in zip(kept.of().items, texts(kept.of().items), strict=True)] == [
        ((0,), "of both"),
        ((1,), "next"),
        ((0,), "40%"),
    ]
    assert kept.mark(kept.entries)[0].num_lines == 1
    kept.printed(call, (clear(0), clear(1)), 0.0)  # one after the other, as ranks that are not in step do
    assert texts(kept.of().items) == []
    assert kept.num_bytes == 0


def test_a_display_that_is_updated_is_kept_as_it_is_last_on_each_rank(kept: Kept) -> None:
    call = kept.begin(1)
    kept.printed(call, (image("0", display_id="a"), image("other", display_id="b"), line("after")), 0.0)
    for step in range(1, 50):
        kept.printed(call, (image(str(step), display_id="a", update=True),), 0.0)
    kept.printed(call, (image("of another cell", display_id="c", update=True),), 0.0)
    assert texts(kept.of().items) == ["49", "other", "after"]
    kept.printed(call, (image("of one", 1, display_id="a", update=True),), 0.0)
    assert [(item.ranks, text) for item, text in zip(kept.of().items, texts(kept.of().items), strict=True)] == [
        ((0,), "49"),
        (RANKS, "other"),
        (RANKS, "after"),
        ((1,), "of one"),
    ]


def test_the_oldest_lines_of_a_cell_go_and_a_notice_says_how_many() -> None:
    kept = Kept(max_cell_bytes=10 * (ITEM_BYTES + 10))
    kept.cell(*(line(f"line {n:04}") for n in range(1000)))
    notice, *rest = texts(kept.of().items)
    assert rest == [f"line {n:04}" for n in range(1000 - len(rest), 1000)]
    assert 9 <= len(rest) <= 10
    assert notice.startswith(f"… {1000 - len(rest)} lines (")
    assert notice.endswith("from ranks 0-1 of this cell's output are no longer kept")
    assert kept.mark(kept.entries)[0].num_lines == 1000


def test_displays_go_before_lines_and_a_notice_says_so() -> None:
    kept = Kept(max_cell_bytes=100_000)
    kept.cell(line("first"), *(image(str(n) * 30_000) for n in range(4)), line("last"))
    notice, first, *images, last = texts(kept.of().items)
    assert (first, last) == ("first", "last")
    assert [content[0] for content in images] == ["1", "2", "3"]
    assert notice.startswith("… 1 display (30.0 kB)")


def test_an_image_larger_than_all_room_is_left_out_and_the_lines_stay() -> None:
    kept = Kept(max_cell_bytes=10_000)
    kept.cell(line("before"), image("x" * 20_000), line("after"))
    assert texts(kept.of().items)[1:] == ["before", "after"]


def test_of_all_cells_the_oldest_displays_go_first_and_then_the_oldest_cells() -> None:
    kept = Kept(max_bytes=100_000)
    kept.cell(line("a"), image("x" * 50_000), number=1)
    kept.cell(line("b" * 20_000), number=2)
    kept.cell(line("c" * 40_000), number=3)
    assert [text[0] for text in texts(kept.of(1).items)] == ["…", "a"]
    kept.cell(line("d" * 50_000), number=4)
    assert [number for number in (1, 2, 3, 4) if kept.has(number)] == [3, 4]
    assert kept.num_bytes <= 100_000
    assert kept.describe_numbers() == "3-4"


def test_of_a_cell_that_runs_the_latest_stays_whatever_others_print() -> None:
    kept = Kept(max_bytes=100_000)
    call = kept.begin(1)
    kept.printed(call, tuple(line(f"{n:05}") for n in range(200)), 0.0)
    kept.cell(line("x" * 60_000), number=2)
    assert texts(kept.of(1).items)[-1] == "00199"
    assert texts(kept.of(1).items)[0].startswith("… ")
    assert kept.of(1).finished is None
    assert kept.has(2)


def test_there_are_at_most_so_many_cells() -> None:
    kept = Kept(max_cells=3)
    for number in range(10):
        kept.cell(line("x"), number=number)
    assert kept.describe_numbers() == "7-9"
    assert [entry.number for entry in kept.mark(kept.entries) if entry.num_lines is not None] == [7, 8, 9]


def test_of_a_value_what_is_shown_is_kept_and_of_an_error_its_traceback(kept: Kept) -> None:
    value = Value(Preview("plain", "int", "42", html="<b>42</b>"), ref="r1", payload=Payload(b"x" * 100))
    call = kept.begin(1)
    kept.end(call, value=value, bound_names=("x",))
    finished = kept.of(1).finished
    assert finished is not None
    assert finished.outcomes[0].outcome == Outcome("ok", value=Value(value.preview))
    call = kept.begin(2)
    error = RankError("ValueError", "bad", ("line 1", "line 2"), pickled=b"x" * 100)
    kept.end(call, status="error", error=error)
    finished = kept.of(2).finished
    assert finished is not None
    kept_error = finished.outcomes[0].outcome.error
    assert kept_error is not None
    assert (kept_error.traceback, kept_error.pickled) == (("line 1", "line 2"), None)
    assert [entry.num_lines for entry in kept.mark(kept.entries)] == [0, 0]


def test_values_and_errors_that_are_too_large_are_cut_to_their_texts(kept: Kept) -> None:
    call = kept.begin(1)
    large = OutcomeGroup((0,), Outcome("ok", value=Value(Preview("object", "Table", "x" * 10, html="x" * 5_000_000))))
    failed = OutcomeGroup((1,), Outcome("error", error=RankError("E", "bad", ("x" * 5_000_000,))))
    kept.ended(CallFinished(call=call, outcomes=(large, failed), seconds=1.0), 0.0)  # type: ignore[arg-type]
    finished = kept.of(1).finished
    assert finished is not None
    first, second = (part.outcome for part in finished.outcomes)
    assert first.value is not None
    assert (first.value.preview.text, first.value.preview.html) == ("x" * 10, None)
    assert second.error is not None
    assert (second.error.evalue, second.error.traceback) == ("bad", ("(its traceback was too large to be kept)",))
    assert kept.num_bytes < 10_000


def test_a_cell_that_shows_nothing_is_not_marked_and_is_no_mistake_either(kept: Kept) -> None:
    kept.cell(number=1)
    assert kept.mark(kept.entries)[0].num_lines is None
    assert kept.of(1).items == ()
    assert not kept.has(2)


def test_a_cell_that_ends_without_its_client_is_reported_until_a_user_knows(kept: Kept) -> None:
    attended, left = kept.begin(1), kept.begin(2)
    kept.end(attended)
    kept.printed(left, (line("alone"),), 1.0)
    kept.client_left("one", 2.0)
    assert kept.unattended(kept.entries) == ()  # it still runs
    kept.end(left, line("at last"))
    (entry,) = kept.unattended(kept.entries)
    assert (entry.number, entry.num_lines, entry.source) == (2, 2, "")
    assert kept.unattended(kept.entries) == (entry,)
    kept.acknowledge([left, "unknown"])
    assert kept.unattended(kept.entries) == ()
    assert texts(kept.of(2).items) == ["alone", "at last"]


def test_another_client_that_follows_gets_what_came_since_and_shortly_before_the_first_was_gone(kept: Kept) -> None:
    call = kept.begin(1)
    for second in range(10):
        kept.printed(call, (line(f"at {second}"),), float(second))
    kept.client_left("one", 5.5)
    assert texts(kept.follow(call, "two")) == ["at 4", "at 5", "at 6", "at 7", "at 8", "at 9"]
    kept.end(call)
    assert kept.unattended(kept.entries) == ()


def test_a_cell_whose_second_client_goes_too_is_unattended_again(kept: Kept) -> None:
    call = kept.begin(1)
    kept.client_left("one", 1.0)
    kept.follow(call, "two")
    kept.client_left("two", 2.0)
    kept.end(call)
    assert len(kept.unattended(kept.entries)) == 1


def test_cells_of_one_number_are_told_apart(kept: Kept) -> None:
    kept.cell(line("of the first kernel"))
    kept.cell(line("of the second"))
    assert [texts(cell.items) for cell in kept.find(1, kept.entries)] == [["of the first kernel"], ["of the second"]]


@pytest.mark.parametrize("length", [5, 2000])
def test_a_flood_for_hours_takes_no_more_memory_than_the_limits_say(kept: Kept, length: int) -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(24):
        call = kept.begin(number)
        for batch in range(20):
            lines = tuple(Line(RANKS, "stdout", f"{batch} {n}".ljust(length, "x")) for n in range(400))
            kept.printed(call, as_received(lines), float(batch))
        kept.end(call)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept.num_bytes <= MAX_BYTES
    assert held < 1.1 * MAX_BYTES
    assert MAX_CELL_BYTES * 8 <= MAX_BYTES


def new_output(kept: Kept, since: int | None, target: str | None = None, max_items: int = 100) -> NewOutput:
    query = QueryNewOutput(CallId("q"), since, CallId(target) if target is not None else None, max_items)
    return kept.new_output(query, kept.entries, lambda now: 1000.0 + now)


def new_texts(output: NewOutput) -> list[str]:
    return texts(one.item for one in output.items)


def test_output_of_all_cells_is_read_in_order_from_place_to_place(kept: Kept) -> None:
    first, second = kept.begin(1), kept.begin(2)
    for call, text in ((first, "a"), (second, "b"), (first, "c"), (second, "d")):
        kept.printed(call, (line(text),), 5.0)
    output = new_output(kept, 0, max_items=3)
    assert (new_texts(output), output.num_left, output.last_place) == (["a", "b", "c"], 1, 4)
    assert [(one.place, one.call, one.at) for one in output.items[:2]] == [(1, first, 1005.0), (2, second, 1005.0)]
    assert [cell.entry.source for cell in output.cells] == ["", ""]
    output = new_output(kept, output.items[-1].place)
    assert (new_texts(output), output.num_left) == (["d"], 0)
    assert new_texts(new_output(kept, 4)) == []
    kept.printed(first, (line("e"),), 6.0)
    assert new_texts(new_output(kept, 4)) == ["e"]


def test_the_newest_output_is_read_without_a_place_and_of_one_cell_with_its_end(kept: Kept) -> None:
    first, second = kept.begin(1), kept.begin(2)
    kept.printed(first, (line("a"), line("b"), line("c")), 0.0)
    kept.printed(second, (line("other"), line("50%", live=True)), 0.0)
    output = new_output(kept, None, max_items=2)
    assert new_texts(output) == ["c", "other", "50%"]  # as a terminal shows it now
    output = new_output(kept, 0)
    assert [(one.place, one.item.text) for one in output.items if isinstance(one.item, Line)][-1] == (0, "50%")
    kept.end(first)
    output = new_output(kept, None, target=first)
    assert (new_texts(output), len(output.cells)) == (["a", "b", "c"], 1)
    assert output.cells[0].finished is not None


def test_what_a_reader_can_no_longer_have_is_said() -> None:
    kept = Kept(max_cell_bytes=2 * (ITEM_BYTES + 10))
    call = kept.begin(1)
    kept.printed(call, tuple(line(f"line {number}") for number in range(5)), 0.0)
    output = new_output(kept, 0)
    assert new_texts(output) == ["line 3", "line 4"]
    assert "are no longer kept" in texts(output.cells[0].items)[0]
