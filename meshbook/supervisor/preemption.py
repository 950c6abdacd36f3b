"""What happens between a SIGTERM and the end: cells come to a safe point, names are saved, the ranks leave.

A SIGTERM to a rank concerns that rank; one to a host or its fork server, the ranks of that host; one to the supervisor,
the mesh. Without a plan (`PlanPreemption`) these end at once. With one, in this order: clients' calls wait; running
cells learn that they are preempted, all ranks at the same question (`rank/preemption.py`), and those that have not
ended by two thirds of the time are stopped; broken groups are formed anew; an elastic loop that was cut off is taken
back to its last snapshot; the names are saved; the ranks leave. A cell that had to be stopped may have been in the
middle of a step: then nothing but such a snapshot is saved. If the plan is to resize, and the highest ranks are to end,
the mesh is resized instead of the save. Pure: events in, effects out.
"""

from __future__ import annotations

import math

from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall, Parts
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer, Shutdown
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.healing import Healing
from meshbook.supervisor.preemption_points import PreemptionPoints
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.resizing import Resizing, axes_without, format_axes
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.wire import messages

# Seconds in which the signals of one event come: a cluster's manager sends them to all processes of a job.
_GATHER_S = 0.2
# The part of the grace period after which cells are stopped; the rest is for the save.
_STOP_AFTER = 2 / 3
# ... and until which ranks that leave must have given the others what these need of them.
_GIVE_UNTIL = 5 / 6


class Preemption:
    """At most one at a time; signals that come during one join it.

    Attributes:
        saved_names: what is saved when SIGTERM comes.
        is_over: the mesh shuts down, and signals change nothing any more.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        scheduler: CallScheduler,
        saves: CheckpointSaves,
        healing: Healing,
        resizing: Resizing,
        pid: int,
        mesh_id: str,
    ) -> None:
        """
        Args:
            pid: the supervisor's.
            mesh_id: unique, for the names of saves.
        """
        self._ranks, self._groups, self._scheduler, self._saves = ranks, groups, scheduler, saves
        self._healing, self._resizing, self.pid, self._mesh_id = healing, resizing, pid, mesh_id
        saves.end_listeners.append(self._save_ended)
        scheduler.end_listeners.append(self._call_ended)
        self._plan: messages.PlanPreemption | None = None
        self.saved_names: tuple[str, ...] = ()
        self._unsound: list[CallId] = []  # calls that ended badly since the last cell that ended well, oldest first
        self.is_over = False
        self._number = 0  # of preemptions; timers of earlier ones do nothing
        self._points = PreemptionPoints(ranks, scheduler, self._call_id, self._timer)
        self._reset()

    def _reset(self) -> None:
        self._step: str | None = None  # "gathering", "draining", "forming", "rolling back", "resizing", "saving"
        self._leaving: set[int] = set()  # ranks that received SIGTERM
        self._is_supervisor_signalled = False
        self._is_stopped = False  # a client has stopped the mesh meanwhile
        self._points.reset()
        self._cut: list[str] = []  # labels of calls that were stopped meanwhile, by this or by a client
        self._began_at = 0.0
        self._resized: dict[str, int] = {}  # axes that the mesh gets, or was to get
        self._why_not_resized = ""
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
        self._plan, self.saved_names = command, command.names
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
                    Shutdown(f"its supervisor (pid {self.pid}) was ended by a signal (SIGTERM), and its ranks with it")
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
            self._outcome = f"{self._outcome} saved in {folder}{self._remark}{self._why_not_resized}"
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
            case "over" if not self._is_saved and self._step != "resizing":
                assert self._plan is not None
                where = f"while {self._step}" if self._step != "draining" else "while a call was still running"
                return self._leave(self._without_checkpoint(f"{self._plan.grace_s:g} s were over {where}"), now)
            case "leave":
                return self._leave(self._outcome, now)
            case "ask":
                self._points.ask_again()
                return self.advance(now)
        return []

    # ---- the steps

    def _begin(self, now: float) -> list[Effect]:
        plan = self._plan
        if plan is None:
            return self._leave("nothing is saved, because nothing was asked for (mesh.on_preemption)", now)
        self._step, self._began_at = "draining", now
        busy = [call.label for call in self._scheduler.busy_cells() if call.client]
        stop_after_s = plan.grace_s * _STOP_AFTER
        what = f"{', '.join(plan.names)} will be saved in {plan.path}" if plan.names else "nothing will be saved"
        if plan.resize and (axes := self._axes_without()):
            what = f"the mesh will go on with {format_axes(axes)}"
        if busy:
            what += f" when {' and '.join(busy)} has ended, which is stopped after {stop_after_s:.0f} s"
        timers = [self._timer("stop", stop_after_s - _GATHER_S), self._timer("over", plan.grace_s - _GATHER_S)]
        return [self._report(f"{self._who()}: {what}"), *timers, *self.advance(now)]

    def advance(self, now: float) -> list[Effect]:
        """Do what waited for the end of a call: ask cells that have begun, or save."""
        if self._step == "resizing" and not self._resizing.is_active and not self._healing.is_active:
            return self._resize_ended(now)
        if self._step != "draining" or self._healing.is_active or self._scheduler.is_comparing:
            return []
        assert self._plan is not None
        self._scheduler.is_held = True
        if busy := self._scheduler.busy_cells():
            return [effect for call in busy if call.client for effect in self._points.ask(call, self._who(), now)]
        if not self._plan.names and not self._axes_without():
            return self._leave(f"nothing was to be saved{self._why_not_resized}", now)
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
        return self._resize_or_save(self._plan.names, now)

    def _axes_without(self) -> dict[str, int]:
        """Return the axes that the mesh is to go on with; {}: it is not to, or cannot."""
        is_asked_for = self._plan is not None and self._plan.resize and not self._resized
        if not is_asked_for or self._is_supervisor_signalled or self._is_stopped:
            return {}
        return axes_without(self._groups.axes, self._leaving)

    def _resize_or_save(self, names: tuple[str, ...], now: float) -> list[Effect]:
        """Have the mesh go on without the ranks that are to end, if that was asked for and can be; else save."""
        if not (axes := self._axes_without()):
            return self._begin_save(names, now)
        self._step, self._resized = "resizing", axes
        resize = messages.ResizeMesh(call=self._call_id("resize"), axes=axes)
        give_until = self._began_at + self._plan.grace_s * _GIVE_UNTIL if self._plan is not None else math.inf
        return [*self._resizing.begin("", resize, now, give_until), *self.advance(now)]

    def _resize_ended(self, now: float) -> list[Effect]:
        assert self._plan is not None
        if why := self._resizing.why_refused:
            self._step, self._why_not_resized = "draining", f"; the mesh was not resized: {why}"
            return self.advance(now)
        is_done = not self._healing.has_unmoved and not self._ranks.exited
        what = "run the cells that were ended again" if is_done else "%mesh heal completes the resize"
        without = f"{name_ranks(self._leaving)}, with {format_axes(self._resized)}"
        text = f"{self._who()}; the mesh goes on without {without}: {what}"
        self._reset()
        return [self._report(text), *self._scheduler.resume(now)]

    def _stop_calls(self, now: float) -> list[Effect]:
        calls = [call for call in self._scheduler.busy_cells() if call.client]
        stops = [messages.Interrupt(ranks=call.ranks, target=call.id) for call in calls]
        return [effect for stop in stops for effect in self._scheduler.interrupt("", stop, now)]

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
        if self._axes_without():
            return self._resize_or_save(self._plan.names, now)
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
        plan, self._step = self._plan, "saving"
        assert plan is not None
        self._outcome = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
        save = messages.SaveCheckpoint(call=self._call_id("save"), ranks=self._ranks.all, path=plan.path, names=names)
        self._save = save.call
        self._saves.began(save)
        copied = lambda call, parts, now: self._saves.call_ended(call, parts)  # noqa: E731
        return self._scheduler.run_own_call(save, now, copied, "saving a checkpoint")

    def _leave(self, outcome: str, now: float) -> list[Effect]:
        """End the ranks that received SIGTERM, or the mesh."""
        leaving = tuple(sorted(self._leaving.intersection(self._ranks.living)))  # a resize may have sent some away
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
            return f"its supervisor (pid {self.pid}) received SIGTERM"
        return f"{name_ranks(self._leaving)} received SIGTERM"

    def _without_checkpoint(self, why: str) -> str:
        return _explain_no_save(self._plan, self._saves, why)

    def _report(self, text: str, ranks: Ranks | None = None) -> SendToClient:
        return SendToClient(None, messages.MeshAnnounced(self._ranks.all if ranks is None else ranks, text))

    def _timer(self, kind: str, delay_s: float) -> SetTimer:
        return SetTimer(f"preemption {kind} {self._number}", max(0.0, delay_s))

    def _call_id(self, kind: str) -> CallId:
        return CallId(f"preemption-{self._mesh_id}-{kind}-{self._number}")


def _explain_no_save(plan: messages.PlanPreemption | None, saves: CheckpointSaves, why: str) -> str:
    if plan is None or not plan.names:
        return why
    last = saves.last_committed(plan.names)
    text = f"no checkpoint was written: {why}"
    return f"{text}; the last one is {last.folder}" if last is not None else text


def _is_at_safe_point(outcome: messages.Outcome) -> bool:
    return outcome.error is not None and outcome.error.ename == "Preempted"
