"""A live copy of a mesh's state, built from the supervisor's updates to its subscribers.

For the dashboard, the terminal and the exporter. It draws nothing and sends no queries to ranks: ranks measure
themselves once per second anyway, and the supervisor sends changes at most `max_updates_per_s` times a second, and
nothing without subscribers. An observer's connection suffices (`meshbook top`); it does not keep the mesh alive.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from meshbook.controller.connection import SupervisorConnection, ask
from meshbook.controller.session import Session
from meshbook.diagnose.findings import Finding
from meshbook.errors import MeshbookError
from meshbook.supervisor.series import Curves, Series
from meshbook.wire.messages import CollectiveStatus, MeshUpdate, RankStatus, Subscribe

log = logging.getLogger("meshbook.subscription")

_MAX_COLLECTIVES_PER_RANK = 64  # of each rank


@dataclass(frozen=True)
class MeshSnapshot:
    """A mesh at one moment. Immutable, except `series` and `scalars`, which grow and may be read at any time.

    Attributes:
        at: the supervisor's wall clock when it sent this; it advances from snapshot to snapshot while the supervisor
            lives.
        name, axes, backend, cells_run, clients: as in `MeshInfo`.
        ranks: one `RankStatus` per rank, by rank: state, cell and line, memory, CPU, GPU, open collective, heartbeat
            age.
        calls: the ids of the cells that run, oldest first.
        collectives: rank -> its last ones, oldest first, open ones with `ended_at` None. Wall clock.
        findings: what the supervisor found unrequested in the cells that run now; `mesh.why()` analyses anew.
        series: memory, CPU, GPU, collectives/s and steps/s over time; `series.points("rss_bytes", rank)`.
        scalars: values passed to `meshbook.log`; `scalars.names`, `scalars.points("loss", rank)`.
        ended: why there are no more updates; None while there are.
    """

    at: float = 0.0
    name: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    backend: str | None = None
    cells_run: int = 0
    clients: tuple[str, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    calls: tuple[str, ...] = ()
    collectives: Mapping[int, tuple[CollectiveStatus, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    series: Series = field(default_factory=Series)
    scalars: Curves = field(default_factory=Curves)
    ended: str | None = None


def apply_update(old: MeshSnapshot, update: MeshUpdate) -> MeshSnapshot:
    """Return the snapshot after an update. Series and scalars are those of the old one, with new points."""
    if update.call is not None:  # all that is known
        old = MeshSnapshot()
    changes: dict[str, Any] = {"at": update.timestamp}
    if update.mesh is not None:
        changes |= msgspec.structs.asdict(update.mesh)
        if dict(update.mesh.axes) != dict(old.axes):
            old = _without_former_ranks(old, math.prod(update.mesh.axes.values()))
    if update.ranks:
        by_rank = {status.rank: status for status in (*old.ranks, *update.ranks)}
        changes["ranks"] = tuple(by_rank[rank] for rank in sorted(by_rank))
    if update.calls is not None:
        changes["calls"] = update.calls
    if update.collectives:
        changes["collectives"] = _merge_collectives(old.collectives, update.collectives)
    if update.findings is not None:
        changes["findings"] = msgspec.convert(update.findings, tuple[Finding, ...])
    new = replace(old, **changes)
    new.series.load(update.series)
    new.scalars.load(update.curves)
    if update.call is None and int(new.at) != int(old.at):  # ranks measure once per second
        new.series.sample(new.at, new.ranks)
    for point in update.scalars:
        new.scalars.put(point.name, point.rank, point.step, point.value, point.at)
    return new


def _without_former_ranks(snapshot: MeshSnapshot, world_size: int) -> MeshSnapshot:
    """Return a snapshot without ranks that have left with a resize."""
    ranks = tuple(rank for rank in snapshot.ranks if rank.rank < world_size)
    collectives = {rank: found for rank, found in snapshot.collectives.items() if rank < world_size}
    return replace(snapshot, ranks=ranks, collectives=collectives)


def end_snapshot(old: MeshSnapshot, reason: str) -> MeshSnapshot:
    """Return the final snapshot: there are no more updates."""
    dead_ranks = tuple(msgspec.structs.replace(rank, state="dead", call=None) for rank in old.ranks)
    return replace(old, ended=reason, ranks=dead_ranks, calls=(), findings=())


class MeshSubscription:
    """A subscription to a mesh's state until `close()`. Several share one connection, and one snapshot.

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
        self.max_updates_per_s, self.history_s = max(0.1, max_updates_per_s), history_s
        self._shared = _SharedSubscription.of(source.connection if isinstance(source, Session) else source)
        self._shared.add(self)

    @property
    def snapshot(self) -> MeshSnapshot:
        """The latest snapshot. Any thread."""
        return self._shared.snapshot

    def close(self) -> None:
        """Unsubscribe. The last snapshot stays. Idempotent."""
        self._shared.remove(self)

    def __enter__(self) -> MeshSubscription:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _SharedSubscription:
    """A connection's one subscription: at the highest rate, and with the longest past, that any listener requested."""

    def __init__(self, connection: SupervisorConnection) -> None:
        self._connection = connection
        self.snapshot = MeshSnapshot(name=connection.connection_info.name)
        self._subscriptions: list[MeshSubscription] = []
        self._subscribe_calls: set[str] = set()  # replies to other calls are not for subscribers
        self._lock = threading.Lock()
        connection.listeners.mesh_stopped.append(self._mesh_ended)

    @classmethod
    def of(cls, connection: SupervisorConnection) -> _SharedSubscription:
        handlers = connection.listeners.report_handlers
        shared = handlers.get(MeshUpdate) or handlers.setdefault(MeshUpdate, cls(connection))
        assert isinstance(shared, cls)
        return shared

    def add(self, subscription: MeshSubscription) -> None:
        with self._lock:
            self._subscriptions.append(subscription)
            command = Subscribe(
                call=self._connection.next_call_id(),
                max_updates_per_s=max(one.max_updates_per_s for one in self._subscriptions),
                history_s=max(one.history_s for one in self._subscriptions),
            )
            self._subscribe_calls.add(command.call)
            try:
                ask(self._connection, command)
            except BaseException:
                self._subscriptions.remove(subscription)
                raise

    def remove(self, subscription: MeshSubscription) -> None:
        with self._lock:
            if subscription not in self._subscriptions:
                return
            self._subscriptions.remove(subscription)
            if not self._subscriptions:
                with contextlib.suppress(MeshbookError):
                    self._connection.send(Subscribe(call=self._connection.next_call_id(), max_updates_per_s=0.0))

    # ---- on the listener thread

    def __call__(self, update: MeshUpdate) -> None:
        if self._subscriptions and (update.call is None or update.call in self._subscribe_calls):
            self._notify(apply_update(self.snapshot, update))

    def _mesh_ended(self, reason: str) -> None:
        self._notify(end_snapshot(self.snapshot, reason))

    def _notify(self, snapshot: MeshSnapshot) -> None:
        self.snapshot = snapshot
        for listener in [listener for one in tuple(self._subscriptions) for listener in one.listeners]:
            try:
                listener(snapshot)
            except Exception:
                log.exception("a listener could not take the picture; the others can")


def fetch_snapshot(connection: SupervisorConnection, *, history_s: float = 0.001) -> MeshSnapshot:
    """Return one snapshot, without subscribing. Blocks a few milliseconds.

    Raises:
        NotAttached: the connection is closed, or the mesh has ended.
        MeshTimeout: the supervisor does not reply.
    """
    command = Subscribe(call=connection.next_call_id(), max_updates_per_s=0.0, history_s=history_s)
    return apply_update(MeshSnapshot(), ask(connection, command))


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
