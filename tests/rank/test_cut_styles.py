"""Layers that are cut: with plain tensors they compute the same, and a Stop meanwhile leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from meshbook.rank.tensors.cut_styles import COLWISE, CONV1D_PACKED, STYLES, plain_layers


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Packed(nn.Module):
    """As transformers' Conv1D of q, k and v is; interrupted the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.zeros(6))
        self.is_stopped = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(self.weight, DTensor)
        if self.is_stopped:
            raise KeyboardInterrupt
        return torch.addmm(self.bias, x, self.weight)


def test_a_stop_while_a_layer_sees_its_part_leaves_its_parameters(mesh: DeviceMesh) -> None:
    layer = parallelize_module(Packed(), mesh, STYLES[CONV1D_PACKED].make(nn.Module()), src_data_rank=None)
    before = dict(layer.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        layer(torch.ones(1, 2))
    assert dict(layer.named_parameters()) == before
    assert all(isinstance(parameter, DTensor) for parameter in before.values())
    layer.is_stopped = False
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


def test_a_stop_while_linears_compute_with_plain_tensors_gives_them_their_hooks_back(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    parallelize_module(module[0], mesh, STYLES[COLWISE].make(module), src_data_rank=None)
    expected = module(torch.ones(1, 2))
    with torch.no_grad(), plain_layers(module, {"0": COLWISE}, mesh):
        assert not module[0]._forward_hooks
        torch.testing.assert_close(module(torch.ones(1, 2)), expected)
    stopped = plain_layers(module, {"0": COLWISE}, mesh)
    stopped.__enter__()
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(module[0]._forward_hooks) == 1
    assert torch.equal(module(torch.ones(1, 2)), expected)
