"""Run one actor: its mailbox, its thread, one message at a time.

An actor whose endpoints are all `def` processes its mailbox on its own thread. An actor with `async def` endpoints runs
an event loop on its own thread: each message starts a task, in order of arrival, and tasks interleave at `await`; its
`def` endpoints run on the same loop and block it. Uses only the `ActorRegistry` interface of its process.
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
from meshbook.actors.runtime.context import Context, Instance, ProcMeshRef, context_var, message_var
from meshbook.actors.runtime.futures import NON_BLOCKING_THREADS
from meshbook.actors.runtime.interrupts import Interruptible
from meshbook.actors.runtime.payloads import PICKLED_NONE
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.ports import Port
from meshbook.actors.runtime.transport import encode
from meshbook.actors.shape import Extent, Point
from meshbook.clock import monotonic, wall
from meshbook.wire import messages
from meshbook.wire.messages import MAX_END_FRAMES, ActiveEndpoint, Frame, PendingEndpointCall

if TYPE_CHECKING:
    from meshbook.actors.runtime.registry import ActorRegistry

log = logging.getLogger("meshbook.actors")

_CANCEL_GRACE_S = 1.0  # for cancelled endpoints to send their failure to their callers
_STOP_GRACE_S = 5.0  # for running async endpoints to finish when their actor is stopped; then they are cancelled
_LOOP_GRACE_S = 0.2  # for the event loop to process a cancellation; then the code that blocks it is interrupted

# (sender's peer id, call id of the reply); (-1, unique number) for a message without a reply
MessageKey = tuple[int, int]
_INTERRUPT_MARKER = object()  # in the mailbox: messages before it were interrupted
_INIT_KEY = (-1, -1)  # message key of `__init__`
_INTERRUPTED_BEFORE_START = "it was interrupted before it began"


class RunningMessage(NamedTuple):
    """A message in progress."""

    method: str
    started_at: float  # time.monotonic()
    task: asyncio.Task[None] | None  # None: not on an event loop
    caller: str  # node of the sending process


class ActorRunner:
    """One actor in this process."""

    def __init__(self, registry: ActorRegistry, peer: Any, request: messages.SpawnActor) -> None:
        self.registry, self.id, self.name, self.owner = registry, request.actor, request.name, request.owner
        self.rank = request.index
        self.point = Point(request.index, Extent(request.dim_names, request.sizes))
        self.actor: Any = None
        self.procs_ref: ProcMeshRef | None = None  # set once the spawn request is unpacked
        self.spawned_at = wall()
        self.class_name = "?"
        self.state = "starting"  # "living", "failed", "stopped"
        self.is_stop_requested = False  # set while queued messages are still processed; the name is already free
        self.init_done = threading.Event()  # `__init__` returned or raised
        self.ended = threading.Event()
        self.init_failure: messages.ActorFailure | None = None  # the failure of `__init__`
        self.running: dict[MessageKey, RunningMessage] = {}
        self.last_error: str | None = None
        self.num_messages = 0
        self._spawn_request: tuple[Any, Any] = (peer, request)
        self._pending_failures: deque[faults.MeshFailure] = deque()
        self._thread = threading.Thread(
            target=self._run, name=f"{messages.ACTOR_THREAD_PREFIX}{request.name}", daemon=True
        )
        self._mailbox: SimpleQueue[Any] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_wake_pending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()  # this actor's context, copied for each task
        self._stop_cause: Exception | None = None  # the cause of the end, passed to `__cleanup__`
        self._is_stopping = False  # its StopActor was processed: messages queued after it are refused
        self._interruptible = Interruptible()
        self._interrupted_keys: set[MessageKey] = set()  # calls that were interrupted, possibly before they started
        # one per `_INTERRUPT_MARKER` in the mailbox: messages queued before a marker were interrupted
        self._interrupt_markers: deque[None] = deque()
        self._stop_reason = ""

    def start(self) -> None:
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return 0 if self._loop is not None else self._thread.ident or 0

    def put(self, item: Any) -> None:
        """Put an item into the mailbox. Any thread."""
        self._mailbox.put(item)
        if self.state == "stopped":
            self._refuse_queued()
        elif self._loop is not None and not self._is_wake_pending:
            self._is_wake_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: `_refuse_queued` replies
                self._loop.call_soon_threadsafe(self._drain_mailbox)

    def notify_failure(self, failure: faults.MeshFailure) -> None:
        """Notify the actor that something it owns has failed; handled before any queued message."""
        self._pending_failures.append(failure)
        self.put(None)

    def stop(self, reason: str) -> None:
        self.request_stop(None, messages.StopActor(0, self.id, reason))

    def request_stop(self, peer: Any, request: messages.StopActor) -> None:
        """Queue a stop: messages sent before it are processed first. Any thread."""
        self.is_stop_requested = True
        self.put((peer, request))

    @property
    def _point_suffix(self) -> str:
        """Return the actor's point in its mesh, for messages."""
        return f" {self.point}" if self.point.extent else ""

    @property
    def holds_name(self) -> bool:
        """Whether this actor reserves its name in this process."""
        return self.state != "failed" and not self.is_stop_requested

    def interrupt(self, key: MessageKey | None) -> None:
        """Interrupt a running or queued message, or all messages received so far. Any thread. Does not wait.

        A `def` endpoint gets a KeyboardInterrupt as soon as it runs Python code; an async endpoint is cancelled.

        Args:
            key: the message; None for all that were received until now, `__init__` included.
        """
        if key is None:
            self._interrupt_markers.append(None)
            self.put((None, _INTERRUPT_MARKER))
            self._interruptible.interrupt(_INIT_KEY)
        else:
            self._interrupted_keys.add(key)
        for known, running in list(self.running.items()):
            if key in (None, known):
                self._interrupt_message(known, running)

    def _interrupt_message(self, key: MessageKey, running: RunningMessage) -> None:
        self._interrupted_keys.add(key)  # it may not have started yet
        loop = self._loop
        if loop is None:
            self._interruptible.interrupt(key)
            return
        if running.task is not None:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(running.task.cancel)

        def look() -> None:  # code between two awaits may be blocking the loop
            if self.running.get(key) is running:
                self._interruptible.interrupt(key)

        self.registry.transport.call_later(_LOOP_GRACE_S, look)

    def abort(self, reason: str) -> None:
        self._stop_cause = RuntimeError(reason)
        self.registry.report_fault(self, f"{self.name}{self._point_suffix} ended itself: {reason}", "")
        self.stop(reason)

    def status_row(self) -> dict[str, Any]:
        """Return the actor's status as plain data."""
        running = next(iter(list(self.running.values())), None)
        return {
            "actor": self.name,
            "id": self.id,
            "class": self.class_name,
            "place": self.rank,
            "point": dict(self.point),
            "born_at": self.spawned_at,
            "state": self.state,
            "mailbox": self._mailbox.qsize(),
            "running": running.method if running else None,
            "seconds": monotonic() - running.started_at if running else None,
            "messages": self.num_messages,
            "last_error": self.last_error,
        }

    def snapshot_endpoints(
        self, node: str, awaited: Mapping[tuple[str, MessageKey], Sequence[PendingEndpointCall]]
    ) -> list[ActiveEndpoint]:
        """Return the messages in progress and the replies that each waits for. Any thread."""
        now = monotonic()
        return [
            ActiveEndpoint(
                actor=self.id,
                name=self.name,
                node=node,
                endpoint=running.method.removeprefix("="),
                caller=running.caller,
                call=max(0, key[1]) if key[0] >= 0 else 0,
                is_async=self._loop is not None,
                running_s=now - running.started_at,
                frames=_awaiting_frames(running.task),
                pending_calls=tuple(awaited.get((self.id, key), ())),
            )
            for key, running in list(self.running.items())
        ]

    # ---- the thread

    def _run(self) -> None:
        peer, request = self._spawn_request
        try:
            self.registry.prepare_thread()
            Class, args, kwargs, procs_ref = self.registry.transport.payloads.unpack(peer, None, request.payload)
            instance = Instance(self.name, self.id, self.point, procs_ref, self.owner, self)
            context_var.set(Context(instance, self.point))
            self.procs_ref = procs_ref
            self.class_name = Class.__name__
            on_loop = base.runs_on_loop(Class)
            with self._interruptible.section(_INIT_KEY):
                self.actor = Class(*args, **kwargs)
            del args, kwargs
        except BaseException as error:
            self._interruptible.end_section()
            self._init_failed(error)
            on_loop = False
        else:
            self.state = "living"
        self._spawn_request = (None, None)
        self.init_done.set()
        self.registry.transport.release_segments()
        if on_loop:
            self._run_on_loop()
        else:
            self._run_on_thread()

    def _init_failed(self, error: BaseException) -> None:
        described = faults.describe_exception(error, call=0, kind="init", skip=1)
        summary = f"{described.ename}: {described.text}"
        text = f"{self.class_name}.__init__ failed, so there is no actor {self.name!r}: {summary}"
        self.init_failure = messages.ActorFailure(0, "init", described.ename, text, described.traceback, None)
        self.state, self.last_error = "failed", summary
        if not isinstance(error, KeyboardInterrupt):
            self.registry.report_fault(self, text, described.traceback)

    def _run_on_thread(self) -> None:
        while True:
            item = self._mailbox.get()
            while self._pending_failures:
                self._run_supervise(self._pending_failures.popleft())
            if item is None:
                continue
            peer, request = item
            del item
            if request is _INTERRUPT_MARKER:
                self._interrupt_markers.pop()
            elif type(request) is messages.StopActor:
                self._shut_down(peer, request)
                return
            else:
                try:
                    self._handle_call(peer, request)
                except BaseException:  # sending the reply failed: the actor continues with the next call
                    log.exception("the end of a call of actor %s could not be told", self.name)
            del request
            self.registry.transport.release_segments()

    def _handle_call(self, peer: Any, request: messages.CallActor) -> None:
        key = _message_key(peer, request)
        try:
            function, args, kwargs = self._resolve_call(peer, request, key)
            with self._interruptible.section(key):
                self._check_not_interrupted(key)
                value = function(*args, **kwargs)
        except BaseException as error:
            self._interruptible.end_section()  # the interrupt may have arrived in the middle of it
            self._send_failure(peer, request, error)
        else:
            self._send_result(peer, request, value)
        finally:
            self._forget_call(key)

    # ---- the event loop

    def _run_on_loop(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        NON_BLOCKING_THREADS[threading.get_ident()] = (
            f"get() would stop the event loop of {self.class_name}, which has async endpoints: write `await future`; "
            "in an actor whose endpoints are all `def`, get() is fine"
        )
        self._context = copy_context()
        self._loop = loop
        loop.call_soon(self._drain_mailbox)
        try:
            while self.state != "stopped":
                with contextlib.suppress(KeyboardInterrupt):  # an interrupt that arrived outside its target code
                    loop.run_forever()
        finally:
            NON_BLOCKING_THREADS.pop(threading.get_ident(), None)
            loop.close()

    def _drain_mailbox(self) -> None:
        self._is_wake_pending = False
        while True:
            while self._pending_failures:
                self._create_task(self._run_supervise_async(self._pending_failures.popleft()))
            if self._is_stopping or self._mailbox.empty():
                return
            item = self._mailbox.get()
            if item is None:
                continue
            peer, request = item
            if request is _INTERRUPT_MARKER:
                self._interrupt_markers.pop()
            elif type(request) is messages.StopActor:
                self._is_stopping = True
                self._create_task(self._shut_down_async(peer, request))
            else:
                self._create_task(self._handle_call_async(peer, request))

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle_call_async(self, peer: Any, request: messages.CallActor) -> None:
        key = _message_key(peer, request)
        try:
            function, args, kwargs = self._resolve_call(peer, request, key)
            with self._interruptible.section(key):
                self._check_not_interrupted(key)
                value = function(*args, **kwargs)
            del args, kwargs
            if inspect.iscoroutine(value):
                value = await self._await_interruptibly(key, value)
            elif inspect.isawaitable(value):
                value = await value
        except BaseException as error:
            self._interruptible.end_section()
            self._send_failure(peer, request, error)
        else:
            self._send_result(peer, request, value)
            del value
        finally:
            self._forget_call(key)
            self.registry.transport.release_segments()

    @types.coroutine
    def _await_interruptibly(self, key: MessageKey, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await `work` so that each of its steps can be interrupted."""
        step, sent_value = work.send, None
        while True:
            try:
                with self._interruptible.section(key):
                    awaited = step(sent_value)
            except StopIteration as end:
                return end.value
            step = work.send
            try:
                sent_value = yield awaited
            except BaseException as error:
                step, sent_value = work.throw, error

    # ---- the parts of a message shared by both modes

    def _resolve_call(
        self, peer: Any, request: messages.CallActor, key: MessageKey
    ) -> tuple[Callable[..., Any], Any, Any]:
        self.num_messages += 1
        task = asyncio.current_task() if self._loop is not None else None
        self.running[key] = RunningMessage(request.method, monotonic(), task, peer.address.node)
        message_var.set(key)
        if self.init_failure is not None:
            self.registry.transport.payloads.discard(peer, request)
            raise _NoActor
        if self._interrupt_markers and request.method[0] != "=":
            self.registry.transport.payloads.discard(peer, request)
            raise KeyboardInterrupt(_INTERRUPTED_BEFORE_START)
        method = request.method
        args, kwargs = self.registry.transport.payloads.unpack(peer, request.pickled, request.payload)
        point = self.point
        if request.mesh_slice is not None:
            point = Point(
                request.mesh_slice.indices.index(self.rank),
                Extent(request.mesh_slice.dim_names, request.mesh_slice.sizes),
            )
        known_context = context_var.get()
        if point is not known_context.message_rank:
            context_var.set(Context(known_context.actor_instance, point))
        if method[0] == "=":
            function, *rest = args
            return function, (self.actor, *rest), kwargs
        Class = type(self.actor)
        mark = getattr(Class, method, None)
        if not isinstance(mark, base.EndpointProperty):
            names = list(base.endpoints_of(Class))
            raise AttributeError(base.no_such_endpoint(Class.__name__, names, method, is_method=mark is not None))
        if mark.explicit_response_port:
            args = (self._make_reply_port(peer, request, point), *args)
        return mark.method, (self.actor, *args), kwargs

    def _check_not_interrupted(self, key: MessageKey) -> None:
        """Raise KeyboardInterrupt if the call was interrupted before it started."""
        if key in self._interrupted_keys:
            raise KeyboardInterrupt(_INTERRUPTED_BEFORE_START)

    def _forget_call(self, key: MessageKey) -> None:
        self.running.pop(key, None)
        self._interrupted_keys.discard(key)

    def _make_reply_port(self, peer: Any, request: messages.CallActor, point: Point) -> Port[Any]:
        if request.reply_port is not None:
            return Port(messages.PortAddress(request.reply_port.address, request.reply_port.port, point.rank))
        return Port(messages.PortAddress(peer.address, request.call, point.rank) if request.call else None)

    def _has_explicit_port(self, request: messages.CallActor) -> bool:
        mark = getattr(type(self.actor), request.method, None)
        return isinstance(mark, base.EndpointProperty) and mark.explicit_response_port

    def _send_result(self, peer: Any, request: messages.CallActor, value: Any) -> None:
        if not (request.call or request.reply_port) or self._has_explicit_port(request):
            return
        transport = self.registry.transport
        try:
            if request.reply_port is not None:
                Port(
                    messages.PortAddress(
                        request.reply_port.address, request.reply_port.port, self._rank_in_view(request)
                    )
                ).send(value)
            elif value is None:
                peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))
            else:
                plain, payload = transport.payloads.pack(value, (peer,), name="the result")
                transport.reply(peer, messages.ActorReply(request.call, plain, payload))
        except PeerLost:
            pass
        except Exception as error:  # a result that cannot be sent is an error of the call; this thread continues
            self._send_failure(peer, request, error)

    def _rank_in_view(self, request: messages.CallActor) -> int:
        return request.mesh_slice.indices.index(self.rank) if request.mesh_slice is not None else self.rank

    def _send_failure(self, peer: Any, request: messages.CallActor, error: BaseException) -> None:
        failure = self.init_failure
        if failure is None:
            failure = faults.describe_exception(error, call=request.call, skip=1)
            if isinstance(error, asyncio.CancelledError) and self._is_stopping:
                failure = self._stopped_failure(request.call, "it was stopped")
            self.last_error = f"{request.method}: {failure.ename}{failure.text and ': '}{failure.text}"
        with contextlib.suppress(PeerLost):
            if request.reply_port is not None:
                Port(
                    messages.PortAddress(
                        request.reply_port.address, request.reply_port.port, self._rank_in_view(request)
                    )
                ).exception(error)
            elif request.call:
                peer.send(encode(failure_reply(failure, request.call, self._rank_in_view(request))))
            elif self.init_failure is None and not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                # No reply is expected, so report the failure to the owner, unless it is an interrupt or a cancellation.
                text = f"{self.name}.{request.method}{self._point_suffix} failed: {failure.ename}: {failure.text}"
                self.registry.report_fault(self, text, failure.traceback)

    def _stopped_failure(self, call: int, reason: str) -> messages.ActorFailure:
        return messages.ActorFailure(call, "stopped", "ActorStopped", f"the actor {self.name!r} has ended: {reason}")

    # ---- failures of what it owns

    def _run_supervise(self, failure: faults.MeshFailure) -> None:
        supervise = getattr(self.actor, "__supervise__", None)
        try:
            handled = bool(supervise(failure)) if supervise is not None else False
        except BaseException as error:
            failure, handled = _supervise_failure(failure, self.name, error), False
        if not handled:
            self.registry.escalate(self, failure)

    async def _run_supervise_async(self, failure: faults.MeshFailure) -> None:
        supervise = getattr(self.actor, "__supervise__", None)
        try:
            handled = supervise(failure) if supervise is not None else False
            if inspect.isawaitable(handled):
                handled = await handled
        except BaseException as error:
            failure, handled = _supervise_failure(failure, self.name, error), False
        if not handled:
            self.registry.escalate(self, failure)

    # ---- shutdown

    def _shut_down(self, peer: Any, request: messages.StopActor) -> None:
        cleanup = getattr(self.actor, "__cleanup__", None)
        try:
            if cleanup is not None:
                cleanup(self._stop_cause)
        except BaseException:
            log.exception("__cleanup__ of %s%s failed", self.name, self._point_suffix)
        self._finish_shutdown(peer, request)

    async def _shut_down_async(self, peer: Any, request: messages.StopActor) -> None:
        own_task = asyncio.current_task()
        others = [task for task in self._tasks if task is not own_task]
        if others:
            _, unfinished = await asyncio.wait(others, timeout=_STOP_GRACE_S)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=_CANCEL_GRACE_S)
        cleanup = getattr(self.actor, "__cleanup__", None)
        try:
            if cleanup is not None:
                done = cleanup(self._stop_cause)
                if inspect.isawaitable(done):
                    await done
        except BaseException:
            log.exception("__cleanup__ of %s%s failed", self.name, self._point_suffix)
        self._finish_shutdown(peer, request)
        assert self._loop is not None
        self._loop.stop()

    def _finish_shutdown(self, peer: Any, request: messages.StopActor) -> None:
        self._stop_reason = request.reason
        self.state = "stopped"
        self.actor = None
        self.registry.unregister(self, request.reason)
        with contextlib.suppress(PeerLost):
            if peer is not None and request.call:
                peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))
        self._refuse_queued()
        self.ended.set()

    def _refuse_queued(self) -> None:
        """Refuse messages that arrived too late.

        Also runs on the thread that delivers a message, if that looked the actor up just before its end.
        """
        with contextlib.suppress(Empty):
            while True:
                item = self._mailbox.get_nowait()
                if item is not None and item[0] is not None:
                    self.registry.refuse(item[0], item[1], self._stopped_failure(0, self._stop_reason))


def _awaiting_frames(task: asyncio.Task[None] | None) -> tuple[Frame, ...]:
    """Return a task's frames, outermost first, through all coroutines that it awaits."""
    frames: list[Frame] = []
    awaitable: Any = task.get_coro() if task is not None else None
    while awaitable is not None and len(frames) < MAX_END_FRAMES:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(Frame(file=code.co_filename, line=frame.f_lineno or code.co_firstlineno, function=code.co_name))
        # `_await_interruptibly` drives its coroutine itself, so `cr_await` does not show it
        inner = frame.f_locals.get("work") if code is ActorRunner._await_interruptibly.__code__ else None
        awaitable = inner or getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return tuple(frames)


def _message_key(peer: Any, request: messages.CallActor) -> MessageKey:
    return (peer.id, request.call) if request.call else (-1, id(request))


class _NoActor(Exception):
    """`__init__` failed; `ActorRunner.init_failure` has the error."""


def failure_reply(failure: messages.ActorFailure, call: int, rank: int) -> messages.ActorFailure:
    return messages.ActorFailure(
        call, failure.kind, failure.ename, failure.text, failure.traceback, failure.pickled, rank
    )


def _supervise_failure(failure: faults.MeshFailure, name: str, error: BaseException) -> faults.MeshFailure:
    text = f"{name}.__supervise__ raised {type(error).__name__}: {error}, when it was told: {failure}"
    return faults.MeshFailure(failure.mesh_name, failure.ranks, text, "".join(traceback.format_exception(error)))
