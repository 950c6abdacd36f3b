"""Where a mesh is found and who may speak to it: the runtime folder, connection files, tokens, CURVE keys.

Each mesh has a folder of its own, mode 0700, named after it, inside the runtime folder. It holds the mesh's sockets,
its log and `mesh.json` (mode 0600: address, token, keys), as Jupyter's connection files do. Who can read that file may
run code on the mesh; nobody else gets anything run or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec
import psutil
import zmq
from msgspec import Struct

from meshbook.errors import MeshInUse, MeshNameError, NotAttached, StartError, UsageError

# Linux's limit for a socket's path is 108 bytes with its end mark; the longest name we add is "h1234-service.sock".
_MAX_SOCKET_FOLDER = 107 - len("/h1234-service.sock")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


class Connection(Struct, frozen=True):
    """What `mesh.json` says."""

    name: str
    address: str  # ipc://… or tcp://…
    token: str
    pid: int  # the supervisor's
    process_started_at: float  # of that pid, so that a reused pid is not taken for it
    started_at: float  # wall clock
    protocol: str
    owner: str | None = None  # the notebook or script that started it: a restarted kernel finds its mesh by this
    server_key: str | None = None  # CURVE, for tcp
    has_ranks: bool = False  # False: a supervisor that warms up, and is nobody's mesh yet


def new_token() -> str:
    return secrets.token_hex(32)


def runtime_folder() -> Path:
    """The folder that holds all meshes of this user; made when absent.

    `MESHBOOK_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/meshbook`, else `meshbook-<uid>` in the temporary folder.

    Raises:
        StartError: it belongs to somebody else, others may write to it, or its path is too long for a socket.
    """
    if chosen := os.environ.get("MESHBOOK_RUNTIME_DIR"):
        folder = Path(chosen)
    elif (runtime := os.environ.get("XDG_RUNTIME_DIR")) and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "meshbook"
    else:
        folder = Path(tempfile.gettempdir()) / f"meshbook-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"the runtime folder {folder} cannot be made ({error.strerror}); "
            "set MESHBOOK_RUNTIME_DIR to a folder of yours"
        ) from error
    _check_folder(folder)
    return folder


def _check_folder(folder: Path) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise StartError(f"{folder} is not a folder; remove it, or set MESHBOOK_RUNTIME_DIR to a folder of yours")
    if status.st_uid != os.getuid():
        raise StartError(
            f"the folder {folder} belongs to user {status.st_uid}, not to you ({os.getuid()}); "
            "set MESHBOOK_RUNTIME_DIR to a folder of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StartError(
            f"the folder {folder} is open to others (mode {stat.S_IMODE(status.st_mode):04o}, wanted 0700); "
            f"run chmod 700 {folder}, or set MESHBOOK_RUNTIME_DIR"
        )


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a mesh: use 1 to 48 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


def claim_folder(name: str) -> Path:
    """A new folder for a mesh of this name. What a dead mesh of the name left behind is removed first.

    Raises:
        MeshInUse: a mesh of that name lives.
        StartError: the folder cannot be made or is too deep for sockets.
    """
    folder = runtime_folder() / check_name(name)
    if len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER:
        raise StartError(
            f"the folder {folder} is {len(os.fsencode(folder))} bytes long, and a socket in it may have at most "
            f"{_MAX_SOCKET_FOLDER}; set MESHBOOK_RUNTIME_DIR to a shorter one"
        )
    for _ in range(2):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if is_alive(folder):
                raise MeshInUse(
                    f"a mesh named {name!r} is running; attach to it (%mesh attach {name}), stop it, or choose another "
                    "name with --name"
                ) from None
            shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise StartError(f"the folder {folder} cannot be made: {error.strerror}") from error
        else:
            return folder
    raise StartError(f"the folder {folder} of a dead mesh cannot be removed; remove it by hand")


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def write_connection(folder: Path, connection: Connection) -> None:
    """Write `mesh.json`, whole or not at all, readable by this user alone.

    Raises:
        StartError: it cannot be written, for example because the disk is full.
    """
    target, draft = folder / "mesh.json", folder / ".mesh.json.new"
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(connection))
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StartError(
            f"{target} cannot be written: {error.strerror}; "
            "free some space, or set MESHBOOK_RUNTIME_DIR to another disk"
        ) from error


def remove_dead(connection: Connection) -> None:
    """Remove what this mesh left, if it is dead and nobody has taken its name since."""
    folder = runtime_folder() / connection.name
    found = read_connection(folder)
    dead = not is_running(connection.pid, connection.process_started_at)
    if dead and found is not None and found.token == connection.token:
        remove_folder(folder)


def read_connection(folder: Path) -> Connection | None:
    """What `mesh.json` in this folder says; None when there is none or it is not ours to read."""
    try:
        return msgspec.json.decode((folder / "mesh.json").read_bytes(), type=Connection)
    except (OSError, msgspec.MsgspecError):
        return None


def process_started_at(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_running(pid: int, started_at: float) -> bool:
    """Whether that very process lives, not a later one with the same pid."""
    found = process_started_at(pid)
    try:
        return found is not None and abs(found - started_at) < 1.0 and psutil.Process(pid).status() != "zombie"
    except psutil.Error:
        return False


def is_alive(folder: Path) -> bool:
    """Whether a supervisor lives behind this folder, or is just being born there."""
    connection = read_connection(folder)
    if connection is not None:
        return is_running(connection.pid, connection.process_started_at)
    try:
        pid, started_at = (folder / "starting").read_text().split()
        return is_running(int(pid), float(started_at))
    except (OSError, ValueError):
        return False


def mark_starting(folder: Path, pid: int) -> None:
    """Say that `pid` is making a mesh here, so that nobody takes the folder for a dead one's."""
    (folder / "starting").write_text(f"{pid} {process_started_at(pid) or 0.0}")


def list_connections() -> list[Connection]:
    """Every mesh of this user that lives, oldest first. Folders of dead ones are removed."""
    found = []
    for folder in runtime_folder().iterdir():
        if not folder.is_dir():
            continue
        connection = read_connection(folder)
        if connection is not None and is_running(connection.pid, connection.process_started_at):
            found.append(connection)
        elif not is_alive(folder):
            remove_folder(folder)
    return sorted(found, key=lambda connection: connection.started_at)


def find_connection(name: str | None) -> Connection:
    """The mesh of that name; with None, the only one there is.

    Raises:
        NotAttached: none is running, or its supervisor is gone (what it left is removed).
        MeshNameError: no such name, or several meshes and no name; the message lists them.
    """
    if name is not None:
        folder = runtime_folder() / check_name(name)
        connection = read_connection(folder)
        if connection is not None and not is_running(connection.pid, connection.process_started_at):
            remove_folder(folder)
            raise NotAttached(
                f"the mesh {name!r} is gone: its supervisor (pid {connection.pid}) has ended. "
                f"What it left was removed; start a new one with %mesh start --name {name}"
            )
    running = list_connections()
    if name is None:  # a kernel's spare supervisor is no mesh that anybody could mean
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


def curve_keys() -> tuple[bytes, bytes]:
    """A new CURVE pair: public, secret.

    Raises:
        StartError: this zmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise StartError("tcp needs CURVE, and this pyzmq was built without it; use ipc, or pip install -U pyzmq")
    return zmq.curve_keypair()


def harden(socket: zmq.Socket[bytes], *, max_message_bytes: int) -> None:
    """Options that every socket of ours has: nothing lingers, oversized messages are refused, high-water marks off
    (bounds are kept by counting, not by silently dropping)."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
