"""Automatically report a cell that waits for deadlocked actors, as hangs of ranks are reported.

The supervisor watches only what ranks run. A notebook cell that waits for an actor's reply runs nothing there, so this
process watches its own calls, and inspects the ranks when a call is not answered for a while. Only a cycle of actors is
reported, not a slow endpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from meshbook.actors.runtime.transport import Transport, unblock_signals
from meshbook.wire.messages import PendingEndpointCall

log = logging.getLogger("meshbook.actors")


class DeadlockWatch:
    """Watches the calls that code outside any actor waits for.

    Args:
        explain: runs on a separate thread; reports what a reply waits for, and returns whether it reported anything.
        after_s: age of a call at its first inspection; each further one follows at twice the age of the last.
    """

    def __init__(self, transport: Transport, explain: Callable[[PendingEndpointCall], bool], *, after_s: float) -> None:
        self._transport, self._explain, self._after_s = transport, explain, after_s
        self._is_scheduled = False
        self._check_at_s: dict[int, float] = {}  # call id -> age of the call at its next inspection
        transport.replies.on_added = self._on_call_started

    def _on_call_started(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._transport.reactor.call_later(self._after_s, self._check_calls)

    def _check_calls(self) -> None:
        """Inspect old calls. Reader thread only."""
        open_calls = self._transport.replies.awaited_replies()
        waiting = {replies[0].call: replies[0] for caller, replies in open_calls if caller is None}
        self._check_at_s = {call: age for call, age in self._check_at_s.items() if call in waiting}
        for call, awaited in waiting.items():
            if awaited.since_s >= self._check_at_s.get(call, self._after_s):
                self._check_at_s[call] = 2 * awaited.since_s  # an inspection costs the ranks some milliseconds
                threading.Thread(
                    target=self._explain_call, args=(awaited,), name="meshbook-patience", daemon=True
                ).start()
        self._is_scheduled = len(self._transport.replies) > 0
        if self._is_scheduled:
            self._transport.reactor.call_later(min(1.0, self._after_s), self._check_calls)

    def _explain_call(self, awaited: PendingEndpointCall) -> None:
        unblock_signals()  # it may print to a user-defined stream
        try:
            if self._explain(awaited):
                self._check_at_s[awaited.call] = float("inf")  # report only once
        except Exception:  # for example, the mesh has ended meanwhile; then the call fails anyway
            log.debug("an answer that does not come could not be explained", exc_info=True)
