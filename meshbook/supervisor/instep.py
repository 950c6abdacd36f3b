"""Whether ranks are in step in their collectives after a call that did not end well, and which have certainly left a
call in which others go on. Pure: what ranks said of their positions in, verdicts out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import GroupPosition, Part, RankPosition


def positions_of(parts: Iterable[Part]) -> dict[int, RankPosition]:
    """What ranks answered to `AskPositions`; those that did not answer are not in it."""
    found = {}
    for part in parts:
        if part.outcome.status == "ok" and isinstance(part.outcome.answer, dict) and "groups" in part.outcome.answer:
            for rank in part.ranks:
                found[rank] = msgspec.convert(part.outcome.answer, RankPosition)
    return found


def out_of_step(positions: Mapping[int, RankPosition], ranks: Collection[int]) -> dict[str, str]:
    """The groups that must be formed anew before they are used, each with the reason in some words.

    Members of a group are in step if all have begun the same number of collectives, each send has its receive, and
    nothing is under way. A member that still runs something cannot be compared; then the group counts as out of step if
    the call used it.

    Args:
        positions: of the ranks that answered.
        ranks: those of the call that did not end well.
    """
    groups: dict[tuple[str, Ranks], dict[int, GroupPosition]] = {}
    for rank, position in positions.items():
        for group in position.groups:
            groups.setdefault((group.name, group.ranks), {})[rank] = group
    found: dict[str, str] = {}
    for (name, members), known in groups.items():
        moving = [rank for rank in members if rank not in positions or not positions[rank].at_rest]
        if moving:
            used = any(rank not in known or known[rank].moved for rank in members if rank in ranks)
            if used:
                found[name] = f"{name_ranks(moving)} had not come to rest when the call before ended badly"
        elif reason := _differing(members, known):
            found[name] = reason
    resting = [position for position in positions.values() if position.at_rest]
    if len(resting) == len(positions) and len({position.num_named for position in resting}) > 1:
        for name, members in groups:
            if len(members) == len(positions):
                found.setdefault(name, "ranks have made different numbers of process groups")
    return found


def _differing(members: Ranks, known: Mapping[int, GroupPosition]) -> str | None:
    if missing := [rank for rank in members if rank not in known]:
        return f"{name_ranks(missing)} did not make the group"
    if busy := [rank for rank in members if known[rank].num_open]:
        return f"collectives of {name_ranks(busy)} were under way when the call before ended badly"
    counts = {rank: known[rank].num_begun for rank in members}
    if len(set(counts.values())) > 1:
        least, most = min(counts, key=lambda rank: counts[rank]), max(counts, key=lambda rank: counts[rank])
        return (
            f"the call before ended badly, with {counts[most]} collectives on rank {most} and {counts[least]} on "
            f"rank {least}"
        )
    if len({known[rank].failed for rank in members}) > 1:
        return "a collective failed on some ranks and not on others"
    if any(known[rank].received_from_any for rank in members):
        sent = sum(sum(known[rank].sent.values()) for rank in members)
        received = sum(known[rank].received_from_any + sum(known[rank].received.values()) for rank in members)
        matched = sent == received
    else:
        matched = all(
            known[rank].sent.get(peer, 0) == known[peer].received.get(rank, 0)
            for rank in members
            for peer in {*known[rank].sent, *(other for other in members if rank in known[other].received)}
        )
    return None if matched else "the call before ended badly between a send and its receive"


def has_left(position: RankPosition, call: str) -> bool:
    """Whether a rank has certainly left a call: no other thread of it may still take part in collectives, and if it
    ended well, it has nothing under way and nothing else to do."""
    if position.call != call or position.may_join or not position.at_rest:
        return False
    return position.status != "ok" or (position.idle and not any(group.num_open for group in position.groups))
