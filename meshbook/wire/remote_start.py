"""What a host on another machine and its starter say to each other, in lines, before the mesh's sockets connect."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from meshbook.wire.messages import MachineFacts

# Names of the supervisor's sockets, in its folder and, forwarded, in that of a host on another machine.
HOSTS_SOCKET = "hosts.sock"
STORE_SOCKET = "store.sock"


class HostPlace(NamedTuple):
    """Where a host on another machine is, and where its ranks find the mesh's store."""

    address: str  # by which other machines reach this one, "10.0.0.7"
    store: str  # zmq address
    store_key: str | None = None  # public CURVE key, for tcp


class RemoteHello(Struct, frozen=True):
    """From the host, first of all."""

    facts: MachineFacts | None = None
    folder: str = ""  # where it expects the supervisor's sockets
    problem: str = ""  # why it cannot be a host
    port: int = 0  # where it listens, at its facts' address, for others to try the way; 0: it does not


class TryWays(Struct, frozen=True):
    """To a machine that is only looked at: connect to others, and say whether that worked."""

    places: tuple[tuple[str, int], ...]  # addresses and ports


class WaysTried(Struct, frozen=True):
    """From it."""

    problems: tuple[str, ...]  # one for each place; "": there is a way


class SupervisorAddress(Struct, frozen=True):
    """Where hosts and ranks on another machine find their supervisor."""

    hosts: str  # "tcp://10.0.0.1:41234"
    store: str
    server_key: str | None = None  # public CURVE key, for tcp


class RemoteStart(Struct, frozen=True):
    """To the host."""

    token: str
    identity: str  # of its connection to the supervisor
    peers: tuple[str, ...]  # addresses of the mesh's other machines, as their starters know them
    lease_s: float  # a host that hears nothing of the supervisor for so long ends its ranks
    supervisor: SupervisorAddress | None = None  # None: its sockets are forwarded into the host's folder
