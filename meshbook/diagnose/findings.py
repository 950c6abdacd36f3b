"""Derive findings from snapshots: why a mesh hangs, which ranks cause it, and what to do next.

`explain` is a pure function that the dashboard, `%mesh why`, the command line and the tests call. The idea is that of
STAT: what most ranks do is the intended behavior, and ranks that differ are suspects. `explain` builds the graph of
which rank waits for which, follows it to ranks that wait for no other rank or to a cycle, and reports these.
Consequences of a root cause are part of its finding, never a finding of their own.

This module does not know how snapshots are taken, nor processes, clocks or source text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from meshbook.diagnose import rank_activity
from meshbook.diagnose.actor_waits import format_callee
from meshbook.diagnose.collectives import (
    Disagreement,
    RankWait,
    Straggler,
    find_disagreements,
    find_stragglers,
    format_shapes,
    group_key,
)
from meshbook.diagnose.kinds import BENIGN_KINDS, KINDS
from meshbook.diagnose.rank_activity import SourceLocation, conjugate, format_duration
from meshbook.diagnose.report import Finding as Finding
from meshbook.diagnose.report import ReportBase, at_clause, capitalized_ranks, group_ranks_by, parenthesized
from meshbook.diagnose.source_files import sanitize_line
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, RankSnapshot

# Findings reported at once. More problems than this have one dominant cause.
MAX_FINDINGS = 12
# Seconds that a rank must have run in a loop, or others have waited for it, before the finding counts as sure.
MIN_LOOP_S = 5.0
# Seconds that a state must have lasted to count as simultaneous on all ranks. Ranks are sampled within 0.1 to 0.2 s of
# each other, so a healthy mesh can look deadlocked in between.
STABLE_S = 1.0

# Kinds that need no second sample.
_CERTAIN_KINDS = frozenset(("killed", "out-of-memory", "shape-mismatch", "stopped", "rank-silent", "waits-for-input"))
# Activities that do not by themselves explain why others wait for the rank.
_UNBLOCKED_KINDS = frozenset(("ended", "idle", "sleep", "compute"))


# Grey 243 is readable on black and on white; JupyterLab does not support "dim".
_BAD, _GOOD, _DIM, _RESET = "\x1b[1;31m", "\x1b[1;32m", "\x1b[38;5;243m", "\x1b[0m"


def explain(
    snapshots: Sequence[RankSnapshot],
    *,
    axes: Mapping[str, int] | None = None,
    silent_hosts: Sequence[str] = (),
    earlier: Sequence[RankSnapshot] = (),
) -> tuple[Finding, ...]:
    """Return why the mesh makes no progress, most important first; never empty. Pure: neither blocks nor raises.

    Args:
        snapshots: what each rank is doing; of two snapshots of one rank the last one counts. Any field may be missing.
        axes: the mesh's axes and their sizes, in order; if given, ranks are also named by axis where possible.
        silent_hosts: machines that do not respond.
        earlier: snapshots taken at least half a second before, to distinguish ranks that progress from stalled ones.
    """
    return tuple(_Diagnosis(snapshots, axes, silent_hosts, earlier).findings())


def as_text(findings: Sequence[Finding], color: bool = False) -> str:
    """Return what `%mesh why` prints: each finding's sentence, its evidence, and the next step."""
    paragraphs = []
    for number, finding in enumerate(findings, 1):
        lead = f"{number}. " if len(findings) > 1 else ""
        indent = " " * len(lead)
        lines = [f"{lead}{_colorize(finding.sentence, _GOOD if finding.kind in BENIGN_KINDS else _BAD, color)}."]
        lines += [f"{indent}  {_colorize(line, _DIM, color)}" for line in finding.evidence]
        if finding.next_step:
            lines.append(f"{indent}Next: {finding.next_step}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


class _Diagnosis(ReportBase):
    """One call of `explain`, with all its inputs."""

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        silent_hosts: Sequence[str],
        earlier: Sequence[RankSnapshot],
    ) -> None:
        super().__init__(snapshots, axes, earlier)
        self.silent_hosts = tuple(silent_hosts)
        self.explained: set[int] = set()  # ranks that a finding already covers
        self._reachable: dict[Ranks, frozenset[int]] = {}
        self._stragglers: list[Straggler] | None = None

    def findings(self) -> list[Finding]:
        found = [
            *self._silent_host_findings(),
            *self._actor_deadlock_findings(),
            *self._disagreement_findings(),
            *self._alone_in_collective_findings(),
            *self._root_cause_findings(),
        ]
        found += self._cycle_findings()
        found += self._blocked_rank_findings()
        if not any(KINDS[finding.kind].weight > KINDS["straggler"].weight for finding in found):
            found += self._straggler_findings()
        if not any(KINDS[finding.kind].weight >= KINDS["straggler"].weight for finding in found):
            found += self._busy_findings()
        if not found:
            found.append(self._idle_finding())
        found.sort(key=lambda finding: (-KINDS[finding.kind].weight, not finding.others, finding.ranks))
        return found[:MAX_FINDINGS]

    # ---- hosts that do not respond

    def _silent_host_findings(self) -> Iterator[Finding]:
        for host in self.silent_hosts:
            ranks = tuple(rank for rank, snapshot in self.snapshots.items() if snapshot.host == host)
            waiting = self._waiters_of(ranks)
            self.explained.update(ranks, waiting)
            whom = f" with {name_ranks(ranks)}" if ranks else ""
            yield self._make_finding(
                "host-silent",
                ranks,
                f"The host {sanitize_line(host, 80)}{whom} does not answer{self._where_others_wait(waiting, ranks)}",
                others=waiting,
            )

    # ---- deadlocked actors

    def _actor_deadlock_findings(self) -> Iterator[Finding]:
        for cycle in self.actor_waits.find_cycles():
            ranks = tuple(sorted({wait.rank for wait in cycle}))
            waiting_behind = self.actor_waits.waits_leading_to(cycle)
            others = {wait.rank for wait in waiting_behind} - set(ranks)
            self.explained.update(ranks, others)
            first = cycle[0]
            asker = sanitize_line(first.caller.name, 60)
            names = list(dict.fromkeys(f"{sanitize_line(wait.caller.name, 60)} (rank {wait.rank})" for wait in cycle))
            who = f"{', '.join(names[:-1])} and {names[-1]} wait for each other"
            if len(names) == 1:
                who = f"of {names[0]} wait for themselves"
            chain = " → ".join(
                f"{sanitize_line(wait.caller.name, 60)}.{sanitize_line(wait.caller.endpoint, 60)}"
                f"{parenthesized(wait.location)}"
                for wait in cycle
            )
            stable = min(wait.callee.since_s for wait in cycle) >= STABLE_S
            yield self._make_finding(
                "actor-deadlock",
                ranks,
                f"Actors {who}: {chain} → {format_callee(cycle[-1].callee)}, for which {asker} has no time while it "
                f"is in {sanitize_line(first.caller.endpoint, 60)}",
                at=first.location,
                others=tuple(others),
                evidence=[wait.phrase for wait in (*cycle, *waiting_behind)],
                sure=stable or bool(self.earlier),
            )
        # Ranks that wait for an endpoint on another rank: that endpoint is diagnosed on the rank that runs it.
        self.explained.update(
            rank
            for rank, activity in self.activities.items()
            if activity.kind == "waits-for-actor" and self.actor_waits.waits_only_for_other_ranks(rank)
        )

    # ---- members of a group that disagree

    def _disagreement_findings(self) -> Iterator[Finding]:
        for disagreement in find_disagreements(self.waits, self.rings):
            members = set(disagreement.members)
            if members <= self.explained:
                continue
            yield self._disagreement_finding(disagreement)

    def _disagreement_finding(self, disagreement: Disagreement) -> Finding:
        guilty = disagreement.minority()
        waiting = {
            rank
            for rank, wait in self.waits.items()
            if self._reachable_from(wait.for_ranks or (rank,)) & set(disagreement.members)
        }
        waiting |= {rank for rank in disagreement.members if rank in self.waits}
        self.explained |= waiting | set(disagreement.members)
        any_op = disagreement.ops[disagreement.members[0]]
        evidence = []
        for side_text, ranks in disagreement.sides.items():
            for at, those in group_ranks_by(ranks, lambda rank: self._op_location(rank, disagreement.ops[rank])):
                what = side_text if disagreement.kind == "different-collectives" else f"{any_op.op} with {side_text}"
                evidence.append(f"{name_ranks(those)}: {what}{at_clause(at)}")
        majority = next(side_text for side_text, ranks in disagreement.sides.items() if not set(ranks) & set(guilty))
        those = tuple(rank for rank in disagreement.members if rank not in guilty)
        first = disagreement.ops[guilty[0]]
        at = self._op_location(guilty[0], first)
        sides = " and ".join(side_text for side_text, ranks in disagreement.sides.items() if set(ranks) & set(guilty))
        group = self._op_name(any_op)
        if disagreement.kind == "different-collectives":
            number = f"as number {disagreement.seq}{group.partition(f'#{disagreement.seq}')[2]}"
            title = (
                f"{capitalized_ranks(guilty)} called {sides}{at_clause(at)} {number}, "
                f"where {name_ranks(those)} called {majority}"
                f"{at_clause(self._op_location(those[0], disagreement.ops[those[0]]))}"
            )
        else:
            brought = f"{capitalized_ranks(guilty)} brought {sides} to {group}{at_clause(at)}"
            title = f"{brought}, where {name_ranks(those)} brought {majority}"
        return self._make_finding(
            disagreement.kind, guilty, title, at=at, others=tuple(sorted(waiting - set(guilty))), evidence=evidence
        )

    # ---- one rank ahead of all others

    def _alone_in_collective_findings(self) -> Iterator[Finding]:
        ranks_by_position: dict[tuple[object, int], list[int]] = defaultdict(list)
        for rank, wait in self.waits.items():
            if rank not in self.explained and wait.op.op not in POINT_TO_POINT and wait.op.seq:
                ranks_by_position[group_key(wait.op), wait.op.seq].append(rank)
        for ranks in ranks_by_position.values():
            wait = self.waits[ranks[0]]
            absent = wait.for_ranks
            if len(absent) < 2 * len(ranks) or not all(self._is_unblocked(rank) for rank in absent):
                continue
            if len({(self.activities[rank].kind, self.activities[rank].location) for rank in absent}) > 1:
                continue
            if any(self._has_moved(rank) or self.snapshots[rank].last_status == "error" for rank in absent):
                continue
            guilty = tuple(sorted(ranks))
            chained = self._waiters_of(guilty)
            self.explained.update(guilty, absent, chained)
            activity = self.activities[absent[0]]
            does = self._activity_clause(absent, activity)
            ended = activity.kind in ("ended", "idle")
            at = self._op_location(guilty[0], wait.op)
            yield self._make_finding(
                "alone-in-collective",
                guilty,
                f"{capitalized_ranks(guilty)} {conjugate('waits', guilty)} in {self._op_name(wait.op)}{at_clause(at)}, "
                f"to which the other {len(absent)} ranks do not come: {does}",
                at=at,
                others=tuple(sorted(set(chained) - set(guilty))),
                evidence=[
                    self._first_wait_evidence(guilty),
                    self._activity_sentence(absent),
                ],
                sure=ended,
            )

    # ---- ranks at the end of the wait chains

    def _root_cause_findings(self) -> Iterator[Finding]:
        blamed: dict[int, set[int]] = defaultdict(set)
        for rank, wait in self.waits.items():
            if rank in self.explained:
                continue
            reached = self._reachable_from(wait.for_ranks)
            if reached & self.explained:  # it waits for ranks that are blocked by something already reported
                self.explained.add(rank)
                continue
            for root in reached - self.waits.keys():
                blamed[root].add(rank)
        # Ranks that are at the same location for the same reason share one finding.
        roots_by_cause: dict[tuple[str, str, SourceLocation | None, bool], list[int]] = defaultdict(list)
        for root in sorted(blamed):
            kind, sure = self._classify_root(root)
            if kind == "slow":  # it makes progress, and so do the ranks that wait for it
                continue
            activity = self.activities[root]
            roots_by_cause[kind, activity.phrase, activity.location, sure].append(root)
        for (kind, _, _, sure), roots in roots_by_cause.items():
            waiting = set().union(*(blamed[root] for root in roots))
            self.explained.update(roots, waiting)
            yield self._root_cause_finding(kind, tuple(roots), waiting, sure)

    def _classify_root(self, root: int) -> tuple[str, bool]:
        """Return the finding's kind for a rank that others wait for, and whether that is sure."""
        activity, direct = self.activities[root], self._direct_waits(root)
        now, before = self.snapshots[root], self.earlier.get(root)
        waited = max((wait.op.began_s_ago for wait in direct), default=0.0)
        if activity.kind in _CERTAIN_KINDS:
            return activity.kind, activity.sure
        if (
            activity.kind not in ("ended", "idle")
            and self._has_moved(root)
            and not rank_activity.is_looping(before, now)
        ):
            is_straggler = any(rank == root for _, rank, *_ in self._find_stragglers())
            return ("straggler" if is_straggler or waited >= STABLE_S else "slow"), True
        if activity.kind not in _UNBLOCKED_KINDS:
            return activity.kind, activity.sure and (before is not None or waited >= STABLE_S)
        peers = [wait for wait in direct if wait.op.op in POINT_TO_POINT]
        only_peers = bool(peers) and len(peers) == len(direct)
        if activity.kind in ("ended", "idle"):
            if self._has_failed(root):
                return "raised-before-collective", True
            if any(not wait.op.seq for wait in direct):
                return "group-made-by-some", True
            if only_peers:
                return f"{peers[0].op.op}-without-{'receive' if peers[0].op.op == 'send' else 'send'}".replace(
                    "recv-", "receive-"
                ), True
            return "left-early", True
        if activity.kind == "compute" and rank_activity.is_looping(before, now) and rank_activity.is_busy(now, before):
            return "python-loop", waited >= MIN_LOOP_S
        # One sample cannot tell a slow rank from a stalled one.
        return "missing-from-collective", before is not None

    def _root_cause_finding(self, kind: str, roots: Ranks, waiting: Collection[int], sure: bool) -> Finding:
        activity, others = self.activities[roots[0]], tuple(sorted(set(waiting) - set(roots)))
        direct = self._direct_waits(roots[0])
        if kind in ("send-without-receive", "receive-without-send"):
            return self._unmatched_transfer_finding(kind, roots, direct, others)
        if kind == "group-made-by-some":
            return self._partial_group_finding({wait.rank for wait in direct}, roots, others)
        op = direct[0].op if direct else None
        evidence = [*self._snapshot_evidence(roots), *self._wait_evidence(others)]
        at, missed_clause = activity.location, ""
        if op is not None:
            missed = f"{self._op_name(op)}{self._where_others_wait(others, roots)}"
            missed_clause = f" and {conjugate('has', roots)} not come to {missed}"
            if activity.kind in ("ended", "idle") and not self._has_failed(roots[0]):
                at = self._op_location(direct[0].rank, op)
                missed_clause = f" without coming to {missed}"
                evidence += self._collective_count_evidence(op)
            elif activity.kind == "ended":
                missed_clause = f" before coming to {missed}"
        activity_text, at_text = conjugate(activity.phrase, roots), at_clause(activity.location)
        if kind == "straggler":
            evidence += [self._straggler_evidence(each) for each in self._find_stragglers() if each.rank in roots]
            waiting_there = self._where_others_wait(others, roots, lead=", while ")
            title = (
                f"{capitalized_ranks(roots)} {conjugate('is', roots)} late but {conjugate('moves', roots)}"
                f"{at_text}{waiting_there}"
            )
        elif kind == "python-loop":
            title = f"{capitalized_ranks(roots)} {conjugate('runs', roots)} in a loop{at_text}{missed_clause}"
        else:
            title = f"{capitalized_ranks(roots)} {activity_text}{at_text}{missed_clause}"
        return self._make_finding(kind, roots, title, at=at, others=others, evidence=evidence, sure=sure)

    def _unmatched_transfer_finding(
        self, kind: str, roots: Ranks, direct: Sequence[RankWait], others: Ranks
    ) -> Finding:
        """Return the finding for a send or receive whose peer has ended or is idle, unless it names the wrong peer."""
        wrong = self._wrong_peer_finding({wait.rank for wait in direct} | set(others))
        if wrong is not None:
            return wrong
        wait, activity = direct[0], self.activities[roots[0]]
        guilty = tuple(sorted(each.rank for each in direct if group_key(each.op) == group_key(wait.op)))
        at = self._op_location(wait.rank, wait.op)
        word = "recv" if wait.op.op == "send" else "send"
        return self._make_finding(
            kind,
            guilty,
            f"{capitalized_ranks(guilty)} {conjugate('waits', guilty)} in {self._op_name(wait.op)}{at_clause(at)}, "
            f"but {name_ranks(roots)} {conjugate(activity.phrase, roots)} without a matching {word}",
            at=at,
            others=tuple(sorted(set(others) - set(guilty))),
            evidence=[
                *self._wait_evidence((*guilty, *others)),
                self._activity_sentence(roots),
            ],
        )

    def _partial_group_finding(self, making: Collection[int], absent: Ranks, others: Iterable[int]) -> Finding:
        makers = tuple(sorted(making))
        guilty = makers if len(makers) <= len(absent) else absent
        at = self.activities[guilty[0]].location or self.activities[makers[0]].location
        return self._make_finding(
            "group-made-by-some",
            guilty,
            f"{capitalized_ranks(makers)} {conjugate('makes', makers)} a process group"
            f"{at_clause(self.activities[makers[0]].location)}, "
            f"which takes all members, and {self._activity_sentence(absent)} instead",
            at=at,
            others=tuple(sorted((set(makers) | set(others) | set(absent)) & self.waits.keys() - set(guilty))),
            evidence=[self._activity_sentence(makers), self._activity_sentence(absent)],
        )

    # ---- cycles of ranks that wait for each other

    def _cycle_findings(self) -> Iterator[Finding]:
        reached = {
            rank: self._reachable_from(wait.for_ranks)
            for rank, wait in self.waits.items()
            if rank not in self.explained and wait.for_ranks
        }
        # A chain that ends at a rank without a wait is no cycle. Such an end is also a collective that all members have
        # begun.
        left = {
            rank
            for rank, ranks in reached.items()
            if all(other in self.waits and self.waits[other].for_ranks for other in ranks)
        }
        while left:
            cycle = min((reached[rank] for rank in left), key=lambda ranks: (len(ranks), sorted(ranks)))
            waiting_behind = {rank for rank in left if reached[rank] & cycle}
            left -= cycle | waiting_behind
            if any(self._has_moved(rank) for rank in cycle):
                continue
            self.explained |= cycle | waiting_behind
            finding = self._cycle_finding(tuple(sorted(cycle)), tuple(sorted(waiting_behind | cycle)))
            stable = min(self.waits[rank].op.began_s_ago for rank in cycle) >= STABLE_S
            yield structs.replace(finding, sure=stable or bool(self.earlier))

    def _cycle_finding(self, cycle: Ranks, involved: Ranks) -> Finding:
        ops = {rank: self.waits[rank].op for rank in cycle}
        making = {rank for rank, op in ops.items() if not op.seq and op.op not in POINT_TO_POINT}
        if making:
            return self._partial_group_finding(making, tuple(rank for rank in cycle if rank not in making), involved)
        wrong = self._wrong_peer_finding(cycle)
        if wrong is not None:
            return wrong
        transfers = {rank: op for rank, op in ops.items() if op.op in POINT_TO_POINT}
        evidence = self._wait_evidence(involved)
        if transfers and len(transfers) == len(ops) and len({op.op for op in ops.values()}) == 1:
            kind = "send-deadlock" if ops[cycle[0]].op == "send" else "receive-deadlock"
            act = "send" if kind == "send-deadlock" else "receive"
            at = self._op_location(cycle[0], ops[cycle[0]])
            ring = " and ".join(
                f"rank {rank} {conjugate('waits', (rank,))} to {act} {'to' if act == 'send' else 'from'} rank {op.peer}"
                for rank, op in list(ops.items())[:4]
            )
            more = ", and so on round" if len(ops) > 4 else ""
            title = f"{capitalized_ranks(cycle)} all {act} first{at_clause(at)}: {ring}{more}"
            return self._make_finding(
                kind, cycle, title, at=at, others=tuple(sorted(set(involved) - set(cycle))), evidence=evidence
            )
        if transfers:
            rank, op = next(iter(transfers.items()))
            guilty = tuple(transfers)
            kind = "send-without-receive" if op.op == "send" else "receive-without-send"
            peer = op.peer if op.peer is not None else next(other for other in cycle if other not in transfers)
            peer_activity = self.activities[peer]
            at = self._op_location(rank, op)
            waits_for = f" for {name_ranks(self.waits[peer].for_ranks)}" if peer in self.waits else ""
            activity_text = f"{peer_activity.phrase}{waits_for}{at_clause(peer_activity.location)}"
            title = f"Rank {rank} waits in {self._op_name(op)}{at_clause(at)}, but rank {peer} {activity_text}"
            return self._make_finding(
                kind, guilty, title, at=at, others=tuple(sorted(set(involved) - set(guilty))), evidence=evidence
            )
        sides: dict[tuple[object, int], list[int]] = defaultdict(list)
        for rank, op in ops.items():
            sides[group_key(op), op.seq].append(rank)
        ordered = sorted(sides.values(), key=lambda ranks: (len(ranks), [-rank for rank in ranks]))
        guilty = tuple(ordered[0]) if len(ordered) > 1 and len(ordered[0]) < len(ordered[-1]) else cycle
        at = self._op_location(guilty[0], ops[guilty[0]])
        clauses = []
        for ranks in ordered:
            op = ops[ranks[0]]
            clauses.append(
                f"{name_ranks(ranks)} {conjugate('waits', ranks)} for {name_ranks(self.waits[ranks[0]].for_ranks)} in "
                f"{op.op} #{op.seq} of group {name_ranks(op.group_ranks)}{at_clause(self._op_location(ranks[0], op))}"
            )
        kind = "crossed-groups" if len({group for group, _ in sides}) > 1 else "different-collectives"
        title = "; ".join(clauses[:3])
        return self._make_finding(
            kind,
            guilty,
            f"{title[:1].upper()}{title[1:]}: a circle",
            at=at,
            others=tuple(sorted(set(involved) - set(guilty))),
            evidence=evidence,
        )

    def _wrong_peer_finding(self, ranks: Iterable[int]) -> Finding | None:
        """Return a finding for a send and a receive that would match if one of them named the other's rank."""
        transfers = {
            rank: self.waits[rank].op
            for rank in sorted(ranks)
            if rank in self.waits and self.waits[rank].op.op in POINT_TO_POINT and self.waits[rank].for_ranks
        }
        for sender, send in transfers.items():
            for receiver, recv in transfers.items():
                if send.op != "send" or recv.op != "recv" or sender == receiver or recv.peer is None:
                    continue
                if send.peer == receiver and recv.peer != sender:
                    guilty, op, meant = receiver, recv, sender
                elif recv.peer == sender and send.peer != receiver:
                    guilty, op, meant = sender, send, receiver
                else:
                    continue
                other = receiver if guilty == sender else sender
                at, other_at = self._op_location(guilty, op), self._op_location(other, transfers[other])
                involved = set(transfers) | self._waiters_of((guilty,))
                self.explained |= involved
                return self._make_finding(
                    "wrong-peer",
                    (guilty,),
                    f"Rank {guilty} waits in {self._op_name(op)}{at_clause(at)}, but it is rank {meant} "
                    f"that waits for it, in {self._op_name(transfers[other])}{at_clause(other_at)}",
                    at=at,
                    others=tuple(sorted(involved - {guilty})),
                    evidence=self._wait_evidence(sorted(involved)),
                )
        return None

    # ---- ranks outside the wait chains

    def _blocked_rank_findings(self) -> Iterator[Finding]:
        ranks_by_activity: dict[tuple[str, str, SourceLocation | None], list[int]] = defaultdict(list)
        for rank, activity in self.activities.items():
            if (
                rank in self.explained
                or rank in self.waits
                or activity.kind in _UNBLOCKED_KINDS
                or activity.kind not in KINDS
            ):
                continue
            if activity.kind not in _CERTAIN_KINDS and self._has_moved(rank):
                continue
            ranks_by_activity[activity.kind, activity.phrase, activity.location].append(rank)
        for (kind, phrase, at), listed in ranks_by_activity.items():
            ranks = tuple(listed)
            self.explained.update(ranks)
            activity = self.activities[ranks[0]]
            evidence = self._snapshot_evidence(ranks)
            if kind == "shape-mismatch":
                at, inputs = self._last_collective_inputs(ranks)
                evidence = [*inputs, *evidence]
            yield self._make_finding(
                kind,
                ranks,
                f"{capitalized_ranks(ranks)} {conjugate(phrase, ranks)}{at_clause(at)}"
                f"{self._running_time_clause(ranks)}",
                at=at,
                evidence=evidence,
                sure=activity.sure and (kind in _CERTAIN_KINDS or bool(self.earlier)),
            )

    def _last_collective_inputs(self, dead: Ranks) -> tuple[SourceLocation | None, list[str]]:
        """Return where surviving ranks called their last collective, and a line for each distinct input to it."""
        last = {
            rank: rank_activity.last_collective(snapshot)
            for rank, snapshot in self.snapshots.items()
            if rank not in dead and rank_activity.last_collective(snapshot) is not None
        }
        ops = {rank: op for rank, op in last.items() if op is not None}
        lines = [
            f"{name_ranks(those)} brought {what}{at_clause(at)}"
            for (what, at), those in group_ranks_by(
                ops,
                lambda rank: (
                    f"{format_shapes(ops[rank])} {ops[rank].dtype} to {self._op_name(ops[rank])}",
                    self._op_location(rank, ops[rank]),
                ),
            )
        ]
        first = next(iter(ops), None)
        return (None if first is None else self._op_location(first, ops[first])), lines

    def _straggler_findings(self) -> Iterator[Finding]:
        for _, rank, waited, span, op in self._find_stragglers():
            if rank not in self.snapshots or rank in self.explained or self.snapshots[rank].call is None:
                continue
            others = tuple(other for other in op.group_ranks if other != rank)
            at = self.activities[rank].location or self._op_location(rank, op)
            yield self._make_finding(
                "straggler",
                (rank,),
                f"Rank {rank} comes last to nearly every {op.op}{at_clause(self._op_location(rank, op))}: "
                f"{name_ranks(others)} waited {format_duration(waited)} of the last {format_duration(span)} for it",
                at=at,
                others=others,
                evidence=[self._activity_sentence((rank,))],
            )

    def _busy_findings(self) -> Iterator[Finding]:
        """Yield findings for running ranks that no other finding explains: possible Python loops, or slow ranks."""
        running = tuple(
            rank
            for rank, activity in self.activities.items()
            if rank not in self.explained and activity.kind not in ("ended", "idle")
        )
        if not running:
            return
        loops: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in running:
            activity, before = self.activities[rank], self.earlier.get(rank)
            now = self.snapshots[rank]
            # In Python code, not in a long call of a library.
            in_python = activity.phrase == "computes" and activity.location is not None
            same = rank_activity.is_looping(before, now) and rank_activity.is_busy(now, before)
            if in_python and same and activity.location and rank_activity.since_last_collective_s(now) >= MIN_LOOP_S:
                loops[activity.location.file, activity.location.function].append(rank)
        looping = {rank for ranks in loops.values() for rank in ranks}
        for listed in loops.values():
            ranks = tuple(listed)
            at = self.activities[ranks[0]].location
            yield self._make_finding(
                "python-loop",
                ranks,
                f"{capitalized_ranks(ranks)} {conjugate('computes', ranks)} in the same code{at_clause(at)}, "
                f"without a collective or a step{self._running_time_clause(ranks)}",
                at=at,
                evidence=self._location_evidence(ranks),
                sure=False,
            )
        not_looping = tuple(rank for rank in running if rank not in looping)
        if not not_looping or looping:
            return
        activity = self.activities[not_looping[0]]
        # Ranks that ended something else, such as operations on remote tensors, never ran this cell.
        label = self.snapshots[not_looping[0]].cell
        ended = [
            rank
            for rank, each in self.activities.items()
            if each.kind == "ended" and self.snapshots[rank].last_cell in (None, label)
        ]
        only = f", which {name_ranks(ended)} {conjugate('has', ended)} ended" if ended else ""
        together = len({(self.activities[rank].kind, self.activities[rank].location) for rank in not_looping}) == 1
        cell = self.snapshots[not_looping[0]].cell or "a call"
        activity_text = (
            f"{conjugate(activity.phrase, not_looping)}{at_clause(activity.location)}"
            if together
            else f"{conjugate('is', not_looping)} at different places of {sanitize_line(cell, 80)}"
        )
        yield self._make_finding(
            "slow",
            not_looping,
            f"Nothing is wrong that can be seen: {name_ranks(not_looping)} {activity_text}"
            f"{self._running_time_clause(not_looping)}{only}",
            at=activity.location,
            evidence=[*self._location_evidence(not_looping), *self._progress_evidence(not_looping)],
            sure=bool(self.earlier),
        )

    def _straggler_evidence(self, straggler: Straggler) -> str:
        return (
            f"rank {straggler.rank} came last to nearly every {straggler.op.op}: the others waited "
            f"{format_duration(straggler.waited_s)} of the last {format_duration(straggler.span_s)} for it"
        )

    def _find_stragglers(self) -> list[Straggler]:
        if self._stragglers is None:
            self._stragglers = find_stragglers(self.rings)
        return self._stragglers

    def _idle_finding(self) -> Finding:
        if not self.snapshots:
            return self._make_finding("idle", (), "No rank is known", evidence=["no snapshot was taken"])
        ended = [rank for rank, activity in self.activities.items() if activity.kind == "ended"]
        evidence = [
            f"{name_ranks(those)} {conjugate(phrase, those)}{at_clause(at)}"
            for (phrase, at), those in group_ranks_by(
                ended, lambda rank: (self.activities[rank].phrase, self.activities[rank].location)
            )
        ]
        title = f"Nothing runs: {name_ranks(self.world_ranks)} {conjugate('waits', self.world_ranks)} for a cell"
        return self._make_finding("idle", self.world_ranks, title, evidence=evidence)

    # ---- wait graph

    def _reachable_from(self, ranks: Ranks) -> frozenset[int]:
        """Return these ranks and all that they wait for, directly or through others."""
        if ranks not in self._reachable:
            reached, pending, followed = set(ranks), list(ranks), set[Ranks]()
            while pending:
                wait = self.waits.get(pending.pop())
                if wait is None or wait.for_ranks in followed:
                    continue
                followed.add(wait.for_ranks)
                new = set(wait.for_ranks) - reached
                reached |= new
                pending += new
            self._reachable[ranks] = frozenset(reached)
        return self._reachable[ranks]

    def _waiters_of(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks that wait for one of these, directly or through others."""
        those = set(ranks)
        return {
            rank
            for rank, wait in self.waits.items()
            if rank not in those and self._reachable_from(wait.for_ranks) & those
        }

    def _direct_waits(self, root: int) -> list[RankWait]:
        found = [wait for wait in self.waits.values() if root in wait.for_ranks]
        return sorted(found, key=lambda wait: (wait.op.seq == 0, -wait.op.began_s_ago))

    def _is_unblocked(self, rank: int) -> bool:
        return rank not in self.waits and self.activities[rank].kind in _UNBLOCKED_KINDS

    def _has_moved(self, rank: int) -> bool:
        return rank_activity.has_moved(self.earlier.get(rank), self.snapshots[rank]) is True

    def _has_failed(self, rank: int) -> bool:
        return self.snapshots[rank].call is None and self.snapshots[rank].last_status == "error"


def _colorize(text: str, colour: str, enabled: bool) -> str:
    return f"{colour}{text}{_RESET}" if enabled else text
