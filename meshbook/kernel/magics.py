"""`%mesh`, `%%mesh`, `%%controller` and `%%local`.

A magic parses its line and makes one call; the called function works, and is tested, without IPython. A line with a
usage error changes nothing and raises one sentence that shows the correct form. Every error is raised, so that the
reply is a Jupyter error and *Run All* stops, but without the stack of Meshbook's own code.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from meshbook.axes_text import parse_axes, parse_selection
from meshbook.controller.listing import fetch_mesh_info, list_meshes
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.reports import Stacks, Why, fetch_mesh_snapshot, memory_table
from meshbook.controller.tables import Table, describe_size, format_age, format_seconds, history_table, status_table
from meshbook.errors import MeshbookError, MeshNameError, MeshShapeError, NotAttached, UsageError
from meshbook.ids import format_ranks, name_ranks
from meshbook.kernel.notebook import QUERY_TIMEOUT_S, Notebook, format_names
from meshbook.kernel.redefinition import RedefinitionHook
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import keys

_LOG_BYTES_ONE_RANK = 1 << 16
_LOG_BYTES_PER_RANK = 1 << 12
_MAX_NAMES_LISTED = 20


class _RaisingParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].lower()}{message[1:]}. Write it like: {self.usage}")


@dataclass(frozen=True)
class MagicCommand:
    """One subcommand of `%mesh`.

    Attributes:
        usage: the syntax of the complete line.
        summary: what it does, in one sentence.
        details: what its options mean.
        method: the name of the `MeshMagics` method that implements it.
        add_arguments: declares its arguments.
    """

    usage: str
    summary: str
    method: str
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    details: str = ""


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", dest="count", metavar="N")
    parser.add_argument("--axes")
    parser.add_argument("--engine")
    parser.add_argument("--name")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--no-end-on-error", action="store_true")
    parser.add_argument("--keep", action="store_true", default=None)
    parser.add_argument("--ttl", type=float)


def _name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?")


def _ranks_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ranks", nargs="*")


def _stacks_arguments(parser: argparse.ArgumentParser) -> None:
    _ranks_argument(parser)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--threads", action="store_true")


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    _name_argument(parser)
    parser.add_argument("--now", action="store_true")


def _detach_arguments(parser: argparse.ArgumentParser) -> None:
    _name_argument(parser)
    parser.add_argument("--ttl", type=float)


def _pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what")
    parser.add_argument("--rank", type=int)


COMMANDS = {
    "start": MagicCommand(
        "%mesh start -n 4 [--axes dp=2,tp=2] [--name NAME] [--device cpu|cuda] [--fresh] [--hosts N] [--engine local] "
        "[--keep] [--ttl SECONDS] [--no-end-on-error]",
        "Start ranks, if none run yet; without -n or --axes one per GPU, else 2 to 4.",
        "_start",
        _start_arguments,
        "A mesh that runs already and is what the options ask for is left as it is, so the cell may be run again; "
        "another one is an error, which %mesh restart resolves. "
        "--fresh: in new interpreters, not forked from a warm one. --hosts: simulate so many machines on this one. "
        "--keep: they outlive the notebook. --ttl: seconds that they live with nobody attached. --no-end-on-error: "
        "ranks that wait in a collective for one that has failed wait until Stop.",
    ),
    "restart": MagicCommand(
        "%mesh restart [-n 4] [--axes dp=2,tp=2] [--name NAME] [--device cpu|cuda] [--fresh] [--hosts N] "
        "[--engine local] [--keep] [--ttl SECONDS] [--no-end-on-error]",
        "Fresh ranks in place of those that run; what they hold is lost.",
        "_restart",
        _start_arguments,
        "Without options as many as before, with the same axes. --name: which mesh of this notebook; it keeps its "
        "name. The rest as in %mesh start.",
    ),
    "status": MagicCommand(
        "%mesh status [NAME]", "What each rank does. `%mesh` alone says the same.", "_status", _name_argument
    ),
    "why": MagicCommand("%mesh why", "Why it hangs: who waits for whom, at which line, and what to do.", "_why"),
    "stacks": MagicCommand(
        "%mesh stacks [RANKS] [--twice] [--threads]",
        "Where the ranks are in their code, as one tree.",
        "_stacks",
        _stacks_arguments,
        "--twice: look again half a second later, and tell who moves. --threads: all threads, not only the main ones.",
    ),
    "health": MagicCommand("%mesh health", "What each rank does and waits for; CPU, memory, GPU.", "_health"),
    "memory": MagicCommand("%mesh memory", "Memory of each rank and its GPU. As numbers: mesh.memory().", "_memory"),
    "dashboard": MagicCommand("%mesh dashboard", "A live picture of it, here in the notebook.", "_dashboard"),
    "stop": MagicCommand(
        "%mesh stop [NAME] [--now]",
        "End the mesh and all that is on it.",
        "_stop",
        _stop_arguments,
        "--now: without waiting for cells that run in the background.",
    ),
    "list": MagicCommand("%mesh list", "Every mesh of yours on this machine.", "_list"),
    "attach": MagicCommand("%mesh attach [NAME]", "Use a mesh that runs already.", "_attach", _name_argument),
    "detach": MagicCommand(
        "%mesh detach [NAME] [--ttl SECONDS]",
        "Leave it running without this notebook.",
        "_detach",
        _detach_arguments,
        "--ttl: seconds that it may live with nobody attached; without it, until it is stopped.",
    ),
    "use": MagicCommand(
        "%mesh use NAME",
        "Which of this notebook's meshes cells run on.",
        "_use",
        lambda parser: parser.add_argument("name"),
    ),
    "auto": MagicCommand(
        "%mesh auto on|off",
        "Whether a cell without a magic runs on the ranks or here.",
        "_auto",
        lambda parser: parser.add_argument("state", choices=("on", "off")),
    ),
    "actors": MagicCommand("%mesh actors", "Every actor: what waits, what runs, its last error.", "_actors"),
    "history": MagicCommand("%mesh history", "The cells that ran on the mesh.", "_history"),
    "logs": MagicCommand(
        "%mesh logs [RANK]",
        "What a rank last printed, also a dead one.",
        "_logs",
        lambda parser: parser.add_argument("rank", nargs="?", type=int),
    ),
    "show": MagicCommand(
        "%mesh show [RANKS]",
        "Displays that the last cell left out, because those of many ranks differed.",
        "_show",
        _ranks_argument,
    ),
    "interrupt": MagicCommand(
        "%mesh interrupt [RANKS]", "Stop what they run, as Stop does.", "_interrupt", _ranks_argument
    ),
    "kill": MagicCommand("%mesh kill RANKS", "Kill ranks, like a crash.", "_kill", _ranks_argument),
    "push": MagicCommand(
        "%mesh push NAME [NAME ...]",
        "Copy variables from here to every rank.",
        "_push",
        lambda parser: parser.add_argument("names", nargs="+"),
    ),
    "pull": MagicCommand(
        "%mesh pull NAME [--rank R]",
        "Bring what the ranks hold here: `values = %mesh pull loss`.",
        "_pull",
        _pull_arguments,
        "--rank: this rank's alone, as it is.",
    ),
    "doctor": MagicCommand("%mesh doctor", "What this machine lacks, and how to get it.", "_doctor"),
}

CELL_USAGE = "%%mesh [--ranks 0,2-3 | dp=0 | --actor NAME] [-m NAME] [--setup] [--bg]"


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
        ]
    )


@magics_class
class MeshMagics(Magics):
    """The `%mesh` magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.notebook = Notebook.of(shell)
        self._shell = shell

    @line_cell_magic
    def mesh(self, line: str = "", cell: str | None = None) -> Any:
        try:
            self.notebook.reattach()
            return self._run_line(line) if cell is None else self._run_cell(line, cell)
        except MeshbookError as error:
            raise _hide_traceback(error) from None

    mesh.__doc__ = _help_text()

    # ---- %%mesh

    def _run_cell(self, line: str, cell: str) -> Any:
        words = _split_line(line)
        if words and words[0] in COMMANDS:
            raise UsageError(
                f"%mesh {words[0]} is a line of its own, with one %. A cell for the ranks begins with: {CELL_USAGE}"
            )
        parser = _RaisingParser(prog="%%mesh", usage=CELL_USAGE, add_help=False, allow_abbrev=False)
        parser.add_argument("--ranks")
        parser.add_argument("-m", "--mesh")
        parser.add_argument("--setup", action="store_true")
        parser.add_argument("--bg", action="store_true")
        parser.add_argument("--actor")
        parser.add_argument("where", nargs="*")
        options = parser.parse_intermixed_args(words)
        if options.ranks is not None and options.where:
            parser.error(f"--ranks {options.ranks} and {' '.join(options.where)} both say where; keep one")
        if not cell.strip():
            raise UsageError("the cell is empty; write what the ranks shall run below the %%mesh line")
        if options.actor is not None:
            if options.ranks or options.where or options.mesh or options.setup or options.bg:
                parser.error("--actor NAME stands alone: the cell runs in every actor of that name")
            from meshbook.actors.cells import run_in_actors  # imported here: a kernel without actors starts faster
            from meshbook.actors.lookup import find_actors

            return run_in_actors(find_actors(options.actor, self._living_mesh()), cell)
        return self.notebook.run_cell(
            cell,
            mesh=self._mesh_named(options.mesh) if options.mesh else None,
            ranks=options.ranks or " ".join(options.where) or None,
            setup=options.setup,
            background=options.bg,
        )

    # ---- %mesh

    def _run_line(self, line: str) -> Any:
        word, *rest = _split_line(line) or ["status"]
        command = COMMANDS.get(word)
        if word in ("help", "--help", "-h"):
            print(_help_text())
            return None
        if command is None:
            hint = _suggest(word, COMMANDS, "%mesh ") or f"there is {', '.join(COMMANDS)}"
            raise UsageError(f"there is no %mesh {word}; {hint}")
        if "--help" in rest or "-h" in rest:
            print("\n".join(filter(None, (command.usage, command.summary, command.details))))
            return None
        parser = _RaisingParser(prog=f"%mesh {word}", usage=command.usage, add_help=False, allow_abbrev=False)
        command.add_arguments(parser)
        return getattr(self, command.method)(parser.parse_args(rest))

    def _start(self, options: argparse.Namespace) -> None:
        options_given = self._mesh_options(options)
        known = [mesh.session for mesh in self.notebook.meshes.values()]
        before = time.monotonic()
        mesh = self.notebook.start(name=options.name, **options_given)
        if mesh.session in known:
            names_held = format_names(mesh.session.status().names)
            print(
                f"Mesh {_describe(mesh)} is running already; its ranks keep what they hold{names_held}. %mesh restart "
                "gives fresh ones."
            )
        else:
            print(f"Mesh {_describe(mesh)} is ready, after {format_seconds(time.monotonic() - before)}.")

    def _restart(self, options: argparse.Namespace) -> None:
        before = time.monotonic()
        mesh = self.notebook.restart(options.name, **self._mesh_options(options))
        took = format_seconds(time.monotonic() - before)
        print(f"Mesh {_describe(mesh)} has fresh ranks, after {took}; names of before are gone.")

    def _mesh_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the options of `start` and `restart` as keyword arguments of `Notebook.start`."""
        axes = parse_axes(options.axes) if options.axes else None
        count = None
        if options.count is not None:
            if not options.count.isdecimal():
                raise UsageError(f"-n takes a number of ranks, not {options.count!r}. Write it like: %mesh start -n 4")
            count = MeshAxes.of(int(options.count)).size
            if axes is not None and axes.size != count:
                raise MeshShapeError(
                    f"axes {axes} make {axes.size} ranks, but -n asks for {count}; leave -n out, or change an axis"
                )
        return {
            "ranks": count,
            "axes": axes.axes if axes is not None else None,
            "engine": options.engine,
            "num_hosts": options.hosts,
            "start_method": "fresh" if options.fresh else None,
            "device": options.device,
            "end_on_error": False if options.no_end_on_error else None,
            "keep": options.keep,
            "orphan_ttl_s": options.ttl,
        }

    def _status(self, options: argparse.Namespace) -> Table:
        if options.name and options.name not in self.notebook.meshes:
            return status_table(fetch_mesh_info(keys.find_connection(options.name)))
        mesh = self.notebook.meshes[options.name] if options.name else self.notebook.mesh
        if mesh is None:
            return Table("This notebook has no mesh yet.", notes=(self._start_hint(),))
        if mesh.session.ended is not None:
            return Table(f"Mesh {mesh.name} has ended: {mesh.session.ended}.", notes=(self._start_hint(),))
        return status_table(mesh.status())

    def _why(self, options: argparse.Namespace) -> Why:
        return self._current_mesh().why()

    def _stacks(self, options: argparse.Namespace) -> Stacks:
        mesh = self._current_mesh()
        ranks = parse_selection(" ".join(options.ranks), mesh.grid)
        return mesh.stacks(ranks, twice=options.twice, threads=options.threads)

    def _health(self, options: argparse.Namespace) -> Table:
        return self._current_mesh().health()

    def _memory(self, options: argparse.Namespace) -> Table:
        mesh = self._current_mesh()
        return memory_table(fetch_mesh_snapshot(mesh.session), mesh.ranks)

    def _dashboard(self, options: argparse.Namespace) -> Any:
        return self._current_mesh().dashboard()

    def _stop(self, options: argparse.Namespace) -> None:
        mesh = self._mesh_named(options.name) if options.name else self._current_mesh()
        self.notebook.stop(mesh.name, now=options.now)
        print(f"Mesh {mesh.name} has ended.")

    def _list(self, options: argparse.Namespace) -> Table:
        return list_meshes().table(mine=tuple(self.notebook.meshes))

    def _attach(self, options: argparse.Namespace) -> None:
        mesh = self.notebook.attach(options.name)
        print(f"Attached to mesh {_describe(mesh)}.")

    def _detach(self, options: argparse.Namespace) -> None:
        mesh = self._mesh_named(options.name) if options.name else self._current_mesh()
        self.notebook.detach(mesh.name, orphan_ttl_s=options.ttl)
        until = "until it is stopped"
        if options.ttl is not None:
            until = f"for {format_age(options.ttl)} unless somebody attaches"
        print(f"Left mesh {mesh.name}; it runs on {until}. Back to it: %mesh attach {mesh.name}")

    def _use(self, options: argparse.Namespace) -> None:
        mesh = self._mesh_named(options.name)
        self.notebook.use(mesh.name)
        print(f"Cells run on mesh {_describe(mesh)}.")

    def _auto(self, options: argparse.Namespace) -> None:
        self.notebook.auto = options.state == "on"
        if self.notebook.auto:
            print("Cells run on the ranks; one that begins with %%controller runs here.")
        else:
            print("Cells run here; one that begins with %%mesh runs on the ranks.")

    def _actors(self, options: argparse.Namespace) -> Table:
        from meshbook.actors.listing import all_actors

        return all_actors(self._living_mesh())

    def _living_mesh(self) -> Mesh | None:
        mesh = self.notebook.mesh
        return mesh if mesh is not None and mesh.session.ended is None else None

    def _history(self, options: argparse.Namespace) -> Table:
        return history_table(self._current_mesh().history())

    def _logs(self, options: argparse.Namespace) -> None:
        mesh = self._current_mesh()
        ranks = mesh.ranks if options.rank is None else (options.rank,)
        for rank in ranks:
            text = mesh.logs(rank, _LOG_BYTES_ONE_RANK if len(ranks) == 1 else _LOG_BYTES_PER_RANK)
            if len(ranks) > 1:
                print(f"---- rank {rank}")
            print(text.rstrip("\n") if text else f"(rank {rank} has printed nothing)")

    def _show(self, options: argparse.Namespace) -> None:
        self.notebook.show_displays(" ".join(options.ranks) or None)

    def _interrupt(self, options: argparse.Namespace) -> None:
        mesh = self._current_mesh()
        ranks = parse_selection(" ".join(options.ranks), mesh.grid)
        mesh.interrupt(ranks)
        print(f"Told {name_ranks(ranks)} to stop.")

    def _kill(self, options: argparse.Namespace) -> None:
        if not options.ranks:
            raise UsageError(f"which ranks? Write it like: %mesh kill 2, or %mesh kill all. {self._ranks_hint()}")
        mesh = self._current_mesh()
        ranks = parse_selection(" ".join(options.ranks), mesh.grid)
        mesh.kill(ranks)
        print(f"Killed {name_ranks(ranks)}.")

    def _push(self, options: argparse.Namespace) -> None:
        mesh = self._current_mesh()
        values = {name: self._local_variable(name, mesh) for word in options.names for name in word.split(",") if name}
        mesh.push(**values)
        where = name_ranks(mesh.session.living(mesh.ranks))
        print(f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} on {where}.")

    def _pull(self, options: argparse.Namespace) -> Any:
        mesh = self._current_mesh()
        name, *attributes = options.what.split(".")
        try:
            handle = mesh[name]
        except MeshNameError:
            if name in self._namespace() and not isinstance(self._namespace()[name], RemoteValue):
                raise MeshNameError(f"`{name}` lives on the controller, not on the ranks; %mesh push {name}") from None
            names = mesh.status().names
            have = (
                f"cells have bound {', '.join(names[-_MAX_NAMES_LISTED:])}" if names else "no cell has bound a name yet"
            )
            hint = _suggest(name, names) or have
            raise MeshNameError(f"`{name}` is not on the ranks; {hint}") from None
        for attribute in attributes:
            handle = getattr(handle, attribute)
        values = mesh.pull(handle, ranks=options.rank)
        return values if options.rank is None else values[options.rank]

    def _doctor(self, options: argparse.Namespace) -> None:
        # In a separate process: it imports torch, and checks the machine as a new kernel would see it.
        command = [sys.executable, "-m", "meshbook", "doctor"]
        package = Path(__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
        )
        print(done.stdout.rstrip("\n"))
        if done.stderr:
            print(done.stderr.rstrip("\n"), file=sys.stderr)

    # ---- shared helpers

    def _current_mesh(self) -> Mesh:
        """Return the current mesh. Raises NotAttached if there is none."""
        if self.notebook.mesh is None:
            raise NotAttached(f"this notebook has no mesh yet. {self._start_hint()}")
        return self.notebook.mesh

    def _mesh_named(self, name: str) -> Mesh:
        """Return a mesh of this notebook by name. Raises MeshNameError."""
        if name in self.notebook.meshes:
            return self.notebook.meshes[name]
        own_names = ", ".join(self.notebook.meshes) or "none"
        running = [connection.name for connection in keys.list_connections()]
        if name in running:
            raise MeshNameError(f"mesh {name!r} runs, but not in this notebook; %mesh attach {name} brings it here")
        raise MeshNameError(f"no mesh is named {name!r}; this notebook's: {own_names}")

    def _local_variable(self, name: str, mesh: Mesh) -> Any:
        """Return the user's variable of that name in this process. Raises MeshNameError."""
        names = self._namespace()
        if name in names and not isinstance(names[name], RemoteValue):
            return names[name]
        try:
            mesh[name]
        except MeshNameError:
            own = [other for other in names if other not in self._shell.user_ns_hidden]
            hint = _suggest(name, own) or f"bind it {'in a %%controller cell' if self.notebook.auto else 'here'} first"
            raise MeshNameError(f"`{name}` is neither here nor on the ranks; {hint}") from None
        raise MeshNameError(f"`{name}` lives on the ranks already; bring it here with: values = %mesh pull {name}")

    def _namespace(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._shell.user_ns)

    def _start_hint(self) -> str:
        running = [found.name for found in keys.list_connections() if found.name not in self.notebook.meshes]
        ways = ["Start one with %mesh start -n 4", *(f"%mesh attach {name}" for name in running[-3:])]
        return ways[0] + (f", or use one that runs: {', '.join(ways[1:])}" if running else ".")

    def _ranks_hint(self) -> str:
        mesh = self.notebook.mesh
        return f"This mesh has ranks {format_ranks(mesh.ranks)}." if mesh is not None else ""


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
        raise _hide_traceback(
            UsageError(f"%%controller stands alone on its line, and {line.strip()!r} stands behind it")
        )
    result = shell.run_cell(cell)  # type: ignore[no-untyped-call]
    result.raise_error()
    return result.result


def register(shell: InteractiveShell) -> None:
    """Register the magics with a shell; a second call does nothing."""
    if "mesh" in shell.magics_manager.magics["cell"]:
        return
    shell.register_magics(MeshMagics, ControllerMagics)
    RedefinitionHook.of(shell).install()
    shell.set_hook("complete_command", complete, str_key="%mesh")  # type: ignore[no-untyped-call]


def complete(shell: InteractiveShell, event: Any) -> list[str]:
    """Return completions for a `%mesh` line: its subcommands, then names of meshes or variables."""
    words = event.line.split()
    notebook = Notebook.of(shell)
    if len(words) < 2 or (len(words) == 2 and not event.line.endswith(" ")):
        return list(COMMANDS)
    match words[1]:
        case "attach" | "status":
            return [connection.name for connection in keys.list_connections()]
        case "stacks":
            return ["--twice", "--threads"]
        case "stop" | "detach" | "use":
            return list(notebook.meshes)
        case "push":
            return [name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden]
        case "pull":
            with contextlib.suppress(MeshbookError):
                return list(notebook.mesh.session.status(QUERY_TIMEOUT_S).names) if notebook.mesh is not None else []
        case "auto":
            return ["on", "off"]
    return []


def unregister(shell: InteractiveShell) -> None:
    """Remove the magics. Meshes live until the process ends."""
    manager = shell.magics_manager
    Notebook.of(shell).auto = False
    RedefinitionHook.of(shell).remove()
    for kind, names in (("line", ("mesh",)), ("cell", ("mesh", "controller", "local"))):
        for name in names:
            manager.magics[kind].pop(name, None)
    for magics in (MeshMagics, ControllerMagics):
        manager.registry.pop(magics.__name__, None)


def _split_line(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} cannot be read: {str(error).lower()}") from None


def _suggest(word: str, known: Iterable[str], before: str = "") -> str:
    """Return `did you mean status?`, or an empty string if no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {before}{close[0]}?" if close else ""


def _describe(mesh: Mesh) -> str:
    spec = mesh.session.info.spec
    size = describe_size(spec) if spec is not None else "no ranks yet"
    return f"{mesh.name} with {size}"


def _hide_traceback(error: MeshbookError) -> MeshbookError:
    """Return the error, displayed as one sentence: the stack below a magic is only Meshbook's own code."""
    if not hasattr(error, "_render_traceback_"):
        shown = f"\x1b[31m{type(error).__name__}\x1b[39m: {error}"
        error._render_traceback_ = lambda: [shown]  # type: ignore[attr-defined]  # IPython asks the exception for it
    return error
