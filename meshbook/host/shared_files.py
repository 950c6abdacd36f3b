"""What a rank that used CUDA IPC leaves in /dev/shm when it is killed.

torch counts there who has opened a CUDA tensor, and the driver keeps its events for other processes there. Both names
have the pid. What others have opened stays valid after the names are gone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def unlink_shared_files(pid: int, since: float, folder: Path = Path("/dev/shm")) -> None:
    """Remove the files that a process which has ended had created.

    Args:
        since: wall clock; older files are another's, which had the pid before, or has it in another container.
    """
    prefixes = f"torch_{pid}_", f"cuda.shm.{os.getuid():x}.{pid:x}."
    with contextlib.suppress(OSError):  # no such folder
        for name in os.listdir(folder):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):
                    status = os.lstat(folder / name)
                    if status.st_uid == os.getuid() and status.st_ctime >= since:
                        os.unlink(folder / name)
