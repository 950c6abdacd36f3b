"""The steps by which lost ranks are replaced, as the supervisor decides them: events in, effects out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import Outcome, OutcomeGroup
from tests.supervisor.test_state import World, messages_of


class LostRank(World):
    """A mesh of four ranks on some hosts, whose rank 1 has been lost."""

    def __init__(self, *, num_hosts: int = 1, cells: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(num_hosts=num_hosts)
        if num_hosts == 2:
            self.finish("form-1", ranks=(2, 3), host=1)
        for number, options in enumerate(cells):
            call = f"before-{number}"
            self.say(messages.RunCell(call=call, ranks=(0, 1, 2, 3), label=f"cell {number}", **options))  # type: ignore[arg-type]
            self.finish(call)
        self.kill(1)

    def heal(self, call: str = "heal", **options: Any) -> list[s.Effect]:
        return self.say(messages.HealMesh(call=call, **options))  # type: ignore[arg-type]

    def healed(self, steps: Iterable[s.Effect]) -> messages.MeshHealed:
        (found,) = messages_of(steps, messages.MeshHealed)
        return found

    def reply_to(self, command: Any, replies: dict[int, Any]) -> list[s.Effect]:
        parts = tuple(OutcomeGroup((rank,), Outcome(status="ok", reply=reply)) for rank, reply in replies.items())
        return self.host(messages.CallFinished(call=command.call, outcomes=parts, seconds=0.1))


NOTHING = {"restored": {}, "missing": {}, "kept": {}, "alike": []}


def refusal(steps: Iterable[s.Effect]) -> str:
    (refused,) = messages_of(steps, messages.Refused)
    assert refused.error == "HealError"
    return refused.text


@pytest.fixture
def mesh() -> LostRank:
    return LostRank()


def test_the_steps_are_start_form_replay_share() -> None:
    mesh = LostRank(cells=[{"source": "import a", "setup": True}, {"source": "is_main = rank == 0"}])
    begun = mesh.heal()
    (start,) = messages_of(begun, messages.StartRanks)
    (form,) = messages_of(begun, messages.FormGroups)
    assert (start.ranks, start.host_ranks, start.world_size) == ((1,), (0, 1, 2, 3), 4)
    assert (form.ranks, form.generation) == ((0, 1, 2, 3), 2)
    (replay,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ReplayCells)
    assert replay.ranks == (1,)
    assert [(cell.source, cell.setup) for cell in replay.cells] == [("import a", True), ("is_main = rank == 0", False)]
    reply = {"ran": ["cell 0"], "defined": 1, "failed": []}
    (share,) = messages_of(mesh.reply_to(replay, {1: reply}), messages.ShareState)
    assert (share.ranks, share.new_ranks, share.rank_dependent) == ((0, 1, 2, 3), (1,), ("is_main",))
    state = {"restored": {"x": [0, "equal on all others"]}, "missing": {"y": "it differs"}, "kept": {}, "alike": []}
    healed = mesh.healed(mesh.reply_to(share, {0: NOTHING, 1: state, 2: NOTHING, 3: NOTHING}))
    assert (healed.ranks, healed.ran, healed.num_defined) == ((1,), ("cell 0",), 1)
    assert (healed.restored, healed.missing) == ({1: {"x": (0, "equal on all others")}}, {1: {"y": "it differs"}})
    assert [rank.state for rank in healed.info.ranks] == ["idle"] * 4
    assert [rank.incarnation for rank in healed.info.ranks] == [0, 1, 0, 0]


def test_each_host_starts_its_own_ranks() -> None:
    mesh = LostRank(num_hosts=2)
    mesh.kill(3)
    starts = [step for step in mesh.heal() if isinstance(step, s.SendToHosts)]
    found = {
        step.hosts: (step.message.ranks, step.message.incarnations)
        for step in starts
        if isinstance(step.message, messages.StartRanks)
    }
    assert found == {(0,): ((1,), (1,)), (1,): ((3,), (1,))}


def test_a_new_process_is_not_dead_because_its_host_had_not_heard_of_the_heal_when_it_reported() -> None:
    mesh = LostRank(num_hosts=2)
    mesh.kill(3)
    mesh.heal()
    former = messages.RankInfo(rank=3, state="dead", host="box", pid=7, exit="was killed by SIGKILL")
    mesh.host(messages.HostHeartbeat(host=1, ranks=(former,)), 1)
    assert (mesh.state.info().ranks[3].state, mesh.state.info().ranks[3].pid) == ("starting", None)
    mesh.host(messages.HostHeartbeat(host=1, ranks=(messages.RankInfo(3, "idle", "box", pid=9, incarnation=1),)), 1)
    mesh.finish("form-2", ranks=(0, 1), reply={"backend": "gloo"})
    formed = mesh.finish("form-2", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    (share,) = messages_of(formed, messages.ShareState)
    mesh.finish(share.call, ranks=(0, 1), reply=NOTHING)
    new = mesh.healed(mesh.finish(share.call, ranks=(2, 3), host=1, reply=NOTHING)).info.ranks[3]
    assert (new.state, new.pid, new.incarnation) == ("idle", 9, 1)


def heal_without_host(mesh: World) -> list[s.Effect]:
    mesh.finish("form-1", ranks=(2, 3), host=1)
    mesh.state.host_exited(1, "was killed", mesh.now)
    return mesh.say(messages.HealMesh(call="heal"))  # type: ignore[arg-type]


def test_a_host_that_is_gone_is_started_again_before_its_ranks() -> None:
    mesh = World(num_hosts=2)
    (start, _) = heal_without_host(mesh)
    assert isinstance(start, s.StartHosts)
    assert start.hosts == (1,)
    steps = mesh.host(messages.HostReady(host=1, hostname="box", pid=7), 1)
    assert [started.ranks for started in messages_of(steps, messages.StartRanks)] == [(2, 3)]


def test_a_host_that_cannot_be_started_again_is_named_with_why() -> None:
    mesh = World(num_hosts=2)
    heal_without_host(mesh)
    text = refusal(mesh.host(messages.HostFailed(host=1, reason="n2 does not answer"), 1))
    assert text.startswith("ranks 2-3 ran on host 1, where no host could be started again: n2 does not answer")
    assert text.endswith("%mesh heal tries again, when it is back; %mesh resize goes on with ranks 0-1")
    assert mesh.state.info().ranks[2].state == "dead"


def test_a_host_that_does_not_come_in_time_ends_the_heal() -> None:
    mesh = World(num_hosts=2)
    (_, timer) = heal_without_host(mesh)
    assert isinstance(timer, s.SetTimer)
    assert "nothing was heard of it within 90 s" in refusal(mesh.state.timer_fired(timer.name, mesh.now))


def keep_spares(mesh: World, num: int) -> list[s.Effect]:
    return mesh.say(messages.KeepSpares(call="spares", num=num))  # type: ignore[arg-type]


def test_spares_that_became_ranks_are_replaced_when_the_heal_is_over_and_not_before() -> None:
    mesh = LostRank(num_hosts=2)
    prepared = messages_of(keep_spares(mesh, 1), messages.PrepareSpares)
    assert [(each.num, each.host_ranks) for each in prepared] == [(1, (0, 1)), (1, (2, 3))]
    begun = mesh.heal()
    (form,) = messages_of(begun, messages.FormGroups)
    mesh.finish(form.call, ranks=(0, 1), reply={"backend": "gloo"})
    formed = mesh.finish(form.call, ranks=(2, 3), host=1, reply={"backend": "gloo"})
    assert not messages_of([*begun, *formed], messages.PrepareSpares)
    (share,) = messages_of(formed, messages.ShareState)
    mesh.reply_to(share, dict.fromkeys((0, 1), NOTHING))
    parts = tuple(OutcomeGroup((rank,), Outcome(status="ok", reply=NOTHING)) for rank in (2, 3))
    ended = mesh.host(messages.CallFinished(call=share.call, outcomes=parts, seconds=0.1), 1)
    assert messages_of(ended, messages.MeshHealed)
    assert [each.num for each in messages_of(ended, messages.PrepareSpares)] == [1, 1]


def test_spares_of_a_lost_host_are_neither_asked_for_nor_shown() -> None:
    mesh = LostRank(num_hosts=2)
    for host in (0, 1):
        spares = (messages.SpareInfo(host, "box", 7 + host, "ready"),)
        mesh.host(messages.HostHeartbeat(host=host, ranks=(), spares=spares), host)
    assert [spare.pid for spare in mesh.state.info().spares] == [7, 8]
    mesh.state.host_exited(1, "was killed by SIGKILL", mesh.now)
    assert [spare.pid for spare in mesh.state.info().spares] == [7]
    assert [each.host_ranks for each in messages_of(keep_spares(mesh, 1), messages.PrepareSpares)] == [(0, 1)]


def test_more_spares_than_ranks_of_a_host_are_refused() -> None:
    (refused,) = messages_of(keep_spares(LostRank(num_hosts=2), 3), messages.Refused)
    assert (refused.error, refused.text) == (
        "MeshShapeError",
        "3 spares for 2 ranks of a machine: more than 2 can never be needed; %mesh spare 2 keeps one for each",
    )


def test_a_whole_mesh_has_nothing_to_heal() -> None:
    mesh = World()
    (healed,) = messages_of(mesh.say(messages.HealMesh(call="heal")), messages.MeshHealed)  # type: ignore[arg-type]
    assert healed.ranks == ()


def test_cells_that_are_sent_meanwhile_wait_until_the_end(mesh: LostRank) -> None:
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    assert messages_of(mesh.run("c1"), messages.RunCell) == []
    (share,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ShareState)
    ended = mesh.reply_to(share, dict.fromkeys(range(4), NOTHING))
    assert [cell.call for cell in messages_of(ended, messages.RunCell)] == ["c1"]


def test_a_cell_for_all_ranks_whose_client_had_not_heard_of_the_heal_is_refused(mesh: LostRank) -> None:
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    cell = messages.RunCell(call="c1", ranks=(0, 2, 3), source="1", chosen_at=0)  # type: ignore[arg-type]
    assert refusal(mesh.say(cell)).startswith("rank 1 has a new process, of which this process had not heard when it")
    mesh.finish(form.call, reply={"backend": "gloo"})


def test_a_cell_for_all_ranks_that_still_waits_when_the_heal_begins_is_refused_if_it_lacks_the_new_rank() -> None:
    mesh = World()
    mesh.run("c1")
    failed = mesh.finish("c1", status="error")
    (compare,) = messages_of(failed, messages.QueryPositions)  # other calls wait for its end
    mesh.kill(1)
    late = messages.RunCell(call="c2", ranks=(0, 2, 3), source="1", chosen_at=0)  # type: ignore[arg-type]
    named = messages.RunCell(call="c3", ranks=(0, 2), source="1")  # type: ignore[arg-type]
    assert [*mesh.say(late), *mesh.say(named)] == []
    begun = mesh.say(messages.HealMesh(call="heal", replay=False))  # type: ignore[arg-type]
    assert refusal(begun) == "rank 1 has a new process, which this was sent without; nothing was run, run it again"
    assert messages_of(mesh.finish(compare.call), messages.RunCell) == []
    (share,) = messages_of(mesh.finish("form-2", reply={"backend": "gloo"}), messages.ShareState)
    ended = mesh.finish(share.call, reply=NOTHING)
    assert [cell.call for cell in messages_of(ended, messages.RunCell)] == ["c3"]
    (reply,) = messages_of(mesh.say(messages.QueryHistory(call="q")), messages.CommandReply)  # type: ignore[arg-type]
    assert reply.history is not None
    assert [entry.status for entry in reply.history] == ["error", "interrupted", "running"]


def test_a_second_attempt_at_the_same_time_is_refused(mesh: LostRank) -> None:
    mesh.heal()
    assert refusal(mesh.heal("again")) == "the mesh is being healed already; wait for it"


def test_a_rank_that_is_lost_while_groups_are_formed_ends_the_attempt_and_another_may_follow(mesh: LostRank) -> None:
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    mesh.kill(2)
    failed = mesh.finish(form.call, status="lost")
    assert "could not be healed: the process groups could not be formed" in refusal(failed)
    (ended,) = messages_of(failed, messages.KillRanks)
    assert ended.ranks == (1,)  # it lacks what the others hold
    assert messages_of(mesh.heal("again"), messages.StartRanks) == []
    (start,) = messages_of(mesh.kill(1), messages.StartRanks)
    assert start.ranks == (1, 2)


def test_a_rank_that_takes_no_part_in_forming_groups_does_not_hold_up_the_others_for_ever(mesh: LostRank) -> None:
    begun = mesh.heal()
    (form,) = messages_of(begun, messages.FormGroups)
    (timer,) = [step for step in begun if isinstance(step, s.SetTimer)]
    (end,) = messages_of(mesh.state.timer_fired(timer.name, mesh.now), messages.EndCall)
    assert end.call == form.call
    text = refusal(mesh.finish(form.call, ranks=(2,), status="skipped"))
    assert "rank 2: took no part in time; %mesh why shows what it does" in text


@pytest.mark.parametrize("victim", [1, 3], ids=["the new rank", "another rank"])
def test_a_rank_that_is_lost_while_cells_are_replayed_ends_the_attempt(victim: int) -> None:
    mesh = LostRank(cells=[{"source": "import a"}])
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    (replay,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ReplayCells)
    mesh.kill(victim)
    if victim == 1:
        failed = mesh.finish(replay.call, ranks=(1,), status="lost")
    else:
        failed = mesh.reply_to(replay, {1: {"ran": [], "defined": 1, "failed": []}})
    text = refusal(failed)
    assert "could not be healed" in text
    assert "%mesh heal" in text
    again = mesh.heal("again") + (mesh.kill(1) if victim == 3 else [])
    (start,) = messages_of(again, messages.StartRanks)
    assert start.ranks == tuple({1, victim})


def test_state_that_cannot_be_shared_ends_the_new_process_and_the_next_heal_begins_anew(mesh: LostRank) -> None:
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    (share,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ShareState)
    error = messages.RankError(ename="OSError", evalue="no", traceback=())
    failed = mesh.finish(share.call, status="error", error=error)
    text = refusal(failed)
    assert "what the others hold was not copied to it: ranks 0-3: OSError: no; %mesh heal tries again" in text
    assert messages_of(failed, messages.KillRanks)[0].ranks == (1,)
    (again,) = messages_of(failed, messages.FormGroups)  # ranks may have come to different places
    assert again.generation == 3


def test_ranks_do_not_wait_for_one_that_cannot_share_its_state() -> None:
    mesh = LostRank()
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    (share,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ShareState)
    steps = mesh.host(messages.CallProgressed(call=share.call, done=(2,), failure="rank 2: OSError: no"))
    (abort,) = messages_of(steps, messages.AbortCollectives)
    assert (abort.ranks, abort.reason) == ((0, 1, 3), "sharing state failed on rank 2: OSError: no")
    parts = (
        part((2,), messages.RankError(ename="OSError", evalue="no", traceback=())),
        part((0, 1, 3), messages.RankError(ename="GroupBroken", evalue=abort.reason, traceback=())),
    )
    text = refusal(mesh.host(messages.CallFinished(call=share.call, outcomes=parts, seconds=0.1)))
    assert "was not copied to it: rank 2: OSError: no" in text


def test_ranks_do_not_wait_for_those_of_another_machine_that_cannot_share_their_state() -> None:
    mesh = LostRank(num_hosts=2)
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    mesh.finish(form.call, ranks=(0, 1), reply={"backend": "gloo"})
    formed = mesh.finish(form.call, ranks=(2, 3), host=1, reply={"backend": "gloo"})
    (share,) = messages_of(formed, messages.ShareState)
    error = messages.RankError(ename="OSError", evalue="no", traceback=())
    parts = (part((2, 3), error),)
    steps = mesh.host(messages.CallFinished(call=share.call, outcomes=parts, seconds=0.1), 1)
    (abort,) = messages_of(steps, messages.AbortCollectives)
    assert (abort.ranks, abort.reason) == ((0, 1), "sharing state failed on ranks 2-3: OSError: no")


def part(ranks: tuple[int, ...], error: messages.RankError) -> OutcomeGroup:
    return OutcomeGroup(ranks, Outcome(status="error", error=error))


def test_nothing_is_replayed_or_shared_if_that_is_not_wanted() -> None:
    mesh = LostRank(cells=[{"source": "import a"}])
    (form,) = messages_of(mesh.heal(replay=False, share=False), messages.FormGroups)
    assert mesh.healed(mesh.finish(form.call, reply={"backend": "gloo"})).ranks == (1,)


def test_healing_waits_for_the_end_of_the_call_in_which_the_rank_was_lost_and_for_no_other() -> None:
    mesh = World()
    mesh.run("c1")
    mesh.kill(1)
    assert mesh.say(messages.HealMesh(call="heal")) == []  # type: ignore[arg-type]
    (start,) = messages_of(mesh.finish("c1", status="interrupted"), messages.StartRanks)
    assert start.ranks == (1,)


def test_healing_a_whole_mesh_while_a_cell_runs_finds_nothing_to_heal() -> None:
    mesh = World()
    mesh.run("c1")
    (healed,) = messages_of(mesh.say(messages.HealMesh(call="heal")), messages.MeshHealed)  # type: ignore[arg-type]
    assert healed.ranks == ()


def test_healing_while_another_cell_runs_is_refused_with_its_name(mesh: LostRank) -> None:
    mesh.run("c1", ranks=(0, 2))
    assert refusal(mesh.heal()).startswith("cell 1 runs on ranks 0,2; wait for it, or press Stop")


# ---- names that are copied afterwards


def healed_with(alike: list[str]) -> LostRank:
    """A mesh whose rank 1 was healed; these names could have been copied to it."""
    mesh = LostRank()
    (form,) = messages_of(mesh.heal(), messages.FormGroups)
    (share,) = messages_of(mesh.finish(form.call, reply={"backend": "gloo"}), messages.ShareState)
    mesh.reply_to(share, {0: NOTHING, 1: {**NOTHING, "alike": alike}, 2: NOTHING, 3: NOTHING})
    return mesh


def test_names_are_copied_to_the_ranks_that_were_healed_last_without_any_other_step() -> None:
    mesh = healed_with(["step", "net.tau", "net.rate", "losses"])
    (share,) = messages_of(mesh.heal("copy", copy=("step",)), messages.ShareState)
    assert (share.new_ranks, share.copy, share.names_only) == ((1,), ("step",), True)
    copied = {**NOTHING, "restored": {"step": [0, "alike on ranks 0,2-3"]}}
    healed = mesh.healed(mesh.reply_to(share, {0: NOTHING, 1: copied, 2: NOTHING, 3: NOTHING}))
    assert (healed.ranks, healed.copied_to) == ((), (1,))
    (share,) = messages_of(mesh.heal("all", copy=None), messages.ShareState)  # all that is left
    assert share.copy == ("net", "losses")


def test_what_cannot_be_copied_is_refused_with_the_reason() -> None:
    whole = World()
    (refused,) = messages_of(whole.say(messages.HealMesh(call="c", copy=("step",))), messages.Refused)  # type: ignore[arg-type]
    assert "no rank has been healed, so that there is none to copy to" in refused.text
    mesh = healed_with([])
    assert "the last heal has left nothing to copy to rank 1; %mesh heal --copy NAME" in refusal(mesh.heal(copy=None))
    mesh.say(messages.RunCell(call="busy", ranks=(0, 2), label="cell 7", source="1"))  # type: ignore[arg-type]
    assert "cell 7 runs; wait for it, or press Stop" in refusal(mesh.heal(copy=("step",)))


def test_ranks_that_live_are_not_ended_because_names_could_not_be_copied() -> None:
    mesh = healed_with(["step"])
    (share,) = messages_of(mesh.heal("copy", copy=("step",)), messages.ShareState)
    failed = Outcome(status="error", error=messages.RankError(ename="RuntimeError", evalue="no", traceback=()))
    waited = Outcome(status="error", error=messages.RankError(ename="DistStoreError", evalue="late", traceback=()))
    parts = (OutcomeGroup((0, 2, 3), waited), OutcomeGroup((1,), failed))
    steps = mesh.host(messages.CallFinished(call=share.call, outcomes=parts, seconds=0.1))
    assert not messages_of(steps, messages.KillRanks)
    # the rank that failed, not those that have waited for it in vain
    assert (
        "nothing may have been copied to rank 1: what the others hold was not copied to it: rank 1: RuntimeError: no"
        in (refusal(steps))
    )
