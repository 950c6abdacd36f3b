"""The end of the allocation that a mesh's machines are in, such as the time limit of a job of Slurm. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from meshbook.ids import Ranks
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.wire import messages

# Seconds before the end at which users hear of it: enough for a checkpoint. SIGTERM comes a minute before the end.
_WARN_S = 300.0


class Allocation:
    """Knows when it ends, and has all clients warned once.

    Attributes:
        ends_at: wall clock; None: there is no end, or it is not known.
    """

    def __init__(self, ranks: Callable[[], Ranks], saved_names: Callable[[], tuple[str, ...]]) -> None:
        """saved_names: returns what is saved when SIGTERM comes."""
        self._ranks, self._saved_names = ranks, saved_names
        self.ends_at: float | None = None
        self._is_warned = False

    def ends(self, at: float | None, left_s: float) -> list[Effect]:
        """Handle an end that is known now, or has been moved."""
        self.ends_at = at
        if at is None:
            return []
        self._is_warned &= left_s <= _WARN_S
        return [SetTimer(f"allocation {at}", max(0.0, left_s - _WARN_S))]

    def timer_fired(self, at: str) -> list[Effect]:
        """Warn, if it still ends at this time."""
        if at != str(self.ends_at) or self._is_warned:
            return []
        self._is_warned = True
        names = ", ".join(self._saved_names())
        saved = f"before, {names} will be saved" if names else "%mesh checkpoint PATH NAMES saves what ranks hold"
        when = f"{datetime.fromtimestamp(float(at)):%H:%M:%S}"
        text = f"the job of this mesh comes to its time limit at {when}, and its ranks end; {saved}"
        return [SendToClient(None, messages.MeshAnnounced(self._ranks(), text))]
