"""The service thread of a rank: it replies while the main thread is busy.

It streams output, sends heartbeats, answers queries (completion, inspection, previews), and frees threads that wait in
collectives. It runs no user code. It has its own socket, so a long message to or from the main thread never delays a
heartbeat. Only C code that holds the GIL does, and the host can tell that from the silence. No exception ends it: the
first of each kind is reported to the user.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import zmq

from meshbook.clock import monotonic
from meshbook.errors import message_of, traceback_of
from meshbook.ids import CallId
from meshbook.rank import actor_hooks, scalars
from meshbook.rank.call_state import CallState
from meshbook.rank.checkpoints.door import CheckpointDoor
from meshbook.rank.device import select_device
from meshbook.rank.imported_modules import ImportedModules
from meshbook.rank.main_thread import MainThreadProbe
from meshbook.rank.objects import RankObjects
from meshbook.rank.outbox import Outbox
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.output.output_pacing import OutputPacer
from meshbook.rank.preemption import PreemptionPoint, TerminationSignal
from meshbook.rank.probes import Probes, are_probes_enabled
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.rank.reporter import Reporter, connect_to_host
from meshbook.rank.snapshot import Snapshotter
from meshbook.rank.text import sanitize_text
from meshbook.wire import codec, messages, spawn
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.loop import Loop

T = TypeVar("T")


class InterruptCall(Protocol):
    def __call__(self, call_id: CallId, /, *, hard: bool) -> None:
        """Interrupt a call. hard: it is a second Stop."""


HEARTBEAT_S = 1.0

# Seconds that an unused shared segment is retained for the next value to send.
_IDLE_SEGMENT_S = 30.0

# Limit of one traceback in the rank's log.
_MAX_TRACEBACK_CHARS = 8000
_FINAL_OUTPUT_TIMEOUT_S = 1.0  # how long an exiting rank waits for the host to confirm its final output

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Service:
    """The service thread; call `start()` once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: spawn.RankConfig,
        device: str,
        state: CallState,
        groups: RankGroups,
        objects: RankObjects,
        *,
        output: OutputBuffer,
        reporter: Reporter,
        snapshotter: Snapshotter,
        query_handlers: Mapping[type, Callable[[Any], Any]],
        interrupt_call: InterruptCall,
        leave_debugger: Callable[[messages.LeaveDebugger], None],
        running_file: Callable[[], str | None],
        checkpoints: CheckpointDoor,
        outbox: Outbox,
        preemption: PreemptionPoint,
        termination: TerminationSignal,
    ) -> None:
        """
        Args:
            query_handlers: by message type, the function that answers it with the content of a `RankReply`.
            interrupt_call: interrupts this call, even if the main thread has not begun it yet; never the one after it.
            running_file: returns the file name of the running cell.
        """
        self._context, self._config, self._device, self._state = context, config, device, state
        self._groups, self._objects = groups, objects
        self._output, self._reporter, self._snapshotter = output, reporter, snapshotter
        self._query_handlers, self._interrupt_call, self._running_file = query_handlers, interrupt_call, running_file
        self._leave_debugger = leave_debugger
        self._checkpoints, self._outbox = checkpoints, outbox
        self._preemption, self._termination = preemption, termination
        self.thread: threading.Thread | None = None
        self._main_thread = MainThreadProbe(threading.get_ident())
        log = scalars.ScalarLog()
        scalars.install(log)
        self._modules = ImportedModules()
        self._probes = Probes(config.rank, groups.ring, log) if are_probes_enabled() else None
        self._pacer = OutputPacer(monotonic())
        self._is_exiting = self._is_final_output_sent = False
        self._exit_confirmed = threading.Event()  # the host has received everything
        self._is_device_selected = False  # this thread's current CUDA device is the rank's
        self._activity = "starting"
        self._reported_failures: set[tuple[str, type]] = set()  # reported to the user
        self._loop = Loop(on_error=self._report_failure)
        self._socket: LinkedDealer

    def start(self, ready: messages.RankReady) -> None:
        self.thread = threading.Thread(target=self._run, args=(ready,), name="meshbook-service", daemon=True)
        self.thread.start()

    def _run(self, ready: messages.RankReady) -> None:
        # Signals belong to the main thread: one delivered here would reach it late and indirectly.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._socket = connect_to_host(self._context, self._config.service_address, self._config)
        self._socket.introduce(codec.encode_body(ready))
        self._loop.watch_socket(self._socket.socket, self._on_frames)
        for fd in self._output.poll_fds():
            self._loop.watch_fd(fd, self._on_output_ready)
        self._loop.watch_fd(self._outbox.fd, self._send_reports)
        self._loop.watch_fd(self._termination.fd, self._termination_requested)
        self._schedule_heartbeat(0.0)
        self._loop.run()

    def _send_reports(self) -> None:
        self._activity = "sending reports of other threads"
        for report in self._outbox.drain():
            self._send(report)

    def _termination_requested(self) -> None:
        self._activity = "reporting SIGTERM"
        self._termination.drain()
        self._send(messages.RankTerminating(rank=self._config.rank))

    def _send(self, report: messages.RankReport) -> None:
        self._socket.send(codec.encode_body(report))

    # ---- failures of this thread

    def _report_failure(self, error: BaseException) -> None:
        """Report a failure to the host, once for each kind. Called by the loop, which continues.

        The host shows the user a sentence, and writes the traceback to the rank's log.
        """
        kind = (self._activity, type(error))
        if kind in self._reported_failures:
            return
        self._reported_failures.add(kind)
        self._send(
            messages.ServiceFailed(
                rank=self._config.rank,
                activity=self._activity,
                error=sanitize_text(f"{type(error).__name__}: {message_of(error)}"),
                traceback=sanitize_text(traceback_of(error), _MAX_TRACEBACK_CHARS),
            )
        )

    def _attempt(self, activity: str, function: Callable[[], T]) -> T | None:
        """Return the result of `function`; None if it failed, which is reported."""
        try:
            return function()
        except BaseException as error:
            self._activity = activity
            self._report_failure(error)
            return None

    # ---- output

    def _on_output_ready(self) -> None:
        self._activity = "reading output"
        self._output.pump()
        if self._is_exiting and not self._is_final_output_sent:
            self._is_final_output_sent = True
            self._send_reports()
            self._reporter.send_output(self._socket)
            self._send(messages.RankExiting(rank=self._config.rank))
        else:
            self._schedule_flush(self._pacer.output_ready(monotonic()))

    def _schedule_flush(self, delay_s: float | None) -> None:
        if delay_s is not None:
            self._loop.call_later(delay_s, self._flush_output)

    def _flush_output(self) -> None:
        """Send output if the pacer allows; if not, try again later."""
        self._activity = "sending output"
        self._record_wakeup(self._pacer.deadline)
        retry_in_s = self._pacer.flush_due(monotonic())
        if retry_in_s is None:
            self._pacer.sent(self._reporter.send_output(self._socket))
        self._schedule_flush(retry_in_s)

    # ---- commands

    def _on_frames(self, frames: list[bytes]) -> None:
        self._activity = "reading a message"
        body = self._socket.accept(frames)
        if body is not None:
            self._on_command(codec.rank_commands.decode_body(body))

    def _on_command(self, command: messages.RankCommand) -> None:
        self._activity = f"carrying out {type(command).__name__}"
        self._select_device()
        handler = self._query_handlers.get(type(command))
        if handler is not None:
            try:
                answered = handler(command)
            except BaseException as error:  # user code may raise anything
                answered = {"error": f"{type(error).__name__}: {message_of(error)}"}
            query: Any = command
            self._send_reports()  # of what the answer is about
            self._send(messages.RankReply(rank=self._config.rank, call=query.call, content=answered))
            return
        match command:
            case messages.Interrupt(target=target, hard=hard) if target is not None:
                self._interrupt_call(target, hard=hard)
            case messages.LeaveDebugger():
                self._leave_debugger(command)
            case messages.RelayBytes(piece=piece):
                actor_hooks.piece_received(piece)
            case messages.AbortCollectives(reason=reason, interrupt=interrupt, generation=generation, call=about):
                self._groups.abort(reason, interrupt=interrupt, generation=generation, call=about)
            case messages.HoldCollectives(about_call=about):
                self._groups.hold_after(about)
            case messages.ResumeCollectives():
                self._groups.positions_checked(command)
            case messages.PromptsOpen(is_open=is_open):
                self._groups.clock.hold(is_open)
            case messages.RanksLeft():
                self._groups.ranks_left(command)
            case messages.ExitsChecked(number=number):
                self._groups.exits.answer(number)
            case messages.Release(refs=refs, segments=segments, client=client):
                self._objects.values.release(refs, segments)
                if client is not None:
                    self._objects.drop_client(client)
            case messages.TakeSnapshots():
                self._send_snapshot(command)
            case messages.WriteCheckpoint() | messages.WriteCheckpointMetadata() | messages.DropCheckpoint():
                self._checkpoints.carry_out(command)
            case messages.SetPreemptionPoint(about_call=about, at=at, reason=reason):
                self._preemption.decide(about, at, reason)
            case messages.Exit() if self._is_exiting:
                self._exit_confirmed.set()
            case messages.Exit():
                try:
                    threading.Thread(target=self._exit_process, name="meshbook-end", daemon=True).start()
                except RuntimeError:  # the process cannot start more threads; its output can still be sent
                    self._reporter.send_output(self._socket)
                    os._exit(0)

    def _select_device(self) -> None:
        """Make the rank's GPU this thread's current device, once CUDA is in use.

        CUDA calls (such as querying an event) use the thread's device, which is GPU 0 at first: every rank would create
        a context there, half a gigabyte each.
        """
        if self._is_device_selected or not self._device.startswith("cuda:"):
            return
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            select_device(self._device)
            self._is_device_selected = True

    def _exit_process(self) -> None:
        try:
            actor_hooks.end_actors()
            self.send_final_output()
        finally:
            os._exit(0)

    def send_final_output(self) -> None:
        """Send what the exiting process has printed. Call it on any thread but the service thread.

        Blocks until the host has received it, for a second at most: a sent message may still be queued in this process.
        """
        self._output.flush()
        self._is_exiting = True
        self._output.wake()
        self._exit_confirmed.wait(_FINAL_OUTPUT_TIMEOUT_S)

    def _send_snapshot(self, command: messages.TakeSnapshots) -> None:
        """Send a snapshot of this rank; a failure is reported in it as a problem."""
        rank = self._config.rank
        try:
            snapshot = self._snapshotter.take(
                health=None if self._probes is None else self._probes.health,
                num_collectives=command.num_collectives,
                endpoints=actor_hooks.snapshot_endpoints(),
            )
            body = codec.encode_body(messages.RankSnapshotReply(rank=rank, call=command.call, snapshot=snapshot))
        except Exception as error:
            why = sanitize_text(f"{type(error).__name__}: {message_of(error)}")
            problem = f"the rank could not look at itself ({why})"
            snapshot = messages.RankSnapshot(rank=rank, problem=problem)
            body = codec.encode_body(messages.RankSnapshotReply(rank=rank, call=command.call, snapshot=snapshot))
        self._socket.send(body)

    # ---- heartbeats

    def _schedule_heartbeat(self, delay_s: float) -> None:
        scheduled_at = monotonic() + delay_s
        self._loop.call_later(delay_s, lambda: self._send_heartbeat(scheduled_at))

    def _send_heartbeat(self, scheduled_at: float) -> None:
        """Send a heartbeat, without what cannot be measured: a rank that sends none would count as silent."""
        self._activity = "sending a beat"
        self._record_wakeup(scheduled_at)
        self._schedule_heartbeat(HEARTBEAT_S)
        self._attempt("choosing the GPU of this thread", self._select_device)
        self._attempt("completing futures", self._groups.complete_futures)
        self._attempt("ending collectives that take too long", self._groups.end_overdue)
        self._attempt("giving back shared memory", lambda: self._objects.pool.trim(_IDLE_SEGMENT_S))
        probes = self._probes
        measured = None
        if probes is not None:
            measured = self._attempt("measuring", lambda: probes.measure(self._device, self._is_progressing))
        line = self._attempt("finding the line of the cell", lambda: self._main_thread.line_in(self._running_file()))
        self._send(
            messages.RankHeartbeat(
                rank=self._config.rank,
                call=self._state.running_call_id,
                line=line,
                rss_bytes=read_rss_bytes(),
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                released_segments=self._objects.reader.drain_released(),
                metrics=measured,
                modules=self._attempt("finding imported modules", self._modules.new) or (),
            )
        )
        if self._output.has_pending():
            self._schedule_flush(self._pacer.output_ready(monotonic(), 0.0))

    def _record_wakeup(self, scheduled_at: float | None) -> None:
        """Record how late this thread runs after monotonic time `scheduled_at`: another thread may hold the GIL."""
        if self._probes is not None and scheduled_at is not None:
            self._probes.record_wakeup_delay(monotonic() - scheduled_at)

    def _is_progressing(self) -> bool:
        return self._state.running is None or self._main_thread.has_moved()


def read_rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no file descriptors left; a rank without heartbeats would count as silent
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
