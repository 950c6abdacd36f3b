"""The notebook's project folder: which files of it travel to other machines, and their digests.

They are those that git would take: tracked ones, and untracked ones that it does not ignore. Without a git repository,
all files whose path has no name that begins with a dot, and no __pycache__. Files that are named travel in any case.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshbook import clock
from meshbook.controller.config import current_folder
from meshbook.controller.tables import format_bytes
from meshbook.errors import SyncError, UsageError
from meshbook.wire.messages import ProjectFile, ProjectSpec
from meshbook.wire.project_files import DIGEST_BYTES, is_within, problem_of

# Code, configuration and small data; Ray's limit of a working_dir. What is larger belongs where machines can read it.
MAX_BYTES = 500 << 20
MAX_FILES = 20_000
_NUM_LARGEST = 3  # folders that an error names
_READ_BYTES = 1 << 20
# A file that was changed so shortly before it was read may be changed again without another time: file systems count
# in steps of up to 2 s (FAT), Linux's own in 4 ms.
_STEP_S = 2.0

_Listed = tuple[str, os.stat_result]  # a path in the project


def find_project(named: Sequence[str] = (), *, uv: bool = False) -> ProjectSpec:
    """Return the project of the current folder: the git repository that it is in, else the folder alone.

    Args:
        named: files and folders that travel although git ignores them, from the current folder on.
        uv: hosts run `uv sync --frozen` in the folder with uv.lock: the current one, or the next above it.

    Raises:
        UsageError: what is named is not in the project; or there is no uv.lock.
        SyncError: git fails.
    """
    folder = current_folder()
    root = _repository_of(folder) or folder
    inner = []
    for name in named:
        path = os.path.normpath(folder / os.path.expanduser(name))
        if not os.path.exists(path):
            raise UsageError(f"--sync {name}: there is no {path}")
        if not is_within(path, str(root)):
            raise UsageError(f"--sync {name}: {path} is not in the project, which is {root}; move it there, or link it")
        inner.append(os.path.relpath(path, root))
    lock = None
    if uv:
        above = [place for place in (folder, *folder.parents) if is_within(str(place), str(root))]
        lock = next((os.path.relpath(place, root) for place in above if (place / "uv.lock").is_file()), None)
        if lock is None:
            raise UsageError(f"--env uv needs a uv.lock in {folder} or above it, up to {root}; `uv lock` makes one")
    return ProjectSpec(str(root), tuple(inner), lock)


@dataclass
class _Seen:
    """A file as it was when it was read."""

    key: tuple[int, int, int, int]  # inode, bytes, time of change in ns, mode
    file: ProjectFile
    problem: str  # why it does not travel; "": it does
    is_fresh: bool  # it was changed shortly before, so what was read may be old


class ProjectFolder:
    """The files of a project. They are read once, and again when their time, size or inode has changed.

    Attributes:
        left_out: paths that do not travel, and why, as of the last look.
    """

    def __init__(self, spec: ProjectSpec) -> None:
        self.spec = spec
        self.left_out: dict[str, str] = {}
        self._seen: dict[str, _Seen] = {}

    def files(self) -> tuple[ProjectFile, ...]:
        """Return the files as they are now. Reads those that have changed.

        Raises:
            SyncError: they are too many or too large; git fails; or a file cannot be read.
        """
        root, found = self.spec.root, dict[str, os.stat_result]()
        for path, status in (*_list_files(root), *self._iter_named()):
            found[path] = status
            if len(found) > MAX_FILES:
                raise SyncError(
                    f"{root} has more than {MAX_FILES:,} files, and at most {MAX_FILES:,} travel; "
                    f"{_how_to_exclude(root)}"
                )
        check_size(root, {path: status.st_size for path, status in found.items()})
        self._seen = {path: self._look(path, status) for path, status in sorted(found.items())}
        self.left_out = {path: seen.problem for path, seen in self._seen.items() if seen.problem}
        return tuple(seen.file for seen in self._seen.values() if not seen.problem)

    def _look(self, path: str, status: os.stat_result) -> _Seen:
        key = status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
        seen = self._seen.get(path)
        if seen is not None and seen.key == key and not seen.is_fresh:
            return seen
        is_fresh = clock.wall() - status.st_mtime < _STEP_S
        place = f"{self.spec.root}/{path}"
        try:
            if stat.S_ISLNK(status.st_mode):
                file = ProjectFile(path, link=os.readlink(place))
            else:
                file = ProjectFile(path, status.st_size, _digest(place), bool(status.st_mode & 0o100))
        except OSError as error:
            raise SyncError(f"{place} cannot be read: {error.strerror}; change its mode, or leave it out") from error
        if seen is not None and seen.file == file:
            file = seen.file
        return _Seen(key, file, problem_of(file) or _problem_of_name(path), is_fresh)

    def _iter_named(self) -> Iterator[_Listed]:
        root = self.spec.root
        for name in self.spec.named:
            place = os.path.join(root, name)
            is_folder = os.path.isdir(place) and not os.path.islink(place)
            yield from _with_status(root, _walk(root, name, with_hidden=True) if is_folder else [name])


def check_size(root: str, sizes: Mapping[str, int]) -> None:
    """Raise SyncError, with the largest folders, if files are too large together.

    Args:
        sizes: bytes of each file, by path in the project.
    """
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    folders = ", ".join(f"{place} {format_bytes(nbytes)}" for place, nbytes in largest(sizes))
    raise SyncError(
        f"{root} has {format_bytes(total)} in {len(sizes):,} files, and at most {format_bytes(MAX_BYTES)} travel. "
        f"Largest: {folders}. {_how_to_exclude(root)}"
    )


def largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the folders and files that take most, the largest first; of nested ones the innermost that has most."""
    below: dict[str, dict[str, int]] = {}
    for path, nbytes in sizes.items():
        parts = path.split("/")
        for depth in range(len(parts)):
            inner = below.setdefault("/".join(parts[:depth]), {})
            place = "/".join(parts[: depth + 1])
            inner[place] = inner.get(place, 0) + nbytes
    found = []
    for place, nbytes in sorted(below.get("", {}).items(), key=lambda item: -item[1])[:_NUM_LARGEST]:
        while below.get(place):
            inner_place, inner_bytes = max(below[place].items(), key=lambda item: item[1])
            if inner_place not in below or inner_bytes * 2 < nbytes:
                break
            place, nbytes = inner_place, inner_bytes
        found.append((place, nbytes))
    return found


def _how_to_exclude(root: str) -> str:
    init = "" if (Path(root) / ".git").exists() else f"`git init {root}`, then "
    return (
        f"Leave folders out: {init}a line such as `data/` in {root}/.gitignore. Name what is needed of them all the "
        "same (--sync data/vocab.json); have machines read large data from a file system that they share"
    )


def _problem_of_name(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    return ""


def _digest(path: str) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            found.update(data)
    return found.digest()


# ---------------------------------------------------------------------------------------------------------------------
# What git would take


def _repository_of(folder: Path) -> Path | None:
    try:
        return Path(_git(str(folder), "rev-parse", "--show-toplevel").removesuffix("\n"))
    except FileNotFoundError:  # no git here
        return None
    except SyncError as error:
        if "not a git repository" in str(error):
            return None
        raise


def _list_files(root: str) -> Iterator[_Listed]:
    if not os.path.exists(os.path.join(root, ".git")):
        yield from _with_status(root, _walk(root, "", with_hidden=False))
        return
    try:
        listed = _git(root, "ls-files", "-co", "--exclude-standard", "-z")
    except FileNotFoundError:
        raise SyncError(f"git is needed to list the files of {root}, and is not in PATH") from None
    yield from _with_status(root, dict.fromkeys(listed.split("\0")))


def _with_status(root: str, paths: Iterable[str]) -> Iterator[_Listed]:
    """Yield those paths that are files or links, and for a repository within (a submodule) its files."""
    for path in paths:
        try:
            status = os.lstat(f"{root}/{path}")
        except OSError:  # git knows it still, or it is gone since
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            yield path, status
        elif path and os.path.exists(f"{root}/{path}/.git"):
            inner = path.rstrip("/")
            yield from ((f"{inner}/{other}", found) for other, found in _list_files(f"{root}/{inner}"))


def _walk(root: str, folder: str, *, with_hidden: bool) -> Iterator[str]:
    """Yield the files below a folder of the project. Links to folders are not followed."""
    for place, inner, names in os.walk(os.path.join(root, folder)):
        inner[:] = [name for name in inner if name not in ("__pycache__", ".git") and (with_hidden or name[0] != ".")]
        links = [name for name in inner if os.path.islink(os.path.join(place, name))]
        for name in (*links, *names):
            if with_hidden or name[0] != ".":
                yield os.path.relpath(os.path.join(place, name), root)


def _git(folder: str, *words: str) -> str:
    """Run git in a folder; return what it printed. Raises FileNotFoundError, SyncError."""
    done = subprocess.run(
        ["git", "-C", folder, *words], stdin=subprocess.DEVNULL, capture_output=True, check=False,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        words_of_git = done.stderr.decode(errors="replace").strip()
        raise SyncError(f"git {words[0]} failed in {folder}: {words_of_git}")
    return os.fsdecode(done.stdout)
