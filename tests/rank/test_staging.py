"""Staged copies of a rank's state: bit for bit, whatever the tensor is like, in buffers that are used again."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from meshbook.rank.checkpoints.planning import _Planner
from meshbook.rank.checkpoints.staging import StagedState, StagingBuffers

ROWS = 1 << 10  # of as many numbers: above what is copied by memcpy
TENSORS = {
    "float32": lambda: torch.randn(ROWS, ROWS),
    "bfloat16": lambda: torch.randn(ROWS, ROWS).bfloat16(),
    "bool": lambda: torch.randn(2 * ROWS, ROWS) > 0,
    "complex": lambda: torch.randn(ROWS, ROWS, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(ROWS, ROWS, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(ROWS, ROWS, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.randn(ROWS, 2 * ROWS).T,
    "channels last": lambda: torch.randn(4, 8, 256, 256).to(memory_format=torch.channels_last),
    "part of another": lambda: torch.randn(4 * ROWS, ROWS)[7 : 3 * ROWS],
    "expanded": lambda: torch.randn(1, ROWS).expand(ROWS, ROWS),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(ROWS, ROWS)),
    "small": lambda: torch.randn(3),
    "a scalar": lambda: torch.tensor(7.0),
    "empty": lambda: torch.empty(0, ROWS),
}


def stage(buffers: StagingBuffers, tensor: torch.Tensor) -> StagedState:
    with torch.no_grad():
        return buffers.stage(plan_of(tensor), {"x": tensor}, {})


def plan_of(tensor: torch.Tensor) -> SavePlan:
    return _Planner({("x",): tensor}).create_local_plan()


@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_staged_is_the_tensor_and_stays_so(kind: str) -> None:
    tensor, buffers = TENSORS[kind](), StagingBuffers()
    wanted = tensor.detach().clone()
    (item,) = plan_of(tensor).items
    first = stage(buffers, tensor).resolve_data(item)
    with torch.no_grad():
        (tensor if kind != "expanded" else tensor[:1]).zero_()
    assert torch.equal(first, wanted)
    assert stage(buffers, wanted).resolve_data(item).data_ptr() == first.data_ptr()


def test_a_tensor_that_was_staged_can_still_be_resized() -> None:
    tensor = torch.randn(ROWS, ROWS)
    stage(StagingBuffers(), tensor)
    tensor.untyped_storage().resize_(0)
