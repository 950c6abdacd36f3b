"""Which mesh a command means: the one of a name, or the notebook's current one."""

from __future__ import annotations

import argparse

from meshbook.controller.mesh import Mesh
from meshbook.errors import MeshNameError, NotAttached
from meshbook.ids import Ranks
from meshbook.kernel.notebook import Notebook
from meshbook.selections import parse_selection
from meshbook.wire import keys


def mesh_named(notebook: Notebook, name: str | None = None) -> Mesh:
    """Return a mesh of this notebook; None: the current one.

    Raises:
        NotAttached: there is no current one.
        MeshNameError: no mesh of this notebook has that name; the message says what would help.
    """
    if not name:
        if notebook.mesh is None:
            raise NotAttached(f"this notebook has no mesh yet. {start_hint(notebook)}")
        return notebook.mesh
    if name in notebook.meshes:
        return notebook.meshes[name]
    if name in running_meshes(notebook):
        raise MeshNameError(f"mesh {name!r} runs, but not in this notebook; %mesh attach {name} brings it here")
    raise MeshNameError(f"no mesh is named {name!r}; this notebook's: {', '.join(notebook.meshes) or 'none'}")


def living_mesh(notebook: Notebook) -> Mesh | None:
    """Return the current mesh, if it has not ended."""
    mesh = notebook.mesh
    return mesh if mesh is not None and mesh.session.ended is None else None


def running_meshes(notebook: Notebook) -> list[str]:
    """Return the names of all meshes of this user; the notebook is what completion passes."""
    return [connection.name for connection in keys.list_connections()]


def selected_ranks(mesh: Mesh, options: argparse.Namespace) -> Ranks:
    """Return the ranks that a line names; without any, all of the mesh. Raises MeshShapeError."""
    return parse_selection(mesh.grid, " ".join(options.ranks))


def start_hint(notebook: Notebook) -> str:
    """Return a sentence that says how this notebook gets a mesh."""
    ways = ", ".join(f"%mesh attach {name}" for name in notebook.meshes.others()[-3:])
    return "Start one with %mesh start -n 4" + (f", or use one that runs: {ways}" if ways else ".")
