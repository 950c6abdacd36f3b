"""Modules on a mesh, two ways.

`module_to_mesh`: the module's Python runs here, its parameters lie on the ranks, each operation is sent.
`distribute_module`: the module is built on the ranks by a strategy; one message runs its forward there, one its
backward. Its parameters are here as RemoteTensors of the same storage, so any optimizer of torch works on them.
"""

from __future__ import annotations

import fnmatch
import itertools
import pickle
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshbook.controller import remote as handles
from meshbook.controller.mesh import Mesh
from meshbook.errors import PlacementError, UsageError
from meshbook.rank import paths
from meshbook.rank.tensors import building, modes, modules
from meshbook.rank.tensors.calls import FLOAT, TENSOR, Sent
from meshbook.tensors import remote
from meshbook.tensors.creation import distribute, engine_of, tensor_of
from meshbook.tensors.engine import Engine
from meshbook.tensors.plan import Spec, Template

Placements = Sequence[Any] | Mapping[str, Any] | Callable[[str, torch.Tensor], Any] | None

_PRECISIONS = {None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# The module's Python here


def module_to_mesh(module: nn.Module, mesh: Mesh, placements: Placements = None) -> nn.Module:
    """Bring a module's parameters and buffers to a mesh, in place: its own are replaced by RemoteTensors.

    Its Python goes on running here. Make optimizers afterwards: they hold the parameters that they were given.
    Gradients are brought to their parameter's placements as soon as they are whole. Does not wait.

    Args:
        placements: for every tensor the same (`[Shard(0)]`); or by name, with patterns (`{"*.weight": [Shard(0)]}`); or
            a function of (name, tensor). Where it says nothing (None), and by default: whole on every rank.

    Returns:
        The module itself.

    Raises:
        PlacementError: they do not fit a parameter or the mesh, which the message names.
    """
    moved: dict[int, Any] = {}
    for prefix, part in list(module.named_modules()):
        if isinstance(part, nn.LSTM) and not any(isinstance(one, remote.RemoteTensor) for one in part.parameters()):
            _step_by_step(part)
        for kind in (part._parameters, part._buffers):
            for name, tensor in list(kind.items()):
                if tensor is None or isinstance(tensor, remote.RemoteTensor):
                    continue
                if id(tensor) not in moved:
                    full = f"{prefix}.{name}" if prefix else name
                    try:
                        place = _placements_for(placements, full, tensor)
                        moved[id(tensor)] = _brought(tensor, mesh, place)
                    except PlacementError as error:
                        raise PlacementError(f"{full}: {error}") from None
                kind[name] = moved[id(tensor)]
    module.register_forward_pre_hook(_refuse_foreign_autocast)
    return module


# Devices whose autocast says nothing of remote tensors.
_FOREIGN = ("cuda", "xpu", "mps")


def _refuse_foreign_autocast(*_: Any) -> None:
    """Asked before a forward: operations do not see it, for torch hides it from what is below autograd."""
    for device in _FOREIGN:
        if torch.is_autocast_enabled(device):
            raise NotImplementedError(
                f'torch.autocast("{device}") does not reach remote tensors, which are a CPU\'s here wherever their '
                'numbers are: use torch.autocast("cpu", dtype=torch.bfloat16), which has the ranks cast, or '
                'precision="bf16" of meshbook.distribute'
            )


def _brought(tensor: torch.Tensor, mesh: Mesh, placements: Any) -> Any:
    if nn.parameter.is_lazy(tensor):
        raise UsageError(
            "a parameter has no shape yet, as it is of a lazy module; run the module once on a local input, and bring "
            "it to the mesh then"
        )
    if tensor.is_meta:
        raise UsageError(
            "a parameter is on the meta device and has no values; materialise the module first, or let "
            "meshbook.distribute(factory, mesh) build it on the ranks"
        )
    there: Any = distribute(tensor.detach(), mesh, placements)
    if not isinstance(tensor, nn.Parameter):
        return there
    return nn.Parameter(there, requires_grad=tensor.requires_grad)


# Whether oneDNN was in use before each of the LSTMs that run now.
_onednn: list[bool] = []


def _step_by_step(module: nn.LSTM) -> None:
    """On a CPU torch has one operation for a whole LSTM, of oneDNN's, for which DTensor has no rule."""

    def before(module: nn.Module, args: Any) -> None:
        _onednn.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if _onednn:
            torch._C._set_mkldnn_enabled(_onednn.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _placements_for(placements: Placements, name: str, tensor: torch.Tensor) -> Any:
    if placements is None:
        return None
    if isinstance(placements, Mapping):
        return next((place for pattern, place in placements.items() if fnmatch.fnmatchcase(name, pattern)), None)
    return placements(name, tensor) if callable(placements) else placements


# ---------------------------------------------------------------------------------------------------------------------
# The module there


def distribute_module(
    source: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    *,
    strategy: Any = "fsdp",
    precision: str | None = None,
    axis: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> RemoteModule:
    """Build a module on the ranks, spread over an axis. Blocks until it is there.

    Args:
        source: a function that makes it (called on the ranks; nothing of it is made here), with the numbers that
            torch's generator here would have given; or a module, whose values are kept.
        strategy: "fsdp", "ddp", "replicate", or a function of (module, DeviceMesh) that is called on every rank.
        precision: "bf16" computes in it and keeps parameters and gradients as they are; None: as the parameters are.
        axis: over which batches are cut (dim 0); needed where the mesh has more than one and none is called "dp".
        options: of the strategy's class in torch.

    Raises:
        CellError: building it failed on ranks, with their traceback.
        UsageError: no such strategy, precision or option.
    """
    if strategy == "auto":
        raise NotImplementedError(
            'strategy="auto" is not there yet; choose one: "fsdp" when parameters and optimizer do not fit one device, '
            '"ddp" when they do, or a function of (module, mesh) for tensor parallelism'
        )
    if not callable(strategy) and strategy not in building.STRATEGIES:
        known = "; ".join(f'"{name}": {text}' for name, text in building.STRATEGIES.items())
        raise UsageError(f"there is no strategy {strategy!r}; known: {known}; or a function of (module, mesh)")
    if precision not in _PRECISIONS:
        raise UsageError(
            f"there is no precision {precision!r}; known: bf16, fp32 (fp16 would need its gradients scaled)"
        )
    options = dict(options or {})
    building.check_options(strategy, options, precision)
    axis = _batch_axis(mesh) if axis is None else axis
    mesh.size(axis)
    engine = engine_of(mesh)
    if mesh.ranks != engine.session.axes.ranks:  # type: ignore[union-attr]
        raise UsageError("a module is spread over a whole mesh; this is a part of one")
    session, ranks = mesh.session, engine.ranks
    key = secrets.token_hex(6)
    here = handles.RemoteValue(session, paths.Path(paths.Name("mesh")), ranks)
    dtype = _PRECISIONS[precision]
    command = session.call_command(
        modules.settle,
        (key, source, strategy, dtype, here, axis, torch.get_rng_state(), options, modes.now()),
        {},
        ranks,
        keep_always=True,
        inline_limit=0,
        label="distribute",
    )
    finished = session.foreground(command)
    session.conclude(finished, ranks, label="distribute")
    resident = handles.kept(session, command.call, ranks, session.values_of(finished.parts), "module")
    told = _asked(engine, modules.describe, resident)[0]
    if not isinstance(source, nn.Module):
        torch.set_rng_state(told["numbers"])  # as if it had been made here
    name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "a strategy")
    return RemoteModule(engine, key, resident, told, f"{name} over {axis}={mesh.size(axis)}", precision)


def _batch_axis(mesh: Mesh) -> str:
    if len(mesh.axes) == 1:
        return next(iter(mesh.axes))
    if "dp" in mesh.axes:
        return "dp"
    raise UsageError(f"this mesh has the axes {', '.join(mesh.axes)}; say over which batches are cut with axis=…")


def _asked(engine: Engine, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function gives on each of the ranks. Blocks."""
    session = engine.session
    command = session.call_command(function, args, {}, engine.ranks, label=function.__name__, inline_limit=1 << 30)
    finished = session.foreground(command)
    session.conclude(finished, engine.ranks, label=function.__name__)
    values = session.values_of(finished.parts)
    return [values[rank] for rank in engine.ranks]


class _Plan:
    """What is known of a forward of one kind: which tensors it gives, and how they make up the result."""

    def __init__(self, told: Sequence[Mapping[str, Any]], engine: Engine) -> None:
        first = told[0]
        self.specs = [_spec(engine, *tensor) for tensor in first["tensors"]]
        self.outline, self.differentiable = first["result"], first["differentiable"]
        self.draws: bool = any(rank["draws"] for rank in told)  # random numbers
        self.used: list[int] | None = None  # places of parameters that get a gradient; None: not seen yet

    def result(self, tensors: Iterable[Any]) -> Any:
        left = iter(tensors)
        return pytree.tree_map(lambda leaf: next(left) if leaf is TENSOR else leaf, self.outline)


def _spec(engine: Engine, shape: Any, stride: Any, dtype: str, placements: Any) -> Spec:
    return engine.planner.spec(shape, stride, 0, getattr(torch, dtype), tuple(placements))


class RemoteModule(nn.Module):
    """A module that lives on the ranks. Call it with RemoteTensors; `parameters()` are RemoteTensors of its storage.

    Inputs cut along dim 0 over the batch axis (`mesh.feed` gives them so) share the work; whole ones are computed by
    every rank alike. Results and gradients are those of one process with the whole batch.

    Attributes:
        plan: how it is spread, in words.
    """

    def __init__(
        self, engine: Engine, key: str, resident: Any, told: Mapping[str, Any], plan: str, precision: str | None
    ) -> None:
        super().__init__()
        blocks = f", {told['blocks']} blocks" if told["blocks"] > 0 else ""
        self.plan = f"{plan}{blocks}{f', {precision}' if precision else ''}"
        # What nn.Module would take for a submodule or show in its dict is kept in one place that is neither.
        self._there = _There(engine, key, resident, told)
        there = self._there
        for name, place, is_parameter in told["names"]:
            *path, last = name.split(".")
            part: nn.Module = self
            for step in path:
                if step not in part._modules:
                    part.add_module(step, _Part())
                part = part._modules[step]  # type: ignore[assignment]
            if is_parameter:
                part._parameters[last] = there.tensors[place]
            else:
                part._buffers[last] = there.tensors[place]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._there.forward(self.training, args, kwargs)

    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """Names and tensors, as RemoteTensors.

        Args:
            full: bring them here, whole. Blocks.
        """
        found = super().state_dict(*args, **kwargs)
        return {name: tensor.full_tensor() for name, tensor in found.items()} if full else found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; takes what `state_dict` gives, full or not, and whole tensors of this process."""
        if assign:
            raise UsageError("assign=True would replace the tensors that the ranks compute with; leave it out")
        own = super().state_dict()
        brought = {
            name: _like(tensor, own[name], self._there.engine) if name in own else tensor
            for name, tensor in state_dict.items()
        }
        return super().load_state_dict(brought, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UsageError(
            "this module lives on the ranks, on their device, and stays as it is; say precision= when you distribute it"
        )

    def __repr__(self) -> str:
        return f"RemoteModule({self.plan})\n{self._there.text}"

    def __reduce__(self) -> Any:
        raise UsageError("this module lives on the ranks; save model.state_dict(full=True)")


class _Part(nn.Module):
    """A place in the tree of names; what computes is on the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("only the whole module can be called here: its parts are on the ranks")


def _like(tensor: Any, own: Any, engine: Engine) -> Any:
    if isinstance(tensor, remote.RemoteTensor) or tensor.shape != own.shape:
        return tensor  # torch says which shapes differ
    return remote.upload(engine, tensor.detach().to(own.dtype), own._spec.placements)


class _There:
    """The controller's side of a resident module: how its operations are issued."""

    def __init__(self, engine: Engine, key: str, resident: Any, told: Mapping[str, Any]) -> None:
        self.engine, self.key, self.resident, self.text = engine, key, resident, told["text"]
        self.specs = [_spec(engine, *tensor) for tensor in told["tensors"]]
        self.parameters = list(dict.fromkeys(place for _, place, is_parameter in told["names"] if is_parameter))
        self.local: bool = told["local"]
        self._plans: dict[Any, _Plan] = {}
        self.changing: tuple[int, ...] = ()  # places of buffers that forwards have changed
        self._firsts = itertools.count(1)
        self._ticket = engine.planner.spec((0,), (1,), 0, torch.float32, None)
        outputs = [*self.specs, self._ticket]
        *made, self._keeper = self._issue(("tensors",), "module_tensors", (key,), [], [], outputs, is_view=True)
        for tensor in made:
            tensor._handle.changes = engine.others
        trained = set(told["trained"])
        self.tensors: list[Any] = [
            nn.Parameter(tensor, requires_grad=place in trained) if place in self.parameters else tensor
            for place, tensor in enumerate(made)
        ]

    def trained(self) -> tuple[int, ...]:
        """Places of the parameters that want a gradient now: who froze one may thaw it again."""
        return tuple(place for place in self.parameters if self.tensors[place].requires_grad)

    def _issue(
        self,
        kind: Any,
        function: str,
        args: tuple[Any, ...],
        tensors: list[Any],
        floats: list[float],
        outputs: Sequence[Spec],
        *,
        is_view: bool = False,
    ) -> list[Any]:
        """An operation of ours; `kind` tells those with the same template from others."""
        engine = self.engine
        engine.follow_modes()
        key = ("module", self.key, function, *kind, *(tensor._spec for tensor in tensors), *outputs)
        template = engine.cache.get(key)
        if template is None:
            number = next(engine.planner._numbers)
            sent = Sent(number, f"meshbook::{function}", args, {}, (-1,) * len(outputs), "many", (), not is_view, False)
            planned = Template(
                number,
                None,
                tuple(outputs),
                "list",
                communicates=not is_view,
                body=pickle.dumps(sent, 5),
                name=sent.function,
            )
            template = engine.learn(key, lambda: planned)
        numbers: list[Any] = [0, *(tensor._handle.id for tensor in tensors)]
        made: list[Any] = remote.perform(engine, template, None, (), {}, numbers, tensors, floats)
        engine.others[0] += 1  # its buffers, say
        return made

    def forward(self, training: bool, args: Any, kwargs: Any) -> Any:
        tensors: list[Any] = []
        floats: list[float] = []

        def mark(leaf: Any) -> Any:
            """What stands for it in the template; floats are carried, as with any operation."""
            leaf = tensor_of(leaf)
            if isinstance(leaf, torch.Tensor):
                tensors.append(self._here(leaf))
                return TENSOR
            if type(leaf) is float:
                floats.append(leaf)
                return FLOAT
            return leaf

        _refuse_foreign_autocast()
        if self.engine.trouble:
            self.engine.look_at([tensor._handle.id for tensor in self.tensors])
        marks = pytree.tree_map(mark, (args, kwargs))
        leaves, shape = pytree.tree_flatten(marks)
        trained = self.trained() if torch.is_grad_enabled() else ()
        # Of "cpu" it is asked, for that is what these tensors say that they are on.
        casting = _name(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None
        kind = (training, casting, trained, str(shape), *map(_hashable, leaves))
        found = (*kind, *(tensor._spec for tensor in tensors))
        grad = torch.is_grad_enabled() and (bool(trained) or any(t.requires_grad for t in tensors))
        plan = self._plans.get(found)
        number = None
        if plan is None:
            left, floats_left = iter(tensors), iter(floats)
            given = pytree.tree_map(
                lambda leaf: next(left).detach() if leaf is TENSOR else next(floats_left) if leaf is FLOAT else leaf,
                marks,
            )
            wanting = tuple(at for at, tensor in enumerate(tensors) if tensor.requires_grad) if grad else None
            number = next(self._firsts)
            plan = self._plans[found] = self._first(number, training, casting, wanting, trained, given)
        call = _Forward(self, plan, kind, (training, casting, *marks), trained, floats, number)
        if not grad:
            return plan.result(call.issue(tensors, None)[0])
        parameters = [self.tensors[place] for place in trained]
        return plan.result(_Through.apply(call, len(tensors), *tensors, *parameters))  # type: ignore[no-untyped-call]

    def _first(
        self,
        number: int,
        training: bool,
        casting: str | None,
        wanting: tuple[int, ...] | None,
        trained: tuple[int, ...],
        given: Any,
    ) -> _Plan:
        """Run the first forward of a kind, which tells what those after it give. The ranks keep what it gave."""
        before = torch.get_rng_state()
        seed = remote.new_seed()
        made_trained = None if wanting is None else trained
        how = (modes.now(), self.key, number, training, casting, wanting, made_trained, self.changing, seed)
        told = _asked(self.engine, modules.module_first, *how, *given)
        plan = _Plan(told, self.engine)
        if not plan.draws:
            torch.set_rng_state(before)
        self.changing = tuple(sorted({*self.changing, *(place for rank in told for place in rank["changed"])}))
        return plan

    def _here(self, tensor: Any) -> Any:
        """An input as a tensor of this mesh; local ones go whole to every rank."""
        if isinstance(tensor, remote.RemoteTensor):
            if tensor._spec.engine is not self.engine:
                raise UsageError("this input lies on another mesh than the module")
            if tensor._spec.placements is None:
                raise PlacementError(
                    "this input is a tensor per rank; say how they are one: x.as_global([Shard(0)]). mesh.feed gives "
                    'batches that are one already, and so does mesh.scatter(batch, axis=…, view="global")'
                )
            return tensor
        from torch.distributed.tensor import Replicate

        return remote.upload(self.engine, tensor.detach(), (Replicate(),) * len(self.engine.axes.shape))


class _Forward:
    """One forward and its backward."""

    def __init__(
        self,
        there: _There,
        plan: _Plan,
        kind: Any,
        given: Any,
        trained: tuple[int, ...],
        floats: list[float],
        number: int | None,
    ) -> None:
        self.there, self.plan, self.kind, self.given, self.floats = there, plan, kind, given, floats
        self.trained = trained  # places of parameters
        self.number = number  # of a forward that the ranks have run already, and keep

    def issue(self, tensors: list[Any], wanting: tuple[int, ...] | None) -> tuple[list[Any], Any]:
        """The outputs and, with a graph, the ticket."""
        training, casting, args, kwargs = self.given
        plan, there = self.plan, self.there
        outputs = plan.specs if wanting is None else [*plan.specs, there._ticket]
        if self.number is not None:
            kept = float(self.number)
            made = there._issue((*self.kind, wanting), "module_kept", (there.key, FLOAT), [], [kept], outputs)
            return (made, None) if wanting is None else (made[:-1], made[-1])
        promised = tuple(tuple(spec.shape) for spec in plan.specs)
        seeds = [remote.new_seed()] if plan.draws else []
        trained = None if wanting is None else self.trained
        seed = FLOAT if seeds else None
        changing = there.changing
        args = (there.key, training, casting, wanting, trained, changing, promised, seed, args, kwargs)
        kind = (*self.kind, wanting, changing)
        made = there._issue(kind, "module_forward", args, tensors, seeds + self.floats, outputs)
        return (made, None) if wanting is None else (made[:-1], made[-1])


class _Through(torch.autograd.Function):
    """What autograd here sees of a module there."""

    @staticmethod
    def forward(ctx: Any, call: _Forward, num_inputs: int, *tensors: Any) -> Any:
        inputs = list(tensors[:num_inputs])
        wanting = [at for at in range(num_inputs) if ctx.needs_input_grad[2 + at]]
        outputs, ctx.ticket = call.issue(inputs, tuple(wanting))
        ctx.call, ctx.num_inputs, ctx.wanting = call, num_inputs, wanting
        ctx.specs = [inputs[at]._spec for at in wanting]
        ctx.sources = [tensor for tensor, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True) if needed]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(output for output, smooth in zip(outputs, call.plan.differentiable, strict=True) if not smooth)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Forward = ctx.call
        there, plan = call.there, call.plan
        if ctx.ticket is None:
            raise RuntimeError(
                "backward a second time through a module on the ranks: its graph was let go of by the first. Run the "
                "forward again, or use meshbook.module_to_mesh, where retain_graph=True works"
            )
        ticket, ctx.ticket = ctx.ticket, None
        sources, ctx.sources = ctx.sources, None
        outs = tuple(at for at, grad in enumerate(grads) if grad is not None)
        given = [
            grad if isinstance(grad, remote.RemoteTensor) else remote.RemoteTensor._like(spec, grad)  # as of `y.gt_(0)`
            for spec, grad in zip(plan.specs, grads, strict=True)
            if grad is not None
        ]
        if plan.used is None:
            how = (modes.now(), there.key, given, outs, ticket)
            plan.used = _asked(there.engine, modules.module_used, *how)[0]
        specs = [_settled(spec, there.engine) for spec in ctx.specs] + [there.specs[place] for place in plan.used]
        args = (there.key, tuple(plan.used), [TENSOR] * len(given), outs, TENSOR)
        kind = (*call.kind, tuple(plan.used), outs)
        made = there._issue(kind, "module_backward", args, [*given, ticket], [], specs)
        found: list[Any] = [None] * ctx.num_inputs
        for at, grad in zip(ctx.wanting, made, strict=False):
            found[at] = grad
        by_place = dict(zip(plan.used, made[len(ctx.wanting) :], strict=True))
        found += (by_place.get(place) for place in call.trained)
        if torch.is_grad_enabled():  # create_graph=True
            found = _Once.of(found, [*given, *sources])
        return (None, None, *found)


class _Once(torch.autograd.Function):
    """Gradients that a module on the ranks gave, which are not differentiated again. torch's `once_differentiable` asks
    the gradients that came in only, and would take these for constants."""

    @staticmethod
    def of(grads: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """The same, computed from these sources as autograd sees it."""
        made = [grad for grad in grads if grad is not None]
        given = iter(_Once.apply(len(made), *made, *sources))  # type: ignore[no-untyped-call]
        return [None if grad is None else next(given) for grad in grads]

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "gradients of gradients through a module that was built on the ranks (meshbook.distribute): its graph is "
            "there. meshbook.module_to_mesh(module, mesh) has them"
        )


def _settled(spec: Spec, engine: Engine) -> Spec:
    """The spec of an input's gradient: contiguous, and where the input is."""
    stride, step = [], 1
    for length in reversed(spec.shape):
        stride.append(step)
        step *= max(length, 1)
    return engine.planner.spec(spec.shape, tuple(reversed(stride)), 0, spec.dtype, spec.placements)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return pickle.dumps(leaf)
    return type(leaf), leaf
