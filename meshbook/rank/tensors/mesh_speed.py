"""How fast this mesh is: collectives over each axis, matrix products, memory; all ranks measure at the same time."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from meshbook import clock

# Bytes of the tensors that collectives are timed with: what is small costs a latency, what is large a bandwidth.
SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
_REPEATS = 4
_MATRIX = 512
_COPIED_BYTES = 1 << 24
# Of the free memory, what estimates may fill. A process on a CPU used 1.38 times an estimate of 1.2 GiB, as its largest
# resident size showed: estimates leave out what operations need while they run, and the allocator's gaps.
_USABLE = 0.7


@dataclass(frozen=True)
class MeshSpeed:
    """What one rank measured.

    Attributes:
        collectives: seconds by axis, kind ("all_reduce", "all_gather", "reduce_scatter") and size of the whole tensor,
            as in SIZES.
        cut_layer_s: by axis, what forward and backward of a small layer take longer when it is cut (its hooks, and a
            collective).
        sharded_unit_s: the same when FSDP2 shards it.
        flops_per_s: of matrix products in float32.
        bytes_per_s: of memory that is read and written.
        device: what it has measured: "cpu" or "cuda".
        free_bytes: memory that this rank may still use: of its GPU, or its share of the machine's.
    """

    collectives: dict[str, dict[str, list[float]]]
    cut_layer_s: dict[str, float]
    sharded_unit_s: dict[str, float]
    flops_per_s: float
    bytes_per_s: float
    device: str
    free_bytes: int

    def extra_seconds_of(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return how much longer a collective takes than one of few bytes."""
        return max(0.0, self.seconds_of(axis, kind, num_bytes) - self.collectives[axis][kind][0])

    def seconds_of(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return how long a collective takes: on the line through the two sizes nearest to it."""
        times = self.collectives[axis][kind]
        at = next((index for index, size in enumerate(SIZES[1:-1], 1) if num_bytes <= size), len(SIZES) - 1)
        low, high = SIZES[at - 1], SIZES[at]
        slope = max(times[at] - times[at - 1], 0.0) / (high - low)
        return max(times[at - 1] + (num_bytes - low) * slope, min(times))


def measure_speed(mesh: Any) -> MeshSpeed:
    """Measure. Every rank of the mesh calls this at the same time; it takes a second or two."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for collectives than 2.11
        return _measure(mesh)


def _measure(mesh: Any) -> MeshSpeed:
    device = torch.device(mesh.device_type)
    collectives, cut_layer_s, sharded_unit_s = {}, {}, {}
    for axis in mesh.mesh_dim_names:
        collectives[axis] = _time_collectives(mesh, axis, device)
        plain = _step_seconds(nn.Linear(8, 8, device=device), device)
        cut = parallelize_module(nn.Linear(8 * mesh[axis].size(), 8, device=device), mesh[axis], RowwiseParallel())
        cut_layer_s[axis] = max(0.0, _step_seconds(cut, device) - plain)
        sharded_unit_s[axis] = max(0.0, _step_seconds(_sharded_layer(mesh[axis], device), device) - plain)
    matrix = torch.rand(_MATRIX, _MATRIX, device=device)
    product = _seconds(lambda: matrix @ matrix, device)
    numbers = torch.zeros(_COPIED_BYTES // 4, device=device)
    update = _seconds(lambda: numbers.add_(1.0), device)
    flops_per_s, bytes_per_s = 2 * _MATRIX**3 / product, 2 * _COPIED_BYTES / update
    return MeshSpeed(
        collectives, cut_layer_s, sharded_unit_s, flops_per_s, bytes_per_s, device.type, free_bytes(device)
    )


def _sharded_layer(mesh: Any, device: torch.device) -> nn.Module:
    layer = nn.Linear(8, 8, device=device)
    fully_shard(layer, mesh=mesh)
    return layer


def _step_seconds(layer: nn.Module, device: torch.device) -> float:
    """Return how long forward and backward of a layer with 8 inputs on this rank take."""
    rows = torch.zeros(1, 8, device=device)
    return _seconds(lambda: layer(rows).sum().backward(), device)


def _time_collectives(mesh: Any, axis: str, device: torch.device) -> dict[str, list[float]]:
    group, size = mesh.get_group(axis), mesh[axis].size()
    found: dict[str, list[float]] = {"all_reduce": [], "all_gather": [], "reduce_scatter": []}
    for num_bytes in SIZES:
        whole = torch.zeros(math.ceil(num_bytes / 4 / size) * size, device=device)
        part = torch.zeros(whole.numel() // size, device=device)
        found["all_reduce"].append(_seconds(partial(dist.all_reduce, whole, group=group), device))
        found["all_gather"].append(_seconds(partial(dist.all_gather_into_tensor, whole, part, group=group), device))
        found["reduce_scatter"].append(_seconds(partial(dist.reduce_scatter_tensor, part, whole, group=group), device))
    return found


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS):
        began = clock.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock.perf_counter() - began)
    return min(times[1:])  # the first one sets up connections and buffers


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info()[0])
    else:
        free = int(psutil.virtual_memory().available) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(free * _USABLE)
