"""Findings about ranks that nobody waits for: blocked, slow, in a loop, late, or idle. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from meshbook.diagnose import snapshot_reader
from meshbook.diagnose.collectives import format_shapes
from meshbook.diagnose.evidence import MIN_LOOP_S, UNBLOCKED_KINDS, Evidence
from meshbook.diagnose.kinds import CERTAIN_KINDS, KINDS
from meshbook.diagnose.rank_activity import conjugate, format_duration
from meshbook.diagnose.report import Finding, make_finding
from meshbook.diagnose.snapshot_reader import SourceLocation
from meshbook.diagnose.source_files import sanitize_line
from meshbook.diagnose.wording import (
    activity_sentence,
    at_clause,
    capitalized,
    group_ranks_by,
    location_lines,
    progress_lines,
    ranks_do,
    running_time_clause,
    snapshot_lines,
)
from meshbook.ids import Ranks, name_ranks


def find_blocked_ranks(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    activities = evidence.activities
    blocked = [rank for rank in activities if rank not in explained and _is_blocked(evidence, rank)]
    by_activity = group_ranks_by(
        blocked, lambda rank: (activities[rank].kind, activities[rank].phrase, activities[rank].location)
    )
    for (kind, phrase, at), ranks in by_activity:
        lines = snapshot_lines(evidence, ranks)
        if kind == "shape-mismatch":
            at, inputs = _last_collective_inputs(evidence, ranks)
            lines = [*inputs, *lines]
        yield make_finding(
            evidence,
            kind,
            ranks,
            f"{capitalized(ranks_do(ranks, phrase, at))}{running_time_clause(evidence, ranks)}",
            at=at,
            lines=lines,
            sure=activities[ranks[0]].sure and (kind in CERTAIN_KINDS or bool(evidence.earlier)),
        )


def _is_blocked(evidence: Evidence, rank: int) -> bool:
    kind = evidence.activities[rank].kind
    if rank in evidence.waits or kind in UNBLOCKED_KINDS or kind not in KINDS:
        return False
    return kind in CERTAIN_KINDS or not evidence.has_moved(rank)


def _last_collective_inputs(evidence: Evidence, dead: Ranks) -> tuple[SourceLocation | None, list[str]]:
    """Return where surviving ranks called their last collective, and a line for each distinct input to it."""
    ops = {
        rank: op
        for rank, snapshot in evidence.snapshots.items()
        if rank not in dead and (op := snapshot_reader.last_collective(snapshot)) is not None
    }
    at_by_rank = {rank: evidence.op_location(rank, op) for rank, op in ops.items()}
    inputs = {rank: f"{format_shapes(op)} {op.dtype} to {evidence.op_name(op)}" for rank, op in ops.items()}
    lines = [
        f"{name_ranks(those)} brought {what}{at_clause(at)}"
        for (what, at), those in group_ranks_by(ops, lambda rank: (inputs[rank], at_by_rank[rank]))
    ]
    return next(iter(at_by_rank.values()), None), lines


def find_latecomers(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    for _, rank, waited, span, op in evidence.stragglers:
        if rank not in evidence.snapshots or rank in explained or evidence.snapshots[rank].call is None:
            continue
        others = tuple(other for other in op.group_ranks if other != rank)
        op_at = evidence.op_location(rank, op)
        yield make_finding(
            evidence,
            "straggler",
            (rank,),
            f"Rank {rank} comes last to nearly every {op.op}{at_clause(op_at)}: "
            f"{name_ranks(others)} waited {format_duration(waited)} of the last {format_duration(span)} for it",
            at=evidence.activities[rank].location or op_at,
            others=others,
            lines=[activity_sentence(evidence, (rank,))],
        )


def find_python_loops(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    at_by_rank = {
        rank: at for rank in _running_ranks(evidence, explained) if (at := _loop_location(evidence, rank)) is not None
    }
    for _, ranks in group_ranks_by(at_by_rank, lambda rank: (at_by_rank[rank].file, at_by_rank[rank].function)):
        at = at_by_rank[ranks[0]]
        yield make_finding(
            evidence,
            "python-loop",
            ranks,
            f"{capitalized(name_ranks(ranks))} {conjugate('computes', ranks)} in the same code{at_clause(at)}, "
            f"without a collective or a step{running_time_clause(evidence, ranks)}",
            at=at,
            lines=location_lines(evidence, ranks),
            sure=False,
        )


def _loop_location(evidence: Evidence, rank: int) -> SourceLocation | None:
    """Return the line at which a rank runs in a loop of Python code; None if it does not."""
    activity = evidence.activities[rank]
    if activity.phrase != "computes" or not evidence.is_looping(rank) or not evidence.is_busy(rank):
        return None  # perhaps in a long call of a library
    since_collective_s = snapshot_reader.since_last_collective_s(evidence.snapshots[rank])
    return activity.location if since_collective_s >= MIN_LOOP_S else None


def find_slow_ranks(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    ranks = _running_ranks(evidence, explained)
    if not ranks:
        return
    first = evidence.snapshots[ranks[0]]
    activity = evidence.activities[ranks[0]]
    # Ranks that ended something else, such as operations on remote tensors, never ran this cell.
    ended = [
        rank
        for rank, each in evidence.activities.items()
        if each.kind == "ended" and evidence.snapshots[rank].last_cell in (None, first.cell)
    ]
    only = f", which {name_ranks(ended)} {conjugate('has', ended)} ended" if ended else ""
    does = activity_sentence(evidence, ranks)
    if len({(evidence.activities[rank].kind, evidence.activities[rank].location) for rank in ranks}) > 1:
        does = ranks_do(ranks, "is at different places", None) + f" of {sanitize_line(first.cell or 'a call', 80)}"
    yield make_finding(
        evidence,
        "slow",
        ranks,
        f"Nothing is wrong that can be seen: {does}{running_time_clause(evidence, ranks)}{only}",
        at=activity.location,
        lines=[*location_lines(evidence, ranks), *progress_lines(evidence, ranks)],
        sure=bool(evidence.earlier),
    )


def _running_ranks(evidence: Evidence, explained: set[int]) -> Ranks:
    return tuple(
        rank
        for rank, activity in evidence.activities.items()
        if rank not in explained and activity.kind not in ("ended", "idle")
    )


def find_idleness(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    ranks = evidence.world_ranks
    if not ranks:
        yield make_finding(evidence, "idle", (), "No rank is known", lines=["no snapshot was taken"])
        return
    ended = {rank: activity for rank, activity in evidence.activities.items() if activity.kind == "ended"}
    by_activity = group_ranks_by(ended, lambda rank: (ended[rank].phrase, ended[rank].location))
    lines = [ranks_do(those, phrase, at) for (phrase, at), those in by_activity]
    yield make_finding(
        evidence, "idle", ranks, f"Nothing runs: {ranks_do(ranks, 'waits for a cell', None)}", lines=lines
    )
