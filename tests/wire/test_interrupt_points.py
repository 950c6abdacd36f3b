"""Where a KeyboardInterrupt may be raised, and for how long it is postponed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from meshbook.wire import interrupt_points
from meshbook.wire.interrupt_points import NUM_BLOCKED_TRIES, NUM_TRIES, PostponedInterrupt, can_interrupt


class Lock:
    """A lock that notes whether its callers can be interrupted."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def acquire(self, *args: Any) -> bool:
        self.found.append(can_interrupt(sys._getframe(1)))
        return True

    release = __enter__ = __exit__ = acquire


def test_conditions_cannot_be_interrupted_as_they_take_and_give_back_their_lock() -> None:
    lock = Lock()
    with threading.Condition(lock):  # type: ignore[arg-type]
        assert can_interrupt(sys._getframe())
    assert lock.found == [False, False]


def test_a_wait_for_a_condition_can_be_interrupted_but_not_as_it_begins_and_ends() -> None:
    waits = Lock()
    lock, before = Lock(), threading._allocate_lock  # type: ignore[attr-defined]
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    condition._is_owned = lambda: True  # type: ignore[attr-defined]
    threading._allocate_lock = lambda: waits  # type: ignore[attr-defined]
    try:
        condition.wait(1)
    finally:
        threading._allocate_lock = before  # type: ignore[attr-defined]
    assert waits.found == [False, True]  # as its lock is made, and as it waits for that
    assert lock.found == [False, False]  # the condition's own is given back and taken again


def test_a_wait_for_a_child_can_be_interrupted_as_popen_expects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    child: Any = SimpleNamespace(pid=1)
    monkeypatch.setattr(os, "waitpid", lambda pid, flags: found.append(can_interrupt(sys._getframe(1))) or (pid, 0))
    assert subprocess.Popen._try_wait(child, 0) == (1, 0)  # type: ignore[attr-defined]
    assert found == [True]


def test_the_body_of_a_context_manager_can_be_interrupted() -> None:
    found = []

    @contextlib.contextmanager
    def manager() -> Iterator[None]:
        found.append(can_interrupt(sys._getframe()))
        found.append(can_interrupt(sys._getframe(1)))  # contextlib's own
        yield

    with manager():
        pass
    assert found == [True, False]


def test_finalizers_cannot_be_interrupted_nor_what_they_call() -> None:
    found = []

    class Closes:
        def __del__(self) -> None:
            self.close()

        def close(self) -> None:
            found.append(can_interrupt(sys._getframe()))

    Closes()
    gc.collect()
    assert found == [False]


@pytest.mark.parametrize(("module", "name"), sorted(interrupt_points._FUNCTIONS))
def test_the_functions_that_must_complete_are_called_so(module: str, name: str) -> None:
    """In this version of Python, and of torch."""
    if module.startswith("torch"):
        pytest.importorskip("torch")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__code__.co_qualname == name


# ---- how often it is tried


def _guarded_frame() -> FrameType:
    """A frame in which nothing may be interrupted."""
    frames: list[FrameType] = []

    class Closes:
        def __del__(self) -> None:
            frames.append(sys._getframe())

    Closes()
    gc.collect()
    return frames[0]


def _guarded_module_frame() -> FrameType:
    """A frame of the standard library in which nothing may be interrupted."""
    frames: list[FrameType] = []
    lock = SimpleNamespace(acquire=None, release=None, __enter__=lambda: frames.append(sys._getframe(1)))
    threading.Condition(lock).__enter__()  # type: ignore[arg-type]
    return frames[0]


def test_an_interrupt_is_raised_at_once_where_it_may_be() -> None:
    postponed = PostponedInterrupt(ends_calls=True)
    assert not postponed.try_again(sys._getframe())
    assert not postponed.try_again(None)
    assert not postponed.is_pending


def test_an_interrupt_waits_until_the_thread_is_out_of_such_code() -> None:
    postponed = PostponedInterrupt(ends_calls=True)
    assert postponed.try_again(_guarded_frame())
    assert postponed.is_pending
    assert not postponed.try_again(sys._getframe())
    assert not postponed.is_pending


def test_code_that_goes_on_and_on_is_interrupted_after_so_many_tries() -> None:
    tries, frames = 0, [_guarded_module_frame(), _guarded_frame()]
    postponed = PostponedInterrupt(ends_calls=True)
    while postponed.try_again(frames[tries % 2]):
        tries += 1
    assert tries == NUM_TRIES - 1


def test_a_thread_that_waits_in_one_call_is_interrupted_sooner() -> None:
    for frame, wanted in ((_guarded_module_frame(), NUM_BLOCKED_TRIES), (_guarded_frame(), NUM_TRIES - 1)):
        postponed, tries = PostponedInterrupt(ends_calls=True), 0
        while postponed.try_again(frame):
            tries += 1
        assert tries == wanted


def test_an_interrupt_that_cannot_end_a_call_waits_for_its_end() -> None:
    postponed, frame = PostponedInterrupt(ends_calls=False), _guarded_module_frame()
    for _ in range(2 * NUM_TRIES):
        assert postponed.try_again(frame)
    assert postponed.try_again(_guarded_frame())  # it goes on, and has its lock
    assert not postponed.try_again(sys._getframe())
