"""What this process has run out of, as a sentence: libraries say it in words of their own."""

from __future__ import annotations

import errno
import os
import resource


def shortage_behind(error: BaseException) -> OSError | None:
    """That an error comes of a lack of file descriptors, with what to do about it; None: it does not say so."""
    if os.strerror(errno.EMFILE) not in str(error):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = (
        f"this process has no file descriptors left (its limit is {limit}): close files and sockets, or give it more "
        "with resource.setrlimit(resource.RLIMIT_NOFILE, ...) in a cell"
    )
    return OSError(errno.EMFILE, text)
