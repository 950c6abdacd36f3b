"""Which optimizer steps are undone after a fault, driven by the ends of batches; the ranks' answers are the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshbook.mesh_axes import MeshAxes
from meshbook.tensors.batches import Batch, InFlightBatches
from meshbook.tensors.fault_guard import FaultGuard
from meshbook.tensors.op_queue import OpQueue
from meshbook.wire.messages import Outcome, OutcomeGroup

RANKS = (0, 1)
LOST = {
    "number": 1, "ename": "IndexError", "evalue": "no such row", "trace": "", "interrupted": False, "secondary": False,
    "lost": (7,), "spared": {}, "begun": (),
}  # fmt: skip


class Step:
    """An optimizer step that records when it is undone."""

    def __init__(self, serial: int, undone: list[int]) -> None:
        self.serial, self._undone = serial, undone

    def undo(self) -> None:
        self._undone.append(self.serial)


class Guarded:
    """A guard, and ranks that have taken certain steps.

    Attributes:
        num_asked: how often the ranks were asked.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.undone: list[int] = []
        self.num_asked = 0
        queue = OpQueue(lambda: None, 10)
        sender: Any = SimpleNamespace(
            ranks=RANKS, axes=MeshAxes.of({"dp": 2}), in_flight=InFlightBatches(), num_batches=0, fail=lambda _: None
        )
        templates: Any = SimpleNamespace(by_number={})
        self.guard = FaultGuard(queue, templates, sender, self._answer, lambda: None)

    def _answer(self, fetch: Any) -> dict[int, dict[str, Any]]:
        self.num_asked += 1
        return {rank: {"done": sorted(self.taken)} for rank in RANKS}

    def end_batch(self, ordinal: int, *serials: int, was_interrupted: bool = False, lost: bool = False) -> None:
        """The ranks end a batch in which these optimizer steps end."""
        unused: Any = None
        batch = Batch(unused, ordinal, 0, [], [], [], [Step(serial, self.undone) for serial in serials])
        reply = {"faulted": [LOST]} if lost else {}
        parts = [OutcomeGroup(ranks=RANKS, outcome=Outcome(status="ok", reply=reply))]
        self.guard.take_result(batch, parts, was_interrupted=was_interrupted)


def test_steps_are_undone_from_the_latest_on_also_where_their_batches_ended_in_another_order() -> None:
    guarded = Guarded()
    guarded.end_batch(2, 3, was_interrupted=True)  # it waited for the ranks, and Stop took it back
    guarded.end_batch(1, 2, was_interrupted=True)
    guarded.guard.resync()
    assert guarded.undone == [3, 2]


def test_a_step_that_a_rank_has_taken_is_not_undone() -> None:
    guarded = Guarded()
    guarded.taken = {2}
    guarded.end_batch(1, 2, was_interrupted=True)
    guarded.end_batch(2, 3, was_interrupted=True)
    guarded.guard.resync()
    assert guarded.undone == [3]


def test_a_step_of_a_batch_without_a_fault_is_never_asked_about() -> None:
    guarded = Guarded()
    guarded.end_batch(1, 2)
    guarded.end_batch(2, 3, was_interrupted=True)
    guarded.guard.resync()
    assert guarded.undone == [3]


def test_ranks_are_asked_again_before_they_have_forgotten_the_steps_they_took() -> None:
    guarded = Guarded()
    for serial in range(1, 1001):  # a tensor without a value stays alive all the while
        guarded.taken.add(serial)
        guarded.end_batch(serial, serial, lost=True)
        if guarded.guard.is_alert:
            guarded.guard.check_ids(())
    assert guarded.num_asked == 3
    assert guarded.undone == []
