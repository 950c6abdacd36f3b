"""What a request to stop in the debugger meets, by what the rank does when it comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meshbook.rank.call_state import CallState
from meshbook.rank.cells.stop_requests import StopRequests
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.wire.messages import DebuggerPlace, Outcome, StopInDebugger


class Parts:
    """What the requests use of a rank; nothing of it stops anything."""

    is_armed = is_waiting = False
    debugged_call: str | None = None

    def also_handle(self, _number: int, handler: Any) -> None:
        self.signal = handler


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def state() -> CallState:
    return CallState(0)


@pytest.fixture
def requests(state: CallState, parts: Any, monkeypatch: pytest.MonkeyPatch) -> StopRequests:
    monkeypatch.setattr("_thread.start_new_thread", lambda *_: 0)
    found = StopRequests(state, parts, parts, parts, CollectiveRing(), lambda _: None)
    found._main_thread = threading.get_ident()
    return found


def ask(requests: StopRequests) -> DebuggerPlace:
    return requests.request(StopInDebugger("b-1", (0,), "a-1"))  # type: ignore[arg-type]


def end(state: CallState, call: Any) -> None:
    state.ended(call, "cell", Outcome(status="ok"))


def test_a_rank_that_has_not_begun_the_call_stops_when_it_has(
    requests: StopRequests, state: CallState, parts: Parts
) -> None:
    state.began("a-0", "cell 1", now=0.0, last_seq=0)  # type: ignore[arg-type]
    assert ask(requests) == DebuggerPlace(inside="what it runs before it")
    parts.signal(0, None)
    assert requests._requested_at is not None
    state.began("a-1", "cell 2", now=1.0, last_seq=0)  # type: ignore[arg-type]
    parts.signal(0, None)
    assert requests._requested_at is not None  # to stop at the next line of user code
    end(state, "a-1")
    parts.signal(0, None)
    assert requests._requested_at is None


def test_a_rank_that_has_ended_the_call_says_so(requests: StopRequests, state: CallState) -> None:
    state.began("a-1", "cell 1", now=0.0, last_seq=0)  # type: ignore[arg-type]
    end(state, "a-1")
    assert ask(requests) == DebuggerPlace(problem="has ended its part of it")
    assert requests._requested_at is None
