"""Cells on GPUs: devices, values, Stop, faults."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError
from meshbook.host.gpus import count_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("starts_meshes")]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A rank on each GPU."""
    with create_mesh(count_gpus(), device="cuda") as mesh:
        yield mesh


def values(mesh: Mesh, source: str) -> list[object]:
    return list(mesh.run(source, echo=False).values.values())


def test_each_rank_has_a_gpu_of_its_own_and_nccl(mesh: Mesh) -> None:
    found = values(mesh, "str(device), torch.cuda.current_device(), dist.get_backend()")
    assert found == [(f"cuda:{rank}", rank, "nccl") for rank in mesh.ranks]


def test_a_tensor_that_is_pushed_arrives_on_the_cpu_and_one_that_is_pulled_too(mesh: Mesh) -> None:
    mesh.push(here=torch.ones(3, device="cuda"))
    assert values(mesh, "str(here.device)") == ["cpu"] * mesh.size()
    mesh.run("there = 2 * here.to(device)", echo=False)
    pulled = mesh.pull("there")[0]
    assert (pulled.device.type, pulled.tolist()) == ("cpu", [2, 2, 2])


def test_random_numbers_are_written_in_place(mesh: Mesh) -> None:
    x = meshbook.distribute(torch.full((4096,), 7.0), mesh)
    x.normal_()
    assert 0.9 < x.std().item() < 1.1
    assert 0.9 < x.full_tensor().std().item() < 1.1


def test_the_memory_of_each_gpu_is_known_within_seconds(mesh: Mesh) -> None:
    mesh.run("held = torch.empty(1 << 30, dtype=torch.uint8, device=device); torch.cuda.synchronize()", echo=False)
    until = time.monotonic() + 30
    while True:
        rows = mesh.memory()
        used = [row["gpu_used_bytes"] for row in (rows.to_dict("records") if hasattr(rows, "to_dict") else rows)]
        if all(each is not None and each > 1 << 30 for each in used) or time.monotonic() > until:
            break
    mesh.run("del held; torch.cuda.empty_cache()", echo=False)
    assert all(each is not None and each > 1 << 30 for each in used), used


def test_a_checkpoint_and_a_heal_give_back_what_was_on_the_device(
    mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("saved"))
    mesh.run(
        """
        torch.manual_seed(rank)
        model = torch.nn.Linear(256, 256).to(device)
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 256, device=device)).sum().backward()
        opt.step()
        """,
        echo=False,
    )
    total = "model.weight.double().sum().item(), str(model.weight.device)"
    before = values(mesh, total)
    mesh.checkpoint(folder, "model", "opt", asynchronous=False)
    with pytest.raises(meshbook.errors.RankLost):
        mesh.run("import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", echo=False)
    mesh.heal()
    mesh.run(
        "model = torch.nn.Linear(256, 256).to(device)\nopt = torch.optim.AdamW(model.parameters())",
        echo=False,
    )
    mesh.restore(folder)
    assert values(mesh, total) == before
    assert values(mesh, "str(next(iter(opt.state.values()))['exp_avg'].device)") == [
        f"cuda:{rank}" for rank in mesh.ranks
    ]


def test_memory_that_runs_out_is_an_error_of_the_rank_and_nothing_else(mesh: Mesh) -> None:
    with pytest.raises(CellError, match="CUDA out of memory"):
        mesh.run("torch.empty(1 << 40, dtype=torch.uint8, device=device)", echo=False)
    assert values(mesh, "torch.ones(3, device=device).sum().item()") == [3.0] * mesh.size()
