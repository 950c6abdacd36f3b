"""The receiving side of `wire.pickling`: streams that are read in place, tables of tensors, and what a pickle names."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshbook.errors import TransferError
from meshbook.wire.memory_files import copy_to_fresh_pages
from meshbook.wire.messages import Payload

if TYPE_CHECKING:
    import torch
    from torch.storage import UntypedStorage

_HEAP_TYPE = 1 << 9  # of `type.__flags__`: the class was made at run time

ResolveKey = Callable[[str], object]  # returns the object of a key


class SplicedStream:
    """A file for the unpickler over a pickled stream with out-of-band pieces."""

    def __init__(self, chunks: Iterable[memoryview]) -> None:
        self._chunks = deque(chunk for chunk in chunks if chunk.nbytes)

    @classmethod
    def from_payload(cls, payload: Payload, views: list[memoryview]) -> SplicedStream:
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


class TensorTableReader:
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


class PayloadUnpickler(pickle.Unpickler):
    """Unpickles with this stream's tensors and the receiver's `resolve`; import errors name the missing module."""

    def __init__(
        self,
        stream: io.BytesIO | SplicedStream,
        views: Sequence[memoryview],
        tensors: TensorTableReader,
        resolve: ResolveKey | None,
    ) -> None:
        super().__init__(stream, buffers=views)
        self._overrides: dict[tuple[str, str], Any] = {
            (__name__, "tensor_of_table"): tensors,
            (__name__, "resolve_unknown"): resolve or resolve_unknown,
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


# The functions that a pickle names to rebuild an object. `PayloadUnpickler.find_class` replaces the first two.


def tensor_of_table(index: int) -> Any:
    raise TransferError(f"tensor {index} of a value came without its table; read it with meshbook.wire.pickling.load")


def resolve_unknown(key: str) -> object:
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


def exception_of(Class: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception with these `args`, without calling the `__init__` that its class defines in Python."""
    base: Any = builtin_base(Class)
    error: BaseException = base.__new__(Class, *args)
    base.__init__(error, *args)
    return error


def builtin_base(Class: type) -> type:
    """Return the nearest class written in C that has the memory layout of `Class`."""
    while Class.__flags__ & _HEAP_TYPE:
        assert Class.__base__ is not None
        Class = Class.__base__
    return Class


def constant_of_torch(name: str) -> Any:
    """Return `torch.float32` or `torch.preserve_format` by its name."""
    import torch

    return getattr(torch, name)


def same(obj: object) -> object:
    return obj


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)


def untyped_storage(flat: torch.Tensor) -> UntypedStorage:
    return flat.untyped_storage()


def typed_storage(flat: torch.Tensor, dtype: torch.dtype) -> Any:
    import torch

    storage: Any = torch.TypedStorage  # TypedStorage is untyped
    return storage(wrap_storage=flat.untyped_storage(), dtype=dtype, _internal=True)
