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
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from meshbook.rank.interrupted_steps import reset_interrupted_step
from meshbook.rank.tensors import building, dtensor_patches
from meshbook.rank.tensors import modes as torch_modes
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.operators import FUNCTIONS, TENSOR


class ResidentModule:
    """A module on this rank."""

    def __init__(
        self,
        key: str,
        module: nn.Module,
        mesh: Any,
        axis: str,
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
    ) -> None:
        self.key, self.module, self.mesh, self.options = key, module, mesh, options
        self.axis = mesh.mesh_dim_names.index(axis)
        self.num_shards = mesh.size(self.axis)
        self.runs_locally, self.averages_gradients = (
            building.runs_locally(module, mesh),
            building.averages_gradients(module),
        )
        # FSDP2 casts by itself, where it gathers.
        self.autocast_dtype = dtype if not isinstance(module, FSDPModule) else None
        named = list(building.named_tensors(module))
        self.tensors: list[torch.Tensor] = []
        self.names: list[tuple[str, int, bool]] = []  # name, index in `tensors`, whether it is a parameter
        index_by_id: dict[int, int] = {}
        for name, tensor, is_parameter in named:
            if id(tensor) not in index_by_id:
                index_by_id[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            self.names.append((name, index_by_id[id(tensor)], is_parameter))
        is_parameter_at = {index: is_parameter for _, index, is_parameter in self.names}
        self.trainable_indices = [
            index for index, tensor in enumerate(self.tensors) if is_parameter_at[index] and tensor.requires_grad
        ]
        self._parameter_indices = [index for index in range(len(self.tensors)) if is_parameter_at[index]]
        self.own_placements = [building.as_dtensor(tensor, mesh).placements for tensor in self.tensors]
        # DDP's gradients are views of the buckets that its next backward writes to.
        self.reuses_gradients = bool(options.get("gradient_as_bucket_view"))
        self.rng_state_after = building.pop_rng_state()
        self.buffer_indices = [index for index in range(len(self.tensors)) if not is_parameter_at[index]]
        self._persistent_buffers, self.norm_buffer_indices = self._classify_buffers(index_by_id)
        # Number and result of the first forward of a kind, until the operation for it arrives.
        self.first_result: tuple[int, list[Any]] | None = None

    def _classify_buffers(self, index_by_id: dict[int, int]) -> tuple[list[tuple[dict[str, Any], str, int]], set[int]]:
        """Return the persistent buffers as (dict, name, index), and the indices of the statistics of torch's norms.

        No backward reads such statistics after a forward that changed them.
        """
        persistent, norm_indices = [], set()
        for submodule in self.module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is None or id(buffer) not in index_by_id:
                    continue
                if name not in submodule._non_persistent_buffers_set:
                    persistent.append((submodule._buffers, name, index_by_id[id(buffer)]))
                if isinstance(submodule, _NormBase):
                    norm_indices.add(index_by_id[id(buffer)])
        return persistent, norm_indices

    def check_buffers(self) -> None:
        """Check that forward did not rebind a buffer.

        Raises:
            RuntimeError: forward has assigned another tensor to a buffer, which is not visible outside.
        """
        for buffer_dict, name, index in self._persistent_buffers:
            if buffer_dict.get(name) is not self.tensors[index]:
                buffer_dict[name] = self.tensors[index]
                raise RuntimeError(
                    f"forward binds the buffer {name} to a new tensor (self.{name} = ...); the notebook has the one "
                    f"from before, and would not see it. Write into it instead: self.{name}.copy_(...)"
                )

    def broadcast_buffers(self, indices: Sequence[int]) -> None:
        """Copy these buffers from the first rank along the batch axis. Every rank takes part."""
        if not indices:
            return
        local = [self._local_tensor(index) for index in indices]
        # Summed with zeros, byte by byte: unlike a broadcast, this completes on no rank if one is missing.
        flat = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in local])
        is_first = self.mesh.get_local_rank(self.axis) == 0
        if not is_first:
            flat.zero_()
        dist.all_reduce(flat, group=self.mesh.get_group(self.axis))
        if is_first:
            return
        pieces = torch.split(flat, [buffer.numel() * buffer.element_size() for buffer in local])
        for index, buffer, piece in zip(indices, local, pieces, strict=True):
            received = piece.clone().view(buffer.dtype).reshape(buffer.shape)
            # A norm in eval mode saves its statistics for backward; `.data` hides the write from autograd.
            (buffer.data if index in self.norm_buffer_indices else buffer).copy_(received)

    def find_changed_buffers(self, before: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of buffers that a forward has changed, on this rank or another along the batch axis."""
        now = [self._local_tensor(index) for index in self.buffer_indices]
        changed = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
        if self.averages_gradients and changed:
            flags = torch.tensor(changed, dtype=torch.uint8, device=self.mesh.device_type)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.mesh.get_group(self.axis))
            changed = flags.tolist()
        return [index for index, is_changed in zip(self.buffer_indices, changed, strict=True) if is_changed]

    def clone_buffers(self) -> list[torch.Tensor]:
        return [self._local_tensor(index).clone() for index in self.buffer_indices]

    def _local_tensor(self, index: int) -> torch.Tensor:
        buffer = self.tensors[index]
        return buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def describe(self) -> dict[str, Any]:
        """Return what the controller must know, as plain data."""
        dtensors = [building.as_dtensor(tensor, self.mesh) for tensor in self.tensors]
        return {
            "names": self.names,
            "trained": self.trainable_indices,
            "tensors": [_tensor_meta(tensor) for tensor in dtensors],
            "local": self.runs_locally,
            "text": repr(self.module),
            "numbers": self.rng_state_after,
            "blocks": sum(isinstance(submodule, FSDPModule) for submodule in self.module.modules()) - 1,
        }

    def set_trainable(self, indices: Sequence[int]) -> None:
        """Let exactly these parameters get gradients; the controller, with the optimizer, decides what is frozen."""
        if list(indices) == self.trainable_indices:
            return
        self.trainable_indices = list(indices)
        for index in self._parameter_indices:
            self.tensors[index].requires_grad_(index in indices)
        for submodule in self.module.modules():
            if isinstance(submodule, FSDPModule):  # gathered parameters change when they are gathered again
                submodule.reshard()
        # DDP checks requires_grad only in its constructor.
        if isinstance(self.module, DistributedDataParallel) and indices:
            self.module = building.wrap_ddp(self.module.module, self.mesh, self.axis, self.options)

    @contextlib.contextmanager
    def clean_up_on_error(self) -> Iterator[None]:
        """Clean up after a forward or a backward that fails.

        Neither gathered parameters nor a gradient that the next backward would add to may remain. An interrupt may have
        arrived on some ranks only: what they gathered is reset on all ranks together, when their groups are formed
        again (`ProcessGroups.call_ended`).
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                reset_interrupted_step(self.module)
            for tensor in self.tensors:
                tensor.grad = None
            if isinstance(error, RuntimeError) and "`find_unused_parameters=True`" in str(error):
                raise RuntimeError(
                    "a parameter got no gradient in the step before; where that is as it should be: "
                    f'meshbook.distribute(..., strategy="ddp", find_unused_parameters=True). {error}'
                ) from error
            raise

    def placements_on_axis(self, placement: Placement) -> list[Placement]:
        """Return the placements with this one on the batch axis and Replicate on every other."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        placements[self.axis] = placement
        return placements


RESIDENT_MODULES: weakref.WeakValueDictionary[str, ResidentModule] = weakref.WeakValueDictionary()


def build_resident(
    key: str,
    source: Any,
    strategy: Any,
    dtype: str | None,
    mesh: Any,
    axis: str,
    rng_state: Any,
    options: Mapping[str, Any],
    modes: torch_modes.Modes,
) -> ResidentModule:
    """Build the module here; it exists as long as the controller retains the returned object."""
    kind = None if dtype is None else getattr(torch, dtype)
    with torch_modes.apply_modes(modes):
        module = building.build(source, strategy, kind, mesh, axis, rng_state, options)
    resident = RESIDENT_MODULES[key] = ResidentModule(key, module, mesh, axis, kind, options)
    return resident


def describe(resident: ResidentModule) -> dict[str, Any]:
    return resident.describe()


def _find_resident(key: str) -> ResidentModule:
    found = RESIDENT_MODULES.get(key)
    if found is None:
        raise RuntimeError("this module is gone from the ranks: what meshbook.distribute gave was let go of")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Operations


def module_tensors(key: str) -> list[torch.Tensor]:
    """Return the module's parameters and buffers with the same storage, and a lifetime token as last tensor.

    The token retains the module until all operations issued before its release have run; the controller's own handle is
    released ahead of them.
    """
    resident = _find_resident(key)
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
    training: bool,
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
        _find_resident(key).set_trainable(trainable_indices)
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
    training: bool,
    autocast_dtype: str | None,
    inputs_with_grad: Sequence[int] | None,
    trainable_indices: Sequence[int] | None,
    mutated_buffers: Sequence[int],
    seed: float,
    args: Any,
    kwargs: Any,
) -> dict[str, Any]:
    """Run the first forward of a kind; its outputs stay here until `module_first_result` fetches them by this number.

    Returns:
        As plain data: which tensors it returns, whether it draws random numbers, which buffers it changes.
    """
    resident = _find_resident(key)
    if trainable_indices is not None:
        resident.set_trainable(trainable_indices)
    before = resident.clone_buffers()
    with torch.no_grad(), torch_modes.apply_modes(modes):
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
    return description | {"tensors": [_tensor_meta(tensor) for tensor in outputs], "changed": changed}


def module_first_result(key: str, number: float) -> list[Any]:
    """Return and clear the outputs of `module_first`."""
    resident = _find_resident(key)
    first_result, resident.first_result = resident.first_result, None
    if first_result is None or first_result[0] != int(number):
        raise RuntimeError("what this forward gave is gone: a Stop came in between; call the module again")
    return first_result[1]


def _tensor_meta(tensor: Any) -> tuple[Any, ...]:
    """Return what the controller plans with: shape, stride, dtype, placements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), tuple(tensor.stride()), dtype, tuple(tensor.placements)


def _forward(
    key: str,
    training: bool,
    autocast_dtype: str | None,
    inputs_with_grad: Sequence[int] | None,
    mutated_buffers: Sequence[int],
    seed: float | None,
    args: Any,
    kwargs: Any,
    *,
    is_first: bool = False,
) -> tuple[list[Any], dict[str, Any]]:
    resident = _find_resident(key)
    module = resident.module
    if module.training != training:
        module.train(training)
    inputs: list[torch.Tensor] = []
    input_placements: list[list[Placement]] = []
    is_sharded = False
    number = -1

    def to_own_input(leaf: Any) -> Any:
        nonlocal is_sharded, number
        if not isinstance(leaf, DTensor):
            return leaf
        number += 1
        if resident.runs_locally:
            is_sharded = is_sharded or leaf.placements[resident.axis].is_shard()
            own_input, placements = _local_rows(resident, leaf, number)
        else:
            own_input, placements = leaf.detach(), list(leaf.placements)
        if inputs_with_grad is not None and number in inputs_with_grad:
            own_input = own_input.detach().requires_grad_()
            inputs.append(own_input)
            input_placements.append(placements)
        return own_input

    args, kwargs = pytree.tree_map(to_own_input, (args, kwargs))
    device = resident.mesh.device_type
    dtype = getattr(torch, autocast_dtype) if autocast_dtype is not None else resident.autocast_dtype
    autocast_context = torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()
    rng_context: Any = contextlib.nullcontext()
    if seed is not None:  # different rows draw different numbers, ranks with the same rows draw the same
        shard_index = resident.mesh.get_local_rank(resident.axis) if is_sharded else 0
        rng_context = dtensor_patches.fork_rng_with_seed(dtensor_patches.mix_seed(int(seed), shard_index))
    buffers_to_copy = mutated_buffers if resident.averages_gradients else ()
    buffers_after_backward = (
        [shard_index for shard_index in buffers_to_copy if shard_index not in resident.norm_buffer_indices]
        if inputs_with_grad is not None
        else []
    )
    uses_rng = False
    with resident.clean_up_on_error():
        if buffers_to_copy and not (isinstance(module, DistributedDataParallel) and module.broadcast_buffers):
            resident.broadcast_buffers(buffers_to_copy)
        with torch.set_grad_enabled(inputs_with_grad is not None), autocast_context, rng_context:
            rng_states = [source.get_state() for source in dtensor_patches.generators()] if is_first else []
            result = module(*args, **kwargs)
            if is_first:
                uses_rng = not all(
                    map(torch.equal, rng_states, (source.get_state() for source in dtensor_patches.generators()))
                )
        resident.check_buffers()
        if training:
            resident.broadcast_buffers(
                [shard_index for shard_index in buffers_to_copy if shard_index not in buffers_after_backward]
            )
    flat = pytree.tree_leaves(result)
    outputs: list[Any] = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    if resident.runs_locally:  # DTensors of a submesh
        outputs = [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
    if unsupported := [leaf for leaf in flat if not isinstance(leaf, (torch.Tensor, int, float, str, type(None)))]:
        raise TypeError(
            f"the module's forward gave a {type(unsupported[0]).__name__}, in which tensors cannot be told; return "
            "tensors, or tuples, lists and dicts of them"
        )
    results: list[Any] = []
    output_placements: list[list[Placement] | None] = []
    for output in outputs:
        if isinstance(output, DTensor):
            results.append(output.detach())
            output_placements.append(None)
            continue
        placements = resident.placements_on_axis(_output_placement(output, is_sharded))
        results.append(DTensor.from_local(output.detach(), resident.mesh, placements, run_check=False))
        output_placements.append(placements)
    description = {
        "result": pytree.tree_map(lambda leaf: TENSOR if isinstance(leaf, torch.Tensor) else leaf, result),
        "differentiable": [output.is_floating_point() or output.is_complex() for output in outputs],
        "draws": uses_rng,
    }
    if inputs_with_grad is None:
        return results, description
    graph_token = torch.empty(0, device=resident.mesh.device_type)
    scale = float(resident.num_shards) if resident.runs_locally and is_sharded else 1.0
    graph_token._meshbook_graph = _SavedForward(  # type: ignore[attr-defined]
        outputs, output_placements, inputs, input_placements, scale, buffers_after_backward if training else ()
    )
    return [*results, graph_token], description


def _local_rows(resident: ResidentModule, leaf: DTensor, at: int) -> tuple[torch.Tensor, list[Placement]]:
    """Return this rank's rows of an input, or all of it."""
    placement = leaf.placements[resident.axis]
    if placement.is_shard() and not resident.averages_gradients:
        axis = resident.mesh.mesh_dim_names[resident.axis]
        raise ValueError(
            f"input {at} is cut over {axis}, over which this module's gradients are not averaged; give whole inputs, "
            f"or have your strategy call fully_shard(module, mesh=mesh[{axis!r}]) too"
        )
    if placement.is_shard() and not placement.is_shard(0):
        raise ValueError(
            f"input {at} is cut along dim {placement.dim} over {resident.mesh.mesh_dim_names[resident.axis]}; this "
            "module works on rows (dim 0): redistribute it with Shard(0)"
        )
    if placement.is_shard() and leaf.shape[0] % resident.num_shards:
        raise ValueError(
            f"input {at} has {leaf.shape[0]} rows, which cannot be cut evenly over "
            f"{resident.mesh.mesh_dim_names[resident.axis]}={resident.num_shards}; drop the last ones or pad it"
        )
    placements = resident.placements_on_axis(Shard(0) if placement.is_shard() else Replicate())
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


def _output_placement(output: torch.Tensor, is_sharded: bool) -> Placement:
    """Return the placement of the ranks' outputs as one tensor: rows of it or, for a scalar, their mean."""
    if not is_sharded:
        return Replicate()
    return Shard(0) if output.dim() else Partial("avg")


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
    resident = _find_resident(key)
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
    resident = _find_resident(key)
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
            is_mean = placements[resident.axis].is_partial()
            grad_placements = resident.placements_on_axis(Replicate()) if is_mean else placements
            grad = _local_tensor_at(grad, grad_placements)
            if saved.grad_scale != 1.0 and not is_mean:  # a mean's gradient is divided by their number already
                grad = grad * saved.grad_scale
        outputs.append(output)
        incoming.append(grad)
    # Until all gradients are popped: one that remains would be added to the next step's.
    with resident.clean_up_on_error():
        with torch.enable_grad():
            torch.autograd.backward(outputs, incoming)
        resident.broadcast_buffers(saved.buffer_indices)
        return _pop_input_gradients(resident, saved), _pop_parameter_gradients(resident)


def _pop_input_gradients(resident: ResidentModule, saved: _SavedForward) -> list[Any]:
    inputs = []
    for tensor, placements in zip(saved.inputs, saved.input_placements, strict=True):
        grad, tensor.grad = tensor.grad, None
        grad = torch.zeros_like(tensor) if grad is None else grad
        if not isinstance(grad, DTensor):
            grad = grad / saved.grad_scale if saved.grad_scale != 1.0 else grad
            is_sharded = placements[resident.axis].is_shard()
            grad_placements = (
                placements if is_sharded or saved.grad_scale == 1.0 else resident.placements_on_axis(Partial())
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
