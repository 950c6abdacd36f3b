"""A Ray cluster on the machines of a bed: its head is "here", and has no cores for others; n1 and n2 have 8 each.

As on a real cluster, the notebook's machine is a node: Ray lets nobody else in.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshbook.engines.ray_driver import quick_imports
from tests.cluster.bed import NETWORK, Bed

HEAD = f"{NETWORK}.200:6379"
# What is in the command lines of Ray's own processes; an actor's is none of them.
_DAEMONS = ["/ray/", "ray.scripts", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"]
_START_TIMEOUT_S = 90.0
# Seconds for a test that may have to start the cluster, head and machines, and Ray's drivers import for long.
RAY_TIMEOUT_S = 600
_TRIES = 3  # a raylet gives up when the Python processes beside it start slowly, as they do on a busy machine


class RayOnBed:
    """A running cluster.

    Attributes:
        environment: what a driver must have.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        # Ray keeps sockets there: private on each machine, and here beside the folder that all of them share.
        self._temp = Path(f"{bed.folder}r")
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": HEAD,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        bed.daemons += _DAEMONS
        head = ("--head", "--port=6379", "--num-cpus=0", f"--temp-dir={self._temp}", "--include-dashboard=false")
        try:
            self.start_node("here", *head)
            with ThreadPoolExecutor() as threads:
                list(threads.map(self.start_node, bed.names))
        except BaseException:
            self.close()
            raise

    def start_node(self, name: str, *options: str) -> None:
        """Start Ray on a machine, as a node of the cluster unless the options say otherwise. Blocks until it is."""
        if name in self._nodes:  # it ended with its machine
            self.stop_node(name)
        spaces = ["-n"] if name == "here" else ["-m", "-u", "-i", "-n", "-p"]
        address = f"{NETWORK}.{200 if name == 'here' else name[1:]}"
        command = [
            "nsenter", "-t", str(self.bed.pid(name)), *spaces, "--", "setpriv", "--pdeathsig", "KILL", sys.executable,
            "-P", "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}",
            "--object-store-memory=80000000", *(options or (f"--address={HEAD}", "--num-cpus=8")),
        ]  # fmt: skip
        environment = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": quick_imports(self.bed.folder),
            "MESHBOOK_TEST_RUN": name,
            "MESHBOOK_RUNTIME_DIR": "/run/mb",
        }
        del environment["RAY_ADDRESS"]
        for _ in range(_TRIES):
            node = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment,
            )  # fmt: skip
            assert node.stdout is not None
            self._nodes[name] = node
            limit = threading.Timer(_START_TIMEOUT_S, node.kill)  # `ray start` does not notice that a raylet has ended
            limit.start()
            said = ""
            for line in node.stdout:
                said += line
                if "--block" in line:  # "This command will now block forever until terminated by a signal"
                    limit.cancel()
                    return
            limit.cancel()
            self.stop_node(name)
        raise RuntimeError(f"Ray did not start on {name}:\n{said}")

    def stop_node(self, name: str) -> None:
        node = self._nodes.pop(name)
        node.terminate()
        node.wait()
        if node.stdout is not None:
            node.stdout.close()

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.stop_node(name)
        self.bed.daemons = [daemon for daemon in self.bed.daemons if daemon not in _DAEMONS]
        shutil.rmtree(self._temp, ignore_errors=True)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What this thread starts meanwhile is on the head's machine, and may be a driver."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            with self.bed.here():
                yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})

    def holds(self) -> dict[str, int]:
        """How many placement groups and actors there are that have not ended. Takes some seconds."""
        script = (
            "import json, ray; from ray._private.state import actors; "
            f"ray.init({HEAD!r}, log_to_driver=False, logging_level='ERROR'); "
            "groups = [one for one in ray.util.placement_group_table().values() if one['state'] != 'REMOVED']; "
            "live = [one for one in actors().values() if one['State'] != 'DEAD']; "
            "print(json.dumps({'groups': len(groups), 'actors': len(live)}))"
        )
        with self.here():
            environment = {**os.environ, "PYTHONPATH": quick_imports(self.bed.folder)}
            done = subprocess.run(
                [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
            )
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found
