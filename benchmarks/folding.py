"""How fast output is folded: lines per second on a host, the supervisor's share as ranks grow, and the cost of a flood.

Pure computing in one process: no sockets, no ranks. A line counts once for each rank that said it. Each figure is the
best of three runs.

    python -m benchmarks.folding [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from meshbook.fold.lines import FoldMerger, LineFolder, OutputBudget
from meshbook.fold.outcomes import fold_outcomes, merge_parts
from meshbook.wire.messages import FoldedItem, Line, Outcome, Preview, Text, Value

RANKS = 4
PER_PIECE = 50  # lines that arrive together
RANKS_PER_HOST = 8

Say = Callable[[int, int], str]  # rank and line number to text

KINDS: dict[str, Say] = {
    "equal": lambda rank, number: f"step {number} of the loop, and some words",
    "equal but for numbers": lambda rank, number: f"step {number} loss {2.3 + rank / 100 + number / 1e5:.4f} lr 1e-4",
    "one rank says more": lambda rank, number: f"step {number}" + ("\nsaving" if rank == 0 and number % 4 == 0 else ""),
    "rows of data": lambda rank, number: " ".join(f"{(number * c * 7 + rank * 13) % 97 / 97:.4f}" for c in range(10)),
    "nothing in common": lambda rank, number: "abcdefgh"[rank % 8] * (number % 13 + 1),
}


def best(run: Callable[[], float]) -> float:
    return min(run() for _ in range(3))


def host_seconds(say: Say, num_ranks: int, num_lines: int) -> float:
    """Seconds in which one host folds its ranks' lines."""
    pieces = [
        [
            (Text("stdout", "".join(say(rank, number) + "\n" for number in range(start, start + PER_PIECE))),)
            for start in range(0, num_lines, PER_PIECE)
        ]
        for rank in range(num_ranks)
    ]
    folder = LineFolder(range(num_ranks), mergeable=True)
    began = time.perf_counter()
    for place in range(len(pieces[0])):
        for rank in range(num_ranks):
            folder.feed(rank, pieces[rank][place], place / 200)
        folder.flush(place / 200)
    folder.flush(num_lines, final=True)
    return time.perf_counter() - began


def supervisor_seconds(say: Say, num_ranks: int, num_lines: int) -> float:
    """Seconds in which the supervisor folds what hosts of `RANKS_PER_HOST` made of their ranks' lines."""
    hosts = {
        host: tuple(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
        for host in range(num_ranks // RANKS_PER_HOST)
    }
    folded: dict[int, list[FoldedItem]] = {}
    for host, ranks in hosts.items():
        folder = LineFolder(ranks, mergeable=True)
        for rank in ranks:
            folder.feed(rank, [Text("stdout", say(rank, number) + "\n") for number in range(num_lines)], 0.0)
        folded[host] = folder.flush(0.0, final=True)
    merger = FoldMerger(hosts)
    began = time.perf_counter()
    for start in range(0, num_lines, PER_PIECE):
        for host, items in folded.items():
            merger.feed(host, items[start : start + PER_PIECE], start / 1e4)
        merger.flush(start / 1e4)
    merger.flush(num_lines, final=True)
    return time.perf_counter() - began


def flood(say: Say, seconds: float = 2.0, bytes_per_s: float = 10e6) -> tuple[float, float, float]:
    """Every rank prints 10 MB/s: share of a core, longest flush in seconds, and bytes/s that a front end is sent."""
    pieces = ["".join(f"{say(rank, number):<79}\n" for number in range(800)) for rank in range(RANKS)]
    folder, budget = LineFolder(range(RANKS)), OutputBudget()
    now = flush_at = longest = 0.0
    num_bytes = 0
    began = time.perf_counter()
    while now < seconds:
        now += len(pieces[0]) / bytes_per_s
        for rank, piece in enumerate(pieces):
            folder.feed(rank, (Text("stdout", piece),), now)
        if now >= flush_at:
            flush_at = now + 0.05
            flush_began = time.perf_counter()
            items = budget.admit(folder.flush(now, max_chars=32 * 1024), now)
            longest = max(longest, time.perf_counter() - flush_began)
            num_bytes += sum(len(item.text) + 1 for item in items if isinstance(item, Line))
    return (time.perf_counter() - began) / seconds, longest, num_bytes / seconds


def outcome(text: str) -> Outcome:
    return Outcome("ok", value=Value(Preview("plain", "int", text)), bound_names=("x", "loss"))


def outcomes_seconds(num_ranks: int, *, distinct: bool) -> tuple[float, float]:
    """Seconds in which hosts fold their ranks' outcomes of one call (all hosts together), and the supervisor theirs."""
    pairs = [(rank, outcome(str(rank if distinct else 0))) for rank in range(num_ranks)]
    per_host = [pairs[start : start + RANKS_PER_HOST] for start in range(0, num_ranks, RANKS_PER_HOST)]
    rounds = 20
    began = time.perf_counter()
    for _ in range(rounds):
        parts = [fold_outcomes(host) for host in per_host]
    between = time.perf_counter()
    for _ in range(rounds):
        merge_parts(parts)
    return (between - began) / rounds, (time.perf_counter() - between) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few lines: shows that it works, not how fast")
    lines = 1_000 if parser.parse_args().quick else 20_000  # of each rank

    print(f"One host, {RANKS} ranks of {lines:,} lines, {PER_PIECE} at a time")
    for name, say in KINDS.items():
        seconds = best(lambda say=say: host_seconds(say, RANKS, lines))  # type: ignore[misc]
        print(f"  {name:<24} {RANKS * lines / seconds:>12,.0f} lines/s")

    compared = [(name, KINDS[name]) for name in ("equal", "equal but for numbers")]
    print("\nOne host, more ranks: lines/s, and us for each line that comes out")
    for num_ranks in (2, 4, 8, 16, 32):
        row, each = f"  {num_ranks:>4} ranks", lines // num_ranks
        for name, say in compared:
            seconds = best(lambda say=say, n=num_ranks, each=each: host_seconds(say, n, each))  # type: ignore[misc]
            row += f"   {name}: {num_ranks * each / seconds:>10,.0f}/s {seconds / each * 1e6:>7.1f} us"
        print(row)

    print(f"\nSupervisor, hosts of {RANKS_PER_HOST} ranks: us for each line that comes out")
    for num_ranks in (8, 64, 256):
        row, each = f"  {num_ranks:>4} ranks", lines // 20
        for name, say in compared:
            seconds = best(lambda say=say, n=num_ranks, each=each: supervisor_seconds(say, n, each))  # type: ignore[misc]
            row += f"   {name}: {seconds / each * 1e6:>7.1f} us"
        print(row)

    print(f"\nA flood: {RANKS} ranks print 10 MB/s each")
    for name in ("equal", "equal but for numbers", "nothing in common"):
        share, longest, sent = flood(KINDS[name], lines / 10_000)
        print(f"  {name:<24} {share:>5.0%} of a core, longest flush {longest * 1e3:.1f} ms, {sent / 1e6:.2f} MB/s sent")

    print("\nOutcomes of one call, us: all hosts together, supervisor")
    for num_ranks in (8, 64, 256):
        row = f"  {num_ranks:>4} ranks"
        for distinct in (False, True):
            hosts, supervisor = outcomes_seconds(num_ranks, distinct=distinct)
            row += f"   {'distinct' if distinct else 'equal'}: {hosts * 1e6:>6.0f} {supervisor * 1e6:>6.0f}"
        print(row)


if __name__ == "__main__":
    main()
