"""What all benchmarks stand on: surroundings of their own, rounds in turns, a look at processes, one command line.

Knows nothing of what is measured, and of Meshbook only where it finds its runtime folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.report import Report

ROOT = Path(__file__).resolve().parent.parent

# Seconds that a mesh may live without its benchmark: one that is killed leaves nothing behind for long.
ORPHAN_TTL_S = 10.0

Sample = TypeVar("Sample")  # what one round of a contestant gives: a number, or several


@contextlib.contextmanager
def surroundings() -> Iterator[Path]:
    """A runtime folder, settings and kernels that are nobody else's, for this process and all that it starts.

    Gives a folder to work in; what is below it is removed at the end.
    """
    before = dict(os.environ)
    # Short: the path of a unix socket has 107 bytes, and meshes open some a few folders down.
    home = Path(tempfile.mkdtemp(prefix="mbb", dir="/tmp"))
    try:
        kernels = home / "jupyter" / "kernels"
        kernels.mkdir(parents=True)
        (kernels / "meshbook").symlink_to(ROOT / "kernelspec")
        os.environ.update(
            MESHBOOK_RUNTIME_DIR=str(home / "run"),
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), before.get("PYTHONPATH")])),
            JUPYTER_PATH=str(kernels.parent),
            JUPYTER_PLATFORM_DIRS="1",
            JUPYTER_RUNTIME_DIR=str(home / "jupyter-run"),
            JUPYTER_DATA_DIR=str(home / "jupyter-data"),
            JUPYTER_CONFIG_DIR=str(home / "jupyter-config"),
            IPYTHONDIR=str(home / "ipython"),
        )
        (home / "meshbook.toml").write_text(f"orphan_ttl_s = {ORPHAN_TTL_S}\n")  # for kernels, which start here
        yield home
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(home, ignore_errors=True)


def take_turns(
    contestants: Mapping[str, Callable[[], Sample]], rounds: int, *, warm_up: int = 3
) -> dict[str, list[Sample]]:
    """Measure each contestant once per round, another one first in every round; what they gave, by name.

    The first `warm_up` rounds are not counted.
    """
    names = list(contestants)
    taken: dict[str, list[Sample]] = {name: [] for name in names}
    for round_ in range(warm_up + rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            value = contestants[name]()
            if round_ >= warm_up:
                taken[name].append(value)
    return taken


def milliseconds(act: Callable[[], Any]) -> Callable[[], float]:
    """A contestant: how long `act` takes."""

    def measure() -> float:
        started = time.perf_counter()
        act()
        return 1e3 * (time.perf_counter() - started)

    return measure


# ---------------------------------------------------------------------------------------------------------------------
# Processes, seen from outside


def pss_mib(pid: int) -> float:
    """Its memory, what it shares counted in parts: a page that four processes map is a quarter of a page in each."""
    return float(psutil.Process(pid).memory_full_info().pss / 2**20)


def mesh_pss_mib(supervisor_pid: int) -> float:
    """Of a mesh's supervisor and all that it started: hosts, fork servers, stores and ranks."""
    supervisor = psutil.Process(supervisor_pid)
    return sum(pss_mib(process.pid) for process in (supervisor, *supervisor.children(recursive=True)))


def rss_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, zmq's own threads included; to the nanosecond where the scheduler tells."""
    try:
        spent = [int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except (OSError, IndexError):
        spent = []
    if any(spent):
        return sum(spent) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------------------------------------------------------------


def run_alone(measure: Callable[[bool, Path], Report], description: str | None) -> None:
    """A benchmark's command line: `python -m benchmarks.NAME [--quick] [--json FILE]`.

    Args:
        measure: called with whether to be quick, and a folder to work in.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="also write everything here, as pyperf does")
    chosen = parser.parse_args()
    # Told to end, it ends as if by Ctrl-C: every `with` stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with surroundings() as folder:
        report = measure(chosen.quick, folder)
    print("\n".join(report.lines()), flush=True)
    if chosen.json is not None:
        report.suite().dump(str(chosen.json), replace=True)
