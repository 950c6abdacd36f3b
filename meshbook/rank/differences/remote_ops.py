"""Watches a batch of operations on remote tensors, each one, for the first number that is not finite; names lines.

The notebook's lines issued them, so that a finding names one of these. Within the forward of a module that is spread
over the mesh the sentinel's own hooks look, which name the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.diagnose.source_files import is_cell_file, short_path
from meshbook.rank import scalars
from meshbook.rank.differences import numbers
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.rerun import BadOperation, DescribedOperation, describe_bad
from meshbook.rank.tensors import execution
from meshbook.rank.tensors.engine import GENERATED_CODE, CurrentOp
from meshbook.wire.messages import Frame

# A line of a recorded step's code, and what returns the operation and the notebook's line that issued it.
RecordedLine = tuple[Callable[[int], tuple[str, Frame | None]], int]
# The number of an operation in its engine, and, of a recorded step's, the line.
OpPlace = tuple[int, RecordedLine | None]


class RunningOps(Protocol):
    """What is asked of `RankTensors`."""

    @property
    def op_number(self) -> int: ...

    def current_op(self, number: int | None = None) -> CurrentOp | None: ...


# Operations whose results have a bad number if these of their arguments have one (how many, from the first). What such
# an operation has read need not be looked at.
_CARRIES = {
    "mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3, "add": 2, "sub": 2, "mul": 2, "neg": 1, "sum": 1, "mean": 1, "cat": 1,
    "clone": 1, "gelu": 1, "gelu_backward": 1, "native_layer_norm": 1, "native_layer_norm_backward": 1,
    "_softmax_backward_data": 1, "_log_softmax_backward_data": 1, "all_reduce": 1, "wait_tensor": 1,
}  # fmt: skip

# Operations are looked at together, so many at a time, or when their results are so large.
_MAX_OPS = 64
_MAX_BYTES = 64 << 20


@dataclass(slots=True)
class _RanOp:
    """An operation that has run, and is still to be looked at."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    at: OpPlace
    num_collectives: int  # that the rank had begun before it
    before: set[str] | None  # kinds of bad numbers in its inputs before it ran; None: it has overwritten none


class RemoteOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls back at the first operation of each batch that makes numbers that are not finite.

    Some dozens of operations are held with their results, and then only those results are summed that no other of them
    carries on. If a sum is not finite, the first operation that made a bad number is found among what is held.
    """

    def __init__(
        self,
        tensors: RunningOps,
        is_watched: Callable[[], bool],
        count_collectives: Callable[[], int],
        found: Callable[[BadOperation, str, tuple[int, int]], None],
    ) -> None:
        """
        Args:
            tensors: knows the operation of the batch that runs, with the notebook's line.
            is_watched: whether to look at the operation that comes now.
            count_collectives: returns how many this rank has begun.
            found: takes the operation, the notebook's line, and the numbers of the last collective before it and in it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._is_watched, self._found = tensors, is_watched, found
        self._count_collectives = count_collectives
        self._ran: list[_RanOp] = []
        self._unread: dict[int, torch.Tensor] = {}  # results that nothing has carried on yet, by id
        self._num_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would put two frames around each operation, for compiled code, of which there is none here

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_watched():
            return func(*args, **kwargs)
        at, num_collectives = (self._tensors.op_number, _recorded_line()), self._count_collectives()
        before = None
        if func._schema.is_mutable:  # it may overwrite what is held
            held = [each.result for each in self._ran]
            known = {id(tensor) for tensor in numbers.tensors_in(held)} if self.look() else set()
            if not self._is_watched():
                return func(*args, **kwargs)
            before = numbers.kinds(tensor for tensor in numbers.tensors_in((args, kwargs)) if id(tensor) not in known)
        result = func(*args, **kwargs)
        self._ran.append(_RanOp(func, args, kwargs, result, at, num_collectives, before))
        self._hold(func, args, result)
        if len(self._ran) >= _MAX_OPS or self._num_bytes >= _MAX_BYTES:
            self.look()
        return result

    def _hold(self, func: Any, args: Any, result: Any) -> None:
        unread = self._unread
        if func.is_view:  # one of all numbers stands for what it is a view of
            is_whole = isinstance(result, torch.Tensor) and result.numel() == args[0].numel()
            if is_whole and unread.pop(id(args[0]), None) is not None:
                unread[id(result)] = result
            return
        if count := _CARRIES.get(func._opname.rstrip("_")):
            for tensor in numbers.tensors_in(args[:count]):
                unread.pop(id(tensor), None)
        for tensor in numbers.tensors_in(result):
            unread[id(tensor)] = tensor
            self._num_bytes += tensor.nbytes

    def look(self) -> bool:
        """Look at what has run since the last time; return whether all of it is finite. Waits for a GPU."""
        ran, unread = self._ran, self._unread
        self._ran, self._unread, self._num_bytes = [], {}, 0
        if numbers.are_finite(unread.values()):
            return True
        counts = [*(each.num_collectives for each in ran[1:]), self._count_collectives()]
        for each, last in zip(ran, counts, strict=True):
            bad = (
                None if each.func.is_view else describe_bad(each.func, each.args, each.kwargs, each.result, each.before)
            )
            if bad is not None:
                self._tell(bad, each.at, (each.num_collectives, last))
                break
        return False

    def _tell(self, bad: DescribedOperation, at: OpPlace, collectives: tuple[int, int]) -> None:
        if self._is_watched():
            op, dtype, size = bad
            current = self._tensors.current_op(at[0])
            line = "" if current is None else _name_line(current, at[1])
            self._found(BadOperation("", op, "remote", None, dtype, size), line, collectives)


def _recorded_line() -> RecordedLine | None:
    """Return the line of a recorded step's code that runs: it has one for each operation."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not execution.execute.__code__:
        if (issued := GENERATED_CODE.get(frame.f_code.co_filename)) is not None:
            return issued, frame.f_lineno
        frame = frame.f_back
    return None


def _name_line(current: CurrentOp, recorded: RecordedLine | None) -> str:
    """Return the notebook's line that issued an operation: "cell 12, line 31 in loss_of"; empty: it is not known."""
    issued = None if recorded is None else recorded[0](recorded[1])[1]
    line = issued or current.line
    if line is None:
        return ""
    where = f"{current.cells.get(line.file) or short_path(line.file)}, line {line.line}"
    return where if line.function.startswith("<") else f"{where} in {line.function}"


class PlaceNames:
    """Names lines and steps for findings.

    Attributes:
        remote_op: returns the running operation, while a batch of operations on remote tensors runs; else None.
    """

    def __init__(self, cell_title: Callable[[str], str | None]) -> None:
        """
        Args:
            cell_title: returns "cell 12" for the file of a cell of this rank's.
        """
        self._cell_title = cell_title
        self.remote_op: Callable[[], CurrentOp | None] | None = None

    @property
    def are_remote(self) -> bool:
        return self.remote_op is not None

    def name(self, place: Place | None) -> str:
        """Return "cell 12, line 31 in forward"; empty: no place is known."""
        current = None if self.remote_op is None else self.remote_op()
        if current is None or place is None:
            is_ours = place is None or not is_cell_file(place[0]) or self._cell_title(place[0])
            return numbers.name_place(place, self._cell_title) if is_ours else ""
        if is_cell_file(place[0]) and place[0] not in current.cells:  # of a cell that is not this rank's
            return _name_line(current, _recorded_line())
        return numbers.name_place(place, current.cells.get)

    def name_remote(self) -> str:
        """Return the notebook's line that issued the operation that runs; empty: it is not known."""
        current = None if self.remote_op is None else self.remote_op()
        return "" if current is None else _name_line(current, _recorded_line())

    def step(self) -> int | None:
        """Return the step by the user's variable, or that of `meshbook.log`; None: neither is known."""
        step = numbers.step_from_frames()
        if step is not None or self.are_remote:  # the notebook has the loop
            return step
        log = scalars.installed()
        return log.step if log is not None and log.num_steps else None
