"""The mesh's log, bounded in size: a mesh may run for months, and its fork server and C++ libraries write there too."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# At this size the log is truncated; this much of its end is saved beside it as `<name>.1`.
MAX_BYTES = 8 << 20
RETAINED_BYTES = 1 << 20


def read_host_log(folder: Path, host: int, limit_bytes: int) -> str:
    """Return the end of what a host's agent and its launcher have written, of each start of it, the latest last.

    One on another machine writes it to its launcher; one on this machine writes to the mesh's own log.
    """
    found = {path: path.stat().st_mtime for path in folder.glob(f"h{host}.*.log")}
    paths = sorted(found, key=found.__getitem__) or [folder / "supervisor.log"]
    text = ""
    for path in paths:
        with contextlib.suppress(OSError):
            text += path.read_bytes()[-limit_bytes:].decode("utf-8", "replace")
    return text[-limit_bytes:]


def truncate_log(path: Path, *, max_bytes: int = MAX_BYTES, retained_bytes: int = RETAINED_BYTES) -> bool:
    """Truncate a log that has grown too large; return whether it had. Never raises if the disk is full.

    All writers have it open in append mode, so they continue at its new end.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= max_bytes:
            return False
        with contextlib.suppress(OSError), path.open("rb") as log:  # on a full disk there is no copy
            log.seek(-retained_bytes, os.SEEK_END)
            path.with_name(f"{path.name}.1").write_bytes(log.read())
        os.truncate(path, 0)
        return True
    return False
