"""A process group that watches and can be broken: every collective of a rank goes through one of these.

`WatchedGroup` is a `ProcessGroup` around the real one. torch and its users hold the wrapper, so the real backend
beneath can be replaced while a DeviceMesh, DDP or FSDP2 goes on using the same object. Each call is noted in the ring,
waits so that a signal gets through, and raises the reason when the group is broken.

Where there is a trampoline in C++ (DDP's reducer, functional collectives), calls from C++ arrive here too; the few
without one (gather, scatter, reduce and alltoall, which only Python calls) are overridden for Python callers.

Knows nothing of stores, epochs or how groups come to be; see `groups`.
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

_NO_TIMEOUT = timedelta(0)  # what torch takes for "no timeout"

# Seconds that a collective waits for the word on whether ranks are in step after a call that did not end well. The
# supervisor asks the ranks, for a second at most, as soon as the call is over on all of them.
_HOLD_TIMEOUT_S = 5.0

# gloo completes these on its transport threads: a wait with a time limit closes the connection when it runs out.
_POINT_TO_POINT = {"send", "recv", "recv_anysource"}

_rings_counting_captures: weakref.WeakSet[CollectiveRing] = weakref.WeakSet()


def count_captures(ring: CollectiveRing, graph_class: Any = None) -> None:
    """From now on `ring.num_captures` counts the CUDA graphs that are being captured.

    Args:
        graph_class: the class whose `capture_begin` and `capture_end` are followed; None for torch's.
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


# The methods that are collectives: what users call them, and which argument says best what this rank puts in. (The
# outputs of a gather are as many as there are ranks, and say nothing that its input does not.) There are names of two
# generations: torch 2.13 calls those with "single" and falls back to the others, 2.11 knows only the others.
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

# Questions about the real group that its wrapper passes on to whatever is beneath it now.
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
    """A collective on a process group whose connections were given up. It was not started."""


class Observer(Protocol):
    """Somebody who sees each collective with its tensors: what records a run so that it can be replayed."""

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """Before it starts. What this raises, the caller of the collective sees."""

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """It succeeded and its outputs, among `arguments`, are filled (on CUDA: for whoever uses the same stream)."""


class GroupFailure:
    """Why a group cannot be used any more.

    Attributes:
        error: what those who wait in it get; None if each has an error of its own.
        reason: one line for everybody who comes later.
    """

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        self.reason = reason
        self.error = error
        self.was_raised = False  # somebody has had the error

    def error_to_raise(self) -> BaseException | None:
        """The error for one more thread: its own copy, because raising writes a traceback into an exception."""
        if self.error is None:
            return None
        self.was_raised = True
        try:
            again = copy.copy(self.error)
        except Exception:  # a constructor that cannot be called with its own args
            return self.error
        return again if type(again) is type(self.error) else self.error


class GroupOwner(Protocol):
    """What a group asks of those who made it."""

    @property
    def ring(self) -> CollectiveRing: ...

    @property
    def observers(self) -> Sequence[Observer]: ...

    def connect(self, group: WatchedGroup) -> None:
        """Give the group its real backends. Blocks until all members have come."""

    def unregister(self, group: WatchedGroup) -> None:
        """The group was destroyed."""

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """A new group like `parent`, of the given global ranks, this one among them. Blocks as `connect`."""


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
    """The operation is through, and all is well. Does not wait."""
    if work is None or not work.is_completed():
        return False
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        return False
    return True


def _make_collective_method(method: str) -> Callable[..., Any]:
    """The method of `WatchedGroup` that stands for one collective."""
    op, input_index = COLLECTIVES[method]
    has_peer = method in ("send", "recv")  # as the second argument, by rank in the group
    in_slices = method not in _POINT_TO_POINT
    on_gloo = coalesced.ON_GLOO.get(method)

    def collective(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        # Every collective of a training step pays for each line here; helpers are called only for what is rare.
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
            # torch.distributed's functions wait at once for what is not async, and take None for "has waited". Waiting
            # here spares the Work object. Nobody else passes asyncOp=False: C++ callers would not survive the None.
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
            except BaseException as signal_error:  # one that came during the wait is delivered only here
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
    """A method that asks whatever is beneath the wrapper now."""

    def method(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"WatchedGroup.{name}"
    return method


class WatchedGroup(ProcessGroup):
    """See the module.

    Attributes:
        label: its name and the global ranks of its members, for the ring.
        backends: which backend serves which type of device, {"cpu": "gloo"}.
        timeout: of its collectives, unless the call brings its own.
        options: NCCL options that the user gave; None without.
        broken: why it cannot be used now; None while it can. Set by whoever breaks it, in any thread.
        held: what a collective waits for before it begins; None: nothing.
        links: its real backends.
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
        # Of the two constructors only this one makes an object that C++ calls back; torch's stubs know the other.
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
        self._connection_version = 0  # of its connections: what was begun on former ones says nothing about these
        self._lock = threading.Lock()
        self._failed_event = threading.Event()  # that somebody broke it
        self._pending_futures: dict[
            int, _AbortableFuture
        ] = {}  # futures that are out and not complete, by their collective's seq
        self._coalescing: list[Collective] | None = None

    # ---- the real group beneath

    @property
    def inner(self) -> Any:
        """The real process group. Connects first where that was put off: may block."""
        if self._inner is None:
            self._owner.connect(self)
        return self._inner

    @property
    def is_connected(self) -> bool:
        return self._inner is not None

    def attach_backends(self, handles: Sequence[BackendHandle], store: Store) -> None:
        """These are its real backends from now on, and its corner of the store; a former break is mended."""
        by_kind = {handle.kind: handle.backend for handle in handles}
        inner = ProcessGroup(store, self.rank(), self.size())
        # C++ code that asks the wrapper itself for a backend gets the first one it ever had: a process group registers
        # a type of backend once. That is DDP's logger, which reads its number of threads. Collectives come here first.
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
        """Without real backends, until `adopt` or the first use brings some."""
        self._inner = None
        self.backend_handles = ()
        self._coalescing = None
        self._reset()

    # ---- breaking

    def _reset(self) -> None:
        with self._lock:
            self._connection_version += 1
            self.failure = None
            self._failed_event.clear()

    def invalidate(self, failure: GroupFailure) -> None:
        """Refuse new collectives, and end the futures that C++ waits for. Any thread; does not wait."""
        with self._lock:
            self.failure = failure
            futures = list(self._pending_futures.values())
        self._failed_event.set()
        for future in futures:
            future.fail(failure.error_to_raise() or GroupBroken(failure.reason))

    def complete_futures(self) -> None:
        """Of operations that have ended unnoticed. Any thread; does not wait."""
        for future in list(self._pending_futures.values()):
            future.poll()

    def _wait_until_allowed(self, op: str) -> None:
        """Let a collective begin, perhaps after a moment.

        Raises:
            CollectiveAborted: the group was broken because a member has left the call that runs.
            GroupBroken: it cannot be used, or whether it can is not known in time.
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
        """A signal has come as a collective was noted, so that it may count and has not begun: out of step."""
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
        """End a collective that raised `error`, and return what its caller should see: what the group was severed with
        if it was, or else `error` itself.

        May be called twice for one end, when a signal interrupts the first call.

        Args:
            version: the group's, when the collective began.
            work: the real operation, if there is one.
            launched: `error` came while waiting. What fails before that was most likely called with wrong arguments.
        """
        failed = isinstance(error, Exception)
        raised: BaseException | None = None
        if version != self._connection_version:
            if failed:
                raised = GroupBroken(f"{record.op} was under way when its process group was broken; its result is lost")
        else:
            # Out of step with the other ranks from now on, whatever the user does about the exception?
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
        """Wait for one of gloo's operations so that signals get through. Blocks.

        Raises:
            RuntimeError: `timeout` passed, and the operation goes on; or it failed, or the group was severed.
            BaseException: what a signal handler raised.
        """
        try:
            self._wait_slice_by_slice(work, timeout)
        except KeyboardInterrupt as stop:
            stop.__context__ = None  # the end of a slice, which is nobody's business
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
                # The slice ran out, or the operation failed. gloo's `is_completed` does not tell which: of a
                # reduce_scatter it is False for ever. But a failed operation raises at once, and so again.
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

    # ---- NCCL: its waits only order streams, so nothing is sliced; what is stuck is stuck on the device

    def _uses_nccl(self, op: str, tensors: Sequence[torch.Tensor], options: Any) -> bool:
        if tensors:
            return tensors[0].is_cuda
        device: torch.device | None = getattr(options, "device", None)
        if device is None or device.type == "cuda":
            return True  # the default of a group that has it
        if op == "barrier":
            # torch chooses gloo's, where a wait can be interrupted. NCCL's would also wait for what is enqueued before
            # it, and code that reads a clock after a barrier counts on that.
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
        """The collective ends when the device has done all that is on the current stream now."""
        if torch.cuda.is_current_stream_capturing():
            self._ring.finish(record)  # a graph that is being captured runs nothing, and events in it cannot be asked
        else:
            count_captures(self._ring)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ring.set_completion_check(record, event.query, on_device=True)

    def _raise_if_aborted(self, record: Collective) -> None:
        """An aborted NCCL collective returns as if it had succeeded, with garbage in its tensors."""
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
            if records and self.failure is None:  # what of the batch was sent is not known
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

    # ---- what torch asks a group

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.backends]

    def getBackendName(self) -> str:
        """The name torch's C++ code knows it by. DDP's logger counts on a gloo backend in what calls itself gloo."""
        return "nccl" if self._has_nccl else "gloo"

    def _set_group_name(self, name: Any) -> None:
        if self._registered:  # without a backend to keep it, the base class has nowhere to put a name
            super()._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self.label.name

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """gloo's barrier that names who is missing. Blocks, without slices; severing ends it."""
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
        """A watched group of some of the members (ranks in this group), as `dist.split_group` asks for it.

        All members call it; those that are not named get None.
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
        """Called by torch when the group is destroyed."""
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
    """An operation under way, as `async_op=True`, `isend` and callers in C++ get it."""

    def __init__(
        self,
        group: WatchedGroup,
        record: Collective,
        work: Any,
        in_slices: bool | None,
        observed_arguments: tuple[Any, ...] | None,
    ) -> None:
        """`in_slices` is None for NCCL, whose waits do not block; `observed_arguments` is None if nobody observes."""
        super().__init__()
        self._group = group
        self._record = record
        self._work = work
        self._connection_version = group._connection_version
        self._in_slices = in_slices
        self._observed_arguments = observed_arguments
        self._future: Any = None
        this = weakref.ref(self)  # a ring that held the operation would hold its tensors

        def is_finished() -> bool:
            watched = this()
            # Dropped without a wait: nobody can ask any more, and nobody minds.
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
                raise  # the caller's own time limit: the operation goes on, and may be waited for again
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
        """Completes with the operation's tensors. On gloo it raises, also in C++, what the group is severed with."""
        if self._in_slices is None:
            # Its value belongs to streams, which a future of ours would not know. It runs callbacks at once, on a
            # stream that waits for the operation.
            future = self._work.get_future()
            future.add_done_callback(lambda _: self._group._finish_on_stream(self._record))
            return future
        if self._future is None:
            self._group._ring.set_completion_check(
                self._record, None
            )  # whoever holds the future need not hold this object
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
    """A future of one of gloo's operations that a break can end as well.

    DDP's reducer waits for such futures in C++, where a future cannot carry a Python exception: it takes the value and
    searches it for tensors. So one that failed holds an object that raises when it is looked into.
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
        """Complete it if gloo's has ended and this one has not heard: a KeyboardInterrupt in a callback is dropped."""
        if self._inner is not None and self._inner.done():
            self._on_inner_done(self._inner)

    def fail(self, error: BaseException) -> None:
        if self._claim():
            self._group._ring.finish(self._record, error)
            self._set_error(error)

    def _on_inner_done(self, future: Any) -> None:
        """Called by gloo's own thread."""
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
        """True for the first who asks: a future can be completed once, and both its end and a break want to."""
        with self._group._lock:
            return self._group._pending_futures.pop(self._record.seq, None) is not None

    def _set_error(self, error: BaseException) -> None:
        self.future._set_unwrap_func(_RaiseOnAccess.raise_error)
        self.future.set_result(_RaiseOnAccess(error))


class _RaiseOnAccess:
    """Raises when looked into: by Python callers as the future unwraps it, by C++ in the pickler that seeks tensors."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_error(self) -> NoReturn:
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error
