"""A process group that records its collectives and can be aborted; every collective of a rank goes through one.

`WatchedGroup` is a `ProcessGroup` that wraps the real one. torch and its users hold the wrapper, so the real backend
can be replaced while a DeviceMesh, DDP or FSDP2 continues to use the same object. Each call is recorded in the ring,
waits in slices so that signals are handled, and raises the reason when the group is broken.

Where torch has a C++ trampoline (DDP's reducer, functional collectives), calls from C++ arrive here too. The few
methods without one (gather, scatter, reduce and alltoall, which only Python calls) are overridden for Python callers.

Does not depend on stores, generations or how groups are formed; see `groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

from meshbook.ids import name_ranks
from meshbook.rank.process_groups import coalesced, monitored, staged
from meshbook.rank.process_groups.backends import A_YEAR, BackendHandle
from meshbook.rank.process_groups.collectives import COLLECTIVES, OPTION_TYPES, POINT_TO_POINT, inputs_and_options
from meshbook.rank.process_groups.cuda import finish_on_stream, prepare_queries
from meshbook.rank.process_groups.failures import GroupFailure
from meshbook.rank.process_groups.group_health import NO_TIMEOUT, GroupHealth, Observer
from meshbook.rank.process_groups.ring import Collective, CollectiveRing, GroupLabel, one_line_error
from meshbook.rank.process_groups.watched_work import WatchedWork, delegate

# Methods that the wrapper delegates to the current real group.
_DELEGATED = (
    "_backend_id",
    "_enable_collectives_timing",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
    "abort",
)

_BACKEND_TYPES = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


class GroupOwner(Protocol):
    """What a group calls on its owner."""

    @property
    def ring(self) -> CollectiveRing: ...

    @property
    def observers(self) -> Sequence[Observer]: ...

    def connect(self, group: WatchedGroup) -> None:
        """Attach the group's real backends. Blocks until all members have connected."""

    def unregister(self, group: WatchedGroup) -> None:
        """Remove a group that was destroyed."""

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """Create a group like `parent`, of the given global ranks, including this one. Blocks as `connect` does."""


class WatchedGroup(ProcessGroup):
    """A process group that wraps the real one; see the module.

    Attributes:
        label: its name and the global ranks of its members, for the ring.
        health: whether it can be used.
        backends: the backend of each device type, {"cpu": "gloo"}.
        timeout: of its collectives, unless the call passes its own.
        options: NCCL options that the user passed; None without.
        backend_handles: its real backends.
        is_replayed: it has no real group, and a record answers its collectives.
    """

    is_replayed = False

    def __init__(
        self,
        owner: GroupOwner,
        label: GroupLabel,
        rank: int,
        *,
        store: Store,
        backends: Mapping[str, str],
        timeout: timedelta,
        options: Any = None,
    ) -> None:
        # Of the two constructors only this one creates an object that C++ calls back; torch's stubs have the other.
        super().__init__(rank, len(label.ranks))  # type: ignore[call-arg]
        self.label = label
        self.health = GroupHealth(label, owner.ring, owner.observers)
        self.backends = dict(backends)
        self.timeout = timeout
        self.options = options
        self.backend_handles: tuple[BackendHandle, ...] = ()
        self._owner = owner
        self._store = store
        self._ring = owner.ring
        self._has_nccl = "nccl" in self.backends.values()
        self._inner: Any = None
        self._registered = False
        self._coalescing: list[Collective] | None = None

    # ---- the real group

    @property
    def inner(self) -> Any:
        """The real process group. Connects first if that was deferred, so it may block."""
        if self._inner is None:
            self._owner.connect(self)
        return self._inner

    @property
    def is_connected(self) -> bool:
        return self._inner is not None

    def attach_backends(self, handles: Sequence[BackendHandle], store: Store) -> None:
        """Set its real backends and its store prefix, and clear a former failure."""
        by_kind = {handle.kind: handle.backend for handle in handles}
        if "nccl" in by_kind:
            prepare_queries(self._ring)
        inner = ProcessGroup(store, self.rank(), self.size())
        # C++ code that requests a backend from the wrapper itself gets the first one that was attached, because a
        # process group registers a backend type once. Only DDP's logger does so, to read its number of threads.
        # Collectives go through the methods of this class.
        registering: list[Any] = [inner] if self._registered else [inner, super()]
        self._registered = True
        for group in registering:
            for device, kind in self.backends.items():
                group._register_backend(torch.device(device), _BACKEND_TYPES[kind], by_kind[kind])
            group._set_default_backend(_BACKEND_TYPES[self.getBackendName()])
            group._set_group_name(self.label.name)
        self.backend_handles = tuple(handles)
        self._store = store
        self._coalescing = None
        self._inner = inner
        self.health.reset()

    def detach_backends(self) -> tuple[Any, ...]:
        """Give up the real backends, until `attach_backends` or the first use sets new ones.

        Returns:
            They: whoever drops the last reference waits for their threads, which may be stuck.
        """
        detached = self._inner, self.backend_handles
        self._inner = None
        self.backend_handles = ()
        self._coalescing = None
        self.health.reset()
        return detached

    def replace_inner(self, inner: Any) -> None:
        """Have collectives go to another process group; None: to one that is connected when it is first used."""
        self._inner = inner
        self._coalescing = None

    # ---- NCCL: its waits only order streams, so no wait is sliced; what is stuck is stuck on the device

    def _uses_nccl(self, op: str, tensors: Sequence[torch.Tensor], options: Any) -> bool:
        if tensors:
            return tensors[0].is_cuda
        device: torch.device | None = getattr(options, "device", None)
        if device is None or device.type == "cuda":
            return True  # the default of a group that has NCCL
        if op == "barrier":
            # torch chooses gloo's barrier, where a wait can be interrupted. NCCL's would also wait for the work
            # enqueued before it, and code that reads a clock after a barrier relies on that.
            torch.cuda.current_stream().synchronize()
        return False

    def _wrap_launched(self, record: Collective, work: Any, arguments: tuple[Any, ...] | None) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(record)
            return work
        if work is not None:
            return WatchedWork(self.health, record, work, None, arguments)
        finish_on_stream(self._ring, record)  # a synchronous call, enqueued on the current stream
        self.health.raise_if_aborted(record)
        if arguments is not None:
            self.health.notify_finished(record, arguments)
        return None

    def _start_coalescing(self, device: torch.device) -> None:
        self.health.wait_until_allowed("a coalesced collective")
        self.inner._start_coalescing(device)
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        records, self._coalescing = self._coalescing or [], None
        try:
            work = self.inner._end_coalescing(device)
        except BaseException as error:
            for record in records:
                self._ring.finish(record, error)
            if records and self.health.failure is None:  # it is unknown which part of the batch was sent
                last = records[-1]
                self.health.failure = GroupFailure(f"{last.op} #{last.seq} failed: {one_line_error(error)}")
            raise
        if work is None or not records:
            for record in records:
                self._ring.finish(record)
            return work
        watched = WatchedWork(self.health, records[-1], work, None, None)
        for record in records[:-1]:
            self._ring.set_completion_check(record, watched.is_finished, on_device=True)
        return watched

    # ---- what torch calls on a group

    def getSize(self) -> int:
        """Return the number of members. The base class has that of the beginning."""
        return len(self.label.ranks)

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.backends]

    def getBackendName(self) -> str:
        """Return the name for torch's C++ code. DDP's logger expects a gloo backend in a group named gloo."""
        return "nccl" if self._has_nccl else "gloo"

    def _set_group_name(self, name: Any) -> None:
        if self._registered:  # without a registered backend the base class cannot store a name
            super()._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self.label.name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the collectives that begin, and of those that run; see `timeouts`."""
        self.timeout = timeout

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run gloo's barrier that names the missing ranks. Blocks, without slices; `abort` ends it."""
        health = self.health
        health.wait_until_allowed("monitored_barrier")
        inner = self.inner
        record, version = self._ring.begin("monitored_barrier", self.label), health.connection_version
        try:
            monitored.run_barrier(health, record, self._store, inner, timeout or self.timeout, wait_all_ranks)
        except BaseException as error:
            try:
                raised = health.finish_failed(record, error, version, None, launched=True)
            except BaseException as signal_error:
                raised = health.finish_failed(record, signal_error, version, None, launched=True)
            if raised is error:
                raise
            raise raised from None
        self._ring.finish(record)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Return a watched group of some members (given as ranks in this group), for `dist.split_group`.

        All members call it; members that are not in `new_ranks` get None.
        """
        self.health.wait_until_allowed("split_group")
        if self.rank() not in new_ranks:
            return None
        name = str(group_name or f"{self.label.name}/split/{'-'.join(map(str, new_ranks))}")
        group = self._owner.split(self, [self.label.ranks[rank] for rank in new_ranks], name, timeout or self.timeout)
        if group_desc is not None:
            group._set_group_desc(group_desc)
        return group

    def shutdown(self) -> None:
        """Shut down the real group. Called by torch when the group is destroyed."""
        inner = self._inner
        self._owner.unregister(self)
        if inner is not None:
            inner.shutdown()

    def __repr__(self) -> str:
        failure = self.health.failure
        state = f"broken: {failure.reason}" if failure else "ok" if self.is_connected else "not connected yet"
        return f"<process group {self.label.name} of {name_ranks(self.label.ranks)}: {state}>"


def _make_collective_method(method: str) -> Callable[..., Any]:
    """Return the method of `WatchedGroup` that wraps one collective."""
    op, input_index = COLLECTIVES[method]
    has_peer = method in ("send", "recv")  # the peer is the second argument, as a rank in the group
    in_slices = method not in POINT_TO_POINT
    has_timeout = method == "barrier"  # `dist.barrier` takes one for the call
    on_gloo = coalesced.ON_GLOO.get(method) or staged.ON_GLOO.get(method)

    def collective(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        # Every collective of a training step runs these lines: one helper, the others are called in rare cases only.
        health = self.health
        if health.failure is not None or health.hold_event is not None:
            health.wait_until_allowed(op)
        if self._inner is None:
            self._owner.connect(self)
        tensors, options = inputs_and_options(args, kwargs, input_index)
        peer = _peer_of(self.label, args) if has_peer else None
        version, work, record = health.connection_version, None, None
        try:
            record = self._ring.begin(op, self.label, tensors, peer)
            arguments = health.notify_begun(record, args, kwargs) if health.observers else None
            on_nccl = self._has_nccl and self._uses_nccl(op, tensors, options)
            if has_timeout:
                record.timeout_s = _take_timeout(options, on_nccl=on_nccl)
            if on_gloo is not None and not (on_nccl or self.is_replayed) and len(args) >= 2:
                work = on_gloo(self._inner, *args, **kwargs)
            else:
                work = getattr(self._inner, method)(*args, **kwargs)
            if on_nccl:
                return self._wrap_launched(record, work, arguments)
            # torch.distributed's functions wait at once for a synchronous call, and take None as "has waited". Waiting
            # here avoids the Work object. No other caller passes asyncOp=False; C++ callers would crash on the None.
            if type(options) not in OPTION_TYPES or options.asyncOp:
                return WatchedWork(health, record, work, in_slices, arguments)
            health.wait_in_slices(work) if in_slices else health.wait_for_peer(record, work)
        except BaseException as error:
            if record is None:
                health.mark_interrupted_start(op, error)
                raise
            try:
                raised = health.finish_failed(record, error, version, work, launched=work is not None)
            except BaseException as signal_error:  # a signal that arrived during the wait is delivered only here
                raised = health.finish_failed(record, signal_error, version, work, launched=work is not None)
            if raised is error:
                raise
            raise raised from None
        self._ring.finish(record)
        if arguments is not None:
            health.notify_finished(record, arguments)
        return None

    collective.__name__ = method
    collective.__qualname__ = f"WatchedGroup.{method}"
    return collective


def _peer_of(label: GroupLabel, args: Sequence[Any]) -> int | None:
    """Return the global rank that a send or receive with these arguments names."""
    return label.ranks[int(args[1])] if len(args) > 1 else None


def _take_timeout(options: Any, *, on_nccl: bool) -> float | None:
    """Return the timeout in the options of a call, in seconds, and take it from gloo; None: there is none."""
    if on_nccl or options is None or options.timeout <= NO_TIMEOUT:
        return None
    timeout_s, options.timeout = options.timeout.total_seconds(), A_YEAR
    return float(timeout_s)


for _name in COLLECTIVES:
    if hasattr(ProcessGroup, _name):
        setattr(WatchedGroup, _name, _make_collective_method(_name))
delegate(WatchedGroup, "inner", _DELEGATED)
