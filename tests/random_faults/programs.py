"""All kinds of random programs behind one door: run the one of a seed, and say how to repeat it where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.random_faults.actor_programs import ActorPrograms
from tests.random_faults.cell_programs import CellPrograms
from tests.random_faults.harness import ProgramHung, Programs, SharedMesh, deadline, end_supervisor, stacks
from tests.random_faults.module_programs import ModulePrograms
from tests.random_faults.tensor_programs import TensorPrograms
from tests.random_faults.training_programs import TrainingPrograms

KINDS: dict[str, Callable[[SharedMesh], Programs]] = {
    "cells": CellPrograms,
    "training": TrainingPrograms,
    "tensors": TensorPrograms,
    "modules": ModulePrograms,
    "actors": ActorPrograms,
}


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        fault: the name of the fault that was put in; "" if the program failed.
        failure: what was wrong, and how to repeat it; "" if nothing was.
    """

    fault: str = ""
    failure: str = ""


class Runner:
    """Programs of all kinds on one mesh, until one of them fails or loses a rank. A `with` block."""

    def __init__(self) -> None:
        self._shared = SharedMesh()
        self._kinds = {name: make(self._shared) for name, make in KINDS.items()}
        self._since: list[tuple[str, int]] = []  # programs that this mesh has run
        self._mesh: object = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def run(self, kind: str, seed: int) -> Verdict:
        """Carry out one program. After a failure the next one has a new mesh."""
        if self._shared.mesh is not self._mesh:
            self._mesh, self._since = self._shared.mesh, []
        self._since.append((kind, seed))
        try:
            with deadline(lambda: self._shared.mesh):
                return Verdict(fault=self._kinds[kind].run(seed))
        except (Exception, ProgramHung) as error:
            where = f"\n{stacks(self._shared.mesh)}" if _is_busy(self._shared) else ""
            self._discard(hard=isinstance(error, ProgramHung))
            return Verdict(failure=f"{type(error).__name__}: {error}{where}\n{self._how_to_repeat()}")

    def _how_to_repeat(self) -> str:
        command = "python -m tests.random_faults --only"
        *before, last = [f"{kind}:{seed}" for kind, seed in self._since]
        alone = f"again: {command} {last}"
        return f"{alone}\nwith all that this mesh had run: {command} {' '.join(before)} {last}" if before else alone

    def _discard(self, *, hard: bool = False) -> None:
        for programs in self._kinds.values():
            programs.close()
        if hard:
            end_supervisor(self._shared.mesh)
        try:
            with deadline(lambda: self._shared.mesh):
                self._shared.discard()
        except (Exception, ProgramHung):
            end_supervisor(self._shared.mesh)
            self._shared.mesh = None


def _is_busy(shared: SharedMesh) -> bool:
    try:
        return shared.mesh is not None and any(rank.state == "busy" for rank in shared.mesh.status().ranks)
    except Exception:
        return False
