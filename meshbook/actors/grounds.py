"""What a ProcMesh stands on: processes that this program starts, the ranks of a mesh, or what another process told of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshbook.actors.answers import Gather, stopped_homes
from meshbook.actors.mesh import ActorMesh, ActorRef
from meshbook.actors.needs import needs_torch
from meshbook.actors.patience import Patience
from meshbook.actors.runtime.context import Home
from meshbook.actors.runtime.futures import MUST_NOT_WAIT, Future
from meshbook.actors.runtime.life import life
from meshbook.actors.runtime.post import here
from meshbook.controller.late import late_output
from meshbook.diagnose import findings as diagnose
from meshbook.errors import MeshTimeout, NotAttached, StartError, TransferError, UsageError
from meshbook.host.gpus import count_gpus
from meshbook.ids import name_ranks
from meshbook.mesh import MeshAxes
from meshbook.supervisor.stalls import wanted_stall_s
from meshbook.wire import keys, messages
from meshbook.wire.messages import Address

if TYPE_CHECKING:
    from meshbook.controller.mesh import Mesh
    from meshbook.controller.session import Session

_FAREWELL_S = 1.0  # that processes have to tell others of their end
_ONE = MeshAxes((), (), (0,))
# Seconds in which it mostly becomes clear what is to be spawned on new processes, for a program says so in its next
# line. Then the import of torch begins, for it takes longest; what is spawned decides all the same.
_CHOICE_S = 0.05
_ANSWER_S = 30.0  # for a process to say where it is, or that it has registered an actor: it has only to look up
# Seconds that processes live on after the program that spawned them was killed. An orderly end stops them at once.
_ORPHAN_TTL_S = 60.0
# ... and those that an actor has spawned, when the actor's process is gone: nobody can come back for them.
_ACTORS_ORPHAN_TTL_S = 2.0


def prepare_client() -> None:
    """Make this process one that hears of failures which no actor has handled."""
    alive = life()
    if not alive.on_rank and not alive.post.news.delay_s:
        from meshbook.actors import client

        client.prepare(alive)
        if after_s := wanted_stall_s(os.environ):
            Patience(alive.post, tell_of_circle, after_s=after_s)


def tell_of_circle(answer: messages.AnswerAwaited) -> bool:
    """Say why an answer does not come, if that is because actors wait for each other; whether it was said. Blocks."""
    from meshbook.controller import looking

    for session in list(_sessions):
        ranks = session.extras.get("actors")
        if session.ended is not None or session.stopping or not isinstance(ranks, Ranks):
            continue
        if not any(address.node == answer.node for address in ranks.home().addresses):
            continue
        found = looking.why(session, ranks.axes.ranks).findings
        circles = tuple(one for one in found if one.kind == "actor-deadlock")
        if circles:
            text = f"{answer.name}.{answer.endpoint} is not answered\n{diagnose.as_text(circles)}"
            late_output(session).tell(ranks.axes.ranks, text)
            return True
    return False


class Procs:
    """Processes, however they came about."""

    lend: Any = None
    ready: Future[bool]

    def home(self) -> Home:
        """Where they are. Waits until they run."""
        raise NotImplementedError

    def meant_for(self, Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is about to be spawned on them, if they can still be made to fit."""

    def mesh(self) -> Any:
        return None

    def ends(self) -> bool:
        """Whether they are being ended on purpose, from here."""
        return False

    def stop(self, reason: str) -> Future[None]:
        raise NotImplementedError

    def logging_option(self, stream: bool) -> None:
        mesh = self.mesh()
        if mesh is not None:
            late_output(mesh.session).shown = stream


class Known(Procs):
    """Processes that another one has told us of."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.ready = Future.of(True)

    def home(self) -> Home:
        return self._home

    def stop(self, reason: str) -> Future[None]:
        name = self._home.mesh
        if name is None:
            raise UsageError("this is the process itself; to end it, end the program")
        kept = life().kept.get(self._home.name)
        if kept is not None:
            stopping: Future[None] = kept.stop(reason)
            return stopping

        home = self._home

        def end() -> None:
            forget(home, reason)
            from meshbook.controller.mesh import attach
            from meshbook.errors import MeshbookError

            with contextlib.suppress(MeshbookError):  # somebody was faster
                attach(name).stop()

        return in_background(end, f"the stop of {name}")


class Ranks(Procs):
    """The ranks of a mesh that this program is attached to."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        self._session, self.axes = session, axes
        self._lock = threading.Lock()
        self._home: Home | None = None
        self.ready = Future("the processes")
        self.lend = Lender(session)
        session.on_lost.append(tell_news)
        _sessions.add(session)
        prepare_client()
        late_output(session).of_everybody = True

    def home(self) -> Home:
        """`addresses` in the order of ranks."""
        with self._lock:
            if self._home is None:
                self._session.check()
                self._home = Home(
                    self._session.name,
                    self.axes.names,
                    self.axes.shape,
                    addresses_of(self._session, self.axes),
                    self._session.name,
                )
                self.ready.settle(lambda: True)
        return self._home

    def mesh(self) -> Any:
        from meshbook.controller.mesh import Mesh

        return Mesh.of(self._session, self.axes)

    def ends(self) -> bool:
        return _was_ended(self._session)

    def stop(self, reason: str) -> Future[None]:
        home = self.home()

        def end() -> None:
            forget(home, reason)
            self._session.stop()

        return in_background(end, f"the stop of {home.name}")


class Lender:
    """What the ranks of a mesh have themselves, and therefore get as a key: handles and remote tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def to(self, ranks: Sequence[int], lent: list[Any]) -> Callable[[Any], str | None]:
        """For one message to actors on these ranks: gives the key of a thing, or None if it is to be sent itself.

        Waits until the ranks have computed a remote tensor: their main threads do, and actors take it on their own.

        Args:
            lent: gets what the ranks look up; it must live until they have.
        """

        def key_of(thing: Any) -> str | None:
            key = self._session._reference_to(thing)
            if key is None:
                return None
            engine = getattr(thing, "engine", None) if key.startswith("tensor:") else None
            if engine is not None and not any(getattr(other, "engine", None) is engine for other in lent):
                strange = sorted(set(ranks) - set(engine.ranks))
                if strange:
                    raise TransferError(
                        f"a remote tensor lies on {name_ranks(engine.ranks)}, and actors on {name_ranks(strange)} are "
                        "to get it too; call a slice of the actors, or pass x.full_tensor()"
                    )
                engine.wait()
            lent.append(thing)
            return key

        return key_of


def part_of_mesh(actors: ActorMesh) -> Mesh | None:
    """The part of a mesh of this program's that actors live on, under their own axes; None where it is another's."""
    from meshbook.controller.mesh import Mesh

    home, axes = actors._ref.home, actors._axes
    for session in list(_sessions):
        if home is not None and session.name == home.mesh and session.ended is None and not session.stopping:
            known = {address.node: rank for rank, address in enumerate(session.extras["actors"].home().addresses)}
            ranks = [known.get(actors._ref.addresses[place].node) for place in axes.ranks]
            if None not in ranks:
                return Mesh.of(session, MeshAxes(axes.names, axes.shape, tuple(ranks)))  # type: ignore[arg-type]
    return None


class Started(Procs):
    """Processes that this program starts: a mesh of light ranks, come up in the background."""

    def __init__(
        self, name: str, axes: MeshAxes, bootstrap: Callable[[], Any] | None, device: str, env: dict[str, str]
    ) -> None:
        prepare_client()
        self.name = f"{name}-{secrets.token_hex(2)}"
        self.axes, self._bootstrap = axes, bootstrap
        self._options: dict[str, Any] = {"device": device, "env": env}
        self._mesh: Any = None
        self._home: Home | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._first: tuple[Any, ...] | None = None  # class, args, kwargs of what was spawned first
        self._is_meant = threading.Event()  # that is known
        self._warms_torch = False  # without knowing what for
        self._is_taken = False  # by who brings the processes up
        self.ready = Future("the start of the processes")
        life().kept[self.name] = self
        # Not a daemon: an orderly end of the program waits for what it has begun, and then stops it.
        threading.Thread(target=self._start, name=f"start {self.name}").start()

    def _start(self) -> None:
        """On a thread of its own, from the beginning: it chooses, and warms what is chosen."""
        if not self._chooses():
            self._come_up("torch" in sys.modules)
            return
        self._is_meant.wait(_CHOICE_S)
        with self._lock:
            first = self._first
            self._warms_torch = first is None
        # With nothing spawned yet, torch; unless what is spawned while that is imported does without: see `meant_for`.
        self._come_up(first is None or needs_torch(*first))

    def _chooses(self) -> bool:
        """Whether processes that have torch would have to be waited for, and ones without may do."""
        chooses = "torch" in sys.modules and self._bootstrap is None and self._options["device"] != "cuda"
        return chooses and not count_gpus() and not spare.has(torch=True) and alike(torch=True) is None

    def _come_up(self, torch: bool) -> None:
        session = None
        try:
            axes = self.axes if self.axes.names else MeshAxes.of({"proc": 1})
            wanted = spare.wanted
            session = self._warm(torch)
            if not self._claim():
                spare.offer(session, torch=torch, wanted=wanted)
                return
            from meshbook.controller.mesh import start_light

            self._mesh = start_light(session, axes, torch=torch, **self._options)
            ranks = Ranks(self._mesh.session, axes)
            self._mesh.session.extras["actors"] = ranks
            found = ranks.home()
            self._home = Home(self.name, self.axes.names, self.axes.shape, found.addresses, found.mesh)
            self.lend = ranks.lend
            if self._bootstrap is not None:
                self._mesh.execute(self._bootstrap)
        except BaseException as error:
            if session is not None:
                with contextlib.suppress(Exception):
                    session.stop()
            if session is None and not self._claim():
                return  # others are up
            life().kept.pop(self.name, None)
            self.ready.fail(error if isinstance(error, Exception) else StartError(str(error)))
        else:
            self.ready.settle(lambda: True)
            if not life().on_rank:
                spare.refill(torch=torch)

    def _claim(self) -> bool:
        """Whether the caller brings the processes up, of two who may."""
        with self._lock:
            first, self._is_taken = not self._is_taken, True
        return first

    def home(self) -> Home:
        if not self.ready.done() and threading.get_ident() in MUST_NOT_WAIT:
            # An async endpoint that spawns on what it has just started. It is up in a moment, and needs no event loop.
            up = threading.Event()
            self.ready.add_done_callback(lambda _: up.set())
            up.wait()
        self.ready.get()
        if self._stopped:
            raise NotAttached(f"the processes {self.name!r} were stopped; spawn new ones with spawn_procs()")
        assert self._home is not None
        return self._home

    def mesh(self) -> Any:
        self.home()
        return self._mesh

    def meant_for(self, Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            if self._first is not None:
                return
            self._first = Class, args, kwargs
            warms_torch = self._warms_torch
        self._is_meant.set()
        if warms_torch and not self.ready.done() and not needs_torch(Class, args, kwargs):
            # Nothing was spawned for a moment, so torch is being imported; these need not wait for that.
            threading.Thread(target=self._come_up, args=(False,), name=f"start {self.name}").start()

    def _warm(self, torch: bool) -> Session:
        """A mesh without ranks yet. Importing torch takes seconds, so of several that want it at once one does it."""
        from meshbook.controller.mesh import warm_light

        with _importing if torch and alike(torch=True) is None else contextlib.nullcontext():
            kept = spare.take(torch=torch)
            if kept is not None:
                return kept
            like = alike(torch=torch)
            name = f"{self.name}-light" if self._warms_torch and not torch else self.name  # the other is on its way
            session = warm_light(name, torch=torch, orphan_ttl_s=_orphan_ttl_s(), like=like)
            session.extras["torch"] = torch
            if torch and like is None:
                _wait_for_fork_server(session)
            _sessions.add(session)
        return session

    @property
    def is_up(self) -> bool:
        """Whether it has come up and was not stopped."""
        return self._home is not None and not self._stopped

    def ends(self) -> bool:
        if self._stopped or self._mesh is None:
            return True
        return _was_ended(self._mesh.session)

    def stop(self, reason: str) -> Future[None]:
        self._stopped = True

        def end() -> None:
            self.ready.exception()
            if self._home is not None:
                forget(self._home, reason)
            if self._mesh is not None:
                self._mesh.stop()
            life().kept.pop(self.name, None)
            if not any(isinstance(kept, Started) for kept in life().kept.values()):
                spare.empty()

        return in_background(end, f"the stop of {self.name}")


def _was_ended(session: Session) -> bool:
    """Whether somebody has stopped or left this mesh. One whose supervisor was killed has not been."""
    return session.stopping or (session.ended is not None and not session.connection.lost)


_importing = threading.Lock()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # whose fork servers others may be branched off


def _orphan_ttl_s() -> float:
    return _ACTORS_ORPHAN_TTL_S if life().on_rank else _ORPHAN_TTL_S


def alike(*, torch: bool) -> Session | None:
    """A living mesh with a warm fork server of this kind."""
    for session in list(_sessions):
        spec = session.info.spec
        forks = spec is None or spec.start_method == "fork"
        has_torch = spec.torch if spec is not None else session.extras.get("torch")
        lives = session.ended is None and not session.stopping
        if lives and forks and has_torch == torch and _fork_socket(session).exists():
            return session
    return None


def _fork_socket(session: Session) -> Path:
    return keys.runtime_folder() / session.name / "h0-fork.sock"


def _wait_for_fork_server(session: Session) -> None:
    """Until it has imported what it imports, or for a while: then it is as well to go on."""
    deadline = time.monotonic() + _ANSWER_S
    look = threading.Event()
    while not _fork_socket(session).exists() and time.monotonic() < deadline:
        look.wait(0.02)


class Spare:
    """One mesh without ranks, with a warm fork server, for the next `spawn_procs` that wants its kind (with torch or
    without). There is one only while there are processes that this program has spawned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[bool, Session] | None = None
        self.wanted = 0  # counts up when it is emptied, so that one that comes up afterwards is known as late

    def take(self, *, torch: bool) -> Session | None:
        with self._lock:
            if self._kept is None or self._kept[0] != torch:
                return None
            session = self._kept[1]
            self._kept = None
        return session if session.ended is None and not session.connection.closed else None

    def has(self, *, torch: bool) -> bool:
        with self._lock:
            return self._kept is not None and self._kept[0] == torch

    def refill(self, *, torch: bool) -> None:
        """Have one made. Called on a thread that has nothing else to do."""
        from meshbook.controller.mesh import warm_light

        wanted, like = self.wanted, alike(torch=torch)
        if self._kept is not None or like is None:
            return
        session = warm_light(f"spare-{secrets.token_hex(3)}", torch=torch, orphan_ttl_s=_orphan_ttl_s(), like=like)
        self.offer(session, torch=torch, wanted=wanted)

    def offer(self, session: Session, *, torch: bool, wanted: int) -> None:
        """Keep one that is there, or stop it. `wanted`: the number as it was before it was begun."""
        with self._lock:
            if wanted == self.wanted and self._kept is None:
                self._kept = torch, session
                return
        session.stop()

    def empty(self) -> None:
        with self._lock:
            self.wanted += 1
            kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].stop()


spare = Spare()


def forget(home: Home, reason: str) -> None:
    """These processes end on purpose: nobody is to be told of it as of a failure, here or anywhere."""
    stopped_homes[home.name] = None
    nodes = {address.node for address in home.addresses}
    for owned in list(life().owned.values()):
        if nodes & owned.places.keys():
            owned.stopped = True
    ref = ActorRef("", home.name, "", {}, frozenset(), home.addresses, home)
    whole = ActorMesh(ref, MeshAxes(("place",), (len(home.addresses),), tuple(range(len(home.addresses)))))
    said: Future[None] = Future("the farewell")
    whole._post(
        lambda number: messages.Leave(number, reason), Gather(whole, "stop", said, lambda v: None, ignore_lost=True)
    )
    with contextlib.suppress(MeshTimeout):  # one of them is stuck, and will be killed
        said.get(_FAREWELL_S)


def in_background(act: Callable[[], Any], label: str) -> Future[None]:
    future: Future[None] = Future(label)

    def run() -> None:
        try:
            act()
        except BaseException as error:  # nobody else would ever settle it
            future.fail(error)
        else:
            future.settle(lambda: None)

    # Not a daemon: an orderly end of the program waits until what it asked to be stopped has been.
    threading.Thread(target=run, name=label).start()
    return future


def addresses_of(session: Session, axes: MeshAxes) -> tuple[Address, ...]:
    """Where each rank can be reached; the ranks' service threads say, whatever the ranks run."""
    found: dict[int, Address] = {}
    deadline = time.monotonic() + _ANSWER_S
    while (missing := tuple(rank for rank in session.living(axes.ranks) if rank not in found)) and (
        time.monotonic() < deadline
    ):
        command = messages.OpenActors(call=session.connection.next_call(), ranks=missing)
        for part in session.question(command, _ANSWER_S):
            if part.outcome.status == "ok" and isinstance(part.outcome.answer, list):
                for rank in part.ranks:
                    found[rank] = Address(*part.outcome.answer)
    lost = Address("lost", "", 0)
    late = [rank for rank in session.living(axes.ranks) if rank not in found]
    if late:
        raise MeshTimeout(f"ranks {late} did not say where their actors can be reached; they may be stuck in C code")
    return tuple(found.get(rank, lost) for rank in axes.ranks)


def tell_news(exited: tuple[messages.RankExited, ...]) -> None:
    for rank in exited:
        here().news.tell(rank.pid, rank.how)
