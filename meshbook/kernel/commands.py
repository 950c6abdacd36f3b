"""The commands of `%mesh`: how each is written, what it says of itself, and the call that it makes.

`COMMANDS`, at the end, is the table. A command works, and is tested, without IPython's magics.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from typing import Any, cast

from meshbook.controller.listing import fetch_mesh_info, list_meshes
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.reports import Stacks, fetch_mesh_snapshot, memory_table
from meshbook.controller.running import require_living
from meshbook.controller.tables import Table, describe_size, format_age, format_seconds, status_table
from meshbook.errors import MeshbookError, MeshNameError, UsageError
from meshbook.ids import format_ranks, name_ranks
from meshbook.kernel import checkpoint_commands as checkpoints
from meshbook.kernel import debugger_commands, recording_commands, report_commands
from meshbook.kernel import difference_commands as differences
from meshbook.kernel.chosen_mesh import living_mesh, mesh_named, running_meshes, selected_ranks, start_hint
from meshbook.kernel.hints import suggest
from meshbook.kernel.history import set_fold, show_history
from meshbook.kernel.log_commands import logs_command
from meshbook.kernel.magic_command import MagicCommand
from meshbook.kernel.magic_command import argument as _argument
from meshbook.kernel.meshes import format_names
from meshbook.kernel.notebook import Notebook
from meshbook.kernel.queries import QUERY_TIMEOUT_S
from meshbook.kernel.resizing import resize_command, spare_command
from meshbook.kernel.start_options import MESH_ARGUMENTS, TTL_ARGUMENT, mesh_options
from meshbook.wire import keys

_MAX_NAMES_LISTED = 20


# ---- starting, choosing and leaving meshes


def _start(notebook: Notebook, options: argparse.Namespace) -> None:
    asked_for = mesh_options(options)
    known = [mesh.session for mesh in notebook.meshes.values()]
    before = time.monotonic()
    mesh = notebook.meshes.start(asked_for, options.name)
    if mesh.session in known:
        names_held = format_names(mesh.session.status().names)
        print(
            f"Mesh {_describe(mesh)} is running already; its ranks keep what they hold{names_held}. %mesh restart "
            "gives fresh ones."
        )
    else:
        print(f"Mesh {_describe(mesh)} is ready, after {format_seconds(time.monotonic() - before)}.")


def _restart(notebook: Notebook, options: argparse.Namespace) -> None:
    before = time.monotonic()
    mesh = notebook.meshes.restart(mesh_options(options), options.name)
    took = format_seconds(time.monotonic() - before)
    print(f"Mesh {_describe(mesh)} has fresh ranks, after {took}; names of before are gone.")


def _stop(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook, options.name)
    notebook.stop(mesh.name, now=options.now)
    print(f"Mesh {mesh.name} has ended.")


def _list(notebook: Notebook, options: argparse.Namespace) -> Table:
    current = notebook.mesh.name if notebook.mesh is not None else None
    return list_meshes().table(mine=tuple(notebook.meshes), current=current)


def _attach(notebook: Notebook, options: argparse.Namespace) -> None:
    print(f"Attached to mesh {_describe(notebook.meshes.attach(options.name))}.")
    notebook.front_end.show_notices()


def _detach(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook, options.name)
    notebook.meshes.detach(mesh.name, orphan_ttl_s=options.ttl)
    until = "until it is stopped"
    if options.ttl is not None:
        until = f"for {format_age(options.ttl)} unless somebody attaches"
    print(f"Left mesh {mesh.name}; it runs on {until}. Back to it: %mesh attach {mesh.name}")


def _use(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook, options.name)
    notebook.meshes.use(mesh.name)
    print(f"Cells run on mesh {_describe(mesh)}.")


def _auto(notebook: Notebook, options: argparse.Namespace) -> None:
    notebook.auto = options.state == "on"
    if notebook.auto:
        print("Cells run on the ranks; one that begins with %%controller runs here.")
    else:
        print("Cells run here; one that begins with %%mesh runs on the ranks.")


# ---- what a mesh does


def _status(notebook: Notebook, options: argparse.Namespace) -> Table:
    if options.name and options.name not in notebook.meshes:
        return status_table(fetch_mesh_info(keys.find_connection(options.name)))
    mesh = notebook.meshes[options.name] if options.name else notebook.mesh
    if mesh is None:
        return Table("This notebook has no mesh yet.", notes=(start_hint(notebook),))
    if mesh.session.ended is not None:
        return Table(f"Mesh {mesh.name} has ended: {mesh.session.ended}.", notes=(start_hint(notebook),))
    return status_table(mesh.status())


def _stacks(notebook: Notebook, options: argparse.Namespace) -> Stacks:
    mesh = mesh_named(notebook)
    return mesh.stacks(selected_ranks(mesh, options), twice=options.twice, threads=options.threads)


def _memory(notebook: Notebook, options: argparse.Namespace) -> Table:
    mesh = mesh_named(notebook)
    return memory_table(fetch_mesh_snapshot(mesh.session), mesh.ranks)


def _actors(notebook: Notebook, options: argparse.Namespace) -> Table:
    from meshbook.actors.listing import all_actors

    return all_actors(living_mesh(notebook))


def _show(notebook: Notebook, options: argparse.Namespace) -> None:
    ranks = selected_ranks(notebook.meshes.get_mesh(None), options)
    try:
        notebook.front_end.show_omitted(ranks)
    except UsageError as nothing:  # no error of a cell, at which Run All would stop
        print(f"Nothing to show: {nothing}.")


def _interrupt(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook)
    ranks = require_living(mesh.session, selected_ranks(mesh, options), None)
    mesh.interrupt(ranks)
    print(f"Stop was sent to {name_ranks(ranks)}.")


def _kill(notebook: Notebook, options: argparse.Namespace) -> None:
    if not options.ranks:
        has = f" This mesh has ranks {format_ranks(notebook.mesh.ranks)}." if notebook.mesh is not None else ""
        raise UsageError(f"which ranks? Write it like: %mesh kill 2, or %mesh kill all.{has}")
    mesh = mesh_named(notebook)
    ranks = selected_ranks(mesh, options)
    mesh.kill(ranks)
    print(f"Killed {name_ranks(ranks)}.")


# ---- values


def _push(notebook: Notebook, options: argparse.Namespace) -> None:
    mesh = mesh_named(notebook)
    values = {name: _local_variable(notebook, name, mesh) for word in options.names for name in word.split(",") if name}
    mesh.push(**values)
    where = name_ranks(mesh.session.living(mesh.ranks))
    print(f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} on {where}.")


def _pull(notebook: Notebook, options: argparse.Namespace) -> Any:
    mesh = mesh_named(notebook)
    name = options.what.partition(".")[0]
    try:
        values = mesh.pull(options.what, ranks=options.rank)
    except MeshNameError:
        if _is_local(notebook, name):
            raise MeshNameError(f"`{name}` lives on the controller, not on the ranks; %mesh push {name}") from None
        names = mesh.status().names
        have = f"cells have bound {', '.join(names[-_MAX_NAMES_LISTED:])}" if names else "no cell has bound a name yet"
        raise MeshNameError(f"`{name}` is not on the ranks; {suggest(name, names) or have}") from None
    return values if options.rank is None else values[options.rank]


def _local_variable(notebook: Notebook, name: str, mesh: Mesh) -> Any:
    """Return the user's variable of that name in this process. Raises MeshNameError."""
    if _is_local(notebook, name):
        return _namespace(notebook)[name]
    try:
        mesh[name]
    except MeshNameError:
        own = [other for other in _namespace(notebook) if other not in notebook.shell.user_ns_hidden]
        hint = suggest(name, own) or f"bind it {'in a %%controller cell' if notebook.auto else 'here'} first"
        raise MeshNameError(f"`{name}` is neither here nor on the ranks; {hint}") from None
    raise MeshNameError(
        f"`{name}` lives on the ranks already; a %%controller cell brings it here: values = %mesh pull {name}"
    )


def _is_local(notebook: Notebook, name: str) -> bool:
    names = _namespace(notebook)
    return name in names and not isinstance(names[name], RemoteValue)


def _namespace(notebook: Notebook) -> dict[str, Any]:
    return cast("dict[str, Any]", notebook.shell.user_ns)


# ---------------------------------------------------------------------------------------------------------------------


def _describe(mesh: Mesh) -> str:
    spec = mesh.session.info.spec
    return f"{mesh.name} with {describe_size(spec) if spec is not None else 'no ranks yet'}"


def _user_names(notebook: Notebook) -> list[str]:
    hidden = notebook.shell.user_ns_hidden
    return [name for name in notebook.shell.user_ns if not name.startswith("_") and name not in hidden]


def _mesh_names(notebook: Notebook) -> Iterable[str]:
    with contextlib.suppress(MeshbookError):
        return notebook.mesh.session.status(QUERY_TIMEOUT_S).names if notebook.mesh is not None else ()
    return ()


_NAME = _argument("name", nargs="?")
_RANKS = _argument("ranks", nargs="*")
_PATH, _STEP, _NAMES = _argument("path"), _argument("--step", type=int), _argument("names", nargs="*")
COMMANDS = {
    "start": MagicCommand(
        "%mesh start -n 4 [--axes dp=2,tp=2] [--name NAME] [--on ssh://gpu1,gpu2 [--nodes N] [--per-node N]] "
        "[--sync [PATH,PATH] [--env uv]] [--device cpu|cuda] [--fresh] [--hosts N] [--engine local] [--keep] "
        "[--ttl SECONDS] [--no-end-on-error]",
        "Start ranks, if none run yet; without -n or --axes one per GPU, else 2 to 4.",
        _start,
        MESH_ARGUMENTS,
        "A mesh that runs already and is what the options ask for is left as it is, so the cell may be run again; "
        "another one is an error, which %mesh restart resolves. "
        "--on: on machines that ssh reaches, or on a cluster of meshbook.toml. --nodes: on so many of them, else on "
        "all. --per-node: ranks on each, else one per GPU. "
        "--sync: bring the project folder to them; of what git ignores, what is named. --env uv: run uv sync --frozen "
        "there before ranks start. "
        "--fresh: in new interpreters, not forked from a warm one. --hosts: simulate so many machines on this one. "
        "--keep: they outlive the notebook. --ttl: seconds that they live with nobody attached. --no-end-on-error: "
        "ranks that wait in a collective for one that has failed wait until Stop.",
    ),
    "restart": MagicCommand(
        "%mesh restart [-n 4] [--axes dp=2,tp=2] [--name NAME] [--on ssh://gpu1,gpu2 [--nodes N] [--per-node N]] "
        "[--sync [PATH,PATH] [--env uv]] [--device cpu|cuda] [--fresh] [--hosts N] [--engine local] [--keep] "
        "[--ttl SECONDS] [--no-end-on-error]",
        "Fresh ranks in place of those that run; what they hold is lost.",
        _restart,
        MESH_ARGUMENTS,
        "Without options as many as before, with the same axes. --name: which mesh of this notebook; it keeps its "
        "name. The rest as in %mesh start.",
    ),
    "status": MagicCommand(
        "%mesh status [NAME]",
        "What each rank does. `%mesh` alone says the same.",
        _status,
        (_NAME,),
        complete=running_meshes,
    ),
    "hosts": MagicCommand(
        "%mesh hosts [NAME]",
        "The machines of the mesh: state, GPUs or cores, versions, latency.",
        lambda notebook, options: mesh_named(notebook, options.name).hosts(),
        (_NAME,),
        complete=lambda notebook: notebook.meshes,
    ),
    "sync": MagicCommand(
        "%mesh sync",
        "Bring what has changed in the project folder to the machines, as happens before each cell.",
        lambda notebook, options: mesh_named(notebook).sync(),
    ),
    "why": MagicCommand(
        "%mesh why",
        "Why it hangs: who waits for whom, at which line, and what to do.",
        lambda notebook, options: mesh_named(notebook).why(),
    ),
    **debugger_commands.COMMANDS,
    "stacks": MagicCommand(
        "%mesh stacks [RANKS] [--twice] [--threads]",
        "Where the ranks are in their code, as one tree.",
        _stacks,
        (_RANKS, _argument("--twice", action="store_true"), _argument("--threads", action="store_true")),
        "--twice: look again half a second later, and tell who moves. --threads: all threads, not only the main ones.",
    ),
    "health": MagicCommand(
        "%mesh health",
        "What each rank does and waits for; CPU, memory, GPU.",
        lambda notebook, options: mesh_named(notebook).health(),
    ),
    "memory": MagicCommand("%mesh memory", "Memory of each rank and its GPU. As numbers: mesh.memory().", _memory),
    "dashboard": MagicCommand(
        "%mesh dashboard",
        "A live picture of it, here in the notebook.",
        lambda notebook, options: mesh_named(notebook).dashboard(),
    ),
    "same": MagicCommand(
        "%mesh same NAME [NAME ...] [--over AXIS] [--forward CALL]",
        "Which replicas of a model, an optimizer or a tensor should be equal and are not.",
        lambda notebook, options: differences.same(mesh_named(notebook), options),
        (_argument("names", nargs="*"), _argument("--over"), _argument("--forward")),
        "NAME: or a path from one: model.layers.3. --over: compare only ranks along this axis with each other. "
        '--forward "model(x)", in place of names: run it, and say where ranks begin to differ.',
        complete=_mesh_names,
    ),
    "nan": MagicCommand(
        "%mesh nan [on|off]",
        "Tell the first number that is not finite: step, rank, module, operation; without a word, what was found.",
        lambda notebook, options: differences.nan(mesh_named(notebook), options),
        (_argument("state", nargs="?", choices=("on", "off")),),
    ),
    "diff": MagicCommand(
        differences.DIFF_USAGE,
        "What two ranks hold differently, name by name.",
        lambda notebook, options: differences.diff(mesh_named(notebook), options),
        (_argument("words", nargs="*"),),
    ),
    "stop": MagicCommand(
        "%mesh stop [NAME] [--now]",
        "End the mesh and all that is on it.",
        _stop,
        (_NAME, _argument("--now", action="store_true")),
        "--now: without waiting for cells that run in the background.",
        complete=lambda notebook: notebook.meshes,
    ),
    "list": MagicCommand("%mesh list", "Every mesh of yours on this machine.", _list),
    "attach": MagicCommand(
        "%mesh attach [NAME]", "Use a mesh that runs already.", _attach, (_NAME,), complete=running_meshes
    ),
    "detach": MagicCommand(
        "%mesh detach [NAME] [--ttl SECONDS]",
        "Leave it running without this notebook.",
        _detach,
        (_NAME, TTL_ARGUMENT),
        "--ttl: seconds that it may live with nobody attached; without it, until it is stopped.",
        complete=lambda notebook: notebook.meshes,
    ),
    "use": MagicCommand(
        "%mesh use NAME",
        "Which of this notebook's meshes cells run on.",
        _use,
        (_argument("name"),),
        complete=lambda notebook: notebook.meshes,
    ),
    "auto": MagicCommand(
        "%mesh auto on|off",
        "Whether a cell without a magic runs on the ranks or here.",
        _auto,
        (_argument("state", choices=("on", "off")),),
    ),
    "actors": MagicCommand("%mesh actors", "Every actor: what waits, what runs, its last error.", _actors),
    "history": MagicCommand(
        "%mesh history [N] [--all] [-m NAME]",
        "The cells that ran on the mesh; with a number, what that cell showed.",
        lambda notebook, options: show_history(notebook, mesh_named(notebook, options.mesh), options),
        (
            _argument("number", nargs="?", type=int),
            _argument("--all", action="store_true"),
            _argument("-m", dest="mesh"),
        ),
        "N: what cell N printed and how it ended, also while no notebook was there. --all: of every cell N, for a "
        "kernel that was restarted counts from 1 again.",
    ),
    "logs": logs_command(lambda notebook: mesh_named(notebook)),
    "fold": MagicCommand(
        "%mesh fold [numbers|equal|off]",
        "Which lines of several ranks are shown as one.",
        lambda notebook, options: set_fold(mesh_named(notebook), options),
        (_argument("lines", nargs="?", choices=("numbers", "equal", "off")),),
    ),
    "show": MagicCommand(
        "%mesh show [RANKS]",
        "Displays that the last cell left out, because those of many ranks differed.",
        _show,
        (_RANKS,),
    ),
    "interrupt": MagicCommand("%mesh interrupt [RANKS]", "Stop what they run, as Stop does.", _interrupt, (_RANKS,)),
    "kill": MagicCommand("%mesh kill RANKS", "Kill ranks, like a crash.", _kill, (_RANKS,)),
    "heal": MagicCommand(
        "%mesh heal [RANKS] [--copy [NAME ...]] [--no-replay] [--no-share] [--restore [PATH]]",
        "Fresh processes in place of dead ranks; the others keep what they hold.",
        lambda notebook, options: checkpoints.heal(mesh_named(notebook), options),
        (
            _RANKS,
            _argument("--copy", nargs="*", metavar="NAME"),
            _argument("--no-replay", action="store_true"),
            _argument("--no-share", action="store_true"),
            _argument("--restore", nargs="?", const=True, default=False),
        ),
        "They run the setup cells, and the imports and definitions of other cells, and get what is proven "
        "to be what they held. RANKS: these are replaced too, although they live. --copy: also these names (a,b), or "
        "all, that the others hold alike; also later. --no-replay: run no cells. --no-share: copy "
        "nothing. --restore: where something is missing, all ranks go back to the last checkpoint that has it, or to "
        "that in PATH.",
    ),
    "spare": spare_command(lambda notebook: mesh_named(notebook)),
    **recording_commands.COMMANDS,
    "resize": resize_command(lambda notebook: mesh_named(notebook)),
    "push": MagicCommand(
        "%mesh push NAME [NAME ...]",
        "Copy variables from here to every rank.",
        _push,
        (_argument("names", nargs="+"),),
        complete=_user_names,
    ),
    "pull": MagicCommand(
        "%mesh pull NAME [--rank R]",
        "Bring what the ranks hold here: `values = %mesh pull loss` in a %%controller cell.",
        _pull,
        (_argument("what"), _argument("--rank", type=int)),
        "--rank: this rank's alone, as it is.",
        complete=_mesh_names,
    ),
    "checkpoint": MagicCommand(
        "%mesh checkpoint PATH NAME [NAME ...] [--step N] [--wait] [--overwrite] [--on-preemption [--grace SECONDS] "
        "[--resize]]",
        "Save names of the ranks in a folder below PATH.",
        lambda notebook, options: checkpoints.checkpoint(mesh_named(notebook), options),
        (
            _PATH,
            _NAMES,
            _STEP,
            _argument("--wait", action="store_true"),
            _argument("--overwrite", action="store_true"),
            _argument("--on-preemption", action="store_true"),
            _argument("--grace", type=float),
            _argument("--resize", action="store_true"),
        ),
        "Modules, optimizers, tensors, values; the name rng: random numbers. --wait: until it is committed. "
        "--overwrite: replace the checkpoint of this step. --on-preemption: when ranks are ended (SIGTERM), in --grace "
        "seconds (25); with --resize the mesh goes on without the highest ranks instead, if it can.",
        complete=lambda notebook: checkpoints.folders(),
    ),
    "checkpoints": MagicCommand(
        "%mesh checkpoints PATH",
        "The checkpoints that are below PATH.",
        lambda notebook, options: checkpoints.list_checkpoints(mesh_named(notebook), options),
        (_PATH,),
        complete=lambda notebook: checkpoints.folders(),
    ),
    "restore": MagicCommand(
        "%mesh restore PATH [NAME ...] [--step N]",
        "Load the last checkpoint below PATH, or that of a step, into its names.",
        lambda notebook, options: checkpoints.restore(mesh_named(notebook), options),
        (_PATH, _NAMES, _STEP),
        complete=lambda notebook: checkpoints.folders(),
    ),
    **report_commands.COMMANDS,
}
