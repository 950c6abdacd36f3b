"""Streams made into lines, progress bars included."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.fold.line_assembler import MAX_LINE_CHARS, MAX_OPEN_ROWS, LineAssembler, shorten


def lines_of(*pieces):
    """Lines that come of pieces of text, and what the open rows show at the end."""
    pen = LineAssembler()
    lines = [line for piece in pieces for line in pen.write(piece, 0.0)]
    return lines, pen.render()


def final_lines_of(*pieces):
    """All lines that come of pieces of text, the open rows among them."""
    pen = LineAssembler()
    lines = [line for piece in pieces for line in pen.write(piece, 0.0)]
    return lines + pen.finish()


def test_lines_are_put_together_from_pieces():
    assert lines_of("a", "b\nc", "\n", "d") == (["ab", "c"], "d")


@given(st.text(alphabet="ab\n", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_where_text_is_parted_makes_no_difference(text, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    *lines, rest = text.split("\n")
    assert lines_of(*pieces) == (lines, rest)


@given(st.text(alphabet="ab \r\n\b", max_size=30), st.integers(0, 30))
def test_where_a_bar_is_parted_makes_no_difference(text, cut):
    assert final_lines_of(text[:cut], text[cut:]) == final_lines_of(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("50%\r100%\n", "100%"),
        ("\r50%\r100%\n", "100%"),
        ("done\r\n", "done"),
        ("100%\r\r\n", "100%"),
        ("loading...\rok\n", "ok"),
        ("50%\r      \n", ""),
        ("50%\r\x1b[K100%\n", "100%"),
        ("50%\r\x1b[2K\n", ""),
        ("ab\b\bcd\n", "cd"),
        ("\b\ba\n", "a"),
        ("\x1b[31mred\x1b[0m\n", "\x1b[31mred\x1b[0m"),
    ],
)
def test_a_completed_line_shows_its_last_state(text, line):
    assert final_lines_of(text + "|\n") == [line, "|"]


def test_a_bar_that_ended_waits_for_what_follows():
    assert lines_of("\r50%\r100%\n") == ([], "100%")
    assert lines_of("\r50%\r100%\n", "next") == (["100%"], "next")
    assert lines_of("\r50%\r100%\n", "\n") == (["100%", ""], "")


def test_bars_one_after_the_other_are_let_go_in_turn():
    bars = [f"\r0%\rbar {number}\n" for number in range(6)]
    lines, state = lines_of(*bars)
    assert lines == ["bar 0", "bar 1", "bar 2"]
    assert state == "bar 3\nbar 4\nbar 5"
    assert final_lines_of(*bars, "end\n") == [*(f"bar {number}" for number in range(6)), "end"]


def test_an_open_bar_shows_its_latest_state():
    assert lines_of("\r10%", "\r20%") == ([], "20%")
    assert lines_of("10%\r") == ([], "10%")
    assert lines_of("10%\r", "20%\r") == ([], "20%")


def test_nested_bars_are_rows_of_one_block():
    # What tqdm writes for an inner bar: down a row, the bar, up again.
    pieces = ["\router 0", "\n\rinner 0\x1b[A", "\n\rinner 1\x1b[A", "\router 1", "\n\rinner 2\x1b[A"]
    assert lines_of(*pieces) == ([], "outer 1\ninner 2")


def test_nested_bars_end_as_a_line_each():
    pieces = ["\router 0", "\n\rinner 0\x1b[A", "\router 1", "\n", "\rinner 1\n", "next\n"]
    assert final_lines_of(*pieces) == ["outer 1", "inner 1", "next"]


def test_a_line_that_is_gone_is_not_taken_back():
    pen = LineAssembler()
    assert pen.write("gone\n", 0.0) == ["gone"]
    assert pen.write("\x1b[Aagain\n", 0.0) == ["again"]


def test_moving_up_is_followed_so_far():
    pen = LineAssembler()
    pen.write("\n" * 200 + "\x1b[999A", 0.0)
    assert len(pen.finish()) <= MAX_OPEN_ROWS
    assert lines_of("a\x1b[" + "9" * 6000 + "A\n")[1] == ""


def test_rows_that_are_drawn_while_the_cursor_is_hidden_are_drawn_over():
    # What rich.live writes: a table of three rows, then one of two rows with a line above it, each over the one before.
    up = "\r\x1b[2K" + "\x1b[1A\x1b[2K"
    pieces = ["\x1b[?25l", "top\nold 1\nold 2", f"{up}\x1b[1A\x1b[2Ktop\n", "new", f"{up}said\ntop\nnewest"]
    assert lines_of("before\n", *pieces) == (["before"], "said\ntop\nnewest")
    assert final_lines_of("before\n", *pieces, "\n", "\x1b[?25h", "after\n") == [
        "before",
        "said",
        "top",
        "newest",
        "after",
    ]


def test_a_cursor_that_stays_hidden_holds_back_only_so_many_lines():
    lines, state = lines_of("\x1b[?25l", *(f"{number}\n" for number in range(100)))
    assert (len(lines), len(state.split("\n"))) == (100 - MAX_OPEN_ROWS, MAX_OPEN_ROWS)


class Stream:
    """A file that a library writes to, and the lines that come of it."""

    def __init__(self):
        self.pen, self.ended = LineAssembler(), []

    def write(self, text):
        self.ended += self.pen.write(text, 0.0)

    def flush(self):
        pass

    def lines(self):
        return [line for line in self.ended + self.pen.finish() if line.strip()]


def test_real_tables_of_rich_leave_their_last_state():
    console_of, live = pytest.importorskip("rich.console").Console, pytest.importorskip("rich.live").Live
    stream = Stream()
    console = console_of(file=stream, force_terminal=True, color_system=None, _environ={}, width=40)
    with live("a\nb\nc 0", console=console, auto_refresh=False) as shown:
        for number in range(4):
            shown.update(f"a\nb\nc {number}", refresh=True)
            console.print(f"step {number}")
    console.print("after")
    assert stream.lines() == [
        *(f"step {n}" for n in range(4)),
        "a",
        "b",
        "c 3",
        "after",
    ]


def test_real_nested_tqdm_bars_leave_their_final_states():
    tqdm = pytest.importorskip("tqdm").tqdm
    stream = Stream()
    for _ in tqdm(range(3), desc="outer", file=stream, ncols=60, mininterval=0, miniters=1):
        for _ in tqdm(range(2), desc="inner", file=stream, ncols=60, mininterval=0, miniters=1, leave=False):
            pass
    shown = stream.lines()
    assert shown[0].startswith("outer: 100%")
    assert "3/3" in shown[0]
    assert len(shown) == 1


def test_a_very_long_line_is_cut_in_the_middle_and_says_so():
    (line,), rest = lines_of("a" * 1_000_000 + "z\n")
    assert rest == ""
    assert line.startswith("aaa")
    assert line.endswith("az")
    assert f" … {1_000_001 - MAX_LINE_CHARS:,} characters not shown … " in line
    assert len(line) < MAX_LINE_CHARS + 100


def test_a_line_that_never_ends_does_not_fill_the_memory():
    pen = LineAssembler()
    for _ in range(100):
        assert pen.write("x" * 10_000, 0.0) == []
        assert len(pen.render()) <= 2 * MAX_LINE_CHARS + 100
    (line,) = pen.write("\n", 0.0)
    assert f"{1_000_000 - MAX_LINE_CHARS:,} characters not shown" in line
    assert pen.write("next\n", 0.0) == ["next"]


@given(st.integers(0, 200_000))
def test_a_shortened_line_accounts_for_every_character(length):
    line = shorten("x" * length)
    missing = int(line.split(" … ")[1].split()[0].replace(",", "")) if " … " in line else 0
    assert line.count("x") + missing == length


def test_rubbing_out_is_not_slow_for_those_who_do_it_a_lot():
    assert lines_of("a" * 50_000 + "\b" * 50_000 + "z\n") == (["z"], "")


def test_characters_that_the_folding_uses_are_replaced():
    assert lines_of("\0a\1\2\3\4\n") == (["\ufffda\ufffd\ufffd\ufffd\ufffd"], "")


def test_a_pen_knows_since_when_its_row_is_open():
    pen = LineAssembler()
    assert pen.open_since is None
    pen.write("a", 1.0)
    pen.write("b", 2.0)
    assert pen.open_since == 1.0
    pen.write("\nc", 3.0)
    assert pen.open_since == 3.0
    pen.write("\n", 4.0)
    assert pen.open_since is None
    assert pen.finish() == []


def test_finishing_gives_the_open_rows_and_starts_anew():
    pen = LineAssembler()
    pen.write("\r50%\n\rinner\x1b[A", 0.0)
    assert pen.is_progress_bar
    assert pen.finish() == ["50%", "inner"]
    assert (pen.render(), pen.is_progress_bar, pen.open_since) == ("", False, None)
