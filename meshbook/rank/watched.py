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
from meshbook.rank.backends import Link
from meshbook.rank.ring import Collective, Label, Ring, one_line
from meshbook.wire.stop import REASON_S, SLICE_S

SLICE = timedelta(seconds=SLICE_S)

_FOREVER = timedelta(0)  # what torch takes for "no timeout"

# Seconds that a collective waits for the word on whether ranks are in step after a call that did not end well. The
# supervisor asks the ranks, for a second at most, as soon as the call is over on all of them.
_HELD_S = 5.0

# gloo completes these on its transport threads: a wait with a time limit closes the connection when it runs out.
_POINT_TO_POINT = {"send", "recv", "recv_anysource"}

_counted: weakref.WeakSet[Ring] = weakref.WeakSet()


def count_captures(ring: Ring, graphs: Any = None) -> None:
    """From now on `ring.num_captures` counts the CUDA graphs that are being captured.

    Args:
        graphs: the class whose `capture_begin` and `capture_end` are followed; None for torch's.
    """
    if ring in _counted:
        return
    _counted.add(ring)
    graphs = torch.cuda.CUDAGraph if graphs is None else graphs
    begin, end = graphs.capture_begin, graphs.capture_end

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

    graphs.capture_begin, graphs.capture_end = capture_begin, capture_end


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
_PASSED_ON = (
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


class Break:
    """Why a group cannot be used any more.

    Attributes:
        error: what those who wait in it get; None if each has an error of its own.
        reason: one line for everybody who comes later.
    """

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        self.reason = reason
        self.error = error
        self.was_raised = False  # somebody has had the error

    def raised(self) -> BaseException | None:
        """The error for one more thread: its own copy, because raising writes a traceback into an exception."""
        if self.error is None:
            return None
        self.was_raised = True
        try:
            again = copy.copy(self.error)
        except Exception:  # a constructor that cannot be called with its own args
            return self.error
        return again if type(again) is type(self.error) else self.error


class Owner(Protocol):
    """What a group asks of those who made it."""

    @property
    def ring(self) -> Ring: ...

    @property
    def observers(self) -> Sequence[Observer]: ...

    def connect(self, group: WatchedGroup) -> None:
        """Give the group its real backends. Blocks until all members have come."""

    def forget(self, group: WatchedGroup) -> None:
        """The group was destroyed."""

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """A new group like `parent`, of the given global ranks, this one among them. Blocks as `connect`."""


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    found: list[torch.Tensor] = []
    if isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found.extend(_tensors(item))
    return found


def _succeeded(work: Any) -> bool:
    """The operation is through, and all is well. Does not wait."""
    if work is None or not work.is_completed():
        return False
    try:
        work.wait(SLICE)
    except RuntimeError:
        return False
    return True


def _collective(method: str) -> Callable[..., Any]:
    """The method of `WatchedGroup` that stands for one collective."""
    op, telling = COLLECTIVES[method]
    names_peer = method in ("send", "recv")  # as the second argument, by rank in the group
    slices = method not in _POINT_TO_POINT
    on_gloo = coalesced.ON_GLOO.get(method)

    def collective(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        # Every collective of a training step pays for each line here; helpers are called only for what is rare.
        if self.broken is not None or self.held is not None:
            self._admit(op)
        if self._inner is None:
            self._owner.connect(self)
        put_in = args[telling] if telling < len(args) else args[0] if args else ()
        if type(put_in) is list and put_in and isinstance(put_in[0], torch.Tensor):
            tensors = put_in
        else:
            tensors = _tensors(put_in)
        peer = self.label.ranks[int(args[1])] if names_peer and len(args) > 1 else None
        age, work, record = self._age, None, None
        try:
            record = self._ring.begin(op, self.label, tensors, peer)
            arguments = self._tell_begun(record, args, kwargs) if self._owner.observers else None
            options = kwargs.get("opts") if kwargs else args[-1] if args else None
            on_nccl = self._has_nccl and self._goes_to_nccl(op, tensors, options)
            if on_gloo is not None and not on_nccl and len(args) >= 2:
                work = on_gloo(self._inner, *args, **kwargs)
            else:
                work = getattr(self._inner, method)(*args, **kwargs)
            if on_nccl:
                return self._launched(record, work, arguments)
            # torch.distributed's functions wait at once for what is not async, and take None for "has waited". Waiting
            # here spares the Work object. Nobody else passes asyncOp=False: C++ callers would not survive the None.
            if type(options) not in _OPTION_TYPES or options.asyncOp:  # type: ignore[union-attr]
                return WatchedWork(self, record, work, slices, arguments)
            if slices:
                self._wait_in_slices(work, _FOREVER)
            else:
                work.wait()
        except BaseException as error:
            if record is None:
                self._cut_short(op, error)
                raise
            try:
                told = self._outcome(record, error, age, work, launched=work is not None)
            except BaseException as signalled:  # one that came during the wait is delivered only here
                told = self._outcome(record, signalled, age, work, launched=work is not None)
            if told is error:
                raise
            raise told from None
        self._ring.finish(record)
        if arguments is not None:
            self._tell_finished(record, arguments)
        return None

    collective.__name__ = method
    collective.__qualname__ = f"WatchedGroup.{method}"
    return collective


def _passed_on(name: str) -> Callable[..., Any]:
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
        owner: Owner,
        label: Label,
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
        self.broken: Break | None = None
        self.held: threading.Event | None = None
        self.links: tuple[Link, ...] = ()
        self._owner = owner
        self._store = store
        self._ring = owner.ring
        self._has_nccl = "nccl" in self.backends.values()
        self._inner: Any = None
        self._registered = False
        self._age = 0  # of its connections: what was begun on former ones says nothing about these
        self._lock = threading.Lock()
        self._told = threading.Event()  # that somebody broke it
        self._promised: dict[int, _Promise] = {}  # futures that are out and not complete, by their collective's seq
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

    def adopt(self, links: Sequence[Link], store: Store) -> None:
        """These are its real backends from now on, and its corner of the store; a former break is mended."""
        by_kind = {link.kind: link.backend for link in links}
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
        self.links = tuple(links)
        self._store = store
        self._coalescing = None
        self._inner = inner
        self._mend()

    def let_go(self) -> None:
        """Without real backends, until `adopt` or the first use brings some."""
        self._inner = None
        self.links = ()
        self._coalescing = None
        self._mend()

    # ---- breaking

    def _mend(self) -> None:
        with self._lock:
            self._age += 1
            self.broken = None
            self._told.clear()

    def break_off(self, cause: Break) -> None:
        """Refuse new collectives, and end the futures that C++ waits for. Any thread; does not wait."""
        with self._lock:
            self.broken = cause
            promised = list(self._promised.values())
        self._told.set()
        for promise in promised:
            promise.fail(cause.raised() or GroupBroken(cause.reason))

    def complete_futures(self) -> None:
        """Of operations that have ended unnoticed. Any thread; does not wait."""
        for promise in list(self._promised.values()):
            promise.look()

    def _admit(self, op: str) -> None:
        """Let a collective begin, perhaps after a moment.

        Raises:
            CollectiveAborted: the group was broken because a member has left the call that runs.
            GroupBroken: it cannot be used, or whether it can is not known in time.
        """
        held = self.held
        if held is not None and self.broken is None and not held.wait(_HELD_S) and self.broken is None:
            raise GroupBroken(
                f"{op} cannot run: the call before this one did not end well on this rank, and is not over on other "
                "ranks, so that nobody knows yet whether their collectives would match. Wait for it, or stop it"
            )
        cause = self.broken
        if cause is None:
            return
        if isinstance(cause.error, CollectiveAborted):
            raise cause.raised() or cause.error
        raise GroupBroken(
            f"{op} cannot run: the process group of {name_ranks(self.label.ranks)} is broken "
            f"({cause.reason}). It is formed again before the next cell: run the cell again. "
            "If a rank is gone, that takes a new mesh: %mesh stop, then %mesh start"
        )

    def _cut_short(self, op: str, error: BaseException) -> None:
        """A signal has come as a collective was noted, so that it may count and has not begun: out of step."""
        if isinstance(error, Exception):
            return
        self.label.is_doubtful = True
        self.broken = self.broken or Break(f"{op} was interrupted as it began")
        last = self._ring.last
        if last is not None and last.label is self.label:
            self._ring.finish(last, error)

    def _outcome(
        self, record: Collective, error: BaseException, age: int, work: Any, *, launched: bool
    ) -> BaseException:
        """End a collective that raised `error`, and return what its caller should see: what the group was severed with
        if it was, or else `error` itself.

        May be called twice for one end, when a signal interrupts the first call.

        Args:
            age: the group's, when the collective began.
            work: the real operation, if there is one.
            launched: `error` came while waiting. What fails before that was most likely called with wrong arguments.
        """
        failed = isinstance(error, Exception)
        told: BaseException | None = None
        if age != self._age:
            if failed:
                told = GroupBroken(f"{record.op} was under way when its process group was broken; its result is lost")
        else:
            # Out of step with the other ranks from now on, whatever the user does about the exception?
            broke = launched or "gloo/transport" in str(error) if failed else not _succeeded(work)
            if broke and failed:
                self._told.wait(REASON_S)
            cause = self.broken
            told = cause.raised() if failed and cause is not None else None
            if broke and cause is None:
                how = f"failed: {one_line(error)}" if failed else "was interrupted"
                self.broken = Break(f"{record.op} #{record.seq} {how}")
        self._ring.finish(record, told or error)
        return told or error

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
            began = monotonic()
            left = deadline - began
            slice_s = SLICE_S if left > SLICE_S else max(left, 0.001)
            try:
                work.wait(SLICE if left > SLICE_S else timedelta(seconds=slice_s))
                return
            except RuntimeError:
                # The slice ran out, or the operation failed. gloo's `is_completed` does not tell which: of a
                # reduce_scatter it is False for ever. But a failed operation raises at once, and so again.
                severed = self.broken is not None and self.broken.error is not None
                at_once = monotonic() - began < slice_s / 2
                if severed or left <= SLICE_S or (failed and at_once):
                    raise
                failed = at_once

    def _tell_begun(self, record: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        arguments = (*args, *kwargs.values())
        for observer in self._owner.observers:
            observer.begun(record, arguments)
        return arguments

    def _tell_finished(self, record: Collective, arguments: tuple[Any, ...]) -> None:
        for observer in self._owner.observers:
            observer.finished(record, arguments)

    # ---- NCCL: its waits only order streams, so nothing is sliced; what is stuck is stuck on the device

    def _goes_to_nccl(self, op: str, tensors: Sequence[torch.Tensor], options: Any) -> bool:
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

    def _launched(self, record: Collective, work: Any, arguments: tuple[Any, ...] | None) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(record)
            return work
        if work is not None:
            return WatchedWork(self, record, work, None, arguments)
        self._settle_on_stream(record)  # a synchronous call, enqueued on the current stream
        self._raise_if_severed(record)
        if arguments is not None:
            self._tell_finished(record, arguments)
        return None

    def _settle_on_stream(self, record: Collective) -> None:
        """The collective ends when the device has done all that is on the current stream now."""
        if torch.cuda.is_current_stream_capturing():
            self._ring.finish(record)  # a graph that is being captured runs nothing, and events in it cannot be asked
        else:
            count_captures(self._ring)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._ring.settle_by(record, event.query, on_device=True)

    def _raise_if_severed(self, record: Collective) -> None:
        """An aborted NCCL collective returns as if it had succeeded, with garbage in its tensors."""
        told = self.broken.raised() if self.broken is not None else None
        if told is not None:
            self._ring.finish(record, told)
            raise told

    def _start_coalescing(self, device: torch.device) -> None:
        self._admit("a coalesced collective")
        self.inner._start_coalescing(device)
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        records, self._coalescing = self._coalescing or [], None
        try:
            work = self.inner._end_coalescing(device)
        except BaseException as error:
            for record in records:
                self._ring.finish(record, error)
            if records and self.broken is None:  # what of the batch was sent is not known
                self.broken = Break(f"{records[-1].op} #{records[-1].seq} failed: {one_line(error)}")
            raise
        if work is None or not records:
            for record in records:
                self._ring.finish(record)
            return work
        watched = WatchedWork(self, records[-1], work, None, None)
        for record in records[:-1]:
            self._ring.settle_by(record, watched.finished, on_device=True)
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
        self._admit("monitored_barrier")
        inner = self.inner
        record, age = self._ring.begin("monitored_barrier", self.label), self._age
        try:
            inner.monitored_barrier(*args, **kwargs)
        except BaseException as error:
            try:
                told = self._outcome(record, error, age, None, launched=True)
            except BaseException as signalled:
                told = self._outcome(record, signalled, age, None, launched=True)
            if told is error:
                raise
            raise told from None
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
        self._admit("split_group")
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
        self._owner.forget(self)
        if inner is not None:
            inner.shutdown()

    def __repr__(self) -> str:
        state = f"broken: {self.broken.reason}" if self.broken else "ok" if self.is_connected else "not connected yet"
        return f"<process group {self.label.name} of {name_ranks(self.label.ranks)}: {state}>"


for _name in COLLECTIVES:
    if hasattr(ProcessGroup, _name):
        setattr(WatchedGroup, _name, _collective(_name))
for _name in _PASSED_ON:
    if hasattr(ProcessGroup, _name):
        setattr(WatchedGroup, _name, _passed_on(_name))


class WatchedWork(Work):
    """An operation under way, as `async_op=True`, `isend` and callers in C++ get it."""

    def __init__(
        self,
        group: WatchedGroup,
        record: Collective,
        work: Any,
        slices: bool | None,
        observed: tuple[Any, ...] | None,
    ) -> None:
        """`slices` is None for NCCL, whose waits do not block; `observed` are the arguments, if anybody observes."""
        super().__init__()
        self._group = group
        self._record = record
        self._work = work
        self._age = group._age
        self._slices = slices
        self._observed = observed
        self._future: Any = None
        this = weakref.ref(self)  # a ring that held the operation would hold its tensors

        def finished() -> bool:
            watched = this()
            # Dropped without a wait: nobody can ask any more, and nobody minds.
            return watched is None or bool(watched._work.is_completed())

        self.finished = finished
        group._ring.settle_by(record, finished, on_device=slices is None)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        group, record, work = self._group, self._record, self._work
        try:
            if self._slices:
                group._wait_in_slices(work, timeout)
            else:
                # On NCCL this only orders streams, unless there is a timeout; then it blocks until the device is done.
                work.wait(timeout) if timeout else work.wait()
                if self._slices is None:
                    group._settle_on_stream(record)
                    group._raise_if_severed(record)
        except BaseException as error:
            if timeout and isinstance(error, RuntimeError) and group.broken is None and not work.is_completed():
                raise  # the caller's own time limit: the operation goes on, and may be waited for again
            try:
                told = group._outcome(record, error, self._age, work, launched=True)
            except BaseException as signalled:
                told = group._outcome(record, signalled, self._age, work, launched=True)
            if told is error:
                raise
            raise told from None
        if self._slices is not None:
            group._ring.finish(record)
        if self._observed is not None:
            observed, self._observed = self._observed, None
            group._tell_finished(record, observed)
        return True

    def get_future(self) -> Any:
        """Completes with the operation's tensors. On gloo it raises, also in C++, what the group is severed with."""
        if self._slices is None:
            # Its value belongs to streams, which a future of ours would not know. It runs callbacks at once, on a
            # stream that waits for the operation.
            future = self._work.get_future()
            future.add_done_callback(lambda _: self._group._settle_on_stream(self._record))
            return future
        if self._future is None:
            self._group._ring.settle_by(self._record, None)  # whoever holds the future need not hold this object
            self._future = _Promise(self._group, self._record, self._work).future
        return self._future


def _of_the_work(name: str) -> Callable[..., Any]:
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
        setattr(WatchedWork, _name, _of_the_work(_name))


class _Promise:
    """A future of one of gloo's operations that a break can end as well.

    DDP's reducer waits for such futures in C++, where a future cannot carry a Python exception: it takes the value and
    searches it for tensors. So one that failed holds an object that raises when it is looked into.
    """

    def __init__(self, group: WatchedGroup, record: Collective, work: Any) -> None:
        self._group, self._record, self._age = group, record, group._age
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._inner: Any = None
        with group._lock:
            group._promised[record.seq] = self
            cause = group.broken
        if cause is not None:
            self.fail(cause.raised() or GroupBroken(cause.reason))
        self._inner = work.get_future()
        self._inner.add_done_callback(self._ended)

    def look(self) -> None:
        """Complete it if gloo's has ended and this one has not heard: a KeyboardInterrupt in a callback is dropped."""
        if self._inner is not None and self._inner.done():
            self._ended(self._inner)

    def fail(self, error: BaseException) -> None:
        if self._mine():
            self._group._ring.finish(self._record, error)
            self._end(error)

    def _ended(self, future: Any) -> None:
        """Called by gloo's own thread."""
        try:
            value = future.value()
        except Exception as error:
            told = self._group._outcome(self._record, error, self._age, None, launched=True)
            if self._mine():
                self._end(told)
            return
        if self._mine():
            self._group._ring.finish(self._record)
            self.future.set_result(value)

    def _mine(self) -> bool:
        """True for the first who asks: a future can be completed once, and both its end and a break want to."""
        with self._group._lock:
            return self._group._promised.pop(self._record.seq, None) is not None

    def _end(self, error: BaseException) -> None:
        self.future._set_unwrap_func(_Raises.now)
        self.future.set_result(_Raises(error))


class _Raises:
    """Raises when looked into: by Python callers as the future unwraps it, by C++ in the pickler that seeks tensors."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def now(self) -> NoReturn:
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error
