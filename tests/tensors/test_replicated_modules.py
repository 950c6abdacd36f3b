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

pytestmark = pytest.mark.numbers


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)


def same_step(model: Any, alone: nn.Module, x: torch.Tensor, mesh: Mesh, placements: Any) -> None:
    """The output and all gradients are those of one process."""
    found, wanted = (
        made[0] if isinstance(made, tuple) else made
        for made in (model(meshbook.distribute(x, mesh, placements)), alone(x))
    )
    close(found.full_tensor(), wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        close(mine.grad.full_tensor(), reference.grad)


class Bilinear(nn.Bilinear):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x, x)


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


@pytest.mark.parametrize("placements", [[Shard(0)], None], ids=["cut", "whole"])
@pytest.mark.parametrize(
    ("factory", "x"),
    [
        (lambda: nn.GRU(4, 6, batch_first=True), SEQUENCES),
        (lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), SEQUENCES),
        (lambda: nn.RNN(4, 6, batch_first=True), SEQUENCES),
        (lambda: nn.LSTMCell(4, 6), SEQUENCES[:, 0]),
        (lambda: nn.EmbeddingBag(10, 4), WORDS),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), SEQUENCES),
        (lambda: Bilinear(4, 4, 3), SEQUENCES),
        (MakesTensors, SEQUENCES),
    ],
    ids=["GRU", "deep LSTM", "RNN", "LSTMCell", "EmbeddingBag", "weight norm", "Bilinear", "makes tensors"],
)
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


class Distances(nn.Linear):
    def forward(self, x: Any) -> Any:
        return torch.cdist(super().forward(x), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (lambda: Writes(4, 4), r"that the module has made itself, out = torch.zeros\(...\): make it by x.new_zeros"),
        (
            lambda: Distances(4, 3),
            r'does not have a sharding strategy registered. Under "replicate" .* "fsdp" run any',
        ),
    ],
    ids=["written into", "no rule"],
)
def test_what_dtensors_cannot_do_says_what_to_use_instead(
    mesh2: Mesh, factory: Callable[[], nn.Module], error: str
) -> None:
    model = meshbook.distribute(factory, mesh2, strategy="replicate")
    with pytest.raises(CellError, match=error):
        model(meshbook.distribute(torch.rand(4, 4), mesh2, [Shard(0)]))


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
