"""A host's part in values between machines: it fetches those of commands, and lets others fetch those of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshbook.host.instructions import Instructions
from meshbook.host.ledger import HostLedger
from meshbook.wire import codec, messages
from meshbook.wire.buffers import SegmentPool
from meshbook.wire.data_connections import DataConnections
from meshbook.wire.loop import Loop
from meshbook.wire.shared_buffers import find_shared
from meshbook.wire.transfers import BufferFetcher, Copies, serve_chunks

_SUPERVISOR = 0  # among the peers of data connections


class ArrivingValues:
    """The values that this host fetches for its ranks, into segments that they read and release.

    Args:
        report: sends a report to the supervisor.
    """

    def __init__(self, loop: Loop, ledger: HostLedger, report: Callable[[messages.HostReport], None]) -> None:
        self._loop, self._ledger, self._report = loop, ledger, report
        self._pool = SegmentPool()
        self._fetcher = BufferFetcher(self._pool, loop.act)
        self._data = DataConnections(loop, lambda _, chunk: self._fetcher.handle(chunk), self._data_ended)
        self._listens_at = ""  # an address of this machine; "": not known yet
        self._fetching: dict[str, str] = {}  # calls, and the transfer of each
        self._staged: dict[str, tuple[Any, Copies]] = {}  # by call: commands that may not begin yet

    COMMANDS = (messages.StagedCommand, messages.BeginStaged, messages.BufferChunk, messages.FetchChunk)

    def listen(self, host: str) -> None:
        """Have the supervisor connect to this address of this machine, for what is large."""
        self._listens_at = host
        if (address := self._loop.observe(lambda: self._data.listen(host, _SUPERVISOR))) is not None:
            self._report(messages.DataListening(address))

    def handle(self, command: messages.HostCommand, now: float) -> Instructions:
        """Carry out one of COMMANDS."""
        match command:
            case messages.StagedCommand():
                return self._stage(command, now)
            case messages.BeginStaged():
                return self._begin(command, now)
            case messages.BufferChunk():
                self._fetcher.handle(command)
            case messages.FetchChunk():
                self._serve(command)
        return []

    def take_note(self, report: messages.HostReport) -> None:
        """Release what a rank says that it no longer reads."""
        if isinstance(report, messages.SegmentsReleased):
            self.released(report.rank, report.segments)

    def released(self, rank: int, segments: tuple[str, ...]) -> None:
        """Take note that a rank has released segments; those of others are ignored."""
        for segment in segments:
            self._pool.release(segment, reader=rank)

    def remove_rank(self, rank: int) -> None:
        """Forget a rank that has ended: it reads nothing any more."""
        self._pool.remove_reader(rank)

    def take_over(self) -> None:
        """Go on in a process that was forked from the host's, which has ended, with the memory for what was to come."""
        self._data.take_over()
        self._fetcher.cancel_all("its machine's host agent was killed while it was on its way; send it again")
        if self._listens_at:
            self.listen(self._listens_at)

    def close(self) -> None:
        self._data.close()
        self._pool.close()

    def _serve(self, request: messages.FetchChunk) -> None:
        if request.directly and self._loop.observe(lambda: self._data.serve(_SUPERVISOR, request)):
            return
        for chunk in serve_chunks(request):
            self._report(chunk)

    def _data_ended(self, _: int) -> None:
        for name in list(self._fetching.values()):
            self._fetcher.ask_again(name)

    def _stage(self, staged: messages.StagedCommand, now: float) -> Instructions:
        command: Any = codec.host_commands.decode_body(staged.body)
        self._staged[command.call] = command, {}
        todo = self._ledger.enqueue(command, staged.body, now, ready=False)
        if staged.fetch:
            self._loop.diverge()  # memory of this process alone is reserved
            readers = self._ledger.local(command.ranks)
            buffers = find_shared(command)
            directly = self._loop.observe(lambda: self._data.is_open(_SUPERVISOR))
            name = self._fetcher.fetch(
                buffers, readers, self._report, lambda found: self._fetched(command, found), directly=directly
            )
            if self._fetcher.is_open(name):
                self._fetching[command.call] = name
        return todo

    def _fetched(self, command: Any, found: Copies | str) -> None:
        self._fetching.pop(command.call, None)
        if isinstance(found, str):
            self._report(messages.ValuesArrived(call=command.call, error=found))
            return
        self._staged[command.call] = command, found
        self._report(messages.ValuesArrived(call=command.call))
        self._release_originals(command, self._ledger.local(command.ranks))

    def _release_originals(self, command: Any, ranks: Iterable[int]) -> None:
        """Have their owner know that these ranks do not read the values that it has sent."""
        originals = tuple({buffer.segment for buffer in find_shared(command)})
        for rank in ranks:
            self._report(messages.SegmentsReleased(rank=rank, segments=originals))

    def _begin(self, begin: messages.BeginStaged, now: float) -> Instructions:
        command, copies = self._staged.pop(begin.call, (None, {}))
        if command is None:
            return []
        segments = tuple({copy.segment for copy in copies.values()})
        if begin.error:
            for segment in segments:
                self._pool.release_all(segment)
            self._release_originals(command, self._ledger.local(command.ranks))
            return self._ledger.staged.fail(command, begin.error, now)
        todo, without = self._ledger.staged.begin(command, copies, now)
        for rank in without:
            self.released(rank, segments)
        if not copies:  # they are on this machine
            self._release_originals(command, without)
        return todo
