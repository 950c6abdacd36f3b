"""Open requests for snapshots: which hosts have replied, and which have stayed silent.

Pure. A request ends when every host has replied, or at its timeout. Ranks whose host did not reply are represented by
what the supervisor itself knows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages import RankExited, RankInfo, RankSnapshot, SnapshotReply

# Seconds a host has to reply. It gives its own ranks about 1.5 s: 1 to reply themselves, the rest for an inspection
# from outside.
SNAPSHOT_TIMEOUT_S = 2.5


@dataclass
class SnapshotRequest:
    """One open TakeSnapshots."""

    call: CallId
    ranks: Ranks
    waiting_hosts: set[int]  # hosts that have not replied
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    silent_hosts: set[str] = field(default_factory=set)  # host names, which the hosts' replies may add to


class SnapshotRequests:
    """All open requests."""

    def __init__(self) -> None:
        self._open: dict[str, SnapshotRequest] = {}

    def begin(self, call: CallId, ranks: Ranks, hosts: Iterable[int]) -> None:
        self._open[call] = SnapshotRequest(call, ranks, set(hosts))

    def cancel(self, call: str) -> None:
        """Drop a request whose client no longer waits."""
        self._open.pop(call, None)

    def add_reply(self, host: int, report: SnapshotReply) -> bool:
        """Record a host's reply; return whether all hosts have now replied to that request."""
        request = self._open.get(report.call)
        if request is None or host not in request.waiting_hosts:
            return False
        request.waiting_hosts.discard(host)
        request.snapshots.update((snapshot.rank, snapshot) for snapshot in report.snapshots)
        request.silent_hosts.update(report.silent_hosts)
        return not request.waiting_hosts

    def host_lost(self, host: int) -> list[str]:
        """Record the loss of a host; return the requests that are thereby complete."""
        completed = []
        for request in self._open.values():
            if host in request.waiting_hosts:
                request.waiting_hosts.discard(host)
                if not request.waiting_hosts:
                    completed.append(request.call)
        return list(completed)

    def finish(
        self,
        call: str,
        rank_infos: Mapping[int, RankInfo],
        exited: Mapping[int, RankExited],
        host_of: Mapping[int, int],
    ) -> SnapshotReply | None:
        """Close a request and return the combined reply; None if the request does not exist.

        Args:
            rank_infos: what the supervisor knows of each rank.
            exited: ranks that have exited.
            host_of: the host that each rank is on.
        """
        request = self._open.pop(call, None)
        if request is None:
            return None
        silent = set(request.silent_hosts)
        names = _host_names(rank_infos, host_of)
        snapshots = []
        for rank in request.ranks:
            snapshot, info = request.snapshots.get(rank), rank_infos.get(rank)
            host = names[host_of.get(rank, 0)]
            exit_report = exited.get(rank)
            if snapshot is None and exit_report is None:
                if host_of.get(rank) in request.waiting_hosts:
                    silent.add(host)
                    problem = f"its host {host} did not answer within {SNAPSHOT_TIMEOUT_S:g} s"
                else:
                    problem = "its host said nothing of it"
                snapshot = RankSnapshot(
                    rank=rank,
                    host=host,
                    pid=info.pid if info is not None else None,
                    call=info.call if info is not None else None,
                    cell=info.cell if info is not None else None,
                    cell_line=info.line if info is not None else None,
                    beat_age_s=info.beat_age_s if info is not None else None,
                    problem=problem,
                )
            elif snapshot is None:
                snapshot = RankSnapshot(
                    rank=rank, host=host, pid=exit_report.pid if exit_report is not None else None, exited=exit_report
                )
            snapshots.append(snapshot)
        return SnapshotReply(call=request.call, snapshots=tuple(snapshots), silent_hosts=tuple(sorted(silent)))


def _host_names(rank_infos: Mapping[int, RankInfo], host_of: Mapping[int, int]) -> dict[int, str]:
    """Return the name of each host; several on one machine are distinguished by their numbers."""
    names = {host: f"host {host}" for host in host_of.values()} | {0: "host 0"}
    names |= {host_of[rank]: info.host for rank, info in rank_infos.items() if info.host and rank in host_of}
    all_names = list(names.values())
    return {host: name if all_names.count(name) == 1 else f"{name} (host {host})" for host, name in names.items()}
