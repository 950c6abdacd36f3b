"""A loop of one tiny operation in Monarch's tensor engine: `python monarch_tensors.py RANKS OPERATIONS`. Stands alone.

The last line of its output is JSON: microseconds per operation, CPU of the issuing thread and end to end.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from monarch import fetch_shard
from monarch.actor import this_host


def main(ranks: int, operations: int) -> None:
    processes = this_host().spawn_procs({"gpus": ranks})
    with processes.activate():
        a = torch.ones(4, 4)
        fetch_shard(a + a).result(timeout=60)
        best = {"cpu_us": float("inf"), "wall_us": float("inf")}
        for _ in range(3):
            started, spent = time.perf_counter(), time.thread_time()
            for _ in range(operations // 3):
                b = a + a
            spent = time.thread_time() - spent
            fetch_shard(b).result(timeout=60)
            wall = time.perf_counter() - started
            best["cpu_us"] = min(best["cpu_us"], 1e6 * spent / (operations // 3))
            best["wall_us"] = min(best["wall_us"], 1e6 * wall / (operations // 3))
    print(json.dumps(best), flush=True)
    os._exit(0)  # its own end waits longer than the measurement


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
