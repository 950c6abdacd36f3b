"""What a plan would cost, memory of a rank and seconds of a step, from what ranks have counted and measured.

The optimizer is taken to be AdamW, with two numbers for each parameter, and the loss to make two copies of the outputs,
as cross entropy does. On a CPU collectives and computation take turns; on GPUs gradients travel while backward
computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshbook.rank.tensors.footprints import Footprint
from meshbook.rank.tensors.mesh_speed import MeshSpeed
from meshbook.rank.tensors.strategies import PRECISIONS, Plan, plan_named

# How often AdamW reads or writes each parameter, gradient or state: its operations one by one.
_ADAMW_PASSES = 20
_DDP_BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default


@dataclass
class Estimate:
    """What one plan costs on each rank.

    Attributes:
        memory: bytes by what takes them.
        seconds: of a step, by what takes them.
        error: why the plan cannot be; then there is nothing else.
        measured_s: seconds of a step that was run.
    """

    plan: Plan
    memory: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    measured_s: float | None = None

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values()) if self.measured_s is None else self.measured_s


def list_candidates(axes: Mapping[str, int], precision: str | None, *, has_blocks: bool) -> list[Plan]:
    """Return the plans to be compared on a mesh with these axes: one or two of them are used."""
    if len(axes) == 1:
        names = ["ddp", "fsdp", "tp"]
    elif len(axes) == 2:
        names = ["hsdp", *(["fsdp+tp"] if "tp" in axes else [])]
    else:
        names = ["fsdp+tp"] if {"dp", "tp"} <= set(axes) else []
    plans = [replace(plan_named(name, axes, None), precision=precision) for name in names]
    return plans + [replace(plan, ac="every block") for plan in plans if has_blocks]


def estimate_plan(
    plan: Plan, axes: Mapping[str, int], footprint: Footprint, speeds: list[MeshSpeed], *, overlaps: bool
) -> Estimate:
    """Return what a plan costs.

    Args:
        footprint: of this plan's rows and parts of layers.
        speeds: of every rank; the slowest one counts.
        overlaps: whether gradients travel while backward computes.
    """
    shards = axes[plan.fsdp] if plan.fsdp is not None else 1
    width = 0.5 if PRECISIONS[plan.precision] in ("bfloat16", "float16") else 1.0
    activations, more_flops = _checkpointed(plan, footprint)
    gradients = footprint.trainable_bytes / shards
    working = 0.0
    if plan.fsdp is not None:
        largest = max((block.parameter_bytes for block in footprint.blocks), default=0)
        # The root stays gathered, one block computes while the next is gathered, and one block's gradients are whole.
        working = _root_bytes(footprint) * width + 2 * largest * width + largest
    elif plan.ddp is not None:
        working = footprint.trainable_bytes  # buckets
    memory = {
        "parameters": footprint.parameter_bytes / shards + footprint.buffer_bytes,
        "optimizer": 2 * gradients,
        "gathered or in buckets": working,
        # What is saved for backward is let go of while gradients come to be.
        "activations or gradients": max(activations + 2 * footprint.output_bytes, gradients),
    }
    compute = footprint.flops * more_flops / min(speed.flops_per_s for speed in speeds)
    data = _data_seconds(plan, footprint, speeds, shards, width)
    if overlaps:
        data = {name: max(0.0, seconds - compute * 2 / 3) for name, seconds in data.items()}
    seconds = {
        "compute": compute,
        "optimizer": _ADAMW_PASSES * gradients / min(speed.bytes_per_s for speed in speeds),
        **data,
    }
    if plan.tp is not None:
        seconds[f"all_reduce of activations over {plan.tp}"] = sum(
            max(speed.cut_layer_s[plan.tp] + speed.extra_seconds_of(plan.tp, "all_reduce", size) for speed in speeds)
            for size in footprint.reduced_bytes
        )
    return Estimate(plan, memory, seconds)


def _checkpointed(plan: Plan, footprint: Footprint) -> tuple[float, float]:
    """Return the bytes of activations, and by how much computing blocks again multiplies the operations."""
    interval = plan.checkpoint_interval
    if interval is None or not footprint.blocks:
        return footprint.activation_bytes, 1.0
    again = footprint.blocks[interval - 1 :: interval]
    saved = sum(block.activation_bytes - block.input_bytes for block in again)
    share = sum(block.parameter_bytes for block in again) / max(footprint.parameter_bytes, 1)
    return footprint.activation_bytes - saved + max(block.activation_bytes for block in again), 1.0 + share / 3


def _root_bytes(footprint: Footprint) -> int:
    return footprint.parameter_bytes - sum(block.parameter_bytes for block in footprint.blocks)


def _data_seconds(
    plan: Plan, footprint: Footprint, speeds: list[MeshSpeed], shards: int, width: float
) -> dict[str, float]:
    """Return the seconds of collectives of parameters and gradients, by name."""
    if plan.fsdp is None:
        if plan.ddp is None:
            return {}
        count = math.ceil(footprint.trainable_bytes / _DDP_BUCKET_BYTES) or 1
        seconds = count * _slowest(speeds, plan.ddp, "all_reduce", footprint.trainable_bytes / count)
        return {f"all_reduce of gradients over {plan.ddp}": seconds}
    gathered = reduced = averaged = 0.0
    units = [(block.parameter_bytes, 2) for block in footprint.blocks]  # gathered again in backward
    for size, times in (*units, (_root_bytes(footprint), 1)):
        gathered += max(speed.sharded_unit_s[plan.fsdp] for speed in speeds)
        gathered += times * max(speed.extra_seconds_of(plan.fsdp, "all_gather", size * width) for speed in speeds)
        reduced += max(speed.extra_seconds_of(plan.fsdp, "reduce_scatter", size) for speed in speeds)
        if plan.ddp is not None:
            averaged += _slowest(speeds, plan.ddp, "all_reduce", size / shards)
    found = {f"all_gather over {plan.fsdp}": gathered, f"reduce_scatter over {plan.fsdp}": reduced}
    return found | ({f"all_reduce of gradients over {plan.ddp}": averaged} if plan.ddp is not None else {})


def _slowest(speeds: list[MeshSpeed], axis: str, kind: str, num_bytes: float) -> float:
    return max(speed.seconds_of(axis, kind, num_bytes) for speed in speeds)
