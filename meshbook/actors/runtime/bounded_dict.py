"""A dict that retains only its most recently set keys."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict of the LIMIT keys that were set last. Each operation is a single C call, so threads need no lock."""

    # Exited processes and actors. A program that starts and stops them for weeks only queries recent ones.
    LIMIT: Final = 1000

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.LIMIT:
            with suppress(KeyError):  # another thread has removed it
                self.popitem(last=False)
