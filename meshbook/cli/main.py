"""The command `meshbook`: parses its arguments, makes one call, and prints an error as one sentence.

Exit status: 0; 1 on a failure; 2 on a usage error; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from meshbook.axes_text import parse_axes
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.listing import fetch_mesh_info, list_meshes
from meshbook.controller.mesh import Mesh, attach
from meshbook.controller.session import Session
from meshbook.controller.tables import status_table
from meshbook.diagnose import findings as diagnose
from meshbook.errors import MeshbookError, NotAttached, StartError, UsageError, VersionMismatch
from meshbook.mesh_axes import MeshAxes
from meshbook.version import __version__
from meshbook.wire import keys
from meshbook.wire.process_control import is_stopped

# Seconds that a supervisor may take to reply, and a mesh to stop after a request or a signal. It gives its ranks 1 s.
_REPLY_TIMEOUT_S = 3.0
_STOP_GRACE_S = 15.0
_SIGNAL_GRACE_S = 5.0

_EPILOG = """\
Where meshes are found: MESHBOOK_RUNTIME_DIR. What they are by default: MESHBOOK_RANKS, MESHBOOK_ENGINE, meshbook.toml,
or [tool.meshbook] in pyproject.toml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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

    repl = commands.add_parser("repl", help="talk to a mesh (this is also what `meshbook` alone does)")
    repl.add_argument("-n", dest="count", type=_count, metavar="N", help="start N ranks at once, not at the first cell")
    repl.add_argument("--axes", type=_axes, help="start ranks with these axes, such as dp=2,tp=2")
    repl.add_argument("--name", help="the name of the mesh that is started")
    repl.add_argument("--simple", action="store_true", help="plain prompts, for pipes and dumb terminals")
    repl.set_defaults(act=_repl)

    listing = commands.add_parser("list", help="every mesh of yours on this machine")
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(act=_list)

    status = commands.add_parser("status", help="what each rank of a mesh does")
    status.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(act=_status)

    why = commands.add_parser("why", help="why a mesh hangs: who waits for whom, at which line, and what to do")
    why.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    why.add_argument("--json", action="store_true", help="for programs")
    why.set_defaults(act=_why)

    stacks = commands.add_parser("stacks", help="where the ranks of a mesh are in their code, as one tree")
    stacks.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    stacks.add_argument("--ranks", help="some of them: 0,2-3, or dp=0")
    stacks.add_argument("--twice", action="store_true", help="look again half a second later, and tell who moves")
    stacks.add_argument("--threads", action="store_true", help="all threads, not only the main ones")
    stacks.add_argument("--json", action="store_true", help="for programs")
    stacks.set_defaults(act=_stacks)

    top = commands.add_parser("top", help="a live picture of a mesh, in the terminal or as a web page")
    top.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    way = top.add_mutually_exclusive_group()
    way.add_argument("--web", action="store_true", help="as a page, for this machine's browsers alone")
    way.add_argument("--prometheus", type=_port, metavar="PORT", help="serve its numbers for Prometheus instead")
    top.add_argument("--port", type=_port, help="of the page; any that is free, unless said")
    top.set_defaults(act=_top)

    attach = commands.add_parser("attach", help="talk to a mesh that runs already")
    attach.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    attach.add_argument("--simple", action="store_true", help="plain prompts, for pipes and dumb terminals")
    attach.set_defaults(act=_attach)

    run = commands.add_parser("run", help="run a notebook, or a script with `# %%%%` cells, on a mesh")
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
    run.set_defaults(act=_run)

    stop = commands.add_parser("stop", help="end a mesh and all that is on it")
    stop.add_argument("name", nargs="?", help="which mesh; not needed when only one runs")
    stop.add_argument("--all", action="store_true", help="every mesh of yours on this machine")
    stop.set_defaults(act=_stop)

    doctor = commands.add_parser("doctor", help="what this machine lacks, and how to get it")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(act=_doctor)

    install = commands.add_parser("install", help="tell Jupyter of the kernel, with this Python's absolute path")
    where = install.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="in your own Jupyter folder")
    where.add_argument("--prefix", help="in another environment, such as the Jupyter server's")
    install.set_defaults(act=_install)
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
    found = _find_mesh(options.name)  # raises before a kernel is started
    from meshbook.cli import repl

    return repl.run(f"%mesh attach {found.name}", simple=options.simple)


def _list(options: argparse.Namespace) -> int:
    found = list_meshes()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(list(found)), indent=2).decode())
    elif found:
        print(found.table())
    else:
        print("no mesh is running")
    return 0


def _status(options: argparse.Namespace) -> int:
    info = fetch_mesh_info(_find_mesh(options.name))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(info), indent=2).decode())
    else:
        print(status_table(info))
    return 0


def _why(options: argparse.Namespace) -> int:
    with _observed_mesh(options.name) as mesh:
        why = mesh.why()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(why.findings), indent=2).decode())
    else:
        print(diagnose.as_text(why.findings, color=_use_color()))
    return 0


def _stacks(options: argparse.Namespace) -> int:
    with _observed_mesh(options.name) as mesh:
        stacks = mesh.stacks(options.ranks, twice=options.twice, threads=options.threads)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(stacks.snapshots), indent=2).decode())
    else:
        print(stacks.as_text(color=_use_color()))
    return 0


def _top(options: argparse.Namespace) -> int:
    if options.port is not None and not options.web:
        raise UsageError("--port is the page's; write it like: meshbook top --web --port 8000")
    found = _find_mesh(options.name)
    if options.prometheus is not None:
        from meshbook.controller.exporter import Exporter

        with _observed_mesh(found.name) as mesh, Exporter(mesh.session, options.prometheus) as exporter:
            print(f"{mesh.name}: {exporter.address}\nCtrl-C ends it.", flush=True)
            exporter.wait()
    elif options.web:
        from meshbook.dashboard import web_server

        web_server.serve(found.name, options.port)
    else:
        from meshbook.dashboard import terminal

        terminal.run(found.name)
    return 0


def _run(options: argparse.Namespace) -> int:
    from meshbook.cli import run

    return run.run_file(
        options.file, out=options.out, ranks=options.count, timeout_s=options.timeout, quiet=options.quiet
    )


def _stop(options: argparse.Namespace) -> int:
    if options.all and options.name:
        raise UsageError(f"{options.name} or --all, not both")
    connections = keys.list_connections() if options.all else [_find_mesh(options.name)]
    if not connections:
        print("no mesh is running")
    for connection in connections:
        print(f"{connection.name} {end_mesh(connection)}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from meshbook.cli import doctor

    results = doctor.run_checks()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        print(doctor.format_report(results))
    return int(any(result.state == "missing" for result in results))


def _install(options: argparse.Namespace) -> int:
    from meshbook.cli import kernels

    print(f"the kernel Meshbook is in {kernels.install(user=options.user, prefix=options.prefix)}")
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
    for number, words in ((signal.SIGTERM, "was told to end by a signal, and has"), (signal.SIGKILL, "was killed")):
        if _has_exited(connection, 0.0):
            return "has ended"
        with contextlib.suppress(ProcessLookupError):
            os.kill(connection.pid, number)
        if _has_exited(connection, _SIGNAL_GRACE_S):
            return f"did not answer and {words}"
    raise StartError(f"{connection.name} (pid {connection.pid}) cannot be ended; the system keeps its process")


def _has_exited(connection: keys.ConnectionInfo, within_s: float) -> bool:
    """Whether the supervisor exits within `within_s` seconds; if so, its stale files are removed."""
    deadline = time.monotonic() + within_s
    while connection.is_alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)  # not a child of this process: only polling is possible
    keys.list_connections()
    return True


@contextlib.contextmanager
def _observed_mesh(name: str | None) -> Iterator[Mesh]:
    """Attach to a mesh as an observer."""
    mesh = attach(_find_mesh(name).name, kind="cli", observer=True)
    try:
        yield mesh
    finally:
        mesh.session.close()


def _use_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _find_mesh(name: str | None) -> keys.ConnectionInfo:
    """Find a running mesh, with an error message for the terminal if there is none.

    Raises NotAttached, MeshNameError.
    """
    if not keys.list_connections():
        raise NotAttached("no mesh is running; meshbook repl -n 4 starts one")
    return keys.find_connection(name)


if __name__ == "__main__":
    sys.exit(main())
