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
from meshbook.rank import expressions
from meshbook.wire.messages import OutcomeGroup

# On every rank from its start, and not news of any cell. `torch`, `dist` and `mesh` are there too, but a handle to a
# module would only look like one; `mesh` is the Mesh itself.
PRESET = ("rank", "local_rank", "world_size", "device")
# What a user finds on the ranks without having put it there, and may look for here.
PRESET_MODULES = ("torch", "dist")
# The shell's own.
_RESERVED = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "mesh"})


class HandleNamespace:
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
        self._ranks_by_name: WeakKeyDictionary[Session, dict[str, set[int]]] = WeakKeyDictionary()
        self._warned: set[str] = set()
        self._mesh: Mesh | None = None  # that is shown
        self._session: Session | None = None  # its
        # Tensors that stand where handles were: those, and the handles. They stay until a cell binds the name anew,
        # so that a gradient that is computed here is there for the next cell.
        self._promoted: dict[str, tuple[Any, RemoteValue]] = {}

    def switch_mesh(self, mesh: Mesh | None) -> None:
        """The names of this mesh, and of no other, are handles here from now on."""
        bound = self._namespace.get("mesh")
        is_ours = bound is None or (
            isinstance(bound, Mesh) and self._session is not None and bound.session is self._session
        )
        for name in self._ranks_by_name.get(self._session, {}) if self._session is not None else ():
            if self._is_own_handle(name):
                del self._namespace[name]
        self._promoted.clear()
        self._mesh, self._session = mesh, mesh.session if mesh is not None else None
        if is_ours:
            self._namespace.pop("mesh", None)
            if mesh is not None:
                self._namespace["mesh"] = mesh
        if mesh is None or mesh.session.axes is None:
            return
        if mesh.session not in self._ranks_by_name:
            all_ranks = mesh.session.axes.ranks
            self._ranks_by_name[mesh.session] = {name: set(all_ranks) for name in (*PRESET, *mesh.session.info.names)}
        for name in self._ranks_by_name[mesh.session]:
            self._bind_handle(name)

    def update(self, session: Session, parts: Sequence[OutcomeGroup]) -> None:
        """Take note of what a call bound and deleted on its ranks."""
        ranks_by_name = self._ranks_by_name.setdefault(session, {})
        for part in parts:
            for name in part.outcome.bound_names:
                ranks_by_name.setdefault(name, set()).update(part.ranks)
            for name in part.outcome.deleted_names:
                remaining = ranks_by_name.get(name, set()) - set(part.ranks)
                if remaining:
                    ranks_by_name[name] = remaining
                else:
                    ranks_by_name.pop(name, None)
        if session is self._session:
            for part in parts:
                for name in (*part.outcome.bound_names, *part.outcome.deleted_names):
                    self._bind_handle(name)

    def get_handle(self, name: str) -> RemoteValue | None:
        """The handle that this name is here; None: it is not one."""
        bound = self._namespace.get(name)
        if name in self._promoted and self._promoted[name][0] is bound:
            return self._promoted[name][1]
        return bound if isinstance(bound, RemoteValue) else None

    def promote_to_tensors(self, names: Iterable[str]) -> None:
        """Handles that a cell of this process uses become tensors, where every rank has one alike: `w` is what
        `mesh["w"]` is. Asks the ranks about these names and no others; what cannot be told stays a handle."""
        for name in names:
            bound = self._namespace.get(name)
            if (
                self._mesh is None
                or not isinstance(bound, RemoteValue)
                or not self._is_own_handle(name)
                or name in PRESET
            ):
                continue
            try:
                tensor = self._mesh[name]
            except (MeshbookError, ImportError):  # a rank that is gone or does not answer; no torch in this process
                continue
            if not isinstance(tensor, RemoteValue):
                self._namespace[name] = tensor
                self._promoted[name] = tensor, bound

    def is_user_bound(self, name: str) -> bool:
        """Whether the user bound this name here to something of this process."""
        if name not in self._namespace or self.get_handle(name) is not None:
            return False
        return not (name in self._hidden and self._hidden[name] is self._namespace[name])

    def without_handles(self) -> dict[str, Any]:
        """The namespace as far as looking at it asks nobody else."""
        return {name: value for name, value in list(self._namespace.items()) if self.get_handle(name) is None}

    def _bind_handle(self, name: str) -> None:
        """Let the name here be what it is on the ranks, if it is ours to say."""
        session = self._session
        assert session is not None
        if name in _RESERVED:
            return
        tensor, handle = self._promoted.pop(name, (None, None))
        if handle is not None and self._namespace.get(name) is tensor:
            self._namespace[name] = handle
        ranks = tuple(sorted(self._ranks_by_name[session].get(name, ())))
        if not ranks:
            self._warned.discard(name)
            if self._is_own_handle(name):
                del self._namespace[name]
        elif self.is_user_bound(name):
            if name not in self._warned and name not in PRESET:
                self._warned.add(name)
                self._warn(name)
        elif not (self._is_own_handle(name) and self._namespace[name]._meshbook_ranks == ranks):
            self._namespace[name] = RemoteValue(session, expressions.Expression(expressions.NameRef(name)), ranks)

    def _is_own_handle(self, name: str) -> bool:
        """Whether the name here is the handle to that name there, and not one that the user bound it to."""
        bound = self.get_handle(name)
        if bound is None or bound._meshbook_session is not self._session:
            return False
        path = bound._meshbook_path
        return isinstance(path.root, expressions.NameRef) and not path.steps and bool(path.root.name == name)
