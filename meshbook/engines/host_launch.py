"""A host on another machine: its start, which is a dialogue in lines, and how it has ended.

The host first says what its machine is, then hears how it goes on (`wire/remote_start`). The dialogue has waits, so
each host has a thread, which ends with the host. The host ends when its standard input does.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from meshbook.engines.base import HostProgress, HostStart
from meshbook.errors import StartError
from meshbook.version import __version__
from meshbook.wire.remote_start import RemoteHello, RemoteStart, SupervisorAddress

log = logging.getLogger("meshbook.engines")

# Seconds from the start of a host to its first line: an interpreter on a cold network file system takes long.
HELLO_TIMEOUT_S = 60.0
# Seconds that a machine waits for the addresses of the others.
_PEERS_TIMEOUT_S = 60.0
# Seconds that a host waits until it is known where the supervisor listens, which it does when the first has come.
_LISTEN_TIMEOUT_S = 60.0
_MAX_WORDS = 3  # lines of a launcher's or Python's own words in an error


class HostLaunch(ABC):
    """One start of a host, and its life.

    Attributes:
        failure: why it could not be started, with the launcher's own words and what to do; None: not known to have
            failed. Any thread may read it.
        exit_reason: how it has ended after it had started; None: it runs.
        has_started: it knows how to go on.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.exit_reason: str | None = None
        self.has_started = False
        self._thread: threading.Thread | None = None
        self._stage, self._stage_since = "", time.monotonic()

    # ---- what depends on the launcher

    @property
    @abstractmethod
    def _first_stage(self) -> str:
        """What `open` begins with, as in "gpu2: ssh connects"."""

    @property
    @abstractmethod
    def machine_name(self) -> str:
        """What an error calls the machine. It may depend on a start that is under way."""

    @abstractmethod
    def open(self) -> RemoteHello:
        """Start the host and return its hello. Blocks. Raises StartError."""

    def _connect(self, hello: RemoteHello, start: RemoteStart) -> RemoteStart:
        """Have the supervisor's sockets within the host's reach, before it goes on. May block. Raises StartError.

        Returns:
            what the host hears, with the addresses at which it reaches them.
        """
        return start

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Write to the host's standard input. Raises StartError."""

    @abstractmethod
    def _wait_for_end(self) -> str:
        """Wait until it has ended; return how, as a phrase that follows its machine's name."""

    @abstractmethod
    def _inherit(self) -> None:
        """Take over what a former supervisor had of it."""

    @abstractmethod
    def terminate(self) -> None:
        """Have it end, in order. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """End it if it runs still, and what was for it here. Blocks for some seconds at most."""

    # ---- the same for all

    def begin(self, prepare: Callable[[RemoteHello], RemoteStart]) -> None:
        """Start the host on a thread. `prepare` is called there, when the host has said hello."""
        self._enter(self._first_stage)
        self._thread = threading.Thread(target=self._run, args=(prepare,), daemon=True)
        self._thread.start()

    def _run(self, prepare: Callable[[RemoteHello], RemoteStart]) -> None:
        try:
            hello = self.open()
            self._enter("")
            start = prepare(hello)
            self._enter("the host connects back")
            start = self._connect(hello, start)
            self.has_started = True
            self._write(msgspec.json.encode(start) + b"\n")
        except StartError as error:
            self.failure = str(error)
            self.terminate()
            return
        except Exception as error:
            log.exception("the start of a host on %s failed", self.machine_name)
            self.failure = f"{self.machine_name}: {type(error).__name__}: {error}"
            self.terminate()
            return
        self._watch_end()

    def _watch_end(self) -> None:
        self.exit_reason = self._wait_for_end()

    def take_over(self) -> None:
        """Go on in a process that was forked from the one that has begun it, which has ended: without its threads."""
        self._inherit()
        self._thread = None
        if not self.has_started:
            why = "its host was starting when the mesh's supervisor was killed; try again"
            self.failure = self.failure or f"{self.machine_name}: {why}"
        elif self.exit_reason is None:
            self._thread = threading.Thread(target=self._watch_end, daemon=True)
            self._thread.start()

    def _enter(self, stage: str) -> None:
        """Take note of what goes on now, for those who wait."""
        self._stage, self._stage_since = stage, time.monotonic()

    def progress(self) -> HostProgress:
        return HostProgress(self.machine_name, self._stage, int(time.monotonic() - self._stage_since))

    def _join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)


def decode_hello(line: bytes, machine: str) -> RemoteHello | None:
    """Return a host's hello; None: the line is none. Raises StartError: it says that it cannot be a host."""
    try:
        hello = msgspec.json.decode(line, type=RemoteHello)
    except msgspec.MsgspecError:
        return None
    if hello.problem:
        raise StartError(f"{machine}: {hello.problem}")
    return hello


class HostLaunches:
    """The hosts of a mesh as their engine starts them, and the addresses of their machines."""

    def __init__(self) -> None:
        self._launches: dict[int, HostLaunch] = {}
        self._peers = _Peers()

    def begin(self, host: int, launch: HostLaunch, start: HostStart, supervisor: SupervisorWait | None = None) -> None:
        """Start a host. It hears the addresses of the other machines and, of `supervisor`, where that listens."""
        self._launches[host] = launch
        self._peers.expect(host)

        def prepare(hello: RemoteHello) -> RemoteStart:
            assert hello.facts is not None
            peers = self._peers.exchange(host, hello.facts.address)
            address = supervisor.wait() if supervisor is not None else None
            return RemoteStart(start.token, start.identity, peers, start.lease_s, address)

        launch.begin(prepare)

    def discard(self, host: int) -> None:
        """End a host that was given up, if there is one."""
        if (former := self._launches.pop(host, None)) is not None:
            former.close()

    def progress(self) -> dict[int, HostProgress]:
        return {host: launch.progress() for host, launch in self._launches.items()}

    def pop_failed(self) -> dict[int, str]:
        return self._pop(lambda launch: launch.failure)

    def pop_exited(self) -> dict[int, str]:
        return self._pop(lambda launch: launch.exit_reason)

    def take_over(self) -> None:
        for launch in self._launches.values():
            launch.take_over()

    def first_address(self) -> str | None:
        """Return the address of a machine that has said hello; None: none has."""
        return self._peers.first()

    def _pop(self, what: Callable[[HostLaunch], str | None]) -> dict[int, str]:
        found = {host: text for host, one in self._launches.items() if (text := what(one)) is not None}
        for host in found:
            self._launches.pop(host).close()
            self._peers.forget(host)
        return found

    def close(self) -> None:
        for launch in self._launches.values():
            launch.terminate()
        for launch in self._launches.values():
            launch.close()
        self._launches.clear()


class _Peers:
    """The addresses of a mesh's machines, as their starters have reached them."""

    def __init__(self) -> None:
        self._addresses: dict[int, str | None] = {}
        self._changed = threading.Condition()

    def expect(self, host: int) -> None:
        with self._changed:
            self._addresses[host] = None

    def forget(self, host: int) -> None:
        with self._changed:
            self._addresses.pop(host, None)
            self._changed.notify_all()

    def first(self) -> str | None:
        with self._changed:
            return next((address for address in self._addresses.values() if address is not None), None)

    def exchange(self, host: int, address: str) -> tuple[str, ...]:
        """Record a machine's address; return those of all others, once these are known. Blocks."""
        with self._changed:
            self._addresses[host] = address
            self._changed.notify_all()
            self._changed.wait_for(lambda: None not in self._addresses.values(), _PEERS_TIMEOUT_S)
            others = [found for other, found in sorted(self._addresses.items()) if other != host and found]
        return tuple(other for other in others if not _is_loopback(other))


class SupervisorWait:
    """Where the supervisor listens for hosts that connect by TCP; they wait until that is known."""

    def __init__(self) -> None:
        self._address: SupervisorAddress | None = None
        self._is_listening = threading.Event()

    def listens(self, address: SupervisorAddress) -> None:
        self._address = address
        self._is_listening.set()

    def wait(self) -> SupervisorAddress:
        """Return its address. Blocks. Raises StartError: it does not listen."""
        if not self._is_listening.wait(_LISTEN_TIMEOUT_S):
            raise StartError(f"the supervisor did not listen within {_LISTEN_TIMEOUT_S:.0f} s")
        assert self._address is not None
        return self._address


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def describe_host_end(code: int | None, words: str) -> str:
    """Return how a host's process has ended, as a phrase that follows its machine's name. code: None: not known."""
    if code is None:
        return f"has lost its host process, whose exit status was lost with a former supervisor{quoted(words)}"
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        return f"has lost its host process, which was killed by signal {number}{quoted(words)}"
    return f"has lost its host process, which exited with status {code}{quoted(words)}"


def explain_interpreter(machine: str, python: str, code: int | None, words: str, scheme: str) -> str | None:
    """Return why an interpreter could not run a host, and what to do; None: that was not what failed."""
    if "No module named" in words:
        return (
            f"{machine} has no Meshbook, or not what it needs, for {python}{quoted(words)}; install it there: {python} "
            f"-m pip install meshbook=={__version__}; or name another interpreter: {scheme}://…?python=/path/to/python"
        )
    if "No such file or directory" in words or code == 127:
        return (
            f"{machine} has no interpreter {python}{quoted(words)}; name one of that machine: "
            f"{scheme}://…?python=/path/to/python"
        )
    return None


def quoted(words: str) -> str:
    """Return somebody's own words as they follow a clause of ours; "" for none."""
    return f' ("{words}")' if words else ""


def last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_MAX_WORDS:])
