"""This machine's copy of the notebook's project folder: the files of the last sync, and what ranks have written there.

The host asks for what it lacks (`FetchFiles`), a few requests at a time, and writes it beside the copy. When all has
come, the copy is changed, file by file, by renames. A file that changed while it was read comes again, so each file has
the contents of one moment. Only files that a sync has brought are ever replaced or removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from meshbook.errors import MeshbookError, SyncError
from meshbook.host.uv_environment import UvEnvironment
from meshbook.ids import CallId
from meshbook.wire import folders, messages, project_files
from meshbook.wire.loop import Loop
from meshbook.wire.messages import FilePart, MeshSpec, PartRead, ProjectFile
from meshbook.wire.project_files import DIGEST_BYTES

log = logging.getLogger("meshbook.host")

# Requests that were sent and are not answered, each for 1 MiB: as for values between machines (`wire/transfers`).
_MAX_REQUESTED = 8
# How often a file that changes while it is read comes again.
_MAX_ROUNDS = 5


@dataclass
class _Arriving:
    """A file on its way.

    Attributes:
        draft: where its contents are until the copy is changed.
        nbytes: of all of it, as far as is known.
    """

    file: ProjectFile
    draft: Path
    nbytes: int
    num_read: int = 0
    mtime_ns: int | None = None
    is_gone: bool = False
    is_changed: bool = False
    hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))

    def begin_again(self, nbytes: int) -> _Arriving:
        self.draft.unlink(missing_ok=True)
        return _Arriving(self.file, self.draft, nbytes)

    def add(self, part: FilePart, read: PartRead) -> None:
        """Take the next part. Raises OSError: it cannot be written."""
        if read.file_bytes < 0:
            self.is_gone = True
        elif read.file_bytes != self.nbytes or read.mtime_ns != (self.mtime_ns or read.mtime_ns) or not read.mtime_ns:
            self.is_changed, self.nbytes = True, read.file_bytes
        elif part.offset != self.num_read or len(read.data) != part.nbytes:
            self.is_changed = True
        if self.is_gone or self.is_changed:
            return
        self.mtime_ns = read.mtime_ns
        self.hash.update(read.data)
        self.num_read += len(read.data)
        with open(self.draft, "ab") as file:
            file.write(read.data)

    def arrived(self) -> ProjectFile:
        """Return what has come, which may be newer than what was wanted."""
        return msgspec.structs.replace(self.file, nbytes=self.num_read, digest=self.hash.digest())


class ProjectCopy:
    """The copy. It takes one sync after the other.

    Args:
        folder: the host's own, "…/MESH.h0".
        report: sends a report to the supervisor.
    """

    def __init__(self, loop: Loop, folder: Path, report: Callable[[messages.HostReport], None]) -> None:
        self._loop, self._folder, self._report, self._pid = loop, folder, report, os.getpid()
        self._place: Path | None = None  # the folder with the copy; None: there is none yet
        self._root = ""  # on the supervisor's machine
        self._have: dict[str, ProjectFile] = {}
        self._uv = UvEnvironment(loop, self._end)
        self._waiting: deque[messages.SyncFiles] = deque()  # the first is under way
        self._arriving: dict[str, _Arriving] = {}
        self._unrequested: Iterator[tuple[FilePart, ...]] = iter(())
        self._requested: dict[int, tuple[FilePart, ...]] = {}
        self._num_requests = self._num_rounds = 0
        self._done = messages.FilesSynced(call=CallId(""))

    @property
    def path(self) -> Path:
        """The copy's folder, which has the name of the project's."""
        assert self._place is not None
        return self._place / (os.path.basename(self._root) or "project")

    def handle(self, command: messages.SyncFiles | messages.FileParts) -> None:
        """Begin a sync, or take parts of files. When it is over `FilesSynced` is reported."""
        self._loop.diverge()  # files change
        self.take_over()  # the other process may have ended while it did this
        try:
            if isinstance(command, messages.SyncFiles):
                self._waiting.append(command)
                if len(self._waiting) == 1:
                    self._begin(command)
            elif (parts := self._requested.pop(command.batch, None)) is not None:
                for part, read in zip(parts, command.parts, strict=True):
                    self._arriving[part.path].add(part, read)
                self._request()
        except (OSError, MeshbookError, ValueError) as error:
            self._end(_describe(error))

    def take_over(self) -> None:
        """Go on in a process that was forked from the host's, which has ended: end the sync that was under way.

        It may be half done, and so all files come again with the next.
        """
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        if self._waiting:
            self._uv.take_over()
            known = {**self._have, **{file.path: file for file in self._waiting[0].files}}
            self._have = {path: msgspec.structs.replace(file, nbytes=-1) for path, file in known.items()}
            self._end("its host agent was killed while files came; sync again")

    def localize(self, spec: MeshSpec) -> MeshSpec:
        """Return what ranks of this machine are started with: their folder and their modules are those of the copy."""
        if self._place is None or spec.project is None:
            return spec
        cwd = self._moved(spec.cwd) if spec.cwd is not None else self.path
        if cwd is not None:
            cwd.mkdir(parents=True, exist_ok=True)
        moved = {path: self._moved(path) for path in spec.sys_path}
        own = [str(place) for place in moved.values() if place is not None and place.is_dir()]
        others = [path for path, place in moved.items() if place is None or not place.is_dir()]
        return msgspec.structs.replace(
            spec, cwd=str(cwd) if cwd is not None else spec.cwd, sys_path=(*own, *self._uv.paths, *others)
        )

    def close(self) -> None:
        """Remove the copy."""
        self._uv.close()
        if self._place is not None and self._place.name != self._folder.name:
            folders.remove_folder(self._place)

    # ---- one sync

    def _begin(self, command: messages.SyncFiles) -> None:
        if problem := project_files.problem_among(command.files):
            raise SyncError(f"{problem}; nothing was changed")
        if self._place is None:
            self._place, self._root = Path(os.path.realpath(self._claim_place())), command.root
            self.path.mkdir()
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()
        coming, _ = project_files.difference(self._have, command.files)
        self._num_rounds = 0
        self._arriving = {
            file.path: _Arriving(file, self._incoming / str(number), file.nbytes)
            for number, file in enumerate(coming)
            if not file.link
        }
        self._begin_round(self._arriving)

    @property
    def _incoming(self) -> Path:
        assert self._place is not None
        return self._place / ".incoming"

    def _begin_round(self, files: dict[str, _Arriving]) -> None:
        self._num_rounds += 1
        self._unrequested = project_files.batches({path: file.nbytes for path, file in files.items()})
        self._request()

    def _request(self) -> None:
        while len(self._requested) < _MAX_REQUESTED and (parts := next(self._unrequested, None)) is not None:
            self._num_requests += 1
            self._requested[self._num_requests] = parts
            self._report(messages.FetchFiles(self._num_requests, parts))
        if self._requested:
            return
        changed = {path: file for path, file in self._arriving.items() if file.is_changed}
        if changed and self._num_rounds == _MAX_ROUNDS:
            raise SyncError(
                f"{min(changed)} changed each of the {_MAX_ROUNDS} times that it was read; stop what writes it, or "
                "leave it out by a line in .gitignore"
            )
        if changed:
            again = {path: file.begin_again(file.nbytes) for path, file in changed.items()}
            self._arriving.update(again)
            self._begin_round(again)
        else:
            self._install()

    def _install(self) -> None:
        """Change the copy: all has come."""
        command = self._waiting[0]
        coming, going = project_files.difference(self._have, command.files)
        leaving = {path for file in going for path in (file.path, *project_files.folders_above(file.path))}
        for file in coming:
            self._check_way(file.path, leaving)
        going += [file.file for file in self._arriving.values() if file.is_gone and file.file.path in self._have]
        for file in going:
            self._remove(file.path)
        num_files = num_bytes = 0
        for file in coming:
            target = self.path / file.path
            arriving = self._arriving.get(file.path)
            if arriving is not None and arriving.is_gone:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if arriving is None:
                draft = self._incoming / "link"
                draft.symlink_to(file.link)
            else:
                draft = arriving.draft
                draft.touch(mode=0o600)  # an empty file may have had no part
                draft.chmod(0o700 if file.is_executable else 0o600)
            draft.replace(target)
            _remove_bytecode(target)
            self._have[file.path] = file if arriving is None else arriving.arrived()
            num_files += 1
            num_bytes += self._have[file.path].nbytes
        self._done = messages.FilesSynced(command.call, num_files, num_bytes, len(going))
        if command.uv is not None and not self._uv.is_made:
            assert self._place is not None
            self._uv.begin(self.path / command.uv, self._place)
        else:
            self._end("")

    def _end(self, error: str) -> None:
        """Report the sync that was under way, and begin the next."""
        command = self._waiting.popleft()
        done = messages.FilesSynced(command.call, error=error) if error else self._done
        self._arriving.clear()
        self._requested.clear()
        self._unrequested = iter(())
        if self._place is not None:
            shutil.rmtree(self._incoming, ignore_errors=True)
        self._report(done)
        if self._waiting:
            following = self._waiting.popleft()
            self.handle(following)

    # ---- files of the copy

    def _claim_place(self) -> Path:
        """Return a folder for the copy: with one path on all machines, so that tracebacks of all ranks are equal.

        If another host of the mesh on this machine has that, this host's own.
        """
        try:
            place = folders.claim_folder(f"{self._folder.name.rpartition('.')[0]}.src")
        except MeshbookError as error:
            log.warning("the project's copy is in this host's own folder: %s", error)
            return self._folder
        folders.lock_folder(place)
        return place

    def _check_way(self, path: str, leaving: set[str]) -> None:
        """Raise SyncError: what ranks have made is where a file is to be, or leads out of the copy.

        Args:
            leaving: what may be there still, since it is removed before: files, and the folders above them.
        """
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            above = "/".join(parts[:end])
            place = self.path / above
            is_folder = place.is_dir() and not place.is_symlink()
            is_wanted = is_folder if end < len(parts) else not is_folder
            if os.path.lexists(place) and not is_wanted and above not in leaving and above not in self._have:
                raise SyncError(f"{place} is in the way of {path}: it was made there by a rank; remove or rename it")

    def _remove(self, path: str) -> None:
        target = self.path / path
        self._have.pop(path, None)
        if os.path.realpath(target.parent) != str(target.parent):
            return  # a rank has put a link there, and what it leads to is none of the project's
        target.unlink(missing_ok=True)
        _remove_bytecode(target)
        folder = target.parent
        with contextlib.suppress(OSError):  # other files are in it
            while folder != self.path:
                folder.rmdir()
                folder = folder.parent

    def _moved(self, path: str) -> Path | None:
        """Return the place in the copy of a path of the supervisor's machine; None: it is not of the project."""
        if not path or not project_files.is_within(path, self._root):  # "": the current folder, wherever that is
            return None
        return self.path / os.path.relpath(path, self._root)


def _remove_bytecode(source: Path) -> None:
    """Remove what Python has compiled: it compares seconds and sizes, and a file may change twice in a second."""
    if source.suffix == ".py":
        cache = source.parent / "__pycache__"
        for compiled in cache.glob(f"{source.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not there, or has others
            cache.rmdir()


def _describe(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    place = f" ({error.filename})" if error.filename else ""
    return f"its copy of the project cannot be written: {error.strerror or error}{place}"
