"""Findings about ranks at the end of the wait chains: others wait for them, and they wait for nobody. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from meshbook.diagnose.collectives import RankWait, Straggler, group_key, name_group
from meshbook.diagnose.evidence import MIN_LOOP_S, STABLE_S, UNBLOCKED_KINDS, Evidence
from meshbook.diagnose.kinds import CERTAIN_KINDS
from meshbook.diagnose.rank_activity import conjugate, format_duration
from meshbook.diagnose.report import Finding, make_finding
from meshbook.diagnose.wording import (
    activity_sentence,
    at_clause,
    capitalized_ranks,
    collective_count_lines,
    group_ranks_by,
    snapshot_lines,
    wait_lines,
    where_others_wait,
)
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT


def find_root_causes(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    blamed: dict[int, set[int]] = defaultdict(set)
    for rank, wait in evidence.waits.items():
        if rank in explained:
            continue
        reached = evidence.reachable_from(wait.for_ranks)
        if reached & explained:  # it waits for ranks that are blocked by something already reported
            explained.add(rank)
            continue
        for root in reached - evidence.waits.keys():
            blamed[root].add(rank)
    # Ranks that are at the same location for the same reason share one finding.
    causes = {root: _classify(evidence, root) for root in sorted(blamed)}
    by_cause = group_ranks_by(
        causes, lambda root: (*causes[root], evidence.activities[root].phrase, evidence.activities[root].location)
    )
    for (kind, sure, _, _), roots in by_cause:
        if kind == "slow":  # it makes progress, and so do the ranks that wait for it
            continue
        waiting = set().union(*(blamed[root] for root in roots))
        explained.update(roots, waiting)
        yield _root_cause_finding(evidence, kind, roots, waiting, sure)


def _classify(evidence: Evidence, root: int) -> tuple[str, bool]:
    """Return the finding's kind for a rank that others wait for, and whether that is sure."""
    activity, direct = evidence.activities[root], evidence.direct_waits(root)
    has_earlier = root in evidence.earlier
    waited = max((wait.op.began_s_ago for wait in direct), default=0.0)
    if activity.kind in CERTAIN_KINDS:
        return activity.kind, activity.sure
    if activity.kind in ("ended", "idle"):
        return _classify_ended(evidence, root, direct), True
    if evidence.has_moved(root) and not evidence.is_looping(root):
        is_straggler = any(straggler.rank == root for straggler in evidence.stragglers)
        return ("straggler" if is_straggler or waited >= STABLE_S else "slow"), True
    if activity.kind not in UNBLOCKED_KINDS:
        return activity.kind, activity.sure and (has_earlier or waited >= STABLE_S)
    if activity.kind == "compute" and evidence.is_looping(root) and evidence.is_busy(root):
        return "python-loop", waited >= MIN_LOOP_S
    # One sample cannot tell a slow rank from a stalled one.
    return "missing-from-collective", has_earlier


def _classify_ended(evidence: Evidence, root: int, direct: Sequence[RankWait]) -> str:
    """Return the finding's kind for a rank that runs nothing while others wait for it."""
    if evidence.has_failed(root):
        return "raised-before-collective"
    if any(not wait.op.seq for wait in direct):
        return "group-made-by-some"
    if direct and all(wait.op.op in POINT_TO_POINT for wait in direct):
        return "send-without-receive" if direct[0].op.op == "send" else "receive-without-send"
    return "left-early"


def _root_cause_finding(evidence: Evidence, kind: str, roots: Ranks, waiting: Collection[int], sure: bool) -> Finding:
    activity, others = evidence.activities[roots[0]], tuple(sorted(set(waiting) - set(roots)))
    direct = evidence.direct_waits(roots[0])
    if kind in ("send-without-receive", "receive-without-send"):
        return _unmatched_transfer_finding(evidence, kind, roots, direct, others)
    if kind == "group-made-by-some":
        return partial_group_finding(evidence, {wait.rank for wait in direct}, roots, others)
    lines = [*snapshot_lines(evidence, roots), *wait_lines(evidence, others)]
    at, missed_clause = activity.location, ""
    if direct:
        op = direct[0].op
        missed = f"{evidence.op_name(op)}{where_others_wait(evidence, others, roots)}"
        missed_clause = f" and {conjugate('has', roots)} not come to {missed}"
        if activity.kind in ("ended", "idle") and not evidence.has_failed(roots[0]):
            at = evidence.op_location(direct[0].rank, op)
            missed_clause = f" without coming to {missed}"
            lines += collective_count_lines(evidence, op)
        elif activity.kind == "ended":
            missed_clause = f" before coming to {missed}"
    does = conjugate(activity.phrase, roots)
    if kind == "straggler":
        lines += [_straggler_line(each) for each in evidence.stragglers if each.rank in roots]
        does = f"{conjugate('is', roots)} late but {conjugate('moves', roots)}"
        missed_clause = where_others_wait(evidence, others, roots, lead=", while ")
    elif kind == "python-loop":
        does = f"{conjugate('runs', roots)} in a loop"
    title = f"{capitalized_ranks(roots)} {does}{at_clause(activity.location)}{missed_clause}"
    return make_finding(evidence, kind, roots, title, at=at, others=others, lines=lines, sure=sure)


def _straggler_line(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} came last to nearly every {straggler.op.op}: the others waited "
        f"{format_duration(straggler.waited_s)} of the last {format_duration(straggler.span_s)} for it"
    )


def _unmatched_transfer_finding(
    evidence: Evidence, kind: str, roots: Ranks, direct: Sequence[RankWait], others: Ranks
) -> Finding:
    """Return the finding for a send or receive whose peer has ended or is idle, unless it names the wrong peer."""
    wrong = wrong_peer_finding(evidence, {wait.rank for wait in direct} | set(others))
    if wrong is not None:
        return wrong
    wait, activity = direct[0], evidence.activities[roots[0]]
    guilty = tuple(sorted(each.rank for each in direct if group_key(each.op) == group_key(wait.op)))
    at = evidence.op_location(wait.rank, wait.op)
    word = "recv" if wait.op.op == "send" else "send"
    return make_finding(
        evidence,
        kind,
        guilty,
        f"{capitalized_ranks(guilty)} {conjugate('waits', guilty)} in {evidence.op_name(wait.op)}{at_clause(at)}, "
        f"but {name_ranks(roots)} {conjugate(activity.phrase, roots)} without a matching {word}",
        at=at,
        others=others,
        lines=[*wait_lines(evidence, (*guilty, *others)), activity_sentence(evidence, roots)],
    )


def partial_group_finding(evidence: Evidence, making: Collection[int], absent: Ranks, others: Iterable[int]) -> Finding:
    """Return the finding for a process group that only some of its members create."""
    makers = tuple(sorted(making))
    guilty = makers if len(makers) <= len(absent) else absent
    made_at = evidence.activities[makers[0]].location
    of_members = name_group(evidence.waits[makers[0]].op, evidence.world_ranks)
    return make_finding(
        evidence,
        "group-made-by-some",
        guilty,
        f"{capitalized_ranks(makers)} {conjugate('makes', makers)} a process group{of_members}{at_clause(made_at)}, "
        f"which takes all members, and {activity_sentence(evidence, absent)} instead",
        at=evidence.activities[guilty[0]].location or made_at,
        others={*makers, *others, *absent} & evidence.waits.keys(),
        lines=[activity_sentence(evidence, makers), activity_sentence(evidence, absent)],
    )


def wrong_peer_finding(evidence: Evidence, ranks: Iterable[int]) -> Finding | None:
    """Return a finding for a send and a receive that would match if one of them named the other's rank."""
    transfers = {
        rank: wait.op
        for rank in sorted(ranks)
        if (wait := evidence.waits.get(rank)) is not None and wait.op.op in POINT_TO_POINT and wait.for_ranks
    }
    sends = {rank: op for rank, op in transfers.items() if op.op == "send"}
    receives = {rank: op for rank, op in transfers.items() if op.op == "recv" and op.peer is not None}
    for sender, send in sends.items():
        for receiver, recv in receives.items():
            if sender == receiver or (send.peer == receiver) == (recv.peer == sender):
                continue
            guilty, meant = (receiver, sender) if send.peer == receiver else (sender, receiver)
            own, other = transfers[guilty], transfers[meant]
            at = evidence.op_location(guilty, own)
            involved = set(transfers) | evidence.waiters_of((guilty,))
            return make_finding(
                evidence,
                "wrong-peer",
                (guilty,),
                f"Rank {guilty} waits in {evidence.op_name(own)}{at_clause(at)}, but it is rank {meant} "
                f"that waits for it, in {evidence.op_name(other)}{at_clause(evidence.op_location(meant, other))}",
                at=at,
                others=involved,
                lines=wait_lines(evidence, sorted(involved)),
            )
    return None
