"""Which files of a project travel, and which paths are refused. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping

from meshbook.wire.messages import FilePart, ProjectFile
from meshbook.wire.transfers import CHUNK_BYTES

# Of blake2b. Whoever can write a project's files can run code on its ranks anyway; digests tell contents apart.
DIGEST_BYTES = 16
# Parts of one request: a reply with more of them, of empty files, would not be small.
_MAX_PARTS = 1000


def problem_of(file: ProjectFile) -> str:
    """Return why a file may not be in a copy of the project: it would lie, or lead, outside of it; "": it may."""
    parts = file.path.split("/")
    if not file.path or "\0" in file.path or any(part in ("", ".", "..") for part in parts):
        return "is no path within the project"
    if not file.link:
        return ""
    target = file.link.split("/")
    num_up = next((index for index, part in enumerate(target) if part != ".."), len(target))
    if file.link.startswith("/") or "\0" in file.link or ".." in target[num_up:]:
        return f"is a link to {file.link}, which may be outside of the project"
    if num_up > len(parts) - 1:
        return f"is a link to {file.link}, which is outside of the project"
    return ""


def problem_among(files: Iterable[ProjectFile]) -> str:
    """Return why these files together are no project, as a sentence; "": they are one."""
    paths = set[str]()
    folders = set[str]()
    for file in files:
        if problem := problem_of(file):
            return f"{file.path!r} {problem}"
        if file.path in paths:
            return f"{file.path!r} is there twice"
        paths.add(file.path)
        folders.update(folders_above(file.path))
    if both := paths & folders:
        return f"{min(both)!r} is a file or a link, and is to be a folder too"
    return ""


def difference(
    have: Mapping[str, ProjectFile], wanted: Iterable[ProjectFile]
) -> tuple[list[ProjectFile], list[ProjectFile]]:
    """Return the files that have to come, and those that have to go."""
    by_path = {file.path: file for file in wanted}
    coming = [file for path, file in by_path.items() if have.get(path) != file]
    return coming, [file for path, file in have.items() if path not in by_path]


def batches(sizes: Mapping[str, int]) -> Iterator[tuple[FilePart, ...]]:
    """Yield what to ask for at once: parts of files, of at most CHUNK_BYTES together. Each file is in order.

    Args:
        sizes: bytes of each file. One part is asked for of an empty file too: it may have grown, or be gone.
    """
    parts: list[FilePart] = []
    room = CHUNK_BYTES
    for path, nbytes in sizes.items():
        offset = 0
        while offset < nbytes or offset == 0:
            if not room or len(parts) == _MAX_PARTS:
                yield tuple(parts)
                parts, room = [], CHUNK_BYTES
            part = FilePart(path, offset, min(room, nbytes - offset))
            parts.append(part)
            room -= part.nbytes
            offset += part.nbytes
            if not nbytes:
                break
    if parts:
        yield tuple(parts)


def is_within(path: str, folder: str) -> bool:
    """Whether a path is a folder, or below it; both absolute."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def folders_above(path: str) -> Iterator[str]:
    """Yield the folders that a file of the project is in, the innermost first."""
    while path := posixpath.dirname(path):
        yield path
