"""Run one actor: its thread, one message at a time.

An actor whose endpoints are all `def` processes its mailbox on its own thread. An actor with `async def` endpoints runs
an event loop on its own thread: each message starts a task, in order of arrival, and tasks interleave at `await`; its
`def` endpoints run on the same loop and block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from meshbook.actors import base
from meshbook.actors.runtime import faults, hooks
from meshbook.actors.runtime.actor_loop import ActorLoop
from meshbook.actors.runtime.calls import IncomingCall, MessageKey, StopRequest
from meshbook.actors.runtime.construction import INIT_KEY, Construction, describe_init_failure
from meshbook.actors.runtime.context import Context, Instance, context_var, message_var
from meshbook.actors.runtime.interrupts import INTERRUPTED_BEFORE_START, Interruptible
from meshbook.actors.runtime.mailbox import Mailbox
from meshbook.actors.runtime.recording import recording
from meshbook.actors.runtime.records import ActorRecord, RunningMessage
from meshbook.actors.runtime.refs import ProcMeshRef
from meshbook.actors.runtime.transport import Transport
from meshbook.actors.shape import Extent, Point
from meshbook.errors import traceback_of
from meshbook.wire import messages
from meshbook.wire.messages import ActiveEndpoint, PendingEndpointCall

log = logging.getLogger("meshbook.actors")

_LOOP_GRACE_S = 0.2  # for the event loop to process a cancellation; then the code that blocks it is interrupted
_DEL_GRACE_S = 1.0  # for an actor's `__del__`; then whoever has stopped the actor waits no longer


class ActorProcess(Protocol):
    """The process that an actor lives in."""

    transport: Transport

    def prepare_thread(self) -> None:
        """Prepare this thread for user code."""

    def send_fault(
        self, owner: messages.ActorAddress, name: str, ranks: tuple[int, ...], text: str, trace: str
    ) -> None:
        """Report to the owner of `name` a failure that no caller receives."""

    def refuse(self, peer: Any, request: Any, failure: messages.ActorFailure) -> None:
        """Refuse a message for an actor that has ended."""

    def unregister(self, runner: ActorRunner, reason: str) -> None:
        """Forget an actor that has ended."""


class ActorRunner:
    """One actor in this process."""

    def __init__(self, process: ActorProcess, peer: Any, request: messages.SpawnActor) -> None:
        self.id, self.name, self.owner = request.actor, request.name, request.owner
        self.point = Point(request.index, Extent(request.dim_names, request.sizes))
        self.actor: Any = None
        self.procs_ref: ProcMeshRef | None = None  # set once the spawn request is unpacked
        self.ended = threading.Event()
        self._process, self._transport = process, process.transport
        self._record = ActorRecord(request.actor, request.name, self.point)
        self._spawn_request: tuple[Any, Any] = (peer, request)
        self._mailbox = Mailbox()
        self._thread = threading.Thread(
            target=self._run, name=f"{messages.ACTOR_THREAD_PREFIX}{request.name}", daemon=True
        )
        self._loop: ActorLoop | None = None
        self._interruptible = Interruptible(self._transport.reactor.call_later)
        self.construction = Construction(request.name, self._interruptible, self._transport.reactor.call_later)
        self._is_stop_requested = False  # set while queued messages are still processed; the name is already free
        self._is_stopping = False  # its StopActor was processed: messages queued after it are refused
        self._stop_cause: BaseException | None = None  # the cause of the end, passed to `__cleanup__`
        self._stop_reason = ""

    def start(self) -> None:
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return 0 if self._loop is not None else self._thread.ident or 0

    @property
    def holds_name(self) -> bool:
        """Whether this actor reserves its name in this process."""
        return self._record.state != "failed" and not self._is_stop_requested

    def put(self, item: IncomingCall | StopRequest) -> None:
        """Put a message into the mailbox. Any thread."""
        self._mailbox.put(item)
        if self._loop is not None or self._record.state == "stopped":
            self._wake()

    def notify_failure(self, failure: faults.MeshFailure) -> None:
        """Notify the actor that something it owns has failed; handled before any queued message."""
        self._mailbox.put_first(failure)
        self._wake()

    def stop(self, reason: str) -> None:
        self.request_stop(None, messages.StopActor(0, self.id, reason))

    def request_stop(self, peer: Any, request: messages.StopActor) -> None:
        """Queue a stop: messages sent before it are processed first. Any thread."""
        self._is_stop_requested = True
        self.put(StopRequest(peer, request))
        self.construction.end_soon(lambda reason: self._finish_shutdown(StopRequest.own(self.id, reason)))

    def abort(self, reason: str) -> None:
        self._fail(RuntimeError(reason), f"{self._record.label} ended itself: {reason}", "")

    def _fail(self, cause: BaseException, text: str, trace: str) -> None:
        """End the actor before it takes another message, and report that to its owner. Any thread."""
        if self._stop_cause is None and not self._is_stopping:
            self._stop_cause, self._is_stop_requested = cause, True
            self._report_fault(text, trace)
            self._mailbox.put_first(StopRequest.own(self.id, text))
            self._wake()

    def _wake(self) -> None:
        if self._record.state == "stopped":
            self._refuse_queued()
        elif self._loop is not None:
            self._loop.wake()

    def interrupt(self, key: MessageKey | None) -> None:
        """Interrupt a running or queued message, or all messages received so far. Any thread. Does not wait.

        A `def` endpoint gets a KeyboardInterrupt as soon as it runs Python code; an async endpoint is cancelled.

        Args:
            key: the message; None for all that were received until now, `__init__` included.
        """
        if key is None:
            self._mailbox.interrupt_queued()
            self._wake()
            self.construction.interrupt()
        else:
            self._interruptible.marked.add(key)
        for known, running in list(self._record.running.items()):
            if key in (None, known):
                self._interrupt_message(known, running)

    def _interrupt_message(self, key: MessageKey, running: RunningMessage) -> None:
        self._interruptible.marked.add(key)  # it may not have started yet
        if self._loop is None:
            self._interruptible.interrupt(key)
            return
        if running.task is not None:
            self._loop.cancel(running.task)

        def look() -> None:  # code between two awaits may be blocking the loop
            if self._record.running.get(key) is running:
                self._interruptible.interrupt(key)

        self._transport.reactor.call_later(_LOOP_GRACE_S, look)

    def status_row(self) -> dict[str, Any]:
        """Return the actor's status as plain data. Any thread."""
        return self._record.status_row(num_queued=len(self._mailbox))

    def snapshot_endpoints(
        self, node: str, awaited: Mapping[tuple[str, MessageKey], Sequence[PendingEndpointCall]]
    ) -> list[ActiveEndpoint]:
        """Return the messages in progress and the replies that each waits for. Any thread."""
        return self._record.snapshot_endpoints(node, is_async=self._loop is not None, awaited=awaited)

    # ---- the thread

    def _run(self) -> None:
        peer, request = self._spawn_request
        on_loop, failure = False, None
        try:
            self._process.prepare_thread()
            Class, args, kwargs, self.procs_ref, pickled = self._transport.payloads.unpack(peer, None, request.payload)
            instance = Instance(
                self.name, self.id, self.point, self.procs_ref, self.owner, self,
                lambda procs_ref: pickle.loads(pickled)(procs_ref),
            )  # fmt: skip
            context_var.set(Context(instance, self.point))
            self._record.class_name = Class.__name__
            on_loop = base.runs_on_loop(Class)
            with self._interruptible.section(INIT_KEY):
                self.actor = Class(*args, **kwargs)
            del args, kwargs
        except BaseException as error:
            self._interruptible.end_section()
            failure = describe_init_failure(error, self._record.class_name, self.name)
        self._spawn_request = (None, None)
        if not self.construction.end(failure):  # the actor was stopped, and has ended without this thread
            self.actor = None
            return
        self._record.constructed(failure)
        if failure is not None and failure.ename != KeyboardInterrupt.__name__:
            self._report_fault(failure.text, failure.traceback)
        self._transport.release_segments()
        if on_loop and failure is None:
            self._loop = ActorLoop(self._record.class_name, self._drain_mailbox)
            self._loop.run()
        else:
            self._run_on_thread()

    def _report_fault(self, text: str, trace: str) -> None:
        self._process.send_fault(self.owner, self.name, (self.point.rank,), text, trace)

    def _run_on_thread(self) -> None:
        while True:
            item = self._mailbox.get()
            if isinstance(item, IncomingCall):
                try:
                    self._handle_call(item)
                except BaseException as error:  # sending the reply failed: the actor continues with the next call
                    log.error("the end of a call of actor %s was not reported\n%s", self.name, traceback_of(error))
            elif isinstance(item, StopRequest):
                _run_to_end(hooks.clean_up(self.actor, self._record.label, self._stop_cause, on_loop=False))
                self._finish_shutdown(item)
                return
            elif item is not None:
                _run_to_end(self._supervise(item))
            del item
            self._transport.release_segments()

    def _handle_call(self, call: IncomingCall) -> None:
        try:
            function, args, kwargs = self._begin_call(call)
            with self._interruptible.section(call.key):
                self._interruptible.check(call.key)
                value = function(*args, **kwargs)
                self._interruptible.raise_postponed()
        except BaseException as error:
            self._interruptible.end_section()  # the interrupt may have arrived in the middle of it
            self._fail_call(call, error)
        else:
            self._end_call(call, value)
        finally:
            self._forget_call(call)

    # ---- the event loop

    def _drain_mailbox(self) -> None:
        assert self._loop is not None
        while (item := self._mailbox.get(block=False, only_first=self._is_stopping)) is not None:
            if isinstance(item, IncomingCall):
                self._loop.create_task(self._handle_call_async(item))
            elif isinstance(item, StopRequest):
                self._is_stopping = True
                self._loop.create_task(self._shut_down_async(item))
            else:
                self._loop.create_task(self._supervise(item))

    async def _handle_call_async(self, call: IncomingCall) -> None:
        try:
            function, args, kwargs = self._begin_call(call)
            with self._interruptible.section(call.key):
                self._interruptible.check(call.key)
                value = function(*args, **kwargs)
            del args, kwargs
            if inspect.iscoroutine(value):
                value = await self._interruptible.await_in_sections(call.key, value)
            elif inspect.isawaitable(value):
                value = await value
            self._interruptible.raise_postponed()
        except BaseException as error:
            self._interruptible.end_section()
            self._fail_call(call, error)
        else:
            self._end_call(call, value)
            del value
        finally:
            self._forget_call(call)
            self._transport.release_segments()

    async def _shut_down_async(self, stop: StopRequest) -> None:
        assert self._loop is not None
        await self._loop.finish_tasks()
        await hooks.clean_up(self.actor, self._record.label, self._stop_cause, on_loop=True)
        self._finish_shutdown(stop)
        self._loop.stop()

    # ---- the parts of a message shared by both modes

    def _begin_call(self, call: IncomingCall) -> tuple[Callable[..., Any], Any, Any]:
        self._record.begin(call, asyncio.current_task() if self._loop is not None else None)
        message_var.set(call.key)
        if self.construction.failure is not None:
            call.discard()
            raise _NoActor
        if (call.is_interrupted or self._mailbox.is_interrupted) and not call.is_internal:
            call.discard()
            raise KeyboardInterrupt(INTERRUPTED_BEFORE_START)
        point = self.point if call.request.mesh_slice is None else call.point_for(self.point)
        known_context = context_var.get()
        if point is not known_context.message_rank:
            context_var.set(Context(known_context.actor_instance, point))
        bound = call.bind(self.actor, point, self.name, self._record.reply_ports)
        if recording.recorder is not None:
            recording.recorder.message_begun(self, call.request.method, *bound, point)
        return bound

    def _end_call(self, call: IncomingCall, value: Any) -> None:
        try:
            call.send_result(value, self.point)
        except Exception as error:  # a result that cannot be sent is an error of the call; this thread continues
            self._fail_call(call, error)

    def _fail_call(self, call: IncomingCall, error: BaseException) -> None:
        method, failure = call.request.method, self.construction.failure
        if recording.recorder is not None and self.actor is not None:
            recording.recorder.message_failed(self, error)
        if failure is None:
            failure = faults.describe_exception(error, call=call.request.call)
            if isinstance(error, asyncio.CancelledError) and self._is_stopping:
                failure = faults.stopped_failure(self.name, "it was stopped")
            what = faults.summary_of(failure)
            self._record.last_error = f"{method}: {what}"
            text = f"{self.name}.{method}{self._record.label.removeprefix(self.name)} failed: {what}"
            if call.ends_actor(error):
                self._fail(error, text, failure.traceback)
                failure = faults.ended_failure(failure, f"{self.name}.{method}")
            elif not (call.expects_reply or isinstance(error, KeyboardInterrupt | asyncio.CancelledError)):
                self._report_fault(text, failure.traceback)
        if call.expects_reply:
            call.send_failure(failure, self.point)

    def _forget_call(self, call: IncomingCall) -> None:
        self._record.running.pop(call.key, None)
        self._interruptible.marked.discard(call.key)

    async def _supervise(self, failure: faults.MeshFailure) -> None:
        unhandled = await hooks.supervise(self.actor, self.name, failure, on_loop=self._loop is not None)
        if unhandled is not None:
            fault = unhandled.mesh_name, unhandled.ranks, str(unhandled), unhandled.traceback
            self._process.send_fault(self.owner, *fault)

    def _finish_shutdown(self, stop: StopRequest) -> None:
        self._stop_reason = stop.request.reason
        self._record.state = "stopped"
        self._process.unregister(self, stop.request.reason)
        self._refuse_queued()
        self._record.give_up_ports(stop.request.reason)
        self._transport.reactor.call_later(_DEL_GRACE_S, stop.confirm)
        run_del = hooks.deletion_of(self.actor)
        self.actor = self._stop_cause = None
        run_del()
        stop.confirm()
        self.ended.set()

    def _refuse_queued(self) -> None:
        """Refuse messages that arrived too late, also on the thread that delivers one just before the actor's end."""
        while (item := self._mailbox.get(block=False)) is not None:
            if not isinstance(item, faults.MeshFailure) and item.peer is not None:
                self._process.refuse(item.peer, item.request, faults.stopped_failure(self.name, self._stop_reason))


def _run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that does not wait."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


class _NoActor(Exception):
    """`__init__` failed; `ActorRunner.construction` has the error."""
