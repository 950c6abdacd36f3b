"""The process groups of a rank: formed at its start, aborted to free waiting threads, and formed again.

`ProcessGroups` makes every process group of its process a `WatchedGroup`, whether `form`, a DeviceMesh or the user's
own `dist.new_group` creates it. So it can end all stuck operations (`abort`), and afterwards give the same objects new
connections, also to a member that is a new process (`form` with the next generation).

Each generation has its own prefix in the store, `e<generation>/<group>`, so keys of a former generation are never read.

Re-forming cannot restore what users' objects had in flight when the groups broke. DDP and FSDP2 are made to forget an
unfinished step (`interrupted_steps`). And an aborted collective may have completed on some ranks and not on others:
parameters can differ by one step, and only the user's program, or a checkpoint, can tell.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshbook.errors import MeshShapeError
from meshbook.rank import backends
from meshbook.rank.backends import BackendHandle
from meshbook.rank.interrupted_steps import is_mid_step, num_rebucketed_models, reset_interrupted_steps
from meshbook.rank.process_group import GroupBroken, GroupFailure, Observer, WatchedGroup
from meshbook.rank.ring import CollectiveRing, GroupLabel, one_line_error
from meshbook.rank.store import MeshStore

__all__ = ["GroupBroken", "Observer", "ProcessGroups", "WatchedGroup"]

# torch's module of process groups; its state has no other API.
c10d: Any = dist.distributed_c10d

# The backend name of these groups while torch creates them. Users never see it: `dist.get_backend()` returns the name
# that they requested.
_BACKEND_NAME = "meshbook"

# Seconds until gloo times out a collective: torch's default. An interrupt or the supervisor acts sooner.
_COLLECTIVE_TIMEOUT_S = 1800.0

# Seconds that an NCCL abort may take before its rank counts as lost. Others report 0.15 s (NeMo-RL) when it works.
_ABORT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class _MeshLayout:
    """What must be unchanged for groups to be formed again in place."""

    rank: int
    world_size: int
    device: torch.device
    axes: tuple[tuple[str, int], ...]


class ProcessGroups:
    """All process groups of this process. One per rank.

    Call `form` and `close` on the main thread; `abort`, `is_broken` and `failure_reason` on any thread.

    Attributes:
        ring: where collectives are recorded.
        observers: further receivers of each collective; append and remove between collectives.
        generation: of the current groups; None before the first.
        mesh: the DeviceMesh of all ranks; None before the first generation.
    """

    def __init__(
        self,
        ring: CollectiveRing,
        *,
        collective_timeout_s: float = _COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """
        Args:
            collective_timeout_s: of the groups that `form` makes, on gloo.
        """
        self.ring = ring
        self.observers: list[Observer] = []
        self.generation: int | None = None
        self.mesh: DeviceMesh | None = None
        self._collective_timeout = timedelta(seconds=collective_timeout_s)
        self._store: Store | None = None
        self._form_timeout_s: float | None = None  # only while forming
        self._layout: _MeshLayout | None = None
        self._groups_by_name: dict[str, WatchedGroup] = {}
        self._mesh_group_names: set[str] = set()  # names of the groups that `form` itself made, which every rank has
        self._user_group_ranks: dict[
            str, set[int]
        ] = {}  # other groups at the start of this generation, and the ranks that had them
        self._num_connects: Counter[str] = Counter()  # a group that is destroyed and recreated may have its former name
        self._requested_backends: dict[str, str] = {}  # backends of the group being created
        self._lock = threading.Lock()
        self._abort_failure: GroupFailure | None = None
        self._abort_thread: threading.Thread | None = None
        self._hold_event: threading.Event | None = None
        self._connecting: list[GroupLabel] = []
        self._is_backward_incomplete = False  # a backward pass of the running call did not complete
        self._num_rendezvous = 0  # threads that wait for the store or for peers to connect
        self._patches: list[tuple[Any, str, Any]] = []  # module, name, original function
        ring.skip_frames_of(Path(torch.__file__).parent)
        # its wrapper of deprecated functions lies between the user's frame and torch
        ring.skip_frames_of(typing_extensions.__file__)

    # ---- state

    @property
    def is_broken(self) -> bool:
        """Whether any group is unusable until the next `form`."""
        return self.failure_reason is not None

    @property
    def failure_reason(self) -> str | None:
        if self._abort_failure is not None:
            return self._abort_failure.reason
        for group in list(self._groups_by_name.values()):
            if group.failure is not None:
                return group.failure.reason
        return None

    def abort(self, error: BaseException, *, generation: int | None = None) -> None:
        """End every wait in a collective with `error`, in all threads, and break all groups. Any thread.

        Does not wait for those threads. Each gets its own copy of `error`. On gloo they raise it within milliseconds.
        On CUDA a thread that waits for the device (`.item()`, `synchronize`) returns as if successful, and only its
        next collective raises, so check `is_broken` too before using a result.

        Args:
            generation: break only the groups of this generation; a no-op when newer groups have replaced them.
        """
        with self._lock:
            if generation is not None and generation != self.generation:
                return
            failure = GroupFailure(str(error).splitlines()[0] if str(error) else type(error).__name__, error)
            if self._abort_failure is None:
                self._abort_failure = failure
            groups = list(self._groups_by_name.values())
            handles = [handle for group in groups for handle in group.backend_handles]
            if self._num_rendezvous > 0 and isinstance(self._store, MeshStore):
                self._store.cancel_waits()
        for group in groups:
            group.invalidate(failure)
        self.resume_collectives()
        self._abort_backends(handles)

    def complete_futures(self) -> None:
        """Complete the futures of collectives that have ended unnoticed. Any thread; does not block."""
        for group in self.all_groups():
            group.complete_futures()

    @property
    def abort_failure(self) -> GroupFailure | None:
        """The failure that all groups were aborted with since they were formed."""
        return self._abort_failure

    def hold_collectives(self) -> None:
        """Have the collectives that start from now on wait for `resume_collectives`."""
        if self._hold_event is None:
            self._hold_event = threading.Event()
        for group in list(self._groups_by_name.values()):
            group.hold_event = self._hold_event

    def resume_collectives(self) -> None:
        """Release the collectives that wait because of `hold_collectives`. Any thread."""
        hold_event, self._hold_event = self._hold_event, None
        for group in list(self._groups_by_name.values()):
            group.hold_event = None
        if hold_event is not None:
            hold_event.set()

    @property
    def is_held(self) -> bool:
        return self._hold_event is not None

    def call_ended(self, *, succeeded: bool) -> None:
        """Handle the end of a call. Call it when no user code runs.

        A model that the call left in the middle of a step would continue from a different point on each rank. In that
        case this breaks the groups, and forming them again makes all ranks forget the step.
        """
        backward_incomplete, self._is_backward_incomplete = self._is_backward_incomplete, False
        if succeeded or self.is_broken or not is_mid_step(backward_incomplete=backward_incomplete):
            return
        failure = GroupFailure("a model was left in the middle of a step")
        for group in self.all_groups():
            group.invalidate(failure)

    def invalidate_named(self, names: Iterable[str], reason: str, *, generation: int) -> None:
        """Break these groups until they are formed again; a no-op for another generation. Any thread."""
        if generation == self.generation:
            for name in names:
                group = self._groups_by_name.get(name)
                if group is not None and group.failure is None:
                    group.invalidate(GroupFailure(reason))

    def all_groups(self) -> list[WatchedGroup]:
        """Return every group of this process."""
        return list(self._groups_by_name.values())

    @property
    def num_groups_created(self) -> int:
        """How many groups torch has named here, which is also the name of the next one."""
        return int(c10d._world.group_count)

    @property
    def connecting(self) -> tuple[GroupLabel, ...]:
        """Groups that wait for their members to connect."""
        return tuple(self._connecting)

    @property
    def has_nccl(self) -> bool:
        """Whether any group of this process has an NCCL backend."""
        return any(handle.kind == "nccl" for group in self.all_groups() for handle in group.backend_handles)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread is in a collective, or waits for other ranks to form a group. Any thread."""
        return self._num_rendezvous > 0 or bool(self.ring.running())

    def _abort_backends(self, handles: Iterable[BackendHandle]) -> None:
        """End the stuck operations in these backends. Does not block."""
        handles = list(handles)
        backends.shutdown_connections({address for handle in handles for address in handle.addresses})
        nccl, previous_abort = [handle for handle in handles if handle.kind == "nccl"], self._abort_thread
        if nccl:

            def abort() -> None:
                if previous_abort is not None:
                    previous_abort.join()
                backends.abort(nccl)

            # On a thread of its own: NCCL's abort sometimes takes long or hangs, and must not block the caller.
            self._abort_thread = threading.Thread(target=abort, name="abort NCCL", daemon=True)
            self._abort_thread.start()

    # ---- forming

    def form(
        self,
        generation: int,
        *,
        rank: int,
        world_size: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        axes: Mapping[str, int],
    ) -> DeviceMesh:
        """Form the world group and one group per axis, connected. Blocks until all ranks have joined.

        The first call initialises torch.distributed. A later call with the same rank in a world of the same shape gives
        every group new connections and returns the same DeviceMesh; with another rank or shape it starts from scratch
        and returns a new one. All ranks call it with the same generation; some may do so for the first time.

        Groups that the user made are formed again too, if all their members are still the processes that made them. A
        group that a new process does not have yet is connected when it is first used, so that the process can make it
        meanwhile.

        Args:
            generation: greater than every one before.
            store: the same for all ranks. The waits of a `MeshStore` can be cancelled.
            device: cpu for gloo; cuda, with its index, for NCCL plus gloo for CPU tensors.
            timeout_s: seconds to wait for the other ranks.
            axes: sizes by name; their product is `world_size`.

        Raises:
            MeshShapeError: the product of the axes is not `world_size`.
            RuntimeError: not all ranks joined in time. Groups are broken; try again with the next generation.
            BaseException: what the groups were aborted with meanwhile.
        """
        if math.prod(axes.values()) != world_size:
            sizes = " * ".join(f"{name}={size}" for name, size in axes.items())
            raise MeshShapeError(
                f"mesh axes {sizes} need {math.prod(axes.values())} ranks, but the world has {world_size}; "
                "change an axis or the number of ranks"
            )
        if self.generation is not None and generation <= self.generation:
            raise ValueError(f"epoch {generation} has passed: the groups are those of epoch {self.generation}")
        layout = _MeshLayout(rank, world_size, device, tuple(axes.items()))
        in_place = (
            self.mesh is not None and layout == self._layout and dist.group.WORLD in self._groups_by_name.values()
        )
        if not in_place:
            self._destroy_world()
        else:
            self._abort_all("the groups are formed again")
        with self._lock:
            self.generation, self._abort_failure = generation, None
        self._layout, self._user_group_ranks, self._store = layout, {}, store
        self._num_connects.clear()
        self._form_timeout_s = timeout_s
        self.resume_collectives()
        try:
            store.set_timeout(timedelta(seconds=timeout_s))
            if in_place:
                self._reform(store)
            else:
                self._form_initial(layout, store)
        except BaseException as error:
            with self._lock:
                if self._abort_failure is None:
                    lines = str(error).splitlines()
                    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                    self._abort_failure = GroupFailure(f"it could not be formed: {reason}")
            for group in self._groups_by_name.values():
                group.invalidate(self._abort_failure)
            raise
        finally:
            self._form_timeout_s = None
        assert self.mesh is not None
        return self.mesh

    def close(self) -> None:
        """Leave all groups without waiting for other ranks. torch.distributed is then as before `form`."""
        self._destroy_world()
        self._remove_patches()

    def _form_initial(self, layout: _MeshLayout, store: Store) -> None:
        if layout.device.type == "cuda":
            torch.cuda.set_device(layout.device)
            # Otherwise DeviceMesh, which sees no device in use, would choose one by LOCAL_RANK.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._install_patches()
        hook = sys.excepthook
        dist.init_process_group(
            "nccl" if layout.device.type == "cuda" else "gloo",
            store=PrefixStore(f"e{self.generation}", store),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=self._collective_timeout,
        )
        # torch's hook would prefix each line with the rank, which the display of the output already does
        sys.excepthook = hook
        names, sizes = zip(*layout.axes, strict=True)
        self.mesh = init_device_mesh(layout.device.type, sizes, mesh_dim_names=names)
        self._mesh_group_names = set(self._groups_by_name)
        self._exchange_group_state((), None)

    def _reform(self, store: Store) -> None:
        """Give the groups of the last generation new connections."""
        groups = list(self._groups_by_name.values())
        for group in groups:
            group.detach_backends()
        for group in groups:
            if group.label.name in self._mesh_group_names:
                self.connect(group)
        world = dist.group.WORLD
        name, _ = c10d._world.pg_map[world]
        c10d._world.pg_map[world] = name, PrefixStore(f"e{self.generation}", store)
        c10d._world.pg_coalesce_state.clear()  # a leftover entry would make every later coalesced call fail
        # the same order on all ranks, else two ranks could wait for each other
        user_groups = sorted(set(self._groups_by_name) - self._mesh_group_names)
        same_buckets = self._exchange_group_state(user_groups, c10d._world.group_count, num_rebucketed_models())
        for name in user_groups:
            group = self._groups_by_name[name]
            if self._user_group_ranks[name].issuperset(group.label.ranks):
                self.connect(group)
        reset_interrupted_steps(same_buckets=same_buckets)

    def _exchange_group_state(
        self, names: list[str] | tuple[()], num_groups_created: int | None, num_rebucketed: int = 0
    ) -> bool:
        """Exchange which ranks have which user groups, and equalise the numbers that torch names groups by.

        Where only some ranks made a group, the next one would otherwise have different names, and all ranks would wait
        for each other forever.

        Args:
            num_groups_created: how many groups torch has named here; None in a new process, which has yet to make the
                user's groups under the names that they have elsewhere.
            num_rebucketed: how many models have other buckets than at the beginning.

        Returns:
            Whether all ranks reported the same number of such models.
        """
        assert self._store is not None
        assert self._layout is not None
        store = PrefixStore(f"e{self.generation}/held", self._store)
        with self._rendezvous():
            store.set(str(self._layout.rank), json.dumps([names, num_groups_created, num_rebucketed]))
            replies = store.multi_get([str(rank) for rank in range(self._layout.world_size)])
        group_counts: list[int] = []
        rebucketed_counts: set[int] = set()
        for rank, text in enumerate(replies):
            group_names, group_count, rebucketed = json.loads(text)
            rebucketed_counts.add(rebucketed)
            if group_count is not None:
                group_counts.append(group_count)
            for name in group_names:
                self._user_group_ranks.setdefault(name, set()).add(rank)
        if len(group_counts) == len(replies):
            c10d._world.group_count = max(group_counts)
        return len(rebucketed_counts) == 1

    def _abort_all(self, reason: str) -> None:
        """Abort operations that may still be in flight, before their connections are replaced or dropped."""
        groups = list(self._groups_by_name.values())
        for group in groups:
            group.invalidate(GroupFailure(reason))
        self._abort_backends(handle for group in groups for handle in group.backend_handles)
        if self._abort_thread is not None:
            self._abort_thread.join(_ABORT_TIMEOUT_S)
            if self._abort_thread.is_alive():
                raise RuntimeError(
                    f"NCCL did not give up its communicators within {_ABORT_TIMEOUT_S:.0f} s: this rank is lost. That "
                    "takes a new mesh: %mesh stop, then %mesh start"
                )
            self._abort_thread = None

    def _destroy_world(self) -> None:
        self._mesh_group_names = set()
        if self._groups_by_name:
            # A backend's destructor joins threads that may be stuck in an operation.
            self._abort_all("the groups were closed")
        if isinstance(dist.group.WORLD, WatchedGroup):
            dist.destroy_process_group()
        elif not dist.is_initialized():
            c10d._world.group_count = 0  # a failed first attempt used a name that the other ranks have yet to use
        self._groups_by_name.clear()
        self.mesh = self._layout = self._store = None

    # ---- what a WatchedGroup calls on its owner

    def connect(self, group: WatchedGroup) -> None:
        """Connect a group's real backends in this generation. Blocks until all its members have connected.

        Raises:
            GroupBroken: all groups are broken, so this one would be too.
            RuntimeError: not all members connected in time.
            BaseException: what the groups were aborted with meanwhile.
        """
        assert self._store is not None
        self._check_not_aborted()
        if self._hold_event is not None:
            group.hold_event = self._hold_event
            group._wait_until_allowed("making a process group")
        name = group.label.name
        num_before, self._num_connects[name] = self._num_connects[name], self._num_connects[name] + 1
        store = PrefixStore(f"e{self.generation}/{name}" + (f"/{num_before}" if num_before else ""), self._store)
        handles: dict[str, BackendHandle] = {}
        self._connecting.append(group.label)
        try:
            with self._rendezvous():
                for kind in group.backends.values():
                    if kind not in handles:
                        handles[kind] = self._connect_backend(kind, PrefixStore(kind, store), group)
        except BaseException as error:
            # Its store prefix contains keys of this attempt, so another attempt needs a new generation.
            group.invalidate(GroupFailure(f"connecting it failed: {one_line_error(error)}"))
            raise
        finally:
            self._connecting.remove(group.label)
        group.label.reset_counters(self.generation or 0)
        group.attach_backends(list(handles.values()), store)
        with self._lock:
            failure = self._abort_failure
        if failure is not None:  # aborted while connecting
            group.invalidate(failure)
            self._abort_backends(group.backend_handles)

    def _connect_backend(self, kind: str, store: Store, group: WatchedGroup) -> BackendHandle:
        rank, size = group.rank(), group.size()
        if kind == "nccl":
            return backends.connect_nccl(store, rank, size, timeout=group.timeout, options=group.options)
        return backends.connect_gloo(
            store,
            rank,
            size,
            # Ranks that reach a store on this machine are all on it too. gloo has no authentication, so it listens on
            # loopback only.
            hostname="127.0.0.1" if isinstance(self._store, MeshStore) and self._store.is_local else None,
            connect_timeout_s=self._form_timeout_s or group.timeout.total_seconds(),
            timeout=group.timeout,
        )

    def unregister(self, group: WatchedGroup) -> None:
        """Remove a destroyed group.

        Aborts a stuck operation in it, because dropping the group would wait for the operation.
        """
        if self._groups_by_name.pop(group.label.name, None) is None:
            return
        self._mesh_group_names.discard(group.label.name)
        if any(collective.label is group.label for collective in self.ring.running()):
            group.invalidate(GroupFailure("the group was destroyed"))
            self._abort_backends(group.backend_handles)
        if group is dist.group.WORLD:
            self.mesh = self._layout = self._store = None

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """Create a group like `parent`, of some of its members (global ranks, including this one)."""
        rank = ranks.index(parent.label.ranks[parent.rank()])
        return self._make_group(name, ranks, rank, parent.get_group_store(), parent.backends, timeout, parent.options)

    @contextlib.contextmanager
    def _rendezvous(self) -> Iterator[None]:
        """Wrap a wait for the store or for peers, so that `abort` ends it with the abort error."""
        store = self._store
        with store.cancel_scope() if isinstance(store, MeshStore) else contextlib.nullcontext():
            with self._lock:
                self._check_not_aborted()
                self._num_rendezvous += 1
            try:
                yield
            except RuntimeError:
                abort_error = self._abort_failure.error_to_raise() if self._abort_failure is not None else None
                if abort_error is not None:
                    raise abort_error from None
                raise
            finally:
                with self._lock:
                    self._num_rendezvous -= 1

    def _check_not_aborted(self) -> None:
        """Raise if all groups are aborted.

        Raises:
            BaseException: the abort error, while groups are formed.
            GroupBroken: at other times.
        """
        if self._abort_failure is not None:
            forming = self._form_timeout_s is not None
            raise (self._abort_failure.error_to_raise() if forming else None) or GroupBroken(
                f"a process group cannot be connected while all are broken ({self._abort_failure.reason}). They are "
                "formed again before the next cell: run the cell again"
            )

    # ---- patches that make every group of this process a WatchedGroup

    def _install_patches(self) -> None:
        """Patch torch's single function for creating groups, and two more functions.

        `init_process_group` and `new_group` both use the first; the others treat a WatchedGroup differently from
        torch's own groups.
        """
        if self._patches:
            return
        dist.Backend.register_backend(_BACKEND_NAME, self._create_group, extended_api=True, devices=["cpu", "cuda"])
        helper, one_by_one = c10d._new_process_group_helper, c10d.batch_isend_irecv
        backward = torch.autograd.graph._engine_run_backward
        signature = inspect.signature(helper)

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            return self._new_process_group(helper, signature.bind(*args, **kwargs))

        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            return _batch_isend_irecv(one_by_one, p2p_op_list)

        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            return self._run_backward(backward, args, kwargs)

        self._patch(c10d, "_new_process_group_helper", new_process_group)
        self._patch(c10d, "batch_isend_irecv", batch_isend_irecv)
        self._patch(dist, "batch_isend_irecv", batch_isend_irecv)
        self._patch(torch.autograd.graph, "_engine_run_backward", engine_run_backward)
        self._patch(torch.autograd, "_engine_run_backward", engine_run_backward)

    def _patch(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._patches.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _remove_patches(self) -> None:
        for module, name, function in self._patches:
            setattr(module, name, function)
        self._patches.clear()

    def _new_process_group(self, helper: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Call torch's helper so that it creates a WatchedGroup under the requested name."""
        requested = dist.Backend(call.arguments["backend"])
        config = c10d.BackendConfig(requested)
        kinds = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        if not set(kinds.values()) <= {"gloo", "nccl"} or getattr(c10d._world, "comms", None):
            return helper(*call.args, **call.kwargs)  # fake, MPI, UCC, torchcomms: cannot be aborted here
        if "nccl" in kinds.values():
            kinds.setdefault("cpu", "gloo")  # NCCL alone refuses CPU tensors; supporting them does no harm
        call.arguments["backend"] = _BACKEND_NAME
        # With a bound device torch would split NCCL communicators off the default group's, which ties their lifetimes
        # together. Separate communicators can be aborted and replaced one by one.
        call.arguments["device_id"] = None
        world: Any = dist.group.WORLD
        bound_device = world.bound_device_id if world is not None else None
        self._requested_backends = kinds
        if bound_device is not None:
            world.bound_device_id = None
        try:
            group, store = helper(*call.args, **call.kwargs)
        finally:
            if bound_device is not None:
                world.bound_device_id = bound_device
        if isinstance(group, WatchedGroup):
            c10d._world.pg_map[group] = requested, store
            c10d._world.pg_backend_config[group] = str(config)
        return group, store

    def _run_backward(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run autograd's engine, and restore the type of its errors.

        DDP waits inside it in C++, where every error becomes a RuntimeError, also that of an interrupt.
        """
        failure_before, ended = self._abort_failure, False
        try:
            result = backward(*args, **kwargs)
            ended = True
            return result
        except RuntimeError as error:
            failure = self._abort_failure
            replacement = failure.error_to_raise() if failure is not None and failure is not failure_before else None
            if replacement is None and "KeyboardInterrupt: " in str(error):
                replacement = KeyboardInterrupt()
            if replacement is None or isinstance(error, GroupBroken):
                raise
            raise replacement from None
        finally:
            self._is_backward_incomplete = self._is_backward_incomplete or not ended

    def _create_group(self, backend_opts: Any, options: Any = None) -> WatchedGroup:
        """Create a group. Called by torch's helper."""
        ranks = backend_opts.global_ranks_in_group or range(backend_opts.group_size)  # empty for the world
        return self._make_group(
            str(backend_opts.group_id),
            ranks,
            backend_opts.group_rank,
            backend_opts.store,
            self._requested_backends,
            backend_opts.timeout,
            options,
        )

    def _make_group(
        self, name: str, ranks: Any, rank: int, store: Store, kinds: Mapping[str, str], timeout: timedelta, options: Any
    ) -> WatchedGroup:
        if self._store is None:  # the user destroyed the world group and creates one with a store of their own
            self._store, self._abort_failure = store, None
        label = GroupLabel(name, ranks)
        group = WatchedGroup(self, label, rank, store=store, backends=kinds, timeout=timeout, options=options)
        self._groups_by_name[name] = group  # before connecting, so that `abort` finds it
        if not self._user_group_ranks.get(name, set()).intersection(label.ranks):
            try:
                self.connect(group)
            except BaseException:
                del self._groups_by_name[name]
                raise
        return group


def _batch_isend_irecv(one_by_one: Callable[[Any], Any], p2p_op_list: Any) -> Any:
    """Replace `dist.batch_isend_irecv`, which batches only for a group whose type is exactly ProcessGroup.

    NCCL needs the batch: sent one by one, two ranks that each send first wait for each other.
    """
    c10d._check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group or dist.group.WORLD
    device = p2p_op_list[0].tensor.device
    if not isinstance(group, WatchedGroup) or not group._get_backend(device).supports_coalescing:
        return one_by_one(p2p_op_list)
    with c10d._coalescing_manager(group, device, async_ops=True) as batch:
        for op in p2p_op_list:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=op.group, tag=op.tag, **peer)
    return batch.works
