"""The methods of `ProcessGroup` that are collectives: their public names, and where their tensors and options are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

# By method: the public name, and the index of the argument that best describes this rank's input. (A gather has as many
# outputs as ranks, and they add nothing to its input.) The names are from two versions of torch: 2.13 calls those with
# "single" and falls back to the others, 2.11 has only the others.
COLLECTIVES = {
    "_allgather_base": ("all_gather_into_tensor", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "barrier": ("barrier", 0),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
}

# gloo completes these on its transport threads: a wait with a timeout closes the connection when it expires.
POINT_TO_POINT = {"send", "recv", "recv_anysource"}

OPTION_TYPES = frozenset(
    (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )
)


def inputs_and_options(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], input_index: int
) -> tuple[Sequence[torch.Tensor], Any]:
    """Return the tensors that describe a rank's input, and the options of the call; None without."""
    inputs = args[input_index] if input_index < len(args) else args[0] if args else ()
    if type(inputs) is not list or not inputs or not isinstance(inputs[0], torch.Tensor):
        inputs = _collect_tensors(inputs)
    return inputs, kwargs.get("opts") if kwargs else args[-1] if args else None


def _collect_tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    found: list[torch.Tensor] = []
    if isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found.extend(_collect_tensors(item))
    return found
