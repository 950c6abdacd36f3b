"""What those that watch a mesh are told: the picture of it now, and what changed since they were told last.

`Scene` is the picture, kept up to date from what the supervisor hears anyway; `Watcher` remembers what one client has
been told. Pure: time comes in, plain data goes out. A steady mesh changes little, so numbers are rounded to what can be
seen, and ranks travel by column.

The data of a `Watched`, every key of which may be missing:

    whole        True: this is everything; what was known before is void
    once         True: an answer, not news; nothing follows from it
    mesh         name, axes, groups, backend, cells_run, clients, started_at
    ranks        {field of RankNow: [[rank, ...], [value, ...]]}: what changed
    calls        all that run now, as CallNow
    collectives  those that began or ended, as CollectiveNow
    scalars      [name, rank, step, value, wall clock] each
    curves       with `whole`, in place of `scalars`: the past, as `Curves.dump` gives it
    lines        those that ranks printed, as LineSaid
    findings     all that hold now, as diagnose's Finding
    series       with `whole`: the past, as `Series.dump` gives it
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from meshbook.ids import Ranks
from meshbook.supervisor.series import Curves, Series
from meshbook.wire.messages import CollectiveSeen, FoldedItem, Line, Measured, MeshInfo, RankInfo

LINES_KEPT = 500
_LINE_CHARS = 2_000
# Of one piece of news; what is beyond is not told, for the reader could not follow it either.
_LINES_TOLD = 200
_COLLECTIVES_TOLD = 2_048
_SCALARS_TOLD = 4_096
_COLLECTIVES_KEPT = 32  # of each rank
_MEMORY_GRAIN = 1 << 16  # bytes: a process's memory flickers by pages


class RankNow(Struct, frozen=True, gc=False, omit_defaults=True):
    """One rank, now."""

    rank: int
    state: str = "starting"  # as in RankInfo
    host: str = ""
    pid: int | None = None
    device: str = "cpu"
    call: str | None = None  # running now
    cell: str | None = None  # how people know it: "cell 7"
    line: int | None = None  # of that cell
    beat_age_s: int = 0  # whole seconds; 0 where it is heard of regularly
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    cpu_percent: int | None = None  # of one core, all threads
    gil_lag_s: float | None = None
    num_collectives: int | None = None
    collectives_per_s: float | None = None
    steps: int | None = None  # calls of `meshbook.log`
    steps_per_s: float | None = None
    gpu: str | None = None  # its name
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_utilisation: int | None = None  # 0..100
    waits_in: str | None = None  # the oldest open collective: "all_reduce #41"
    waits_since: float | None = None  # wall clock
    asking: bool = False  # waits for an answer to input()
    exit: str | None = None  # how it ended


class CallNow(Struct, frozen=True, gc=False):
    """One call that runs."""

    call: str
    label: str
    ranks: Ranks
    began_at: float  # wall clock


class CollectiveNow(Struct, frozen=True, gc=False, omit_defaults=True):
    """One collective on one rank."""

    rank: int
    group: str
    seq: int  # in its group
    op: str
    began_at: float  # wall clock
    ended_at: float | None = None  # None: still open
    group_ranks: Ranks = ()
    peer: int | None = None
    file: str | None = None
    line: int | None = None
    failed: str | None = None


class LineSaid(Struct, frozen=True, gc=False):
    """One folded line of output, without colours' end or ranks' names: as it was printed."""

    at: float  # wall clock
    ranks: Ranks
    stream: str
    text: str


_FIELDS = tuple(name for name in RankNow.__struct_fields__ if name != "rank")

# A rank's collective among its others: group, operation, sequence number. Numbers begin anew when groups are re-formed.
Which = tuple[str, str, int]


class Scene:
    """The mesh as it is now, and its past in numbers."""

    def __init__(self) -> None:
        self.series = Series()
        self.scalars = Curves()
        self.ranks: dict[int, RankNow] = {}
        self.calls: tuple[CallNow, ...] = ()
        self.collectives: dict[int, dict[Which, CollectiveNow]] = {}
        self.findings: tuple[Any, ...] = ()
        self.lines: deque[LineSaid] = deque(maxlen=LINES_KEPT)
        self.num_lines = 0  # ever
        self.news: deque[list[Any]] = deque(maxlen=_SCALARS_TOLD)  # scalars, newest last
        self.num_scalars = 0  # ever
        self.changes: deque[CollectiveNow] = deque(maxlen=_COLLECTIVES_TOLD)  # begun or ended, newest last
        self.num_changes = 0  # ever
        self._open: dict[int, dict[Which, CollectiveNow]] = {}  # rank -> those that it is in
        self._fresh: set[int] = set()  # ranks that were heard of since they were put together
        self._made_of: dict[int, tuple[RankInfo, bool]] = {}  # rank -> what `ranks` was made of
        self._measured: dict[int, dict[str, Any]] = {}
        self._counted: dict[int, tuple[float, int]] = {}  # rank -> when, how many collectives
        self._info: MeshInfo | None = None

    # ---- what is heard

    def measured(self, told: Measured, at: float) -> None:
        """A rank's beat, heard at this time."""
        rank, at = told.rank, at - told.age_s
        known = self._measured.setdefault(rank, {})
        self._fresh.add(rank)
        if told.health is not None:
            health = told.health
            known["cpu_percent"] = round(health.cpu_percent)
            known["gil_lag_s"] = round(health.gil_lag_s, 2)
            known["num_collectives"], known["steps"] = health.num_collectives, health.steps
            known["steps_per_s"] = _rounded(health.steps_per_s)
            before = self._counted.get(rank)
            if before is not None and at > before[0]:
                known["collectives_per_s"] = _rounded((health.num_collectives - before[1]) / (at - before[0]))
            self._counted[rank] = (at, health.num_collectives)
            if health.gpu is not None:
                gpu = health.gpu
                known |= {
                    "gpu": gpu.name,
                    "gpu_allocated_bytes": _grained(gpu.allocated_bytes),
                    "gpu_reserved_bytes": _grained(gpu.reserved_bytes),
                    "gpu_peak_bytes": _grained(gpu.peak_bytes),
                    "gpu_used_bytes": _grained(gpu.used_bytes),
                    "gpu_total_bytes": gpu.total_bytes,
                    "gpu_utilisation": None if gpu.utilisation is None else round(gpu.utilisation),
                }
        self._heard_collectives(rank, told.collectives, at)
        self.scalars.num_dropped += told.num_dropped
        for scalar in told.scalars:
            when = round(at - scalar.age_s, 3)
            if self.scalars.put(scalar.name, rank, scalar.step, scalar.value, when):
                self.news.append([scalar.name, rank, scalar.step, scalar.value, when])
                self.num_scalars += 1

    def _heard_collectives(self, rank: int, told: Iterable[CollectiveSeen], at: float) -> None:
        known, before = self.collectives.setdefault(rank, {}), self._open.get(rank, {})
        inside: dict[Which, CollectiveNow] = {}
        for one in told:
            which = (one.group, one.op, one.seq)
            now = CollectiveNow(
                rank=rank,
                group=one.group,
                seq=one.seq,
                op=one.op,
                # The first word counts, so that it does not jitter.
                began_at=before[which].began_at if which in before else round(at - one.began_s, 3),
                ended_at=None if one.ended_s is None else round(at - one.ended_s, 3),
                group_ranks=one.group_ranks,
                peer=one.peer,
                file=one.line.file if one.line is not None else None,
                line=one.line.line if one.line is not None else None,
                failed=one.failed,
            )
            if one.ended_s is None:
                inside[which] = now
            if before.get(which) != now:
                self._change(known, which, now)
        for which, now in before.items():  # open ones are always told: one that is not has ended
            if which not in inside and known.get(which) == now:
                self._change(known, which, msgspec.structs.replace(now, ended_at=round(at, 3)))
        self._open[rank] = inside
        if len(known) > 2 * _COLLECTIVES_KEPT:
            for which in [which for which in list(known)[:-_COLLECTIVES_KEPT] if which not in inside]:
                del known[which]

    def _change(self, known: dict[Which, CollectiveNow], which: Which, now: CollectiveNow) -> None:
        known.pop(which, None)  # to the end: the oldest are dropped first
        known[which] = now
        self.changes.append(now)
        self.num_changes += 1

    def said(self, items: Iterable[FoldedItem], at: float) -> None:
        """Folded output that goes to whoever ran the cell."""
        for item in items:
            if isinstance(item, Line) and not item.live:
                text = item.text if len(item.text) <= _LINE_CHARS else item.text[:_LINE_CHARS] + " ... (cut)"
                self.lines.append(LineSaid(at=round(at, 3), ranks=item.ranks, stream=item.stream, text=text))
                self.num_lines += 1

    def is_now(self, info: MeshInfo, calls: tuple[CallNow, ...]) -> None:
        """What the supervisor's memory says of the mesh and its calls."""
        self._info, self.calls = info, calls

    def ranks_are(self, ranks: Iterable[RankInfo], asking: Iterable[int]) -> None:
        """What it says of ranks."""
        waiting = set(asking)
        changed = {}
        for info in ranks:
            made_of = (info, info.rank in waiting)
            if info.rank in self._fresh or self._made_of.get(info.rank) != made_of:
                changed[info.rank] = self._rank(*made_of)
                self._made_of[info.rank] = made_of
        self._fresh -= changed.keys()
        self.ranks = {**self.ranks, **changed}  # another dict: those that watch compare with the one before

    def beat(self, at: float, ranks: Iterable[int]) -> None:
        """Note the numbers of these ranks in the series."""
        self.series.saw(at, [self.ranks[rank] for rank in ranks if rank in self.ranks])

    def _rank(self, info: RankInfo, asking: bool) -> RankNow:
        measured = self._measured.get(info.rank, {})
        dead = info.state == "dead"
        waits = None if dead else self.waiting(info.rank)
        age = 0 if info.beat_age_s is None or info.beat_age_s < 2.5 else int(info.beat_age_s)
        return RankNow(
            rank=info.rank,
            state=info.state,
            host=info.host,
            pid=info.pid,
            device=info.device,
            call=info.call,
            cell=info.cell,
            line=info.line,
            beat_age_s=0 if dead else age,
            rss_bytes=None if dead else _grained(info.rss_bytes),
            peak_rss_bytes=_grained(info.peak_rss_bytes),
            waits_in=None if waits is None else f"{waits.op} #{waits.seq}",
            waits_since=None if waits is None else round(waits.began_at, 1),
            asking=asking,
            exit=info.exit,
            **(measured if not dead else {}),
        )

    def waiting(self, rank: int) -> CollectiveNow | None:
        """The oldest collective that a rank is in."""
        return min(self._open.get(rank, {}).values(), key=lambda one: one.began_at, default=None)

    # ---- what is told

    def mesh(self) -> dict[str, Any]:
        info = self._info
        if info is None:
            return {}
        return {
            "name": info.name,
            "axes": dict(info.spec.axes) if info.spec is not None else {},
            "groups": info.groups,
            "backend": info.backend,
            "cells_run": info.cells_run,
            "clients": list(info.clients),
            "started_at": info.started_at,
        }

    def whole(self, since: float) -> dict[str, Any]:
        """Everything.

        Args:
            since: wall clock; numbers older than that are left out.
        """
        return {
            "whole": True,
            "mesh": self.mesh(),
            "ranks": columns({}, self.ranks),
            "calls": msgspec.to_builtins(self.calls),
            "collectives": msgspec.to_builtins(self._newest_collectives()),
            "curves": self.scalars.dump(since),
            "lines": msgspec.to_builtins(tuple(self.lines)),
            "findings": msgspec.to_builtins(self.findings),
            "series": self.series.dump(since),
        }

    def _newest_collectives(self) -> list[CollectiveNow]:
        """Of each rank as many as all ranks together allow."""
        share = max(2, _COLLECTIVES_TOLD // max(1, len(self.collectives)))
        return [one for some in self.collectives.values() for one in list(some.values())[-share:]]


class Watcher:
    """One client that watches, and what it has been told."""

    def __init__(self, scene: Scene, per_s: float) -> None:
        self.period_s = 1.0 / per_s
        self._scene = scene
        self._mesh: dict[str, Any] = {}
        self._ranks: dict[int, RankNow] = {}
        self._calls: tuple[CallNow, ...] = ()
        self._findings: tuple[Any, ...] = ()
        self._num_lines = self._num_scalars = self._num_changes = 0

    def whole(self, since: float) -> dict[str, Any]:
        """Everything; from now on it is told what changes."""
        data = self._scene.whole(since)
        self._note()
        return data

    def news(self) -> dict[str, Any]:
        """What changed since it was told last; nothing where nothing did."""
        scene = self._scene
        data: dict[str, Any] = {}
        if (mesh := scene.mesh()) != self._mesh:
            data["mesh"] = mesh
        if changed := columns(self._ranks, scene.ranks):
            data["ranks"] = changed
        if scene.calls != self._calls:
            data["calls"] = msgspec.to_builtins(scene.calls)
        if new := scene.num_changes - self._num_changes:
            last = {(one.rank, one.group, one.op, one.seq): one for one in _newest(scene.changes, new)}
            data["collectives"] = msgspec.to_builtins(list(last.values()))
        if new := scene.num_scalars - self._num_scalars:
            data["scalars"] = _newest(scene.news, new)
        if new := scene.num_lines - self._num_lines:
            data["lines"] = msgspec.to_builtins(_newest(scene.lines, min(new, _LINES_TOLD)))
        if scene.findings != self._findings:
            data["findings"] = msgspec.to_builtins(scene.findings)
        self._note()
        return data

    def _note(self) -> None:
        scene = self._scene
        self._mesh, self._ranks, self._calls = scene.mesh(), scene.ranks, scene.calls
        self._findings = scene.findings
        self._num_lines, self._num_scalars, self._num_changes = scene.num_lines, scene.num_scalars, scene.num_changes


def columns(before: Mapping[int, RankNow], after: Mapping[int, RankNow]) -> dict[str, list[list[Any]]]:
    """What changed of ranks, by field: `{"line": [[0, 1], [7, 9]]}`."""
    found: dict[str, list[list[Any]]] = {}
    for rank, now in after.items():
        was = before.get(rank)
        if was is now or was == now:
            continue
        if was is None:
            was = RankNow(rank=rank, state="")
        for name in _FIELDS:
            value = getattr(now, name)
            if value != getattr(was, name):
                ranks, values = found.setdefault(name, [[], []])
                ranks.append(rank)
                values.append(value)
    return found


T = TypeVar("T")


def _newest(some: deque[T], count: int) -> list[T]:
    """The last so many, oldest first."""
    return list(itertools.islice(some, max(0, len(some) - count), None))


def _grained(count: int | None) -> int | None:
    return None if count is None else -(-count // _MEMORY_GRAIN) * _MEMORY_GRAIN


def _rounded(rate: float | None) -> float | None:
    """Three digits: what a reader tells apart."""
    return None if rate is None else float(f"{rate:.3g}")
