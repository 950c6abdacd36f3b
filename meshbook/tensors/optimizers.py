"""Steps of torch's optimizers on remote parameters: the ranks take all of a step, or nothing of it.

An optimizer's Python runs here and creates state: moments on the ranks, step counts here. When ranks did not take a
step, because a gradient could not be computed or an interrupt came first, the counts are restored and state that was
created in that step is dropped: the next step creates it again.

`torch.optim.Optimizer.step` is wrapped for classes that have an instance with a remote parameter; for local parameters
its behaviour does not change. `torch.amp.GradScaler` has the ranks' sentinels know when it scales a remote loss: it
skips steps whose gradients are not finite, and those are no fault.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from meshbook.controller.sigint import defer_sigint
from meshbook.errors import OperationFailed, UsageError
from meshbook.rank.tensors.operators import FLOAT, MESH, TENSOR
from meshbook.tensors import dispatch
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import FAULT_CALLBACKS, TensorEngine
from meshbook.tensors.remote import RemoteTensor

_serials = itertools.count(1)


class OptimizerStep:
    """A step, and the optimizer's state before it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.serial = next(_serials)
        self._optimizer = weakref.ref(optimizer)
        self._params_without_state = [
            weakref.ref(parameter) for parameter in _parameters(optimizer) if not optimizer.state.get(parameter)
        ]
        self._saved_scalars: list[tuple[dict[str, Any], str, Any]] = []
        scalars: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for state in optimizer.state.values():
            for name, value in state.items():
                if type(value) is torch.Tensor and value.numel() == 1:
                    scalars.append((state, name, value))
                elif type(value) in (int, float):
                    self._saved_scalars.append((state, name, value))
        # Copies of them, made by one operation where they are alike.
        if len({(value.dtype, value.shape, value.device) for _, _, value in scalars}) == 1:
            copies: Any = torch.stack([value for _, _, value in scalars]).unbind()
        else:
            copies = [value.clone() for _, _, value in scalars]
        self._saved_scalars += [(state, name, copy) for (state, name, _), copy in zip(scalars, copies, strict=True)]

    def undo(self) -> None:
        """See `op_queue.UndoableStep`."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for parameter in self._params_without_state:
            if (found := parameter()) is not None:
                optimizer.state.pop(found, None)
        with torch.no_grad():
            for state, name, before in self._saved_scalars:
                if name not in state:
                    continue
                if isinstance(before, torch.Tensor):
                    state[name].copy_(before)
                else:
                    state[name] = before


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _engine_of(optimizer: Optimizer) -> TensorEngine | None:
    """Return the engine of its parameters; None: they are local, or of several meshes, which cannot synchronize."""
    engines = {
        id(parameter.engine): parameter.engine
        for parameter in _parameters(optimizer)
        if isinstance(parameter, RemoteTensor)
    }
    return next(iter(engines.values())) if len(engines) == 1 else None


def ids_used_by_step(optimizer: Optimizer) -> tuple[list[int], int]:
    """Return the ids that a step reads or changes, and how many of them are gradients.

    These come first, then the parameters that have one, then their state.
    """
    stepped = [parameter for parameter in _parameters(optimizer) if isinstance(parameter.grad, RemoteTensor)]
    states = [value for parameter in stepped for value in optimizer.state.get(parameter, {}).values()]
    remote = [tensor for tensor in (*stepped, *states) if isinstance(tensor, RemoteTensor)]
    gradients: Any = [parameter.grad for parameter in stepped]
    return list(dict.fromkeys(tensor._handle.id for tensor in (*gradients, *remote))), len(stepped)


def _emit_begin_step(engine: TensorEngine, ids: list[int], num_gradients: int, serial: int) -> None:
    template = engine.templates.find_or_plan(
        ("begin_step", len(ids), num_gradients),
        engine.planner.plan_rank_function,
        "begin_step",
        ([TENSOR] * len(ids), num_gradients, MESH, FLOAT),
        communicates=True,
    )
    engine.emit([template.number, *ids, float(serial)], capture_call_site(3))


def _emit_end_step(engine: TensorEngine, serial: int) -> None:
    template = engine.templates.find_or_plan("end_step", engine.planner.plan_rank_function, "end_step", (FLOAT,))
    engine.emit([template.number, float(serial)], capture_call_site(3))


def _emit_scaling(engine: TensorEngine, scale: float = -1.0) -> None:
    template = engine.templates.find_or_plan("set_scaling", engine.planner.plan_rank_function, "set_scaling", (FLOAT,))
    engine.emit([template.number, scale], capture_call_site(3))


def _make_atomic(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's `step`, so that ranks take all of it or nothing."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        engine = _engine_of(self)
        # With a closure, a step contains forwards and backwards, and waits for values.
        if engine is None or args or kwargs.get("closure") is not None or engine.queue.is_in_step:
            return step(self, *args, **kwargs)
        engine.sender.check_open()
        engine.faults.check_ids(())  # undoes a step that ranks have not taken, before this one reads the state
        ids, num_gradients = ids_used_by_step(self)
        try:
            engine.faults.check_ids(ids)
        except OperationFailed:
            drop_lost_tensors(self, engine)
            raise
        with defer_sigint():
            optimizer_step = OptimizerStep(self)
            engine.queue.begin_step(optimizer_step)
            try:
                if getattr(self, "found_inf", None) is not None:  # of a scaler: a fused step skips by itself
                    _emit_scaling(engine)
                _emit_begin_step(engine, ids, num_gradients, optimizer_step.serial)
                result = step(self, **kwargs)
                _emit_end_step(engine, optimizer_step.serial)
            except BaseException:
                if engine.cancel_step():
                    optimizer_step.undo()
                else:
                    engine.queue.end_step(optimizer_step)
                raise
            engine.queue.end_step(optimizer_step)
        if engine.queue.is_full:
            engine.flush()
        engine.faults.check_ids(ids)
        return result

    stepped._meshbook_whole = True  # type: ignore[attr-defined]
    return stepped


def _wrap_step_method(kind: type[Optimizer]) -> None:
    step: Any = kind.step
    if not getattr(step, "_meshbook_whole", False):
        kind.step = _make_atomic(step)  # type: ignore[method-assign]


def drop_lost_tensors(optimizer: Optimizer, engine: TensorEngine) -> list[tuple[str, torch.Tensor]]:
    """Drop gradients and state that ranks could not compute: any use of them would raise.

    Returns:
        "gradient" or "state", and the parameter that it belonged to.
    """
    dropped = []
    for parameter in _parameters(optimizer):
        if _is_lost(parameter.grad, engine):
            parameter.grad = None
            dropped.append(("gradient", parameter))
        if any(_is_lost(value, engine) for value in optimizer.state.get(parameter, {}).values()):
            optimizer.state.pop(parameter)
            dropped.append(("state", parameter))
    return dropped


def _is_lost(value: Any, engine: TensorEngine) -> bool:
    return isinstance(value, RemoteTensor) and value.engine is engine and engine.faults.is_lost(value._handle.id)


# Optimizers with remote parameters.
_remote_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _after_fault(engine: TensorEngine) -> None:
    for optimizer in list(_remote_optimizers):
        drop_lost_tensors(optimizer, engine)


FAULT_CALLBACKS.append(_after_fault)

_original_add_param_group = Optimizer.add_param_group


@functools.wraps(_original_add_param_group)
def _patched_add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
    _original_add_param_group(self, param_group)
    if any(isinstance(parameter, RemoteTensor) for parameter in param_group["params"]):
        if isinstance(self, torch.optim.SparseAdam):
            raise UsageError(
                "SparseAdam steps by sparse gradients, and those of remote parameters are dense, also of an embedding "
                "with sparse=True; use torch.optim.Adam, or SGD or Adagrad, whose steps are the same by either"
            )
        _wrap_step_method(type(self))
        _remote_optimizers.add(self)


Optimizer.add_param_group = _patched_add_param_group  # type: ignore[method-assign]

_original_cast = Optimizer._process_value_according_to_param_policy


def _cast_to_mesh(
    param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[Any], key: Any = None
) -> torch.Tensor:
    """Return a tensor of a state that is loaded as the parameter's optimizer keeps it: beside the parameter."""
    cast = _original_cast(param, value, param_id, param_groups, key)
    is_like_it = key != "step" and cast.shape == param.shape
    if not is_like_it or not isinstance(param, RemoteTensor) or isinstance(cast, RemoteTensor):
        return cast
    uploaded: torch.Tensor = dispatch.upload(param.engine, cast.detach(), param.placements)
    return uploaded


Optimizer._process_value_according_to_param_policy = staticmethod(_cast_to_mesh)  # type: ignore[method-assign]

# ---------------------------------------------------------------------------------------------------------------------
# Scalers

# The meshes on which losses of a scaler's present step are.
_scaled_on: weakref.WeakKeyDictionary[Any, weakref.WeakSet[TensorEngine]] = weakref.WeakKeyDictionary()

_original_scale, _original_update = torch.amp.GradScaler.scale, torch.amp.GradScaler.update


@functools.wraps(_original_scale)
def _patched_scale(self: Any, outputs: Any) -> Any:
    losses = [outputs] if isinstance(outputs, torch.Tensor) else outputs if isinstance(outputs, (list, tuple)) else []
    for loss in losses if self.is_enabled() else ():
        if isinstance(loss, RemoteTensor):
            _scaled_on.setdefault(self, weakref.WeakSet()).add(loss.engine)
            _emit_scaling(loss.engine, self.get_scale())
    return _original_scale(self, outputs)


@functools.wraps(_original_update)
def _patched_update(self: Any, *args: Any, **kwargs: Any) -> None:
    _original_update(self, *args, **kwargs)
    for engine in _scaled_on.pop(self, ()):
        _emit_scaling(engine)


torch.amp.GradScaler.scale = _patched_scale  # type: ignore[method-assign]
torch.amp.GradScaler.update = _patched_update  # type: ignore[method-assign]
