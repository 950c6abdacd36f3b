"""Several machines on one: each has its own network, hostname, processes, IPC, /tmp, /run, /dev/shm and an sshd.

`start_slurm` starts a Slurm on them: n1 has the controller, and all are nodes.

Machines are joined by a bridge in a network namespace of its own, so no interface, route, mount or hostname of the real
machine is touched. The test's own process stays where it is; the ssh that it runs (`Bed.ssh`, a wrapper to be first on
PATH) is in the network of one more machine, "here". All else of the file system is shared, as a cluster's NFS is.

Ends with the process that made it, however that ends: every process of the bed has a parent-death signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.budget import WAIT_S

NETWORK = "10.77.0"
ROOT = Path(__file__).resolve().parent.parent.parent
_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "ssh", "ssh-keygen", "/usr/sbin/sshd")

_SLURM_TOOLS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_SLURM_DAEMONS = ("slurmctld", "slurmscriptd", "slurmd -N", "munged --force")  # as their command lines begin or go on


@functools.cache
def why_no_bed() -> str | None:
    """Why a bed cannot be made here; None: it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found: apt-get install openssh-server iproute2"
    if os.getuid() != 0:
        return "machines are made of namespaces, which takes root"
    probe = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"], check=False)
    if probe.returncode:
        return "this machine does not let root make namespaces"
    return None


@functools.cache
def why_no_slurm() -> str | None:
    """Why machines cannot have a Slurm here; None: they can."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if _find(tool) is None]
    return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge" if missing else None


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/usr/bin")


class Bed:
    """Machines `n1`, `n2` … that this process reaches by ssh.

    Attributes:
        folder: is on all machines, at the same path.
        ssh: the folder with an `ssh` that is in the bed's network.
    """

    def __init__(self, num_machines: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mbed", dir="/tmp"))
        self.ssh = self.folder / "bin"
        self.names = tuple(f"n{number}" for number in range(1, num_machines + 1))
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}  # of each machine's process 1, as seen from here
        self._silent: set[str] = set()
        self._has_slurm = False
        self.daemons = ["/sshd -D", *_SLURM_DAEMONS]  # what is in the command lines of machines' own processes
        self._make_keys()
        try:
            self._switch = self._start_network("switch")
            self._in_switch("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            self._in_switch("ip", "link", "set", "br0", "up")
            self._here = self._start_network("here")
            self._plug("here", self._here.pid, 200)
            self._write_ssh()
            for name in self.names:
                self.power_on(name)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> tuple[str, ...]:
        """The machines that are on."""
        return tuple(self._pids)

    def pid(self, name: str) -> int:
        """Process 1 of a machine, as seen from here; of "here" a process in its network."""
        return self._here.pid if name == "here" else self._pids[name]

    # ---- what befalls machines

    def power_on(self, name: str) -> None:
        """Start a machine: new processes, boot id and /tmp, the same address and keys."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        read, write = os.pipe()
        (home / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (home / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{other[1:]} {other}\n" for other in self.names)
        )
        shutil.rmtree(home / "tmp", ignore_errors=True)
        (home / "tmp").mkdir()
        if not (home / "host_key").exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / "host_key")
            with open(self.folder / "keys" / "known_hosts", "a") as known:
                known.write(f"{name},{NETWORK}.{name[1:]} {(home / 'host_key.pub').read_text()}")
        with open(home / "console", "ab") as console:  # with a marker of its own, it is not what a test left (leaks.py)
            machine = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork",
                 "--kill-child=SIGKILL", sys.executable, __file__, str(self.folder), name, str(write)],
                pass_fds=(write,), stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "MESHBOOK_TEST_RUN": name},
            )  # fmt: skip
        os.close(write)
        with open(read, "rb") as ready:
            if ready.read(1) != b"1":
                machine.kill()
                machine.wait()
                raise RuntimeError(f"machine {name} did not come up:\n{(home / 'console').read_text()}")
        self._machines[name] = machine
        self._pids[name] = int(Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()[0])
        self._plug(name, self._pids[name], int(name[1:]))
        if self._has_slurm:
            self._start_slurm_on(name)

    def power_off(self, name: str) -> None:
        """A power cut: nobody is told, neither by FIN nor by RST."""
        self._in_switch("ip", "link", "set", name, "down")
        self.end_processes(name)

    def end_processes(self, name: str) -> None:
        """All processes of a machine end at once; others hear of it from the system."""
        self.thaw(name)
        os.kill(self._pids.pop(name), signal.SIGKILL)
        self._machines.pop(name).wait(WAIT_S)

    def end_ssh_sessions(self, name: str) -> None:
        """The sshd processes of all connections end; the one that listens goes on."""
        for pid in list(self._all_pids(name)):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command.startswith(b"sshd:") and b"listener" not in command:
                    os.kill(pid, signal.SIGKILL)

    def cut(self, name: str) -> None:
        """The switch drops all that goes to a machine or comes from it."""
        self._silent.add(name)
        self._in_switch("ip", "link", "set", name, "nomaster")

    def drop(self, name: str) -> None:
        """As `cut`, and nothing says that there is no such machine: what "here" sends to it just vanishes."""
        self.cut(name)
        address, mac = f"{NETWORK}.{name[1:]}", f"02:00:0a:4d:00:{int(name[1:]):02x}"
        neighbour = ("ip", "neigh", "replace", address, "lladdr", mac, "nud", "permanent", "dev", "eth0")
        _run("nsenter", "-t", str(self._here.pid), "-n", *neighbour)

    def restore(self, name: str) -> None:
        self._silent.discard(name)
        self._in_switch("ip", "link", "set", name, "master", "br0")

    def freeze(self, name: str) -> None:
        """Stop all processes of a machine; its system goes on answering, as a hung machine's does."""
        for _ in range(3):  # again for what was forked meanwhile
            self._signal_all(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal_all(name, signal.SIGCONT)

    # ---- Slurm

    def start_slurm(self) -> None:
        """Start a Slurm, and put its commands, which run on n1, beside `ssh`. It knows of no earlier one."""
        config = self.folder / "slurm"
        config.mkdir()
        (config / "slurm.conf").write_text(_SLURM_CONF.format(nodes=",".join(self.names)))
        (config / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = config / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        shutil.chown(key, "munge", "munge")
        self._has_slurm = True
        for name in self.names:
            self._start_slurm_on(name)
        for tool in _SLURM_TOOLS:
            wrapper = self.ssh / tool
            wrapper.write_text(
                "#!/bin/sh\nexport PATH=/usr/bin:/bin MESHBOOK_TEST_RUN=n1 MESHBOOK_RUNTIME_DIR=/run/mb\n"
                f"exec nsenter -t {self.pid('n1')} "
                f'-m -u -i -n -p -- setpriv --pdeathsig KILL {_find(tool)} "$@"\n'
            )
            wrapper.chmod(0o755)

    def stop_slurm(self) -> None:
        self._has_slurm = False
        for name in self.running:
            for pid, command in list(self.commands(name).items()):
                if any(daemon in command for daemon in _SLURM_DAEMONS):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.run(name, "sh", "-c", "umount /etc/slurm; rm -rf /run/slurm /run/munge")
        for tool in _SLURM_TOOLS:
            (self.ssh / tool).unlink()
        shutil.rmtree(self.folder / "slurm")

    def _start_slurm_on(self, name: str) -> None:
        config = self.folder / "slurm"
        daemons = "slurmctld; slurmd -N n1" if name == "n1" else f"slurmd -N {name}"
        self.run(
            name,
            "sh",
            "-ec",
            "export PATH=$PATH:/usr/sbin; mkdir -p /etc/slurm /run/munge /run/slurm/state; "
            f"chown munge:munge /run/munge; mount --bind {config} /etc/slurm; cp -p {config}/munge.key /run/munge/key; "
            "runuser -u munge -- munged --force --key-file=/run/munge/key --seed-file=/run/munge/seed "
            f"--log-file=/run/munge/log; {daemons}",
        )

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What this thread starts meanwhile is in the network of "here", which the machines reach."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(fd: int) -> None:
            if libc.setns(fd, 0x40000000):  # CLONE_NEWNET; os.setns is of Python 3.12
                raise OSError(ctypes.get_errno(), "setns")

        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._here.pid}/ns/net") as bed:
            enter(bed.fileno())
            try:
                yield
            finally:
                enter(own.fileno())

    # ---- what is on machines

    def processes(self, name: str) -> dict[int, str]:
        """Command lines of a machine's processes by their pid here, but for the machine's own and its daemons."""
        return {
            pid: command
            for pid, command in self.commands(name).items()
            if not any(daemon in command for daemon in self.daemons)
        }

    def commands(self, name: str) -> dict[int, str]:
        found = {}
        for pid in self._all_pids(name):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if command and not command.startswith("sshd:") and pid != self._pids[name]:
                    found[pid] = command
        return found

    def files(self, name: str) -> list[str]:
        """What programs have left in a machine's /run, /tmp and /dev/shm."""
        root = Path(f"/proc/{self._pids[name]}/root")
        places = [root / "run/meshbook", root / "dev/shm", root / "run/mb"]
        found = [path for place in places if place.exists() for path in place.rglob("*")]
        found += [path for path in (root / "tmp").glob("meshbook*") if path.exists()]
        return sorted("/" + str(path.relative_to(root)) for path in found if path.name != "meshbook")

    def wait_until_clean(self, grace_s: float) -> list[str]:
        """What is left on machines once there is nothing, or after `grace_s` seconds. Blocks until then."""
        deadline = time.monotonic() + grace_s
        while left := [
            f"{name}: {what}" for name in self.running for what in (*self.processes(name).values(), *self.files(name))
        ]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # other machines' processes cannot be waited for
        return left

    def run(self, name: str, *command: str, timeout_s: float = 30) -> str:
        """Run a command on a machine, as on its console."""
        inside = ["nsenter", "-t", str(self._pids[name]), "-m", "-u", "-i", "-n", "-p", "--", "timeout", str(timeout_s)]
        done = subprocess.run([*inside, *command], capture_output=True, text=True, check=True, timeout=timeout_s + 10)
        return done.stdout

    def close(self) -> None:
        for name in list(self._machines):
            self.end_processes(name)
        for network in ("_switch", "_here"):
            if (process := getattr(self, network, None)) is not None:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- making it

    def _make_keys(self) -> None:
        keys = self.folder / "keys"
        keys.mkdir(mode=0o700)
        for name in ("id_ed25519", "other"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name)
        shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")

    def _write_ssh(self) -> None:
        self.ssh.mkdir()
        config = self.folder / "ssh_config"
        keys = self.folder / "keys"
        config.write_text(
            "".join(f"Host {name}\n  HostName {NETWORK}.{name[1:]}\n" for name in self.names)
            + f"Host refusing\n  HostName {NETWORK}.1\n  Port 2222\n"
            + f"Host locked\n  HostName {NETWORK}.1\n  IdentityFile {keys}/other\n"
            + f"Host gone\n  HostName {NETWORK}.99\n"
            + f"Host again\n  HostName {NETWORK}.1\n"
            + f"Host * !locked\n  IdentityFile {keys}/id_ed25519\n"
            + f"Host *\n  UserKnownHostsFile {keys}/known_hosts\n"
            + "  IdentitiesOnly yes\n  IdentityAgent none\n  StrictHostKeyChecking accept-new\n"
        )
        wrapper = self.ssh / "ssh"
        wrapper.write_text(
            f'#!/bin/sh\nexec nsenter --net=/proc/{self._here.pid}/ns/net /usr/bin/ssh -F {config} "$@"\n'
        )
        wrapper.chmod(0o755)

    def _start_network(self, name: str) -> subprocess.Popen[bytes]:
        """Start a process that holds a network of its own."""
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "sh",
            "-c",
            "ip link set lo up; echo; exec sleep infinity",
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        with process.stdout as ready:
            ready.readline()
        return process

    def _plug(self, name: str, pid: int, number: int) -> None:
        """Connect a machine's eth0 to the switch. One that comes back keeps its MAC address, so it is found at once."""
        self._in_switch("ip", "link", "del", name, check=False)
        mac = f"02:00:0a:4d:00:{number:02x}"
        self._in_switch(
            "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid)
        )
        self._in_switch("ip", "link", "set", name, "master", "br0", "up")
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        _run(*inside, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")

    def _in_switch(self, *command: str, check: bool = True) -> None:
        _run("nsenter", "-t", str(self._switch.pid), "-n", *command, check=check)

    def _all_pids(self, name: str) -> Iterator[int]:
        space = os.readlink(f"/proc/{self._pids[name]}/ns/pid")
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == space:
                    yield int(entry)

    def _signal_all(self, name: str, number: int) -> None:
        for pid in list(self._all_pids(name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


# Deaths of nodes are seen in 10 s (sites have 300), and 8 CPUs are claimed whatever this machine has.
_SLURM_CONF = """\
ClusterName=bed
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MpiDefault=none
MessageTimeout=5
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=8 RealMemory=1000
PartitionName=main Nodes={nodes} Default=YES MaxTime=60 State=UP
PartitionName=small Nodes={nodes} MaxTime=60 MaxNodes=1 State=UP
"""


def _run(*command: object, check: bool = True) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr}")


def _be_machine(folder: Path, name: str, ready_fd: int) -> None:
    """Process 1 of a machine: mounts, hostname, sshd; then it reaps what others leave behind."""
    home = folder / name
    fresh = home / "tmp"  # laid over /tmp once what is to be seen in it is there
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmp", fresh)
    shown = [folder, *([ROOT] if ROOT.is_relative_to("/tmp") else [])]
    for kept in shown:
        inside = fresh / kept.relative_to("/tmp")
        inside.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", kept, inside)
    _run("mount", "--rbind", fresh, "/tmp")
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    _run("mount", "-t", "tmpfs", "-o", "mode=1777,size=2g", "shm", "/dev/shm")
    for file, target in ((home / "hosts", "/etc/hosts"), (home / "boot_id", "/proc/sys/kernel/random/boot_id")):
        _run("mount", "--bind", file, target)
    _run("hostname", name)
    _run("ip", "link", "set", "lo", "up")
    Path("/run/sshd").mkdir(mode=0o755)
    (home / "sshd_config").write_text(
        f"Port 22\nHostKey {home}/host_key\nPermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\n"
        f"StrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
        f"AuthorizedKeysFile {folder}/keys/authorized_keys\nSetEnv MESHBOOK_RUNTIME_DIR=/run/mb OMP_NUM_THREADS=1\n"
    )
    subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(home / "sshd_config")])
    os.write(ready_fd, b"1")
    os.close(ready_fd)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


if __name__ == "__main__":
    _be_machine(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
