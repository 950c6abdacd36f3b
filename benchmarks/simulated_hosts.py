"""Hosts whose ranks are no processes: one process speaks for all hosts, so that a mesh of a thousand ranks fits here.

To the supervisor they are machines that ssh reaches. What it hears of them is what a `HostLedger` makes of what ranks
say, over a connection for each host, with a beat of each host in every second: messages, folding and links are the
product's own. Only the ranks are made up: they do nothing, and say so at once. So what the supervisor does is what it
does with real hosts; how long a cell takes is not. What reaches all hosts together is answered by all together, as
machines do that work at the same time.

    python -m benchmarks.simulated_hosts supervisor FOLDER NAME READY_FD LAUNCHER_PID
    python -m benchmarks.simulated_hosts hosts SOCKET
"""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
import sys
from collections import deque
from typing import Any

import msgspec
import zmq

from benchmarks import workbench
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import make_spec, open_session, start_ranks
from meshbook.engines import ENGINES
from meshbook.engines.base import HostStart
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.engines.local import LocalEngine
from meshbook.host import instructions as do
from meshbook.host.facts import gather_facts
from meshbook.host.ledger import HostLedger
from meshbook.host.rank_record import HEARTBEAT_S
from meshbook.host.rlimits import raise_fd_limit
from meshbook.mesh_axes import MeshAxes
from meshbook.supervisor.daemon import serve
from meshbook.wire import codec, keys, messages
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.loop import Loop
from meshbook.wire.messages import Health, MachineFacts, MeshSpec, Outcome, RankMetrics, RankPosition
from meshbook.wire.remote_start import HOSTS_SOCKET

_SLEEPS = re.compile(r"time\.sleep\((.+)\)")
_RSS_BYTES = 300 << 20
_SOME_KIB = 64  # by which a rank's memory differs from beat to beat


def create_simulated_mesh(name: str, hosts: int, ranks_per_host: int) -> Mesh:
    """Start a supervisor, and a mesh of simulated hosts. Ends with this process. Blocks."""
    folder = keys.claim_folder(name)
    read_fd, write_fd = os.pipe()
    arguments = ["supervisor", str(folder), name, str(write_fd), str(os.getpid())]
    with open(folder / "supervisor.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.simulated_hosts", *arguments],
            pass_fds=(write_fd,), cwd=workbench.ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    os.close(write_fd)
    with open(read_fd) as status:
        said = status.read()
    connection = keys.read_connection_file(folder)
    if said != "ready" or connection is None:
        raise RuntimeError(f"the supervisor did not start: {said or (folder / 'supervisor.log').read_text()}")
    session = open_session(connection, kind="script", orphan_ttl_s=workbench.ORPHAN_TTL_S)
    grid = MeshAxes.of(hosts * ranks_per_host)
    machines = ",".join(f"n{host}" for host in range(hosts))
    start_ranks(session, grid, make_spec(grid, engine="ssh", on=f"ssh://{machines}", num_hosts=hosts, device="cpu"))
    assert session.axes is not None
    return Mesh.of(session, session.axes)


class SimulatedEngine(LocalEngine):
    """Has the one process that stands for all hosts introduce each that is launched."""

    name = "ssh"
    spans_machines = True

    def __init__(self, spec: MeshSpec) -> None:
        super().__init__(spec)
        self._process: LauncherProcess | None = None

    def runs_in_process(self, num_hosts: int) -> bool:
        return False

    def launch(self, host: int, start: HostStart) -> None:
        if self._process is None:
            command = [
                sys.executable,
                "-m",
                "benchmarks.simulated_hosts",
                "hosts",
                f"ipc://{start.folder}/{HOSTS_SOCKET}",
            ]
            self._process = self._hosts[0] = LauncherProcess(command, cwd=workbench.ROOT, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {start.identity} {start.token}\n".encode())


class Outbox:
    """What hosts have to say, until all that has arrived is read."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._unsent: list[tuple[LinkedDealer, bytes]] = []

    def put(self, supervisor: LinkedDealer, body: bytes) -> None:
        if not self._unsent:
            self._loop.call_later(0.0, self._send)
        self._unsent.append((supervisor, body))

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for supervisor, body in unsent:
            supervisor.send(body)


# All hosts are sent the same bytes, and pass them on to each rank.
_command_of = functools.lru_cache(maxsize=8)(codec.host_commands.decode_body)


class SimulatedHost:
    """One host, on the loop that it shares with the others."""

    def __init__(
        self, loop: Loop, outbox: Outbox, supervisor: LinkedDealer, host: int, token: str, facts: MachineFacts
    ) -> None:
        self._loop, self._outbox, self._supervisor = loop, outbox, supervisor
        self._host, self._hostname = host, f"n{host}"
        self._ledger, self._todo = HostLedger(), deque[do.Instruction]()
        self._random = random.Random(host)
        loop.watch_socket(supervisor.socket, self._hear)
        facts = msgspec.structs.replace(facts, machine=f"machine {host}", hostname=self._hostname)
        ready = messages.HostReady(host=host, hostname=self._hostname, pid=host, token=token, facts=facts)
        self._supervisor.introduce(codec.encode_body(ready))
        loop.call_later(self._random.random() * HEARTBEAT_S, self._beat)  # as hosts do that started one by one

    def _hear(self, frames: list[bytes]) -> None:
        if (body := self._supervisor.accept(frames)) is None:
            return
        command, now = _command_of(body), self._loop.clock.monotonic()
        match command:
            case messages.Exit():
                self._loop.stop()
            case messages.KeepAlive(sent_at=sent_at):
                self._report(messages.HostAlive(sent_at))
            case messages.StartRanks():
                self._start(command, now)
            case messages.QueryPositions():
                self._carry_out(self._ledger.query(command, body, now))
                for record in self._ledger.living(command.ranks):
                    position = RankPosition(
                        record.rank, status="ok", cause="", is_held_or_idle=True, is_idle=True,
                        has_other_collective_threads=False, num_groups_created=0, groups=(),
                    )  # fmt: skip
                    content = msgspec.to_builtins(position)
                    self._carry_out(
                        self._ledger.rank_replied(messages.RankReply(record.rank, command.call, content), now)
                    )
            case messages.RunCell() | messages.FormGroups():
                self._carry_out(self._ledger.enqueue(command, body, now))

    def _start(self, command: messages.StartRanks, now: float) -> None:
        for rank in self._ledger.start(command):
            self._carry_out(self._ledger.ranks[rank].started(pid=100_000 + rank))
            for work in (True, False):
                self._carry_out(self._ledger.socket_ready(rank, work=work, device="cpu", now=now))

    def _carry_out(self, todo: do.Instructions) -> None:
        self._todo += todo
        while self._todo:
            match self._todo.popleft():
                case do.SendReport(report):
                    self._report(report)
                case do.SendHeartbeat():
                    self._report_heartbeat()
                case do.SendWork(rank, body):
                    self._run(rank, _command_of(body))
                case do.SetAlarm(after_s, action):
                    self._loop.call_later(
                        after_s, lambda action=action: self._carry_out(action(self._loop.clock.monotonic()))  # type: ignore[misc]
                    )  # fmt: skip

    def _run(self, rank: int, command: Any) -> None:
        """Be the rank: it does nothing, and well, and sleeps before it if the cell says so."""
        reply = {"backend": "gloo"} if isinstance(command, messages.FormGroups) else None
        finished = messages.RankFinished(rank, command.call, Outcome(status="ok", reply=reply), seconds=0.0)
        if isinstance(command, messages.RunCell) and (sleeps := _SLEEPS.fullmatch(command.source)):
            self._carry_out([do.SetAlarm(float(sleeps[1]), lambda now: self._ledger.rank_finished(finished, now))])
        else:
            self._carry_out(self._ledger.rank_finished(finished, self._loop.clock.monotonic()))

    def _beat(self) -> None:
        self._loop.call_later(HEARTBEAT_S, self._beat)
        if self._ledger.ranks:
            self._report_heartbeat()
            self._carry_out(self._ledger.calls.report_progress(self._loop.clock.monotonic()))

    def _report_heartbeat(self) -> None:
        """Report what ranks say who do nothing: a few numbers of each have changed a little."""
        now = self._loop.clock.monotonic()
        metrics = []
        for record in self._ledger.living():
            rss_bytes = _RSS_BYTES + (self._random.randrange(_SOME_KIB) << 10)
            call = None if record.running is None else record.running.call
            health = Health(
                cpu_percent=round(self._random.random(), 1), gil_lag_s=round(self._random.random() / 1e3, 4)
            )
            measured = RankMetrics(record.rank, age_s=self._random.random(), health=health)
            beat = messages.RankHeartbeat(record.rank, call, None, rss_bytes, _RSS_BYTES, metrics=measured)  # type: ignore[arg-type]
            self._carry_out(self._ledger.heartbeat_received(beat, now))
            metrics.append(measured)
        infos = self._ledger.rank_infos(self._hostname, now)
        self._report(messages.HostHeartbeat(self._host, infos, tuple(metrics)))

    def _report(self, report: Any) -> None:
        self._outbox.put(self._supervisor, codec.encode_body(report))


def run_hosts(address: str) -> None:
    """Be all hosts that standard input names, until one is told to end, or nobody holds the input any more."""
    raise_fd_limit()
    loop, context = Loop(), zmq.Context[zmq.Socket[bytes]]()
    context.set(zmq.MAX_SOCKETS, 4096)
    outbox, facts, unread = Outbox(loop), gather_facts(), b""

    def launched() -> None:
        nonlocal unread
        data = os.read(0, 1 << 16)
        if not data:
            loop.stop()
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            host, identity, token = line.decode().split()
            supervisor = LinkedDealer(context, address, identity.encode())
            SimulatedHost(loop, outbox, supervisor, int(host), token, facts)

    loop.watch_fd(0, launched)
    loop.run()
    os._exit(0)


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "hosts":
        run_hosts(*arguments)
    else:
        os.setsid()
        ENGINES["ssh"] = SimulatedEngine
        serve([*arguments, "--cold"])


if __name__ == "__main__":
    main()
