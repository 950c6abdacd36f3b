"""The supervisor's monitoring: snapshots of ranks, subscribed clients, and stalled cells.

It combines `snapshot_requests`, `telemetry` and `stalls`, and reads the mesh's state through `MeshStateReader` and
`RankTable`. As pure as they are: events in, effects out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from meshbook.diagnose import findings as diagnose
from meshbook.diagnose.findings import Finding
from meshbook.diagnose.kinds import BENIGN_KINDS
from meshbook.ids import CallId, Ranks
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.snapshot_requests import SNAPSHOT_TIMEOUT_S, SnapshotRequests
from meshbook.supervisor.stalls import BETWEEN_PROBES_S, STALL_S, Beat, CollectiveWait, StallDetector
from meshbook.supervisor.telemetry import MeshTelemetry, Subscription
from meshbook.wire import messages
from meshbook.wire.messages import (
    CollectiveStatus,
    FoldedItem,
    MeshInfo,
    OpenCall,
    RankDisplay,
    RankSnapshot,
)

log = logging.getLogger("meshbook.supervisor")

_UPDATES_PER_S_RANGE = (0.1, 10.0)
# Seconds until subscribers get an empty update, so that they see that the connection is alive.
_KEEPALIVE_S = 2.0
_TICK_S = 1.0
# Findings reported automatically: the first says what is wrong, and the user can request all of them.
_MAX_FINDINGS_SHOWN = 3


class MeshStateReader(Protocol):
    """The part of the mesh's state that monitoring reads."""

    def info(self) -> MeshInfo: ...

    def open_calls(self, now: float) -> tuple[OpenCall, ...]:
        """Return the calls that users run now, oldest first."""

    def ranks_awaiting_input(self) -> Ranks:
        """Return the ranks that wait for a reply to input()."""

    def wall_time(self, now: float) -> float:
        """Return the wall-clock time at `now`."""


@dataclass
class _StallProbe:
    """A stalled cell, of which two snapshots are taken."""

    call: str
    ranks: Ranks
    first_snapshots: tuple[RankSnapshot, ...] = ()


class Monitoring:
    """The monitoring of one mesh."""

    def __init__(self, state: MeshStateReader, ranks: RankTable, stall_s: float = STALL_S) -> None:
        self._state, self._ranks = state, ranks
        self._snapshot_requests = SnapshotRequests()
        self._stall_detector = StallDetector(stall_s)
        self._telemetry = MeshTelemetry()
        self._requesters: dict[str, str] = {}  # open snapshot request -> client
        self._probes: dict[str, _StallProbe] = {}  # open snapshot request -> the probe that it is for
        self._num_probes = 0
        self._calls: dict[str, tuple[str, Ranks]] = {}  # running call -> client, ranks
        self._findings: dict[str, tuple[Finding, ...]] = {}  # running call -> its findings
        self._standing_still: set[str] = set()  # running calls of which it was reported that they stand still
        # client -> generation, subscription, time of the last update
        self._subscriptions: dict[str, tuple[int, Subscription, float]] = {}
        self._num_subscriptions = 0
        self._heard_at: dict[int, float] = {}  # rank -> when its last heartbeat arrived
        self._is_ticking = False

    def forget_ranks(self, ranks: Ranks) -> None:
        """Forget ranks that have left the mesh."""
        self._telemetry.forget_ranks(ranks)
        for rank in ranks:
            self._heard_at.pop(rank, None)

    # ---- client commands

    def take_snapshots(self, client: str, command: messages.TakeSnapshots, now: float) -> list[Effect]:
        """Take snapshots for a client. The reply is sent within `SNAPSHOT_TIMEOUT_S`."""
        self._requesters[command.call] = client
        return self._request_snapshots(command, now)

    def subscribe(self, client: str, command: messages.Subscribe, now: float) -> list[Effect]:
        """Start a subscription, reply to a single query (rate 0 and some history), or end a subscription (both 0)."""
        at = self._state.wall_time(now)
        since = at - command.history_s if command.history_s > 0 else math.inf
        if command.max_updates_per_s <= 0 and command.history_s <= 0:
            self._subscriptions.pop(client, None)
            return [SendToClient(client, messages.MeshUpdate(timestamp=at, call=command.call))]
        self._refresh_telemetry(now)
        if command.max_updates_per_s <= 0:
            return [SendToClient(client, self._telemetry.full_update(at, since, command.call))]
        self._num_subscriptions += 1
        lowest, highest = _UPDATES_PER_S_RANGE
        subscription = Subscription(self._telemetry, min(max(command.max_updates_per_s, lowest), highest))
        self._subscriptions[client] = (self._num_subscriptions, subscription, now)
        return [
            SendToClient(client, subscription.full_update(at, since, command.call)),
            SetTimer(f"seeing news {self._num_subscriptions} {client}", subscription.period_s),
        ]

    def client_disconnected(self, client: str) -> None:
        self._subscriptions.pop(client, None)
        for call in [call for call, requester in self._requesters.items() if requester == client]:
            del self._requesters[call]
            self._snapshot_requests.cancel(call)

    # ---- events on the mesh

    def call_began(self, call: str, client: str, ranks: Ranks, now: float) -> list[Effect]:
        """Record that a user's call is sent to the ranks' main threads."""
        self._calls[call] = client, ranks
        self._stall_detector.call_began(call, ranks, now)
        if self._is_ticking:
            return []
        self._is_ticking = True
        return [SetTimer("seeing tick", _TICK_S)]

    def call_followed(self, call: str, client: str) -> None:
        """Record that another client receives what is said about a call."""
        if call in self._calls:
            self._calls[call] = client, self._calls[call][1]

    def call_printed(self, call: str, items: Iterable[FoldedItem], now: float) -> None:
        """Record output of a call that is sent to its client."""
        for item in items:
            self._stall_detector.call_printed(call, item.ranks, now)

    def ranks_finished(self, call: str, ranks: Ranks) -> None:
        """Record that ranks have finished their part of a call."""
        self._stall_detector.ranks_finished(call, ranks)

    def call_ended(self, call: str) -> None:
        self._calls.pop(call, None)
        self._stall_detector.call_ended(call)
        self._standing_still.discard(call)
        if self._findings.pop(call, None) is not None:
            self._publish_findings()

    def host_heartbeat(self, report: messages.HostHeartbeat, now: float) -> list[Effect]:
        at = self._state.wall_time(now)
        for metrics in report.metrics:
            self._telemetry.add_metrics(metrics, at)
        self._telemetry.update_ranks(report.ranks, self._state.ranks_awaiting_input())
        self._telemetry.sample_series(at, [metrics.rank for metrics in report.metrics])
        for info in report.ranks:
            self._heard_at[info.rank] = now
            if self._calls:
                self._stall_detector.heartbeat(*self._last_heartbeat(info.rank), now)
        effects: list[Effect] = []
        for call in [call for call in self._findings if not self._stall_detector.is_stalled(call, now)]:
            del self._findings[call]  # it makes progress again, so its findings no longer hold
            self._publish_findings()
            if call in self._standing_still:
                self._standing_still.discard(call)
                effects.append(self._notify(call, "this cell goes on"))
        return effects

    def _last_heartbeat(self, rank: int) -> tuple[Beat, CollectiveWait | None]:
        """Return what a rank's last heartbeat says, and the collective that it was in then."""
        at = self._state.wall_time(self._heard_at[rank])
        waiting = self._telemetry.oldest_open_collective(rank)
        wait = None if waiting is None else CollectiveWait(_possible_waiters(waiting), at - waiting.began_at)
        return self._telemetry.last_beat(rank), wait

    def snapshots_received(self, host: int, report: messages.SnapshotReply, now: float) -> list[Effect]:
        return self._finish_request(report.call, now) if self._snapshot_requests.add_reply(host, report) else []

    def host_lost(self, host: int, now: float) -> list[Effect]:
        return [
            effect for call in self._snapshot_requests.host_lost(host) for effect in self._finish_request(call, now)
        ]

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        """Handle one of our timers; `name` is its name without the first word."""
        kind, _, argument = name.partition(" ")
        match kind:
            case "tick":
                return self._tick(now)
            case "look":
                return self._finish_request(argument, now)
            case "again":
                return self._continue_probe(argument, now)
            case "news":
                generation, _, client = argument.partition(" ")
                return self._send_update(generation, client, now)
        return []

    # ---- snapshots

    def _request_snapshots(self, command: messages.TakeSnapshots, now: float) -> list[Effect]:
        exited = self._ranks.exited
        living = tuple(rank for rank in command.ranks if rank not in exited)
        hosts = self._ranks.hosts_of(living)
        self._snapshot_requests.begin(command.call, command.ranks, hosts)
        if not hosts:
            return self._finish_request(command.call, now)
        sent = msgspec.structs.replace(command, ranks=living)
        return [SendToHosts(hosts, sent), SetTimer(f"seeing look {command.call}", SNAPSHOT_TIMEOUT_S)]

    def _finish_request(self, call: str, now: float) -> list[Effect]:
        info = self._state.info()
        host_by_rank = {rank.rank: self._ranks.host_of(rank.rank) for rank in info.ranks}
        reply = self._snapshot_requests.finish(
            call, {rank.rank: rank for rank in info.ranks}, self._ranks.exited, host_by_rank
        )
        if reply is None:
            return []
        if (probe := self._probes.pop(call, None)) is not None:
            return self._probe_received(probe, reply, info, now)
        client = self._requesters.pop(call, None)
        return [SendToClient(client, reply)] if client is not None else []

    # ---- stalled cells

    def _tick(self, now: float) -> list[Effect]:
        for rank, received_at in self._heard_at.items():
            if now - received_at > 3 * _TICK_S:  # its host sends no heartbeats any more
                beat, wait = self._last_heartbeat(rank)
                self._stall_detector.heartbeat(beat._replace(age_s=beat.age_s + int(now - received_at)), wait, now)
        effects: list[Effect] = []
        for call in self._stall_detector.start_due_probes(now):
            effects += self._start_probe(_StallProbe(call, self._calls[call][1]), now)
        self._is_ticking = bool(self._calls)
        return [*effects, *([SetTimer("seeing tick", _TICK_S)] if self._is_ticking else [])]

    def _start_probe(self, probe: _StallProbe, now: float) -> list[Effect]:
        self._num_probes += 1
        call = CallId(f"stall-{self._num_probes}")
        self._probes[call] = probe
        everyone = tuple(rank.rank for rank in self._state.info().ranks)
        return self._request_snapshots(messages.TakeSnapshots(call=call, ranks=everyone), now)

    def _probe_received(
        self, probe: _StallProbe, reply: messages.SnapshotReply, info: MeshInfo, now: float
    ) -> list[Effect]:
        if probe.call not in self._calls:
            return []  # the call ended meanwhile
        if not probe.first_snapshots:
            probe.first_snapshots = reply.snapshots
            self._num_probes += 1
            name = f"stall-{self._num_probes}"
            self._probes[name] = probe
            return [SetTimer(f"seeing again {name}", BETWEEN_PROBES_S)]
        found = self._explain(probe, reply, info)
        busy = {
            one.rank
            for snapshots in (probe.first_snapshots, reply.snapshots)
            for one in snapshots
            if _has_busy_children(one)
        }
        stalls = [
            one
            for one in found
            if one.kind not in BENIGN_KINDS  # a user who waits for a slow cell knows that it is slow
            and (not one.ranks or set(probe.ranks) & {*one.ranks, *one.others})
            and not (one.kind == "waits-for-subprocess" and set(one.ranks) <= busy)
        ]
        new_findings = diagnose.dated(stalls, self._state.wall_time(now))
        is_certain = any(one.sure for one in new_findings)
        may_report = bool(new_findings) and self._stall_detector.may_report(probe.call, is_certain=is_certain)
        self._stall_detector.probe_ended(
            probe.call, is_reported=may_report, is_certain=may_report and is_certain, now=now
        )
        if new_findings:
            self._findings[probe.call] = new_findings
            self._publish_findings()
        if not may_report:
            return []
        text = diagnose.as_text(new_findings[:_MAX_FINDINGS_SHOWN], color=False)
        # A rank that computes is not stuck; whether its loop ends is for the user to judge.
        if all(one.kind == "python-loop" for one in new_findings):
            return [self._notify(probe.call, f"this cell computes on\n{text}")]
        self._standing_still.add(probe.call)
        return [self._notify(probe.call, f"this cell stands still\n{text}")]

    def _notify(self, call: str, text: str) -> Effect:
        """Return what shows a notice under a running cell."""
        client, ranks = self._calls[call]
        notice = RankDisplay(ranks=ranks, item=messages.Notice(text))
        return SendToClient(client, messages.CallOutput(call=CallId(call), items=(notice,)))

    def _continue_probe(self, name: str, now: float) -> list[Effect]:
        probe = self._probes.pop(name, None)
        return self._start_probe(probe, now) if probe is not None and probe.call in self._calls else []

    def _explain(self, probe: _StallProbe, reply: messages.SnapshotReply, info: MeshInfo) -> tuple[Finding, ...]:
        axes = dict(info.spec.axes) if info.spec is not None else None
        try:
            return diagnose.explain(
                reply.snapshots, axes=axes, silent_hosts=reply.silent_hosts, earlier=probe.first_snapshots
            )
        except Exception:  # a mesh must not end because its state cannot be explained
            log.exception("what was seen of call %s could not be explained", probe.call)
            return ()

    def _publish_findings(self) -> None:
        every = [one for found in self._findings.values() for one in found]
        # Cells that wait for one rank yield the same finding.
        self._telemetry.findings = tuple({(one.kind, one.ranks, one.file, one.line): one for one in every}.values())

    # ---- subscriptions

    def _send_update(self, generation: str, client: str, now: float) -> list[Effect]:
        """Send a subscriber the changes since its last update."""
        entry = self._subscriptions.get(client)
        if entry is None or str(entry[0]) != generation:
            return []
        number, subscription, sent_at = entry
        self._refresh_telemetry(now)
        at = self._state.wall_time(now)
        update = subscription.next_update(at)
        effects: list[Effect] = [SetTimer(f"seeing news {generation} {client}", subscription.period_s)]
        if update is not None or now - sent_at >= _KEEPALIVE_S:
            self._subscriptions[client] = (number, subscription, now)
            effects.insert(0, SendToClient(client, update or messages.MeshUpdate(timestamp=at)))
        return effects

    def _refresh_telemetry(self, now: float) -> None:
        info = self._state.info()
        self._telemetry.update_mesh(info, tuple(one.call for one in self._state.open_calls(now)))
        self._telemetry.update_ranks(info.ranks, self._state.ranks_awaiting_input())


def _has_busy_children(snapshot: RankSnapshot) -> bool:
    """Whether a child process of the rank is working: a rank that waits for it is slow, not stuck."""
    return snapshot.process is not None and any(state in ("R", "D") for _, state, _ in snapshot.process.children)


def _possible_waiters(collective: CollectiveStatus) -> Ranks:
    """Return the ranks that a rank in a collective may be waiting for."""
    return collective.group_ranks if collective.peer is None else tuple(sorted((collective.rank, collective.peer)))
