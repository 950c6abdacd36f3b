"""Which rank writes what of a save: DCP's plan, over what the ranks hold under the saved names.

Tensors of modules that all ranks hold alike are written once, by the rank that has least to write. What differs between
ranks is written by each of them: under its own key by the lowest rank that has it, and under `<key>@rank<r>` by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from meshbook.errors import CheckpointError
from meshbook.ids import name_ranks
from meshbook.rank.checkpoints.exchange import Exchange, attempt
from meshbook.rank.checkpoints.fingerprints import fingerprint_tensor, fingerprint_value, serialize
from meshbook.rank.checkpoints.named_state import NamedState, Path, key_of
from meshbook.wire.messages import SavedName


class Summary(NamedTuple):
    """What the other ranks need to know of one rank's state."""

    kinds: dict[str, str]  # by name
    fingerprints: dict[Path, str]  # of what is not sharded; several ranks may hold it


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


def serialize_values(states: Iterable[NamedState]) -> dict[Path, bytes]:
    """Raises CheckpointError for a value that cannot be pickled."""
    serialized = {}
    for state in states:
        for path, value in state.values.items():
            try:
                serialized[path] = serialize(value)
            except Exception as error:
                raise CheckpointError(
                    f"`{key_of(path)}` ({type(value).__name__}) cannot be pickled: {error}; leave it out, or save what "
                    "it is made from"
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


def find_own_keys(rank: int, summaries: list[Summary]) -> tuple[dict[Path, Path], set[Path]]:
    """Return under which paths this rank saves what it does not share, and all paths whose values differ.

    Paths that the first map does not have are saved as they are. Pure.

    Raises:
        CheckpointError: a name is of different kinds on the ranks.
    """
    for name, kind in summaries[0].kinds.items():
        if others := [other for other, summary in enumerate(summaries) if summary.kinds[name] != kind]:
            raise CheckpointError(
                f"`{name}` is a {kind} on rank 0 and a {summaries[others[0]].kinds[name]} on {name_ranks(others)}"
            )
    renamed, differing = {}, set()
    for path in {path for summary in summaries for path in summary.fingerprints}:
        holders = [(at, each.fingerprints[path]) for at, each in enumerate(summaries) if path in each.fingerprints]
        first = holders[0][1]
        if any(other != first for _, other in holders):
            differing.add(path)
            if any(at == rank and other != first for at, other in holders):
                renamed[path] = (*path[:-1], f"{path[-1]}@rank{rank}")
    return renamed, differing


def plan_save(read_states: Callable[[], list[NamedState]], exchange: Exchange, writer: FileSystemWriter) -> LocalPart:
    """Plan a save together with all ranks. Starts collectives.

    Args:
        read_states: reads what is to be saved; what it raises on one rank is raised on all.

    Raises:
        CheckpointError: it cannot be saved; all ranks raise it.
    """
    states: list[NamedState] = []
    serialized: dict[Path, bytes] = {}

    def read() -> Summary:
        states.extend(read_states())
        serialized.update(serialize_values(states))
        return summarize(states, serialized, is_alone=exchange.world_size == 1)

    summaries = exchange.all_gather(attempt(read))
    renamed, differing = find_own_keys(exchange.rank, summaries)
    tensors: dict[Path, Any] = {}
    values: dict[Path, bytes] = {}
    for state in states:
        skipped = state.from_first_rank if exchange.rank > 0 else ()
        tensors |= {renamed.get(path, path): each for path, each in state.tensors.items() if path not in skipped}
        values |= {renamed.get(path, path): serialized[path] for path in state.values}
    planner = _Planner({**tensors, **values})
    writer.set_up_storage_writer(exchange.rank == 0)
    local = writer.prepare_local_plan(planner.create_local_plan())
    found: list[Metadata] = []

    def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        found.append(metadata)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(exchange.reduce_scatter(local, plan_globally))
    per_rank = {path[0] for path in differing}
    names = tuple(SavedName(state.name, state.kind, state.name in per_rank) for state in states)
    return LocalPart(
        plan,
        {key_of(path): each for path, each in tensors.items()},
        {key_of(path): each for path, each in values.items()},
        names,
        found[0] if found else None,
    )


class _Planner(DefaultSavePlanner):
    """DCP's planner, of a state that is flat already."""

    def __init__(self, state: Mapping[Path, Any]) -> None:
        super().__init__()
        self.mappings = {key_of(path): path for path in state}
        self.state_dict = {key_of(path): each for path, each in state.items()}
        self.is_coordinator = False
