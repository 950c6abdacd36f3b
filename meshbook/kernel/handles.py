"""The ranks' names in the controller's namespace: handles, created and removed with the names on the ranks.

A name that the user bound here stays the user's; any binding may replace a handle. This module knows the namespace and
its handles, not cells, shells or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.rank.previews import expressions
from meshbook.wire.messages import OutcomeGroup

# Names on every rank from its start, not bound by a cell. `torch`, `dist` and `mesh` exist there too, but a handle to a
# module would only resemble one; `mesh` is the Mesh itself.
PRESET = ("rank", "local_rank", "world_size", "device")
# Modules preset on the ranks, which a user may expect in this process.
PRESET_MODULES = ("torch", "dist")
# Names that belong to the shell.
_RESERVED = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open", "mesh"})


class HandleNamespace:
    """The handles in one namespace.

    Args:
        namespace: the controller's, `shell.user_ns`.
        hidden: the shell's own names in it, with their values.
        warn: called once for each name that is bound on both sides.
    """

    def __init__(
        self, namespace: MutableMapping[str, Any], hidden: MutableMapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._namespace, self._hidden, self._warn = namespace, hidden, warn
        # Name -> ranks that have it, per mesh that was current; a name may be bound on some ranks only.
        self._ranks_by_name: WeakKeyDictionary[Session, dict[str, set[int]]] = WeakKeyDictionary()
        self._warned: set[str] = set()
        self._mesh: Mesh | None = None  # the current mesh
        self._session: Session | None = None  # the current mesh's session
        # Name -> (remote tensor, the handle it replaced). They stay until a cell rebinds the name, so that a gradient
        # computed here is available to the next cell.
        self._promoted: dict[str, tuple[Any, RemoteValue]] = {}

    def switch_mesh(self, mesh: Mesh | None) -> None:
        """Replace the handles by those of this mesh's names."""
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
        """Update the handles for the names that a call bound and deleted on its ranks."""
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
        """Return the handle bound to this name here; None: it is not a handle."""
        bound = self._namespace.get(name)
        if name in self._promoted and self._promoted[name][0] is bound:
            return self._promoted[name][1]
        return bound if isinstance(bound, RemoteValue) else None

    def promote_to_tensors(self, names: Iterable[str]) -> None:
        """Replace handles that a local cell uses by remote tensors, where every rank has one with the same metadata.

        `w` then is what `mesh["w"]` is. Queries the ranks for these names only; names without a reply stay handles.
        """
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
            except (MeshbookError, ImportError):  # a rank was lost or does not reply; no torch in this process
                continue
            if not isinstance(tensor, RemoteValue):
                self._namespace[name] = tensor
                self._promoted[name] = tensor, bound

    def is_on_ranks(self, session: Session, name: str) -> bool:
        """Whether a mesh that is or was current has this name, as far as is known here."""
        return name in self._ranks_by_name.get(session, {})

    def is_user_bound(self, name: str) -> bool:
        """Whether the user bound this name to an object of this process."""
        if name not in self._namespace or self.get_handle(name) is not None:
            return False
        return not (name in self._hidden and self._hidden[name] is self._namespace[name])

    def without_handles(self) -> dict[str, Any]:
        """Return the namespace without handles, so that inspecting it sends no query."""
        return {name: value for name, value in list(self._namespace.items()) if self.get_handle(name) is None}

    def _bind_handle(self, name: str) -> None:
        """Bind the name to a handle, or remove its handle if no rank has it, unless the user has bound the name."""
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
            is_module = isinstance(self._namespace[name], ModuleType)  # imported on both sides: no conflict
            if name not in self._warned and name not in PRESET and not is_module:
                self._warned.add(name)
                self._warn(name)
        elif not (self._is_own_handle(name) and self._namespace[name]._meshbook_ranks == ranks):
            self._namespace[name] = RemoteValue(session, expressions.Expression(expressions.NameRef(name)), ranks)

    def _is_own_handle(self, name: str) -> bool:
        """Whether the name here is the handle to the same name on the ranks, not one that the user assigned."""
        bound = self.get_handle(name)
        if bound is None or bound._meshbook_session is not self._session:
            return False
        path = bound._meshbook_path
        return isinstance(path.root, expressions.NameRef) and not path.steps and bool(path.root.name == name)
