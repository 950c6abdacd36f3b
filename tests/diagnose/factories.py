"""Snapshots made by hand, as ranks and hosts would take them."""

from __future__ import annotations

from typing import Any

from meshbook.ids import CallId
from meshbook.wire.messages import CollectiveInfo, Frame, Health, ProcessStatus, RankExited, RankSnapshot, ThreadStack

CELL = "/tmp/ipykernel_77/4123.py"
TORCH = "/env/lib/python3.11/site-packages/torch"
STDLIB = "/usr/lib/python3.11"

# What is on the stack below the user's line in a collective.
IN_COLLECTIVE = (
    Frame(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 2900, "all_reduce"),
    Frame("/env/lib/python3.11/site-packages/meshbook/rank/process_groups/watched_group.py", 236, "collective"),
)


def frames_at(line: int, *below: Frame, function: str = "<module>", file: str = CELL) -> tuple[Frame, ...]:
    return (Frame(file, line, function), *below)


def main_thread(*frames: Frame, **more: Any) -> ThreadStack:
    return ThreadStack("MainThread", frames, is_main=True, **more)


def thread(name: str, *frames: Frame, **more: Any) -> ThreadStack:
    return ThreadStack(name, frames, **more)


def op(
    seq: int = 1, name: str = "all_reduce", line: int = 3, group: str = "0", ranks: Any = range(4), **more: Any
) -> Any:
    more.setdefault("shapes", ((4,),))
    more.setdefault("dtype", "float32")
    more.setdefault("began_s_ago", 12.0)
    return CollectiveInfo(name, group, tuple(ranks), seq, frame=Frame(CELL, line, "<module>"), **more)


def running_rank(rank: int, *frames: Frame, **more: Any) -> RankSnapshot:
    """A rank that runs cell 7, and is at these frames."""
    more.setdefault("stacks", (main_thread(*frames),) if frames else ())
    more.setdefault("process", ProcessStatus(state="S"))
    settings: dict[str, Any] = {
        "host": "one",
        "pid": 1000 + rank,
        "source": "inside",
        "call": CallId("c7"),
        "cell": "cell 7",
        "file": CELL,
        "running_s": 12.0,
        "beat_age_s": 0.5,
    }
    return RankSnapshot(rank, **{**settings, **more})


def waiting(rank: int, operation: Any = None, **more: Any) -> RankSnapshot:
    """A rank that waits in a collective at the line that began it."""
    operation = operation or op()
    done = (
        [op(seq, ended_s_ago=12.0, began_s_ago=12.5) for seq in range(1, operation.seq)]
        if operation.op != "send"
        else []
    )
    return running_rank(rank, *frames_at(operation.frame.line, *IN_COLLECTIVE), collectives=(*done, operation), **more)


def ended(rank: int, finished: str = "ok", **more: Any) -> RankSnapshot:
    settings = {
        "call": None,
        "cell": None,
        "file": None,
        "running_s": None,
        "last_status": finished,
        "last_cell": "cell 7",
    }
    return running_rank(rank, **{**settings, **more})


def computing(rank: int, line: int = 9, **more: Any) -> RankSnapshot:
    more.setdefault("health", Health(cpu_percent=100.0))
    return running_rank(rank, *frames_at(line), **{"process": ProcessStatus(state="R"), **more})


def dead(rank: int, signal: int = 9, **more: Any) -> RankSnapshot:
    exited = RankExited(rank, 1000 + rank, None, signal, "one", ("last words",), "all_reduce #3")
    return RankSnapshot(rank, host="one", pid=1000 + rank, exited=exited, **more)
