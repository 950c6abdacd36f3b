"""What changes which processes are ranks: heals, resizes, and what follows a SIGTERM. Each waits for the others.

A host starts ranks when it has the project's files, if the mesh has a project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.engines.base import HostProgress
from meshbook.supervisor.allocation import Allocation
from meshbook.supervisor.call_table import CallTable
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.clients import Client
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.preemption import Preemption
from meshbook.supervisor.project_sync import ProjectSync
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.resizing import Resizing
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.spares import SpareTable
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo

# Seconds between two looks whether hosts that a heal waits for still get their files.
_PREPARING_POLL_S = 10.0


class RankChanges:
    """Heals, resizes and preemption of one mesh.

    Attributes:
        healing: heals, and the processes that a resize adds.
        spares: processes that wait to become ranks.
        project: its files on the hosts.
        allocation: when the mesh's machines are taken away.
        preemption: what follows a SIGTERM; the driver reports those of its own process to it.
        command_handlers: by type of command, as `MeshState` calls them.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        calls: CallTable,
        scheduler: CallScheduler,
        cells: CellRecord,
        startup: MeshStartup,
        saves: CheckpointSaves,
        monitoring: Monitoring,
        machines: MachineTable,
        info: Callable[[], MeshInfo],
        *,
        pid: int,
        mesh_id: str,
    ) -> None:
        """
        Args:
            pid: the supervisor's.
            mesh_id: unique, for the names of saves.
        """
        self._ranks, self._startup, self._machines = ranks, startup, machines
        self.project = ProjectSync(ranks, machines, startup)
        self.spares = SpareTable(ranks, startup, machines)
        self.healing = Healing(ranks, groups, scheduler, cells, startup, saves, machines, self.spares, info)
        self._resizing = Resizing(
            ranks, groups, calls, scheduler, cells, startup, self.healing, saves, monitoring, machines, info
        )
        self.preemption = Preemption(ranks, groups, scheduler, saves, self.healing, self._resizing, pid, mesh_id)
        self.allocation = Allocation(lambda: ranks.all, lambda: self.preemption.saved_names)
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.HealMesh: lambda client, command, _, now: (
                self.preemption.refuse_heal(client.id, command) or self.healing.begin(client.id, command, now)
            ),
            messages.ResizeMesh: lambda client, command, _, now: (
                self.preemption.refuse_heal(client.id, command) or self._resizing.begin(client.id, command, now)
            ),
            messages.SyncProject: lambda client, command, *_: self.project.begin(client.id, command),
            messages.KeepSpares: lambda client, command, *_: self.spares.keep(client.id, command),
            messages.PlanPreemption: lambda client, command, *_: self.preemption.plan(client.id, command),
        }

    def hosts_awaited(self, queue_state: str, progress: dict[int, HostProgress]) -> list[Effect]:
        """Handle what the launcher's queue says, "" when it has given the machines, and how far hosts have come."""
        return self._startup.hosts_awaited(queue_state, progress)

    def host_ready(self, host: int, report: messages.HostReady, now: float) -> list[Effect]:
        """Have a host start ranks, when it has the project: those of a mesh that comes up, or those of a heal."""
        return self.project.host_ready(host, report) or self._start_ranks(host, report, now)

    def files_synced(self, host: int, report: messages.FilesSynced, now: float) -> list[Effect]:
        """Handle a host that has the project's files, or cannot have them."""
        effects, held = self.project.synced(host, report)
        match held:
            case messages.HostReady():
                return [*effects, *self._start_ranks(host, held, now)]
            case messages.HostFailed():
                return [*effects, *self.host_failed(host, held, now)]
        return effects

    def host_lost(self, host: int, reason: str) -> list[Effect]:
        return [*self.project.host_lost(host), *self.healing.host_failed(host, reason)]

    def timer_fired(self, kind: str, argument: str, now: float) -> list[Effect]:
        match kind:
            case "hosts":
                return self._hosts_late(argument)
            case "preemption":
                return self.preemption.timer_fired(argument, now)
        return self.allocation.timer_fired(argument)

    def _hosts_late(self, attempt: str) -> list[Effect]:
        """Give up on hosts that have not come in time; one that gets its files or its environment is waited for."""
        if self.project.is_preparing:
            return [SetTimer(f"hosts {attempt}", _PREPARING_POLL_S)]
        return self.healing.hosts_late(attempt)

    def _start_ranks(self, host: int, report: messages.HostReady, now: float) -> list[Effect]:
        self._machines.ready(host, report.hostname, report.facts)
        if self._startup.is_pending:
            return self._startup.host_ready(host, report, now)
        return self.healing.host_ready(host, now)

    def host_heartbeat(self, host: int, report: messages.HostHeartbeat, now: float) -> list[Effect]:
        self._ranks.heartbeat(report.ranks, now, is_starting=self._startup.is_pending)
        self.spares.reported(host, report.spares)
        return self._startup.host_heartbeat(report)

    def host_failed(self, host: int, report: messages.HostFailed, now: float) -> list[Effect]:
        """Handle a host that could not be started."""
        if self._startup.is_pending:
            # of other machines the reason names the machine
            return self._startup.fail(
                report.reason if self._machines.watch is not None else f"host {host}: {report.reason}"
            )
        return self.healing.host_failed(host, report.reason)

    def advance(self, now: float) -> list[Effect]:
        """Go on with what waited for a call that has ended now, or for a time that has come."""
        return [
            *self.healing.call_ended(now),
            *self._resizing.call_ended(now),
            *self.preemption.advance(now),
        ]

    def refuse_call(self, client: str, command: Any) -> list[Effect]:
        """Refuse a call that could name ranks that are no more, or miss some.

        That is: ranks may leave or join now; or it is for all ranks, and its client had not heard of those of now.
        Operations on tensors wait until it is decided whether the mesh is resized: a client cannot send them again.
        """
        if self._resizing.is_undecided and isinstance(command, messages.RunOps):
            return []
        chosen_at: int | None = getattr(command, "chosen_at", None)
        changes = [] if chosen_at is None else self._ranks.changes[chosen_at:]
        if self._resizing.is_active:
            error, text = "ResizeError", "the mesh is being resized, and has other ranks afterwards; run it again then"
        elif changes:
            error, what = changes[0][0], ", and ".join(what for _, what in changes)
            text = f"{what}, of which this process had not heard when it sent this; nothing was run, run it again"
        else:
            return []
        return [SendToClient(client, messages.Refused(call=command.call, error=error, text=text))]
