"""A snapshot of another number of ranks: what those held alike is given to the ranks that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshbook.errors import UsageError
from meshbook.rank.elastic import transfer
from meshbook.rank.elastic.agreement import GoBack, replicated_names
from meshbook.rank.elastic.contents import Part
from meshbook.rank.elastic.runs import Run
from meshbook.rank.elastic.versions import is_unchanged
from meshbook.rank.state.kinds import has_identity

_packer = msgspec.msgpack.Encoder()
_names = msgspec.msgpack.Decoder(list[str])
_answers = msgspec.msgpack.Decoder(dict[str, Any])


def _find_moved(run: Run, names: Sequence[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return the names whose tensors a resize has cut anew, as they were in the snapshot, and nobody changed since.

    A rank that has joined was given them by the others, and says what these say. Blocks.
    """
    moved = [
        name
        for name, versions in run.moved.items()
        if name in names and name in namespace and versions and is_unchanged(namespace[name], versions)
    ]
    own = {"moved": moved, "joined": not run.complete}
    said = [_answers.decode(text) for text in transfer.gather(_packer.encode(own))]
    old = [set(one["moved"]) for one in said if not one["joined"]]
    return [name for name in names if all(name in one for one in old)] if old else []


def share_parts(
    rank: int, decision: GoBack, run: Run, names: Sequence[str], namespace: Mapping[str, Any]
) -> tuple[list[str], dict[str, Part]]:
    """Return the names whose state is the same for all ranks, and parts of names that this rank is to load. Blocks.

    That is what was equal on all ranks before, and what a resize has cut anew, which is not loaded. A rank without a
    snapshot gets the parts of what was equal, and the last of `names` in any case.
    """
    snapshot, moved = run.find(decision.snapshot.number), _find_moved(run, names, namespace)
    alike = set[str]() if snapshot is None else replicated_names(snapshot.manifests)
    equal = [name for name in names if name in alike and name not in moved]
    equal = _names.decode(transfer.gather(_packer.encode(equal))[decision.source])
    if snapshot is not None:
        parts = snapshot.parts(names)
        for other in decision.lacking if rank == decision.source else ():
            sent = {name: part for name, part in parts.items() if name in equal or name == names[-1]}
            dist.send_object_list([sent], other, device=torch.device("cpu"))
        return [*equal, *moved], {name: part for name, part in parts.items() if name not in moved}
    received: list[Any] = [None]
    dist.recv_object_list(received, decision.source, device=torch.device("cpu"))
    return [*equal, *moved], received[0]


def check(decision: GoBack, own: Sequence[str], namespace: Mapping[str, Any], *, has_rows: bool) -> None:
    """Raise UsageError if the loop cannot go on on this number of ranks.

    Args:
        own: names whose state differed between the ranks.
        has_rows: it is known which rows of the epoch are left.
    """
    before, now = decision.snapshot.world_size, len(decision.held)
    anew = "load a checkpoint, and call mesh.elastic(..., restart=True)"
    cut = [name for name in own if name not in namespace or has_identity(namespace[name])]
    if cut:
        raise UsageError(f"{', '.join(cut)} differed between the {before} ranks of before, and there are {now}: {anew}")
    if not has_rows and not decision.is_over:
        raise UsageError(
            f"which rows the {before} ranks of before have had is not known to this loader, and there are {now}: give "
            "a DataLoader with sampler=meshbook.ElasticSampler(dataset), as it is (without enumerate); for this run, "
            f"{anew}"
        )
