"""Findings about members of a group that call different things, or that call one collective too many. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from meshbook.diagnose import collectives
from meshbook.diagnose.collectives import Disagreement, group_key
from meshbook.diagnose.evidence import Evidence
from meshbook.diagnose.rank_activity import conjugate
from meshbook.diagnose.report import Finding, make_finding
from meshbook.diagnose.wording import activity_sentence, at_clause, capitalized_ranks, group_ranks_by, wait_lines
from meshbook.ids import name_ranks
from meshbook.wire.messages import POINT_TO_POINT


def find_disagreements(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    for disagreement in collectives.find_disagreements(evidence.waits, evidence.rings):
        members = set(disagreement.members)
        if not members <= explained:
            explained |= members
            yield _disagreement_finding(evidence, disagreement)


def _disagreement_finding(evidence: Evidence, disagreement: Disagreement) -> Finding:
    members, ops = disagreement.members, disagreement.ops
    guilty = disagreement.minority()
    waiting = {
        rank
        for rank, wait in evidence.waits.items()
        if rank in members or evidence.reachable_from(wait.for_ranks or (rank,)).intersection(members)
    }
    any_op = ops[members[0]]
    is_other_op = disagreement.kind == "different-collectives"
    lines = []
    for side_text, ranks in disagreement.sides.items():
        what = side_text if is_other_op else f"{any_op.op} with {side_text}"
        for at, those in group_ranks_by(ranks, lambda rank: evidence.op_location(rank, ops[rank])):
            lines.append(f"{name_ranks(those)}: {what}{at_clause(at)}")
    # A side is guilty as a whole, or not at all.
    sides = " and ".join(side_text for side_text, ranks in disagreement.sides.items() if ranks[0] in guilty)
    majority = next(side_text for side_text, ranks in disagreement.sides.items() if ranks[0] not in guilty)
    those = tuple(rank for rank in members if rank not in guilty)
    at = evidence.op_location(guilty[0], ops[guilty[0]])
    group = evidence.op_name(any_op)
    if is_other_op:
        number = f"as number {disagreement.seq}{group.partition(f'#{disagreement.seq}')[2]}"
        called_at = at_clause(evidence.op_location(those[0], ops[those[0]]))
        title = (
            f"{capitalized_ranks(guilty)} called {sides}{at_clause(at)} {number}, "
            f"where {name_ranks(those)} called {majority}{called_at}"
        )
    else:
        brought = f"{capitalized_ranks(guilty)} brought {sides} to {group}{at_clause(at)}"
        title = f"{brought}, where {name_ranks(those)} brought {majority}"
    return make_finding(evidence, disagreement.kind, guilty, title, at=at, others=waiting, lines=lines)


def find_ranks_alone_in_collectives(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    """Yield findings for ranks ahead of all others: these have ended, or are elsewhere together."""
    waits = {
        rank: wait
        for rank, wait in evidence.waits.items()
        if rank not in explained and wait.op.op not in POINT_TO_POINT and wait.op.seq
    }
    for _, ranks in group_ranks_by(waits, lambda rank: (group_key(waits[rank].op), waits[rank].op.seq)):
        wait = waits[ranks[0]]
        absent = wait.for_ranks
        if len(absent) < 2 * len(ranks) or not all(map(evidence.is_unblocked, absent)):
            continue
        if len({(evidence.activities[rank].kind, evidence.activities[rank].location) for rank in absent}) > 1:
            continue
        if any(evidence.has_moved(rank) or evidence.snapshots[rank].last_status == "error" for rank in absent):
            continue
        guilty = tuple(sorted(ranks))
        explained.update(absent)
        activity = evidence.activities[absent[0]]
        at = evidence.op_location(guilty[0], wait.op)
        they = "they" if len(absent) > 1 else "it"
        yield make_finding(
            evidence,
            "alone-in-collective",
            guilty,
            f"{capitalized_ranks(guilty)} {conjugate('waits', guilty)} in {evidence.op_name(wait.op)}{at_clause(at)}, "
            f"to which the other {len(absent)} ranks do not come: {they} {conjugate(activity.phrase, absent)}",
            at=at,
            others=evidence.waiters_of(guilty),
            lines=[*wait_lines(evidence, guilty)[:1], activity_sentence(evidence, absent)],
            sure=activity.kind in ("ended", "idle"),
        )
