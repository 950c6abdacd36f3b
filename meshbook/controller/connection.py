"""A client's line to its supervisor: one socket to speak on, one to listen on, one thread that listens.

Two sockets, because a zmq socket has one thread: whoever calls sends from its own thread, under a lock, and no message
waits for a hand-over to the listening thread. Reports are matched to calls here; what they mean is not known here.
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

import zmq

from meshbook import errors
from meshbook.ids import CallId, CallIds, format_ranks
from meshbook.wire import codec, keys, messages, processes
from meshbook.wire.lifeline import is_stopped
from meshbook.wire.loop import Loop

log = logging.getLogger("meshbook.connection")

_CONNECT_TIMEOUT_S = 10.0
_IDLE_S = 5.0
_LIFE_POLL_S = 1.0  # where the kernel has no pidfds
# While something is waited for, it is looked every second whether anything was heard. So many times in a row that
# nothing was, the supervisor is asked whether it is there, and counts as silent. Its loop answers within milliseconds,
# also when all ranks are busy; the slowest thing that it does itself, explaining a hang of thousands of ranks, takes
# two seconds.
_LISTEN_S = 1.0
_PING_AT = 1
_SILENT_AT = 4


@dataclass
class Pending:
    """A call that has not been answered yet."""

    future: Future[Any]
    on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None
    on_input: Callable[[messages.InputRequested], None] | None = None
    on_progress: Callable[[messages.CallProgressed], None] | None = None
    on_stuck: Callable[[messages.RanksStuck], None] | None = None


@dataclass
class Listeners:
    """Who else wants to know; called from the listening thread, and must not block."""

    changed: list[Callable[[messages.RanksChanged], None]] = field(default_factory=list)
    stopped: list[Callable[[str], None]] = field(default_factory=list)
    segments: list[Callable[[messages.Segments], None]] = field(default_factory=list)
    idle: list[Callable[[], None]] = field(default_factory=list)  # every few seconds
    silent: list[Callable[[bool], None]] = field(default_factory=list)  # the supervisor does not answer; it does again
    stray_output: list[Callable[[messages.CallOutput], None]] = field(default_factory=list)
    reports: dict[type, Callable[[Any], None]] = field(default_factory=dict)  # for words that floors above understand


class Connection:
    """An open line. `close()` ends it; the mesh lives on."""

    def __init__(
        self, found: keys.Connection, *, kind: str, observer: bool = False, orphan_ttl_s: float | None = None
    ) -> None:
        """Connect and wait for the supervisor's welcome. Blocks.

        Raises:
            NotAttached: it does not answer, or does not know us.
            VersionMismatch: it is of another version.
        """
        self.found = found
        self.listeners = Listeners()
        self._pending: dict[str, Pending] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = self.client = secrets.token_hex(8)
        self.ids = CallIds(client)
        self._speak = self._connect(client, "s")
        self._listen = self._connect(client, "r")
        self._wake, self._woken = os.pipe()
        self._supervisor_is_here = found.lives
        self._life = _process_fd(found)
        self._loop = Loop(on_error=self._failed)
        self._failures: set[type] = set()  # that were told of
        self._stop_reason: str | None = None
        self.lost = False  # its supervisor has ended without a word
        self.silent = False  # it has not answered for some seconds
        self._quiet = 0  # looks in a row that found nothing heard
        hello = messages.Hello(
            token=found.token,
            client=client,
            kind=kind,
            pid=os.getpid(),
            channel="send",
            observer=observer,
            orphan_ttl_s=orphan_ttl_s,
        )
        self._speak.send_multipart(codec.encode(hello))
        receive = {name: getattr(hello, name) for name in hello.__struct_fields__} | {"channel": "receive"}
        self._listen.send_multipart(codec.encode(messages.Hello(**receive)))
        try:
            self.welcome = self._await_welcome()
        except BaseException:
            self._close_sockets()
            raise
        self.thread = threading.Thread(target=self._run, name=f"meshbook-{found.name}", daemon=True)
        self.thread.start()

    def _connect(self, client: str, suffix: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        keys.harden(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, f"{client}/{suffix}".encode())
        if self.found.server_key:
            public, secret = keys.curve_keys()
            socket.curve_serverkey = self.found.server_key.encode()
            socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.connect(self.found.address)
        return socket

    def _await_welcome(self) -> messages.Welcome:
        if not self._listen.poll(int(_CONNECT_TIMEOUT_S * 1000)):
            raise errors.NotAttached(
                f"the mesh {self.found.name!r} (pid {self.found.pid}) did not answer within {_CONNECT_TIMEOUT_S:.0f} "
                "s; meshbook status shows it, meshbook stop ends it"
            )
        report = codec.supervisor_reports.decode(self._listen.recv_multipart())
        if isinstance(report, messages.Welcome):
            return report
        if isinstance(report, messages.Refused):
            raise _error_class(report.error)(report.text)
        raise errors.ProtocolError(f"{type(report).__name__} came where Welcome was expected")

    # ---- speaking

    def send(self, command: messages.ClientCommand) -> None:
        """Send and expect nothing.

        Raises:
            NotAttached: the line is closed.
            TransferError: it is too large for a message.
        """
        self.send_body(codec.encode_body(command))

    def send_body(self, body: bytes) -> None:
        codec.check_size(body)
        with self._lock:
            if self._closed:
                raise errors.NotAttached(f"this process has left the mesh {self.found.name!r}; attach again")
            self._speak.send_multipart([codec.PROTOCOL, body])

    def request(
        self,
        command: Any,
        *,
        on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None,
        on_input: Callable[[messages.InputRequested], None] | None = None,
    ) -> Future[Any]:
        """Send a command that will be answered; the future gives the report (`CallFinished`, `Answered`, `MeshReady`).

        `on_output` and `on_input` are called from the listening thread. A refusal is the future's exception.
        """
        future: Future[Any] = Future()
        self._pending[command.call] = Pending(future, on_output, on_input)
        try:
            self.send(command)
        except BaseException:
            self._pending.pop(command.call, None)
            raise
        return future

    def listen_to(
        self,
        call: str,
        *,
        on_output: Callable[[tuple[messages.FoldedItem, ...]], None] | None = None,
        on_input: Callable[[messages.InputRequested], None] | None = None,
        on_stuck: Callable[[messages.RanksStuck], None] | None = None,
    ) -> None:
        """Take from here on what an open call says; nothing happens where it has ended."""
        pending = self._pending.get(call)
        if pending is not None:
            pending.on_output, pending.on_input, pending.on_stuck = on_output, on_input, on_stuck

    def next_call(self) -> CallId:
        return self.ids.next()

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- listening

    def _run(self) -> None:
        loop = self._loop
        loop.watch_socket(self._listen, self._hear)
        loop.watch_fd(self._wake, loop.stop)
        if self._life is not None:
            loop.watch_fd(self._life, self._supervisor_gone)
        elif self._supervisor_is_here:
            loop.call_later(_LIFE_POLL_S, self._look_for_supervisor)
        loop.call_later(_IDLE_S, self._be_idle)
        loop.call_later(_LISTEN_S, self._listen_for_silence)
        loop.run()
        self._close_sockets()

    def _failed(self, error: BaseException) -> None:
        """Say what went wrong on the listening thread, once for each kind of error; it goes on."""
        if type(error) not in self._failures:
            self._failures.add(type(error))
            log.error(
                "an error in Meshbook's own thread for the mesh %r (%s: %s), which goes on; if a cell does not end, "
                "press Stop",
                self.found.name,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _tell(self, listeners: Iterable[Callable[..., object]], *arguments: object) -> None:
        """Call each, whether or not the one before it has failed."""
        for listener in tuple(listeners):  # one that hears it may leave at once
            try:
                listener(*arguments)
            except BaseException as error:  # SystemExit on this thread would end nothing else
                self._failed(error)

    def _be_idle(self) -> None:
        self._loop.call_later(_IDLE_S, self._be_idle)
        self._tell(self.listeners.idle)

    def _look_for_supervisor(self) -> None:
        """Where the kernel has no pidfds, its end is looked for."""
        if self.found.lives:
            self._loop.call_later(_LIFE_POLL_S, self._look_for_supervisor)
        else:
            self._supervisor_gone()

    def _hear(self, frames: list[bytes]) -> None:
        self._quiet = 0
        if self.silent:
            self._tell_silent(False)
        self._heard(codec.supervisor_reports.decode(frames))

    def _listen_for_silence(self) -> None:
        self._loop.call_later(_LISTEN_S, self._listen_for_silence)
        self._quiet = self._quiet + 1 if self._pending else 0
        if self._quiet == _PING_AT:
            with contextlib.suppress(errors.NotAttached):
                self.send(messages.Ping())
        elif self._quiet >= _SILENT_AT and not self.silent:
            self._tell_silent(True)

    def _tell_silent(self, silent: bool) -> None:
        self.silent = silent
        self._tell(self.listeners.silent, silent)

    @property
    def is_stopped(self) -> bool:
        """Whether the supervisor's process is stopped (SIGSTOP). Never of one on another machine."""
        return self._supervisor_is_here and is_stopped(self.found.pid)

    def describe_silence(self) -> str:
        """Why the supervisor may not answer and what to do, as a sentence."""
        who = f"the supervisor of mesh {self.found.name} (pid {self.found.pid}) does not answer"
        if self.is_stopped:
            return (
                f"{who}: it is stopped (SIGSTOP). The Stop button lets it go on, and so does `kill -CONT "
                f"{self.found.pid}` in a terminal; its ranks keep what they hold"
            )
        return (
            f"{who}: it is busy or stuck, and its ranks keep what they hold. If it does not come back, "
            f"`meshbook stop {self.found.name}` in a terminal ends it, and them"
        )

    def let_go_on(self) -> bool:
        """Continue (SIGCONT) a supervisor that is stopped; whether it was."""
        if not self.is_stopped:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.found.pid, signal.SIGCONT)
        return True

    def _heard(self, report: messages.SupervisorReport) -> None:
        match report:
            case messages.CallFinished():
                pending = self._pending.pop(report.call, None)
                if pending is not None:
                    if report.items and pending.on_output is not None:
                        self._tell((pending.on_output,), report.items)  # whatever it does, the call has ended
                    pending.future.set_result(report)
            case messages.CallOutput():
                pending = self._pending.get(report.call)
                if pending is not None and pending.on_output is not None:
                    pending.on_output(report.items)
                else:
                    self._tell(self.listeners.stray_output, report)
            case messages.InputRequested():
                pending = self._pending.get(report.call)
                if pending is not None and pending.on_input is not None:
                    pending.on_input(report)
                else:
                    self.send(messages.ReplyInput(target=report.call, rank=report.rank, text=None))
            case messages.CallProgressed():
                pending = self._pending.get(report.call)
                if pending is not None and pending.on_progress is not None:
                    pending.on_progress(report)
            case messages.RanksStuck():
                pending = self._pending.get(report.call)
                if pending is not None and pending.on_stuck is not None:
                    pending.on_stuck(report)
                elif pending is not None:
                    self._heard(notice_of(report))
            case messages.Answered() | messages.MeshReady() | messages.SnapshotsTaken():
                pending = self._pending.pop(report.call, None)
                if pending is not None:
                    pending.future.set_result(report)
            case messages.Refused(call=call, error=error, text=text):
                pending = self._pending.pop(call or "", None)
                if pending is not None:
                    pending.future.set_exception(_error_class(error)(text))
                else:
                    log.warning("the supervisor refused something: %s", text)
            case messages.RanksChanged():
                self._tell(self.listeners.changed, report)
            case messages.Segments():
                self._tell(self.listeners.segments, report)
            case messages.MeshStopped(reason=reason):
                self._stop_reason = reason
                held = "what its ranks held is gone; %mesh restart gives fresh ones"
                self._fail_all(f"the mesh {self.found.name!r} has ended: {reason}; {held}")
                if self._life is None and not self._supervisor_is_here:
                    self._supervisor_gone()
            case messages.Welcome() | messages.Pong():
                pass
            case _:
                understood = self.listeners.reports.get(type(report))
                if understood is not None:
                    understood(report)
                if isinstance(report, messages.Watched):  # whoever asked finds it taken in
                    pending = self._pending.pop(report.call or "", None)
                    if pending is not None:
                        pending.future.set_result(report)

    def _fail_all(self, text: str) -> None:
        for call in list(self._pending):
            pending = self._pending.pop(call, None)
            if pending is not None and not pending.future.done():
                pending.future.set_exception(errors.NotAttached(text))

    def _supervisor_gone(self) -> None:
        """Its process has ended; every call that is still open ends."""
        if self._life is not None:
            self._loop.unwatch(self._life)
        self.lost = self._stop_reason is None
        reason = self._stop_reason or f"its supervisor (pid {self.found.pid}) has ended"
        self._fail_all(f"the mesh {self.found.name!r} is gone: {reason}")
        with contextlib.suppress(errors.StartError):
            keys.remove_dead_mesh(self.found)
        self._tell(self.listeners.stopped, reason)

    def close(self) -> None:
        """Stop listening. Open calls end with NotAttached."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._fail_all(f"this process has left the mesh {self.found.name!r}")
        with contextlib.suppress(OSError):
            os.write(self._woken, b"x")
        if threading.current_thread() is not self.thread:
            self.thread.join(5)

    def _close_sockets(self) -> None:
        with self._lock:
            self._closed = True
            self._speak.close(linger=200)
            self._listen.close(linger=0)
            for fd in (self._wake, self._woken, self._life):
                if fd is not None:
                    os.close(fd)
        self._context.term()


def notice_of(stuck: messages.RanksStuck) -> messages.CallOutput:
    """How it is said under a cell that goes on, or has ended already."""
    text = f"did not come back from Stop: {stuck.reason}; %mesh kill {format_ranks(stuck.ranks)} ends what does not"
    item = messages.RankDisplay(ranks=stuck.ranks, item=messages.Notice(text))
    return messages.CallOutput(call=stuck.call, items=(item,))


def _process_fd(found: keys.Connection) -> int | None:
    """A descriptor that becomes readable when the supervisor's process ends; None on another machine or system."""
    try:
        return processes.open_pidfd(found.pid) if found.lives else None
    except ProcessLookupError:
        return None


def _error_class(name: str) -> type[errors.MeshbookError]:
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, errors.MeshbookError):
        return found
    return errors.MeshbookError
