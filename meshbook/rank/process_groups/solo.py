"""Lets a new process run code that makes groups and begins collectives, while the other ranks take no part.

A setup cell that builds a DDP or FSDP2 model runs on all ranks at first, and on a new rank alone. While `SoloGroups` is
active, groups have a backend whose collectives return at once and leave this rank's own values: an all-gather has as
many copies of its input as there are ranks. New groups get the names that the other ranks have given to groups of the
same members, and are connected when they are first used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup, Store

from meshbook.rank.process_groups.group_reports import (
    GroupReport,
    GroupSpec,
    common_group_count,
    exchange_reports,
    groups_of_others,
    have_same_buckets,
    matching_spec,
    ranks_by_name,
)
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.hashed_names import HashedNames
from meshbook.rank.process_groups.interrupted_steps import num_rebucketed_models
from meshbook.rank.process_groups.torch_patches import c10d
from meshbook.rank.process_groups.watched_group import WatchedGroup


class SoloGroups:
    """The groups of a process while it runs code without the other ranks.

    Attributes:
        is_active: collectives return at once, and new groups are not connected.
        origin: returns the file and the call of the running cell.
        to_make: groups that the other ranks have and this one has not.
        has_other_buckets: this process is new, and DDP models of the other ranks have rebuilt their buckets.
        group_count: how many groups torch counts on the other ranks; None: they are as new as this one.
        hashed_names: names of groups that only their members make.
    """

    def __init__(self, table: GroupTable) -> None:
        self.is_active = self._is_making_missing = False
        self.origin: Callable[[], tuple[str, str]] = lambda: ("", "")
        self.to_make: list[GroupSpec] = []
        self.group_count: int | None = None
        self.has_other_buckets = False
        self._num_others = 0
        self._table, self.hashed_names = table, HashedNames()
        self._real_groups: dict[WatchedGroup, Any] = {}  # what they are connected by

    def join(self, exchange: Callable[[str, bytes], list[bytes]]) -> dict[str, set[int]]:
        """Learn what the other ranks have, when groups are first formed here; return which ranks have each group."""
        reports = exchange_reports(exchange, GroupReport())
        self.to_make = groups_of_others(reports, dist.get_rank())
        self.group_count = common_group_count(reports)
        self.hashed_names.catch_up([report.num_hashed_names for report in reports])
        self.has_other_buckets = not have_same_buckets(reports)
        return ranks_by_name(reports)

    def rejoin(self, exchange: Callable[[str, bytes], list[bytes]], specs: Sequence[GroupSpec]) -> list[GroupReport]:
        """Return what all ranks have, when groups are formed again, and count groups as all of them do.

        Args:
            specs: the user's groups here.
        """
        num_groups, num_names = c10d._world.group_count, self.hashed_names.counts
        reports = exchange_reports(exchange, GroupReport(specs, num_groups, num_rebucketed_models(), num_names))
        self.hashed_names.catch_up([report.num_hashed_names for report in reports])
        c10d._world.group_count = common_group_count(reports)
        return reports

    @contextlib.contextmanager
    def active(self, generation: int) -> Iterator[None]:
        """Have collectives return at once, in groups that there are and in new ones.

        Args:
            generation: of the groups, in which collectives are counted from the beginning afterwards.
        """
        self.is_active = True
        num_hashed_names = dict(self.hashed_names.counts)
        self._real_groups = {group: group.inner for group in self._table if group.is_connected}
        for group in self._real_groups:
            group.replace_inner(_fake_inner(group, group.get_group_store()))
        try:
            yield
        finally:
            self.is_active = self._is_making_missing = False
            for group in self._table:
                group.replace_inner(self._real_groups.get(group))
                group.label.reset_counters(generation)
            self._real_groups = {}
            self.hashed_names.counts = num_hashed_names
            if self.group_count is not None:
                c10d._world.group_count = self.group_count

    def connect(self, group: WatchedGroup) -> None:
        """Give a new group the backend whose collectives return at once."""
        group.replace_inner(_fake_inner(group, group.get_group_store()))

    def name_for(self, ranks: Sequence[int]) -> str | None:
        """Return the name of a group that is being made while this is active; None: as torch names it."""
        if not self.is_active:
            return None
        if self._is_making_missing:
            return self.to_make.pop(0).name
        spec = matching_spec(self.to_make, ranks, self.origin()[0])
        if spec is not None:
            self.to_make.remove(spec)
            return spec.name
        self._num_others += 1
        return f"solo-{self._num_others}"  # the other ranks have none like it: a number of torch's could be used again

    def make_missing(self) -> None:
        """Make the groups that the other ranks have and code here did not make. Call it while active."""
        self._is_making_missing = True
        while self.to_make:
            spec = self.to_make[0]
            kinds = set(spec.backends.values())
            backend = kinds.pop() if len(kinds) == 1 else ",".join(f"{at}:{kind}" for at, kind in spec.backends.items())
            dist.new_group(list(spec.ranks), timeout=timedelta(seconds=spec.timeout_s), backend=backend)


class Connects(Protocol):
    """What `connect_deferred` uses of `ProcessGroups`."""

    @property
    def table(self) -> GroupTable: ...

    def exchange(self, topic: str, data: bytes) -> list[bytes]: ...

    def connect(self, group: WatchedGroup) -> None: ...


def connect_deferred(groups: Connects) -> None:
    """Connect the groups that waited for a new process, in one order on all ranks. Blocks until all have called it.

    Connected at their first use, two groups could be used in another order on each rank, which would wait for ever.
    """
    names = sorted(group.label.name for group in groups.table if not group.is_connected)
    every = [json.loads(text) for text in groups.exchange("deferred", json.dumps(names).encode())]
    for name in names:
        group = groups.table[name]
        if all(name in every[member] for member in group.label.ranks):
            groups.connect(group)


def _fake_inner(group: WatchedGroup, store: Store) -> Any:
    """Return a process group whose collectives return at once."""
    rank, size = group.rank(), group.size()
    inner: Any = ProcessGroup(store, rank, size)
    fake_group: Any = FakeProcessGroup  # torch's stubs have other arguments
    fake = fake_group._create_internal(rank, size, fake_group.Options())
    for device in group.backends:
        inner._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, fake)
    inner._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    inner._set_group_name(group.label.name)
    return inner
