"""The supervisor's memory: events in, steps out, and a year of failures in a millisecond."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import pytest

from meshbook.engines.base import HostProgress
from meshbook.supervisor import effects as s
from meshbook.supervisor.state import MeshState
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome, OutcomeGroup
from meshbook.wire.stop_timing import ABANDON_AFTER_S
from tests.positions import position

T = TypeVar("T")


def facts_of(machine: str = "here", **others: Any) -> messages.MachineFacts:
    """What a machine says of itself."""
    facts = messages.MachineFacts(
        machine=machine,
        hostname=machine,
        address="10.0.0.1",
        executable="/usr/bin/python3",
        meshbook="0.1.0",
        python="3.11.9",
        torch="2.13.0",
        nccl=None,
        driver=None,
        num_cpus=8,
        free_memory_bytes=1 << 34,
        wall_time=0.0,
    )
    return msgspec.structs.replace(facts, **others)


def messages_of(steps: Iterable[s.Effect], kind: type[T]) -> list[T]:
    """The messages of one kind among steps, whoever they go to."""
    found = [step.message for step in steps if isinstance(step, (s.SendToClient, s.SendToHosts))]
    return [message for message in found if isinstance(message, kind)]


def steps_of(steps: Iterable[s.Effect], kind: type[T]) -> list[T]:
    return [step for step in steps if isinstance(step, kind)]


class World:
    """A state with one client, driven by hand."""

    def __init__(self, *, num_ranks: int = 4, num_hosts: int = 1, start: bool = True) -> None:
        self.state = MeshState("mesh", pid=1, started_at=1000.0, facts=facts_of, store_address="ipc:///store.sock")
        self.now = 0.0
        self.spec = messages.MeshSpec(axes={"rank": num_ranks}, num_hosts=num_hosts)
        self.join("one")
        if start:
            self.come_up()

    def join(self, client: str, **options: Any) -> list[s.Effect]:
        hello = messages.Hello(token="", client=client, kind="script", pid=2, channel="receive", **options)
        return self.state.client_joined(hello, self.now)

    def say(self, command: Any, client: str = "one") -> list[s.Effect]:
        return self.state.command_received(client, command, codec.encode_body(command), self.now)

    def host(self, report: Any, host: int = 0) -> list[s.Effect]:
        return self.state.report_received(host, report, self.now)

    def come_up(self) -> list[s.Effect]:
        self.say(messages.StartMesh(call="start", spec=self.spec))
        for host in range(self.spec.num_hosts):
            formed = self.host(messages.HostReady(host=host, hostname="box", pid=3), host)
        form = messages_of(formed, messages.FormGroups)[0]
        return self.finish(form.call, reply={"backend": "gloo"})

    def run(self, call: str = "c1", ranks: tuple[int, ...] | None = None, **options: Any) -> list[s.Effect]:
        ranks = tuple(range(self.spec.axes["rank"])) if ranks is None else ranks
        return self.say(messages.RunCell(call=call, ranks=ranks, source="x = 1", label="cell 1", **options))

    def finish(
        self, call: str, *, ranks: tuple[int, ...] | None = None, host: int = 0, **outcome: Any
    ) -> list[s.Effect]:
        ranks = tuple(range(self.spec.axes["rank"])) if ranks is None else ranks
        part = OutcomeGroup(ranks, Outcome(**{"status": "ok", **outcome}))
        return self.host(messages.CallFinished(call=call, outcomes=(part,), seconds=0.1), host)

    def position(self, rank: int, *, num_begun: int = 5, **changes: Any) -> dict[str, Any]:
        """What a rank answers that has run c1 and made some collectives."""
        everyone = tuple(range(self.spec.axes["rank"]))
        group = messages.GroupPosition(name="0", ranks=everyone, num_started=num_begun, has_new_collectives=True)
        answer: dict[str, Any] = msgspec.to_builtins(position(rank, **{"groups": (group,), **changes}))
        return answer

    def answer(self, steps: Iterable[s.Effect], positions: dict[int, dict[str, Any]]) -> list[s.Effect]:
        """The ranks answer the one question about their positions among `steps`."""
        (ask,) = messages_of(steps, messages.QueryPositions)
        parts = [
            OutcomeGroup((rank,), Outcome(status="ok", reply=positions[rank]))
            for rank in ask.ranks
            if rank in positions
        ]
        silent = tuple(rank for rank in ask.ranks if rank not in positions)
        if silent:
            parts.append(OutcomeGroup(silent, Outcome(status="skipped")))
        return self.host(messages.CallFinished(call=ask.call, outcomes=tuple(parts), seconds=0.0))

    def in_step(self, steps: Iterable[s.Effect]) -> list[s.Effect]:
        return self.answer(steps, {rank: self.position(rank) for rank in range(self.spec.axes["rank"])})

    def kill(self, rank: int) -> list[s.Effect]:
        exited = messages.RankExited(
            rank=rank, pid=9, exit_code=None, signal=9, host="box", last_lines=("last",), last_collective=None
        )
        return self.host(exited)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def busy(world: World) -> World:
    """Whose ranks all run cell 1, call c1."""
    world.run()
    return world


def test_a_mesh_is_ready_when_its_groups_are_formed_and_not_before() -> None:
    world = World(start=False)
    assert steps_of(world.say(messages.StartMesh(call="start", spec=world.spec)), s.StartHosts)
    started = world.host(messages.HostReady(host=0, hostname="box", pid=3))
    assert messages_of(started, messages.StartRanks)[0].ranks == (0, 1, 2, 3)
    assert messages_of(started, messages.FormGroups)[0].store_address == "ipc:///store.sock"
    assert not messages_of(started, messages.MeshReady)
    ready = messages_of(world.finish("form-1", reply={"backend": "gloo"}), messages.MeshReady)[0]
    assert (ready.call, ready.info.groups, ready.info.backend) == ("start", "ready", "gloo")


def test_a_rank_that_dies_while_the_mesh_comes_up_fails_the_start_with_its_last_lines() -> None:
    world = World(start=False)
    world.say(messages.StartMesh(call="start", spec=world.spec))
    world.host(messages.HostReady(host=0, hostname="box", pid=3))
    steps = world.kill(2)
    refused = messages_of(steps, messages.Refused)[0]
    assert refused.call == "start"
    assert "rank 2 was killed by SIGKILL" in refused.text
    assert "last" in refused.text
    assert steps_of(steps, s.Shutdown)


def test_a_second_start_is_refused_and_changes_nothing(world: World) -> None:
    refused = messages_of(world.say(messages.StartMesh(call="again", spec=world.spec)), messages.Refused)[0]
    assert refused.error == "MeshInUse"


def test_a_cell_before_the_ranks_are_there_is_refused() -> None:
    assert messages_of(World(start=False).run(ranks=(0,)), messages.Refused)[0].error == "NotAttached"


def test_a_cell_goes_to_the_hosts_as_it_came_and_its_end_to_the_client_who_asked(world: World) -> None:
    world.join("two")
    sent = steps_of(world.run(), s.SendToHosts)[0]
    assert sent.body is not None
    assert codec.host_commands.decode_body(sent.body) == sent.message
    ended = steps_of(world.finish("c1"), s.SendToClient)
    assert [step.client for step in ended] == ["one"]


def test_a_cell_for_a_rank_that_is_not_there_is_refused_with_the_ranks_that_are() -> None:
    refused = messages_of(World().run(ranks=(1, 7)), messages.Refused)[0]
    assert refused.error == "MeshShapeError"
    assert "rank 7 is not in this mesh of 4 ranks (0-3)" in refused.text


def test_names_that_cells_bind_and_delete_are_known_to_the_next_client(busy: World) -> None:
    busy.finish("c1", bound_names=("x", "y"))
    busy.run("c2")
    busy.finish("c2", deleted_names=("x",))
    assert messages_of(busy.join("two"), messages.Welcome)[0].info.names == ("y",)


def test_a_lost_rank_is_told_to_every_client_and_its_fellows_are_unblocked_and_interrupted(world: World) -> None:
    world.join("two")
    world.run()
    steps = world.kill(2)
    assert steps_of(steps, s.SendToClient)[0].client is None
    assert messages_of(steps, messages.AbortCollectives)[0].ranks == (0, 1, 3)
    interrupt = messages_of(steps, messages.Interrupt)[0]
    assert (interrupt.ranks, interrupt.target) == ((0, 1, 3), "c1")


def test_a_call_that_lost_a_rank_says_which_in_its_end(busy: World) -> None:
    busy.kill(2)
    finished = messages_of(busy.finish("c1"), messages.CallFinished)[0]
    assert [exited.rank for exited in finished.lost] == [2]


def test_survivors_that_do_not_come_back_are_not_waited_for_and_what_the_others_came_to_is_told(busy: World) -> None:
    alarm = steps_of(busy.kill(2), s.SetTimer)[0]
    assert alarm.delay_s == ABANDON_AFTER_S
    (conclude,) = messages_of(busy.state.timer_fired(alarm.name, alarm.delay_s), messages.EndCall)
    assert conclude.call == "c1"
    line = messages.Line(ranks=(0,), stream="stdout", text="saved")
    parts = (
        OutcomeGroup((0,), Outcome(status="ok", bound_names=("x",))),
        OutcomeGroup((1, 3), Outcome(status="skipped")),
        OutcomeGroup((2,), Outcome(status="lost")),
    )
    reported = messages.CallFinished(call="c1", outcomes=parts, seconds=1.0, items=(line,))
    (finished,) = messages_of(busy.host(reported), messages.CallFinished)
    assert finished.outcomes == parts
    assert finished.items == (line,)
    assert [exited.rank for exited in finished.lost] == [2]
    assert busy.state.info().names == ("x",)


def test_groups_that_an_interrupt_broke_are_formed_again_in_the_next_epoch(busy: World) -> None:
    steps = busy.finish("c1", status="interrupted", groups_broken=True)
    assert messages_of(steps, messages.FormGroups)[0].generation == 2
    formed = busy.finish("form-2", reply={"backend": "gloo"})
    assert messages_of(formed, messages.MeshChanged)[0].info.groups == "ready"


def test_groups_are_not_formed_again_while_a_cell_runs(world: World) -> None:
    world.run("c1", ranks=(0, 1))
    world.run("c2", ranks=(2, 3))
    assert not messages_of(world.finish("c1", ranks=(0, 1), groups_broken=True), messages.FormGroups)
    assert messages_of(world.finish("c2", ranks=(2, 3)), messages.FormGroups)


def test_groups_with_a_dead_member_are_left_broken(busy: World) -> None:
    busy.kill(2)
    steps = busy.finish("c1", groups_broken=True)
    assert not messages_of(steps, messages.FormGroups)
    assert busy.state.info().groups == "broken"


def test_a_host_that_ends_takes_its_ranks_and_their_calls_with_it() -> None:
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1)
    world.run()
    world.finish("c1", ranks=(0, 1), host=0)
    steps = world.state.host_exited(1, "was killed by signal 9", 1.0)
    finished = messages_of(steps, messages.CallFinished)[0]
    assert {part.outcome.status: part.ranks for part in finished.outcomes} == {"ok": (0, 1), "lost": (2, 3)}
    how = "ended with its host, which was killed by signal 9"
    assert [(exited.rank, exited.signal, exited.description) for exited in finished.lost] == [
        (2, None, how),
        (3, None, how),
    ]


def test_a_mesh_of_uneven_hosts_comes_up() -> None:
    world = World(num_hosts=3)
    assert world.state.info().spec is not None
    for host, ranks in enumerate([(0, 1), (2,), (3,)]):
        steps = world.finish("form-1", ranks=ranks, host=host)
    assert messages_of(steps, messages.MeshReady)


def test_a_mesh_without_clients_ends_after_its_time_to_live() -> None:
    world = World(start=False)
    world.state.client_disconnected("one", world.now)
    world.join("two", orphan_ttl_s=7.0)
    alarm = steps_of(world.state.client_disconnected("two", world.now), s.SetTimer)[0]
    assert alarm.delay_s == 7.0
    assert steps_of(world.state.timer_fired(alarm.name, 7.0), s.Shutdown)


def test_a_question_that_nobody_can_answer_is_answered_with_nothing(world: World) -> None:
    world.run(allow_input=True)
    asked = messages.InputRequest(call="c1", rank=1, prompt="name? ", password=False)
    world.host(asked)
    assert messages_of(world.state.client_disconnected("one", world.now), messages.InputReply)[0].text is None
    assert messages_of(world.host(asked), messages.InputReply)[0].text is None


def test_a_new_client_learns_which_cells_of_others_still_run(busy: World) -> None:
    busy.now = 12.0
    open_call = messages_of(busy.join("two"), messages.Welcome)[0].open_calls[0]
    assert (open_call.label, open_call.ranks, open_call.seconds) == ("cell 1", (0, 1, 2, 3), 12.0)


@pytest.mark.parametrize("status", ["ok", "error", "interrupted", "lost"])
def test_history_tells_how_a_cell_ended(busy: World, status: str) -> None:
    busy.finish("c1", status=status)
    entry = messages_of(busy.say(messages.QueryHistory(call="h")), messages.CommandReply)[0].history[0]
    assert (entry.label, entry.status, entry.seconds) == ("cell 1", status, 0.1)


def test_a_flood_of_output_after_the_end_is_cut_and_what_is_missing_is_told(world: World) -> None:
    lines = tuple(messages.Line(ranks=(0,), stream="stdout", text="x" * 1000) for _ in range(4000))
    steps = world.host(messages.CallOutput(call="c0", items=lines))
    (shown,) = messages_of(steps, messages.CallOutput)
    assert 1000 <= len(shown.items) < 2000
    (alarm,) = steps_of(steps, s.SetTimer)
    (reported,) = messages_of(world.state.timer_fired(alarm.name, alarm.delay_s), messages.CallOutput)
    (notice,) = reported.items
    assert "not shown" in notice.item.text


def test_stopping_is_answered_before_the_end() -> None:
    steps = World().say(messages.StopMesh(call="stop"))
    assert messages_of(steps, messages.CommandReply)
    assert steps_of(steps, s.Shutdown)


def test_deaths_while_stopping_are_no_news(world: World) -> None:
    world.say(messages.StopMesh(call="stop"))
    assert world.kill(1) == []


def test_the_same_events_lead_to_the_same_state() -> None:
    def play() -> messages.MeshInfo:
        world = World()
        world.run()
        world.kill(3)
        world.finish("c1", ranks=(0, 1, 2), status="interrupted")
        return world.state.info()

    assert play() == play()


def test_a_cell_that_waits_for_another_clients_cell_says_once_for_which() -> None:
    world = World(num_ranks=2)
    world.join("two")

    def notices(steps: list[s.Effect]) -> list[tuple[str | None, str]]:
        sent = [step for step in steps if isinstance(step, s.SendToClient)]
        outputs = [(step.client, step.message) for step in sent if isinstance(step.message, messages.CallOutput)]
        return [(client, item.item.text) for client, output in outputs for item in output.items]  # type: ignore[union-attr]

    assert not steps_of(world.run("c1"), s.SetTimer)[1:], "nothing to wait for"
    cell = messages.RunCell(call="c2", ranks=(1,), source="y", label="cell 4")
    (timer,) = [step for step in steps_of(world.say(cell, "two"), s.SetTimer) if step.name.startswith("waiting")]
    mine = messages.RunCell(call="c3", ranks=(1,), source="z", label="cell 2")
    assert [step.name for step in steps_of(world.say(mine), s.SetTimer)] == ["waiting c3"]
    world.now = 1.0
    since = f"{datetime.fromtimestamp(world.state.wall_time(0.0)):%H:%M:%S}"
    assert notices(world.state.timer_fired(timer.name, world.now)) == [
        ("two", f"cell 4 waits for cell 1 of script (pid 2), which runs on rank 1 since {since}")
    ]
    world.state.client_disconnected("one", world.now)
    assert "of a client that is gone, which runs" in notices(world.state.timer_fired(timer.name, 2.0))[0][1]
    world.finish("c1")
    assert notices(world.state.timer_fired(timer.name, 3.0)) == [], "it runs"


def test_who_waits_for_a_start_is_sent_how_many_ranks_are_ready_and_what_the_others_wait_for() -> None:
    world = World(num_ranks=2, num_hosts=2, start=False)
    world.say(messages.StartMesh(call="start", spec=world.spec))

    def states_after(host: int, info: messages.RankInfo | None) -> list[str]:
        steps = world.host(messages.HostHeartbeat(host=host, ranks=() if info is None else (info,)), host)
        return [report.state for report in messages_of(steps, messages.MeshStarting)]

    starting = [messages.RankInfo(rank=rank, state="starting", host="box", pid=9) for rank in range(2)]
    world.host(messages.HostReady(host=0, hostname="box", pid=3), 0)
    assert states_after(0, None) == ["starting: host 0 ready; host 1: Python starts"]
    assert states_after(0, None) == [], "nothing has changed"
    world.host(messages.HostReady(host=1, hostname="box", pid=3), 1)
    assert states_after(0, None) == ["0 of 2 ranks are ready; waiting for torch to be imported"]
    assert states_after(0, starting[0]) == ["0 of 2 ranks are ready; waiting for ranks 0-1"]
    assert states_after(1, msgspec.structs.replace(starting[1], state="busy")) == [
        "1 of 2 ranks are ready; waiting for rank 0"
    ]
    assert states_after(0, msgspec.structs.replace(starting[0], state="idle")) == [
        "2 of 2 ranks are ready; they form their process groups"
    ]


def test_who_waits_for_a_start_is_sent_what_goes_on_at_each_machine_and_the_queues_words_while_it_is_queued() -> None:
    world = World(num_ranks=6, num_hosts=6, start=False)
    spec = msgspec.structs.replace(world.spec, engine="ssh", on="ssh://n1,n2,n3,n4,n5,n6")
    world.say(messages.StartMesh(call="start", spec=spec))

    def states_after(effects: list[s.Effect]) -> list[str]:
        return [report.state for report in messages_of(effects, messages.MeshStarting)]

    def progressed(queue_state: str = "", **machines: tuple[str, int]) -> list[str]:
        hosts = {int(name[1:]) - 1: HostProgress(name, *stage) for name, stage in machines.items()}
        return states_after(world.state.changes.hosts_awaited(queue_state, hosts))

    connecting = {f"n{number}": ("ssh connects", 0) for number in range(1, 7)}
    assert progressed(**connecting) == ["starting: n1, n2, n3, n4 and 2 more: ssh connects"]
    later = {"n1": ("", 1), "n2": ("ssh connects", 3), "n3": ("ssh connects", 4), "n4": ("Python starts", 1)}
    assert progressed(**later, n5=("", 2), n6=("", 1)) == [
        "starting: n1, n5, n6 ready; n4: Python starts (1 s); n2, n3: ssh connects (4 s)"
    ]
    queued = "Slurm: job 7 is PENDING (Priority)"
    assert progressed(queued, **connecting) == [queued]
    assert progressed(queued, **later) == []
    assert progressed(**connecting) == [""]
    ready = messages.HostReady(host=1, hostname="box", pid=3, facts=facts_of("m1"))
    world.host(ready, 1)
    assert progressed(n1=("the host connects back", 2)) == [
        "starting: n2 ready; n3, n4, n5, n6: Python starts; n1: the host connects back (2 s)"
    ]


def test_a_rank_that_is_done_with_its_part_of_a_cell_is_idle_once_its_host_says_so() -> None:
    world = World(num_ranks=2)
    world.now = 10.0
    world.run("c1")

    def states_after_a_beat() -> list[str]:
        ranks = (
            messages.RankInfo(rank=0, state="idle", host="box"),
            messages.RankInfo(rank=1, state="busy", host="box", call="c1"),
        )
        world.host(messages.HostHeartbeat(host=0, ranks=ranks))
        (answer,) = messages_of(world.say(messages.QueryStatus(call="ask")), messages.CommandReply)
        return [rank.state for rank in answer.info.ranks]

    assert states_after_a_beat() == ["busy", "busy"], "this beat and the call may have passed each other"
    world.now = 12.0
    assert states_after_a_beat() == ["idle", "busy"]


def test_what_ranks_hold_for_a_client_is_released_when_it_goes(world: World) -> None:
    world.join("two")
    world.run("one-1")
    gone = steps_of(world.state.client_disconnected("one", world.now), s.SendToHosts)
    (release,) = [step.message for step in gone if isinstance(step.message, messages.Release)]
    assert (release.client, release.ranks) == ("one", (0, 1, 2, 3))
    assert not messages_of(
        world.state.client_disconnected("two", world.now), messages.Release
    )  # it never called anything


def test_what_ranks_hold_for_a_client_is_released_when_it_leaves(busy: World) -> None:
    left = messages_of(busy.say(messages.Detach(call="d", orphan_ttl_s=None)), messages.Release)
    assert [release.client for release in left] == ["one"]


def test_a_stop_for_ranks_that_are_not_there_stops_nobody(busy: World) -> None:
    assert busy.say(messages.Interrupt(ranks=(7, 8))) == []
    assert messages_of(busy.say(messages.Interrupt(ranks=(2, 8))), messages.Interrupt)[0].ranks == (2,)


def test_a_stop_of_what_runs_leaves_another_clients_waiting_cell_alone_and_takes_back_ones_own(world: World) -> None:
    world.join("two")
    world.run("one-1")
    world.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="one-1"))
    for client in ("one", "two"):
        world.say(messages.RunCell(call=f"{client}-2", ranks=(0, 1, 2, 3), source="x"), client)
    stopped = world.say(messages.Interrupt(ranks=(0, 1, 2, 3)))
    assert [ended.call for ended in messages_of(stopped, messages.CallFinished)] == ["one-2"]
    assert messages_of(stopped, messages.Interrupt)[0].client == "one"
    sent = messages_of(world.in_step(world.finish("one-1", status="interrupted")), messages.RunCell)
    assert [cell.call for cell in sent] == ["two-2"]


def test_names_that_are_told_are_bounded(busy: World) -> None:
    busy.finish("c1", bound_names=tuple(f"x{number}" for number in range(20_000)))
    names = busy.state.info().names
    assert (len(names), names[-1]) == (10_000, "x19999")


# ---- in step


@pytest.mark.parametrize("status", ["error", "interrupted"])
def test_after_a_cell_that_did_not_end_well_all_ranks_are_asked_for_their_positions(world: World, status: str) -> None:
    world.run(ranks=(0, 1))
    (ask,) = messages_of(world.finish("c1", ranks=(0, 1), status=status), messages.QueryPositions)
    assert (ask.ranks, ask.about_call) == ((0, 1, 2, 3), "c1")


def test_a_cell_that_ended_well_costs_no_question(busy: World) -> None:
    assert [type(step) for step in busy.finish("c1")] == [s.SendToClient]


def test_a_mesh_without_process_groups_is_not_asked() -> None:
    world = World(start=False)
    world.spec = messages.MeshSpec(axes={"rank": 4}, process_group=False)
    world.say(messages.StartMesh(call="start", spec=world.spec))
    world.host(messages.HostReady(host=0, hostname="box", pid=3))
    world.finish("form-1", reply={"backend": None})
    world.run()
    assert not messages_of(world.finish("c1", status="error"), messages.QueryPositions)


def test_ranks_that_are_in_step_keep_their_groups(busy: World) -> None:
    steps = busy.in_step(busy.finish("c1", status="error"))
    (checked,) = messages_of(steps, messages.ResumeCollectives)
    assert (checked.about_call, checked.broken_groups) == ("c1", ())
    assert not messages_of(steps, messages.FormGroups)


def test_ranks_that_are_out_of_step_have_their_groups_formed_anew(busy: World) -> None:
    positions = {rank: busy.position(rank, num_begun=6 if rank == 2 else 5) for rank in range(4)}
    steps = busy.answer(busy.finish("c1", status="error"), positions)
    (checked,) = messages_of(steps, messages.ResumeCollectives)
    assert checked.broken_groups == ("0",)
    assert "6 collectives on rank 2 and 5 on rank 0" in checked.reason
    assert messages_of(steps, messages.FormGroups)[0].generation == 2


def test_a_rank_that_cannot_be_asked_counts_as_out_of_step(busy: World) -> None:
    positions = {rank: busy.position(rank) for rank in range(3)}
    assert messages_of(busy.answer(busy.finish("c1", status="error"), positions), messages.FormGroups)


def test_what_begins_while_ranks_are_asked_waits_and_comes_after_the_groups(busy: World) -> None:
    asked = busy.finish("c1", status="error")
    assert not busy.run("c2")
    positions = {rank: busy.position(rank, num_begun=rank) for rank in range(4)}
    sent = [step.message for step in busy.answer(asked, positions) if isinstance(step, s.SendToHosts)]
    assert [type(message).__name__ for message in sent] == ["ResumeCollectives", "FormGroups", "RunCell"]


def test_groups_out_of_step_are_formed_anew_when_the_ranks_that_run_another_cell_are_done(world: World) -> None:
    world.run("c1", ranks=(0, 1))
    world.run("c2", ranks=(2, 3))
    asked = world.finish("c1", ranks=(0, 1), status="error")
    positions = {rank: world.position(rank, is_held_or_idle=rank < 2, is_idle=rank < 2) for rank in range(4)}
    assert not messages_of(world.answer(asked, positions), messages.FormGroups)
    assert world.state.info().groups == "broken"
    assert messages_of(world.finish("c2", ranks=(2, 3)), messages.FormGroups)


def test_a_rank_lost_while_ranks_are_asked_ends_the_question(busy: World) -> None:
    asked = busy.finish("c1", status="error")
    busy.kill(3)
    steps = busy.answer(asked, {rank: busy.position(rank) for rank in range(3)})
    assert not messages_of(steps, messages.ResumeCollectives)
    assert not messages_of(steps, messages.FormGroups)


def test_calls_that_wait_while_ranks_are_asked_end_with_a_rank_that_is_lost_and_are_not_begun_by_the_others() -> None:
    world = World()
    world.run()
    asked = world.finish("c1", status="error")
    world.run("c2")
    world.run("c3", ranks=(0, 3))
    world.run("c4", ranks=(0, 1))
    steps = world.kill(3)
    assert not messages_of(steps, messages.Interrupt)
    ended = {finished.call: finished for finished in messages_of(steps, messages.CallFinished)}
    assert {call: [exited.rank for exited in finished.lost] for call, finished in ended.items()} == {
        "c2": [3],
        "c3": [3],
    }
    assert [(part.ranks, part.outcome.status) for part in ended["c2"].outcomes] == [
        ((3,), "lost"),
        ((0, 1, 2), "interrupted"),
    ]
    answered = world.answer(asked, {rank: world.position(rank) for rank in range(3)})
    assert [message.call for message in messages_of([*steps, *answered], messages.RunCell)] == ["c4"]


def test_groups_that_could_not_be_formed_are_tried_again_with_the_next_cell_and_not_before(busy: World) -> None:
    busy.finish("c1", status="interrupted", groups_broken=True)
    error = messages.RankError(ename="RuntimeError", evalue="timed out", traceback=())
    steps = busy.finish("form-2", status="error", error=error)
    (said,) = messages_of(steps, messages.CallOutput)
    assert "ranks 0-3: RuntimeError: timed out" in said.items[0].item.text
    assert "again with the next cell" in said.items[0].item.text
    assert not messages_of(steps, messages.FormGroups)
    busy.say(messages.Complete(call="q", ranks=(0,), code="x", cursor=1))
    assert not messages_of(busy.finish("q", ranks=(0,)), messages.FormGroups)
    sent = [step.message for step in busy.run("c2") if isinstance(step, s.SendToHosts)]
    assert [type(message).__name__ for message in sent] == ["FormGroups", "RunCell"]


def test_ranks_do_not_wait_for_one_that_cannot_form_its_groups_and_its_reason_is_told(busy: World) -> None:
    busy.finish("c1", status="interrupted", groups_broken=True)
    steps = busy.host(messages.CallProgressed(call="form-2", done=(1,), failure="rank 1: OSError: no descriptors"))
    (reported,) = messages_of(steps, messages.AbortCollectives)
    assert (reported.ranks, reported.interrupt) == ((0, 2, 3), False)
    assert "rank 1: OSError: no descriptors" in reported.reason
    again = messages.CallProgressed(call="form-2", done=(1, 2), failure="rank 1: OSError: no descriptors")
    assert not messages_of(busy.host(again), messages.AbortCollectives)
    error = messages.RankError(ename="RankLost", evalue="groups were not formed", traceback=())
    (said,) = messages_of(busy.finish("form-2", status="error", error=error), messages.CallOutput)
    assert "could not be formed anew: rank 1: OSError: no descriptors" in said.items[0].item.text


@pytest.mark.parametrize(("backend", "is_told"), [("gloo", False), ("nccl", True)])
def test_where_nccl_may_have_computed_with_garbage_the_step_to_discard_is_named(backend: str, is_told: bool) -> None:
    world = World(start=False)
    world.say(messages.StartMesh(call="start", spec=world.spec))
    world.host(messages.HostReady(host=0, hostname="box", pid=3))
    world.finish("form-1", reply={"backend": backend})
    world.run()
    (ended,) = messages_of(world.finish("c1", status="interrupted", groups_broken=True), messages.CallFinished)
    assert (len(ended.items) == 1) is is_told
    world.finish("form-2", reply={"backend": backend})
    world.run()
    asked = world.finish("c1", status="error")
    steps = world.answer(asked, {rank: world.position(rank, num_begun=rank) for rank in range(4)})
    said = messages_of(steps, messages.CallOutput)
    assert bool(said) is is_told
    for item in [item for message in [*said, ended] for item in message.items]:
        assert "discard the step in which cell 1 ended" in item.item.text


def test_ranks_of_a_call_that_is_stopped_hold_their_collectives_until_it_is_over_everywhere(busy: World) -> None:
    stopped = busy.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1"))
    assert [(hold.ranks, hold.about_call) for hold in messages_of(stopped, messages.HoldCollectives)] == [
        ((0, 1, 2, 3), "c1")
    ]
    again = busy.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1", hard=True))
    assert not messages_of(again, messages.HoldCollectives)
    # The Stop came too late to end anything: the ranks are let go on all the same.
    steps = busy.in_step(busy.finish("c1"))
    assert [checked.about_call for checked in messages_of(steps, messages.ResumeCollectives)] == ["c1"]


# ---- ranks that leave a call in which others go on


def progressed(world: World, *done: int) -> list[s.Effect]:
    return world.host(messages.CallProgressed(call="c1", done=done))


def test_ranks_that_are_done_while_others_go_on_are_asked_and_the_others_are_told_who_has_left(busy: World) -> None:
    steps = progressed(busy, 1)
    assert messages_of(steps, messages.QueryPositions)[0].ranks == (1,)
    (reported,) = messages_of(
        busy.answer(steps, {1: busy.position(1, cause="rank 1 raised ValueError: no")}), messages.RanksLeft
    )
    assert (reported.call, reported.ranks) == ("c1", (0, 2, 3))
    assert [(left.rank, left.cause) for left in reported.left_positions] == [(1, "rank 1 raised ValueError: no")]


def test_a_rank_is_told_of_once_and_those_that_leave_later_too(busy: World) -> None:
    busy.answer(progressed(busy, 1), {1: busy.position(1)})
    assert not messages_of(progressed(busy, 1), messages.QueryPositions)
    steps = progressed(busy, 1, 3)
    assert messages_of(steps, messages.QueryPositions)[0].ranks == (3,)
    assert messages_of(busy.answer(steps, {3: busy.position(3)}), messages.RanksLeft)[0].ranks == (0, 2)


def test_a_rank_that_may_still_take_part_is_asked_again_later(busy: World) -> None:
    steps = busy.answer(progressed(busy, 1), {1: busy.position(1, has_other_collective_threads=True)})
    assert not messages_of(steps, messages.RanksLeft)
    (alarm,) = steps_of(steps, s.SetTimer)
    again = busy.state.timer_fired(alarm.name, alarm.delay_s)
    assert messages_of(busy.answer(again, {1: busy.position(1)}), messages.RanksLeft)


def test_nobody_is_told_who_has_left_a_call_that_is_being_stopped(busy: World) -> None:
    steps = progressed(busy, 1)
    busy.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1"))
    assert not messages_of(busy.answer(steps, {1: busy.position(1)}), messages.RanksLeft)
    assert not messages_of(progressed(busy, 1, 2), messages.QueryPositions)


def test_ranks_that_a_stop_has_not_ended_hear_at_last_who_has_left(busy: World) -> None:
    (release,) = steps_of(busy.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1")), s.SetTimer)
    assert not messages_of(progressed(busy, 1), messages.QueryPositions)
    steps = busy.state.timer_fired(release.name, release.delay_s)
    left = busy.answer(steps, {1: busy.position(1, status="interrupted")})
    assert [report.ranks for report in messages_of(left, messages.RanksLeft)] == [(0, 2, 3)]


def test_a_stop_of_one_rank_leaves_the_others_to_be_released(busy: World) -> None:
    busy.say(messages.Interrupt(ranks=(1,), target="c1"))
    steps = progressed(busy, 1)
    assert messages_of(busy.answer(steps, {1: busy.position(1, status="interrupted")}), messages.RanksLeft)


def test_a_rank_that_was_stopped_before_it_began_is_said_to_have_left(busy: World) -> None:
    busy.say(messages.Interrupt(ranks=(0,)))
    steps = progressed(busy, 0)
    position = busy.position(0, status="", has_begun=False)
    assert messages_of(busy.answer(steps, {0: position}), messages.RanksLeft)[0].ranks == (1, 2, 3)


@pytest.mark.parametrize(("stopped_by", "asked"), [("one", False), ("two", True)])
def test_only_a_stop_that_also_ends_queued_calls_leaves_no_rank_to_be_released(stopped_by: str, asked: bool) -> None:
    world = World()
    world.join("two")
    world.run("one-1")
    world.say(messages.Interrupt(ranks=(0, 1, 2, 3)), client=stopped_by)
    steps = world.host(messages.CallProgressed(call="one-1", done=(1,)))
    assert bool(messages_of(steps, messages.QueryPositions)) is asked


def test_it_can_be_switched_off() -> None:
    world = World(start=False)
    world.spec = messages.MeshSpec(axes={"rank": 4}, end_on_error=False)
    world.come_up()
    world.run()
    assert not messages_of(progressed(world, 1), messages.QueryPositions)


def test_ranks_of_a_host_that_is_done_are_asked_when_another_host_goes_on() -> None:
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    world.run()
    steps = world.finish("c1", ranks=(0, 1), host=0, status="error")
    assert messages_of(steps, messages.QueryPositions)[0].ranks == (0, 1)
    reported = messages_of(world.answer(steps, {0: world.position(0), 1: world.position(1)}), messages.RanksLeft)
    assert reported[0].ranks == (2, 3)


def test_ranks_of_a_host_that_ended_well_are_asked_only_if_another_host_goes_on_for_a_second() -> None:
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    world.run()
    steps = world.finish("c1", ranks=(0, 1), host=0)
    assert not messages_of(steps, messages.QueryPositions)  # a message to each host and rank of every cell
    (alarm,) = steps_of(steps, s.SetTimer)
    again = world.state.timer_fired(alarm.name, alarm.delay_s)
    assert messages_of(again, messages.QueryPositions)[0].ranks == (0, 1)
    reported = messages_of(world.answer(again, {0: world.position(0), 1: world.position(1)}), messages.RanksLeft)
    assert reported[0].ranks == (2, 3)


def test_a_cell_that_ends_well_everywhere_costs_each_host_one_message_there_and_one_back() -> None:
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    steps = [*world.run(), *world.finish("c1", ranks=(0, 1), host=0), *world.finish("c1", ranks=(2, 3), host=1)]
    assert [type(sent.message) for sent in steps_of(steps, s.SendToHosts)] == [messages.RunCell]


def test_the_end_of_the_call_is_the_end_of_the_question(busy: World) -> None:
    steps = progressed(busy, 1)
    busy.in_step(busy.finish("c1", status="error"))
    assert busy.answer(steps, {1: busy.position(1)}) == []
