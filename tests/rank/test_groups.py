"""The process group of a rank, in worlds of real processes: watched, interrupted, severed, formed again.

Functions that take `here` run in ranks. Numbers are compared bit for bit with torch's own gloo group, in a world that
Meshbook has no part in.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.errors import MeshShapeError, RankLost
from tests.rank.worlds import Forker, Here, Member, World

# Seconds in which a stuck wait must be over. The promise is 0.15 s for a signal and 0.2 s for severing; a test asserts
# what cannot be an accident of a busy machine: far less than the 1,800 s that gloo itself would wait.
SOON_S = 10.0


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker() as forker:
        yield forker


@pytest.fixture(scope="module")
def watched(forker: Forker) -> Iterator[World]:
    with World(forker, {"dp": 2, "tp": 2}) as world:
        yield world


@pytest.fixture(scope="module")
def plain(forker: Forker) -> Iterator[World]:
    with World(forker, {"dp": 2, "tp": 2}, plain=True) as world:
        yield world


@pytest.fixture
def trio(forker: Forker) -> Iterator[World]:
    """A small world of a test's own, to be broken."""
    with World(forker, {"rank": 3}) as world:
        yield world


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers as plain gloo: what each rank computes, as a list of tensors and plain values


def all_collectives(here: Here) -> list[Any]:
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


def coalesced(here: Here) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    tensors = [torch.randn(3), torch.randn(5)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def objects(here: Here) -> list[Any]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * here.size
    dist.all_gather_object(gathered, {"rank": here.rank, "text": "x" * here.rank})
    told: list[Any] = [("of", here.rank)]
    dist.broadcast_object_list(told, src=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(here.size)] if here.rank == 2 else None, src=2)
    all_of_them: list[Any] | None = [None] * here.size if here.rank == 0 else None
    dist.gather_object(here.rank**2, all_of_them, dst=0)
    return [gathered, told, mine, all_of_them]


def point_to_point(here: Here) -> list[Any]:
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


def functional(here: Here) -> list[Any]:
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


def dtensor(here: Here) -> list[Any]:
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


def ddp(here: Here) -> list[Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    model: Any = DistributedDataParallel(layers, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(here.rank)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    backend = model._get_ddp_logging_data()["backend_name"]
    return [*losses, *[p.detach() for p in model.parameters()], backend]


def fsdp(here: Here) -> list[Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=here.mesh)  # sharded over tp, replicated over dp
    fully_shard(model, mesh=here.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(here.rank)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[p.detach().to_local().clone() for p in model.parameters()]]


def subgroups(here: Here) -> list[Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(here.rank)
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    unsorted = dist.new_group([3, 0, 1], sort_ranks=False)
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


def what_torch_says(here: Here) -> list[Any]:
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


def nearly_same(a: Any, b: Any) -> bool:
    """Equal but for the order of summation, which in DDP depends on how its buckets are cut at the moment."""
    import torch

    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    return len(a) == len(b) and all(map(nearly_same, a, b))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_watched_group_computes_what_the_plain_one_does(
    watched: World, plain: World, use: Callable[[Here], list[Any]]
) -> None:
    for rank, (ours, theirs) in enumerate(zip(watched.run(use), plain.run(use), strict=True)):
        assert len(ours) > 0
        for number, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert same(mine, expected), f"rank {rank}, value {number}: {mine} and not {expected}"
    assert not any(watched.run(is_broken))


def is_broken(here: Here) -> bool:
    return bool(here.groups.broken)


# ---------------------------------------------------------------------------------------------------------------------
# What the ring says


def three_collectives(here: Here) -> list[Any]:
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
            ("allreduce", 1, (0, 1, 2, 3), ((2, 3),), ("float32",), None, None),
            ("allreduce", 2, tp, ((2, 3),), ("int32",), None, None),
        ]
        if rank in (0, 3):
            op, peer = ("send", 3) if rank == 0 else ("recv", 0)
            expected.append((op, 3, (0, 1, 2, 3), ((2, 3),), ("float32",), peer, None))
        assert kept == expected
        start = three_collectives.__code__.co_firstlineno
        assert [line[:2] for line in lines] == [(__file__, "three_collectives")] * len(kept)
        assert [line[2] - start for line in lines[:2]] == [6, 7]
        assert finished == [True] * len(kept)
        assert [op for op, _ in while_running] == ["allreduce"]


def lines_of_a_step(here: Here) -> set[tuple[str, str]]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    first = here.ring.last.seq
    model(torch.ones(1, 4)).sum().backward()
    return {(c.op, c.line.function) for c in here.ring.snapshot() if c.seq > first and c.t_end is not None}


def test_collectives_inside_ddp_point_at_the_line_that_called_backward(watched: World) -> None:
    assert watched.run(lines_of_a_step) == [{("allreduce", "lines_of_a_step")}] * 4


def tensors_kept_alive(here: Here) -> int:
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


def observed(here: Here) -> list[Any]:
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
                ("begun", "allreduce", 1, 2.0),
                ("finished", "allreduce", 1, 8.0),
                ("begun", "allreduce", 2, 8.0),
                ("finished", "allreduce", 2, 32.0),
            ]
        ]
        * 4
    )


# ---------------------------------------------------------------------------------------------------------------------
# Stuck: the last rank never joins


def wait_in(here: Here, kind: str) -> str:
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
        work.wait(timeout=__import__("datetime").timedelta(seconds=600))
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


def sever(here: Here, error: BaseException) -> None:
    here.groups.sever(error)


def last_entry(here: Here) -> tuple[Any, ...]:
    running = [c.op for c in here.ring.running()]
    return (here.groups.broken, here.groups.broken_reason, running, here.ring.last.t_end is not None)


def try_again(here: Here) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def total(here: Here) -> float:
    """A sum over each group of the mesh and the world."""
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(here.rank + 1))
    for group in (None, *here.mesh.get_all_groups()):
        dist.all_reduce(x, group=group)
    assert not here.groups.broken
    assert here.ring.running() == ()
    return x.item()


def get_stuck(world: World, kind: str) -> list[Member]:
    """The ranks that are stuck now."""
    for member in world.members:
        member.begin(wait_in, kind)
    assert world.members[-1].result() == "stayed away"
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
            broken, reason, running, ended = member.ask(last_entry)
            assert broken, kind
            assert reason.endswith("was interrupted"), kind
            assert (running, ended) == ([], True), kind
            assert type(member.error_of(try_again)).__name__ == "GroupBroken"
        trio.form()
        assert trio.run(total) == [18.0] * 3


@pytest.mark.parametrize(
    "error", [RankLost("rank 2 was killed", ranks=[2]), KeyboardInterrupt("stop")], ids=["lost", "stop"]
)
def test_a_stuck_collective_ends_with_the_error_it_is_severed_with(trio: World, error: BaseException) -> None:
    for kind in [*SLICED, *WHOLE]:
        stuck = get_stuck(trio, kind)
        for member in stuck:
            member.ask(sever, error)
        for member in stuck:
            seen = member.error(SOON_S)
            assert type(seen) is type(error), f"{kind}: {seen!r}"
            assert str(seen) == str(error), kind
            assert getattr(seen, "ranks", None) == getattr(error, "ranks", None)
            assert member.ask(last_entry) == (True, str(error), [], True), kind
        trio.form()
        assert trio.run(total) == [18.0] * 3


def test_a_signal_that_waits_in_c_and_the_severing_that_frees_it_are_one_interrupt(trio: World) -> None:
    """What Stop does to a wait that no signal ends: SIGINT first, severing when that had no effect."""
    for kind in WHOLE:
        stuck = get_stuck(trio, kind)
        for member in stuck:
            member.signal(signal.SIGINT)
        for member in stuck:
            member.ask(sever, KeyboardInterrupt("stop"))
        for member in stuck:
            assert type(member.error(SOON_S)) is KeyboardInterrupt, kind
            assert member.ask(last_entry)[2:] == ([], True), kind
        trio.form()
        assert trio.run(total) == [18.0] * 3


def test_a_rank_that_waits_for_others_to_make_a_group_is_freed_too(trio: World) -> None:
    for member in trio.members:
        member.begin(wait_in, "new_group")
    assert trio.members[-1].result() == "stayed away"
    for member in trio.members[:-1]:
        member.ask(wait_until_reaching)
        member.ask(sever, RankLost("gone"))
    for member in trio.members[:-1]:
        assert type(member.error(SOON_S)) is RankLost
    trio.form()
    assert trio.run(total) == [18.0] * 3


def wait_until_reaching(here: Here) -> None:
    deadline = time.monotonic() + SOON_S
    pause = threading.Event()
    while not here.groups._num_reaching and time.monotonic() < deadline:
        pause.wait(0.005)
    assert here.groups._num_reaching


def test_after_a_break_collectives_are_refused_with_the_reason_and_the_next_step(trio: World) -> None:
    trio.members[0].ask(sever, RankLost("rank 2 was killed by SIGKILL"))
    error = trio.members[0].error_of(try_again)
    assert type(error).__name__ == "GroupBroken"
    assert isinstance(error, RuntimeError)
    assert str(error) == (
        "allreduce cannot run: the process group of ranks 0-2 is broken (rank 2 was killed by SIGKILL). It is formed "
        "again before the next cell: run the cell again. If a rank is gone, replace it first: %mesh heal"
    )


def test_a_late_word_about_a_former_epoch_breaks_nothing(trio: World) -> None:
    former = trio.epoch
    trio.form()
    trio.members[0].ask(sever_epoch, former)
    assert trio.run(is_broken) == [False] * 3
    trio.members[0].ask(sever_epoch, trio.epoch)
    assert trio.run(is_broken) == [True, False, False]


def sever_epoch(here: Here, epoch: int) -> None:
    here.groups.sever(RankLost("gone"), epoch=epoch)


def user_sockets(here: Here) -> None:
    """Connections of the user's own, one of them to a listener that was there before the groups were formed again."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    here.kept["sockets"] = listener, ours, listener.accept()[0]


def still_talk(here: Here) -> bytes:
    _, ours, theirs = here.kept["sockets"]
    ours.sendall(b"still here")
    return bytes(theirs.recv(32))


def test_severing_leaves_connections_of_the_users_own_alone(trio: World) -> None:
    trio.run(user_sockets)
    for member in get_stuck(trio, "all_reduce"):
        member.ask(sever, RankLost("gone"))
        member.error(SOON_S)
    assert trio.run(still_talk) == [b"still here"] * 3


def wait_with_a_limit(here: Here) -> list[Any]:
    import datetime

    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    if here.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(datetime.timedelta(milliseconds=150))
        assert not here.groups.broken
        assert [c.op for c in here.ring.running()] == ["allreduce"]
        here.kept["work"] = work, x
        return []
    return []


def wait_again(here: Here) -> float:
    import torch
    import torch.distributed as dist

    if here.rank == 0:
        work, x = here.kept.pop("work")
        work.wait()
    else:
        x = torch.ones(1)
        dist.all_reduce(x)
    return float(x.item())


def test_a_wait_with_a_limit_of_the_users_own_can_be_taken_up_again(trio: World) -> None:
    trio.run(wait_with_a_limit)
    assert trio.run(wait_again) == [3.0] * 3
    assert trio.run(is_broken) == [False] * 3


def wrong_call(here: Here) -> bool:
    import torch
    import torch.distributed as dist

    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(3))
    told = here.ring.last.error
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    return bool(here.groups.broken) or told is None or here.ring.running() != ()


def test_a_call_with_wrong_arguments_is_an_error_and_no_break(trio: World) -> None:
    assert trio.run(wrong_call) == [False] * 3
    assert trio.run(total) == [18.0] * 3


# ---------------------------------------------------------------------------------------------------------------------
# A member dies


def step(here: Here) -> float:
    """One step of training on a 2x2 mesh: sharded over tp, replicated over dp. The loss, the same on all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if "model" not in here.kept:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=here.mesh)
        here.kept["model"] = fully_shard(model, mesh=here.mesh)
        here.kept["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = here.kept["model"], here.kept["optimizer"]
    torch.manual_seed(100 + here.rank)
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean.item())


def stay_away_from_step(here: Here) -> None:
    """Reach the middle of a step, where the others wait for the gradients of the last layer, and go no further."""
    import torch

    here.kept["model"](torch.randn(8, 16)).square().mean()


def parameters(here: Here) -> list[Any]:
    return [p.detach().to_local().clone() for p in here.kept["model"].parameters()]


def take_from_replica(here: Here, source: int) -> None:
    """The newcomer's shards, from the rank that holds the same ones. Both are in one dp group."""
    import torch.distributed as dist

    group = here.mesh.get_group("dp")
    if source in dist.get_process_group_ranks(group):
        for parameter in here.kept["model"].parameters():
            dist.broadcast(parameter.detach().to_local(), source, group=group)


def build_only(here: Here) -> None:
    """The model without a step: what a setup cell does on a new rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)  # other numbers than the others have
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=here.mesh)
    here.kept["model"] = fully_shard(model, mesh=here.mesh)
    here.kept["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)


def identity(here: Here) -> tuple[int, ...]:
    import torch.distributed as dist

    return (id(here.mesh), id(dist.group.WORLD), *(id(group) for group in here.mesh.get_all_groups()))


def test_a_killed_member_is_replaced_and_training_goes_on_as_if_nothing_had_happened(forker: Forker) -> None:
    with World(forker, {"dp": 2, "tp": 2}) as world, World(forker, {"dp": 2, "tp": 2}) as calm:
        before = [world.run(step), calm.run(step)]
        assert before[0] == before[1]
        objects_before = world.run(identity)

        for member in (world.members[0], world.members[2], world.members[3]):
            member.begin(step)
        world.members[1].run(stay_away_from_step)
        for rank in (0, 2, 3):
            world.members[rank].wait_until_stuck()
        world.members[1].kill()
        lost = RankLost("rank 1 was killed by SIGKILL", ranks=[1], signal="SIGKILL")
        for rank in (0, 2, 3):
            world.members[rank].ask(sever, lost)
        for rank in (0, 2, 3):
            seen = world.members[rank].error(SOON_S)
            assert (type(seen), str(seen)) == (RankLost, str(lost)), f"rank {rank}: {seen!r}"

        world.replace(1)
        world.form()
        world.members[1].run(build_only)
        world.run(take_from_replica, 3)
        after = world.run(identity)
        assert [after[rank] == objects_before[rank] for rank in (0, 2, 3)] == [True] * 3
        assert same(world.run(parameters), calm.run(parameters))
        for _ in range(3):
            assert world.run(step) == calm.run(step)
        assert same(world.run(parameters), calm.run(parameters))


def test_survivors_learn_the_reason_even_if_the_dead_ranks_connections_close_first(trio: World) -> None:
    """gloo says at once that a connection was closed; the one who knows why speaks a moment later."""
    stuck = get_stuck(trio, "all_reduce")
    trio.members[-1].kill()
    for member in stuck:
        member.ask(wait_for_gloo_to_notice)
        member.ask(sever, RankLost("rank 2 was killed"))
    for member in stuck:
        assert type(member.error(SOON_S)) is RankLost


def wait_for_gloo_to_notice(here: Here) -> None:
    """Until the main thread has gloo's error, and waits to hear more."""
    main = threading.main_thread().ident
    assert main is not None
    deadline = time.monotonic() + SOON_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        frame: Any = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == "_outcome":
                return
            frame = frame.f_back
        pause.wait(0.001)
    raise AssertionError("gloo did not notice")


def test_a_death_that_nobody_explains_is_still_an_error(trio: World) -> None:
    stuck = get_stuck(trio, "all_reduce")
    trio.members[-1].kill()
    for member in stuck:
        error = member.error(SOON_S)
        assert isinstance(error, RuntimeError)
        broken, reason, running, _ = member.ask(last_entry)
        assert broken
        assert reason.startswith("allreduce #")
        assert running == []


# ---------------------------------------------------------------------------------------------------------------------
# Forming again


def build_both(here: Here) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=here.mesh)
    here.kept["fsdp"] = fully_shard(model, mesh=here.mesh)
    torch.manual_seed(0)
    here.kept["ddp"] = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)))
    here.kept["groups"] = identity(here)


def gradients(here: Here, kind: str) -> list[Any]:
    import torch

    model = here.kept[kind]
    model.zero_grad()
    torch.manual_seed(here.rank)
    model(torch.randn(4, 8)).square().sum().backward()
    return [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone() for p in model.parameters()]


def break_in(here: Here, kind: str, phase: str) -> str:
    """Rank 2 leaves the others alone in a forward or a backward pass."""
    import torch

    if phase == "forward" and here.rank == 2:
        return "left"
    loss = here.kept[kind](torch.randn(4, 8)).square().sum()
    if here.rank == 2:
        return "left"
    loss.backward()
    return "came through"


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("ddp", "backward"), ("fsdp", "forward"), ("fsdp", "backward")],
    ids=["ddp", "forward", "backward"],
)
def test_after_a_break_in_the_middle_of_a_step_the_same_objects_train_again(trio: World, kind: str, phase: str) -> None:
    trio.run(build_both)
    expected = [trio.run(gradients, "ddp"), trio.run(gradients, "fsdp")]
    for _ in range(2):
        for member in trio.members:
            member.begin(break_in, kind, phase)
        assert trio.members[2].result() == "left"
        for member in trio.members[:2]:
            member.wait_until_stuck()
            member.ask(sever, RankLost("gone"))
        for member in trio.members[:2]:
            assert type(member.error(SOON_S)) is RankLost
        trio.form()
        assert trio.run(identity) == [tuple(ids) for ids in trio.run(former_identity)]
        assert nearly_same([trio.run(gradients, "ddp"), trio.run(gradients, "fsdp")], expected)


def former_identity(here: Here) -> tuple[int, ...]:
    return tuple(here.kept["groups"])


def make_pairs(here: Here) -> None:
    """Groups of the user's own: one per pair of neighbours."""
    import torch.distributed as dist

    pairs = [dist.new_group([rank, rank + 1]) for rank in range(here.size - 1)]
    here.kept["pairs"] = [pair for pair in pairs if pair is not dist.GroupMember.NON_GROUP_MEMBER]


def use_pairs(here: Here) -> list[float]:
    import torch
    import torch.distributed as dist

    sums = []
    for pair in here.kept["pairs"]:
        x = torch.full((1,), float(here.rank))
        dist.all_reduce(x, group=pair)
        sums.append(x.item())
    return sums


def connected(here: Here) -> list[bool]:
    return [pair.is_connected for pair in here.kept["pairs"]]


def test_groups_of_the_users_own_are_formed_again(trio: World) -> None:
    trio.run(make_pairs)
    expected = [[1.0], [1.0, 3.0], [3.0]]
    assert trio.run(use_pairs) == expected
    trio.members[0].ask(sever, RankLost("gone"))
    trio.form()
    assert trio.run(connected) == [[True], [True, True], [True]]
    assert trio.run(use_pairs) == expected


def test_groups_that_a_new_member_has_yet_to_make_wait_for_it(trio: World) -> None:
    trio.run(make_pairs)
    trio.members[2].kill()
    trio.members[0].ask(sever, RankLost("gone"))
    trio.members[1].ask(sever, RankLost("gone"))
    trio.replace(2)
    trio.form()
    assert trio.members[0].run(connected) == [True]
    assert trio.members[1].run(connected) == [True, False]
    trio.members[2].run(make_pairs)  # as a setup cell does, on the new rank alone, and so without waiting for others
    assert trio.run(use_pairs) == [[1.0], [1.0, 3.0], [3.0]]
    assert trio.run(is_broken) == [False] * 3


def begin_and_leave(here: Here) -> None:
    import torch
    import torch.distributed as dist

    if here.rank == 0:
        here.kept["stale"] = dist.all_reduce(torch.ones(1), async_op=True)


def wait_for_stale(here: Here) -> list[Any]:
    if here.rank != 0:
        return []
    try:
        here.kept.pop("stale").wait()
    except RuntimeError as error:
        return [type(error).__name__, bool(here.groups.broken)]
    return ["no error"]


def test_what_was_under_way_before_says_so_and_does_not_break_the_new_groups(trio: World) -> None:
    trio.run(begin_and_leave)
    trio.form()
    assert trio.run(wait_for_stale) == [["GroupBroken", False], [], []]
    assert trio.run(total) == [18.0] * 3


def form_badly(here: Here, axes: dict[str, int], epoch: int) -> None:
    import torch

    here.groups.form(
        epoch, rank=here.rank, world_size=here.size, host="127.0.0.1", port=1, device=torch.device("cpu"),
        timeout_s=1.0, axes=axes,
    )  # fmt: skip


def test_axes_that_do_not_make_the_world_are_refused_with_the_sum(trio: World) -> None:
    error = trio.members[0].error_of(form_badly, {"dp": 2, "tp": 2}, trio.epoch + 1)
    assert type(error) is MeshShapeError
    assert str(error) == (
        "mesh axes dp=2 * tp=2 need 4 ranks, but the world has 3; change an axis or the number of ranks"
    )
    assert trio.run(total) == [18.0] * 3


def test_an_epoch_that_has_passed_is_refused(trio: World) -> None:
    error = trio.members[0].error_of(form_badly, {"rank": 3}, trio.epoch)
    assert type(error) is ValueError
    assert trio.run(total) == [18.0] * 3


def test_forming_that_fails_can_be_tried_again(trio: World) -> None:
    for member in trio.members:
        member.begin(form_badly, {"rank": 3}, trio.epoch + 1)  # nobody serves a store there
    for member in trio.members:
        assert isinstance(member.error(), RuntimeError)
    assert trio.run(is_broken) == [True] * 3
    trio.epoch += 1
    trio.form()
    assert trio.run(total) == [18.0] * 3


def test_a_world_of_another_shape_is_made_from_scratch(forker: Forker) -> None:
    with World(forker, {"dp": 2, "tp": 2}) as world:
        before = world.run(identity)
        world.axes = {"rank": 4}
        world.form()
        assert [mine[0] != former[0] for mine, former in zip(world.run(identity), before, strict=True)] == [True] * 4
        assert world.run(total) == [40.0] * 4
        world.members.pop().kill()
        world.axes = {"rank": 3}
        world.run(resize, 3)
        world.form()
        assert world.run(total) == [18.0] * 3


def resize(here: Here, size: int) -> None:
    here.size = size


# ---------------------------------------------------------------------------------------------------------------------
# Ends


def close(here: Here) -> tuple[bool, bool, bool]:
    import torch.distributed as dist

    helper = dist.distributed_c10d._new_process_group_helper
    here.groups.close()
    here.groups.close()
    return dist.is_initialized(), here.groups.broken, dist.distributed_c10d._new_process_group_helper is helper


def test_closing_leaves_torch_as_it_was_and_does_not_wait_for_the_others(trio: World) -> None:
    assert trio.members[0].run(close) == (False, False, False)
    trio.members[1].begin(begin_and_leave)
    trio.members[1].result()
    assert trio.members[1].run(close) == (False, False, False)


def interrupted_then_close(here: Here) -> bool:
    import torch.distributed as dist

    here.groups.close()
    return dist.is_initialized()


def test_closing_does_not_wait_for_an_operation_that_never_ends(trio: World) -> None:
    stuck = get_stuck(trio, "all_reduce")
    for member in stuck:
        member.signal(signal.SIGINT)
    for member in stuck:
        member.error(SOON_S)
        member.begin(interrupted_then_close)
    for member in stuck:
        assert member.result(SOON_S) is False


def destroy_a_stuck_group(here: Here) -> bool:
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


def world_of_the_users_own(here: Here, port: int) -> float:
    """What scripts written for torchrun do, after leaving our world."""
    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=here.rank, world_size=here.size)
    x = torch.ones(1)
    dist.all_reduce(x)
    pair = dist.new_group([0, 1])
    if here.rank < 2:
        dist.all_reduce(x, group=pair)
    return float(x.item())


def test_a_user_may_leave_our_world_for_one_of_their_own_and_come_back(trio: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert trio.run(world_of_the_users_own, port) == [6.0, 6.0, 3.0]
    trio.form()
    assert trio.run(total) == [18.0] * 3


def split(here: Here) -> list[Any]:
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


# ---------------------------------------------------------------------------------------------------------------------
# The store


def test_the_store_is_reached_over_loopback_and_from_nowhere_else(forker: Forker) -> None:
    with World(forker, {"rank": 1}) as world:
        with socket.create_connection(("127.0.0.1", world.port), timeout=SOON_S):
            pass
        for address in addresses_of_this_machine():
            with pytest.raises(ConnectionRefusedError), socket.create_connection((address, world.port), timeout=SOON_S):
                pass


def addresses_of_this_machine() -> list[str]:
    import psutil

    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def listeners(here: Here) -> list[str]:
    import psutil

    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_gloo_listens_on_loopback_when_all_ranks_are_here(watched: World) -> None:
    for found in watched.run(listeners):
        assert found
        assert set(found) == {"127.0.0.1"}


# ---------------------------------------------------------------------------------------------------------------------
# CUDA


@pytest.fixture
def gpus(forker: Forker) -> Iterator[World]:
    with World(forker, {"rank": 1}, device="cuda") as world:
        yield world


def on_the_gpu(here: Here) -> list[Any]:
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
    assert (gathered, backend, running, ops, name) == ([0], "nccl", (), ["allreduce", "allreduce"], "nccl")


@pytest.mark.gpu
def test_an_aborted_nccl_group_refuses_collectives_and_is_formed_again(gpus: World) -> None:
    gpus.run(on_the_gpu)
    gpus.members[0].ask(sever, RankLost("gone"))
    assert type(gpus.members[0].error_of(on_the_gpu)).__name__ == "GroupBroken"
    gpus.form()
    assert gpus.run(on_the_gpu)[0][3] == "nccl"


def _no_warnings() -> None:
    """torch warns of its own deprecations while it is imported into the test's process, for tensors that come back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401


_no_warnings()
