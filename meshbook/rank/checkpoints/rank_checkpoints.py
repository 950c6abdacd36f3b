"""A rank's checkpoints: it saves names of its namespace, writes in the background, and restores.

Saving is three steps. On the main thread all ranks plan together and each copies its part (`save`); that is all that
training waits for. When all have copied theirs (`write_files`), a thread of each rank writes its files, and reports:
sooner, it would take time from the ranks that still copy. When the supervisor has every rank's report, rank 0 writes
`.metadata` (`write_metadata`), and the supervisor commits the folder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshbook.clock import perf_counter
from meshbook.ids import CallId
from meshbook.rank.checkpoints import planning, restoring, writing
from meshbook.rank.checkpoints.exchange import Exchange
from meshbook.rank.checkpoints.named_state import NamedState, read_state
from meshbook.rank.checkpoints.staging import StagingBuffers
from meshbook.wire import checkpoint_folders, messages, processes
from meshbook.wire.messages import CheckpointWritten

# Seconds between two looks of a save at whether the one before it is written; Stop ends the wait at once.
_POLL_S = 0.05


@dataclass
class _Save:
    """A save that this rank takes part in."""

    command: messages.SaveCheckpoint
    generation: int
    folder: Path
    part: planning.LocalPart | None = None
    is_dropped: bool = False
    released: threading.Event = field(default_factory=threading.Event)  # its files may be written, or it is dropped
    written: threading.Event = field(default_factory=threading.Event)  # the staging buffers may be used again


class RankCheckpoints:
    """All saves and restores of one rank.

    Attributes:
        world_size: of the mesh; whoever resizes it sets this between two calls.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str,
        namespace: MutableMapping[str, Any],
        *,
        generation: Callable[[], int],
        report: Callable[[CheckpointWritten], None],
    ) -> None:
        """
        Args:
            namespace: in which cells run.
            generation: returns that of the process groups.
            report: sends a report to the supervisor; called on several threads.
        """
        self._rank, self.world_size, self._device, self._namespace = rank, world_size, device, namespace
        self._generation, self._report = generation, report
        self._plans, self._buffers = planning.SavePlans(), StagingBuffers()
        self._saves: dict[CallId, _Save] = {}
        self._last: _Save | None = None

    # ---- the main thread

    def save(self, command: messages.SaveCheckpoint) -> dict[str, Any]:
        """Plan a save with all ranks, copy this rank's part, and have it written.

        Blocks until it is copied; before that, until the save before it is written here, or given up. Returns
        the bytes copied and the seconds that it took, without that wait.

        Raises:
            CheckpointError: it cannot be saved; all ranks raise it.
        """
        while self._last is not None and not self._last.written.wait(_POLL_S):
            if self._last.is_dropped:
                self._buffers = StagingBuffers()  # its thread, which the disk may hold for ever, still reads the others
                break
        started = perf_counter()
        folder = checkpoint_folders.saving_folder(command.path, command.call)
        save = self._saves[command.call] = _Save(command, self._generation(), folder)
        try:
            with torch.no_grad():
                num_bytes = self._stage_and_write(save)
        except BaseException:  # the call's end tells the supervisor
            self._saves.pop(command.call, None)
            raise
        assert save.part is not None  # planned
        unlike = list(save.part.unlike_replicas)
        return {"num_bytes": num_bytes, "seconds": perf_counter() - started, "unlike_replicas": unlike}

    def _stage_and_write(self, save: _Save) -> int:
        exchange = Exchange(self._rank, self.world_size)
        writer, files = writing.make_writer(save.folder, lambda: save.is_dropped)
        part = save.part = self._plans.plan(
            save.command.call, save.generation, lambda: self._read_states(save), exchange, writer
        )
        staged = self._buffers.stage(part.plan, part.tensors, part.values)
        save.part = part._replace(tensors={}, values={})

        def write() -> None:
            save.released.wait()
            try:
                if self._rank == 0:
                    checkpoint_folders.remove_leftovers(save.command.path, tuple(self._saves))
                if not save.is_dropped:
                    checkpoint_folders.check_shared(save.folder)
                writing.write_part(files, part.plan, staged, save.folder, self._rank)
            finally:
                save.written.set()

        self._start(save, write, files)
        self._last = save
        return staged.num_bytes

    def _read_states(self, save: _Save) -> list[NamedState]:
        """Read what is to be saved; on rank 0, make the folder that all write to."""
        command = save.command
        states = [read_state(name, self._namespace) for name in command.names]
        if self._rank == 0:
            owner = processes.identify(os.getpid())
            checkpoint_folders.begin(command.path, command.call, command.step, owner, overwrite=command.overwrite)
        return states

    def restore(self, command: messages.RestoreCheckpoint) -> dict[str, Any]:
        """Load a checkpoint into names of the namespace, together with all ranks. Blocks.

        Returns the names that were loaded and the bytes read.

        Raises:
            CheckpointError: it does not fit what the names hold, or is damaged; nothing has been changed.
        """
        exchange = Exchange(self._rank, self.world_size)
        with torch.no_grad():
            restore = restoring.Restore(
                command.folder, command.names, self._namespace, exchange, rank=self._rank, world_size=self.world_size
            )
            return restore.run(torch.device(self._device))

    # ---- the service thread

    def write_files(self, save_id: CallId) -> None:
        """All ranks have copied their parts: have this rank's written. Does not block."""
        if (save := self._saves.get(save_id)) is not None:
            save.released.set()

    def write_metadata(self, save_id: CallId) -> None:
        """Every rank has written its files: have `.metadata` written. Does not block."""
        save = self._saves.get(save_id)
        if save is None or save.part is None or save.part.metadata is None:
            return
        writer, files = writing.make_writer(save.folder, lambda: save.is_dropped)
        metadata = save.part.metadata
        write = lambda: writing.write_metadata(writer, metadata, save.folder, self.world_size)  # noqa: E731
        try:
            self._start(save, write, files, is_metadata=True)
        except RuntimeError as error:  # the process cannot start more threads
            self._report_failure(save, error)

    def drop(self, save_id: CallId) -> None:
        """A save has ended: a thread that still writes for it ends with its next write."""
        save = self._saves.pop(save_id, None)
        if save is not None:
            save.is_dropped = True
            save.released.set()

    # ---- threads that write

    def _start(
        self, save: _Save, write: Callable[[], None], files: writing.HashingFileSystem, *, is_metadata: bool = False
    ) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:
                if not save.is_dropped:
                    self._report_failure(save, error)
                return
            self._report(
                CheckpointWritten(
                    rank=self._rank,
                    save=save.command.call,
                    generation=save.generation,
                    files=tuple(files.files),
                    names=save.part.names if save.part is not None and self._rank == 0 else (),
                    torch=str(torch.__version__),
                    is_metadata=is_metadata,
                )
            )

        threading.Thread(target=run, name="meshbook-checkpoint", daemon=True).start()

    def _report_failure(self, save: _Save, error: BaseException) -> None:
        text = checkpoint_folders.describe_failure(error, save.command.path)
        report = CheckpointWritten(self._rank, save.command.call, save.generation, error=text)
        self._report(report)
