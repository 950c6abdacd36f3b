"""A recorded step that a sentinel watches: the first bad operation is found by numbers that are gone by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from meshbook.rank.differences.remote_ops import NaNReader, RemoteOps
from meshbook.rank.differences.rerun import BadOperation
from meshbook.rank.tensors import watched_ops
from meshbook.rank.tensors.engine import CurrentOp
from meshbook.rank.tensors.lowering import Lowering
from meshbook.wire.messages import Frame

aten = torch.ops.aten


LINES = (Frame("step.py", 4, "step"),)


class Batch:
    def current_op(self, number: int | None = None) -> CurrentOp:
        return CurrentOp("aten.log", None, {}, {})


def found_in(step: Callable[..., Sequence[torch.Tensor]], first: torch.Tensor, second: torch.Tensor) -> list[str]:
    """Record a step with one input, run what was made of it with another; the operations that are found."""
    lowering = Lowering([first])
    with torch.no_grad(), lowering, lowering.operation(0, 0, []):
        results = list(step(first))
    found: list[str] = []

    def note(operation: BadOperation, line: str, collectives: tuple[int, int]) -> None:
        found.append(operation.op if operation.phase == "remote" else f"{operation.op} {operation.phase}, {line}")

    def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    function = lowering.compile(results)
    ops = RemoteOps(Batch(), lambda: not found, lambda: 0, note, unguarded, NaNReader())
    with torch.no_grad():
        got = function.watched.run([second.clone()], [], ops.of_recorded(LINES))
        wanted = function.run([second.clone()], [])
    assert all(torch.equal(one, other) or not one.isfinite().all() for one, other in zip(got, wanted, strict=True))
    return found


def chain(x: Any) -> list[Any]:
    y = aten.mul.Tensor(aten.add.Tensor(x, x), x)
    logs = aten.log.default(y)
    return [aten.mm.default(aten.mul.Tensor(logs, y), y), aten.exp.default(x)]


@pytest.mark.parametrize("most_bytes", [1, 200, watched_ops.MAX_BYTES])
def test_an_operation_whose_result_is_gone_is_found_in_windows_of_any_size(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_ops, "MAX_BYTES", most_bytes)
    good = torch.rand(4, 4) + 1
    bad = good.clone()
    bad[1, 2] = 0
    assert found_in(chain, good, good) == []
    assert found_in(chain, good, bad) == ["log"]


def test_an_operation_in_place_is_found_by_what_it_has_overwritten() -> None:
    def step(x: Any) -> list[Any]:
        y = aten.mul.Tensor(x, x)
        aten.add_.Tensor(y, x)
        aten.sqrt_.default(aten.view.default(y, [16]))
        return [aten.mul.Tensor(y, x)]

    good = torch.rand(4, 4) + 1
    bad = good.clone()
    bad[1, 2] = -0.5
    assert found_in(step, good, good) == []
    assert found_in(step, good, bad) == ["sqrt"]


def test_an_input_that_is_changed_in_place_after_it_was_read_misleads_nobody() -> None:
    def step(x: Any) -> list[Any]:
        y = aten.reciprocal.default(x)
        aten.fill_.Scalar(x, 1.0)
        return [aten.exp.default(y), aten.log.default(x)]

    good = torch.rand(4, 4) + 1
    bad = good.clone()
    bad[1, 2] = 0
    assert found_in(step, good, bad) == ["reciprocal"]


def test_masks_of_negative_infinity_are_no_finding_before_softmax_or_in_place_after_it() -> None:
    def step(x: Any) -> list[Any]:
        mask = aten.triu.default(aten.full_like.default(x, float("-inf")), 1)
        scores = aten.add.Tensor(x, mask)
        weights = aten._softmax.default(scores, -1, False)
        aten.mul_.Tensor(scores, 2.0)
        return [aten.mm.default(weights, x), scores]

    assert found_in(step, torch.rand(4, 4), torch.rand(4, 4)) == []


class Flaky:
    """An operation that gives another number in its second call, which is that of the watched step."""

    def __init__(self, number: float) -> None:
        self.number, self.num_calls = number, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.full_like(x, self.number) if self.num_calls == 2 else x.clone()


@pytest.fixture
def flaky() -> Iterator[Flaky]:
    operation = Flaky(torch.nan)
    with torch.library._scoped_library("meshbook_test", "FRAGMENT") as library:
        library.define("flaky(Tensor x) -> Tensor")
        library.impl("flaky", operation, "CPU")
        library.define("empty_flaky(Tensor x) -> Tensor")
        library.impl("empty_flaky", operation, "CPU")
        yield operation


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_bad_when_they_are_computed_again_are_told_all_the_same(
    flaky: Flaky, number: float
) -> None:
    def step(x: Any) -> list[Any]:
        drawn = torch.ops.meshbook_test.flaky(aten.mul.Tensor(x, x))
        return [aten.mm.default(drawn, drawn), aten.add.Tensor(x, x)]

    flaky.number = number
    assert found_in(step, torch.rand(4, 4), torch.rand(4, 4)) == ["mm not repeated, step.py, line 4 in step"]


def test_memory_that_is_still_to_be_filled_is_no_finding(flaky: Flaky) -> None:
    def step(x: Any) -> list[Any]:
        memory = torch.ops.meshbook_test.empty_flaky(x)
        aten.copy_.default(aten.view.default(memory, [16]), aten.view.default(x, [16]))
        return [aten.mul.Tensor(memory, x)]

    assert found_in(step, torch.rand(4, 4), torch.rand(4, 4)) == []
    assert flaky.num_calls > 2


def test_sums_too_large_for_their_dtype_are_no_finding() -> None:
    def step(x: Any) -> list[Any]:
        return [aten.mul.Tensor(aten.add.Tensor(x, x), 3e38)]

    assert found_in(step, torch.rand(4, 4) * 0.1, torch.full((4, 4), 0.5)) == []


def test_numbers_of_a_piece_of_what_was_split_are_seen() -> None:
    def step(x: Any) -> list[Any]:
        logs = aten.log.default(x)
        left, right = aten.split.Tensor(logs, 2, 1)
        return [aten.mul.Tensor(left, left), aten.relu.default(right)]

    good = torch.rand(4, 4) + 1
    bad = good.clone()
    bad[1, 3] = 0  # its logarithm is gone in the result
    assert found_in(step, good, bad) == ["log"]
