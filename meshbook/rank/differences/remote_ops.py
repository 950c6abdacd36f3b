"""Watches a batch of operations on remote tensors, each one, for the first number that is not finite; names lines.

The notebook's lines issued them, so that a finding names one of these. Within the forward of a module that is spread
over the mesh the sentinel's own hooks look, which name the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.diagnose.source_files import is_cell_file, short_path
from meshbook.rank import scalars
from meshbook.rank.differences import numbers
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.rerun import BadOperation, describe_bad
from meshbook.rank.tensors import execution, watching
from meshbook.rank.tensors.engine import GENERATED_CODE, CurrentOp
from meshbook.rank.tensors.lowering_passes import CallNode, FloatRef, TensorRef
from meshbook.rank.tensors.templates import CompiledTemplate
from meshbook.rank.tensors.watched_ops import (
    MAX_BYTES,
    MAX_OPS,
    Flow,
    OpKind,
    RecordedWatcher,
    Window,
    is_whole_view,
    kind_of,
    known_finite,
    results_of,
    unread,
)
from meshbook.rank.tensors.watching import Issued
from meshbook.wire.messages import Frame


class RunningOps(Protocol):
    """What is asked of `RankTensors`."""

    def current_op(self, number: int | None = None) -> CurrentOp | None: ...


@dataclass(slots=True)
class _RanOp:
    """An operation that has run, and is still to be looked at."""

    kind: OpKind
    is_view: bool
    arguments: Sequence[Any]  # tensors, and tensors and floats among others
    result: Any
    issued: Issued  # its number, or the notebook's line
    collectives: tuple[int, int]  # of this rank: the number of the last one before it, and in it
    before: set[str] | None  # kinds of bad numbers in its inputs before it ran; None: it has overwritten none

    def flow(self) -> Flow:
        results = list(map(id, numbers.tensors_in(self.result)))
        tensors = list(numbers.tensors_in(self.arguments))
        if self.is_view:
            is_whole = bool(tensors) and is_whole_view(self.kind.name, tensors[0], numbers.tensors_in(self.result))
            return Flow(self.kind, True, [id(tensors[0])] if is_whole else [], results)
        carried = tensors if self.kind.takes_list else tensors[: self.kind.num_carried]
        return Flow(self.kind, False, list(map(id, carried)), results)


class RemoteOps:
    """A `watching.OpsWatcher`: calls back at the first operation of each batch that makes numbers that are not finite.

    Some dozens of operations are held with their results, and then only those results are summed that no other of them
    carries on. If a sum is not finite, the first operation that made a bad number is found among what is held. The code
    of a recorded step holds and sums by itself what `watched_ops` has found out when it was generated.
    """

    def __init__(
        self,
        tensors: RunningOps,
        is_watched: Callable[[], bool],
        count_collectives: Callable[[], int],
        found: Callable[[BadOperation, str, tuple[int, int]], None],
        guarded: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """
        Args:
            tensors: knows the operation of the batch that runs, with the notebook's line.
            is_watched: whether to look at the operation that comes now.
            count_collectives: returns how many this rank has begun.
            found: takes the operation, the notebook's line, and the numbers of the last collective before it and in it.
            guarded: returns a function that does not raise.
        """
        self._tensors, self._is_watched, self._found = tensors, is_watched, found
        self._count_collectives, self._guarded = count_collectives, guarded
        self._ran: list[_RanOp] = []
        self._num_bytes = 0
        self._num_collectives = count_collectives()
        self.look, self._note = guarded(self._look), guarded(self._note_op)
        self._kinds_before = guarded(self._kinds_before_op)

    def __enter__(self) -> None:
        watching.current_ops = self

    def __exit__(self, *error: Any) -> None:
        watching.current_ops = None
        self.look()

    def of_recorded(self, frames: Sequence[Frame | None]) -> RecordedWatcher:
        self.look()
        return _RecordedOps(self.search, frames, self._is_watched, self._count_collectives, self._guarded)

    def run(self, template: CompiledTemplate, inputs: list[Any], floats: Sequence[float], issued: Issued) -> Any:
        before = self._kinds_before(template, inputs) if template.mutates else None
        result = template.run(inputs, floats)
        self._note(template, inputs, floats, result, issued, before)
        return result

    def _kinds_before_op(self, template: CompiledTemplate, inputs: Sequence[Any]) -> set[str] | None:
        if not self._is_watched():
            return None
        ran = self._ran
        is_finite = self._look()
        kind = kind_of(template.name)
        if not self._is_watched() or not kind.is_watched or kind.name.startswith("_foreach_"):
            return None
        known = known_finite([each.flow() for each in ran]) if is_finite else set()
        with _disable_current_modes():
            return numbers.kinds(tensor for tensor in numbers.tensors_in(inputs) if id(tensor) not in known)

    def _note_op(
        self,
        template: CompiledTemplate,
        inputs: Sequence[Any],
        floats: Sequence[float],
        result: Any,
        issued: Issued,
        before: set[str] | None,
    ) -> None:
        kind, mutates = kind_of(template.name), template.mutates
        num_before, self._num_collectives = self._num_collectives, self._count_collectives()
        if not kind.is_watched or not self._is_watched() or (mutates and before is None):
            return
        if mutates:
            result = [result, *(inputs[position] for position in mutates)]
        elif not template.is_view:
            self._num_bytes += sum(tensor.nbytes for tensor in numbers.tensors_in(result))
        arguments = [*inputs, *floats, *template.constants]
        collectives = num_before, self._num_collectives
        self._ran.append(_RanOp(kind, template.is_view, arguments, result, issued, collectives, before))
        if len(self._ran) >= MAX_OPS or self._num_bytes >= MAX_BYTES:
            self._look()

    def _look(self) -> bool:
        """Look at what has run since the last time; return whether all of it is finite. Waits for a GPU."""
        ran, self._ran, self._num_bytes = self._ran, [], 0
        if not ran:
            return True
        tensors = {id(tensor): tensor for each in ran for tensor in numbers.tensors_in(each.result)}
        looked_at = [tensors[key] for key in unread(each.flow() for each in ran)]  # type: ignore[index]
        with _disable_current_modes():  # a step that is traced while it runs has no part in this
            if numbers.are_finite(looked_at):
                return True
            self.search(ran)
        return False

    def search(self, ran: Iterable[_RanOp]) -> None:
        """Report the first bad operation of these, if there is one."""
        if not self._is_watched():
            return
        for each in ran:
            if each.is_view:
                continue
            bad = describe_bad(each.kind.name, each.arguments, each.result, each.before)
            if bad is not None:
                op, dtype, size = bad
                line = self._line_of(each.issued)
                self._found(BadOperation("", op, "remote", None, dtype, size), line, each.collectives)
                return

    def _line_of(self, issued: Issued) -> str:
        current = self._tensors.current_op(issued if isinstance(issued, int) else None)
        return "" if current is None else _name_line(current, None if isinstance(issued, int) else issued)


class _RecordedOps:
    """A `watched_ops.RecordedWatcher`."""

    def __init__(
        self,
        search: Callable[[Iterable[_RanOp]], None],
        frames: Sequence[Frame | None],
        is_watched: Callable[[], bool],
        count_collectives: Callable[[], int],
        guarded: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """
        Args:
            frames: the notebook's lines of the step's operations.
        """
        self._search, self._frames, self._is_watched = search, frames, is_watched
        self._are_finite = True  # those of the last window
        self._num_before = count_collectives()
        self.num_collectives = count_collectives
        self.are_bad, self.find_first = guarded(self._are_bad), guarded(self._find_first)
        self.kinds_before = guarded(self._kinds_before)

    def _are_bad(self, tensors: Sequence[torch.Tensor]) -> bool:
        self._are_finite = not self._is_watched() or numbers.are_finite(tensors)
        return not self._are_finite

    def _kinds_before(self, known: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> set[str]:
        if not self._is_watched():
            return set()
        return numbers.kinds(numbers.tensors_in(others if self._are_finite else (*known, *others)))

    def _find_first(self, window: Window, values: dict[str, Any]) -> None:
        self._search(self._ran_op(window, values, index, node) for index, node in enumerate(window.nodes, window.first))

    def _ran_op(self, window: Window, values: dict[str, Any], index: int, node: CallNode) -> _RanOp:
        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, FloatRef):
                return values["F"][leaf.slot]
            return values[leaf.name] if isinstance(leaf, TensorRef) else leaf

        arguments = pytree.tree_leaves((node.args, node.kwargs))
        last = values.get(f"n{index}")
        frame = self._frames[node.op_index] if node.op_index < len(self._frames) else None
        return _RanOp(
            kind_of(node.called),
            node.is_view,
            list(map(value_of, arguments)),
            [values[name] for name in results_of(node)],
            frame,
            (0, 0) if last is None else (self._num_before, last),
            values["before"] if window.overwrites else None,
        )


def _recorded_line() -> Frame | None:
    """Return the notebook's line that issued the operation of a recorded step that runs."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not execution.execute.__code__:
        if (issued := GENERATED_CODE.get(frame.f_code.co_filename)) is not None:
            return issued(frame.f_lineno)[1]
        frame = frame.f_back
    return None


def _name_line(current: CurrentOp, recorded: Frame | None) -> str:
    """Return the notebook's line that issued an operation: "cell 12, line 31 in loss_of"; empty: it is not known.

    Args:
        recorded: of an operation of a recorded step.
    """
    line = recorded or current.line
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
