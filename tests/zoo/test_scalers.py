"""Training with a GradScaler in cells: steps that it skips are no fault, and what began in a forward is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.zoo.bad_numbers import SETUP
from tests.zoo.test_bad_numbers import heard

pytestmark = pytest.mark.usefixtures("starts_meshes")

# `overflows` are steps whose gradients are too large for float16.
SCALED = """
def scaled(
    kind, overflows=(2, 3), before=None, clips=False, micro=1, fused=False, init_scale=2.0**10, loss_of=mean_square
):
    model, opt = make(kind)
    if fused:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    scales = []
    for step in range(6):
        if before is not None and step == 2 and rank == 1:
            before(model)
        opt.zero_grad()
        for part in range(micro):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, batch(step + part))
            scaler.scale(loss * (1e9 if step in overflows else 1)).backward()
        if kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if clips:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        mesh.run(SETUP + SCALED)
        yield mesh


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("how", ["", "clips=True", "micro=2", "fused=True", "init_scale=2.0**120"])
def test_steps_that_a_scaler_skips_give_no_alarm(mesh: Mesh, kind: str, how: str) -> None:
    mesh.nan(True)
    shown = mesh.run(f"scales = scaled({kind!r}, {how})\nmin(scales) < scales[0], scales", echo=False)
    report = heard(mesh)
    assert report, report.text
    assert "non-finite" not in shown.output
    assert shown.values.same()[0], shown.values


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_a_nan_of_a_forward_is_named_though_the_scaler_skips_the_step(mesh: Mesh, kind: str) -> None:
    mesh.nan(True)
    mesh.run(f"scales = scaled({kind!r}, before=plant(lambda self, h: torch.log(F.relu(h))))", echo=False)
    ((rank, found),) = heard(mesh).findings
    assert (rank, found.op, found.phase, found.step) == (1, "log", "forward", 2)
    assert found.module.endswith("blocks.1")


def test_a_loss_that_is_bad_before_it_is_scaled_is_named(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run(
        """
def bad(model, x):
    return torch.log(model(x).float().square() * (0 if step_of(x) == (1, 4) else 1)).mean()
scales = scaled("ddp", loss_of=bad)""",
        echo=False,
    )
    ((rank, found),) = heard(mesh).findings
    assert (rank, found.op, found.phase, found.step) == (1, "log", "loss", 4)


def test_a_gradient_that_is_bad_is_named_if_the_step_is_taken_all_the_same(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run(
        """
model, opt = make("ddp")
plant(lambda self, h: torch.sqrt(h * 0))(model)
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    opt.zero_grad()
    scaler.scale(mean_square(model, batch(step))).backward()
    opt.step()  # not scaler.step(opt)
    scaler.update(2.0**10)""",
        echo=False,
    )
    assert {(found.op, found.phase, found.step) for _, found in heard(mesh).findings} == {("sqrt", "backward", 0)}


def test_a_sum_over_ranks_that_a_scaler_made_too_large_is_no_fault(mesh: Mesh) -> None:
    mesh.nan(True)
    shown = mesh.run(
        """
weight = nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([weight], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
for step in range(3):
    opt.zero_grad()
    scaler.scale(weight.sum()).backward()
    dist.all_reduce(weight.grad)
    scaler.step(opt)
    scaler.update()
scaler.get_scale() < 3e38""",
        echo=False,
    )
    assert shown.values.same()
    report = heard(mesh)
    assert report, report.text


def test_scalers_are_as_before_once_the_sentinel_is_off(mesh: Mesh) -> None:
    methods = "(torch.amp.GradScaler.scale.__module__, torch.amp.GradScaler.update.__module__)"
    before = mesh.run(methods, echo=False).values.same()
    mesh.nan(True)
    mesh.nan(False)
    assert mesh.run(methods, echo=False).values.same() == before


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_every_step_for_ever_is_told_once_with_the_operation(
    mesh: Mesh, kind: str, fused: bool
) -> None:
    mesh.nan(True)
    cell = """
def skipping(kind, fused, steps=90):
    model, opt = make(kind)
    if fused:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(steps):
        if step == 2 and rank == 1:
            plant(lambda self, h: h + torch.sqrt(h * 0))(model)
        opt.zero_grad()
        scaler.scale(mean_square(model, batch(step))).backward()
        if kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        scaler.step(opt)
        scaler.update()
"""
    shown = mesh.run(f"{cell}skipping({kind!r}, {fused})", echo=False).output
    ((rank, found),) = heard(mesh).findings
    assert (rank, found.phase, found.num_skipped) == (1, "backward", 40)
    assert "model.blocks.1" in found.module
    if kind != "fsdp":
        assert found.op == "sqrt"
    assert "a GradScaler has skipped 40 steps one after the other, the last with a scale of 1.2e-07" in shown


def test_an_optimizer_whose_steps_are_always_skipped_is_told_though_another_one_steps(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run(
        """
first, second = nn.Linear(2, 2), nn.Linear(2, 2)
opts = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (first, second)]
scaler = torch.amp.GradScaler("cpu")
for step in range(90):
    for opt in opts: opt.zero_grad()
    loss = first(torch.ones(1, 2)).square().sum() + (second(torch.ones(1, 2)) * 0).sqrt().sum()
    scaler.scale(loss).backward()
    for opt in opts: scaler.step(opt)
    scaler.update()
        """,
        echo=False,
    )
    assert {(rank, found.num_skipped) for rank, found in heard(mesh).findings} == {(0, 40), (1, 40)}
