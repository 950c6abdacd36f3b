"""Process backends of a ProcMesh.

The processes are started by this program, are ranks of a mesh, or are known by a reference from another process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshbook.actors.deadlock_watch import DeadlockWatch
from meshbook.actors.mesh import ActorMesh, ActorRef
from meshbook.actors.replies import GatherCollector, stopped_procs
from meshbook.actors.runtime.context import ProcMeshRef
from meshbook.actors.runtime.futures import NON_BLOCKING_THREADS, Future
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import local_transport
from meshbook.actors.torch_detection import needs_torch
from meshbook.controller.background_output import background_output_of
from meshbook.diagnose import findings as diagnose
from meshbook.errors import MeshTimeout, NotAttached, StartError, TransferError, UsageError
from meshbook.host.gpus import count_gpus
from meshbook.ids import name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.supervisor.stalls import read_stall_timeout
from meshbook.wire import keys, messages
from meshbook.wire.messages import NodeAddress

if TYPE_CHECKING:
    from meshbook.controller.mesh import Mesh
    from meshbook.controller.session import Session

_EXIT_NOTICE_S = 1.0  # for processes to announce their exit to their peers
_NO_AXES = MeshAxes((), (), (0,))
# Seconds to wait for the first spawn on new processes, usually the program's next line. Then the import of torch
# starts, because it takes longest; the first spawn still decides which processes are used.
_FIRST_SPAWN_WAIT_S = 0.05
_REPLY_TIMEOUT_S = 30.0  # for a process to report its address or register an actor: a lookup
# Seconds that processes stay alive after the program that spawned them was killed. A normal exit stops them at once.
_ORPHAN_TTL_S = 60.0
# The same for processes that an actor spawned, after the actor's process exited: no client can reattach to them.
_ACTORS_ORPHAN_TTL_S = 2.0


def prepare_client() -> None:
    """Have this process report failures that no actor has handled, and deadlocks of actors."""
    registry = local_registry()
    if not registry.on_rank and not registry.transport.exit_reasons.delay_s:
        from meshbook.actors import unhandled_faults

        unhandled_faults.install(registry)
        if after_s := read_stall_timeout(os.environ):
            DeadlockWatch(registry.transport, report_deadlock, after_s=after_s)


def report_deadlock(awaited: messages.PendingEndpointCall) -> bool:
    """Report an actor deadlock that blocks this reply; return whether one was found. Blocks."""
    from meshbook.controller import reports

    for session in list(_sessions):
        ranks = session.extras.get("actors")
        if session.ended is not None or session.stopping or not isinstance(ranks, RankProcBackend):
            continue
        if not any(address.node == awaited.node for address in ranks.procs_ref().addresses):
            continue
        findings = reports.why(session, ranks.axes.ranks).findings
        deadlocks = tuple(finding for finding in findings if finding.kind == "actor-deadlock")
        if deadlocks:
            text = f"{awaited.name}.{awaited.endpoint} is not answered\n{diagnose.as_text(deadlocks)}"
            background_output_of(session).notify(ranks.axes.ranks, text)
            return True
    return False


class ProcBackend:
    """The processes behind a ProcMesh."""

    references: Any = None
    ready: Future[bool]

    def procs_ref(self) -> ProcMeshRef:
        """Return their addresses. Blocks until they run."""
        raise NotImplementedError

    def hint_spawn(self, Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce what is about to be spawned, so that processes that are still starting can be chosen to fit."""

    def mesh(self) -> Any:
        return None

    def is_stopping(self) -> bool:
        """Whether this program is stopping them on purpose."""
        return False

    def stop(self, reason: str) -> Future[None]:
        raise NotImplementedError

    def logging_option(self, stream: bool) -> None:
        mesh = self.mesh()
        if mesh is not None:
            background_output_of(mesh.session).enabled = stream


class RefProcBackend(ProcBackend):
    """Processes known by a reference from another process."""

    def __init__(self, procs_ref: ProcMeshRef) -> None:
        self._procs_ref = procs_ref
        self.ready = Future.of(True)

    def procs_ref(self) -> ProcMeshRef:
        return self._procs_ref

    def stop(self, reason: str) -> Future[None]:
        name = self._procs_ref.mesh
        if name is None:
            raise UsageError("this is the process itself; to end it, end the program")
        backend = local_registry().started_here.get(self._procs_ref.name)
        if backend is not None:
            stopping: Future[None] = backend.stop(reason)
            return stopping

        procs_ref = self._procs_ref

        def end() -> None:
            announce_stop(procs_ref, reason)
            from meshbook.controller.starting import attach
            from meshbook.errors import MeshbookError

            with contextlib.suppress(MeshbookError):  # already stopped
                attach(name).stop()

        return run_in_background(end, f"the stop of {name}")


class RankProcBackend(ProcBackend):
    """The ranks of a mesh that this program is attached to."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        self._session, self.axes = session, axes
        self._lock = threading.Lock()
        self._procs_ref: ProcMeshRef | None = None
        self.ready = Future("the processes")
        self.references = MeshReferences(session)
        session.lost_listeners.append(record_exits)
        _sessions.add(session)
        prepare_client()
        background_output_of(session).all_clients = True

    def procs_ref(self) -> ProcMeshRef:
        """Return the addresses, in rank order. Blocks."""
        with self._lock:
            if self._procs_ref is None:
                self._session.check_attached()
                self._procs_ref = ProcMeshRef(
                    self._session.name,
                    self.axes.names,
                    self.axes.shape,
                    query_addresses(self._session, self.axes),
                    self._session.name,
                )
                self.ready.resolve(lambda: True)
        return self._procs_ref

    def mesh(self) -> Any:
        from meshbook.controller.mesh import Mesh

        return Mesh.of(self._session, self.axes)

    def is_stopping(self) -> bool:
        return _was_stopped(self._session)

    def stop(self, reason: str) -> Future[None]:
        procs_ref = self.procs_ref()

        def end() -> None:
            announce_stop(procs_ref, reason)
            self._session.stop()

        return run_in_background(end, f"the stop of {procs_ref.name}")


class MeshReferences:
    """Objects that the ranks of a mesh already hold and receive as a key: handles and remote tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def persistent_id_for(self, ranks: Sequence[int], pinned: list[Any]) -> Callable[[Any], str | None]:
        """Return a function that maps an object to its key on these ranks, or to None if it must be sent itself.

        For one message to the actors on these ranks. The function blocks until the ranks have computed a remote tensor:
        their main threads compute it, and actors read it on their own threads.

        Args:
            pinned: receives the objects that the ranks look up; keep it alive until they have.
        """

        def key_of(thing: Any) -> str | None:
            key = self._session._persistent_id(thing)
            if key is None:
                return None
            engine = getattr(thing, "engine", None) if key.startswith("tensor:") else None
            if engine is not None and not any(getattr(other, "engine", None) is engine for other in pinned):
                missing_ranks = sorted(set(ranks) - set(engine.ranks))
                if missing_ranks:
                    raise TransferError(
                        f"a remote tensor lies on {name_ranks(engine.ranks)}, and actors on "
                        f"{name_ranks(missing_ranks)} are to get it too; call a slice of the actors, or pass "
                        "x.full_tensor()"
                    )
                engine.wait()
            pinned.append(thing)
            return key

        return key_of


def mesh_slice_of(actors: ActorMesh) -> Mesh | None:
    """Return the mesh slice that actors live on, under their own axes; None if this program has no such mesh."""
    from meshbook.controller.mesh import Mesh

    procs_ref, axes = actors._ref.procs_ref, actors._axes
    for session in list(_sessions):
        if procs_ref is not None and session.name == procs_ref.mesh and session.ended is None and not session.stopping:
            rank_by_node = {
                address.node: rank for rank, address in enumerate(session.extras["actors"].procs_ref().addresses)
            }
            ranks = [rank_by_node.get(actors._ref.addresses[actor_rank].node) for actor_rank in axes.ranks]
            if None not in ranks:
                return Mesh.of(session, MeshAxes(axes.names, axes.shape, tuple(ranks)))  # type: ignore[arg-type]
    return None


class SpawnedProcBackend(ProcBackend):
    """Processes that this program starts: a mesh of ranks without a process group, started in the background."""

    def __init__(
        self, name: str, axes: MeshAxes, bootstrap: Callable[[], Any] | None, device: str, env: dict[str, str]
    ) -> None:
        prepare_client()
        self.name = f"{name}-{secrets.token_hex(2)}"
        self.axes, self._bootstrap = axes, bootstrap
        self._options: dict[str, Any] = {"device": device, "env": env}
        self._mesh: Any = None
        self._procs_ref: ProcMeshRef | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._first_spawn: tuple[Any, ...] | None = None  # class, args, kwargs of the first spawn
        self._first_spawn_known = threading.Event()  # `_first_spawn` is set
        self._preloads_torch = False  # torch is being imported before the first spawn is known
        self._is_claimed = False  # one of the starting threads owns the start
        self.ready = Future("the start of the processes")
        local_registry().started_here[self.name] = self
        # Not a daemon: a normal exit of the program waits for the start, then stops the processes.
        threading.Thread(target=self._choose_and_start, name=f"start {self.name}").start()

    def _choose_and_start(self) -> None:
        """Choose the kind of processes and start them. Runs on its own thread."""
        if not self._may_skip_torch():
            self._start_processes("torch" in sys.modules)
            return
        self._first_spawn_known.wait(_FIRST_SPAWN_WAIT_S)
        with self._lock:
            first_spawn = self._first_spawn
            self._preloads_torch = first_spawn is None
        # Without a spawn yet, import torch. A spawn during the import that needs no torch starts its own: see
        # `hint_spawn`.
        self._start_processes(first_spawn is None or needs_torch(*first_spawn))

    def _may_skip_torch(self) -> bool:
        """Whether processes with torch would have to be waited for, and processes without it may suffice."""
        may_skip = "torch" in sys.modules and self._bootstrap is None and self._options["device"] != "cuda"
        return may_skip and not count_gpus() and not standby.has(torch=True) and find_warm_mesh(torch=True) is None

    def _start_processes(self, torch: bool) -> None:
        session = None
        try:
            axes = self.axes if self.axes.names else MeshAxes.of({"proc": 1})
            generation = standby.generation
            session = self._get_warm_session(torch)
            if not self._claim():
                standby.put(session, torch=torch, generation=generation)
                return
            from meshbook.controller.starting import start_prewarmed

            self._mesh = start_prewarmed(session, axes, torch=torch, **self._options)
            ranks = RankProcBackend(self._mesh.session, axes)
            self._mesh.session.extras["actors"] = ranks
            procs_ref = ranks.procs_ref()
            self._procs_ref = ProcMeshRef(
                self.name, self.axes.names, self.axes.shape, procs_ref.addresses, procs_ref.mesh
            )
            self.references = ranks.references
            if self._bootstrap is not None:
                self._mesh.execute(self._bootstrap)
        except BaseException as error:
            if session is not None:
                with contextlib.suppress(Exception):
                    session.stop()
            if session is None and not self._claim():
                return  # the other start thread has started them
            local_registry().started_here.pop(self.name, None)
            self.ready.fail(error if isinstance(error, Exception) else StartError(str(error)))
        else:
            self.ready.resolve(lambda: True)
            if not local_registry().on_rank:
                standby.refill(torch=torch)

    def _claim(self) -> bool:
        """Whether the caller is the first of the two threads that may start the processes."""
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
        return is_first

    def procs_ref(self) -> ProcMeshRef:
        if not self.ready.done() and threading.get_ident() in NON_BLOCKING_THREADS:
            # An async endpoint spawns on processes that it has just started. They are up in a moment, without the event
            # loop.
            up = threading.Event()
            self.ready.add_done_callback(lambda _: up.set())
            up.wait()
        self.ready.get()
        if self._stopped:
            raise NotAttached(f"the processes {self.name!r} were stopped; spawn new ones with spawn_procs()")
        assert self._procs_ref is not None
        return self._procs_ref

    def mesh(self) -> Any:
        self.procs_ref()
        return self._mesh

    def hint_spawn(self, Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            if self._first_spawn is not None:
                return
            self._first_spawn = Class, args, kwargs
            preloads_torch = self._preloads_torch
        self._first_spawn_known.set()
        if preloads_torch and not self.ready.done() and not needs_torch(Class, args, kwargs):
            # No spawn came in time, so torch is being imported; these processes need not wait for it.
            threading.Thread(target=self._start_processes, args=(False,), name=f"start {self.name}").start()

    def _get_warm_session(self, torch: bool) -> Session:
        """Return a mesh without ranks yet. Blocks.

        Importing torch takes seconds, so only one of several concurrent callers does it.
        """
        from meshbook.controller.starting import prewarm_session

        with _import_lock if torch and find_warm_mesh(torch=True) is None else contextlib.nullcontext():
            stored = standby.pop(torch=torch)
            if stored is not None:
                return stored
            warm_mesh = find_warm_mesh(torch=torch)
            # the mesh with torch is starting
            name = f"{self.name}-light" if self._preloads_torch and not torch else self.name
            session = prewarm_session(name, torch=torch, orphan_ttl_s=_orphan_ttl_s(), fork_from=warm_mesh)
            session.extras["torch"] = torch
            if torch and warm_mesh is None:
                _wait_for_fork_server(session)
            _sessions.add(session)
        return session

    @property
    def is_up(self) -> bool:
        """Whether the processes have started and were not stopped."""
        return self._procs_ref is not None and not self._stopped

    def is_stopping(self) -> bool:
        if self._stopped or self._mesh is None:
            return True
        return _was_stopped(self._mesh.session)

    def stop(self, reason: str) -> Future[None]:
        self._stopped = True

        def end() -> None:
            self.ready.exception()
            if self._procs_ref is not None:
                announce_stop(self._procs_ref, reason)
            if self._mesh is not None:
                self._mesh.stop()
            local_registry().started_here.pop(self.name, None)
            if not any(isinstance(backend, SpawnedProcBackend) for backend in local_registry().started_here.values()):
                standby.clear()

        return run_in_background(end, f"the stop of {self.name}")


def _was_stopped(session: Session) -> bool:
    """Whether this mesh was stopped or left on purpose. A killed supervisor does not count."""
    return session.stopping or (session.ended is not None and not session.connection.ended_unexpectedly)


_import_lock = threading.Lock()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # whose fork servers can be forked for other meshes


def _orphan_ttl_s() -> float:
    return _ACTORS_ORPHAN_TTL_S if local_registry().on_rank else _ORPHAN_TTL_S


def find_warm_mesh(*, torch: bool) -> Session | None:
    """Return a running mesh with a warm fork server of this kind, or None."""
    for session in list(_sessions):
        spec = session.info.spec
        is_forking = spec is None or spec.start_method == "fork"
        has_torch = spec.torch if spec is not None else session.extras.get("torch")
        is_alive = session.ended is None and not session.stopping
        if is_alive and is_forking and has_torch == torch and _fork_socket(session).exists():
            return session
    return None


def _fork_socket(session: Session) -> Path:
    return keys.runtime_folder() / session.name / "h0-fork.sock"


def _wait_for_fork_server(session: Session) -> None:
    """Wait until the fork server has finished its imports, for `_REPLY_TIMEOUT_S` at most."""
    deadline = time.monotonic() + _REPLY_TIMEOUT_S
    poll = threading.Event()
    while not _fork_socket(session).exists() and time.monotonic() < deadline:
        poll.wait(0.02)


class StandbyMesh:
    """One mesh without ranks, with a warm fork server, for the next `spawn_procs` of its kind (with or without torch).

    It exists only while this program has spawned processes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: tuple[bool, Session] | None = None
        self.generation = 0  # incremented by `clear`, so that a mesh that comes up afterwards is recognized as stale

    def pop(self, *, torch: bool) -> Session | None:
        with self._lock:
            if self._stored is None or self._stored[0] != torch:
                return None
            session = self._stored[1]
            self._stored = None
        return session if session.ended is None and not session.connection.closed else None

    def has(self, *, torch: bool) -> bool:
        with self._lock:
            return self._stored is not None and self._stored[0] == torch

    def refill(self, *, torch: bool) -> None:
        """Start a standby mesh. Blocks: call it on a background thread."""
        from meshbook.controller.starting import prewarm_session

        generation, warm_mesh = self.generation, find_warm_mesh(torch=torch)
        if self._stored is not None or warm_mesh is None:
            return
        session = prewarm_session(
            f"spare-{secrets.token_hex(3)}", torch=torch, orphan_ttl_s=_orphan_ttl_s(), fork_from=warm_mesh
        )
        self.put(session, torch=torch, generation=generation)

    def put(self, session: Session, *, torch: bool, generation: int) -> None:
        """Store a running mesh, or stop it if it is not needed.

        Args:
            generation: the value of `generation` before the mesh was started.
        """
        with self._lock:
            if generation == self.generation and self._stored is None:
                self._stored = torch, session
                return
        session.stop()

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            stored, self._stored = self._stored, None
        if stored is not None:
            stored[1].stop()


standby = StandbyMesh()


def announce_stop(procs_ref: ProcMeshRef, reason: str) -> None:
    """Announce that these processes exit on purpose, so that no process reports it as a failure."""
    stopped_procs[procs_ref.name] = None
    nodes = {address.node for address in procs_ref.addresses}
    for owned in list(local_registry().owned.values()):
        if nodes & owned.rank_by_node.keys():
            owned.stopped = True
    ref = ActorRef("", procs_ref.name, "", {}, frozenset(), procs_ref.addresses, procs_ref)
    actors = ActorMesh(ref, MeshAxes(("place",), (len(procs_ref.addresses),), tuple(range(len(procs_ref.addresses)))))
    notified: Future[None] = Future("the farewell")
    actors._send_control(
        lambda number: messages.PrepareShutdown(number, reason),
        GatherCollector(actors, "stop", notified, lambda v: None, ignore_lost=True),
    )
    with contextlib.suppress(MeshTimeout):  # one of them is stuck and will be killed
        notified.get(_EXIT_NOTICE_S)


def run_in_background(function: Callable[[], Any], label: str) -> Future[None]:
    future: Future[None] = Future(label)

    def run() -> None:
        try:
            function()
        except BaseException as error:  # otherwise the future would never resolve
            future.fail(error)
        else:
            future.resolve(lambda: None)

    # Not a daemon: a normal exit of the program waits until requested stops have finished.
    threading.Thread(target=run, name=label).start()
    return future


def query_addresses(session: Session, axes: MeshAxes) -> tuple[NodeAddress, ...]:
    """Return the address of each rank. The ranks' service threads reply, whatever the ranks run. Blocks."""
    found: dict[int, NodeAddress] = {}
    deadline = time.monotonic() + _REPLY_TIMEOUT_S
    while (missing := tuple(rank for rank in session.living(axes.ranks) if rank not in found)) and (
        time.monotonic() < deadline
    ):
        command = messages.OpenActors(call=session.connection.next_call_id(), ranks=missing)
        for part in session.query(command, _REPLY_TIMEOUT_S):
            if part.outcome.status == "ok" and isinstance(part.outcome.reply, list):
                for rank in part.ranks:
                    found[rank] = NodeAddress(*part.outcome.reply)
    lost = NodeAddress("lost", "", 0)
    silent = [rank for rank in session.living(axes.ranks) if rank not in found]
    if silent:
        raise MeshTimeout(f"ranks {silent} did not say where their actors can be reached; they may be stuck in C code")
    return tuple(found.get(rank, lost) for rank in axes.ranks)


def record_exits(exited: tuple[messages.RankExited, ...]) -> None:
    for rank in exited:
        local_transport().exit_reasons.record(rank.pid, rank.description)
