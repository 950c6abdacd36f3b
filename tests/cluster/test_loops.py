"""Loops that lose no step, over a machine that is lost: what is computed is, bit for bit, what is computed without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed
from tests.controller.elastic_training import CELL, curve, set_up
from tests.tensors.resilient_training import Training

# Each loses a machine, which takes 15 s to be noticed, and starts it again.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.numbers,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("starts_meshes"),
]


@pytest.fixture
def mesh(bed: Bed) -> Iterator[Mesh]:
    with create_mesh({"dp": 4}, on="ssh://n1,n2") as mesh:
        yield mesh


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_an_elastic_loop_goes_on_over_a_lost_machine(mesh: Mesh, bed: Bed, model: str) -> None:
    set_up(mesh, model)
    mesh.run(CELL)
    expected = curve(mesh)
    set_up(mesh, model, fault="if step == 25 and rank == 0: print('here')\n    __import__('time').sleep(0.02)")
    future = mesh.run(CELL, wait=False)
    when(lambda: "here" in mesh.logs(0))
    bed.power_off("n2")
    error = future.exception(WAIT_S)
    bed.power_on("n2")
    assert isinstance(error, RankLost)
    assert error.ranks == (2, 3)
    mesh.heal(copy="said")
    assert "what ranks 2-3 held came from the others" in mesh.run(CELL, echo=False).output
    assert curve(mesh) == expected


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_a_loop_on_remote_tensors_goes_on_over_a_lost_machine(mesh: Mesh, bed: Bed, model: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        expected = Training(mesh, model).run_plain().result()
        training, left = Training(mesh, model), [lambda: bed.power_off("n2")]

        def fault(step: int) -> None:
            if step == 25 and left:
                left.pop()()

        try:
            with pytest.raises(RankLost):
                training.run(fault, heals=False)
        finally:
            bed.power_on("n2")
        mesh.heal()
        training.run(heals=False)
        assert training.result() == expected
    finally:
        torch.use_deterministic_algorithms(False)
