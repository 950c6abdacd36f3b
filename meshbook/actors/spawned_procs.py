"""Processes that this program starts for actors, with torch if this program has imported it."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshbook.actors.proc_backends import (
    REPLY_TIMEOUT_S,
    ProcBackend,
    RankProcBackend,
    announce_stop,
    known_sessions,
    prepare_client,
    was_stopped,
)
from meshbook.actors.runtime.futures import Future, run_in_thread
from meshbook.actors.runtime.rank_hooks import run_bootstrap
from meshbook.actors.runtime.refs import ProcMeshRef
from meshbook.actors.runtime.registry import local_registry
from meshbook.controller.starting import prewarm_session, start_prewarmed
from meshbook.errors import NotAttached, StartError, message_of
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import keys

if TYPE_CHECKING:
    from meshbook.controller.session import Session

# Seconds that processes stay alive after the program that spawned them was killed. A normal exit stops them at once.
_ORPHAN_TTL_S = 60.0
# The same for processes that an actor spawned, after the actor's process exited: no client can reattach to them.
_ACTORS_ORPHAN_TTL_S = 2.0


class SpawnedProcBackend(ProcBackend):
    """Processes that this program starts: a mesh of ranks without a process group, started in the background."""

    def __init__(
        self, name: str, axes: MeshAxes, bootstrap: Callable[[], Any] | None, device: str, env: dict[str, str]
    ) -> None:
        prepare_client()
        self.name = f"{name}-{secrets.token_hex(2)}"
        self.axes, self._bootstrap = axes, bootstrap
        self._options: dict[str, Any] = {"device": device, "env": env}
        # An import of torch takes seconds, and a program without torch rarely has actors with it.
        self._with_torch = "torch" in sys.modules or device == "cuda"
        self._mesh: Any = None
        self._procs_ref: ProcMeshRef | None = None
        self._stopped = False
        self.ready = Future("the start of the processes")
        local_registry().started_here[self.name] = self
        # Not a daemon: a normal exit of the program waits for the start, then stops the processes.
        threading.Thread(target=self._start, name=f"start {self.name}").start()

    def _start(self) -> None:
        """Start the processes. Runs on its own thread."""
        session = None
        try:
            axes = self.axes if self.axes.names else MeshAxes.of({"proc": 1})
            session = _get_warm_session(self.name, torch=self._with_torch)
            self._mesh = start_prewarmed(session, axes, torch=self._with_torch, **self._options)
            ranks = RankProcBackend(self._mesh.session, axes)
            self._mesh.session.extras["actors"] = ranks
            procs_ref = ranks.procs_ref()
            self._procs_ref = ProcMeshRef(
                self.name, self.axes.names, self.axes.shape, procs_ref.addresses, procs_ref.mesh
            )
            self.references = ranks.references
            if self._bootstrap is not None:
                self._mesh.execute(run_bootstrap, self._bootstrap)
        except BaseException as error:
            if session is not None:
                with contextlib.suppress(Exception):
                    session.stop()
            local_registry().started_here.pop(self.name, None)
            self.ready.fail(error if isinstance(error, Exception) else StartError(message_of(error)))
        else:
            generation = _standby.generation  # before `stop` can go on, which waits for `ready`
            self.ready.resolve(lambda: True)
            if not local_registry().on_rank:
                _standby.refill(generation, torch=self._with_torch)

    def procs_ref(self) -> ProcMeshRef:
        # An async endpoint that spawns on processes that it has just started waits here too: they are up in a moment,
        # without its event loop.
        self.ready.wait_done()
        self.ready.get()
        if self._stopped:
            raise NotAttached(f"the processes {self.name!r} were stopped; spawn new ones with spawn_procs()")
        assert self._procs_ref is not None
        return self._procs_ref

    def mesh(self) -> Any:
        self.procs_ref()
        return self._mesh

    @property
    def is_up(self) -> bool:
        """Whether the processes have started and were not stopped."""
        return self._procs_ref is not None and not self._stopped

    def is_stopping(self) -> bool:
        return self._stopped or self._mesh is None or was_stopped(self._mesh.session)

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
                _standby.clear()

        return run_in_thread(end, f"the stop of {self.name}")


# ---------------------------------------------------------------------------------------------------------------------
# Meshes without ranks yet, whose fork server has finished its imports

_import_lock = threading.Lock()


def _get_warm_session(name: str, *, torch: bool) -> Session:
    """Return a mesh without ranks yet. Blocks.

    Importing torch takes seconds, so only one of several concurrent callers does it.
    """
    with _import_lock if torch and _find_warm_mesh(torch=True) is None else contextlib.nullcontext():
        stored = _standby.pop(torch=torch)
        if stored is not None:
            return stored
        warm_mesh = _find_warm_mesh(torch=torch)
        session = prewarm_session(name, torch=torch, orphan_ttl_s=_orphan_ttl_s(), fork_from=warm_mesh)
        session.extras["torch"] = torch
        if torch and warm_mesh is None:
            _wait_for_fork_server(session)
        known_sessions.add(session)
    return session


def _orphan_ttl_s() -> float:
    return _ACTORS_ORPHAN_TTL_S if local_registry().on_rank else _ORPHAN_TTL_S


def _find_warm_mesh(*, torch: bool) -> Session | None:
    """Return a running mesh with a warm fork server of this kind, or None."""
    for session in list(known_sessions):
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
    """Wait until the fork server has finished its imports, for `REPLY_TIMEOUT_S` at most."""
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while not _fork_socket(session).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class StandbyMesh:
    """One mesh without ranks, with a warm fork server, for the next `spawn_procs` of its kind (with or without torch).

    It exists only while this program has spawned processes.

    Attributes:
        generation: how often it was cleared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: tuple[bool, Session] | None = None
        self.generation = 0

    def pop(self, *, torch: bool) -> Session | None:
        with self._lock:
            if self._stored is None or self._stored[0] != torch:
                return None
            session = self._stored[1]
            self._stored = None
        return session if session.ended is None and not session.connection.closed else None

    def refill(self, generation: int, *, torch: bool) -> None:
        """Start a standby mesh, unless there is one. Blocks: call it on a background thread.

        Args:
            generation: at a time when there were spawned processes; if it is another now, they were stopped since.
        """
        warm_mesh = _find_warm_mesh(torch=torch)
        if generation != self.generation or self._stored is not None or warm_mesh is None:
            return
        session = prewarm_session(
            f"spare-{secrets.token_hex(3)}", torch=torch, orphan_ttl_s=_orphan_ttl_s(), fork_from=warm_mesh
        )
        with self._lock:
            if generation == self.generation and self._stored is None:
                self._stored = torch, session
                return
        session.stop()  # no longer needed

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            stored, self._stored = self._stored, None
        if stored is not None:
            stored[1].stop()


_standby = StandbyMesh()
