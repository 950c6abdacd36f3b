"""Where a mesh's front ends are served: one onlooker for all of them, one thread that tells them what is new.

Widgets, pages and the terminal are audiences of one desk. It takes their requests at once and answers from threads of
its own, so that none of them ever waits in a thread that zmq, tornado or a notebook needs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from meshbook.controller.mesh import Mesh
from meshbook.controller.onlooker import Onlooker, Picture
from meshbook.controller.session import Session
from meshbook.dashboard import view
from meshbook.dashboard.view import Message, View
from meshbook.errors import MeshbookError
from meshbook.ids import name_ranks

log = logging.getLogger("meshbook.dashboard")

# Different defects of ours that one audience is told of.
_TROUBLES = 8
# Pictures per second. More are not read by anybody, and a notebook's server passes each on to each page.
PER_S = 2.0
# Seconds after which everything is told again: a page whose requests wait behind a cell shows the mesh all the same.
EVERYTHING_S = 5.0
# With more ranks than this everything is some ten thousand bytes, and told again more rarely.
_FEW_RANKS = 64
# Seconds in which it is told every second: what is said before the page has drawn the widget is lost.
_YOUNG_S = 6.0
# Seconds without news after which a mesh that does not change gives a sign of life.
_SIGN_OF_LIFE_S = 5.0
# Seconds after which a mesh that runs nothing is not told of any more: a hub takes every message for use, and would
# never end a notebook that was left open.
_REST_S = 600.0
_LOG_BYTES = 1 << 18
# Seconds for which the ranks' answer about their actors serves all who look.
_ACTORS_S = 0.9
_REMEMBERED = 256  # requests, so that one that comes twice is done once


class Audience:
    """Those behind one line: a widget, with all places where it is shown, or one page's socket.

    Attributes:
        view: what they were told.
    """

    def __init__(self, mesh: Mesh, send: Callable[[Message], None], *, repeat: bool = False) -> None:
        """
        Args:
            mesh: the mesh, or the part of it, that they see.
            send: takes a message; called from the desk's threads. What it raises means that they are gone.
            repeat: tell everything again now and then, for they may be unable to ask.
        """
        self.mesh, self.send, self.repeat = mesh, send, repeat
        self.view = View(ranks=tuple(mesh.ranks), axes=dict(mesh.axes))
        self.wants_everything = True
        self.told_at = self.everything_at = float("-inf")
        self.joined_at = time.monotonic()
        self.troubles: set[str] = set()  # defects of ours that they were told of
        self.lock = threading.Lock()  # of what is here; held while they are told, so that messages keep their order


class Desk:
    """One per session. Watches while it has an audience."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._audiences: list[Audience] = []
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._onlooker: Onlooker | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._done: OrderedDict[str, None] = OrderedDict()
        self._ran_at = time.monotonic()
        self._surveying = threading.Lock()
        self._surveyed_at = float("-inf")
        self._actors: list[dict[str, Any]] = []  # one row each, as of then

    @classmethod
    def of(cls, session: Session) -> Desk:
        desk = session.extras.setdefault("dashboard", cls(session))
        assert isinstance(desk, cls)
        return desk

    @property
    def picture(self) -> Picture:
        """The latest; an empty one while nobody watches."""
        onlooker = self._onlooker
        return onlooker.picture if onlooker is not None else Picture()

    @property
    def watches(self) -> bool:
        return self._onlooker is not None

    def join(self, audience: Audience) -> None:
        """Tell them what is new from now on. The first one waits a few milliseconds for the picture.

        Raises:
            NotAttached, MeshTimeout: as `Onlooker`.
        """
        with self._lock:
            if self._onlooker is None:
                self._session.check()
                self._onlooker = Onlooker(self._session, per_s=PER_S)
                self._onlooker.changed.append(lambda _: self._news.set())
                self._workers = ThreadPoolExecutor(4, thread_name_prefix="meshbook-answers")
                self._thread = threading.Thread(
                    target=self._tell, args=(self._onlooker,), name="meshbook-dashboard", daemon=True
                )
                self._thread.start()
            self._audiences.append(audience)
        self._news.set()

    def leave(self, audience: Audience) -> None:
        """Tell them nothing more; the last one ends the watching. Twice is once."""
        with self._lock:
            if audience in self._audiences:
                self._audiences.remove(audience)
            if self._audiences or self._onlooker is None:
                return
            onlooker, workers = self._onlooker, self._workers
            self._onlooker = self._workers = self._thread = None
        onlooker.close()
        self._news.set()
        if workers is not None:
            workers.shutdown(wait=False, cancel_futures=True)

    # ---- telling

    def _tell(self, onlooker: Onlooker) -> None:
        """The desk's thread: until its onlooker is no longer the desk's."""
        while True:
            self._news.wait(1.0)
            self._news.clear()
            if self._onlooker is not onlooker:
                return
            picture = onlooker.picture
            if picture.ended is None and self._session.connection.closed:
                picture = replace(picture, ended="this process has left it")
            for audience in tuple(self._audiences):
                self._tell_one(audience, picture)
                if picture.ended is not None:
                    self.leave(audience)

    def _tell_one(self, audience: Audience, picture: Picture) -> None:
        now = time.monotonic()
        if picture.calls:
            self._ran_at = now
        with audience.lock:
            try:
                messages = self._news_for(audience, picture, now)
            except Exception as error:  # a defect of ours: the rest of the picture goes on
                messages = self._trouble(audience, error)
            try:
                for message in messages:
                    audience.send(message)
            except Exception as error:
                # They went away while they were told: a page that was closed, a kernel's front end that is no more.
                log.debug("an audience is gone: %r", error)
                gone = True
            else:
                gone = False
                if messages:
                    audience.told_at = now
        if gone:
            self.leave(audience)

    def _news_for(self, audience: Audience, picture: Picture, now: float) -> list[Message]:
        runs = bool(picture.calls)
        audience.view.has_actors = self._has_actors()
        young = now - audience.joined_at < _YOUNG_S
        pause = 1.0 if young else EVERYTHING_S * (1 if len(audience.mesh.ranks) <= _FEW_RANKS else 6)
        repeat = audience.repeat and (runs or young) and now - audience.everything_at >= pause
        if audience.wants_everything or repeat:
            audience.everything_at = now
            messages = audience.view.everything(picture)
            audience.wants_everything = False
        elif now - self._ran_at > _REST_S and picture.ended is None:
            return []
        else:
            messages = audience.view.news(picture)
        if not messages and runs and now - audience.told_at >= _SIGN_OF_LIFE_S:
            return [{"kind": "alive"}]
        return messages

    def _trouble(self, audience: Audience, error: Exception) -> list[Message]:
        """What could not be shown, logged and said once."""
        what = f"{type(error).__name__}: {error}"
        if what in audience.troubles or len(audience.troubles) >= _TROUBLES:
            return []
        audience.troubles.add(what)
        log.error("the picture of %s could not be made", self._session.name, exc_info=error)
        return [{"kind": "told", "text": f"part of this picture could not be made ({what}); the mesh is not affected"}]

    # ---- answering

    def hear(self, audience: Audience, message: Any) -> None:
        """What a front end says. Never waits and never raises: it is answered by messages."""
        if not isinstance(message, dict):
            return
        said = message.get("id")
        with self._lock:
            workers = self._workers
            if isinstance(said, str):
                if said in self._done:
                    return
                self._done[said] = None
                while len(self._done) > _REMEMBERED:
                    self._done.popitem(last=False)
        if workers is not None:
            with contextlib.suppress(RuntimeError):  # the last one leaves just now
                workers.submit(self._answer, audience, message)

    def _answer(self, audience: Audience, message: dict[str, Any]) -> None:
        try:
            answers = self._answers(audience, message)
        except (MeshbookError, ValueError) as error:
            answers = [{"kind": "told", "text": str(error)}]
        except Exception as error:
            log.exception("a front end's %r could not be answered", message.get("kind"))
            answers = [{"kind": "told", "text": f"{type(error).__name__}: {error}"}]
        view_id = message.get("view")
        to = {"view": view_id} if isinstance(view_id, str) else {}
        try:
            with audience.lock:
                for answer in answers:
                    audience.send({**answer, **to})
        except Exception as error:
            log.debug("an audience is gone: %r", error)
            self.leave(audience)

    def _has_actors(self) -> bool:
        if "meshbook.actors.procs" not in sys.modules:
            return False  # this program has none, and does not pay for their import
        from meshbook.actors.overview import are_elsewhere

        return "actors" in self._session.extras or are_elsewhere()

    def _survey(self) -> list[dict[str, Any]]:
        """What the actors on this mesh do, and those on processes that this program has started for them. Asked once a
        second at most, however many look."""
        if not self._has_actors():
            return []
        from meshbook.actors.overview import actors_elsewhere, survey

        with self._surveying:
            if time.monotonic() - self._surveyed_at >= _ACTORS_S:
                axes = self._session.axes if "actors" in self._session.extras else None
                mine = survey(Mesh.of(self._session, axes), timeout=1.0) if axes is not None else []
                self._actors = [*mine, *actors_elsewhere(timeout=1.0)]
                self._surveyed_at = time.monotonic()
            return self._actors

    def _answers(self, audience: Audience, message: dict[str, Any]) -> list[Message]:
        mesh, kind = audience.mesh, message.get("kind")
        match kind:
            case "ready":
                audience.wants_everything = True
                self._news.set()
            case "follow":
                with audience.lock:
                    audience.view.follow(view.chosen(message.get("ranks"), mesh.ranks))
                self._news.set()
            case "show":
                with audience.lock:
                    audience.view.shows = str(message.get("tab"))
                self._news.set()
            case "stacks":
                ranks = view.chosen(message.get("ranks"), mesh.ranks)
                return [view.stacks(mesh.stacks(ranks), ranks)]
            case "why":
                found = mesh.why().findings
                with audience.lock:
                    return [audience.view.asked_why(self.picture, found)]
            case "logs":
                rank = int(message.get("rank", 0))
                return [view.logs(rank, mesh.logs(rank, _LOG_BYTES), _LOG_BYTES)]
            case "actors":
                return [view.actors(self._survey(), mesh.ranks)]
            case "interrupt":
                ranks = view.chosen(message.get("ranks"), mesh.ranks)
                if ranks:
                    mesh.interrupt(ranks)
                    return [{"kind": "told", "text": f"{name_ranks(ranks)} interrupted"}]
            case "kill":
                ranks = view.chosen(message.get("ranks"), mesh.ranks)
                if ranks:
                    mesh.kill(ranks)
                    return [{"kind": "told", "text": f"{name_ranks(ranks)} killed"}]
        return []
