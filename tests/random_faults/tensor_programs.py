"""Random lines of operations on remote tensors, one with a fault, against the same lines on plain tensors.

A line is Python for both; it makes or changes one tensor. After the fault a tensor may be read, and is then as some
line has left it, on all ranks the same line; or reading it raises, and the error names the fault. What
`meshbook.recover` then says must be so. Tensors that were kept go on being used in the program's last lines, which have
no fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellInterrupted, OperationFailed, RankLost
from tests.random_faults import operators
from tests.random_faults.harness import WORLD_SIZE, Programs, WrongResult, ctrl_c_after, sigint_at, stop_when

NAMES = ("t0", "t1", "t2", "t3")
SIZE = 2 * WORLD_SIZE
PRIME = 997  # values stay whole and below what a float64 holds exactly

# How often each comes: what kills a rank costs a new mesh.
FAULTS = {
    "raise": 4,
    "raise everywhere": 2,
    "raise in embedding": 2,
    "stop": 3,
    "freeze": 2,
    "kill": 1,
    "stop anywhere": 3,
    "stop at a call": 3,
    "stop at a call of a rank": 3,
}
# Calls of Python in some hundred lines.
MAX_CALLS = 20_000
# Rounds of lines after which a SIGINT has come, or was dropped in a finalizer.
ENOUGH_ROUNDS = 40

# {a} is what the line makes or changes, {b} and {c} any of the others; {k} a small number, {p} placements.
MAKING = (
    "{a} = ({b} * {k} + {c}) % P",
    "{a} = {b} % P",
    "{a} = ({b}.sum(0, keepdim=True) + {c}) % P",
    "{a} = ({b} @ {c}) % P",
    "{a} = {b}.flip(0)",
    "{a} = {b}.t().clone()",
    "{a} = torch.where({b} > {c}, {b}, {c})",
    "{a} = place({b}, {p})",
    "{a} = {b}.roll(1, 0)",
    "{a} = torch.cat([{b}[:2], {c}[2:]])",
)
MUTATING = (
    "{a}.add_({b})",
    "{a}.mul_(2)",
    "{a}.sub_({b}, alpha=2)",
    "{a}.remainder_(P)",
    "{a}[1:4] += {k}",
    "{a}[:, 2] = {k}",
    "{a}.t().add_({b})",
    "{a}.copy_({b})",
    "{a}.zero_()",
    "{a}.fill_({k})",
    "{a}.clamp_(0, 500)",
    "own({a}).add_({k})",
    "{b}.sum().item()",
)
FAULTY = ("{a} = faulty({b})", "{a} = faulty_part({b})", "change_faultily({a})")

Line = str


class PlainTensors:
    """What a line's names mean in one process."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "torch": torch, "P": PRIME, "S": Shard, "R": Replicate(), "place": self.place, "own": self.own,
            "faulty": self.faulty, "faulty_part": self.faulty, "change_faultily": self.change_faultily,
            "missing": self.missing,
        }  # fmt: skip

    def place(self, tensor: Any, places: Any) -> Any:
        return tensor.clone()

    def own(self, tensor: Any) -> Any:
        return tensor

    def faulty(self, tensor: Any) -> Any:
        return tensor + 1

    def change_faultily(self, tensor: Any) -> None:
        tensor.add_(1)

    def missing(self, tensor: Any, row: int) -> Any:
        return tensor.clone()

    def run(self, line: Line) -> None:
        exec(line, self.names)


class MeshTensors(PlainTensors):
    """What they mean on a mesh.

    Attributes:
        fault: what, on which rank, seed; as `operators` takes it.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.fault = mesh, ("", 0, 0)

    def place(self, tensor: Any, places: Any) -> Any:
        return tensor.redistribute(list(places)).clone()

    def own(self, tensor: Any) -> Any:
        return tensor.as_local()

    def faulty(self, tensor: Any) -> Any:
        return operators.faulty(tensor, *self.fault)

    def change_faultily(self, tensor: Any) -> None:
        operators.change_faultily(tensor.as_local(), *self.fault)

    def missing(self, tensor: Any, row: int) -> Any:
        """Its rows, one of them asked for by an index that is out of range."""
        rows = torch.arange(SIZE)
        rows[row] = 99
        return torch.nn.functional.embedding(meshbook.distribute(rows, self.mesh, [Shard(0)]), tensor)

    def part(self, tensor: Any) -> Any:
        return operators.faulty(tensor.as_local(), *self.fault).as_global(list(tensor.placements))


@dataclass
class TensorHistory:
    """What a name's tensor has been: since it was made, after each line that changed it.

    Attributes:
        made_at: the line that made it.
        changed_at: lines that changed it.
    """

    values: list[torch.Tensor]
    made_at: int = -1
    changed_at: list[int] = field(default_factory=list)


class TensorPrograms(Programs):
    """Lines without a fault, some with one, reading, recovery, and lines without a fault on what there is."""

    def run(self, seed: int) -> str:
        """See `Programs`."""
        mesh = self.shared.get()
        mesh.run("from tests.random_faults import operators", echo=False)
        return _Program(mesh, seed).run()


def _round_sums(value: torch.Tensor) -> torch.Tensor:
    """Without the rounding of a sum in parts, to which DTensor adds a third of a number on each of three ranks."""
    rounded = value.round()
    return rounded if torch.allclose(value, rounded, rtol=1e-13, atol=1e-10) else value


class _Program:
    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self.rng = random.Random(seed)
        (self.kind,) = self.rng.choices(list(FAULTS), list(FAULTS.values()))
        self.is_anywhere = self.kind.startswith("stop a")
        self.plain, self.there = PlainTensors(), MeshTensors(mesh)
        self.there.names["faulty_part"] = self.there.part
        self.histories: dict[str, TensorHistory] = {}
        self.objects: dict[str, Any] = {}  # that the stories are of
        self.lines: list[Line] = []
        self.fault_reported = False  # the user knows of the fault
        self.fault_at = 0

    def run(self) -> str:
        try:
            self._run()
        except WrongResult as wrong:
            reported = [f"{'>' if at == self.fault_at else ' '} {at}: {line}" for at, line in enumerate(self.lines)]
            raise WrongResult("\n".join([f"{self.kind}: {wrong}", *reported])) from wrong
        return self.kind

    def _run(self) -> None:
        for name in NAMES:
            self._make(name, torch.arange(SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE) + int(name[1]))
        for _ in range(self.rng.randint(1, 4)):
            self._run_line(self._line())
        self._compare_all("before the fault")
        guilty = self.rng.randrange(WORLD_SIZE)
        what = "none" if self.is_anywhere else self.kind.removesuffix(" everywhere")
        self.there.fault = (what, -1 if self.kind == "raise everywhere" else guilty, self.seed)
        self.fault_at = len(self.lines)
        error = self._lines_with_fault(guilty)
        if self.kind == "kill":
            self._expect_lost(error, guilty)
            return
        self.fault_reported = error is not None
        if error is not None:
            self._check_error(error)
        self._read_all()
        self._recover()
        for _ in range(self.rng.randint(3, 6)):
            self._run_line(self._line())
        self._compare_all("after recovery")

    # ---- lines

    def _line(self) -> Line:
        a, b, c = (self.rng.choice(NAMES) for _ in range(3))
        if self.rng.random() < 0.5:
            pattern = self.rng.choice(MAKING)
        else:
            pattern = self.rng.choice(MUTATING)
            while a in (b, c):
                a = self.rng.choice(NAMES)
        return self._filled(pattern, a, b, c)

    def _filled(self, pattern: str, a: str, b: str, c: str) -> Line:
        places = self.rng.choice(["[S(0)]", "[S(1)]", "[R]"])
        return pattern.format(a=a, b=b, c=c, k=self.rng.randint(1, 9), p=places)

    def _faulty_line(self, guilty: int) -> Line:
        a, b = self.rng.sample(NAMES, 2)
        if self.kind == "raise in embedding":
            return f"{a} = missing({b}, {guilty * 2 + self.rng.randrange(2)})"
        return self._filled(self.rng.choice(FAULTY), a, b, b)

    def _make(self, name: str, value: torch.Tensor) -> None:
        places = self.rng.choice([[Shard(0)], [Shard(1)], [Replicate()]])
        self.there.names[name] = self.objects[name] = meshbook.distribute(value, self.mesh, places)
        self.plain.names[name] = value.clone()
        self.histories[name] = TensorHistory([value.clone()], made_at=len(self.lines))

    def _run_line(self, line: Line) -> None:
        """A line on both sides. It is noted also where it raises on the mesh: it may have been sent."""
        at = len(self.lines)
        self.lines.append(line)
        before = {name: self.plain.names[name] for name in NAMES}
        kept = {name: value.clone() for name, value in before.items()}
        try:
            self.there.run(line)
        finally:
            self.plain.run(line)
            for name in NAMES:
                value = self.plain.names[name]
                if value is not before[name]:
                    if self.there.names[name] is self.objects[name]:  # it did not come to that
                        self.plain.names[name] = before[name]
                        continue
                    self.objects[name] = self.there.names[name]
                    self.histories[name] = TensorHistory([value.clone()], made_at=at)
                elif line.startswith((f"{name}.", f"{name}[", f"own({name})")) or not torch.equal(value, kept[name]):
                    self.histories[name].values.append(value.clone())
                    self.histories[name].changed_at.append(at)  # perhaps to what it was, as `clamp_` may

    # ---- the fault

    def _lines_with_fault(self, guilty: int) -> BaseException | None:
        """What the program's user sees of it; None: nothing yet."""
        draw = self.rng
        if self.kind == "stop anywhere":
            return self._until_stopped()
        if self.is_anywhere:
            return self._until_at_call(guilty)
        before, after = draw.randint(0, 3), draw.randint(0, 4)
        lines = [self._line() for _ in range(before)]
        lines += [self._faulty_line(guilty), *(self._line() for _ in range(after))]
        self.fault_at += before
        waits = draw.random() < 0.6 or self.kind not in ("raise", "raise everywhere", "raise in embedding")

        def do() -> None:
            for line in lines:
                self._run_line(line)
            if waits:
                self.there.names[draw.choice(NAMES)].sum().item()
                self.there.names[lines[before].split("(")[-1].split(",")[0].strip(" )")].sum().item()

        try:
            if self.kind in ("stop", "freeze"):
                with stop_when(self.mesh, self._fault_reached(guilty), "Stop was pressed"):
                    do()
            else:
                do()
        except (OperationFailed, CellInterrupted, RankLost) as error:
            return error
        return None

    def _fault_reached(self, guilty: int) -> Callable[[], bool]:
        if self.kind == "stop":
            return lambda: f"held {self.seed}" in self.mesh.logs(guilty)
        process = psutil.Process(self.mesh.status().ranks[guilty].pid)
        return lambda: process.status() == psutil.STATUS_STOPPED

    def _until_stopped(self) -> BaseException:
        """Lines without end, and a Stop, as Ctrl-C, somewhere in it."""
        after = self.rng.uniform(0.0, 0.3)
        lines = [self._line() for _ in range(8)]
        with ctrl_c_after(after) as begun:
            try:
                while True:
                    for line in lines:
                        begun.set()
                        self.there.run(line)
                    for name in NAMES:
                        self.there.run(f"{name} %= P")
            except (KeyboardInterrupt, OperationFailed) as error:
                return error

    def _until_at_call(self, guilty: int) -> BaseException | None:
        """Lines, with a SIGINT when this process, or one rank, comes to a certain call."""
        call = int(MAX_CALLS ** self.rng.random())
        lines = [*(self._line() for _ in range(8)), *(f"{name} %= P" for name in NAMES)]
        try:
            with sigint_at(self.mesh, call, None if self.kind == "stop at a call" else guilty):
                for _ in range(ENOUGH_ROUNDS):
                    for line in lines:
                        self.there.run(line)
                for name in NAMES:
                    self._read(name)
        except (KeyboardInterrupt, OperationFailed) as error:
            return error
        return None

    def _check_error(self, error: BaseException) -> None:
        said = str(error)
        if self.kind.startswith("raise"):
            cause = "index out of range" if self.kind == "raise in embedding" else f"the seeded fault {self.seed}"
            if cause not in said and "changed on some ranks and not on others" not in said:
                raise WrongResult(f"the cause is not named: {said}")
        elif self.kind == "stop at a call of a rank":
            return  # nobody has pressed Stop: a rank that waited for this one may say so, and nothing more
        elif not isinstance(error, KeyboardInterrupt) and "stopped" not in said:
            raise WrongResult(f"Stop is not named: {error!r}")

    def _expect_lost(self, error: BaseException | None, guilty: int) -> None:
        errors = [error]
        for name in NAMES:
            try:
                self.there.names[name].full_tensor()
                errors.append(None)
            except RankLost as lost:
                errors.append(lost)
        for one in errors:
            if not isinstance(one, RankLost) or one.ranks != (guilty,):
                raise WrongResult(f"rank {guilty} was killed, and what is said is {one!r}")

    # ---- afterwards

    def _read(self, name: str) -> torch.Tensor:
        """The tensor, put together of what each rank has.

        Raises:
            Wrong: ranks that have the same piece have other numbers in it.
        """
        tensor = self.there.names[name]
        own = [tensor.local(rank) for rank in range(WORLD_SIZE)]
        (place,) = tensor.placements
        if place.is_shard():
            return _round_sums(torch.cat(own, place.dim))
        if place.is_partial():
            return _round_sums(torch.stack(own).sum(0))
        if not all(torch.equal(one, own[0]) for one in own):
            raise WrongResult(f"{name} is whole on every rank, and differs: {[one.tolist() for one in own]}")
        return _round_sums(own[0])

    def _read_all(self) -> None:
        """What can be read is right; what cannot says why."""
        for name in self.rng.sample(NAMES, len(NAMES)):
            try:
                value = self._read(name)
            except OperationFailed as error:
                self._check_error(error)
                self.fault_reported = True
                continue
            if self.is_anywhere:
                continue
            story = self.histories[name]
            allowed = story.values if self.fault_reported else story.values[-1:]
            if not any(torch.equal(value, one) for one in allowed):
                raise WrongResult(
                    f"{name} reads as {value.tolist()}, and must be one of {[one.tolist() for one in allowed]}"
                    f" ({'reported' if self.fault_reported else 'not told'} of the fault)"
                )

    def _recover(self) -> None:
        holder = nn.Module()
        for name in NAMES:
            holder.register_buffer(name, self.there.names[name])
        report = meshbook.recover(holder)
        said = {
            **dict.fromkeys(report.whole, "whole"),
            **{name: "restored" for name, _ in report.restored},
            **dict.fromkeys(report.half_written, "half written"),
            **dict.fromkeys(report.dropped, "lost"),
            **dict.fromkeys(report.lost, "lost"),
        }
        for name in dict.fromkeys(NAMES):
            if name not in said:
                same = [other for other in NAMES if self.there.names[other] is self.there.names[name] and other in said]
                if not same:
                    raise WrongResult(f"recover says nothing of {name}: {report}")
                said[name] = said[same[0]]
            self._check_verdict(name, said[name], report)

    def _check_verdict(self, name: str, verdict: str, report: Any) -> None:
        story = self.histories[name]
        if verdict in ("whole", "restored"):
            try:
                value = self._read(name)
            except OperationFailed as error:
                raise WrongResult(
                    f"recover said that {name} is {verdict}, and it cannot be read: {error}\n{report}"
                ) from error
            if not self.is_anywhere and not any(torch.equal(value, one) for one in story.values):
                allowed = [one.tolist() for one in story.values]
                raise WrongResult(
                    f"recover said that {name} is {verdict}: it is {value.tolist()}, not one of {allowed}\n{report}"
                )
            self.plain.names[name] = value.clone()
            self.histories[name] = TensorHistory([value.clone()])
            return
        touched = [story.made_at] if verdict == "lost" else story.changed_at
        if not self.is_anywhere and not any(at >= self._doubtful_from() for at in touched):
            raise WrongResult(
                f"recover said that {name} is {verdict}, and no line since the fault has touched it\n{report}"
            )
        if verdict == "half written":
            self._read(name)  # it can be used
        self._make(name, torch.arange(SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE))

    def _doubtful_from(self) -> int:
        """The first line that the fault may have hit: a Stop hits what has not run yet, too."""
        return self.fault_at if self.kind.startswith("raise") else 0

    def _compare_all(self, when: str) -> None:
        for name in NAMES:
            value, wanted = self._read(name), self.plain.names[name]
            if not torch.equal(value, wanted):
                raise WrongResult(f"{when}: {name} is {value.tolist()}, and must be {wanted.tolist()}")
