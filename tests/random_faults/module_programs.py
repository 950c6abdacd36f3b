"""Training steps of modules and optimizers on the ranks, one with a fault, against one process that leaves it out.

Whatever the fault hits, a step of the optimizer was taken by all ranks or by none, and the model trains on with the
numbers of one process. A fault inside an optimizer of the user's own is no such step: then what `meshbook.recover` says
of the parameters must be so.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellInterrupted, OperationFailed, RankLost
from tests.random_faults import operators
from tests.random_faults.harness import WORLD_SIZE, Programs, WrongResult, ctrl_c_after, sigint_at, stop_when
from tests.random_faults.operators import Net

ROWS = 2 * WORLD_SIZE
PLACES = ("before forward", "inside forward", "after forward", "inside backward", "in the step")
# How often each comes: what kills a rank costs a new mesh.
FAULTS = {
    "raise": 5, "raise everywhere": 2, "stop": 4, "freeze": 2, "kill": 1, "stop anywhere": 4,
    "stop at a call": 4, "stop at a call of a rank": 4,
}  # fmt: skip
# Calls of Python in two steps: some thousands here, and on a rank.
MAX_CALLS = 20_000
# Steps after which a SIGINT has come, or never will: it came between two batches, or in a finalizer of torch's.
ENOUGH_STEPS = 40


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


STRATEGIES: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp", "tp": tensor_parallel}


class InPlaceSGD(torch.optim.Optimizer):
    """A user's own: one change in place after the other, and a fault at the second where it has one."""

    fault: tuple[str, int, int] | None = None  # of the class: a copy of an optimizer has no attributes of its own

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            gradient = parameter.grad
            if self.fault is not None and number == 1:
                placements = list(gradient.placements)
                gradient = operators.faulty(gradient.as_local(), *self.fault).as_global(placements) - 1
            parameter.sub_(gradient, alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "own": InPlaceSGD,
}


class Trainer:
    """A model with its optimizer, on a mesh or here."""

    def __init__(self, seed: int, optimizer: str, mesh: Mesh | None = None, strategy: str = "") -> None:
        torch.manual_seed(seed)
        self.mesh, self.placements = mesh, None if strategy == "tp" else [Shard(0)]
        self.model: Any = Net() if mesh is None else meshbook.distribute(Net, mesh, strategy=STRATEGIES[strategy])
        self.opt = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x, y = (meshbook.distribute(one, self.mesh, self.placements) for one in (x, y))
        self.opt.zero_grad()
        loss: torch.Tensor = (self.model(x) - y).square().mean()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def parameters(self) -> list[torch.Tensor]:
        """Whole, from the ranks together.

        Raises:
            Wrong: ranks that have the same piece have other numbers in it.
        """
        if self.mesh is None:
            return [parameter.detach().clone() for parameter in self.model.parameters()]
        return [_full_tensor(name, parameter.detach()) for name, parameter in self.model.named_parameters()]


def _full_tensor(name: str, tensor: Any) -> torch.Tensor:
    (place,) = tensor.placements
    own = [tensor.local(rank) for rank in range(WORLD_SIZE)]
    if place.is_shard():
        return torch.cat(own, place.dim)
    if not all(torch.equal(one, own[0]) for one in own):
        raise WrongResult(f"{name} is whole on every rank, and differs: {own}")
    return own[0]


def _all_close(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in zip(some, others, strict=True))


class ModulePrograms(Programs):
    """Steps without a fault, one with, what is left of the model, and steps without a fault."""

    def run(self, seed: int) -> str:
        """See `Programs`."""
        return _Program(self.shared.get(), seed).run()


class _Program:
    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self.rng = draw = random.Random(seed)
        (self.kind,) = draw.choices(list(FAULTS), list(FAULTS.values()))
        self.strategy, self.optimizer = draw.choice(list(STRATEGIES)), draw.choice(list(OPTIMIZERS))
        self.place = draw.choice(PLACES)
        if self.place == "in the step" and not self.kind.startswith("raise"):
            self.place = "inside backward"  # in a step a Stop waits
        if self.place == "in the step":
            self.optimizer = "own"
        self.guilty = draw.randrange(WORLD_SIZE)
        self.numbers = torch.Generator().manual_seed(seed)
        self.is_anywhere = self.kind.startswith("stop a")
        self.name = self.kind if self.is_anywhere else f"{self.kind} {self.place}"
        self.what = f"{self.strategy}, {self.optimizer}, {self.name} on rank {self.guilty}"

    def run(self) -> str:
        try:
            self._run()
        except WrongResult as wrong:
            raise WrongResult(f"{self.what}: {wrong}") from wrong
        return self.name

    def _run(self) -> None:
        self.mesh.execute(operators.arm, "", "", 0, 0)
        there = Trainer(self.seed, self.optimizer, self.mesh, self.strategy)
        here = Trainer(self.seed, self.optimizer)
        for _ in range(self.rng.randint(1, 2)):
            self._step_both(there, here)
        bad, more = self._batch(), [self._batch() for _ in range(self.rng.randint(0, 2))]
        error = self._steps_with_fault(there, bad, more)
        self.disarm()
        if self.kind == "kill":
            if not isinstance(error, RankLost) or error.ranks != (self.guilty,):
                raise WrongResult(f"it was killed, and what is said is {error!r}")
            return
        self._check_error(error)
        if self.place == "in the step":
            self._check_partial_recovery(there)
            return
        here = self._matching_reference(there, here, bad, more)
        report = meshbook.recover(there.model, there.opt)
        # A gradient that a Stop left on some ranks and not on others is restored; a parameter need not be.
        restored = [name for name, _ in report.restored if not name.startswith("gradient of ")]
        if not report.complete or restored:
            raise WrongResult(f"every step was taken by all or none, and recover says {report}")
        for _ in range(2):
            self._step_both(there, here)

    def disarm(self) -> None:
        if self.kind != "kill":
            self.mesh.execute(operators.arm, "", "", 0, 0)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (ROWS, 4), (ROWS, 2)
        x, y = (torch.randn(shape, dtype=torch.float64, generator=self.numbers) for shape in shapes)
        return x, y

    def _step_both(self, there: Trainer, here: Trainer) -> None:
        batch = self._batch()
        got, wanted = there.step(*batch).item(), here.step(*batch).item()
        if abs(got - wanted) > 1e-9 * max(1.0, abs(wanted)):
            raise WrongResult(f"the loss is {got}, and one process has {wanted}")
        if not _all_close(got_all := there.parameters(), wanted_all := here.parameters()):
            raise WrongResult(f"the parameters are {got_all}, and one process has {wanted_all}")

    def _steps_with_fault(self, there: Trainer, bad: Any, more: Any) -> BaseException | None:
        if self.kind == "stop anywhere":
            return self._until_stopped(there, bad)
        if self.is_anywhere:
            return self._until_at_call(there, bad)
        what = "raise" if self.kind == "raise everywhere" else self.kind
        guilty = -1 if self.kind == "raise everywhere" else self.guilty
        if self.place == "in the step":
            assert isinstance(there.opt, InPlaceSGD)
            self.mesh.run("from tests.random_faults import operators", echo=False)
            there.opt.fault = (what, guilty, self.seed)
        else:
            self.mesh.execute(operators.arm, self.place, what, guilty, self.seed)

        def do() -> None:
            loss = there.step(*bad)
            for batch in more:  # nobody looks
                loss = there.step(*batch)
            loss.item()
            for parameter in there.model.parameters():
                parameter.detach().sum().item()

        try:
            if self.kind in ("stop", "freeze"):
                with stop_when(self.mesh, self._fault_reached(), "Stop was pressed"):
                    do()
            else:
                do()
        except (OperationFailed, CellInterrupted, RankLost) as error:
            return error
        return None

    def _fault_reached(self) -> Callable[[], bool]:
        if self.kind == "stop":
            return lambda: f"held {self.seed}" in self.mesh.logs(self.guilty)
        process = psutil.Process(self.mesh.status().ranks[self.guilty].pid)
        return lambda: process.status() == psutil.STATUS_STOPPED

    def _until_stopped(self, there: Trainer, batch: Any) -> BaseException:
        """Steps on one batch without end, and Ctrl-C somewhere in it."""
        after, looks = self.rng.uniform(0.0, 0.3), self.rng.random() < 0.5
        with ctrl_c_after(after) as begun:
            try:
                while True:
                    begun.set()
                    loss = there.step(*batch)
                    if looks:
                        loss.item()
            except KeyboardInterrupt as error:
                return error

    def _until_at_call(self, there: Trainer, batch: Any) -> BaseException | None:
        """Steps on one batch, with a SIGINT when this process, or one rank, comes to a certain call."""
        call = int(MAX_CALLS ** self.rng.random())
        try:
            with sigint_at(self.mesh, call, None if self.kind == "stop at a call" else self.guilty):
                for number in range(ENOUGH_STEPS):
                    loss = there.step(*batch)
                    if number % 4 == 3:
                        loss.item()
                there.parameters()
        except (KeyboardInterrupt, OperationFailed) as error:
            return error
        return None

    def _check_error(self, error: BaseException | None) -> None:
        if self.kind.startswith("raise") and f"the seeded fault {self.seed}" not in str(error):
            raise WrongResult(f"the cause is not named: {error!r}")
        if self.kind in ("stop", "freeze") and not isinstance(error, KeyboardInterrupt):
            raise WrongResult(f"Stop is not named: {error!r}")

    def _matching_reference(self, there: Trainer, here: Trainer, bad: Any, more: Any) -> Trainer:
        """One process that has taken the steps that all ranks have taken."""
        found = there.parameters()
        tries: list[Trainer] = []
        if self.is_anywhere:
            tries = [copy.deepcopy(here)]
            for _ in range(3000):
                if _all_close(found, tries[-1].parameters()):
                    return tries[-1]
                tries[-1].step(*bad)
            raise WrongResult(f"the parameters are {found}, which no number of steps leads to from {here.parameters()}")
        for batches in ([*more], [bad, *more]):
            one = copy.deepcopy(here)
            tries.append(copy.deepcopy(one))
            for batch in batches:
                one.step(*batch)
                tries.append(copy.deepcopy(one))
            if self.kind.startswith("raise"):
                break  # that step cannot have been taken
        for one in tries:
            if _all_close(found, one.parameters()):
                return one
        raise WrongResult(f"the parameters are {found}, and must be one of {[one.parameters() for one in tries]}")

    def _check_partial_recovery(self, there: Trainer) -> None:
        """After a fault inside the user's own optimizer: of which parameters recover says that they can be used."""
        report = meshbook.recover(there.model, there.opt)
        fit = {*report.whole, *(name for name, _ in report.restored), *report.half_written}
        for name, parameter in there.model.named_parameters():
            if name not in fit:
                raise WrongResult(f"recover does not say that {name} can be used: {report}")
            value = _full_tensor(name, parameter.detach())
            if name not in report.half_written and not torch.isfinite(value).all():
                raise WrongResult(f"{name} is {value}")
        names = [name for name, _ in there.model.named_parameters()]
        if self.kind == "raise" and not {*report.half_written, *(name for name, _ in report.restored)} & {names[1]}:
            raise WrongResult(f"{names[1]} was changed on some ranks and not on one, and recover says {report}")
        torch.manual_seed(self.seed + 1)
        anew = Net()
        there.model.load_state_dict(anew.state_dict())
        assert isinstance(there.opt, InPlaceSGD)
        there.opt.fault = None
        here = Trainer(self.seed, self.optimizer)
        here.model.load_state_dict(anew.state_dict())
        for _ in range(2):
            self._step_both(there, here)
