"""What a caller gets of an exception that an endpoint has raised, however odd it is."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec
import pytest

from meshbook.actors.runtime import faults
from meshbook.wire import messages


class NoStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ExitStr(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


class NoNotes(Exception):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.response, name)  # there is none, and so on


class NoReduce(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit("not to be pickled")


class Timing(Exception):
    def __init__(self, step: int, seconds: float) -> None:
        super().__init__(f"step {step} took {seconds} s")
        self.step, self.seconds = step, seconds


def _error_of_call(raised: BaseException) -> faults.ActorError:
    """Raise it, and send it as an actor does."""
    try:
        raise raised
    except BaseException as error:
        failure = faults.describe_exception(error, call=1)
    sent = msgspec.msgpack.encode(failure)
    return faults.combine_failures({0: msgspec.msgpack.decode(sent, type=messages.ActorFailure)}, "a.step", "a")


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (NoStr(), "NoStr: <unprintable NoStr>"),
        (ExitStr(), "ExitStr: <unprintable ExitStr>"),
        (NoNotes("lost"), "NoNotes: lost"),
        (NoReduce("odd"), "NoReduce: odd"),
        (ValueError("file \udc80"), r"ValueError: file \udc80"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_exception_that_is_hard_to_show_or_send_reaches_its_caller(raised: Exception, text: str) -> None:
    error = _error_of_call(raised)
    assert str(error).splitlines()[1] == f"rank 0: {text}"
    assert "".join(traceback.format_exception(error))


def test_an_exception_reaches_its_caller_with_its_attributes() -> None:
    exception = _error_of_call(Timing(3, 0.5)).exception
    assert isinstance(exception, Timing)
    assert (exception.step, exception.seconds, str(exception)) == (3, 0.5, "step 3 took 0.5 s")


def test_an_exception_keeps_the_frames_of_whoever_holds_it() -> None:
    error = NoStr()
    _error_of_call(error)
    assert error.__traceback__ is not None
