"""Explains exhausted resources of this process, which libraries report in their own words."""

from __future__ import annotations

import errno
import os
import resource
import tempfile

_ALMOST_FULL_FRACTION = 0.05  # most of a failed write is undone before this check runs


def explain_fd_shortage(error: BaseException) -> OSError | None:
    """Return an error that explains a lack of file descriptors and what to do; None if `error` is not about that."""
    if os.strerror(errno.EMFILE) not in str(error):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = (
        f"this process has no file descriptors left (its limit is {limit}): close files and sockets, or give it more "
        "with resource.setrlimit(resource.RLIMIT_NOFILE, ...) in a cell"
    )
    return OSError(errno.EMFILE, text)


def explain_full_folder(text: str) -> str | None:
    """Return which folder is full and what uses it, if `text` reports a lack of space.

    Returns None if it does not, or if none of the folders that a program writes to by default is full.
    """
    if os.strerror(errno.ENOSPC) not in text:
        return None
    reports = []
    for folder, advice in (
        ("/dev/shm", "what processes share lies there, tensors of DataLoader workers for example"),
        (tempfile.gettempdir(), "another disk can be named in TMPDIR before the mesh starts"),
    ):
        try:
            stats = os.statvfs(folder)
        except OSError:
            continue
        free, size = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
        if size and free < _ALMOST_FULL_FRACTION * size:
            reports.append(f"{folder} is full ({free >> 20:,} of {size >> 20:,} MiB are free): {advice}")
    return ". ".join(reports) or None
