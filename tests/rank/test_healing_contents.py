"""What a rank says of what it holds: equal contents are equal, others are not; what it cannot see into is not known."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshbook.rank.healing.contents import describe, describe_names
from meshbook.rank.healing.filling import is_fillable
from meshbook.rank.healing.replicas import Replicas
from meshbook.rank.state.modules import load_state, state_of


class Scaled(nn.Module):
    """A module with a plain attribute and an extra state, as those of TransformerEngine have."""

    def __init__(self, amax: Any = 0.0, tau: float = 1.0) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)
        nn.init.ones_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)
        self.amax, self.tau = [amax], tau

    def get_extra_state(self) -> Any:
        return self.amax[0]

    def set_extra_state(self, state: Any) -> None:
        self.amax = [state]


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Trainer:
    """Whose optimizer says nothing of its flags."""

    def __init__(self, *, is_main: bool) -> None:
        self.optimizer = torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1)
        self.is_main = is_main


class Averages:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Unlisted(nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("not yet")


def adder(number: int) -> Callable[[int], int]:
    return lambda given: given + number


@pytest.mark.parametrize(
    "make",
    [
        lambda number: Holder(number),
        lambda number: [adder(number)],
        lambda number: {"f": eval(f"lambda x: x + {number}")},
        lambda number: {"f": eval(f"lambda x, y={number}: x")},
        lambda number: torch.full((3,), complex(number, 1), dtype=torch.complex64).conj(),
        lambda number: {"t": torch.full((3,), float(number))._neg_view()},
    ],
)
def test_equal_contents_have_equal_digests_and_others_do_not(make: Callable[[int], Any]) -> None:
    one, other = describe(make(1)), describe(make(2))
    assert one.digest is not None
    assert one.digest == describe(make(1)).digest != other.digest


@pytest.mark.parametrize("value", [random.Random(1), functools.partial(print, 1), [functools.partial(print, 1)]])
def test_what_cannot_be_seen_into_has_no_digest(value: Any) -> None:
    assert describe(value).digest is None


class Slotted(Holder):
    __slots__ = ("hidden",)


def test_what_has_more_than_attributes_is_replaced_and_not_filled() -> None:
    for value in (Slotted(1), random.Random(1), functools.partial(print), nn.Linear(1, 1), Holder):
        assert not is_fillable(value)
    for value in (Holder(1), {"a": 1}, [1], {1}, torch.ones(1)):
        assert is_fillable(value)


def test_a_module_is_compared_by_its_parameters_and_beside_them_by_extra_state_and_attributes() -> None:
    plain, other_state, other_tau = describe(Scaled()), describe(Scaled(amax=7.0)), describe(Scaled(tau=0.5))
    assert plain.digest == other_state.digest == other_tau.digest
    assert plain.rest_digests == other_tau.rest_digests != other_state.rest_digests
    assert plain.attributes_digest == other_state.attributes_digest != other_tau.attributes_digest


def test_an_extra_state_that_cannot_be_seen_into_equals_no_other() -> None:
    one = random.Random(1)
    assert describe(Scaled(amax=one)).rest_digests != describe(Scaled(amax=one)).rest_digests


def test_a_modules_state_has_its_extra_state_and_its_attributes() -> None:
    trained, built = Scaled(amax=7.0, tau=0.5).eval(), Scaled()
    trained.dropout.p = 0.3
    load_state(built, state_of(trained))
    assert (built.amax, built.tau, built.dropout.p, built.training, built.fc.training) == (
        [7.0],
        0.5,
        0.3,
        False,
        False,
    )
    alone = Scaled()
    load_state(alone, state_of(trained), with_attributes=False)
    assert (alone.amax, alone.tau, alone.dropout.p, alone.training) == ([7.0], 1.0, 0.1, False)


def test_what_new_group_returns_on_other_ranks_is_no_number() -> None:
    assert describe(dist.GroupMember.NON_GROUP_MEMBER).kind == "non-member"
    assert describe(-99).kind == "plain"


@pytest.mark.parametrize(
    ("value", "is_telling"),
    [
        (torch.arange(16.0), True),
        (torch.arange(15.0), False),  # 60 bytes
        (torch.zeros(1000), False),
        (torch.full((1000,), float("nan")), False),
        ([torch.arange(8.0), torch.arange(8.0)], True),
        ({"x": torch.arange(16.0)}, True),
        ({"x": torch.arange(16.0), "is_main": False}, False),
        ([float(number) for number in range(100)], False),
        (nn.Linear(8, 8), True),
        (nn.Linear(1, 1), False),
        (torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1), True),
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), False),
        (torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1)), True),
        (Holder(torch.arange(16.0)), True),
        (Trainer(is_main=False), False),
        (Averages({"weights": torch.arange(16.0)}), True),
        (Averages({"weights": torch.arange(16.0), "is_main": False}), False),
        (adder, True),
        (adder(3), False),
        (lambda x, is_main=False: x, False),
    ],
)
def test_what_cannot_be_equal_by_chance_is_many_bytes_that_are_not_all_alike_and_no_flags(
    value: Any, is_telling: bool
) -> None:
    assert describe(value).is_telling == is_telling


def test_an_object_is_a_replica_by_its_own_parameters_and_not_by_those_of_an_optimizer_that_it_holds() -> None:
    trainer = Trainer(is_main=False)
    replicas = Replicas()
    replicas._by_parameter |= {id(one): (0, 1) for one in trainer.optimizer.param_groups[0]["params"]}
    scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    assert [describe(one, replicas).replicas for one in (trainer.optimizer, scheduler, trainer)] == [(0, 1), (0, 1), ()]


def test_of_a_module_whose_own_code_raises_nothing_is_known_and_the_others_are_described() -> None:
    found = describe_names({"bad": Unlisted(8, 8), "good": torch.arange(16.0)}, ["bad", "good"])
    assert (found["bad"].replicas, found["good"].is_telling) == ((), True)
