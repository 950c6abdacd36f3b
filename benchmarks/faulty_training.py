"""What is trained while ranks are killed, the schedule of the kills, and what came of it; the same for every system.

Ranks report when they are halfway through a step and when it has ended, over a socket of the machine. Whoever listens
kills a rank the moment it is halfway. Times are the machine's monotonic clock, which all processes share.

Imports torch and the standard library only: the ranks of a peer may run in an environment without Meshbook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

RANKS = 4
# Seconds of a step that stand for the work of an accelerator: asleep, for two cores could not show four ranks at work.
WORK_S = 0.04
WARM_UP_STEPS = 5
STEPS, QUICK_STEPS = 200, 20

_BATCH, _WIDTH, _HIDDEN = 16, 64, 256


class Kill(NamedTuple):
    """A rank that is killed in the middle of a step, or of the first one after it that the rank takes part in."""

    step: int
    rank: int


def schedule(seed: int, num_steps: int, num_kills: int) -> tuple[Kill, ...]:
    """Kills of different ranks, one in each equal stretch of the steps, early in it: the rank can be back before the
    next, and before the end. Less kills than ranks, so that one rank lives throughout."""
    if not 0 <= num_kills < RANKS:
        raise ValueError(f"{num_kills} kills of {RANKS} ranks: at least one rank must live; give at most {RANKS - 1}")
    chosen = random.Random(seed)
    ranks = chosen.sample(range(RANKS), num_kills)
    stretch = num_steps // max(num_kills, 1)
    starts = [WARM_UP_STEPS + stretch * index for index in range(num_kills)]
    return tuple(
        Kill(start + stretch // 10 + chosen.randrange(max(stretch // 10, 1)), rank)
        for start, rank in zip(starts, ranks, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------------------
# On the ranks


def make_model() -> torch.nn.Module:
    """98,880 parameters, equal on all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _HIDDEN), torch.nn.ReLU(), torch.nn.Linear(_HIDDEN, _HIDDEN), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(_HIDDEN, _WIDTH))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """A rank's loss in a step: its batch follows from both."""
    batch = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(step * RANKS + rank))
    return torch.nn.functional.mse_loss(model(batch), batch.flip(1))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Seen:
    """A rank is halfway through a step, before gradients are summed, or has ended one: its optimizer has stepped."""

    what: str  # "halfway" or "ended"
    rank: int
    step: int
    pid: int
    at: float  # seconds of the monotonic clock
    num_summed: int = RANKS  # ranks whose gradients went into the step
    digest: str = ""  # of the parameters after it, where it was asked for


class Reporter:
    """Sends what a rank sees to the one that listens at a path."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(path)

    def report(self, what: str, step: int, num_summed: int = RANKS, digest: str = "") -> None:
        seen = Seen(what, self.rank, step, os.getpid(), time.monotonic(), num_summed, digest)
        self._socket.send(json.dumps(dataclasses.asdict(seen)).encode())

    def close(self) -> None:
        self._socket.close()


@functools.cache
def reporter_to(path: str, rank: int) -> Reporter:
    """The one of this process. It is no name of a cell, so healing has nothing to say of its socket."""
    return Reporter(path, rank)


# ---------------------------------------------------------------------------------------------------------------------
# Beside them


class Watch:
    """Hears what ranks report, and kills with SIGKILL those whose turn it is, halfway through their step.

    A context manager: its thread listens at `path` inside it.
    """

    def __init__(self, folder: Path, kills: Sequence[Kill] = (), *, last_step: int) -> None:
        self.path = str(folder / "seen.sock")
        self.seen: list[Seen] = []
        self.killed: list[tuple[float, int]] = []  # when, and which rank
        self.over = threading.Event()  # a rank has ended the last step
        self._due = list(kills)
        self._last_step = last_step
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Watch:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket.bind(self.path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self.path)  # behind everything that was reported
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while message := self._socket.recv(4096):
            seen = Seen(**json.loads(message))
            self.seen.append(seen)
            if seen.what == "ended" and seen.step >= self._last_step:
                self.over.set()
            if seen.what == "halfway" and self._due and _is_due(self._due[0], seen):
                self._due.pop(0)
                self.killed.append((time.monotonic(), seen.rank))
                os.kill(seen.pid, signal.SIGKILL)


def _is_due(kill: Kill, seen: Seen) -> bool:
    return seen.rank == kill.rank and seen.step >= kill.step


@dataclasses.dataclass(frozen=True)
class Course:
    """What became of a training.

    Attributes:
        seconds: from the end of the warm-up to the end of the last step, on the last rank that took part.
        survivors_s: of each kill: until all other ranks have ended a step again.
        all_s: of each kill: until all ranks have ended a step to which all contributed. Of those only whose rank was
            back before the last step had ended.
        num_not_back: kills of the others.
        num_failed: steps that a rank which lived throughout was halfway through and did not end: it took them again.
        num_left_out: ranks' batches that went into no step, for the rank was away.
        digests: of the parameters that ranks had in the end. One, if they are right.
    """

    seconds: float
    survivors_s: tuple[float, ...]
    all_s: tuple[float, ...]
    num_not_back: int
    num_failed: int
    num_left_out: int
    digests: frozenset[str]


def course_of(seen: Sequence[Seen], killed: Sequence[tuple[float, int]], *, last_step: int) -> Course:
    """What the reports of all ranks amount to. Pure.

    Raises:
        RuntimeError: the training did not get to its end, or ranks died that nobody had killed.
    """
    processes: dict[int, set[int]] = defaultdict(set)
    for one in seen:
        processes[one.rank].add(one.pid)
    kills = Counter(rank for _, rank in killed)
    if died := [rank for rank, pids in sorted(processes.items()) if len(pids) > 1 + kills[rank]]:
        raise RuntimeError(f"the processes of ranks {died} ended although nobody killed them")
    ended: dict[int, list[Seen]] = defaultdict(list)
    for one in seen:
        if one.what == "ended":
            ended[one.step].append(one)
    if WARM_UP_STEPS - 1 not in ended or last_step not in ended:
        raise RuntimeError(f"steps {WARM_UP_STEPS - 1} and {last_step} were not both ended, only {sorted(ended)}")
    counted = range(WARM_UP_STEPS, last_step + 1)
    living = set(range(RANKS)) - {rank for _, rank in killed}
    halfway = Counter((one.rank, one.step) for one in seen if one.what == "halfway" and one.rank in living)
    survivors = [_first_end(ended, at, set(range(RANKS)) - {rank}, 0) for at, rank in killed]
    everyone = [_first_end(ended, at, set(range(RANKS)), RANKS) for at, _ in killed]
    return Course(
        seconds=_end(ended[last_step]) - _end(ended[WARM_UP_STEPS - 1]),
        survivors_s=tuple(end - at for end, (at, _) in zip(survivors, killed, strict=True) if end is not None),
        all_s=tuple(end - at for end, (at, _) in zip(everyone, killed, strict=True) if end is not None),
        num_not_back=everyone.count(None),
        num_failed=max(
            sum(times - 1 for (rank, step), times in halfway.items() if rank == one and step in counted)
            for one in living
        ),
        num_left_out=sum(RANKS - max((one.num_summed for one in ended[step]), default=0) for step in counted),
        digests=frozenset(one.digest for one in ended[last_step]),
    )


def _end(seen: Sequence[Seen]) -> float:
    return max(one.at for one in seen)


def _first_end(ended: dict[int, list[Seen]], after: float, ranks: set[int], num_summed: int) -> float | None:
    """When these ranks had all ended the first step that they ended after a time, with so many gradients in it; None:
    there was none."""
    for step in sorted(ended):
        later = [one for one in ended[step] if one.at > after and one.rank in ranks and one.num_summed >= num_summed]
        if {one.rank for one in later} == ranks:
            return _end(later)
    return None
