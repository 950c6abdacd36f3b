"""Which pages are open on a notebook, as far as their kernel can know: a page that is reloaded has a new session.

A page drops the output of cells that another one sent, also of the one that it was before it was reloaded. The kernel
does not hear of a reload, but a new page introduces itself, with requests of a session that was never seen: at once, or
some seconds later, if the browser or the network is slow. The cell that ran may have ended by then.
"""

from __future__ import annotations

from collections import deque

from meshbook.clock import monotonic
from meshbook.ids import format_ranks

_MAX_SESSIONS = 1000
_MAX_CELLS = 100

# Seconds that a page may take from its loading to its first request.
_LATE_S = 10.0


class PageSessions:
    """The sessions that have sent anything, and the cells that ran while others were open.

    `saw` is called on the shell channel's thread, the other methods on the main thread.
    """

    def __init__(self) -> None:
        self._running = 0  # which of the cells runs, counted from 1; 0: none
        self._num_cells = 0
        self._ended_at = float("-inf")  # of the last cell
        self._seen: dict[str, int] = {}  # session -> the cell that ran when it was loaded, perhaps; 0: none did
        self._cells: deque[tuple[int, int, str]] = deque(maxlen=_MAX_CELLS)  # on ranks: count, number, session

    def saw(self, session: str) -> None:
        """Record that a message of a session has arrived."""
        if session not in self._seen:
            if len(self._seen) >= _MAX_SESSIONS:
                self._seen.pop(next(iter(self._seen)))
            is_perhaps_late = not self._running and monotonic() - self._ended_at < _LATE_S
            self._seen[session] = self._num_cells if is_perhaps_late else self._running

    def cell_began(self, session: str) -> tuple[int, ...]:
        """Record that a cell of this session begins.

        Returns:
            The numbers of the ranks' cells whose output this session's page has missed, once: those that other
            sessions ran from the one on that ran when this session's page was loaded, or may have.
        """
        self.saw(session)
        since = self._seen.pop(session, 0)
        self._seen[session] = 0
        self._num_cells += 1
        self._running = self._num_cells
        return tuple(number for count, number, by in self._cells if since and count >= since and by != session)

    def cell_ended(self, session: str, number: int | None) -> None:
        """Record that the running cell has ended; `number`: of a cell on the ranks."""
        if number is not None:
            self._cells.append((self._running, number, session))
        self._running, self._ended_at = 0, monotonic()


def missed_output_note(numbers: tuple[int, ...]) -> str:
    """Return the note for a page that has missed the output of these cells."""
    cells, whose = (f"cell {numbers[0]}", "its") if len(numbers) == 1 else (f"cells {format_ranks(numbers)}", "their")
    ways = ", ".join(f"%mesh history {number}" for number in numbers[:3]) + (", …" if len(numbers) > 3 else "")
    return f"the page was opened or reloaded while {cells} ran, or just after; {whose} whole output: {ways}"
