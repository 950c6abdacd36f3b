"""Shuts down connections of this process, as a fault would. Tests use it, and cells on ranks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import termios
from collections.abc import Iterator


def cut(suffix: str) -> int:
    """Shut down this process's unix connections to sockets whose path ends so; return how many."""
    num_cut = 0
    for connection in _connections(suffix):
        connection.shutdown(socket.SHUT_RDWR)
        num_cut += 1
    return num_cut


def cut_tcp() -> None:
    """Shut down this process's TCP connections: on a rank, those of gloo."""
    for connection in _sockets():
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # it listens, which gloo takes to go on for ever
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)


def narrow(suffix: str) -> None:
    """Let these connections hold little, so that the rest of a message waits in this process."""
    for connection in _connections(suffix):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def num_unread_bytes(suffix: str) -> int:
    """Return how much the other ends of these connections have yet to read."""
    sizes = (fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) for connection in _connections(suffix))
    return sum(int.from_bytes(size, sys.byteorder) for size in sizes)


def _connections(suffix: str) -> Iterator[socket.socket]:
    for connection in _sockets():
        if connection.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it has no peer
                if str(connection.getpeername()).endswith(suffix):
                    yield connection


def _sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # other threads close theirs meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    yield found
