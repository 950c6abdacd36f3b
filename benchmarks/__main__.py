"""Runs benchmarks one after the other, each in a process of its own, and writes what they found to build/bench.json.

python -m benchmarks [NAME ...] [--quick]
python -m benchmarks --gpu
python -m pyperf compare_to before.json build/bench.json --table
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pyperf

from benchmarks import workbench
from benchmarks.report import verdict

# Cheapest first.
SUITE = (
    "pure", "round_trip", "startup", "stacks", "cell_round_trip", "stop", "heal", "bulk", "groups", "checkpoints",
    "probes", "sentinel", "elastic", "recording", "resilient", "actors", "tensors", "training",
    "strategies", "feed", "scale",
)  # fmt: skip
ON_GPUS = ("gpu",)

# Seconds after which a benchmark that has not ended is told to. The longest, strategies, takes 15 minutes on two cores.
DEADLINE_S = 1800.0
# ... and then how long it may take to stop what it started.
GRACE_S = 30.0

OUTPUT = workbench.ROOT / "build" / "bench.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITE)}; all by default")
    parser.add_argument("--gpu", action="store_true", help="those that run on GPUs, instead")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that they work, not how fast")
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where the figures go (%(default)s)")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in SUITE + ON_GPUS]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(SUITE + ON_GPUS)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what runs, on the way out
    found: list[pyperf.Benchmark] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or (ON_GPUS if chosen.gpu else SUITE):
            output = Path(folder) / f"{name}.json"
            if call([f"benchmarks.{name}", "--json", str(output), *(["--quick"] if chosen.quick else [])]):
                found += pyperf.BenchmarkSuite.load(str(output))
            else:
                failed.append(name)
            print(flush=True)
    if found:
        suite = pyperf.BenchmarkSuite(found)
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        suite.dump(str(chosen.json), replace=True)
        print("\n".join(verdict(suite)))
        print(f"everything is in {chosen.json}")
    if chosen.quick:
        print("a quick run measures little: what it says of promises is not to be quoted")
    if failed:
        print(f"did not run to their end: {', '.join(failed)}")
    return 1 if failed else 0


def call(module: list[str]) -> bool:
    """Run a module of ours, in a process that no other benchmark has warmed or filled; whether it ended well."""
    process = subprocess.Popen([sys.executable, "-m", *module], cwd=workbench.ROOT)
    try:
        return process.wait(DEADLINE_S) == 0
    except subprocess.TimeoutExpired:
        print(f"{module[0]} took more than {DEADLINE_S:.0f} s and is stopped", flush=True)
        return False
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
