"""Reads of remote tensors, which wait: numbers, complete tensors, one rank's part, and the repr."""

from __future__ import annotations

import math
from typing import Any, Literal, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.errors import MeshShapeError, TransferError
from meshbook.rank.tensors.shards import spans_of
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.specs import format_placements
from meshbook.wire import messages

Box = tuple[tuple[int, int], ...]  # start and stop along each dim

# Above this size `full_tensor()` requires `force=True`.
FULL_TENSOR_BYTES = 1 << 30
# From this size on, ranks write into this process's memory; two copies of a smaller tensor are faster than that setup.
MIN_SHARED_READ_BYTES = 1 << 20
# A repr fetches tensors of up to this many elements; of larger ones it shows metadata only.
_MAX_SHOWN_ELEMENTS = 1000


def item(tensor: MeshTensor) -> Any:
    """Return the single element. Partial values are reduced first. Blocks."""
    if tensor.numel() != 1:
        raise RuntimeError(f"a tensor with {tensor.numel()} elements cannot be converted to a number")
    engine = tensor.engine
    if tensor._spec.placements is None and engine.axes.size > 1:
        found = fetch(tensor, "local", engine.ranks)
        values = {rank: value.item() for rank, value in found.items()}
        first = next(iter(values.values()))
        if any(value != first and not (value != value and first != first) for value in values.values()):
            values_text = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items())[:8])
            raise ValueError(
                f"every rank has a number of its own here ({values_text}); take one of them, t.local(rank).item(), or "
                "reduce them, t.reduce(axis)"
            )
        return first
    rank = engine.ranks[0]
    return fetch(tensor, "item", (rank,))[rank]


@_disable_current_modes()
def full_tensor(tensor: MeshTensor, *, force: bool = False) -> torch.Tensor:
    """See `RemoteTensor.full_tensor`."""
    engine, spec = tensor.engine, tensor._spec
    copies = engine.axes.size if spec.placements is None else 1
    size = tensor.numel() * tensor.element_size() * copies
    if size > FULL_TENSOR_BYTES and not force:
        raise MemoryError(
            f"the whole tensor of shape {tuple(tensor.shape)} has {size / (1 << 30):.1f} GiB; full_tensor(force=True) "
            "brings it all the same, t.local(rank) one rank's part, t[:10].full_tensor() a slice"
        )
    shape = tuple(spec.shape)
    if spec.placements is None:
        local_box = tuple((0, length) for length in shape)
        boxes = {rank: ((position, position + 1), *local_box) for position, rank in enumerate(engine.axes.ranks)}
        return read(tensor, "local", (len(boxes), *shape), boxes)
    holders: dict[Box, int] = {}
    for rank in engine.axes.ranks:
        holders.setdefault(spans_of(shape, spec.placements, engine.axes, rank), rank)
    boxes = {rank: box for box, rank in holders.items() if all(stop > start for start, stop in box)}
    return read(tensor, "parts", shape, boxes or {engine.axes.ranks[0]: tuple((0, length) for length in shape)})


def same_on_all(tensor: MeshTensor) -> torch.Tensor:
    """Return the complete tensor; of per-rank tensors, the one that all ranks hold. Blocks.

    Raises:
        TransferError: ranks hold different ones.
    """
    whole = full_tensor(tensor)
    if tensor._spec.placements is not None:
        return whole
    with _disable_current_modes():
        if not whole.isclose(whole[:1], rtol=0, atol=0, equal_nan=True).all():
            raise TransferError(
                "every rank has a tensor of its own here; t.local(0) is rank 0's, t.full_tensor() has a row per rank"
            )
        return whole[0]


@_disable_current_modes()  # the result is assembled here, even inside `mesh.activate()`
def local(tensor: MeshTensor, rank: int) -> torch.Tensor:
    """See `RemoteTensor.local`."""
    engine = tensor.engine
    if rank not in engine.ranks:
        raise MeshShapeError(f"rank {rank} holds nothing of this tensor, which lies on {engine.axes}")
    spec = tensor._spec
    spans = [(0, length) for length in spec.shape]
    if spec.placements is not None:
        spans = list(spans_of(spec.shape, spec.placements, engine.axes, rank))
    shape = tuple(stop - start for start, stop in spans)
    return read(tensor, "local", shape, {rank: tuple((0, length) for length in shape)})


def read(
    tensor: MeshTensor, how: Literal["parts", "local"], shape: tuple[int, ...], boxes: dict[int, Box]
) -> torch.Tensor:
    """Return a tensor of this shape, assembled from the boxes of these ranks. Blocks.

    The ranks write a large one into shared memory themselves. That memory is reused when it is released: this costs one
    copy, and no fresh pages unless other such tensors are still in use.
    """
    dtype, ranks = tensor.dtype, tuple(boxes)
    size = math.prod(shape) * dtype.itemsize
    buffer = tensor.engine.session.transfer.allocate_buffer(size) if size >= MIN_SHARED_READ_BYTES else None
    result: torch.Tensor | None
    if buffer is None:
        pieces = fetch(tensor, how, ranks)
        result = torch.empty(shape, dtype=dtype, device="cpu") if len(pieces) > 1 else None
    else:
        with buffer:
            pieces = fetch(tensor, how, ranks, messages.FetchBuffer(buffer.memory, shape, boxes))
            memory = torch.frombuffer(buffer.claim(), dtype=torch.uint8)
            result = memory.view(dtype).view(shape)
    if len(pieces) == len(ranks) == 1:
        piece_only: torch.Tensor = pieces[ranks[0]]
        return piece_only.reshape(shape) if piece_only.numel() == math.prod(shape) else piece_only
    assert result is not None
    for rank, piece in pieces.items():  # of ranks that could not write into the buffer
        result[tuple(slice(*span) for span in boxes[rank])] = piece
    return result


def fetch(
    tensor: MeshTensor, how: Any, ranks: tuple[int, ...], buffer: messages.FetchBuffer | None = None
) -> dict[int, Any]:
    """Return the replies of these ranks, except those that wrote into the buffer. Blocks."""
    request = messages.Fetch(mode=how, id=tensor._handle.id, ranks=tuple(sorted(ranks)), buffer=buffer)
    answers = tensor.engine.fetch(request)
    return {rank: answers[rank]["value"] for rank in ranks if buffer is None or "value" in answers[rank]}


def format_repr(tensor: MeshTensor) -> str:
    """Format a repr: small tensors with their values, which blocks; large ones without."""
    spec = tensor._spec
    grad = ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
    if tensor.grad_fn is not None:
        grad = f", grad_fn=<{type(tensor.grad_fn).__name__}>"
    placements_text = (
        f", placements={format_placements(spec.placements)}" if spec.placements is not None else ", per rank"
    )
    suffix = f"{placements_text} on {tensor.engine.axes}{grad})"
    if tensor.numel() * (1 if spec.placements is not None else tensor.engine.axes.size) > _MAX_SHOWN_ELEMENTS:
        dtype = "" if spec.dtype is torch.get_default_dtype() else f", dtype={spec.dtype}"
        return f"RemoteTensor(shape={tuple(spec.shape)}{dtype}{suffix}"
    numbers = repr(full_tensor(tensor.detach()))  # type: ignore[arg-type]
    return f"RemoteTensor({numbers.removeprefix('tensor(').rpartition(')')[0]}{suffix}"


def key_of(tensor: MeshTensor, session: Any) -> str:
    """Return its key on its ranks. Commands run in order, so the operation that makes it has run by then."""
    if tensor.engine.session is not session:
        raise TransferError(
            f"this tensor lies on the mesh {tensor.engine.session.name!r}, not on {session.name!r}; bring it over: "
            "meshbook.distribute(x.full_tensor(), mesh, ...)"
        )
    tensor.engine.sender.check_open()
    tensor.engine.faults.check_ids((tensor._handle.id,))
    return f"tensor:{tensor.engine.name}#{tensor._handle.id}"


def refuse_pickling(tensor: MeshTensor) -> NoReturn:
    raise TransferError(
        f"a RemoteTensor {tuple(tensor.shape)} lives on the ranks of {tensor.engine.session.name!r} and cannot be "
        "pickled here; take x.full_tensor() first (of a model: model.state_dict(full=True), or by parts "
        "model.save_checkpoint(folder)), or pass it to mesh.execute, where it is the rank's own tensor"
    )
