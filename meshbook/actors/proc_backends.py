"""Process backends of a ProcMesh.

The processes are started by this program, are ranks of a mesh, or are known by a reference from another process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshbook.actors import unhandled_faults
from meshbook.actors.deadlock_watch import DeadlockWatch
from meshbook.actors.mesh import ActorMesh, process_mesh
from meshbook.actors.mesh_references import MeshReferences
from meshbook.actors.replies import stopped_procs
from meshbook.actors.runtime.futures import Future, run_in_thread
from meshbook.actors.runtime.refs import ProcMeshRef
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.relayed_peer import MeshCarrier
from meshbook.actors.runtime.transport import Transport, local_transport
from meshbook.controller.background_output import background_output_of
from meshbook.diagnose import findings as diagnose
from meshbook.errors import MeshbookError, MeshTimeout, NotAttached, UsageError
from meshbook.mesh_axes import MeshAxes
from meshbook.supervisor.stalls import read_stall_timeout
from meshbook.wire import messages
from meshbook.wire.messages import NodeAddress, RankInfo

if TYPE_CHECKING:
    from meshbook.controller.mesh import Mesh
    from meshbook.controller.session import Session

_EXIT_NOTICE_S = 1.0  # for processes to announce their exit to their peers
REPLY_TIMEOUT_S = 30.0  # for a process to report its address or register an actor: a lookup
known_sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # meshes with actors, or that can have some


def prepare_client() -> None:
    """Have this process report failures that no actor has handled, and deadlocks of actors."""
    registry = local_registry()
    registry.inquiry.ask_here = ask_exit
    if not registry.on_rank and registry.transport.exit_reasons.ask is None:
        registry.transport.exit_reasons.ask = registry.inquiry.ask
        registry.on_unhandled_failure = unhandled_faults.report
        if after_s := read_stall_timeout(os.environ):
            DeadlockWatch(registry.transport, report_deadlock, after_s=after_s)


def report_deadlock(awaited: messages.PendingEndpointCall) -> bool:
    """Report an actor deadlock that blocks this reply; return whether one was found. Blocks."""
    from meshbook.controller import reports

    for session in list(known_sessions):
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


class SessionRelay(MeshCarrier):
    """Passes on what this program and the processes of a mesh on other machines send each other."""

    def __init__(self, session: Session, transport: Transport) -> None:
        self._connection = session.connection
        self._nodes: set[str] = set()
        listeners, machines = session.connection.listeners, transport.machines
        listeners.report_handlers[messages.BytesRelayed] = lambda report: machines.piece_received(self, report.piece)
        listeners.mesh_stopped.append(lambda reason: machines.remove_mesh(self, f"has ended with its mesh: {reason}"))
        listeners.closed.append(lambda: machines.remove_mesh(self, "cannot be reached: this program has left its mesh"))
        session.connection.send(messages.ActorsOpened(transport.address.node, os.getpid()))
        machines.add_mesh(self)

    def add_nodes(self, nodes: set[str]) -> None:
        """Record processes of the mesh."""
        self._nodes |= nodes

    def reaches(self, node: str) -> bool:
        return node in self._nodes

    def send(self, piece: messages.RelayedBytes) -> None:
        self._connection.send(messages.RelayBytes(piece))


class ProcBackend:
    """The processes behind a ProcMesh."""

    references: Any = None
    ready: Future[bool]

    def procs_ref(self) -> ProcMeshRef:
        """Return their addresses. Blocks until they run."""
        raise NotImplementedError

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

            with contextlib.suppress(MeshbookError):  # already stopped
                attach(name).stop()

        return run_in_thread(end, f"the stop of {name}")


class RankProcBackend(ProcBackend):
    """The ranks of a mesh that this program is attached to."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        self._session, self.axes = session, axes
        self._lock = threading.Lock()
        self._procs_ref: ProcMeshRef | None = None
        self._incarnations: tuple[int, ...] = ()  # of the ranks whose addresses it has
        self._nodes: dict[tuple[int, int], str] = {}  # of each process that it has known, by rank and pid
        self.ready = Future("the processes")
        self.references = MeshReferences(session)
        session.lost_listeners.append(self._record_exits)
        session.healed_hooks.append(unhandled_faults.ranks_replaced)
        session.connection.listeners.mesh_stopped.append(functools.partial(_record_mesh_end, weakref.ref(self)))
        known_sessions.add(session)
        prepare_client()
        has_other_machines = session.info.spec is not None and bool(session.info.spec.on)
        self._relay = SessionRelay(session, local_transport()) if has_other_machines else None
        background_output_of(session).all_clients = True

    def procs_ref(self) -> ProcMeshRef:
        """Return the addresses, in rank order. Blocks."""
        from meshbook.controller.session import incarnations

        with self._lock:
            now = incarnations(self._session, self.axes.ranks)
            if self._procs_ref is None or now != self._incarnations:
                self._session.check_attached()
                self._incarnations = now
                self._procs_ref = ProcMeshRef(
                    self._session.name,
                    self.axes.names,
                    self.axes.shape,
                    query_addresses(self._session, self.axes),
                    self._session.name,
                )
                found = zip(self.axes.ranks, self._procs_ref.addresses, strict=True)
                self._nodes |= {(rank, address.pid): address.node for rank, address in found if address.pid}
                local_transport().connect_again(address.node for address in self._procs_ref.addresses)
                if self._relay is not None:
                    self._relay.add_nodes(set(self._nodes.values()))
                self.ready.resolve(lambda: True)
        return self._procs_ref

    def present_nodes(self) -> dict[str, RankInfo]:
        """Return each rank's present process, which may have ended."""
        infos = {(info.rank, info.pid or 0): info for info in self._session.info.ranks}
        return {self._nodes[one]: info for one, info in infos.items() if one in self._nodes}

    def _record_exits(self, exited: tuple[messages.RankExited, ...]) -> None:
        for one in exited:
            if (node := self._nodes.get((one.rank, one.pid))) is not None:
                local_transport().exit_reasons.record(node, one.description_with_reason)

    def mesh(self) -> Any:
        from meshbook.controller.mesh import Mesh

        return Mesh.of(self._session, self.axes)

    def is_stopping(self) -> bool:
        return was_stopped(self._session)

    def stop(self, reason: str) -> Future[None]:
        procs_ref = self.procs_ref()

        def end() -> None:
            announce_stop(procs_ref, reason)
            self._session.stop()

        return run_in_thread(end, f"the stop of {procs_ref.name}")


def mesh_slice_of(actors: ActorMesh[Any]) -> Mesh | None:
    """Return the mesh slice that actors live on, under their own axes; None if this program has no such mesh."""
    from meshbook.controller.mesh import Mesh

    procs_ref, axes = actors._ref.procs_ref, actors._axes
    for session in list(known_sessions):
        if procs_ref is not None and session.name == procs_ref.mesh and session.ended is None and not session.stopping:
            rank_by_node = {
                address.node: rank for rank, address in enumerate(session.extras["actors"].procs_ref().addresses)
            }
            ranks = [rank_by_node.get(actors._ref.addresses[actor_rank].node) for actor_rank in axes.ranks]
            if None not in ranks:
                return Mesh.of(session, MeshAxes(axes.names, axes.shape, tuple(ranks)))  # type: ignore[arg-type]
    return None


def was_stopped(session: Session) -> bool:
    """Whether this mesh was stopped or left on purpose. A killed supervisor does not count."""
    return session.stopping or (session.ended is not None and not session.connection.ended_unexpectedly)


def announce_stop(procs_ref: ProcMeshRef, reason: str) -> None:
    """Announce that these processes exit on purpose, so that no process reports it as a failure."""
    stopped_procs[procs_ref.name] = None
    nodes = {address.node for address in procs_ref.addresses}
    for owned in list(local_registry().owned.values()):
        if nodes & owned.rank_by_node.keys():
            owned.stopped = True
    processes = process_mesh(procs_ref.name, procs_ref.addresses)
    gather = processes._collector("stop", ignore_lost=True)
    processes._send_control(lambda number: messages.PrepareShutdown(number, reason), gather)
    with contextlib.suppress(MeshTimeout):  # one of them is stuck and will be killed
        gather.future.get(_EXIT_NOTICE_S)


def query_addresses(session: Session, axes: MeshAxes) -> tuple[NodeAddress, ...]:
    """Return the address of each rank. The ranks' service threads reply, whatever the ranks run. Blocks."""
    found: dict[int, NodeAddress] = {}
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while (missing := tuple(rank for rank in session.living(axes.ranks) if rank not in found)) and (
        time.monotonic() < deadline
    ):
        command = messages.OpenActors(call=session.connection.next_call_id(), ranks=missing)
        for part in session.query(command, REPLY_TIMEOUT_S):
            if part.outcome.status == "ok" and isinstance(part.outcome.reply, list):
                for rank in part.ranks:
                    found[rank] = NodeAddress(*part.outcome.reply)
    lost = NodeAddress("lost", "", 0)
    silent = [rank for rank in session.living(axes.ranks) if rank not in found]
    if silent:
        raise MeshTimeout(f"ranks {silent} did not say where their actors can be reached; they may be stuck in C code")
    return tuple(found.get(rank, lost) for rank in axes.ranks)


def _record_mesh_end(ended: weakref.ref[RankProcBackend], reason: str) -> None:
    if (backend := ended()) is not None:
        living = [node for node, info in backend.present_nodes().items() if info.exit is None]
        local_transport().exit_reasons.record_mesh_end(living, reason)


def ask_exit(node: str, then: Callable[[], None]) -> bool:
    """Have the mesh of a process look whether it has ended; call `then` when its exit has been recorded, or it runs.

    Returns:
        Whether a mesh has such a process.
    """
    for session in list(known_sessions):
        backend = session.extras.get("actors")
        found = backend.present_nodes().get(node) if isinstance(backend, RankProcBackend) else None
        if found is not None:
            break
    else:  # it was replaced, which was recorded
        return False
    connection = session.connection

    def answered(future: concurrent.futures.Future[Any]) -> None:
        # If its mesh has ended, that is about to be recorded, unless nobody listens any more.
        if connection.closed or not isinstance(future.exception(), NotAttached):
            then()

    try:
        connection.request(messages.CheckExits(connection.next_call_id(), (found.rank,))).add_done_callback(answered)
    except MeshbookError:
        then()
    return True
