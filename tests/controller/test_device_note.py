"""What is said about the devices of a mesh that has started."""

from __future__ import annotations

from typing import Literal

import pytest

from meshbook.controller.starting import device_note
from meshbook.wire.messages import MeshInfo, MeshSpec, RankInfo

Device = Literal["auto", "cpu", "cuda"]


def mesh(*devices: str, asked: Device = "auto", backend: str | None = "gloo", hosts: str = "") -> MeshInfo:
    """A mesh whose ranks are on these devices, each on the host of its letter, or all on one."""
    ranks = tuple(
        RankInfo(rank=rank, state="idle", host=(hosts or "a" * len(devices))[rank], device=device)
        for rank, device in enumerate(devices)
    )
    spec = MeshSpec(axes={"rank": len(devices)}, device=asked)
    return MeshInfo("m", spec, ranks, 1, 0.0, 1, "ready", (), (), backend=backend)


def test_ranks_that_share_gpus_are_named_with_what_becomes_of_their_groups() -> None:
    note = device_note(mesh("cuda:0", "cuda:1", "cuda:0", asked="cuda"), 2)
    assert note is not None
    assert note.startswith("3 ranks and 2 GPUs: ranks 0,2 share. NCCL refuses that, so the process groups use gloo")
    without_groups = device_note(mesh("cuda:0", "cuda:0", asked="cuda", backend=None), 1)
    assert without_groups == "2 ranks and 1 GPU: ranks 0-1 share"


def test_ranks_that_are_on_the_cpu_beside_gpus_are_told_why_and_how_to_have_them() -> None:
    assert device_note(mesh("cpu", "cpu"), 1) == (
        "2 ranks and 1 GPU: the ranks are on the CPU, because there is not a GPU for each. Ask for 1, or for device "
        "cuda: then they share"
    )


@pytest.mark.parametrize(
    ("info", "num_gpus"),
    [
        (mesh("cpu", "cpu"), 0),
        (mesh("cpu", "cpu", asked="cpu"), 1),
        (mesh("cuda:0", "cuda:1", backend="nccl"), 2),
        (mesh("cuda:0", "cuda:0", backend="nccl", hosts="ab"), 0),
    ],
)
def test_nothing_is_said_where_each_rank_has_what_one_would_expect(info: MeshInfo, num_gpus: int) -> None:
    assert device_note(info, num_gpus) is None
