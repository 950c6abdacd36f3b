"""Modules that live on the ranks: one operation runs the forward there, another the backward.

Inputs and outputs are tensors of the controller. A module that works on each rank's own rows (FSDP2, DDP) gets plain
tensors, and its outputs become rows of one tensor again; any other module gets and returns DTensors. On the rank a
small tensor, the *graph token*, retains what backward needs; the controller holds it as long as the graph may be used.

Gradients are the same as in one process: those of the loss of the complete batch. FSDP2 and DDP average over ranks what
should be a sum of the ranks' parts, so incoming gradients are multiplied by the number of ranks: exact, for powers of
two.

Each rank's forward updates buffers, such as a batch norm's running statistics, from its own rows. As with DDP, those of
the first rank count; they are copied to the other ranks, so that replicas stay equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from meshbook.rank.tensors import building, dtensor_patches, pretrained, watching
from meshbook.rank.tensors import modes as torch_modes
from meshbook.rank.tensors.compiled_blocks import graph_breaks
from meshbook.rank.tensors.cut_checks import run_with_first_call
from meshbook.rank.tensors.cut_styles import plain_layers
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.operators import FUNCTIONS, TENSOR
from meshbook.rank.tensors.resident_module import Modes, ResidentModule, find_resident, tensor_meta
from meshbook.rank.tensors.results import (
    ObjectThere,
    is_token,
    leaves_of,
    make_token,
    object_of,
    output_placement,
    stays,
)


def module_tensors(key: str) -> list[torch.Tensor]:
    """Return the module's parameters and buffers with the same storage, and a lifetime token as last tensor.

    The token retains the module until all operations issued before its release have run; the controller's own handle is
    released ahead of them.
    """
    resident = find_resident(key)
    lifetime_token = torch.empty(0, device=resident.mesh.device_type)
    lifetime_token._meshbook_resident = resident  # type: ignore[attr-defined]
    return [*(building.as_dtensor(tensor, resident.mesh) for tensor in resident.tensors), lifetime_token]


@dataclasses.dataclass
class _SavedForward:
    """What a forward stores for its backward."""

    outputs: list[Any]  # with autograd history, as the module returned them
    output_placements: list[list[Placement] | None]  # of local outputs: placements as seen by the controller
    inputs: list[torch.Tensor]  # those that require a gradient
    input_placements: list[list[Placement]]
    grad_scale: float
    buffer_indices: Sequence[int]  # buffers to copy after the backward


def module_forward(
    key: str,
    training: Modes,
    autocast_dtype: str | None,
    inputs_with_grad: Sequence[int] | None,
    trainable_indices: Sequence[int] | None,
    mutated_buffers: Sequence[int],
    expected_shapes: Any,
    seed: float | None,
    args: Any,
    kwargs: Any,
) -> list[Any]:
    """Run one forward.

    Args:
        autocast_dtype: the dtype of the controller's autocast; None: it has none.
        trainable_indices: indices of the parameters that get a gradient.
        mutated_buffers: indices of the buffers that forwards of this module were seen to change.
        inputs_with_grad: which tensors among the arguments require a gradient; None: run without a graph.
        expected_shapes: output shapes that the controller has assumed.
        seed: seed of its random numbers; None: it draws none.

    Returns:
        The tensors among the outputs, and the graph token last, if there is a graph.
    """
    if trainable_indices is not None:
        find_resident(key).set_trainable(trainable_indices)
    tensors, _ = _forward(key, training, autocast_dtype, inputs_with_grad, mutated_buffers, seed, args, kwargs)
    got = tuple(tuple(tensor.shape) for tensor in tensors[: len(expected_shapes)])
    if got != expected_shapes:
        raise RuntimeError(
            f"the module gave shapes {got} for inputs from which it gave {expected_shapes} before; what distribute "
            "runs must have output shapes that follow from its input shapes. meshbook.module_to_mesh has no such limit"
        )
    return tensors


def module_first(
    modes: torch_modes.Modes,
    key: str,
    number: int,
    training: Modes,
    autocast_dtype: str | None,
    inputs_with_grad: Sequence[int] | None,
    trainable_indices: Sequence[int] | None,
    mutated_buffers: Sequence[int],
    unchecked: Sequence[str],
    seed: float,
    args: Any,
    kwargs: Any,
) -> dict[str, Any]:
    """Run the first forward of a kind; its outputs stay here until `module_first_result` fetches them by this number.

    Args:
        unchecked: the modules with cut layers that have not been compared with whole ones yet.

    Returns:
        As plain data: which tensors it returns, whether it draws random numbers, which buffers it changes, which of
        `unchecked` were compared, and why torch has left parts of it uncompiled.
    """
    resident = find_resident(key)
    checks = [check for check in resident.checks if check.name in unchecked]
    watch_compiler: Any = graph_breaks if resident.is_compiled else contextlib.nullcontext
    if trainable_indices is not None:
        resident.set_trainable(trainable_indices)
    before = resident.clone_buffers()
    with (
        torch.no_grad(),
        torch_modes.apply_modes(modes),
        watch_compiler() as uncompiled,
        run_with_first_call(checks) as checked,
    ):
        tensors, description = _forward(
            key, training, autocast_dtype, inputs_with_grad, mutated_buffers, seed, args, kwargs, is_first=True
        )
        changed = resident.find_changed_buffers(before)
        if resident.averages_gradients:
            resident.broadcast_buffers(
                [index for index in changed if index in resident.norm_buffer_indices or inputs_with_grad is None]
            )
            if inputs_with_grad is not None:
                tensors[-1]._meshbook_graph.buffer_indices = [
                    index for index in changed if index not in resident.norm_buffer_indices
                ]
    resident.first_result = number, tensors
    outputs = tensors if inputs_with_grad is None else tensors[:-1]
    return description | {
        "tensors": [tensor_meta(tensor) for tensor in outputs],
        "changed": changed,
        "checked": checked,
        "uncompiled": uncompiled or [],
    }


def module_generate(
    modes: torch_modes.Modes, key: str, rng_state: torch.Tensor, unchecked: Sequence[str], args: Any, kwargs: Any
) -> tuple[Any, torch.Tensor, list[str]] | None:
    """Have the module generate from these inputs, which are whole on every rank.

    Args:
        rng_state: of the controller's generator.
        unchecked: the modules with cut layers that have not been compared with whole ones yet.

    Returns:
        On the first rank what the module gave, the state of the generator afterwards, and which of `unchecked` were
        compared.
    """
    resident = find_resident(key)
    inputs = _own_inputs(resident, (), args, kwargs)
    if inputs.rows:
        raise ValueError("generate takes whole inputs, not rows that are cut over the ranks: x.full_tensor()")
    module, checks = building.inner_module(resident.module), [one for one in resident.checks if one.name in unchecked]
    plain: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if resident.tp_axis is not None and resident.cut is not None and not resident.is_compiled and not checks:
        plain = plain_layers(module, resident.cut.styles, resident.mesh[resident.tp_axis])
    with (
        torch_modes.apply_modes(modes),
        resident.clean_up_on_error(),
        plain,
        _forward_context(resident, resident.autocast_dtype, None, inputs),
        run_with_first_call(checks) as checked,
    ):
        found = pretrained.generate(module, rng_state, inputs.args, inputs.kwargs)
    return (*found, checked) if torch.distributed.get_rank() == 0 else None


def module_save_pretrained(key: str, folder: str, options: dict[str, Any]) -> None:
    """Save the module as plain transformers reads it."""
    pretrained.save(building.inner_module(find_resident(key).module), folder, options)


def module_first_result(key: str, number: float) -> list[Any]:
    """Return and clear the outputs of `module_first`."""
    resident = find_resident(key)
    first_result, resident.first_result = resident.first_result, None
    if first_result is None or first_result[0] != int(number):
        raise RuntimeError("what this forward gave is gone: a Stop came in between; call the module again")
    return first_result[1]


@dataclasses.dataclass
class _OwnInputs:
    """The arguments of a forward as the module gets them."""

    args: Any = ()
    kwargs: Any = dataclasses.field(default_factory=dict)
    rows: set[int] = dataclasses.field(default_factory=set)  # here, of each input that is cut over the batch axes
    requiring_grad: list[torch.Tensor] = dataclasses.field(default_factory=list)
    placements: list[list[Placement]] = dataclasses.field(default_factory=list)  # of those that require a gradient


def _forward(
    key: str,
    training: Modes,
    autocast_dtype: str | None,
    inputs_with_grad: Sequence[int] | None,
    mutated_buffers: Sequence[int],
    seed: float | None,
    args: Any,
    kwargs: Any,
    *,
    is_first: bool = False,
) -> tuple[list[Any], dict[str, Any]]:
    resident = find_resident(key)
    any_training = resident.prepare_forward(training)
    inputs = _own_inputs(resident, inputs_with_grad or (), args, kwargs)
    dtype = getattr(torch, autocast_dtype) if autocast_dtype is not None else resident.autocast_dtype
    buffers_to_copy = mutated_buffers if resident.averages_gradients else ()
    buffers_after_backward: list[int] = []
    if inputs_with_grad is not None:
        buffers_after_backward = [index for index in buffers_to_copy if index not in resident.norm_buffer_indices]
    with resident.clean_up_on_error():
        if buffers_to_copy and not resident.broadcasts_buffers_itself:
            resident.broadcast_buffers(buffers_to_copy)
        with torch.set_grad_enabled(inputs_with_grad is not None), _forward_context(resident, dtype, seed, inputs):
            rng_states = resident.rng_states() if is_first else []
            result = resident.module(*inputs.args, **inputs.kwargs)
            uses_rng = is_first and not all(map(torch.equal, rng_states, resident.rng_states()))
        resident.check_buffers()
        if any_training:
            resident.broadcast_buffers([index for index in buffers_to_copy if index not in buffers_after_backward])
    outputs = _output_tensors(resident, leaves_of(result))
    results, output_placements = _wrap_outputs(resident, outputs, inputs.rows)
    description = {
        "result": pytree.tree_map(_placeholder_of, result),
        "differentiable": [_is_differentiable(output) for output in outputs],
        "draws": uses_rng,
    }
    if inputs_with_grad is None:
        return results, description
    graph_token = torch.empty(0, device=resident.mesh.device_type)
    scale = float(resident.num_shards) if resident.runs_locally and inputs.rows else 1.0
    graph_token._meshbook_graph = resident.graph_of_last_forward = _SavedForward(  # type: ignore[attr-defined]
        outputs,
        output_placements,
        inputs.requiring_grad,
        inputs.placements,
        scale,
        buffers_after_backward if any_training else (),
    )
    return [*results, graph_token], description


def _own_inputs(resident: ResidentModule, with_grad: Sequence[int], args: Any, kwargs: Any) -> _OwnInputs:
    """Convert the arguments to this rank's rows or to DTensors without history, as the module takes them."""
    inputs = _OwnInputs()
    numbers = itertools.count()

    def to_own_input(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        number = next(numbers)
        if not isinstance(leaf, DTensor):
            return object_of(leaf)
        if resident.runs_locally:
            own_input, placements = _local_rows(resident, leaf, number)
            if resident.is_cut_into_rows(leaf.placements):
                inputs.rows.add(len(own_input))
        else:
            own_input, placements = leaf.detach(), list(leaf.placements)
        if number in with_grad:
            own_input = own_input.detach().requires_grad_()
            inputs.requiring_grad.append(own_input)
            inputs.placements.append(placements)
        return own_input

    leaves_of((args, kwargs))  # dataclasses become nodes here too
    inputs.args, inputs.kwargs = pytree.tree_map(to_own_input, (args, kwargs))
    return inputs


@contextlib.contextmanager
def _forward_context(
    resident: ResidentModule, dtype: torch.dtype | None, seed: float | None, inputs: _OwnInputs
) -> Iterator[None]:
    """Apply autocast and the seed of a forward."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(resident.computing())
        if dtype is not None:
            stack.enter_context(torch.autocast(resident.mesh.device_type, dtype=dtype))
        if seed is not None:  # different rows draw different numbers, ranks with the same rows draw the same
            shard_index = resident.shard_index if inputs.rows else 0
            mixed = dtensor_patches.mix_seed(int(seed), shard_index)
            stack.enter_context(dtensor_patches.fork_rng_with_seed(mixed))
        yield


def _placeholder_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TENSOR
    return ObjectThere(type(leaf).__name__) if stays(leaf) else leaf


def _output_tensors(resident: ResidentModule, leaves: Sequence[Any]) -> list[Any]:
    """Return the tensors among what forward returned, and tokens of objects that stay here."""
    outputs: list[Any] = [
        make_token(leaf, resident.mesh.device_type) if stays(leaf) else leaf
        for leaf in leaves
        if stays(leaf) or isinstance(leaf, torch.Tensor)
    ]
    if resident.runs_locally:  # DTensors of a submesh
        return [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
    return list(map(dtensor_patches.without_strided_shards, outputs))


def _is_differentiable(output: torch.Tensor) -> bool:
    return not is_token(output) and (output.is_floating_point() or output.is_complex())


def _wrap_outputs(
    resident: ResidentModule, outputs: Sequence[Any], rows: Collection[int]
) -> tuple[list[Any], list[list[Placement] | None]]:
    """Return the outputs as DTensors without history, and the placements of those that were local."""
    results: list[Any] = []
    output_placements: list[list[Placement] | None] = []
    for output in outputs:
        if is_token(output) or isinstance(output, DTensor):
            results.append(output if is_token(output) else output.detach())
            output_placements.append(None)
            continue
        placements = resident.placements_on_axes(output_placement(output, rows))
        results.append(DTensor.from_local(output.detach(), resident.mesh, placements, run_check=False))
        output_placements.append(placements)
    return results, output_placements


def _local_rows(resident: ResidentModule, leaf: DTensor, at: int) -> tuple[torch.Tensor, list[Placement]]:
    """Return this rank's rows of an input, or all of it."""
    cut = [(axis, placement) for axis in resident.axes if (placement := leaf.placements[axis]).is_shard()]
    names = resident.mesh.mesh_dim_names
    for axis, placement in cut:
        if not resident.averages_gradients:
            raise ValueError(
                f"input {at} is cut over {names[axis]}, over which this module's gradients are not averaged; give "
                f"whole inputs, or have your strategy call fully_shard(module, mesh=mesh[{names[axis]!r}]) too"
            )
        if not placement.is_shard(0):
            raise ValueError(
                f"input {at} is cut along dim {placement.dim} over {names[axis]}; this module works on rows (dim 0): "
                "redistribute it with Shard(0)"
            )
    if cut and leaf.shape[0] % resident.num_shards:
        raise ValueError(
            f"input {at} has {leaf.shape[0]} rows, which cannot be cut evenly over {resident.axes_text()}; drop the "
            "last ones or pad it"
        )
    placements = resident.placements_on_axes(Shard(0) if cut else Replicate())
    return _local_tensor_at(leaf, placements), placements


def _local_tensor_at(tensor: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's local tensor at these placements; usually the tensor has them already."""
    if tensor.placements != tuple(placements):
        tensor = tensor.redistribute(placements=placements)
    return wait_local_tensor(tensor)


def _grad_like_parameter(grad: torch.Tensor, resident: ResidentModule, index: int) -> DTensor:
    """Return a gradient with its parameter's placements.

    It usually has them already, and each DTensor operation would cost tens of us.
    """
    placements = resident.own_placements[index]
    if type(grad) is DTensor and grad.placements == placements and grad.device_mesh == resident.mesh:
        return grad
    return building.as_dtensor(grad, resident.mesh).redistribute(placements=placements)


def module_backward(
    key: str, params_with_grad: Sequence[int], grads: Sequence[Any], output_indices: Sequence[int], graph_token: Any
) -> list[Any]:
    """Run one backward; return gradients of the inputs that require one, then of the parameters in `params_with_grad`.

    Args:
        params_with_grad: indices of parameters.
        grads: gradients of the outputs at `output_indices`.
    """
    computed = getattr(graph_token, "_meshbook_gradients", None)
    if computed is not None:
        del graph_token._meshbook_gradients
    inputs, grads_by_index = computed or _backward(key, grads, output_indices, graph_token)
    watching.gradients_given()
    resident = find_resident(key)
    unexpected = [
        index for index in resident.trainable_indices if (grads_by_index[index] is None) == (index in params_with_grad)
    ]
    if unexpected:
        names = {index: name for name, index, _ in reversed(resident.names)}
        raise RuntimeError(
            f"{', '.join(names[index] for index in unexpected[:4])}: got a gradient in one step and none in another, "
            "which distribute cannot follow; use meshbook.module_to_mesh, where autograd runs in the notebook"
        )
    return [*inputs, *(grads_by_index[index] for index in params_with_grad)]


def module_params_with_grad(
    modes: torch_modes.Modes, key: str, grads: Sequence[Any], output_indices: Sequence[int], graph_token: Any
) -> list[int]:
    """Run a backward and return the indices of parameters with a gradient; `module_backward` fetches its results."""
    with torch_modes.apply_modes(modes):
        inputs, grads_by_index = _backward(key, grads, output_indices, graph_token)
    graph_token._meshbook_gradients = inputs, grads_by_index
    return [index for index, grad in grads_by_index.items() if grad is not None]


def _backward(
    key: str, grads: Sequence[Any], output_indices: Sequence[int], graph_token: Any
) -> tuple[list[Any], dict[int, Any]]:
    resident = find_resident(key)
    saved: _SavedForward | None = getattr(graph_token, "_meshbook_graph", None)
    if saved is None:
        raise RuntimeError("this module's graph has been used by an earlier backward(); run its forward again")
    del graph_token._meshbook_graph
    outputs, incoming = [], []
    for at, grad in zip(output_indices, grads, strict=True):
        output, placements = saved.outputs[at], saved.output_placements[at]
        if output.grad_fn is None:
            continue
        if placements is None:
            grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in output.placements])
        else:
            is_mean = any(placement.is_partial() for placement in placements)
            grad_placements = resident.placements_on_axes(Replicate()) if is_mean else placements
            grad = _local_tensor_at(grad, grad_placements)
            if saved.grad_scale != 1.0 and not is_mean:  # a mean's gradient is divided by their number already
                grad = grad * saved.grad_scale
        outputs.append(output)
        incoming.append(grad)
    # Until all gradients are popped: one that remains would be added to the next step's.
    with resident.clean_up_on_error():
        resident.prepare_backward(saved, outputs)
        with resident.computing(), torch.enable_grad():
            torch.autograd.backward(outputs, incoming)
        resident.check_gradients()
        resident.average_gradients()
        watching.backward_ended(resident.named_parameters(), [tensor.grad for tensor in saved.inputs])
        resident.broadcast_buffers(saved.buffer_indices)
        return _pop_input_gradients(resident, saved), _pop_parameter_gradients(resident)


def _pop_input_gradients(resident: ResidentModule, saved: _SavedForward) -> list[Any]:
    inputs = []
    for tensor, placements in zip(saved.inputs, saved.input_placements, strict=True):
        grad, tensor.grad = tensor.grad, None
        grad = torch.zeros_like(tensor) if grad is None else grad
        if not isinstance(grad, DTensor):
            grad = grad / saved.grad_scale if saved.grad_scale != 1.0 else grad
            is_sharded = resident.is_cut_into_rows(placements)
            grad_placements = (
                placements if is_sharded or saved.grad_scale == 1.0 else resident.placements_on_axes(Partial())
            )
            grad = DTensor.from_local(grad, resident.mesh, grad_placements, run_check=False)
        inputs.append(grad.redistribute(placements=placements))
    return inputs


def _pop_parameter_gradients(resident: ResidentModule) -> dict[int, Any]:
    """Pop the gradients of the trainable parameters, by index."""
    found: dict[int, Any] = {}
    for index in resident.trainable_indices:
        parameter = resident.tensors[index]
        grad, parameter.grad = parameter.grad, None
        if grad is not None and resident.reuses_gradients:
            grad = grad.clone()
        found[index] = None if grad is None else _grad_like_parameter(grad, resident, index)
    return found


for _function in (module_tensors, module_forward, module_first_result, module_backward):
    FUNCTIONS[_function.__name__] = _function
