"""Runs benchmarks one after the other, each in a process of its own, and writes what they found to build/bench.json.

python -m benchmarks [NAME ...] [--quick] [--peers]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report, verdict

# Those that promises are about, cheapest first.
SUITE = (
    "merge_stacks", "message_round_trip", "startup", "stacks", "cell_round_trip", "stop", "bulk", "flood", "why",
    "dashboard", "probes", "actor_buffers", "actors", "tensors", "training", "feed", "scale",
)  # fmt: skip

# Measurements of one part each. They print tables of their own; after them, what they are asked in a quick run.
PARTS: dict[str, Sequence[str]] = {
    "transfer": ("--mib", "16", "--rounds", "5"),
    "groups": ("--quick",),
    "folding": ("--quick",),
}

# With `--peers`, or by name: what rivals that are installed need for the same.
PEERS = "peers"

# Seconds after which a benchmark that has not ended is told to. The longest, scale, takes two minutes on two cores.
DEADLINE_S = 900.0
# ... and then how long it may take to stop what it started.
GRACE_S = 30.0

OUTPUT = workbench.ROOT / "build" / "bench.json"


def main() -> int:
    known = [*SUITE, *PARTS, PEERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all but {PEERS} by default")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that they work, not how fast")
    parser.add_argument("--peers", action="store_true", help="also what is installed of Monarch, Ray, ipyparallel")
    parser.add_argument("--json", type=Path, default=OUTPUT, help="where the figures go (%(default)s)")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    names = chosen.names or [*SUITE, *PARTS]
    if chosen.peers and PEERS not in names:
        names = [*names, PEERS]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what runs, on the way out
    found: dict[str, Any] = {"machine": workbench.machine(), "quick": chosen.quick, "benchmarks": {}}
    reports: list[Report] = []
    failed: list[str] = []
    for name in names:
        started = time.monotonic()
        data = run_part(name, chosen.quick) if name in PARTS else run_one(name, chosen.quick)
        if data is None:
            failed.append(name)
            continue
        data["took_s"] = round(time.monotonic() - started, 1)
        found["benchmarks"][name] = data
        if name not in PARTS:
            reports.append(Report.of_data(data))
        print(flush=True)
    found["machine"]["load_at_end"] = workbench.machine()["load"]
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(found, indent=1))
    print("\n".join(verdict(reports)))
    if chosen.quick:
        print("a quick run measures little: what it says of promises is not to be quoted")
    if failed:
        print(f"did not run to their end: {', '.join(failed)}")
    print(f"everything is in {chosen.json}")
    return 1 if failed else 0


def run_one(name: str, quick: bool) -> dict[str, Any] | None:
    """A benchmark of the suite; its figures, or None when it failed (it has said why)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        if not call([f"benchmarks.{name}", "--json", str(output), *(["--quick"] if quick else [])]):
            return None
        data: dict[str, Any] = json.loads(output.read_text())
        return data


def run_part(name: str, quick: bool) -> dict[str, Any] | None:
    """A measurement that says its figures itself; None when it failed."""
    arguments = list(PARTS[name]) if quick else []
    return {"arguments": arguments} if call([f"benchmarks.{name}", *arguments]) else None


def call(module: Sequence[str]) -> bool:
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
