"""A training under `mesh.elastic` that is killed again and again, and compared with the same training left alone.

A kill comes at a random moment, from outside, as SIGKILL to a random rank. What is compared, bit for bit, is every loss
and every parameter on every rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from typing import Any

from meshbook.controller.mesh import Mesh
from meshbook.errors import RankLost
from tests.budget import WAIT_S, when
from tests.host_processes import pid_of

DATA = """
import os
import torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
data = TensorDataset(torch.randn(960, 16), torch.randint(0, 4, (960,)))
network = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.1), nn.Linear(65, 64), nn.ReLU(), nn.Linear(64, 4))
"""
MODELS = {
    "ddp": DATA + "model = DDP(network, bucket_cap_mb=0.01)\n",
    "static": DATA + "model = DDP(network, bucket_cap_mb=0.01, static_graph=True, gradient_as_bucket_view=True)\n",
    "fsdp": DATA
    + """
for layer in network:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
model = fully_shard(network, mesh=mesh)
""",
}
OPTIMIZER = """
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
torch.manual_seed(rank)  # other batches and other dropout on each rank
loader = DataLoader(data, batch_size=8, shuffle=True)
"""
CELL = """
losses = []
for step, (x, y) in mesh.elastic(enumerate(loader), state=("model", "opt", "schedule", "losses"), every=EVERY):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    schedule.step()
    losses.append(loss.item())
    if said != attempt: print("at work:", attempt)
    said = attempt
    fault(step)
"""
CURVE = (
    "[losses, [(p.full_tensor() if hasattr(p, 'full_tensor') else p).detach().numpy().tobytes()"
    " for p in model.parameters()]]"
)


def set_up(mesh: Mesh, model: str, *, every: int = 10, fault: str = "pass") -> None:
    """Build the model and the rest on all ranks, anew.

    Args:
        fault: what ranks run after each step; `step` is the number of the step.
    """
    mesh.run(MODELS[model] + OPTIMIZER, setup=True)
    mesh.run(f"EVERY = {every}\ndef fault(step):\n    {fault}\nattempt = said = 0")


def curve(mesh: Mesh) -> dict[int, Any]:
    """Return losses and parameters, by rank."""
    return dict(mesh.run(CURVE, echo=False).values)


def train_with_kills(mesh: Mesh, kills: int, moments: random.Random) -> None:
    """Run the cell until it has ended well, with so many kills on the way."""
    for attempt in range(1, kills + 1):
        mesh.run(f"attempt = {attempt}", echo=False)
        _run_and_kill(mesh, f"at work: {attempt}", moments)
        mesh.heal(copy="said")
    mesh.run(CELL)


def _run_and_kill(mesh: Mesh, sign: str, moments: random.Random) -> None:
    """Run the cell, and kill a rank at a random moment after all ranks have printed the sign."""
    future = mesh.run(CELL, wait=False)
    when(lambda: all(sign in mesh.logs(rank) for rank in mesh.ranks))
    threading.Event().wait(moments.uniform(0.0, 0.4))  # nothing is waited for: this is the random moment
    victim = moments.choice(list(mesh.ranks))
    pid = pid_of(mesh, victim)
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(RankLost):  # else the cell had ended before
        future.result(WAIT_S)
    when(lambda: victim in mesh.session.lost)
