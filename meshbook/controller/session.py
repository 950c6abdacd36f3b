"""One client's session with a mesh: the state that `Mesh` and all its views share.

Builds commands and sends them; `foreground` waits for them, or a future does. `transfer` moves values. It displays
nothing itself: output goes to the handler it is given.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from meshbook.actors.runtime.faults import with_source
from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.connection import REPLY_TIMEOUT_S, SupervisorConnection, ask
from meshbook.controller.foreground import ForegroundCalls
from meshbook.controller.futures import MeshFuture
from meshbook.controller.missing_modules import add_hint
from meshbook.controller.results import CellResult, RankValues
from meshbook.controller.transfer import ValueTransfer
from meshbook.errors import MeshbookError, NotAttached, StartError
from meshbook.ids import Ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.previews import expressions
from meshbook.wire import keys, messages
from meshbook.wire.messages import MeshSpec, ProjectFile
from meshbook.wire.process_control import kill_supervisor

Files = tuple[ProjectFile, ...]

# Called with what a start waits for, whenever that changes.
OnWaiting = Callable[[messages.MeshStarting], object]

_STOP_TIMEOUT_S = 15.0
_PULL_INLINE_BYTES = 1 << 16

_TOO_SLOW = (
    "{} ranks did not come up within {:.0f} s and were stopped{}; give them more time with start_timeout_s in "
    "meshbook.toml, or look at what they wait for with fewer ranks"
)


class Session:
    """An open connection to a mesh and this process's state of it.

    Attributes:
        info: the supervisor's last description of the mesh; set by the listener thread alone, in order of arrival.
        axes: None: it has no ranks yet.
        ended: why the mesh ended; None: it runs.
        stopping: whether this process is stopping it.
        foreground: the calls that this process waits for.
        transfer: values between this process and the ranks.
        lost_listeners: called with the ranks that exited, on the listener thread.
        before_call_hooks: called before a command for the ranks' main threads, to send what must precede it.
        healed_hooks: called after ranks were replaced from here, to use the new ones.
        resized_hooks: called after the mesh was given other axes, on the listener thread.
        record_bytes: that a record of each cell may take on a rank; 0: cells are not recorded.
        extras: state of layers above for the session's lifetime, by name.
    """

    def __init__(self, connection: SupervisorConnection, *, stop_at_exit: bool) -> None:
        self.connection = connection
        self.name = connection.connection_info.name
        self.info = connection.welcome.info
        self.axes: MeshAxes | None = _axes_of(self.info)
        self.ended: str | None = None
        self.stopping = False
        self.foreground = ForegroundCalls(connection, self.request, self.interrupt)
        self.transfer = ValueTransfer(self._persistent_id, has_other_machines=lambda: _has_other_machines(self.info))
        self.lost_listeners: list[Callable[[tuple[messages.RankExited, ...]], None]] = []
        self.before_call_hooks: list[Callable[[], object]] = []
        self.healed_hooks: list[Callable[[], object]] = []
        self.resized_hooks: list[Callable[[], object]] = []
        self.extras: dict[str, Any] = {}
        self._ended_event = threading.Event()
        self._last_cell_number = self.info.cells_run
        self.fold: messages.Folding = "numbers"
        self.record_bytes = 0
        connection.listeners.ranks_changed.append(self._ranks_changed)
        connection.listeners.mesh_stopped.append(self._mesh_stopped)
        connection.listeners.segments_released.append(self.transfer.on_segments_released)
        connection.listeners.idle.append(self.release_unused)
        self._exit_finalizer = weakref.finalize(self, _stop_and_close, connection, self._ended_event, stop_at_exit)
        connection.listen()

    # ---- start, stop, detach

    def start(
        self, axes: MeshAxes, spec: MeshSpec, files: Files = (), *, timeout_s: float, on_waiting: OnWaiting
    ) -> None:
        """Start the ranks and wait until their process group is ready; queues, and files on their way, do not count.

        Raises:
            StartError: they did not start; nothing is left running.
            MeshInUse: this mesh has ranks already.
        """
        call = self.connection.next_call_id()
        command = messages.StartMesh(call=call, spec=spec, files=files)
        try:
            _request_start(self.connection, command, timeout_s, on_waiting)
        except TimeoutError:
            advice = _network_advice(self) if spec.on else ""
            self.stop()
            if self.connection.connection_info.is_alive:  # it is too busy to stop
                kill_mesh(self.connection.connection_info)
            raise StartError(_TOO_SLOW.format(axes.size, timeout_s, advice)) from None
        except NotAttached as error:
            raise StartError(str(error)) from error
        except BaseException:
            self.stop()
            raise
        self.axes = axes

    def stop(self) -> None:
        """Stop the mesh: every rank, the supervisor, their sockets. Waits until they have exited."""
        self.stopping = True
        self._exit_finalizer.detach()
        if self.ended is None and not self.connection.closed:
            _stop_and_close(self.connection, self._ended_event, stop=True)
        self.close()

    def detach(self, orphan_ttl_s: float | None = None) -> None:
        """Detach this process; without any client the mesh lives for `orphan_ttl_s` seconds (None: forever).

        Raises:
            NotAttached: the supervisor did not reply; this process has detached anyway.
        """
        self._exit_finalizer.detach()
        self.connection.continue_supervisor()
        call = self.connection.next_call_id()
        try:
            self.connection.request(messages.Detach(call=call, orphan_ttl_s=orphan_ttl_s)).result(_STOP_TIMEOUT_S)
        except TimeoutError:
            raise NotAttached(
                f"the mesh {self.name!r} did not answer within {_STOP_TIMEOUT_S:.0f} s as this process left it: it has "
                f"ended, or its supervisor is stuck; look with `meshbook list`, end it with `meshbook stop {self.name}`"
            ) from None
        finally:
            self.ended = "this process has left it"
            self.close()

    def close(self) -> None:
        self.connection.close()
        self.transfer.close()

    def disable_stop_at_exit(self) -> None:
        """Keep the mesh running after an orderly exit of this process."""
        self._exit_finalizer.detach()
        self._exit_finalizer = weakref.finalize(self, _stop_and_close, self.connection, self._ended_event, False)

    def check_attached(self) -> None:
        if self.ended is not None:
            raise NotAttached(f"the mesh {self.name!r} is no more: {self.ended}. Start one with %mesh start -n 4")

    # ---- state of the mesh

    @property
    def lost(self) -> Ranks:
        return tuple(rank.rank for rank in self.info.ranks if rank.state == "dead")

    def living(self, ranks: Ranks) -> Ranks:
        lost = set(self.lost)
        return tuple(rank for rank in ranks if rank not in lost) if lost else ranks

    def status(self, timeout_s: float = REPLY_TIMEOUT_S) -> messages.MeshInfo:
        reply = self.call_supervisor(messages.QueryStatus(call=self.connection.next_call_id()), timeout_s)
        assert reply.info is not None
        return reply.info

    def history(self) -> tuple[messages.HistoryEntry, ...]:
        return self.call_supervisor(messages.QueryHistory(call=self.connection.next_call_id())).history

    def logs(self, rank: int, limit_bytes: int) -> str:
        command = messages.QueryLogs(call=self.connection.next_call_id(), rank=rank, limit_bytes=limit_bytes)
        return self.call_supervisor(command).text or ""

    def kill(self, ranks: Ranks, signal: int) -> None:
        self.call_supervisor(messages.KillRanks(call=self.connection.next_call_id(), ranks=ranks, signal=signal))

    def call_supervisor(self, command: Any, timeout_s: float = REPLY_TIMEOUT_S) -> messages.CommandReply:
        """Send a command that the supervisor itself replies to, and return the reply. Blocks. Raises MeshTimeout."""
        self.check_attached()
        reply: messages.CommandReply = ask(self.connection, command, timeout_s)
        return reply

    # ---- calls

    def request(self, command: Any, **handlers: Any) -> Future[Any]:
        """Send a command for ranks; the future resolves to its CallFinished."""
        self.check_attached()
        if isinstance(command, messages.MainThreadCommand):
            for before in self.before_call_hooks:
                before()
        self.release_unused()
        return self.connection.request(command, **handlers)

    def interrupt(self, ranks: Ranks, *, target: str | None = None, hard: bool = False) -> None:
        """Interrupt a call on these ranks, or whatever they run. Does not wait.

        Args:
            hard: kill the ranks that do not return.
        """
        self.connection.send(messages.Interrupt(ranks=ranks, target=target, hard=hard))  # type: ignore[arg-type]

    def cell_command(self, source: str, ranks: Ranks, *, number: int | None = None, **options: Any) -> messages.RunCell:
        """Return the command for a cell, with the same number on all ranks so that equal tracebacks can be folded."""
        if number is None:
            self._last_cell_number += 1
            number = self._last_cell_number
        call = self.connection.next_call_id()
        options = {"fold": self.fold, "record_bytes": self.record_bytes, **options}
        return messages.RunCell(call=call, ranks=ranks, source=source, execution_count=number, **options)

    def call_command(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ranks: Ranks, **options: Any
    ) -> messages.CallFunction:
        payload = self.transfer.dump((function, tuple(args), kwargs), ranks)
        return messages.CallFunction(call=self.connection.next_call_id(), ranks=ranks, function=payload, **options)

    def set_names(self, names: dict[str, Any], ranks: Ranks, *, chosen_at: int | None = None) -> None:
        """Bind names on the ranks, and wait until they are bound."""
        call, payload = self.connection.next_call_id(), self.transfer.dump(tuple(names.values()), ranks, tuple(names))
        command = messages.SetNames(call, ranks, tuple(names), payload, chosen_at=chosen_at)
        self.run_for_values(command, "push")

    def evaluate(self, path: expressions.Expression, ranks: Ranks, *, retain: bool = True) -> RankValues:
        """Evaluate an expression on the ranks' main threads.

        Args:
            retain: store large results on the ranks, to be fetched on demand.
        """
        command = messages.Evaluate(
            call=self.connection.next_call_id(),
            ranks=ranks,
            expression=self.transfer.dump(path, ranks),
            inline_limit=_PULL_INLINE_BYTES,
            retain=retain,
        )
        return self.run_for_values(command, str(path))

    def run_for_values(self, command: Any, label: str | None = None) -> RankValues:
        """Run a command in the foreground and return its values; None: the command's own label.

        Raises:
            CellError, CellInterrupted, RankLost: it did not succeed on every rank.
        """
        finished = self.foreground.run(command)
        self.raise_for_status(finished, command.ranks, label=command.label if label is None else label)
        return self.rank_values(finished.outcomes)

    def query(self, command: Any, timeout_s: float = 2.0) -> tuple[messages.OutcomeGroup, ...]:
        """Query the ranks' service threads; return the replies within the timeout. Does not wait for a running cell."""
        try:
            finished: messages.CallFinished = self.request(command).result(timeout_s)
        except TimeoutError:
            return ()
        return finished.outcomes

    def future(
        self, source: Future[Any], command: Any, finish: Callable[[messages.CallFinished], Any]
    ) -> MeshFuture[Any]:
        future = MeshFuture[Any](
            getattr(command, "label", "") or "the call",
            interrupt=lambda: self.interrupt(command.ranks, target=command.call),
            delivery_thread=self.connection.thread,
        )
        source.add_done_callback(lambda _: future.resolve(lambda: finish(source.result())))
        return future

    # ---- results

    def rank_values(self, parts: Sequence[messages.OutcomeGroup]) -> RankValues:
        """Return the values of a call's outcomes; large ones are fetched when they are read."""
        assert self.axes is not None

        def fetch(ranks: Ranks, ref: str) -> dict[int, Any]:
            return dict(self.evaluate(expressions.Expression(expressions.ResultRef(ref)), ranks, retain=False))

        return RankValues(self.axes, parts, self.transfer.load, fetch, self.transfer.discard_ref)

    def raise_for_status(self, finished: messages.CallFinished, ranks: Ranks, *, label: str) -> None:
        """Raise the error that the finished call stands for, if it failed."""
        error = error_from(finished, label)
        if error is not None:
            raise add_hint(render_error(error, with_source), self.info.spec)

    def cell_result(self, command: Any, finished: messages.CallFinished, output: str) -> CellResult:
        """Return the result of a finished cell or call; `output`: what it printed.

        Raises:
            CellError, CellInterrupted, RankLost: it did not succeed on every rank.
        """
        self.raise_for_status(finished, command.ranks, label=command.label)
        outcomes = [part.outcome for part in finished.outcomes]
        return CellResult(
            values=self.rank_values(finished.outcomes),
            output=output,
            seconds=finished.seconds,
            rank_seconds=finished.rank_seconds or {},
            bound=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.bound_names)),
            unbound=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.deleted_names)),
        )

    def _persistent_id(self, thing: Any) -> str | None:
        """Return the pickling key of a handle of this mesh; the rank substitutes its own object."""
        key = getattr(type(thing), "_meshbook_key", None)
        if key is None:
            return None
        found: str = key(thing, self)
        return found

    # ---- releasing references

    def release_unused(self) -> None:
        """Have the ranks release the references and segments that are unused here."""
        refs, segments = self.transfer.drain_unused()
        if (refs or segments) and not self.connection.closed and self.axes is not None:
            release = messages.Release(ranks=self.living(self.axes.ranks), refs=refs, segments=segments)
            self.connection.send(release)

    # ---- reports of the supervisor

    def _ranks_changed(self, report: messages.MeshChanged) -> None:
        left = {rank.rank for rank in self.info.ranks} - {rank.rank for rank in report.info.ranks}
        self.info, axes = report.info, _axes_of(report.info)
        for rank in (*left, *(exited.rank for exited in report.exited)):
            self.transfer.remove_rank(rank)
        if self.axes is not None and axes is not None and axes != self.axes:
            self.axes = axes
            for hook in self.resized_hooks:
                hook()
        if report.exited:
            for listener in self.lost_listeners:
                listener(report.exited)

    def _mesh_stopped(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._ended_event.set()


def incarnations(session: Session, ranks: Ranks) -> tuple[int, ...]:
    """Return how often each of these ranks has got a new process, as last reported."""
    by_rank = {info.rank: info.incarnation for info in session.info.ranks}
    return tuple(by_rank.get(rank, 0) for rank in ranks)


def _has_other_machines(info: messages.MeshInfo) -> bool:
    return info.spec is not None and bool(info.spec.on)


def _axes_of(info: messages.MeshInfo) -> MeshAxes | None:
    return MeshAxes.of(dict(info.spec.axes)) if info.spec is not None else None


def _network_advice(session: Session) -> str:
    """Return what to look at, after a sentence, if a start waits though all machines have come; else ""."""
    try:
        hosts = session.call_supervisor(messages.QueryHosts(call=session.connection.next_call_id())).hosts
    except MeshbookError:
        return ""
    if len(hosts) < 2 or any(host.state != "ready" for host in hosts):
        return ""
    places = ", ".join(f"{host.name} at {host.facts.address}" for host in hosts if host.facts is not None)
    return f". All machines have come ({places}): can they connect to each other? meshbook doctor tries it"


def _request_start(
    connection: SupervisorConnection, command: messages.StartMesh, timeout_s: float, on_waiting: OnWaiting
) -> messages.MeshReady:
    """Start a mesh.

    Raises:
        TimeoutError: it did not start within this time, not counting the time in its launcher's queue.
    """
    reports: SimpleQueue[messages.MeshStarting | None] = SimpleQueue()  # None: the start has ended
    future = connection.request(command, on_report=reports.put)
    future.add_done_callback(lambda _: reports.put(None))
    deadline: float | None = time.monotonic() + timeout_s
    while (report := _next_report(reports, deadline)) is not None:
        if report.is_queued:
            deadline = None
        elif deadline is None:
            deadline = time.monotonic() + timeout_s
        on_waiting(report)
    ready: messages.MeshReady = future.result()
    return ready


def _next_report(
    reports: SimpleQueue[messages.MeshStarting | None], deadline: float | None
) -> messages.MeshStarting | None:
    """Wait for the next report until a monotonic time; None: for ever. Raises TimeoutError."""
    if deadline is None:
        return reports.get()
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    try:
        return reports.get(timeout=left_s)
    except Empty:
        raise TimeoutError from None


def kill_mesh(connection: keys.ConnectionInfo) -> None:
    """End a mesh whose supervisor does not: its ranks end with it."""
    with contextlib.suppress(ProcessLookupError):
        kill_supervisor(connection.pid)
    keys.remove_folder(keys.runtime_folder() / connection.name)


def _stop_and_close(connection: SupervisorConnection, ended: threading.Event, stop: bool) -> None:
    """Stop the mesh, or only close the connection: at exit or when the session is garbage-collected.

    Must not refer to the session.
    """
    try:
        if stop and not connection.closed and not ended.is_set():
            connection.continue_supervisor()  # a supervisor stopped by SIGSTOP could not exit
            connection.request(messages.StopMesh(call=connection.next_call_id()))
            ended.wait(_STOP_TIMEOUT_S)
    except MeshbookError:
        pass
    finally:
        connection.close()
