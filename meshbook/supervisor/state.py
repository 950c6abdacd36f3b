"""The supervisor's state of one mesh: its ranks, clients and open calls.

Inputs: `command_received`, `client_disconnected`, `report_received`, `host_exited`, `timer_fired`. Output: the effects
that they return. No sockets, threads, clocks or torch: time is passed in as seconds since the supervisor started, so a
test can run a year of failures in a millisecond, and a saved list of events replays to the same state.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from meshbook.fold.lines import FoldMerger, OutputBudget
from meshbook.fold.outcomes import merge_parts
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.supervisor.desync import collect_positions, find_desynced_groups, has_left
from meshbook.supervisor.effects import Effect as Effect
from meshbook.supervisor.effects import SendToClient as SendToClient
from meshbook.supervisor.effects import SendToHosts as SendToHosts
from meshbook.supervisor.effects import SetTimer as SetTimer
from meshbook.supervisor.effects import Shutdown as Shutdown
from meshbook.supervisor.effects import StartHosts as StartHosts
from meshbook.supervisor.history import History
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.stalls import STALL_S
from meshbook.wire import messages
from meshbook.wire.messages import HistoryEntry, MeshInfo, MeshSpec, Outcome, OutcomeGroup, RankInfo
from meshbook.wire.stop_timing import ABANDON_AFTER_S, HOLD_COMMANDS_S

# Seconds a mesh lives on without clients, unless the last one requested otherwise: long enough to restart a crashed
# kernel or to reopen the notebook after lunch, short enough that forgotten GPUs are free the same afternoon.
ORPHAN_TTL_S = 1800.0
# Seconds until a call has certainly reached its ranks' host; later host reports take the call into account.
_DELIVERY_S = 0.5
# Seconds that hosts have to report the outcomes of a lost rank's survivors.
_END_CALL_TIMEOUT_S = 0.5
# Seconds until ranks that have finished a call, but may still take part in its collectives, are queried again.
_RECHECK_LEFT_S = 1.0
_FLUSH_INTERVAL_S = 0.05
_MAX_FLUSH_CHARS = 32 << 10  # characters that one flush may output; see host.agent
_MAX_SETUP_CELLS = 1000
_MAX_NAMES = 10_000  # that are reported to clients


# ---------------------------------------------------------------------------------------------------------------------
# State


@dataclass
class Client:
    id: str
    kind: str
    pid: int
    observer: bool
    orphan_ttl_s: float
    has_called: bool = False  # then ranks may hold values for it


@dataclass
class ActiveCall:
    """A command that ranks work on."""

    id: str
    client: str
    label: str
    ranks: Ranks
    waiting_hosts: set[int]  # hosts that have not finished
    opened_at: float
    is_main_thread: bool
    budget: OutputBudget
    merger: FoldMerger | None  # None: the mesh has one host, so there is nothing to merge
    outcomes: list[tuple[OutcomeGroup, ...]] = field(default_factory=list)
    seconds: float = 0.0
    rank_seconds: dict[int, float] = field(default_factory=dict)
    lost: list[messages.RankExited] = field(default_factory=list)
    history_entry: HistoryEntry | None = None
    flush_at: float | None = None  # when a timer flushes pending output
    awaiting_input: set[int] = field(default_factory=set)  # ranks that wait for input()
    stop_deadline: float = 0.0  # after a Stop: when commands no longer wait for its ranks to return
    stopping_ranks: set[int] = field(default_factory=set)  # ranks that were told to stop it
    deferred: SendToHosts | None = None  # not sent yet
    about_call: str = ""  # for a query of the supervisor's own: the call that it is about
    done_ranks: set[int] = field(default_factory=set)  # ranks whose part is known to have ended
    left_ranks: set[int] = field(default_factory=set)  # ... and that the others know to have left
    is_querying_left: bool = False  # ranks are being queried whether they have left
    is_holding: bool = False  # ranks hold back the collectives that follow it
    is_stopped: bool = False  # all ranks that still ran it were told to stop
    failure: str = ""  # of process groups: the first rank that could not form them, and why


class MeshState:
    """The state machine of one mesh. The driver passes events in and applies the returned effects."""

    def __init__(
        self, name: str, pid: int, started_at: float, *, stall_s: float = STALL_S, store_address: str = ""
    ) -> None:
        """Create the state of a mesh.

        Args:
            store_address: address of the store by which ranks rendezvous.
        """
        self.name, self._pid, self._started_at, self._store_address = name, pid, started_at, store_address
        self._clients: dict[str, Client] = {}
        self._spec: MeshSpec | None = None
        self._pending_start: tuple[str, str, float] | None = None  # call, client, since: a mesh that is starting
        self._host_of: dict[int, int] = {}
        self._hosts_ready: set[int] = set()
        self._ranks: dict[int, RankInfo] = {}
        self._reported_at: dict[int, float] = {}  # when their hosts last reported them
        self._exited: dict[int, messages.RankExited] = {}
        self._groups = "none"
        self._forming_failed = False  # the last attempt failed; retried by the next call that uses them
        self._num_queries = 0
        self._backend: str | None = None
        self._generation = 0
        self._calls: dict[str, ActiveCall] = {}
        self._names: OrderedDict[str, None] = OrderedDict()
        self._history = History()
        self._setup_cells: deque[messages.RunCell] = deque(maxlen=_MAX_SETUP_CELLS)
        self._forwarded_queries: dict[str, str] = {}  # call -> client, for commands that hosts reply to directly
        self._late_budget = OutputBudget()  # for output printed while no call is open
        self._late_call: str | None = None  # the call whose output waits there for a timer
        self._num_orphanings = 0  # how often the last client left; identifies outdated orphan timers
        self._num_cells = 0
        self._stopping = False
        self._monitoring = Monitoring(self, stall_s)
        self._command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.StartMesh: self._start_mesh,
            messages.Interrupt: self._interrupt,
            messages.InputReply: self._reply_input,
            messages.Release: self._forward,
            messages.KillRanks: self._kill_ranks,
            messages.QueryStatus: self._query_status,
            messages.QueryLogs: self._query_logs,
            messages.QueryHistory: self._query_history,
            messages.StopMesh: self._stop_mesh,
            messages.Detach: self._detach,
            messages.SetOrphanTtl: self._set_orphan_ttl,
            messages.Ping: lambda client, command, body, now: [SendToClient(client.id, messages.Pong())],
            messages.TakeSnapshots: self._take_snapshots,
            messages.Subscribe: lambda client, command, body, now: self._monitoring.subscribe(client.id, command, now),
        }
        self._report_handlers: dict[type, Callable[[int, Any, float], list[Effect]]] = {
            messages.HostReady: self._host_ready,
            messages.HostFailed: self._host_failed,
            messages.HostHeartbeat: self._host_heartbeat,
            messages.RankExited: self._rank_exited,
            messages.CallOutput: self._call_output,
            messages.CallProgressed: self._call_progressed,
            messages.RanksStuck: self._ranks_stuck,
            messages.CallFinished: self._call_finished,
            messages.InputRequest: self._input_requested,
            messages.CommandReply: self._host_replied,
            messages.SegmentsReleased: lambda host, report, now: [SendToClient(None, report)],
            messages.SnapshotReply: self._monitoring.snapshots_received,
        }

    # ---- inputs

    def client_joined(self, hello: messages.Hello, now: float) -> list[Effect]:
        ttl = ORPHAN_TTL_S if hello.orphan_ttl_s is None else hello.orphan_ttl_s
        self._clients[hello.client] = Client(hello.client, hello.kind, hello.pid, hello.observer, ttl)
        if not hello.observer:
            self._num_orphanings += 1  # invalidates pending orphan timers
        return [SendToClient(hello.client, messages.Welcome(info=self.info(), open_calls=self.open_calls(now)))]

    def command_received(
        self, client_id: str, command: messages.ClientCommand, body: bytes, now: float
    ) -> list[Effect]:
        client = self._clients.get(client_id)
        if client is None:
            return []
        handler = self._command_handlers.get(type(command))
        if handler is not None:
            return handler(client, command, body, now)
        return self._start_call(client, command, body, now)

    def client_disconnected(self, client_id: str) -> list[Effect]:
        """Handle a client that exited or detached. Its calls on the ranks continue."""
        client = self._clients.pop(client_id, None)
        if client is None:
            return []
        self._monitoring.client_disconnected(client_id)
        effects: list[Effect] = []
        for call in self._calls.values():
            if call.client == client_id:
                for rank in sorted(call.awaiting_input):
                    reply = messages.InputReply(target=call.id, rank=rank, text=None)  # type: ignore[arg-type]
                    effects.append(SendToHosts(self._hosts_of((rank,)), reply))
                call.awaiting_input.clear()
        living = tuple(rank for rank in sorted(self._ranks) if rank not in self._exited)
        if client.has_called and living:
            effects.append(SendToHosts(self._hosts_of(living), messages.Release(ranks=living, client=client_id)))
        if not client.observer and all(other.observer for other in self._clients.values()):
            self._num_orphanings += 1
            effects.append(SetTimer(f"orphan {self._num_orphanings}", client.orphan_ttl_s))
        return effects

    def report_received(self, host: int, report: messages.HostReport, now: float) -> list[Effect]:
        handler = self._report_handlers.get(type(report))
        return handler(host, report, now) if handler is not None else []

    def host_exited(self, host: int, reason: str, now: float) -> list[Effect]:
        """Handle the loss of a host and all its ranks."""
        if self._pending_start is not None:
            return self._fail_start(f"host {host} {reason} while the mesh was coming up; see supervisor.log")
        effects: list[Effect] = []
        for rank in [
            rank for rank, host_of_rank in self._host_of.items() if host_of_rank == host and rank not in self._exited
        ]:
            info = self._ranks[rank]
            exited = messages.RankExited(
                rank=rank,
                pid=info.pid or 0,
                exit_code=None,
                signal=None,
                host=info.host,
                last_lines=(),
                last_collective=None,
                cause=f"ended with its host, which {reason}",
            )
            effects += self._rank_exited(host, exited, now)
        for call in [call for call in self._calls.values() if host in call.waiting_hosts]:
            lost = tuple(rank for rank in call.ranks if self._host_of[rank] == host)
            error = messages.RankError(ename="RankLost", evalue=f"{name_ranks(lost)}: the host {reason}", traceback=())
            part = OutcomeGroup(lost, Outcome(status="lost", error=error))
            effects += self._host_finished(call, host, (part,), now)
        return effects + self._monitoring.host_lost(host, now)

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        kind, _, argument = name.partition(" ")
        if kind == "orphan" and argument == str(self._num_orphanings):
            return [Shutdown("no client was left")]
        if kind == "abandon" and (call := self._calls.get(argument)) is not None:
            end_call = messages.EndCall(call=call.id)  # type: ignore[arg-type]
            return [
                SendToHosts(tuple(sorted(call.waiting_hosts)), end_call),
                SetTimer(f"concluded {call.id}", _END_CALL_TIMEOUT_S),
            ]
        if kind == "concluded" and (call := self._calls.get(argument)) is not None:
            return self._abandon_call(call, now)
        if kind == "left" and (call := self._calls.get(argument)) is not None:
            return self._query_left_ranks(call, now)
        if kind == "flush" and (call := self._calls.get(argument)) is not None:
            call.flush_at = None
            return self._flush(call, now)
        if kind == "late" and self._late_call is not None:
            call_id, self._late_call = self._late_call, None
            return self._send_late_output(call_id, (), now)
        if kind == "seeing":
            return self._monitoring.timer_fired(argument, now)
        if kind == "release":
            return self._send_deferred(now)
        return []

    # ---- queries

    def info(self) -> MeshInfo:
        return MeshInfo(
            name=self.name,
            spec=self._spec,
            ranks=self._current_ranks(),
            supervisor_pid=self._pid,
            started_at=self._started_at,
            group_generation=self._generation,
            groups=self._groups,  # type: ignore[arg-type]
            clients=tuple(f"{client.kind} (pid {client.pid})" for client in self._clients.values()),
            names=tuple(self._names),
            backend=self._backend,
            cells_run=self._num_cells,
        )

    def open_calls(self, now: float) -> tuple[messages.OpenCall, ...]:
        """Return the running cells, oldest first."""
        return tuple(
            messages.OpenCall(
                call=call.id,  # type: ignore[arg-type]
                label=call.label,
                ranks=call.ranks,
                client=call.client,
                seconds=now - call.opened_at,
            )
            for call in self._calls.values()
            if call.is_main_thread and call.history_entry is not None
        )

    def ranks_awaiting_input(self) -> Ranks:
        """Return the ranks that wait for a reply to input()."""
        return tuple(rank for call in self._calls.values() for rank in call.awaiting_input)

    def host_of(self, rank: int) -> int:
        """Return the host that a rank is on."""
        return self._host_of[rank]

    def exited_ranks(self) -> Mapping[int, messages.RankExited]:
        """Return the exit reports of ranks that have exited."""
        return MappingProxyType(self._exited)

    def wall_time(self, now: float) -> float:
        """Return the wall-clock time at `now`."""
        return self._started_at + now

    def _current_ranks(self) -> tuple[RankInfo, ...]:
        """Return the ranks as last reported by hosts (at most a second old), but busy or idle by their current calls.

        A rank that its host reports as idle, well after the call was sent, has finished its part, perhaps by an
        exception.
        """
        call_by_rank = {rank: call for call in self._calls.values() if call.is_main_thread for rank in call.ranks}
        found = []
        for rank in sorted(self._ranks):
            info, call = self._ranks[rank], call_by_rank.get(rank)
            if (
                info.state == "idle"
                and call is not None
                and self._reported_at.get(rank, 0.0) < call.opened_at + _DELIVERY_S
            ):
                info = msgspec.structs.replace(info, state="busy", call=call.id, cell=call.label)
            elif info.state == "busy" and call is None:
                info = msgspec.structs.replace(info, state="idle", call=None, cell=None, line=None)
            found.append(info)
        return tuple(found)

    @property
    def setup_cells(self) -> tuple[messages.RunCell, ...]:
        """The cells to run again on ranks that join."""
        return tuple(self._setup_cells)

    # ---- starting

    def _start_mesh(self, client: Client, command: messages.StartMesh, body: bytes, now: float) -> list[Effect]:
        if self._spec is not None:
            return self._refuse(
                client,
                command.call,
                "MeshInUse",
                f"the mesh {self.name!r} has its {len(self._ranks)} ranks already; stop it first, or start another one "
                "under another name",
            )
        spec = self._spec = command.spec
        world_size = 1
        for size in spec.axes.values():
            world_size *= size
        self._host_of = assign_hosts(world_size, spec.num_hosts)
        self._ranks = {rank: RankInfo(rank=rank, state="starting", host="") for rank in range(world_size)}
        self._pending_start = (command.call, client.id, now)
        self._groups = "forming" if spec.process_group and spec.torch else "none"
        return [StartHosts(spec)]

    def _host_ready(self, host: int, report: messages.HostReady, now: float) -> list[Effect]:
        assert self._spec is not None
        self._hosts_ready.add(host)
        local_ranks = tuple(rank for rank, host_of_rank in self._host_of.items() if host_of_rank == host)
        command = messages.StartRanks(spec=self._spec, ranks=local_ranks, world_size=len(self._ranks))
        for rank in local_ranks:
            self._ranks[rank] = msgspec.structs.replace(self._ranks[rank], host=report.hostname)
        effects: list[Effect] = [SendToHosts((host,), command)]
        if self._all_hosts() == tuple(sorted(self._hosts_ready)):
            effects += self._form_groups(now)
        return effects

    def _host_failed(self, host: int, report: messages.HostFailed, now: float) -> list[Effect]:
        if self._pending_start is not None:
            return self._fail_start(f"host {host}: {report.reason}")
        return []

    def _form_groups(self, now: float) -> list[Effect]:
        self._generation += 1
        if self._groups != "none":
            self._groups = "forming"
        ranks = tuple(sorted(self._ranks))
        command = messages.FormGroups(
            call=f"form-{self._generation}",  # type: ignore[arg-type]
            ranks=ranks,
            generation=self._generation,
            store_address=self._store_address,
        )
        self._open_call(command.call, "", "forming process groups", ranks, now)
        return [SendToHosts(self._all_hosts(), command)]

    def _groups_formed(self, call: ActiveCall, parts: tuple[OutcomeGroup, ...], now: float) -> list[Effect]:
        failed = [part for part in parts if part.outcome.status != "ok"]
        if failed:
            error = failed[0].outcome.error
            text = f"{error.ename}: {error.evalue}" if error is not None else failed[0].outcome.status
            text = call.failure or f"{name_ranks(failed[0].ranks)}: {text}"
            if self._pending_start is not None:
                return self._fail_start(f"the process group was not formed: {text}")
            self._groups, self._forming_failed = "broken", True
            notice = messages.Notice(
                f"the process groups could not be formed anew: {text}\nThey are formed "
                "again with the next cell. If that fails too, start a new mesh: %mesh stop, then %mesh start"
            )
            output = messages.CallOutput(call=call.id, items=(messages.RankDisplay(call.ranks, notice),))  # type: ignore[arg-type]
            changed = messages.MeshChanged(info=self.info())
            return [SendToClient(None, changed), SendToClient(None, output), *self._send_deferred(now)]
        if self._groups == "forming":
            self._groups = "ready"
        self._backend = parts[0].outcome.reply.get("backend") if parts and parts[0].outcome.reply else None
        if self._pending_start is None:
            return [SendToClient(None, messages.MeshChanged(info=self.info()))]
        start_call, client, since = self._pending_start
        self._pending_start = None
        for rank, info in self._ranks.items():
            if info.state == "starting":
                self._ranks[rank] = msgspec.structs.replace(info, state="idle")
        ready = messages.MeshReady(call=start_call, info=self.info(), seconds=now - since)  # type: ignore[arg-type]
        return [SendToClient(client, ready)]

    def _fail_start(self, text: str) -> list[Effect]:
        assert self._pending_start is not None
        call, client, _ = self._pending_start
        self._pending_start = None
        refused = messages.Refused(call=call, error="StartError", text=text)  # type: ignore[arg-type]
        return [SendToClient(client, refused), Shutdown("the mesh did not come up")]

    # ---- calls

    def _start_call(self, client: Client, command: Any, body: bytes, now: float) -> list[Effect]:
        if self._spec is None or self._pending_start is not None:
            return self._refuse(
                client, command.call, "NotAttached", f"the mesh {self.name!r} has no ranks yet; wait for it to start"
            )
        refused = self._refuse_unknown_ranks(client, command)
        if refused:
            return refused
        if command.call in self._calls:
            return self._refuse(client, command.call, "ProtocolError", f"the call {command.call} is open already")
        label = getattr(command, "label", "") or type(command).__name__
        call = self._open_call(command.call, client.id, label, command.ranks, now)
        call.is_main_thread = not isinstance(command, messages.QUERIES)
        client.has_called = client.has_called or call.is_main_thread
        if isinstance(command, messages.RunCell) and not command.silent:
            self._num_cells += 1
            entry = HistoryEntry(
                number=command.execution_count,
                label=command.label,
                source=command.source,
                ranks=command.ranks,
                started_at=self._started_at + now,
                seconds=None,
                status="running",
                setup=command.setup,
            )
            call.history_entry = self._history.add(entry)
            if command.setup:
                self._setup_cells.append(command)
        send = SendToHosts(self._hosts_of(command.ranks), command, body)
        if not call.is_main_thread:
            return [send]
        if self._must_defer(call, now):
            call.deferred = send
            return []
        forming: list[Effect] = []
        if self._forming_failed and isinstance(command, messages.RunCell | messages.CallFunction | messages.RunOps):
            call.deferred = send  # so that it does not count as busy
            self._forming_failed = False
            forming = self._reform_groups(now)  # sent before it
        return [*forming, *self._send_call(call, send, now)]

    def _send_call(self, call: ActiveCall, send: SendToHosts, now: float) -> list[Effect]:
        call.deferred = None
        waits = isinstance(send.message, messages.RunOps) and send.message.fetch is not None
        users = waits or call.history_entry is not None or isinstance(send.message, messages.CallFunction)
        return [send, *(self._monitoring.call_began(call.id, call.client, call.ranks, now) if users else [])]

    def _must_defer(self, call: ActiveCall, now: float) -> bool:
        """Whether a call must wait, because other ranks are not ready for it.

        That is: some ranks are still in a call that was stopped, or broken process groups have not been re-formed yet.
        All calls wait HOLD_COMMANDS_S for ranks to return from a Stop, and while all have returned and only the report
        of it is in transit. A call to a rank that has not returned waits for that rank. If the groups are broken, a
        call also waits for earlier calls on its ranks, because the groups are re-formed when those have ended.
        """
        earlier = list(itertools.takewhile(lambda other: other is not call, self._calls.values()))
        stopped = [other for other in self._calls.values() if other.stopping_ranks]
        is_imminent = any(
            now < other.stop_deadline or self._exited.keys() | other.done_ranks >= set(other.ranks) for other in stopped
        )
        unavailable = {
            rank for other in stopped for rank in other.stopping_ranks - other.done_ranks
        } - self._exited.keys()
        unavailable.update(rank for other in earlier if other.deferred is not None for rank in other.ranks)
        if self._groups == "broken" and not self._exited and not self._forming_failed:
            busy = [other for other in earlier if other.is_main_thread and other.deferred is None]
            unavailable.update(rank for other in busy for rank in set(other.ranks) - other.done_ranks)
            is_imminent = is_imminent or any(other.done_ranks >= set(other.ranks) for other in busy)
        return is_imminent or self._is_checking_desync() or not unavailable.isdisjoint(call.ranks)

    def _is_checking_desync(self) -> bool:
        """Whether a query compares the ranks' positions. A call that starts meanwhile could compute wrong numbers."""
        return any(call.id.startswith("compare-") for call in self._calls.values())

    def _send_deferred(self, now: float) -> list[Effect]:
        """Send the deferred calls that no longer need to wait, in their original order."""
        effects: list[Effect] = []
        for call in list(self._calls.values()):
            if call.deferred is not None and not self._must_defer(call, now):
                effects += self._send_call(call, call.deferred, now)
        return effects

    def _refuse_unknown_ranks(self, client: Client, command: Any) -> list[Effect]:
        """Refuse a command that names no ranks, or ranks that are not in this mesh."""
        unknown = [rank for rank in command.ranks if rank not in self._ranks]
        if not unknown and command.ranks:
            return []
        world = len(self._ranks)
        problem = f"{name_ranks(unknown)} {'is' if len(unknown) == 1 else 'are'} not" if unknown else "no rank is"
        return self._refuse(
            client, command.call, "MeshShapeError", f"{problem} in this mesh of {world} ranks (0-{world - 1})"
        )

    def _take_snapshots(self, client: Client, command: messages.TakeSnapshots, body: bytes, now: float) -> list[Effect]:
        if self._spec is None:
            return self._refuse(client, command.call, "NotAttached", f"the mesh {self.name!r} has no ranks yet")
        return self._refuse_unknown_ranks(client, command) or self._monitoring.take_snapshots(client.id, command, now)

    def _open_call(self, call_id: str, client: str, label: str, ranks: Ranks, now: float) -> ActiveCall:
        hosts = self._hosts_of(ranks)
        merger = None
        if len(self._all_hosts()) > 1:
            merger = FoldMerger({host: tuple(rank for rank in ranks if self._host_of[rank] == host) for host in hosts})
        call = self._calls[call_id] = ActiveCall(
            call_id, client, label, ranks, set(hosts), now, True, OutputBudget(), merger
        )
        return call

    def _call_output(self, host: int, report: messages.CallOutput, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        if call is None:  # output after the end of its call, from a thread that the cell left behind
            return self._send_late_output(report.call, report.items, now)
        if call.merger is None:
            return self._send_output(call, report.items, now)
        call.merger.feed(host, report.items, now)
        return self._flush(call, now)

    def _flush(self, call: ActiveCall, now: float) -> list[Effect]:
        """Send the output that can be shown now, and set a timer for the rest."""
        items = tuple(call.merger.flush(now, max_chars=_MAX_FLUSH_CHARS)) if call.merger is not None else ()
        return self._send_output(call, items, now)

    def _schedule_flush(self, call: ActiveCall, now: float) -> list[Effect]:
        deadlines = [call.budget.next_deadline(), call.merger.next_deadline() if call.merger is not None else None]
        times = [deadline for deadline in deadlines if deadline is not None]
        if not times or call.flush_at is not None:
            return []
        call.flush_at = max(min(times), now + _FLUSH_INTERVAL_S)
        return [SetTimer(f"flush {call.id}", call.flush_at - now)]

    def _send_output(self, call: ActiveCall, items: tuple[messages.FoldedItem, ...], now: float) -> list[Effect]:
        allowed = tuple(call.budget.admit(items, now))
        self._monitoring.call_printed(call.id, allowed, now)
        output = messages.CallOutput(call=call.id, items=allowed)  # type: ignore[arg-type]
        return [*([SendToClient(call.client, output)] if allowed else []), *self._schedule_flush(call, now)]

    def _send_late_output(self, call: str, items: tuple[messages.FoldedItem, ...], now: float) -> list[Effect]:
        allowed = tuple(self._late_budget.admit(items, now))
        effects: list[Effect] = []
        if allowed:
            effects.append(SendToClient(None, messages.CallOutput(call=call, items=allowed)))  # type: ignore[arg-type]
        deadline = self._late_budget.next_deadline()
        if deadline is not None and self._late_call is None:
            self._late_call = call
            effects.append(SetTimer("late", max(_FLUSH_INTERVAL_S, deadline - now)))
        return effects

    def _call_progressed(self, host: int, report: messages.CallProgressed, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        self._monitoring.ranks_finished(report.call, report.done, now)
        if call is None:
            return []
        call.done_ranks.update(report.done)
        if report.failure and not call.failure:
            call.failure = report.failure
            # The other ranks would wait for it until they time out.
            if remaining := tuple(rank for rank in call.ranks if rank not in call.done_ranks):
                abort = messages.AbortCollectives(ranks=remaining, reason=f"groups were not formed: {report.failure}")
                return [SendToHosts(self._hosts_of(remaining), abort)]
        sent = self._send_deferred(now) if call.stopping_ranks else []
        return [
            *sent,
            *([SendToClient(call.client, report)] if call.client else []),
            *self._query_left_ranks(call, now),
        ]

    def _ranks_stuck(self, host: int, report: messages.RanksStuck, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        return [SendToClient(call.client, report)] if call is not None and call.client else []

    def _call_finished(self, host: int, report: messages.CallFinished, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        if call is None:
            return []
        call.seconds = max(call.seconds, report.seconds)
        call.rank_seconds.update(report.rank_seconds or {})
        if call.merger is not None:
            call.merger.feed(host, report.items, now)
            call.merger.host_done(host)
            items: tuple[messages.FoldedItem, ...] = ()
        else:
            items = report.items
        return self._host_finished(call, host, report.outcomes, now, items)

    def _host_finished(
        self,
        call: ActiveCall,
        host: int,
        parts: tuple[OutcomeGroup, ...],
        now: float,
        items: tuple[messages.FoldedItem, ...] = (),
    ) -> list[Effect]:
        call.waiting_hosts.discard(host)
        call.outcomes.append(parts)
        self._monitoring.ranks_finished(call.id, (rank for part in parts for rank in part.ranks), now)
        call.done_ranks.update(rank for part in parts for rank in part.ranks)
        if call.waiting_hosts:
            flushed = self._flush(call, now) if call.merger is not None else []
            return [*flushed, *self._query_left_ranks(call, now)]
        if call.merger is not None:
            items = tuple(call.merger.flush(now, final=True))
        return self._finish_call(
            call, call.outcomes[0] if len(call.outcomes) == 1 else merge_parts(call.outcomes), items, now
        )

    def begin_shutdown(self) -> None:
        """Begin the mesh's shutdown: from here on, lost ranks are expected and not reported as failures."""
        self._stopping = True

    def _finish_call(
        self, call: ActiveCall, parts: tuple[OutcomeGroup, ...], items: tuple[messages.FoldedItem, ...], now: float
    ) -> list[Effect]:
        if self._stopping and any(part.outcome.status == "lost" for part in parts):
            # MeshStopped reports the reason to clients that wait; this sends the last output of the ranks.
            last_items = tuple(call.budget.admit(items, now, final=True))
            output = messages.CallOutput(call=call.id, items=last_items)  # type: ignore[arg-type]
            return [SendToClient(call.client, output)] if last_items else []
        del self._calls[call.id]
        if call.id.startswith("form-"):
            return self._groups_formed(call, parts, now)
        if call.id.startswith("compare-"):
            return self._desync_checked(call, parts, now)
        if call.id.startswith("left-"):
            return self._left_ranks_received(call, parts, now)
        for part in parts:
            for name in part.outcome.bound_names:
                self._names[name] = None
            for name in part.outcome.deleted_names:
                self._names.pop(name, None)
        while len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)
        if call.history_entry is not None:
            self._finish_entry(call, parts)
        broken = any(part.outcome.groups_broken for part in parts) and self._groups == "ready"
        if broken:
            self._groups = "broken"
            if notice := self._discard_notice(call):
                items = (*items, notice)
        small = len(call.ranks) <= 64
        last_items = tuple(call.budget.admit(items, now, final=True))
        self._monitoring.call_printed(call.id, last_items, now)
        self._monitoring.call_ended(call.id)
        finished = messages.CallFinished(
            call=call.id,  # type: ignore[arg-type]
            outcomes=parts,
            seconds=call.seconds,
            rank_seconds=call.rank_seconds if small else None,
            lost=tuple(call.lost),
            items=last_items,
        )
        effects: list[Effect] = [SendToClient(call.client, finished)]
        ended_badly = call.deferred is None and (call.is_holding or any(part.outcome.status != "ok" for part in parts))
        if call.is_main_thread and self._groups == "ready" and ended_badly:
            return effects + self._check_desync(call, now)
        effects += self._reform_groups(now)
        return effects + self._send_deferred(now)

    # ---- desync checks

    def _query_positions(self, kind: str, about_call: str, ranks: Ranks, now: float) -> list[Effect]:
        """Query the positions of ranks, as a call of the supervisor's own that ends within a second."""
        self._num_queries += 1
        call = self._open_call(f"{kind}-{self._num_queries}", "", kind, ranks, now)
        call.is_main_thread, call.about_call = False, about_call
        query = messages.QueryPositions(call=call.id, ranks=ranks, about_call=about_call)  # type: ignore[arg-type]
        return [SendToHosts(self._hosts_of(ranks), query)]

    def _check_desync(self, call: ActiveCall, now: float) -> list[Effect]:
        """Compare all ranks' positions in their collectives, after a call that failed on some rank."""
        effects = self._query_positions("compare", call.id, tuple(sorted(self._ranks)), now)
        query = self._calls[f"compare-{self._num_queries}"]
        query.label, query.client, query.done_ranks = call.label, call.client, set(call.ranks)
        return effects

    def _desync_checked(self, query: ActiveCall, parts: tuple[OutcomeGroup, ...], now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._groups == "ready":
            desynced = find_desynced_groups(collect_positions(parts), query.done_ranks)
            resume = messages.ResumeCollectives(
                ranks=query.ranks,
                about_call=query.about_call,  # type: ignore[arg-type]
                generation=self._generation,
                broken_groups=tuple(desynced),
                reason=next(iter(desynced.values()), ""),
            )
            effects.append(SendToHosts(self._hosts_of(query.ranks), resume))
            if desynced:
                self._groups = "broken"
                if notice := self._discard_notice(query):
                    output = messages.CallOutput(call=query.about_call, items=(notice,))  # type: ignore[arg-type]
                    effects.append(SendToClient(query.client or None, output))
        return [*effects, *self._reform_groups(now), *self._send_deferred(now)]

    def _discard_notice(self, call: ActiveCall) -> messages.RankDisplay | None:
        """Return a notice if work enqueued behind an aborted collective may still have run (NCCL), else None."""
        if self._backend is None or "nccl" not in self._backend:
            return None
        return messages.RankDisplay(ranks=call.ranks, item=messages.Notice(discard_notice(call.label)))

    def _query_left_ranks(self, call: ActiveCall, now: float) -> list[Effect]:
        """Query the ranks that finished a call in which others continue: have they certainly left its collectives?"""
        newly_done = tuple(
            rank for rank in call.ranks if rank in call.done_ranks - call.left_ranks and rank not in self._exited
        )
        has_groups = self._groups in ("ready", "broken") and not self._exited
        wanted = self._spec is not None and self._spec.end_on_error and not call.is_stopped
        if (
            not has_groups
            or not wanted
            or not call.is_main_thread
            or call.is_querying_left
            or not newly_done
            or len(call.done_ranks) >= len(call.ranks)
        ):
            return []
        call.is_querying_left = True
        return self._query_positions("left", call.id, newly_done, now)

    def _left_ranks_received(self, query: ActiveCall, parts: tuple[OutcomeGroup, ...], now: float) -> list[Effect]:
        call = self._calls.get(query.about_call)
        if call is None:
            return []
        call.is_querying_left = False
        left = tuple(
            position
            for position in collect_positions(parts).values()
            if has_left(position, call.id) and not call.is_stopped
        )
        call.left_ranks.update(position.rank for position in left)
        remaining = tuple(rank for rank in call.ranks if rank not in call.done_ranks and rank not in self._exited)
        effects: list[Effect] = []
        if left and remaining:
            message = messages.RanksLeft(call=call.id, ranks=remaining, left_positions=left)  # type: ignore[arg-type]
            effects.append(SendToHosts(self._hosts_of(remaining), message))
        if call.done_ranks - call.left_ranks:
            effects.append(SetTimer(f"left {call.id}", _RECHECK_LEFT_S))
        return effects

    def _reform_groups(self, now: float) -> list[Effect]:
        """Re-form broken process groups once no rank runs anything. A lost rank must be replaced first."""
        busy = any(call.is_main_thread and call.deferred is None for call in self._calls.values())
        if self._groups != "broken" or self._forming_failed or busy or self._exited or self._stopping:
            return []
        return self._form_groups(now)

    def _finish_entry(self, call: ActiveCall, parts: tuple[OutcomeGroup, ...]) -> None:
        entry = call.history_entry
        assert entry is not None
        found = {part.outcome.status for part in parts}
        status = next((word for word in ("lost", "error", "interrupted", "ok") if word in found), "ok")
        self._history.finish(entry, seconds=call.seconds, status=status)

    # ---- faults

    def _rank_exited(self, host: int, report: messages.RankExited, now: float) -> list[Effect]:
        rank = report.rank
        description = report.description
        info = self._ranks.get(rank)
        if info is None or rank in self._exited or self._stopping:
            return []
        self._ranks[rank] = msgspec.structs.replace(
            info, state="dead", exit=description, call=None, cell=None, line=None
        )
        self._exited[rank] = report
        if self._pending_start is not None:
            last = "".join(f"\n  {line}" for line in report.last_lines)
            return self._fail_start(
                f"rank {rank} {description} while the mesh was coming up{': it said' + last if last else ''}"
            )
        if self._groups in ("ready", "forming"):
            self._groups = "broken"
        effects: list[Effect] = [SendToClient(None, messages.MeshChanged(info=self.info(), exited=(report,)))]
        living = tuple(other for other in sorted(self._ranks) if other not in self._exited)
        if living:  # idle ranks too: their next collective would wait for the dead one
            effects.append(
                SendToHosts(
                    self._hosts_of(living), messages.AbortCollectives(ranks=living, reason=f"rank {rank} {description}")
                )
            )
        for call in self._calls.values():
            if rank not in call.ranks or not call.is_main_thread:
                continue
            call.lost.append(report)
            survivors = tuple(other for other in call.ranks if other not in self._exited)
            if survivors:
                interrupt = messages.Interrupt(ranks=survivors, target=call.id)  # type: ignore[arg-type]
                effects.append(SendToHosts(self._hosts_of(survivors), interrupt))
                effects.append(SetTimer(f"abandon {call.id}", ABANDON_AFTER_S))
        return effects

    def _abandon_call(self, call: ActiveCall, now: float) -> list[Effect]:
        """End a call for its client although some survivors have not returned from it."""
        known = merge_parts(call.outcomes) if call.outcomes else ()
        lost_ranks = tuple(exited.rank for exited in call.lost)
        reported = {rank for part in known for rank in part.ranks} | set(lost_ranks)
        unreported = tuple(rank for rank in call.ranks if rank not in reported)
        parts = list(known)
        if missing := tuple(rank for rank in lost_ranks if all(rank not in part.ranks for part in known)):
            parts.append(OutcomeGroup(missing, Outcome(status="lost")))
        if unreported:
            parts.append(OutcomeGroup(unreported, Outcome(status="skipped")))
        return self._finish_call(call, tuple(parts), (), now)

    # ---- other client commands

    def _interrupt(self, client: Client, command: messages.Interrupt, body: bytes, now: float) -> list[Effect]:
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        if not ranks:
            return []
        stop = msgspec.structs.replace(command, ranks=ranks, client=client.id)
        effects: list[Effect] = [SendToHosts(self._hosts_of(ranks), stop)]
        targets = [call for call in self._calls.values() if call.is_main_thread and command.target in (None, call.id)]
        for call in targets:
            if not set(call.ranks) & set(ranks):
                continue
            if call.deferred is not None and command.target is None and call.client != client.id:
                continue  # deferred: a Stop without a target applies to what runs
            if call.deferred is not None:
                effects += self._finish_call(call, (OutcomeGroup(call.ranks, Outcome(status="interrupted")),), (), now)
            elif call.client:
                call.is_stopped = call.is_stopped or set(call.ranks) - call.done_ranks <= set(ranks)
                call.stop_deadline = now + HOLD_COMMANDS_S
                call.stopping_ranks.update(set(ranks) & set(call.ranks))
                if self._groups == "ready" and not call.is_holding:
                    call.is_holding = True
                    hold = messages.HoldCollectives(ranks=call.ranks, about_call=call.id)  # type: ignore[arg-type]
                    effects.append(SendToHosts(self._hosts_of(call.ranks), hold))
                effects.append(SetTimer(f"release {call.id}", HOLD_COMMANDS_S))
        return effects

    def _reply_input(self, client: Client, command: messages.InputReply, body: bytes, now: float) -> list[Effect]:
        call = self._calls.get(command.target)
        if call is not None:
            call.awaiting_input.discard(command.rank)
        return [SendToHosts(self._hosts_of((command.rank,)), command, body)] if command.rank in self._ranks else []

    def _input_requested(self, host: int, report: messages.InputRequest, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        if call is None or call.client not in self._clients:
            return [SendToHosts((host,), messages.InputReply(target=report.call, rank=report.rank, text=None))]
        call.awaiting_input.add(report.rank)
        return [SendToClient(call.client, report)]

    def _forward(self, client: Client, command: Any, body: bytes, now: float) -> list[Effect]:
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        return [SendToHosts(self._hosts_of(ranks), command, body)] if ranks else []

    def _kill_ranks(self, client: Client, command: messages.KillRanks, body: bytes, now: float) -> list[Effect]:
        unknown = [rank for rank in command.ranks if rank not in self._ranks]
        if unknown:
            text = f"{name_ranks(unknown)}: this mesh has ranks {format_ranks(self._ranks)}"
            return self._refuse(client, command.call, "MeshShapeError", text)
        return [
            SendToHosts(self._hosts_of(command.ranks), command, body),
            SendToClient(client.id, messages.CommandReply(call=command.call)),
        ]

    def _query_status(self, client: Client, command: messages.QueryStatus, body: bytes, now: float) -> list[Effect]:
        return [SendToClient(client.id, messages.CommandReply(call=command.call, info=self.info()))]

    def _query_history(self, client: Client, command: messages.QueryHistory, body: bytes, now: float) -> list[Effect]:
        return [SendToClient(client.id, messages.CommandReply(call=command.call, history=self._history.entries()))]

    def _query_logs(self, client: Client, command: messages.QueryLogs, body: bytes, now: float) -> list[Effect]:
        if command.rank not in self._ranks:
            text = f"rank {command.rank} is not in this mesh of ranks {format_ranks(self._ranks)}"
            return self._refuse(client, command.call, "MeshShapeError", text)
        self._forwarded_queries[command.call] = client.id
        return [SendToHosts(self._hosts_of((command.rank,)), command, body)]

    def _host_replied(self, host: int, report: messages.CommandReply, now: float) -> list[Effect]:
        client = self._forwarded_queries.pop(report.call, None)
        return [SendToClient(client, report)] if client is not None else []

    def _stop_mesh(self, client: Client, command: messages.StopMesh, body: bytes, now: float) -> list[Effect]:
        self._stopping = True
        return [
            SendToClient(client.id, messages.CommandReply(call=command.call)),
            Shutdown(f"stopped by a {client.kind}"),
        ]

    def _detach(self, client: Client, command: messages.Detach, body: bytes, now: float) -> list[Effect]:
        client.orphan_ttl_s = float("inf") if command.orphan_ttl_s is None else command.orphan_ttl_s
        effects = [SendToClient(client.id, messages.CommandReply(call=command.call))]
        effects_of_leaving = [effect for effect in self.client_disconnected(client.id) if not _never_fires(effect)]
        return [*effects, *effects_of_leaving]

    def _set_orphan_ttl(self, client: Client, command: messages.SetOrphanTtl, body: bytes, now: float) -> list[Effect]:
        client.orphan_ttl_s = command.orphan_ttl_s
        return []

    def _host_heartbeat(self, host: int, report: messages.HostHeartbeat, now: float) -> list[Effect]:
        for info in report.ranks:
            known = self._ranks.get(info.rank)
            if known is not None and known.state != "dead":
                starting = self._pending_start is not None and info.state == "idle"
                self._ranks[info.rank] = msgspec.structs.replace(info, state="starting") if starting else info
                self._reported_at[info.rank] = now
        self._monitoring.host_heartbeat(report, now)
        return []

    # ---- helpers

    def _refuse(self, client: Client, call: str, error: str, text: str) -> list[Effect]:
        return [SendToClient(client.id, messages.Refused(call=call, error=error, text=text))]  # type: ignore[arg-type]

    def _hosts_of(self, ranks: Ranks) -> tuple[int, ...]:
        return tuple(sorted({self._host_of[rank] for rank in ranks}))

    def _all_hosts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._host_of.values())))


def assign_hosts(world_size: int, num_hosts: int) -> dict[int, int]:
    """Return the host of each rank: contiguous ranks per host, sizes that differ by at most one.

    Four ranks on three hosts are 2, 1 and 1.
    """
    fewest, num_larger = divmod(world_size, num_hosts)
    sizes = [fewest + (host < num_larger) for host in range(num_hosts)]
    return dict(enumerate(host for host, size in enumerate(sizes) for _ in range(size)))


def discard_notice(label: str) -> str:
    """Return the advice to the user when NCCL process groups are re-formed."""
    return (
        f"the process groups are formed anew. Work that {label or 'the call'} had enqueued behind a collective that "
        f"was given up may have run on the GPU with garbage: discard the step in which {label or 'it'} ended (run it "
        "again from the state before it, or load the last checkpoint)"
    )


def _never_fires(effect: Effect) -> bool:
    return isinstance(effect, SetTimer) and effect.delay_s == float("inf")
