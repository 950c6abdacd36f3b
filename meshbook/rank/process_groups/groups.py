"""The process groups of a rank: formed at its start, aborted to free waiting threads, and formed again.

`ProcessGroups` makes every process group of its process a `WatchedGroup`, whether `form`, a DeviceMesh or the user's
own `dist.new_group` creates it. So it can end all stuck operations (`abort`), and afterwards give the same objects new
connections, also to a member that is a new process (`form` with the next generation).

Re-forming cannot restore what users' objects had in flight when the groups broke. DDP and FSDP2 are made to forget an
unfinished step (`interrupted_steps`). And an aborted collective may have completed on some ranks and not on others:
parameters can differ by one step, and only the user's program, or a checkpoint, can tell.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import MeshShapeError, message_of
from meshbook.rank.process_groups.backends import BackendAborts
from meshbook.rank.process_groups.connector import Connector
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.failures import GroupFailure
from meshbook.rank.process_groups.generation import Generation
from meshbook.rank.process_groups.group_health import Observer
from meshbook.rank.process_groups.group_reports import (
    GroupSpec,
    have_same_buckets,
    ranks_by_name,
)
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.interrupted_steps import is_mid_step, reset_interrupted_steps
from meshbook.rank.process_groups.mesh_layout import MeshLayout, group_names, make_mesh
from meshbook.rank.process_groups.resized_world import LastingMeshes, adapt_groups
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel, one_line_error
from meshbook.rank.process_groups.solo import SoloGroups
from meshbook.rank.process_groups.timeouts import CollectiveTimeouts
from meshbook.rank.process_groups.torch_patches import TorchPatches, begin_world_generation, c10d
from meshbook.rank.process_groups.watched_group import WatchedGroup

# Seconds until a collective on gloo times out: torch's default. An interrupt or the supervisor acts sooner.
_TIMEOUT_S = 1800.0


class ProcessGroups:
    """All process groups of this process. One per rank.

    Call `form` and `close` on the main thread; `abort`, `is_broken` and `failure_reason` on any thread.

    Attributes:
        ring: where collectives are recorded.
        observers: further receivers of each collective; append and remove between collectives.
        table: the groups by name.
        connector: connects them.
        timeouts: ends collectives that take too long, when the service thread asks.
        solo: runs code of this process without the other ranks.
        mesh: the DeviceMesh of all ranks; None before the first generation.
    """

    def __init__(
        self, ring: CollectiveRing, *, collective_timeout_s: float = _TIMEOUT_S, exits: ExitQuestions | None = None
    ) -> None:
        """collective_timeout_s: of the groups that `form` makes, on gloo. exits: see `GroupHealth`."""
        self.ring, self.table = ring, GroupTable(exits)
        self.observers: list[Observer] = []
        self.mesh: DeviceMesh | None = None
        self._collective_timeout = timedelta(seconds=collective_timeout_s)
        self._generation, self._aborts = Generation(exits), BackendAborts()
        self.connector = Connector(self._generation, self.table, self._aborts)
        self.timeouts = CollectiveTimeouts(ring, self.table, self._aborts)
        self.solo = SoloGroups(self.table)
        self._patches = TorchPatches(
            self._create_group, lambda: self._generation.abort_failure, self.solo.name_for,
            self.solo.hashed_names.next, lambda: self._mesh_group_names,
        )  # fmt: skip
        self._layout: MeshLayout | None = None
        self._mesh_layout: MeshLayout | None = None  # that of `mesh`
        self._lasting_meshes = LastingMeshes()
        self._mesh_group_names: set[str] = set()  # names of the groups that `form` itself made, which every rank has
        self._user_group_ranks: dict[str, set[int]] = {}  # others at the start of this generation, and who had them
        ring.skip_frames_of(Path(torch.__file__).parent)
        ring.skip_frames_of(typing_extensions.__file__)  # its wrapper of deprecated functions calls torch

    # ---- state

    @property
    def generation(self) -> int | None:
        """The number of the current generation; None before the first."""
        return self._generation.number

    @property
    def store(self) -> Store | None:
        """The store that all ranks share; None before the first generation."""
        return self._generation.store

    @property
    def abort_failure(self) -> GroupFailure | None:
        """The failure that all groups were aborted with since they were formed."""
        return self._generation.abort_failure

    @property
    def is_broken(self) -> bool:
        """Whether any group is unusable until the next `form`."""
        return self.failure_reason is not None

    @property
    def failure_reason(self) -> str | None:
        failure = self.abort_failure or self.table.failure
        return None if failure is None else failure.reason

    @property
    def is_waiting(self) -> bool:
        """Whether a thread is in a collective, or waits for other ranks to form a group. Any thread."""
        return self._generation.is_waiting or bool(self.ring.running())

    @property
    def num_groups_created(self) -> int:
        """How many groups torch has named here, which is also the name of the next one."""
        return int(c10d._world.group_count)

    # ---- failing

    def abort(self, error: BaseException, *, generation: int | None = None) -> None:
        """End every wait in a collective with `error`, in all threads, and break all groups. Any thread.

        Does not wait for those threads. Each gets its own copy of `error`. On gloo they raise it within milliseconds.
        On CUDA a thread that waits for the device (`.item()`, `synchronize`) returns as if successful, and only its
        next collective raises, so check `is_broken` too before using a result.

        Args:
            generation: break groups of this one, also if they are formed later, and no newer ones. None: all there are.
        """
        failure = GroupFailure((message_of(error).splitlines() or [type(error).__name__])[0], error)
        with self._generation.lock:
            if not self._generation.record_abort(failure, generation):
                return
            number, handles, versions = self._generation.number, self.table.handles(), self.table.versions()
        self.table.invalidate(failure, versions)
        with self._generation.lock:
            if self._generation.number == number:  # else the next one is being formed already
                self.table.resume()
        self._aborts.begin(handles)

    def invalidate_named(self, names: Iterable[str], reason: str, *, generation: int) -> None:
        """Break these groups until they are formed again; a no-op for another generation. Any thread."""
        if generation == self._generation.number:
            self.table.invalidate_named(names, reason)

    def call_ended(self, *, succeeded: bool) -> None:
        """Handle the end of a call. Call it when no user code runs.

        A model that the call left in the middle of a step would go on from another point on each rank. Then this breaks
        the groups, and forming them again makes all ranks forget the step.
        """
        backward_incomplete, self._patches.is_backward_incomplete = self._patches.is_backward_incomplete, False
        if not succeeded and not self.is_broken and (reason := _mid_step_reason(backward_incomplete)):
            self.table.invalidate(GroupFailure(reason))

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
        num_resizes: int = 0,
        backend: str | None = None,
    ) -> DeviceMesh:
        """Form the world group and one group per axis, connected. Blocks until all ranks have joined.

        The first call initialises torch.distributed. A later call with the same rank in a world of the same shape, or
        after a resize, gives every group new connections and returns the same DeviceMesh; else it starts from scratch.
        All ranks call it, some perhaps for the first time.

        Groups that the user made are formed again too, if all their members are the processes that made them. One
        that a new process has yet to make is connected when it is first used.

        Args:
            generation: greater than every one before.
            store: the same for all ranks. The waits of a `MeshStore` can be cancelled.
            timeout_s: seconds to wait for the other ranks.
            axes: sizes by name; their product is `world_size`.
            num_resizes: how often the mesh was resized.
            device, backend: cpu, or cuda with its index, on NCCL beside gloo; or on "gloo", because ranks share a GPU.

        Raises:
            MeshShapeError: the product of the axes is not `world_size`.
            RuntimeError: not all ranks joined in time. Groups are broken; try again with the next generation.
            BaseException: what the groups were aborted with meanwhile.
        """
        _check_axes(axes, world_size)
        current = self._generation
        if current.number is not None and generation <= current.number:
            raise ValueError(f"generation {generation} has passed: the groups are those of {current.number}")
        layout = MeshLayout(rank, world_size, device, tuple(axes.items()), num_resizes, backend)
        in_place = self.mesh is not None and layout.follows(self._layout) and dist.group.WORLD in list(self.table)
        if not in_place:
            self._destroy_world()
        else:
            self._abort_all("the groups are formed again")
        current.begin(generation, store, timeout_s)
        self.connector.generation_began()
        self._layout, self._user_group_ranks = layout, {}
        self.table.resume()
        try:
            current.limit_waits(timeout_s)
            if in_place:
                self._reform(layout)
            else:
                self._form_initial(layout)
        except BaseException as error:
            self.table.invalidate(current.fail(GroupFailure(f"it could not be formed: {one_line_error(error)}")))
            raise
        finally:
            current.formed()
        assert self.mesh is not None
        return self.mesh

    def exchange(self, topic: str, data: bytes) -> list[bytes]:
        """Return what each rank passes to this, by rank. Blocks until all have called it; `abort` ends the wait."""
        assert self._layout is not None  # the groups are formed
        return self._generation.exchange(topic, data, *self._layout.place)

    def close(self) -> None:
        """Leave all groups without waiting for others. torch.distributed is then as before `form`."""
        self._destroy_world()
        self._patches.remove()

    def _form_initial(self, layout: MeshLayout) -> None:
        if layout.device.type == "cuda":
            torch.cuda.set_device(layout.device)
            # Otherwise DeviceMesh, which sees no device in use, would choose one by LOCAL_RANK.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._patches.install(shares_gpu=layout.shares_gpu)
        hook = sys.excepthook
        dist.init_process_group(
            layout.backend,
            store=self._generation.prefix_store(),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=self._collective_timeout,
        )
        sys.excepthook = hook  # torch's would prefix each line with the rank, as the display does
        self._make_mesh(layout)
        self._user_group_ranks = self.solo.join(self.exchange)

    def _make_mesh(self, layout: MeshLayout) -> None:
        self.mesh = self._lasting_meshes.become(self.mesh, make_mesh(layout, self.table))
        self._mesh_layout, self._mesh_group_names = layout, group_names(self.mesh)

    def _reform(self, layout: MeshLayout) -> None:
        """Give the groups of the last generation new connections."""
        is_resized = layout != self._mesh_layout
        if is_resized:
            self._lasting_meshes.find(self.mesh, dict(layout.axes))
            self._aborts.dispose(adapt_groups(self.table, self._mesh_group_names, layout.rank, layout.world_size))
            self._mesh_group_names &= self.table.names
        self._aborts.dispose([group.detach_backends() for group in self.table])
        for group in self.table:
            if group.label.name in self._mesh_group_names:
                self.connect(group)
        begin_world_generation(self._generation.prefix_store())
        if is_resized:
            self._make_mesh(layout)
        # the same order on all ranks, else two ranks could wait for each other
        user_groups = sorted(self.table.names - self._mesh_group_names)
        specs = [_spec_of(self.table[name]) for name in user_groups]
        reports = self.solo.rejoin(self.exchange, specs)
        self._user_group_ranks = ranks_by_name(reports)
        for name in user_groups:
            group = self.table[name]
            if self._user_group_ranks[name].issuperset(group.label.ranks):
                self.connect(group)
        reset_interrupted_steps(same_buckets=have_same_buckets(reports))

    def _abort_all(self, reason: str) -> None:
        """Abort operations that may still be in flight, before their connections are replaced or dropped."""
        self.table.invalidate(GroupFailure(reason))
        self._aborts.begin(self.table.handles())
        self._aborts.join()

    def _destroy_world(self) -> None:
        self._mesh_group_names = set()
        if self.table:
            # A backend's destructor joins threads that may be stuck in an operation.
            self._abort_all("the groups were closed")
        if isinstance(dist.group.WORLD, WatchedGroup):
            dist.destroy_process_group()
        elif not dist.is_initialized():
            c10d._world.group_count = 0  # a failed first attempt used a name that the other ranks have yet to use
        self.table.clear()
        self.mesh = self._layout = self._generation.store = None

    # ---- what a WatchedGroup calls on its owner

    def connect(self, group: WatchedGroup) -> None:
        """Connect a group's real backends; see `Connector.connect`."""
        self.connector.connect(group)

    def unregister(self, group: WatchedGroup) -> None:
        """Remove a destroyed group, and abort what is stuck in it, because dropping the group would wait for that."""
        if not self.table.remove(group):
            return
        self._mesh_group_names.discard(group.label.name)
        if any(collective.label is group.label for collective in self.ring.running()):
            group.health.invalidate(GroupFailure("the group was destroyed"))
            self._aborts.begin(group.backend_handles)
        if group is dist.group.WORLD:
            self.mesh = self._layout = self._generation.store = None

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """Create a group like `parent`, of some of its members (global ranks, including this one)."""
        rank = ranks.index(parent.label.ranks[parent.rank()])
        return self._create_group(name, ranks, rank, parent.get_group_store(), parent.backends, timeout, parent.options)

    def _create_group(
        self,
        name: str,
        ranks: Any,
        rank: int,
        store: Store,
        backends: Mapping[str, str],
        timeout: timedelta,
        options: Any,
    ) -> WatchedGroup:
        if self._generation.store is None:  # the user destroyed the world group and creates one with their own store
            self._generation.store, self._generation.abort_failure = store, None
        label = GroupLabel(name, ranks, self.solo.origin())
        group = WatchedGroup(self, label, rank, store=store, backends=backends, timeout=timeout, options=options)
        self.table.add(group)  # before connecting, so that `abort` finds it
        if self.solo.is_active:
            self.solo.connect(group)
        elif not self._user_group_ranks.get(name, set()).intersection(label.ranks):
            try:
                self.connect(group)
            except BaseException:
                self.table.remove(group)
                raise
        return group


def _spec_of(group: WatchedGroup) -> GroupSpec:
    label = group.label
    return GroupSpec(label.name, label.ranks, group.backends, group.timeout.total_seconds(), label.origin)


def _check_axes(axes: Mapping[str, int], world_size: int) -> None:
    if math.prod(axes.values()) != world_size:
        sizes = " * ".join(f"{name}={size}" for name, size in axes.items())
        raise MeshShapeError(
            f"mesh axes {sizes} need {math.prod(axes.values())} ranks, but the world has {world_size}; "
            "change an axis or the number of ranks"
        )


def _mid_step_reason(backward_incomplete: bool) -> str:
    """Return why models must forget the step under way; "" if none has one."""
    try:
        return "a model was left in the middle of a step" if is_mid_step(backward_incomplete) else ""
    except Exception as error:  # the call must end whatever state models are in
        return f"whether a model is in the middle of a step is not known: {one_line_error(error)}"
