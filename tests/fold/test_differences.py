"""Numbers that differ between ranks, in the one line that stands for their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.fold.differences import MAX_LISTED
from meshbook.fold.numbers import Showing, fold, make_member


def folded(*texts: str, showing: Showing = "all", ranks: Iterable[int] | None = None) -> str | None:
    """What texts of ranks 0, 1, 2 and so on become; None if not one line."""
    which = range(len(texts)) if ranks is None else ranks
    whole = fold([make_member((rank,), text) for rank, text in zip(which, texts, strict=True)], showing)
    return None if whole is None else whole.text


def lines(text: str, *words: object) -> list[str]:
    return [text.replace("#", str(word)) for word in words]


@pytest.mark.parametrize(
    ("text", "words", "shown"),
    [
        ("using cuda:#", (0, 1, 1, 3), "using cuda:{0,1,1,3}"),
        ("dataset has # rows", (1000, 999, 1000, 1000), "dataset has 1000 (rank 1: 999) rows"),
        ("torch.Size([#, 64])", (32, 31, 32, 30), "torch.Size([{32, 31, 32, 30}, 64])"),
        ("listening on port #", (29500, 51000), "listening on port {29500, 51000}"),
        ("from 10.0.0.#", (4, 0, 3), "from {10.0.0.4, 10.0.0.0, 10.0.0.3}"),
        ("at 10.0.0.4:#", (29500, 29507), "at {10.0.0.4:29500, 10.0.0.4:29507}"),
        ("torch 2.#.0", (11, 13, 13, 13), "torch 2.13.0 (rank 0: 2.11.0)"),
        ("on 2026-11-#", (22, 23), "on {2026-11-22, 2026-11-23}"),
        ("saved /ckpt/step-100/rank-#.pt", (0, 1, 2, 3), "saved /ckpt/step-100/rank-{0,1,2,3}.pt"),
        ("saved step-#/rank-#.pt", (7, 9), "saved {step-7/rank-7.pt, step-9/rank-9.pt}"),
        ("hash 3f2a9#c", (1, 2, 1), "hash 3f2a91c (rank 1: 3f2a92c)"),
        ("sum #", (1234567, 20987639), "sum {1234567, 20987639}"),
        ("experts [#, #]", (3, 5), "experts [{3, 5}, {3, 5}]"),
        ("loss # ok", (2.31, 2.33, 97.4, 2.35), "loss {2.31, 2.33, 97.4, 2.35} ok"),
        ("found_inf=#", (0, 0, 1, 0), "found_inf=0 (rank 2: 1)"),
        ("n #", ("1,234", "12,345"), "n {1,234, 12,345}"),
        ("n #", (123456789012345678, 123456789012345679), "n {123456789012345678, 123456789012345679}"),
        ("step  # ok", (9, 10), "step  {9, 10} ok"),
        ("x=#", (-2, 1), "x={-2, 1}"),
        ("loss #", ("nan", 2.1), "loss {nan, 2.1}"),
        ("mem #GB ok", (4.1, 4.2, 4.1), "mem 4.1GB (rank 1: 4.2) ok"),
        ("<Foo at #>", ("0x7f12", "0x7f99"), "<Foo at 0x…>"),
        ("digest #", ("0x7f12", "0x7f99"), "digest {0x7f12, 0x7f99}"),
    ],
)
def test_of_few_ranks_each_is_shown_in_their_order(text: str, words: tuple[object, ...], shown: str) -> None:
    assert folded(*lines(text, *words)) == shown


@pytest.mark.parametrize("showing", ["all", "short", "ranges"])
def test_a_range_says_nothing_of_ranks_that_did_not_print(showing: Showing) -> None:
    assert folded("here 1", "here 3", ranks=(1, 3), showing=showing) == "here {1, 3}"
    assert folded(*lines("rank #", 0, 2, 3), ranks=(0, 2, 3), showing=showing) == "rank {0, 2, 3}"


def test_the_rank_of_each_is_a_range() -> None:
    assert folded(*lines("hello from rank #", *range(3))) == "hello from rank 0…2"
    assert folded(*lines("rank # of 64", *range(64))) == "rank 0…63 of 64"
    assert folded(*lines("rank #", 4, 5, 6), ranks=(4, 5, 6)) == "rank 4…6"
    assert folded(*lines("rank #", 2, 1, 0)) == "rank {2, 1, 0}"


MANY = range(16)


@pytest.mark.parametrize(
    ("text", "words", "shown"),
    [
        ("loss #", [f"{2.3 + n / 100:.2f}" for n in MANY], "loss 2.30…2.45 (median 2.37)"),
        ("loss #", [f"{2.3 + n / 100:.2f}" for n in range(8)], "loss 2.30…2.37 (median 2.33)"),
        ("loss #", [2.31, 2.33, 2.35, 97.4, *[2.34] * 4, 2.32], "loss 2.31…2.35 (median 2.34, rank 3: 97.4)"),
        ("loss #", ["nan", *(n / 4 for n in MANY)], "loss 0.0…3.75 (median 1.75, rank 0: nan)"),
        ("took # ms", [7 * n for n in MANY], "took 0…105 ms (median 49)"),
        ("at #it/s", [7 * n for n in MANY], "at 0…105it/s (median 49)"),
        ("13:00:#.5 INFO", [f"{n:02}" for n in MANY], "13:00:00.5…13:00:15.5 INFO"),
        ("x #", [0] * 60 + [5, 6, 7], "x 0 (rank 60: 5, rank 61: 6, rank 62: 7)"),
        ("x #", [2.3] * 14 + [97] * 2, "x 2.3 (ranks 14-15: 97)"),
        ("x #", [0] * 5 + [9] * 5, "x 0 (ranks 5-9: 9)"),
    ],
)
def test_of_many_ranks_measurements_are_a_range_and_what_few_have_is_named(
    text: str, words: list[object], shown: str
) -> None:
    assert folded(*lines(text, *words)) == shown


@pytest.mark.parametrize("text", ["pid #", "port # s", "# rows", "10.0.0.#", "v1.#.2", "/runs/#/log", "seed=#"])
def test_of_many_ranks_names_and_counts_are_not_folded(text: str) -> None:
    words = [7 * n for n in MANY]
    assert folded(*lines(text, *words)) is None
    start, stop = lines(text, 0, 7)
    short = folded(*lines(text, *words), showing="short")
    assert short is not None
    assert "0, " in short or start in short
    assert "… 12 more}" in short
    assert stop in short or "7, " in short


def test_a_line_that_would_become_long_is_not_folded() -> None:
    assert folded(*(f"{n} " * 8 for n in (1, 2))) is not None
    assert folded(*(f"{n} " * 8 for n in (123456789012, 234567890123))) is None


@pytest.mark.parametrize("row", ["│ # │ 5 │", "| # | 5 |", "0  #  2.5  3", "┃ # ┃"])
def test_the_rows_of_a_table_are_not_folded(row: str) -> None:
    assert folded(*lines(row, 1.5, 2.5)) is None


def test_a_progress_bar_has_ranges() -> None:
    bars = [f" {n}0%|██    | {n}/10 [00:0{n}<00:09, {n}.5it/s]" for n in (1, 3, 2)]
    assert folded(*bars) == " 10…30%|██    | 1…3/10 [00:01…03<00:09, 1.5…3.5it/s]"
    assert folded("10%", "12%", "50%", "11%", showing="ranges") == "10…12% (rank 2: 50)"


def test_a_number_too_large_for_a_float_is_not_an_error() -> None:
    huge = "9" * 400
    assert folded(f"{huge} s", *lines("# s", *range(8)), showing="short") == f"0…7 s (median 3, rank 0: {huge})"


def test_colours_of_the_first_rank_are_kept() -> None:
    assert folded("\x1b[31mloss 2\x1b[0m x 7", "loss 3 x 7") == "\x1b[31mloss {2, 3}\x1b[0m x 7"
    assert folded("cuda:\x1b[1m2\x1b[0m", "cuda:3") == "cuda:\x1b[1m{2, 3}\x1b[0m"


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=MAX_LISTED),
    st.sampled_from(["x #", "x=#,", "a/#/b", "v#.1", "n:#"]),
)
def test_what_each_of_few_ranks_wrote_can_be_read_from_the_line(numbers: list[int], text: str) -> None:
    shown = folded(*lines(text, *numbers))
    assert shown is not None
    written = [int(re.sub(r"\.1\b", "", word)) for word in re.findall(r"[0-9]+(?:\.1\b)?", shown)]
    if len(set(numbers)) == 1:
        assert written == numbers[:1]
    elif "…" in shown:
        assert numbers == list(range(len(numbers)))
    elif "{" in shown:
        assert written == numbers
    else:  # the most frequent one, and the others with their ranks
        assert set(numbers) <= set(written)
