"""A bound on what an agent may have ranks compute: their number times minutes, over all its cells."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from meshbook.controller.session import Session
from meshbook.errors import MeshbookError, UsageError
from meshbook.wire import messages

log = logging.getLogger("meshbook.gateway")

# Seconds between two looks at which ranks are at work. A cell that ends between them is charged what it took.
_LOOK_S = 0.5
# Looks between two Stops of a cell that goes on after one, and how many it gets: each is a line in the history.
_LOOKS_BETWEEN_STOPS = 10
_MAX_STOPS = 3


@dataclass
class _OpenCell:
    session: Session
    command: messages.RunCell
    rank_s: float = 0.0  # as seen until now
    num_looks_over: int = 0  # since the budget was used up

    @property
    def is_stop_due(self) -> bool:
        stops, rest = divmod(self.num_looks_over, _LOOKS_BETWEEN_STOPS)
        return rest == 0 and stops < _MAX_STOPS


class RankMinutes:
    """Counts the rank-minutes of cells, refuses new cells when they are used up, and interrupts those that run then.

    A rank counts while it works on a cell, and not while the cell waits in its queue.
    """

    def __init__(self, minutes: float) -> None:
        self._limit_s = minutes * 60
        self._ended_s = 0.0
        self._cells: dict[str, _OpenCell] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def used_minutes(self) -> float:
        with self._lock:
            return (self._ended_s + sum(cell.rank_s for cell in self._cells.values())) / 60

    def describe(self) -> str:
        """Return the sum: `0.52 of 10 rank-minutes used`."""
        return f"{self.used_minutes:.3g} of {self._limit_s / 60:g} rank-minutes used"

    def check(self, num_ranks: int) -> None:
        """Raise UsageError if nothing is left for a cell on so many ranks."""
        left = self._limit_s / 60 - self.used_minutes
        if left <= 0:
            raise UsageError(
                f"a cell on {num_ranks} ranks needs rank-minutes, and {self.describe()}, so {max(left, 0):g} are left; "
                "nothing was run. Whoever started this server can give more: meshbook mcp --rank-minutes N"
            )

    def began(self, session: Session, command: messages.RunCell, future: Future[Any]) -> None:
        """Count a cell that was sent."""
        with self._lock:
            self._cells[command.call] = _OpenCell(session, command)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="meshbook-budget", daemon=True)
                self._watcher.start()
        future.add_done_callback(lambda done: self._ended(command, done))

    def close(self) -> None:
        """Interrupt the cells that run: nobody counts them any longer."""
        self._closing.set()
        with self._lock:
            cells = list(self._cells.values())
        for cell in cells:
            _interrupt(cell)

    def _ended(self, command: messages.RunCell, done: Future[Any]) -> None:
        with self._lock:
            cell = self._cells.pop(command.call, None)
            if cell is None:
                return
            seconds = cell.rank_s
            if done.exception() is None:
                finished: messages.CallFinished = done.result()
                if finished.rank_seconds is not None:
                    seconds = sum(finished.rank_seconds.values())
                else:
                    seconds = max(seconds, finished.seconds * len(command.ranks))
            self._ended_s += seconds

    def _watch(self) -> None:
        """Count the ranks at work until `close`."""
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                cells = list(self._cells.values())
            for cell in cells:
                self._guard(self._count, cell)
            if self.used_minutes * 60 >= self._limit_s:
                for cell in cells:
                    if cell.is_stop_due:
                        self._guard(_interrupt, cell)
                    cell.num_looks_over += 1

    def _count(self, cell: _OpenCell) -> None:
        info = cell.session.status()
        cell.rank_s += _LOOK_S * sum(rank.call == cell.command.call for rank in info.ranks)

    def _guard(self, act: Callable[[_OpenCell], None], cell: _OpenCell) -> None:
        try:
            act(cell)
        except MeshbookError as error:  # the supervisor is busy, or the mesh has ended
            log.warning("the rank-minutes of cell %s cannot be counted now: %s", cell.command.execution_count, error)


def _interrupt(cell: _OpenCell) -> None:
    if cell.session.ended is None and not cell.session.connection.closed:
        cell.session.interrupt(cell.command.ranks, target=cell.command.call)
