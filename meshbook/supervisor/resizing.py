"""Changes the number of a mesh's ranks: those above it leave, others join, and the rest keep what they hold.

In this order: ranks say whether something is cut into parts for their present number; the ranks above the new one end;
the mesh has the new axes; then `healing` starts the ranks that are missing, forms the groups of all, and gives the new
ones what the others hold. Nothing has changed until ranks are sent `LeaveMesh`. What fails after that leaves a mesh of
the new size, which `%mesh heal` completes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, CallTable, Parts
from meshbook.supervisor.cell_sources import size_dependent_names
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo

_MAX_NAMES_SHOWN = 8
# Seconds for ranks to say what they hold. It takes a moment; one that is stuck in what it ran before must not hold up a
# resize for ever.
_FIND_TIMEOUT_S = 30.0


class Resizing:
    """At most one resize at a time, and none while ranks are replaced."""

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        calls: CallTable,
        scheduler: CallScheduler,
        cells: CellRecord,
        startup: MeshStartup,
        healing: Healing,
        saves: CheckpointSaves,
        monitoring: Monitoring,
        info: Callable[[], MeshInfo],
    ) -> None:
        self._ranks, self._groups, self._calls, self._scheduler = ranks, groups, calls, scheduler
        self._cells, self._startup, self._healing, self._saves = cells, startup, healing, saves
        self._monitoring, self._info = monitoring, info
        self._attempt: _Resize | None = None  # until `healing` completes it
        self._num_attempts = 0

    @property
    def is_active(self) -> bool:
        """Whether ranks may leave or join: a call that names ranks of now could miss some."""
        return self._attempt is not None or self._healing.is_resizing

    # ---- inputs

    def begin(self, client: str, command: messages.ResizeMesh, now: float) -> list[Effect]:
        """Begin a resize. The reply is `MeshHealed`, or a refusal."""
        if problem := self._why_not(command):
            return [_refusal(client, command, problem)]
        self._num_attempts += 1
        self._attempt = _Resize(client, command, self._num_attempts, now)
        self._scheduler.is_held = True
        return self.call_ended(now)

    def call_ended(self, now: float) -> list[Effect]:
        """Go on with a resize that waited for calls of lost ranks, if all have ended."""
        attempt = self._attempt
        if attempt is None or not attempt.is_waiting or self._scheduler.busy_cells():
            return []
        attempt.is_waiting = False
        if not (living := self._ranks.living):
            return self._leave(attempt, now)
        names = size_dependent_names(entry.source for entry in self._cells.history.entries())
        find = messages.FindSharded(CallId(f"sharded-{attempt.number}"), living, names)
        timer = SetTimer(f"abandon {find.call}", _FIND_TIMEOUT_S)
        return [*self._scheduler.run_own_call(find, now, self._found, "resizing the mesh"), timer]

    def _why_not(self, command: messages.ResizeMesh) -> str:
        """Return why a resize cannot begin; "" if it can."""
        if not self._startup.is_done:
            return "the mesh has no ranks yet; wait for it to start"
        if self._attempt is not None or self._healing.is_active:
            what = "resized" if self._attempt is not None or self._healing.is_resizing else "healed"
            return f"the mesh is being {what} already; wait for it"
        if not command.axes or min(command.axes.values()) < 1:
            return f"a mesh has at least one rank; {format_axes(command.axes)} is none"
        if command.axes == self._groups.axes:
            lost = f"; %mesh heal replaces {name_ranks(self._ranks.exited)}" if self._ranks.exited else ""
            return f"the mesh has {format_axes(command.axes)} already{lost}"
        stay = [rank for rank in self._ranks.exited if rank < math.prod(command.axes.values())]
        if gone := [rank for rank in stay if self._ranks.host_of(rank) in self._healing.lost_hosts]:
            host = self._ranks.host_of(gone[0])
            return (
                f"{name_ranks(gone)} ran on host {host}, which {self._healing.lost_hosts[host]}: only the highest "
                "ranks can leave; a new mesh is %mesh restart"
            )
        if len(self._saves):
            return "a checkpoint is being saved, which would end with the ranks that leave; wait for it"
        return self._why_busy()

    def _why_busy(self) -> str:
        exited = self._ranks.exited.keys()
        for call in self._calls:
            if call.is_main_thread and call.client and not call.lost and exited.isdisjoint(call.ranks):
                where = name_ranks(call.remaining_ranks(exited))
                how = f"runs on {where}" if call.is_sent else f"waits for {where}"
                return f"{call.label} {how}; wait for it, or press Stop (%mesh interrupt), then resize"
        return ""

    # ---- the steps

    def _found(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        failed = [part for part in parts if part.outcome.status != "ok"]
        if failed:
            outcome, who = failed[0].outcome, name_ranks(failed[0].ranks)
            why = f"{who}: {outcome.status}"
            if outcome.status == "skipped":
                why = f"{who} did not answer in time; %mesh why shows what it does"
            if outcome.error is not None:
                why = f"{who}: {outcome.error.ename}: {outcome.error.evalue}"
            self._groups.rank_lost()  # ranks whose part did not end well hold their collectives: groups are formed anew
            return self._refuse(attempt, f"{why}; nothing has changed, try again", now)
        replies = [part.outcome.reply or {} for part in parts]
        if sharded := sorted({name for reply in replies for name in reply.get("sharded", ())}):
            return self._refuse(attempt, _describe_sharded(sharded, attempt.command.axes), now)
        attempt.stale = tuple(sorted({name for reply in replies for name in reply.get("stale", ())}))
        return self._leave(attempt, now)

    def _leave(self, attempt: _Resize, now: float) -> list[Effect]:
        leaving = tuple(rank for rank in self._ranks.all if rank >= attempt.world_size)
        self._ranks.leaving(leaving)
        there = tuple(rank for rank in leaving if self._ranks.host_of(rank) not in self._healing.lost_hosts)
        attempt.left = leaving
        if not there:
            return self._change(attempt, now)
        leave = messages.LeaveMesh(CallId(f"leave-{attempt.number}"), there)
        return self._scheduler.run_own_call(
            leave, now, lambda call, parts, then: self._change(attempt, then), "leaving"
        )

    def _change(self, attempt: _Resize, now: float) -> list[Effect]:
        axes, before = dict(attempt.command.axes), dict(self._groups.axes)
        spec, self._attempt = self._startup.spec, None
        assert spec is not None  # the mesh has started
        kinds = {self._ranks.info(rank).device.partition(":")[0] for rank in self._ranks.living}
        hosts = [host for host in range(spec.num_hosts) if host not in self._healing.lost_hosts]
        self._ranks.resize(attempt.world_size, hosts)
        device = kinds.pop() if len(kinds) == 1 else spec.device  # new ranks compute on what the others do
        self._startup.spec = msgspec.structs.replace(spec, axes=axes, device=device)
        self._groups.resized(axes)
        self._monitoring.forget_ranks(attempt.left)
        resized = messages.ResizeChanges(before, attempt.left, attempt.stale)
        return self._healing.make_whole(attempt.client, attempt.command.call, resized, attempt.began_at, now)

    def _refuse(self, attempt: _Resize, reason: str, now: float) -> list[Effect]:
        """End an attempt that has changed nothing."""
        self._attempt = None
        self._scheduler.is_held = False
        text = f"the mesh was not resized: {reason}"
        return [_refusal(attempt.client, attempt.command, text), *self._scheduler.resume(now)]


class _Resize:
    """One attempt, and what its steps came to."""

    def __init__(self, client: str, command: messages.ResizeMesh, number: int, began_at: float) -> None:
        self.client, self.command, self.number, self.began_at = client, command, number, began_at
        self.world_size = math.prod(command.axes.values())
        self.is_waiting = True  # for calls of lost ranks to end
        self.left: Ranks = ()
        self.stale: tuple[str, ...] = ()


def format_axes(axes: Mapping[str, int]) -> str:
    """Return axes as they are written: `dp=2, tp=2`."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _describe_sharded(names: list[str], axes: Mapping[str, int]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN]) + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
    count = " --axes " + ",".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"{shown} {'is' if len(names) == 1 else 'are'} made of DTensors (FSDP2, tensor parallelism), which are cut for "
        f"the ranks that there are. Save the models and optimizers (%mesh checkpoint PATH NAMES "
        f"--wait), begin anew (%mesh restart{count}), build them again, and %mesh restore PATH cuts them anew"
    )


def _refusal(client: str, command: messages.ResizeMesh, text: str) -> Effect:
    return SendToClient(client, messages.Refused(call=command.call, error="ResizeError", text=text))
