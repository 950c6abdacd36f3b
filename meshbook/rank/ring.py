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
from meshbook.wire.messages import POINT_TO_POINT, RECORDED_STEP


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


class Label:
    """A process group as the ring sees it: its name, the global ranks in it, and counters of its collectives.

    Attributes:
        members: its ranks in words.
        epoch: which connections of the group these are; the counters start again with each.
        is_doubtful: a signal came as a collective was noted: it may count here, and has not begun.
    """

    __slots__ = ("_pairs", "_seqs", "epoch", "is_doubtful", "members", "name", "next_seq", "next_transfer", "ranks")

    def __init__(self, name: str, ranks: Iterable[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.members = name_ranks(self.ranks)
        self.restart(0)

    def restart(self, epoch: int) -> None:
        """Count from 1 again: after a break, members would go on from where each had come to, which differs."""
        self.epoch = epoch
        self.is_doubtful = False
        self._seqs = itertools.count(1)
        self._pairs: dict[tuple[bool, int | None], itertools.count[int]] = {}
        self.next_seq: Callable[[], int] = self._seqs.__next__  # atomic: collectives come from several threads
        self.next_transfer: Callable[[], int] = itertools.count(1).__next__

    def next_of_pair(self, sends: bool, peer: int | None) -> int:
        """The number of a send to this member, or of a receive from it, from 1; None: from any member."""
        return next(self._pairs.setdefault((sends, peer), itertools.count(1)))

    @property
    def num_begun(self) -> int:
        """How many collectives this rank has begun on these connections, sends and receives not counted."""
        return _counted(self._seqs)

    @property
    def transfers(self) -> dict[tuple[bool, int | None], int]:
        """How many sends (True) and receives (False) this rank has begun, by peer; None: receives from any member."""
        return {pair: _counted(numbers) for pair, numbers in list(self._pairs.items())}


def _counted(numbers: itertools.count[int]) -> int:
    """How many numbers were taken: the one thing that tells it without taking one is `count(5)`, in every Python."""
    return int(repr(numbers)[len("count(") : -1]) - 1


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
        "_finished",
        "_instruction",
        "_on_device",
        "_shapes",
        "epoch",
        "error",
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
        label: Label,
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
        self.epoch = label.epoch
        self.peer = peer
        self.pair_seq = pair_seq
        self.t_start = t_start
        self.t_end: float | None = None
        self.error: str | None = None
        self._shapes = shapes
        self._dtypes = dtypes
        self._code = code  # the code object, not the frame: a frame would keep the user's locals alive
        self._instruction = instruction
        self._finished: Callable[[], bool] | None = None
        self._on_device = False  # `_finished` asks the device's driver

    @property
    def group(self) -> str:
        return self.label.name

    @property
    def group_ranks(self) -> tuple[int, ...]:
        return self.label.ranks

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """What this rank puts in (a recv or broadcast: what it fills); at most `MAX_TENSORS` of them."""
        return tuple(tuple(int(size) for size in shape) for shape in self._shapes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """One per shape: "float32", without "torch."."""
        return tuple(str(dtype).removeprefix("torch.") for dtype in self._dtypes)

    @property
    def line(self) -> UserLine | None:
        """The innermost frame of the user's code at the call; None if no such frame was on any stack."""
        return None if self._code is None else _line_of(self._code, self._instruction)

    def seconds(self, now: float | None = None) -> float:
        """How long it took, or has been running at monotonic time `now` (default: this moment)."""
        end = self.t_end
        if end is None:
            end = monotonic() if now is None else now
        return end - self.t_start

    def __repr__(self) -> str:
        where = self.line
        state = "running" if self.t_end is None else self.error or "done"
        place = f" at {where.file}:{where.line}" if where else ""
        return f"<{self.op} #{self.seq} on {self.group}{place}: {state}>"


# Shapes kept per collective. Coalesced calls carry hundreds of tensors; the first few tell a mismatch from a match.
MAX_TENSORS = 8


class Ring:
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
        self._skip: tuple[str, ...] = ("<frozen ", RECORDED_STEP)
        self._skipped: dict[str, bool] = {}  # by file name: a dict look-up costs a tenth of a prefix test
        # contextlib's frames lie between the user's `with` and the library that ends a coalesced collective in it.
        for path in (Path(__file__).resolve().parent.parent, contextlib.__file__, *skip):
            self.skip(path)
        self._last: Collective | None = None
        self.num_captures = 0
        self._device_error: str | None = None  # what the driver answers to every question from now on
        self._main_thread = threading.main_thread().ident
        self._threads: set[int] = set()  # others that have begun a collective

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
            if thread.ident in self._threads
            and not isinstance(thread, threading._DummyThread)
            and not thread.name.startswith("meshbook-")  # an identifier is used again when its thread has ended
        )

    def skip(self, path: str | os.PathLike[str]) -> None:
        """From now on frames of this file, or of the files in this folder, are not the user's."""
        prefix = str(path)
        if not prefix.endswith(".py"):
            prefix = prefix.rstrip(os.sep) + os.sep  # site-packages/torch/, and not site-packages/torchvision
        if prefix not in self._skip:
            self._skip = (*self._skip, prefix)
            self._skipped = {}

    def begin(self, op: str, label: Label, tensors: Sequence[TensorLike] = (), peer: int | None = None) -> Collective:
        """Note that `op` starts now, called from the innermost frame that is not skipped.

        Args:
            tensors: what the call hands over; only shapes and dtypes are kept.
            peer: global rank of the other side, for a send or recv.
        """
        frame: Any = None
        if self._detailed:
            frame = sys._getframe(1)
            skipped = self._skipped
            while frame is not None:
                name = frame.f_code.co_filename
                skip = skipped.get(name)
                if skip is None:
                    skip = skipped[name] = name.startswith(self._skip)
                if not skip:
                    break
                frame = frame.f_back
            if frame is None:
                frame = self._users_frame()
            if len(tensors) > MAX_TENSORS:
                tensors = tensors[:MAX_TENSORS]
        else:
            tensors = ()
        seq = self._next_seq()
        if get_ident() != self._main_thread:
            self._threads.add(get_ident())
        transfers = op in POINT_TO_POINT
        collective = Collective(
            op,
            seq,
            label,
            label.next_transfer() if transfers else label.next_seq(),
            tuple([tensor.shape for tensor in tensors]),
            tuple([tensor.dtype for tensor in tensors]),
            peer,
            None if frame is None else frame.f_code,
            -1 if frame is None else frame.f_lasti,
            self._clock(),
            label.next_of_pair(op == "send", peer) if transfers else 0,
        )
        self._slots[seq % self._size] = self._last = collective
        return collective

    def finish(self, collective: Collective, error: BaseException | str | None = None) -> None:
        """Note that it has ended. The first end counts: what fails after that is another story."""
        if collective.t_end is not None:
            return
        if error is not None:
            collective.error = error if isinstance(error, str) else one_line(error)
        collective.t_end = self._clock()
        collective._finished = None

    def settle_by(
        self, collective: Collective, finished: Callable[[], bool] | None, *, on_device: bool = False
    ) -> None:
        """Give a collective that may end unnoticed a way to ask; readers of the ring call `finished` when they look.

        None takes it back: somebody will say `finish`.

        Args:
            on_device: `finished` asks the device's driver. After its first error it is asked nothing any more: a
                device-side assert, for example, is the answer to every question from then on.
        """
        collective._on_device = on_device
        collective._finished = finished

    def snapshot(self) -> tuple[Collective, ...]:
        """All that are kept, oldest first."""
        # Copying a list is one step under the interpreter lock, so a thread that begins another one cannot tear it.
        kept = [collective for collective in self._slots[:] if collective is not None]
        for collective in kept:
            self._settle(collective)
        kept.sort(key=lambda collective: collective.seq)
        return tuple(kept)

    def since(self, seq: int) -> tuple[Collective, ...]:
        """Those after number `seq` that are kept, oldest first. Costs what there is of them, not the ring's size."""
        last = self._last
        if last is None or last.seq <= seq:
            return ()
        first = max(seq + 1, last.seq - self._size + 1)
        kept = [self._slots[number % self._size] for number in range(first, last.seq + 1)]
        # A slot may have been used again, or not yet been filled by a thread that has its number.
        return tuple(collective for collective in kept if collective is not None and first <= collective.seq)

    def settle(self, collectives: Iterable[Collective]) -> None:
        """Ask those that may have ended unnoticed whether they have."""
        for collective in collectives:
            self._settle(collective)

    def running(self) -> tuple[Collective, ...]:
        """Those that have not finished, oldest first."""
        return tuple(collective for collective in self.snapshot() if collective.t_end is None)

    def _settle(self, collective: Collective) -> None:
        finished = collective._finished
        if collective.t_end is not None or finished is None:
            return
        on_device = collective._on_device
        if on_device and self._device_error is not None:
            self.finish(collective, self._device_error)
            return
        if on_device and self.num_captures:
            return
        try:
            if finished():
                self.finish(collective)
        except Exception as error:
            unknown = f"whether it has ended is unknown: {one_line(error)}"
            if on_device:
                self._device_error = unknown
            self.finish(collective, unknown)

    def _users_frame(self) -> Any:
        """The user's frame on the main thread: where a backward pass was called that runs on a thread of its own."""
        main = threading.main_thread().ident
        frame: Any = sys._current_frames().get(main) if main is not None else None
        while frame is not None and frame.f_code.co_filename.startswith(self._skip):
            frame = frame.f_back
        return frame


# Lines by the addresses of their instructions, which are in their code objects. A step calls its collectives at the
# same few lines each time, and finding a line among a cell's takes tens of microseconds.
_lines: dict[int, tuple[CodeType, UserLine]] = {}
_LINES = 4096


def _line_of(code: CodeType, instruction: int) -> UserLine:
    known = _lines.get(id(code) + instruction)
    if known is not None and known[0] is code:
        return known[1]
    numbers = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    found = UserLine(code.co_filename, next(numbers, code.co_firstlineno), code.co_name)
    if len(_lines) >= _LINES:
        _lines.clear()
    _lines[id(code) + instruction] = code, found
    return found


def one_line(error: BaseException) -> str:
    """`RuntimeError: Connection closed by peer`, without the lines below."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
