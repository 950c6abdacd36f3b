"""Random cells on a real mesh, with a fault in each second one, against the world that is computed beside them."""

from __future__ import annotations

import random
import time
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

import psutil

from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, MeshTimeout, RankLost
from tests.random_faults.cells import NAMES, Cell, Names, ReferenceWorld, random_cell
from tests.random_faults.harness import CALL_TIMEOUT_S, WORLD_SIZE, SharedMesh, WrongResult, wait_until

# Rounds of a cell that Stop hits somewhere: more than it can run until then.
MANY_ROUNDS = 20_000

FAULTS = {
    "raise": "raise ValueError('the seeded fault')",
    "raise everywhere": "raise ValueError('the seeded fault')",
    "leave": "break",
    "stop": "print('held {seed}', flush=True); time.sleep(1000)",
    "freeze": "os.kill(os.getpid(), signal.SIGSTOP)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop anywhere": "",
}


# How often each comes: what kills a rank costs a new mesh.
WEIGHTS = (4, 4, 3, 3, 3, 1, 3)


class CellPrograms:
    """Cells without a fault, one with, and again one without."""

    def __init__(self, shared: SharedMesh) -> None:
        self._shared = shared
        self._mesh: Mesh | None = None  # whose names are `world`
        self.world = ReferenceWorld(WORLD_SIZE)

    def close(self) -> None:
        self._mesh = None

    def run(self, seed: int) -> str:
        """See `Programs`."""
        rng = random.Random(seed)
        mesh = self._prepare_mesh()
        for _ in range(rng.randint(1, 2)):
            self._run_without_fault(mesh, random_cell(rng, WORLD_SIZE))
        (kind,) = rng.choices(list(FAULTS), WEIGHTS)
        cell = random_cell(rng, WORLD_SIZE, rounds=MANY_ROUNDS if kind == "stop anywhere" else rng.choice([1, 1, 3]))
        cell = replace(
            cell,
            fault=FAULTS[kind].format(seed=seed),
            fault_at=rng.randrange(len(cell.statements)),
            fault_round=rng.randrange(cell.rounds) if kind != "stop anywhere" else 0,
            guilty=tuple(range(WORLD_SIZE)) if kind == "raise everywhere" else (rng.randrange(WORLD_SIZE),),
        )
        error = self._run_with_fault(mesh, cell, kind, rng)
        self._check_error(kind, cell, error)
        at = dict(mesh.pull("at"))
        self.world.run(cell, [at.get(rank) for rank in range(WORLD_SIZE)])
        self._compare(mesh)
        if kind != "kill":
            self._run_without_fault(mesh, self._rebind_doubtful())
            self._run_without_fault(mesh, random_cell(rng, WORLD_SIZE))
        return kind

    def _prepare_mesh(self) -> Mesh:
        mesh = self._shared.get()
        if self._mesh is not mesh:
            self._mesh, self.world = mesh, ReferenceWorld(WORLD_SIZE)
            self._run_without_fault(mesh, self.world.fill())
        return mesh

    def _rebind_doubtful(self) -> Cell:
        """Bind anew what is in doubt, and nothing else: what was kept goes on being used."""
        fill = self.world.fill()
        doubtful = set().union(*self.world.doubtful)
        return Cell([one for one in fill.statements if doubtful & set(one.writes)])

    def _run_without_fault(self, mesh: Mesh, cell: Cell) -> None:
        try:
            mesh.run(cell.source, timeout=CALL_TIMEOUT_S, echo=False)
        except (CellError, MeshTimeout, RankLost) as error:
            raise WrongResult(f"a cell without a fault failed with {error!r}\n{cell.source}") from error
        self.world.run(cell, [cell.length] * WORLD_SIZE)
        self._compare(mesh)

    def _run_with_fault(self, mesh: Mesh, cell: Cell, kind: str, draw: random.Random) -> BaseException | None:
        mesh.run("at = 0", echo=False)  # a Stop may come before the cell's first line
        future: Any = mesh.run(cell.source, wait=False, echo=False)
        guilty = cell.guilty[0]
        if kind == "stop":
            wait_until(lambda: cell.fault.split("'")[1] in mesh.logs(guilty), "the rank came to where it is to stop")
        if kind == "freeze":
            pid = mesh.status().ranks[guilty].pid
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the rank stopped itself")
        if kind == "stop anywhere":
            wait_until(lambda: mesh.status().ranks[0].state == "busy", "the cell began")
            time.sleep(draw.uniform(0.0, 0.2))
        if kind in ("stop", "freeze", "stop anywhere"):
            future.interrupt()
        try:
            error: BaseException | None = future.exception(CALL_TIMEOUT_S)
        except (MeshTimeout, FutureTimeout) as late:
            raise WrongResult(
                f"after {kind!r} the cell did not end within {CALL_TIMEOUT_S:g} s\n{cell.source}"
            ) from late
        return error

    def _check_error(self, kind: str, cell: Cell, error: BaseException | None) -> None:
        """Whether the error says what happened, its cause first."""
        said = str(error)
        if kind.startswith("raise") and not said.startswith(("ValueError: the seeded fault", "rank")):
            raise WrongResult(f"the first words are not the cause's: {said}")
        if kind.startswith("raise") and "the seeded fault" not in said:
            raise WrongResult(f"the cause is not named: {said}")
        if kind == "kill" and not (isinstance(error, RankLost) and error.ranks == cell.guilty):
            raise WrongResult(f"{cell.guilty} was killed, and that is not said: {error!r}")

    def _compare(self, mesh: Mesh) -> None:
        living = mesh.session.living(mesh.ranks)
        pulled = mesh.run(f"[{', '.join(NAMES)}]", echo=False).values
        found: dict[int, Names] = {rank: dict(zip(NAMES, pulled[rank], strict=True)) for rank in living}
        if differences := self.world.differences(found):
            raise WrongResult("\n".join(differences))
