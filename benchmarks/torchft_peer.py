"""torchft, as a peer of `mesh.heal()`: replica groups of one process each, a lighthouse, and a loop that starts again
what has died, as torchelastic does.

It is measured where it is installed: beside Meshbook, or in the environment whose Python MESHBOOK_TORCHFT_PYTHON names.
This file is also what its processes run, there:

    python -m benchmarks.torchft_peer lighthouse HEARTBEAT_MS JOIN_MS
    python -m benchmarks.torchft_peer rank RANK SOCKET LIGHTHOUSE LAST_STEP
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.faulty_training import (
    RANKS,
    WORK_S,
    Course,
    Kill,
    Reporter,
    Watch,
    course_of,
    digest,
    loss_of,
    make_model,
    make_optimizer,
)  # fmt: skip

PYTHON_VARIABLE = "MESHBOOK_TORCHFT_PYTHON"
ROOT = Path(__file__).resolve().parent.parent


class Timings(NamedTuple):
    """Milliseconds after which the lighthouse goes on without a replica."""

    heartbeat: int  # that has sent none: it is dead
    join: int  # that lives, but does not ask for the next step


# As torchft's README starts its lighthouse, the heartbeat's as torchft has it; and five heartbeats, for both.
README, SHORT = Timings(heartbeat=5000, join=10_000), Timings(heartbeat=500, join=500)

_QUORUM_TICK_MS = 100  # as in the README
# Seconds between looks at processes that may have died. torchelastic takes 0.1 s.
_MONITOR_S = 0.02
# Seconds that its operations may take; far above what they take.
_TIMEOUT_S, _START_S, _TRAINING_S = 30, 120.0, 90.0


def python() -> str:
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def why_absent() -> str:
    """Why torchft cannot be measured here; empty if it can."""
    tried = _spawn("-c", "import torchft", stderr=subprocess.PIPE)
    _, errors = tried.communicate()
    if tried.returncode == 0:
        return ""
    last = (errors.strip().splitlines() or ["it ended without a word"])[-1]
    return f"{python()} cannot import torchft ({last}); install it there, or name another Python in {PYTHON_VARIABLE}"


def version() -> str:
    """Its distribution and the version of that."""
    source = (
        "from importlib.metadata import distributions\n"
        "print(*(f'{one.name} {one.version}' for one in distributions() if one.name in ('torchft', 'torchft-nightly')))"
    )
    return _spawn("-c", source, stderr=subprocess.DEVNULL).communicate()[0].strip()


def train(folder: Path, kills: Sequence[Kill], *, last_step: int, timings: Timings) -> Course:
    """Train on four replica groups; those that are killed are started again. Blocks.

    Raises:
        RuntimeError: it did not come up, or not to its end; or the parameters differ between replicas in the end.
    """
    with contextlib.ExitStack() as running:
        watch = running.enter_context(Watch(folder, kills, last_step=last_step))
        lighthouse = running.enter_context(_process(["lighthouse", *map(str, timings)]))
        address = _line(lighthouse)
        commands = [["rank", str(rank), watch.path, address, str(last_step)] for rank in range(RANKS)]
        processes = [running.enter_context(_process(command)) for command in commands]
        for process in processes:
            _line(process)
        for process in processes:
            _go(process)
        deadline = time.monotonic() + _TRAINING_S
        while any(process.poll() != 0 for process in processes) and not watch.over.is_set():
            if time.monotonic() > deadline:
                raise RuntimeError(f"torchft has not ended step {last_step} after {_TRAINING_S:.0f} s")
            for rank, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    processes[rank] = running.enter_context(_process(commands[rank]))
                    _go(processes[rank])
            time.sleep(_MONITOR_S)
        for process in processes:  # all that take part in the last step end it together
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    return course_of(watch.seen, watch.killed, last_step=last_step)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """One that ends with its standard input: with this process, however that ends."""
    process = _spawn("-m", "benchmarks.torchft_peer", *command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _spawn(*arguments: str, stderr: int) -> subprocess.Popen[str]:
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [python(), *arguments],
        cwd=ROOT,
        env=surroundings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def _line(process: subprocess.Popen[str]) -> str:
    """What it says when it is ready. Blocks."""
    assert process.stdout is not None
    timer = threading.Timer(_START_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline().strip()
    finally:
        timer.cancel()
    if not line:
        raise RuntimeError(f"a process of torchft did not come up: {process.args!r}")
    return line


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


# ---------------------------------------------------------------------------------------------------------------------
# What its processes do


def _lighthouse(timings: Timings) -> None:
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(
        bind="0.0.0.0:0",
        min_replicas=1,
        join_timeout_ms=timings.join,
        quorum_tick_ms=_QUORUM_TICK_MS,
        heartbeat_timeout_ms=timings.heartbeat,
    )
    print(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}", flush=True)
    sys.stdin.read()


def _rank(rank: int, path: str, lighthouse: str, last_step: int) -> None:
    """The loop of torchft's README."""
    torchft = importlib.import_module("torchft")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=_TIMEOUT_S)
    model, optimizer = make_model(), None

    def state() -> dict[str, object]:
        assert optimizer is not None
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        assert optimizer is not None
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"rank_{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timeout,
        quorum_timeout=timeout,
    )
    optimizer = torchft.Optimizer(manager, make_optimizer(model))
    parallel = torchft.DistributedDataParallel(manager, model)
    reporter = Reporter(path, rank)
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    while (step := manager.current_step()) <= last_step:
        optimizer.zero_grad()
        loss = loss_of(parallel, step, rank)
        time.sleep(WORK_S / 2)
        reporter.report("halfway", step)
        time.sleep(WORK_S / 2)
        torch.autograd.backward(loss)
        optimizer.step()
        if (ended := manager.current_step() - 1) >= step:  # one that was healed has taken over the others' count
            last = digest(model) if ended == last_step else ""
            reporter.report("ended", ended, manager.num_participants(), last)
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "lighthouse":
        _lighthouse(Timings(*map(int, given)))
    else:
        _rank(int(given[0]), given[1], given[2], int(given[3]))
