"""Looks, news and cells that stand still, as the supervisor carries them out: events in, steps out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import pytest

from meshbook.controller.subscription import MeshSnapshot, apply_update
from meshbook.supervisor import effects as s
from meshbook.supervisor.snapshot_requests import SNAPSHOT_TIMEOUT_S
from meshbook.wire import codec, messages
from meshbook.wire.messages import CollectiveInfo, Frame, Health, RankInfo, RankMetrics, RankSnapshot, Scalar
from tests.supervisor.test_state import World, messages_of, steps_of

EVERYONE = (0, 1, 2, 3)


class Scenery(World):
    """A mesh whose ranks beat, with somebody who looks at it."""

    def beat(
        self, measured: dict[int, dict[str, Any]] | None = None, host: int = 0, ranks: tuple[int, ...] = EVERYONE
    ) -> list[s.Effect]:
        """One second later, every rank of a host tells of itself."""
        self.now += 1.0
        call = next(iter(self.state.open_calls(self.now)), None)
        infos = tuple(
            RankInfo(
                rank=rank,
                state="busy" if call is not None else "idle",
                host="box",
                call=call.call if call is not None else None,
                cell=call.label if call is not None else None,
                line=3 if call is not None else None,
                beat_age_s=0.1,
                rss_bytes=1 << 28,
            )
            for rank in ranks
        )
        reported = tuple(
            RankMetrics(
                rank=rank, **{"health": Health(cpu_percent=1.0, num_collectives=4), **(measured or {}).get(rank, {})}
            )
            for rank in ranks
        )
        return self.host(messages.HostHeartbeat(host=host, ranks=infos, metrics=reported), host)

    def ring(self, steps: list[s.Effect], word: str) -> list[s.Effect]:
        """Let the alarms go off whose name has this word."""
        found = []
        for alarm in [alarm for alarm in steps_of(steps, s.SetTimer) if word in alarm.name]:
            self.now += alarm.delay_s
            found += self.state.timer_fired(alarm.name, self.now)
        return found

    def watch(self, client: str = "one", **options: Any) -> list[s.Effect]:
        return self.say(messages.Subscribe(call="w", **{"max_updates_per_s": 2.0, **options}), client)

    def seen(self, call: str, host: int = 0, ranks: tuple[int, ...] = EVERYONE, **options: Any) -> list[s.Effect]:
        """A host tells what it saw: rank 3 sleeps, the others wait for it in an all_reduce."""
        return self.host(messages.SnapshotReply(call=call, snapshots=tuple(map(snapshot, ranks))), host)  # type: ignore[arg-type]


def snapshot(rank: int) -> RankSnapshot:
    cell = Frame(file="<cell 1>", line=3 if rank != 3 else 5, function="<module>")
    below = Frame(file="/lib/site-packages/torch/distributed/distributed_c10d.py", line=1, function="all_reduce")
    stack = messages.ThreadStack(name="MainThread", is_main=True, frames=(cell, below) if rank != 3 else (cell,))
    waiting = CollectiveInfo(op="all_reduce", group="0", group_ranks=EVERYONE, seq=41, frame=cell, began_s_ago=9.0)
    return RankSnapshot(
        rank=rank, host="box", pid=9, source="inside", call="c1", cell="cell 1", file="<cell 1>",  # type: ignore[arg-type]
        cell_line=cell.line, running_s=9.0, stacks=(stack,), collectives=(waiting,) if rank != 3 else (),
        num_collectives=1 if rank != 3 else 0, process=messages.ProcessStatus(state="S"),
    )  # fmt: skip


def watched(steps: list[s.Effect]) -> list[messages.MeshUpdate]:
    """What those that watch are told, as it comes out at the other end."""
    reported = [codec.supervisor_reports.decode(codec.encode(one)) for one in messages_of(steps, messages.MeshUpdate)]
    return [update for update in reported if isinstance(update, messages.MeshUpdate)]


# ---- looks


@pytest.fixture
def world() -> Scenery:
    return Scenery()


@pytest.fixture
def busy(world: Scenery) -> Scenery:
    """Whose ranks all run call c1."""
    world.run("c1")
    return world


def test_a_look_asks_every_host_and_answers_when_all_have_told() -> None:
    world = Scenery(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    asked = world.say(messages.TakeSnapshots(call="look", ranks=EVERYONE))
    assert steps_of(asked, s.SendToHosts)[0].hosts == (0, 1)
    assert steps_of(asked, s.SetTimer)[0].delay_s == SNAPSHOT_TIMEOUT_S
    assert not world.seen("look", 0, (0, 1))
    (answer,) = messages_of(world.seen("look", 1, (2, 3)), messages.SnapshotReply)
    assert [one.rank for one in answer.snapshots] == [0, 1, 2, 3]
    assert not world.ring(asked, "look")


def test_a_host_that_stays_silent_holds_a_look_up_for_its_time_and_no_longer() -> None:
    world = Scenery(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1, reply={"backend": "gloo"})
    asked = world.say(messages.TakeSnapshots(call="look", ranks=EVERYONE))
    world.seen("look", 0, (0, 1))
    (answer,) = messages_of(world.ring(asked, "look"), messages.SnapshotReply)
    assert [one.source for one in answer.snapshots] == ["inside", "inside", "none", "none"]
    assert len(answer.silent_hosts) == 1


def test_a_look_at_ranks_that_are_all_gone_is_answered_at_once_and_one_at_strangers_is_refused(world: Scenery) -> None:
    world.kill(3)
    (answer,) = messages_of(world.say(messages.TakeSnapshots(call="look", ranks=(3,))), messages.SnapshotReply)
    assert answer.snapshots[0].exited is not None
    (refused,) = messages_of(world.say(messages.TakeSnapshots(call="look", ranks=(9,))), messages.Refused)
    assert "rank 9 is not in this mesh of 4 ranks" in refused.text


# ---- those that watch


def test_nothing_is_sent_while_nobody_watches(world: Scenery) -> None:
    world.run()
    assert not any(watched(world.beat()) for _ in range(5))


def test_who_watches_is_told_everything_once_and_then_what_changed(world: Scenery) -> None:
    world.beat()
    begun = world.watch()
    (whole,) = watched(begun)
    assert whole.call == "w"
    assert [status.rank for status in whole.ranks] == [0, 1, 2, 3]
    world.run()
    world.beat()
    news = world.ring(begun, "news")
    (changed,) = watched(news)
    assert changed.call is None
    assert [(status.rank, status.cell) for status in changed.ranks] == [(rank, "cell 1") for rank in EVERYONE]
    assert changed.calls == ("c1",)
    # A steady mesh says nothing but now and then that it lives.
    world.beat()
    quiet = world.ring(news, "news")
    assert watched(quiet) == []
    for _ in range(4):
        quiet = world.ring(quiet, "news")
    (alive,) = watched(quiet) or watched(world.ring(quiet, "news"))
    assert alive == messages.MeshUpdate(timestamp=alive.timestamp)


def test_a_mirror_that_hears_the_news_shows_what_the_supervisor_knows() -> None:
    world, mirror = Scenery(), MeshSnapshot()
    steps = world.watch(history_s=60.0)
    frame = Frame(file="<cell 1>", line=3, function="f")

    def hear(steps: list[s.Effect]) -> list[s.Effect]:
        nonlocal mirror
        for update in watched(steps):
            mirror = apply_update(mirror, update)
        return steps

    hear(steps)
    world.run()
    reduce = CollectiveInfo(op="all_reduce", group="0", group_ranks=EVERYONE, seq=1, frame=frame, began_s_ago=0.5)
    world.beat({1: {"collectives": (reduce,), "scalars": (Scalar("loss", 7, 0.25, 0.5),)}})
    steps = hear(world.ring(steps, "news"))
    assert mirror.ranks[1].waits_in == "all_reduce #1"
    assert mirror.collectives[1][0].ended_at is None
    assert [(step, value) for step, value, _ in mirror.scalars.points("loss", 1)] == [(7, 0.25)]
    failed = msgspec.structs.replace(reduce, began_s_ago=1.5, ended_s_ago=0.2, failure="rank 2 was killed")
    world.beat({1: {"collectives": (failed,)}})
    world.finish("c1")
    world.kill(2)
    hear(world.ring(steps, "news"))
    assert mirror.ranks[1].waits_in is None
    assert mirror.collectives[1][0].ended_at is not None
    assert mirror.collectives[1][0].failure == "rank 2 was killed"
    assert mirror.ranks[2].state == "dead"
    assert mirror.calls == ()
    assert mirror.ranks == watched(world.watch())[0].ranks


def test_a_front_end_that_vanishes_is_told_nothing_more(world: Scenery) -> None:
    world.join("two", observer=True)
    begun = world.watch("two")
    world.state.client_disconnected("two", world.now)
    world.run()
    world.beat()
    assert not world.ring(begun, "news")


def test_who_says_0_is_told_nothing_more_and_a_question_changes_nothing(world: Scenery) -> None:
    begun = world.watch()
    (answer,) = watched(world.watch(max_updates_per_s=0.0, history_s=1.0))
    assert answer.call == "w"
    assert answer.ranks
    assert world.ring(begun, "news")
    world.watch(max_updates_per_s=0.0)
    assert not world.ring(begun, "news")


# ---- cells that stand still


@pytest.mark.parametrize("ranks", [EVERYONE, (0, 1, 2)])
def test_a_cell_that_stands_still_is_explained_once_under_it_also_if_who_is_to_blame_is_not_in_it(
    world: Scenery, ranks: tuple[int, ...]
) -> None:
    begun = world.watch()
    ticks = world.run(ranks=ranks)
    asked: list[messages.TakeSnapshots] = []
    while not asked:
        assert world.now < 12.0
        world.beat()
        world.now -= 1.0  # the alarm has the second for itself
        ticks = world.ring(ticks, "tick")
        asked = messages_of(ticks, messages.TakeSnapshots)
    again = world.ring(world.seen(asked[0].call), "again")
    (second,) = messages_of(again, messages.TakeSnapshots)
    reported = world.seen(second.call)
    assert world.now < 13.0
    (output,) = messages_of(reported, messages.CallOutput)
    assert steps_of(reported, s.SendToClient)[0].client == "one"
    assert "rank 3" in str(output.items[0]).lower()
    assert "all_reduce #41" in str(output.items[0])
    looked_at = world.state.wall_time(world.now)
    assert f"looked at {datetime.fromtimestamp(looked_at):%H:%M:%S}\n" in str(output.items[0].item.text)
    (news,) = watched(world.ring(begun, "news"))
    assert [(found["ranks"], found["looked_at"]) for found in news.findings or ()] == [([3], looked_at)]
    for _ in range(100):
        assert not messages_of(world.beat(), messages.CallOutput)
        ticks = world.ring(ticks, "tick")
        assert not messages_of(ticks, messages.TakeSnapshots)
    moved = {rank: {"health": Health(cpu_percent=1.0, num_collectives=5)} for rank in ranks}
    (withdrawn,) = messages_of(world.beat(moved), messages.CallOutput)
    assert "this cell goes on" in str(withdrawn.items[0])
    assert not messages_of(world.beat(moved), messages.CallOutput)
    world.finish("c1", ranks=ranks)
    assert watched(world.watch())[0].findings == ()


# ---- commands behind a Stop


def test_a_cell_sent_after_a_stop_waits_until_the_ranks_are_back_and_the_groups_are_whole(busy: Scenery) -> None:
    busy.say(messages.Interrupt(ranks=EVERYONE, target="c1"))
    assert not steps_of(busy.run("c2"), s.SendToHosts)
    back = busy.finish("c1", status="interrupted", groups_broken=True)
    sent = [step.message for step in steps_of(back, s.SendToHosts)]
    assert [type(message) for message in sent] == [messages.FormGroups, messages.RunCell]
    assert messages_of(busy.finish("c2"), messages.CallFinished)[0].outcomes[0].outcome.status == "ok"


def test_a_cell_behind_a_stop_waits_no_longer_than_a_stubborn_rank_is_given(busy: Scenery) -> None:
    stopped = busy.say(messages.Interrupt(ranks=EVERYONE))
    busy.host(messages.CallProgressed(call="c1", done=(0,)))
    busy.run("c2", ranks=(0,))
    released = busy.ring(stopped, "release")
    assert [message.call for message in messages_of(released, messages.RunCell)] == ["c2"]


def test_a_cell_behind_a_slow_stop_waits_for_the_groups_although_all_ranks_are_known_to_be_back(busy: Scenery) -> None:
    stopped = busy.say(messages.Interrupt(ranks=EVERYONE))
    busy.run("c2")
    assert not messages_of(busy.ring(stopped, "release"), messages.RunCell)
    assert not messages_of(busy.host(messages.CallProgressed(call="c1", done=EVERYONE)), messages.RunCell)
    sent = steps_of(busy.finish("c1", status="interrupted", groups_broken=True), s.SendToHosts)
    assert [type(step.message) for step in sent] == [messages.FormGroups, messages.RunCell]


def test_a_cell_behind_another_waits_for_it_where_a_stop_has_broken_the_groups_meanwhile(busy: Scenery) -> None:
    busy.run("c2")
    busy.say(messages.Interrupt(ranks=EVERYONE, target="c2"))
    busy.finish("c2", status="interrupted", groups_broken=True)
    assert not messages_of(busy.run("c3"), messages.RunCell)  # it would come behind c1, and before the groups
    assert [message.call for message in messages_of(busy.run("c4", ranks=(0,)), messages.RunCell)] == []
    sent = steps_of(busy.finish("c1"), s.SendToHosts)
    assert [getattr(step.message, "call", "")[:2] for step in sent] == ["fo", "c3", "c4"]


def test_a_cell_behind_another_whose_end_is_on_its_way_waits_for_the_groups(busy: Scenery) -> None:
    busy.run("c2")
    busy.say(messages.Interrupt(ranks=EVERYONE, target="c2"))
    busy.finish("c2", status="interrupted", groups_broken=True)
    busy.host(messages.CallProgressed(call="c1", done=EVERYONE))
    assert not messages_of(busy.run("c3"), messages.RunCell)
    sent = steps_of(busy.finish("c1"), s.SendToHosts)
    assert [type(step.message) for step in sent] == [messages.FormGroups, messages.RunCell]


@pytest.mark.parametrize("end", ["back", "gone"])
def test_a_cell_of_a_stubborn_rank_itself_waits_until_it_is_back_or_ends_when_it_is_dead(end: str) -> None:
    world = Scenery()
    world.run("c1")
    stopped = world.say(messages.Interrupt(ranks=EVERYONE))
    world.host(messages.CallProgressed(call="c1", done=(0, 2, 3)))
    world.run("c2")
    world.run("c3", ranks=(0,))
    world.run("c4", ranks=(1, 2))
    assert not messages_of(world.ring(stopped, "release"), messages.RunCell)
    if end == "back":
        steps = world.finish("c1", status="interrupted", groups_broken=True)
        assert [type(message) for message in messages_of(steps, messages.FormGroups)] == [messages.FormGroups]
        assert [message.call for message in messages_of(steps, messages.RunCell)] == ["c2", "c3", "c4"]
    else:
        lost = {"exit_code": None, "signal": 9, "host": "box1", "last_lines": (), "last_collective": None}
        steps = world.host(messages.RankExited(rank=1, pid=101, **lost))  # type: ignore[arg-type]
        ended = [message.call for message in messages_of(steps, messages.CallFinished)]
        steps += world.finish("c1", status="interrupted", ranks=(0, 2, 3))
        assert (ended, [message.call for message in messages_of(steps, messages.RunCell)]) == (["c2", "c4"], ["c3"])


def test_a_cell_behind_two_stops_waits_until_the_second_has_had_its_time_too(world: Scenery) -> None:
    world.run("c1", ranks=(0,))
    world.run("c2", ranks=(1,))
    first = world.say(messages.Interrupt(ranks=(0,), target="c1"))
    world.now += 1.5
    second = world.say(messages.Interrupt(ranks=(1,), target="c2"))
    world.run("c3", ranks=(2,))
    world.now -= 1.5  # `ring` waits for an alarm from where it was set
    assert not messages_of(world.ring(first, "release"), messages.RunCell)
    world.now -= 0.5
    assert [message.call for message in messages_of(world.ring(second, "release"), messages.RunCell)] == ["c3"]


def test_a_stop_also_ends_a_cell_that_waits_behind_a_stop(busy: Scenery) -> None:
    busy.say(messages.Interrupt(ranks=EVERYONE, target="c1"))
    busy.run("c2")
    (ended,) = messages_of(busy.say(messages.Interrupt(ranks=EVERYONE, target="c2")), messages.CallFinished)
    assert (ended.call, ended.outcomes[0].outcome.status) == ("c2", "interrupted")
    assert not messages_of(busy.finish("c1", status="interrupted"), messages.RunCell)


def test_a_stop_of_other_ranks_leaves_a_cell_that_waits_behind_a_stop_alone(busy: Scenery) -> None:
    busy.say(messages.Interrupt(ranks=EVERYONE, target="c1"))
    busy.run("c2", ranks=(2, 3))
    assert not messages_of(busy.say(messages.Interrupt(ranks=(0, 1))), messages.CallFinished)
    ended = busy.finish("c1", status="interrupted")
    assert messages_of(busy.in_step(ended), messages.RunCell)[0].call == "c2"
