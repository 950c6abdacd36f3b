"""Meshes of hosts and processes, on which actors are spawned.

`this_host().spawn_procs({"gpus": 4})` is a separate Meshbook mesh of ranks without a process group. Actors are spawned
on it, or on the ranks of the notebook's mesh, by sending messages to the processes directly. A ProcMesh can be sent in
messages: an actor may spawn on the processes that it receives.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from meshbook.actors.base import Actor
from meshbook.actors.mesh import ActorMesh, describe_class, process_mesh, send_frames
from meshbook.actors.proc_backends import (
    REPLY_TIMEOUT_S,
    ProcBackend,
    RankProcBackend,
    RefProcBackend,
    prepare_client,
)
from meshbook.actors.runtime.context import client_instance, context
from meshbook.actors.runtime.futures import Future, run_in_thread
from meshbook.actors.runtime.refs import ActorRef, ProcMeshRef
from meshbook.actors.runtime.registry import OwnedMesh, local_registry
from meshbook.actors.runtime.transport import encode, local_transport
from meshbook.actors.shape import MeshTrait
from meshbook.actors.spawned_procs import SpawnedProcBackend
from meshbook.controller.tables import Table
from meshbook.errors import MeshTimeout, UsageError
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.controller.mesh import Mesh

_NO_AXES = MeshAxes((), (), (0,))

T = TypeVar("T")


class HostMesh(MeshTrait):
    """A mesh of machines. Currently this machine only."""

    def __init__(self, axes: MeshAxes = _NO_AXES) -> None:
        self._axes = axes

    def _with_axes(self, axes: MeshAxes) -> HostMesh:
        return HostMesh(axes)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: Any = None,
        *,
        device: str = "auto",
        env: Mapping[str, str] | None = None,
    ) -> ProcMesh:
        """Start processes: `spawn_procs({"gpus": 4})`. Does not wait; spawning on them does.

        Args:
            per_host: axis -> size; None: a single process.
            bootstrap: called once in each process, before any actor, on its main thread; it may be `async def`, and
                what it returns stays there. What it raises is raised by `spawn` and `initialized`.
            device: "cpu", "cuda", or "auto": one GPU per process if there are enough.
            env: environment variables for the processes.

        Raises:
            UsageError: a Monarch option that is not supported here.
        """
        if proc_bind is not None or bootstrap_command is not None:
            raise UsageError("proc_bind and bootstrap_command are not here: processes are forked from one warm server")
        per_host = dict(per_host or {})
        axes = MeshAxes.of(per_host) if per_host else _NO_AXES
        return ProcMesh(SpawnedProcBackend(name or "procs", axes, bootstrap, device, dict(env or {})), axes)

    @property
    def initialized(self) -> Future[bool]:
        return Future.of(True)

    def stop(self) -> Future[None]:
        """Stop all processes that this program has spawned."""
        return shutdown_context()

    shutdown = stop

    async def __aenter__(self) -> HostMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __reduce__(self) -> Any:
        return HostMesh, (self._axes,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostMesh) and self._axes == other._axes

    def __hash__(self) -> int:
        return hash(self._axes)

    def __repr__(self) -> str:
        return "<HostMesh: this machine>"


class ProcMesh(MeshTrait):
    """Processes, or a slice of them, on which actors can be spawned. Async context manager: stops at exit."""

    def __init__(self, backend: ProcBackend, axes: MeshAxes) -> None:
        self._backend, self._axes = backend, axes

    @classmethod
    def from_ref(cls, procs_ref: ProcMeshRef, axes: MeshAxes | None = None) -> ProcMesh:
        """Return the processes behind a reference, or a slice of them."""
        whole = MeshAxes(procs_ref.axis_names, procs_ref.axis_sizes, tuple(range(len(procs_ref.addresses))))
        return cls(RefProcBackend(procs_ref), axes or whole)

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> ProcMesh:
        """Return the ranks of a Meshbook mesh, or of a slice of one."""
        grid = mesh.session.axes
        assert grid is not None
        backend = mesh.session.extras.get("actors")
        if backend is None:
            backend = mesh.session.extras["actors"] = RankProcBackend(mesh.session, grid)
        return cls(backend, mesh.grid)

    def _with_axes(self, axes: MeshAxes) -> ProcMesh:
        return ProcMesh(self._backend, axes)

    @property
    def host_mesh(self) -> HostMesh:
        return HostMesh()

    @property
    def initialized(self) -> Future[bool]:
        """A future, done when the processes run."""
        return self._backend.ready

    @property
    def name(self) -> str:
        return self._backend.procs_ref().name

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> ActorMesh[T]:
        """Create an actor of `Class` in each process. Waits for the processes, not for `Class.__init__`.

        Args:
            name: its name in errors, tables and `__supervise__`; unique in each process.
            args, kwargs: for `Class.__init__`, packed once for all.

        Raises:
            TypeError: `Class` is not derived from Actor.
            ValueError: an actor of that name lives in one of the processes; or an endpoint has a reserved name.
            TransferError: the class or an argument cannot be pickled; the message names the part.
            SupervisionError: a process has exited.
        """
        endpoints, methods = describe_class(Class)
        procs_ref = self._backend.procs_ref()
        ranks = self._axes.ranks
        addresses = tuple(procs_ref.addresses[rank] for rank in ranks)
        spawned_on = ProcMeshRef(procs_ref.name, self._axes.names, self._axes.shape, addresses, procs_ref.mesh)
        ref = ActorRef(
            f"{name}-{secrets.token_hex(4)}", name, Class.__name__, endpoints, methods, addresses, spawned_on, Class
        )
        ref.references, ref.mesh_ranks = self._backend.references, ranks
        mesh: ActorMesh[T] = ActorMesh(ref, ref.axes)
        self._spawn(mesh, (Class, args, kwargs, spawned_on, _PICKLED_OPEN_PROCS))
        return mesh

    def _spawn(self, mesh: ActorMesh[Any], class_and_arguments: tuple[Any, ...]) -> None:
        ref, transport, registry = mesh._ref, local_transport(), local_registry()
        instance = context().actor_instance
        owner = instance.address
        peers = [ref.peer(rank) for rank in range(len(ref.addresses))]
        pinned: list[Any] = []
        payload = transport.payloads.pack_payload(
            class_and_arguments,
            peers,
            name=("the class", "args", "kwargs", "the mesh", "its opener"),
            persistent_id=ref.references.persistent_id_for(ref.mesh_ranks, pinned) if ref.references else None,
        )
        rank_by_node = {address.node: rank for rank, address in enumerate(ref.addresses)}
        registry.owned[ref.id] = OwnedMesh(ref, owner.actor, rank_by_node, self._backend.is_stopping)
        gather = mesh._collector("spawn", label=f"the spawn of {ref.name!r}")
        call_id, axes = gather.register(transport, peers), mesh._axes
        frames = (
            encode(messages.SpawnActor(call_id, ref.id, ref.name, payload, axes.names, axes.shape, rank, owner))
            for rank in range(len(peers))
        )
        send_frames(peers, frames, gather)
        try:
            _wait_until_registered(gather.future, ref)
        except Exception:
            mesh.stop("it could not be spawned everywhere")  # frees the name where it was spawned
            raise
        if pinned:
            mesh._pin_until_received(pinned)

    def to_table(self) -> str:
        """Return the processes as a text table."""
        procs_ref, axes = self._backend.procs_ref(), self._axes
        rows = []
        for rank in axes.ranks:
            point = ", ".join(f"{k}={v}" for k, v in axes.point(rank).items())
            rows.append((point or "-", f"{procs_ref.name}, pid {procs_ref.addresses[rank].pid}"))
        return str(Table("", ("place", "process"), tuple(rows)))

    def stop(self, reason: str = "stopped by its client") -> Future[None]:
        """Stop the processes and the actors on them. Does not wait.

        Returns:
            A future, done when they have exited.
        """
        return self._backend.stop(reason)

    def activate(self) -> Any:
        """`with procs.activate():` torch operations run on every process; see `Mesh.activate`."""
        mesh = self._backend.mesh()
        if mesh is None:
            raise UsageError("only the program that started these processes can activate them")
        return mesh.activate()

    async def logging_option(
        self,
        stream_to_client: bool = True,
        aggregate_window_sec: int | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Configure output: shown here, folded over ranks, or only written to the ranks' logs.

        Args:
            stream_to_client: show output here.
            aggregate_window_sec: accepted for compatibility with Monarch; equal lines are folded over ranks as they
                arrive.
            level: log level of the processes' root loggers.
        """
        self._backend.logging_option(stream_to_client)
        setters = self.spawn(f"logging-{secrets.token_hex(3)}", Actor)
        try:
            await setters._apply(_set_level, level)
        finally:
            await setters.stop()

    async def __aenter__(self) -> ProcMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __reduce__(self) -> Any:
        return ProcMesh.from_ref, (self._backend.procs_ref(), self._axes)

    def __repr__(self) -> str:
        return f"<ProcMesh: {str(self._axes) or 'one'}>"


def _wait_until_registered(done: Future[None], ref: ActorRef) -> None:
    """Wait until the processes have registered an actor.

    Registering is only a lookup in each process, so event-loop threads may wait for it too.
    """
    if not done.wait_done(REPLY_TIMEOUT_S):
        raise MeshTimeout(f"the processes did not take {ref.name!r} within {REPLY_TIMEOUT_S:.0f} s; are they stopped?")
    try:
        done.get()
    except Exception as error:
        local_registry().owned.pop(ref.id, None)
        if getattr(error, "message", "").startswith("an actor named"):
            raise ValueError(error.message) from None  # type: ignore[attr-defined]
        raise


def _set_level(actor: Any, level: int) -> None:
    logging.getLogger().setLevel(level)


# ---------------------------------------------------------------------------------------------------------------------
# This machine and this process


def this_host() -> HostMesh:
    """Return this machine as a HostMesh."""
    prepare_client()
    return HostMesh()


def this_proc() -> ProcMesh:
    """Return this process as a mesh of one: actors spawned on it run in the same process as their spawner."""
    return _open_procs(context().actor_instance.own_process)


def _open_procs(procs_ref: ProcMeshRef) -> ProcMesh:
    prepare_client()
    return ProcMesh.from_ref(procs_ref)


client_instance.open_procs = _open_procs
# An actor gets it in bytes: its process imports this module, and the controller with it, on the first use of `proc`.
_PICKLED_OPEN_PROCS = pickle.dumps(_open_procs)


def spawn_on(mesh: Mesh, name: str, Class: type[T], *args: Any, **kwargs: Any) -> ActorMesh[T]:
    """Spawn actors on the ranks of the notebook's mesh, alongside its cells: `Mesh.spawn`."""
    return ProcMesh.from_mesh(mesh).spawn(name, Class, *args, **kwargs)


def get_or_spawn_controller(name: str, Class: type[T], *args: Any, **kwargs: Any) -> Future[ActorMesh[T]]:
    """Return the single actor of that name in this process; spawned by the first call."""
    registry = local_registry()
    found = registry.started_here.get(f"controller {name}")
    if found is None:
        found = registry.started_here[f"controller {name}"] = this_proc().spawn(name, Class, *args, **kwargs)
    return Future.of(found)


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """Stop all processes that this program has spawned."""
    stops = [
        backend.stop("shut down")
        for backend in list(local_registry().started_here.values())
        if isinstance(backend, SpawnedProcBackend)
    ]

    def wait() -> None:
        for stop in stops:
            stop.get()

    return run_in_thread(wait, "the shutdown")


def list_actors(procs_or_mesh: Any, *, timeout: float = 2.0) -> list[dict[str, Any]]:
    """Return one row for each actor on a ProcMesh or a Mesh: what it runs, its mailbox length, its last error.

    Returns:
        dicts with rank, actor, id, class, place, point, state, mailbox, running, seconds, messages, last_error. Ranks
        that have exited, or do not reply within `timeout` seconds, are left out.
    """
    procs = procs_or_mesh if isinstance(procs_or_mesh, ProcMesh) else ProcMesh.from_mesh(procs_or_mesh)
    procs_ref = procs._backend.procs_ref()
    pending = []
    for rank in procs._axes.ranks:
        process = process_mesh("the process", (procs_ref.addresses[rank],))
        gather = process._collector("rows", lambda values: values[0])
        process._send("=rows", (), {}, gather)
        pending.append((rank, gather.future))
    deadline = time.monotonic() + timeout
    rows = []
    for rank, future in pending:
        try:
            rows += [{"rank": rank, **row} for row in future.get(max(0.0, deadline - time.monotonic()))]
        except Exception:
            continue
    return rows
