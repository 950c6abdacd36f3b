"""A rank's second thread: it answers while the main thread is busy.

It streams output, beats, answers questions (completion, inspection, previews), and frees waiters from collectives. It
runs no user code. Its socket and its thread are its own, so a long message to or from the main thread never delays a
beat; only C code that keeps the GIL does, and the host can tell that from the silence.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from meshbook.ids import CallId
from meshbook.rank import questions, scalars, snapshot
from meshbook.rank.capture import Output
from meshbook.rank.probes import Probes, plain, switched_on
from meshbook.wire import birth, codec, keys, messages

if TYPE_CHECKING:
    from meshbook.rank.executor import Executor

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
        self._main_thread = threading.get_ident()
        log = scalars.ScalarLog()
        scalars.install(log)
        self._probes = Probes(told.rank, executor.ring, log) if switched_on() else None
        self._budget = float(_BURST_BYTES)
        self._budget_at = time.monotonic()
        self._ending = False
        self._heard_out = threading.Event()  # the host has everything
        self._answers: dict[type, Callable[[Any], Any]] = {
            messages.Complete: lambda ask: questions.complete(executor.shell, ask.code, ask.cursor),
            messages.Inspect: lambda ask: questions.inspect(executor.shell, ask.code, ask.cursor, ask.detail),
            messages.Peek: lambda ask: questions.peek(executor.shell, ask.names),
            messages.OpenActors: lambda ask: _found(ACTORS)(executor.resolve, executor.resolvers),
        }

    def start(self, ready: messages.RankReady) -> None:
        thread = threading.Thread(target=self._run, args=(ready,), name="meshbook-service", daemon=True)
        thread.start()

    def _run(self, ready: messages.RankReady) -> None:
        # Signals are the main thread's: one delivered here would only wake it through a detour, and late.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        socket = connect(self._context, self._told.service_address, self._told.rank)
        socket.send_multipart(codec.encode(ready))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        for fd in self._output.service_fds():
            poller.register(fd, zmq.POLLIN)
        next_beat = time.monotonic()
        flush_at: float | None = None
        said_last = False
        while True:
            now = time.monotonic()
            due = next_beat if flush_at is None else min(next_beat, flush_at)
            heard = poller.poll(max(0, int((due - now) * 1000) + 1))
            if self._probes is not None:
                self._probes.woke(time.monotonic() - max(now, due))
            for source, _ in heard:
                if source is socket or source == socket:
                    self._hear(socket)
                else:
                    self._output.pump()
                    if flush_at is None:
                        flush_at = time.monotonic() + _GATHER_S
            if self._ending and not said_last:
                said_last, flush_at = True, None
                self._reporter.say(socket)
                socket.send_multipart(codec.encode(messages.RankEnding(rank=self._told.rank)))
            now = time.monotonic()
            if flush_at is not None and now >= flush_at:
                flush_at = self._flush(socket, now)
            if now >= next_beat:
                if self._probes is not None:  # kept from going on between two lines, and not in the poll
                    self._probes.woke(now - next_beat)
                socket.send_multipart(codec.encode(self._beat()))
                next_beat = now + BEAT_S
                if flush_at is None and self._output.pending():
                    flush_at = now

    def _flush(self, socket: zmq.Socket[bytes], now: float) -> float | None:
        """Send output if the budget allows; when to try again, or None."""
        self._budget = min(_BURST_BYTES, self._budget + (now - self._budget_at) * _BYTES_PER_S)
        self._budget_at = now
        if self._budget <= 0:
            return now + 4 * _GATHER_S
        self._budget -= self._reporter.say(socket)
        return None

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        command = codec.rank_commands.decode(socket.recv_multipart())
        answer = self._answers.get(type(command))
        if answer is not None:
            try:
                answered = answer(command)
            except Exception as error:  # a question must not end the thread that answers questions
                answered = {"error": f"{type(error).__name__}: {error}"}
            call = command.call  # type: ignore[union-attr]
            report = messages.RankAnswered(rank=self._told.rank, call=call, answer=answered)
            socket.send_multipart(codec.encode(report))
            return
        match command:
            case messages.Interrupt(target=target) if target is not None:
                self._executor.stop(target)
            case messages.Unblock(reason=reason, interrupt=interrupt):
                self._executor.unblock(reason, interrupt=interrupt)
            case messages.Release(refs=refs, segments=segments, client=client):
                self._executor.release(refs, segments)
                if client is not None:
                    self._executor.drop_client(client)
            case messages.TakeSnapshots():
                self._snap(socket, command)
            case messages.Exit() if self._ending:
                self._heard_out.set()
            case messages.Exit():
                threading.Thread(target=self._leave, name="meshbook-end", daemon=True).start()

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

    def _snap(self, socket: zmq.Socket[bytes], command: messages.TakeSnapshots) -> None:
        """Look at this rank. What goes wrong is told as what is missing; the thread lives on."""
        rank = self._told.rank
        try:
            taken = snapshot.take(
                self._executor,
                main_thread=self._main_thread,
                health=None if self._probes is None else self._probes.health,
                num_collectives=command.num_collectives,
                stacks=command.stacks,
            )
            frames = codec.encode(messages.SnapshotTaken(rank=rank, call=command.call, snapshot=taken))
        except Exception as error:
            problem = f"the rank could not look at itself ({plain(f'{type(error).__name__}: {error}')})"
            empty = messages.RankSnapshot(rank=rank, problem=problem)
            frames = codec.encode(messages.SnapshotTaken(rank=rank, call=command.call, snapshot=empty))
        socket.send_multipart(frames)

    def _beat(self) -> messages.RankBeat:
        self._executor.pool.trim(_IDLE_SEGMENT_S)
        return messages.RankBeat(
            rank=self._told.rank,
            call=self._executor.running,
            line=self._line(),
            rss_bytes=rss_bytes(),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            released=self._executor.reader.take_released(),
            measured=None if self._probes is None else self._probes.measure(self._executor.device, self._moves),
        )

    def _moves(self) -> bool:
        """Whether the main thread has nothing to do, or gets on with it: it is somewhere else some moments later."""
        if self._executor.running is None:
            return True
        before = self._place()
        for _ in range(_MOVES_LOOKS):
            time.sleep(_MOVES_LOOK_S)
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
