"""Launching a supervisor, and waiting until it listens."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from meshbook.errors import StartError
from meshbook.wire import keys

# Environment variable with the socket of a fork server that has imported torch, for programs that start many meshes in
# sequence, such as test suites: importing torch dominates the start time.
FORK_SERVER_VARIABLE = "MESHBOOK_FORK_SERVER"


def launch_supervisor(
    name: str,
    *,
    owner: str | None = None,
    listen: str | None = None,
    light: bool = False,
    cold: bool = False,
    fork_server_socket: str | None = None,
    timeout_s: float = 30.0,
) -> keys.ConnectionInfo:
    """Start the daemon of a new mesh. It has no ranks yet, but prepares to fork them. Blocks, about 0.2 s.

    It ends if this process does before a client has attached.

    Args:
        name: the mesh's name; unique among this user's meshes.
        owner: the key by which a restarted notebook finds it.
        listen: a tcp address to listen on, with CURVE; None: a socket in the mesh's own folder.
        light: prepare to fork ranks without torch.
        cold: prepare nothing, because its ranks will be on other machines.
        fork_server_socket: the socket of a live mesh's fork server, of the same kind; the new one is forked from it.
            None: the one in MESHBOOK_FORK_SERVER, if the new one needs torch.

    Raises:
        MeshInUse: the name is taken.
        StartError: it did not start; the message says why.
    """
    if fork_server_socket is None and not light:
        fork_server_socket = os.environ.get(FORK_SERVER_VARIABLE)
    folder = keys.claim_folder(name)
    read_fd, write_fd = os.pipe()
    # -P: a torch.py in the user's folder must not shadow torch; ranks get the user's own path later.
    command = [sys.executable, "-P", "-m", "meshbook.supervisor", str(folder), name, str(write_fd), str(os.getpid())]
    command += ["--owner", owner] if owner else []
    command += ["--listen", listen] if listen else []
    command += ["--light"] if light else []
    command += ["--cold"] if cold else []
    command += ["--source", fork_server_socket] if fork_server_socket else []
    try:
        with open(folder / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                command,
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_supervisor_environment(),
            )
    except OSError as error:
        keys.remove_folder(folder)
        raise StartError(f"the supervisor could not be started: {error.strerror}") from error
    finally:
        os.close(write_fd)
    process.wait()  # the first of two forks; the daemon is not a child of this process
    status = _read_until_closed(read_fd, time.monotonic() + timeout_s)
    connection = keys.read_connection_file(folder)
    if status != "ready" or connection is None:
        reason = status or _last_line(folder / "supervisor.log") or f"no word within {timeout_s:.0f} s"
        keys.remove_folder(folder)
        raise StartError(f"the mesh {name!r} did not come up: {reason}")
    return connection


def _last_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip().rpartition("\n")[2]
    except OSError:
        return ""


def _supervisor_environment() -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH extended if Meshbook was found through sys.path only."""
    environment = dict(os.environ)
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = environment.get("PYTHONPATH", "").split(os.pathsep) if environment.get("PYTHONPATH") else []
    if package_root not in paths and not package_root.endswith("-packages"):
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *paths])
    return environment


def _read_until_closed(fd: int, deadline: float) -> str:
    text = b""
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                piece = os.read(fd, 4096)
                if not piece:
                    break
                text += piece
        return text.decode("utf-8", "replace")
    finally:
        os.close(fd)
