"""The interface of an engine, which only starts and ends hosts.

A host is `python -m meshbook.host.main`, which connects back to the supervisor by itself. Everything about ranks
belongs to the host, so that a rank is the same process on a laptop and under any launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostEngine(Protocol):
    """Starts hosts and reports their exit. All methods are called from the supervisor's loop and do not block."""

    name: str

    def runs_in_process(self, num_hosts: int) -> bool:
        """Whether the only host can run in the supervisor itself, which saves a process and a hop."""

    def launch(self, host: int, command: Sequence[str], token: bytes) -> None:
        """Start `command` on machine number `host` and write `token` to its standard input.

        Raises:
            StartError: it cannot be started; the message says what to do.
        """

    def pop_exited(self) -> dict[int, str]:
        """Return the hosts that have exited since the last call, and how."""

    def close(self) -> None:
        """End all remaining hosts."""
