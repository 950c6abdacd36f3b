"""Prometheus metrics of a mesh: gauges on a local HTTP endpoint, read from a live snapshot at each scrape.

A scrape sends no queries to ranks. Labels are bounded: the mesh, its ranks, and the first 64 logged names. Only this
machine can connect, because the endpoint needs no token; a remote scraper needs an agent or a tunnel.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from meshbook.controller.session import Session
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.controller.tables import STATES
from meshbook.errors import StartError, UsageError

_LOOPBACK = "127.0.0.1"

# Attribute of `RankStatus`, metric name, documentation, factor. Units follow Prometheus: bytes, seconds, ratios.
_GAUGES = (
    ("rss_bytes", "meshbook_rank_memory_bytes", "Resident memory of the rank's process", 1.0),
    ("peak_rss_bytes", "meshbook_rank_memory_peak_bytes", "Its peak", 1.0),
    ("cpu_percent", "meshbook_rank_cpu_ratio", "Cores that the rank keeps busy", 0.01),
    ("gil_lag_s", "meshbook_rank_gil_lag_seconds", "Longest wait for the interpreter lock in the last second", 1.0),
    ("beat_age_s", "meshbook_rank_beat_age_seconds", "Since the rank was last heard of; 0 below 3 s", 1.0),
    ("collectives_per_s", "meshbook_rank_collectives_per_second", "Collectives that the rank begins per second", 1.0),
    ("steps_per_s", "meshbook_rank_steps_per_second", "Steps that it logs per second", 1.0),
    ("gpu_utilisation", "meshbook_rank_gpu_utilisation_ratio", "Time that its GPU was busy", 0.01),
    ("gpu_allocated_bytes", "meshbook_rank_gpu_allocated_bytes", "GPU memory that torch handed out", 1.0),
    ("gpu_reserved_bytes", "meshbook_rank_gpu_reserved_bytes", "GPU memory that torch holds", 1.0),
    ("gpu_used_bytes", "meshbook_rank_gpu_used_bytes", "GPU memory in use, by every process", 1.0),
    ("gpu_total_bytes", "meshbook_rank_gpu_size_bytes", "GPU memory there is", 1.0),
)


class Exporter:
    """Serves `http://127.0.0.1:PORT/metrics` until `close()`. As a context manager, it closes when the block ends.

    Attributes:
        address: the URL for Prometheus.
    """

    def __init__(self, session: Session, port: int = 0) -> None:
        """Subscribe to the mesh and start serving.

        Args:
            port: 0: any free port.

        Raises:
            UsageError: prometheus_client is not installed.
            StartError: the port is taken.
            NotAttached: the mesh has ended.
        """
        try:
            import prometheus_client
        except ImportError:
            raise UsageError("the endpoint needs prometheus_client: pip install prometheus-client") from None
        self._subscription = MeshSubscription(session, max_updates_per_s=1.0, history_s=1e9)
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_MetricsCollector(self._subscription))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr=_LOOPBACK, registry=registry)
        except (OSError, OverflowError) as error:
            self._subscription.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise StartError(f"port {port} of {_LOOPBACK} cannot be served: {reason}; choose another") from error
        serve = self._server.get_app()
        assert serve is not None
        self._server.set_app(_loopback_only(serve))
        self.address = f"http://{_LOOPBACK}:{self._server.server_port}/metrics"

    def wait(self) -> None:
        """Wait until the mesh has ended, or Ctrl-C."""
        ended = threading.Event()
        self._subscription.listeners.append(lambda picture: ended.set() if picture.ended is not None else None)
        while self._subscription.snapshot.ended is None and not ended.wait(1.0):
            pass

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
        self._subscription.close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _loopback_only(serve: Any) -> Callable[..., Any]:
    """Reject requests whose Host header is not a loopback name, against DNS rebinding.

    A web page whose host name resolves to this machine is requested by a local browser, but sends its own name.
    """

    def answer(request: dict[str, Any], begin: Callable[..., Any]) -> Any:
        if re.sub(r":\d+\Z", "", request.get("HTTP_HOST", "")) in (_LOOPBACK, "localhost"):
            return serve(request, begin)
        begin("403 Forbidden", [("Content-Type", "text/plain")])
        return [f"ask for {_LOOPBACK} or localhost\n".encode()]

    return answer


class _MetricsCollector:
    """The collector that prometheus_client calls at each scrape."""

    def __init__(self, subscription: MeshSubscription) -> None:
        self._subscription = subscription

    def collect(self) -> Iterable[Any]:
        return metric_families(self._subscription.snapshot)


def metric_families(snapshot: MeshSnapshot) -> list[Any]:
    """Return a snapshot as Prometheus metric families. Unknown values have no sample."""
    from prometheus_client.core import GaugeMetricFamily

    found = [
        _gauge("meshbook_up", "Whether the mesh runs", ("mesh",), [((snapshot.name,), float(snapshot.ended is None))]),
        _gauge("meshbook_cells_run", "Cells that were run", ("mesh",), [((snapshot.name,), float(snapshot.cells_run))]),
    ]
    states = [rank.state for rank in snapshot.ranks]
    found.append(
        _gauge(
            "meshbook_ranks",
            "Ranks in this state",
            ("mesh", "state"),
            [((snapshot.name, state), float(states.count(state))) for state in STATES],
        )
    )
    kinds = [one.kind for one in snapshot.findings]
    found.append(
        _gauge(
            "meshbook_findings",
            "What was found unasked in the cells that run",
            ("mesh", "kind"),
            [((snapshot.name, kind), float(kinds.count(kind))) for kind in sorted(set(kinds))],
        )
    )
    labels = ("mesh", "rank", "host", "device")
    for attribute, name, documentation, factor in _GAUGES:
        gauge = GaugeMetricFamily(name, documentation, labels=labels)
        for rank in snapshot.ranks:
            value = getattr(rank, attribute)
            if value is not None:
                gauge.add_metric((snapshot.name, str(rank.rank), rank.host, rank.device), float(value) * factor)
        found.append(gauge)
    scalar = GaugeMetricFamily(
        "meshbook_scalar", "The last value given to meshbook.log", labels=("mesh", "rank", "name")
    )
    for name in snapshot.scalars.names:
        for number in snapshot.scalars.ranks_of(name):
            points = snapshot.scalars.points(name, number)
            if points:
                scalar.add_metric((snapshot.name, str(number), name), points[-1][1])
    return [*found, scalar]


def _gauge(
    name: str, documentation: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        gauge.add_metric(values, value)
    return gauge
