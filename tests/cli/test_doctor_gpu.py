"""`meshbook doctor --gpu`: its checks on a mesh of CPU ranks, and what it makes of one that fails."""

from __future__ import annotations

import pytest

from meshbook.cli import doctor_gpu
from meshbook.cli.doctor_gpu import CheckFailed, check_gpus
from meshbook.controller.mesh import Mesh


@pytest.mark.usefixtures("starts_meshes")
def test_checks_that_need_no_gpu_pass_on_the_cpu() -> None:
    results = list(check_gpus("cpu", 2))
    assert {result.about: result.state for result in results} == dict.fromkeys(
        ("mesh", "collective", "attention", "dropout", "fsdp", "pairs", "Stop, collective", "actors"), "ok"
    ), results


@pytest.mark.usefixtures("starts_meshes")
def test_a_check_that_fails_is_a_finding_and_the_next_has_a_whole_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_rank(mesh: Mesh) -> str:
        mesh.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", echo=False)
        return "nothing was lost"

    def disagree(mesh: Mesh) -> str:
        raise CheckFailed("two and two are five")

    checks = [("loss", lose_a_rank), ("sum", disagree), ("collective", dict(doctor_gpu._ON_ANY_DEVICE)["collective"])]
    monkeypatch.setattr(doctor_gpu, "_ON_ANY_DEVICE", checks)
    monkeypatch.setattr(doctor_gpu, "_OF_SEVERAL_RANKS", [])
    _, loss, total, collective = check_gpus("cpu", 2)
    assert (loss.state, "rank 1" in loss.says, "SIGKILL" in loss.says) == ("poor", True, True), loss.says
    assert (total.state, total.says) == ("poor", "two and two are five")
    assert collective.state == "ok", collective.says


def test_a_machine_without_a_gpu_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpu, "count_gpus", lambda: 0)
    (result,) = check_gpus()
    assert (result.state, "no NVIDIA GPU" in result.says) == ("missing", True)
