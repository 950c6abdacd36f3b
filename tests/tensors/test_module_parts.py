"""The submodules of a module on the ranks, seen here: what they do as in one process, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError

pytestmark = pytest.mark.usefixtures("starts_meshes")


class Net(nn.Module):
    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.back = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.back(x)) * self.scale + self.bias


def initialized(model: Any) -> None:
    def initialize(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 1 / part.in_features)
            if part.bias is not None:
                nn.init.ones_(part.bias)
        elif isinstance(part, nn.BatchNorm1d):
            part.reset_parameters()

    model.eval().apply(initialize)


def partly_in_eval_mode(model: Any) -> None:
    model.train()
    for part in model.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.Dropout)):
            part.eval()


def a_branch_in_eval_mode(model: Any) -> None:
    model.train().back.eval()


def a_branch_in_training_mode(model: Any) -> None:
    model.eval().back[1].train()


def the_last_layer_trained(model: Any) -> None:
    model.eval().requires_grad_(False)
    model.back[0].requires_grad_(True)
    assert [type(at) is int for at in range(len(model.back))] == [True] * 3


def another_vector(model: Any) -> None:
    model.eval()
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_parts_do_what_they_do_in_one_process(mesh2: Mesh, strategy: str) -> None:
    torch.manual_seed(3)
    alone, x = Net(), torch.randn(8, 4)
    model: Any = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=strategy)
    x_there = meshbook.distribute(x, mesh2)
    for change in (
        initialized, partly_in_eval_mode, a_branch_in_eval_mode, a_branch_in_training_mode, the_last_layer_trained,
        another_vector,
    ):  # fmt: skip
        change(alone)
        change(model)
        wanted, got = alone(x), model(x_there)
        wanted.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.detach().full_tensor(), wanted.detach(), msg=change.__name__)
        for (name, own), there in zip(alone.named_parameters(), model.parameters(), strict=True):
            assert (own.grad is None) == (there.grad is None), (change.__name__, name)
            if own.grad is not None:
                torch.testing.assert_close(there.grad.full_tensor(), own.grad, msg=f"{change.__name__}: {name}")
        torch.testing.assert_close(model.back[1].running_mean.full_tensor(), alone.back[1].running_mean)
    twin = copy.deepcopy(model)
    assert isinstance(twin.back[1], nn.BatchNorm1d)
    assert twin.back[1].eps == alone.back[1].eps


def sets(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *path, last = name.split(".")
        setattr(model.get_submodule(".".join(path)), last, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        sets("scale", 2.0),
        sets("bias", 2.0),
        sets("back.2.p", 0.0),
        sets("head", nn.Identity()),
        sets("head.forward", abs),
        sets("head.weight", nn.Parameter(torch.ones(2, 6))),
        sets("back.1.running_mean", torch.ones(6)),
        lambda model: delattr(model, "head"),
        lambda model: model.add_module("more", nn.Identity()),
        lambda model: model.head.register_parameter("more", None),
        lambda model: model.register_buffer("more", None),
        lambda model: model.head.register_forward_hook(print),
        lambda model: model.head.register_full_backward_hook(print),
        lambda model: prune.l1_unstructured(model.head, "weight", 0.5),
        lambda model: torch.func.functional_call(model, {"head.bias": torch.ones(2)}, torch.ones(2, 4)),
    ],
)
def test_what_the_ranks_would_not_follow_is_refused(mesh2: Mesh, change: Callable[[Any], None]) -> None:
    model = meshbook.distribute(Net, mesh2, strategy="ddp")
    with pytest.raises(UsageError, match="the module that computes is on the ranks"):
        change(model)


def test_what_the_ranks_have_beside_tensors_cannot_be_read_here_and_the_error_says_what_to_do(mesh2: Mesh) -> None:
    model: Any = meshbook.distribute(Net, mesh2)
    for name in ("scale", "bias"):
        with pytest.raises(AttributeError, match=f"'{name}' of this module is on the ranks, and can be neither read"):
            getattr(model, name)
    assert not hasattr(model, "scale")
    with pytest.raises(AttributeError, match="object has no attribute 'other'"):
        model.other  # noqa: B018


def test_attributes_of_ones_own_may_be_set(mesh2: Mesh) -> None:
    model: Any = meshbook.distribute(Net, mesh2)
    model.note = "best so far"
    assert copy.deepcopy(model).note == "best so far"
    with pytest.raises(TypeError, match="it cannot be one of shape"):
        model.head.weight.data = model.head.weight.data[:1]
