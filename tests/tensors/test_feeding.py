"""Batches of every make on their way to the ranks: what arrives, in which order, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch.utils.data import TensorDataset

from meshbook.controller.mesh import Mesh
from meshbook.data import batches
from meshbook.errors import OperationFailed, PlacementError, TransferError, UsageError
from meshbook.tensors import feeding
from meshbook.tensors.creation import engine_of
from tests.budget import WAIT_S, when
from tests.standstill import stop
from tests.tensors.test_remote import live, spaces_of_this_rank


class Pair(NamedTuple):
    x: Any
    y: Any


def test_a_batch_is_cut_over_the_axis_and_is_one_tensor_here(mesh2: Mesh) -> None:
    source = [Pair(torch.arange(12.0).reshape(6, 2) + step, {"y": np.arange(6), "name": "a"}) for step in range(4)]
    for sent, got in zip(source, mesh2.feed(source), strict=True):
        assert isinstance(got, Pair)
        assert got.x.shape == (6, 2)
        assert str(got.x.placements) == "(Shard(dim=0),)"
        assert torch.equal(got.x.full_tensor(), sent.x)
        assert torch.equal(got.x.local(1), sent.x[3:])
        assert torch.equal(got.y["y"].full_tensor(), torch.arange(6))
        assert got.y["name"] == "a"


def test_ranks_along_other_axes_get_the_same_rows(mesh22: Mesh) -> None:
    rows = torch.arange(4.0)
    (batch,) = mesh22.feed([rows], axis="dp")
    assert [batch.local(rank).tolist() for rank in mesh22.ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    with pytest.raises(UsageError, match="the axes dp, tp; say over which"):
        mesh22.feed([rows])


def test_each_rank_can_be_given_its_own_rows(mesh2: Mesh) -> None:
    source = [(torch.arange(4.0) + step, step) for step in range(3)]
    sums = [
        mesh2.execute(lambda batch: (batch[0].sum().item(), batch[1]), got) for got in mesh2.feed(source, view="local")
    ]
    assert [dict(found) for found in sums] == [{0: (1.0 + 2 * s, s), 1: (5.0 + 2 * s, s)} for s in range(3)]


@pytest.mark.parametrize("make", [pa.table, pl.DataFrame, dict])
def test_tables_are_fed_by_rows_as_dicts_of_columns(mesh2: Mesh, make: Any) -> None:
    columns = {"a": np.arange(8), "b": np.linspace(0, 1, 8)}
    got = list(mesh2.feed(make(columns), batch_size=4))
    assert len(got) == 2
    for name, column in columns.items():
        assert torch.cat([batch[name].full_tensor() for batch in got]).tolist() == column.tolist()


def test_a_query_is_fed_as_it_is_read() -> None:
    query = duckdb.sql("select range as a, range * 0.5 as b from range(5000)")
    found = list(batches.iterate_batches(query, 1500))
    assert [len(batch["a"]) for batch in found] == [1500, 1500, 1500, 500]
    assert np.array_equal(np.concatenate([batch["b"] for batch in found]), np.arange(5000) * 0.5)


def test_columns_that_no_tensor_holds_are_named() -> None:
    with pytest.raises(TransferError, match="column 's' holds object values"):
        batches.normalize(pa.table({"s": ["a", "b"]}))
    with pytest.raises(TransferError, match="column 'n' has 1 missing values; fill them"):
        batches.normalize(pl.DataFrame({"n": [1, None]}))
    lists = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert batches.normalize(pa.table({"v": lists}))["v"].shape == (2, 2)


def test_a_batch_that_does_not_divide_is_refused_with_the_sum_or_dropped_or_cut(mesh2: Mesh) -> None:
    source = [torch.arange(4.0), torch.arange(3.0)]
    with pytest.raises(PlacementError, match=r"batch 1 has 3 rows, and 3 = 1 \* 2 \+ 1 cannot be cut evenly over dp=2"):
        list(mesh2.feed(source))
    assert len(list(mesh2.feed(source, drop_last=True))) == 1
    with pytest.raises(PlacementError, match="make its length divisible"):
        list(mesh2.feed([*reversed(source)], drop_last=True))
    last = list(mesh2.feed(source, uneven=True))[-1]
    assert torch.equal(last.full_tensor(), source[1])
    assert [len(last.local(rank)) for rank in mesh2.ranks] == [2, 1]


def test_what_the_source_raises_comes_up_in_the_loop_after_the_batches_before_it(mesh2: Mesh) -> None:
    def source() -> Iterator[Any]:
        yield torch.ones(2)
        raise ValueError("no more disk")

    seen = []

    def loop() -> None:
        for batch in mesh2.feed(source()):
            seen.append(batch.sum().item())

    with pytest.raises(ValueError, match="no more disk"):
        loop()
    assert seen == [2.0]


def test_what_ends_the_thread_that_sends_comes_up_in_the_loop(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrived(pump: Any, sent: Any) -> bool:
        raise SystemExit("of the library that reads the source")

    monkeypatch.setattr(feeding._Prefetcher, "_wait_until_received", arrived)
    with pytest.raises(SystemExit, match="of the library"):
        list(mesh2.feed([torch.ones(2)] * 20))


def test_a_batch_that_was_being_sent_as_the_loop_ended_is_released(
    mesh2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    discard = feeding._BatchSender.discard
    monkeypatch.setattr(
        feeding._BatchSender, "discard", lambda sender, sent: (released.append(sent), discard(sender, sent))
    )
    taken = threading.Event()
    feeds: list[Any] = []

    def source() -> Iterator[Any]:
        yield torch.ones(2)
        taken.wait(WAIT_S)
        feeds[0].close()  # the loop ends before this batch is sent
        yield torch.ones(2)

    feeds.append(mesh2.feed(source(), prefetch=2))
    next(iter(feeds[0]))
    pump = feeds[0]._prefetcher._thread
    taken.set()
    pump.join(WAIT_S)
    assert len(released) == 1


def test_a_source_that_hangs_as_the_loop_ends_is_closed_when_it_comes_back(mesh2: Mesh) -> None:
    pulled, comes_back, closed = (threading.Event() for _ in range(3))

    def source() -> Iterator[Any]:
        try:
            yield torch.ones(2)
            pulled.set()
            comes_back.wait(WAIT_S)
            yield torch.ones(2)
        finally:
            closed.set()

    feed = mesh2.feed(source())
    next(feed)
    assert pulled.wait(WAIT_S)
    feed.close()
    assert not closed.is_set()
    comes_back.set()
    assert closed.wait(WAIT_S)


def test_the_source_is_never_far_ahead_of_the_loop(mesh2: Mesh) -> None:
    pulled = threading.Semaphore(0)
    count = 0

    def source() -> Iterator[Any]:
        nonlocal count
        for step in range(40):
            count += 1
            pulled.release()
            yield torch.full((2,), float(step))

    feed = mesh2.feed(source(), prefetch=2)
    next(feed)
    for _ in range(3):  # one in the loop, two ready
        assert pulled.acquire(timeout=WAIT_S)
    assert not pulled.acquire(timeout=0.3)
    assert count == 3
    feed.close()


def test_ranks_with_nothing_to_do_get_a_batchs_operations_before_the_next_is_waited_for(mesh2: Mesh) -> None:
    engine = engine_of(mesh2)
    left: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for step in range(4):
            left.append(len(engine.queue))
            yield torch.arange(4.0) + step

    sums = []
    for batch in mesh2.feed(source(), prefetch=0):
        sums.append((batch + 1).mul(2).sub(3).add(4).sum())
        assert engine.sender.in_flight.wait_until_fewer(1, WAIT_S)
    assert [total.item() for total in sums] == [24, 32, 40, 48]
    assert set(left) == {0}


@pytest.mark.parametrize("view", ["global", "local"])
def test_a_loop_that_is_left_early_leaves_nothing_behind(mesh2: Mesh, view: str) -> None:
    closed = threading.Event()
    before = live(mesh2)

    def source() -> Iterator[Any]:
        try:
            while True:
                yield torch.ones(1 << 16)
        finally:
            closed.set()

    for batch in mesh2.feed(source(), view=view):
        del batch
        break
    assert closed.wait(WAIT_S)

    when(lambda: live(mesh2) == before)  # the thread that was sending lets go of its batch
    pool = mesh2.session.transfer._pool
    for _ in range(100):  # ranks tell with their next answers what they have let go of
        mesh2.execute(lambda: None)
        mesh2.session.release_unused()
        if pool.used_bytes == 0:
            break
    assert pool.used_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_async_source_is_fed_also_where_an_event_loop_runs(mesh2: Mesh, prefetch: int) -> None:
    async def source() -> AsyncIterator[Any]:
        for step in range(3):
            await asyncio.sleep(0)
            yield torch.full((4,), step)

    async def sums() -> list[int]:
        return [batch.sum().item() for batch in mesh2.feed(source(), prefetch=prefetch)]

    assert asyncio.run(sums()) == [0, 4, 8]


def test_what_an_async_source_raises_comes_up_in_the_loop(mesh2: Mesh) -> None:
    async def source() -> AsyncIterator[Any]:
        yield torch.ones(2)
        raise OSError("no more")

    feed = mesh2.feed(source())
    assert next(feed).sum().item() == 2
    with pytest.raises(OSError, match="no more"):
        next(feed)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_is_left_ends_what_an_async_source_awaits(mesh2: Mesh, prefetch: int) -> None:
    ended = list[str]()

    async def source() -> AsyncIterator[Any]:
        try:
            yield torch.ones(2)
            await asyncio.Event().wait()  # which nobody sets
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    feed = mesh2.feed(source(), prefetch=prefetch)
    next(feed)
    feed.close()
    when(lambda: ended == ["cleaned up"])
    when(lambda: not any(thread.name.startswith("meshbook-async") for thread in threading.enumerate()))


def test_what_a_rank_cannot_take_is_told_where_it_is_used(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(mesh2)
    before = live(mesh2)

    def send_nonsense(tensors: Any, placements: Any, feed: Any = engine.feed) -> Any:
        return feed([torch.ones(3) for _ in tensors], ["no placement"])

    monkeypatch.setattr(engine, "feed", send_nonsense)
    with mesh2.feed([torch.ones(4)]) as batches:
        total = next(batches) * 2
        with pytest.raises(OperationFailed, match="AttributeError"):
            total.full_tensor()
    monkeypatch.undo()
    del total
    assert next(mesh2.feed([torch.ones(4)])).sum().item() == 4
    assert live(mesh2) == before


def test_a_client_that_is_killed_leaves_no_batch_on_the_ranks(mesh2: Mesh) -> None:
    """Neither those that they have nor those that are on their way when it dies."""
    program = (
        "import meshbook, torch\n"
        f"mesh = meshbook.attach({mesh2.name!r})\n"
        "batches = mesh.feed([torch.full((4,), float(step)) for step in range(9)])\n"
        "print(next(batches).sum().item(), flush=True)\n"
        "input()\n"
        "print(*(tuple(next(batches).shape) for _ in range(2)), flush=True)\n"
        "input()\n"
    )
    before = set(mesh2.execute(spaces_of_this_rank).values())
    pids = list(mesh2.execute(os.getpid).values())
    client = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    bound = threading.Timer(90, client.kill)
    bound.start()
    try:
        assert client.stdout.readline() == "0.0\n"
        assert {count - 1 for count in mesh2.execute(spaces_of_this_rank).values()} == before
        stop(*pids)
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "(4,) (4,)\n"
    finally:
        bound.cancel()
        client.kill()
        client.communicate(timeout=WAIT_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    when(lambda: set(mesh2.execute(spaces_of_this_rank).values()) == before)


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (torch.ones(4), {}, "a Tensor is one batch; say how many rows"),
        ([torch.ones(4)], {"batch_size": 2}, "comes in batches of its own"),
        (TensorDataset(torch.ones(4)), {"batch_size": 2}, r"one sample at a time; feed\(.*DataLoader\(dataset, batch"),
        ([torch.ones(4)], {"prefetch": -1}, "prefetch=-1"),
        ([torch.ones(4)], {"view": "x"}, "there is no view 'x'"),
        (3, {}, "neither batches nor a table"),
        (["text"], {}, "batch 0 is a str without any tensor"),
    ],
)
def test_what_cannot_be_fed_is_refused(mesh2: Mesh, source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        list(mesh2.feed(source, **options))
