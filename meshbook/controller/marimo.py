"""Meshes of a marimo notebook: a cell that runs again reuses the mesh that it started.

marimo runs a cell again whenever a dependency changes, and deletes the cell's variables first. So this module stores
the sessions by notebook, cell and call index, beyond the life of those variables. A restarted kernel finds the previous
kernel's meshes by their owner.

This module never imports marimo, which need not be installed if no marimo notebook runs. It uses marimo's internals; if
one is missing, the cell is treated as ordinary code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.listing import fetch_mesh_info
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import keys
from meshbook.wire.messages import MeshSpec

KIND = "marimo"

# Seconds that a mesh outlives a marimo kernel in `marimo edit`, unless create_mesh sets another value: the kernel is
# killed in the same way on a restart and when the notebook is closed. Long enough for a restart; GPUs are not held for
# long.
EDIT_TTL_S = 300.0


class MeshStarter(Protocol):
    """Starts a mesh with the arguments of create_mesh."""

    def __call__(self, *, owner: str, kind: str, default_ttl_s: float | None, stop_at_exit: bool) -> Session: ...


@dataclass(frozen=True)
class MarimoCell:
    """The cell that this thread runs.

    Attributes:
        owner: the notebook, as the owner of its meshes.
        id: marimo's name for the cell.
        mode: "edit": a kernel of its own, which may be restarted; "run": a thread of the server, and readers share the
            notebook's meshes; "script": `python notebook.py`, app.run() and tests.
        execution: marimo's context of this one run of the cell.
    """

    owner: str
    id: str
    mode: str
    execution: Any

    def get_or_start_session(self, spec: MeshSpec, name: str | None, start: MeshStarter) -> Session:
        """Return the session that this call started in an earlier run, if it is alive and matches; else a new one.

        In `marimo edit`, a session that no longer matches is stopped: the variable that held it was deleted.
        """
        with _lock:
            key = (self.owner, self.id, self._next_index())
            existing = _sessions.pop(key, None)
            if existing is not None and _matches(existing, spec, name):
                _sessions[key] = existing
                return existing
            if existing is not None and self.mode == "edit":
                existing.stop()
            session = self._reattach(spec, name) if existing is None and self.mode == "edit" else None
            is_edit_mode = self.mode == "edit"
            session = session or start(
                owner=self.owner,
                kind=KIND,
                default_ttl_s=EDIT_TTL_S if is_edit_mode else None,
                stop_at_exit=not is_edit_mode,
            )
            _sessions[key] = session
            return session

    def _next_index(self) -> int:
        """Return how many meshes this run of the cell has requested before."""
        if self.execution is None:
            return 0
        count: int = getattr(self.execution, "_meshbook_meshes", 0)
        self.execution._meshbook_meshes = count + 1
        return count

    def _reattach(self, spec: MeshSpec, name: str | None) -> Session | None:
        """Attach to a mesh of an earlier kernel of this notebook, if it matches and no other client has it."""
        own_names = {session.name for session in _sessions.values()}
        for found in keys.list_connections():
            if found.owner != self.owner or found.name in own_names or (name is not None and found.name != name):
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


# Module state, because it must outlive the user's variables, and because in `marimo run` every reader's session is a
# thread of one process and all share the notebook's meshes.
_sessions: dict[tuple[str, str, int], Session] = {}
_lock = threading.RLock()


def running_cell() -> MarimoCell | None:
    """Return the marimo cell that this thread runs; None if it runs none."""
    context = _call_marimo("marimo._runtime.context.types", "safe_get_context")
    if context is None:
        return None
    id = getattr(context, "cell_id", None)
    if id is None:
        return None
    filename = getattr(context, "filename", None)
    mode = _call_marimo("marimo._runtime.context.utils", "get_mode")
    return MarimoCell(
        owner=f"{KIND}:{os.path.abspath(filename)}" if filename else f"{KIND}:pid {os.getpid()}",
        id=str(id),
        mode=mode if mode in ("edit", "run") else "script",
        execution=getattr(context, "execution_context", None),
    )


def latest_session(owner: str) -> Session | None:
    """Return the session that a notebook's cells started last, among those that have not ended."""
    with _lock:
        living = [session for (whose, _, _), session in _sessions.items() if whose == owner and session.ended is None]
    return living[-1] if living else None


def append_output(mime: tuple[str, Any], ranks: Ranks | None) -> bool:
    """Append a rich display from ranks below the cell that this thread runs, as `mo.output.append` does.

    Args:
        mime: its MIME type and content.
        ranks: the ranks that displayed it, for a heading; None: all ranks of the cell, without a heading.

    Returns:
        Whether there was a marimo page to show it on.
    """
    append = getattr(getattr(sys.modules.get("marimo"), "output", None), "append", None)
    cell = running_cell()
    if append is None or cell is None or cell.mode == "script":
        return False
    if ranks is not None:
        append(_MimeOutput("text/html", f"<small>{name_ranks(ranks)}</small>"))
    append(_MimeOutput(*mime))
    return True


def has_output() -> bool:
    """Whether the cell that this thread runs has an output already."""
    cell = running_cell()
    return cell is not None and bool(getattr(cell.execution, "output", None))


class _MimeOutput:
    """An object with a MIME representation only."""

    def __init__(self, kind: str, content: Any) -> None:
        self._mime = kind, content

    def _mime_(self) -> tuple[str, Any]:
        return self._mime


def _call_marimo(module: str, function: str) -> Any:
    """Call one of marimo's functions; None if marimo is not in use, or lacks the function."""
    implementation: Callable[[], Any] | None = getattr(sys.modules.get(module), function, None)
    try:
        return implementation() if implementation is not None else None
    except Exception:
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
