"""What torch is told here for the whole process holds for what the ranks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.rank.tensors import modes


@pytest.fixture(autouse=True)
def _as_it_began() -> Iterator[None]:
    before = modes.AppliedModes()
    before.set(tuple((name, mode.default) for name, mode in modes.MODES.items()))
    yield
    for mode in modes.MODES.values():
        mode.write(mode.default)


class Tells(nn.Module):
    """Gives the modes that its forward, and its backward, have run in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.in_backward = _told()

    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_()
            x.register_hook(self.look)
        return {"out": self.layer(x), "told": _told(), "new": torch.ones(2), "before": self.in_backward}

    def look(self, grad: torch.Tensor) -> None:
        self.in_backward = _told()


def _told() -> torch.Tensor:
    return torch.tensor(
        [
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.get_float32_matmul_precision() == "high",
        ],
        dtype=torch.float32,
    )


def told_by_a_cell() -> list[float]:
    return _told().tolist()


def ones(mesh: Mesh) -> Any:
    return meshbook.distribute(torch.ones(2, 2), mesh, [Shard(0)])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_a_module_there_runs_in_the_modes_that_are_set_here(mesh2: Mesh, strategy: str) -> None:
    model = meshbook.distribute(Tells, mesh2, strategy=strategy)
    for _ in range(2):  # the first forward and backward of a kind are sent otherwise than those after them
        for wanted in ([1.0, 0.0, 1.0], [0.0, 1.0, 0.0]):
            torch.use_deterministic_algorithms(bool(wanted[0]))
            torch.set_float32_matmul_precision("high" if wanted[2] else "highest")
            with sdpa_kernel(SDPBackend.MATH if wanted[0] else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
                given = model(ones(mesh2))
                given["out"].sum().backward()
            assert given["told"].full_tensor().tolist()[:3] == wanted
            before = model(ones(mesh2))["before"]  # in the backward
            assert before.full_tensor().tolist()[:3] == wanted
            assert mesh2.execute(told_by_a_cell)[1] == [0.0, 1.0, 0.0]


def test_operations_run_in_the_modes_of_their_own_line(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(2, 2), mesh2)
    made = []
    for turn in range(6):  # all of one batch; torch fills what is empty with NaN where it is to be deterministic
        torch.use_deterministic_algorithms(turn % 2 == 1)
        made.append(torch.empty_like(x))
        torch.use_deterministic_algorithms(False)
        made[-1] = made[-1] * 1.0
    assert [tensor.isnan().all().item() for tensor in made[1::2]] == [True] * 3
    assert mesh2.execute(told_by_a_cell)[0] == [0.0, 1.0, 0.0]


def test_a_mode_is_told_again_after_a_stop_or_a_step_that_was_taken_back(mesh2: Mesh) -> None:
    parameter = nn.Parameter(meshbook.distribute(torch.ones(2), mesh2))

    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.use_deterministic_algorithms(True)
            torch.empty_like(parameter)
            raise ValueError("in the middle of a step")

    parameter.grad = meshbook.distribute(torch.ones(2), mesh2)
    with pytest.raises(ValueError, match="in the middle"):
        Breaks([parameter]).step()
    assert torch.empty_like(parameter).isnan().all().item()


def test_a_recorded_step_is_not_replayed_as_it_was_under_other_modes(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(2, 2), mesh2)

    @meshbook.record
    def step() -> Any:
        return torch.empty_like(x) * 1.0

    for deterministic in (False, True, False, True):
        torch.use_deterministic_algorithms(deterministic)
        for _ in range(4):
            made = step()
        if deterministic:
            assert made.isnan().all().item()
    assert step.stats().replayed >= 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_default_dtype_here_is_that_of_factories_and_of_what_forwards_make(
    mesh2: Mesh, strategy: str, whole: bool
) -> None:
    def factory() -> nn.Module:
        made = Tells()
        if whole:  # filled by itself, so that it is built whole on each rank
            nn.init.zeros_(made.layer.weight)
        return made

    torch.set_default_dtype(torch.float64)
    model = meshbook.distribute(factory, mesh2, strategy=strategy)
    assert model.layer.weight.dtype is torch.float64
    given = model(meshbook.distribute(torch.ones(2, 2), mesh2, [Shard(0)]))
    assert given["out"].dtype is torch.float64
    assert given["new"].dtype is torch.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: meshbook.distribute(Tells, mesh, strategy="ddp"),
        lambda mesh: meshbook.module_to_mesh(nn.Linear(2, 2), mesh),
    ],
    ids=["there", "here"],
)
def test_autocast_of_a_device_that_remote_tensors_do_not_have_is_refused(
    mesh2: Mesh, make: Callable[[Mesh], Any]
) -> None:
    x, model = ones(mesh2), make(mesh2)
    model(x)
    torch.set_autocast_enabled("cuda", True)  # as `torch.autocast("cuda")` does where there is a GPU
    try:
        with pytest.raises(NotImplementedError, match=r'autocast\("cuda"\) does not reach remote tensors.*"cpu"'):
            model(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    model(x)


def test_inference_mode_takes_views_of_tensors_that_were_made_outside(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.arange(4.0).reshape(2, 2), mesh2)
    with torch.inference_mode():
        view, made = x.t(), x + 1
        assert made.t().is_inference()
        assert view.full_tensor().tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert not view.is_inference()
    x.add_(1)
    assert view.sum().item() == 10


def test_values_are_read_whatever_the_default_device_is(mesh2: Mesh) -> None:
    x = ones(mesh2)
    torch.set_default_device("meta")
    try:
        assert (x + 1).full_tensor().device.type == "cpu"
        assert mesh2.execute(told_by_a_cell)[0] == [0.0, 1.0, 0.0]
        assert meshbook.distribute(lambda: nn.Linear(2, 2), mesh2).weight.full_tensor().device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_the_newer_names_of_precision_are_followed_too() -> None:
    assert modes.non_default_modes() == ()
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch's older names raise from here on
    try:
        reported = modes.non_default_modes()
        assert reported
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        with modes.apply_modes(reported):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert modes.non_default_modes() == ()
