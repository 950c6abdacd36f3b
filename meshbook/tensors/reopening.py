"""Uses the ranks of an engine again after some of them were replaced, and given what others hold (`Mesh.heal`).

The ranks say whether that has happened. What was under way when a rank was lost is then left out on all ranks, as what
a Stop leaves out: operations that have not come to the ranks are sent as cancelled, so that their results are known not
to be there and what they were to change keeps its earlier value. Optimizer steps that no rank has taken are undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from meshbook.errors import RankLost
from meshbook.tensors.batches import BatchSender
from meshbook.tensors.fault_guard import FaultGuard
from meshbook.tensors.op_queue import OpQueue
from meshbook.wire import messages

# Seconds to wait for the connection's thread to record batches that have ended.
_ENDED_S = 30.0


class Closed(Protocol):
    """What this uses of a `TensorEngine`."""

    sender: BatchSender
    queue: OpQueue
    faults: FaultGuard

    def forget_modes(self) -> None: ...


def reopen(engine: Closed) -> None:
    """Reopen an engine whose lost ranks have new processes. Blocks.

    Afterwards `engine.sender.error` is None; or what keeps the engine closed; or, if something was under way and the
    user has heard of no loss, a RankLost that is to be raised once.

    Raises:
        RankLost, CellInterrupted: as for a cell.
    """
    sender = engine.sender
    if engine.queue.is_in_step or engine.queue.is_held:
        return  # of what is being issued, the first part is lost: its error is raised
    replies = _replies(sender.ask(first_op=0, ops=_NO_OPS, fetch=messages.Fetch(mode="heals")))
    num_heals = {reply["heals"] for reply in replies}
    if len(num_heals) > 1 or (sender.num_batches and max(num_heals) <= sender.num_heals):
        # Healed without sharing, or nobody is left who held them: new processes begin to count at 0.
        sender.close_for_good()
        return
    sender.in_flight.wait_until_fewer(1, _ENDED_S)
    sender.cancel_pending()
    _cancel(sender, min(reply["batches"] for reply in replies), max(num_heals))
    lost, sender.lost = sender.lost, []
    steps = [step for batch in lost for step in batch.steps]
    had_work = any(batch.does_work for batch in lost)
    loss, is_reported = sender.error, sender.take_report()
    engine.faults.lost(steps, {int(id): text for reply in replies for id, text in reply["missing"].items()})
    engine.forget_modes()
    sender.reopened(max(num_heals))
    engine.faults.resync()
    if had_work and not is_reported:
        sender.fail_once(_report(loss))


_NO_OPS = msgspec.msgpack.encode([])


def _cancel(sender: BatchSender, num_known: int, num_heals: int) -> None:
    """Have the ranks leave out the lost batches; those that they know by their ordinals are not counted twice."""
    for batch in sender.lost:
        if batch.command.ordinal >= num_known:
            command = batch.command
            sender.ask(
                first_op=command.first_op,
                ops=command.ops,
                templates=command.templates,
                uploads=tuple(msgspec.structs.replace(one, payload=messages.Payload(b"")) for one in command.uploads),
                sharded_uploads=tuple(
                    msgspec.structs.replace(one, payload=messages.Payload(b"")) for one in command.sharded_uploads
                ),
                is_cancelled=True,
                ordinal=command.ordinal,
                num_heals=num_heals,
            )


def _replies(parts: Sequence[messages.OutcomeGroup]) -> list[dict[str, Any]]:
    return [part.outcome.reply or {} for part in parts]


def _report(loss: Any) -> RankLost:
    first = f"{loss}\n" if isinstance(loss, RankLost) else ""
    return RankLost(
        f"{first}The mesh is healed, but operations on tensors were under way when the rank was lost, and some have "
        "not run: their results are gone, and what they were to change is as it was before. Tensors can be used from "
        "now on: run the step again",
        ranks=getattr(loss, "ranks", ()),
        survivors=getattr(loss, "survivors", ()),
    )
