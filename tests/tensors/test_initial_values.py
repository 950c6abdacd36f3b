"""A factory's values are those of one process, whichever way it fills its module."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.rank.tensors.initial_values import build_on_meta
from tests.tensors import gpt


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


class InitiatesSome(TwoLayers):
    """As the language model of torch's tutorials: its method of that name fills a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.init_weights()

    def init_weights(self) -> None:
        self.head.weight.data.uniform_(-0.1, 0.1)


class InitiatesEach(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)


class InitiatesAll(TwoLayers):
    """As torchtitan's models have it: who makes one calls it afterwards."""

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)


class ResetsAgain(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.body.reset_parameters()
        self.head.reset_parameters()


class HeadIsMadeFirst(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        del self.body, self.head
        head = nn.Linear(4, 2)
        self.body, self.head = nn.Linear(4, 4), head


class GivesOthers(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.body.weight.data = torch.eye(4)
        self.head.weight = nn.Parameter(torch.randn(2, 4))


class Numpys(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.body.weight.data = torch.tensor(numpy.random.randn(4, 4), dtype=torch.float32)
        nn.init.constant_(self.head.weight, random.random())


class Copies(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.body)


class KeepsABuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2))


def trained_before() -> nn.Module:
    module = InitiatesAll()
    module.load_state_dict({name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()})
    return module


def of_given_vectors() -> nn.Module:
    return nn.Sequential(nn.Embedding.from_pretrained(torch.arange(12.0).reshape(3, 4)), nn.Linear(4, 2))


def through_another_dtype() -> nn.Module:
    return TwoLayers().to(torch.bfloat16).to(torch.float32)


WAYS: tuple[Any, ...] = (
    InitiatesSome, InitiatesEach, InitiatesAll, ResetsAgain, HeadIsMadeFirst, GivesOthers, Numpys, Copies, KeepsABuffer,
    trained_before, of_given_vectors, through_another_dtype,
)  # fmt: skip


@pytest.mark.parametrize("factory", WAYS)
def test_a_factory_whose_values_no_submodule_would_draw_again_is_built_whole(factory: Callable[[], nn.Module]) -> None:
    assert build_on_meta(factory, lambda num_bytes: True) is None


@pytest.mark.parametrize("factory", [TwoLayers, gpt.GPT, lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))])
def test_a_factory_whose_submodules_fill_themselves_in_order_is_filled_from_the_meta_device(factory: Any) -> None:
    torch.manual_seed(3)
    alone = factory()
    made = build_on_meta(factory, lambda num_bytes: True)
    assert made is not None
    torch.manual_seed(3)
    made.fill(made.module, torch.device("cpu"))
    for name, tensor in alone.state_dict().items():
        assert torch.equal(made.module.state_dict()[name], tensor), name


def test_factories_give_the_values_of_one_process_in_whichever_way_they_fill_their_module(mesh2: Mesh) -> None:
    for factory in (TwoLayers, *WAYS):
        found, after = [], []
        for make in (factory, functools.partial(meshbook.distribute, factory, mesh2, strategy="fsdp")):
            torch.manual_seed(5)
            numpy.random.seed(5)
            random.seed(5)
            module: Any = make()
            found.append(module.state_dict() if make is factory else module.state_dict(full=True))
            after.append((torch.rand(()).item(), numpy.random.rand(), random.random()))
        for name, tensor in found[0].items():
            assert torch.equal(found[1][name], tensor), (factory.__name__, name)
        assert after[0] == after[1], factory.__name__


def test_a_module_that_is_too_large_to_be_built_whole_is_filled_by_its_init_weights_or_says_what_that_leaves() -> None:
    made = build_on_meta(InitiatesAll, lambda num_bytes: False)
    assert made is not None
    made.fill(made.module, torch.device("cpu"))
    assert all(0 < parameter.abs().max() < 0.1 for parameter in made.module.parameters())
    made = build_on_meta(InitiatesSome, lambda num_bytes: False)
    assert made is not None
    with pytest.raises(ValueError, match=r"too large to be built whole .* leaves body.weight as it is"):
        made.fill(made.module, torch.device("cpu"))
    for other in (InitiatesEach, trained_before, TwoLayers):  # takes an argument; loads values; has no such method
        made = build_on_meta(other, lambda num_bytes: False)
        assert made is None or other is TwoLayers
