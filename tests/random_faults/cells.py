"""Random cells with collectives, and one process that computes what each rank must hold after each statement.

A statement is source for the ranks and a function of all ranks' names for the reference. Values are float64 tensors of
small whole numbers, so that sums are exact in any order. A cell notes in `at` how many statements a rank has finished:
after a fault, rank by rank, everything the finished statements wrote must be as the reference has it; what the
statement under way writes may be anything. Knows nothing of meshes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

NAMES = ("v0", "v1", "v2", "v3")
SIZE = 6  # of each tensor; the worlds' sizes divide it
PRIME = 997  # values stay below it, so that no sum comes near the 53 bits of a float64

Names = dict[str, torch.Tensor]  # of one rank
Apply = Callable[[list[Names]], None]


@dataclass(frozen=True)
class Statement:
    """One step of a cell.

    Attributes:
        source: what ranks run.
        apply: the same, done to all ranks' names at once; it rebinds names and never writes into a tensor.
        writes: names whose tensors are in doubt while the statement is under way.
        pending: names that a collective goes on writing after the statement, until `waits` names them.
        waits: names whose pending collective this statement waits for.
    """

    source: str
    apply: Apply
    writes: tuple[str, ...]
    pending: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


def _fill(name: str, number: int) -> Statement:
    def apply(world: list[Names]) -> None:
        for rank, names in enumerate(world):
            names[name] = torch.arange(SIZE, dtype=torch.float64) + rank * 7 + number

    return Statement(f"{name} = torch.arange({SIZE}, dtype=torch.float64) + rank * 7 + {number}", apply, (name,))


def _mix(name: str, other: str, factor: int) -> Statement:
    def apply(world: list[Names]) -> None:
        for names in world:
            names[name] = (names[name] * factor + names[other]) % PRIME

    return Statement(f"{name} = ({name} * {factor} + {other}) % {PRIME}", apply, (name,))


def _sum(world: list[Names], name: str) -> torch.Tensor:
    return torch.stack([names[name] for names in world]).sum(0)


def _all_reduce(name: str) -> Statement:
    def apply(world: list[Names]) -> None:
        total = _sum(world, name)
        for names in world:
            names[name] = total

    return Statement(f"dist.all_reduce({name})", apply, (name,))


def _begin_all_reduce(name: str) -> Statement:
    return Statement(f"works[{name!r}] = dist.all_reduce({name}, async_op=True)", lambda world: None, (), (name,))


def _wait(name: str) -> Statement:
    return Statement(f"works.pop({name!r}).wait()", _all_reduce(name).apply, (), waits=(name,))


def _broadcast(name: str, root: int) -> Statement:
    def apply(world: list[Names]) -> None:
        for names in world:
            names[name] = world[root][name]

    return Statement(f"dist.broadcast({name}, {root})", apply, (name,))


def _all_gather(name: str, other: str) -> Statement:
    def apply(world: list[Names]) -> None:
        gathered = torch.stack([(index + 1) * names[other] for index, names in enumerate(world)]).sum(0)
        for names in world:
            names[name] = gathered % PRIME

    source = (
        f"parts = [torch.empty_like({other}) for _ in range(world_size)]; dist.all_gather(parts, {other}); "
        f"{name} = sum((i + 1) * part for i, part in enumerate(parts)) % {PRIME}"
    )
    return Statement(source, apply, (name,))


def _reduce_scatter(name: str, other: str) -> Statement:
    def apply(world: list[Names]) -> None:
        total = _sum(world, other)
        for names, piece in zip(world, total.chunk(len(world)), strict=True):
            names[name] = piece.repeat(len(world)) % PRIME

    source = (
        f"piece = torch.empty({SIZE} // world_size, dtype=torch.float64); "
        f"getattr(dist, 'reduce_scatter_single', dist.reduce_scatter_tensor)(piece, {other}.clone()); "
        f"{name} = piece.repeat(world_size) % {PRIME}"
    )
    return Statement(source, apply, (name,))


def _ring(name: str, other: str) -> Statement:
    def apply(world: list[Names]) -> None:
        sent = [names[other] for names in world]
        for rank, names in enumerate(world):
            names[name] = sent[rank - 1]

    source = (
        f"got = torch.empty_like({other}); "
        f"[w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, {other}, (rank + 1) % world_size), "
        f"dist.P2POp(dist.irecv, got, (rank - 1) % world_size)])]; {name} = got"
    )
    return Statement(source, apply, (name,))


@dataclass
class Cell:
    """A random cell: statements that all ranks run in order, `rounds` times over, and where a fault is put in.

    Attributes:
        fault: source for before statement `fault_at` of round `fault_round`, on the ranks of `guilty`.
    """

    statements: list[Statement]
    rounds: int = 1
    fault: str = ""
    fault_at: int = 0
    fault_round: int = 0
    guilty: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        lines = ["import os, signal, time", "at = 0", "works = {}", f"for turn in range({self.rounds}):"]
        for index, statement in enumerate(self.statements):
            if self.fault and index == self.fault_at:
                lines.append(f"    if turn == {self.fault_round} and rank in {self.guilty}: {self.fault}")
            lines += [f"    {statement.source}", "    at += 1"]
        return "\n".join(lines)

    @property
    def length(self) -> int:
        return self.rounds * len(self.statements)


def random_cell(rng: random.Random, world_size: int, *, rounds: int = 1) -> Cell:
    """3 to 9 statements; every collective that is begun is waited for within the round."""
    statements: list[Statement] = []
    pending: list[str] = []
    for _ in range(rng.randint(3, 9)):
        statement = _random_statement(rng, world_size, pending)
        pending = [one for one in [*pending, *statement.pending] if one not in statement.waits]
        statements.append(statement)
    statements += [_wait(name) for name in pending]
    if rounds > 1:  # sums grow with every round
        statements += [_mix(name, name, 2) for name in NAMES]
    return Cell(statements, rounds)


def _random_statement(rng: random.Random, world_size: int, pending: Sequence[str]) -> Statement:
    """One that uses no name whose collective is pending, unless to wait for it."""
    free = [name for name in NAMES if name not in pending]
    name, other = rng.choice(free), rng.choice(free)
    kinds: list[Callable[[], Statement]] = [
        lambda: _fill(name, rng.randint(0, 99)),
        lambda: _mix(name, other, rng.randint(2, 9)),
        lambda: _all_reduce(name),
        lambda: _broadcast(name, rng.randrange(world_size)),
        lambda: _all_gather(name, other),
        lambda: _reduce_scatter(name, other),
        lambda: _ring(name, other),
    ]
    if len(free) > 1:
        kinds += [lambda: _begin_all_reduce(name)] * 2
    if pending:
        kinds += [lambda: _wait(pending[0])] * 2
    return rng.choice(kinds)()


@dataclass
class ReferenceWorld:
    """What each rank's names must be, and which are in doubt since a fault."""

    size: int
    names: list[Names] = field(default_factory=list)
    doubtful: list[set[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [{} for _ in range(self.size)]
        self.doubtful = [set() for _ in range(self.size)]

    def fill(self) -> Cell:
        """A cell that binds every name anew, so that nothing is in doubt after it."""
        return Cell([_fill(name, number) for number, name in enumerate(NAMES)])

    def run(self, cell: Cell, at: Sequence[int | None]) -> None:
        """Take the names to where each rank got: `at[rank]` statements of the cell are done; None: the rank is gone."""
        done = [cell.length if number is None else number for number in at]
        ahead = [dict(names) for names in self.names]
        pending: list[str] = []
        for index in range(max(done) + 1):
            statement = cell.statements[index % len(cell.statements)] if index < cell.length else None
            for rank in range(self.size):
                if done[rank] == index:
                    self.names[rank] = copy.copy(ahead[rank])
                    self.doubtful[rank] |= {*pending, *(statement.writes if statement else ())}
                    self.doubtful[rank] |= set(statement.pending if statement else ())
            if statement is None or index == max(done):
                break
            statement.apply(ahead)
            for name in statement.writes:
                for rank in range(self.size):
                    if done[rank] > index:
                        self.doubtful[rank].discard(name)
            pending = [one for one in [*pending, *statement.pending] if one not in statement.waits]

    def differences(self, found: dict[int, Names]) -> list[str]:
        """One sentence for each name of each rank that is not as it must be."""
        return [
            f"rank {rank}: {name} is {names[name].tolist()}, and must be {self.names[rank][name].tolist()}"
            for rank, names in found.items()
            for name in NAMES
            if name not in self.doubtful[rank] and not torch.equal(names[name], self.names[rank][name])
        ]
