"""How long tests wait for what comes for certain: one limit for all, which no busy machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from meshbook.clock import STRETCH

# Longer on machines that are slower, or that others share, as what Meshbook itself waits for ranks.
WAIT_S = 60.0 * STRETCH

# Seconds after which a look at something that has not come to pass is repeated.
POLL_S = 0.01


def when(seen: Callable[[], object], what: str = "it", *, within_s: float = WAIT_S) -> float:
    """Look until something is so; how long that took, in seconds."""
    began = time.monotonic()
    while not seen():
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"{what} did not come to pass within {within_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def when_printed(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Wait until a text is on stdout or stderr, and return what was printed meanwhile. It may come in pieces."""
    printed: list[str] = []

    def is_there() -> bool:
        printed.extend(capsys.readouterr())
        return any(text in "".join(printed[stream::2]) for stream in (0, 1))

    when(is_there, repr(text))
    return "".join(printed)
