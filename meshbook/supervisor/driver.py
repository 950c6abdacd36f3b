"""The one loop that does I/O around the supervisor's memory: sockets in, steps out.

It authenticates peers, decodes what they say, hands it to `State`, and carries out the steps that come back. It decides
nothing about ranks or calls.
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
from meshbook.engines.base import Engine
from meshbook.engines.local import LocalEngine
from meshbook.errors import ProtocolError, StartError, TransferError, VersionMismatch
from meshbook.fold.outcomes import in_place_of
from meshbook.host.agent import HostAgent
from meshbook.supervisor import logfile
from meshbook.supervisor import state as s
from meshbook.supervisor.stalls import wanted_stall_s
from meshbook.supervisor.store import StoreServer
from meshbook.wire import codec, keys, messages, processes
from meshbook.wire.loop import Loop
from meshbook.wire.refusals import Refusals

log = logging.getLogger("meshbook.supervisor")

ENGINES: dict[str, type[LocalEngine]] = {"local": LocalEngine}

_ENGINE_POLL_S = 0.5
_CLIENT_POLL_S = 5.0  # where the system has no pidfd
_STOP_GRACE_S = 1.0
_LOG_LOOK_S = 30.0


class Driver:
    """A mesh's supervisor, until `run()` returns."""

    def __init__(
        self,
        folder: Path,
        name: str,
        token: str,
        *,
        address: str | None,
        owner: str | None,
        light: bool = False,
        source: str | None = None,
    ) -> None:
        self._folder, self._token, self._light, self._source = folder, token, light, source
        self._loop = Loop(on_error=self._failed)
        self._failures: set[type] = set()  # that were told of
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clock = SystemClock()
        self._started = clock.monotonic()
        self._front, self.connection = self._bind_front(name, address, owner, clock.wall())
        self._store = StoreServer(self._loop, self._context, f"ipc://{folder}/store.sock", token)
        stall_s = wanted_stall_s(os.environ)
        self._state = s.State(name, os.getpid(), clock.wall(), stall_s=stall_s, store=self._store.address)
        self._clients: dict[bytes, str] = {}  # identities that have shown the token, and the client each belongs to
        self._receivers: dict[str, bytes] = {}  # where each client listens
        self._watched: dict[str, int] = {}  # pidfds of clients on this machine
        self._agent: HostAgent | None = HostAgent(
            self._loop, self._context, folder, token, 0, lambda report: self._host_said(0, report)
        )
        self._engine: Engine | None = None
        self._back: zmq.Socket[bytes] | None = None
        self._hosts_known: set[bytes] = set()
        self._stopping = False
        self._refusals = Refusals(log)
        self._loop.watch_socket(self._front, self._hear_client)

    def _bind_front(
        self, name: str, address: str | None, owner: str | None, now: float
    ) -> tuple[zmq.Socket[bytes], keys.Connection]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        keys.harden(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        server_key = None
        if address is not None:
            public, secret = keys.curve_keys()
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = secret, public
            server_key = public.decode()
        try:
            socket.bind(address or f"ipc://{self._folder}/control.sock")
        except zmq.ZMQError as error:
            raise StartError(
                f"the address {address or self._folder} cannot be listened on: {error.strerror}; "
                "choose another with --listen tcp://127.0.0.1:0"
            ) from error
        connection = keys.Connection(
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
        told = f"its supervisor (pid {os.getpid()}) was ended by a signal (SIGTERM), and its ranks with it"
        signal.signal(signal.SIGTERM, lambda *_: self._loop.call_later(0, lambda: self._shut_down(told)))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a daemon has no terminal that could be closed
        if self._agent is not None:
            self._agent.warm_up(with_torch=not self._light, source=self._source)
        # Who started us may have died before saying hello: an empty mesh is an orphan from the start.
        self._carry_out([s.Alarm("orphan 0", s.ORPHAN_TTL_S)])
        self._keep_log_short()
        self._loop.run()
        self._front.close()
        self._store.close()
        if self._back is not None:
            self._back.close()
        self._context.term()

    def _keep_log_short(self) -> None:
        logfile.shorten(self._folder / "supervisor.log")
        self._loop.call_later(_LOG_LOOK_S, self._keep_log_short)

    # ---- clients

    def _hear_client(self, frames: list[bytes]) -> None:
        identity, body = frames[0], frames[1:]
        client = self._clients.get(identity)
        try:
            if client is None:
                self._welcome(identity, codec.client_hellos.decode(body))
                return
            command = codec.client_commands.decode(body)
        except (VersionMismatch, ProtocolError) as error:
            kind, text = type(error).__name__, str(error)
            if client is None and isinstance(error, ProtocolError):
                kind = "NotAttached"
                text = "this mesh does not know you: the token in its connection file was not shown"
            self._refusals.tell("a message from %r was refused: %s", identity[:16], error)
            self._send(identity, messages.Refused(call=None, error=kind, text=text))
            return
        if isinstance(command, messages.Hello):
            self._welcome(identity, command)
        else:
            try:
                self._carry_out(self._state.client_said(client, command, body[1], self._now()))
            except Exception as error:  # of ours; whoever sent the command would wait for ever
                log.exception("%s of client %s failed", type(command).__name__, client)
                text = (
                    f"the supervisor failed at {type(command).__name__} ({type(error).__name__}: {error}); this is a "
                    f"defect of Meshbook, whose traceback is in {self._folder / 'supervisor.log'}"
                )
                refused = messages.Refused(call=getattr(command, "call", None), error="ProtocolError", text=text)
                self._send(self._receivers.get(client, identity), refused)
            if isinstance(command, messages.Detach):
                self._forget(client)

    def _welcome(self, identity: bytes, hello: messages.Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._refusals.tell("%r showed a wrong token, and was refused", identity[:16])
            text = "this mesh does not know you: the token is not its own; its connection file may be an old one"
            self._send(identity, messages.Refused(call=None, error="NotAttached", text=text))
            return
        self._clients[identity] = hello.client
        if hello.channel == "receive":
            self._receivers[hello.client] = identity
            self._watch_process(hello.client, hello.pid)
            self._carry_out(self._state.client_joined(hello, self._now()))

    def _watch_process(self, client: str, pid: int) -> None:
        """Learn when the client's process ends, however it ends."""
        try:
            fd = processes.open_pidfd(pid)
        except ProcessLookupError:
            self._loop.call_later(0, lambda: self._client_gone(client))
            return
        if fd is not None:
            self._watched[client] = fd
            self._loop.watch_fd(fd, lambda: self._client_gone(client))
            return
        process = processes.identify(pid)

        def look() -> None:
            if client in self._receivers:
                if processes.is_running(process):
                    self._loop.call_later(_CLIENT_POLL_S, look)
                else:
                    self._client_gone(client)

        self._loop.call_later(_CLIENT_POLL_S, look)

    def _client_gone(self, client: str) -> None:
        self._forget(client)
        self._carry_out(self._state.client_gone(client))

    def _forget(self, client: str) -> None:
        fd = self._watched.pop(client, None)
        if fd is not None:
            self._loop.unwatch(fd)
            os.close(fd)
        self._receivers.pop(client, None)
        for identity in [identity for identity, owner in self._clients.items() if owner == client]:
            del self._clients[identity]

    def _send(self, identity: bytes, message: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a peer that is gone is told of by its process, not by its socket
            try:
                frames = codec.encode(message)
            except TransferError as error:  # whoever waits for it must hear something
                log.warning("%s", error)
                frames = codec.encode(in_place_of(message, error))
            self._front.send_multipart([identity, *frames])

    def _failed(self, error: BaseException) -> None:
        """Log what a callback raised, and tell it in the cells that run: they may wait for what it was to bring."""
        log.error("a callback failed; the supervisor goes on", exc_info=error)
        if type(error) in self._failures:
            return
        self._failures.add(type(error))
        notice = messages.Notice(
            f"an error in the mesh's supervisor ({type(error).__name__}: {error}), which goes on; this is a defect of "
            f"Meshbook, whose traceback is in {self._folder / 'supervisor.log'}. If this cell does not end, press Stop"
        )
        for call in self._state.open_calls(self._now()):
            item = messages.RankDisplay(ranks=call.ranks, item=notice)
            self._carry_out([s.ToClient(call.client, messages.CallOutput(call=call.call, items=(item,)))])

    # ---- hosts

    def _host_said(self, host: int, report: messages.HostReport) -> None:
        self._carry_out(self._state.host_said(host, report, self._now()))

    def _start_hosts(self, spec: messages.MeshSpec) -> None:
        engine = self._engine = ENGINES[spec.engine]()
        assert self._agent is not None
        if engine.in_process(spec.num_hosts):
            ready = messages.HostReady(host=0, hostname=self._agent.hostname, pid=os.getpid(), token="")
            self._host_said(0, ready)
            return
        self._agent.stop(0.0, lambda: None)
        self._agent.close()
        self._agent = None
        self._back = self._context.socket(zmq.ROUTER)
        keys.harden(self._back, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        address = f"ipc://{self._folder}/hosts.sock"
        self._back.bind(address)
        self._loop.watch_socket(self._back, self._hear_host)
        for host in range(spec.num_hosts):
            command = [sys.executable, "-P", "-m", "meshbook.host.main", str(self._folder), str(host), address]
            engine.launch(host, command, self._token.encode())
        self._loop.call_later(_ENGINE_POLL_S, self._poll_engine)

    def _hear_host(self, frames: list[bytes]) -> None:
        identity = frames[0]
        known = identity in self._hosts_known
        try:
            report = (codec.host_reports if known else codec.host_hellos).decode(frames[1:])
        except (VersionMismatch, ProtocolError) as error:
            self._refusals.tell("a message from host %r was refused: %s", identity[:16], error)
            return
        if isinstance(report, messages.HostReady):
            if not hmac.compare_digest(report.token.encode(), self._token.encode()):
                self._refusals.tell("%r says it is a host, without the token, and was refused", identity[:16])
                return
            self._hosts_known.add(identity)
        self._host_said(int(identity[1:]), report)

    def _poll_engine(self) -> None:
        if self._engine is None or self._stopping:
            return
        for host, how in self._engine.ended().items():
            self._carry_out(self._state.host_ended(host, how, self._now()))
        self._loop.call_later(_ENGINE_POLL_S, self._poll_engine)

    # ---- steps

    def _carry_out(self, steps: list[s.Step]) -> None:
        for step in steps:
            match step:
                case s.ToClient(client=None, message=message):
                    for identity in self._receivers.values():
                        self._send(identity, message)
                case s.ToClient(client=client, message=message):
                    if isinstance(message, messages.MeshReady):
                        self._tell_ready()
                    receiver = self._receivers.get(client or "")
                    if receiver is not None:
                        self._send(receiver, message)
                case s.ToHosts(hosts=hosts, message=message, body=body):
                    body = body or codec.encode_body(message)
                    if isinstance(message, messages.FormGroups):
                        self._store.begin_epoch(message.epoch)
                    if self._agent is not None:
                        self._agent.handle(message, body)
                    elif self._back is not None:
                        for host in hosts:
                            self._back.send_multipart([b"h%d" % host, codec.PROTOCOL, body])
                case s.StartHosts(spec=spec):
                    try:
                        self._start_hosts(spec)
                    except (StartError, KeyError) as error:
                        self._host_said(0, messages.HostFailed(host=0, reason=str(error)))
                case s.Alarm(name=name, delay_s=delay_s):
                    self._loop.call_later(delay_s, functools.partial(self._ring, name))
                case s.Shutdown(reason=reason):
                    self._shut_down(reason)

    def _tell_ready(self) -> None:
        """Say in the connection file that there are ranks: `attach` without a name looks for that."""
        self.connection = msgspec.structs.replace(self.connection, has_ranks=True)
        try:
            keys.write_connection(self._folder, self.connection)
        except StartError as error:
            log.warning("%s", error)

    def _ring(self, alarm: str) -> None:
        self._carry_out(self._state.alarm(alarm, self._now()))

    def _shut_down(self, reason: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._state.ending()
        log.info("ending: %s", reason)
        if self._agent is not None:
            self._agent.stop(_STOP_GRACE_S, lambda: self._ended(reason))
        elif self._back is not None and self._engine is not None:
            for identity in self._hosts_known:
                self._back.send_multipart([identity, *codec.encode(messages.Exit(grace_s=_STOP_GRACE_S))])
            self._await_hosts(reason, tries=70)
        else:
            self._ended(reason)

    def _await_hosts(self, reason: str, tries: int) -> None:
        """Hosts end themselves once their ranks have; the last resort is the engine's."""
        assert self._engine is not None
        for host in self._engine.ended():
            self._hosts_known.discard(b"h%d" % host)
        if not self._hosts_known or not tries:
            while self._back is not None and self._back.poll(0):  # the last words of hosts that have ended since
                self._hear_host(self._back.recv_multipart())
            self._engine.close()
            self._ended(reason)
        else:
            self._loop.call_later(0.1, lambda: self._await_hosts(reason, tries - 1))

    def _ended(self, reason: str) -> None:
        """Every rank is gone. Say so last: who hears it may count on it."""
        if self._agent is not None:
            self._agent.close()
        keys.remove_folder(self._folder)
        for identity in self._receivers.values():
            self._send(identity, messages.MeshStopped(reason=reason))
        self._front.setsockopt(zmq.LINGER, 500)
        self._loop.stop()

    def _now(self) -> float:
        return self._loop.clock.monotonic() - self._started
