"""Effects: what the pure modules of this folder request from the driver. They have no other output."""

from __future__ import annotations

from dataclasses import dataclass

from meshbook.wire import messages
from meshbook.wire.messages import MeshSpec


@dataclass(frozen=True)
class SendToClient:
    client: str | None  # None: to all
    message: messages.SupervisorReport


@dataclass(frozen=True)
class SendToHosts:
    hosts: tuple[int, ...]
    message: messages.HostCommand
    body: bytes | None = None  # the original encoding, forwarded unchanged


@dataclass(frozen=True)
class StartHosts:
    spec: MeshSpec


@dataclass(frozen=True)
class SetTimer:
    """Call `MeshState.timer_fired(name)` after `delay_s` seconds."""

    name: str
    delay_s: float


@dataclass(frozen=True)
class Shutdown:
    reason: str


Effect = SendToClient | SendToHosts | StartHosts | SetTimer | Shutdown
