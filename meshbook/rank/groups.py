"""The process groups of a rank: formed at its start, broken when somebody must get out of one, and formed again.

`Groups` makes every process group of its process a `WatchedGroup`, whoever asks for it: `form`, a DeviceMesh, the
user's own `dist.new_group`. So it can end all that is stuck (`sever`), and afterwards give the same objects new
connections, also to a member that is a new process (`form` with the next epoch).

Each epoch has its own corner of the store, `e<epoch>/<group>`, so nothing of a former epoch is ever met again.

What re-forming cannot know is what users' objects had under way when the groups broke. DDP and FSDP2 are made to forget
an unfinished step (`unfinished`). And a collective that was broken may have been completed on some ranks and not on
others: parameters can differ by one step, and only the user's program, or a checkpoint, can tell.
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
from meshbook.rank.backends import Link
from meshbook.rank.ring import Label, Ring, one_line
from meshbook.rank.store import MeshStore
from meshbook.rank.unfinished import forget_unfinished_steps, is_in_a_step, num_rearranged
from meshbook.rank.watched import Break, GroupBroken, Observer, WatchedGroup

__all__ = ["GroupBroken", "Groups", "Observer", "WatchedGroup"]

# torch's module of process groups, whose state has no other door.
c10d: Any = dist.distributed_c10d

# The name our groups have while torch creates them. Users never see it: `dist.get_backend()` says what they asked for.
_BACKEND = "meshbook"

# Seconds a collective may take before gloo gives up by itself: torch's own default. Stop and supervisor are quicker.
_COLLECTIVE_TIMEOUT_S = 1800.0

# Seconds that NCCL may take to abort before its rank counts as beyond help. Others saw 0.15 s (NeMo-RL) when it works.
_ABORT_S = 20.0


@dataclass(frozen=True)
class _Place:
    """What must be unchanged for groups to be formed again in place."""

    rank: int
    world_size: int
    device: torch.device
    axes: tuple[tuple[str, int], ...]


class Groups:
    """All process groups of this process. One per rank.

    `form` and `close` belong to the main thread. `sever`, `broken` and `broken_reason` may be used by any.

    Attributes:
        ring: where collectives are noted.
        observers: who else sees each collective; append and remove between collectives.
        epoch: of the groups as they are; None before the first.
        mesh: the DeviceMesh of all ranks; None before the first epoch.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        collective_timeout_s: float = _COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """
        Args:
            collective_timeout_s: of the groups that `form` makes, on gloo.
        """
        self.ring = ring
        self.observers: list[Observer] = []
        self.epoch: int | None = None
        self.mesh: DeviceMesh | None = None
        self._collective_timeout = timedelta(seconds=collective_timeout_s)
        self._store: Store | None = None
        self._join_timeout_s: float | None = None  # while forming
        self._place: _Place | None = None
        self._members: dict[str, WatchedGroup] = {}
        self._formed: set[str] = set()  # names of those that `form` itself made: every rank has them
        self._held: dict[str, set[int]] = {}  # other groups of this epoch's beginning, and the ranks that had them
        self._connected: Counter[str] = Counter()  # a group destroyed and made anew may have its former name
        self._asked: dict[str, str] = {}  # backends of the group being created
        self._lock = threading.Lock()
        self._severed: Break | None = None
        self._aborting: threading.Thread | None = None
        self._held_by: threading.Event | None = None
        self._joining: list[Label] = []
        self._left_backward = False  # a backward pass of the call that runs did not come to its end
        self._num_reaching = 0  # threads that wait for the store or for peers to connect
        self._replaced: list[tuple[Any, str, Any]] = []  # module, name, torch's own
        ring.skip(Path(torch.__file__).parent)
        ring.skip(typing_extensions.__file__)  # its wrapper of deprecated functions lies between the user and torch

    # ---- broken, or not

    @property
    def broken(self) -> bool:
        """True when any group cannot be used until the next `form`."""
        return self.broken_reason is not None

    @property
    def broken_reason(self) -> str | None:
        if self._severed is not None:
            return self._severed.reason
        for group in list(self._members.values()):
            if group.broken is not None:
                return group.broken.reason
        return None

    def sever(self, error: BaseException, *, epoch: int | None = None) -> None:
        """End every wait in a collective, in whichever thread, with `error`, and break all groups. Any thread.

        Does not wait for those threads. Each gets its own copy of `error`. On gloo they have it within milliseconds.
        On CUDA a thread that waits for the device (`.item()`, `synchronize`) comes back as if all were well, and it is
        its next collective that raises, so look at `broken` too before believing a result.

        Args:
            epoch: break the groups of this epoch only; a no-op when others have taken their place.
        """
        with self._lock:
            if epoch is not None and epoch != self.epoch:
                return
            cause = Break(str(error).splitlines()[0] if str(error) else type(error).__name__, error)
            if self._severed is None:
                self._severed = cause
            members = list(self._members.values())
            links = [link for group in members for link in group.links]
            if self._num_reaching > 0 and isinstance(self._store, MeshStore):
                self._store.give_up()
        for group in members:
            group.break_off(cause)
        self.go_on()
        self._cut(links)

    def complete_futures(self) -> None:
        """Of collectives that have ended unnoticed. Any thread; does not wait."""
        for group in self.members():
            group.complete_futures()

    @property
    def severed_with(self) -> Break | None:
        """What all groups were severed with since they were formed."""
        return self._severed

    def hold(self) -> None:
        """Have the collectives that begin from now on wait for `go_on`."""
        if self._held_by is None:
            self._held_by = threading.Event()
        for group in list(self._members.values()):
            group.held = self._held_by

    def go_on(self) -> None:
        """Collectives that `hold` keeps waiting may begin. Any thread."""
        held, self._held_by = self._held_by, None
        for group in list(self._members.values()):
            group.held = None
        if held is not None:
            held.set()

    @property
    def is_held(self) -> bool:
        return self._held_by is not None

    def call_ended(self, *, well: bool) -> None:
        """A call is over. A model that it left in the middle of a step would go on from another point on each rank:
        then the groups are to be formed again, which has all ranks forget the step. To be called when no user code
        runs."""
        left_backward, self._left_backward = self._left_backward, False
        if well or self.broken or not is_in_a_step(left_backward=left_backward):
            return
        cause = Break("a model was left in the middle of a step")
        for group in self.members():
            group.break_off(cause)

    def break_named(self, names: Iterable[str], reason: str, *, epoch: int) -> None:
        """Refuse these groups until they are formed again; a no-op when another epoch's are there. Any thread."""
        if epoch == self.epoch:
            for name in names:
                group = self._members.get(name)
                if group is not None and group.broken is None:
                    group.break_off(Break(reason))

    def members(self) -> list[WatchedGroup]:
        """Every group of this process."""
        return list(self._members.values())

    @property
    def num_named(self) -> int:
        """How many groups torch has named here, which is the next one's name."""
        return int(c10d._world.group_count)

    @property
    def joining(self) -> tuple[Label, ...]:
        """Groups that wait for their members to come."""
        return tuple(self._joining)

    @property
    def on_nccl(self) -> bool:
        """Whether any group of this process has an NCCL backend."""
        return any(link.kind == "nccl" for group in self.members() for link in group.links)

    @property
    def waiting(self) -> bool:
        """True while a thread is in a collective, or waits for the others to form a group. Any thread."""
        return self._num_reaching > 0 or bool(self.ring.running())

    def _cut(self, links: Iterable[Link]) -> None:
        """End what is stuck in these backends. Does not wait."""
        links = list(links)
        backends.cut_connections({address for link in links for address in link.addresses})
        nccl, before = [link for link in links if link.kind == "nccl"], self._aborting
        if nccl:

            def abort() -> None:
                if before is not None:
                    before.join()
                backends.abort(nccl)

            # A thread of its own: NCCL's abort takes long or hangs now and then, and who severs has other duties.
            self._aborting = threading.Thread(target=abort, name="abort NCCL", daemon=True)
            self._aborting.start()

    # ---- forming

    def form(
        self,
        epoch: int,
        *,
        rank: int,
        world_size: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        axes: Mapping[str, int],
    ) -> DeviceMesh:
        """The world group and one group per axis, connected. Blocks until all ranks have come.

        The first time this initialises torch.distributed. Later, with the same place in a world of the same shape, it
        gives every group new connections and returns the same DeviceMesh; with another place or shape it starts from
        scratch, and returns a new one. All ranks call it with the same epoch; some may do so for the first time.

        Groups that the user made are formed again too, if all their members are still the processes that made them.
        A group that a new process does not have yet is connected when it is first used, so it can make it meanwhile.

        Args:
            epoch: greater than every one before.
            store: the same for all ranks. A `MeshStore` is told when to give up waiting.
            device: cpu for gloo; cuda, with its index, for NCCL and beside it gloo for CPU tensors.
            timeout_s: seconds to wait for the others.
            axes: sizes by name; their product is `world_size`.

        Raises:
            MeshShapeError: the axes do not make the world.
            RuntimeError: not all came in time. Groups are broken; try again with the next epoch.
            BaseException: what the groups were severed with meanwhile.
        """
        if math.prod(axes.values()) != world_size:
            sizes = " * ".join(f"{name}={size}" for name, size in axes.items())
            raise MeshShapeError(
                f"mesh axes {sizes} need {math.prod(axes.values())} ranks, but the world has {world_size}; "
                "change an axis or the number of ranks"
            )
        if self.epoch is not None and epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} has passed: the groups are those of epoch {self.epoch}")
        place = _Place(rank, world_size, device, tuple(axes.items()))
        in_place = self.mesh is not None and place == self._place and dist.group.WORLD in self._members.values()
        if not in_place:
            self._drop_world()
        else:
            self._cut_all("the groups are formed again")
        with self._lock:
            self.epoch, self._severed = epoch, None
        self._place, self._held, self._store = place, {}, store
        self._connected.clear()
        self._join_timeout_s = timeout_s
        self.go_on()
        try:
            store.set_timeout(timedelta(seconds=timeout_s))
            if in_place:
                self._form_again(store)
            else:
                self._form_first(place, store)
        except BaseException as error:
            with self._lock:
                if self._severed is None:
                    said = str(error).splitlines()
                    why = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
                    self._severed = Break(f"it could not be formed: {why}")
            for group in self._members.values():
                group.break_off(self._severed)
            raise
        finally:
            self._join_timeout_s = None
        assert self.mesh is not None
        return self.mesh

    def close(self) -> None:
        """Leave all groups without waiting for anybody. torch.distributed is as before the first `form` afterwards."""
        self._drop_world()
        self._uninstall()

    def _form_first(self, place: _Place, store: Store) -> None:
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
            # Or else a DeviceMesh, which sees no device in use, would choose one by LOCAL_RANK.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._install()
        hook = sys.excepthook
        dist.init_process_group(
            "nccl" if place.device.type == "cuda" else "gloo",
            store=PrefixStore(f"e{self.epoch}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self._collective_timeout,
        )
        sys.excepthook = hook  # torch's would put the rank before each line; whoever shows our output does that
        names, sizes = zip(*place.axes, strict=True)
        self.mesh = init_device_mesh(place.device.type, sizes, mesh_dim_names=names)
        self._formed = set(self._members)
        self._agree((), None)

    def _form_again(self, store: Store) -> None:
        """New connections for the groups of the epoch before."""
        mine = list(self._members.values())
        for group in mine:
            group.let_go()
        for group in mine:
            if group.label.name in self._formed:
                self.connect(group)
        world = dist.group.WORLD
        name, _ = c10d._world.pg_map[world]
        c10d._world.pg_map[world] = name, PrefixStore(f"e{self.epoch}", store)
        c10d._world.pg_coalesce_state.clear()  # left full, it refuses every later coalesced call
        others = sorted(set(self._members) - self._formed)  # one order for all ranks, or two could wait for each other
        alike = self._agree(others, c10d._world.group_count, num_rearranged())
        for name in others:
            group = self._members[name]
            if self._held[name].issuperset(group.label.ranks):
                self.connect(group)
        forget_unfinished_steps(alike=alike)

    def _agree(self, names: list[str] | tuple[()], num_named: int | None, rearranged: int = 0) -> bool:
        """Learn which ranks have which groups besides those that all have, and level the numbers that torch names
        groups by: where some ranks alone made a group, all would wait for each other in the next one for ever.

        Args:
            num_named: how many groups torch has named here; None in a new process, which has those of the user's still
                to make, under the names that they have elsewhere.
            rearranged: how many models have other buckets than at the beginning.

        Returns:
            Whether all ranks told the same number of such models.
        """
        assert self._store is not None
        assert self._place is not None
        store = PrefixStore(f"e{self.epoch}/held", self._store)
        with self._reaching():
            store.set(str(self._place.rank), json.dumps([names, num_named, rearranged]))
            told = store.multi_get([str(rank) for rank in range(self._place.world_size)])
        numbers: list[int] = []
        models: set[int] = set()
        for rank, text in enumerate(told):
            held, number, has_rearranged = json.loads(text)
            models.add(has_rearranged)
            if number is not None:
                numbers.append(number)
            for name in held:
                self._held.setdefault(name, set()).add(rank)
        if len(numbers) == len(told):
            c10d._world.group_count = max(numbers)
        return len(models) == 1

    def _cut_all(self, reason: str) -> None:
        """End what may still be under way in the background, before its connections are replaced or dropped."""
        members = list(self._members.values())
        for group in members:
            group.break_off(Break(reason))
        self._cut(link for group in members for link in group.links)
        if self._aborting is not None:
            self._aborting.join(_ABORT_S)
            if self._aborting.is_alive():
                raise RuntimeError(
                    f"NCCL did not give up its communicators within {_ABORT_S:.0f} s: this rank is lost. That takes a "
                    "new mesh: %mesh stop, then %mesh start"
                )
            self._aborting = None

    def _drop_world(self) -> None:
        self._formed = set()
        if self._members:
            # A backend's destructor joins threads that may be stuck in an operation.
            self._cut_all("the groups were closed")
        if isinstance(dist.group.WORLD, WatchedGroup):
            dist.destroy_process_group()
        elif not dist.is_initialized():
            c10d._world.group_count = 0  # a first attempt that failed used up a name that others have still to use
        self._members.clear()
        self.mesh = self._place = self._store = None

    # ---- what a WatchedGroup asks of us

    def connect(self, group: WatchedGroup) -> None:
        """Connect a group's real backends in this epoch. Blocks until all its members have come.

        Raises:
            GroupBroken: all groups are broken, and this one would be.
            RuntimeError: not all came in time.
            BaseException: what the groups were severed with meanwhile.
        """
        assert self._store is not None
        self._refuse_severed()
        if self._held_by is not None:
            group.held = self._held_by
            group._admit("making a process group")
        name = group.label.name
        again, self._connected[name] = self._connected[name], self._connected[name] + 1
        store = PrefixStore(f"e{self.epoch}/{name}" + (f"/{again}" if again else ""), self._store)
        made: dict[str, Link] = {}
        self._joining.append(group.label)
        try:
            with self._reaching():
                for kind in group.backends.values():
                    if kind not in made:
                        made[kind] = self._link(kind, PrefixStore(kind, store), group)
        except BaseException as error:
            # Its corner of the store has half of this attempt in it, so a second one needs another epoch.
            group.break_off(Break(f"connecting it failed: {one_line(error)}"))
            raise
        finally:
            self._joining.remove(group.label)
        group.label.restart(self.epoch or 0)
        group.adopt(list(made.values()), store)
        with self._lock:
            severed = self._severed
        if severed is not None:  # while we were connecting
            group.break_off(severed)
            self._cut(group.links)

    def _link(self, kind: str, store: Store, group: WatchedGroup) -> Link:
        rank, size = group.rank(), group.size()
        if kind == "nccl":
            return backends.connect_nccl(store, rank, size, timeout=group.timeout, options=group.options)
        return backends.connect_gloo(
            store,
            rank,
            size,
            # Ranks that all reach a store on this machine are on it too: gloo, which asks nobody for a key, need not
            # be reachable from any other.
            hostname="127.0.0.1" if isinstance(self._store, MeshStore) and self._store.is_local else None,
            connect_timeout_s=self._join_timeout_s or group.timeout.total_seconds(),
            timeout=group.timeout,
        )

    def forget(self, group: WatchedGroup) -> None:
        """A group was destroyed. One with a stuck operation is cut, since dropping it would wait for the operation."""
        if self._members.pop(group.label.name, None) is None:
            return
        self._formed.discard(group.label.name)
        if any(collective.label is group.label for collective in self.ring.running()):
            group.break_off(Break("the group was destroyed"))
            self._cut(group.links)
        if group is dist.group.WORLD:
            self.mesh = self._place = self._store = None

    def split(self, parent: WatchedGroup, ranks: list[int], name: str, timeout: timedelta) -> WatchedGroup:
        """A new group like `parent`, of some of its members (global ranks, this one among them)."""
        rank = ranks.index(parent.label.ranks[parent.rank()])
        return self._make(name, ranks, rank, parent.get_group_store(), parent.backends, timeout, parent.options)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around whatever waits for the store or for peers, so that `sever` ends it, with its own error."""
        store = self._store
        with store.one_wait() if isinstance(store, MeshStore) else contextlib.nullcontext():
            with self._lock:
                self._refuse_severed()
                self._num_reaching += 1
            try:
                yield
            except RuntimeError:
                told = self._severed.raised() if self._severed is not None else None
                if told is not None:
                    raise told from None
                raise
            finally:
                with self._lock:
                    self._num_reaching -= 1

    def _refuse_severed(self) -> None:
        """Raises: what all groups were severed with, while they are formed; GroupBroken at other times."""
        if self._severed is not None:
            forming = self._join_timeout_s is not None
            raise (self._severed.raised() if forming else None) or GroupBroken(
                f"a process group cannot be connected while all are broken ({self._severed.reason}). They are formed "
                "again before the next cell: run the cell again"
            )

    # ---- making every group of this process one of ours

    def _install(self) -> None:
        """Stand in torch's one way of making groups, which `init_process_group` and `new_group` take, and in two more
        places where torch treats our groups differently from its own."""
        if self._replaced:
            return
        dist.Backend.register_backend(_BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"])
        helper, one_by_one = c10d._new_process_group_helper, c10d.batch_isend_irecv
        backward = torch.autograd.graph._engine_run_backward
        signature = inspect.signature(helper)

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            return self._new_process_group(helper, signature.bind(*args, **kwargs))

        def batch_isend_irecv(p2p_op_list: Any) -> Any:
            return _batch_isend_irecv(one_by_one, p2p_op_list)

        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            return self._run_backward(backward, args, kwargs)

        self._replace(c10d, "_new_process_group_helper", new_process_group)
        self._replace(c10d, "batch_isend_irecv", batch_isend_irecv)
        self._replace(dist, "batch_isend_irecv", batch_isend_irecv)
        self._replace(torch.autograd.graph, "_engine_run_backward", engine_run_backward)
        self._replace(torch.autograd, "_engine_run_backward", engine_run_backward)

    def _replace(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _uninstall(self) -> None:
        for module, name, function in self._replaced:
            setattr(module, name, function)
        self._replaced.clear()

    def _new_process_group(self, helper: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """torch's helper, for a group of ours in place of the one asked for, under the name asked for."""
        asked = dist.Backend(call.arguments["backend"])
        config = c10d.BackendConfig(asked)
        kinds = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        if not set(kinds.values()) <= {"gloo", "nccl"} or getattr(c10d._world, "comms", None):
            return helper(*call.args, **call.kwargs)  # fake, MPI, UCC, torchcomms: not ours to break
        if "nccl" in kinds.values():
            kinds.setdefault("cpu", "gloo")  # NCCL alone refuses CPU tensors; nobody minds if they work
        call.arguments["backend"] = _BACKEND
        # With a bound device torch would have NCCL split communicators off the default group's, which ties the life of
        # each to the other's; ours are made one by one and can be aborted and replaced one by one.
        call.arguments["device_id"] = None
        world: Any = dist.group.WORLD
        bound = world.bound_device_id if world is not None else None
        self._asked = kinds
        if bound is not None:
            world.bound_device_id = None
        try:
            group, store = helper(*call.args, **call.kwargs)
        finally:
            if bound is not None:
                world.bound_device_id = bound
        if isinstance(group, WatchedGroup):
            c10d._world.pg_map[group] = asked, store
            c10d._world.pg_backend_config[group] = str(config)
        return group, store

    def _run_backward(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Autograd's engine. DDP waits inside it in C++, where every error becomes a RuntimeError, a Stop's too."""
        before, ended = self._severed, False
        try:
            result = backward(*args, **kwargs)
            ended = True
            return result
        except RuntimeError as error:
            cause = self._severed
            told = cause.raised() if cause is not None and cause is not before else None
            if told is None and "KeyboardInterrupt: " in str(error):
                told = KeyboardInterrupt()
            if told is None or isinstance(error, GroupBroken):
                raise
            raise told from None
        finally:
            self._left_backward = self._left_backward or not ended

    def _create(self, told: Any, options: Any = None) -> WatchedGroup:
        """Called by torch's helper to create a group."""
        ranks = told.global_ranks_in_group or range(told.group_size)  # empty for the world
        return self._make(str(told.group_id), ranks, told.group_rank, told.store, self._asked, told.timeout, options)

    def _make(
        self, name: str, ranks: Any, rank: int, store: Store, kinds: Mapping[str, str], timeout: timedelta, options: Any
    ) -> WatchedGroup:
        if self._store is None:  # the user destroyed our world and makes one of their own, with their own store
            self._store, self._severed = store, None
        label = Label(name, ranks)
        group = WatchedGroup(self, label, rank, store=store, backends=kinds, timeout=timeout, options=options)
        self._members[name] = group  # at once, so that whoever severs finds it
        if not self._held.get(name, set()).intersection(label.ranks):
            try:
                self.connect(group)
            except BaseException:
                del self._members[name]
                raise
        return group


def _batch_isend_irecv(one_by_one: Callable[[Any], Any], p2p_op_list: Any) -> Any:
    """`dist.batch_isend_irecv`, which batches only for a group whose type is exactly ProcessGroup.

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
