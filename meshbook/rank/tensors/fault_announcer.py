"""Tell the other ranks that this one cannot take part in a collective because of a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshbook.clock import monotonic, sleep
from meshbook.rank.tensors.tensor_store import Poison, TensorStore

if TYPE_CHECKING:
    from meshbook.rank.process_groups.groups import ProcessGroups

# Seconds that a rank waits for the others to announce the same fault before it assumes that they are blocked without
# it.
_SAME_FAULT_S = 1.0
# Announced faults that are remembered.
_MAX_ANNOUNCED_FAULTS = 1000


class FaultAnnouncer:
    """Announces this rank's faults, and aborts the groups if other ranks wait for it without the same fault."""

    def __init__(self, rank: int, groups: ProcessGroups | None) -> None:
        self.rank, self._groups = rank, groups
        self._announced_faults: dict[str, None] = {}  # the most recent ones

    def announce(self, store: TensorStore, poison: Poison) -> None:
        """Announce that this rank cannot take part in a collective because of a fault.

        If all ranks have the same fault, none of them waits. Otherwise the others wait for this rank, and aborting the
        groups releases them.
        """
        groups = self._groups
        tcp_store = None if groups is None else groups.store
        # Only an abort releases all ranks: a group broken by one neighbour's closed connection still blocks other
        # neighbours.
        if groups is None or tcp_store is None or groups.abort_failure is not None:
            return
        num_ranks = store.mesh.size() if store.mesh is not None else 1
        key = f"meshbook/fault/{groups.generation}/{store.name}/{poison.number}/{poison.ename}"
        announcement = f"{key}/{self.rank}"
        if announcement not in self._announced_faults:
            self._announced_faults[announcement] = None
            if len(self._announced_faults) > _MAX_ANNOUNCED_FAULTS:
                del self._announced_faults[next(iter(self._announced_faults))]
            tcp_store.add(key, 1)
        deadline = monotonic() + _SAME_FAULT_S
        while tcp_store.add(key, 0) < num_ranks:
            if monotonic() > deadline:
                groups.abort(RuntimeError(f"rank {self.rank} cannot take part: {poison.ename}: {poison.evalue}"))
                return
            sleep(0.01)
