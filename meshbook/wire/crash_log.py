"""The last output of a process, readable by another process after its death, whatever the cause.

A ring of bytes in anonymous shared memory: the process writes every text there before it does anything else with it;
the process that created the ring reads it after the writer has exited. No locks: the text has one writer at a time, the
note has another, they touch different bytes, and the reader comes afterwards.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

RING_BYTES = 1 << 15
_NUM_WRITTEN = struct.Struct("<Q")  # bytes ever written to the ring
_NOTE = struct.Struct("<256p")  # the note, with its length
_HEADER_BYTES = _NUM_WRITTEN.size + _NOTE.size


class CrashLog:
    """The ring. Pass `fd` to the process that writes."""

    def __init__(self, fd: int | None = None) -> None:
        """Map a ring.

        Args:
            fd: of a ring that another process created; None: create one.
        """
        if fd is None:
            fd = _create_memory_file()
            os.ftruncate(fd, _HEADER_BYTES + RING_BYTES)
        self.fd = fd
        self._map = mmap.mmap(fd, _HEADER_BYTES + RING_BYTES)
        (self._num_written,) = _NUM_WRITTEN.unpack_from(self._map)

    def write(self, text: str) -> None:
        """Add text; takes about a microsecond."""
        data = text.encode("utf-8", "replace")[-RING_BYTES:]
        start = self._num_written % RING_BYTES
        num_before_end = min(len(data), RING_BYTES - start)
        self._map[_HEADER_BYTES + start : _HEADER_BYTES + start + num_before_end] = data[:num_before_end]
        if num_before_end < len(data):
            self._map[_HEADER_BYTES : _HEADER_BYTES + len(data) - num_before_end] = data[num_before_end:]
        self._num_written += len(data)
        _NUM_WRITTEN.pack_into(self._map, 0, self._num_written)

    def clear(self) -> None:
        """Discard the content, because something new begins."""
        self._num_written = 0
        _NUM_WRITTEN.pack_into(self._map, 0, 0)
        _NOTE.pack_into(self._map, _NUM_WRITTEN.size, b"")

    def set_note(self, text: str) -> None:
        """Set the note, one short text beside the ring: what the process is about to do."""
        _NOTE.pack_into(self._map, _NUM_WRITTEN.size, text.encode("utf-8", "replace")[:255])

    def read(self) -> str:
        """Return the text still in the ring, oldest first."""
        (num_written,) = _NUM_WRITTEN.unpack_from(self._map)
        ring = self._map[_HEADER_BYTES:]
        if num_written <= RING_BYTES:
            return ring[:num_written].decode("utf-8", "replace")
        start = num_written % RING_BYTES
        return (ring[start:] + ring[:start]).decode("utf-8", "replace").partition("\n")[2]

    def read_note(self) -> str | None:
        """Return the last note; None if there is none."""
        (note,) = _NOTE.unpack_from(self._map, _NUM_WRITTEN.size)
        return note.decode("utf-8", "replace") or None

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def _create_memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshbook-last-words", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
