"""Meshes that get more ranks or fewer, for real: training goes on over the new number, and everybody learns of it.

What is trained is compared with one process that takes the same batches. Ranks are killed in every stage.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import meshbook
from meshbook.actor import SupervisionError
from meshbook.controller.mesh import Mesh
from meshbook.controller.resizing import check_gpus, new_axes
from meshbook.controller.starting import create_mesh
from meshbook.controller.subscription import MeshSubscription
from meshbook.errors import CellError, CellInterrupted, HealError, MeshShapeError, ResizeError, UsageError
from meshbook.mesh_axes import MeshAxes
from meshbook.tensors.engine import ENGINES
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when
from tests.controller.test_heal import kill, pids, press_stop_when, start, values
from tests.controller.test_heal_contents import DDP, TRAINING
from tests.gate import Gate

SUM = "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nint(t)"


def is_whole(mesh: Mesh, size: int) -> bool:
    return values(mesh, SUM) == dict.fromkeys(range(size), size * (size + 1) // 2)


# ---- training goes on


def trained_by_one_process(world_sizes: list[int]) -> list[torch.Tensor]:
    """The parameters after one step for each of these numbers of ranks, each with its own batch of `TRAINING`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number, world_size in enumerate(world_sizes):
        opt.zero_grad()
        for rank in range(world_size):
            batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * number + rank))
            (model(batch).square().mean() / world_size).backward()
        opt.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("in_setup", [True, False], ids=["built by a setup cell", "copied whole"])
def test_ddp_training_goes_on_over_more_ranks_and_over_fewer_with_the_same_objects(pair: Mesh, in_setup: bool) -> None:
    pair.run(TRAINING, echo=False)
    pair.run(DDP, setup=in_setup, echo=False)
    pair.run("identity = id(model), id(opt), id(dist.group.WORLD)", echo=False)
    world_sizes = [2, 2, 2]
    for number in range(3):
        pair.run(f"train({number})", echo=False)
    for size in (4, 3):
        before = pids(pair)
        pair.resize(size)
        for number in range(len(world_sizes), len(world_sizes) + 3):
            pair.run(f"train({number})", echo=False)
        world_sizes += [size] * 3
        found = values(pair, "[p.detach().clone() for p in model.parameters()]")
        assert list(found) == list(range(size))
        for parameters in found.values():
            torch.testing.assert_close(parameters, trained_by_one_process(world_sizes))
        same = pair.run("identity == (id(model), id(opt), id(dist.group.WORLD))", ranks="0-1", echo=False)
        assert dict(same.values) == {0: True, 1: True}
        assert all(pids(pair)[rank] == before[rank] for rank in (0, 1))


def test_what_it_says_has_the_axes_who_is_new_or_left_and_what_is_of_the_former_number(pair: Mesh) -> None:
    pair.run("import math", setup=True, echo=False)
    pair.run("step = 5\nshare = 64 // world_size\nmine = torch.arange(2) * rank", echo=False)
    first, *rest = str(pair.resize(3)).splitlines()
    assert re.fullmatch(
        r"2 → 3 ranks \(.*s\) · rank 2 is new · setup replayed \(1 cell\) · imports and definitions of 1 cell · "
        r"share from rank 0 \(alike on ranks 0-1\) · groups formed anew",
        first,
    ), first
    assert rest == [
        "not on rank 2: mine (it differs between the other ranks)",
        "computed from the former number of ranks: share (run their cells again)",
    ]
    resized = pair.resize(1)
    assert re.fullmatch(r"3 → 1 ranks \(.*s\) · ranks 1-2 left · groups formed anew", str(resized).splitlines()[0])
    assert (resized.before, resized.after, resized.left, resized.ranks) == ({"rank": 3}, {"rank": 1}, (1, 2), ())
    assert values(pair, "rank, world_size, dist.get_world_size(), math.e > 2, step") == {0: (0, 1, 1, True, 5)}


@pytest.mark.usefixtures("starts_meshes")
def test_axes_change_by_name_and_each_ranks_names_and_groups_with_them() -> None:
    with create_mesh({"dp": 3, "tp": 1}) as mesh:
        mesh.run("kept = dist.new_group([0, 1])\nevery = dist.new_group()\nold, tp = mesh, mesh.get_group('tp')")
        mesh.run("own = torch.distributed.init_device_mesh('cpu', (1, 3), mesh_dim_names=('a', 'b'))", echo=False)
        mesh.resize(dp=2, tp=2)
        assert mesh.axes == {"dp": 2, "tp": 2}
        assert values(
            mesh, "rank, world_size, tuple(mesh.get_coordinate()), __import__('os').environ['WORLD_SIZE']"
        ) == {rank: (rank, 4, (rank // 2, rank % 2), "4") for rank in range(4)}
        total = "t = torch.ones(1) * rank\ndist.all_reduce(t, group={})\nint(t)"
        assert values(mesh, total.format("mesh.get_group('dp')")) == {0: 2, 1: 4, 2: 2, 3: 4}
        assert values(mesh, total.format("mesh.get_group('tp')")) == {0: 1, 1: 1, 2: 5, 3: 5}
        assert dict(mesh.run(total.format("kept"), ranks="0-1", echo=False).values) == {0: 1, 1: 1}
        assert values(mesh, total.format("every")) == dict.fromkeys(range(4), 6)  # it was of all ranks, and still is
        assert values(mesh, total.format("dist.new_group()")) == dict.fromkeys(range(4), 6)
        with pytest.raises(CellError, match=r"resized from 3 to 4 ranks"):
            mesh.run("dist.all_reduce(torch.ones(1), group=tp)", ranks="0-1", echo=False)
        assert dict(mesh.run("old is mesh", ranks="0-1", echo=False).values) == {0: True, 1: True}
        with pytest.raises(CellError, match="before it was resized"):
            mesh.run("own.get_group('b')", ranks="0-1", echo=False)
        kill(mesh, 1)
        mesh.heal()  # forms groups of the same names
        assert values(mesh, total.format("mesh.get_group('dp')")) == {0: 2, 1: 4, 2: 2, 3: 4}
        assert dict(mesh.run(total.format("kept"), ranks="0-1", echo=False).values) == {0: 1, 1: 1}
        mesh.resize({"all": 3})
        assert is_whole(mesh, 3)
        with pytest.raises(MeshShapeError, match="no axis 'dp'"):
            mesh.resize(dp=2)


def test_a_group_with_a_rank_that_has_left_says_so(trio: Mesh) -> None:
    trio.run("last = dist.new_group([1, 2])", echo=False)
    trio.resize(2)
    with pytest.raises(CellError, match="of ranks 1-2: the mesh was resized from 3 to 2 ranks; make the group anew"):
        trio.run("dist.all_reduce(torch.ones(1), group=last)", ranks=1, echo=False)
    assert is_whole(trio, 2)


@pytest.mark.thorough
def test_samplers_deal_the_rows_of_the_next_epoch_to_the_ranks_that_there_are(pair: Mesh) -> None:
    sampler = "from torch.utils.data import DistributedSampler\nsampler = DistributedSampler(range(12), seed=3)"
    pair.run(sampler, setup=True, echo=False)
    pair.resize(3)
    pair.run("sampler.set_epoch(1)", echo=False)
    dealt = values(pair, "list(sampler)")
    assert sorted(row for rows in dealt.values() for row in rows) == list(range(12))
    assert {len(rows) for rows in dealt.values()} == {4}


def test_a_checkpoint_is_saved_and_restored_by_the_ranks_that_there_are(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = torch.arange(4.0)\nstep = 1", echo=False)
    pair.checkpoint(tmp_path, "x", "step", asynchronous=False)
    pair.resize(3)
    pair.run("x.zero_()\nstep = 2", echo=False)
    pair.restore(tmp_path)
    assert values(pair, "x.tolist(), step") == dict.fromkeys(range(3), ([0.0, 1.0, 2.0, 3.0], 1))
    assert pair.checkpoint(tmp_path, "x", "step", asynchronous=False).result().world_size == 3


@pytest.mark.usefixtures("starts_meshes")
@pytest.mark.thorough
def test_ranks_without_process_groups_and_on_several_hosts_are_resized() -> None:
    with create_mesh(2, process_group=False) as mesh:
        mesh.resize(3)
        assert values(mesh, "rank, world_size") == {rank: (rank, 3) for rank in range(3)}
    with create_mesh(2, num_hosts=2) as mesh:
        mesh.resize(3)
        assert is_whole(mesh, 3)
        mesh.resize(1)
        mesh.resize(2)  # on the host whose rank had left
        assert is_whole(mesh, 2)


# ---- elastic loops

ELASTIC = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
opt = torch.optim.AdamW(model.parameters())
rows = torch.arange(96.0).reshape(96, 1)
sampler = meshbook.ElasticSampler(rows, seed=5)
loader = DataLoader(rows, batch_size=2, sampler=sampler)
"""
LOOP = """
seen = []
for batch in mesh.elastic(loader, state=("model", "opt", "seen"), every={every}):
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()
    seen += batch.flatten().int().tolist()
    {fault}
"""


def rows_of(mesh: Mesh) -> dict[int, list[int]]:
    return values(mesh, "seen")


@pytest.mark.thorough
def test_every_row_of_an_epoch_is_dealt_once_over_two_resizes_in_the_middle_of_it(pair: Mesh) -> None:
    pair.run("import meshbook", echo=False)
    pair.run(ELASTIC, setup=True, echo=False)
    sampler_epoch = "sampler.set_epoch(3)\n"
    in_step_6 = "if len(seen) == 2 * 6: raise RuntimeError('here')"
    with pytest.raises(CellError, match="RuntimeError: here"):
        pair.run(sampler_epoch + LOOP.format(every=5, fault=in_step_6), echo=False)
    before = rows_of(pair)
    dealt = [row for rank in (0, 1) for row in before[rank][:10]]  # as of the snapshot of step 5
    pair.resize(4)
    in_step_5 = "if len(seen) == 2 * 5 and rank == 3: raise RuntimeError('there')"
    with pytest.raises(CellError, match="RuntimeError: there"):
        pair.run(sampler_epoch + LOOP.format(every=1, fault=in_step_5), echo=False)
    on_four = rows_of(pair)
    num_steps = len(on_four[3]) // 2 - 1  # the last is done again
    dealt += [row for rank in (0, 1) for row in on_four[rank][10 : 10 + 2 * num_steps]]
    dealt += [row for rank in (2, 3) for row in on_four[rank][: 2 * num_steps]]
    pair.resize(3)
    result = pair.run(sampler_epoch + LOOP.format(every=5, fault=""), echo=False)
    assert f"(snapshot of step {5 + num_steps}; 1 step is computed again)" in result.output
    assert "on 3 ranks, before on 4; seen is each rank's own" in result.output
    last = rows_of(pair)
    dealt += [row for rank in (0, 1) for row in last[rank][10 + 2 * num_steps :]]
    dealt += last[2][2 * num_steps :]
    num_filled_up = -(96 - 2 * 2 * 5 - 4 * 2 * num_steps) % 3  # in the last step
    assert set(dealt) == set(range(96))
    assert len(dealt) - 96 == num_filled_up
    found = values(pair, "[p.detach().clone() for p in model.parameters()]")
    for parameters in found.values():
        torch.testing.assert_close(parameters, found[0], rtol=0, atol=0)
    again = pair.run(LOOP.format(every=5, fault=""), echo=False)  # ended well: begins anew, with the whole epoch
    assert "elastic" not in again.output
    assert {len(rows) for rows in rows_of(pair).values()} == {32}


@pytest.mark.thorough
def test_a_loop_whose_loader_does_not_know_its_rows_says_what_to_give_it(pair: Mesh) -> None:
    pair.run("import meshbook", echo=False)
    pair.run(ELASTIC, setup=True, echo=False)
    plain = "loader = DataLoader(rows, batch_size=2)\n"
    with pytest.raises(CellError, match="RuntimeError: here"):
        pair.run(plain + LOOP.format(every=5, fault="if len(seen) == 12: raise RuntimeError('here')"), echo=False)
    pair.resize(3)
    with pytest.raises(CellError, match=r"sampler=meshbook.ElasticSampler\(dataset\)"):
        pair.run(plain + LOOP.format(every=5, fault=""), echo=False)
    pair.run(plain + LOOP.format(every=5, fault="").replace("every", "restart=True, every"), echo=False)
    assert {len(rows) for rows in rows_of(pair).values()} == {96}


# ---- who learns of it


@pytest.mark.thorough
def test_a_cell_that_another_client_sends_before_it_has_heard_of_a_change_is_refused(pair: Mesh) -> None:
    other, may_hear = meshbook.attach(pair.name), threading.Event()
    try:
        other.session.connection.listeners.ranks_changed.insert(0, lambda report: may_hear.wait())
        pair.resize(3)
        sent = [other.run("rank", wait=False, echo=False), other.run("rank", ranks=[0, 1], wait=False, echo=False)]
        may_hear.set()
        with pytest.raises(ResizeError, match=r"the mesh has 3 ranks now.* nothing was run, run it again"):
            sent[0].result(WAIT_S)
        assert dict(sent[1].result(WAIT_S).values) == {0: 0, 1: 1}
        assert values(other, "rank") == {0: 0, 1: 1, 2: 2}
        kill(pair, 1)
        when(lambda: other.session.lost == (1,))
        may_hear.clear()
        pair.heal()
        late = other.run("rank", wait=False, echo=False)
        may_hear.set()
        with pytest.raises(HealError, match="rank 1 has a new process, of which this process had not heard"):
            late.result(WAIT_S)
        assert values(other, "rank") == {0: 0, 1: 1, 2: 2}
    finally:
        may_hear.set()
        other.detach()


def test_views_other_clients_and_subscriptions_have_the_new_ranks(pair: Mesh) -> None:
    other = meshbook.attach(pair.name)
    slice_of_last, whole = pair.slice(rank=1), pair[0:2]
    try:
        with MeshSubscription(other.session, max_updates_per_s=10) as subscription:
            pair.resize(3)
            when(lambda: other.ranks == (0, 1, 2))
            assert (len(pair), repr(pair), other.axes) == (3, f"<Mesh {pair.name!r} rank=3>", {"rank": 3})
            assert is_whole(other, 3)
            assert slice_of_last.ranks == (1,)
            when(lambda: [rank.rank for rank in subscription.snapshot.ranks] == [0, 1, 2])
            other.resize(1)
            when(lambda: pair.ranks == (0,))
            when(lambda: [rank.rank for rank in subscription.snapshot.ranks] == [0])
        assert [rank.rank for rank in pair.status().ranks] == [0]
        assert whole.ranks == (0,)  # all ranks, whatever they are
        with pytest.raises(MeshShapeError, match=r"rank 1 is not in this mesh of 1 ranks \(0-0\)"):
            slice_of_last.run("1", echo=False)
        with pytest.raises(MeshShapeError, match="rank 1 is not"):
            pair.run("1", ranks=1, echo=False)
    finally:
        other.detach()


def test_remote_tensors_of_before_say_so_and_new_ones_compute(pair: Mesh) -> None:
    before = meshbook.distribute(torch.arange(6.0), pair, sharding_spec=["rank"])
    assert before.sum().item() == 15
    pair.resize(3)
    with pytest.raises(MeshShapeError, match="resized since this tensor was made, from rank=2 to rank=3"):
        before.sum().item()
    after = meshbook.distribute(torch.arange(6.0), pair, sharding_spec=["rank"])
    assert (after * 2).sum().item() == 30
    pair.resize(2)
    assert meshbook.distribute(torch.arange(6.0), pair, sharding_spec=["rank"]).sum().item() == 15


def test_actors_of_a_rank_that_leaves_end_with_it(pair: Mesh) -> None:
    counters = pair.spawn("counters", Counter)
    assert [value for _, value in counters.add.call().get().items()] == [1, 1]
    pair.resize(1)
    assert counters.slice(rank=0).add.call_one().get() == 2
    with pytest.raises(SupervisionError, match="its mesh was stopped, or resized without this rank"):
        counters.add.call().get()


# ---- when it cannot be done


def test_a_running_cell_and_wrong_sizes_are_refused_and_nothing_is_changed(pair: Mesh, gate: Gate) -> None:
    future = pair.run(gate.wait, wait=False, echo=False)
    with pytest.raises(ResizeError, match=r"the cell runs on ranks 0-1; wait for it, or press Stop"):
        pair.resize(3)
    gate.open()
    future.result(WAIT_S)
    with pytest.raises(ResizeError, match="the mesh has rank=2 already"):
        pair.resize(2)
    for wrong, error in (((0,), MeshShapeError), ((), UsageError), (("4",), MeshShapeError)):
        with pytest.raises(error):
            pair.resize(*wrong)
    assert pair.status().group_generation == 1


def test_more_ranks_than_gpus_are_refused_with_the_sum() -> None:
    with pytest.raises(MeshShapeError, match="6 ranks need 6: there are 4, 2 too few; resize to 4 at most"):
        check_gpus(2, 6, 4)
    check_gpus(2, 4, 4)
    check_gpus(6, 4, 4)
    check_gpus(6, 8, 4)  # they share the four


def test_a_number_that_the_other_axes_do_not_divide_shows_the_sum() -> None:
    axes = MeshAxes.of({"dp": 2, "tp": 2, "pp": 2})
    assert new_axes(axes, 12, {}).axes == {"dp": 3, "tp": 2, "pp": 2}
    assert new_axes(axes, None, {"tp": 1}).axes == {"dp": 2, "tp": 1, "pp": 2}
    with pytest.raises(MeshShapeError, match=r"6 ranks are no multiple of tp=2 \* pp=2 = 4; take 4 or 8 ranks"):
        new_axes(axes, 6, {})


# ---- faults


# What asks whether tensors can be cut anew waits at a gate, and says no.
REFUSE = """
from meshbook.rank.resharding import door
def find(self, command):
    import os
    os.write(1, b"looking\\n")
    {wait}
    return {{"sharded": ["x"], "problems": {{"x": "it cannot"}}, "catalog": "", "stale": []}}
door.ReshardingDoor.find = find
"""


@pytest.mark.thorough
def test_operations_of_another_program_wait_until_it_is_decided_whether_the_mesh_is_resized(
    pair: Mesh, gate: Gate
) -> None:
    other = meshbook.attach(pair.name)
    x = meshbook.distribute(torch.arange(6.0), other, sharding_spec=["rank"])
    assert x.sum().item() == 15
    (engine,) = (engine for engine in ENGINES if engine.session is other.session)
    pair.run(REFUSE.format(wait=gate.wait), echo=False)
    resizing = start(lambda: pair.resize(3), lambda: _has_said(pair, "looking", (0, 1)))
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(lambda: (x + 1).sum().item())
        when(lambda: len(engine.sender.in_flight) > 0 or waiting.done())
        gate.open()
        with pytest.raises(ResizeError, match="it cannot"):
            resizing.result(WAIT_S)
        assert waiting.result(WAIT_S) == 21
    assert (x * 2).sum().item() == 30
    other.detach()


@pytest.fixture
def stuck_setup(pair: Mesh, gate: Gate) -> Gate:
    """A setup cell that waits at a gate on ranks that join."""
    pair.run(
        f"import os\nif rank >= 2:\n    os.write(1, b'begun\\n')\n    {gate.wait}\nbuilt = True", setup=True, echo=False
    )
    return gate


def _has_said(mesh: Mesh, word: str, ranks: tuple[int, ...]) -> bool:
    return len(mesh.ranks) > max(ranks) and all(word in mesh.logs(rank) for rank in ranks)


@pytest.mark.thorough
def test_a_rank_that_does_not_end_is_killed_and_one_that_is_lost_meanwhile_is_replaced(trio: Mesh) -> None:
    trio.run("step = 1", echo=False)
    never = "import atexit, os, time\natexit.register(lambda: (os.write(1, b'leaving\\n'), time.sleep(600)))"
    trio.run(never, ranks=2, echo=False)
    resizing = start(lambda: trio.resize(2), lambda: "leaving" in trio.logs(2))
    kill(trio, 0)
    resized = resizing.result(WAIT_S)
    assert (resized.left, resized.ranks) == ((2,), (0,))
    assert values(trio, "step, world_size") == dict.fromkeys(range(2), (1, 2))
    assert is_whole(trio, 2)


def test_a_stop_ends_the_waiting_for_a_resize_and_says_what_came_of_it(
    pair: Mesh, stuck_setup: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshbook.controller.healing.AFTER_STOP_S", WAIT_S)
    press_stop_when(lambda: _has_said(pair, "begun", (2,)))
    with pytest.raises(
        CellInterrupted,
        match=r"^the resize was stopped, and was completed all the same:\n2 → 3 ranks(.|\n)* were not replayed",
    ):
        pair.resize(3)
    assert is_whole(pair, 3)
