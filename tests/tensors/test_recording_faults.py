"""Recorded steps after faults: all ranks trace a step in the same of its calls, or a rank says that it cannot."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellInterrupted
from meshbook.rank.tensors.operators import FLOAT, TENSOR, TemplateMessage
from meshbook.rank.tensors.replay import OutOfStep, RecordedOp, RecordedStep, forget_replay, replay
from tests.budget import when

# On a rank: what comes after the ranks have agreed on a function does not end.
STUCK_AFTER_AGREEMENT = """
import time
from meshbook.rank.tensors import replay
def stuck(self, *arguments, original=replay.StepReplayer._agree):
    found = original(self, *arguments)
    replay.StepReplayer._agree = original
    open({sign!r}, "w").close()
    time.sleep(1000)
    return found
replay.StepReplayer._agree = stuck
"""

# On a rank: the floats of a step that is traced next are taken for constants.
NO_VARIABLE_FLOATS = """
import dataclasses
from meshbook.rank.tensors.lowering import Lowering
def compile(self, *arguments, original=Lowering.compile, **options):
    Lowering.compile = original
    return dataclasses.replace(original(self, *arguments, **options), variable_floats=frozenset())
Lowering.compile = compile
"""


@meshbook.record
def scaled_sums(x: Any, factor: float) -> list[Any]:
    sums = [(x * factor).sum(), (x * 2.0).sum()]  # parts on each rank
    return [each.redistribute([Replicate()]) for each in sums]


@pytest.fixture
def x(mesh2: Mesh) -> Any:
    scaled_sums.forget()
    return meshbook.distribute(torch.ones(4), mesh2, [Shard(0)])


def values(x: Any, factor: float) -> list[float]:
    return [each.item() for each in scaled_sums(x, factor)]


def test_a_stop_while_one_rank_has_traced_a_step_and_another_has_not_leaves_them_in_step(
    mesh2: Mesh, x: Any, tmp_path: Path
) -> None:
    sign = tmp_path / "stuck"
    mesh2.run(STUCK_AFTER_AGREEMENT.format(sign=str(sign)), ranks=1, echo=False)

    def stop_when_stuck() -> None:
        when(lambda: sign.exists() and not mesh2.session.foreground.is_idle)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop_when_stuck)
    stopper.start()

    def go_on() -> None:
        while True:
            values(x, 3.0)

    with pytest.raises(CellInterrupted):
        go_on()
    stopper.join()
    before = scaled_sums.stats().replayed
    for factor in (3.0, 5.0, 7.0):
        assert values(x, factor) == [4 * factor, 8.0]
    assert scaled_sums.stats().replayed >= before + 2


def test_a_number_that_one_rank_takes_for_constant_is_constant_on_all(mesh2: Mesh, x: Any) -> None:
    mesh2.run(NO_VARIABLE_FLOATS, ranks=1, echo=False)
    for factor in (3.0, 3.0, 3.0, 5.0, 7.0, 7.0):
        assert values(x, factor) == [4 * factor, 8.0]


def test_a_call_that_a_rank_has_left_out_makes_it_refuse_the_next_until_all_begin_anew() -> None:
    template = TemplateMessage(
        number=1,
        function="aten::mul.Tensor",
        args=(TENSOR, FLOAT),
        kwargs={},
        outputs=(-1,),
        returns="one",
        mutates=(),
        communicates=False,
        seeded=False,
    )
    op = RecordedOp(template=1, inputs=(0,), outputs=(1,), first_float=0, num_floats=1)
    payload = pickle.dumps(RecordedStep("it", 1, (op,), {1: pickle.dumps(template)}, (1,)))

    def call(first: int, number: int) -> float:
        (result,) = replay(None, torch.device("cpu"), payload, "it", torch.ones(1), float(first), float(number), 3.0)
        return float(result.item())

    try:
        assert [call(0, 0), call(0, 1), call(0, 2)] == [3.0] * 3
        for number in (4, 5):
            with pytest.raises(OutOfStep, match="call it again"):
                call(0, number)
        assert [call(6, 6), call(6, 7)] == [3.0] * 2
        with pytest.raises(OutOfStep):
            call(8, 9)  # the call with which all were to begin
    finally:
        forget_replay("it")
