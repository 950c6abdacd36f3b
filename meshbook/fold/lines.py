"""Fold the output of many ranks while they print: equal lines appear once, with the set of ranks that printed them.

`LineFolder` folds the raw output of ranks, on the host; `FoldMerger` folds the results of several hosts, in the
supervisor; `OutputBudget` limits what the front end is sent. All three get the time as an argument and never block.

The order of each rank's output is preserved. A line waits for the other ranks for at most `max_age_s`; for longer, up
to ten times that, once a rank of the call has printed a line that late. Lines that differ only in numbers become one
(`differences`): `step 10 loss {2.31, 2.33, 97.4, 2.35}`. Every queue is bounded; the excess is counted, not stored.

A line still in progress after `max_age_s`, such as a progress bar or an unfinished print, is sent as a live line: its
current state, at most 10 times a second. The rules for a reader: a live line replaces what its ranks had on that
stream, even a live line shared with other ranks; an ordinary line removes its ranks from the live lines of its stream;
live lines left at the end of the call are dropped. A live line of nested bars has several rows, joined by line ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from meshbook.clock import STRETCH
from meshbook.fold.align import Aligner
from meshbook.fold.entries import line_of_fold, split_folded_line
from meshbook.fold.line_assembler import LineAssembler
from meshbook.fold.numbers import FoldMember, fold_all, live_template_of, template_of
from meshbook.fold.source_queue import MAX_OVERFLOW
from meshbook.fold.truncation import Truncation
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Folding, Line, OutputItem, RankDisplay, Text

# Seconds that a line waits for other ranks to print it too. Long enough for ranks released by one collective to reach
# their print on a loaded machine, short enough to look immediate.
MAX_AGE_S = 0.1 * STRETCH
# Characters of one rank's output that wait to be folded. A screen holds some 10,000.
QUEUE_LIMIT_CHARS = 256 * 1024
# Seconds between two updates of live lines. tqdm's own default.
LIVE_INTERVAL_S = 0.1

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")


class LineFolder:
    """Folds the output of ranks during one call.

    Args:
        ranks: all ranks of the call.
        limit_chars: of one rank's waiting text; at a flush the excess is dropped from the middle and a notice says so.
            Between two flushes the text may grow to 4 times that.
        mergeable: whether lines retain each rank's numbers, so that a `FoldMerger` can fold them further.
        folding: which lines become one.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        limit_chars: int = QUEUE_LIMIT_CHARS,
        mergeable: bool = False,
        folding: Folding = "numbers",
    ) -> None:
        members = sorted(set(ranks))
        self._limit_chars = limit_chars
        self._assemblers: dict[int, dict[StreamName, LineAssembler]] = {
            rank: {stream: LineAssembler() for stream in STREAMS} for rank in members
        }
        self._aligner = Aligner(
            ((rank, (rank,)) for rank in members),
            per_entry_ranks=False,
            limit_chars=limit_chars,
            mergeable=mergeable,
            folding=folding,
        )
        self._live = _LiveLines(mergeable, folding)

    def feed(self, rank: int, items: Iterable[OutputItem], now: float) -> None:
        """Append what a rank wrote, in order.

        Raises:
            KeyError: the rank is not part of this call.
        """
        pieces: list[str] = []  # of one stream, not yet written
        stream: StreamName = "stdout"
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
                self._finish_rows(rank, now, include_bars=False)
            self._aligner.add_item(rank, item, now)
        if pieces:
            self._write(rank, stream, "".join(pieces), now)

    def rank_done(self, rank: int) -> None:
        """Record that the rank prints nothing more in this call, so that the others do not wait for it."""
        self._aligner.finish(rank)

    def flush(
        self, now: float, final: bool = False, max_age_s: float = MAX_AGE_S, max_chars: int | None = None
    ) -> list[FoldedItem]:
        """Return what can be shown now, in order. With `final`, return everything; nothing may be fed after that.

        If the last line of a call has no line end, it is returned with `end=""`.

        Args:
            max_chars: about how much text to return at most; the rest waits, and is truncated if it exceeds its limit.
                Text that a reader would not be sent anyway then costs next to nothing. Ignored with `final`.
        """
        limit_chars = None if final else max_chars
        out = self._aligner.pop_ready(now, final=final, max_age_s=max_age_s, max_chars=limit_chars)
        self._live.forget_replaced(out)
        if not final:
            out += self._refresh_live_lines(now, max_age_s)
            return out
        for rank in self._assemblers:
            self._finish_rows(rank, now, include_bars=True)
        remainder = self._aligner.pop_ready(now, final=True, max_age_s=max_age_s)
        if remainder and isinstance(remainder[-1], Line):
            remainder[-1] = msgspec.structs.replace(remainder[-1], end="")
        return out + remainder

    def next_deadline(self, max_age_s: float = MAX_AGE_S) -> float | None:
        """Return when `flush` will have output even if nothing more is fed; None: not before something is fed.

        Lines that all ranks have printed can be shown at once, so flush after feeding too.
        """
        oldest = self._aligner.next_deadline(max_age_s)
        times = [] if oldest is None else [oldest]
        for rank, assemblers in self._assemblers.items():
            if self._aligner.is_empty(rank):
                times += [
                    max(assembler.open_since + max_age_s, self._live.next_refresh_at)
                    for assembler in assemblers.values()
                    if assembler.open_since is not None and (assembler.changed or self._live.stale)
                ]
        return min(times, default=None)

    def _write(self, rank: int, stream: StreamName, text: str, now: float) -> None:
        assembler = self._assemblers[rank][stream]
        if len(text) > MAX_OVERFLOW * self._limit_chars:
            # One piece larger than the limit: not even split into lines.
            head = text.rfind("\n", 0, self._limit_chars // 2) + 1
            tail = text.find("\n", len(text) - self._limit_chars // 2) + 1
            if 0 < head < tail:
                self._aligner.add_lines(rank, stream, assembler.write(text[:head], now), now)
                self._aligner.add_truncation(rank, text.count("\n", head, tail), tail - head, now)
                text = text[tail:]
        lines = assembler.write(text, now)
        if lines:
            self._aligner.add_lines(rank, stream, lines, now)

    def _finish_rows(self, rank: int, now: float, *, include_bars: bool) -> None:
        """End the rows in progress. A progress bar continues below a display, other text does not."""
        for stream, assembler in self._assemblers[rank].items():
            if assembler.open_since is not None and (include_bars or not assembler.is_progress_bar):
                self._aligner.add_lines(rank, stream, assembler.finish(), now)

    def _refresh_live_lines(self, now: float, max_age_s: float) -> list[FoldedItem]:
        if now < self._live.next_refresh_at:
            return []
        open_assemblers = [
            (rank, stream, assembler)
            for rank, assemblers in self._assemblers.items()
            for stream, assembler in assemblers.items()
            if assembler.open_since is not None
            and assembler.open_since + max_age_s <= now
            and self._aligner.is_empty(rank)
        ]
        if not self._live.stale and not any(assembler.changed for _, _, assembler in open_assemblers):
            return []
        states: list[tuple[StreamName, FoldMember]] = []
        for rank, stream, assembler in open_assemblers:
            assembler.changed = False
            text = assembler.render()
            if text or self._live.is_shown(rank, stream):
                states.append((stream, FoldMember((rank,), text, template_of(text).numbers)))
        return self._live.refresh(states, now)


class FoldMerger:
    """Merges the folded output of several hosts during one call.

    Args:
        hosts: each host's ranks in the call.
        limit_chars: of one host's waiting text.
        mergeable: whether lines retain each rank's numbers, for another merger above this one.
        folding: which lines become one.
    """

    def __init__(
        self,
        hosts: Mapping[int, Ranks],
        *,
        limit_chars: int = 4 * QUEUE_LIMIT_CHARS,
        mergeable: bool = False,
        folding: Folding = "numbers",
    ) -> None:
        self._aligner = Aligner(
            hosts.items(), per_entry_ranks=True, limit_chars=limit_chars, mergeable=mergeable, folding=folding
        )
        self._live_states: dict[int, list[tuple[StreamName, FoldMember]]] = {host: [] for host in hosts}
        self._live = _LiveLines(mergeable, folding)
        self._live_changed = False

    def feed(self, host: int, items: Iterable[FoldedItem], now: float) -> None:
        """Append what a host's `LineFolder(mergeable=True)` returned, in order.

        Raises:
            KeyError: the host is not part of this call.
        """
        for item in items:
            if isinstance(item, RankDisplay):
                self._aligner.add_item(host, item.item, now, item.ranks)
                continue
            if item.live or self._live_states[host]:
                self._update_live_state(host, item)
            if not item.live:
                self._aligner.add_folded_line(host, item, now)

    def host_done(self, host: int) -> None:
        """Record that the host sends nothing more in this call."""
        self._aligner.finish(host)

    def flush(
        self, now: float, final: bool = False, max_age_s: float = MAX_AGE_S, max_chars: int | None = None
    ) -> list[FoldedItem]:
        """Return what can be shown now, in order; see `LineFolder.flush`."""
        limit_chars = None if final else max_chars
        out = self._aligner.pop_ready(now, final=final, max_age_s=max_age_s, max_chars=limit_chars)
        self._live.forget_replaced(out)
        if final:
            if out and out[-1] is self._aligner.unterminated_line:
                out[-1] = msgspec.structs.replace(self._aligner.unterminated_line, end="")
        elif now >= self._live.next_refresh_at and (self._live_changed or self._live.stale):
            states = [
                state for host, host_states in self._live_states.items() if self._aligner.is_empty(host)
                for state in host_states
            ]  # fmt: skip
            self._live_changed = len(states) < sum(map(len, self._live_states.values()))
            out += self._live.refresh(states, now)
        return out

    def next_deadline(self, max_age_s: float = MAX_AGE_S) -> float | None:
        """Return when `flush` will have output even if nothing more is fed; None: not before something is fed."""
        oldest = self._aligner.next_deadline(max_age_s)
        times = [] if oldest is None else [oldest]
        if (self._live_changed or self._live.stale) and any(
            states and self._aligner.is_empty(host) for host, states in self._live_states.items()
        ):
            times.append(self._live.next_refresh_at)
        return min(times, default=None)

    def _update_live_state(self, host: int, line: Line) -> None:
        """Replace the live lines of the line's ranks by it; an ordinary line only removes them."""
        ranks = set(line.ranks)
        states = self._live_states[host]
        remaining = [one for one in states if one[0] != line.stream or ranks.isdisjoint(one[1].ranks)]
        if line.live:
            remaining.append((line.stream, split_folded_line(line)[1]))
        self._live_states[host] = remaining
        self._live_changed = True


class _LiveLines:
    """The live lines shown last, so that only changes are sent."""

    def __init__(self, mergeable: bool, folding: Folding) -> None:
        self._mergeable, self._folding = mergeable, folding
        self._shown: set[tuple[StreamName, Ranks, str]] = set()
        self.next_refresh_at = float("-inf")  # earliest time of the next update
        self.stale = False  # a shown line was removed, so the remaining ones must be shown again

    def is_shown(self, rank: int, stream: StreamName) -> bool:
        return any(stream == shown and rank in ranks for shown, ranks, _ in self._shown)

    def forget_replaced(self, items: Sequence[FoldedItem]) -> None:
        """Drop the live lines that ordinary output removes at the reader's end."""
        if not self._shown or not items:
            return
        printed_ranks: dict[str, set[int]] = {stream: set() for stream in STREAMS}
        for item in items:
            if isinstance(item, Line):
                printed_ranks[item.stream].update(item.ranks)
            elif isinstance(item.item, ClearOutput):
                for ranks in printed_ranks.values():
                    ranks.update(item.ranks)
        remaining = {one for one in self._shown if printed_ranks[one[0]].isdisjoint(one[1])}
        self.stale = self.stale or len(remaining) < len(self._shown)
        self._shown = remaining

    def refresh(self, states: Sequence[tuple[StreamName, FoldMember]], now: float) -> list[FoldedItem]:
        """Replace all live lines by these states; return the lines that are not shown already."""
        members_by_key: dict[tuple[StreamName, object], list[FoldMember]] = {}
        for stream, one in sorted(states, key=lambda state: state[1].ranks):
            members_by_key.setdefault((stream, self._key_of(one)), []).append(one)
        lines: list[Line] = []
        for (stream, _), members in members_by_key.items():
            folds = fold_all(members, "ranges")
            lines += [line_of_fold(one, stream, mergeable=self._mergeable, live=True) for one in folds]
        shown = {(line.stream, line.ranks, line.text) for line in lines}
        new: list[FoldedItem] = [line for line in lines if (line.stream, line.ranks, line.text) not in self._shown]
        self._shown = shown
        self.stale = False
        self.next_refresh_at = now + LIVE_INTERVAL_S
        return new

    def _key_of(self, state: FoldMember) -> object:
        """Return what states have in common that are folded."""
        if self._folding == "numbers":
            return live_template_of(state.text).key
        return state.text if self._folding == "equal" else state.ranks


class OutputBudget:
    """Limits how much of one call's output is sent to a front end: a burst, then a steady rate. The excess is counted.

    jupyter_server silently drops output above 1,000 messages/s or 1 MB/s, both averaged over 3 s. The defaults stay
    below that with room for two such calls, and the reader sees what is missing.

    Args:
        messages_per_s, bytes_per_s: the steady rate. In the result of one `admit`, each run of lines of one stream
            counts as a message, and so does each display.
        burst_messages, burst_bytes: what may be sent at once after a quiet period.
    """

    # Seconds' worth of budget to accumulate before output resumes after a cut, so that it comes in readable blocks.
    RESUME_S = 0.5
    # The last lines of what was cut are retained: the end of a call's output is worth more than its middle.
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
        self._tokens = [burst_messages, burst_bytes]  # negative after an item larger than the rest of the budget
        self._refilled_at: float | None = None
        self._truncation = Truncation()
        self._tail: deque[Line] = deque()
        self._tail_chars = 0

    def admit(self, items: Sequence[FoldedItem], now: float, final: bool = False) -> list[FoldedItem]:
        """Return which of these items may be sent now, with a notice in place of those that may not.

        Clear-output, notices and live lines always pass. With `final`, a pending cut is reported at once and its last
        lines are shown.
        """
        self._refill(now)
        out: list[FoldedItem] = []
        kind = previous = ""  # stream of this item and of the previous one
        for item in items:
            if isinstance(item, Line):
                kind = "live" if item.live else item.stream
                num_bytes = len(item.text) + 1
            elif isinstance(item.item, Display):
                kind, num_bytes = "", _num_bytes(item.item)
            else:
                if isinstance(item.item, ClearOutput) and self._truncation.ranks <= set(item.ranks):
                    self._reset_truncation()
                kind, num_bytes = "", 0
            passes = kind == "live" or (not num_bytes)
            if not passes and not self._has_tokens():
                self._drop_item(item, num_bytes)
                continue
            if self._truncation and kind != "live":
                out.append(self._pop_notice())
            self._tokens[0] -= not kind or kind != previous
            self._tokens[1] -= num_bytes
            previous = kind
            out.append(item)
        if self._truncation and (final or (not items and self._has_tokens())):
            tail = self._pop_tail() if final else []
            if self._truncation:
                out.append(self._pop_notice())
            out += tail
        return out

    def next_deadline(self) -> float | None:
        """Return when `admit((), now)` will return a notice; None: nothing was cut."""
        if not self._truncation or self._refilled_at is None:
            return None
        waits = [
            (self._resume_level(index) - self._tokens[index]) / self._rates[index] for index in range(len(self._rates))
        ]
        return self._refilled_at + max(0.0, *waits)

    def _refill(self, now: float) -> None:
        if self._refilled_at is not None:
            for index, rate in enumerate(self._rates):
                gained = self._tokens[index] + rate * max(0.0, now - self._refilled_at)
                self._tokens[index] = min(self._bursts[index], gained)
        self._refilled_at = now

    def _has_tokens(self) -> bool:
        """Whether the budget allows another item. Resuming after a cut requires more than continuing."""
        if self._truncation:
            # Tolerance for float rounding in the time that next_deadline returns.
            return all(tokens >= self._resume_level(index) - 1e-6 for index, tokens in enumerate(self._tokens))
        return all(tokens > 0 for tokens in self._tokens)

    def _resume_level(self, index: int) -> float:
        return min(self._bursts[index], self._rates[index] * self.RESUME_S)

    def _drop_item(self, item: FoldedItem, num_bytes: int) -> None:
        if not isinstance(item, Line):
            self._truncation.add_display(item.ranks, num_bytes)
            return
        self._truncation.add(item.ranks, num_bytes)
        self._tail.append(item)
        self._tail_chars += num_bytes
        while len(self._tail) > self.TAIL_LINES or self._tail_chars > self.TAIL_CHARS:
            self._tail_chars -= len(self._tail.popleft().text) + 1

    def _pop_notice(self) -> RankDisplay:
        notice = RankDisplay(tuple(sorted(self._truncation.ranks)), self._truncation.notice())
        self._reset_truncation()
        self._tokens[0] -= 1
        return notice

    def _pop_tail(self) -> list[Line]:
        tail = list(self._tail)
        self._truncation.num_lines -= len(tail)
        self._truncation.num_chars -= self._tail_chars
        self._tail.clear()
        self._tail_chars = 0
        return tail

    def _reset_truncation(self) -> None:
        self._truncation = Truncation()
        self._tail.clear()
        self._tail_chars = 0


def _num_bytes(display: Display) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else len(msgspec.json.encode(value))
               for value in display.data.values()) + 1  # fmt: skip
