"""Answers to ranks whose collectives have failed: has a rank ended?

A connection breaks before the exit of the process behind it is reported, on a busy machine by seconds. So hosts are
asked to look at their processes, and a rank is answered when what they have found has been reported to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.supervisor.call_table import ActiveCall, CallTable, Parts
from meshbook.supervisor.effects import Effect
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages


class ExitChecks:
    """Opens the checks as calls of the supervisor's own, one at a time: each answers all who asked before it began.

    Attributes:
        report_handlers: by type of report, as `MeshState` calls them.
    """

    def __init__(self, ranks: RankTable, calls: CallTable) -> None:
        self._ranks, self._calls = ranks, calls
        self._waiting: list[messages.TransportFailed] = []  # for the next check
        self._num_checks = 0
        self._is_checking = False
        self.report_handlers: dict[type, Callable[[int, Any, float], list[Effect]]] = {
            messages.TransportFailed: lambda _, report, now: self._asked(report, now)
        }

    def _asked(self, report: messages.TransportFailed, now: float) -> list[Effect]:
        self._waiting.append(report)
        return [] if self._is_checking else self._check(now)

    def _check(self, now: float) -> list[Effect]:
        asking, self._waiting = self._waiting, []

        def checked(check: ActiveCall, parts: Parts, now: float) -> list[Effect]:
            self._is_checking = False
            answers: list[Effect] = [
                self._ranks.send((one.rank,), messages.ExitsChecked((one.rank,), one.number))
                for one in asking
                if one.rank in self._ranks
            ]
            return [*answers, *(self._check(now) if self._waiting else [])]

        self._is_checking = True
        self._num_checks += 1
        ranks = self._ranks.all
        check = self._calls.open(f"exits-{self._num_checks}", ranks, now, checked, label="exits", is_main_thread=False)
        return [self._ranks.send(ranks, messages.CheckExits(check.id, ranks))]
