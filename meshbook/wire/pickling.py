"""Pickle Python objects into `Payload`s, and unpickle them.

Uses cloudpickle with protocol 5: functions and classes of a notebook travel by value, large buffers out of band, in
shared memory where there is a pool. Tensors are buffers too, whatever their dtype and strides; tensors that share a
storage share it again on the receiving side. This module knows nothing of sockets, ranks or names; it uses torch only
if the sender has imported it or a tensor arrives.

What changes in transit:

- a tensor on another device arrives as a CPU copy (the receiver may have no such device, or a different one);
- a tensor computed by autograd arrives as a leaf with the same `requires_grad`, without history and `.grad`;
- of a view, only the part of the storage that it spans, together with other views in the same value, is sent;
- a DTensor that is replicated on every rank arrives as a plain tensor; a sharded one is refused;
- an object for which `persistent` returns a key arrives as what `resolve` returns for that key.

The stream is two consecutive pickles: the table of tensors (None if there are none), which is complete only at the end
of pickling but needed at the start of unpickling, and the object. Large bytes, bytearrays and strings, at any depth,
are cut out of the stream and read in place: one copy on each side.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import io
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from meshbook.clock import monotonic
from meshbook.errors import TransferError
from meshbook.wire.buffers import SegmentPool, SegmentReader, copy_to_fresh_pages
from meshbook.wire.codec import MAX_MESSAGE_BYTES
from meshbook.wire.messages import InlineBuffer, Payload, SharedBuffer

if TYPE_CHECKING:
    import torch
    from torch.storage import UntypedStorage

INLINE_THRESHOLD = 64 << 10  # bytes; below it a copy into the message is cheaper than opening and releasing a segment
# bytes of the pickle itself (a list of a million ints); above it, one shared copy instead of one per rank and hop
STREAM_THRESHOLD = 1 << 20
# bytes of one piece that pickle writes; its own frames are shorter, so such pieces are bytes or text
OUT_OF_BAND_BYTES = 128 << 10
SEARCH_BUDGET_S = 1.0  # time limit of the search for the unpicklable part; then the error names the part reached so far
MAX_SEARCH_DEPTH = 32

PersistentKey = Callable[[object], "str | None"]  # returns the key of an object that the other side has, else None
ResolveKey = Callable[[str], object]  # returns the object of a key


def dump(
    obj: object,
    *,
    pool: SegmentPool | None,
    readers: int | Collection[int] = 1,
    inline_threshold: int = INLINE_THRESHOLD,
    persistent: PersistentKey | None = None,
    name: str | Sequence[str] = "value",
) -> Payload:
    """Pickle `obj`. Blocks while buffers are copied into shared memory.

    Args:
        pool: receives the buffers of at least `inline_threshold` bytes; None sends them in the message.
        readers: see `SegmentPool.write`.
        persistent: called for every object except plain containers, numbers and strings.
        name: what an error calls the object; if the object is a tuple of values, one name per element.

    Raises:
        TransferError: the object cannot be pickled (the message names the part at fault), or shared memory cannot be
            allocated. No segment is retained.
    """
    writer = _PickleWriter(out_of_band_bytes=None if pool is None else OUT_OF_BAND_BYTES)
    out_of_band: list[pickle.PickleBuffer] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < inline_threshold:
            return True  # stays in the pickle
        out_of_band.append(buffer)
        return False

    pickler = _Pickler(writer, take_out, persistent)
    try:
        pickler.dump(obj)
        tensor_bytes = pickler.tensors.extract_storages() if pickler.tensors else []
    except Exception as error:
        raise TransferError(_describe_unpicklable(obj, name, persistent, error)) from error
    large = [buffer.raw() for buffer in out_of_band]
    storages: list[int | bytes] = []
    for storage_bytes in tensor_bytes:
        if storage_bytes.nbytes < inline_threshold:
            storages.append(bytes(storage_bytes))
        else:
            storages.append(len(large))
            large.append(storage_bytes)
    head = _dump_tensor_table(pickler, storages)
    stream = writer.join(head)
    if pool is None:
        return Payload(stream, tuple(InlineBuffer(bytes(view)) for view in large))
    large += [piece for _, piece in writer.out_of_band]
    if len(stream) >= STREAM_THRESHOLD:
        large.append(memoryview(stream))
        stream = b""
    cuts = tuple(len(head) + offset for offset, _ in writer.out_of_band)
    return Payload(stream, _check_inline_size(pool.write(large, readers)) if large else (), cuts)


def _check_inline_size(buffers: Sequence[SharedBuffer | InlineBuffer]) -> tuple[SharedBuffer | InlineBuffer, ...]:
    """Return `buffers` as a tuple, or raise TransferError if the inline ones exceed the size of a message.

    Inline buffers occur here only where shared memory could not be allocated.
    """
    inline = sum(len(buffer.data) for buffer in buffers if isinstance(buffer, InlineBuffer))
    if inline > MAX_MESSAGE_BYTES:
        raise TransferError(
            f"this value has {inline / (1 << 20):,.0f} MiB and would go through shared memory, which could not be had "
            "here (no memory files, or no file descriptors left: see ulimit -n and %mesh doctor), and a message takes "
            f"{MAX_MESSAGE_BYTES >> 20:,} MiB; close files, or send it in parts"
        )
    return tuple(buffers)


def dump_small(obj: object, limit: int, *, persistent: PersistentKey | None = None) -> Payload | None:
    """Pickle `obj` into at most `limit` bytes without separate buffers; return None if it needs more.

    Stops as soon as the limit is exceeded. It runs on every cell's value, so an error does not search for the part at
    fault.

    Raises:
        TransferError: the object cannot be pickled.
    """
    writer = _PickleWriter(limit)
    pickler = _Pickler(writer, lambda buffer: writer.check_limit(buffer.raw().nbytes), persistent, limit=limit)
    try:
        pickler.dump(obj)
        if pickler.tensors:
            writer.check_limit(pickler.tensors.nbytes())
        tensor_bytes = pickler.tensors.extract_storages() if pickler.tensors else []
    except _LimitExceeded:
        return None
    except Exception as error:
        raise TransferError(f"a {_type_name(obj)} cannot be pickled: {_format_error(error)}") from error
    stream = writer.join(_dump_tensor_table(pickler, [bytes(storage_bytes) for storage_bytes in tensor_bytes]))
    return Payload(stream) if len(stream) <= limit else None


def _disable_torch_modes() -> contextlib.AbstractContextManager[object]:
    """Disable active torch modes (such as `with mesh.activate()`), which must not apply to tensors that arrive."""
    torch = sys.modules.get("torch")
    if torch is None or not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def load(payload: Payload, *, reader: SegmentReader | None = None, resolve: ResolveKey | None = None) -> Any:
    """Return the object of a payload.

    Large arrays and tensors in it are private views of shared memory: writable, copied page by page on write, and
    released to `reader` when the last of them is freed. A payload in shared memory can be loaded once per reader
    counted by its sender.

    Raises:
        TransferError: the process that owns the memory has exited, an import fails here, a handle is unknown here, or
            the payload is damaged.
    """
    if reader is None and not all(isinstance(buffer, InlineBuffer) for buffer in payload.buffers):
        raise TransferError("this value is in another process's memory, which cannot be read here")
    views = (reader or SegmentReader()).open_all(payload.buffers)
    stream: io.BytesIO | _SplicedStream | None = None
    try:
        stream = (
            _SplicedStream.from_payload(payload, views)
            if payload.splice_offsets or not payload.pickled
            else io.BytesIO(payload.pickled)
        )
        with _disable_torch_modes():
            return _Unpickler(stream, views, _TensorTableReader(pickle.load(stream), views), resolve).load()
    except (TransferError, MemoryError):
        raise
    except Exception as error:
        raise TransferError(
            f"the value arrived and cannot be rebuilt here: {type(error).__name__}: {error}; if its class is your own, "
            f"look at its __setstate__ and __init__, or send plain data"
        ) from error
    finally:
        views.clear()  # a traceback retains this frame, and must not retain the memory
        if stream is not None:
            stream.close()


# ---------------------------------------------------------------------------------------------------------------------
# Pickling


class _LimitExceeded(Exception):
    """The pickle exceeds the limit. An expected result, not an error."""


class _NotSendable(Exception):
    """An object that could be pickled but must not be sent. Becomes a `TransferError` that names its position."""


class _PickleWriter:
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
            _LimitExceeded: they do not.
        """
        if self._limit is not None and self._nbytes + nbytes > self._limit:
            raise _LimitExceeded
        return True

    def join(self, head: bytes) -> bytes:
        return b"".join([head, *self._pieces])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, with tensors in a table and objects of the other side as keys."""

    def __init__(
        self,
        writer: Any,
        buffer_callback: Callable[[pickle.PickleBuffer], Any],
        persistent: PersistentKey | None,
        *,
        limit: int | None = None,
    ) -> None:
        super().__init__(writer, protocol=5, buffer_callback=buffer_callback)
        self._persistent = persistent
        self._limit = limit
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type: Any = getattr(self._torch, "Tensor", None) or ()
        self._storage_type: Any = getattr(self._torch, "UntypedStorage", None) or ()
        self._typed_storage_type: Any = getattr(self._torch, "TypedStorage", None) or ()
        self._array_type: Any = getattr(sys.modules.get("numpy"), "ndarray", None)
        self.tensors = _TensorTableWriter()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce `obj`. pickle calls this for everything except plain containers, numbers and strings."""
        if self._persistent is not None and (key := self._persistent(obj)) is not None:
            return _resolve, (key,)
        if isinstance(obj, self._tensor_type):
            return self._reduce_tensor(obj)
        if isinstance(obj, self._storage_type):  # as a tensor, so that it stays shared with the tensors that use it
            return _untyped_storage, (self._storage_as_tensor(obj),)
        if isinstance(obj, self._typed_storage_type):
            return _typed_storage, (self._storage_as_tensor(obj._untyped_storage), obj.dtype)
        if type(obj) is self._array_type and not obj.dtype.hasobject:
            if self._limit is not None and obj.nbytes > self._limit:
                raise _LimitExceeded
            if not obj.flags.forc:  # numpy would write it into the pickle itself
                return obj.copy().__reduce_ex__(5)
        return super().reducer_override(obj)

    def _storage_as_tensor(self, storage: UntypedStorage) -> torch.Tensor:
        flat: torch.Tensor = self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)
        return flat

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        torch = self._torch
        unwrapped = _unwrap_tensor(tensor)
        if unwrapped is not tensor:
            return _same, (unwrapped,)
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
            return _tensor, (index,), dict(attributes), None, None, _set_attributes
        return _tensor, (index,)


def _unwrap_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of `tensor`.

    That is the tensor itself; the local tensor of a torch.distributed wrapper that is replicated on this rank; or zeros
    for a zero tensor of autograd, which has no memory.

    Raises:
        _NotSendable: no rank has the complete tensor.
    """
    wrapper = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if wrapper is not None and isinstance(tensor, wrapper):
        mesh = tensor.device_mesh
        if not all(
            placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(tensor.placements)
        ):
            raise _NotSendable(
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
        if 0 in self.size:
            return 0, 0
        last = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return self.offset * self.itemsize, (self.offset + last + 1) * self.itemsize

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
            raise _NotSendable(
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


def _dump_tensor_table(pickler: _Pickler, storages: Sequence[int | bytes]) -> bytes:
    """Return the first of the stream's two pickles. A storage is the index of its buffer, or its bytes."""
    if not pickler.tensors:
        return pickle.dumps(None, 0)  # two bytes
    return pickle.dumps((list(storages), pickler.tensors.rows()), 5)


# ---------------------------------------------------------------------------------------------------------------------
# Unpickling


class _SplicedStream:
    """A file for the unpickler over a pickled stream with out-of-band pieces."""

    def __init__(self, chunks: Iterable[memoryview]) -> None:
        self._chunks = deque(chunk for chunk in chunks if chunk.nbytes)

    @classmethod
    def from_payload(cls, payload: Payload, views: list[memoryview]) -> _SplicedStream:
        """Return the stream of a payload.

        Raises:
            IndexError, ValueError: the payload is damaged.
        """
        stream = memoryview(payload.pickled) if payload.pickled else views[-1]
        pieces = (
            views[: None if payload.pickled else -1][-len(payload.splice_offsets) :] if payload.splice_offsets else []
        )
        chunks, done = [], 0
        for offset, piece in zip(payload.splice_offsets, pieces, strict=True):
            chunks += [stream[done:offset], piece]
            done = offset
        return cls([*chunks, stream[done:]])

    def readinto(self, target: memoryview) -> int:
        """Fill `target`, the unpickler's newly allocated, untouched bytes or bytearray; return the number of bytes."""
        done = 0
        while done < target.nbytes and self._chunks:
            chunk = self._next_chunk(target.nbytes - done)
            copy_to_fresh_pages(target[done : done + chunk.nbytes], chunk)
            done += chunk.nbytes
        return done

    def read(self, nbytes: int) -> bytes:
        if self._chunks and nbytes <= self._chunks[0].nbytes:
            return bytes(self._next_chunk(nbytes))
        pieces = []
        while nbytes > 0 and self._chunks:
            pieces.append(self._next_chunk(nbytes))
            nbytes -= pieces[-1].nbytes
        return b"".join(pieces)

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return line

    def close(self) -> None:
        self._chunks.clear()

    def _next_chunk(self, nbytes: int) -> memoryview:
        chunk = self._chunks.popleft()
        if nbytes < chunk.nbytes:
            self._chunks.appendleft(chunk[nbytes:])
        return chunk[:nbytes]


class _TensorTableReader:
    """The table of tensors on the receiving side. Creates each tensor when the pickle refers to it."""

    def __init__(
        self, table: tuple[list[int | bytes], list[tuple[Any, ...]]] | None, views: Sequence[memoryview]
    ) -> None:
        self._storages: list[Any] = []
        self._table: list[tuple[Any, ...]] = []
        if table is None:
            return
        try:
            import torch
        except ImportError as error:
            raise TransferError(_cannot_import_message("torch", error)) from error
        storages, self._table = table
        for storage in storages:
            flat = torch.empty(0, dtype=torch.uint8, device="cpu")  # independent of torch.set_default_device
            if isinstance(storage, int):  # stays in the shared memory
                flat = torch.frombuffer(views[storage], dtype=torch.uint8)
            elif storage:  # torch's own memory: aligned, resizable
                flat = torch.frombuffer(bytearray(storage), dtype=torch.uint8).clone()
            self._storages.append(flat.untyped_storage())

    def __call__(self, index: int) -> torch.Tensor:
        import torch

        storage, dtype, offset, size, stride, requires_grad, is_parameter = self._table[index]
        empty = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
        tensor = empty.set_(self._storages[storage], offset, size, stride)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)


class _Unpickler(pickle.Unpickler):
    """Unpickles with this stream's tensors and the receiver's `resolve`; import errors name the missing module."""

    def __init__(
        self,
        stream: io.BytesIO | _SplicedStream,
        views: Sequence[memoryview],
        tensors: _TensorTableReader,
        resolve: ResolveKey | None,
    ) -> None:
        super().__init__(stream, buffers=views)
        self._overrides: dict[tuple[str, str], Any] = {
            (__name__, "_tensor"): tensors,
            (__name__, "_resolve"): resolve or _resolve,
            ("torch._utils", "_rebuild_sparse_tensor"): _sparse_tensor,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._overrides:
            return self._overrides[module, name]
        try:
            return super().find_class(module, name)
        except ImportError as error:
            raise TransferError(_cannot_import_message(module, error)) from error
        except AttributeError as error:
            raise TransferError(
                f"the value needs `{name}` from module `{module}`, which has none where the value arrived: the two "
                f"sides have loaded different versions of it; reload it there, or restart the mesh"
            ) from error


def _cannot_import_message(module: str, error: ImportError) -> str:
    missing = error.name or module
    because = "" if missing == module else f" (it needs `{missing}`)"
    return (
        f"the value needs module `{module}`, which cannot be imported where the value arrived{because}: {error}; "
        f"install it there, add its folder to sys.path before the mesh starts, or send its code along: "
        f"cloudpickle.register_pickle_by_value({module.partition('.')[0]})"
    )


# The functions that a pickle names to rebuild an object. `_Unpickler.find_class` replaces the first two.


def _tensor(index: int) -> Any:
    raise TransferError(f"tensor {index} of a value came without its table; read it with meshbook.wire.pickling.load")


def _resolve(key: str) -> object:
    raise TransferError(f"the value holds the handle `{key}`, and nothing here knows what it stands for; pull it first")


def _sparse_tensor(layout: Any, data: Any) -> Any:
    """Call torch's own function, then clear its list of tensors to validate.

    torch retains each tensor made there until torch.load validates it; outside torch.load that is never.
    """
    import torch._utils as torch_utils

    utils: Any = torch_utils  # torch._utils is untyped
    tensor = utils._rebuild_sparse_tensor(layout, data)
    utils._validate_loaded_sparse_tensors()
    return tensor


def _same(obj: object) -> object:
    return obj


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)


def _untyped_storage(flat: torch.Tensor) -> UntypedStorage:
    return flat.untyped_storage()


def _typed_storage(flat: torch.Tensor, dtype: torch.dtype) -> Any:
    import torch

    storage: Any = torch.TypedStorage  # TypedStorage is untyped
    return storage(wrap_storage=flat.untyped_storage(), dtype=dtype, _internal=True)


# ---------------------------------------------------------------------------------------------------------------------
# Which part cannot be pickled


def _describe_unpicklable(
    obj: object, name: str | Sequence[str], persistent: PersistentKey | None, error: Exception
) -> str:
    """Return the error message for an object that cannot be pickled."""
    path = name if isinstance(name, str) else "value"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return f"`{path}` is nested too deeply to be pickled; send it in a flatter form, or raise sys.setrecursionlimit"
    search = _CulpritSearch(persistent, error)
    if isinstance(name, str) or not isinstance(obj, tuple):
        search.descend(path, obj)
    else:
        search.descend_into_first(zip(name, obj, strict=False))
    culprit = f"`{search.path or path}` (a {_type_name(search.culprit)})"
    if isinstance(search.error, _NotSendable):
        return f"{culprit} cannot travel: {search.error}"
    return f"{culprit} cannot be pickled: {_format_error(search.error)}; {_suggest_fix(search)}"


class _CulpritSearch:
    """Searches an object that cannot be pickled for the part at fault, by pickling its parts one by one.

    Objects on the path, and those that pickled without an error, count as pickled: a part is not blamed for a reference
    to its owner, and nothing is pickled twice.
    """

    def __init__(self, persistent: PersistentKey | None, error: Exception) -> None:
        self._persistent = persistent
        self._deadline = monotonic() + SEARCH_BUDGET_S
        self._visited: dict[int, object] = {}  # by id; retained, so that the ids are not reused
        self.path = ""
        self.culprit: object = None
        self.owner: object = None
        self.error = error

    def descend(self, path: str, obj: object) -> None:
        """Set `culprit` to `obj`, or to the part of it that is at fault."""
        self.path, self.culprit = path, obj
        for _ in range(MAX_SEARCH_DEPTH):
            self._visited[id(self.culprit)] = self.culprit
            if not self._descend_once(_iter_parts(self.path, self.culprit)):
                return

    def descend_into_first(self, parts: Iterator[tuple[str, object]]) -> None:
        if self._descend_once(parts):
            self.descend(self.path, self.culprit)

    def _descend_once(self, parts: Iterator[tuple[str, object]]) -> bool:
        """Descend to the first part that cannot be pickled; return False if there is none or time runs out."""
        owner = self.culprit
        try:
            for path, part in parts:
                if monotonic() > self._deadline:
                    return False
                error = self._try_pickle(part)
                if error is not None:
                    self.path, self.culprit, self.owner, self.error = path, part, owner, error
                    return True
                self._visited[id(part)] = part
        # user code failed while listing its parts (__reduce__, a key's __repr__): `owner` itself is the culprit
        except Exception:
            return False
        return False

    def _try_pickle(self, part: object) -> Exception | None:
        pickler = _TrialPickler(self._persistent, self._visited, self._deadline)
        try:
            pickler.dump(part)
        except _OutOfTime:
            return None
        except Exception as error:
            return error
        return None


class _OutOfTime(Exception):
    """The search exceeds its time limit. An expected result, not an error."""


class _TrialPickler(_Pickler):
    """Pickles and discards the output; visited objects count as pickled."""

    def __init__(self, persistent: PersistentKey | None, visited: dict[int, object], deadline: float) -> None:
        super().__init__(self, lambda buffer: False, persistent)
        self._visited = visited
        self._deadline = deadline

    def write(self, piece: bytes | memoryview) -> int:
        if monotonic() > self._deadline:
            raise _OutOfTime
        return len(piece)

    def persistent_id(self, obj: object) -> str | None:
        return "settled" if id(obj) in self._visited else None


def _iter_parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object's pickle, each with a readable path."""
    if type(obj) is dict:
        yield from ((f"{path}[{_short_repr(key)}]", part) for key, part in cast("dict[object, object]", obj).items())
        yield from ((f"key {_short_repr(key)} of {path}", key) for key in obj)
    elif type(obj) in (list, tuple):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(cast("list[object]", obj)))
    elif type(obj) in (set, frozenset):
        yield from ((f"{_short_repr(part)} in {path}", part) for part in cast("set[object]", obj))
    elif isinstance(obj, types.FunctionType):
        yield from _iter_function_parts(path, obj)
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
    elif isinstance(obj, functools.partial):
        yield f"{path}.func", obj.func
        yield from ((f"{path}.args[{index}]", part) for index, part in enumerate(obj.args))
        yield from ((f"{path}.keywords[{key!r}]", part) for key, part in obj.keywords.items())
    elif isinstance(obj, type):
        own = {key: part for key, part in vars(obj).items() if key not in ("__dict__", "__weakref__")}
        yield from ((f"{path}.{key}", part) for key, part in own.items())
    elif isinstance(obj, (property, staticmethod, classmethod)):
        accessors = (obj.fget, obj.fset, obj.fdel) if isinstance(obj, property) else (obj.__func__,)
        yield from ((path, part) for part in accessors)
    else:
        yield from _iter_object_parts(path, obj)


def _iter_function_parts(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path} -> {name}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _global_names(code):
        if name in function.__globals__:
            yield f"{path} -> {name}", function.__globals__[name]
    positional = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    for name, default in (defaults | (function.__kwdefaults__ or {})).items():
        yield f"{path}({name}=...)", default
    yield from ((f"{path}.{name}", part) for name, part in vars(function).items())


def _global_names(code: types.CodeType) -> list[str]:
    """Return the global names that the code, or a function inside it, uses: those that cloudpickle sends along."""
    names = {str(step.argval): None for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)


def _iter_object_parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    reduce = copyreg.dispatch_table.get(type(obj))
    reduced: Any = reduce(obj) if reduce is not None else obj.__reduce_ex__(5)
    if isinstance(reduced, str):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", part) for name, part in attributes.items())
    yield from ((f"{path}[{index}]", part) for index, part in enumerate(items or ()))
    yield from ((f"{path}[{_short_repr(key)}]", part) for key, part in pairs or ())
    for index, argument in enumerate(arguments):
        yield (argument.__qualname__ if isinstance(argument, type) else f"{path}.__reduce__()[1][{index}]"), argument
    if not isinstance(state, dict):
        yield f"{path}.__getstate__()", state


def _suggest_fix(search: _CulpritSearch) -> str:
    kind = _type_name(search.culprit)
    for start, advice in _SUGGESTED_FIXES.items():
        if kind.startswith(start):
            return advice
    owner = search.owner
    if owner is not None and not isinstance(owner, (dict, list, tuple, set, frozenset, type, types.FunctionType)):
        return f"leave it out, or define __getstate__ on {type(owner).__name__} to do so"
    return "leave it out, or make it where it is needed"


# By prefix of a type's name, so that nothing has to be imported.
_SUGGESTED_FIXES = {
    "generator": "send list(...) of it, or make it where it is needed",
    "coroutine": "await it, and send what it gives",
    "_io.": "send its path, and open it where it is needed",
    "socket.": "connect where it is needed",
    "torch._C._distributed_c10d.": "every rank has its own; use that one",
    "torch.distributed.": "every rank has its own; use that one",
}


def _type_name(obj: object) -> str:
    kind = type(obj)
    plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _format_error(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    return text if text else type(error).__name__


def _short_repr(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
