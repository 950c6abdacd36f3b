"""How far this rank has come in the order of its collectives, for whoever compares it with other ranks; and whether a
collective can still be completed once a member has left the call.

Reads the ring and the groups' counters; knows nothing of how groups are made or broken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from meshbook.rank.ring import Collective, Label, Ring
from meshbook.wire.messages import ACTOR_THREAD, POINT_TO_POINT, GroupPosition, RankPosition


def groups_now(labels: Iterable[Label], ring: Ring, since: int) -> tuple[GroupPosition, ...]:
    """The position in each of these groups.

    Args:
        since: number in the ring of the last collective before the call that is asked about.
    """
    kept = ring.snapshot()
    forgotten = bool(kept) and kept[0].seq > since + 1  # the ring does not reach back to the call's begin
    return tuple(_position(label, kept, since, forgotten) for label in labels)


def _position(label: Label, kept: tuple[Collective, ...], since: int, forgotten: bool) -> GroupPosition:
    mine = [one for one in kept if one.label is label and one.epoch == label.epoch]
    failed = [one for one in mine if one.error is not None]
    transfers = dict(label.transfers)
    for one in failed:
        if one.op in POINT_TO_POINT:
            transfers[one.op == "send", one.peer] -= 1
    return GroupPosition(
        name=label.name,
        ranks=label.ranks,
        num_begun=label.num_begun,
        failed=tuple(one.group_seq for one in failed if one.op not in POINT_TO_POINT),
        sent={peer: count for (sends, peer), count in transfers.items() if sends and peer is not None},
        received={peer: count for (sends, peer), count in transfers.items() if not sends and peer is not None},
        received_from_any=transfers.get((False, None), 0),
        is_doubtful=label.is_doubtful,
        num_open=sum(one.t_end is None for one in mine),
        moved=forgotten or any(one.seq > since for one in mine),
    )


def may_join(ring: Ring) -> bool:
    """Whether a thread beside the main one may begin collectives: it did before, or it is an actor's."""
    return bool(ring.other_threads()) or any(
        thread.name.startswith(ACTOR_THREAD) for thread in threading.enumerate() if thread.is_alive()
    )


def is_hopeless(one: Collective, left: RankPosition, me: int) -> bool:
    """Whether a collective that is under way on rank `me` needs something of a rank that did not do it before it left
    the call."""
    transfer = one.op in POINT_TO_POINT
    if left.rank not in one.group_ranks or (transfer and one.peer != left.rank):
        return False
    group = next((g for g in left.groups if g.name == one.group and g.ranks == one.group_ranks), None)
    if group is None or group.is_doubtful:
        return True
    if not transfer:
        return one.group_seq > group.num_begun or one.group_seq in group.failed
    if one.op == "send":
        return one.pair_seq > group.received.get(me, 0) + group.received_from_any
    return one.pair_seq > group.sent.get(me, 0)


def is_hopeless_to_join(label: Label, left: RankPosition) -> bool:
    """Whether a group that is being made here needs a rank that left the call without making it."""
    return left.rank in label.ranks and all(g.name != label.name for g in left.groups)
