"""What an engine is: the answer to "how do I reach a host?", and nothing else.

A host is `python -m meshbook.host.main`, which connects back to the supervisor by itself. Everything about ranks is the
host's, so that a rank is the same process on a laptop and under any launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostEngine(Protocol):
    """Starts hosts and says when one is gone. All methods are called from the supervisor's loop and do not block."""

    name: str

    def runs_in_process(self, num_hosts: int) -> bool:
        """Whether the one host can live in the supervisor itself, so that no process and no hop is added."""

    def launch(self, host: int, command: Sequence[str], token: bytes) -> None:
        """Start `command` on machine number `host` and write `token` to its standard input.

        Raises:
            StartError: it cannot be started; the message says what to do.
        """

    def pop_exited(self) -> dict[int, str]:
        """Hosts that have ended since the last call, and how."""

    def close(self) -> None:
        """End every host that is left."""
