"""Connections to the meshes that are asked about: one that only looks, and one for each that acts."""

from __future__ import annotations

import threading

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.session import Session
from meshbook.errors import MeshNameError, NotAttached
from meshbook.wire import keys


class MeshConnections:
    """Opens connections by the mesh's name when they are first needed, and again when another mesh has that name.

    An observer keeps no mesh alive. A client that has acted keeps it alive while this process runs, and for the usual
    time (`orphan_ttl_s`) after it.
    """

    def __init__(self, only: str | None = None) -> None:
        """only: the one mesh that may be asked about; None: all of this user's."""
        self.only = only
        self.closing = threading.Event()  # set when waits of a request are to end
        self._sessions: dict[tuple[str, str], Session] = {}  # by mesh and kind of client
        self._locks: dict[tuple[str, str], threading.Lock] = {}

    def observer(self, name: str | None, kind: str) -> Session:
        """Return the session that only looks. Raises NotAttached, MeshNameError, VersionMismatch."""
        return self._open(name, kind, is_observer=True)

    def client(self, name: str | None, kind: str) -> Session:
        """Return the session of a client that acts. Raises as `observer`."""
        return self._open(name, kind, is_observer=False)

    def add(self, session: Session, kind: str) -> None:
        """Keep the session of a mesh that was started here."""
        self._sessions[session.name, kind] = session

    def check_name(self, name: str | None) -> str | None:
        """Return the name to look for. Raises MeshNameError: this server is for another mesh."""
        if self.only is not None and name not in (None, self.only):
            raise MeshNameError(f"this server was started for the mesh {self.only!r} alone, not for {name!r}")
        return self.only if name is None else name

    def close(self) -> None:
        self.closing.set()
        for session in list(self._sessions.values()):
            session.close()

    def _open(self, name: str | None, kind: str, *, is_observer: bool) -> Session:
        name = self.check_name(name)
        try:
            found = keys.find_connection(name)
        except NotAttached as error:
            raise MeshNameError(str(error)) from None
        key = (found.name, f"{kind} looks" if is_observer else kind)
        with self._locks.setdefault(key, threading.Lock()):
            session = self._sessions.get(key)
            if session is not None:
                is_open = session.ended is None and not session.connection.closed
                if is_open and session.connection.connection_info.token == found.token:
                    return session
                session.close()
            connection = SupervisorConnection(found, kind=kind, observer=is_observer)
            session = Session(connection, stop_at_exit=False)
            if session.axes is None:
                session.close()
                raise NotAttached(f"the mesh {found.name!r} has no ranks yet; ask again when it has started")
            self._sessions[key] = session
            return session
