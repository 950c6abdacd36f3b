"""Commands whose values are on their way from another machine: they have their place in the queues, and wait there.

The supervisor lets them begin on all hosts at once, or fail on all: a value that does not reach one machine must not
leave the others in a collective that it never joins. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.host.instructions import Instructions
from meshbook.host.open_calls import OpenCalls
from meshbook.host.rank_record import QueuedCommand, RankRecord
from meshbook.host.stop_escalation import cancelled_command
from meshbook.ids import Ranks
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome, RankError
from meshbook.wire.shared_buffers import replace_shared


class StagedCommands:
    """The queued commands of one host that are not ready."""

    def __init__(
        self,
        ranks: dict[int, RankRecord],
        calls: OpenCalls,
        dispatch_next: Callable[[RankRecord, float], Instructions],
    ) -> None:
        self._ranks, self._calls, self._dispatch_next = ranks, calls, dispatch_next

    def begin(
        self, command: Any, copies: dict[messages.SharedBuffer, messages.SharedBuffer], now: float
    ) -> tuple[Instructions, Ranks]:
        """Let a command begin, with copies of its buffers; return also the ranks from which a Stop has taken it."""
        body = codec.encode_body(replace_shared(command, copies)) if copies else None
        records = self._records(command)
        waiting = {record.rank: self._waiting(record, command.call) for record in records}
        for queued in filter(None, waiting.values()):  # ranks share it
            queued.is_ready, queued.body = True, body or queued.body
        todo = [step for record in records for step in self._dispatch_next(record, now)]
        return todo, tuple(rank for rank, queued in waiting.items() if queued is None)

    def fail(self, command: Any, reason: str, now: float) -> Instructions:
        """End a command on all ranks, which do not run it."""
        text = f"a value did not reach all machines, so the call was run on none: {reason}"
        outcome = Outcome(status="error", error=RankError(ename="TransferError", evalue=text, traceback=(text,)))
        todo: Instructions = []
        cancelled = cancelled_command(command) if isinstance(command, messages.RunOps) else None
        for record in self._records(command):
            queued = self._waiting(record, command.call)
            if queued is None:
                continue
            if cancelled is not None:
                record.queue[record.queue.index(queued)] = cancelled
            else:
                record.queue.remove(queued)
            todo += self._calls.finish_rank(command.call, record.rank, outcome, now)
            todo += self._dispatch_next(record, now)
        return todo

    def _records(self, command: Any) -> list[RankRecord]:
        return [self._ranks[rank] for rank in command.ranks if rank in self._ranks]

    def _waiting(self, record: RankRecord, call: str) -> QueuedCommand | None:
        return next((one for one in record.queue if one.call == call and not one.is_ready), None)
