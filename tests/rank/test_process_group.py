"""A watched process group while all goes well: the same numbers as torch's own, and everything in the ring.

Functions that take `here` run in ranks. Numbers are compared bit for bit with plain gloo, in a world that Meshbook has
no part in.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.rank.process_groups.prompt_clock import PromptClock
from tests.budget import WAIT_S, when
from tests.rank.worlds import ForkServer, RankContext, World

pytestmark = pytest.mark.usefixtures("starts_processes")

# Seconds that a wait which works never takes.
SOON_S = WAIT_S


@pytest.fixture(scope="module")
def forker() -> Iterator[ForkServer]:
    with ForkServer() as forker:
        yield forker


@pytest.fixture(scope="module")
def watched(forker: ForkServer) -> Iterator[World]:
    with World(forker, {"dp": 2, "tp": 2}) as world:
        yield world


@pytest.fixture(scope="module")
def plain(forker: ForkServer) -> Iterator[World]:
    with World(forker, {"dp": 2, "tp": 2}, plain=True) as world:
        yield world


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers as plain gloo: what each rank computes, as a list of tensors and plain values


def all_collectives(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    size = here.size
    out: list[Any] = []

    x = torch.randn(6)
    dist.all_reduce(x)
    out.append(x)
    x = torch.randn(6)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    out.append(x)
    x = torch.randn(6)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    out += [x, work.is_completed(), work.result()[0]]
    x = torch.randn(3)
    dist.broadcast(x, 2)
    out.append(x)
    x = torch.randn(3)
    dist.reduce(x, 1)
    out.append(x if here.rank == 1 else None)
    gathered = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(gathered, torch.randn(3))
    out += gathered
    whole = torch.zeros(size * 2)
    dist.all_gather_into_tensor(whole, torch.randn(2))
    out.append(whole)
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.randn(2 * size))
    out.append(part)
    part = torch.zeros(2)
    dist.reduce_scatter(part, [torch.randn(2) for _ in range(size)])
    out.append(part)
    x = torch.zeros(size)
    dist.all_to_all_single(x, torch.randn(size))
    out.append(x)
    x = torch.zeros(3)
    dist.scatter(x, [torch.randn(3) for _ in range(size)] if here.rank == 0 else None, src=0)
    out.append(x)
    gathered = [torch.zeros(2) for _ in range(size)] if here.rank == 3 else []
    dist.gather(torch.randn(2), gathered or None, dst=3)
    out += gathered
    x = torch.randn(4, dtype=torch.complex64)
    dist.all_reduce(x)
    out.append(x)
    dist.barrier()
    dist.monitored_barrier()
    return out


def coalesced(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    tensors = [torch.randn(3), torch.randn(5)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def objects(here: RankContext) -> list[Any]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * here.size
    dist.all_gather_object(gathered, {"rank": here.rank, "text": "x" * here.rank})
    reported: list[Any] = [("of", here.rank)]
    dist.broadcast_object_list(reported, src=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(here.size)] if here.rank == 2 else None, src=2)
    all_of_them: list[Any] | None = [None] * here.size if here.rank == 0 else None
    dist.gather_object(here.rank**2, all_of_them, dst=0)
    return [gathered, reported, mine, all_of_them]


def point_to_point(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    right, left = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    x, y = torch.randn(5), torch.zeros(5)
    if here.rank % 2:
        dist.recv(y, left)
        dist.send(x, right)
    else:
        dist.send(x, right)
        dist.recv(y, left)
    z = torch.zeros(2)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.randn(2), right), dist.P2POp(dist.irecv, z, left)])
    for work in works:
        work.wait()
    anyone, sender = torch.zeros(1), None
    if here.rank == 0:
        sender = dist.recv(anyone)
    elif here.rank == 1:
        dist.send(torch.ones(1) * 7, 0)
    return [y, z, anyone, sender]


def functional(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional_collectives

    world: Any = dist.group.WORLD
    torch.manual_seed(here.rank)
    x = torch.randn(8)
    return [
        functional_collectives.all_reduce(x, "sum", world) * 1,
        functional_collectives.all_gather_tensor(x, 0, world) * 1,
        functional_collectives.reduce_scatter_tensor(x, "sum", 0, world) * 1,
        functional_collectives.all_to_all_single(x, None, None, world) * 1,
        functional_collectives.broadcast(x, 1, world) * 1,
        *[t * 1 for t in functional_collectives.all_reduce_coalesced([x, x + 1], "sum", world)],
    ]


def dtensor(here: RankContext) -> list[Any]:
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    a: Any = distribute_tensor(torch.randn(8, 8), here.mesh, [Shard(0), Shard(1)])
    b: Any = distribute_tensor(torch.randn(8, 8), here.mesh, [Replicate(), Shard(0)])
    product: Any = a @ b
    return [
        product.full_tensor(),
        product.redistribute(here.mesh, [Shard(1), Replicate()]).to_local(),
        a.sum().full_tensor(),
    ]


def train(here: RankContext, model: Any) -> list[Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(here.rank)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def ddp(here: RankContext) -> list[Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    model: Any = DistributedDataParallel(layers, bucket_cap_mb=1)
    losses = train(here, model)
    backend = model._get_ddp_logging_data()["backend_name"]
    return [*losses, *[p.detach() for p in model.parameters()], backend]


def fsdp(here: RankContext) -> list[Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=here.mesh)  # sharded over tp, replicated over dp
    fully_shard(model, mesh=here.mesh)
    losses = train(here, model)
    return [*losses, *[p.detach().to_local().clone() for p in model.parameters()]]


def subgroups(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    # Only torch 2.13 can leave the ranks of a group in another order than the world's.
    sorts = "sort_ranks" not in inspect.signature(dist.new_group).parameters
    unsorted = dist.new_group([3, 0, 1]) if sorts else dist.new_group([3, 0, 1], sort_ranks=False)
    mine = odd if here.rank % 2 else even
    out: list[Any] = []
    for group in (mine, here.mesh.get_group("dp"), here.mesh.get_group("tp")):
        x = torch.randn(4)
        dist.all_reduce(x, group=group)
        out += [x, dist.get_world_size(group), dist.get_rank(group), dist.get_process_group_ranks(group)]
    if here.rank != 2:
        out.append(dist.get_rank(unsorted))
        x = torch.randn(2)
        dist.broadcast(x, 3, group=unsorted)
        out.append(x)
    flat = here.mesh._flatten("all")
    x = torch.randn(2)
    dist.all_reduce(x, group=flat.get_group())
    out.append(x)
    dist.destroy_process_group(unsorted)
    dist.destroy_process_group(mine)
    with contextlib.suppress(ValueError):
        dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)
    return out


def what_torch_says(here: RankContext) -> list[Any]:
    """The answers that users' code branches on."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    group = dist.new_group([0, 1], backend="gloo")
    both = dist.new_group(backend="cpu:gloo,cuda:gloo")
    backend: Any = world._get_backend(torch.device("cpu"))
    out = [
        dist.get_backend(),
        dist.get_backend(both),
        dist.distributed_c10d.get_backend_config(),
        world.name(),
        world.group_name,
        world.group_desc,
        world.bound_device_id,
        sorted(map(str, world._device_types)),
        type(backend).__name__,
        backend.name(),
        dist.distributed_c10d._get_object_coll_device(),
        here.mesh.get_group("tp").group_desc,
        dist.distributed_c10d._get_pg_config()["ranks"],
        dist.get_default_backend_for_device("cpu"),
    ]
    if here.rank < 2:
        out.append(dist.get_backend(group))
    with pytest.raises(RuntimeError) as refusal:
        dist.split_group(split_ranks=[[0, 1], [2, 3]])
    out.append(str(refusal.value))
    return out


USES = [
    all_collectives, coalesced, objects, point_to_point, functional, dtensor, ddp, fsdp, subgroups, what_torch_says
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_watched_group_computes_what_the_plain_one_does(
    watched: World, plain: World, use: Callable[[RankContext], list[Any]]
) -> None:
    for rank, (ours, theirs) in enumerate(zip(watched.run(use), plain.run(use), strict=True)):
        assert len(ours) > 0
        for number, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert same(mine, expected), f"rank {rank}, value {number}: {mine} and not {expected}"
    assert not any(watched.run(is_broken))


def is_broken(here: RankContext) -> bool:
    return bool(here.groups.is_broken)


# ---------------------------------------------------------------------------------------------------------------------
# What the ring says


def three_collectives(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    first = here.ring.last.seq if here.ring.last else 0
    x = torch.ones(2, 3)
    dist.all_reduce(x)
    work = dist.all_reduce(x.to(torch.int32), async_op=True, group=here.mesh.get_group("tp"))
    while_running = [(c.op, c.t_end) for c in here.ring.snapshot() if c.seq == first + 2]
    assert work is not None
    work.wait()
    if here.rank == 0:
        dist.send(x, 3)
    elif here.rank == 3:
        dist.recv(x, 0)
    kept = [c for c in here.ring.snapshot() if c.seq > first]
    return [
        [(c.op, c.seq - first, c.group_ranks, c.shapes, c.dtypes, c.peer, c.error) for c in kept],
        [(c.line.file, c.line.function, c.line.line) for c in kept],
        [c.t_start <= c.t_end for c in kept],
        while_running,
    ]


def test_the_ring_tells_op_shapes_group_and_the_users_line(watched: World) -> None:
    answers = watched.run(three_collectives)
    for rank, (kept, lines, finished, while_running) in enumerate(answers):
        tp = (0, 1) if rank < 2 else (2, 3)
        expected: list[Any] = [
            ("all_reduce", 1, (0, 1, 2, 3), ((2, 3),), ("float32",), None, None),
            ("all_reduce", 2, tp, ((2, 3),), ("int32",), None, None),
        ]
        if rank in (0, 3):
            op, peer = ("send", 3) if rank == 0 else ("recv", 0)
            expected.append((op, 3, (0, 1, 2, 3), ((2, 3),), ("float32",), peer, None))
        assert kept == expected
        start = three_collectives.__code__.co_firstlineno
        assert [line[:2] for line in lines] == [(__file__, "three_collectives")] * len(kept)
        assert [line[2] - start for line in lines[:2]] == [6, 7]
        assert finished == [True] * len(kept)
        assert [op for op, _ in while_running] == ["all_reduce"]


def lines_of_a_step(here: RankContext) -> set[tuple[str, str]]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    first = here.ring.last.seq
    model(torch.ones(1, 4)).sum().backward()
    return {(c.op, c.line.function) for c in here.ring.snapshot() if c.seq > first and c.t_end is not None}


def test_collectives_inside_ddp_point_at_the_line_that_called_backward(watched: World) -> None:
    assert watched.run(lines_of_a_step) == [{("all_reduce", "lines_of_a_step")}] * 4


def tensors_kept_alive(here: RankContext) -> int:
    import gc
    import weakref

    import torch
    import torch.distributed as dist

    x = torch.ones(1000)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    future = dist.all_reduce(x, async_op=True)
    assert future is not None
    future.get_future().wait()
    alive = weakref.ref(x)
    del x, work, future
    deadline = time.monotonic() + SOON_S  # gloo's thread lets go of its own reference a moment after it says it is done
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()
    return 0 if alive() is None else 1


def test_the_ring_does_not_keep_tensors_alive(watched: World) -> None:
    assert watched.run(tensors_kept_alive) == [0, 0, 0, 0]


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, float]] = []

    def begun(self, collective: Any, arguments: tuple[Any, ...]) -> None:
        self.seen.append(("begun", collective.op, collective.seq, arguments[0][0].sum().item()))

    def finished(self, collective: Any, arguments: tuple[Any, ...]) -> None:
        self.seen.append(("finished", collective.op, collective.seq, arguments[0][0].sum().item()))


def observed(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    watcher = Watcher()
    first = here.ring.last.seq
    here.groups.observers.append(watcher)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        work.wait()
    finally:
        here.groups.observers.remove(watcher)
    dist.all_reduce(x)
    return [(what, op, seq - first, total) for what, op, seq, total in watcher.seen]


def test_an_observer_sees_inputs_before_and_outputs_after_each_collective(watched: World) -> None:
    assert (
        watched.run(observed)
        == [
            [
                ("begun", "all_reduce", 1, 2.0),
                ("finished", "all_reduce", 1, 8.0),
                ("begun", "all_reduce", 2, 8.0),
                ("finished", "all_reduce", 2, 32.0),
            ]
        ]
        * 4
    )


# ---------------------------------------------------------------------------------------------------------------------
# Calls that end in another way


def wait_with_a_limit(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    if here.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(datetime.timedelta(milliseconds=150))
        assert not here.groups.is_broken
        assert [c.op for c in here.ring.running()] == ["all_reduce"]
        here.stored["work"] = work, x
        return []
    return []


def wait_again(here: RankContext) -> float:
    import torch
    import torch.distributed as dist

    if here.rank == 0:
        work, x = here.stored.pop("work")
        work.wait()
    else:
        x = torch.ones(1)
        dist.all_reduce(x)
    return float(x.item())


def test_a_wait_with_a_limit_of_the_users_own_can_be_taken_up_again(watched: World) -> None:
    watched.run(wait_with_a_limit)
    assert watched.run(wait_again) == [4.0] * 4
    assert watched.run(is_broken) == [False] * 4


# ---------------------------------------------------------------------------------------------------------------------
# Timeouts. A test's ranks have no heartbeat: the test calls what it calls once a second


def end_overdue(here: RankContext) -> int:
    """End the collectives that have taken too long; return how many run."""
    here.groups.timeouts.end_overdue()
    return len(here.ring.running())


def wait_in_a_group_with_a_timeout(here: RankContext, seconds: float, op: str) -> None:
    """Wait for rank 1, which does not come, in one collective of a group of ranks 0 and 1."""
    import torch
    import torch.distributed as dist

    x, timeout = torch.ones(1), datetime.timedelta(seconds=seconds)
    group = dist.new_group([0, 1])
    if here.rank != 0:
        return
    if op != "a barrier with its own":
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    if op == "all_reduce":
        dist.all_reduce(x, group=group)
    elif op == "recv":
        dist.recv(x, 1, group=group)
    elif op == "a future":
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.get_future().wait()
    else:
        dist.barrier(group=group, timeout=timeout)


@pytest.mark.parametrize("op", ["all_reduce", "recv", "a future", "a barrier with its own"])
def test_a_wait_ends_when_the_timeout_of_its_group_is_over(forker: ForkServer, op: str) -> None:
    with World(forker, {"dp": 2}) as world:
        first, other = world.members
        for member in world.members:
            member.start(wait_in_a_group_with_a_timeout, 0.3, op)
        other.result()
        first.wait_until_stuck()
        started = time.monotonic()
        when(lambda: first.run_in_service_thread(end_overdue) == 0, "the end of the wait")
        assert time.monotonic() - started > 0.25
        error = first.error()
        assert isinstance(error, RuntimeError)
        assert "timed out: it was not completed within 0.3 s" in str(error)
        assert first.run(is_broken)


def keep_a_send_that_nobody_waits_for(here: RankContext) -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.01), group)
    here.stored["send"] = dist.isend(torch.ones(1), 1, group=group) if here.rank == 0 else None


def test_a_send_that_nobody_waits_for_does_not_time_out(forker: ForkServer) -> None:
    with World(forker, {"dp": 2}) as world:
        world.run(keep_a_send_that_nobody_waits_for)
        first = world.members[0]
        first.run_in_service_thread(end_overdue)
        time_of_the_first_look = time.monotonic()
        when(lambda: time.monotonic() - time_of_the_first_look > 0.05, "its timeout")
        first.run_in_service_thread(end_overdue)
        assert not first.run(is_broken)


def coalesced_gathers(here: RankContext) -> set[str]:
    """What gloo takes them for, by the names of its `OpType`."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import OpType

    group: Any = dist.group.WORLD
    given = [torch.full((2,), float(here.rank)) for _ in range(8)]
    expected = [float(rank) for rank in range(here.size) for _ in "ab"]
    names = set()
    for apart in [True, False] * 10:
        wholes = [torch.empty(2 * here.size) for _ in given]
        lists = [[torch.empty(2) for _ in given] for _ in range(here.size)]
        works = [group.allgather_coalesced(lists, given)]
        if apart:
            pairs = zip(wholes, given, strict=True)
            works += [group.allgather_into_tensor_coalesced([whole], [one]) for whole, one in pairs]
        else:
            works.append(group.allgather_into_tensor_coalesced(wholes, given))
        names |= {
            OpType(each._get_op_type()).name for work in works for each in getattr(work._work, "_works", [work._work])
        }
        for work in works:
            work.wait()
            assert work.is_completed()
            assert len(work.get_future().wait()) == len(work.result())
        assert [whole.tolist() for whole in wholes] == [expected] * len(given)
        assert all(one.tolist() == [float(rank)] * 2 for rank, of_rank in enumerate(lists) for one in of_rank)
    return names


def test_coalesced_gathers_have_no_name_that_two_workers_free_twice(watched: World) -> None:
    (names,) = {frozenset(names) for names in watched.run(coalesced_gathers)}
    assert names
    assert max(len(name) for name in names) <= 15


def wrong_call(here: RankContext) -> bool:
    import torch
    import torch.distributed as dist

    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(3))
    reported = here.ring.last.error
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    return bool(here.groups.is_broken) or reported is None or here.ring.running() != ()


def test_a_call_with_wrong_arguments_is_an_error_and_no_break(watched: World) -> None:
    assert watched.run(wrong_call) == [False] * 4
    assert watched.run(sum_of_ranks) == [6.0] * 4


def sum_of_ranks(here: RankContext) -> float:
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(here.rank))
    dist.all_reduce(x)
    return float(x.item())


def split(here: RankContext) -> list[Any]:
    import torch
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    halves = [[0, 1], [2, 3]]
    group = world.split_group(halves[here.rank // 2], group_name=f"half{here.rank // 2}", group_desc="a half")
    x = torch.full((1,), float(here.rank))
    group.allreduce([x]).wait()
    none = world.split_group([1, 2] if here.rank in (0, 3) else [here.rank], group_name=f"other{here.rank}")
    return [x.item(), type(group).__name__, group.group_name, group.group_desc, none is None, here.ring.last.group]


def test_a_group_can_be_split_into_watched_ones(watched: World) -> None:
    answers = watched.run(split)
    assert [answer[0] for answer in answers] == [1.0, 1.0, 5.0, 5.0]
    assert answers[0][1:5] == ["WatchedGroup", "half0", "a half", True]
    assert [answer[4] for answer in answers] == [True, False, False, True]


def listeners(here: RankContext) -> list[str]:
    import psutil

    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_gloo_listens_on_loopback_when_all_ranks_are_here(watched: World) -> None:
    """It asks nobody for a key."""
    for found in watched.run(listeners):
        assert found
        assert set(found) == {"127.0.0.1"}


# ---------------------------------------------------------------------------------------------------------------------
# At a prompt


# Waits with a limit of their own, and the rank that comes to them first.
LIMITED = [("all_reduce", 0), ("all_reduce", 1), ("recv", 0), ("monitored_barrier", 0), ("monitored_barrier", 1)]


def open_prompt(here: RankContext) -> None:
    clock = here.stored["clock"] = PromptClock()
    here.groups.table.clock = clock.now
    for group in here.groups.table:
        group.health.clock = clock.now
    clock.hold(True)


def close_prompt(here: RankContext) -> None:
    here.stored["clock"].hold(False)


def wait_with_a_short_limit(here: RankContext, op: str) -> float:
    """Of what both ranks are to join."""
    import torch
    import torch.distributed as dist

    x, limit = torch.ones(1), datetime.timedelta(seconds=0.2)
    if op == "monitored_barrier":
        dist.monitored_barrier(timeout=limit)
    elif op == "recv" and here.rank == 1:
        dist.send(x * 2, 0)
    else:
        work = dist.irecv(x, 1) if op == "recv" else dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait(limit)
    return float(x.item())


@pytest.mark.parametrize(("op", "first"), LIMITED)
def test_no_wait_of_a_users_own_limit_times_out_at_a_prompt(forker: ForkServer, op: str, first: int) -> None:
    with World(forker, {"dp": 2}) as world:
        world.run(open_prompt)
        waiting, other = world.members[first], world.members[1 - first]
        waiting.start(wait_with_a_short_limit, op)
        waiting.wait_until_stuck()
        began = time.monotonic()
        when(lambda: time.monotonic() - began > 0.5, "more than the limit")
        assert waiting.run_in_service_thread(end_overdue) == 1
        world.members[first].run_in_service_thread(close_prompt)
        other.run(wait_with_a_short_limit, op)
        waiting.result()
        assert world.run(is_broken) == [False] * 2


@pytest.mark.parametrize(("op", "first"), LIMITED)
def test_a_users_own_limit_counts_again_after_the_prompt(forker: ForkServer, op: str, first: int) -> None:
    with World(forker, {"dp": 2}) as world:
        world.run(open_prompt)
        waiting = world.members[first]
        waiting.start(wait_with_a_short_limit, op)
        waiting.wait_until_stuck()
        waiting.run_in_service_thread(close_prompt)
        when(lambda: waiting.run_in_service_thread(end_overdue) == 0 or op == "all_reduce", "the end of the wait")
        error = str(waiting.error())
        is_named_by_gloo = op == "monitored_barrier" and first == 0
        assert ("Rank 1 failed to pass monitoredBarrier" if is_named_by_gloo else "imed out") in error, error
