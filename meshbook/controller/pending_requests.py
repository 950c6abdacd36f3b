"""A connection's requests without a reply yet, and the reports that belong to them. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from meshbook import errors
from meshbook.ids import format_ranks
from meshbook.wire import messages


@dataclass
class PendingRequest:
    """A call without a reply yet, and the handlers of its reports."""

    future: Future[Any]
    on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None
    on_input: Callable[[messages.InputRequest], None] | None = None
    on_stuck: Callable[[messages.RanksStuck], None] | None = None
    on_report: Callable[[Any], None] | None = None  # of a search, or a start: what comes before its reply


class PendingRequests:
    """Matches reports to calls. `report_handlers` is a table of its methods by report type.

    Attributes:
        debuggers: by call id, what takes the stops of a call in the debugger, and its end; perhaps another client's.

    Args:
        on_orphan_output: receives output of calls that no handler takes.
        decline_input: replies to an input() request that no handler takes.
        on_error: receives what an output handler raised on a call's last output; the call ends nevertheless.
    """

    def __init__(
        self,
        *,
        on_orphan_output: Callable[[messages.CallOutput], object],
        decline_input: Callable[[messages.InputRequest], object],
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._pending: dict[str, PendingRequest] = {}
        self.debuggers: dict[str, Callable[[Any], object]] = {}
        self._end: str | None = None  # why there are no replies any more
        self._on_orphan_output, self._decline_input, self._on_error = on_orphan_output, decline_input, on_error
        self.report_handlers: dict[type, Callable[[Any], None]] = {
            messages.CallFinished: self._call_finished,
            messages.CallOutput: self._call_output,
            messages.InputRequest: self._input_requested,
            messages.DebuggedCallEnded: self._debugged_call_ended,
            messages.RanksStuck: self._ranks_stuck,
            messages.LogsFound: self._reported,
            messages.MeshStarting: self._reported,
            messages.CommandReply: self._replied,
            messages.MeshReady: self._replied,
            messages.MeshHealed: self._replied,
            messages.SnapshotReply: self._replied,
        }

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, call: str, opened: PendingRequest) -> None:
        """Wait for the reply to a call. If `fail_all` was called before, on whichever thread, the call ends at once."""
        self._pending[call] = opened
        if self._end is not None:
            self.fail(call, errors.NotAttached(self._end))

    def discard(self, call: str) -> None:
        self._pending.pop(call, None)

    def set_handlers(
        self,
        call: str,
        *,
        on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None,
        on_input: Callable[[messages.InputRequest], None] | None = None,
        on_stuck: Callable[[messages.RanksStuck], None] | None = None,
    ) -> None:
        """Replace the handlers of an open call; does nothing if the call has ended."""
        found = self._pending.get(call)
        if found is not None:
            found.on_output, found.on_input, found.on_stuck = on_output, on_input, on_stuck

    def resolve(self, call: str, report: Any) -> None:
        """End a call with this report as its result; does nothing if it has ended."""
        found = self._pending.pop(call, None)
        if found is not None:
            found.future.set_result(report)

    def fail(self, call: str, error: errors.MeshbookError) -> bool:
        """End a call with an error. Return whether it was open."""
        found = self._pending.pop(call, None)
        if found is not None and not found.future.done():
            found.future.set_exception(error)
        return found is not None

    def fail_all(self, text: str) -> None:
        """End every open call with NotAttached, and every one that is added from now on."""
        self._end = text
        for call in list(self._pending):
            self.fail(call, errors.NotAttached(text))

    def _call_finished(self, report: messages.CallFinished) -> None:
        found = self._pending.pop(report.call, None)
        if found is None:
            return
        if report.items:
            try:
                if found.on_output is not None:
                    found.on_output(report.items)
                else:
                    self._on_orphan_output(messages.CallOutput(report.call, report.items))
            except BaseException as error:  # SystemExit would end only the listener thread
                self._on_error(error)
        found.future.set_result(report)

    def _call_output(self, report: messages.CallOutput) -> None:
        found = self._pending.get(report.call)
        if found is not None and found.on_output is not None:
            found.on_output(report.items)
        else:
            self._on_orphan_output(report)

    def _debugged_call_ended(self, report: messages.DebuggedCallEnded) -> None:
        if (debugger := self.debuggers.get(report.target)) is not None:
            debugger(report)

    def _input_requested(self, request: messages.InputRequest) -> None:
        found = self._pending.get(request.call)
        if request.stop is not None and (debugger := self.debuggers.get(request.call)) is not None:
            debugger(request)
        elif found is not None and found.on_input is not None:
            found.on_input(request)
        else:
            self._decline_input(request)

    def _ranks_stuck(self, report: messages.RanksStuck) -> None:
        found = self._pending.get(report.call)
        if found is None:
            return
        if found.on_stuck is not None:
            found.on_stuck(report)
        else:
            self._call_output(stuck_notice(report))

    def _reported(self, report: messages.LogsFound | messages.MeshStarting) -> None:
        found = self._pending.get(report.call)
        if found is not None and found.on_report is not None:
            found.on_report(report)

    def _replied(self, report: Any) -> None:
        self.resolve(report.call, report)


def stuck_notice(stuck: messages.RanksStuck) -> messages.CallOutput:
    """Return the notice about stuck ranks, for a cell that continues or has ended already."""
    text = f"did not come back from Stop: {stuck.reason}; %mesh kill {format_ranks(stuck.ranks)} ends what does not"
    item = messages.RankDisplay(ranks=stuck.ranks, item=messages.Notice(text))
    return messages.CallOutput(call=stuck.call, items=(item,))
