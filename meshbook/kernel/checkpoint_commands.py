"""The commands of `%mesh` about checkpoints, and what may bring ranks back to one."""

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
    if options.on_preemption:
        _plan_preemption(mesh, options)
        return
    if options.grace is not None:
        raise UsageError("--grace is for --on-preemption: seconds between SIGTERM and the end")
    if options.resize:
        raise UsageError("--resize is for --on-preemption: the mesh goes on without the ranks that are ended")
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


def heal(mesh: Mesh, options: argparse.Namespace) -> None:
    """Heal, and say what came of it."""
    restore = options.restore
    ranks = " ".join(options.ranks)
    copy = False if options.copy is None else ",".join(options.copy) or True
    print(mesh.heal(ranks or (), replay=not options.no_replay, share=not options.no_share, copy=copy, restore=restore))


def _plan_preemption(mesh: Mesh, options: argparse.Namespace) -> None:
    if options.step is not None or options.wait or options.overwrite:
        raise UsageError("--on-preemption saves later, with a number of its own: leave out --step, --wait, --overwrite")
    grace = {} if options.grace is None else {"grace_s": options.grace}
    mesh.on_preemption(options.path, *options.names, **grace, resize=options.resize)
    unless = ", unless the mesh can go on without them" if options.resize else ""
    print(f"{', '.join(options.names)} will be saved in {options.path} when ranks of the mesh receive SIGTERM{unless}.")


def list_checkpoints(mesh: Mesh, options: argparse.Namespace) -> Table:
    return mesh.checkpoints(options.path)


def folders() -> Iterable[str]:
    """Return folders here that have checkpoints, for completion."""
    return sorted({found.parent.parent.name for found in Path().glob("*/*/meshbook.json")})
