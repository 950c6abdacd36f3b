"""Runs an operation on DTensors without data, on a fake mesh of the same size whose groups transfer nothing."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, _tp_conv
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import dtensor_patches
from meshbook.rank.tensors.operators import MESH, ReplicatedOp, name_of
from meshbook.rank.tensors.schemas import mutated_inputs, written_leaves
from meshbook.rank.tensors.shards import dense_strides, local_shape
from meshbook.tensors.specs import TensorSpec

aten = torch.ops.aten

_group_numbers = itertools.count()

# Operations whose output shape torch cannot derive without data, and the index of the argument that has that shape.
_SHAPE_OF_INPUT = {
    aten.multi_margin_loss_backward.default: 1, aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1, aten._sample_dirichlet.default: 0, aten._dirichlet_grad.default: 0,
    aten._standard_gamma.default: 0, aten._standard_gamma_grad.default: 1, aten.binomial.default: 0,
    aten.poisson.default: 0,
}  # fmt: skip


class OwnGeneratorError(NotImplementedError):
    """A random operation with a torch.Generator of its own, which DTensor would not draw from."""


@dataclass
class MetaRun:
    """An operation on tensors without data.

    Attributes:
        empties: for each input, the tensor that stood for it, by the input's `id`.
        communicates: whether DTensor called a collective.
        missed_mutation: whether the operation changed a copy or a shard of an argument that it should change. DTensor
            brings operands to common placements first.
    """

    empties: dict[int, Any]
    results: Any
    communicates: bool = False
    missed_mutation: bool = False

    @property
    def dtensors(self) -> list[DTensor]:
        return [leaf for leaf in pytree.tree_leaves(self.results) if isinstance(leaf, DTensor)]

    @property
    def new_dtensors(self) -> list[DTensor]:
        """Those of the results that are no inputs."""
        input_ids = set(map(id, self.empties.values()))
        return [leaf for leaf in self.dtensors if id(leaf) not in input_ids]


class MetaRunner:
    """Runs operations on tensors without data, for one mesh."""

    def __init__(self, axes: MeshAxes) -> None:
        self.axes, self.mesh = axes, _fake_device_mesh(axes)

    def run(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> MetaRun:
        """Run an operation on DTensors of the placements of its inputs.

        Raises:
            OwnGeneratorError: it has a generator of its own.
            Exception: torch's own.
        """
        empties: dict[int, Any] = {}

        def empty_of(leaf: Any) -> Any:
            spec = getattr(leaf, "_spec", None)
            if spec is not None:
                if id(leaf) not in empties:
                    empties[id(leaf)] = self._empty_tensor(spec, spec.placements)
                return empties[id(leaf)]
            if leaf is MESH:
                return self.mesh
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            if isinstance(leaf, torch.Generator):
                raise OwnGeneratorError(
                    f"{name_of(function)} with a generator of its own: ranks draw from the seed that torch.manual_seed "
                    "sets here; leave generator= out"
                )
            return leaf

        dtensor_patches.include_scalars_in_cache_key(function)
        observer = _OpObserver(function)
        # Dispatch modes of the user, such as `mesh.activate()`, must not see these operations.
        with _disable_current_modes(), torch.no_grad(), dtensor_patches.suppress_warnings(), _as_rank_0(), observer:
            empty_args, empty_kwargs = pytree.tree_map(empty_of, (args, kwargs))
            results = function(*empty_args, **empty_kwargs)
        mutated = [empties[id(inputs[at])] for at in mutated_inputs(function, args, kwargs, inputs)]
        return MetaRun(empties, results, observer.communicates, observer.missed_mutation(mutated))

    def run_replicated(self, operator: ReplicatedOp, args: Any, kwargs: Any, inputs: Sequence[Any]) -> MetaRun:
        """Run an operation that every rank runs on replicated operands."""
        replicated = (Replicate(),) * self.mesh.ndim
        empties = {id(tensor): self._empty_tensor(tensor._spec, replicated) for tensor in inputs}
        with _disable_current_modes(), torch.no_grad(), dtensor_patches.suppress_warnings():
            empty_args, empty_kwargs = pytree.tree_map(lambda leaf: empties.get(id(leaf), leaf), (args, kwargs))
            shaped_as = _SHAPE_OF_INPUT.get(operator.function)
            if shaped_as is None:
                return MetaRun(empties, operator(*empty_args, **empty_kwargs))
            return MetaRun(empties, torch.empty_like(empty_args[shaped_as]))

    def _empty_tensor(self, spec: TensorSpec, placements: tuple[Any, ...] | None) -> torch.Tensor:
        """Return a tensor of this spec without data; a DTensor, unless the placements are None."""
        if placements is None:
            return _plain_tensor(spec)
        local = local_shape(spec.shape, placements, self.axes, self.axes.ranks[0])
        strides = spec.stride if local == tuple(spec.shape) else dense_strides(local, spec)
        local_tensor = torch.empty_strided(local, strides, dtype=spec.dtype, device="meta")
        meta = TensorMeta(torch.Size(spec.shape), tuple(spec.stride), spec.dtype)
        dtensor_spec = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return DTensor(local_tensor, dtensor_spec, requires_grad=False)  # type: ignore[no-untyped-call]


def run_on_plain_tensors(function: Any, args: Any, kwargs: Any) -> Any:
    """Return what the operation makes in plain torch, on tensors of the global shapes without data.

    Raises:
        Exception: torch's own.
    """

    def plain(leaf: Any) -> Any:
        spec = getattr(leaf, "_spec", None)
        if spec is not None:
            return _plain_tensor(spec)
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    with _disable_current_modes(), torch.no_grad():
        plain_args, plain_kwargs = pytree.tree_map(plain, (args, kwargs))
        return function(*plain_args, **plain_kwargs)


def storage_id(tensor: Any) -> int:
    """Return a number that is equal for tensors of the same local storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found: int = local.untyped_storage()._cdata
    return found


def _plain_tensor(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


class _OpObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects collectives, and writes of local operations."""

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False
        self._function = function
        self._mutated_storages: list[tuple[int, torch.Size]] = []  # storages and shapes that local operations wrote to

    def missed_mutation(self, tensors: Sequence[Any]) -> bool:
        """Whether an operation did not change one of these tensors completely, although it should."""
        expected = [
            (storage_id(tensor), tensor._local_tensor.shape) for tensor in tensors if isinstance(tensor, DTensor)
        ]
        return bool(self._mutated_storages) and any(one not in self._mutated_storages for one in expected)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            self.communicates = True
        if func is self._function:
            self._mutated_storages += (
                (storage_id(leaf), leaf.shape)
                for leaf in written_leaves(func, args, kwargs or {})
                if isinstance(leaf, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------------
# The fake mesh


class _PlanningFlag(threading.local):
    """Whether this thread is planning an operation."""

    is_active = False


_planning = _PlanningFlag()


@contextlib.contextmanager
def _as_rank_0() -> Iterator[None]:
    """Report rank 0 while planning: DTensor sometimes reads its rank in the default group, which is missing here."""
    before, _planning.is_active = _planning.is_active, True
    try:
        yield
    finally:
        _planning.is_active = before


class _DistributedProxy:
    """`torch.distributed` as DTensor's convolutions see it; a rank cannot be passed to them in any other way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: Any = None) -> int:
        return 0 if _planning.is_active and not dist.is_initialized() else dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return 1 if _planning.is_active and not dist.is_initialized() else dist.get_world_size(group)


_tp_conv.dist = _DistributedProxy()  # type: ignore[assignment, attr-defined]


class _FakeDeviceMesh(DeviceMesh):
    """A device mesh in which this process has rank 0, whatever groups it is in."""

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


def _fake_device_mesh(axes: MeshAxes) -> DeviceMesh:
    """Return a DeviceMesh of these axes with fake groups. This process joins no group: `dist` stays unused."""
    mesh = _FakeDeviceMesh(
        "cpu",
        torch.arange(axes.size).reshape(axes.shape),
        mesh_dim_names=axes.names,
        _init_backend=False,
        _rank=0,
    )
    names: list[Any] = []
    groups = []
    for size in axes.shape:
        group: Any = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
        backend = FakeProcessGroup._create_internal(0, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        name: Any = f"meshbook-plan-{next(_group_numbers)}"
        group._set_group_name(name)
        _register_process_group(name, group)
        names.append(name)
        groups.append(group)
    mesh._dim_group_names = names
    mesh._meshbook_groups = groups  # type: ignore[attr-defined]  # torch's registry holds them weakly
    return mesh
