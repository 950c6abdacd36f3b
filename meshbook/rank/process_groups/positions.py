"""The position of this rank in the order of its collectives, for comparison with other ranks.

Also determines whether a collective can still complete once a member has left the call. Reads the ring and the groups'
counters; does not depend on how groups are formed or aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from meshbook.rank.process_groups.ring import Collective, CollectiveRing, GroupLabel
from meshbook.wire.messages import (
    ACTOR_THREAD_PREFIX,
    POINT_TO_POINT,
    SAME_SHAPE_OPS,
    CollectiveCall,
    GroupPosition,
    RankPosition,
)

# How many collectives of a call a rank reports to those that wait for it.
_MAX_REPORTED = 16


def group_positions(labels: Iterable[GroupLabel], ring: CollectiveRing, since: int) -> tuple[GroupPosition, ...]:
    """Return the position in each of these groups.

    Args:
        since: seq of the last collective before the call in question.
    """
    recorded = ring.snapshot()
    # the ring does not reach back to the start of the call
    is_truncated = bool(recorded) and recorded[0].seq > since + 1
    return tuple(_group_position(label, recorded, since, is_truncated) for label in labels)


def _group_position(
    label: GroupLabel, recorded: tuple[Collective, ...], since: int, is_truncated: bool
) -> GroupPosition:
    of_group = [
        collective for collective in recorded if collective.label is label and collective.generation == label.generation
    ]
    failed = [collective for collective in of_group if collective.error is not None]
    p2p_counts = dict(label.p2p_counts)
    for collective in failed:
        if collective.op in POINT_TO_POINT:
            p2p_counts[collective.op == "send", collective.peer] -= 1
    new = [collective for collective in of_group if collective.seq > since]
    return GroupPosition(
        name=label.name,
        ranks=label.ranks,
        num_started=label.num_begun,
        failed=tuple(collective.group_seq for collective in failed if collective.op not in POINT_TO_POINT),
        sent={peer: count for (is_send, peer), count in p2p_counts.items() if is_send and peer is not None},
        received={peer: count for (is_send, peer), count in p2p_counts.items() if not is_send and peer is not None},
        received_from_any=p2p_counts.get((False, None), 0),
        is_uncertain=label.is_doubtful,
        num_in_flight=sum(collective.t_end is None for collective in of_group),
        has_new_collectives=is_truncated or bool(new),
        new_collectives=describe_calls(new),
    )


def describe_calls(collectives: Iterable[Collective]) -> tuple[CollectiveCall, ...]:
    """Return what is the same of the last of these on all ranks that run the same code, without sends and receives."""
    reported = [collective for collective in collectives if collective.op not in POINT_TO_POINT]
    found = []
    for collective in reported[-_MAX_REPORTED:]:
        line, caller = collective.line, collective.caller_line
        inputs = zip(collective.shapes, collective.dtypes, strict=True) if collective.op in SAME_SHAPE_OPS else ()
        found.append(
            CollectiveCall(
                collective.group_seq,
                collective.op,
                "" if line is None else line.file,
                0 if line is None else line.line,
                "" if caller is None else caller.file,
                0 if caller is None else caller.line,
                ", ".join(f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}" for shape, dtype in inputs),
            )
        )
    return tuple(found)


class DifferentCall(NamedTuple):
    """The first collective of a group that two ranks called at different lines, or with different inputs.

    Attributes:
        is_first: False: it is the first that both have reported, and there were others before.
    """

    own: CollectiveCall
    other: CollectiveCall
    is_first: bool


def first_difference(own: Iterable[CollectiveCall], group: GroupPosition) -> DifferentCall | None:
    """Compare with what a departed rank called in a group in this call; None: nothing is known that differs."""
    others = {call.seq: call for call in group.new_collectives}
    common = [(call, others[call.seq]) for call in own if call.seq in others]
    for index, (call, other) in enumerate(common):
        if call != other:
            return DifferentCall(call, other, is_first=index > 0 or len(others) < _MAX_REPORTED)
    return None


def has_other_collective_threads(ring: CollectiveRing) -> bool:
    """Whether a thread beside the main one may begin collectives: it has before, or it is an actor's."""
    return bool(ring.other_threads()) or any(
        thread.name.startswith(ACTOR_THREAD_PREFIX) for thread in threading.enumerate() if thread.is_alive()
    )


def can_never_complete(collective: Collective, left: RankPosition, rank: int) -> bool:
    """Whether a collective in flight on rank `rank` needs an operation that a departed rank did not do."""
    is_p2p = collective.op in POINT_TO_POINT
    if left.rank not in collective.group_ranks or (is_p2p and collective.peer != left.rank):
        return False
    group = _same_group(collective, left)
    if group is None or group.is_uncertain:
        return True
    if not is_p2p:
        return collective.group_seq > group.num_started or has_failed_in(collective, left)
    if collective.op == "send":
        return collective.pair_seq > group.received.get(rank, 0) + group.received_from_any
    return collective.pair_seq > group.sent.get(rank, 0)


def has_failed_in(collective: Collective, left: RankPosition) -> bool:
    """Whether a departed rank began a collective, not a send or receive, and failed in it."""
    group = _same_group(collective, left)
    return group is not None and collective.op not in POINT_TO_POINT and collective.group_seq in group.failed


def _same_group(collective: Collective, left: RankPosition) -> GroupPosition | None:
    return next((g for g in left.groups if g.name == collective.group and g.ranks == collective.group_ranks), None)


def can_never_form(label: GroupLabel, left: RankPosition) -> bool:
    """Whether a group being formed here needs a rank that left the call without forming it."""
    return left.rank in label.ranks and all(g.name != label.name for g in left.groups)
