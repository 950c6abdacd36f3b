"""Snapshots of remote tensors for `mesh.resilient`: operations that take one, find the last one, and load it.

The snapshots are those of `mesh.elastic` (`rank.elastic`): this rank's part of each tensor, and copies of what another
rank holds alone. Here the controller names the tensors, counts the steps and keeps the rest of a loop's state. A
snapshot is taken by an operation like any other, in order with the steps, so nobody waits for it but the ranks.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import UsageError
from meshbook.rank.elastic import transfer
from meshbook.rank.elastic.agreement import HeldSnapshot, Record, options_to_go_back
from meshbook.rank.elastic.contents import Part
from meshbook.rank.elastic.runs import Run
from meshbook.rank.process_groups import gradient_buckets
from meshbook.rank.state.modules import reshard
from meshbook.rank.tensors import tensor_store
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.operators import FUNCTIONS
from meshbook.rank.tensors.resident_module import RESIDENT_MODULES, ResidentModule
from meshbook.rank.tensors.tensor_store import FOREIGN_MEMORY, TensorStore

_PART = "tensors"  # the one part of a snapshot, as `mesh.elastic` has one for each name
_packer = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(Record)


def take_snapshot(tensors: Sequence[torch.Tensor], run: float, number: float, step: float) -> None:
    """Copy these tensors into the memory of this rank and, as far as no other has them, of its keeper. Blocks.

    The store reports `{"taken": number}` once all ranks have it. Until then the snapshot before it is kept.

    Raises:
        UsageError: a tensor is one that cannot be put back.
    """
    store = _current_store()
    local = [_memory_of(tensor) for tensor in tensors]
    for resident in _modules():
        reshard(resident.module)
    if store.loop is None or store.loop.number != int(run):
        store.loop = _new_run(int(run))
    at = HeldSnapshot(int(number), 0, int(step), is_end=False, has_copies=True)
    buckets = {resident.key: gradient_buckets.read(resident.module) for resident in _ddp_modules()}
    store.loop.take(dist.get_rank(), at, {_PART: Part(pickle.dumps(buckets), local)})
    store.loop_report = {"taken": int(number)}


def collect_snapshot(run: float) -> None:
    """Find the newest snapshot of which every rank's part can be had, and give each rank its part. Blocks.

    All ranks come to the same. The store reports the number of the snapshot and the ranks whose parts came from others:
    `{"number": 7, "lacking": [1]}`; or `{"problem": "..."}`.
    """
    store, rank = _current_store(), dist.get_rank()
    store.pending_error = None  # of what is undone now
    loop = store.loop
    if loop is None or loop.number != int(run):
        loop = _new_run(int(run))
    records = [_records.decode(text) for text in transfer.gather(_packer.encode(loop.describe()))]
    options = options_to_go_back(int(run), records, loop=0)
    if not options:
        why = "no rank is left that has one. Load a checkpoint, and call mesh.resilient(..., restart=True)"
        store.loop_report = {"problem": f"there is no snapshot to go back to: {why}"}
        return
    try:
        chosen, snapshot = loop.collect(rank, options)
    except UsageError as error:  # the same on all ranks
        store.loop_report = {"problem": str(error)}
        return
    loop.complete_copies(rank, snapshot, chosen)
    store.loop = loop
    store.loop_report = {"number": chosen.snapshot.number, "lacking": list(chosen.lacking)}


def load_snapshot(tensors: Sequence[torch.Tensor], places: Sequence[int], number: float) -> None:
    """Overwrite these tensors with what they held in the snapshot that was collected.

    Args:
        places: of each, its index among those that were given to `take_snapshot`.
    """
    loop = _current_store().loop
    held = [] if loop is None else [one for one in loop.complete if one.held is not None]
    snapshot = next(one for one in held if one.held is not None and one.held.number == int(number))
    part = snapshot.parts([_PART])[_PART]
    for resident in _modules():
        reshard(resident.module)
    for tensor, place in zip(tensors, places, strict=True):
        local, memory = wait_local_tensor(tensor).detach(), part.tensors[place]
        local.copy_(memory.view(local.dtype).view(local.shape))
    buckets = pickle.loads(part.pickled)
    for resident in _ddp_modules():
        _arrange_buckets(resident, buckets.get(resident.key))


def forget_snapshots() -> None:
    """Free the memory of the snapshots: the loop has ended well."""
    _current_store().loop = None


FUNCTIONS.update({one.__name__: one for one in (take_snapshot, collect_snapshot, load_snapshot, forget_snapshots)})


def _current_store() -> TensorStore:
    store = tensor_store.current_store
    assert store is not None  # an operation runs
    return store


def _new_run(number: int) -> Run:
    return Run(number, "", "", "", function="mesh.resilient")


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor. Raises UsageError for one that cannot be put back on a new process."""
    local = wait_local_tensor(tensor).detach()
    if tensor in FOREIGN_MEMORY:
        raise UsageError("a tensor of the state belongs to a cell (mesh['name']): its loop is one for mesh.elastic")
    if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_quantized:
        raise UsageError(f"a tensor of the state has no dense memory ({type(local).__name__}, {local.layout})")
    return local


# ---- modules that live on the ranks


def _modules() -> list[ResidentModule]:
    return [resident for _, resident in sorted(RESIDENT_MODULES.items())]


def _ddp_modules() -> Iterator[ResidentModule]:
    return (resident for resident in _modules() if isinstance(resident.module, DistributedDataParallel))


def _arrange_buckets(resident: ResidentModule, buckets: Any) -> None:
    """Have DDP sum gradients in the order of the snapshot, if the same parameters need them."""
    if buckets is not None and sorted(itertools.chain.from_iterable(buckets)) == list(
        range(len(resident.trainable_indices))
    ):
        gradient_buckets.arrange(resident.module, buckets)
