"""What happens between a SIGTERM and the end: cells come to a safe point, names are saved, the ranks leave.

A SIGTERM to a rank concerns that rank; one to a host or its fork server, the ranks of that host; one to the supervisor,
the mesh. Without a plan (`PlanPreemption`) these end at once. With one, in this order: clients' calls wait; running
cells learn that they are preempted, all ranks at the same question (`rank/preemption.py`), and those that have not
ended by two thirds of the time are stopped; broken groups are formed anew; an elastic loop that was cut off is taken
back to its last snapshot; the names are saved; the ranks leave. A cell that had to be stopped may have been in the
middle of a step: then nothing but such a snapshot is saved. Pure: events in, effects out.
"""

from __future__ import annotations

from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, Parts
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer, Shutdown
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.wire import messages

# Seconds in which the signals of one event come: a cluster's manager sends them to all processes of a job.
_GATHER_S = 0.2
# The part of the grace period after which cells are stopped; the rest is for the save.
_STOP_AFTER = 2 / 3
# Seconds until ranks are asked again, of which not all have answered.
_ASK_AGAIN_S = 1.0


class Preemption:
    """At most one at a time; signals that come during one join it.

    Attributes:
        is_over: the mesh shuts down, and signals change nothing any more.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        scheduler: CallScheduler,
        saves: CheckpointSaves,
        healing: Healing,
        pid: int,
        mesh_id: str,
    ) -> None:
        """
        Args:
            pid: the supervisor's.
            mesh_id: unique, for the names of saves.
        """
        self._ranks, self._groups, self._scheduler, self._saves = ranks, groups, scheduler, saves
        self._healing, self._pid, self._mesh_id = healing, pid, mesh_id
        saves.end_listeners.append(self._save_ended)
        scheduler.end_listeners.append(self._call_ended)
        self._plan: messages.PlanPreemption | None = None
        self._unsound: list[CallId] = []  # calls that ended badly since the last cell that ended well, oldest first
        self.is_over = False
        self._number = 0  # of preemptions; timers of earlier ones do nothing
        self._reset()

    def _reset(self) -> None:
        self._step: str | None = None  # "gathering", "draining", "forming", "rolling back", "saving"
        self._leaving: set[int] = set()  # ranks that received SIGTERM
        self._is_supervisor_signalled = False
        self._is_stopped = False  # a client has stopped the mesh meanwhile
        self._asked: set[str] = set()  # calls whose ranks were asked
        self._undecided: set[str] = set()  # of these, those of which not all ranks have answered
        self._num_asked = 0
        self._cut: list[str] = []  # labels of calls that were stopped meanwhile, by this or by a client
        self._save: CallId | None = None
        self._outcome = self._remark = ""
        self._is_saved = False

    @property
    def is_active(self) -> bool:
        return self._step is not None

    # ---- inputs

    def plan(self, client: str, command: messages.PlanPreemption) -> list[Effect]:
        if self.is_active:
            return self._refuse(client, command.call, "UsageError")
        self._plan = command
        return [SendToClient(client, messages.CommandReply(call=command.call))]

    def refuse_heal(self, client: str, command: messages.HealMesh | messages.ResizeMesh) -> list[Effect]:
        """Refuse to heal or resize while ranks are about to end; return nothing if none are."""
        return self._refuse(client, command.call, "HealError") if self.is_active else []

    def _refuse(self, client: str, call: CallId, error: str) -> list[Effect]:
        text = f"{self._who()}, and what follows is under way; wait until it is over"
        return [SendToClient(client, messages.Refused(call=call, error=error, text=text))]

    def takes_stop(self) -> bool:
        """A client stops the mesh. Whether it ends by itself when names are saved, instead of now.

        A front end that receives SIGTERM too shuts its kernels down, and these stop their meshes.
        """
        if not self.is_active or self._plan is None or not self._plan.names:
            return False
        self._is_stopped = True
        return True

    def requested(self, ranks: Ranks | None, now: float) -> list[Effect]:
        """Processes received SIGTERM: those of these ranks; None: the supervisor."""
        if self.is_over:
            return []
        if ranks is None:
            self._is_supervisor_signalled = True
            if self._plan is None or not self._ranks.living:
                return [
                    Shutdown(f"its supervisor (pid {self._pid}) was ended by a signal (SIGTERM), and its ranks with it")
                ]
        else:
            self._leaving.update(rank for rank in ranks if rank in self._ranks and rank not in self._ranks.exited)
            if not self._leaving:
                return []
        if self.is_active:
            return []
        self._step = "gathering"
        self._number += 1
        return [self._timer("gathered", _GATHER_S)]

    def _call_ended(self, call: ActiveCall, parts: Parts) -> list[Effect]:
        """A client's call has ended: does it leave names as a whole step has left them?"""
        if not call.runs_user_code:
            return []
        if all(part.outcome.status == "ok" or _is_at_safe_point(part.outcome) for part in parts):
            if not self.is_active and call.history_entry is not None:
                self._unsound = []
        else:
            self._unsound.append(call.id)
            if self.is_active and any(part.outcome.status not in ("ok", "error") for part in parts):
                self._cut.append(call.label)
        return []

    def _save_ended(self, call: CallId, folder: str, error: str) -> list[Effect]:
        """A checkpoint was committed to this folder, or thrown away."""
        if call != self._save or self._step != "saving":
            return []
        assert self._plan is not None
        if error:
            self._outcome = self._without_checkpoint(error)
        else:
            self._is_saved = True
            self._outcome = f"{self._outcome} saved in {folder}{self._remark}"
        return [self._timer("leave", 0.0)]

    def timer_fired(self, argument: str, now: float) -> list[Effect]:
        kind, _, number = argument.partition(" ")
        if number != str(self._number) or not self.is_active:
            return []
        match kind:
            case "gathered":
                return self._begin(now)
            case "stop" if self._step == "draining":
                return self._stop_calls(now)
            case "over" if not self._is_saved:
                assert self._plan is not None
                where = f"while {self._step}" if self._step != "draining" else "while a call was still running"
                return self._leave(self._without_checkpoint(f"{self._plan.grace_s:g} s were over {where}"), now)
            case "leave":
                return self._leave(self._outcome, now)
            case "ask":
                self._asked -= self._undecided
                self._undecided.clear()
                return self.advance(now)
        return []

    # ---- the steps

    def _begin(self, now: float) -> list[Effect]:
        plan = self._plan
        if plan is None:
            return self._leave("nothing is saved, because nothing was asked for (mesh.on_preemption)", now)
        self._step = "draining"
        busy = [call.label for call in self._scheduler.busy_cells() if call.client]
        stop_after_s = plan.grace_s * _STOP_AFTER
        what = f"{', '.join(plan.names)} will be saved in {plan.path}" if plan.names else "nothing will be saved"
        if busy:
            what += f" when {' and '.join(busy)} has ended, which is stopped after {stop_after_s:.0f} s"
        timers = [self._timer("stop", stop_after_s - _GATHER_S), self._timer("over", plan.grace_s - _GATHER_S)]
        return [self._report(f"{self._who()}: {what}"), *timers, *self.advance(now)]

    def advance(self, now: float) -> list[Effect]:
        """Do what waited for the end of a call: ask cells that have begun, or save."""
        if self._step != "draining" or self._healing.is_active or self._scheduler.is_comparing:
            return []
        assert self._plan is not None
        self._scheduler.is_held = True
        if busy := self._scheduler.busy_cells():
            return [effect for call in busy if call.client for effect in self._ask(call, now)]
        if not self._plan.names:
            return self._leave("nothing was to be saved", now)
        if exited := self._ranks.exited:
            why = f"all ranks take part in one, and {name_ranks(exited)} is lost"
            return self._leave(self._without_checkpoint(why), now)
        if self._groups.status == "broken":
            self._step = "forming"
            return self._scheduler.form_groups(now, self._groups_formed)
        if self._unsound and self._groups.status == "ready":
            self._step = "rolling back"
            command = messages.RollBack(self._call_id("rollback"), self._ranks.all, tuple(self._unsound))
            return self._scheduler.run_own_call(command, now, self._rolled_back, "loading the last snapshot")
        return self._begin_save(self._plan.names, now)

    def _ask(self, call: ActiveCall, now: float) -> list[Effect]:
        """Have the ranks of a call agree where it is preempted."""
        if call.id in self._asked or not call.runs_user_code:
            return []
        self._asked.add(call.id)
        self._num_asked += 1
        query = messages.QueryPreemptionPoint(
            call=self._call_id(f"ask{self._num_asked}"), ranks=call.ranks, about_call=call.id
        )
        decide = lambda _, parts, now: self._decide(call, parts)  # noqa: E731
        return self._scheduler.run_own_call(query, now, decide, "agreeing on a step", is_main_thread=False)

    def _decide(self, call: ActiveCall, parts: Parts) -> list[Effect]:
        asked = {
            rank: part.outcome.reply["asked"]
            for part in parts
            if part.outcome.status == "ok" and part.outcome.reply is not None
            for rank in part.ranks
        }
        at = max(asked.values()) + 1 if asked.keys() >= set(call.ranks) else None
        point = messages.SetPreemptionPoint(ranks=call.ranks, about_call=call.id, at=at, reason=self._who())
        if at is not None:
            return [self._ranks.send(call.ranks, point)]
        self._undecided.add(call.id)  # a rank that keeps the interpreter may have passed any number
        return [self._ranks.send(call.ranks, point), self._timer("ask", _ASK_AGAIN_S)]

    def _stop_calls(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for call in self._scheduler.busy_cells():
            if call.client:
                stop = messages.Interrupt(ranks=call.ranks, target=call.id)
                effects += self._scheduler.interrupt("", stop, now)
        return effects

    def _groups_formed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        if failure := self._groups.formed(parts, call.failure):
            return self._leave(self._without_checkpoint(f"the process groups could not be formed: {failure}"), now)
        self._step = "draining"
        return self.advance(now)

    def _rolled_back(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        assert self._plan is not None
        if failed := [part for part in parts if part.outcome.status != "ok"]:
            error = failed[0].outcome.error
            text = error.evalue if error is not None else failed[0].outcome.status
            return self._leave(self._without_checkpoint(f"{name_ranks(failed[0].ranks)}: {text}"), now)
        reply = parts[0].outcome.reply or {}
        if not reply["names"]:
            if self._cut:
                why = f"{' and '.join(self._cut)} was stopped, perhaps in the middle of a step"
                return self._leave(self._without_checkpoint(why), now)
            self._remark = "; the last cell had not ended well, and what it changed is in it as it was left"
            return self._begin_save(self._plan.names, now)
        names = tuple(name for name in self._plan.names if name in reply["names"] or name == "rng")
        if not names:
            why = f"the elastic loop that was stopped has {', '.join(reply['names'])} in its state, and none of these"
            return self._leave(self._without_checkpoint(why), now)
        left_out = [name for name in self._plan.names if name not in names]
        self._remark = f", as of step {reply['step']} of the elastic loop that was cut off"
        if left_out:
            self._remark += f", without {', '.join(left_out)}, which its state does not have"
        return self._begin_save(names, now)

    def _begin_save(self, names: tuple[str, ...], now: float) -> list[Effect]:
        assert self._plan is not None
        self._step = "saving"
        self._outcome = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
        save = messages.SaveCheckpoint(
            call=self._call_id("save"), ranks=self._ranks.all, path=self._plan.path, names=names
        )
        self._save = save.call
        self._saves.began(save)
        copied = lambda call, parts, now: self._saves.call_ended(call, parts)  # noqa: E731
        return self._scheduler.run_own_call(save, now, copied, "saving a checkpoint")

    def _leave(self, outcome: str, now: float) -> list[Effect]:
        """End the ranks that received SIGTERM, or the mesh."""
        leaving = tuple(rank for rank in sorted(self._leaving) if rank not in self._ranks.exited)
        who, plan = self._who(), self._plan
        ends_mesh = self._is_supervisor_signalled or self._is_stopped or leaving == self._ranks.living != ()
        is_saved = self._is_saved
        self._reset()
        if not self._healing.is_active:
            self._scheduler.is_held = False
        if ends_mesh:
            reason = f"{who}; {outcome}"
            if is_saved and plan is not None:
                reason += f": on a new mesh, %mesh restore {plan.path}"
            return [self._report(f"{reason}. The mesh ends"), Shutdown(reason)]
        if not leaving:  # they have ended otherwise
            return [self._report(f"{who}; {outcome}"), *self._scheduler.resume(now)]
        leave = "leaves" if len(leaving) == 1 else "leave"
        text = f"{who}; {outcome}. {name_ranks(leaving)} {leave}; %mesh heal puts a new process in its place"
        end = self._ranks.send(leaving, messages.EndRanks(ranks=leaving))
        return [end, self._report(text, leaving), *self._scheduler.resume(now)]

    # ---- words

    def _who(self) -> str:
        if self._is_supervisor_signalled:
            return f"its supervisor (pid {self._pid}) received SIGTERM"
        return f"{name_ranks(self._leaving)} received SIGTERM"

    def _without_checkpoint(self, why: str) -> str:
        plan = self._plan
        if plan is None or not plan.names:
            return why
        last = self._saves.last_committed(plan.names)
        text = f"no checkpoint was written: {why}"
        return f"{text}; the last one is {last.folder}" if last is not None else text

    def _report(self, text: str, ranks: Ranks | None = None) -> SendToClient:
        return SendToClient(None, messages.MeshPreempted(self._ranks.all if ranks is None else ranks, text))

    def _timer(self, kind: str, delay_s: float) -> SetTimer:
        return SetTimer(f"preemption {kind} {self._number}", max(0.0, delay_s))

    def _call_id(self, kind: str) -> CallId:
        return CallId(f"preemption-{self._mesh_id}-{kind}-{self._number}")


def _is_at_safe_point(outcome: messages.Outcome) -> bool:
    return outcome.error is not None and outcome.error.ename == "Preempted"
