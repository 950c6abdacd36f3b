"""What all random programs share: a mesh that is made anew once it has lost a rank, and a deadline with stacks.

A program is a function of its seed. It raises `WrongResult` where the mesh did what it must not; a program that does
not end is broken off by the deadline, with the stacks of this process and of the ranks.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.wire.process_control import kill_supervisor
from meshbook.wire.stop_timing import SECOND_INTERRUPT_S
from tests.random_faults import operators

WORLD_SIZE = 3
# Seconds after which one call counts as hung: every fault here ends, or is ended by Stop, in a few.
CALL_TIMEOUT_S = 60.0
# Seconds for a whole program, and then for the main thread to hear of it.
DEADLINE_S, LAST_WAIT_S = 100.0, 20.0


class WrongResult(AssertionError):
    """What the mesh did and must not."""


class TookTooLong(WrongResult):
    """What has not come about in time. No number was wrong."""


class ProgramHung(BaseException):
    """A program that did not end. Not an Exception: nothing on the way may take it for a fault that was put in."""


class SharedMesh:
    """A mesh of `WORLD_SIZE` ranks for one program after the other, and a new one after a program that lost a rank."""

    def __init__(self) -> None:
        self.mesh: Mesh | None = None

    def get(self) -> Mesh:
        if self.mesh is not None and self.mesh.session.lost:
            self.discard()
        if self.mesh is None:
            self.mesh = create_mesh({"dp": WORLD_SIZE})
        return self.mesh

    def discard(self) -> None:
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            mesh.stop()


class Programs(ABC):
    """Programs of one kind, on the shared mesh."""

    def __init__(self, shared: SharedMesh) -> None:
        self.shared = shared

    @abstractmethod
    def run(self, seed: int) -> str:
        """One program. Gives the name of its fault.

        Raises:
            Wrong: numbers that differ from the reference's, an error that does not name its cause.
        """


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Look again and again until something is the case.

    Raises:
        TookTooLong: it did not come about.
    """
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TookTooLong(f"{what}: not within {CALL_TIMEOUT_S:g} s")
        time.sleep(0.01)


@contextmanager
def stop_when(mesh: Mesh, condition: Callable[[], Any], what: str) -> Iterator[None]:
    """Press Stop once the main thread waits for the mesh and something is the case; or once the block has ended, never.

    Raises:
        Wrong: the block ended, or went on waiting, and Stop was not pressed.
    """
    over, pressed = threading.Event(), threading.Event()

    def press() -> None:
        while not over.is_set():
            if not mesh.session.foreground.is_idle and condition() and mesh.session.foreground.interrupt():
                pressed.set()
                return
            over.wait(0.01)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(CALL_TIMEOUT_S)
    if not pressed.is_set():
        raise WrongResult(f"the program ended before {what}")


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[threading.Event]:
    """SIGINT to this process so long after the event that this gives is set. It comes again, as people press again:
    Python drops one that comes in a finalizer."""
    begun, over, main = threading.Event(), threading.Event(), threading.main_thread().ident or 0

    def press() -> None:
        begun.wait()
        over.wait(seconds)
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(SECOND_INTERRUPT_S + 1)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with _check_dropped_in_finalizers():
        try:
            yield begun
        finally:
            over.set()
            begun.set()
            thread.join()


@contextmanager
def sigint_at(mesh: Mesh, call: int, rank: int | None) -> Iterator[None]:
    """SIGINT in this block, as this process, or a rank, comes to the call of that number."""
    with _check_dropped_in_finalizers():
        try:
            if rank is None:
                operators.press_at(call)
            else:
                mesh.execute(operators.press_at, call, rank)
            yield
        finally:
            operators.press_at(0)
    mesh.execute(operators.press_at, 0)  # it has not come


@contextmanager
def _check_dropped_in_finalizers() -> Iterator[None]:
    """Python drops a KeyboardInterrupt in a finalizer or a weak reference's callback. Only Meshbook's own must not.

    Raises:
        Wrong: one of Meshbook's finalizers dropped it, or one dropped something else.
    """
    dropped: list[tuple[type[BaseException], str]] = []

    def note(one: Any) -> None:  # no object is kept: what is being finalized must go
        dropped.append((one.exc_type, f"{getattr(one.object, '__module__', '')}: {one.object!r}, {one.exc_value!r}"))

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = before
    for error, what in dropped:
        if not issubclass(error, KeyboardInterrupt) or "meshbook" in what:
            raise WrongResult(f"a finalizer has dropped {what}")


# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def deadline(mesh: Callable[[], Mesh | None], seconds: float = DEADLINE_S) -> Iterator[None]:
    """Break off what has not ended in time. Main thread only.

    Raises:
        Hung: with the stacks of all threads here and on the ranks.
    """
    main = threading.main_thread().ident or 0
    over = threading.Event()
    reported: list[str] = []

    def hung(number: int, frame: FrameType | None) -> None:
        raise ProgramHung("".join(reported))

    def watch() -> None:
        if over.wait(seconds):
            return
        reported.append(f"not at its end after {seconds:g} s\n{stacks(mesh())}")
        signal.pthread_kill(main, signal.SIGUSR2)
        if not over.wait(LAST_WAIT_S):  # something has caught it: without a supervisor every wait ends
            print("".join(reported), file=sys.stderr, flush=True)
            end_supervisor(mesh())

    before = signal.signal(signal.SIGUSR2, hung)
    thread = threading.Thread(target=watch, daemon=True, name="deadline")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)


def stacks(mesh: Mesh | None) -> str:
    """Of all threads here, and of the ranks with what the mesh says of itself."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = [
        f"thread {names.get(ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    reported = [f"--- this process\n{''.join(own)}"]
    if mesh is not None:
        for name, ask in (("why", mesh.why), ("stacks", mesh.stacks)):
            try:
                reported.append(f"--- {name}\n{ask().text}")
            except Exception as error:
                reported.append(f"--- {name}: {error!r}")
    return "\n".join(reported)


def end_supervisor(mesh: Mesh | None) -> None:
    if mesh is not None:
        with suppress(OSError):
            kill_supervisor(mesh.session.info.supervisor_pid)
