"""What this process has run out of, as a sentence: libraries say it in words of their own."""

from __future__ import annotations

import errno
import os
import resource
import tempfile

_ALMOST_FULL_FRACTION = 0.05  # what is written in vain is mostly taken back before somebody looks


def explain_fd_shortage(error: BaseException) -> OSError | None:
    """That an error comes of a lack of file descriptors, with what to do about it; None: it does not say so."""
    if os.strerror(errno.EMFILE) not in str(error):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = (
        f"this process has no file descriptors left (its limit is {limit}): close files and sockets, or give it more "
        "with resource.setrlimit(resource.RLIMIT_NOFILE, ...) in a cell"
    )
    return OSError(errno.EMFILE, text)


def explain_full_folder(text: str) -> str | None:
    """Which folder has no space left, where an error's text says that one has none, and what lies there; None: it does
    not, or none of those that a program writes to unasked is full."""
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
