"""Changes the number of a mesh's ranks: those above it leave, others join, and the rest keep what they hold.

In this order: ranks say what is cut into parts for their present number, and whether it can be cut anew; those above
the new number give the others their parts, and end; the mesh has the new axes; then `healing` starts the ranks that are
missing, forms the groups of all, gives the new ones what the others hold, and has the parts move to where they belong.
Nothing has changed until ranks are sent `LeaveMesh`. What fails after that leaves a mesh of
the new size, which `%mesh heal` completes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from meshbook.fold.heal_advice import advice_without, heal_advice
from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, CallTable, Parts
from meshbook.supervisor.cell_sources import setup_names, size_dependent_names
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.machines import MachineTable
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
    """At most one resize at a time, and none while ranks are replaced.

    Attributes:
        why_refused: why the last attempt has changed nothing; "" if it has, or is under way.
    """

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
        machines: MachineTable,
        info: Callable[[], MeshInfo],
    ) -> None:
        self._ranks, self._groups, self._calls, self._scheduler = ranks, groups, calls, scheduler
        self._cells, self._startup, self._healing, self._saves = cells, startup, healing, saves
        self._monitoring, self._machines, self._info = monitoring, machines, info
        self._attempt: _Resize | None = None  # until `healing` completes it
        self.why_refused = ""
        self._num_attempts = 0

    @property
    def is_active(self) -> bool:
        """Whether ranks may leave or join: a call that names ranks of now could miss some."""
        return self._attempt is not None or self._healing.is_resizing

    @property
    def is_undecided(self) -> bool:
        """Whether a resize has begun that may yet be refused, and has changed nothing."""
        return self._attempt is not None

    # ---- inputs

    def begin(
        self, client: str, command: messages.ResizeMesh, now: float, give_until: float = math.inf
    ) -> list[Effect]:
        """Begin a resize. The reply is `MeshHealed`, or a refusal.

        Args:
            give_until: when ranks that leave must have given the others their parts; else nothing is changed.
            client: "": the supervisor itself, which sees by `is_active` and `why_refused` what came of it.
        """
        self.why_refused = self._why_not(command)
        if self.why_refused:
            return [_refusal(client, command, self.why_refused)] if client else []
        self._num_attempts += 1
        self._attempt = _Resize(client, command, self._num_attempts, now, give_until)
        self._scheduler.is_held = True
        return self.call_ended(now)

    def call_ended(self, now: float) -> list[Effect]:
        """Go on with a resize that waited for calls of lost ranks, if all have ended."""
        attempt = self._attempt
        if attempt is None or not attempt.is_waiting or self._scheduler.busy_cells():
            return []
        attempt.is_waiting = False
        if self._groups.status == "broken" and not self._ranks.exited:  # parts of tensors move over them
            return self._scheduler.form_groups(now, self._groups_formed)
        return self._look(attempt, now)

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
            exited = self._ranks.exited
            advice = heal_advice(len(exited), (one.heals_when for one in exited.values()))
            lost = f". {name_ranks(exited).capitalize()}: {advice}" if exited else ""
            return f"the mesh has {format_axes(command.axes)} already{lost}"
        stay = [rank for rank in self._ranks.exited if rank < math.prod(command.axes.values())]
        if gone := [rank for rank in stay if self._ranks.host_of(rank) in self._machines.lost]:
            host = self._ranks.host_of(gone[0])
            return (
                f"{name_ranks(gone)} ran on host {host}, which {self._machines.lost[host]}: only the highest ranks "
                f"can leave. {heal_advice(len(gone), [self._machines.heals_when(host)])}; {advice_without(gone)}"
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

    def _groups_formed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := self._groups.formed(parts, call.failure):
            return self._refuse(attempt, f"the process groups could not be formed: {failure}; try again", now)
        return self._look(attempt, now)

    def _look(self, attempt: _Resize, now: float) -> list[Effect]:
        if not (living := self._ranks.living):
            return self._leave(attempt, now)
        entries = list(self._cells.history.entries())
        joins = attempt.world_size > len(self._ranks) or any(rank < attempt.world_size for rank in self._ranks.exited)
        find = messages.FindSharded(
            CallId(f"sharded-{attempt.number}" + ("-again" if attempt.is_rolled_back else "")),
            living,
            dict(attempt.command.axes),
            setup_names(entries) if joins else None,
            size_dependent_names(entry.source for entry in entries),
        )
        timer = SetTimer(f"abandon {find.call}", _FIND_TIMEOUT_S)
        return [*self._scheduler.run_own_call(find, now, self._found, "resizing the mesh"), timer]

    def _found(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := _first_failure(parts):
            self._groups.rank_lost()  # ranks whose part did not end well hold their collectives: groups are formed anew
            return self._refuse(attempt, f"{failure}; nothing has changed, try again", now)
        replies = [part.outcome.reply or {} for part in parts]
        if problems := {name: why for reply in replies for name, why in reply.get("problems", {}).items()}:
            return self._refuse(attempt, _describe_problems(problems, attempt.command.axes), now)
        attempt.stale = tuple(sorted({name for reply in replies for name in reply.get("stale", ())}))
        attempt.sharded = tuple(sorted({name for reply in replies for name in reply.get("sharded", ())}))
        if len({reply.get("catalog") for reply in replies}) > 1:
            names = ", ".join(attempt.sharded)
            why = f"the DTensors of {names} are not the same on all ranks: what they would be on others is not known"
            return self._refuse(attempt, why, now)
        attempt.needs_leaving = any(reply.get("needs_leaving") for reply in replies)
        is_whole = not self._ranks.exited and self._groups.status == "ready"
        if not attempt.sharded or not is_whole or attempt.is_rolled_back:
            return self._give(attempt, now)
        attempt.is_rolled_back = True
        back = messages.RollBack(CallId(f"back-{attempt.number}"), self._ranks.all, (), attempt.sharded)
        return self._scheduler.run_own_call(back, now, self._rolled_back, "loading the last snapshot")

    def _rolled_back(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        """An elastic loop that was cut off is as in its snapshot, with which it goes on after the resize."""
        attempt = self._attempt
        assert attempt is not None
        if failure := _first_failure(parts):
            self._groups.rank_lost()
            return self._refuse(attempt, f"the elastic loop's snapshot was not loaded: {failure}; try again", now)
        if any((part.outcome.reply or {}).get("names") for part in parts):
            return self._look(attempt, now)  # the state of an optimizer has other tensors then
        return self._give(attempt, now)

    def _give(self, attempt: _Resize, now: float) -> list[Effect]:
        giving = [rank for rank in self._ranks.living if rank >= attempt.world_size]
        if not giving or not attempt.needs_leaving:
            return self._leave(attempt, now)
        if lost := self._ranks.exited:
            why = (
                f"{name_ranks(giving)} cannot give the others the parts of {', '.join(attempt.sharded)} that it holds, "
                f"because {name_ranks(lost)} was lost and the process groups with it. "
                f"{heal_advice(len(lost), (one.heals_when for one in lost.values()))}; then resize"
            )
            return self._refuse(attempt, why, now)
        give = messages.MoveShards(
            CallId(f"give-{attempt.number}"),
            self._ranks.all,
            "give",
            dict(attempt.command.axes),
            attempt.world_size,
        )
        effects = self._scheduler.run_own_call(give, now, self._given, "moving shards", needs_all=True)
        if attempt.give_until < math.inf:
            effects.append(SetTimer(f"abandon {give.call}", max(0.0, attempt.give_until - now)))
        return effects

    def _given(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := _first_failure(parts):
            self._groups.rank_lost()
            return self._refuse(attempt, f"{failure}; nothing has changed, try again", now)
        attempt.num_bytes = _num_bytes(parts)
        return self._leave(attempt, now)

    def _leave(self, attempt: _Resize, now: float) -> list[Effect]:
        leaving = tuple(rank for rank in self._ranks.all if rank >= attempt.world_size)
        self._ranks.leaving(leaving)
        there = tuple(rank for rank in leaving if self._ranks.host_of(rank) not in self._machines.lost)
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
        hosts = [host for host in range(spec.num_hosts) if host not in self._machines.lost]
        self._ranks.resize(attempt.world_size, hosts)
        device = kinds.pop() if len(kinds) == 1 else spec.device  # new ranks compute on what the others do
        self._startup.spec = msgspec.structs.replace(spec, axes=axes, device=device)
        self._groups.resized(axes)
        self._monitoring.forget_ranks(attempt.left)
        resized = messages.ResizeChanges(before, attempt.left, attempt.stale, attempt.sharded, attempt.num_bytes)
        self._healing.has_unmoved |= bool(attempt.sharded)
        refused = self._scheduler.refuse_waiting("ResizeError", "the mesh was resized, and has other ranks now")
        whole = self._healing.make_whole(attempt.client, attempt.command.call, resized, attempt.began_at, now)
        return [*refused, *whole]

    def _refuse(self, attempt: _Resize, reason: str, now: float) -> list[Effect]:
        """End an attempt that has changed nothing."""
        self._attempt, self.why_refused = None, reason
        if not attempt.client:
            return []  # clients' calls go on waiting for what the supervisor does then
        self._scheduler.is_held = False
        text = f"the mesh was not resized: {reason}"
        return [_refusal(attempt.client, attempt.command, text), *self._scheduler.resume(now)]


class _Resize:
    """One attempt, and what its steps came to."""

    def __init__(
        self, client: str, command: messages.ResizeMesh, number: int, began_at: float, give_until: float
    ) -> None:
        self.give_until = give_until
        self.client, self.command, self.number, self.began_at = client, command, number, began_at
        self.world_size = math.prod(command.axes.values())
        self.is_waiting = True  # for calls of lost ranks to end
        self.left: Ranks = ()
        self.stale: tuple[str, ...] = ()
        self.sharded: tuple[str, ...] = ()  # names of DTensors, and of what is made of them
        self.is_rolled_back = False  # an elastic loop that was cut off is as in its snapshot
        self.needs_leaving = False  # ranks that leave hold parts of them that no other does
        self.num_bytes = 0  # that ranks which leave have given


def axes_without(axes: Mapping[str, int], ranks: Collection[int]) -> dict[str, int]:
    """Return the axes of a mesh without its highest ranks; {}: these are not the highest, or all.

    The first axis is made shorter, so that with these ranks others of the same row go.
    """
    row = math.prod(axes.values()) // next(iter(axes.values()))
    left = min(ranks, default=0) // row
    others = set(range(left * row, math.prod(axes.values()))) - set(ranks)
    if not left or len(others) >= row:
        return {}
    return {name: left if at == 0 else size for at, (name, size) in enumerate(axes.items())}


def format_axes(axes: Mapping[str, int]) -> str:
    """Return axes as they are written: `dp=2, tp=2`."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _first_failure(parts: Parts) -> str:
    """Return how the first rank failed; "" if none did."""
    failed = next((part for part in parts if part.outcome.status != "ok"), None)
    if failed is None:
        return ""
    outcome, who = failed.outcome, name_ranks(failed.ranks)
    if outcome.error is not None:
        return f"{who}: {outcome.error.ename}: {outcome.error.evalue}"
    if outcome.status == "skipped":
        return f"{who} did not answer in time; %mesh why shows what it does"
    return f"{who}: {outcome.status}"


def _num_bytes(parts: Parts) -> int:
    return sum((part.outcome.reply or {}).get("num_bytes", 0) for part in parts)


def _describe_problems(problems: Mapping[str, str], axes: Mapping[str, int]) -> str:
    shown = [f"{name}: {why}" for name, why in sorted(problems.items())[:_MAX_NAMES_SHOWN]]
    more = f"; and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
    count = " --axes " + ",".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"{'; '.join(shown)}{more}. Over a checkpoint it goes in any case: save the models and optimizers (%mesh "
        f"checkpoint PATH NAMES --wait), begin anew (%mesh restart{count}), build them again, and %mesh restore PATH "
        "cuts them anew"
    )


def _refusal(client: str, command: messages.ResizeMesh, text: str) -> Effect:
    return SendToClient(client, messages.Refused(call=command.call, error="ResizeError", text=text))
