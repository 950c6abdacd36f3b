"""What many ranks print, folded while they print it: equal lines once, with the set of ranks that said them.

`LineFolder` takes the ranks' output as they wrote it and is the host's; `FoldMerger` takes what hosts have folded and
is the supervisor's; `OutputBudget` keeps a flood from the front end. All three are told the time and never wait.

Each rank's own order is kept. A line waits for the other ranks for at most `max_age_s`. Lines that differ in numbers
only become one, with the range: `step 10 loss 2.31…2.35 (rank 2: 97.4)`. Every queue has a bound; what is beyond it is
counted, not kept.

A line that is still being written after `max_age_s`, be it a progress bar or an unfinished print, goes out as a live
line: its state for now, at most 10 times a second. What a reader keeps of live lines is simple. A live line takes the
place of what its ranks had on that stream, even where that was shared with other ranks; an ordinary line takes its
ranks out of the live lines of its stream; at the end of the call those left are dropped. A live line of nested bars has
several rows, joined by line ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from meshbook.fold.align import MAX_OVERFLOW, Aligner, folded_line, said
from meshbook.fold.cuts import Cut
from meshbook.fold.numbers import Member, fold_all, live_shape_of, shape_of
from meshbook.fold.rows import Pen
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, OutputItem, RankDisplay, Text

# Seconds that a line waits for the other ranks to say it too. Long enough for ranks that were freed by one collective
# to get to their print on a loaded machine, short enough to look immediate.
MAX_AGE_S = 0.1
# Characters of one rank's output that wait to be folded. A screen holds some 10,000.
QUEUE_LIMIT_CHARS = 256 * 1024
# Seconds between two states of live lines. tqdm's own default.
LIVE_INTERVAL_S = 0.1

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class LineFolder:
    """Output of ranks during one call, folded.

    Args:
        ranks: everyone who takes part in the call.
        limit_chars: of one rank's text that waits; the middle of what is more at a flush is dropped, and a notice says
            so. Between two flushes the text may grow to 4 times that.
        mergeable: lines keep each rank's numbers, for a `FoldMerger` to fold them on.
    """

    def __init__(
        self, ranks: Iterable[int], *, limit_chars: int = QUEUE_LIMIT_CHARS, mergeable: bool = False
    ) -> None:
        members = sorted(set(ranks))
        self._limit = limit_chars
        self._pens: dict[int, dict[Stream, Pen]] = {rank: {stream: Pen() for stream in STREAMS} for rank in members}
        self._aligner = Aligner(
            ((rank, (rank,)) for rank in members), several=False, limit_chars=limit_chars, mergeable=mergeable
        )
        self._live = _LiveLines(mergeable)

    def feed(self, rank: int, items: Iterable[OutputItem], now: float) -> None:
        """Take what a rank wrote, in the order it wrote it.

        Raises:
            KeyError: the rank takes no part in this call.
        """
        pieces: list[str] = []  # of one stream, not yet written
        stream: Stream = "stdout"
        for item in items:
            if isinstance(item, Text):
                if item.stream != stream and pieces:
                    self._write(rank, stream, "".join(pieces), now)
                    pieces.clear()
                stream = item.stream
                pieces.append(item.text)
                continue
            if pieces:
                self._write(rank, stream, "".join(pieces), now)
                pieces.clear()
            if not (isinstance(item, Display) and item.update):
                self._close_rows(rank, now, bars=False)
            self._aligner.add_item(rank, item, now)
        if pieces:
            self._write(rank, stream, "".join(pieces), now)

    def rank_done(self, rank: int) -> None:
        """The rank will say nothing more in this call; the others need not wait for it."""
        self._aligner.finish(rank)

    def flush(
        self, now: float, final: bool = False, max_age_s: float = MAX_AGE_S, max_chars: int | None = None
    ) -> list[FoldedItem]:
        """What can be shown by now, in order. With `final`, everything; nothing may be fed after that.

        The last line of a call that has no line end comes with `end=""`.

        Args:
            max_chars: about how much text to give at most; the rest waits, and is cut where it grows beyond its bound.
                Text that a reader would not be sent anyway then costs next to nothing. Not heeded when `final`.
        """
        take_chars = None if final else max_chars
        out = self._aligner.take(now, final=final, max_age_s=max_age_s, max_chars=take_chars)
        self._live.withdraw(out)
        if not final:
            out += self._live_lines(now, max_age_s)
            return out
        for rank in self._pens:
            self._close_rows(rank, now, bars=True)
        rest = self._aligner.take(now, final=True, max_age_s=max_age_s)
        if rest and isinstance(rest[-1], Line):
            rest[-1] = msgspec.structs.replace(rest[-1], end="")
        return out + rest

    def next_deadline(self, max_age_s: float = MAX_AGE_S) -> float | None:
        """When `flush` will have something to give even if nothing more is fed; None: not before something is fed.

        Lines that all ranks have said can go at once, so flush after feeding too.
        """
        oldest = self._aligner.oldest()
        times = [] if oldest is None else [oldest + max_age_s]
        for rank, pens in self._pens.items():
            if self._aligner.is_empty(rank):
                times += [
                    max(pen.since + max_age_s, self._live.next_at)
                    for pen in pens.values()
                    if pen.since is not None and (pen.changed or self._live.stale)
                ]
        return min(times, default=None)

    def _write(self, rank: int, stream: Stream, text: str, now: float) -> None:
        pen = self._pens[rank][stream]
        if len(text) > MAX_OVERFLOW * self._limit:
            # More than may wait, in one piece: not even parted into lines.
            head = text.rfind("\n", 0, self._limit // 2) + 1
            tail = text.find("\n", len(text) - self._limit // 2) + 1
            if 0 < head < tail:
                self._aligner.add_lines(rank, stream, pen.write(text[:head], now), now)
                self._aligner.add_cut(rank, text.count("\n", head, tail), tail - head, now)
                text = text[tail:]
        lines = pen.write(text, now)
        if lines:
            self._aligner.add_lines(rank, stream, lines, now)

    def _close_rows(self, rank: int, now: float, *, bars: bool) -> None:
        """End the rows that are being written. A progress bar goes on below a display, other text does not."""
        for stream, pen in self._pens[rank].items():
            if pen.since is not None and (bars or not pen.is_bar):
                self._aligner.add_lines(rank, stream, pen.finish(), now)

    def _live_lines(self, now: float, max_age_s: float) -> list[FoldedItem]:
        if now < self._live.next_at:
            return []
        open_pens = [
            (rank, stream, pen)
            for rank, pens in self._pens.items()
            for stream, pen in pens.items()
            if pen.since is not None and pen.since + max_age_s <= now and self._aligner.is_empty(rank)
        ]
        if not self._live.stale and not any(pen.changed for _, _, pen in open_pens):
            return []
        states: list[tuple[Stream, Member]] = []
        for rank, stream, pen in open_pens:
            pen.changed = False
            text = pen.state()
            if text or self._live.shows(rank, stream):
                states.append((stream, Member((rank,), text, shape_of(text).numbers)))
        return self._live.refresh(states, now)


class FoldMerger:
    """Output of several hosts during one call, each host's already folded, made one.

    Args:
        hosts: each host's ranks in the call.
        limit_chars: of one host's text that waits.
        mergeable: lines keep each rank's numbers, for another merger above this one.
    """

    def __init__(
        self, hosts: Mapping[int, Ranks], *, limit_chars: int = 4 * QUEUE_LIMIT_CHARS, mergeable: bool = False
    ) -> None:
        self._aligner = Aligner(hosts.items(), several=True, limit_chars=limit_chars, mergeable=mergeable)
        self._states: dict[int, list[tuple[Stream, Member]]] = {host: [] for host in hosts}
        self._live = _LiveLines(mergeable)
        self._live_changed = False

    def feed(self, host: int, items: Iterable[FoldedItem], now: float) -> None:
        """Take what a host's `LineFolder(mergeable=True)` gave, in order.

        Raises:
            KeyError: the host takes no part in this call.
        """
        for item in items:
            if isinstance(item, RankDisplay):
                self._aligner.add_item(host, item.item, now, item.ranks)
                continue
            if item.live or self._states[host]:
                self._take_state(host, item)
            if not item.live:
                self._aligner.add_line(host, item, now)

    def host_done(self, host: int) -> None:
        """The host will say nothing more in this call."""
        self._aligner.finish(host)

    def flush(
        self, now: float, final: bool = False, max_age_s: float = MAX_AGE_S, max_chars: int | None = None
    ) -> list[FoldedItem]:
        """What can be shown by now, in order; see `LineFolder.flush`."""
        take_chars = None if final else max_chars
        out = self._aligner.take(now, final=final, max_age_s=max_age_s, max_chars=take_chars)
        self._live.withdraw(out)
        if final:
            if out and out[-1] is self._aligner.unended:
                out[-1] = msgspec.structs.replace(self._aligner.unended, end="")
        elif now >= self._live.next_at and (self._live_changed or self._live.stale):
            states = [
                state for host, host_states in self._states.items() if self._aligner.is_empty(host)
                for state in host_states
            ]  # fmt: skip
            self._live_changed = len(states) < sum(map(len, self._states.values()))
            out += self._live.refresh(states, now)
        return out

    def next_deadline(self, max_age_s: float = MAX_AGE_S) -> float | None:
        """When `flush` will have something to give even if nothing more is fed; None: not before something is fed."""
        oldest = self._aligner.oldest()
        times = [] if oldest is None else [oldest + max_age_s]
        if (self._live_changed or self._live.stale) and any(
            states and self._aligner.is_empty(host) for host, states in self._states.items()
        ):
            times.append(self._live.next_at)
        return min(times, default=None)

    def _take_state(self, host: int, line: Line) -> None:
        """Hold a live line in place of what its ranks had; an ordinary one only takes that away."""
        ranks = set(line.ranks)
        states = self._states[host]
        left = [one for one in states if one[0] != line.stream or ranks.isdisjoint(one[1].ranks)]
        if line.live:
            left.append((line.stream, said(line)[1]))
        self._states[host] = left
        self._live_changed = True


class _LiveLines:
    """Lines that are being written: which were shown last, so that only what is new goes out."""

    def __init__(self, mergeable: bool) -> None:
        self._mergeable = mergeable
        self._shown: set[tuple[Stream, Ranks, str]] = set()
        self.next_at = float("-inf")  # not before this time
        self.stale = False  # something that was shown was taken away, so what is left is to be shown again

    def shows(self, rank: int, stream: Stream) -> bool:
        return any(stream == shown and rank in ranks for shown, ranks, _ in self._shown)

    def withdraw(self, items: Sequence[FoldedItem]) -> None:
        """Ordinary output takes live lines away at the reader's; forget that they were shown."""
        if not self._shown or not items:
            return
        spoke: dict[str, set[int]] = {stream: set() for stream in STREAMS}
        for item in items:
            if isinstance(item, Line):
                spoke[item.stream].update(item.ranks)
            elif isinstance(item.item, ClearOutput):
                for ranks in spoke.values():
                    ranks.update(item.ranks)
        left = {one for one in self._shown if spoke[one[0]].isdisjoint(one[1])}
        self.stale = self.stale or len(left) < len(self._shown)
        self._shown = left

    def refresh(self, states: Sequence[tuple[Stream, Member]], now: float) -> list[FoldedItem]:
        """All live lines as they are now; gives those that are not shown already."""
        alike: dict[tuple[Stream, str], list[Member]] = {}
        for stream, one in sorted(states, key=lambda state: state[1].ranks):
            alike.setdefault((stream, live_shape_of(one.text).key), []).append(one)
        lines: list[Line] = []
        for (stream, _), members in alike.items():
            lines += [folded_line(one, stream, mergeable=self._mergeable, live=True) for one in fold_all(members)]
        shown = {(line.stream, line.ranks, line.text) for line in lines}
        new: list[FoldedItem] = [line for line in lines if (line.stream, line.ranks, line.text) not in self._shown]
        self._shown = shown
        self.stale = False
        self.next_at = now + LIVE_INTERVAL_S
        return new


class OutputBudget:
    """How much of one call's output a front end is sent: a first burst, then a steady rate. What is more is counted.

    jupyter_server drops output silently above 1,000 messages/s or 1 MB/s, both taken over 3 s. The defaults stay below
    that with room for two such calls, and the reader is told what is missing.

    Args:
        messages_per_s, bytes_per_s: the steady rate. In what one `admit` gives back, each run of lines of one stream is
            a message, and each display is one.
        burst_messages, burst_bytes: what may go at once after a quiet time.
    """

    # Seconds' worth of budget to gather before output goes on after a cut: a block to read now and then, not a dribble.
    RESUME_S = 0.5
    # Of what was cut, the last lines are kept: the end of a call's output is worth more than its middle.
    TAIL_LINES = 20
    TAIL_CHARS = 8192

    def __init__(
        self,
        *,
        messages_per_s: float = 200.0,
        bytes_per_s: float = 512 * 1024,
        burst_messages: float = 500.0,
        burst_bytes: float = 1024 * 1024,
    ) -> None:
        self._rates = (messages_per_s, bytes_per_s)
        self._bursts = (burst_messages, burst_bytes)
        self._left = [burst_messages, burst_bytes]  # below zero: in debt, for something larger than what was left
        self._at: float | None = None
        self._cut = Cut()
        self._tail: deque[Line] = deque()
        self._tail_chars = 0

    def admit(self, items: Sequence[FoldedItem], now: float, final: bool = False) -> list[FoldedItem]:
        """What of these items may be sent now, with a notice where some could not.

        Clear-output, notices and live lines always pass. With `final`, what was cut last is told of at once, and the
        last lines of it are shown.
        """
        self._refill(now)
        out: list[FoldedItem] = []
        kind = previous = ""  # stream of this item and of the one before
        for item in items:
            if isinstance(item, Line):
                kind = "live" if item.live else item.stream
                num_bytes = len(item.text) + 1
            elif isinstance(item.item, Display):
                kind, num_bytes = "", _num_bytes(item.item)
            else:
                if isinstance(item.item, ClearOutput) and self._cut.ranks <= set(item.ranks):
                    self._forget_cut()
                kind, num_bytes = "", 0
            passes = kind == "live" or (not num_bytes)
            if not passes and not self._has_room():
                self._leave_out(item, num_bytes)
                continue
            if self._cut and kind != "live":
                out.append(self._tell())
            self._left[0] -= not kind or kind != previous
            self._left[1] -= num_bytes
            previous = kind
            out.append(item)
        if self._cut and (final or (not items and self._has_room())):
            tail = self._take_tail() if final else []
            if self._cut:
                out.append(self._tell())
            out += tail
        return out

    def next_deadline(self) -> float | None:
        """When `admit((), now)` will have a notice to give; None: nothing was cut."""
        if not self._cut or self._at is None:
            return None
        waits = [
            (self._resume_level(which) - self._left[which]) / self._rates[which] for which in range(len(self._rates))
        ]
        return self._at + max(0.0, *waits)

    def _refill(self, now: float) -> None:
        if self._at is not None:
            for which, rate in enumerate(self._rates):
                gained = self._left[which] + rate * max(0.0, now - self._at)
                self._left[which] = min(self._bursts[which], gained)
        self._at = now

    def _has_room(self) -> bool:
        """Going on after a cut needs more room than going on."""
        if self._cut:
            # A hair's breadth: the time that next_deadline names must be late enough in floats too.
            return all(left >= self._resume_level(which) - 1e-6 for which, left in enumerate(self._left))
        return all(left > 0 for left in self._left)

    def _resume_level(self, which: int) -> float:
        return min(self._bursts[which], self._rates[which] * self.RESUME_S)

    def _leave_out(self, item: FoldedItem, num_bytes: int) -> None:
        if not isinstance(item, Line):
            self._cut.add_display(item.ranks, num_bytes)
            return
        self._cut.add(item.ranks, num_bytes)
        self._tail.append(item)
        self._tail_chars += num_bytes
        while len(self._tail) > self.TAIL_LINES or self._tail_chars > self.TAIL_CHARS:
            self._tail_chars -= len(self._tail.popleft().text) + 1

    def _tell(self) -> RankDisplay:
        notice = RankDisplay(tuple(sorted(self._cut.ranks)), self._cut.notice())
        self._forget_cut()
        self._left[0] -= 1
        return notice

    def _take_tail(self) -> list[Line]:
        tail = list(self._tail)
        self._cut.num_lines -= len(tail)
        self._cut.num_chars -= self._tail_chars
        self._tail.clear()
        self._tail_chars = 0
        return tail

    def _forget_cut(self) -> None:
        self._cut = Cut()
        self._tail.clear()
        self._tail_chars = 0


def _num_bytes(display: Display) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else len(msgspec.json.encode(value))
               for value in display.data.values()) + 1  # fmt: skip
