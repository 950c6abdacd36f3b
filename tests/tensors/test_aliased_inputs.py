"""A recorded step gives what it gives unrecorded, whatever its inputs share, and whatever those before it shared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh

pytestmark = pytest.mark.usefixtures("starts_meshes")

SHAPE = (4, 4)

# Pairs of inputs: what they share, and how they are placed, is another thing in each call.
PAIRS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "two tensors": lambda x, other: (x, other),
    "one tensor": lambda x, other: (x, x),
    "a detached one": lambda x, other: (x, x.detach()),
    "a view of it": lambda x, other: (x, x.view(SHAPE)),
    "its transpose": lambda x, other: (x, x.t()),
    "a part of it": lambda x, other: (x[:, 1], x),
    "two parts": lambda x, other: (x[:, :2], x[:, 1:3]),
    "two equal parts": lambda x, other: (x[:, 1:3], x[:, 1:3]),
    "each rank's own piece": lambda x, other: (x, x.as_local()),
    "the piece of another": lambda x, other: (x, other.as_local()),
    "its piece, and that again": lambda x, other: (x.as_local(), x.as_local()),
    "the piece, seen as one": lambda x, other: (x, x.as_local().as_global(x.placements)),
    "a piece twice": lambda x, other: (x.as_local(), x.as_local().t().t()),
}


def one_after_the_other(a: Any, b: Any) -> list[Any]:
    return [a * 2.0, b * 3.0]


def changed_by_each_other(a: Any, b: Any) -> list[Any]:
    before = a * 1.0
    b.add_(1.0)
    after = a * 1.0
    a.mul_(2.0)
    return [before, after, b * 1.0]


def reduced(a: Any, b: Any) -> list[Any]:
    found = []
    for tensor in (a, b):
        total = tensor.sum(0)
        if total.placements is not None:
            found.append(total.redistribute([Replicate()]))
        tensor.mul_(0.5)
        found.append(total + 0.0)
    return found


def given_back(a: Any, b: Any) -> list[Any]:
    view = a[:1]
    view.add_(1.0)
    return [view, b * 1.0]


STEPS = (one_after_the_other, changed_by_each_other, reduced, given_back)


def numbers(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().clone()


def play(mesh: Mesh, step: Callable[..., Any], name: str, seed: int, placements: Any) -> list[torch.Tensor]:
    """What a call gave, and what it left in the tensors that it was given."""
    torch.manual_seed(seed)
    x, other = (meshbook.distribute(torch.randn(SHAPE), mesh, placements) for _ in range(2))
    given = PAIRS[name](x, other)
    return [numbers(tensor) for tensor in (*step(*given), *given, x, other)]


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()]], ids=["pieces", "copies"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_recorded_step_follows_what_its_inputs_share_in_this_call(mesh2: Mesh, step: Any, placements: Any) -> None:
    choose = random.Random(5)
    names = list(PAIRS)
    sequence = [*(name for name in names for _ in range(3)), *choose.choices(names, k=40)]
    recorded = meshbook.record(step)
    # Two sets of numbers, by turns: those of the call before would be wrong.
    wanted = {(name, seed): play(mesh2, step, name, seed, placements) for name in names for seed in (0, 1)}
    for index, name in enumerate(sequence):
        found = play(mesh2, recorded, name, index % 2, placements)
        for one, other in zip(found, wanted[name, index % 2], strict=True):
            assert torch.equal(one, other), (index, sequence)
    assert recorded.stats().replayed > 20


def test_a_step_recorded_with_a_tensor_and_its_own_piece_is_right_for_two_that_are_apart(mesh2: Mesh) -> None:
    @meshbook.record
    def step(a: Any, b: Any) -> Any:
        return a * 2.0, b * 3.0

    x = meshbook.distribute(torch.arange(4.0), mesh2, [Shard(0)])
    for _ in range(4):
        step(x, x.as_local())
    other = meshbook.distribute(torch.full((4,), 100.0), mesh2, [Shard(0)])
    doubled, tripled = step(x, other.as_local())
    assert step.stats().replayed == 3
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert tripled.local(0).tolist() == [300.0, 300.0]
