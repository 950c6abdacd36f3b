"""The actors of a process, the meshes that it owns elsewhere, and the routing of their failures to owners."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.actors.runtime.calls import IncomingCall, failure_reply
from meshbook.actors.runtime.exit_inquiry import ExitInquiry
from meshbook.actors.runtime.payloads import PICKLED_NONE
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.refs import ActorRef
from meshbook.actors.runtime.runner import ActorRunner
from meshbook.actors.runtime.transport import Transport, encode, local_transport, unblock_signals
from meshbook.actors.shape import Extent, Point
from meshbook.clock import monotonic
from meshbook.wire import messages
from meshbook.wire.messages import NodeAddress
from meshbook.wire.process_control import ACTORS_GRACE_S
from meshbook.wire.stop_timing import REASON_TIMEOUT_S

_EXPLAIN_S = 0.25  # after which it is usually known how a process has exited; then between two looks
_NO_POINT = Point(0, Extent((), ()))
_DRAIN_S = 2.0  # of ACTORS_GRACE_S, for queued messages; the rest is for `__cleanup__`


class ActorRegistry:
    """All actors of this process, and the meshes that its actors and other code own elsewhere."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.actors: dict[str, ActorRunner] = {}
        self.owned: dict[str, OwnedMesh] = {}
        self.on_rank = False
        # on a rank: makes its GPU the calling thread's current device
        self.use_device: Callable[[], None] = lambda: None
        self.exit_reason: str | None = None  # why this process is ending: new spawns are refused
        # meshes of processes that were started here and live until they are stopped
        self.started_here: dict[str, Any] = {}
        # called for failures that no actor has handled
        self.on_unhandled_failure: Callable[[faults.MeshFailure], None] = _print_failure
        self._process_threads = ThreadPoolExecutor(2, thread_name_prefix="meshbook-process")
        # id -> (name, reason), for replies to late callers
        self._ended_actors: BoundedDict[str, tuple[str, str]] = BoundedDict()
        transport.message_handlers.update(
            {
                messages.SpawnActor: self._spawn,
                messages.CallActor: self._call,
                messages.StopActor: self._stop,
                messages.InterruptActor: self._interrupt,
                messages.FaultReport: self._faulted,
                messages.ActorEnded: self._actor_ended,
            }
        )
        self.inquiry = ExitInquiry(transport, lambda: {runner.owner.address for runner in list(self.actors.values())})
        transport.peer_lost_callbacks.append(self._peer_lost)

    def status_rows(self) -> list[dict[str, Any]]:
        """Return one row for each actor of this process."""
        return [runner.status_row() for runner in list(self.actors.values())]

    def snapshot_endpoints(self) -> tuple[messages.ActiveEndpoint, ...]:
        """Return the endpoints that run in this process, and the replies that they wait for. Any thread."""
        awaited: dict[Any, list[messages.PendingEndpointCall]] = {}
        for caller, replies in self.transport.replies.awaited_replies():
            awaited.setdefault(caller, []).extend(replies)
        node = self.transport.address.node
        return tuple(
            endpoint for runner in list(self.actors.values()) for endpoint in runner.snapshot_endpoints(node, awaited)
        )

    def prepare_thread(self) -> None:
        """Prepare this thread for user code.

        CUDA's current device is per thread, and defaults to the first GPU: without this, the actors of all ranks would
        compute there.
        """
        unblock_signals()
        self.use_device()

    # ---- messages
    def _spawn(self, peer: Any, request: messages.SpawnActor) -> None:
        if any(runner.name == request.name and runner.holds_name for runner in list(self.actors.values())):
            text = (
                f"an actor named {request.name!r} lives in this process already; choose another name, or stop that one "
                "first"
            )
            peer.send(encode(messages.ActorFailure(request.call, "name", "ValueError", text)))
            return
        if self.exit_reason is not None:
            text = f"the process in which {request.name!r} was to live is ending: {self.exit_reason}"
            peer.send(encode(messages.ActorFailure(request.call, "stopped", "ActorStopped", text)))
            return
        runner = self.actors[request.actor] = ActorRunner(self, peer, request)
        runner.start()
        peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))

    def _call(self, peer: Any, request: messages.CallActor) -> None:
        if not request.actor and request.method == "=run":
            self._process_threads.submit(self._call_beside, IncomingCall(self.transport, peer, request))
            return
        if not request.actor:
            rows = self.transport.payloads.pack(self.status_rows(), (peer,))
            peer.send(encode(messages.ActorReply(request.call, *rows)))
            return
        runner = self.actors.get(request.actor)
        if runner is None:
            self.refuse(peer, request, None)
            return
        call = IncomingCall(self.transport, peer, request)
        if request.method == "=now":
            threading.Thread(target=self._call_beside, args=(call, runner), daemon=True).start()
        else:
            runner.put(call)

    def _call_beside(self, call: IncomingCall, runner: ActorRunner | None = None) -> None:
        """Run a function concurrently with an actor's messages; None: it concerns no actor."""
        point = _NO_POINT if runner is None else runner.point
        try:
            self.prepare_thread()
            (function, *args), kwargs = call.unpack()
            if runner is not None:
                runner.construction.done.wait()
                if runner.construction.failure is not None:
                    call.send_failure(runner.construction.failure, point)
                    return
                args = [runner.actor, *args]
            call.send_result(function(*args, **kwargs), point)
        except BaseException as error:
            call.send_failure(faults.describe_exception(error, call=call.request.call), point)

    def _stop(self, peer: Any, request: messages.StopActor) -> None:
        runner = self.actors.get(request.actor)
        if runner is None:
            peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))
        else:
            runner.request_stop(peer, request)

    def _interrupt(self, peer: Any, request: messages.InterruptActor) -> None:
        runner = self.actors.get(request.actor)
        if runner is not None:
            runner.interrupt((peer.id, request.call) if request.call else None)

    def end_all(self, reason: str) -> bool:
        """Stop every actor, because this process is about to exit. Blocks for ACTORS_GRACE_S at most.

        Queued messages are processed for the first `_DRAIN_S` seconds; then running messages are interrupted and queued
        ones refused, so that `__cleanup__` runs in time.

        Returns:
            Whether there were any actors.
        """
        self.exit_reason = reason
        runners = list(self.actors.values())
        for runner in runners:
            runner.stop(reason)
        stopped_at = monotonic()
        _wait_until_ended(runners, stopped_at + _DRAIN_S)
        for runner in runners:
            runner.interrupt(None)
        _wait_until_ended(runners, stopped_at + ACTORS_GRACE_S)
        return bool(runners)

    def refuse(self, peer: Any, request: Any, failure: messages.ActorFailure | None) -> None:
        """Refuse a message for an actor that does not exist or has ended."""
        self.transport.payloads.discard(peer, request)
        if not isinstance(request, (messages.CallActor, messages.StopActor)) or not request.call:
            return
        if failure is None:
            name, reason = self._ended_actors.get(request.actor, ("", ""))
            failure = faults.stopped_failure(name, reason)
            if not name:
                text = "there is no such actor in this process"
                failure = messages.ActorFailure(0, "unknown", "ActorStopped", text)
        reply: messages.ActorMessage = failure_reply(failure, request.call, 0)
        if isinstance(request, messages.StopActor):
            reply = messages.ActorReply(request.call, PICKLED_NONE)
        with contextlib.suppress(PeerLost):
            peer.send(encode(reply))

    def unregister(self, runner: ActorRunner, reason: str) -> None:
        self.actors.pop(runner.id, None)
        self._ended_actors[runner.id] = (runner.name, reason)
        with contextlib.suppress(PeerLost):
            self.transport.peer(runner.owner.address).send(encode(messages.ActorEnded(runner.id)))

    # ---- ownership and failure reports
    def send_fault(
        self, owner: messages.ActorAddress, name: str, ranks: tuple[int, ...], text: str, trace: str
    ) -> None:
        """Report to its owner a failure of an actor or a mesh that no caller receives."""
        with contextlib.suppress(PeerLost):
            message = messages.FaultReport(owner.actor, name, ranks, text, trace)
            self.transport.peer(owner.address).send(encode(message))

    def _faulted(self, peer: Any, message: messages.FaultReport) -> None:
        self.notify_owner(
            message.actor, faults.MeshFailure(message.mesh_name, message.indices, message.text, message.traceback)
        )

    def _actor_ended(self, peer: Any, message: messages.ActorEnded) -> None:
        owned = self.owned.get(message.actor)
        if owned is not None:
            self._remove_owned(message.actor, owned, peer.address.node)

    def _remove_owned(self, actor_id: str, owned: OwnedMesh, node: str) -> int | None:
        """Remove an ended actor from an owned mesh and return its rank; removing the last one removes the mesh."""
        rank = owned.rank_by_node.pop(node, None)
        if not owned.rank_by_node:
            self.owned.pop(actor_id, None)
        return rank

    def notify_owner(self, owner: str, failure: faults.MeshFailure) -> None:
        """Notify the owner: an actor of this process, or with "" the process itself."""
        runner = self.actors.get(owner) if owner else None
        if runner is not None:
            runner.notify_failure(failure)
        elif not owner:
            self.on_unhandled_failure(failure)

    def _peer_lost(self, peer: Any, reason: str) -> None:
        if peer.address is None:
            return
        lost_at = monotonic()
        for actor_id, owned in list(self.owned.items()):
            rank = self._remove_owned(actor_id, owned, peer.address.node)
            if rank is None or owned.stopped or peer.announced_exit is not None:
                continue

            def tell(owned: OwnedMesh = owned, rank: int = rank) -> None:
                if owned.stopped or owned.are_procs_stopping():
                    return
                exit_reason = self.transport.exit_reasons.describe(peer.address, wait=False)
                text = f"rank {rank} of {owned.ref.name!r} is lost: {exit_reason}"
                self.notify_owner(owned.owner, faults.MeshFailure(owned.ref.name, (rank,), text, occurred_at=lost_at))

            self._call_when_explained(peer.address, tell, lost_at)

    def _call_when_explained(self, address: NodeAddress, tell: Callable[[], None], lost_at: float) -> None:
        """Call `tell` when it is known how the process there has exited, or will not be known."""
        exit_reasons, reactor = self.transport.exit_reasons, self.transport.reactor
        if exit_reasons.ask is None:
            tell()
            return
        checked: threading.Event | None = None

        def look() -> None:
            nonlocal checked
            waited_s = monotonic() - lost_at
            if checked is None and waited_s >= exit_reasons.ask_after_s:
                checked = exit_reasons.check(address)
            is_checked = checked is not None and checked.is_set()
            if is_checked or exit_reasons.is_known(address) or waited_s >= exit_reasons.ask_after_s + REASON_TIMEOUT_S:
                tell()
            else:
                reactor.call_later(_EXPLAIN_S, look)

        reactor.call_later(_EXPLAIN_S, look)


def _wait_until_ended(runners: list[ActorRunner], deadline: float) -> None:
    for runner in runners:
        runner.ended.wait(max(0.0, deadline - monotonic()))


class OwnedMesh:
    """A mesh of actors that was spawned from this process."""

    def __init__(
        self, ref: ActorRef, owner: str, rank_by_node: dict[str, int], are_procs_stopping: Callable[[], bool]
    ) -> None:
        self.ref, self.owner, self.rank_by_node = ref, owner, rank_by_node
        self.are_procs_stopping = are_procs_stopping  # whether its processes are being stopped on purpose
        self.stopped = False  # it is stopped on purpose


def _print_failure(failure: faults.MeshFailure) -> None:
    import sys

    print(f"unhandled failure of {failure.mesh_name!r}: {failure.report()}", file=sys.stderr)


_registries: dict[str, ActorRegistry] = {}
_lock = threading.Lock()


def local_registry() -> ActorRegistry:
    """Return the actor registry of this process; created on first use, together with its transport."""
    transport = local_transport()
    found = _registries.get(transport.address.node)
    if found is None:
        with _lock:
            found = _registries.get(transport.address.node)
            if found is None:
                found = _registries[transport.address.node] = ActorRegistry(transport)
                atexit.register(_end_at_exit, found)
    return found


def _end_at_exit(registry: ActorRegistry) -> None:
    """End the actors of a program that ends; a rank, which runs no exit functions, ends its own."""
    if registry.transport.address.pid == os.getpid():  # and not a fork of it
        registry.end_all("its program has ended")
