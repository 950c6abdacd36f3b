"""The commands about what was: `meshbook logs`, `history`, `hosts`, `checkpoints`, `report`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshbook.cli.meshes import as_json, observed_mesh, print_result, use_color
from meshbook.controller import checkpoints, logs
from meshbook.controller.past_cells import PastCell
from meshbook.controller.tables import history_table
from meshbook.errors import NotAttached
from meshbook.selections import parse_selection
from meshbook.wire import checkpoint_folders

# Adds a command to the parser: its name, what runs it, its help.
AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_commands(add: AddCommand) -> list[argparse.ArgumentParser]:
    """Add the commands of this module; return those that print a result."""
    found = add("logs", _logs, "lines that ranks printed, also dead ones, those of several ranks as one")
    _add_mesh(found)
    found.add_argument("--grep", default="", metavar="REGEX", help="only lines that match")
    found.add_argument("--since", metavar="TIME", help="30s, 5m, 2h or 1d ago, or 2026-11-26T14:05")
    found.add_argument("--ranks", help="of some ranks: 0,2-3, or dp=0")
    found.add_argument("--host", metavar="NAME", help="what the agent of a host has written, instead; also a lost one")
    found.add_argument("--context", "-C", type=int, default=0, metavar="N", help="lines around each hit, of its rank")
    found.add_argument("--last", type=int, metavar="N", help=f"so many of the newest ({logs.DEFAULT_LIMIT})")
    found.add_argument("-f", "--follow", action="store_true", help="go on with what is printed, until Ctrl-C")

    history = add("history", _history, "the cells that ran on a mesh; with --cell, what one showed")
    _add_mesh(history)
    history.add_argument("--cell", type=int, metavar="N", help="what cell N printed and how it ended")

    hosts = add("hosts", _hosts, "the machines of a mesh: state, GPUs or cores, versions, latency")
    _add_mesh(hosts)

    saved = add("checkpoints", _checkpoints, "the checkpoints below a folder")
    saved.add_argument("path", metavar="PATH")

    report = add("report", _report, "write a file for an issue: versions, findings, last errors and logs, no secrets")
    _add_mesh(report)
    return [found, history, hosts, saved, report]


def _add_mesh(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")


def _logs(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        if options.host is not None:
            text = logs.host_log(mesh.session, options.host)
            print_result(options, text, lambda: text.rstrip("\n"))
            return 0
        ranks = parse_selection(mesh.grid, options.ranks) if options.ranks else ()
        search: dict[str, Any] = {"grep": options.grep, "since": options.since, "context": options.context}
        if options.follow:
            for hit in logs.follow(mesh.session, ranks, limit=options.last, **search):
                shown = {"problem": hit} if isinstance(hit, str) else hit
                text = hit if isinstance(hit, str) else hit.as_text(color=use_color())
                print(as_json(shown).decode() if options.json else text, flush=True)
            return 0
        limit = logs.DEFAULT_LIMIT if options.last is None else options.last
        found = logs.search(mesh.session, ranks, limit=limit, **search)
    print_result(options, found, lambda: found.as_text(color=use_color()))
    return 0


def _history(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        if options.cell is None:
            entries = mesh.history()
            print_result(options, entries, lambda: history_table(entries))
        else:
            cell = mesh.history(options.cell)
            print_result(options, _cell_fields(cell), lambda: cell)
    return 0


def _cell_fields(cell: PastCell) -> dict[str, Any]:
    return {
        "number": cell.number,
        "ranks": cell.ranks,
        "source": cell.source,
        "status": cell.status,
        "seconds": cell.seconds,
        "text": cell.text,
    }


def _hosts(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        hosts = mesh.hosts()
    print_result(options, hosts.infos, lambda: hosts)
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    path = str(Path(options.path).expanduser())
    if not options.json:
        print(checkpoints.table(path))
        return 0
    saved = [
        {
            "folder": entry.folder,
            "step": entry.manifest.step,
            "saved_at": entry.manifest.saved_at,
            "num_bytes": entry.manifest.num_bytes,
            "axes": entry.manifest.axes,
            "names": [name.name for name in entry.manifest.names],
        }
        for entry in checkpoint_folders.list_checkpoints(path)
    ]
    print_result(options, saved, str)
    return 0


def _report(options: argparse.Namespace) -> int:
    from meshbook.cli import doctor
    from meshbook.controller.issue_report import write_report

    def diagnose() -> str:
        return doctor.format_report(doctor.run_checks())

    try:
        with observed_mesh(options.name) as mesh:
            report = write_report(mesh, diagnose)
    except NotAttached as error:  # no mesh runs, or the one that does is what does not work
        report = write_report(None, diagnose, problem=str(error))
    print_result(options, report, lambda: report)
    return 0
