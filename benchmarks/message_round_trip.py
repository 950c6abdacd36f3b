"""An empty call to four ranks, without a notebook: Meshbook, bare sockets and, where there is one, Monarch, in turns.

`mesh.execute(int)` pickles the call, goes through the supervisor to four ranks and comes back as one folded answer. The
first yardstick is a ROUTER that exchanges as many bytes with four processes directly; the second has a process between,
as every system has whose ranks outlive its client.

    python -m benchmarks.message_round_trip [--quick]
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from benchmarks import contestants, workbench
from benchmarks.report import Report

RANKS = 4
BARE, RELAYED, OURS, MONARCH = "bare ROUTER/DEALER", "ROUTER/DEALER through a relay", "Meshbook", "Monarch"
LIMIT = 4.0  # times a bare round trip


def measure(quick: bool, folder: Path) -> Report:
    report = Report("message_round_trip", f"an empty call to {RANKS} processes and back, without a notebook")
    names = [BARE, RELAYED, OURS]
    if contestants.is_installed(MONARCH):
        names.append(MONARCH)
    else:
        report.note("Monarch is not installed here, and is not compared: pip install torchmonarch")
    with contextlib.ExitStack() as running:
        started = {name: running.enter_context(contestants.Contestant(name, RANKS, folder)) for name in names}
        calls = {name: contestant.asker("call") for name, contestant in started.items()}
        cells = {name: contestant.asker("cell") for name, contestant in started.items() if "cell" in contestant.kinds}
        rounds = 20 if quick else 500
        for name, taken in workbench.take_turns(calls, rounds, warm_up=20).items():
            report.add(name, taken, "ms", against=None if name == BARE else BARE)
        for name, taken in workbench.take_turns(cells, rounds, warm_up=20).items():
            report.add(f"{name}: the cell `pass`", taken, "ms", against=BARE)
    report.promise(f"an empty call to {RANKS} ranks, in bare round trips", report.ratio(OURS), LIMIT, "x")
    if MONARCH in started:
        report.promise("the same, no slower than Monarch's", report.row(OURS).median, report.row(MONARCH).median, "ms")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
