"""From which rank a rank takes each remote tensor after others were replaced: from one that holds the same part of it.

Pure: descriptions of stores in, choices out. Two ranks hold the same part of a tensor if they are at the same place
along every axis over which it is not replicated. A new rank needs everything. An old one needs what it was stopped
before computing or changing, where another one that holds the same part was not: so that replicas are equal afterwards,
and come from one rank, which has taken the last step or has not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct


class TensorHeld(Struct, frozen=True, gc=False, array_like=True):
    """What a rank holds under an id.

    Attributes:
        kind: "tensor" (a DTensor), "own" (a tensor of each rank's own), "foreign" (memory of a cell's or an actor's),
            "graph" (of a module's forward), "module" (keeps a module), "odd" (cannot be copied), or "lost" (a fault
            took its place).
        cut: dims of the engine's mesh along which ranks hold different parts of it.
        memory: equal for tensors on the same storage of a rank.
        skipped: how many operations that were to change it did not.
        is_begun: whether one of them may have written a part.
        is_transient: whether they were stopped, and did not fail.
        is_view: a view that was not made; whoever makes it must make it on its base.
        text: shape and placements, for people to read.
    """

    kind: str
    cut: tuple[int, ...] = ()
    memory: int = 0
    skipped: int = 0
    is_begun: bool = False
    is_transient: bool = False
    is_view: bool = False
    text: str = ""

    @property
    def state(self) -> tuple[bool, int, bool]:
        return self.kind == "tensor", self.skipped, self.is_begun


class StoreHeld(Struct, frozen=True, gc=False):
    """One engine's tensors on a rank.

    Attributes:
        completed: the latest optimizer steps that it has taken.
    """

    held: dict[int, TensorHeld]
    num_batches: int
    num_heals: int
    completed: tuple[int, ...] = ()


class TensorChoice(Struct, frozen=True, gc=False):
    """Where a rank takes an id from.

    Attributes:
        source: the rank that sends it, or what it looks like.
        missing: why it cannot be had; "": it can.
    """

    source: int
    missing: str = ""


_WHY_MISSING = {
    "own": "each rank has its own",
    "foreign": "also a cell's or an actor's: look it up again",
    "graph": "",
    "odd": "it cannot be copied",
}


def rank_by_damage(stores: Mapping[int, StoreHeld]) -> list[int]:
    """Return the ranks, those first that completed what was under way, and those last that changed a part of it."""

    def damage(rank: int) -> tuple[int, int, int]:
        held = stores[rank].held.values()
        return sum(one.is_begun for one in held), sum(one.skipped for one in held), rank

    return sorted(stores, key=damage)


def choose_tensors(
    stores: Mapping[int, StoreHeld], points: Mapping[int, Sequence[int]], new_ranks: Collection[int]
) -> dict[int, dict[int, TensorChoice]]:
    """Return by rank what it takes from others, by id.

    Args:
        stores: of the ranks that have one: the old ones.
        points: of every rank of the engine, its place along each dim of the engine's mesh.
    """
    order = rank_by_damage(stores)
    choices: dict[int, dict[int, TensorChoice]] = {rank: {} for rank in points}
    for id in dict.fromkeys(id for rank in order for id in stores[rank].held):
        having = [rank for rank in order if id in stores[rank].held]
        tensors = [rank for rank in having if stores[rank].held[id].kind == "tensor"]
        for rank in points:
            cut = stores[tensors[0]].held[id].cut if tensors else ()
            same = [other for other in tensors if all(points[other][dim] == points[rank][dim] for dim in cut)]
            if rank in new_ranks:
                choices[rank][id] = _choose_for_new(stores, id, same, having, tensors)
            elif id in stores[rank].held and same and _is_behind(stores[rank].held[id], stores[same[0]].held[id]):
                choices[rank][id] = TensorChoice(same[0])
    for rank in new_ranks:
        if rank in choices:
            _separate_sources(choices[rank], stores, order)
    return choices


def _is_behind(own: TensorHeld, best: TensorHeld) -> bool:
    """Whether a stop has left a rank with another state of a tensor than the one that it is to be taken from."""
    is_other = own.state != best.state and (own.is_transient or best.is_transient)
    return is_other and own.kind in ("tensor", "lost") and not own.is_view


def _choose_for_new(
    stores: Mapping[int, StoreHeld], id: int, same: Sequence[int], having: Sequence[int], tensors: Sequence[int]
) -> TensorChoice:
    if same:
        return TensorChoice(same[0])
    if tensors:
        return TensorChoice(tensors[0], "no other rank has this part")
    known = next((rank for rank in having if stores[rank].held[id].kind != "lost"), having[0])
    return TensorChoice(known, _WHY_MISSING.get(stores[known].held[id].kind, ""))


def _separate_sources(choices: dict[int, TensorChoice], stores: Mapping[int, StoreHeld], order: Sequence[int]) -> None:
    """Give up tensors on memory of others that come from another rank: they would not be on the same memory."""
    for source in order:
        by_memory: dict[int, list[int]] = defaultdict(list)
        for id, held in stores[source].held.items():
            if held.kind == "tensor" and id in choices and not choices[id].missing:
                by_memory[held.memory].append(id)
        for ids in by_memory.values():
            sources = {choices[id].source for id in ids}
            if len(sources) > 1:
                kept = min(sources, key=order.index)
                for id in ids:
                    if choices[id].source != kept:
                        choices[id] = TensorChoice(choices[id].source, "a view of another one")
