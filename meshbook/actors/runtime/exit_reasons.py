"""How processes have exited, which may be reported shortly after their sockets have closed."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.wire.messages import NodeAddress


class ExitReasons:
    """Why processes have exited, by pid. Any thread."""

    def __init__(self) -> None:
        self.delay_s = 0.0  # how late a report may be; 0: there are no reports
        self._reason_by_pid: BoundedDict[int, str] = BoundedDict()
        self._ended_with_mesh: BoundedDict[int, bool] = BoundedDict()
        self._changed = threading.Condition()

    def record(self, pid: int, reason: str) -> None:
        with self._changed:
            self._reason_by_pid[pid] = reason
            self._changed.notify_all()

    def record_mesh_end(self, pids: Iterable[int], reason: str) -> None:
        """Record that all processes of a mesh have ended with it."""
        with self._changed:
            for pid in pids:
                self._ended_with_mesh[pid] = True
                self._reason_by_pid.setdefault(pid, f"has ended with its mesh: {reason}")
            self._changed.notify_all()

    def has_mesh_ended(self, address: NodeAddress | None) -> bool:
        """Return whether the process at `address` ended with the whole mesh."""
        return address is not None and address.pid in self._ended_with_mesh

    def is_known(self, address: NodeAddress) -> bool:
        """Return whether the process at `address` was reported to have exited."""
        return address.pid in self._reason_by_pid

    def describe(self, address: NodeAddress | None, *, wait: bool) -> str:
        """Return why the process at `address` does not reply. With `wait`, waits up to `delay_s` for a report."""
        if address is None:
            return "its process has ended"
        with self._changed:
            if wait and self.delay_s:
                self._changed.wait_for(lambda: address.pid in self._reason_by_pid, self.delay_s)
            reason = self._reason_by_pid.get(address.pid)
        return f"its process (pid {address.pid}) {reason or 'has ended'}"
