"""Search in a host's log files: a process of its own, `python -m meshbook.host.log_search`.

A regular expression may take for ever, and a large log takes seconds, so neither is the business of the host's loop.
The process reads a `SearchRequest` from standard input, writes `LogsFound` messages to standard output, each behind its
length, and ends; with `follow` it goes on until its host closes standard input, at which the system kills it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from meshbook.clock import wall
from meshbook.fold.hits import HitFolder
from meshbook.fold.line_assembler import LineAssembler
from meshbook.fold.numbers import ANSI_ESCAPE
from meshbook.host.log_files import EVENT, HEADER, STDERR, STDOUT, file_name, files_of_ranks, first_time, records
from meshbook.wire.messages import KeptLogs, Line, LogMatch, LogsFound, SearchLogs
from meshbook.wire.process_control import die_with_pipe

# Characters of a hit that are shown. Longer lines are cut, around nothing in particular: they are no messages.
_MAX_CHARS = 4000
# Lines of one hit with its context: beyond it, what matches is another hit.
_MAX_BLOCK_LINES = 60
# Characters of all hits in one report, and of all that are returned where none follow.
_MAX_REPORT_CHARS = 256 << 10
_MAX_RETURNED_CHARS = 4 << 20
# Seconds between two looks for new text, and that a new line waits for other ranks to print it too.
_POLL_S = 0.2
_FOLLOW_WINDOW_S = 0.3
# Seconds after which a hit is shown although lines behind it, its context, have not come.
_CONTEXT_PATIENCE_S = 1.0
_NICENESS = 10

StreamName = Literal["stdout", "stderr"]


class SearchRequest(msgspec.Struct):
    folder: str
    command: SearchLogs
    kept: KeptLogs  # without the time of the oldest line
    mergeable: bool  # other hosts' hits will be folded with these


class RankReader:
    """Reads the lines of one rank's files, as far as they are written; again for what has come since.

    Attributes:
        oldest: wall clock of the oldest text that is kept; None: there is none.
    """

    def __init__(self, folder: Path, rank: int, since: float) -> None:
        """since: wall clock; older lines are left out."""
        self.rank = rank
        self.oldest: float | None = None
        self._folder, self._since = folder, since
        self._number, self._offset = 0, 0  # file and place to go on at; 0: not begun
        self._assemblers: dict[StreamName, LineAssembler] = {"stdout": LineAssembler(), "stderr": LineAssembler()}
        self._is_cut = False  # what comes first may be the end of a line
        self._last_time = 0.0

    def read(self, numbers: list[int]) -> Iterator[Lines]:
        """Yield the lines that have ended. `numbers`: of the rank's files, as they are now."""
        if not self._number and numbers:
            self._begin(numbers)
        for number in [number for number in numbers if number >= self._number]:
            if number > self._number:
                self._number, self._offset = number, 0
            try:
                with open(self._folder / file_name(self.rank, number), "rb") as file:
                    file.seek(self._offset)
                    data = file.read()
            except FileNotFoundError:  # dropped since
                continue
            base = self._offset
            for kind, at, begin, end in records(data):
                lines = self._lines_of(kind, data[begin:end].decode("utf-8", "replace"), at)
                self._offset, self._last_time = base + end, at
                if lines and at >= self._since:
                    yield Lines(at, "stdout" if kind == STDOUT else "stderr", lines)

    def finish(self) -> Iterator[Lines]:
        """Yield the lines that have no end yet, such as a progress bar."""
        for stream, assembler in self._assemblers.items():
            lines = assembler.finish()
            if lines and self._last_time >= self._since:
                yield Lines(self._last_time, stream, lines)

    def _begin(self, numbers: list[int]) -> None:
        """Find the file in which the time of interest is: the last one that begins before it."""
        times = [self._first_time(number) for number in numbers]
        self.oldest = next((at for at in times if at is not None), None)
        before = [index for index, at in enumerate(times) if at is not None and at < self._since]
        self._number = numbers[before[-1] if before else 0]
        self._is_cut = self._number > 1

    def _first_time(self, number: int) -> float | None:
        with contextlib.suppress(FileNotFoundError), open(self._folder / file_name(self.rank, number), "rb") as file:
            return first_time(file.read(HEADER.size))
        return None

    def _lines_of(self, kind: int, text: str, at: float) -> list[str]:
        if kind == EVENT:
            return text.rstrip("\n").split("\n")
        lines = self._assemblers["stderr" if kind == STDERR else "stdout"].write(text, at)
        if self._is_cut and lines:
            self._is_cut = False
            return lines[1:]
        return lines


class Lines(NamedTuple):
    """Lines that a rank has printed, or ended, at once."""

    time: float
    stream: StreamName
    texts: list[str]


class RankMatcher:
    """Finds hits among the lines of one rank, with so many lines of context."""

    def __init__(self, rank: int, matches: Callable[[str], object], context: int) -> None:
        self._ranks, self._matches, self._context = (rank,), matches, context
        self._before: deque[str] = deque(maxlen=context)
        self._block: list[str] = []  # a hit with its context, as far as it has come
        self._matching: list[int] = []
        self._began: tuple[float, StreamName] = (0.0, "stdout")
        self._num_awaited = 0  # lines of context that are to come behind the last hit

    def feed(self, printed: Lines) -> Iterator[LogMatch]:
        """Return the hits that are complete."""
        texts = [ANSI_ESCAPE.sub("", text) if "\x1b" in text else text for text in printed.texts]
        if not self._context:
            for text in filter(self._matches, texts):
                yield LogMatch(printed.time, Line(self._ranks, printed.stream, _shorten(text)))
            return
        for text in texts:
            if self._matches(text):
                if len(self._block) >= _MAX_BLOCK_LINES:
                    yield from self.finish()
                if not self._block:
                    self._block += self._before
                    self._began = (printed.time, printed.stream)
                self._matching.append(len(self._block))
                self._num_awaited = self._context
            elif self._num_awaited:
                self._num_awaited -= 1
            else:
                yield from self.finish()
                self._before.append(_shorten(text))
                continue
            self._block.append(_shorten(text))

    def finish(self, *, older_than: float = float("inf")) -> Iterator[LogMatch]:
        """Return the hit that waits for its context, if it began before this time."""
        if self._matching and self._began[0] < older_than:
            line = Line(self._ranks, self._began[1], "\n".join(self._block))
            yield LogMatch(self._began[0], line, tuple(self._matching))
            self._block, self._matching, self._num_awaited = [], [], 0
            self._before.clear()


class LogSearch:
    """One search in the files of a host."""

    def __init__(self, request: SearchRequest) -> None:
        """Raises re.error: the pattern is no regular expression of this Python."""
        self._folder, self._command, self._kept = Path(request.folder), request.command, request.kept
        pattern = request.command.pattern
        # Without a pattern blank lines are left out.
        self._matches: Callable[[str], object] = re.compile(pattern).search if pattern else str.strip
        self._is_mergeable = request.mergeable
        ago_s = request.command.since_s
        self._since = float("-inf") if ago_s is None else wall() - ago_s
        self._ranks: dict[int, tuple[RankReader, RankMatcher]] = {}

    def run(self) -> Iterator[LogsFound]:
        """Yield the reports of this search."""
        command = self._command
        streams = self._read(to_the_end=not command.follow)
        # A line of the answer is one of each rank at most.
        newest: deque[LogMatch] = deque(maxlen=command.limit * max(1, len(streams)))
        num_found = 0
        for match in heapq.merge(*streams, key=_time_of):
            num_found += 1
            newest.append(match)
        folder = HitFolder(command.fold, mergeable=self._is_mergeable)
        hits = _newest([*folder.feed(newest), *folder.pop()], command.limit)
        times = [reader.oldest for reader, _ in self._ranks.values() if reader.oldest is not None]
        kept = msgspec.structs.replace(self._kept, since=min(times, default=None))
        for part in _parts(hits):
            yield LogsFound(command.call, tuple(part))
        num_left_out = num_found - sum(len(hit.line.ranks) for hit in hits)
        yield LogsFound(command.call, num_left_out=num_left_out, kept=kept, ended=not command.follow)
        if command.follow:
            yield from self._follow()

    def _follow(self) -> Iterator[LogsFound]:
        folder = HitFolder(self._command.fold, mergeable=self._is_mergeable, window_s=_FOLLOW_WINDOW_S)
        while True:
            new = sorted(itertools.chain(*self._read(to_the_end=False)), key=_time_of)
            done = [*folder.feed(new), *folder.pop(wall() - _FOLLOW_WINDOW_S)]
            for part in _parts(done):
                yield LogsFound(self._command.call, tuple(part))
            time.sleep(_POLL_S)

    def _read(self, *, to_the_end: bool) -> list[Iterator[LogMatch]]:
        """Return the hits of each rank in what has not been read yet."""
        files = files_of_ranks(self._folder)
        wanted = self._command.ranks
        return [
            self._read_rank(rank, numbers, to_the_end=to_the_end)
            for rank, numbers in files.items()
            if not wanted or rank in wanted
        ]

    def _read_rank(self, rank: int, numbers: list[int], *, to_the_end: bool) -> Iterator[LogMatch]:
        if rank not in self._ranks:
            matcher = RankMatcher(rank, self._matches, self._command.context)
            self._ranks[rank] = RankReader(self._folder, rank, self._since), matcher
        reader, matcher = self._ranks[rank]
        for printed in reader.read(numbers):
            yield from matcher.feed(printed)
        if to_the_end:
            for printed in reader.finish():
                yield from matcher.feed(printed)
            yield from matcher.finish()
        else:
            yield from matcher.finish(older_than=wall() - _CONTEXT_PATIENCE_S)


def _newest(hits: list[LogMatch], limit: int) -> list[LogMatch]:
    """Return the last hits, so many and so much text at most."""
    num_chars = num_hits = 0
    for hit in reversed(hits[-limit:]):
        num_chars += len(hit.line.text)
        if num_chars > _MAX_RETURNED_CHARS:
            break
        num_hits += 1
    return hits[len(hits) - num_hits :]


def _time_of(hit: LogMatch) -> float:
    return hit.time


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[:_MAX_CHARS]} … {len(text) - _MAX_CHARS:,} characters not shown"


def _parts(hits: Iterable[LogMatch]) -> Iterator[list[LogMatch]]:
    """Divide hits into parts, each for one message."""
    part: list[LogMatch] = []
    num_chars = 0
    for hit in hits:
        part.append(hit)
        num_chars += len(hit.line.text)
        if num_chars >= _MAX_REPORT_CHARS:
            yield part
            part, num_chars = [], 0
    if part:
        yield part


def _read_request() -> SearchRequest:
    size = int.from_bytes(_read_exactly(4))
    return msgspec.msgpack.decode(_read_exactly(size), type=SearchRequest)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            sys.exit(0)  # the host has ended, or the search
        data += piece
    return data


def _write(report: LogsFound) -> None:
    body = msgspec.msgpack.encode(report)
    view = memoryview(len(body).to_bytes(4) + body)
    while view:
        view = view[os.write(1, view) :]


def main() -> None:
    request = _read_request()
    die_with_pipe(0)
    os.nice(_NICENESS)
    try:
        for report in LogSearch(request).run():
            _write(report)
    except BrokenPipeError:
        pass
    except Exception as error:
        _write(LogsFound(request.command.call, ended=True, problem=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
