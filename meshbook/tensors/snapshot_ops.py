"""The operations by which the ranks take, find and load snapshots of remote tensors (`rank.tensors.loop_snapshots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from meshbook.errors import MeshbookError
from meshbook.rank.tensors.operators import FLOAT, TENSOR
from meshbook.tensors import dispatch
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import TensorEngine


def take(engine: TensorEngine, tensors: Sequence[Any], run: int, number: int, step: int) -> Future[Any]:
    """Have the ranks copy these tensors, after everything that was issued. Waits only when too far ahead.

    Returns:
        a future for `is_taken`.

    Raises:
        OperationFailed: one of the tensors has a fault.
        RankLost, NotAttached: nothing can be sent.
    """
    ids = [tensor._handle.id for tensor in tensors]
    engine.sender.check_open()
    engine.faults.check_ids(ids)
    template = engine.templates.find_or_plan(
        ("take_snapshot", len(ids)),
        engine.planner.plan_rank_function,
        "take_snapshot",
        ([TENSOR] * len(ids), FLOAT, FLOAT, FLOAT),
        communicates=True,
    )
    engine.sender.wait_for_room()
    numbers: list[int | float] = [template.number, *ids, float(run), float(number), float(step)]
    with engine.sender.lock:  # it is the last operation of its batch, whose end is its own
        engine.queue.extend([(numbers, capture_call_site())])
        sent = engine.sender.send()
        assert sent is not None
        return sent[1]


def is_taken(future: Future[Any], number: int) -> bool:
    """Whether all ranks are known to have a snapshot."""
    if not future.done():
        return False
    try:
        outcomes = future.result().outcomes
    except MeshbookError:
        return False
    return all((part.outcome.reply or {}).get("loop", {}).get("taken") == number for part in outcomes)


def collect(engine: TensorEngine, run: int) -> dict[str, Any]:
    """Have the ranks find the newest snapshot that can be put together, and give each its part. Blocks.

    Returns:
        what `collect_snapshot` reports.

    Raises:
        RankLost, CellInterrupted: as for a cell.
    """
    template = engine.templates.find_or_plan(
        "collect_snapshot", engine.planner.plan_rank_function, "collect_snapshot", (FLOAT,), communicates=True
    )
    engine.emit([template.number, float(run)], capture_call_site())
    answers = engine.wait()
    found: dict[str, Any] = answers[engine.ranks[0]]["loop"]
    return found


def load(engine: TensorEngine, tensors: Mapping[int, Any], number: int) -> None:
    """Have the ranks overwrite tensors with what is in the snapshot that was collected. Does not wait.

    Args:
        tensors: by their place among those given to `take`.
    """
    if not tensors:
        return
    places, targets = tuple(tensors), list(tensors.values())
    template = engine.templates.find_or_plan(
        ("load_snapshot", places),
        engine.planner.plan_rank_function,
        "load_snapshot",
        ([TENSOR] * len(places), places, FLOAT),
        mutates=tuple(range(len(places))),
        overwrites=True,
    )
    numbers = [0, *(tensor._handle.id for tensor in targets)]
    dispatch.execute_template(engine, template, None, (), {}, numbers, targets, [float(number)])


def forget(engine: TensorEngine) -> None:
    """Have the ranks free the snapshots. Does not wait."""
    template = engine.templates.find_or_plan(
        "forget_snapshots", engine.planner.plan_rank_function, "forget_snapshots", ()
    )
    engine.emit([template.number], capture_call_site())
