"""Commits and removes checkpoints' folders on a thread, because a disk may take seconds to say that it has a file."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from meshbook.errors import CheckpointError
from meshbook.ids import CallId
from meshbook.supervisor.effects import CommitCheckpoint, Effect, RemoveCheckpoint
from meshbook.wire import checkpoint_folders
from meshbook.wire.folders import release_inherited_locks
from meshbook.wire.loop import Loop
from meshbook.wire.messages import CheckpointManifest


class CommitEnded(NamedTuple):
    call: CallId
    folder: str  # of the checkpoint; "" if there is none
    manifest: CheckpointManifest
    error: str  # why there is none


class CheckpointCommitter:
    """Carries out the effects about checkpoints' folders, in order. `close()` waits for those that were begun.

    Its thread is started with the first of them, and is no daemon: a supervisor that ends finishes a commit.
    """

    def __init__(
        self,
        loop: Loop,
        commit_ended: Callable[[CallId, str, CheckpointManifest, str], list[Effect]],
        apply_effects: Callable[[list[Effect]], None],
    ) -> None:
        """
        Args:
            commit_ended: called from the loop with the end of each commit; `apply_effects` gets what it returns.
        """
        self._loop, self._commit_ended, self._apply_effects = loop, commit_ended, apply_effects
        self._todo: queue.SimpleQueue[CommitCheckpoint | RemoveCheckpoint | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[CommitEnded] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open: dict[CallId, CommitCheckpoint] = {}  # whose end has not been delivered
        self._wake = os.pipe()  # now: a save must not fail for want of descriptors
        loop.watch_fd(self._wake[0], self._deliver)

    def submit(self, effect: CommitCheckpoint | RemoveCheckpoint) -> None:
        self._loop.diverge()
        if isinstance(effect, CommitCheckpoint):
            self._open[effect.command.call] = effect
        self._loop.act(lambda: self._put(effect))

    def _put(self, effect: CommitCheckpoint | RemoveCheckpoint) -> None:
        self._todo.put(effect)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="meshbook-commit")
            thread.start()  # if the system has none now, the next effect has it started, and this one carried out
            self._thread = thread

    def take_over(self) -> None:
        """Carry out again what another process, which has ended, has begun."""
        self._todo, self._ended, self._thread = queue.SimpleQueue(), queue.SimpleQueue(), None
        for effect in self._open.values():
            self._loop.act(lambda effect=effect: self._put(effect))  # type: ignore[misc]

    def close(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
        self._loop.unwatch(self._wake[0])
        self._deliver_all()
        for descriptor in self._wake:
            os.close(descriptor)

    def _run(self) -> None:
        carried_out: set[CallId] = set()
        while (effect := self._todo.get()) is not None:
            folder = checkpoint_folders.saving_folder(effect.command.path, effect.command.call)
            if isinstance(effect, RemoveCheckpoint):
                checkpoint_folders.discard(folder)
                continue
            if effect.command.call in carried_out:  # there twice, if this process has taken over in `submit`
                continue
            carried_out.add(effect.command.call)
            final, error = "", ""
            # The process whose standby this was may have been killed in the midst of a commit.
            release_inherited_locks(effect.command.path)
            try:
                final = str(checkpoint_folders.commit(folder, effect.manifest, overwrite=effect.command.overwrite))
            except CheckpointError as failure:
                error = str(failure)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            self._ended.put(CommitEnded(effect.command.call, final, effect.manifest, error))
            os.write(self._wake[1], b"x")

    def _deliver(self) -> None:
        os.read(self._wake[0], 4096)
        self._deliver_all()

    def _deliver_all(self) -> None:
        while not self._ended.empty():
            ended = self._ended.get()
            self._open.pop(ended.call, None)
            self._apply_effects(self._commit_ended(*ended))
