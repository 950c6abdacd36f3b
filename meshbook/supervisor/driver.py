"""The supervisor's only loop with I/O: sockets in, effects out.

It authenticates peers, decodes their messages, passes them to `MeshState`, and applies the effects that it returns. It
makes no decisions about ranks or calls.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import zmq

from meshbook.clock import SystemClock
from meshbook.engines import ENGINES
from meshbook.engines.base import HostProgress
from meshbook.errors import MeshbookError, ProtocolError, StartError, TransferError, VersionMismatch
from meshbook.fold.outcomes import failure_report_for
from meshbook.host.agent import HostAgent
from meshbook.host.facts import gather_facts
from meshbook.supervisor import effects, logfile
from meshbook.supervisor.committing import CheckpointCommitter
from meshbook.supervisor.host_connections import HostConnections
from meshbook.supervisor.stalls import read_stall_timeout
from meshbook.supervisor.state import MeshState
from meshbook.supervisor.store import StoreServer
from meshbook.wire import codec, keys, messages, processes
from meshbook.wire.descriptor_reserve import DescriptorReserve
from meshbook.wire.descriptors import describe_shortage, is_shortage, shortage
from meshbook.wire.linked_sockets import LinkedRouter
from meshbook.wire.process_watch import ProcessWatch
from meshbook.wire.rate_limited_log import RateLimitedLog
from meshbook.wire.remote_start import STORE_SOCKET
from meshbook.wire.replicated_loop import ReplicatedLoop

log = logging.getLogger("meshbook.supervisor")

_STOP_GRACE_S = 1.0
_LOG_CHECK_S = 30.0
_CLIENT_LINGER_MS = 500
_CLIENT_POLL_S = 5.0  # for clients' exits, if the system has no pidfd
_ATTACH_TIMEOUT_S = 60.0  # for the process that started us: it gives up after 10
_LAUNCHER = "launcher"  # key of that process among the clients', until one has attached
_WRITE_RETRY_S = 1.0  # for the connection file, if the disk is full

# Commands that start processes, each of which takes some ten descriptors here for as long as it lives.
_OPENS_DESCRIPTORS = messages.StartMesh | messages.HealMesh | messages.ResizeMesh | messages.KeepSpares


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
        cold: bool = False,
        branch_from: str | None = None,
    ) -> None:
        self._folder, self._token = folder, token
        self._light, self._cold, self._branch_from = light, cold, branch_from
        self._loop = ReplicatedLoop(on_error=self._on_callback_error)
        self._loop.on_takeover = self._take_over
        self._reported_failures: set[type] = set()  # types of errors already reported
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clock = SystemClock()
        self._started_at = clock.monotonic()
        self._curve_keys = None if address is None else keys.new_curve_keys()
        client_socket, self.connection = _bind_client_socket(
            self._context, folder, name, token, self._curve_keys, address=address, owner=owner, now=clock.wall()
        )
        self._client_router = LinkedRouter(self._loop, client_socket, self._on_client_message, self._on_client_hello)
        self._store = StoreServer(self._loop, self._context, f"ipc://{folder}/{STORE_SOCKET}", token)
        stall_s = read_stall_timeout(os.environ)
        self._state = MeshState(
            name, os.getpid(), clock.wall(), facts=gather_facts, stall_s=stall_s, store_address=self._store.address
        )
        self._state.machines.read_log = functools.partial(logfile.read_host_log, folder)
        self._clients: dict[bytes, str] = {}  # authenticated identities, and the client each belongs to
        self._receivers: dict[str, bytes] = {}  # client -> the identity of its receiving socket
        self._client_processes = ProcessWatch(self._loop, self._client_disconnected, poll_s=_CLIENT_POLL_S)
        self._agent: HostAgent | None = HostAgent(
            self._loop, self._context, folder, token, 0, lambda report: self.host_reported(0, report)
        )
        self._committer = CheckpointCommitter(self._loop, self._state.saves.commit_ended, self._apply_effects)
        self._hosts: HostConnections | None = None  # those that are processes of their own
        self._stopping = False
        self._rejections = RateLimitedLog(log)
        self._reserve = DescriptorReserve(self._loop)

    def run(self, launcher: int) -> None:
        """Serve until the mesh is stopped or orphaned.

        Args:
            launcher: pid of the process that started this one, and is to be the first client.
        """
        requested = self._state.changes.preemption.requested
        self._loop.watch_signal(signal.SIGTERM, lambda: self._apply_effects(requested(None, self._now())))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a daemon has no terminal that could be closed
        if self._agent is not None and not self._cold:
            self._agent.warm_up(with_torch=not self._light, branch_from=self._branch_from)
        self._client_processes.watch(_LAUNCHER, launcher)  # it may die, or give up, before its Hello
        self._apply_effects([effects.SetTimer("orphan 0", _ATTACH_TIMEOUT_S)])
        self._truncate_log()
        self._loop.run()
        self._client_router.close(linger_ms=_CLIENT_LINGER_MS)
        self._store.close()
        if self._hosts is not None:
            self._hosts.close()
        self._context.term()

    def _take_over(self, ended_at: float) -> None:
        """Go on in the place of the supervisor that this process is a standby of, and that has ended at `ended_at`."""
        former = self.connection.pid
        self._context = zmq.Context()
        self._client_router.reopen(self._context, curve_keys=self._curve_keys)
        self._store.reopen(self._context)
        hosts = self._agent or self._hosts
        assert hosts is not None
        hosts.take_over(self._context)
        self._committer.take_over()
        self.connection = msgspec.structs.replace(self.connection, process=processes.identify(os.getpid()))
        self._write_connection_file()
        text = (
            f"the supervisor (pid {former}) was killed; its standby (pid {os.getpid()}) took over after "
            f"{self._loop.clock.monotonic() - ended_at:.2f} s, and nothing is lost"
        )
        log.warning("%s", text)
        hosts.notify(messages.Notice(text))
        self._state.pid = self._state.changes.preemption.pid = os.getpid()
        self._apply_effects([effects.SendToClient(None, messages.MeshChanged(info=self._state.info(), exited=()))])

    def _truncate_log(self) -> None:
        logfile.truncate_log(self._folder / "supervisor.log")
        self._loop.call_later(_LOG_CHECK_S, self._truncate_log, logged=False)

    # ---- clients

    def _on_client_message(self, identity: bytes, body: bytes) -> None:
        client = self._clients[identity]
        try:
            command = codec.client_commands.decode_body(body)
        except ProtocolError as error:
            self._refuse_message(identity, type(error).__name__, str(error))
            return
        try:
            if isinstance(command, _OPENS_DESCRIPTORS) and self._loop.observe(self._reserve.look):
                raise shortage()
            self._apply_effects(self._state.command_received(client, command, body, self._now()))
        except Exception as error:  # an error of our own; the client would wait for a reply for ever
            kind, text = _describe_failure(error, type(command).__name__, self._folder)
            refused = messages.Refused(call=getattr(command, "call", None), error=kind, text=text)
            self._send(self._receivers.get(client, identity), refused)
        if isinstance(command, messages.Detach):
            self._unregister_client(client)

    def _on_client_hello(self, identity: bytes, frames: list[bytes]) -> None:
        """Handle a message that belongs to no link: a client introduces itself, or a stranger says something."""
        try:
            hello = codec.client_hellos.decode(frames)
        except VersionMismatch as error:
            self._refuse_message(identity, "VersionMismatch", str(error))
            return
        except ProtocolError as error:
            text = "this mesh does not know you: the token in its connection file was not shown"
            self._refuse_message(identity, "NotAttached", text, why=str(error))
            return
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            text = "this mesh does not know you: the token is not its own; its connection file may be an old one"
            self._refuse_message(identity, "NotAttached", text)
            return
        if self._clients.get(identity) == hello.client:
            return  # it has introduced itself again, because it was not answered in time
        if self._loop.observe(self._reserve.look):
            self._refuse_message(identity, "NotAttached", f"the mesh takes no client now: {describe_shortage()}")
            return
        self._clients[identity] = hello.client
        self._client_router.open_peer(identity, reply_to=keys.client_identity(hello.client, "receive"))
        if hello.channel == "receive":
            self._receivers[hello.client] = identity
            self._client_processes.forget(_LAUNCHER)
            self._client_processes.watch(hello.client, hello.pid)
            self._apply_effects(self._state.client_joined(hello, self._now()))

    def _refuse_message(self, identity: bytes, kind: str, text: str, *, why: str = "") -> None:
        self._rejections.warning("a message from %r was refused: %s", identity[:16], why or text)
        refused = messages.Refused(call=None, error=kind, text=text)
        self._client_router.send_unnumbered(identity, codec.encode(refused))

    def _client_disconnected(self, client: str) -> None:
        self._unregister_client(client)
        if client == _LAUNCHER:
            self._on_timer("orphan 0")
        else:
            self._apply_effects(self._state.client_disconnected(client, self._now()))

    def _unregister_client(self, client: str) -> None:
        if self._hosts is not None:
            self._hosts.values.client_left(client)
        self._client_processes.forget(client)
        self._receivers.pop(client, None)
        for identity in [identity for identity, owner in self._clients.items() if owner == client]:
            del self._clients[identity]
            self._client_router.remove_peer(identity)

    def _send(self, identity: bytes, message: Any) -> None:
        try:
            body = codec.encode_body(message)
        except TransferError as error:  # the receiver waits for a reply, so send the failure
            log.warning("%s", error)
            body = codec.encode_body(failure_report_for(message, error))
        self._client_router.send(identity, body)

    def _on_callback_error(self, error: BaseException) -> None:
        """Log an exception of a callback and report it in running cells, which may wait for the callback's result."""
        _, text = _describe_failure(error, "what it does by itself", self._folder)
        if type(error) in self._reported_failures:
            return
        self._reported_failures.add(type(error))
        notice = messages.Notice(f"{text}. It goes on; if this cell does not end, press Stop")
        for call in self._state.open_calls(self._now()):
            item = messages.RankDisplay(ranks=call.ranks, item=notice)
            self._apply_effects([effects.SendToClient(call.client, messages.CallOutput(call=call.call, items=(item,)))])

    # ---- hosts

    def host_reported(self, host: int, report: messages.HostReport) -> None:
        self._apply_effects(self._state.report_received(host, report, self._now()))

    def host_lost(self, host: int, reason: str) -> None:
        self._apply_effects(self._state.host_exited(host, reason, self._now()))

    def host_fell_silent(self, host: int, silent_s: float, lost_after_s: float) -> None:
        self._apply_effects(self._state.host_fell_silent(host, silent_s, lost_after_s, self._now()))

    def host_answered(self, host: int, silent_s: float) -> None:
        self._apply_effects(self._state.host_answered(host, silent_s, self._now()))

    def hosts_awaited(self, queue_state: str, progress: dict[int, HostProgress]) -> None:
        self._apply_effects(self._state.changes.hosts_awaited(queue_state, progress))

    def allocation_ends(self, at: float | None) -> None:
        self._apply_effects(self._state.changes.allocation.ends(at, (at or 0.0) - self._loop.clock.wall()))

    def _start_hosts(self, spec: messages.MeshSpec, hosts: tuple[int, ...]) -> None:
        if self._hosts is None:
            engine = ENGINES[spec.engine](spec)
            assert self._agent is not None
            if engine.runs_in_process(spec.num_hosts):
                ready = messages.HostReady(host=0, hostname=self._agent.hostname, pid=os.getpid())
                self.host_reported(0, ready)
                return
            self._agent.stop(0.0, lambda: None)
            self._agent.close()
            self._agent = None
            self._hosts = HostConnections(
                self._loop, self._context, self._folder, self._state.name, self._token, engine, self,
                self._store.listen, spec.lost_after_s, spec.lease_s,
            )  # fmt: skip
            self._state.machines.watch = self._hosts if engine.spans_machines else None
        self._hosts.start(hosts, torch=spec.torch)

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
                    elif self._hosts is not None:
                        self._hosts.send(hosts, message, body)
                case effects.StartHosts(spec=spec, hosts=hosts):
                    try:
                        self._start_hosts(spec, hosts)
                    except (MeshbookError, KeyError) as error:
                        self.host_reported(hosts[0], messages.HostFailed(host=hosts[0], reason=str(error)))
                case effects.SetTimer(name=name, delay_s=delay_s):
                    self._loop.call_later(delay_s, functools.partial(self._on_timer, name))
                case effects.CommitCheckpoint() | effects.RemoveCheckpoint():
                    self._committer.submit(effect)
                case effects.Shutdown(reason=reason):
                    self._shut_down(reason)

    def _record_ranks_started(self) -> None:
        """Record in the connection file that the mesh has ranks: `attach` without a name looks for that."""
        self.connection = msgspec.structs.replace(self.connection, has_ranks=True)
        self._loop.act(self._write_connection_file)
        self._loop.replicate()

    def _write_connection_file(self) -> None:
        try:
            keys.write_marker(self._folder)
            keys.write_connection_file(self._folder, self.connection)
        except (StartError, OSError) as error:
            log.warning("%s", error)
            self._loop.call_later(_WRITE_RETRY_S, self._write_connection_file, logged=False)

    def _on_timer(self, name: str) -> None:
        self._apply_effects(self._state.timer_fired(name, self._now()))

    def _shut_down(self, reason: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._loop.stop_replicating()
        self._state.begin_shutdown()
        log.info("ending: %s", reason)
        if self._agent is not None:
            self._agent.stop(_STOP_GRACE_S, lambda: self._finish_shutdown(reason))
        elif self._hosts is not None:
            self._hosts.stop(_STOP_GRACE_S, lambda: self._finish_shutdown(reason))
        else:
            self._finish_shutdown(reason)

    def _finish_shutdown(self, reason: str) -> None:
        """Clean up after the exit of all ranks. MeshStopped is sent last, so that clients can rely on it."""
        self._committer.close()
        if self._agent is not None:
            self._agent.close()
        keys.remove_folder(self._folder)
        for identity in self._receivers.values():
            self._send(identity, messages.MeshStopped(reason=reason))
        self._loop.stop()

    def _now(self) -> float:
        return self._loop.clock.monotonic() - self._started_at


def _describe_failure(error: BaseException, what: str, folder: Path) -> tuple[str, str]:
    """Log an error of the supervisor, unless it is for want of descriptors; return its class and text for clients."""
    if is_shortage(error):
        return "MeshbookError", f"the mesh's supervisor cannot do {what} now: {describe_shortage()}"
    log.error("%s failed", what, exc_info=error)
    return "ProtocolError", (
        f"the mesh's supervisor failed at {what} ({type(error).__name__}: {error}); this is a defect of Meshbook, "
        f"whose traceback is in {folder / 'supervisor.log'}"
    )


def _bind_client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    folder: Path,
    name: str,
    token: str,
    curve_keys: tuple[bytes, bytes] | None,
    *,
    address: str | None,
    owner: str | None,
    now: float,
) -> tuple[zmq.Socket[bytes], keys.ConnectionInfo]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
    server_key = None
    if curve_keys is not None:
        keys.listen_encrypted(socket, curve_keys)
        server_key = curve_keys[0].decode()
    try:
        socket.bind(address or f"ipc://{folder}/control.sock")
    except zmq.ZMQError as error:
        raise StartError(
            f"the address {address or folder} cannot be listened on: {error.strerror}; "
            "choose another with --listen tcp://127.0.0.1:0"
        ) from error
    connection = keys.ConnectionInfo(
        name=name,
        address=socket.getsockopt_string(zmq.LAST_ENDPOINT),
        token=token,
        process=processes.identify(os.getpid()),
        started_at=now,
        protocol=codec.PROTOCOL.decode(),
        owner=owner,
        server_key=server_key,
    )
    return socket, connection
