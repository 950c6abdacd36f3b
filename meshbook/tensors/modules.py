"""Modules on a mesh, in two ways.

`module_to_mesh`: the module's Python runs here, its parameters are on the ranks, and each operation is sent.
`distribute_module`: a strategy builds the module on the ranks; one message runs its forward there, one its backward.
Its parameters are here as RemoteTensors of the same storage, so any optimizer of torch works on them.
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
from meshbook.rank import expressions
from meshbook.rank.tensors import building, modes, modules, resident_module
from meshbook.rank.tensors.operators import FLOAT, TENSOR, TemplateMessage
from meshbook.tensors import remote
from meshbook.tensors.creation import distribute, engine_of, to_remote_tensor
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.plan import Template, TensorSpec

Placements = Sequence[Any] | Mapping[str, Any] | Callable[[str, torch.Tensor], Any] | None

_PRECISIONS = {None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# Modules whose Python runs here


def module_to_mesh(module: nn.Module, mesh: Mesh, placements: Placements = None) -> nn.Module:
    """Bring a module's parameters and buffers to a mesh, in place: RemoteTensors replace them.

    Its Python still runs here. Create optimizers afterwards: they hold the parameters that they were given. Gradients
    are redistributed to their parameter's placements as soon as they are complete. Does not wait.

    Args:
        placements: the same for every tensor (`[Shard(0)]`); or by name, with patterns (`{"*.weight": [Shard(0)]}`); or
            a function of (name, tensor). Where it gives None, and by default: replicated on every rank.

    Returns:
        The module itself.

    Raises:
        PlacementError: they do not fit a parameter or the mesh; the message names the parameter.
    """
    moved: dict[int, Any] = {}
    for prefix, submodule in list(module.named_modules()):
        if isinstance(submodule, nn.LSTM) and not any(
            isinstance(one, remote.RemoteTensor) for one in submodule.parameters()
        ):
            _disable_fused_lstm(submodule)
        for tensor_dict in (submodule._parameters, submodule._buffers):
            for name, tensor in list(tensor_dict.items()):
                if tensor is None or isinstance(tensor, remote.RemoteTensor):
                    continue
                if id(tensor) not in moved:
                    full_name = f"{prefix}.{name}" if prefix else name
                    try:
                        tensor_placements = _placements_for(placements, full_name, tensor)
                        moved[id(tensor)] = _distribute_tensor(tensor, mesh, tensor_placements)
                    except PlacementError as error:
                        raise PlacementError(f"{full_name}: {error}") from None
                tensor_dict[name] = moved[id(tensor)]
    module.register_forward_pre_hook(_refuse_foreign_autocast)
    return module


# Devices whose autocast does not affect remote tensors.
_FOREIGN_AUTOCAST_DEVICES = ("cuda", "xpu", "mps")


def _refuse_foreign_autocast(*_: Any) -> None:
    """Raise if autocast of another device is enabled: operations below autograd cannot see it."""
    for device in _FOREIGN_AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            raise NotImplementedError(
                f'torch.autocast("{device}") does not reach remote tensors, which are a CPU\'s here wherever their '
                'numbers are: use torch.autocast("cpu", dtype=torch.bfloat16), which has the ranks cast, or '
                'precision="bf16" of meshbook.distribute'
            )


def _distribute_tensor(tensor: torch.Tensor, mesh: Mesh, placements: Any) -> Any:
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
    remote_tensor: Any = distribute(tensor.detach(), mesh, placements)
    if not isinstance(tensor, nn.Parameter):
        return remote_tensor
    return nn.Parameter(remote_tensor, requires_grad=tensor.requires_grad)


# Whether oneDNN was enabled before each of the LSTMs that are running.
_onednn_was_enabled: list[bool] = []


def _disable_fused_lstm(module: nn.LSTM) -> None:
    """Disable oneDNN while an LSTM runs: its one operation for a complete LSTM on a CPU has no DTensor rule."""

    def before(module: nn.Module, args: Any) -> None:
        _onednn_was_enabled.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if _onednn_was_enabled:
            torch._C._set_mkldnn_enabled(_onednn_was_enabled.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _placements_for(placements: Placements, name: str, tensor: torch.Tensor) -> Any:
    if placements is None:
        return None
    if isinstance(placements, Mapping):
        return next((matched for pattern, matched in placements.items() if fnmatch.fnmatchcase(name, pattern)), None)
    return placements(name, tensor) if callable(placements) else placements


# ---------------------------------------------------------------------------------------------------------------------
# Modules on the ranks


def distribute_module(
    source: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    *,
    strategy: Any = "fsdp",
    precision: str | None = None,
    axis: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> RemoteModule:
    """Build a module on the ranks, distributed over an axis. Blocks until it is built.

    Args:
        source: a function that makes it (called on the ranks; nothing of it is made here), with the random numbers that
            torch's generator here would have given; or a module, whose values are retained.
        strategy: "fsdp", "ddp", "replicate", or a function of (module, DeviceMesh) that is called on every rank.
        precision: "bf16" computes in bfloat16, with parameters and gradients unchanged; None: as the parameters are.
        axis: the axis that shards batches (dim 0); required where the mesh has several and none is called "dp".
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
    mesh_handle = handles.RemoteValue(session, expressions.Expression(expressions.NameRef("mesh")), ranks)
    dtype = _PRECISIONS[precision]
    command = session.call_command(
        resident_module.build_resident,
        (key, source, strategy, dtype, mesh_handle, axis, torch.get_rng_state(), options, modes.non_default_modes()),
        {},
        ranks,
        always_retain=True,
        inline_limit=0,
        label="distribute",
    )
    finished = session.foreground.run(command)
    session.raise_for_status(finished, ranks, label="distribute")
    resident = handles.result_handle(session, command.call, ranks, session.rank_values(finished.outcomes), "module")
    description = _call_on_ranks(engine, resident_module.ResidentModule.describe, resident)[0]
    if not isinstance(source, nn.Module):
        torch.set_rng_state(description["numbers"])  # as if the module had been made here
    name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "a strategy")
    return RemoteModule(engine, key, resident, description, f"{name} over {axis}={mesh.size(axis)}", precision)


def _batch_axis(mesh: Mesh) -> str:
    if len(mesh.axes) == 1:
        return next(iter(mesh.axes))
    if "dp" in mesh.axes:
        return "dp"
    raise UsageError(f"this mesh has the axes {', '.join(mesh.axes)}; say over which batches are cut with axis=…")


def _call_on_ranks(engine: TensorEngine, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of a function on each of the ranks. Blocks."""
    session = engine.session
    command = session.call_command(function, args, {}, engine.ranks, label=function.__name__, inline_limit=1 << 30)
    finished = session.foreground.run(command)
    session.raise_for_status(finished, engine.ranks, label=function.__name__)
    values = session.rank_values(finished.outcomes)
    return [values[rank] for rank in engine.ranks]


class _ForwardSpec:
    """The outputs of a kind of forward: the tensors, and how they form the result."""

    def __init__(self, descriptions: Sequence[Mapping[str, Any]], engine: TensorEngine) -> None:
        first = descriptions[0]
        self.specs = [_spec_from_meta(engine, *tensor) for tensor in first["tensors"]]
        self.output_tree, self.is_differentiable = first["result"], first["differentiable"]
        self.uses_rng: bool = any(rank["draws"] for rank in descriptions)
        self.params_with_grad: list[int] | None = None  # indices of parameters that get a gradient; None: not known yet

    def build_result(self, tensors: Iterable[Any]) -> Any:
        remaining = iter(tensors)
        return pytree.tree_map(lambda leaf: next(remaining) if leaf is TENSOR else leaf, self.output_tree)


def _spec_from_meta(engine: TensorEngine, shape: Any, stride: Any, dtype: str, placements: Any) -> TensorSpec:
    return engine.planner.spec(shape, stride, 0, getattr(torch, dtype), tuple(placements))


class RemoteModule(nn.Module):
    """A module on the ranks. Call it with RemoteTensors; `parameters()` are RemoteTensors of its storage.

    Inputs sharded along dim 0 over the batch axis (as `mesh.feed` gives them) share the work; replicated ones are
    computed by every rank alike. Results and gradients equal those of one process with the complete batch.

    Attributes:
        plan: how it is distributed, as text.
    """

    def __init__(
        self,
        engine: TensorEngine,
        key: str,
        resident: Any,
        description: Mapping[str, Any],
        plan: str,
        precision: str | None,
    ) -> None:
        super().__init__()
        blocks = f", {description['blocks']} blocks" if description["blocks"] > 0 else ""
        self.plan = f"{plan}{blocks}{f', {precision}' if precision else ''}"
        # One plain object holds what nn.Module would otherwise register as a submodule or show in its dict.
        self._client = _ModuleClient(engine, key, resident, description)
        client = self._client
        for name, index, is_parameter in description["names"]:
            *path, last = name.split(".")
            submodule: nn.Module = self
            for child_name in path:
                if child_name not in submodule._modules:
                    submodule.add_module(child_name, _SubmodulePlaceholder())
                submodule = submodule._modules[child_name]  # type: ignore[assignment]
            if is_parameter:
                submodule._parameters[last] = client.tensors[index]
            else:
                submodule._buffers[last] = client.tensors[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.forward(self.training, args, kwargs)

    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """Return names and tensors, as RemoteTensors.

        Args:
            full: return complete local tensors. Blocks.
        """
        found = super().state_dict(*args, **kwargs)
        return {name: tensor.full_tensor() for name, tensor in found.items()} if full else found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like torch's; takes what `state_dict` returns, full or not, and complete local tensors."""
        if assign:
            raise UsageError("assign=True would replace the tensors that the ranks compute with; leave it out")
        own = super().state_dict()
        uploaded = {
            name: _upload_like(tensor, own[name], self._client.engine) if name in own else tensor
            for name, tensor in state_dict.items()
        }
        return super().load_state_dict(uploaded, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UsageError(
            "this module lives on the ranks, on their device, and stays as it is; say precision= when you distribute it"
        )

    def __repr__(self) -> str:
        return f"RemoteModule({self.plan})\n{self._client.text}"

    def __reduce__(self) -> Any:
        raise UsageError("this module lives on the ranks; save model.state_dict(full=True)")


class _SubmodulePlaceholder(nn.Module):
    """A node in the tree of names; the module that computes is on the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("only the whole module can be called here: its parts are on the ranks")


def _upload_like(tensor: Any, own: Any, engine: TensorEngine) -> Any:
    if isinstance(tensor, remote.RemoteTensor) or tensor.shape != own.shape:
        return tensor  # torch reports shapes that differ
    return remote.upload(engine, tensor.detach().to(own.dtype), own._spec.placements)


class _ModuleClient:
    """The controller's side of a module on the ranks: it issues the module's operations."""

    def __init__(self, engine: TensorEngine, key: str, resident: Any, description: Mapping[str, Any]) -> None:
        self.engine, self.key, self.resident, self.text = engine, key, resident, description["text"]
        self.specs = [_spec_from_meta(engine, *tensor) for tensor in description["tensors"]]
        self.parameter_indices = list(
            dict.fromkeys(index for _, index, is_parameter in description["names"] if is_parameter)
        )
        self.runs_locally: bool = description["local"]
        self._forward_specs: dict[Any, _ForwardSpec] = {}
        self.mutated_buffers: tuple[int, ...] = ()  # indices of buffers that forwards have changed
        self._first_forward_ids = itertools.count(1)
        self._graph_token_spec = engine.planner.spec((0,), (1,), 0, torch.float32, None)
        outputs = [*self.specs, self._graph_token_spec]
        *wrapped, self._lifetime_token = self._run_op(
            ("tensors",), "module_tensors", (key,), [], [], outputs, is_view=True
        )
        for tensor in wrapped:
            tensor._handle.version_counter = engine.foreign_version_counter
        trainable = set(description["trained"])
        self.tensors: list[Any] = [
            nn.Parameter(tensor, requires_grad=index in trainable) if index in self.parameter_indices else tensor
            for index, tensor in enumerate(wrapped)
        ]

    def trainable_indices(self) -> tuple[int, ...]:
        """Return the indices of parameters that require a gradient now: a frozen one may be unfrozen again."""
        return tuple(index for index in self.parameter_indices if self.tensors[index].requires_grad)

    def _run_op(
        self,
        key_parts: Any,
        function: str,
        args: tuple[Any, ...],
        tensors: list[Any],
        floats: list[float],
        outputs: Sequence[TensorSpec],
        *,
        is_view: bool = False,
    ) -> list[Any]:
        """Run a Meshbook function as an operation; `key_parts` are equal for operations with the same template."""
        engine = self.engine
        engine.sync_modes()
        key = ("module", self.key, function, *key_parts, *(tensor._spec for tensor in tensors), *outputs)
        template = engine.cache.get(key)
        if template is None:
            number = next(engine.planner._numbers)
            message = TemplateMessage(
                number, f"meshbook::{function}", args, {}, (-1,) * len(outputs), "many", (), not is_view, False
            )
            planned = Template(
                number,
                None,
                tuple(outputs),
                "list",
                communicates=not is_view,
                body=pickle.dumps(message, 5),
                name=message.function,
            )
            template = engine.plan_and_cache(key, lambda: planned)
        numbers: list[Any] = [0, *(tensor._handle.id for tensor in tensors)]
        made: list[Any] = remote.execute_template(engine, template, None, (), {}, numbers, tensors, floats)
        engine.foreign_version_counter[0] += 1  # the operation may have changed buffers
        return made

    def forward(self, training: bool, args: Any, kwargs: Any) -> Any:
        tensors: list[Any] = []
        floats: list[float] = []

        def to_placeholder(leaf: Any) -> Any:
            """Return the placeholder of a leaf in the template; floats travel with the operation, as always."""
            leaf = to_remote_tensor(leaf)
            if isinstance(leaf, torch.Tensor):
                tensors.append(self._to_module_input(leaf))
                return TENSOR
            if type(leaf) is float:
                floats.append(leaf)
                return FLOAT
            return leaf

        _refuse_foreign_autocast()
        if self.engine.needs_fault_check:
            self.engine.check_ids([tensor._handle.id for tensor in self.tensors])
        call_template = pytree.tree_map(to_placeholder, (args, kwargs))
        leaves, shape = pytree.tree_flatten(call_template)
        trainable_indices = self.trainable_indices() if torch.is_grad_enabled() else ()
        # The autocast state of "cpu", which is the device that these tensors report.
        autocast_dtype = _dtype_name(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None
        forward_key = (training, autocast_dtype, trainable_indices, str(shape), *map(_hashable_key, leaves))
        spec_key = (*forward_key, *(tensor._spec for tensor in tensors))
        grad = torch.is_grad_enabled() and (bool(trainable_indices) or any(t.requires_grad for t in tensors))
        forward_spec = self._forward_specs.get(spec_key)
        first_forward_id = None
        if forward_spec is None:
            tensors_left, floats_left = iter(tensors), iter(floats)
            call_args = pytree.tree_map(
                lambda leaf: (
                    next(tensors_left).detach() if leaf is TENSOR else next(floats_left) if leaf is FLOAT else leaf
                ),
                call_template,
            )
            inputs_with_grad = tuple(at for at, tensor in enumerate(tensors) if tensor.requires_grad) if grad else None
            first_forward_id = next(self._first_forward_ids)
            forward_spec = self._forward_specs[spec_key] = self._run_first_forward(
                first_forward_id, training, autocast_dtype, inputs_with_grad, trainable_indices, call_args
            )
        call = _ForwardCall(
            self,
            forward_spec,
            forward_key,
            (training, autocast_dtype, *call_template),
            trainable_indices,
            floats,
            first_forward_id,
        )
        if not grad:
            return forward_spec.build_result(call.run(tensors, None)[0])
        parameters = [self.tensors[index] for index in trainable_indices]
        return forward_spec.build_result(_RemoteForward.apply(call, len(tensors), *tensors, *parameters))  # type: ignore[no-untyped-call]

    def _run_first_forward(
        self,
        first_forward_id: int,
        training: bool,
        autocast_dtype: str | None,
        inputs_with_grad: tuple[int, ...] | None,
        trainable_indices: tuple[int, ...],
        call_args: Any,
    ) -> _ForwardSpec:
        """Run the first forward of a kind, which describes the results of later ones. The ranks store its results."""
        rng_state = torch.get_rng_state()
        seed = remote.new_seed()
        trainable_or_none = None if inputs_with_grad is None else trainable_indices
        call_options = (
            modes.non_default_modes(),
            self.key,
            first_forward_id,
            training,
            autocast_dtype,
            inputs_with_grad,
            trainable_or_none,
            self.mutated_buffers,
            seed,
        )
        descriptions = _call_on_ranks(self.engine, modules.module_first, *call_options, *call_args)
        forward_spec = _ForwardSpec(descriptions, self.engine)
        if not forward_spec.uses_rng:
            torch.set_rng_state(rng_state)
        self.mutated_buffers = tuple(
            sorted({*self.mutated_buffers, *(index for rank in descriptions for index in rank["changed"])})
        )
        return forward_spec

    def _to_module_input(self, tensor: Any) -> Any:
        """Return an input as a tensor of this mesh; local ones are replicated on every rank."""
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


class _ForwardCall:
    """One forward and its backward."""

    def __init__(
        self,
        client: _ModuleClient,
        forward_spec: _ForwardSpec,
        forward_key: Any,
        call_args: Any,
        trainable_indices: tuple[int, ...],
        floats: list[float],
        first_forward_id: int | None,
    ) -> None:
        self.client, self.forward_spec, self.forward_key, self.call_args, self.floats = (
            client,
            forward_spec,
            forward_key,
            call_args,
            floats,
        )
        self.trainable_indices = trainable_indices  # of parameters
        self.first_forward_id = first_forward_id  # of a forward whose results the ranks already store

    def run(self, tensors: list[Any], inputs_with_grad: tuple[int, ...] | None) -> tuple[list[Any], Any]:
        """Run the forward; return the outputs and, with a graph, the graph token."""
        training, autocast_dtype, args, kwargs = self.call_args
        forward_spec, client = self.forward_spec, self.client
        outputs = forward_spec.specs if inputs_with_grad is None else [*forward_spec.specs, client._graph_token_spec]
        if self.first_forward_id is not None:
            first_forward_id = float(self.first_forward_id)
            made = client._run_op(
                (*self.forward_key, inputs_with_grad),
                "module_first_result",
                (client.key, FLOAT),
                [],
                [first_forward_id],
                outputs,
            )
            return (made, None) if inputs_with_grad is None else (made[:-1], made[-1])
        expected_shapes = tuple(tuple(spec.shape) for spec in forward_spec.specs)
        seeds = [remote.new_seed()] if forward_spec.uses_rng else []
        trainable_indices = None if inputs_with_grad is None else self.trainable_indices
        seed = FLOAT if seeds else None
        mutated_buffers = client.mutated_buffers
        args = (
            client.key,
            training,
            autocast_dtype,
            inputs_with_grad,
            trainable_indices,
            mutated_buffers,
            expected_shapes,
            seed,
            args,
            kwargs,
        )
        key_parts = (*self.forward_key, inputs_with_grad, mutated_buffers)
        made = client._run_op(key_parts, "module_forward", args, tensors, seeds + self.floats, outputs)
        return (made, None) if inputs_with_grad is None else (made[:-1], made[-1])


class _RemoteForward(torch.autograd.Function):
    """A forward on the ranks, as autograd sees it here."""

    @staticmethod
    def forward(ctx: Any, call: _ForwardCall, num_inputs: int, *tensors: Any) -> Any:
        inputs = list(tensors[:num_inputs])
        inputs_with_grad = [at for at in range(num_inputs) if ctx.needs_input_grad[2 + at]]
        outputs, ctx.ticket = call.run(inputs, tuple(inputs_with_grad))
        ctx.call, ctx.num_inputs, ctx.wanting = call, num_inputs, inputs_with_grad
        ctx.specs = [inputs[at]._spec for at in inputs_with_grad]
        ctx.sources = [tensor for tensor, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True) if needed]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                output
                for output, is_differentiable in zip(outputs, call.forward_spec.is_differentiable, strict=True)
                if not is_differentiable
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _ForwardCall = ctx.call
        client, forward_spec = call.client, call.forward_spec
        if ctx.ticket is None:
            raise RuntimeError(
                "backward a second time through a module on the ranks: its graph was let go of by the first. Run the "
                "forward again, or use meshbook.module_to_mesh, where retain_graph=True works"
            )
        graph_token, ctx.ticket = ctx.ticket, None
        sources, ctx.sources = ctx.sources, None
        output_indices = tuple(at for at, grad in enumerate(grads) if grad is not None)
        given = [
            grad
            if isinstance(grad, remote.RemoteTensor)
            else remote.RemoteTensor._upload_grad(spec, grad)  # zeros of torch, as after `y.gt_(0)`
            for spec, grad in zip(forward_spec.specs, grads, strict=True)
            if grad is not None
        ]
        if forward_spec.params_with_grad is None:
            call_options = (modes.non_default_modes(), client.key, given, output_indices, graph_token)
            forward_spec.params_with_grad = _call_on_ranks(
                client.engine, modules.module_params_with_grad, *call_options
            )[0]
        specs = [_input_grad_spec(spec, client.engine) for spec in ctx.specs] + [
            client.specs[index] for index in forward_spec.params_with_grad
        ]
        args = (client.key, tuple(forward_spec.params_with_grad), [TENSOR] * len(given), output_indices, TENSOR)
        key_parts = (*call.forward_key, tuple(forward_spec.params_with_grad), output_indices)
        made = client._run_op(key_parts, "module_backward", args, [*given, graph_token], [], specs)
        found: list[Any] = [None] * ctx.num_inputs
        for at, grad in zip(ctx.wanting, made, strict=False):
            found[at] = grad
        grad_by_index = dict(zip(forward_spec.params_with_grad, made[len(ctx.wanting) :], strict=True))
        found += (grad_by_index.get(index) for index in call.trainable_indices)
        if torch.is_grad_enabled():  # create_graph=True
            found = _OnceDifferentiable.wrap_grads(found, [*given, *sources])
        return (None, None, *found)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients of a module on the ranks, which cannot be differentiated again.

    torch's `once_differentiable` checks only the incoming gradients, and would treat these as constants.
    """

    @staticmethod
    def wrap_grads(grads: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Return the same gradients, as functions of these sources in autograd's graph."""
        made = [grad for grad in grads if grad is not None]
        given = iter(_OnceDifferentiable.apply(len(made), *made, *sources))  # type: ignore[no-untyped-call]
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


def _input_grad_spec(spec: TensorSpec, engine: TensorEngine) -> TensorSpec:
    """Return the spec of an input's gradient: contiguous, with the input's placements."""
    stride, step = [], 1
    for length in reversed(spec.shape):
        stride.append(step)
        step *= max(length, 1)
    return engine.planner.spec(spec.shape, tuple(reversed(stride)), 0, spec.dtype, spec.placements)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hashable_key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return pickle.dumps(leaf)
    return type(leaf), leaf
