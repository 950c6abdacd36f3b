"""A loop that a second process follows, which goes on with it when the first is killed.

The second process, the standby, is a fork of the first, so it begins with all that the first knows. From then on the
first writes each event (a message, a timer, what a look at the system showed) to a pipe before it handles it. The
standby handles the same events with the same code at the same times, and does nothing to the world. The pipe's end of
file means that the first process has ended. The standby has then read all events, and goes on as the first.

What cannot be handled twice (a process is started, a descriptor is readable) is marked by `diverge`: from there to the
end of the loop's turn nothing leaves the process, then a new standby is forked, which knows of it, and the former one
is killed. So what others have seen of the first process is at all times what its standby knows, and the numbers of
`wire/link` say what is to be sent again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import zmq

from meshbook.clock import monotonic, wall
from meshbook.wire.event_log import EventLog, LoggedEvent, fork_with_log
from meshbook.wire.loop import Loop, OnFrames, Shorten, Timer, unchanged
from meshbook.wire.processes import has_pidfds
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.standby")

T = TypeVar("T")

# Kinds of records.
_MESSAGE: Final = 0  # on a socket
_TIMER: Final = 1
_DESCRIPTOR: Final = 2  # is readable; what is read comes as observations
_OBSERVATION: Final = 3

# Seconds until the next attempt after the system could not fork.
_FORK_RETRY_S: Final = 1.0
# Exit code of a standby that cannot follow for want of descriptors.
_CANNOT_FOLLOW: Final = 4
# Timers that may be kept without a look whether they were cancelled.
_MANY_TIMERS: Final = 1000


class _EventClock:
    """The system's clock, which stands still while an event is handled: the standby handles it at the same time."""

    def __init__(self) -> None:
        self.event_time: float | None = None

    def monotonic(self) -> float:
        return monotonic() if self.event_time is None else self.event_time

    def wall(self) -> float:
        return wall()


class ReplicatedLoop(Loop):
    """A loop with a standby, from `replicate` to `stop_replicating`.

    Attributes:
        on_takeover: called in the standby as it goes on as the first process; takes the time of the other's end.
    """

    def __init__(self, *, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._event_clock = _EventClock()
        super().__init__(self._event_clock, on_error=on_error)
        self.on_takeover: Callable[[float], None] = lambda ended_at: None
        self._is_replicating = False
        self._is_replaying = False  # this process is a standby
        self._held: list[Callable[[], object]] | None = None  # actions that wait for a new standby
        self._standby: tuple[int, EventLog] | None = None  # its pid
        self._standby_fds: dict[int, int] = {}  # pid -> pidfd of standbys that have not been reaped
        self._token: tuple[int, int] | None = None  # a pipe with one byte, for the one standby that may take over
        self._sources: list[Callable[[list[bytes]], None]] = []  # handlers of logged sockets and descriptors
        self._logged_timers: dict[int, tuple[Timer, Callable[[], None]]] = {}
        self._num_timers = self._num_actions = 0
        self._max_timers = _MANY_TIMERS  # until those are looked for that were cancelled
        self._signal_handlers: dict[int, Any] = {}
        self._failed_forks = RateLimitedLog(log)
        self._abandoned: list[Any] = []  # sockets of the processes that this one was forked from: not to be touched

    # ---- what handlers call

    def watch_socket(
        self, socket: zmq.Socket[bytes], on_frames: OnFrames, *, logged: bool = True, shorten: Shorten = unchanged
    ) -> None:
        if not logged:
            super().watch_socket(socket, on_frames)
            return
        source = self._add_source(on_frames)

        def handle(frames: list[bytes]) -> None:
            self._handle(_MESSAGE, source, shorten(frames), lambda: on_frames(frames))

        super().watch_socket(socket, handle)

    def watch_fd(self, fd: int, on_readable: Callable[[], None], *, logged: bool = False) -> None:
        if logged:
            source = self._add_source(lambda _: on_readable())
            super().watch_fd(fd, lambda: self._handle(_DESCRIPTOR, source, [], on_readable))
            return

        def handle() -> None:
            self.diverge()
            on_readable()

        super().watch_fd(fd, handle)

    def watch_signal(self, number: int, callback: Callable[[], None]) -> None:
        super().watch_signal(number, callback)
        self._signal_handlers[number] = signal.getsignal(number)

    def call_later(self, delay_s: float, callback: Callable[[], None], *, logged: bool = True) -> Timer:
        if not logged:
            return super().call_later(delay_s, callback)
        if self._event_clock.event_time is None:  # what is no event, the standby does not know
            self.diverge()
        number = self._num_timers = self._num_timers + 1

        def fire() -> None:
            del self._logged_timers[number]
            self._handle(_TIMER, number, [], callback)

        timer = super().call_later(delay_s, fire)
        self._logged_timers[number] = timer, callback
        if len(self._timers) > self._max_timers:
            self._forget_cancelled_timers()
        return timer

    def observe(self, look: Callable[[], T]) -> T:
        if self._event_clock.event_time is None or self._held is not None:
            return look()
        if not self._is_replaying:
            seen = look()
            self._write(_OBSERVATION, 0, [pickle.dumps(seen)])
            return seen
        record = self._read_log()
        if record is None:  # the first process ended before it had looked
            self._stop_replaying()
            return look()
        if record.kind != _OBSERVATION:
            _give_up("it has looked at something that the first process has not")
        return pickle.loads(record.frames[0])  # type: ignore[no-any-return]  # written by the process we are a fork of

    def act(self, action: Callable[[], object], *, logged: bool = True) -> None:
        if logged and self._event_clock.event_time is None:
            self.diverge()
        elif logged:
            self._num_actions += 1
        if self._held is not None:
            self._held.append(action)
        elif not self._is_replaying:
            action()

    def diverge(self) -> None:
        if self._is_replaying:  # until this process is killed, or the first ends, whose actions were held since
            while self._read_log() is not None:
                pass
            self._stop_replaying()
        elif self._is_replicating and self._held is None:
            self._held = []

    # ---- the first process

    def replicate(self) -> None:
        """Have a standby from the end of this turn on. Does nothing on systems without pidfd."""
        if not self._is_replicating and not self._is_replaying and has_pidfds():
            self._begin_reign()
            self._is_replicating = True
            self.diverge()

    def stop_replicating(self) -> None:
        """End the standby, because this process ends in order, or does what a standby cannot follow."""
        if self._is_replaying:
            os._exit(0)
        self._is_replicating = False
        self._end_standby()
        self._release_held()

    def run_once(self, max_wait_s: float | None = None) -> None:
        super().run_once(max_wait_s)
        while self._held is not None:  # again in a standby that has taken over, which needs one of its own
            self._renew_standby()

    def _begin_reign(self) -> None:
        """Make the token that at most one of this process's standbys gets."""
        for fd in self._token or ():
            os.close(fd)
        self._token = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(self._token[1], b"x")

    def _add_source(self, handler: Callable[[list[bytes]], None]) -> int:
        self._sources.append(handler)
        return len(self._sources) - 1

    def _handle(self, kind: int, number: int, frames: list[bytes], handler: Callable[[], None]) -> None:
        """Handle an event that the standby is to handle too."""
        self._event_clock.event_time = monotonic()
        if self._is_replicating and self._held is None:
            self._write(kind, number, frames)
        try:
            self._call_guarded(handler)
        finally:
            self._event_clock.event_time = None

    def _write(self, kind: int, number: int, frames: list[bytes]) -> None:
        if not self._is_replicating or self._standby is None:  # the system could not fork one
            return
        time = self._event_clock.event_time or 0.0
        record = LoggedEvent(kind, number, time, self._num_timers, self._num_actions, frames)
        if not self._standby[1].write(record):
            self.diverge()

    def _renew_standby(self) -> None:
        """Fork a standby that knows all that has happened; then let that leave the process. Returns in both."""
        first, problem = os.getpid(), ""
        try:
            pid, events, pidfd = fork_with_log()
        except OSError as error:  # no process, or no descriptor
            pid, problem = -1, str(error)
        if pid == 0:
            self._follow(first, events)
            return
        self._end_standby()
        if pid > 0:
            self._standby = pid, events
            self._watch_standby(pid, pidfd)
        else:
            self._fork_later(problem)
        self._release_held()

    def _fork_later(self, why: str) -> None:
        """Go on without a standby, and try again to have one."""
        self._failed_forks.warning("this process has no standby: %s", why)
        super().call_later(_FORK_RETRY_S, self.diverge)

    def _release_held(self) -> None:
        held, self._held = self._held, None
        for action in held or ():
            self._call_guarded(lambda action=action: action() and None)  # type: ignore[misc]

    def _watch_standby(self, pid: int, pidfd: int) -> None:
        """Reap the standby; fork another one if it was not ended by us."""
        self._standby_fds[pid] = pidfd

        def ended() -> None:
            self.unwatch(pidfd)
            os.close(self._standby_fds.pop(pid))
            _, status = os.waitpid(pid, 0)
            is_followed = self._standby is not None and self._standby[0] == pid
            if is_followed and os.waitstatus_to_exitcode(status) == _CANNOT_FOLLOW:
                self._end_standby()
                self._fork_later("it has no file descriptors left")
                return
            if is_followed or os.WIFEXITED(status):  # else we have killed it
                log.warning("the standby (pid %d) has ended with status %d; another one is started", pid, status)
            if is_followed:  # and not replaced already, because nothing could be written to it
                self._end_standby()
                self.diverge()

        super().watch_fd(pidfd, ended)

    def _end_standby(self) -> None:
        if self._standby is not None:
            pid, events = self._standby
            self._standby = None
            if pid in self._standby_fds:
                os.kill(pid, signal.SIGKILL)
            events.close()

    def _forget_cancelled_timers(self) -> None:
        self._logged_timers = {
            number: entry for number, entry in self._logged_timers.items() if entry[0].callback is not None
        }
        self._timers = sorted(entry for entry in self._timers if entry[2].callback is not None)
        self._max_timers = 2 * len(self._timers) + _MANY_TIMERS

    # ---- the standby

    def _follow(self, first: int, events: EventLog) -> None:
        """Handle the first process's events until it has ended, and get ready to go on in its place."""
        if self._standby is not None:
            self._standby[1].close()
        for fd in self._standby_fds.values():
            self.unwatch(fd)
            os.close(fd)
        self._standby_fds.clear()
        self._standby, self._held, self._is_replaying = (0, events), None, True
        try:
            events.keep_reading_end(first)
            self._abandon_sockets()
        except OSError:  # no descriptor is left to look what is open
            os._exit(_CANNOT_FOLLOW)
        for number in self._signal_handlers:
            signal.signal(number, signal.SIG_IGN)
        logging.disable()
        while self._is_replaying and (record := self._read_log()) is not None:
            self._replay(record)
        if self._is_replaying:
            self._stop_replaying()
        events.close()
        self._standby = None
        self._begin_reign()
        self.on_takeover(self._ended_at)

    def _read_log(self) -> LoggedEvent | None:
        assert self._standby is not None
        return self._standby[1].read()

    def _abandon_sockets(self) -> None:
        """Close the first process's connections: they are its own, and their other ends wait for its end."""
        kept = {fd for fd in self._handlers if isinstance(fd, int)}
        self._abandoned += [source for source in self._handlers if source not in kept]
        self._handlers = {fd: self._handlers[fd] for fd in kept}
        self._poller = zmq.Poller()
        for fd in kept:
            self._poller.register(fd, zmq.POLLIN)
        _close_sockets({*kept, 0, 1, 2})  # those of a process that an ssh server has started are sockets

    def _replay(self, record: LoggedEvent) -> None:
        if (record.num_timers, record.num_actions) != (self._num_timers, self._num_actions):
            _give_up(
                f"it has set {self._num_timers} timers and taken {self._num_actions} actions, the first process "
                f"{record.num_timers} and {record.num_actions}"
            )
        if record.kind == _TIMER:
            if record.number not in self._logged_timers:
                _give_up(f"it has no timer {record.number}")
            timer, handler = self._logged_timers.pop(record.number)
            timer.cancel()
        else:
            source = self._sources[record.number]
            handler = lambda: source(record.frames)  # noqa: E731
        self._event_clock.event_time = record.time
        try:
            self._call_guarded(handler)
        finally:
            self._event_clock.event_time = None

    def _stop_replaying(self) -> None:
        """Go on in the first process's place, which has ended. What is done waits until there is a standby."""
        assert self._standby is not None
        assert self._token is not None
        self._ended_at = monotonic()
        self._standby[1].wait_for_writer()
        try:
            os.read(self._token[0], 1)
        except BlockingIOError:  # the process was about to replace this standby, and its new one has the token
            os._exit(0)
        logging.disable(logging.NOTSET)
        self._is_replaying, self._held = False, []
        for number, handler in self._signal_handlers.items():
            signal.signal(number, handler)


def _close_sockets(kept: set[int]) -> None:
    """Close all sockets, and what libzmq waits with, but these."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{name}")
            if int(name) not in kept and kind.startswith(("socket:", "anon_inode:[event")):
                os.close(int(name))


def _give_up(why: str) -> NoReturn:
    """End a standby that has not come to the same state; the first process forks another one."""
    logging.disable(logging.NOTSET)
    log.error("the standby has not come to the state of the process that it follows: %s; a defect of Meshbook", why)
    os._exit(3)
