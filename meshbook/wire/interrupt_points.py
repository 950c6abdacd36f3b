"""Where a KeyboardInterrupt may be raised: not inside functions that must complete.

CPython raises between any two instructions, also between `lock.acquire()` and `try:` in the standard library's Python
code: in `Condition.__enter__`, in a hook of `os.fork`, between a fork and the line that stores the child's pid. Then
the lock stays held, and other threads wait for it for ever; or the child stays, and nobody ends it. In a hook or a
`__del__` the exception is dropped. Whoever raises asks here, and tries again a little later.
"""

from __future__ import annotations

import dis
import functools
import subprocess
import threading
from types import CodeType, FrameType
from typing import Final

# How often an interrupt is tried, every millisecond or so, before it is raised wherever the thread is: code that never
# ends can be interrupted. Not seconds, because a thread that gets no core is not tried.
NUM_TRIES: Final = 1500
# The same, if the thread waits in one call all the while: for a lock, for example.
NUM_BLOCKED_TRIES: Final = 150

# Modules in which locks are taken and given back, children started, and callbacks taken out of a queue, by Python code
# of a few lines. What they call (a thread's target, a logging handler's stream, the body of a context manager, a task's
# coroutine) can be interrupted, and so can the event loop's wait, which is in `selectors`.
_MODULES: Final = frozenset({
    "_frozen_importlib", "_weakrefset", "asyncio.base_events", "asyncio.events", "asyncio.selector_events",
    "concurrent.futures._base", "concurrent.futures.process", "concurrent.futures.thread", "contextlib",
    "importlib._bootstrap", "logging", "logging.handlers", "multiprocessing.connection", "multiprocessing.context",
    "multiprocessing.heap", "multiprocessing.managers", "multiprocessing.pool", "multiprocessing.popen_fork",
    "multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix", "multiprocessing.process",
    "multiprocessing.queues", "multiprocessing.reduction", "multiprocessing.resource_sharer",
    "multiprocessing.resource_tracker", "multiprocessing.synchronize", "multiprocessing.util", "queue", "subprocess",
    "threading", "weakref",
})  # fmt: skip
# Functions that must complete with all that they call, by module and qualified name. DataLoader's workers are known to
# what ends them only when the iterator's `__init__` has ended.
_FUNCTIONS: Final = frozenset({
    ("multiprocessing.process", "BaseProcess.start"),
    ("subprocess", "Popen.__init__"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter.__init__"),
})  # fmt: skip
# Functions of these modules that wait for long, and restore everything in their `try` if an exception ends the wait; or
# whose callers do, as those of Popen's wait for a child do for a KeyboardInterrupt.
_WAITS: Final = frozenset({
    code for function in (
        threading.Condition.wait, getattr(threading.Thread, "_wait_for_tstate_lock", None),
        getattr(subprocess.Popen, "_try_wait", None),
    )
    if (code := getattr(function, "__code__", None)) is not None
})  # fmt: skip


def can_interrupt(frame: FrameType | None) -> bool:
    """Return whether an exception may be raised where the thread with this innermost frame is now."""
    if frame is None:
        return True
    if frame.f_globals.get("__name__") in _MODULES and not (frame.f_code in _WAITS and _is_in_try(frame)):
        return False
    return not _is_in_function(frame)


def _is_in_function(frame: FrameType) -> bool:
    """Return whether one of the functions that must complete with all that they call is on the stack."""
    outer: FrameType | None = frame
    while outer is not None:
        code = outer.f_code
        if code.co_name == "__del__" or (outer.f_globals.get("__name__"), code.co_qualname) in _FUNCTIONS:
            return True
        outer = outer.f_back
    return False


def _is_in_try(frame: FrameType) -> bool:
    return any(begin <= frame.f_lasti < end for begin, end in _try_ranges(frame.f_code))


@functools.cache
def _try_ranges(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return the offsets of the instructions in `try` bodies, without those in handlers and `finally` blocks."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed has it not
    return tuple((entry.start, entry.end) for entry in entries if not entry.depth and not entry.lasti)


class PostponedInterrupt:
    """Decides whether an interrupt of a thread is raised now or tried again, at each try."""

    def __init__(self, *, ends_calls: bool) -> None:
        """ends_calls: whether the interrupt ends a call in which the thread waits, as a signal does.

        If so, a thread that waits in one call is interrupted there after `NUM_BLOCKED_TRIES`. If not, the interrupt
        would strike right after the call, when its lock is held: it waits with the thread.
        """
        self._ends_calls = ends_calls
        self._num_tries = self._num_tries_here = 0
        self._place: tuple[int, int] | None = None  # where the thread was at the last try

    @property
    def is_pending(self) -> bool:
        """Whether an interrupt waits to be tried again."""
        return self._place is not None

    def try_again(self, frame: FrameType | None) -> bool:
        """Return whether the interrupt is to be tried again. frame: the thread's innermost."""
        if frame is None or can_interrupt(frame):
            self.clear()
            return False
        place = id(frame), frame.f_lasti
        is_blocked, self._place = place == self._place, place
        if is_blocked and not self._ends_calls:
            return True
        self._num_tries += 1
        self._num_tries_here = self._num_tries_here + 1 if is_blocked else 0
        max_tries_here = NUM_TRIES if _is_in_function(frame) else NUM_BLOCKED_TRIES
        if self._num_tries < NUM_TRIES and self._num_tries_here < max_tries_here:
            return True
        self.clear()
        return False

    def clear(self) -> None:
        self._num_tries = self._num_tries_here = 0
        self._place = None
