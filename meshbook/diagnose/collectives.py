"""Compare the rings of all ranks: which rank waits for which, and in which collectives the members disagree.

Collectives of a group are compared by their sequence number within it, which is the same on all members that run the
same code. Clocks of different ranks are never compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshbook.diagnose.rank_activity import Activity
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, SAME_SHAPE_OPS, CollectiveInfo, RankSnapshot

# A group's label, and its first member, last member and size. Labels are not unique where several groups of one kind
# exist side by side, and comparing a thousand members for every collective of a thousand rings is slow.
GroupKey = tuple[str, int, int, int]

# Collectives that a group must have completed before a straggler is reported.
MIN_COMPLETED_COLLECTIVES = 5


@dataclass(frozen=True, slots=True)
class RankWait:
    """A rank that waits in an operation, and the ranks that have not begun it."""

    rank: int
    op: CollectiveInfo
    for_ranks: Ranks


@dataclass(slots=True)
class Disagreement:
    """A sequence number of a group at which the members' calls differ."""

    kind: str  # "different-collectives", "shape-mismatch", "dtype-mismatch"
    group: GroupKey
    seq: int
    sides: dict[str, list[int]] = field(default_factory=dict)  # what they call or pass, in words -> ranks
    ops: dict[int, CollectiveInfo] = field(default_factory=dict)

    @property
    def members(self) -> Ranks:
        return tuple(sorted(self.ops))

    def minority(self) -> Ranks:
        """Return the ranks outside the largest side; of equal sides, the one with the lowest rank is the largest."""
        largest = max(self.sides.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        return tuple(sorted(set(self.ops) - set(largest)))


class Rings:
    """All rings, by group and by sequence number within it; of each group only its latest generation."""

    def __init__(self, snapshots: Iterable[RankSnapshot]) -> None:
        self.ops: dict[GroupKey, dict[int, dict[int, CollectiveInfo]]] = {}  # group -> seq -> rank -> operation
        self.last_seq: dict[GroupKey, dict[int, int]] = {}  # group -> rank -> last seq it began
        seen = list(snapshots)
        generations: dict[GroupKey, int] = defaultdict(int)
        for snapshot in seen:
            for op in snapshot.collectives:
                key = group_key(op)
                if op.generation > generations[key]:
                    generations[key] = op.generation
        ops: dict[GroupKey, dict[int, dict[int, CollectiveInfo]]] = defaultdict(lambda: defaultdict(dict))
        for snapshot in seen:
            rank = snapshot.rank
            for op in snapshot.collectives:
                key = group_key(op)
                if op.generation == generations[key] and op.op not in POINT_TO_POINT:
                    ops[key][op.seq][rank] = op
        self.ops.update(ops)
        for key, by_seq in ops.items():
            last_seq = self.last_seq[key] = {}
            for seq in sorted(by_seq):
                last_seq.update(dict.fromkeys(by_seq[seq], seq))

    def missing(self, op: CollectiveInfo, known: Iterable[int]) -> Ranks:
        """Return the known members of the operation's group that have not begun it."""
        last_seq = self.last_seq.get(group_key(op), {})
        return tuple(rank for rank in op.group_ranks if rank in known and last_seq.get(rank, 0) < op.seq)


def group_key(op: CollectiveInfo) -> GroupKey:
    ranks = op.group_ranks
    return (op.group, ranks[0], ranks[-1], len(ranks)) if ranks else (op.group, 0, 0, 0)


def find_waits(
    activities: Mapping[int, Activity],
    rings: Rings,
    transfers: Mapping[int, tuple[CollectiveInfo, ...]],
    forming: Mapping[int, Ranks],
) -> dict[int, RankWait]:
    """Return the waits of ranks in process-group operations; `for_ranks` is empty where all members have arrived.

    Args:
        transfers: by rank, its sends and receives in flight.
        forming: by rank, the members of the group that it makes; (): of none, or not known.
    """
    found: dict[int, RankWait] = {}
    missing: dict[tuple[GroupKey, int], Ranks] = {}
    making = {rank for rank, activity in activities.items() if activity.kind == "forming"}
    for rank, activity in activities.items():
        op = activity.op
        if activity.kind != "collective" or op is None:
            continue
        if op.op in POINT_TO_POINT:
            # Of several transfers that were begun together and are waited for together: the first that the peer does
            # not match.
            in_flight = [
                op,
                *(other for other in transfers.get(rank, ()) if other is not op and other.frame == op.frame),
            ]
            partners = [(each, _missing_peers(rank, each, activities, transfers)) for each in in_flight]
            found[rank] = RankWait(rank, *next((pair for pair in partners if pair[1]), partners[0]))
            continue
        key = (group_key(op), op.seq)
        if key not in missing:
            missing[key] = rings.missing(op, activities)
        found[rank] = RankWait(rank, op, tuple(other for other in missing[key] if other != rank))
    for ranks, makers in _group_makers(making, forming):
        # A group whose members connect waits for these; what follows, torch's barrier, takes all ranks.
        members = tuple(rank for rank in ranks if rank in activities) or tuple(sorted(activities))
        if others := tuple(member for member in members if member not in making):
            group_creation = CollectiveInfo(op="making a process group", group="", group_ranks=members, seq=0)
            found.update((rank, RankWait(rank, group_creation, others)) for rank in makers)
    return found


def _group_makers(making: Iterable[int], forming: Mapping[int, Ranks]) -> Iterable[tuple[Ranks, list[int]]]:
    """Return the groups that are made, by their members, with the ranks that make them."""
    makers: dict[Ranks, list[int]] = {}
    for rank in sorted(making):
        makers.setdefault(forming.get(rank, ()), []).append(rank)
    return makers.items()


def _missing_peers(
    rank: int,
    op: CollectiveInfo,
    activities: Mapping[int, Activity],
    transfers: Mapping[int, tuple[CollectiveInfo, ...]],
) -> Ranks:
    """Return the peer of a send or receive, unless it runs the matching operation now."""
    if op.peer is None or op.peer not in activities:
        # A receive from any rank waits for all that could send.
        others = tuple(other for other in op.group_ranks if other != rank and other in activities)
    else:
        others = (op.peer,)
    for other in others:
        if any(its.op != op.op and its.peer in (rank, None) for its in transfers.get(other, ())):
            return ()
    return others


def find_disagreements(waits: Mapping[int, RankWait], rings: Rings) -> list[Disagreement]:
    """Return the positions at which members' calls differ and at least one member waits. Ordered by group."""
    positions = {(group_key(wait.op), wait.op.seq) for wait in waits.values() if wait.op.op not in POINT_TO_POINT}
    result = []
    for key, seq in sorted(positions):
        ops = rings.ops.get(key, {}).get(seq, {})
        if len(ops) < 2:
            continue
        by_name = _group_ranks_by(ops, lambda op: op.op)
        if len(by_name) > 1:
            result.append(Disagreement("different-collectives", key, seq, by_name, dict(ops)))
            continue
        name = next(iter(by_name))
        by_dtype = _group_ranks_by(ops, lambda op: op.dtype) if name != "barrier" else {}
        by_shape = _group_ranks_by(ops, format_shapes) if name in SAME_SHAPE_OPS else {}
        if len(by_dtype) > 1:
            result.append(Disagreement("dtype-mismatch", key, seq, by_dtype, dict(ops)))
        elif len(by_shape) > 1:
            result.append(Disagreement("shape-mismatch", key, seq, by_shape, dict(ops)))
    return result


def _group_ranks_by(ops: Mapping[int, CollectiveInfo], key: Callable[[CollectiveInfo], str]) -> dict[str, list[int]]:
    sides: dict[str, list[int]] = {}
    for rank in sorted(ops):
        sides.setdefault(key(ops[rank]), []).append(rank)
    return sides


class Straggler(NamedTuple):
    """A rank that arrives last at nearly every collective of a group."""

    group: GroupKey
    rank: int
    waited_s: float  # total wait of the others
    span_s: float  # the period that `waited_s` is part of
    op: CollectiveInfo  # the last such collective


def find_stragglers(rings: Rings) -> list[Straggler]:
    """Return, for each group that has one, the rank that arrives last at its collectives.

    The rank that arrives last spends the least time in a collective, so durations suffice.
    """
    found = []
    for key, by_seq in rings.ops.items():
        common = [
            ops
            for _, ops in sorted(by_seq.items())
            if len(ops) == key[3] > 1 and all(op.ended_s_ago is not None and op.failure is None for op in ops.values())
        ]
        if len(common) < MIN_COMPLETED_COLLECTIVES:
            continue
        waited_for_s: dict[int, float] = defaultdict(float)
        times_last: dict[int, int] = defaultdict(int)
        for ops in common:
            durations = {rank: op.began_s_ago - (op.ended_s_ago or 0.0) for rank, op in ops.items()}
            last_to_arrive = min(durations, key=lambda rank: durations[rank])
            times_last[last_to_arrive] += 1
            others = [seconds for rank, seconds in durations.items() if rank != last_to_arrive]
            waited_for_s[last_to_arrive] += min(others) - durations[last_to_arrive]
        rank = max(times_last, key=lambda each: (times_last[each], waited_for_s[each]))
        span = max(op.began_s_ago for op in common[0].values()) - min(
            op.ended_s_ago or 0.0 for op in common[-1].values()
        )
        if times_last[rank] >= 0.8 * len(common) and span > 0 and waited_for_s[rank] >= 0.25 * span:
            found.append(Straggler(key, rank, waited_for_s[rank], span, common[-1][rank]))
    return found


def format_shapes(op: CollectiveInfo) -> str:
    """Return the shapes of a rank's input tensors in words: `4x8`, `a number`, `4x8 and 3`."""
    texts = ["x".join(map(str, shape)) if shape else "a number" for shape in op.shapes]
    return " and ".join(texts) if texts else "nothing"


def name_group(op: CollectiveInfo, world: Ranks) -> str:
    """Return ` of <ranks>` for an operation's group; empty for the world, which is the default for readers."""
    if set(world) <= set(op.group_ranks):
        return ""
    return f" of {name_ranks(op.group_ranks)}"


def name_op(op: CollectiveInfo, world: Ranks) -> str:
    """Return an operation's name: `all_reduce #41`, `all_reduce #3 of ranks 0-1`, `send to rank 2`."""
    if op.op in POINT_TO_POINT:
        word = "to" if op.op == "send" else "from"
        return f"{op.op} {word} {'any rank' if op.peer is None else f'rank {op.peer}'}"
    if not op.seq:
        return op.op
    return f"{op.op} #{op.seq}{name_group(op, world)}"
