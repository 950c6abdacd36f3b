"""The batches of a loop: from the beginning, or from the step of a snapshot on.

A loader is iterated from its beginning again, with the random states that it began with, and the batches before the
step are dropped. What it does not draw from those states or from its position it must give again by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshbook.errors import UsageError
from meshbook.rank.elastic.sampler import ElasticSampler


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


def sampler_of(loader: Any) -> ElasticSampler | None:
    """Return the sampler of a DataLoader, if that knows its place by rows."""
    sampler = getattr(loader, "sampler", None)
    is_known = isinstance(sampler, ElasticSampler) and isinstance(getattr(loader, "batch_size", None), int)
    return sampler if is_known else None


def batches_from(loader: Iterable[Any], row: int) -> Iterator[Any]:
    """Iterate over a loader from a row of its epoch on. Other rows than the first take an `ElasticSampler`."""
    if not row:
        return iter(loader)
    sampler = sampler_of(loader)
    if sampler is None:
        raise UsageError("the loader has no meshbook.ElasticSampler any more; give the loader of before")
    sampler.first_row = row
    try:
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))  # by then the sampler has been asked
    finally:
        sampler.first_row = 0
    return itertools.chain(first, batches)


def num_batches_from(loader: Any, row: int) -> int:
    """Return how many batches `batches_from` gives."""
    sampler = sampler_of(loader)
    if not row or sampler is None:
        return len(loader)
    sampler.first_row = row
    try:
        return len(loader)
    finally:
        sampler.first_row = 0


def rows_done(loader: Any, begun_at: tuple[int, int], step: int) -> tuple[int, int] | None:
    """Return how many rows of which epoch all ranks have had after a step; None: the loader does not know.

    Args:
        begun_at: row and step at which the iteration began.
    """
    sampler = sampler_of(loader)
    if sampler is None:
        return None
    row, first_step = begun_at
    rows = row + (step - first_step) * loader.batch_size * dist.get_world_size()
    return min(rows, len(sampler.dataset)), sampler.epoch


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
