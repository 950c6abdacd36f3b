"""The supervisor's memory of one mesh: its ranks, its clients, its open calls.

Ways in: `client_said`, `client_gone`, `host_said`, `host_ended`, `alarm`. One way out: the steps they return. No
sockets, threads, clocks or torch: time comes in as seconds since the supervisor started, so a test can drive a year of
failures in a millisecond, and a saved list of events replays to the same state.
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
from meshbook.supervisor.history import History
from meshbook.supervisor.instep import has_left, out_of_step, positions_of
from meshbook.supervisor.seeing import Seeing
from meshbook.supervisor.stalls import STALL_S
from meshbook.supervisor.steps import Alarm as Alarm
from meshbook.supervisor.steps import Shutdown as Shutdown
from meshbook.supervisor.steps import StartHosts as StartHosts
from meshbook.supervisor.steps import Step as Step
from meshbook.supervisor.steps import ToClient as ToClient
from meshbook.supervisor.steps import ToHosts as ToHosts
from meshbook.wire import messages
from meshbook.wire.messages import HistoryEntry, MeshInfo, MeshSpec, Outcome, Part, RankInfo
from meshbook.wire.stop import ABANDON_AFTER_S, HOLD_S

# Seconds a mesh lives on without clients, unless the last one asked otherwise: long enough to restart a crashed kernel
# or to find the notebook again after lunch, short enough that forgotten GPUs are free the same afternoon.
ORPHAN_TTL_S = 1800.0
# Seconds after which a call has reached its ranks' host, so that what the host says of them is said in the knowledge.
_REACHED_S = 0.5
# Seconds that hosts have to tell what survivors of a lost rank came to.
_CONCLUDE_S = 0.5
# Seconds until ranks that are done with a call, and may still take part in its collectives, are asked again.
_LEFT_AGAIN_S = 1.0
_FLUSH_S = 0.05
_FLUSH_CHARS = 32 << 10  # characters that one flush may show; see host.agent
_SETUP_CELLS = 1000
_NAMES = 10_000  # that are told to clients


# ---------------------------------------------------------------------------------------------------------------------
# What is remembered


@dataclass
class Client:
    id: str
    kind: str
    pid: int
    observer: bool
    orphan_ttl_s: float
    has_called: bool = False  # so that ranks may hold something for it


@dataclass
class Call:
    """A command that ranks work on."""

    id: str
    client: str
    label: str
    ranks: Ranks
    waiting: set[int]  # hosts
    opened_at: float
    main_thread: bool
    budget: OutputBudget
    merger: FoldMerger | None  # None: the mesh has one host, there is nothing to merge
    parts: list[tuple[Part, ...]] = field(default_factory=list)
    seconds: float = 0.0
    rank_seconds: dict[int, float] = field(default_factory=dict)
    lost: list[messages.RankExited] = field(default_factory=list)
    entry: HistoryEntry | None = None
    flush_at: float | None = None  # when an alarm will look for output that waits
    asking: set[int] = field(default_factory=set)  # ranks that wait for input()
    back_by: float = 0.0  # told to stop, it has until then to come back
    stopping: set[int] = field(default_factory=set)  # ranks that were told to stop it
    held: ToHosts | None = None  # not sent yet
    about: str = ""  # the call that it asks ranks about, if it is a question of ours
    done: set[int] = field(default_factory=set)  # ranks whose part is known to be over
    left: set[int] = field(default_factory=set)  # ... and of which the others know that they have left
    asks_left: bool = False  # ranks are being asked whether they have
    holding: bool = False  # ranks wait with collectives that come after it
    stopped: bool = False  # all that still run it were told to stop
    failed: str = ""  # of process groups: the first rank that could not form them, and why


class State:
    """One mesh. The driver calls in, carries the steps out, and knows nothing."""

    def __init__(
        self, name: str, pid: int, started_at: float, *, stall_s: float = STALL_S, store: str = ""
    ) -> None:
        """
        Args:
            store: address of the store in which ranks find each other.
        """
        self.name, self._pid, self._started_at, self._store = name, pid, started_at, store
        self._clients: dict[str, Client] = {}
        self._spec: MeshSpec | None = None
        self._start: tuple[str, str, float] | None = None  # call, client, since: a mesh that is coming up
        self._host_of: dict[int, int] = {}
        self._hosts_ready: set[int] = set()
        self._ranks: dict[int, RankInfo] = {}
        self._told_at: dict[int, float] = {}  # when their hosts told it
        self._exited: dict[int, messages.RankExited] = {}
        self._groups = "none"
        self._formed_badly = False  # tried, and failed: tried again when somebody wants to use them
        self._num_questions = 0
        self._backend: str | None = None
        self._epoch = 0
        self._calls: dict[str, Call] = {}
        self._names: OrderedDict[str, None] = OrderedDict()
        self._history = History()
        self._setup: deque[messages.RunCell] = deque(maxlen=_SETUP_CELLS)
        self._questions: dict[str, str] = {}  # call -> client, for what hosts answer directly
        self._late = OutputBudget()  # of what is printed when no call is open
        self._late_call: str | None = None  # whose output waits there for an alarm
        self._orphaned = 0  # counts the times that the last client left, so that an old alarm is known as old
        self._num_cells = 0
        self._stopping = False
        self._seeing = Seeing(self, stall_s)
        self._commands: dict[type, Callable[[Client, Any, bytes, float], list[Step]]] = {
            messages.StartMesh: self._start_mesh,
            messages.Interrupt: self._interrupt,
            messages.ReplyInput: self._reply_input,
            messages.Release: self._pass_on,
            messages.KillRanks: self._kill_ranks,
            messages.AskStatus: self._ask_status,
            messages.AskLogs: self._ask_logs,
            messages.AskHistory: self._ask_history,
            messages.StopMesh: self._stop_mesh,
            messages.Detach: self._detach,
            messages.SetOrphanTtl: self._set_orphan_ttl,
            messages.Ping: lambda client, command, body, now: [ToClient(client.id, messages.Pong())],
            messages.TakeSnapshots: self._take_snapshots,
            messages.Watch: lambda client, command, body, now: self._seeing.watch(client.id, command, now),
        }
        self._reports: dict[type, Callable[[int, Any, float], list[Step]]] = {
            messages.HostReady: self._host_ready,
            messages.HostFailed: self._host_failed,
            messages.HostBeat: self._host_beat,
            messages.RankExited: self._rank_exited,
            messages.CallOutput: self._call_output,
            messages.CallProgressed: self._call_progressed,
            messages.RanksStuck: self._ranks_stuck,
            messages.CallFinished: self._call_finished,
            messages.InputRequested: self._input_requested,
            messages.Answered: self._host_answered,
            messages.Segments: lambda host, report, now: [ToClient(None, report)],
            messages.SnapshotsTaken: self._seeing.host_said,
        }

    # ---- ways in

    def client_joined(self, hello: messages.Hello, now: float) -> list[Step]:
        ttl = ORPHAN_TTL_S if hello.orphan_ttl_s is None else hello.orphan_ttl_s
        self._clients[hello.client] = Client(hello.client, hello.kind, hello.pid, hello.observer, ttl)
        if not hello.observer:
            self._orphaned += 1  # whoever was waiting for the mesh to be orphaned long enough waits in vain
        return [ToClient(hello.client, messages.Welcome(info=self.info(), open_calls=self.open_calls(now)))]

    def client_said(self, client_id: str, command: messages.ClientCommand, body: bytes, now: float) -> list[Step]:
        client = self._clients.get(client_id)
        if client is None:
            return []
        handler = self._commands.get(type(command))
        if handler is not None:
            return handler(client, command, body, now)
        return self._call_ranks(client, command, body, now)

    def client_gone(self, client_id: str) -> list[Step]:
        """A client's process ended, or it left. What it had started on the ranks goes on."""
        client = self._clients.pop(client_id, None)
        if client is None:
            return []
        self._seeing.client_gone(client_id)
        steps: list[Step] = []
        for call in self._calls.values():
            if call.client == client_id:
                for rank in sorted(call.asking):
                    answer = messages.ReplyInput(target=call.id, rank=rank, text=None)  # type: ignore[arg-type]
                    steps.append(ToHosts(self._hosts((rank,)), answer))
                call.asking.clear()
        left = tuple(rank for rank in sorted(self._ranks) if rank not in self._exited)
        if client.has_called and left:
            steps.append(ToHosts(self._hosts(left), messages.Release(ranks=left, client=client_id)))
        if not client.observer and all(other.observer for other in self._clients.values()):
            self._orphaned += 1
            steps.append(Alarm(f"orphan {self._orphaned}", client.orphan_ttl_s))
        return steps

    def host_said(self, host: int, report: messages.HostReport, now: float) -> list[Step]:
        handler = self._reports.get(type(report))
        return handler(host, report, now) if handler is not None else []

    def host_ended(self, host: int, how: str, now: float) -> list[Step]:
        """A whole host is gone, and its ranks with it."""
        if self._start is not None:
            return self._fail_start(f"host {host} {how} while the mesh was coming up; see supervisor.log")
        steps: list[Step] = []
        for rank in [rank for rank, place in self._host_of.items() if place == host and rank not in self._exited]:
            info = self._ranks[rank]
            exited = messages.RankExited(
                rank=rank,
                pid=info.pid or 0,
                exit_code=None,
                signal=None,
                host=info.host,
                last_lines=(),
                last_collective=None,
                cause=f"ended with its host, which {how}",
            )
            steps += self._rank_exited(host, exited, now)
        for call in [call for call in self._calls.values() if host in call.waiting]:
            lost = tuple(rank for rank in call.ranks if self._host_of[rank] == host)
            error = messages.RankError(ename="RankLost", evalue=f"{name_ranks(lost)}: the host {how}", traceback=())
            part = Part(lost, Outcome(status="lost", error=error))
            steps += self._host_part(call, host, (part,), now)
        return steps + self._seeing.host_gone(host, now)

    def alarm(self, name: str, now: float) -> list[Step]:
        kind, _, what = name.partition(" ")
        if kind == "orphan" and what == str(self._orphaned):
            return [Shutdown("no client was left")]
        if kind == "abandon" and (call := self._calls.get(what)) is not None:
            conclude = messages.Conclude(call=call.id)  # type: ignore[arg-type]
            return [ToHosts(tuple(sorted(call.waiting)), conclude), Alarm(f"concluded {call.id}", _CONCLUDE_S)]
        if kind == "concluded" and (call := self._calls.get(what)) is not None:
            return self._abandon(call, now)
        if kind == "left" and (call := self._calls.get(what)) is not None:
            return self._ask_who_left(call, now)
        if kind == "flush" and (call := self._calls.get(what)) is not None:
            call.flush_at = None
            return self._flush(call, now)
        if kind == "late" and self._late_call is not None:
            call_id, self._late_call = self._late_call, None
            return self._say_late(call_id, (), now)
        if kind == "seeing":
            return self._seeing.alarm(what, now)
        if kind == "release":
            return self._release(now)
        return []

    # ---- what is known

    def info(self) -> MeshInfo:
        return MeshInfo(
            name=self.name,
            spec=self._spec,
            ranks=self._ranks_now(),
            supervisor_pid=self._pid,
            started_at=self._started_at,
            epoch=self._epoch,
            groups=self._groups,  # type: ignore[arg-type]
            clients=tuple(f"{client.kind} (pid {client.pid})" for client in self._clients.values()),
            names=tuple(self._names),
            backend=self._backend,
            cells_run=self._num_cells,
        )

    def open_calls(self, now: float) -> tuple[messages.OpenCall, ...]:
        """The cells that run, oldest first."""
        return tuple(
            messages.OpenCall(
                call=call.id,  # type: ignore[arg-type]
                label=call.label,
                ranks=call.ranks,
                client=call.client,
                seconds=now - call.opened_at,
            )
            for call in self._calls.values()
            if call.main_thread and call.entry is not None
        )

    def asking(self) -> Ranks:
        """Ranks that wait for an answer to input()."""
        return tuple(rank for call in self._calls.values() for rank in call.asking)

    def place_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return self._host_of[rank]

    def gone(self) -> Mapping[int, messages.RankExited]:
        """Ranks that have ended."""
        return MappingProxyType(self._exited)

    def wall(self, now: float) -> float:
        """The wall clock at `now`."""
        return self._started_at + now

    def _ranks_now(self) -> tuple[RankInfo, ...]:
        """The ranks as hosts last told of them, a second ago at most, but busy or idle as their calls are now.

        A rank whose host says that it is idle, well after the call came, is done with its part: it raised, perhaps.
        """
        at_work = {rank: call for call in self._calls.values() if call.main_thread for rank in call.ranks}
        found = []
        for rank in sorted(self._ranks):
            info, call = self._ranks[rank], at_work.get(rank)
            if info.state == "idle" and call is not None and self._told_at.get(rank, 0.0) < call.opened_at + _REACHED_S:
                info = msgspec.structs.replace(info, state="busy", call=call.id, cell=call.label)
            elif info.state == "busy" and call is None:
                info = msgspec.structs.replace(info, state="idle", call=None, cell=None, line=None)
            found.append(info)
        return tuple(found)

    @property
    def setup_cells(self) -> tuple[messages.RunCell, ...]:
        """Cells to be run again on ranks that join."""
        return tuple(self._setup)

    # ---- coming up

    def _start_mesh(self, client: Client, command: messages.StartMesh, body: bytes, now: float) -> list[Step]:
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
        self._host_of = spread(world_size, spec.num_hosts)
        self._ranks = {rank: RankInfo(rank=rank, state="starting", host="") for rank in range(world_size)}
        self._start = (command.call, client.id, now)
        self._groups = "forming" if spec.process_group and spec.torch else "none"
        return [StartHosts(spec)]

    def _host_ready(self, host: int, report: messages.HostReady, now: float) -> list[Step]:
        assert self._spec is not None
        self._hosts_ready.add(host)
        mine = tuple(rank for rank, place in self._host_of.items() if place == host)
        command = messages.StartRanks(spec=self._spec, ranks=mine, world_size=len(self._ranks))
        for rank in mine:
            self._ranks[rank] = msgspec.structs.replace(self._ranks[rank], host=report.hostname)
        steps: list[Step] = [ToHosts((host,), command)]
        if self._all_hosts() == tuple(sorted(self._hosts_ready)):
            steps += self._form_groups(now)
        return steps

    def _host_failed(self, host: int, report: messages.HostFailed, now: float) -> list[Step]:
        if self._start is not None:
            return self._fail_start(f"host {host}: {report.reason}")
        return []

    def _form_groups(self, now: float) -> list[Step]:
        self._epoch += 1
        if self._groups != "none":
            self._groups = "forming"
        ranks = tuple(sorted(self._ranks))
        command = messages.FormGroups(
            call=f"form-{self._epoch}",  # type: ignore[arg-type]
            ranks=ranks,
            epoch=self._epoch,
            store=self._store,
        )
        self._open(command.call, "", "forming process groups", ranks, now)
        return [ToHosts(self._all_hosts(), command)]

    def _groups_formed(self, call: Call, parts: tuple[Part, ...], now: float) -> list[Step]:
        failed = [part for part in parts if part.outcome.status != "ok"]
        if failed:
            error = failed[0].outcome.error
            text = f"{error.ename}: {error.evalue}" if error is not None else failed[0].outcome.status
            text = call.failed or f"{name_ranks(failed[0].ranks)}: {text}"
            if self._start is not None:
                return self._fail_start(f"the process group was not formed: {text}")
            self._groups, self._formed_badly = "broken", True
            notice = messages.Notice(
                f"the process groups could not be formed anew: {text}\nThey are formed "
                "again with the next cell. If that fails too, start a new mesh: %mesh stop, then %mesh start"
            )
            said = messages.CallOutput(call=call.id, items=(messages.RankDisplay(call.ranks, notice),))  # type: ignore[arg-type]
            changed = messages.RanksChanged(info=self.info())
            return [ToClient(None, changed), ToClient(None, said), *self._release(now)]
        if self._groups == "forming":
            self._groups = "ready"
        self._backend = parts[0].outcome.answer.get("backend") if parts and parts[0].outcome.answer else None
        if self._start is None:
            return [ToClient(None, messages.RanksChanged(info=self.info()))]
        start_call, client, since = self._start
        self._start = None
        for rank, info in self._ranks.items():
            if info.state == "starting":
                self._ranks[rank] = msgspec.structs.replace(info, state="idle")
        ready = messages.MeshReady(call=start_call, info=self.info(), seconds=now - since)  # type: ignore[arg-type]
        return [ToClient(client, ready)]

    def _fail_start(self, text: str) -> list[Step]:
        assert self._start is not None
        call, client, _ = self._start
        self._start = None
        refused = messages.Refused(call=call, error="StartError", text=text)  # type: ignore[arg-type]
        return [ToClient(client, refused), Shutdown("the mesh did not come up")]

    # ---- calls

    def _call_ranks(self, client: Client, command: Any, body: bytes, now: float) -> list[Step]:
        if self._spec is None or self._start is not None:
            return self._refuse(
                client, command.call, "NotAttached", f"the mesh {self.name!r} has no ranks yet; wait for it to start"
            )
        refused = self._refuse_ranks(client, command)
        if refused:
            return refused
        if command.call in self._calls:
            return self._refuse(client, command.call, "ProtocolError", f"the call {command.call} is open already")
        label = getattr(command, "label", "") or type(command).__name__
        call = self._open(command.call, client.id, label, command.ranks, now)
        call.main_thread = not isinstance(command, messages.QUESTIONS)
        client.has_called = client.has_called or call.main_thread
        if isinstance(command, messages.RunCell) and not command.silent:
            self._num_cells += 1
            entry = HistoryEntry(
                number=command.number,
                label=command.label,
                source=command.source,
                ranks=command.ranks,
                started_at=self._started_at + now,
                seconds=None,
                status="running",
                setup=command.setup,
            )
            call.entry = self._history.add(entry)
            if command.setup:
                self._setup.append(command)
        send = ToHosts(self._hosts(command.ranks), command, body)
        if not call.main_thread:
            return [send]
        if self._must_wait(call, now):
            call.held = send
            return []
        forming: list[Step] = []
        if self._formed_badly and isinstance(command, messages.RunCell | messages.CallFunction | messages.RunOps):
            call.held = send  # does not count as busy
            self._formed_badly = False
            forming = self._mend_groups(now)  # goes before it
        return [*forming, *self._send(call, send, now)]

    def _send(self, call: Call, send: ToHosts, now: float) -> list[Step]:
        call.held = None
        waits = isinstance(send.message, messages.RunOps) and send.message.fetch is not None
        users = waits or call.entry is not None or isinstance(send.message, messages.CallFunction)
        return [send, *(self._seeing.call_began(call.id, call.client, call.ranks, now) if users else [])]

    def _must_wait(self, call: Call, now: float) -> bool:
        """Whether a call would begin on some ranks while others are still in a call that was stopped, or before broken
        process groups are formed anew.

        All calls wait HOLD_S for ranks to come back from a Stop, and while all are back and only the word of it is on
        its way. One of a rank that is not back waits for it; and so does one that comes behind others on its ranks,
        where the groups are broken: they are formed anew when those have ended.
        """
        before = list(itertools.takewhile(lambda other: other is not call, self._calls.values()))
        stopped = [other for other in self._calls.values() if other.stopping]
        soon = any(now < other.back_by or self._exited.keys() | other.done >= set(other.ranks) for other in stopped)
        late = {rank for other in stopped for rank in other.stopping - other.done} - self._exited.keys()
        late.update(rank for other in before if other.held is not None for rank in other.ranks)
        if self._groups == "broken" and not self._exited and not self._formed_badly:
            busy = [other for other in before if other.main_thread and other.held is None]
            late.update(rank for other in busy for rank in set(other.ranks) - other.done)
            soon = soon or any(other.done >= set(other.ranks) for other in busy)
        return soon or self._is_comparing() or not late.isdisjoint(call.ranks)

    def _is_comparing(self) -> bool:
        """Whether ranks are asked if they are in step. What begins meanwhile could compute wrong numbers."""
        return any(call.id.startswith("compare-") for call in self._calls.values())

    def _release(self, now: float) -> list[Step]:
        """Send what was held and need not wait any more, in the order in which it came."""
        steps: list[Step] = []
        for call in list(self._calls.values()):
            if call.held is not None and not self._must_wait(call, now):
                steps += self._send(call, call.held, now)
        return steps

    def _refuse_ranks(self, client: Client, command: Any) -> list[Step]:
        """For a command that names ranks which are not in this mesh, or none."""
        unknown = [rank for rank in command.ranks if rank not in self._ranks]
        if not unknown and command.ranks:
            return []
        world = len(self._ranks)
        what = f"{name_ranks(unknown)} {'is' if len(unknown) == 1 else 'are'} not" if unknown else "no rank is"
        return self._refuse(
            client, command.call, "MeshShapeError", f"{what} in this mesh of {world} ranks (0-{world - 1})"
        )

    def _take_snapshots(self, client: Client, command: messages.TakeSnapshots, body: bytes, now: float) -> list[Step]:
        if self._spec is None:
            return self._refuse(client, command.call, "NotAttached", f"the mesh {self.name!r} has no ranks yet")
        return self._refuse_ranks(client, command) or self._seeing.take(client.id, command, now)

    def _open(self, call_id: str, client: str, label: str, ranks: Ranks, now: float) -> Call:
        hosts = self._hosts(ranks)
        merger = None
        if len(self._all_hosts()) > 1:
            merger = FoldMerger({host: tuple(rank for rank in ranks if self._host_of[rank] == host) for host in hosts})
        call = self._calls[call_id] = Call(call_id, client, label, ranks, set(hosts), now, True, OutputBudget(), merger)
        return call

    def _call_output(self, host: int, report: messages.CallOutput, now: float) -> list[Step]:
        call = self._calls.get(report.call)
        if call is None:  # output after the end, of a thread that the cell left behind
            return self._say_late(report.call, report.items, now)
        if call.merger is None:
            return self._say(call, report.items, now)
        call.merger.feed(host, report.items, now)
        return self._flush(call, now)

    def _flush(self, call: Call, now: float) -> list[Step]:
        """Show what can be shown now, and come back when there will be more although nobody speaks."""
        items = tuple(call.merger.flush(now, max_chars=_FLUSH_CHARS)) if call.merger is not None else ()
        return self._say(call, items, now)

    def _come_back(self, call: Call, now: float) -> list[Step]:
        deadlines = [call.budget.next_deadline(), call.merger.next_deadline() if call.merger is not None else None]
        times = [deadline for deadline in deadlines if deadline is not None]
        if not times or call.flush_at is not None:
            return []
        call.flush_at = max(min(times), now + _FLUSH_S)
        return [Alarm(f"flush {call.id}", call.flush_at - now)]

    def _say(self, call: Call, items: tuple[messages.FoldedItem, ...], now: float) -> list[Step]:
        allowed = tuple(call.budget.admit(items, now))
        self._seeing.call_said(call.id, allowed, now)
        said = messages.CallOutput(call=call.id, items=allowed)  # type: ignore[arg-type]
        return [*([ToClient(call.client, said)] if allowed else []), *self._come_back(call, now)]

    def _say_late(self, call: str, items: tuple[messages.FoldedItem, ...], now: float) -> list[Step]:
        allowed = tuple(self._late.admit(items, now))
        steps: list[Step] = []
        if allowed:
            steps.append(ToClient(None, messages.CallOutput(call=call, items=allowed)))  # type: ignore[arg-type]
        deadline = self._late.next_deadline()
        if deadline is not None and self._late_call is None:
            self._late_call = call
            steps.append(Alarm("late", max(_FLUSH_S, deadline - now)))
        return steps

    def _call_progressed(self, host: int, report: messages.CallProgressed, now: float) -> list[Step]:
        call = self._calls.get(report.call)
        self._seeing.part_ended(report.call, report.done, now)
        if call is None:
            return []
        call.done.update(report.done)
        if report.failed and not call.failed:
            call.failed = report.failed
            # The others would wait for it until their time is up.
            if staying := tuple(rank for rank in call.ranks if rank not in call.done):
                told = messages.Unblock(ranks=staying, reason=f"groups were not formed: {report.failed}")
                return [ToHosts(self._hosts(staying), told)]
        released = self._release(now) if call.stopping else []
        return [*released, *([ToClient(call.client, report)] if call.client else []), *self._ask_who_left(call, now)]

    def _ranks_stuck(self, host: int, report: messages.RanksStuck, now: float) -> list[Step]:
        call = self._calls.get(report.call)
        return [ToClient(call.client, report)] if call is not None and call.client else []

    def _call_finished(self, host: int, report: messages.CallFinished, now: float) -> list[Step]:
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
        return self._host_part(call, host, report.parts, now, items)

    def _host_part(
        self,
        call: Call,
        host: int,
        parts: tuple[Part, ...],
        now: float,
        items: tuple[messages.FoldedItem, ...] = (),
    ) -> list[Step]:
        call.waiting.discard(host)
        call.parts.append(parts)
        self._seeing.part_ended(call.id, (rank for part in parts for rank in part.ranks), now)
        call.done.update(rank for part in parts for rank in part.ranks)
        if call.waiting:
            flushed = self._flush(call, now) if call.merger is not None else []
            return [*flushed, *self._ask_who_left(call, now)]
        if call.merger is not None:
            items = tuple(call.merger.flush(now, final=True))
        return self._settle(call, call.parts[0] if len(call.parts) == 1 else merge_parts(call.parts), items, now)

    def ending(self) -> None:
        """The mesh ends: what its ranks come to from here on is its end, and no fault of theirs."""
        self._stopping = True

    def _settle(
        self, call: Call, parts: tuple[Part, ...], items: tuple[messages.FoldedItem, ...], now: float
    ) -> list[Step]:
        if self._stopping and any(part.outcome.status == "lost" for part in parts):
            # Whoever waits for it is told why the mesh has ended, by MeshStopped; and now what its ranks said last.
            last = tuple(call.budget.admit(items, now, final=True))
            said = messages.CallOutput(call=call.id, items=last)  # type: ignore[arg-type]
            return [ToClient(call.client, said)] if last else []
        del self._calls[call.id]
        if call.id.startswith("form-"):
            return self._groups_formed(call, parts, now)
        if call.id.startswith("compare-"):
            return self._compared(call, parts, now)
        if call.id.startswith("left-"):
            return self._who_left(call, parts, now)
        for part in parts:
            for name in part.outcome.bound:
                self._names[name] = None
            for name in part.outcome.unbound:
                self._names.pop(name, None)
        while len(self._names) > _NAMES:
            self._names.popitem(last=False)
        if call.entry is not None:
            self._close_entry(call, parts)
        broken = any(part.outcome.groups_broken for part in parts) and self._groups == "ready"
        if broken:
            self._groups = "broken"
            if notice := self._what_to_discard(call):
                items = (*items, notice)
        small = len(call.ranks) <= 64
        last = tuple(call.budget.admit(items, now, final=True))
        self._seeing.call_said(call.id, last, now)
        self._seeing.call_ended(call.id)
        finished = messages.CallFinished(
            call=call.id,  # type: ignore[arg-type]
            parts=parts,
            seconds=call.seconds,
            rank_seconds=call.rank_seconds if small else None,
            lost=tuple(call.lost),
            items=last,
        )
        steps: list[Step] = [ToClient(call.client, finished)]
        badly = call.held is None and (call.holding or any(part.outcome.status != "ok" for part in parts))
        if call.main_thread and self._groups == "ready" and badly:
            return steps + self._compare(call, now)
        steps += self._mend_groups(now)
        return steps + self._release(now)

    # ---- in step, or not

    def _ask(self, kind: str, about: str, ranks: Ranks, now: float) -> list[Step]:
        """Ask ranks for their positions. The answer is the end of a call of ours, within a second."""
        self._num_questions += 1
        call = self._open(f"{kind}-{self._num_questions}", "", kind, ranks, now)
        call.main_thread, call.about = False, about
        ask = messages.AskPositions(call=call.id, ranks=ranks, about=about)  # type: ignore[arg-type]
        return [ToHosts(self._hosts(ranks), ask)]

    def _compare(self, call: Call, now: float) -> list[Step]:
        """A call did not end well on some rank: where have all come to in their collectives?"""
        question = self._ask("compare", call.id, tuple(sorted(self._ranks)), now)
        asked = self._calls[f"compare-{self._num_questions}"]
        asked.label, asked.client, asked.done = call.label, call.client, set(call.ranks)
        return question

    def _compared(self, asked: Call, parts: tuple[Part, ...], now: float) -> list[Step]:
        steps: list[Step] = []
        if self._groups == "ready":
            found = out_of_step(positions_of(parts), asked.done)
            checked = messages.GroupsChecked(
                ranks=asked.ranks,
                about=asked.about,  # type: ignore[arg-type]
                epoch=self._epoch,
                broken=tuple(found),
                reason=next(iter(found.values()), ""),
            )
            steps.append(ToHosts(self._hosts(asked.ranks), checked))
            if found:
                self._groups = "broken"
                if notice := self._what_to_discard(asked):
                    said = messages.CallOutput(call=asked.about, items=(notice,))  # type: ignore[arg-type]
                    steps.append(ToClient(asked.client or None, said))
        return [*steps, *self._mend_groups(now), *self._release(now)]

    def _what_to_discard(self, call: Call) -> messages.RankDisplay | None:
        """What the user is told where work that was enqueued behind an aborted collective may have run all the same."""
        if self._backend is None or "nccl" not in self._backend:
            return None
        return messages.RankDisplay(ranks=call.ranks, item=messages.Notice(discard_notice(call.label)))

    def _ask_who_left(self, call: Call, now: float) -> list[Step]:
        """Some ranks are done with a call in which others go on. Have they certainly left its collectives?"""
        news = tuple(rank for rank in call.ranks if rank in call.done - call.left and rank not in self._exited)
        has_groups = self._groups in ("ready", "broken") and not self._exited
        wanted = self._spec is not None and self._spec.end_on_error and not call.stopped
        if (
            not has_groups
            or not wanted
            or not call.main_thread
            or call.asks_left
            or not news
            or len(call.done) >= len(call.ranks)
        ):
            return []
        call.asks_left = True
        return self._ask("left", call.id, news, now)

    def _who_left(self, asked: Call, parts: tuple[Part, ...], now: float) -> list[Step]:
        call = self._calls.get(asked.about)
        if call is None:
            return []
        call.asks_left = False
        left = tuple(
            position for position in positions_of(parts).values() if has_left(position, call.id) and not call.stopped
        )
        call.left.update(position.rank for position in left)
        staying = tuple(rank for rank in call.ranks if rank not in call.done and rank not in self._exited)
        steps: list[Step] = []
        if left and staying:
            told = messages.RanksLeft(call=call.id, ranks=staying, left=left)  # type: ignore[arg-type]
            steps.append(ToHosts(self._hosts(staying), told))
        if call.done - call.left:
            steps.append(Alarm(f"left {call.id}", _LEFT_AGAIN_S))
        return steps

    def _mend_groups(self, now: float) -> list[Step]:
        """Re-form the process groups once nobody uses them. With a rank gone that has to wait for a new one."""
        busy = any(call.main_thread and call.held is None for call in self._calls.values())
        if self._groups != "broken" or self._formed_badly or busy or self._exited or self._stopping:
            return []
        return self._form_groups(now)

    def _close_entry(self, call: Call, parts: tuple[Part, ...]) -> None:
        entry = call.entry
        assert entry is not None
        found = {part.outcome.status for part in parts}
        status = next((word for word in ("lost", "error", "interrupted", "ok") if word in found), "ok")
        self._history.close(entry, seconds=call.seconds, status=status)

    # ---- faults

    def _rank_exited(self, host: int, report: messages.RankExited, now: float) -> list[Step]:
        rank = report.rank
        how = report.how
        info = self._ranks.get(rank)
        if info is None or rank in self._exited or self._stopping:
            return []
        self._ranks[rank] = msgspec.structs.replace(info, state="dead", exit=how, call=None, cell=None, line=None)
        self._exited[rank] = report
        if self._start is not None:
            last = "".join(f"\n  {line}" for line in report.last_lines)
            return self._fail_start(
                f"rank {rank} {how} while the mesh was coming up{': it said' + last if last else ''}"
            )
        if self._groups in ("ready", "forming"):
            self._groups = "broken"
        steps: list[Step] = [ToClient(None, messages.RanksChanged(info=self.info(), exited=(report,)))]
        left = tuple(other for other in sorted(self._ranks) if other not in self._exited)
        if left:  # also those that are idle: a collective of theirs would wait for the dead one
            steps.append(ToHosts(self._hosts(left), messages.Unblock(ranks=left, reason=f"rank {rank} {how}")))
        for call in self._calls.values():
            if rank not in call.ranks or not call.main_thread:
                continue
            call.lost.append(report)
            survivors = tuple(other for other in call.ranks if other not in self._exited)
            if survivors:
                interrupt = messages.Interrupt(ranks=survivors, target=call.id)  # type: ignore[arg-type]
                steps.append(ToHosts(self._hosts(survivors), interrupt))
                steps.append(Alarm(f"abandon {call.id}", ABANDON_AFTER_S))
        return steps

    def _abandon(self, call: Call, now: float) -> list[Step]:
        """End a call for its client although some survivors have not come back from it yet."""
        known = merge_parts(call.parts) if call.parts else ()
        gone = tuple(exited.rank for exited in call.lost)
        heard = {rank for part in known for rank in part.ranks} | set(gone)
        late = tuple(rank for rank in call.ranks if rank not in heard)
        parts = list(known)
        if missing := tuple(rank for rank in gone if all(rank not in part.ranks for part in known)):
            parts.append(Part(missing, Outcome(status="lost")))
        if late:
            parts.append(Part(late, Outcome(status="skipped")))
        return self._settle(call, tuple(parts), (), now)

    # ---- clients' other wishes

    def _interrupt(self, client: Client, command: messages.Interrupt, body: bytes, now: float) -> list[Step]:
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        if not ranks:
            return []
        stop = msgspec.structs.replace(command, ranks=ranks, client=client.id)
        steps: list[Step] = [ToHosts(self._hosts(ranks), stop)]
        meant = [call for call in self._calls.values() if call.main_thread and command.target in (None, call.id)]
        for call in meant:
            if not set(call.ranks) & set(ranks):
                continue
            if call.held is not None and command.target is None and call.client != client.id:
                continue  # it waits its turn: a Stop is for what runs
            if call.held is not None:
                steps += self._settle(call, (Part(call.ranks, Outcome(status="interrupted")),), (), now)
            elif call.client:
                call.stopped = call.stopped or set(call.ranks) - call.done <= set(ranks)
                call.back_by = now + HOLD_S
                call.stopping.update(set(ranks) & set(call.ranks))
                if self._groups == "ready" and not call.holding:
                    call.holding = True
                    hold = messages.HoldGroups(ranks=call.ranks, about=call.id)  # type: ignore[arg-type]
                    steps.append(ToHosts(self._hosts(call.ranks), hold))
                steps.append(Alarm(f"release {call.id}", HOLD_S))
        return steps

    def _reply_input(self, client: Client, command: messages.ReplyInput, body: bytes, now: float) -> list[Step]:
        call = self._calls.get(command.target)
        if call is not None:
            call.asking.discard(command.rank)
        return [ToHosts(self._hosts((command.rank,)), command, body)] if command.rank in self._ranks else []

    def _input_requested(self, host: int, report: messages.InputRequested, now: float) -> list[Step]:
        call = self._calls.get(report.call)
        if call is None or call.client not in self._clients:
            return [ToHosts((host,), messages.ReplyInput(target=report.call, rank=report.rank, text=None))]
        call.asking.add(report.rank)
        return [ToClient(call.client, report)]

    def _pass_on(self, client: Client, command: Any, body: bytes, now: float) -> list[Step]:
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        return [ToHosts(self._hosts(ranks), command, body)] if ranks else []

    def _kill_ranks(self, client: Client, command: messages.KillRanks, body: bytes, now: float) -> list[Step]:
        unknown = [rank for rank in command.ranks if rank not in self._ranks]
        if unknown:
            text = f"{name_ranks(unknown)}: this mesh has ranks {format_ranks(self._ranks)}"
            return self._refuse(client, command.call, "MeshShapeError", text)
        return [
            ToHosts(self._hosts(command.ranks), command, body),
            ToClient(client.id, messages.Answered(call=command.call)),
        ]

    def _ask_status(self, client: Client, command: messages.AskStatus, body: bytes, now: float) -> list[Step]:
        return [ToClient(client.id, messages.Answered(call=command.call, info=self.info()))]

    def _ask_history(self, client: Client, command: messages.AskHistory, body: bytes, now: float) -> list[Step]:
        return [ToClient(client.id, messages.Answered(call=command.call, history=self._history.entries()))]

    def _ask_logs(self, client: Client, command: messages.AskLogs, body: bytes, now: float) -> list[Step]:
        if command.rank not in self._ranks:
            text = f"rank {command.rank} is not in this mesh of ranks {format_ranks(self._ranks)}"
            return self._refuse(client, command.call, "MeshShapeError", text)
        self._questions[command.call] = client.id
        return [ToHosts(self._hosts((command.rank,)), command, body)]

    def _host_answered(self, host: int, report: messages.Answered, now: float) -> list[Step]:
        client = self._questions.pop(report.call, None)
        return [ToClient(client, report)] if client is not None else []

    def _stop_mesh(self, client: Client, command: messages.StopMesh, body: bytes, now: float) -> list[Step]:
        self._stopping = True
        return [ToClient(client.id, messages.Answered(call=command.call)), Shutdown(f"stopped by a {client.kind}")]

    def _detach(self, client: Client, command: messages.Detach, body: bytes, now: float) -> list[Step]:
        client.orphan_ttl_s = float("inf") if command.orphan_ttl_s is None else command.orphan_ttl_s
        steps = [ToClient(client.id, messages.Answered(call=command.call))]
        leaving = [step for step in self.client_gone(client.id) if not _never(step)]
        return [*steps, *leaving]

    def _set_orphan_ttl(
        self, client: Client, command: messages.SetOrphanTtl, body: bytes, now: float
    ) -> list[Step]:
        client.orphan_ttl_s = command.orphan_ttl_s
        return []

    def _host_beat(self, host: int, report: messages.HostBeat, now: float) -> list[Step]:
        for info in report.ranks:
            known = self._ranks.get(info.rank)
            if known is not None and known.state != "dead":
                starting = self._start is not None and info.state == "idle"
                self._ranks[info.rank] = msgspec.structs.replace(info, state="starting") if starting else info
                self._told_at[info.rank] = now
        self._seeing.host_beat(report, now)
        return []

    # ---- helpers

    def _refuse(self, client: Client, call: str, error: str, text: str) -> list[Step]:
        return [ToClient(client.id, messages.Refused(call=call, error=error, text=text))]  # type: ignore[arg-type]

    def _hosts(self, ranks: Ranks) -> tuple[int, ...]:
        return tuple(sorted({self._host_of[rank] for rank in ranks}))

    def _all_hosts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._host_of.values())))


def spread(world_size: int, num_hosts: int) -> dict[int, int]:
    """The host of each rank: neighbours together, no host with more than one rank above another's. Four on three hosts
    are 2, 1 and 1."""
    fewest, more = divmod(world_size, num_hosts)
    sizes = [fewest + (host < more) for host in range(num_hosts)]
    return dict(enumerate(host for host, size in enumerate(sizes) for _ in range(size)))


def discard_notice(label: str) -> str:
    """What to do where the process groups of NCCL are formed anew."""
    return (
        f"the process groups are formed anew. Work that {label or 'the call'} had enqueued behind a collective that "
        f"was given up may have run on the GPU with garbage: discard the step in which {label or 'it'} ended (run it "
        "again from the state before it, or load the last checkpoint)"
    )


def _never(step: Step) -> bool:
    return isinstance(step, Alarm) and step.delay_s == float("inf")
