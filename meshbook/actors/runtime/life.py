"""All actors of a process, what they own elsewhere, and who is told when that fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.cabin import Cabin, addressed
from meshbook.actors.runtime.context import Home
from meshbook.actors.runtime.parcels import NONE
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.post import Post, encode, for_user_code, here
from meshbook.actors.runtime.remembered import Remembered
from meshbook.clock import monotonic
from meshbook.wire import messages
from meshbook.wire.lifeline import ACTORS_GRACE_S

_WORK_S = 2.0  # of ACTORS_GRACE_S, for what was sent before; the rest is kept for `__cleanup__`


class Life:
    """All actors of this process, and what the actors and code of this process own elsewhere."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.actors: dict[str, Cabin] = {}
        self.owned: dict[str, Owned] = {}
        self.on_rank = False
        self.use_device: Callable[[], None] = lambda: None  # a rank's: makes its GPU the calling thread's current one
        self.ending: str | None = None  # why this process will end: nothing new begins
        self.kept: dict[str, Any] = {}  # meshes of processes that were started here and live until they are stopped
        self.root: Callable[[faults.MeshFailure, str], None] = _print  # told of what no actor has handled
        self._ended: Remembered[str, tuple[str, str]] = Remembered()  # id -> name, reason; late callers are told
        post.hears.update(
            {
                messages.SpawnActor: self._spawn,
                messages.CallActor: self._call,
                messages.StopActor: self._stop,
                messages.InterruptActor: self._interrupt,
                messages.Faulted: self._faulted,
                messages.ActorEnded: self._actor_ended,
            }
        )
        post.on_gone.append(self._peer_gone)

    def rows(self) -> list[dict[str, Any]]:
        """One for each actor that lives in this process."""
        return [cabin.row() for cabin in list(self.actors.values())]

    def endpoints_seen(self) -> tuple[messages.EndpointSeen, ...]:
        """What the actors of this process are in, and for whose answers they wait. From any thread."""
        awaited: dict[Any, list[messages.AnswerAwaited]] = {}
        for caller, answers in self.post.awaited():
            awaited.setdefault(caller, []).extend(answers)
        node = self.post.address.node
        return tuple(seen for cabin in list(self.actors.values()) for seen in cabin.endpoints(node, awaited))

    def prepare_thread(self) -> None:
        """Make this thread one for user code. CUDA's current device is the thread's own, and a new thread has the
        first GPU of all: without this, the actors of every rank would compute there."""
        for_user_code()
        self.use_device()

    # ---- words

    def _spawn(self, peer: Any, word: messages.SpawnActor) -> None:
        if any(cabin.name == word.name and cabin.holds_name for cabin in list(self.actors.values())):
            text = (
                f"an actor named {word.name!r} lives in this process already; choose another name, or stop that one "
                "first"
            )
            peer.send(encode(messages.Failure(word.call, "name", "ValueError", text)))
            return
        if self.ending is not None:
            text = f"the process in which {word.name!r} was to live is ending: {self.ending}"
            peer.send(encode(messages.Failure(word.call, "stopped", "ActorStopped", text)))
            return
        cabin = self.actors[word.actor] = Cabin(self, peer, word)
        cabin.start()
        peer.send(encode(messages.Answer(word.call, NONE)))

    def _call(self, peer: Any, word: messages.CallActor) -> None:
        if not word.actor:
            rows = self.post.parcels.pack(self.rows(), (peer,))
            peer.send(encode(messages.Answer(word.call, *rows)))
            return
        cabin = self.actors.get(word.actor)
        if cabin is None:
            self.refuse(peer, word, None)
        elif word.method == "=now":
            threading.Thread(target=self._call_now, args=(cabin, peer, word), daemon=True).start()
        else:
            cabin.put((peer, word))

    def _call_now(self, cabin: Cabin, peer: Any, word: messages.CallActor) -> None:
        """Beside whatever the actor is doing."""
        try:
            self.prepare_thread()
            (function, *args), kwargs = self.post.parcels.unpack(peer, word.plain, word.payload)
            cabin.born.wait()
            if cabin.failure is not None:
                self.post.reply(peer, addressed(cabin.failure, word.call, cabin.place))
                return
            value = function(cabin.actor, *args, **kwargs)
            plain, payload = self.post.parcels.pack(value, (peer,))
            answer: messages.PeerWord = messages.Answer(word.call, plain, payload)
        except BaseException as error:
            answer = faults.describe(error, call=word.call, skip=1)
        self.post.reply(peer, answer)

    def _stop(self, peer: Any, word: messages.StopActor) -> None:
        cabin = self.actors.get(word.actor)
        if cabin is None:
            peer.send(encode(messages.Answer(word.call, NONE)))
        else:
            cabin.take_stop(peer, word)

    def _interrupt(self, peer: Any, word: messages.InterruptActor) -> None:
        cabin = self.actors.get(word.actor)
        if cabin is not None:
            cabin.interrupt((peer.number, word.call) if word.call else None)

    def end_all(self, reason: str) -> bool:
        """End every actor, because this process will end. Blocks for ACTORS_GRACE_S at most: what was sent before is
        worked off for the first part of it; then what runs is interrupted and what waits refused, so that `__cleanup__`
        comes to its turn.

        Returns:
            Whether there were any.
        """
        self.ending = reason
        cabins = list(self.actors.values())
        for cabin in cabins:
            cabin.stop(reason)
        told_at = monotonic()
        _wait_for(cabins, told_at + _WORK_S)
        for cabin in cabins:
            cabin.interrupt(None)
        _wait_for(cabins, told_at + ACTORS_GRACE_S)
        return bool(cabins)

    def refuse(self, peer: Any, word: Any, failure: messages.Failure | None) -> None:
        """A message for an actor that is not there (any more)."""
        self.post.parcels.discard(peer, word)
        if not isinstance(word, (messages.CallActor, messages.StopActor)) or not word.call:
            return
        if failure is None:
            name, reason = self._ended.get(word.actor, ("", ""))
            text = f"the actor {name!r} has ended: {reason}" if name else "there is no such actor in this process"
            failure = messages.Failure(0, "stopped" if name else "unknown", "ActorStopped", text)
        answer: messages.PeerWord = addressed(failure, word.call, 0)
        if isinstance(word, messages.StopActor):
            answer = messages.Answer(word.call, NONE)
        with contextlib.suppress(PeerGone):
            peer.send(encode(answer))

    def forget(self, cabin: Cabin, reason: str) -> None:
        self.actors.pop(cabin.id, None)
        self._ended[cabin.id] = (cabin.name, reason)
        with contextlib.suppress(PeerGone):
            self.post.peer(cabin.owner.address).send(encode(messages.ActorEnded(cabin.id)))

    # ---- who owns what, and who is told

    def fault(self, cabin: Cabin, text: str, trace: str) -> None:
        """An actor of this process has failed in a way that no caller hears of; its owner does."""
        self._tell(cabin.owner, cabin.name, (cabin.place,), text, trace)

    def escalate(self, cabin: Cabin, failure: faults.MeshFailure) -> None:
        """The owner has not handled it; the owner's owner may."""
        self._tell(cabin.owner, failure.mesh_name, failure.ranks, str(failure), failure.traceback)

    def _tell(self, owner: messages.ActorAddress, name: str, places: tuple[int, ...], text: str, trace: str) -> None:
        with contextlib.suppress(PeerGone):
            told = messages.Faulted(owner.actor, name, places, text, trace)
            self.post.peer(owner.address).send(encode(told))

    def _faulted(self, peer: Any, word: messages.Faulted) -> None:
        self.supervise(word.actor, faults.MeshFailure(word.mesh_name, word.places, word.text, word.traceback))

    def _actor_ended(self, peer: Any, word: messages.ActorEnded) -> None:
        owned = self.owned.get(word.actor)
        if owned is not None:
            self._disown(word.actor, owned, peer.address.node)

    def _disown(self, actor: str, owned: Owned, node: str) -> int | None:
        """One of an owned mesh has ended; gives its place. With the last one, all is forgotten."""
        place = owned.places.pop(node, None)
        if not owned.places:
            self.owned.pop(actor, None)
        return place

    def supervise(self, owner: str, failure: faults.MeshFailure) -> None:
        """Tell the owner, an actor of this process, or with "" the process itself."""
        cabin = self.actors.get(owner) if owner else None
        if cabin is not None:
            cabin.supervise(failure)
        elif not owner:
            self.root(failure, failure.mesh_name)

    def _peer_gone(self, peer: Any, reason: str) -> None:
        if peer.address is None:
            return
        for actor, owned in list(self.owned.items()):
            place = self._disown(actor, owned, peer.address.node)
            if place is None or owned.stopped or peer.leaving is not None:
                continue

            def tell(owned: Owned = owned, place: int = place) -> None:
                if owned.stopped or owned.ends_with():
                    return
                how = self.post.news.of(peer.address, wait=False)
                text = f"rank {place} of {owned.name!r} is lost: {how}"
                self.supervise(owned.owner, faults.MeshFailure(owned.name, (place,), text))

            if self.post.news.delay_s:
                self.post.call_later(self.post.news.delay_s, tell)
            else:
                tell()


def _wait_for(cabins: list[Cabin], due: float) -> None:
    for cabin in cabins:
        cabin.ended.wait(max(0.0, due - monotonic()))


class Owned:
    """A mesh of actors or processes that was spawned from here."""

    def __init__(self, name: str, owner: str, places: dict[str, int]) -> None:
        self.name, self.owner, self.places = name, owner, places
        self.stopped = False  # it ends on purpose
        self.ends_with: Callable[[], bool] = lambda: False  # whether what it lives on is being ended on purpose
        self.ref: Any = None  # of a mesh of actors, its `ActorRef`


def _print(failure: faults.MeshFailure, name: str) -> None:
    import sys

    print(f"unhandled failure of {name!r}: {failure.report()}", file=sys.stderr)


_lives: dict[str, Life] = {}
_lock = threading.Lock()


def life() -> Life:
    """The actors of this process; made on first use, with its post."""
    post = here()
    found = _lives.get(post.address.node)
    if found is None:
        with _lock:
            found = _lives.get(post.address.node)
            if found is None:
                found = _lives[post.address.node] = Life(post)
    return found


__all__ = ["Cabin", "Home", "Life", "Owned", "life"]
