"""The commands of `%mesh` about recorded cells and their replay."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from meshbook.controller import recording
from meshbook.controller.mesh import Mesh
from meshbook.controller.tables import format_bytes
from meshbook.errors import UsageError
from meshbook.kernel.chosen_mesh import mesh_named
from meshbook.kernel.magic_command import MagicCommand
from meshbook.kernel.magic_command import argument as _argument
from meshbook.kernel.notebook import Notebook

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def record(mesh: Mesh, options: argparse.Namespace) -> None:
    """Arm or disarm the recorder, or write what it has, and say so."""
    if options.limit is not None and options.what != "on":
        raise UsageError("--limit is for %mesh record on: memory that a record may take on each rank")
    if options.what == "save":
        print(mesh.save_record())
        return
    limit = recording.DEFAULT_LIMIT if options.limit is None else _parse_size(options.limit)
    mesh.record(options.what == "on", limit=limit)
    if options.what == "on":
        print(
            f"Each rank keeps what a replay of its last cell needs, up to {format_bytes(limit)} of memory. A cell that "
            f"fails or is stopped leaves a bundle in {recording.FOLDER}/; %mesh record save writes one of any cell."
        )
    else:
        print("Cells are recorded no longer.")


def replay(options: argparse.Namespace) -> None:
    """Run `meshbook replay` in a process of its own, and show what it prints."""
    path = Path(options.bundle)
    if not path.exists():
        path = Path(recording.FOLDER) / path
    words = [sys.executable, "-m", "meshbook", "replay", str(path)]
    if options.rank is not None:
        words += ["--rank", str(options.rank)]
    if options.trust:
        words.append("--trust")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in cast("Iterable[str]", process.stdout):
            print(line, end="")
    print(f"In a terminal, with the debugger: meshbook replay {path} --pdb")


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--limit {text!r} is no amount of memory; write it like --limit 4G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _bundles(notebook: Notebook) -> Iterable[str]:
    return sorted(path.name for path in Path(recording.FOLDER).glob("f*"))


COMMANDS = {
    "record": MagicCommand(
        "%mesh record on|off|save [--limit 4G]",
        "Keep what a replay of a cell needs, on each rank; a cell that fails becomes a bundle on disk.",
        lambda notebook, options: record(mesh_named(notebook), options),
        (_argument("what", choices=("on", "off", "save")), _argument("--limit")),
        "save: write bundles of the last recorded cell, however it ended. --limit: memory that a record may take on "
        "each rank (1G).",
    ),
    "replay": MagicCommand(
        "%mesh replay BUNDLE [--rank R] [--trust]",
        "Run a recorded cell of one rank again, in one process: `%mesh replay f3`.",
        lambda notebook, options: replay(options),
        (_argument("bundle"), _argument("--rank", type=int), _argument("--trust", action="store_true")),
        "--rank: whose; the first that failed, unless said. --trust: also if it was not made here: a bundle is code.",
        complete=_bundles,
    ),
}
