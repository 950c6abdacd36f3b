"""Describe a mesh's state: what is known of its ranks, and the sentences that name ranks, lines and waits.

`findings` decides which ranks are the cause; this module formats it. Pure, as all of this folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from msgspec import Struct

from meshbook.diagnose import rank_activity
from meshbook.diagnose.actor_waits import ActorWaitGraph
from meshbook.diagnose.collectives import Rings, find_waits, format_shapes, group_key, name_op
from meshbook.diagnose.kinds import KINDS
from meshbook.diagnose.rank_activity import Activity, SourceLocation, conjugate, format_duration
from meshbook.diagnose.source_files import sanitize_line
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import POINT_TO_POINT, CollectiveInfo, RankSnapshot

K = TypeVar("K")

# Locations of ranks that are listed as evidence; further ones are counted.
MAX_LOCATIONS = 6


class Finding(Struct, frozen=True, omit_defaults=True):
    """One reason why the mesh makes no progress, or the statement that nothing is wrong."""

    kind: str  # a key of `kinds.KINDS`
    ranks: Ranks  # the ranks that cause it, or that it is about
    title: str  # one sentence: which ranks, where, what, and which ranks wait for it
    others: Ranks = ()  # ranks that wait because of it
    evidence: tuple[str, ...] = ()  # what the finding is based on, a line each
    next_step: str = ""  # one or two sentences, with the command to type
    cell: str | None = None  # "cell 7"
    line: int | None = None  # line of `file` at which the first of `ranks` is
    file: str | None = None
    sure: bool = True  # False: shown with "Perhaps"
    waits: tuple[tuple[Ranks, Ranks, str], ...] = ()  # (waiting ranks, ranks waited for, operation): "all_reduce #41"

    @property
    def sentence(self) -> str:
        """Return the title as shown, without a full stop; if not sure, it begins with "Perhaps"."""
        return self.title if self.sure else f"Perhaps: {self.title[:1].lower()}{self.title[1:]}"


class ReportBase:
    """What is known of a mesh at one moment, and its formatting as text."""

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        earlier: Sequence[RankSnapshot],
    ) -> None:
        by_rank = {snapshot.rank: rank_activity.with_actor_thread_as_main(snapshot) for snapshot in snapshots}
        self.snapshots = {rank: by_rank[rank] for rank in sorted(by_rank)}
        self.earlier = {snapshot.rank: rank_activity.with_actor_thread_as_main(snapshot) for snapshot in earlier}
        self.world_ranks: Ranks = tuple(self.snapshots)
        self.axes = dict(axes or {})
        self.activities = {rank: rank_activity.activity_of(snapshot) for rank, snapshot in self.snapshots.items()}
        self.rings = Rings(self.snapshots.values())
        transfers = {rank: rank_activity.in_flight_transfers(snapshot) for rank, snapshot in self.snapshots.items()}
        self.waits = find_waits(self.activities, self.rings, transfers)
        self.cell_labels = {
            look.file: sanitize_line(look.cell, 80) for look in self.snapshots.values() if look.file and look.cell
        }
        self.actor_waits = ActorWaitGraph({snapshot.rank: snapshot for snapshot in snapshots})
        self._op_names: dict[object, str] = {}  # cache: building a name compares up to a thousand members

    def _make_finding(
        self,
        kind: str,
        ranks: Ranks,
        title: str,
        *,
        at: SourceLocation | None = None,
        others: Iterable[int] = (),
        evidence: Sequence[str] = (),
        sure: bool = True,
    ) -> Finding:
        waiting = tuple(sorted(set(others)))
        pids = [self.snapshots[rank].pid for rank in ranks if rank in self.snapshots]
        step = KINDS[kind].next_step.format(
            ranks=format_ranks(ranks) if ranks else "",
            first=ranks[0] if ranks else "",
            name=name_ranks(ranks) if ranks else "the ranks",
            pids=" ".join(str(pid) for pid in pids if pid is not None) or "PID",
        )
        stop = KINDS[kind].interrupt_hint
        first = self.snapshots.get(ranks[0]) if ranks else None
        cell = at.cell if at is not None else None
        if cell is None and first is not None:
            cell = first.cell or first.last_cell
        lines = [line for line in evidence if line]
        endpoints = {
            rank: rank_activity.actor_endpoint_of(self.snapshots[rank])
            for rank in (*ranks, *waiting)
            if rank in self.snapshots
        }
        in_endpoint = tuple(sorted(rank for rank, endpoint in endpoints.items() if endpoint is not None))
        for endpoint, those in group_ranks_by(in_endpoint, endpoints.__getitem__):
            lines.append(f"{name_ranks(those)}: {' in its endpoint '.join(endpoint or ())}")
        if kind != "actor-deadlock":
            lines += [step.phrase for rank in (*ranks, *waiting) for step in self.actor_waits.waits_of_rank(rank)][
                :MAX_LOCATIONS
            ]
        if in_endpoint:
            stop = "Stop where the answer is awaited, or interrupt(actors), interrupts the endpoint; the actor lives."
        if by_axis := self._axis_selector(ranks):
            lines.append(f"{name_ranks(ranks)}: all with {by_axis}")
        return Finding(
            kind=kind,
            ranks=ranks,
            others=waiting,
            title=title,
            evidence=tuple(dict.fromkeys(lines)),
            next_step=f"{step} {stop}".strip(),
            cell=cell,
            line=at.line if at is not None else None,
            file=at.file if at is not None and at.file else None,
            sure=sure,
            waits=self._wait_edges({*ranks, *waiting}),
        )

    def _wait_edges(self, ranks: Collection[int]) -> tuple[tuple[Ranks, Ranks, str], ...]:
        ranks_by_edge: dict[tuple[Ranks, str], list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            if (wait := self.waits.get(rank)) is not None:
                ranks_by_edge[wait.for_ranks, self._op_name(wait.op)].append(rank)
        return tuple((tuple(those), for_ranks, what) for (for_ranks, what), those in ranks_by_edge.items())

    def _op_location(self, rank: int, op: CollectiveInfo) -> SourceLocation | None:
        """Return the line at which a rank called an operation; its current location if that is unknown."""
        snapshot = self.snapshots.get(rank)
        if snapshot is None:
            return None
        at = rank_activity.op_location(op, snapshot) or (
            self.activities[rank].location if self.activities[rank].op is op else None
        )
        # A rank that has ended the cell does not report which it was.
        if at is not None and at.file in self.cell_labels:
            return replace(at, cell=self.cell_labels[at.file])
        return at

    def _where_others_wait(self, others: Collection[int], roots: Ranks, lead: str = ", where ") -> str:
        """Return `, where ranks 0-2 wait (cell 7, line 3)` for the ranks that wait for the roots.

        Of `others`, those that wait directly are named; if there are none, all.
        """
        direct = [rank for rank in others if rank in self.waits and set(roots) & set(self.waits[rank].for_ranks)]
        shown = sorted(direct or others)
        if not shown:
            return ""
        wait = self.waits.get(shown[0])
        if wait is None:
            return f"{lead}{name_ranks(shown)} {conjugate('waits', shown)}"
        same = [
            rank
            for rank in shown
            if rank in self.waits and self._op_name(self.waits[rank].op) == self._op_name(wait.op)
        ]
        at = self._op_location(same[0], wait.op)
        inside = f" in {self._op_name(wait.op)}" if lead != ", where " else ""
        return f"{lead}{name_ranks(same)} {conjugate('waits', same)}{inside}{parenthesized(at)}"

    def _wait_evidence(self, ranks: Iterable[int]) -> list[str]:
        def key(rank: int) -> tuple[str, SourceLocation | None, Ranks]:
            wait = self.waits[rank]
            return self._op_name(wait.op), self._op_location(rank, wait.op), wait.for_ranks

        lines = []
        for (what, at, for_ranks), those in group_ranks_by(sorted({*ranks} & self.waits.keys()), key):
            since = max(self.waits[rank].op.began_s_ago for rank in those)
            whom = f", for {name_ranks(for_ranks)}" if for_ranks else ""
            lines.append(
                f"{name_ranks(those)} {conjugate('waits', those)} in {what}{at_clause(at)}{whom}"
                f"{f', since {format_duration(since)}' if since else ''}"
            )
        return lines[: MAX_LOCATIONS + 1]

    def _op_name(self, op: CollectiveInfo) -> str:
        key = op.op, op.peer, op.seq, group_key(op)
        if key not in self._op_names:
            self._op_names[key] = name_op(op, self.world_ranks)
        return self._op_names[key]

    def _activity_sentence(self, ranks: Ranks) -> str:
        """Return `ranks 1-2 sleep at cell 7, line 3` for ranks that all do what the first of them does."""
        activity = self.activities[ranks[0]]
        return f"{name_ranks(ranks)} {conjugate(activity.phrase, ranks)}{at_clause(activity.location)}"

    def _first_wait_evidence(self, ranks: Ranks) -> str:
        return next(iter(self._wait_evidence(ranks)), "")

    def _snapshot_evidence(self, ranks: Ranks) -> list[str]:
        """Return evidence in the snapshots of these ranks other than their location."""
        lines: list[str] = []
        for rank in ranks[:4]:
            prefix = f"rank {rank}: " if len(ranks) > 1 else ""
            lines += [f"{prefix}{line}" for line in self.activities[rank].evidence]
            snapshot = self.snapshots[rank]
            op = rank_activity.current_op(snapshot)
            # A snapshot taken from outside knows operations only as of the last heartbeat.
            if op is not None and snapshot.source == "inside" and rank not in self.waits:
                lines.append(f"{prefix}its {self._op_name(op)} is open since {format_duration(op.began_s_ago)}")
        if len(ranks) > 4:
            lines.append(f"and {len(ranks) - 4} more ranks alike")
        return lines

    def _collective_count_evidence(self, op: CollectiveInfo) -> list[str]:
        """Return how many collectives of a group each member began; empty if all counts are equal."""
        last_seq = self.rings.last_seq.get(group_key(op), {})
        members = [rank for rank in op.group_ranks if rank in self.snapshots]
        lines = [
            f"{name_ranks(those)} made {count} {'collective' if count == 1 else 'collectives'} of the group"
            for count, those in group_ranks_by(members, lambda rank: last_seq.get(rank, 0))
        ]
        return lines if len(lines) > 1 and op.seq else []

    def _running_time_clause(self, ranks: Ranks) -> str:
        running = [self.snapshots[rank].running_s for rank in ranks if rank in self.snapshots]
        longest = max((value for value in running if value is not None), default=None)
        return f", {format_duration(longest)} into the cell" if longest else ""

    def _activity_clause(self, ranks: Ranks, activity: Activity) -> str:
        return f"{'they' if len(ranks) > 1 else 'it'} {conjugate(activity.phrase, ranks)}"

    def _location_evidence(self, ranks: Ranks) -> list[str]:
        by_activity = group_ranks_by(ranks, lambda rank: (self.activities[rank].phrase, self.activities[rank].location))
        by_activity.sort(key=lambda pair: -len(pair[1]))
        shown = by_activity[:MAX_LOCATIONS]
        lines = [f"{name_ranks(those)} {conjugate(phrase, those)}{at_clause(at)}" for (phrase, at), those in shown]
        if len(by_activity) > MAX_LOCATIONS:
            lines.append(f"and {len(by_activity) - MAX_LOCATIONS} more places")
        return lines

    def _progress_evidence(self, ranks: Ranks) -> list[str]:
        """Return evidence of progress: collectives since the earlier snapshots, step rates, the open collective."""
        lines = []
        pairs = [(self.snapshots[rank], self.earlier[rank]) for rank in ranks if rank in self.earlier]
        made = sum(max(0, now.num_collectives - before.num_collectives) for now, before in pairs)
        if made:
            lines.append(f"{made} collectives were called between the two looks")
        elif pairs and all(rank_activity.has_moved(before, now) is False for now, before in pairs):
            lines.append("no rank left its line between the two looks")
        rates = [now.health.steps_per_s for now in map(self.snapshots.__getitem__, ranks) if now.health is not None]
        known = [rate for rate in rates if rate]
        if known:
            lines.append(
                f"{min(known):.3g} to {max(known):.3g} steps per second"
                if len(known) > 1
                else f"{known[0]:.3g} steps per second"
            )
        in_flight = [
            (self.waits[rank].op, rank)
            for rank in ranks
            if rank in self.waits and self.waits[rank].op.op not in POINT_TO_POINT and not self.waits[rank].for_ranks
        ]
        if in_flight:
            op = max(in_flight, key=lambda pair: pair[0].began_s_ago)[0]
            lines.append(
                f"all members are in {self._op_name(op)} ({format_shapes(op)} {op.dtype}), "
                f"since {format_duration(op.began_s_ago)}"
            )
        return lines

    def _axis_selector(self, ranks: Ranks) -> str | None:
        """Return `dp=1` if these are exactly the ranks with that coordinate."""
        names, sizes = list(self.axes), list(self.axes.values())
        total = 1
        for size in sizes:
            total *= size
        if len(ranks) < 2 or len(names) < 2 or total != len(self.world_ranks) or len(ranks) == total:
            return None
        points = list(product(*map(range, sizes)))
        chosen = [points[rank] for rank in ranks if rank < total]
        for axis, name in enumerate(names):
            coordinates = {point[axis] for point in chosen}
            if len(coordinates) == 1 and len(ranks) * sizes[axis] == total:
                return f"{name}={coordinates.pop()}"
        return None


def group_ranks_by(ranks: Iterable[int], key: Callable[[int], K]) -> list[tuple[K, Ranks]]:
    """Group ranks by key, in order of the first rank of each group."""
    ranks_by_key: dict[K, list[int]] = {}
    for rank in ranks:
        ranks_by_key.setdefault(key(rank), []).append(rank)
    return [(each, tuple(those)) for each, those in ranks_by_key.items()]


def capitalized_ranks(ranks: Sequence[int]) -> str:
    """Return `Ranks 0-2`, for the beginning of a sentence."""
    named = name_ranks(ranks)
    return named[:1].upper() + named[1:]


def at_clause(at: object) -> str:
    """Return ` at cell 7, line 3`; empty if the location is unknown."""
    return f" at {at}" if at is not None else ""


def parenthesized(at: SourceLocation | None) -> str:
    return f" ({at})" if at is not None else ""
