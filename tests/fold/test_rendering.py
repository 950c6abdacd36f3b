"""How folded things read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import Failure, Released
from meshbook.fold.outcomes import fold_outcomes
from meshbook.fold.rendering import (
    plain_text,
    render_errors,
    render_line,
    render_released,
    render_values,
    render_values_html,
    sanitize,
)
from meshbook.wire.messages import Line, Outcome, Preview, Value

FOUR = (0, 1, 2, 3)


def line(text, *ranks, **more):
    return Line(ranks, "stdout", text, **more)


def held(*texts, kind="plain", **more):
    """Parts of ranks that hold values with these texts; None: no value."""
    return fold_outcomes(
        (rank, Outcome("ok", value=None if text is None else Value(Preview(kind, "int", text, **more))))
        for rank, text in enumerate(texts)
    )


def shown(*texts, world=None, **more):
    return render_values(held(*texts), tuple(range(len(texts))) if world is None else world, colour=False, **more)


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def test_a_line_of_all_ranks_is_just_the_line():
    assert render_line(line("hello", 0, 1, 2, 3), FOUR) == "hello"


def test_a_line_of_some_ranks_names_them_dimly():
    assert render_line(line("hello", 0, 1, 3), FOUR) == "\x1b[38;5;243m[0-1,3] \x1b[0mhello"
    assert render_line(line("hello", 2), FOUR, colour=False) == "[2] hello"


def test_one_of_one_rank_is_all():
    assert render_line(line("hello", 5), (5,)) == "hello"


def test_a_colour_that_one_rank_left_on_does_not_run_into_the_next_line():
    assert render_line(line("\x1b[31mred", 0), FOUR).endswith("\x1b[31mred\x1b[0m")
    assert render_line(line("\x1b[31mred", 0), FOUR, colour=False) == "[0] red"


def test_rows_of_a_live_line_stand_below_each_other():
    assert render_line(line("outer\ninner", 0, live=True), FOUR, colour=False) == "[0] outer\n    inner"


# ---------------------------------------------------------------------------------------------------------------------
# Values


def test_a_value_that_all_ranks_hold_is_just_the_value():
    assert shown("42", "42", "42", "42") == "42"
    assert render_values(held("42", "42"), (0, 1)) == "42"


def test_displays_of_json_that_differ_show_their_json():
    previews = [Preview("object", "JSON", "<JSON object>", data={"application/json": {"b": rank}}) for rank in range(2)]
    parts = fold_outcomes((rank, Outcome("ok", value=Value(preview))) for rank, preview in enumerate(previews))
    assert render_values(parts, (0, 1), colour=False) == '[0] {"b": 0}\n[1] {"b": 1}'


def test_different_values_are_labelled_and_ordered_by_rank():
    assert shown("b", "a", "b", "c") == "[0,2] b\n[1]   a\n[3]   c"


def test_a_value_of_several_lines_keeps_its_shape():
    assert shown("[[1,\n  2]]", "x") == "[0] [[1,\n      2]]\n[1] x"


def test_ranks_without_a_value_are_not_named():
    assert shown("5", None, None) == "[0] 5"
    assert shown(None, None) == ""
    assert render_values((), FOUR) == ""


def test_a_value_of_some_ranks_of_the_world_is_labelled():
    assert shown("5", "5", world=FOUR) == "[0-1] 5"


def test_ranks_that_failed_have_no_value():
    parts = fold_outcomes([(0, Outcome("ok", value=Value(Preview("plain", "int", "5")))), (1, Outcome("lost"))])
    assert render_values(parts, (0, 1), colour=False) == "[0] 5"


def test_few_different_numbers_are_shown_each():
    assert shown("0", "1", "2", "3") == "[0] 0\n[1] 1\n[2] 2\n[3] 3"


def test_many_different_numbers_are_a_range_with_the_outlier_named():
    assert shown(*(str(rank) for rank in range(256))) == "0…255"
    losses = [f"{2.31 + rank / 1000:.3f}" for rank in range(20)]
    losses[7] = "97.4"
    assert shown(*losses) == "2.310…2.329 (median 2.320, rank 7: 97.4)"


def test_many_different_words_are_counted():
    texts = ["".join("abcdefghijkl"[(rank + at) % 12] for at in range(3)) for rank in range(12)]
    lines = shown(*texts).split("\n")
    assert lines[0] == "[0] abc"
    assert len(lines) == 9
    assert lines[-1] == "… 4 more distinct values; values[rank] shows one"
    assert shown("a", "b", "c", limit=2).split("\n")[-1] == "… 1 more distinct value; values[rank] shows one"


def test_values_that_differ_where_it_is_not_shown_say_so():
    parts = fold_outcomes(
        (rank, Outcome("ok", value=Value(Preview("tensor", "torch.Tensor", "tensor([0, …])", digest=str(rank // 2)))))
        for rank in range(4)
    )
    assert render_values(parts, FOUR, colour=False) == "tensor([0, …])  (the ranks differ in what is not shown)"


def test_values_of_one_look_are_one_though_ranks_keep_them_under_different_names():
    parts = fold_outcomes(
        (rank, Outcome("ok", value=Value(Preview("object", "Model", "Model()", digest="d"), ref=f"r{rank}")))
        for rank in range(2)
    )
    assert render_values(parts, (0, 1)) == "Model()"


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_one_traceback_speaks_for_its_ranks():
    failure = Failure((0, 1, 3), "ZeroDivisionError", "division by zero", ("Traceback", "  1/0"))
    assert render_errors([failure], (2,), colour=False) == [
        "ranks 0-1,3: ZeroDivisionError: division by zero",
        "Traceback",
        "  1/0",
        "rank 2 ran to its end",
    ]


def test_several_failures_stand_apart_and_the_lost_are_named():
    failures = [Failure((0, 1), "KeyError", "'x'", ("a",)), Failure((2,), "OSError", "", ("b",))]
    assert render_errors(failures, (3, 4), (5, 6), colour=False) == [
        "ranks 0-1: KeyError: 'x'", "a", "", "rank 2: OSError", "b",
        "ranks 3-4 ran to their end", "ranks 5-6 were lost",
    ]  # fmt: skip
    assert render_errors([], (), (1,)) == ["rank 1 was lost"]
    assert render_errors([]) == []


def test_a_header_is_one_line_of_bearable_length():
    header, *_ = render_errors([Failure((0,), "E", "first\nsecond", ("Traceback",))], colour=False)
    assert header == "rank 0: E: first"
    (header,) = render_errors([Failure((0,), "E", "x" * 5000)], colour=False)
    assert len(header) < 400
    assert header.endswith("…")


def test_what_a_failure_without_a_traceback_says_is_shown_below_its_header():
    # The rank was released from a wait: there is no traceback with the complete message.
    assert render_errors([Failure((1,), "E", "first\nsecond \x07")], colour=False) == ["rank 1: E: first", "second ␇"]
    assert render_errors([Failure((1,), "E", "first\nsecond", ("T",))], colour=False) == ["rank 1: E: first", "T"]


def test_a_header_is_bold():
    assert render_errors([Failure((0,), "E", "x")]) == ["\x1b[1mrank 0:\x1b[0m E: x"]


# ---------------------------------------------------------------------------------------------------------------------
# HTML


def test_there_is_no_html_where_no_value_has_any():
    assert render_values_html(held("1", "2"), (0, 1)) is None


def test_html_of_all_ranks_stands_alone():
    assert render_values_html(held("t", "t", html="<table/>"), (0, 1)) == '<div class="meshbook-value"><table/></div>'


def test_html_is_labelled_with_its_ranks():
    parts = held("a", "b", html="<b>x</b>")
    text = render_values_html(parts, (0, 1))
    assert text is not None
    assert re.findall(r">(rank \d)</div><b>x</b>", text) == ["rank 0", "rank 1"]


def test_a_value_without_html_beside_others_is_escaped_text():
    parts = fold_outcomes(
        [
            (0, Outcome("ok", value=Value(Preview("object", "DataFrame", "df", html="<table/>")))),
            (1, Outcome("ok", value=Value(Preview("plain", "str", "<script>alert(1)</script>\x1b[31m")))),
        ]
    )
    text = render_values_html(parts, (0, 1))
    assert text is not None
    assert "<script>" not in text
    assert "<pre>&lt;script&gt;alert(1)&lt;/script&gt;</pre>" in text


def test_html_takes_little_room_and_names_the_rest():
    text = render_values_html(held(*"abcdefg", html="<i/>"), tuple(range(7)))
    assert text is not None
    assert text.count("<i/>") == 4
    assert "3 more distinct values on ranks 4-6; values[rank] shows one" in text


# ---------------------------------------------------------------------------------------------------------------------
# Hostile text is text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]52;c;Zm9v\x1b\\text", "text"),
        ("\x1b]0;never ends", "␛]0;never ends"),
        ("bell\x07 null\x00 del\x7f", "bell␇ null␀ del␡"),
        ("over\rwritten", "over␍written"),
        ("\x9b31m", "\ufffd31m"),
        ("abc\u202efed", "abc\ufffdfed"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("déjà vu 日本 🙂", "déjà vu 日本 🙂"),
    ],
)
def test_control_sequences_other_than_colours_cannot_act(text, cleaned):
    assert sanitize(text) == cleaned


@given(st.text(alphabet="\x1b[]31mHJ;\x07\\a\r\n", max_size=40))
def test_cleaned_text_holds_no_escape_but_those_of_colours(text):
    cleaned = sanitize(text)
    assert "\x1b" not in re.sub(r"\x1b\[[0-9;:]*m", "", cleaned)
    assert "\x1b" not in plain_text(text)
    assert not set(plain_text(text)) & set("\x07\r")


def test_everything_that_is_shown_is_cleaned():
    bad = "\x1b[2Jx\x07"
    assert render_line(line(bad, 0), (0,)) == "x␇"
    assert render_values(held(bad, bad), (0, 1)) == "x␇"
    assert render_errors([Failure((0,), "E", bad, (bad,))], colour=False) == ["rank 0: E: x␇", "x␇"]


@pytest.mark.parametrize(
    ("released", "text"),
    [
        ([((0,), "barrier at line 2")], "rank 0 waited in barrier at line 2 and was released; its variables are kept"),
        (
            [((0, 2, 3), "all_reduce at line 4")],
            "ranks 0,2-3 waited in all_reduce at line 4 and were released; their variables are kept",
        ),
        (
            [((0,), "barrier at line 2"), ((2, 3), "gather at line 3")],
            "rank 0 waited in barrier at line 2; ranks 2-3 waited in gather at line 3; they were released, and their "
            "variables are kept",
        ),
    ],
)
def test_ranks_that_were_released_are_one_line(released, text):
    assert render_released([Released(*one) for one in released]) == text
