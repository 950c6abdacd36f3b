"""Ends collectives on gloo that take longer than the timeout of their group, not counting the time of open prompts.

A collective that waits for a rank in the debugger must not time out, and gloo takes its timeout when a collective
begins. So gloo has none, and the service thread looks once a second. On NCCL no collective times out in a mesh.
"""

from __future__ import annotations

from meshbook.rank.process_groups.backends import BackendAborts
from meshbook.rank.process_groups.failures import GroupFailure
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.ring import Collective, CollectiveRing
from meshbook.rank.process_groups.watched_group import WatchedGroup


class CollectiveTimeouts:
    """Breaks the group of a collective that has taken too long. Service thread only."""

    def __init__(self, ring: CollectiveRing, table: GroupTable, aborts: BackendAborts) -> None:
        self._ring, self._table, self._aborts = ring, table, aborts
        self._running: dict[int, Collective] = {}  # by number, when last looked; the ring may have dropped them since
        self._seen_at: dict[int, float] = {}  # when a wait was first seen, by the number of its collective

    def end_overdue(self) -> None:
        """End the waits that have lasted too long since they were first seen. Does not block."""
        now = self._table.clock()
        candidates = (*self._running.values(), *self._ring.since(0))
        self._running = {one.seq: one for one in candidates if one.may_time_out}
        self._ring.poll_completion(self._running.values())
        waits = [
            (group, one)
            for group in self._table
            for one in (*self._running.values(), *list(group.health.peer_waits.values()))
            if one.label is group.label and one.t_end is None
        ]
        self._seen_at = {one.seq: self._seen_at.get(one.seq, now) for _, one in waits}
        for group, one in waits:
            limit_s = one.timeout_s or group.timeout.total_seconds()
            if now - self._seen_at[one.seq] > limit_s:
                self._end(group, one, limit_s)

    def _end(self, group: WatchedGroup, collective: Collective, limit_s: float) -> None:
        """Break the group, unless it is broken or has other connections."""
        version, handles = group.health.connection_version, group.backend_handles
        if group.health.failure is not None or collective.generation != group.label.generation:
            return
        what = f"{collective.op} #{collective.group_seq} of {group.label.ranks_text}"
        whose = "the timeout of the process group" if collective.timeout_s is None else "its timeout"
        text = f"{what} timed out: it was not completed within {limit_s:g} s, {whose}"
        group.health.invalidate(GroupFailure(text, RuntimeError(text)), version=version)
        self._aborts.begin(handles)
