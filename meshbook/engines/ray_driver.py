"""The driver process of a mesh on Ray (`engines/ray_main`), as its engine sees it: asked for nodes, and for hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshbook.engines.host_launch import last_lines, quoted
from meshbook.engines.ray_messages import (
    ClusterDescribed,
    ClusterFailed,
    HostActorLost,
    HostEnded,
    HostLogged,
    HostNews,
    HostStarted,
    HostWrote,
    NodesAllocated,
    NodesAwaited,
    RayCommand,
    RayLine,
    RayReport,
)
from meshbook.errors import StartError

# Seconds for the driver to end its hosts, remove the placement group and leave the cluster.
_END_TIMEOUT_S = 6.0

# What is in Ray's words, what that means, and what to do: the first that fits.
_EXPLANATIONS = (
    ("No module named 'ray'",
     "there is no Ray for {python}",
     "install the version that the cluster has: {python} -m pip install ray==…"),
    ("Version mismatch",
     "Ray or Python here is another than the cluster's",
     "start the notebook from an environment with the cluster's versions: pip install ray==…, in a Python of its "
     "version, the last digit too"),
    ("Could not find any running Ray instance",
     "no Ray runs on this machine",
     "start the notebook on a node of the cluster, such as the head; or start one: ray start --head; or ray://local"),
    ("AuthenticationError",
     "Ray's cluster wants its token",
     "give the notebook RAY_AUTH_MODE=token and the token of the cluster: RAY_AUTH_TOKEN, or ~/.ray/auth_token"),
    ("cannot be reached",
     "Ray's head does not answer",
     "look at its address: that of GCS, port 6379 unless `ray start --port` says another (not Ray Client's 10001)"),
    ("No node info found",
     "this machine is no node of that cluster",
     "start the notebook on a node of it; one without work for Ray is one too: ray start --address=… --num-cpus=0"),
)  # fmt: skip


class RayDriver:
    """A process with a connection to a Ray cluster. Any thread may use it.

    Attributes:
        queue_state: what Ray says while there are no nodes for the mesh; "" otherwise.
    """

    def __init__(self, folder: Path) -> None:
        """folder: for what Ray writes, and what it imports."""
        self._folder, self._log = folder, folder / "ray.log"
        self.queue_state = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._write_lock = threading.Lock()
        self._launches = itertools.count()
        self._listeners: dict[int, Callable[[HostNews], None]] = {}
        self._is_decided = threading.Event()  # the nodes are there, or will never be
        self._outcome: NodesAllocated | ClusterDescribed | str = ""  # str: why there are none
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ray driver", daemon=True)

    def begin(self, first: RayCommand) -> None:
        """Start it. Does not wait. Raises StartError."""
        command = [sys.executable, "-P", "-m", "meshbook.engines.ray_main"]
        path = os.pathsep.join(filter(None, [quick_imports(self._folder), os.environ.get("PYTHONPATH")]))
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    env={**os.environ, "PYTHONPATH": path},
                )  # fmt: skip
        except OSError as error:
            raise StartError(f"the driver of Ray cannot be started: {error.strerror}") from error
        self.send(first)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def send(self, command: RayCommand) -> None:
        """Have something done. Nothing happens if the process has ended: its hosts have been reported then."""
        assert self._process is not None
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()

    def allocated(self) -> NodesAllocated:
        """Return when there are nodes. Blocks. Raises StartError: there will be none, or the start was given up."""
        outcome = self._wait()
        assert isinstance(outcome, NodesAllocated)
        return outcome

    def described(self) -> ClusterDescribed:
        """Return what the cluster has. Blocks. Raises StartError: there is no cluster."""
        outcome = self._wait()
        assert isinstance(outcome, ClusterDescribed)
        return outcome

    def new_launch(self, listener: Callable[[HostNews], None]) -> int:
        """Return a number for one start of a host; `listener` hears of it, on a thread."""
        launch = next(self._launches)
        self._listeners[launch] = listener
        return launch

    def give_up(self) -> None:
        """Have nobody wait for nodes any more, and the driver end. Does not block."""
        self._is_closed = True
        self._decide("the start was given up")
        if self._process is not None and self._process.stdin is not None:
            with self._write_lock, contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End it, and with it all that it has on the cluster. Blocks until Ray has taken note, for some seconds."""
        self.give_up()
        if self._process is None:
            return
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray then ends its actors and the placement group
            self._process.wait()
        self._thread.join()

    # ---- its thread

    def _run(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        decoder: msgspec.json.Decoder[RayReport] = msgspec.json.Decoder(RayReport)
        with self._process.stdout:
            for line in self._process.stdout:
                self._hear(decoder.decode(line))
        code = self._process.wait()
        words = last_lines(self._log.read_text(errors="replace")) if self._log.exists() else ""
        self._decide(explain(words) or f"the driver of Ray has ended with status {code}{quoted(words)}")
        for launch, listener in list(self._listeners.items()):
            listener(HostActorLost(launch, "the mesh's driver of Ray has ended" + quoted(words)))

    def _hear(self, report: RayLine) -> None:
        match report:
            case NodesAwaited():
                self.queue_state = report.state
            case NodesAllocated() | ClusterDescribed():
                self._decide(report)
            case ClusterFailed():
                words = " ".join(report.words.split())
                self._decide(explain(words) or f"Ray gives no nodes{quoted(words)}")
            case HostStarted() | HostWrote() | HostLogged() | HostEnded() | HostActorLost():
                self._listeners[report.launch](report)

    def _decide(self, outcome: NodesAllocated | ClusterDescribed | str) -> None:
        self.queue_state = ""
        if not self._is_decided.is_set():
            self._outcome = outcome
            self._is_decided.set()

    def _wait(self) -> NodesAllocated | ClusterDescribed:
        self._is_decided.wait()
        if isinstance(self._outcome, str):
            raise StartError(self._outcome)
        return self._outcome


def quick_imports(folder: Path) -> str:
    """Return a folder in `folder` for PYTHONPATH that makes `import ray` quick where Jupyter is installed too.

    Ray imports jsonschema, which imports rfc3987_syntax if it is there: that compiles a grammar, 2.4 of 3.5 s, to check
    URLs that Ray does not have. Each process of a Ray pays it, and on a busy machine a node gives up waiting for them.
    """
    found = folder / "quick"
    found.mkdir(exist_ok=True)
    (found / "rfc3987_syntax.py").write_text("raise ImportError\n")
    return str(found)


def explain(words: str) -> str | None:
    """Return what Ray's words mean and what to do; None: that is not known."""
    for sign, what, advice in _EXPLANATIONS:
        if sign in words:
            return f"{what}{quoted(words)}; {advice}".replace("{python}", sys.executable)
    return None
