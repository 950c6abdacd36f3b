"""The way to a rank's sentinel for its two threads. Torch, which a mesh may not have, is imported with the first."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshbook.errors import UsageError
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.wire.messages import RunOps, SentinelReport

if TYPE_CHECKING:
    from meshbook.rank.differences.hooks import TrainingHooks
    from meshbook.rank.differences.sentinel import Sentinel
    from meshbook.rank.tensors.engine import RankTensors


class SentinelDoor:
    """Switches the sentinel on and off."""

    def __init__(
        self,
        rank: int,
        namespace: Mapping[str, Any],
        groups: RankGroups,
        notify: Callable[[str], None],
        cell_title: Callable[[str], str | None],
    ) -> None:
        """As those of `Sentinel`."""
        self._rank, self._namespace, self._groups = rank, namespace, groups
        self._notify, self._cell_title = notify, cell_title
        self._sentinel: Sentinel | None = None
        self._hooks: TrainingHooks | None = None

    def switch(self, *, on: bool) -> None:
        """Begin anew, or end; what was found stays until the next begin. Main thread."""
        if self._sentinel is not None:
            self._sentinel.disarm()
        if not on:
            return
        if importlib.util.find_spec("torch") is None:
            raise UsageError("the sentinel looks at torch's numbers, and torch is not installed where ranks run")
        from meshbook.rank.differences.hooks import TrainingHooks
        from meshbook.rank.differences.sentinel import Sentinel

        self._hooks = self._hooks or TrainingHooks()
        groups = self._groups.process_groups
        observers = [] if groups is None else groups.observers
        self._sentinel = Sentinel(
            self._rank,
            self._namespace,
            self._groups.ring,
            observers,
            lambda: None if groups is None else groups.store,
            self._hooks,
            self._notify,
            self._cell_title,
        )
        self._sentinel.arm()

    def call_ended(self) -> None:
        """Have what was found in a call that has ended reported. Main thread."""
        if self._sentinel is not None:
            self._sentinel.call_ended()

    def run_batch(self, tensors: RankTensors, command: RunOps) -> dict[str, Any]:
        """Run a batch of operations on remote tensors, watched if the sentinel is on. Main thread."""
        return tensors.run(command, None if self._sentinel is None else self._sentinel.watch_batch(tensors))

    def report(self) -> SentinelReport:
        """Any thread."""
        return SentinelReport(on=False) if self._sentinel is None else self._sentinel.report()
