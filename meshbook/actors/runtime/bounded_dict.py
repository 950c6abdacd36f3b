"""What is worth knowing for a while: a dict of what was put into it last."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """The LIMIT keys that were set last. Each operation is one of C's, so threads need no lock."""

    # Processes and actors that have ended. A program that starts and stops them for weeks asks about recent ones.
    LIMIT: Final = 1000

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.LIMIT:
            with suppress(KeyError):  # another thread has done it
                self.popitem(last=False)
