"""Who waits for the answers of a mesh, and what becomes of them: all as one value, or one by one.

Answers are heard on the thread that hears other processes, those of this process too, and unpacked by who asks for
them: no two threads are ever in `arrived` or `lost`. A process that has ended answers at once, with an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.context import context, message
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.parcels import Parcel
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.post import encode, here
from meshbook.actors.runtime.remembered import Remembered
from meshbook.ids import name_ranks
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.actors.mesh import ActorMesh

# Seconds after the first failure of a call in which others of the same call are still heard, so that one error can name
# all ranks that failed alike.
_GATHER_FAILURES_S = 0.1


class Expected:
    """Answers of some actors, by their index in the called mesh."""

    def __init__(self, mesh: ActorMesh, method: str) -> None:
        self.mesh, self.method = mesh, method
        self.index: dict[int, int] = {}  # of those that have not answered, by the peer's number
        self.number = 0  # under which they answer
        instance = context().actor_instance
        self.caller = None if instance.cabin is None else (instance.actor_id, message.get())
        self.began = time.monotonic()

    def futures_of(self) -> Sequence[Future[Any]]:
        raise NotImplementedError

    def awaited(self) -> list[messages.AnswerAwaited]:
        """See `post.Expected`. From any thread."""
        if not any(future.is_awaited for future in self.futures_of()):
            return []
        ref, axes, since_s = self.mesh._ref, self.mesh._axes, time.monotonic() - self.began
        return [
            messages.AnswerAwaited(
                ref.id, ref.name, self.method, ref.addresses[axes.ranks[index]].node, self.number, since_s
            )
            for index in sorted(self.index.values())
        ]

    def arrived(self, peer: Any, word: Any) -> bool:
        index = self.index.pop(peer.number, None)
        if index is None or type(word) is messages.ToPort:
            # Through a port that may have been passed on: it knows whose answer it is.
            rank = getattr(word, "rank", None)
            if index is not None and rank not in (None, index):
                self.index[peer.number] = index
            if rank is not None:
                index = rank
                for number, place in list(self.index.items()):
                    if place == rank:
                        del self.index[number]
        if index is None:
            return not self.index
        return self.heard(index, peer, word)

    def lost(self, peer: Any, reason: str) -> bool:
        index = self.index.pop(peer.number, None)
        return self.gone(index, peer, reason) if index is not None else not self.index

    def heard(self, index: int, peer: Any, word: Any) -> bool:
        raise NotImplementedError

    def gone(self, index: int, peer: Any, reason: str) -> bool:
        raise NotImplementedError

    def lost_error(self, index: int, peer: Any) -> faults.SupervisionError:
        """Made by who waits, so that the news of how the process ended may be waited for."""
        ref = self.mesh._ref
        how = here().news.of(peer.address, wait=True)
        error = faults.SupervisionError(
            f"{ref.name}.{self.method}: rank {index} of {ref.name!r} is lost: {how}; "
            f"a slice without it can still be called",
            ranks=(index,),
            mesh_name=ref.name,
        )
        stopped = getattr(peer, "leaving", None)
        if stopped is not None or (ref.home is not None and ref.home.name in stopped_homes):
            why = f"were stopped: {stopped}" if stopped else "were stopped"
            text = f"{ref.name}.{self.method}: the processes of {ref.name!r} {why}"
            error = faults.ActorStopped(text, ranks=(index,), mesh_name=ref.name)
        error.endpoint = f"{ref.name}.{self.method}"
        return error

    def interrupt(self) -> str:
        """End the call where it is not answered yet. Says where that is, "trainers.step on ranks 0-3"."""
        ref, axes = self.mesh._ref, self.mesh._axes
        left = sorted(self.index.values())
        word = encode(messages.InterruptActor(ref.id, self.number))
        for index in left:
            with contextlib.suppress(PeerGone):
                ref.peer(axes.ranks[index]).send(word)
        return f"{ref.name}.{self.method} on {name_ranks(left)}"

    def failed_error(self, failures: dict[int, messages.Failure]) -> faults.ActorError:
        ref = self.mesh._ref
        return faults.error_of(failures, f"{ref.name}.{self.method}", ref.name)

    def say(self) -> None:
        """Somebody is told of a failure of this mesh: it needs no hook."""
        told[self.mesh._ref.name] = time.monotonic()


class Gather(Expected):
    """All answers, as one value."""

    def __init__(
        self,
        mesh: ActorMesh,
        method: str,
        future: Future[Any],
        finish: Callable[[list[Any]], Any],
        *,
        ignore_lost: bool = False,
    ) -> None:
        super().__init__(mesh, method)
        self.future, self.finish, self.ignore_lost = future, finish, ignore_lost
        self.answers: dict[int, tuple[Any, Any]] = {}
        self.failures: dict[int, messages.Failure] = {}

    def futures_of(self) -> Sequence[Future[Any]]:
        return (self.future,)

    def heard(self, index: int, peer: Any, word: Any) -> bool:
        if type(word) is messages.Failure:
            self.failures[index] = word
            if word.kind != "raised":
                self.say()
            if self.index and len(self.failures) == 1:
                here().call_later(_GATHER_FAILURES_S, self._fail)
        else:
            self.answers[index] = (peer, word)
        if self.index:
            return False
        if self.failures:
            self._fail()
        else:
            self.future.settle(self._take)
        return True

    def gone(self, index: int, peer: Any, reason: str) -> bool:
        if self.ignore_lost:
            if not self.index:
                self.future.settle(self._take)
            return not self.index
        self.say()
        self._discard()
        self.future.settle(lambda: _raise(self.lost_error(index, peer)))
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody has asked for what came; its memory goes back
            self._discard()

    def _discard(self) -> None:
        while self.answers:
            here().parcels.discard(*self.answers.popitem()[1])

    def _fail(self) -> None:
        failures = dict(self.failures)
        self._discard()
        self.future.settle(lambda: _raise(self.failed_error(failures)))

    def _take(self) -> Any:
        parcels = here().parcels
        values = []
        for index in sorted(self.answers):
            peer, word = self.answers.pop(index)
            values.append(parcels.unpack(peer, word.plain, word.payload))
        return self.finish(values)


class Stream(Expected):
    """The answers one by one: the first future is the first to come."""

    def __init__(self, mesh: ActorMesh, method: str, count: int) -> None:
        super().__init__(mesh, method)
        self.futures: list[Future[Any]] = [Future(f"{mesh._ref.name}.{method}.stream()") for _ in range(count)]
        self._next = 0

    def futures_of(self) -> Sequence[Future[Any]]:
        return self.futures

    def heard(self, index: int, peer: Any, word: Any) -> bool:
        future = self._take_future()
        if type(word) is messages.Failure:
            if word.kind != "raised":
                self.say()
            future.settle(lambda: _raise(self.failed_error({index: word})))
        else:
            future.settle(Parcel(here().parcels, peer, word).open)
        return not self.index

    def gone(self, index: int, peer: Any, reason: str) -> bool:
        self.say()
        self._take_future().settle(lambda: _raise(self.lost_error(index, peer)))
        return not self.index

    def _take_future(self) -> Future[Any]:
        future = self.futures[self._next]
        self._next += 1
        return future


def _raise(error: BaseException) -> Any:
    raise error


# Which meshes' failures have reached a caller, and when: `procs` stops a cell only for those that have not.
told: Remembered[str, float] = Remembered()
stopped_homes: Remembered[str, None] = Remembered()  # names of meshes of processes that were ended from here
