"""How processes have exited, which may be reported after their sockets have closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.wire.messages import NodeAddress
from meshbook.wire.stop_timing import ASK_REASON_AFTER_S, REASON_TIMEOUT_S


class ExitReasons:
    """Why processes have exited, by node. Any thread.

    Attributes:
        ask: has it looked whether the process of a node has ended, and calls a function, perhaps at once, when its exit
            has been recorded or it has not ended. None: exits are not reported to this process.
        ask_after_s: exits are reported unasked, and usually within this time.
    """

    def __init__(self) -> None:
        self.ask: Callable[[str, Callable[[], None]], None] | None = None
        self.ask_after_s = ASK_REASON_AFTER_S
        self._reason_by_node: BoundedDict[str, str] = BoundedDict()
        self._ended_with_mesh: BoundedDict[str, bool] = BoundedDict()
        self._changed = threading.Condition()

    def record(self, node: str, reason: str) -> None:
        with self._changed:
            self._reason_by_node[node] = reason
            self._changed.notify_all()

    def forget(self, node: str) -> None:
        """A process runs of which an end was recorded: its mesh was left, and attached again."""
        with self._changed:
            self._reason_by_node.pop(node, None)

    def record_mesh_end(self, nodes: Iterable[str], reason: str) -> None:
        """Record that all processes of a mesh have ended with it."""
        with self._changed:
            for node in nodes:
                self._ended_with_mesh[node] = True
                self._reason_by_node.setdefault(node, f"has ended with its mesh: {reason}")
            self._changed.notify_all()

    def has_mesh_ended(self, address: NodeAddress | None) -> bool:
        """Return whether the process at `address` ended with the whole mesh."""
        return address is not None and address.node in self._ended_with_mesh

    def is_known(self, address: NodeAddress) -> bool:
        """Return whether the process at `address` was reported to have exited."""
        return address.node in self._reason_by_node

    def reason_of(self, node: str) -> str:
        """Return what was recorded of a process, "was killed by SIGKILL"; "" if nothing was."""
        return self._reason_by_node.get(node) or ""

    def check(self, address: NodeAddress) -> threading.Event:
        """Have it looked whether the process at `address` has ended. Returns an event, which is set afterwards."""
        checked = threading.Event()

        def done() -> None:
            checked.set()
            with self._changed:
                self._changed.notify_all()

        if self.ask is None:
            checked.set()
        else:
            self.ask(address.node, done)
        return checked

    def describe(self, address: NodeAddress | None, *, wait: bool) -> str:
        """Return why the process at `address` does not reply. With `wait`, blocks until that has been reported."""
        if address is None:
            return "its process has ended"
        if wait and self.ask is not None:
            self._wait_until_reported(address)
        return f"its process (pid {address.pid}) {self.reason_of(address.node) or 'has ended'}"

    def _wait_until_reported(self, address: NodeAddress) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self.is_known(address), self.ask_after_s):
                return
        checked = self.check(address)
        with self._changed:
            self._changed.wait_for(lambda: self.is_known(address) or checked.is_set(), REASON_TIMEOUT_S)
