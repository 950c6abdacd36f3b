"""The pipe in which a process writes each event before it handles it, for its standby (`replicated_loop`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import warnings
from typing import Final, NamedTuple

# kind, number of the socket, timer or descriptor, time, timers set and actions taken before, number of frames
_HEADER: Final = struct.Struct("<BQdQQI")
_LENGTH: Final = struct.Struct("<I")

# 1 MiB, the most an unprivileged process may request.
_PIPE_BYTES: Final = 1 << 20
# Seconds that the reader rests after it has read, so that it takes no processor from a cell's round trip; not after so
# many bytes, because the pipe would be full.
_REST_S: Final = 0.02
_FULL_READ_BYTES: Final = _PIPE_BYTES // 4
# Seconds that the reader may leave the pipe full: it is stopped, or swapped out.
_STUCK_S: Final = 2.0


class LoggedEvent(NamedTuple):
    """One event, or what a look at the system showed while it was handled."""

    kind: int
    number: int
    time: float  # of the loop's clock
    num_timers: int  # set by the loop before
    num_actions: int  # ... and taken
    frames: list[bytes]


class EventLog:
    """One end of the pipe, after `keep_writing_end` or `keep_reading_end`."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._buffer = bytearray()
        self._offset = 0  # of what has not been returned from the buffer
        self._writer_fd: int | None = None  # pidfd of the writer
        self._is_resting = False

    @property
    def fds(self) -> set[int]:
        return {fd for fd in (self._read_fd, self._write_fd, self._writer_fd) if fd is not None and fd >= 0}

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self._read_fd, self._write_fd, self._writer_fd = -1, -1, None

    # ---- the writing end

    def keep_writing_end(self) -> None:
        os.close(self._read_fd)
        self._read_fd = -1
        os.set_blocking(self._write_fd, False)

    def write(self, record: LoggedEvent) -> bool:
        """Write a record; return False if the reader has ended, or has not read for some seconds."""
        frames = record.frames
        header = _HEADER.pack(*record[:5], len(frames))
        data = memoryview(b"".join([header, *[_LENGTH.pack(len(frame)) for frame in frames], *frames]))
        while data:
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:
                if not _wait(self._write_fd, select.POLLOUT, _STUCK_S):
                    return False
            except OSError:
                return False
        return True

    # ---- the reading end

    def keep_reading_end(self, writer: int) -> None:
        """writer: the pid of the process with the other end."""
        os.close(self._write_fd)
        self._write_fd = -1
        with contextlib.suppress(OSError):  # it has ended already
            self._writer_fd = os.pidfd_open(writer)

    def read(self) -> LoggedEvent | None:
        """Wait for the next record and return it; None after the last, when the writer has ended."""
        while (record := self._parse()) is None:
            if self._is_resting and self._writer_fd is not None:
                _wait(self._writer_fd, select.POLLIN, _REST_S)
            data = os.read(self._read_fd, _PIPE_BYTES)
            if not data:
                return None
            self._is_resting = len(data) < _FULL_READ_BYTES
            del self._buffer[: self._offset]
            self._offset = 0
            self._buffer += data
        return record

    def wait_for_writer(self) -> None:
        """Wait until the writer's process is gone, whose files are closed a moment before."""
        if self._writer_fd is not None:
            _wait(self._writer_fd, select.POLLIN, None)

    def _parse(self) -> LoggedEvent | None:
        """Return the next record in the buffer, if it is there whole."""
        buffer, start = self._buffer, self._offset
        body = start + _HEADER.size
        if len(buffer) < body:
            return None
        *fields, num_frames = _HEADER.unpack_from(buffer, start)
        end = body + num_frames * _LENGTH.size
        if len(buffer) < end:
            return None
        lengths = [_LENGTH.unpack_from(buffer, body + index * _LENGTH.size)[0] for index in range(num_frames)]
        if len(buffer) < end + sum(lengths):
            return None
        frames = []
        for length in lengths:
            frames.append(bytes(memoryview(buffer)[end : end + length]))
            end += length
        self._offset = end
        kind, number, time, num_timers, num_actions = fields
        return LoggedEvent(kind, number, time, num_timers, num_actions, frames)


def fork_with_log() -> tuple[int, EventLog, int]:
    """Fork this process; return the child's pid, its log to write and its pidfd; in the child 0, its log and -1.

    Raises:
        OSError: there can be none now, for want of processes or descriptors.
    """
    events, pid = EventLog(), -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of zmq's threads, which the child has no use for
            pid = os.fork()
        if pid == 0:
            return 0, events, -1
        events.keep_writing_end()
        return pid, events, os.pidfd_open(pid)
    except OSError:
        if pid > 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        events.close()
        raise


def _wait(fd: int, events: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
