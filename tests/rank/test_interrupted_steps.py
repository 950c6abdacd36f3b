"""Models that a process has when a call ends: also those that an interrupt left half built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshbook.rank.process_groups import interrupted_steps
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.ring import CollectiveRing


class FSDPLinear(FSDPModule, torch.nn.Linear):
    """As `fully_shard` makes it."""


@pytest.fixture(params=["fsdp", "fsdp without a module", "ddp"])
def half_built(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model whose making an interrupt has ended."""
    if request.param == "ddp":
        model: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    else:
        model = torch.nn.Linear(2, 2) if request.param == "fsdp" else torch.nn.Linear.__new__(torch.nn.Linear)
        model.__class__ = FSDPLinear
    yield model
    model.__class__ = torch.nn.Linear  # other tests' processes have no such model


def test_a_half_built_model_is_in_no_step(half_built: Any) -> None:
    assert not interrupted_steps.is_mid_step(backward_incomplete=False)
    assert interrupted_steps.num_rebucketed_models() == 0


def test_a_half_built_model_is_reset_with_the_others(half_built: Any) -> None:
    interrupted_steps.reset_interrupted_steps(same_buckets=False)


def test_a_call_ends_also_where_the_state_of_models_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backward_incomplete: bool) -> bool:
        raise RuntimeError("torch has changed")

    monkeypatch.setattr("meshbook.rank.process_groups.groups.is_mid_step", fail)
    groups = ProcessGroups(CollectiveRing())
    groups.call_ended(succeeded=False)
