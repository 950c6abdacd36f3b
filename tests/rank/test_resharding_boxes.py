"""Which part of a tensor each rank holds, compared with torch's chunks, and how parts move. No processes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from meshbook.rank.resharding.boxes import ALL_RANKS, Box, Cut, box_of, find_gaps, plan_copies, shape_of, within


def cut(*axes: str, dims: tuple[int, ...], late: tuple[bool, ...] = ()) -> Cut:
    return Cut(axes, dims, late or (False,) * len(axes))


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[within(box, tuple((0, size) for size in whole.shape))]


@pytest.mark.parametrize("length", [0, 1, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_parts_are_those_of_torch_chunk_the_last_of_which_may_be_empty(length: int, num_ranks: int) -> None:
    whole = whole_of((length, 2))
    chunks = [*torch.chunk(whole, num_ranks), *[whole[:0]] * num_ranks]
    for rank in range(num_ranks):
        box = box_of(whole.shape, cut("dp", dims=(0,)), {"dp": num_ranks}, rank)
        assert part(whole, box).tolist() == chunks[rank].tolist()


def test_a_dim_that_two_axes_cut_is_cut_by_the_first_and_then_by_the_next_or_the_other_way_round() -> None:
    whole, sizes = whole_of((11,)), {"dp": 2, "tp": 3}
    for rank, (dp, tp) in enumerate(itertools.product(range(2), range(3))):
        box = box_of(whole.shape, cut("dp", "tp", dims=(0, 0)), sizes, rank)
        assert part(whole, box).tolist() == whole.chunk(2)[dp].chunk(3)[tp].tolist()
        fsdp_over_tp = cut("dp", "tp", dims=(0, 0), late=(True, False))
        assert fsdp_over_tp.split_factor(0, sizes) == 3
        box = box_of(whole.shape, fsdp_over_tp, sizes, rank)
        assert part(whole, box).tolist() == whole.chunk(3)[tp].chunk(2)[dp].tolist()


def test_a_mesh_of_all_ranks_has_them_in_order_whatever_the_axes() -> None:
    for rank in range(4):
        assert box_of((8,), Cut(ALL_RANKS, (0,), (False,)), {"dp": 2, "tp": 2}, rank) == ((2 * rank, 2 * rank + 2),)


LAYOUTS = [
    (cut("dp", dims=(0,)), {"dp": 4}, {"dp": 3}),
    (cut("dp", dims=(0,)), {"dp": 3}, {"dp": 8}),
    (cut("dp", "tp", dims=(0, 1)), {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}),
    (cut("dp", "tp", dims=(-1, 1)), {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}),
    (cut("dp", "tp", dims=(0, 0), late=(True, False)), {"dp": 2, "tp": 2}, {"dp": 3, "tp": 4}),
    (cut("tp", dims=(1,)), {"dp": 2, "tp": 3}, {"dp": 1, "tp": 5}),
    (cut("dp", dims=(-1,)), {"dp": 2}, {"dp": 1}),
]


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (0, 4), (12, 12)])
@pytest.mark.parametrize(("layout", "before", "after"), LAYOUTS)
def test_every_rank_has_its_new_part_after_the_copies(
    shape: tuple[int, int], layout: Cut, before: dict[str, int], after: dict[str, int]
) -> None:
    whole = whole_of(shape)
    held = {rank: [box_of(shape, layout, before, rank)] for rank in range(math.prod(before.values()))}
    needed = {rank: box_of(shape, layout, after, rank) for rank in range(math.prod(after.values()))}
    copies, gone = plan_copies(needed, held)
    assert not gone
    found = {rank: torch.full(shape_of(box), -1) for rank, box in needed.items()}
    for source, to, box in copies:
        (have,) = held[source]
        found[to][within(box, needed[to])] = part(whole, have)[within(box, have)]
    for rank, box in needed.items():
        assert found[rank].tolist() == part(whole, box).tolist()
    # nothing is sent that a rank has itself
    sent = sum(math.prod(shape_of(box)) for source, to, box in copies if source != to)
    assert sent <= sum(math.prod(shape_of(box)) for box in needed.values())
    assert all(source == to for source, to, _ in plan_copies(dict.fromkeys(held, held[0][0]), held)[0] if to == 0)


def test_what_nobody_holds_is_said_and_replicas_fill_the_gap_of_a_lost_rank() -> None:
    sharded = cut("dp", "tp", dims=(-1, 0))
    sizes = {"dp": 2, "tp": 2}
    assert not find_gaps((6,), sharded, sizes, (0, 1, 3))
    assert find_gaps((6,), sharded, sizes, (0, 2))
    held = {rank: [box_of((6,), sharded, sizes, rank)] for rank in (0, 2)}
    assert plan_copies({0: ((0, 6),)}, held)[1] == {0: [((3, 6),)]}


def test_replicas_share_the_work_of_giving() -> None:
    held = {rank: [((0, 4),)] for rank in range(4)}
    copies, _ = plan_copies(dict.fromkeys(range(8), ((0, 4),)), held)
    assert [source for source, to, _ in copies if to < 4] == [0, 1, 2, 3]
