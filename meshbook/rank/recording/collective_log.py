"""Notes the collectives of a thread or a process, with copies of their results, as an observer of process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from meshbook.rank.process_groups.ring import Collective
from meshbook.rank.recording.bundle import place
from meshbook.rank.recording.entries import CollectiveEntry, CollectiveError, tensors_in

_ENTRY_BYTES = 512  # that an entry takes besides its results
_MORE_THAN_THERE_IS = 1 << 62


class CollectiveLog:
    """The collectives of a cell or an actor, in the order in which they began.

    Attributes:
        running_file: the file name of the cell, for the entries' lines.
        thread: whose collectives these are; None: those of all threads.
    """

    def __init__(self, entries: list[CollectiveEntry], count: Callable[[int], None]) -> None:
        """
        Args:
            entries: that are appended to.
            count: called with the bytes that each takes; may call `stop`.
        """
        self.running_file = ""
        self.thread: int | None = None
        self._entries, self._count = entries, count
        self._open: dict[int, CollectiveEntry] = {}  # by the sequence number of their collective
        self._is_stopped = False
        self._lock = threading.RLock()  # collectives end on other threads too

    def stop(self) -> None:
        """Drop what there is, and note nothing more."""
        with self._lock:
            self._is_stopped = True
            self._entries.clear()
            self._open.clear()

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        if self._is_stopped or self.thread not in (None, threading.get_ident()):
            return
        line = collective.line
        entry = CollectiveEntry(
            group=collective.label.name,
            op=collective.op,
            peer=collective.peer,
            line="" if line is None else place(line.file, line.line, self.running_file),
            shapes=[(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(arguments[:1])],
        )
        with self._lock:
            self._open[collective.seq] = entry
            self._entries.append(entry)
            self._count(_ENTRY_BYTES)

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            entry = self._open.pop(collective.seq, None)
        if entry is None:
            return
        if entry.op in ("send", "barrier"):
            entry.outputs = []
            return
        if entry.op == "recv" and entry.peer is None:
            entry.source = arguments[-1]
        tensors = tensors_in(arguments[:1])
        with self._lock:
            self._count(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        if self._is_stopped:
            return
        try:
            entry.outputs = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        except (MemoryError, RuntimeError):  # torch's error where there is no memory left; the cell is to go on
            with self._lock:
                self._count(_MORE_THAN_THERE_IS)

    def failed(self, collective: Collective, error: BaseException) -> None:
        with self._lock:
            entry = self._open.pop(collective.seq, None)
        if entry is not None:
            entry.error = CollectiveError.of(error)
