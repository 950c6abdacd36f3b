"""Where a campaign runs: a test run's own folders, and small file systems of its own that it can really fill.

In a mount namespace of its own, which root may have, /dev/shm and the disk are small and nobody else's. Without one,
what would fill them limits the ranks' file sizes instead (`can_fill` says which).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.leaks import GRACE_S, SHARED_MEMORY, Run

_CLONE_NEWNS = 0x00020000
SHARED_MEMORY_MIB, DISK_MIB = 64, 64
_MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


class Surroundings:
    """Folders and limits of one campaign.

    Attributes:
        run: what must be clean again at the end.
        folder: of the cases' own files, on a disk with room.
        disk: a folder on the small disk, which the meshes' runtime folder is on too.
        can_fill: whether /dev/shm and the disk are ours alone, and small.
    """

    def __init__(self, run: Run, *, can_fill: bool) -> None:
        self.run, self.can_fill = run, can_fill
        self.folder = run.home / "cases"
        self.folder.mkdir()
        self.disk = run.runtime_dir / "disk"
        self.disk.mkdir()

    def close(self) -> None:
        shutil.rmtree(self.disk)

    def clear(self) -> None:
        """Remove what a work has written, and what torch leaves in a /dev/shm of our own.

        torch creates a file, makes room for it, and unlinks it last; when there is no room, or its process is killed
        between, the file stays, in one process without Meshbook too.
        """
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.can_fill:
            for path in SHARED_MEMORY.glob("torch_*"):
                path.unlink()

    @contextmanager
    def filled(self, folder: Path) -> Iterator[None]:
        """Within the block the file system of a folder has less than a page left."""
        path = folder / "filling"
        try:
            with path.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    block = b"x" * size
                    try:
                        while True:
                            file.write(block)
                    except OSError:
                        continue
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def small_file_systems(run: Run) -> Iterator[bool]:
    """Put small file systems of our own at /dev/shm and at the runtime folder, if we may. Before any thread starts.

    Gives whether they are there.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        yield False
        return
    mounts = [(str(SHARED_MEMORY), SHARED_MEMORY_MIB), (str(run.runtime_dir), DISK_MIB)]
    done = []
    try:
        _call("mount", "--make-rprivate", "/")
        for place, size in mounts:
            _call("mount", "-t", "tmpfs", "-o", f"size={size}m,mode=0700", "campaign", place)
            done.append(place)
        yield True
    except subprocess.CalledProcessError:
        if done:
            raise
        yield False
    finally:
        for place in done:
            _call("umount", "--lazy", place)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def memory_group(name: str, pid: int, mebibytes: int) -> Iterator[bool]:
    """Within the block the process may use so much more memory, and is ended by the system when it wants more.

    Gives whether it is so: it takes a memory cgroup (version 1) that we may write to.
    """
    group = _MEMORY_CGROUP / name
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        if group.is_dir():
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    """Remove a cgroup. What the process has started and what has survived is moved; what is ending takes a moment."""
    deadline = time.monotonic() + GRACE_S
    while True:
        for other in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                (_MEMORY_CGROUP / "cgroup.procs").write_text(other)
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
