"""All kinds of random programs behind one door."""

from __future__ import annotations

from collections.abc import Callable

from tests.random_faults.harness import (
    ProgramHung,
    Programs,
    SharedMesh,
    TookTooLong,
    WrongResult,
    deadline,
    end_supervisor,
    stacks,
)
from tests.random_faults.module_programs import ModulePrograms
from tests.random_faults.tensor_programs import TensorPrograms
from tests.random_faults.training_programs import TrainingPrograms
from tests.soak.tally import Verdict

PROGRAMS: dict[str, Callable[[SharedMesh], Programs]] = {
    "training": TrainingPrograms,
    "tensors": TensorPrograms,
    "modules": ModulePrograms,
}


class Runner:
    """Programs of one kind on one mesh, until one of them fails or loses a rank."""

    def __init__(self, kind: str) -> None:
        self._shared = SharedMesh()
        self._programs = PROGRAMS[kind](self._shared)

    def run(self, seed: int) -> Verdict:
        """Carry out one program. After a failure the next one has a new mesh."""
        try:
            with deadline(lambda: self._shared.mesh):
                return Verdict(self._programs.run(seed))
        except (Exception, ProgramHung) as error:
            where = f"\n{stacks(self._shared.mesh)}" if _is_busy(self._shared) else ""
            self.close(hard=isinstance(error, ProgramHung))
            is_wrong = isinstance(error, WrongResult) and not isinstance(error, TookTooLong)
            failure = f"{type(error).__name__}: {error}{where}"
            return Verdict(failure=failure, is_wrong=is_wrong)

    def close(self, *, hard: bool = False) -> None:
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
