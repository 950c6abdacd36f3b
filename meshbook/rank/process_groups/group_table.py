"""Every process group of this process by name, and whether their collectives are held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from meshbook.clock import monotonic
from meshbook.rank.process_groups.backends import BackendHandle
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.failures import GroupFailure
from meshbook.rank.process_groups.group_health import GroupHealth
from meshbook.rank.process_groups.watched_group import WatchedGroup

Versions = list[tuple[GroupHealth, int]]  # with the version of its connections


class GroupTable:
    """The groups of this process. Methods may be called from any thread, and do not block.

    Attributes:
        clock: the seconds that count for timeouts; set it before groups are added.
    """

    def __init__(self, exits: ExitQuestions | None = None) -> None:
        """exits: for the groups that are added; see `GroupHealth`."""
        self._exits = exits
        self.clock: Callable[[], float] = monotonic
        self._by_name: dict[str, WatchedGroup] = {}
        self._hold_event: threading.Event | None = None

    def __iter__(self) -> Iterator[WatchedGroup]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> WatchedGroup:
        return self._by_name[name]

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def add(self, group: WatchedGroup) -> None:
        group.health.exits, group.health.clock = self._exits, self.clock
        self._by_name[group.label.name] = group

    def remove(self, group: WatchedGroup) -> bool:
        """Remove a group; return whether it was there."""
        return self._by_name.pop(group.label.name, None) is not None

    def clear(self) -> None:
        self._by_name.clear()

    def handles(self) -> list[BackendHandle]:
        """Return the real backends of all groups."""
        return [handle for group in self for handle in group.backend_handles]

    @property
    def has_nccl(self) -> bool:
        """Whether any group has an NCCL backend."""
        return any(handle.kind == "nccl" for handle in self.handles())

    # ---- failing

    @property
    def failure(self) -> GroupFailure | None:
        """Why one of the groups is unusable; None if all are usable."""
        return next((group.health.failure for group in self if group.health.failure is not None), None)

    def versions(self) -> Versions:
        """Return the present connections of all groups, for `invalidate`."""
        return [(group.health, group.health.connection_version) for group in self]

    def invalidate(self, failure: GroupFailure, versions: Versions | None = None) -> None:
        """Break groups until they are formed again.

        Args:
            versions: those that have these connections still; None: all.
        """
        for health, version in self.versions() if versions is None else versions:
            health.invalidate(failure, version=version)

    def invalidate_named(self, names: Iterable[str], reason: str) -> None:
        """Break these groups, if they are not broken, until they are formed again."""
        for name in names:
            group = self._by_name.get(name)
            if group is not None and group.health.failure is None:
                group.health.invalidate(GroupFailure(reason))

    def complete_futures(self) -> None:
        """Complete the futures of collectives that have ended unnoticed."""
        for group in self:
            group.health.complete_futures()

    # ---- holding

    @property
    def is_held(self) -> bool:
        return self._hold_event is not None

    def hold(self) -> None:
        """Have the collectives that start from now on wait for `resume`."""
        if self._hold_event is None:
            self._hold_event = threading.Event()
        for group in self:
            group.health.hold_event = self._hold_event

    def hold_new(self, group: WatchedGroup) -> None:
        """Wait until a group may be made. Blocks while collectives are held.

        Raises:
            GroupBroken: they were not resumed in time.
        """
        if self._hold_event is not None:
            group.health.hold_event = self._hold_event
            group.health.wait_until_allowed("making a process group")

    def resume(self) -> None:
        """Release the collectives that wait because of `hold`."""
        hold_event, self._hold_event = self._hold_event, None
        for group in self:
            group.health.hold_event = None
        if hold_event is not None:
            hold_event.set()
