"""After a fault, or a Stop, a model on the ranks is whole and trains on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellInterrupted, OperationFailed, UsageError
from meshbook.rank.tensors.execution import skip_from
from meshbook.rank.tensors.operators import TENSOR, TemplateMessage
from meshbook.rank.tensors.templates import CompiledTemplate
from meshbook.rank.tensors.tensor_store import Poison, TensorStore
from meshbook.tensors.creation import engine_of
from tests.budget import WAIT_S, when

GOOD = torch.tensor([1, 5, 3, 7, 2, 6, 4, 0])
BAD = torch.tensor([1, 99, 3, 7, 2, 6, 4, 0])  # out of range in rank 0's half


@pytest.fixture(scope="module")
def mesh(starts_meshes: None) -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        yield mesh


class Net(nn.Module):
    """Raises on rank 0 alone, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if bool((ids == 99).any()) and torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            raise IndexError("index out of range in self")
        found: torch.Tensor = self.down(self.up(self.table(ids % 16)).relu())
        return found


def in_parts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    distribute_module(module.get_submodule("table"), mesh)
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Training:
    def __init__(self, model: Any, mesh: Mesh | None, cut: bool = True) -> None:
        self.model, self.mesh, self.cut = model, mesh, cut
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.step_on(self.placed(ids))

    def placed(self, ids: torch.Tensor) -> Any:
        return ids if self.mesh is None else meshbook.distribute(ids, self.mesh, [Shard(0)] if self.cut else None)

    def step_on(self, x: Any) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()


def alone(num: int) -> list[float]:
    torch.manual_seed(3)
    training = Training(Net(), None)
    return [training.step(GOOD).item() for _ in range(num)]


def made(kind: str, mesh: Mesh) -> Training:
    torch.manual_seed(3)
    if kind == "here":
        here = nn.ModuleDict({"table": nn.Embedding(16, 8), "up": nn.Linear(8, 8), "down": nn.Linear(8, 4)})
        here.forward = lambda x: here["down"](here["up"](here["table"](x)).relu())  # type: ignore[method-assign]
        return Training(meshbook.module_to_mesh(here, mesh), mesh)
    if kind == "tp":
        return Training(meshbook.distribute(Net, mesh, strategy=in_parts), mesh, cut=False)
    return Training(meshbook.distribute(Net, mesh, strategy=kind), mesh)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "here"])
@pytest.mark.parametrize("looks", [True, False], ids=["the loss is read", "nobody looks"])
def test_a_bad_batch_of_one_rank_leaves_a_model_that_trains_on(mesh: Mesh, kind: str, looks: bool) -> None:
    training = made(kind, mesh)
    got = [training.step(GOOD).item() for _ in range(2)]

    def goes_on() -> None:
        loss = training.step(BAD)
        if not looks:
            loss = training.step(GOOD)
        loss.item()

    with pytest.raises(OperationFailed, match="index out of range") as reported:  # the cause, and no closed connection
        goes_on()
    assert reported.value.failures[0].ranks == (0,)
    got += [training.step(GOOD).item() for _ in range(3)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(alone(5)), rtol=1e-4, atol=1e-5)
    report = meshbook.recover(training.model, training.opt)
    assert report.complete
    assert not report.restored


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "here"])
def test_a_bad_batch_of_one_rank_in_a_recorded_step_leaves_a_model_that_trains_on(mesh: Mesh, kind: str) -> None:
    training = made(kind, mesh)
    step = meshbook.record(training.step_on)
    good, bad = training.placed(GOOD), training.placed(BAD)
    got = [step(good).item() for _ in range(5)]
    replayed = step.stats().replayed
    with pytest.raises(OperationFailed, match="index out of range"):
        step(bad).item()
    got += [step(good).item() for _ in range(4)]
    assert replayed > 0
    assert step.stats().replayed > replayed
    torch.testing.assert_close(torch.tensor(got), torch.tensor(alone(9)), rtol=1e-4, atol=1e-5)
    report = meshbook.recover(training.model, training.opt)
    assert report.complete
    assert not report.restored


def test_a_fault_is_raised_before_parameters_are_touched(mesh: Mesh) -> None:
    training = made("here", mesh)
    training.step(GOOD).item()
    before = [parameter.detach().full_tensor() for parameter in training.model.parameters()]

    def train() -> None:
        while True:  # until the controller has heard of it; nobody reads a number
            training.step(BAD)

    with pytest.raises(OperationFailed, match="index out of range"):
        train()
    after = [parameter.detach().full_tensor() for parameter in training.model.parameters()]
    assert all(map(torch.equal, before, after))
    assert {int(state["step"]) for state in training.opt.state.values()} == {1}


def test_a_known_fault_is_raised_by_the_next_operation_on_it(mesh: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4, 4), mesh)

    def go_on() -> None:
        root = torch.nn.functional.embedding(_ids(mesh, 9), x)
        while True:
            root = root + 1

    with pytest.raises(OperationFailed, match="index out of range"):
        go_on()
    assert (x + 1).sum().item() == 32


def _ids(mesh: Mesh, number: int) -> Any:
    return meshbook.distribute(torch.tensor([number]), mesh)


def broken(mesh: Mesh) -> Any:
    """What no rank can compute, and nobody has asked for yet."""
    return torch.nn.functional.embedding(_ids(mesh, 9), meshbook.distribute(torch.ones(4, 4), mesh))


def test_what_was_not_begun_left_its_target_as_it_was(mesh: Mesh) -> None:
    w = meshbook.distribute(torch.ones(1, 4), mesh)
    with engine_of(mesh).sender.lock:  # before the fault is known here
        w.add_(broken(mesh))
    with pytest.raises(OperationFailed, match="index out of range"):
        w.sum().item()
    assert w.sum().item() == 4  # the user knows


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda w: w.zero_(),
        lambda w: w.fill_(0.0),
        lambda w: w.copy_(torch.zeros(1, 4)),
        lambda w: w.normal_().mul_(0.0),
        lambda w: torch.mul(meshbook.distribute(torch.zeros(1, 4), w.mesh), 1.0, out=w),
    ],
    ids=["zero_", "fill_", "copy_", "normal_", "out="],
)
def test_what_overwrites_heals(mesh: Mesh, overwrite: Callable[[Any], Any]) -> None:
    w = meshbook.distribute(torch.ones(1, 4), mesh)
    with engine_of(mesh).sender.lock:
        w.add_(broken(mesh))
    engine_of(mesh).faults.fetch_state(())  # the controller has heard of it
    overwrite(w)
    assert w.sum().item() == 0


def stop_once_it_waits(mesh: Mesh) -> threading.Thread:
    """Press Stop, from a thread, when the main thread waits for the mesh."""

    def press() -> None:
        when(lambda: not mesh.session.foreground.is_idle)
        mesh.session.foreground.interrupt()

    pressing = threading.Thread(target=press)
    pressing.start()
    return pressing


@pytest.mark.parametrize("recorded", [False, True], ids=["the first step", "a recorded step"])
def test_a_stop_in_a_step_leaves_a_model_that_trains_on(mesh: Mesh, tmp_path: Path, recorded: bool) -> None:
    training = made("here", mesh)
    step, good = meshbook.record(training.step_on), training.placed(GOOD)
    before = [step(good).item() for _ in range(5)] if recorded else []
    opened = tmp_path / "opened"
    mesh.run("import os, time")
    busy = mesh.run(f"while not os.path.exists({str(opened)!r}): time.sleep(0.01)", wait=False)
    loss = step(good) if recorded else training.step(GOOD)  # behind the cell

    pressing = stop_once_it_waits(mesh)  # for the loss
    with pytest.raises(CellInterrupted):
        loss.item()
    pressing.join(WAIT_S)
    for _ in range(2):  # behind the word that ranks are in step, which they hear beside the cell
        mesh.stacks()
    opened.touch()  # and only now they hear of what has been taken back
    busy.result(WAIT_S)
    got = [*before, *[(step(good) if recorded else training.step(GOOD)).item() for _ in range(3)]]
    assert bool(step.stats().replayed) == recorded
    torch.testing.assert_close(torch.tensor(got), torch.tensor(alone(len(got))), rtol=1e-4, atol=1e-5)


def test_a_stop_reaches_ranks_that_python_waits_for_before_it_sends_more(mesh: Mesh, tmp_path: Path) -> None:
    x, opened = meshbook.distribute(torch.ones(4), mesh), tmp_path / "opened"
    engine = engine_of(mesh)
    mesh.run("import os, time")
    busy = mesh.run(f"while not os.path.exists({str(opened)!r}): time.sleep(0.01)", wait=False)
    y = x + 1
    engine.flush()  # behind the cell
    engine.sender._must_drain = True  # as where groups have broken: one batch after the other

    pressing = stop_once_it_waits(mesh)  # for the batch
    z = x + 2
    with pytest.raises(CellInterrupted):
        engine.flush()
    pressing.join(WAIT_S)
    opened.touch()  # only now: a cell that ended before the Stop has reached its ranks would let the batch run
    busy.result(WAIT_S)
    with pytest.raises(OperationFailed, match="stopped"):
        y.sum().item()
    assert (x + 1).sum().item() == 8
    assert z.sum().item() == 12


def test_a_stop_while_python_issues_a_step_takes_all_of_it_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    training = made("here", mesh)
    engine = engine_of(mesh)
    count = 0
    emit = type(engine).emit

    def stopped(self: Any, numbers: Any, where: Any) -> None:
        nonlocal count
        count += self.queue.is_in_step
        if count == 5:
            raise KeyboardInterrupt
        emit(self, numbers, where)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "emit", stopped)
        with pytest.raises(KeyboardInterrupt):
            training.step(GOOD)
    assert not engine.queue.is_in_step
    training.opt.zero_grad()
    got = [training.step(GOOD).item() for _ in range(3)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(alone(3)), rtol=1e-4, atol=1e-5)


def spoil(tensor: Any, rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        tensor.to_local().add_(1.0) if hasattr(tensor, "to_local") else tensor.add_(1.0)


def test_recover_restores_copies_that_differ_and_names_them(mesh: Mesh) -> None:
    training = made("here", mesh)
    training.step(GOOD).item()
    weight = training.model["up"].weight
    wanted = weight.detach().full_tensor()
    mesh.execute(spoil, weight.detach(), 1)
    report = meshbook.recover(training.model, training.opt)
    assert [name for name, _ in report.restored] == ["up.weight"]
    assert "restored from rank 0: up.weight" in repr(report)
    assert report.complete
    assert torch.equal(weight.detach().local(1), wanted)
    assert not meshbook.recover(training.model, training.opt).restored


def test_what_was_changed_on_some_ranks_only_is_refused_until_recover_has_told(mesh: Mesh) -> None:
    copy = meshbook.distribute(torch.arange(4.0), mesh)
    mesh.run("ids, table = torch.tensor([9 if rank else 1]), torch.ones(4, 4)")
    ids, table = mesh["ids"], mesh["table"]
    parts = copy.as_local()
    with engine_of(mesh).sender.lock:  # in one batch
        parts.add_(torch.nn.functional.embedding(ids, table)[0])  # fails on rank 1 alone
    with pytest.raises(OperationFailed, match="index out of range"):
        parts.local(1)
    with pytest.raises(OperationFailed, match=r"changed on some ranks and not on others[^$]*meshbook\.recover"):
        parts.local(0)
    report = meshbook.recover(parts)
    assert report.half_written == ("tensor (4,)",)
    assert parts.local(1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_was_changed_through_a_view_on_some_ranks_only_is_refused(mesh: Mesh) -> None:
    copy = meshbook.distribute(torch.arange(4.0), mesh)
    mesh.run("ids, table = torch.tensor([9 if rank else 1]), torch.ones(4, 4)")
    ids, table = mesh["ids"], mesh["table"]
    with engine_of(mesh).sender.lock:  # in one batch
        copy.as_local()[:2].add_(torch.nn.functional.embedding(ids, table)[0, :2])  # fails on rank 1 alone
    with pytest.raises(OperationFailed, match="index out of range"):
        copy.local(1)
    with pytest.raises(OperationFailed, match="changed on some ranks and not on others"):
        copy.local(0)
    assert meshbook.recover(copy).restored == (("tensor (4,)", 0),)
    assert copy.local(1).tolist() == [1.0, 2.0, 2.0, 3.0]


def test_a_tensor_is_spared_with_the_view_that_a_stop_kept_from_being_made() -> None:
    space, zeros = TensorStore("client|dp|", None, torch.device("cpu")), torch.zeros(4)
    view = TemplateMessage(1, "aten::slice.Tensor", (TENSOR, 0, 0, 2), {}, (-1,), "one", (), False, False, is_view=True)
    change = TemplateMessage(2, "aten::neg_.default", (TENSOR,), {}, (0,), "one", (0,), False, False)
    space.templates = {sent.number: CompiledTemplate(sent, None, space.device) for sent in (view, change)}
    space.values[1] = zeros
    stream = [1, 1, 2, 1, 2, 3, 2, 3]  # a view 2 of 1, a view 3 of 2, and a change of 3
    stopped = Poison(7, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)
    skip_from(space, stream, 0, stopped)
    (reported,) = space.report_poisoned()
    assert (reported["lost"], reported["spared"]) == ([2, 3], {1: 1})
    space.clear_poison([1])
    assert space.values[1] is zeros


def test_recover_says_what_it_takes() -> None:
    with pytest.raises(UsageError, match="there is none among these"):
        meshbook.recover(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="not a str"):
        meshbook.recover("model")  # type: ignore[arg-type]
