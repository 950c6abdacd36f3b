"""Starting a mesh: a supervisor without ranks, then the ranks and their process group."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshbook.controller import extensions, past_cells, script
from meshbook.controller.background_output import background_output_of
from meshbook.controller.clusters import choose_machines
from meshbook.controller.config import (
    MIN_LEASE_AFTER_LOSS_S,
    MIN_LOST_AFTER_S,
    Defaults,
    current_folder,
    read_defaults,
)
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.console import StatusLine
from meshbook.controller.hosts import busy_gpus, fetch_hosts
from meshbook.controller.launch import launch_supervisor
from meshbook.controller.mesh import Mesh
from meshbook.controller.project import project_of
from meshbook.controller.project_folder import find_project
from meshbook.controller.session import Session, kill_mesh
from meshbook.controller.tables import count_of
from meshbook.engines import ENGINES
from meshbook.errors import MeshTimeout, NotAttached, StartError, UsageError
from meshbook.host.gpus import count_free_gpus, count_gpus, find_others_gpus
from meshbook.ids import name_ranks
from meshbook.marimo import page
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import keys, messages

# Clients that show under their cells what happened meanwhile (`kernel.meshes`).
_NOTEBOOK_KINDS = ("kernel", "ipython")


def create_mesh(
    axes: int | Mapping[str, int] | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    shape: Sequence[int] | int | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    name: str | None = None,
    engine: str | None = None,
    on: str | None = None,
    num_hosts: int = 1,
    start_method: str | None = None,
    device: str | None = None,
    process_group: bool = True,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    end_on_error: bool | None = None,
    sync: bool | Sequence[str] = False,
    uv: bool = False,
    listen: str | None = None,
    orphan_ttl_s: float | None = None,
    kind: str = "script",
    owner: str | None = None,
) -> Mesh:
    """Start a mesh and wait until its process group is ready. It ends with this process, unless detached.

    In a marimo notebook, a cell that runs again reuses the mesh that it started before, if the arguments are
    equivalent.

    Args:
        axes: a number of ranks, or {axis: size}; see also `nodes` and `gpus_per_node`, or `shape` and `mesh_dim_names`.
            Without any of these: one rank per visible GPU, else 2 to 4 by cores (`MESHBOOK_RANKS`, meshbook.toml).
        name: the name in `attach` and `meshbook list`; default: derived from the script's name.
        engine: "local"; `on` names its own.
        on: machines that ssh reaches, `ssh://user@gpu1:2222,gpu2`, or the name of a cluster in meshbook.toml. `nodes`
            is then how many of them are used (default: all), and each has equally many ranks; without axes or
            `gpus_per_node`, one per GPU of the machine with the fewest, else 2 to 4 by cores. Or nodes of a Slurm
            cluster, `slurm://PARTITION?account=x&time=2:00:00`, whose queue's words are printed while one waits. Or
            nodes of a Ray cluster, `ray://auto`, `ray://head:6379`; `ray://local` starts a Ray. Or hosts of a Monarch
            job: `monarch://slurm?partition=gpu`, `monarch:my_cluster.py:job`.
        num_hosts: simulate this many hosts on this machine.
        start_method: "fork" (from a warm fork server) or "fresh" (new interpreters).
        device: "auto": a GPU for each rank if there are enough, else the CPU. "cuda": ranks share GPUs if there are
            fewer, with gloo as their backend. Or "cpu".
        process_group: False does not initialize torch.distributed.
        torch: False starts light ranks that do not import torch.
        env: environment variables for the ranks.
        end_on_error: False: ranks that wait in a collective for a rank that raised, or ended, wait until Stop.
        sync: bring the project folder to the machines of `on`: the files that git would take of the repository that
            this process works in, else all of its folder; and those that are named. Ranks work in that copy.
            `Mesh.sync` brings what has changed.
        uv: have each machine run `uv sync --frozen` in its copy before ranks start, which then have the packages of
            uv.lock.
        listen: a tcp address to listen on, encrypted, instead of a local socket.
        orphan_ttl_s: seconds that it may live without any client.

    Raises:
        MeshShapeError: the axes are invalid, or the last one would not stay within a machine.
        UsageError: `on` is no address, and no name of a cluster; or there is nothing to sync to, or no uv.lock.
        SyncError: the project is too large, or cannot be read.
        MeshInUse: the name is taken.
        StartError: the mesh did not start; nothing is left running.
    """
    defaults = read_defaults()
    if on is not None:
        forms = {"axes": axes, "shape": shape, "mesh_dim_names": mesh_dim_names}
        cluster = choose_machines(on, defaults, nodes=nodes, gpus_per_node=gpus_per_node, **forms)
        grid, engine, on, num_hosts = cluster.grid, cluster.engine, cluster.on, cluster.num_hosts
    else:
        if axes is None and nodes is None and gpus_per_node is None and shape is None:
            axes = defaults.num_ranks()
        grid = MeshAxes.of(axes, nodes=nodes, gpus_per_node=gpus_per_node, shape=shape, mesh_dim_names=mesh_dim_names)
    spec = make_spec(
        grid,
        engine=engine,
        on=on,
        num_hosts=num_hosts,
        start_method=start_method,
        device=device,
        process_group=process_group,
        torch=torch,
        env=env,
        end_on_error=end_on_error,
        project=choose_project(sync, uv=uv),
    )

    def start(*, owner: str | None, kind: str, default_ttl_s: float | None, stop_at_exit: bool) -> Session:
        ttl_s = next(s for s in (orphan_ttl_s, default_ttl_s, defaults.orphan_ttl_s) if s is not None)
        session = launch_session(
            name or generate_mesh_name(), owner=owner, listen=listen, cold=on is not None, kind=kind,
            orphan_ttl_s=ttl_s, stop_at_exit=stop_at_exit,
        )  # fmt: skip
        return start_ranks(session, grid, spec)

    cell = page.running_cell() if owner is None else None
    if cell is not None:
        return _new_mesh(extensions.find("marimo_session")(cell, spec, name, start))
    return _new_mesh(start(owner=owner, kind=kind, default_ttl_s=None, stop_at_exit=True))


def attach(name: str | None = None, *, kind: str = "script", observer: bool = False) -> Mesh:
    """Attach to a running mesh; without a name, to the only one. It does not end with this process.

    Prints which cells went on without their client, and how they ended.

    Raises:
        NotAttached: none is running, or it has no ranks.
        MeshNameError: no such name, or several meshes and no name.
        VersionMismatch: it runs another version of Meshbook.
    """
    session = Session(
        SupervisorConnection(keys.find_connection(name), kind=kind, observer=observer), stop_at_exit=False
    )
    if session.axes is None:
        session.close()
        raise NotAttached(f"the mesh {session.name!r} has no ranks yet; start them with %mesh start -n 4")
    mesh = _new_mesh(session)
    if not observer and kind not in _NOTEBOOK_KINDS:
        with contextlib.suppress(MeshTimeout):  # the next command says that the supervisor does not answer
            _report_unattended(session)
    return mesh


def open_session(
    connection_info: keys.ConnectionInfo, *, kind: str, orphan_ttl_s: float, stop_at_exit: bool = True
) -> Session:
    """Return a session with a supervisor; `stop_at_exit`: it stops its mesh on an orderly exit of this process.

    Raises:
        NotAttached, VersionMismatch: as `SupervisorConnection`.
    """
    connection = SupervisorConnection(connection_info, kind=kind, orphan_ttl_s=orphan_ttl_s)
    return Session(connection, stop_at_exit=stop_at_exit)


def launch_session(name: str, *, kind: str, orphan_ttl_s: float, stop_at_exit: bool = True, **options: Any) -> Session:
    """Launch a supervisor and return a session with it. Blocks.

    Args:
        options: those of `launch_supervisor`.

    Raises:
        MeshInUse, StartError, NotAttached: nothing is left running.
    """
    found = launch_supervisor(name, **options)
    try:
        return open_session(found, kind=kind, orphan_ttl_s=orphan_ttl_s, stop_at_exit=stop_at_exit)
    except BaseException:
        kill_mesh(found)
        raise


def start_ranks(session: Session, grid: MeshAxes, spec: messages.MeshSpec, *, quiet: bool = False) -> Session:
    """Start the ranks of a supervisor without any, and return its session. Waits until their process group is ready.

    Args:
        quiet: False shows what is waited for, if that takes more than a second.

    Raises:
        StartError: they did not start; nothing is left running.
        SyncError: the project is too large, or cannot be read; nothing is left running.
    """
    project = project_of(session, spec)
    try:
        files = () if project is None else project.look()
    except BaseException:
        session.stop()
        raise
    timeout_s = read_defaults().start_timeout_s
    background = background_output_of(session)  # what is announced meanwhile is shown
    with StatusLine() as line:

        def show(report: messages.MeshStarting) -> None:
            # Where each state would be a line of its own, what a launcher's queue says only.
            if report.state and not quiet and (line.is_updated or report.is_queued):
                line.show(report.state)

        session.start(grid, spec, files, timeout_s=timeout_s, on_waiting=show)
    notes = [device_note(session.info, _num_free_gpus(session, spec)), _others_note(session, spec)]
    if project is not None:
        project.started(files)
        notes += project.notes()
    for note in filter(None, notes):
        background.notify(grid.ranks, note)
    return session


def device_note(info: messages.MeshInfo, num_gpus: int) -> str | None:
    """Return the note that ranks share GPUs, or are on the CPU beside GPUs; None if each has what one would expect.

    Args:
        num_gpus: how many ranks could have one of their own on the machines of the mesh.
    """
    on_gpu = [rank for rank in info.ranks if rank.device != "cpu"]
    num_sharing = Counter((rank.host, rank.device) for rank in on_gpu)
    sharing = tuple(rank.rank for rank in on_gpu if num_sharing[rank.host, rank.device] > 1)
    if sharing:
        text = f"{len(on_gpu)} ranks and {count_of(len(num_sharing), 'GPU')}: {name_ranks(sharing)} share"
        if info.backend is not None:
            text += (
                ". NCCL refuses that, so the process groups use gloo, which copies through the CPU's memory: good for "
                "trying things out, not for speed"
            )
        return text
    if info.spec is not None and info.spec.torch and info.spec.device == "auto" and not on_gpu and num_gpus:
        return (
            f"{len(info.ranks)} ranks and {count_of(num_gpus, 'GPU')}: the ranks are on the CPU, because there is not "
            f"a GPU for each. Ask for {num_gpus}, or for device cuda: then they share"
        )
    return None


def _num_free_gpus(session: Session, spec: messages.MeshSpec) -> int:
    """Return how many ranks could have a GPU of their own, as many on each machine; 0 also if some have."""
    if not spec.on:
        return count_free_gpus()
    if spec.device != "auto" or any(rank.device != "cpu" for rank in session.info.ranks):
        return 0
    hosts = [host.facts for host in fetch_hosts(session) if host.facts is not None]
    return min((sum(not gpu.busy_by for gpu in facts.gpus) for facts in hosts), default=0) * len(hosts)


def _others_note(session: Session, spec: messages.MeshSpec) -> str:
    """Return which GPUs others use, so that ranks were started on the rest; "": none, or ranks need no GPU."""
    if not any(rank.device.startswith("cuda") for rank in session.info.ranks):
        return ""
    if spec.on:
        hosts = [(host.name, busy_gpus(host.facts)) for host in fetch_hosts(session) if host.facts is not None]
        found = [f"{name}: GPUs {busy}" for name, busy in hosts if busy]
        return f"{'; '.join(found)}, chosen around" if found else ""
    others = find_others_gpus()
    is_around = others is not None and spec.env.get("CUDA_VISIBLE_DEVICES") == ",".join(others.free)
    return f"{others}, chosen around" if is_around else ""


def prewarm_session(name: str, *, torch: bool, orphan_ttl_s: float, fork_from: Session | None = None) -> Session:
    """Start a mesh without ranks whose fork server warms up, for `start_prewarmed`. Ends with this process. Blocks.

    Args:
        fork_from: a live mesh of the same kind; the new fork server is forked from its fork server.

    Raises:
        StartError: it did not start.
    """
    fork_server_socket = str(keys.runtime_folder() / fork_from.name / "h0-fork.sock") if fork_from is not None else None
    return launch_session(
        name, light=not torch, fork_server_socket=fork_server_socket, kind="script", orphan_ttl_s=orphan_ttl_s
    )


def start_prewarmed(
    session: Session,
    grid: MeshAxes,
    *,
    torch: bool,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
) -> Mesh:
    """Start ranks for actors: without a process group, and without torch unless requested. Blocks.

    Raises:
        StartError: they did not start.
    """
    spec = make_spec(
        grid,
        engine="local",
        start_method="fork",
        device=device if torch else "cpu",
        process_group=False,
        torch=torch,
        env=env,
        end_on_error=True,
    )
    return _new_mesh(start_ranks(session, grid, spec, quiet=True))


def make_spec(
    grid: MeshAxes,
    *,
    engine: str | None = None,
    on: str | None = None,
    num_hosts: int = 1,
    start_method: str | None = None,
    device: str | None = None,
    process_group: bool = True,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    end_on_error: bool | None = None,
    project: messages.ProjectSpec | None = None,
) -> messages.MeshSpec:
    """Validate the options and return the `MeshSpec` for the supervisor; None: the user's default.

    Raises:
        UsageError: the engine, start method or device does not exist.
        StartError: more hosts than ranks, or CUDA ranks without a GPU.
    """
    defaults = read_defaults()
    engine, device = engine or defaults.engine, device or defaults.device
    start_method = start_method or defaults.start_method
    for what, value, known in (
        ("engine", engine, ENGINES),
        ("start method", start_method, ("fork", "fresh")),
        ("device", device, ("auto", "cpu", "cuda")),
    ):
        if value not in known:
            raise UsageError(f"there is no {what} {value!r}; known: {', '.join(known)}")
    if (engine == "local") != (not on):
        raise UsageError(
            f"the engine {engine} runs on this machine only, and on={on!r} is asked for; leave one of them out"
            if on
            else f"the engine {engine} needs to know its machines: --on {engine}://gpu1,gpu2"
        )
    if project is not None and not on:
        raise UsageError(
            "--sync brings the project folder to other machines, and this mesh is on this one, whose ranks have it; "
            "leave it out, or say on which machines: --on ssh://gpu1,gpu2"
        )
    env = dict(env or {}) if on or not torch else _choose_gpus(device, env or {})
    _check_numbers(defaults)
    if not 1 <= num_hosts <= grid.size:
        raise StartError(f"{grid.size} ranks cannot be spread over {num_hosts} hosts; every host needs a rank")
    return messages.MeshSpec(
        axes=grid.axes,
        engine=engine,
        on=on or "",
        num_hosts=num_hosts,
        start_method=start_method,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        process_group=process_group and torch,
        torch=torch,
        env=env,
        cwd=str(current_folder()),
        argv=script.argv,
        end_on_error=defaults.end_on_error if end_on_error is None else end_on_error,
        log_bytes=defaults.log_mb << 20,
        lost_after_s=defaults.lost_after_s,
        lease_s=defaults.lease_s(),
        project=project,
        sys_path=tuple(dict.fromkeys(_import_folders())),
    )


def _import_folders() -> Iterator[str]:
    """Yield where modules are looked for; "", which IPython has, is whichever folder a cell has gone to (`%cd`)."""
    for path in sys.path:
        if os.path.isdir(path or "."):
            yield from ([os.path.abspath(path)] if path else ["", os.path.abspath(path)])


def choose_project(sync: bool | Sequence[str], *, uv: bool) -> messages.ProjectSpec | None:
    """Return the project that travels; None: none does. Raises UsageError, SyncError.

    Args:
        sync: as `create_mesh` takes it.
    """
    if sync is False:
        if uv:
            raise UsageError("uv runs in a copy of the project: --env uv goes with --sync (uv=True with sync=True)")
        return None
    return find_project((sync,) if isinstance(sync, str) else () if sync is True else sync, uv=uv)


def _choose_gpus(device: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks on this machine, which see no GPU that somebody else uses. Raises StartError."""
    if device == "cuda" and not count_gpus():
        raise StartError("cuda is asked for, and no GPU is visible here; ask for device cpu, or see meshbook doctor")
    if device == "cpu" or "CUDA_VISIBLE_DEVICES" in env or (others := find_others_gpus()) is None:
        return dict(env)
    if device == "cuda" and not others.free:
        raise StartError(
            f"cuda is asked for, and others use every GPU here: {others}; ask for device cpu, or take one all the same "
            "with CUDA_VISIBLE_DEVICES=0"
        )
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(others.free)}


def _check_numbers(defaults: Defaults) -> None:
    """Raise UsageError: a number of meshbook.toml is too small."""
    if defaults.log_mb < 1:
        raise UsageError(
            f"log_mb = {defaults.log_mb}: each machine keeps at least 1 MB of output; write 256, for example"
        )
    if defaults.lost_after_s < MIN_LOST_AFTER_S:
        raise UsageError(
            f"lost_after_s = {defaults.lost_after_s:g}: a machine is named when it has not answered for 3 to 4 s, and "
            f"counts as lost after {MIN_LOST_AFTER_S:g} s at the earliest"
        )
    if 0 < defaults.cut_off_ttl_s < (least := defaults.lost_after_s + MIN_LEASE_AFTER_LOSS_S):
        raise UsageError(
            f"cut_off_ttl_s = {defaults.cut_off_ttl_s:g}: ranks of a machine that is cut off count as lost after "
            f"{defaults.lost_after_s:g} s (lost_after_s), and must not end before; write {least:g} or more"
        )


def generate_mesh_name(stem: str | None = None) -> str:
    """Return an unused mesh name: the script's name and four hexadecimal digits."""
    if stem is None:
        stem = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "mesh").stem
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:32] or "mesh"
    return f"{stem}-{secrets.token_hex(2)}"


def _report_unattended(session: Session) -> None:
    """Print which cells went on without their client, and which still do."""
    found = past_cells.fetch_unattended(session)
    notices = past_cells.unattended_notices(
        found.history, "its client", lambda number: f"mesh.history({'' if number is None else number})"
    )
    for call in found.open_calls:
        if call.orphaned and call.number is not None:
            notices.append(
                f"cell {call.number} goes on without its client, for {call.seconds:.0f} s now; its output until "
                f"now: mesh.history({call.number})"
            )
    for text in notices:
        background_output_of(session).notify(session.axes.ranks if session.axes is not None else (), text)
    past_cells.acknowledge(session, found.history)


def _new_mesh(session: Session) -> Mesh:
    assert session.axes is not None
    background_output_of(session)
    return Mesh.of(session, session.axes)
