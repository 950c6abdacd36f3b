"""Entry points of a rank into its actors; the service thread calls them by name, from the first address request on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from meshbook.actors.runtime import object_paths, payloads
from meshbook.actors.runtime.recording import MessageRecorder, recording
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.relayed_peer import MeshCarrier
from meshbook.actors.runtime.transport import has_local_transport
from meshbook.wire.messages import ActiveEndpoint, RelayedBytes

# Called when the rank is about to exit, which it does without Python's own exit functions.
exit_callbacks: list[Callable[[], None]] = []


class _RankRelay(MeshCarrier):
    """The rank's own mesh, which has several machines."""

    def __init__(self, send: Callable[[RelayedBytes], None]) -> None:
        self._send = send

    def send(self, piece: RelayedBytes) -> None:
        self._send(piece)

    def reaches(self, node: str) -> bool:
        return True


_relays: list[_RankRelay] = []  # of this process: none, or one


def enable_actors(
    resolve: Callable[[str], Any],
    resolvers: dict[str, Callable[[str], Any]],
    use_device: Callable[[], None],
    relay: Callable[[RelayedBytes], None] | None,
    host: str | None,
) -> list[Any]:
    """Enable actors in this process and return its address, as plain data.

    Args:
        resolve: returns the rank's own object for a handle among arguments.
        resolvers: the resolvers of `resolve`, by reference kind; gets one for objects that actors hold.
        use_device: makes the rank's GPU, if it has one, the current device of the calling thread.
        relay: sends to a process on another machine by way of the mesh; None: this mesh has one machine.
        host: the address by which other machines reach this one; None: they do not.
    """
    resolvers[object_paths.REFERENCE_KIND] = object_paths.resolve_key
    registry = local_registry()
    registry.on_rank = True
    registry.use_device = use_device
    if relay is not None and not _relays:
        _relays.append(_RankRelay(relay))
        registry.transport.machines.add_mesh(_relays[0])
        if host is not None:
            registry.transport.machines.listen_on(host)
    exit_reasons = registry.transport.exit_reasons
    exit_reasons.ask, exit_reasons.ask_after_s = registry.inquiry.ask, 0.0
    registry.transport.payloads.resolve = resolve
    return list(msgspec.structs.astuple(registry.transport.address))


def piece_received(piece: RelayedBytes) -> None:
    """Take what a process on another machine has sent."""
    if _relays:
        local_registry().transport.machines.piece_received(_relays[0], piece)


def run_bootstrap(bootstrap: Callable[[], Any]) -> None:
    """Run the `bootstrap` of `spawn_procs`, a function or a coroutine function."""
    started = bootstrap()
    if inspect.iscoroutine(started):
        asyncio.run(started)


def record_messages(recorder: MessageRecorder | None) -> None:
    """Have the messages of this process's actors noted, also of actors to come; None: no longer."""
    recording.recorder = recorder


def call_ended() -> None:
    """A call of the rank has ended: what it has left in shared memory may be read now."""
    payloads.hand_over()


def snapshot_endpoints() -> tuple[ActiveEndpoint, ...]:
    """Return the running endpoints of the rank's actors. Does not wait."""
    return local_registry().snapshot_endpoints() if has_local_transport() else ()


def end_actors() -> bool:
    """Stop the actors of a rank that is about to exit. Blocks.

    Returns:
        Whether there were any actors.
    """
    for callback in exit_callbacks:
        callback()
    if not has_local_transport():
        return False
    reason = "its mesh was stopped, or resized without this rank"
    registry = local_registry()
    registry.transport.announce_exit(reason)
    had_actors = registry.end_all(reason)
    registry.transport.machines.flush()
    return had_actors
