"""`%mesh`, `%%mesh`, `%%controller` and `%%local`.

A magic parses its line and makes one call. A line with a usage error changes nothing and raises one sentence that shows
the correct form. Every error is raised, so that the reply is a Jupyter error and *Run All* stops, but without the stack
of Meshbook's own code.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from typing import Any, NoReturn

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from meshbook.errors import MeshbookError, UsageError
from meshbook.kernel.chosen_mesh import living_mesh, mesh_named
from meshbook.kernel.commands import COMMANDS
from meshbook.kernel.hints import hide_traceback, suggest
from meshbook.kernel.notebook import Notebook

_CELL_OPTIONS = ("--ranks", "--actor", "-m", "--setup", "--bg", "--break", "--record")
CELL_USAGE = "%%mesh [--ranks 0,2-3 | dp=0 | --actor NAME] [-m NAME] [--setup] [--bg] [--break] [--record]"


# What other tools call a command.
SYNONYMS = {
    "exit": "stop",
    "info": "status",
    "ls": "list",
    "ps": "status",
    "quit": "stop",
    "ranks": "status",
    "shutdown": "stop",
    "stat": "status",
    "top": "dashboard",
    "version": "doctor",
}


class _RaisingParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing and exiting."""

    def __init__(self, prog: str, usage: str) -> None:
        super().__init__(prog=prog, usage=usage, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].lower()}{message[1:]}. Write it like: {self.usage}")


def _help_text() -> str:
    width = max(len(name) for name in COMMANDS)
    return "\n".join(
        [
            "Start, watch and steer the ranks; as a cell magic, run a cell on some of them.",
            "",
            *(f"    %mesh {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            "How each is written: %mesh WORD --help. As a cell magic:",
            "",
            f"    {CELL_USAGE}",
            "",
            "--ranks, or a place along axes: where it runs. -m: on which mesh. --setup: also on ranks that join later.",
            "--bg: in the background; `_` is then a future, and the output goes on under the cell.",
            "--break: the debugger stops at the first line; `h` at its prompt lists the commands.",
            "--record: keep what a replay of it needs; if it fails, `%mesh replay` runs it again in one process.",
        ]
    )


@magics_class
class MeshMagics(Magics):
    """The `%mesh` magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.notebook = Notebook.of(shell)

    @line_cell_magic
    def mesh(self, line: str = "", cell: str | None = None) -> Any:
        try:
            self.notebook.meshes.reattach()
            return _run_line(self.notebook, line) if cell is None else _run_cell(self.notebook, line, cell)
        except MeshbookError as error:
            hide_traceback(error)
            raise error from None

    mesh.__doc__ = _help_text()


def _run_cell(notebook: Notebook, line: str, cell: str) -> Any:
    """Run a `%%mesh` cell."""
    words = _split_line(line)
    if words and words[0] in COMMANDS:
        raise UsageError(
            f"%mesh {words[0]} is a line of its own, with one %. A cell for the ranks begins with: {CELL_USAGE}"
        )
    parser = _RaisingParser("%%mesh", CELL_USAGE)
    parser.add_argument("--ranks")
    parser.add_argument("-m", "--mesh")
    parser.add_argument("--setup", action="store_true")
    parser.add_argument("--bg", action="store_true")
    parser.add_argument("--break", action="store_true", dest="stop_first")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--actor")
    parser.add_argument("where", nargs="*")
    options = parser.parse_intermixed_args(words)
    if options.ranks is not None and options.where:
        parser.error(f"--ranks {options.ranks} and {' '.join(options.where)} both say where; keep one")
    if options.bg and options.stop_first:
        parser.error("--break asks for commands, which a cell in the background cannot; leave --bg out")
    if not cell.strip():
        raise UsageError("the cell is empty; write what the ranks shall run below the %%mesh line")
    if options.actor is not None:
        if (
            options.ranks
            or options.where
            or options.mesh
            or options.setup
            or options.bg
            or options.stop_first
            or options.record
        ):
            parser.error("--actor NAME stands alone: the cell runs in every actor of that name")
        from meshbook.actors.cells import run_in_actors  # imported here: a kernel without actors starts faster
        from meshbook.actors.lookup import find_actors

        return run_in_actors(find_actors(options.actor, living_mesh(notebook)), cell)
    return notebook.run_cell(
        cell,
        mesh=mesh_named(notebook, options.mesh) if options.mesh else None,
        ranks=options.ranks or " ".join(options.where) or None,
        setup=options.setup,
        background=options.bg,
        stop_first=options.stop_first,
        record=options.record,
    )


def _run_line(notebook: Notebook, line: str) -> Any:
    """Run a `%mesh` line."""
    word, *rest = _split_line(line) or ["status"]
    if word in ("help", "--help", "-h"):
        print(_help_text())
        return None
    command = COMMANDS.get(word)
    if command is None:
        meant = f"did you mean %mesh {SYNONYMS[word]}?" if word in SYNONYMS else suggest(word, COMMANDS, "%mesh ")
        hint = meant or f"there is {', '.join(COMMANDS)}"
        raise UsageError(f"there is no %mesh {word}; {hint}")
    if "--help" in rest or "-h" in rest:
        print(command.help_text)
        return None
    parser = _RaisingParser(f"%mesh {word}", command.usage)
    for names, options in command.arguments:
        parser.add_argument(*names, **options)
    return command.run(notebook, parser.parse_intermixed_args(rest))


def _split_line(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} cannot be read: {str(error).lower()}") from None


@magics_class
class ControllerMagics(Magics):
    """Magics for cells that run in the notebook's own process."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell

    @cell_magic
    def controller(self, line: str, cell: str) -> Any:
        """Run this cell in the notebook's own process, where `mesh` is the mesh and the ranks' names are handles."""
        return _run_locally(self._shell, line, cell)

    @cell_magic
    def local(self, line: str, cell: str) -> Any:
        """The same as %%controller."""
        return _run_locally(self._shell, line, cell)


def _run_locally(shell: InteractiveShell, line: str, cell: str) -> Any:
    """Run a cell that was not rewritten before it ran, as notebook cells are."""
    if line.strip():
        error = UsageError(f"%%controller stands alone on its line, and {line.strip()!r} stands behind it")
        hide_traceback(error)
        raise error
    result = shell.run_cell(cell)  # type: ignore[no-untyped-call]
    result.raise_error()
    return result.result


def register(shell: InteractiveShell) -> None:
    """Register the magics with a shell; a second call does nothing."""
    if "mesh" in shell.magics_manager.magics["cell"]:
        return
    shell.register_magics(MeshMagics, ControllerMagics)
    shell.set_hook("complete_command", complete, str_key="%mesh")  # type: ignore[no-untyped-call]


def complete(shell: InteractiveShell, event: Any) -> list[str]:
    """Return completions for a `%mesh` line, for IPython's completer."""
    return complete_line(Notebook.of(shell), event.line)


def complete_line(notebook: Notebook, line: str) -> list[str]:
    """Return what may stand at the end of a `%mesh` or `%%mesh` line: commands, options, and what arguments may be."""
    words = line.split()
    fragment = "" if line.endswith(" ") else words.pop()
    if words[:1] == ["%%mesh"]:
        found: Iterable[str] = _CELL_OPTIONS
    elif len(words) < 2:
        found = COMMANDS
    elif words[1] in COMMANDS:
        found = COMMANDS[words[1]].completions(notebook)
    else:
        found = ()
    return [word for word in found if word.startswith(fragment)]


def help_for(line: str) -> str:
    """Return the help for a `%mesh` line: its command's, or the overview."""
    words = line.split()
    command = COMMANDS.get(words[1]) if len(words) > 1 and words[0] == "%mesh" else None
    return _help_text() if command is None else command.help_text


def unregister(shell: InteractiveShell) -> None:
    """Remove the magics. Meshes live until the process ends."""
    manager = shell.magics_manager
    Notebook.of(shell).auto = False
    for kind, names in (("line", ("mesh",)), ("cell", ("mesh", "controller", "local"))):
        for name in names:
            manager.magics[kind].pop(name, None)
    for magics in (MeshMagics, ControllerMagics):
        manager.registry.pop(magics.__name__, None)
