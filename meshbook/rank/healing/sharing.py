"""Gives new ranks what the other ranks hold, as far as it is known that the lost rank held the same.

All ranks describe what they hold to each other, make the same choices, and then those that are a source send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import TransferError
from meshbook.rank.healing import random_states, transfer
from meshbook.rank.healing.choice import NO_MEMBER, Choice, Held, choose_sources
from meshbook.rank.healing.contents import describe, describe_names
from meshbook.rank.healing.tensor_stores import rebuild_modules, share_tensors
from meshbook.rank.object_states import load_state, state_of
from meshbook.rank.objects import RankObjects
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.interrupted_steps import rebuild_buckets_in_order
from meshbook.rank.process_groups.solo import connect_deferred
from meshbook.wire import pickling
from meshbook.wire.messages import ShareState

_held_encoder = msgspec.json.Encoder()
_held_decoder = msgspec.json.Decoder(dict[str, Held])


def share_state(
    command: ShareState,
    rank: int,
    namespace: MutableMapping[str, Any],
    names: Iterable[str],
    groups: ProcessGroups,
    objects: RankObjects,
    without_others: Callable[[], AbstractContextManager[None]],
) -> dict[str, Any]:
    """Take part in the sharing. Blocks until this rank has sent and received everything.

    Args:
        names: the user's, on this rank.
        objects: remote tensors, and what clients have handles to.
        without_others: context in which collectives return at once.

    Returns:
        `{"restored": {name: [source, why]}, "missing": {name: why}}`: on a new rank what it has, on others nothing.
    """
    topic = f"share/{command.call}"
    unbuilt = rebuild_modules(topic, rank, command.new_ranks, objects.values, groups, without_others)
    connect_deferred(groups)
    randoms = random_states.random_states()
    held = describe_names(namespace, names)
    for name, state in randoms.items():
        held[name] = msgspec.structs.replace(describe(state), kind="random")
    texts = groups.exchange(topic, _held_encoder.encode(held))
    every = {other: _held_decoder.decode(text) for other, text in enumerate(texts)}
    old = {other: holds for other, holds in every.items() if other not in command.new_ranks}
    assert groups.mesh is not None  # they are formed
    assert groups.mesh.mesh_dim_names is not None
    axes = dict(zip(groups.mesh.mesh_dim_names, groups.mesh.mesh.shape, strict=True))
    reply: dict[str, Any] = {"restored": {}, "missing": {}}
    for new in command.new_ranks:
        choices = choose_sources(old, every[new], new, axes, command.rank_dependent) if old else {}
        _share_names(choices, old, every[new], (rank, new), namespace, randoms, groups, reply)
        if rank == new:
            missing = {name: choice.why for name, choice in choices.items() if choice.source is None}
            reply["missing"] |= {name: why for name, why in missing.items() if _is_worth_saying(name)}
            if groups.solo.has_other_buckets:
                rebuild_buckets_in_order()
    shared = share_tensors(topic, rank, command.new_ranks, objects, groups, axes)
    for (cut, source), count in shared.restored.items():
        why = f"the same part, cut over {cut}" if cut else "replicas"
        reply["restored"][_count_tensors(count, reply["restored"])] = [source, why]
    for why, count in shared.missing.items():
        reply["missing"][_count_tensors(count, reply["missing"])] = why
    reply["missing"] |= {f"module {key}": f"could not be built: {why}" for key, why in unbuilt.items()}
    return reply


def _share_names(
    choices: dict[str, Choice],
    held: dict[int, dict[str, Held]],
    theirs: dict[str, Held],
    ranks: tuple[int, int],
    namespace: MutableMapping[str, Any],
    randoms: dict[str, Any],
    groups: ProcessGroups,
    reply: dict[str, Any],
) -> None:
    """Send what is chosen for a new rank, or receive it.

    Args:
        held: by the old ranks.
        theirs: what the new rank holds.
        ranks: this one, and the new one.
    """
    rank, new = ranks
    for source in sorted({choice.source for choice in choices.values() if choice.source is not None}):
        chosen = {name: choice for name, choice in choices.items() if choice.source == source}
        if rank == source:
            _send(chosen, held[rank], theirs, new, namespace, randoms, groups)
        elif rank == new:
            _receive(chosen, source, namespace, groups, reply)
        theirs = {name: held[source][name] for name in chosen} | theirs


def _count_tensors(count: int, named: Collection[str]) -> str:
    """Return a name for some remote tensors that is not among the names yet."""
    text = f"{count} remote tensor{'' if count == 1 else 's'}"
    while text in named:
        text = text.replace("remote", "other remote", 1)
    return text


def _is_worth_saying(name: str) -> bool:
    """Whether a user expects to hear that a name was not restored: other generators are seeded per rank by default."""
    return name not in random_states.NAMES or name == random_states.TORCH


def _send(
    chosen: dict[str, Choice],
    held: dict[str, Held],
    theirs: dict[str, Held],
    new: int,
    namespace: MutableMapping[str, Any],
    randoms: dict[str, Any],
    groups: ProcessGroups,
) -> None:
    shared = [name for name, other in theirs.items() if name in held and held[name].type == other.type]
    bundle: dict[str, Any] = {}
    for name, choice in chosen.items():
        if name in randoms:
            bundle[name] = randoms[name]
        elif held[name].kind == "state" and name in shared:
            bundle[name] = _LoadableState(state_of(namespace[name]))
        elif choice.groups:
            bundle[name] = _made_of_groups(choice, namespace[name])
        else:
            bundle[name] = namespace[name]
    payload, dropped = transfer.pickle_bundle(bundle, transfer.References(namespace, shared, groups.mesh))
    transfer.send(payload, {"dropped": dropped}, new)


def _receive(
    chosen: dict[str, Choice],
    source: int,
    namespace: MutableMapping[str, Any],
    groups: ProcessGroups,
    reply: dict[str, Any],
) -> None:
    payload, extra = transfer.receive(source)
    reply["missing"] |= extra["dropped"]
    try:
        bundle = pickling.load(payload, resolve=transfer.Resolver(namespace, groups.table))
    except TransferError as error:
        reply["missing"] |= dict.fromkeys(chosen, f"what rank {source} sent cannot be read here: {error}")
        return
    for name, value in bundle.items():
        try:
            if name in random_states.NAMES:
                random_states.set_random_state(name, value)
            elif isinstance(value, _LoadableState):
                load_state(namespace[name], value.state)
            elif isinstance(value, _OfGroups):
                namespace[name] = value.make(groups)
            else:
                namespace[name] = value
        except Exception as error:  # a user's load_state_dict may raise anything
            reply["missing"][name] = f"{type(error).__name__}: {error}"
        else:
            reply["restored"][name] = [source, chosen[name].why]


class _OfGroups:
    """Stands for an object that the new rank makes of its own process groups."""

    def __init__(self, names: tuple[str, ...], mesh: tuple[str, Any, tuple[str, ...] | None] | None) -> None:
        self.names, self.mesh = names, mesh  # mesh: device type, ranks, names of dims of a DeviceMesh

    def make(self, groups: ProcessGroups) -> Any:
        if self.names == (NO_MEMBER,):
            return dist.GroupMember.NON_GROUP_MEMBER
        found = [groups.table[name] for name in self.names]
        if self.mesh is None:
            return found[0]
        device_type, ranks, names = self.mesh
        one = found[0] if len(found) == 1 else found
        return DeviceMesh.from_group(one, device_type, ranks, mesh_dim_names=names)  # type: ignore[arg-type]


def _made_of_groups(choice: Choice, value: Any) -> _OfGroups:
    if not isinstance(value, DeviceMesh):
        return _OfGroups(choice.groups, None)
    return _OfGroups(choice.groups, (value.device_type, value.mesh, value.mesh_dim_names))


class _LoadableState:
    """The state of an object, to be loaded into the one that the new rank has."""

    def __init__(self, state: Any) -> None:
        self.state = state
