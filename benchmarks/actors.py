"""Actors in Meshbook, Monarch and Ray: calls, queued messages, large arguments, and how soon new processes answer.

Each system lives in a process of its own, and they are asked in turns. One that is not installed is absent, and the
report says so; `make bench PEERS=1` installs the others.

- a call: every one of n actors runs an empty method and the caller has all answers;
- 10,000 broadcasts: as many messages without an answer to each of 4 actors, and one call behind them;
- 64 MB: a torch tensor as the argument of a call on 4 actors, each of which sums it;
- spawn: 4 new processes with an actor in each, until all have answered; once with actors that import torch.

    python -m benchmarks.actors [--quick]
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.contestants import OURS, START_S, Calls, System, ask_all, promise_share, start_all
from benchmarks.report import Report

SIZES = (1, 4, 8, 16)
RANKS = 4
NUM_BROADCASTS = 10_000
NUM_BYTES = 64_000_000
_RAY_STORE_BYTES = 300_000_000


def idle(Base: type, mark: Callable[[Any], Any]) -> type:
    """A class of actors that do next to nothing, for any of the systems. Travels by value, as a notebook's does."""

    class Idle(Base):  # type: ignore[misc]
        def __init__(self, with_torch: bool = False) -> None:
            self.num_messages = 0
            if with_torch:
                import torch

                torch.set_num_threads(1)
                self.weights = torch.zeros(8)

        @mark
        def nothing(self) -> None: ...

        @mark
        def cell(self, source: str) -> None:
            exec(source, self.__dict__)

        @mark
        def note(self, number: int) -> None:
            self.num_messages += number

        @mark
        def noted(self) -> int:
            return self.num_messages

        @mark
        def total(self, values: Any) -> float:
            import torch

            torch.set_num_threads(1)
            return float(values.sum())

        @mark
        def length(self, data: bytes) -> int:
            return len(data)

    return Idle


@functools.cache
def _values() -> Any:
    """Made when first asked for: until then the program has no torch, and neither have the processes that it starts."""
    import torch

    torch.set_num_threads(1)
    return torch.ones(NUM_BYTES // 4)


@functools.cache
def _bytes() -> bytes:
    return bytes(range(250)) * (NUM_BYTES // 250)


# ---------------------------------------------------------------------------------------------------------------------
# The same few verbs for each system


class Monarchs:
    """Meshbook and Monarch: the same program, with another import. Actors: their processes, and the mesh of them."""

    def __init__(self, module: Any) -> None:
        self._host, self._Idle = module.this_host(), idle(module.Actor, module.endpoint)

    def spawn(self, number: int, *args: Any) -> Any:
        procs = self._host.spawn_procs({"gpus": number})
        return procs, procs.spawn("idle", self._Idle, *args)

    def call(self, actors: Any, method: str, *args: Any) -> Any:
        return getattr(actors[1], method).call(*args).get().values()

    def send(self, actors: Any, method: str, *args: Any) -> None:
        getattr(actors[1], method).broadcast(*args)

    def share(self, values: Any) -> Any:
        return values

    def end(self, actors: Any) -> None:
        actors[0].stop().get()


class Rays:
    """An actor is a process of its own there; a large argument is put into its object store once."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._Idle = system.remote(num_cpus=0)(idle(object, lambda method: method))
        self.share = system.put

    def spawn(self, number: int, *args: Any) -> Any:
        return [self._Idle.remote(*args) for _ in range(number)]

    def call(self, actors: Any, method: str, *args: Any) -> Any:
        return self._system.get([getattr(actor, method).remote(*args) for actor in actors])

    def send(self, actors: Any, method: str, *args: Any) -> None:
        for actor in actors:
            getattr(actor, method).remote(*args)

    def end(self, actors: Any) -> None:
        for actor in actors:
            self._system.kill(actor)


def _calls(verbs: Monarchs | Rays, ranks: int) -> Calls:
    actors = verbs.spawn(ranks)
    heard = 0

    def broadcasts() -> None:
        nonlocal heard
        for _ in range(NUM_BROADCASTS):
            verbs.send(actors, "note", 1)
        heard += NUM_BROADCASTS
        assert list(verbs.call(actors, "noted")) == [heard] * ranks

    def argument() -> None:
        assert list(verbs.call(actors, "total", verbs.share(_values()))) == [NUM_BYTES // 4] * ranks

    def plain_bytes() -> None:
        assert set(verbs.call(actors, "length", verbs.share(_bytes()))) == {NUM_BYTES}

    def spawn(with_torch: bool) -> float:
        started = time.perf_counter()
        new = verbs.spawn(RANKS, with_torch)
        verbs.call(new, "nothing")
        taken = 1e3 * (time.perf_counter() - started)
        verbs.end(new)
        return taken

    calls: Calls = {
        "call": lambda: verbs.call(actors, "nothing"),
        "cell": lambda: verbs.call(actors, "cell", "pass"),
    }
    if ranks == RANKS:
        calls |= {
            "broadcasts": broadcasts,
            "argument": argument,
            "bytes": plain_bytes,
            "spawn": lambda: spawn(False),
            "spawn with torch": lambda: spawn(True),
        }
    return calls


@contextlib.contextmanager
def same_program(module: str, ranks: int, folder: Path) -> Iterator[Calls]:
    actor = importlib.import_module(module)
    try:
        yield _calls(Monarchs(actor), ranks)
    finally:
        actor.shutdown_context().get()


@contextlib.contextmanager
def ray(ranks: int, folder: Path) -> Iterator[Calls]:
    """Ray with as little as actors need: a worker for each CPU that it is given, and actors ask for none."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",  # else it leaves a token in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_raylet_start_wait_time_s": f"{START_S:.0f}",  # it gives up after 60 s, and two busy cores need as long
    }
    import ray as system

    system.init(
        num_cpus=min(ranks, os.cpu_count() or 1),
        object_store_memory=_RAY_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder / "ray"),
    )
    try:
        yield _calls(Rays(system), ranks)
    finally:
        system.shutdown()


PEERS: dict[str, System] = {"Monarch": functools.partial(same_program, "monarch.actor"), "Ray": ray}
SYSTEMS: dict[str, System] = {OURS: functools.partial(same_program, "meshbook.actor"), **PEERS}

# What is asked of four actors: words, rounds, the limit as a share of each rival's time.
QUESTIONS = {
    "broadcasts": (f"{NUM_BROADCASTS:,} broadcasts to {RANKS}", 3, {"Monarch": 1.0, "Ray": 1.0}),
    "spawn": (f"spawn {RANKS}", 4, {"Monarch": 1.0}),
    "argument": (f"64 MB to {RANKS}", 10, {"Monarch": 0.5}),
    "bytes": (f"64 MB of bytes to {RANKS}", 10, {"Monarch": 0.5}),
    "spawn with torch": (f"spawn {RANKS} with torch", 2, {"Monarch": 1.0}),
}


def measure(quick: bool, folder: Path) -> Report:
    report = Report("actors", "the same few lines on each system, asked in turns")
    for ranks in (RANKS,) if quick else SIZES:
        with contextlib.ExitStack() as running:
            started = start_all(report, SYSTEMS, ranks, folder, running)
            ask_all(report, started, "call", f"call to {ranks}", 10 if quick else 200)
            promise_share(report, f"call to {ranks}", {"Monarch": 1.0, "Ray": 1.0}, started)
            for kind, (words, rounds, limits) in QUESTIONS.items() if ranks == RANKS else ():
                ask_all(report, started, kind, words, 2 if quick else rounds)
                promise_share(report, words, limits, started)
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
