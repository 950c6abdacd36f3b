"""The supervisor's eyes: looks at ranks, those that watch, and cells that stand still.

It puts together what `looks`, `watching` and `stalls` know, and asks the mesh's memory for the rest through `Memory`.
As pure as they are: events in, steps out.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from meshbook.diagnose import findings as diagnose
from meshbook.diagnose.findings import Finding
from meshbook.diagnose.kinds import FINE
from meshbook.ids import CallId, Ranks
from meshbook.supervisor.looks import PATIENCE_S, Looks
from meshbook.supervisor.stalls import BETWEEN_LOOKS_S, STALL_S, Pulse, Stalls
from meshbook.supervisor.steps import Alarm, Step, ToClient, ToHosts
from meshbook.supervisor.watching import CallNow, Scene, Watcher
from meshbook.wire import messages
from meshbook.wire.messages import FoldedItem, MeshInfo, OpenCall, RankDisplay, RankExited, RankSnapshot

log = logging.getLogger("meshbook.supervisor")

_PER_S = (0.1, 10.0)
# Seconds after which those that watch are told that there is no news, so that they see that somebody still speaks.
_SIGN_OF_LIFE_S = 2.0
_TICK_S = 1.0
# Findings told unasked: the first says what is wrong, and whoever wants all of them asks.
_TOLD_AT_ONCE = 3


class Memory(Protocol):
    """What is asked of the mesh's memory."""

    def info(self) -> MeshInfo: ...

    def open_calls(self, now: float) -> tuple[OpenCall, ...]:
        """What users run now, oldest first."""

    def asking(self) -> Ranks:
        """Ranks that wait for an answer to input()."""

    def place_of(self, rank: int) -> int:
        """The host that a rank is on."""

    def gone(self) -> Mapping[int, RankExited]:
        """Ranks that have ended."""

    def wall(self, now: float) -> float:
        """The wall clock at `now`."""


@dataclass
class _Glance:
    """A cell that stands still, looked at twice."""

    call: str
    client: str
    ranks: Ranks
    first: tuple[RankSnapshot, ...] = ()


class Seeing:
    """One mesh's."""

    def __init__(self, memory: Memory, stall_s: float = STALL_S) -> None:
        self._memory = memory
        self._looks = Looks()
        self._stalls = Stalls(stall_s)
        self._scene = Scene()
        self._asked: dict[str, str] = {}  # open look -> client
        self._glances: dict[str, _Glance] = {}  # open look -> the cell that it is for
        self._num_glances = 0
        self._calls: dict[str, tuple[str, Ranks]] = {}  # running call -> client, ranks
        self._found: dict[str, tuple[Finding, ...]] = {}  # running call -> what was found
        self._watchers: dict[str, tuple[int, Watcher, float]] = {}  # client -> generation, watcher, last told
        self._num_watchers = 0
        self._heard: dict[int, tuple[Pulse, float]] = {}  # rank -> its last beat, and when that came
        self._ticking = False

    # ---- what clients want

    def take(self, client: str, command: messages.TakeSnapshots, now: float) -> list[Step]:
        """Look at ranks for a client. The answer comes within `PATIENCE_S`."""
        self._asked[command.call] = client
        return self._look(command, now)

    def watch(self, client: str, command: messages.Watch, now: float) -> list[Step]:
        """A client begins to watch, asks once (`per_s` 0 and some history), or ends (both 0)."""
        at = self._memory.wall(now)
        since = at - command.history_s if command.history_s > 0 else math.inf
        if command.per_s <= 0:
            data: dict[str, Any] = {}
            if command.history_s > 0:
                self._refresh(now)
                data = self._scene.whole(since)
            else:
                self._watchers.pop(client, None)
            return [ToClient(client, messages.Watched(at=at, data={**data, "once": True}, call=command.call))]
        self._refresh(now)
        self._num_watchers += 1
        watcher = Watcher(self._scene, min(max(command.per_s, _PER_S[0]), _PER_S[1]))
        self._watchers[client] = (self._num_watchers, watcher, now)
        told = messages.Watched(at=at, data=watcher.whole(since), call=command.call)
        return [ToClient(client, told), Alarm(f"seeing news {self._num_watchers} {client}", watcher.period_s)]

    def client_gone(self, client: str) -> None:
        self._watchers.pop(client, None)
        for call in [call for call, asker in self._asked.items() if asker == client]:
            del self._asked[call]
            self._looks.forget(call)

    # ---- what happens on the mesh

    def call_began(self, call: str, client: str, ranks: Ranks, now: float) -> list[Step]:
        """A call of a user's goes to the ranks' main threads."""
        self._calls[call] = client, ranks
        self._stalls.began(call, ranks, now)
        if self._ticking:
            return []
        self._ticking = True
        return [Alarm("seeing tick", _TICK_S)]

    def call_said(self, call: str, items: Iterable[FoldedItem], now: float) -> None:
        """Output of a call that goes to its client."""
        items = tuple(items)
        self._scene.said(items, self._memory.wall(now))
        for item in items:
            self._stalls.printed(call, item.ranks, now)

    def part_ended(self, call: str, ranks: Iterable[int], now: float) -> None:
        """Ranks are done with their part of a call."""
        self._stalls.finished(call, set(ranks), now)

    def call_ended(self, call: str) -> None:
        self._calls.pop(call, None)
        self._stalls.ended(call)
        if self._found.pop(call, None) is not None:
            self._show_findings()

    def host_beat(self, report: messages.HostBeat, now: float) -> None:
        at = self._memory.wall(now)
        asking = set(self._memory.asking())
        for told in report.measured:
            self._scene.measured(told, at)
        measured = {told.rank: told for told in report.measured}
        self._scene.ranks_are(report.ranks, asking)
        self._scene.beat(at, measured)
        for info in report.ranks:
            before = self._heard.get(info.rank)
            health = measured[info.rank].health if info.rank in measured else None
            waits = self._scene.waiting(info.rank)
            known = before[0] if before is not None else None
            pulse = Pulse(
                rank=info.rank,
                line=info.line,
                num_collectives=health.num_collectives if health else known.num_collectives if known else None,
                steps=health.steps if health else known.steps if known else None,
                cpu_percent=health.cpu_percent if health else known.cpu_percent if known else None,
                beat_age_s=info.beat_age_s,
                asking=info.rank in asking,
                waits_for=() if waits is None else _needed(waits.rank, waits.peer, waits.group_ranks),
                waits_s=None if waits is None else at - waits.began_at,
            )
            self._heard[info.rank] = (pulse, now)
            self._stalls.beat(pulse, now)
        for call in [call for call in self._found if not self._stalls.stands(call, now)]:
            del self._found[call]  # it goes on: what was found is no longer so
            self._show_findings()

    def host_said(self, host: int, report: messages.SnapshotsTaken, now: float) -> list[Step]:
        return self._end_look(report.call, now) if self._looks.heard(host, report) else []

    def host_gone(self, host: int, now: float) -> list[Step]:
        return [step for call in self._looks.host_gone(host) for step in self._end_look(call, now)]

    def alarm(self, what: str, now: float) -> list[Step]:
        """One of ours rang; `what` is its name without the first word."""
        kind, _, rest = what.partition(" ")
        match kind:
            case "tick":
                return self._tick(now)
            case "look":
                return self._end_look(rest, now)
            case "again":
                return self._glance_again(rest, now)
            case "news":
                generation, _, client = rest.partition(" ")
                return self._news(generation, client, now)
        return []

    # ---- looks

    def _look(self, command: messages.TakeSnapshots, now: float) -> list[Step]:
        gone = self._memory.gone()
        living = tuple(rank for rank in command.ranks if rank not in gone)
        hosts = tuple(sorted({self._memory.place_of(rank) for rank in living}))
        self._looks.begin(command.call, command.ranks, hosts)
        if not hosts:
            return self._end_look(command.call, now)
        sent = msgspec.structs.replace(command, ranks=living)
        return [ToHosts(hosts, sent), Alarm(f"seeing look {command.call}", PATIENCE_S)]

    def _end_look(self, call: str, now: float) -> list[Step]:
        info = self._memory.info()
        places = {rank.rank: self._memory.place_of(rank.rank) for rank in info.ranks}
        seen = self._looks.end(call, {rank.rank: rank for rank in info.ranks}, self._memory.gone(), places)
        if seen is None:
            return []
        if (glance := self._glances.pop(call, None)) is not None:
            return self._glanced(glance, seen, info, now)
        client = self._asked.pop(call, None)
        return [ToClient(client, seen)] if client is not None else []

    # ---- cells that stand still

    def _tick(self, now: float) -> list[Step]:
        for pulse, heard_at in self._heard.values():  # hosts that say nothing any more
            if now - heard_at > 3 * _TICK_S:
                age = (pulse.beat_age_s or 0.0) + now - heard_at
                self._stalls.beat(dataclasses.replace(pulse, beat_age_s=age), now)
        steps: list[Step] = []
        for call in self._stalls.due(now):
            steps += self._glance(_Glance(call, *self._calls[call]), now)
        self._ticking = bool(self._calls)
        return [*steps, *([Alarm("seeing tick", _TICK_S)] if self._ticking else [])]

    def _glance(self, glance: _Glance, now: float) -> list[Step]:
        self._num_glances += 1
        call = CallId(f"stall-{self._num_glances}")
        self._glances[call] = glance
        everyone = tuple(rank.rank for rank in self._memory.info().ranks)
        return self._look(messages.TakeSnapshots(call=call, ranks=everyone), now)

    def _glanced(self, glance: _Glance, seen: messages.SnapshotsTaken, info: MeshInfo, now: float) -> list[Step]:
        if glance.call not in self._calls:
            return []  # it ended meanwhile
        if not glance.first:
            glance.first = seen.snapshots
            self._num_glances += 1
            name = f"stall-{self._num_glances}"
            self._glances[name] = glance
            return [Alarm(f"seeing again {name}", BETWEEN_LOOKS_S)]
        found = self._explained(glance, seen, info)
        busy = {one.rank for look in (glance.first, seen.snapshots) for one in look if _has_busy_children(one)}
        news = [
            one
            for one in found
            if one.kind not in FINE  # whoever waits for a slow cell knows that it is slow
            and (not one.ranks or set(glance.ranks) & {*one.ranks, *one.others})
            and not (one.kind == "waits-for-subprocess" and set(one.ranks) <= busy)
        ]
        sure = any(one.sure for one in news)
        may_tell = bool(news) and self._stalls.may_tell(glance.call, sure=sure)
        self._stalls.looked(glance.call, told=may_tell, surely=may_tell and sure, now=now)
        if news:
            self._found[glance.call] = tuple(news)
            self._show_findings()
        if not may_tell:
            return []
        text = diagnose.as_text(tuple(news[:_TOLD_AT_ONCE]), color=False)
        # A rank that computes does not hang; whether its loop ends is for the reader to say.
        head = "this cell computes on" if all(one.kind == "python-loop" for one in news) else "this cell stands still"
        notice = RankDisplay(ranks=glance.ranks, item=messages.Notice(f"{head}\n{text}"))
        return [ToClient(glance.client, messages.CallOutput(call=CallId(glance.call), items=(notice,)))]

    def _glance_again(self, name: str, now: float) -> list[Step]:
        glance = self._glances.pop(name, None)
        return self._glance(glance, now) if glance is not None and glance.call in self._calls else []

    def _explained(self, glance: _Glance, seen: messages.SnapshotsTaken, info: MeshInfo) -> tuple[Finding, ...]:
        axes = dict(info.spec.axes) if info.spec is not None else None
        try:
            return diagnose.explain(seen.snapshots, axes=axes, silent_hosts=seen.silent_hosts, earlier=glance.first)
        except Exception:  # a mesh must not end because its state cannot be explained
            log.exception("what was seen of call %s could not be explained", glance.call)
            return ()

    def _show_findings(self) -> None:
        every = [one for found in self._found.values() for one in found]
        # Cells that wait for one rank find the same.
        self._scene.findings = tuple({(one.kind, one.ranks, one.file, one.line): one for one in every}.values())

    # ---- those that watch

    def _news(self, generation: str, client: str, now: float) -> list[Step]:
        """It is time to tell a client what changed."""
        known = self._watchers.get(client)
        if known is None or str(known[0]) != generation:
            return []
        number, watcher, told_at = known
        self._refresh(now)
        data = watcher.news()
        steps: list[Step] = [Alarm(f"seeing news {generation} {client}", watcher.period_s)]
        if data or now - told_at >= _SIGN_OF_LIFE_S:
            self._watchers[client] = (number, watcher, now)
            steps.insert(0, ToClient(client, messages.Watched(at=self._memory.wall(now), data=data)))
        return steps

    def _refresh(self, now: float) -> None:
        info = self._memory.info()
        at = self._memory.wall(now)
        calls = tuple(
            CallNow(call=one.call, label=one.label, ranks=one.ranks, began_at=round(at - one.seconds, 1))
            for one in self._memory.open_calls(now)
        )
        self._scene.is_now(info, calls)
        self._scene.ranks_are(info.ranks, self._memory.asking())


def _has_busy_children(seen: RankSnapshot) -> bool:
    """Whether a process that it started is at work: what waits for that one is slow, and does not hang."""
    return seen.process is not None and any(state in ("R", "D") for _, state, _ in seen.process.children)


def _needed(rank: int, peer: int | None, group: Ranks) -> Ranks:
    """Whom a rank in a collective may be waiting for."""
    return group if peer is None else tuple(sorted((rank, peer)))
