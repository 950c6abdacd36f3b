"""A rank's tensors by id, and the batches of operations that work on them.

`Tensors.run` carries out one `RunOps` on the main thread. What an operation raises becomes a `Poison` in place of its
outputs, and of what it was to change; operations on poison are skipped and pass it on; everything else goes on. So a
fault is told when somebody waits for what depends on it, with the number of the operation that had it, and the
controller knows the line that issued it.

What an operation was to change keeps its value beside the fault: nothing was written to it, if the operation was not
begun. The controller has it back by `CLEAR` once the user knows of the fault, and an operation that overwrites all of
it needs no permission.

Seams for recordings: `Tensors.space(engine)` gives a `Space` (values by id, templates by number); `execute` runs a
list of numbers against any mapping of values; `EXTRAS` maps further commands' names to functions of (space, arguments).
"""

from __future__ import annotations

import hashlib
import pickle
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

from meshbook.clock import monotonic, sleep
from meshbook.rank.tensors import agreement, feeding, modes, reading, rules
from meshbook.rank.tensors.agreement import Steps
from meshbook.rank.tensors.calls import FLOAT, FUNCTIONS, MESH, TENSOR, Sent, find
from meshbook.wire.messages import Frame, Issued, Rows, RunOps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshbook.rank.groups import Groups

# Numbers in place of a template's, before a count and so many ids: let go of them; forget their faults.
FREE, CLEAR = 0, -1

# Who else keeps things for a client; called with its name when it is gone, from any thread.
ON_DROP: list[Callable[[str], None]] = []

# Of generated code, by its file name: which operation a line of it carries out now, and the line that issued that one.
GENERATED: dict[str, Callable[[int], tuple[str, Frame | None]]] = {}

# Errors of a rank that was in order, and that another one's fault has released from a collective.
_RELEASED = ("GroupBroken", "CollectiveAborted", "StepRefused")
# Seconds that a rank waits to hear whether the others had the same fault before it takes them for stuck without it.
_SAME_FAULT_S = 1.0
# Faults of which it is remembered that the others were told.
_MAX_TOLD_FAULTS = 1000

_issued = msgspec.msgpack.Decoder(Issued)
_numbers: msgspec.msgpack.Decoder[list[int | float]] = msgspec.msgpack.Decoder(list[int | float])


@dataclass(frozen=True)
class Poison:
    """What stands for a tensor that could not be computed."""

    number: int  # of the operation that failed first
    ename: str
    evalue: str
    trace: str  # the rank's traceback, as text
    interrupted: bool = False
    secondary: bool = False  # another rank had the fault, and this one was released from its collective
    # Of a tensor that was to be changed:
    kept: Any = field(default=None, compare=False)  # the tensor; None: there was none
    skipped: int = 0  # operations that were to change it and were not begun
    begun: bool = False  # one was, and may have written a part
    # Of a view that was not made:
    base: int | None = field(default=None, compare=False)  # the id of what it would be a view of

    def told(self) -> dict[str, Any]:
        names = ("number", "ename", "evalue", "trace", "interrupted", "secondary")
        return {name: getattr(self, name) for name in names}

    def alone(self) -> Poison:
        """Of a tensor that there is not."""
        if self.kept is None and not self.skipped and self.base is None:
            return self
        return replace(self, kept=None, skipped=0, begun=False, base=None)


class Poisoned(Exception):
    """A value was asked for that could not be computed."""

    def __init__(self, poison: Poison) -> None:
        super().__init__(poison.evalue)
        self.poison = poison


class UnderWay(NamedTuple):
    """What of a batch is carried out now."""

    operation: str  # "aten.mm"
    line: Frame | None  # of the controller, which issued it
    cells: dict[str, str]  # "cell 7", by file names of lines
    generated: dict[str, Callable[[int], tuple[str, Frame | None]]]  # `GENERATED`


class Template:
    """How one kind of operation is carried out."""

    __slots__ = (
        "build", "call", "communicates", "default", "kwargs", "mutates", "name", "new", "num_floats", "num_in",
        "num_new", "outputs", "overwrites", "plain", "returns", "seeded", "views",
    )  # fmt: skip

    def __init__(self, sent: Sent, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.name = sent.function
        self.default = None if sent.default is None else getattr(torch, sent.default)
        function = _found(sent.function)
        self.call = function if self.default is None else _with_default(function, self.default)
        self.outputs, self.returns, self.mutates = sent.outputs, sent.returns, sent.mutates
        self.communicates, self.seeded, self.overwrites = sent.communicates, sent.seeded, sent.overwrites
        self.views = sent.views
        self.new = [index for index, output in enumerate(sent.outputs) if output == -1]
        self.num_new = len(self.new)

        def settle(leaf: Any) -> Any:
            if leaf is MESH:
                return mesh
            return device if isinstance(leaf, torch.device) else leaf

        args, self.kwargs = pytree.tree_map(settle, (sent.args, sent.kwargs))
        self.num_in, self.num_floats, self.plain, self.build = _builder(args, self.kwargs)
        if self.seeded:
            self.num_floats += 1


def _found(name: str) -> Callable[..., Any]:
    """The function of that name; of one that this rank does not know, what says so, unless it does by then."""
    try:
        return find(name)
    except AttributeError:
        pass

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            function = find(name)
        except AttributeError:
            raise NotImplementedError(
                f"the operator {plain_name(name)} is registered in the notebook's process and not on the ranks; run "
                "the cell that defines it there too, or import its module in a cell, and do this again"
            ) from None
        return function(*args, **kwargs)

    return call


def _with_default(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The function where new floating-point tensors are of that dtype, as they are on the controller."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call


def _builder(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int, bool, Callable[[list[Any], Any], Any]]:
    """How many tensors and floats the arguments take, whether the tensors are all of them, and what joins them."""
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if leaf is TENSOR]
    floats = [at for at, leaf in enumerate(leaves) if leaf is FLOAT]
    flat = not kwargs and all(not isinstance(arg, (list, tuple, dict)) for arg in args)
    if flat and len(tensors) == len(args):
        return len(tensors), 0, True, lambda ins, numbers: (ins, {})
    if flat:

        def build_flat(ins: list[Any], numbers: Any) -> Any:
            filled = leaves.copy()
            for at, tensor in zip(tensors, ins, strict=True):
                filled[at] = tensor
            for at, number in zip(floats, numbers, strict=False):
                filled[at] = number
            return filled, {}

        return len(tensors), len(floats), False, build_flat

    def build(ins: list[Any], numbers: Any) -> Any:
        filled = leaves.copy()
        for at, tensor in zip(tensors, ins, strict=True):
            filled[at] = tensor
        for at, number in zip(floats, numbers, strict=False):
            filled[at] = number
        return pytree.tree_unflatten(filled, tree)

    return len(tensors), len(floats), False, build


@dataclass
class Space:
    """One engine's tensors and templates on this rank.

    Attributes:
        values: tensor (DTensor, or plain where the view is per rank) or Poison, by id.
        number, doing: the operation that is carried out, and how; None: what was asked for is being fetched.
        sticky: the first failure of an operation that had no output to poison; told at the next wait.
        faults: failures since the last report.
        refused: why no operation of the optimizer's step that is under way is run.
        faulty: whether any value may be poison.
        unbegun: whether a batch is about to run, and `execute` does not answer for its operations yet.
    """

    name: str
    mesh: DeviceMesh | None
    device: torch.device
    values: dict[int, Any] = field(default_factory=dict)
    templates: dict[int, Template] = field(default_factory=dict)
    sticky: Poison | None = None
    faults: list[Poison] = field(default_factory=list)
    num_ops: int = 0
    number: int = 0
    doing: Template | None = None
    steps: Steps = field(default_factory=Steps)
    modes: modes.Batches = field(default_factory=modes.Batches)
    refused: Poison | None = None
    faulty: bool = False
    unbegun: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    # Ids by the storage of their tensors, while there are faults; and those that are in it.
    _by_storage: dict[int, list[int]] = field(default_factory=dict)
    _indexed: set[int] = field(default_factory=set)

    def take(self, id: int) -> Any:
        """The tensor of that id.

        Raises:
            Poisoned: it could not be computed, or was never: its batch was stopped.
        """
        value = self.values.get(id)
        if value is None:
            value = Poison(0, "Interrupted", "its computation was stopped before it ran", "", interrupted=True)
        if isinstance(value, Poison):
            raise Poisoned(value)
        return value

    def fault(self, id: int, poison: Poison, *, base: int | None = None) -> None:
        """The tensor of that id could not be computed.

        Args:
            base: the id of what it would be a view of; None: it would be none.
        """
        if base is not None:
            below = self.values.get(base)
            base = below.base if isinstance(below, Poison) and below.base is not None else base
            self.values[id] = replace(poison.alone(), base=base)
        else:
            self.values[id] = poison.alone()
        self.faulty = True

    def spare(self, id: int, poison: Poison, *, begun: bool = False) -> None:
        """The tensor of that id was to be changed, and was not; or, begun, maybe in part. So was whatever shares its
        storage."""
        self.faulty = True
        now = self.values.get(id)
        if isinstance(now, Poison) and now.kept is None and now.base is not None:
            self._spare(id, poison, begun)
            id = now.base
        for other in self._sharing(id):
            self._spare(other, poison, begun)

    def _spare(self, id: int, poison: Poison, begun: bool) -> None:
        now = self.values.get(id)
        if isinstance(now, Poison):
            self.values[id] = replace(now, skipped=now.skipped + 1, begun=now.begun or begun)
        else:
            self.values[id] = replace(poison, kept=now, skipped=1, begun=begun, base=None)

    def _sharing(self, id: int) -> list[int]:
        """The id, and those of all tensors on the same storage."""
        storage = _storage(self.values.get(id))
        if storage is None:
            return [id]
        for new in reversed(self.values):  # what is new in a dict is at its end
            if new in self._indexed:
                break
            self._indexed.add(new)
            if (its := _storage(self.values[new])) is not None:
                self._by_storage.setdefault(its, []).append(new)
        others = self._by_storage.get(storage, ())
        return [id, *(other for other in others if other != id and _storage(self.values.get(other)) == storage)]

    def clear(self, ids: Sequence[int]) -> None:
        """Who asks for these tensors again knows that they were not changed."""
        for id in ids:
            now = self.values.get(id)
            if isinstance(now, Poison) and now.kept is not None:
                self.values[id] = now.kept

    def faulted(self) -> list[dict[str, Any]]:
        """The ids that have faults, by fault."""
        found: dict[Any, dict[str, Any]] = {}
        for id, value in self.values.items():
            if isinstance(value, Poison):
                key = value.number, value.ename
                of = found.setdefault(key, {**value.told(), "lost": [], "spared": {}, "begun": []})
                if value.kept is None:
                    of["lost"].append(id)
                else:
                    of["spared"][id] = value.skipped
                    if value.begun:
                        of["begun"].append(id)
        self.faulty = bool(found)
        if not found:
            self._by_storage, self._indexed = {}, set()
        return list(found.values())


class Tensors:
    """All engines of this rank. Main thread only, but for `space` counts."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        groups: Groups | None,
        *,
        load: Callable[[Any], Any],
        dump: Callable[[Any], Any],
        resolve: Callable[[str], Any],
        hold: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """
        Args:
            load: a payload's object.
            dump: an object's payload, large buffers in shared memory.
            resolve: what this rank has under a key, such as "name:w".
            hold: lines that a Stop must not part; it is raised at their end.
        """
        self.rank, self.device = rank, device
        self._groups, self._load, self._dump, self._resolve = groups, load, dump, resolve
        self._spaces: dict[str, Space] = {}
        self._running: tuple[RunOps, Space] | None = None
        self._told_faults: dict[str, None] = {}  # those of late
        self._gone: set[str] = set()  # clients; what they had sent before may still come
        FUNCTIONS["adopt"] = self._adopt
        agreement.hold = hold
        rules.install()

    def space(self, engine: str) -> Space:
        """The engine's space, made when it is first named: "<client>/<axes and places of its part of the mesh>"."""
        found = self._spaces.get(engine)
        if found is None:
            found = self._spaces[engine] = Space(engine, self._mesh_of(engine), self.device)
        return found

    def _mesh_of(self, engine: str) -> DeviceMesh | None:
        """The DeviceMesh of the part of the mesh that an engine's name tells: "client|dp,tp|"."""
        if self._groups is None or self._groups.mesh is None:
            return None
        names = tuple(name for name in engine.split("|")[1].split(",") if name)
        whole = self._groups.mesh
        return whole if names == whole.mesh_dim_names else whole[names]

    def drop(self, client: str) -> None:
        """Forget what a client that is gone held. Any thread: a batch that runs keeps its space to its end."""
        self._gone.add(client)
        for name in [name for name in self._spaces if name.partition("|")[0] == client]:
            del self._spaces[name]
        for forget in ON_DROP:
            forget(client)

    def resolve(self, key: str) -> Any:
        """The tensor behind a handle that came among arguments: "<engine>#<id>"."""
        engine, _, id = key.rpartition("#")
        try:
            return self.space(engine).take(int(id))
        except Poisoned as error:
            raise RuntimeError(
                f"this tensor could not be computed: {error.poison.ename}: {error.poison.evalue}"
            ) from None

    def run(self, command: RunOps) -> dict[str, Any]:
        """Carry out a batch; what the controller is to know of it: faults, and the value it asked for.

        Raises:
            KeyboardInterrupt: Stop. What had not run yet is poison.
        """
        space = self.space(command.engine)
        space.number, space.doing, self._running = command.first, None, (command, space)
        agreement.current, modes.current = space.steps, space.modes
        before = _met(space.mesh)
        try:
            space.modes.begin()
            with rules.ours():
                answer = self._run(command, space)
            if (met := _met(space.mesh)) != before:
                answer["met"] = [now - then for now, then in zip(met, before, strict=True)]
            return answer
        finally:
            space.modes.end()
            self._running = agreement.current = modes.current = None
            space.steps.end()
            client = command.engine.partition("|")[0]
            if client in self._gone:
                self.drop(client)

    def expect(self, command: RunOps) -> None:
        """`run` is about to be called with this batch, unless a Stop comes before its operations are begun."""
        self.space(command.engine).unbegun = True

    def give_up(self, command: RunOps) -> None:
        """Remember that the batch that was expected is not run, if none of its operations was begun."""
        space = self.space(command.engine)
        if not space.unbegun:
            return
        space.unbegun = False
        self._learn(command, space)
        poison = Poison(command.first, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)
        for upload in command.uploads:
            space.fault(upload.id, poison)
        for rows in command.fed:
            for id in rows.ids:
                space.fault(id, poison)
        _skip(space, _numbers.decode(command.ops), 0, space.values, poison)

    def under_way(self) -> UnderWay | None:
        """The operation that runs now, and who issued it; None between batches. Any thread; reads, and waits for
        nothing."""
        running = self._running
        if running is None:
            return None
        command, space = running
        template, number = space.doing, space.number
        if template is None:
            operation = f"fetch {command.fetch.how}" if command.fetch is not None else "a batch's beginning"
        else:
            operation = plain_name(template.name)
        if not command.issued:
            return UnderWay(operation, None, {}, GENERATED)
        issued = _issued.decode(command.issued)
        place = issued.places[min(number - command.first, len(issued.places) - 1)]
        return UnderWay(operation, issued.lines[place], issued.cells, GENERATED)

    def _learn(self, command: RunOps, space: Space) -> None:
        for body in command.templates:
            sent: Sent = pickle.loads(body)
            space.templates[sent.number] = Template(sent, space.mesh, space.device)

    def _run(self, command: RunOps, space: Space) -> dict[str, Any]:
        self._learn(command, space)
        for upload in command.uploads:
            self._receive(space, upload.id, *self._load(upload.payload))
        for rows in command.fed:
            self._receive_rows(space, rows)
        with torch.no_grad():
            shared = partial(self._shared_fault, space)
            execute(space, _numbers.decode(command.ops), space.values, command.first, shared, self._is_released)
            answer: dict[str, Any] = {}
            fetch = command.fetch
            if fetch is not None:
                try:
                    answer = self._fetch(space, fetch)
                except Exception as error:
                    poison = _poison(space.number, error, secondary=self._is_released(error))
                    answer = {"poison": poison.told()}
        for number in command.forget:
            space.templates.pop(number, None)
        if space.faults:
            answer["faults"] = [fault.told() for fault in space.faults]
            space.faults = []
        if space.faulty and (faulted := space.faulted()):
            answer["faulted"] = faulted
        return answer

    def _is_released(self, error: BaseException) -> bool:
        """Whether an operation failed because its collective was broken, and so for another rank's sake."""
        groups = self._groups
        known = type(error).__name__ in _RELEASED
        return known or (isinstance(error, RuntimeError) and groups is not None and groups.broken)

    def _receive(self, space: Space, id: int, tensor: torch.Tensor, placements: Any) -> None:
        """Bind what the controller sent. A payload's memory may be shared and is private only page by page: copied."""
        tensor = tensor.detach()
        if placements is None:
            space.values[id] = tensor.to(self.device, copy=True)
        elif all(placement.is_replicate() for placement in placements):
            own = tensor.to(self.device, copy=True)
            assert space.mesh is not None
            space.values[id] = DTensor.from_local(own, space.mesh, placements, run_check=False)
        else:
            whole = distribute_tensor(tensor, space.mesh, placements, src_data_rank=None)
            own = whole.to_local().to(self.device, copy=True)
            space.values[id] = DTensor.from_local(
                own, space.mesh, placements, run_check=False, shape=tensor.shape, stride=_contiguous(tensor.shape)
            )

    def _receive_rows(self, space: Space, rows: Rows) -> None:
        try:
            tensors, placements = self._load(rows.payload)
            for id, tensor, places in zip(rows.ids, tensors, placements, strict=True):
                space.values[id] = feeding.part_of(tensor, space.mesh, places, self.device)
        except Exception as error:
            poison = _poison(-rows.ids[0], error)  # of no operation
            for id in rows.ids:
                space.fault(id, poison)

    def _fetch(self, space: Space, fetch: Any) -> dict[str, Any]:
        if fetch.how == "state":
            return {"done": list(space.steps.done), "hashes": [_hash_of(space.values.get(id)) for id in fetch.ids]}
        sticky, space.sticky = space.sticky, None
        if sticky is not None:
            return {"poison": sticky.told()}
        if fetch.how == "nothing":
            return {"live": len(space.values), "templates": len(space.templates)}
        try:
            value = space.take(fetch.id)
        except Poisoned as error:
            if fetch.how != "local" and not error.poison.interrupted:
                self._shared_fault(space, error.poison)
            return {"poison": error.poison.told()}
        mine = self.rank in fetch.ranks
        if fetch.how == "item":
            if isinstance(value, DTensor):
                value = value.full_tensor()
            return {"value": self._dump(value.item())} if mine else {}
        if fetch.how == "parts" and isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                places = [Replicate() if place.is_partial() else place for place in value.placements]
                value = value.redistribute(placements=places)
            value = _plain(value.to_local())
        elif isinstance(value, DTensor):
            value = _plain(value.to_local())
        if not mine or (fetch.room is not None and reading.write(fetch.room, self.rank, value.detach())):
            return {}
        return {"value": self._dump(value.detach().cpu())}

    def _shared_fault(self, space: Space, poison: Poison) -> None:
        """Called where this rank cannot take part in a collective because of a fault. If the others have had the same
        fault nobody waits; if they have not, they wait for this rank, and are freed by breaking the groups."""
        groups = self._groups
        store = None if groups is None else groups._store
        # A group that broke because of a neighbour's closed connection still keeps other neighbours waiting.
        if groups is None or store is None or groups.severed_with is not None:
            return
        everybody = space.mesh.size() if space.mesh is not None else 1
        key = f"meshbook/fault/{groups.epoch}/{space.name}/{poison.number}/{poison.ename}"
        mark = f"{key}/{self.rank}"
        if mark not in self._told_faults:
            self._told_faults[mark] = None
            if len(self._told_faults) > _MAX_TOLD_FAULTS:
                del self._told_faults[next(iter(self._told_faults))]
            store.add(key, 1)
        deadline = monotonic() + _SAME_FAULT_S
        while store.add(key, 0) < everybody:
            if monotonic() > deadline:
                groups.sever(RuntimeError(f"rank {self.rank} cannot take part: {poison.ename}: {poison.evalue}"))
                return
            sleep(0.01)

    def _adopt(
        self, key: str, shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...] | None, mesh: Any
    ) -> torch.Tensor:
        """A tensor that a cell made, for operations of the controller: the same storage, without autograd's history.

        Args:
            placements: None: it was a plain tensor.

        Raises:
            TypeError: it is not what it was said to be any more.
        """
        tensor = self._resolve(key)
        name = key.partition(":")[2]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__} on rank {self.rank}, not a tensor")
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            raise TypeError(
                f"{name} lies on {tensor.device_mesh}, not on all of this mesh; take x.to_local() in a cell"
            )
        places = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
        now = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), places)
        if now != (shape, dtype, placements):
            raise TypeError(
                f"{name} has changed on rank {self.rank} since it was looked up: it was "
                f"{_like(shape, dtype, placements)}, and is {_like(*now)}; look it up again, mesh[{name!r}]"
            )
        return tensor.detach()


def _like(shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...] | None) -> str:
    lies = "each rank's own" if placements is None else f"placed ({', '.join(map(str, placements))})"
    return f"{shape} of {dtype}, {lies}"


def _met(mesh: DeviceMesh | None) -> list[int]:
    """How many collectives this rank has begun, by axis of the mesh."""
    if mesh is None:
        return []
    labels = [getattr(mesh.get_group(axis), "label", None) for axis in range(mesh.ndim)]
    return [0 if label is None else label.num_begun for label in labels]


def execute(
    space: Space,
    stream: list[Any],  # of int, and of float where a template has floats
    values: MutableMapping[int, Any],
    first: int,
    shared_fault: Callable[[Poison], None],
    is_released: Callable[[BaseException], bool] = lambda error: False,
) -> None:
    """Run a stream of operations against `values`.

    Raises:
        KeyboardInterrupt: after everything that had not run yet has been poisoned.
    """
    templates = space.templates
    at, end, number = 0, len(stream), first
    running: tuple[Template, int, list[Any], list[int]] | None = None
    try:
        space.unbegun = False
        while at < end:
            which = stream[at]
            if which <= FREE:
                at = _let_go(space, values, stream, at)
                number += 1
                continue
            template = templates[which]
            space.number, space.doing = number, template
            start = at + 1
            middle = start + template.num_in
            stop = middle + template.num_new
            past = stop + template.num_floats
            ins = [values.get(id) for id in stream[start:middle]]
            poison, begun = space.refused, False
            for tensor in ins:
                if tensor is None or tensor.__class__ is Poison:
                    poison = _fault_among(template, ins, number) or poison
                    break
            if poison is None:
                running, at = (template, start, ins, _versions(template, ins) if template.mutates else []), past
                try:
                    args, kwargs = template.build(ins, stream[stop:past])
                    if template.seeded:
                        result = _seeded(template, args, kwargs, int(stream[past - 1]), space)
                    else:
                        result = template.call(*args, **kwargs)
                    if template.num_new:
                        if template.returns == "one":
                            if result.__class__ is DTensor:
                                meta = result._spec.tensor_meta
                                if meta is not None and meta.dtype is not result._local_tensor.dtype:
                                    result = rules.as_computed(result)
                            values[stream[middle]] = result
                        else:
                            for id, index in zip(stream[middle:stop], template.new, strict=True):
                                values[id] = result[index]
                    if template.overwrites and space.faulty:
                        for index in template.mutates:
                            values[stream[start + index]] = ins[index]
                except Exception as error:
                    poison = _poison(number, error, secondary=is_released(error))
                    # A broken collective comes before anything is written, and a recorded step says what it wrote.
                    sure = poison.secondary or template.name == _REPLAY
                    begun = not sure or _versions(template, ins) != running[3]
                    space.faults.append(poison)
                    begins = template.name == agreement.BEGIN
                    if not begins and not template.num_new and not template.mutates and space.sticky is None:
                        space.sticky = poison
                    # Those that refuse a step have answered each other; a closed connection has told this rank alone.
                    if template.communicates and not isinstance(error, agreement.StepRefused):
                        shared_fault(poison)
            elif template.name == agreement.BEGIN:
                _refuse(space, poison)
            elif template.communicates:
                shared_fault(poison)
            if poison is not None:
                with agreement.hold():  # a Stop between two of these lines would have them done twice
                    _pass_on(space, stream, template, start, poison, begun=begun)
                    if template.name == agreement.BEGIN:
                        space.refused = poison.alone()
                    elif template.name == agreement.END:
                        space.refused = None
                    running, at, number = None, past, number + 1
            else:
                running, at, number = None, past, number + 1
        space.num_ops += number - first
        space.number, space.doing = number, None
    except KeyboardInterrupt:
        space.unbegun = False
        poison = Poison(number, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)
        if running is not None:
            _stopped_in(space, values, stream, poison, *running)
        _skip(space, stream, at, values, poison)
        space.refused = None
        space.number, space.doing = number, None
        raise


_REPLAY = "meshbook::replay"


def _let_go(space: Space, values: MutableMapping[int, Any], stream: list[Any], at: int) -> int:
    """Carry out one of the words that are no operation; where the next one is."""
    past = at + 2 + int(stream[at + 1])
    if stream[at] == CLEAR:
        space.clear(stream[at + 2 : past])
    else:
        for id in stream[at + 2 : past]:
            values.pop(id, None)
    return past


def _fault_among(template: Template, ins: list[Any], number: int) -> Poison | None:
    """The first fault of an operation's inputs. What it overwrites may have one: the value beside it serves."""
    for place, tensor in enumerate(ins):
        if tensor is None:
            return Poison(number, "Interrupted", "an earlier operation was stopped", "", True)
        if tensor.__class__ is Poison:
            if tensor.kept is None or not template.overwrites or place not in template.mutates:
                return tensor
            ins[place] = tensor.kept
    return None


def _versions(template: Template, ins: Sequence[Any]) -> list[int]:
    """How often what the operation is to change has been changed. One operation of torch's changes all, or none."""
    places = template.mutates if template.name == _REPLAY else (*template.mutates[:1], *template.mutates[-1:])
    return [_local(ins[place])._version for place in places]


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(value: Any) -> int | None:
    """The storage that a tensor lies on, as a number; None: it has none of its own here."""
    tensor = _local(value.kept if isinstance(value, Poison) else value)
    if tensor is None:
        return None
    try:
        found: int = tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):  # sparse, for one
        return None
    return found


def _refuse(space: Space, poison: Poison) -> None:
    """Tell the others that this rank cannot take part in a step; they hear nothing where the groups are broken."""
    try:
        agreement.agree(space.mesh, False)
    except Exception as error:
        space.faults.append(_poison(space.number, error, secondary=True))


def _stopped_in(
    space: Space,
    values: MutableMapping[int, Any],
    stream: list[Any],
    poison: Poison,
    template: Template,
    start: int,
    ins: list[Any],
    versions: list[int],
) -> None:
    """A Stop came in the middle of an operation: before it changed anything, or after it had."""
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        if values.get(id) is None:
            space.fault(id, poison, base=stream[start] if template.views else None)
    changed = bool(template.mutates) and _versions(template, ins) != versions
    if changed and template.overwrites:
        for index in template.mutates:
            values[stream[start + index]] = ins[index]
    if not changed or template.name == _REPLAY:
        for index in template.mutates:
            space.spare(stream[start + index], poison, begun=changed)


def _skip(space: Space, stream: list[Any], at: int, values: MutableMapping[int, Any], poison: Poison) -> None:
    """Operations from a place on are not run: poison in place of what they make, and beside what they change."""
    end = len(stream)
    while at < end:
        if stream[at] <= FREE:
            at = _let_go(space, values, stream, at)
            continue
        template = space.templates[int(stream[at])]
        _pass_on(space, stream, template, at + 1, poison)
        at += 1 + template.num_in + template.num_new + template.num_floats


def _pass_on(
    space: Space, stream: list[Any], template: Template, start: int, poison: Poison, *, begun: bool = False
) -> None:
    """The operation whose tensors are listed from `start` on was not run, or failed: poison in place of what it makes,
    and beside what it changes."""
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        space.fault(id, poison, base=stream[start] if template.views else None)
    for index in template.mutates:
        space.spare(stream[start + index], poison, begun=begun)


def plain_name(function: str) -> str:
    """A template's function as people write it: "aten.mm"."""
    return function.removeprefix("whole::").removeprefix("reduced::").replace("::", ".").removesuffix(".default")


def _seeded(template: Template, args: Any, kwargs: Any, seed: int, space: Space) -> Any:
    tracker = dtensor_random._rng_tracker
    first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, DTensor)), None)
    if isinstance(tracker, rules.ShardedNumbers) and first is not None:
        tracker.seed = seed
        try:
            # Seeded here, as DTensor asks the tracker for some operations only.
            with rules.numbers_from(rules.mix(seed, rules.shard_of(first._spec))):
                return template.call(*args, **kwargs)
        finally:
            tracker.seed = None
    place = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with rules.numbers_from(rules.mix(seed, place)):
        return template.call(*args, **kwargs)


def _poison(number: int, error: Exception, *, secondary: bool = False) -> Poison:
    trace = "".join(traceback.format_exception(error, limit=-4, chain=False))
    return Poison(number, type(error).__name__, str(error).strip()[:2000], trace[-4000:], secondary=secondary)


def _hash_of(value: Any) -> str:
    """Of this rank's own piece; empty where there is none."""
    tensor = value.kept if isinstance(value, Poison) else value
    if tensor is None:
        return ""
    piece = _plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous().cpu()
    return hashlib.blake2b(piece.reshape(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _plain(local: torch.Tensor) -> torch.Tensor:
    """A collective's result that may still be on its way, arrived."""
    wait = getattr(local, "wait", None)
    return wait() if wait is not None and type(local) is not torch.Tensor else local


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(int(length), 1)
    return tuple(reversed(strides))
