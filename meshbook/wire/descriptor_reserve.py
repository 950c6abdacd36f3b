"""File descriptors that are held back for connections, so that a process that has no others left lives on."""

from __future__ import annotations

import contextlib
import logging
import os

from meshbook.wire.descriptors import describe_shortage
from meshbook.wire.loop import Loop

log = logging.getLogger("meshbook.descriptors")

# Descriptors that are held back. Each connection that libzmq accepts takes one, and a client makes two.
_NUM_RESERVED = 16
# Fewer free ones than this are too few.
_NUM_FREE_MIN = 4
_CHECK_S = 1.0


class DescriptorReserve:
    """Descriptors that are held back while there are enough others.

    libzmq (4.3.5) ends a process that has none left for a connection to a Unix socket, and spins for one to a TCP port.
    So when hardly any are left, these are let go of, and nothing that takes more for good is begun until there are
    enough again.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._held: list[int] = []
        self._check()

    def _check(self) -> None:
        self._loop.call_later(_CHECK_S, self._check, logged=False)
        self.look()

    def look(self) -> bool:
        """Let go of them if hardly any others are left, else hold them again; return whether they are let go of."""
        was_held = bool(self._held)
        with contextlib.suppress(OSError):
            while len(self._held) < _NUM_RESERVED:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        if len(self._held) < _NUM_RESERVED or not _are_some_left(self._held[0]):
            for descriptor in self._held:
                os.close(descriptor)
            self._held = []
        if was_held and not self._held:
            log.warning("%s", describe_shortage())
        return not self._held


def _are_some_left(held: int) -> bool:
    opened: list[int] = []
    try:
        opened += (os.dup(held) for _ in range(_NUM_FREE_MIN))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True
