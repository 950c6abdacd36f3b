"""The runtime folder and each mesh's folder in it: their location, ownership and removal.

A mesh's folder holds its sockets, its log, its connection file and a marker that names the process that created it.
Only a folder with that marker is ever removed, and only when that process is known to have exited: a user may point
MESHBOOK_RUNTIME_DIR at a folder full of their own files. A folder is created and removed by an atomic rename, marker
included, so no process sees a partial one.

Location: systemd-logind removes $XDG_RUNTIME_DIR at the user's last logout, while a mesh must survive it, so the folder
is in the user's state folder. If the home is shared with other machines, or its path leaves no room for a socket's
name, it is in /tmp. TMPDIR is not used, because it differs between sessions of one user, and a mesh must be found from
each.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from meshbook.errors import MeshInUse, StartError, UsageError
from meshbook.wire import processes
from meshbook.wire.processes import ProcessIdentity

# Linux limits a socket's path to 108 bytes with its terminator; the longest name we add is "h1234-service.sock".
_MAX_SOCKET_PATH = 107
_LONGEST_SOCKET_NAME = "h1234-service.sock"
_MAX_SOCKET_FOLDER_BYTES = _MAX_SOCKET_PATH - len("/" + _LONGEST_SOCKET_NAME)
_MAX_NAME_CHARS = 48
_NAME_PATTERN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX_NAME_CHARS - 1}}}")

_MARKER_NAME = ".meshbook"  # in every folder that is ours; holds the identity of the process that owns it

# File systems that one machine uses alone. On others, sockets may not work, and meshes of other machines may appear.
_LOCAL_FILE_SYSTEMS = frozenset({
    "apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs",
})  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The runtime folder


def runtime_folder() -> Path:
    """Return the folder that holds all meshes of this user; create it if absent.

    `meshbook` in `MESHBOOK_RUNTIME_DIR`; else `meshbook` in `$XDG_STATE_HOME` or `~/.local/state`, if that is on a
    local disk and short enough; else `/tmp/meshbook-<uid>`.

    Raises:
        StartError: it belongs to another user, others may enter it, or it cannot be created.
    """
    if chosen := os.environ.get("MESHBOOK_RUNTIME_DIR"):
        folder = Path(chosen).absolute() / "meshbook"
    else:
        folder = _default_folder()
    try:
        _make_folder(folder)
    except OSError as error:
        raise StartError(
            f"the runtime folder {folder} cannot be made ({error.strerror}); "
            "set MESHBOOK_RUNTIME_DIR to a folder of yours"
        ) from error
    _check_ownership(folder)
    return folder


def _default_folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    folder = state / "meshbook"
    fits = len(os.fsencode(folder)) + 1 + _MAX_NAME_CHARS <= _MAX_SOCKET_FOLDER_BYTES
    if state.is_absolute() and fits and _is_local(folder):
        with contextlib.suppress(OSError):  # no home, or a read-only one
            _make_folder(folder)
            return folder
    return Path("/tmp") / f"meshbook-{os.getuid()}"


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@functools.cache
def _is_local(folder: Path) -> bool:
    """Whether only this machine uses the file system."""
    real = Path(os.path.realpath(folder))
    # The later mount hides the earlier.
    file_systems = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    mount_point = next((parent for parent in (real, *real.parents) if str(parent) in file_systems), None)
    return mount_point is not None and file_systems[str(mount_point)] in _LOCAL_FILE_SYSTEMS


def _check_ownership(folder: Path) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise StartError(f"{folder} is not a folder; remove it, or set MESHBOOK_RUNTIME_DIR to a folder of yours")
    if status.st_uid != os.getuid():
        raise StartError(
            f"the folder {folder} belongs to user {status.st_uid}, not to you ({os.getuid()}); "
            "set MESHBOOK_RUNTIME_DIR to a folder of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StartError(
            f"the folder {folder} is open to others (mode {stat.S_IMODE(status.st_mode):04o}, wanted 0700), and who "
            f"can read it may run code on your meshes; if it is Meshbook's alone, run chmod 700 {folder}, else set "
            "MESHBOOK_RUNTIME_DIR to another folder"
        )


# ---------------------------------------------------------------------------------------------------------------------
# A mesh's folder


def check_name(name: str) -> str:
    if not _NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a mesh: use 1 to {_MAX_NAME_CHARS} letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


def claim_folder(name: str) -> Path:
    """Create a folder for a mesh of this name, marked as this process's; remove what a dead mesh of that name left.

    Raises:
        MeshInUse: a mesh of that name is running.
        StartError: the folder cannot be created, is too deep for sockets, or holds files that are not Meshbook's.
    """
    folder = runtime_folder() / check_name(name)
    length = len(os.fsencode(folder))
    if length > _MAX_SOCKET_FOLDER_BYTES:
        raise StartError(
            f"the folder {folder} is {length} bytes long, and a socket in it may have at most "
            f"{_MAX_SOCKET_FOLDER_BYTES}: {length} + {_MAX_SOCKET_PATH - _MAX_SOCKET_FOLDER_BYTES} for "
            f"/{_LONGEST_SOCKET_NAME} is over the system's {_MAX_SOCKET_PATH}; "
            "set MESHBOOK_RUNTIME_DIR to a shorter one, or give the mesh a shorter name"
        )
    doomed = None
    try:
        with locked(folder.parent):
            if os.path.lexists(folder):
                if read_owner(folder) is None:
                    raise StartError(
                        f"{folder} is in the way: it is not a folder that Meshbook made, so it is left alone; "
                        "choose another name with --name, or move it"
                    )
                if not is_stale(folder):
                    raise MeshInUse(
                        f"a mesh named {name!r} is running; attach to it (%mesh attach {name}), stop it, or choose "
                        "another name with --name"
                    )
                doomed = _rename_aside(folder)
            draft = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
            try:
                write_marker(draft)
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except OSError as error:
        raise StartError(
            f"the folder {folder} cannot be made: {error.strerror}; "
            "free some space, or set MESHBOOK_RUNTIME_DIR to another disk"
        ) from error
    finally:
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)
    return folder


def write_marker(folder: Path) -> None:
    """Mark the folder as this process's.

    Raises:
        OSError: the marker cannot be written; the previous marker stays.
    """
    write_atomically(folder / _MARKER_NAME, msgspec.json.encode(processes.identify(os.getpid())))


def lock_folder(folder: Path) -> None:
    """Mark a folder as this process's, and lock it for as long as the process lives.

    The lock shows that the mesh is alive to those that cannot see its process, as in another container; and
    systemd-tmpfiles, which removes old files from /tmp, skips a locked folder.
    """
    write_marker(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def read_owner(folder: Path) -> ProcessIdentity | None:
    """Return the process that owns a folder; None if the folder is not ours."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return None
        return msgspec.json.decode((folder / _MARKER_NAME).read_bytes(), type=ProcessIdentity)
    except (OSError, msgspec.MsgspecError):
        return None


def is_stale(folder: Path) -> bool:
    """Whether this is a folder of ours whose process is known to have exited."""
    owner = read_owner(folder)
    if owner is None or processes.is_running(owner) or processes.is_on_other_host(owner):
        return False
    return not is_locked(folder)


def is_locked(folder: Path) -> bool:
    """Whether a process has, or may have, locked the folder: a standby, perhaps, of the one that it is marked as."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        _unlock(fd)
    return False


def remove_folder(folder: Path) -> None:
    """Remove a mesh's folder. A folder that is not ours is left alone."""
    with contextlib.suppress(OSError):
        with locked(folder.parent):
            doomed = _rename_aside(folder) if read_owner(folder) is not None else None
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)


def remove_if_stale(folder: Path) -> bool:
    """Remove the folder of a dead mesh; return whether there was one."""
    if not is_stale(folder):
        return False
    with contextlib.suppress(OSError):
        with locked(folder.parent):
            doomed = _rename_aside(folder) if is_stale(folder) else None
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)
            return True
    return False


def remove_stale_folders() -> list[str]:
    """Remove the folders of all dead meshes; return their names."""
    removed = [folder.name for folder in sorted(runtime_folder().iterdir()) if remove_if_stale(folder)]
    return [name for name in removed if not name.startswith(".")]


def write_atomically(target: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only.

    Raises:
        OSError: it cannot be written; the previous content stays.
    """
    draft = target.with_name(f"{target.name}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
        draft.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _rename_aside(folder: Path) -> Path:
    """Rename a folder that is about to be removed, so that no process finds it."""
    doomed = folder.with_name(f".old-{secrets.token_hex(4)}")
    folder.rename(doomed)
    return doomed


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other threads and processes that do the same with this folder waiting, for the time of the block."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(fd)


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
    os.close(fd)


def release_inherited_locks(folder: str | Path) -> None:
    """Release the locks on a folder that this process has inherited. Blocks; raises nothing.

    A process that ends while it has the lock leaves it to those that it has forked meanwhile: flock's locks last until
    nobody has the descriptor. No thread of this process may have the lock.
    """
    with contextlib.suppress(OSError):
        found = os.stat(folder)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(name)), found):
                    _unlock(int(name))
