"""The output of a rank, in one ordered and bounded buffer.

It has three inputs: Python's `sys.stdout` and `sys.stderr`, the file descriptors 1 and 2 (C, C++, subprocesses,
`os.write`), and displays. It has one output: `pop_items()`. The two descriptors are pipes whose read ends are read
here: by a thread that writes in Python, before its own text is added, so that the order is preserved; by the service
thread (`pump`), while the main thread computes; and once more when a call ends (`flush`).

A rank that prints without end is first slowed down and then loses the middle of its output; the buffer never exceeds
its limit. Does not depend on calls, sockets, or the consumer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from meshbook.clock import monotonic, sleep
from meshbook.errors import escape_surrogates
from meshbook.rank.output.captured_streams import CapturedStream, StreamName
from meshbook.rank.output.output_items import OutputTruncation, estimate_chars, merge_texts
from meshbook.rank.output.standard_pipes import StandardPipe, StandardPipes, write_all
from meshbook.wire.messages import Display, OutputItem, Text

# Size of one read from a pipe; equal to the default capacity of a pipe.
READ_BYTES: Final = 1 << 16
# Text is sealed into items of about this many characters, the unit in which excess output is dropped.
MAX_SEALED_CHARS: Final = 1 << 14
# Size of an item beside its text, so that a flood of one-character items is bounded as well.
ITEM_OVERHEAD_CHARS: Final = 96
# Limit of one read pass over the pipes, so that a child that never stops writing cannot occupy the reader.
MAX_PUMP_BYTES: Final = 4 << 20
# Seconds between two reads by `pump` while the buffer is full. That is 13 MB/s: a slow pipe for the writers, and a
# negligible CPU load.
FLOOD_PAUSE_S: Final = 0.005
WAIT_SLICE_S: Final = 0.1


class OutputBuffer:
    """The output that has not been popped yet, in order.

    Any thread may write. One thread pumps and pops, and never waits for room.

    Attributes:
        total_chars: characters of text ever written, including dropped ones.
    """

    def __init__(
        self,
        fds: tuple[int, int] | None = None,
        *,
        redirect_fds: bool = True,
        max_chars: int = 1 << 20,
        block_timeout_s: float = 1.0,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            fds: read ends of pipes whose write ends are already descriptors 1 and 2; they become non-blocking for every
                process that shares them. None: `install` creates the pipes.
            redirect_fds: False leaves descriptors 1 and 2 alone and captures Python's streams only.
            max_chars: capacity in characters; displays count by the length of their data.
            block_timeout_s: how long a writer waits for room before the middle of the buffer is dropped.
            on_text: called with every text as it arrives, even if it is dropped later.
        """
        self.total_chars = 0
        self._fds = fds
        self._on_text = on_text
        self._redirect_fds = redirect_fds
        self._max_chars = max_chars
        self._block_timeout_s = block_timeout_s
        # Reentrant: a finalizer that prints may run while the same thread holds the lock.
        self._lock = threading.RLock()
        self._space_freed = threading.Condition(self._lock)
        # In order: head, tail, unsealed text. When output is dropped, the head is what remains of its beginning, the
        # tail of its end; the unsealed text belongs to the stream that was written last.
        self._head: list[OutputItem] = []
        self._tail: deque[tuple[OutputItem, int]] = deque()
        self._unsealed: list[str] = []
        self._unsealed_stream: StreamName = "stdout"
        self._head_size = self._tail_size = self._unsealed_size = 0
        self._truncation = OutputTruncation()
        self._is_truncating = False  # nothing pops: drop output at once until something does
        # Signalled when the buffer stops being empty. An eventfd, so that any poller can wait for it.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_wake_pending = False
        self._pump_thread: int | None = None  # the thread that calls `pump`
        self._muted_threads: set[int] = set()  # identifiers of muted threads
        self._pipes: list[StandardPipe] = []
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        self._standard_pipes: StandardPipes | None = None
        self._saved_streams: tuple[Any, Any] | None = None  # what Python wrote to before `install`
        self._is_forked_child = False  # in a forked child, where the buffer belongs to the parent
        _live_buffers.add(self)

    # ---- Redirecting the process's output

    def install(self) -> None:
        """Redirect `sys.stdout`, `sys.stderr` and descriptors 1 and 2 to this buffer."""
        saved = sys.stdout, sys.stderr
        _flush_streams(*saved)
        if self._redirect_fds:
            self._standard_pipes = StandardPipes(self._fds)
            self._pipes, self._poll = self._standard_pipes.pipes, self._standard_pipes.poll
        self._saved_streams = saved
        sys.stdout = CapturedStream(self, "stdout", 1)
        sys.stderr = CapturedStream(self, "stderr", 2)

    def uninstall(self) -> None:
        """Restore the streams and descriptors. The buffer retains its content."""
        saved, self._saved_streams = self._saved_streams, None
        if saved is None:
            return
        self._flush_into_buffer(saved)
        sys.stdout, sys.stderr = saved
        self._poll, self._pipes = None, []
        if self._standard_pipes is not None:
            self._standard_pipes.close()
            self._standard_pipes = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._wake_fd)

    def poll_fds(self) -> tuple[int, ...]:
        """Return descriptors to poll for reading: when one is readable, call `pump`, and `pop_items` soon after."""
        return (self._wake_fd, *(pipe.fd for pipe in self._pipes))

    def wake(self) -> None:
        """Make one of `poll_fds` readable, even if the buffer is empty."""
        with self._lock:
            self._signal_reader()

    # ---- Input

    def write(self, stream: StreamName, text: str) -> None:
        """Add text. Blocks, for a bounded time, while the buffer is full."""
        if self._is_forked_child:
            write_all(1 if stream == "stdout" else 2, text.encode("utf-8", "backslashreplace"))
            return
        if self._muted_threads and threading.get_ident() in self._muted_threads:
            return
        if len(text) > READ_BYTES:
            for start in range(0, len(text), READ_BYTES):
                self._write(stream, text[start : start + READ_BYTES])
        else:
            self._write(stream, text)

    def _write(self, stream: StreamName, text: str) -> None:
        with self._lock:
            # What C code wrote before this text precedes it. Costs one system call when there is nothing to read.
            if self._poll is not None and self._poll(0):
                self._read_pipes()
            self._append(stream, text)
            if self._head_size + self._tail_size + self._unsealed_size > self._max_chars:
                self._enforce_limit()

    def put(self, item: OutputItem) -> None:
        """Add a display, a clear or a notice; text goes through `write`."""
        if self._is_forked_child:
            if isinstance(item, Display) and "text/plain" in item.data:
                write_all(1, f"{item.data['text/plain']}\n".encode("utf-8", "backslashreplace"))
            return
        if self._muted_threads and threading.get_ident() in self._muted_threads:
            return
        with self._lock:
            if self._poll is not None and self._poll(0):
                self._read_pipes()
            self._seal()
            self._store_item(item, estimate_chars(item) + ITEM_OVERHEAD_CHARS)
            if not self._is_wake_pending:
                self._signal_reader()
            if self._size() > self._max_chars:
                self._enforce_limit()

    def pump(self) -> bool:
        """Read what C code and subprocesses have written so far, and reset the wake descriptor. One thread only.

        While the buffer is full the pipes are read slowly and output is dropped; that takes FLOOD_PAUSE_S at most.

        Returns:
            Whether there was anything to read.
        """
        if self._is_forked_child:
            return False
        self._pump_thread = threading.get_ident()
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            full = self._size() > self._max_chars
            found = self._read_pipes(READ_BYTES if full else MAX_PUMP_BYTES)
        if full and found:
            sleep(FLOOD_PAUSE_S)
        return found

    def flush(self) -> None:
        """Read everything written so far, including what C's stdio still buffers. Called at the end of a call."""
        if self._saved_streams is not None and not self._is_forked_child:
            self._flush_into_buffer(self._saved_streams)

    def _flush_into_buffer(self, saved: tuple[Any, Any]) -> None:
        _flush_streams(*saved, sys.__stdout__, sys.__stderr__)
        if self._standard_pipes is None:
            return
        self._standard_pipes.restore_target_fds()
        with self._lock:
            self._read_pipes()  # makes room in the pipe for the flush below
        self._standard_pipes.flush_libc()
        with self._lock:
            self._read_pipes()
            for pipe in self._pipes:
                remainder = pipe.decode(b"", final=True)
                if remainder:
                    self._append(pipe.stream, remainder)

    # ---- Output

    def pop_items(self) -> tuple[OutputItem, ...]:
        """Remove and return everything, in order; adjacent texts of one stream are merged."""
        with self._lock:
            self._seal()
            head, tail, truncation = self._head, [item for item, _ in self._tail], self._truncation
            self._head, self._tail, self._truncation = [], deque(), OutputTruncation()
            self._head_size = self._tail_size = 0
            self._is_wake_pending = self._is_truncating = False
            self._space_freed.notify_all()
        if truncation:
            truncation.align_to_lines(head, tail)
            head.append(truncation.to_notice())
        return merge_texts([*head, *tail])

    def has_pending(self) -> bool:
        """Whether there is anything to pop."""
        return self._size() > 0 or bool(self._truncation)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Drop what the calling thread prints and displays in this block. Nests; does not affect other threads."""
        ident = threading.get_ident()
        outermost = ident not in self._muted_threads
        self._muted_threads.add(ident)
        try:
            yield
        finally:
            if outermost:
                self._muted_threads.discard(ident)

    # ---- Called with the lock held

    def _size(self) -> int:
        return self._head_size + self._tail_size + self._unsealed_size

    def _append(self, stream: StreamName, text: str) -> None:
        if stream != self._unsealed_stream:
            self._seal()
            self._unsealed_stream = stream
        self._unsealed.append(text)
        if self._on_text is not None:
            self._on_text(text)
        self.total_chars += len(text)
        self._unsealed_size += len(text)
        if self._unsealed_size >= MAX_SEALED_CHARS:
            self._seal()
        if not self._is_wake_pending:
            self._signal_reader()

    def _signal_reader(self) -> None:
        self._is_wake_pending = True
        # the counter is at its limit, so the reader is awake; or the descriptor is closed
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _seal(self) -> None:
        if not self._unsealed:
            return
        text = "".join(self._unsealed)
        self._unsealed.clear()
        self._unsealed_size = 0
        if not text:
            return
        text = escape_surrogates(text)
        self._store_item(Text(self._unsealed_stream, text), len(text) + ITEM_OVERHEAD_CHARS)

    def _store_item(self, item: OutputItem, size: int) -> None:
        if not self._tail and not self._truncation and self._head_size < self._max_chars // 2:
            self._head.append(item)
            self._head_size += size
        else:
            self._tail.append((item, size))
            self._tail_size += size

    def _enforce_limit(self) -> None:
        """Wait for a pop while the buffer is over its limit; drop the middle after a timeout, or on the pump thread."""
        if threading.get_ident() != self._pump_thread:
            deadline = monotonic() + self._block_timeout_s
            while self._size() > self._max_chars and not self._is_truncating:
                remaining_s = deadline - monotonic()
                if remaining_s <= 0:
                    self._is_truncating = True
                else:
                    # In slices: a signal that arrives just before the wait begins does not end it.
                    self._space_freed.wait(min(remaining_s, WAIT_SLICE_S))
        if self._size() > self._max_chars:
            self._truncate_middle()

    def _truncate_middle(self) -> None:
        self._seal()
        while self._tail_size > self._max_chars // 2 and len(self._tail) > 1:
            item, size = self._tail.popleft()
            self._tail_size -= size
            self._truncation.add(item)

    def _read_pipes(self, budget: int = MAX_PUMP_BYTES) -> bool:
        found = False
        for pipe in self._pipes:
            while budget > 0:
                try:
                    data = os.read(pipe.fd, READ_BYTES)
                except BlockingIOError:
                    break
                if not data:  # impossible while `StandardPipe.write_end` is open
                    break
                budget -= len(data)
                found = True
                self._append(pipe.stream, pipe.decode(data))
                if self._size() > self._max_chars:
                    self._enforce_limit()
        return found

    def _detach_in_child(self) -> None:
        """Detach in a forked child: a thread of the parent may hold the lock, and nothing pops here."""
        self._is_forked_child = True
        self._lock = threading.RLock()
        self._space_freed = threading.Condition(self._lock)
        self._poll, self._pipes, self._standard_pipes = None, [], None


def _flush_streams(*streams: Any) -> None:
    for stream in streams:
        if stream is not None and not isinstance(stream, CapturedStream):
            with contextlib.suppress(Exception):  # closed, or replaced by the user
                stream.flush()


# A process-wide set, because fork hooks are process-wide and cannot be removed: DataLoader workers and other forked
# children must write to the inherited pipe instead of to a copy of the buffer that is never read.
_live_buffers: weakref.WeakSet[OutputBuffer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for output in list(_live_buffers):
        output._detach_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
