"""Training steps in cells, under DDP and FSDP2, with a fault somewhere in a step, against plain torch in one process.

After the fault the same wrapped model is given its first weights again and trained on: every number must be that of
one process on the whole batch. Nothing may be left of the step that did not end: no collective, no gradient.
"""

from __future__ import annotations

import random
import textwrap
from typing import Any

import torch
from torch import nn

from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, MeshTimeout, RankLost
from tests.random_faults.harness import CALL_TIMEOUT_S, WORLD_SIZE, Programs, WrongResult, wait_until

ROWS = 2 * WORLD_SIZE
STEPS = 2  # after the fault

WRAPPED = {
    "ddp": "model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.0001)",
    "fsdp": """
        from torch.distributed.fsdp import fully_shard
        for layer in plain:
            if isinstance(layer, nn.Linear): fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    """,
}
PLACES = ("before forward", "inside forward", "after forward", "inside backward", "after backward")
FAULTS = {
    "raise": "raise ValueError('the seeded fault')",
    "stop": "print('held {seed}', flush=True); time.sleep(1000)",
    "stop at a call": "press_at({call})",
}
# Calls of Python in a few steps.
MAX_CALLS = 10_000

SETUP_SOURCE = """
import time
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from tests.random_faults.operators import press_at
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
first = [p.detach().clone() for p in plain.parameters()]
WRAP
def fault(place):
    if place == armed and rank == guilty:
        disarm()
        FAULT
def disarm():
    global armed
    armed = None
class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): fault("inside forward"); return x.clone()
    @staticmethod
    def backward(ctx, g): fault("inside backward"); return g
plain[2].register_forward_hook(lambda module, args, out: Faulty.apply(out))
def restore():
    with torch.no_grad():
        for p, value in zip(plain.parameters(), first):
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
            p.grad = None
def step(x, y):
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    fault("before forward")
    loss = (model(x) - y).square().mean()
    fault("after forward")
    loss.backward()
    fault("after backward")
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.1 * p.grad
            p.grad = None
def whole():
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in plain.parameters()]
armed, guilty = None, 0
"""


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(ROWS, 4, dtype=torch.float64, generator=draw),
        torch.randn(ROWS, 2, dtype=torch.float64, generator=draw),
    )


def expected(seed: int) -> list[torch.Tensor]:
    """The parameters that one process comes to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    for turn in range(STEPS):
        x, y = data(seed + turn)
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return [parameter.detach() for parameter in model.parameters()]


class TrainingPrograms(Programs):
    """One step with a fault, and then as many steps as are compared."""

    def run(self, seed: int) -> str:
        """See `Programs`."""
        return run(self.shared.get(), seed)


def run(mesh: Mesh, seed: int) -> str:
    """One program on a mesh of `WORLD_SIZE` ranks, which is whole again after it. Gives the name of the fault.

    Raises:
        Wrong: parameters that differ from one process's, a hang, a step without a fault that fails.
    """
    rng = random.Random(seed)
    strategy, place, kind = rng.choice(list(WRAPPED)), rng.choice(PLACES), rng.choice(list(FAULTS))
    guilty = rng.randrange(WORLD_SIZE)
    wrap = textwrap.dedent(WRAPPED[strategy]).strip()
    body, steps = FAULTS[kind].format(seed=seed, call=int(MAX_CALLS ** rng.random())), 1
    if kind == "stop at a call":
        place, steps = "before forward", 20
    _run_without_fault(mesh, SETUP_SOURCE.replace("WRAP", wrap).replace("FAULT", body))
    mesh.push(batches=[data(seed + turn) for turn in range(STEPS)])
    source = f"armed, guilty = {place!r}, {guilty}\nfor _ in range({steps}): step(*batches[0])\npress_at(0)"
    future: Any = mesh.run(source, wait=False, echo=False)
    if kind == "stop":
        wait_until(lambda: f"held {seed}" in mesh.logs(guilty), "the rank came to where it is to be stopped")
        future.interrupt()
    try:
        error = future.exception(CALL_TIMEOUT_S)
    except MeshTimeout as late:
        raise WrongResult(f"{strategy}, {kind} {place}: the step did not end within {CALL_TIMEOUT_S:g} s") from late
    if error is None and kind != "stop at a call":  # that one may come in a finalizer, and be dropped
        raise WrongResult(f"{strategy}, {kind} {place}: the step ended as if nothing had been")
    _run_without_fault(mesh, "press_at(0); disarm(); restore()\nfor x, y in batches: step(x, y)")
    wanted = expected(seed)
    for rank, found in dict(_run_without_fault(mesh, "whole()").values).items():
        for one, other in zip(found, wanted, strict=True):
            if not torch.allclose(one, other, rtol=1e-12, atol=1e-13):
                raise WrongResult(f"{strategy}, {kind} {place}: rank {rank} has {one}, one process {other}")
    return f"{strategy}, {kind} {place}"


def _run_without_fault(mesh: Mesh, source: str) -> Any:
    try:
        return mesh.run(source, timeout=CALL_TIMEOUT_S, echo=False)
    except (CellError, MeshTimeout, RankLost) as error:
        raise WrongResult(f"a cell without a fault failed with {error!r}\n{source}") from error
