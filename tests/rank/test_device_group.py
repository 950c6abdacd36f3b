"""Groups whose collectives return before they are done, as NCCL's do: what is seen of them, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.errors import RankLost
from tests.rank.worlds import ForkServer, RankContext, World

pytestmark = pytest.mark.usefixtures("starts_processes")


@pytest.fixture(scope="module")
def forker() -> Iterator[ForkServer]:
    with ForkServer() as forker:
        yield forker


@pytest.fixture
def trio(forker: ForkServer) -> Iterator[World]:
    with World(forker, {"rank": 3}) as world:
        world.run(use_device)
        world.form_groups()
        yield world


def use_device(here: RankContext) -> None:
    from tests.rank import device_group

    here.stored["stream"] = device_group.install()


def launch(here: RankContext, *, async_op: bool = False) -> int:
    """Enqueue an all_reduce; return how many collectives run then."""
    import torch
    import torch.distributed as dist

    here.stored["x"] = torch.ones(4)
    here.stored["work"] = dist.all_reduce(here.stored["x"], async_op=async_op)
    return len(here.ring.running())


def read(here: RankContext) -> list[float]:
    """Wait for the stream, as `.item()` does, and read what it has written."""
    here.stored["stream"].synchronize()
    values: list[float] = here.stored["x"].tolist()
    return values


def state(here: RankContext) -> tuple[int, bool, tuple[str | None, ...]]:
    """How many collectives run, whether groups are broken, and with what the collectives ended."""
    running = here.ring.running()
    return len(running), here.groups.is_broken, tuple(one.error for one in here.ring.snapshot())


def num_begun(here: RankContext) -> int:
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    return int(world.label.num_begun)


def abort(here: RankContext) -> None:
    here.groups.abort(RankLost("rank 2 was lost"))


def first_two(world: World, function: Any) -> list[Any]:
    for member in world.members[:2]:
        member.start(function)
    return [member.result() for member in world.members[:2]]


def test_a_collective_returns_before_it_is_done_and_is_seen_to_run_until_it_is(trio: World) -> None:
    assert first_two(trio, launch) == [1, 1]
    assert trio.run(num_begun) == [1, 1, 0]
    trio.members[2].run(launch)
    assert trio.run(read) == [[3.0] * 4] * 3
    assert trio.run(state) == [(0, False, (None,))] * 3


def test_who_waits_for_the_device_is_freed_by_an_abort_and_hears_of_it_in_the_next_collective(trio: World) -> None:
    first_two(trio, launch)
    for member in trio.members[:2]:
        member.start(read)
    for member in trio.members[:2]:
        member.run_in_service_thread(abort)
    for member in trio.members[:2]:
        assert all(value != value for value in member.result())  # garbage, and no error
        assert "rank 2 was lost" in str(member.error_of(launch))
    trio.form_groups()
    trio.run(launch)
    assert trio.run(read) == [[3.0] * 4] * 3
    assert trio.run(num_begun) == [1, 1, 1]


def test_the_death_of_a_member_fails_nothing_by_itself_and_a_new_one_joins_after_the_abort(trio: World) -> None:
    first_two(trio, launch)
    trio.members[2].kill()
    for member in trio.members[:2]:
        assert all(value != value for value in member.run(read))
        assert member.run(state) == (0, False, (None,))
        member.run_in_service_thread(abort)
        assert member.run(state)[1]
    trio.replace(2)
    trio.members[2].run(use_device)
    trio.form_groups()
    trio.run(launch)
    assert trio.run(read) == [[3.0] * 4] * 3


def launch_async(here: RankContext) -> int:
    return launch(here, async_op=True)


def test_an_asynchronous_collective_is_known_to_run_without_a_wait_and_ends_unwaited(trio: World) -> None:
    assert first_two(trio, launch_async) == [1, 1]
    trio.members[2].run(launch_async)
    trio.run(read)
    assert [number for number, *_ in trio.run(state)] == [0, 0, 0]
