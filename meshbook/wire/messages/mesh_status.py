"""Messages for subscribers: the current status of a mesh, and its changes.

A number of `RankStatus` with a row in `METRICS` is stored over time, drawn as a chart and exported to Prometheus as the
row says; nothing else is sent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.mesh import RankInfo
from meshbook.wire.messages.payloads import Message


class RankStatus(RankInfo, array_like=True, frozen=True, gc=False):
    """The current status of one rank: what its host reports, and its measurements of itself, rounded for display."""

    state: Literal["starting", "idle", "busy", "silent", "dead"] = "starting"
    host: str = ""
    beat_age_s: int = 0  # whole seconds; 0 while heartbeats arrive regularly
    cpu_percent: int | None = None  # of one core, all threads
    gil_lag_s: float | None = None
    num_collectives: int | None = None
    collectives_per_s: float | None = None
    num_steps: int | None = None  # calls of `meshbook.log`
    steps_per_s: float | None = None
    gpu_name: str | None = None
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_utilisation: int | None = None  # 0..100
    waits_in: str | None = None  # the oldest open collective: "all_reduce #41"
    waits_since: float | None = None  # wall clock
    awaiting_input: bool = False  # waits for a reply to input()


@dataclass(frozen=True)
class Metric:
    """What views do with a number of `RankStatus`: it is a gauge of Prometheus, and may have a chart."""

    gauge: str  # its name, after "meshbook_rank_"; with its unit: bytes, seconds, ratio
    description: str  # there
    factor: float = 1.0  # from our unit to Prometheus'
    chart: tuple[str, str, str] | None = None  # its name, title and unit; None: it is not stored over time


# By field of `RankStatus`; charts in the order in which they are drawn.
METRICS = {
    "rss_bytes": Metric("memory_bytes", "Resident memory of the rank's process", chart=(".memory", "Memory", "bytes")),
    "gpu_allocated_bytes": Metric(
        "gpu_allocated_bytes", "GPU memory that torch handed out", chart=(".gpu", "GPU memory, allocated", "bytes")
    ),
    "cpu_percent": Metric("cpu_ratio", "Cores that the rank keeps busy", 0.01, (".cpu", "CPU, percent of a core", "")),
    "gpu_utilisation": Metric(
        "gpu_utilisation_ratio", "Time that its GPU was busy", 0.01, (".utilisation", "GPU utilisation, percent", "")
    ),
    "collectives_per_s": Metric(
        "collectives_per_second",
        "Collectives that the rank begins per second",
        chart=(".collectives", "Collectives per second", ""),
    ),
    "steps_per_s": Metric(
        "steps_per_second", "Steps that it logs per second", chart=(".steps", "Steps per second", "")
    ),
    "beat_age_s": Metric("beat_age_seconds", "Since the rank was last heard of; 0 below 3 s"),
    "peak_rss_bytes": Metric("memory_peak_bytes", "Its peak"),
    "gil_lag_s": Metric("gil_lag_seconds", "Longest wait for the interpreter lock in the last second"),
    "gpu_reserved_bytes": Metric("gpu_reserved_bytes", "GPU memory that torch holds"),
    "gpu_used_bytes": Metric("gpu_used_bytes", "GPU memory in use, by every process"),
    "gpu_total_bytes": Metric("gpu_size_bytes", "GPU memory there is"),
}


class CollectiveStatus(Struct, frozen=True, gc=False, omit_defaults=True):
    """One collective on one rank."""

    rank: int
    group: str
    seq: int  # in its group
    op: str
    began_at: float  # wall clock
    ended_at: float | None = None  # None: still open
    failure: str | None = None  # why it was not completed, one line
    group_ranks: Ranks = ()
    peer: int | None = None
    line: int | None = None  # of the user's code

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies it among its rank's collectives. Numbers restart when groups are re-formed."""
        return self.group, self.op, self.seq


class ScalarPoint(Struct, array_like=True, frozen=True, gc=False):
    """One value that a rank passed to `meshbook.log`."""

    name: str
    rank: int
    step: int
    value: float
    at: float  # wall clock


class RingDump(Struct, array_like=True, frozen=True, gc=False):
    """The past of one metric of one rank in one resolution (`supervisor.series.SampleRing`)."""

    metric: str
    rank: int
    level: int  # index of the resolution
    newest_step: int
    num_in_newest: int  # values in the newest step
    values: bytes  # an array of floats


class CurveDump(Struct, array_like=True, frozen=True, gc=False):
    """The past of one scalar on one rank (`supervisor.series.Curve`)."""

    name: str
    rank: int
    stride: int
    num_since_stored: int
    columns: tuple[bytes, bytes, bytes]  # steps, values, times: arrays of doubles


class MeshSummary(Struct, frozen=True, gc=False, omit_defaults=True):
    """The mesh as a whole; fields as in `MeshInfo`."""

    name: str = ""
    axes: dict[str, int] = {}
    backend: str | None = None
    cells_run: int = 0
    clients: tuple[str, ...] = ()


class MeshUpdate(Message, omit_defaults=True):
    """What a subscriber does not know yet; with `call` everything that is known, in place of what was known before."""

    timestamp: float  # wall clock
    call: CallId | None = None  # of the Subscribe that this replies to
    mesh: MeshSummary | None = None
    ranks: tuple[RankStatus, ...] = ()  # those that changed
    calls: tuple[str, ...] | None = None  # the cells that run now
    collectives: tuple[CollectiveStatus, ...] = ()  # those that started or ended
    scalars: tuple[ScalarPoint, ...] = ()
    findings: tuple[dict[str, Any], ...] | None = None  # all that hold now: fields of `diagnose.findings.Finding`
    series: tuple[RingDump, ...] = ()  # the past, in a reply
    curves: tuple[CurveDump, ...] = ()  # ... of scalars
