"""The driver process of a mesh on Ray or Monarch, as its engine sees it: asked for nodes, and for hosts.

The launcher's own package is imported in that process only: that takes seconds, starts threads and blocks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshbook.engines.driver_messages import (
    ClusterDescribed,
    ClusterFailed,
    DriverCommand,
    DriverLine,
    DriverReport,
    HostActorLost,
    HostEnded,
    HostLogged,
    HostNews,
    HostStarted,
    HostWrote,
    JobDescribed,
    NodesAllocated,
    NodesAwaited,
    WaysFound,
)
from meshbook.engines.host_launch import last_lines, quoted
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.errors import StartError

# Seconds for the driver to end its hosts, give back what it has on the cluster, and leave it.
_END_TIMEOUT_S = 6.0

_Outcome = NodesAllocated | ClusterDescribed | JobDescribed


class LauncherDriver(ABC):
    """A process with a connection to a cluster. Any thread may use it.

    Attributes:
        launcher: what an error calls it.
        module: what the process runs.
        explanations: what is in the launcher's words, what that means, and what to do: the first that fits.
        queue_state: what the launcher says while there are no nodes for the mesh; "" otherwise.
    """

    launcher: str
    module: str
    explanations: tuple[tuple[str, str, str], ...]

    def __init__(self, folder: Path) -> None:
        """folder: for what the launcher writes, and what it imports."""
        self._folder, self._log = folder, folder / f"{self.launcher.lower()}.log"
        self.queue_state = ""
        self._process: LauncherProcess | None = None
        self._write_lock = threading.Lock()
        self._launches = itertools.count()
        self._listeners: dict[int, Callable[[HostNews], None]] = {}
        self._is_decided = threading.Event()  # the nodes are there, or will never be
        self._outcome: _Outcome | str = ""  # str: why there are none
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def begin(self, first: DriverCommand) -> None:
        """Start it. Does not wait. Raises StartError."""
        command = [sys.executable, "-P", "-m", self.module]
        try:
            with open(self._log, "wb") as log:
                self._process = LauncherProcess(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    env={**os.environ, **self._environment()},
                )  # fmt: skip
        except OSError as error:
            raise StartError(f"the driver of {self.launcher} cannot be started: {error.strerror}") from error
        self.send(first)
        self._thread.start()

    def _environment(self) -> dict[str, str]:
        """Return what is in the process's environment, in addition to that of this one."""
        return {}

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.has_ended

    def send(self, command: DriverCommand) -> None:
        """Have something done. Nothing happens if the process has ended: its hosts have been reported then."""
        assert self._process is not None
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")

    def allocated(self) -> NodesAllocated:
        """Return when there are nodes. Blocks. Raises StartError: there will be none, or the start was given up."""
        outcome = self._wait()
        assert isinstance(outcome, NodesAllocated)
        return outcome

    @classmethod
    def ask(cls, question: DriverCommand) -> ClusterDescribed | JobDescribed:
        """Return what there is, by a driver of its own. Blocks for some seconds.

        Raises:
            StartError: there is no cluster, or no job.
        """
        with tempfile.TemporaryDirectory() as folder:
            driver = cls(Path(folder))
            try:
                driver.begin(question)
                outcome = driver._wait()
                assert not isinstance(outcome, NodesAllocated)
                return outcome
            finally:
                driver.close()

    def new_launch(self, listener: Callable[[HostNews], None]) -> int:
        """Return a number for one start of a host; `listener` hears of it, on a thread."""
        launch = next(self._launches)
        self._listeners[launch] = listener
        return launch

    def take_over(self) -> None:
        """Go on in a process that was forked from the one that has begun it, which has ended: without its thread."""
        if self._process is None:
            return
        self._process.take_over()
        self._write_lock = threading.Lock()
        self._decide("its driver was starting when the mesh's supervisor was killed; try again")
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Have nobody wait for nodes any more, and the driver end. Does not block."""
        self._is_closed = True
        self._decide("the start was given up")
        if self._process is not None and self._process.stdin is not None:
            with self._write_lock, contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End it, and all that it has on the cluster. Blocks until the launcher has taken note, for some seconds."""
        self.give_up()
        if self._process is None:
            return
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what it has is ended all the same
            self._process.wait()
        self._thread.join()
        self._process.close()

    # ---- its thread

    def _run(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        decoder: msgspec.json.Decoder[DriverReport] = msgspec.json.Decoder(DriverReport)
        with io.BufferedReader(self._process.stdout) as lines:  # type: ignore[type-var]
            for line in lines:
                try:
                    report = decoder.decode(line)
                except msgspec.MsgspecError:
                    # A former supervisor may have read the line's beginning, and lines before it. A host of whose end
                    # it has heard so is missed by its silence.
                    if not self._process.is_inherited:
                        raise
                    continue
                self._hear(report)
        code = self._process.wait()
        words = last_lines(self._log.read_text(errors="replace")) if self._log.exists() else ""
        self._decide(
            self.explain(words) or f"the driver of {self.launcher} has ended with status {code}{quoted(words)}"
        )
        for launch, listener in list(self._listeners.items()):
            listener(HostActorLost(launch, f"the mesh's driver of {self.launcher} has ended" + quoted(words)))

    def _hear(self, report: DriverLine) -> None:
        match report:
            case NodesAwaited():
                self.queue_state = report.state
            case NodesAllocated() | ClusterDescribed() | JobDescribed():
                self._decide(report)
            case ClusterFailed():
                words = " ".join(report.words.split())
                advised = f"{words}; {report.advice}" if report.advice else self.explain(words)
                self._decide(advised or f"{self.launcher} gives no nodes{quoted(words)}")
            case HostStarted() | HostWrote() | WaysFound() | HostLogged() | HostEnded() | HostActorLost():
                self._listeners[report.launch](report)

    def _decide(self, outcome: _Outcome | str) -> None:
        self.queue_state = ""
        if not self._is_decided.is_set():
            self._outcome = outcome
            self._is_decided.set()

    def _wait(self) -> _Outcome:
        self._is_decided.wait()
        if isinstance(self._outcome, str):
            raise StartError(self._outcome)
        return self._outcome

    @classmethod
    def explain(cls, words: str) -> str | None:
        """Return what the launcher's words mean and what to do; None: that is not known."""
        for sign, what, advice in cls.explanations:
            if sign in words:
                return f"{what}{quoted(words)}; {advice}".replace("{python}", sys.executable)
        return None
