"""The local engine: every host is a process on this machine.

A single host runs in the supervisor itself. Several hosts are simulated by separate processes that share the machine,
to try on a laptop what happens on a cluster.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from meshbook.errors import StartError


class LocalEngine:
    name = "local"

    def __init__(self) -> None:
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}

    def runs_in_process(self, num_hosts: int) -> bool:
        return num_hosts == 1

    def launch(self, host: int, command: Sequence[str], token: bytes) -> None:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
        except OSError as error:
            raise StartError(f"host {host} cannot be started on this machine: {error.strerror}") from error
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(token)
        self._hosts[host] = process

    def pop_exited(self) -> dict[int, str]:
        found = {}
        for host, process in list(self._hosts.items()):
            code = process.poll()
            if code is not None:
                found[host] = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                del self._hosts[host]
        return found

    def close(self) -> None:
        for process in self._hosts.values():
            process.terminate()
        for process in self._hosts.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._hosts.clear()
