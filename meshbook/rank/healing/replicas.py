"""Which ranks hold the same as this one because of what a value is: DDP models, DTensors, and their optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.ids import Ranks
from meshbook.rank.process_groups.watched_group import WatchedGroup


class Replicas:
    """What is known from the models that there are.

    Args:
        values: in which DDP models are looked for.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._by_parameter: dict[int, Ranks] = {}
        for value in values:
            with contextlib.suppress(Exception):  # of a user's own code: then nothing is known of this one
                self._add_models(value)

    def _add_models(self, value: Any) -> None:
        for module in value.modules() if isinstance(value, torch.nn.Module) else ():
            if isinstance(module, DistributedDataParallel) and isinstance(module.process_group, WatchedGroup):
                ranks = module.process_group.label.ranks
                for name, parameter in module.module.named_parameters():
                    if name not in module.parameters_to_ignore:
                        self._by_parameter[id(parameter)] = ranks

    def of(self, value: Any) -> Ranks:
        """Return the ranks that hold the same, this one among them; (): that is not known."""
        if isinstance(value, DTensor):
            return _ranks_of_part(value)
        tensors = parameters_of(value)
        if not tensors:
            return ()
        found = [
            _ranks_of_part(one) if isinstance(one, DTensor) else self._by_parameter.get(id(one), ()) for one in tensors
        ]
        return tuple(sorted(set(found[0]).intersection(*found)))


def parameters_of(value: Any) -> Sequence[torch.Tensor]:
    """Return the parameters of a module, of an optimizer, or of the optimizer that a scheduler sets the rate of."""
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    optimizer = value.optimizer if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else value
    if isinstance(optimizer, torch.optim.Optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return ()


def _ranks_of_part(tensor: DTensor) -> Ranks:
    """Return the ranks that hold the same part of a DTensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    point = mesh.get_coordinate()
    if point is None or any(placement.is_partial() for placement in placements):
        return ()
    place = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(placements, point, strict=True)
    )
    return tuple(sorted(mesh.mesh[place].reshape(-1).tolist()))
