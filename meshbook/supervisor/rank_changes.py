"""What changes which processes are ranks: heals, resizes, and what follows a SIGTERM. Each waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.ids import CallId
from meshbook.supervisor.call_table import CallTable
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.clients import Client
from meshbook.supervisor.effects import Effect, SendToClient
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.preemption import Preemption
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.resizing import Resizing
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo


class RankChanges:
    """Heals, resizes and preemption of one mesh.

    Attributes:
        healing: its `lost_hosts` are those on which no rank can be started.
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
        self.healing = Healing(ranks, groups, scheduler, cells, startup, saves, info)
        self._resizing = Resizing(
            ranks, groups, calls, scheduler, cells, startup, self.healing, saves, monitoring, info
        )
        self.preemption = Preemption(ranks, groups, scheduler, saves, self.healing, pid, mesh_id)
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.HealMesh: lambda client, command, _, now: (
                self.preemption.refuse_heal(client.id, command) or self.healing.begin(client.id, command, now)
            ),
            messages.ResizeMesh: lambda client, command, _, now: (
                self.preemption.refuse_heal(client.id, command) or self._resizing.begin(client.id, command, now)
            ),
            messages.PlanPreemption: lambda client, command, *_: self.preemption.plan(client.id, command),
        }

    def advance(self, now: float) -> list[Effect]:
        """Go on with what waited for a call that has ended now, or for a time that has come."""
        return [
            *self.healing.call_ended(now),
            *self._resizing.call_ended(now),
            *self.preemption.advance(now),
        ]

    def refuse_call(self, client: str, call: CallId) -> list[Effect]:
        """Refuse a call while ranks may leave or join: it could name ranks that are no more, or miss some."""
        if not self._resizing.is_active:
            return []
        text = "the mesh is being resized, and has other ranks afterwards; run it again then"
        return [SendToClient(client, messages.Refused(call=call, error="ResizeError", text=text))]
