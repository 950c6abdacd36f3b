"""Puts new processes in the place of ranks that have exited, while the other ranks stay as they are.

In this order: hosts that were lost are started again; hosts start the processes; all ranks form the next generation of
the process groups; the new ranks run the setup cells, and the imports and definitions of other cells; all ranks share
what is known to be equal on them. Clients' calls wait meanwhile. Each step but the first is a call of the supervisor's
own: if a rank exits during one, that call ends as every call does, and with it the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import msgspec

from meshbook.fold.heal_advice import advice_without
from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, Parts, first_failure
from meshbook.supervisor.cell_sources import cells_to_replay, rank_dependent_names
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer, StartHosts
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.heal_attempt import HealAttempt
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.spares import SpareTable
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo

# Seconds in which new processes must be up and all groups formed. Ranks wait for each other for 60 s in it; a rank that
# takes no part at all (it is stuck in what it ran before) must not hold up the others for ever.
_FORM_TIMEOUT_S = 120.0
# Seconds in which lost hosts must be there again. Engines give up on one sooner, and say why.
_HOSTS_TIMEOUT_S = 90.0


class Healing:
    """At most one attempt at a time.

    Attributes:
        has_unmoved: the mesh was resized, and DTensors have yet to get their parts for the ranks that there are.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        scheduler: CallScheduler,
        cells: CellRecord,
        startup: MeshStartup,
        saves: CheckpointSaves,
        machines: MachineTable,
        spares: SpareTable,
        info: Callable[[], MeshInfo],
    ) -> None:
        self._ranks, self._groups, self._scheduler, self._cells = ranks, groups, scheduler, cells
        self._startup, self._saves, self._machines, self._spares = startup, saves, machines, spares
        self._info = info
        self._starting_hosts: set[int] = set()  # hosts that were lost, and are started for the attempt that waits
        self.has_unmoved = False
        self._attempt: HealAttempt | None = None
        self._num_attempts = 0
        self._last_healed: Ranks = ()
        self._offered: tuple[str, ...] = ()  # to copy to them
        self._waiting: tuple[str, messages.HealMesh] | None = None  # until calls, and ranks that are unfinished, ended
        self._unfinished: set[int] = set()  # new ranks of an attempt that failed, which are being ended

    @property
    def is_active(self) -> bool:
        return self._attempt is not None or self._waiting is not None

    @property
    def is_resizing(self) -> bool:
        """Whether the attempt completes a resize."""
        return self._attempt is not None and self._attempt.resized is not None

    # ---- inputs

    def begin(self, client: str, command: messages.HealMesh, now: float) -> list[Effect]:
        """Begin to replace the ranks that have exited. The reply is `MeshHealed`, or a refusal."""
        if not self._startup.is_done:
            return _refuse(client, command, "the mesh has no ranks yet; wait for it to start")
        if self._attempt is not None or self._waiting is not None:
            what = "resized" if self.is_resizing else "healed already"
            return _refuse(client, command, f"the mesh is being {what}; wait for it")
        if self._scheduler.is_held:
            return _refuse(client, command, "the mesh is being resized; wait for it")
        if command.copy != () and not (self._ranks.exited or self._unfinished):
            return self._copy(client, command, now)
        is_whole = not (self._ranks.exited or self._unfinished) and self._groups.status != "broken"
        if is_whole and not self.has_unmoved:
            return [SendToClient(client, messages.MeshHealed(command.call, self._info(), (), 0.0))]
        busy = self._scheduler.busy_cells()
        exited = self._ranks.exited.keys()
        running = [call for call in busy if call.client and not call.lost and exited.isdisjoint(call.ranks)]
        if running:
            text = (
                f"{running[0].label} runs on {name_ranks(running[0].remaining_ranks(self._ranks.exited))}; wait for "
                "it, or press Stop (%mesh interrupt), then heal"
            )
            return _refuse(client, command, text)
        starting = self._start_lost_hosts()
        # these end by themselves: cells within two seconds, tensor operations after it too
        if starting or busy or self._unfinished:
            self._waiting = client, command
            return starting
        return self._start(client, command, now)

    def _start_lost_hosts(self) -> list[Effect]:
        gone = tuple(sorted({self._ranks.host_of(rank) for rank in self._ranks.exited} & self._machines.lost.keys()))
        spec = self._startup.spec
        if not gone or spec is None:
            return []
        self._starting_hosts = set(gone)
        timeout = f"hosts {self._num_attempts}"
        return [StartHosts(spec, gone), SetTimer(timeout, _HOSTS_TIMEOUT_S)]

    def host_ready(self, host: int, now: float) -> list[Effect]:
        """Go on with the attempt that waited for a lost host, which is there again."""
        spec = self._startup.spec
        if self._starting_hosts == {host} and spec is not None and (problem := self._machines.problem(spec)):
            self._machines.lost[host] = "has other versions now"
            return self.host_failed(host, problem)
        self._starting_hosts.discard(host)
        return self.call_ended(now)

    def host_failed(self, host: int, reason: str) -> list[Effect]:
        """Refuse the attempt that waited for a host, which could not be started."""
        if host not in self._starting_hosts or self._waiting is None:
            return []
        (client, command), self._waiting = self._waiting, None
        self._starting_hosts.clear()
        ranks = tuple(rank for rank in sorted(self._ranks.exited) if self._ranks.host_of(rank) == host)
        text = (
            f"{name_ranks(ranks)} ran on {self._machines.who(host)}, where no host could be started again: {reason}. "
            f"The others keep what they hold. %mesh heal tries again, when it is back; {advice_without(ranks)}"
        )
        return _refuse(client, command, text)

    def hosts_late(self, attempt: str) -> list[Effect]:
        """Give up on hosts that have not come in time."""
        if str(self._num_attempts) != attempt or not self._starting_hosts:
            return []
        late = min(self._starting_hosts)
        return self.host_failed(late, f"nothing was heard of it within {_HOSTS_TIMEOUT_S:.0f} s")

    def call_ended(self, now: float) -> list[Effect]:
        """Begin the attempt that waited for calls and processes to end, or for hosts, if it waits for no more."""
        self._unfinished -= self._ranks.exited.keys()
        if self._waiting is None or self._starting_hosts or self._unfinished or self._scheduler.busy_cells():
            return []
        (client, command), self._waiting = self._waiting, None
        return self._start(client, command, now)

    def make_whole(
        self, client: str, call: CallId, resized: messages.ResizeChanges, began_at: float, now: float
    ) -> list[Effect]:
        """Start the ranks that a resize has added, and those that have exited, and form the groups of all."""
        return self._start(client, messages.HealMesh(call), now, resized, began_at)

    def aim_stop(self, command: messages.Interrupt) -> messages.Interrupt:
        """Aim a Stop of the attempt at what can be ended of it: the cells that new ranks run. The rest goes on."""
        attempt = self._attempt
        if attempt is None or command.target != attempt.command.call:
            return command
        return msgspec.structs.replace(command, target=_replay_call(attempt))

    # ---- the steps

    def _start(
        self,
        client: str,
        command: messages.HealMesh,
        now: float,
        resized: messages.ResizeChanges | None = None,
        began_at: float | None = None,
    ) -> list[Effect]:
        new_ranks, spec = tuple(sorted(self._ranks.exited)), self._startup.spec
        assert spec is not None  # the mesh has started
        self._num_attempts += 1
        self._unfinished -= set(new_ranks)
        since = now if began_at is None else began_at
        self._attempt = HealAttempt(client, command, new_ranks, self._num_attempts, since, resized)
        self._scheduler.is_held = True
        self._ranks.restarting(new_ranks)
        effects: list[Effect] = [self._mesh_changed(), *self._scheduler.refuse_without(new_ranks)]
        for host in self._ranks.hosts_of(new_ranks):
            host_ranks = self._ranks.on_host(host)
            started = tuple(rank for rank in host_ranks if rank in new_ranks)
            counts = self._ranks.incarnations(started)
            start = messages.StartRanks(spec, started, len(self._ranks), host_ranks, incarnations=counts)
            effects.append(SendToHosts((host,), start))
        self._groups.has_failed = False
        effects += self._scheduler.form_groups(now, self._groups_formed)
        return [*effects, SetTimer(f"abandon form-{self._groups.generation}", _FORM_TIMEOUT_S)]

    def _groups_formed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := self._groups.formed(parts, call.failure):
            return self._fail(f"the process groups could not be formed: {failure}; %mesh heal tries again", now)
        self._ranks.start_finished()
        cells = cells_to_replay(self._cells.history.entries(), attempt.new_ranks) if attempt.command.replay else ()
        if not cells or not attempt.new_ranks:
            return self._share(now)
        replay = messages.ReplayCells(_replay_call(attempt), attempt.new_ranks, cells)
        return self._scheduler.run_own_call(replay, now, self._replayed, "replaying cells")

    def _replayed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := first_failure(parts):
            return self._fail(f"cells were not replayed on it: {failure}; %mesh heal tries again", now)
        attempt.replayed(parts)
        return self._share(now)

    def _share(self, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if lost := _describe_lost(self._ranks.exited):  # of a rank that took no part in the last step
            return self._fail(f"{lost}; %mesh heal replaces it", now)
        if not attempt.command.share or not attempt.new_ranks or self._groups.status != "ready":
            return self._move(now)
        share = messages.ShareState(
            call=CallId(f"share-{attempt.number}"),
            ranks=self._ranks.all,
            new_ranks=attempt.new_ranks,
            rank_dependent=rank_dependent_names(entry.source for entry in self._cells.history.entries()),
            built=tuple(sorted(attempt.built)),
            copy=attempt.command.copy,
            joined=attempt.joined,
            names_only=attempt.is_copy,
            with_shards=not self.has_unmoved,
        )
        return self._scheduler.run_own_call(share, now, self._shared, "sharing state", needs_all=True)

    def _shared(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := first_failure(parts):
            self._groups.rank_lost()  # members may have come to different places: the groups are formed anew
            return self._fail(f"what the others hold was not copied to it: {failure}; %mesh heal tries again", now)
        attempt.shared(parts)
        return self._finish(now) if attempt.is_copy else self._move(now)

    def _move(self, now: float) -> list[Effect]:
        """Have the parts of DTensors move to where they belong, if the mesh was resized since they last did."""
        attempt = self._attempt
        assert attempt is not None
        self.has_unmoved &= len(attempt.new_ranks) < len(self._ranks)  # else nobody is left that holds any
        if not self.has_unmoved or self._groups.status != "ready":
            return self._finish(now)
        move = self._move_shards("move")
        return self._scheduler.run_own_call(move, now, self._moved, "moving shards", needs_all=True)

    def _move_shards(self, step: Literal["move", "commit"]) -> messages.MoveShards:
        attempt = self._attempt
        assert attempt is not None
        call = CallId(f"{step}-{attempt.number}")
        axes, size = dict(self._groups.axes), len(self._ranks)
        return messages.MoveShards(call, self._ranks.all, step, axes, size, attempt.new_ranks)

    def _moved(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := first_failure(parts):
            self._groups.rank_lost()
            of_cells = "".join(f"; {label}: {why}" for label, why in attempt.failed.items())
            return self._fail(f"DTensors did not get their parts: {failure}{of_cells}; %mesh heal tries again", now)
        attempt.moved(parts, self._ranks.all)
        return self._scheduler.run_own_call(self._move_shards("commit"), now, self._committed, "moving shards")

    def _committed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        self.has_unmoved = False  # also if a rank was lost meanwhile: the others, new ones too, have their parts
        if failure := first_failure(parts) or _describe_lost(self._ranks.exited):
            return self._fail(f"{failure}; %mesh heal tries again", now, keeps_new_ranks=True)
        return self._finish(now)

    def _finish(self, now: float) -> list[Effect]:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if reason := attempt.why_nothing_was_copied(len(self._ranks), self._groups.status):
            names = {name: reason for name in self._cells.names if name not in attempt.bound}
            attempt.missing = dict.fromkeys(attempt.new_ranks, names) if names else {}
        if attempt.new_ranks:
            self._last_healed, self._offered = attempt.new_ranks, attempt.offered(self._offered)
        checkpoint = self._saves.last_committed({name for names in attempt.missing.values() for name in names})
        age_s = self._saves.age_s(checkpoint, now) if checkpoint is not None else 0.0
        healed = attempt.reply(self._info(), now, checkpoint, age_s)
        self._scheduler.is_held = False
        resumed = self._scheduler.resume(now)
        return [self._mesh_changed(), SendToClient(attempt.client, healed), *resumed, *self._spares.replace_used()]

    def _fail(self, reason: str, now: float, *, keeps_new_ranks: bool = False) -> list[Effect]:
        """End the attempt. New ranks end with it: they may lack what the others hold, and the next heal begins anew.

        Args:
            keeps_new_ranks: they have got all that there is.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        self._scheduler.is_held = False
        who = name_ranks(attempt.new_ranks) if attempt.new_ranks else "the mesh"
        what = f"{who} could not be healed"
        unfinished: list[Effect] = []
        if attempt.resized is not None:
            what = f"the mesh has {len(self._ranks)} ranks now, but the resize was not completed"
        joined = tuple(rank for rank in attempt.new_ranks if rank not in self._ranks.exited)
        if attempt.is_copy:
            what = f"nothing may have been copied to {name_ranks(attempt.new_ranks)}"
        elif joined and not keeps_new_ranks:
            self._unfinished.update(joined)
            unfinished = [self._ranks.send(joined, messages.KillRanks(CallId(f"unfinished-{attempt.number}"), joined))]
        text = f"{what}: {reason}. The other ranks keep what they hold"
        return [
            *unfinished,
            self._mesh_changed(),
            *_refuse(attempt.client, attempt.command, text, "HealError" if attempt.resized is None else "ResizeError"),
            *self._scheduler.resume(now),
            *self._spares.replace_used(),
        ]

    def _copy(self, client: str, command: messages.HealMesh, now: float) -> list[Effect]:
        """Copy what the user has named to the ranks that were healed last: all live."""
        ranks, busy = tuple(rank for rank in self._last_healed if rank in self._ranks), self._scheduler.busy_cells()
        names = command.copy or self._offered
        if why := _why_not_copied(ranks, names, self._groups.status, busy[0].label if busy else ""):
            return _refuse(client, command, why)
        self._num_attempts += 1
        command = msgspec.structs.replace(command, copy=names)
        self._attempt = HealAttempt(client, command, ranks, self._num_attempts, now, is_copy=True)
        self._scheduler.is_held = True
        return [self._mesh_changed(), *self._share(now)]

    def _mesh_changed(self) -> SendToClient:
        return SendToClient(None, messages.MeshChanged(info=self._info()))


def _replay_call(attempt: HealAttempt) -> CallId:
    return CallId(f"replay-{attempt.number}")


def _describe_lost(exited: Collection[int]) -> str:
    return f"{name_ranks(exited)} was lost meanwhile" if exited else ""


def _why_not_copied(ranks: Ranks, names: Collection[str], groups: str, running: str) -> str:
    """Return why names cannot be copied to ranks that were healed; "" if they can."""
    if not ranks:
        return "no rank has been healed, so that there is none to copy to"
    if not names:
        return f"the last heal has left nothing to copy to {name_ranks(ranks)}; %mesh heal --copy NAME copies a name"
    if groups != "ready":
        return "nothing is copied without process groups; %mesh heal forms those that broke"
    return f"{running} runs; wait for it, or press Stop (%mesh interrupt)" if running else ""


def _refuse(client: str, command: messages.HealMesh, text: str, error: str = "HealError") -> list[Effect]:
    return [SendToClient(client, messages.Refused(call=command.call, error=error, text=text))]
