"""Patches of torch that make every process group of this process a `WatchedGroup`.

`init_process_group` and `new_group` both create groups by one function of torch. Four more are patched, because they
treat a `WatchedGroup` differently from torch's own groups, reach past it, lose the type of its errors, or name a group
differently on its members (`hashed_names`). `init_process_group` and `destroy_process_group` are patched so that
scripts, which begin and end with them, find the mesh's group and leave it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from meshbook.errors import message_of
from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure
from meshbook.rank.process_groups.watched_group import WatchedGroup

# torch's module of process groups; its state has no other API.
c10d: Any = dist.distributed_c10d

# The backend name of these groups while torch creates them. Users never see it: `dist.get_backend()` returns the name
# that they requested.
_BACKEND_NAME = "meshbook"


class GroupFactory(Protocol):
    def __call__(
        self,
        name: str,
        ranks: Any,
        rank: int,
        store: Store,
        backends: Mapping[str, str],
        timeout: timedelta,
        options: Any,
    ) -> WatchedGroup:
        """Create a group.

        Args:
            ranks: global ranks of its members.
            rank: of this process, in the group.
            backends: the backend of each device type.
        """


class TorchPatches:
    """Installs the patches, and takes them back.

    Attributes:
        is_backward_incomplete: a backward pass did not complete since this was last set to False.
    """

    def __init__(
        self,
        create_group: GroupFactory,
        abort_failure: Callable[[], GroupFailure | None],
        name_for: Callable[[Sequence[int]], str | None],
        hashed_name: Callable[[Sequence[int]], str] | None = None,
        own_groups: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """
        Args:
            own_groups: returns the names of the groups that the mesh itself has formed, with the world; (): it has not.
            abort_failure: returns what all groups were aborted with since they were formed.
            name_for: returns the name that a new group of these global ranks gets; None: torch's.
            hashed_name: returns the name that torch gives a group that only its members make; None: torch's.
        """
        self.is_backward_incomplete = False
        self._create_group, self._abort_failure, self._name_for = create_group, abort_failure, name_for
        self._hashed_name, self._own_groups = hashed_name, own_groups
        self._shares_gpu = False
        self._requested_backends: dict[str, str] = {}  # of the group being created
        self._originals: list[tuple[Any, str, Any]] = []  # module, name, original function

    def install(self, *, shares_gpu: bool = False) -> None:
        """Patch torch, unless it is patched.

        Args:
            shares_gpu: ranks share a GPU, which NCCL refuses: groups have gloo in its place.
        """
        self._shares_gpu = shares_gpu
        if self._originals:
            return
        dist.Backend.register_backend(_BACKEND_NAME, self._backend_created, extended_api=True, devices=["cpu", "cuda"])
        helper, one_by_one = c10d._new_process_group_helper, c10d.batch_isend_irecv
        set_timeout = c10d._set_pg_timeout
        backward = torch.autograd.graph._engine_run_backward
        signature = inspect.signature(helper)

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            return self._new_process_group(helper, signature.bind(*args, **kwargs))

        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            return _batch_isend_irecv(one_by_one, p2p_op_list)

        def set_group_timeout(timeout: timedelta, group: Any = None) -> None:
            group = group or dist.group.WORLD
            group.set_timeout(timeout) if isinstance(group, WatchedGroup) else set_timeout(timeout, group)

        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            return self._run_backward(backward, args, kwargs)

        for name, function in (
            ("init_process_group", self._initialize(c10d.init_process_group)),
            ("destroy_process_group", self._destroy(c10d.destroy_process_group)),
        ):
            self._patch(c10d, name, function)
            self._patch(dist, name, function)
        self._patch(c10d, "_new_process_group_helper", new_process_group)
        self._patch(c10d, "_set_pg_timeout", set_group_timeout)
        self._patch(c10d, "batch_isend_irecv", batch_isend_irecv)
        self._patch(dist, "batch_isend_irecv", batch_isend_irecv)
        if self._hashed_name is not None:
            self._patch(c10d, "_hash_ranks_to_str", self._hashed_name)
        self._patch(torch.autograd.graph, "_engine_run_backward", engine_run_backward)
        self._patch(torch.autograd, "_engine_run_backward", engine_run_backward)

    def remove(self) -> None:
        """Restore torch's own functions."""
        for module, name, function in self._originals:
            setattr(module, name, function)
        self._originals.clear()

    def _patch(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._originals.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _initialize(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Return torch's function, which finds the mesh's group done if it asks for such a one."""
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if not self._own_groups():
                return initialize(*args, **kwargs)
            asked = signature.bind(*args, **kwargs).arguments
            # Ranks that share a GPU have gloo in NCCL's place.
            backend = None if self._shares_gpu else asked.get("backend")
            _check_world(backend, asked.get("rank", -1), asked.get("world_size", -1))
            if asked.get("timeout") is not None:
                dist.group.WORLD.set_timeout(asked["timeout"])  # type: ignore[union-attr]
            return None

        return init_process_group

    def _destroy(self, destroy: Callable[..., None]) -> Callable[..., None]:
        """Return torch's function, which leaves the mesh's own groups: cells to come need them."""

        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            own = self._own_groups()
            if not own or group not in (None, dist.group.WORLD):
                return destroy(group)
            for made in [made for made in c10d._world.pg_map if made.group_name not in own]:
                destroy(made)
            return None

        return destroy_process_group

    def _new_process_group(self, helper: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Call torch's helper so that it creates a WatchedGroup under the requested name."""
        requested = dist.Backend(call.arguments["backend"])
        config = c10d.BackendConfig(requested)
        kinds = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        if not set(kinds.values()) <= {"gloo", "nccl"} or getattr(c10d._world, "comms", None):
            return helper(*call.args, **call.kwargs)  # fake, MPI, UCC, torchcomms: cannot be aborted here
        # DeviceMesh asks for NCCL where there are GPUs, also for ranks on the CPU.
        if self._shares_gpu or (call.arguments.get("group_desc") == "mesh_default" and _world_is_on_gloo()):
            kinds = dict.fromkeys(kinds, "gloo")
            requested = dist.Backend("gloo")
            config = c10d.BackendConfig(requested)
        if "nccl" in kinds.values():
            kinds.setdefault("cpu", "gloo")  # NCCL alone refuses CPU tensors; supporting them does no harm
        if (name := self._name_for(call.arguments["global_ranks_in_group"])) is not None:
            call.arguments["group_name"] = name
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

    def _backend_created(self, backend_opts: Any, options: Any = None) -> WatchedGroup:
        """Create a group. Called by torch's helper."""
        return self._create_group(
            str(backend_opts.group_id),
            backend_opts.global_ranks_in_group or range(backend_opts.group_size),  # empty for the world
            backend_opts.group_rank,
            backend_opts.store,
            self._requested_backends,
            backend_opts.timeout,
            options,
        )

    def _run_backward(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run autograd's engine, and restore the type of its errors.

        DDP waits inside it in C++, where every error becomes a RuntimeError, also that of an interrupt.
        """
        failure_before, ended = self._abort_failure(), False
        try:
            result = backward(*args, **kwargs)
            ended = True
            return result
        except RuntimeError as error:
            failure = self._abort_failure()
            replacement = failure.error_to_raise() if failure is not None and failure is not failure_before else None
            if replacement is None and "KeyboardInterrupt: " in message_of(error):
                replacement = KeyboardInterrupt()
            if replacement is None or isinstance(error, GroupBroken):
                raise
            raise replacement from None
        finally:
            self.is_backward_incomplete = self.is_backward_incomplete or not ended


def _check_world(backend: str | None, rank: int, size: int) -> None:
    """Raise ValueError if the world group of the mesh is not what `init_process_group` asks for."""
    own_rank, own_size, own_backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend_config())
    asked = rank if rank != -1 else own_rank, size if size != -1 else own_size
    if asked != (own_rank, own_size):
        raise ValueError(
            f"this process is rank {own_rank} of {own_size} of a mesh, which has formed the process group, and "
            f"init_process_group asks for rank {asked[0]} of {asked[1]}; take dist.get_rank() and "
            "dist.get_world_size(), or dist.new_group for fewer ranks; %mesh resize changes how many there are"
        )
    if backend is None:
        return
    wanted = c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    there = c10d.BackendConfig(dist.Backend(own_backend)).get_device_backend_map()
    if all(there.get(device) != kind for device, kind in wanted.items()):
        raise ValueError(
            f'init_process_group asks for "{backend}", and the mesh has formed the process group with "{own_backend}"; '
            "leave out the backend, or the call"
        )


def _world_is_on_gloo() -> bool:
    return bool(dist.is_initialized() and dist.get_backend() == "gloo")


def begin_world_generation(store: Store) -> None:
    """Have torch use another store with the world group, and forget collectives that were being coalesced."""
    world = dist.group.WORLD
    name, _ = c10d._world.pg_map[world]
    c10d._world.pg_map[world] = name, store
    c10d._world.pg_coalesce_state.clear()  # a leftover entry would make every later coalesced call fail


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
