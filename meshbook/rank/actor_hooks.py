"""What a rank asks of its actors, if it has any.

Actors are a sibling package of ranks, not a dependency, so they are imported by name, and only on request.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshbook.rank.device import select_device
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.rank.objects import RankObjects
    from meshbook.rank.outbox import Outbox
    from meshbook.wire.spawn import RankConfig

ACTORS_MODULE = "meshbook.actors.runtime.rank_hooks"


def make_opener(
    config: RankConfig, device: str, objects: RankObjects, outbox: Outbox
) -> Callable[[messages.OpenActors], list[Any]]:
    """Return the function that opens this rank to actors, and returns its address."""

    def relay(piece: messages.RelayedBytes) -> None:
        outbox.put(messages.BytesRelayed(piece, config.rank))

    def open_actors(_: messages.OpenActors) -> list[Any]:
        has_other_machines = bool(config.spec.on)
        address: list[Any] = importlib.import_module(ACTORS_MODULE).enable_actors(
            objects.resolve,
            objects.resolvers,
            partial(select_device, device),
            relay if has_other_machines else None,
            config.address,
        )
        if has_other_machines:
            outbox.put(messages.ActorsOpened(address[0], os.getpid(), config.rank))
        return address

    return open_actors


def piece_received(piece: messages.RelayedBytes) -> None:
    """Take what a process on another machine has sent to this rank's actors."""
    if (actors := _imported()) is not None:
        actors.piece_received(piece)


def end_actors() -> None:
    """End the rank's actors before the rank itself.

    Blocks, for ACTORS_GRACE_S at most. Call it on any thread but the service thread.
    """
    actors = _imported()
    if actors is not None:
        actors.end_actors()


def call_ended() -> None:
    """Tell the rank's actors that a cell or another call has ended. Main thread."""
    actors = _imported()
    if actors is not None:
        actors.call_ended()


def snapshot_endpoints() -> tuple[messages.ActiveEndpoint, ...]:
    """Return the endpoints that the rank's actors are executing."""
    actors = _imported()
    return () if actors is None else actors.snapshot_endpoints()


def record_messages(recorder: Any) -> None:
    """Have the messages of the rank's actors noted by `recorder`, also of actors to come; None: no longer."""
    if recorder is not None or _imported() is not None:
        importlib.import_module(ACTORS_MODULE).record_messages(recorder)


def _imported() -> ModuleType | None:
    return sys.modules.get(ACTORS_MODULE)
