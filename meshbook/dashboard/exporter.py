"""Prometheus metrics of a mesh: gauges on a local HTTP endpoint, read from a live snapshot at each scrape.

A scrape sends no queries to ranks. Labels are bounded: the mesh, its ranks, and the first 64 logged names. Only this
machine can connect, because the endpoint needs no token; a remote scraper needs an agent or a tunnel.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from meshbook.controller.session import Session
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.controller.tables import STATES
from meshbook.errors import StartError, UsageError
from meshbook.wire.messages import METRICS

_LOOPBACK = "127.0.0.1"

Samples = Sequence[tuple[Sequence[str], float]]  # values of the labels, value


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
    states = [rank.state for rank in snapshot.ranks]
    kinds = [one.kind for one in snapshot.findings]
    by_state = [((state,), float(sum(one == state for one in states))) for state in STATES]
    by_kind = [((kind,), float(kinds.count(kind))) for kind in sorted(set(kinds))]
    last_values = [
        ((str(rank), name), points[-1][1])
        for name in snapshot.scalars.names
        for rank in snapshot.scalars.ranks_of(name)
        if (points := snapshot.scalars.points(name, rank))
    ]
    tables: list[tuple[str, str, Sequence[str], Samples]] = [
        ("up", "Whether the mesh runs", (), [((), float(snapshot.ended is None))]),
        ("cells_run", "Cells that were run", (), [((), float(snapshot.cells_run))]),
        ("ranks", "Ranks in this state", ("state",), by_state),
        ("findings", "What was found unasked in the cells that run", ("kind",), by_kind),
        ("scalar", "The last value given to meshbook.log", ("rank", "name"), last_values),
    ]
    for field, metric in METRICS.items():
        samples = [
            ((str(rank.rank), rank.host, rank.device), float(value) * metric.factor)
            for rank in snapshot.ranks
            if (value := getattr(rank, field)) is not None
        ]
        tables.append((f"rank_{metric.gauge}", metric.description, ("rank", "host", "device"), samples))
    return [_gauge(f"meshbook_{name}", text, snapshot.name, labels, rows) for name, text, labels, rows in tables]


def _gauge(name: str, description: str, mesh: str, labels: Sequence[str], samples: Samples) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(name, description, labels=("mesh", *labels))
    for values, value in samples:
        gauge.add_metric((mesh, *values), value)
    return gauge
