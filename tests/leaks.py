"""What a test run must not leave on the machine: processes, sockets and folders, shared-memory files.

`Run` gives a run a name and folders of its own and remembers how the machine looked before; `leftovers` says, in
sentences, what is there now that was not. Every process that a run starts inherits its name in `MESHBOOK_TEST_RUN`,
however far it has daemonised, so nothing is missed for having left the process tree, and the processes of another run
on the same machine are never taken for ours. Knows nothing of pytest and nothing of Meshbook.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

MARKER = "MESHBOOK_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")

# Seconds that what was told to end may take to end. A supervisor without ranks outlives a killed kernel by 10 s, others
# give their ranks 1 s; abandoned jobs and spares have up to 20 s; a loaded machine doubles that.
GRACE_S = 60.0

# Shared memory of torch names the process that made it. One that was killed cannot remove it.
_OF_TORCH = re.compile(r"torch_(\d+)_")


class Run:
    """One test run: its marker, its folders, and how the machine looked before.

    Attributes:
        runtime_dir: where meshes keep their sockets and connection files; mode 0700, and to be empty at the end. Its
            path is short, because a unix socket's path has 107 bytes at most and tests open some a few folders down.
        parts: further such folders inside it, each for what a part of the run names.
        reported: what is left, and was reported already.
        lasting: processes that are meant to go on after a file of tests.
        home: where programs may keep what they like: settings, histories.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(6)
        self._root = Path(tempfile.mkdtemp(prefix="mb", dir="/tmp"))
        self.runtime_dir = self._root / "run"
        self.home = self._root / "home"
        for folder in (self.runtime_dir, self.home):
            folder.mkdir(mode=0o700)
        self.parts: dict[str, Path] = {}
        self.reported: set[str] = set()
        self.lasting: set[int] = set()
        self._shared_before = _shared_memory()

    @property
    def environment(self) -> dict[str, str]:
        """What every process of this run must inherit."""
        return {MARKER: self.id, "MESHBOOK_RUNTIME_DIR": str(self.runtime_dir)}

    def runtime_dir_of(self, part: str) -> Path:
        """A runtime folder for a part of the run, such as a file of tests: it does not see what others have left."""
        if part not in self.parts:
            self.parts[part] = self.runtime_dir / str(len(self.parts))
            self.parts[part].mkdir(mode=0o700)
        return self.parts[part]

    def processes(self) -> dict[int, str]:
        """Live processes of this run, by pid, each with its command line; not the asking process and its parents."""
        apart = set(ancestry(os.getpid()))
        return {pid: _command(pid) for pid in _pids() if pid not in apart and self._owns(pid)}

    def leftovers(self) -> list[str]:
        """One sentence for each thing that is there and should not be; empty for a clean house."""
        return [
            *(f"process {pid} still runs: {cmd}" for pid, cmd in self.processes().items() if pid not in self.lasting),
            *(f"{path} is still in the runtime folder{self._whose(path)}" for path in self._left_there()),
            *(f"{path} is new" for path in sorted(self._new_shared_memory())),
        ]

    def _left_there(self) -> list[Path]:
        """In the runtime folder; Meshbook's own part of it, `meshbook`, stays when its meshes go, and so does a key."""
        own = {*self.parts.values()}
        for folder in (self.runtime_dir, *self.parts.values()):
            own |= {folder / "meshbook", folder / "meshbook" / ".bundle-key"}
        return sorted(set(self.runtime_dir.rglob("*")) - own)

    def _whose(self, path: Path) -> str:
        return "".join(f" of {part}" for part, folder in self.parts.items() if path.is_relative_to(folder))

    def wait_until_clean(self, grace_s: float = GRACE_S, before: Collection[str] = ()) -> list[str]:
        """`leftovers` once there are none, or those that are there after `grace_s` seconds. Blocks until then.

        Args:
            before: leave out these, which were there before.
        """
        deadline = time.monotonic() + grace_s
        while (left := [each for each in self.leftovers() if each not in before]) and time.monotonic() < deadline:
            time.sleep(0.05)  # other people's processes cannot be waited for, only looked at again
        return left

    def end_processes(self, apart_from: Collection[int]) -> None:
        """End this run's processes, but for these."""
        for pid in self.processes():
            if pid not in apart_from and pid not in self.lasting:
                self._kill(pid)

    def clean(self) -> None:
        """End this run's processes and remove its folders: a leak is reported once and does not spoil the next run.

        Files in /dev/shm stay: whose they are is a guess, good enough to report and not to remove.
        """
        for pid in self.processes():
            self._kill(pid)
        shutil.rmtree(self._root, ignore_errors=True)

    def _owns(self, pid: int) -> bool:
        """Whether this run started the process: it has our marker, or the asking process forked it and it has none.

        Not Python's resource tracker, which lives and ends with the process that it was started for.
        """
        environment = _read(Path(f"/proc/{pid}/environ")).split(b"\0")
        markers = [entry for entry in environment if entry.startswith(f"{MARKER}=".encode())]
        if _parent(pid) == os.getpid() and (not markers or "multiprocessing.resource_tracker" in _command(pid)):
            return not markers and bool(_command(pid))  # a zombie has no command line
        return markers == [f"{MARKER}={self.id}".encode()]

    def _kill(self, pid: int) -> None:
        """SIGKILL for `pid`, if it is ours still: its number may have gone to a stranger since."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self._owns(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    def _new_shared_memory(self) -> set[Path]:
        """Files in /dev/shm that this run may have left: new, and not in use by any process outside it.

        On a machine that is not ours alone, other programs make files there too; those of a live program are its own.
        """
        new = {path for path in _shared_memory() - self._shared_before if not _removed_for_its_dead_owner(path)}
        left = new - _in_use(new, apart_from={os.getpid(), *self.processes()}) if new else new
        return {path for path in left if path.exists()}  # what another program had for a moment is gone by now


def _removed_for_its_dead_owner(path: Path) -> bool:
    owner = _OF_TORCH.match(path.name)
    if owner is None or Path(f"/proc/{owner[1]}").exists():
        return False
    path.unlink(missing_ok=True)
    return True


def _shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def _in_use(paths: set[Path], *, apart_from: set[int]) -> set[Path]:
    """Those of `paths` that another process holds open or has mapped."""
    names = {str(path).encode(): path for path in paths}
    used: set[Path] = set()
    for pid in _pids():
        if pid in apart_from:
            continue
        maps = _read(Path(f"/proc/{pid}/maps"))
        used |= {path for name, path in names.items() if name in maps}
        used |= {Path(target) for target in _open_files(pid) if Path(target) in paths}
    return used


def _open_files(pid: int) -> Iterator[str]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has ended, or it is another user's
        return
    for descriptor in descriptors:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def ancestry(pid: int) -> Iterator[int]:
    """`pid`, its parent, and so on, without process 1."""
    while pid > 1:
        yield pid
        pid = _parent(pid)


def _parent(pid: int) -> int:
    """0: it has none, or it has ended."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    # The name in brackets may hold anything, brackets too.
    return int(stat.rpartition(b")")[2].split()[1]) if stat else 0


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def _read(path: Path) -> bytes:
    """The file's bytes; none when the process behind it has ended or belongs to another user."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
