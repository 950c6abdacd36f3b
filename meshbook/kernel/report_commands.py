"""`%mesh doctor` and `%mesh report`: what this machine lacks, and a file for an issue."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from meshbook.controller.issue_report import IssueReport, write_report
from meshbook.kernel.chosen_mesh import mesh_named
from meshbook.kernel.magic_command import MagicCommand, argument
from meshbook.kernel.notebook import Notebook


def _doctor(notebook: Notebook, options: argparse.Namespace) -> None:
    done = _run_doctor(*(["--on", options.on] if options.on else []))
    print(done.stdout.rstrip("\n"))
    if done.stderr:
        print(done.stderr.rstrip("\n"), file=sys.stderr)


def _report(notebook: Notebook, options: argparse.Namespace) -> IssueReport:
    mesh = mesh_named(notebook, options.name) if options.name or notebook.mesh is not None else None
    return write_report(mesh, lambda: _run_doctor().stdout)


def _run_doctor(*options: str) -> subprocess.CompletedProcess[str]:
    # In a separate process: it imports torch, and checks the machine as a new kernel would see it.
    command = [sys.executable, "-m", "meshbook", "doctor", *options]
    package = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)


COMMANDS = {
    "report": MagicCommand(
        "%mesh report [NAME]",
        "Write a file for an issue: versions, findings, last errors and logs; no secrets.",
        _report,
        (argument("name", nargs="?"),),
        complete=lambda notebook: notebook.meshes,
    ),
    "doctor": MagicCommand(
        "%mesh doctor [--on ssh://gpu1,gpu2, slurm://PARTITION or ray://auto]",
        "What this machine lacks, or those that ssh reaches, and how to get it.",
        _doctor,
        (argument("--on"),),
    ),
}
