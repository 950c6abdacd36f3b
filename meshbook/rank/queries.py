"""The questions that a rank answers while its main thread may be busy, by message type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshbook.rank.cells.shell import RankShell
from meshbook.rank.cells.stop_requests import StopRequests
from meshbook.rank.debug_port import DebugPortDoor
from meshbook.rank.differences.sentinel_door import SentinelDoor
from meshbook.rank.preemption import PreemptionPoint
from meshbook.rank.previews import introspection
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.wire import messages


def make_query_handlers(
    shell: RankShell,
    groups: RankGroups,
    preemption: PreemptionPoint,
    sentinel: SentinelDoor,
    stop_requests: StopRequests,
    debug_port: DebugPortDoor,
    *,
    open_actors: Callable[[messages.OpenActors], Any],
) -> dict[type, Callable[[Any], Any]]:
    """Return the functions that answer queries; each returns the content of a `RankReply`."""
    return {
        messages.Complete: lambda ask: introspection.complete(shell, ask.code, ask.cursor),
        messages.Inspect: lambda ask: introspection.inspect(shell, ask.code, ask.cursor, ask.detail),
        messages.PreviewNames: lambda ask: introspection.peek(shell, ask.names),
        messages.QueryPositions: lambda ask: msgspec.to_builtins(groups.position(ask.about_call)),
        messages.QueryPreemptionPoint: lambda ask: preemption.query(ask.about_call),
        messages.QuerySentinel: lambda _: msgspec.to_builtins(sentinel.report()),
        messages.StopInDebugger: lambda ask: msgspec.to_builtins(stop_requests.request(ask)),
        messages.OpenDebugPort: lambda ask: msgspec.to_builtins(debug_port.open(ask)),
        messages.OpenActors: open_actors,
    }
