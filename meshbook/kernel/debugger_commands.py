"""The commands of `%mesh` about the debugger."""

from __future__ import annotations

import argparse
import threading

from meshbook.controller.debug_ports import open_ports
from meshbook.controller.running_debugger import RunningDebugger, find_running, stop_foreground
from meshbook.controller.session import Session
from meshbook.errors import UsageError
from meshbook.ids import Ranks, format_ranks
from meshbook.kernel.chosen_mesh import mesh_named, selected_ranks
from meshbook.kernel.magic_command import MagicCommand, argument
from meshbook.kernel.notebook import Notebook


def _postmortem(notebook: Notebook, options: argparse.Namespace) -> object:
    mesh = mesh_named(notebook)
    return notebook.run_cell("%debug", ranks=selected_ranks(mesh, options))


def _debug(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook)
    if options.dap:
        print(open_ports(mesh.session, selected_ranks(mesh, options), options.port or 0))
        return
    if options.port is not None:
        raise UsageError("--port is debugpy's; write it like: %mesh debug 2 --dap --port 5678")
    stop_running(notebook, mesh.session, selected_ranks(mesh, options))


def stop_running(notebook: Notebook, session: Session, ranks: Ranks) -> None:
    """Stop what ranks run in the debugger. The prompt is that of the running cell, else it is here.

    Raises:
        UsageError: nothing runs there, or the notebook cannot ask for commands now.
    """
    call = find_running(session, ranks)
    if session.foreground.prompting_call == call.call:
        print(stop_foreground(session, call, ranks))
        return
    is_busy = not session.foreground.is_idle or threading.current_thread() is not threading.main_thread()
    if is_busy or not notebook.front_end.allows_input:
        why = "while another cell runs" if is_busy else "because nobody can type here"
        raise UsageError(
            f"{call.label or 'what runs'} cannot be stopped from this cell {why}; in a terminal: "
            f"meshbook debug {session.name} {format_ranks(ranks)}"
        )
    output = notebook.front_end.make_sink(call.ranks, call.number or 0)
    try:
        RunningDebugger(session, call, ranks, output, notebook.front_end.prompt, output.note).run()
    finally:
        output.close()


_RANKS = argument("ranks", nargs="*")
COMMANDS = {
    "debug": MagicCommand(
        "%mesh debug [RANKS] [--dap [--port PORT]]",
        "Stop the running cell in the debugger, at the line where it is; also one that hangs.",
        _debug,
        (_RANKS, argument("--dap", action="store_true"), argument("--port", type=int)),
        "The prompt is below the cell that runs, or here for one in the background; `h` at it lists the commands. "
        "--dap: open a debugpy port of these ranks instead, and show the entry with which VS Code attaches. "
        "--port: which, for one rank; else any that is free.",
    ),
    "postmortem": MagicCommand(
        "%mesh postmortem [RANKS]",
        "Look into the last failure of some ranks with the debugger; `h` at its prompt lists the commands.",
        _postmortem,
        (_RANKS,),
    ),
}
