"""Telemetry for subscribers: the current state of a mesh, and the changes since the last update.

`MeshTelemetry` is the state, updated from reports that the supervisor receives anyway; `Subscription` tracks what one
client has received. Pure: time is passed in, plain data comes out. A steady mesh changes little, so numbers are rounded
to visible precision, and ranks are sent by column.

The data of a `MeshUpdate`, in which every key is optional:

    whole        True: this is the complete state and replaces what was known before
    once         True: a reply to a single query; no updates follow
    mesh         name, axes, groups, backend, cells_run, clients, started_at
    ranks        {field of RankStatus: [[rank, ...], [value, ...]]}: what changed
    calls        all that run now, as CallStatus
    collectives  those that started or ended, as CollectiveStatus
    scalars      [name, rank, step, value, wall clock] each
    curves       with `whole`, in place of `scalars`: the past, as `Curves.dump` returns it
    lines        those that ranks printed, as PrintedLine
    findings     all that hold now, as diagnose's Finding
    series       with `whole`: the past, as `Series.dump` returns it
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
from meshbook.wire.messages import CollectiveInfo, FoldedItem, Line, MeshInfo, RankInfo, RankMetrics

MAX_RETAINED_LINES = 500
_MAX_LINE_CHARS = 2_000
# Limits of one update; a reader could not follow more, so the excess is left out.
_MAX_LINES_PER_UPDATE = 200
_MAX_COLLECTIVES_PER_UPDATE = 2_048
_MAX_SCALARS_PER_UPDATE = 4_096
_MAX_COLLECTIVES_PER_RANK = 32  # of each rank
_MEMORY_ROUNDING_BYTES = 1 << 16  # bytes: a process's memory fluctuates by pages


class RankStatus(Struct, frozen=True, gc=False, omit_defaults=True):
    """The current status of one rank."""

    rank: int
    state: str = "starting"  # as in RankInfo
    host: str = ""
    pid: int | None = None
    device: str = "cpu"
    call: str | None = None  # running now
    cell: str | None = None  # the user's name for it: "cell 7"
    line: int | None = None  # of that cell
    beat_age_s: int = 0  # whole seconds; 0 while heartbeats arrive regularly
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
    awaiting_input: bool = False  # waits for a reply to input()
    exit: str | None = None  # how it ended


class CallStatus(Struct, frozen=True, gc=False):
    """One running call."""

    call: str
    label: str
    ranks: Ranks
    began_at: float  # wall clock


class CollectiveStatus(Struct, frozen=True, gc=False, omit_defaults=True):
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


class PrintedLine(Struct, frozen=True, gc=False):
    """One folded line of output as it was printed, without trailing colour codes or rank names."""

    at: float  # wall clock
    ranks: Ranks
    stream: str
    text: str


_RANK_FIELDS = tuple(name for name in RankStatus.__struct_fields__ if name != "rank")

# Identifies one of a rank's collectives: group, operation, sequence number. Numbers restart when groups are re-formed.
CollectiveKey = tuple[str, str, int]


class MeshTelemetry:
    """The current state of the mesh, and its history in numbers."""

    def __init__(self) -> None:
        self.series = Series()
        self.scalars = Curves()
        self.ranks: dict[int, RankStatus] = {}
        self.calls: tuple[CallStatus, ...] = ()
        self.collectives: dict[int, dict[CollectiveKey, CollectiveStatus]] = {}
        self.findings: tuple[Any, ...] = ()
        self.lines: deque[PrintedLine] = deque(maxlen=MAX_RETAINED_LINES)
        self.num_lines = 0  # ever
        self.recent_scalars: deque[list[Any]] = deque(maxlen=_MAX_SCALARS_PER_UPDATE)  # newest last
        self.num_scalars = 0  # ever
        # started or ended, newest last
        self.recent_collectives: deque[CollectiveStatus] = deque(maxlen=_MAX_COLLECTIVES_PER_UPDATE)
        self.num_collective_changes = 0  # ever
        self._open_collectives: dict[int, dict[CollectiveKey, CollectiveStatus]] = {}  # by rank
        self._dirty_ranks: set[int] = set()  # ranks with metrics received since their RankStatus was built
        self._built_from: dict[int, tuple[RankInfo, bool]] = {}  # rank -> the inputs of its RankStatus
        self._metrics: dict[int, dict[str, Any]] = {}
        self._collective_counts: dict[int, tuple[float, int]] = {}  # rank -> time, number of collectives
        self._info: MeshInfo | None = None

    # ---- inputs

    def add_metrics(self, metrics: RankMetrics, at: float) -> None:
        """Record the metrics of a rank's heartbeat, received at `at`."""
        rank, at = metrics.rank, at - metrics.age_s
        values = self._metrics.setdefault(rank, {})
        self._dirty_ranks.add(rank)
        if metrics.health is not None:
            health = metrics.health
            values["cpu_percent"] = round(health.cpu_percent)
            values["gil_lag_s"] = round(health.gil_lag_s, 2)
            values["num_collectives"], values["steps"] = health.num_collectives, health.num_steps
            values["steps_per_s"] = _round_rate(health.steps_per_s)
            last_count = self._collective_counts.get(rank)
            if last_count is not None and at > last_count[0]:
                values["collectives_per_s"] = _round_rate(
                    (health.num_collectives - last_count[1]) / (at - last_count[0])
                )
            self._collective_counts[rank] = (at, health.num_collectives)
            if health.gpu is not None:
                gpu = health.gpu
                values |= {
                    "gpu": gpu.name,
                    "gpu_allocated_bytes": _round_up_bytes(gpu.allocated_bytes),
                    "gpu_reserved_bytes": _round_up_bytes(gpu.reserved_bytes),
                    "gpu_peak_bytes": _round_up_bytes(gpu.peak_bytes),
                    "gpu_used_bytes": _round_up_bytes(gpu.used_bytes),
                    "gpu_total_bytes": gpu.total_bytes,
                    "gpu_utilisation": None if gpu.utilisation is None else round(gpu.utilisation),
                }
        self._update_collectives(rank, metrics.collectives, at)
        self.scalars.num_dropped += metrics.num_dropped
        for scalar in metrics.scalars:
            logged_at = round(at - scalar.age_s, 3)
            if self.scalars.put(scalar.name, rank, scalar.step, scalar.value, logged_at):
                self.recent_scalars.append([scalar.name, rank, scalar.step, scalar.value, logged_at])
                self.num_scalars += 1

    def _update_collectives(self, rank: int, collectives: Iterable[CollectiveInfo], at: float) -> None:
        recorded, were_open = self.collectives.setdefault(rank, {}), self._open_collectives.get(rank, {})
        still_open: dict[CollectiveKey, CollectiveStatus] = {}
        for collective in collectives:
            key = (collective.group, collective.op, collective.seq)
            status = CollectiveStatus(
                rank=rank,
                group=collective.group,
                seq=collective.seq,
                op=collective.op,
                # The first report's time is kept, so that it does not jitter.
                began_at=were_open[key].began_at if key in were_open else round(at - collective.began_s_ago, 3),
                ended_at=None if collective.ended_s_ago is None else round(at - collective.ended_s_ago, 3),
                group_ranks=collective.group_ranks,
                peer=collective.peer,
                file=collective.frame.file if collective.frame is not None else None,
                line=collective.frame.line if collective.frame is not None else None,
                failed=collective.failure,
            )
            if collective.ended_s_ago is None:
                still_open[key] = status
            if were_open.get(key) != status:
                self._record_collective(recorded, key, status)
        for key, status in were_open.items():  # reports always include open ones: one that is missing has ended
            if key not in still_open and recorded.get(key) == status:
                self._record_collective(recorded, key, msgspec.structs.replace(status, ended_at=round(at, 3)))
        self._open_collectives[rank] = still_open
        if len(recorded) > 2 * _MAX_COLLECTIVES_PER_RANK:
            for key in [key for key in list(recorded)[:-_MAX_COLLECTIVES_PER_RANK] if key not in still_open]:
                del recorded[key]

    def _record_collective(
        self, recorded: dict[CollectiveKey, CollectiveStatus], key: CollectiveKey, status: CollectiveStatus
    ) -> None:
        recorded.pop(key, None)  # reinserted at the end: the oldest are dropped first
        recorded[key] = status
        self.recent_collectives.append(status)
        self.num_collective_changes += 1

    def add_output(self, items: Iterable[FoldedItem], at: float) -> None:
        """Record folded output, as sent to the client that ran the cell."""
        for item in items:
            if isinstance(item, Line) and not item.live:
                text = item.text if len(item.text) <= _MAX_LINE_CHARS else item.text[:_MAX_LINE_CHARS] + " ... (cut)"
                self.lines.append(PrintedLine(at=round(at, 3), ranks=item.ranks, stream=item.stream, text=text))
                self.num_lines += 1

    def update_mesh(self, info: MeshInfo, calls: tuple[CallStatus, ...]) -> None:
        """Set the supervisor's current state of the mesh and its calls."""
        self._info, self.calls = info, calls

    def update_ranks(self, ranks: Iterable[RankInfo], awaiting_input: Iterable[int]) -> None:
        """Set the supervisor's current state of ranks."""
        awaiting = set(awaiting_input)
        changed = {}
        for info in ranks:
            built_from = (info, info.rank in awaiting)
            if info.rank in self._dirty_ranks or self._built_from.get(info.rank) != built_from:
                changed[info.rank] = self._build_rank(*built_from)
                self._built_from[info.rank] = built_from
        self._dirty_ranks -= changed.keys()
        self.ranks = {**self.ranks, **changed}  # a new dict: subscriptions compare it with the previous one

    def sample_series(self, at: float, ranks: Iterable[int]) -> None:
        """Record the current numbers of these ranks in the series."""
        self.series.sample(at, [self.ranks[rank] for rank in ranks if rank in self.ranks])

    def _build_rank(self, info: RankInfo, awaiting_input: bool) -> RankStatus:
        metrics = self._metrics.get(info.rank, {})
        is_dead = info.state == "dead"
        open_collective = None if is_dead else self.oldest_open_collective(info.rank)
        age = 0 if info.beat_age_s is None or info.beat_age_s < 2.5 else int(info.beat_age_s)
        return RankStatus(
            rank=info.rank,
            state=info.state,
            host=info.host,
            pid=info.pid,
            device=info.device,
            call=info.call,
            cell=info.cell,
            line=info.line,
            beat_age_s=0 if is_dead else age,
            rss_bytes=None if is_dead else _round_up_bytes(info.rss_bytes),
            peak_rss_bytes=_round_up_bytes(info.peak_rss_bytes),
            waits_in=None if open_collective is None else f"{open_collective.op} #{open_collective.seq}",
            waits_since=None if open_collective is None else round(open_collective.began_at, 1),
            awaiting_input=awaiting_input,
            exit=info.exit,
            **(metrics if not is_dead else {}),
        )

    def oldest_open_collective(self, rank: int) -> CollectiveStatus | None:
        """Return the oldest collective that a rank is in; None if there is none."""
        return min(self._open_collectives.get(rank, {}).values(), key=lambda one: one.began_at, default=None)

    # ---- outputs

    def mesh_data(self) -> dict[str, Any]:
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

    def full_data(self, since: float) -> dict[str, Any]:
        """Return the complete state.

        Args:
            since: wall clock; older numbers are left out.
        """
        return {
            "whole": True,
            "mesh": self.mesh_data(),
            "ranks": changed_columns({}, self.ranks),
            "calls": msgspec.to_builtins(self.calls),
            "collectives": msgspec.to_builtins(self._newest_collectives()),
            "curves": self.scalars.dump(since),
            "lines": msgspec.to_builtins(tuple(self.lines)),
            "findings": msgspec.to_builtins(self.findings),
            "series": self.series.dump(since),
        }

    def _newest_collectives(self) -> list[CollectiveStatus]:
        """Return each rank's newest collectives, as many as the limit of all ranks together allows."""
        share = max(2, _MAX_COLLECTIVES_PER_UPDATE // max(1, len(self.collectives)))
        return [one for some in self.collectives.values() for one in list(some.values())[-share:]]


class Subscription:
    """One subscribed client, and what it has received."""

    def __init__(self, telemetry: MeshTelemetry, updates_per_s: float) -> None:
        self.period_s = 1.0 / updates_per_s
        self._telemetry = telemetry
        self._mesh: dict[str, Any] = {}
        self._ranks: dict[int, RankStatus] = {}
        self._calls: tuple[CallStatus, ...] = ()
        self._findings: tuple[Any, ...] = ()
        self._num_lines = self._num_scalars = self._num_changes = 0

    def full_update(self, since: float) -> dict[str, Any]:
        """Return the complete state; the following updates contain only changes."""
        data = self._telemetry.full_data(since)
        self._mark_sent()
        return data

    def next_update(self) -> dict[str, Any]:
        """Return the changes since the last update; empty if there are none."""
        telemetry = self._telemetry
        data: dict[str, Any] = {}
        if (mesh := telemetry.mesh_data()) != self._mesh:
            data["mesh"] = mesh
        if changed := changed_columns(self._ranks, telemetry.ranks):
            data["ranks"] = changed
        if telemetry.calls != self._calls:
            data["calls"] = msgspec.to_builtins(telemetry.calls)
        if new := telemetry.num_collective_changes - self._num_changes:
            last = {
                (one.rank, one.group, one.op, one.seq): one for one in _take_last(telemetry.recent_collectives, new)
            }
            data["collectives"] = msgspec.to_builtins(list(last.values()))
        if new := telemetry.num_scalars - self._num_scalars:
            data["scalars"] = _take_last(telemetry.recent_scalars, new)
        if new := telemetry.num_lines - self._num_lines:
            data["lines"] = msgspec.to_builtins(_take_last(telemetry.lines, min(new, _MAX_LINES_PER_UPDATE)))
        if telemetry.findings != self._findings:
            data["findings"] = msgspec.to_builtins(telemetry.findings)
        self._mark_sent()
        return data

    def _mark_sent(self) -> None:
        telemetry = self._telemetry
        self._mesh, self._ranks, self._calls = telemetry.mesh_data(), telemetry.ranks, telemetry.calls
        self._findings = telemetry.findings
        self._num_lines, self._num_scalars, self._num_changes = (
            telemetry.num_lines,
            telemetry.num_scalars,
            telemetry.num_collective_changes,
        )


def changed_columns(
    old_ranks: Mapping[int, RankStatus], new_ranks: Mapping[int, RankStatus]
) -> dict[str, list[list[Any]]]:
    """Return the changed fields of ranks, by field: `{"line": [[0, 1], [7, 9]]}`."""
    found: dict[str, list[list[Any]]] = {}
    for rank, current in new_ranks.items():
        previous = old_ranks.get(rank)
        if previous is current or previous == current:
            continue
        if previous is None:
            previous = RankStatus(rank=rank, state="")
        for name in _RANK_FIELDS:
            value = getattr(current, name)
            if value != getattr(previous, name):
                ranks, values = found.setdefault(name, [[], []])
                ranks.append(rank)
                values.append(value)
    return found


T = TypeVar("T")


def _take_last(some: deque[T], count: int) -> list[T]:
    """Return the last `count` items, oldest first."""
    return list(itertools.islice(some, max(0, len(some) - count), None))


def _round_up_bytes(count: int | None) -> int | None:
    return None if count is None else -(-count // _MEMORY_ROUNDING_BYTES) * _MEMORY_ROUNDING_BYTES


def _round_rate(rate: float | None) -> float | None:
    """Round to three significant digits, the precision that a reader distinguishes."""
    return None if rate is None else float(f"{rate:.3g}")
