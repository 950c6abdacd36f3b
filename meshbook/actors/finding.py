"""Actors by name: those that this program has spawned, and those that it finds on a mesh, as after a kernel's restart.

Ranks outlive a kernel, and their actors with them. Who finds actors whose owner is gone becomes their owner, and hears
of their failures from then on; actors that somebody else owns stay that one's.
"""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterable
from typing import Any, NoReturn

from meshbook.actors.mesh import ActorMesh, ActorRef, describe_class
from meshbook.actors.procs import ProcMesh, survey
from meshbook.actors.runtime.life import Owned, life
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.post import here
from meshbook.errors import MeshNameError
from meshbook.mesh import MeshAxes
from meshbook.wire.messages import ActorAddress

_LOOK_S = 20.0  # for processes to say what they know: they have only to look up


def find_actors(name: str, mesh: Any = None) -> ActorMesh:
    """The newest mesh of actors of that name: of those that this program has spawned and not stopped, else of those
    that live on `mesh`. Waits for the ranks' answer, and not for what the actors run.

    Raises:
        MeshNameError: there is none; the message lists those that are.
    """
    refs = [owned.ref for owned in list(life().owned.values()) if owned.ref is not None and not owned.stopped]
    for ref in reversed(refs):
        if ref.name == name:
            return _whole(ref)
    if mesh is None:
        _none(name, {ref.name for ref in refs})
    return find_on(mesh, name)


def find_on(mesh: Any, name: str) -> ActorMesh:
    """The newest mesh of actors of that name that lives on a Mesh; as `find_actors`."""
    rows = [row for row in survey(mesh) if row["state"] in ("starting", "living")]
    here_now = [row for row in rows if row["actor"] == name]
    if not here_now:
        _none(name, {row["actor"] for row in rows})
    newest = max(here_now, key=lambda row: row["born_at"])
    known = life().owned.get(newest["id"])
    if known is not None and known.ref is not None and not known.stopped:
        return _whole(known.ref)
    return _known_again(ProcMesh.of_mesh(mesh), [row for row in here_now if row["id"] == newest["id"]])


def _whole(ref: ActorRef) -> ActorMesh:
    assert ref.home is not None
    return ActorMesh(ref, MeshAxes(ref.home.names, ref.home.sizes, tuple(range(len(ref.addresses)))))


def _none(name: str, names: Iterable[str]) -> NoReturn:
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    raise MeshNameError(f"no actors are named {name!r}; {hint if names else 'there are none'}")


def _known_again(procs: ProcMesh, rows: list[dict[str, Any]]) -> ActorMesh:
    """A handle as their owner had it, from what the actors' own processes know."""
    first, everywhere = rows[0], procs._procs.home().addresses
    stub = ActorRef(first["id"], first["actor"], first["class"], {}, frozenset(), everywhere, None)
    living = ActorMesh(stub, MeshAxes(("rank",), (len(rows),), tuple(row["rank"] for row in rows)))
    me = ActorAddress(here().address, "")
    told = list(living._apply_now(_take_over, first["id"], me).get(_LOOK_S).values())
    endpoints, methods, home, pickled, _ = told[0]
    Class = None
    with contextlib.suppress(Exception):  # without it, arguments are checked by the actors alone
        Class = pickle.loads(pickled)
        endpoints, methods = describe_class(Class)
    ref = ActorRef(first["id"], first["actor"], first["class"], endpoints, methods, home.addresses, home, Class)
    ranks = {address.node: rank for rank, address in enumerate(everywhere)}
    if all(address.node in ranks for address in ref.addresses):
        ref.lend, ref.ranks = procs._procs.lend, tuple(ranks[address.node] for address in ref.addresses)
    if any(is_ours for *_, is_ours in told):
        owned = Owned(ref.name, "", {address.node: place for place, address in enumerate(ref.addresses)})
        owned.ref, owned.ends_with = ref, procs._procs.ends
        life().owned[ref.id] = owned
    return _whole(ref)


def _take_over(actor: Any, id: str, finder: ActorAddress) -> tuple[Any, ...]:
    """In the actor's process, beside the actor: what is known of it, and whether it is the finder's now."""
    cabin = life().actors[id]
    try:
        here().peer(cabin.owner.address)
    except PeerGone:
        cabin.owner = finder
    pickled = None
    with contextlib.suppress(Exception):
        import cloudpickle

        pickled = cloudpickle.dumps(type(actor))
    return *describe_class(type(actor)), cabin.home, pickled, cabin.owner == finder
