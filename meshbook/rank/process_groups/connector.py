"""Connects the real backends of process groups in the current generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from meshbook.rank.process_groups import backends
from meshbook.rank.process_groups.backends import BackendAborts, BackendHandle
from meshbook.rank.process_groups.failures import GroupFailure
from meshbook.rank.process_groups.generation import Generation
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.ring import GroupLabel, one_line_error
from meshbook.rank.process_groups.store import MeshStore
from meshbook.rank.process_groups.watched_group import WatchedGroup


class Connector:
    """Connects groups. One per process."""

    def __init__(self, generation: Generation, table: GroupTable, aborts: BackendAborts) -> None:
        self._generation, self._table, self._aborts = generation, table, aborts
        self._num_connects: Counter[str] = Counter()  # a group that is destroyed and recreated may have its former name
        self._connecting: list[GroupLabel] = []

    @property
    def connecting(self) -> tuple[GroupLabel, ...]:
        """Groups that wait for their members to connect."""
        return tuple(self._connecting)

    def generation_began(self) -> None:
        self._num_connects.clear()

    def connect(self, group: WatchedGroup) -> None:
        """Connect a group's real backends in this generation. Blocks until all its members have connected.

        Raises:
            GroupBroken: all groups are broken, so this one would be too.
            RuntimeError: not all members connected in time.
            BaseException: what the groups were aborted with meanwhile.
        """
        generation = self._generation
        generation.check_not_aborted()
        if group.health.failure is not None and group.health.failure.for_good:
            group.health.wait_until_allowed("connecting it")
        self._table.hold_new(group)
        name = group.label.name
        num_before, self._num_connects[name] = self._num_connects[name], self._num_connects[name] + 1
        store = generation.prefix_store(name + (f"/{num_before}" if num_before else ""))
        handles: dict[str, BackendHandle] = {}
        self._connecting.append(group.label)
        try:
            with generation.rendezvous():
                for kind in group.backends.values():
                    if kind not in handles:
                        handles[kind] = self._connect_backend(kind, PrefixStore(kind, store), group)
        except BaseException as error:
            # Its store prefix contains keys of this attempt, so another attempt needs a new generation.
            group.health.invalidate(GroupFailure(f"connecting it failed: {one_line_error(error)}"))
            raise
        finally:
            self._connecting.remove(group.label)
        group.label.reset_counters(generation.number or 0)
        group.attach_backends(list(handles.values()), store)
        with generation.lock:
            failure = generation.abort_failure
        if failure is not None:  # aborted while connecting
            group.health.invalidate(failure)
            self._aborts.begin(group.backend_handles)

    def _connect_backend(self, kind: str, store: Store, group: WatchedGroup) -> BackendHandle:
        rank, size = group.rank(), group.size()
        connect_timeout_s = self._generation.connect_timeout_s or group.timeout.total_seconds()
        connect: Callable[[], BackendHandle]
        if kind == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            connect = partial(
                backends.connect_nccl,
                store,
                rank,
                size,
                device=device,
                timeout=group.timeout,
                options=group.options,
            )
            return self._generation.run_abortably(connect, connect_timeout_s)
        mesh_store = self._generation.store
        connect = partial(
            backends.connect_gloo,
            store,
            rank,
            size,
            hostname=mesh_store.listen_on if isinstance(mesh_store, MeshStore) else None,
            connect_timeout_s=connect_timeout_s,
        )
        return self._generation.run_abortably(connect)
