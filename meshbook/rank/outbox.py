"""Reports of other threads, which the service thread sends: a socket belongs to one thread."""

from __future__ import annotations

import contextlib
import os
import queue

from meshbook.wire import messages


class Outbox:
    """A queue with a descriptor that is readable while it holds something.

    Attributes:
        fd: for the service thread's loop, which then calls `drain`.
    """

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[messages.RankReport] = queue.SimpleQueue()
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)

    def put(self, report: messages.RankReport) -> None:
        """Hand over a report. Any thread; does not block."""
        self._reports.put(report)
        os.write(self._write_fd, b"x")

    def drain(self) -> list[messages.RankReport]:
        """Return the reports that were put."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        found = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def close(self) -> None:
        """Close the descriptors. Nothing may be put any more."""
        os.close(self.fd)
        os.close(self._write_fd)
