"""The limit on this process's open files (RLIMIT_NOFILE): raised here, while ranks get the user's own.

A supervisor holds about ten descriptors for each rank and four for each client; 1,024, the usual soft limit, would not
suffice for a mesh of a hundred ranks: ZeroMQ aborts a process that has none left for a new connection. User code keeps
the soft limit, because `select()` supports no numbers above 1,023.
"""

from __future__ import annotations

import contextlib
import resource

TARGET_FD_LIMIT = 1 << 16

_original_limit: int | None = None


def raise_fd_limit() -> None:
    """Let this process and its children open as many files as the system allows, up to `TARGET_FD_LIMIT`."""
    global _original_limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TARGET_FD_LIMIT if hard == resource.RLIM_INFINITY else min(TARGET_FD_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # not allowed here: the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _original_limit = soft


def user_fd_limit() -> int | None:
    """Return the soft limit for user code; None: the inherited one."""
    return _original_limit
