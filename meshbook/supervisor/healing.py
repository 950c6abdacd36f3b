"""Puts new processes in the place of ranks that have exited, while the other ranks stay as they are.

In this order: hosts start the processes; all ranks form the next generation of the process groups; the new ranks run
the setup cells, and the imports and definitions of other cells; all ranks share what is known to be equal on them.
Clients' calls wait meanwhile. Each step is a call of the supervisor's own: if a rank exits during one, that call ends
as every call does, and with it the attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from meshbook.ids import CallId, Ranks, format_ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, Parts
from meshbook.supervisor.cell_sources import cells_to_replay, rank_dependent_names
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo

# Seconds in which new processes must be up and all groups formed. Ranks wait for each other for 60 s in it; a rank that
# takes no part at all (it is stuck in what it ran before) must not hold up the others for ever.
_FORM_TIMEOUT_S = 120.0


class Healing:
    """At most one attempt at a time.

    Attributes:
        lost_hosts: hosts that have exited, and how; their ranks cannot be started again.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        scheduler: CallScheduler,
        cells: CellRecord,
        startup: MeshStartup,
        saves: CheckpointSaves,
        info: Callable[[], MeshInfo],
    ) -> None:
        self._ranks, self._groups, self._scheduler, self._cells = ranks, groups, scheduler, cells
        self._startup, self._saves, self._info = startup, saves, info
        self.lost_hosts: dict[int, str] = {}
        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._waiting: tuple[str, messages.HealMesh] | None = None  # until a call of lost ranks has ended

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
        if gone := [rank for rank in self._ranks.exited if self._ranks.host_of(rank) in self.lost_hosts]:
            host = self._ranks.host_of(gone[0])
            text = f"{name_ranks(gone)} ran on host {host}, which {self.lost_hosts[host]}; a new mesh is %mesh restart"
            return _refuse(client, command, text)
        busy = self._scheduler.busy_cells()
        exited = self._ranks.exited.keys()
        running = [call for call in busy if call.client and not call.lost and exited.isdisjoint(call.ranks)]
        if running:
            text = (
                f"{running[0].label} runs on {name_ranks(running[0].remaining_ranks(self._ranks.exited))}; wait for "
                "it, or press Stop (%mesh interrupt), then heal"
            )
            return _refuse(client, command, text)
        if busy:  # they end by themselves: those of before the loss within two seconds, tensor operations after it too
            self._waiting = client, command
            return []
        return self._start(client, command, now)

    def call_ended(self, now: float) -> list[Effect]:
        """Begin the attempt that waited for calls of lost ranks, if all have ended."""
        if self._waiting is None or self._scheduler.busy_cells():
            return []
        (client, command), self._waiting = self._waiting, None
        return self._start(client, command, now)

    def make_whole(
        self, client: str, call: CallId, resized: messages.ResizeChanges, began_at: float, now: float
    ) -> list[Effect]:
        """Start the ranks that a resize has added, and those that have exited, and form the groups of all."""
        return self._start(client, messages.HealMesh(call), now, resized, began_at)

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
        if not new_ranks and self._groups.status != "broken" and resized is None:
            return [SendToClient(client, messages.MeshHealed(command.call, self._info(), (), 0.0))]
        self._num_attempts += 1
        since = now if began_at is None else began_at
        self._attempt = _Attempt(client, command, new_ranks, self._num_attempts, since, resized)
        self._scheduler.is_held = True
        self._ranks.restarting(new_ranks)
        effects: list[Effect] = [self._mesh_changed()]
        for host in self._ranks.hosts_of(new_ranks):
            host_ranks = self._ranks.on_host(host)
            started = tuple(rank for rank in host_ranks if rank in new_ranks)
            start = messages.StartRanks(spec=spec, ranks=started, world_size=len(self._ranks), host_ranks=host_ranks)
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
        replay = messages.ReplayCells(CallId(f"replay-{attempt.number}"), attempt.new_ranks, cells)
        return self._scheduler.run_own_call(replay, now, self._replayed, "replaying cells")

    def _replayed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := _first_failure(parts):
            return self._fail_with_new_processes(f"cells were not replayed on it: {failure}", now)
        for part in parts:
            reply = part.outcome.reply or {}
            attempt.ran = tuple(reply.get("ran", ()))
            attempt.num_defined = reply.get("defined", 0)
            attempt.bound.update(reply.get("bound", ()))
            attempt.failed.update(dict(reply.get("failed", ())))
        return self._share(now)

    def _share(self, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if self._ranks.exited:  # of a rank that took no part in the last step
            return self._fail(f"{name_ranks(self._ranks.exited)} was lost meanwhile; %mesh heal replaces it", now)
        if not attempt.command.share or not attempt.new_ranks or self._groups.status != "ready":
            return self._finish(now)
        share = messages.ShareState(
            call=CallId(f"share-{attempt.number}"),
            ranks=self._ranks.all,
            new_ranks=attempt.new_ranks,
            rank_dependent=rank_dependent_names(entry.source for entry in self._cells.history.entries()),
        )
        return self._scheduler.run_own_call(share, now, self._shared, "sharing state")

    def _shared(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        attempt = self._attempt
        assert attempt is not None
        if failure := _first_failure(parts):
            self._groups.rank_lost()  # members may have come to different places: the groups are formed anew
            return self._fail_with_new_processes(f"what the others hold was not copied to it: {failure}", now)
        for part in parts:
            reply = part.outcome.reply or {}
            for rank in part.ranks:
                if rank in attempt.new_ranks:
                    attempt.restored[rank] = {name: (found[0], found[1]) for name, found in reply["restored"].items()}
                    attempt.missing[rank] = dict(reply["missing"])
        return self._finish(now)

    def _finish(self, now: float) -> list[Effect]:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if reason := self._why_nothing_is_copied(attempt):
            names = {name: reason for name in self._cells.names if name not in attempt.bound}
            attempt.missing = dict.fromkeys(attempt.new_ranks, names) if names else {}
        checkpoint = self._saves.last_committed({name for names in attempt.missing.values() for name in names})
        healed = messages.MeshHealed(
            call=attempt.command.call,
            info=self._info(),
            ranks=attempt.new_ranks,
            seconds=now - attempt.began_at,
            ran=attempt.ran,
            num_defined=attempt.num_defined,
            failed=tuple(attempt.failed.items()),
            restored=attempt.restored,
            missing=attempt.missing,
            checkpoint=checkpoint,
            checkpoint_age_s=self._saves.age_s(checkpoint, now) if checkpoint is not None else 0.0,
            resized=attempt.resized,
        )
        self._scheduler.is_held = False
        return [self._mesh_changed(), SendToClient(attempt.client, healed), *self._scheduler.resume(now)]

    def _why_nothing_is_copied(self, attempt: _Attempt) -> str:
        """Return why the new ranks got nothing from others; "" if they were given what the others hold equally."""
        if len(attempt.new_ranks) == len(self._ranks):
            return "no other rank was left that held it"
        if not attempt.command.share:
            return "copying was turned off"
        return "" if self._groups.status == "ready" else "nothing is copied without process groups"

    def _fail_with_new_processes(self, reason: str, now: float) -> list[Effect]:
        """End the attempt after the new ranks have joined: they live, and lack what the others hold."""
        assert self._attempt is not None
        new_ranks = self._attempt.new_ranks
        if self._ranks.exited or self._attempt.resized is not None:
            return self._fail(f"{reason}; %mesh heal tries again", now)
        again = f"%mesh kill {format_ranks(new_ranks)}, then %mesh heal, tries again"
        return self._fail(f"it has a new process, but {reason}; {again}", now)

    def _fail(self, reason: str, now: float) -> list[Effect]:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        self._scheduler.is_held = False
        who = name_ranks(attempt.new_ranks) if attempt.new_ranks else "the mesh"
        what = f"{who} could not be healed"
        unfinished: list[Effect] = []
        if attempt.resized is not None:
            what = f"the mesh has {len(self._ranks)} ranks now, but the resize was not completed"
            # those that have joined may lack what the others hold: with the next heal, all of them begin anew
            joined = tuple(rank for rank in attempt.new_ranks if rank not in self._ranks.exited)
            if joined:
                kill = messages.KillRanks(CallId(f"unfinished-{attempt.number}"), joined)
                unfinished = [self._ranks.send(joined, kill)]
        text = f"{what}: {reason}. The other ranks keep what they hold"
        return [
            *unfinished,
            self._mesh_changed(),
            *_refuse(attempt.client, attempt.command, text, "HealError" if attempt.resized is None else "ResizeError"),
            *self._scheduler.resume(now),
        ]

    def _mesh_changed(self) -> SendToClient:
        return SendToClient(None, messages.MeshChanged(info=self._info()))


class _Attempt:
    """One attempt, and what its steps came to."""

    def __init__(
        self,
        client: str,
        command: messages.HealMesh,
        new_ranks: Ranks,
        number: int,
        began_at: float,
        resized: messages.ResizeChanges | None,
    ) -> None:
        self.client, self.command, self.new_ranks = client, command, new_ranks
        self.number, self.began_at, self.resized = number, began_at, resized
        self.ran: tuple[str, ...] = ()
        self.num_defined = 0
        self.bound: set[str] = set()  # names that the replayed cells have bound
        self.failed: dict[str, str] = {}
        self.restored: dict[int, dict[str, tuple[int, str]]] = {}
        self.missing: dict[int, dict[str, str]] = {}


def _first_failure(parts: Parts) -> str:
    """Return how the first rank failed; "" if none did."""
    failed = next((part for part in parts if part.outcome.status != "ok"), None)
    if failed is None:
        return ""
    error = failed.outcome.error
    what = f"{error.ename}: {error.evalue}" if error is not None else failed.outcome.status
    return f"{name_ranks(failed.ranks)}: {what}"


def _refuse(client: str, command: messages.HealMesh, text: str, error: str = "HealError") -> list[Effect]:
    return [SendToClient(client, messages.Refused(call=command.call, error=error, text=text))]
