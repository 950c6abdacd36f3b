"""Reads files of the project for hosts on other machines: those of the last `SyncFiles`, and no others."""

from __future__ import annotations

import os
import stat

from meshbook.wire.messages import FetchFiles, FileParts, PartRead, SyncFiles
from meshbook.wire.transfers import CHUNK_BYTES

_GONE = PartRead(b"", -1, 0)


class ProjectServer:
    """What hosts may read."""

    def __init__(self) -> None:
        self._root = ""
        self._allowed: frozenset[str] = frozenset()

    def allow(self, command: SyncFiles) -> None:
        """Let hosts read the files of a command that is sent to them."""
        self._root = command.root
        self._allowed = frozenset(file.path for file in command.files if not file.link)

    def serve(self, request: FetchFiles) -> FileParts:
        """Return the parts that a host asks for, as they are now. Files that it may not read are not there."""
        parts = []
        room = CHUNK_BYTES
        for part in request.parts:
            nbytes = max(0, min(part.nbytes, room))
            room -= nbytes
            allowed = part.path in self._allowed
            parts.append(_read(os.path.join(self._root, part.path), part.offset, nbytes) if allowed else _GONE)
        return FileParts(request.batch, tuple(parts))


def _read(path: str, offset: int, nbytes: int) -> PartRead:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                return _GONE
            data = os.pread(fd, nbytes, offset)
            after = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError:
        return _GONE
    is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return PartRead(data, after.st_size, after.st_mtime_ns if is_same else 0)
