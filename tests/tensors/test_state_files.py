"""Remote modules and their optimizers, saved by parts and loaded by another strategy, on another mesh, after a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, RankLost, UsageError
from tests.tensors import models

pytestmark = [
    pytest.mark.usefixtures("starts_meshes"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # where this process reads by itself
]

DATA = models.batches(2)


def with_optimizer(model: Any, lr: float = 0.05) -> tuple[Any, Any]:
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def trained(model: Any, optimizer: Any) -> list[float]:
    """Return the losses of two steps."""
    losses = []
    for x, y in DATA:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "strategy", ["tp", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("ddp", "fsdp", "replicate"))]
)
def test_training_goes_on_by_another_strategy_on_another_mesh(
    strategy: str, mesh22: Mesh, mesh2: Mesh, tmp_path: Path
) -> None:
    model, optimizer = with_optimizer(meshbook.distribute(models.Llama, mesh22, strategy="fsdp+tp"))
    trained(model, optimizer)
    model.save_checkpoint(tmp_path / "here", optimizer)
    expected = trained(model, optimizer)

    for steps_before in (0, 1):  # of an optimizer that has no state yet, and of one that has
        other, its_optimizer = with_optimizer(
            meshbook.distribute(models.Llama, mesh2, strategy=strategy, axis="dp"), lr=0.1
        )
        for _ in range(steps_before):
            trained(other, its_optimizer)
        other.load_checkpoint(tmp_path / "here", its_optimizer)
        assert its_optimizer.param_groups[0]["lr"] == 0.05
        assert trained(other, its_optimizer) == pytest.approx(expected, rel=1e-4)


def test_what_is_saved_is_torchs_format_and_replaces_what_was_there(mesh2: Mesh, tmp_path: Path) -> None:
    model = meshbook.distribute(lambda: nn.Linear(4, 3), mesh2, strategy="fsdp")
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        model.save_checkpoint(tmp_path / "here")
    read = {"model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}}
    dcp.load(read, checkpoint_id=tmp_path / "here")
    assert torch.equal(read["model"]["weight"], torch.full((3, 4), 2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_rank_that_dies_while_it_saves_leaves_what_was_there(tmp_path: Path) -> None:
    with create_mesh({"dp": 2}) as mesh:
        model = meshbook.distribute(lambda: nn.Linear(4, 3), mesh, strategy="fsdp")
        with torch.no_grad():
            model.weight.fill_(1.0)
        model.save_checkpoint(tmp_path / "here")
        with torch.no_grad():
            model.weight.fill_(2.0)
        mesh.run(
            "import os, signal\n"
            "from meshbook.rank.tensors.state_files import state_dict_saver\n"
            "if rank == 1:\n"
            "    state_dict_saver.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)"
        )
        with pytest.raises(RankLost, match="rank 1"):
            model.save_checkpoint(tmp_path / "here")
    read = {"model": {"weight": torch.zeros(3, 4)}}
    dcp.load(read, checkpoint_id=tmp_path / "here")
    assert torch.equal(read["model"]["weight"], torch.ones(3, 4))


def test_what_cannot_be_saved_or_loaded_is_said(mesh2: Mesh, tmp_path: Path) -> None:
    model, optimizer = with_optimizer(meshbook.distribute(lambda: nn.Linear(4, 3), mesh2, strategy="fsdp"))
    with pytest.raises(CellError, match="is no folder that save_checkpoint has written"):
        model.load_checkpoint(tmp_path / "none", optimizer)
    model.save_checkpoint(tmp_path / "here")
    other, its_optimizer = with_optimizer(meshbook.distribute(lambda: nn.Linear(4, 5), mesh2, strategy="fsdp"))
    with pytest.raises(CellError, match="Size mismatch"):
        other.load_checkpoint(tmp_path / "here")
    with pytest.raises(CellError, match="Missing key"):
        model.load_checkpoint(tmp_path / "here", optimizer)  # was saved without one
    (model(torch.ones(2, 4)).sum() + 0).backward()
    optimizer.step()
    model.save_checkpoint(tmp_path / "trained", optimizer)
    part, its_optimizer_of_part = with_optimizer(meshbook.distribute(lambda: nn.Linear(4, 3), mesh2, strategy="fsdp"))
    part.bias.requires_grad_(False)
    (part(torch.ones(2, 4)).sum() + 0).backward()
    its_optimizer_of_part.step()
    with pytest.raises(CellError, match=r"has optimizer\.bias\.exp_avg, .*, for which there is nothing here"):
        part.load_checkpoint(tmp_path / "trained", its_optimizer_of_part)
    with pytest.raises(UsageError, match="parameters that are not the module's"):
        model.save_checkpoint(tmp_path / "here", its_optimizer)
