"""The supervisor's state of one mesh: its ranks, clients and open calls.

Inputs: `command_received`, `client_disconnected`, `report_received`, `host_exited`, `timer_fired`. Output: the effects
that they return. No sockets, threads, clocks or torch: time is passed in as seconds since the supervisor started, so a
test can run a year of failures in a millisecond, and a saved list of events replays to the same state.

`MeshState` routes each event to the part of the state that it concerns: `rank_table`, `clients`, `startup`,
`call_table` (what hosts report of open calls), `scheduler` (when calls are sent, and what follows their end),
`group_state`, `history`, `past_cells`, `exit_checks`, `log_searches`, `actor_relay`, `monitoring`, `checkpoints`,
`rank_changes` (`healing`, `resizing`, `preemption`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.ids import format_ranks, name_ranks
from meshbook.supervisor.actor_relay import ActorRelay
from meshbook.supervisor.call_table import CallTable
from meshbook.supervisor.checkpoints import CheckpointSaves
from meshbook.supervisor.clients import Client, Clients
from meshbook.supervisor.effects import Effect, SendToClient, Shutdown
from meshbook.supervisor.exit_checks import ExitChecks
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.input_requests import InputRequests
from meshbook.supervisor.log_searches import LogSearches
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.past_cells import PastCells
from meshbook.supervisor.rank_changes import RankChanges
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.supervisor.silent_hosts import SilentHosts
from meshbook.supervisor.stalls import STALL_S
from meshbook.supervisor.startup import MeshStartup
from meshbook.supervisor.waiting_cells import WaitingCells
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo


class MeshState:
    """The state machine of one mesh. The driver passes events in and applies the returned effects.

    Attributes:
        saves: checkpoints that are being saved; the driver reports the ends of commits to it.
        machines: those of the hosts.
        changes: heals, resizes, and what follows a SIGTERM.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        started_at: float,
        *,
        facts: Callable[[], messages.MachineFacts],
        stall_s: float = STALL_S,
        store_address: str = "",
    ) -> None:
        """Create the state of a mesh.

        Args:
            facts: returns those of this machine.
            store_address: address of the store by which ranks rendezvous.
        """
        self.name, self.pid, self._started_at = name, pid, started_at
        self._clients = Clients()
        self._ranks = RankTable()
        self._groups = GroupState(store_address)
        self._cells = CellRecord()
        self._monitoring = Monitoring(self, self._ranks, stall_s)
        self._calls = CallTable(self._ranks, self._monitoring)
        self._past_cells = PastCells(self._clients, self._calls, self._cells, self.wall_time)
        self._scheduler = CallScheduler(
            self._ranks, self._calls, self._groups, self._cells, self._monitoring, self._mesh_changed
        )
        self._waiting_cells = WaitingCells(self._calls, self._clients, self.wall_time)
        self.machines = MachineTable(self._ranks, facts)
        self._silent_hosts = SilentHosts(self._ranks, self._calls, self.machines)
        self._startup = MeshStartup(self._ranks, self._groups, self._scheduler, self.machines, self.info)
        self.saves = CheckpointSaves(self._ranks, self._groups, lambda: self._startup.spec, self.wall_time)
        self._input_requests = InputRequests(self._ranks, self._calls, self._clients, self._start_call)
        self._scheduler.end_listeners += (self.saves.call_ended, self._input_requests.call_ended)
        self.changes = RankChanges(
            self._ranks, self._groups, self._calls, self._scheduler, self._cells, self._startup, self.saves,
            self._monitoring, self.machines, self.info, pid=pid, mesh_id=f"{pid}-{started_at:.0f}",
        )  # fmt: skip
        self._logs = LogSearches(self._ranks, self.machines)
        self._actors = ActorRelay(self._ranks)
        self._command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.StartMesh: self._start_mesh,
            messages.Interrupt: self._interrupt,
            **self._input_requests.command_handlers,
            messages.Release: self._release,
            messages.KillRanks: self._kill_ranks,
            messages.QueryStatus: lambda client, command, _, now: self._reply(
                client, command, info=self.info(), open_calls=self._calls.running_user_code(now)
            ),
            messages.QueryHosts: lambda client, command, *_: self._reply(client, command, hosts=self.machines.infos()),
            **self._logs.command_handlers,
            **self._actors.command_handlers,
            **self._past_cells.command_handlers,
            **self.changes.command_handlers,
            messages.StopMesh: self._stop_mesh,
            messages.Detach: self._detach,
            messages.SetOrphanTtl: self._set_orphan_ttl,
            messages.Ping: lambda client, *_: [SendToClient(client.id, messages.Pong())],
            messages.TakeSnapshots: self._take_snapshots,
            messages.Subscribe: lambda client, command, _, now: self._monitoring.subscribe(client.id, command, now),
        }
        self._report_handlers: dict[type, Callable[[int, Any, float], list[Effect]]] = {
            messages.HostReady: self.changes.host_ready,
            messages.HostFailed: self.changes.host_failed,
            messages.FilesSynced: self.changes.files_synced,
            messages.HostHeartbeat: self._host_heartbeat,
            messages.RankExited: lambda host, report, now: self._ranks_exited((report,), now),
            messages.CallOutput: self._calls.output_received,
            messages.CallProgressed: lambda host, report, now: self._scheduler.progressed(report, now),
            messages.RanksStuck: lambda host, report, now: self._calls.ranks_stuck(report),
            messages.CallFinished: lambda host, report, now: [
                *self._scheduler.part_received(host, report, now),
                *self.changes.advance(now),
            ],
            messages.InputRequest: self._input_requests.requested,
            **ExitChecks(self._ranks, self._calls).report_handlers,
            **self._actors.report_handlers,
            messages.CommandReply: lambda host, report, now: self._logs.replied(report),
            messages.LogsFound: lambda host, report, now: self._logs.found(host, report),
            messages.SegmentsReleased: lambda host, report, now: [SendToClient(None, report)],
            messages.SnapshotReply: self._monitoring.snapshots_received,
            messages.CheckpointWritten: self.saves.written,
            messages.TerminationRequested: lambda _, report, now: self.changes.preemption.requested(report.ranks, now),
        }

    # ---- inputs

    def client_joined(self, hello: messages.Hello, now: float) -> list[Effect]:
        self._clients.join(hello)
        return [SendToClient(hello.client, messages.Welcome(info=self.info(), open_calls=self.open_calls(now)))]

    def command_received(
        self, client_id: str, command: messages.ClientCommand, body: bytes, now: float
    ) -> list[Effect]:
        client = self._clients.get(client_id)
        if client is None:
            return []
        effects = self._command_handlers.get(type(command), self._start_call)(client, command, body, now)
        return self._past_cells.handled(client, command, effects, now)

    def client_disconnected(self, client_id: str, now: float) -> list[Effect]:
        """Handle a client that exited or detached. Its calls on the ranks continue."""
        client, orphaned = self._clients.leave(client_id, is_empty=self._startup.spec is None)
        if client is None:
            return []
        self._past_cells.client_left(client_id, now)
        self._monitoring.client_disconnected(client_id)
        effects = [*self._input_requests.client_left(client_id), *self._logs.client_left(client_id)]
        effects += self._actors.client_left(client_id)
        living = self._ranks.living
        if client.has_called and living:
            effects.append(self._ranks.send(living, messages.Release(ranks=living, client=client_id)))
        return effects + orphaned

    def report_received(self, host: int, report: messages.HostReport, now: float) -> list[Effect]:
        handler = self._report_handlers.get(type(report))
        return self._past_cells.keep(handler(host, report, now), now) if handler is not None else []

    def host_exited(self, host: int, reason: str, now: float) -> list[Effect]:
        """Handle the loss of a host and all its ranks. `reason` follows "the host": "was killed by signal 9"."""
        if self._startup.is_pending:
            return self._startup.host_exited(host, reason)
        cause = self.machines.lose(host, reason)
        exits = self._ranks.exits_on_host(host, cause, self.machines.heals_when(host))
        effects = self._ranks_exited(exits, now)
        effects += [*self._calls.host_lost(host, reason, now), *self._monitoring.host_lost(host, now)]
        effects += [*self._logs.host_lost(host), *self.changes.host_lost(host, reason)]
        return self._past_cells.keep(effects, now)

    def host_fell_silent(self, host: int, silent_s: float, lost_after_s: float, now: float) -> list[Effect]:
        return self._past_cells.keep(self._silent_hosts.fell_silent(host, silent_s, lost_after_s), now)

    def host_answered(self, host: int, silent_s: float, now: float) -> list[Effect]:
        return self._past_cells.keep(self._silent_hosts.answered(host, silent_s), now)

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        kind, _, argument = name.partition(" ")
        match kind:
            case "orphan":
                effects: list[Effect] = [Shutdown("no client was left")] if self._clients.is_orphaned(argument) else []
            case "left":
                effects = self._scheduler.query_left(argument, now)
            case "release":
                effects = [*self._silent_hosts.stop_unanswered(argument), *self._scheduler.stop_is_over(argument, now)]
            case "waiting":
                effects = self._waiting_cells.timer_fired(argument)
            case "seeing":
                effects = self._monitoring.timer_fired(argument, now)
            case "hosts" | "preemption" | "allocation":
                effects = self.changes.timer_fired(kind, argument, now)
            case _:
                effects = [*self._calls.timer_fired(kind, argument, now), *self.changes.advance(now)]
        return self._past_cells.keep(effects, now)

    def begin_shutdown(self) -> None:
        """Begin the mesh's shutdown: from here on, lost ranks are expected and not reported as failures."""
        self._calls.is_stopping = self.changes.preemption.is_over = True

    # ---- queries

    def info(self) -> MeshInfo:
        return MeshInfo(
            name=self.name,
            spec=self._startup.spec,
            ranks=self._calls.rank_infos(),
            supervisor_pid=self.pid,
            started_at=self._started_at,
            groups=self._groups.status,
            group_generation=self._groups.generation,
            clients=self._clients.descriptions(),
            names=self._cells.names,
            backend=self._groups.backend,
            cells_run=self._cells.num_cells,
            num_rank_changes=len(self._ranks.changes),
            spares=self.changes.spares.infos,
            ends_at=self.changes.allocation.ends_at,
        )

    def open_calls(self, now: float) -> tuple[messages.OpenCall, ...]:
        """Return the running cells, oldest first."""
        return self._calls.running_cells(now)

    def ranks_awaiting_input(self) -> tuple[int, ...]:
        """Return the ranks that wait for a reply to input()."""
        return self._calls.ranks_awaiting_input()

    def wall_time(self, now: float) -> float:
        """Return the wall-clock time at `now`."""
        return self._started_at + now

    # ---- client commands

    def _start_mesh(self, client: Client, command: messages.StartMesh, body: bytes, now: float) -> list[Effect]:
        if self._startup.spec is not None:
            text = (
                f"the mesh {self.name!r} has its {len(self._ranks)} ranks already; stop it first, or start another one "
                "under another name"
            )
            return self._refuse(client, command.call, "MeshInUse", text)
        return self._startup.begin(client.id, command, now)

    def _start_call(self, client: Client, command: Any, body: bytes, now: float) -> list[Effect]:
        if not self._startup.is_done:
            text = f"the mesh {self.name!r} has no ranks yet; wait for it to start"
            return self._refuse(client, command.call, "NotAttached", text)
        if refused := self.changes.refuse_call(client.id, command) or self._refuse_unknown_ranks(client, command):
            return refused
        if command.call in self._calls:
            return self._refuse(client, command.call, "ProtocolError", f"the call {command.call} is open already")
        if isinstance(command, messages.RunCell) and not command.silent:
            self._past_cells.began(command, client.id)
        if isinstance(command, messages.SaveCheckpoint) and (problem := self.saves.began(command)):
            return self._refuse(client, command.call, "MeshShapeError", problem)
        started = self._scheduler.start(client, command, body, now, self.wall_time(now))
        return [*started, *self._waiting_cells.began(command.call)]

    def _take_snapshots(self, client: Client, command: messages.TakeSnapshots, body: bytes, now: float) -> list[Effect]:
        if self._startup.spec is None:
            return self._refuse(client, command.call, "NotAttached", f"the mesh {self.name!r} has no ranks yet")
        return self._refuse_unknown_ranks(client, command) or self._monitoring.take_snapshots(client.id, command, now)

    def _interrupt(self, client: Client, command: messages.Interrupt, body: bytes, now: float) -> list[Effect]:
        command = self.changes.healing.aim_stop(command)
        return self.saves.stopped(command.target) or self._scheduler.interrupt(client.id, command, now)

    def _release(self, client: Client, command: messages.Release, body: bytes, now: float) -> list[Effect]:
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        return [self._ranks.send(ranks, command, body)] if ranks else []

    def _kill_ranks(self, client: Client, command: messages.KillRanks, body: bytes, now: float) -> list[Effect]:
        unknown = [rank for rank in command.ranks if rank not in self._ranks]
        if unknown:
            text = f"{name_ranks(unknown)}: this mesh has ranks {format_ranks(self._ranks.all)}"
            return self._refuse(client, command.call, "MeshShapeError", text)
        return [self._ranks.send(command.ranks, command, body), *self._reply(client, command)]

    def _stop_mesh(self, client: Client, command: messages.StopMesh, body: bytes, now: float) -> list[Effect]:
        if self.changes.preemption.takes_stop():
            return self._reply(client, command)
        self.begin_shutdown()
        return [*self._reply(client, command), Shutdown(f"stopped by {'' if client.is_agent else 'a '}{client.kind}")]

    def _detach(self, client: Client, command: messages.Detach, body: bytes, now: float) -> list[Effect]:
        client.orphan_ttl_s = float("inf") if command.orphan_ttl_s is None else command.orphan_ttl_s
        return [*self._reply(client, command), *self.client_disconnected(client.id, now)]

    def _set_orphan_ttl(self, client: Client, command: messages.SetOrphanTtl, body: bytes, now: float) -> list[Effect]:
        client.orphan_ttl_s = command.orphan_ttl_s
        return []

    def _reply(self, client: Client, command: Any, **content: Any) -> list[Effect]:
        return [SendToClient(client.id, messages.CommandReply(call=command.call, **content))]

    def _refuse(self, client: Client, call: Any, error: str, text: str) -> list[Effect]:
        return [SendToClient(client.id, messages.Refused(call=call, error=error, text=text))]

    def _refuse_unknown_ranks(self, client: Client, command: Any) -> list[Effect]:
        """Refuse a command that names no ranks, or ranks that are not in this mesh."""
        unknown = [] if command.ranks == self._ranks.all else [one for one in command.ranks if one not in self._ranks]
        if not unknown and command.ranks:
            return []
        problem = f"{name_ranks(unknown)} {'is' if len(unknown) == 1 else 'are'} not" if unknown else "no rank is"
        text = f"{problem} in this mesh of {len(self._ranks)} ranks (0-{len(self._ranks) - 1})"
        return self._refuse(client, command.call, "MeshShapeError", text)

    # ---- reports of hosts

    def _host_heartbeat(self, host: int, report: messages.HostHeartbeat, now: float) -> list[Effect]:
        report = self._ranks.without_former(report)
        starting = self.changes.host_heartbeat(host, report, now)
        return [*starting, *self._monitoring.host_heartbeat(report, now)]

    def _ranks_exited(self, reports: tuple[messages.RankExited, ...], now: float) -> list[Effect]:
        """Handle exits of the same moment: a client that hears of one hears of all."""
        if self._calls.is_stopping:
            return []
        ended = self._actors.ranks_exited(reports)
        exits = [report for report in reports if self._ranks.rank_exited(report)]
        if not exits:
            return ended
        if self._startup.is_pending:
            return self._startup.rank_exited(exits[0])
        self._groups.rank_lost()
        effects: list[Effect] = [self._mesh_changed(*exits), *ended]
        for report in exits:
            saves = self.saves.rank_lost(report)
            effects += [*self._scheduler.rank_lost(report), *saves]
        return [*effects, *self._scheduler.end_unsent(now), *self.changes.advance(now)]

    def _mesh_changed(self, *exited: messages.RankExited) -> SendToClient:
        return SendToClient(None, messages.MeshChanged(info=self.info(), exited=exited))
