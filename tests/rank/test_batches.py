"""Batches of tensor operations on one rank, with a Stop at a place where it must not tear them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from meshbook.ids import CallId
from meshbook.rank.tensors import agreement
from meshbook.rank.tensors.engine import RankTensors
from meshbook.rank.tensors.operators import TENSOR, TemplateMessage
from meshbook.rank.tensors.tensor_store import Poison
from meshbook.wire import messages

ENGINE = "client|"
ADD = TemplateMessage(1, "aten::add_.Tensor", (TENSOR, TENSOR), {}, (0,), "one", (0,), False, False)
CHANGED, OPERAND = 1, 2


def batch(**more: Any) -> messages.RunOps:
    """The first tensor is changed twice."""
    return messages.RunOps(
        call=CallId("a-1"),
        ranks=(0,),
        engine=ENGINE,
        first_op=1,
        ops=msgspec.msgpack.encode([1, CHANGED, OPERAND, 1, CHANGED, OPERAND]),
        templates=(pickle.dumps(ADD),),
        **more,
    )


class Rank:
    """Its tensors. `load` and `hold` raise a KeyboardInterrupt where a test has them."""

    def __init__(self) -> None:
        self.presses_at = ""
        self.tensors = RankTensors(
            0, torch.device("cpu"), None, load=self.load, dump=lambda thing: thing, resolve=lambda key: None
        )
        self.values = self.tensors.store_of(ENGINE).values
        self.values[CHANGED] = torch.zeros(2)

    def load(self, payload: Any) -> Any:
        if self.presses_at == "load":
            raise KeyboardInterrupt
        return torch.ones(2), None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        yield
        if self.presses_at == "hold":
            self.presses_at = ""
            raise KeyboardInterrupt

    def run(self, command: messages.RunOps) -> None:
        """As the executor does."""
        self.tensors.expect_batch(command)
        try:
            self.tensors.run(command)
        except KeyboardInterrupt:
            self.tensors.skip_batch(command)
            raise


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(agreement, "defer_interrupts", rank.hold)
    return rank


def test_a_batch_that_is_stopped_before_its_first_operation_is_left_out_whole(rank: Rank) -> None:
    rank.presses_at = "load"
    with pytest.raises(KeyboardInterrupt):
        rank.run(batch(uploads=(messages.TensorUpload(id=OPERAND, payload=None),)))  # type: ignore[arg-type]
    changed = rank.values[CHANGED]
    assert isinstance(changed, Poison)
    assert (changed.num_skipped, changed.write_started, changed.old_value.tolist()) == (2, False, [0.0, 0.0])
    assert isinstance(rank.values[OPERAND], Poison)


def test_a_batch_that_is_stopped_while_a_fault_is_passed_on_leaves_out_each_operation_once(rank: Rank) -> None:
    rank.values[OPERAND] = Poison(0, "ValueError", "no", "")
    rank.presses_at = "hold"
    with pytest.raises(KeyboardInterrupt):
        rank.run(batch())
    assert rank.values[CHANGED].num_skipped == 2


def test_a_batch_that_is_not_stopped_is_run(rank: Rank) -> None:
    rank.run(batch(uploads=(messages.TensorUpload(id=OPERAND, payload=None),)))  # type: ignore[arg-type]
    assert rank.values[CHANGED].tolist() == [2.0, 2.0]
    rank.tensors.skip_batch(batch())
    assert rank.values[CHANGED].tolist() == [2.0, 2.0]
