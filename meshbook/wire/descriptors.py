"""A lack of file descriptors, of this process (RLIMIT_NOFILE) or of the system: how it is recognised, and said.

What cannot be looked at for want of one is not known: it must count neither as gone nor as ended.
"""

from __future__ import annotations

import errno
import os
import resource


def is_shortage(error: BaseException) -> bool:
    """Whether a call failed because no descriptor was left; an OSError, or one of zmq's."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def shortage() -> OSError:
    """Return the error of a call that was not made, because it would take the last descriptors."""
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def describe_shortage() -> str:
    """Return what this process lacks, and how it gets more."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    pid, more = os.getpid(), max(4096, 4 * limit)
    return (
        f"no file descriptors are left (the limit of pid {pid} is {limit}); prlimit --pid {pid} --nofile={more} gives "
        "it more"
    )


def describe(error: OSError) -> str:
    """Return why a call of the system failed."""
    return describe_shortage() if is_shortage(error) else str(error)
