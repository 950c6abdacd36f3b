"""Reports and the calls that they belong to."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from meshbook.controller.pending_requests import PendingRequest, PendingRequests
from meshbook.errors import NotAttached, UsageError
from meshbook.ids import CallId
from meshbook.wire import messages

CALL = CallId("c1")
ITEM = messages.RankDisplay(ranks=(0,), item=messages.Notice("hello"))
STUCK = messages.RanksStuck(call=CALL, ranks=(1,), reason="rank 1 is in C code")


class Requests:
    """Pending requests, and what came of the reports that nobody took."""

    def __init__(self) -> None:
        self.orphans: list[messages.CallOutput] = []
        self.declined: list[messages.InputRequest] = []
        self.errors: list[BaseException] = []
        self.pending = PendingRequests(
            on_orphan_output=self.orphans.append, decline_input=self.declined.append, on_error=self.errors.append
        )

    def open(self, **handlers: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending.add(CALL, PendingRequest(future, **handlers))
        return future

    def report(self, report: Any) -> None:
        self.pending.report_handlers[type(report)](report)


def test_a_call_ends_with_its_last_output_shown() -> None:
    requests, shown = Requests(), list[Any]()
    future = requests.open(on_output=shown.append)
    finished = messages.CallFinished(call=CALL, outcomes=(), seconds=0.0, items=(ITEM,))
    requests.report(finished)
    assert (shown, future.result(0), len(requests.pending)) == ([(ITEM,)], finished, 0)
    requests.report(finished)  # of another client, or a second time: nobody waits
    assert shown == [(ITEM,)]


def test_a_call_ends_although_its_output_cannot_be_shown() -> None:
    requests = Requests()
    future = requests.open(on_output=lambda items: {}["x"])
    requests.report(messages.CallFinished(call=CALL, outcomes=(), seconds=0.0, items=(ITEM,)))
    assert future.done()
    assert [type(error) for error in requests.errors] == [KeyError]


def test_the_last_output_of_a_call_that_takes_none_is_an_orphans() -> None:
    requests = Requests()
    future = requests.open()  # a batch of operations that is not waited for
    requests.report(messages.CallFinished(call=CALL, outcomes=(), seconds=0.0, items=(ITEM,)))
    assert future.done()
    assert requests.orphans == [messages.CallOutput(call=CALL, items=(ITEM,))]


def test_output_that_no_call_takes_is_an_orphans() -> None:
    requests = Requests()
    output = messages.CallOutput(call=CALL, items=(ITEM,))
    requests.report(output)
    requests.open()
    requests.report(output)
    assert requests.orphans == [output, output]


def test_an_input_request_that_nobody_takes_is_declined() -> None:
    requests, taken = Requests(), list[messages.InputRequest]()
    request = messages.InputRequest(call=CALL, rank=0, prompt="name? ", password=False)
    requests.report(request)
    requests.open(on_input=taken.append)
    requests.report(request)
    assert (requests.declined, taken) == ([request], [request])


def test_stuck_ranks_are_told_to_who_waits_else_shown_with_the_output() -> None:
    requests, reported, shown = Requests(), list[Any](), list[Any]()
    requests.report(STUCK)  # the call has ended
    requests.open(on_output=shown.append)
    requests.report(STUCK)
    assert "did not come back from Stop: rank 1 is in C code" in shown[0][0].item.text
    requests.pending.set_handlers(CALL, on_stuck=reported.append)
    requests.report(STUCK)
    assert (reported, len(shown), requests.orphans) == ([STUCK], 1, [])


def test_what_is_reported_of_a_search_or_a_start_goes_to_whoever_has_asked_until_the_reply() -> None:
    requests, reported = Requests(), list[Any]()
    found = messages.LogsFound(call=CALL)
    requests.open(on_report=reported.append)
    requests.report(found)
    requests.report(messages.CommandReply(call=CALL))
    requests.report(found)
    assert reported == [found]


def test_a_call_fails_alone_or_with_all_others() -> None:
    requests = Requests()
    future = requests.open()
    assert requests.pending.fail(CALL, UsageError("no"))
    assert not requests.pending.fail(CALL, UsageError("no"))
    with pytest.raises(UsageError):
        future.result(0)
    other = requests.open()
    requests.pending.fail_all("gone")
    with pytest.raises(NotAttached, match="gone"):
        other.result(0)


def test_a_request_that_comes_after_the_end_of_the_mesh_ends_at_once() -> None:
    pending, future = Requests().pending, Future[Any]()
    pending.fail_all("the mesh has ended")
    pending.add(CALL, PendingRequest(future))
    with pytest.raises(NotAttached, match="the mesh has ended"):
        future.result(0)
    assert len(pending) == 0
