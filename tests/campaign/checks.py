"""What must be so after a fault: who is blamed, what survives, what is left behind. Each check returns problems."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from meshbook.actor import ActorError, SupervisionError
from meshbook.controller.healed import Healed
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, NotAttached, RankLost, UsageError
from tests.campaign.draws import Draw
from tests.campaign.faults import FAULTS, Fault, exit_status
from tests.campaign.work import WORKS
from tests.leaks import GRACE_S, Run

Kind = Literal["hang", "lost state", "leak", "wrong blame"]
KINDS: tuple[Kind, ...] = ("hang", "lost state", "leak", "wrong blame")

# File descriptors of a process that lives on, more than before a fault: what is opened once, when it is first needed.
FD_SLACK = 12


@dataclass(frozen=True)
class Problem:
    kind: Kind
    text: str


# Of a rank whose fork server was killed before, in an earlier case.
_LOST_WITH_SERVER = "its exit status was lost with the fork server"

# ---------------------------------------------------------------------------------------------------------------------
# Blame


def check_blame(draw: Draw, error: BaseException | None, lost: Collection[int]) -> list[Problem]:
    """Check how a work has ended.

    Args:
        error: what it raised; None: it came to its end, with the right numbers.
        lost: the ranks that the fault was to end.
    """
    fault, work = FAULTS[draw.fault], WORKS[draw.work]
    if fault.lost and fault.lost != "perhaps":
        wrong = _check_loss(fault, draw, error, tuple(sorted(lost)))
    elif fault.stops:
        wrong = _check_stop(error)
    elif error is None:
        wrong = ""
    elif fault.takes not in work.needs:
        wrong = "nothing that this work needs was taken from it, and it failed"
    elif isinstance(error, RankLost) and fault.lost == "perhaps":
        wrong = _check_loss(fault, draw, error, (draw.victim,))
    elif isinstance(error, (RankLost, SupervisionError)):
        wrong = "no rank has ended"
    else:
        wrong = "" if says(error, fault.said) else f"it says none of {', '.join(fault.said)}"
    return [Problem("wrong blame", f"{wrong}: {_describe(error)}")] if wrong else []


def _check_loss(fault: Fault, draw: Draw, error: BaseException | None, lost: tuple[int, ...]) -> str:
    if error is None:
        if WORKS[draw.work].heals and fault.lost != "mesh":
            return ""
        return f"ranks {lost} have ended, and the work came to its end"
    if fault.lost == "mesh":
        right = isinstance(error, NotAttached | SupervisionError) or (
            isinstance(error, RankLost) and error.ranks == lost
        )
        return "" if right and says(error, fault.said) else "that the mesh has ended, and why, is not said"
    said = (*fault.said, _LOST_WITH_SERVER)
    if isinstance(error, SupervisionError):
        if not any(f"rank {rank}" in str(error) or rank in error.ranks for rank in lost):
            return f"rank {lost} is not named"
        return "" if says(error, said) else f"it says none of {', '.join(said)}"
    if not isinstance(error, RankLost):
        return f"RankLost was to come for ranks {lost}"
    if error.ranks != lost:
        return f"ranks {lost} have ended, and {error.ranks} are named"
    if fault.signal is not None and error.signal not in (fault.signal, None):
        return f"{fault.signal} has ended it, and {error.signal} is named"
    if fault.name == "os._exit" and error.exit_code not in (exit_status(draw.case_seed), None):
        return f"it has exited with status {exit_status(draw.case_seed)}, and {error.exit_code} is named"
    return ""


def check_exit(draw: Draw, exits: dict[int, Any]) -> list[Problem]:
    """Check how the mesh says that each rank has exited (`RankExited` by rank), which is news at once."""
    fault = FAULTS[draw.fault]
    wrong = []
    for rank, exited in exits.items():
        said = f"{exited.description} {'out of memory' if exited.oom_killed else ''}"
        if fault.name == "os._exit":
            right = exited.exit_code == exit_status(draw.case_seed)
        elif fault.signal is not None:
            right = fault.signal in said
        else:
            right = any(word in said for word in fault.said)
        if not right and _LOST_WITH_SERVER not in said:
            wrong.append(Problem("wrong blame", f"rank {rank} has ended by {fault.name}, and the mesh says: {said}"))
    return wrong


def _check_stop(error: BaseException | None) -> str:
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, (CellError, ActorError, UsageError)) and says(
        error, ("KeyboardInterrupt", "stopped", "interrupted")
    ):
        return ""
    return "it was stopped, and something else is said"


def says(error: BaseException, words: Collection[str]) -> bool:
    """Whether an error's text, its class and its notes included, has one of these words."""
    text = f"{type(error).__name__} {error} {' '.join(getattr(error, '__notes__', ()))}"
    return any(word in text for word in words)


def _describe(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------------------------------
# State

_NAMES = ("own", "same", "nested")


def hold(mesh: Mesh, seed: int) -> None:
    """Bind names on every rank, with values that are this case's."""
    mesh.run(
        f"own, same, nested = (rank, {seed}), torch.arange(64.0) + {seed}, {{'a': [{seed}, 'x'], 'own': [rank]}}",
        echo=False,
    )


def held(rank: int, seed: int) -> dict[str, Any]:
    """What a rank holds under these names."""
    return {"own": (rank, seed), "same": torch.arange(64.0) + seed, "nested": {"a": [seed, "x"], "own": [rank]}}


def check_state(mesh: Mesh, seed: int, heals: Sequence[Healed]) -> list[Problem]:
    """Check what every rank holds: the survivors all of it, new ranks the same or it was said to be missing.

    Args:
        heals: in order. A rank may get from one that was healed before what this one has got, and no more.
    """
    found = mesh.run(f"{{name: globals()[name] for name in {_NAMES} if name in globals()}}", echo=False).values
    problems = []
    for rank, names in dict(found).items():
        missing = {name: why for healed in heals for name, why in healed.missing.get(rank, {}).items()}
        for name, value in held(rank, seed).items():
            if name not in names and name in missing:
                continue
            if name not in names or not _equal(names[name], value):
                said = f", and heal() says {missing.get(name, 'nothing of it')}" if heals else ""
                text = f"rank {rank} holds {name} = {names.get(name, 'nothing')!r} instead of {value!r}{said}"
                problems.append(Problem("lost state", text))
    if sorted(dict(found)) != list(mesh.ranks):
        problems.append(Problem("lost state", f"a cell ran on ranks {sorted(dict(found))} of {mesh.ranks}"))
    return problems


def _equal(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


# ---------------------------------------------------------------------------------------------------------------------
# Leaks


@dataclass(frozen=True)
class Remains:
    """What there is on the machine of this campaign, besides itself.

    Attributes:
        processes: command lines by pid.
        places: files, sockets and folders, as `Run.leftovers` names them.
        descriptors: how many each process has open.
    """

    processes: dict[int, str]
    places: frozenset[str]
    descriptors: dict[int, int]


def look_round(run: Run) -> Remains:
    processes = {pid: command for pid, command in run.processes().items() if not _comes_and_goes(pid)}
    # A living mesh keeps its ranks' output, and removes it with its folder.
    places = frozenset(one for one in run.leftovers() if not one.startswith("process ") and "-logs" not in one)
    return Remains(processes, places, {pid: _num_descriptors(pid) for pid in processes})


def _comes_and_goes(pid: int) -> bool:
    """Whether this has ended meanwhile, or is a supervisor's or host's standby, replaced as these start processes."""
    try:
        process = psutil.Process(pid)
        parent, command = process.parent(), process.cmdline()
        if not command:  # it is ending, and has no memory any more
            return True
        if parent is None or parent.cmdline() != command:
            return False
        above = parent.parent()
        return "meshbook.supervisor" in command or (above is not None and above.cmdline() == command)
    except psutil.NoSuchProcess as error:
        return error.pid == pid  # else its parent has ended
    except psutil.Error:
        return False


def _num_descriptors(pid: int) -> int:
    try:
        return int(psutil.Process(pid).num_fds())
    except psutil.Error:
        return 0


def check_leaks(run: Run, before: Remains, new_pids: Collection[int], gone: Collection[int]) -> list[Problem]:
    """Compare with how it was before a case. Blocks until it is clean, or for as long as what ends may take.

    Args:
        new_pids: processes that have come, rightly.
        gone: those that must have ended.
    """
    deadline = time.monotonic() + GRACE_S
    while (found := _leaks(look_round(run), before, new_pids, gone)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [Problem("leak", text) for text in found]


def _leaks(after: Remains, before: Remains, new_pids: Collection[int], gone: Collection[int]) -> list[str]:
    new = after.processes.keys() - before.processes.keys() - set(new_pids)
    ended = before.processes.keys() - after.processes.keys() - set(gone)
    return [
        *(f"process {pid} is new: {after.processes[pid]}" for pid in sorted(new)),
        *(f"process {pid} has ended: {before.processes[pid]}" for pid in sorted(ended)),
        *(f"process {pid} was to end: {after.processes[pid]}" for pid in sorted(after.processes.keys() & set(gone))),
        *sorted(after.places - before.places),
        *(
            f"process {pid} has {after.descriptors[pid]} open files, and had {before.descriptors[pid]}"
            for pid in sorted(after.processes.keys() & before.processes.keys())
            if after.descriptors[pid] > before.descriptors[pid] + FD_SLACK
        ),
    ]
