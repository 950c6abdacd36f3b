"""The command `meshbook`: parses its arguments, makes one call, and prints an error as one sentence.

Exit status: 0; 1 on a failure; 2 on a usage error; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from meshbook.cli import records, steering
from meshbook.cli.meshes import find_mesh, observed_mesh, print_result, use_color
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.listing import fetch_mesh_info, list_meshes
from meshbook.controller.session import Session
from meshbook.controller.tables import status_table
from meshbook.diagnose import findings as diagnose
from meshbook.errors import MeshbookError, NotAttached, StartError, UsageError, VersionMismatch
from meshbook.mesh_axes import MeshAxes
from meshbook.selections import parse_axes
from meshbook.version import __version__
from meshbook.wire import keys
from meshbook.wire.process_control import is_stopped, kill_supervisor

# Seconds that a supervisor may take to reply, and a mesh to stop after a request or a signal. It gives its ranks 1 s.
_REPLY_TIMEOUT_S = 3.0
_STOP_GRACE_S = 15.0
_SIGNAL_GRACE_S = 5.0

_EPILOG = """\
Where meshes are found: MESHBOOK_RUNTIME_DIR. What they are by default: MESHBOOK_RANKS, MESHBOOK_ENGINE, meshbook.toml,
or [tool.meshbook] in pyproject.toml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if words[:1] == ["run"] and "--" in words else len(words)
    parser = _parser()
    options, unknown = parser.parse_known_args(words[:end])
    if unknown:
        of_script = f"; a script's own arguments follow --: meshbook run FILE.py -- {' '.join(unknown)}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{of_script if words[0] == 'run' else ''}")
    options.arguments = words[end + 1 :]
    try:
        status: int = options.act(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _print_error(error, 2)
    except MeshbookError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `meshbook list | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_error(error: Exception, status: int) -> int:
    print(f"meshbook: {error}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """A parser that says which command was meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown is not None:
            commands = re.findall(r"[\w-]+", unknown[2])
            close = difflib.get_close_matches(unknown[1], commands, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(commands)}"
            message = f"there is no command {unknown[1]!r}; {hint}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="meshbook",
        description="A mesh of processes, one per GPU or CPU slot, and what to do with it from a terminal.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meshbook {__version__}")
    # Without a command: the REPL, with none of its options.
    parser.set_defaults(act=_repl, count=None, axes=None, name=None, simple=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, act: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        described = help.replace("%%", "%")  # argparse formats only the former
        command = commands.add_parser(name, help=help, description=f"{described[0].upper()}{described[1:]}.")
        command.set_defaults(act=act)
        return command

    repl = add("repl", _repl, "talk to a mesh (this is also what `meshbook` alone does)")
    repl.add_argument("-n", dest="count", type=_count, metavar="N", help="start N ranks at once, not at the first cell")
    repl.add_argument("--axes", type=_axes, help="start ranks with these axes, such as dp=2,tp=2")
    repl.add_argument("--name", help="the name of the mesh that is started")

    listing = add("list", _list, "every mesh of yours on this machine")
    status = add("status", _status, "what each rank of a mesh does")
    why = add("why", _why, "why a mesh hangs: who waits for whom, at which line, and what to do")

    stacks = add("stacks", _stacks, "where the ranks of a mesh are in their code, as one tree")
    stacks.add_argument("--ranks", help="some of them: 0,2-3, or dp=0")
    stacks.add_argument("--twice", action="store_true", help="look again half a second later, and tell who moves")
    stacks.add_argument("--threads", action="store_true", help="all threads, not only the main ones")

    printing = records.add_commands(add)
    printing += steering.add_commands(add, _port)

    top = add("top", _top, "a live picture of a mesh, in the terminal or as a web page")
    way = top.add_mutually_exclusive_group()
    way.add_argument("--web", action="store_true", help="as a page, for this machine's browsers alone")
    way.add_argument("--prometheus", type=_port, metavar="PORT", help="serve its numbers for Prometheus instead")
    top.add_argument("--port", type=_port, help="of the page; any that is free, unless said")

    attach = add("attach", _attach, "talk to a mesh that runs already")

    run = add("run", _run, "run a notebook, or a script with `# %%%%` cells, on a mesh")
    run.add_argument("file", type=Path, metavar="FILE.ipynb|FILE.py")
    run.add_argument("-n", dest="count", type=_count, metavar="N", help="how many ranks, unless the file says so")
    run.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the executed notebook and its HTML go: ./build for a notebook, nowhere for a script, unless said",
    )
    run.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="how long a cell may take")
    run.add_argument("--quiet", action="store_true", help="show neither cells nor output")
    run.epilog = "A script's own arguments follow --: meshbook run train.py -n 4 -- --lr 0.1"

    replay = add("replay", _replay, "run a recorded cell of one rank again, in one process: the same failure at hand")
    replay.add_argument("path", type=Path, metavar="BUNDLE", help="failures/f3, or a file in it")
    replay.add_argument("--rank", type=int, help="whose; the first that failed, unless said")
    replay.add_argument("--until", metavar="LINE", help='stop there in the debugger: "line 40"')
    replay.add_argument("--edit", action="store_true", help="change the cell first, in $EDITOR")
    replay.add_argument("--pdb", action="store_true", dest="debug", help="look at the exception in the debugger")
    replay.add_argument("--trust", action="store_true", help="do not ask before a bundle runs that was not made here")

    agent = add("mcp", _mcp, "let an agent look at meshes, and more if you allow it: an MCP server on stdin and stdout")
    agent.add_argument("--allow", choices=("look", "run", "manage"), default="look", help="look, unless said")
    agent.add_argument(
        "--rank-minutes", type=_minutes, metavar="N", help="ranks times minutes that its cells may take in all"
    )
    agent.add_argument("--skill", action="store_true", help="print the SKILL.md for the agent, and end")

    web = add("serve", _serve, "meshes over HTTP: JSON, server-sent events and a page, with a token for each scope")
    web.add_argument("--port", type=_port, default=8765, help="8765, unless said; 0: any that is free")
    web.add_argument("--host", default="127.0.0.1", help="the address to listen on: this machine's own, unless said")
    web.add_argument("--certfile", type=Path, help="serve https with this certificate")
    web.add_argument("--keyfile", type=Path, help="... and its key")

    stop = add("stop", _stop, "end a mesh and all that is on it")
    stop.add_argument("--all", action="store_true", help="every mesh of yours on this machine")

    doctor = add("doctor", _doctor, "what this machine lacks, and how to get it")
    doctor.add_argument(
        "--on",
        help="look at these machines instead: ssh://gpu1,gpu2, slurm://PARTITION, ray://auto, monarch://process, or a "
        "cluster of meshbook.toml",
    )
    doctor.add_argument(
        "--gpu", action="store_true", help="run on this machine's GPUs what training runs, for a minute or two"
    )

    completion = add("completion", _completion, "a script for your shell that completes what you type")
    completion.add_argument("shell", choices=("bash", "zsh"))

    install = add("install", _install, "tell Jupyter of the kernel, with this Python's absolute path")
    where = install.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="in your own Jupyter folder")
    where.add_argument("--prefix", help="in another environment, such as the Jupyter server's")

    for command in (status, why, stacks, top, attach, agent, stop):
        command.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    for command in (listing, status, why, stacks, stop, doctor, install, *printing):
        command.add_argument("--json", action="store_true", help="for programs")
    for command in (repl, attach):
        command.add_argument("--simple", action="store_true", help="plain prompts, for pipes and dumb terminals")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; write it like -n 4")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 (any that is free) to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rank-minutes; 8 ranks for 10 minutes are 80")
    return minutes


def _axes(text: str) -> MeshAxes:
    try:
        return parse_axes(text)
    except MeshbookError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---------------------------------------------------------------------------------------------------------------------
# Commands. Slow imports are inside the command that needs them.


def _repl(options: argparse.Namespace) -> int:
    words = ["%mesh start"]
    if options.axes is not None:
        if options.count not in (None, options.axes.size):
            raise UsageError(f"axes {options.axes} make {options.axes.size} ranks, but -n asks for {options.count}")
        words.append(f"--axes {options.axes}")
    elif options.count is not None:
        words.append(f"-n {options.count}")
    if options.name is not None:
        words.append(f"--name {keys.check_name(options.name)}")
    from meshbook.cli import repl

    return repl.run(" ".join(words) if len(words) > 1 else "", simple=options.simple)


def _attach(options: argparse.Namespace) -> int:
    found = find_mesh(options.name)  # raises before a kernel is started
    from meshbook.cli import repl

    return repl.run(f"%mesh attach {found.name}", simple=options.simple)


def _list(options: argparse.Namespace) -> int:
    found = list_meshes()
    print_result(options, list(found), lambda: found.table() if found else "no mesh is running")
    return 0


def _status(options: argparse.Namespace) -> int:
    info = fetch_mesh_info(find_mesh(options.name))
    print_result(options, info, lambda: status_table(info))
    return 0


def _why(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        why = mesh.why()
    print_result(options, why.findings, lambda: diagnose.as_text(why.findings, color=use_color()))
    return 0


def _stacks(options: argparse.Namespace) -> int:
    with observed_mesh(options.name) as mesh:
        stacks = mesh.stacks(options.ranks, twice=options.twice, threads=options.threads)
    print_result(options, stacks.snapshots, lambda: stacks.as_text(color=use_color()))
    return 0


def _top(options: argparse.Namespace) -> int:
    if options.port is not None and not options.web:
        raise UsageError("--port is the page's; write it like: meshbook top --web --port 8000")
    found = find_mesh(options.name)
    if options.prometheus is not None:
        from meshbook.dashboard.exporter import Exporter

        with observed_mesh(found.name) as mesh, Exporter(mesh.session, options.prometheus) as exporter:
            print(f"{mesh.name}: {exporter.address}\nCtrl-C ends it.", flush=True)
            exporter.wait()
    elif options.web:
        from meshbook.dashboard import web_server

        web_server.serve(found.name, options.port)
    else:
        from meshbook.dashboard import terminal

        terminal.run(found.name)
    return 0


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Within the block, an import of this module fails, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _run(options: argparse.Namespace) -> int:
    # jsonschema, for nbformat, imports this where it is there: that compiles a grammar for 2 s, to check URLs by it
    with _hidden("rfc3987_syntax"):
        from meshbook.cli import run

    return run.run_file(
        options.file,
        arguments=options.arguments,
        out=options.out,
        ranks=options.count,
        timeout_s=options.timeout,
        quiet=options.quiet,
    )


def _replay(options: argparse.Namespace) -> int:
    from meshbook.replay import command

    return command.run(
        command.ReplayOptions(
            options.path,
            rank=options.rank,
            until=options.until,
            edit=options.edit,
            debug=options.debug,
            trust=options.trust,
        )
    )


def _mcp(options: argparse.Namespace) -> int:
    with _needs_extra("mcp"):
        from meshbook.gateway import mcp_server
    if options.skill:
        print(mcp_server.skill(), end="")
    else:
        mcp_server.serve(options.name, allow=options.allow, rank_minutes=options.rank_minutes)
    return 0


def _serve(options: argparse.Namespace) -> int:
    with _needs_extra("serve"):
        from meshbook.gateway import http_server
    http_server.serve(options.host, options.port, certfile=options.certfile, keyfile=options.keyfile)
    return 0


@contextlib.contextmanager
def _needs_extra(extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UsageError(f"this needs {error.name}: pip install 'meshbook[{extra}]'") from None


def _stop(options: argparse.Namespace) -> int:
    if options.all and options.name:
        raise UsageError(f"{options.name} or --all, not both")
    connections = keys.list_connections() if options.all else [find_mesh(options.name)]
    if not connections and not options.json:
        print("no mesh is running")
    ended = []
    for connection in connections:
        ended.append({"name": connection.name, "outcome": end_mesh(connection)})
        if not options.json:
            print(f"{connection.name} {ended[-1]['outcome']}", flush=True)
    if options.json:
        print_result(options, ended, str)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from meshbook.cli import doctor

    if options.on is not None:
        from meshbook.cli.doctor_machines import check_machines

        results = check_machines(options.on)
    elif options.gpu:
        from meshbook.cli.doctor_gpu import check_gpus

        results = list(check_gpus())
    else:
        results = doctor.run_checks()
    print_result(options, results, lambda: doctor.format_report(results))
    return int(any(result.state == "missing" for result in results))


def _completion(options: argparse.Namespace) -> int:
    from meshbook.cli.completion import script

    print(script(_parser(), options.shell))
    return 0


def _install(options: argparse.Namespace) -> int:
    from meshbook.cli import kernels

    folder = kernels.install(user=options.user, prefix=options.prefix)
    print_result(options, {"folder": folder}, lambda: f"the kernel Meshbook is in {folder}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------


def end_mesh(connection: keys.ConnectionInfo) -> str:
    """Stop a mesh: by a request, then SIGTERM, then SIGKILL, which ends its ranks too. Blocks until it has exited.

    Returns:
        The outcome, as the end of a sentence.

    Raises:
        StartError: it still runs.
    """
    connected = threading.Event()

    def ask() -> None:
        # Raised for a supervisor of another version, or one that exits before it replies.
        with contextlib.suppress(NotAttached, VersionMismatch):
            session = Session(SupervisorConnection(connection, kind="cli", observer=True), stop_at_exit=False)
            connected.set()
            session.stop()

    if is_stopped(connection.pid):  # stopped by SIGSTOP: it could not shut down cleanly
        with contextlib.suppress(ProcessLookupError):
            os.kill(connection.pid, signal.SIGCONT)
    # A daemon thread: waiting for a stuck supervisor must not keep this process from killing it.
    threading.Thread(target=ask, name=f"end-{connection.name}", daemon=True).start()
    if connected.wait(_REPLY_TIMEOUT_S) and _has_exited(connection, _STOP_GRACE_S):
        return "has ended"
    for end, words in ((_terminate, "was ended by a signal (SIGTERM), and has"), (kill_supervisor, "was killed")):
        if _has_exited(connection, 0.0):
            return "has ended"
        with contextlib.suppress(ProcessLookupError):
            end(connection.pid)
        if _has_exited(connection, _SIGNAL_GRACE_S):
            return f"did not answer and {words}"
    raise StartError(f"{connection.name} (pid {connection.pid}) cannot be ended; the system keeps its process")


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _has_exited(connection: keys.ConnectionInfo, within_s: float) -> bool:
    """Whether the supervisor exits within `within_s` seconds; if so, its stale files are removed."""
    deadline = time.monotonic() + within_s
    while connection.is_alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)  # not a child of this process: only polling is possible
    keys.list_connections()
    return True


if __name__ == "__main__":
    sys.exit(main())
