"""What watching costs: a tiny all_reduce through a `WatchedGroup`, against the same group's plain one beneath it.

Two ranks, blocks of both kinds by turns in one run, over the same connections; the best block of each kind counts,
since the machine's other work can only add. The processor time is the main thread's: what a training loop cannot have.

    python -m benchmarks.groups [--rounds 60] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

NUM_RANKS = 2
BLOCK = 200  # collectives per timed block: long enough that reading clocks is nothing, short enough to find quiet ones


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="timed blocks of each kind (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, not how fast")
    asked = parser.parse_args()
    rounds = 5 if asked.quick else asked.rounds
    fork = multiprocessing.get_context("spawn")
    answer = fork.SimpleQueue()
    folder = tempfile.TemporaryDirectory()
    where = f"ipc://{folder.name}/store.sock"
    processes = [fork.Process(target=serve, args=(where,), daemon=True)]
    processes[0].start()
    processes += [fork.Process(target=be_rank, args=(rank, where, rounds, answer)) for rank in range(NUM_RANKS)]
    for process in processes[1:]:
        process.start()
    best: dict[str, tuple[float, float]] = answer.get()
    for process in processes[1:]:
        process.join()
    processes[0].kill()
    processes[0].join()
    for call in ("all_reduce", "all_reduce(async_op=True).wait()"):
        (plain_cpu, plain_wall), (watched_cpu, watched_wall) = best[f"plain {call}"], best[f"watched {call}"]
        print(
            f"{call}: main thread {plain_cpu:.1f} us plain, {watched_cpu:.1f} us watched "
            f"(+{watched_cpu - plain_cpu:.1f} us, x{watched_cpu / plain_cpu:.2f}); "
            f"wall {plain_wall:.0f} us plain, {watched_wall:.0f} us watched (x{watched_wall / plain_wall:.2f})"
        )
    print(f"ring alone, begin and finish: {best['ring'][0]:.1f} us")


def serve(address: str) -> None:
    import zmq

    from meshbook.supervisor.store import StoreServer
    from meshbook.wire.loop import Loop

    loop = Loop()
    server = StoreServer(loop, zmq.Context(), address, "token")
    loop.run()  # until killed
    server.close()


def be_rank(rank: int, address: str, rounds: int, answer: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    import zmq

    from meshbook.rank.groups import ProcessGroups
    from meshbook.rank.ring import CollectiveRing, GroupLabel
    from meshbook.rank.store import MeshStore

    ring = CollectiveRing()
    groups = ProcessGroups(ring)
    device = torch.device("cpu")
    store = MeshStore(zmq.Context(), address, "token")
    place = {"rank": rank, "world_size": NUM_RANKS, "store": store, "device": device}
    groups.form(1, **place, timeout_s=60.0, axes={"rank": NUM_RANKS})  # type: ignore[arg-type]
    watched: Any = dist.group.WORLD
    x = torch.ones(10)
    label = GroupLabel("0", range(NUM_RANKS))

    def synchronous(group: Any) -> None:
        for _ in range(BLOCK):
            dist.all_reduce(x, group=group)

    def asynchronous(group: Any) -> None:
        for _ in range(BLOCK):
            dist.all_reduce(x, group=group, async_op=True).wait()

    def ring_alone(_: Any) -> None:
        for _ in range(BLOCK):
            ring.finish(ring.begin("all_reduce", label, [x]))

    kinds: dict[str, tuple[Callable[[Any], None], Any]] = {
        "plain all_reduce": (synchronous, watched.inner),
        "watched all_reduce": (synchronous, watched),
        "plain all_reduce(async_op=True).wait()": (asynchronous, watched.inner),
        "watched all_reduce(async_op=True).wait()": (asynchronous, watched),
        "ring": (ring_alone, None),
    }
    best = {kind: (float("inf"), float("inf")) for kind in kinds}
    for _ in range(rounds):
        for kind, (run, group) in kinds.items():
            dist.barrier()
            cpu, wall = time.thread_time(), time.perf_counter()
            run(group)
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            best[kind] = min(best[kind][0], cpu / BLOCK * 1e6), min(best[kind][1], wall / BLOCK * 1e6)
    if rank == 0:
        answer.put(best)
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    main()
