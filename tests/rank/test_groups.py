"""The process groups of a rank when something goes wrong: interrupted, severed, bereft of a member, formed again.

Functions that take `here` run in ranks: real processes, which are really killed.
"""

from __future__ import annotations

import datetime
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.errors import MeshShapeError, RankLost
from meshbook.rank.process_groups import positions
from tests.budget import WAIT_S, when
from tests.rank.worlds import ForkServer, FunctionFailed, RankContext, RankHandle, World, wait_until_stuck

pytestmark = pytest.mark.usefixtures("starts_processes")

# Seconds in which a stuck wait must be over. The promise is 0.15 s for a signal and 0.2 s for severing; a test asserts
# what cannot be an accident of a busy machine: far less than the 1,800 s that gloo itself would wait.
SOON_S = WAIT_S


@pytest.fixture(scope="module")
def forker() -> Iterator[ForkServer]:
    with ForkServer() as forker:
        yield forker


@pytest.fixture
def trio(forker: ForkServer) -> Iterator[World]:
    """A small world of a test's own, to be broken."""
    with World(forker, {"rank": 3}) as world:
        yield world


# ---------------------------------------------------------------------------------------------------------------------
# Stuck: the last rank never joins


def wait_in(here: RankContext, kind: str) -> str:
    """Ranks but the last enter a collective, each kind as users reach it; the last one stays away."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional_collectives
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn.parallel import DistributedDataParallel

    absent = here.size - 1
    x = torch.ones(here.size)
    world: Any = dist.group.WORLD
    model = DistributedDataParallel(torch.nn.Linear(4, 4)) if kind == "ddp" else None
    if here.rank == absent:
        return "stayed away"
    if kind == "all_reduce":
        dist.all_reduce(x)
    elif kind == "async":
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
    elif kind == "async with a limit":
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait(timeout=datetime.timedelta(seconds=600))
    elif kind == "barrier":
        dist.barrier()
    elif kind == "recv":
        dist.recv(x, absent)
    elif kind == "objects":
        dist.all_gather_object([None] * here.size, here.rank)
    elif kind == "functional":
        print(functional_collectives.all_reduce(x, "sum", world) + 1)
    elif kind == "dtensor":
        DTensor.from_local(x, here.mesh, [Shard(0)], run_check=False).full_tensor()
    elif kind == "monitored_barrier":
        dist.monitored_barrier()
    elif kind == "future":
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.get_future().wait()
    elif kind == "ddp":
        assert model is not None
        model(torch.ones(1, 4)).sum().backward()
    elif kind == "new_group":
        dist.new_group(list(range(here.size)))
    return "came through"


# Where the wait is in Python, in slices.
SLICED = ["all_reduce", "async", "async with a limit", "barrier", "objects", "functional", "dtensor"]
# Where it is one call into C++, which no signal ends.
WHOLE = ["recv", "monitored_barrier", "future", "ddp"]


def scatter_sums(here: RankContext, kind: str) -> None:
    import torch
    import torch.distributed as dist

    if here.rank == here.size - 1:
        return
    whole = torch.ones(here.size)
    if kind == "async":
        work = dist.reduce_scatter_tensor(torch.zeros(1), whole, async_op=True)
        assert work is not None
        work.wait()
    else:
        dist.reduce_scatter_tensor(torch.zeros(1), whole)


def sever(here: RankContext, error: BaseException) -> None:
    here.groups.abort(error)


def is_waiting(here: RankContext) -> bool:
    return bool(here.groups.is_waiting)


def last_entry(here: RankContext) -> tuple[Any, ...]:
    running = [c.op for c in here.ring.running()]
    return (here.groups.is_broken, here.groups.failure_reason, running, here.ring.last.t_end is not None)


def try_again(here: RankContext) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def is_broken(here: RankContext) -> bool:
    return bool(here.groups.is_broken)


def total(here: RankContext) -> float:
    """A sum over each group of the mesh and the world."""
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(here.rank + 1))
    for group in (None, *here.mesh.get_all_groups()):
        dist.all_reduce(x, group=group)
    assert not here.groups.is_broken
    assert here.ring.running() == ()
    return x.item()


def get_stuck(world: World, kind: str) -> list[RankHandle]:
    """The ranks that are stuck now."""
    for member in world.members:
        member.start(wait_in, kind)
    assert world.members[-1].result() == "stayed away"
    if kind == "ddp":  # whose model is made with collectives of its own
        wait_until_stuck(world.members[:-1])
    for member in world.members[:-1]:
        member.wait_until_stuck()
    return world.members[:-1]


def test_a_stuck_collective_ends_when_interrupted(trio: World) -> None:
    for kind in SLICED:
        stuck = get_stuck(trio, kind)
        for member in stuck:
            member.signal(signal.SIGINT)
        for member in stuck:
            assert type(member.error(SOON_S)) is KeyboardInterrupt, kind
            broken, reason, running, ended = member.run_in_service_thread(last_entry)
            assert broken, kind
            assert reason.endswith("was interrupted"), kind
            assert (running, ended) == ([], True), kind
            assert type(member.error_of(try_again)).__name__ == "GroupBroken"
        trio.form_groups()
        assert trio.run(total) == [18.0] * 3


@pytest.mark.parametrize(
    "error", [RankLost("rank 2 was killed", ranks=[2]), KeyboardInterrupt("stop")], ids=["lost", "stop"]
)
def test_a_stuck_collective_ends_with_the_error_it_is_severed_with(trio: World, error: BaseException) -> None:
    for kind in [*SLICED, *WHOLE]:
        stuck = get_stuck(trio, kind)
        for member in stuck:
            assert member.run_in_service_thread(is_waiting)
            member.run_in_service_thread(sever, error)
        for member in stuck:
            seen = member.error(SOON_S)
            assert type(seen) is type(error), f"{kind}: {seen!r}"
            assert str(seen) == str(error), kind
            assert getattr(seen, "ranks", None) == getattr(error, "ranks", None)
            assert member.run_in_service_thread(last_entry) == (True, str(error), [], True), kind
            assert not member.run_in_service_thread(is_waiting)
        trio.form_groups()
        assert trio.run(total) == [18.0] * 3


def test_a_signal_that_waits_in_c_and_the_severing_that_frees_it_are_one_interrupt(trio: World) -> None:
    """What Stop does to a wait that no signal ends: SIGINT first, severing when that had no effect."""
    for kind in WHOLE:
        stuck = get_stuck(trio, kind)
        for member in stuck:
            member.signal(signal.SIGINT)
        for member in stuck:
            member.run_in_service_thread(sever, KeyboardInterrupt("stop"))
        for member in stuck:
            assert type(member.error(SOON_S)) is KeyboardInterrupt, kind
            assert member.run_in_service_thread(last_entry)[2:] == ([], True), kind
        trio.form_groups()
        assert trio.run(total) == [18.0] * 3


def test_a_rank_that_waits_for_others_to_make_a_group_is_freed_too(trio: World) -> None:
    for member in trio.members:
        member.start(wait_in, "new_group")
    assert trio.members[-1].result() == "stayed away"
    for member in trio.members[:-1]:
        member.run_in_service_thread(wait_until_reaching)
        member.run_in_service_thread(sever, RankLost("gone"))
    for member in trio.members[:-1]:
        assert type(member.error(SOON_S)) is RankLost
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def test_a_rank_severed_between_two_questions_to_the_store_waits_for_nobody(trio: World) -> None:
    for member in trio.members:
        member.start(sever_while_reaching)
    assert trio.members[-1].result() == "stayed away"
    for member in trio.members[:-1]:
        assert type(member.error(SOON_S)) is RankLost
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def sever_while_reaching(here: RankContext) -> str:
    link = here.groups.connector._connect_backend

    def ask_and_be_severed(kind: str, store: Any, group: Any) -> Any:
        store.set("asked", "1")
        here.groups.abort(RankLost("gone"))
        return link(kind, store, group)

    here.groups.connector._connect_backend = ask_and_be_severed
    try:
        return wait_in(here, "new_group")
    finally:
        here.groups.connector._connect_backend = link


def wait_until_reaching(here: RankContext) -> None:
    when(lambda: here.groups.is_waiting)
    assert here.ring.running() == ()


@pytest.mark.parametrize("kind", ["at once", "async"])
def test_a_reduce_scatter_ends_when_the_rank_that_it_waits_for_has_severed_its_connections(
    trio: World, kind: str
) -> None:
    # gloo's Work of a reduce_scatter says for ever that it is not completed, so that this is no sign of a slice's end.
    for member in trio.members:
        member.start(scatter_sums, kind)
    trio.members[-1].result()
    for member in trio.members[:-1]:
        member.wait_until_stuck()
    trio.members[-1].run_in_service_thread(sever, RankLost("gone"))
    for member in trio.members[:-1]:
        assert isinstance(member.error(), RuntimeError)
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def hold(here: RankContext) -> None:
    here.groups.table.hold()


def go_on(here: RankContext) -> None:
    here.groups.table.resume()


def break_the_world(here: RankContext) -> None:
    import torch.distributed as dist

    name = dist.group.WORLD.group_name
    here.groups.invalidate_named((name,), "out of step", generation=here.groups.generation)
    here.groups.table.resume()


def is_main_thread_in(function: str) -> bool:
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    return any(frame.f_code.co_name == function for frame, _ in stack)


def wait_until_held(here: RankContext) -> None:
    when(lambda: is_main_thread_in("wait_until_allowed"), "a collective that waits to begin")


def test_a_collective_that_is_held_begins_when_it_is_known_that_ranks_are_in_step(trio: World) -> None:
    for member in trio.members:
        member.run_in_service_thread(hold)
        member.start(total)
    for member in trio.members:
        member.run_in_service_thread(wait_until_held)
    for member in trio.members:
        member.run_in_service_thread(go_on)
    assert [member.result() for member in trio.members] == [18.0] * 3


def test_a_collective_that_is_held_is_refused_when_its_group_is_out_of_step(trio: World) -> None:
    for member in trio.members:
        member.run_in_service_thread(hold)
        member.start(try_again)
    for member in trio.members:
        member.run_in_service_thread(wait_until_held)
        member.run_in_service_thread(break_the_world)
        error = member.error()
        assert type(error).__name__ == "GroupBroken"
        assert "out of step" in str(error)
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def fail_a_batch(here: RankContext) -> tuple[bool, int]:
    """A coalesced call whose end raises: what the ring says, and whether the group counts as broken."""
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD

    class Failing:
        def _end_coalescing(self, device: Any) -> Any:
            raise RuntimeError("out of memory")

    record = here.ring.begin("all_reduce", group.label, [torch.ones(1)])
    inner, group._inner = group._inner, Failing()
    group._coalescing = [record]
    try:
        group._end_coalescing(torch.device("cpu"))
    except RuntimeError:
        pass
    finally:
        group._inner = inner
    return group.health.failure is not None, len(here.ring.running())


def test_a_batch_whose_end_raises_is_not_under_way_any_more_and_breaks_its_group(trio: World) -> None:
    assert trio.run(fail_a_batch) == [(True, 0)] * 3
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def make_a_group(here: RankContext) -> None:
    import torch.distributed as dist

    dist.new_group([0, 1, 2])


def test_after_a_break_no_new_group_is_begun(trio: World) -> None:
    """Its other members may not come: they have groups that work, or none."""
    trio.members[0].run_in_service_thread(sever, KeyboardInterrupt("stop"))
    error = trio.members[0].error_of(make_a_group)
    assert type(error).__name__ == "GroupBroken"
    assert "(stop)" in str(error)


def user_sockets(here: RankContext) -> None:
    """Connections of the user's own, one of them to a listener that was there before the groups were formed again."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    here.stored["sockets"] = listener, ours, listener.accept()[0]


def still_talk(here: RankContext) -> bytes:
    _, ours, theirs = here.stored["sockets"]
    ours.sendall(b"still here")
    return bytes(theirs.recv(32))


def test_severing_leaves_connections_of_the_users_own_alone(trio: World) -> None:
    trio.run(user_sockets)
    for member in get_stuck(trio, "all_reduce"):
        member.run_in_service_thread(sever, RankLost("gone"))
        member.error(SOON_S)
    assert trio.run(still_talk) == [b"still here"] * 3


# ---------------------------------------------------------------------------------------------------------------------
# A member dies


def identity(here: RankContext) -> tuple[int, ...]:
    import torch.distributed as dist

    return (id(here.mesh), id(dist.group.WORLD), *(id(group) for group in here.mesh.get_all_groups()))


def wait_for_reasons(here: RankContext) -> None:
    """Have a collective that failed wait for the reason for as long as it takes to tell it."""
    from meshbook.rank.process_groups import group_health

    group_health.ASK_REASON_AFTER_S = SOON_S  # type: ignore[misc]


def wait_for_gloo_to_notice(here: RankContext) -> None:
    """Until the main thread has gloo's error, and waits to hear more."""
    when(lambda: is_main_thread_in("finish_failed"), "gloo's error")


def test_a_death_that_nobody_explains_is_still_an_error(trio: World) -> None:
    stuck = get_stuck(trio, "all_reduce")
    trio.members[-1].kill()
    for member in stuck:
        error = member.error(SOON_S)
        assert isinstance(error, RuntimeError)
        broken, reason, running, _ = member.run_in_service_thread(last_entry)
        assert broken
        assert reason.startswith("all_reduce #")
        assert running == []


def failed_collectives(here: RankContext) -> list[tuple[int, ...]]:
    """The failed ones of each group, as the supervisor is told when it asks."""
    labels = [group.label for group in here.groups.table]
    return [group.failed for group in positions.group_positions(labels, here.ring, 0) if group.num_started]


@pytest.mark.parametrize("kind", ["async", "functional", "dtensor"])
def test_a_collective_that_failed_is_not_taken_for_a_success_before_its_reason_is_known(trio: World, kind: str) -> None:
    """Else it counts as joined, and a member that still waits in it is never released."""
    trio.run(wait_for_reasons)
    stuck = get_stuck(trio, kind)
    trio.members[-1].kill()
    for member in stuck:
        member.run_in_service_thread(wait_for_gloo_to_notice)
        assert member.run_in_service_thread(failed_collectives) == [(1,)]
        member.run_in_service_thread(sever, RankLost("rank 2 was killed"))
    for member in stuck:
        assert type(member.error(SOON_S)) is RankLost


def test_a_receive_that_failed_is_under_way_until_its_reason_is_known(trio: World) -> None:
    trio.run(wait_for_reasons)
    stuck = get_stuck(trio, "recv")
    trio.members[-1].kill()
    for member in stuck:
        member.run_in_service_thread(wait_for_gloo_to_notice)
        assert member.run_in_service_thread(last_entry)[2] == ["recv"]
        member.run_in_service_thread(sever, RankLost("rank 2 was killed"))
    for member in stuck:
        assert type(member.error(SOON_S)) is RankLost


# ---------------------------------------------------------------------------------------------------------------------
# Forming again


def make_pairs(here: RankContext) -> None:
    """Groups of the user's own: one per pair of neighbours."""
    import torch.distributed as dist

    pairs = [dist.new_group([rank, rank + 1]) for rank in range(here.size - 1)]
    here.stored["pairs"] = [pair for pair in pairs if pair is not dist.GroupMember.NON_GROUP_MEMBER]


def use_pairs(here: RankContext) -> list[float]:
    import torch
    import torch.distributed as dist

    sums = []
    for pair in here.stored["pairs"]:
        x = torch.full((1,), float(here.rank))
        dist.all_reduce(x, group=pair)
        sums.append(x.item())
    return sums


def connected(here: RankContext) -> list[bool]:
    return [pair.is_connected for pair in here.stored["pairs"]]


def test_groups_of_the_users_own_are_formed_again(trio: World) -> None:
    trio.run(make_pairs)
    expected = [[1.0], [1.0, 3.0], [3.0]]
    assert trio.run(use_pairs) == expected
    trio.members[0].run_in_service_thread(sever, RankLost("gone"))
    trio.form_groups()
    assert trio.run(connected) == [[True], [True, True], [True]]
    assert trio.run(use_pairs) == expected


def sum_in_a_new_group(here: RankContext) -> float:
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(here.rank))
    dist.all_reduce(x, group=dist.new_group([0, 1, 2]))
    return x.item()


def test_after_a_group_that_some_ranks_alone_tried_to_make_the_next_one_is_made_by_all(trio: World) -> None:
    trio.members[0].start(make_a_group)
    trio.members[0].run_in_service_thread(wait_until_reaching)
    for member in trio.members:
        member.run_in_service_thread(sever, KeyboardInterrupt("stop"))
    assert isinstance(trio.members[0].error(SOON_S), KeyboardInterrupt)
    trio.form_groups()
    assert trio.run(sum_in_a_new_group) == [3.0] * 3


def test_groups_that_a_new_member_has_yet_to_make_wait_for_it(trio: World) -> None:
    trio.run(make_pairs)
    trio.members[2].kill()
    trio.members[0].run_in_service_thread(sever, RankLost("gone"))
    trio.members[1].run_in_service_thread(sever, RankLost("gone"))
    trio.replace(2)
    trio.form_groups()
    assert trio.members[0].run(connected) == [True]
    assert trio.members[1].run(connected) == [True, False]
    trio.members[2].run(make_pairs)  # as a setup cell does, on the new rank alone, and so without waiting for others
    assert trio.run(use_pairs) == [[1.0], [1.0, 3.0], [3.0]]
    assert trio.run(is_broken) == [False] * 3


def sum_in_a_group_that_its_members_make(here: RankContext, lone: tuple[int, ...], members: list[int]) -> float:
    """After a group of its own, on these lone ranks."""
    import torch
    import torch.distributed as dist

    if here.rank in lone:
        dist.new_group([here.rank], use_local_synchronization=True)
    x = torch.full((1,), float(here.rank))
    if here.rank in members:
        dist.all_reduce(x, group=dist.new_group(members, use_local_synchronization=True))
    return x.item()


def test_a_group_that_only_its_members_make_has_one_name_though_one_of_them_has_made_more_groups(trio: World) -> None:
    assert trio.run(sum_in_a_group_that_its_members_make, (0,), [0, 1]) == [1.0, 1.0, 2.0]
    assert trio.run(sum_in_a_group_that_its_members_make, (1, 2), [0, 1]) == [1.0, 1.0, 2.0]
    trio.members[1].kill()
    trio.members[0].run_in_service_thread(sever, RankLost("gone"))
    trio.members[2].run_in_service_thread(sever, RankLost("gone"))
    trio.replace(1)
    trio.form_groups()
    assert trio.run(sum_in_a_group_that_its_members_make, (2,), [0, 1]) == [1.0, 1.0, 2.0]


def begin_and_leave(here: RankContext) -> None:
    import torch
    import torch.distributed as dist

    if here.rank == 0:
        here.stored["stale"] = dist.all_reduce(torch.ones(1), async_op=True)


def wait_for_stale(here: RankContext) -> list[Any]:
    if here.rank != 0:
        return []
    try:
        here.stored.pop("stale").wait()
    except RuntimeError as error:
        return [type(error).__name__, bool(here.groups.is_broken)]
    return ["no error"]


def test_what_was_under_way_before_says_so_and_does_not_break_the_new_groups(trio: World) -> None:
    trio.run(begin_and_leave)
    trio.form_groups()
    assert trio.run(wait_for_stale) == [["GroupBroken", False], [], []]
    assert trio.run(total) == [18.0] * 3


def form_badly(here: RankContext, axes: dict[str, int], epoch: int) -> None:
    import torch
    import zmq

    from meshbook.rank.process_groups.store import MeshStore

    store = here.stored["bad store"] = MeshStore(zmq.Context(), "ipc:///nowhere", "")
    here.groups.form(
        epoch, rank=here.rank, world_size=here.size, store=store, device=torch.device("cpu"),
        timeout_s=1.0, axes=axes,
    )  # fmt: skip


def test_axes_that_do_not_make_the_world_are_refused_with_the_sum(trio: World) -> None:
    error = trio.members[0].error_of(form_badly, {"dp": 2, "tp": 2}, trio.generation + 1)
    assert type(error) is MeshShapeError
    assert str(error) == (
        "mesh axes dp=2 * tp=2 need 4 ranks, but the world has 3; change an axis or the number of ranks"
    )
    assert trio.run(total) == [18.0] * 3


def test_an_epoch_that_has_passed_is_refused(trio: World) -> None:
    error = trio.members[0].error_of(form_badly, {"rank": 3}, trio.generation)
    assert type(error) is ValueError
    assert trio.run(total) == [18.0] * 3


def test_forming_that_fails_can_be_tried_again(trio: World) -> None:
    for member in trio.members:
        member.start(form_badly, {"rank": 3}, trio.generation + 1)  # nobody serves a store there
    for member in trio.members:
        assert isinstance(member.error(), RuntimeError)
    assert trio.run(is_broken) == [True] * 3
    trio.generation += 1
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def test_a_world_of_another_shape_is_made_from_scratch(forker: ForkServer) -> None:
    with World(forker, {"dp": 2, "tp": 2}) as world:
        before = world.run(identity)
        world.axes = {"rank": 4}
        world.form_groups()
        assert [mine[0] != former[0] for mine, former in zip(world.run(identity), before, strict=True)] == [True] * 4
        assert world.run(total) == [40.0] * 4
        world.members.pop().kill()
        world.axes = {"rank": 3}
        world.run(resize, 3)
        world.form_groups()
        assert world.run(total) == [18.0] * 3


def resize(here: RankContext, size: int) -> None:
    here.size = size


# ---------------------------------------------------------------------------------------------------------------------
# Ends


def close(here: RankContext) -> tuple[bool, bool, bool]:
    import torch.distributed as dist

    helper = dist.distributed_c10d._new_process_group_helper
    here.groups.close()
    here.groups.close()
    return dist.is_initialized(), here.groups.is_broken, dist.distributed_c10d._new_process_group_helper is helper


def test_closing_leaves_torch_as_it_was_and_does_not_wait_for_the_others(trio: World) -> None:
    assert trio.members[0].run(close) == (False, False, False)
    trio.members[1].start(begin_and_leave)
    trio.members[1].result()
    assert trio.members[1].run(close) == (False, False, False)


def interrupted_then_close(here: RankContext) -> bool:
    import torch.distributed as dist

    here.groups.close()
    return dist.is_initialized()


def test_closing_does_not_wait_for_an_operation_that_never_ends(trio: World) -> None:
    stuck = get_stuck(trio, "all_reduce")
    for member in stuck:
        member.signal(signal.SIGINT)
    for member in stuck:
        member.error(SOON_S)
        member.start(interrupted_then_close)
    for member in stuck:
        assert member.result(SOON_S) is False


def destroy_a_stuck_group(here: RankContext) -> bool:
    import torch
    import torch.distributed as dist

    group = dist.new_group(list(range(here.size)))
    if here.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.destroy_process_group(group)
        del work, group
    return True


def test_destroying_a_group_with_an_operation_under_way_does_not_hang(trio: World) -> None:
    assert trio.run(destroy_a_stuck_group) == [True] * 3
    assert trio.run(total) == [18.0] * 3


def run_a_script_of_torchruns(here: RankContext) -> list[float]:
    """What scripts begin and end with, twice: their own set-up, groups of their own, and the end of all groups."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed import destroy_process_group, init_process_group

    sums = []
    for timeout in (None, timedelta(hours=2)):
        init_process_group("cpu:gloo,cuda:nccl", "env://", timeout, here.size, here.rank)
        pair = dist.new_group([0, 1])
        x = torch.ones(1)
        dist.all_reduce(x)
        if here.rank < 2:
            dist.all_reduce(x, group=pair)
        sums.append(float(x.item()))
        destroy_process_group()
        assert pair not in dist.distributed_c10d._world.pg_map
    assert dist.group.WORLD.timeout == timedelta(hours=2)
    return sums


def test_a_script_finds_the_meshs_world_formed_and_leaves_it_at_its_end(trio: World) -> None:
    assert trio.run(run_a_script_of_torchruns) == [[6.0] * 2, [6.0] * 2, [3.0] * 2]
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def begin_other_worlds(here: RankContext) -> list[str]:
    import torch.distributed as dist

    said = []
    for options in ({"world_size": 8, "rank": here.rank}, {"rank": (here.rank + 1) % 3}, {"backend": "nccl"}):
        try:
            dist.init_process_group(**options)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_world_that_the_mesh_does_not_have_is_refused(trio: World) -> None:
    larger, moved, nccl = trio.run(begin_other_worlds)[0]
    assert "this process is rank 0 of 3 of a mesh" in larger
    assert "asks for rank 0 of 8; take dist.get_rank()" in larger
    assert "asks for rank 1 of 3" in moved
    assert 'asks for "nccl", and the mesh has formed the process group with "cpu:gloo,cuda:gloo"' in nccl
    assert trio.run(total) == [18.0] * 3


# ---------------------------------------------------------------------------------------------------------------------
# CUDA


@pytest.fixture
def gpus(forker: ForkServer) -> Iterator[World]:
    with World(forker, {"rank": 1}, device="cuda") as world:
        yield world


def on_the_gpu(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    x, y = torch.ones(4, device=device), torch.ones(4)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.all_reduce(y)
    dist.barrier()
    gathered: list[Any] = [None] * here.size
    dist.all_gather_object(gathered, here.rank)
    torch.cuda.synchronize()
    return [
        x.cpu(), y, gathered, dist.get_backend(), here.ring.running(),
        [c.op for c in here.ring.snapshot()][:2], dist.group.WORLD._get_backend(device).name(),  # type: ignore[union-attr]
    ]  # fmt: skip


@pytest.mark.gpu
def test_nccl_serves_the_gpu_and_gloo_the_cpu_in_one_group(gpus: World) -> None:
    import torch

    ((x, y, gathered, backend, running, ops, name),) = gpus.run(on_the_gpu)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(y, torch.ones(4))
    assert (gathered, backend, running, ops, name) == ([0], "nccl", (), ["all_reduce", "all_reduce"], "nccl")


@pytest.mark.gpu
def test_an_aborted_nccl_group_refuses_collectives_and_is_formed_again(gpus: World) -> None:
    gpus.run(on_the_gpu)
    gpus.members[0].run_in_service_thread(sever, RankLost("gone"))
    assert type(gpus.members[0].error_of(on_the_gpu)).__name__ == "GroupBroken"
    gpus.form_groups()
    assert gpus.run(on_the_gpu)[0][3] == "nccl"


def abort_generation(here: RankContext, number: int) -> None:
    here.groups.abort(RankLost(f"rank 9 was lost in generation {number}"), generation=number)


def test_an_abort_that_comes_late_leaves_the_groups_that_were_formed_since_alone(trio: World) -> None:
    before = trio.generation
    trio.form_groups()
    for member in trio.members:
        member.run_in_service_thread(abort_generation, before)
    assert trio.run(is_broken) == [False] * 3
    assert trio.run(total) == [18.0] * 3


def test_an_abort_that_comes_before_its_groups_are_formed_keeps_them_from_waiting_for_the_dead(trio: World) -> None:
    for member in trio.members:
        member.run_in_service_thread(abort_generation, trio.generation + 1)
    with pytest.raises(FunctionFailed, match=f"rank 9 was lost in generation {trio.generation + 1}"):
        trio.form_groups()
    trio.form_groups()
    assert trio.run(total) == [18.0] * 3


def begin_abort(here: RankContext, number: int) -> None:
    """Begin an abort whose thread gets no time from the system once it has recorded why, until `end_abort`."""
    may_end, has_begun = threading.Event(), threading.Event()
    health = next(iter(here.groups.table)).health
    invalidate = health.invalidate

    def invalidate_late(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is thread:
            has_begun.set()
            assert may_end.wait(SOON_S)
        invalidate(*args, **kwargs)

    health.invalidate = invalidate_late
    thread = threading.Thread(target=abort_generation, args=(here, number))
    here.stored |= {"may_end": may_end, "thread": thread}
    thread.start()
    assert has_begun.wait(SOON_S)


def end_abort(here: RankContext) -> None:
    here.stored["may_end"].set()
    here.stored["thread"].join()


def test_an_abort_that_is_under_way_while_groups_are_formed_again_leaves_the_new_ones_alone(trio: World) -> None:
    trio.members[0].run_in_service_thread(begin_abort, trio.generation)
    trio.form_groups()
    trio.members[0].run_in_service_thread(end_abort)
    assert trio.run(is_broken) == [False] * 3
    assert trio.run(total) == [18.0] * 3
