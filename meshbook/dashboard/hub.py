"""Serves a mesh's front ends: one subscription for all of them, and one thread that sends them updates.

Widgets, pages and the terminal are clients of one hub. It accepts their requests immediately and replies from its own
threads, so that no thread that zmq, tornado or a notebook needs ever waits.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from meshbook.controller.mesh import Mesh
from meshbook.controller.recording import REPLAY_COMMAND
from meshbook.controller.running_debugger import find_running, stop_foreground
from meshbook.controller.session import Session
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.dashboard import view
from meshbook.dashboard.charts import Message
from meshbook.dashboard.view import UpdateEncoder
from meshbook.diagnose.findings import dated
from meshbook.errors import MeshbookError
from meshbook.ids import Ranks, format_ranks, name_ranks

log = logging.getLogger("meshbook.dashboard")

# Maximum number of different internal errors reported to one client.
_MAX_REPORTED_ERRORS = 8
# Updates per second. More are not readable, and a notebook's server forwards each to every page.
MAX_UPDATES_PER_S = 2.0
# Seconds between full updates: a page whose requests wait behind a cell then still shows the mesh.
FULL_UPDATE_S = 5.0
# With more ranks than this, a full update is some ten thousand bytes, and sent less often.
_SMALL_MESH_RANKS = 64
# Seconds after joining during which a full update is sent every second: messages sent before the page has drawn the
# widget are lost.
_STARTUP_S = 6.0
# Seconds without a message after which a mesh without changes sends a keepalive.
_KEEPALIVE_S = 5.0
# Seconds after which updates of an idle mesh stop: a JupyterHub counts every message as activity, and would never cull
# an open notebook.
_IDLE_TIMEOUT_S = 600.0
_LOG_BYTES = 1 << 18
# Seconds for which the list of actors is cached for all clients.
_ACTORS_CACHE_S = 0.9
_MAX_REMEMBERED_REQUESTS = 256  # number of request ids stored, so that a duplicate is handled once


class DashboardClient:
    """One front end connection: a widget, with all its views, or one page's socket.

    Attributes:
        encoder: tracks what the client has received.
    """

    def __init__(self, mesh: Mesh, send: Callable[[Message], None], *, resends: bool = False) -> None:
        """Create a client of a mesh.

        Args:
            mesh: the mesh, or the slice of it, that the client shows.
            send: sends a message; called on the hub's threads. An exception means that the client has disconnected.
            resends: send full updates periodically, because the client may be unable to request them.
        """
        self.mesh, self.send, self.resends = mesh, send, resends
        is_slice = mesh.grid != mesh.session.axes  # else it shows the ranks that there are, also after a resize
        self.encoder = UpdateEncoder(tuple(mesh.ranks), dict(mesh.axes)) if is_slice else UpdateEncoder()
        self.needs_full_update = True
        self.is_resting = False  # it knows that nothing is sent until a cell runs
        self.sent_at = self.full_update_at = float("-inf")
        self.joined_at = time.monotonic()
        self.reported_errors: set[str] = set()  # internal errors already reported to this client
        self.lock = threading.Lock()  # guards this object; held while sending, so that messages keep their order


class DashboardHub:
    """The hub of one session. Subscribes to the mesh while it has clients."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._clients: list[DashboardClient] = []
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._subscription: MeshSubscription | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._handled_requests: OrderedDict[str, None] = OrderedDict()
        self._last_busy_at = time.monotonic()
        self._actors_lock = threading.Lock()
        self._actors_fetched_at = float("-inf")
        self._actors: list[dict[str, Any]] = []  # one row each, fetched at `_actors_fetched_at`

    @classmethod
    def of(cls, session: Session) -> DashboardHub:
        hub = session.extras.setdefault("dashboard", cls(session))
        assert isinstance(hub, cls)
        return hub

    @property
    def snapshot(self) -> MeshSnapshot:
        """The latest snapshot; an empty one without a subscription."""
        subscription = self._subscription
        return subscription.snapshot if subscription is not None else MeshSnapshot()

    @property
    def is_subscribed(self) -> bool:
        return self._subscription is not None

    def add_client(self, client: DashboardClient) -> None:
        """Send updates to this client from now on. The first client waits a few milliseconds for the first snapshot.

        Raises:
            NotAttached, MeshTimeout: as `MeshSubscription`.
        """
        with self._lock:
            if self._subscription is None:
                self._session.check_attached()
                self._subscription = MeshSubscription(self._session, max_updates_per_s=MAX_UPDATES_PER_S)
                self._subscription.listeners.append(lambda _: self._changed.set())
                self._workers = ThreadPoolExecutor(4, thread_name_prefix="meshbook-answers")
                self._thread = threading.Thread(
                    target=self._run, args=(self._subscription,), name="meshbook-dashboard", daemon=True
                )
                self._thread.start()
            self._clients.append(client)
        self._changed.set()

    def remove_client(self, client: DashboardClient) -> None:
        """Send no more updates to this client; removing the last one ends the subscription. Idempotent."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
            if self._clients or self._subscription is None:
                return
            subscription, workers = self._subscription, self._workers
            self._subscription = self._workers = self._thread = None
        subscription.close()
        self._changed.set()
        if workers is not None:
            workers.shutdown(wait=False, cancel_futures=True)

    # ---- updates

    def _run(self, subscription: MeshSubscription) -> None:
        """Send updates until this subscription is no longer the hub's. Runs on the hub's thread."""
        while True:
            self._changed.wait(1.0)
            self._changed.clear()
            if self._subscription is not subscription:
                return
            snapshot = subscription.snapshot
            if snapshot.ended is None and self._session.connection.closed:
                snapshot = replace(snapshot, ended="this process has left it")
            for client in tuple(self._clients):
                self._send_updates(client, snapshot)
                if snapshot.ended is not None:
                    self.remove_client(client)

    def _send_updates(self, client: DashboardClient, snapshot: MeshSnapshot) -> None:
        now = time.monotonic()
        if snapshot.calls:
            self._last_busy_at = now
        with client.lock:
            try:
                messages = self._updates_for(client, snapshot, now)
            except Exception as error:  # an internal error: the dashboard continues
                messages = self._report_error(client, error)
            try:
                for message in messages:
                    client.send(message)
            except Exception as error:
                # The client disconnected during sending: a page was closed, or a kernel's front end has exited.
                log.debug("an audience is gone: %r", error)
                disconnected = True
            else:
                disconnected = False
                if messages:
                    client.sent_at = now
        if disconnected:
            self.remove_client(client)

    def _updates_for(self, client: DashboardClient, snapshot: MeshSnapshot, now: float) -> list[Message]:
        is_busy = bool(snapshot.calls)
        client.encoder.has_actors = self._has_actors()
        client.encoder.replay_command = self._session.extras.get(REPLAY_COMMAND, "")
        is_new = now - client.joined_at < _STARTUP_S
        interval = 1.0 if is_new else FULL_UPDATE_S * (1 if len(client.mesh.ranks) <= _SMALL_MESH_RANKS else 6)
        resend = client.resends and (is_busy or is_new) and now - client.full_update_at >= interval
        if client.needs_full_update or resend:
            client.full_update_at = now
            messages = client.encoder.full_update(snapshot)
            client.needs_full_update = False
        elif now - self._last_busy_at > _IDLE_TIMEOUT_S and snapshot.ended is None:
            was_resting, client.is_resting = client.is_resting, True
            return [] if was_resting else [{"kind": "resting"}]
        else:
            messages = client.encoder.updates(snapshot)
        client.is_resting = False
        if not messages and now - client.sent_at >= _KEEPALIVE_S:
            return [{"kind": "alive"}]
        return messages

    def _report_error(self, client: DashboardClient, error: Exception) -> list[Message]:
        """Log an internal error and report it once to the client."""
        what = f"{type(error).__name__}: {error}"
        if what in client.reported_errors or len(client.reported_errors) >= _MAX_REPORTED_ERRORS:
            return []
        client.reported_errors.add(what)
        log.error("the picture of %s could not be made", self._session.name, exc_info=error)
        return [{"kind": "reply", "text": f"part of this picture could not be made ({what}); the mesh is not affected"}]

    # ---- requests

    def on_request(self, client: DashboardClient, message: Any) -> None:
        """Handle a front end's request. Never blocks and never raises: replies are messages."""
        if not isinstance(message, dict):
            return
        request_id = message.get("id")
        with self._lock:
            workers = self._workers
            if isinstance(request_id, str):
                if request_id in self._handled_requests:
                    return
                self._handled_requests[request_id] = None
                while len(self._handled_requests) > _MAX_REMEMBERED_REQUESTS:
                    self._handled_requests.popitem(last=False)
        if workers is not None:
            with contextlib.suppress(RuntimeError):  # the last client is being removed
                workers.submit(self._reply, client, message)

    def _reply(self, client: DashboardClient, message: dict[str, Any]) -> None:
        try:
            replies = self._handle_request(client, message)
        except (MeshbookError, ValueError) as error:
            replies = [{"kind": "reply", "text": str(error)}]
        except Exception as error:
            log.exception("a front end's %r could not be answered", message.get("kind"))
            replies = [{"kind": "reply", "text": f"{type(error).__name__}: {error}"}]
        view_id = message.get("view")
        address = {"view": view_id} if isinstance(view_id, str) else {}
        try:
            with client.lock:
                for reply in replies:
                    client.send({**reply, **address})
        except Exception as error:
            log.debug("an audience is gone: %r", error)
            self.remove_client(client)

    def _debug(self, ranks: Ranks) -> str:
        """Stop what ranks run in the debugger if its prompt is below a cell of this process; else say how to."""
        call = find_running(self._session, ranks)
        if self._session.foreground.prompting_call == call.call:
            return stop_foreground(self._session, call, ranks)
        words = f"{self._session.name} {format_ranks(ranks)}"
        return f"{call.label or 'what runs'} cannot ask for commands from here; in a terminal: meshbook debug {words}"

    def _has_actors(self) -> bool:
        if "meshbook.actors.procs" not in sys.modules:
            return False  # this program has no actors; avoids the import
        from meshbook.actors.listing import has_spawned_procs

        return "actors" in self._session.extras or has_spawned_procs()

    def _fetch_actors(self) -> list[dict[str, Any]]:
        """Return the rows of the actors on this mesh and in this program's spawned processes.

        Queries them at most about once a second, for all clients together.
        """
        if not self._has_actors():
            return []
        from meshbook.actors.listing import list_actors, list_spawned_actors

        with self._actors_lock:
            if time.monotonic() - self._actors_fetched_at >= _ACTORS_CACHE_S:
                axes = self._session.axes if "actors" in self._session.extras else None
                mesh_actors = list_actors(Mesh.of(self._session, axes), timeout=1.0) if axes is not None else []
                self._actors = [*mesh_actors, *list_spawned_actors(timeout=1.0)]
                self._actors_fetched_at = time.monotonic()
            return self._actors

    def _handle_request(self, client: DashboardClient, message: dict[str, Any]) -> list[Message]:
        mesh, kind = client.mesh, message.get("kind")
        match kind:
            case "ready":
                client.needs_full_update = True
                self._changed.set()
            case "follow":
                with client.lock:
                    client.encoder.follow(view.parse_ranks_in_mesh(message.get("ranks"), mesh.ranks))
                self._changed.set()
            case "show":
                with client.lock:
                    client.encoder.open_panel = str(message.get("tab"))
                self._changed.set()
            case "stacks":
                ranks = view.parse_ranks_in_mesh(message.get("ranks"), mesh.ranks)
                return [view.stacks_message(mesh.stacks(ranks), ranks)]
            case "why":
                found = dated(mesh.why().findings, time.time())
                with client.lock:
                    return [client.encoder.record_why(self.snapshot, found)]
            case "logs":
                rank = int(message.get("rank", 0))
                return [view.logs_message(rank, mesh.logs(rank, _LOG_BYTES), _LOG_BYTES)]
            case "actors":
                return [view.actors_message(self._fetch_actors(), mesh.ranks)]
            case "debug":
                ranks = view.parse_ranks_in_mesh(message.get("ranks"), mesh.ranks)
                if ranks:
                    return [{"kind": "reply", "text": self._debug(ranks)}]
            case "interrupt":
                ranks = view.parse_ranks_in_mesh(message.get("ranks"), mesh.ranks)
                if ranks:
                    mesh.interrupt(ranks)
                    return [{"kind": "reply", "text": f"{name_ranks(ranks)} interrupted"}]
            case "kill":
                ranks = view.parse_ranks_in_mesh(message.get("ranks"), mesh.ranks)
                if ranks:
                    mesh.kill(ranks)
                    return [{"kind": "reply", "text": f"{name_ranks(ranks)} killed"}]
        return []
