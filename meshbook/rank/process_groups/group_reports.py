"""What ranks report to each other about the user's process groups while groups are formed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshbook.ids import Ranks


class GroupSpec(NamedTuple):
    """A group that the user made.

    Attributes:
        ranks: global ranks of its members.
        backends: the backend of each device type.
        timeout_s: of its collectives.
        origin: the file of the cell that made it, and that cell's call.
    """

    name: str
    ranks: Ranks
    backends: dict[str, str]
    timeout_s: float
    origin: tuple[str, str] = ("", "")


class GroupReport(NamedTuple):
    """One rank's report.

    Attributes:
        groups: those that the user made there, in order.
        num_groups_created: how many groups torch has named there; None in a new process, which has yet to make the
            user's groups under the names that they have elsewhere.
        num_rebucketed: how many DDP models have other buckets than at the beginning.
        num_hashed_names: `HashedNames.counts`.
    """

    groups: Sequence[GroupSpec] = ()
    num_groups_created: int | None = None
    num_rebucketed: int = 0
    num_hashed_names: Mapping[str, int] = {}


def exchange_reports(exchange: Callable[[str, bytes], list[bytes]], report: GroupReport) -> list[GroupReport]:
    """Return the reports of all ranks, by rank. Blocks until all have reported.

    Args:
        exchange: takes a topic and this rank's data; returns every rank's data, by rank.
    """
    found = []
    for text in exchange("held", json.dumps(report).encode()):
        groups, *counts = json.loads(text)
        specs = [
            GroupSpec(name, tuple(ranks), backends, timeout_s, tuple(origin))
            for name, ranks, backends, timeout_s, origin in groups
        ]
        found.append(GroupReport(specs, *counts))
    return found


def ranks_by_name(reports: Sequence[GroupReport]) -> dict[str, set[int]]:
    """Return which ranks have each group."""
    found: dict[str, set[int]] = {}
    for rank, report in enumerate(reports):
        for group in report.groups:
            found.setdefault(group.name, set()).add(rank)
    return found


def groups_of_others(reports: Sequence[GroupReport], rank: int) -> list[GroupSpec]:
    """Return the groups that this rank is a member of and does not have, in the order in which they were made."""
    own = {group.name for group in reports[rank].groups}
    found = {group.name: group for report in reports for group in report.groups if rank in group.ranks}
    return [found[name] for name in sorted(found.keys() - own, key=_creation_order)]


def matching_spec(specs: Sequence[GroupSpec], ranks: Sequence[int], file: str) -> GroupSpec | None:
    """Return what a group of these ranks that a cell makes again stands for; None: nothing that is known.

    Args:
        file: of the cell. Of groups that the same cell has made, those of its last run count.
    """
    found = [spec for spec in specs if list(spec.ranks) == list(ranks) and spec.origin[0] == file]
    return next((spec for spec in found if spec.origin[1] == found[-1].origin[1]), None)


def _creation_order(name: str) -> tuple[int, str]:
    return (int(name) if name.isdecimal() else sys.maxsize, name)  # torch names most groups by number


def common_group_count(reports: Sequence[GroupReport]) -> int | None:
    """Return the number of groups that torch is to count on all ranks; None if all processes are new.

    Where only some ranks made a group, the next one would otherwise have different names, and all ranks would wait for
    each other forever.
    """
    return max((report.num_groups_created for report in reports if report.num_groups_created is not None), default=None)


def have_same_buckets(reports: Sequence[GroupReport]) -> bool:
    """Whether all ranks reported the same number of models with other buckets."""
    return len({report.num_rebucketed for report in reports}) == 1
