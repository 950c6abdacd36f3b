"""Effects: what the pure modules of this folder request from the driver. They have no other output."""

from __future__ import annotations

from msgspec import Struct

from meshbook.wire import messages
from meshbook.wire.messages import MeshSpec


class SendToClient(Struct, frozen=True):
    client: str | None  # None: to all
    message: messages.SupervisorReport


class SendToHosts(Struct, frozen=True):
    hosts: tuple[int, ...]
    message: messages.HostCommand
    body: bytes | None = None  # the original encoding, forwarded unchanged


class StartHosts(Struct, frozen=True):
    """Have these hosts started: those of a mesh that comes up, or some that were lost."""

    spec: MeshSpec
    hosts: tuple[int, ...]


class SetTimer(Struct, frozen=True):
    """Call `MeshState.timer_fired(name)` after `delay_s` seconds."""

    name: str
    delay_s: float


class CommitCheckpoint(Struct, frozen=True):
    """Make a save's folder a checkpoint, then call `MeshState.checkpoint_committed`."""

    command: messages.SaveCheckpoint
    manifest: messages.CheckpointManifest


class RemoveCheckpoint(Struct, frozen=True):
    """Remove the folder of a save that was discarded."""

    command: messages.SaveCheckpoint


class Shutdown(Struct, frozen=True):
    reason: str


Effect = SendToClient | SendToHosts | StartHosts | SetTimer | CommitCheckpoint | RemoveCheckpoint | Shutdown
