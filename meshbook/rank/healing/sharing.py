"""Gives new ranks what the other ranks hold, as far as it is proven that the lost rank held the same.

All ranks describe what they hold to each other, make the same choices, and then those that are a source send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import MeshbookError, TransferError, message_of
from meshbook.ids import Ranks
from meshbook.rank.healing import transfer
from meshbook.rank.healing.choice import NO_MEMBER, Choice, Held, Rules, choose_sources
from meshbook.rank.healing.contents import describe, describe_names, name_of_class
from meshbook.rank.healing.filling import Contents, is_fillable
from meshbook.rank.healing.tensor_stores import rebuild_modules, share_tensors
from meshbook.rank.objects import RankObjects
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.interrupted_steps import begin_like_other_ranks
from meshbook.rank.process_groups.resized_world import axes_of
from meshbook.rank.process_groups.solo import connect_deferred
from meshbook.rank.state.kinds import is_loadable
from meshbook.rank.state.modules import attributes_of, gradients_of, load_gradients, load_state, state_of
from meshbook.rank.state.random_states import random_states, set_random_states
from meshbook.wire import pickling
from meshbook.wire.messages import ShareState

_held_encoder = msgspec.json.Encoder()
_held_decoder = msgspec.json.Decoder(dict[str, Held])

# What users call the generators of `random_states`, which are shared beside the names.
_RANDOM_NAMES = {
    "torch": "torch's random state",
    "cuda": "CUDA's random state",
    "python": "Python's random state",
    "numpy": "NumPy's random state",
}
_GENERATORS = {name: generator for generator, name in _RANDOM_NAMES.items()}


def share_state(
    command: ShareState,
    rank: int,
    namespace: MutableMapping[str, Any],
    names: Iterable[str],
    groups: ProcessGroups,
    objects: RankObjects,
    recorded: Mapping[str, Ranks],
    without_others: Callable[[], AbstractContextManager[None]],
) -> dict[str, Any]:
    """Take part in the sharing. Blocks until this rank has sent and received everything.

    Args:
        names: the user's, on this rank.
        objects: remote tensors, and what clients have handles to.
        recorded: by name, ranks that elastic loops know to have held the same as this one.
        without_others: context in which collectives return at once.

    Returns:
        as `ShareState` says: on a new rank what it has, on others nothing.
    """
    topic = f"share/{command.call}"
    unbuilt = {}
    if not command.names_only:
        unbuilt = rebuild_modules(topic, rank, command.new_ranks, objects.values, groups, without_others)
    connect_deferred(groups)
    randoms = {_RANDOM_NAMES[generator]: state for generator, state in random_states().items()}
    held = _describe(command, namespace, names, randoms, groups, recorded)
    texts = groups.exchange(topic, _held_encoder.encode(held))
    every = {other: _held_decoder.decode(text) for other, text in enumerate(texts)}
    old = {other: holds for other, holds in every.items() if other not in command.new_ranks}
    assert groups.mesh is not None  # they are formed
    assert groups.mesh.mesh_dim_names is not None
    axes = dict(zip(groups.mesh.mesh_dim_names, groups.mesh.mesh.shape, strict=True))
    reply: dict[str, Any] = {"restored": {}, "missing": {}, "kept": {}, "alike": []}
    for new in command.new_ranks:
        rules = Rules(
            axes=axes,
            rank_dependent=command.rank_dependent,
            built=every[new] if command.names_only else command.built,
            copy=None if new in command.joined else command.copy,
        )
        choices = choose_sources(old, every[new], new, rules) if old else {}
        if command.names_only:
            choices = {name: choice for name, choice in choices.items() if name in (command.copy or ())}
        sharing = _Sharing(namespace, randoms, groups, reply, with_shards=command.with_shards)
        theirs = {name: one for name, one in every[new].items() if name not in choices or not choices[name].is_dropped}
        if rank == new:
            _keep_or_drop(choices, namespace, reply)
        sharing.share_names(choices, old, theirs, (rank, new))
        if rank == new and not command.names_only:
            begin_like_other_ranks(same_buckets=not groups.solo.has_other_buckets)
    if command.names_only:
        return reply
    _share_tensors(topic, rank, command.new_ranks, objects, groups, axes, reply)
    reply["missing"] |= {f"module {key}": f"could not be built: {why}" for key, why in unbuilt.items()}
    return reply


def _describe(
    command: ShareState,
    namespace: Mapping[str, Any],
    names: Iterable[str],
    randoms: Mapping[str, Any],
    groups: ProcessGroups,
    recorded: Mapping[str, Ranks],
) -> dict[str, Held]:
    """Return what this rank holds; of names that are not copied the class alone: what is copied may refer to them."""
    if command.names_only:
        copied = command.copy or ()
        others = {name: name_of_class(namespace[name]) for name in names if name not in copied}
        described = describe_names(namespace, copied, with_shards=command.with_shards)
        return {name: Held("value", kind) for name, kind in others.items()} | described
    held = describe_names(namespace, names, with_shards=command.with_shards)
    assert groups.mesh is not None  # they are formed
    for name, one in held.items():
        if one.kind == "mesh":
            axes_of_name = axes_of(namespace[name], groups.mesh) or ()
            held[name] = msgspec.structs.replace(one, slice_of_mesh=() if axes_of_name == ("",) else axes_of_name)
        elif not one.replicas:
            held[name] = msgspec.structs.replace(one, replicas=recorded.get(name, ()))
    for name, state in randoms.items():
        held[name] = msgspec.structs.replace(describe(state), kind="random", is_telling=True)
    return held


def _share_tensors(
    topic: str,
    rank: int,
    new_ranks: Ranks,
    objects: RankObjects,
    groups: ProcessGroups,
    axes: Mapping[str, int],
    reply: dict[str, Any],
) -> None:
    shared = share_tensors(topic, rank, new_ranks, objects, groups, axes)
    for (cut, source), count in shared.restored.items():
        why = f"the same part, cut over {cut}" if cut else "replicas"
        reply["restored"][_count_tensors(count, reply["restored"])] = [source, why]
    for why, count in shared.missing.items():
        reply["missing"][_count_tensors(count, reply["missing"])] = why


def _keep_or_drop(choices: Mapping[str, Choice], namespace: MutableMapping[str, Any], reply: dict[str, Any]) -> None:
    """Say what a new rank does not get, and take away constants that later cells have changed."""
    for name, choice in choices.items():
        if choice.source is None and _is_worth_saying(name):
            if choice.is_kept:
                reply["kept"][name] = choice.why
            if not choice.is_fine:
                reply["missing"][name] = choice.why
            if choice.is_offered:
                reply["alike"].append(name)
            if choice.is_dropped:
                del namespace[name]


class _Sharing:
    """Sends names from the ranks that are chosen to a new one."""

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        randoms: dict[str, Any],
        groups: ProcessGroups,
        reply: dict[str, Any],
        *,
        with_shards: bool,
    ) -> None:
        self._namespace, self._randoms, self._groups, self._reply = namespace, randoms, groups, reply
        self._with_shards = with_shards

    def share_names(
        self,
        choices: dict[str, Choice],
        held: dict[int, dict[str, Held]],
        theirs: dict[str, Held],
        ranks: tuple[int, int],
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
                self._send(chosen, held[rank], theirs, new)
            elif rank == new:
                self._receive(chosen, source)
            theirs = {name: held[source][name] for name in chosen} | theirs

    def _send(self, chosen: dict[str, Choice], held: dict[str, Held], theirs: dict[str, Held], new: int) -> None:
        namespace, groups = self._namespace, self._groups
        shared = [name for name, other in theirs.items() if name in held and held[name].type == other.type]
        shared = _with_their_models(shared, [name for name in theirs if name in held], namespace)
        bundle: dict[str, Any] = {}
        for name, choice in chosen.items():
            if name in self._randoms:
                bundle[name] = self._randoms[name]
            elif name in shared and is_loadable(namespace[name]):
                bundle[name] = _LoadableState(state_of(namespace[name], with_shards=self._with_shards))
            elif held[name].kind == "value" and name in shared and is_fillable(namespace[name]):
                bundle[name] = Contents(namespace[name])
            elif choice.slice_of_mesh:
                bundle[name] = _SliceOfMesh(choice.slice_of_mesh)
            elif choice.groups:
                bundle[name] = _made_of_groups(choice, namespace[name])
            else:
                bundle[name] = namespace[name]
            gradients = gradients_of(namespace.get(name), with_shards=self._with_shards)
            if gradients and not isinstance(bundle[name], _LoadableState):  # which has them
                bundle[name] = _WithGradients(bundle[name], gradients)
        references = transfer.References(namespace, shared, groups.mesh, with_shards=self._with_shards)
        payload, dropped = transfer.pickle_bundle(bundle, references)
        transfer.send(payload, {"dropped": dropped}, new)

    def _receive(self, chosen: dict[str, Choice], source: int) -> None:
        namespace, reply = self._namespace, self._reply
        payload, extra = transfer.receive(source)
        reply["missing"] |= extra["dropped"]
        try:
            bundle = pickling.load(payload, resolve=transfer.Resolver(namespace, self._groups.table))
        except TransferError as error:
            reply["missing"] |= dict.fromkeys(chosen, f"what rank {source} sent cannot be read here: {error}")
            return
        for name, value in bundle.items():
            try:
                gradients = {}
                if isinstance(value, _WithGradients):
                    value, gradients = value.value, value.gradients
                if name in _GENERATORS:
                    set_random_states({_GENERATORS[name]: value})
                elif isinstance(value, _LoadableState):
                    self._load_state(name, value.state, chosen[name])
                elif isinstance(value, Contents):
                    namespace[name] = value.fill(namespace[name])
                elif isinstance(value, _SliceOfMesh):
                    assert self._groups.mesh is not None  # they are formed
                    namespace[name] = self._groups.mesh[value.axes]
                elif isinstance(value, _OfGroups):
                    namespace[name] = value.make(self._groups)
                else:
                    namespace[name] = value
                if not isinstance(value, _LoadableState):
                    load_gradients(namespace.get(name), gradients, with_shards=self._with_shards)
            except MeshbookError as error:
                reply["missing"][name] = str(error)
            except Exception as error:  # a user's load_state_dict may raise anything
                reply["missing"][name] = f"{type(error).__name__}: {message_of(error)}"
            else:
                reply["restored"][name] = [source, chosen[name].why]

    def _load_state(self, name: str, state: Any, choice: Choice) -> None:
        value = self._namespace[name]
        load_state(value, state, with_shards=self._with_shards, with_attributes=choice.with_attributes)
        for module, held in attributes_of(value).items() if choice.names_attributes else ():
            for key, here in held.items():
                there = state["attributes"].get(module, {}).get(key, here)
                if repr(there) != repr(here):
                    full_name = ".".join(filter(None, (name, module, key)))
                    why = f"{here!r:.60} as it was made here, {there!r:.60} on the others"
                    self._reply["kept"][full_name] = self._reply["missing"][full_name] = why
                    self._reply["alike"].append(full_name)


def _with_their_models(shared: list[str], names: list[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return the names but those of optimizers, and their schedulers, whose model the new rank does not have."""
    modules = [namespace.get(name) for name in names if name not in shared]
    absent = {id(one) for module in modules if isinstance(module, torch.nn.Module) for one in module.parameters()}

    def is_of_absent_model(value: Any) -> bool:
        # not by an attribute's own code, which is the user's and may raise
        optimizer = (
            value if isinstance(value, torch.optim.Optimizer) else getattr(value, "__dict__", {}).get("optimizer")
        )
        return isinstance(optimizer, torch.optim.Optimizer) and any(
            id(one) in absent for group in optimizer.param_groups for one in group["params"]
        )

    return [name for name in shared if not is_of_absent_model(namespace.get(name))] if absent else shared


def _count_tensors(count: int, named: Collection[str]) -> str:
    """Return a name for some remote tensors that is not among the names yet."""
    text = f"{count} remote tensor{'' if count == 1 else 's'}"
    while text in named:
        text = text.replace("remote", "other remote", 1)
    return text


def _is_worth_saying(name: str) -> bool:
    """Whether a user expects to hear that a name was not restored: other generators are seeded per rank by default."""
    return name not in _GENERATORS or _GENERATORS[name] == "torch"


class _OfGroups:
    """Stands for an object that the new rank makes of its own process groups."""

    def __init__(self, names: tuple[str, ...], mesh: tuple[str, Any, tuple[str, ...] | None] | None) -> None:
        self.names, self.mesh = names, mesh  # mesh: device type, ranks, names of dims of a DeviceMesh

    def make(self, groups: ProcessGroups) -> Any:
        """Return the object. Raises TransferError."""
        if self.names == (NO_MEMBER,):
            return dist.GroupMember.NON_GROUP_MEMBER
        if not groups.table.names.issuperset(self.names):  # a new rank has every group that another has
            raise TransferError("the other ranks have destroyed this process group: it is of no use there either")
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


class _SliceOfMesh:
    """Stands for a slice of `mesh`."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes


class _WithGradients:
    """A module or a tensor, or its contents, and gradients, which its pickle leaves out."""

    def __init__(self, value: Any, gradients: dict[str, Any]) -> None:
        self.value, self.gradients = value, gradients


class _LoadableState:
    """The state of an object, to be loaded into the one that the new rank has."""

    def __init__(self, state: Any) -> None:
        self.state = state
