"""Systems that are measured beside each other, each in a process of its own, which measures one round when asked to.

No other system's threads, imports or event loop disturb it. One that is not installed is absent from the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report

SPAWN = multiprocessing.get_context("spawn")  # nothing is shared but what is sent

# Seconds that a system may take to come up, to answer and to end. Ray needs up to a minute on two busy cores.
START_S, _ROUND_S, _STOP_S = 300.0, 60.0, 30.0

OURS = "Meshbook"

# What a system can be asked to do once, by name.
Calls = dict[str, Callable[[], Any]]
System = Callable[[int, Path], contextlib.AbstractContextManager[Calls]]


class Contestant:
    """A system in its own process; `close` ends both."""

    def __init__(self, name: str, start: System, ranks: int, folder: Path) -> None:
        """Start it and wait until it answers. Blocks.

        Raises:
            RuntimeError: it did not come up, and why.
        """
        self.name = name
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, start, ranks, folder))
        self._process.start()
        theirs.close()
        try:
            self.kinds: tuple[str, ...] = self._receive(START_S)
        except BaseException:
            self.close()
            raise

    def asker(self, kind: str) -> Callable[[], float]:
        """Measures one round: milliseconds by its own clock, or what the round itself gives as a float."""

        def ask() -> float:
            self._pipe.send(kind)
            return float(self._receive(_ROUND_S))

        return ask

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"{self.name} sent nothing for {timeout_s:.0f} s")
        try:
            received = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.name} has ended") from None
        if isinstance(received, str):
            raise RuntimeError(f"{self.name}: {received}")
        return received

    def close(self) -> None:
        self._pipe.close()  # it reads the end, and stops what it started
        end(self._process)


def start_all(
    report: Report, systems: Mapping[str, System], ranks: int, folder: Path, running: contextlib.ExitStack
) -> dict[str, Contestant]:
    """Those that are installed and come up; the report notes the others. A rival may try twice: Ray sometimes hangs."""
    started: dict[str, Contestant] = {}
    for name, start in systems.items():
        module = name.lower()
        if name in ("Monarch", "Ray", "ipyparallel") and importlib.util.find_spec(module) is None:
            report.note(f"absent from the table: {name} is not installed here (make bench PEERS=1 installs it)")
            continue
        for attempt in range(2):
            began = time.perf_counter()
            try:
                started[name] = Contestant(name, start, ranks, folder)
            except RuntimeError as error:
                if name == OURS:
                    raise
                if attempt:
                    report.note(f"absent from the table with {ranks} processes: {error}")
                continue
            running.callback(started[name].close)
            report.note(f"{name}, {ranks} processes: first answer after {time.perf_counter() - began:.1f} s")
            break
    return started


def ask_all(report: Report, started: Mapping[str, Contestant], kind: str, words: str, rounds: int) -> None:
    """A row for each system that can do `kind`, asked in turns; all as multiples of ours."""
    askers = {name: system.asker(kind) for name, system in started.items() if kind in system.kinds}
    for name, taken in workbench.take_turns(askers, rounds, warm_up=10 if rounds >= 100 else 1).items():
        report.add(f"{words}: {name}", taken, "ms", against=None if name == OURS else f"{words}: {OURS}")


def promise_share(report: Report, words: str, limits: Mapping[str, float], started: Iterable[str]) -> None:
    """Ours as a share of each rival's time is at most so much."""
    for rival in limits.keys() & set(started):
        share = report.row(f"{words}: {OURS}").median / report.row(f"{words}: {rival}").median
        report.promise(f"{words}, as a share of {rival}'s time", share, limits[rival], "x")


def _serve(pipe: Connection, start: System, ranks: int, folder: Path) -> None:
    """A contestant's process."""
    work = folder / f"c{os.getpid()}"
    work.mkdir()
    try:
        with start(ranks, work) as calls:
            next(iter(calls.values()))()
            pipe.send(tuple(calls))
            while True:
                call = calls[pipe.recv()]
                started = time.perf_counter()
                taken = call()
                pipe.send(taken if isinstance(taken, float) else 1e3 * (time.perf_counter() - started))
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")


def end(process: Any) -> None:
    """Wait for a process to end, and help it after a while."""
    process.join(_STOP_S)
    for force in (process.terminate, process.kill):
        if process.is_alive():
            force()
            process.join(_STOP_S)
    process.close()
