"""Whether a process group can be used, without connections: operations are objects of the test."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshbook.errors import CollectiveAborted, RankLost
from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure
from meshbook.rank.process_groups.group_health import GroupHealth
from meshbook.rank.process_groups.group_reports import (
    GroupReport,
    GroupSpec,
    common_group_count,
    groups_of_others,
    have_same_buckets,
    ranks_by_name,
)
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel


class Operation:
    """An operation whose waits end as a test says: an exception is raised, None returns."""

    def __init__(self, *waits: BaseException | None, completed: bool = False) -> None:
        self._waits = list(waits)
        self._completed = completed
        self.num_waits = 0

    def wait(self, timeout: timedelta) -> bool:
        self.num_waits += 1
        outcome = self._waits.pop(0)
        if outcome is not None:
            raise outcome
        return True

    def is_completed(self) -> bool:
        return self._completed


class Future:
    """A future that remembers what it was failed with."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def poll(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def new_health() -> GroupHealth:
    return GroupHealth(GroupLabel("dp", (0, 1)), CollectiveRing(), [])


def finish_failed(health: GroupHealth, error: BaseException, work: Any = None, *, launched: bool) -> BaseException:
    record = health.ring.begin("all_reduce", health.label)
    return health.finish_failed(record, error, health.connection_version, work, launched=launched)


def test_an_operation_that_fails_at_once_twice_has_failed() -> None:
    closed = RuntimeError("Connection closed by peer")
    work = Operation(RuntimeError("the slice expired"), closed)
    with pytest.raises(RuntimeError) as raised:
        new_health().wait_in_slices(work)
    assert raised.value is closed
    assert work.num_waits == 2


def test_a_wait_that_ends_between_two_slices_returns() -> None:
    work = Operation(RuntimeError("the slice expired"), None)
    new_health().wait_in_slices(work)
    assert work.num_waits == 2


def test_a_wait_in_an_aborted_group_raises_after_its_slice() -> None:
    health = new_health()
    health.invalidate(GroupFailure("rank 1 is gone", RankLost("rank 1 is gone")))
    work = Operation(RuntimeError("Connection closed by peer"), None)
    with pytest.raises(RuntimeError):
        health.wait_in_slices(work)
    assert work.num_waits == 1


def test_the_timeout_of_a_slice_is_not_the_context_of_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        new_health().wait_in_slices(Operation(RuntimeError("the slice expired"), KeyboardInterrupt()))
    assert raised.value.__context__ is None


def test_wrong_arguments_leave_the_group_usable() -> None:
    health = new_health()
    error = ValueError("sizes differ")
    assert finish_failed(health, error, launched=False) is error
    assert health.failure is None


def test_a_collective_that_was_interrupted_and_has_completed_leaves_the_group_usable() -> None:
    health = new_health()
    finish_failed(health, KeyboardInterrupt(), Operation(None, completed=True), launched=True)
    assert health.failure is None


def test_a_collective_that_was_interrupted_under_way_breaks_the_group() -> None:
    health = new_health()
    finish_failed(health, KeyboardInterrupt(), Operation(completed=False), launched=True)
    assert health.failure is not None
    assert health.failure.reason == "all_reduce #1 was interrupted"


def test_the_error_of_an_abort_replaces_that_of_the_closed_connection() -> None:
    health = new_health()
    health.invalidate(GroupFailure("rank 1 is gone", RankLost("rank 1 is gone")))
    raised = finish_failed(health, RuntimeError("Connection closed by peer"), launched=True)
    assert type(raised) is RankLost


def test_an_operation_of_former_connections_does_not_break_the_new_ones() -> None:
    health = new_health()
    record, version = health.ring.begin("all_reduce", health.label), health.connection_version
    health.reset()
    raised = health.finish_failed(record, RuntimeError("closed"), version, None, launched=True)
    assert type(raised) is GroupBroken
    assert health.failure is None


def test_a_collective_of_a_broken_group_is_refused_with_the_reason_and_what_to_do() -> None:
    health = new_health()
    health.invalidate(GroupFailure("all_reduce #1 was interrupted"))
    with pytest.raises(
        GroupBroken, match=r"ranks 0-1 is broken \(all_reduce #1 was interrupted\).* run the cell again"
    ):
        health.wait_until_allowed("barrier")


def test_a_collective_that_waits_for_a_rank_which_has_left_raises_why_it_left() -> None:
    health = new_health()
    health.invalidate(GroupFailure("rank 1 left", CollectiveAborted("rank 1 left the cell")))
    with pytest.raises(CollectiveAborted, match="rank 1 left the cell"):
        health.wait_until_allowed("barrier")


def test_a_broken_group_fails_its_futures_and_one_that_comes_later_learns_why() -> None:
    health, future = new_health(), Future()
    health.add_future(health.ring.begin("all_reduce", health.label), future)
    health.invalidate(GroupFailure("rank 1 is gone"))
    assert [type(error) for error in future.errors] == [GroupBroken]
    late = health.ring.begin("all_reduce", health.label)
    failure = health.add_future(late, Future())
    assert failure is not None
    assert failure.reason == "rank 1 is gone"


def test_a_future_is_claimed_once() -> None:
    health = new_health()
    record = health.ring.begin("all_reduce", health.label)
    health.add_future(record, Future())
    assert [health.claim_future(record), health.claim_future(record)] == [True, False]


def test_a_signal_while_a_collective_is_recorded_makes_the_count_doubtful() -> None:
    health = new_health()
    health.ring.begin("all_reduce", health.label)
    health.mark_interrupted_start("all_reduce", KeyboardInterrupt())
    assert health.label.is_doubtful
    assert health.failure is not None
    assert health.ring.running() == ()


def test_torch_counts_groups_alike_on_all_ranks_unless_all_processes_are_new() -> None:
    assert common_group_count([GroupReport((), 3), GroupReport((), 5)]) == 5
    assert common_group_count([GroupReport((), 3), GroupReport()]) == 3
    assert common_group_count([GroupReport(), GroupReport()]) is None


def test_reports_say_which_ranks_have_a_group_and_whether_buckets_are_the_same() -> None:
    a, b = (GroupSpec(name, (0, 1, 2), {"cpu": "gloo"}, 60.0) for name in ("a", "b"))
    reports = [GroupReport((a, b), 2, 1), GroupReport((b,), 2, 1), GroupReport((), None, 0)]
    assert ranks_by_name(reports) == {"a": {0}, "b": {0, 1}}
    assert [group.name for group in groups_of_others(reports, 1)] == ["a"]
    assert [group.name for group in groups_of_others(reports, 2)] == ["a", "b"]
    assert not have_same_buckets(reports)
    assert have_same_buckets(reports[:2])
