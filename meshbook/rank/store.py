"""The TCPStore in which ranks find each other, served by a process that is no rank, so that any rank may die.

`serve_store` opens it; `serve` is the whole life of the process that does nothing else. That process should be forked
from one that has a single thread: the store brings a thread of its own, and a process with such a thread is not safe
to fork ranks from.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

from meshbook.wire.lifeline import die_with_parent

# Connections that wait to be accepted. All ranks of a mesh connect at the same moment; the system caps it as it likes.
_BACKLOG = 4096


def serve_store(host: str = "127.0.0.1") -> TCPStore:
    """A store that accepts connections on `host` only, for as long as the returned object lives.

    TCPStore itself listens on every interface and asks nobody for a key, so it is given a socket that is bound already.

    Args:
        host: an address of this machine; the default can be reached from this machine alone.

    Returns:
        The store; `.port` is where it listens.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on, and closes it.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def serve(fd: int, host: str = "127.0.0.1") -> NoReturn:
    """Serve a store until this process is ended. Never returns.

    Args:
        fd: the write end of a pipe; the port goes there as a line in decimal, and then it is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal that started it all is meant for cells
    store = serve_store(host)
    os.write(fd, b"%d\n" % store.port)
    os.close(fd)
    while True:
        signal.pause()


if __name__ == "__main__":
    die_with_parent()
    serve(int(sys.argv[1]))
