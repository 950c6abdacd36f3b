"""A module that lives on this rank: its tensors, and what keeps its buffers and gradients right on all ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import UsageError, message_of, repr_of
from meshbook.rank.process_groups.interrupted_steps import reset_interrupted_step
from meshbook.rank.state.modules import attributes_of, extra_states_of, load_attributes, reshard
from meshbook.rank.tensors import building, pipeline, watching
from meshbook.rank.tensors import modes as torch_modes
from meshbook.rank.tensors.blocks import block_names
from meshbook.rank.tensors.dtensor_mode import DTensorMode
from meshbook.rank.tensors.strategies import Plan

# What a forward runs in: whether the module trains and, if some parts are in the other mode, their names.
Modes = bool | tuple[bool, tuple[str, ...]]

# A part of a module: its name, its classes from its own on (module, name), whether it trains, and its attributes.
PartDescription = tuple[str, list[tuple[str, str]], bool, dict[str, Any]]

_UNUSED_ADVICE = 'meshbook.distribute(..., strategy="ddp", find_unused_parameters=True)'

# In place of an attribute's value that is not sent.
ELSEWHERE = "meshbook: on the ranks"


class ResidentModule:
    """A module on this rank."""

    def __init__(
        self,
        key: str,
        built: building.Built,
        strategy: building.Strategy,
        mesh: Any,
        batch_axes: Sequence[str],
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
    ) -> None:
        module = built.module
        self.key, self.module, self.mesh, self.options = key, module, mesh, options
        self.axes = [mesh.mesh_dim_names.index(axis) for axis in batch_axes]  # those that batches are cut over
        self.num_shards = math.prod(mesh.size(axis) for axis in self.axes)
        self.pipelines = pipeline.pipelines_of(module)
        self.runs_locally = building.runs_locally(module, strategy, mesh)
        self.averages_gradients = building.averages_gradients(module) or bool(self.pipelines and self.axes)
        self.is_compiled = isinstance(strategy, Plan) and strategy.compile_backend is not None
        self.tp_axis = strategy.tp if isinstance(strategy, Plan) else None
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
        self.states_after, self.cut, self.checks = built.states_after, built.cut, built.checks
        self.buffer_indices = [index for index in range(len(self.tensors)) if not is_parameter_at[index]]
        self._persistent_buffers, self.norm_buffer_indices = self._classify_buffers(index_by_id)
        self.recipe: tuple[Any, ...] = ()  # what it was built from, for a rank that is replaced
        # Number and result of the first forward of a kind, until the operation for it arrives.
        self.first_result: tuple[int, list[Any]] | None = None
        self.graph_of_last_forward: Any = None  # until its backward
        self._modes: Modes | None = None  # of the last forward

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
        """Copy these buffers from the first rank along the batch axes. Every rank takes part."""
        if not indices:
            return
        local = [self._local_tensor(index) for index in indices]
        # Summed with zeros, byte by byte: unlike a broadcast, this completes on no rank if one is missing.
        flat = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in local])
        is_first = self.shard_index == 0
        if not is_first:
            flat.zero_()
        for axis in self.axes:
            dist.all_reduce(flat, group=self.mesh.get_group(axis))
        if is_first:
            return
        pieces = torch.split(flat, [buffer.numel() * buffer.element_size() for buffer in local])
        for index, buffer, piece in zip(indices, local, pieces, strict=True):
            received = piece.clone().view(buffer.dtype).reshape(buffer.shape)
            # A norm in eval mode saves its statistics for backward; `.data` hides the write from autograd.
            (buffer.data if index in self.norm_buffer_indices else buffer).copy_(received)

    def find_changed_buffers(self, before: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of buffers that a forward has changed, on this rank or another along the batch axes."""
        now = [self._local_tensor(index) for index in self.buffer_indices]
        changed = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
        if self.averages_gradients and changed:
            flags = torch.tensor(changed, dtype=torch.uint8, device=self.mesh.device_type)
            for axis in self.axes:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
            changed = flags.tolist()
        return [index for index, is_changed in zip(self.buffer_indices, changed, strict=True) if is_changed]

    @property
    def broadcasts_buffers_itself(self) -> bool:
        return isinstance(self.module, DistributedDataParallel) and bool(self.module.broadcast_buffers)

    def clone_buffers(self) -> list[torch.Tensor]:
        return [self._local_tensor(index).clone() for index in self.buffer_indices]

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that get gradients, by the first of their names, in the module's order."""
        names = {index: name for name, index, _ in reversed(self.names)}
        return {names[index]: self.tensors[index] for index in self.trainable_indices}

    def _local_tensor(self, index: int) -> torch.Tensor:
        buffer = self.tensors[index]
        return buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def describe(self) -> dict[str, Any]:
        """Return what the controller must know, as plain data."""
        dtensors = [building.as_dtensor(tensor, self.mesh) for tensor in self.tensors]
        return {
            "names": self.names,
            "trained": self.trainable_indices,
            "parts": [_part(*named) for named in building.inner_module(self.module).named_modules(None, "", False)],
            "tensors": [tensor_meta(tensor) for tensor in dtensors],
            "local": self.runs_locally,
            "text": repr_of(self.module),
            "random_states": self.states_after,
            "device": self.mesh.device_type,
            "block_names": block_names(building.inner_module(self.module)),
            "cut": self.cut,
            "unchecked": [check.name for check in self.checks],
            "blocks": sum(isinstance(submodule, FSDPModule) for submodule in self.module.modules()) - 1,
        }

    def prepare_backward(self, graph: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Have DDP average the gradients of this backward too, where it is not that of the last forward.

        A forward of DDP prepares for one backward; one that comes after it would leave each rank its own gradients.
        """
        prepared, self.graph_of_last_forward = self.graph_of_last_forward is graph, None
        if isinstance(self.module, DistributedDataParallel) and not prepared:
            searched = self.module.find_unused_parameters and not self.module.static_graph
            self.module.reducer._rebuild_buckets()  # raises if a gradient is missing in the backward before
            self.module.reducer.prepare_for_backward(list(outputs) if searched else [])

    def check_gradients(self) -> None:
        """Check that DDP has averaged all gradients of the backward that has just run.

        Raises:
            RuntimeError: a parameter got none, and so those beside it are each rank's own. DDP says so a step later.
        """
        module = self.module
        if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters or module.static_graph:
            return
        if missing := [name for name, parameter in self.named_parameters().items() if parameter.grad is None]:
            names = f"{', '.join(missing[:4])}{', …' if missing[4:] else ''}"
            raise RuntimeError(
                f"{names} got no gradient, and DDP averages no gradients beside one that is missing; where that is as "
                f"it should be: {_UNUSED_ADVICE}; or freeze them: requires_grad_(False)"
            )

    def average_gradients(self) -> None:
        """Average the gradients over the batch axes, where torch has not done it in backward: after a pipeline's."""
        for axis in self.axes if self.pipelines else ():
            pipeline.average_gradients(self.tensors, self.mesh.get_group(axis))

    def rng_states(self) -> list[torch.Tensor]:
        """Return what tells whether random numbers were drawn: the generators' states, and how often stages drew."""
        return [*pipeline.rng_states(), torch.tensor([chain.num_draws for chain in self.pipelines])]

    def prepare_forward(self, modes: Modes) -> bool:
        """Have the module and its parts train or not; return whether any part trains.

        What FSDP2 has gathered for an earlier forward without a backward is dropped: parameters may have changed since.
        """
        reshard(self.module)
        training, others = modes if isinstance(modes, tuple) else (modes, ())
        if modes != self._modes or self.module.training != training:
            self._modes = modes
            self.module.train(training)
            for name in others:
                building.inner_module(self.module).get_submodule(name).training = not training
        return training or bool(others)

    def set_trainable(self, indices: Sequence[int]) -> None:
        """Let exactly these parameters get gradients; the controller, with the optimizer, decides what is frozen."""
        if list(indices) == self.trainable_indices:
            return
        self.trainable_indices = list(indices)
        for index in self._parameter_indices:
            self.tensors[index].requires_grad_(index in indices)
        reshard(self.module)  # gathered parameters change when they are gathered again
        # DDP checks requires_grad only in its constructor.
        if isinstance(self.module, DistributedDataParallel) and indices:
            self.module = building.wrap_ddp(self.module.module, self.mesh, self.axes[0], self.options)

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
            if isinstance(error, RuntimeError) and "`find_unused_parameters=True`" in message_of(error):
                text = (
                    f"a parameter got no gradient in the step before; where that is as it should be: {_UNUSED_ADVICE}"
                )
                raise RuntimeError(f"{text}. {error}") from error
            if isinstance(error, AssertionError) and _is_raised_by_dtensor(error) and not self.runs_locally:
                raise TypeError(
                    'under "replicate" a module computes with DTensors, and one was written into a tensor that the '
                    'module has made itself, out = torch.zeros(...): make it by x.new_zeros(...), or use strategy="ddp"'
                ) from error
            raise

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Run the module's code. With DTensors, a tensor that the code makes itself counts as replicated."""
        with watching.in_module():
            if self.runs_locally:
                yield
                return
            with implicit_replication(), DTensorMode():
                yield

    def copy_state_to(self, other: ResidentModule) -> None:
        """Give a module of the same structure the extra state, numbers and texts of this one's submodules."""
        own, twin = building.inner_module(self.module), building.inner_module(other.module)
        load_attributes(twin, attributes_of(own), copy.deepcopy(extra_states_of(own)))

    @property
    def shard_index(self) -> int:
        """Which rows of a batch this rank has, of `num_shards` parts."""
        index = 0
        for axis in self.axes:
            index = index * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        return index

    def placements_on_axes(self, placement: Placement) -> list[Placement]:
        """Return the placements with this one on the batch axes and Replicate on every other."""
        return [placement if axis in self.axes else Replicate() for axis in range(self.mesh.ndim)]

    def is_cut_into_rows(self, placements: Sequence[Placement]) -> bool:
        return any(placements[axis].is_shard() for axis in self.axes)

    def axes_text(self) -> str:
        """Return `dp=2`, or `node=2 x gpu=4` (8)."""
        return " x ".join(f"{self.mesh.mesh_dim_names[axis]}={self.mesh.size(axis)}" for axis in self.axes)


def _is_raised_by_dtensor(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith("torch.distributed.tensor")


def _part(name_of_part: str, module: nn.Module) -> PartDescription:
    """Describe a part for the controller.

    Values are those of torch's own modules, which no forward changes.
    """
    bases = type(module).__mro__
    classes = [kind for kind in bases if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule)]
    attributes: dict[str, Any] = {"forward": ELSEWHERE}
    for kind in classes:
        if not _is_torchs(kind):
            attributes |= {name: ELSEWHERE for name in vars(kind) if not name.startswith("__")}
    for name, value in vars(module).items():
        if name not in _MODULE_ATTRIBUTES:
            is_known = _is_torchs(classes[0]) and type(value) in (int, float, bool, str, tuple)
            attributes[name] = value if is_known else ELSEWHERE
    for held in (module._parameters, module._buffers):
        attributes |= {name: None for name, tensor in held.items() if tensor is None}
    return name_of_part, [(kind.__module__, kind.__qualname__) for kind in classes], module.training, attributes


_MODULE_ATTRIBUTES = vars(nn.Module()).keys()


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


RESIDENT_MODULES: weakref.WeakValueDictionary[str, ResidentModule] = weakref.WeakValueDictionary()


def build_resident(
    key: str,
    source: Any,
    strategy: Any,
    dtype: str | None,
    mesh: Any,
    batch_axes: Sequence[str],
    states: Mapping[str, Any],
    options: Mapping[str, Any],
    modes: torch_modes.Modes,
) -> ResidentModule:
    """Build the module here; it exists as long as the controller retains the returned object."""
    kind = None if dtype is None else getattr(torch, dtype)
    recipe = building.without_data(source), strategy, dtype, batch_axes, states, options, modes
    with torch_modes.apply_modes(modes):
        built = building.build(source, strategy, kind, mesh, states, options)
    resident = RESIDENT_MODULES[key] = ResidentModule(key, built, strategy, mesh, batch_axes, kind, options)
    resident.recipe = recipe
    return resident


def rebuild_resident(key: str, recipe: tuple[Any, ...], mesh: Any) -> ResidentModule:
    """Build the module that other ranks have by this recipe. Values of a module that was given as one are not set."""
    source, strategy, dtype, batch_axes, states, options, modes = recipe
    if isinstance(source, nn.Module):
        source.to_empty(device="cpu")
    return build_resident(key, source, strategy, dtype, mesh, batch_axes, states, options, modes)


def copy_resident(key: str, new_key: str, mesh: Any) -> ResidentModule:
    """Build another module by the recipe of this one. Values of its tensors are not set.

    Raises:
        UsageError: the recipe builds another module than before.
    """
    resident = find_resident(key)
    source, *rest = resident.recipe
    made = rebuild_resident(new_key, (building.without_data(source), *rest), mesh)
    if (made.names, made.own_placements) != (resident.names, resident.own_placements) or any(
        own.shape != other.shape or own.dtype != other.dtype
        for own, other in zip(made.tensors, resident.tensors, strict=True)
    ):
        raise UsageError("its factory gives another module than it gave before, so the module cannot be copied")
    resident.copy_state_to(made)
    return made


def find_resident(key: str) -> ResidentModule:
    found = RESIDENT_MODULES.get(key)
    if found is None:
        raise RuntimeError("this module is gone from the ranks: what meshbook.distribute gave was let go of")
    return found


def tensor_meta(tensor: Any) -> tuple[Any, ...]:
    """Return what the controller plans with: shape, stride, dtype, placements; None: of an object token."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
    return tuple(tensor.shape), tuple(tensor.stride()), dtype, placements
