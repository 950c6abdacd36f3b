"""The notebook's project folder on other machines: which files there are, and how a host gets those that it lacks."""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId
from meshbook.wire.messages.payloads import Message


class ProjectFile(Struct, frozen=True, gc=False, omit_defaults=True):
    """A file of the project, or a symbolic link in it."""

    path: str  # from the project's folder on, with "/"
    nbytes: int = 0
    digest: bytes = b""  # blake2b of the contents, 16 bytes; b"": a link
    is_executable: bool = False
    link: str = ""  # the place that a link leads to, from its own folder on; "": a file


class HostFiles(Struct, frozen=True, gc=False):
    """What a sync came to on one machine."""

    machine: str  # as the user calls it
    num_files: int = 0  # that went there
    num_bytes: int = 0  # of these
    num_removed: int = 0
    error: str = ""  # why the machine has what it had before; "": it has the files


# Commands


class SyncProject(Message):
    """To the supervisor: bring these files, and no others, to all hosts. The reply has `synced`."""

    call: CallId
    files: tuple[ProjectFile, ...]


class SyncFiles(Message):
    """To a host on another machine: get these files of the project, remove others that came before.

    It fetches what it lacks (`FetchFiles`), changes its copy when all has come, and reports `FilesSynced`.
    """

    call: CallId
    root: str  # the project's folder on the supervisor's machine
    files: tuple[ProjectFile, ...]
    uv: str | None = None  # the folder in it with uv.lock, for `uv sync --frozen` before ranks start; None: no uv


class FilePart(Struct, frozen=True, gc=False):
    """A part of a file."""

    path: str
    offset: int
    nbytes: int


class FetchFiles(Message):
    """To the supervisor: send these parts of files of the last `SyncFiles`. The reply is `FileParts`."""

    batch: int  # the host's number for it
    parts: tuple[FilePart, ...]


class PartRead(Struct, frozen=True, gc=False):
    """A part of a file as it is now."""

    data: bytes
    file_bytes: int  # of the whole file; -1: there is no such file
    mtime_ns: int  # parts with different ones are of different contents; 0: it changed while this part was read


class FileParts(Message):
    """To a host: the parts that it asked for, in that order."""

    batch: int
    parts: tuple[PartRead, ...]


# Reports


class FilesSynced(Message):
    """A host has the files of a `SyncFiles`, or has what it had before."""

    call: CallId
    num_files: int = 0  # that came
    num_bytes: int = 0  # of these
    num_removed: int = 0
    error: str = ""
