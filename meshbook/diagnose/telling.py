"""How a mesh's state is told: what is known of its ranks, and the sentences that name them, their lines, their waits.

`findings` decides who is to blame; what it says of them is put into words here. Pure, as all of this folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from msgspec import Struct

from meshbook.diagnose import looks
from meshbook.diagnose.actors import Calls
from meshbook.diagnose.code import plain
from meshbook.diagnose.groups import Rings, group_key, name_op, shapes, waits
from meshbook.diagnose.kinds import KINDS
from meshbook.diagnose.looks import At, Doing, seconds, verb
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveSeen, RankSnapshot

K = TypeVar("K")

# Different places of ranks that are listed as evidence; more are counted.
MAX_PLACES = 6


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


class Telling:
    """What is known of a mesh at one moment, in words."""

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        earlier: Sequence[RankSnapshot],
    ) -> None:
        by_rank = {snapshot.rank: looks.acting(snapshot) for snapshot in snapshots}
        self.looks = {rank: by_rank[rank] for rank in sorted(by_rank)}
        self.before = {snapshot.rank: looks.acting(snapshot) for snapshot in earlier}
        self.world: Ranks = tuple(self.looks)
        self.axes = dict(axes or {})
        self.doings = {rank: looks.what_it_does(snapshot) for rank, snapshot in self.looks.items()}
        self.rings = Rings(self.looks.values())
        transfers = {rank: looks.open_transfers(snapshot) for rank, snapshot in self.looks.items()}
        self.waits = waits(self.doings, self.rings, transfers)
        self.cells = {look.file: plain(look.cell, 80) for look in self.looks.values() if look.file and look.cell}
        self.calls = Calls({snapshot.rank: snapshot for snapshot in snapshots})
        self._calls: dict[object, str] = {}  # names of operations: to compare a thousand members each time is slow

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
        for endpoint, those in grouped(acting, endpoints.__getitem__):
            lines.append(f"{name_ranks(those)}: {' in its endpoint '.join(endpoint or ())}")
        if kind != "actor-deadlock":
            lines += [step.words for rank in (*ranks, *rest) for step in self.calls.of(rank)][:MAX_PLACES]
        if acting:
            stop = "Stop where the answer is awaited, or interrupt(actors), interrupts the endpoint; the actor lives."
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
        return f"{lead}{name_ranks(same)} {verb('waits', same)}{inside}{in_brackets(at)}"

    def _who_waits(self, ranks: Iterable[int]) -> list[str]:
        def key(rank: int) -> tuple[str, At | None, Ranks]:
            wait = self.waits[rank]
            return self._call(wait.op), self._op_at(rank, wait.op), wait.for_ranks

        told = []
        for (what, at, for_ranks), those in grouped(sorted({*ranks} & self.waits.keys()), key):
            since = max(self.waits[rank].op.began_s for rank in those)
            whom = f", for {name_ranks(for_ranks)}" if for_ranks else ""
            told.append(
                f"{name_ranks(those)} {verb('waits', those)} in {what}{place_of(at)}{whom}"
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
        return f"{name_ranks(ranks)} {verb(doing.words, ranks)}{place_of(doing.at)}"

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
            for count, those in grouped(members, lambda rank: front.get(rank, 0))
        ]
        return told if len(told) > 1 and op.seq else []

    def _for_how_long(self, ranks: Ranks) -> str:
        running = [self.looks[rank].running_s for rank in ranks if rank in self.looks]
        longest = max((value for value in running if value is not None), default=None)
        return f", {seconds(longest)} into the cell" if longest else ""

    def _does(self, ranks: Ranks, doing: Doing) -> str:
        return f"{'they' if len(ranks) > 1 else 'it'} {verb(doing.words, ranks)}"

    def _places(self, ranks: Ranks) -> list[str]:
        by_place = grouped(ranks, lambda rank: (self.doings[rank].words, self.doings[rank].at))
        by_place.sort(key=lambda pair: -len(pair[1]))
        shown = by_place[:MAX_PLACES]
        told = [f"{name_ranks(those)} {verb(words, those)}{place_of(at)}" for (words, at), those in shown]
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


def grouped(ranks: Iterable[int], key: Callable[[int], K]) -> list[tuple[K, Ranks]]:
    """Ranks that are alike, in order of the first of each."""
    gathered: dict[K, list[int]] = {}
    for rank in ranks:
        gathered.setdefault(key(rank), []).append(rank)
    return [(each, tuple(those)) for each, those in gathered.items()]


def capital(ranks: Sequence[int]) -> str:
    """`Ranks 0-2`, as a sentence begins."""
    named = name_ranks(ranks)
    return named[:1].upper() + named[1:]


def place_of(at: object) -> str:
    """` at cell 7, line 3`; nothing where no place is known."""
    return f" at {at}" if at is not None else ""


def in_brackets(at: At | None) -> str:
    return f" ({at})" if at is not None else ""
