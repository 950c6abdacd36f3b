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
from tests.random_faults.cells import NAMES, Cell, Names, World, random_cell
from tests.random_faults.harness import HUNG_S, WORLD_SIZE, SharedMesh, Wrong, wait_until

# Rounds of a cell that Stop hits somewhere: more than it can run until then.
MANY = 20_000

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
        self.world = World(WORLD_SIZE)

    def close(self) -> None:
        self._mesh = None

    def run(self, seed: int) -> str:
        """See `Programs`."""
        draw = random.Random(seed)
        mesh = self._ready()
        for _ in range(draw.randint(1, 2)):
            self._run_whole(mesh, random_cell(draw, WORLD_SIZE))
        (kind,) = draw.choices(list(FAULTS), WEIGHTS)
        cell = random_cell(draw, WORLD_SIZE, rounds=MANY if kind == "stop anywhere" else draw.choice([1, 1, 3]))
        cell = replace(
            cell,
            fault=FAULTS[kind].format(seed=seed),
            fault_at=draw.randrange(len(cell.statements)),
            fault_round=draw.randrange(cell.rounds) if kind != "stop anywhere" else 0,
            guilty=tuple(range(WORLD_SIZE)) if kind == "raise everywhere" else (draw.randrange(WORLD_SIZE),),
        )
        error = self._run_with_fault(mesh, cell, kind, draw)
        self._judge(kind, cell, error)
        at = dict(mesh.pull("at"))
        self.world.run(cell, [at.get(rank) for rank in range(WORLD_SIZE)])
        self._compare(mesh)
        if kind != "kill":
            self._run_whole(mesh, self._mend())
            self._run_whole(mesh, random_cell(draw, WORLD_SIZE))
        return kind

    def _ready(self) -> Mesh:
        mesh = self._shared.get()
        if self._mesh is not mesh:
            self._mesh, self.world = mesh, World(WORLD_SIZE)
            self._run_whole(mesh, self.world.fill())
        return mesh

    def _mend(self) -> Cell:
        """Bind anew what is in doubt, and nothing else: what was kept goes on being used."""
        fill = self.world.fill()
        doubtful = set().union(*self.world.doubtful)
        return Cell([one for one in fill.statements if doubtful & set(one.writes)])

    def _run_whole(self, mesh: Mesh, cell: Cell) -> None:
        try:
            mesh.run(cell.source, timeout=HUNG_S, echo=False)
        except (CellError, MeshTimeout, RankLost) as error:
            raise Wrong(f"a cell without a fault failed with {error!r}\n{cell.source}") from error
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
            error: BaseException | None = future.exception(HUNG_S)
        except (MeshTimeout, FutureTimeout) as late:
            raise Wrong(f"after {kind!r} the cell did not end within {HUNG_S:g} s\n{cell.source}") from late
        return error

    def _judge(self, kind: str, cell: Cell, error: BaseException | None) -> None:
        """Whether the error says what happened, its cause first."""
        said = str(error)
        if kind.startswith("raise") and not said.startswith(("ValueError: the seeded fault", "rank")):
            raise Wrong(f"the first words are not the cause's: {said}")
        if kind.startswith("raise") and "the seeded fault" not in said:
            raise Wrong(f"the cause is not named: {said}")
        if kind == "kill" and not (isinstance(error, RankLost) and error.ranks == cell.guilty):
            raise Wrong(f"{cell.guilty} was killed, and that is not said: {error!r}")

    def _compare(self, mesh: Mesh) -> None:
        living = mesh.session.living(mesh.ranks)
        pulled = mesh.run(f"[{', '.join(NAMES)}]", echo=False).values
        found: dict[int, Names] = {rank: dict(zip(NAMES, pulled[rank], strict=True)) for rank in living}
        if differences := self.world.differences(found):
            raise Wrong("\n".join(differences))
