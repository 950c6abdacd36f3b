"""The ranks' names in the controller's namespace: handles, which come and go with what they stand for.

A name that the user bound here is the user's and stays; handles make way for anything. Knows the namespace and the
handles in it, nothing of cells, shells or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.rank import paths
from meshbook.wire.messages import Part

# On every rank from its start, and not news of any cell. `torch`, `dist` and `mesh` are there too, but a handle to a
# module would only look like one; `mesh` is the Mesh itself.
PRESET = ("rank", "local_rank", "world_size", "device")
# What a user finds on the ranks without having put it there, and may look for here.
PRESET_MODULES = ("torch", "dist")
# The shell's own.
_RESERVED = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "mesh"})


class HandleNames:
    """The handles in one namespace.

    Args:
        namespace: the controller's, `shell.user_ns`.
        hidden: names in it that the shell put there, by value.
        warn: told, once for each name, that it is bound on both sides.
    """

    def __init__(
        self, namespace: MutableMapping[str, Any], hidden: MutableMapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._namespace, self._hidden, self._warn = namespace, hidden, warn
        # Who has which name, of every mesh that was shown; a name may be bound on some ranks only.
        self._holders: WeakKeyDictionary[Session, dict[str, set[int]]] = WeakKeyDictionary()
        self._warned: set[str] = set()
        self._mesh: Mesh | None = None  # that is shown
        self._session: Session | None = None  # its
        # Tensors that stand where handles were: those, and the handles. They stay until a cell binds the name anew,
        # so that a gradient that is computed here is there for the next cell.
        self._tensors: dict[str, tuple[Any, RemoteValue]] = {}

    def show(self, mesh: Mesh | None) -> None:
        """The names of this mesh, and of no other, are handles here from now on."""
        held = self._namespace.get("mesh")
        ours = held is None or (isinstance(held, Mesh) and self._session is not None and held.session is self._session)
        for name in self._holders.get(self._session, {}) if self._session is not None else ():
            if self._is_ours(name):
                del self._namespace[name]
        self._tensors.clear()
        self._mesh, self._session = mesh, mesh.session if mesh is not None else None
        if ours:
            self._namespace.pop("mesh", None)
            if mesh is not None:
                self._namespace["mesh"] = mesh
        if mesh is None or mesh.session.axes is None:
            return
        if mesh.session not in self._holders:
            every = mesh.session.axes.ranks
            self._holders[mesh.session] = {name: set(every) for name in (*PRESET, *mesh.session.info.names)}
        for name in self._holders[mesh.session]:
            self._put(name)

    def update(self, session: Session, parts: Sequence[Part]) -> None:
        """Take note of what a call bound and deleted on its ranks."""
        holders = self._holders.setdefault(session, {})
        for part in parts:
            for name in part.outcome.bound:
                holders.setdefault(name, set()).update(part.ranks)
            for name in part.outcome.unbound:
                left = holders.get(name, set()) - set(part.ranks)
                if left:
                    holders[name] = left
                else:
                    holders.pop(name, None)
        if session is self._session:
            for part in parts:
                for name in (*part.outcome.bound, *part.outcome.unbound):
                    self._put(name)

    def handle(self, name: str) -> RemoteValue | None:
        """The handle that this name is here; None: it is not one."""
        held = self._namespace.get(name)
        if name in self._tensors and self._tensors[name][0] is held:
            return self._tensors[name][1]
        return held if isinstance(held, RemoteValue) else None

    def become_tensors(self, names: Iterable[str]) -> None:
        """Handles that a cell of this process uses become tensors, where every rank has one alike: `w` is what
        `mesh["w"]` is. Asks the ranks about these names and no others; what cannot be told stays a handle."""
        for name in names:
            held = self._namespace.get(name)
            if self._mesh is None or not isinstance(held, RemoteValue) or not self._is_ours(name) or name in PRESET:
                continue
            try:
                found = self._mesh[name]
            except (MeshbookError, ImportError):  # a rank that is gone or does not answer; no torch in this process
                continue
            if not isinstance(found, RemoteValue):
                self._namespace[name] = found
                self._tensors[name] = found, held

    def is_users(self, name: str) -> bool:
        """Whether the user bound this name here to something of this process."""
        if name not in self._namespace or self.handle(name) is not None:
            return False
        return not (name in self._hidden and self._hidden[name] is self._namespace[name])

    def without_handles(self) -> dict[str, Any]:
        """The namespace as far as looking at it asks nobody else."""
        return {name: held for name, held in list(self._namespace.items()) if self.handle(name) is None}

    def _put(self, name: str) -> None:
        """Let the name here be what it is on the ranks, if it is ours to say."""
        session = self._session
        assert session is not None
        if name in _RESERVED:
            return
        tensor, handle = self._tensors.pop(name, (None, None))
        if handle is not None and self._namespace.get(name) is tensor:
            self._namespace[name] = handle
        ranks = tuple(sorted(self._holders[session].get(name, ())))
        if not ranks:
            self._warned.discard(name)
            if self._is_ours(name):
                del self._namespace[name]
        elif self.is_users(name):
            if name not in self._warned and name not in PRESET:
                self._warned.add(name)
                self._warn(name)
        elif not (self._is_ours(name) and self._namespace[name]._meshbook_ranks == ranks):
            self._namespace[name] = RemoteValue(session, paths.Path(paths.Name(name)), ranks)

    def _is_ours(self, name: str) -> bool:
        """Whether the name here is the handle to that name there, and not one that the user bound it to."""
        held = self.handle(name)
        if held is None or held._meshbook_session is not self._session:
            return False
        path = held._meshbook_path
        return isinstance(path.root, paths.Name) and not path.steps and bool(path.root.name == name)
