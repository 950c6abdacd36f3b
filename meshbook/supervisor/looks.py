"""Looks at ranks that are under way: which hosts have told what they saw, and which have stayed silent.

Pure. A look ends when every host has answered, or when it is given up; then it is whole as far as it goes: what the
supervisor itself knows of ranks whose host said nothing stands in for what they would have said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages import RankExited, RankInfo, RankSnapshot, SnapshotsTaken

# Seconds a host has to answer. It gives its own ranks about 1.5 s: 1 to answer themselves, the rest to be looked at
# from outside.
PATIENCE_S = 2.5


@dataclass
class Look:
    """One TakeSnapshots on its way."""

    call: CallId
    ranks: Ranks
    waiting: set[int]  # hosts
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # names of hosts, as hosts of their own may say


class Looks:
    """All looks that are open."""

    def __init__(self) -> None:
        self._open: dict[str, Look] = {}

    def begin(self, call: CallId, ranks: Ranks, hosts: Iterable[int]) -> None:
        self._open[call] = Look(call, ranks, set(hosts))

    def forget(self, call: str) -> None:
        """Nobody waits for it any more."""
        self._open.pop(call, None)

    def heard(self, host: int, report: SnapshotsTaken) -> bool:
        """Note what a host saw; whether that look has now heard of all of them."""
        look = self._open.get(report.call)
        if look is None or host not in look.waiting:
            return False
        look.waiting.discard(host)
        look.snapshots.update((snapshot.rank, snapshot) for snapshot in report.snapshots)
        look.silent.update(report.silent_hosts)
        return not look.waiting

    def host_gone(self, host: int) -> list[str]:
        """A host ended; the looks that have now heard all they will."""
        ended = []
        for look in self._open.values():
            if host in look.waiting:
                look.waiting.discard(host)
                if not look.waiting:
                    ended.append(look.call)
        return list(ended)

    def end(
        self, call: str, known: Mapping[int, RankInfo], exited: Mapping[int, RankExited], host_of: Mapping[int, int]
    ) -> SnapshotsTaken | None:
        """Close a look and say what was seen; None where there is no such look.

        Args:
            known: what the supervisor knows of each rank.
            exited: ranks that are gone.
            host_of: the host that each rank is on.
        """
        look = self._open.pop(call, None)
        if look is None:
            return None
        silent = set(look.silent)
        names = _names(known, host_of)
        found = []
        for rank in look.ranks:
            seen, info = look.snapshots.get(rank), known.get(rank)
            host = names[host_of.get(rank, 0)]
            gone = exited.get(rank)
            if seen is None and gone is None:
                if host_of.get(rank) in look.waiting:
                    silent.add(host)
                    problem = f"its host {host} did not answer within {PATIENCE_S:g} s"
                else:
                    problem = "its host said nothing of it"
                seen = RankSnapshot(
                    rank=rank,
                    host=host,
                    pid=info.pid if info is not None else None,
                    call=info.call if info is not None else None,
                    cell=info.cell if info is not None else None,
                    cell_line=info.line if info is not None else None,
                    beat_age_s=info.beat_age_s if info is not None else None,
                    problem=problem,
                )
            elif seen is None:
                seen = RankSnapshot(rank=rank, host=host, pid=gone.pid if gone is not None else None, exited=gone)
            found.append(seen)
        return SnapshotsTaken(call=look.call, snapshots=tuple(found), silent_hosts=tuple(sorted(silent)))


def _names(known: Mapping[int, RankInfo], host_of: Mapping[int, int]) -> dict[int, str]:
    """What each host is called; several on one machine are told apart by their numbers."""
    names = {host: f"host {host}" for host in host_of.values()} | {0: "host 0"}
    names |= {host_of[rank]: info.host for rank, info in known.items() if info.host and rank in host_of}
    taken = list(names.values())
    return {host: name if taken.count(name) == 1 else f"{name} (host {host})" for host, name in names.items()}
