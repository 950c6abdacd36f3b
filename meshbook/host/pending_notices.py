"""Notices that wait for a call in whose output they are shown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshbook.host.instructions import Instructions
from meshbook.host.open_calls import OpenCalls
from meshbook.host.rank_record import QueuedCommand, RankRecord
from meshbook.wire import messages


class PendingNotices:
    """Shows the `pending_notices` of ranks in the calls that they run."""

    def __init__(
        self,
        calls: OpenCalls,
        fold: Callable[[RankRecord, str | None, tuple[messages.OutputItem, ...], float], Instructions],
    ) -> None:
        """fold: adds items to the output of a rank in a call."""
        self._calls, self._fold = calls, fold
        self._shown_in: dict[messages.Notice, str | None] = {}  # of the mesh's own notices, the call that shows each

    def add(self, record: RankRecord, notice: messages.Notice, now: float) -> Instructions:
        """Show a notice in the call that a rank runs, else in its next one."""
        record.pending_notices.append(notice)
        return [] if record.running is None else self.show(record, record.running, now)

    def add_once(self, records: Iterable[RankRecord], notice: messages.Notice, now: float) -> Instructions:
        """Show a notice that is not about a rank in one call: one that these ranks run, else their next one."""
        self._shown_in[notice] = None
        return [instruction for record in records for instruction in self.add(record, notice, now)]

    def show(self, record: RankRecord, queued: QueuedCommand, now: float) -> Instructions:
        """Show what is pending for a rank in a call that it runs."""
        pending = self._calls.get(queued.call)
        if not record.pending_notices or pending is None or isinstance(pending.command, messages.FormGroups):
            return []
        notices, record.pending_notices = record.pending_notices, []
        for notice in notices:
            if notice in self._shown_in:
                self._shown_in[notice] = self._shown_in[notice] or queued.call
        shown = tuple(notice for notice in notices if self._shown_in.get(notice, queued.call) == queued.call)
        return self._fold(record, queued.call, shown, now) if shown else []
