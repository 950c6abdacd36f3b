"""The event loop: zmq sockets, file descriptors and timers, on one thread.

asyncio would do the same; on a round trip to four ranks its selector and callbacks around a zmq socket cost more than
all of our own work, so the hot path polls zmq itself.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from meshbook.clock import Clock, SystemClock, sleep

log = logging.getLogger("meshbook.loop")

T = TypeVar("T")

# Messages read from one socket before the others get their turn.
_MAX_MESSAGES_PER_TURN = 64

# Consecutive failures after which a descriptor is unwatched: it stays readable until it is read, and the loop would do
# nothing else. A descriptor that user code has closed is unwatched at its first failure.
_MAX_FD_FAILURES = 10


# A timer that is later than this many seconds is so because this process stood still: it was stopped, the machine is
# overloaded, or user code kept the GIL. What has arrived meanwhile, which zmq's own thread may still have to read, is
# handled before it: else ranks would be killed, or reported missing, whose answers are there. So long is waited for it,
# in milliseconds, and so many turns are taken at most.
_STOOD_STILL_S = 0.5
_CATCH_UP_MS = 100
_CATCH_UP_TURNS = 20

# Seconds between two looks at files that cannot be waited for all at once.
_LOOK_AGAIN_S = 0.01

# As plain numbers: pyzmq's flags are enums, and each `|` and `&` of one costs as much as the system call beside it.
_SNDMORE, _NOBLOCK, _POLLIN = int(zmq.SNDMORE), int(zmq.NOBLOCK), int(zmq.POLLIN)


OnFrames = Callable[[list[bytes]], None]
# Returns what a second process is given of a message instead.
Shorten = Callable[[list[bytes]], list[bytes]]


def unchanged(frames: list[bytes]) -> list[bytes]:
    return frames


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message. As `send_multipart`, which checks and combines flags for each frame, in a third of the time."""
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1])


class Timer:
    """A scheduled call; `cancel()` cancels it."""

    __slots__ = ("callback", "deadline")

    def __init__(self, deadline: float, callback: Callable[[], None]) -> None:
        self.deadline = deadline
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Waits and calls back, until `stop()`. An exception in a callback does not end it: `on_error` gets it, or the log.

    KeyboardInterrupt and SystemExit end the loop on the main thread; on any other thread they are handled like other
    errors, because there they would end only the thread, silently.

    That of a supervisor or a host is a `ReplicatedLoop`, which a second process follows. Handlers are written for both:
    with `logged=True` an event is handled in the second process too; what a handler takes from outside besides its
    event goes through `observe`, and what it does to the outside through `act`. Here these are plain calls.
    """

    def __init__(self, clock: Clock | None = None, *, on_error: Callable[[BaseException], None] | None = None) -> None:
        self.clock = clock or SystemClock()
        self._on_error = on_error
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._stopped = False

    def watch_socket(
        self, socket: zmq.Socket[bytes], on_frames: OnFrames, *, logged: bool = True, shorten: Shorten = unchanged
    ) -> None:
        """Call `on_frames` with each message that arrives."""

        def drain() -> None:
            for _ in range(_MAX_MESSAGES_PER_TURN):
                try:
                    frames = socket.recv_multipart(_NOBLOCK)
                except zmq.Again:
                    return
                self._call_guarded(lambda frames=frames: on_frames(frames))  # type: ignore[misc]
                if socket not in self._handlers or not socket.getsockopt(zmq.EVENTS) & _POLLIN:  # type: ignore[operator]
                    return

        self._handlers[socket] = drain
        self._poller.register(socket, zmq.POLLIN)

    def watch_fd(self, fd: int, on_readable: Callable[[], None], *, logged: bool = False) -> None:
        failures = 0

        def handle() -> None:
            nonlocal failures
            try:
                on_readable()
            except BaseException:
                failures += 1
                if failures >= _MAX_FD_FAILURES or not _is_open(fd):
                    self.unwatch(fd)
                    log.error("descriptor %d is not watched any more", fd)
                raise
            failures = 0

        self._handlers[fd] = handle
        self._poller.register(fd, zmq.POLLIN)

    def watch_signal(self, number: int, callback: Callable[[], None]) -> None:
        """Call `callback` when this process receives a signal, at once and not in the middle of another callback.

        On the main thread, and once for a signal and a process.
        """
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def on_signal(*_: object) -> None:
            with contextlib.suppress(BlockingIOError):
                os.write(write_fd, b"x")

        def received() -> None:
            os.read(read_fd, 4096)
            callback()

        signal.signal(number, on_signal)
        self.watch_fd(read_fd, received)

    def unwatch(self, source: Any) -> None:
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    def call_later(self, delay_s: float, callback: Callable[[], None], *, logged: bool = True) -> Timer:
        timer = Timer(self.clock.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.deadline, next(self._sequence), timer))
        return timer

    def observe(self, look: Callable[[], T]) -> T:
        """Return what a look at the outside shows. It can be pickled."""
        return look()

    def act(self, action: Callable[[], object], *, logged: bool = True) -> None:
        """Do something to the outside. logged: it follows from logged events alone."""
        action()

    def diverge(self) -> None:
        """Announce something that only this process can do or know."""

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            self.run_once()

    def run_once(self, max_wait_s: float | None = None) -> None:
        """Wait at most `max_wait_s` seconds for the next events, and handle them all."""
        self._handle_arrived(self._poll_timeout_ms(max_wait_s))
        now = self.clock.monotonic()
        if self._handlers and self._timers and now - self._timers[0][0] > _STOOD_STILL_S:
            for _ in range(_CATCH_UP_TURNS):
                if not self._handle_arrived(_CATCH_UP_MS):
                    break
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                self._call_guarded(callback)

    def _handle_arrived(self, timeout_ms: int | None) -> bool:
        """Handle what has arrived, or arrives in this time; return whether there was anything."""
        ready = self._poll(timeout_ms)
        for source, _ in ready:
            handler = self._handlers.get(source)
            if handler is not None:
                self._call_guarded(handler)
        return bool(ready)

    def _poll(self, timeout_ms: int | None) -> list[tuple[Any, int]]:
        """Return what is readable, within this time.

        The system lets a process wait for no more files at once than it may have now (RLIMIT_NOFILE), and libzmq ends
        a process that does. If the limit was lowered, they are looked at in parts, again and again.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(self._handlers) <= limit or limit == resource.RLIM_INFINITY:
            return self._poller.poll(timeout_ms)
        sources, ready = list(self._handlers), []
        for at in range(0, len(sources), max(1, limit)):
            part = zmq.Poller()
            for source in sources[at : at + max(1, limit)]:
                part.register(source, zmq.POLLIN)
            ready += part.poll(0)
        if not ready and timeout_ms != 0:
            sleep(_LOOK_AGAIN_S)
        return ready

    def _poll_timeout_ms(self, max_wait_s: float | None) -> int | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        waits = [] if max_wait_s is None else [max_wait_s]
        if self._timers:
            waits.append(self._timers[0][0] - self.clock.monotonic())
        # Rounded up: a timer polled a fraction early would spin.
        return max(0, int(min(waits) * 1000) + 1) if waits else None

    def _call_guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            try:
                if self._on_error is not None:
                    self._on_error(error)
                else:
                    log.exception("a callback failed; the loop goes on")
            except Exception:
                with contextlib.suppress(Exception):  # user code may have rebound what logging needs
                    log.exception("a callback failed, and so did telling of it; the loop goes on")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
