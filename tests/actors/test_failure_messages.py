"""What a caller gets of an exception that an endpoint has raised, however odd it is."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshbook.actors.runtime import faults
from meshbook.errors import TransferError
from meshbook.wire import messages, pickling


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


@pytest.mark.parametrize(("file", "is_shown"), [(__file__, True), (pickling.__file__, False)])
def test_an_error_of_meshbooks_has_a_traceback_if_user_code_has_led_to_it(file: str, is_shown: bool) -> None:
    refusal = TransferError("the value needs module `m`")
    with pytest.raises(TransferError) as caught:
        exec(compile("raise refusal", file, "exec"), {"refusal": refusal})
    refusal.__traceback__ = caught.tb.tb_next  # without this test's own frame
    assert ("the value" in faults.describe_exception(refusal, call=1).traceback) is is_shown


def test_a_frame_of_a_function_from_here_that_ipython_has_drawn_elsewhere_gets_its_line(tmp_path: Path) -> None:
    file = tmp_path / "cell.py"
    file.write_text("def f(x):\n    return x / 0\n")
    drawn = f"File \x1b[32m{file}:2\x1b[39m, in \x1b[36mf\x1b[39m(x)\n      1 '{faults._NO_SOURCE}'\n"
    assert faults.with_source(drawn) == f'File "{file}", line 2, in f(x)\n----> 2     return x / 0\n'
    unknown = drawn.replace("cell.py", "other.py")
    assert faults.with_source(unknown) == unknown


def test_of_failures_that_differ_each_has_its_lines_of_source(tmp_path: Path) -> None:
    file = tmp_path / "cell.py"
    file.write_text("def f():\n    raise ValueError(rank)\n")
    trace = f'Traceback (most recent call last):\n  File "{file}", line 2, in f\nValueError\n'
    error = faults.ActorError(ValueError(0), ranks=(0,), traceback=trace, others=[((1,), ValueError(1), trace)])
    assert str(error).count("    raise ValueError(rank)") == 2
