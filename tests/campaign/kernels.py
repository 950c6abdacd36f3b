"""The case whose fault is a kernel's: killed while its cell runs, and started again on its mesh."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from meshbook.controller.starting import attach
from tests.campaign import checks, work
from tests.campaign.checks import Problem
from tests.campaign.draws import WORLD_SIZE, Draw
from tests.campaign.report import Result
from tests.campaign.scene import Scene
from tests.campaign.surroundings import Surroundings
from tests.campaign.work import WORKS
from tests.kernel.frontend import Cell, FrontEnd, kernel
from tests.random_faults.harness import WrongResult


def run_kernel_case(draw: Draw, result: Result, surroundings: Surroundings, folder: Path) -> None:
    """Run a case with a kernel and a mesh of its own.

    Raises:
        WrongResult, AssertionError: the mesh or the kernel did what it must not.
    """
    before = checks.look_round(surroundings.run)
    name = f"campaign-{os.getpid()}-{draw.number}"
    (surroundings.folder / name).mkdir(exist_ok=True)
    with kernel(ranks=WORLD_SIZE) as front:
        _run(front, f"%mesh start -n {WORLD_SIZE} --name {name}")
        _run(front, f"%%mesh --setup\n{work.SETUP.format(folder=str(surroundings.folder / name))}")
        mesh = attach(name)
        scene = Scene(
            draw.number, draw.case_seed, draw.victim, random.Random(draw.case_seed), mesh, surroundings, folder
        )
        checks.hold(mesh, scene.seed)
        front = _restart_in_work(front, scene, draw, result)
        cell = _run(front, "rank * 2")
        if cell.result != "\n".join(f"[{rank}] {rank * 2}" for rank in range(WORLD_SIZE)):
            raise WrongResult(f"the first cell of the new kernel gives {cell.text}")
        if "kept what they hold" not in cell.notes:
            result.problems.append(Problem("wrong blame", f"the new kernel does not say what is kept: {cell.text}"))
        check_end = WORKS[draw.work].check_end
        assert check_end is not None  # only works that are cells are drawn for kernels
        check_end(scene, work.run_cell(scene, "found"))
        result.problems += checks.check_state(mesh, scene.seed, [])
        WORKS[draw.work].verify(scene)
        WORKS["collectives"].verify(scene)
        mesh.detach()
        front.close()
        front.manager.shutdown_kernel()
    result.outcome = "went on"
    surroundings.clear()
    result.problems += checks.check_leaks(surroundings.run, before, (), ())


def _restart_in_work(front: FrontEnd, scene: Scene, draw: Draw, result: Result) -> FrontEnd:
    """Kill the kernel while its cell runs; return the front end of the kernel that comes after it."""
    cell = WORKS[draw.work].cell
    assert cell is not None
    front.send(f"found = {cell(scene)}")
    scene.wait_begun()
    time.sleep(draw.delay_s)
    began = time.monotonic()
    os.kill(front.pid, signal.SIGKILL)
    front.manager.restart_kernel(now=True)
    front.close()
    front = FrontEnd(front.manager)
    scene.end_work()
    result.unblocked_s = time.monotonic() - began
    return front


def _run(front: FrontEnd, code: str) -> Cell:
    cell = front.run(code)
    if cell.status != "ok":
        raise WrongResult(f"a cell of the kernel failed: {code}\n{cell.text}")
    return cell
