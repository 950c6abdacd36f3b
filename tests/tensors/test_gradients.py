"""Gradients through the ways between placements and views, and gradients of gradients, are those of plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.tensors.remote import RemoteTensor

pytestmark = pytest.mark.usefixtures("starts_meshes")

WAYS = [[Shard(0)], [Shard(1)], [Replicate()]]


@pytest.fixture(autouse=True)
def alike() -> Iterator[None]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        yield


def local(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, RemoteTensor) else tensor.detach()
    return whole


def same(there: Any, here: torch.Tensor) -> None:
    torch.testing.assert_close(local(there), local(here), rtol=1e-5, atol=1e-5)


def penalties(value: Callable[[Any], Any], x: Any) -> list[Any]:
    """The gradient, that of a penalty on it, and the gradient of that."""
    (first,) = torch.autograd.grad(value(x) + (x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad((second**2).sum(), x)
    return [first, second, third]


def total(tensor: Any) -> Any:
    """A number of all ranks, of their own numbers."""
    return tensor.as_global([Partial()]).redistribute([Replicate()])


# What is computed there, and what that is in one process, of a tensor that two ranks have.
THROUGH: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "redistribute": (lambda x: (x.redistribute([Replicate()]) ** 3).sum(), lambda x, parts: (x**3).sum()),
    "redistribute, cut": (lambda x: (x.redistribute([Shard(1)]) ** 3).sum(), lambda x, parts: (x**3).sum()),
    "a sum in parts": (
        lambda x: (x.sum(0).redistribute([Replicate()]) ** 3).sum(),
        lambda x, parts: (x.sum(0) ** 3).sum(),
    ),
    "there and back": (
        lambda x: (x.as_local().as_global(x.placements) ** 3).sum(),
        lambda x, parts: (x**3).sum(),
    ),
    "each rank's own": (
        lambda x: total((x.as_local() ** 3).sum()),
        lambda x, parts: sum((part**3).sum() for part in parts(x)),
    ),
    "reduced": (
        lambda x: total((x.as_local().reduce("dp", "sum") ** 3).sum()),
        lambda x, parts: 2 * (sum(parts(x)) ** 3).sum(),
    ),
    "averaged": (
        lambda x: total((x.as_local().reduce("dp", "avg") ** 3).sum()),
        lambda x, parts: 2 * ((sum(parts(x)) / 2) ** 3).sum(),
    ),
    "of one rank": (
        lambda x: total((x.as_local().slice_mesh(dp=1) ** 3).sum()),
        lambda x, parts: 2 * (parts(x)[1] ** 3).sum(),
    ),
    "parts of a sum": (
        lambda x: ((x.as_local() ** 2).as_global([Partial()]).redistribute([Replicate()]) ** 2).sum(),
        lambda x, parts: (sum(part**2 for part in parts(x)) ** 2).sum(),
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", THROUGH)
def test_penalties_on_gradients_through_other_placements_and_views_are_torchs(mesh2: Mesh, name: str, way: Any) -> None:
    there, here = THROUGH[name]
    x = torch.randn(4, 4)

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        place = way[0]
        return [tensor, tensor] if place.is_replicate() else list(tensor.chunk(2, place.dim))

    found = penalties(there, meshbook.distribute(x, mesh2, way).requires_grad_())
    for mine, reference in zip(found, penalties(lambda x: here(x, parts), x.clone().requires_grad_()), strict=True):
        same(mine, reference)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gradient_that_was_brought_to_its_parameter_may_be_differentiated_again(mesh2: Mesh, way: Any) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def run(x: Any, w: Any) -> list[Any]:
        for _ in range(2):  # the second is added to the first
            (x @ w).tanh().square().sum().backward(create_graph=True)
        first = w.grad
        w.grad = None
        first.square().sum().backward()
        return [first, w.grad]

    here = run(x, w.clone().requires_grad_())
    there = run(meshbook.distribute(x, mesh2, [Shard(0)]), meshbook.distribute(w, mesh2, way).requires_grad_())
    assert there[0].placements == tuple(way)
    for mine, reference in zip(there, here, strict=True):
        same(mine, reference)


def test_a_model_trains_under_a_penalty_on_its_gradients_as_in_one_process(mesh2: Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

    def train(model: nn.Module, x: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(3):
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            by_weight = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
            loss = out.mean() + slope.square().sum(1).mean() + sum(grad.square().sum() for grad in by_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    x = torch.randn(6, 4)
    here = train(copy.deepcopy(model), x.clone().requires_grad_())
    there = train(meshbook.module_to_mesh(model, mesh2), meshbook.distribute(x, mesh2, [Shard(0)]).requires_grad_())
    for mine, reference in zip(there, here, strict=True):
        same(mine, reference)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_through_a_module_on_the_ranks_gradients_of_gradients_are_refused_and_gradients_are_right(
    mesh2: Mesh, strategy: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    there = meshbook.distribute(copy.deepcopy(model), mesh2, strategy=strategy)
    given = meshbook.distribute(x, mesh2, [Shard(0)]).requires_grad_()

    def slope() -> Any:
        (grad,) = torch.autograd.grad(there(given).sum() + (given**2).sum(), given, create_graph=True)
        return grad

    mine = x.clone().requires_grad_()
    (reference,) = torch.autograd.grad(model(mine).sum() + (mine**2).sum(), mine)
    same(slope(), reference)
    with pytest.raises(NotImplementedError, match="module_to_mesh"):
        torch.autograd.grad(slope().square().sum(), given)
    with pytest.raises(NotImplementedError, match="module_to_mesh"):
        slope().square().sum().backward()
    there(given).sum().backward(create_graph=True)  # not differentiated again, so it is as without
    weight = next(iter(there.parameters())).grad
    model(x).sum().backward()
    same(weight, next(iter(model.parameters())).grad)  # type: ignore[arg-type]
