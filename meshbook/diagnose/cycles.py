"""Findings about ranks that wait for each other in a cycle. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import structs

from meshbook.diagnose.collectives import group_key
from meshbook.diagnose.evidence import STABLE_S, Evidence
from meshbook.diagnose.rank_activity import conjugate
from meshbook.diagnose.report import Finding, make_finding
from meshbook.diagnose.root_causes import partial_group_finding, wrong_peer_finding
from meshbook.diagnose.wording import at_clause, capitalized, capitalized_ranks, group_ranks_by, wait_lines
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveInfo


def find_cycles(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    reached = {
        rank: evidence.reachable_from(wait.for_ranks)
        for rank, wait in evidence.waits.items()
        if rank not in explained and wait.for_ranks
    }
    # A chain that ends at a rank without a wait is no cycle. Such an end is also a collective that all members have
    # begun.
    left = {
        rank
        for rank, ranks in reached.items()
        if all(other in evidence.waits and evidence.waits[other].for_ranks for other in ranks)
    }
    while left:
        cycle = min((reached[rank] for rank in left), key=lambda ranks: (len(ranks), sorted(ranks)))
        involved = cycle | {rank for rank in left if reached[rank] & cycle}
        left -= involved
        if any(evidence.has_moved(rank) for rank in cycle):
            continue
        explained |= involved
        finding = _cycle_finding(evidence, tuple(sorted(cycle)), tuple(sorted(involved)))
        stable = min(evidence.waits[rank].op.began_s_ago for rank in cycle) >= STABLE_S
        yield structs.replace(finding, sure=stable or bool(evidence.earlier))


def _cycle_finding(evidence: Evidence, cycle: Ranks, involved: Ranks) -> Finding:
    ops = {rank: evidence.waits[rank].op for rank in cycle}
    transfers = {rank: op for rank, op in ops.items() if op.op in POINT_TO_POINT}
    if making := {rank for rank, op in ops.items() if not op.seq and rank not in transfers}:
        return partial_group_finding(evidence, making, tuple(rank for rank in cycle if rank not in making), involved)
    if (wrong := wrong_peer_finding(evidence, cycle)) is not None:
        return wrong
    if len(transfers) == len(ops) and len({op.op for op in ops.values()}) == 1:
        return _transfer_deadlock(evidence, ops, involved)
    if transfers:
        return _unmatched_transfers(evidence, transfers, cycle, involved)
    return _crossed_collectives(evidence, ops, involved)


def _transfer_deadlock(evidence: Evidence, ops: Mapping[int, CollectiveInfo], involved: Ranks) -> Finding:
    """Return the finding for ranks that all send first, or all receive first."""
    cycle = tuple(ops)
    first = ops[cycle[0]]
    kind, act, to = ("send-deadlock", "send", "to") if first.op == "send" else ("receive-deadlock", "receive", "from")
    at = evidence.op_location(cycle[0], first)
    ring = " and ".join(f"rank {rank} waits to {act} {to} rank {op.peer}" for rank, op in list(ops.items())[:4])
    more = ", and so on round" if len(ops) > 4 else ""
    title = f"{capitalized_ranks(cycle)} all {act} first{at_clause(at)}: {ring}{more}"
    return make_finding(evidence, kind, cycle, title, at=at, others=involved, lines=wait_lines(evidence, involved))


def _unmatched_transfers(
    evidence: Evidence, transfers: Mapping[int, CollectiveInfo], cycle: Ranks, involved: Ranks
) -> Finding:
    """Return the finding for a send or receive whose peer waits for something else."""
    rank, op = next(iter(transfers.items()))
    kind = "send-without-receive" if op.op == "send" else "receive-without-send"
    peer = op.peer if op.peer is not None else next(other for other in cycle if other not in transfers)
    activity = evidence.activities[peer]
    at = evidence.op_location(rank, op)
    waits_for = f" for {name_ranks(evidence.waits[peer].for_ranks)}" if peer in evidence.waits else ""
    does = f"{activity.phrase}{waits_for}{at_clause(activity.location)}"
    title = f"Rank {rank} waits in {evidence.op_name(op)}{at_clause(at)}, but rank {peer} {does}"
    lines = wait_lines(evidence, involved)
    return make_finding(evidence, kind, tuple(transfers), title, at=at, others=involved, lines=lines)


def _crossed_collectives(evidence: Evidence, ops: Mapping[int, CollectiveInfo], involved: Ranks) -> Finding:
    """Return the finding for collectives of one or several groups that ranks entered in different orders."""
    sides = group_ranks_by(ops, lambda rank: (group_key(ops[rank]), ops[rank].seq))
    ordered = sorted((ranks for _, ranks in sides), key=lambda ranks: (len(ranks), [-rank for rank in ranks]))
    guilty = ordered[0] if len(ordered[0]) < len(ordered[-1]) else tuple(ops)
    clauses = []
    for ranks in ordered[:3]:
        op = ops[ranks[0]]
        clauses.append(
            f"{name_ranks(ranks)} {conjugate('waits', ranks)} for {name_ranks(evidence.waits[ranks[0]].for_ranks)} in "
            f"{op.op} #{op.seq} of group {name_ranks(op.group_ranks)}{at_clause(evidence.op_location(ranks[0], op))}"
        )
    return make_finding(
        evidence,
        "crossed-groups" if len({group for (group, _), _ in sides}) > 1 else "different-collectives",
        guilty,
        f"{capitalized('; '.join(clauses))}: a circle",
        at=evidence.op_location(guilty[0], ops[guilty[0]]),
        others=involved,
        lines=wait_lines(evidence, involved),
    )
