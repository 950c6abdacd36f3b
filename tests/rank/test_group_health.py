"""Whether a process group can be used, without connections: operations are objects of the test."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistBackendError

from meshbook.errors import CollectiveAborted, RankLost
from meshbook.rank.process_groups import exit_questions, group_health
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure
from meshbook.rank.process_groups.generation import Generation
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
from meshbook.rank.process_groups.watched_work import _AbortableFuture
from meshbook.wire.messages import TransportFailed
from tests.budget import when


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


@pytest.fixture
def health() -> GroupHealth:
    return GroupHealth(GroupLabel("dp", (0, 1)), CollectiveRing(), [])


def finish_failed(health: GroupHealth, error: BaseException, work: Any = None, *, launched: bool) -> BaseException:
    record = health.ring.begin("all_reduce", health.label)
    return health.finish_failed(record, error, health.connection_version, work, launched=launched)


def test_an_error_of_nccl_at_the_launch_breaks_the_group_and_wrong_arguments_do_not(health: GroupHealth) -> None:
    wrong = ValueError("tensors must have the same dtype")
    assert finish_failed(health, wrong, launched=False) is wrong
    assert health.failure is None
    nccl = DistBackendError("NCCL error: remote process exited or there was a network error")
    health._failed_event.set()  # the supervisor need not be waited for
    assert finish_failed(health, nccl, launched=False) is nccl
    assert health.failure is not None
    assert "NCCL error: remote process exited" in health.failure.reason


def test_an_operation_that_fails_at_once_twice_has_failed(health: GroupHealth) -> None:
    closed = RuntimeError("Connection closed by peer")
    work = Operation(RuntimeError("the slice expired"), closed)
    with pytest.raises(RuntimeError) as raised:
        health.wait_in_slices(work)
    assert raised.value is closed
    assert work.num_waits == 2


def test_a_wait_that_ends_between_two_slices_returns(health: GroupHealth) -> None:
    work = Operation(RuntimeError("the slice expired"), None)
    health.wait_in_slices(work)
    assert work.num_waits == 2


def test_a_wait_in_an_aborted_group_raises_after_its_slice(health: GroupHealth) -> None:
    health.invalidate(GroupFailure("rank 1 is gone", RankLost("rank 1 is gone")))
    work = Operation(RuntimeError("Connection closed by peer"), None)
    with pytest.raises(RuntimeError):
        health.wait_in_slices(work)
    assert work.num_waits == 1


def test_the_timeout_of_a_slice_is_not_the_context_of_an_interrupt(health: GroupHealth) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        health.wait_in_slices(Operation(RuntimeError("the slice expired"), KeyboardInterrupt()))
    assert raised.value.__context__ is None


def test_wrong_arguments_leave_the_group_usable(health: GroupHealth) -> None:
    error = ValueError("sizes differ")
    assert finish_failed(health, error, launched=False) is error
    assert health.failure is None


def test_a_collective_that_was_interrupted_and_has_completed_leaves_the_group_usable(health: GroupHealth) -> None:
    finish_failed(health, KeyboardInterrupt(), Operation(None, completed=True), launched=True)
    assert health.failure is None


def test_a_collective_that_was_interrupted_under_way_breaks_the_group(health: GroupHealth) -> None:
    finish_failed(health, KeyboardInterrupt(), Operation(completed=False), launched=True)
    assert health.failure is not None
    assert health.failure.reason == "all_reduce #1 was interrupted"


def test_the_error_of_an_abort_replaces_that_of_the_closed_connection(health: GroupHealth) -> None:
    health.invalidate(GroupFailure("rank 1 is gone", RankLost("rank 1 is gone")))
    raised = finish_failed(health, RuntimeError("Connection closed by peer"), launched=True)
    assert type(raised) is RankLost


class Answers:
    """The supervisor's: every question is answered at once, after this was done."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before, self.num_asked = before, 0
        self.questions = ExitQuestions(0, self.ask)

    def ask(self, question: TransportFailed) -> None:
        self.num_asked += 1
        self.before()
        self.questions.answer(question.number)


@pytest.fixture
def asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_health, "ASK_REASON_AFTER_S", 0.0)


@pytest.mark.usefixtures("asks_at_once")
def test_a_collective_that_fails_without_a_reason_asks_and_raises_the_one_that_comes(health: GroupHealth) -> None:
    gone = GroupFailure("rank 1 is gone", RankLost("rank 1 is gone"))
    health.exits = Answers(lambda: health.invalidate(gone)).questions
    assert type(finish_failed(health, RuntimeError("Connection closed by peer"), launched=True)) is RankLost


@pytest.mark.usefixtures("asks_at_once")
def test_a_collective_that_fails_while_all_ranks_live_raises_its_own_error(health: GroupHealth) -> None:
    closed = RuntimeError("Connection closed by peer")
    health.exits = Answers().questions
    assert finish_failed(health, closed, launched=True) is closed


class LostCallback:
    """The future of an operation that has failed, whose callback was never called."""

    def add_done_callback(self, callback: Any) -> None:
        pass

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.usefixtures("asks_at_once")
def test_the_thread_that_brings_the_reason_of_a_failure_does_not_wait_for_it(health: GroupHealth) -> None:
    asked: list[TransportFailed] = []
    health.exits = ExitQuestions(0, asked.append)
    record = health.ring.begin("all_reduce", health.label)
    pending = _AbortableFuture(health, record, SimpleNamespace(get_future=LostCallback), None)
    for _ in range(3):  # heartbeats: one thread asks
        health.complete_futures()
        when(lambda: asked)
    assert len(asked) == 1
    health.exits.answer(asked[0].number)
    when(pending.future.done)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        pending.future.value()


def test_wrong_arguments_are_not_asked_about(health: GroupHealth) -> None:
    answers = Answers()
    health.exits = answers.questions
    finish_failed(health, ValueError("sizes differ"), launched=False)
    assert answers.num_asked == 0


def test_a_supervisor_that_answers_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_questions, "REASON_TIMEOUT_S", 0.0)
    ExitQuestions(0, lambda question: None).wait_until_reported(lambda: False)


def test_a_group_that_cannot_connect_because_a_rank_has_ended_says_so() -> None:
    generation = Generation(Answers(lambda: generation.fail(gone)).questions)  # type: ignore[arg-type, return-value]
    gone = GroupFailure("rank 1 is gone", RankLost("rank 1 is gone"))
    with pytest.raises(RankLost), generation.rendezvous():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_an_operation_of_former_connections_does_not_break_the_new_ones(health: GroupHealth) -> None:
    record, version = health.ring.begin("all_reduce", health.label), health.connection_version
    health.reset()
    raised = health.finish_failed(record, RuntimeError("closed"), version, None, launched=True)
    assert type(raised) is GroupBroken
    assert health.failure is None


@pytest.mark.usefixtures("asks_at_once")
def test_a_failure_whose_reason_comes_when_the_group_is_formed_anew_does_not_break_the_new_connections(
    health: GroupHealth,
) -> None:
    record, version = health.ring.begin("all_reduce", health.label), health.connection_version
    health.exits = Answers(health.reset).questions  # while the thread of gloo's future asks
    raised = health.finish_failed(record, RuntimeError("Connection reset by peer"), version, None, launched=True)
    assert type(raised) is GroupBroken
    assert health.failure is None
    health.wait_until_allowed("all_gather")


def test_a_collective_of_a_broken_group_is_refused_with_the_reason_and_what_to_do(health: GroupHealth) -> None:
    health.invalidate(GroupFailure("all_reduce #1 was interrupted"))
    with pytest.raises(GroupBroken) as refused:
        health.wait_until_allowed("barrier")
    assert isinstance(refused.value, RuntimeError)
    assert str(refused.value) == (
        "barrier cannot run: the process group of ranks 0-1 is broken (all_reduce #1 was interrupted). It is formed "
        "again before the next cell: run the cell again. If a rank is gone: %mesh heal"
    )


def test_a_collective_that_waits_for_a_rank_which_has_left_raises_why_it_left(health: GroupHealth) -> None:
    health.invalidate(GroupFailure("rank 1 left", CollectiveAborted("rank 1 left the cell")))
    with pytest.raises(CollectiveAborted, match="rank 1 left the cell"):
        health.wait_until_allowed("barrier")


def test_a_broken_group_fails_its_futures_and_one_that_comes_later_learns_why(health: GroupHealth) -> None:
    future = Future()
    health.add_future(health.ring.begin("all_reduce", health.label), future)
    health.invalidate(GroupFailure("rank 1 is gone"))
    assert [type(error) for error in future.errors] == [GroupBroken]
    late = health.ring.begin("all_reduce", health.label)
    failure = health.add_future(late, Future())
    assert failure is not None
    assert failure.reason == "rank 1 is gone"


class InterruptedCallback:
    """The future of an operation that is done already, so that its callback runs at once: a Stop comes in it, at the
    call of this number, and is dropped, as torch drops it."""

    def __init__(self, call: int) -> None:
        self.call, self.is_over = call, False

    def add_done_callback(self, callback: Any) -> None:
        def count(_frame: object, event: str, _arg: object) -> None:
            self.call -= not self.is_over and event in ("call", "c_return")  # where Python looks for signals
            if self.call == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(count)
            callback(self)
            self.is_over = True
        sys.setprofile(None)

    def done(self) -> bool:
        return True

    def value(self) -> list[int]:
        return [5]


def test_a_stop_in_a_callback_of_a_future_leaves_it_to_be_completed_wherever_it_comes(health: GroupHealth) -> None:
    for call in itertools.count(1):
        record = health.ring.begin("all_reduce", health.label)
        inner = InterruptedCallback(call)
        pending = _AbortableFuture(health, record, SimpleNamespace(get_future=lambda inner=inner: inner), None)
        health.complete_futures()
        when(pending.future.done)
        when(lambda: not health._pending_futures)
        assert (pending.future.value(), record.error, record.t_end is not None) == ([5], None, True)
        if inner.call > 0:  # it came to its end before
            break
    assert call > 10


def test_of_an_abort_and_a_result_that_come_at_once_the_first_counts(health: GroupHealth) -> None:
    record = health.ring.begin("all_reduce", health.label)
    pending = _AbortableFuture(health, record, SimpleNamespace(get_future=LostCallback), None)
    pending.fail(CollectiveAborted("rank 1 left the cell"))
    pending._complete([5])
    with pytest.raises(CollectiveAborted, match="rank 1 left the cell"):
        pending.future.value()
    assert record.error == "CollectiveAborted: rank 1 left the cell"


def test_a_signal_while_a_collective_is_recorded_makes_the_count_doubtful(health: GroupHealth) -> None:
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
