"""A training under `mesh.resilient` whose ranks are killed again and again, compared with the same training left alone.

A kill comes at a random moment, from outside, as SIGKILL to a random rank. What is compared, bit for bit, is every loss
and every parameter on every rank.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import RankLost

STEPS = 40
_ROWS = 12  # of a batch

# How the model lies on the mesh. "cut": its layers are cut over the axis, as in tensor parallel training.
_CUT = {"0.*": [Shard(0)], "3.weight": [Shard(1)], "5.*": [Shard(0)], "*": [Replicate()]}


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 600), nn.ReLU(), nn.Dropout(0.1), nn.Linear(600, 24), nn.ReLU(), nn.Linear(24, 12)
    )


class Training:
    """A model with optimizer, schedule, losses and a loader that shuffles, made anew.

    Args:
        record: the step is one of `@meshbook.record`.
    """

    def __init__(self, mesh: Mesh, model: str, *, record: bool = False) -> None:
        torch.manual_seed(7)
        self.mesh, self.kind = mesh, model
        data = TensorDataset(torch.randn(STEPS * _ROWS, 16), torch.randint(0, 12, (STEPS * _ROWS,)))
        self.loader = DataLoader(data, batch_size=_ROWS, shuffle=True)
        if model in ("replicated", "cut"):
            self.model = meshbook.module_to_mesh(_network(), mesh, _CUT if model == "cut" else None)
        else:
            options = {"bucket_cap_mb": 0.001} if model == "ddp" else {}
            self.model = meshbook.distribute(_network, mesh, strategy=model, **options)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 100)
        self.losses: list[float] = []
        self.compute = meshbook.record(self._compute, enabled=record)

    @property
    def things(self) -> tuple[Any, ...]:
        return self.model, self.opt, self.schedule, self.losses

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        axis = None if self.kind == "cut" else "dp"
        inputs = meshbook.distribute(x, self.mesh, sharding_spec=[axis, None])
        loss = self.compute(inputs, meshbook.distribute(y, self.mesh, sharding_spec=[axis]))
        self.schedule.step()
        self.losses.append(loss.item())

    def _compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.opt.step()
        return loss.detach()

    def run_plain(self) -> Training:
        """Train without `mesh.resilient`."""
        for batch in self.loader:
            self.step(*batch)
        return self

    def run(self, fault: Callable[[int], object] = lambda number: None, *, every: int = 10, heals: bool = True) -> None:
        """Train, or go on.

        Args:
            fault: is called in each step with its number, before the step.
            heals: the body is in `run.step()`.
        """
        with self.mesh.resilient(*self.things, every=every) as run:
            for batch in (steps := run.steps(self.loader)):
                if heals:
                    with run.step():
                        fault(steps.step)
                        self.step(*batch)
                else:
                    fault(steps.step)
                    self.step(*batch)

    def result(self) -> Any:
        """Return the losses, and the parameters of every rank."""
        ranks = self.mesh.ranks
        parameters = [[parameter.local(rank) for rank in ranks] for parameter in self.model.parameters()]
        return self.losses, [[local.numpy().tobytes() for local in parts] for parts in parameters]


class Killer:
    """Kills ranks, one after the other, at random moments: a thread does it, so that anything may be under way.

    The next one is killed when the loop has gone on: with two ranks, both would be lost together.
    """

    def __init__(self, mesh: Mesh, count: int, moments: random.Random) -> None:
        self.mesh, self.left, self.moments = mesh, count, moments
        self.thread: threading.Timer | None = None
        self.victim, self.pid = 0, None

    def __call__(self, step: int) -> None:
        is_due = self.moments.random() < 0.2 or step >= STEPS - 5
        if self.left and is_due and self._pid() != self.pid and (self.thread is None or not self.thread.is_alive()):
            self.left -= 1
            self.victim = self.moments.choice(self.mesh.ranks)
            self.pid = self._pid()
            self.thread = threading.Timer(self.moments.uniform(0.0, 0.05), os.kill, (self.pid, signal.SIGKILL))
            self.thread.start()

    def _pid(self) -> Any:
        return self.mesh.session.info.ranks[self.victim].pid


def train_with_kills(training: Training, kills: int, moments: random.Random) -> None:
    killer = Killer(training.mesh, kills, moments)
    for _ in range(kills + 1):
        try:
            training.run(killer, every=5)
            break
        except RankLost:  # too often in a row, or between two loops
            training.mesh.heal()
    assert not killer.left
    if killer.thread is not None:
        killer.thread.join()
