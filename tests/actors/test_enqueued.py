"""What readers of a GPU's buffers wait for: the event that a message or a cell's end records. Without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshbook.actors.memory import cuda
from meshbook.actors.runtime import payloads
from meshbook.actors.runtime.payloads import PayloadCodec
from meshbook.rank import actor_hooks


class Stream:
    """Work that was enqueued on it, in order; what others see of it comes by events."""

    def __init__(self) -> None:
        self.work: list[str] = []

    def wait_event(self, event: Event) -> None:
        self.work += [each for each in event.covers if each not in self.work]


class Event:
    def __init__(self, interprocess: bool) -> None:
        assert interprocess
        self.covers: list[str] = []

    def record(self, stream: Stream) -> None:
        self.covers = list(stream.work)

    def ipc_handle(self) -> bytes:
        return b"event"


class Card:
    """A GPU whose streams only remember what was enqueued."""

    def __init__(self) -> None:
        self.current = Stream()
        self.is_capturing = False
        self.is_dead = False

    def current_stream(self, device: object) -> Stream:
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.current


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", card.current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.is_capturing)
    return card


@pytest.fixture
def enqueued(card: Card, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the first buffer of a device begins."""
    enqueued = cuda._Enqueued(torch.device("cuda", 0))
    monkeypatch.setitem(cuda._enqueued, torch.device("cuda", 0), enqueued)
    monkeypatch.setattr(payloads, "handover_callbacks", [cuda.record_enqueued])
    return enqueued


@pytest.mark.parametrize("value", [None, (1, "plain"), torch.ones(2)], ids=["nothing", "plain", "a tensor"])
def test_a_message_has_readers_wait_for_what_its_sender_had_enqueued(card: Card, enqueued: Any, value: Any) -> None:
    card.current.work.append("fill")
    assert enqueued.event.covers == []
    PayloadCodec().pack(value, ())
    assert enqueued.event.covers == ["fill"]


def test_a_call_without_arguments_and_the_end_of_a_cell_do_too(card: Card, enqueued: Any) -> None:
    card.current.work.append("step")
    PayloadCodec().pack_arguments((), {}, ())
    assert enqueued.event.covers == ["step"]
    card.current.work.append("cell")
    actor_hooks.call_ended()
    assert enqueued.event.covers == ["step", "cell"]


def test_work_on_another_stream_stays_waited_for(card: Card, enqueued: Any) -> None:
    card.current.work.append("on the first")
    cuda.record_enqueued()
    card.current = Stream()
    card.current.work.append("on the second")
    cuda.record_enqueued()
    assert sorted(enqueued.event.covers) == ["on the first", "on the second"]


def test_a_capture_and_a_dead_context_do_not_hold_up_the_message(card: Card, enqueued: Any) -> None:
    card.is_capturing = True
    card.current.work.append("captured")
    cuda.record_enqueued()
    assert enqueued.event.covers == []
    card.is_capturing, card.is_dead = False, True
    assert PayloadCodec().pack("an answer", ())[0] is not None
