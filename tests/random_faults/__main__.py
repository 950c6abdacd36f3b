"""Random programs with faults at random places, against one process.

    python -m tests.random_faults [--count 300] [--seed 1] [--kind cells training ...]
    python -m tests.random_faults --only cells:17 training:18

Kinds take turns, seed by seed. One line for each program; the failing ones with what was wrong and how to repeat them,
and the status is 1. No process is left, however it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.leaks import Run


def main() -> int:
    run = Run()
    os.environ.update(run.environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch: ranks share few cores
    root = str(Path(__file__).resolve().parent.parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, _end)
    try:
        return _run_all()
    finally:
        left = run.wait_until_clean()
        run.clean()
        if left:
            print("left behind, and ended now:", *left, sep="\n  ", file=sys.stderr)


def _program(text: str) -> tuple[str, int]:
    kind, _, seed = text.partition(":")
    return kind, int(seed)


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _run_all() -> int:
    from tests.random_faults.programs import KINDS, Runner

    parser = argparse.ArgumentParser(
        prog="python -m tests.random_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="some kinds only")
    parser.add_argument("--only", nargs="+", type=_program, metavar="KIND:SEED", help="these programs, in this order")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    programs = options.only or [(options.kind[seed % len(options.kind)], seed) for seed in seeds]
    right: Counter[str] = Counter()
    wrong: list[str] = []
    slowest, whole = (0.0, ""), time.monotonic()
    with Runner() as runner:
        for kind, seed in programs:
            began = time.monotonic()
            verdict = runner.run(kind, seed)
            took = time.monotonic() - began
            slowest = max(slowest, (took, f"{kind} {seed}"))
            print(f"{seed} {kind}: {verdict.fault or 'FAILED'}, {took:.1f} s", flush=True)
            if verdict.failure:
                wrong.append(f"{kind} {seed}")
                print(verdict.failure, flush=True)
            else:
                right[f"{kind}: {verdict.fault}"] += 1
    for name, number in sorted(right.items()):
        print(f"{number:5} {name}")
    print(
        f"{right.total()} right, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}; "
        f"{time.monotonic() - whole:.0f} s, the slowest {slowest[0]:.0f} s ({slowest[1]})"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
