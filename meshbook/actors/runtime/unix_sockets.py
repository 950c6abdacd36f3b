"""The unix sockets on which processes with actors reach each other: how they are named, and who may connect."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
import sys

from meshbook.wire import keys


def socket_address(node: str) -> str | bytes:
    """Return a process's listening address.

    On Linux an abstract socket name, which leaves no file; elsewhere a socket in the runtime folder. A connecting
    process shows the listening process's key in both cases.
    """
    if sys.platform.startswith("linux"):
        return b"\0meshbook/" + node.encode()
    return str(keys.runtime_folder() / f"actors-{node}.sock")


def is_same_user(socket: sockets.socket) -> bool:
    """Whether the other end of a socket runs as the same user.

    Every user of a machine can see an abstract socket name, connect to it, and bind it after its process has exited.
    Other users must not receive a key or hold a connection.
    """
    if not sys.platform.startswith("linux"):
        return True  # the runtime folder is private to the user
    credentials = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", credentials)
    return bool(user == os.geteuid())


def listen(node: str) -> sockets.socket:
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    listener.bind(socket_address(node))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connect(node: str) -> sockets.socket:
    """Return a connection to the process that listens as `node`.

    Raises:
        OSError: it does not listen, or another user does in its place.
    """
    socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        socket.connect(socket_address(node))
        if not is_same_user(socket):
            raise ConnectionRefusedError("somebody else has taken its place")
    except OSError:
        socket.close()
        raise
    return socket


def unlink(node: str) -> None:
    path = socket_address(node)
    if isinstance(path, str):
        with contextlib.suppress(OSError):
            os.unlink(path)
