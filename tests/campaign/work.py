"""What a mesh does when a fault comes, as a table, and how its numbers are verified."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import meshbook
from meshbook.controller.healed import Healed
from meshbook.errors import CheckpointError, MeshbookError, RankLost
from meshbook.wire import checkpoint_folders
from tests.campaign import arithmetic, on_ranks
from tests.campaign.counters import Counter, mix_number
from tests.campaign.scene import Scene
from tests.random_faults.harness import WrongResult

# Run on ranks as they start, and again on new ones: `on_ranks`, the thread for faults, a model under DDP.
SETUP = """
from tests.campaign import arithmetic, on_ranks
on_ranks.listen({folder!r}, rank)
model = on_ranks.make_model()
wrapped = on_ranks.wrap_model(model)
"""
CALL_TIMEOUT_S = 60.0
VERIFIED_TURNS = 8


@dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        run: does it until the scene is over, or a fault ends it; then the error of the mesh is raised. WrongResult:
            numbers that differ from one process's.
        verify: does some of it on a whole mesh. Raises WrongResult, and whatever the mesh raises.
        needs: what a fault can take from it.
        cell: its source as a cell, if it is one; a kernel can run it.
        check_end: checks what a run as a cell has come to, by rank.
        heals: it heals the mesh by itself, and goes on; the scene has what came of it.
    """

    name: str
    run: Callable[[Scene], None]
    verify: Callable[[Scene], None]
    needs: frozenset[str] = frozenset()
    cell: Callable[[Scene], str] | None = None
    check_end: Callable[[Scene, dict[int, Any]], None] | None = None
    heals: bool = False


def run_cell(scene: Scene, source: str) -> dict[int, Any]:
    """Run a cell in the foreground, and return its values by rank."""
    return dict(scene.mesh.run(source, echo=False).values)


def _compare(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise WrongResult(f"{what}: the ranks have {found}, one process {wanted}")


# ---- nothing


def _idle(scene: Scene) -> None:
    """Wait until it is over, or the mesh says that a rank is lost; then ask all ranks, as the next cell might."""
    scene.begin_all()
    session = scene.mesh.session
    while not scene.over.wait(0.01):
        if session.lost or session.ended is not None:
            break
    _compare("their own numbers", run_cell_on_all(scene, "rank"), {rank: rank for rank in scene.mesh.ranks})


def run_cell_on_all(scene: Scene, source: str) -> dict[int, Any]:
    """Run a cell on every rank, lost ones too: then the mesh says that they are."""
    return dict(scene.mesh.run(source, ranks=scene.mesh.ranks, echo=False).values)


def _verify_alone(scene: Scene) -> None:
    found = run_cell_on_all(scene, f"sum(range({scene.seed % 1000})) + rank")
    _compare("a sum", found, {rank: sum(range(scene.seed % 1000)) + rank for rank in scene.mesh.ranks})


# ---- many short cells


def _cells(scene: Scene) -> None:
    """Short cells, one after the other: a fault meets commands and answers on their way."""
    turn = 0
    while not scene.over.is_set():
        found = run_cell_on_all(scene, f"short = rank * {turn}\nprint('turn {turn}')\nshort")
        _compare(f"cell {turn}", found, {rank: rank * turn for rank in scene.mesh.ranks})
        scene.begin_all()
        turn += 1


# ---- a loop without collectives


def _loop_cell(scene: Scene) -> str:
    return f"on_ranks.loop({str(scene.folder)!r}, {scene.seed}, rank)"


def _check_loop(scene: Scene, found: dict[int, Any]) -> None:
    for rank, (turns, number) in found.items():
        _compare(f"{turns} turns on rank {rank}", number, arithmetic.number_alone(scene.seed, turns, rank))


# ---- collectives


def _collectives_cell(scene: Scene) -> str:
    return f"on_ranks.collectives({str(scene.folder)!r}, {scene.seed}, rank)"


def _check_collectives(scene: Scene, found: dict[int, Any]) -> None:
    turns = {turn for turn, _ in found.values()}
    if len(turns) != 1:
        raise WrongResult(f"the ranks have run {found} collectives")
    wanted = arithmetic.numbers_after(scene.seed, *turns, scene.world_size)
    _compare(f"{turns} collectives", [number for _, number in found.values()], wanted)


def _verify_collectives(scene: Scene) -> None:
    source = f"on_ranks.collectives({str(scene.folder)!r}, {scene.seed}, rank, {VERIFIED_TURNS})"
    _check_collectives(scene, run_cell_on_all(scene, source))


# ---- training under DDP


def _ddp_cell(scene: Scene) -> str:
    return f"on_ranks.ddp({str(scene.folder)!r}, {scene.seed}, rank, wrapped)"


def _check_ddp(scene: Scene, found: dict[int, Any]) -> None:
    turns = {turn for turn, _ in found.values()}
    if len(turns) != 1:
        raise WrongResult(f"the ranks have made {[turn for turn, _ in found.values()]} steps")
    (steps,) = turns
    model = on_ranks.make_model()
    on_ranks.reset(model, scene.seed)
    for turn in range(steps):
        on_ranks.train_step(model, scene.seed, turn, None, scene.world_size)
    wanted = on_ranks.weights(model)
    for rank, (_, weights) in found.items():
        if not torch.allclose(weights, wanted, rtol=1e-9, atol=1e-11):
            raise WrongResult(f"after {steps} steps rank {rank} has the weights {weights}, one process {wanted}")


def _verify_ddp(scene: Scene) -> None:
    source = f"on_ranks.ddp({str(scene.folder)!r}, {scene.seed}, rank, wrapped, {VERIFIED_TURNS})"
    _check_ddp(scene, run_cell_on_all(scene, source))


# ---- remote tensors


def _tensors(scene: Scene) -> None:
    _run_tensors(scene, lambda turn: scene.over.is_set())


def _verify_tensors(scene: Scene) -> None:
    _run_tensors(scene, lambda turn: turn == VERIFIED_TURNS)


def _run_tensors(scene: Scene, is_over: Callable[[int], bool]) -> None:
    draw = torch.Generator().manual_seed(scene.seed)
    size = 2 * scene.world_size
    plain, factor = (torch.randint(0, 7, (size, size), generator=draw).double() for _ in range(2))
    there = meshbook.distribute(plain, scene.mesh, sharding_spec=["dp", None])
    factor_there = meshbook.distribute(factor, scene.mesh, sharding_spec=[None, "dp"])
    turn = 0
    while not is_over(turn):
        there, plain = (there @ factor_there + turn) % 997, (plain @ factor + turn) % 997
        if turn % 3 == 0 or turn == VERIFIED_TURNS - 1:
            found = there.full_tensor()
            if not torch.equal(found, plain):
                raise WrongResult(f"turn {turn}: the remote tensor is {found.tolist()}, and must be {plain.tolist()}")
            scene.begin_all()
        turn += 1


# ---- a loop on remote tensors that heals the mesh by itself


def _resilient(scene: Scene) -> None:
    _run_resilient(scene, lambda turn: scene.over.is_set() and not scene.mesh.session.lost)


def _verify_resilient(scene: Scene) -> None:
    _run_resilient(scene, lambda turn: turn == VERIFIED_TURNS)


def _run_resilient(scene: Scene, is_over: Callable[[int], bool]) -> None:
    plain = [torch.arange(4.0 * scene.world_size).double() + scene.seed % 997]  # by turn
    there, turns = meshbook.distribute(plain[0], scene.mesh, sharding_spec=["dp"]), list[int]()
    heal = scene.mesh.heal

    def heal_and_note() -> Healed:
        healed = heal()
        scene.heals.append(healed)
        return healed

    with (
        mock.patch.object(scene.mesh, "heal", heal_and_note),
        scene.mesh.resilient(there, turns, every=_EVERY, restart=True) as run,
    ):
        for turn in run.steps(range(1 << 20)):
            with run.step():
                there.copy_((there * 3 + turn) % 997)
                turns.append(turn)
                if len(plain) == turn + 1:
                    plain.append((plain[turn] * 3 + turn) % 997)
                if turn % 3 == 0:
                    found = there.full_tensor()
                    if turns != list(range(turn + 1)) or not torch.equal(found, plain[turn + 1]):
                        raise WrongResult(f"turn {turn} of {turns}: {found}, and must be {plain[turn + 1]}")
                    scene.begin_all()
            if is_over(turn):
                break


# ---- actors


def _actors(scene: Scene) -> None:
    _run_actors(scene, lambda turn: scene.over.is_set())


def _verify_actors(scene: Scene) -> None:
    _run_actors(scene, lambda turn: turn == VERIFIED_TURNS)


def _run_actors(scene: Scene, is_over: Callable[[int], bool]) -> None:
    expected = [scene.seed % 997] * scene.world_size
    counters = scene.mesh.spawn("counters", Counter, expected[0])
    try:
        turn = 0
        while not is_over(turn):
            by = 2 + turn % 8
            expected = [mix_number(number, by, place) for place, number in enumerate(expected)]
            found = [int(number) for number in counters.mix.call(by).get(CALL_TIMEOUT_S).values()]
            _compare(f"the actors, turn {turn}", found, expected)
            scene.begin_all()
            turn += 1
    finally:
        _stop_actors(scene, counters)


def _stop_actors(scene: Scene, counters: Any) -> None:
    try:
        living = [place for place in scene.mesh.ranks if place not in scene.mesh.session.lost]
        for place in living:
            counters.slice(dp=place).stop().get(CALL_TIMEOUT_S)
    except (MeshbookError, RankLost):
        return  # its rank has ended meanwhile, which the work's own error says


# ---- an elastic loop, whose state each rank has of its own

_EVERY = 7
_ELASTIC = """
number, turns = arithmetic.first_number({seed}, rank), 0
for turn in mesh.elastic(range(1 << 20), state=("number", "turns"), every={every}, name="case {case}"):
    number, turns = on_ranks.elastic_turn(number, rank, turn), turn + 1
    if on_ranks.end_elastic_turn({folder!r}, rank, turns):
        break
turns, number
"""


def _elastic(scene: Scene) -> None:
    _check_collectives(scene, run_cell_on_all(scene, _elastic_cell(scene)))
    scene.ended_well.set()


def _verify_elastic(scene: Scene) -> None:
    """The loop goes on where the fault has cut it off, with what each rank had there."""
    noted = scene.folder / "turns"
    before = int(noted.read_text() or 0) if noted.exists() else 0
    found = run_cell_on_all(scene, _elastic_cell(scene))
    _check_collectives(scene, found)
    turns = found[0][0]
    if not scene.ended_well.is_set() and turns <= before - 2 * _EVERY:
        raise WrongResult(f"the elastic loop went on at turn {turns}, and had come to turn {before}")


def _elastic_cell(scene: Scene) -> str:
    return _ELASTIC.format(seed=scene.seed, every=_EVERY, case=scene.number, folder=str(scene.folder))


# ---- checkpoints of Meshbook's, which replace one another


def _saves(scene: Scene) -> None:
    turn = 0
    while not scene.over.is_set():
        run_cell_on_all(scene, f"saved, saved_own = on_ranks.checkpoint_state({scene.seed}, {turn}), rank * {turn}")
        try:
            save = scene.mesh.checkpoint(_saves_path(scene), "saved", "saved_own", step=turn % 2, overwrite=True)
            save.result(CALL_TIMEOUT_S)
        except CheckpointError:
            run_cell_on_all(scene, "rank")  # who says it if a rank is lost
            raise
        scene.committed = turn
        scene.begin_all()
        turn += 1


def _verify_saves(scene: Scene) -> None:
    """Each checkpoint that is there is whole, and what was committed is among them, or something later is."""
    turns = []
    there = os.path.exists(_saves_path(scene))
    for entry in checkpoint_folders.list_checkpoints(_saves_path(scene)) if there else ():
        step = entry.manifest.step
        scene.mesh.restore(_saves_path(scene), step=step)
        for rank, (saved, own) in run_cell_on_all(scene, "saved, saved_own").items():
            turn = int(saved["turn"])
            turns.append(turn)
            wanted = on_ranks.checkpoint_state(scene.seed, turn)
            is_same = all(torch.equal(saved[name], value) for name, value in wanted.items())
            if own != rank * turn or not is_same or turn % 2 != step:
                raise WrongResult(f"the checkpoint of step {step} gives rank {rank} {saved} and {own}")
    if max(turns, default=-1) < scene.committed:
        raise WrongResult(f"the checkpoint of turn {scene.committed} was committed, and there are those of {turns}")
    _verify_collectives(scene)


def _saves_path(scene: Scene) -> str:
    return str(scene.disk / f"saves-{scene.number}")


# ---- checkpoints, of torch's own kind


def _checkpoints_cell(scene: Scene) -> str:
    return f"on_ranks.checkpoints({str(scene.folder)!r}, {scene.seed}, rank, {str(scene.disk)!r})"


def _check_checkpoints(scene: Scene, found: dict[int, Any]) -> None:
    if len(set(found.values())) != 1:
        raise WrongResult(f"the ranks have saved {found} checkpoints")


def _verify_checkpoints(scene: Scene) -> None:
    """Load the newest checkpoint that is whole, in this process, and save one more."""
    whole = [path for path in scene.disk.glob("checkpoint-*") if (path / ".metadata").exists()]
    for path in whole:
        turn = int(path.name.partition("-")[2])
        wanted = on_ranks.checkpoint_state(scene.seed, turn)
        state = {name: torch.zeros_like(value) for name, value in wanted.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=str(path), no_dist=True)
        if not all(torch.equal(state[name], value) for name, value in wanted.items()):
            raise WrongResult(f"the checkpoint of turn {turn} holds {state}")
    _verify_collectives(scene)


# ---- files and shared memory


def _files_cell(scene: Scene) -> str:
    return f"on_ranks.files({str(scene.folder)!r}, {scene.seed}, rank, {str(scene.disk)!r})"


def _loader_cell(scene: Scene) -> str:
    return f"on_ranks.loader({str(scene.folder)!r}, {scene.seed}, rank)"


def _check_nothing(scene: Scene, found: dict[int, Any]) -> None:
    """The ranks have compared everything themselves."""


def _cell_work(
    name: str,
    cell: Callable[[Scene], str],
    check_end: Callable[[Scene, dict[int, Any]], None],
    verify: Callable[[Scene], None],
    *needs: str,
) -> Work:
    def run(scene: Scene) -> None:
        check_end(scene, run_cell(scene, cell(scene)))

    return Work(name, run, verify, frozenset({"memory", *needs}), cell, check_end)


WORKS = {
    work.name: work
    for work in (
        Work("idle", _idle, _verify_alone, frozenset({"memory"})),
        Work("cells", _cells, _verify_alone, frozenset({"memory"})),
        _cell_work("loop", _loop_cell, _check_loop, _verify_alone),
        _cell_work("collectives", _collectives_cell, _check_collectives, _verify_collectives, "connections"),
        _cell_work("ddp", _ddp_cell, _check_ddp, _verify_ddp, "connections"),
        Work("tensors", _tensors, _verify_tensors, frozenset({"memory", "connections"})),
        Work("resilient", _resilient, _verify_resilient, frozenset({"memory", "connections"}), heals=True),
        Work("actors", _actors, _verify_actors, frozenset({"memory"})),
        _cell_work("checkpoints", _checkpoints_cell, _check_checkpoints, _verify_checkpoints, "connections", "disk"),
        Work("elastic", _elastic, _verify_elastic, frozenset({"memory", "connections"})),
        Work("saves", _saves, _verify_saves, frozenset({"memory", "connections", "disk"})),
        _cell_work("files", _files_cell, _check_nothing, _verify_alone, "disk"),
        _cell_work("loader", _loader_cell, _check_nothing, _verify_collectives, "shared memory"),
    )
}
