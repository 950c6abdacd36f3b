"""Messages for subscribers: the current status of a mesh, and its changes.

A number of `RankStatus` with a `Metric` is stored over time, drawn as a chart, or exported to Prometheus, as the metric
says; nothing else needs to be told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Struct, field

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.core import Message, RankInfo


@dataclass(frozen=True)
class Metric:
    """What views do with a number of `RankStatus`."""

    gauge: str  # name in Prometheus, after "meshbook_rank_"; with its unit: bytes, seconds, ratio
    description: str  # there
    gauge_factor: float = 1.0  # from our unit to Prometheus'
    chart: str = ""  # name of its chart; "": it has none, and is not stored over time
    title: str = ""  # of the chart
    unit: str = ""  # of the chart


class RankStatus(RankInfo, frozen=True, gc=False, omit_defaults=True):
    """The current status of one rank: what its host reports, and its measurements of itself, rounded for display."""

    state: Literal["starting", "idle", "busy", "silent", "dead"] = "starting"
    host: str = ""
    beat_age_s: Annotated[int, Metric("beat_age_seconds", "Since the rank was last heard of; 0 below 3 s")] = (
        0  # whole seconds; 0 while heartbeats arrive regularly
    )
    rss_bytes: Annotated[
        int | None,
        Metric("memory_bytes", "Resident memory of the rank's process", chart=".memory", title="Memory", unit="bytes"),
    ] = None
    gpu_allocated_bytes: Annotated[
        int | None,
        Metric(
            "gpu_allocated_bytes",
            "GPU memory that torch handed out",
            chart=".gpu",
            title="GPU memory, allocated",
            unit="bytes",
        ),
    ] = None
    cpu_percent: Annotated[
        int | None,
        Metric("cpu_ratio", "Cores that the rank keeps busy", 0.01, chart=".cpu", title="CPU, percent of a core"),
    ] = None  # of one core, all threads
    gpu_utilisation: Annotated[
        int | None,
        Metric(
            "gpu_utilisation_ratio",
            "Time that its GPU was busy",
            0.01,
            chart=".utilisation",
            title="GPU utilisation, percent",
        ),
    ] = None  # 0..100
    collectives_per_s: Annotated[
        float | None,
        Metric(
            "collectives_per_second",
            "Collectives that the rank begins per second",
            chart=".collectives",
            title="Collectives per second",
        ),
    ] = None
    steps_per_s: Annotated[
        float | None,
        Metric("steps_per_second", "Steps that it logs per second", chart=".steps", title="Steps per second"),
    ] = None
    peak_rss_bytes: Annotated[int | None, Metric("memory_peak_bytes", "Its peak")] = None
    gil_lag_s: Annotated[
        float | None, Metric("gil_lag_seconds", "Longest wait for the interpreter lock in the last second")
    ] = None
    gpu_reserved_bytes: Annotated[int | None, Metric("gpu_reserved_bytes", "GPU memory that torch holds")] = None
    gpu_used_bytes: Annotated[int | None, Metric("gpu_used_bytes", "GPU memory in use, by every process")] = None
    gpu_total_bytes: Annotated[int | None, Metric("gpu_size_bytes", "GPU memory there is")] = None
    gpu_peak_bytes: int | None = None
    gpu_name: str | None = None
    num_collectives: int | None = None
    num_steps: int | None = None  # calls of `meshbook.log`
    waits_in: str | None = None  # the oldest open collective: "all_reduce #41"
    waits_since: float | None = None  # wall clock
    awaiting_input: bool = False  # waits for a reply to input()


METRICS: dict[str, Metric] = {
    name: metadata
    for name, hint in get_type_hints(RankStatus, include_extras=True).items()
    for metadata in getattr(hint, "__metadata__", ())
}


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

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies it among its rank's collectives. Numbers restart when groups are re-formed."""
        return self.group, self.op, self.seq


class PrintedLine(Struct, frozen=True, gc=False):
    """One folded line of output as it was printed, without trailing colour codes or rank names."""

    at: float  # wall clock
    ranks: Ranks
    stream: str
    text: str


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
    groups: str = "none"
    backend: str | None = None
    cells_run: int = 0
    clients: tuple[str, ...] = ()
    started_at: float = 0.0


class MeshUpdate(Message, omit_defaults=True):
    """What a subscriber does not know yet; with `call` everything that is known, in place of what was known before."""

    timestamp: float  # wall clock
    call: CallId | None = None  # of the Subscribe that this replies to
    mesh: MeshSummary | None = None
    # changed fields of `RankStatus`, by column: {"line": ((0, 1), [7, 9])}
    ranks: dict[str, tuple[Ranks, list[Any]]] = field(default_factory=dict)
    calls: tuple[CallStatus, ...] | None = None  # all that run now
    collectives: tuple[CollectiveStatus, ...] = ()  # those that started or ended
    scalars: tuple[ScalarPoint, ...] = ()
    lines: tuple[PrintedLine, ...] = ()  # those that ranks printed
    findings: tuple[dict[str, Any], ...] | None = None  # all that hold now: fields of `diagnose.findings.Finding`
    series: tuple[RingDump, ...] = ()  # the past, in a reply
    curves: tuple[CurveDump, ...] = ()  # ... of scalars
