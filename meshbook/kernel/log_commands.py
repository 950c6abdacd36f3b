"""`%mesh logs`: what ranks last printed, or a search in all that they have printed."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable

from meshbook.controller import logs
from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError
from meshbook.ids import Ranks
from meshbook.kernel.magic_command import MagicCommand, argument
from meshbook.kernel.notebook import Notebook
from meshbook.selections import parse_selection

_LOG_BYTES_ONE_RANK = 1 << 16
_LOG_BYTES_PER_RANK = 1 << 12
_HOST = "host:"


def logs_command(mesh_of: Callable[[Notebook], Mesh]) -> MagicCommand:
    """Return the command; `mesh_of` returns the mesh that it is about."""
    return MagicCommand(
        "%mesh logs [RANKS | host:NAME] [--grep REGEX] [--since 5m] [--context N] [--last N] [-f]",
        "What ranks last printed, also dead ones; with an option, a search in all that was printed.",
        lambda notebook, options: _logs(mesh_of(notebook), options),
        (
            argument("where", nargs="*", metavar="RANKS"),
            argument("--ranks"),
            argument("--grep", default=""),
            argument("--since"),
            argument("--context", "-C", type=int, default=0),
            argument("--last", type=int),
            argument("-f", "--follow", action="store_true"),
        ),
        "RANKS, or --ranks: 2, 0-3, dp=0. host:gpu2: what the agent of that host, and what started it, have written, "
        "also of a lost one. --grep: a regular expression; quote it. --since: 30s, 5m, 2h, 1d ago, or "
        "2026-11-26T14:05. --context: so many lines of the same rank around each hit. --last: so many of the newest "
        "hits (1000). -f: go on with what is printed, until Stop; beside a running cell, until that has ended. Lines "
        "that several ranks printed within a second are one, as in a cell's output.",
    )


def _logs(mesh: Mesh, options: argparse.Namespace) -> logs.Logs | None:
    where = " ".join([*options.where, *([options.ranks] if options.ranks else [])])
    is_search = options.grep or options.since or options.context or options.last is not None
    if where.startswith(_HOST):
        if is_search or options.follow:
            raise UsageError(f"the log of a host is shown alone: %mesh logs {where}")
        print(mesh.logs(host=where.removeprefix(_HOST).strip()).rstrip("\n"))
        return None
    ranks = parse_selection(mesh.grid, where) if where else None
    if options.follow:
        _follow(mesh, ranks, options)
        return None
    if not is_search:
        _show_tails(mesh, mesh.ranks if ranks is None else ranks)
        return None
    last = logs.DEFAULT_LIMIT if options.last is None else options.last
    return mesh.logs(ranks=ranks, grep=options.grep, since=options.since, context=options.context, limit=last)


def _follow(mesh: Mesh, ranks: Ranks | None, options: argparse.Namespace) -> None:
    """Print hits as they come, until Stop."""
    is_beside_cell = threading.current_thread() is not threading.main_thread()  # in a subshell, which no Stop reaches
    hits = logs.follow(
        mesh.session,
        ranks or (),
        grep=options.grep,
        since=options.since,
        context=options.context,
        limit=options.last,
        until=(lambda: mesh.session.foreground.is_idle) if is_beside_cell else None,
    )
    try:
        for hit in hits:
            print(hit, flush=True)
    except KeyboardInterrupt:
        hits.close()


def _show_tails(mesh: Mesh, ranks: Ranks) -> None:
    """Print the last output of ranks, more of it where one alone is asked for."""
    for rank in ranks:
        text = mesh.logs(rank, _LOG_BYTES_ONE_RANK if len(ranks) == 1 else _LOG_BYTES_PER_RANK)
        if len(ranks) > 1:
            print(f"---- rank {rank}")
        print(text.rstrip("\n") if text else f"(rank {rank} has printed nothing)")
