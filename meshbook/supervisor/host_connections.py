"""The hosts that are processes of their own: they are started by an engine, authenticated, and heard or missed.

Of a host on another machine silence is all that is seen when its machine loses power, freezes or is cut off. So the
supervisor speaks to each every second, and counts its own checks without a word: a supervisor that was itself stopped
for a while finds the words that came meanwhile before it counts.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import zmq

from meshbook.engines.base import HostEngine, HostProgress, HostStart
from meshbook.errors import ProtocolError, StartError, VersionMismatch
from meshbook.host.facts import address_towards
from meshbook.supervisor.project_server import ProjectServer
from meshbook.supervisor.value_carrier import ValueCarrier
from meshbook.wire import codec, keys, messages
from meshbook.wire.linked_sockets import LinkedRouter
from meshbook.wire.loop import Loop
from meshbook.wire.rate_limited_log import RateLimitedLog
from meshbook.wire.regions import machine_id
from meshbook.wire.remote_start import HOSTS_SOCKET, SupervisorAddress
from meshbook.wire.transfers import without_data

log = logging.getLogger("meshbook.supervisor")

_POLL_S = 0.5
_KEEP_ALIVE_S = 1.0
# Checks without a word, one each _POLL_S, after which users hear of a host on another machine. Hosts answer within
# milliseconds also when their ranks compute; a user is to hear of a dead machine within 5 s.
_TELL_AFTER_CHECKS = 7
# ... and after which it counts as lost while the mesh stops, when hosts only end their ranks.
_MAX_SILENT_CHECKS_AT_STOP = 3
_STOP_TIMEOUT_S = 7.0
_STOP_POLL_S = 0.1


class HostEvents(Protocol):
    """Who hears of hosts."""

    def host_reported(self, host: int, report: messages.HostReport) -> None: ...

    def host_lost(self, host: int, reason: str) -> None:
        """`reason` follows the name of the host or its machine: "was killed by signal 9", "does not answer"."""

    def host_fell_silent(self, host: int, silent_s: float, lost_after_s: float) -> None:
        """Nothing was heard of a host for `silent_s` seconds; after `lost_after_s` it is lost."""

    def host_answered(self, host: int, silent_s: float) -> None:
        """A host of which that was said answers again."""

    def hosts_awaited(self, queue_state: str, progress: dict[int, HostProgress]) -> None:
        """What the launcher's queue says, "" when it has given the machines, and how far hosts have come since."""

    def allocation_ends(self, at: float | None) -> None:
        """When the launcher will take the machines away, wall clock; None: that is not known any more."""


@dataclass
class _Host:
    """One start of a host.

    Attributes:
        silent_checks: in a row, in which nothing had been heard of it; None: it has not connected yet.
    """

    number: int
    identity: bytes
    silent_checks: int | None = None
    heard_at: float = 0.0
    is_remote: bool = False  # on another machine than this process
    latency_s: float | None = None


class HostConnections:
    """Starts hosts, sends to them and hears them."""

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        mesh: str,
        token: str,
        engine: HostEngine,
        events: HostEvents,
        listen_store: Callable[[str, tuple[bytes, bytes]], str],
        lost_after_s: float,
        lease_s: float,
    ) -> None:
        """
        Args:
            listen_store: has the mesh's store listen on an address too; used if the engine's hosts connect by TCP.
            lost_after_s: seconds without a word after which a host on another machine is lost.
            lease_s: seconds without a word from here after which it ends its ranks by itself.
        """
        self._lost_after_s, self._lease_s = lost_after_s, lease_s
        self._loop, self._folder, self._mesh, self._token = loop, folder, mesh, token
        self.engine = engine
        self._events = events
        self._hosts: dict[int, _Host] = {}
        self._numbers: dict[bytes, int] = {}  # of all identities that were ever given
        self._authenticated: set[bytes] = set()
        self._rejections = RateLimitedLog(log)
        self._is_stopping = False
        self.values = ValueCarrier(loop, self._send, events.host_reported)
        self._project = ProjectServer()
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        self._socket, self._listen_store = socket, listen_store
        self._is_listening = not engine.dials_tcp  # else from when the address of a machine is known
        self._curve_keys: tuple[bytes, bytes] | None = None
        self._ends_at: float | None = None
        self._is_awaiting = False  # hosts that have not connected yet
        if not engine.dials_tcp:
            socket.bind(f"ipc://{folder}/{HOSTS_SOCKET}")
        self._router = LinkedRouter(
            loop, socket, self._on_message, self._on_hello, shorten=without_data, handover=True
        )  # fmt: skip
        loop.call_later(_POLL_S, self._poll)
        loop.call_later(_KEEP_ALIVE_S, self._keep_alive)

    def start(self, hosts: Iterable[int], *, torch: bool) -> None:
        """Have the engine start hosts. Raises StartError."""
        self._loop.diverge()
        for number in hosts:
            identity = f"h{number}.{secrets.token_hex(4)}"
            self._hosts[number] = _Host(number, identity.encode())
            self._numbers[identity.encode()] = number
            start = HostStart(self._folder, self._mesh, self._token, identity, torch, self._lease_s)
            self.engine.launch(number, start)

    def send(self, hosts: tuple[int, ...], message: messages.HostCommand, body: bytes) -> None:
        """Send a command, encoded in `body`, to hosts; its values too, to those on other machines."""
        if isinstance(message, messages.Release):
            self.values.release(message.segments)
        elif isinstance(message, messages.SyncFiles):
            self._project.allow(message)
        remote = {host.number for host in self._hosts.values() if host.is_remote}
        if not remote or not self.values.stage(hosts, remote, message, body):
            self._send(hosts, body)

    def _send(self, hosts: Iterable[int], body: bytes) -> None:
        for number in hosts:
            if (host := self._hosts.get(number)) is not None:
                self._router.send(host.identity, body)

    def latency_s(self, host: int) -> float | None:
        return found.latency_s if (found := self._hosts.get(host)) is not None else None

    def values_go(self, host: int) -> Literal["", "directly", "as messages"]:
        found = self._hosts.get(host)
        if found is None or not found.is_remote:
            return ""
        return "directly" if self.values.is_direct(host) else "as messages"

    def silent_s(self, host: int) -> float:
        """Return for how long nothing was heard of a host; 0 if that is shorter than its beats are apart."""
        found = self._hosts.get(host)
        if found is None or not found.silent_checks or found.silent_checks * _POLL_S < 2 * _KEEP_ALIVE_S:
            return 0.0
        return self._loop.clock.monotonic() - found.heard_at

    def stop(self, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """End all hosts, and call `on_stopped`. Those that do not answer are not waited for."""
        self._is_stopping = True
        for host in self._hosts.values():
            if host.identity in self._authenticated:
                self._router.send(host.identity, codec.encode_body(messages.Exit(grace_s=grace_s)))
                host.silent_checks = 0
        self._wait_for_exits(self._loop.clock.monotonic() + _STOP_TIMEOUT_S, on_stopped)

    def take_over(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Go on in a standby of the supervisor, which has ended."""
        self._router.reopen(context, curve_keys=self._curve_keys)
        self.engine.take_over()
        self.values.take_over()

    def notify(self, notice: messages.Notice) -> None:
        """Show a notice of the mesh once: in the running calls, else in the next one."""
        if first := next((host for host in self._hosts.values() if host.identity in self._authenticated), None):
            self._send((first.number,), codec.encode_body(messages.ShowNotice(notice)))

    def close(self) -> None:
        self.values.close()
        self._router.close()

    def _wait_for_exits(self, deadline: float, on_stopped: Callable[[], None]) -> None:
        """Wait until hosts have exited, which they do after their ranks; then the engine ends those that remain."""
        for number in self.engine.pop_exited():
            self._hosts.pop(number, None)
        waiting = [host for host in self._hosts.values() if host.identity in self._authenticated]
        if waiting and self._loop.clock.monotonic() < deadline:
            self._loop.call_later(_STOP_POLL_S, lambda: self._wait_for_exits(deadline, on_stopped))
            return
        while self._router.receive_pending():  # last messages of hosts that have exited since
            pass
        self.engine.close()
        on_stopped()

    # ---- what hosts say

    def _on_hello(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            ready = codec.host_hellos.decode(frames)
        except (VersionMismatch, ProtocolError) as error:
            self._rejections.warning("a message from host %r was refused: %s", identity[:16], error)
            return
        number = self._numbers.get(identity)
        if number is None or not hmac.compare_digest(ready.token.encode(), self._token.encode()):
            self._rejections.warning("%r says it is a host, without the token, and was refused", identity[:16])
        elif identity not in self._authenticated:  # else it has connected again
            self._loop.diverge()  # for a standby that has the pipes and the process that the engine has of it
            self._authenticated.add(identity)
            self._router.open_peer(identity)
            self._receive(number, identity, ready, b"")

    def _on_message(self, identity: bytes, body: bytes) -> None:
        try:
            report = codec.host_reports.decode_body(body)
        except ProtocolError as error:
            self._rejections.warning("a message from host %r was refused: %s", identity[:16], error)
        else:
            self._receive(self._numbers[identity], identity, report, body)

    def _receive(self, number: int, identity: bytes, report: messages.HostReport, body: bytes) -> None:
        host = self._hosts.get(number)
        if host is None or host.identity != identity:
            # It was declared lost, and was only cut off or frozen: its ranks are lost, and may have successors.
            self._router.send(identity, codec.encode_body(messages.Exit(grace_s=0.0)))
            return
        now = self._loop.clock.monotonic()
        if (host.silent_checks or 0) >= _TELL_AFTER_CHECKS and not self._is_stopping:
            self._events.host_answered(number, now - host.heard_at)
        host.silent_checks, host.heard_at = 0, now
        if isinstance(report, messages.HostReady) and report.facts is not None:
            host.is_remote = report.facts.machine != machine_id()
        if isinstance(report, messages.HostAlive):
            host.latency_s = host.heard_at - report.sent_at
        elif isinstance(report, messages.FetchFiles):
            self._send((number,), codec.encode_body(self._project.serve(report)))
        elif not self.values.receive(number, report, body, is_remote=host.is_remote):
            self._events.host_reported(number, report)

    # ---- what hosts do not say

    def _listen(self, machine: str) -> None:
        """Listen for hosts and their ranks, on the interface by which a machine of the mesh is reached."""
        self._is_listening = True
        try:
            key_pair = self._curve_keys = keys.new_curve_keys()
            here = address_towards(machine)
            if here is None:
                raise StartError(f"there is no way in the network from this machine to {machine}")
            hosts = self._router.endpoint = keys.bind_encrypted(self._socket, here, key_pair)
            store = self._listen_store(here, key_pair)
        except StartError as error:
            self._events.host_reported(0, messages.HostFailed(host=0, reason=str(error)))
        else:
            self.engine.supervisor_listens(SupervisorAddress(hosts, store, key_pair[0].decode()))

    def _poll(self) -> None:
        if not self._is_stopping:
            if not self._is_listening and (machine := self.engine.first_address()) is not None:
                self._listen(machine)
            state, ends_at, progress = self._loop.observe(
                lambda: (self.engine.queue_state, self.engine.ends_at, self.engine.progress())
            )
            failed, exited = self._loop.observe(lambda: (self.engine.pop_failed(), self.engine.pop_exited()))
            awaited = {number for number, host in self._hosts.items() if host.silent_checks is None}
            if awaited or self._is_awaiting:
                self._events.hosts_awaited(state, {host: one for host, one in progress.items() if host in awaited})
            self._is_awaiting = bool(awaited)
            if ends_at != self._ends_at:
                self._ends_at = ends_at
                self._events.allocation_ends(ends_at)
            for number, reason in failed.items():
                self._hosts.pop(number, None)
                self._events.host_reported(number, messages.HostFailed(host=number, reason=reason))
            for number, reason in exited.items():
                self._lose(number, reason)
        if self.engine.spans_machines:
            self._count_silence()
        self._loop.call_later(_POLL_S, self._poll)

    def _count_silence(self) -> None:
        limit = _MAX_SILENT_CHECKS_AT_STOP if self._is_stopping else round(self._lost_after_s / _POLL_S)
        for host in list(self._hosts.values()):
            if host.silent_checks is None:
                continue
            host.silent_checks += 1
            seconds = self._loop.clock.monotonic() - host.heard_at
            if host.silent_checks == _TELL_AFTER_CHECKS and not self._is_stopping:
                self._events.host_fell_silent(host.number, seconds, self._lost_after_s)
            if host.silent_checks >= limit:
                self._lose(host.number, f"has not answered for {seconds:.0f} s (no power, hung, or cut off)")

    def _lose(self, number: int, reason: str) -> None:
        if self._hosts.pop(number, None) is not None and not self._is_stopping:
            self.values.host_lost(number)
            self._events.host_lost(number, reason)

    def _keep_alive(self) -> None:
        if self.engine.spans_machines:
            beat = messages.KeepAlive(sent_at=self._loop.clock.monotonic())
            self._send(self._hosts, codec.encode_body(beat))
            self._loop.call_later(_KEEP_ALIVE_S, self._keep_alive)
