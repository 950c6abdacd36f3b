"""The last collectives of a rank: what was called, where in the user's code, and whether it has finished.

Always on, so it must cost microseconds: `begin` stores references and turns them into shapes and line numbers only
when somebody reads. Knows nothing of torch (a tensor is whatever has `shape` and `dtype`), of groups beyond their
label, or of what a collective does.

Times are `time.monotonic` seconds of this process; `Collective.seconds` says how long one has run.
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

from meshbook.clock import monotonic
from meshbook.ids import name_ranks
from meshbook.wire.messages import POINT_TO_POINT, RECORDED_STEP_FILE


class UserLine(NamedTuple):
    """One place in somebody's source."""

    file: str
    line: int
    function: str


class TensorLike(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


class GroupLabel:
    """A process group as the ring sees it: its name, the global ranks in it, and counters of its collectives.

    Attributes:
        members: its ranks in words.
        epoch: which connections of the group these are; the counters start again with each.
        is_doubtful: a signal came as a collective was noted: it may count here, and has not begun.
    """

    __slots__ = (
        "_pair_counters",
        "_seq_counter",
        "generation",
        "is_doubtful",
        "name",
        "next_p2p_seq",
        "next_seq",
        "ranks",
        "ranks_text",
    )

    def __init__(self, name: str, ranks: Iterable[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.ranks_text = name_ranks(self.ranks)
        self.reset_counters(0)

    def reset_counters(self, generation: int) -> None:
        """Count from 1 again: after a break, members would go on from where each had come to, which differs."""
        self.generation = generation
        self.is_doubtful = False
        self._seq_counter = itertools.count(1)
        self._pair_counters: dict[tuple[bool, int | None], itertools.count[int]] = {}
        self.next_seq: Callable[[], int] = self._seq_counter.__next__  # atomic: collectives come from several threads
        self.next_p2p_seq: Callable[[], int] = itertools.count(1).__next__

    def next_pair_seq(self, is_send: bool, peer: int | None) -> int:
        """The number of a send to this member, or of a receive from it, from 1; None: from any member."""
        return next(self._pair_counters.setdefault((is_send, peer), itertools.count(1)))

    @property
    def num_begun(self) -> int:
        """How many collectives this rank has begun on these connections, sends and receives not counted."""
        return _num_taken(self._seq_counter)

    @property
    def p2p_counts(self) -> dict[tuple[bool, int | None], int]:
        """How many sends (True) and receives (False) this rank has begun, by peer; None: receives from any member."""
        return {pair: _num_taken(counter) for pair, counter in list(self._pair_counters.items())}


def _num_taken(counter: itertools.count[int]) -> int:
    """How many numbers were taken: the one thing that tells it without taking one is `count(5)`, in every Python."""
    return int(repr(counter)[len("count(") : -1]) - 1


class Collective:
    """One call of a collective.

    Attributes:
        op: torch.distributed's name for it, "all_reduce", "send".
        seq: number among all collectives of this rank, from 1.
        group_seq: number among those of its group and epoch, from 1; equal on all members of a group that run the same
            code. Sends and receives have a count of their own, for not all members take part in them.
        epoch: of its group's connections when it began.
        t_start, t_end: monotonic seconds; `t_end` is None while it runs. For one that nobody waited for, it is when
            its end was first noticed.
        error: why it failed, one line; None if it did not.
        peer: the other side's global rank, of a send or recv; None otherwise.
        pair_seq: of a send or recv: its number among those between the same two ranks in the same direction; else 0.
    """

    __slots__ = (
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
        self._shapes = shapes
        self._dtypes = dtypes
        self._code = code  # the code object, not the frame: a frame would keep the user's locals alive
        self._instruction = instruction
        self._is_finished: Callable[[], bool] | None = None
        self._on_device = False  # `_finished` asks the device's driver

    @property
    def group(self) -> str:
        return self.label.name

    @property
    def group_ranks(self) -> tuple[int, ...]:
        return self.label.ranks

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """What this rank puts in (a recv or broadcast: what it fills); at most `MAX_RECORDED_TENSORS` of them."""
        return tuple(tuple(int(size) for size in shape) for shape in self._shapes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """One per shape: "float32", without "torch."."""
        return tuple(str(dtype).removeprefix("torch.") for dtype in self._dtypes)

    @property
    def line(self) -> UserLine | None:
        """The innermost frame of the user's code at the call; None if no such frame was on any stack."""
        return None if self._code is None else _find_line(self._code, self._instruction)

    def seconds(self, now: float | None = None) -> float:
        """How long it took, or has been running at monotonic time `now` (default: this moment)."""
        end = self.t_end
        if end is None:
            end = monotonic() if now is None else now
        return end - self.t_start

    def __repr__(self) -> str:
        user_line = self.line
        state = "running" if self.t_end is None else self.error or "done"
        location = f" at {user_line.file}:{user_line.line}" if user_line else ""
        return f"<{self.op} #{self.seq} on {self.group}{location}: {state}>"


# Shapes kept per collective. Coalesced calls carry hundreds of tensors; the first few tell a mismatch from a match.
MAX_RECORDED_TENSORS = 8


class CollectiveRing:
    """The last `size` collectives.

    `begin` and `finish` are called by the threads that run collectives; everything else may be called by any thread
    at any time. Nothing here waits.

    Attributes:
        num_captures: of device graphs that are under way. The driver is asked nothing meanwhile: a question from
            another thread would make a capture invalid.

    Args:
        size: how many are kept.
        skip: folders and files whose frames are not the user's.
        clock: monotonic seconds.
        detailed: False keeps neither lines nor shapes.
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
        for path in (Path(__file__).resolve().parent.parent, contextlib.__file__, *skip):
            self.skip_frames_of(path)
        self._last: Collective | None = None
        self.num_captures = 0
        self._device_error: str | None = None  # what the driver answers to every question from now on
        self._main_thread = threading.main_thread().ident
        self._other_thread_ids: set[int] = set()  # others that have begun a collective

    @property
    def size(self) -> int:
        return self._size

    @property
    def last(self) -> Collective | None:
        """The one begun last; None before the first."""
        return self._last

    def other_threads(self) -> tuple[threading.Thread, ...]:
        """Threads beside the main one that have begun collectives here and live. Autograd's own, which run within a
        backward pass of the main thread's, are none of Python's and not among them."""
        return tuple(
            thread
            for thread in threading.enumerate()
            if thread.ident in self._other_thread_ids
            and not isinstance(thread, threading._DummyThread)
            and not thread.name.startswith("meshbook-")  # an identifier is used again when its thread has ended
        )

    def skip_frames_of(self, path: str | os.PathLike[str]) -> None:
        """From now on frames of this file, or of the files in this folder, are not the user's."""
        prefix = str(path)
        if not prefix.endswith(".py"):
            prefix = prefix.rstrip(os.sep) + os.sep  # site-packages/torch/, and not site-packages/torchvision
        if prefix not in self._skip_prefixes:
            self._skip_prefixes = (*self._skip_prefixes, prefix)
            self._skip_cache = {}

    def begin(
        self, op: str, label: GroupLabel, tensors: Sequence[TensorLike] = (), peer: int | None = None
    ) -> Collective:
        """Note that `op` starts now, called from the innermost frame that is not skipped.

        Args:
            tensors: what the call hands over; only shapes and dtypes are kept.
            peer: global rank of the other side, for a send or recv.
        """
        frame: Any = None
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
            if len(tensors) > MAX_RECORDED_TENSORS:
                tensors = tensors[:MAX_RECORDED_TENSORS]
        else:
            tensors = ()
        seq = self._next_seq()
        if get_ident() != self._main_thread:
            self._other_thread_ids.add(get_ident())
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
        )
        self._slots[seq % self._size] = self._last = collective
        return collective

    def finish(self, collective: Collective, error: BaseException | str | None = None) -> None:
        """Note that it has ended. The first end counts: what fails after that is another story."""
        if collective.t_end is not None:
            return
        if error is not None:
            collective.error = error if isinstance(error, str) else one_line_error(error)
        collective.t_end = self._clock()
        collective._is_finished = None

    def set_completion_check(
        self, collective: Collective, is_finished: Callable[[], bool] | None, *, on_device: bool = False
    ) -> None:
        """Give a collective that may end unnoticed a way to ask; readers of the ring call `is_finished` when they look.

        None takes it back: somebody will say `finish`.

        Args:
            on_device: `is_finished` asks the device's driver. After its first error it is asked nothing any more: a
                device-side assert, for example, is the answer to every question from then on.
        """
        collective._on_device = on_device
        collective._is_finished = is_finished

    def snapshot(self) -> tuple[Collective, ...]:
        """All that are kept, oldest first."""
        # Copying a list is one step under the interpreter lock, so a thread that begins another one cannot tear it.
        recorded = [collective for collective in self._slots[:] if collective is not None]
        for collective in recorded:
            self._poll_one(collective)
        recorded.sort(key=lambda collective: collective.seq)
        return tuple(recorded)

    def since(self, seq: int) -> tuple[Collective, ...]:
        """Those after number `seq` that are kept, oldest first. Costs what there is of them, not the ring's size."""
        last = self._last
        if last is None or last.seq <= seq:
            return ()
        first = max(seq + 1, last.seq - self._size + 1)
        recorded = [self._slots[number % self._size] for number in range(first, last.seq + 1)]
        # A slot may have been used again, or not yet been filled by a thread that has its number.
        return tuple(collective for collective in recorded if collective is not None and first <= collective.seq)

    def poll_completion(self, collectives: Iterable[Collective]) -> None:
        """Ask those that may have ended unnoticed whether they have."""
        for collective in collectives:
            self._poll_one(collective)

    def running(self) -> tuple[Collective, ...]:
        """Those that have not finished, oldest first."""
        return tuple(collective for collective in self.snapshot() if collective.t_end is None)

    def _poll_one(self, collective: Collective) -> None:
        is_finished = collective._is_finished
        if collective.t_end is not None or is_finished is None:
            return
        on_device = collective._on_device
        if on_device and self._device_error is not None:
            self.finish(collective, self._device_error)
            return
        if on_device and self.num_captures:
            return
        try:
            if is_finished():
                self.finish(collective)
        except Exception as error:
            unknown = f"whether it has ended is unknown: {one_line_error(error)}"
            if on_device:
                self._device_error = unknown
            self.finish(collective, unknown)

    def _main_thread_user_frame(self) -> Any:
        """The user's frame on the main thread: where a backward pass was called that runs on a thread of its own."""
        main = threading.main_thread().ident
        frame: Any = sys._current_frames().get(main) if main is not None else None
        while frame is not None and frame.f_code.co_filename.startswith(self._skip_prefixes):
            frame = frame.f_back
        return frame


# Lines by the addresses of their instructions, which are in their code objects. A step calls its collectives at the
# same few lines each time, and finding a line among a cell's takes tens of microseconds.
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
    """`RuntimeError: Connection closed by peer`, without the lines below."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
