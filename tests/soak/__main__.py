"""Random programs, chains of operations, faults and hangs on real meshes, for as long as one likes.

    python -m tests.soak --minutes 60                     (make soak MINUTES=60)
    python -m tests.soak --only faults:17 tensors:4       these again, in this order

Kinds take turns. Each case depends on its kind and seed alone, and on what its meshes have run before, and is one
line; a failing one is shown with the commands that repeat it. A wrong number is run again at once, by its seed, and
ends the soak. The table at the end has the rate at which each kind fails, as an interval of 95 %; the JSON file has the
seeds, the failures and the load. The status is 1 if anything failed. No process is left, however it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import fork_server, isolate
from tests.leaks import Run
from tests.soak.tally import Case, how_to_repeat, report, table

# Seconds of one kind, before the next one has its turn with new meshes.
TURN_S = 90.0


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    from tests.campaign.surroundings import Surroundings, small_file_systems

    run = Run()
    isolate(run)
    try:
        with small_file_systems(run) as can_fill:
            try:
                with fork_server(run):
                    surroundings = Surroundings(run, can_fill=can_fill)
                    status = soak(options, surroundings)
                    surroundings.close()
            finally:
                left = run.wait_until_clean()
                run.clean()
    finally:
        run.clean()  # again: of its folders one was a file system of its own
    if left:
        print("left behind, and ended now:", *left, sep="\n  ")
    return 1 if left else status


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="of the first cases; without it other ones each time")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="some kinds only")
    parser.add_argument("--only", nargs="+", type=named, metavar="KIND:SEED", help="these cases, in this order")
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"))
    return parser.parse_args()


def named(text: str) -> tuple[str, int]:
    kind, _, seed = text.partition(":")
    return kind, int(seed)


def soak(options: argparse.Namespace, surroundings: Any) -> int:
    from tests.soak.kinds import Kind, kinds

    table_of_kinds = kinds(surroundings)
    names = options.kinds or list(table_of_kinds)
    if unknown := {*names, *(kind for kind, _ in options.only or ())} - table_of_kinds.keys():
        print(f"There is no kind {', '.join(sorted(unknown))}; there are {', '.join(table_of_kinds)}.")
        return 2
    first = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    until = time.monotonic() + options.minutes * 60
    cases: list[Case] = []
    began = time.time()
    current: Kind | None = None
    try:
        turns: Iterator[tuple[str, Iterator[int]]] = only(options.only) if options.only else take_turns(names, first)
        for name, seeds in turns:
            current = table_of_kinds[name]()
            turn_ends, before = min(until, time.monotonic() + TURN_S), list[int]()
            for seed in seeds:
                case = run_case(name, seed, current, tuple(before))
                before.append(seed)
                if case.verdict.is_wrong:
                    current.close()
                    again = run_case(name, seed, current, ()).verdict
                    case = Case(name, seed, case.verdict, case.seconds, case.load, case.before, again)
                cases.append(case)
                show(case)
                if case.verdict.is_wrong or (not options.only and time.monotonic() > turn_ends):
                    break
            current.close()
            current = None
            if cases[-1].verdict.is_wrong or (not options.only and time.monotonic() > until):
                break
    finally:
        if current is not None:
            current.close()
        of_the_run = {"began": began, "minutes": (time.time() - began) / 60, "seed": first, "cores": os.cpu_count()}
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(report(cases, **of_the_run), indent=1) + "\n")
    print(f"\n{table(cases)}\n\n{options.json} has the seeds, from {first}.", flush=True)
    return 1 if any(case.verdict.failure for case in cases) else 0


def take_turns(names: list[str], first: int) -> Iterator[tuple[str, Iterator[int]]]:
    """Kinds in turn, without end; each goes on at the seed where it stood."""
    seeds = {name: counting(first) for name in names}
    while True:
        yield from seeds.items()


def counting(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def only(wanted: list[tuple[str, int]]) -> Iterator[tuple[str, Iterator[int]]]:
    """What is named, on the same meshes where one kind follows itself."""
    while wanted:
        kind = wanted[0][0]
        num = next((at for at, (other, _) in enumerate(wanted) if other != kind), len(wanted))
        yield kind, iter([seed for _, seed in wanted[:num]])
        wanted = wanted[num:]


def run_case(name: str, seed: int, kind: Any, before: tuple[int, ...]) -> Case:
    began = time.monotonic()
    verdict = kind.run(seed)
    return Case(name, seed, verdict, time.monotonic() - began, os.getloadavg()[0], before)


def show(case: Case) -> None:
    print(case, flush=True)
    if case.verdict.failure:
        print(case.verdict.failure, how_to_repeat(case), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
