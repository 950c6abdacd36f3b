"""On a GPU: a recorded step gives the losses of one process, and Python runs ahead of the device."""

from __future__ import annotations

import copy

import pytest
import torch

import meshbook
from meshbook.controller.starting import create_mesh
from tests.tensors import gpt

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.mark.gpu
def test_a_recorded_step_on_a_gpu_gives_the_losses_of_one_process() -> None:
    torch.manual_seed(3)
    alone = gpt.GPT()
    data, places = gpt.batches(6), torch.arange(gpt.LENGTH)
    with create_mesh({"dp": 1}, device="cuda") as mesh:
        model = meshbook.module_to_mesh(copy.deepcopy(alone), mesh)
        trainer = gpt.Trainer(model, meshbook.distribute(places, mesh))
        step = meshbook.record(trainer.step)
        got = [step(x, y).item() for x, y in mesh.feed(data)]
        assert step.stats().replayed >= 2
        assert mesh.execute(lambda weight: str(weight.device), next(iter(model.parameters())))[0].startswith("cuda")
    wanted = gpt.Trainer(alone, places)
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor([wanted.step(*batch).item() for batch in data]), rtol=1e-3, atol=1e-4
    )
