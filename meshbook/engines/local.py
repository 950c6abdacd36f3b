"""The local engine: every host is a process on this machine.

A single host runs in the supervisor itself. Several hosts are simulated by separate processes that share the machine,
to try on a laptop what happens on a cluster.
"""

from __future__ import annotations

import subprocess
import sys

from meshbook.engines.base import HostProgress, HostStart
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.errors import StartError
from meshbook.wire.messages import MeshSpec
from meshbook.wire.remote_start import HOSTS_SOCKET, SupervisorAddress


class LocalEngine:
    name = "local"
    spans_machines = False
    dials_tcp = False
    queue_state = ""
    ends_at = None

    def __init__(self, spec: MeshSpec) -> None:
        self._hosts: dict[int, LauncherProcess] = {}

    def runs_in_process(self, num_hosts: int) -> bool:
        return num_hosts == 1

    def launch(self, host: int, start: HostStart) -> None:
        command = [sys.executable, "-P", "-m", "meshbook.host.main", str(start.folder), str(host), start.identity]
        try:
            process = LauncherProcess([*command, f"ipc://{start.folder}/{HOSTS_SOCKET}"], stdin=subprocess.PIPE)
        except OSError as error:
            raise StartError(f"host {host} cannot be started on this machine: {error.strerror}") from error
        assert process.stdin is not None
        process.stdin.write(f"{start.token}\n".encode())  # and kept open: the host ends with its last writer
        self._hosts[host] = process

    def progress(self) -> dict[int, HostProgress]:
        return {}

    def pop_failed(self) -> dict[int, str]:
        return {}

    def pop_exited(self) -> dict[int, str]:
        found = {}
        for host, process in list(self._hosts.items()):
            if process.has_ended:
                found[host] = _describe_end(process.wait())
                self._hosts.pop(host).close()
        return found

    def first_address(self) -> str | None:
        return None

    def supervisor_listens(self, address: SupervisorAddress) -> None:
        """Not used: hosts find the supervisor's sockets in its folder."""

    def take_over(self) -> None:
        for process in self._hosts.values():
            process.take_over()

    def close(self) -> None:
        for process in self._hosts.values():
            process.terminate()
        for process in self._hosts.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.close()
        self._hosts.clear()


def _describe_end(code: int | None) -> str:
    if code is None:  # the supervisor that was its parent has ended before it
        return "has ended"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
