"""Hosts that actors of Ray or Monarch start. The dialogue of a host's start, with the secrets in it, goes in calls.

The launcher is spoken to by a process of its own (`engines/driver`). Hosts and ranks connect to the supervisor by TCP,
encrypted by CURVE.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec

from meshbook.engines.addresses import Address
from meshbook.engines.base import HostStart
from meshbook.engines.driver import LauncherDriver
from meshbook.engines.driver_messages import (
    CloseInput,
    DriverCommand,
    FindWays,
    HostActorLost,
    HostEnded,
    HostLogged,
    HostNews,
    HostStarted,
    HostWrote,
    KillHost,
    StartHost,
    WaysFound,
    WriteInput,
)
from meshbook.engines.host_launch import (
    HELLO_TIMEOUT_S,
    HostLaunch,
    HostLaunches,
    SupervisorWait,
    decode_hello,
    describe_host_end,
    explain_interpreter,
    last_lines,
    quoted,
)
from meshbook.errors import StartError
from meshbook.wire.messages import MeshSpec
from meshbook.wire.remote_start import RemoteHello, RemoteStart

_END_TIMEOUT_S = 1.5
# Seconds from the request for an actor to its host's hello: the launcher first starts a worker, an interpreter that
# imports its package.
_START_TIMEOUT_S = 2 * HELLO_TIMEOUT_S


class ActorEngine(ABC):
    """Hosts on the nodes that a launcher gives; node number n is host n."""

    name: str
    spans_machines = True
    dials_tcp = True
    ends_at = None

    def __init__(self, spec: MeshSpec) -> None:
        self._spec, self._address = spec, Address.parse(spec.on)
        self._mesh_id = secrets.token_hex(4)
        self._hosts = HostLaunches()
        self.pop_failed, self.pop_exited = self._hosts.pop_failed, self._hosts.pop_exited
        self.progress, self.first_address = self._hosts.progress, self._hosts.first_address
        self._supervisor = SupervisorWait()
        self.supervisor_listens = self._supervisor.listens
        self._driver: LauncherDriver | None = None

    # ---- what depends on the launcher

    @abstractmethod
    def _new_driver(self, folder: Path) -> LauncherDriver:
        """Return its driver."""

    @abstractmethod
    def _first_command(self) -> DriverCommand:
        """Return what asks it for nodes."""

    @abstractmethod
    def _has_workers_of_its_own(self) -> bool:
        """Whether workers are started for this mesh on this machine, and so with the driver's PYTHONPATH."""

    # ---- the engine

    @property
    def queue_state(self) -> str:
        return self._driver.queue_state if self._driver is not None else ""

    def runs_in_process(self, num_hosts: int) -> bool:
        return False

    def launch(self, host: int, start: HostStart) -> None:
        if self._driver is None or self._driver.has_ended:
            if self._driver is not None:
                self._driver.close()
            self._driver = self._new_driver(start.folder)
            self._driver.begin(self._first_command())
        self._hosts.discard(host)
        words = ["-P", "-m", "meshbook.host.remote", f"{start.mesh[:24]}-{self._mesh_id}", str(host)]
        words += [] if start.torch else ["--light"]
        log_path = start.folder / f"h{host}.{secrets.token_hex(2)}.log"
        # Without one of ours that of the launcher's workers counts, unless theirs is the driver's.
        own = self._has_workers_of_its_own() or "PYTHONPATH" in os.environ
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} if own else {}
        launch = ActorHost(self._driver, host, self._address.python, words, environment, log_path)
        self._hosts.begin(host, launch, start, self._supervisor)

    def take_over(self) -> None:
        if self._driver is not None:
            self._driver.take_over()
        self._hosts.take_over()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.give_up()
        self._hosts.close()
        if self._driver is not None:
            self._driver.close()


class ActorHost(HostLaunch):
    """One actor on one node, with a host as its child."""

    def __init__(
        self,
        driver: LauncherDriver,
        host: int,
        python: str | None,
        module: list[str],
        environment: dict[str, str],
        log_path: Path,
    ) -> None:
        """
        Args:
            python: the interpreter there; None: that of the launcher's workers.
            module: what follows the interpreter.
            environment: in addition to that of the launcher's workers.
            log_path: of what the host writes to standard error.
        """
        super().__init__()
        self._driver, self._host, self._python, self._module = driver, host, python, module
        self._environment, self._log = environment, log_path
        self._node: str | None = None
        self._first_line: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ways: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._end: HostEnded | HostActorLost | None = None
        self._has_ended = threading.Event()
        self._launch = driver.new_launch(self._hear)

    @property
    def machine_name(self) -> str:
        return self._node or f"node {self._host}"

    @property
    def _first_stage(self) -> str:
        return f"{self._driver.launcher} finds nodes"

    def open(self) -> RemoteHello:
        address = self._driver.allocated().address
        self._enter(f"{self._driver.launcher} starts Python")
        words = (*self._module, f"--launched-from={address}")
        self._driver.send(StartHost(self._launch, self._host, self._python, words, self._environment))
        line = b""
        with contextlib.suppress(queue.Empty):
            line = self._first_line.get(timeout=_START_TIMEOUT_S)
        if (hello := decode_hello(line, self.machine_name)) is None:
            raise StartError(self._why_no_hello())
        return hello

    def _connect(self, hello: RemoteHello, start: RemoteStart) -> RemoteStart:
        there = start.supervisor
        assert there is not None
        self._driver.send(FindWays(self._launch, (there.hosts, there.store)))
        ways: tuple[str, ...] = ()
        with contextlib.suppress(queue.Empty):
            ways = self._ways.get(timeout=_START_TIMEOUT_S)
        if not ways:
            raise StartError(self._why_no_hello())
        hosts, store = ways
        return msgspec.structs.replace(start, supervisor=msgspec.structs.replace(there, hosts=hosts, store=store))

    def _write(self, data: bytes) -> None:
        self._driver.send(WriteInput(self._launch, data.decode()))

    def _wait_for_end(self) -> str:
        self._has_ended.wait()
        if isinstance(self._end, HostEnded):
            return describe_host_end(self._end.code, self._last_words())
        return f"is lost to {self._driver.launcher}{quoted(self._last_words())}"

    def _why_no_hello(self) -> str:
        words, launcher = self._last_words(), self._driver.launcher
        match self._end:
            case None:
                within = f"within {_START_TIMEOUT_S:.0f} s"
                return f"{self.machine_name}: {launcher} did not start its host {within}{quoted(words)}"
            case HostActorLost():
                return f"{self.machine_name} could not start a host: {words}"
            case HostEnded(code=code):
                python = self._python or f"{launcher}'s workers' python"
                return explain_interpreter(self.machine_name, python, code, words, launcher.lower()) or (
                    f"{self.machine_name} could not start a host: {python} exited with status {code}{quoted(words)}"
                )

    def _last_words(self) -> str:
        """Return the last lines of what the host, or the launcher of its actor, has said."""
        if isinstance(self._end, HostActorLost):
            return last_lines(self._end.words)
        return last_lines(self._log.read_text(errors="replace")) if self._log.exists() else ""

    def _inherit(self) -> None:
        pass  # the engine's driver is taken over once for all

    def terminate(self) -> None:
        self._driver.send(CloseInput(self._launch))

    def close(self) -> None:
        self.terminate()
        if not self._has_ended.wait(_END_TIMEOUT_S if self._node is not None else 0):
            self._driver.send(KillHost(self._launch))
        self._join(_END_TIMEOUT_S)

    # ---- on the driver's thread

    def _hear(self, news: HostNews) -> None:
        match news:
            case HostStarted():
                self._node = news.node
            case HostWrote():
                self._first_line.put(news.line.encode())
            case WaysFound():
                self._ways.put(news.addresses)
            case HostLogged():
                with contextlib.suppress(OSError), open(self._log, "a") as log:  # the mesh's folder may be gone
                    log.write(news.text)
            case HostEnded() | HostActorLost():
                self._end = news
                self._has_ended.set()
                self._first_line.put(b"")
                self._ways.put(())
