"""The commands `%mesh resize` and `%mesh spare`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError
from meshbook.kernel.magic_command import MagicCommand, argument
from meshbook.kernel.notebook import Notebook
from meshbook.selections import parse_axes


def resize_command(mesh_of: Callable[[Notebook], Mesh]) -> MagicCommand:
    """Return the command, which resizes the mesh that `mesh_of` returns."""
    return MagicCommand(
        "%mesh resize N | AXIS=SIZE [AXIS=SIZE ...]",
        "More or fewer ranks; those that stay keep what they hold.",
        lambda notebook, options: resize(mesh_of(notebook), options),
        (argument("size", nargs="*"),),
        "New ranks run the setup cells, and the imports and definitions of other cells, and get what the others hold "
        "alike. The highest ranks leave.",
        complete=lambda notebook: [f"{name}=" for name in notebook.mesh.axes] if notebook.mesh is not None else (),
    )


def spare_command(mesh_of: Callable[[Notebook], Mesh]) -> MagicCommand:
    """Return the command, which keeps spares of the mesh that `mesh_of` returns."""
    return MagicCommand(
        "%mesh spare [N]",
        "Processes that are ready to become ranks; N: keep so many on each machine.",
        lambda notebook, options: mesh_of(notebook).spare(options.num),
        (argument("num", nargs="?", type=int),),
        "%mesh heal and %mesh resize take them first. They have imported what the ranks have. 0: end them.",
    )


def resize(mesh: Mesh, options: argparse.Namespace) -> None:
    """Resize a mesh, and print what came of it. Raises UsageError for words that say no size."""
    words = options.size
    if len(words) == 1 and words[0].isdecimal():
        print(mesh.resize(int(words[0])))
    elif words and all("=" in word for word in words):
        print(mesh.resize(**parse_axes(",".join(word.strip(",") for word in words)).axes))
    else:
        raise UsageError(
            f"to how many ranks? Write it like: %mesh resize 6, or %mesh resize dp=3. This mesh has {mesh.grid}"
        )
