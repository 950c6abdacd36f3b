"""Sums over ranks that are too large for their dtype, of numbers that are finite on each rank: they are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshbook import distribute, record
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.wire.messages import NumberFinding
from tests.zoo.bad_numbers import SETUP
from tests.zoo.test_bad_numbers import heard

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        mesh.run(SETUP)
        yield mesh


def overflow_of(mesh: Mesh) -> NumberFinding:
    """What one rank has found, and no other."""
    ((_, found),) = heard(mesh).findings
    assert found.phase == "sum over ranks"
    return found


@pytest.mark.parametrize(("dtype", "number"), [("float16", 6e4), ("bfloat16", 3e38), ("float32", 3e38)])
def test_an_all_reduce_whose_sum_is_too_large_is_named_with_its_line_by_one_rank(
    mesh: Mesh, dtype: str, number: float
) -> None:
    mesh.nan(True)
    cell = f"x = torch.full((4, 4), {number}, dtype=torch.{dtype})\ndist.all_reduce(torch.ones(1))\ndist.all_reduce(x)"
    shown = mesh.run(cell, echo=False).output
    text = overflow_of(mesh).text
    assert text in shown
    assert "all_reduce #" in text
    assert "of ranks 0-1 (sum over ranks), cell " in text
    assert f", line 3; each rank gave finite numbers, and their sum is too large for {dtype}" in text


CALLS = {
    "a part of a reduce_scatter": (
        "x = torch.ones(8); x[5] = 3e38; part = torch.empty(4); dist.reduce_scatter_tensor(part, x)",
        "reduce_scatter_tensor",
    ),
    "a list of parts": (
        "x = [torch.ones(4), torch.full((4,), 3e38)]; part = torch.empty(4); dist.reduce_scatter(part, x)",
        "reduce_scatter",
    ),
    "a reduce to rank 1": ("x = torch.full((4,), 3e38); dist.reduce(x, 1)", "reduce"),
    "a collective that is waited for later": (
        "x = torch.full((4,), 3e38); work = dist.all_reduce(x, async_op=True); work.wait()",
        "all_reduce",
    ),
    "a functional collective": (
        "import torch.distributed._functional_collectives as fc\n"
        "x = fc.all_reduce(torch.full((4,), 3e38), 'sum', dist.group.WORLD) + 1",
        "all_reduce",
    ),
    "several tensors at once": (
        "x = [torch.ones(4), torch.full((4,), 3e38)]; dist.all_reduce_coalesced(x)",
        "all_reduce_coalesced",
    ),
    "complex numbers": ("x = torch.full((4,), 3e38 + 1j); dist.all_reduce(x)", "all_reduce"),
}


@pytest.mark.parametrize("call", CALLS)
def test_any_reduction_is_looked_at(mesh: Mesh, call: str) -> None:
    run, op = CALLS[call]
    mesh.nan(True)
    mesh.run(run, echo=False)
    assert overflow_of(mesh).op == op


@pytest.mark.parametrize(
    "cell",
    [
        "x = torch.full((4,), 1e4 if rank else torch.inf); dist.all_reduce(x)",
        "x = torch.full((4,), -torch.inf if rank else 1.0); dist.all_reduce(x, dist.ReduceOp.MAX)",
        "x = torch.ones(8); x[5] = torch.nan if rank == 0 else 1; dist.reduce_scatter_tensor(torch.empty(4), x)",
        "x = torch.full((64,), 3e37); dist.all_reduce(x)",  # their sum over the elements alone is too large
        "x = torch.full((4,), 3e38); dist.all_reduce(x, dist.ReduceOp.MAX)",
    ],
)
def test_what_a_rank_gave_is_no_overflow_of_the_sum(mesh: Mesh, cell: str) -> None:
    mesh.nan(True)
    mesh.run(cell, echo=False)
    assert heard(mesh), heard(mesh).text


def test_gradients_that_ddp_sums_are_looked_at(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run(
        """
def sum_of(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
model, opt = make("ddp")
model.register_comm_hook(None, sum_of)
for step in range(4):
    opt.zero_grad()
    (model(batch(step)).mean() + model.module.head.bias.sum() * (3e38 if step == 2 else 1)).backward()
    opt.step()""",
        echo=False,
    )
    found = overflow_of(mesh)
    assert (found.step, found.op) == (2, "all_reduce")
    assert found.line.endswith(", line 2 in sum_of")


def test_gradients_that_fsdp_sums_are_looked_at(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run(
        """
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
torch.manual_seed(0)
model = Net()
for parameter in model.parameters():
    parameter.requires_grad_(parameter is model.head.bias)
for block in model.blocks:
    fully_shard(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
for part in model.modules():
    if isinstance(part, FSDPModule):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(4):
    opt.zero_grad()
    (model(torch.ones(8, 4)).sum() * (6500 if step == 2 else 1)).backward()
    opt.step()""",
        echo=False,
    )
    found = overflow_of(mesh)
    assert (found.step, found.op, found.dtype) == (2, "reduce_scatter_tensor", "float16")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_sum_of_remote_tensors_is_named_with_the_notebooks_line(mesh: Mesh, is_recorded: bool) -> None:
    def step(x: Any) -> Any:
        return x.sum(0).mean()

    run = record(step) if is_recorded else step
    mesh.nan(True)
    for number in range(6):
        rows = torch.full((2, 4), 3e38 if number == 5 else 1.0)
        run(distribute(rows, mesh, sharding_spec=["rank"])).item()
    line = step.__code__.co_firstlineno + 1
    found = overflow_of(mesh)
    assert found.op == "all_reduce"
    assert f"zoo/test_overflows.py, line {line} in step" in found.line
