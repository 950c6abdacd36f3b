"""Tables of all actors, for display: mailbox length, running endpoint and its time, last error.

`list_actors` queries the processes; building a table from its rows is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshbook.actors.lookup import find_actors_on
from meshbook.actors.mesh import ActorMesh
from meshbook.actors.procs import ProcMesh, this_proc
from meshbook.actors.procs import list_actors as list_actors
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import has_local_transport
from meshbook.actors.spawned_procs import SpawnedProcBackend
from meshbook.controller.tables import Table, format_seconds
from meshbook.ids import format_ranks

COLUMNS = ("actor", "class", "ranks", "state", "mailbox", "runs", "messages", "last error")
_ERROR_CHARS = 80


@dataclass(frozen=True, repr=False)
class ActorTable(Table):
    """The result of `mesh.actors()`: a table for display; `mesh.actors()["trainers"]` returns the actors themselves."""

    mesh: Any = None

    def __getitem__(self, name: str) -> ActorMesh[Any]:
        return find_actors_on(self.mesh, name)


def actors_on(mesh: Any) -> ActorTable:
    """Return the actors on the ranks of a mesh: `Mesh.actors()`."""
    plain = actor_table(f"Mesh {mesh.name}", list_actors(mesh))
    return ActorTable(plain.heading, plain.columns, plain.rows, plain.notes, mesh)


def all_actors(mesh: Any = None) -> Table:
    """Return a table of all actors of this program. Blocks for two seconds at most if a process does not reply.

    Covers the actors on `mesh`, if given, on processes that this program has started by `spawn_procs`, and in this
    process.
    """
    return actor_table("All actors", [*(list_actors(mesh) if mesh is not None else ()), *list_spawned_actors()])


def list_spawned_actors(*, timeout: float = 2.0) -> list[dict[str, Any]]:
    """Return rows for actors on processes that this program has started by `spawn_procs`, and in this process."""
    proc_meshes = _spawned_proc_meshes()
    return [
        {**row, "home": proc_mesh.name} for proc_mesh in proc_meshes for row in list_actors(proc_mesh, timeout=timeout)
    ]


def has_spawned_procs() -> bool:
    """Whether this program has processes of such actors."""
    return bool(_spawned_proc_meshes())


def _spawned_proc_meshes() -> list[ProcMesh]:
    if not has_local_transport():
        return []
    spawned = [
        procs
        for procs in list(local_registry().started_here.values())
        if isinstance(procs, SpawnedProcBackend) and procs.is_up
    ]
    return [*(ProcMesh(procs, procs.axes) for procs in spawned), *([this_proc()] if local_registry().actors else [])]


def actor_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one line per mesh of actors and common state. Pure."""
    if not rows:
        return Table(f"{title}: no actors.", notes=("mesh.spawn(name, Class) makes some; docs/actors.md says more.",))
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["actor"], row["id"], row["rank"])):
        groups.setdefault((row["id"], row["state"], row["running"] or "", row["last_error"] or ""), []).append(row)
    num_actors = len({row["id"] for row in rows})
    heading = f"{title}: {len(rows)} in {num_actors} {'mesh' if num_actors == 1 else 'meshes'}."
    return Table(heading, COLUMNS, tuple(_format_row(group) for group in groups.values()))


def _format_row(group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    first = group[0]
    error = first["last_error"] or ""
    runs = ""
    if first["running"]:
        runs = f"{first['running'].lstrip('=')} for {format_seconds(max(row['seconds'] or 0.0 for row in group))}"
    ranks = format_ranks([row["rank"] for row in group])
    return (
        first["actor"],
        first["class"],
        f"{first['home']}: {ranks}" if "home" in first else ranks,
        first["state"],
        _format_range(row["mailbox"] for row in group),
        runs,
        _format_range(row["messages"] for row in group),
        error if len(error) <= _ERROR_CHARS else f"{error[: _ERROR_CHARS - 3]}...",
    )


def _format_range(numbers: Iterable[int]) -> str:
    counted = sorted(numbers)
    return f"{counted[0]}" if counted[0] == counted[-1] else f"{counted[0]}-{counted[-1]}"
