"""Telemetry for subscribers: the current state of a mesh, and the changes since the last update.

`MeshTelemetry` is the state, updated from reports that the supervisor receives anyway; `Subscription` tracks what one
client has received, and makes `MeshUpdate`s. Pure: time is passed in, plain data comes out. A steady mesh changes
little, so numbers are rounded to visible precision.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from meshbook.diagnose.findings import Finding
from meshbook.ids import CallId
from meshbook.supervisor.series import STORED_METRICS, Curves, Series
from meshbook.supervisor.stalls import Beat
from meshbook.wire.messages import (
    CollectiveInfo,
    CollectiveStatus,
    Health,
    MeshInfo,
    MeshSummary,
    MeshUpdate,
    RankInfo,
    RankMetrics,
    RankStatus,
    ScalarPoint,
)

# Limits of one update; a reader could not follow more, so the excess is left out.
_MAX_COLLECTIVES_PER_UPDATE = 2_048
_MAX_SCALARS_PER_UPDATE = 4_096
_MAX_COLLECTIVES_PER_RANK = 32  # of each rank
_MEMORY_ROUNDING_BYTES = 1 << 16  # bytes: a process's memory fluctuates by pages
# Seconds from which the age of a heartbeat is shown: one per second is regular, and a late one no news.
_LATE_S = 2.5

T = TypeVar("T")
# One of a rank's collectives: `CollectiveStatus.key`.
CollectiveKey = tuple[str, str, int]


class MeshTelemetry:
    """The current state of the mesh, and its history in numbers."""

    def __init__(self) -> None:
        self.series = Series()
        self.scalars = Curves()
        self.mesh = MeshSummary()
        self.calls: tuple[str, ...] = ()  # the cells that run
        self.findings: tuple[Finding, ...] = ()
        self.collectives: dict[int, dict[CollectiveKey, CollectiveStatus]] = {}  # by rank
        self.collective_changes = RecentEvents[CollectiveStatus](_MAX_COLLECTIVES_PER_UPDATE)
        self.new_scalars = RecentEvents[ScalarPoint](_MAX_SCALARS_PER_UPDATE)
        self._open_collectives: dict[int, dict[CollectiveKey, CollectiveStatus]] = {}  # by rank
        self._ranks: dict[int, RankStatus] = {}
        self._dirty_ranks: set[int] = set()  # ranks of which something was received since their RankStatus was built
        self._infos: dict[int, tuple[RankInfo, bool]] = {}  # rank -> what its host reports, whether it awaits input
        self._metrics: dict[int, dict[str, Any]] = {}  # rank -> fields of its RankStatus, not rounded
        self._collective_counts: dict[int, tuple[float, int]] = {}  # rank -> time, number of collectives

    @property
    def ranks(self) -> dict[int, RankStatus]:
        """The current status of each rank. Built when it is asked for: of a mesh that idles, nobody may ask."""
        for rank in sorted(self._dirty_ranks):
            if rank in self._infos:
                self._ranks[rank] = self._build_rank(*self._infos[rank])
                self._dirty_ranks.discard(rank)
        return self._ranks

    # ---- inputs

    def add_metrics(self, metrics: RankMetrics, at: float) -> None:
        """Record the metrics of a rank's heartbeat, received at `at`."""
        rank, at = metrics.rank, at - metrics.age_s
        self._dirty_ranks.add(rank)
        if metrics.health is not None:
            values = _measurements(metrics.health)
            counted_at, count = self._collective_counts.get(rank, (at, 0))
            if at > counted_at:
                values["collectives_per_s"] = (metrics.health.num_collectives - count) / (at - counted_at)
            self._collective_counts[rank] = (at, metrics.health.num_collectives)
            self._metrics.setdefault(rank, {}).update(values)
        self._update_collectives(rank, metrics.collectives, at)
        for scalar in metrics.scalars:
            point = ScalarPoint(scalar.name, rank, scalar.step, scalar.value, round(at - scalar.age_s, 3))
            if self.scalars.put(point.name, rank, point.step, point.value, point.at):
                self.new_scalars.append(point)

    def _update_collectives(self, rank: int, collectives: Sequence[CollectiveInfo], at: float) -> None:
        recorded, were_open = self.collectives.setdefault(rank, {}), self._open_collectives.get(rank, {})
        if not collectives and not were_open:
            return
        still_open: dict[CollectiveKey, CollectiveStatus] = {}
        for collective in collectives:
            status = _collective_status(rank, collective, at)
            key = status.key
            if key in were_open:  # the first report's time is kept, so that it does not jitter
                status = msgspec.structs.replace(status, began_at=were_open[key].began_at)
            if collective.ended_s_ago is None:
                still_open[key] = status
            if were_open.get(key) != status:
                self._record_collective(recorded, status)
        for key, status in were_open.items():  # reports always include open ones: one that is missing has ended
            if key not in still_open and recorded.get(key) == status:
                self._record_collective(recorded, msgspec.structs.replace(status, ended_at=round(at, 3)))
        self._open_collectives[rank] = still_open
        if len(recorded) > 2 * _MAX_COLLECTIVES_PER_RANK:
            for key in [key for key in list(recorded)[:-_MAX_COLLECTIVES_PER_RANK] if key not in still_open]:
                del recorded[key]

    def _record_collective(self, recorded: dict[CollectiveKey, CollectiveStatus], status: CollectiveStatus) -> None:
        recorded.pop(status.key, None)  # reinserted at the end: the oldest are dropped first
        recorded[status.key] = status
        self.collective_changes.append(status)

    def update_mesh(self, info: MeshInfo, calls: tuple[str, ...]) -> None:
        """Set the supervisor's current state of the mesh, and the cells that run."""
        self.calls = calls
        self.mesh = MeshSummary(
            name=info.name,
            axes=dict(info.spec.axes) if info.spec is not None else {},
            backend=info.backend,
            cells_run=info.cells_run,
            clients=info.clients,
        )

    def update_ranks(self, ranks: Iterable[RankInfo], awaiting_input: Iterable[int]) -> None:
        """Set the supervisor's current state of ranks."""
        awaiting = set(awaiting_input)
        for info in ranks:
            known = (info, info.rank in awaiting)
            if self._infos.get(info.rank) != known:
                self._infos[info.rank] = known
                self._dirty_ranks.add(info.rank)

    def forget_ranks(self, ranks: Iterable[int]) -> None:
        """Forget ranks that have left the mesh, but for their past numbers."""
        by_rank: tuple[dict[int, Any], ...] = (
            self._ranks,
            self.collectives,
            self._open_collectives,
            self._infos,
            self._metrics,
            self._collective_counts,
        )
        for rank in ranks:
            for known in by_rank:
                known.pop(rank, None)
            self._dirty_ranks.discard(rank)

    def sample_series(self, at: float, ranks: Iterable[int]) -> None:
        """Record the current numbers of these ranks in the series."""
        for rank in ranks:
            info = self._infos[rank][0] if rank in self._infos else None
            if info is None or info.state == "dead":
                continue
            numbers = self._metrics.get(rank, {})
            for name, rounded in _STORED:
                value = info.rss_bytes if name == "rss_bytes" else numbers.get(name)
                if value is not None:
                    self.series.put(name, rank, at, rounded(value))

    def _build_rank(self, info: RankInfo, awaiting_input: bool) -> RankStatus:
        fields = msgspec.structs.asdict(info)
        fields |= {name: _round(name, fields[name]) for name in ("rss_bytes", "peak_rss_bytes")}
        fields |= {"awaiting_input": awaiting_input, "beat_age_s": 0}
        if info.state == "dead":
            return RankStatus(**{**fields, "rss_bytes": None})
        fields["beat_age_s"] = _shown_age_s(info)
        if (waiting := self.oldest_open_collective(info.rank)) is not None:
            fields |= {"waits_in": f"{waiting.op} #{waiting.seq}", "waits_since": round(waiting.began_at, 1)}
        measured = {name: _round(name, value) for name, value in self._metrics.get(info.rank, {}).items()}
        return RankStatus(**fields, **measured)

    def last_beat(self, rank: int) -> Beat:
        """Return what the last heartbeat of a rank says of its progress, rounded as in its `RankStatus`."""
        (info, awaiting_input), numbers = self._infos[rank], self._metrics.get(rank, {})
        if info.state == "dead":
            return Beat(rank, info.line, awaiting_input=awaiting_input)
        return Beat(
            rank,
            info.line,
            awaiting_input,
            _shown_age_s(info),
            _round("cpu_percent", numbers.get("cpu_percent")),
            numbers.get("num_collectives"),
            numbers.get("num_steps"),
        )

    def oldest_open_collective(self, rank: int) -> CollectiveStatus | None:
        """Return the oldest collective that a rank is in; None if there is none."""
        return min(self._open_collectives.get(rank, {}).values(), key=lambda one: one.began_at, default=None)

    # ---- outputs

    def full_update(self, at: float, since: float, call: CallId) -> MeshUpdate:
        """Return the complete state, in reply to `call`.

        Args:
            since: wall clock; older numbers are left out.
        """
        # Each rank's newest collectives, as many as the limit of all ranks together allows.
        share = max(2, _MAX_COLLECTIVES_PER_UPDATE // max(1, len(self.collectives)))
        return MeshUpdate(
            timestamp=at,
            call=call,
            mesh=self.mesh,
            ranks=tuple(self.ranks.values()),
            calls=self.calls,
            collectives=tuple(one for some in self.collectives.values() for one in list(some.values())[-share:]),
            curves=self.scalars.dump(since),
            findings=msgspec.to_builtins(self.findings),
            series=self.series.dump(since),
        )


class Subscription:
    """One subscribed client, and what it has received: nothing before its first `full_update`."""

    def __init__(self, telemetry: MeshTelemetry, updates_per_s: float) -> None:
        self.period_s = 1.0 / updates_per_s
        self._telemetry = telemetry
        self._mark_sent()

    def full_update(self, at: float, since: float, call: CallId) -> MeshUpdate:
        """Return the complete state; the following updates contain only changes."""
        self._mark_sent()
        return self._telemetry.full_update(at, since, call)

    def next_update(self, at: float) -> MeshUpdate | None:
        """Return the changes since the last update; None if there are none."""
        telemetry = self._telemetry
        collectives = {(one.rank, one.key): one for one in telemetry.collective_changes.after(self._num_changes)}
        update = MeshUpdate(
            timestamp=at,
            mesh=telemetry.mesh if telemetry.mesh != self._mesh else None,
            ranks=tuple(status for rank, status in telemetry.ranks.items() if status != self._ranks.get(rank)),
            calls=telemetry.calls if telemetry.calls != self._calls else None,
            collectives=tuple(collectives.values()),
            scalars=telemetry.new_scalars.after(self._num_scalars),
            findings=msgspec.to_builtins(telemetry.findings) if telemetry.findings != self._findings else None,
        )
        self._mark_sent()
        return update if update != MeshUpdate(timestamp=at) else None

    def _mark_sent(self) -> None:
        telemetry = self._telemetry
        self._mesh, self._ranks, self._calls = telemetry.mesh, dict(telemetry.ranks), telemetry.calls
        self._findings = telemetry.findings
        self._num_scalars, self._num_changes = telemetry.new_scalars.total, telemetry.collective_changes.total


class RecentEvents(Generic[T]):
    """The latest events of a kind, and how many there were in total."""

    def __init__(self, size: int) -> None:
        self.total = 0
        self._events: deque[T] = deque(maxlen=size)

    def append(self, event: T) -> None:
        self._events.append(event)
        self.total += 1

    def after(self, number: int) -> tuple[T, ...]:
        """Return the events after the first `number` ones, as far as they are stored, oldest first."""
        return tuple(itertools.islice(self._events, max(0, len(self._events) - (self.total - number)), None))


def _collective_status(rank: int, collective: CollectiveInfo, at: float) -> CollectiveStatus:
    """Return a collective of a rank's report with wall-clock times; the report was made at `at`."""
    return CollectiveStatus(
        rank=rank,
        group=collective.group,
        seq=collective.seq,
        op=collective.op,
        began_at=round(at - collective.began_s_ago, 3),
        ended_at=None if collective.ended_s_ago is None else round(at - collective.ended_s_ago, 3),
        failure=collective.failure,
        group_ranks=collective.group_ranks,
        peer=collective.peer,
        line=collective.frame.line if collective.frame is not None else None,
    )


def _shown_age_s(info: RankInfo) -> int:
    """Return the age of a rank's heartbeat in whole seconds; 0 while heartbeats arrive regularly."""
    return int(info.beat_age_s) if info.beat_age_s is not None and info.beat_age_s >= _LATE_S else 0


def _measurements(health: Health) -> dict[str, Any]:
    """Return the fields of a `RankStatus` that a rank measures; those of its GPU begin with "gpu_"."""
    values = {name: getattr(health, name) for name in health.__struct_fields__ if name != "gpu"}
    if health.gpu is not None:
        values |= {f"gpu_{name}": value for name, value in msgspec.structs.asdict(health.gpu).items() if name != "uuid"}
    return values


def _round(name: str, value: Any) -> Any:
    """Round a field of `RankStatus` to the precision that a reader distinguishes; its unit is the end of its name."""
    return value if value is None or isinstance(value, str) else _rounding_of(name)(value)


@functools.cache
def _rounding_of(name: str) -> Callable[[Any], Any]:
    if name.endswith("_bytes"):
        return lambda value: -(-value // _MEMORY_ROUNDING_BYTES) * _MEMORY_ROUNDING_BYTES
    if name.endswith("_per_s"):
        return lambda value: float(f"{value:.3g}")
    return (lambda value: round(value, 2)) if name.endswith("_s") else round


_STORED = tuple((name, _rounding_of(name)) for name in STORED_METRICS)
