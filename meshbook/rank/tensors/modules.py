"""A module that lives on the ranks: one operation runs its forward there, another its backward.

Inputs and outputs are the controller's tensors. A module that works on each rank's own rows (FSDP2, DDP) gets them as
plain tensors, and what it gives is seen as rows of one tensor again; any other gets and gives DTensors. What backward
needs is kept on the rank by a small tensor, the *ticket*, that the controller holds as long as the graph may be used.

Gradients mean what they would in one process: of the loss of the whole batch. FSDP2 and DDP average over ranks what is
to be a sum of the ranks' parts, so gradients that come in are multiplied by their number: exact, for powers of two.

Buffers that a forward changes, such as a batch norm's running statistics, are changed by each rank from its own rows.
As with DDP, the first rank's count; they are copied to the others, so that replicas stay alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from meshbook.rank.tensors import building, rules
from meshbook.rank.tensors import modes as torch_modes
from meshbook.rank.tensors.calls import FUNCTIONS, TENSOR
from meshbook.rank.tensors.lowering import settled
from meshbook.rank.unfinished import forget_unfinished_step


class Resident:
    """A module on this rank."""

    def __init__(
        self,
        key: str,
        module: nn.Module,
        mesh: Any,
        axis: str,
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
    ) -> None:
        self.key, self.module, self.mesh, self.options = key, module, mesh, options
        self.axis = mesh.mesh_dim_names.index(axis)
        self.num_places = mesh.size(self.axis)
        self.local, self.averages = building.runs_locally(module, mesh), building.averages(module)
        # FSDP2 converts by itself, where it gathers.
        self.autocast = dtype if not isinstance(module, FSDPModule) else None
        named = list(building.named_tensors(module))
        self.tensors: list[torch.Tensor] = []
        self.names: list[tuple[str, int, bool]] = []  # name, place among the tensors, whether it is a parameter
        places: dict[int, int] = {}
        for name, tensor, is_parameter in named:
            if id(tensor) not in places:
                places[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            self.names.append((name, places[id(tensor)], is_parameter))
        kinds = {place: is_parameter for _, place, is_parameter in self.names}
        self.trained = [place for place, tensor in enumerate(self.tensors) if kinds[place] and tensor.requires_grad]
        self._all = [place for place in range(len(self.tensors)) if kinds[place]]
        self.own_places = [building.as_dtensor(tensor, mesh).placements for tensor in self.tensors]
        # DDP's gradients are pieces of what its next backward writes to.
        self.reuses_gradients = bool(options.get("gradient_as_bucket_view"))
        self.numbers_after = building.last_numbers()
        self.buffers = [place for place in range(len(self.tensors)) if not kinds[place]]
        self._persistent, self.of_norms = self._where_buffers_are(places)
        # What the first forward of a kind gave, by its number, until the operation for it comes.
        self.first: tuple[int, list[Any]] | None = None

    def _where_buffers_are(self, places: dict[int, int]) -> tuple[list[tuple[dict[str, Any], str, int]], set[int]]:
        """Of those that are saved: the dict each is in, its name there, and its place. And the places of statistics of
        torch's norms, which no backward reads that follows a forward that changed them."""
        persistent, of_norms = [], set()
        for part in self.module.modules():
            for name, buffer in part._buffers.items():
                if buffer is None or id(buffer) not in places:
                    continue
                if name not in part._non_persistent_buffers_set:
                    persistent.append((part._buffers, name, places[id(buffer)]))
                if isinstance(part, _NormBase):
                    of_norms.add(places[id(buffer)])
        return persistent, of_norms

    def check_buffers(self) -> None:
        """
        Raises:
            RuntimeError: forward has put another tensor in a buffer's place, which nobody outside would see.
        """
        for kept, name, place in self._persistent:
            if kept.get(name) is not self.tensors[place]:
                kept[name] = self.tensors[place]
                raise RuntimeError(
                    f"forward binds the buffer {name} to a new tensor (self.{name} = ...); the notebook has the one "
                    f"from before, and would not see it. Write into it instead: self.{name}.copy_(...)"
                )

    def copy_buffers(self, places: Sequence[int]) -> None:
        """Have these buffers be those of the first rank along the batch axis. Every rank takes part."""
        if not places:
            return
        local = [self._own(place) for place in places]
        # Summed with zeros, byte by byte: unlike a broadcast this ends on no rank if one of them does not come.
        flat = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in local])
        is_first = self.mesh.get_local_rank(self.axis) == 0
        if not is_first:
            flat.zero_()
        dist.all_reduce(flat, group=self.mesh.get_group(self.axis))
        if is_first:
            return
        pieces = torch.split(flat, [buffer.numel() * buffer.element_size() for buffer in local])
        for place, buffer, piece in zip(places, local, pieces, strict=True):
            came = piece.clone().view(buffer.dtype).reshape(buffer.shape)
            # A norm saves its statistics for backward, where it was not trained: autograd need not know of it.
            (buffer.data if place in self.of_norms else buffer).copy_(came)

    def changed_buffers(self, before: Sequence[torch.Tensor]) -> list[int]:
        """Places of those that a forward has changed, on this rank or another along the batch axis."""
        now = [self._own(place) for place in self.buffers]
        changed = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
        if self.averages and changed:
            word = torch.tensor(changed, dtype=torch.uint8, device=self.mesh.device_type)
            dist.all_reduce(word, dist.ReduceOp.MAX, group=self.mesh.get_group(self.axis))
            changed = word.tolist()
        return [place for place, is_changed in zip(self.buffers, changed, strict=True) if is_changed]

    def values_of_buffers(self) -> list[torch.Tensor]:
        return [self._own(place).clone() for place in self.buffers]

    def _own(self, place: int) -> torch.Tensor:
        buffer = self.tensors[place]
        return buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def describe(self) -> dict[str, Any]:
        """What the controller must know, as plain data."""
        seen = [building.as_dtensor(tensor, self.mesh) for tensor in self.tensors]
        return {
            "names": self.names,
            "trained": self.trained,
            "tensors": [_outline(tensor) for tensor in seen],
            "local": self.local,
            "text": repr(self.module),
            "numbers": self.numbers_after,
            "blocks": sum(isinstance(part, FSDPModule) for part in self.module.modules()) - 1,
        }

    def train(self, places: Sequence[int]) -> None:
        """Have these parameters get gradients, and no others: what is frozen is said where the optimizer is."""
        if list(places) == self.trained:
            return
        self.trained = list(places)
        for place in self._all:
            self.tensors[place].requires_grad_(place in places)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):  # what it has gathered follows when it gathers anew
                part.reshard()
        if isinstance(self.module, DistributedDataParallel) and places:  # it looks once, when it is made
            self.module = building.ddp(self.module.module, self.mesh, self.axis, self.options)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A forward or a backward. One that does not come to its end leaves nothing behind: neither what it had
        gathered, nor a gradient that the next backward would add to. A Stop may have come on some ranks only: what
        they have gathered they forget together, when their groups are formed again (`Groups.call_ended`)."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                forget_unfinished_step(self.module)
            for tensor in self.tensors:
                tensor.grad = None
            if isinstance(error, RuntimeError) and "`find_unused_parameters=True`" in str(error):
                raise RuntimeError(
                    "a parameter got no gradient in the step before; where that is as it should be: "
                    f'meshbook.distribute(..., strategy="ddp", find_unused_parameters=True). {error}'
                ) from error
            raise

    def place(self, on_axis: Placement) -> list[Placement]:
        """Placements of what lies so over the batch axis, and whole over every other."""
        places: list[Placement] = [Replicate()] * self.mesh.ndim
        places[self.axis] = on_axis
        return places


RESIDENTS: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()


def settle(
    key: str,
    source: Any,
    strategy: Any,
    dtype: str | None,
    mesh: Any,
    axis: str,
    numbers: Any,
    options: Mapping[str, Any],
    modes: torch_modes.Modes,
) -> Resident:
    """Build the module here; it stays as long as the controller keeps what this gives."""
    kind = None if dtype is None else getattr(torch, dtype)
    with torch_modes.applied(modes):
        module = building.build(source, strategy, kind, mesh, axis, numbers, options)
    resident = RESIDENTS[key] = Resident(key, module, mesh, axis, kind, options)
    return resident


def describe(resident: Resident) -> dict[str, Any]:
    return resident.describe()


def _find(key: str) -> Resident:
    found = RESIDENTS.get(key)
    if found is None:
        raise RuntimeError("this module is gone from the ranks: what meshbook.distribute gave was let go of")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Operations


def module_tensors(key: str) -> list[torch.Tensor]:
    """The module's parameters and buffers: the same storage. Last, what keeps the module until all operations that
    were issued before it is let go of have run; the handle that the controller has goes ahead of them."""
    resident = _find(key)
    keeper = torch.empty(0, device=resident.mesh.device_type)
    keeper._meshbook_resident = resident  # type: ignore[attr-defined]
    return [*(building.as_dtensor(tensor, resident.mesh) for tensor in resident.tensors), keeper]


@dataclasses.dataclass
class _Graph:
    """What a forward left for its backward."""

    outputs: list[Any]  # with their history, as the module gave them
    places: list[list[Placement] | None]  # of local ones: how they are seen from outside
    inputs: list[torch.Tensor]  # those that want a gradient
    input_places: list[list[Placement]]
    scale: float
    buffers: Sequence[int]  # places of those to be copied once it has been used


def module_forward(
    key: str,
    training: bool,
    casting: str | None,
    wanting: Sequence[int] | None,
    trained: Sequence[int] | None,
    changing: Sequence[int],
    promised: Any,
    seed: float | None,
    args: Any,
    kwargs: Any,
) -> list[Any]:
    """One forward.

    Args:
        casting: the dtype of the controller's autocast; None: it has none.
        trained: places of the parameters that get a gradient.
        changing: places of the buffers that forwards of this module have been seen to change.
        wanting: which tensors among the arguments want a gradient; None for the whole: run without a graph.
        promised: shapes of the outputs, which the controller has counted on.
        seed: of the random numbers that it draws; None: it draws none.

    Returns:
        The tensors among the outputs, and the ticket last, if there is a graph.
    """
    if trained is not None:
        _find(key).train(trained)
    tensors, _ = _forward(key, training, casting, wanting, changing, seed, args, kwargs)
    got = tuple(tuple(tensor.shape) for tensor in tensors[: len(promised)])
    if got != promised:
        raise RuntimeError(
            f"the module gave shapes {got} for inputs from which it gave {promised} before; what distribute runs must "
            "have output shapes that follow from its input shapes. meshbook.module_to_mesh has no such limit"
        )
    return tensors


def module_first(
    modes: torch_modes.Modes,
    key: str,
    number: int,
    training: bool,
    casting: str | None,
    wanting: Sequence[int] | None,
    trained: Sequence[int] | None,
    changing: Sequence[int],
    seed: float,
    args: Any,
    kwargs: Any,
) -> dict[str, Any]:
    """The first forward of a kind. What it gives is kept here until `module_kept` asks for it by this number.

    Returns:
        As plain data: which tensors it gives, whether it draws random numbers, which buffers it changes.
    """
    resident = _find(key)
    if trained is not None:
        resident.train(trained)
    before = resident.values_of_buffers()
    with torch.no_grad(), torch_modes.applied(modes):
        tensors, outline = _forward(key, training, casting, wanting, changing, seed, args, kwargs, is_first=True)
        changed = resident.changed_buffers(before)
        if resident.averages:
            resident.copy_buffers([place for place in changed if place in resident.of_norms or wanting is None])
            if wanting is not None:
                tensors[-1]._meshbook_graph.buffers = [place for place in changed if place not in resident.of_norms]
    resident.first = number, tensors
    seen = tensors if wanting is None else tensors[:-1]
    return outline | {"tensors": [_outline(tensor) for tensor in seen], "changed": changed}


def module_kept(key: str, number: float) -> list[Any]:
    """What `module_first` gave."""
    resident = _find(key)
    kept, resident.first = resident.first, None
    if kept is None or kept[0] != int(number):
        raise RuntimeError("what this forward gave is gone: a Stop came in between; call the module again")
    return kept[1]


def _outline(tensor: Any) -> tuple[Any, ...]:
    """What the controller plans with: shape, stride, dtype, placements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), tuple(tensor.stride()), dtype, tuple(tensor.placements)


def _forward(
    key: str,
    training: bool,
    casting: str | None,
    wanting: Sequence[int] | None,
    changing: Sequence[int],
    seed: float | None,
    args: Any,
    kwargs: Any,
    *,
    is_first: bool = False,
) -> tuple[list[Any], dict[str, Any]]:
    resident = _find(key)
    module = resident.module
    if module.training != training:
        module.train(training)
    inputs: list[torch.Tensor] = []
    input_places: list[list[Placement]] = []
    cut = False
    number = -1

    def take(leaf: Any) -> Any:
        nonlocal cut, number
        if not isinstance(leaf, DTensor):
            return leaf
        number += 1
        if resident.local:
            cut = cut or leaf.placements[resident.axis].is_shard()
            mine, places = _own_rows(resident, leaf, number)
        else:
            mine, places = leaf.detach(), list(leaf.placements)
        if wanting is not None and number in wanting:
            mine = mine.detach().requires_grad_()
            inputs.append(mine)
            input_places.append(places)
        return mine

    args, kwargs = pytree.tree_map(take, (args, kwargs))
    device = resident.mesh.device_type
    dtype = getattr(torch, casting) if casting is not None else resident.autocast
    cast = torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()
    drawing: Any = contextlib.nullcontext()
    if seed is not None:  # other rows draw others, whoever computes the same draws the same
        place = resident.mesh.get_local_rank(resident.axis) if cut else 0
        drawing = rules.numbers_from(rules.mix(int(seed), place))
    copied = changing if resident.averages else ()
    later = [place for place in copied if place not in resident.of_norms] if wanting is not None else []
    draws = False
    with resident.step():
        if copied and not (isinstance(module, DistributedDataParallel) and module.broadcast_buffers):
            resident.copy_buffers(copied)
        with torch.set_grad_enabled(wanting is not None), cast, drawing:
            before = [source.get_state() for source in rules.generators()] if is_first else []
            result = module(*args, **kwargs)
            if is_first:
                draws = not all(map(torch.equal, before, (source.get_state() for source in rules.generators())))
        resident.check_buffers()
        if training:
            resident.copy_buffers([place for place in copied if place not in later])
    flat = pytree.tree_leaves(result)
    outputs: list[Any] = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    if resident.local:  # of a part of the mesh
        outputs = [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
    if strange := [leaf for leaf in flat if not isinstance(leaf, (torch.Tensor, int, float, str, type(None)))]:
        raise TypeError(
            f"the module's forward gave a {type(strange[0]).__name__}, in which tensors cannot be told; return "
            "tensors, or tuples, lists and dicts of them"
        )
    seen: list[Any] = []
    places_of: list[list[Placement] | None] = []
    for output in outputs:
        if isinstance(output, DTensor):
            seen.append(output.detach())
            places_of.append(None)
            continue
        places = resident.place(_seen_as(output, cut))
        seen.append(DTensor.from_local(output.detach(), resident.mesh, places, run_check=False))
        places_of.append(places)
    outline = {
        "result": pytree.tree_map(lambda leaf: TENSOR if isinstance(leaf, torch.Tensor) else leaf, result),
        "differentiable": [output.is_floating_point() or output.is_complex() for output in outputs],
        "draws": draws,
    }
    if wanting is None:
        return seen, outline
    ticket = torch.empty(0, device=resident.mesh.device_type)
    scale = float(resident.num_places) if resident.local and cut else 1.0
    ticket._meshbook_graph = _Graph(  # type: ignore[attr-defined]
        outputs, places_of, inputs, input_places, scale, later if training else ()
    )
    return [*seen, ticket], outline


def _own_rows(resident: Resident, leaf: DTensor, at: int) -> tuple[torch.Tensor, list[Placement]]:
    """This rank's rows of an input, or all of it."""
    there = leaf.placements[resident.axis]
    if there.is_shard() and not resident.averages:
        axis = resident.mesh.mesh_dim_names[resident.axis]
        raise ValueError(
            f"input {at} is cut over {axis}, over which this module's gradients are not averaged; give whole inputs, "
            f"or have your strategy call fully_shard(module, mesh=mesh[{axis!r}]) too"
        )
    if there.is_shard() and not there.is_shard(0):
        raise ValueError(
            f"input {at} is cut along dim {there.dim} over {resident.mesh.mesh_dim_names[resident.axis]}; this module "
            "works on rows (dim 0): redistribute it with Shard(0)"
        )
    if there.is_shard() and leaf.shape[0] % resident.num_places:
        raise ValueError(
            f"input {at} has {leaf.shape[0]} rows, which cannot be cut evenly over "
            f"{resident.mesh.mesh_dim_names[resident.axis]}={resident.num_places}; drop the last ones or pad it"
        )
    places = resident.place(Shard(0) if there.is_shard() else Replicate())
    return _local(leaf, places), places


def _local(tensor: DTensor, places: Sequence[Placement]) -> torch.Tensor:
    """This rank's piece of a tensor that lies so; as a rule it does."""
    if tensor.placements != tuple(places):
        tensor = tensor.redistribute(placements=places)
    return settled(tensor)


def _as_own(grad: torch.Tensor, resident: Resident, place: int) -> DTensor:
    """A gradient, lying as its parameter does; as a rule it does, and each step of DTensor's would cost tens of us."""
    places = resident.own_places[place]
    if type(grad) is DTensor and grad.placements == places and grad.device_mesh == resident.mesh:
        return grad
    return building.as_dtensor(grad, resident.mesh).redistribute(placements=places)


def _seen_as(output: torch.Tensor, cut: bool) -> Placement:
    """How what each rank made of its own rows is seen as one tensor: rows of it, or, a single number, their mean."""
    if not cut:
        return Replicate()
    return Shard(0) if output.dim() else Partial("avg")


def module_backward(key: str, used: Sequence[int], grads: Sequence[Any], outs: Sequence[int], ticket: Any) -> list[Any]:
    """One backward: gradients of the inputs that want one, then of the parameters in `used`.

    Args:
        used: places of parameters.
        grads: of the outputs at places `outs`.
    """
    ahead = getattr(ticket, "_meshbook_gradients", None)
    if ahead is not None:
        del ticket._meshbook_gradients
    inputs, found = ahead or _backward(key, grads, outs, ticket)
    resident = _find(key)
    unexpected = [place for place in resident.trained if (found[place] is None) == (place in used)]
    if unexpected:
        names = {place: name for name, place, _ in reversed(resident.names)}
        raise RuntimeError(
            f"{', '.join(names[place] for place in unexpected[:4])}: got a gradient in one step and none in another, "
            "which distribute cannot follow; use meshbook.module_to_mesh, where autograd runs in the notebook"
        )
    return [*inputs, *(found[place] for place in used)]


def module_used(
    modes: torch_modes.Modes, key: str, grads: Sequence[Any], outs: Sequence[int], ticket: Any
) -> list[int]:
    """Which parameters get a gradient: this backward is done, and waits for `module_backward` to ask for it."""
    with torch_modes.applied(modes):
        inputs, found = _backward(key, grads, outs, ticket)
    ticket._meshbook_gradients = inputs, found
    return [place for place, grad in found.items() if grad is not None]


def _backward(key: str, grads: Sequence[Any], outs: Sequence[int], ticket: Any) -> tuple[list[Any], dict[int, Any]]:
    resident = _find(key)
    graph: _Graph | None = getattr(ticket, "_meshbook_graph", None)
    if graph is None:
        raise RuntimeError("this module's graph has been used by an earlier backward(); run its forward again")
    del ticket._meshbook_graph
    outputs, incoming = [], []
    for at, grad in zip(outs, grads, strict=True):
        output, places = graph.outputs[at], graph.places[at]
        if output.grad_fn is None:
            continue
        if places is None:
            grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in output.placements])
        else:
            mean = places[resident.axis].is_partial()
            wanted = resident.place(Replicate()) if mean else places
            grad = _local(grad, wanted)
            if graph.scale != 1.0 and not mean:  # a mean's gradient has been divided by their number already
                grad = grad * graph.scale
        outputs.append(output)
        incoming.append(grad)
    with resident.step():  # until all gradients are taken: one that is left would be added to the next step's
        with torch.enable_grad():
            torch.autograd.backward(outputs, incoming)
        resident.copy_buffers(graph.buffers)
        return _gradients_of_inputs(resident, graph), _gradients(resident)


def _gradients_of_inputs(resident: Resident, graph: _Graph) -> list[Any]:
    inputs = []
    for tensor, places in zip(graph.inputs, graph.input_places, strict=True):
        grad, tensor.grad = tensor.grad, None
        grad = torch.zeros_like(tensor) if grad is None else grad
        if not isinstance(grad, DTensor):
            grad = grad / graph.scale if graph.scale != 1.0 else grad
            cut = places[resident.axis].is_shard()
            seen = places if cut or graph.scale == 1.0 else resident.place(Partial())
            grad = DTensor.from_local(grad, resident.mesh, seen, run_check=False)
        inputs.append(grad.redistribute(placements=places))
    return inputs


def _gradients(resident: Resident) -> dict[int, Any]:
    """Those of the parameters that want one, by place, taken from them."""
    found: dict[int, Any] = {}
    for place in resident.trained:
        parameter = resident.tensors[place]
        grad, parameter.grad = parameter.grad, None
        if grad is not None and resident.reuses_gradients:
            grad = grad.clone()
        found[place] = None if grad is None else _as_own(grad, resident, place)
    return found


for _function in (module_tensors, module_forward, module_kept, module_backward):
    FUNCTIONS[_function.__name__] = _function
