"""The commands on ranks that run: `meshbook interrupt`, `kill`, `debug`, `health`, `memory`."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator

import msgspec

from meshbook.cli.meshes import observed_mesh, print_result
from meshbook.cli.records import AddCommand
from meshbook.controller.mesh import Mesh
from meshbook.controller.reports import fetch_mesh_snapshot, memory_table
from meshbook.errors import UsageError
from meshbook.ids import name_ranks
from meshbook.selections import parse_selection
from meshbook.wire import keys

# What cannot be meant as a mesh's name.
_RANKS = re.compile(r"all|\d[\d,-]*|\w+=.*")


def add_commands(add: AddCommand, port: Callable[[str], int]) -> list[argparse.ArgumentParser]:
    """Add the commands of this module; return those that print a result."""
    interrupt = add("interrupt", _interrupt, "stop the cell that runs, as the Stop button does")
    kill = add("kill", _kill, "kill ranks, like a crash; what they hold is lost")
    debug = add("debug", _debug, "stop the cell that runs in the debugger, with its prompt here; Ctrl-C leaves it")
    for command in (interrupt, kill, debug):
        command.add_argument(
            "words", nargs="*", metavar="[NAME] [RANKS]", help="which mesh, if several run; 0,2-3 or dp=0"
        )
    debug.add_argument("--dap", action="store_true", help="open a debugpy port instead, for VS Code to attach to")
    debug.add_argument("--port", type=port, help="which, for one rank; any that is free, unless said")
    health = add("health", _health, "what each rank does and waits for; CPU, memory, GPU")
    memory = add("memory", _memory, "memory of each rank and its GPU")
    for command in (health, memory):
        command.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    return [health, memory]


@contextlib.contextmanager
def _mesh_and_ranks(words: list[str]) -> Iterator[tuple[Mesh, str]]:
    """Attach to the mesh that `[NAME] [RANKS]` names, as an observer; yield it with the ranks as they were written."""
    running = {found.name for found in keys.list_connections()}
    is_named = bool(words) and (words[0] in running or not _RANKS.fullmatch(words[0]))
    with observed_mesh(words[0] if is_named else None) as mesh:
        yield mesh, " ".join(words[is_named:])


def _interrupt(options: argparse.Namespace) -> int:
    with _mesh_and_ranks(options.words) as (mesh, chosen):
        ranks = parse_selection(mesh.grid, chosen) if chosen else mesh.session.living(mesh.ranks)
        mesh.interrupt(ranks)
        mesh.status()  # its answer comes behind the Stop
        print(f"Stop was sent to {name_ranks(ranks)}.")
    return 0


def _kill(options: argparse.Namespace) -> int:
    with _mesh_and_ranks(options.words) as (mesh, chosen):
        if not chosen:
            raise UsageError("which ranks? Write it like: meshbook kill 2, or meshbook kill all")
        ranks = parse_selection(mesh.grid, chosen)
        mesh.kill(ranks)
        print(f"Killed {name_ranks(ranks)}.")
    return 0


def _debug(options: argparse.Namespace) -> int:
    with _mesh_and_ranks(options.words) as (mesh, chosen):
        if options.dap:
            from meshbook.controller.debug_ports import open_ports

            print(open_ports(mesh.session, parse_selection(mesh.grid, chosen), options.port or 0))
        else:
            mesh.debug(chosen or None)
    return 0


def _health(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        snapshot, table = fetch_mesh_snapshot(mesh.session), mesh.health()
    print_result(options, [msgspec.structs.asdict(rank) for rank in snapshot.ranks], lambda: table)
    return 0


def _memory(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        snapshot, rows = fetch_mesh_snapshot(mesh.session), mesh.memory(kind="dict")
    print_result(options, rows, lambda: memory_table(snapshot, mesh.ranks))
    return 0
