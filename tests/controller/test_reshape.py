"""Models of FSDP2 and DTensors on a mesh that gets other ranks, for real: training goes on as if nothing had been.

What is trained is compared with one process that takes the same batches. Ranks are killed while parts of tensors move.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
import torch

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, ResizeError
from tests.budget import WAIT_S, when, when_printed
from tests.controller.test_heal import kill, start, values
from tests.controller.test_resize import _has_said
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Dims that no number of ranks divides; `head` has fewer rows than ranks.
NET = """
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(x))))
"""
MODEL = """
torch.manual_seed(0)
model = Net()

def batch(number):
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(number))

def train(number, accumulate=False):
    parts, part = share()
    loss = model(batch(number).chunk(parts)[part]).square().mean()
    loss.backward()
    if not accumulate:
        opt.step()
        opt.zero_grad()
    model.count += 1
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / world_size
"""
FSDP = """
for layer in (model.up, model.down):
    fully_shard(layer, reshard_after_forward=False)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=0.05)

def share():
    return world_size, rank
"""
HSDP = FSDP.replace("fully_shard(layer, ", "fully_shard(layer, mesh=mesh, ").replace(
    "shard(model)", "shard(model, mesh=mesh)"
)
FSDP_OVER_TP = """
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
for layer in (model.up, model.down, model):
    fully_shard(layer, mesh=mesh["dp"])
opt = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)

def share():
    return mesh["dp"].size(), mesh["dp"].get_local_rank()
"""
IDENTITY = "(id(model), id(opt), id(mesh), [id(p) for p in model.parameters()])"


class Alone:
    """The same training in this process."""

    def __init__(self) -> None:
        names: dict[str, object] = {"world_size": 1, "dist": torch.distributed}
        program = NET + MODEL.replace("dist.all_reduce(loss)", "pass")
        exec(program + "opt = torch.optim.AdamW(model.parameters(), lr=0.05)\ndef share(): return 1, 0", names)
        self.names, self.number = names, 0

    def train(self, **options: bool) -> float:
        self.number += 1
        loss: float = self.names["train"](self.number - 1, **options)  # type: ignore[operator]
        return loss


class Trained:
    """A mesh whose model is trained beside one of this process."""

    def __init__(self, mesh: Mesh, strategy: str, model: str = MODEL) -> None:
        self.mesh, self.alone = mesh, Alone()
        mesh.run(NET + model + strategy, setup=True, echo=False)
        mesh.run(f"identity = {IDENTITY}", echo=False)

    def train(self, num_steps: int = 2, **options: bool) -> None:
        for _ in range(num_steps):
            argument = f"{self.alone.number}, " + ", ".join(f"{key}={value}" for key, value in options.items())
            expected = self.alone.train(**options)
            found = values(self.mesh, f"train({argument})")
            assert list(found) == list(self.mesh.ranks)
            for loss in found.values():
                assert loss == pytest.approx(expected, rel=1e-4)

    def has_same_objects(self, *ranks: int) -> bool:
        return all(dict(self.mesh.run(f"identity == {IDENTITY}", ranks=ranks, echo=False).values).values())


@pytest.fixture
def square() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


# ---- training goes on


def test_fsdp_trains_on_over_fewer_ranks_and_over_more_with_the_same_objects() -> None:
    with create_mesh(4) as mesh:
        trained = Trained(mesh, FSDP)
        trained.train()
        for size in (3, 1, 2, 4):
            resized = mesh.resize(size)
            assert {"model", "opt"} <= set(resized.moved)
            trained.train()
            assert trained.has_same_objects(0)
        # what is computed between two steps moves too
        trained.train(1, accumulate=True)
        mesh.resize(2)
        trained.train()
        assert values(mesh, "model.count.item(), opt.state[model.head.bias]['step'].item()") == dict.fromkeys(
            (0, 1), (float(trained.alone.number), float(trained.alone.number - 1))
        )


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (HSDP, [{"dp": 1, "tp": 3}, {"dp": 3, "tp": 1}, {"dp": 2, "tp": 2}]),
        (FSDP_OVER_TP, [{"dp": 1, "tp": 3}, {"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}]),
    ],
    ids=["HSDP", "FSDP over TP"],
)
def test_two_axes_change_at_once_and_dtensors_keep_their_values(
    square: Mesh, strategy: str, changes: list[dict[str, int]]
) -> None:
    trained = Trained(square, strategy)
    square.run(
        "tp = mesh['tp']\n"
        "grid = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0), Shard(1)])\n"
        "twice = distribute_tensor(torch.arange(42.0).reshape(6, 7).t(), mesh, [Shard(0), Shard(0)])\n"
        "kept = {'row': [distribute_tensor(torch.arange(7), tp, [Shard(0)])], 'all': grid}\n"
        "same = grid.redistribute(mesh, [Replicate(), Replicate()])",
        echo=False,
    )
    trained.train()
    for axes in changes:
        square.resize(axes)
        whole = "[t.full_tensor().tolist() for t in (grid, twice.t(), kept['row'][0], same)]"
        grid = torch.arange(35.0).reshape(7, 5).tolist()
        expected = [grid, torch.arange(42.0).reshape(6, 7).tolist(), list(range(7)), grid]
        assert values(square, whole) == dict.fromkeys(square.ranks, expected)
        assert values(square, "kept['all'] is grid and tp.size()") == dict.fromkeys(square.ranks, axes["tp"])
        trained.train()
        assert trained.has_same_objects(0)


def test_tied_weights_ignored_parameters_mixed_precision_and_offloading_go_on(square: Mesh) -> None:
    square.run(
        NET + "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))\n"
        "model[1].weight = model[0].weight\n"
        "mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "fully_shard(model[2], mp_policy=mixed)\n"
        "fully_shard(model, ignored_params={model[1].bias}, offload_policy=CPUOffloadPolicy(pin_memory=False))\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "def train():\n"
        "    model(torch.ones(2, 5)).square().mean().backward()\n    opt.step()\n    opt.zero_grad()\n"
        "def whole():\n"
        "    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in (*model.parameters(), "
        "*(s['momentum_buffer'] for s in opt.state.values()))]",
        setup=True,
        echo=False,
    )
    square.run("train()", echo=False)
    before = values(square, "whole()")[0]
    for size in (3, 4):
        square.resize({"dp": size, "tp": 1})
        for found in values(square, "whole()").values():
            torch.testing.assert_close(found, before, rtol=0, atol=0)
    assert set(values(square, "model[1].weight is model[0].weight").values()) == {True}
    square.run("train()", echo=False)
    found = values(square, "whole()")
    for other in found.values():
        torch.testing.assert_close(other[:3], found[0][:3], rtol=0, atol=0)


def test_a_checkpoint_of_the_new_ranks_is_loaded_by_others(square: Mesh, tmp_path: object) -> None:
    trained = Trained(square, HSDP)
    trained.train()
    square.resize({"dp": 1, "tp": 3})
    square.checkpoint(str(tmp_path), "model", "opt", asynchronous=False)
    square.run("[p.detach().zero_() for p in model.parameters()]", echo=False)
    square.resize({"dp": 2, "tp": 1})
    square.restore(str(tmp_path))
    trained.train()


def test_an_elastic_loop_goes_on_on_other_ranks_with_the_step_of_its_last_snapshot() -> None:
    with create_mesh(3) as mesh:
        mesh.run("import meshbook\n" + NET + MODEL + FSDP + ROWS, setup=True, echo=False)
        mesh.run(
            ELASTIC.format(fault="if loop.step == 5: raise RuntimeError('here')"), wait=False, echo=False
        ).exception()
        resized = mesh.resize(2)
        assert "model" in resized.moved
        result = mesh.run(ELASTIC.format(fault=""), echo=False)
        assert (
            "goes on at step 5 (snapshot of step 4; 1 step is computed again); on 2 ranks, before on 3" in result.output
        )
        # 4 steps of 3 rows each, then 2 at a time
        steps = [list(range(3 * at, 3 * at + 3)) for at in range(4)] + [[at, at + 1] for at in range(12, 24, 2)]
        expected = trained_on(steps)
        for found in values(mesh, "[p.full_tensor() for p in model.parameters()]").values():
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        mesh.run(
            ELASTIC.format(fault="if loop.step == 5: raise RuntimeError('here')"), wait=False, echo=False
        ).exception()
        mesh.resize(3)
        with pytest.raises(CellError, match="opt differed between the 2 ranks of before, and there are 3"):
            mesh.run("opt = torch.optim.AdamW(model.parameters(), lr=0.05)\n" + ELASTIC.format(fault=""), echo=False)


def test_a_notice_has_the_mesh_go_on_without_the_rank_and_the_loop_with_its_next_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with create_mesh(3) as mesh:
        mesh.run("import meshbook\n" + NET + MODEL + FSDP + ROWS, setup=True, echo=False)
        mesh.on_preemption(grace_s=120, resize=True)
        cell = mesh.run(ELASTIC.format(fault=UNTIL_PREEMPTED), wait=False, echo=False)
        when(lambda: all("at work" in mesh.logs(rank) for rank in mesh.ranks))
        os.kill(mesh.status().ranks[2].pid or 0, signal.SIGTERM)
        with pytest.raises(CellError, match="rank 2 received SIGTERM; the loop was ended after step"):
            cell.result(WAIT_S)
        when_printed("goes on without rank 2, with rank=2", capsys)
        result = mesh.run(ELASTIC.format(fault=""), echo=False)
        found = re.search(r"goes on at step (\d+) \(.*; no step is computed again\); on 2 ranks", result.output)
        assert found, result.output
        at = int(found[1])
        steps = [list(range(3 * step, 3 * step + 3)) for step in range(at)]
        steps += [[row, row + 1] if row < 23 else [row, 0] for row in range(3 * at, 24, 2)]
        for parameters in values(mesh, "[p.full_tensor() for p in model.parameters()]").values():
            torch.testing.assert_close(parameters, trained_on(steps), rtol=1e-4, atol=1e-5)


# Row i is the i-th in every epoch; each rank takes one in a step.
ROWS = """
from torch.utils.data import DataLoader
rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(7))
sampler = meshbook.ElasticSampler(rows, shuffle=False)
loader = DataLoader(rows, batch_size=1, sampler=sampler)
"""
ELASTIC = """
loop = mesh.elastic(loader, state=("model", "opt"), every=2)
for batch in loop:
    model(batch).square().mean().backward()
    opt.step()
    opt.zero_grad()
    {fault}
"""
# The loop would otherwise be able to end before the ranks have agreed on a step.
UNTIL_PREEMPTED = """
    if loop.step == 3:
        print('at work', flush=True)
        while not meshbook.preempted(): pass
"""


def trained_on(steps: list[list[int]]) -> list[torch.Tensor]:
    """The parameters after steps on these rows, in one process."""
    names: dict[str, object] = {"world_size": 1, "dist": torch.distributed}
    exec(NET + MODEL + "opt = torch.optim.AdamW(model.parameters(), lr=0.05)", names)
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(7))
    for step in steps:
        names["x"] = rows[step]
        exec("model(x).square().mean().backward()\nopt.step()\nopt.zero_grad()", names)
    return [parameter.detach() for parameter in names["model"].parameters()]  # type: ignore[attr-defined]


# ---- what cannot be cut anew


PARTIAL = """
from torch.distributed.tensor import Partial
x = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
"""
MESH_OF_OWN = """
from torch.distributed.device_mesh import init_device_mesh
x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 2)), [Shard(0), Replicate()])
"""
HIDDEN = """
class Hidden:
    __slots__ = ["x"]
keeper = Hidden()
keeper.x = distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)])
"""
DIFFERENT = """
x = distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)])
if rank == 1:
    x = None
"""
ACCUMULATED = """
fully_shard(model).set_requires_gradient_sync(False)
model(torch.ones(2, 6)).sum().backward()
"""
UNEVEN = "fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape == (6, 12) else None)"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "fully_shard(model, reshard_after_forward=2)",
            r"model: it uses fully_shard\(reshard_after_forward=<a number>\)",
        ),
        (MESH_OF_OWN, "x: it uses DeviceMesh.* which is no slice of `mesh`"),
        (PARTIAL, "x: it holds partial sums; redistribute it first"),
        (UNEVEN, "dim 1 evenly only, and its 12 are no multiple of 5 ranks"),
        (HIDDEN, r"keeper: it refers to a DTensor of shape \(4,\) that is no parameter, state or item"),
        (DIFFERENT, "the DTensors of x are not the same on all ranks"),
        (ACCUMULATED, "model: it has gradients that are not reduced yet; finish the step first"),
        (
            "other = fully_shard(Net())",
            "other: .*: new ranks would not have the model: build it in a %%mesh --setup cell",
        ),
    ],
)
def test_what_cannot_be_cut_anew_is_refused_by_name_before_anything_is_changed(
    refusing: Mesh, program: str, why: str
) -> None:
    refusing.run(NET + "model = Net()\nx = keeper = None", setup=True, echo=False)
    refusing.run(program, echo=False)
    before = values(refusing, "mesh.mesh.tolist()")
    with pytest.raises(ResizeError, match=why) as error:
        refusing.resize({"dp": 5, "tp": 1})
    assert "%mesh restart --axes dp=5,tp=1" in str(error.value) or "not the same" in str(error.value)
    assert values(refusing, "mesh.mesh.tolist()") == before


@pytest.fixture(scope="module")
def refusing() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


def test_what_no_name_leads_to_says_so_when_it_is_used(square: Mesh) -> None:
    square.run(
        NET + "x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)])\n"
        "hidden = (lambda x: lambda: x + 1)(x)\ndel x",
        echo=False,
    )
    square.resize({"dp": 1, "tp": 2})
    with pytest.raises(CellError, match="no contents: no name led to it when the mesh was resized"):
        square.run("hidden()", echo=False)


# ---- lost ranks, and ranks that are lost meanwhile


def test_a_lost_rank_leaves_where_a_replica_holds_its_parts_and_else_the_way_is_shown(square: Mesh) -> None:
    trained = Trained(square, HSDP)
    trained.train()
    kill(square, 3)  # rank 2 leaves with it
    square.resize({"dp": 1, "tp": 2})
    trained.train()
    kill(square, 1)
    with pytest.raises(ResizeError, match=r"model: .*: parts of it were lost with rank 1, and no replica holds them"):
        square.resize({"dp": 1, "tp": 1})


PAUSE = """
from meshbook.rank.resharding import moving
carry_out = moving._Mover._carry_out
def pause(*arguments):
    import os
    if moving.dist.get_world_size() {when} and rank == {rank}:
        os.write(1, b"moving\\n")
        {wait}
    return carry_out(*arguments)
moving._Mover._carry_out = pause
"""


def test_a_rank_that_is_lost_while_parts_are_given_leaves_the_mesh_as_it_was(square: Mesh, gate: Gate) -> None:
    trained = Trained(square, HSDP)
    trained.train()
    square.run(PAUSE.format(when="== 4", rank=2, wait=gate.wait), echo=False)
    resizing = start(lambda: square.resize({"dp": 1, "tp": 1}), lambda: _has_said(square, "moving", (2,)))
    kill(square, 3)
    gate.open()
    with pytest.raises(ResizeError, match=r"the mesh was not resized: .*; nothing has changed"):
        resizing.result(WAIT_S)
    square.heal()
    assert square.axes == {"dp": 2, "tp": 2}
    trained.train()
    square.resize({"dp": 1, "tp": 3})
    trained.train()


def test_a_rank_that_is_lost_while_parts_move_leaves_a_mesh_that_heal_completes(square: Mesh, gate: Gate) -> None:
    trained = Trained(square, HSDP)
    trained.train()
    square.run(PAUSE.format(when="> 4", rank=2, wait=gate.wait), echo=False)
    resizing = start(lambda: square.resize(6), lambda: _has_said(square, "moving", (2,)))
    kill(square, 0)
    gate.open()
    with pytest.raises(ResizeError, match=r"the mesh has 6 ranks now, but .*%mesh heal"):
        resizing.result(WAIT_S)
    with pytest.raises(CellError, match="no contents: it is being cut for the mesh's new ranks"):
        square.run("model.head.weight + 1", ranks=2, echo=False)
    when(lambda: set(square.session.lost) == {0, 4, 5})
    healed = square.heal()
    assert not {name for missing in healed.missing.values() for name in missing} & {"model", "opt"}
    trained.train()


# As PAUSE, of the last step, in which tensors get their parts.
PAUSE_COMMIT = """
from meshbook.rank.resharding import moving
commit = moving.Resharding.commit
def pause(*arguments):
    import os
    if rank == {rank}:
        os.write(1, b"committing\\n")
        {wait}
    return commit(*arguments)
moving.Resharding.commit = pause
"""


@pytest.mark.parametrize("victim", [0, 2], ids=["which has its parts", "which is about to get them"])
def test_a_rank_that_is_lost_while_tensors_get_their_parts_costs_no_other_rank_its_own(gate: Gate, victim: int) -> None:
    with create_mesh(3) as mesh:
        mesh.run(NET + "x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])", setup=True, echo=False)
        mesh.run(PAUSE_COMMIT.format(rank=2, wait=gate.wait), echo=False)
        resizing = start(lambda: mesh.resize(4), lambda: _has_said(mesh, "committing", (2,)))
        kill(mesh, victim)
        gate.open()
        with pytest.raises(ResizeError, match=r"the mesh has 4 ranks now, but .*%mesh heal"):
            resizing.result(WAIT_S)
        assert mesh.session.lost == (victim,)
        healed = mesh.heal()
        assert "x" in healed.missing[victim]
        parts = values(mesh, f"x.to_local().tolist() if rank != {victim} else []")
        assert parts == {rank: [2.0 * rank, 2.0 * rank + 1] if rank != victim else [] for rank in range(4)}
        assert values(mesh, "world_size, x.shape[0]") == dict.fromkeys(range(4), (4, 8))


def test_parts_that_are_gone_for_good_are_named_and_are_not_numbers(gate: Gate) -> None:
    with create_mesh(3) as mesh:
        mesh.run(NET + "x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])", echo=False)
        mesh.run(PAUSE.format(when="> 3", rank=2, wait=gate.wait), echo=False)
        resizing = start(lambda: mesh.resize(4), lambda: _has_said(mesh, "moving", (2,)))
        kill(mesh, 1)
        gate.open()
        with pytest.raises(ResizeError, match="the mesh has 4 ranks now"):
            resizing.result(WAIT_S)
        when(lambda: set(mesh.session.lost) == {1, 3})
        healed = mesh.heal()
        assert {found["x"] for found in healed.missing.values()} == {"parts of it were lost with a rank, and are NaN"}
        assert "x (parts of it were lost" in str(healed)
        found = values(mesh, "x.full_tensor().tolist()")[3]
        assert [number for number in found if number == number] == [0.0, 1.0, 4.0, 5.0]
