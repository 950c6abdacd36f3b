"""`RemoteTensor`: a torch.Tensor whose shape is in this process and whose data is on the ranks.

Autograd, modules and optimizers of torch run here unchanged; each of their operations is sent to the ranks without
waiting. `torch_dispatch` receives them and is the hot path: it looks the operation up by its identity and its operands'
specs (`plan` plans it once), assigns ids to the results, and passes numbers to the engine. Floats travel with the
operation and are not part of the key, or every step's bias correction would need a new plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.controller.mesh import Mesh
from meshbook.controller.sigint import defer_sigint
from meshbook.rank.tensors import operators
from meshbook.tensors import functional_views, values, views
from meshbook.tensors.engine import TensorEngine, TensorHandle, capture_call_site
from meshbook.tensors.plan import Template, TensorSpec, contiguous_strides

aten = torch.ops.aten

# Maximum size of a local tensor among the operands that is sent along; larger ones are better sent once.
MAX_INLINE_OPERAND_BYTES = 1 << 20

_make_wrapper = torch.Tensor._make_wrapper_subclass
_is_inference = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype  # the result dtype of operations on integers and of factories
# Seeds travel as floats, which represent them exactly.
_NUM_SEEDS = 1 << 52
_NULL_CONTEXT = contextlib.nullcontext()


class RemoteTensor(torch.Tensor):
    """A tensor on a mesh: one global tensor with `placements`, or one tensor per rank (`placements` is None).

    Its operations are torch's own. Those that need values wait for the ranks: `item()`, `tolist()`, `print`, `bool()`,
    `full_tensor()`, `local(rank)`; all others return at once.
    """

    _handle: TensorHandle
    _spec: TensorSpec = property(attrgetter("_handle.spec"))  # type: ignore[assignment]
    _keep_alive: Any  # objects that must live as long
    _meshbook_is_tensor = True  # operators of remote handles (`controller.remote`) defer to it

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, spec: TensorSpec, handle: TensorHandle, requires_grad: bool = False) -> RemoteTensor:
        return wrap_handle(spec, handle, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # ---- location

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """torch's placements, one per axis of the mesh; None: every rank has a tensor of its own."""
        return self._spec.placements

    @property
    def mesh(self) -> Mesh:
        """The mesh whose ranks hold the data."""
        engine = self._spec.engine
        return Mesh.of(engine.session, engine.axes)

    @property
    def engine(self) -> TensorEngine:
        """The engine that sends its operations."""
        found: TensorEngine = self._spec.engine
        return found

    # ---- values

    def full_tensor(self, *, force: bool = False) -> torch.Tensor:
        """Return the complete tensor as a local one. Blocks.

        Returns:
            CPU tensor of `self.shape`, without autograd history. Partial placements are reduced first. Of the per-rank
            view: the ranks' tensors stacked along a new first dim, in the mesh's order.

        Args:
            force: fetch it even if it is larger than 1 GiB.

        Raises:
            MemoryError: it is larger than 1 GiB, and `force` was not given.
            OperationFailed: it could not be computed.
            RankLost: a rank that held a part has exited.
        """
        return values.full_tensor(self, force=force)

    def local(self, rank: int) -> torch.Tensor:
        """Return one rank's local tensor unchanged: a shard, a replica, or an unreduced partial value. Blocks.

        Args:
            rank: global rank.

        Raises:
            MeshShapeError: the rank is not in this tensor's mesh.
        """
        return values.local(self, rank)

    def tolist(self) -> Any:
        """Return its values as (nested) lists. Blocks."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the complete tensor as a local array. Blocks."""
        return self.full_tensor().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        return numpy.asarray(self.full_tensor().numpy(), dtype=dtype)

    # ---- other placements, other views

    def redistribute(self, placements: Sequence[Any] | None = None, *, sharding_spec: Any = None) -> RemoteTensor:
        """Return the same values with other placements. Does not wait. Differentiable.

        Args:
            placements: torch's, one per axis of the mesh.
            sharding_spec: or, per tensor dim, the axis (or axes) that shards it: `["dp", None]`.
        """
        return views.redistribute(self, placements, sharding_spec)

    def as_global(self, placements: Sequence[Any]) -> RemoteTensor:
        """View the ranks' own tensors as shards of one global tensor, with the same storage. Does not wait."""
        return views.as_global(self, placements)

    def as_local(self) -> RemoteTensor:
        """View each rank's shard as a tensor of its own, with the same storage. Does not wait."""
        return views.as_local(self)

    def reduce(self, axis: str, op: str = "sum") -> RemoteTensor:
        """Reduce per-rank tensors over an axis: every rank along it gets the result. Does not wait.

        Args:
            op: "sum", "avg", "max", "min" or "product".
        """
        return views.reduce(self, axis, op)

    def slice_mesh(self, **which: int) -> RemoteTensor:
        """Return on every rank the tensor at these coordinates: `t.slice_mesh(dp=0)`. Per-rank view. Does not wait."""
        return views.slice_mesh(self, which)

    # ---- torch's own names

    def requires_grad_(self, requires_grad: bool = True) -> RemoteTensor:
        """Like torch's. A leaf's gradient is redistributed to the leaf's placements once, as soon as it exists.

        Otherwise every operation of an optimizer would reduce a partial sum again.
        """
        super().requires_grad_(requires_grad)
        if requires_grad and self._spec.placements is not None and not getattr(self, "_has_grad_hook", False):
            self._has_grad_hook = True
            self.register_post_accumulate_grad_hook(redistribute_grad)  # type: ignore[no-untyped-call]
        return self

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Like torch's. A local gradient is sharded like this tensor."""
        if gradient is not None and not isinstance(gradient, RemoteTensor) and gradient.shape == self.shape:
            gradient = self._upload_grad(self._spec, gradient)
        super().backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]

    @staticmethod
    def _upload_grad(spec: TensorSpec, grad: torch.Tensor) -> RemoteTensor:
        """Upload a local gradient with the placements of this spec; Partial becomes replicated. Does not wait."""
        placements = spec.placements
        if placements is not None:
            placements = tuple(
                torch.distributed.tensor.Replicate() if placement.is_partial() else placement
                for placement in placements
            )
        return upload(spec.engine, grad.detach(), placements)

    @property
    def data(self) -> RemoteTensor:
        """The same tensor without autograd; assigning makes this tensor use the storage of the other."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RemoteTensor):
            raise TypeError(
                "the data of a remote tensor must be a remote tensor; meshbook.distribute(local, mesh, ...) makes one, "
                "and x.copy_(local) changes the numbers only"
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._handle = other._handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return values.format_repr(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(str(self), spec)

    def share_memory_(self) -> NoReturn:  # torch's own would access memory that is not here, and crash the process
        raise NotImplementedError("a remote tensor has no memory here to share; take x.full_tensor() first")

    def is_shared(self) -> bool:
        return False

    def _repr_html_(self) -> str:
        """Show which rank holds which part, in colours. Needs no data and does not wait."""
        from meshbook.tensors.display import html_of

        return html_of(self._spec.shape, self._spec.dtype, self._spec.placements, self.engine.axes)

    def stats(self) -> Any:
        """Return minimum, maximum, mean and the number of NaN, computed on the ranks. Blocks."""
        from meshbook.tensors.display import stats

        return stats(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        if id(self) in memo:
            found: RemoteTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("only tensors that autograd did not compute can be copied deeply; detach() it first")
        with defer_sigint(), torch.no_grad():
            copied: Any = self.detach().clone()
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        values.refuse_pickling(self)

    def _call_rank_function(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a Meshbook function (`rank.tensors.operators`) as an operation, below autograd."""
        return call_rank_function(function, self._spec.engine, *args)

    def _meshbook_key(self, session: Any) -> str:
        """Return the key by which ranks find this tensor among the objects that are sent to them."""
        return values.key_of(self, session)


def redistribute_grad(leaf: Any) -> None:
    """Bring a gradient to its tensor's placements once; otherwise every operation of an optimizer would do so."""
    grad = leaf.grad
    if isinstance(grad, torch.Tensor) and not isinstance(grad, RemoteTensor):
        leaf.grad = leaf._upload_grad(leaf._spec, grad)  # autograd received a local gradient
        return
    if grad is None or grad._spec.placements is None:
        return
    spec, placements = grad._spec, leaf._spec.placements
    if grad.requires_grad:  # create_graph=True: it may be differentiated again
        leaf.grad = views.redistribute_to(grad, placements)
        return
    engine = spec.engine
    key = (redistribute_grad, spec, leaf._spec)  # specs, as hash and equality of placements run in Python
    template = engine.cache.get(key)
    if template is None:
        if spec.placements == placements:
            return
        template = engine.plan_and_cache(
            key, engine.planner.plan, operators.redistribute, (grad, placements), {}, [grad]
        )
    leaf.grad = execute_template(
        engine, template, operators.redistribute, (grad, placements), {}, [0, grad._handle.id], [grad], []
    )


def wrap_handle(spec: TensorSpec, handle: TensorHandle, requires_grad: bool = False) -> RemoteTensor:
    """Return a tensor for a handle."""
    tensor: RemoteTensor = _make_wrapper(*(spec.wrapper_args or _wrapper_args_of(spec)))
    handle.spec = spec
    tensor._handle = handle
    if requires_grad:
        torch.Tensor.requires_grad_(tensor)
    return tensor


def _wrapper_args_of(spec: TensorSpec) -> tuple[Any, ...]:
    """Return the arguments of `_make_wrapper`: positional, because keywords cost a third more.

    Contiguous strides are left out, because torch then reads the arguments a third faster.
    """
    is_contiguous = spec.offset == 0 and spec.stride == contiguous_strides(spec.shape)
    layout_args = (None, None) if is_contiguous else (spec.stride, spec.offset)
    spec.wrapper_args = (RemoteTensor, spec.shape, *layout_args, None, spec.dtype, torch.strided, spec.device)
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
    tensors: list[RemoteTensor] = []
    floats: list[float] = []
    has_local_operands = False
    for arg in args if not kwargs else (*args, *itertools.chain.from_iterable(kwargs.items())):
        kind = arg.__class__
        if kind is RemoteTensor:
            handle = arg._handle
            key.append(handle.spec)
            numbers.append(handle.id)
            tensors.append(arg)
        elif kind is int or arg is None:
            key.append(arg)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            for item in arg:
                kind = item.__class__
                if kind is int or item is None:
                    key.append(item)
                elif kind is RemoteTensor:
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
        elif kind is float:
            key.append(float)
            floats.append(arg)
        elif isinstance(arg, torch.Tensor):
            has_local_operands = True
        else:  # with its class, because True equals 1
            key.append(kind)
            key.append(arg)
    if has_local_operands:
        args, kwargs = _upload_local_operands(func, args, kwargs or {})
        return torch_dispatch(func, types, args, kwargs)
    engine: TensorEngine = tensors[0]._handle.spec.engine
    cache_key = tuple(key)
    template = engine.cache.get(cache_key)
    if template is None:
        template = engine.plan_and_cache(cache_key, engine.planner.plan, func, args, kwargs or {}, tensors)
    spec = template.fast_path_output
    if spec is None or (template.is_view and _is_inference()):
        return execute_template(engine, template, func, args, kwargs, numbers, tensors, floats)
    # Like `execute_template`, for the common case: one new tensor, and the fast path.
    result = _make_wrapper(*(spec.wrapper_args or _wrapper_args_of(spec)))
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


RemoteTensor.__torch_dispatch__ = staticmethod(torch_dispatch)


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
    tensors: Sequence[RemoteTensor],
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
            _track_views(template, results, func, args, kwargs, tensors)
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
    tensors = [arg for arg in args if isinstance(arg, RemoteTensor)]
    key = (function, *(arg._spec if isinstance(arg, RemoteTensor) else arg for arg in args))
    template = engine.cache.get(key)
    if template is None:
        template = engine.plan_and_cache(key, engine.planner.plan, function, args, {}, tensors)
    numbers = [0, *(tensor._handle.id for tensor in tensors)]
    return execute_template(engine, template, function, args, {}, numbers, tensors, [])


@_disable_current_modes()
def new_seed() -> float:
    """Draw a seed for random numbers on the ranks from this process's generator."""
    return float(torch.randint(_NUM_SEEDS, (), device="cpu"))


def _track_views(
    template: Template, results: list[Any], func: Any, args: Any, kwargs: Any, tensors: Sequence[RemoteTensor]
) -> None:
    """Link views to their base tensor."""
    base = tensors[0]
    if base._handle.is_functional_view or not template.shares_storage:
        run_op = dispatch if isinstance(func, torch._ops.OpOverload) else _rerun_rank_function
        base_alias = wrap_handle(base._spec, base._handle)
        functional_views.track_views(
            results, base, base_alias, func, args, kwargs, shares_storage=template.shares_storage, run_op=run_op
        )
    else:
        for result in results:
            result._handle.version_counter = base._handle.get_version_counter()


def _after_mutation(tensor: RemoteTensor) -> None:
    """Record that an operation which changes this tensor in place has been issued."""
    handle = tensor._handle
    version_counter = handle.version_counter
    if version_counter is not None:
        version_counter[0] += 1
        if handle.is_functional_view:
            functional_views.write_back(tensor, _redistribute)


def _redistribute(tensor: RemoteTensor, placements: tuple[Any, ...]) -> Any:
    """Redistribute a tensor, to Partial placements too."""
    current = tensor._spec.placements or ()
    reduced = tuple(
        torch.distributed.tensor.Replicate() if after.is_partial() and before != after else after
        for before, after in zip(current, placements, strict=True)
    )
    if reduced != placements:
        if reduced != current:
            tensor = call_rank_function(operators.redistribute, tensor.engine, tensor, reduced)
        return call_rank_function(operators.to_partial, tensor.engine, tensor, operators.MESH, placements)
    return call_rank_function(operators.redistribute, tensor.engine, tensor, placements)


def _rerun_rank_function(func: Any, args: Any, kwargs: Any) -> Any:
    return call_rank_function(func, next(arg for arg in args if isinstance(arg, RemoteTensor)).engine, *args)


def _redistribute_then_dispatch(
    template: Template, func: Any, args: Any, kwargs: Any, tensors: Sequence[RemoteTensor]
) -> Any:
    moved = {id(tensors[at]): _redistribute(tensors[at], placements) for at, placements in template.redistributions}
    moved_args, moved_kwargs = pytree.tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs or {}))
    result = dispatch(func, moved_args, moved_kwargs)
    schema = getattr(func, "_schema", None)
    if schema is not None and not schema.is_mutable and any(output.alias_info is not None for output in schema.returns):
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, RemoteTensor)]
        for leaf in results:
            leaf._handle.spec = leaf.engine.planner.as_copied_view(leaf._spec)
        base = tensors[0]
        functional_views.track_views(
            results,
            base,
            wrap_handle(base._spec, base._handle),
            func,
            args,
            kwargs,
            shares_storage=False,
            run_op=dispatch,
        )
    return result


def _dispatch_functional_variant(func: Any, template: Template, args: Any, kwargs: Any) -> Any:
    target = args[0]
    # In-place operations have defaults for arguments that their out-of-place variants may require.
    arguments = zip(
        func._schema.arguments[len(args) :], template.functional_op._schema.arguments[len(args) :], strict=False
    )
    defaults = {
        other.name: own.default_value
        for own, other in arguments
        if own.has_default_value() and not other.has_default_value()
    }
    result = dispatch(template.functional_op, args, {**defaults, **(kwargs or {})})
    if not torch.can_cast(result._spec.dtype, target._spec.dtype):
        raise RuntimeError(f"result type {result._spec.dtype} cannot be kept in a tensor of {target._spec.dtype}")
    if result._spec.placements != target._spec.placements:
        result = result.to(target._spec.dtype)  # bool cannot be a partial sum
        result = _redistribute(result, target._spec.placements)
    changed = dispatch(aten.copy_.default, (target, result), None)
    return changed if func._schema.returns else None  # torch's own in-place operators return; custom ones may not


# ---------------------------------------------------------------------------------------------------------------------
# Operands of other kinds


def _upload_local_operands(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments with local tensors uploaded, each replicated on every rank."""
    remote = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RemoteTensor)]
    engine = remote[0].engine
    placements = None
    if any(tensor._spec.placements is not None for tensor in remote):
        placements = (torch.distributed.tensor.Replicate(),) * engine.planner.mesh.ndim
    schema = func._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor):
                    raise TypeError(
                        f"{func} would write what lies on a mesh into a local tensor; bring it here first: "
                        "x.full_tensor()"
                    )

    uploaded_scalars: dict[Any, RemoteTensor] = {}  # a fused optimizer passes an equal one for each parameter

    def send(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, RemoteTensor):
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


def upload(engine: TensorEngine, tensor: torch.Tensor, placements: tuple[Any, ...] | None) -> RemoteTensor:
    """Upload a local tensor to the mesh. Does not wait for the ranks."""
    return wrap_handle(engine.planner.contiguous_spec(tensor, placements), engine.upload(tensor, placements))


# ---------------------------------------------------------------------------------------------------------------------
# Operations with an override


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    """Return another Python object for the same tensor: the ranks have nothing to do."""
    tensor = args[0]
    return wrap_handle(tensor._spec, tensor._handle)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    return values.item(args[0])


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Fetch for a copy_ into a local tensor; send an operation for one into a remote tensor."""
    target, source = args[0], args[1]
    if isinstance(target, RemoteTensor):
        if not isinstance(source, RemoteTensor) and source.numel() * source.element_size() > MAX_INLINE_OPERAND_BYTES:
            if source.shape != target.shape or target._spec.placements is None:
                source = source.to(target.dtype).expand(target.shape)
            placements = target._spec.placements
            source = upload(target.engine, source.contiguous(), placements)
            args = (target, source, *args[2:])
        return dispatch_without_override(func, args, kwargs)
    target.copy_(source.full_tensor())
    return target


def _dispatch_floats_in_key(func: Any, args: Any, kwargs: Any) -> Any:
    return dispatch_without_override(func, args, kwargs, floats_in_key=True)


def dispatch_without_override(func: Any, args: Any, kwargs: Any, *, floats_in_key: bool = False) -> Any:
    """Run `dispatch` for an operation that has an override.

    Args:
        floats_in_key: its floats determine how the result is placed or computed later, and so belong to the key.
    """
    leaves = _flat_operands(args, kwargs)
    if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor) for leaf in leaves):
        args, kwargs = _upload_local_operands(func, args, kwargs)
        leaves = _flat_operands(args, kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, RemoteTensor)]
    floats = [leaf for leaf in leaves if leaf.__class__ is float]
    engine = tensors[0].engine
    key = (
        func,
        _default_dtype(),
        len(args),
        *kwargs,
        *(
            leaf._spec
            if isinstance(leaf, RemoteTensor)
            else float
            if leaf.__class__ is float and not floats_in_key
            else (leaf.__class__, leaf)
            for leaf in leaves
        ),
    )
    template = engine.cache.get(key)
    if template is None:
        template = engine.plan_and_cache(key, engine.planner.plan, func, args, kwargs, tensors)
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


Override = Callable[[Any, Any, Any], Any]  # (operation, args, kwargs) -> result

# Overrides of operations that are not sent unchanged, by the operator's id.
OVERRIDES_BY_ID: dict[int, Override] = {}


def register_overrides(table: dict[Any, Override]) -> None:
    """Register functions that run these operations."""
    OVERRIDES_BY_ID.update({id(operator): function for operator, function in table.items()})


register_overrides(
    {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.lift_fresh.default: _alias,
        aten._local_scalar_dense.default: _item,
        aten.item.default: _item,
        aten.copy_.default: _copy,
        # The norm's order determines the placement of partial results, and how they are reduced later.
        aten.linalg_vector_norm.default: _dispatch_floats_in_key,
        aten._foreach_norm.Scalar: _dispatch_floats_in_key,
    }
)
