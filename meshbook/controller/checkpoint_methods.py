"""The methods of `Mesh` for checkpoints."""

from __future__ import annotations

import os

from meshbook.controller import checkpoints
from meshbook.controller.mesh_inspection import MeshInspection
from meshbook.controller.tables import Table


class CheckpointMethods(MeshInspection):
    """Saves, lists and restores checkpoints; a part of `Mesh`."""

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        *names: str,
        step: int | None = None,
        asynchronous: bool = True,
        overwrite: bool = False,
    ) -> checkpoints.CheckpointSave:
        """Save names of the ranks' namespaces as a checkpoint of torch's DCP format, in a folder below `path`.

            save = mesh.checkpoint("run1", "model", "opt", step=800)

        Modules (plain, DDP, FSDP2), optimizers, whatever has `state_dict`, tensors, generators, and values that can be
        pickled. The name "rng" stands for each rank's random number generators. See docs/checkpoints.md.

        Args:
            path: on a disk that all ranks share.
            step: the folder is named after it.
            asynchronous: return when the ranks have copied their state; False: when the checkpoint is committed.
            overwrite: replace the checkpoint of this step, once the new one is committed.

        Returns:
            CheckpointSave: a future of the committed checkpoint.

        Raises:
            CheckpointError: it cannot be saved; nothing was.
            RankLost: a rank is lost.
        """
        return checkpoints.save(
            self._session, self.ranks, path, names, step=step, asynchronous=asynchronous, overwrite=overwrite
        )

    def on_preemption(
        self, path: str | os.PathLike[str] | None = None, *names: str, grace_s: float = 25.0, resize: bool = False
    ) -> None:
        """Have names saved, and cells end in time, when the mesh receives SIGTERM. Replaces an earlier plan.

            mesh.on_preemption("run1", "model", "opt", grace_s=110)

        Cells ask `meshbook.preempted()`; `mesh.elastic` loops end by themselves, with `Preempted`, after a step. A cell
        that has not ended by two thirds of the time is stopped. Then the names are saved, as `checkpoint` does, and the
        ranks leave; the whole mesh ends if its supervisor received the signal. See docs/preemption.md.

        Args:
            path, names: as for `checkpoint`; without them nothing is saved.
            grace_s: seconds from SIGTERM until the ranks must have ended, less than the cluster waits before SIGKILL.
            resize: if the highest ranks receive the signal, the mesh goes on without them, as after `resize`, with what
                they held; only if that cannot be done in time the names are saved.

        Raises:
            UsageError: a path without names, or names without a path.
            RankLost: a rank is lost.
        """
        checkpoints.plan_preemption(self._session, self.ranks, path, names, grace_s=grace_s, resize=resize)

    def restore(
        self, path: str | os.PathLike[str], *names: str, step: int | None = None
    ) -> checkpoints.SavedCheckpoint:
        """Load a checkpoint into the names that it was saved from, whatever the number of ranks. Blocks.

        It runs what the checkpoint's pickles say, as `torch.load(weights_only=False)`: restore only from folders that
        you trust.

        Args:
            path: as for `checkpoint`.
            names: only these; without any, all that the checkpoint has.
            step: None: the one that was committed last.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit; the message lists what does not, and
                nothing was changed on the ranks.
        """
        return checkpoints.restore(self._session, self.ranks, path, names, step=step)

    def checkpoints(self, path: str | os.PathLike[str]) -> Table:
        """Return the committed checkpoints below `path` as a table, oldest first. Raises CheckpointError."""
        return checkpoints.table(path)

    def _finish_saves(self) -> None:
        checkpoints.finish_saves(self._session, f"the end of mesh {self._session.name}")
