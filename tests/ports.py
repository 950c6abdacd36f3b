"""Ports for servers that must be told one, instead of being given any that is free."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Linux gives to outgoing connections (ip_local_port_range), of which some are made at any moment.
_PORTS = range(10_000, 32_000)


def unused_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that no connection of another process takes meanwhile."""
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"no port in {_PORTS} is free")
