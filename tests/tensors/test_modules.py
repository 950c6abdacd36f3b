"""Modules on a mesh, their code here or there: the numbers of one process, with torch's own optimizers."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, MeshNameError, PlacementError, UsageError
from meshbook.fold import rendering
from meshbook.rank.tensors.blocks import find_blocks
from tests.budget import WAIT_S
from tests.tensors import gpt
from tests.tensors.models import close


def trained(model: Any, places: Any, data: Any) -> list[float]:
    trainer = gpt.Trainer(model, places)
    return [trainer.step(*batch).item() for batch in data]


def same_weights(model: Any, alone: nn.Module) -> None:
    for name, tensor in alone.state_dict().items():
        close(model.state_dict()[name].full_tensor(), tensor)


PLACES = torch.arange(gpt.LENGTH)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "replicate"])
def test_a_factory_gives_the_numbers_that_it_would_have_given_here(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(5)
    alone = gpt.GPT()
    after = torch.rand(1)
    torch.manual_seed(5)
    model = meshbook.distribute(gpt.GPT, mesh2, strategy=strategy)
    assert torch.equal(torch.rand(1), after)  # and so does what is drawn next
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), tensor)
    data = gpt.batches(4)
    places = meshbook.distribute(PLACES, mesh2)
    got = trained(model, places, mesh2.feed(data))
    close(torch.tensor(got), torch.tensor(trained(alone, PLACES, data)))
    same_weights(model, alone)
    assert f"{strategy} over dp=2" in repr(model)


def test_fsdp_shards_what_the_controller_sees_as_whole(mesh2: Mesh) -> None:
    model = meshbook.distribute(gpt.GPT, mesh2, strategy="fsdp")
    weight = (
        model.blocks[0].qkv.weight
        if hasattr(model.blocks, "__getitem__")
        else model.get_parameter("blocks.0.qkv.weight")
    )
    assert weight.shape == (48, 16)
    assert weight.placements == (Shard(0),)
    assert weight.local(1).shape == (24, 16)
    assert "2 blocks" in model.plan


def test_a_scattered_batch_is_an_input_where_it_is_one_tensor(mesh2: Mesh) -> None:
    alone = nn.Linear(3, 2)
    model = meshbook.distribute(alone, mesh2, strategy="ddp")
    batch = torch.rand(4, 3)
    close(model(mesh2.scatter(batch, axis="dp", view="global")).full_tensor(), alone(batch))
    pieces = mesh2.scatter(batch, axis="dp")
    with pytest.raises(PlacementError, match=r"a tensor per rank; say how they are one: x.as_global.*mesh.feed"):
        model(pieces)


def test_a_step_of_a_module_there_is_few_operations_and_can_be_recorded(mesh2: Mesh) -> None:
    torch.manual_seed(5)
    alone = gpt.GPT()
    model = meshbook.distribute(alone, mesh2, strategy="fsdp")
    trainer = gpt.Trainer(model, meshbook.distribute(PLACES, mesh2))
    step = meshbook.record(trainer.step)
    data = gpt.batches(5)
    got = [step(*batch).item() for batch in mesh2.feed(data)]
    close(torch.tensor(got), torch.tensor(trained(alone, PLACES, data)))
    assert step.stats().replayed >= 2
    assert step.stats().num_ops < 120


def test_weights_can_be_brought_and_put_back(mesh2: Mesh) -> None:
    source = gpt.GPT()
    model = meshbook.distribute(source, mesh2, strategy="fsdp")
    full = model.state_dict(full=True)
    assert list(full) == list(source.state_dict())
    assert all(torch.equal(full[name], tensor) for name, tensor in source.state_dict().items())
    other = gpt.GPT().state_dict()
    sharded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(other)
    assert all(torch.equal(tensor.full_tensor(), other[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(sharded)
    assert all(torch.equal(tensor.full_tensor(), full[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["default", "kept"])
def test_a_forward_computes_with_what_its_parameters_are_by_now_also_without_a_backward_in_between(
    mesh2: Mesh, options: dict[str, Any]
) -> None:
    alone = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="fsdp", **options)
    x = torch.randn(4, 4)
    there = meshbook.distribute(x, mesh2, [Shard(0)])
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda module: [parameter.mul_(2) for parameter in module.parameters()],
        lambda module: module.load_state_dict({name: tensor * 0 + 1 for name, tensor in alone.state_dict().items()}),
    )
    for graph in (torch.no_grad, torch.enable_grad):
        for change in changes:
            with graph():  # what was gathered for this forward is kept for a backward that does not come
                close(model(there).full_tensor(), alone(x))
            with torch.no_grad():
                change(model)
                change(alone)
    close(model(there).full_tensor(), alone(x))
    model(there).sum().backward()
    alone(x).sum().backward()
    close(model[2].weight.grad.full_tensor(), alone[2].weight.grad)


def test_an_output_that_becomes_a_mask_in_place_has_no_slope(mesh2: Mesh) -> None:
    model = meshbook.distribute(nn.Linear(3, 2), mesh2)
    model(meshbook.distribute(torch.ones(4, 3), mesh2, [Shard(0)])).gt_(0).sum().backward()
    assert all(torch.equal(mine.grad.full_tensor(), torch.zeros(mine.shape)) for mine in model.parameters())


class WithLoss(nn.Module):
    """Gives a loss and more, from tensors in a dict; trained or not makes a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        out = self.layer(self.norm(batch["x"]) * scale if self.training else batch["x"]).squeeze(-1)
        return {"loss": ((out - batch["y"]) ** 2).mean(), "out": out, "rows": None}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_loss_made_by_the_module_is_that_of_the_whole_batch_and_so_is_the_gradient_of_its_input(
    mesh2: Mesh, strategy: str
) -> None:
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(alone)

        def forward(self, x: Any) -> Any:
            return self.inner(x).square().mean()

    model = meshbook.distribute(Mean(), mesh2, strategy=strategy)
    x = torch.randn(6, 4, requires_grad=True)
    wanted = alone(x).square().mean()
    wanted.backward()
    there = meshbook.distribute(x.detach(), mesh2, [Shard(0)]).requires_grad_()
    loss = model(there)
    loss.backward()
    close(loss.item(), wanted.item())
    close(there.grad.full_tensor(), x.grad)
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.grad.full_tensor(), reference.grad)
    whole = model(meshbook.distribute(x.detach(), mesh2))  # every rank computes all of it
    close(whole.item(), wanted.item())
    whole.backward()
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.grad.full_tensor(), 2 * reference.grad)
    with pytest.raises(RuntimeError, match="backward a second time through a module on the ranks"):
        loss.backward()


def test_nests_of_inputs_and_outputs_and_the_mode_are_followed(mesh2: Mesh) -> None:
    model = meshbook.distribute(WithLoss, mesh2, strategy="ddp")
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4)}
    (there,) = mesh2.feed([batch])
    found = model(there, scale=2.0)
    assert found["rows"] is None
    assert found["out"].shape == (4,)
    found["loss"].backward()
    tracked = model.state_dict()["norm.num_batches_tracked"].item()
    assert tracked == 1
    model.eval()
    with torch.no_grad():
        out = model(there)["out"]
    weights = model.state_dict(full=True)
    close(out.full_tensor(), (batch["x"] @ weights["layer.weight"].T + weights["layer.bias"]).squeeze(-1))


@pytest.mark.parametrize("strategy", ["ddp", "replicate"])
def test_dropout_draws_from_the_seed_that_is_set_here_and_otherwise_in_other_rows(mesh2: Mesh, strategy: str) -> None:
    model = meshbook.distribute(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), mesh2, strategy=strategy)
    rows = torch.ones(8, 8)
    cut, whole = meshbook.distribute(rows, mesh2, [Shard(0)]), meshbook.distribute(rows, mesh2)

    def drawn(x: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        made = model(x)
        return [made.local(rank) for rank in (0, 1)]

    first, second = drawn(cut)
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(first, drawn(cut)[0])
    first, second = drawn(whole)
    assert torch.equal(first, second)
    step = meshbook.record(lambda: model(cut))
    torch.manual_seed(7)
    wanted = [model(cut).full_tensor() for _ in range(4)]
    assert not torch.equal(wanted[0], wanted[1])
    torch.manual_seed(7)
    assert all(torch.equal(step().full_tensor(), one) for one in wanted)
    state = torch.get_rng_state()
    model.eval()(cut)
    assert torch.equal(torch.get_rng_state(), state)  # draws nothing, and takes nothing from here


def test_precision_is_of_the_computation_not_of_the_parameters(mesh2: Mesh) -> None:
    for strategy in ("fsdp", "ddp"):
        model = meshbook.distribute(lambda: nn.Linear(4, 4), mesh2, strategy=strategy, precision="bf16")
        out = model(meshbook.distribute(torch.ones(4, 4), mesh2, [Shard(0)]))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "replicate"])
def test_a_parameter_may_be_frozen_and_thawed_while_its_module_is_on_the_ranks(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    alone[0].requires_grad_(False)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=strategy)
    x = torch.randn(6, 4)
    there = meshbook.distribute(x, mesh2, [Shard(0)])
    for frozen in ((), (), ("0.bias", "2.weight"), ("0.weight", "0.bias"), ()):
        for name, parameter in (*alone.named_parameters(), *model.named_parameters()):
            parameter.requires_grad = name not in frozen
        for net, rows in ((alone, x), (model, there)):
            net.zero_grad()
            net(rows).square().sum().backward()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (name in frozen), (name, frozen)
            if mine.grad is not None:
                close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "replicate"])
def test_autocast_here_is_autocast_of_the_modules_there(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=strategy)
    x = torch.randn(6, 4)
    there = meshbook.distribute(x, mesh2, [Shard(0)])
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = model(there), alone(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.full_tensor(), wanted, rtol=0.02, atol=0.02)
    out.float().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(there).dtype == torch.float32


def test_a_strategy_of_ones_own_may_cut_over_another_axis(mesh22: Mesh) -> None:
    def tensor_parallel(module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        return parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = meshbook.distribute(alone, mesh22, strategy=tensor_parallel)
    assert model.get_parameter("0.weight").placements == (Replicate(), Shard(0))
    x = torch.randn(4, 4)
    close(model(meshbook.distribute(x, mesh22)).full_tensor(), alone(x).detach())


def test_errors_of_the_module_come_with_the_ranks_traceback(mesh2: Mesh) -> None:
    class Broken(nn.Module):
        def __init__(self, early: bool) -> None:
            super().__init__()
            if early:
                raise ValueError("no such size")
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x) + torch.ones(3)

    with pytest.raises(CellError, match="ranks 0-1: ValueError: no such size"):
        meshbook.distribute(lambda: Broken(True), mesh2)
    model = meshbook.distribute(lambda: Broken(False), mesh2, strategy="replicate")
    with pytest.raises(CellError, match="ranks 0-1") as caught:
        model(torch.ones(2, 2))
    (failure,) = caught.value.failures
    assert "forward(self, x)" in rendering.plain_text("".join(failure.traceback))


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"strategy": "auto"}, UsageError, "compares plans for sample="),
        ({"strategy": "zero9"}, UsageError, "there is no strategy 'zero9'; known: \"fsdp\""),
        ({"precision": "fp8"}, UsageError, "there is no precision 'fp8'"),
        ({"strategy": "replicate", "compile": True}, UsageError, "compile= is for plans"),
        ({"placements": [Shard(0)]}, UsageError, "placements and sharding_spec are for tensors"),
    ],
)
def test_what_cannot_be_distributed_is_refused(mesh2: Mesh, options: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        meshbook.distribute(nn.Linear(2, 2), mesh2, **options)


def test_what_a_module_there_cannot_do_is_said(mesh2: Mesh) -> None:
    model = meshbook.distribute(nn.Linear(2, 2), mesh2)
    for attempt in (lambda: model.half(), lambda: model.load_state_dict({}, assign=True)):
        with pytest.raises(UsageError):
            attempt()
    with pytest.raises(CellError, match=r"works on rows \(dim 0\)"):
        model(meshbook.distribute(torch.ones(2, 2), mesh2, [Shard(1)]))
    with pytest.raises(CellError, match="3 rows, which cannot be cut evenly over dp=2"):
        model(meshbook.distribute(torch.ones(3, 2), mesh2, [Shard(0)]))


class Counting(nn.Module):
    """Its outputs depend on a buffer, and on a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.inner(x) * self.num_calls


def trained_here_and_there(mesh: Mesh, strategy: str, averaged: dict[str, Any]) -> Any:
    """A model there and one here after some steps, their averages, and a batch there and here."""
    torch.manual_seed(7)
    alone = Counting()
    model, x = meshbook.distribute(copy.deepcopy(alone), mesh, strategy=strategy), torch.randn(8, 4)
    pairs = []
    for module, batch in ((model, meshbook.distribute(x, mesh)), (alone, x)):
        module.get_parameter("inner.0.bias").requires_grad_(False)
        average = AveragedModel(module, **averaged)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
            average.update_parameters(module)
        pairs.append((module, average, batch))
    return pairs


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "replicate"])
def test_a_copy_of_a_module_there_is_another_with_its_values_placements_and_gradients(
    mesh2: Mesh, strategy: str
) -> None:
    (model, _, x), (alone, _, x_here) = trained_here_and_there(mesh2, strategy, {})
    numbers = torch.get_rng_state()
    copied, copied_here = copy.deepcopy(model), copy.deepcopy(alone)
    assert torch.equal(torch.get_rng_state(), numbers)
    same_weights(copied, alone)
    for (name, own), other in zip(copied.named_parameters(), model.parameters(), strict=True):
        assert (own.placements, own.requires_grad) == (other.placements, other.requires_grad), name
        assert (own.grad is None) == (other.grad is None), name
        assert own.grad is None or torch.equal(own.grad.full_tensor(), other.grad.full_tensor()), name
    close(copied(x).full_tensor(), copied_here(x_here))
    with torch.no_grad():
        copied.get_parameter("inner.0.weight").zero_()
    close(model(x).full_tensor(), alone(x_here))


@pytest.mark.parametrize(
    "averaged", [{}, {"use_buffers": True}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["swa", "buffers", "ema"]
)
def test_averages_of_a_module_there_are_those_of_one_process(mesh2: Mesh, averaged: dict[str, Any]) -> None:
    (_, average, x), (_, average_here, x_here) = trained_here_and_there(mesh2, "fsdp", averaged)
    same_weights(average.module, average_here.module)
    close(average(x).full_tensor(), average_here(x_here))


def test_a_model_is_copied_with_its_optimizer_where_it_comes_first(mesh2: Mesh) -> None:
    model = meshbook.distribute(lambda: nn.Linear(3, 2), mesh2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    of_optimizer = its_optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(of_optimizer, copied.parameters(), strict=True))
    with pytest.raises(UsageError, match=r"copied already, by an optimizer: copy.deepcopy\(\(model, optimizer\)\)"):
        copy.deepcopy((optimizer, model))


def test_a_module_there_that_its_factory_does_not_give_again_is_not_copied(mesh2: Mesh) -> None:
    widths = iter([2, 3])
    model = meshbook.distribute(lambda: nn.Linear(3, next(widths)), mesh2, strategy="replicate")
    with pytest.raises(CellError, match="gives another module than it gave before"):
        copy.deepcopy(model)


def test_a_module_whose_code_runs_here_keeps_ties_and_placements(mesh22: Mesh) -> None:
    torch.manual_seed(2)
    alone = gpt.GPT()
    alone.head.weight = alone.tokens.weight
    model = copy.deepcopy(alone)
    given = meshbook.module_to_mesh(model, mesh22, {"*.up.weight": [Replicate(), Shard(0)]})
    assert given is model
    assert model.head.weight is model.tokens.weight
    assert model.blocks[0].up.weight.placements == (Replicate(), Shard(0))
    data = gpt.batches(3)
    got = trained(model, meshbook.distribute(PLACES, mesh22), mesh22.feed(data, axis="dp"))
    close(torch.tensor(got), torch.tensor(trained(alone, PLACES, data)))
    same_weights(model, alone)
    with pytest.raises(PlacementError, match=r"tokens\.weight: "):
        meshbook.module_to_mesh(gpt.GPT(), mesh22, [Shard(5), Replicate()])


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), lambda: nn.LSTM(4, 6), lambda: nn.GRU(4, 6)],
    ids=["deep LSTM", "LSTM", "GRU"],
)
def test_a_recurrent_module_goes_step_by_step(mesh2: Mesh, make: Callable[[], nn.Module]) -> None:
    plain, x = make(), torch.randn(4, 4, 4)
    there = meshbook.module_to_mesh(copy.deepcopy(plain), mesh2)
    for model, given in ((plain, x), (there, meshbook.distribute(x, mesh2, [Shard(0)]))):
        model(given)[0].square().sum().backward()
    torch.testing.assert_close(there(meshbook.distribute(x, mesh2, [Shard(0)]))[0].full_tensor(), plain(x)[0].detach())
    for found, wanted in zip(there.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
    with pytest.raises(RuntimeError, match="Expected"):
        there(torch.ones(4, 4, 3))
    assert torch.backends.mkldnn.enabled


def test_what_was_issued_before_a_module_is_let_go_of_is_computed(mesh2: Mesh, tmp_path: Any) -> None:
    go = tmp_path / "go"
    wait = f"""
        import os, time
        stop = time.monotonic() + 60.0
        while not os.path.exists({str(go)!r}) and time.monotonic() < stop:
            time.sleep(0.005)
        assert os.path.exists({str(go)!r})
    """
    rows = meshbook.distribute(torch.ones(4, 8), mesh2, [Shard(0)])
    model = meshbook.distribute(lambda: nn.Linear(8, 8), mesh2, strategy="ddp")
    with torch.no_grad():
        wanted = model(rows).full_tensor()
        busy = mesh2.run(wait, wait=False)
        made = model(rows)
    del model
    gc.collect()
    mesh2.session.release_unused()
    with pytest.raises(MeshNameError):  # what answers has heard of it by now
        mesh2["nobodys_name"]
    go.touch()
    busy.result(WAIT_S)
    assert torch.equal(made.full_tensor(), wanted)


def test_modules_are_let_go_of(mesh2: Mesh) -> None:
    def count() -> int:
        import gc

        from meshbook.rank.tensors.resident_module import RESIDENT_MODULES

        gc.collect()
        return len(RESIDENT_MODULES)

    before = mesh2.execute(count)[0]
    model = meshbook.distribute(lambda: nn.Linear(2, 2), mesh2)
    assert mesh2.execute(count)[0] == before + 1
    del model
    gc.collect()
    for _ in range(100):
        if mesh2.execute(count)[0] <= before:
            break
    assert mesh2.execute(count)[0] <= before


def test_repeated_blocks_are_found_outermost_first() -> None:
    with torch.device("meta"):
        model = gpt.GPT(layers=3)
        nested = nn.Sequential(nn.Embedding(4, 4), nn.Sequential(*[nn.TransformerEncoderLayer(8, 2) for _ in range(2)]))
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nested) == list(nested[1])
    assert find_blocks(nn.Linear(2, 2)) == []


@dataclasses.dataclass
class Scored:
    score: torch.Tensor
    kind: str
    memory: Any


@dataclasses.dataclass
class Options:
    """Without tensors: it is sent as it is."""

    factor: float
    twice: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.factor


class Remembering(nn.Module):
    """Gives a dataclass, a dtype, and an object of its own, which it takes again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, memory: Any = None, options: Options | None = None) -> Any:
        inputs = inputs if options is None else inputs * options.twice
        sums = SimpleNamespace(total=self.fc(inputs).sum() + (0 if memory is None else memory.total))
        return {"scored": Scored(self.fc(inputs), "linear", sums), "total": sums.total, "dtype": inputs.dtype}


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    weight: float


class Weighing(nn.Linear):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch.rows) * batch.weight


def test_a_dataclass_of_tensors_may_be_an_argument(mesh2: Mesh) -> None:
    plain = Weighing(4, 2)
    module = meshbook.distribute(copy.deepcopy(plain), mesh2, strategy="ddp")
    for weight in (0.5, 2.0):  # the first call of a kind, and a later one
        rows = torch.randn(4, 4)
        found = module(Batch(meshbook.distribute(rows, mesh2, [Shard(0)]), weight))
        close(found.full_tensor().detach(), plain(Batch(rows, weight)).detach())


def test_dataclasses_and_values_come_back_and_objects_stay_on_the_ranks(mesh2: Mesh) -> None:
    torch.manual_seed(0)
    plain = Remembering()
    module = meshbook.distribute(plain, mesh2, strategy="ddp")
    inputs = torch.randn(2, 4)
    first = module(inputs)
    second = module(inputs, memory=first["scored"].memory, options=Options(2.0))
    assert isinstance(first["scored"], Scored)
    assert (first["scored"].kind, first["dtype"]) == ("linear", torch.float32)
    expected = plain(inputs, memory=plain(inputs)["scored"].memory, options=Options(2.0))
    torch.testing.assert_close(second["total"].full_tensor().detach(), expected["total"].detach())
    torch.testing.assert_close(second["scored"].score.full_tensor().detach(), expected["scored"].score.detach())
    second["scored"].score.sum().backward()
    assert module.fc.weight.grad is not None
    assert repr(first["scored"].memory) == "RemoteObject(SimpleNamespace on the ranks)"
