"""The commands of `%mesh` about checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from meshbook.controller.mesh import Mesh
from meshbook.controller.tables import Table, format_bytes, format_seconds
from meshbook.errors import UsageError


def checkpoint(mesh: Mesh, options: argparse.Namespace) -> None:
    """Save, and say what was saved and what follows."""
    if not options.names:
        raise UsageError(f"which names? Write it like: %mesh checkpoint {options.path} model opt --step 800")
    save = mesh.checkpoint(
        options.path,
        *options.names,
        step=options.step,
        asynchronous=not options.wait,
        overwrite=options.overwrite,
    )
    copied = f"{format_bytes(save.num_bytes)} copied in {format_seconds(save.seconds)}"
    if options.wait:
        print(f"Checkpoint {Path(save.result().folder)} is committed; {copied}.")
    else:
        print(f"{copied}; they are being written. %mesh checkpoints {options.path} lists it when it is committed.")


def restore(mesh: Mesh, options: argparse.Namespace) -> None:
    """Restore, and say what was restored."""
    restored = mesh.restore(options.path, *options.names, step=options.step)
    names = options.names or restored.names
    print(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} as in {restored.folder}.")


def list_checkpoints(mesh: Mesh, options: argparse.Namespace) -> Table:
    return mesh.checkpoints(options.path)


def folders() -> Iterable[str]:
    """Return folders here that have checkpoints, for completion."""
    return sorted({found.parent.parent.name for found in Path().glob("*/*/meshbook.json")})
