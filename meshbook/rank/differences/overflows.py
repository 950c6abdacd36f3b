"""Sums over ranks that are not finite though each rank gave finite numbers.

No rank can see that alone, and nobody waits for another. A rank that gives bad numbers to a reduction says so in the
mesh's store before it begins. Who gets bad numbers for finite ones looks there: if nobody has said so, the sum itself
is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import DistStoreError

from meshbook.rank.process_groups.ring import Collective

# Keys of single collectives that a rank writes; then one for all of a group, of which nothing is reported any more.
_MAX_KEYS = 1000


class Overflow(NamedTuple):
    """A collective whose sum is too large for the dtype of its tensors."""

    collective: Collective
    line: str  # the notebook's, of an operation on remote tensors; else empty
    dtype: str
    is_reported_here: bool  # by this rank; else by another one of the group


class GivenBad:
    """Which collectives ranks have given bad numbers to. Any thread."""

    def __init__(self, store: Callable[[], Any]) -> None:
        """
        Args:
            store: returns what all ranks of the mesh share.
        """
        self._store, self._num_keys = store, 0

    def note(self, collective: Collective) -> None:
        """Say that this rank gives bad numbers to a collective, which has not begun."""
        self._num_keys += 1
        if self._num_keys <= _MAX_KEYS:
            self._count(_key(collective), 1)
        elif self._num_keys == _MAX_KEYS + 1:
            self._count(_key_of_group(collective), 1)

    def is_by_nobody(self, collective: Collective) -> bool:
        """Whether all ranks gave finite numbers to a collective that has ended; False also if that is not known."""
        return self._count(_key(collective), 0) == 0 and self._count(_key_of_group(collective), 0) == 0

    def is_first_to_report(self, collective: Collective) -> bool:
        return self._count(f"{_key(collective)}/reported", 1) == 1

    def _count(self, key: str, amount: int) -> int | None:
        store = self._store()
        try:
            return None if store is None else int(store.add(key, amount))
        except DistStoreError:  # the groups are being aborted
            return None


def _key_of_group(collective: Collective) -> str:
    return f"bad numbers/{collective.group}/{collective.generation}"


def _key(collective: Collective) -> str:
    return f"{_key_of_group(collective)}/{collective.group_seq}"
