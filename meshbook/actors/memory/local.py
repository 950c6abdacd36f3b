"""The source or target of a copy in this process: a tensor or any object with the buffer protocol."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.errors import TransferError

if TYPE_CHECKING:
    import torch


class Layout(NamedTuple):
    """The tensor that a buffer was made of."""

    dtype: str  # "torch.float32"
    shape: tuple[int, ...]
    nbytes: int


class LocalMemory(NamedTuple):
    """The local source or target of a copy, and the part of the buffer that it corresponds to."""

    keep_alive: Any  # owner of the memory, kept alive during the copy
    address: int | None  # None: not on the CPU
    nbytes: int  # to copy
    offset: int  # in the buffer

    @staticmethod
    def of(thing: Any, layout: Layout, *, writable: bool, offset: int | None, verb: str) -> LocalMemory:
        """Describe the memory of a tensor or buffer-protocol object for a copy.

        Raises:
            TransferError: it does not fit; the message says why.
        """
        preposition = "into" if writable else "from"
        if _is_tensor(thing):
            check_tensor(thing, f"a buffer is {verb if verb == 'read' else 'written'} {preposition}")
            if str(thing.dtype) != layout.dtype and "torch.uint8" not in (str(thing.dtype), layout.dtype):
                raise TransferError(
                    f"the buffer has {layout.dtype} and this tensor {thing.dtype}; bytes are copied as they are, so "
                    f"give a tensor of {layout.dtype}, or .view(torch.uint8) for the bare bytes"
                )
            local_nbytes = thing.numel() * thing.element_size()
            address = thing.data_ptr() if thing.device.type == "cpu" else None
            keep_alive = thing
        else:
            keep_alive, address, local_nbytes = _buffer_protocol_memory(thing, writable)
        start = offset or 0
        available = layout.nbytes - start
        if start < 0 or available < 0:
            raise TransferError(f"offset {start:,} is outside this buffer of {layout.nbytes:,} bytes")
        nbytes = available if writable and offset is None else local_nbytes
        if nbytes > (local_nbytes if writable and offset is None else available):
            raise TransferError(
                f"the buffer has {layout.nbytes:,} bytes{f', {available:,} from offset {start:,} on' if start else ''} "
                f"({layout.dtype}, {list(layout.shape)}), and what it is {verb if verb == 'read' else 'written'} "
                f"{preposition} has {local_nbytes:,}"
            )
        return LocalMemory(keep_alive, address, nbytes, start)

    def copy(self, other: torch.Tensor, *, reading: bool) -> None:
        """Copy from the bytes of another tensor, or into them."""
        own = self._as_bytes()
        (own if reading else other).copy_(other if reading else own)

    def _as_bytes(self) -> torch.Tensor:
        import torch

        if self.address is not None:
            return bytes_at(self.address, self.nbytes)
        flat: torch.Tensor = self.keep_alive.detach().view(-1).view(torch.uint8)
        return flat[: self.nbytes]


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "untyped_storage") and hasattr(thing, "is_contiguous")


def check_tensor(tensor: Any, use: str) -> None:
    """Check that a tensor has memory that can be copied as one block.

    Raises:
        TransferError: it is not a plain tensor, not contiguous, or empty.
    """
    if not _is_tensor(tensor):
        raise TransferError(
            f"{use} a tensor, and this is a {type(tensor).__name__}; torch.as_tensor(...) makes one of an array"
        )
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise TransferError(
            f"{use} a plain tensor, and this is a {type(tensor).__name__} ({tensor.layout}); "
            f"of a DTensor give .to_local(), of a sparse tensor its values and indices"
        )
    if not tensor.is_contiguous():
        raise TransferError(
            f"{use} a contiguous tensor, and this one has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}; .contiguous() makes a copy that is"
        )
    if tensor.numel() == 0:
        raise TransferError(f"{use} a tensor that has elements, and this one has shape {list(tensor.shape)}")


def _buffer_protocol_memory(thing: Any, writable: bool) -> tuple[Any, int, int]:
    """Return an owner to keep alive, the address, and the bytes of an object with the buffer protocol."""
    try:
        view = memoryview(thing)
    except TypeError:
        raise TransferError(
            f"a tensor, or something with the buffer protocol (bytearray, numpy array), is needed here, not a "
            f"{type(thing).__name__}"
        ) from None
    if not view.c_contiguous:
        raise TransferError(f"a contiguous {type(thing).__name__} is needed here; copy it")
    if view.readonly and writable:
        raise TransferError(f"this {type(thing).__name__} is read-only; give a bytearray, a writable array or a tensor")
    if view.readonly:  # ctypes takes the address of writable memory only
        import numpy as np

        array = np.frombuffer(view, dtype=np.uint8)
        return array, int(array.ctypes.data), view.nbytes
    first = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
    return first, ctypes.addressof(first), view.nbytes


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return the bytes at an address of this process, as a tensor that does not keep them alive."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
