"""The order in which an actor takes what it is sent, and which calls an interrupt meets."""

from __future__ import annotations

from typing import Any

from meshbook.actors.runtime.calls import IncomingCall, StopRequest
from meshbook.actors.runtime.faults import MeshFailure
from meshbook.actors.runtime.mailbox import Mailbox
from meshbook.wire import messages


class Sender:
    id = 7


def _call(number: int) -> IncomingCall:
    return IncomingCall(None, Sender(), messages.CallActor("a-1", "step", number))  # type: ignore[arg-type]


def _taken(mailbox: Mailbox, **how: Any) -> list[Any]:
    return list(iter(lambda: mailbox.get(block=False, **how), None))


def test_messages_keep_their_order_and_failures_come_first() -> None:
    mailbox, failure = Mailbox(), MeshFailure("workers", (1,), "it is lost")
    call, stop = _call(1), StopRequest(None, messages.StopActor(0, "a-1", "done"))
    mailbox.put(call)
    mailbox.put(stop)
    mailbox.put_first(failure)
    assert _taken(mailbox) == [failure, call, stop]
    assert mailbox.get(block=False) is None
    assert len(mailbox) == 0


def test_an_interrupt_meets_what_was_queued_before_it_and_nothing_after() -> None:
    mailbox = Mailbox()
    before, after, last = (_call(number) for number in range(1, 4))
    mailbox.put(before)
    mailbox.interrupt_queued()
    mailbox.put(after)
    assert mailbox.is_interrupted
    mailbox.interrupt_queued()
    mailbox.put(last)
    assert [call.is_interrupted for call in _taken(mailbox)] == [True, True, False]
    assert not mailbox.is_interrupted


def test_an_actor_that_is_stopping_takes_failures_and_leaves_messages() -> None:
    mailbox, failure = Mailbox(), MeshFailure("workers", (1,), "it is lost")
    mailbox.put(_call(1))
    mailbox.put_first(failure)
    assert _taken(mailbox, only_first=True) == [failure]
    assert [call.key for call in _taken(mailbox)] == [(7, 1)]


def test_a_message_that_expects_no_reply_has_a_key_of_its_own() -> None:
    first, second = _call(0), _call(0)
    assert first.key[0] == second.key[0] == -1
    assert first.key != second.key
    assert not first.expects_reply
