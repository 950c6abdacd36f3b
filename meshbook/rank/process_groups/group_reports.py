"""What ranks report to each other about the user's process groups while groups are formed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import Store


class GroupReport(NamedTuple):
    """One rank's report.

    Attributes:
        names: of the groups that the user made there.
        num_groups_created: how many groups torch has named there; None in a new process, which has yet to make the
            user's groups under the names that they have elsewhere.
        num_rebucketed: how many DDP models have other buckets than at the beginning.
    """

    names: Sequence[str] = ()
    num_groups_created: int | None = None
    num_rebucketed: int = 0


def exchange_reports(store: Store, rank: int, world_size: int, report: GroupReport) -> list[GroupReport]:
    """Return the reports of all ranks, by rank. Blocks until all have reported."""
    store.set(str(rank), json.dumps(report))
    return [GroupReport(*json.loads(text)) for text in store.multi_get([str(peer) for peer in range(world_size)])]


def ranks_by_name(reports: Sequence[GroupReport]) -> dict[str, set[int]]:
    """Return which ranks have each group."""
    found: dict[str, set[int]] = {}
    for rank, report in enumerate(reports):
        for name in report.names:
            found.setdefault(name, set()).add(rank)
    return found


def common_group_count(reports: Sequence[GroupReport]) -> int | None:
    """Return the number of groups that torch is to count on all ranks; None if a process is new.

    Where only some ranks made a group, the next one would otherwise have different names, and all ranks would wait for
    each other forever.
    """
    counts = [report.num_groups_created for report in reports if report.num_groups_created is not None]
    return max(counts) if len(counts) == len(reports) else None


def have_same_buckets(reports: Sequence[GroupReport]) -> bool:
    """Whether all ranks reported the same number of models with other buckets."""
    return len({report.num_rebucketed for report in reports}) == 1
