"""The process groups of a replay: their collectives are answered from the record.

The groups are `WatchedGroup`s with the names and ranks that they had, so that models, DeviceMeshes and functional
collectives find them. What a collective is asked for is compared with what was recorded; where they differ, the replay
no longer tells what happened, and `ReplayDiverged` says where.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from meshbook.errors import MeshbookError
from meshbook.rank.process_groups.backends import BackendHandle
from meshbook.rank.process_groups.collectives import COLLECTIVES, POINT_TO_POINT
from meshbook.rank.process_groups.group_health import Observer
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel
from meshbook.rank.process_groups.torch_patches import TorchPatches, c10d
from meshbook.rank.process_groups.watched_group import WatchedGroup
from meshbook.rank.recording.bundle import RecordedGroup
from meshbook.rank.recording.entries import CollectiveEntry, tensors_in

_TIMEOUT = timedelta(seconds=60)  # of the real group of one, which nothing waits for


class ReplayDiverged(MeshbookError):
    """The replay asks for another collective than the record has at that place."""


class RecordedAnswers:
    """The recorded collectives that have yet to be asked for, in their order: of a group, or between two ranks.

    Attributes:
        num_left: how many.
        is_past_end: the replay came to a collective behind the last one that was recorded.
        divergence: the first place where the replay asked for something else; "": there is none.
    """

    def __init__(self, entries: Iterable[CollectiveEntry]) -> None:
        self._queues: defaultdict[tuple[str, str, int | None], deque[CollectiveEntry]] = defaultdict(deque)
        self.is_past_end = False
        self.divergence = ""
        for entry in entries:
            self._queues[_key(entry.group, entry.op, entry.peer)].append(entry)

    @property
    def num_left(self) -> int:
        return sum(map(len, self._queues.values()))

    def next(self, group: str, op: str, peer: int | None, tensors: Sequence[torch.Tensor]) -> CollectiveEntry:
        """Return the entry for a collective that is asked for.

        Raises:
            ReplayDiverged: there is none, or it is of another one.
        """
        queue = self._queues[_key(group, op, peer)]
        if not queue:
            self.is_past_end = True
            raise self._diverge(
                f"the record ends before this {op}: on the mesh the cell did not come to it. What the replay reads or "
                "computes before is not what it was"
            )
        entry, shapes = queue[0], _shapes(tensors)
        if entry.op != op or entry.shapes != shapes:
            raise self._diverge(
                f"here it is {_describe(op, shapes)}, and on the mesh it was {_describe(entry.op, entry.shapes)} at "
                f"{entry.line}. What the replay reads or computes before is not what it was"
            )
        return queue.popleft()

    def is_next(self, group: str, op: str, tensors: Sequence[torch.Tensor]) -> bool:
        queue = self._queues[_key(group, op, None)]
        return bool(queue) and queue[0].op == op and queue[0].shapes == _shapes(tensors)

    def _diverge(self, text: str) -> ReplayDiverged:
        self.divergence = self.divergence or text
        return ReplayDiverged(text)


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def _key(group: str, op: str, peer: int | None) -> tuple[str, str, int | None]:
    return (group, op, peer) if op in POINT_TO_POINT else (group, "", None)


def _describe(op: str, shapes: Sequence[tuple[tuple[int, ...], str]]) -> str:
    text = ", ".join(f"{list(shape)} of {dtype.removeprefix('torch.')}" for shape, dtype in shapes[:3])
    return f"{op}({text}{', …' if len(shapes) > 3 else ''})"


class ReplayedWork:
    """A recorded collective in flight: its results are there once it is waited for, as they were on the mesh."""

    def __init__(self, entry: CollectiveEntry, tensors: Sequence[torch.Tensor]) -> None:
        self._entry, self._tensors = entry, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        entry = self._entry
        if entry.error is not None:
            raise entry.error.restore()
        with torch.no_grad():
            for tensor, output in zip(self._tensors, entry.outputs or (), strict=False):
                tensor.detach().copy_(output)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._entry.error is None

    def exception(self) -> BaseException | None:
        return None if self._entry.error is None else self._entry.error.restore()

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self._entry.source or 0

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            self.wait()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(list(self._tensors))
        return future


class ReplayedBackend:
    """What a group of a replay has in place of its real one."""

    def __init__(self, group: WatchedGroup, record: RecordedAnswers, real: Any) -> None:
        """real: a process group for what is no collective."""
        self._group, self._record, self._real = group, record, real

    def __getattr__(self, name: str) -> Any:
        if name in COLLECTIVES:
            return self._collective(name)
        return getattr(self._real, name)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _collective(self, method: str) -> Callable[..., ReplayedWork]:
        op, _ = COLLECTIVES[method]
        label = self._group.label

        def collective(*args: Any, **kwargs: Any) -> ReplayedWork:
            has_peer = method in ("send", "recv") and len(args) > 1
            peer = label.ranks[int(args[1])] if has_peer else None
            tensors = tensors_in(args[:1])
            if op == "broadcast" and not self._record.is_next(label.name, op, tensors) and _is_in_ddp_forward():
                # DDP rebuilds its buckets once. A model that had done so before the cell does it again here.
                return ReplayedWork(CollectiveEntry(label.name, op, None, ""), tensors)
            return ReplayedWork(self._record.next(label.name, op, peer, tensors), tensors)

        return collective


def _is_in_ddp_forward() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_pre_forward" and code.co_filename.endswith("parallel/distributed.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ReplayedGroups:
    """The process groups of this process: those that the rank had, and those that the cell makes.

    Attributes:
        table: the groups by name.
        ring, observers: for the groups.
    """

    def __init__(self, record: RecordedAnswers, rank: int, world_size: int) -> None:
        self.ring = CollectiveRing()
        self.observers: list[Observer] = []
        self.table = GroupTable()
        self._record, self._rank, self._world_size = record, rank, world_size
        self._next_name: str | None = None
        self._patches = TorchPatches(self._create_group, lambda: None, self._name_for)
        self._store = HashStore()
        self.ring.skip_frames_of(Path(torch.__file__).parent)
        self.ring.skip_frames_of(typing_extensions.__file__)

    def form(self, groups: Sequence[RecordedGroup], num_created: int) -> None:
        """Make the groups that the rank had. The first is the world's."""
        self._patches.install()
        for number, group in enumerate(groups):
            self._next_name = group.name
            if number == 0:
                hook = sys.excepthook
                dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._world_size)
                sys.excepthook = hook  # torch's prefixes each line with the rank
            else:
                dist.new_group(list(group.ranks), backend="gloo")
        c10d._world.group_count = num_created

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._patches.remove()

    # ---- what a WatchedGroup calls on its owner

    def connect(self, group: WatchedGroup) -> None:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], _TIMEOUT
        alone = gloo(PrefixStore(f"alone/{group.label.name}", self._store), 0, 1, options)
        group.attach_backends([BackendHandle("gloo", alone)], self._store)
        group.is_replayed = True
        group.replace_inner(ReplayedBackend(group, self._record, group.inner))

    def unregister(self, group: WatchedGroup) -> None:
        self.table.remove(group)

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        rank = ranks.index(parent.label.ranks[parent.rank()])
        return self._create_group(name, ranks, rank, self._store, {"cpu": "gloo"}, timeout, None)

    def _name_for(self, ranks: Sequence[int]) -> str | None:
        name, self._next_name = self._next_name, None
        return name

    def _create_group(
        self, name: str, ranks: Any, rank: int, store: Any, backends: Any, timeout: timedelta, options: Any
    ) -> WatchedGroup:
        group = WatchedGroup(
            self, GroupLabel(name, ranks), rank, store=store, backends={"cpu": "gloo"}, timeout=timeout
        )
        self.table.add(group)
        self.connect(group)
        return group
