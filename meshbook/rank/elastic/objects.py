"""Gives new ranks the models, optimizers and other objects that the state of a snapshot is loaded into.

A heal copies an object only if it is proven that the lost rank held the same. Ranks that a loss cut in the
middle of a step differ, so a new rank may have no object at all. Contents do not matter here: the snapshot has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshbook.errors import TransferError
from meshbook.rank.elastic import transfer
from meshbook.rank.healing.transfer import References, Resolver, pickle_bundle, receive, send
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.state.kinds import has_identity
from meshbook.wire import pickling

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, str])


def give_objects(
    names: Sequence[str],
    new_ranks: Sequence[int],
    rank: int,
    namespace: MutableMapping[str, Any],
    groups: ProcessGroups,
) -> None:
    """Copy objects of these names to new ranks that have none, from the first rank that is not new.

    All ranks call this. What cannot be pickled, as an FSDP2 model, is left out.
    """
    source = next(at for at in range(dist.get_world_size()) if at not in new_ranks)
    types = {name: type(value).__name__ for name, value in namespace.items()}
    types_of = [_decoder.decode(text) for text in transfer.gather(_encoder.encode(types))]
    for new in new_ranks:
        wanted = [name for name in names if name in types_of[source] and name not in types_of[new]]
        if not wanted:
            continue
        if rank == source:
            bundle = _with_other_names(wanted, {name: namespace[name] for name in types if name not in types_of[new]})
            shared = [name for name, kind in types_of[new].items() if types.get(name) == kind]
            payload, _ = pickle_bundle(bundle, References(namespace, shared, groups.mesh))
            send(payload, {}, new)
        elif rank == new:
            payload, _ = receive(source)
            with contextlib.suppress(TransferError):  # the load of the state says which object is missing
                namespace.update(pickling.load(payload, resolve=Resolver(namespace, groups.table)))


def _with_other_names(names: Sequence[str], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of these names, and the same or modules in them under the other names that they have."""
    found = {name: absent[name] for name in names if has_identity(absent[name])}
    modules = {id(part) for value in found.values() if isinstance(value, torch.nn.Module) for part in value.modules()}
    return found | {name: value for name, value in absent.items() if id(value) in modules}
