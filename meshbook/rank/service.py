"""A rank's second thread: it answers while the main thread is busy.

It streams output, beats, answers questions (completion, inspection, previews), and frees waiters from collectives. It
runs no user code. Its socket and its thread are its own, so a long message to or from the main thread never delays a
beat; only C code that keeps the GIL does, and the host can tell that from the silence. No exception ends it: the user
is told of the first of each kind.
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
from meshbook.rank import questions, scalars, snapshot
from meshbook.rank.capture import Output
from meshbook.rank.probes import Probes, plain, switched_on
from meshbook.wire import birth, codec, keys, messages
from meshbook.wire.loop import Loop

if TYPE_CHECKING:
    from meshbook.rank.executor import Executor

T = TypeVar("T")

BEAT_S = 1.0

# How long output gathers before it is sent: below what a reader notices, above the time print() takes for its parts.
_GATHER_S = 0.03

# What one rank may send of output: this much at once, then this much per second. Beyond it the buffer in `capture`
# fills, and is cut in the middle with a notice. 512 KiB/s from each of several ranks is already more than a front end's
# own limit (1 MB/s), and far more than anyone reads.
_BURST_BYTES = 2 << 20
_BYTES_PER_S = 512 << 10

# Seconds that a shared segment which nobody reads is kept for the next value that goes out.
_IDLE_SEGMENT_S = 30.0

# Actors stand beside ranks and not below them, so they are found by name, and only by who asks for them.
ACTORS = "meshbook.actors.runtime.door:open_door"
# How often, and after how many seconds, it is looked whether the main thread has moved.
_MOVES_LOOKS, _MOVES_LOOK_S = 5, 0.002
# What the rank's log keeps of one traceback.
_TRACEBACK_CHARS = 8000
_LAST_S = 1.0  # how long the end of the rank waits for the host to have heard its last words

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reporter:
    """What both threads report through: output in order, each piece numbered, on the socket of whoever sends it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], told: birth.RankBirth, output: Output) -> None:
        self._told, self._output = told, output
        self._lock = threading.Lock()
        self._seq = 0
        self.work = connect(context, told.work_address, told.rank)
        self.call: CallId | None = None  # the call whose output this is: the running one, else the last

    def send(self, report: messages.RankReport) -> None:
        """Send from the main thread."""
        self.work.send_multipart(codec.encode(report))

    def take_rest(self) -> tuple[tuple[messages.OutputItem, ...], int]:
        """What has not been sent yet, and the number of the last piece that has."""
        with self._lock:
            return self._output.take(), self._seq

    def say(self, socket: zmq.Socket[bytes]) -> int:
        """Send what there is of output on `socket`; its size in bytes, about."""
        with self._lock:
            items = self._output.take()
            if not items:
                return 0
            self._seq += 1
            body = codec.encode_body(
                messages.RankSaid(rank=self._told.rank, call=self.call, seq=self._seq, items=items)
            )
            socket.send_multipart([codec.PROTOCOL, body])
            return len(body)


class Service:
    """The service thread; `start()` it once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        told: birth.RankBirth,
        executor: Executor,
        output: Output,
        reporter: Reporter,
    ) -> None:
        self._context, self._told, self._executor = context, told, executor
        self._output, self._reporter = output, reporter
        self.thread: threading.Thread | None = None
        self._main_thread = threading.get_ident()
        log = scalars.ScalarLog()
        scalars.install(log)
        self._probes = Probes(told.rank, executor.ring, log) if switched_on() else None
        self._budget = float(_BURST_BYTES)
        self._budget_at = monotonic()
        self._ending = self._said_last = False
        self._heard_out = threading.Event()  # the host has everything
        self._on_device = False  # this thread's CUDA device is the rank's
        self._doing = "starting"
        self._failures: set[tuple[str, type]] = set()  # that the user has been told of
        self._loop = Loop(on_error=self._failed)
        self._socket: zmq.Socket[bytes]
        self._flush_due: float | None = None
        self._answers: dict[type, Callable[[Any], Any]] = {
            messages.Complete: lambda ask: questions.complete(executor.shell, ask.code, ask.cursor),
            messages.Inspect: lambda ask: questions.inspect(executor.shell, ask.code, ask.cursor, ask.detail),
            messages.Peek: lambda ask: questions.peek(executor.shell, ask.names),
            messages.AskPositions: lambda ask: msgspec.to_builtins(executor.position(ask.about)),
            messages.OpenActors: lambda ask: _found(ACTORS)(
                executor.resolve, executor.resolvers, partial(use_device, executor.device)
            ),
        }

    def start(self, ready: messages.RankReady) -> None:
        self.thread = threading.Thread(target=self._run, args=(ready,), name="meshbook-service", daemon=True)
        self.thread.start()

    def _run(self, ready: messages.RankReady) -> None:
        # Signals are the main thread's: one delivered here would only wake it through a detour, and late.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._socket = connect(self._context, self._told.service_address, self._told.rank)
        self._send(ready)
        self._loop.watch_socket(self._socket, self._hear)
        for fd in self._output.service_fds():
            self._loop.watch_fd(fd, self._output_waits)
        self._next_beat(0.0)
        self._loop.run()

    def _send(self, report: messages.RankReport) -> None:
        self._socket.send_multipart(codec.encode(report))

    # ---- what went wrong here

    def _failed(self, error: BaseException) -> None:
        """Tell the host, once for each kind: it shows the user a sentence, and keeps the traceback in the rank's log.
        Called by the loop, which goes on."""
        kind = (self._doing, type(error))
        if kind in self._failures:
            return
        self._failures.add(kind)
        self._send(
            messages.ServiceFailed(
                rank=self._told.rank,
                doing=self._doing,
                error=plain(f"{type(error).__name__}: {error}"),
                traceback=plain("".join(traceback.format_exception(error)), _TRACEBACK_CHARS),
            )
        )

    def _attempt(self, doing: str, act: Callable[[], T]) -> T | None:
        """What `act` returns; None if it failed, which is told."""
        try:
            return act()
        except BaseException as error:
            self._doing = doing
            self._failed(error)
            return None

    # ---- output

    def _output_waits(self) -> None:
        self._doing = "reading output"
        self._output.pump()
        if self._ending and not self._said_last:
            self._said_last = True
            self._reporter.say(self._socket)
            self._send(messages.RankEnding(rank=self._told.rank))
        elif self._flush_due is None:
            self._next_flush(_GATHER_S)

    def _next_flush(self, delay_s: float) -> None:
        self._flush_due = monotonic() + delay_s
        self._loop.call_later(delay_s, self._flush)

    def _flush(self) -> None:
        """Send output if the budget allows; if not, try again later."""
        self._doing = "sending output"
        now = monotonic()
        self._woke(self._flush_due)
        self._flush_due = None
        self._budget = min(_BURST_BYTES, self._budget + (now - self._budget_at) * _BYTES_PER_S)
        self._budget_at = now
        if self._budget <= 0:
            self._next_flush(4 * _GATHER_S)
        else:
            self._budget -= self._reporter.say(self._socket)

    # ---- commands

    def _hear(self, frames: list[bytes]) -> None:
        self._doing = "reading a message"
        command = codec.rank_commands.decode(frames)
        self._doing = f"carrying out {type(command).__name__}"
        self._use_device()
        answer = self._answers.get(type(command))
        if answer is not None:
            try:
                answered = answer(command)
            except BaseException as error:  # of code of the user's, which may raise anything
                answered = {"error": f"{type(error).__name__}: {error}"}
            call = command.call  # type: ignore[union-attr]
            self._send(messages.RankAnswered(rank=self._told.rank, call=call, answer=answered))
            return
        match command:
            case messages.Interrupt(target=target) if target is not None:
                self._executor.stop(target)
            case messages.Unblock(reason=reason, interrupt=interrupt):
                self._executor.unblock(reason, interrupt=interrupt)
            case messages.HoldGroups(about=about):
                self._executor.hold_after(about)
            case messages.GroupsChecked():
                self._executor.groups_checked(command)
            case messages.RanksLeft():
                self._executor.ranks_left(command)
            case messages.Release(refs=refs, segments=segments, client=client):
                self._executor.release(refs, segments)
                if client is not None:
                    self._executor.drop_client(client)
            case messages.TakeSnapshots():
                self._snap(command)
            case messages.Exit() if self._ending:
                self._heard_out.set()
            case messages.Exit():
                try:
                    threading.Thread(target=self._leave, name="meshbook-end", daemon=True).start()
                except RuntimeError:  # this process may have no more threads; what it printed can still be sent
                    self._reporter.say(self._socket)
                    os._exit(0)

    def _use_device(self) -> None:
        """Make the rank's GPU this thread's current device, once CUDA is in use. CUDA's calls (asking an event whether
        it has happened) use the thread's device, which is GPU 0 at first: every rank would make a context there, half
        a gigabyte each."""
        if self._on_device or not self._executor.device.startswith("cuda:"):
            return
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            use_device(self._executor.device)
            self._on_device = True

    def _leave(self) -> None:
        try:
            self.end_actors()
            self.finish()
        finally:
            os._exit(0)

    def end_actors(self) -> None:
        """The rank will end, and its actors before it. Blocks, for ACTORS_GRACE_S at most. For any thread but the
        service's own."""
        actors = sys.modules.get(ACTORS.partition(":")[0])
        if actors is not None:
            actors.end_actors()

    def finish(self) -> None:
        """The process is about to end: send what it has printed. Blocks until the host has it, for a second at most:
        a message that was sent may still be on its way out of this process. For any thread but the service's own."""
        self._output.drain()
        self._ending = True
        self._output.wake()
        self._heard_out.wait(_LAST_S)

    def _snap(self, command: messages.TakeSnapshots) -> None:
        """Look at this rank. What goes wrong is told as what is missing."""
        rank = self._told.rank
        actors = sys.modules.get(ACTORS.partition(":")[0])
        try:
            taken = snapshot.take(
                self._executor,
                main_thread=self._main_thread,
                health=None if self._probes is None else self._probes.health,
                num_collectives=command.num_collectives,
                stacks=command.stacks,
                endpoints=() if actors is None else actors.endpoints_seen(),
            )
            frames = codec.encode(messages.SnapshotTaken(rank=rank, call=command.call, snapshot=taken))
        except Exception as error:
            problem = f"the rank could not look at itself ({plain(f'{type(error).__name__}: {error}')})"
            empty = messages.RankSnapshot(rank=rank, problem=problem)
            frames = codec.encode(messages.SnapshotTaken(rank=rank, call=command.call, snapshot=empty))
        self._socket.send_multipart(frames)

    # ---- beats

    def _next_beat(self, delay_s: float) -> None:
        due = monotonic() + delay_s
        self._loop.call_later(delay_s, lambda: self._beat(due))

    def _beat(self, due: float) -> None:
        """Send a beat. What cannot be measured is left out of it: without a beat the rank would count as silent."""
        self._doing = "sending a beat"
        self._woke(due)
        self._next_beat(BEAT_S)
        self._attempt("choosing the GPU of this thread", self._use_device)
        self._attempt("completing futures", self._executor.complete_futures)
        self._attempt("giving back shared memory", lambda: self._executor.pool.trim(_IDLE_SEGMENT_S))
        probes, device = self._probes, self._executor.device
        measured = None
        if probes is not None:
            measured = self._attempt("measuring", lambda: probes.measure(device, self._moves))
        self._send(
            messages.RankBeat(
                rank=self._told.rank,
                call=self._executor.running,
                line=self._attempt("finding the line of the cell", self._line),
                rss_bytes=rss_bytes(),
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                released=self._executor.reader.take_released(),
                measured=measured,
            )
        )
        if self._flush_due is None and self._output.pending():
            self._next_flush(0.0)

    def _woke(self, due: float | None) -> None:
        """This thread wanted to run at monotonic time `due`. It runs late when another keeps the GIL."""
        if self._probes is not None and due is not None:
            self._probes.woke(monotonic() - due)

    def _moves(self) -> bool:
        """Whether the main thread has nothing to do, or gets on with it: it is somewhere else some moments later."""
        if self._executor.running is None:
            return True
        before = self._place()
        for _ in range(_MOVES_LOOKS):
            sleep(_MOVES_LOOK_S)
            if self._place() != before:
                return True
        return False

    def _place(self) -> tuple[int, int]:
        frame = sys._current_frames().get(self._main_thread)
        return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)

    def _line(self) -> int | None:
        """The line of the running cell that the main thread is at, below whatever it called."""
        filename = self._executor.shell.running_file
        if filename is None:
            return None
        frame = sys._current_frames().get(self._main_thread)
        while frame is not None:
            if frame.f_code.co_filename == filename:
                return frame.f_lineno
            frame = frame.f_back
        return None


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def use_device(device: str) -> None:
    """Make a rank's GPU the calling thread's current device; nothing for a rank on the CPU. A new thread has GPU 0."""
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


def rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int) -> zmq.Socket[bytes]:
    """A rank's DEALER to one of its host's sockets."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"r%d" % rank)
    keys.harden(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket
