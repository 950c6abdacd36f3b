"""Ends of collectives on a CUDA stream: one event for each slot of the ring, which later collectives use again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshbook.rank.process_groups import cuda
from meshbook.rank.process_groups.cuda import finish_on_stream
from meshbook.rank.process_groups.ring import Collective, CollectiveRing, GroupLabel

WORLD = GroupLabel("world", (0, 1))


class Card:
    """A GPU that completes what it is asked to, in the order of the one stream."""

    def __init__(self) -> None:
        self.num_events = self.num_enqueued = self.num_done = 0
        self.is_capturing = False


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()

    class Event:
        def __init__(self) -> None:
            card.num_events += 1
            self.at = 0

        def record(self, stream: str) -> None:
            assert stream == "the stream"
            card.num_enqueued += 1
            self.at = card.num_enqueued

        def query(self) -> bool:
            return self.at <= card.num_done

    monkeypatch.setattr(cuda, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (5, device, 1), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.is_capturing)
    return card


def launch(ring: CollectiveRing) -> Collective:
    record = ring.begin("all_reduce", WORLD)
    finish_on_stream(ring, record)
    return record


def test_collectives_end_when_the_device_has_come_to_them_and_not_before(card: Card) -> None:
    ring = CollectiveRing(4)
    first, second = launch(ring), launch(ring)
    assert ring.running() == (first, second)
    card.num_done = 1
    assert ring.running() == (second,)
    card.num_done = 2
    assert ring.running() == ()


def test_a_loop_that_nobody_looks_at_makes_as_many_events_as_the_ring_has_slots(card: Card) -> None:
    ring = CollectiveRing(4)
    for _ in range(50):
        launch(ring)
    assert (card.num_events, len(ring.running())) == (4, 4)
    card.num_done = card.num_enqueued
    assert ring.running() == ()


def test_a_collective_whose_event_a_later_one_has_is_over_for_those_who_still_hold_it(card: Card) -> None:
    ring = CollectiveRing(4)
    first = launch(ring)
    ring.poll_completion([first])
    assert first.t_end is None
    later = [launch(ring) for _ in range(4)]
    ring.poll_completion([first])
    assert first.t_end is not None
    assert ring.running() == tuple(later)


def test_a_wait_for_a_collective_that_the_ring_has_forgotten_leaves_the_later_ones_event_as_it_is(card: Card) -> None:
    ring = CollectiveRing(4)
    first = ring.begin("all_reduce", WORLD)
    later = [launch(ring) for _ in range(4)]
    card.num_done = card.num_enqueued
    finish_on_stream(ring, first)
    assert (first.t_end is not None, ring.running(), card.num_enqueued) == (True, (), len(later))


def test_a_graph_under_capture_records_no_event(card: Card) -> None:
    ring: Any = CollectiveRing(4)
    card.is_capturing = True
    assert (launch(ring).t_end is not None, card.num_events) == (True, 0)
