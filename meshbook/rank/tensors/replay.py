"""Recorded steps on a rank: a sequence of operations that is sent as one template and then runs as one operation.

In its first run a step is executed operation by operation and traced by a `Lowering`; later runs call the function
generated from that. If the function is not valid (a number assumed constant has changed) or could not be generated, the
operations run again one by one: slower, with the same results.

All ranks trace a step in the same of its calls, and come to its collectives in the same order, because what a rank does
in a call follows from the calls before it, and from what ranks have agreed on when they traced it. So the controller
numbers the calls. A rank that has left one out refuses the next ones, and after a fault, a Stop or a heal the
controller has all ranks begin anew.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.rank.tensors import engine, watching
from meshbook.rank.tensors.lowering import CannotLower, Lowering, is_same_number, wait_local_tensor
from meshbook.rank.tensors.lowering_codegen import GENERATED_FILE, Lowered
from meshbook.rank.tensors.lowering_passes import BEGIN, END
from meshbook.rank.tensors.operators import FUNCTIONS, TemplateMessage
from meshbook.rank.tensors.templates import CompiledTemplate, display_name
from meshbook.wire.messages import Frame


class OutOfStep(RuntimeError):
    """This rank has left out an earlier call of a recorded step, and does not know how the others run this one."""


# Meshbook's functions that become opaque calls: modules, functions that wait for their collective other than by an
# operation, and those that set something for the operations after them.
_OPAQUE_FUNCTIONS = ("meshbook::module", "meshbook::slice_local", "meshbook::set_", BEGIN, END)

# Repeated lowerings after more numbers turned out to vary; a step that still differs is replayed op by op.
_MAX_LOWERINGS = 4


@dataclass(frozen=True)
class RecordedOp:
    """One operation of a recorded step."""

    template: int
    inputs: tuple[int, ...]  # indices of the step's values: its inputs first, then the operations' results, in order
    outputs: tuple[int, ...]
    first_float: int
    num_floats: int


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step, as it is sent.

    Attributes:
        key: unique among all steps of its client.
        template_bodies: the templates it uses, by number, pickled.
        results: indices of the values that outlive the step.
        frames: where each operation was issued; None if unknown.
        can_merge: whether several all-reduces may become one, which sums in another order.
    """

    key: str
    num_inputs: int
    ops: tuple[RecordedOp, ...]
    template_bodies: dict[int, bytes]
    results: tuple[int, ...]
    frames: tuple[Frame | None, ...] = ()
    can_merge: bool = True


@dataclass
class StepReplayer:
    """Runs a recorded step on this rank.

    Attributes:
        first_call: the number of the call with which it began.
    """

    recorded: RecordedStep
    mesh: Any
    device: torch.device
    first_call: int
    templates: dict[int, CompiledTemplate] = field(default_factory=dict)
    lowered: Lowered | None = None
    running: Lowered | None = None  # what runs of it: `lowered`, or with what a sentinel looks at
    lowering_failure: str | None = None  # why it could not be lowered
    lowered_floats: list[float] = field(default_factory=list)  # values at the time of lowering
    constant_floats: tuple[int, ...] = ()  # floats that must be unchanged
    result_specs: list[Any] = field(default_factory=list)  # of the results; None for a plain tensor
    opaque_ops: set[int] = field(default_factory=set)  # operations that are called without tracing
    num_lowerings: int = 0
    num_replayed: int = 0

    def __post_init__(self) -> None:
        for number, body in self.recorded.template_bodies.items():
            message: TemplateMessage = pickle.loads(body)
            self.templates[number] = CompiledTemplate(message, self.mesh, self.device)
        for index, op in enumerate(self.recorded.ops):
            template = self.templates[op.template]
            if template.seeded or template.default_dtype is not None or template.name.startswith(_OPAQUE_FUNCTIONS):
                self.opaque_ops.add(index)

    def run(self, call: int, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        """Run the step once and return its results.

        Raises:
            OutOfStep: the call does not follow the last one.
        """
        if call != self.first_call + self.num_replayed:
            raise OutOfStep("an earlier call of this recorded step was left out here; call it again")
        self.num_replayed += 1
        lowered = self.lowered
        if lowered is not None and self._have_constants_changed(floats):
            lowered = self.lowered = None
        if lowered is None:
            if self.lowering_failure is None and self.num_lowerings < _MAX_LOWERINGS:
                return self._run_and_lower(inputs, floats)
            return self._run_op_by_op(inputs, floats)
        locals_ = [wait_local_tensor(tensor) for tensor in inputs]
        watcher = watching.current_ops
        self.running = lowered if watcher is None else lowered.watched
        try:
            watch = None if watcher is None else watcher.of_recorded(self.recorded.frames)
            results = self.running.run(locals_, floats, watch)
        except Exception as error:
            raise self._annotate_error(error, self.running.op_index_of(error)) from error
        return [
            result if spec is None else DTensor(result, spec, requires_grad=False)  # type: ignore[no-untyped-call]
            for result, spec in zip(results, self.result_specs, strict=True)
        ]

    def _have_constants_changed(self, floats: Sequence[float]) -> bool:
        """Whether a number assumed constant has changed; if so, its operation becomes an opaque call."""
        changed = [slot for slot in self.constant_floats if not is_same_number(floats[slot], self.lowered_floats[slot])]
        for index, op in enumerate(self.recorded.ops if changed else ()):
            if any(op.first_float <= slot < op.first_float + op.num_floats for slot in changed):
                self.opaque_ops.add(index)
        return bool(changed)

    # ---- op by op

    def _run_op_by_op(self, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        values = dict(enumerate(inputs))
        for index, op in enumerate(self.recorded.ops):
            try:
                self._run_op(index, op, values, floats)
            except Exception as error:
                raise self._annotate_error(error, index) from error
        return [values[index_of_value] for index_of_value in self.recorded.results]

    def _run_op(self, index: int, op: RecordedOp, values: dict[int, Any], floats: Sequence[float]) -> None:
        self._call_op(op, [values[of] for of in op.inputs], floats, values, watching.runner(), self._frame_of(index))

    def _call_op(
        self,
        op: RecordedOp,
        inputs: list[Any],
        floats: Sequence[float],
        values: dict[int, Any],
        run: Callable[..., Any],
        frame: Frame | None = None,
    ) -> None:
        """Run an operation by `watching.runner()` and store its results."""
        own_floats = floats[op.first_float : op.first_float + op.num_floats]
        template = self.templates[op.template]
        result = run(template, inputs, own_floats, frame)
        if template.returns_one:
            values[op.outputs[0]] = result
        else:
            template.store(result, op.outputs, values)

    def _frame_of(self, index: int) -> Frame | None:
        return self.recorded.frames[index] if index < len(self.recorded.frames) else None

    # ---- lowering

    def _run_and_lower(self, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        """Run the step once while tracing it; the results are valid as those of any other run."""
        self.num_lowerings += 1
        inputs = _with_distinct_locals(inputs)
        values = dict(enumerate(inputs))
        lowering = Lowering([wait_local_tensor(tensor) for tensor in inputs])
        with lowering:
            for index, op in enumerate(self.recorded.ops):
                own_floats = floats[op.first_float : op.first_float + op.num_floats]
                try:
                    with lowering.operation(index, op.first_float, own_floats):
                        if index in self.opaque_ops:
                            self._run_opaque(lowering, index, op, values, floats)
                        else:
                            self._run_op(index, op, values, floats)
                except Exception as error:
                    raise self._annotate_error(error, index) from error
            results = [values[index_of_value] for index_of_value in self.recorded.results]
            pieces = [wait_local_tensor(result) for result in results]
        lowered = None
        try:
            lowered = lowering.compile(pieces, merge=self.recorded.can_merge)
        except CannotLower as error:
            self.lowering_failure = str(error)
        checksum = -1 if lowered is None else zlib.crc32(repr(lowered.collective_order).encode())
        constant = [lowered is None or slot not in lowered.variable_floats for slot in range(len(floats))]
        agreed = self._agree(checksum, constant)
        if agreed is None:
            lowered, self.lowering_failure = (
                None,
                self.lowering_failure or "ranks would come to their collectives in different orders",
            )
        if lowered is None or agreed is None:
            return results
        self.lowered, self.lowered_floats = lowered, list(floats)
        self.constant_floats = agreed
        self.result_specs = [result._spec if isinstance(result, DTensor) else None for result in results]
        return results

    def _agree(self, checksum: int, constant: Sequence[bool]) -> tuple[int, ...] | None:
        """Agree with all ranks on a function. Blocks until all take part.

        Args:
            checksum: of the order of its collectives; negative: this rank has no function.
            constant: for each float, whether this rank's function assumes that it is constant.

        Returns:
            The floats that some rank assumes to be constant; None: a rank has no function, or another order.
        """
        ends = torch.tensor([checksum, -checksum, *constant], device=self.device)
        for axis in range(0 if self.mesh is None else self.mesh.ndim):
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        greatest, least, *is_constant = ends.tolist()
        if checksum < 0 or greatest != -least:
            return None
        return tuple(slot for slot, found in enumerate(is_constant) if found)

    def _run_opaque(
        self, lowering: Lowering, index: int, op: RecordedOp, values: dict[int, Any], floats: Sequence[float]
    ) -> None:
        template = self.templates[op.template]
        inputs = [values[of] for of in op.inputs]
        specs = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in inputs]
        pieces = [wait_local_tensor(tensor) for tensor in inputs]
        results: dict[int, Any] = {}
        with _disable_current_modes():
            self._call_op(op, inputs, floats, results, watching.runner(), self._frame_of(index))
        values.update(results)

        def call(locals_: Sequence[torch.Tensor], own: Sequence[float]) -> list[torch.Tensor]:
            wrapped: Any = (
                locals_
                if template.name == BEGIN
                else [
                    local if spec is None else DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
                    for local, spec in zip(locals_, specs, strict=True)
                ]
            )
            new_results: dict[int, Any] = {}
            shifted_op = RecordedOp(op.template, op.inputs, op.outputs, 0, op.num_floats)
            self._call_op(shifted_op, wrapped, own, new_results, watching.run_unwatched)
            return [wait_local_tensor(new_results[index]) for index in op.outputs]

        with _disable_current_modes():
            outs = [wait_local_tensor(values[index]) for index in op.outputs]
        lowering.opaque_call(call, pieces, outs, template.name, mutates=template.mutates, is_view=template.is_view)

    def _annotate_error(self, error: Exception, index: int | None) -> Exception:
        if index is None:
            return error
        op = self.recorded.ops[index]
        frame = self._frame_of(index)
        line = f", issued at {os.path.basename(frame.file)}:{frame.line}" if frame is not None else ""
        error.add_note(f"in operation {index} of the recorded step, {self.templates[op.template].name}{line}")
        return error

    def op_of_line(self, generated_line: int) -> tuple[str, Frame | None]:
        """Return the operation and frame of a generated line; see `engine.GENERATED_CODE`."""
        index = None if self.running is None else self.running.op_index_by_line.get(generated_line)
        if index is None or index >= len(self.recorded.frames):
            return "a recorded step", None
        name = display_name(self.templates[self.recorded.ops[index].template].name)
        return f"{name} of a recorded step", self.recorded.frames[index]

    def describe(self) -> dict[str, Any]:
        """Return how the step is replayed, as plain data."""
        lowered = self.lowered
        return {
            "played": self.num_replayed,
            "tries": self.num_lowerings,
            "lowered": lowered is not None,
            "why_not": self.lowering_failure,
            "lines": lowered.num_ops if lowered else None,
            "merged": list(lowered.bucket_sizes) if lowered else [],
            "islands": len(self.opaque_ops),
        }


def _with_distinct_locals(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs, each with a local tensor object of its own, by which a `Lowering` identifies it.

    Inputs that are two views of one tensor now (`x` and `x.as_local()`) may be different tensors in the next call.
    """
    seen: set[int] = set()
    found = []
    for tensor in inputs:
        local = wait_local_tensor(tensor)
        if id(local) in seen:
            local = local.detach()
            tensor = DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local  # type: ignore[no-untyped-call]
        seen.add(id(local))
        found.append(tensor)
    return found


REPLAYERS: dict[str, StepReplayer] = {}


def replay(mesh: Any, device: torch.device, payload: bytes, key: str, *operands: Any) -> Any:
    """Run a recorded step as one operation.

    Args:
        operands: the step's inputs; the number of the call with which all ranks begin or have begun to trace it, and
            that of this call; the step's floats.

    Raises:
        OutOfStep: this rank has left out a call since the first.
    """
    replayer = REPLAYERS.get(key)
    if replayer is None:
        replayer = REPLAYERS[key] = StepReplayer(pickle.loads(payload), mesh, device, first_call=-1)
    count = replayer.recorded.num_inputs
    first_call, call = int(operands[count]), int(operands[count + 1])
    if replayer.first_call != first_call:
        replayer = REPLAYERS[key] = StepReplayer(replayer.recorded, mesh, device, first_call)
    engine.GENERATED_CODE[GENERATED_FILE] = replayer.op_of_line  # a rank has one thread that runs operations
    return replayer.run(call, operands[:count], operands[count + 2 :])


def forget_replay(key: str) -> None:
    REPLAYERS.pop(key, None)


def _drop_client(client: str) -> None:
    for key in [key for key in list(REPLAYERS) if key.partition("|")[0] == client]:
        REPLAYERS.pop(key, None)


engine.ON_CLIENT_DROPPED.append(_drop_client)


FUNCTIONS["replay"] = replay
FUNCTIONS["forget_replay"] = forget_replay
