"""The ranks of a mesh as the supervisor knows them: where they run, what their hosts last reported, how they exited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from meshbook.fold.device_errors import dead_context
from meshbook.ids import Ranks, name_ranks
from meshbook.supervisor.effects import SendToHosts
from meshbook.wire import messages
from meshbook.wire.messages import OutcomeGroup, RankExited, RankInfo

# Sets of ranks of which it is remembered which host has which: most calls are on all ranks, or on a few sets in turn.
_MAX_RANK_SETS = 16


class RankTable:
    """Every rank of the mesh; empty until a mesh is requested.

    Attributes:
        changes: how ranks were replaced, and their number changed: each in words, after the class of error for a call
            that comes too late.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self._host_of: dict[int, int] = {}
        self._by_host: dict[Ranks, dict[int, Ranks]] = {}  # of sets of ranks that were asked for
        self._all: Ranks = ()
        self._infos: dict[int, RankInfo] = {}
        self._reported_at: dict[int, float] = {}  # when their hosts last reported them
        self._exited: dict[int, RankExited] = {}
        self._problems: dict[int, str] = {}  # of living ranks: why they are of little use
        self._leaving: frozenset[int] = frozenset()
        self._left_incarnations: dict[int, int] = {}  # of ranks that are no more

    def assign(self, world_size: int, num_hosts: int) -> None:
        """Create the ranks of a mesh that starts, and assign them to hosts."""
        self._host_of = assign_hosts(world_size, num_hosts)
        self._infos = {rank: RankInfo(rank=rank, state="starting", host="") for rank in range(world_size)}
        self._ranks_changed()

    # ---- inputs

    def host_ready(self, host: int, hostname: str) -> None:
        for rank in self.on_host(host):
            self._infos[rank] = msgspec.structs.replace(self._infos[rank], host=hostname)

    def start_finished(self) -> None:
        """Record that the mesh is up: ranks that were starting are idle."""
        for rank, info in self._infos.items():
            if info.state == "starting":
                self._infos[rank] = msgspec.structs.replace(info, state="idle")

    def heartbeat(self, infos: Iterable[RankInfo], now: float, *, is_starting: bool) -> None:
        """Record a host's report of its ranks.

        Args:
            is_starting: the mesh is coming up, so a rank that waits for a command is not idle yet.
        """
        for info in infos:
            known = self._infos.get(info.rank)
            if known is not None and known.state != "dead":
                not_yet = is_starting and info.state == "idle"
                self._infos[info.rank] = msgspec.structs.replace(info, state="starting") if not_yet else info
                self._reported_at[info.rank] = now

    def without_former(self, report: messages.HostHeartbeat) -> messages.HostHeartbeat:
        """Return a host's report without processes that are ranks no more: it may be older than a heal or a resize."""
        known, ranks = self._infos, report.ranks
        present = {
            info.rank for info in ranks if info.rank in known and known[info.rank].incarnation == info.incarnation
        }
        if len(present) == len(ranks) and all(metrics.rank in present for metrics in report.metrics):
            return report
        return msgspec.structs.replace(
            report,
            ranks=tuple(info for info in ranks if info.rank in present),
            metrics=tuple(metrics for metrics in report.metrics if metrics.rank in present),
        )

    def call_ended(self, parts: Iterable[OutcomeGroup]) -> None:
        """Record which ranks cannot use their GPU any more, as the errors of a call show."""
        for part in parts:
            problem = None if part.outcome.error is None else dead_context(part.outcome.error.evalue)
            if problem is not None:
                self._problems.update(dict.fromkeys(part.ranks, f"its {problem}"))

    def rank_exited(self, report: RankExited) -> bool:
        """Record that a rank has exited; return whether that was unknown, and not asked for."""
        info = self._infos.get(report.rank)
        if info is None or report.rank in self._exited or report.rank in self._leaving:
            return False
        self._infos[report.rank] = msgspec.structs.replace(
            info,
            state="dead",
            exit=report.description,
            call=None,
            cell=None,
            line=None,
            heals_when=report.heals_when,
        )
        self._exited[report.rank] = report
        self._problems.pop(report.rank, None)
        return True

    def exits_on_host(self, host: int, cause: str, heals_when: str = "") -> tuple[RankExited, ...]:
        """Return the exits of all ranks of a host that is lost."""
        return tuple(
            RankExited(
                rank=info.rank,
                pid=info.pid or 0,
                exit_code=None,
                signal=None,
                host=info.host,
                last_lines=(),
                last_collective=None,
                cause=cause,
                heals_when=heals_when,
            )
            for info in map(self.info, self.on_host(host))
            if info.rank not in self._exited
        )

    def incarnations(self, ranks: Ranks) -> tuple[int, ...]:
        """Return how many processes each of these ranks has had before."""
        return tuple(self._infos[rank].incarnation for rank in ranks)

    def restarting(self, ranks: Ranks) -> None:
        """Record that new processes start in the place of ranks that have exited."""
        if ranks:
            have = "has a new process" if len(ranks) == 1 else "have new processes"
            self.changes.append(("HealError", f"{name_ranks(ranks)} {have}"))
        for rank in ranks:
            del self._exited[rank]
            former = self._infos[rank]
            self._infos[rank] = RankInfo(
                rank=rank, state="starting", host=former.host, incarnation=former.incarnation + 1
            )

    def leaving(self, ranks: Ranks) -> None:
        """Record that these ranks were asked to end, and will be ranks of the mesh no more."""
        self._leaving = frozenset(ranks)

    def resize(self, world_size: int, hosts: Iterable[int]) -> None:
        """Forget ranks that have left, and add others, as ranks that have exited: their processes have yet to start.

        Args:
            hosts: where ranks can be started. The one with the fewest gets the next.
        """
        self.changes.append(("ResizeError", f"the mesh has {world_size} rank{'' if world_size == 1 else 's'} now"))
        for rank in [rank for rank in self._infos if rank >= world_size]:
            self._left_incarnations[rank] = self._infos.pop(rank).incarnation
            del self._host_of[rank]
            self._reported_at.pop(rank, None)
            self._exited.pop(rank, None)
            self._problems.pop(rank, None)
        self._leaving = frozenset()
        candidates, sizes = list(hosts), Counter(self._host_of.values())
        hostnames = {host: self._infos[rank].host for rank, host in self._host_of.items()}
        for rank in range(len(self._infos), world_size):
            host = self._host_of[rank] = min(candidates, key=lambda host: (sizes[host], host))
            sizes[host] += 1
            name, before = hostnames.get(host, ""), self._left_incarnations.pop(rank, -1)
            self._infos[rank] = RankInfo(rank=rank, state="dead", host=name, incarnation=before)
            self._exited[rank] = RankExited(
                rank=rank,
                pid=0,
                exit_code=None,
                signal=None,
                host=name,
                last_lines=(),
                last_collective=None,
                cause="has not been started",
            )
        self._ranks_changed()

    def _ranks_changed(self) -> None:
        self._all = tuple(sorted(self._infos))
        self._by_host.clear()

    # ---- queries

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, rank: int) -> bool:
        return rank in self._infos

    @property
    def all(self) -> Ranks:
        return self._all

    @property
    def living(self) -> Ranks:
        return tuple(rank for rank in self._all if rank not in self._exited) if self._exited else self._all

    @property
    def exited(self) -> Mapping[int, RankExited]:
        """The exit reports of ranks that have exited."""
        return MappingProxyType(self._exited)

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.hosts_of(self._all)

    def info(self, rank: int) -> RankInfo:
        """Return what the rank's host last reported of it, and what is known of its GPU."""
        info, problem = self._infos[rank], self._problems.get(rank)
        return info if problem is None else msgspec.structs.replace(info, problem=problem)

    def reported_at(self, rank: int) -> float:
        """Return when the rank's host last reported it; 0 if it never did."""
        return self._reported_at.get(rank, 0.0)

    def host_of(self, rank: int) -> int:
        return self._host_of[rank]

    def hosts_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.by_host(tuple(ranks)))

    def by_host(self, ranks: Ranks) -> Mapping[int, Ranks]:
        """Return the hosts of these ranks in order, and which of the ranks each has."""
        found = self._by_host.get(ranks)
        if found is None:
            members: dict[int, list[int]] = {}
            for rank in ranks:
                members.setdefault(self._host_of[rank], []).append(rank)
            found = {host: tuple(members[host]) for host in sorted(members)}
            if len(self._by_host) >= _MAX_RANK_SETS:
                self._by_host.clear()
            self._by_host[ranks] = found
        return found

    def on_host(self, host: int) -> Ranks:
        return self.by_host(self._all).get(host, ())

    def send(self, ranks: Ranks, message: messages.HostCommand, body: bytes | None = None) -> SendToHosts:
        """Return the effect that sends a message to the hosts of these ranks."""
        return SendToHosts(self.hosts_of(ranks), message, body)


def assign_hosts(world_size: int, num_hosts: int) -> dict[int, int]:
    """Return the host of each rank: contiguous ranks per host, sizes that differ by at most one.

    Four ranks on three hosts are 2, 1 and 1.
    """
    fewest, num_larger = divmod(world_size, num_hosts)
    sizes = [fewest + (host < num_larger) for host in range(num_hosts)]
    return dict(enumerate(host for host, size in enumerate(sizes) for _ in range(size)))
