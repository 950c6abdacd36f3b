"""Find process groups whose ranks are out of step in their collectives after a failed call.

Also decides which ranks have certainly left a call in which others continue. Pure: takes the positions that ranks
reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import GroupPosition, OutcomeGroup, RankPosition


def collect_positions(parts: Iterable[OutcomeGroup]) -> dict[int, RankPosition]:
    """Return the ranks' replies to `QueryPositions`, without the ranks that did not reply."""
    found = {}
    for part in parts:
        if part.outcome.status == "ok" and isinstance(part.outcome.reply, dict) and "groups" in part.outcome.reply:
            for rank in part.ranks:
                found[rank] = msgspec.convert(part.outcome.reply, RankPosition)
    return found


def find_desynced_groups(positions: Mapping[int, RankPosition], ranks: Collection[int]) -> dict[str, str]:
    """Return the groups that must be re-formed before further use, each with the reason.

    Members of a group are in step if all have started the same number of collectives, each send has its receive, and
    nothing is in flight. A member that still runs something cannot be compared; then the group counts as out of step if
    the call used it.

    Args:
        positions: of the ranks that replied.
        ranks: those of the failed call.
    """
    groups: dict[tuple[str, Ranks], dict[int, GroupPosition]] = {}
    for rank, position in positions.items():
        for group in position.groups:
            groups.setdefault((group.name, group.ranks), {})[rank] = group
    found: dict[str, str] = {}
    for (name, members), group_by_rank in groups.items():
        running = [rank for rank in members if rank not in positions or not positions[rank].is_held_or_idle]
        if running:
            was_used = any(
                rank not in group_by_rank or group_by_rank[rank].has_new_collectives
                for rank in members
                if rank in ranks
            )
            if was_used:
                found[name] = f"{name_ranks(running)} had not come to rest when the call before ended badly"
        elif reason := _describe_desync(members, group_by_rank):
            found[name] = reason
    quiescent = [position for position in positions.values() if position.is_held_or_idle]
    if len(quiescent) == len(positions) and len({position.num_groups_created for position in quiescent}) > 1:
        for name, members in groups:
            if len(members) == len(positions):
                found.setdefault(name, "ranks have made different numbers of process groups")
    return found


def _describe_desync(members: Ranks, group_by_rank: Mapping[int, GroupPosition]) -> str | None:
    if missing := [rank for rank in members if rank not in group_by_rank]:
        return f"{name_ranks(missing)} did not make the group"
    if in_flight := [rank for rank in members if group_by_rank[rank].num_in_flight]:
        return f"collectives of {name_ranks(in_flight)} were under way when the call before ended badly"
    counts = {rank: group_by_rank[rank].num_started for rank in members}
    if len(set(counts.values())) > 1:
        least, most = min(counts, key=lambda rank: counts[rank]), max(counts, key=lambda rank: counts[rank])
        return (
            f"the call before ended badly, with {counts[most]} collectives on rank {most} and {counts[least]} on "
            f"rank {least}"
        )
    if len({group_by_rank[rank].failed for rank in members}) > 1:
        return "a collective failed on some ranks and not on others"
    if any(group_by_rank[rank].received_from_any for rank in members):
        sent = sum(sum(group_by_rank[rank].sent.values()) for rank in members)
        received = sum(
            group_by_rank[rank].received_from_any + sum(group_by_rank[rank].received.values()) for rank in members
        )
        is_matched = sent == received
    else:
        is_matched = all(
            group_by_rank[rank].sent.get(peer, 0) == group_by_rank[peer].received.get(rank, 0)
            for rank in members
            for peer in {
                *group_by_rank[rank].sent,
                *(other for other in members if rank in group_by_rank[other].received),
            }
        )
    return None if is_matched else "the call before ended badly between a send and its receive"


def has_left(position: RankPosition) -> bool:
    """Whether a rank whose part of the call that it was asked about has ended has certainly left that call.

    No other thread of it may still take part in collectives, and if it ended well, it has nothing in flight and is
    idle. A rank whose part ended before it began, because a Stop took the call out of its queue, never begins it.
    """
    if position.has_other_collective_threads or not position.is_held_or_idle:
        return False
    if not position.has_begun:
        return True
    if not position.status:
        return False
    return position.status != "ok" or (position.is_idle and not any(group.num_in_flight for group in position.groups))
