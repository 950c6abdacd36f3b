"""The slurm engine: one job holds the nodes of a mesh, and one srun per node starts its host.

The dialogue of a host's start is on the standard input and output of its srun, and the secrets with it. There is no way
to forward sockets, so hosts and ranks connect to the supervisor by TCP, encrypted by CURVE.
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
from pathlib import Path

from meshbook.engines.addresses import Address
from meshbook.engines.base import HostStart
from meshbook.engines.host_command import HostCommand
from meshbook.engines.host_launch import (
    HELLO_TIMEOUT_S,
    HostLaunches,
    SupervisorWait,
    describe_host_end,
    explain_interpreter,
    quoted,
)
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.engines.slurm_job import SlurmJob, sbatch_options, slurm_environment
from meshbook.errors import StartError
from meshbook.wire.messages import MeshSpec


class SlurmEngine:
    """Hosts on the nodes of one job; node number n in Slurm's order is host n."""

    name = "slurm"
    spans_machines = True
    dials_tcp = True

    def __init__(self, spec: MeshSpec) -> None:
        self._address = Address.parse(spec.on)
        ranks_per_node = math.prod(spec.axes.values()) // spec.num_hosts
        self._options = sbatch_options(self._address, num_nodes=spec.num_hosts, ranks_per_node=ranks_per_node)
        self._mesh_id = secrets.token_hex(4)
        self._hosts = HostLaunches()
        self.pop_failed, self.pop_exited = self._hosts.pop_failed, self._hosts.pop_exited
        self.progress, self.first_address = self._hosts.progress, self._hosts.first_address
        self._job: SlurmJob | None = None
        self._launched: set[int] = set()
        self._supervisor = SupervisorWait()
        self.supervisor_listens = self._supervisor.listens

    @property
    def queue_state(self) -> str:
        return self._job.queue_state if self._job is not None else ""

    @property
    def ends_at(self) -> float | None:
        return self._job.ends_at if self._job is not None else None

    def runs_in_process(self, num_hosts: int) -> bool:
        return False

    def launch(self, host: int, start: HostStart) -> None:
        name = f"{start.mesh[:24]}-{self._mesh_id}"
        if self._job is None:
            self._job = SlurmJob(start.mesh, name, self._options)
            self._job.begin()
        self._hosts.discard(host)
        words = ["-m", "meshbook.host.remote", name, str(host)] + ([] if start.torch else ["--light"])
        log_path = start.folder / f"h{host}.{secrets.token_hex(2)}.log"
        command = SrunHost(self._job, host, self._address.python, words, log_path, is_restart=host in self._launched)
        self._launched.add(host)
        self._hosts.begin(host, command, start, self._supervisor)

    def take_over(self) -> None:
        if self._job is not None:
            self._job.take_over()
        self._hosts.take_over()

    def close(self) -> None:
        if self._job is not None:
            self._job.give_up()
        self._hosts.close()
        if self._job is not None:
            self._job.close()


class SrunHost(HostCommand):
    """One srun on one node of a job, with a host at its other end."""

    _first_stage = "Slurm has the job"

    def __init__(
        self, job: SlurmJob, host: int, python: str | None, module: list[str], log_path: Path, *, is_restart: bool
    ) -> None:
        """
        Args:
            python: the interpreter there; None: this one's path if it is there too, else python3.
            module: what follows the interpreter: "-m", the module, its arguments.
            is_restart: the job may have ended since, or have lost the node.
        """
        super().__init__(log_path)
        self._job, self._host, self._python, self._module = job, host, python, module
        self._is_restart = is_restart
        self._node: str | None = None

    @property
    def machine_name(self) -> str:
        return self._node or f"node {self._host}"

    def _start_process(self) -> LauncherProcess:
        nodes = self._job.nodes()
        if self._host >= len(nodes):
            raise StartError(f"Slurm has given job {self._job.id} {len(nodes)} nodes, and host {self._host} has none")
        self._node = nodes[self._host]
        self._enter("srun starts Python")
        if self._is_restart:
            self._job.check(self._node)
        command = [
            "srun", f"--jobid={self._job.id}", f"--nodelist={self._node}", "--nodes=1", "--ntasks=1", "--overlap",
            "--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none", f"--chdir={os.path.expanduser('~')}",
            *_interpreter(self._python), *self._module,
        ]  # fmt: skip
        environment = slurm_environment()
        environment.pop("MESHBOOK_FORK_SERVER", None)  # of this machine
        try:
            return LauncherProcess(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._error_file(), env=environment
            )
        except OSError as error:
            raise StartError(f"srun cannot be started: {error.strerror}") from error

    def terminate(self) -> None:
        """End the host in order: srun passes on the end of its standard input, and a signal would kill the host."""
        self._is_closed = True
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def _describe_failure(self, code: int | None, words: str) -> str:
        if code is None:
            return f"{self.machine_name}: its host did not start within {HELLO_TIMEOUT_S:.0f} s{quoted(words)}"
        if (state := self._job.end()) is not None:
            return f"{self._job.describe_end(state)} while the mesh was coming up"
        if (why := explain_interpreter(self.machine_name, self._python or "python3", code, words, "slurm")) is not None:
            return why
        return f"{self.machine_name} could not start a host: srun exited with status {code}{quoted(words)}"

    def _describe_end(self, code: int | None, words: str) -> str:
        if (state := self._job.end()) is not None:
            return f"was taken away: {self._job.describe_end(state)}"
        if code == 0:  # also what srun makes of a node that has failed
            return f"is out of reach: its srun has ended{quoted(words)}"
        return describe_host_end(code, words)


def _interpreter(python: str | None) -> list[str]:
    """Return the words that run an interpreter on a node."""
    if python is not None:
        return [python, "-P"]
    script = 'if [ -x "$0" ]; then exec "$0" "$@"; else exec python3 "$@"; fi'
    return ["sh", "-c", script, sys.executable, "-P"]
