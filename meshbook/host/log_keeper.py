"""A host's part in logs: it keeps what its ranks print, and has processes of their own search in it.

A search is a child process (`log_search`), which the system kills when nobody holds the write end of its standard input
any more: when the search is ended, and when the host ends. A supervisor's standby holds it too, and goes on with what
the process reports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from meshbook.host.instructions import KeepOutput
from meshbook.host.log_files import EVENT, STDERR, STDOUT, LogFiles, logs_folder
from meshbook.host.log_search import SearchRequest
from meshbook.host.rank_record import RankRecord
from meshbook.host.starter import make_pipe
from meshbook.wire import descriptors, messages
from meshbook.wire.loop import Loop

log = logging.getLogger("meshbook.host")

# Searches at a time. Each is a process of some 30 MiB; those that follow stay.
_MAX_SEARCHES = 8
# Bytes read of a search's reports per turn of the loop.
_READ_BYTES = 1 << 20
# Seconds between two attempts to collect the exit status of a search that has ended.
_REAP_S = 0.05
_KINDS = {"stdout": STDOUT, "stderr": STDERR, "event": EVENT}


@dataclass
class _Search:
    """A search that runs."""

    command: messages.SearchLogs
    process: subprocess.Popen[bytes]
    stdin: int  # while it is open, the process lives
    stdout: int
    received: bytearray = field(default_factory=bytearray)  # the beginning of a report
    has_ended: bool = False  # it has said so


class LogKeeper:
    """Keeps the output of a host's ranks, and answers the commands about it. Call every method from the loop."""

    COMMANDS = (messages.QueryLogs, messages.SearchLogs, messages.EndLogSearch)

    def __init__(
        self,
        loop: Loop,
        folder: Path,
        host: int,
        report: Callable[[messages.HostReport], None],
        *,
        mergeable: bool,
    ) -> None:
        """
        Args:
            folder: the host's.
            mergeable: other hosts' hits will be folded with ours.
        """
        self._loop, self._report, self._mergeable = loop, report, mergeable
        self._files = LogFiles(loop, logs_folder(folder, host))
        self._searches: dict[str, _Search] = {}
        self._ended: list[subprocess.Popen[bytes]] = []  # whose exit status has not been collected

    def set_limit(self, limit_bytes: int) -> None:
        """Set how many bytes of output are kept."""
        self._files.set_limit(limit_bytes)

    def keep(self, output: KeepOutput) -> None:
        self._files.append(output.rank, _KINDS[output.kind], output.text)

    def handle(self, command: Any, ranks: Mapping[int, RankRecord]) -> None:
        match command:
            case messages.QueryLogs(call=call, rank=rank, limit_bytes=limit_bytes):
                record = ranks.get(rank)
                text = record.log.tail(limit_bytes) if record is not None else ""
                self._report(messages.CommandReply(call=call, text=text))
            case messages.SearchLogs():
                self._begin(command)
            case messages.EndLogSearch():
                self._end(command.call)

    def take_over(self) -> None:
        """Go on in a process that was forked from the keeper's, which has ended."""
        self._files.take_over()
        self._ended = []

    def close(self) -> None:
        for call in list(self._searches):
            self._end(call)
        for process in self._ended:
            process.wait()

    # ---- searches

    def _begin(self, command: messages.SearchLogs) -> None:
        if len(self._searches) >= _MAX_SEARCHES:
            problem = f"{_MAX_SEARCHES} searches run already; end one that follows (-f), and try again"
            self._report(messages.LogsFound(command.call, ended=True, problem=problem))
            return
        self._files.flush()
        self._loop.diverge()
        request = SearchRequest(str(self._files.folder), command, self._files.kept(), self._mergeable)
        body = msgspec.msgpack.encode(request)
        kept: list[int] = []  # this process's ends of the pipes
        passed: list[int] = []
        try:
            read_in, write_in = os.pipe2(os.O_CLOEXEC)
            kept.append(write_in)
            passed.append(read_in)
            read_out, write_out = make_pipe()
            kept.append(read_out)
            passed.append(write_out)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "meshbook.host.log_search"],
                stdin=read_in,
                stdout=write_out,
                process_group=0,
            )
        except OSError as error:
            for fd in kept:
                os.close(fd)
            problem = f"a process for it could not be started: {descriptors.describe(error)}"
            self._report(messages.LogsFound(command.call, ended=True, problem=problem))
            return
        finally:
            for fd in passed:
                os.close(fd)
        os.write(write_in, len(body).to_bytes(4) + body)  # less than a pipe takes: patterns are short
        search = self._searches[command.call] = _Search(command, process, write_in, read_out)
        self._loop.watch_fd(read_out, lambda: self._receive(search))

    def _receive(self, search: _Search) -> None:
        try:
            data = os.read(search.stdout, _READ_BYTES)
        except BlockingIOError:
            return
        search.received += data
        while (size := _size_of_first(search.received)) is not None:
            report = msgspec.msgpack.decode(search.received[4 : 4 + size], type=messages.LogsFound)
            del search.received[: 4 + size]
            search.has_ended = report.ended
            self._report(report)
        if not data or search.has_ended:
            call = search.command.call
            self._end(call)
            if not search.has_ended:
                self._report(messages.LogsFound(call, ended=True, problem="the process that searched has ended"))

    def _end(self, call: str) -> None:
        """End a search if it runs."""
        search = self._searches.pop(call, None)
        if search is None:
            return
        self._loop.diverge()  # a standby that held its standard input would keep it alive
        self._loop.unwatch(search.stdout)
        for fd in (search.stdin, search.stdout):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            search.process.kill()
        self._ended.append(search.process)
        self._collect_ended()

    def _collect_ended(self) -> None:
        self._ended = [process for process in self._ended if process.poll() is None]
        if self._ended:
            self._loop.call_later(_REAP_S, self._collect_ended)


def _size_of_first(received: bytearray) -> int | None:
    """Return the size of the first report, if it is complete."""
    size = int.from_bytes(received[:4])
    return size if len(received) >= 4 + size and len(received) >= 4 else None
