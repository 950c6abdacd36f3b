"""A client's connection to its supervisor: its sockets, and one listener thread.

`PendingRequests` matches reports to calls; this module does not interpret them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshbook import errors
from meshbook.controller.pending_requests import PendingRequest, PendingRequests
from meshbook.controller.supervisor_sockets import SupervisorSockets
from meshbook.ids import CallId, CallIds
from meshbook.wire import codec, keys, messages, processes
from meshbook.wire.loop import Loop
from meshbook.wire.process_control import is_stopped

log = logging.getLogger("meshbook.connection")

REPLY_TIMEOUT_S = 5.0  # of the supervisor itself
_CONNECT_TIMEOUT_S = 10.0
_IDLE_INTERVAL_S = 5.0
_LIVENESS_POLL_S = 1.0  # where the kernel does not support pidfd
# Seconds between two looks whether a standby has taken the place of a supervisor that has ended.
_TAKEOVER_POLL_S = 0.02
# Seconds until a hello that nobody has answered is sent again: the supervisor may have ended with it.
_HELLO_RETRY_S = 1.0
# While a request is pending, a check every second counts intervals without a received message. After
# `_PING_AFTER_CHECKS` of them in a row the client sends a ping; after `_SILENT_AFTER_CHECKS` the supervisor counts as
# silent. Its loop replies within milliseconds, also when all ranks are busy; its slowest own operation, explaining a
# hang of thousands of ranks, takes two seconds.
_SILENCE_CHECK_S = 1.0
_PING_AFTER_CHECKS = 1
_SILENT_AFTER_CHECKS = 4
# Seconds after the supervisor's exit for its connection to end, by zmq's own thread: a fork of it may hold it open.
_LAST_REPORTS_TIMEOUT_S = 5.0

_REPLIES_WITH_INFO = messages.CommandReply | messages.MeshReady | messages.MeshHealed


@dataclass
class ConnectionListeners:
    """Callbacks for reports; called on the listener thread, and must not block."""

    # the mesh has changed, or a reply describes it; before anybody has the reply
    ranks_changed: list[Callable[[messages.MeshChanged], None]] = field(default_factory=list)
    mesh_stopped: list[Callable[[str], None]] = field(default_factory=list)
    closed: list[Callable[[], None]] = field(default_factory=list)  # this process leaves the mesh; on any thread
    segments_released: list[Callable[[messages.SegmentsReleased], None]] = field(default_factory=list)
    idle: list[Callable[[], None]] = field(default_factory=list)  # every few seconds
    # the supervisor stopped replying (True), or replies again (False)
    silence_changed: list[Callable[[bool], None]] = field(default_factory=list)
    orphan_output: list[Callable[[messages.CallOutput], None]] = field(default_factory=list)
    # report types that layers above handle
    report_handlers: dict[type, Callable[[Any], None]] = field(default_factory=dict)


class SupervisorConnection:
    """An open connection. `listen()`, once, begins to handle reports; `close()` ends it, and the mesh continues."""

    def __init__(
        self,
        connection_info: keys.ConnectionInfo,
        *,
        kind: str,
        observer: bool = False,
        orphan_ttl_s: float | None = None,
    ) -> None:
        """Connect and wait for the supervisor's welcome. Blocks.

        Raises:
            NotAttached: the supervisor does not reply, or rejects this client.
            VersionMismatch: it runs another version.
        """
        self.connection_info = connection_info
        self.listeners = ConnectionListeners()
        self.pending = PendingRequests(
            on_orphan_output=lambda report: self._notify(self.listeners.orphan_output, report),
            decline_input=self._decline_input,
            on_error=self._on_loop_error,
        )
        self._report_handlers: dict[type, Callable[[Any], object]] = {
            **self.pending.report_handlers,
            messages.Refused: self._on_refused,
            messages.MeshChanged: lambda report: self._notify(self.listeners.ranks_changed, report),
            messages.SegmentsReleased: lambda report: self._notify(self.listeners.segments_released, report),
            messages.MeshStopped: self._on_mesh_stopped,
        }
        client_id = self.client_id = secrets.token_hex(8)
        self.call_ids = CallIds(client_id)
        self._sockets = SupervisorSockets(connection_info, client_id)
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        self._is_local = connection_info.is_alive
        self._pidfd = _open_pidfd(connection_info)
        self._loop = Loop(on_error=self._on_loop_error)
        self._logged_error_types: set[type] = set()  # error types already logged
        self.stop_reason: str | None = None  # why the supervisor has stopped the mesh, as it said before it exits
        self.ended_unexpectedly = False  # the supervisor exited without MeshStopped
        self.silent = False  # no message for some seconds while a request was pending
        self._num_silent_checks = 0  # consecutive checks without a received message
        hello = messages.Hello(
            token=connection_info.token,
            client=client_id,
            kind=kind,
            pid=os.getpid(),
            channel="send",
            observer=observer,
            orphan_ttl_s=orphan_ttl_s,
        )
        try:
            self.welcome = self._await_welcome(hello, msgspec.structs.replace(hello, channel="receive"))
        except BaseException:
            self._close_sockets()
            raise
        self.thread = threading.Thread(target=self._run, name=f"meshbook-{connection_info.name}", daemon=True)

    def listen(self) -> None:
        """Begin to handle reports, also those that have arrived since the welcome: whom they concern is listening."""
        self.thread.start()

    def _await_welcome(self, *hellos: messages.Hello) -> messages.Welcome:
        report, num_left = None, int(_CONNECT_TIMEOUT_S / _HELLO_RETRY_S)
        self._sockets.introduce(*hellos)
        while report is None:
            if not self._sockets.receiver.poll(int(_HELLO_RETRY_S * 1000)):
                num_left -= 1
                if num_left:
                    self._sockets.introduce(*hellos)
                    continue
                raise errors.NotAttached(
                    f"the mesh {self.connection_info.name!r} (pid {self.connection_info.pid}) did not answer "
                    f"within {_CONNECT_TIMEOUT_S:.0f} s; meshbook status shows it, meshbook stop ends it"
                )
            report = self._sockets.accept(self._sockets.receiver.recv_multipart())
        if isinstance(report, messages.Welcome):
            return report
        if isinstance(report, messages.Refused):
            raise _error_class(report.error)(report.text)
        raise errors.ProtocolError(f"{type(report).__name__} came where Welcome was expected")

    # ---- sending

    def send(self, command: messages.ClientCommand) -> None:
        """Send a command without expecting a reply.

        Raises:
            NotAttached: the connection is closed.
            TransferError: the command is too large for a message.
        """
        body = codec.encode_body(command)
        codec.check_size(body)
        if not self._sockets.send(body):
            raise errors.NotAttached(f"this process has left the mesh {self.connection_info.name!r}; attach again")

    def request(
        self,
        command: Any,
        *,
        on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None,
        on_input: Callable[[messages.InputRequest], None] | None = None,
        on_report: Callable[[Any], None] | None = None,
    ) -> Future[Any]:
        """Send a command and return a future of its reply (`CallFinished`, `CommandReply`, `MeshReady`).

        The handlers are called on the listener thread. A refusal sets the future's exception.
        """
        future: Future[Any] = Future()
        self.pending.add(command.call, PendingRequest(future, on_output, on_input, on_report=on_report))
        try:
            self.send(command)
        except BaseException:
            self.pending.discard(command.call)
            raise
        return future

    def next_call_id(self) -> CallId:
        return self.call_ids.next()

    @property
    def closed(self) -> bool:
        return self._sockets.is_closed

    # ---- receiving

    def _run(self) -> None:
        loop = self._loop
        loop.watch_socket(self._sockets.receiver, self._on_message)
        loop.watch_fd(self._wake_read_fd, loop.stop)
        self._watch_supervisor()
        loop.call_later(_IDLE_INTERVAL_S, self._on_idle)
        loop.call_later(_SILENCE_CHECK_S, self._check_silence)
        loop.run()
        self._close_sockets()

    def _on_loop_error(self, error: BaseException) -> None:
        """Log an error on the listener thread, once per error type; the thread continues."""
        if type(error) not in self._logged_error_types:
            self._logged_error_types.add(type(error))
            log.error(
                "an error in Meshbook's own thread for the mesh %r (%s: %s), which goes on; if a cell does not end, "
                "press Stop",
                self.connection_info.name,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _notify(self, listeners: Iterable[Callable[..., object]], *arguments: object) -> None:
        """Call each listener, even if an earlier one raises."""
        for listener in tuple(listeners):  # a listener may remove itself
            try:
                listener(*arguments)
            except BaseException as error:  # SystemExit would end only this thread
                self._on_loop_error(error)

    def _on_idle(self) -> None:
        self._loop.call_later(_IDLE_INTERVAL_S, self._on_idle)
        self._notify(self.listeners.idle)

    def _poll_supervisor(self) -> None:
        """Poll for the supervisor's exit if the kernel does not support pidfd."""
        if _is_alive(self.connection_info):
            self._loop.call_later(_LIVENESS_POLL_S, self._poll_supervisor)
        else:
            self._supervisor_exited()

    def _watch_supervisor(self) -> None:
        if self._pidfd is not None:
            self._loop.watch_fd(self._pidfd, self._supervisor_exited)
        elif self._is_local:
            self._loop.call_later(_LIVENESS_POLL_S, self._poll_supervisor)

    def _on_message(self, frames: list[bytes]) -> None:
        self._num_silent_checks = 0
        if self.silent:
            self._set_silent(False)
        report = self._sockets.accept(frames)
        if report is not None:
            self._on_report(report)

    def _check_silence(self) -> None:
        self._loop.call_later(_SILENCE_CHECK_S, self._check_silence)
        self._sockets.acknowledge()
        self._num_silent_checks = self._num_silent_checks + 1 if self.pending else 0
        if self._num_silent_checks == _PING_AFTER_CHECKS:
            with contextlib.suppress(errors.NotAttached):
                self.send(messages.Ping())
        elif self._num_silent_checks >= _SILENT_AFTER_CHECKS and not self.silent:
            self._set_silent(True)

    def _set_silent(self, silent: bool) -> None:
        self.silent = silent
        self._notify(self.listeners.silence_changed, silent)

    @property
    def is_stopped(self) -> bool:
        """Whether the supervisor's process is stopped (SIGSTOP). Always False for one on another machine."""
        return self._is_local and is_stopped(self.connection_info.pid)

    def describe_silence(self) -> str:
        """Return a sentence that says why the supervisor may not reply and what to do."""
        who = f"the supervisor of mesh {self.connection_info.name} (pid {self.connection_info.pid}) does not answer"
        if self.is_stopped:
            return (
                f"{who}: it is stopped (SIGSTOP). The Stop button lets it go on, and so does `kill -CONT "
                f"{self.connection_info.pid}` in a terminal; its ranks keep what they hold"
            )
        return (
            f"{who}: it is busy or stuck, and its ranks keep what they hold. If it does not come back, "
            f"`meshbook stop {self.connection_info.name}` in a terminal ends it, and them"
        )

    def continue_supervisor(self) -> bool:
        """Send SIGCONT to a supervisor that is stopped; return whether it was."""
        if not self.is_stopped:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.connection_info.pid, signal.SIGCONT)
        return True

    def _on_report(self, report: messages.SupervisorReport) -> None:
        if isinstance(report, _REPLIES_WITH_INFO) and report.info is not None:
            self._notify(self.listeners.ranks_changed, messages.MeshChanged(report.info))
        kind = type(report)
        handler = self._report_handlers.get(kind) or self.listeners.report_handlers.get(kind)
        if handler is not None:
            handler(report)
        if isinstance(report, messages.MeshUpdate):  # after the handler has applied the update
            self.pending.resolve(report.call or "", report)

    def _decline_input(self, request: messages.InputRequest) -> None:
        self.send(messages.InputReply(target=request.call, rank=request.rank, text=None))

    def _on_refused(self, report: messages.Refused) -> None:
        if not self.pending.fail(report.call or "", _error_class(report.error)(report.text)):
            log.warning("the supervisor refused something: %s", report.text)

    def _on_mesh_stopped(self, report: messages.MeshStopped) -> None:
        self.stop_reason = report.reason
        held = "what its ranks held is gone; %mesh restart gives fresh ones"
        self.pending.fail_all(f"the mesh {self.connection_info.name!r} has ended: {report.reason}; {held}")
        if self._pidfd is None and not self._is_local:
            self._mesh_ended()

    def _supervisor_exited(self) -> None:
        """Handle the exit of the supervisor's process."""
        if self._pidfd is not None:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._find_successor(self._loop.clock.monotonic() + keys.TAKEOVER_TIMEOUT_S)

    def _find_successor(self, deadline: float) -> None:
        """Go on with the standby that has taken over; without one, the mesh has ended."""
        successor, is_pending = _find_successor(self.connection_info, self._loop.clock.monotonic() < deadline)
        if successor is not None:
            self.connection_info, self._pidfd = successor, _open_pidfd(successor)
            self._watch_supervisor()
        elif is_pending and self.stop_reason is None:
            self._loop.call_later(_TAKEOVER_POLL_S, lambda: self._find_successor(deadline))
        else:
            self._mesh_ended()

    def _mesh_ended(self) -> None:
        """End every open call."""
        if self.stop_reason is None:  # its last reports may arrive after its exit: one of them says why
            for frames in self._sockets.last_reports(_LAST_REPORTS_TIMEOUT_S):
                self._notify((self._on_message,), frames)
                if self.stop_reason is not None:
                    break
        self.ended_unexpectedly = self.stop_reason is None
        reason = self.stop_reason or f"its supervisor (pid {self.connection_info.pid}) has ended"
        self.pending.fail_all(f"the mesh {self.connection_info.name!r} is gone: {reason}. Start one: %mesh start -n 4")
        with contextlib.suppress(errors.StartError, OSError):
            keys.remove_stale_mesh(self.connection_info)
        self._notify(self.listeners.mesh_stopped, reason)

    def close(self) -> None:
        """Stop listening. Open calls end with NotAttached."""
        if self._sockets.refuse_sending():
            return
        self.pending.fail_all(f"this process has left the mesh {self.connection_info.name!r}")
        self._notify(self.listeners.closed)
        with contextlib.suppress(OSError):
            os.write(self._wake_write_fd, b"x")
        if self.thread.ident is None:
            self._close_sockets()
        elif threading.current_thread() is not self.thread:
            self.thread.join(5)

    def _close_sockets(self) -> None:
        self._sockets.close()
        for fd in (self._wake_read_fd, self._wake_write_fd, self._pidfd):
            if fd is not None:
                os.close(fd)


def ask(connection: SupervisorConnection, command: Any, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
    """Send a command that the supervisor itself replies to, and return the reply. Blocks. Raises MeshTimeout."""
    try:
        return connection.request(command).result(timeout_s)
    except TimeoutError:
        raise errors.MeshTimeout(f"{connection.describe_silence()} (asked {timeout_s:g} s ago)") from None


def _open_pidfd(connection_info: keys.ConnectionInfo) -> int | None:
    """Return a pidfd that becomes readable when the supervisor exits; None on another machine or system."""
    try:
        return processes.open_pidfd(connection_info.pid) if connection_info.is_alive else None
    except OSError:  # it has ended, or no descriptor is left
        return None


def _find_successor(connection_info: keys.ConnectionInfo, is_in_time: bool) -> tuple[keys.ConnectionInfo | None, bool]:
    """Return the connection of the standby that has taken over, or None, and whether to ask again."""
    try:
        successor, is_pending = keys.find_successor(connection_info)
    except OSError:  # no descriptor is left to look
        return None, True
    return successor, is_pending and is_in_time


def _is_alive(connection_info: keys.ConnectionInfo) -> bool:
    """Whether the supervisor's process runs, as far as is known: without a descriptor one cannot look."""
    try:
        return connection_info.is_alive
    except OSError:
        return True


def _error_class(name: str) -> type[errors.MeshbookError]:
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, errors.MeshbookError):
        return found
    return errors.MeshbookError
