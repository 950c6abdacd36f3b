"""A module's call run once more, operation by operation, to find the first that makes numbers that are not finite.

The call is run from its record: its inputs, its parameters as they are, the generators' states of then. That is right
as long as nothing has changed them, and possible on one rank as long as the call has no collectives. What a forward
does beside computing (counts, prints) it does again; buffers are put back.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.diagnose.source_files import is_user_file
from meshbook.rank.differences.numbers import Place, kinds, largest, place_of, tensors_in, user_frame
from meshbook.rank.tensors.compiled_blocks import without_compiler

# Operations whose results have no numbers yet.
LEAVES_EMPTY = re.compile(r"(new_)?empty|resize|set_")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')

# The name of an operation, and the dtype and the largest finite magnitude of its inputs.
DescribedOperation = tuple[str, str, float | None]


@dataclass
class ModuleCall:
    """What is kept of the call of a module that no other module called.

    Attributes:
        first_seq, last_seq: numbers of the first collective and of autograd's first node, before and after the call.
        gradients: by the number of the output, the gradient that came back to it.
        versions: of the tensors among the arguments: another one means that they were changed since.
    """

    module: nn.Module
    place: Place | None
    random_state: torch.Tensor
    cuda_random_state: torch.Tensor | None
    grad_enabled: bool
    autocast: tuple[str, torch.dtype, bool]
    first_collective: int
    first_node: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    last_node: int = 0
    has_collectives: bool = False
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    totals: list[torch.Tensor] = field(default_factory=list)  # of the outputs, not read yet
    leaves: Any = None  # the `LeafWatch` of a call that may have collectives
    is_remote: bool = False  # of a module whose parameters the notebook has: its backward is another operation

    @classmethod
    def that_begins(cls, module: nn.Module, place: Place | None, first_collective: int) -> ModuleCall:
        """Return the record of a call that begins now, with the state that its forward will find."""
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device_type = "cuda" if cuda else "cpu"
        return cls(
            module,
            place,
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if cuda else None,
            torch.is_grad_enabled(),
            (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)),
            first_collective,
            next_node(),
        )

    def has_gradients(self) -> bool:
        """Whether its backward has been here."""
        return bool(self.gradients) or (self.leaves is not None and self.leaves.has_gradients)

    def may_rerun(self) -> bool:
        return not self.has_collectives and self.versions == versions_of((self.args, self.kwargs))


@dataclass(frozen=True)
class BadOperation:
    """The first operation with numbers that are not finite."""

    module: str  # path below the module that was called; "" for itself
    op: str  # "softmax"
    phase: str  # "forward" or "backward"
    place: Place | None
    dtype: str  # of its input
    input_max: float | None  # the largest magnitude among its finite inputs


class _Found(Exception):
    def __init__(self, operation: BadOperation) -> None:
        self.operation = operation


class ModuleStack:
    """Which module runs, noted by the hooks of the sentinel while a call is run again."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack: list[tuple[str, int]] = []  # path, and autograd's number at its begin
        self._calls: list[tuple[int, int, str]] = []  # the same of calls that ended, with the number at their end

    def enter(self, module: nn.Module) -> None:
        self._stack.append((self._names.get(id(module), ""), next_node()))

    def leave(self) -> None:
        if self._stack:
            name, first = self._stack.pop()
            self._calls.append((first, next_node(), name))

    @property
    def current(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    def path_of_node(self, number: int) -> str:
        """Return the module in whose forward a node of autograd's was made: the innermost one."""
        inside = [(last - first, name) for first, last, name in self._calls if first <= number < last]
        return min(inside)[1] if inside else ""


def next_node() -> int:
    """Return the number that autograd's next node of this thread gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def versions_of(arguments: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_in(arguments) if not tensor.is_inference())


def check_operation(func: Any, args: Any, kwargs: Any) -> tuple[Any, DescribedOperation | None]:
    """Run an operation; return its result, and what it is if it makes a kind of number that none of its inputs has.

    The kinds are those that are not finite.
    """
    before = None
    if func._schema.is_mutable:  # it may overwrite what it read
        before = kinds(tensors_in((args, kwargs)))
    result = func(*args, **kwargs)
    name = func._schema.name.split("::")[-1]
    return result, None if func.is_view else describe_bad(name, (*args, *(kwargs or {}).values()), result, before)


def describe_bad(
    name: str, arguments: Sequence[Any], result: Any, before: set[str] | None = None
) -> DescribedOperation | None:
    """Return what an operation is that has run, if it is bad; see `check_operation`.

    Args:
        name: "log", "add_".
        before: kinds in its inputs before it ran; None: it has changed none of them.
    """
    new = kinds(tensors_in(result))
    if not new or LEAVES_EMPTY.match(name):
        return None
    inputs = list(tensors_in(arguments))
    had = kinds(inputs) if before is None else before
    had |= kinds([torch.tensor(value) for value in arguments if isinstance(value, float)])  # of a mask
    if "nan" in had or not new - had or (had and "nan" not in new):  # -inf negated is inf, and begins nothing
        return None
    dtype, size = largest(inputs)  # of those that it has overwritten, what they are now
    return name.strip("_").removesuffix("_backward_data").removesuffix("_backward"), dtype, size


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `_Found` at the first operation that makes a kind of non-finite number that none of its inputs has."""

    def __init__(self, stack: ModuleStack, until: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack, self._until = stack, until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, bad = check_operation(func, args, kwargs or {})
        if bad is None:
            return result
        op, dtype, size = bad
        node: Any = torch._C._current_autograd_node()
        if node is None:
            place = place_of(user_frame(sys._getframe(1), self._until))
            raise _Found(BadOperation(self._stack.current, op, "forward", place, dtype, size))
        made_by = re.sub(r"Backward\d*$", "", node.name())
        path = self._stack.path_of_node(node._sequence_nr())
        raise _Found(BadOperation(path, _snake_case(made_by) or op, "backward", _place_of_node(node), dtype, size))


def first_bad_operation(call: ModuleCall, stack: ModuleStack, *, backward: bool) -> BadOperation | None:
    """Run a call again; return its first bad operation, or None: it has none, or it could not be run again.

    Args:
        stack: notes which module runs.
        backward: also from the gradients that came back to its outputs.
    """
    if not call.may_rerun():
        return None
    try:
        with _as_it_was(call), _anomalies_noted(backward), _Watch(stack, sys._getframe()):
            outputs = list(tensors_in(call.module(*call.args, **call.kwargs)))
            if backward:
                _go_back(call, outputs)
    except _Found as found:
        return found.operation
    except Exception:  # the user's forward may not bear to be called again
        return None
    return None


def first_bad_of(
    stack: ModuleStack, forward: Callable[[], Any], args: Any, gradient: torch.Tensor | None
) -> BadOperation | None:
    """Run one function of a module's without collectives; return its first bad operation.

    Args:
        args: its tensors; a gradient is computed for those and for parameters.
        gradient: what came back to its first output; None: forward only.
    """
    is_back = gradient is not None
    try:
        with torch.set_grad_enabled(is_back), run_quietly(), _anomalies_noted(is_back), _Watch(stack, sys._getframe()):
            output = next(tensors_in(forward()), None)
            if gradient is not None and output is not None:
                inputs = [tensor for tensor in tensors_in(args) if tensor.requires_grad]
                torch.autograd.grad([output], inputs, [gradient], allow_unused=True)
    except _Found as found:
        return found.operation
    except Exception:
        return None
    return None


def gradients_here(call: ModuleCall) -> list[torch.Tensor | None]:
    """Return the gradients of a call's parameters on this rank alone, before any collective; []: it cannot be run."""
    if not call.may_rerun() or not call.gradients:
        return []
    try:
        with _as_it_was(call):
            return _go_back(call, list(tensors_in(call.module(*call.args, **call.kwargs))))
    except Exception:
        return []


def _go_back(call: ModuleCall, outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    chosen = [(outputs[at], gradient) for at, gradient in call.gradients.items() if outputs[at].requires_grad]
    parameters = [parameter for parameter in call.module.parameters() if parameter.requires_grad]
    if not chosen or not parameters:
        return []
    return list(
        torch.autograd.grad(
            [output for output, _ in chosen], parameters, [gradient for _, gradient in chosen], allow_unused=True
        )
    )


@contextlib.contextmanager
def _anomalies_noted(backward: bool) -> Iterator[None]:
    """Have autograd note the line that makes each node, if there is to be a backward."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(backward or before[0], check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(*before)


@contextlib.contextmanager
def run_quietly() -> Iterator[None]:
    """Have compiled code run operation by operation, and no warnings, which the user has had or which are about this.

    Anomaly detection warns, with all frames, of the exception that ends the search.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.enter_context(without_compiler())
        yield


@contextlib.contextmanager
def _as_it_was(call: ModuleCall) -> Iterator[None]:
    """Restore generators, autograd and autocast as they were at the call, and afterwards as they are now."""
    buffers = [(buffer, buffer.clone()) for buffer in call.module.buffers()]
    device_type, dtype, enabled = call.autocast
    here, cuda = torch.get_rng_state(), None
    if call.cuda_random_state is not None:
        cuda = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(call.cuda_random_state)
    torch.set_rng_state(call.random_state)
    try:
        with (
            torch.set_grad_enabled(call.grad_enabled),
            torch.autocast(device_type, dtype=dtype, enabled=enabled),
            run_quietly(),
        ):
            yield
    finally:
        torch.set_rng_state(here)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _place_of_node(node: Any) -> Place | None:
    """Return the user's line that made a node of autograd's, which anomaly detection has noted."""
    for text in reversed(node.metadata.get("traceback_", ())):
        for found in reversed(list(_FRAME.finditer(text))):
            if is_user_file(found["file"]):
                return found["file"], int(found["line"]), found["function"]
    return None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
