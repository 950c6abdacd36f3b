"""The way to a rank's checkpoints for its two threads. Torch, which a mesh may not have, is imported with the first."""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from meshbook.errors import CheckpointError
from meshbook.rank.outbox import Outbox
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.rank.checkpoints.rank_checkpoints import RankCheckpoints


class CheckpointDoor:
    """Passes commands about checkpoints to `RankCheckpoints`, and its reports to the service thread."""

    def __init__(
        self, rank: int, device: str, namespace: MutableMapping[str, Any], groups: RankGroups, outbox: Outbox
    ) -> None:
        self._rank, self._device = rank, device
        self._namespace, self._groups, self._outbox = namespace, groups, outbox
        self._checkpoints: RankCheckpoints | None = None

    def save(self, command: messages.SaveCheckpoint) -> dict[str, Any]:
        """As `RankCheckpoints.save`. Main thread."""
        return self._open().save(command)

    def restore(self, command: messages.RestoreCheckpoint) -> dict[str, Any]:
        """As `RankCheckpoints.restore`. Main thread."""
        return self._open().restore(command)

    def carry_out(
        self, command: messages.WriteCheckpoint | messages.WriteCheckpointMetadata | messages.DropCheckpoint
    ) -> None:
        """As `write_files`, `write_metadata` and `drop` of `RankCheckpoints`. Service thread."""
        if self._checkpoints is None:
            return
        match command:
            case messages.WriteCheckpoint(save=save):
                self._checkpoints.write_files(save)
            case messages.WriteCheckpointMetadata(save=save):
                self._checkpoints.write_metadata(save)
            case messages.DropCheckpoint(save=save):
                self._checkpoints.drop(save)

    def _open(self) -> RankCheckpoints:
        if self._checkpoints is None:
            if importlib.util.find_spec("torch") is None:
                raise CheckpointError("checkpoints are in torch's format, and torch is not installed where ranks run")
            from meshbook.rank.checkpoints.rank_checkpoints import RankCheckpoints

            self._checkpoints = RankCheckpoints(
                self._rank,
                self._groups.world_size,
                self._device,
                self._namespace,
                generation=self._generation,
                report=self._outbox.put,
            )
        self._checkpoints.world_size = self._groups.world_size
        return self._checkpoints

    def _generation(self) -> int:
        """Return the generation of the process groups; of a mesh without, that of its start."""
        groups = self._groups.process_groups
        return 1 if groups is None or groups.generation is None else groups.generation
