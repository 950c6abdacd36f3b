"""From which rank a new rank takes each name: from one that is known to hold what the lost rank held.

Pure: descriptions of what ranks hold in, a choice per name out. A value is known to be equal on the ranks of an axis if
it is equal wherever two or more of them still have it: with dp=2, tp=2 and rank 1 lost, rank 3 has what rank 1 had if
ranks 0 and 2 hold the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from meshbook.ids import Ranks, name_ranks

# Stands for the name of a group that a rank is no member of.
NO_MEMBER = ""


class Held(Struct, frozen=True, gc=False, array_like=True):
    """What one rank holds under a name.

    Attributes:
        kind: "definition" (a module, function or class, which cells define), "state" (an object with a state that can
            be loaded into another one like it), "plain" (a number, a string and the like), "group" (a process group),
            "non-member" (what `new_group` returns on ranks that are no members), "mesh" (a DeviceMesh), "random" (a
            generator's state), "value" (another one, which is replaced as a whole) or "opaque" (cannot be copied).
        type: its class, in words.
        digest: equal for equal contents; None: not comparable.
        rest_digest: the same, of what may differ between replicas: buffers and extra state of a module.
        attributes_digest: the same, of attributes of modules that are plain values, such as `dropout.p`.
        groups: names and members of the process group, or of the groups of a DeviceMesh, by dim.
        slice_of_mesh: of a DeviceMesh that is a slice of `mesh`: its axes.
        is_sharded: it has tensors of which other ranks hold other parts.
    """

    kind: str
    type: str
    digest: str | None = None
    rest_digest: str | None = None
    attributes_digest: str | None = None
    groups: tuple[tuple[str, Ranks], ...] = ()
    slice_of_mesh: tuple[str, ...] = ()
    is_sharded: bool = False


class Choice(Struct, frozen=True, gc=False):
    """Where a new rank takes a name from; `source` None: it cannot be had, and `why` says why not."""

    source: int | None
    why: str
    groups: tuple[str, ...] = ()  # the new rank's process groups that it is made of; it needs no source then
    slice_of_mesh: tuple[str, ...] = ()  # it is `mesh`, cut to these axes
    with_attributes: bool = False  # the attributes of a module too: they are equal on the others


def choose_sources(
    held: Mapping[int, Mapping[str, Held]],
    own: Mapping[str, Held],
    rank: int,
    axes: Mapping[str, int],
    rank_dependent: Collection[str] = (),
) -> dict[str, Choice]:
    """Return the choices of a new rank, by name, in order. A name that it needs nothing for is left out.

    Args:
        held: what each of the other, old ranks holds, by name.
        own: what the new rank holds, after cells were replayed on it.
        rank: the new rank.
        axes: of the mesh, outermost first.
        rank_dependent: names that cells compute from the rank's number: that the others agree on a plain value does not
            mean that this rank had it, as `is_main = rank == 0` shows.
    """
    names = dict.fromkeys(name for rank_holds in held.values() for name in rank_holds)
    choices = {}
    for name in names:
        found = {other: holds[name] for other, holds in held.items() if name in holds}
        first = next(iter(found.values()))
        if name in own and (
            first.kind in ("definition", "opaque") or (first.kind == "plain" and name in rank_dependent)
        ):
            continue
        if name in own and first.kind == "value" and any(one.digest is None for one in found.values()):
            continue  # cells have made it here, and whether the others hold the same cannot be known
        if any(one.groups or one.kind == "non-member" for one in found.values()):
            if name not in own:
                choices[name] = _choose_groups(found, rank)
        elif first.kind == "opaque":
            choices[name] = Choice(None, f"a {first.type} cannot be copied")
        elif first.kind == "plain" and name in rank_dependent:
            choices[name] = Choice(None, "cells compute it from the rank")
        else:
            choices[name] = _choose(found, held, rank, axes)
    return choices


def _choose(
    found: Mapping[int, Held], held: Mapping[int, Mapping[str, Held]], rank: int, axes: Mapping[str, int]
) -> Choice:
    if len(found) < len(held):
        return Choice(None, f"only {name_ranks(found)} {'has' if len(found) == 1 else 'have'} it")
    if len(found) == 1:
        ((source, one),) = found.items()
        if one.kind == "random":  # ranks often draw different numbers on purpose
            return Choice(None, f"rank {source} is the only other, and its generator may be its own")
        if one.is_sharded:
            return Choice(None, f"it is sharded, and rank {source}, the only other, holds another part")
        return Choice(source, f"rank {source} is the only other: nothing to compare with")
    if any(one.digest is None for one in found.values()):
        types = sorted({one.type for one in found.values()})
        return Choice(None, f"whether it is equal on the others is not known ({', '.join(types)})")
    return _choose_replica(found, rank, axes)


def _choose_replica(found: Mapping[int, Held], rank: int, axes: Mapping[str, int]) -> Choice:
    """Return the choice of a value that several other ranks have, and that can be compared."""
    for replicated in _axis_sets(axes):
        lines = _lines(axes, replicated)
        own_line = next(line for line in lines if rank in line)
        sources = [other for other in own_line if other in found]
        compared = [[found[other] for other in line if other in found] for line in lines]
        has_evidence = any(len(line) > 1 for line in compared)
        if sources and has_evidence and all(len({one.digest for one in line}) <= 1 for line in compared):
            rest = {found[other].rest_digest for other in sources}
            why = "equal on all others" if len(replicated) == len(axes) else f"replica on {', '.join(replicated)}"
            if len(rest) > 1:
                why += f"; its buffers and extra state may differ there, and are those of rank {sources[0]}"
            attributes = {one.attributes_digest for one in found.values()}
            if len(attributes) > 1:
                why += "; its attributes differ on the others, and are as they were made here"
            return Choice(sources[0], why, with_attributes=len(attributes) == 1 and None not in attributes)
    return Choice(None, "it differs between the other ranks")


def _choose_groups(found: Mapping[int, Held], rank: int) -> Choice:
    """Return the choice for a process group or a DeviceMesh: the groups that the new rank is a member of."""
    having = {other: one for other, one in found.items() if one.groups}
    if not having:
        return Choice(None, "the others are no members of this group, and whether this rank was one is not known")
    source, first = next(iter(having.items()))
    if first.slice_of_mesh and len({one.slice_of_mesh for one in found.values()}) == 1:
        return Choice(source, "made anew", slice_of_mesh=first.slice_of_mesh)
    names = []
    for dim in range(len(first.groups)):
        of_dim = (one.groups[dim] for one in having.values() if len(one.groups) == len(first.groups))
        name = next((name for name, members in of_dim if rank in members), None)
        if name is not None:
            names.append(name)
    if len(names) == len(first.groups):
        return Choice(source, "made anew", tuple(names))
    others = [one for one in found.values() if not one.groups]
    if any(one.kind != "non-member" for one in others):
        return Choice(None, "this rank is no member of the group, and what it had instead is not known")
    if first.kind == "group" and (others or len({one.groups for one in having.values()}) == 1):
        return Choice(source, "this rank is no member", (NO_MEMBER,))
    return Choice(None, "the other ranks have no group of this one")


def _axis_sets(axes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Yield every set of axes along which a value may be equal: all of them, then fewer."""
    names = [name for name, size in axes.items() if size > 1]
    if not names:
        return
    yield list(axes)
    for size in range(len(names) - 1, 0, -1):
        yield from itertools.combinations(names, size)


def _lines(axes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each line of the mesh along these axes: those that differ only in their places on them."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank, point in enumerate(itertools.product(*map(range, axes.values()))):
        key = tuple(at for name, at in zip(axes, point, strict=True) if name not in along)
        lines.setdefault(key, []).append(rank)
    return list(lines.values())
