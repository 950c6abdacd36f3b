"""Whether a running cell still makes progress, as far as that shows without asking anybody.

Once per second a rank tells its line, how many collectives it has begun, how often it has logged, how busy its core
was. A cell that prints, logs, begins collectives or moves to lines it was not at before is left alone, and so is one
whose ranks all plainly compute. Otherwise somebody should look; this says when, and how much was told already. Pure:
time comes in as seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from meshbook.ids import Ranks

# Seconds without progress before ranks are looked at. With a second look 2 s later, and beats that are up to 2 s old,
# an answer is there within 13 s; a step of a real training loop, or loading a file, is mostly shorter.
STALL_S = 8.0
# ... when all ranks are busy: they compute, most likely, and nobody is told that.
_BUSY_STALL_S = 60.0
# Seconds between the two looks, from which it shows who moves.
BETWEEN_LOOKS_S = 2.0
# Seconds until the next look at a cell in which nothing certain was found; doubled each time.
_LOOK_AGAIN_S = 15.0
_LOOKS = 6
# Percent of a core from which a rank counts as busy. Waiting in gloo takes 2 %, a Python loop or torch on a crowded
# machine rarely less than 40 %.
_BUSY_PERCENT = 30.0
# Lines of a cell that are remembered, so that a loop that goes round is not taken for progress.
_LINES = 4096


def wanted_stall_s(environ: Mapping[str, str]) -> float:
    """MESHBOOK_STALL_S: seconds after which a cell without progress is explained unasked; 0 for never."""
    try:
        return max(0.0, float(environ["MESHBOOK_STALL_S"]))
    except (KeyError, ValueError):
        return STALL_S


@dataclass(frozen=True)
class Pulse:
    """What a rank showed of itself with its last beat."""

    rank: int
    line: int | None
    num_collectives: int | None
    steps: int | None
    cpu_percent: float | None
    beat_age_s: float | None
    asking: bool = False
    waits_for: Ranks = ()  # the group of the oldest collective that it is in
    waits_s: float | None = None  # ... for how long


@dataclass
class _Rank:
    """One rank's part of a call."""

    pulse: Pulse | None = None
    lines: set[int | None] = field(default_factory=set)  # where it was since it last did something
    did_at: float = 0.0  # when it last printed, logged or began a collective
    moved_at: float = 0.0  # ... or was at a line where it had not been since


@dataclass
class _Watch:
    """One call that runs."""

    call: str
    ranks: dict[int, _Rank]
    began_at: float
    look_at: float = 0.0  # not before then
    num_looks: int = 0
    told: bool = False  # the user knows something
    told_surely: bool = False
    looking: bool = False


class Stalls:
    """The calls that run, and when each was last seen to move."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """
        Args:
            stall_s: seconds without progress that are looked into; 0 for never.
        """
        self._stall_s = stall_s
        self._watches: dict[str, _Watch] = {}

    def began(self, call: str, ranks: Iterable[int], now: float) -> None:
        self._watches[call] = _Watch(
            call, {rank: _Rank(did_at=now, moved_at=now) for rank in ranks}, now, look_at=now + self._stall_s
        )

    def ended(self, call: str) -> None:
        self._watches.pop(call, None)

    def printed(self, call: str, ranks: Iterable[int], now: float) -> None:
        """Output of a call came."""
        watch = self._watches.get(call)
        if watch is not None:
            for rank in ranks:
                if rank in watch.ranks:
                    self._did(watch.ranks[rank], now)

    def finished(self, call: str, ranks: Collection[int], now: float) -> None:
        """Ranks are done with their part; the others have that much more to wait for."""
        watch = self._watches.get(call)
        if watch is not None:
            for rank in [rank for rank in watch.ranks if rank in ranks]:
                del watch.ranks[rank]

    def beat(self, pulse: Pulse, now: float) -> None:
        """A rank told of itself."""
        for watch in self._watches.values():
            rank = watch.ranks.get(pulse.rank)
            if rank is None:
                continue
            before, rank.pulse = rank.pulse, pulse
            if before is not None and (
                before.num_collectives != pulse.num_collectives
                or before.steps != pulse.steps
                or before.asking != pulse.asking
            ):
                self._did(rank, now)
            if pulse.line not in rank.lines and len(rank.lines) < _LINES:
                rank.lines.add(pulse.line)
                rank.moved_at = now

    def _did(self, rank: _Rank, now: float) -> None:
        rank.did_at = rank.moved_at = now
        rank.lines.clear()

    def due(self, now: float) -> list[str]:
        """Calls that somebody should look at now. Each is told once, until `looked`."""
        if not self._stall_s:
            return []
        found = []
        for watch in self._watches.values():
            if not watch.looking and not watch.told_surely and now >= watch.look_at and self._stands(watch, now):
                watch.looking = True
                watch.num_looks += 1
                found.append(watch.call)
        return found

    def stands(self, call: str, now: float) -> bool:
        """Whether a call makes no progress."""
        watch = self._watches.get(call)
        return watch is not None and self._stands(watch, now)

    def looked(self, call: str, *, told: bool, surely: bool, now: float) -> None:
        """Somebody looked.

        Args:
            told: and the user was told what was seen.
            surely: which was certain; there is nothing to add.
        """
        watch = self._watches.get(call)
        if watch is None:
            return
        watch.looking = False
        watch.told = watch.told or told
        watch.told_surely = watch.told_surely or surely or watch.num_looks >= _LOOKS
        watch.look_at = now + _LOOK_AGAIN_S * 2 ** (watch.num_looks - 1)

    def may_tell(self, call: str, *, sure: bool) -> bool:
        """Whether the user may still be told something of this call: once, and once more what is certain."""
        watch = self._watches.get(call)
        return watch is not None and not watch.told_surely and (sure or not watch.told)

    def _stands(self, watch: _Watch, now: float) -> bool:
        ranks = watch.ranks
        if not ranks or any(rank.pulse is not None and rank.pulse.asking for rank in ranks.values()):
            return False  # the question stands under the cell: the user knows whose turn it is
        since = now - self._stall_s
        for rank in ranks.values():
            pulse = rank.pulse
            if pulse is None:
                continue
            if (pulse.beat_age_s or 0.0) >= self._stall_s:
                return True  # it keeps the GIL, or is stopped
            if pulse.waits_s is not None and pulse.waits_s >= self._stall_s:
                others = [ranks[other] for other in pulse.waits_for if other in ranks]
                if all(other.did_at <= since for other in others):
                    return True
        if any(rank.moved_at > since for rank in ranks.values()):
            return False
        if all(_computes(rank.pulse) for rank in ranks.values()):
            return all(rank.moved_at <= now - max(_BUSY_STALL_S, self._stall_s) for rank in ranks.values())
        return True


def _computes(pulse: Pulse | None) -> bool:
    """Busy, and not because it waits for others: a GPU's wait keeps a core busy too."""
    return pulse is not None and (pulse.cpu_percent or 0.0) >= _BUSY_PERCENT and pulse.waits_s is None
