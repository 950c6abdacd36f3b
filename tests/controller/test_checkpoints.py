"""Checkpoints of real ranks: what is saved, on how many ranks it is restored, and what does not fit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellInterrupted, CheckpointError, MeshShapeError, NotAttached, RankLost, UsageError
from meshbook.wire import checkpoint_folders
from tests.budget import WAIT_S, when, when_printed
from tests.controller.test_heal import kill, press_stop_when
from tests.gate import Gate
from tests.soak.checkpoint_kills import kill_during_a_save

pytestmark = pytest.mark.usefixtures("starts_meshes")

# A model and its optimizer, and what compares them: all of their state as whole tensors, on every rank.
MODEL = """
import copy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh

def build(seed, sizes=(6, 10, 4)):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(sizes[0], sizes[1]), torch.nn.BatchNorm1d(sizes[1]), torch.nn.Linear(sizes[1], sizes[2])
    )

def fsdp(seed, mesh=None):
    return fully_shard(build(seed), mesh=mesh or init_device_mesh("cpu", (world_size,)))

def train(steps=1):
    torch.manual_seed(100)
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()

def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

def state():
    found = {name.removeprefix("module."): whole(tensor) for name, tensor in model.state_dict().items()}
    for number, (parameter, entries) in enumerate(opt.state.items()):
        found |= {f"{number} {key}": whole(tensor) for key, tensor in entries.items()}
    return found
"""

FSDP = "model = fsdp({seed})\nopt = torch.optim.AdamW(model.parameters(), lr={lr})"
PLAIN = "model = build({seed})\nopt = torch.optim.AdamW(model.parameters(), lr={lr})"
DDP = "model = DistributedDataParallel(build({seed}))\nopt = torch.optim.AdamW(model.parameters(), lr={lr})"
LARGER = "larger = torch.nn.ModuleDict({'model': model, 'other': torch.nn.Linear(2, 2)})"

STATEFUL = """
class Stateful:
    def state_dict(self): return {state}
    def load_state_dict(self, state): pass
bad = Stateful()
"""


def same(mesh: Mesh, source: str) -> Any:
    """The value that a cell has on all ranks alike, in the sense of torch.equal."""
    values = list(mesh.run(source, echo=False).values.values())
    for other in values[1:]:
        assert are_equal(values[0], other)
    return values[0]


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def save(mesh: Mesh, path: Path, *names: str, **options: Any) -> Any:
    return mesh.checkpoint(path, *names, **options).result(WAIT_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], float]:
    """A checkpoint of FSDP2 on four ranks after three steps: where, the whole state, and the loss of the next step."""
    path = tmp_path_factory.mktemp("saved") / "run1"
    with create_mesh(4) as mesh:
        mesh.run(MODEL + FSDP.format(seed=1, lr=0.05) + "\ntrain(3)\nfor b in model.buffers(): dist.broadcast(b, 0)")
        state = same(mesh, "state()")
        save(mesh, path, "model", "opt", step=800)
        return path, state, mesh.run("train()", echo=False).values[0]


@pytest.mark.numbers
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, 3, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_a_checkpoint_of_four_ranks_is_restored_on_any_number(
    saved: tuple[Path, dict[str, torch.Tensor], float], num_ranks: int
) -> None:
    path, state, next_loss = saved
    with create_mesh(num_ranks) as mesh:
        mesh.run(MODEL + FSDP.format(seed=9, lr=0.7))
        mesh.restore(path)
        assert are_equal(same(mesh, "state()"), state)
        assert mesh.run("train()", echo=False).values[0] == pytest.approx(next_loss, rel=1e-5)
        assert same(mesh, "opt.param_groups[0]['lr']") == 0.05


@pytest.mark.numbers
def test_a_checkpoint_of_one_axis_is_restored_on_two(saved: tuple[Path, dict[str, torch.Tensor], float]) -> None:
    path, state, _ = saved
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        mesh.run(
            MODEL
            + "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
            'model = build(9)\nparallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})\n'
            'fully_shard(model, mesh=mesh["dp"])\nopt = torch.optim.AdamW(model.parameters())'
        )
        mesh.restore(path)
        assert are_equal(same(mesh, "state()"), state)
        assert same(mesh, "[str(p) for p in model[0].weight.placements]")[-1] == "S(0)"


@pytest.mark.numbers
def test_plain_torch_reads_the_model_under_its_usual_names(saved: tuple[Path, dict[str, torch.Tensor], float]) -> None:
    path, state, _ = saved
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 4))
    wanted = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="intent is to load in a single process"):
        dcp.load(wanted, checkpoint_id=str(path / "step-00000800"), no_dist=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in wanted["model"].items())
    metadata = dcp.FileSystemReader(path / "step-00000800").read_metadata()
    assert metadata.state_dict_metadata["opt.state.0.weight.exp_avg"].size == (10, 6)


@pytest.mark.numbers
def test_plain_torch_computes_the_same_step_from_it(saved: tuple[Path, dict[str, torch.Tensor], float]) -> None:
    path, _, next_loss = saved
    with create_mesh(1) as mesh:
        mesh.run(MODEL + PLAIN.format(seed=9, lr=0.7))
        mesh.restore(path)
        assert mesh.run("train()", echo=False).values[0] == pytest.approx(next_loss, rel=1e-5)


# ---- kinds of names


@pytest.mark.numbers
def test_a_model_in_ddp_is_restored_without_it_with_rank_zeros_buffers(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(MODEL + DDP.format(seed=1, lr=0.05) + "\ntrain(2)\nmodel.module[1].running_mean.add_(rank)")
    state = mesh.run("state()", echo=False).values[0]
    mean = mesh.run("model.module[1].running_mean.clone()", echo=False).values[0]
    info = save(mesh, tmp_path / "ddp", "model", "opt")
    assert info.names == ("model", "opt")
    with create_mesh(1) as alone:
        alone.run(MODEL + PLAIN.format(seed=9, lr=0.7))
        alone.restore(tmp_path / "ddp")
        assert are_equal(same(alone, "state()"), state)
        assert torch.equal(same(alone, "model[1].running_mean"), mean)
    mesh.run("train()")
    mesh.restore(tmp_path / "ddp")
    assert are_equal(same(mesh, "state()"), state)


def test_replicas_of_a_ddp_model_that_differ_are_saved_by_rank_and_said(
    mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.run(MODEL + DDP.format(seed=1, lr=0.05))
    save(mesh, tmp_path / "same", "model")
    mesh.run("model.module[0].bias.data += rank")
    mesh.checkpoint(tmp_path / "run", "model", step=3).result(WAIT_S)
    printed = when_printed("goes back to 4 ranks only", capsys)
    assert printed.count("the replicas of a DDP model differ: model.0.bias (mesh.diff(0, 1, 'model') shows where)") == 1
    mesh.run("own = model.module[0].bias.clone(); model.module[0].bias.data.zero_()")
    mesh.restore(tmp_path / "run")
    assert same(mesh, "torch.equal(own, model.module[0].bias)")


def test_an_optimizer_is_restored_where_a_larger_module_holds_its_model_by_now(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(MODEL + PLAIN.format(seed=1, lr=0.05) + "\ntrain(2)")
    state = same(mesh, "state()")
    save(mesh, tmp_path / "run", "model", "opt")
    mesh.run(f"train(1)\n{LARGER}")
    mesh.restore(tmp_path / "run")
    assert are_equal(same(mesh, "state()"), state)
    mesh.run("plain = torch.optim.SGD(model.parameters(), lr=0.05); del larger")
    save(mesh, tmp_path / "plain", "plain")  # which has no state by parameter
    mesh.run(f"{LARGER}; plain.param_groups[0]['lr'] = 1")
    mesh.restore(tmp_path / "plain")
    assert same(mesh, "plain.param_groups[0]['lr']") == 0.05


@pytest.mark.numbers
def test_training_goes_on_bit_for_bit_with_scheduler_step_and_random_numbers(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(
        MODEL + FSDP.format(seed=1, lr=0.05) + "\nsched = torch.optim.lr_scheduler.StepLR(opt, 2)\nstep = 0\n"
        "torch.manual_seed(rank)\n"
        "def some(count):\n"
        "    global step\n"
        "    losses = []\n"
        "    for _ in range(count):\n"
        "        loss = model(torch.randn(8, 6)).square().mean()\n"
        "        loss.backward(); opt.step(); opt.zero_grad(); sched.step(); step += 1\n"
        "        losses.append((loss.item(), sched.get_last_lr(), step, torch.rand(1).item()))\n"
        "    return losses\n"
        "some(3)"
    )
    save(mesh, tmp_path / "run", "model", "opt", "sched", "step", "rng", step=3)
    first = mesh.run("some(4)", echo=False).values
    mesh.restore(tmp_path / "run", step=3)
    assert dict(mesh.run("some(4)", echo=False).values) == dict(first)


@pytest.mark.numbers
def test_values_that_differ_by_rank_are_restored_by_rank(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(
        "mine = {'position': rank}\nours = {'name': 'x', 'sizes': (1, 2)}\nlocal = torch.full((3,), float(rank))\n"
        "gen = torch.Generator().manual_seed(rank)\nplain = torch.nn.Linear(2, 2)\n"
        "with torch.no_grad(): plain.weight.fill_(rank); plain.bias.fill_(1)"
    )
    save(mesh, tmp_path / "run", "mine", "ours", "local", "gen", "plain")
    drawn = mesh.run("torch.rand(1, generator=gen).item()", echo=False).values
    mesh.run("mine = ours = None\nlocal.zero_()\nwith torch.no_grad(): plain.weight.zero_(); plain.bias.zero_()")
    mesh.restore(tmp_path / "run")
    values = mesh.run("(mine, ours, local.tolist(), plain.weight.mean().item(), plain.bias.tolist())").values
    for rank in range(4):
        assert values[rank] == ({"position": rank}, {"name": "x", "sizes": (1, 2)}, [rank] * 3, rank, [1, 1])
    assert dict(mesh.run("torch.rand(1, generator=gen).item()", echo=False).values) == dict(drawn)
    listed = str(mesh.checkpoints(tmp_path / "run"))
    assert "mine (per rank), ours, local (per rank), gen (per rank), plain (per rank)" in listed


def test_what_differs_by_rank_is_not_restored_on_another_number_of_ranks(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run("mine = rank\nours = [1, 2]\nlocal = torch.ones(2) * rank")
    save(mesh, tmp_path / "run", "mine", "ours", "local", "rng")
    with create_mesh(2) as smaller:
        smaller.run("local = torch.zeros(2)")
        for names in (("local", "rng"), ("mine", "ours")):
            with pytest.raises(CheckpointError, match="nothing was changed") as raised:
                smaller.restore(tmp_path / "run", *names)
            for name in names:
                is_named = f"{name} was saved by 4 ranks, and here are 2" in str(raised.value)
                assert is_named == (name != "ours")
        smaller.restore(tmp_path / "run", "ours")
        assert same(smaller, "(ours, local.tolist())") == ([1, 2], [0, 0])


def test_an_optimizer_that_has_made_no_step_is_saved_as_it_is(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(MODEL + FSDP.format(seed=1, lr=0.05))
    before = same(mesh, "state()")
    save(mesh, tmp_path / "run", "model", "opt")
    assert same(mesh, "len(opt.state)") == 0
    mesh.run("train(2)")
    mesh.restore(tmp_path / "run")
    assert are_equal(same(mesh, "state()"), before)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("bad = lambda: 1", "`bad` .function. cannot be pickled"),
        ("bad = torch.empty(2, device='meta')", "is on the meta device"),
        ("bad = 1 if rank == 0 else 'x' if rank else None\ndel bad", "`bad` is not bound on this rank"),
        ("bad = 1 if rank else torch.ones(2)", "`bad` is a tensor on rank 0 and a value on ranks 1-3"),
        (
            "from torch.distributed.tensor import DTensor, Partial\n"
            "bad = DTensor.from_local(torch.ones(2), mesh['dp'], [Partial()])",
            "Partial placement; redistribute it",
        ),
        (
            "bad = torch.optim.SGD([torch.ones(2, requires_grad=True)])",
            "1 of the 1 parameters of `bad` have no name",
        ),
        (
            STATEFUL.format(state="{'a.b': torch.ones(2), 'a': {'b': torch.zeros(2)}}"),
            r"`bad` has \['a.b'\] and \['a'\]\['b'\], which are both `bad.a.b` in a checkpoint: rename one",
        ),
        (
            STATEFUL.format(state="{'step@rank1': torch.ones(2)}"),
            "`bad.step@rank1` ends like what a rank has",
        ),
    ],
)
def test_what_cannot_be_saved_is_an_error_on_all_ranks_and_leaves_no_folder(
    mesh: Mesh, tmp_path: Path, source: str, error: str
) -> None:
    mesh.run(source)
    with pytest.raises(CheckpointError, match=error):
        mesh.checkpoint(tmp_path / "run", "bad")
    when(lambda: not os.path.exists(tmp_path / "run") or not os.listdir(tmp_path / "run"))
    mesh.run("good = 1")
    save(mesh, tmp_path / "run", "good")


def test_wrong_calls_say_what_is_right(mesh: Mesh, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which names"):
        mesh.checkpoint(tmp_path)
    mesh.run("w = torch.ones(3)")
    with pytest.raises(UsageError, match="as strings, and not a RemoteTensor"):
        mesh.checkpoint(tmp_path, mesh["w"])
    with pytest.raises(UsageError, match="'model\\.weight' is not a name"):
        mesh.checkpoint(tmp_path, "model.weight")
    with pytest.raises(UsageError, match="a name is there twice"):
        mesh.checkpoint(tmp_path, "a", "a")
    with pytest.raises(UsageError, match="step=-1"):
        mesh.checkpoint(tmp_path, "a", step=-1)
    with pytest.raises(MeshShapeError, match="use the whole mesh"):
        mesh.slice(dp=0).checkpoint(tmp_path, "a")


# ---- what does not fit


@pytest.mark.parametrize(
    ("source", "complaints"),
    [
        (
            "model = build(9, (6, 12, 4))",
            ["0.weight is (12, 6) here and (10, 6) in the checkpoint", "2.weight is (4, 12)"],
        ),
        (
            "model = torch.nn.Sequential(*build(9), torch.nn.Linear(4, 4))",
            ["missing in the checkpoint: model.3.weight; model.3.bias"],
        ),
        ("model = build(9)[:2]", ["in the checkpoint only: model.2.bias; model.2.weight"]),
        ("model = build(9).double()", ["model.0.weight is torch.float64 here and torch.float32 in the checkpoint"]),
        ("model = 5", ["`model`: it is a value here and a module in the checkpoint"]),
        ("del model", ["`model`: no such name is bound here; run the cell that makes the module"]),
        ("opt = torch.optim.AdamW(list(model.parameters())[:2])", ["opt: 2.bias", "opt: 2.weight"]),
        (
            "p = list(model.parameters())\nopt = torch.optim.AdamW([{'params': p[:2]}, {'params': p[2:]}])",
            ["opt has its parameters in other groups: groups of [2, 4] here and of [6] there"],
        ),
    ],
)
def test_another_structure_is_listed_and_nothing_is_changed(
    mesh: Mesh, saved: tuple[Path, dict[str, torch.Tensor], float], source: str, complaints: list[str]
) -> None:
    mesh.run(MODEL + PLAIN.format(seed=9, lr=0.7) + "\nother = 5\n" + source)
    held = (
        "{name: whole(each) for name, each in model.state_dict().items()}"
        " if isinstance(globals().get('model'), torch.nn.Module) else 0"
    )
    before = same(mesh, held)
    with pytest.raises(CheckpointError, match="nothing was changed") as raised:
        mesh.restore(saved[0])
    for complaint in complaints:
        assert complaint in str(raised.value)
    assert are_equal(same(mesh, held), before)
    assert same(mesh, "(len(opt.state), opt.param_groups[0]['lr'])")[0] == 0


def test_a_structure_that_does_not_fit_on_one_rank_changes_nothing_on_any(
    mesh: Mesh, saved: tuple[Path, dict[str, torch.Tensor], float]
) -> None:
    mesh.run(MODEL + PLAIN.format(seed=9, lr=0.7) + "\nif rank == 2: model[2] = torch.nn.Linear(10, 5)")
    before = mesh.run("state()", echo=False).values
    with pytest.raises(CheckpointError, match=r"model.2.weight is \(5, 10\) here and \(4, 10\)"):
        mesh.restore(saved[0], "model")
    after = mesh.run("state()", echo=False).values
    assert all(are_equal(before[rank], after[rank]) for rank in range(4))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "metadata"])
def test_a_damaged_checkpoint_is_found_out_before_anything_is_changed(mesh: Mesh, tmp_path: Path, damage: str) -> None:
    mesh.run(MODEL + FSDP.format(seed=1, lr=0.05) + "\ntrain(1)")
    folder = Path(save(mesh, tmp_path / "run", "model", "opt").folder)
    mesh.run("train(1)")
    before = same(mesh, "state()")
    file = folder / (".metadata" if damage == "metadata" else "__2_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    match damage:
        case "truncate":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
        case _:
            file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"restore another checkpoint|cannot be read by torch"):
        mesh.restore(tmp_path / "run")
    assert are_equal(same(mesh, "state()"), before)


# ---- what is planned once

COUNT_PLANS = """
import meshbook.rank.checkpoints.planning as _planning
if not hasattr(_planning, "plan_now"): _planning.plan_now = _planning._plan_together
num_plans = 0
backwards = lambda: DeviceMesh("cpu", [3, 2, 1, 0])
def _count_plans(*arguments):
    global num_plans
    num_plans += 1
    return _planning.plan_now(*arguments)
_planning._plan_together = _count_plans
tensors = lambda x: list(x.values()) if isinstance(x, nn.Module) else [x]
contents = lambda x: [(each.to_local() if isinstance(each, DTensor) else each).tolist() for each in tensors(x)]
"""


@pytest.fixture
def counted(mesh: Mesh) -> Iterator[Mesh]:
    """The shared mesh, which counts how often it plans a save."""
    mesh.run("from torch.distributed.device_mesh import DeviceMesh\nfrom torch import nn" + MODEL + COUNT_PLANS)
    yield mesh
    mesh.run("_planning._plan_together = _planning.plan_now")


SHARDED = "on = init_device_mesh('cpu', (4,)); x = distribute_tensor(torch.arange(32.).reshape(4, 8), on, [Shard(0)])"
# What x is at first, what is done then, and whether the second save has to be planned anew.
CHANGES = {
    "its values are others": ("x = torch.zeros(8)", "x += 1", False),
    "it differs as before": ("x = torch.zeros(8) + rank", "x *= 2", False),
    "it differs between ranks": ("x = torch.zeros(8)", "x += rank", True),
    "it differs on other ranks": ("x = torch.zeros(8) + (rank > 1)", "x = torch.zeros(8) + (rank > 0)", True),
    "its shape is another": ("x = torch.zeros(8)", "x = torch.ones(2, 4)", True),
    "its dtype is another": ("x = torch.zeros(8)", "x = x.double() + 1", True),
    "its placement is another": (SHARDED, "x = distribute_tensor(x.full_tensor(), on, [Shard(1)])", True),
    "its mesh is another": (SHARDED, "x = DTensor.from_local(x.to_local(), backwards(), [Shard(0)])", True),
    "it has one more key": ("x = nn.ParameterDict({'a': torch.zeros(8)})", "x['b'] = torch.ones(2)", True),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_is_planned_anew_if_the_structure_of_its_state_has_changed(
    counted: Mesh, change: str, tmp_path: Path
) -> None:
    first, then, is_planned = CHANGES[change]
    counted.run(f"with torch.no_grad(): {first}")
    save(counted, tmp_path / "run", "x", step=1)
    before = same(counted, "num_plans")
    counted.run(f"with torch.no_grad(): {then}")
    wanted = counted.run("contents(x)", echo=False).values
    save(counted, tmp_path / "run", "x", step=2)
    assert same(counted, "num_plans") == before + is_planned
    counted.run("with torch.no_grad(): [each.zero_() for each in tensors(x)]")
    counted.restore(tmp_path / "run", step=2)
    assert dict(counted.run("contents(x)", echo=False).values) == dict(wanted)


# ---- saves while something else happens

# Writing waits for a file, on every rank.
HOLD = """
import meshbook.rank.checkpoints.writing as _writing
if not hasattr(_writing, "write_now"): _writing.write_now = _writing.write_part
def _write_later(*arguments):
    {wait}
    _writing.write_now(*arguments)
_writing.write_part = _write_later
"""
LET_GO = "_writing.write_part = _writing.write_now"


@pytest.fixture
def held(mesh: Mesh, gate: Gate) -> Iterator[Mesh]:
    """The shared mesh, whose saves are not written before the gate is open."""
    mesh.run(HOLD.format(wait=gate.wait) + "x = torch.zeros(4) + rank * 0")
    yield mesh
    gate.open()
    mesh.run(LET_GO)


@pytest.mark.numbers
def test_a_save_has_the_values_of_its_call_whatever_follows(held: Mesh, gate: Gate, tmp_path: Path) -> None:
    began = time.monotonic()
    opened = held.checkpoint(tmp_path / "run", "x", step=1)
    assert opened.num_bytes > 0
    assert 0 < opened.seconds < time.monotonic() - began
    held.run("x += 7")
    assert not opened.done()
    assert str(held.checkpoints(tmp_path / "run")).endswith("has no checkpoint yet.")
    gate.open()
    opened.result(WAIT_S)
    held.run("x += 1")
    held.restore(tmp_path / "run")
    assert same(held, "x.tolist()") == [0] * 4


def test_two_saves_at_once_are_made_one_after_the_other(held: Mesh, gate: Gate, tmp_path: Path) -> None:
    first = held.checkpoint(tmp_path / "run", "x", step=1)
    held.run("x += 1")
    seconds: list[Any] = []
    second = threading.Thread(target=lambda: seconds.append(held.checkpoint(tmp_path / "run", "x", step=2)))
    second.start()
    when(lambda: held.status().ranks[0].state == "busy")
    assert not first.done()
    gate.open()
    second.join(WAIT_S)
    assert first.result(WAIT_S).saved_at <= seconds[0].result(WAIT_S).saved_at
    for step, value in ((1, 0), (2, 1)):
        held.restore(tmp_path / "run", step=step)
        assert same(held, "x.tolist()") == [value] * 4


def test_stop_ends_a_save_that_waits_for_the_one_before(held: Mesh, gate: Gate, tmp_path: Path) -> None:
    first = held.checkpoint(tmp_path / "run", "x", step=1)
    errors: list[BaseException] = []

    def save_again() -> None:
        try:
            held.checkpoint(tmp_path / "run", "x", step=2)
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=save_again)
    second.start()
    when(lambda: held.status().ranks[0].state == "busy")
    held.interrupt()
    second.join(WAIT_S)
    assert isinstance(errors[0], CellInterrupted)
    gate.open()
    assert first.result(WAIT_S).step == 1
    when(lambda: os.listdir(tmp_path / "run") == ["step-00000001"])


def test_groups_that_are_formed_anew_end_the_save_and_the_one_before_stays(tmp_path: Path, gate: Gate) -> None:
    with create_mesh(2) as mesh:
        mesh.run("x = torch.zeros(4)")
        save(mesh, tmp_path / "run", "x", step=1)
        mesh.run(HOLD.format(wait=gate.wait) + "x += 1")
        opened = mesh.checkpoint(tmp_path / "run", "x", step=2)
        stuck = mesh.run(  # a collective that rank 0 alone has begun
            "if rank == 0: work = dist.all_reduce(x, async_op=True)\nprint('begun')\n__import__('time').sleep(1000)",
            wait=False,
            echo=False,
        )
        when(lambda: all("begun" in mesh.logs(rank) for rank in range(2)))
        mesh.interrupt()
        assert isinstance(stuck.exception(WAIT_S), CellInterrupted)
        mesh.run("pass")
        assert mesh.status().group_generation == 2
        gate.open()
        with pytest.raises(CheckpointError, match=r"formed anew \(generation 2\).* was saved before is as it was"):
            opened.result(WAIT_S)
        mesh.run(LET_GO)
        assert mesh.restore(tmp_path / "run").step == 1
        assert save(mesh, tmp_path / "run", "x", step=2).generation == 2
        when(lambda: sorted(os.listdir(tmp_path / "run")) == ["step-00000001", "step-00000002"])


@pytest.mark.parametrize(("what", "begin"), [
    ("the resize", lambda mesh: mesh.resize(2)),
    ("the heal", lambda mesh: mesh.heal()),
    ("the end of mesh saving", lambda mesh: mesh.stop()),
])  # fmt: skip
def test_what_would_end_a_save_that_is_being_written_waits_for_it(
    what: str, begin: Callable[[Mesh], object], tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    with create_mesh(3, name="saving") as mesh:
        mesh.run(HOLD.format(wait=gate.wait) + "x = torch.ones(4)", echo=False)
        opened = mesh.checkpoint(tmp_path / "run", "x")
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(begin, mesh)
            when_printed(f"{what} waits for the checkpoint", capsys)
            assert not opened.done()
            gate.open()
            done.result(WAIT_S)
        assert opened.result(WAIT_S).world_size == 3


def test_stop_gives_up_a_save_that_a_resize_waits_for_and_whose_writers_hang(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    with create_mesh(3) as mesh:
        mesh.run(HOLD.format(wait=gate.wait) + "x = torch.ones(4)", echo=False)
        opened = mesh.checkpoint(tmp_path / "run", "x")
        press_stop_when(lambda: "the resize waits for the checkpoint" in capsys.readouterr().out)
        with pytest.raises(KeyboardInterrupt):
            mesh.resize(2)
        with pytest.raises(CheckpointError, match="thrown away: it was stopped while it was written"):
            opened.result(WAIT_S)
        assert mesh.resize(2).left == (2,)


def test_a_save_that_the_mesh_did_not_survive_says_so(tmp_path: Path, gate: Gate, capsys: Any) -> None:
    mesh = create_mesh(2)
    mesh.run("x = torch.ones(4)\n" + HOLD.format(wait=gate.wait))
    opened = mesh.checkpoint(tmp_path / "run", "x", step=1)
    mesh.session.stop()
    with pytest.raises(CheckpointError, match="the mesh has ended before it was committed"):
        opened.result(WAIT_S)
    assert "was thrown away" in "".join(capsys.readouterr())
    with pytest.raises(NotAttached):
        mesh.checkpoint(tmp_path / "run", "x")
    assert checkpoint_folders.list_checkpoints(tmp_path / "run") == []


def test_a_mesh_that_has_lost_a_rank_saves_nothing(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = 1")
    kill(pair, 1)
    with pytest.raises(RankLost, match="rank 1"):
        pair.checkpoint(tmp_path / "run", "x")


def test_a_disk_that_takes_no_more_ends_the_save_with_its_reason(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run(
        "import meshbook.rank.checkpoints.writing as _writing\n"
        "def _full(*arguments): raise OSError(28, 'No space left on device')\n"
        "if not hasattr(_writing, 'write_now'): _writing.write_now = _writing.write_part\n"
        "if rank == 3: _writing.write_part = _full\n"
        "x = torch.ones(4)"
    )
    try:
        with pytest.raises(CheckpointError, match=r"rank 3: .*No space left on device; free space in"):
            mesh.checkpoint(tmp_path / "run", "x", step=1, asynchronous=False)
    finally:
        mesh.run(LET_GO)
    save(mesh, tmp_path / "run", "x", step=1)
    when(lambda: os.listdir(tmp_path / "run") == ["step-00000001"])


def test_a_step_is_replaced_only_if_asked(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run("x = 1")
    save(mesh, tmp_path / "run", "x", step=1)
    mesh.run("x = 2")
    with pytest.raises(CheckpointError, match="is there already"):
        mesh.checkpoint(tmp_path / "run", "x", step=1)
    save(mesh, tmp_path / "run", "x", step=1, overwrite=True)
    mesh.run("x = 3")
    mesh.restore(tmp_path / "run")
    assert same(mesh, "x") == 2


@pytest.mark.numbers
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_kill_9_at_a_random_moment_of_a_save_leaves_a_whole_checkpoint(seed: int, tmp_path: Path) -> None:
    """More of them in the soak."""
    kill_during_a_save(seed, tmp_path / "run")
