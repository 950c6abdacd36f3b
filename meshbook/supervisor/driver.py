"""The supervisor's only loop with I/O: sockets in, effects out.

It authenticates peers, decodes their messages, passes them to `MeshState`, and applies the effects that it returns. It
makes no decisions about ranks or calls.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

from meshbook.clock import SystemClock
from meshbook.engines import ENGINES
from meshbook.engines.base import HostEngine
from meshbook.errors import ProtocolError, StartError, TransferError, VersionMismatch
from meshbook.fold.outcomes import failure_report_for
from meshbook.host.agent import HostAgent
from meshbook.supervisor import effects, logfile
from meshbook.supervisor.client_processes import ClientProcesses
from meshbook.supervisor.clients import ORPHAN_TTL_S
from meshbook.supervisor.committing import CheckpointCommitter
from meshbook.supervisor.stalls import read_stall_timeout
from meshbook.supervisor.state import MeshState
from meshbook.supervisor.store import StoreServer
from meshbook.wire import codec, keys, messages, processes
from meshbook.wire.loop import Loop, send_frames
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.supervisor")

_ENGINE_POLL_S = 0.5
_STOP_GRACE_S = 1.0
_LOG_CHECK_S = 30.0


class Driver:
    """The supervisor of a mesh, until `run()` returns."""

    def __init__(
        self,
        folder: Path,
        name: str,
        token: str,
        *,
        address: str | None,
        owner: str | None,
        light: bool = False,
        branch_from: str | None = None,
    ) -> None:
        self._folder, self._token, self._light, self._branch_from = folder, token, light, branch_from
        self._loop = Loop(on_error=self._on_callback_error)
        self._reported_failures: set[type] = set()  # types of errors already reported
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clock = SystemClock()
        self._started_at = clock.monotonic()
        self._client_socket, self.connection = self._bind_client_socket(name, address, owner, clock.wall())
        self._store = StoreServer(self._loop, self._context, f"ipc://{folder}/store.sock", token)
        stall_s = read_stall_timeout(os.environ)
        self._state = MeshState(name, os.getpid(), clock.wall(), stall_s=stall_s, store_address=self._store.address)
        self._clients: dict[bytes, str] = {}  # authenticated identities, and the client each belongs to
        self._receivers: dict[str, bytes] = {}  # client -> the identity of its receiving socket
        self._client_processes = ClientProcesses(self._loop, self._client_disconnected)
        self._agent: HostAgent | None = HostAgent(
            self._loop, self._context, folder, token, 0, lambda report: self._on_host_report(0, report)
        )
        self._committer = CheckpointCommitter(self._loop, self._state.saves.commit_ended, self._apply_effects)
        self._engine: HostEngine | None = None
        self._host_socket: zmq.Socket[bytes] | None = None
        self._authenticated_hosts: set[bytes] = set()
        self._stopping = False
        self._rejections = RateLimitedLog(log)
        self._loop.watch_socket(self._client_socket, self._on_client_message)

    def _bind_client_socket(
        self, name: str, address: str | None, owner: str | None, now: float
    ) -> tuple[zmq.Socket[bytes], keys.ConnectionInfo]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        server_key = None
        if address is not None:
            public, secret = keys.new_curve_keys()
            socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, secret, public
            server_key = public.decode()
        try:
            socket.bind(address or f"ipc://{self._folder}/control.sock")
        except zmq.ZMQError as error:
            raise StartError(
                f"the address {address or self._folder} cannot be listened on: {error.strerror}; "
                "choose another with --listen tcp://127.0.0.1:0"
            ) from error
        connection = keys.ConnectionInfo(
            name=name,
            address=socket.getsockopt_string(zmq.LAST_ENDPOINT),
            token=self._token,
            process=processes.identify(os.getpid()),
            started_at=now,
            protocol=codec.PROTOCOL.decode(),
            owner=owner,
            server_key=server_key,
        )
        return socket, connection

    def run(self) -> None:
        """Serve until the mesh is stopped or orphaned."""
        requested = self._state.changes.preemption.requested
        self._loop.watch_signal(signal.SIGTERM, lambda: self._apply_effects(requested(None, self._now())))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a daemon has no terminal that could be closed
        if self._agent is not None:
            self._agent.warm_up(with_torch=not self._light, branch_from=self._branch_from)
        # The process that started us may have died before its Hello: an empty mesh is orphaned from the start.
        self._apply_effects([effects.SetTimer("orphan 0", ORPHAN_TTL_S)])
        self._truncate_log()
        self._loop.run()
        self._client_socket.close()
        self._store.close()
        if self._host_socket is not None:
            self._host_socket.close()
        self._context.term()

    def _truncate_log(self) -> None:
        logfile.truncate_log(self._folder / "supervisor.log")
        self._loop.call_later(_LOG_CHECK_S, self._truncate_log)

    # ---- clients

    def _on_client_message(self, frames: list[bytes]) -> None:
        identity, body = frames[0], frames[1:]
        client = self._clients.get(identity)
        try:
            if client is None:
                self._handle_hello(identity, codec.client_hellos.decode(body))
                return
            command = codec.client_commands.decode(body)
        except (VersionMismatch, ProtocolError) as error:
            kind, text = type(error).__name__, str(error)
            if client is None and isinstance(error, ProtocolError):
                kind = "NotAttached"
                text = "this mesh does not know you: the token in its connection file was not shown"
            self._rejections.warning("a message from %r was refused: %s", identity[:16], error)
            self._send(identity, messages.Refused(call=None, error=kind, text=text))
            return
        if isinstance(command, messages.Hello):
            self._handle_hello(identity, command)
        else:
            try:
                self._apply_effects(self._state.command_received(client, command, body[1], self._now()))
            except Exception as error:  # an error of our own; the client would wait for a reply for ever
                log.exception("%s of client %s failed", type(command).__name__, client)
                text = (
                    f"the supervisor failed at {type(command).__name__} ({type(error).__name__}: {error}); this is a "
                    f"defect of Meshbook, whose traceback is in {self._folder / 'supervisor.log'}"
                )
                refused = messages.Refused(call=getattr(command, "call", None), error="ProtocolError", text=text)
                self._send(self._receivers.get(client, identity), refused)
            if isinstance(command, messages.Detach):
                self._unregister_client(client)

    def _handle_hello(self, identity: bytes, hello: messages.Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._rejections.warning("%r showed a wrong token, and was refused", identity[:16])
            text = "this mesh does not know you: the token is not its own; its connection file may be an old one"
            self._send(identity, messages.Refused(call=None, error="NotAttached", text=text))
            return
        self._clients[identity] = hello.client
        if hello.channel == "receive":
            self._receivers[hello.client] = identity
            self._client_processes.watch(hello.client, hello.pid)
            self._apply_effects(self._state.client_joined(hello, self._now()))

    def _client_disconnected(self, client: str) -> None:
        self._unregister_client(client)
        self._apply_effects(self._state.client_disconnected(client, self._now()))

    def _unregister_client(self, client: str) -> None:
        self._client_processes.forget(client)
        self._receivers.pop(client, None)
        for identity in [identity for identity, owner in self._clients.items() if owner == client]:
            del self._clients[identity]

    def _send(self, identity: bytes, message: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the loss of a peer is detected by its process, not by its socket
            try:
                frames = codec.encode(message)
            except TransferError as error:  # the receiver waits for a reply, so send the failure
                log.warning("%s", error)
                frames = codec.encode(failure_report_for(message, error))
            send_frames(self._client_socket, (identity, *frames))

    def _on_callback_error(self, error: BaseException) -> None:
        """Log an exception of a callback and report it in running cells, which may wait for the callback's result."""
        log.error("a callback failed; the supervisor goes on", exc_info=error)
        if type(error) in self._reported_failures:
            return
        self._reported_failures.add(type(error))
        notice = messages.Notice(
            f"an error in the mesh's supervisor ({type(error).__name__}: {error}), which goes on; this is a defect of "
            f"Meshbook, whose traceback is in {self._folder / 'supervisor.log'}. If this cell does not end, press Stop"
        )
        for call in self._state.open_calls(self._now()):
            item = messages.RankDisplay(ranks=call.ranks, item=notice)
            self._apply_effects([effects.SendToClient(call.client, messages.CallOutput(call=call.call, items=(item,)))])

    # ---- hosts

    def _on_host_report(self, host: int, report: messages.HostReport) -> None:
        self._apply_effects(self._state.report_received(host, report, self._now()))

    def _start_hosts(self, spec: messages.MeshSpec) -> None:
        engine = self._engine = ENGINES[spec.engine]()
        assert self._agent is not None
        if engine.runs_in_process(spec.num_hosts):
            self._on_host_report(0, messages.HostReady(host=0, hostname=self._agent.hostname, pid=os.getpid()))
            return
        self._agent.stop(0.0, lambda: None)
        self._agent.close()
        self._agent = None
        self._host_socket = self._context.socket(zmq.ROUTER)
        keys.configure_socket(self._host_socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        address = f"ipc://{self._folder}/hosts.sock"
        self._host_socket.bind(address)
        self._loop.watch_socket(self._host_socket, self._on_host_message)
        for host in range(spec.num_hosts):
            command = [sys.executable, "-P", "-m", "meshbook.host.main", str(self._folder), str(host), address]
            engine.launch(host, command, self._token.encode())
        self._loop.call_later(_ENGINE_POLL_S, self._poll_engine)

    def _on_host_message(self, frames: list[bytes]) -> None:
        identity = frames[0]
        decoder = codec.host_reports if identity in self._authenticated_hosts else codec.host_hellos
        try:
            report = decoder.decode(frames[1:])
        except (VersionMismatch, ProtocolError) as error:
            self._rejections.warning("a message from host %r was refused: %s", identity[:16], error)
            return
        if isinstance(report, messages.HostReady):
            if not hmac.compare_digest(report.token.encode(), self._token.encode()):
                self._rejections.warning("%r says it is a host, without the token, and was refused", identity[:16])
                return
            self._authenticated_hosts.add(identity)
        self._on_host_report(int(identity[1:]), report)

    def _poll_engine(self) -> None:
        if self._engine is None or self._stopping:
            return
        for host, reason in self._engine.pop_exited().items():
            self._apply_effects(self._state.host_exited(host, reason, self._now()))
        self._loop.call_later(_ENGINE_POLL_S, self._poll_engine)

    # ---- effects

    def _apply_effects(self, requested: list[effects.Effect]) -> None:
        for effect in requested:
            match effect:
                case effects.SendToClient(client=None, message=message):
                    for identity in self._receivers.values():
                        self._send(identity, message)
                case effects.SendToClient(client=client, message=message):
                    if isinstance(message, messages.MeshReady):
                        self._record_ranks_started()
                    if (receiver := self._receivers.get(client or "")) is not None:
                        self._send(receiver, message)
                case effects.SendToHosts(hosts=hosts, message=message, body=body):
                    body = body or codec.encode_body(message)
                    if isinstance(message, messages.FormGroups):
                        self._store.begin_generation(message.generation)
                    if self._agent is not None:
                        self._agent.handle(message, body)
                    elif self._host_socket is not None:
                        for host in hosts:
                            self._host_socket.send_multipart([b"h%d" % host, codec.PROTOCOL, body])
                case effects.StartHosts(spec=spec):
                    try:
                        self._start_hosts(spec)
                    except (StartError, KeyError) as error:
                        self._on_host_report(0, messages.HostFailed(host=0, reason=str(error)))
                case effects.SetTimer(name=name, delay_s=delay_s):
                    self._loop.call_later(delay_s, functools.partial(self._on_timer, name))
                case effects.CommitCheckpoint() | effects.RemoveCheckpoint():
                    self._committer.submit(effect)
                case effects.Shutdown(reason=reason):
                    self._shut_down(reason)

    def _record_ranks_started(self) -> None:
        """Record in the connection file that the mesh has ranks: `attach` without a name looks for that."""
        self.connection = msgspec.structs.replace(self.connection, has_ranks=True)
        try:
            keys.write_connection_file(self._folder, self.connection)
        except StartError as error:
            log.warning("%s", error)

    def _on_timer(self, name: str) -> None:
        self._apply_effects(self._state.timer_fired(name, self._now()))

    def _shut_down(self, reason: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._state.begin_shutdown()
        log.info("ending: %s", reason)
        if self._agent is not None:
            self._agent.stop(_STOP_GRACE_S, lambda: self._finish_shutdown(reason))
        elif self._host_socket is not None and self._engine is not None:
            for identity in self._authenticated_hosts:
                self._host_socket.send_multipart([identity, *codec.encode(messages.Exit(grace_s=_STOP_GRACE_S))])
            self._wait_for_hosts(reason, tries=70)
        else:
            self._finish_shutdown(reason)

    def _wait_for_hosts(self, reason: str, tries: int) -> None:
        """Wait until hosts have exited, which they do after their ranks; then the engine ends those that remain."""
        assert self._engine is not None
        for host in self._engine.pop_exited():
            self._authenticated_hosts.discard(b"h%d" % host)
        if not self._authenticated_hosts or not tries:
            # last messages of hosts that have exited since
            while self._host_socket is not None and self._host_socket.poll(0):
                self._on_host_message(self._host_socket.recv_multipart())
            self._engine.close()
            self._finish_shutdown(reason)
        else:
            self._loop.call_later(0.1, lambda: self._wait_for_hosts(reason, tries - 1))

    def _finish_shutdown(self, reason: str) -> None:
        """Clean up after the exit of all ranks. MeshStopped is sent last, so that clients can rely on it."""
        self._committer.close()
        if self._agent is not None:
            self._agent.close()
        keys.remove_folder(self._folder)
        for identity in self._receivers.values():
            self._send(identity, messages.MeshStopped(reason=reason))
        self._client_socket.setsockopt(zmq.LINGER, 500)
        self._loop.stop()

    def _now(self) -> float:
        return self._loop.clock.monotonic() - self._started_at
