"""Detect running cells that make no progress, from heartbeats alone.

Once per second a rank reports its line, how many collectives it has started, how often it has logged, and how busy its
core was. A cell that prints, logs, starts collectives or reaches new lines makes progress, and so does one whose ranks
all clearly compute. Otherwise the cell is due for a probe; this module decides when, and tracks what was already
reported. Pure: time is passed in as seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshbook.ids import Ranks

# Seconds without progress before ranks are probed. With a second snapshot 2 s later, and heartbeats that are up to 2 s
# old, the result is there within 13 s; a step of a real training loop, or loading a file, is mostly shorter.
STALL_S = 8.0
# ... if all ranks are busy: most likely they compute, which is not reported.
_BUSY_STALL_S = 60.0
# Seconds between the two snapshots of a probe; their difference shows which ranks move.
BETWEEN_PROBES_S = 2.0
# Seconds until the next probe of a cell without a certain finding; doubled each time.
_PROBE_AGAIN_S = 15.0
_MAX_PROBES = 6
# Percent of a core from which a rank counts as busy. Waiting in gloo takes 2 %, a Python loop or torch on a crowded
# machine rarely less than 40 %.
_BUSY_PERCENT = 30.0
# Lines of a cell that are stored, so that a repeating loop does not count as progress.
_MAX_LINES = 4096


def read_stall_timeout(environ: Mapping[str, str]) -> float:
    """Return MESHBOOK_STALL_S: seconds until a cell without progress is explained automatically; 0 for never."""
    try:
        return max(0.0, float(environ["MESHBOOK_STALL_S"]))
    except (KeyError, ValueError):
        return STALL_S


class Beat(NamedTuple):
    """What a heartbeat of a rank says of its progress."""

    rank: int
    line: int | None  # of the cell
    awaiting_input: bool = False
    age_s: int = 0  # whole seconds; 0 while heartbeats arrive regularly
    cpu_percent: int | None = None  # of one core
    num_collectives: int | None = None
    num_steps: int | None = None


@dataclass(frozen=True)
class CollectiveWait:
    """The oldest collective that a rank is in."""

    ranks: Ranks  # that it may wait for
    seconds: float


@dataclass
class _RankProgress:
    """One rank's progress in a call."""

    beat: Beat | None = None  # the last one
    wait: CollectiveWait | None = None
    lines: set[int | None] = field(default_factory=set)  # lines reached since the last progress
    last_progress_at: float = 0.0  # when it last printed, logged or started a collective
    last_moved_at: float = 0.0  # ... or last reached a line not in `lines`

    @property
    def is_computing(self) -> bool:
        """Whether it is busy and not waiting for others: waiting for a GPU keeps a core busy too."""
        return self.beat is not None and (self.beat.cpu_percent or 0.0) >= _BUSY_PERCENT and self.wait is None


@dataclass
class _CallProgress:
    """One running call."""

    call: str
    running: set[int]  # ranks whose part has not ended
    began_at: float
    seen: dict[int, _RankProgress] = field(default_factory=dict)  # of ranks that something was heard of since
    next_probe_at: float = 0.0  # no probe before this time
    num_probes: int = 0
    is_reported: bool = False  # a finding was reported to the user
    is_concluded: bool = False
    is_probing: bool = False

    def progress(self, rank: int) -> _RankProgress:
        """Return the progress of a rank that runs the call. Made when it is first asked for: most calls are short."""
        if (progress := self.seen.get(rank)) is None:
            progress = self.seen[rank] = _RankProgress(last_progress_at=self.began_at, last_moved_at=self.began_at)
        return progress


class StallDetector:
    """The running calls, and the last progress of each."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """Create a detector.

        Args:
            stall_s: seconds without progress before a probe; 0 for never.
        """
        self._stall_s = stall_s
        self._calls: dict[str, _CallProgress] = {}

    def call_began(self, call: str, ranks: Iterable[int], now: float) -> None:
        self._calls[call] = _CallProgress(call, set(ranks), now, next_probe_at=now + self._stall_s)

    def call_ended(self, call: str) -> None:
        self._calls.pop(call, None)

    def call_printed(self, call: str, ranks: Iterable[int], now: float) -> None:
        """Record output of a call as progress."""
        call_progress = self._calls.get(call)
        if call_progress is not None:
            for rank in ranks:
                if rank in call_progress.running:
                    self._record_progress(call_progress.progress(rank), now)

    def ranks_finished(self, call: str, ranks: Iterable[int]) -> None:
        """Remove ranks that finished their part; the others may still wait."""
        call_progress = self._calls.get(call)
        if call_progress is not None:
            call_progress.running.difference_update(ranks)

    def heartbeat(self, beat: Beat, wait: CollectiveWait | None, now: float) -> None:
        """Record the heartbeat of a rank.

        Args:
            wait: the collective that it is in, if any.
        """
        for call_progress in self._calls.values():
            if beat.rank not in call_progress.running:
                continue
            rank = call_progress.progress(beat.rank)
            previous, rank.beat, rank.wait = rank.beat, beat, wait
            if previous is not None and _counts(previous) != _counts(beat):
                self._record_progress(rank, now)
            if beat.line not in rank.lines and len(rank.lines) < _MAX_LINES:
                rank.lines.add(beat.line)
                rank.last_moved_at = now

    def _record_progress(self, rank: _RankProgress, now: float) -> None:
        rank.last_progress_at = rank.last_moved_at = now
        rank.lines.clear()

    def start_due_probes(self, now: float) -> list[str]:
        """Return the calls to probe now. Each is returned once, until `probe_ended`."""
        if not self._stall_s:
            return []
        calls = []
        for call_progress in self._calls.values():
            if (
                not call_progress.is_probing
                and not call_progress.is_concluded
                and now >= call_progress.next_probe_at
                and self._is_stalled(call_progress, now)
            ):
                call_progress.is_probing = True
                call_progress.num_probes += 1
                calls.append(call_progress.call)
        return calls

    def is_stalled(self, call: str, now: float) -> bool:
        """Whether a call makes no progress."""
        call_progress = self._calls.get(call)
        return call_progress is not None and self._is_stalled(call_progress, now)

    def probe_ended(self, call: str, *, is_reported: bool, is_certain: bool, now: float) -> None:
        """Record the result of a probe.

        Args:
            is_reported: a finding was reported to the user.
            is_certain: the finding was certain, so nothing remains to be added.
        """
        call_progress = self._calls.get(call)
        if call_progress is None:
            return
        call_progress.is_probing = False
        call_progress.is_reported = call_progress.is_reported or is_reported
        call_progress.is_concluded = call_progress.is_concluded or is_certain or call_progress.num_probes >= _MAX_PROBES
        call_progress.next_probe_at = now + _PROBE_AGAIN_S * 2 ** (call_progress.num_probes - 1)

    def may_report(self, call: str, *, is_certain: bool) -> bool:
        """Whether a finding on this call may be reported to the user: once, and once more if it is certain."""
        call_progress = self._calls.get(call)
        if call_progress is None or call_progress.is_concluded:
            return False
        return is_certain or not call_progress.is_reported

    def _is_stalled(self, call_progress: _CallProgress, now: float) -> bool:
        ranks = {rank: call_progress.progress(rank) for rank in call_progress.running}
        if not ranks or any(rank.beat is not None and rank.beat.awaiting_input for rank in ranks.values()):
            return False  # the prompt is visible under the cell: the user knows that it waits for input
        progress_since = now - self._stall_s
        for rank in ranks.values():
            if rank.beat is not None and rank.beat.age_s >= self._stall_s:
                return True  # it keeps the GIL, or is stopped
            if rank.wait is not None and rank.wait.seconds >= self._stall_s:
                others = [ranks[other] for other in rank.wait.ranks if other in ranks]
                if all(other.last_progress_at <= progress_since for other in others):
                    return True
        if any(rank.last_moved_at > progress_since for rank in ranks.values()):
            return False
        if all(rank.is_computing for rank in ranks.values()):
            return all(rank.last_moved_at <= now - max(_BUSY_STALL_S, self._stall_s) for rank in ranks.values())
        return True


def _counts(beat: Beat) -> tuple[object, ...]:
    """Return what changes only if the rank makes progress."""
    return beat.num_collectives, beat.num_steps, beat.awaiting_input
