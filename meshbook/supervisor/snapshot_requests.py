"""Looks at ranks that are under way: which hosts have told what they saw, and which have stayed silent.

Pure. A look ends when every host has answered, or when it is given up; then it is whole as far as it goes: what the
supervisor itself knows of ranks whose host said nothing stands in for what they would have said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages import RankExited, RankInfo, RankSnapshot, SnapshotReply

# Seconds a host has to answer. It gives its own ranks about 1.5 s: 1 to answer themselves, the rest to be looked at
# from outside.
SNAPSHOT_TIMEOUT_S = 2.5


@dataclass
class SnapshotRequest:
    """One TakeSnapshots on its way."""

    call: CallId
    ranks: Ranks
    waiting_hosts: set[int]  # hosts
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    silent_hosts: set[str] = field(default_factory=set)  # names of hosts, as hosts of their own may say


class SnapshotRequests:
    """All looks that are open."""

    def __init__(self) -> None:
        self._open: dict[str, SnapshotRequest] = {}

    def begin(self, call: CallId, ranks: Ranks, hosts: Iterable[int]) -> None:
        self._open[call] = SnapshotRequest(call, ranks, set(hosts))

    def cancel(self, call: str) -> None:
        """Nobody waits for it any more."""
        self._open.pop(call, None)

    def add_reply(self, host: int, report: SnapshotReply) -> bool:
        """Note what a host saw; whether that look has now heard of all of them."""
        request = self._open.get(report.call)
        if request is None or host not in request.waiting_hosts:
            return False
        request.waiting_hosts.discard(host)
        request.snapshots.update((snapshot.rank, snapshot) for snapshot in report.snapshots)
        request.silent_hosts.update(report.silent_hosts)
        return not request.waiting_hosts

    def host_lost(self, host: int) -> list[str]:
        """A host ended; the looks that have now heard all they will."""
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
        """Close a look and say what was seen; None where there is no such look.

        Args:
            rank_infos: what the supervisor knows of each rank.
            exited: ranks that are gone.
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
    """What each host is called; several on one machine are told apart by their numbers."""
    names = {host: f"host {host}" for host in host_of.values()} | {0: "host 0"}
    names |= {host_of[rank]: info.host for rank, info in rank_infos.items() if info.host and rank in host_of}
    all_names = list(names.values())
    return {host: name if all_names.count(name) == 1 else f"{name} (host {host})" for host, name in names.items()}
