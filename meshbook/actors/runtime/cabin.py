"""One actor: its mailbox, its thread, and one message at a time.

An actor whose endpoints are all `def` works through its mailbox on its own thread. One with `async def` endpoints has
an event loop on its own thread: each message starts a task, in the order of arrival, and tasks interleave at `await`;
its `def` endpoints run on that loop too, and hold it up. Knows of its process only what `Life` offers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.actors import base
from meshbook.actors.runtime import faults
from meshbook.actors.runtime.context import Context, Home, Instance, current, message
from meshbook.actors.runtime.futures import MUST_NOT_WAIT
from meshbook.actors.runtime.interrupts import Interruptible
from meshbook.actors.runtime.parcels import NONE
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.ports import Port
from meshbook.actors.runtime.post import encode
from meshbook.actors.shape import Extent, Point
from meshbook.clock import monotonic, wall
from meshbook.wire import messages
from meshbook.wire.messages import MAX_END_FRAMES, AnswerAwaited, EndpointSeen, Frame

if TYPE_CHECKING:
    from meshbook.actors.runtime.life import Life

log = logging.getLogger("meshbook.actors")

_CANCEL_S = 1.0  # that they then have to say so to their callers
_GRACE_S = 5.0  # that running async endpoints have to end when their actor is stopped; then they are cancelled
_LOOP_S = 0.2  # that an event loop has to come to a cancellation; then the code that holds it up is interrupted

Key = tuple[int, int]  # of a message: who sent it, and its number for the answer (-1 and any, if there is none)
_CUT = object()  # in a mailbox
_BIRTH = (-1, -1)  # stands for `__init__`, as if it were a message
_BEFORE = "it was interrupted before it began"


class Running(NamedTuple):
    """A message that is being worked on."""

    method: str
    since: float  # time.monotonic()
    task: asyncio.Task[None] | None  # on an event loop
    caller: str  # the node of the process it came from


class Cabin:
    """One actor in this process."""

    def __init__(self, life: Life, peer: Any, word: messages.SpawnActor) -> None:
        self.life, self.id, self.name, self.owner = life, word.actor, word.name, word.owner
        self.place = word.place
        self.point = Point(word.place, Extent(word.names, word.sizes))
        self.actor: Any = None
        self.home: Home | None = None  # once it is there
        self.born_at = wall()
        self.class_name = "?"
        self.state = "starting"  # "living", "failed", "stopped"
        self.is_told_to_stop = False  # also while it still works off what it was sent before; its name is free
        self.born = threading.Event()  # its __init__ has run, or failed
        self.ended = threading.Event()
        self.failure: messages.Failure | None = None  # of __init__
        self.running: dict[Key, Running] = {}
        self.last_error: str | None = None
        self.num_messages = 0
        self._born_of: tuple[Any, Any] = (peer, word)
        self._urgent: deque[faults.MeshFailure] = deque()
        self._thread = threading.Thread(target=self._live, name=f"{messages.ACTOR_THREAD}{word.name}", daemon=True)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()  # of each task: this actor's
        self._cause: Exception | None = None  # what ended it, for __cleanup__
        self._ending = False  # it has come to its StopActor: what waits behind that is refused
        self._open = Interruptible()
        self._dropped: set[Key] = set()  # calls that were interrupted before they began
        self._cuts: deque[None] = deque()  # one for each _CUT in the mailbox: what waits before them was interrupted
        self._reason = ""

    def start(self) -> None:
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return 0 if self._loop is not None else self._thread.ident or 0

    def put(self, item: Any) -> None:
        """Into the mailbox; from any thread."""
        self._inbox.put(item)
        if self.state == "stopped":
            self._refuse_rest()
        elif self._loop is not None and not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # closed: `_refuse_rest` answers
                self._loop.call_soon_threadsafe(self._drain)

    def supervise(self, failure: faults.MeshFailure) -> None:
        """Something that this actor owns has failed; before any message that waits."""
        self._urgent.append(failure)
        self.put(None)

    def stop(self, reason: str) -> None:
        self.take_stop(None, messages.StopActor(0, self.id, reason))

    def take_stop(self, peer: Any, word: messages.StopActor) -> None:
        """Into the mailbox too: what was sent before it is worked off. From any thread."""
        self.is_told_to_stop = True
        self.put((peer, word))

    @property
    def _at(self) -> str:
        """Where in its mesh, for sentences."""
        return f" {self.point}" if self.point.extent else ""

    @property
    def holds_name(self) -> bool:
        """Whether no other actor of this process may have its name."""
        return self.state != "failed" and not self.is_told_to_stop

    def interrupt(self, key: Key | None) -> None:
        """End a message that runs or waits; with None all that came until now, `__init__` too. Does not wait. From any
        thread.

        A `def` endpoint gets a KeyboardInterrupt, as soon as Python code of it runs; an async one is cancelled.
        """
        if key is None:
            self._cuts.append(None)
            self.put((None, _CUT))
            self._open.interrupt(_BIRTH)
        else:
            self._dropped.add(key)
        for known, running in list(self.running.items()):
            if key in (None, known):
                self._end_message(known, running)

    def _end_message(self, key: Key, running: Running) -> None:
        self._dropped.add(key)  # it may not have begun yet
        loop = self._loop
        if loop is None:
            self._open.interrupt(key)
            return
        if running.task is not None:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(running.task.cancel)

        def look() -> None:  # code between two awaits holds the loop up
            if self.running.get(key) is running:
                self._open.interrupt(key)

        self.life.post.call_later(_LOOP_S, look)

    def abort(self, reason: str) -> None:
        self._cause = RuntimeError(reason)
        self.life.fault(self, f"{self.name}{self._at} ended itself: {reason}", "")
        self.stop(reason)

    def row(self) -> dict[str, Any]:
        """How it does, as plain data."""
        running = next(iter(list(self.running.values())), None)
        return {
            "actor": self.name,
            "id": self.id,
            "class": self.class_name,
            "place": self.place,
            "point": dict(self.point),
            "born_at": self.born_at,
            "state": self.state,
            "mailbox": self._inbox.qsize(),
            "running": running.method if running else None,
            "seconds": monotonic() - running.since if running else None,
            "messages": self.num_messages,
            "last_error": self.last_error,
        }

    def endpoints(self, node: str, awaited: Mapping[tuple[str, Key], Sequence[AnswerAwaited]]) -> list[EndpointSeen]:
        """The messages that are being worked on, and for whose answers they wait. From any thread."""
        now = monotonic()
        return [
            EndpointSeen(
                actor=self.id,
                name=self.name,
                node=node,
                endpoint=running.method.removeprefix("="),
                caller=running.caller,
                call=max(0, key[1]) if key[0] >= 0 else 0,
                interleaves=self._loop is not None,
                running_s=now - running.since,
                frames=_where_it_awaits(running.task),
                awaits=tuple(awaited.get((self.id, key), ())),
            )
            for key, running in list(self.running.items())
        ]

    # ---- the thread

    def _live(self) -> None:
        peer, word = self._born_of
        try:
            self.life.prepare_thread()
            Class, args, kwargs, home = self.life.post.parcels.unpack(peer, None, word.payload)
            instance = Instance(self.name, self.id, self.point, home, self.owner, self)
            current.set(Context(instance, self.point))
            self.home = home
            self.class_name = Class.__name__
            on_loop = base.runs_on_loop(Class)
            with self._open.of(_BIRTH):
                self.actor = Class(*args, **kwargs)
            del args, kwargs
        except BaseException as error:
            self._open.close()
            self._not_born(error)
            on_loop = False
        else:
            self.state = "living"
        self._born_of = (None, None)
        self.born.set()
        self.life.post.let_go()
        if on_loop:
            self._live_on_loop()
        else:
            self._live_on_thread()

    def _not_born(self, error: BaseException) -> None:
        described = faults.describe(error, call=0, kind="init", skip=1)
        said = f"{described.ename}: {described.text}"
        text = f"{self.class_name}.__init__ failed, so there is no actor {self.name!r}: {said}"
        self.failure = messages.Failure(0, "init", described.ename, text, described.traceback, None)
        self.state, self.last_error = "failed", said
        if not isinstance(error, KeyboardInterrupt):
            self.life.fault(self, text, described.traceback)

    def _live_on_thread(self) -> None:
        while True:
            item = self._inbox.get()
            while self._urgent:
                self._judge(self._urgent.popleft())
            if item is None:
                continue
            peer, word = item
            del item
            if word is _CUT:
                self._cuts.pop()
            elif type(word) is messages.StopActor:
                self._end(peer, word)
                return
            else:
                try:
                    self._perform(peer, word)
                except BaseException:  # of telling how the call ended: the actor lives on for the calls behind it
                    log.exception("the end of a call of actor %s could not be told", self.name)
            del word
            self.life.post.let_go()

    def _perform(self, peer: Any, word: messages.CallActor) -> None:
        key = _key(peer, word)
        try:
            function, args, kwargs = self._prepare(peer, word, key)
            with self._open.of(key):
                self._begin(key)
                value = function(*args, **kwargs)
        except BaseException as error:
            self._open.close()  # it may have struck in the middle of that
            self._failed(peer, word, error)
        else:
            self._finished(peer, word, value)
        finally:
            self._over(key)

    # ---- the event loop

    def _live_on_loop(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        MUST_NOT_WAIT[threading.get_ident()] = (
            f"get() would stop the event loop of {self.class_name}, which has async endpoints: write `await future`; "
            "in an actor whose endpoints are all `def`, get() is fine"
        )
        self._context = copy_context()
        self._loop = loop
        loop.call_soon(self._drain)
        try:
            while self.state != "stopped":
                with contextlib.suppress(KeyboardInterrupt):  # one that struck beside the code it was meant for
                    loop.run_forever()
        finally:
            MUST_NOT_WAIT.pop(threading.get_ident(), None)
            loop.close()

    def _drain(self) -> None:
        self._woken = False
        while True:
            while self._urgent:
                self._start(self._judge_async(self._urgent.popleft()))
            if self._ending or self._inbox.empty():
                return
            item = self._inbox.get()
            if item is None:
                continue
            peer, word = item
            if word is _CUT:
                self._cuts.pop()
            elif type(word) is messages.StopActor:
                self._ending = True
                self._start(self._end_async(peer, word))
            else:
                self._start(self._perform_async(peer, word))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform_async(self, peer: Any, word: messages.CallActor) -> None:
        key = _key(peer, word)
        try:
            function, args, kwargs = self._prepare(peer, word, key)
            with self._open.of(key):
                self._begin(key)
                value = function(*args, **kwargs)
            del args, kwargs
            if inspect.iscoroutine(value):
                value = await self._in_steps(key, value)
            elif inspect.isawaitable(value):
                value = await value
        except BaseException as error:
            self._open.close()
            self._failed(peer, word, error)
        else:
            self._finished(peer, word, value)
            del value
        finally:
            self._over(key)
            self.life.post.let_go()

    @types.coroutine
    def _in_steps(self, key: Key, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """`await work`, which can be interrupted while a step of it runs."""
        step, given = work.send, None
        while True:
            try:
                with self._open.of(key):
                    waits_for = step(given)
            except StopIteration as end:
                return end.value
            step = work.send
            try:
                given = yield waits_for
            except BaseException as error:
                step, given = work.throw, error

    # ---- a message, in three parts that both ways share

    def _prepare(self, peer: Any, word: messages.CallActor, key: Key) -> tuple[Callable[..., Any], Any, Any]:
        self.num_messages += 1
        task = asyncio.current_task() if self._loop is not None else None
        self.running[key] = Running(word.method, monotonic(), task, peer.address.node)
        message.set(key)
        if self.failure is not None:
            self.life.post.parcels.discard(peer, word)
            raise _NotThere
        if self._cuts and word.method[0] != "=":
            self.life.post.parcels.discard(peer, word)
            raise KeyboardInterrupt(_BEFORE)
        method = word.method
        args, kwargs = self.life.post.parcels.unpack(peer, word.plain, word.payload)
        point = self.point
        if word.view is not None:
            point = Point(word.view.places.index(self.place), Extent(word.view.names, word.view.sizes))
        known = current.get()
        if point is not known.message_rank:
            current.set(Context(known.actor_instance, point))
        if method[0] == "=":
            function, *rest = args
            return function, (self.actor, *rest), kwargs
        Class = type(self.actor)
        mark = getattr(Class, method, None)
        if not isinstance(mark, base.EndpointProperty):
            names = list(base.endpoints_of(Class))
            raise AttributeError(base.no_such_endpoint(Class.__name__, names, method, is_method=mark is not None))
        if mark.explicit_response_port:
            args = (self._port(peer, word, point), *args)
        return mark.method, (self.actor, *args), kwargs

    def _begin(self, key: Key) -> None:
        """Now it can be interrupted; and if it was before, this is its end."""
        if key in self._dropped:
            raise KeyboardInterrupt(_BEFORE)

    def _over(self, key: Key) -> None:
        self.running.pop(key, None)
        self._dropped.discard(key)

    def _port(self, peer: Any, word: messages.CallActor, point: Point) -> Port[Any]:
        if word.port is not None:
            return Port(messages.PortAddress(word.port.address, word.port.port, point.rank))
        return Port(messages.PortAddress(peer.address, word.call, point.rank) if word.call else None)

    def _explicit(self, word: messages.CallActor) -> bool:
        mark = getattr(type(self.actor), word.method, None)
        return isinstance(mark, base.EndpointProperty) and mark.explicit_response_port

    def _finished(self, peer: Any, word: messages.CallActor, value: Any) -> None:
        if not (word.call or word.port) or self._explicit(word):
            return
        post = self.life.post
        try:
            if word.port is not None:
                Port(messages.PortAddress(word.port.address, word.port.port, self._rank_in(word))).send(value)
            elif value is None:
                peer.send(encode(messages.Answer(word.call, NONE)))
            else:
                plain, payload = post.parcels.pack(value, (peer,), name="the result")
                post.reply(peer, messages.Answer(word.call, plain, payload))
        except PeerGone:
            pass
        except Exception as error:  # a result that cannot be sent is the caller's to hear of, and not this thread's end
            self._failed(peer, word, error)

    def _rank_in(self, word: messages.CallActor) -> int:
        return word.view.places.index(self.place) if word.view is not None else self.place

    def _failed(self, peer: Any, word: messages.CallActor, error: BaseException) -> None:
        failure = self.failure
        if failure is None:
            failure = faults.describe(error, call=word.call, skip=1)
            if isinstance(error, asyncio.CancelledError) and self._ending:
                failure = self._stopped(word.call, "it was stopped")
            self.last_error = f"{word.method}: {failure.ename}{failure.text and ': '}{failure.text}"
        with contextlib.suppress(PeerGone):
            if word.port is not None:
                Port(messages.PortAddress(word.port.address, word.port.port, self._rank_in(word))).exception(error)
            elif word.call:
                peer.send(encode(addressed(failure, word.call, self._rank_in(word))))
            elif self.failure is None and not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                # Nobody waits for an answer, and it must not go unheard, unless somebody wanted it.
                text = f"{self.name}.{word.method}{self._at} failed: {failure.ename}: {failure.text}"
                self.life.fault(self, text, failure.traceback)

    def _stopped(self, call: int, reason: str) -> messages.Failure:
        return messages.Failure(call, "stopped", "ActorStopped", f"the actor {self.name!r} has ended: {reason}")

    # ---- failures of what it owns

    def _judge(self, failure: faults.MeshFailure) -> None:
        judge = getattr(self.actor, "__supervise__", None)
        try:
            handled = bool(judge(failure)) if judge is not None else False
        except BaseException as error:
            failure, handled = _chained(failure, self.name, error), False
        if not handled:
            self.life.escalate(self, failure)

    async def _judge_async(self, failure: faults.MeshFailure) -> None:
        judge = getattr(self.actor, "__supervise__", None)
        try:
            handled = judge(failure) if judge is not None else False
            if inspect.isawaitable(handled):
                handled = await handled
        except BaseException as error:
            failure, handled = _chained(failure, self.name, error), False
        if not handled:
            self.life.escalate(self, failure)

    # ---- the end

    def _end(self, peer: Any, word: messages.StopActor) -> None:
        cleanup = getattr(self.actor, "__cleanup__", None)
        try:
            if cleanup is not None:
                cleanup(self._cause)
        except BaseException:
            log.exception("__cleanup__ of %s%s failed", self.name, self._at)
        self._gone(peer, word)

    async def _end_async(self, peer: Any, word: messages.StopActor) -> None:
        mine = asyncio.current_task()
        others = [task for task in self._tasks if task is not mine]
        if others:
            _, left = await asyncio.wait(others, timeout=_GRACE_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_CANCEL_S)
        cleanup = getattr(self.actor, "__cleanup__", None)
        try:
            if cleanup is not None:
                done = cleanup(self._cause)
                if inspect.isawaitable(done):
                    await done
        except BaseException:
            log.exception("__cleanup__ of %s%s failed", self.name, self._at)
        self._gone(peer, word)
        assert self._loop is not None
        self._loop.stop()

    def _gone(self, peer: Any, word: messages.StopActor) -> None:
        self._reason = word.reason
        self.state = "stopped"
        self.actor = None
        self.life.forget(self, word.reason)
        with contextlib.suppress(PeerGone):
            if peer is not None and word.call:
                peer.send(encode(messages.Answer(word.call, NONE)))
        self._refuse_rest()
        self.ended.set()

    def _refuse_rest(self) -> None:
        """What came too late; on the thread that brings it, if that has looked the actor up just before its end."""
        with contextlib.suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not None and item[0] is not None:
                    self.life.refuse(item[0], item[1], self._stopped(0, self._reason))


def _where_it_awaits(task: asyncio.Task[None] | None) -> tuple[Frame, ...]:
    """A task's frames, outermost first, through all that it awaits."""
    frames: list[Frame] = []
    work: Any = task.get_coro() if task is not None else None
    while work is not None and len(frames) < MAX_END_FRAMES:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(Frame(file=code.co_filename, line=frame.f_lineno or code.co_firstlineno, function=code.co_name))
        inner = frame.f_locals.get("work") if code is Cabin._in_steps.__code__ else None  # sent to by hand
        work = inner or getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return tuple(frames)


def _key(peer: Any, word: messages.CallActor) -> Key:
    return (peer.number, word.call) if word.call else (-1, id(word))


class _NotThere(Exception):
    """__init__ failed: `Cabin.failure` says how."""


def addressed(failure: messages.Failure, call: int, rank: int) -> messages.Failure:
    return messages.Failure(
        call, failure.kind, failure.ename, failure.text, failure.traceback, failure.pickled, rank
    )


def _chained(failure: faults.MeshFailure, name: str, error: BaseException) -> faults.MeshFailure:
    text = f"{name}.__supervise__ raised {type(error).__name__}: {error}, when it was told: {failure}"
    return faults.MeshFailure(failure.mesh_name, failure.ranks, text, "".join(traceback.format_exception(error)))
