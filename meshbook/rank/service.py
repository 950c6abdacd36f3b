"""The service thread of a rank: it replies while the main thread is busy.

It streams output, sends heartbeats, answers queries (completion, inspection, previews), and frees threads that wait in
collectives. It runs no user code. It has its own socket, so a long message to or from the main thread never delays a
heartbeat. Only C code that holds the GIL does, and the host can tell that from the silence. No exception ends it: the
first of each kind is reported to the user.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from meshbook.clock import monotonic, sleep
from meshbook.ids import CallId
from meshbook.rank import introspection, scalars, snapshot
from meshbook.rank.capture import OutputBuffer
from meshbook.rank.probes import Probes, are_probes_enabled, sanitize_text
from meshbook.wire import codec, keys, messages, spawn
from meshbook.wire.loop import Loop

if TYPE_CHECKING:
    from meshbook.rank.executor import Executor

T = TypeVar("T")

HEARTBEAT_S = 1.0

# How long output is batched before it is sent: not noticeable to a reader, but longer than print() takes for its parts.
_OUTPUT_BATCH_S = 0.03

# Output limit of one rank: a burst, then a rate per second. Beyond it the buffer in `capture` fills, and its middle is
# dropped with a notice. 512 KiB/s from each of several ranks already exceeds a front end's own limit (1 MB/s), and far
# exceeds what anyone reads.
_OUTPUT_BURST_BYTES = 2 << 20
_OUTPUT_BYTES_PER_S = 512 << 10

# Seconds that an unused shared segment is retained for the next value to send.
_IDLE_SEGMENT_S = 30.0

# Actors are a sibling package of ranks, not a dependency, so they are imported by name, and only on request.
ACTORS_ENTRY_POINT = "meshbook.actors.runtime.rank_hooks:enable_actors"
# Number of samples, and seconds between them, to detect whether the main thread moves.
_PROGRESS_SAMPLES, _PROGRESS_SAMPLE_S = 5, 0.002
# Limit of one traceback in the rank's log.
_MAX_TRACEBACK_CHARS = 8000
_FINAL_OUTPUT_TIMEOUT_S = 1.0  # how long an exiting rank waits for the host to confirm its final output

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reporter:
    """Sends reports for both threads: output in order, each piece numbered, on the sending thread's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: spawn.RankConfig, output: OutputBuffer) -> None:
        self._config, self._output = config, output
        self._lock = threading.Lock()
        self._seq = 0
        self.work_socket = connect_to_host(context, config.work_address, config.rank)
        self.call_id: CallId | None = None  # the call that the output belongs to: the running one, else the last

    def send(self, report: messages.RankReport) -> None:
        """Send a report. Main thread only."""
        self.work_socket.send_multipart(codec.encode(report))

    def pop_remaining_output(self) -> tuple[tuple[messages.OutputItem, ...], int]:
        """Return the unsent output, and the number of the last piece that was sent."""
        with self._lock:
            return self._output.pop_items(), self._seq

    def send_output(self, socket: zmq.Socket[bytes]) -> int:
        """Send the available output on `socket`; return its approximate size in bytes."""
        with self._lock:
            items = self._output.pop_items()
            if not items:
                return 0
            self._seq += 1
            body = codec.encode_body(
                messages.RankOutput(rank=self._config.rank, call=self.call_id, seq=self._seq, items=items)
            )
            socket.send_multipart([codec.PROTOCOL, body])
            return len(body)


class Service:
    """The service thread; call `start()` once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: spawn.RankConfig,
        executor: Executor,
        output: OutputBuffer,
        reporter: Reporter,
    ) -> None:
        self._context, self._config, self._executor = context, config, executor
        self._output, self._reporter = output, reporter
        self.thread: threading.Thread | None = None
        self._main_thread = threading.get_ident()
        log = scalars.ScalarLog()
        scalars.install(log)
        self._probes = Probes(config.rank, executor.ring, log) if are_probes_enabled() else None
        self._budget = float(_OUTPUT_BURST_BYTES)
        self._budget_updated_at = monotonic()
        self._is_exiting = self._is_final_output_sent = False
        self._exit_confirmed = threading.Event()  # the host has received everything
        self._is_device_selected = False  # this thread's current CUDA device is the rank's
        self._activity = "starting"
        self._reported_failures: set[tuple[str, type]] = set()  # reported to the user
        self._loop = Loop(on_error=self._report_failure)
        self._socket: zmq.Socket[bytes]
        self._flush_deadline: float | None = None
        self._query_handlers: dict[type, Callable[[Any], Any]] = {
            messages.Complete: lambda ask: introspection.complete(executor.shell, ask.code, ask.cursor),
            messages.Inspect: lambda ask: introspection.inspect(executor.shell, ask.code, ask.cursor, ask.detail),
            messages.PreviewNames: lambda ask: introspection.peek(executor.shell, ask.names),
            messages.QueryPositions: lambda ask: msgspec.to_builtins(executor.position(ask.about_call)),
            messages.OpenActors: lambda ask: _load_entry_point(ACTORS_ENTRY_POINT)(
                executor.resolve, executor.resolvers, partial(select_device, executor.device)
            ),
        }

    def start(self, ready: messages.RankReady) -> None:
        self.thread = threading.Thread(target=self._run, args=(ready,), name="meshbook-service", daemon=True)
        self.thread.start()

    def _run(self, ready: messages.RankReady) -> None:
        # Signals belong to the main thread: one delivered here would reach it late and indirectly.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._socket = connect_to_host(self._context, self._config.service_address, self._config.rank)
        self._send(ready)
        self._loop.watch_socket(self._socket, self._on_command)
        for fd in self._output.poll_fds():
            self._loop.watch_fd(fd, self._on_output_ready)
        self._schedule_heartbeat(0.0)
        self._loop.run()

    def _send(self, report: messages.RankReport) -> None:
        self._socket.send_multipart(codec.encode(report))

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
                error=sanitize_text(f"{type(error).__name__}: {error}"),
                traceback=sanitize_text("".join(traceback.format_exception(error)), _MAX_TRACEBACK_CHARS),
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
            self._reporter.send_output(self._socket)
            self._send(messages.RankExiting(rank=self._config.rank))
        elif self._flush_deadline is None:
            self._schedule_flush(_OUTPUT_BATCH_S)

    def _schedule_flush(self, delay_s: float) -> None:
        self._flush_deadline = monotonic() + delay_s
        self._loop.call_later(delay_s, self._flush_output)

    def _flush_output(self) -> None:
        """Send output if the budget allows; if not, try again later."""
        self._activity = "sending output"
        now = monotonic()
        self._record_wakeup(self._flush_deadline)
        self._flush_deadline = None
        self._budget = min(_OUTPUT_BURST_BYTES, self._budget + (now - self._budget_updated_at) * _OUTPUT_BYTES_PER_S)
        self._budget_updated_at = now
        if self._budget <= 0:
            self._schedule_flush(4 * _OUTPUT_BATCH_S)
        else:
            self._budget -= self._reporter.send_output(self._socket)

    # ---- commands

    def _on_command(self, frames: list[bytes]) -> None:
        self._activity = "reading a message"
        command = codec.rank_commands.decode(frames)
        self._activity = f"carrying out {type(command).__name__}"
        self._select_device()
        handler = self._query_handlers.get(type(command))
        if handler is not None:
            try:
                answered = handler(command)
            except BaseException as error:  # user code may raise anything
                answered = {"error": f"{type(error).__name__}: {error}"}
            call = command.call  # type: ignore[union-attr]
            self._send(messages.RankReply(rank=self._config.rank, call=call, content=answered))
            return
        match command:
            case messages.Interrupt(target=target) if target is not None:
                self._executor.interrupt_call(target)
            case messages.AbortCollectives(reason=reason, interrupt=interrupt):
                self._executor.unblock(reason, interrupt=interrupt)
            case messages.HoldCollectives(about_call=about):
                self._executor.hold_collectives_after(about)
            case messages.ResumeCollectives():
                self._executor.groups_checked(command)
            case messages.RanksLeft():
                self._executor.ranks_left(command)
            case messages.Release(refs=refs, segments=segments, client=client):
                self._executor.release(refs, segments)
                if client is not None:
                    self._executor.drop_client(client)
            case messages.TakeSnapshots():
                self._send_snapshot(command)
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
        if self._is_device_selected or not self._executor.device.startswith("cuda:"):
            return
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            select_device(self._executor.device)
            self._is_device_selected = True

    def _exit_process(self) -> None:
        try:
            self.end_actors()
            self.send_final_output()
        finally:
            os._exit(0)

    def end_actors(self) -> None:
        """End the rank's actors before the rank itself.

        Blocks, for ACTORS_GRACE_S at most. Call it on any thread but the service thread.
        """
        actors = sys.modules.get(ACTORS_ENTRY_POINT.partition(":")[0])
        if actors is not None:
            actors.end_actors()

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
        actors = sys.modules.get(ACTORS_ENTRY_POINT.partition(":")[0])
        try:
            rank_snapshot = snapshot.take_snapshot(
                self._executor,
                main_thread=self._main_thread,
                health=None if self._probes is None else self._probes.health,
                num_collectives=command.num_collectives,
                stacks=command.stacks,
                endpoints=() if actors is None else actors.snapshot_endpoints(),
            )
            frames = codec.encode(messages.RankSnapshotReply(rank=rank, call=command.call, snapshot=rank_snapshot))
        except Exception as error:
            problem = f"the rank could not look at itself ({sanitize_text(f'{type(error).__name__}: {error}')})"
            failed_snapshot = messages.RankSnapshot(rank=rank, problem=problem)
            frames = codec.encode(messages.RankSnapshotReply(rank=rank, call=command.call, snapshot=failed_snapshot))
        self._socket.send_multipart(frames)

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
        self._attempt("completing futures", self._executor.complete_futures)
        self._attempt("giving back shared memory", lambda: self._executor.pool.trim(_IDLE_SEGMENT_S))
        probes, device = self._probes, self._executor.device
        measured = None
        if probes is not None:
            measured = self._attempt("measuring", lambda: probes.measure(device, self._is_main_thread_progressing))
        self._send(
            messages.RankHeartbeat(
                rank=self._config.rank,
                call=self._executor.running_call_id,
                line=self._attempt("finding the line of the cell", self._running_cell_line),
                rss_bytes=read_rss_bytes(),
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                released_segments=self._executor.reader.drain_released(),
                metrics=measured,
            )
        )
        if self._flush_deadline is None and self._output.has_pending():
            self._schedule_flush(0.0)

    def _record_wakeup(self, scheduled_at: float | None) -> None:
        """Record how late this thread runs after monotonic time `scheduled_at`: another thread may hold the GIL."""
        if self._probes is not None and scheduled_at is not None:
            self._probes.record_wakeup_delay(monotonic() - scheduled_at)

    def _is_main_thread_progressing(self) -> bool:
        """Whether the main thread is idle or makes progress, that is, has moved some moments later."""
        if self._executor.running_call_id is None:
            return True
        before = self._main_thread_position()
        for _ in range(_PROGRESS_SAMPLES):
            sleep(_PROGRESS_SAMPLE_S)
            if self._main_thread_position() != before:
                return True
        return False

    def _main_thread_position(self) -> tuple[int, int]:
        frame = sys._current_frames().get(self._main_thread)
        return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)

    def _running_cell_line(self) -> int | None:
        """Return the line of the running cell that the main thread executes, ignoring called functions."""
        filename = self._executor.shell.running_file
        if filename is None:
            return None
        frame = sys._current_frames().get(self._main_thread)
        while frame is not None:
            if frame.f_code.co_filename == filename:
                return frame.f_lineno
            frame = frame.f_back
        return None


def _load_entry_point(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


def select_device(device: str) -> None:
    """Make a rank's GPU the calling thread's current device. A new thread has GPU 0; no-op for a rank on the CPU."""
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


def read_rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def connect_to_host(context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int) -> zmq.Socket[bytes]:
    """Return a rank's DEALER socket to one of its host's sockets."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"r%d" % rank)
    keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket
