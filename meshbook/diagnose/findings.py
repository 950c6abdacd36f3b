"""From snapshots to findings: why does it hang, who is to blame, and what to do next.

`explain` is a pure function: the dashboard, `%mesh why`, the command line and the tests all call it. Its thought is
STAT's: what most ranks do is how the program was meant, and those who do something else are looked at. It draws who
waits for whom, follows the waits to those who wait for nobody else or to a circle, and names these. What follows from
a root cause is told as part of it, never as a finding of its own.

Knows nothing of how snapshots are taken, nor of processes, clocks and source text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from msgspec import Struct, structs

from meshbook.diagnose import looks
from meshbook.diagnose.code import plain
from meshbook.diagnose.groups import (
    Disagreement,
    Latecomer,
    Rings,
    Wait,
    disagreements,
    group_key,
    latecomers,
    name_op,
    shapes,
    waits,
)
from meshbook.diagnose.kinds import FINE, KINDS
from meshbook.diagnose.looks import At, Doing, seconds, verb
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveSeen, RankSnapshot

K = TypeVar("K")

# Findings told at once. A mesh on which more is wrong than this has one cause that outweighs the rest.
MAX_FINDINGS = 12
# Different places of ranks that are listed as evidence; more are counted.
MAX_PLACES = 6
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


class Finding(Struct, frozen=True, omit_defaults=True):
    """One reason why the mesh does not get on, or the news that nothing is wrong."""

    kind: str  # a key of `kinds.KINDS`
    ranks: Ranks  # who is to blame, or whom it is about
    title: str  # one sentence: who, where, what, and who waits for it
    others: Ranks = ()  # who waits because of it
    evidence: tuple[str, ...] = ()  # what this is concluded from, a line each
    next_step: str = ""  # one or two sentences, with what to type
    cell: str | None = None  # "cell 7"
    line: int | None = None  # of `file`, where the first of `ranks` is
    file: str | None = None
    sure: bool = True  # False: perhaps
    waits: tuple[tuple[Ranks, Ranks, str], ...] = ()  # who waits, for whom, in what: "all_reduce #41"

    @property
    def sentence(self) -> str:
        """The title as it is told, without a full stop: what is not sure begins with "Perhaps"."""
        return self.title if self.sure else f"Perhaps: {self.title[:1].lower()}{self.title[1:]}"


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


class _Case:
    """One question, with everything that is known."""

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        silent_hosts: Sequence[str],
        earlier: Sequence[RankSnapshot],
    ) -> None:
        by_rank = {snapshot.rank: looks.acting(snapshot) for snapshot in snapshots}
        self.looks = {rank: by_rank[rank] for rank in sorted(by_rank)}
        self.before = {snapshot.rank: looks.acting(snapshot) for snapshot in earlier}
        self.world: Ranks = tuple(self.looks)
        self.axes = dict(axes or {})
        self.silent_hosts = tuple(silent_hosts)
        self.doings = {rank: looks.what_it_does(snapshot) for rank, snapshot in self.looks.items()}
        self.rings = Rings(self.looks.values())
        transfers = {rank: looks.open_transfers(snapshot) for rank, snapshot in self.looks.items()}
        self.waits = waits(self.doings, self.rings, transfers)
        self.cells = {look.file: plain(look.cell, 80) for look in self.looks.values() if look.file and look.cell}
        self.explained: set[int] = set()  # ranks that a finding speaks of
        self._reached: dict[Ranks, frozenset[int]] = {}
        self._latecomers_found: list[Latecomer] | None = None
        self._calls: dict[object, str] = {}  # names of operations: to compare a thousand members each time is slow

    def findings(self) -> list[Finding]:
        found = [*self._hosts(), *self._disagreements(), *self._alone(), *self._roots(), *self._circles()]
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
            for at, those in _grouped(ranks, lambda rank: self._op_at(rank, said.ops[rank])):
                what = words if said.kind == "different-collectives" else f"{any_op.op} with {words}"
                evidence.append(f"{name_ranks(those)}: {what}{_at(at)}")
        majority = next(words for words, ranks in said.sides.items() if not set(ranks) & set(guilty))
        those = tuple(rank for rank in said.members if rank not in guilty)
        first = said.ops[guilty[0]]
        at = self._op_at(guilty[0], first)
        sides = " and ".join(words for words, ranks in said.sides.items() if set(ranks) & set(guilty))
        group = self._call(any_op)
        if said.kind == "different-collectives":
            number = f"as number {said.seq}{group.partition(f'#{said.seq}')[2]}"
            title = (
                f"{_name(guilty)} called {sides}{_at(at)} {number}, where {name_ranks(those)} called {majority}"
                f"{_at(self._op_at(those[0], said.ops[those[0]]))}"
            )
        else:
            title = f"{_name(guilty)} brought {sides} to {group}{_at(at)}, where {name_ranks(those)} brought {majority}"
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
            yield self._finding(
                "alone-in-collective",
                guilty,
                f"{_name(guilty)} {verb('waits', guilty)} in {self._call(wait.op)}"
                f"{_at(self._op_at(guilty[0], wait.op))}, to which the other {len(absent)} ranks do not come: {does}",
                at=self._op_at(guilty[0], wait.op),
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
        does, here = verb(doing.words, roots), _at(doing.at)
        if kind == "straggler":
            evidence += [self._how_late(each) for each in self._late() if each.rank in roots]
            waiting_there = self._where_others_wait(others, roots, lead=", while ")
            title = f"{_name(roots)} {verb('is', roots)} late but {verb('moves', roots)}{here}{waiting_there}"
        elif kind == "python-loop":
            title = f"{_name(roots)} {verb('runs', roots)} in a loop{here}{there}"
        else:
            title = f"{_name(roots)} {does}{here}{there}"
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
            f"{_name(guilty)} {verb('waits', guilty)} in {self._call(wait.op)}{_at(at)}, "
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
            f"{_name(makers)} {verb('makes', makers)} a process group{_at(self.doings[makers[0]].at)}, "
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
            title = f"{_name(core)} all {act} first{_at(at)}: {ring}{more}"
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
            does = f"{there.words}{waits_for}{_at(there.at)}"
            title = f"Rank {rank} waits in {self._call(op)}{_at(at)}, but rank {peer} {does}"
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
                f"{op.op} #{op.seq} of group {name_ranks(op.group_ranks)}{_at(self._op_at(ranks[0], op))}"
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
                    f"Rank {guilty} waits in {self._call(op)}{_at(at)}, but it is rank {meant} "
                    f"that waits for it, in {self._call(transfers[other])}{_at(there)}",
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
                f"{_name(ranks)} {verb(words, ranks)}{_at(at)}{self._for_how_long(ranks)}",
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
            f"{name_ranks(those)} brought {what}{_at(at)}"
            for (what, at), those in _grouped(
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
                f"Rank {rank} comes last to nearly every {op.op}{_at(self._op_at(rank, op))}: "
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
                f"{_name(ranks)} {verb('runs', ranks)} the same code{_at(at)} without a collective or a step"
                f"{self._for_how_long(ranks)}",
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
            f"{verb(doing.words, rest)}{_at(doing.at)}"
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
            f"{name_ranks(those)} {verb(words, those)}{_at(at)}"
            for (words, at), those in _grouped(ended, lambda rank: (self.doings[rank].words, self.doings[rank].at))
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

    # ---- words

    def _finding(
        self,
        kind: str,
        ranks: Ranks,
        title: str,
        *,
        at: At | None = None,
        others: Iterable[int] = (),
        evidence: Sequence[str] = (),
        sure: bool = True,
    ) -> Finding:
        rest = tuple(sorted(set(others)))
        pids = [self.looks[rank].pid for rank in ranks if rank in self.looks]
        step = KINDS[kind].next_step.format(
            ranks=format_ranks(ranks) if ranks else "",
            first=ranks[0] if ranks else "",
            name=name_ranks(ranks) if ranks else "the ranks",
            pids=" ".join(str(pid) for pid in pids if pid is not None) or "PID",
        )
        stop = KINDS[kind].stop
        first = self.looks.get(ranks[0]) if ranks else None
        cell = at.cell if at is not None else None
        if cell is None and first is not None:
            cell = first.cell or first.last_cell
        lines = [line for line in evidence if line]
        endpoints = {rank: looks.endpoint_of(self.looks[rank]) for rank in (*ranks, *rest) if rank in self.looks}
        acting = tuple(sorted(rank for rank, endpoint in endpoints.items() if endpoint is not None))
        for endpoint, those in _grouped(acting, endpoints.__getitem__):
            lines.append(f"{name_ranks(those)}: {' in its endpoint '.join(endpoint or ())}")
        if acting:
            stop = f"Stop ends waiting for an actor, not its endpoint; %mesh kill {format_ranks(acting)} does."
        if by_axis := self._by_axis(ranks):
            lines.append(f"{name_ranks(ranks)}: all with {by_axis}")
        return Finding(
            kind=kind,
            ranks=ranks,
            others=rest,
            title=title,
            evidence=tuple(dict.fromkeys(lines)),
            next_step=f"{step} {stop}".strip(),
            cell=cell,
            line=at.line if at is not None else None,
            file=at.file if at is not None and at.file else None,
            sure=sure,
            waits=self._edges({*ranks, *rest}),
        )

    def _edges(self, ranks: Collection[int]) -> tuple[tuple[Ranks, Ranks, str], ...]:
        gathered: dict[tuple[Ranks, str], list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            if (wait := self.waits.get(rank)) is not None:
                gathered[wait.for_ranks, self._call(wait.op)].append(rank)
        return tuple((tuple(those), for_ranks, what) for (for_ranks, what), those in gathered.items())

    def _op_at(self, rank: int, op: CollectiveSeen) -> At | None:
        """The line at which a rank called an operation, or where it is if that is not known."""
        snapshot = self.looks.get(rank)
        if snapshot is None:
            return None
        at = looks.op_line(op, snapshot) or (self.doings[rank].at if self.doings[rank].op is op else None)
        if at is not None and at.file in self.cells:  # a rank that has ended the cell does not say which it was
            return replace(at, cell=self.cells[at.file])
        return at

    def _where_others_wait(self, others: Collection[int], roots: Ranks, lead: str = ", where ") -> str:
        """`, where ranks 0-2 wait (cell 7, line 3)`: those who wait for the roots directly, or else whoever waits."""
        direct = [rank for rank in others if rank in self.waits and set(roots) & set(self.waits[rank].for_ranks)]
        shown = sorted(direct or others)
        if not shown:
            return ""
        wait = self.waits.get(shown[0])
        if wait is None:
            return f"{lead}{name_ranks(shown)} {verb('waits', shown)}"
        same = [rank for rank in shown if rank in self.waits and self._call(self.waits[rank].op) == self._call(wait.op)]
        at = self._op_at(same[0], wait.op)
        inside = f" in {self._call(wait.op)}" if lead != ", where " else ""
        return f"{lead}{name_ranks(same)} {verb('waits', same)}{inside}{_in_brackets(at)}"

    def _who_waits(self, ranks: Iterable[int]) -> list[str]:
        def key(rank: int) -> tuple[str, At | None, Ranks]:
            wait = self.waits[rank]
            return self._call(wait.op), self._op_at(rank, wait.op), wait.for_ranks

        told = []
        for (what, at, for_ranks), those in _grouped(sorted({*ranks} & self.waits.keys()), key):
            since = max(self.waits[rank].op.began_s for rank in those)
            whom = f", for {name_ranks(for_ranks)}" if for_ranks else ""
            told.append(
                f"{name_ranks(those)} {verb('waits', those)} in {what}{_at(at)}{whom}"
                f"{f', since {seconds(since)}' if since else ''}"
            )
        return told[: MAX_PLACES + 1]

    def _call(self, op: CollectiveSeen) -> str:
        key = op.op, op.peer, op.seq, group_key(op)
        if key not in self._calls:
            self._calls[key] = name_op(op, self.world)
        return self._calls[key]

    def _place(self, ranks: Ranks) -> str:
        """`ranks 1-2 sleep at cell 7, line 3`: what the first of these does, which is what they all do."""
        doing = self.doings[ranks[0]]
        return f"{name_ranks(ranks)} {verb(doing.words, ranks)}{_at(doing.at)}"

    def _waiting_line(self, ranks: Ranks) -> str:
        return next(iter(self._who_waits(ranks)), "")

    def _details(self, ranks: Ranks) -> list[str]:
        """What snapshots say of these ranks beyond their place."""
        told: list[str] = []
        for rank in ranks[:4]:
            prefix = f"rank {rank}: " if len(ranks) > 1 else ""
            told += [f"{prefix}{line}" for line in self.doings[rank].evidence]
            snapshot = self.looks[rank]
            op = looks.current_op(snapshot)
            # What was seen from outside is as old as the last beat.
            if op is not None and snapshot.source == "inside" and rank not in self.waits:
                told.append(f"{prefix}its {self._call(op)} is open since {seconds(op.began_s)}")
        if len(ranks) > 4:
            told.append(f"and {len(ranks) - 4} more ranks alike")
        return told

    def _calls_made(self, op: CollectiveSeen) -> list[str]:
        """How many collectives of a group each member made, where that differs."""
        front = self.rings.front.get(group_key(op), {})
        members = [rank for rank in op.group_ranks if rank in self.looks]
        told = [
            f"{name_ranks(those)} made {count} {'collective' if count == 1 else 'collectives'} of the group"
            for count, those in _grouped(members, lambda rank: front.get(rank, 0))
        ]
        return told if len(told) > 1 and op.seq else []

    def _for_how_long(self, ranks: Ranks) -> str:
        running = [self.looks[rank].running_s for rank in ranks if rank in self.looks]
        longest = max((value for value in running if value is not None), default=None)
        return f", {seconds(longest)} into the cell" if longest else ""

    def _does(self, ranks: Ranks, doing: Doing) -> str:
        return f"{'they' if len(ranks) > 1 else 'it'} {verb(doing.words, ranks)}"

    def _places(self, ranks: Ranks) -> list[str]:
        by_place = _grouped(ranks, lambda rank: (self.doings[rank].words, self.doings[rank].at))
        by_place.sort(key=lambda pair: -len(pair[1]))
        told = [f"{name_ranks(those)} {verb(words, those)}{_at(at)}" for (words, at), those in by_place[:MAX_PLACES]]
        if len(by_place) > MAX_PLACES:
            told.append(f"and {len(by_place) - MAX_PLACES} more places")
        return told

    def _progress(self, ranks: Ranks) -> list[str]:
        """Signs of life: operations since the earlier look, steps, the last operations."""
        told = []
        pairs = [(self.looks[rank], self.before[rank]) for rank in ranks if rank in self.before]
        made = sum(max(0, now.num_collectives - before.num_collectives) for now, before in pairs)
        if made:
            told.append(f"{made} collectives were called between the two looks")
        elif pairs and all(looks.has_moved(before, now) is False for now, before in pairs):
            told.append("no rank left its line between the two looks")
        rates = [now.health.steps_per_s for now in map(self.looks.__getitem__, ranks) if now.health is not None]
        known = [rate for rate in rates if rate]
        if known:
            told.append(
                f"{min(known):.3g} to {max(known):.3g} steps per second"
                if len(known) > 1
                else f"{known[0]:.3g} steps per second"
            )
        going = [
            (self.waits[rank].op, rank)
            for rank in ranks
            if rank in self.waits and self.waits[rank].op.op not in POINT_TO_POINT and not self.waits[rank].for_ranks
        ]
        if going:
            op = max(going, key=lambda pair: pair[0].began_s)[0]
            told.append(f"all members are in {self._call(op)} ({shapes(op)} {op.dtype}), since {seconds(op.began_s)}")
        return told

    def _by_axis(self, ranks: Ranks) -> str | None:
        """`dp=1`, where these are just the ranks with that coordinate."""
        names, sizes = list(self.axes), list(self.axes.values())
        total = 1
        for size in sizes:
            total *= size
        if len(ranks) < 2 or len(names) < 2 or total != len(self.world) or len(ranks) == total:
            return None
        points = list(product(*map(range, sizes)))
        chosen = [points[rank] for rank in ranks if rank < total]
        for axis, name in enumerate(names):
            held = {point[axis] for point in chosen}
            if len(held) == 1 and len(ranks) * sizes[axis] == total:
                return f"{name}={held.pop()}"
        return None


def _grouped(ranks: Iterable[int], key: Callable[[int], K]) -> list[tuple[K, Ranks]]:
    """Ranks that are alike, in order of the first of each."""
    gathered: dict[K, list[int]] = {}
    for rank in ranks:
        gathered.setdefault(key(rank), []).append(rank)
    return [(each, tuple(those)) for each, those in gathered.items()]


def _name(ranks: Sequence[int]) -> str:
    named = name_ranks(ranks)
    return named[:1].upper() + named[1:]


def _painted(text: str, colour: str, wanted: bool) -> str:
    return f"{colour}{text}{_OFF}" if wanted else text


def _at(at: object) -> str:
    return f" at {at}" if at is not None else ""


def _in_brackets(at: At | None) -> str:
    return f" ({at})" if at is not None else ""
