"""Every actor there is, as a table for people: what waits, what runs and for how long, what went wrong last.

`survey` asks the processes; what is made of its answers here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshbook.actors.finding import find_on
from meshbook.actors.grounds import Started
from meshbook.actors.mesh import ActorMesh
from meshbook.actors.procs import ProcMesh, this_proc
from meshbook.actors.procs import survey as survey
from meshbook.actors.runtime.life import life
from meshbook.actors.runtime.post import is_open
from meshbook.controller.tables import Table, format_seconds
from meshbook.ids import format_ranks

COLUMNS = ("actor", "class", "ranks", "state", "mailbox", "runs", "messages", "last error")
_ERROR_CHARS = 80


@dataclass(frozen=True, repr=False)
class ActorTable(Table):
    """`mesh.actors()`: a table to look at, and by name the actors themselves: `mesh.actors()["trainers"]`."""

    mesh: Any = None

    def __getitem__(self, name: str) -> ActorMesh:
        return find_on(self.mesh, name)


def actors_on(mesh: Any) -> ActorTable:
    """`Mesh.actors()`: the actors on the ranks of a mesh."""
    plain = table(f"Mesh {mesh.name}", survey(mesh))
    return ActorTable(plain.heading, plain.columns, plain.rows, plain.notes, mesh)


def all_actors(mesh: Any = None) -> Table:
    """Those on a mesh, if one is given, on the processes that this program has started by `spawn_procs`, and in this
    process itself. Blocks for two seconds at most where a process does not answer."""
    return table("All actors", [*(survey(mesh) if mesh is not None else ()), *actors_elsewhere()])


def actors_elsewhere(*, timeout: float = 2.0) -> list[dict[str, Any]]:
    """Rows of those on the processes that this program has started by `spawn_procs`, and in this process itself."""
    places = _elsewhere()
    return [{**row, "home": place.name} for place in places for row in survey(place, timeout=timeout)]


def are_elsewhere() -> bool:
    """Whether there are processes of such actors."""
    return bool(_elsewhere())


def _elsewhere() -> list[ProcMesh]:
    if not is_open():
        return []
    kept = [procs for procs in list(life().kept.values()) if isinstance(procs, Started) and procs.is_up]
    return [*(ProcMesh(procs, procs.axes) for procs in kept), *([this_proc()] if life().actors else [])]


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each mesh of actors and thing that its actors do. Pure."""
    if not rows:
        return Table(f"{title}: no actors.", notes=("mesh.spawn(name, Class) makes some; docs/actors.md says more.",))
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["actor"], row["id"], row["rank"])):
        groups.setdefault((row["id"], row["state"], row["running"] or "", row["last_error"] or ""), []).append(row)
    num_actors = len({row["id"] for row in rows})
    heading = f"{title}: {len(rows)} in {num_actors} {'mesh' if num_actors == 1 else 'meshes'}."
    return Table(heading, COLUMNS, tuple(_line(group) for group in groups.values()))


def _line(group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
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
        _span(row["mailbox"] for row in group),
        runs,
        _span(row["messages"] for row in group),
        error if len(error) <= _ERROR_CHARS else f"{error[: _ERROR_CHARS - 3]}...",
    )


def _span(numbers: Iterable[int]) -> str:
    counted = sorted(numbers)
    return f"{counted[0]}" if counted[0] == counted[-1] else f"{counted[0]}-{counted[-1]}"
