"""Output of calls on its way to clients: merged over hosts, and limited in rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshbook.fold.lines import FoldMerger, OutputBudget
from meshbook.ids import CallId
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.wire.messages import CallOutput, FoldedItem

_FLUSH_INTERVAL_S = 0.05
_MAX_FLUSH_CHARS = 32 << 10  # characters that one flush may output; see host.agent


class OutputListener(Protocol):
    """Receives the output that is sent."""

    def __call__(self, call: str, items: tuple[FoldedItem, ...], now: float) -> None: ...


class CallOutputStream:
    """The output of one open call.

    Args:
        new_merger: returns what folds the output of several hosts; None: there is only one.
        on_sent: called with what is sent.
    """

    def __init__(
        self, call: str, client: str, new_merger: Callable[[], FoldMerger] | None, on_sent: OutputListener
    ) -> None:
        self._call, self._client, self._new_merger, self._on_sent = call, client, new_merger, on_sent
        self._merger: FoldMerger | None = None  # made with the first item: most calls print nothing
        self._done_hosts: list[int] = []
        self._budget = OutputBudget()
        self._timer_is_set = False
        self._last_items: tuple[FoldedItem, ...] = ()  # of the only host, which has finished

    def redirect(self, client: str) -> None:
        """Send what follows to another client."""
        self._client = client

    def add(self, host: int, items: tuple[FoldedItem, ...], now: float) -> list[Effect]:
        """Send output that a host reported, as far as it can be shown now."""
        if self._new_merger is None:
            return self._send(items, now)
        self._feed(host, items, now)
        return self._flush(now)

    def host_done(self, host: int, items: tuple[FoldedItem, ...], now: float) -> None:
        """Record the last output of a host; the next flush, or `finish`, contains it."""
        if self._new_merger is None:
            self._last_items = items
            return
        self._feed(host, items, now)
        self._done_hosts.append(host)
        if self._merger is not None:
            self._merger.host_done(host)

    def host_finished(self, now: float) -> list[Effect]:
        """Send what can be shown since one of several hosts has finished."""
        return self._flush(now) if self._merger is not None else []

    def timer_fired(self, now: float) -> list[Effect]:
        self._timer_is_set = False
        return self._flush(now)

    def finish(self, now: float, *notices: FoldedItem) -> tuple[FoldedItem, ...]:
        """Return the output that has not been sent, for the call's last message."""
        items = self._last_items if self._merger is None else tuple(self._merger.flush(now, final=True))
        self._last_items = ()
        last = tuple(self._budget.admit((*items, *notices), now, final=True))
        self._on_sent(self._call, last, now)
        return last

    def _feed(self, host: int, items: tuple[FoldedItem, ...], now: float) -> None:
        if self._merger is None and items and self._new_merger is not None:
            self._merger = self._new_merger()
            for done in self._done_hosts:
                self._merger.host_done(done)
        if self._merger is not None:
            self._merger.feed(host, items, now)

    def _flush(self, now: float) -> list[Effect]:
        items = () if self._merger is None else tuple(self._merger.flush(now, max_chars=_MAX_FLUSH_CHARS))
        return self._send(items, now)

    def _send(self, items: tuple[FoldedItem, ...], now: float) -> list[Effect]:
        """Send what the budget admits, and set a timer for the rest."""
        allowed = tuple(self._budget.admit(items, now))
        self._on_sent(self._call, allowed, now)
        effects: list[Effect] = []
        if allowed:
            effects.append(SendToClient(self._client, CallOutput(call=CallId(self._call), items=allowed)))
        deadlines = (self._budget.next_deadline(), self._merger.next_deadline() if self._merger is not None else None)
        times = [deadline for deadline in deadlines if deadline is not None]
        if times and not self._timer_is_set:
            self._timer_is_set = True
            effects.append(SetTimer(f"flush {self._call}", max(_FLUSH_INTERVAL_S, min(times) - now)))
        return effects


class LateOutput:
    """Output printed while no call is open, from threads that cells left behind. It is sent to all clients."""

    def __init__(self) -> None:
        self._budget = OutputBudget()
        self._waiting_call: str | None = None  # the call whose output waits for a timer

    def add(self, call: str, items: tuple[FoldedItem, ...], now: float) -> list[Effect]:
        allowed = tuple(self._budget.admit(items, now))
        effects: list[Effect] = []
        if allowed:
            effects.append(SendToClient(None, CallOutput(call=CallId(call), items=allowed)))
        deadline = self._budget.next_deadline()
        if deadline is not None and self._waiting_call is None:
            self._waiting_call = call
            effects.append(SetTimer("late", max(_FLUSH_INTERVAL_S, deadline - now)))
        return effects

    def timer_fired(self, now: float) -> list[Effect]:
        call, self._waiting_call = self._waiting_call, None
        return self.add(call, (), now) if call is not None else []
