"""Watches a batch of operations on remote tensors, each one, for the first number that is not finite; names lines.

The notebook's lines issued them, so that a finding names one of these. Within the forward of a module that is spread
over the mesh the sentinel's own hooks look, which name the module.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from meshbook.diagnose.source_files import is_cell_file, short_path
from meshbook.rank import scalars
from meshbook.rank.differences import numbers
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.rerun import LEAVES_EMPTY, BadOperation, describe_bad
from meshbook.rank.tensors import execution, watching
from meshbook.rank.tensors.engine import GENERATED_CODE, CurrentOp
from meshbook.rank.tensors.lowering_passes import BEGIN, CallNode, FloatRef, TensorRef
from meshbook.rank.tensors.templates import CompiledTemplate, display_name
from meshbook.rank.tensors.watched_ops import (
    MAX_BYTES,
    MAX_OPS,
    Flow,
    OpKind,
    RecordedWatcher,
    Window,
    can_repeat,
    is_whole_view,
    kind_of,
    known_finite,
    results_of,
)
from meshbook.rank.tensors.watching import Issued
from meshbook.wire.messages import Frame

_RECORDED = display_name("meshbook::replay")


class RunningOps(Protocol):
    """What is asked of `RankTensors`."""

    def current_op(self, number: int | None = None) -> CurrentOp | None: ...


@dataclass(slots=True)
class _RanOp:
    """An operation that has run, and is still to be looked at."""

    kind: OpKind
    is_view: bool
    inputs: Sequence[Any]  # tensors
    constants: Sequence[Any]  # floats among them
    results: Sequence[torch.Tensor]
    issued: Issued  # its number, or the notebook's line
    collectives: tuple[int, int]  # of this rank: the number of the last one before it, and in it
    before: set[str] | None  # kinds of bad numbers in its inputs before it ran; None: it has overwritten none


# An operation as it is held until it is looked at: its template, inputs, floats and result, `_RanOp.issued`, how many
# collectives this rank had begun before it and after it, and `_RanOp.before`. There is one for each operation: what a
# search needs beside is made there.
Held = tuple[CompiledTemplate, list[Any], Sequence[float], Any, Issued, int, int, set[str] | None]


def _ran(held: Held) -> _RanOp:
    template, inputs, floats, _, issued, num_before, num_after, before = held
    constants = [*floats, *template.constants]
    results, collectives = _results_of(held), (num_before, num_after)
    return _RanOp(template.kind, template.is_view, inputs, constants, results, issued, collectives, before)


def _results_of(held: Held) -> list[torch.Tensor]:
    """Return the tensors that an operation has given, and those that it has changed."""
    template, inputs, _, result, *_ = held
    results = [result] if template.returns_one else _tensors_among(pytree.tree_leaves(result))
    return results + [inputs[position] for position in template.mutates] if template.mutates else results


def flow_of(held: Held) -> Flow:
    """Return what an operation does with the numbers of its tensors, by id."""
    template, inputs, results = held[0], held[1], _results_of(held)
    kind, keys = template.kind, [id(tensor) for tensor in results]
    if template.is_view:
        is_whole = bool(inputs) and is_whole_view(kind.name, inputs[0], results)
        return Flow(kind, True, [id(inputs[0])] if is_whole else [], keys)
    carried = inputs if kind.takes_list else inputs[: kind.num_carried]
    return Flow(kind, False, [id(tensor) for tensor in carried], keys[: kind.num_results])


def unread_of(window: Iterable[Held], given: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """Return the results that are to be looked at: `watched_ops.unread` of their flows, at a third of the cost.

    Args:
        given: ids of what an optimizer's step reads: collectives that give nothing else are left out.
    """
    found: dict[int, torch.Tensor] = {}
    for held in window:
        template, inputs, _, result, _, num_before, num_after, _ = held
        kind = template.kind
        results = (result,) if template.returns_one and not template.mutates else _results_of(held)
        if num_before != num_after and given.issuperset(map(id, results)):
            continue
        if template.is_view:
            if not inputs or id(inputs[0]) not in found or not is_whole_view(kind.name, inputs[0], results):
                continue
            del found[id(inputs[0])]
        else:
            for tensor in inputs if kind.takes_list else inputs[: kind.num_carried]:
                found.pop(id(tensor), None)
        for tensor in results[: kind.num_results]:
            found[id(tensor)] = tensor
    return list(found.values())


class NaNReader:
    """The first operation that read NaN which no operation before it had made, with all that were searched."""

    def __init__(self) -> None:
        self.op = self.line = ""  # its name and the notebook's line; "": there was none
        self._made: Any = WeakIdKeyDictionary()  # results of operations that were searched

    def note(self, ran: _RanOp, line_of: Callable[[Issued], str]) -> None:
        """Take note of the next operation that is searched."""
        others = [tensor for tensor in ran.inputs if tensor not in self._made]
        if ran.is_view and others:
            return
        if not self.op and ran.before is None and "nan" in numbers.kinds(others):
            self.op, self.line = ran.kind.name, line_of(ran.issued)
        self._made.update(dict.fromkeys(ran.results))

    def found_finite(self, held: Iterable[Held]) -> None:
        """Take note of operations whose results are finite, but for what collectives may give yet.

        A single number that is finite (a loss) ends the search for what made one NaN.
        """
        for each in held:
            if each[5] != each[6]:
                self._made.update(dict.fromkeys(_results_of(each)))
            if self.op and any(tensor.numel() == 1 and tensor.is_floating_point() for tensor in _results_of(each)):
                self.op = ""


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
        reader: NaNReader,
    ) -> None:
        """
        Args:
            tensors: knows the operation of the batch that runs, with the notebook's line.
            is_watched: whether to look at the operation that comes now.
            count_collectives: returns how many this rank has begun.
            found: takes the operation, the notebook's line, and the numbers of the last collective before it and in it.
            guarded: returns a function that does not raise.
            reader: of all batches.
        """
        self._tensors, self._is_watched, self._found, self._reader = tensors, is_watched, found, reader
        self._count_collectives, self._guarded = count_collectives, guarded
        self._held: list[Held] = []
        self._num_bytes = 0
        self._num_collectives = count_collectives()
        self.look, self._kinds_before, self._fail = guarded(self._look), guarded(self._kinds_before_op), guarded(_raise)

    def __enter__(self) -> None:
        watching.current_ops = self

    def __exit__(self, *error: Any) -> None:
        watching.current_ops = None
        self.look()

    def of_recorded(self, frames: Sequence[Frame | None]) -> RecordedWatcher:
        self.look()
        return _RecordedOps(
            self.search, self._not_repeated, frames, self._is_watched, self._count_collectives, self._guarded
        )

    def run(self, template: CompiledTemplate, inputs: list[Any], floats: Sequence[float], issued: Issued) -> Any:
        before = self._kinds_before(template, inputs) if template.mutates else None
        result = template.run(inputs, floats)
        try:
            self._note(template, inputs, floats, result, issued, before)
        except Exception as error:
            self._fail(error)
        return result

    def _kinds_before_op(self, template: CompiledTemplate, inputs: Sequence[Any]) -> set[str] | None:
        if not self._is_watched() or template.name == BEGIN:  # which has the sentinel look itself
            return None
        held = self._held
        is_finite = self._look()
        kind = template.kind
        if not self._is_watched() or not kind.is_watched or kind.name.startswith("_foreach_"):
            return None
        known = known_finite(list(map(flow_of, held))) if is_finite else set()
        with _disable_current_modes():
            return numbers.kinds(tensor for tensor in numbers.tensors_in(inputs) if id(tensor) not in known)

    def _note(
        self,
        template: CompiledTemplate,
        inputs: list[Any],
        floats: Sequence[float],
        result: Any,
        issued: Issued,
        before: set[str] | None,
    ) -> None:
        num_before = self._num_collectives
        num_now = self._num_collectives = self._count_collectives()
        if not template.kind.is_watched or not self._is_watched() or (template.mutates and before is None):
            return
        held = (template, inputs, floats, result, issued, num_before, num_now, before)
        self._held.append(held)
        if not template.is_view and not template.mutates:
            self._num_bytes += _nbytes(result) if template.returns_one else sum(map(_nbytes, _results_of(held)))
        if len(self._held) >= MAX_OPS or self._num_bytes >= MAX_BYTES:
            self._look()

    def _look(self, step_inputs: Sequence[torch.Tensor] = ()) -> bool:
        """Look at what has run since the last time; return whether all of it is finite. Waits for a GPU.

        Args:
            step_inputs: of the optimizer's step that begins; see `watched_ops.windows_of`.
        """
        held, self._held, self._num_bytes = self._held, [], 0
        if not held:
            return True
        with _disable_current_modes():  # a step that is traced while it runs has no part in this
            if numbers.are_finite(unread_of(held, frozenset(map(id, step_inputs)))):
                self._reader.found_finite(held)
                return True
            self.search(map(_ran, held))
        return False

    def search(self, ran: Iterable[_RanOp]) -> bool:
        """Report the first bad operation of these; return whether there was one.

        Else the first one that read NaN from elsewhere, if a single number of these (a loss, a norm) is NaN: numbers
        that are missing by intention end in none.
        """
        if not self._is_watched():
            return False
        first, has_bad_number = self._reader, False
        for each in ran:
            first.note(each, self._line_of)
            has_bad_number = has_bad_number or any(
                tensor.numel() == 1 and "nan" in numbers.kinds([tensor]) for tensor in each.results
            )
            if each.is_view:
                continue
            bad = describe_bad(each.kind.name, [*each.inputs, *each.constants], each.results, each.before)
            if bad is not None:
                op, dtype, size = bad
                line = self._line_of(each.issued)
                self._found(BadOperation("", op, "remote", None, dtype, size), line, each.collectives)
                return True
        if not first.op or not has_bad_number:
            return False
        self._found(BadOperation("", first.op, "remote input", None, "", None), first.line, (0, 0))
        return True

    def _not_repeated(self, op: str, first: Issued, last: Issued) -> None:
        """Report a result that was not finite, and is finite now that the operations between two lines ran again."""
        if self._is_watched():
            lines = [self._line_of(issued) for issued in (first, last)]
            line = " to ".join(dict.fromkeys(filter(None, lines)))
            self._found(BadOperation("", op, "not repeated", None, "", None), line, (0, 0))

    def _line_of(self, issued: Issued) -> str:
        current = self._tensors.current_op(issued if isinstance(issued, int) else None)
        return "" if current is None else _name_line(current, None if isinstance(issued, int) else issued)


class _RecordedOps:
    """A `watched_ops.RecordedWatcher`."""

    def __init__(
        self,
        search: Callable[[Iterable[_RanOp]], bool],
        not_repeated: Callable[[str, Issued, Issued], None],
        frames: Sequence[Frame | None],
        is_watched: Callable[[], bool],
        count_collectives: Callable[[], int],
        guarded: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """
        Args:
            search: reports the first bad operation of these; returns whether there was one.
            not_repeated: takes an operation whose bad result did not come again, and the lines between which it began.
            frames: the notebook's lines of the step's operations.
        """
        self._search, self._not_repeated = search, not_repeated
        self._frames, self._is_watched = frames, is_watched
        self._are_finite = True  # those of the last window
        self._num_before = count_collectives()
        self.num_collectives = count_collectives
        self.totals, self.are_bad = guarded(numbers.totals_of), guarded(self._are_bad)
        self.find_first = guarded(self._find_first)
        self.kinds_before = guarded(self._kinds_before)

    def _are_bad(self, *totals: torch.Tensor) -> bool:
        self._are_finite = not self._is_watched() or numbers.are_totals_finite(list(totals))
        return not self._are_finite

    def _kinds_before(self, known: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> set[str]:
        if not self._is_watched():
            return set()
        return numbers.kinds(numbers.tensors_in(others if self._are_finite else (*known, *others)))

    def _find_first(self, window: Window, values: dict[str, Any]) -> None:
        if self._search(self._repeat(window, values)):
            return
        empty: set[str] = set()  # what has no numbers yet, and views of it
        for index, node in enumerate(window.nodes, window.first):
            if LEAVES_EMPTY.match(kind_of(node.called).name) or not empty.isdisjoint(node.inputs):
                empty.update(filter(None, node.outputs))
                continue
            unread = [values[name] for name in results_of(node) if name in window.unread]
            again = numbers.totals_of(unread)
            before: list[torch.Tensor] = values.get(f"t{index}") or []
            if any(itertools.starmap(_has_changed, zip(before, again, strict=True))):
                op = kind_of(node.called).name
                self._not_repeated(op, self._frame_of(window.nodes[0]), self._frame_of(node))
                return

    def _frame_of(self, node: CallNode) -> Frame | None:
        return self._frames[node.op_index] if node.op_index < len(self._frames) else None

    def _repeat(self, window: Window, values: dict[str, Any]) -> Iterator[_RanOp]:
        """Yield the operations of a window with what they read and give: what was not held is computed again."""

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, FloatRef):
                return values["F"][leaf.slot]
            return values[leaf.name] if isinstance(leaf, TensorRef) else leaf

        for index, node in enumerate(window.nodes, window.first):
            args, kwargs = pytree.tree_map(value_of, (node.args, node.kwargs))
            if can_repeat(node):
                results = pytree.tree_leaves(node.function(*args, **kwargs))
                values.update((name, value) for name, value in zip(node.outputs, results, strict=True) if name)
            last, leaves = values.get(f"n{index}"), pytree.tree_leaves((args, kwargs))
            yield _RanOp(
                kind_of(node.called),
                node.is_view,
                _tensors_among(leaves),
                [leaf for leaf in leaves if isinstance(leaf, float)],
                [values[name] for name in results_of(node)],
                self._frame_of(node),
                (0, 0) if last is None else (self._num_before, last),
                values["before"] if window.overwrites else None,
            )


def _has_changed(total: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether a sum was not finite, and another number now. The same infinity is of a mask, or of numbers too large."""
    return not numbers.is_finite(total) and repr(total.item()) != repr(again.item())


def _raise(error: Exception) -> None:
    raise error


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor._local_tensor.nbytes if tensor.__class__ is DTensor else tensor.nbytes


def _tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _recorded_line(current: CurrentOp) -> Frame | None:
    """Return the notebook's line that issued the operation of a recorded step, if that is what runs."""
    if current.operation != _RECORDED:
        return None
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
            return _name_line(current, _recorded_line(current))
        return numbers.name_place(place, current.cells.get)

    def name_remote(self) -> str:
        """Return the notebook's line that issued the operation that runs; empty: it is not known."""
        return self.note_remote()()

    def note_remote(self) -> Callable[[], str]:
        """Return what names that line, also when other operations run."""
        current = None if self.remote_op is None else self.remote_op()
        return str if current is None else functools.partial(_name_line, current, _recorded_line(current))

    def step(self) -> int | None:
        """Return the step by the user's variable, or that of `meshbook.log`; None: neither is known."""
        step = numbers.step_from_frames()
        if step is not None or self.are_remote:  # the notebook has the loop
            return step
        log = scalars.installed()
        return log.step if log is not None and log.num_steps else None
