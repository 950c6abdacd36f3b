"""Descriptors 1 and 2 of the process as pipes: what C, C++ and subprocesses write becomes readable here."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import functools
import os
import select
from collections.abc import Callable
from typing import Final

from meshbook.rank.output.captured_streams import StreamName

# Capacity of each pipe, so that C code that prints while it holds the GIL (nothing can be read then) does not block at
# once. 1 MiB is the limit for an unprivileged process on Linux (/proc/sys/fs/pipe-max-size).
PIPE_BYTES: Final = 1 << 20

_IOLBF: Final = 1  # <stdio.h>: line buffered


class StandardPipes:
    """Makes descriptors 1 and 2 the write ends of two pipes, until `close`.

    Attributes:
        pipes: their read ends, non-blocking.
        poll: `select.poll().poll` of these.
        flush_libc: flushes C's own stdout, which is line-buffered from now on.
    """

    def __init__(self, fds: tuple[int, int] | None) -> None:
        """
        Args:
            fds: read ends of pipes whose write ends are already descriptors 1 and 2. None: creates the pipes.
        """
        self._original_fds: tuple[int, int] | None = None
        if fds is None:
            self._original_fds = (os.dup(1), os.dup(2))
            fds = _redirect_to_pipe(1), _redirect_to_pipe(2)
        self.pipes = [StandardPipe(fds[0], 1, "stdout"), StandardPipe(fds[1], 2, "stderr")]
        poll = select.poll()
        for pipe in self.pipes:
            os.set_blocking(pipe.fd, False)
            with contextlib.suppress(OSError):  # above the user's limit: the default size suffices
                fcntl.fcntl(pipe.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            poll.register(pipe.fd, select.POLLIN)
        self.poll = poll.poll
        self.flush_libc = _line_buffer_libc()

    def restore_target_fds(self) -> None:
        """Reopen descriptors 1 and 2 if user code has closed them."""
        for pipe in self.pipes:
            pipe.restore_target_fd()

    def close(self) -> None:
        """Restore the descriptors that were there before, and close the pipes."""
        for number, fd in zip((1, 2), self._original_fds or (), strict=False):
            os.dup2(fd, number)
            os.close(fd)
        for pipe in self.pipes:
            os.close(pipe.fd)
            os.close(pipe.write_end)


class StandardPipe:
    """The read end of a pipe whose write end is descriptor 1 or 2."""

    def __init__(self, fd: int, target_fd: int, stream: StreamName) -> None:
        self.fd = fd
        self.target_fd = target_fd
        self.stream: StreamName = stream
        # A separate write end: user code may close descriptor 1, and a pipe without writers is always readable, which
        # would keep every poller awake.
        self.write_end = os.dup(target_fd)
        os.set_inheritable(self.write_end, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def restore_target_fd(self) -> None:
        """Reopen the descriptor if user code has closed it.

        Otherwise the next file that is opened would get its number, and with it the output of C code and subprocesses.
        """
        try:
            os.fstat(self.target_fd)
        except OSError:
            os.dup2(self.write_end, self.target_fd)

    def decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if final:
            self._decoder.reset()
        return text


def _redirect_to_pipe(target_fd: int) -> int:
    """Make descriptor `target_fd` the write end of a new pipe; return the read end."""
    read, write = os.pipe()
    os.dup2(write, target_fd)  # inheritable, unlike the original, so that subprocesses write to it
    os.close(write)
    return read


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:  # the reader is closed
            return


@functools.cache
def _line_buffer_libc() -> Callable[[], object]:
    """Line-buffer C's own stdout, whose buffer is invisible to Python; return a function that flushes it.

    Line buffered, as on a terminal, so that printf's lines arrive as they are written and in order with Python's. Only
    stdout: stderr is never buffered, and fflush(NULL) takes the lock of every open FILE, so one thread that blocks in a
    read of another FILE would hang the rank here.
    """
    library = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(library, "stdout")
    library.fflush.argtypes = [ctypes.c_void_p]
    library.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.setvbuf(stdout, None, _IOLBF, 0)
    return functools.partial(library.fflush, stdout)
