"""The batches of a loop: from the beginning, or from the step of a snapshot on.

A loader is iterated from its beginning again, with the random states that it began with, and the batches before the
step are dropped. What it does not draw from those states or from its position it must give again by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from meshbook.errors import UsageError


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the random generators of a DataLoader and of its samplers, each once."""
    found: list[torch.Generator] = []
    pending, seen = [loader], set[int]()
    while pending:
        owner = pending.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
            found.append(generator)
        pending += [getattr(owner, name, None) for name in ("sampler", "batch_sampler")]
    return found


def is_one_pass(loader: Iterable[Any]) -> bool:
    """Whether a loader is an iterator: what it has given it does not give again."""
    return isinstance(loader, Iterator)


def skip(batches: Iterator[Any], count: int) -> None:
    """Drop the first batches.

    Raises:
        UsageError: there are not so many.
    """
    for number in range(count):
        try:
            next(batches)
        except StopIteration:
            raise UsageError(
                f"the loader has {number} batches, and the loop that was interrupted had done {count} steps: give the "
                "same loader"
            ) from None
