"""An actor's `__init__`: it ends, it fails, or it is given up because the actor is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.calls import MessageKey
from meshbook.actors.runtime.interrupts import Interruptible
from meshbook.wire import messages

INIT_KEY: Final[MessageKey] = (-1, -1)  # message key of `__init__`

# Seconds that `__init__` has to end once its actor is stopped; then it is interrupted, and a second later given up, as
# it sleeps or is in C code. A process that exits interrupts it earlier, and gives its actors as long.
_STOP_GRACE_S: Final = 4.0
_GIVE_UP_S: Final = 1.0


class Construction:
    """How the `__init__` of one actor ends. Any thread.

    Attributes:
        done: set when it has ended, in any way.
        failure: why there is no actor; None while it runs, and if it returned.
    """

    def __init__(
        self, name: str, interruptible: Interruptible, call_later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """call_later: calls a function after so many seconds, on any thread."""
        self._name, self._interruptible, self._call_later = name, interruptible, call_later
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.failure: messages.ActorFailure | None = None

    def end(self, failure: messages.ActorFailure | None) -> bool:
        """Record how it has ended; return False if it had ended before."""
        with self._lock:
            if self.done.is_set():
                return False
            self.failure = failure
            self.done.set()
            return True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in it if it runs, as soon as it runs Python code."""
        self._interruptible.interrupt(INIT_KEY)

    def end_soon(self, on_given_up: Callable[[str], None]) -> None:
        """End it if it does not end by itself; call `on_given_up(reason)` if it cannot be ended. Does not wait."""

        def interrupt() -> None:
            if not self.done.is_set():
                self.interrupt()
                self._call_later(_GIVE_UP_S, give_up)

        def give_up() -> None:
            reason = "it was stopped, and its __init__ did not end"
            if self.end(faults.stopped_failure(self._name, reason)):
                on_given_up(reason)

        if not self.done.is_set():
            self._call_later(_STOP_GRACE_S, interrupt)


def describe_init_failure(error: BaseException, class_name: str, name: str) -> messages.ActorFailure:
    """Return the reply to all messages for an actor whose `__init__` has raised."""
    described = faults.describe_exception(error, call=0, kind="init")
    text = f"{class_name}.__init__ failed, so there is no actor {name!r}: {described.ename}: {described.text}"
    return messages.ActorFailure(0, "init", described.ename, text, described.traceback, None)
