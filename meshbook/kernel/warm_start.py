"""What a kernel finds, or gets ready, while the user still types: its mesh from before, or a warm supervisor.

A restarted kernel is the same notebook: it looks for meshes that its owner key names. Where there is none, a supervisor
without ranks is launched at once, whose fork server imports torch in the meantime; the first cell then waits for ranks
and not for imports. What is never used is stopped: at an orderly end by us, after a crash by its own time to live.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.launch import launch_supervisor
from meshbook.controller.mesh import generate_mesh_name
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError
from meshbook.wire import keys

log = logging.getLogger("meshbook.kernel")

# Seconds that a supervisor without ranks lives on after a crash of its kernel: a restarter needs about 5 to bring the
# kernel back, which then finds it warm.
STANDBY_TTL_S = 10.0


class WarmStarter:
    """A thread that looks for this owner's meshes, and otherwise keeps a supervisor warm.

    Args:
        owner: what names this notebook across kernels.
        orphan_ttl_s: how long meshes that are found live on when this process is gone.
        warm: False: only look, start nothing.
    """

    def __init__(self, owner: str, *, kind: str, orphan_ttl_s: float, warm: bool) -> None:
        self._owner, self._kind, self._orphan_ttl_s, self._warm = owner, kind, orphan_ttl_s, warm
        self.inherited_environment = dict(os.environ)  # what the spare's ranks inherit
        self._found: list[Session] = []
        self._standby: Session | None = None
        self._search_done = threading.Event()
        # Not a daemon: a process that ends waits the moment that a launch takes, and stops what came of it.
        self._thread = threading.Thread(target=self._run, name="meshbook-readiness", daemon=False)
        self._thread.start()

    def pop_sessions(self) -> list[Session]:
        """The meshes that were found, oldest first, each handed out once. Waits until they have been looked for."""
        self._search_done.wait()
        found, self._found = self._found, []
        return found

    def pop_standby(self) -> Session | None:
        """The warm supervisor, which is the caller's from now on; None: there is none. Waits for its launch."""
        self._thread.join()
        standby, self._standby = self._standby, None
        if standby is None or standby.ended is not None:
            return None
        try:
            session = open_session(standby.connection.connection_info, kind=self._kind, orphan_ttl_s=self._orphan_ttl_s)
            standby.detach()  # its short time to live goes with it
        except MeshbookError as error:
            log.warning("the warm supervisor is gone: %s", error)
            return None
        return session

    def close(self) -> None:
        """Stop what was not taken. Waits until it is gone."""
        self._thread.join()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.stop()

    def _run(self) -> None:
        try:
            self._find_sessions()
        except Exception as error:  # of the folder in which meshes are found, say; the first cell will say it
            log.warning("no mesh from before could be looked for: %s", error)
        finally:
            self._search_done.set()
        if self._warm and not self._found and self._standby is None:
            try:
                found = launch_supervisor(generate_mesh_name(mesh_name_stem(self._owner)), owner=self._owner)
                self._standby = open_session(found, kind=self._kind, orphan_ttl_s=STANDBY_TTL_S)
            except Exception as error:  # the first cell starts one then, or says what is wrong
                log.warning("no supervisor could be started ahead of time: %s", error)

    def _find_sessions(self) -> None:
        for found in keys.list_connections():
            if found.owner != self._owner:
                continue
            try:
                session = open_session(found, kind=self._kind, orphan_ttl_s=self._orphan_ttl_s)
            except MeshbookError as error:
                log.warning("the mesh %s of this notebook cannot be attached to: %s", found.name, error)
                continue
            others = [client for client in session.info.clients if not client.endswith(f"(pid {os.getpid()})")]
            if any(client.startswith("kernel") for client in others):
                session.detach()  # another kernel of the same notebook has it
            elif session.axes is not None:
                self._found.append(session)
            elif self._standby is None and self._warm:
                self._standby = session
            else:
                session.stop()


def open_session(connection_info: keys.ConnectionInfo, *, kind: str, orphan_ttl_s: float) -> Session:
    """A session that stops its mesh at this process's orderly end.

    Raises:
        NotAttached, VersionMismatch: as `SupervisorConnection`.
    """
    return Session(SupervisorConnection(connection_info, kind=kind, orphan_ttl_s=orphan_ttl_s), stop_at_exit=True)


def owner_key() -> str:
    """What names this notebook across restarts of its kernel.

    The front end's session, else the connection file, which a restarted kernel keeps, else this process.
    """
    if session := os.environ.get("JPY_SESSION_NAME"):
        return session
    try:
        from ipykernel.connect import get_connection_file

        return str(get_connection_file())
    except Exception:  # no kernel, so there is none to be restarted
        return f"pid {os.getpid()}"


def mesh_name_stem(owner: str) -> str:
    """The beginning of a mesh's name: the notebook's, without the random parts of a connection file's."""
    stem = Path(owner).stem
    return "notebook" if re.fullmatch(r"kernel-[\w-]+|pid \d+|tmp\w*", stem) else stem
