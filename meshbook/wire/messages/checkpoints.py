"""Messages about checkpoints, and what a committed one says of itself (`meshbook.json`)."""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Message


class SavedName(Struct, frozen=True, gc=False):
    """A name of the ranks' namespaces in a checkpoint."""

    name: str
    kind: str  # "module", "optimizer", "stateful", "tensor", "generator", "rng" or "value"
    is_per_rank: bool = False  # some of its values differ between ranks


class SavedFolder(Struct, frozen=True, gc=False):
    """Where a committed checkpoint is."""

    folder: str  # absolute; of the one checkpoint
    step: int | None
    saved_at: float  # wall clock
    names: tuple[str, ...]


class SavedFile(Struct, frozen=True, gc=False):
    name: str  # in the checkpoint's folder
    num_bytes: int
    digest: str  # crc32 of the file, as 8 hexadecimal digits


class CheckpointManifest(Struct, frozen=True, gc=False):
    """What `meshbook.json` says of a committed checkpoint."""

    format: int  # of the folder; a reader refuses others
    step: int | None  # the user's; None: none was given
    generation: int  # of the process groups of the ranks that saved it
    world_size: int
    axes: dict[str, int]
    saved_at: float  # wall clock, at the commit
    torch: str  # its version
    names: tuple[SavedName, ...]
    files: tuple[SavedFile, ...]
    number: int = 0  # greater than those of all that were committed to the same path before; 0: not known

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


# Commands: controller -> supervisor -> host -> rank


class SaveCheckpoint(Message):
    """Save names of the ranks' namespaces. The call ends when they are copied; `CheckpointCommitted` follows.

    To all ranks of the mesh, on their main threads. The call's id is the save's.
    """

    call: CallId
    ranks: Ranks
    path: str  # absolute; the checkpoint is a folder in it
    names: tuple[str, ...]
    step: int | None = None
    overwrite: bool = False  # replace a checkpoint of the same step, once this one is committed
    label: str = "checkpoint"


class RestoreCheckpoint(Message):
    """Load a committed checkpoint into names of the ranks' namespaces. To all ranks, on their main threads."""

    call: CallId
    ranks: Ranks
    folder: str  # absolute; of the one checkpoint
    names: tuple[str, ...] = ()  # (): all that are in it
    label: str = "restore"


# Commands: supervisor -> host -> rank's service thread


class WriteCheckpoint(Message):
    """All ranks have copied their state: write the files, and report them with `CheckpointWritten`."""

    ranks: Ranks
    save: CallId


class WriteCheckpointMetadata(Message):
    """To one rank: every rank has written its files; write `.metadata`, and report it with `CheckpointWritten`."""

    ranks: Ranks
    save: CallId


class DropCheckpoint(Message):
    """A save has ended, committed or not: whatever still writes for it ends."""

    ranks: Ranks
    save: CallId


# Reports: rank -> host -> supervisor


class CheckpointWritten(Message):
    """A rank has written its files of a save, and they are on the disk; or it could not."""

    rank: int
    save: CallId
    generation: int  # of the groups in which it copied its state
    files: tuple[SavedFile, ...] = ()
    names: tuple[SavedName, ...] = ()
    torch: str = ""
    is_metadata: bool = False  # the file is `.metadata`
    error: str = ""  # why it could not


# Reports: supervisor -> controllers


class CheckpointCommitted(Message):
    save: CallId
    folder: str  # absolute
    manifest: CheckpointManifest


class CheckpointDiscarded(Message):
    """A save was thrown away; earlier checkpoints are as they were."""

    save: CallId
    reason: str
