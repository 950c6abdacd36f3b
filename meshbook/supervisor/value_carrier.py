"""The supervisor's part in values between machines: those of clients go to hosts, those of ranks come to clients.

A command with values is staged on all its hosts, and begins, or fails, on all of them when the last machine has them or
one cannot have them. A result with values is passed on when the values are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshbook.errors import TransferError
from meshbook.fold.outcomes import failure_report_for
from meshbook.ids import client_of_call
from meshbook.wire import codec, messages
from meshbook.wire.buffers import SegmentPool
from meshbook.wire.data_connections import DataConnections
from meshbook.wire.loop import Loop
from meshbook.wire.shared_buffers import find_shared, may_have_shared, replace_shared
from meshbook.wire.transfers import BufferFetcher, Copies, serve_chunks


@dataclass
class _Staged:
    """A command that waits for its values: its hosts, and those of them that have yet to get the values."""

    hosts: tuple[int, ...]
    waiting: set[int]


class ValueCarrier:
    """Carries values between this machine and those of hosts.

    Args:
        loop: the supervisor's.
        send: sends a command to hosts.
        pass_on: takes a host's report.
    """

    def __init__(
        self,
        loop: Loop,
        send: Callable[[Iterable[int], bytes], None],
        pass_on: Callable[[int, messages.HostReport], None],
    ) -> None:
        self._loop, self._send, self._pass_on = loop, send, pass_on
        self._pool = SegmentPool()
        self._fetcher = BufferFetcher(self._pool, loop.act)
        self._data = DataConnections(loop, lambda host, chunk: self._fetcher.handle(chunk), self._data_ended)
        self._staged: dict[str, _Staged] = {}  # by call
        self._arriving: dict[str, int] = {}  # transfers of results, and the host of each
        self._segments: dict[str, str] = {}  # of results here, and the client that has yet to release each

    def stage(self, hosts: tuple[int, ...], remote: set[int], message: Any, body: bytes) -> bool:
        """Send a command whose values are on their way; return False for one that has none, or for this machine."""
        elsewhere = remote.intersection(hosts)
        if not elsewhere or not isinstance(message, messages.MainThreadCommand) or not may_have_shared(body):
            return False
        if not find_shared(message):
            return False
        self._staged[message.call] = _Staged(hosts, elsewhere)
        for host in hosts:
            staged = messages.StagedCommand(body=body, fetch=host in elsewhere)
            self._send((host,), codec.encode_body(staged))
        return True

    def receive(self, host: int, report: messages.HostReport, body: bytes, *, is_remote: bool) -> bool:
        """Handle a report about values; return False for one that can be passed on as it is."""
        match report:
            case messages.ValuesArrived():
                self._arrived(host, report.call, report.error)
            case messages.FetchChunk():
                self._serve(host, report)
            case messages.DataListening():
                self._data.dial(host, report.address)
            case messages.BufferChunk():
                self._fetcher.handle(report)
            case messages.CallFinished() if is_remote and may_have_shared(body) and find_shared(report):
                self._fetch(host, report)
            case _:
                return False
        return True

    def host_lost(self, host: int) -> None:
        """Wait no longer for values of, or on, a host that is lost."""
        self._data.drop(host)
        for call in list(self._staged):
            self._arrived(host, call, "")
        for name in [name for name, source in self._arriving.items() if source == host]:
            self._fetcher.cancel(name, "its machine is lost")

    def release(self, segments: Iterable[str]) -> None:
        """A client has released values; names of others' segments are ignored."""
        for segment in segments:
            if self._segments.pop(segment, None) is not None:
                self._pool.release_all(segment)

    def client_left(self, client: str) -> None:
        self.release([segment for segment, owner in self._segments.items() if owner == client])

    def is_direct(self, host: int) -> bool:
        """Whether values to and from a host go by a data connection."""
        return self._loop.observe(lambda: self._data.is_open(host))

    def take_over(self) -> None:
        """Go on in a standby of the supervisor, which has ended, with the memory into which values were written."""
        self._data.take_over()
        self._fetcher.cancel_all("the mesh's supervisor was killed while it was on its way; ask for it again")

    def close(self) -> None:
        self._data.close()
        self._pool.close()

    def _serve(self, host: int, request: messages.FetchChunk) -> None:
        if request.directly and self._loop.observe(lambda: self._data.serve(host, request)):
            return
        for chunk in serve_chunks(request):
            self._send((host,), codec.encode_body(chunk))

    def _data_ended(self, host: int) -> None:
        for name in [name for name, source in self._arriving.items() if source == host]:
            self._fetcher.ask_again(name)

    def _arrived(self, host: int, call: str, error: str) -> None:
        staged = self._staged.get(call)
        if staged is None:
            return
        staged.waiting.discard(host)
        if error or not staged.waiting:
            del self._staged[call]
            self._send(staged.hosts, codec.encode_body(messages.BeginStaged(call=call, error=error)))  # type: ignore[arg-type]

    def _fetch(self, host: int, report: messages.CallFinished) -> None:
        self._loop.diverge()  # memory of this process alone is reserved
        name = ""

        def done(found: Copies | str) -> None:
            self._arriving.pop(name, None)
            self._release_originals(host, report)
            if isinstance(found, str):
                self._pass_on(host, failure_report_for(report, TransferError(found)))  # type: ignore[arg-type]
                return
            for copy in found.values():
                self._segments[copy.segment] = client_of_call(report.call)
            self._pass_on(host, replace_shared(report, found))

        name = self._fetcher.fetch(
            find_shared(report),
            1,
            lambda request: self._send((host,), codec.encode_body(request)),
            done,
            directly=self.is_direct(host),
        )
        if self._fetcher.is_open(name):
            self._arriving[name] = host

    def _release_originals(self, host: int, report: messages.CallFinished) -> None:
        segments = tuple(dict.fromkeys(buffer.segment for buffer in find_shared(report)))
        ranks = tuple(sorted(rank for part in report.outcomes for rank in part.ranks))
        self._send((host,), codec.encode_body(messages.Release(ranks=ranks, segments=segments)))
