"""The start of a mesh: hosts start their ranks, and the ranks form their process groups."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshbook.engines.base import HostProgress
from meshbook.ids import name_ranks
from meshbook.supervisor.call_table import ActiveCall, Parts
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, Shutdown, StartHosts
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo, MeshSpec

# Machines that are named of those of which the same is said.
_MAX_NAMES = 4


class MeshStartup:
    """The one start of a mesh. It ends with `MeshReady`, or with a refusal and the end of the supervisor.

    Attributes:
        spec: what was requested; None: nothing yet.
        files: of the project, as they were then.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        scheduler: CallScheduler,
        machines: MachineTable,
        info: Callable[[], MeshInfo],
    ) -> None:
        self._ranks, self._groups, self._scheduler, self._info = ranks, groups, scheduler, info
        self._machines = machines
        self.spec: MeshSpec | None = None
        self.files: tuple[messages.ProjectFile, ...] = ()
        self._is_queued = False  # machines, or the files that their ranks need, are waited for
        self._pending: tuple[str, messages.StartMesh, float] | None = None  # client, its command, since
        self._hosts_ready: set[int] = set()
        self._progress: dict[int, HostProgress] = {}  # of hosts that have not connected yet
        self._queue_state = ""  # the launcher's
        self._rank_infos: dict[int, messages.RankInfo] = {}  # as their hosts last reported them
        self._sent_state = ""  # what the client that waits was last sent

    @property
    def is_pending(self) -> bool:
        """Whether the mesh is coming up."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """Whether ranks may be given calls."""
        return self.spec is not None and self._pending is None

    def begin(self, client: str, command: messages.StartMesh, now: float) -> list[Effect]:
        spec = self.spec = command.spec
        self.files = command.files
        self._ranks.assign(math.prod(spec.axes.values()), spec.num_hosts)
        self._pending = (client, command, now)
        self._machines.begin(spec)
        self._groups.axes = dict(spec.axes)
        self._scheduler.ends_on_error = spec.end_on_error
        if spec.process_group and spec.torch:
            self._groups.request()
        return [StartHosts(spec, self._ranks.hosts)]

    def queued(self, state: str) -> list[Effect]:
        """Send the client that waits what the launcher's queue says, or which files travel; "": that is over."""
        self._is_queued = bool(state)
        return self._send_state(state)

    def hosts_awaited(self, queue_state: str, progress: dict[int, HostProgress]) -> list[Effect]:
        """Send the client that waits what the launcher's queue says, else what goes on at hosts."""
        self._progress = progress
        if queue_state != self._queue_state:
            self._queue_state = queue_state
            return self.queued(queue_state)
        return self._send_progress()

    def host_heartbeat(self, report: messages.HostHeartbeat) -> list[Effect]:
        """Send the client that waits how many ranks are ready, when that has changed."""
        if self.is_pending:
            self._rank_infos.update({info.rank: info for info in report.ranks})
        return self._send_progress()

    def _send_progress(self) -> list[Effect]:
        return self._send_state(self._describe_state()) if self.is_pending and not self._is_queued else []

    def _send_state(self, state: str) -> list[Effect]:
        if self._pending is None or state == self._sent_state:
            return []
        client, command, _ = self._pending
        self._sent_state = state
        report = messages.MeshStarting(call=command.call, state=state, is_queued=self._is_queued)
        return [SendToClient(client, report)]

    def _describe_state(self) -> str:
        """Return how many hosts or ranks are ready, and what is waited for."""
        assert self.spec is not None
        if not self._hosts_ready.issuperset(self._ranks.hosts):
            return f"starting: {_describe_hosts([self._progress_of(host) for host in self._ranks.hosts])}"
        infos = [self._rank_infos.get(rank) for rank in self._ranks.all]
        waiting = [rank for rank, info in enumerate(infos) if info is None or info.state == "starting"]
        ready = f"{len(infos) - len(waiting)} of {len(infos)} ranks are ready"
        if not waiting:
            return f"{ready}; they form their process groups"
        if all(info is None or info.pid is None for info in infos):
            return f"{ready}; waiting for {'torch to be imported' if self.spec.torch else 'their processes'}"
        return f"{ready}; waiting for {name_ranks(waiting)}"

    def _progress_of(self, host: int) -> HostProgress:
        if host in self._hosts_ready:
            return HostProgress(self._machines.label(host), "", 0)
        return self._progress.get(host) or HostProgress(self._machines.label(host), "Python starts", 0)

    def host_ready(self, host: int, report: messages.HostReady, now: float) -> list[Effect]:
        """Have a host start its ranks; with the last host, have the ranks form their groups.

        Hosts on several machines start theirs when all have come, and fit each other.
        """
        assert self.spec is not None
        self._hosts_ready.add(host)
        self._ranks.host_ready(host, report.hostname)
        is_last = self._hosts_ready.issuperset(self._ranks.hosts)
        hosts: tuple[int, ...] = (host,)
        if report.facts is not None:
            if is_last and (problem := self._machines.problem(self.spec)):
                return self.fail(problem)
            hosts = self._ranks.hosts if is_last else ()
        starting: list[Effect] = [SendToHosts((each,), self._start_ranks(each)) for each in hosts]
        return [*starting, *(self._scheduler.form_groups(now, self._groups_formed) if is_last else [])]

    def _start_ranks(self, host: int) -> messages.StartRanks:
        assert self.spec is not None
        ranks = self._ranks.on_host(host)
        return messages.StartRanks(spec=self.spec, ranks=ranks, world_size=len(self._ranks), host_ranks=ranks)

    def _groups_formed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        if failure := self._groups.formed(parts, call.failure):
            return self.fail(f"the process group was not formed: {failure}{self._machines.network_advice()}")
        if self._pending is None:
            return []  # the start failed meanwhile
        client, command, since = self._pending
        self._pending = None
        self._ranks.start_finished()
        ready = messages.MeshReady(call=command.call, info=self._info(), seconds=now - since)
        return [SendToClient(client, ready)]

    def host_exited(self, host: int, reason: str) -> list[Effect]:
        progress = self._progress.get(host)  # of one that has not connected, and not said its name itself
        who = progress.machine if progress is not None else self._machines.who(host)
        return self.fail(f"{who} {reason} while the mesh was coming up; see supervisor.log")

    def rank_exited(self, report: messages.RankExited) -> list[Effect]:
        last = "".join(f"\n  {line}" for line in report.last_lines)
        said = f": it said{last}" if last else ""
        return self.fail(f"rank {report.rank} {report.description} while the mesh was coming up{said}")

    def fail(self, text: str) -> list[Effect]:
        """Refuse the start and end the supervisor, if the mesh is still coming up."""
        if self._pending is None:
            return []
        client, command, _ = self._pending
        self._pending = None
        refused = messages.Refused(call=command.call, error="StartError", text=text)
        return [SendToClient(client, refused), Shutdown("the mesh did not come up")]


def _describe_hosts(hosts: list[HostProgress]) -> str:
    """Return how far hosts have come: "gpu1 ready; gpu2, gpu3: ssh connects (3 s)"."""
    stages = sorted(dict.fromkeys(host.stage for host in hosts))  # those that are ready first
    parts = []
    for stage in stages:
        there = [host for host in hosts if host.stage == stage]
        names = ", ".join(host.machine for host in there[:_MAX_NAMES])
        more = len(there) - _MAX_NAMES
        names += f" and {more} more" if more > 0 else ""
        since_s = max(host.seconds for host in there)
        parts.append(f"{names}: {stage}{f' ({since_s} s)' if since_s else ''}" if stage else f"{names} ready")
    return "; ".join(parts)
