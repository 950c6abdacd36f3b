"""Find actors by name: those that this program has spawned, and those on a mesh, for example after a kernel restart.

Ranks outlive a kernel, and so do their actors. A program that finds actors whose owner has exited becomes their owner
and receives their failures from then on; actors with a living owner stay with it.
"""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterable
from typing import Any, NoReturn

from meshbook.actors.mesh import ActorMesh, describe_class
from meshbook.actors.procs import ProcMesh, list_actors
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.refs import ActorRef
from meshbook.actors.runtime.registry import OwnedMesh, local_registry
from meshbook.actors.runtime.transport import local_transport
from meshbook.errors import MeshNameError
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import ActorAddress

_QUERY_TIMEOUT_S = 20.0  # for processes to describe their actors: a lookup


def find_actors(name: str, mesh: Any = None) -> ActorMesh[Any]:
    """Return the newest mesh of actors of that name.

    Searches the actors that this program has spawned and not stopped, then those that live on `mesh`. Waits for a reply
    of the ranks, but not for running endpoints.

    Raises:
        MeshNameError: there are no such actors; the message lists those that exist.
    """
    refs = [owned.ref for owned in list(local_registry().owned.values()) if not owned.stopped]
    for ref in reversed(refs):
        if ref.name == name:
            return ActorMesh(ref, ref.axes)
    if mesh is None:
        _raise_not_found(name, {ref.name for ref in refs})
    return find_actors_on(mesh, name)


def find_actors_on(mesh: Any, name: str) -> ActorMesh[Any]:
    """Return the newest mesh of actors of that name that lives on a Mesh; as `find_actors`."""
    rows = [row for row in list_actors(mesh) if row["state"] in ("starting", "living")]
    matches = [row for row in rows if row["actor"] == name]
    if not matches:
        _raise_not_found(name, {row["actor"] for row in rows})
    newest = max(matches, key=lambda row: row["born_at"])
    owned = local_registry().owned.get(newest["id"])
    if owned is not None and not owned.stopped:
        return ActorMesh(owned.ref, owned.ref.axes)
    return _rebuild_handle(ProcMesh.from_mesh(mesh), [row for row in matches if row["id"] == newest["id"]])


def _raise_not_found(name: str, names: Iterable[str]) -> NoReturn:
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    raise MeshNameError(f"no actors are named {name!r}; {hint if names else 'there are none'}")


def _rebuild_handle(procs: ProcMesh, rows: list[dict[str, Any]]) -> ActorMesh[Any]:
    """Rebuild the owner's handle from what the actors' processes know."""
    first, addresses = rows[0], procs._backend.procs_ref().addresses
    partial_ref = ActorRef(first["id"], first["actor"], first["class"], {}, frozenset(), addresses, None)
    axes = MeshAxes(("rank",), (len(rows),), tuple(row["rank"] for row in rows))
    living: ActorMesh[Any] = ActorMesh(partial_ref, axes)
    me = ActorAddress(local_transport().address, "")
    replies = list(living._apply_concurrently(_claim_ownership, first["id"], me).get(_QUERY_TIMEOUT_S).values())
    endpoints, methods, procs_ref, pickled, _ = replies[0]
    Class = None
    with contextlib.suppress(Exception):  # without the class, only the actors check arguments
        Class = pickle.loads(pickled)
        endpoints, methods = describe_class(Class)
    ref = ActorRef(
        first["id"], first["actor"], first["class"], endpoints, methods, procs_ref.addresses, procs_ref, Class
    )
    rank_by_node = {address.node: rank for rank, address in enumerate(addresses)}
    if all(address.node in rank_by_node for address in ref.addresses):
        ref.references, ref.mesh_ranks = (
            procs._backend.references,
            tuple(rank_by_node[address.node] for address in ref.addresses),
        )
    if any(is_ours for *_, is_ours in replies):
        actor_rank_by_node = {address.node: actor_rank for actor_rank, address in enumerate(ref.addresses)}
        local_registry().owned[ref.id] = OwnedMesh(ref, "", actor_rank_by_node, procs._backend.is_stopping)
    return ActorMesh(ref, ref.axes)


def _claim_ownership(actor: Any, actor_id: str, finder: ActorAddress) -> tuple[Any, ...]:
    """Describe the actor, and make `finder` its owner if its owner has exited.

    Runs in the actor's process, concurrently with its messages. The last item tells whether `finder` owns the actor.
    """
    runner = local_registry().actors[actor_id]
    try:
        local_transport().peer(runner.owner.address)
    except PeerLost:
        runner.owner = finder
    pickled = None
    with contextlib.suppress(Exception):
        import cloudpickle

        pickled = cloudpickle.dumps(type(actor))
    return *describe_class(type(actor)), runner.procs_ref, pickled, runner.owner == finder
