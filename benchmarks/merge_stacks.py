"""How long the stacks of a large mesh take to merge into one tree, and its diagnosis: all ranks differ, or few do.

Pure computing in one process, on stacks made by hand: 1,024 ranks, 60 frames each.

    python -m benchmarks.merge_stacks [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.diagnose.findings import explain
from meshbook.diagnose.stack_tree import as_text, merge
from meshbook.wire.messages import CollectiveInfo, Frame, RankSnapshot, ThreadStack

RANKS, DEPTH = 1024, 60
LIMIT_MS = 300.0
TORCH = "/env/lib/python3.11/site-packages/torch"

# Which frame of its stack a rank has for itself; below that one nothing is shared.
KINDS: dict[str, Callable[[int], int | None]] = {
    "all differ from the first frame": lambda rank: 0,
    "all differ in the last frame": lambda rank: DEPTH - 1,
    "one of them differs": lambda rank: DEPTH // 2 if rank == RANKS // 2 else None,
}


def snapshots(kind: str) -> list[RankSnapshot]:
    made = []
    for rank in range(RANKS):
        own = KINDS[kind](rank)
        frames = []
        for depth in range(DEPTH):
            # Strings are made anew for each rank, as they come from the wire.
            file = f"{TORCH}/nn/file{depth}.py" if depth % 3 else f"/home/me/project/file{depth}.py"
            frames.append(Frame(file, rank if own is not None and depth >= own else 7, f"function{depth}"))
        line = Frame("/home/me/project/file0.py", 7, "function0")
        done = [
            CollectiveInfo("all_reduce", "0", tuple(range(RANKS)), seq, ((8,),), "float32", line, None, 3.2, 3.1)
            for seq in range(1, 64)
        ]
        op = CollectiveInfo("all_reduce", "0", tuple(range(RANKS)), 64, ((8,),), "float32", line, began_s_ago=3.0)
        made.append(
            RankSnapshot(
                rank,
                source="inside",
                call="c",  # type: ignore[arg-type]
                cell="cell 7",
                stacks=(ThreadStack("MainThread", tuple(frames), is_main=True),),
                collectives=tuple(done) if rank == RANKS // 2 else (*done, op),
            )
        )
    return made


def measure(quick: bool, _folder: Path) -> Report:
    report = Report("merge_stacks", f"{RANKS} ranks, {DEPTH} frames each")
    for kind in KINDS:
        looks = snapshots(kind)
        tree = merge(looks)
        acts = {
            f"merge, {kind}": workbench.milliseconds(partial(merge, looks)),
            f"draw, {kind}": workbench.milliseconds(partial(as_text, tree)),
            f"explain, {kind}": workbench.milliseconds(partial(explain, looks)),
        }
        for name, taken in workbench.take_turns(acts, 1 if quick else 10, warm_up=1).items():
            report.add(name, taken, "ms")
    slowest = max(row.median for row in report.rows if row.what.startswith("merge"))
    report.promise(f"merging {RANKS} stacks of depth {DEPTH}", slowest, LIMIT_MS, "ms")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
