"""One client's session with a mesh: the state that `Mesh` and all its views share.

Sends commands, waits for them in the foreground (interruptible, replying to `input()`) or returns futures, fetches
values, and releases unused references. It displays nothing itself: output goes to the handler it is given.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from meshbook.controller.connection import SupervisorConnection, stuck_notice
from meshbook.controller.futures import MeshFuture
from meshbook.controller.results import CellResult, RankValues, error_from
from meshbook.controller.sigint import SigintLatch
from meshbook.errors import CellError, CellInterrupted, MeshbookError, MeshTimeout, NotAttached, RankLost, StartError
from meshbook.fold import rendering
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank import expressions
from meshbook.wire import messages, pickling, stop_timing
from meshbook.wire.buffers import ReceiveBuffer, SegmentPool, SegmentReader

OutputHandler = Callable[[tuple[messages.FoldedItem, ...]], None]
InputHandler = Callable[[messages.InputRequest], str | None]

_STOP_TIMEOUT_S = 15.0
_PULL_INLINE_BYTES = 1 << 16


_WAKE = object()  # in a call's inbox: a SIGINT is pending


@dataclass(frozen=True)
class AbandonedCall:
    """An interrupted call that is no longer waited for, because some ranks do not return from it."""

    command: Any
    future: Future[Any]
    ranks: Ranks  # the ranks that do not return
    reason: str


@dataclass(frozen=True)
class _SilenceChanged:
    """The supervisor stopped replying, or replies again."""

    silent: bool


class Session:
    """An open connection to a mesh and this process's state of it."""

    def __init__(self, connection: SupervisorConnection, *, stop_at_exit: bool) -> None:
        self.connection = connection
        self.name = connection.connection_info.name
        self.info = connection.welcome.info
        self.axes: MeshAxes | None = _axes_of(self.info)
        self.ended: str | None = None  # why the mesh ended
        self.stopping = False  # this process is stopping it
        self.lost_listeners: list[Callable[[tuple[messages.RankExited, ...]], None]] = []
        self.before_call_hooks: list[Callable[[], object]] = []  # layers above send what must precede a call
        self.in_flight_calls: list[Callable[[], list[str] | None]] = []  # layers above return their calls in flight
        self.extras: dict[str, Any] = {}  # state of layers above for the session's lifetime, by name
        self._pool = SegmentPool()
        self._reader = SegmentReader()
        self._ended_event = threading.Event()
        self._refs_to_release: deque[str] = deque()
        self._interrupted_at = float("-inf")
        # Until then, a SIGINT is the second half of a Stop that already arrived as a message.
        self._expect_sigint_until = float("-inf")
        self._interrupted_call: str | None = None  # the call that the last Stop interrupted
        self._hard_interrupt_at: float | None = None
        self._last_cell_number = self.info.cells_run
        self._foreground_call: tuple[str, Ranks] | None = None  # the foreground call
        self._foreground_inbox: queue.SimpleQueue[Any] | None = None  # the foreground call's inbox
        self.abandoned_calls: dict[str, AbandonedCall] = {}  # by call id
        connection.listeners.silence_changed.append(self._silence_changed)
        connection.listeners.ranks_changed.append(self._ranks_changed)
        connection.listeners.mesh_stopped.append(self._mesh_stopped)
        connection.listeners.segments_released.append(self._segments_released)
        connection.listeners.idle.append(self.release_unused)
        self._exit_finalizer = weakref.finalize(self, _stop_and_close, connection, self._ended_event, stop_at_exit)

    # ---- start, stop, detach

    def start(self, axes: MeshAxes, spec: messages.MeshSpec, *, timeout_s: float) -> messages.MeshReady:
        """Start the ranks and wait until their process group is ready. Blocks.

        Raises:
            StartError: they did not start; nothing is left running.
            MeshInUse: this mesh has ranks already.
        """
        call = self.connection.next_call_id()
        future = self.connection.request(messages.StartMesh(call=call, spec=spec))
        try:
            ready: messages.MeshReady = future.result(timeout_s)
        except TimeoutError:
            self.stop()
            raise StartError(
                f"{axes.size} ranks did not come up within {timeout_s:.0f} s and were stopped; give them more time "
                "with start_timeout_s in meshbook.toml, or look at what they wait for with fewer ranks"
            ) from None
        except NotAttached as error:
            raise StartError(str(error)) from error
        except BaseException:
            self.stop()
            raise
        self.axes, self.info = axes, ready.info
        return ready

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
        self._pool.close()

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

    @property
    def is_idle(self) -> bool:
        """Whether no call is in the foreground."""
        return self._foreground_call is None

    def living(self, ranks: Ranks) -> Ranks:
        lost = set(self.lost)
        return tuple(rank for rank in ranks if rank not in lost) if lost else ranks

    def status(self, timeout_s: float = 5.0) -> messages.MeshInfo:
        self.check_attached()
        reply = self._call_supervisor(messages.QueryStatus(call=self.connection.next_call_id()), timeout_s)
        assert reply.info is not None
        self.info = reply.info
        return reply.info

    def history(self) -> tuple[messages.HistoryEntry, ...]:
        self.check_attached()
        return self._call_supervisor(messages.QueryHistory(call=self.connection.next_call_id()), 5.0).history

    def logs(self, rank: int, limit_bytes: int) -> str:
        self.check_attached()
        command = messages.QueryLogs(call=self.connection.next_call_id(), rank=rank, limit_bytes=limit_bytes)
        return self._call_supervisor(command, 5.0).text or ""

    def kill(self, ranks: Ranks, signal: int) -> None:
        self.check_attached()
        self._call_supervisor(messages.KillRanks(call=self.connection.next_call_id(), ranks=ranks, signal=signal), 5.0)

    def _call_supervisor(self, command: Any, timeout_s: float) -> messages.CommandReply:
        try:
            reply: messages.CommandReply = self.connection.request(command).result(timeout_s)
        except TimeoutError:
            raise MeshTimeout(f"{self.connection.describe_silence()} (asked {timeout_s:g} s ago)") from None
        return reply

    # ---- calls

    def request(self, command: Any, **handlers: Any) -> Future[Any]:
        """Send a command for ranks; the future resolves to its CallFinished."""
        self.check_attached()
        if isinstance(command, messages.MAIN_THREAD_COMMANDS):
            for before in self.before_call_hooks:
                before()
        self.release_unused()
        return self.connection.request(command, **handlers)

    def run_foreground(
        self, command: Any, *, on_output: OutputHandler | None = None, on_input: InputHandler | None = None
    ) -> messages.CallFinished:
        """Send a command and wait for its end on this thread, handling its output and input() requests.

        KeyboardInterrupt stops the ranks and continues to wait for them, as `wire.stop_timing` describes; a second
        within 5 s escalates.

        Raises:
            CellInterrupted: some ranks do not return from a Stop. The call stays in `abandoned_calls` until they do.
        """
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        handlers: dict[str, Any] = {"on_input": inbox.put}
        if on_output is not None:
            handlers["on_output"] = inbox.put
        sigint = SigintLatch(wake=lambda: inbox.put(_WAKE))
        with sigint:
            self._foreground_call = (command.call, command.ranks)
            try:
                future = self.request(command, **handlers)
            except KeyboardInterrupt:  # the command may or may not have been sent
                self.interrupt(command.ranks, target=command.call)
                self._foreground_call = None
                raise
            except BaseException:
                self._foreground_call = None
                raise
            self._wait_foreground(command, future, inbox, on_output, on_input, sigint)
        return self._foreground_result(future, sigint)

    def wait_foreground(
        self,
        command: Any,
        future: Future[Any],
        *,
        inbox: queue.SimpleQueue[Any] | None = None,
        on_output: OutputHandler | None = None,
        on_input: InputHandler | None = None,
    ) -> messages.CallFinished:
        """Wait for a command that was already sent, as the foreground call. See `run_foreground`."""
        inbox = inbox if inbox is not None else queue.SimpleQueue()
        sigint = SigintLatch(wake=lambda: inbox.put(_WAKE))
        with sigint:
            self._wait_foreground(command, future, inbox, on_output, on_input, sigint)
        return self._foreground_result(future, sigint)

    def _wait_foreground(
        self,
        command: Any,
        future: Future[Any],
        inbox: queue.SimpleQueue[Any],
        output_handler: OutputHandler | None,
        on_input: InputHandler | None,
        sigint: SigintLatch,
    ) -> None:
        try:
            self._foreground_call, self._foreground_inbox = (command.call, command.ranks), inbox
            show = output_handler if output_handler is not None else lambda items: None
            on_output = inbox.put if output_handler is not None else None
            self.connection.set_call_handlers(command.call, on_output=on_output, on_input=inbox.put, on_stuck=inbox.put)
            if self.connection.silent:
                inbox.put(_SilenceChanged(True))
            self._pump_inbox(command, future, inbox, show, on_input, sigint)
        except BaseException:
            self._expect_sigint_until = float("-inf")
            raise
        finally:
            self._foreground_call = self._foreground_inbox = self._hard_interrupt_at = None

    def _foreground_result(self, future: Future[Any], sigint: SigintLatch) -> messages.CallFinished:
        """Return the result of a finished call, after SIGINT handling is restored."""
        until, self._expect_sigint_until = self._expect_sigint_until, float("-inf")
        # Stop reaches a notebook twice, and the second half may arrive after the call has ended.
        if sigint.pop() and time.monotonic() > until:
            signal.raise_signal(signal.SIGINT)
        finished: messages.CallFinished = future.result()
        return finished

    def _pump_inbox(
        self,
        command: Any,
        future: Future[Any],
        inbox: queue.SimpleQueue[Any],
        show: OutputHandler,
        on_input: InputHandler | None,
        sigint: SigintLatch,
    ) -> None:
        future.add_done_callback(lambda _: inbox.put(None))
        while True:
            try:
                item = inbox.get(timeout=1.0 if self._hard_interrupt_at is not None else None)
                if item is None:
                    break
                if sigint.pop():
                    self._on_sigint()
                if item is _WAKE:
                    continue
                if isinstance(item, messages.InputRequest):
                    self._reply_input(item, on_input, sigint)
                elif isinstance(item, messages.RanksStuck):
                    if self.was_interrupted(command.call):
                        raise self._abandon_call(command, future, item.ranks, item.reason)
                    show(stuck_notice(item).items)
                elif isinstance(item, _SilenceChanged):
                    if item.silent and self.was_interrupted(command.call):
                        raise self._abandon_call(command, future, command.ranks, self.connection.describe_silence())
                    show((self._silence_notice(item, command.ranks),))
                else:
                    show(item)
            except queue.Empty:
                if (
                    self._hard_interrupt_at is not None
                    and time.monotonic() - self._hard_interrupt_at > stop_timing.GIVE_UP_AFTER_S
                ):
                    reason = f"{name_ranks(command.ranks)} did not come back and could not be killed"
                    raise self._abandon_call(command, future, command.ranks, reason) from None
            except CellInterrupted:
                raise
            except KeyboardInterrupt:  # a second SIGINT before the first was processed, or one on another thread
                sigint.pop()
                self._on_sigint()
                if future.done():  # the item being processed is lost, possibly the end marker
                    inbox.put(None)

    def _on_sigint(self) -> None:
        """Handle a SIGINT: a new Stop, or the second half of one that arrived as a message."""
        if time.monotonic() > self._expect_sigint_until:
            self.interrupt_foreground()
        self._expect_sigint_until = float("-inf")

    def _abandon_call(self, command: Any, future: Future[Any], ranks: Ranks, reason: str) -> CellInterrupted:
        """Stop waiting for an interrupted call. Later output of its ranks is shown as orphan output."""
        self.connection.set_call_handlers(command.call)
        self.abandoned_calls[command.call] = AbandonedCall(command, future, ranks, reason)
        future.add_done_callback(lambda _: self.abandoned_calls.pop(command.call, None))
        label = getattr(command, "label", "") or "the call"
        one = len(ranks) == 1
        if self.connection.silent:
            summary = f"{label} was stopped here, but its ranks do not know: {reason}"
        else:
            summary = (
                f"{label} was stopped, but {name_ranks(ranks)} {'has' if one else 'have'} not come back: {reason}. "
                f"Press Stop again (or %mesh kill {format_ranks(ranks)}) to end {'it' if one else 'them'}; what "
                f"{'it holds' if one else 'they hold'} is lost then. Until then cells on "
                f"{'that rank' if one else 'those ranks'} wait; %mesh why, %mesh stacks and %%controller cells work"
            )
        error = CellInterrupted((), summary=summary)
        render_error(error)
        return error

    def _silence_changed(self, silent: bool) -> None:
        inbox = self._foreground_inbox
        if inbox is not None:
            inbox.put(_SilenceChanged(silent))

    def _silence_notice(self, silence: _SilenceChanged, ranks: Ranks) -> messages.RankDisplay:
        text = self.connection.describe_silence() if silence.silent else f"the supervisor of {self.name} answers again"
        return messages.RankDisplay(ranks=ranks, item=messages.Notice(text))

    def interrupt_foreground(self, *, may_escalate: bool = True, expect_sigint: bool = False) -> bool:
        """Interrupt the foreground call on its ranks, as the Stop button does. Thread-safe.

        A second Stop within 5 s also kills the ranks that do not return; so does one while no call is in the foreground
        and ranks have not returned from an earlier Stop.

        Args:
            may_escalate: False: never treat it as a second Stop.
            expect_sigint: the same Stop will also arrive as a SIGINT, soon, or later on a busy machine.

        Returns:
            Whether there was something to stop.
        """
        running = self._foreground_call
        now = time.monotonic()
        was_stopped = self.connection.continue_supervisor()
        if running is not None and expect_sigint:
            self._expect_sigint_until = now + stop_timing.SECOND_INTERRUPT_S
        if running is None:
            return may_escalate and self._kill_abandoned(now)
        since = now - self._interrupted_at if self._interrupted_call == running[0] else float("inf")
        if since < stop_timing.INTERRUPT_DEBOUNCE_S:
            return True
        hard = may_escalate and since < stop_timing.SECOND_INTERRUPT_S
        self._interrupted_call, self._interrupted_at = running[0], now
        if hard:
            self._hard_interrupt_at = now
        if self.connection.silent and not was_stopped:
            self._silence_changed(True)
        for abandoned in list(self.abandoned_calls.values()):
            self.interrupt(abandoned.command.ranks, target=abandoned.command.call, hard=hard)
        for get_calls in self.in_flight_calls:  # calls that run before the foreground call, oldest first
            for call in get_calls() or ():
                self.interrupt(running[1], target=call, hard=hard)
        self.interrupt(running[1], target=running[0], hard=hard)
        return True

    def _kill_abandoned(self, now: float) -> bool:
        """Handle Stop without a foreground call: kill the ranks that have not returned from the last Stop."""
        abandoned = list(self.abandoned_calls.values())
        if abandoned and now - self._interrupted_at >= stop_timing.INTERRUPT_DEBOUNCE_S:
            self._interrupted_at = now
            for call in abandoned:
                self.interrupt(call.ranks, target=call.command.call, hard=True)
        return bool(abandoned)

    def was_interrupted(self, call: str) -> bool:
        """Whether Stop was pressed while this was the foreground call."""
        return self._interrupted_call == call

    def interrupt(self, ranks: Ranks, *, target: str | None = None, hard: bool = False) -> None:
        self.connection.send(messages.Interrupt(ranks=ranks, target=target, hard=hard))  # type: ignore[arg-type]

    def _reply_input(self, request: messages.InputRequest, on_input: InputHandler | None, sigint: SigintLatch) -> None:
        # Other ranks' input requests may still be in flight when Stop ends one.
        text, interrupted = None, request.call == self._interrupted_call
        try:
            if on_input is not None and not interrupted:
                with sigint.handler_restored():
                    text = on_input(request)
        except EOFError:
            pass
        except KeyboardInterrupt:
            interrupted = True
            self.interrupt_foreground()
        reply = messages.InputReply(target=request.call, rank=request.rank, text=text, interrupted=interrupted)
        self.connection.send(reply)

    def cell_command(self, source: str, ranks: Ranks, *, number: int | None = None, **options: Any) -> messages.RunCell:
        """Return the command for a cell, with the same number on all ranks so that equal tracebacks can be folded."""
        if number is None:
            self._last_cell_number += 1
            number = self._last_cell_number
        return messages.RunCell(
            call=self.connection.next_call_id(), ranks=ranks, source=source, execution_count=number, **options
        )

    def call_command(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ranks: Ranks, **options: Any
    ) -> messages.CallFunction:
        payload = self.dump((function, tuple(args), kwargs), ranks)
        return messages.CallFunction(call=self.connection.next_call_id(), ranks=ranks, function=payload, **options)

    def set_names(self, names: dict[str, Any], ranks: Ranks) -> None:
        """Bind names on the ranks, and wait until they are bound."""
        command = messages.SetNames(
            call=self.connection.next_call_id(),
            ranks=ranks,
            names=tuple(names),
            payload=self.dump(tuple(names.values()), ranks),
        )
        self.raise_for_status(self.run_foreground(command), command.ranks, label="push")

    def evaluate(self, path: expressions.Expression, ranks: Ranks, *, retain: bool = True) -> RankValues:
        """Evaluate an expression on the ranks' main threads.

        Args:
            retain: store large results on the ranks, to be fetched on demand.
        """
        command = messages.Evaluate(
            call=self.connection.next_call_id(),
            ranks=ranks,
            expression=self.dump(path, ranks),
            inline_limit=_PULL_INLINE_BYTES,
            retain=retain,
        )
        finished = self.run_foreground(command)
        self.raise_for_status(finished, ranks, label=str(path))
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
        return MeshFuture(
            source,
            finish,
            interrupt=lambda: self.interrupt(command.ranks, target=command.call),
            delivery_thread=self.connection.thread,
            label=getattr(command, "label", "") or "the call",
        )

    # ---- values

    def dump(self, thing: Any, ranks: Ranks) -> messages.Payload:
        return pickling.dump(thing, pool=self._pool, readers=ranks, persistent=self._persistent_id)

    def allocate_buffer(self, nbytes: int) -> ReceiveBuffer | None:
        """Return a buffer that ranks write into and that can back a value here."""
        return self._pool.receive_buffer(nbytes)

    def load(self, payload: messages.Payload) -> Any:
        return pickling.load(payload, reader=self._reader)

    def rank_values(self, parts: Sequence[messages.OutcomeGroup]) -> RankValues:
        assert self.axes is not None
        return RankValues(self.axes, parts, self.load, self._fetch, self._refs_to_release.append)

    def raise_for_status(self, finished: messages.CallFinished, ranks: Ranks, *, label: str) -> None:
        """Raise the error that the finished call stands for, if it failed."""
        error = error_from(finished, label)
        if error is not None:
            raise render_error(error)

    def cell_result(self, finished: messages.CallFinished, output: str) -> CellResult:
        bound = tuple(dict.fromkeys(name for part in finished.outcomes for name in part.outcome.bound_names))
        unbound = tuple(dict.fromkeys(name for part in finished.outcomes for name in part.outcome.deleted_names))
        error = error_from(finished)
        return CellResult(
            values=self.rank_values(finished.outcomes),
            output=output,
            errors=getattr(error, "failures", ()),
            seconds=finished.seconds,
            rank_seconds=finished.rank_seconds or {},
            bound=bound,
            unbound=unbound,
        )

    def _fetch(self, ranks: tuple[int, ...], ref: str) -> dict[int, Any]:
        values = self.evaluate(expressions.Expression(expressions.ResultRef(ref)), ranks, retain=False)
        return dict(values)

    def _persistent_id(self, thing: Any) -> str | None:
        """Return the pickling key of a handle of this mesh; the rank substitutes its own object."""
        key = getattr(type(thing), "_meshbook_key", None)
        if key is None:
            return None
        found: str = key(thing, self)
        return found

    # ---- releasing references

    def release_unused(self) -> None:
        """Release the references and segments that are unused here.

        Finalizers only queue them, because a finalizer may run inside a send.
        """
        segments = self._reader.drain_released()
        refs = []
        while self._refs_to_release:
            refs.append(self._refs_to_release.popleft())
        self._pool.trim(30.0)
        if (refs or segments) and not self.connection.closed and self.axes is not None:
            release = messages.Release(ranks=self.living(self.axes.ranks), refs=tuple(refs), segments=segments)
            self.connection.send(release)

    # ---- reports of the supervisor

    def _ranks_changed(self, report: messages.MeshChanged) -> None:
        self.info = report.info
        for exited in report.exited:
            self._pool.remove_reader(exited.rank)
        if report.exited:
            for listener in self.lost_listeners:
                listener(report.exited)

    def _segments_released(self, report: messages.SegmentsReleased) -> None:
        for segment in report.segments:
            self._pool.release(segment, reader=report.rank)

    def _mesh_stopped(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._ended_event.set()


def render_error(error: MeshbookError) -> MeshbookError:
    """Attach the ranks' tracebacks to an error, for IPython and for plain Python."""
    if isinstance(error, (CellError, RankLost)) and not error.rendered:
        lines = rendering.render_errors(
            error.failures, getattr(error, "succeeded", ()), None, released=getattr(error, "released", ())
        )
        if isinstance(error, RankLost):
            lines = [f"\x1b[31mRankLost\x1b[39m: {error}", *(["", *lines] if error.failures else [])]
        elif not error.failures:
            lines = [f"{type(error).__name__}: {error}"]
        error.rendered = tuple(lines)
        if error.failures:
            error.add_note(rendering.plain_text("\n".join(lines)))
    return error


def _axes_of(info: messages.MeshInfo) -> MeshAxes | None:
    return MeshAxes.of(dict(info.spec.axes)) if info.spec is not None else None


def _stop_and_close(connection: SupervisorConnection, ended: threading.Event, stop: bool) -> None:
    """Stop the mesh, or only close the connection: at exit or when the session is garbage-collected.

    Must not refer to the session.
    """
    try:
        if stop and not connection.closed and not ended.is_set():
            connection.continue_supervisor()  # a supervisor stopped by SIGSTOP could not exit
            connection.request(messages.StopMesh(call=connection.next_call_id(), now=True))
            ended.wait(_STOP_TIMEOUT_S)
    except MeshbookError:
        pass
    finally:
        connection.close()
