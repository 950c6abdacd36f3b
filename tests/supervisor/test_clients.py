"""Who is attached, and when a mesh that nobody is attached to ends."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.supervisor.clients import EMPTY_TTL_S, ORPHAN_TTL_S, Clients
from meshbook.supervisor.effects import SetTimer
from meshbook.wire.messages import Hello


def joined(*names: str, **options: Any) -> Clients:
    clients = Clients()
    for name in names:
        clients.join(Hello(token="", client=name, kind="script", pid=2, channel="receive", **options))
    return clients


def test_the_last_client_that_leaves_sets_the_timer_and_the_ones_before_do_not() -> None:
    clients = joined("one", "two")
    assert clients.leave("one")[1] == []
    client, (timer,) = clients.leave("two")
    assert client is not None
    assert isinstance(timer, SetTimer)
    assert timer.delay_s == ORPHAN_TTL_S
    assert clients.is_orphaned(timer.name.split()[1])
    assert clients.leave("two") == (None, [])


def test_a_timer_means_nothing_once_somebody_has_come_back() -> None:
    clients = joined("one")
    (timer,) = clients.leave("one")[1]
    assert isinstance(timer, SetTimer)
    clients.join(Hello(token="", client="two", kind="script", pid=2, channel="receive"))
    assert not clients.is_orphaned(timer.name.split()[1])


def test_an_observer_that_leaves_or_comes_changes_nothing() -> None:
    clients = joined("viewer", observer=True)
    assert clients.is_orphaned("0")
    assert clients.leave("viewer")[1] == []


def test_a_mesh_that_shall_live_for_ever_gets_no_timer() -> None:
    assert joined("one", orphan_ttl_s=float("inf")).leave("one")[1] == []


@pytest.mark.parametrize(("requested", "given"), [(float("inf"), EMPTY_TTL_S), (0.5, 0.5)])
def test_a_mesh_without_ranks_ends_soon_whatever_its_last_client_requested(requested: float, given: float) -> None:
    assert joined("one", orphan_ttl_s=requested).leave("one", is_empty=True)[1] == [SetTimer("orphan 2", given)]
