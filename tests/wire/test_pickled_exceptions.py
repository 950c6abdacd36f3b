"""Exceptions arrive as what they were, whatever their `__init__` takes."""

from __future__ import annotations

import copyreg
import subprocess
from typing import Any

import pytest

from meshbook.wire.pickling import dump, load


class TwoParts(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left, self.right = left, right


class Worded(Exception):
    """Python's own way gives `__init__` its text for the code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OfFile(OSError):
    def __init__(self, step: int, *args: Any) -> None:
        super().__init__(*args)
        self.step = step


class Mixed(KeyError, OSError):
    def __init__(self, *, step: int) -> None:
        super().__init__(2, "no such step")
        self.step = step


class Undecoded(UnicodeDecodeError):
    def __init__(self, text: bytes) -> None:
        super().__init__("utf-8", text, 0, 1, "bad start")


class Reduced(Exception):
    """Says itself how it is pickled."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__("reduced")
        self.sum = left + right

    def __reduce__(self) -> Any:
        return Reduced, (1, self.sum - 1)


class Registered(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__("registered")


def _visit(error: Any) -> Any:
    return load(dump(error, pool=None))


@pytest.mark.parametrize(
    "error",
    [
        TwoParts(1, 2),
        Worded(5),
        OfFile(3, 2, "No such file", "/data/x"),
        Mixed(step=4),
        Undecoded(b"\xff"),
        subprocess.CalledProcessError(3, ["ls"], output="out"),
        ValueError("plain", 1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_its_arguments_and_attributes(error: Any) -> None:
    error.add_note("on the way")
    arrived = _visit([error])[0]
    assert type(arrived) is type(error)
    assert (arrived.args, str(arrived), vars(arrived)) == (error.args, str(error), vars(error))


def test_what_python_keeps_beside_the_attributes_arrives_too() -> None:
    arrived = _visit([OfFile(3, 2, "No such file", "/data/x"), Undecoded(b"\xff")])
    assert (arrived[0].errno, arrived[0].filename) == (2, "/data/x")
    assert (arrived[1].object, arrived[1].reason) == (b"\xff", "bad start")


def test_a_class_that_says_how_it_is_pickled_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vars(_visit(Reduced(1, 2))) == {"sum": 3}
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda error: (ValueError, ("instead",)))
    assert repr(_visit(Registered(1, 2))) == "ValueError('instead')"
