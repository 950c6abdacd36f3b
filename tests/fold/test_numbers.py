"""Texts that are equal but for numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.fold.entries import line_of_fold, without_ranks
from meshbook.fold.numbers import MAX_VARYING, FoldMember, fold, fold_texts, live_template_of, make_member, template_of
from meshbook.wire.messages import Line


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("step 10 loss 2.31", ("10", "2.31")),
        ("lr 1e-4, 1.5E+3", ("1e-4", "1.5E+3")),
        ("x=-3 y=+.5", ("-3", "5")),
        ("2024-01-02", ("2024", "01", "02")),
        ("ranks 0-3", ("0", "3")),
        ("f(x)-1", ("1",)),
        ("1,234,567 tokens, 12,34", ("1,234,567", "12", "34")),
        ("v1.2.3", ("1.2", "3")),
        ("[1. 2.5]", ("1.", "2.5")),
        ("it took 3. Then more", ("3",)),
        ("loss nan, -inf", ("nan", "-inf")),
        ("INFO nanny infinite", ()),
        ("<Foo at 0x7f3A>", ("0x7f3A",)),
        ("cuda:1 fc2.weight", ("1", "2")),
        ("٣", ()),
        ("", ()),
    ],
)
def test_numbers_are_found_as_they_were_written(text, numbers):
    assert template_of(text).numbers == numbers


@given(st.text(alphabet="ab01.,-+e() ", max_size=30))
def test_a_line_that_may_hold_nan_is_parted_like_any_other(text):
    # Two patterns do the work, a quick one and one that knows words; the letters of `inf` call for the second.
    assert template_of(text + " info").numbers == template_of(text + " on").numbers


def test_spaces_that_pad_a_number_and_colours_do_not_make_a_difference():
    assert template_of("step  9 ok").key == template_of("step 10 ok").key
    assert template_of("\x1b[31mstep 9\x1b[0m ok").key == template_of("step 10 ok").key
    assert template_of("step ok").key != template_of("stepok").key
    assert template_of("a 1").key != template_of("a").key


@given(st.text(max_size=40), st.text(max_size=40))
def test_texts_with_one_key_have_as_many_numbers(first, second):
    one, other = template_of(first), template_of(second)
    assert one.key != other.key or len(one.numbers) == len(other.numbers)


def test_a_hole_in_the_text_itself_is_not_taken_for_a_number():
    assert template_of("a\4b").key != template_of("a1b").key


def test_a_row_of_data_is_not_a_message():
    rows = [" ".join(str(rank + at) for at in range(MAX_VARYING + 1)) for rank in range(2)]
    assert fold([make_member((rank,), row) for rank, row in enumerate(rows)]) is None
    assert fold_texts([((0,), rows[0]), ((1,), rows[1]), ((2,), rows[0])]) == [((0, 2), rows[0]), ((1,), rows[1])]


def test_a_long_text_is_compared_as_it_is():
    long = "word " * 1000
    assert fold_texts([((0,), long + "1"), ((1,), long + "2"), ((2,), long + "1")]) == [
        ((0, 2), long + "1"),
        ((1,), long + "2"),
    ]


def test_texts_are_folded_by_their_words():
    texts = [((0,), "a 1"), ((1,), "b 1"), ((2,), "a 3"), ((3,), "c")]
    assert fold_texts(texts) == [((0, 2), "a {1, 3}"), ((1,), "b 1"), ((3,), "c")]


def test_how_far_a_bar_is_drawn_does_not_matter():
    assert live_template_of(" 10%|█         | 1/10").key == live_template_of("100%|██████████| 10/10").key
    assert live_template_of("[==>    ] 3/9").key == live_template_of("[=======>] 8/9").key
    assert live_template_of("train 10%").key != live_template_of("valid 10%").key


numbers = st.one_of(
    st.integers(-1000, 1000).map(str), st.floats(allow_nan=True).map(str), st.sampled_from(["1,234", "nan", "0x1f"])
)


@pytest.mark.parametrize("showing", ["short", "ranges"])
@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=12), data=st.data())
def test_folding_in_two_steps_is_folding_at_once(showing, rows, data):
    texts = ["{} of {} at {} s".format(*row) for row in rows]
    shapes = {template_of(text).key for text in texts}
    if len(shapes) > 1:  # "-5" after a word and "5" part differently; not what this is about
        return
    flat = fold([make_member((rank,), text) for rank, text in enumerate(texts)], showing)
    owner = [data.draw(st.integers(0, 2)) for _ in texts]
    halves = []
    for host in sorted(set(owner), key=owner.index):
        part = fold([make_member((rank,), text) for rank, text in enumerate(texts) if owner[rank] == host], showing)
        assert part is not None
        lead = part.first_text or part.text
        varying = {one.position: one.texts for one in part.varying}
        halves.append(FoldMember(part.ranks, lead, template_of(lead).numbers, varying))
    assert fold(halves, showing) == flat


@given(rows=st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=2, max_size=8), data=st.data())
def test_a_line_without_some_ranks_is_what_the_others_wrote(rows, data):
    texts = ["{} of {} s".format(*row) for row in rows]
    if len({template_of(text).key for text in texts}) > 1:
        return
    members = [make_member((rank,), text) for rank, text in enumerate(texts)]
    gone = data.draw(st.sets(st.integers(0, len(texts) - 1), max_size=len(texts) - 1))
    others = [one for one in members if one.ranks[0] not in gone]
    whole, rest = fold(members), fold(others) or fold(others, "short")
    if whole is None:  # shown line by line
        return
    assert rest is not None
    remaining = without_ranks(line_of_fold(whole, "stdout", mergeable=True), gone)
    assert remaining == line_of_fold(rest, "stdout", mergeable=True)


def test_a_line_without_all_of_its_ranks_is_none_and_one_without_others_is_the_same():
    line = Line((0, 2), "stderr", "no numbers", end="")
    assert without_ranks(line, (0, 1, 2)) is None
    assert without_ranks(line, (1,)) is line
    assert without_ranks(line, (0,)) == Line((2,), "stderr", "no numbers", end="")
