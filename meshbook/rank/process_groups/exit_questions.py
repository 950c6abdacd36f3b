"""Questions of this rank to the supervisor: has a rank ended? Asked by threads whose collective has failed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from meshbook.wire.messages import TransportFailed
from meshbook.wire.stop_timing import REASON_TIMEOUT_S, WAIT_SLICE_S


class ExitQuestions:
    """The questions that are not answered yet. Any thread."""

    def __init__(self, rank: int, report: Callable[[TransportFailed], None]) -> None:
        """report: has the service thread send a question; does not block."""
        self._rank, self._report = rank, report
        self._numbers = itertools.count(1)
        self._answered: dict[int, threading.Event] = {}  # by number of the question

    def wait_until_reported(self, is_known: Callable[[], bool]) -> None:
        """Ask, and return when all exits until now have been reported to this rank. Blocks: REASON_TIMEOUT_S at most.

        Args:
            is_known: whether the caller has what it waits for, so that the answer does not matter.
        """
        number, answered = next(self._numbers), threading.Event()
        self._answered[number] = answered
        try:
            self._report(TransportFailed(self._rank, number))
            for _ in range(int(REASON_TIMEOUT_S / WAIT_SLICE_S)):  # turns: this process may have stood still meanwhile
                if is_known() or answered.wait(WAIT_SLICE_S):
                    break
        finally:
            del self._answered[number]

    def answer(self, number: int) -> None:
        """Have the thread that asked this go on, if it still waits. Service thread."""
        if (answered := self._answered.get(number)) is not None:
            answered.set()
