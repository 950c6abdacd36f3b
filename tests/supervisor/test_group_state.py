"""Whether process groups can be used: from what was requested, what ranks said when forming them, and who was lost."""

from __future__ import annotations

import pytest

from meshbook.supervisor.group_state import GroupState
from meshbook.wire.messages import Outcome, OutcomeGroup, RankError

RANKS = (0, 1)
FORMED = (OutcomeGroup(RANKS, Outcome(status="ok", reply={"backend": "gloo"})),)
ERROR = RankError(ename="OSError", evalue="no descriptors", traceback=())
FAILED = (OutcomeGroup((0,), Outcome(status="ok")), OutcomeGroup((1,), Outcome(status="error", error=ERROR)))


def groups(status: str = "ready") -> GroupState:
    state = GroupState("ipc:///store")
    state.request()
    state.begin_forming(RANKS)
    if status == "ready":
        state.formed(FORMED, "")
    return state


def test_each_time_they_are_formed_is_a_generation_of_its_own() -> None:
    state = groups()
    assert (state.status, state.generation, state.backend) == ("ready", 1, "gloo")
    command = state.begin_forming(RANKS)
    assert (command.call, command.generation, command.store_address) == ("form-2", 2, "ipc:///store")
    assert state.status == "forming"


def test_a_mesh_that_requested_none_has_none_whatever_ranks_reply() -> None:
    state = GroupState("")
    state.begin_forming(RANKS)
    state.formed((OutcomeGroup(RANKS, Outcome(status="ok", reply={"backend": None})),), "")
    state.rank_lost()
    assert (state.status, state.backend) == ("none", None)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("", "rank 1: OSError: no descriptors"), ("rank 0: it was first", "rank 0: it was first")],
)
def test_a_failure_is_that_of_the_rank_that_failed_first(failure: str, reason: str) -> None:
    state = groups("forming")
    assert state.formed(FAILED, failure) == reason
    assert (state.status, state.has_failed) == ("broken", True)


@pytest.mark.parametrize("status", ["forming", "ready"])
def test_a_lost_member_breaks_them(status: str) -> None:
    state = groups(status)
    state.rank_lost()
    assert state.status == "broken"
    state.formed(FORMED, "")  # what was under way does not heal them
    assert state.status == "broken"
