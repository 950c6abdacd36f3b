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
from meshbook.rank.elastic.snapshots import Snapshot
from meshbook.rank.healing.contents import has_state

_packer = msgspec.msgpack.Encoder()
_names = msgspec.msgpack.Decoder(list[str])


def share_parts(
    rank: int, decision: GoBack, snapshot: Snapshot | None, names: Sequence[str]
) -> tuple[list[str], dict[str, Part]]:
    """Return the names whose state was equal on all ranks, and parts of all names that this rank can have. Blocks.

    Args:
        snapshot: this rank's; None: it gets those of the names that were equal, and the last of `names` in any case.
    """
    alike = set[str]() if snapshot is None else replicated_names(snapshot.manifests)
    equal = [name for name in names if name in alike]
    equal = _names.decode(transfer.gather(_packer.encode(equal))[decision.source])
    if snapshot is not None:
        parts = snapshot.parts(names)
        for other in decision.lacking if rank == decision.source else ():
            sent = {name: part for name, part in parts.items() if name in equal or name == names[-1]}
            dist.send_object_list([sent], other, device=torch.device("cpu"))
        return equal, parts
    received: list[Any] = [None]
    dist.recv_object_list(received, decision.source, device=torch.device("cpu"))
    return equal, received[0]


def check(decision: GoBack, own: Sequence[str], namespace: Mapping[str, Any], *, has_rows: bool) -> None:
    """Raise UsageError if the loop cannot go on on this number of ranks.

    Args:
        own: names whose state differed between the ranks.
        has_rows: it is known which rows of the epoch are left.
    """
    before, now = decision.snapshot.world_size, len(decision.held)
    anew = "load a checkpoint, and call mesh.elastic(..., restart=True)"
    cut = [
        name
        for name in own
        if name not in namespace
        or isinstance(namespace[name], (torch.nn.Module, torch.Tensor, torch.Generator))
        or has_state(namespace[name])
    ]
    if cut:
        raise UsageError(f"{', '.join(cut)} differed between the {before} ranks of before, and there are {now}: {anew}")
    if not has_rows and not decision.is_over:
        raise UsageError(
            f"which rows the {before} ranks of before have had is not known to this loader, and there are {now}: give "
            "a DataLoader with sampler=meshbook.ElasticSampler(dataset), as it is (without enumerate); for this run, "
            f"{anew}"
        )
