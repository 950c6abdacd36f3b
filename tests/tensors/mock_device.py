"""A device "mock:0" that is not the CPU, for tests: torch's PrivateUse1, with CPU kernels behind it.

CPU kernels refuse its tensors, it has a generator as GPUs have, and no operator that names the CPU. Operators, and the
collectives of c10d, run on CPU tensors of the same memory. Not there: streams, events, asynchronous errors, storages
that are resized (FSDP), and parameters whose data is replaced (`.data = ...`, which torch allows for its own devices).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten: Any = torch.ops.aten
CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
_COPIES = {"aten::_copy_from", "aten::_copy_from_and_resize"}

# CPU storages behind the mock ones, by address of the latter.
_memory: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
_libraries: list[torch.library.Library] = []
calls: list[tuple[str, int]] = []  # operators that have run, and the bytes of the largest tensor that each was given


class PhiloxGenerator:
    """Like the generator of a GPU: a seed and an offset, in a state of 16 bytes."""

    def __init__(self) -> None:
        self._seed, self._offset = 67280421310721, 0

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("<qq", self._seed, self._offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self._seed, self._offset = struct.unpack("<qq", state.numpy().tobytes())

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset = seed & ((1 << 63) - 1), 0

    @contextlib.contextmanager
    def draws(self, numel: int) -> Iterator[None]:
        """Have the CPU's generator draw what this one would, in this context."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(hash((self._seed, self._offset)) & ((1 << 63) - 1))
        self._offset += -(-numel // 4) * 4
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


class Backend:
    """`torch.mock`."""

    def __init__(self) -> None:
        self.default_generators = [PhiloxGenerator()]
        self.num_waits = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        self.num_waits += 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_rng_state(self, device: Any = "mock") -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "mock") -> None:
        self.default_generators[0].set_state(state)


def install() -> None:
    """Register the device in this process. Once."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("mock", backend_module=Backend())
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    for operator in (aten.convolution_overrideable.default, aten.convolution_backward_overrideable.default):
        own.impl(operator, functools.partial(_run, operator), "PrivateUse1")
    collectives = torch.library.Library("c10d", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("c10d::") and any("Tensor" in str(one.type) for one in schema.arguments):
            operator = getattr(
                getattr(torch.ops.c10d, schema.name.partition("::")[2]), schema.overload_name or "default"
            )
            collectives.impl(operator, _collective_of(operator), "PrivateUse1")
    _libraries.extend((every, own, collectives))


def is_mock(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "mock"


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same memory."""
    _, memory = _memory[tensor.untyped_storage()._cdata]
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        memory, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def wrap(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """Return a mock tensor of a CPU tensor's memory.

    Args:
        storage: the mock storage of that memory; None: it has none yet.
    """
    memory = tensor.untyped_storage()
    if storage is None:
        if len(_memory) > 4096:
            for key in [key for key, (known, _) in _memory.items() if known.expired()]:
                del _memory[key]
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), torch.device("mock:0"), memory.nbytes()
        )
        _memory[storage._cdata] = StorageWeakRef(storage), memory
    made = torch._C._acc.create_empty_tensor([0], tensor.dtype)
    return _place(made, storage, tensor)


def _place(mock: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    operator = aten.set_.source_Storage_storage_offset
    return operator.redispatch(CPU_KEYS, mock, storage, like.storage_offset(), like.size(), like.stride())


class _Call:
    """One call of an operator, on CPU tensors."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.name = operator, operator._schema.name
        self.mocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the CPU tensor
        self.storages: dict[int, torch.UntypedStorage] = {}  # mock storages, by address of the CPU storage
        self._twins: dict[int, torch.Tensor] = {}

    def to_cpu(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not is_mock(leaf):
            if leaf.dim() and self.name not in _COPIES and not self.name.startswith("c10d"):
                raise RuntimeError(f"{self.name}: expected all tensors on one device, found mock:0 and {leaf.device}")
            return leaf
        twin = self._twins.get(id(leaf))
        if twin is None:
            twin = self._twins[id(leaf)] = on_cpu(leaf)
            self.mocks[id(twin)] = leaf, twin
            self.storages[twin.untyped_storage()._cdata] = leaf.untyped_storage()
        return twin

    def to_mock(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self.mocks:
            return self.mocks[id(leaf)][0]
        return wrap(leaf, self.storages.get(leaf.untyped_storage()._cdata))

    def take_over_shapes(self) -> None:
        """Give mock tensors what an operator has made of their CPU twins in place."""
        for mock, twin in self.mocks.values():
            if mock.size() != twin.size() or mock.stride() != twin.stride():
                _place(mock, wrap(twin).untyped_storage(), twin)


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = operator._schema.name
    if "_for_cpu" in name or "mkldnn" in name:
        raise NotImplementedError(f"Could not run {name!r} with arguments from the 'mock' backend")
    call = _Call(operator)
    cpu_args, cpu_kwargs = pytree.tree_map(call.to_cpu, (args, kwargs))
    sizes = [twin.numel() for _, twin in call.mocks.values()]
    calls.append((name, max((twin.numel() * twin.element_size() for _, twin in call.mocks.values()), default=0)))
    random = torch.Tag.nondeterministic_seeded in operator.tags and cpu_kwargs.get("generator") is None
    generator = torch.mock.default_generators[0]  # type: ignore[attr-defined]
    with generator.draws(max(sizes, default=1)) if random else contextlib.nullcontext():
        if name in _COPIES:
            cpu_args[1].copy_(cpu_args[0])
            return args[1]
        results = _FOR_ANY_BACKEND.get(name, operator)(*_with_tensors(operator, cpu_args), **cpu_kwargs)
    call.take_over_shapes()
    return pytree.tree_map(call.to_mock, results)


def _with_tensors(operator: Any, args: Any) -> list[Any]:
    """Return arguments with tensors where torch makes numbers of those that it has made of numbers."""
    wants_tensor = (str(argument.type) == "Tensor" for argument in operator._schema.arguments)
    return [
        torch.tensor(arg) if wanted and isinstance(arg, (bool, int, float)) else arg
        for arg, wanted in zip(args, wants_tensor, strict=False)
    ]


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any) -> Any:
    return aten.convolution_backward.default(grad, x, weight, [grad.shape[1]], *rest)


# What torch calls for a backend that it does not know.
_FOR_ANY_BACKEND = {
    "aten::convolution_overrideable": aten.convolution.default,
    "aten::convolution_backward_overrideable": _convolution_backward,
}


def _collective_of(operator: Any) -> Any:
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = _Call(operator)
        cpu_args, cpu_kwargs = pytree.tree_map(call.to_cpu, (args, kwargs))
        return pytree.tree_map(call.to_mock, operator(*cpu_args, **cpu_kwargs))

    return collective


def take_over_rank() -> DeviceMesh:
    """Have this rank's remote tensors live on the mock device. To be called in a cell, before the first of them.

    Returns:
        The DeviceMesh for the name `mesh` of cells, over the groups of the rank's own.
    """
    from meshbook.rank.process_groups.groups import ProcessGroups
    from meshbook.rank.tensors.engine import RankTensors

    install()
    (groups,) = [found for found in gc.get_objects() if isinstance(found, ProcessGroups)]
    own: Any = groups.mesh
    groups.mesh = DeviceMesh.from_group(own.get_all_groups(), "mock", mesh=own.mesh, mesh_dim_names=own.mesh_dim_names)
    initialize = RankTensors.__init__

    def initialize_on_mock(self: RankTensors, rank: int, device: torch.device, *args: Any, **kwargs: Any) -> None:
        initialize(self, rank, torch.device("mock:0"), *args, **kwargs)

    RankTensors.__init__ = initialize_on_mock  # type: ignore[method-assign]
    return groups.mesh
