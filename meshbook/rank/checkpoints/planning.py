"""Which rank writes what of a save: DCP's plan, over what the ranks hold under the saved names.

Tensors of modules that all ranks hold alike are written once, by the rank that has least to write. What differs between
ranks is written by each of them: under its own key by the lowest rank that has it, and under `<key>@rank<r>` by others.

A plan depends on the structure of what is saved and on which values differ between ranks, not on the values. It is used
again for as long as both are the same on all ranks: training waits for planning, and a loop saves the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from meshbook.errors import CheckpointError, message_of
from meshbook.ids import name_ranks
from meshbook.rank.checkpoints.exchange import Exchange, attempt
from meshbook.rank.checkpoints.fingerprints import fingerprint_tensor, fingerprint_value, serialize
from meshbook.rank.checkpoints.named_state import NamedState, Path, key_of
from meshbook.wire.messages import SavedName


class Summary(NamedTuple):
    """What the other ranks need to know of one rank's state."""

    kinds: dict[str, str]  # by name
    fingerprints: dict[Path, str]  # of what is not sharded; several ranks may hold it
    known_plan: str = ""  # the save whose plan fits this rank's state as well; "": none


class LocalPart(NamedTuple):
    """One rank's part of a save, planned.

    Attributes:
        tensors: what may be copied of this rank's memory, by key.
        values: serialized, by key.
        metadata: on rank 0, else None.
    """

    plan: SavePlan
    tensors: dict[str, Any]
    values: dict[str, bytes]
    names: tuple[SavedName, ...]
    metadata: Metadata | None
    unlike_replicas: tuple[str, ...] = ()  # keys of parameters that DDP keeps equal, and that are not


def serialize_values(states: Iterable[NamedState]) -> dict[Path, bytes]:
    """Raises CheckpointError for a value that cannot be pickled."""
    serialized = {}
    for state in states:
        for path, value in state.values.items():
            try:
                serialized[path] = serialize(value)
            except Exception as error:
                raise CheckpointError(
                    f"`{key_of(path)}` ({type(value).__name__}) cannot be pickled: {message_of(error)}; leave it out, "
                    "or save what it is made from"
                ) from error
    return serialized


def summarize(states: Iterable[NamedState], serialized: Mapping[Path, bytes], *, is_alone: bool) -> Summary:
    """Return what the other ranks need to know. Reads every byte that is not sharded, unless this rank is alone."""
    states = list(states)
    fingerprints: dict[Path, str] = {}
    for state in states if not is_alone else ():
        for path, tensor in state.tensors.items():
            if not isinstance(tensor, DTensor):
                fingerprints[path] = "" if path in state.from_first_rank else fingerprint_tensor(tensor)
        for path, value in state.values.items():
            fingerprints[path] = fingerprint_value(value, serialized[path])
    return Summary({state.name: state.kind for state in states}, fingerprints)


def find_differing(summaries: list[Summary]) -> dict[Path, tuple[int, ...]]:
    """Return the paths whose values differ, each with the ranks that have another value than the first that has it.

    Pure.

    Raises:
        CheckpointError: a name is of different kinds on the ranks.
    """
    for name, kind in summaries[0].kinds.items():
        if others := [other for other, summary in enumerate(summaries) if summary.kinds[name] != kind]:
            raise CheckpointError(
                f"`{name}` is a {kind} on rank 0 and a {summaries[others[0]].kinds[name]} on {name_ranks(others)}"
            )
    differing = {}
    for path in {path for summary in summaries for path in summary.fingerprints}:
        holders = [(at, each.fingerprints[path]) for at, each in enumerate(summaries) if path in each.fingerprints]
        if others := [at for at, fingerprint in holders if fingerprint != holders[0][1]]:
            differing[path] = tuple(others)
    return differing


class _KnownPlan(NamedTuple):
    """What a save has planned, and for which states."""

    save: str  # the same on all ranks
    structure: tuple[Any, ...]  # of this rank's states
    differing: dict[Path, tuple[int, ...]]
    plan: SavePlan
    metadata: Metadata | None


class SavePlans:
    """Plans the saves of one rank, together with the other ranks."""

    def __init__(self) -> None:
        self._known: _KnownPlan | None = None

    def plan(
        self,
        save: str,
        generation: int,
        read_states: Callable[[], list[NamedState]],
        exchange: Exchange,
        writer: FileSystemWriter,
    ) -> LocalPart:
        """Plan a save. Starts collectives.

        Args:
            save: its name, the same on all ranks and another for each save.
            generation: of the process groups.
            read_states: reads what is to be saved; what it raises on one rank is raised on all.

        Raises:
            CheckpointError: it cannot be saved; all ranks raise it.
        """
        states: list[NamedState] = []
        serialized: dict[Path, bytes] = {}
        structure: list[Any] = [generation, exchange.world_size]

        def read() -> Summary:
            states.extend(read_states())
            serialized.update(serialize_values(states))
            structure.extend(describe_structure(states))
            is_known = self._known is not None and self._known.structure == tuple(structure)
            summary = summarize(states, serialized, is_alone=exchange.world_size == 1)
            return summary._replace(known_plan=self._known.save) if self._known is not None and is_known else summary

        summaries = exchange.all_gather(attempt(read))
        differing = find_differing(summaries)
        tensors: dict[Path, Any] = {}
        values: dict[Path, bytes] = {}
        own = {path: _own_path(path, exchange.rank) for path, ranks in differing.items() if exchange.rank in ranks}
        for state in states:
            skipped = state.from_first_rank if exchange.rank > 0 else ()
            tensors |= {own.get(path, path): each for path, each in state.tensors.items() if path not in skipped}
            values |= {own.get(path, path): serialized[path] for path in state.values}
        known = self._known
        proposed = {summary.known_plan for summary in summaries}  # of all ranks, so that all decide alike
        if known is None or proposed != {known.save} or known.differing != differing:
            plan, metadata = _plan_together({**tensors, **values}, exchange, writer)
            known = self._known = _KnownPlan(save, tuple(structure), differing, plan, metadata)
        per_rank = {path[0] for path in differing}
        return LocalPart(
            known.plan,
            {key_of(path): each for path, each in tensors.items()},
            {key_of(path): each for path, each in values.items()},
            tuple(SavedName(state.name, state.kind, state.name in per_rank) for state in states),
            # DCP writes into it where this save's data is.
            None if known.metadata is None else dataclasses.replace(known.metadata),
            tuple(
                key_of(path)
                for state in states
                for path in state.tensors
                if path in state.replicated & differing.keys()
            ),
        )


def _own_path(path: Path, rank: int) -> Path:
    """Return under which path a rank saves a value that is another than the first rank's."""
    return (*path[:-1], f"{path[-1]}@rank{rank}")


def _plan_together(
    state: Mapping[Path, Any], exchange: Exchange, writer: FileSystemWriter
) -> tuple[SavePlan, Metadata | None]:
    """Return DCP's plan for this rank, and on rank 0 the metadata of all. Starts collectives."""
    planner = _Planner(state)
    writer.set_up_storage_writer(exchange.rank == 0)
    local = writer.prepare_local_plan(planner.create_local_plan())
    found: list[Metadata] = []

    def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        found.append(metadata)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(exchange.reduce_scatter(local, plan_globally))
    return plan, found[0] if found else None


def describe_structure(states: Iterable[NamedState]) -> list[Any]:
    """Return all that a plan depends on of this rank's states, to be compared. Refers to no tensor and no mesh."""
    layouts: dict[int, Any] = {}  # by the id of a mesh, which many tensors share

    def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
        if not isinstance(tensor, DTensor):
            return (type(tensor), tensor.shape, TensorProperties.create_from_tensor(tensor))
        mesh, local = tensor.device_mesh, tensor.to_local()
        if id(mesh) not in layouts:
            layouts[id(mesh)] = (mesh.mesh.shape, mesh.mesh.flatten().tolist(), mesh.get_coordinate())
        properties = TensorProperties.create_from_tensor(local)
        return (type(tensor), tensor.shape, tensor.placements, layouts[id(mesh)], local.shape, properties)

    return [
        (
            state.name,
            state.kind,
            [(path, describe(tensor)) for path, tensor in state.tensors.items()],
            list(state.values),
            state.from_first_rank,
        )
        for state in states
    ]


class _Planner(DefaultSavePlanner):
    """DCP's planner, of a state that is flat already."""

    def __init__(self, state: Mapping[Path, Any]) -> None:
        super().__init__()
        self.mappings = {key_of(path): path for path in state}
        self.state_dict = {key_of(path): each for path, each in state.items()}
        self.is_coordinator = False
