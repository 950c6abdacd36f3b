"""What decides and folds, without a process or a socket: lines per second, merged stacks, a diagnosis.

Stacks and collectives are made by hand: 1,024 ranks, 60 frames each. Lines are those of one host of four ranks, and
the supervisor's share of them as ranks grow.

    python -m benchmarks.pure [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.diagnose.findings import explain
from meshbook.diagnose.stack_tree import as_text, merge
from meshbook.fold.lines import FoldMerger, LineFolder
from meshbook.fold.outcomes import fold_outcomes, merge_parts
from meshbook.wire.messages import (
    CollectiveInfo,
    FoldedItem,
    Frame,
    Outcome,
    Preview,
    RankSnapshot,
    Text,
    ThreadStack,
    Value,
)

RANKS, DEPTH, LIMIT_MS = 1024, 60, 300.0
RANKS_PER_HOST = 8
PER_PIECE = 50  # lines that arrive together

# What a rank prints as its n-th line.
LINES: dict[str, Callable[[int, int], str]] = {
    "equal lines": lambda rank, number: f"step {number} of the loop, and some words",
    "lines equal but for numbers": lambda rank, n: f"step {n} loss {2.3 + rank / 100 + n / 1e5:.4f} lr 1e-4",
    "one rank prints more": lambda rank, n: f"step {n}" + ("\nsaving" if rank == 0 and n % 4 == 0 else ""),
    "lines with nothing in common": lambda rank, number: "abcdefgh"[rank % 8] * (number % 13 + 1),
}

# Which frame of its stack a rank has for itself; below that one nothing is shared.
STACKS: dict[str, Callable[[int], int | None]] = {
    "all differ from the first frame": lambda rank: 0,
    "all differ in the last frame": lambda rank: DEPTH - 1,
    "one of them differs": lambda rank: DEPTH // 2 if rank == RANKS // 2 else None,
}


def measure(quick: bool, _folder: Path) -> Report:
    report = Report("pure", "one process, no sockets")
    rounds, lines = (1, 1_000) if quick else (10, 20_000)
    stacks(report, rounds)
    for kind, line in LINES.items():
        rates = [host_rate(line, 4, lines) for _ in range(min(3, rounds))]
        report.add(f"folding on a host of 4 ranks, {kind}", rates, "lines/s")
    for kind in list(LINES)[:2]:
        for ranks in (8, 64, 256):
            each = supervisor_seconds(LINES[kind], ranks, lines // 20) / (lines // 20)
            report.add(f"the supervisor's share of a folded line, {ranks} ranks, {kind}", 1e6 * each, "us")
    outcomes(report, 2 * rounds)
    return report


def stacks(report: Report, rounds: int) -> None:
    for kind, own in STACKS.items():
        snapshots = [snapshot(rank, own(rank)) for rank in range(RANKS)]
        acts: dict[str, Callable[[], Any]] = {
            f"merge, {kind}": partial(merge, snapshots),
            f"draw, {kind}": partial(as_text, merge(snapshots)),
            f"explain, {kind}": partial(explain, snapshots),
        }
        add_in_turns(report, acts, rounds)
    slowest = max(row.median for row in report.rows if row.what.startswith("merge"))
    report.promise(f"merging {RANKS} stacks of depth {DEPTH}", slowest, LIMIT_MS, "ms")


def outcomes(report: Report, rounds: int) -> None:
    for kind, distinct in (("equal", False), ("distinct", True)):
        values = [Value(Preview("plain", "int", str(rank * distinct))) for rank in range(256)]
        pairs = [(rank, Outcome("ok", value=value, bound_names=("x", "loss"))) for rank, value in enumerate(values)]
        hosts = [pairs[start : start + RANKS_PER_HOST] for start in range(0, 256, RANKS_PER_HOST)]
        parts = [fold_outcomes(host) for host in hosts]
        acts: dict[str, Callable[[], Any]] = {
            f"{kind} outcomes of 256 ranks, folded by all hosts": lambda hosts=hosts: [*map(fold_outcomes, hosts)],
            f"{kind} outcomes of 256 ranks, merged by the supervisor": partial(merge_parts, parts),
        }
        add_in_turns(report, acts, rounds)


def add_in_turns(report: Report, acts: dict[str, Callable[[], Any]], rounds: int) -> None:
    contestants = {name: workbench.milliseconds(act) for name, act in acts.items()}
    for name, taken in workbench.take_turns(contestants, rounds, warm_up=1).items():
        report.add(name, taken, "ms")


def snapshot(rank: int, own: int | None) -> RankSnapshot:
    """A rank that waits in an all_reduce; strings are made anew for each, as they come from the wire."""
    frames = []
    for depth in range(DEPTH):
        torch = "/env/lib/python3.11/site-packages/torch/nn"
        file = f"{torch}/file{depth}.py" if depth % 3 else f"/home/me/project/file{depth}.py"
        frames.append(Frame(file, rank if own is not None and depth >= own else 7, f"function{depth}"))
    line, everyone = Frame("/home/me/project/file0.py", 7, "function0"), tuple(range(RANKS))
    done = [
        CollectiveInfo("all_reduce", "0", everyone, seq, ((8,),), "float32", line, None, 3.2, 3.1)
        for seq in range(1, 64)
    ]
    op = CollectiveInfo("all_reduce", "0", everyone, 64, ((8,),), "float32", line, began_s_ago=3.0)
    return RankSnapshot(
        rank,
        source="inside",
        call="c",  # type: ignore[arg-type]
        cell="cell 7",
        stacks=(ThreadStack("MainThread", tuple(frames), is_main=True),),
        collectives=tuple(done) if rank == RANKS // 2 else (*done, op),
    )


def host_rate(line: Callable[[int, int], str], num_ranks: int, num_lines: int) -> float:
    """Lines per second that one host folds; a line counts once for each rank."""
    starts = range(0, num_lines, PER_PIECE)
    pieces = [[piece(line, rank, range(start, start + PER_PIECE)) for start in starts] for rank in range(num_ranks)]
    folder = LineFolder(range(num_ranks), mergeable=True)
    began = time.perf_counter()
    for place in range(len(starts)):
        for rank in range(num_ranks):
            folder.feed(rank, pieces[rank][place], place / 200)
        folder.flush(place / 200)
    folder.flush(num_lines, final=True)
    return num_ranks * num_lines / (time.perf_counter() - began)


def piece(line: Callable[[int, int], str], rank: int, numbers: range) -> tuple[Text, ...]:
    return (Text("stdout", "".join(line(rank, number) + "\n" for number in numbers)),)


def supervisor_seconds(line: Callable[[int, int], str], num_ranks: int, num_lines: int) -> float:
    """Seconds in which the supervisor folds what hosts of `RANKS_PER_HOST` made of their ranks' lines."""
    hosts = {
        host: tuple(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
        for host in range(num_ranks // RANKS_PER_HOST)
    }
    folded: dict[int, list[FoldedItem]] = {}
    for host, ranks in hosts.items():
        folder = LineFolder(ranks, mergeable=True)
        for rank in ranks:
            folder.feed(rank, piece(line, rank, range(num_lines)), 0.0)
        folded[host] = folder.flush(0.0, final=True)
    merger = FoldMerger(hosts)
    began = time.perf_counter()
    for start in range(0, num_lines, PER_PIECE):
        for host, items in folded.items():
            merger.feed(host, items[start : start + PER_PIECE], start / 1e4)
        merger.flush(start / 1e4)
    merger.flush(num_lines, final=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
