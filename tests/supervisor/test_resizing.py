"""The steps by which a mesh gets more ranks or fewer, as the supervisor decides them: events in, effects out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import Outcome, OutcomeGroup
from tests.supervisor.test_state import World, messages_of

NOTHING = {"restored": {}, "missing": {}, "kept": {}, "alike": []}


class Resized(World):
    """A mesh of four ranks that is resized, step by step."""

    def resize(self, size: int = 0, call: str = "resize", **axes: int) -> list[s.Effect]:
        return self.say(messages.ResizeMesh(call=call, axes=axes or {"rank": size}))  # type: ignore[arg-type]

    def reply(self, command: Any, **reply: Any) -> list[s.Effect]:
        """All ranks of a command end it well, with this reply."""
        part = OutcomeGroup(command.ranks, Outcome(status="ok", reply=reply))
        return self.host(messages.CallFinished(call=command.call, outcomes=(part,), seconds=0.1))

    def look(self, begun: Iterable[s.Effect], **reply: Any) -> list[s.Effect]:
        (find,) = messages_of(begun, messages.FindSharded)
        return self.reply(find, **reply)

    def look_and_roll_back(self, begun: Iterable[s.Effect], **reply: Any) -> list[s.Effect]:
        (back,) = messages_of(self.look(begun, **reply), messages.RollBack)
        assert (back.about_calls, back.names) == ((), tuple(reply["sharded"]))
        return self.reply(back, names=[], step=0)

    def leave(self, effects: Iterable[s.Effect]) -> list[s.Effect]:
        (leave,) = messages_of(effects, messages.LeaveMesh)
        for rank in leave.ranks:
            self.kill(rank)
        return self.finish(leave.call, ranks=leave.ranks, status="lost")

    def form(self, effects: Iterable[s.Effect]) -> list[s.Effect]:
        (form,) = messages_of(effects, messages.FormGroups)
        return self.reply(form, backend="gloo")

    def grow(self) -> list[s.Effect]:
        """Resize to six ranks, up to the sharing of state."""
        return self.form(self.look(self.resize(6)))

    def status(self) -> messages.MeshInfo:
        return self.state.info()


def resized(effects: Iterable[s.Effect]) -> messages.MeshHealed:
    (found,) = messages_of(effects, messages.MeshHealed)
    return found


def refusal(effects: Iterable[s.Effect], error: str = "ResizeError") -> str:
    (refused,) = messages_of(effects, messages.Refused)
    assert refused.error == error
    return refused.text


@pytest.fixture
def mesh() -> Resized:
    return Resized()


def test_more_ranks_are_started_form_groups_run_cells_and_are_given_state(mesh: Resized) -> None:
    mesh.say(messages.RunCell(call="c0", ranks=(0, 1, 2, 3), source="import a", setup=True, label="cell 0"))  # type: ignore[arg-type]
    mesh.finish("c0")
    mesh.say(messages.RunCell(call="c1", ranks=(0, 1), source="import b", label="cell 1"))  # type: ignore[arg-type]
    mesh.finish("c1", ranks=(0, 1))
    begun = mesh.resize(6)
    (find,) = messages_of(begun, messages.FindSharded)
    assert find.ranks == (0, 1, 2, 3)
    joining = mesh.look(begun)
    (start,) = messages_of(joining, messages.StartRanks)
    assert (start.ranks, start.host_ranks, start.world_size) == ((4, 5), (0, 1, 2, 3, 4, 5), 6)
    assert start.spec.axes == {"rank": 6}
    (form,) = messages_of(joining, messages.FormGroups)
    assert (form.ranks, form.axes, form.num_resizes) == ((0, 1, 2, 3, 4, 5), {"rank": 6}, 1)
    (replay,) = messages_of(mesh.form(joining), messages.ReplayCells)
    assert (replay.ranks, [cell.source for cell in replay.cells]) == ((4, 5), ["import a"])
    (share,) = messages_of(mesh.reply(replay, ran=["cell 0"], defined=0), messages.ShareState)
    assert (share.ranks, share.new_ranks) == ((0, 1, 2, 3, 4, 5), (4, 5))
    done = resized(mesh.reply(share, **NOTHING))
    assert (done.call, done.ranks, done.ran) == ("resize", (4, 5), ("cell 0",))
    assert done.resized == messages.ResizeChanges(before={"rank": 4})
    assert [(rank.state, rank.incarnation) for rank in done.info.ranks] == [("idle", 0)] * 6
    assert done.info.spec is not None
    assert done.info.spec.axes == {"rank": 6}


def test_ranks_above_the_new_number_end_and_are_not_reported_as_lost(mesh: Resized) -> None:
    asked = mesh.look(mesh.resize(2), stale=["share"])
    (leave,) = messages_of(asked, messages.LeaveMesh)
    assert leave.ranks == (2, 3)
    assert mesh.kill(2) == []  # it was asked to end
    formed = mesh.form(mesh.leave(asked))
    assert not messages_of(formed, messages.ShareState)
    done = resized(formed)
    assert (done.ranks, done.resized) == ((), messages.ResizeChanges({"rank": 4}, (2, 3), ("share",)))
    assert [rank.rank for rank in done.info.ranks] == [0, 1]
    assert mesh.kill(3) == []


def test_a_rank_that_has_left_does_not_come_back_with_a_report_that_is_older(mesh: Resized) -> None:
    infos = tuple(messages.RankInfo(rank=rank, state="idle", host="box") for rank in range(4))
    report = messages.HostHeartbeat(host=0, ranks=infos, metrics=(messages.RankMetrics(rank=3),))
    mesh.host(report)
    resized(mesh.form(mesh.leave(mesh.look(mesh.resize(3)))))
    mesh.host(report)
    (shown,) = messages_of(
        mesh.say(messages.Subscribe(call="look", max_updates_per_s=0.0, history_s=1.0)),  # type: ignore[arg-type]
        messages.MeshUpdate,
    )
    assert [rank.rank for rank in shown.ranks] == [0, 1, 2]


def test_a_number_that_comes_again_has_another_incarnation(mesh: Resized) -> None:
    mesh.form(mesh.leave(mesh.look(mesh.resize(3))))
    again = mesh.look(mesh.resize(4, "again"))
    (start,) = messages_of(again, messages.StartRanks)
    assert start.ranks == (3,)
    assert [rank.incarnation for rank in mesh.status().ranks] == [0, 0, 0, 1]


def test_axes_may_have_other_names(mesh: Resized) -> None:
    (form,) = messages_of(mesh.look(mesh.resize(dp=2, tp=2)), messages.FormGroups)
    assert (form.ranks, form.axes) == ((0, 1, 2, 3), {"dp": 2, "tp": 2})
    done = resized(mesh.reply(form, backend="gloo"))
    assert (done.ranks, done.resized) == ((), messages.ResizeChanges(before={"rank": 4}))


def test_new_ranks_go_to_the_hosts_with_the_fewest() -> None:
    mesh = Resized(num_hosts=2)
    mesh.finish("form-1", ranks=(2, 3), host=1)
    find = messages_of(mesh.resize(6), messages.FindSharded)[0]
    mesh.finish(find.call, ranks=(0, 1))
    effects = mesh.finish(find.call, ranks=(2, 3), host=1)
    starts = {step.hosts: step.message for step in effects if isinstance(step, s.SendToHosts)}
    assert {hosts: one.host_ranks for hosts, one in starts.items() if isinstance(one, messages.StartRanks)} == {
        (0,): (0, 1, 4),
        (1,): (2, 3, 5),
    }


# ---- when it cannot be done


def test_a_running_cell_is_named_and_nothing_is_done(mesh: Resized) -> None:
    mesh.run("c1", ranks=(0, 2))
    text = refusal(mesh.resize(2))
    assert text == "cell 1 runs on ranks 0,2; wait for it, or press Stop (%mesh interrupt), then resize"


def test_what_cannot_be_cut_anew_is_named_with_the_reason_and_the_way_over_a_checkpoint(mesh: Resized) -> None:
    text = refusal(mesh.look(mesh.resize(2), sharded=["model", "opt"], problems={"model": "it is quantized"}))
    assert text.startswith("the mesh was not resized: model: it is quantized. ")
    assert "%mesh checkpoint PATH NAMES --wait" in text
    assert "%mesh restart --axes rank=2" in text
    assert len(mesh.status().ranks) == 4
    assert messages_of(mesh.run("c1"), messages.RunCell)


def moves(effects: Iterable[s.Effect], step: str) -> messages.MoveShards:
    (move,) = messages_of(effects, messages.MoveShards)
    assert move.step == step
    return move


def test_ranks_that_leave_give_their_parts_first_and_all_have_theirs_before_any_tensor_has(mesh: Resized) -> None:
    give = moves(mesh.look_and_roll_back(mesh.resize(3), sharded=["model"], needs_leaving=True), "give")
    assert (give.ranks, give.axes, give.world_size) == ((0, 1, 2, 3), {"rank": 3}, 3)
    move = moves(mesh.form(mesh.leave(mesh.reply(give, lost=[], num_bytes=5))), "move")
    assert (move.ranks, move.new_ranks) == ((0, 1, 2), ())
    commit = moves(mesh.reply(move, lost=[], num_bytes=2), "commit")
    done = resized(mesh.reply(commit))
    assert done.resized == messages.ResizeChanges({"rank": 4}, (3,), (), ("model",), 5 + 2)
    assert not messages_of(mesh.form(mesh.leave(mesh.look(mesh.resize(2, "again")))), messages.MoveShards)


def test_ranks_that_join_are_given_what_is_around_the_parts_and_then_the_parts(mesh: Resized) -> None:
    mesh.say(messages.RunCell(call="c0", ranks=(0, 1, 2, 3), source="model = 1", setup=True))  # type: ignore[arg-type]
    mesh.finish("c0")
    begun = mesh.resize(6)
    (find,) = messages_of(begun, messages.FindSharded)
    assert find.setup_names == ("model",)
    (replay,) = messages_of(
        mesh.form(mesh.look_and_roll_back(begun, sharded=["model"], needs_leaving=True)), messages.ReplayCells
    )
    (share,) = messages_of(mesh.reply(replay, ran=["cell 0"], defined=0), messages.ShareState)
    assert not share.with_shards
    move = moves(mesh.reply(share, **NOTHING), "move")
    assert (move.ranks, move.new_ranks) == ((0, 1, 2, 3, 4, 5), (4, 5))
    commit = moves(mesh.reply(move, lost=["model"], num_bytes=2), "commit")
    done = resized(mesh.reply(commit))
    assert done.missing[0] == {"model": "parts of it were lost with a rank, and are NaN"}


def test_parts_that_cannot_be_given_leave_the_mesh_as_it_was(mesh: Resized) -> None:
    give = moves(mesh.look_and_roll_back(mesh.resize(3), sharded=["model"], needs_leaving=True), "give")
    assert "rank 3: lost; nothing has changed" in refusal(mesh.finish(give.call, ranks=(3,), status="lost"))
    assert len(mesh.status().ranks) == 4


def test_ranks_cannot_give_their_parts_once_another_was_lost(mesh: Resized) -> None:
    mesh.kill(1)
    (find,) = messages_of(mesh.resize(3), messages.FindSharded)
    text = refusal(mesh.reply(find, sharded=["model"], needs_leaving=True))
    assert "because rank 1 was lost and the process groups with it. %mesh heal puts a new process in its" in text


def test_tensors_that_are_not_the_same_on_all_ranks_are_not_cut_anew(mesh: Resized) -> None:
    (find,) = messages_of(mesh.resize(3), messages.FindSharded)
    parts = tuple(
        OutcomeGroup(ranks, Outcome(status="ok", reply={"sharded": ["x"], "catalog": catalog}))
        for ranks, catalog in (((0, 1), "a"), ((2, 3), "b"))
    )
    finished = messages.CallFinished(call=find.call, outcomes=parts, seconds=0.1)
    assert "the DTensors of x are not the same on all ranks" in refusal(mesh.host(finished))


def test_heal_completes_a_resize_whose_parts_did_not_come(mesh: Resized) -> None:
    give = moves(mesh.look_and_roll_back(mesh.resize(3), sharded=["model"], needs_leaving=True), "give")
    move = moves(mesh.form(mesh.leave(mesh.reply(give, lost=[], num_bytes=5))), "move")
    failed = mesh.finish(move.call, ranks=(0, 1, 2), status="error")
    assert "the mesh has 3 ranks now, but the resize was not completed" in refusal(failed)
    mesh.form(failed)
    again = moves(mesh.form(mesh.say(messages.HealMesh(call="heal"))), "move")  # type: ignore[arg-type]
    commit = moves(mesh.reply(again, lost=[], num_bytes=0), "commit")
    (healed,) = messages_of(mesh.reply(commit), messages.MeshHealed)
    assert (healed.ranks, healed.resized) == ((), None)


def test_a_rank_that_is_lost_while_tensors_get_their_parts_does_not_cost_those_of_new_ranks(mesh: Resized) -> None:
    formed = mesh.form(mesh.look_and_roll_back(mesh.resize(5), sharded=["model"]))
    (share,) = messages_of(formed, messages.ShareState)
    move = moves(mesh.reply(share, **NOTHING), "move")
    commit = moves(mesh.reply(move, lost=[], num_bytes=5), "commit")
    mesh.kill(1)
    parts = (
        OutcomeGroup((0, 2, 3, 4), Outcome(status="ok")),
        OutcomeGroup((1,), Outcome(status="lost")),
    )
    ended = mesh.host(messages.CallFinished(call=commit.call, outcomes=parts, seconds=0.1))
    assert "the mesh has 5 ranks now" in refusal(ended)
    assert not messages_of(ended, messages.KillRanks)
    (start,) = messages_of(mesh.say(messages.HealMesh(call="heal")), messages.StartRanks)  # type: ignore[arg-type]
    assert start.ranks == (1,)


def test_operations_on_tensors_wait_while_a_resize_may_be_refused_and_are_refused_when_it_is_not(mesh: Resized) -> None:
    ops = messages.RunOps(call="ops", ranks=(0, 1, 2, 3), engine="e", first_op=1, ops=b"")  # type: ignore[arg-type]
    begun = mesh.resize(6)
    assert mesh.say(ops) == []
    (find,) = messages_of(begun, messages.FindSharded)
    (sent,) = messages_of(mesh.reply(find, sharded=["x"], problems={"x": "no"}), messages.RunOps)
    assert sent.call == "ops"
    mesh.finish("ops")
    begun = mesh.resize(6, "again")
    mesh.say(ops)
    (refused, *_) = messages_of(mesh.look(begun), messages.Refused)
    assert (refused.call, refused.error) == ("ops", "ResizeError")
    assert refused.text == "the mesh was resized, and has other ranks now"


@pytest.mark.parametrize("axes", [{}, {"rank": 0}, {"dp": 2, "tp": -1}])
def test_a_mesh_without_ranks_is_refused(mesh: Resized, axes: dict[str, int]) -> None:
    assert "a mesh has at least one rank" in refusal(mesh.say(messages.ResizeMesh(call="r", axes=axes)))  # type: ignore[arg-type]


def test_the_size_that_it_has_is_refused_and_heal_is_named_where_ranks_are_lost(mesh: Resized) -> None:
    assert refusal(mesh.resize(4)) == "the mesh has rank=4 already"
    mesh.kill(1)
    assert refusal(mesh.resize(4)) == (
        "the mesh has rank=4 already. Rank 1: %mesh heal puts a new process in its place"
    )


def test_a_second_one_and_a_heal_at_the_same_time_are_refused(mesh: Resized) -> None:
    begun = mesh.resize(6)
    assert refusal(mesh.resize(2, "again")) == "the mesh is being resized already; wait for it"
    heal = messages.HealMesh(call="heal")  # type: ignore[arg-type]
    assert refusal(mesh.say(heal), "HealError") == "the mesh is being resized; wait for it"
    mesh.look(begun)
    assert refusal(mesh.resize(2, "again")) == "the mesh is being resized already; wait for it"
    assert refusal(mesh.say(heal), "HealError") == "the mesh is being resized; wait for it"


def test_a_resize_while_ranks_are_replaced_is_refused(mesh: Resized) -> None:
    mesh.kill(1)
    mesh.say(messages.HealMesh(call="heal"))  # type: ignore[arg-type]
    assert refusal(mesh.resize(2)) == "the mesh is being healed already; wait for it"


def test_a_checkpoint_that_is_being_saved_is_waited_for_by_the_user(mesh: Resized) -> None:
    save = messages.SaveCheckpoint(call="save", ranks=(0, 1, 2, 3), names=("x",), path="/tmp/x", step=None)  # type: ignore[arg-type]
    mesh.say(save)
    mesh.finish("save", reply={"num_bytes": 1, "seconds": 0.1})
    assert "a checkpoint is being saved" in refusal(mesh.resize(2))


def test_cells_that_are_sent_meanwhile_are_refused_because_they_name_other_ranks(mesh: Resized) -> None:
    begun = mesh.resize(6)
    assert "being resized" in refusal(mesh.run("c1"))
    formed = mesh.form(mesh.look(begun))
    assert "being resized" in refusal(mesh.run("c2"))
    (share,) = messages_of(formed, messages.ShareState)
    mesh.reply(share, **NOTHING)
    assert messages_of(mesh.run("c3"), messages.RunCell)


def test_a_cell_for_all_ranks_of_before_is_refused_and_one_for_ranks_by_number_is_not(mesh: Resized) -> None:
    before, all_ranks = mesh.status(), (0, 1, 2, 3)
    (share,) = messages_of(mesh.grow(), messages.ShareState)
    mesh.reply(share, **NOTHING)

    def send(call: str, chosen_at: int | None) -> list[s.Effect]:
        cell = messages.RunCell(call=call, ranks=all_ranks, source="1", chosen_at=chosen_at)  # type: ignore[arg-type]
        return mesh.say(cell)

    text = refusal(send("c1", before.num_rank_changes))
    assert text == (
        "the mesh has 6 ranks now, and ranks 4-5 have new processes, of which this process had not heard when it sent "
        "this; nothing was run, run it again"
    )
    assert messages_of(send("c2", None), messages.RunCell)
    assert messages_of(send("c3", mesh.status().num_rank_changes), messages.RunCell)


def test_a_stop_before_anything_has_changed_ends_it_and_has_held_collectives_formed_anew(mesh: Resized) -> None:
    (find,) = messages_of(mesh.resize(2), messages.FindSharded)
    stopped = mesh.finish(find.call, status="interrupted")
    assert "the mesh was not resized: ranks 0-3: interrupted; nothing has changed" in refusal(stopped)
    assert messages_of(stopped, messages.FormGroups)
    assert len(mesh.status().ranks) == 4


# ---- ranks that are lost


def test_a_lost_rank_above_the_new_number_is_forgotten(mesh: Resized) -> None:
    mesh.kill(3)
    asked = mesh.look(mesh.resize(3))
    assert messages_of(asked, messages.LeaveMesh)[0].ranks == (3,)
    changed = mesh.finish("leave-1", ranks=(3,), status="lost")
    assert not messages_of(changed, messages.StartRanks)
    assert resized(mesh.form(changed)).info.groups == "ready"


def test_a_lost_rank_that_stays_is_replaced_and_the_highest_leaves(mesh: Resized) -> None:
    mesh.kill(1)
    changed = mesh.leave(mesh.look(mesh.resize(3)))
    assert messages_of(changed, messages.StartRanks)[0].ranks == (1,)
    (share,) = messages_of(mesh.form(changed), messages.ShareState)
    assert (share.ranks, share.new_ranks) == ((0, 1, 2), (1,))


def test_a_mesh_that_has_lost_all_ranks_can_be_resized(mesh: Resized) -> None:
    for rank in range(4):
        mesh.kill(rank)
    changed = mesh.finish(messages_of(mesh.resize(2), messages.LeaveMesh)[0].call, ranks=(2, 3), status="lost")
    assert messages_of(changed, messages.StartRanks)[0].ranks == (0, 1)


def test_ranks_of_a_lost_host_can_leave_if_they_are_the_highest() -> None:
    mesh = Resized(num_hosts=2)
    mesh.finish("form-1", ranks=(2, 3), host=1)
    mesh.state.host_exited(1, "was killed", mesh.now)
    assert "ran on host 1, which was killed: only the highest ranks can leave" in refusal(mesh.resize(3))
    changed = mesh.look(mesh.resize(2))
    assert not messages_of(changed, messages.LeaveMesh)  # nobody is there who could end them
    assert [rank.rank for rank in resized(mesh.form(changed)).info.ranks] == [0, 1]


def test_it_waits_for_the_end_of_the_call_in_which_a_rank_was_lost(mesh: Resized) -> None:
    mesh.run("c1")
    mesh.kill(3)
    assert mesh.resize(3) == []
    assert "being resized" in refusal(mesh.run("c2"))
    assert messages_of(mesh.finish("c1", status="interrupted"), messages.FindSharded)


def test_a_rank_that_is_lost_before_anything_has_changed_ends_it(mesh: Resized) -> None:
    begun = mesh.resize(6)
    mesh.kill(2)
    (find,) = messages_of(begun, messages.FindSharded)
    text = refusal(mesh.finish(find.call, status="lost"))
    assert text == "the mesh was not resized: ranks 0-3: lost; nothing has changed, try again"
    assert len(mesh.status().ranks) == 4


def test_a_rank_that_is_lost_while_others_leave_is_replaced_at_once(mesh: Resized) -> None:
    asked = mesh.look(mesh.resize(3))
    mesh.kill(0)
    assert messages_of(mesh.leave(asked), messages.StartRanks)[0].ranks == (0,)


@pytest.mark.parametrize("victim", [0, 5], ids=["an old rank", "a new rank"])
@pytest.mark.parametrize("step", ["form", "replay", "share"])
def test_after_a_loss_in_any_later_step_a_heal_completes_the_resize(mesh: Resized, step: str, victim: int) -> None:
    mesh.say(messages.RunCell(call="c0", ranks=(0, 1, 2, 3), source="import a", label="cell 0"))  # type: ignore[arg-type]
    mesh.finish("c0")
    effects = mesh.look(mesh.resize(6))
    (command,) = messages_of(effects, messages.FormGroups)
    if step != "form":
        (command,) = messages_of(mesh.form(effects), messages.ReplayCells)
    if step == "share":
        (command,) = messages_of(mesh.reply(command), messages.ShareState)
    mesh.kill(victim)
    failed = mesh.finish(command.call, ranks=command.ranks, status="lost")
    text = refusal(failed)
    assert text.startswith("the mesh has 6 ranks now, but the resize was not completed: ")
    assert "%mesh heal tries again" in text
    (kill,) = messages_of(failed, messages.KillRanks)  # they lack what the others hold
    assert kill.ranks == tuple(rank for rank in (4, 5) if rank != victim)
    for rank in kill.ranks:
        mesh.kill(rank)
    healing = mesh.say(messages.HealMesh(call="heal"))  # type: ignore[arg-type]
    assert messages_of(healing, messages.StartRanks)[0].ranks == tuple(sorted({victim, 4, 5}))
    (form,) = messages_of(healing, messages.FormGroups)
    assert (form.axes, form.num_resizes) == ({"rank": 6}, 1)
