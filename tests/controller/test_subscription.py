"""Subscriptions of one connection: one for all of them, with one snapshot. The supervisor is a list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.controller.connection import ConnectionListeners
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription, apply_update, fetch_snapshot
from meshbook.errors import MeshTimeout
from meshbook.wire.messages import MeshSummary, MeshUpdate, RankStatus, ScalarPoint, Subscribe


class Connection:
    """A connection whose supervisor answers each Subscribe with one rank."""

    def __init__(self) -> None:
        self.listeners = ConnectionListeners()
        self.connection_info = SimpleNamespace(name="mesh")
        self.sent: list[Subscribe] = []
        self.answers = True

    def next_call_id(self) -> str:
        return f"c{len(self.sent)}"

    def send(self, command: Subscribe) -> None:
        self.sent.append(command)

    def request(self, command: Subscribe) -> Any:
        self.send(command)
        update = MeshUpdate(
            timestamp=1.0, call=command.call, mesh=MeshSummary(name="mesh"), ranks=(RankStatus(rank=0),)
        )
        if self.answers:
            self.hear(update)

        def result(timeout: float) -> MeshUpdate:
            if not self.answers:
                raise TimeoutError
            return update

        return SimpleNamespace(result=result)

    def describe_silence(self) -> str:
        return "the supervisor of mesh does not answer"

    def hear(self, update: MeshUpdate) -> None:
        for handler in self.listeners.report_handlers.values():
            handler(update)


def subscribed(connection: Connection, **options: Any) -> MeshSubscription:
    return MeshSubscription(connection, **options)  # type: ignore[arg-type]


def test_all_ask_for_the_highest_rate_and_the_longest_past_and_the_last_one_ends_it() -> None:
    connection = Connection()
    one = subscribed(connection, max_updates_per_s=1.0, history_s=1e9)
    two = subscribed(connection, max_updates_per_s=5.0, history_s=60.0)
    assert [(sent.max_updates_per_s, sent.history_s) for sent in connection.sent] == [(1.0, 1e9), (5.0, 1e9)]
    one.close()
    one.close()
    assert len(connection.sent) == 2
    two.close()
    assert (connection.sent[-1].max_updates_per_s, connection.sent[-1].history_s) == (0.0, 0.0)


def test_the_answer_to_another_question_is_not_news() -> None:
    connection = Connection()
    with subscribed(connection) as subscription:
        before = subscription.snapshot
        assert fetch_snapshot(connection, history_s=1.0).ranks == before.ranks  # type: ignore[arg-type]
        assert subscription.snapshot is before
        connection.hear(MeshUpdate(timestamp=2.0, ranks=(RankStatus(rank=1, line=7),)))
        assert [(rank.rank, rank.line) for rank in subscription.snapshot.ranks] == [(0, None), (1, 7)]
    connection.hear(MeshUpdate(timestamp=3.0))
    assert subscription.snapshot.at == 2.0


def test_a_listener_that_fails_keeps_nothing_from_the_others() -> None:
    connection, seen = Connection(), list[MeshSnapshot]()
    one, two = subscribed(connection), subscribed(connection)
    one.listeners.append(lambda snapshot: {}["missing"])
    two.listeners.append(seen.append)
    connection.hear(MeshUpdate(timestamp=2.0))
    for stopped in connection.listeners.mesh_stopped:
        stopped("stopped by a script")
    assert [(snapshot.at, snapshot.ended) for snapshot in seen] == [(2.0, None), (2.0, "stopped by a script")]
    assert one.snapshot.ranks[0].state == "dead"


def test_a_supervisor_that_does_not_answer_is_named_and_nothing_stays_subscribed() -> None:
    connection = Connection()
    connection.answers = False
    with pytest.raises(MeshTimeout, match="the supervisor of mesh does not answer"):
        subscribed(connection)
    connection.answers = True
    subscribed(connection, max_updates_per_s=0.5)
    assert connection.sent[-1].max_updates_per_s == 0.5


def test_a_reply_replaces_what_was_known_and_an_update_adds_to_it() -> None:
    point = ScalarPoint("loss", 0, 1, 0.5, 1.0)
    old = apply_update(MeshSnapshot(), MeshUpdate(timestamp=1.0, calls=("c1",), scalars=(point,)))
    later = apply_update(old, MeshUpdate(timestamp=2.0, ranks=(RankStatus(rank=0, rss_bytes=5),)))
    assert (later.calls, later.scalars.names) == (("c1",), ("loss",))
    assert later.series.points("rss_bytes", 0) == [(2.0, 5.0)]
    fresh = apply_update(later, MeshUpdate(timestamp=3.0, call="again"))  # type: ignore[arg-type]
    assert (fresh.calls, fresh.scalars.names, fresh.ranks) == ((), (), ())
