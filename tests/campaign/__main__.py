"""The fault campaign: random faults in random work, and what must be so after each.

    python -m tests.campaign --seed 7 --faults 200
    python -m tests.campaign --seed 7 --only 17

One line for each fault, and a table at the end. Counted are hangs, lost state, leaks and wrong blame; the status is 1
if any of these is not 0, and each is printed with the command that repeats it. What is drawn depends on the seed and
the number of the fault alone. No process is left, however it ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Any

from tests.conftest import fork_server, isolate
from tests.leaks import Run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=30, help="how many")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="the faults of these numbers, in this order")
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="of the drawn ones only those of these kinds")
    parser.add_argument("--work", nargs="+", metavar="NAME", help="... in these works")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    from tests.campaign.surroundings import small_file_systems

    run = Run()
    isolate(run)
    with small_file_systems(run) as can_fill:
        try:
            with fork_server(run.home):
                status = _run_all(run, can_fill, options)
        finally:
            left = run.wait_until_clean()
            run.clean()
    if left:
        print("left behind, and ended now:", *left, sep="\n  ")
    return 1 if left else status


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _run_all(run: Run, can_fill: bool, options: argparse.Namespace) -> int:
    from tests.campaign.campaign import Campaign
    from tests.campaign.draws import draw_case
    from tests.campaign.faults import FAULTS
    from tests.campaign.report import describe, how_to_repeat, table
    from tests.campaign.surroundings import Surroundings

    draws = [draw_case(options.seed, number) for number in options.only or range(options.faults)]
    if options.fault:
        draws = [draw for draw in draws if draw.fault in options.fault]
    if options.work:
        draws = [draw for draw in draws if draw.work in options.work]
    surroundings = Surroundings(run, can_fill=can_fill)
    results, began = [], time.monotonic()
    with Campaign(surroundings) as campaign:
        for draw in draws:
            before = list(campaign.meshes.seen.get(FAULTS[draw.fault].mesh, ()))
            result = campaign.run(draw)
            results.append(result)
            print(describe(result), flush=True)
            if result.problems:
                print(how_to_repeat(draw, before), flush=True)
    surroundings.close()
    print(f"\n{table(results)} ({time.monotonic() - began:.0f} s, seed {options.seed})", flush=True)
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
