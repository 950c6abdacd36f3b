"""What the supervisor does between a SIGTERM and the end: events in, effects out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import Outcome, OutcomeGroup, RankError
from tests.supervisor.test_checkpoints import Saving
from tests.supervisor.test_state import messages_of, steps_of

RANKS = (0, 1, 2, 3)


class Preempted(Saving):
    """A mesh of four ranks that is asked to end."""

    def plan(self, *names: str, grace_s: float = 30.0, resize: bool = False) -> list[s.Effect]:
        path = "/run1" if names else ""
        return self.say(
            messages.PlanPreemption(call="plan", path=path, names=names, grace_s=grace_s, resize=resize)  # type: ignore[arg-type]
        )

    def sigterm(self, *ranks: int) -> list[s.Effect]:
        """Processes of these ranks (none: the supervisor) receive SIGTERM, and the time for others to follow passes."""
        if ranks:
            effects = self.host(messages.TerminationRequested(ranks=ranks))
        else:
            effects = self.state.changes.preemption.requested(None, self.now)
        return [*effects, *self.fire(effects, "gathered")]

    def fire(self, effects: Iterable[s.Effect], kind: str) -> list[s.Effect]:
        """Let a timer of the preemption pass."""
        names = [
            effect.name for effect in steps_of(effects, s.SetTimer) if effect.name.startswith(f"preemption {kind}")
        ]
        return [effect for name in names for effect in self.state.timer_fired(name, self.now)]

    def save_on_all(self, effects: list[s.Effect], *, error: str = "") -> list[s.Effect]:
        """Ranks copy, write and commit the save among effects; what follows."""
        (save,) = messages_of(effects, messages.SaveCheckpoint)
        self.finish(save.call)
        asked = self.all_written(save.call)
        assert messages_of(asked, messages.WriteCheckpointMetadata)
        ended = self.commit(self.metadata_written(save.call), error=error)
        return [*ended, *self.fire(ended, "leave")]

    def end_badly(self, call: str, status: str, **outcome: Any) -> list[s.Effect]:
        """A call ends so on all ranks, which are in step."""
        ended = self.finish(call, status=status, **outcome)
        return [*ended, *self.answer(ended, {rank: self.position(rank) for rank in RANKS})]

    def answer_asked(self, effects: list[s.Effect], asked: dict[int, int]) -> list[s.Effect]:
        (query,) = messages_of(effects, messages.QueryPreemptionPoint)
        parts = tuple(OutcomeGroup((r,), Outcome(status="ok", reply={"asked": n})) for r, n in asked.items())
        skipped = tuple(rank for rank in RANKS if rank not in asked)
        parts += (OutcomeGroup(skipped, Outcome(status="skipped")),) if skipped else ()
        return self.host(messages.CallFinished(call=query.call, outcomes=parts, seconds=0.1))


@pytest.fixture
def world() -> Preempted:
    return Preempted()


@pytest.fixture
def planned(world: Preempted) -> Preempted:
    """Which is to save the model first."""
    world.plan("model")
    return world


@pytest.fixture
def busy(planned: Preempted) -> Preempted:
    """Whose ranks all run call c1."""
    planned.run("c1")
    return planned


def said(effects: Iterable[s.Effect]) -> str:
    return "\n".join(report.text for report in messages_of(effects, messages.MeshAnnounced))


# ---- who ends


def test_without_a_plan_a_rank_leaves_at_once_and_the_others_stay(world: Preempted) -> None:
    effects = world.sigterm(2)
    assert [end.ranks for end in messages_of(effects, messages.EndRanks)] == [(2,)]
    assert said(effects).startswith("rank 2 received SIGTERM; nothing is saved, because nothing was asked for")
    assert "%mesh heal puts a new process in its place" in said(effects)
    assert not steps_of(effects, s.Shutdown)


def test_without_a_plan_a_supervisor_ends_at_once(world: Preempted) -> None:
    (shutdown,) = steps_of(world.sigterm(), s.Shutdown)
    assert shutdown.reason == "its supervisor (pid 1) was ended by a signal (SIGTERM), and its ranks with it"


def test_signals_to_all_ranks_in_a_moment_end_the_mesh(world: Preempted) -> None:
    first = world.host(messages.TerminationRequested(ranks=(0,)))
    for rank in (1, 2, 3, 2):  # repeated ones change nothing
        assert world.host(messages.TerminationRequested(ranks=(rank,))) == []
    effects = world.fire(first, "gathered")
    (shutdown,) = steps_of(effects, s.Shutdown)
    assert shutdown.reason.startswith("ranks 0-3 received SIGTERM")
    assert not messages_of(effects, messages.EndRanks)


def test_signals_after_the_shutdown_has_begun_change_nothing(world: Preempted) -> None:
    world.plan("x")
    world.say(messages.StopMesh(call="stop"))  # type: ignore[arg-type]
    assert world.sigterm() == []
    assert world.sigterm(1) == []


def test_the_signal_of_a_rank_that_has_exited_changes_nothing(world: Preempted) -> None:
    world.kill(1)
    assert world.sigterm(1) == []


def test_the_signal_of_a_rank_that_a_resize_has_sent_away_meanwhile_changes_nothing(world: Preempted) -> None:
    first = world.host(messages.TerminationRequested(ranks=(3,)))
    world.state._ranks.resize(3, hosts=(0,))
    assert not messages_of(world.fire(first, "gathered"), messages.EndRanks)


# ---- what is saved


def test_an_idle_mesh_saves_at_once_and_then_the_rank_leaves(world: Preempted) -> None:
    world.plan("model", "opt")
    begun = world.sigterm(1)
    (save,) = messages_of(begun, messages.SaveCheckpoint)
    assert (save.ranks, save.path, save.names) == (RANKS, "/run1", ("model", "opt"))
    assert not messages_of(begun, messages.EndRanks)
    ended = world.save_on_all(begun)
    assert "model, opt are saved in /run1/step-00000800" in said(ended)
    assert [end.ranks for end in messages_of(ended, messages.EndRanks)] == [(1,)]
    assert not steps_of(ended, s.Shutdown)


def test_a_mesh_that_ends_says_how_it_comes_back(planned: Preempted) -> None:
    (shutdown,) = steps_of(planned.save_on_all(planned.sigterm()), s.Shutdown)
    assert "model is saved in /run1/step-00000800: on a new mesh, %mesh restore /run1" in shutdown.reason


def test_a_save_that_is_thrown_away_says_why_and_which_checkpoint_is_the_last(world: Preempted) -> None:
    world.save("before")
    world.finish("before")
    world.all_written("before")
    world.commit(world.metadata_written("before"))
    world.plan("model")
    begun = world.sigterm()
    (save,) = messages_of(begun, messages.SaveCheckpoint)
    failed = world.written(2, save.call, error="the disk is full")
    (shutdown,) = steps_of(world.fire(failed, "leave"), s.Shutdown)
    assert "no checkpoint was written: rank 2: the disk is full" in shutdown.reason
    assert "the last one is /run1/step-00000800" in shutdown.reason


def test_with_a_lost_rank_nothing_is_saved_and_that_is_said(world: Preempted) -> None:
    world.kill(1)
    world.plan("model")
    effects = world.sigterm()
    assert "no checkpoint was written: all ranks take part in one, and rank 1 is lost" in said(effects)
    assert steps_of(effects, s.Shutdown)


def test_a_rank_that_dies_while_it_is_saved_ends_the_mesh_without_a_checkpoint(planned: Preempted) -> None:
    planned.finish(messages_of(planned.sigterm(), messages.SaveCheckpoint)[0].call)
    lost = planned.kill(1)
    (shutdown,) = steps_of(planned.fire(lost, "leave"), s.Shutdown)
    assert "no checkpoint was written: rank 1 was killed by SIGKILL" in shutdown.reason


def test_a_mesh_that_a_kernel_stops_meanwhile_ends_when_names_are_saved(planned: Preempted) -> None:
    begun = planned.sigterm(1)
    assert not steps_of(planned.say(messages.StopMesh(call="stop")), s.Shutdown)  # type: ignore[arg-type]
    (shutdown,) = steps_of(planned.save_on_all(begun), s.Shutdown)
    assert shutdown.reason.startswith("rank 1 received SIGTERM; model is saved in")


def test_a_plan_is_not_replaced_while_it_is_carried_out(planned: Preempted) -> None:
    planned.sigterm(1)
    (refused,) = messages_of(planned.plan(), messages.Refused)
    assert refused.error == "UsageError"


def test_a_rank_that_was_killed_before_it_could_leave_ends_nothing_else(world: Preempted) -> None:
    first = world.host(messages.TerminationRequested(ranks=(1,)))
    for rank in RANKS:
        world.kill(rank)
    effects = world.fire(first, "gathered")
    assert not steps_of(effects, s.Shutdown)
    assert not messages_of(effects, messages.EndRanks)


def test_a_second_preemption_saves_again_and_timers_of_the_first_do_nothing(planned: Preempted) -> None:
    first = planned.sigterm(1)
    planned.save_on_all(first)
    second = planned.sigterm(2)
    assert planned.fire(first, "over") == []
    assert messages_of(second, messages.SaveCheckpoint)[0].call != messages_of(first, messages.SaveCheckpoint)[0].call


# ---- cells


def test_the_ranks_of_a_running_cell_agree_on_a_question_that_none_has_passed(busy: Preempted) -> None:
    begun = busy.sigterm(1)
    assert "when cell 1 has ended, which is stopped after 20 s" in said(begun)
    decided = busy.answer_asked(begun, {0: 4, 1: 5, 2: 3, 3: 5})
    (point,) = messages_of(decided, messages.SetPreemptionPoint)
    assert (point.about_call, point.ranks, point.at, point.reason) == ("c1", RANKS, 6, "rank 1 received SIGTERM")
    assert messages_of(busy.finish("c1"), messages.SaveCheckpoint)


def test_ranks_that_do_not_all_answer_are_let_go_on_and_asked_again(busy: Preempted) -> None:
    undecided = busy.answer_asked(busy.sigterm(1), {0: 4, 1: 5, 2: 3})
    (point,) = messages_of(undecided, messages.SetPreemptionPoint)
    assert point.at is None
    again = busy.fire(undecided, "ask")
    (point,) = messages_of(busy.answer_asked(again, dict.fromkeys(RANKS, 9)), messages.SetPreemptionPoint)
    assert point.at == 10


def test_cells_that_are_sent_meanwhile_wait_until_the_rank_has_left(planned: Preempted) -> None:
    begun = planned.sigterm(1)
    assert not messages_of(planned.run("c1"), messages.RunCell)
    assert messages_of(planned.save_on_all(begun), messages.RunCell)


def test_a_cell_that_ends_with_preempted_is_at_a_safe_point(busy: Preempted) -> None:
    busy.sigterm(1)
    error = RankError(ename="Preempted", evalue="", traceback=())
    assert messages_of(busy.end_badly("c1", "error", error=error), messages.SaveCheckpoint)


def test_a_cell_that_does_not_end_is_stopped_and_a_cut_step_is_not_saved(busy: Preempted) -> None:
    begun = busy.sigterm()
    (stop,) = messages_of(busy.fire(begun, "stop"), messages.Interrupt)
    assert (stop.ranks, stop.target) == (RANKS, "c1")
    (back,) = messages_of(busy.end_badly("c1", "interrupted"), messages.RollBack)
    assert back.about_calls == ("c1",)
    (shutdown,) = steps_of(busy.finish(back.call, reply={"names": [], "step": 0}), s.Shutdown)
    assert "no checkpoint was written: cell 1 was stopped, perhaps in the middle of a step" in shutdown.reason


def test_of_an_elastic_loop_that_was_cut_off_the_last_snapshot_is_saved(world: Preempted) -> None:
    world.plan("model", "opt", "best")
    world.run("c1")
    world.fire(world.sigterm(), "stop")
    (back,) = messages_of(world.end_badly("c1", "interrupted"), messages.RollBack)
    begun = world.finish(back.call, reply={"names": ["model", "opt"], "step": 40})
    (save,) = messages_of(begun, messages.SaveCheckpoint)
    assert save.names == ("model", "opt")
    (shutdown,) = steps_of(world.save_on_all(begun), s.Shutdown)
    assert "as of step 40 of the elastic loop that was cut off, without best" in shutdown.reason


def test_after_a_cell_that_had_failed_before_names_are_saved_and_that_is_said(busy: Preempted) -> None:
    busy.end_badly("c1", "error", error=RankError(ename="NameError", evalue="x", traceback=()))
    (back,) = messages_of(busy.sigterm(), messages.RollBack)
    begun = busy.finish(back.call, reply={"names": [], "step": 0})
    assert "the last cell had not ended well" in said(busy.save_on_all(begun))


def test_after_a_later_cell_that_ended_well_a_failed_one_is_forgotten(busy: Preempted) -> None:
    busy.end_badly("c1", "error", error=RankError(ename="NameError", evalue="x", traceback=()))
    busy.run("c2")
    busy.finish("c2")
    assert messages_of(busy.sigterm(), messages.SaveCheckpoint)


def test_broken_groups_are_formed_anew_before_the_save(busy: Preempted) -> None:
    busy.fire(busy.sigterm(1), "stop")
    begun = busy.finish("c1", status="error", groups_broken=True)
    (form,) = messages_of(begun, messages.FormGroups)
    assert not messages_of(begun, messages.RollBack)
    (back,) = messages_of(busy.finish(form.call, reply={"backend": "gloo"}), messages.RollBack)
    assert back.about_calls == ("c1",)


def test_when_the_time_is_over_the_mesh_ends_whatever_runs(busy: Preempted) -> None:
    (shutdown,) = steps_of(busy.fire(busy.sigterm(), "over"), s.Shutdown)
    assert "no checkpoint was written: 30 s were over while a call was still running" in shutdown.reason


def test_a_plan_without_names_gives_cells_the_time_and_saves_nothing(world: Preempted) -> None:
    world.plan()
    world.run("c1")
    begun = world.sigterm(1)
    assert not messages_of(begun, messages.EndRanks)
    ended = world.finish("c1")
    assert [end.ranks for end in messages_of(ended, messages.EndRanks)] == [(1,)]
    assert not messages_of(ended, messages.SaveCheckpoint)


# ---- healing


def test_a_heal_that_is_under_way_ends_before_names_are_saved(planned: Preempted) -> None:
    planned.kill(1)
    (form,) = messages_of(planned.say(messages.HealMesh(call="heal")), messages.FormGroups)  # type: ignore[arg-type]
    assert not messages_of(planned.sigterm(2), messages.SaveCheckpoint)
    (share,) = messages_of(planned.finish(form.call, reply={"backend": "gloo"}), messages.ShareState)
    ended = planned.finish(share.call, reply={"restored": {}, "missing": {}, "kept": {}, "alike": []})
    assert messages_of(ended, messages.MeshHealed)
    assert messages_of(ended, messages.SaveCheckpoint)


def test_nothing_is_healed_while_ranks_are_about_to_end(planned: Preempted) -> None:
    planned.sigterm(2)
    (refused,) = messages_of(planned.say(messages.HealMesh(call="heal")), messages.Refused)  # type: ignore[arg-type]
    assert refused.error == "HealError"
    assert refused.text.startswith("rank 2 received SIGTERM, and what follows is under way")


def test_a_cell_that_a_client_stops_meanwhile_is_cut_too(busy: Preempted) -> None:
    busy.sigterm()
    (back,) = messages_of(busy.end_badly("c1", "interrupted"), messages.RollBack)
    (shutdown,) = steps_of(busy.finish(back.call, reply={"names": [], "step": 0}), s.Shutdown)
    assert "no checkpoint was written: cell 1 was stopped" in shutdown.reason


# ---- the mesh goes on with fewer ranks


def test_the_mesh_goes_on_without_the_highest_ranks_where_that_was_asked_for(world: Preempted) -> None:
    world.plan("x", resize=True)
    begun = world.sigterm(3)
    assert "rank 3 received SIGTERM: the mesh will go on with rank=3" in said(begun)
    (find,) = messages_of(begun, messages.FindSharded)
    (leave,) = messages_of(world.finish(find.call), messages.LeaveMesh)
    world.kill(3)
    (form,) = messages_of(world.finish(leave.call, ranks=(3,), status="lost"), messages.FormGroups)
    assert form.axes == {"rank": 3}
    done = world.finish(form.call, ranks=(0, 1, 2))
    assert "the mesh goes on without rank 3, with rank=3: run the cells that were ended again" in said(done)
    assert not messages_of(done, messages.SaveCheckpoint)
    assert messages_of(world.run("c1", ranks=(0, 1, 2)), messages.RunCell)


@pytest.mark.parametrize("leaving", [(0,), (1,), (1, 3)])
def test_ranks_in_the_middle_cannot_leave_and_names_are_saved_instead(
    world: Preempted, leaving: tuple[int, ...]
) -> None:
    world.plan("x", resize=True)
    begun = world.sigterm(*leaving)
    assert "x will be saved in /run1" in said(begun)
    assert "x is saved in" in said(world.save_on_all(begun))


def test_a_resize_that_cannot_be_done_in_time_is_left_and_names_are_saved(world: Preempted) -> None:
    world.plan("x", resize=True)
    begun = world.sigterm(3)
    (find,) = messages_of(begun, messages.FindSharded)
    part = OutcomeGroup(RANKS, Outcome(status="ok", reply={"sharded": ["x"], "needs_leaving": True}))
    (back,) = messages_of(
        world.host(messages.CallFinished(call=find.call, outcomes=(part,), seconds=0.1)), messages.RollBack
    )
    giving = world.host(
        messages.CallFinished(
            call=back.call, outcomes=(OutcomeGroup(RANKS, Outcome(status="ok", reply={"names": []})),), seconds=0.1
        )
    )
    (give,) = messages_of(giving, messages.MoveShards)
    assert (f"abandon {give.call}", 25.0 - 0.0) in [(e.name, round(e.delay_s)) for e in steps_of(giving, s.SetTimer)]
    abandoned = world.finish(give.call, status="skipped")
    (form,) = messages_of(abandoned, messages.FormGroups)
    assert messages_of(world.finish(form.call), messages.SaveCheckpoint)
    assert len(world.state.info().ranks) == 4
