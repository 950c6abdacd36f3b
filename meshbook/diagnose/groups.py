"""What the rings of all ranks say together: who waits for whom, and in which collectives members do not agree.

Collectives of a group are compared by their number within it, which is the same on all members of a group that run the
same code. No clock of one rank is ever compared with another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshbook.diagnose.looks import Doing
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveSeen, RankSnapshot

# A group's label, and of its members the first, the last and their number: labels are not unique where groups of one
# kind are made side by side, and a thousand members are slow to compare for every collective of a thousand rings.
GroupKey = tuple[str, int, int, int]

# What members must bring in one shape. The rest may differ: all_to_all and gathers into lists take uneven tensors.
_SAME_SHAPES = frozenset(
    (
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    )
)

# Collectives that a group must have ended before it is said who comes late in them.
MIN_COMMON = 5


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits in an operation, and the ranks that have not come to it."""

    rank: int
    op: CollectiveSeen
    for_ranks: Ranks


@dataclass(slots=True)
class Disagreement:
    """One place in a group's order at which members do not do the same."""

    kind: str  # "different-collectives", "shape-mismatch", "dtype-mismatch"
    group: GroupKey
    seq: int
    sides: dict[str, list[int]] = field(default_factory=dict)  # what they do, in words -> who
    ops: dict[int, CollectiveSeen] = field(default_factory=dict)

    @property
    def members(self) -> Ranks:
        return tuple(sorted(self.ops))

    def minority(self) -> Ranks:
        """Those whose side is smaller than the largest; of equal sides, those without the lowest rank."""
        largest = max(self.sides.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        return tuple(sorted(set(self.ops) - set(largest)))


class Rings:
    """All rings, by group and by number within the group; of each group only its latest connections."""

    def __init__(self, snapshots: Iterable[RankSnapshot]) -> None:
        self.calls: dict[GroupKey, dict[int, dict[int, CollectiveSeen]]] = {}  # group -> seq -> rank -> what it called
        self.front: dict[GroupKey, dict[int, int]] = {}  # group -> rank -> the last it began
        seen = list(snapshots)
        epochs: dict[GroupKey, int] = defaultdict(int)
        for snapshot in seen:
            for op in snapshot.collectives:
                key = group_key(op)
                if op.epoch > epochs[key]:
                    epochs[key] = op.epoch
        calls: dict[GroupKey, dict[int, dict[int, CollectiveSeen]]] = defaultdict(lambda: defaultdict(dict))
        for snapshot in seen:
            rank = snapshot.rank
            for op in snapshot.collectives:
                key = group_key(op)
                if op.epoch == epochs[key] and op.op not in POINT_TO_POINT:
                    calls[key][op.seq][rank] = op
        self.calls.update(calls)
        for key, by_seq in calls.items():
            front = self.front[key] = {}
            for seq in sorted(by_seq):
                front.update(dict.fromkeys(by_seq[seq], seq))

    def missing(self, op: CollectiveSeen, known: Iterable[int]) -> Ranks:
        """Members of the operation's group that have not begun it, as far as they are known."""
        front = self.front.get(group_key(op), {})
        return tuple(rank for rank in op.group_ranks if rank in known and front.get(rank, 0) < op.seq)


def group_key(op: CollectiveSeen) -> GroupKey:
    ranks = op.group_ranks
    return (op.group, ranks[0], ranks[-1], len(ranks)) if ranks else (op.group, 0, 0, 0)


def waits(
    doings: Mapping[int, Doing], rings: Rings, transfers: Mapping[int, tuple[CollectiveSeen, ...]]
) -> dict[int, Wait]:
    """Who waits for whom in operations of process groups; nobody is waited for in one to which all have come.

    Args:
        transfers: by rank, the sends and receives that are under way there.
    """
    found: dict[int, Wait] = {}
    missing: dict[tuple[GroupKey, int], Ranks] = {}
    forming = {rank for rank, doing in doings.items() if doing.what == "forming"}
    for rank, doing in doings.items():
        op = doing.op
        if doing.what != "collective" or op is None:
            continue
        if op.op in POINT_TO_POINT:
            # Of several, begun together and waited for together, the one that the peer has no part in.
            going = [op, *(other for other in transfers.get(rank, ()) if other is not op and other.line == op.line)]
            partners = [(each, _partner(rank, each, doings, transfers)) for each in going]
            found[rank] = Wait(rank, *next((pair for pair in partners if pair[1]), partners[0]))
            continue
        place = (group_key(op), op.seq)
        if place not in missing:
            missing[place] = rings.missing(op, doings)
        found[rank] = Wait(rank, op, tuple(other for other in missing[place] if other != rank))
    if forming and len(forming) < len(doings):
        made = CollectiveSeen(op="making a process group", group="", group_ranks=tuple(sorted(doings)), seq=0)
        others = tuple(sorted(doings.keys() - forming))
        for rank in forming:
            found[rank] = Wait(rank, made, others)
    return found


def _partner(
    rank: int, op: CollectiveSeen, doings: Mapping[int, Doing], transfers: Mapping[int, tuple[CollectiveSeen, ...]]
) -> Ranks:
    """The peer of a send or receive, unless it does its part right now."""
    if op.peer is None or op.peer not in doings:
        # A receive from anybody: it waits for all that could send.
        others = tuple(other for other in op.group_ranks if other != rank and other in doings)
    else:
        others = (op.peer,)
    for other in others:
        if any(its.op != op.op and its.peer in (rank, None) for its in transfers.get(other, ())):
            return ()
    return others


def disagreements(found: Mapping[int, Wait], rings: Rings) -> list[Disagreement]:
    """Places where members of a group stand in different calls, where at least one of them waits. In order of group."""
    places = {(group_key(wait.op), wait.op.seq) for wait in found.values() if wait.op.op not in POINT_TO_POINT}
    said = []
    for key, seq in sorted(places):
        ops = rings.calls.get(key, {}).get(seq, {})
        if len(ops) < 2:
            continue
        by_name = _sides(ops, lambda op: op.op)
        if len(by_name) > 1:
            said.append(Disagreement("different-collectives", key, seq, by_name, dict(ops)))
            continue
        name = next(iter(by_name))
        by_dtype = _sides(ops, lambda op: op.dtype) if name != "barrier" else {}
        by_shape = _sides(ops, shapes) if name in _SAME_SHAPES else {}
        if len(by_dtype) > 1:
            said.append(Disagreement("dtype-mismatch", key, seq, by_dtype, dict(ops)))
        elif len(by_shape) > 1:
            said.append(Disagreement("shape-mismatch", key, seq, by_shape, dict(ops)))
    return said


def _sides(ops: Mapping[int, CollectiveSeen], of: Callable[[CollectiveSeen], str]) -> dict[str, list[int]]:
    sides: dict[str, list[int]] = {}
    for rank in sorted(ops):
        sides.setdefault(of(ops[rank]), []).append(rank)
    return sides


class Latecomer(NamedTuple):
    """A rank that comes last to nearly every collective of a group."""

    group: GroupKey
    rank: int
    waited_s: float  # by the others, in all
    of_s: float  # the time that this is a part of
    op: CollectiveSeen  # the last such


def latecomers(rings: Rings) -> list[Latecomer]:
    """For each group the rank that comes last to its collectives, if one does.

    Whoever comes last to a collective spends the least time in it, so durations suffice.
    """
    found = []
    for key, by_seq in rings.calls.items():
        common = [
            ops
            for _, ops in sorted(by_seq.items())
            if len(ops) == key[3] > 1 and all(op.ended_s is not None and op.failed is None for op in ops.values())
        ]
        if len(common) < MIN_COMMON:
            continue
        waited: dict[int, float] = defaultdict(float)
        last: dict[int, int] = defaultdict(int)
        for ops in common:
            took = {rank: op.began_s - (op.ended_s or 0.0) for rank, op in ops.items()}
            slowest = min(took, key=lambda rank: took[rank])
            last[slowest] += 1
            others = [seconds for rank, seconds in took.items() if rank != slowest]
            waited[slowest] += min(others) - took[slowest]
        rank = max(last, key=lambda each: (last[each], waited[each]))
        span = max(op.began_s for op in common[0].values()) - min(op.ended_s or 0.0 for op in common[-1].values())
        if last[rank] >= 0.8 * len(common) and span > 0 and waited[rank] >= 0.25 * span:
            found.append(Latecomer(key, rank, waited[rank], span, common[-1][rank]))
    return found


def shapes(op: CollectiveSeen) -> str:
    """The shapes of what a rank brought, in words: `4x8`, `a number`, `4x8 and 3`."""
    texts = ["x".join(map(str, shape)) if shape else "a number" for shape in op.shapes]
    return " and ".join(texts) if texts else "nothing"


def name_group(op: CollectiveSeen, world: Ranks) -> str:
    """How a sentence names the group of an operation: nothing for the world, for that is what everyone thinks of."""
    if set(world) <= set(op.group_ranks):
        return ""
    return f" of {name_ranks(op.group_ranks)}"


def name_op(op: CollectiveSeen, world: Ranks) -> str:
    """`all_reduce #41`, `all_reduce #3 of ranks 0-1`, `send to rank 2`."""
    if op.op in POINT_TO_POINT:
        word = "to" if op.op == "send" else "from"
        return f"{op.op} {word} {'any rank' if op.peer is None else f'rank {op.peer}'}"
    if not op.seq:
        return op.op
    return f"{op.op} #{op.seq}{name_group(op, world)}"
