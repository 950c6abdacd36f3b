"""Find a mesh and authenticate to it: connection files, tokens, CURVE keys.

Each mesh has a folder of its own, mode 0700, with the mesh's name, inside the runtime folder (`folders`). It holds the
mesh's sockets, its log and `mesh.json` (mode 0600: address, token, keys), as Jupyter's connection files do. A process
that can read that file may run code on the mesh; no other process can have anything run or unpickled.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct

from meshbook import clock
from meshbook.errors import MeshNameError, NotAttached, StartError
from meshbook.wire import descriptors, processes
from meshbook.wire.folders import check_name as check_name
from meshbook.wire.folders import claim_folder as claim_folder
from meshbook.wire.folders import is_locked as is_locked
from meshbook.wire.folders import lock_folder as lock_folder
from meshbook.wire.folders import remove_folder as remove_folder
from meshbook.wire.folders import remove_if_stale as remove_if_stale
from meshbook.wire.folders import remove_stale_folders as remove_stale_folders
from meshbook.wire.folders import runtime_folder as runtime_folder
from meshbook.wire.folders import write_atomically
from meshbook.wire.folders import write_marker as write_marker
from meshbook.wire.processes import ProcessIdentity

# Seconds within which a standby takes over: it does in a small part of one, unless the machine is overloaded.
TAKEOVER_TIMEOUT_S = 10.0
_TAKEOVER_POLL_S = 0.02


class ConnectionInfo(Struct, frozen=True):
    """The content of `mesh.json`."""

    name: str
    address: str  # ipc://… or tcp://…
    token: str
    process: ProcessIdentity  # the supervisor's
    started_at: float  # wall clock
    protocol: str
    owner: str | None = None  # the notebook or script that started it: a restarted kernel finds its mesh by this
    server_key: str | None = None  # CURVE, for tcp
    has_ranks: bool = False  # False: a supervisor that warms up and has no mesh yet

    @property
    def pid(self) -> int:
        """The supervisor's pid, on its host."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor's process runs on this machine."""
        return processes.is_running(self.process)


def client_identity(client: str, channel: str) -> bytes:
    """Return the zmq identity of a client's socket; channel: "send" or "receive"."""
    return f"{client}/{channel}".encode()


def new_token() -> str:
    return secrets.token_hex(32)


def write_connection_file(folder: Path, connection: ConnectionInfo) -> None:
    """Write `mesh.json` atomically, readable by this user only.

    Raises:
        StartError: it cannot be written, for example because the disk is full.
    """
    target = folder / "mesh.json"
    try:
        write_atomically(target, msgspec.json.encode(connection))
    except OSError as error:
        raise StartError(
            f"{target} cannot be written: {error.strerror}; "
            "free some space, or set MESHBOOK_RUNTIME_DIR to another disk"
        ) from error


def remove_stale_mesh(connection: ConnectionInfo) -> None:
    """Remove the folder of this mesh, if the mesh is dead and no other has taken its name since."""
    folder = runtime_folder() / connection.name
    found = read_connection_file(folder)
    if found is not None and found.token == connection.token:
        remove_if_stale(folder)


def read_connection_file(folder: Path) -> ConnectionInfo | None:
    """Return the content of `mesh.json` in this folder; None if there is none or it is not ours to read.

    Raises:
        OSError: no file descriptor is left to look.
    """
    try:
        return msgspec.json.decode((folder / "mesh.json").read_bytes(), type=ConnectionInfo)
    except msgspec.MsgspecError:
        return None
    except OSError as error:
        if descriptors.is_shortage(error):
            raise
        return None


def find_successor(connection: ConnectionInfo) -> tuple[ConnectionInfo | None, bool]:
    """Return the connection of the standby that has taken the place of a supervisor that has ended.

    Returns:
        That connection or None, and whether to ask again: a standby lives that may be taking over.

    Raises:
        OSError: no file descriptor is left to look.
    """
    folder = runtime_folder() / connection.name
    found = read_connection_file(folder)
    if found is None or found.token != connection.token:
        return None, False
    if found.process != connection.process and found.is_alive:
        return found, False
    return None, is_locked(folder)


def _read_connection(folder: Path) -> ConnectionInfo | None:
    """Return the content of `mesh.json`; where a standby is taking over, once it has."""
    connection = read_connection_file(folder)
    deadline = clock.monotonic() + TAKEOVER_TIMEOUT_S
    while connection is not None and not connection.is_alive and not processes.is_on_other_host(connection.process):
        successor, is_pending = find_successor(connection)
        if successor is not None:
            return successor
        if not is_pending or clock.monotonic() > deadline:
            break
        clock.sleep(_TAKEOVER_POLL_S)
    return connection


def list_connections() -> list[ConnectionInfo]:
    """Return every mesh of this user that runs on this machine, oldest first; remove the folders of dead ones."""
    remove_stale_folders()
    found = [_read_connection(folder) for folder in runtime_folder().iterdir()]
    living = [connection for connection in found if connection is not None and connection.is_alive]
    return sorted(living, key=lambda connection: connection.started_at)


def find_connection(name: str | None) -> ConnectionInfo:
    """Return the mesh of that name; with None, the only one that runs.

    Raises:
        NotAttached: none is running, or its supervisor has exited (its folder is removed).
        MeshNameError: no such name, or several meshes and no name; the message lists them.
    """
    if name is not None:
        folder = runtime_folder() / check_name(name)
        connection = _read_connection(folder)
        if connection is not None and not connection.is_alive:
            where = f"(pid {connection.pid} on {connection.process.host})"
            if not remove_if_stale(folder) and folder.exists():
                raise NotAttached(
                    f"the mesh {name!r} cannot be reached from here: its supervisor {where} belongs to another machine "
                    "or container; attach to it there"
                )
            raise NotAttached(
                f"the mesh {name!r} is gone: its supervisor (pid {connection.pid}) has ended. "
                f"What it left was removed; start a new one with %mesh start --name {name}"
            )
    running = list_connections()
    if name is None:  # a kernel's warm supervisor is not a mesh to attach to
        running = [connection for connection in running if connection.has_ranks]
    matching = [connection for connection in running if name in (None, connection.name)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(connection.name for connection in running)
    if not running:
        raise NotAttached("no mesh is running; start one with %mesh start -n 4 or meshbook.create_mesh(4)")
    if name is None:
        raise MeshNameError(f"{len(running)} meshes are running ({names}); say which one")
    raise MeshNameError(f"no mesh is named {name!r}; running: {names}")


def new_curve_keys() -> tuple[bytes, bytes]:
    """Return a new CURVE key pair: public, secret.

    No ZAP handler checks clients' keys, and none is needed: a client can send nothing to a CURVE server without that
    server's public key, which is only in `mesh.json`, mode 0600; it must then also show the token from the same file. A
    client's own key proves nothing more, so it creates a new one for each connection.

    Raises:
        StartError: this zmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise StartError("tcp needs CURVE, and this pyzmq was built without it; use ipc, or pip install -U pyzmq")
    return zmq.curve_keypair()


def listen_encrypted(socket: zmq.Socket[bytes], key_pair: tuple[bytes, bytes]) -> None:
    """Make a socket a CURVE server, with a pair of `new_curve_keys`. Before it is bound."""
    socket.curve_publickey, socket.curve_secretkey = key_pair
    socket.curve_server = True


def bind_encrypted(socket: zmq.Socket[bytes], host: str, key_pair: tuple[bytes, bytes]) -> str:
    """Have a CURVE server listen on a free port of one address of this machine; return its endpoint.

    Raises:
        StartError: the address cannot be listened on.
    """
    listen_encrypted(socket, key_pair)
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    except zmq.ZMQError as error:
        raise StartError(f"the address {host} cannot be listened on: {error.strerror}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def dial_encrypted(socket: zmq.Socket[bytes], server_key: str) -> None:
    """Have a socket show a new key of its own to a CURVE server with this public key. Before it is connected."""
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey, socket.curve_secretkey = new_curve_keys()


def configure_socket(socket: zmq.Socket[bytes], *, max_message_bytes: int) -> None:
    """Set the options of all our sockets: no linger, oversized messages refused, no high-water marks.

    Bounds are enforced by counting, not by silently dropping messages.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
