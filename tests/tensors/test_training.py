"""Training of modules on the ranks: buffers, norms and convolutions, beside real DDP and one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, OperationFailed, UsageError
from meshbook.tensors.engine import TensorEngine

pytestmark = pytest.mark.usefixtures("starts_meshes")


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.relu(x + self.norm(self.conv(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Codes(nn.Module):
    """Has buffers that follow the data, which its own backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.register_buffer("codes", torch.ones(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        found = self.layer(x).mean((2, 3))
        if self.training:
            self.codes.mul_(0.5).add_(found.detach().mean(0))  # type: ignore[operator]
            self.seen += int((found > 0).sum())
        return self.head(found * self.codes)


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(8, 3, 10, 10), torch.randint(0, 5, (8,))) for _ in range(num)]


def train(model: Any, data: Any, cut: Callable[[Any], Any]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(cut(x)), cut(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def as_torchrun_would(model: nn.Module, data: Any, train: Any) -> Any:
    """Real DDP in the ranks' own processes: losses, and what the first rank saves."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    losses = torch.stack(train(ddp, data, lambda tensor: tensor.chunk(size)[rank]))
    dist.all_reduce(losses)
    return losses / size, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rows_on(mesh: Mesh) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: meshbook.distribute(tensor, mesh, [Shard(0)])


def differing(model: Any) -> list[str]:
    """Tensors of which ranks have copies that are not alike."""
    return [
        name
        for name, tensor in model.state_dict().items()
        if tensor.placements == (Replicate(),) and not torch.equal(tensor.local(0), tensor.local(1))
    ]


@pytest.mark.parametrize("kind", [Residual, Codes])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_norms_and_other_buffers_are_those_of_real_ddp(mesh2: Mesh, strategy: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    source, data = kind(), batches(4)
    losses, saved = mesh2.execute(as_torchrun_would, copy.deepcopy(source), data, train)[0]
    model = meshbook.distribute(copy.deepcopy(source), mesh2, strategy=strategy)
    got = train(model, data, rows_on(mesh2))
    torch.testing.assert_close(torch.stack([loss.full_tensor() for loss in got]), losses)
    for name, tensor in model.state_dict(full=True).items():
        torch.testing.assert_close(tensor, saved[name], rtol=1e-6, atol=1e-7, msg=name)
    assert differing(model) == []

    model.eval()
    alone = kind()
    alone.load_state_dict(model.state_dict(full=True))
    x = data[0][0]
    with torch.no_grad():
        torch.testing.assert_close(model(rows_on(mesh2)(x)).full_tensor(), alone.eval()(x))


@pytest.mark.parametrize("strategy", ["replicate", "here"])
def test_norms_of_tensors_that_are_one_are_those_of_one_process(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(1)
    alone, data = Residual(), batches(3)
    copied = copy.deepcopy(alone)
    model: Any = (
        meshbook.module_to_mesh(copied, mesh2)
        if strategy == "here"
        else meshbook.distribute(copied, mesh2, strategy=strategy)
    )
    got, wanted = train(model, data, rows_on(mesh2)), train(alone, data, lambda tensor: tensor)
    torch.testing.assert_close(torch.stack([loss.full_tensor() for loss in got]), torch.stack(wanted))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.full_tensor(), alone.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_are_alike_as_soon_as_the_forward_is_over(mesh2: Mesh, strategy: str) -> None:
    model = meshbook.distribute(Residual, mesh2, strategy=strategy)
    for x, _ in batches(2):
        model(rows_on(mesh2)(x))
        assert differing(model) == []


class Counts(nn.Module):
    """Tells how often its forward has run, and draws if it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.num = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor, drawing: bool = False) -> Any:
        self.num += 1
        self.calls += 1
        noise = torch.rand(()) if drawing else 0.0
        return {"out": self.layer(x) - y + noise, "num": torch.tensor(float(self.num))}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
@pytest.mark.parametrize("with_graph", [True, False])
def test_the_first_forward_runs_once(mesh2: Mesh, strategy: str, with_graph: bool) -> None:
    model = meshbook.distribute(Counts, mesh2, strategy=strategy)
    x, y = (meshbook.distribute(torch.rand(4, 4), mesh2) for _ in range(2))
    with torch.set_grad_enabled(with_graph):
        for turn in range(1, 4):
            given = model(x, y)
            assert given["num"].full_tensor().item() == turn
            assert model.calls.full_tensor().item() == turn
            if with_graph:
                given["out"].sum().backward()
    assert (model.layer.weight.grad is not None) == with_graph


def test_the_first_forward_draws_once_and_from_the_seed_that_is_set_here(mesh2: Mesh) -> None:
    model = meshbook.distribute(Counts, mesh2, strategy="ddp")
    x, y = (meshbook.distribute(torch.rand(4, 4), mesh2) for _ in range(2))
    torch.manual_seed(3)
    model(x, y)  # draws nothing
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)
    drawn = []
    for _ in range(2):  # the first of its kind, and one after it
        torch.manual_seed(3)
        drawn.append((model(x, y, True)["out"].full_tensor(), torch.rand(1)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


class Binds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.average = 0.9 * self.average + x.mean(0)
        return self.layer(x)


def test_a_buffer_that_is_bound_to_another_tensor_is_refused(mesh2: Mesh) -> None:
    model = meshbook.distribute(Binds, mesh2, strategy="ddp")
    with pytest.raises(CellError, match=r"binds the buffer average to a new tensor.*self.average.copy_"):
        model(meshbook.distribute(torch.rand(4, 4), mesh2))


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def _steps(model: Any, x: Any, num: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for turn in range(num):
        loss = model(x).square().mean()
        loss.backward()
        if turn % 2:  # gradients of two steps are summed, and stay
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"find_unused_parameters": True, "broadcast_buffers": True},
    ],
    ids=lambda options: next(iter(options)) + str(len(options)),
)
def test_options_of_ddp_are_passed_on_and_gradients_stay_ones_own(mesh2: Mesh, options: Any) -> None:
    torch.manual_seed(2)
    alone, x = HalfUsed(), torch.rand(4, 4)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="ddp", **options)
    there = rows_on(mesh2)(x)
    torch.testing.assert_close(_steps(model, there, 5), _steps(alone, x, 5))
    model.used.bias.requires_grad_(False)  # DDP is made anew for it, with the same options
    alone.used.bias.requires_grad_(False)
    torch.testing.assert_close(_steps(model, there), _steps(alone, x))


class Recurrent(nn.Module):
    """Gives its state with layers first, as torch's LSTM does, or rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor, rows_first: bool) -> torch.Tensor:
        state = self.lstm(x)[1][0]
        return state.transpose(0, 1) if rows_first else state


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_output_without_rows_first_is_refused_where_ranks_have_rows(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(8)
    alone, x = Recurrent(), torch.randn(8, 4, 3)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=strategy)
    with pytest.raises(CellError, match=r"shape \(2, 4, 5\) where each rank has 4 rows .* rows first"):
        model(rows_on(mesh2)(x), False).full_tensor()
    got = model(rows_on(mesh2)(x), True)
    torch.testing.assert_close(got.detach().full_tensor(), alone(x, True).detach())
    torch.testing.assert_close(model(x, False).detach().full_tensor(), alone(x, False).detach())  # whole inputs


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor, head: int | None = None) -> Any:
        x = self.inner(x).tanh()
        return self.heads[0](x) - self.heads[1](x) if head is None else self.heads[head](x)


def _pair_gradients(model: Any, x: Any, y: Any, heads: tuple[int | None, int | None]) -> list[Any]:
    for _ in range(2):  # the second time by other buckets
        (model(x, heads[0]) * model(y, heads[1])).sum().backward()
        first, second = model(x, heads[0]), model(y, heads[1])
        first.square().sum().backward()
        second.square().sum().backward()
    return [
        parameter.grad.full_tensor() if hasattr(model, "plan") else parameter.grad for parameter in model.parameters()
    ]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp", {}),
        ("ddp", {}),
        ("ddp", {"static_graph": True}),
        ("ddp", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    ],
    ids=["fsdp", "ddp", "static", "unused"],
)
def test_each_of_several_forwards_has_its_gradients_averaged(mesh2: Mesh, strategy: str, options: Any) -> None:
    torch.manual_seed(6)
    alone, x, y = Twice(), torch.randn(8, 4), torch.randn(8, 4)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=strategy, **options)
    heads = (0, 1) if "find_unused_parameters" in options else (None, None)
    wanted = _pair_gradients(alone, x, y, heads)
    torch.testing.assert_close(_pair_gradients(model, rows_on(mesh2)(x), rows_on(mesh2)(y), heads), wanted)


def test_a_gradient_that_one_of_two_forwards_misses_is_an_error(mesh2: Mesh) -> None:
    model = meshbook.distribute(Twice, mesh2, strategy="ddp")
    x = rows_on(mesh2)(torch.ones(4, 4))
    with pytest.raises((CellError, OperationFailed), match=r"find_unused_parameters=True\)"):
        _pair_gradients(model, x, x, (0, 1))


def test_options_of_fsdp_are_passed_on(mesh2: Mesh) -> None:
    alone = nn.Linear(4, 6)
    model = meshbook.distribute(
        copy.deepcopy(alone),
        mesh2,
        strategy="fsdp",
        reshard_after_forward=False,
        shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1),
    )
    assert model.weight.placements == (Shard(1),)
    x = torch.rand(4, 4)
    torch.testing.assert_close(_steps(model, rows_on(mesh2)(x)), _steps(alone, x))


def test_ddp_that_misses_a_gradient_says_so_before_gradients_that_it_has_not_averaged_are_used(mesh2: Mesh) -> None:
    model = meshbook.distribute(HalfUsed, mesh2, strategy="ddp")
    loss = model(rows_on(mesh2)(torch.rand(4, 4))).square().mean()
    sentence = r'unused.weight, unused.bias got no .*distribute\(\.\.\., strategy="ddp", find_unused_parameters=True\)'
    with pytest.raises(CellError, match=sentence):
        loss.backward()


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("ddp", {"find_unused": True}, "have no option find_unused; the strategy has .*find_unused_parameters"),
        ("fsdp", {"find_unused_parameters": True}, 'strategy="fsdp" have no option find_unused_parameters'),
        ("ddp", {"process_group": None}, "process_group is not an option here: say axis="),
        ("fsdp", {"mp_policy": None, "precision": "bf16"}, 'say precision="bf16"'),
        ("replicate", {"static_graph": True}, "has no options"),
        (lambda module, mesh: module, {"static_graph": True}, "bind them to it with functools.partial"),
    ],
)
def test_options_that_a_strategy_does_not_have_are_refused(
    mesh2: Mesh, strategy: Any, options: Any, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        meshbook.distribute(nn.Linear(2, 2), mesh2, strategy=strategy, **options)


def test_options_are_of_modules(mesh2: Mesh) -> None:
    with pytest.raises(UsageError, match="find_unused_parameters are for modules"):
        meshbook.distribute(torch.ones(2), mesh2, find_unused_parameters=True)


def test_the_mesh_may_be_given_by_the_name_that_torch_has_for_it(mesh2: Mesh) -> None:
    assert torch.equal(meshbook.distribute(torch.ones(2), device_mesh=mesh2).full_tensor(), torch.ones(2))
    for both_or_none in ((), (mesh2,)):
        with pytest.raises(UsageError, match=r"which mesh\? .* device_mesh=mesh"):
            meshbook.distribute(
                lambda: nn.Linear(2, 2), *both_or_none, **({"device_mesh": mesh2} if both_or_none else {})
            )


def test_a_fused_optimizer_sends_its_counts_of_steps_once(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    alone = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model = meshbook.module_to_mesh(copy.deepcopy(alone), mesh2)
    sent = 0
    upload = TensorEngine.upload

    def counted(self: TensorEngine, *args: Any) -> Any:
        nonlocal sent
        sent += 1
        return upload(self, *args)

    x = torch.rand(4, 3)
    there = meshbook.distribute(x, mesh2)
    monkeypatch.setattr(TensorEngine, "upload", counted)
    for module, given in ((alone, x), (model, there)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            module(given).square().mean().backward()
            optimizer.step()
    assert sent == 3  # one in each step
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), other.detach())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, as it compiles an optimizer
@pytest.mark.parametrize("whole_step", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_torch_compile_of_functions_modules_and_steps_of_remote_tensors_runs_them_as_they_are(
    mesh2: Mesh, whole_step: bool
) -> None:
    torch.manual_seed(0)
    rows, wanted = torch.randn(8, 4), torch.randn(8, 4)
    alone = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    start = copy.deepcopy(alone.state_dict())

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compile: Callable[..., Any]) -> list[float]:
        compiled, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of = compile(nn.HuberLoss())

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = loss_of(compiled(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        if whole_step:
            step = compile(step)
        return [step().item() for _ in range(4)]

    expected = train(alone, rows, wanted, lambda function: function)
    alone.load_state_dict(start)
    model = meshbook.module_to_mesh(alone, mesh2)
    x, y = (meshbook.distribute(one, mesh2, sharding_spec=["dp", None]) for one in (rows, wanted))
    assert train(model, x, y, torch.compile) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_integer_that_a_forward_makes_of_its_rows_is_refused_with_what_to_give_instead(
    mesh2: Mesh, strategy: str
) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, whole: bool) -> Any:
            positive = self.linear(x).sum(1) > 0
            return positive.sum() if whole else positive

    model = meshbook.distribute(Counts, mesh2, strategy=strategy)
    x = meshbook.distribute(torch.randn(8, 4), mesh2, sharding_spec=["dp", None])
    with pytest.raises(CellError, match=r"one torch.int64 number for the rows of each rank.*one for each row"):
        model(x, True).item()
    assert 0 <= model(x, False).sum().item() <= 8
