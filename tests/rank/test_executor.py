"""Collectives that wait, after a call was stopped, until it is over everywhere: one rank's executor without a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshbook.ids import CallId
from meshbook.rank.executor import Executor
from meshbook.rank.groups import ProcessGroups
from meshbook.rank.ring import CollectiveRing
from meshbook.wire.messages import FormGroups, Outcome, ResumeCollectives

STOPPED = CallId("a-1")


def at_rest() -> Executor:
    """An executor between two calls; it has what concerns process groups, and none of these."""
    executor: Any = Executor.__new__(Executor)
    executor._groups, executor._left_positions = ProcessGroups(CollectiveRing()), {}
    executor._holding_call = executor.running_call_id = None
    made: Executor = executor
    return made


def test_collectives_after_a_call_that_is_stopped_wait_until_it_is_over_everywhere() -> None:
    executor = at_rest()
    executor.running_call_id = STOPPED
    executor.hold_collectives_after(STOPPED)
    executor._apply_to_groups(STOPPED, Outcome(status="ok"))
    assert executor._groups.is_held
    executor.groups_checked(ResumeCollectives(ranks=(0,), about_call=STOPPED, generation=1))
    assert not executor._groups.is_held


def test_a_call_that_was_taken_back_holds_nothing_when_the_rank_hears_of_it_at_last() -> None:
    executor = at_rest()
    executor.hold_collectives_after(STOPPED)
    assert executor._groups.is_held
    executor.groups_checked(ResumeCollectives(ranks=(0,), about_call=STOPPED, generation=1))
    executor._apply_to_groups(STOPPED, Outcome(status="ok"))
    assert not executor._groups.is_held


def test_a_call_that_was_taken_back_before_groups_were_formed_anew_holds_nothing_behind_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor: Any = at_rest()
    executor.hold_collectives_after(STOPPED)
    spec = SimpleNamespace(torch=True, process_group=True, axes={"dp": 1})
    executor.config, executor.device = SimpleNamespace(spec=spec, rank=0, local_rank=0, world_size=1), "cpu"
    executor.shell, executor._store = SimpleNamespace(bind_presets=lambda **names: None, user_ns={}), object()
    monkeypatch.setattr(ProcessGroups, "form", lambda groups, *_, **__: groups.resume_collectives())
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    executor._form_groups(FormGroups(call=CallId("form-1"), ranks=(0,), generation=2, store_address=""))
    executor._apply_to_groups(STOPPED, Outcome(status="ok"))
    assert not executor._groups.is_held
