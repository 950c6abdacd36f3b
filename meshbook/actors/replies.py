"""Collect the replies of a mesh to a call: all as one value, or one by one.

The transport's reader thread receives replies, those of this process included, so `on_reply` and `on_peer_lost` never
run concurrently. The waiting thread unpacks them. A process that exits counts as an immediate error reply.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from meshbook.actors.mesh_references import MeshReferences
from meshbook.actors.runtime import faults
from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.actors.runtime.context import context, message_var
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.payloads import PendingPayload
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.refs import ActorRef
from meshbook.actors.runtime.transport import Transport, encode, local_transport
from meshbook.ids import name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages

# Seconds to wait after the first failure of a call for others of the same call, so that one error can name all ranks
# with the same failure.
_GATHER_FAILURES_S = 0.1


class ReplyCollector:
    """The replies of some actors, by their index in the called mesh."""

    def __init__(self, ref: ActorRef, axes: MeshAxes, method: str) -> None:
        self.ref, self.axes, self.method = ref, axes, method
        self.pending_by_peer: dict[int, int] = {}  # index of each actor that has not replied, by peer id
        self.call_id = 0  # the id that their replies carry
        instance = context().actor_instance
        self.caller = None if instance.runner is None else (instance.mesh_id, message_var.get())
        self.started_at = time.monotonic()

    def register(self, transport: Transport, peers: Sequence[Any], indices: Sequence[int] | None = None) -> int:
        """Receive the replies of these peers; return the call id for the message to them.

        Args:
            indices: their indices in the called mesh; None: all of it, in order.
        """
        self.pending_by_peer = {peer.id: index for index, peer in zip(indices or count(), peers, strict=False)}
        self.call_id = transport.replies.add(self)
        return self.call_id

    def get_futures(self) -> Sequence[Future[Any]]:
        raise NotImplementedError

    def awaited_replies(self) -> list[messages.PendingEndpointCall]:
        """Return the actors that have not replied, if a caller waits for them: see `ReplyHandler`. Any thread."""
        if not any(future.is_awaited for future in self.get_futures()):
            return []
        ref, axes, since_s = self.ref, self.axes, time.monotonic() - self.started_at
        return [
            messages.PendingEndpointCall(
                ref.id, ref.name, self.method, ref.addresses[axes.ranks[index]].node, self.call_id, since_s
            )
            for index in sorted(self.pending_by_peer.values())
        ]

    def on_reply(self, peer: Any, reply: Any) -> bool:
        index = self.pending_by_peer.pop(peer.id, None)
        if index is None or type(reply) is messages.PortMessage:
            # A port may have been passed on to another actor: `rank` tells whose reply it is.
            rank = getattr(reply, "rank", None)
            if index is not None and rank not in (None, index):
                self.pending_by_peer[peer.id] = index
            if rank is not None:
                index = rank
                for peer_id, pending_index in list(self.pending_by_peer.items()):
                    if pending_index == rank:
                        del self.pending_by_peer[peer_id]
        if index is None:
            return not self.pending_by_peer
        return self.on_actor_reply(index, peer, reply)

    def on_peer_lost(self, peer: Any, reason: str) -> bool:
        index = self.pending_by_peer.pop(peer.id, None)
        return self.on_actor_lost(index, peer, reason) if index is not None else not self.pending_by_peer

    def on_actor_reply(self, index: int, peer: Any, reply: Any) -> bool:
        raise NotImplementedError

    def on_actor_lost(self, index: int, peer: Any, reason: str) -> bool:
        raise NotImplementedError

    def make_lost_error(self, index: int, peer: Any) -> faults.SupervisionError:
        """Return the error for a lost actor. Runs on the waiting thread, because it may wait for the exit reason."""
        ref = self.ref
        exit_reasons = local_transport().exit_reasons
        exit_reason = exit_reasons.describe(peer.address, wait=True)
        if exit_reasons.has_mesh_ended(peer.address):
            hint = "create_mesh starts a new mesh"
        else:
            hint = "a slice without it can still be called"
        error = faults.SupervisionError(
            f"{ref.name}.{self.method}: rank {index} of {ref.name!r} is lost: {exit_reason}; {hint}",
            ranks=(index,),
            mesh_name=ref.name,
        )
        announced_exit = getattr(peer, "announced_exit", None)
        if announced_exit is not None or (ref.procs_ref is not None and ref.procs_ref.name in stopped_procs):
            why = f"were stopped: {announced_exit}" if announced_exit else "were stopped"
            text = f"{ref.name}.{self.method}: the processes of {ref.name!r} {why}"
            error = faults.ActorStopped(text, ranks=(index,), mesh_name=ref.name)
        error.endpoint = f"{ref.name}.{self.method}"
        return error

    def interrupt(self) -> str:
        """Interrupt the call on actors that have not replied.

        Returns:
            What was interrupted, "trainers.step on ranks 0-3".
        """
        ref, axes = self.ref, self.axes
        pending = sorted(self.pending_by_peer.values())
        request = encode(messages.InterruptActor(ref.id, self.call_id))
        for index in pending:
            with contextlib.suppress(PeerLost):
                ref.peer(axes.ranks[index]).send(request)
        return f"{ref.name}.{self.method} on {name_ranks(pending)}"

    def make_failure_error(self, failures: dict[int, messages.ActorFailure]) -> faults.ActorError:
        ref = self.ref
        error = faults.combine_failures(failures, f"{ref.name}.{self.method}", ref.name)
        if isinstance(ref.references, MeshReferences) and (hint := ref.references.missing_module_hint(failures)):
            error.add_note(hint)
        return error

    def mark_failure_reported(self) -> None:
        """Record that a caller receives a failure of this mesh, so that the fault hook is not needed."""
        reported_failures[self.ref.name] = time.monotonic()


class GatherCollector(ReplyCollector):
    """Collects all replies as one value."""

    def __init__(
        self,
        ref: ActorRef,
        axes: MeshAxes,
        method: str,
        make_result: Callable[[list[Any]], Any] = lambda values: None,
        *,
        label: str | None = None,
        ignore_lost: bool = False,
    ) -> None:
        super().__init__(ref, axes, method)
        self.future: Future[Any] = Future(label or f"{ref.name}.{method}")
        self.make_result, self.ignore_lost = make_result, ignore_lost
        self.replies: dict[int, tuple[Any, Any]] = {}
        self.failures: dict[int, messages.ActorFailure] = {}

    def get_futures(self) -> Sequence[Future[Any]]:
        return (self.future,)

    def on_actor_reply(self, index: int, peer: Any, reply: Any) -> bool:
        if type(reply) is messages.ActorFailure:
            self.failures[index] = reply
            if reply.kind != "raised":
                self.mark_failure_reported()
            if self.pending_by_peer and len(self.failures) == 1:
                local_transport().reactor.call_later(_GATHER_FAILURES_S, self._fail)
        else:
            self.replies[index] = (peer, reply)
        if self.pending_by_peer:
            return False
        if self.failures:
            self._fail()
        else:
            self.future.resolve(self._unpack_all)
        return True

    def on_actor_lost(self, index: int, peer: Any, reason: str) -> bool:
        if self.ignore_lost:
            if not self.pending_by_peer:
                self.future.resolve(self._unpack_all)
            return not self.pending_by_peer
        self.mark_failure_reported()
        self._discard()
        self.future.resolve(lambda: _raise(self.make_lost_error(index, peer)))
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # release the memory of replies that were not unpacked
            self._discard()

    def _discard(self) -> None:
        while self.replies:
            local_transport().payloads.discard(*self.replies.popitem()[1])

    def _fail(self) -> None:
        failures = dict(self.failures)
        self._discard()
        self.future.resolve(lambda: _raise(self.make_failure_error(failures)))

    def _unpack_all(self) -> Any:
        payloads = local_transport().payloads
        values = []
        for index in sorted(self.replies):
            peer, reply = self.replies.pop(index)
            values.append(payloads.unpack(peer, reply.pickled, reply.payload))
        return self.make_result(values)


class StreamCollector(ReplyCollector):
    """Resolves one future per reply: the first future gets the first reply."""

    def __init__(self, ref: ActorRef, axes: MeshAxes, method: str) -> None:
        super().__init__(ref, axes, method)
        self.futures: list[Future[Any]] = [Future(f"{ref.name}.{method}.stream()") for _ in range(axes.size)]
        self._num_resolved = 0

    def get_futures(self) -> Sequence[Future[Any]]:
        return self.futures

    def on_actor_reply(self, index: int, peer: Any, reply: Any) -> bool:
        future = self._next_future()
        if type(reply) is messages.ActorFailure:
            if reply.kind != "raised":
                self.mark_failure_reported()
            future.resolve(lambda: _raise(self.make_failure_error({index: reply})))
        else:
            future.resolve(PendingPayload(local_transport().payloads, peer, reply).unpack)
        return not self.pending_by_peer

    def on_actor_lost(self, index: int, peer: Any, reason: str) -> bool:
        self.mark_failure_reported()
        self._next_future().resolve(lambda: _raise(self.make_lost_error(index, peer)))
        return not self.pending_by_peer

    def _next_future(self) -> Future[Any]:
        future = self.futures[self._num_resolved]
        self._num_resolved += 1
        return future


def _raise(error: BaseException) -> Any:
    raise error


# When a failure of a mesh last reached a caller, by mesh name: `unhandled_faults` stops a cell only for other failures.
reported_failures: BoundedDict[str, float] = BoundedDict()
stopped_procs: BoundedDict[str, None] = BoundedDict()  # names of process meshes that were stopped from here
