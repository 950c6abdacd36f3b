"""Searches in what ranks have printed since their mesh started, and how the hits are shown.

Hosts search, on their disks; what comes here are hits, folded by host, which are folded again. So an answer does not
depend on what the ranks do: it comes while a cell runs, while ranks hang, and about ranks that are dead.
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, overload

from meshbook.controller.session import Session
from meshbook.controller.tables import format_bytes
from meshbook.errors import MeshbookError, MeshTimeout, UsageError
from meshbook.fold.hits import HitFolder
from meshbook.fold.rendering import sanitize
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import KeptLogs

# Hits that are returned unless more are asked for: the newest.
DEFAULT_LIMIT = 1000
# Lines of what was printed before, where a search follows and no time is given: as `journalctl -f`.
_FOLLOW_LIMIT = 10
# Seconds that a host's hits wait for equal ones of other hosts, while a search follows.
_FOLLOW_HOLD_S = 0.3
# Seconds between two looks whether the supervisor answers.
_CHECK_S = 1.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_DIM, _BOLD, _RESET = "\x1b[38;5;243m", "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class LogHit:
    """A line that ranks have printed.

    Attributes:
        time: when the first of them had printed it; seconds since the epoch, by its machine's clock.
        ranks: who printed it at about that time.
        stream: "stdout" or "stderr".
        text: the line; where numbers differ, as folded output shows them. With context: several lines.
        matching: which lines of the text match, counted from 0; the others are context.
    """

    time: float
    ranks: Ranks
    stream: Literal["stdout", "stderr"]
    text: str
    matching: tuple[int, ...] = (0,)

    def as_text(self, *, color: bool = False) -> str:
        """`14:02:11.512 [0-3] loss=nan`; with context a line each, and `> ` before those that match."""
        stamp = _format_time(self.time)
        prefix = f"{stamp} [{format_ranks(self.ranks)}] "
        lines = sanitize(self.text, colour=False).split("\n")
        if len(lines) > 1:
            marks = ["> " if number in self.matching else "  " for number in range(len(lines))]
            lines = [mark + line for mark, line in zip(marks, lines, strict=True)]
        text = f"\n{' ' * len(prefix)}".join(lines)
        return f"{_DIM}{prefix}{_RESET}{text}" if color else prefix + text

    def __str__(self) -> str:
        return self.as_text()


@dataclass(frozen=True, repr=False)
class Logs(Sequence[LogHit]):
    """The hits of a search, in order of time. Displays itself as text.

    Attributes:
        hits: the newest, folded.
        num_left_out: older lines that match, beyond the limit; equal lines of several ranks count for each.
        kept: what each host has kept.
        problems: why the hits may not be all.
        searched: what was searched for, as a phrase: "lines of ranks 0-3 that match 'loss=nan'".
    """

    hits: tuple[LogHit, ...]
    num_left_out: int
    kept: tuple[KeptLogs, ...]
    problems: tuple[str, ...]
    searched: str

    @overload
    def __getitem__(self, index: int) -> LogHit: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LogHit]: ...

    def __getitem__(self, index: int | slice) -> LogHit | Sequence[LogHit]:
        return self.hits[index]

    def __len__(self) -> int:
        return len(self.hits)

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

    def as_text(self, *, color: bool = False) -> str:
        """A line for each hit, and notes about what is not shown, or not kept any more."""
        return "\n".join([*(hit.as_text(color=color) for hit in self.hits), *self.notes()])

    def notes(self) -> list[str]:
        """Sentences about what is not among the hits."""
        notes = []
        if self.num_left_out:
            notes.append(
                f"… {self.num_left_out:,} earlier lines of ranks are not shown; narrow the search (--since, --ranks, "
                "--grep), or ask for more (--last N)"
            )
        if not self.hits:
            notes.append(f"There are no {self.searched}.")
        notes += [note for kept in self.kept if (note := _note_of(kept, always=not self.hits))]
        return [*notes, *self.problems]


def host_log(session: Session, host: str, limit_bytes: int = 1 << 16) -> str:
    """Return what a host's agent has last written. Blocks. Raises UsageError: no host is called so."""
    command = messages.QueryHostLog(call=session.connection.next_call_id(), host=host, limit_bytes=limit_bytes)
    return session.call_supervisor(command).text or f"(the agent of {host} has written nothing)"


def search(
    session: Session,
    ranks: Ranks = (),
    *,
    grep: str = "",
    since: str | float | datetime | None = None,
    context: int = 0,
    limit: int = DEFAULT_LIMIT,
) -> Logs:
    """Search in what ranks have printed. Blocks until all hosts have answered. See `Mesh.logs`."""
    command = _command(session, ranks, grep, since, context, limit)
    left_out, kept, problems = 0, [], []
    found: list[messages.LogMatch] = []
    with contextlib.closing(_reports_of(session, command)) as reports:
        for report in reports:
            if report is None:
                continue
            found += report.hits
            left_out += report.num_left_out
            kept += [report.kept] if report.kept is not None else []
            problems += [report.problem] if report.problem else []
    folder = HitFolder(session.fold)
    hits = [*folder.feed(sorted(found, key=_time_of)), *folder.pop()]
    left_out += sum(len(hit.line.ranks) for hit in hits[:-limit])
    searched = f"lines of {name_ranks(ranks) if ranks else 'any rank'}"
    searched += f" that match {grep!r}" if grep else ""
    searched += f" since {_format_time(time.time() - command.since_s)}" if command.since_s is not None else ""
    hosts = tuple(sorted(kept, key=lambda one: one.host))
    return Logs(tuple(map(_public, hits[-limit:])), left_out, hosts, tuple(problems), searched)


def follow(
    session: Session,
    ranks: Ranks = (),
    *,
    grep: str = "",
    since: str | float | datetime | None = None,
    context: int = 0,
    limit: int | None = None,
    until: Callable[[], bool] | None = None,
) -> Generator[LogHit | str]:
    """Yield hits as they come, until the mesh ends, the generator is closed, or `until()` is true.

    Begins with those since `since`, at most `limit` of them; None: the last ten. A sentence in place of a hit says what
    is missing. See `Mesh.logs`.
    """
    if limit is None:
        limit = _FOLLOW_LIMIT if since is None else DEFAULT_LIMIT
    command = _command(session, ranks, grep, since, context, limit, follow=True)
    return _follow(session, command, until)


def _follow(
    session: Session, command: messages.SearchLogs, until: Callable[[], bool] | None
) -> Generator[LogHit | str]:
    with contextlib.closing(_reports_of(session, command, _FOLLOW_HOLD_S)) as reports:
        held: list[messages.LogMatch] = []
        held_since = time.monotonic()
        for report in reports:
            if report is not None:
                if not held:
                    held_since = time.monotonic()
                held += report.hits
                if report.problem:
                    yield report.problem
            if held and time.monotonic() - held_since >= _FOLLOW_HOLD_S:
                folder = HitFolder(session.fold)
                yield from map(_public, [*folder.feed(sorted(held, key=_time_of)), *folder.pop()])
                held = []
            if until is not None and until():
                return


def parse_since(since: str | float | datetime) -> float:
    """Return how many seconds ago a time was that is written like 5m, 2h, 30s, 1d, or as an ISO date and time.

    Raises:
        UsageError: it is written otherwise, or is in the future.
    """
    if isinstance(since, str):
        text = since.strip()
        if (found := _AGO.fullmatch(text)) is not None:
            return float(found[1]) * _UNITS_S[found[2]]
        try:
            since = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"{text!r} is not a time; write how long ago (30s, 5m, 2h, 1d), or when, as 2026-11-26T14:05 "
                "(local time, unless it ends with a zone)"
            ) from None
    if isinstance(since, datetime):
        ago_s = time.time() - since.timestamp()
        if ago_s < 0:
            raise UsageError(f"{since.isoformat(sep=' ')} is in the future; nothing was printed since")
        return ago_s
    if since < 0:
        raise UsageError(f"since={since!r} seconds ago is in the future; write 300 for the last five minutes")
    return float(since)


def check_pattern(pattern: str) -> str:
    """Return the pattern itself. Raises UsageError if it is no regular expression; the message shows where."""
    try:
        re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}:\n  {pattern}\n  {' ' * error.pos}^\n"
        text = f"{pattern!r} is no regular expression: {error.msg}{where or ', so '}"
        raise UsageError(f"{text}write \\ before a character that stands for itself, as in loss\\(x\\)") from None
    except (RecursionError, OverflowError) as error:
        raise UsageError(f"this regular expression cannot be used: {error}") from None
    return pattern


def _reports_of(
    session: Session, command: messages.SearchLogs, wait_s: float = _CHECK_S
) -> Generator[messages.LogsFound | None]:
    """Send a search; yield its reports, and None where none has come for some time, until no host searches any more.

    Close it to end the search.

    Raises:
        MeshTimeout: the supervisor does not answer.
        MeshbookError: it has refused the search, or the mesh has ended.
    """
    session.check_attached()
    connection = session.connection
    reports: queue.SimpleQueue[messages.LogsFound | None] = queue.SimpleQueue()  # None: it has ended
    reply = connection.request(command, on_report=reports.put)
    reply.add_done_callback(lambda _: reports.put(None))
    try:
        while True:
            try:
                report = reports.get(timeout=wait_s)
            except queue.Empty:
                if connection.silent:
                    raise MeshTimeout(connection.describe_silence()) from None
                yield None
                continue
            if report is None:
                reply.result()  # raises
                return
            yield report
            if report.ended:
                return
    finally:
        connection.pending.discard(command.call)
        with contextlib.suppress(MeshbookError):  # it has ended, or the mesh has
            connection.send(messages.EndLogSearch(call=command.call))


def _command(
    session: Session,
    ranks: Ranks,
    grep: str,
    since: str | float | datetime | None,
    context: int,
    limit: int,
    *,
    follow: bool = False,
) -> messages.SearchLogs:
    if not 0 <= context <= 20:
        raise UsageError(f"context={context}: the lines around a hit are 0 to 20")
    if limit < 1:
        raise UsageError(f"{limit} hits: ask for at least one")
    return messages.SearchLogs(
        call=session.connection.next_call_id(),
        ranks=tuple(sorted(ranks)),
        pattern=check_pattern(grep),
        since_s=None if since is None else parse_since(since),
        context=context,
        limit=limit,
        follow=follow,
        fold=session.fold,
    )


def _time_of(hit: messages.LogMatch) -> float:
    return hit.time


def _public(hit: messages.LogMatch) -> LogHit:
    return LogHit(hit.time, hit.line.ranks, hit.line.stream, hit.line.text, hit.matching)


def _format_time(at: float) -> str:
    """`14:02:11.512`; with the date if that is not today."""
    when = datetime.fromtimestamp(at)
    text = when.strftime("%H:%M:%S.") + f"{when.microsecond // 1000:03d}"
    return text if when.date() == datetime.now().date() else f"{when.date().isoformat()} {text}"


def _note_of(kept: KeptLogs, *, always: bool) -> str:
    """What a host has kept, where that matters: nothing was found, or something is missing."""
    where = f"{kept.host}: " if kept.host else ""
    parts = []
    if kept.dropped_bytes:
        parts.append(
            f"{format_bytes(kept.dropped_bytes)} of older output were dropped, to stay within "
            f"{format_bytes(kept.limit_bytes)} (log_mb in meshbook.toml)"
        )
    if kept.unwritten_bytes:
        parts.append(f"{format_bytes(kept.unwritten_bytes)} could not be kept: {kept.problem}")
    if always or parts:
        begin = "nothing is kept" if kept.since is None else f"output is kept since {_format_time(kept.since)}"
        size = f" ({format_bytes(kept.num_bytes)} of at most {format_bytes(kept.limit_bytes)})"
        parts.insert(0, begin + (size if kept.since is not None else ""))
    text = where + "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if parts else ""
