"""Turns torch's operations on remote tensors into operations of the ranks.

`torch_dispatch` is the hot path: it looks the operation up by its identity and its operands' specs (`plan` plans it
once), assigns ids to the results, and passes numbers to the engine. Floats travel with the operation and are not part
of the key, or every step's bias correction would need a new plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.controller.sigint import defer_sigint
from meshbook.rank.tensors import operators
from meshbook.rank.tensors.schemas import makes_views, out_names, written_leaves
from meshbook.tensors import functional_views
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import Template, TensorHandle, TensorSpec, contiguous_strides

aten = torch.ops.aten

# Maximum size of a local tensor among the operands that is sent along; larger ones are better sent once.
MAX_INLINE_OPERAND_BYTES = 1 << 20

# The class of the tensors that operations make. `remote`, which is above this module, sets it to RemoteTensor.
tensor_class: type[MeshTensor] = MeshTensor

_make_wrapper = torch.Tensor._make_wrapper_subclass
_is_inference = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype  # the result dtype of operations on integers and of factories
_CPU = torch.device("cpu")  # the device that tensors report; torch would look for the backend of any other
# Seeds travel as floats, which represent them exactly.
_NUM_SEEDS = 1 << 52
_NULL_CONTEXT = contextlib.nullcontext()

Override = Callable[[Any, Any, Any], Any]  # (operation, args, kwargs) -> result

# Overrides of operations that are not sent unchanged, by the operator's id.
OVERRIDES_BY_ID: dict[int, Override] = {}


def register_overrides(table: dict[Any, Override]) -> None:
    """Register functions that run these operations."""
    OVERRIDES_BY_ID.update({id(operator): function for operator, function in table.items()})


def wrap_handle(spec: TensorSpec, handle: TensorHandle) -> Any:
    """Return a tensor for a handle."""
    tensor: Any = _make_wrapper(*(spec.wrapper_args or _wrapper_args_of(spec)))
    handle.spec = spec
    tensor._handle = handle
    return tensor


def _wrapper_args_of(spec: TensorSpec) -> tuple[Any, ...]:
    """Return the arguments of `_make_wrapper`: positional, because keywords cost a third more.

    Contiguous strides are left out, because torch then reads the arguments a third faster.
    """
    layout_args = (None, None) if spec.stride == contiguous_strides(spec.shape) else (spec.stride, 0)
    spec.wrapper_args = (tensor_class, spec.shape, *layout_args, None, spec.dtype, torch.strided, _CPU)
    return spec.wrapper_args


# ---------------------------------------------------------------------------------------------------------------------
# The hot path


def torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operation on the ranks; returns at once. This is `__torch_dispatch__`."""
    op_id = id(func)  # an operator's own hash runs in Python; operators are never freed
    override = OVERRIDES_BY_ID.get(op_id)
    if override is not None:
        return override(func, args, kwargs or {})
    key: list[Any] = [op_id, _default_dtype()]
    numbers: list[Any] = [0]
    tensors: list[Any] = []
    floats: list[float] = []
    has_local_operands = False
    for arg in args if not kwargs else (*args, *itertools.chain.from_iterable(kwargs.items())):
        kind = arg.__class__
        if kind is tensor_class:
            handle = arg._handle
            key.append(handle.spec)
            numbers.append(handle.id)
            tensors.append(arg)
        elif kind is int or arg is None:
            key.append(arg)
        elif kind is list or kind is tuple:
            has_local_operands |= _add_items(arg, key, numbers, tensors, floats)
        elif kind is float:
            key.append(float)
            floats.append(arg)
        elif isinstance(arg, torch.Tensor):
            has_local_operands = True
        else:  # with its class, because True equals 1
            key.append(kind)
            key.append(arg)
    if has_local_operands:
        args, kwargs = _upload_local_operands(func, args, kwargs)
        return torch_dispatch(func, types, args, kwargs)
    engine: TensorEngine = tensors[0]._handle.spec.engine
    cache_key = tuple(key)
    template = engine.templates.recent.get(cache_key)
    if template is None:
        template = engine.templates.plan_and_cache(cache_key, engine.planner.plan, func, args, kwargs or {}, tensors)
    spec = template.fast_path_output
    if spec is None or (template.is_view and _is_inference()):
        return execute_template(engine, template, func, args, kwargs, numbers, tensors, floats)
    # Like `execute_template`, for the common case: one new tensor, and the fast path.
    result: Any = _make_wrapper(*(spec.wrapper_args or _wrapper_args_of(spec)))
    result._handle = handle = TensorHandle()
    handle.spec = spec
    handle.id = new_id = engine.next_id()
    handle.__del__ = partial(engine.free_id, new_id)
    handle.version_counter = tensors[0]._handle.get_version_counter() if template.is_view else None
    numbers[0] = template.number
    numbers.append(new_id)
    if floats:
        numbers += floats
    engine.emit(numbers, capture_call_site())
    return result


def _add_items(items: Any, key: list[Any], numbers: list[Any], tensors: list[Any], floats: list[float]) -> bool:
    """Add the items of a list argument, which are never lists; return whether there is a local tensor among them."""
    key.append(len(items))
    has_local_operands = False
    for item in items:
        kind = item.__class__
        if kind is int or item is None:
            key.append(item)
        elif kind is tensor_class:
            handle = item._handle
            key.append(handle.spec)
            numbers.append(handle.id)
            tensors.append(item)
        elif kind is float:
            key.append(float)
            floats.append(item)
        elif isinstance(item, torch.Tensor):
            has_local_operands = True
        else:
            key.append(kind)
            key.append(item)
    return has_local_operands


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the ranks, below autograd; returns at once."""
    return torch_dispatch(func, (), args, kwargs)


def execute_template(
    engine: TensorEngine,
    template: Template,
    func: Any,
    args: Any,
    kwargs: Any,
    numbers: list[Any],
    tensors: Sequence[Any],
    floats: list[float],
) -> Any:
    """Assign ids to the results of a planned operation, and queue it."""
    if template.needs_slow_path:
        if template.redistributions:
            return _redistribute_then_dispatch(template, func, args, kwargs, tensors)
        if template.functional_op is not None:
            return _dispatch_functional_variant(func, template, args, kwargs)
        if len(template.mutates) > 1:
            functional_views.check_disjoint([tensors[at] for at in template.mutates], template.name)
        if template.seeded:
            floats.append(float(torch.randint(_NUM_SEEDS, (), device="cpu")))
    numbers[0] = template.number
    # In inference mode too, a view of a tensor that autograd may track is a tensor that it may track.
    leave_inference_mode = template.is_view and _is_inference() and not tensors[0].is_inference()
    results: list[Any] = []
    for output in template.outputs:
        if output.__class__ is int:
            results.append(tensors[output])
        elif output is None:
            results.append(None)
        else:
            handle = engine.new_handle()
            numbers.append(handle.id)
            with torch.inference_mode(False) if leave_inference_mode else contextlib.nullcontext():
                results.append(wrap_handle(output, handle))  # type: ignore[arg-type]
    if floats:
        numbers += floats
    bumps_version = any(tensors[at]._handle.version_counter is not None for at in template.mutates)
    with defer_sigint() if bumps_version else _NULL_CONTEXT:
        engine.emit(numbers, capture_call_site())
        if template.is_view:
            _track_views(results, tensors[0], func, args, kwargs, shares_storage=template.shares_storage)
        for at in template.mutates:
            _after_mutation(tensors[at])
    if template.returns == "one":
        return results[0]
    if template.returns == "none":
        return None
    return results if template.returns == "list" else tuple(results)


def call_rank_function(function: Callable[..., Any], engine: TensorEngine, *args: Any) -> Any:
    """Run a Meshbook function (`rank.tensors.operators`) as an operation.

    Its arguments must be hashable, or RemoteTensors; `operators.MESH` stands for the mesh.
    """
    tensors = [arg for arg in args if isinstance(arg, MeshTensor)]
    key = (function, *(arg._spec if isinstance(arg, MeshTensor) else arg for arg in args))
    template = engine.templates.find_or_plan(key, engine.planner.plan, function, args, {}, tensors)
    numbers = [0, *(tensor._handle.id for tensor in tensors)]
    return execute_template(engine, template, function, args, {}, numbers, tensors, [])


@_disable_current_modes()
def new_seed() -> float:
    """Draw a seed for random numbers on the ranks from this process's generator."""
    return float(torch.randint(_NUM_SEEDS, (), device="cpu"))


def _track_views(results: list[Any], base: Any, func: Any, args: Any, kwargs: Any, *, shares_storage: bool) -> None:
    """Link views to their base tensor."""
    if base._handle.is_functional_view or not shares_storage:
        run_op = dispatch if isinstance(func, torch._ops.OpOverload) else _rerun_rank_function
        base_alias = wrap_handle(base._spec, base._handle)
        functional_views.track_views(
            results, base, base_alias, func, args, kwargs, shares_storage=shares_storage, run_op=run_op
        )
    else:
        for result in results:
            result._handle.version_counter = base._handle.get_version_counter()


def _after_mutation(tensor: Any) -> None:
    """Record that an operation which changes this tensor in place has been issued."""
    handle = tensor._handle
    version_counter = handle.version_counter
    if version_counter is not None:
        version_counter[0] += 1
        if handle.is_functional_view:
            functional_views.write_back(tensor, _redistribute)


def _redistribute(tensor: Any, placements: tuple[Any, ...]) -> Any:
    """Redistribute a tensor, to Partial placements too."""
    current = tensor._spec.placements or ()
    reduced = tuple(
        Replicate() if after.is_partial() and before != after else after
        for before, after in zip(current, placements, strict=True)
    )
    if reduced != placements:
        if reduced != current:
            tensor = call_rank_function(operators.redistribute, tensor.engine, tensor, reduced)
        return call_rank_function(operators.to_partial, tensor.engine, tensor, operators.MESH, placements)
    return call_rank_function(operators.redistribute, tensor.engine, tensor, placements)


def _rerun_rank_function(func: Any, args: Any, kwargs: Any) -> Any:
    return call_rank_function(func, next(arg for arg in args if isinstance(arg, MeshTensor)).engine, *args)


def _redistribute_then_dispatch(template: Template, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
    moved = {id(tensors[at]): _redistribute(tensors[at], placements) for at, placements in template.redistributions}
    moved_args, moved_kwargs = pytree.tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs or {}))
    result = dispatch(func, moved_args, moved_kwargs)
    if makes_views(func):
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, MeshTensor)]
        for leaf in results:
            leaf._handle.spec = leaf.engine.specs.as_copied_view(leaf._spec)
        _track_views(results, tensors[0], func, args, kwargs, shares_storage=False)
    return result


def _dispatch_functional_variant(func: Any, template: Template, args: Any, kwargs: Any) -> Any:
    # In-place operations have defaults for arguments that their out-of-place variants may require.
    arguments = zip(
        func._schema.arguments[len(args) :], template.functional_op._schema.arguments[len(args) :], strict=False
    )
    defaults = {
        other.name: own.default_value
        for own, other in arguments
        if own.has_default_value() and not other.has_default_value()
    }
    kwargs = {**defaults, **(kwargs or {})}
    targets = pytree.tree_leaves([kwargs.pop(name) for name in out_names(func)]) or [args[0]]
    made = dispatch(template.functional_op, args, kwargs)
    results = made if isinstance(made, (tuple, list)) else [made]
    changed = [_overwrite(target, result, func) for target, result in zip(targets, results, strict=True)]
    if not func._schema.returns:  # torch's own in-place operations return; custom ones may not
        return None
    return changed[0] if len(changed) == 1 else tuple(changed)


def _overwrite(target: Any, result: Any, func: Any) -> Any:
    if not torch.can_cast(result._spec.dtype, target._spec.dtype):
        raise RuntimeError(f"result type {result._spec.dtype} cannot be kept in a tensor of {target._spec.dtype}")
    if result._spec.shape != target._spec.shape and out_names(func):
        raise RuntimeError(
            f"out= has shape {tuple(target._spec.shape)}, and the result {tuple(result._spec.shape)}; a tensor on a "
            "mesh is not made larger or smaller: give one of that shape, or leave out= out"
        )
    if result._spec.placements != target._spec.placements:
        result = result.to(target._spec.dtype)  # bool cannot be a partial sum
        result = _redistribute(result, target._spec.placements)
    return dispatch(aten.copy_.default, (target, result), None)


# ---------------------------------------------------------------------------------------------------------------------
# Operands of other kinds


def _upload_local_operands(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments with local tensors uploaded, each replicated on every rank."""
    kwargs = kwargs or {}
    remote = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, MeshTensor)]
    engine = remote[0].engine
    placements = None
    if any(tensor._spec.placements is not None for tensor in remote):
        placements = (Replicate(),) * engine.planner.mesh_ndim
    if any(map(_is_local, written_leaves(func, args, kwargs))):
        raise TypeError(
            f"{func} would write what lies on a mesh into a local tensor; bring it here first: x.full_tensor(). If "
            "out= is on the mesh, torch makes a local one on the way: leave out= out"
        )
    uploaded_scalars: dict[Any, Any] = {}  # a fused optimizer passes an equal one for each parameter

    def send(leaf: Any) -> Any:
        if not _is_local(leaf):
            return leaf
        if leaf.is_meta:
            raise ValueError(f"{func}: the local operand of shape {tuple(leaf.shape)} is on meta, without data to send")
        size = leaf.numel() * leaf.element_size()
        if size > MAX_INLINE_OPERAND_BYTES:
            raise ValueError(
                f"{func}: the local operand of shape {tuple(leaf.shape)} has {size:,} bytes, and only up to "
                f"{MAX_INLINE_OPERAND_BYTES:,} are sent along with an operation; place it on the mesh once, "
                "meshbook.distribute(t, mesh, sharding_spec=[...]), and use that"
            )
        if leaf.numel() != 1 or not leaf.is_floating_point():
            return upload(engine, leaf, placements)
        key = leaf.dtype, leaf.shape, leaf.item()
        if key not in uploaded_scalars:
            uploaded_scalars[key] = upload(engine, leaf, placements)
        return uploaded_scalars[key]

    return pytree.tree_map(send, (args, kwargs))


def _is_local(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, MeshTensor)


def upload(engine: TensorEngine, tensor: torch.Tensor, placements: tuple[Any, ...] | None) -> Any:
    """Upload a local tensor to the mesh. Does not wait for the ranks.

    Raises:
        ValueError: it is sparse or nested.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        raise ValueError(
            f"a {kind} tensor cannot be on a mesh as a remote tensor; "
            f"{'x.to_padded_tensor(0.0)' if tensor.is_nested else 'x.to_dense()'} can, and mesh.push(x=x) gives each "
            "rank a copy, for cells and mesh.execute"
        )
    return wrap_handle(engine.specs.intern(tensor.shape, tensor.dtype, placements), engine.upload(tensor, placements))


def upload_grad(spec: TensorSpec, grad: torch.Tensor) -> Any:
    """Upload a local gradient with the placements of this spec; Partial becomes replicated. Does not wait."""
    placements = spec.placements
    if placements is not None:
        placements = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    return upload(spec.engine, grad.detach(), placements)


def dispatch_without_override(func: Any, args: Any, kwargs: Any, *, floats_in_key: bool = False) -> Any:
    """Run `dispatch` for an operation that has an override.

    Args:
        floats_in_key: its floats determine how the result is placed or computed later, and so belong to the key.
    """
    leaves = _flat_operands(args, kwargs)
    if any(map(_is_local, leaves)):
        args, kwargs = _upload_local_operands(func, args, kwargs)
        leaves = _flat_operands(args, kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
    floats = [leaf for leaf in leaves if leaf.__class__ is float]
    engine = tensors[0].engine
    key = (
        func,
        _default_dtype(),
        len(args),
        *kwargs,
        *(
            leaf._spec
            if isinstance(leaf, MeshTensor)
            else float
            if leaf.__class__ is float and not floats_in_key
            else (leaf.__class__, leaf)
            for leaf in leaves
        ),
    )
    template = engine.templates.find_or_plan(key, engine.planner.plan, func, args, kwargs, tensors)
    numbers = [0, *(tensor._handle.id for tensor in tensors)]
    return execute_template(engine, template, func, args, kwargs, numbers, tensors, floats)


def _flat_operands(args: Any, kwargs: Any) -> list[Any]:
    """Return the operands of an operator, with its list arguments flattened; lists are never nested."""
    found: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if arg.__class__ is list or arg.__class__ is tuple:
            found += arg
        else:
            found.append(arg)
    return found
