"""What messages are made of: Python objects in transit, previews of values, and errors."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class Message(Struct, tag=True, frozen=True, gc=False):
    """Base of every message: immutable, and tagged on the wire with its class name."""


class SharedBuffer(Struct, tag="shared", frozen=True, gc=False):
    """Bytes in an anonymous memory file of a process on this machine, readable through /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    offset: int
    nbytes: int
    segment: str  # the owner's name for it; sent back in `Release`


class InlineBuffer(Struct, tag="inline", frozen=True, gc=False):
    """Bytes that are part of the message itself."""

    data: bytes


class Payload(Struct, frozen=True, gc=False):
    """One pickled object: protocol 5, with its large buffers out of band, in the pickle's order."""

    pickled: bytes  # empty: the pickle is the last of the buffers
    buffers: tuple[SharedBuffer | InlineBuffer, ...] = ()
    # where in `pickled` the last buffers belong that are pieces of it (large bytes, text)
    splice_offsets: tuple[int, ...] = ()


class TensorMeta(Struct, frozen=True, gc=False):
    """Metadata of a tensor, without its data."""

    shape: tuple[int, ...]  # local shape, or the global one if `placements` is set
    dtype: str  # "float32", without "torch."
    device: str  # "cpu", "cuda:0"
    requires_grad: bool = False
    placements: str | None = None  # "(Shard(dim=0),)" of a DTensor; None for a plain tensor
    local_shape: tuple[int, ...] | None = None  # of a DTensor
    stride: tuple[int, ...] | None = None  # in items, of `shape`; None: it has none (sparse), or it was not requested


class Preview(Struct, frozen=True, gc=False):
    """A bounded representation of a value: enough to display it and to compare it between ranks."""

    kind: Literal["plain", "tensor", "object", "none"]
    type: str  # "int", "torch.Tensor", "numpy.ndarray", "__main__.Model"
    text: str  # bounded repr
    html: str | None = None  # bounded _repr_html_
    data: dict[str, Any] = {}  # other MIME types of a rich display, bounded; bytes already in base64
    metadata: dict[str, Any] = {}
    tensor: TensorMeta | None = None
    digest: str | None = None  # equal digests mean equal content even if the text is truncated; None: not computed
    truncated: bool = False


class Value(Struct, frozen=True, gc=False):
    """The value of an expression on a rank."""

    preview: Preview
    # the rank stores the object under this name until `Release`; None: it is complete in `payload`
    ref: str | None = None
    payload: Payload | None = None  # the object itself, when small


class Frame(Struct, frozen=True, gc=False):
    """One line of a Python stack."""

    file: str
    line: int
    function: str


class RankError(Struct, frozen=True, gc=False):
    """An exception raised on a rank."""

    ename: str  # class name, "ZeroDivisionError"
    evalue: str  # str(exception)
    traceback: tuple[str, ...]  # rendered by IPython on the rank: ANSI colours, cell source lines
    frames: tuple[Frame, ...] = ()  # outermost first; identifies equal failures
    pickled: bytes | None = None  # the exception itself, if it can be pickled and is small
    notes: tuple[str, ...] = ()
    released_from: str | None = None  # "all_reduce at line 4": it waited there for ranks that had left the call
