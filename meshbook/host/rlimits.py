"""The limit on this process's open files (RLIMIT_NOFILE): ours is raised, ranks get the one that their user has.

A supervisor holds about ten descriptors for each rank and four for each client, and 1,024, the usual soft limit, would
be the end of a mesh of a hundred ranks: ZeroMQ aborts the process that has none left for a new connection. User code
keeps the soft limit, because `select()` knows no higher numbers than 1,023.
"""

from __future__ import annotations

import contextlib
import resource

TARGET_FD_LIMIT = 1 << 16

_original_limit: int | None = None


def raise_fd_limit() -> None:
    """Let this process, and what it starts, open as many files as the system allows, up to `TARGET_FD_LIMIT`."""
    global _original_limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TARGET_FD_LIMIT if hard == resource.RLIM_INFINITY else min(TARGET_FD_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # not allowed here: it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _original_limit = soft


def user_fd_limit() -> int | None:
    """The soft limit that user code is to have; None: the one that it inherits."""
    return _original_limit
