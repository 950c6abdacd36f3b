"""Searches in logs: which hosts are asked, what is passed on, and what a lost host is answered for with."""

from __future__ import annotations

from typing import Any

from meshbook.supervisor import effects as s
from meshbook.wire import codec, messages
from tests.supervisor.test_state import World, messages_of, steps_of


def two_hosts() -> World:
    world = World(num_hosts=2)
    world.finish("form-1", host=1, reply={"backend": "gloo"})
    return world


def ask(world: World, command: Any, client: str = "one") -> list[s.Effect]:
    return world.state.command_received(client, command, codec.encode_body(command), world.now)


def found(world: World, host: int, *, ended: bool = True) -> list[messages.LogsFound]:
    kept = messages.KeptLogs(host="", since=None, num_bytes=0, limit_bytes=1)
    report = messages.LogsFound(call="one-1", kept=kept, ended=ended)  # type: ignore[arg-type]
    return messages_of(world.state.report_received(host, report, world.now), messages.LogsFound)


SEARCH = messages.SearchLogs(call="one-1", pattern="nan")  # type: ignore[arg-type]


def test_all_hosts_search_and_the_last_one_ends_it() -> None:
    world = two_hosts()
    (sent,) = steps_of(ask(world, SEARCH), s.SendToHosts)
    assert sent.hosts == (0, 1)
    (first,) = found(world, 1)
    assert first.kept is not None
    assert (first.ended, first.kept.host) == (False, "host 1")
    assert [report.ended for report in found(world, 0)] == [True]
    assert found(world, 0) == []  # it is over


def test_a_host_that_is_lost_meanwhile_is_answered_for() -> None:
    world = two_hosts()
    ask(world, SEARCH)
    found(world, 0)
    (report,) = messages_of(world.state.host_exited(1, "was killed by SIGKILL", world.now), messages.LogsFound)
    assert report.ended
    assert report.problem == "host 1 was killed by SIGKILL: what its ranks printed cannot be read"
    (sent,) = steps_of(ask(world, SEARCH), s.SendToHosts)
    assert sent.hosts == (0,)


def test_a_host_that_is_lost_is_answered_for_in_the_tail_of_a_ranks_output_too() -> None:
    world = two_hosts()
    query = messages.QueryLogs(call="one-2", rank=3)  # type: ignore[arg-type]
    ask(world, query)
    effects = world.state.host_exited(1, "was killed by SIGKILL", world.now)
    (reply,) = messages_of(effects, messages.CommandReply)
    assert "cannot be read" in (reply.text or "")


def test_the_log_of_a_host_is_found_by_its_name_and_says_how_it_was_lost() -> None:
    world = two_hosts()
    world.state.machines.read_log = lambda host, limit_bytes: f"words of {host}\n"

    def said(name: str) -> list[str | None]:
        query = messages.QueryHostLog(call="one-2", host=name)  # type: ignore[arg-type]
        return [reply.text for reply in messages_of(ask(world, query), messages.CommandReply)]

    assert (said("host 1"), said("1"), said("0")) == (["words of 1\n"], ["words of 1\n"], ["words of 0\n"])
    world.state.host_exited(1, "was killed by SIGKILL", world.now)
    assert said("1") == ["words of 1\nhost 1 was killed by SIGKILL\n"]


def test_a_host_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    query = messages.QueryHostLog(call="one-2", host="gpu7")  # type: ignore[arg-type]
    (refused,) = messages_of(ask(two_hosts(), query), messages.Refused)
    assert (refused.error, refused.text) == (
        "UsageError",
        "there is no host 'gpu7' in this mesh; its hosts: host 0, host 1",
    )


def test_a_client_that_is_gone_or_ends_its_search_ends_those_of_hosts() -> None:
    world = two_hosts()
    ask(world, SEARCH)
    found(world, 0)
    effects = ask(world, messages.EndLogSearch(call="one-1"))  # type: ignore[arg-type]
    (sent,) = steps_of(effects, s.SendToHosts)
    assert (sent.hosts, type(sent.message)) == ((1,), messages.EndLogSearch)
    ask(world, SEARCH)
    effects = world.state.client_disconnected("one", world.now)
    assert messages_of(effects, messages.EndLogSearch)


def test_a_client_cannot_end_anothers_search() -> None:
    world = World()
    world.join("two")
    ask(world, SEARCH)
    assert ask(world, messages.EndLogSearch(call="one-1"), client="two") == []  # type: ignore[arg-type]
    assert found(world, 0)


def test_a_rank_that_is_not_there_is_refused() -> None:
    world = World()
    (refused,) = messages_of(ask(world, messages.SearchLogs(call="one-1", ranks=(2, 9))), messages.Refused)  # type: ignore[arg-type]
    assert refused.text == "rank 9 is not in this mesh of ranks 0-3"
