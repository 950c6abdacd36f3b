"""The sending side of `wire.pickling`: a cloudpickler that takes tensors and large buffers out of the stream."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from meshbook.wire.unpickler import (
    builtin_base,
    constant_of_torch,
    exception_of,
    resolve_unknown,
    same,
    set_attributes,
    tensor_of_table,
    typed_storage,
    untyped_storage,
)

if TYPE_CHECKING:
    import torch
    from torch.storage import UntypedStorage

PersistentKey = Callable[[object], "str | None"]  # returns the key of an object that the other side has, else None
Reduce = Callable[[Any], Any]  # returns how an object is pickled, as `__reduce__` does; NotImplemented: as usual


class LimitExceeded(Exception):
    """The pickle exceeds the limit. An expected result, not an error."""


class NotSendable(Exception):
    """An object that could be pickled but must not be sent. Becomes a `TransferError` that names its position."""


class PickleWriter:
    """The file that a pickler writes to. Stores the pieces without copying them until `join`.

    Attributes:
        out_of_band: large pieces, each with its offset in the concatenation of all the others.
    """

    def __init__(self, limit: int | None = None, *, out_of_band_bytes: int | None = None) -> None:
        self.out_of_band: list[tuple[int, memoryview]] = []
        self._pieces: list[bytes] = []
        self._limit, self._out_of_band_bytes = limit, out_of_band_bytes
        self._nbytes = 0

    def write(self, piece: bytes | bytearray | memoryview) -> int:
        if self._out_of_band_bytes is not None and len(piece) >= self._out_of_band_bytes:
            self.out_of_band.append((self._nbytes, memoryview(piece)))
            return len(piece)
        self._nbytes += len(piece)
        self.check_limit(0)
        self._pieces.append(bytes(piece))  # does not copy bytes
        return len(piece)

    def check_limit(self, nbytes: int) -> bool:
        """Return True if `nbytes` more bytes fit into the limit.

        Raises:
            LimitExceeded: they do not.
        """
        if self._limit is not None and self._nbytes + nbytes > self._limit:
            raise LimitExceeded
        return True

    def join(self, head: bytes) -> bytes:
        return b"".join([head, *self._pieces])


class PayloadPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, with tensors in a table and objects of the other side as keys."""

    def __init__(
        self,
        writer: Any,
        buffer_callback: Callable[[pickle.PickleBuffer], Any],
        persistent: PersistentKey | None,
        *,
        limit: int | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        super().__init__(writer, protocol=5, buffer_callback=buffer_callback)
        self._persistent, self._reduce = persistent, reduce
        self._limit = limit
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type: Any = getattr(self._torch, "Tensor", None) or ()
        self._storage_type: Any = getattr(self._torch, "UntypedStorage", None) or ()
        self._typed_storage_type: Any = getattr(self._torch, "TypedStorage", None) or ()
        self._constant_types = constant_types(self._torch)
        self._array_type: Any = getattr(sys.modules.get("numpy"), "ndarray", None)
        self.tensors = _TensorTableWriter()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce `obj`. pickle calls this for everything except plain containers, numbers and strings."""
        if self._persistent is not None and (key := self._persistent(obj)) is not None:
            return resolve_unknown, (key,)
        if self._reduce is not None and (reduced := self._reduce(obj)) is not NotImplemented:
            return reduced
        if isinstance(obj, self._tensor_type):
            return self._reduce_tensor(obj)
        if isinstance(obj, self._storage_type):  # as a tensor, so that it stays shared with the tensors that use it
            return untyped_storage, (self._storage_as_tensor(obj),)
        if isinstance(obj, self._typed_storage_type):
            return typed_storage, (self._storage_as_tensor(obj._untyped_storage), obj.dtype)
        if type(obj) is self._array_type and not obj.dtype.hasobject:
            if self._limit is not None and obj.nbytes > self._limit:
                raise LimitExceeded
            if not obj.flags.forc:  # numpy would write it into the pickle itself
                return obj.copy().__reduce_ex__(5)
        if type(obj) in self._constant_types:
            return reduce_constant(obj)
        if issubclass(type(obj), BaseException):
            return _reduce_exception(obj)
        return super().reducer_override(obj)

    def _storage_as_tensor(self, storage: UntypedStorage) -> torch.Tensor:
        flat: torch.Tensor = self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)
        return flat

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        torch = self._torch
        unwrapped = _unwrap_tensor(tensor)
        if unwrapped is not tensor:
            return same, (unwrapped,)
        is_parameter = type(tensor) is torch.nn.Parameter
        if (
            not (is_parameter or type(tensor) is torch.Tensor)
            or tensor.layout is not torch.strided
            or tensor.device.type == "meta"
            or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
            or any(getattr(tensor, "names", ()))  # removed in torch 2.13
        ):  # fmt: skip
            return NotImplemented  # torch's own reduction, whose storages reach `reducer_override` again
        try:
            index = self.tensors.add(tensor, is_parameter)
        except NotImplementedError:  # no storage: a tensor inside torch.func, which raises its own error
            return NotImplemented
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            return tensor_of_table, (index,), dict(attributes), None, None, set_attributes
        return tensor_of_table, (index,)


def constant_types(torch: Any) -> tuple[type, ...]:
    """Return the types of torch's constants, such as `torch.float32`; none if torch is not imported.

    Their own reduction names any module that has them under that name. This may be a script's, which ranks do not have:
    multiprocessing gives `__main__` another name, and pickle looks in all modules in the order of their import.
    """
    return () if torch is None else (torch.dtype, torch.memory_format, torch.layout)


def reduce_constant(constant: Any) -> Any:
    return constant_of_torch, (str(constant).removeprefix("torch."),)


class _MessagePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_constant(obj) if type(obj) in constant_types(sys.modules.get("torch")) else NotImplemented


def dump_message(message: Any) -> bytes:
    """Pickle a message of Meshbook's own that has constants of torch in it, for ranks."""
    stream = io.BytesIO()
    _MessagePickler(stream, protocol=5).dump(message)
    return stream.getvalue()


def _reduce_exception(error: BaseException) -> Any:
    """Reduce an exception by its `args` and attributes.

    `BaseException.__reduce__` has `__init__` called with `args`, which are what that has passed on, not what it takes.

    Returns:
        NotImplemented: its class says itself how it is pickled, or has no `__init__` of its own.
    """
    Class = type(error)
    base: Any = builtin_base(Class)
    has_own_reduction = Class in copyreg.dispatch_table or any(
        getattr(Class, name) is not getattr(base, name) for name in ("__reduce__", "__reduce_ex__")
    )
    if has_own_reduction or Class.__init__ is base.__init__:
        return NotImplemented
    reduced: Any = error.__reduce__()
    return exception_of, (Class, reduced[1]), *reduced[2:]


def _unwrap_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of `tensor`.

    That is the tensor itself; the local tensor of a torch.distributed wrapper that is replicated on this rank; or zeros
    for a zero tensor of autograd, which has no memory.

    Raises:
        NotSendable: no rank has the complete tensor.
    """
    wrapper = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if wrapper is not None and isinstance(tensor, wrapper):
        mesh = tensor.device_mesh
        if not all(
            placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(tensor.placements)
        ):
            raise NotSendable(
                f"a DTensor with placements {tensor.placements} is not whole on any rank; send x.full_tensor() (all of "
                f"it; every rank has to call it) or x.to_local() (this rank's shard)"
            )
        return cast("torch.Tensor", tensor.detach().to_local().requires_grad_(tensor.requires_grad))
    async_tensor = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    if async_tensor is not None and isinstance(tensor, async_tensor):
        return cast("torch.Tensor", tensor.wait())
    if tensor._is_zerotensor():
        zeros = sys.modules["torch"].zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return cast("torch.Tensor", zeros)
    return tensor


@dataclass
class _TensorView:
    """One tensor of the table, as plain data."""

    dtype: str
    itemsize: int
    offset: int  # in items, from the start of the sent bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool

    def byte_range(self) -> tuple[int, int]:
        """Return the first byte and the one after the last."""
        last = self.offset
        for length, step in zip(self.size, self.stride, strict=True):  # a loop: it runs four times for each tensor
            if not length:
                return 0, 0
            last += (length - 1) * step
        return self.offset * self.itemsize, (last + 1) * self.itemsize

    def nbytes(self) -> int:
        items = 1
        for length in self.size:
            items *= length
        return items * self.itemsize


@dataclass
class _Storage:
    """A storage and the tensors of this pickle that view it."""

    index: int
    storage: UntypedStorage  # retained, so that its address is not reused
    sample: torch.Tensor  # one of the tensors
    views: list[_TensorView] = field(default_factory=list)

    def byte_range(self) -> tuple[int, int]:
        """Return the byte range that all views together span, aligned down to 64 bytes for any item size."""
        spans = [view.byte_range() for view in self.views if 0 not in view.size]
        if not spans:
            return 0, 0
        return min(start for start, _ in spans) // 64 * 64, max(stop for _, stop in spans)

    def is_sparse(self) -> bool:
        """Whether the only view, such as a column of a matrix, leaves out more bytes than it covers."""
        start, stop = self.byte_range()
        return len(self.views) == 1 and 2 * self.views[0].nbytes() < stop - start

    def nbytes(self) -> int:
        start, stop = self.byte_range()
        return self.views[0].nbytes() if self.is_sparse() else stop - start

    def extract_bytes(self) -> memoryview:
        """Return the bytes to send, and rebase the views' offsets onto them.

        On the CPU this is the storage's own memory, which the caller must copy to keep; on another device, a copy.
        """
        torch = sys.modules["torch"]
        if self.is_sparse():
            packed = self.sample.detach().clone(memory_format=torch.contiguous_format)
            self.storage = packed.untyped_storage()
            self.views[0].offset, self.views[0].stride = 0, tuple(packed.stride())
        start, stop = self.byte_range()
        for view in self.views:
            view.offset = 0 if 0 in view.size else view.offset - start // view.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        import numpy

        # On the CPU, all of these are that memory itself. `.numpy()` would make the user's storage non-resizable.
        return numpy.from_dlpack(flat[start:stop].cpu()).data


class _TensorTableWriter:
    """The tensors of a pickle. Which part of a storage is sent is decided when all its views are known."""

    def __init__(self) -> None:
        self._storages: dict[tuple[str, int, int], _Storage] = {}
        self._views: list[tuple[int, _TensorView]] = []  # with the index of the storage

    def __bool__(self) -> bool:
        return bool(self._views)

    def add(self, tensor: torch.Tensor, is_parameter: bool) -> int:
        """Add a tensor; return its index in the table."""
        storage = tensor.untyped_storage()
        view = _TensorView(
            str(tensor.dtype).removeprefix("torch."), tensor.element_size(), int(tensor.storage_offset()),
            tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad, is_parameter,
        )  # fmt: skip
        if view.byte_range()[1] > storage.nbytes():
            raise NotSendable(
                f"a tensor of shape {view.size} whose storage holds {storage.nbytes()} bytes has been freed (as FSDP "
                f"frees unsharded parameters); gather it first"
            )
        # By address: two storages over the same memory, as torch.from_numpy makes them, count as one.
        key = (str(storage.device), storage.data_ptr() or -len(self._views), storage.nbytes())
        entry = self._storages.setdefault(key, _Storage(len(self._storages), storage, tensor))
        entry.views.append(view)
        self._views.append((entry.index, view))
        return len(self._views) - 1

    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def extract_storages(self) -> list[memoryview]:
        """Return the bytes of each storage, in the order of their indices."""
        return [storage.extract_bytes() for storage in self._storages.values()]

    def rows(self) -> list[tuple[Any, ...]]:
        return [
            (index, view.dtype, view.offset, view.size, view.stride, view.requires_grad, view.is_parameter)
            for index, view in self._views
        ]


def dump_tensor_table(pickler: PayloadPickler, storages: Sequence[int | bytes]) -> bytes:
    """Return the first of the stream's two pickles. A storage is the index of its buffer, or its bytes."""
    if not pickler.tensors:
        return pickle.dumps(None, 0)  # two bytes
    return pickle.dumps((list(storages), pickler.tensors.rows()), 5)
