"""The ssh engine: a host on each of some machines, started by the system's own ssh.

One connection per machine carries everything: the host's start, in lines on its standard input and output, and the
supervisor's sockets, which ssh forwards into the host's folder (`-R`). No port is opened, and whoever may log in may
take part. ~/.ssh/config is honoured, jump hosts too.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

from meshbook.engines.addresses import Address, Machine
from meshbook.engines.base import HostStart
from meshbook.engines.host_command import HostCommand
from meshbook.engines.host_launch import HELLO_TIMEOUT_S, HostLaunches, describe_host_end, last_lines, quoted
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.errors import StartError
from meshbook.version import __version__
from meshbook.wire.child_processes import run_command
from meshbook.wire.messages import MeshSpec
from meshbook.wire.remote_start import HOSTS_SOCKET, STORE_SOCKET, RemoteHello, RemoteStart, SupervisorAddress

# Seconds for ssh to connect: below the 10 s within which a user is to hear of a machine that cannot be reached.
_CONNECT_TIMEOUT_S = 8

# Seconds between ssh's own beats. Three that are not answered end the connection, or more if the mesh waits longer:
# fewer end healthy connections of a loaded machine. The mesh's own beats are quicker.
_ALIVE_INTERVAL_S = 5

SSH_OPTIONS = (
    "-T", "-oBatchMode=yes", f"-oConnectTimeout={_CONNECT_TIMEOUT_S}",
    f"-oServerAliveInterval={_ALIVE_INTERVAL_S}", "-oExitOnForwardFailure=yes", "-oStreamLocalBindUnlink=yes",
    "-oControlPersist=no",
    "-oLogLevel=INFO",  # its words are read, and shown
)  # fmt: skip

_QUICK_CIPHER = "aes128-gcm@openssh.com"


class SshEngine:
    """Hosts on machines that ssh reaches; machine number n of the address is host n."""

    name = "ssh"
    spans_machines = True
    dials_tcp = False
    queue_state = ""
    ends_at = None

    def __init__(self, spec: MeshSpec) -> None:
        self._address = Address.parse(spec.on)
        self._lost_after_s = spec.lost_after_s
        self._mesh_id = secrets.token_hex(4)  # two meshes of one name, of two laptops, may meet on a machine
        self._hosts = HostLaunches()
        self.pop_failed, self.pop_exited, self.close = self._hosts.pop_failed, self._hosts.pop_exited, self._hosts.close
        self.take_over = self._hosts.take_over
        self.progress = self._hosts.progress

    def runs_in_process(self, num_hosts: int) -> bool:
        return False

    def launch(self, host: int, start: HostStart) -> None:
        self._hosts.discard(host)
        words = ["-m", "meshbook.host.remote", f"{start.mesh[:24]}-{self._mesh_id}", str(host)]
        words += [] if start.torch else ["--light"]
        label = f"h{host}.{secrets.token_hex(2)}"
        connection = SshConnection(
            self._address, self._address.machines[host], words, start.folder, label, max_silent_s=self._lost_after_s
        )
        self._hosts.begin(host, connection, start)

    def first_address(self) -> str | None:
        return None

    def supervisor_listens(self, address: SupervisorAddress) -> None:
        """Not used: ssh forwards the supervisor's sockets."""


class SshConnection(HostCommand):
    """One ssh to one machine, with a Python module of ours at its other end."""

    _first_stage = "ssh connects"

    def __init__(
        self,
        address: Address,
        machine: Machine,
        module: list[str],
        folder: Path | None,
        label: str,
        *,
        max_silent_s: float = 0.0,
    ) -> None:
        """
        Args:
            address: says how Python starts there. Without an interpreter: this one's path if it is there too, else
                python3.
            machine: one of the address's.
            module: what follows the interpreter: "-m", the module, its arguments.
            folder: of the supervisor's sockets, to be forwarded; None: nothing is.
            label: unique in the folder.
            max_silent_s: seconds without an answer that ssh lets pass, at least.
        """
        super().__init__(None if folder is None else folder / f"{label}.log")
        self._max_silent_s = max_silent_s
        self.machine, self._python, self._before = machine, address.python, address.before
        self._module, self._folder = module, folder
        self._control = None if folder is None else folder / f"{label}.c"

    @property
    def machine_name(self) -> str:
        return str(self.machine)

    def _start_process(self) -> LauncherProcess:
        # What ~/.ssh/config forwards for people's own sessions may be in use by one of these.
        command = ["ssh", *SSH_OPTIONS, "-oClearAllForwardings=yes", "-oRemoteCommand=none"]
        command += [f"-oServerAliveCountMax={max(3, math.ceil(self._max_silent_s / _ALIVE_INTERVAL_S))}"]
        command += _cipher_options(self.machine)
        command += ["-M", f"-oControlPath={self._control}"] if self._control is not None else ["-oControlPath=none"]
        command += ["-p", str(self.machine.port)] if self.machine.port is not None else []
        command += ["--", self.machine.destination, _remote_command(self._python, self._module, self._before)]
        try:
            return LauncherProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._error_file())
        except FileNotFoundError:
            raise StartError("there is no ssh on this machine; apt-get install openssh-client") from None
        except OSError as error:
            raise StartError(f"ssh cannot be started: {error.strerror}") from error

    def _connect(self, hello: RemoteHello, start: RemoteStart) -> RemoteStart:
        """Have the supervisor's sockets appear in a folder of the machine, through the connection that is open."""
        # Without ~/.ssh/config, whose own forwardings it would ask for too.
        command = ["ssh", "-F", "none", *SSH_OPTIONS, f"-oControlPath={self._control}", "-O", "forward"]
        for name in (HOSTS_SOCKET, STORE_SOCKET):
            command += ["-R", f"{hello.folder}/{name}:{self._folder}/{name}"]
        try:
            done = run_command([*command, "--", self.machine.destination], timeout_s=HELLO_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise StartError(f"{self.machine}: ssh did not forward the mesh's sockets in time") from None
        if done.returncode:
            raise StartError(
                f"{self.machine}: ssh cannot forward the mesh's sockets{quoted(last_lines(done.stderr))}. "
                "Its sshd must allow it: AllowStreamLocalForwarding yes in /etc/ssh/sshd_config, no DisableForwarding"
            )
        return start

    def _describe_failure(self, code: int | None, words: str) -> str:
        machine, destination = str(self.machine), self.machine.destination
        by_hand = f"ssh {f'-p {self.machine.port} ' if self.machine.port is not None else ''}{destination}"
        if code is None:
            return f"{machine} was reached, and its host did not start within {HELLO_TIMEOUT_S:.0f} s{quoted(words)}"
        return f"{machine} {_explain(code, words, by_hand, self._python)}"

    def _describe_end(self, code: int | None, words: str) -> str:
        if code is not None and code < 0:
            return f"is out of reach: its ssh on this machine was killed by signal {-code}{quoted(words)}"
        if code in (255, None) and any(sign in words.lower() for sign in _CONNECTION_SIGNS):
            return f"is out of reach: its ssh connection has ended{quoted(words)}"
        if code == 255:  # ssh's status too for a process that a signal has ended, of which it says nothing
            return f"has lost its host process, which was killed by a signal{quoted(words)}"
        return describe_host_end(code, words)


# What is in ssh's words if its connection has ended.
_CONNECTION_SIGNS = ("connection", "disconnect", "not responding")

# What is in ssh's or Python's words, what that means, and what to do: the first that fits.
_BEFORE_FAILED = "the line that is to run before Python has failed"
_EXPLANATIONS = (
    (_BEFORE_FAILED,
     "did not start Python",
     "see before = in meshbook.toml, or ?before= in the address; bash runs it, with -l"),
    ("No module named",
     "has no Meshbook, or not what it needs, for {python}",
     "install it there: {ssh} {python} -m pip install meshbook=={version}; or name another interpreter: "
     "ssh://…?python=/path/to/python"),
    ("Permission denied",
     "refused to let you log in",
     "see that `{ssh} true` works without a password: ssh-copy-id, or ssh-add for a key with a passphrase"),
    ("Host key verification failed",
     "is not known to this machine, or its key has changed",
     "log in once by hand and look at its key: {ssh}"),
    ("Could not resolve hostname",
     "is no name that is known here",
     "look for a typing error, or add it to ~/.ssh/config"),
    ("Connection refused",
     "refused the connection",
     "is sshd running there, and on this port? Try {ssh}"),
    ("administratively prohibited",
     "does not let ssh forward sockets",
     "its sshd must allow it: AllowStreamLocalForwarding yes"),
    ("timed out", "does not answer", "is it on, and reachable from here? Try {ssh}"),
    ("No route to host", "cannot be reached", "is it on, and in a network that this machine reaches? Try {ssh}"),
)  # fmt: skip


def _explain(code: int, words: str, by_hand: str, python: str | None) -> str:
    names = {"ssh": by_hand, "python": python or "python3", "version": __version__}
    for sign, what, advice in _EXPLANATIONS:
        if sign in words:
            return f"{what.format(**names)}{quoted(words)}; {advice.format(**names)}"
    if code == 127:
        return (
            f"has no interpreter {names['python']}{quoted(words)}; name one of that machine: "
            "ssh://…?python=/path/to/python"
        )
    if code == 255:
        return f"cannot be reached{quoted(words)}; try {by_hand}"
    return f"could not start a host: {names['python']} exited with status {code}{quoted(words)}"


def _cipher_options(machine: Machine) -> list[str]:
    """Return options that put AES-GCM first where ssh's own order of ciphers holds. Blocks for some milliseconds.

    The processor has instructions for it, unlike for ssh's own first, ChaCha20. Measured on a quiet bed: values come at
    690 MB/s instead of 275. Whoever names ciphers for this machine, in ~/.ssh/config or for all users, keeps them.
    """
    own, here = _ciphers(["-F", "none"], machine), _ciphers([], machine)
    return [f"-oCiphers=^{_QUICK_CIPHER}"] if own == here and _QUICK_CIPHER in own else []


def _ciphers(options: list[str], machine: Machine) -> list[str]:
    """Return the ciphers that ssh would offer a machine, the most wanted first; none if it does not say."""
    words = ["ssh", *options, "-G", "--", machine.destination]
    try:
        done = run_command(words, timeout_s=5)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split() for line in done.stdout.splitlines()]
    return next((words[1].split(",") for words in lines if len(words) == 2 and words[0] == "ciphers"), [])


def _remote_command(python: str | None, module: list[str], before: str) -> str:
    """Return the command line for the machine's login shell, whichever that is: ssh joins its words with spaces.

    It first writes an empty line: by that one sees that ssh has connected.

    Args:
        before: a line for a bash that has read /etc/profile, where `module` is defined; "": none is needed.
    """
    path = f"PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} " if os.environ.get("PYTHONPATH") else ""
    run = f"exec env {path}%s -P {shlex.join(module)}"
    if python is not None:
        script = run % shlex.quote(python)
    else:
        here = shlex.quote(sys.executable)
        script = f"if [ -x {here} ]; then {run % here}; else {run % 'python3'}; fi"
    if not before:
        return f"exec sh -c {shlex.quote(f'echo; {script}')}"
    script = f"echo\n{before}\n[ $? = 0 ] || {{ echo {shlex.quote(_BEFORE_FAILED)} >&2; exit 1; }}\n{script}"
    return f"exec bash -lc {shlex.quote(script)}"
