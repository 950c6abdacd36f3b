"""The last collectives of a rank: what was called, where in the user's code, and whether it has finished.

Recording is always on, so it must cost microseconds: `begin` stores references, which are converted to shapes and line
numbers only when they are read. Does not depend on torch (a tensor is anything with `shape` and `dtype`), on groups
beyond their label, or on what a collective does.

Times are `time.monotonic` seconds of this process; `Collective.seconds` returns how long one has run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from meshbook.clock import monotonic
from meshbook.errors import message_of
from meshbook.ids import name_ranks
from meshbook.wire.messages import POINT_TO_POINT, RECORDED_STEP_FILE


class UserLine(NamedTuple):
    """One line of source code."""

    file: str
    line: int
    function: str


class TensorLike(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


class GroupLabel:
    """A process group as the ring records it: its name, its global ranks, and counters of its collectives.

    Attributes:
        ranks_text: its ranks as text.
        generation: of the group's connections; the counters restart with each.
        origin: the file of the cell that made it, and that cell's call.
        is_doubtful: a signal arrived while a collective was recorded: it may count here, and has not begun.
    """

    __slots__ = (
        "_pair_counters",
        "_seq_counter",
        "generation",
        "is_doubtful",
        "name",
        "next_p2p_seq",
        "next_seq",
        "origin",
        "ranks",
        "ranks_text",
    )

    def __init__(self, name: str, ranks: Iterable[int], origin: tuple[str, str] = ("", "")) -> None:
        self.name, self.origin = name, origin
        self.set_ranks(ranks)
        self.reset_counters(0)

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Set the members. Call it between two generations."""
        self.ranks = tuple(ranks)
        self.ranks_text = name_ranks(self.ranks)

    def reset_counters(self, generation: int) -> None:
        """Restart the counts at 1: after an abort, members would otherwise continue from different numbers."""
        self.generation = generation
        self.is_doubtful = False
        self._seq_counter = itertools.count(1)
        self._pair_counters: dict[tuple[bool, int | None], itertools.count[int]] = {}
        self.next_seq: Callable[[], int] = self._seq_counter.__next__  # atomic: collectives start on several threads
        self.next_p2p_seq: Callable[[], int] = itertools.count(1).__next__

    def next_pair_seq(self, is_send: bool, peer: int | None) -> int:
        """Return the number of a send to this peer, or of a receive from it, from 1; None: from any member."""
        return next(self._pair_counters.setdefault((is_send, peer), itertools.count(1)))

    @property
    def num_begun(self) -> int:
        """How many collectives this rank has begun on these connections, without sends and receives."""
        return _num_taken(self._seq_counter)

    @property
    def p2p_counts(self) -> dict[tuple[bool, int | None], int]:
        """How many sends (True) and receives (False) this rank has begun, by peer; None: receives from any member."""
        return {pair: _num_taken(counter) for pair, counter in list(self._pair_counters.items())}


def _num_taken(counter: itertools.count[int]) -> int:
    """Return how many numbers were drawn, from the repr, `count(5)`.

    In every version of Python, only the repr shows that without drawing a number.
    """
    return int(repr(counter)[len("count(") : -1]) - 1


class Collective:
    """One call of a collective.

    Attributes:
        op: torch.distributed's name for it, "all_reduce", "send".
        seq: number among all collectives of this rank, from 1.
        group_seq: number among those of its group and generation, from 1; equal on all members of a group that run the
            same code. Sends and receives have a separate count, because not all members take part in them.
        generation: of its group's connections when it began.
        t_start, t_end: monotonic seconds; `t_end` is None while it runs. If no thread waited for it, `t_end` is when
            its end was first detected.
        error: why it failed, one line; None if it did not.
        peer: the global rank of the other side, for a send or recv; None otherwise.
        pair_seq: for a send or recv: its number among those between the same two ranks in the same direction; else 0.
        timeout_s: seconds that it may take, if the call says so; None: those of its group.
    """

    __slots__ = (
        "_caller_code",
        "_caller_instruction",
        "_code",
        "_dtypes",
        "_instruction",
        "_is_finished",
        "_on_device",
        "_shapes",
        "error",
        "generation",
        "group_seq",
        "label",
        "op",
        "pair_seq",
        "peer",
        "seq",
        "t_end",
        "t_start",
        "timeout_s",
    )

    def __init__(
        self,
        op: str,
        seq: int,
        label: GroupLabel,
        group_seq: int,
        shapes: tuple[Sequence[int], ...],
        dtypes: tuple[object, ...],
        peer: int | None,
        code: CodeType | None,
        instruction: int,
        t_start: float,
        pair_seq: int = 0,
        caller_code: CodeType | None = None,
        caller_instruction: int = -1,
    ) -> None:
        self.op = op
        self.seq = seq
        self.label = label
        self.group_seq = group_seq
        self.generation = label.generation
        self.peer = peer
        self.pair_seq = pair_seq
        self.t_start = t_start
        self.t_end: float | None = None
        self.error: str | None = None
        self.timeout_s: float | None = None
        self._shapes = shapes
        self._dtypes = dtypes
        self._code = code  # the code object, not the frame: a frame would keep the user's locals alive
        self._instruction = instruction
        self._caller_code, self._caller_instruction = caller_code, caller_instruction
        self._is_finished: Callable[[], bool] | None = None
        self._on_device = False  # `_is_finished` queries the device's driver

    @property
    def group(self) -> str:
        return self.label.name

    @property
    def group_ranks(self) -> tuple[int, ...]:
        return self.label.ranks

    @property
    def may_time_out(self) -> bool:
        """Whether it runs, and the timeout of its group is for all of its time.

        That of a send or receive is for the wait for it; a device's collectives have none; `monitored_barrier` has its
        own, at whose end the first member says who is missing.
        """
        is_monitored = self.op == "monitored_barrier" and self.timeout_s is None
        has_timeout = self.op not in POINT_TO_POINT and not is_monitored and not self._on_device
        return self.t_end is None and has_timeout

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The inputs of this rank (for a recv or broadcast: the outputs); at most `MAX_RECORDED_TENSORS` of them."""
        return tuple(tuple(int(size) for size in shape) for shape in self._shapes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """One per shape: "float32", without "torch."."""
        return tuple(str(dtype).removeprefix("torch.") for dtype in self._dtypes)

    @property
    def line(self) -> UserLine | None:
        """The innermost frame of the user's code at the call; None if no stack had such a frame."""
        return None if self._code is None else _find_line(self._code, self._instruction)

    @property
    def caller_line(self) -> UserLine | None:
        """The line that called the function of `line`; None if that is not the user's code, or unknown."""
        return None if self._caller_code is None else _find_line(self._caller_code, self._caller_instruction)

    def seconds(self, now: float | None = None) -> float:
        """Return how long it took, or has been running at monotonic time `now` (default: now)."""
        end = self.t_end
        if end is None:
            end = monotonic() if now is None else now
        return end - self.t_start

    def __repr__(self) -> str:
        user_line = self.line
        state = "running" if self.t_end is None else self.error or "done"
        location = f" at {user_line.file}:{user_line.line}" if user_line else ""
        return f"<{self.op} #{self.seq} on {self.group}{location}: {state}>"


# Shapes stored per collective. Coalesced calls have hundreds of tensors; the first few suffice to detect a mismatch.
MAX_RECORDED_TENSORS = 8


class CollectiveRing:
    """The last `size` collectives.

    `begin` and `finish` are called by the threads that run collectives; everything else may be called by any thread at
    any time. Nothing here blocks.

    Attributes:
        num_captures: number of device graph captures in progress. The driver is not queried meanwhile: a query from
            another thread would invalidate a capture.
        run_device_queries: runs a function that queries the device's driver; returns also when the driver does not
            answer, and then the collectives count as running.
        slot_events: by slot, the device's event for the end of the collective that has it; see `cuda`.

    Args:
        size: how many are stored.
        skip: folders and files whose frames are not the user's.
        clock: monotonic seconds.
        detailed: False stores neither lines nor shapes.
    """

    def __init__(
        self,
        size: int = 1000,
        *,
        skip: Iterable[str | os.PathLike[str]] = (),
        clock: Callable[[], float] = monotonic,
        detailed: bool = True,
    ) -> None:
        if size < 1:
            raise ValueError(f"a ring of {size} entries keeps nothing; give it at least 1")
        self._size = size
        self._slots: list[Collective | None] = [None] * size
        self._next_seq: Callable[[], int] = itertools.count(1).__next__
        self._clock = clock
        self._detailed = detailed
        self._skip_prefixes: tuple[str, ...] = ("<frozen ", RECORDED_STEP_FILE)
        self._skip_cache: dict[str, bool] = {}  # by file name: a dict look-up costs a tenth of a prefix test
        # contextlib's frames lie between the user's `with` and the library that ends a coalesced collective in it.
        for path in (Path(__file__).resolve().parents[2], contextlib.__file__, *skip):
            self.skip_frames_of(path)
        self._last: Collective | None = None
        self.num_captures = 0
        self.run_device_queries: Callable[[Callable[[], None]], None] = lambda queries: queries()
        self.slot_events: dict[int, Any] = {}
        self._device_error: str | None = None  # the driver's error, which all later queries would return
        self._main_thread = threading.main_thread().ident
        # Other threads that have begun a collective. Not their identifiers, which later threads get again: a callback
        # of DDP's communication hooks runs on a thread of gloo's, which ends with its group.
        self._other_threads: WeakSet[threading.Thread] = WeakSet()

    @property
    def size(self) -> int:
        return self._size

    @property
    def last(self) -> Collective | None:
        """The one begun last; None before the first."""
        return self._last

    def other_threads(self) -> tuple[threading.Thread, ...]:
        """Return the live threads beside the main one that have begun collectives here.

        Autograd's own threads, which run within a backward pass of the main thread, are not Python threads and not
        included.
        """
        return tuple(
            thread
            for thread in threading.enumerate()
            if thread in self._other_threads and not isinstance(thread, threading._DummyThread)
        )

    def skip_frames_of(self, path: str | os.PathLike[str]) -> None:
        """Treat frames of this file, or of the files in this folder, as not the user's from now on."""
        prefix = str(path)
        if not prefix.endswith(".py"):
            prefix = prefix.rstrip(os.sep) + os.sep  # matches site-packages/torch/, but not site-packages/torchvision
        if prefix not in self._skip_prefixes:
            self._skip_prefixes = (*self._skip_prefixes, prefix)
            self._skip_cache = {}

    def begin(
        self, op: str, label: GroupLabel, tensors: Sequence[TensorLike] = (), peer: int | None = None
    ) -> Collective:
        """Record that `op` starts now, called from the innermost frame that is not skipped.

        Args:
            tensors: the tensors of the call; only shapes and dtypes are stored.
            peer: global rank of the other side, for a send or recv.
        """
        frame: Any = None
        caller: Any = None
        if self._detailed:
            frame = sys._getframe(1)
            skip_cache = self._skip_cache
            while frame is not None:
                name = frame.f_code.co_filename
                is_skipped = skip_cache.get(name)
                if is_skipped is None:
                    is_skipped = skip_cache[name] = name.startswith(self._skip_prefixes)
                if not is_skipped:
                    break
                frame = frame.f_back
            if frame is None:
                frame = self._main_thread_user_frame()
            if frame is not None:
                caller = frame.f_back
                if caller is not None and self._is_skipped(caller.f_code.co_filename):
                    caller = None
            if len(tensors) > MAX_RECORDED_TENSORS:
                tensors = tensors[:MAX_RECORDED_TENSORS]
        else:
            tensors = ()
        seq = self._next_seq()
        if (ident := get_ident()) != self._main_thread:
            self._other_threads.update(thread for thread in threading.enumerate() if thread.ident == ident)
        is_p2p = op in POINT_TO_POINT
        collective = Collective(
            op,
            seq,
            label,
            label.next_p2p_seq() if is_p2p else label.next_seq(),
            tuple([tensor.shape for tensor in tensors]),
            tuple([tensor.dtype for tensor in tensors]),
            peer,
            None if frame is None else frame.f_code,
            -1 if frame is None else frame.f_lasti,
            self._clock(),
            label.next_pair_seq(op == "send", peer) if is_p2p else 0,
            None if caller is None else caller.f_code,
            -1 if caller is None else caller.f_lasti,
        )
        self._slots[seq % self._size] = self._last = collective
        return collective

    def _is_skipped(self, file: str) -> bool:
        """Whether frames of a file are not the user's."""
        is_skipped = self._skip_cache.get(file)
        if is_skipped is None:
            is_skipped = self._skip_cache[file] = file.startswith(self._skip_prefixes)
        return is_skipped

    def finish(self, collective: Collective, error: BaseException | str | None = None) -> None:
        """Record the end of a collective. Only the first call counts; later failures are ignored."""
        if collective.t_end is not None:
            return
        if error is not None:
            collective.error = error if isinstance(error, str) else one_line_error(error)
        collective.t_end = self._clock()
        collective._is_finished = None

    def set_completion_check(
        self, collective: Collective, is_finished: Callable[[], bool] | None, *, on_device: bool = False
    ) -> None:
        """Set how to detect the end of a collective that no thread waits for; readers of the ring call `is_finished`.

        None removes the check, when `finish` will be called.

        Args:
            on_device: `is_finished` queries the device's driver. After its first error it is not queried again: a
                device-side assert, for example, is the result of every later query.
        """
        collective._on_device = on_device
        collective._is_finished = is_finished

    def snapshot(self) -> tuple[Collective, ...]:
        """Return all stored collectives, oldest first."""
        # Copying a list is atomic under the GIL, so a thread that begins another collective cannot corrupt it.
        recorded = [collective for collective in self._slots[:] if collective is not None]
        self.poll_completion(recorded)
        recorded.sort(key=lambda collective: collective.seq)
        return tuple(recorded)

    def since(self, seq: int) -> tuple[Collective, ...]:
        """Return the stored collectives after number `seq`, oldest first.

        The cost depends on their number, not on the ring's size.
        """
        last = self._last
        if last is None or last.seq <= seq:
            return ()
        first = max(seq + 1, last.seq - self._size + 1)
        recorded = [self._slots[number % self._size] for number in range(first, last.seq + 1)]
        # A slot may have been reused, or not yet been filled by a thread that has its number.
        return tuple(collective for collective in recorded if collective is not None and first <= collective.seq)

    def poll_completion(self, collectives: Iterable[Collective]) -> None:
        """Check whether these collectives have ended without being recorded as such."""
        on_device: list[Collective] = []
        for collective in collectives:
            if collective.t_end is None and collective.generation != collective.label.generation:
                self.finish(collective, "its process group was formed anew")  # nobody has waited for it
            elif collective.t_end is None and collective._is_finished is not None:
                if not collective._on_device:
                    self._poll_one(collective)
                elif self._device_error is not None:
                    self.finish(collective, self._device_error)
                else:
                    on_device.append(collective)
        if on_device and not self.num_captures:
            self.run_device_queries(lambda: self._poll_on_device(on_device))

    def running(self) -> tuple[Collective, ...]:
        """Return the collectives that have not finished, oldest first."""
        return tuple(collective for collective in self.snapshot() if collective.t_end is None)

    def _poll_on_device(self, collectives: list[Collective]) -> None:
        for collective in collectives:
            if self.num_captures:  # one has begun meanwhile
                return
            if self._device_error is None:
                self._poll_one(collective)
            else:
                self.finish(collective, self._device_error)

    def _poll_one(self, collective: Collective) -> None:
        is_finished = collective._is_finished
        if collective.t_end is not None or is_finished is None:
            return
        try:
            if is_finished():
                self.finish(collective)
        except Exception as error:
            unknown = f"whether it has ended is unknown: {one_line_error(error)}"
            if collective._on_device:
                self._device_error = unknown
            self.finish(collective, unknown)

    def _main_thread_user_frame(self) -> Any:
        """Return the user's frame on the main thread, which called a backward pass that runs on another thread."""
        main = threading.main_thread().ident
        frame: Any = sys._current_frames().get(main) if main is not None else None
        while frame is not None and frame.f_code.co_filename.startswith(self._skip_prefixes):
            frame = frame.f_back
        return frame


# Lines by the addresses of their instructions, which are in their code objects. A step calls its collectives at the
# same few lines each time, and finding a line of a cell takes tens of microseconds.
_line_cache: dict[int, tuple[CodeType, UserLine]] = {}
_MAX_CACHED_LINES = 4096


def _find_line(code: CodeType, instruction: int) -> UserLine:
    cached = _line_cache.get(id(code) + instruction)
    if cached is not None and cached[0] is code:
        return cached[1]
    numbers = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    found = UserLine(code.co_filename, next(numbers, code.co_firstlineno), code.co_name)
    if len(_line_cache) >= _MAX_CACHED_LINES:
        _line_cache.clear()
    _line_cache[id(code) + instruction] = code, found
    return found


def one_line_error(error: BaseException) -> str:
    """Return `RuntimeError: Connection closed by peer`, without further lines of the message."""
    text = message_of(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
