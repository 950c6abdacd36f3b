"""A live copy of a mesh's state, built from the supervisor's updates to its subscribers.

For the dashboard, the terminal and the exporter. It draws nothing and sends no queries to ranks: ranks measure
themselves once per second anyway, and the supervisor sends changes at most `max_updates_per_s` times a second, and
nothing without subscribers. An observer's connection suffices (`meshbook top`); it does not keep the mesh alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.session import Session
from meshbook.diagnose.findings import Finding
from meshbook.errors import MeshbookError, MeshTimeout
from meshbook.ids import Ranks
from meshbook.supervisor.series import Curves, Series
from meshbook.supervisor.telemetry import MAX_RETAINED_LINES
from meshbook.wire.messages import CallStatus, CollectiveStatus, MeshUpdate, PrintedLine, RankStatus, Subscribe

log = logging.getLogger("meshbook.onlooker")

_REPLY_TIMEOUT_S = 5.0
_MAX_COLLECTIVES_PER_RANK = 64  # of each rank


@dataclass(frozen=True)
class MeshSnapshot:
    """A mesh at one moment. Immutable, except `series` and `scalars`, which grow and may be read at any time.

    Attributes:
        at: the supervisor's wall clock when it sent this; it advances from snapshot to snapshot while the supervisor
            lives.
        name, axes, groups, backend, cells_run, clients, started_at: as in `MeshInfo`.
        ranks: one `RankStatus` per rank, by rank: state, cell and line, memory, CPU, GPU, open collective, heartbeat
            age.
        calls: running calls, oldest first.
        collectives: rank -> its last ones, oldest first, open ones with `ended_at` None. Wall clock.
        findings: what the supervisor found unrequested in the cells that run now; `mesh.why()` analyses anew.
        lines: the last folded lines that ranks printed, oldest first; text, never markup. For all output of a rank:
            `mesh.logs`.
        series: memory, CPU, GPU, collectives/s and steps/s over time; `series.points("rss_bytes", rank)`.
        scalars: values passed to `meshbook.log`; `scalars.names`, `scalars.points("loss", rank)`.
        ended: why there are no more updates; None while there are.
    """

    at: float = 0.0
    name: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    groups: str = "none"
    backend: str | None = None
    cells_run: int = 0
    clients: tuple[str, ...] = ()
    started_at: float = 0.0
    ranks: tuple[RankStatus, ...] = ()
    calls: tuple[CallStatus, ...] = ()
    collectives: Mapping[int, tuple[CollectiveStatus, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    lines: tuple[PrintedLine, ...] = ()
    series: Series = field(default_factory=Series)
    scalars: Curves = field(default_factory=Curves)
    ended: str | None = None


class SnapshotBuilder:
    """Applies updates. `snapshot` is the result so far."""

    def __init__(self, name: str = "") -> None:
        self.snapshot = MeshSnapshot(name=name)
        self._lines: deque[PrintedLine] = deque(maxlen=MAX_RETAINED_LINES)
        self._last_sample_at = 0.0

    def apply(self, update: MeshUpdate) -> MeshSnapshot:
        """Return the snapshot after this update."""
        old = self.snapshot
        if update.call is not None:  # all that is known
            old = MeshSnapshot()
            self._lines.clear()
        changes: dict[str, Any] = {"at": update.timestamp}
        if update.mesh is not None:
            changes |= msgspec.structs.asdict(update.mesh)
        if update.ranks:
            changes["ranks"] = _apply_columns(old.ranks, update.ranks)
        if update.calls is not None:
            changes["calls"] = update.calls
        if update.collectives:
            changes["collectives"] = _merge_collectives(old.collectives, update.collectives)
        if update.findings is not None:
            changes["findings"] = msgspec.convert(update.findings, tuple[Finding, ...])
        if update.lines:
            self._lines += update.lines
            changes["lines"] = tuple(self._lines)
        new = self.snapshot = replace(old, **changes)
        new.series.load(update.series)
        new.scalars.load(update.curves)
        if update.call is None and new.at - self._last_sample_at >= 1.0:  # ranks measure once per second
            self._last_sample_at = new.at
            new.series.sample(new.at, new.ranks)
        for point in update.scalars:
            new.scalars.put(point.name, point.rank, point.step, point.value, point.at)
        return new

    def end(self, reason: str) -> MeshSnapshot:
        """Return the final snapshot: there are no more updates."""
        dead_ranks = tuple(msgspec.structs.replace(rank, state="dead", call=None) for rank in self.snapshot.ranks)
        self.snapshot = replace(self.snapshot, ended=reason, ranks=dead_ranks, calls=(), findings=())
        return self.snapshot


class MeshSubscription:
    """A subscription to a mesh's state until `close()`. Several may share one connection.

        subscription = MeshSubscription(mesh.session, max_updates_per_s=2)
        subscription.listeners.append(lambda snapshot: draw(snapshot))
        subscription.snapshot.ranks[3].line

    Attributes:
        listeners: called with the new snapshot on the connection's listener thread, so they must neither block nor
            query the mesh (use another thread for that). One that raises is logged and stays registered.
    """

    def __init__(
        self, source: Session | SupervisorConnection, *, max_updates_per_s: float = 2.0, history_s: float = 3600.0
    ) -> None:
        """Subscribe. Blocks until the first snapshot arrives, a few milliseconds.

        Args:
            source: a mesh's session (`mesh.session`) or any open connection, also an observer's.
            max_updates_per_s: snapshots per second at most; 0.1 to 10.
            history_s: how much of the past the first snapshot's `series` and `scalars` contain.

        Raises:
            NotAttached: the connection is closed, or the mesh has ended.
            MeshTimeout: the supervisor does not reply.
        """
        self.listeners: list[Callable[[MeshSnapshot], None]] = []
        self.max_updates_per_s = min(max(max_updates_per_s, 0.1), 10.0)
        self._connection = source.connection if isinstance(source, Session) else source
        self._builder = SnapshotBuilder(self._connection.connection_info.name)
        self._closed = False
        self._shared = _SharedSubscription.of(self._connection)
        self._connection.listeners.mesh_stopped.append(self._mesh_ended)
        try:
            self._shared.add(self, history_s)
        except BaseException:
            self.close()
            raise

    @property
    def snapshot(self) -> MeshSnapshot:
        """The latest snapshot. Any thread."""
        return self._builder.snapshot

    def wait_until(self, predicate: Callable[[MeshSnapshot], bool], timeout: float) -> MeshSnapshot:
        """Return the first snapshot, the current one included, that satisfies `predicate`. Blocks.

        Raises:
            MeshTimeout: none came within `timeout` seconds.
        """
        matched = threading.Event()
        found: list[MeshSnapshot] = []

        def look(snapshot: MeshSnapshot) -> None:
            if not found and predicate(snapshot):
                found.append(snapshot)
                matched.set()

        self.listeners.append(look)
        try:
            look(self.snapshot)
            if not matched.wait(timeout):
                raise MeshTimeout(f"nothing of the kind was seen of the mesh {self.snapshot.name!r} in {timeout:g} s")
        finally:
            self.listeners.remove(look)
        return found[0]

    def close(self) -> None:
        """Unsubscribe. The last snapshot stays. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ValueError):
            self._connection.listeners.mesh_stopped.remove(self._mesh_ended)
        self._shared.remove(self)

    def __enter__(self) -> MeshSubscription:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    # ---- on the listener thread

    def _on_update(self, report: MeshUpdate) -> None:
        if not self._closed:
            self._builder.apply(report)
            self._notify()

    def _mesh_ended(self, reason: str) -> None:
        self._builder.end(reason)
        self._notify()

    def _notify(self) -> None:
        for listener in tuple(self.listeners):
            try:
                listener(self._builder.snapshot)
            except Exception:
                log.exception("a listener could not take the picture; the others can")


class _SharedSubscription:
    """Distributes a connection's mesh updates to all its `MeshSubscription`s.

    The connection subscribes once, at the highest requested rate.
    """

    def __init__(self, connection: SupervisorConnection) -> None:
        self._connection = connection
        self._subscriptions: list[MeshSubscription] = []
        self._subscribe_calls: set[str] = set()  # replies to other calls are not for subscribers
        self._lock = threading.Lock()

    @classmethod
    def of(cls, connection: SupervisorConnection) -> _SharedSubscription:
        shared = connection.listeners.report_handlers.setdefault(MeshUpdate, cls(connection))
        assert isinstance(shared, cls)
        return shared

    def __call__(self, report: MeshUpdate) -> None:
        if report.call is None or report.call in self._subscribe_calls:
            for subscription in tuple(self._subscriptions):
                subscription._on_update(report)

    def add(self, subscription: MeshSubscription, history_s: float) -> None:
        with self._lock:
            self._subscriptions.append(subscription)
            rate = max(subscription.max_updates_per_s for subscription in self._subscriptions)
            call = self._connection.next_call_id()
            self._subscribe_calls.add(call)
            try:
                _request(self._connection, Subscribe(call=call, max_updates_per_s=rate, history_s=history_s))
            except BaseException:
                self._subscriptions.remove(subscription)
                raise

    def remove(self, subscription: MeshSubscription) -> None:
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
            if self._subscriptions:
                return
            with contextlib.suppress(MeshbookError):
                self._connection.send(Subscribe(call=self._connection.next_call_id(), max_updates_per_s=0.0))


def _request(connection: SupervisorConnection, command: Subscribe) -> MeshUpdate:
    """Send a command and return the supervisor's reply. Blocks.

    Raises:
        NotAttached: the connection is closed, or the mesh has ended.
        MeshTimeout: the supervisor does not reply.
    """
    try:
        reply: MeshUpdate = connection.request(command).result(_REPLY_TIMEOUT_S)
    except TimeoutError:
        raise MeshTimeout(
            f"the supervisor of {connection.connection_info.name!r} did not answer within {_REPLY_TIMEOUT_S:g} s"
        ) from None
    return reply


def fetch_snapshot(connection: SupervisorConnection, *, history_s: float = 0.001) -> MeshSnapshot:
    """Return one snapshot, without subscribing. Blocks a few milliseconds.

    Raises:
        NotAttached: the connection is closed, or the mesh has ended.
        MeshTimeout: the supervisor does not reply.
    """
    command = Subscribe(call=connection.next_call_id(), max_updates_per_s=0.0, history_s=history_s)
    return SnapshotBuilder().apply(_request(connection, command))


def _apply_columns(
    ranks: tuple[RankStatus, ...], columns: Mapping[str, tuple[Ranks, list[Any]]]
) -> tuple[RankStatus, ...]:
    changes: dict[int, dict[str, Any]] = {}
    for name, (which, values) in columns.items():
        for rank, value in zip(which, values, strict=True):
            changes.setdefault(rank, {})[name] = value
    found = list(ranks)
    for rank in sorted(changes):
        while len(found) <= rank:
            found.append(RankStatus(rank=len(found)))
        found[rank] = msgspec.structs.replace(found[rank], **changes[rank])
    return tuple(found)


def _merge_collectives(
    known: Mapping[int, tuple[CollectiveStatus, ...]], updates: Iterable[CollectiveStatus]
) -> dict[int, tuple[CollectiveStatus, ...]]:
    new_by_rank: dict[int, list[CollectiveStatus]] = {}
    for one in updates:
        new_by_rank.setdefault(one.rank, []).append(one)
    found = dict(known)
    for rank, new in new_by_rank.items():
        both = {one.key: one for one in (*known.get(rank, ()), *new)}
        found[rank] = tuple(sorted(both.values(), key=lambda one: one.began_at)[-_MAX_COLLECTIVES_PER_RANK:])
    return found
