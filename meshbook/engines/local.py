"""The local engine: every host is a process on this machine.

A single host runs in the supervisor itself. Several hosts are simulated by separate processes that share the machine,
to try on a laptop what happens on a cluster.
"""

from __future__ import annotations

import subprocess
import sys

from meshbook.engines.base import HostStart
from meshbook.errors import StartError
from meshbook.wire.messages import MeshSpec
from meshbook.wire.remote_start import HOSTS_SOCKET, SupervisorAddress


class LocalEngine:
    name = "local"
    spans_machines = False
    dials_tcp = False
    queue_state = ""

    def __init__(self, spec: MeshSpec) -> None:
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}

    def runs_in_process(self, num_hosts: int) -> bool:
        return num_hosts == 1

    def launch(self, host: int, start: HostStart) -> None:
        command = [sys.executable, "-P", "-m", "meshbook.host.main", str(start.folder), str(host), start.identity]
        try:
            process = subprocess.Popen([*command, f"ipc://{start.folder}/{HOSTS_SOCKET}"], stdin=subprocess.PIPE)
        except OSError as error:
            raise StartError(f"host {host} cannot be started on this machine: {error.strerror}") from error
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(start.token.encode())
        self._hosts[host] = process

    def pop_failed(self) -> dict[int, str]:
        return {}

    def pop_exited(self) -> dict[int, str]:
        found = {}
        for host, process in list(self._hosts.items()):
            code = process.poll()
            if code is not None:
                found[host] = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                del self._hosts[host]
        return found

    def first_address(self) -> str | None:
        return None

    def supervisor_listens(self, address: SupervisorAddress) -> None:
        """Not used: hosts find the supervisor's sockets in its folder."""

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
