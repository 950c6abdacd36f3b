"""A process group that records its collectives and can be aborted; every collective of a rank goes through one.

`WatchedGroup` is a `ProcessGroup` that wraps the real one. torch and its users hold the wrapper, so the real backend
can be replaced while a DeviceMesh, DDP or FSDP2 continues to use the same object. Each call is recorded in the ring,
waits in slices so that signals are handled, and raises the reason when the group is broken.

Where torch has a C++ trampoline (DDP's reducer, functional collectives), calls from C++ arrive here too. The few
methods without one (gather, scatter, reduce and alltoall, which only Python calls) are overridden for Python callers.

Does not depend on stores, generations or how groups are formed; see `groups`.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from meshbook.clock import monotonic
from meshbook.errors import CollectiveAborted, MeshbookError
from meshbook.ids import name_ranks
from meshbook.rank import coalesced
from meshbook.rank.backends import BackendHandle
from meshbook.rank.ring import Collective, CollectiveRing, GroupLabel, one_line_error
from meshbook.wire.stop_timing import REASON_TIMEOUT_S, WAIT_SLICE_S

WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)

_NO_TIMEOUT = timedelta(0)  # torch's value for "no timeout"

# Seconds that a collective waits to learn whether ranks are in step after a call that failed. The supervisor queries
# the ranks, for a second at most, as soon as the call has ended on all of them.
_HOLD_TIMEOUT_S = 5.0

# gloo completes these on its transport threads: a wait with a timeout closes the connection when it expires.
_POINT_TO_POINT = {"send", "recv", "recv_anysource"}

_rings_counting_captures: weakref.WeakSet[CollectiveRing] = weakref.WeakSet()


def count_captures(ring: CollectiveRing, graph_class: Any = None) -> None:
    """Have `ring.num_captures` count the CUDA graph captures in progress, from now on.

    Args:
        graph_class: the class whose `capture_begin` and `capture_end` are wrapped; None for torch's.
    """
    if ring in _rings_counting_captures:
        return
    _rings_counting_captures.add(ring)
    graph_class = torch.cuda.CUDAGraph if graph_class is None else graph_class
    begin, end = graph_class.capture_begin, graph_class.capture_end

    @functools.wraps(begin)
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        ring.num_captures += 1
        try:
            return begin(*args, **kwargs)
        except BaseException:
            ring.num_captures -= 1
            raise

    @functools.wraps(end)
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return end(*args, **kwargs)
        finally:
            ring.num_captures = max(0, ring.num_captures - 1)

    graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end


# The methods that are collectives: their public name, and the index of the argument that best describes this rank's
# input. (A gather has as many outputs as ranks, and they add nothing to its input.) The names are from two versions of
# torch: 2.13 calls those with "single" and falls back to the others, 2.11 has only the others.
COLLECTIVES = {
    "_allgather_base": ("all_gather_into_tensor", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "barrier": ("barrier", 0),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
}

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
    "set_timeout",
)

_OPTION_TYPES = frozenset(
    (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )
)


_BACKEND_TYPES = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


class GroupBroken(MeshbookError, RuntimeError):
    """Raised for a collective on a process group whose connections were aborted. The collective was not started."""


class Observer(Protocol):
    """Receives each collective with its tensors, for example to record a run for replay."""

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """Called before it starts. What this raises, the caller of the collective gets."""

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """Called after it succeeded. Its outputs, in `arguments`, are filled (on CUDA: for users of the stream)."""


class GroupFailure:
    """Why a group cannot be used any more.

    Attributes:
        error: what threads that wait in the group raise; None if each has an error of its own.
        reason: one line for every later caller.
    """

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        self.reason = reason
        self.error = error
        self.was_raised = False  # a thread has raised the error

    def error_to_raise(self) -> BaseException | None:
        """Return a copy of the error for one more thread, because raising writes a traceback into an exception."""
        if self.error is None:
            return None
        self.was_raised = True
        try:
            again = copy.copy(self.error)
        except Exception:  # its constructor does not accept its own args
            return self.error
        return again if type(again) is type(self.error) else self.error


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


def _collect_tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    found: list[torch.Tensor] = []
    if isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found.extend(_collect_tensors(item))
    return found


def _has_succeeded(work: Any) -> bool:
    """Whether the operation has completed without an error. Does not block."""
    if work is None or not work.is_completed():
        return False
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        return False
    return True


def _make_collective_method(method: str) -> Callable[..., Any]:
    """Return the method of `WatchedGroup` that wraps one collective."""
    op, input_index = COLLECTIVES[method]
    has_peer = method in ("send", "recv")  # the peer is the second argument, as a rank in the group
    in_slices = method not in _POINT_TO_POINT
    on_gloo = coalesced.ON_GLOO.get(method)

    def collective(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        # Every collective of a training step runs these lines, so helpers are called only for rare cases.
        if self.failure is not None or self.hold_event is not None:
            self._wait_until_allowed(op)
        if self._inner is None:
            self._owner.connect(self)
        inputs = args[input_index] if input_index < len(args) else args[0] if args else ()
        if type(inputs) is list and inputs and isinstance(inputs[0], torch.Tensor):
            tensors = inputs
        else:
            tensors = _collect_tensors(inputs)
        peer = self.label.ranks[int(args[1])] if has_peer and len(args) > 1 else None
        version, work, record = self._connection_version, None, None
        try:
            record = self._ring.begin(op, self.label, tensors, peer)
            arguments = self._notify_begun(record, args, kwargs) if self._owner.observers else None
            options = kwargs.get("opts") if kwargs else args[-1] if args else None
            on_nccl = self._has_nccl and self._uses_nccl(op, tensors, options)
            if on_gloo is not None and not on_nccl and len(args) >= 2:
                work = on_gloo(self._inner, *args, **kwargs)
            else:
                work = getattr(self._inner, method)(*args, **kwargs)
            if on_nccl:
                return self._wrap_launched(record, work, arguments)
            # torch.distributed's functions wait at once for a synchronous call, and take None as "has waited". Waiting
            # here avoids the Work object. No other caller passes asyncOp=False; C++ callers would crash on the None.
            if type(options) not in _OPTION_TYPES or options.asyncOp:  # type: ignore[union-attr]
                return WatchedWork(self, record, work, in_slices, arguments)
            if in_slices:
                self._wait_in_slices(work, _NO_TIMEOUT)
            else:
                work.wait()
        except BaseException as error:
            if record is None:
                self._mark_interrupted_start(op, error)
                raise
            try:
                raised = self._finish_failed(record, error, version, work, launched=work is not None)
            except BaseException as signal_error:  # a signal that arrived during the wait is delivered only here
                raised = self._finish_failed(record, signal_error, version, work, launched=work is not None)
            if raised is error:
                raise
            raise raised from None
        self._ring.finish(record)
        if arguments is not None:
            self._notify_finished(record, arguments)
        return None

    collective.__name__ = method
    collective.__qualname__ = f"WatchedGroup.{method}"
    return collective


def _delegated(name: str) -> Callable[..., Any]:
    """Return a method that delegates to the current real group."""

    def method(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"WatchedGroup.{name}"
    return method


class WatchedGroup(ProcessGroup):
    """A process group that wraps the real one; see the module.

    Attributes:
        label: its name and the global ranks of its members, for the ring.
        backends: the backend of each device type, {"cpu": "gloo"}.
        timeout: of its collectives, unless the call passes its own.
        options: NCCL options that the user passed; None without.
        failure: why it cannot be used now; None while it can. Set by any thread that breaks the group.
        hold_event: the event that a collective waits for before it starts; None for no wait.
        backend_handles: its real backends.
    """

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
        self.backends = dict(backends)
        self.timeout = timeout
        self.options = options
        self.failure: GroupFailure | None = None
        self.hold_event: threading.Event | None = None
        self.backend_handles: tuple[BackendHandle, ...] = ()
        self._owner = owner
        self._store = store
        self._ring = owner.ring
        self._has_nccl = "nccl" in self.backends.values()
        self._inner: Any = None
        self._registered = False
        # incremented with each new set of connections; results from older ones do not apply
        self._connection_version = 0
        self._lock = threading.Lock()
        self._failed_event = threading.Event()  # set when the group is broken
        self._pending_futures: dict[
            int, _AbortableFuture
        ] = {}  # incomplete futures that were handed out, by seq of their collective
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
        self._reset()

    def detach_backends(self) -> None:
        """Drop the real backends, until `attach_backends` or the first use sets new ones."""
        self._inner = None
        self.backend_handles = ()
        self._coalescing = None
        self._reset()

    # ---- failing

    def _reset(self) -> None:
        with self._lock:
            self._connection_version += 1
            self.failure = None
            self._failed_event.clear()

    def invalidate(self, failure: GroupFailure) -> None:
        """Refuse new collectives, and fail the futures that C++ waits for. Any thread; does not block."""
        with self._lock:
            self.failure = failure
            futures = list(self._pending_futures.values())
        self._failed_event.set()
        for future in futures:
            future.fail(failure.error_to_raise() or GroupBroken(failure.reason))

    def complete_futures(self) -> None:
        """Complete the futures of operations that have ended unnoticed. Any thread; does not block."""
        for future in list(self._pending_futures.values()):
            future.poll()

    def _wait_until_allowed(self, op: str) -> None:
        """Return when a collective may start, which may take a moment.

        Raises:
            CollectiveAborted: the group was broken because a member has left the running call.
            GroupBroken: the group is unusable, or whether it is usable is not known in time.
        """
        hold_event = self.hold_event
        if (
            hold_event is not None
            and self.failure is None
            and not hold_event.wait(_HOLD_TIMEOUT_S)
            and self.failure is None
        ):
            raise GroupBroken(
                f"{op} cannot run: the call before this one did not end well on this rank, and is not over on other "
                "ranks, so that nobody knows yet whether their collectives would match. Wait for it, or stop it"
            )
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure.error, CollectiveAborted):
            raise failure.error_to_raise() or failure.error
        raise GroupBroken(
            f"{op} cannot run: the process group of {name_ranks(self.label.ranks)} is broken "
            f"({failure.reason}). It is formed again before the next cell: run the cell again. "
            "If a rank is gone, that takes a new mesh: %mesh stop, then %mesh start"
        )

    def _mark_interrupted_start(self, op: str, error: BaseException) -> None:
        """Mark the group out of step: a signal arrived while a collective was recorded.

        That collective may count and has not started.
        """
        if isinstance(error, Exception):
            return
        self.label.is_doubtful = True
        self.failure = self.failure or GroupFailure(f"{op} was interrupted as it began")
        last = self._ring.last
        if last is not None and last.label is self.label:
            self._ring.finish(last, error)

    def _finish_failed(
        self, record: Collective, error: BaseException, version: int, work: Any, *, launched: bool
    ) -> BaseException:
        """Record the end of a collective that raised `error`, and return the exception for its caller.

        That is the error that the group was aborted with if it was, else `error` itself. May be called twice for one
        end, when a signal interrupts the first call.

        Args:
            version: the group's connection version when the collective began.
            work: the real operation, if there is one.
            launched: `error` was raised while waiting. Earlier failures most likely come from wrong arguments.
        """
        failed = isinstance(error, Exception)
        raised: BaseException | None = None
        if version != self._connection_version:
            if failed:
                raised = GroupBroken(f"{record.op} was under way when its process group was broken; its result is lost")
        else:
            # Whether this rank is out of step with the others from now on, however the user handles the exception.
            is_out_of_step = launched or "gloo/transport" in str(error) if failed else not _has_succeeded(work)
            if is_out_of_step and failed:
                self._failed_event.wait(REASON_TIMEOUT_S)
            failure = self.failure
            raised = failure.error_to_raise() if failed and failure is not None else None
            if is_out_of_step and failure is None:
                how = f"failed: {one_line_error(error)}" if failed else "was interrupted"
                self.failure = GroupFailure(f"{record.op} #{record.seq} {how}")
        self._ring.finish(record, raised or error)
        return raised or error

    # ---- waiting

    def _wait_in_slices(self, work: Any, timeout: timedelta) -> None:
        """Wait for a gloo operation such that signals are handled. Blocks.

        Raises:
            RuntimeError: `timeout` expired and the operation continues; or it failed, or the group was aborted.
            BaseException: what a signal handler raised.
        """
        try:
            self._wait_slice_by_slice(work, timeout)
        except KeyboardInterrupt as stop:
            stop.__context__ = None  # the timeout of a slice, an implementation detail
            raise

    def _wait_slice_by_slice(self, work: Any, timeout: timedelta) -> None:
        deadline = monotonic() + timeout.total_seconds() if timeout else float("inf")
        failed = False
        while True:
            slice_start = monotonic()
            remaining_s = deadline - slice_start
            slice_s = WAIT_SLICE_S if remaining_s > WAIT_SLICE_S else max(remaining_s, 0.001)
            try:
                work.wait(WAIT_SLICE if remaining_s > WAIT_SLICE_S else timedelta(seconds=slice_s))
                return
            except RuntimeError:
                # The slice expired, or the operation failed. gloo's `is_completed` does not distinguish them: for a
                # reduce_scatter it is always False. But a failed operation raises at once, and does so again.
                is_aborted = self.failure is not None and self.failure.error is not None
                at_once = monotonic() - slice_start < slice_s / 2
                if is_aborted or remaining_s <= WAIT_SLICE_S or (failed and at_once):
                    raise
                failed = at_once

    def _notify_begun(self, record: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        arguments = (*args, *kwargs.values())
        for observer in self._owner.observers:
            observer.begun(record, arguments)
        return arguments

    def _notify_finished(self, record: Collective, arguments: tuple[Any, ...]) -> None:
        for observer in self._owner.observers:
            observer.finished(record, arguments)

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
            return WatchedWork(self, record, work, None, arguments)
        self._finish_on_stream(record)  # a synchronous call, enqueued on the current stream
        self._raise_if_aborted(record)
        if arguments is not None:
            self._notify_finished(record, arguments)
        return None

    def _finish_on_stream(self, record: Collective) -> None:
        """Mark the collective as finished once the device has completed all work now on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            self._ring.finish(record)  # a graph under capture runs nothing, and its events cannot be queried
        else:
            count_captures(self._ring)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ring.set_completion_check(record, event.query, on_device=True)

    def _raise_if_aborted(self, record: Collective) -> None:
        """Raise if the group was aborted.

        An aborted NCCL collective returns as if successful, with garbage in its tensors.
        """
        raised = self.failure.error_to_raise() if self.failure is not None else None
        if raised is not None:
            self._ring.finish(record, raised)
            raise raised

    def _start_coalescing(self, device: torch.device) -> None:
        self._wait_until_allowed("a coalesced collective")
        self.inner._start_coalescing(device)
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        records, self._coalescing = self._coalescing or [], None
        try:
            work = self.inner._end_coalescing(device)
        except BaseException as error:
            for record in records:
                self._ring.finish(record, error)
            if records and self.failure is None:  # it is unknown which part of the batch was sent
                self.failure = GroupFailure(f"{records[-1].op} #{records[-1].seq} failed: {one_line_error(error)}")
            raise
        if work is None or not records:
            for record in records:
                self._ring.finish(record)
            return work
        watched = WatchedWork(self, records[-1], work, None, None)
        for record in records[:-1]:
            self._ring.set_completion_check(record, watched.is_finished, on_device=True)
        return watched

    # ---- what torch calls on a group

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

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Run gloo's barrier that names the missing ranks. Blocks, without slices; `abort` ends it."""
        self._wait_until_allowed("monitored_barrier")
        inner = self.inner
        record, version = self._ring.begin("monitored_barrier", self.label), self._connection_version
        try:
            inner.monitored_barrier(*args, **kwargs)
        except BaseException as error:
            try:
                raised = self._finish_failed(record, error, version, None, launched=True)
            except BaseException as signal_error:
                raised = self._finish_failed(record, signal_error, version, None, launched=True)
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
        self._wait_until_allowed("split_group")
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
        state = f"broken: {self.failure.reason}" if self.failure else "ok" if self.is_connected else "not connected yet"
        return f"<process group {self.label.name} of {name_ranks(self.label.ranks)}: {state}>"


for _name in COLLECTIVES:
    if hasattr(ProcessGroup, _name):
        setattr(WatchedGroup, _name, _make_collective_method(_name))
for _name in _DELEGATED:
    if hasattr(ProcessGroup, _name):
        setattr(WatchedGroup, _name, _delegated(_name))


class WatchedWork(Work):
    """An operation in flight, as returned for `async_op=True`, `isend` and callers in C++."""

    def __init__(
        self,
        group: WatchedGroup,
        record: Collective,
        work: Any,
        in_slices: bool | None,
        observed_arguments: tuple[Any, ...] | None,
    ) -> None:
        """
        Args:
            in_slices: None for NCCL, whose waits do not block.
            observed_arguments: None without observers.
        """
        super().__init__()
        self._group = group
        self._record = record
        self._work = work
        self._connection_version = group._connection_version
        self._in_slices = in_slices
        self._observed_arguments = observed_arguments
        self._future: Any = None
        this = weakref.ref(self)  # a strong reference from the ring would keep the tensors alive

        def is_finished() -> bool:
            watched = this()
            # Dropped without a wait: its state can no longer be queried, and does not matter.
            return watched is None or bool(watched._work.is_completed())

        self.is_finished = is_finished
        group._ring.set_completion_check(record, is_finished, on_device=in_slices is None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        group, record, work = self._group, self._record, self._work
        try:
            if self._in_slices:
                group._wait_in_slices(work, timeout)
            else:
                # On NCCL this only orders streams, unless there is a timeout; then it blocks until the device is done.
                work.wait(timeout) if timeout else work.wait()
                if self._in_slices is None:
                    group._finish_on_stream(record)
                    group._raise_if_aborted(record)
        except BaseException as error:
            if timeout and isinstance(error, RuntimeError) and group.failure is None and not work.is_completed():
                raise  # the caller's own timeout: the operation continues, and may be waited for again
            try:
                raised = group._finish_failed(record, error, self._connection_version, work, launched=True)
            except BaseException as signal_error:
                raised = group._finish_failed(record, signal_error, self._connection_version, work, launched=True)
            if raised is error:
                raise
            raise raised from None
        if self._in_slices is not None:
            group._ring.finish(record)
        if self._observed_arguments is not None:
            arguments, self._observed_arguments = self._observed_arguments, None
            group._notify_finished(record, arguments)
        return True

    def get_future(self) -> Any:
        """Return a future of the operation's tensors. On gloo it raises the abort error of the group, also in C++."""
        if self._in_slices is None:
            # Its value belongs to streams, which a new future would not track. This one runs callbacks at once, on a
            # stream that waits for the operation.
            future = self._work.get_future()
            future.add_done_callback(lambda _: self._group._finish_on_stream(self._record))
            return future
        if self._future is None:
            # the future may outlive this object
            self._group._ring.set_completion_check(self._record, None)
            self._future = _AbortableFuture(self._group, self._record, self._work).future
        return self._future


def _delegated_to_work(name: str) -> Callable[..., Any]:
    def method(self: WatchedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"WatchedWork.{name}"
    return method


for _name in (
    "_get_duration",
    "_get_op_type",
    "_source_rank",
    "block_current_stream",
    "exception",
    "get_future_result",
    "is_completed",
    "is_success",
    "result",
    "source_rank",
    "synchronize",
):
    if hasattr(Work, _name):
        setattr(WatchedWork, _name, _delegated_to_work(_name))


class _AbortableFuture:
    """A future of a gloo operation that `abort` can complete as well.

    DDP's reducer waits for such futures in C++, where a future cannot carry a Python exception: it takes the value and
    searches it for tensors. So a failed future holds an object that raises when it is accessed.
    """

    def __init__(self, group: WatchedGroup, record: Collective, work: Any) -> None:
        self._group, self._record, self._connection_version = group, record, group._connection_version
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._inner: Any = None
        with group._lock:
            group._pending_futures[record.seq] = self
            failure = group.failure
        if failure is not None:
            self.fail(failure.error_to_raise() or GroupBroken(failure.reason))
        self._inner = work.get_future()
        self._inner.add_done_callback(self._on_inner_done)

    def poll(self) -> None:
        """Complete it if gloo's future is done and its callback was lost.

        torch drops a KeyboardInterrupt in a callback.
        """
        if self._inner is not None and self._inner.done():
            self._on_inner_done(self._inner)

    def fail(self, error: BaseException) -> None:
        if self._claim():
            self._group._ring.finish(self._record, error)
            self._set_error(error)

    def _on_inner_done(self, future: Any) -> None:
        """Pass on gloo's result. Called on gloo's own thread."""
        try:
            value = future.value()
        except Exception as error:
            raised = self._group._finish_failed(self._record, error, self._connection_version, None, launched=True)
            if self._claim():
                self._set_error(raised)
            return
        if self._claim():
            self._group._ring.finish(self._record)
            self.future.set_result(value)

    def _claim(self) -> bool:
        """Return True to the first caller: a future can be completed once, by its operation or by an abort."""
        with self._group._lock:
            return self._group._pending_futures.pop(self._record.seq, None) is not None

    def _set_error(self, error: BaseException) -> None:
        self.future._set_unwrap_func(_RaiseOnAccess.raise_error)
        self.future.set_result(_RaiseOnAccess(error))


class _RaiseOnAccess:
    """Raises on access: in Python when the future unwraps it, in C++ in the pickler that searches for tensors."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_error(self) -> NoReturn:
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error
