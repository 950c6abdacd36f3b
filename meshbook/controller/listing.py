"""The meshes of this user that run on this machine, and their status.

Queries have no side effects: the client is an observer, which neither keeps a mesh alive nor ends it by disconnecting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.session import Session
from meshbook.controller.tables import Table, describe_size, format_age
from meshbook.wire import keys, messages

# A supervisor replies in milliseconds; one that has not after this time is stopped, swapped out or stuck.
_REPLY_TIMEOUT_S = 3.0
# Between looks whether a supervisor that has not replied has ended meanwhile.
_LOOK_S = 0.1
_OBSERVER_KIND = "observer"  # the client kind of an observer


@dataclass(frozen=True)
class FoundMesh:
    """One running mesh.

    Attributes:
        name: the name for `attach`.
        pid: its supervisor's.
        started_at: wall clock, seconds since the epoch.
        owner: the notebook or script that started it, if set.
        info: the supervisor's reply; None if it did not reply.
        trouble: why it did not reply; empty if it did.
    """

    name: str
    pid: int
    started_at: float
    owner: str | None
    info: messages.MeshInfo | None
    trouble: str = ""


class MeshList(Sequence[FoundMesh]):
    """Meshes, oldest first; displays as a table."""

    def __init__(self, found: Sequence[FoundMesh]) -> None:
        self._found = tuple(found)

    @overload
    def __getitem__(self, index: int) -> FoundMesh: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FoundMesh]: ...

    def __getitem__(self, index: int | slice) -> FoundMesh | Sequence[FoundMesh]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self, mine: Sequence[str] = (), current: str | None = None) -> Table:
        """Return the list as a table.

        Args:
            mine: names of this notebook's meshes.
            current: name of that of them on which its cells run.
        """
        if not self._found:
            return Table("No mesh is running. Start one with %mesh start -n 4, or meshbook.create_mesh(4).")
        now = time.time()
        rows = tuple(
            (
                mesh.name,
                describe_size(mesh.info.spec) if mesh.info and mesh.info.spec else "",
                mesh.trouble or _describe_state(mesh.info),
                format_age(now - mesh.started_at),
                "this notebook, whose cells run on it"
                if mesh.name == current and len(mine) > 1
                else "this notebook"
                if mesh.name in mine
                else "",
                (", ".join(mesh.info.clients) or "nobody") if mesh.info else "",
            )
            for mesh in self._found
        )
        return Table("", ("name", "size", "state", "up", "of", "attached"), rows)


def list_meshes(timeout_s: float = _REPLY_TIMEOUT_S) -> MeshList:
    """Return every mesh of this user that runs on this machine, oldest first. Removes stale files of dead meshes.

    Args:
        timeout_s: seconds to wait for all replies together; a mesh without one is listed as not replying.
    """
    connections = keys.list_connections()
    reply_queue: queue.SimpleQueue[tuple[str, messages.MeshInfo | Exception]] = queue.SimpleQueue()

    def ask(connection: keys.ConnectionInfo) -> None:
        try:
            reply_queue.put((connection.name, fetch_mesh_info(connection)))
        except Exception as error:  # shown as that mesh's trouble
            reply_queue.put((connection.name, error))

    for connection in connections:
        # Daemon threads: waiting for a stuck supervisor must not keep a command from exiting.
        threading.Thread(target=ask, args=(connection,), name=f"ask-{connection.name}", daemon=True).start()
    replies: dict[str, messages.MeshInfo | Exception] = {}
    deadline = time.monotonic() + timeout_s
    while len(replies) < len(connections) and (left := deadline - time.monotonic()) > 0:
        try:
            name, reply = reply_queue.get(timeout=min(left, _LOOK_S))
        except queue.Empty:
            connections = _without_ended(connections, replies)
        else:
            replies[name] = reply
    found = []
    for connection in connections:
        result = replies.get(connection.name)
        trouble = str(result) if isinstance(result, Exception) else "" if result else "does not answer"
        info = result if isinstance(result, messages.MeshInfo) else None
        found.append(FoundMesh(connection.name, connection.pid, connection.started_at, connection.owner, info, trouble))
    return MeshList(found)


def _without_ended(connections: list[keys.ConnectionInfo], replied: Collection[str]) -> list[keys.ConnectionInfo]:
    """Return those that have replied or still run; a supervisor that a standby has replaced runs."""
    if all(connection.name in replied or connection.is_alive for connection in connections):
        return connections
    running = {connection.name for connection in keys.list_connections()}
    return [connection for connection in connections if connection.name in replied or connection.name in running]


def fetch_mesh_info(connection: keys.ConnectionInfo) -> messages.MeshInfo:
    """Return a mesh's status, without its observers, such as this client. Blocks.

    Raises:
        NotAttached: it does not reply.
        VersionMismatch: it runs another version of Meshbook.
    """
    session = Session(SupervisorConnection(connection, kind=_OBSERVER_KIND, observer=True), stop_at_exit=False)
    try:
        info = session.status()
    finally:
        session.detach()
    return msgspec.structs.replace(info, clients=tuple(c for c in info.clients if not c.startswith(_OBSERVER_KIND)))


def _describe_state(info: messages.MeshInfo | None) -> str:
    if info is None or info.spec is None:
        return "no ranks yet"
    states = [rank.state for rank in info.ranks]
    counts = {state: states.count(state) for state in ("starting", "busy", "silent", "dead") if state in states}
    if not counts:
        return "idle"
    words = {"starting": "starting", "busy": "busy", "silent": "without a sign of life", "dead": "dead"}
    return ", ".join(f"{count} {words[state]}" for state, count in counts.items())
