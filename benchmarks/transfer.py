"""64 MB to four processes and back from one, in copies of 64 MB.

The data path alone: `dump` here, the small payload through a pipe, `load` there; no sockets, no kernel. The yardstick
is a copy into warm memory (np.copyto), made in every round, so that a busy machine slows both. The first round is cold
(fresh pages everywhere); the second reuses memory for the first time, which makes its pages huge, and is shown by
itself; warm is the median of the others. The readers share what cores there are.

    python -m benchmarks.transfer [--mib 64] [--readers 4] [--rounds 15]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.messages import Payload
from meshbook.wire.pickling import dump, load

KINDS: dict[str, Callable[[int], Any]] = {
    "numpy": lambda nbytes: np.ones(nbytes // 8),
    "torch": lambda nbytes: torch.ones(nbytes // 4),
}


class Steps:
    """Milliseconds of each step in each round."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def add(self, step: str, since: float) -> None:
        self.of.setdefault(step, []).append(1e3 * (time.perf_counter() - since))

    def table(self, yardstick: str) -> list[str]:
        copy_ms = statistics.median(self.of[yardstick])
        head = "".join(f"{name:>9}" for name in ("cold", "second", "warm"))
        lines = [f"{'':46}{'milliseconds':>27}   {'copies':>27}", f"{'':46}{head}   {head}"]
        for step, (cold, second, *others) in self.of.items():
            times = (cold, second, statistics.median(others))
            copies = "".join(f"{ms / copy_ms:9.1f}" for ms in times)
            lines.append(f"{step:46}{''.join(f'{ms:9.1f}' for ms in times)}   {copies}")
        return lines


def push(steps: Steps, kind: str, value: Any, pool: SegmentPool, readers: Sequence[Connection]) -> None:
    """One value to all readers, who let go of it at the end."""
    to = f"{kind} to {len(readers)}:"
    start = time.perf_counter()
    payload = dump(value, pool=pool, readers=len(readers))
    steps.add(f"{to} copied once", start)
    ask(readers, payload)
    steps.add(f"{to} all have it", start)
    ask(readers, "sum")
    steps.add(f"{to} all have summed all of it", start)
    start = time.perf_counter()
    ask(readers, "sum")
    steps.add(f"{to} (summing it again)", start)
    start = time.perf_counter()
    ask(readers[:1], "write")
    steps.add(f"{to} (one writes to all of it in place)", start)
    for released in ask(readers, "drop"):
        for segment in released:
            pool.release(segment)


def pull(steps: Steps, kind: str, owner: Connection, own: SegmentReader) -> None:
    """One value from the process that has it."""
    start = time.perf_counter()
    (payload,) = ask([owner], ("give", kind))
    value = load(payload, reader=own)
    steps.add(f"{kind} from one: here", start)
    value.sum()
    steps.add(f"{kind} from one: here and summed", start)
    del value
    ask([owner], ("release", kind, own.drain_released()))


def ask(readers: Sequence[Connection], request: object) -> list[Any]:
    for reader in readers:
        reader.send(request)
    return [reader.recv() for reader in readers]


def serve(connection: Connection) -> None:
    """A process that is given values, and gives one."""
    torch.set_num_threads(1)
    reader = SegmentReader()
    pools = {kind: SegmentPool() for kind in KINDS}
    value: Any = None
    own: dict[str, Any] = {}
    while True:
        answer: Any = None
        match connection.recv():
            case Payload() as payload:
                value = load(payload, reader=reader)
            case "sum":
                answer = float(value.sum())
            case "write":
                value += 1
            case "drop":
                value = None
                answer = reader.drain_released()
            case "own", kind, nbytes:
                own[kind] = KINDS[kind](nbytes)
            case "give", kind:
                answer = dump(own[kind], pool=pools[kind])
            case "release", kind, released:
                for segment in released:
                    pools[kind].release(segment)
            case None:
                return
        connection.send(answer)


def resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def run(mib: int, num_readers: int, rounds: int) -> None:
    torch.set_num_threads(1)
    start_method = multiprocessing.get_context("spawn")  # fresh processes: nothing is shared but what is sent
    pipes = [start_method.Pipe() for _ in range(num_readers)]
    processes = [start_method.Process(target=serve, args=(theirs,), daemon=True) for _, theirs in pipes]
    readers = [ours for ours, _ in pipes]
    for process in processes:
        process.start()
    values = {kind: make(mib << 20) for kind, make in KINDS.items()}
    source, target = np.ones(mib << 17), np.ones(mib << 17)
    # A virtual machine's memory is slow to touch for the first time ever, and cold is to mean fresh pages, not that.
    np.ones(mib << 21)
    ask(readers, "drop")  # they have started, and imported torch
    own = SegmentReader()
    # A pool for each kind, so that each has its own cold round.
    pools = {kind: SegmentPool() for kind in KINDS}
    for kind in KINDS:
        ask(readers[:1], ("own", kind, mib << 20))
    steps = Steps()
    for round_ in range(rounds):
        start = time.perf_counter()
        np.copyto(target, source)
        steps.add("a copy", start)
        for kind, value in values.items():
            if round_ == 1:
                resident = resident_mib()
            push(steps, kind, value, pools[kind], readers)
            pull(steps, kind, readers[0], own)
    print(f"{mib} MiB, {num_readers} readers, {os.cpu_count()} cores, {rounds} rounds")
    print("\n".join(steps.table("a copy")))
    print(f"resident memory here, from the second round to the last: {resident_mib() - resident:+.1f} MiB")
    for pool in pools.values():
        pool.close()
    for reader, process in zip(readers, processes, strict=True):
        reader.send(None)
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    run(chosen.mib, chosen.readers, max(3, chosen.rounds))


if __name__ == "__main__":
    main()
