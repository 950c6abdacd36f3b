"""Where a rank lets actors in: called by its service thread, by name, when somebody asks for the rank's address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.actors.runtime import held
from meshbook.actors.runtime.life import life
from meshbook.actors.runtime.post import farewell, is_open
from meshbook.wire.messages import EndpointSeen


def open_door(
    resolve: Callable[[str], Any], resolvers: dict[str, Callable[[str], Any]], use_device: Callable[[], None]
) -> list[Any]:
    """This process's address, as plain data.

    Args:
        resolve: gives the rank's own object for a handle among arguments.
        resolvers: what `resolve` asks, by kind of reference; gets one for what actors hold.
        use_device: makes the rank's GPU, if it has one, the current device of the thread that calls it.
    """
    resolvers[held.KIND] = held.find
    found = life()
    found.on_rank = True
    found.use_device = use_device
    found.post.parcels.resolve = resolve
    address = found.post.address
    return [address.node, address.key, address.pid]


def endpoints_seen() -> tuple[EndpointSeen, ...]:
    """What the rank's actors are in. Does not wait."""
    return life().endpoints_seen() if is_open() else ()


def end_actors() -> bool:
    """The rank was told to end, and its actors end first. Blocks.

    Returns:
        Whether there were any.
    """
    reason = "its mesh was stopped"
    farewell(reason)
    return life().end_all(reason)
