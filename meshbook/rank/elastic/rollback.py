"""Loads the last snapshot of an elastic loop that was cut off, so that a whole step can be saved in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import torch.distributed as dist

from meshbook.rank.elastic import contents, transfer
from meshbook.rank.elastic.loop import NOW
from meshbook.rank.elastic.runs import ElasticRuns, Run
from meshbook.rank.elastic.versions import is_unchanged, versions_of
from meshbook.rank.state.random_states import set_random_states

_packer = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(tuple[str, int, list[int]])


def roll_back(runs: ElasticRuns, calls: Collection[str], sharing: Collection[str] = ()) -> dict[str, Any]:
    """Load, on all ranks, the last snapshot that all hold of the loop that one of these calls has left in the middle.

    Args:
        calls: none: any call.
        sharing: names of which one at least is part of the loop's state; none: any.

    A collective of all ranks. Returns the reply of `messages.RollBack`.

    Raises:
        UsageError: a name is not what it was when the snapshot was taken.
    """
    found = [
        (key, run)
        for key, run in runs.runs.items()
        if run.is_open and (not calls or run.last_call in calls) and (not sharing or _is_of_these_ranks(run, sharing))
    ]
    key, run = found[-1] if found else ("", None)
    offers = [_offers.decode(text) for text in transfer.gather(_packer.encode(_offer(key, run)))]
    common = set(offers[0][2]).intersection(*(numbers for _, _, numbers in offers))
    if run is None or len({offer[:2] for offer in offers}) > 1 or not common:
        return {"names": [], "step": 0}
    snapshot = next(one for one in run.complete if one.held is not None and one.held.number == max(common))
    assert snapshot.held is not None
    parts = snapshot.parts(list(snapshot.manifests[dist.get_rank()].parts))
    names = [name for name in parts if name.isidentifier()]
    mesh = runs.groups.mesh
    assert mesh is not None  # formed before any cell runs
    meshes = contents.meshes_by_key(runs.namespace, names, mesh)
    for name in names:
        contents.restore(name, parts[name], runs.namespace, meshes)
    now = contents.unpickle_part(parts[NOW], meshes)
    set_random_states(now["random"])
    run.moved = {name: versions_of(runs.namespace[name]) for name in names}
    return {"names": names, "step": snapshot.held.step}


def drop_changed(runs: ElasticRuns) -> None:
    """DTensors are about to be cut anew: forget which were as in a snapshot before, and have been changed since."""
    for run in runs.runs.values():
        run.moved = {
            name: versions
            for name, versions in run.moved.items()
            if name in runs.namespace and is_unchanged(runs.namespace[name], versions)
        }


def shards_moved(runs: ElasticRuns) -> None:
    """DTensors were cut anew for other ranks, after a loop was rolled back: it goes on with them as they are."""
    for run in runs.runs.values():
        run.moved = {name: versions_of(runs.namespace[name]) for name in run.moved if name in runs.namespace}


def _is_of_these_ranks(run: Run, names: Collection[str]) -> bool:
    """Whether a run's last snapshot has one of these names, and is of as many ranks as there are."""
    sizes = {held.world_size for held in run.describe().snapshots}
    return run.has_any(names) and sizes <= {0, dist.get_world_size()}


def _offer(key: str, run: Run | None) -> tuple[str, int, list[int]]:
    """Return what a rank offers to go back to: the loop's key, the run, and the numbers of complete snapshots."""
    if run is None:
        return "", 0, []
    return key, run.number, [held.number for held in run.describe().snapshots]
