"""The controller's side of a module on the ranks: its calls, as autograd sees them, become operations."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from meshbook.errors import PlacementError, UsageError
from meshbook.ids import Ranks
from meshbook.rank.tensors import modes, modules
from meshbook.rank.tensors.operators import FLOAT, TENSOR
from meshbook.rank.tensors.resident_module import Modes
from meshbook.rank.tensors.results import ObjectThere, leaves_of
from meshbook.tensors import dispatch
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.creation import to_remote_tensor
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import TensorSpec

# Devices whose autocast does not affect remote tensors.
_FOREIGN_AUTOCAST_DEVICES = ("cuda", "xpu", "mps")


def refuse_foreign_autocast(*_: Any) -> None:
    """Raise if autocast of another device is enabled: operations below autograd cannot see it."""
    for device in _FOREIGN_AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            raise NotImplementedError(
                f'torch.autocast("{device}") does not reach remote tensors, which are a CPU\'s here wherever their '
                'numbers are: use torch.autocast("cpu", dtype=torch.bfloat16), which has the ranks cast, or '
                'precision="bf16" of meshbook.distribute'
            )


def call_on_ranks(
    engine: TensorEngine, function: Callable[..., Any], *args: Any, ranks: Ranks | None = None
) -> list[Any]:
    """Return the result of a function on each of the ranks, or of these. Blocks."""
    session, ranks = engine.session, engine.ranks if ranks is None else ranks
    command = session.call_command(function, args, {}, ranks, label=function.__name__, inline_limit=1 << 30)
    finished = session.foreground.run(command)
    session.raise_for_status(finished, ranks, label=function.__name__)
    values = session.rank_values(finished.outcomes)
    return [values[rank] for rank in ranks]


class _ForwardSpec:
    """The outputs of a kind of forward: the tensors, and how they form the result."""

    def __init__(self, descriptions: Sequence[Mapping[str, Any]], engine: TensorEngine) -> None:
        first = descriptions[0]
        leaves_of(first["result"])  # its dataclasses become nodes here too
        self.specs = [_spec_from_meta(engine, *tensor) for tensor in first["tensors"]]
        self.output_tree, self.is_differentiable = first["result"], first["differentiable"]
        self.uses_rng: bool = any(rank["draws"] for rank in descriptions)
        self.params_with_grad: list[int] | None = None  # indices of parameters that get a gradient; None: not known yet

    def build_result(self, tensors: Iterable[Any]) -> Any:
        remaining = iter(tensors)

        def to_result(leaf: Any) -> Any:
            if isinstance(leaf, ObjectThere):
                return RemoteObject(next(remaining), leaf.type_name)
            return next(remaining) if leaf is TENSOR else leaf

        return pytree.tree_map(to_result, self.output_tree)


class RemoteObject:
    """An object that a module on the ranks gave and that stays there, such as a cache of keys and values.

    It can be given to the module again: `model(ids, past_key_values=out.past_key_values)`. Every rank has its own.
    """

    def __init__(self, token: Any, type_name: str) -> None:
        self._token, self._type_name = token, type_name

    def __repr__(self) -> str:
        return f"RemoteObject({self._type_name} on the ranks)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"this {self._type_name} stays on the ranks, where the module that gave it can use it, and {name!r} of it "
            "cannot be had here"
        )


def _spec_from_meta(engine: TensorEngine, shape: Any, stride: Any, dtype: str, placements: Any) -> TensorSpec:
    return engine.specs.intern(shape, getattr(torch, dtype), placements, stride)


class ModuleClient:
    """The controller's side of a module on the ranks: it issues the module's operations."""

    def __init__(self, engine: TensorEngine, key: str, resident: Any, description: Mapping[str, Any]) -> None:
        self.engine, self.key, self.resident, self.text = engine, key, resident, description["text"]
        self.specs = [_spec_from_meta(engine, *tensor) for tensor in description["tensors"]]
        self.parameter_indices = list(
            dict.fromkeys(index for _, index, is_parameter in description["names"] if is_parameter)
        )
        self._forward_specs: dict[Any, _ForwardSpec] = {}
        self.mutated_buffers: tuple[int, ...] = ()  # indices of buffers that forwards have changed
        # Modules whose cut layers are not compared yet, by whether in a forward with gradients.
        self._unchecked = dict.fromkeys((False, True), tuple[str, ...](description["unchecked"]))
        self._first_forward_ids = itertools.count(1)
        self.graph_token_spec = engine.specs.intern((0,), torch.float32, None)
        outputs = [*self.specs, self.graph_token_spec]
        *wrapped, self._lifetime_token = self.run_op(
            ("tensors",), "module_tensors", (key,), [], [], outputs, communicates=False
        )
        for tensor in wrapped:
            tensor._handle.version_counter = engine.foreign_version_counter
        for name, index, _ in description["names"]:
            engine.faults.names.setdefault(wrapped[index]._handle.id, name)
        trainable = set(description["trained"])
        self.tensors: list[Any] = [
            nn.Parameter(tensor, requires_grad=index in trainable) if index in self.parameter_indices else tensor
            for index, tensor in enumerate(wrapped)
        ]

    def trainable_indices(self) -> tuple[int, ...]:
        """Return the indices of parameters that require a gradient now: a frozen one may be unfrozen again."""
        return tuple(index for index in self.parameter_indices if self.tensors[index].requires_grad)

    def run_op(
        self,
        key_parts: Any,
        function: str,
        args: tuple[Any, ...],
        tensors: list[Any],
        floats: list[float],
        outputs: Sequence[TensorSpec],
        *,
        communicates: bool = True,
    ) -> list[Any]:
        """Run a Meshbook function as an operation; `key_parts` are equal for operations with the same template."""
        engine = self.engine
        engine.sync_modes()
        key = ("module", self.key, function, *key_parts, *(tensor._spec for tensor in tensors), *outputs)
        template = engine.templates.find_or_plan(
            key, engine.planner.plan_rank_function, function, args, outputs, returns="list", communicates=communicates
        )
        numbers: list[Any] = [0, *(tensor._handle.id for tensor in tensors)]
        made: list[Any] = dispatch.execute_template(engine, template, None, (), {}, numbers, tensors, floats)
        engine.foreign_version_counter[0] += 1  # the operation may have changed buffers
        return made

    def forward(self, training: Modes, args: Any, kwargs: Any) -> Any:
        tensors: list[Any] = []
        floats: list[float] = []

        def to_placeholder(leaf: Any) -> Any:
            """Return the placeholder of a leaf in the template; floats travel with the operation, as always."""
            if isinstance(leaf, RemoteObject):
                tensors.append(self._token_of(leaf))
                return TENSOR
            leaf = to_remote_tensor(leaf)
            if isinstance(leaf, torch.Tensor):
                tensors.append(self._to_module_input(leaf))
                return TENSOR
            if type(leaf) is float:
                floats.append(leaf)
                return FLOAT
            return leaf

        refuse_foreign_autocast()
        self.engine.sender.check_open()
        if self.engine.faults.is_alert:
            self.engine.faults.check_ids([tensor._handle.id for tensor in self.tensors])
        leaves_of((args, kwargs))  # dataclasses become nodes
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
            tensors_left, floats_left = map(_without_history, tensors), iter(floats)
            call_args = pytree.tree_map(
                lambda leaf: next(tensors_left) if leaf is TENSOR else next(floats_left) if leaf is FLOAT else leaf,
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

    def generate(self, args: Any, kwargs: Any) -> Any:
        """See `RemoteModule.generate`."""
        self.engine.sender.check_open()

        def to_input(leaf: Any) -> Any:
            if isinstance(leaf, RemoteObject):
                return self._token_of(leaf)
            leaf = to_remote_tensor(leaf)
            return self._to_module_input(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(to_input, (args, kwargs))
        call_args = (modes.non_default_modes(), self.key, torch.get_rng_state(), self._unchecked[False], args, kwargs)
        found, rng_state_after, checked = call_on_ranks(self.engine, modules.module_generate, *call_args)[0]
        torch.set_rng_state(rng_state_after)
        self._note_checked(checked, has_gradients=False)
        return found

    def save_pretrained(self, folder: str, options: dict[str, Any]) -> None:
        """See `RemoteModule.save_pretrained`."""
        call_on_ranks(self.engine, modules.module_save_pretrained, self.key, folder, options)

    def _run_first_forward(
        self,
        first_forward_id: int,
        training: Modes,
        autocast_dtype: str | None,
        inputs_with_grad: tuple[int, ...] | None,
        trainable_indices: tuple[int, ...],
        call_args: Any,
    ) -> _ForwardSpec:
        """Run the first forward of a kind, which describes the results of later ones. The ranks store its results."""
        rng_state = torch.get_rng_state()
        call_options = (
            modes.non_default_modes(),
            self.key,
            first_forward_id,
            training,
            autocast_dtype,
            inputs_with_grad,
            None if inputs_with_grad is None else trainable_indices,
            self.mutated_buffers,
            self._unchecked[inputs_with_grad is not None],
            dispatch.new_seed(),
        )
        descriptions = call_on_ranks(self.engine, modules.module_first, *call_options, *call_args)
        forward_spec = _ForwardSpec(descriptions, self.engine)
        self._note_checked(descriptions[0]["checked"], has_gradients=inputs_with_grad is not None)
        if reasons := dict.fromkeys(reason for rank in descriptions for reason in rank["uncompiled"]):
            warnings.warn(
                f"torch.compile has left parts of this module's blocks as they are: {'; '.join(reasons)}",
                stacklevel=1,
            )
        if not forward_spec.uses_rng:
            torch.set_rng_state(rng_state)
        self.mutated_buffers = tuple(
            sorted({*self.mutated_buffers, *(index for rank in descriptions for index in rank["changed"])})
        )
        return forward_spec

    def _note_checked(self, checked: Sequence[str], *, has_gradients: bool) -> None:
        for known in (False, True) if has_gradients else (False,):
            self._unchecked[known] = tuple(name for name in self._unchecked[known] if name not in checked)

    def _token_of(self, given: RemoteObject) -> Any:
        if given._token._spec.engine is not self.engine:
            raise UsageError(f"this {given._type_name} lies on another mesh than the module")
        return given._token

    def _to_module_input(self, tensor: Any) -> Any:
        """Return an input as a tensor of this mesh; local ones are replicated on every rank."""
        if isinstance(tensor, MeshTensor):
            if tensor._spec.engine is not self.engine:
                raise UsageError("this input lies on another mesh than the module")
            if tensor._spec.placements is None:
                raise PlacementError(
                    "this input is a tensor per rank; say how they are one: x.as_global([Shard(0)]). mesh.feed gives "
                    'batches that are one already, and so does mesh.scatter(batch, axis=…, view="global")'
                )
            return tensor
        return dispatch.upload(self.engine, tensor.detach(), (Replicate(),) * len(self.engine.axes.shape))


@dataclass
class _ForwardCall:
    """One forward and its backward."""

    client: ModuleClient
    forward_spec: _ForwardSpec
    forward_key: Any
    call_args: Any
    trainable_indices: tuple[int, ...]  # of parameters
    floats: list[float]
    first_forward_id: int | None  # of a forward whose results the ranks already store

    def run(self, tensors: list[Any], inputs_with_grad: tuple[int, ...] | None) -> tuple[list[Any], Any]:
        """Run the forward; return the outputs and, with a graph, the graph token."""
        training, autocast_dtype, args, kwargs = self.call_args
        forward_spec, client = self.forward_spec, self.client
        outputs = forward_spec.specs if inputs_with_grad is None else [*forward_spec.specs, client.graph_token_spec]
        if self.first_forward_id is not None:
            key_parts, floats = (*self.forward_key, inputs_with_grad), [float(self.first_forward_id)]
            made = client.run_op(key_parts, "module_first_result", (client.key, FLOAT), [], floats, outputs)
        else:
            seeds = [dispatch.new_seed()] if forward_spec.uses_rng else []
            message_args = (
                client.key,
                training,
                autocast_dtype,
                inputs_with_grad,
                None if inputs_with_grad is None else self.trainable_indices,
                client.mutated_buffers,
                tuple(tuple(spec.shape) for spec in forward_spec.specs),
                FLOAT if seeds else None,
                args,
                kwargs,
            )
            key_parts = (*self.forward_key, inputs_with_grad, client.mutated_buffers)
            made = client.run_op(key_parts, "module_forward", message_args, tensors, seeds + self.floats, outputs)
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
            if isinstance(grad, MeshTensor)
            else dispatch.upload_grad(spec, grad)  # zeros of torch, as after `y.gt_(0)`
            for spec, grad in zip(forward_spec.specs, grads, strict=True)
            if grad is not None
        ]
        if forward_spec.params_with_grad is None:
            call_options = (modes.non_default_modes(), client.key, given, output_indices, graph_token)
            forward_spec.params_with_grad = call_on_ranks(
                client.engine, modules.module_params_with_grad, *call_options
            )[0]
        intern = client.engine.specs.intern
        input_grad_specs = [intern(spec.shape, spec.dtype, spec.placements) for spec in ctx.specs]
        specs = input_grad_specs + [client.specs[index] for index in forward_spec.params_with_grad]
        args = (client.key, tuple(forward_spec.params_with_grad), [TENSOR] * len(given), output_indices, TENSOR)
        key_parts = (*call.forward_key, tuple(forward_spec.params_with_grad), output_indices)
        made = client.run_op(key_parts, "module_backward", args, [*given, graph_token], [], specs)
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


def _without_history(tensor: Any) -> Any:
    """Return a tensor without autograd's history; the token of an object has none, and must stay what it is."""
    return tensor.detach() if tensor.requires_grad else tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hashable_key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return pickle.dumps(leaf)
    return type(leaf), leaf
