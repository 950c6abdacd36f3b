"""Where a rank lets actors in: called by its service thread, by name, when somebody asks for the rank's address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.actors.runtime import object_paths
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import announce_exit, has_local_transport
from meshbook.wire.messages import ActiveEndpoint


def enable_actors(
    resolve: Callable[[str], Any], resolvers: dict[str, Callable[[str], Any]], use_device: Callable[[], None]
) -> list[Any]:
    """This process's address, as plain data.

    Args:
        resolve: gives the rank's own object for a handle among arguments.
        resolvers: what `resolve` asks, by kind of reference; gets one for what actors hold.
        use_device: makes the rank's GPU, if it has one, the current device of the thread that calls it.
    """
    resolvers[object_paths.REFERENCE_KIND] = object_paths.resolve_key
    registry = local_registry()
    registry.on_rank = True
    registry.use_device = use_device
    registry.transport.payloads.resolve = resolve
    address = registry.transport.address
    return [address.node, address.key, address.pid]


def snapshot_endpoints() -> tuple[ActiveEndpoint, ...]:
    """What the rank's actors are in. Does not wait."""
    return local_registry().snapshot_endpoints() if has_local_transport() else ()


def end_actors() -> bool:
    """The rank was told to end, and its actors end first. Blocks.

    Returns:
        Whether there were any.
    """
    reason = "its mesh was stopped"
    announce_exit(reason)
    return local_registry().end_all(reason)
