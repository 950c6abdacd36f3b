"""What the supervisor's memory asks the driver to do: the one way out of everything pure in this folder."""

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
    body: bytes | None = None  # the encoding it came in, passed on as it is


@dataclass(frozen=True)
class StartHosts:
    spec: MeshSpec


@dataclass(frozen=True)
class SetTimer:
    """Call `alarm(name)` after `delay_s` seconds."""

    name: str
    delay_s: float


@dataclass(frozen=True)
class Shutdown:
    reason: str


Effect = SendToClient | SendToHosts | StartHosts | SetTimer | Shutdown
