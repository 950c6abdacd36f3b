"""From snapshots to findings: why does it hang, who is to blame, and what to do next.

`explain` is a pure function: the dashboard, `%mesh why`, the command line and the tests all call it. Its thought is
STAT's: what most ranks do is how the program was meant, and those who do something else are looked at. It draws who
waits for whom, follows the waits to those who wait for nobody else or to a circle, and names these. What follows from
a root cause is told as part of it, never as a finding of its own.

Knows nothing of how snapshots are taken, nor of processes, clocks and source text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from meshbook.diagnose import looks
from meshbook.diagnose.actors import called
from meshbook.diagnose.code import plain
from meshbook.diagnose.groups import (
    Disagreement,
    Latecomer,
    Wait,
    disagreements,
    group_key,
    latecomers,
    shapes,
)
from meshbook.diagnose.kinds import FINE, KINDS
from meshbook.diagnose.looks import At, seconds, verb
from meshbook.diagnose.telling import Finding as Finding
from meshbook.diagnose.telling import Telling, capital, grouped, in_brackets, place_of
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, RankSnapshot

# Findings told at once. A mesh on which more is wrong than this has one cause that outweighs the rest.
MAX_FINDINGS = 12
# Seconds that a rank must have run in a loop, or others have waited for it, before that is no guess any more.
PATIENCE_S = 5.0
# Ranks are not looked at in the same moment, but within a tenth of a second or two; a mesh that runs well looks tangled
# in between. What has stood for this many seconds has stood on all ranks at once.
SETTLED_S = 1.0

# Of these no second look is needed.
_DEFINITE = frozenset(("killed", "out-of-memory", "shape-mismatch", "stopped", "rank-silent", "waits-for-input"))
# What a rank does that is no reason to wait for it by itself.
_HARMLESS = frozenset(("ended", "idle", "sleep", "compute"))


# Grey 243 can be read on black and on white; "dim" is unknown to JupyterLab.
_BAD, _GOOD, _DIM, _OFF = "\x1b[1;31m", "\x1b[1;32m", "\x1b[38;5;243m", "\x1b[0m"


def explain(
    snapshots: Sequence[RankSnapshot],
    *,
    axes: Mapping[str, int] | None = None,
    silent_hosts: Sequence[str] = (),
    earlier: Sequence[RankSnapshot] = (),
) -> tuple[Finding, ...]:
    """Why the mesh does not get on, the most important first; never empty. Pure: waits for nothing, raises nothing.

    Args:
        snapshots: what each rank is doing; of two of one rank the last counts. Anything in them may be missing.
        axes: the mesh's axes and their sizes, in order; then ranks are named by axis too where that fits.
        silent_hosts: machines that did not answer.
        earlier: a look some time before, half a second or more: it tells a rank that moves from one that does not.
    """
    return tuple(_Case(snapshots, axes, silent_hosts, earlier).findings())


def as_text(findings: Sequence[Finding], color: bool = False) -> str:
    """What `%mesh why` prints: each finding's sentence, what it is concluded from, and what to do next."""
    paragraphs = []
    for number, finding in enumerate(findings, 1):
        lead = f"{number}. " if len(findings) > 1 else ""
        indent = " " * len(lead)
        lines = [f"{lead}{_painted(finding.sentence, _GOOD if finding.kind in FINE else _BAD, color)}."]
        lines += [f"{indent}  {_painted(line, _DIM, color)}" for line in finding.evidence]
        if finding.next_step:
            lines.append(f"{indent}Next: {finding.next_step}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


class _Case(Telling):
    """One question, with everything that is known."""

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        silent_hosts: Sequence[str],
        earlier: Sequence[RankSnapshot],
    ) -> None:
        super().__init__(snapshots, axes, earlier)
        self.silent_hosts = tuple(silent_hosts)
        self.explained: set[int] = set()  # ranks that a finding speaks of
        self._reached: dict[Ranks, frozenset[int]] = {}
        self._latecomers_found: list[Latecomer] | None = None

    def findings(self) -> list[Finding]:
        found = [*self._hosts(), *self._actors(), *self._disagreements(), *self._alone(), *self._roots()]
        found += self._circles()
        found += self._blocked_without_waiters()
        if not any(KINDS[finding.kind].weight > KINDS["straggler"].weight for finding in found):
            found += self._latecomers()
        if not any(KINDS[finding.kind].weight >= KINDS["straggler"].weight for finding in found):
            found += self._busy()
        if not found:
            found.append(self._idle())
        found.sort(key=lambda finding: (-KINDS[finding.kind].weight, not finding.others, finding.ranks))
        return found[:MAX_FINDINGS]

    # ---- whole machines

    def _hosts(self) -> Iterator[Finding]:
        for host in self.silent_hosts:
            ranks = tuple(rank for rank, snapshot in self.looks.items() if snapshot.host == host)
            waiting = self._blamed_on(ranks)
            self.explained.update(ranks, waiting)
            whom = f" with {name_ranks(ranks)}" if ranks else ""
            yield self._finding(
                "host-silent",
                ranks,
                f"The host {plain(host, 80)}{whom} does not answer{self._where_others_wait(waiting, ranks)}",
                others=waiting,
            )

    # ---- actors that wait for each other

    def _actors(self) -> Iterator[Finding]:
        for circle in self.calls.circles():
            ranks = tuple(sorted({step.rank for step in circle}))
            behind = self.calls.leading_to(circle)
            others = {step.rank for step in behind} - set(ranks)
            self.explained.update(ranks, others)
            first = circle[0]
            asker = plain(first.caller.name, 60)
            names = list(dict.fromkeys(f"{plain(step.caller.name, 60)} (rank {step.rank})" for step in circle))
            who = f"{', '.join(names[:-1])} and {names[-1]} wait for each other"
            if len(names) == 1:
                who = f"of {names[0]} wait for themselves"
            chain = " → ".join(
                f"{plain(step.caller.name, 60)}.{plain(step.caller.endpoint, 60)}{in_brackets(step.at)}"
                for step in circle
            )
            settled = min(step.called.since_s for step in circle) >= SETTLED_S
            yield self._finding(
                "actor-deadlock",
                ranks,
                f"Actors {who}: {chain} → {called(circle[-1].called)}, for which {asker} has no time while it is in "
                f"{plain(first.caller.endpoint, 60)}",
                at=first.at,
                others=tuple(others),
                evidence=[step.words for step in (*circle, *behind)],
                sure=settled or bool(self.before),
            )
        # Those that wait for an endpoint that is looked at by itself, where it runs.
        self.explained.update(
            rank
            for rank, doing in self.doings.items()
            if doing.what == "waits-for-actor" and self.calls.ends_elsewhere(rank)
        )

    # ---- members that do not agree

    def _disagreements(self) -> Iterator[Finding]:
        for said in disagreements(self.waits, self.rings):
            members = set(said.members)
            if members <= self.explained:
                continue
            yield self._disagreement(said)

    def _disagreement(self, said: Disagreement) -> Finding:
        guilty = said.minority()
        waiting = {
            rank for rank, wait in self.waits.items() if self._reach(wait.for_ranks or (rank,)) & set(said.members)
        }
        waiting |= {rank for rank in said.members if rank in self.waits}
        self.explained |= waiting | set(said.members)
        any_op = said.ops[said.members[0]]
        evidence = []
        for words, ranks in said.sides.items():
            for at, those in grouped(ranks, lambda rank: self._op_at(rank, said.ops[rank])):
                what = words if said.kind == "different-collectives" else f"{any_op.op} with {words}"
                evidence.append(f"{name_ranks(those)}: {what}{place_of(at)}")
        majority = next(words for words, ranks in said.sides.items() if not set(ranks) & set(guilty))
        those = tuple(rank for rank in said.members if rank not in guilty)
        first = said.ops[guilty[0]]
        at = self._op_at(guilty[0], first)
        sides = " and ".join(words for words, ranks in said.sides.items() if set(ranks) & set(guilty))
        group = self._call(any_op)
        if said.kind == "different-collectives":
            number = f"as number {said.seq}{group.partition(f'#{said.seq}')[2]}"
            title = (
                f"{capital(guilty)} called {sides}{place_of(at)} {number}, where {name_ranks(those)} called {majority}"
                f"{place_of(self._op_at(those[0], said.ops[those[0]]))}"
            )
        else:
            brought = f"{capital(guilty)} brought {sides} to {group}{place_of(at)}"
            title = f"{brought}, where {name_ranks(those)} brought {majority}"
        return self._finding(
            said.kind, guilty, title, at=at, others=tuple(sorted(waiting - set(guilty))), evidence=evidence
        )

    # ---- one rank ahead of all others

    def _alone(self) -> Iterator[Finding]:
        places: dict[tuple[object, int], list[int]] = defaultdict(list)
        for rank, wait in self.waits.items():
            if rank not in self.explained and wait.op.op not in POINT_TO_POINT and wait.op.seq:
                places[group_key(wait.op), wait.op.seq].append(rank)
        for ranks in places.values():
            wait = self.waits[ranks[0]]
            absent = wait.for_ranks
            if len(absent) < 2 * len(ranks) or not all(self._is_harmless(rank) for rank in absent):
                continue
            if len({(self.doings[rank].what, self.doings[rank].at) for rank in absent}) > 1:
                continue
            if any(self._moves(rank) or self.looks[rank].finished == "error" for rank in absent):
                continue
            guilty = tuple(sorted(ranks))
            chained = self._blamed_on(guilty)
            self.explained.update(guilty, absent, chained)
            doing = self.doings[absent[0]]
            does = self._does(absent, doing)
            ended = doing.what in ("ended", "idle")
            at = self._op_at(guilty[0], wait.op)
            yield self._finding(
                "alone-in-collective",
                guilty,
                f"{capital(guilty)} {verb('waits', guilty)} in {self._call(wait.op)}{place_of(at)}, "
                f"to which the other {len(absent)} ranks do not come: {does}",
                at=at,
                others=tuple(sorted(set(chained) - set(guilty))),
                evidence=[
                    self._waiting_line(guilty),
                    self._place(absent),
                ],
                sure=ended,
            )

    # ---- the ranks at the end of all waits

    def _roots(self) -> Iterator[Finding]:
        blamed: dict[int, set[int]] = defaultdict(set)
        for rank, wait in self.waits.items():
            if rank in self.explained:
                continue
            reached = self._reach(wait.for_ranks)
            if reached & self.explained:  # what it waits for waits for something that is told already
                self.explained.add(rank)
                continue
            for root in reached - self.waits.keys():
                blamed[root].add(rank)
        # Ranks that stand at one place for one reason are one finding.
        alike: dict[tuple[str, str, At | None, bool], list[int]] = defaultdict(list)
        for root in sorted(blamed):
            kind, sure = self._kind_of_root(root)
            if kind == "slow":  # it gets on, and so do those who wait for it
                continue
            doing = self.doings[root]
            alike[kind, doing.words, doing.at, sure].append(root)
        for (kind, _, _, sure), roots in alike.items():
            waiting = set().union(*(blamed[root] for root in roots))
            self.explained.update(roots, waiting)
            yield self._root(kind, tuple(roots), waiting, sure)

    def _kind_of_root(self, root: int) -> tuple[str, bool]:
        """What to call it that others wait for this rank, and whether that is sure."""
        doing, direct = self.doings[root], self._direct(root)
        now, before = self.looks[root], self.before.get(root)
        waited = max((wait.op.began_s for wait in direct), default=0.0)
        if doing.what in _DEFINITE:
            return doing.what, doing.sure
        if doing.what not in ("ended", "idle") and self._moves(root) and not looks.goes_round(before, now):
            late = any(rank == root for _, rank, *_ in self._late())
            return ("straggler" if late or waited >= SETTLED_S else "slow"), True
        if doing.what not in _HARMLESS:
            return doing.what, doing.sure and (before is not None or waited >= SETTLED_S)
        peers = [wait for wait in direct if wait.op.op in POINT_TO_POINT]
        only_peers = bool(peers) and len(peers) == len(direct)
        if doing.what in ("ended", "idle"):
            if self._failed(root):
                return "raised-before-collective", True
            if any(not wait.op.seq for wait in direct):
                return "group-made-by-some", True
            if only_peers:
                return f"{peers[0].op.op}-without-{'receive' if peers[0].op.op == 'send' else 'send'}".replace(
                    "recv-", "receive-"
                ), True
            return "left-early", True
        if doing.what == "compute" and looks.goes_round(before, now) and looks.is_busy(now, before):
            return "python-loop", waited >= PATIENCE_S
        # One look does not tell what is slow from what stands still.
        return "missing-from-collective", before is not None

    def _root(self, kind: str, roots: Ranks, waiting: Collection[int], sure: bool) -> Finding:
        doing, others = self.doings[roots[0]], tuple(sorted(set(waiting) - set(roots)))
        direct = self._direct(roots[0])
        if kind in ("send-without-receive", "receive-without-send"):
            return self._without_partner(kind, roots, direct, others)
        if kind == "group-made-by-some":
            return self._group_by_some({wait.rank for wait in direct}, roots, others)
        op = direct[0].op if direct else None
        evidence = [*self._details(roots), *self._who_waits(others)]
        at, there = doing.at, ""
        if op is not None:
            missed = f"{self._call(op)}{self._where_others_wait(others, roots)}"
            there = f" and {verb('has', roots)} not come to {missed}"
            if doing.what in ("ended", "idle") and not self._failed(roots[0]):
                at = self._op_at(direct[0].rank, op)
                there = f" without coming to {missed}"
                evidence += self._calls_made(op)
            elif doing.what == "ended":
                there = f" before coming to {missed}"
        does, here = verb(doing.words, roots), place_of(doing.at)
        if kind == "straggler":
            evidence += [self._how_late(each) for each in self._late() if each.rank in roots]
            waiting_there = self._where_others_wait(others, roots, lead=", while ")
            title = f"{capital(roots)} {verb('is', roots)} late but {verb('moves', roots)}{here}{waiting_there}"
        elif kind == "python-loop":
            title = f"{capital(roots)} {verb('runs', roots)} in a loop{here}{there}"
        else:
            title = f"{capital(roots)} {does}{here}{there}"
        return self._finding(kind, roots, title, at=at, others=others, evidence=evidence, sure=sure)

    def _without_partner(self, kind: str, roots: Ranks, direct: Sequence[Wait], others: Ranks) -> Finding:
        """A send or receive whose peer has ended or runs nothing; unless somebody else waits for just this."""
        wrong = self._wrong_peer({wait.rank for wait in direct} | set(others))
        if wrong is not None:
            return wrong
        wait, doing = direct[0], self.doings[roots[0]]
        guilty = tuple(sorted(each.rank for each in direct if group_key(each.op) == group_key(wait.op)))
        at = self._op_at(wait.rank, wait.op)
        word = "recv" if wait.op.op == "send" else "send"
        return self._finding(
            kind,
            guilty,
            f"{capital(guilty)} {verb('waits', guilty)} in {self._call(wait.op)}{place_of(at)}, "
            f"but {name_ranks(roots)} {verb(doing.words, roots)} without a matching {word}",
            at=at,
            others=tuple(sorted(set(others) - set(guilty))),
            evidence=[
                *self._who_waits((*guilty, *others)),
                self._place(roots),
            ],
        )

    def _group_by_some(self, making: Collection[int], absent: Ranks, others: Iterable[int]) -> Finding:
        makers = tuple(sorted(making))
        guilty = makers if len(makers) <= len(absent) else absent
        at = self.doings[guilty[0]].at or self.doings[makers[0]].at
        return self._finding(
            "group-made-by-some",
            guilty,
            f"{capital(makers)} {verb('makes', makers)} a process group{place_of(self.doings[makers[0]].at)}, "
            f"which takes all members, and {self._place(absent)} instead",
            at=at,
            others=tuple(sorted((set(makers) | set(others) | set(absent)) & self.waits.keys() - set(guilty))),
            evidence=[self._place(makers), self._place(absent)],
        )

    # ---- circles of ranks that wait for each other

    def _circles(self) -> Iterator[Finding]:
        reached = {
            rank: self._reach(wait.for_ranks)
            for rank, wait in self.waits.items()
            if rank not in self.explained and wait.for_ranks
        }
        # Where a chain ends at somebody who waits for nobody, as in a collective that all have come to, it is none.
        left = {
            rank
            for rank, ranks in reached.items()
            if all(other in self.waits and self.waits[other].for_ranks for other in ranks)
        }
        while left:
            core = min((reached[rank] for rank in left), key=lambda ranks: (len(ranks), sorted(ranks)))
            behind = {rank for rank in left if reached[rank] & core}
            left -= core | behind
            if any(self._moves(rank) for rank in core):
                continue
            self.explained |= core | behind
            finding = self._circle(tuple(sorted(core)), tuple(sorted(behind | core)))
            settled = min(self.waits[rank].op.began_s for rank in core) >= SETTLED_S
            yield structs.replace(finding, sure=settled or bool(self.before))

    def _circle(self, core: Ranks, concerned: Ranks) -> Finding:
        ops = {rank: self.waits[rank].op for rank in core}
        making = {rank for rank, op in ops.items() if not op.seq and op.op not in POINT_TO_POINT}
        if making:
            return self._group_by_some(making, tuple(rank for rank in core if rank not in making), concerned)
        wrong = self._wrong_peer(core)
        if wrong is not None:
            return wrong
        transfers = {rank: op for rank, op in ops.items() if op.op in POINT_TO_POINT}
        evidence = self._who_waits(concerned)
        if transfers and len(transfers) == len(ops) and len({op.op for op in ops.values()}) == 1:
            kind = "send-deadlock" if ops[core[0]].op == "send" else "receive-deadlock"
            act = "send" if kind == "send-deadlock" else "receive"
            at = self._op_at(core[0], ops[core[0]])
            ring = " and ".join(
                f"rank {rank} {verb('waits', (rank,))} to {act} {'to' if act == 'send' else 'from'} rank {op.peer}"
                for rank, op in list(ops.items())[:4]
            )
            more = ", and so on round" if len(ops) > 4 else ""
            title = f"{capital(core)} all {act} first{place_of(at)}: {ring}{more}"
            return self._finding(
                kind, core, title, at=at, others=tuple(sorted(set(concerned) - set(core))), evidence=evidence
            )
        if transfers:
            rank, op = next(iter(transfers.items()))
            guilty = tuple(transfers)
            kind = "send-without-receive" if op.op == "send" else "receive-without-send"
            peer = op.peer if op.peer is not None else next(other for other in core if other not in transfers)
            there = self.doings[peer]
            at = self._op_at(rank, op)
            waits_for = f" for {name_ranks(self.waits[peer].for_ranks)}" if peer in self.waits else ""
            does = f"{there.words}{waits_for}{place_of(there.at)}"
            title = f"Rank {rank} waits in {self._call(op)}{place_of(at)}, but rank {peer} {does}"
            return self._finding(
                kind, guilty, title, at=at, others=tuple(sorted(set(concerned) - set(guilty))), evidence=evidence
            )
        sides: dict[tuple[object, int], list[int]] = defaultdict(list)
        for rank, op in ops.items():
            sides[group_key(op), op.seq].append(rank)
        ordered = sorted(sides.values(), key=lambda ranks: (len(ranks), [-rank for rank in ranks]))
        guilty = tuple(ordered[0]) if len(ordered) > 1 and len(ordered[0]) < len(ordered[-1]) else core
        at = self._op_at(guilty[0], ops[guilty[0]])
        told = []
        for ranks in ordered:
            op = ops[ranks[0]]
            told.append(
                f"{name_ranks(ranks)} {verb('waits', ranks)} for {name_ranks(self.waits[ranks[0]].for_ranks)} in "
                f"{op.op} #{op.seq} of group {name_ranks(op.group_ranks)}{place_of(self._op_at(ranks[0], op))}"
            )
        kind = "crossed-groups" if len({group for group, _ in sides}) > 1 else "different-collectives"
        title = "; ".join(told[:3])
        return self._finding(
            kind,
            guilty,
            f"{title[:1].upper()}{title[1:]}: a circle",
            at=at,
            others=tuple(sorted(set(concerned) - set(guilty))),
            evidence=evidence,
        )

    def _wrong_peer(self, ranks: Iterable[int]) -> Finding | None:
        """A send and a receive that would meet, had one of them named the other's rank."""
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
                at, there = self._op_at(guilty, op), self._op_at(other, transfers[other])
                concerned = set(transfers) | self._blamed_on((guilty,))
                self.explained |= concerned
                return self._finding(
                    "wrong-peer",
                    (guilty,),
                    f"Rank {guilty} waits in {self._call(op)}{place_of(at)}, but it is rank {meant} "
                    f"that waits for it, in {self._call(transfers[other])}{place_of(there)}",
                    at=at,
                    others=tuple(sorted(concerned - {guilty})),
                    evidence=self._who_waits(sorted(concerned)),
                )
        return None

    # ---- nobody waits for anybody

    def _blocked_without_waiters(self) -> Iterator[Finding]:
        alike: dict[tuple[str, str, At | None], list[int]] = defaultdict(list)
        for rank, doing in self.doings.items():
            if rank in self.explained or rank in self.waits or doing.what in _HARMLESS or doing.what not in KINDS:
                continue
            if doing.what not in _DEFINITE and self._moves(rank):
                continue
            alike[doing.what, doing.words, doing.at].append(rank)
        for (kind, words, at), listed in alike.items():
            ranks = tuple(listed)
            self.explained.update(ranks)
            doing = self.doings[ranks[0]]
            evidence = self._details(ranks)
            if kind == "shape-mismatch":
                at, brought = self._last_brought(ranks)
                evidence = [*brought, *evidence]
            yield self._finding(
                kind,
                ranks,
                f"{capital(ranks)} {verb(words, ranks)}{place_of(at)}{self._for_how_long(ranks)}",
                at=at,
                evidence=evidence,
                sure=doing.sure and (kind in _DEFINITE or bool(self.before)),
            )

    def _last_brought(self, dead: Ranks) -> tuple[At | None, list[str]]:
        """What the survivors of a collective had brought to it, and where it was called."""
        last = {
            rank: looks.last_collective(snapshot)
            for rank, snapshot in self.looks.items()
            if rank not in dead and looks.last_collective(snapshot) is not None
        }
        ops = {rank: op for rank, op in last.items() if op is not None}
        told = [
            f"{name_ranks(those)} brought {what}{place_of(at)}"
            for (what, at), those in grouped(
                ops,
                lambda rank: (
                    f"{shapes(ops[rank])} {ops[rank].dtype} to {self._call(ops[rank])}",
                    self._op_at(rank, ops[rank]),
                ),
            )
        ]
        first = next(iter(ops), None)
        return (None if first is None else self._op_at(first, ops[first])), told

    def _latecomers(self) -> Iterator[Finding]:
        for _, rank, waited, span, op in self._late():
            if rank not in self.looks or rank in self.explained or self.looks[rank].call is None:
                continue
            others = tuple(other for other in op.group_ranks if other != rank)
            at = self.doings[rank].at or self._op_at(rank, op)
            yield self._finding(
                "straggler",
                (rank,),
                f"Rank {rank} comes last to nearly every {op.op}{place_of(self._op_at(rank, op))}: "
                f"{name_ranks(others)} waited {seconds(waited)} of the last {seconds(span)} for it",
                at=at,
                others=others,
                evidence=[self._place((rank,))],
            )

    def _busy(self) -> Iterator[Finding]:
        """What runs and is not explained by anything: perhaps one goes round in circles, perhaps it is just slow."""
        running = tuple(
            rank
            for rank, doing in self.doings.items()
            if rank not in self.explained and doing.what not in ("ended", "idle")
        )
        if not running:
            return
        loops: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in running:
            doing, before = self.doings[rank], self.before.get(rank)
            now = self.looks[rank]
            in_python = doing.words == "computes" and doing.at is not None  # and not in some library's long call
            same = looks.goes_round(before, now) and looks.is_busy(now, before)
            if in_python and same and doing.at and looks.quiet_s(now) >= PATIENCE_S:
                loops[doing.at.file, doing.at.function].append(rank)
        looping = {rank for ranks in loops.values() for rank in ranks}
        for listed in loops.values():
            ranks = tuple(listed)
            at = self.doings[ranks[0]].at
            yield self._finding(
                "python-loop",
                ranks,
                f"{capital(ranks)} {verb('computes', ranks)} in the same code{place_of(at)}, "
                f"without a collective or a step{self._for_how_long(ranks)}",
                at=at,
                evidence=self._places(ranks),
                sure=False,
            )
        rest = tuple(rank for rank in running if rank not in looping)
        if not rest or looping:
            return
        doing = self.doings[rest[0]]
        # Those that ended something else, such as operations on remote tensors, were never in this cell.
        label = self.looks[rest[0]].cell
        ended = [
            rank
            for rank, each in self.doings.items()
            if each.what == "ended" and self.looks[rank].last_cell in (None, label)
        ]
        only = f", which {name_ranks(ended)} {verb('has', ended)} ended" if ended else ""
        together = len({(self.doings[rank].what, self.doings[rank].at) for rank in rest}) == 1
        cell = self.looks[rest[0]].cell or "a call"
        does = (
            f"{verb(doing.words, rest)}{place_of(doing.at)}"
            if together
            else f"{verb('is', rest)} at different places of {plain(cell, 80)}"
        )
        yield self._finding(
            "slow",
            rest,
            f"Nothing is wrong that can be seen: {name_ranks(rest)} {does}{self._for_how_long(rest)}{only}",
            at=doing.at,
            evidence=[*self._places(rest), *self._progress(rest)],
            sure=bool(self.before),
        )

    def _how_late(self, late: Latecomer) -> str:
        return (
            f"rank {late.rank} came last to nearly every {late.op.op}: the others waited {seconds(late.waited_s)} "
            f"of the last {seconds(late.of_s)} for it"
        )

    def _late(self) -> list[Latecomer]:
        if self._latecomers_found is None:
            self._latecomers_found = latecomers(self.rings)
        return self._latecomers_found

    def _idle(self) -> Finding:
        if not self.looks:
            return self._finding("idle", (), "No rank is known", evidence=["no snapshot was taken"])
        ended = [rank for rank, doing in self.doings.items() if doing.what == "ended"]
        evidence = [
            f"{name_ranks(those)} {verb(words, those)}{place_of(at)}"
            for (words, at), those in grouped(ended, lambda rank: (self.doings[rank].words, self.doings[rank].at))
        ]
        title = f"Nothing runs: {name_ranks(self.world)} {verb('waits', self.world)} for a cell"
        return self._finding("idle", self.world, title, evidence=evidence)

    # ---- who waits for whom

    def _reach(self, ranks: Ranks) -> frozenset[int]:
        """These ranks, those that they wait for, and so on."""
        if ranks not in self._reached:
            seen, ahead, followed = set(ranks), list(ranks), set[Ranks]()
            while ahead:
                wait = self.waits.get(ahead.pop())
                if wait is None or wait.for_ranks in followed:
                    continue
                followed.add(wait.for_ranks)
                new = set(wait.for_ranks) - seen
                seen |= new
                ahead += new
            self._reached[ranks] = frozenset(seen)
        return self._reached[ranks]

    def _blamed_on(self, ranks: Collection[int]) -> set[int]:
        """Those that wait for one of these, directly or through others."""
        those = set(ranks)
        return {rank for rank, wait in self.waits.items() if rank not in those and self._reach(wait.for_ranks) & those}

    def _direct(self, root: int) -> list[Wait]:
        found = [wait for wait in self.waits.values() if root in wait.for_ranks]
        return sorted(found, key=lambda wait: (wait.op.seq == 0, -wait.op.began_s))

    def _is_harmless(self, rank: int) -> bool:
        return rank not in self.waits and self.doings[rank].what in _HARMLESS

    def _moves(self, rank: int) -> bool:
        return looks.has_moved(self.before.get(rank), self.looks[rank]) is True

    def _failed(self, rank: int) -> bool:
        return self.looks[rank].call is None and self.looks[rank].finished == "error"


def _painted(text: str, colour: str, wanted: bool) -> str:
    return f"{colour}{text}{_OFF}" if wanted else text
