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
import io
import pickle
import sys
from collections.abc import Collection, Sequence
from typing import Any

from meshbook.errors import TransferError, message_of
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.codec import MAX_MESSAGE_BYTES
from meshbook.wire.messages import InlineBuffer, Payload, SharedBuffer
from meshbook.wire.pickler import (
    LimitExceeded,
    PayloadPickler,
    PersistentKey,
    PickleWriter,
    Reduce,
    dump_tensor_table,
)
from meshbook.wire.unpicklable import describe_unpicklable, format_error, type_name
from meshbook.wire.unpickler import PayloadUnpickler, ResolveKey, SplicedStream, TensorTableReader

INLINE_THRESHOLD = 64 << 10  # bytes; below it a copy into the message is cheaper than opening and releasing a segment
# bytes of the pickle itself (a list of a million ints); above it, one shared copy instead of one per rank and hop
STREAM_THRESHOLD = 1 << 20
# bytes of one piece that pickle writes; its own frames are shorter, so such pieces are bytes or text
OUT_OF_BAND_BYTES = 128 << 10


def dump(
    obj: object,
    *,
    pool: SegmentPool | None,
    readers: int | Collection[int] = 1,
    inline_threshold: int = INLINE_THRESHOLD,
    persistent: PersistentKey | None = None,
    reduce: Reduce | None = None,
    name: str | Sequence[str] = "value",
    copy: bool = True,
) -> Payload:
    """Pickle `obj`. Blocks while buffers are copied into shared memory.

    Args:
        pool: receives the buffers of at least `inline_threshold` bytes; None sends them in the message.
        copy: False: without a pool, buffers are the object's own memory; encode the payload before the object changes.
        readers: see `SegmentPool.write`.
        persistent: called for every object except plain containers, numbers and strings.
        reduce: the same, for those without a key.
        name: what an error calls the object; if the object is a tuple of values, one name per element.

    Raises:
        TransferError: the object cannot be pickled (the message names the part at fault), or shared memory cannot be
            allocated. No segment is retained.
    """
    writer = PickleWriter(out_of_band_bytes=None if pool is None else OUT_OF_BAND_BYTES)
    out_of_band: list[pickle.PickleBuffer] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < inline_threshold:
            return True  # stays in the pickle
        out_of_band.append(buffer)
        return False

    pickler = PayloadPickler(writer, take_out, persistent, reduce=reduce)
    try:
        pickler.dump(obj)
        tensor_bytes = pickler.tensors.extract_storages() if pickler.tensors else []
    except Exception as error:
        raise TransferError(describe_unpicklable(obj, name, persistent, error)) from error
    large = [buffer.raw() for buffer in out_of_band]
    storages: list[int | bytes] = []
    for storage_bytes in tensor_bytes:
        if storage_bytes.nbytes < inline_threshold:
            storages.append(bytes(storage_bytes))
        else:
            storages.append(len(large))
            large.append(storage_bytes)
    head = dump_tensor_table(pickler, storages)
    stream = writer.join(head)
    if pool is None:
        inline: Any = map(bytes, large) if copy else large  # which are encoded alike
        return Payload(stream, tuple(map(InlineBuffer, inline)))
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


def dump_small(obj: object, limit: int) -> Payload | None:
    """Pickle `obj` into at most `limit` bytes without separate buffers; return None if it needs more.

    Stops as soon as the limit is exceeded. It runs on every cell's value, so an error does not search for the part at
    fault.

    Raises:
        TransferError: the object cannot be pickled.
    """
    writer = PickleWriter(limit)
    pickler = PayloadPickler(writer, lambda buffer: writer.check_limit(buffer.raw().nbytes), None, limit=limit)
    try:
        pickler.dump(obj)
        if pickler.tensors:
            writer.check_limit(pickler.tensors.nbytes())
        tensor_bytes = pickler.tensors.extract_storages() if pickler.tensors else []
    except LimitExceeded:
        return None
    except Exception as error:
        raise TransferError(f"a {type_name(obj)} cannot be pickled: {format_error(error)}") from error
    stream = writer.join(dump_tensor_table(pickler, [bytes(storage_bytes) for storage_bytes in tensor_bytes]))
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
    stream: io.BytesIO | SplicedStream | None = None
    try:
        stream = (
            SplicedStream.from_payload(payload, views)
            if payload.splice_offsets or not payload.pickled
            else io.BytesIO(payload.pickled)
        )
        with _disable_torch_modes():
            return PayloadUnpickler(stream, views, TensorTableReader(pickle.load(stream), views), resolve).load()
    except (TransferError, MemoryError):
        raise
    except Exception as error:
        raise TransferError(
            f"the value arrived and cannot be rebuilt here: {type(error).__name__}: {message_of(error)}; if its "
            f"class is your own, look at its __setstate__ and __init__, or send plain data"
        ) from error
    finally:
        views.clear()  # a traceback retains this frame, and must not retain the memory
        if stream is not None:
            stream.close()
