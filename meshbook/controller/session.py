"""One client's dealings with one mesh: what `Mesh` and every view of it share.

Sends commands, waits for their end in the foreground (interruptible, answering `input()`) or hands out futures, brings
values, and lets go of what nobody holds any more. It shows nothing itself: output goes to the sink it is given.
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

from meshbook.controller.connection import Connection, notice_of
from meshbook.controller.futures import MeshFuture
from meshbook.controller.presses import Presses
from meshbook.controller.results import CellResult, RankValues, error_of
from meshbook.errors import CellError, CellInterrupted, MeshbookError, MeshTimeout, NotAttached, RankLost, StartError
from meshbook.fold import words
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.mesh import MeshAxes
from meshbook.rank import paths
from meshbook.wire import messages, pickling, stop
from meshbook.wire.buffers import Room, SegmentPool, SegmentReader

Sink = Callable[[tuple[messages.FoldedItem, ...]], None]
Ask = Callable[[messages.InputRequested], str | None]

_STOP_TIMEOUT_S = 15.0
_PULL_INLINE_BYTES = 1 << 16


_WAKE = object()  # in a call's inbox: a SIGINT has been noted


@dataclass(frozen=True)
class Left:
    """A call that was stopped and whose end was not waited for: some ranks do not come back from it."""

    command: Any
    future: Future[Any]
    ranks: Ranks  # those
    reason: str


@dataclass(frozen=True)
class _Silence:
    """The supervisor does not answer, or does again."""

    silent: bool


class Session:
    """An open connection to a mesh and all that is known of it here."""

    def __init__(self, connection: Connection, *, stop_at_exit: bool) -> None:
        self.connection = connection
        self.name = connection.found.name
        self.info = connection.welcome.info
        self.axes: MeshAxes | None = _axes_of(self.info)
        self.ended: str | None = None  # why the mesh is no more
        self.stopping = False  # we are about to end it
        self.on_lost: list[Callable[[tuple[messages.RankExited, ...]], None]] = []
        self.before_call: list[Callable[[], object]] = []  # floors above send what must come before a call
        self.ahead: list[Callable[[], list[str] | None]] = []  # ... and tell the calls they have not waited for
        self.extras: dict[str, Any] = {}  # what floors above keep for as long as the session lives, by their name
        self._pool = SegmentPool()
        self._reader = SegmentReader()
        self._gone = threading.Event()
        self._refs_to_release: deque[str] = deque()
        self._pressed_at = float("-inf")
        self._signal_until = float("-inf")  # until then a SIGINT is the other half of a press that a message told of
        self._pressed: str | None = None  # the call that Stop was pressed for last
        self._hard_at: float | None = None
        self._number = self.info.cells_run
        self._running: tuple[str, Ranks] | None = None  # the foreground call
        self._inbox: queue.SimpleQueue[Any] | None = None  # its
        self.left: dict[str, Left] = {}  # by call
        connection.listeners.silent.append(self._supervisor_silent)
        connection.listeners.changed.append(self._changed)
        connection.listeners.stopped.append(self._stopped)
        connection.listeners.segments.append(self._segments_released)
        connection.listeners.idle.append(self.let_go)
        self._at_exit = weakref.finalize(self, _end, connection, self._gone, stop_at_exit)

    # ---- coming and going

    def start(self, axes: MeshAxes, spec: messages.MeshSpec, *, timeout_s: float) -> messages.MeshReady:
        """Have the ranks started, and wait until their process group is up. Blocks.

        Raises:
            StartError: they did not come up; nothing is left running.
            MeshInUse: this mesh has ranks already.
        """
        call = self.connection.next_call()
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
        """End the mesh: every rank, the supervisor, their sockets. Waits until they are gone."""
        self.stopping = True
        self._at_exit.detach()
        if self.ended is None and not self.connection.closed:
            _end(self.connection, self._gone, stop=True)
        self.close()

    def detach(self, orphan_ttl_s: float | None = None) -> None:
        """Leave; the mesh lives on without this process, for `orphan_ttl_s` seconds when nobody else comes (None: for
        ever).

        Raises:
            NotAttached: it did not answer; this process has left it all the same.
        """
        self._at_exit.detach()
        self.connection.let_go_on()
        call = self.connection.next_call()
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

    def keep_at_exit(self) -> None:
        """An orderly end of this process no longer stops the mesh."""
        self._at_exit.detach()
        self._at_exit = weakref.finalize(self, _end, self.connection, self._gone, False)

    def check(self) -> None:
        if self.ended is not None:
            raise NotAttached(f"the mesh {self.name!r} is no more: {self.ended}. Start one with %mesh start -n 4")

    # ---- what is known

    @property
    def lost(self) -> Ranks:
        return tuple(rank.rank for rank in self.info.ranks if rank.state == "dead")

    @property
    def is_free(self) -> bool:
        """Whether no call is in the foreground."""
        return self._running is None

    def living(self, ranks: Ranks) -> Ranks:
        lost = set(self.lost)
        return tuple(rank for rank in ranks if rank not in lost) if lost else ranks

    def status(self, timeout_s: float = 5.0) -> messages.MeshInfo:
        self.check()
        answered = self._ask(messages.AskStatus(call=self.connection.next_call()), timeout_s)
        assert answered.info is not None
        self.info = answered.info
        return answered.info

    def history(self) -> tuple[messages.HistoryEntry, ...]:
        self.check()
        return self._ask(messages.AskHistory(call=self.connection.next_call()), 5.0).history

    def logs(self, rank: int, limit_bytes: int) -> str:
        self.check()
        command = messages.AskLogs(call=self.connection.next_call(), rank=rank, limit_bytes=limit_bytes)
        return self._ask(command, 5.0).text or ""

    def kill(self, ranks: Ranks, signal: int) -> None:
        self.check()
        self._ask(messages.KillRanks(call=self.connection.next_call(), ranks=ranks, signal=signal), 5.0)

    def _ask(self, command: Any, timeout_s: float) -> messages.Answered:
        try:
            answered: messages.Answered = self.connection.request(command).result(timeout_s)
        except TimeoutError:
            raise MeshTimeout(f"{self.connection.describe_silence()} (asked {timeout_s:g} s ago)") from None
        return answered

    # ---- calls

    def request(self, command: Any, **handlers: Any) -> Future[Any]:
        """Send a command for ranks; the future gives its CallFinished."""
        self.check()
        if isinstance(command, messages.MAIN_THREAD):
            for before in self.before_call:
                before()
        self.let_go()
        return self.connection.request(command, **handlers)

    def foreground(self, command: Any, *, sink: Sink | None = None, ask: Ask | None = None) -> messages.CallFinished:
        """Send a command and wait for its end on this thread, showing output and answering questions on the way.

        KeyboardInterrupt here stops the ranks and goes on waiting for them, as `wire.stop` says; a second within 5 s
        escalates.

        Raises:
            CellInterrupted: some ranks do not come back from a Stop. The call is in `left` until they do.
        """
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        handlers: dict[str, Any] = {"on_input": inbox.put}
        if sink is not None:
            handlers["on_output"] = inbox.put
        presses = Presses(wake=lambda: inbox.put(_WAKE))
        with presses:
            self._running = (command.call, command.ranks)
            try:
                future = self.request(command, **handlers)
            except KeyboardInterrupt:  # whether it has been sent is not known
                self.interrupt(command.ranks, target=command.call)
                self._running = None
                raise
            except BaseException:
                self._running = None
                raise
            self._attend(command, future, inbox, sink, ask, presses)
        return self._result(future, presses)

    def attend(
        self,
        command: Any,
        future: Future[Any],
        *,
        inbox: queue.SimpleQueue[Any] | None = None,
        sink: Sink | None = None,
        ask: Ask | None = None,
    ) -> messages.CallFinished:
        """Wait for a command that has been sent as the foreground call; `foreground` tells the rest."""
        inbox = inbox if inbox is not None else queue.SimpleQueue()
        presses = Presses(wake=lambda: inbox.put(_WAKE))
        with presses:
            self._attend(command, future, inbox, sink, ask, presses)
        return self._result(future, presses)

    def _attend(
        self,
        command: Any,
        future: Future[Any],
        inbox: queue.SimpleQueue[Any],
        sink: Sink | None,
        ask: Ask | None,
        presses: Presses,
    ) -> None:
        try:
            self._running, self._inbox = (command.call, command.ranks), inbox
            show = sink if sink is not None else lambda items: None
            on_output = inbox.put if sink is not None else None
            self.connection.listen_to(command.call, on_output=on_output, on_input=inbox.put, on_stuck=inbox.put)
            if self.connection.silent:
                inbox.put(_Silence(True))
            self._show_until_done(command, future, inbox, show, ask, presses)
        except BaseException:
            self._signal_until = float("-inf")
            raise
        finally:
            self._running = self._inbox = self._hard_at = None

    def _result(self, future: Future[Any], presses: Presses) -> messages.CallFinished:
        """Of a call that has ended, once SIGINT is no longer its Stop."""
        until, self._signal_until = self._signal_until, float("-inf")
        # Stop reaches a notebook twice, and the second half may come when the call has ended.
        if presses.take() and time.monotonic() > until:
            signal.raise_signal(signal.SIGINT)
        finished: messages.CallFinished = future.result()
        return finished

    def _show_until_done(
        self,
        command: Any,
        future: Future[Any],
        inbox: queue.SimpleQueue[Any],
        show: Sink,
        ask: Ask | None,
        presses: Presses,
    ) -> None:
        future.add_done_callback(lambda _: inbox.put(None))
        while True:
            try:
                thing = inbox.get(timeout=1.0 if self._hard_at is not None else None)
                if thing is None:
                    break
                if presses.take():
                    self._signalled()
                if thing is _WAKE:
                    continue
                if isinstance(thing, messages.InputRequested):
                    self._answer(thing, ask, presses)
                elif isinstance(thing, messages.RanksStuck):
                    if self.was_stopped(command.call):
                        raise self._leave(command, future, thing.ranks, thing.reason)
                    show(notice_of(thing).items)
                elif isinstance(thing, _Silence):
                    if thing.silent and self.was_stopped(command.call):
                        raise self._leave(command, future, command.ranks, self.connection.describe_silence())
                    show((self._news_of(thing, command.ranks),))
                else:
                    show(thing)
            except queue.Empty:
                if self._hard_at is not None and time.monotonic() - self._hard_at > stop.LAST_RESORT_S:
                    reason = f"{name_ranks(command.ranks)} did not come back and could not be killed"
                    raise self._leave(command, future, command.ranks, reason) from None
            except CellInterrupted:
                raise
            except KeyboardInterrupt:  # of a second press while the first was not looked at, or on another thread
                presses.take()
                self._signalled()
                if future.done():  # what was in hand when the signal came is lost, maybe the end itself
                    inbox.put(None)

    def _signalled(self) -> None:
        """A SIGINT has come: a press of Stop, or the other half of one that a message told of."""
        if time.monotonic() > self._signal_until:
            self.press_stop()
        self._signal_until = float("-inf")

    def _leave(self, command: Any, future: Future[Any], ranks: Ranks, reason: str) -> CellInterrupted:
        """Wait no longer for a call that was stopped. What its ranks still print is shown as what comes late."""
        self.connection.listen_to(command.call)
        self.left[command.call] = Left(command, future, ranks, reason)
        future.add_done_callback(lambda _: self.left.pop(command.call, None))
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
        render(error)
        return error

    def _supervisor_silent(self, silent: bool) -> None:
        inbox = self._inbox
        if inbox is not None:
            inbox.put(_Silence(silent))

    def _news_of(self, silence: _Silence, ranks: Ranks) -> messages.RankDisplay:
        text = self.connection.describe_silence() if silence.silent else f"the supervisor of {self.name} answers again"
        return messages.RankDisplay(ranks=ranks, item=messages.Notice(text))

    def press_stop(self, *, kill: bool = True, signal_follows: bool = False) -> bool:
        """What the Stop button does: interrupt the foreground call on its ranks. Thread-safe. A second press within 5 s
        also kills the ranks that do not come back; so does one while no call is in the foreground and ranks have not
        come back from an earlier Stop.

        Args:
            kill: False: it is no second press, whatever was pressed before.
            signal_follows: the same press will also come as a SIGINT, soon, or later on a busy machine.

        Returns:
            Whether there was something to stop.
        """
        running = self._running
        now = time.monotonic()
        was_stopped = self.connection.let_go_on()
        if running is not None and signal_follows:
            self._signal_until = now + stop.SECOND_PRESS_S
        if running is None:
            return kill and self._press_again(now)
        since = now - self._pressed_at if self._pressed == running[0] else float("inf")
        if since < stop.SAME_PRESS_S:
            return True
        hard = kill and since < stop.SECOND_PRESS_S
        self._pressed, self._pressed_at = running[0], now
        if hard:
            self._hard_at = now
        if self.connection.silent and not was_stopped:
            self._supervisor_silent(True)
        for left in list(self.left.values()):
            self.interrupt(left.command.ranks, target=left.command.call, hard=hard)
        for ahead in self.ahead:  # what the foreground call waits behind, oldest first
            for call in ahead() or ():
                self.interrupt(running[1], target=call, hard=hard)
        self.interrupt(running[1], target=running[0], hard=hard)
        return True

    def _press_again(self, now: float) -> bool:
        """Stop, pressed when no call is in the foreground: ends the ranks that have not come back from the last one."""
        left = list(self.left.values())
        if left and now - self._pressed_at >= stop.SAME_PRESS_S:
            self._pressed_at = now
            for one in left:
                self.interrupt(one.ranks, target=one.command.call, hard=True)
        return bool(left)

    def was_stopped(self, call: str) -> bool:
        """Whether Stop was pressed while this was the foreground call."""
        return self._pressed == call

    def interrupt(self, ranks: Ranks, *, target: str | None = None, hard: bool = False) -> None:
        self.connection.send(messages.Interrupt(ranks=ranks, target=target, hard=hard))  # type: ignore[arg-type]

    def _answer(self, question: messages.InputRequested, ask: Ask | None, presses: Presses) -> None:
        # Other ranks' questions may be on their way still when Stop ends one.
        text, interrupted = None, question.call == self._pressed
        try:
            if ask is not None and not interrupted:
                with presses.raised():
                    text = ask(question)
        except EOFError:
            pass
        except KeyboardInterrupt:
            interrupted = True
            self.press_stop()
        reply = messages.ReplyInput(target=question.call, rank=question.rank, text=text, interrupted=interrupted)
        self.connection.send(reply)

    def cell_command(self, source: str, ranks: Ranks, *, number: int | None = None, **options: Any) -> messages.RunCell:
        """A cell, numbered alike on all ranks whatever each has run before, so that their tracebacks can be one."""
        if number is None:
            self._number += 1
            number = self._number
        return messages.RunCell(call=self.connection.next_call(), ranks=ranks, source=source, number=number, **options)

    def call_command(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ranks: Ranks, **options: Any
    ) -> messages.CallFunction:
        payload = self.dump((function, tuple(args), kwargs), ranks)
        return messages.CallFunction(call=self.connection.next_call(), ranks=ranks, function=payload, **options)

    def set_names(self, names: dict[str, Any], ranks: Ranks) -> None:
        """Bind names on the ranks, and wait until they are bound."""
        command = messages.SetNames(
            call=self.connection.next_call(),
            ranks=ranks,
            names=tuple(names),
            payload=self.dump(tuple(names.values()), ranks),
        )
        self.conclude(self.foreground(command), command.ranks, label="push")

    def evaluate(self, path: paths.Path, ranks: Ranks, *, keep: bool = True) -> RankValues:
        """Follow a path on the ranks' main threads.

        Args:
            keep: leave large results there, to be fetched when asked for.
        """
        command = messages.Evaluate(
            call=self.connection.next_call(),
            ranks=ranks,
            path=self.dump(path, ranks),
            inline_limit=_PULL_INLINE_BYTES,
            keep=keep,
        )
        finished = self.foreground(command)
        self.conclude(finished, ranks, label=str(path))
        return self.values_of(finished.parts)

    def question(self, command: Any, timeout_s: float = 2.0) -> tuple[messages.Part, ...]:
        """Ask the ranks' service threads; what came within the time. Does not wait for a running cell."""
        try:
            finished: messages.CallFinished = self.request(command).result(timeout_s)
        except TimeoutError:
            return ()
        return finished.parts

    def future(
        self, source: Future[Any], command: Any, finish: Callable[[messages.CallFinished], Any]
    ) -> MeshFuture[Any]:
        return MeshFuture(
            source,
            finish,
            interrupt=lambda: self.interrupt(command.ranks, target=command.call),
            deliverer=self.connection.thread,
            label=getattr(command, "label", "") or "the call",
        )

    # ---- values

    def dump(self, thing: Any, ranks: Ranks) -> messages.Payload:
        return pickling.dump(thing, pool=self._pool, readers=ranks, persistent=self._reference_to)

    def room(self, nbytes: int) -> Room | None:
        """Memory for ranks to write into, and for a value here to lie in."""
        return self._pool.room(nbytes)

    def load(self, payload: messages.Payload) -> Any:
        return pickling.load(payload, reader=self._reader)

    def values_of(self, parts: Sequence[messages.Part]) -> RankValues:
        assert self.axes is not None
        return RankValues(self.axes, parts, self.load, self._fetch, self._refs_to_release.append)

    def conclude(self, finished: messages.CallFinished, ranks: Ranks, *, label: str) -> None:
        """Raise what the call's end stands for, if it did not go well."""
        error = error_of(finished, label)
        if error is not None:
            raise render(error)

    def result_of(self, finished: messages.CallFinished, output: str) -> CellResult:
        bound = tuple(dict.fromkeys(name for part in finished.parts for name in part.outcome.bound))
        unbound = tuple(dict.fromkeys(name for part in finished.parts for name in part.outcome.unbound))
        error = error_of(finished)
        return CellResult(
            values=self.values_of(finished.parts),
            output=output,
            errors=getattr(error, "failures", ()),
            seconds=finished.seconds,
            rank_seconds=finished.rank_seconds or {},
            bound=bound,
            unbound=unbound,
        )

    def _fetch(self, ranks: tuple[int, ...], ref: str) -> dict[int, Any]:
        values = self.evaluate(paths.Path(paths.Ref(ref)), ranks, keep=False)
        return dict(values)

    def _reference_to(self, thing: Any) -> str | None:
        """The key of a handle of this mesh among the things that are sent; the rank puts its own object there."""
        key = getattr(type(thing), "_meshbook_key", None)
        if key is None:
            return None
        found: str = key(thing, self)
        return found

    # ---- letting go

    def let_go(self) -> None:
        """Tell the ranks what nobody holds here any more. Finalizers only note it: they may run inside a send."""
        segments = self._reader.take_released()
        refs = []
        while self._refs_to_release:
            refs.append(self._refs_to_release.popleft())
        self._pool.trim(30.0)
        if (refs or segments) and not self.connection.closed and self.axes is not None:
            release = messages.Release(ranks=self.living(self.axes.ranks), refs=tuple(refs), segments=segments)
            self.connection.send(release)

    # ---- news

    def _changed(self, report: messages.RanksChanged) -> None:
        self.info = report.info
        for exited in report.exited:
            self._pool.forget_reader(exited.rank)
        if report.exited:
            for listener in self.on_lost:
                listener(report.exited)

    def _segments_released(self, report: messages.Segments) -> None:
        for segment in report.segments:
            self._pool.release(segment, reader=report.rank)

    def _stopped(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._gone.set()


def render(error: MeshbookError) -> MeshbookError:
    """Give an error the ranks' tracebacks, for IPython and for plain Python."""
    if isinstance(error, (CellError, RankLost)) and not error.rendered:
        lines = words.show_errors(
            error.failures, getattr(error, "succeeded", ()), None, released=getattr(error, "released", ())
        )
        if isinstance(error, RankLost):
            lines = [f"\x1b[31mRankLost\x1b[39m: {error}", *(["", *lines] if error.failures else [])]
        elif not error.failures:
            lines = [f"{type(error).__name__}: {error}"]
        error.rendered = tuple(lines)
        if error.failures:
            error.add_note(words.plain("\n".join(lines)))
    return error


def _axes_of(info: messages.MeshInfo) -> MeshAxes | None:
    return MeshAxes.of(dict(info.spec.axes)) if info.spec is not None else None


def _end(connection: Connection, gone: threading.Event, stop: bool) -> None:
    """At exit, or when nobody holds the session: stop the mesh, or just leave it. Must not refer to the session."""
    try:
        if stop and not connection.closed and not gone.is_set():
            connection.let_go_on()  # one that is stopped (SIGSTOP) could not end
            connection.request(messages.StopMesh(call=connection.next_call(), now=True))
            gone.wait(_STOP_TIMEOUT_S)
    except MeshbookError:
        pass
    finally:
        connection.close()
