"""Work that a kernel does while the user still types: finding its existing mesh, or starting a warm supervisor.

A restarted kernel is the same notebook: it searches for meshes with its owner key. If there is none, it launches a
supervisor without ranks, whose fork server imports torch meanwhile; the first cell then waits for ranks and not for
imports. An unused supervisor is stopped: by this process on an orderly exit, by its own time to live after a crash,
which is short as long as it has no ranks.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from meshbook.controller.session import Session
from meshbook.controller.starting import generate_mesh_name, launch_session, open_session
from meshbook.errors import MeshbookError
from meshbook.wire import keys

log = logging.getLogger("meshbook.kernel")


class WarmStarter:
    """A thread that searches for this owner's meshes, and starts a warm supervisor if there are none.

    Args:
        owner: the key of this notebook across kernels.
        orphan_ttl_s: how long reattached meshes live after this process has exited.
        warm: False: only search, start nothing.
    """

    def __init__(self, owner: str, *, kind: str, orphan_ttl_s: float, warm: bool) -> None:
        self._owner, self._kind, self._orphan_ttl_s, self._warm = owner, kind, orphan_ttl_s, warm
        self.inherited_environment = dict(os.environ)  # the environment that the standby's ranks inherit
        self.in_use: list[tuple[str, str]] = []  # meshes of this owner to which other kernels are attached, and these
        self._found: list[Session] = []
        self._standby: Session | None = None
        self._search_done = threading.Event()
        # Not a daemon: an exiting process waits briefly for the launch to finish, and stops the supervisor.
        self._thread = threading.Thread(target=self._run, name="meshbook-readiness", daemon=False)
        self._thread.start()

    def pop_sessions(self) -> list[Session]:
        """Return the meshes that were found, oldest first, each once. Waits for the search to finish."""
        self._search_done.wait()
        found, self._found = self._found, []
        return found

    def pop_standby(self) -> Session | None:
        """Return the warm supervisor and hand it over to the caller; None: there is none. Waits for its launch."""
        self._thread.join()
        standby, self._standby = self._standby, None
        is_usable = standby is not None and standby.ended is None and standby.connection.connection_info.is_alive
        return standby if is_usable else None

    def close(self) -> None:
        """Stop the supervisor if it was not used. Waits until it has exited."""
        self._thread.join()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.stop()

    def _run(self) -> None:
        try:
            self._find_sessions()
        except Exception as error:  # for example the runtime folder is unreadable; the first cell will report it
            log.warning("no mesh from before could be looked for: %s", error)
        finally:
            self._search_done.set()
        if self._warm and not self._found and self._standby is None:
            try:
                name = generate_mesh_name(mesh_name_stem(self._owner))
                self._standby = launch_session(
                    name, owner=self._owner, kind=self._kind, orphan_ttl_s=self._orphan_ttl_s
                )
            except Exception as error:  # the first cell starts one, or reports the error
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
            if kernels := [client for client in others if client.startswith("kernel")]:
                session.detach()
                self.in_use.append((found.name, " and ".join(kernels)))
            elif session.axes is not None:
                self._found.append(session)
            elif self._standby is None and self._warm:
                self._standby = session
            else:
                session.stop()


def owner_key() -> str:
    """Return the key of this notebook across restarts of its kernel.

    The front end's session, else the connection file, which a restarted kernel reuses, else this process.
    """
    if session := os.environ.get("JPY_SESSION_NAME"):
        return session
    try:
        from ipykernel.connect import get_connection_file

        return str(get_connection_file())
    except Exception:  # no kernel, so no restart either
        return f"pid {os.getpid()}"


def mesh_name_stem(owner: str) -> str:
    """Return the first part of a mesh's name: the notebook's name, or "notebook" for a generated one."""
    stem = Path(owner).stem
    return "notebook" if re.fullmatch(r"kernel-[\w-]+|pid \d+|tmp\w*", stem) else stem
