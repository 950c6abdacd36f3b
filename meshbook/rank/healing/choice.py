"""From which rank a new rank takes each name: from one that is proven to hold what the lost rank held.

Pure: descriptions of what ranks hold in, a choice per name out. Proof is that the value is replicated by what it is
(parameters of a DDP model, placements of DTensors), or that two or more of the others hold the same bytes, which
could not be the same by chance. Of an axis too: with dp=2, tp=2 and rank 1 lost, rank 3 has what rank 1 had if ranks 0
and 2 hold the same. What is alike and no proof, such as a flag or a counter, is named, and copied if the user says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field, structs

from meshbook.ids import Ranks, name_ranks

# Stands for the name of a group that a rank is no member of.
NO_MEMBER = ""

# "proven": it is copied; "alike": if the user says so, and that is offered; "possible": if the user says so.
_Grade = Literal["proven", "alike", "possible"]


class Held(Struct, frozen=True, gc=False, array_like=True):
    """What one rank holds under a name.

    Attributes:
        kind: "definition" (a module, function or class, which cells define), "state" (an object with a state that can
            be loaded into another one like it), "plain" (a number, a string and the like), "group" (a process group),
            "non-member" (what `new_group` returns on ranks that are no members), "mesh" (a DeviceMesh), "random" (a
            generator's state), "value" (another one, which is replaced as a whole) or "opaque" (cannot be copied).
        type: its class, in words.
        digest: equal for equal contents; None: not comparable.
        rest_digests: the same, of what may differ between replicas, by what it is: buffers, gradients, extra state.
        attributes_digest: the same, of attributes of modules that are plain values, such as `dropout.p`.
        groups: names and members of the process group, or of the groups of a DeviceMesh, by dim.
        slice_of_mesh: of a DeviceMesh that is a slice of `mesh`: its axes.
        is_sharded: it has tensors of which other ranks hold other parts.
        replicas: the ranks that hold the same by what it is, this one among them; (): it does not say.
        is_telling: it could not be equal by chance.
    """

    kind: str
    type: str
    digest: str | None = None
    rest_digests: dict[str, str] = field(default_factory=dict)
    attributes_digest: str | None = None
    groups: tuple[tuple[str, Ranks], ...] = ()
    slice_of_mesh: tuple[str, ...] = ()
    is_sharded: bool = False
    replicas: Ranks = ()
    is_telling: bool = False


class Choice(Struct, frozen=True, gc=False):
    """Where a new rank takes a name from; `source` None: it takes it from nowhere, and `why` says why not.

    Attributes:
        groups: the new rank's process groups that it is made of; it needs no source then.
        slice_of_mesh: it is `mesh`, cut to these axes.
        with_attributes: the attributes of a module too.
        names_attributes: those that are others than here are named: they are alike on the other ranks.
        is_kept: the new rank has what its setup cells have made.
        is_dropped: the new rank has a constant of a cell, which later cells have changed: it must not stay.
        is_fine: nothing is known to be wrong with what is kept.
        is_offered: it is copied if the user says so.
    """

    source: int | None
    why: str
    groups: tuple[str, ...] = ()
    slice_of_mesh: tuple[str, ...] = ()
    with_attributes: bool = False
    names_attributes: bool = False
    is_kept: bool = False
    is_dropped: bool = False
    is_fine: bool = False
    is_offered: bool = False


class Rules(Struct, frozen=True, gc=False):
    """What is known of names beside what ranks hold.

    Attributes:
        axes: of the mesh, outermost first.
        rank_dependent: names that cells compute from the rank's number: that the others agree on a plain value does not
            mean that this rank had it, as `is_main = rank == 0` shows.
        built: names that setup cells have bound on the new rank.
        copy: names that the user says to copy; None: all that is alike on the others.
    """

    axes: Mapping[str, int]
    rank_dependent: Collection[str] = ()
    built: Collection[str] = ()
    copy: Collection[str] | None = ()

    def names(self, name: str) -> bool:
        return self.copy is not None and name in self.copy


def choose_sources(
    held: Mapping[int, Mapping[str, Held]], own: Mapping[str, Held], rank: int, rules: Rules
) -> dict[str, Choice]:
    """Return the choices of a new rank, by name, in order. A name that it needs nothing for is left out.

    Args:
        held: what each of the other, old ranks holds, by name.
        own: what the new rank holds, after cells were replayed on it.
        rank: the new rank.
    """
    names = dict.fromkeys([*(name for holds in held.values() for name in holds), *(rules.copy or ())])
    choices: dict[str, Choice] = {}
    equal: dict[str, Choice] = {}  # what the new rank has made, with equal contents
    for name in names:
        found = {other: holds[name] for other, holds in held.items() if name in holds}
        mine = own.get(name)
        if not found:
            choices[name] = Choice(None, "no other rank has it")
        elif any(one.groups or one.kind == "non-member" for one in found.values()):
            if mine is None:
                choices[name] = _choose_groups(found, rank)
        elif _has_the_same(found, mine, is_named=rules.names(name)):
            if next(iter(found.values())).kind in ("state", "value"):
                equal[name] = Choice(next(iter(found)), "equal on all others")
        else:
            choice = _choose(name, found, mine, rank, rules, is_on_all=len(found) == len(held))
            if choice is not None:
                choices[name] = choice
    # What refers to an object that is replaced by one of another class is to refer to that one.
    is_any_replaced = any(
        choice.source is not None and name in own and own[name].type != held[choice.source][name].type
        for name, choice in choices.items()
    )
    return choices | equal if is_any_replaced else choices


def _has_the_same(found: Mapping[int, Held], mine: Held | None, *, is_named: bool) -> bool:
    """Whether the new rank has what it is to have: it defines it, or holds the same."""
    if mine is None:
        return False
    if next(iter(found.values())).kind in ("definition", "opaque") and not is_named:
        return True
    return mine.digest is not None and {_contents(one) for one in found.values()} == {_contents(mine)}


def _contents(held: Held) -> tuple[str | None, ...]:
    return held.type, held.digest, *held.rest_digests.values(), held.attributes_digest


def _choose(
    name: str, found: Mapping[int, Held], mine: Held | None, rank: int, rules: Rules, *, is_on_all: bool
) -> Choice | None:
    grade, choice = _find_source(found, rank, rules.axes, is_on_all=is_on_all)
    kind = next(iter(found.values())).kind
    names_rank = name in rules.rank_dependent and (kind == "plain" or (kind == "value" and len(found) == 1))
    is_asked_for = rules.names(name) or (rules.copy is None and grade != "possible" and not names_rank)
    if choice.source is not None and (is_asked_for or grade == "proven"):
        return _with_attributes(choice, found, mine, is_asked_for=is_asked_for)
    is_offered = grade == "alike" and not names_rank
    why = "cells compute it from the rank" if names_rank else choice.why
    if mine is None or mine.kind == "random":  # every rank has generators
        return Choice(None, why, is_offered=is_offered)
    is_known = mine.digest is not None and all(one.digest is not None for one in found.values())
    if not is_on_all:
        return None
    if names_rank:  # where the others differ too, it is as it must be
        return Choice(None, why, is_kept=True, is_fine=True) if grade == "alike" else None
    if name in rules.built or not is_known:
        return Choice(None, why, is_kept=True, is_fine=not is_known, is_offered=is_offered)
    return Choice(None, f"cells have changed it since it was defined; {why}", is_dropped=True, is_offered=is_offered)


def _with_attributes(choice: Choice, found: Mapping[int, Held], mine: Held | None, *, is_asked_for: bool) -> Choice:
    """Return the choice of a source, with what becomes of the attributes of a module that the new rank has made."""
    theirs = {one.attributes_digest for one in found.values()}
    if theirs == {None}:
        return choice
    if len(theirs) > 1:
        are = f"those of rank {choice.source}" if mine is None else "as they were made here"
        return structs.replace(choice, why=f"{choice.why}; its attributes differ on the others, and are {are}")
    is_other = mine is not None and mine.attributes_digest not in theirs
    return structs.replace(choice, with_attributes=is_asked_for, names_attributes=is_other and not is_asked_for)


def _find_source(
    found: Mapping[int, Held], rank: int, axes: Mapping[str, int], *, is_on_all: bool
) -> tuple[_Grade, Choice]:
    """Return a rank that holds what the new one is to hold, if there is one, and how far that is known."""
    declared = {other: one for other, one in found.items() if rank in one.replicas and one.digest is not None}
    if declared:
        source, first = next(iter(declared.items()))
        if len({one.digest for one in declared.values()}) > 1:
            return "possible", Choice(None, f"its replicas on {name_ranks(declared)} differ")
        return "proven", Choice(source, "a replica" + _differing_rest(declared, source))
    source, first = next(iter(found.items()))
    if first.kind == "opaque":
        return "possible", Choice(None, f"a {first.type} cannot be copied")
    if any(one.digest is None for one in found.values()):
        types = ", ".join(sorted({one.type for one in found.values()}))
        return "possible", Choice(source, f"whether it is equal on the others is not known ({types})")
    if not is_on_all:
        have = f"only {name_ranks(found)} {'has' if len(found) == 1 else 'have'} it"
        return "possible", Choice(source if len({one.digest for one in found.values()}) == 1 else None, have)
    if len(found) > 1:
        return _find_replica(found, rank, axes)
    if first.kind == "random":  # ranks often draw different numbers on purpose
        return "possible", Choice(source, f"rank {source} is the only other, and its generator may be its own")
    if first.is_sharded:
        return "possible", Choice(None, f"it is sharded, and rank {source}, the only other, holds another part")
    return "alike", Choice(source, f"rank {source} is the only other: nothing to compare with")


def _find_replica(found: Mapping[int, Held], rank: int, axes: Mapping[str, int]) -> tuple[_Grade, Choice]:
    """Return the choice of a value that several other ranks have, and that can be compared."""
    for replicated in _axis_sets(axes):
        lines = _lines(axes, replicated)
        own_line = next(line for line in lines if rank in line)
        sources = [other for other in own_line if other in found]
        compared = [[found[other] for other in line if other in found] for line in lines]
        has_evidence = any(len(line) > 1 for line in compared)
        if sources and has_evidence and all(len({one.digest for one in line}) <= 1 for line in compared):
            source = sources[0]
            is_whole = len(replicated) == len(axes)
            if not found[source].is_telling:
                along = "" if is_whole else f" along {', '.join(replicated)}"
                return "alike", Choice(source, f"alike on {name_ranks(found)}{along}")
            why = "equal on all others" if is_whole else f"replica on {', '.join(replicated)}"
            return "proven", Choice(source, why + _differing_rest({other: found[other] for other in sources}, source))
    return "possible", Choice(None, "it differs between the other ranks")


def _differing_rest(replicas: Mapping[int, Held], source: int) -> str:
    kinds = replicas[source].rest_digests
    differing = [kind for kind in kinds if len({one.rest_digests.get(kind) for one in replicas.values()}) > 1]
    return f"; {' and '.join(differing)} of rank {source}: they differ there" if differing else ""


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
