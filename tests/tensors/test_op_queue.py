"""What the queue of operations puts into a batch, and when it is full. No ranks."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.tensors.op_queue import HeldOps, OpQueue, PendingBatch
from meshbook.tensors.specs import Template
from meshbook.tensors.template_cache import TemplateCache


class Step:
    serial = 1

    def undo(self) -> None:
        raise AssertionError("nobody undoes it here")


def make_queue(batch_size: int = 4) -> tuple[OpQueue, list[None]]:
    woken: list[None] = []
    return OpQueue(lambda: woken.append(None), batch_size), woken


def numbers_of(batch: PendingBatch | None) -> list[list[Any]]:
    assert batch is not None
    return [numbers for numbers, _ in batch.ops]


def test_the_first_operation_wakes_the_sender_and_the_last_fills_the_batch() -> None:
    queue, woken = make_queue(batch_size=3)
    assert [queue.append([number], ()) for number in (1, 2, 3)] == [False, False, True]
    assert len(woken) == 1
    assert numbers_of(queue.take()) == [[1], [2], [3]]
    assert queue.is_empty


def test_nothing_is_taken_where_nothing_must_be_sent() -> None:
    queue, _ = make_queue()
    queue.add_template(b"body")
    queue.add_evictions([5])
    assert queue.take() is None
    batch = queue.take(even_if_empty=True)
    assert batch is not None
    assert (batch.templates, batch.evicted) == ([b"body"], [5])


def test_freed_ids_go_with_the_batch_as_one_operation() -> None:
    queue, _ = make_queue()
    queue.append([1, 7], ())
    queue.freed_ids.extend([7, 8])
    assert numbers_of(queue.take()) == [[1, 7], [0, 2, 7, 8]]


def test_many_freed_ids_do_not_wait_for_the_end_of_the_batch() -> None:
    queue, _ = make_queue(batch_size=100)
    queue.freed_ids.extend(range(16))
    queue.append([1], ())
    assert numbers_of(queue.take()) == [[0, 16, *range(16)], [1]]


def test_what_could_not_be_sent_comes_before_what_was_issued_since() -> None:
    queue, _ = make_queue()
    queue.append([1], ())
    queue.add_template(b"first")
    batch = queue.take()
    assert batch is not None
    queue.append([2], ())
    queue.add_template(b"second")
    queue.put_back(batch)
    both = queue.take()
    assert numbers_of(both) == [[1], [2]]
    assert both is not None
    assert both.templates == [b"first", b"second"]


def test_held_operations_are_replaced_by_one() -> None:
    queue, _ = make_queue(batch_size=2)
    queue.append([1], ())
    held = HeldOps()
    queue.hold(held)
    assert not any(queue.append([number], ()) for number in (2, 3, 4))  # more than a batch
    queue.freed_ids.extend([11, 12])

    def rewrite(ops: Any, freed: list[int]) -> Any:
        assert [numbers for numbers, _ in ops] == [[2], [3], [4]]
        assert freed == [11, 12]
        return ([9], ()), {11}

    queue.release(held, rewrite)
    assert numbers_of(queue.take()) == [[1], [9], [0, 1, 12]]
    assert held.break_reason == ""


def test_a_hold_ends_where_its_operations_must_be_sent_and_says_why() -> None:
    queue, _ = make_queue()
    held = HeldOps()
    queue.hold(held)
    queue.append([2], ())
    batch = queue.take(even_if_empty=True)
    assert numbers_of(batch) == [[2]]
    assert "test_op_queue.py" in held.break_reason
    queue.release(held, lambda ops, freed: pytest.fail("there is nothing to rewrite"))


def test_a_hold_without_operations_outlasts_a_batch() -> None:
    queue, _ = make_queue()
    queue.append([1], ())
    held = HeldOps()
    queue.hold(held)
    queue.take()
    assert (queue.is_held, held.start) == (True, 0)


def test_a_cancelled_step_takes_its_operations_back_and_frees_their_ids_all_the_same() -> None:
    queue, _ = make_queue()
    queue.append([1], ())
    queue.begin_step(Step())
    queue.append([2], ())
    queue.extend([([0, 1, 77], ())])
    assert queue.is_in_step
    assert queue.cancel_step()
    assert not queue.is_in_step
    assert numbers_of(queue.take()) == [[1], [0, 1, 77]]


def test_a_step_of_which_a_part_was_sent_cannot_be_cancelled() -> None:
    queue, _ = make_queue()
    queue.begin_step(Step())
    queue.append([2], ())
    batch = queue.take()
    assert batch is not None
    assert not queue.cancel_step()
    queue.begin_step(Step())
    queue.append([3], ())
    taken = queue.take()
    assert taken is not None
    queue.put_back(taken)  # it was not sent after all
    assert queue.cancel_step()
    assert len(queue) == 0


def test_a_step_ends_in_the_batch_of_its_last_operation() -> None:
    queue, _ = make_queue()
    step = Step()
    queue.begin_step(step)
    queue.append([2], ())
    queue.end_step(step)
    batch = queue.take()
    assert batch is not None
    assert batch.steps == [step]


def test_templates_that_are_used_outlive_a_generation_and_others_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook.tensors.template_cache._MAX_TEMPLATES", 2)
    queue, _ = make_queue()
    cache = TemplateCache(queue)
    planned: list[int] = []

    def plan(number: int) -> Template:
        planned.append(number)
        return Template(number, body=b"%d" % number)

    for number in (1, 2, 3, 1, 4, 5, 6):
        cache.find_or_plan(number, plan, number)
    batch = queue.take(even_if_empty=True)
    assert batch is not None
    assert planned == [1, 2, 3, 4, 5, 6]
    assert batch.evicted == [2, 3, 1][: len(batch.evicted)]
    assert 2 in batch.evicted
    assert len(cache) == len(cache.by_number) == 6 - len(batch.evicted)
