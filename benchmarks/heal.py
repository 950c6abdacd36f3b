"""A rank is killed, idle or in the middle of a training step, and `mesh.heal()` puts a new process in its place.

Four ranks train a DDP model of 98,880 parameters with AdamW. Timed are: from the kill until the controller knows of the
loss, `mesh.heal()` itself, and the training step after it. Doing without is to stop the mesh, start another, build the
model and take a step: what was trained is lost then. The same with heavy imports in the setup cell, without and with a
spare that has imported them (`mesh.spare(1)`).

Then a training of many steps during which ranks are killed by a schedule: by a loop that catches `RankLost`, heals and
takes the failed step again; and, where torchft is installed, by torchft, whose survivors go on without the lost one
until it is back. All in turns, with kills and without. A step sleeps for 40 ms, for the work of an accelerator.

    python -m benchmarks.heal [--quick]
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks import torchft_peer, workbench
from benchmarks.faulty_training import (
    QUICK_STEPS,
    RANKS,
    STEPS,
    WARM_UP_STEPS,
    WORK_S,
    Course,
    Kill,
    Watch,
    course_of,
    schedule,
)  # fmt: skip
from benchmarks.report import Report
from meshbook.controller.healed import Healed
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost

LIMIT_S, SPARE_LIMIT_S = 2.0, 1.0
SEED = 2026
# Trainings are few: with torchft, on two cores that others use too, a round of them takes three minutes.
ROUNDS, TRAINING_ROUNDS = 5, 3
OURS = "mesh.heal()"
TORCHFT, TORCHFT_SHORT = "torchft, its README's lighthouse", "torchft, a lighthouse of 0.5 s"

SETUP = """
import time
from benchmarks import faulty_training
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(faulty_training.make_model())
optimizer = faulty_training.make_optimizer(model)

def train(step, last=False):
    reporter = faulty_training.reporter_to({path!r}, rank)
    optimizer.zero_grad()
    loss = faulty_training.loss_of(model, step, rank)
    time.sleep(faulty_training.WORK_S / 2)
    reporter.report("halfway", step)
    time.sleep(faulty_training.WORK_S / 2)
    loss.backward()
    optimizer.step()
    reporter.report("ended", step, digest=faulty_training.digest(model.module) if last else "")
"""

# Seconds of imports, beside what every rank has.
IMPORTS = "import torch._dynamo, torch._inductor.compile_fx\n"

_STUCK_TIMEOUT_S = 30.0

Result = TypeVar("Result")


def measure(quick: bool, folder: Path) -> Report:
    report = Report("heal", f"{RANKS} ranks, one of which is killed")
    chosen = random.Random(SEED)
    replace_one(report, chosen, folder, rounds=1 if quick else ROUNDS)
    num_steps, num_kills, rounds = (QUICK_STEPS, 1, 1) if quick else (STEPS, 2, TRAINING_ROUNDS)
    train_on(report, folder, num_steps, num_kills, rounds)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# One kill


class Replaced(NamedTuple):
    """Seconds, one after the other."""

    named: float  # from the kill until the controller knows which rank is lost
    back: float  # of what puts ranks in place of the lost one
    step: float  # of the training step after it


def replace_one(report: Report, chosen: random.Random, folder: Path, rounds: int) -> None:
    contestants = {
        "idle": functools.partial(heal_once, kill_idle, chosen, folder),
        "in a training step": functools.partial(heal_once, kill_in_step, chosen, folder),
        "idle, heavy imports": functools.partial(heal_once, kill_idle, chosen, folder, imports=IMPORTS),
        "idle, heavy imports, a spare": functools.partial(
            heal_once, kill_idle, chosen, folder, imports=IMPORTS, num_spares=1
        ),
        "without healing": functools.partial(start_again, chosen, folder),
    }
    taken = workbench.take_turns(contestants, rounds, warm_up=0 if rounds == 1 else 1)
    rebuilt = "without healing: stop, a new mesh, the model, a step; nothing is kept"
    report.add(rebuilt, [one.back + one.step for one in taken.pop("without healing")], "s")
    for when, times in taken.items():
        report.add(f"killed {when}: the loss is named", [one.named for one in times], "s")
        seconds = report.add(f"killed {when}: mesh.heal()", [one.back for one in times], "s")
        report.add(f"killed {when}: the next step has ended", [one.step for one in times], "s")
        both = [one.back + one.step for one in times]
        report.add(f"killed {when}: heal and step together", both, "s", against=rebuilt)
        limit = SPARE_LIMIT_S if "spare" in when else LIMIT_S
        if "imports" not in when or "spare" in when:
            report.promise(f"mesh.heal() of {RANKS} ranks, killed {when}", seconds, limit, "s")


def heal_once(
    kill: Callable[[Mesh, int], float],
    chosen: random.Random,
    folder: Path,
    *,
    imports: str = "",
    num_spares: int = 0,
) -> Replaced:
    with Watch(folder, last_step=3) as watch, create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        prepare(mesh, watch, imports)
        if num_spares:
            mesh.spare(num_spares)
            wait_for_spares(mesh, num_spares)
        named = kill(mesh, chosen.randrange(RANKS))
        back, healed = timed(mesh.heal)
        check(healed)
        step, _ = timed(lambda: take_step(mesh, 3))
    return Replaced(named, back, step)


def start_again(chosen: random.Random, folder: Path) -> Replaced:
    """As without healing: the loss, then all of it anew."""
    with Watch(folder, last_step=3) as watch:
        mesh = create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S)
        try:
            prepare(mesh, watch)
            named = kill_in_step(mesh, chosen.randrange(RANKS))
            started = time.perf_counter()
            mesh.stop()
            mesh = create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S)
            mesh.run(SETUP.format(path=watch.path), setup=True, echo=False)
            back = time.perf_counter() - started
            step, _ = timed(lambda: take_step(mesh, 0))
        finally:
            mesh.stop()
    return Replaced(named, back, step)


def kill_idle(mesh: Mesh, rank: int) -> float:
    """Kill a rank while no cell runs; seconds until the controller knows."""
    killed = kill_rank(mesh, rank)
    while rank not in mesh.session.lost:
        if time.perf_counter() - killed > _STUCK_TIMEOUT_S:
            raise RuntimeError(f"the controller did not learn of the death of rank {rank}")
        time.sleep(0.001)
    return time.perf_counter() - killed


def kill_in_step(mesh: Mesh, rank: int) -> float:
    """Kill a rank in the middle of a step, before the gradients are summed; seconds until the cell has ended."""
    pid = mesh.status().ranks[rank].pid
    assert pid is not None
    future = mesh.run("train(3)", wait=False, echo=False)
    time.sleep(WORK_S / 2)  # a step sleeps for twice that before it sums
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    error = future.exception(_STUCK_TIMEOUT_S)
    if not isinstance(error, RankLost) or error.ranks != (rank,):
        raise RuntimeError(f"the cell did not end with the loss of rank {rank}, but with {error!r}")
    return time.perf_counter() - killed


def kill_rank(mesh: Mesh, rank: int) -> float:
    pid = mesh.status().ranks[rank].pid
    assert pid is not None
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return killed


# ---------------------------------------------------------------------------------------------------------------------
# Many steps, some kills


def train_on(report: Report, folder: Path, num_steps: int, num_kills: int, rounds: int) -> None:
    kills = schedule(SEED, num_steps, num_kills)
    last_step = WARM_UP_STEPS + num_steps - 1
    systems: dict[str, Callable[[Sequence[Kill]], Course | None]] = {
        OURS: lambda kills: train(folder, kills, last_step)
    }
    if why := torchft_peer.why_absent():
        report.note(f"absent from the table: {why}")
    else:
        for name, timings in ((TORCHFT, torchft_peer.README), (TORCHFT_SHORT, torchft_peer.SHORT)):
            systems[name] = functools.partial(train_on_torchft, report, name, folder, last_step, timings)
        report.note(f"torchft is {torchft_peer.version()}")
    contestants = {f"{name}, calm": functools.partial(system, ()) for name, system in systems.items()}
    contestants.pop(f"{TORCHFT_SHORT}, calm", None)  # nobody dies, so nothing waits: as with the README's
    contestants |= {f"{name}, kills": functools.partial(system, kills) for name, system in systems.items()}
    taken = {
        name: [course for course in courses if course is not None]
        for name, courses in workbench.take_turns(contestants, rounds, warm_up=0).items()
    }
    report.note("kills: " + ", ".join(f"rank {kill.rank} in step {kill.step}" for kill in kills))
    for name in systems:
        courses = taken[f"{name}, kills"]
        calm = taken[f"{TORCHFT if name == TORCHFT_SHORT else name}, calm"]
        if courses and calm:
            describe(report, name, num_steps, num_kills, courses, calm)


def describe(
    report: Report, name: str, num_steps: int, num_kills: int, courses: Sequence[Course], calm: Sequence[Course]
) -> None:
    """The rows of one system; those of the others are multiples of ours."""
    against: Callable[[str], str | None] = lambda words: None if name == OURS else f"{words}: {OURS}"  # noqa: E731
    rows: Mapping[str, list[float]] = {
        "killed, until the other ranks have ended a step": [one for course in courses for one in course.survivors_s],
        f"killed, until all {RANKS} have ended a step": [one for course in courses for one in course.all_s],
        f"{num_steps} steps without a kill": [course.seconds for course in calm],
        f"{num_steps} steps, {num_kills} killed meanwhile": [course.seconds for course in courses],
    }
    for words, samples in rows.items():
        if samples:
            report.add(f"{words}: {name}", samples, "s", against=against(words))
    if not_back := sum(course.num_not_back for course in courses):
        report.note(f"{name}: {not_back} of {num_kills * len(courses)} killed ranks were not back before the end")
    report.add(f"steps taken again: {name}", [course.num_failed for course in courses], "steps")
    report.add(f"batches that went into no step: {name}", [course.num_left_out for course in courses], "batches")
    both = [*courses, *calm]
    if any(len(course.digests) > 1 for course in both):
        report.note(f"{name}: the parameters DIFFERED between ranks after {sum(len(c.digests) > 1 for c in both)} runs")


def train(folder: Path, kills: Sequence[Kill], last_step: int) -> Course:
    """The loop of docs/faults.md, over all steps. Blocks."""
    with (
        Watch(folder, kills, last_step=last_step) as watch,
        create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh,
    ):
        mesh.run(SETUP.format(path=watch.path), setup=True, echo=False)
        for step in range(last_step + 1):
            try:
                take_step(mesh, step, last=step == last_step)
            except RankLost:
                check(mesh.heal())
                take_step(mesh, step, last=step == last_step)
    return course_of(watch.seen, watch.killed, last_step=last_step)


def train_on_torchft(
    report: Report, name: str, folder: Path, last_step: int, timings: torchft_peer.Timings, kills: Sequence[Kill]
) -> Course | None:
    """None if it failed, which the report says: a rival's failure ends no benchmark."""
    try:
        return torchft_peer.train(folder, kills, last_step=last_step, timings=timings)
    except RuntimeError as error:
        report.note(f"{name}: a run with {len(kills)} kills is left out: {error}")
        return None


def prepare(mesh: Mesh, watch: Watch, imports: str = "") -> None:
    """A model that has been trained for a few steps, so that the optimizer has state too."""
    mesh.run(imports + SETUP.format(path=watch.path), setup=True, echo=False)
    for step in range(3):
        take_step(mesh, step)


def wait_for_spares(mesh: Mesh, num: int) -> None:
    """Wait until spares have imported what `IMPORTS` does, which are several hundred modules."""
    deadline = time.monotonic() + 10 * _STUCK_TIMEOUT_S
    while sum(spare.state == "ready" and spare.num_modules > 300 for spare in mesh.spare()) < num:
        if time.monotonic() > deadline:
            raise RuntimeError(f"spares do not get ready:\n{mesh.spare()}")
        time.sleep(0.1)


def take_step(mesh: Mesh, step: int, last: bool = False) -> None:
    mesh.run(f"train({step}, last={last})", echo=False)


def check(healed: Healed) -> None:
    if not healed.complete or not {"model", "optimizer"} <= set(healed.restored[healed.ranks[0]]):
        raise RuntimeError(f"the new process does not have all that the others have:\n{healed}")


def timed(act: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
