"""`meshbook.recover`: restores a model and its optimizer after a fault or an interrupt, as far as possible.

Queries the ranks, compares replicas by their hashes, and copies a complete one over those that differ. A sharded tensor
has no replica: it is reported instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshbook.controller.tables import format_some
from meshbook.errors import UsageError
from meshbook.rank.tensors.operators import MESH, TENSOR
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.faults import MISSING, TensorFault
from meshbook.tensors.remote import RemoteTensor


@dataclass(frozen=True)
class Recovery:
    """The result of `meshbook.recover`, by the tensors' names.

    Attributes:
        whole: intact on every rank.
        restored: replicas differed, or one was missing, and all now equal that of the given rank.
        half_written: changed on some ranks and not on others, or partly, with no replica to restore from. They can be
            used, but hold values of two steps: load them from a checkpoint.
        dropped: gradients, and state of an optimizer, that were never computed; the next step makes them again.
        lost: parameters and tensors that were never computed, or of which a lost rank had a part.
    """

    whole: tuple[str, ...] = ()
    restored: tuple[tuple[str, int], ...] = ()
    half_written: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing needs to be loaded from a checkpoint."""
        return not self.half_written and not self.lost

    def __repr__(self) -> str:
        lines = [f"{len(self.whole)} tensors whole"]
        for rank in sorted({rank for _, rank in self.restored}):
            lines.append(
                f"restored from rank {rank}: {format_some([name for name, at in self.restored if at == rank], 6)}"
            )
        if self.half_written:
            lines.append(f"half written, load from a checkpoint: {format_some(self.half_written, 6)}")
        if self.dropped:
            lines.append(f"dropped, made anew by the next step: {format_some(self.dropped, 6)}")
        if self.lost:
            lines.append(f"never computed, or lost with a rank, make or load them anew: {format_some(self.lost, 6)}")
        return "Recovery: " + "\n  ".join(lines)


def recover(*things: nn.Module | Optimizer | RemoteTensor) -> Recovery:
    """Restore models, optimizers and tensors after a fault or an interrupt, and report their state. Blocks.

    Replicas that differ between ranks are made equal to those of one rank, if possible one that has completed all
    operations in flight. Faults are cleared, because the user knows them now. Undamaged tensors are not changed.

    Args:
        things: models, optimizers and tensors to inspect: `meshbook.recover(model, optimizer)`.

    Raises:
        UsageError: there is no remote tensor among them.
        RankLost, CellInterrupted: as for a cell.
    """
    named = _tensors_by_name(things)
    if not named:
        raise UsageError("meshbook.recover(model, optimizer) looks at remote tensors, and there is none among these")
    found: dict[str, list[Any]] = {"whole": [], "restored": [], "half_written": [], "lost": []}
    engines = {id(tensor.engine): tensor.engine for tensor in named.values()}.values()
    for engine in engines:
        engine.faults.resync()  # also drops what can be computed again
    remaining = _tensors_by_name(things)
    for engine in engines:
        _Inspection(engine, {name: tensor for name, tensor in remaining.items() if tensor.engine is engine}).repair(
            found
        )
    dropped = tuple(name for name in named if name not in remaining)
    return Recovery(**{kind: tuple(names) for kind, names in found.items()}, dropped=dropped)


def _tensors_by_name(things: Any) -> dict[str, RemoteTensor]:
    """Return the remote tensors by name, each once."""
    found: dict[str, RemoteTensor] = {}
    seen: set[int] = set()

    def add(name: str, tensor: Any) -> None:
        if isinstance(tensor, RemoteTensor) and tensor._handle.id not in seen:
            seen.add(tensor._handle.id)
            found[name if name not in found else f"{name} ({len(found)})"] = tensor

    names: dict[int, str] = {}
    for thing in things:
        if isinstance(thing, nn.Module):
            for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                names[id(tensor)] = name
                add(name, tensor)
        elif not isinstance(thing, (Optimizer, torch.Tensor)):
            raise UsageError(f"recover takes modules, optimizers and remote tensors, not a {type(thing).__name__}")
    for thing in things:
        if isinstance(thing, torch.Tensor):
            add(f"tensor {tuple(thing.shape)}", thing)
        if isinstance(thing, Optimizer):
            for number, parameter in enumerate(p for group in thing.param_groups for p in group["params"]):
                name = names.setdefault(id(parameter), f"parameter {number}")
                add(name, parameter)
                add(f"gradient of {name}", parameter.grad)
                for key, value in thing.state.get(parameter, {}).items():
                    add(f"{key} of {name}", value)
    return found


class _Inspection:
    """The state of one engine's tensors on its ranks."""

    def __init__(self, engine: TensorEngine, tensors: dict[str, RemoteTensor]) -> None:
        self.engine, self.tensors = engine, tensors
        ids = [tensor._handle.id for tensor in tensors.values()]
        states = engine.faults.fetch_state(ids)
        self.hashes = {id: {rank: states[rank]["hashes"][at] for rank in engine.ranks} for at, id in enumerate(ids)}
        self.faults = engine.faults.of(ids)

    def repair(self, found: dict[str, list[Any]]) -> None:
        source = self._choose_source()
        ids_to_clear: list[int] = []
        to_copy: list[RemoteTensor] = []
        for name, tensor in self.tensors.items():
            id = tensor._handle.id
            fault = self.faults.get(id)
            if not all(self.hashes[id].values()) or (fault is not None and fault.fault.ename == MISSING):
                found["lost"].append(name)
                continue
            if fault is not None:
                ids_to_clear.append(id)
            if self._has_unlike_replicas(tensor):
                to_copy.append(tensor)
                found["restored"].append((name, source))
            elif fault is not None and self._is_half_written(tensor, fault):
                found["half_written"].append(name)
            else:
                found["whole"].append(name)
        self.engine.faults.clear(ids_to_clear)
        for tensor in to_copy:
            self._broadcast_from(tensor, source)

    def _choose_source(self) -> int:
        """Return the rank to copy from: one that completed all operations in flight, or else one that ran none."""

        def damage(rank: int) -> tuple[int, int, int]:
            known = self.faults.values()
            num_skipped = sum(fault.skipped_writes.get(rank, 0) for fault in known)
            num_partial = sum(fault.write_started and rank in fault.skipped_writes for fault in known)
            return num_partial, num_skipped, rank

        return min(self.engine.ranks, key=damage)

    def _replica_groups(self, tensor: RemoteTensor) -> Iterator[list[int]]:
        """Yield the groups of ranks that have the same shard of a tensor."""
        placements, axes = tensor.placements, self.engine.axes
        if placements is None:
            return
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in self.engine.ranks:
            point = axes.point(rank)
            coordinates = tuple(
                point[name]
                for name, placement in zip(axes.names, placements, strict=True)
                if not placement.is_replicate()
            )
            groups.setdefault(coordinates, []).append(rank)
        yield from groups.values()

    def _has_unlike_replicas(self, tensor: RemoteTensor) -> bool:
        hashes = self.hashes[tensor._handle.id]
        return any(len({hashes[rank] for rank in group}) > 1 for group in self._replica_groups(tensor))

    def _is_half_written(self, tensor: RemoteTensor, fault: TensorFault) -> bool:
        """Whether shards are of two steps, or one shard may be."""
        if fault.write_started:
            return True
        is_replicated = any(len(group) == len(self.engine.ranks) for group in self._replica_groups(tensor))
        return not is_replicated and len({fault.skipped_writes.get(rank, 0) for rank in self.engine.ranks}) > 1

    def _broadcast_from(self, tensor: RemoteTensor, source: int) -> None:
        engine, axes = self.engine, self.engine.axes
        point = axes.point(source)
        for axis, (name, placement) in enumerate(zip(axes.names, tensor.placements or (), strict=True)):
            if not placement.is_replicate() or axes.shape[axis] == 1:
                continue
            template = engine.templates.find_or_plan(
                ("broadcast_from", axis, point[name]),
                engine.planner.plan_rank_function,
                "broadcast_from",
                (TENSOR, MESH, axis, point[name]),
                mutates=(0,),
                communicates=True,
                overwrites=True,
            )
            engine.emit([template.number, tensor._handle.id], capture_call_site())
