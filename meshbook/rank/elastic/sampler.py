"""A sampler whose place in an epoch is a number of rows, whatever the number of ranks that they are dealt to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class ElasticSampler(Sampler[int]):
    """Deals the rows of a data set to the ranks that there are when it is iterated.

        sampler = meshbook.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        for batch in mesh.elastic(loader, state=("model", "opt")):

    As `DistributedSampler`, with the ranks dealt to in turn: after a step of all ranks, the rows that were dealt are
    the first of the epoch's order. So a loop of `mesh.elastic` goes on in the middle of an epoch on another number of
    ranks, and no row is left out or comes twice. The last step of an epoch is filled up with rows of its beginning.
    Make it alike on all ranks.

    Attributes:
        epoch: which order, if it shuffles.
        first_row: how many rows of the order are left out at its beginning.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.first_row = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterations shuffle in another order. Call it on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        num_missing = -(len(order) - self.first_row) % dist.get_world_size()
        rows = [*order[self.first_row :], *itertools.islice(itertools.cycle(order), num_missing)]
        return iter(rows[dist.get_rank() :: dist.get_world_size()])

    def __len__(self) -> int:
        """The number of rows of one rank."""
        return -(-(len(self.dataset) - self.first_row) // dist.get_world_size())

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=generator).tolist()
