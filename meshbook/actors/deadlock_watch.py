"""A cell waits for an actor that waits for itself: told unasked, as ranks' own hangs are.

The supervisor watches what ranks run. A cell of the notebook's that waits for an actor's answer runs nothing there, so
this process watches its own calls, and looks at the ranks when one is not answered for a while. What it finds is told
only if it is a circle of actors: an endpoint that takes its time is none.
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
        explain: asked on a thread of its own what an answer waits for, and tells people; whether there was anything.
        after_s: age of a call at which it is looked into; then again at twice that age, and so on.
    """

    def __init__(self, transport: Transport, explain: Callable[[PendingEndpointCall], bool], *, after_s: float) -> None:
        self._transport, self._explain, self._after_s = transport, explain, after_s
        self._is_scheduled = False
        self._check_at_s: dict[int, float] = {}  # age of a call, by its number, at which it is looked at again
        transport.on_call_started = self._on_call_started

    def _on_call_started(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._transport.call_later(self._after_s, self._check_calls)

    def _check_calls(self) -> None:
        """On the reading thread."""
        waiting = {
            replies[0].call: replies[0] for caller, replies in self._transport.awaited_replies() if caller is None
        }
        self._check_at_s = {call: age for call, age in self._check_at_s.items() if call in waiting}
        for call, awaited in waiting.items():
            if awaited.since_s >= self._check_at_s.get(call, self._after_s):
                self._check_at_s[call] = 2 * awaited.since_s  # a look costs the ranks some milliseconds
                threading.Thread(
                    target=self._explain_call, args=(awaited,), name="meshbook-patience", daemon=True
                ).start()
        self._is_scheduled = self._transport.has_open_calls
        if self._is_scheduled:
            self._transport.call_later(min(1.0, self._after_s), self._check_calls)

    def _explain_call(self, awaited: PendingEndpointCall) -> None:
        unblock_signals()  # what it prints may be the user's own stream
        try:
            if self._explain(awaited):
                self._check_at_s[awaited.call] = float("inf")  # once is enough
        except Exception:  # the mesh has ended meanwhile, say: then the call ends by that
            log.debug("an answer that does not come could not be explained", exc_info=True)
