"""Messages of exceptions that cannot say what they are about."""

from __future__ import annotations

from meshbook.actors.runtime.faults import ActorError
from meshbook.errors import message_of
from meshbook.rank.checkpoints.exchange import attempt
from meshbook.rank.process_groups.ring import one_line_error


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def fail() -> None:
    raise NoText


def test_an_exception_whose_str_raises_is_reported_by_its_class() -> None:
    expected = "<unprintable NoText>"
    assert message_of(NoText()) == expected
    assert str(ActorError(NoText(), "the endpoint failed", ranks=(1,))).endswith(f"rank 1: NoText: {expected}")
    assert one_line_error(NoText()) == attempt(fail).error == f"NoText: {expected}"
