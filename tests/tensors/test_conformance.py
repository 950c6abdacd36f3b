"""Every operation of the table, placed in every way, gives what plain torch gives in one process, forward and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from meshbook.controller.mesh import Mesh
from meshbook.tensors.creation import distribute
from meshbook.tensors.remote import RemoteTensor
from tests.shared import SharedMesh
from tests.tensors.operations import OPERATIONS, Operation

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("starts_meshes")]

R = Replicate()
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "whole": (R,),
    "shard 0": (Shard(0),),
    "shard 1": (Shard(1),),
    "shard 0 x whole": (Shard(0), R),
    "shard 0 x shard 1": (Shard(0), Shard(1)),
}


def operands(operation: Operation) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operands that are cut, and those that are whole."""
    torch.manual_seed(3)

    def make(shape: tuple[int, ...], kind: str) -> torch.Tensor:
        if kind == "index":
            return torch.randint(0, 4, shape)
        return torch.rand(shape) + 0.5 if kind == "positive" else torch.randn(shape)

    data = [make(shape, operation.kind) for shape in operation.data]
    whole = [make(shape, "normal") for shape in operation.replicated]
    return data, whole


def fitting(layout: tuple[Any, ...], tensor: torch.Tensor) -> tuple[Any, ...]:
    """The layout as far as the tensor has its dims, and more than one row in them."""
    return tuple(
        place if place == R or (place.dim < tensor.dim() and tensor.shape[place.dim] > 1) else R for place in layout
    )


def run(operation: Operation, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients."""
    if operation.grads:
        for tensor in given:
            if tensor.is_floating_point():
                tensor.requires_grad_()
    results = operation.run(*given)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    if not operation.grads:
        return results, []
    sum(result.square().sum() for result in results).backward()
    return [result.detach() for result in results], [tensor.grad for tensor in given if tensor.is_floating_point()]


def check(operation: Operation, layout: tuple[Any, ...], mesh: Mesh) -> None:
    data, whole = operands(operation)
    wanted, wanted_grads = run(operation, [tensor.clone() for tensor in (*data, *whole)])
    placed = [distribute(tensor, mesh, fitting(layout, tensor)) for tensor in data]
    placed += [distribute(tensor, mesh) for tensor in whole]
    results, grads = run(operation, placed)
    assert len(results) == len(wanted)
    for result, plain in zip(results, wanted, strict=True):
        assert isinstance(result, RemoteTensor)
        compare(result.full_tensor(), plain, exact=operation.exact)
    for grad, plain in zip(grads, wanted_grads, strict=True):
        compare(grad.full_tensor(), plain, exact=operation.exact)


def compare(found: torch.Tensor, plain: torch.Tensor, *, exact: bool) -> None:
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    if exact:
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
    else:
        torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def meshes(shared2: SharedMesh, shared22: SharedMesh) -> dict[int, Mesh]:
    return {1: shared2.get(), 2: shared22.get()}


@pytest.mark.timeout(400)  # hundreds of operations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_give_what_plain_torch_gives(layout: str, meshes: dict[int, Mesh]) -> None:
    places = LAYOUTS[layout]
    wrong = []
    for name, operation in OPERATIONS.items():
        try:
            check(operation, places, meshes[len(places)])
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
    assert not wrong, "\n" + "\n".join(wrong)
