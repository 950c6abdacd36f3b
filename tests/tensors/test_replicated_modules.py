"""Modules with copies on every rank, most of them by "replicate", where their code computes with DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, UsageError
from meshbook.rank.tensors.dtensor_mode import DTensorMode
from tests.tensors.models import close

pytestmark = pytest.mark.numbers


def same_step(model: Any, alone: nn.Module, x: torch.Tensor, mesh: Mesh, placements: Any) -> None:
    """The output, all gradients and buffers are those of one process."""
    there, here = meshbook.distribute(x, mesh, placements), x.clone()
    if x.is_floating_point():
        there.requires_grad_(), here.requires_grad_()
    found, wanted = (made[0] if isinstance(made, tuple) else made for made in (model(there), alone(here)))
    close(found.full_tensor(), wanted)
    weights = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    (found * meshbook.distribute(weights, mesh)).square().sum().backward()
    (wanted * weights).square().sum().backward()
    if x.is_floating_point():
        close(there.grad.full_tensor(), here.grad)
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.grad.full_tensor(), reference.grad)
    for mine, reference in zip(model.buffers(), alone.buffers(), strict=True):
        close(mine.full_tensor(), reference)


class Bilinear(nn.Bilinear):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x, x)


class Distances(nn.Linear):
    def forward(self, x: Any) -> Any:
        return torch.cdist(super().forward(x), torch.ones(2, 3))


class MakesTensors(nn.Module):
    """Makes positions, a mask and a first state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 4)

    def forward(self, x: Any) -> Any:
        length = x.shape[1]
        x = x + self.places(torch.arange(length))
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        x = (x @ x.transpose(1, 2) + mask).softmax(-1) @ x
        state, states = torch.zeros(x.shape[0], 4), []
        for at in range(length):
            state = torch.tanh(x[:, at] + state)
            states.append(state)
        return torch.stack(states, 1)


SEQUENCES, WORDS = torch.randn(4, 5, 4), torch.randint(0, 10, (4, 5))


MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "GRU": (lambda: nn.GRU(4, 6, batch_first=True), SEQUENCES),
    "deep LSTM": (lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), SEQUENCES),
    "RNN": (lambda: nn.RNN(4, 6, batch_first=True), SEQUENCES),
    "LSTMCell": (lambda: nn.LSTMCell(4, 6), SEQUENCES[:, 0]),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), WORDS),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), SEQUENCES),
    "Bilinear": (lambda: Bilinear(4, 4, 3), SEQUENCES),
    "distances": (lambda: Distances(4, 3), SEQUENCES[0]),
    "makes tensors": (MakesTensors, SEQUENCES),
}


@pytest.mark.parametrize("placements", [[Shard(0)], None], ids=["cut", "whole"])
@pytest.mark.parametrize(("factory", "x"), MODULES.values(), ids=MODULES)
def test_what_makes_tensors_itself_or_has_no_rule_of_dtensors_gives_the_numbers_of_one_process(
    mesh2: Mesh, factory: Callable[[], nn.Module], x: torch.Tensor, placements: Any
) -> None:
    torch.manual_seed(1)
    alone = factory()
    torch.manual_seed(1)
    same_step(meshbook.distribute(factory, mesh2, strategy="replicate"), alone, x, mesh2, placements)


class Writes(nn.Linear):
    def forward(self, x: Any) -> Any:
        out = torch.zeros(x.shape)
        out[:, 1:] = super().forward(x)[:, 1:]
        return out


def test_what_a_module_made_itself_cannot_be_written_into_and_the_error_says_what_can(mesh2: Mesh) -> None:
    model = meshbook.distribute(lambda: Writes(4, 4), mesh2, strategy="replicate")
    with pytest.raises(
        CellError, match=r"that the module has made itself, out = torch.zeros\(...\): make it by x.new_"
    ):
        model(meshbook.distribute(torch.rand(4, 4), mesh2, [Shard(0)]))


def test_what_torch_cannot_do_with_tensors_that_a_module_made_itself_is_torchs_own_error() -> None:
    with DTensorMode(), pytest.raises(NotImplementedError, match="not implemented for 'Float8_e5m2'"):
        torch.ones(2, dtype=torch.float8_e5m2).sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    def forward(self, words: Any) -> Any:
        return self.words(words).mean(1) + self.bag(words)


def place(strategy: str, mesh: Mesh) -> Any:
    if strategy == "module_to_mesh":
        return meshbook.module_to_mesh(Sparse(), mesh)
    return meshbook.distribute(Sparse, mesh, strategy=strategy)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate", "module_to_mesh"])
def test_sparse_embeddings_train_as_in_one_process_and_sparse_adam_says_what_to_use(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(1)
    alone = Sparse()
    torch.manual_seed(1)
    model = place(strategy, mesh2)
    kinds: tuple[Any, ...] = (torch.optim.SGD, torch.optim.Adagrad)
    for kind in kinds:
        losses = []
        for module, words in (
            (model, meshbook.distribute(WORDS, mesh2, [Shard(0)])),
            (alone, WORDS),
        ):
            optimizer = kind(module.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = F.cross_entropy(module(words), torch.tensor([0, 1, 2, 3]))
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        close(losses[0], losses[1])
    for mine, reference in zip(model.parameters(), copy.deepcopy(alone).parameters(), strict=True):
        close(mine.full_tensor(), reference)
    with pytest.raises(UsageError, match=r"those of remote parameters are dense.*use torch.optim.Adam"):
        torch.optim.SparseAdam(model.parameters())


class Computes(nn.Module):
    """A function of what comes in and of a parameter."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.factors, self.function = nn.Parameter(torch.tensor([1.0, 0.5, -2.0, 0.7])), function

    def forward(self, x: Any) -> Any:
        return self.function(x, self.factors)


TARGETS = torch.tensor([0, -100, -100, 1, 2, -100, 3, 1])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.cross_entropy(x * w, TARGETS),
        lambda x, w: F.cross_entropy(x * w, TARGETS.abs() % 4, weight=torch.tensor([1.0, 2, 3, 4])),
        lambda x, w: x * w * x.sum().item(),
        lambda x, w: (x * w).amax(),
        lambda x, w: torch.ones_like((x * w).sum(1)) - (x * w).sum(1),
        lambda x, w: x * w + ((x * 4).long() << 2),
    ],
    ids=["ignored targets", "weighed targets", "item", "amax", "ones like a sum", "shift"],
)
def test_what_dtensors_compute_wrongly_is_that_of_one_process(
    mesh2: Mesh, function: Callable[[Any, Any], Any], placement: Any
) -> None:
    alone = Computes(function)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="replicate")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    same_step(model, alone, x, mesh2, [placement])


def add_to_rows(x: Any, w: Any) -> Any:
    y = (x * w).clone()
    y[1:3] += 1
    return y


def test_a_write_through_a_view_across_pieces_is_refused_and_within_them_done(mesh2: Mesh) -> None:
    alone = Computes(add_to_rows)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="replicate")
    x = torch.randn(4, 4)
    same_step(model, alone, x, mesh2, [Shard(1)])
    with pytest.raises(CellError, match=r"add_ of a part of a tensor that lies in pieces \(Shard\(dim=0\),\): DTensor"):
        model(meshbook.distribute(x, mesh2, [Shard(0)]))


class Tied(nn.Module):
    """Its weight has two names, and its loss is made in its forward."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.loss(self.outer(self.norm(self.inner(x))).sigmoid(), y)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits]
)
def test_a_replicated_module_keeps_ties_and_its_losses_are_those_of_the_whole_batch(
    mesh2: Mesh, loss: Callable[..., Any]
) -> None:
    torch.manual_seed(5)
    alone, x, y = Tied(loss), torch.randn(8, 6), torch.rand(8, 6)
    model: Any = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="replicate")
    assert model.outer.weight is model.inner.weight
    there = [meshbook.distribute(one, mesh2, [Shard(0)]) for one in (x, y)]
    for module, (rows, targets) in ((alone, (x, y)), (model, there)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            module(rows, targets).backward()
            optimizer.step()
    for name, tensor in model.state_dict(full=True).items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], msg=name)


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        return [x.topk(count, 1).values for count in (1, 3, 2)]


def test_a_replicated_module_may_call_an_operation_with_other_numbers(mesh2: Mesh) -> None:
    x = torch.randn(8, 4)
    found = meshbook.distribute(Largest, mesh2, strategy="replicate")(meshbook.distribute(x, mesh2, [Shard(0)]))
    for got, wanted in zip(found, Largest()(x), strict=True):
        assert torch.equal(got.detach().full_tensor(), wanted.detach())


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).flatten(0, 1)


@pytest.mark.parametrize("cut", [0, 1])
def test_what_a_replicated_module_flattens_is_right_whichever_dim_was_cut(mesh2: Mesh, cut: int) -> None:
    x, weights = torch.randn(6, 4, 2), torch.randn(24, 2)
    model = meshbook.distribute(Flat, mesh2, strategy="replicate")
    got = model(meshbook.distribute(x, mesh2, [Shard(cut)]))
    assert torch.equal(got.detach().full_tensor(), x.flatten(0, 1))
    (got * meshbook.distribute(weights, mesh2)).sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), (x.flatten(0, 1) * weights).sum().reshape(1))


def _write_where_negative(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x < 0] = 0.25
    return x


def _gather_medians(x: torch.Tensor) -> torch.Tensor:
    return x.gather(1, torch.zeros(2, 3, dtype=torch.int64)).median(1).values


def _windows(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.stft(x, 4, window=torch.ones(4), return_complex=True)
    return x.unfold(0, 2, 1).sum(2) + spectrum.abs().mean()


def _merge_dims(x: torch.Tensor) -> torch.Tensor:
    by_rows = x.transpose(1, 2).contiguous().view(len(x), -1)
    by_columns = x.transpose(0, 1).contiguous().view(-1).reshape(6, 8)
    return by_rows @ by_columns.t().contiguous().view(-1, 12).t()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions and batch norms": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(6, 4, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        (4, 4, 6, 6),
    ),
    "norm of each image": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 4, 6, 6)),
    "recurrent": (lambda: nn.LSTM(4, 4, batch_first=True), (4, 6, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 4, 8)),
    "without a rule of DTensor's": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3)), (4, 4, 6, 6)),
    "scan": (lambda: Computes(lambda x, w: w[0] * x.cumsum(0) - x.flip(1).cummax(1).values), (4, 6)),
    "uneven mean": (lambda: Computes(lambda x, w: w[0] * x.mean(0) + x.mean()), (5, 3)),
    "gather": (lambda: Computes(lambda x, w: _gather_medians(x * w[0])), (4, 6)),
    "windows": (lambda: Computes(lambda x, w: _windows(x * w[0])), (4, 6)),
    "merged dims": (lambda: Computes(lambda x, w: _merge_dims(x * w[0])), (4, 6, 2)),
    "mask": (lambda: Computes(lambda x, w: _write_where_negative(x * w[0])), (4, 6)),
    "vector times matrix": (lambda: Computes(lambda x, w: w[0] * x[0] @ x.t()), (4, 6)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_replicated_module_computes_as_one_process_whichever_dim_of_its_input_is_cut(mesh2: Mesh, kind: str) -> None:
    factory, shape = MODULES[kind]
    torch.manual_seed(6)
    alone, x = factory(), torch.randn(shape)
    for cut in range(len(shape)):
        model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="replicate")
        same_step(model, copy.deepcopy(alone), x, mesh2, [Shard(cut)])
