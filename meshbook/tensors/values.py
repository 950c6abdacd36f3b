"""What is waited for: numbers, whole tensors, one rank's piece, and how a tensor reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.errors import MeshShapeError, TransferError
from meshbook.tensors.plan import spans_of, words_of
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.tensors import remote

# Above it, `full_tensor()` asks whether it is meant.
FULL_TENSOR_BYTES = 1 << 30
# From here on memory for a whole tensor is taken in huge pages.
_HUGE_BYTES = 4 << 20
# A repr fetches tensors of up to this many elements; larger ones are described only.
_SHOWN_ELEMENTS = 1000


def item(tensor: remote.RemoteTensor) -> Any:
    """Its one number. Partial sums are summed first. Blocks."""
    if tensor.numel() != 1:
        raise RuntimeError(f"a tensor with {tensor.numel()} elements cannot be converted to a number")
    engine = tensor.engine
    if tensor._spec.placements is None and engine.axes.size > 1:
        found = fetch(tensor, "local", engine.ranks)
        values = {rank: value.item() for rank, value in found.items()}
        first = next(iter(values.values()))
        if any(value != first and not (value != value and first != first) for value in values.values()):
            told = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items())[:8])
            raise ValueError(
                f"every rank has a number of its own here ({told}); take one of them, t.local(rank).item(), or reduce "
                "them, t.reduce(axis)"
            )
        return first
    rank = engine.ranks[0]
    return fetch(tensor, "item", (rank,))[rank]


@_disable_current_modes()
def full_tensor(tensor: remote.RemoteTensor, *, force: bool = False) -> torch.Tensor:
    """See `RemoteTensor.full_tensor`."""
    engine, spec = tensor.engine, tensor._spec
    copies = engine.axes.size if spec.placements is None else 1
    size = tensor.numel() * tensor.element_size() * copies
    if size > FULL_TENSOR_BYTES and not force:
        raise MemoryError(
            f"the whole tensor of shape {tuple(tensor.shape)} has {size / (1 << 30):.1f} GiB; full_tensor(force=True) "
            "brings it all the same, t.local(rank) one rank's part, t[:10].full_tensor() a slice"
        )
    if spec.placements is None:
        found = fetch(tensor, "local", engine.ranks)
        return torch.stack([found[rank] for rank in engine.axes.ranks])
    boxes: dict[tuple[tuple[int, int], ...], int] = {}
    for place, rank in enumerate(engine.axes.ranks):
        boxes.setdefault(spans_of(spec.shape, spec.placements, engine.axes, place), rank)
    holders = {rank: box for box, rank in boxes.items() if all(stop > start for start, stop in box)}
    if not holders:
        holders = {engine.axes.ranks[0]: tuple((0, length) for length in spec.shape)}
    pieces = fetch(tensor, "parts", tuple(sorted(holders)))
    if len(holders) == 1:
        whole: torch.Tensor = next(iter(pieces.values()))
        return whole.contiguous()
    whole = _room(spec.shape, spec.dtype)
    for rank, box in holders.items():
        whole[tuple(slice(start, stop) for start, stop in box)] = pieces[rank]
    return whole


def _room(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor. A large one lies in NumPy's memory, in huge pages: filling it takes half the time."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(numpy.empty(size, numpy.uint8)).view(dtype).view(shape)


@_disable_current_modes()  # what comes is put together here, inside of `mesh.activate()` too
def local(tensor: remote.RemoteTensor, rank: int) -> torch.Tensor:
    """See `RemoteTensor.local`."""
    engine = tensor.engine
    if rank not in engine.ranks:
        raise MeshShapeError(f"rank {rank} holds nothing of this tensor, which lies on {engine.axes}")
    found: torch.Tensor = fetch(tensor, "local", (rank,))[rank]
    return found


def fetch(tensor: remote.RemoteTensor, how: Any, ranks: tuple[int, ...]) -> dict[int, Any]:
    """What these ranks answer. Blocks."""
    question = messages.Fetch(how=how, id=tensor._handle.id, ranks=ranks)
    answers = tensor.engine.fetch(question)
    return {rank: answers[rank]["value"] for rank in ranks}


def describe(tensor: remote.RemoteTensor) -> str:
    """A repr: small tensors with their numbers, for which it waits; large ones without."""
    spec = tensor._spec
    dtype = "" if spec.dtype is torch.get_default_dtype() else f", dtype={spec.dtype}"
    grad = ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
    if tensor.grad_fn is not None:
        grad = f", grad_fn=<{type(tensor.grad_fn).__name__}>"
    place = f", placements={words_of(spec.placements)}" if spec.placements is not None else ", per rank"
    tail = f"{dtype}{place} on {tensor.engine.axes}{grad})"
    if tensor.numel() * (1 if spec.placements is not None else tensor.engine.axes.size) > _SHOWN_ELEMENTS:
        return f"RemoteTensor(shape={tuple(spec.shape)}{tail}"
    numbers = repr(full_tensor(tensor.detach()))  # type: ignore[arg-type]
    return f"RemoteTensor({numbers.removeprefix('tensor(').rpartition(')')[0]}{tail}"


def key_of(tensor: remote.RemoteTensor, session: Any) -> str:
    """What names it to its ranks. They have run what it comes from before they are asked: commands keep their order."""
    if tensor.engine.session is not session:
        raise TransferError(
            f"this tensor lies on the mesh {tensor.engine.session.name!r}, not on {session.name!r}; bring it over: "
            "meshbook.distribute(x.full_tensor(), mesh, ...)"
        )
    return f"tensor:{tensor.engine.name}#{tensor._handle.id}"


def refuse_pickling(tensor: remote.RemoteTensor) -> NoReturn:
    raise TransferError(
        f"a RemoteTensor {tuple(tensor.shape)} lives on the ranks of {tensor.engine.session.name!r} and cannot be "
        "pickled here; take x.full_tensor() first, or pass it to mesh.execute, where it is the rank's own tensor"
    )
