"""From which rank a rank takes a remote tensor: tables of what ranks hold in, choices out."""

from __future__ import annotations

from meshbook.rank.healing.tensor_choice import StoreHeld, TensorChoice, TensorHeld, choose_tensors

SQUARE = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}  # dp, tp
WHOLE, BY_TP, BY_BOTH = TensorHeld("tensor"), TensorHeld("tensor", (1,), 1), TensorHeld("tensor", (0, 1), 2)


def store(**held: TensorHeld) -> StoreHeld:
    return StoreHeld({int(id[1:]): one for id, one in held.items()}, 1, 0)


def test_a_new_rank_takes_each_tensor_from_a_rank_with_the_same_part() -> None:
    others = {rank: store(t1=WHOLE, t2=BY_TP, t3=BY_BOTH) for rank in (0, 2, 3)}
    chosen = choose_tensors(others, SQUARE, (1,))
    assert chosen[1] == {1: TensorChoice(0), 2: TensorChoice(3), 3: TensorChoice(0, "no other rank has this part")}
    assert not any(chosen[rank] for rank in others)


def test_a_rank_that_was_stopped_before_a_step_takes_it_from_one_that_has_taken_it() -> None:
    refused = TensorHeld("tensor", skipped=1, is_transient=True)
    chosen = choose_tensors({0: store(t1=refused), 2: store(t1=WHOLE)}, {0: (0,), 1: (1,), 2: (2,)}, (1,))
    assert chosen == {0: {1: TensorChoice(2)}, 1: {1: TensorChoice(2)}, 2: {}}


def test_a_rank_that_wrote_a_part_is_no_source_where_another_is_as_before() -> None:
    begun = TensorHeld("tensor", skipped=1, is_begun=True, is_transient=True)
    before = TensorHeld("tensor", skipped=1, is_transient=True)
    chosen = choose_tensors({0: store(t1=begun), 2: store(t1=before)}, {0: (0,), 1: (1,), 2: (2,)}, (1,))
    assert chosen[0] == chosen[1] == {1: TensorChoice(2)}


def test_an_error_of_the_users_own_on_one_rank_is_not_covered_by_anothers_value() -> None:
    failed = TensorHeld("lost")
    chosen = choose_tensors({0: store(t1=failed), 2: store(t1=WHOLE)}, {0: (0,), 1: (1,), 2: (2,)}, (1,))
    assert (chosen[0], chosen[1]) == ({}, {1: TensorChoice(2)})


def test_tensors_on_one_memory_come_from_one_rank() -> None:
    lost = TensorHeld("lost", is_transient=True, is_view=True)
    view = TensorHeld("tensor")
    stores = {0: store(t1=WHOLE, t2=lost), 2: store(t1=WHOLE, t2=view)}
    chosen = choose_tensors(stores, {0: (0,), 1: (1,), 2: (2,)}, (1,))[1]
    assert chosen == {1: TensorChoice(0), 2: TensorChoice(2, "a view of another one")}


def test_what_each_rank_has_of_its_own_is_missing_and_says_why() -> None:
    chosen = choose_tensors({0: store(t1=TensorHeld("own"))}, {0: (0,), 1: (1,)}, (1,))
    assert chosen[1] == {1: TensorChoice(0, "each rank has its own")}
