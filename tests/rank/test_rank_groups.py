"""Collectives that wait, after a Stop, until the call is over everywhere: groups among calls, without a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshbook.ids import CallId
from meshbook.rank.call_state import CallState
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.wire.messages import FormGroups, Outcome, ResumeCollectives

STOPPED = CallId("a-1")


class Rank:
    """A rank between two calls, with process groups that have no backends."""

    def __init__(self) -> None:
        spec = SimpleNamespace(torch=True, process_group=True, axes={"dp": 1}, group_timeout_s=60.0)
        config: Any = SimpleNamespace(spec=spec, rank=0, local_rank=0, world_size=1, token="")
        unused: Any = None
        self.state = CallState(0)
        self.groups: Any = RankGroups(
            config, "cpu", self.state, unused, unused, unused, running_file=lambda: None, describe_error=unused
        )
        self.groups._groups, self.groups._store = ProcessGroups(self.groups.ring), object()
        self.state.groups_forming()

    def begin(self) -> None:
        self.groups.call_began(STOPPED, "cell 1", 0.0)

    def end(self, status: Any = "ok") -> None:
        self.groups.conclude(STOPPED, Outcome(status=status))

    def resume(self) -> None:
        self.groups.positions_checked(ResumeCollectives(ranks=(0,), about_call=STOPPED, generation=1))

    @property
    def is_held(self) -> bool:
        held: bool = self.groups.process_groups.table.is_held
        return held


def test_collectives_after_a_call_that_is_stopped_wait_until_it_is_over_everywhere() -> None:
    rank = Rank()
    rank.begin()
    rank.groups.hold_after(STOPPED)
    rank.end()
    assert rank.is_held
    rank.resume()
    assert not rank.is_held


def test_a_late_abort_of_a_call_that_is_stopped_spares_what_the_rank_runs_then() -> None:
    """It interrupted the rank as it formed groups for a heal, and the others waited for it."""
    rank = Rank()
    rank.groups.process_groups._generation.number = 1
    rank.groups.process_groups._generation._num_rendezvous = 1  # it waits for the others
    rank.begin()
    rank.end("interrupted")
    rank.state.ended(STOPPED, "cell 1", Outcome(status="interrupted"))
    rank.groups.call_began(CallId("form-2"), "", 0.0)
    rank.groups.abort("interrupted", interrupt=True, call=STOPPED)
    assert not rank.groups.process_groups.is_broken
    rank.groups.abort("interrupted", interrupt=True, call=CallId("form-2"))
    assert rank.groups.process_groups.is_broken


def test_a_call_that_was_taken_back_holds_nothing_when_the_rank_hears_of_it_at_last() -> None:
    rank = Rank()
    rank.groups.hold_after(STOPPED)
    assert rank.is_held
    rank.resume()
    rank.begin()
    rank.end()
    assert not rank.is_held


def test_a_call_that_was_taken_back_before_groups_were_formed_anew_holds_nothing_behind_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    rank.groups.hold_after(STOPPED)
    monkeypatch.setattr(ProcessGroups, "form", lambda groups, *_, **__: groups.table.resume())
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    rank.groups.form(FormGroups(call=CallId("form-1"), ranks=(0,), generation=2, store_address=""))
    rank.begin()
    rank.end()
    assert not rank.is_held
