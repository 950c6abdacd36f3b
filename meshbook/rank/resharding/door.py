"""The rank's side of cutting DTensors anew, without torch until there are process groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from meshbook.rank.healing.stale_names import find_stale
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.wire.messages import FindSharded, FormGroups, MoveShards

if TYPE_CHECKING:
    from meshbook.rank.resharding.moving import Resharding


class ReshardingDoor:
    """What a resize asks of a rank's DTensors. Main thread.

    Args:
        names: returns the user's names.
    """

    def __init__(
        self, rank: int, namespace: MutableMapping[str, Any], groups: RankGroups, names: Callable[[], list[str]]
    ) -> None:
        self._rank, self._namespace, self._groups, self._names = rank, namespace, groups, names
        self._resharding: Resharding | None = None
        self._num_resizes = 0  # of the mesh, that this rank knows of

    def find(self, command: FindSharded) -> dict[str, Any]:
        names = self._names()
        found: dict[str, Any] = {"sharded": [], "problems": {}, "catalog": ""}
        if self._groups.process_groups is not None and "torch.distributed.tensor" in sys.modules:
            found = self._state().find(command, names)
        return {**found, "stale": find_stale(self._namespace, names, command.size_dependent)}

    def move(self, command: MoveShards) -> dict[str, Any]:
        if command.step == "give":
            return self._state().give(command)
        return self._state().move(command, self._names())

    def commit(self) -> None:
        self._state().commit()

    def groups_forming(self, command: FormGroups) -> bool:
        """Prepare DTensors for groups of other ranks. Return whether the mesh was resized since the last time."""
        is_resized = command.num_resizes > self._num_resizes
        if self._resharding is not None:
            if is_resized:
                self._resharding.begin()
            else:
                self._resharding.forget()
        return is_resized

    def groups_formed(self, command: FormGroups) -> None:
        self._num_resizes = command.num_resizes
        if self._resharding is not None:
            self._resharding.formed(command.axes)

    def _state(self) -> Resharding:
        if self._resharding is None:
            from meshbook.rank.resharding.moving import Resharding

            assert self._groups.process_groups is not None  # ranks without groups are not asked
            self._resharding = Resharding(self._namespace, self._groups.process_groups, self._rank)
        return self._resharding
