"""Meshes of a marimo notebook: a cell that runs again reuses the mesh that it started.

marimo runs a cell again whenever a dependency changes, and deletes the cell's variables first. So this module stores
the sessions by notebook, cell and call index, beyond the life of those variables. A restarted kernel finds the previous
kernel's meshes by their owner.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import msgspec

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.listing import fetch_mesh_info
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.marimo.page import KIND, MarimoCell
from meshbook.wire import keys
from meshbook.wire.messages import MeshSpec

# Seconds that a mesh outlives a marimo kernel in `marimo edit`, unless create_mesh sets another value: the kernel is
# killed in the same way on a restart and when the notebook is closed. Long enough for a restart; GPUs are not held for
# long.
EDIT_TTL_S = 300.0

# Module state, because it must outlive the user's variables, and because in `marimo run` every reader's session is a
# thread of one process and all share the notebook's meshes.
_sessions: dict[tuple[str, str, int], Session] = {}
_lock = threading.RLock()


class MeshStarter(Protocol):
    """Starts a mesh with the arguments of create_mesh."""

    def __call__(self, *, owner: str, kind: str, default_ttl_s: float | None, stop_at_exit: bool) -> Session: ...


def get_or_start_session(cell: MarimoCell, spec: MeshSpec, name: str | None, start: MeshStarter) -> Session:
    """Return the session that this call started in an earlier run, if it is alive and matches; else a new one.

    In `marimo edit`, a session that no longer matches is stopped: the variable that held it was deleted.
    """
    is_edit_mode = cell.mode == "edit"
    with _lock:
        key = (cell.owner, cell.id, _next_index(cell.execution))
        session = _sessions.pop(key, None)
        if session is None and is_edit_mode:
            session = _reattach(cell.owner, spec, name)
        elif session is not None and not _matches(session, spec, name):
            if is_edit_mode:
                session.stop()
            session = None
        if session is None:
            ttl_s = EDIT_TTL_S if is_edit_mode else None
            session = start(owner=cell.owner, kind=KIND, default_ttl_s=ttl_s, stop_at_exit=not is_edit_mode)
        _sessions[key] = session
        return session


def latest_session(owner: str) -> Session | None:
    """Return the session that a notebook's cells started last, among those that have not ended."""
    with _lock:
        living = [session for (whose, _, _), session in _sessions.items() if whose == owner and session.ended is None]
    return living[-1] if living else None


def _next_index(execution: Any) -> int:
    """Return how many meshes this run of the cell has requested before."""
    if execution is None:
        return 0
    count: int = getattr(execution, "_meshbook_meshes", 0)
    execution._meshbook_meshes = count + 1
    return count


def _reattach(owner: str, spec: MeshSpec, name: str | None) -> Session | None:
    """Attach to a mesh of an earlier kernel of this notebook, if it matches and no other client has it."""
    own_names = {session.name for session in _sessions.values()}
    for found in keys.list_connections():
        if found.owner != owner or found.name in own_names or (name is not None and found.name != name):
            continue
        try:
            info = fetch_mesh_info(found)
            if info.clients or info.spec is None or _spec_key(info.spec) != _spec_key(spec):
                continue
            session = Session(SupervisorConnection(found, kind=KIND, orphan_ttl_s=EDIT_TTL_S), stop_at_exit=False)
        except MeshbookError:
            continue
        if _matches(session, spec, name):
            return session
        session.detach(EDIT_TTL_S)
    return None


def _matches(session: Session, spec: MeshSpec, name: str | None) -> bool:
    """Whether a mesh is alive and complete, and equals what would be started now."""
    if session.ended is not None or session.lost or session.info.spec is None:
        return False
    if name is not None and session.name != name:
        return False
    return _spec_key(session.info.spec) == _spec_key(spec)


def _spec_key(spec: MeshSpec) -> tuple[Any, ...]:
    """Return a spec's fields for comparison, without the working directory and path, which a cell may have changed."""
    fields = msgspec.structs.asdict(msgspec.structs.replace(spec, cwd=None, sys_path=()))
    return (*fields.pop("axes").items(), *sorted(fields.items()))
