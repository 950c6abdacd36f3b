"""Words for what ranks do: the clauses and the lines of evidence that findings are made of. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from meshbook.diagnose import snapshot_reader
from meshbook.diagnose.collectives import format_shapes, group_key
from meshbook.diagnose.evidence import Evidence
from meshbook.diagnose.rank_activity import conjugate, format_duration
from meshbook.diagnose.snapshot_reader import SourceLocation
from meshbook.diagnose.wait_sites import IN_DEBUGGER
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveInfo

K = TypeVar("K")

# Locations of ranks that are listed as evidence; further ones are counted.
MAX_LOCATIONS = 6


def group_ranks_by(ranks: Iterable[int], key: Callable[[int], K]) -> list[tuple[K, Ranks]]:
    """Group ranks by key, in order of the first rank of each group."""
    ranks_by_key: dict[K, list[int]] = {}
    for rank in ranks:
        ranks_by_key.setdefault(key(rank), []).append(rank)
    return [(each, tuple(those)) for each, those in ranks_by_key.items()]


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def capitalized_ranks(ranks: Sequence[int]) -> str:
    """Return `Ranks 0-2`, for the beginning of a sentence."""
    return capitalized(name_ranks(ranks))


def at_clause(at: object) -> str:
    """Return ` at cell 7, line 3`; empty if the location is unknown."""
    return f" at {at}" if at is not None else ""


def parenthesized(at: SourceLocation | None) -> str:
    return f" ({at})" if at is not None else ""


def ranks_do(ranks: Sequence[int], phrase: str, at: object) -> str:
    """Return `ranks 1-2 sleep at cell 7, line 3`."""
    return f"{name_ranks(ranks)} {conjugate(phrase, ranks)}{at_clause(at)}"


def where_others_wait(evidence: Evidence, others: Collection[int], roots: Ranks, lead: str = ", where ") -> str:
    """Return `, where ranks 0-2 wait (cell 7, line 3)` for the ranks that wait for the roots.

    Of `others`, those that wait directly are named; if there are none, all.
    """
    direct = [rank for rank in others if rank in evidence.waits and set(roots) & set(evidence.waits[rank].for_ranks)]
    shown = sorted(direct or others)
    if not shown:
        return ""
    wait = evidence.waits.get(shown[0])
    if wait is None:
        return f"{lead}{name_ranks(shown)} {conjugate('waits', shown)}"
    same = [
        rank
        for rank in shown
        if rank in evidence.waits and evidence.op_name(evidence.waits[rank].op) == evidence.op_name(wait.op)
    ]
    at = evidence.op_location(same[0], wait.op)
    inside = f" in {evidence.op_name(wait.op)}" if lead != ", where " else ""
    return f"{lead}{name_ranks(same)} {conjugate('waits', same)}{inside}{parenthesized(at)}"


def wait_lines(evidence: Evidence, ranks: Iterable[int]) -> list[str]:
    def key(rank: int) -> tuple[str, SourceLocation | None, Ranks]:
        wait = evidence.waits[rank]
        return evidence.op_name(wait.op), evidence.op_location(rank, wait.op), wait.for_ranks

    lines = []
    for (what, at, for_ranks), those in group_ranks_by(sorted({*ranks} & evidence.waits.keys()), key):
        since = max(evidence.waits[rank].op.began_s_ago for rank in those)
        held = for_ranks and all(evidence.activities[rank].phrase == IN_DEBUGGER for rank in for_ranks)
        whom = f", {'held by the debugger on' if held else 'for'} {name_ranks(for_ranks)}" if for_ranks else ""
        lines.append(
            f"{name_ranks(those)} {conjugate('waits', those)} in {what}{at_clause(at)}{whom}"
            f"{f', since {format_duration(since)}' if since else ''}"
        )
    return lines[: MAX_LOCATIONS + 1]


def activity_sentence(evidence: Evidence, ranks: Ranks) -> str:
    """Return `ranks 1-2 sleep at cell 7, line 3` for ranks that all do what the first of them does."""
    activity = evidence.activities[ranks[0]]
    return ranks_do(ranks, activity.phrase, activity.location)


def snapshot_lines(evidence: Evidence, ranks: Ranks) -> list[str]:
    """Return evidence in the snapshots of these ranks other than their location."""
    lines: list[str] = []
    for rank in ranks[:4]:
        prefix = f"rank {rank}: " if len(ranks) > 1 else ""
        lines += [f"{prefix}{line}" for line in evidence.activities[rank].evidence]
        snapshot = evidence.snapshots[rank]
        op = snapshot_reader.current_op(snapshot)
        # A snapshot taken from outside knows operations only as of the last heartbeat.
        if op is not None and snapshot.source == "inside" and rank not in evidence.waits:
            lines.append(f"{prefix}its {evidence.op_name(op)} is open since {format_duration(op.began_s_ago)}")
    if len(ranks) > 4:
        lines.append(f"and {len(ranks) - 4} more ranks alike")
    return lines


def collective_count_lines(evidence: Evidence, op: CollectiveInfo) -> list[str]:
    """Return how many collectives of a group each member began; empty if all counts are equal."""
    last_seq = evidence.rings.last_seq.get(group_key(op), {})
    members = [rank for rank in op.group_ranks if rank in evidence.snapshots]
    lines = [
        f"{name_ranks(those)} made {count} {'collective' if count == 1 else 'collectives'} of the group"
        for count, those in group_ranks_by(members, lambda rank: last_seq.get(rank, 0))
    ]
    return lines if len(lines) > 1 and op.seq else []


def running_time_clause(evidence: Evidence, ranks: Ranks) -> str:
    running = [evidence.snapshots[rank].running_s for rank in ranks if rank in evidence.snapshots]
    longest = max((value for value in running if value is not None), default=None)
    return f", {format_duration(longest)} into the cell" if longest else ""


def location_lines(evidence: Evidence, ranks: Ranks) -> list[str]:
    by_activity = group_ranks_by(
        ranks, lambda rank: (evidence.activities[rank].phrase, evidence.activities[rank].location)
    )
    by_activity.sort(key=lambda pair: -len(pair[1]))
    shown = by_activity[:MAX_LOCATIONS]
    lines = [ranks_do(those, phrase, at) for (phrase, at), those in shown]
    if len(by_activity) > MAX_LOCATIONS:
        lines.append(f"and {len(by_activity) - MAX_LOCATIONS} more places")
    return lines


def progress_lines(evidence: Evidence, ranks: Ranks) -> list[str]:
    """Return evidence of progress: collectives since the earlier snapshots, step rates, the open collective."""
    lines = []
    pairs = [(evidence.snapshots[rank], evidence.earlier[rank]) for rank in ranks if rank in evidence.earlier]
    made = sum(max(0, now.num_collectives - before.num_collectives) for now, before in pairs)
    if made:
        lines.append(f"{made} collectives were called between the two looks")
    elif pairs and all(snapshot_reader.has_moved(before, now) is False for now, before in pairs):
        lines.append("no rank left its line between the two looks")
    rates = [now.health.steps_per_s for now in map(evidence.snapshots.__getitem__, ranks) if now.health is not None]
    known = [rate for rate in rates if rate]
    if known:
        lines.append(
            f"{min(known):.3g} to {max(known):.3g} steps per second"
            if len(known) > 1
            else f"{known[0]:.3g} steps per second"
        )
    waits = [evidence.waits[rank] for rank in ranks if rank in evidence.waits]
    complete = [wait.op for wait in waits if wait.op.op not in POINT_TO_POINT and not wait.for_ranks]
    if complete:
        op = max(complete, key=lambda op: op.began_s_ago)
        lines.append(
            f"all members are in {evidence.op_name(op)} ({format_shapes(op)} {op.dtype}), "
            f"since {format_duration(op.began_s_ago)}"
        )
    return lines
