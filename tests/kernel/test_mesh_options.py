"""What is asked of a mesh, and how one that runs differs from it."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.kernel.mesh_options import MeshOptions
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import MeshInfo, MeshSpec, RankInfo

SPEC = MeshSpec(axes={"dp": 2, "tp": 2}, engine="local", num_hosts=1, start_method="fork", device="auto")


def running(*dead: int) -> MeshInfo:
    ranks = tuple(
        RankInfo(rank=rank, pid=rank, host="here", device="cpu", state="dead" if rank in dead else "idle")
        for rank in range(4)
    )
    return MeshInfo(
        name="m", spec=SPEC, ranks=ranks, supervisor_pid=1, started_at=0.0, group_generation=1, groups="ready",
        clients=(), names=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({}, None),
        ({"ranks": 4}, None),
        ({"axes": MeshAxes.of({"dp": 2, "tp": 2})}, None),
        ({"engine": "local", "num_hosts": 1, "start_method": "fork", "device": "cpu"}, None),
        ({"ranks": 3}, "it has 4 ranks (dp=2, tp=2), and 3 are asked for"),
        ({"axes": MeshAxes.of(4)}, "it has 4 ranks (dp=2, tp=2), and axes rank=4 are asked for"),
        ({"num_hosts": 2}, "its number of hosts is 1, and 2 is asked for"),
        ({"start_method": "fresh"}, "its start method is fork, and fresh is asked for"),
        ({"device": "cuda"}, "its ranks are on cpu, and cuda is asked for"),
        ({"end_on_error": False}, "it has end_on_error=True, and False is asked for"),
    ],
)
def test_a_mesh_is_what_was_asked_for_or_the_difference_is_said(options: Any, difference: str | None) -> None:
    assert MeshOptions(**options).differences(running()) == ([difference] if difference else [])


def test_a_mesh_that_lost_ranks_is_not_what_was_asked_for() -> None:
    assert MeshOptions().differences(running(1, 3)) == ["of its ranks 1,3 are gone"]


def test_axes_come_before_a_number_of_ranks() -> None:
    axes = MeshAxes.of({"dp": 2, "tp": 2})
    assert MeshOptions(ranks=4, axes=axes).grid == axes
    assert MeshOptions(ranks=4).grid == MeshAxes.of(4)
    assert MeshOptions().grid is None


def test_what_is_not_given_stays_as_the_old_mesh_has_it() -> None:
    options = MeshOptions(device="cpu", end_on_error=False, keep=True)
    assert options.spec_fields() == {"device": "cpu", "end_on_error": False}
    assert options.spec_fields(SPEC) == {
        "engine": "local", "on": "", "num_hosts": 1, "start_method": "fork", "device": "cpu", "end_on_error": False,
        "process_group": True, "torch": True, "project": None,
    }  # fmt: skip
