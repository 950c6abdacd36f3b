"""Checkpoints on disk: how their folders are named, listed, committed, read and cleaned. No torch.

A checkpoint is a folder of torch's DCP format with a `meshbook.json` beside its files. While it is being saved it is
`.saving-<save>`; one rename makes it `step-00000800` or `save-0001`, after its files and the folder are on the disk. So
a folder of such a name is complete at any moment, whatever is killed. To replace a checkpoint, the new one is first
committed as `step-00000800.new`, which readers prefer; then the old one is moved away and `.new` takes its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshbook import clock
from meshbook.errors import CheckpointError, message_of
from meshbook.wire.folders import locked
from meshbook.wire.messages import CheckpointManifest
from meshbook.wire.processes import ProcessIdentity, is_on_other_host, is_running

FORMAT = 1
MANIFEST = "meshbook.json"
_SHARE = "save to a path that all machines share, the notebook's own too"
SAVING_PREFIX = ".saving-"
_REPLACED_PREFIX = ".replaced-"
_DISCARDED_PREFIX = ".discarded-"
_OWNER = "owner.json"  # in a folder that is being saved: the process that made it
_MARKS = frozenset({_OWNER, MANIFEST})  # one of them is in every folder that a save has made
_NEW = ".new"
_NAME = re.compile(r"(?:step-\d{8,}|save-\d{4,})(?:\.new)?")
# A left-over of a machine whose processes cannot be looked at is removed when it has not changed for so long.
_FOREIGN_LEFTOVER_S = 86_400.0
_READ_BYTES = 1 << 22


class CheckpointEntry(NamedTuple):
    """A committed checkpoint."""

    folder: Path
    manifest: CheckpointManifest


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def saving_folder(path: str, save: str) -> Path:
    return Path(path) / f"{SAVING_PREFIX}{save}"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def list_checkpoints(path: str | Path) -> list[CheckpointEntry]:
    """Return the committed checkpoints below `path` that can be read, oldest first. Raises CheckpointError."""
    return scan(path)[0]


def scan(path: str | Path) -> tuple[list[CheckpointEntry], dict[Path, str]]:
    """Return the committed checkpoints below `path`, oldest first, and why others that are there cannot be read.

    Raises:
        CheckpointError: `path` is no folder.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(path) if _NAME.fullmatch(entry.name))
    except OSError as error:
        raise CheckpointError(f"{path} has no checkpoints: {error.strerror}") from None
    entries, problems = [], {}
    for name in names:
        if f"{name}{_NEW}" in names:  # it is being replaced
            continue
        for folder in (Path(path) / name, Path(path) / name.removesuffix(_NEW)):  # a `.new` may have been renamed
            try:
                entries.append(CheckpointEntry(folder, read_manifest(folder)))
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                problems[folder] = str(error)
            break
    # The clock of the machine that commits may go back; checkpoints of earlier versions have no number.
    return sorted(entries, key=lambda entry: (entry.manifest.number, entry.manifest.saved_at)), problems


def find_checkpoint(path: str | Path, step: int | None = None) -> CheckpointEntry:
    """Return the checkpoint of this step; None: the one that was committed last.

    `path` may also be the folder of the one checkpoint, or of a copy of it, whatever its name.

    Raises:
        CheckpointError: there is none; the message says which there are.
    """
    if (Path(path) / MANIFEST).exists() and not Path(path).name.startswith((SAVING_PREFIX, _DISCARDED_PREFIX)):
        entry = CheckpointEntry(Path(path), read_manifest(path))
        if step not in (None, entry.manifest.step):
            raise CheckpointError(f"{path} is the checkpoint of step {entry.manifest.step}, not of step {step}")
        return entry
    entries, problems = scan(path)
    if step is None:
        _check_newest_is_readable(entries, problems)
    elif (problem := problems.get(Path(path) / folder_name(step))) is not None:
        raise CheckpointError(problem)
    if not entries:
        raise CheckpointError(f"{path} has no checkpoints: {_why_none(os.listdir(path))}")
    if step is None:
        return entries[-1]
    for entry in reversed(entries):
        if entry.manifest.step == step:
            return entry
    steps = ", ".join(str(entry.manifest.step) for entry in entries if entry.manifest.step is not None) or "none"
    raise CheckpointError(f"{path} has no checkpoint of step {step}; it has steps {steps}")


def _check_newest_is_readable(entries: Sequence[CheckpointEntry], problems: Mapping[Path, str]) -> None:
    """Raise CheckpointError where an older checkpoint would be taken for the last one, which cannot be read."""
    last = entries[-1].folder.stat().st_mtime if entries else float("-inf")
    for folder, problem in problems.items():
        if folder.stat().st_mtime >= last:
            older = f"; the last one that can be read is {entries[-1].folder.name}" if entries else ""
            raise CheckpointError(f"{problem}{older}")


def _why_none(names: Collection[str]) -> str:
    if MANIFEST in names:
        return "it is what is left of a save that was not committed"
    if ".metadata" in names:
        return f"it is one of torch's own, without {MANIFEST}; load it with torch.distributed.checkpoint"
    if any(name.startswith(SAVING_PREFIX) for name in names):
        return "the first save to it has not been committed"
    return "no folder step-… or save-… is in it"


def read_manifest(folder: str | Path) -> CheckpointManifest:
    """Return what a committed checkpoint says of itself.

    Raises:
        FileNotFoundError: there is no `meshbook.json`.
        CheckpointError: it cannot be read, or is of another format.
    """
    data = (Path(folder) / MANIFEST).read_bytes()
    try:
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format", msgspec.Raw(b"null"))
        number = msgspec.json.decode(version)
        if number != FORMAT:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {number}, and this Meshbook reads format {FORMAT}; restore it "
                "with the version that saved it"
            )
        return msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} cannot be read: {error}; restore another checkpoint") from None


def check_sizes(entry: CheckpointEntry) -> None:
    """Raise CheckpointError if a file is missing or of another size than when it was committed."""
    for file in entry.manifest.files:
        try:
            found = (entry.folder / file.name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{entry.folder}/{file.name}: {error.strerror}; restore another checkpoint") from None
        if found != file.num_bytes:
            raise CheckpointError(
                f"{entry.folder}/{file.name} has {found:,} bytes and was committed with {file.num_bytes:,}: it was "
                "changed since; restore another checkpoint"
            )


def check_digests(entry: CheckpointEntry, names: Collection[str]) -> None:
    """Read these files of a checkpoint whole; raise CheckpointError if one is not as it was committed. Blocks."""
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in entry.manifest.files:
        if file.name not in names:
            continue
        crc = 0
        with open(entry.folder / file.name, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
        if f"{crc:08x}" != file.digest:
            raise CheckpointError(
                f"{entry.folder}/{file.name} is damaged: its digest is {crc:08x} and was {file.digest} when it was "
                "committed; restore another checkpoint"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def begin(path: str, save: str, step: int | None, owner: ProcessIdentity, *, overwrite: bool) -> Path:
    """Make the folder that a save writes to.

    Raises:
        CheckpointError: there is a checkpoint of this step, or the folder cannot be made.
    """
    if step is not None and not overwrite:
        _check_free(Path(path), step)
    folder = saving_folder(path, save)
    try:
        folder.mkdir(parents=True)
        (folder / _OWNER).write_bytes(msgspec.json.encode(owner))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}; save to another path") from None
    return folder


def check_shared(folder: Path) -> None:
    """Raise CheckpointError if a save's folder here is not that of rank 0, on another machine. It is then removed."""
    if (folder / _OWNER).exists():
        return
    with contextlib.suppress(OSError):  # whoever has something in them keeps it
        folder.rmdir()
        folder.parent.rmdir()
    raise CheckpointError(
        f"{folder.parent} on {socket.gethostname()} is another folder than the one of rank 0; {_SHARE}"
    )


def _check_free(path: Path, step: int) -> None:
    name = folder_name(step)
    if (path / name).exists() or (path / f"{name}{_NEW}").exists():
        raise CheckpointError(
            f"{path / name} is there already; save another step, or replace it with overwrite=True "
            "(%mesh checkpoint … --overwrite)"
        )


def remove_leftovers(path: str, own_saves: Collection[str]) -> None:
    """Remove what saves that ended half-way have left below `path`, and finish replacements. Blocks; raises nothing.

    Args:
        own_saves: those that are under way, whose process is this one.
    """
    with contextlib.suppress(OSError):
        names = os.listdir(path)
        for name in names:
            folder = Path(path) / name
            if name.startswith(SAVING_PREFIX):
                if name.removeprefix(SAVING_PREFIX) not in own_saves and _is_dead(folder):
                    discard(folder)
            elif name.startswith((_REPLACED_PREFIX, _DISCARDED_PREFIX)):
                with contextlib.suppress(OSError):
                    _remove(folder)
            elif name.endswith(_NEW) and _NAME.fullmatch(name):
                with locked(Path(path)):
                    _finish_replacement(Path(path), name.removesuffix(_NEW))


def _is_dead(folder: Path) -> bool:
    try:
        owner = msgspec.json.decode((folder / _OWNER).read_bytes(), type=ProcessIdentity)
    except (OSError, msgspec.MsgspecError):
        owner = None
    if owner is None or is_on_other_host(owner):
        with contextlib.suppress(OSError):
            return _is_ours(folder) and clock.wall() - folder.stat().st_mtime > _FOREIGN_LEFTOVER_S
        return False
    # This process says which of its saves are under way; the caller has left those out.
    return owner.pid == os.getpid() or not is_running(owner)


def commit(folder: Path, manifest: CheckpointManifest, *, overwrite: bool) -> Path:
    """Make a folder with all its files a checkpoint, by one rename. Blocks until it is on the disk; returns its path.

    Done again after it was interrupted, or had ended, it comes to the same.

    Raises:
        CheckpointError: a file is not as reported, or there is a checkpoint of this step; nothing was committed.
    """
    path = folder.parent
    if not path.exists():
        raise CheckpointError(f"{path} is not on {socket.gethostname()}, where the supervisor runs; {_SHARE}")
    final = None if folder.exists() else _find_committed(path, manifest)
    if final is None:
        check_sizes(CheckpointEntry(folder, manifest))
    try:
        if final is None:
            with locked(path):
                number = 1 + max((entry.manifest.number for entry in list_checkpoints(path)), default=0)
                numbered = msgspec.structs.replace(manifest, number=number)
                _write_durably(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(numbered), indent=1))
                _sync_folder(folder)
                final = _rename(folder, path, manifest.step, overwrite=overwrite)
        _sync_folder(path)
        (final / _OWNER).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be committed: {describe_failure(error, path)}") from error
    return final


def describe_failure(error: BaseException, path: str | Path) -> str:
    """Return why a save to this path has failed, and what to do about it if the disk is full."""
    text = message_of(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; free space in {path}, or save to another path"
    return text


def _find_committed(path: Path, manifest: CheckpointManifest) -> Path | None:
    """Return the checkpoint with exactly this manifest, but for its number, if there is one."""
    if manifest.step is not None:
        with locked(path):
            _finish_replacement(path, folder_name(manifest.step))
    for folder, found in list_checkpoints(path):
        if msgspec.structs.replace(found, number=manifest.number) == manifest:
            return folder
    return None


def _rename(folder: Path, path: Path, step: int | None, *, overwrite: bool) -> Path:
    if step is None:
        final = _rename_to_next(folder, path)
    else:
        if not overwrite:
            _check_free(path, step)
        final = path / folder_name(step)
        if final.exists():
            _finish_replacement(path, final.name)
            os.rename(folder, path / f"{final.name}{_NEW}")
            _sync_folder(path)
            _finish_replacement(path, final.name)
        else:
            os.rename(folder, final)
    return final


def _rename_to_next(folder: Path, path: Path) -> Path:
    """Give a save the next free number. Another mesh may save to the same path."""
    while True:
        numbers = [int(name.removeprefix("save-")) for name in os.listdir(path) if re.fullmatch(r"save-\d{4,}", name)]
        final = path / f"save-{max(numbers, default=0) + 1:04}"
        try:
            os.rename(folder, final)  # onto a folder that is not empty it fails
        except OSError:
            if not final.exists():
                raise
        else:
            return final


def _finish_replacement(path: Path, name: str) -> None:
    """Give a `.new` checkpoint its final name, after the one that has it was moved away.

    Under the folder's lock: two that finish one replacement would move the new checkpoint away as the old one.
    """
    new, final = path / f"{name}{_NEW}", path / name
    if not (new / MANIFEST).exists():
        return
    replaced = path / f"{_REPLACED_PREFIX}{name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(final, replaced)
    os.rename(new, final)
    _sync_folder(path)
    with contextlib.suppress(OSError):
        _remove(replaced)


def discard(folder: Path) -> None:
    """Remove the folder of a save that is not to be. Blocks; raises nothing: the next save removes what is left.

    It gets another name first: a rank that still writes could put a file into a folder that is half removed.
    """
    discarded = folder.with_name(folder.name.replace(SAVING_PREFIX, _DISCARDED_PREFIX, 1))
    with contextlib.suppress(OSError):
        os.rename(folder, discarded)
        _remove(discarded)


def _remove(folder: Path) -> None:
    """Remove a folder that a save has made, and no other. Raises OSError."""
    if not _is_ours(folder):
        return
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in _MARKS:
            os.unlink(entry)
    shutil.rmtree(folder, ignore_errors=True)  # the marks go last: a removal that is cut off is gone on with


def _is_ours(folder: Path) -> bool:
    """Whether a save has made a folder, or nothing is in it that anyone could miss."""
    names = os.listdir(folder)
    return not names or not _MARKS.isdisjoint(names)


def _write_durably(file: Path, data: bytes) -> None:
    with open(file, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
