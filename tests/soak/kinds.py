"""What a soak runs, as a table: each kind makes its meshes at its first case, and ends them when it is closed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.campaign.campaign import Campaign
from tests.campaign.draws import draw_case
from tests.campaign.report import describe
from tests.campaign.surroundings import Surroundings
from tests.random_faults.harness import DEADLINE_S, ProgramHung, deadline, end_supervisor
from tests.random_faults.programs import PROGRAMS, Runner
from tests.soak import supervisor_kills
from tests.soak.checkpoint_kills import kill_during_a_save
from tests.soak.tally import Verdict
from tests.tensors.chains import AXES, check, generate_chain, shrink
from tests.zoo.hangs import HANGS
from tests.zoo.test_hangs import explained, loose


class Kind(Protocol):
    def run(self, seed: int) -> Verdict: ...

    def close(self) -> None: ...


class RandomPrograms:
    """Programs of one kind, with a fault in each, against one process (`tests.random_faults`)."""

    def __init__(self, name: str) -> None:
        self._runner = Runner(name)

    def run(self, seed: int) -> Verdict:
        return self._runner.run(seed)

    def close(self) -> None:
        self._runner.close()


class Faults:
    """Faults in work, and what must be so afterwards (`tests.campaign`)."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._campaign = Campaign(surroundings)

    def run(self, seed: int) -> Verdict:
        draw = draw_case(0, seed)
        result = self._campaign.run(draw)
        wrong = any(problem.text.startswith("WrongResult") for problem in result.problems)
        return Verdict(f"{draw.fault} in {draw.work}", describe(result) if result.problems else "", wrong)

    def close(self) -> None:
        self._campaign.meshes.close()


class Chains:
    """Operations on randomly placed tensors, as plain torch does them (`tests.tensors.chains`): two ranks and four."""

    def __init__(self) -> None:
        self._meshes: dict[int, Mesh] = {}

    def run(self, seed: int) -> Verdict:
        ranks = sorted(AXES)[seed % len(AXES)]
        chain = generate_chain(seed, ranks)
        what = f"{len(chain)} lines on {ranks} ranks"
        failure = check(chain, self._mesh(ranks), Counter())
        if failure is None:
            apart = positions_apart(self._mesh(ranks))
            return Verdict(what, apart, is_wrong=bool(apart))
        if failure.kind == "hang" or self._mesh(ranks).session.lost:
            self._end(ranks)
        elif failure.kind == "wrong":
            chain = shrink(chain[: failure.line + 1], lambda other: self._is_wrong(other, ranks))
        text = "\n".join([f"{failure.kind} at line {failure.line + 1}: {failure.text}", *chain])
        return Verdict(what, text, failure.kind == "wrong")

    def _is_wrong(self, chain: list[str], ranks: int) -> bool:
        failure = check(chain, self._mesh(ranks), Counter(), 10)
        return failure is not None and failure.kind == "wrong"

    def _mesh(self, ranks: int) -> Mesh:
        if ranks not in self._meshes:
            self._meshes[ranks] = create_mesh(AXES[ranks])
        return self._meshes[ranks]

    def _end(self, ranks: int) -> None:
        end(self._meshes.pop(ranks))

    def close(self) -> None:
        for ranks in list(self._meshes):
            self._end(ranks)


def begun_here() -> dict[str, tuple[tuple[int, ...], int]]:
    """On a rank: by group its members, and how many collectives it has begun."""
    from torch.distributed import distributed_c10d

    groups: Any = list(distributed_c10d._world.pg_map)
    return {group.label.name: (group.label.ranks, group.label.num_begun) for group in groups}


def positions_apart(mesh: Mesh) -> str:
    """Where members of a group have begun different numbers of collectives; "" if none have."""
    positions = mesh.execute(begun_here)
    for at in positions.values():
        for name, (ranks, begun) in at.items():
            if any(positions[other][name] != (ranks, begun) for other in ranks):
                return f"members of {name} have begun different numbers of collectives: {positions}"
    return ""


class Hangs:
    """Hangs of three ranks, each explained and stopped, while a process keeps one core busy (`tests.zoo`)."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None

    def run(self, seed: int) -> Verdict:
        hang = random.Random(f"hang {seed}").choice(HANGS)
        try:
            with busy_core(), deadline(lambda: self._mesh):
                if self._mesh is None:
                    self._mesh = create_mesh(3, end_on_error=False)
                with loose(self._mesh, hang):
                    explained(self._mesh, hang)
        except (Exception, ProgramHung, pytest.fail.Exception) as error:
            self.close()
            return Verdict(hang.name, f"{type(error).__name__}: {error}")
        return Verdict(hang.name)

    def close(self) -> None:
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            end(mesh)


class SupervisorKills:
    """Supervisors, standbys and fork servers die in random works (`supervisor_kills`)."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self._folder, self._num_hosts = folder, num_hosts
        self._mesh: Mesh | None = None

    def run(self, seed: int) -> Verdict:
        try:
            with deadline(lambda: self._mesh):
                if self._mesh is None:
                    self._mesh = supervisor_kills.start(self._num_hosts)
                return Verdict(supervisor_kills.run_round(self._mesh, seed, self._folder / f"supervisor {seed}"))
        except (Exception, ProgramHung) as error:
            self.close()
            return Verdict(failure="\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    def close(self) -> None:
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            end(mesh)


class CheckpointKills:
    """kill -9 at any moment of a save (`checkpoint_kills`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, seed: int) -> Verdict:
        folder = self._folder / f"save {seed}"
        try:
            with deadline(lambda: None, 2 * DEADLINE_S):  # four meshes
                return Verdict(kill_during_a_save(seed, folder))
        except (Exception, ProgramHung) as error:
            wrong = isinstance(error, AssertionError)
            return Verdict(failure=f"{type(error).__name__}: {error}", is_wrong=wrong)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None: ...


@contextmanager
def busy_core() -> Iterator[None]:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def end(mesh: Mesh) -> None:
    """Stop a mesh; one that does not answer is killed."""
    try:
        with deadline(lambda: mesh):
            mesh.stop()
    except (Exception, ProgramHung):
        with suppress(Exception):
            end_supervisor(mesh)


def kinds(surroundings: Surroundings) -> dict[str, Callable[[], Kind]]:
    """All kinds, by name."""
    programs: dict[str, Callable[[], Kind]] = {name: lambda name=name: RandomPrograms(name) for name in PROGRAMS}  # type: ignore[misc]
    return {
        **programs,
        "faults": lambda: Faults(surroundings),
        "supervisors": lambda: SupervisorKills(surroundings.folder, 1),
        "supervisors of hosts": lambda: SupervisorKills(surroundings.folder, 2),
        "saves": lambda: CheckpointKills(surroundings.folder),
        "chains": Chains,
        "hangs": Hangs,
    }
