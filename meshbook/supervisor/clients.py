"""The clients of a mesh, and when a mesh without any ends."""

from __future__ import annotations

from dataclasses import dataclass

from meshbook.supervisor.effects import Effect, SetTimer
from meshbook.wire import messages

# Seconds a mesh lives on without clients, unless the last one requested otherwise: long enough to restart a crashed
# kernel or to reopen the notebook after lunch, short enough that forgotten GPUs are free the same afternoon.
ORPHAN_TTL_S = 1800.0
# Seconds that one without ranks lives on, whatever was requested: it holds nothing. A restarter needs about 5 to start
# a crashed kernel again, which then finds it warm.
EMPTY_TTL_S = 10.0

# Kinds of clients that act for somebody, `mcp:claude-code`: what they do beside cells is in the history too.
_AGENT_KINDS = ("mcp", "http")


@dataclass
class Client:
    """One attached process."""

    id: str
    kind: str
    pid: int
    observer: bool
    orphan_ttl_s: float
    has_called: bool = False  # then ranks may hold values for it

    @property
    def name(self) -> str:
        return f"{self.kind} (pid {self.pid})"

    @property
    def is_agent(self) -> bool:
        return self.kind.partition(":")[0] in _AGENT_KINDS


class Clients:
    """All attached clients. Observers do not keep the mesh alive."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._num_orphanings = 0  # how often the last client left, or came back; identifies outdated orphan timers

    def join(self, hello: messages.Hello) -> None:
        ttl = ORPHAN_TTL_S if hello.orphan_ttl_s is None else hello.orphan_ttl_s
        self._clients[hello.client] = Client(hello.client, hello.kind, hello.pid, hello.observer, ttl)
        if not hello.observer:
            self._num_orphanings += 1

    def leave(self, client_id: str, *, is_empty: bool = False) -> tuple[Client | None, list[Effect]]:
        """Remove a client; return it, and the timer that ends a mesh without clients. None: it is unknown.

        Args:
            is_empty: the mesh has no ranks.
        """
        client = self._clients.pop(client_id, None)
        if client is None or client.observer or not all(other.observer for other in self._clients.values()):
            return client, []
        self._num_orphanings += 1
        ttl_s = min(client.orphan_ttl_s, EMPTY_TTL_S) if is_empty else client.orphan_ttl_s
        return client, [SetTimer(f"orphan {self._num_orphanings}", ttl_s)] if ttl_s < float("inf") else []

    def is_orphaned(self, orphaning: str) -> bool:
        """Whether no client has come back since the timer of this orphaning was set."""
        return orphaning == str(self._num_orphanings)

    def get(self, client_id: str) -> Client | None:
        return self._clients.get(client_id)

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._clients

    def descriptions(self) -> tuple[str, ...]:
        return tuple(client.name for client in self._clients.values())

    def name(self, client_id: str) -> str:
        """Return what a user calls a client, which may have left."""
        client = self._clients.get(client_id)
        return client.name if client is not None else "a client that is gone"
