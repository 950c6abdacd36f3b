"""What `%mesh nan on` costs: training steps of a GPT on 2 ranks, with the sentinel and without, by turns.

The step is `gpt.plain_step`: plain tensors, AdamW, one all_reduce of all gradients. CPU is what the ranks' main threads
spent; what is reported is the median of the pairs' ratios, with the interval in which it lies with 95 % certainty.

    python -m benchmarks.sentinel [--quick]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import workbench
from benchmarks.probes import median_ratio
from benchmarks.report import Report
from meshbook.controller.starting import create_mesh

RANKS = 2
SIZES = ((64, 2, 8, 32), (256, 4, 16, 64))  # width, layers, batch, length
LIMIT = 1.02  # of the larger one

SETUP = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks import gpt
from meshbook.rank.differences.sentinel import Sentinel

torch.set_num_threads(1)
groups = dist.group.WORLD._owner
sentinel = Sentinel(rank, globals(), groups.ring, groups.observers, print, lambda file: None)

def block(step, steps, watched):
    "CPU seconds of this thread for so many steps."
    if watched:
        sentinel.arm()
    dist.barrier()
    started = time.thread_time()
    for _ in range(steps):
        step()
    spent = time.thread_time() - started
    sentinel.disarm()
    return spent

def pairs(size, count, steps):
    "Of each pair: CPU seconds without the sentinel, and with it."
    step = gpt.plain_step(rank, world_size, device, *size)
    block(step, 2 * steps, True)
    found = []
    for number in range(count):
        first = bool(number % 2)
        spent = {{watched: block(step, steps, watched) for watched in (first, not first)}}
        found.append((spent[False], spent[True]))
    return found
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("sentinel", f"training steps of a GPT on {RANKS} ranks, with and without %mesh nan on")
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(SETUP.format(root=str(workbench.ROOT)))
        for size in SIZES:
            is_large = size == SIZES[-1]
            count, steps = (3, 1) if quick else (20, 2) if is_large else (30, 10)
            found = list(dict(mesh.run(f"pairs({size}, {count}, {steps})").values).values())
            without, watched = (
                [1e3 * sum(rank[pair][kind] for rank in found) / steps for pair in range(count)] for kind in (0, 1)
            )
            name = f"width {size[0]}, {size[1]} layers"
            plain = f"a step without it, {name}"
            report.add(plain, without, "ms")
            report.add(f"a step with it, {name}", watched, "ms", against=plain)
            ratio, low, high = median_ratio(watched, without)
            report.note(f"{name}, with it as a multiple of without: {ratio:.4f}, 95 % between {low:.4f} and {high:.4f}")
            if is_large:
                report.promise(f"CPU of a step with it, {name}, median of {count} pairs", ratio, LIMIT, "x")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
