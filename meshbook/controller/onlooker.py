"""A live mirror of a mesh: what its supervisor tells those that watch, put together into one picture.

For the dashboard, the terminal and the exporter. It draws nothing and asks the ranks nothing: ranks measure themselves
once per second anyway, the supervisor sends what changed at most `per_s` times a second, and nothing while nobody
watches. An observer's connection will do (`meshbook top`); its presence does not keep the mesh alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from meshbook.controller.connection import Connection
from meshbook.controller.session import Session
from meshbook.diagnose.findings import Finding
from meshbook.errors import MeshbookError, MeshTimeout
from meshbook.supervisor.series import Curves, Series
from meshbook.supervisor.watching import LINES_KEPT, CallNow, CollectiveNow, LineSaid, RankNow
from meshbook.wire import messages

log = logging.getLogger("meshbook.onlooker")

_ANSWER_TIMEOUT_S = 5.0
_COLLECTIVES_KEPT = 64  # of each rank


@dataclass(frozen=True)
class Picture:
    """A mesh at one moment. Immutable, but for `series` and `scalars`, which grow with it and may be read any time.

    Attributes:
        at: wall clock of the supervisor when it told this; compare with the next one's to see that it lives.
        name, axes, groups, backend, cells_run, clients, started_at: as in `MeshInfo`.
        ranks: one `RankNow` per rank, by rank: state, cell and line, memory, CPU, GPU, open collective, beat's age.
        calls: what runs, oldest first.
        collectives: rank -> its last ones, oldest first, open ones with `ended_at` None. Wall clock.
        findings: what the supervisor found by itself in the cells that run now; `mesh.why()` looks afresh.
        lines: the last folded lines that ranks printed, oldest first; text, never markup. All of a rank: `mesh.logs`.
        series: memory, CPU, GPU, collectives/s and steps/s over time; `series.points("rss_bytes", rank)`.
        scalars: what was given to `meshbook.log`; `scalars.names`, `scalars.points("loss", rank)`.
        ended: why there will be no more news; None while there will.
    """

    at: float = 0.0
    name: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    groups: str = "none"
    backend: str | None = None
    cells_run: int = 0
    clients: tuple[str, ...] = ()
    started_at: float = 0.0
    ranks: tuple[RankNow, ...] = ()
    calls: tuple[CallNow, ...] = ()
    collectives: Mapping[int, tuple[CollectiveNow, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    lines: tuple[LineSaid, ...] = ()
    series: Series = field(default_factory=Series)
    scalars: Curves = field(default_factory=Curves)
    ended: str | None = None


class Mirror:
    """Puts news together. `picture` is what came of them so far."""

    def __init__(self, name: str = "") -> None:
        self.picture = Picture(name=name)
        self._lines: deque[LineSaid] = deque(maxlen=LINES_KEPT)
        self._seen_at = 0.0

    def merge(self, at: float, data: Mapping[str, Any]) -> Picture:
        """The picture after these news (`supervisor.watching` says what they may hold)."""
        old = self.picture
        told: dict[str, Any] = {"at": at}
        if data.get("whole"):
            old = Picture()
            self._lines.clear()
        if "mesh" in data:
            told |= {**data["mesh"], "clients": tuple(data["mesh"].get("clients", ()))}
        if "ranks" in data:
            told["ranks"] = _with_columns(old.ranks, data["ranks"])
        if "calls" in data:
            told["calls"] = tuple(msgspec.convert(call, CallNow) for call in data["calls"])
        if "collectives" in data:
            told["collectives"] = _with_collectives(old.collectives, data["collectives"])
        if "findings" in data:
            told["findings"] = tuple(msgspec.convert(finding, Finding) for finding in data["findings"])
        if "lines" in data:
            self._lines += [msgspec.convert(line, LineSaid) for line in data["lines"]]
            told["lines"] = tuple(self._lines)
        new = self.picture = replace(old, **told)
        if "series" in data:
            new.series.load(data["series"])
        if "curves" in data:
            new.scalars.load(data["curves"])
        if not data.get("whole") and at - self._seen_at >= 1.0:  # ranks measure once per second
            self._seen_at = at
            new.series.saw(at, new.ranks)
        for name, rank, step, value, when in data.get("scalars", ()):
            new.scalars.put(name, rank, step, value, when)
        return new

    def end(self, reason: str) -> Picture:
        """There will be no more news."""
        gone = tuple(msgspec.structs.replace(rank, state="dead", call=None) for rank in self.picture.ranks)
        self.picture = replace(self.picture, ended=reason, ranks=gone, calls=(), findings=())
        return self.picture


class Onlooker:
    """Watches a mesh until `close()`. Several may watch through one connection.

        onlooker = Onlooker(mesh.session, per_s=2)
        onlooker.changed.append(lambda picture: draw(picture))
        onlooker.picture.ranks[3].line

    Attributes:
        changed: called with the new picture from the connection's listening thread, so they must neither block nor ask
            the mesh anything (hand over to a thread for that). One that raises is logged and kept.
    """

    def __init__(self, where: Session | Connection, *, per_s: float = 2.0, history_s: float = 3600.0) -> None:
        """Begin to watch. Blocks until the first picture is there, a few milliseconds.

        Args:
            where: a mesh's session (`mesh.session`) or any open connection, also an observer's.
            per_s: pictures per second at most; 0.1 to 10.
            history_s: how much of the past the first picture's `series` and `scalars` bring along.

        Raises:
            NotAttached: the connection is closed, or the mesh has ended.
            MeshTimeout: the supervisor does not answer.
        """
        self.changed: list[Callable[[Picture], None]] = []
        self.per_s = min(max(per_s, 0.1), 10.0)
        self._connection = where.connection if isinstance(where, Session) else where
        self._mirror = Mirror(self._connection.found.name)
        self._closed = False
        self._fan = _Fan.of(self._connection)
        self._connection.listeners.stopped.append(self._ended)
        try:
            self._fan.join(self, history_s)
        except BaseException:
            self.close()
            raise

    @property
    def picture(self) -> Picture:
        """The latest one. From any thread."""
        return self._mirror.picture

    def wait_until(self, true_of: Callable[[Picture], bool], timeout: float) -> Picture:
        """The first picture from now on of which something is true. Blocks.

        Raises:
            MeshTimeout: none came within `timeout` seconds.
        """
        seen = threading.Event()
        found: list[Picture] = []

        def look(picture: Picture) -> None:
            if not found and true_of(picture):
                found.append(picture)
                seen.set()

        self.changed.append(look)
        try:
            look(self.picture)
            if not seen.wait(timeout):
                raise MeshTimeout(f"nothing of the kind was seen of the mesh {self.picture.name!r} in {timeout:g} s")
        finally:
            self.changed.remove(look)
        return found[0]

    def close(self) -> None:
        """Watch no more. The last picture stays. Twice is once."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ValueError):
            self._connection.listeners.stopped.remove(self._ended)
        self._fan.leave(self)

    def __enter__(self) -> Onlooker:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    # ---- in the listening thread

    def _heard(self, report: messages.Watched) -> None:
        if not self._closed:
            self._mirror.merge(report.at, report.data)
            self._tell()

    def _ended(self, reason: str) -> None:
        self._mirror.end(reason)
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.changed):
            try:
                listener(self._mirror.picture)
            except Exception:
                log.exception("a listener could not take the picture; the others can")


class _Fan:
    """Hands what a connection hears of its mesh to all onlookers on it; one subscription for all, at the quickest's
    pace."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._onlookers: list[Onlooker] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, connection: Connection) -> _Fan:
        fan = connection.listeners.reports.setdefault(messages.Watched, cls(connection))
        assert isinstance(fan, cls)
        return fan

    def __call__(self, report: messages.Watched) -> None:
        if report.data.get("once"):
            return
        for onlooker in tuple(self._onlookers):
            onlooker._heard(report)

    def join(self, onlooker: Onlooker, history_s: float) -> None:
        with self._lock:
            self._onlookers.append(onlooker)
            try:
                self._subscribe(history_s)
            except BaseException:
                self._onlookers.remove(onlooker)
                raise

    def leave(self, onlooker: Onlooker) -> None:
        with self._lock:
            if onlooker in self._onlookers:
                self._onlookers.remove(onlooker)
            if self._onlookers:
                return
            with contextlib.suppress(MeshbookError):
                self._connection.send(messages.Watch(call=self._connection.next_call(), per_s=0.0))

    def _subscribe(self, history_s: float) -> None:
        per_s = max(onlooker.per_s for onlooker in self._onlookers)
        ask(self._connection, per_s=per_s, history_s=history_s)


def ask(connection: Connection, *, per_s: float, history_s: float) -> messages.Watched:
    """Everything that is remembered of a mesh, and with `per_s` news from then on. Blocks.

    Raises:
        NotAttached: the connection is closed, or the mesh has ended.
        MeshTimeout: the supervisor does not answer.
    """
    command = messages.Watch(call=connection.next_call(), per_s=per_s, history_s=history_s)
    try:
        told: messages.Watched = connection.request(command).result(_ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise MeshTimeout(
            f"the supervisor of {connection.found.name!r} did not answer within {_ANSWER_TIMEOUT_S:g} s"
        ) from None
    return told


def look_once(connection: Connection, *, history_s: float = 0.001) -> Picture:
    """One picture, without watching. Blocks a few milliseconds. Raises as `ask` does."""
    told = ask(connection, per_s=0.0, history_s=history_s)
    return Mirror().merge(told.at, told.data)


def _with_columns(ranks: tuple[RankNow, ...], columns: Mapping[str, Any]) -> tuple[RankNow, ...]:
    changes: dict[int, dict[str, Any]] = {}
    for name, (which, values) in columns.items():
        for rank, value in zip(which, values, strict=True):
            changes.setdefault(rank, {})[name] = value
    found = list(ranks)
    for rank in sorted(changes):
        while len(found) <= rank:
            found.append(RankNow(rank=len(found)))
        found[rank] = msgspec.structs.replace(found[rank], **changes[rank])
    return tuple(found)


def _with_collectives(
    known: Mapping[int, tuple[CollectiveNow, ...]], told: Iterable[Any]
) -> dict[int, tuple[CollectiveNow, ...]]:
    told_of: dict[int, list[CollectiveNow]] = {}
    for data in told:
        one = msgspec.convert(data, CollectiveNow)
        told_of.setdefault(one.rank, []).append(one)
    found = dict(known)
    for rank, new in told_of.items():
        both = {(one.group, one.op, one.seq): one for one in (*known.get(rank, ()), *new)}
        found[rank] = tuple(sorted(both.values(), key=lambda one: one.began_at)[-_COLLECTIVES_KEPT:])
    return found
