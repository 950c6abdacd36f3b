"""Plans an operation on remote tensors, once for each kind of operands and without the ranks.

The operation runs on DTensors that have shapes and no data, on a fake mesh of the same size whose groups transfer
nothing. This yields shape, stride, dtype and placements of the results, and raises errors about shapes or placements
here, at the user's line. The result is a `Template`, which equal operations find by a dictionary look-up.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _tp_conv
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshbook.errors import PlacementError
from meshbook.mesh_axes import MeshAxes
from meshbook.placement import Shard as Cut
from meshbook.placement import local_spans
from meshbook.rank.tensors import dtensor_patches
from meshbook.rank.tensors.operators import (
    FLOAT,
    MESH,
    TENSOR,
    ReducedOp,
    ReplicatedOp,
    TemplateMessage,
    as_global,
    as_local,
    may_stay_partial,
    name_of,
    overwrites,
)

aten = torch.ops.aten

_group_numbers = itertools.count()

# Operations that DTensor computes shard by shard although an element depends on other shards.
_SCANS = {
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    aten.flip.default, aten.roll.default, aten.median.dim,
    aten.kthvalue.default, aten.mode.default, aten.renorm.default,
}  # fmt: skip


# Indices of elements: of equal elements DTensor returns the first rank's, and it fails where shards differ in length.
_INDEX_REDUCTIONS = {aten.argmax.default, aten.argmin.default}

# Operations that DTensor applies to each term of a partial sum or product, as if a nonzero term made the sum nonzero.
_LOGICAL_REDUCTIONS = {aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims}

# torch's errors that Meshbook restates in terms of the mesh.
_UNEVEN_ERROR = re.compile(
    r"output dimension (?P<dim>\d+) \(size (?P<length>\d+)\) is not evenly divisible by mesh dimension (?P<axis>\d+)"
)
_SHARDED_DIM_ERROR = re.compile(
    r"along the sharded dimension|without redistribution, which is disallowed|redistribute the tensor before"
)

# Operations that return other tensors on some machines than here, and those that depend on the memory layout.
_NEVER_REPLICATED = {aten.mkldnn_rnn_layer.default, aten.as_strided.default}

# Operations whose DTensor rules fail where a dim has length 0: those of a view search endlessly for a divisor of it,
# and those of a squeeze drop the dim.
_FAILS_ON_EMPTY = {
    aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip

# Operations whose output shape torch cannot derive without data, and the index of the argument that has that shape.
_SHAPE_OF_INPUT = {
    aten.multi_margin_loss_backward.default: 1, aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1, aten._sample_dirichlet.default: 0, aten._dirichlet_grad.default: 0,
    aten._standard_gamma.default: 0, aten._standard_gamma_grad.default: 1, aten.binomial.default: 0,
    aten.poisson.default: 0,
}  # fmt: skip

# Reductions, and the index of their dims argument. No dims means all dims; DTensor leaves some of them unreduced then.
_REDUCTION_DIM_ARG = {
    aten.sum.dim_IntList: 1, aten.nansum.default: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1,
    aten.logsumexp.default: 1, aten.count_nonzero.dim_IntList: 1, aten.var.correction: 1, aten.std.correction: 1,
    aten.var_mean.correction: 1, aten.std_mean.correction: 1, aten.linalg_vector_norm.default: 2,
    aten.norm.ScalarOpt_dim: 2, aten.norm.ScalarOpt_dim_dtype: 2,
}  # fmt: skip

# Names of operations that may be applied to each term of a partial sum separately.
_LINEAR_OPS = ("mul", "div", "neg", "positive", "clone", "_to_copy", "to", "copy", "zero", "conj", "_conj_physical")

# Operations that are correct on empty shards too, besides pointwise ones.
_SAFE_ON_EMPTY_SHARDS = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.sum.default, aten.sum.dim_IntList, aten.clone.default,
    aten._to_copy.default, aten.copy_.default, aten.fill_.Scalar, aten.zero_.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.detach.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip

# Operations that DTensor computes with shards of one operand and all of the other.
_NEEDS_EQUAL_PLACEMENTS = {aten.linalg_solve_triangular.default}

# Convolutions, and the index of the image among their tensors; the weight is the next.
_CONVOLUTION_INPUT_ARG = {aten.convolution.default: 0, aten.convolution_backward.default: 1}


class TensorSpec:
    """Everything about a tensor but its data. Interned: equal specs of an engine are one object.

    Attributes:
        shape, stride, offset: of the global tensor; of each rank's own where `placements` is None.
        placements: torch's, one per axis of the mesh; None: the per-rank view.
        is_copied_view: a view that shares no storage, because DTensor had to copy.
        engine: the engine that the tensor belongs to.
        wrapper_args: arguments that create a tensor of this spec in torch; None until the first one.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "engine",
        "is_copied_view",
        "offset",
        "placements",
        "shape",
        "stride",
        "wrapper_args",
    )  # fmt: skip

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    placements: tuple[Any, ...] | None
    is_copied_view: bool
    engine: Any
    device: torch.device
    wrapper_args: tuple[Any, ...] | None

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {format_placements(self.placements)}"


@dataclass(slots=True)
class Template:
    """The plan of a kind of operation.

    Attributes:
        number: its number on the ranks.
        single_output: the one new tensor, where that is the complete result; the common case.
        outputs: for each result a TensorSpec (new), the index of an input (changed in place), or None.
        returns: "none", "one", "list", "tuple".
        redistributions: placements that inputs must be brought to first, by index; empty if none.
        mutates: indices of inputs that are changed.
        is_view: results are views of the first input.
        shares_storage: ... and share its storage.
        functional_op: the out-of-place operation whose result is copied into the first input, where DTensor would
            change only a part of it.
        seeded: draws random numbers; its last float is the seed.
        body: the pickled message to the ranks.
        overwrites: replaces the complete contents of what it changes.
    """

    number: int
    single_output: TensorSpec | None
    outputs: tuple[TensorSpec | int | None, ...]
    returns: str
    redistributions: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    mutates: tuple[int, ...] = ()
    functional_op: Any = None
    seeded: bool = False
    is_view: bool = False
    shares_storage: bool = False
    needs_slow_path: bool = False  # any of the above
    fast_path_output: TensorSpec | None = field(init=False)  # `single_output`, unless the slow path is needed
    communicates: bool = False
    body: bytes = b""
    name: str = ""
    overwrites: bool = False

    def __post_init__(self) -> None:
        self.fast_path_output = None if self.needs_slow_path else self.single_output


class Planner:
    """Plans operations for one mesh. As thread-safe as the interpreter: two threads may plan the same operation."""

    def __init__(self, axes: MeshAxes, engine: Any) -> None:
        dtensor_patches.install()
        self.axes, self.engine = axes, engine
        self.device = torch.device("cpu")  # what wrappers report; torch would look for the backend of any other
        self.mesh = _fake_device_mesh(axes)
        self._specs: weakref.WeakValueDictionary[Any, TensorSpec] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)  # 0 frees ids

    def spec(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        placements: Any,
        is_copied_view: bool = False,
    ) -> TensorSpec:
        """Return the interned spec of these values."""
        key = (tuple(shape), tuple(stride), offset, dtype, placements, is_copied_view)
        found = self._specs.get(key)
        if found is None:
            found = TensorSpec()
            found.shape, found.stride, found.offset, found.dtype, found.placements, found.is_copied_view = key
            found.engine, found.device, found.wrapper_args = self.engine, self.device, None
            self._specs[key] = found
        return found

    def as_copied_view(self, spec: TensorSpec) -> TensorSpec:
        """Return the same spec for a view that is a copy."""
        return self.spec(spec.shape, spec.stride, spec.offset, spec.dtype, spec.placements, True)

    def contiguous_spec(self, tensor: torch.Tensor, placements: Any) -> TensorSpec:
        """Return the spec of a contiguous tensor with the shape and dtype of this local one."""
        return self.spec(tensor.shape, contiguous_strides(tensor.shape), 0, tensor.dtype, placements)

    def empty_tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor of this spec without data; a DTensor, unless the spec is per rank."""
        if spec.placements is None:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        local = local_shape(spec.shape, spec.placements, self.axes)
        strides = list(spec.stride) if local == tuple(spec.shape) else _dense_strides(local, spec)
        local_tensor = torch.empty_strided(local, strides, dtype=spec.dtype, device="meta")
        meta = TensorMeta(torch.Size(spec.shape), tuple(spec.stride), spec.dtype)
        dtensor_spec = DTensorSpec(self.mesh, spec.placements, tensor_meta=meta)
        return DTensor(local_tensor, dtensor_spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def plan(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        """Return the template of this operation.

        Args:
            args, kwargs: the operation's own, with RemoteTensors (anything with a `_spec`) for tensors.
            inputs: those tensors, in order.

        Raises:
            NotImplementedError: DTensor has no rule for it; the text names an alternative.
            RuntimeError and others: torch's own, about shapes and dtypes.
        """
        template = self._plan_op(function, args, kwargs, inputs)
        if template.redistributions and {at for at, _ in template.redistributions}.intersection(
            _mutated_inputs(function, args, kwargs, inputs)
        ):
            return _plan_functional_variant(function)  # a redistributed input is a copy
        return template

    def _plan_op(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        for tensor in inputs:
            if tensor._spec.engine is not self.engine:
                raise ValueError(
                    f"{name_of(function)} has operands of two meshes, {self.axes} and {tensor._spec.engine.axes}; "
                    "bring one over: meshbook.distribute(x.full_tensor(), mesh, ...)"
                )
        # A PlacementError, because Python takes a TypeError of an operator for "try the other operand".
        views = {tensor._spec.placements is None for tensor in inputs}
        if len(views) > 1:
            operands = ", ".join(repr(tensor._spec) for tensor in inputs[:4])
            raise PlacementError(
                f"{name_of(function)} has a per-rank tensor and a global one ({operands}); make them alike with "
                "t.as_global(placements) or t.as_local()"
            )
        if torch.Tag.inplace_view in getattr(function, "tags", ()) and function is not aten.detach_.default:
            raise NotImplementedError(
                f"{function._opname} changes the shape of a tensor in place, and its shape is here while its numbers "
                "are there; use the one that makes a view (without the trailing underscore), x = x.t(), or, where "
                "torch's own code does it, mesh.execute(fn, x) or x.full_tensor()"
            )
        moves_first = _op_specific_moves(function, args, inputs, self.mesh) or self._unsafe_input_moves(
            function, inputs
        )
        if moves_first:
            return Template(0, None, (), "none", redistributions=moves_first, needs_slow_path=True)
        if (
            function in _FAILS_ON_EMPTY
            and 0 in inputs[0]._spec.shape
            and (found := self._plan_replicated(function, args, kwargs, inputs))
        ):
            return found
        args = _expand_reduction_dims(function, args)
        empties: dict[int, Any] = {}

        def empty_of(leaf: Any) -> Any:
            spec = getattr(leaf, "_spec", None)
            if spec is not None:
                if id(leaf) not in empties:
                    empties[id(leaf)] = self.empty_tensor(spec)
                return empties[id(leaf)]
            if leaf is MESH:
                return self.mesh
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            if isinstance(leaf, torch.Generator):
                raise NotImplementedError(
                    f"{name_of(function)} with a generator of its own: ranks draw from the seed that torch.manual_seed "
                    "sets here; leave generator= out"
                )
            return leaf

        dtensor_patches.include_scalars_in_cache_key(function)
        observer = _OpObserver(function)
        try:
            # Dispatch modes of the user, such as `mesh.activate()`, must not see these operations.
            with _disable_current_modes(), torch.no_grad(), dtensor_patches.suppress_warnings(), _as_rank_0(), observer:
                empty_args, empty_kwargs = pytree.tree_map(empty_of, (args, kwargs))
                results = function(*empty_args, **empty_kwargs)
        except Exception as error:
            if "in-place operations that require placement changes" in str(error):
                return _plan_functional_variant(function)
            # _unsafe_view is internal to matmul: the user cannot act on an error about it.
            uneven = _UNEVEN_ERROR.search(str(error)) is not None and function is not aten._unsafe_view.default
            if (
                _SHARDED_DIM_ERROR.search(str(error)) is not None
                and not uneven
                and (moves := self._replicate_moves(inputs[:1]))
            ):
                return Template(0, None, (), "none", redistributions=moves, needs_slow_path=True)
            if _is_missing_rule_error(function, error) or (
                not uneven and _works_on_plain_tensors(function, args, kwargs)
            ):
                if (other := _functional_variant(function)) is not None:
                    return Template(0, None, (), "none", functional_op=other, needs_slow_path=True)
                if found := self._plan_replicated(function, args, kwargs, inputs):
                    return found
            raise self._translate_error(function, error, inputs) from None
        dtensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, DTensor)]
        unary = len(inputs) == 1 and torch.Tag.pointwise in getattr(function, "tags", ())
        linear = not unary or all(_is_linear(function, placement) for leaf in dtensors for placement in leaf.placements)
        trusted = linear and not self._has_wrong_dtype(function, args, kwargs, dtensors)
        if (
            moves := _reduce_partial_moves(inputs)
            if _loses_precision(inputs, dtensors)
            else ()
            if trusted
            else self._replicate_moves(inputs)
        ):
            return Template(0, None, (), "none", redistributions=moves, needs_slow_path=True)
        if isinstance(function, torch._ops.OpOverload) and any(
            not may_stay_partial(placement, leaf.dtype) for leaf in dtensors for placement in leaf.placements
        ):
            for placement in itertools.chain.from_iterable(leaf.placements for leaf in dtensors):
                if hasattr(placement, "mask_buffer"):  # DTensor shares it among all operations of this kind
                    placement.mask_buffer.release_mask()
            return self._plan_op(ReducedOp(function), args, kwargs, inputs)
        if observer.missed_mutation(
            [empties[id(inputs[at])] for at in _mutated_inputs(function, args, kwargs, inputs)]
        ):
            return _plan_functional_variant(function)
        return self._build_template(function, args, kwargs, inputs, empties, results, observer.communicates)

    def _plan_replicated(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Template | None:
        """Plan an operation that DTensor has no rule for: every rank runs it on replicated operands, if possible."""
        replicated = (Replicate(),) * self.mesh.ndim
        if not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable or not inputs:
            return None
        if function in _NEVER_REPLICATED:
            return None
        if any(tensor._spec.placements is None for tensor in inputs):
            return None
        empties = {
            id(tensor): self.empty_tensor(
                self.spec(tensor._spec.shape, tensor._spec.stride, 0, tensor._spec.dtype, replicated)
            )
            for tensor in inputs
        }
        replicated_op = ReplicatedOp(function)
        try:
            with _disable_current_modes(), torch.no_grad(), dtensor_patches.suppress_warnings():
                empty_operands = pytree.tree_map(lambda leaf: empties.get(id(leaf), leaf), (args, kwargs))
                shaped_as = _SHAPE_OF_INPUT.get(function)
                results = (
                    replicated_op(*empty_operands[0], **empty_operands[1])
                    if shaped_as is None
                    else torch.empty_like(empty_operands[0][shaped_as])
                )
        except Exception:
            return None
        if not all(isinstance(leaf, (DTensor, type(None))) for leaf in pytree.tree_leaves(results)):
            return None
        if moves := self._replicate_moves(inputs):
            return Template(0, None, (), "none", redistributions=moves, needs_slow_path=True)
        return self._build_template(replicated_op, args, kwargs, inputs, empties, results, communicates=False)

    def _replicate_moves(self, inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Return the redistributions that replicate those of these tensors that are not replicated."""
        replicated = (Replicate(),) * self.mesh.ndim
        return tuple((at, replicated) for at, tensor in enumerate(inputs) if tensor._spec.placements != replicated)

    def _unsafe_input_moves(self, function: Any, inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Return redistributions of inputs with whose placements DTensor computes wrongly, whatever the operation.

        These are Partial placements that may not stay, and shardings with empty shards: a rank with an empty shard
        raises what others do not, or skips a collective.
        """
        if not isinstance(function, torch._ops.OpOverload):
            return ()
        is_safe = (
            torch.Tag.pointwise in function.tags or function in _SAFE_ON_EMPTY_SHARDS or "foreach" in function._opname
        )
        moves: list[tuple[int, tuple[Any, ...]]] = []
        for at, tensor in enumerate(inputs):
            spec = tensor._spec
            placements = spec.placements
            if placements is None:
                continue
            empty_dims = (
                set() if is_safe else {dim for dim in range(len(spec.shape)) if self._has_empty_shard(spec, dim)}
            )
            required = tuple(
                Replicate()
                if not may_stay_partial(placement, spec.dtype)
                or (_is_sharded(placement) and placement.dim in empty_dims)
                else placement
                for placement in placements
            )
            if required != placements:
                moves.append((at, required))
        return tuple(moves)

    def _has_wrong_dtype(self, function: Any, args: Any, kwargs: Any, made: Sequence[Any]) -> bool:
        """Whether a Partial result of DTensor has another dtype than torch's result.

        DTensor divides integers beside a partial sum by the number of ranks.
        """
        partial_results = [leaf for leaf in made if any(placement.is_partial() for placement in leaf.placements)]
        if len(partial_results) != 1 or torch.Tag.pointwise not in getattr(function, "tags", ()):
            return False
        try:
            with _disable_current_modes(), torch.no_grad():
                expected = function(*(pytree.tree_map(_to_meta, args)), **pytree.tree_map(_to_meta, kwargs))
        except Exception:
            return False
        return isinstance(expected, torch.Tensor) and expected.dtype != partial_results[0].dtype

    def _has_empty_shard(self, spec: TensorSpec, dim: int) -> bool:
        """Whether some rank has an empty shard along this dim."""
        num_shards = 1
        for placement, size in zip(spec.placements or (), self.mesh.shape, strict=True):
            num_shards *= size if _is_sharded(placement) and placement.dim == dim else 1
        if num_shards == 1:
            return False
        last_shape = local_shape(spec.shape, spec.placements or (), self.axes, self.axes.size - 1)
        return last_shape[dim] == 0

    def _uneven_mean_moves(
        self, function: Any, inputs: Sequence[Any], placements: Sequence[Any]
    ) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Return redistributions that replicate inputs where DTensor would average the means of uneven shards."""
        mean_axes = [
            axis for axis, placement in enumerate(placements) if getattr(placement, "reduce_op", None) == "avg"
        ]
        for axis in mean_axes if isinstance(function, torch._ops.OpOverload) else ():
            if all(tensor._spec.placements[axis].is_replicate() for tensor in inputs):  # DTensor sharded it by itself
                return self._replicate_moves(inputs)
        moves: list[tuple[int, tuple[Any, ...]]] = []
        for at, tensor in enumerate(inputs) if mean_axes else ():
            new_placements = list(tensor._spec.placements)
            for axis in mean_axes:
                placement = new_placements[axis]
                if placement.is_shard() and tensor._spec.shape[placement.dim] % self.mesh.shape[axis]:
                    new_placements[axis] = Replicate()
            if new_placements != list(tensor._spec.placements):
                moves.append((at, tuple(new_placements)))
        return tuple(moves)

    def plan_tensor_source(self, name: str, args: tuple[Any, ...], output: TensorSpec) -> Template:
        """Return a template of a Meshbook function that takes no tensor and makes one, of the given spec."""
        number = next(self._numbers)
        message = TemplateMessage(number, f"meshbook::{name}", args, {}, (-1,), "one", (), False, False)
        return Template(number, output, (output,), "one", body=pickle.dumps(message, 5), name=message.function)

    def plan_void_function(self, name: str, args: tuple[Any, ...]) -> Template:
        """Return a template of a Meshbook function that takes no tensor and makes none."""
        number = next(self._numbers)
        message = TemplateMessage(number, f"meshbook::{name}", args, {}, (), "none", (), False, False)
        return Template(number, None, (), "none", body=pickle.dumps(message, 5), name=message.function)

    def _build_template(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Any],
        empties: dict[int, Any],
        results: Any,
        communicates: bool,
    ) -> Template:
        input_by_empty = {id(empty): tensor for tensor in inputs if (empty := empties.get(id(tensor))) is not None}
        is_sequence = isinstance(results, (tuple, list))
        flat = list(results) if is_sequence else [] if results is None else [results]
        outputs: list[TensorSpec | int | None] = []
        for result in flat:
            if id(result) in input_by_empty:
                outputs.append(next(at for at, tensor in enumerate(inputs) if tensor is input_by_empty[id(result)]))
            elif isinstance(result, DTensor):
                placements = tuple(result.placements)
                if any(_is_strided_shard(placement) for placement in placements):
                    # A dim made of a sharded inner dim: DTensor's backward of such a shard is wrong, so replicate it.
                    replicated = tuple(
                        Replicate() if _is_strided_shard(after) else before
                        for before, after in zip(inputs[0]._spec.placements, placements, strict=True)
                    )
                    return Template(0, None, (), "none", redistributions=((0, replicated),), needs_slow_path=True)
                if moves := self._uneven_mean_moves(function, inputs, placements):
                    return Template(0, None, (), "none", redistributions=moves, needs_slow_path=True)
                stride = _actual_strides(result)
                outputs.append(self.spec(result.shape, stride, 0, result.dtype, placements))
            elif isinstance(result, torch.Tensor):
                outputs.append(self.spec(result.shape, result.stride(), 0, result.dtype, None))
            elif result is None:
                outputs.append(None)
            else:
                raise NotImplementedError(f"{name_of(function)} gives a {type(result).__name__}, not tensors")
        mutates = _mutated_inputs(function, args, kwargs, inputs)
        is_view, shares = _view_kind(function, inputs, empties, flat)
        is_copied_view = is_view and (not shares or inputs[0]._spec.is_copied_view)
        if is_copied_view:
            outputs = [self.as_copied_view(output) if isinstance(output, TensorSpec) else output for output in outputs]
        seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()) and bool(inputs or flat)
        if seeded and (moves := _random_op_moves(inputs, outputs)):
            return Template(0, None, (), "none", redistributions=moves, needs_slow_path=True)
        returns = (
            ("list" if isinstance(results, list) else "tuple") if is_sequence else "none" if results is None else "one"
        )
        single = outputs[0] if returns == "one" and isinstance(outputs[0], TensorSpec) else None

        def placeholder(leaf: Any) -> Any:
            if getattr(leaf, "_spec", None) is not None:
                return TENSOR
            return FLOAT if leaf.__class__ is float else leaf

        number = next(self._numbers)
        message_args, message_kwargs = pytree.tree_map(placeholder, (tuple(args), dict(kwargs)))
        message = TemplateMessage(
            number=number,
            function=name_of(function),
            args=message_args,
            kwargs=message_kwargs,
            outputs=tuple(-1 if isinstance(output, TensorSpec) else output for output in outputs),
            returns={"list": "many", "tuple": "many"}.get(returns, returns),
            mutates=mutates,
            communicates=communicates,
            seeded=seeded,
            default_dtype=_default_dtype_name(inputs, outputs, kwargs),
            overwrites=bool(mutates) and overwrites(function),
            is_view=is_view and shares,
        )
        return Template(
            number=number,
            single_output=single,
            outputs=tuple(outputs),
            returns=returns,
            mutates=mutates,
            seeded=seeded,
            needs_slow_path=is_copied_view or bool(mutates) or seeded,
            is_view=is_view,
            shares_storage=shares,
            communicates=communicates,
            body=pickle.dumps(message, 5),
            name=name_of(function),
            overwrites=message.overwrites,
        )

    def _translate_error(self, function: Any, error: Exception, inputs: Sequence[Any]) -> Exception:
        """Return torch's error, restated in terms of the tensors as the user knows them."""
        text = str(error).strip().split("\n\nSharding propagation failed")[0].strip()
        name = name_of(function)
        operands = ", ".join(repr(tensor._spec) for tensor in inputs[:4])
        mesh_text = f"on a mesh of {self.axes}"
        op_name = name.partition("::")[2].partition(".")[0]
        if text.startswith("aten.nonzero") and op_name == "index":
            return NotImplementedError(
                f"x[mask] of {operands} {mesh_text}: the shape of its result depends on the data, which is on the "
                "ranks. torch.where(mask, x, other) keeps the shape, and x[mask] = value changes x; or run it where "
                "the data is, mesh.execute(fn, x), or on the whole tensor here, x.full_tensor()"
            )
        if function is aten.mkldnn_rnn_layer.default:
            return NotImplementedError(
                f"lstm of {operands} {mesh_text}: on a CPU it is one operation of oneDNN's, for which DTensor has no "
                "rule. `with torch.backends.mkldnn.flags(enabled=False):` it is made of others; "
                "meshbook.module_to_mesh(module, mesh) sees to that by itself"
            )
        if _is_missing_rule_error(function, error):
            return NotImplementedError(
                f"{op_name} of {operands} {mesh_text}: DTensor has no rule for it (or the shape of its result depends "
                f"on data). Ways round: run it on the ranks, mesh.execute(fn, x); or on the whole tensor here, "
                f"x.full_tensor(); or first bring x to every rank, x.redistribute([Replicate()] * {self.mesh.ndim})"
            )
        uneven = _UNEVEN_ERROR.search(text)
        if uneven is not None:
            dim, length, axis = uneven["dim"], int(uneven["length"]), int(uneven["axis"])
            size = self.axes.shape[axis]
            return PlacementError(
                f"{op_name} of {operands}: dim {dim} of {length} rows cannot be sharded evenly over "
                f"{self.axes.names[axis]}={size}: {length} = {size} * {length // size} + {length % size}. "
                f"Redistribute the tensor first so that {self.axes.names[axis]} cuts another dim, or none"
            )
        text = f"{text} ({op_name} of {operands} {mesh_text})"
        try:
            return type(error)(text)
        except Exception:
            return RuntimeError(text)


# ---------------------------------------------------------------------------------------------------------------------


def _op_specific_moves(
    function: Any, args: Any, inputs: Sequence[Any], mesh: DeviceMesh
) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """Return redistributions of inputs with whose placements DTensor would compute wrong results in this operation."""
    if function in _CONVOLUTION_INPUT_ARG:
        # DTensor's convolution accepts any shards, and exchanges edges by ranks of the default group.
        image = _CONVOLUTION_INPUT_ARG[function]
        placements = inputs[image]._spec.placements
        if placements is None:
            return ()
        length = inputs[image]._spec.shape[0]
        row_placements = tuple(  # a rank without a row would fail, or its result would be used
            placement
            if isinstance(placement, Shard) and placement.dim == 0 and _has_no_empty_shard(length, size)
            else Replicate()
            for placement, size in zip(placements, mesh.shape, strict=True)
        )
        # Images and the gradient of the output are sharded by rows; weight and bias must be replicated.
        required = [row_placements if at <= image else (Replicate(),) * mesh.ndim for at in range(len(inputs))]
        return tuple(
            (at, placements)
            for at, (tensor, placements) in enumerate(zip(inputs, required, strict=True))
            if tensor._spec.placements != placements
        )
    if function in _NEEDS_EQUAL_PLACEMENTS and len({tensor._spec.placements for tensor in inputs}) > 1:
        replicated = (Replicate(),) * mesh.ndim
        return tuple((at, replicated) for at, tensor in enumerate(inputs) if tensor._spec.placements != replicated)
    if function in _LOGICAL_REDUCTIONS:
        return _reduce_partial_moves(inputs[:1])
    if function is aten.embedding.default and Shard(0) in (inputs[0]._spec.placements or ()):
        # DTensor then shards the indices arbitrarily, and sometimes masks rows by the mask of another sharding.
        weight, indices = (tensor._spec.placements for tensor in inputs)
        uncut = tuple(
            index_placement if weight_placement.is_replicate() else Replicate()
            for weight_placement, index_placement in zip(weight, indices, strict=True)
        )
        return ((1, uncut),) if uncut != indices else ()
    if (function in _SCANS or function in _INDEX_REDUCTIONS) and inputs and inputs[0]._spec.placements is not None:
        spec = inputs[0]._spec
        rank = max(len(spec.shape), 1)
        dim_arg = args[1] if len(args) > 1 else None
        dims = {
            dim % rank for dim in (dim_arg if isinstance(dim_arg, (list, tuple)) else [dim_arg]) if isinstance(dim, int)
        }
        if function in (aten.roll.default,):
            dims = {dim % rank for dim in (args[2] if len(args) > 2 else range(rank))}
        if function in _INDEX_REDUCTIONS and dim_arg is None:
            dims = set(range(rank))
        if function is aten.kthvalue.default or function is aten.renorm.default:
            dims = set(range(rank))
        placements = tuple(
            Replicate()
            if placement.is_partial() or (_is_sharded(placement) and placement.dim % rank in dims)
            else placement
            for placement in spec.placements
        )
        if placements != spec.placements:
            return ((0, placements),)
    return ()


def _reduce_partial_moves(inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """Return redistributions that reduce those of these tensors that are Partial."""
    return tuple(
        (at, tuple(Replicate() if placement.is_partial() else placement for placement in tensor._spec.placements))
        for at, tensor in enumerate(inputs)
        if any(placement.is_partial() for placement in tensor._spec.placements or ())
    )


def _loses_precision(inputs: Sequence[Any], made: Sequence[Any]) -> bool:
    """Whether a partial sum gets a less precise dtype: its terms would lose digits that the sum need not lose."""
    epsilons = [
        torch.finfo(tensor._spec.dtype).eps
        for tensor in inputs
        if _is_inexact(tensor._spec) and any(placement.is_partial() for placement in tensor._spec.placements or ())
    ]
    return bool(epsilons) and any(
        (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        and torch.finfo(leaf.dtype).eps > min(epsilons)
        and any(placement.is_partial() for placement in leaf.placements)
        for leaf in made
    )


def _random_op_moves(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """Return the redistribution that replicates the first input along axes where the result is replicated.

    Ranks draw random numbers by the shards that they are given, and would draw different ones where DTensor assumes
    equal values.
    """
    new_output = next((output for output in outputs if isinstance(output, TensorSpec)), None)
    if new_output is None or not inputs or new_output.placements is None:
        return ()
    input_placements = inputs[0]._spec.placements
    required = tuple(
        Replicate() if after.is_replicate() and _is_sharded(before) else before
        for before, after in zip(input_placements, new_output.placements, strict=True)
    )
    return ((0, required),) if required != input_placements else ()


def _has_no_empty_shard(length: int, ranks: int) -> bool:
    """Whether no rank's shard is empty when rows are split as by `torch.chunk`."""
    return -(-length // ranks) * (ranks - 1) < length


def _expand_reduction_dims(function: Any, args: Any) -> Any:
    """Return a reduction's arguments with the dims written out."""
    at = _REDUCTION_DIM_ARG.get(function)
    if at is None or len(args) < at or (len(args) > at and (args[at] is None or args[at])):
        return args
    return (*args[:at], list(range(args[0].dim())), *args[at + 1 :])


def _default_dtype_name(inputs: Sequence[Any], outputs: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the default dtype where the ranks need it; None: their usual one is right."""
    default = torch.get_default_dtype()
    if default is torch.float32 or kwargs.get("dtype") is not None:
        return None
    if any(_is_inexact(tensor._spec) for tensor in inputs):
        return None
    made = any(isinstance(output, TensorSpec) and _is_inexact(output) for output in outputs)
    return str(default).removeprefix("torch.") if made else None


def _is_inexact(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _is_missing_rule_error(function: Any, error: Exception) -> bool:
    """Whether DTensor's error means that it has no rule for the operation."""
    text = str(error).strip()
    return (
        isinstance(error, NotImplementedError)
        or "does not have a sharding strategy" in text
        or "not supported with DTensor" in text
        or text.split("\n\n")[0] == name_of(function).replace("::", ".")
        or "Meta tensors" in text
        or text.startswith("aten.nonzero")  # of a mask among the indices
        or type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException")
    )


def _works_on_plain_tensors(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation works in plain torch, so that a failure is DTensor's fault and not the user's."""
    if not isinstance(function, torch._ops.OpOverload):
        return False

    try:
        with _disable_current_modes(), torch.no_grad():
            meta_args, meta_kwargs = pytree.tree_map(_to_meta, (args, kwargs))
            function(*meta_args, **meta_kwargs)
    except Exception:
        return False
    return True


def _to_meta(leaf: Any) -> Any:
    """Return a tensor like this remote one, of its global shape, without data; anything else unchanged."""
    spec = getattr(leaf, "_spec", None)
    if spec is not None:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _functional_variant(function: Any) -> Any:
    """Return the out-of-place variant of an in-place operation, or None."""
    name = getattr(function, "_opname", "")
    if not name.endswith("_") or name.startswith("_foreach"):
        return None
    other = getattr(getattr(torch.ops, function.namespace), name.removesuffix("_"), None)
    if other is None:
        return None
    argument_types = [str(argument.type) for argument in function._schema.arguments]
    # pow_.Scalar corresponds to pow.Tensor_Scalar; pow.Scalar is a different operation.
    overload_names = [function._overloadname, *other.overloads()]
    overloads = [getattr(other, name) for name in overload_names if hasattr(other, name)]
    matching = (
        one for one in overloads if [str(argument.type) for argument in one._schema.arguments] == argument_types
    )
    return next(matching, None)


def _plan_functional_variant(function: Any) -> Template:
    """Return the plan of an in-place operation by means of its out-of-place variant."""
    other = _functional_variant(function)
    if other is None:
        raise NotImplementedError(
            f"{function._opname} with operands that are placed otherwise than the tensor it changes: bring them to its "
            "placements first, y.redistribute(x.placements)"
        )
    return Template(0, None, (), "none", functional_op=other, needs_slow_path=True)


def _is_linear(function: Any, placement: Any) -> bool:
    """Whether an operation of one tensor and numbers may be applied to each term of this placement separately.

    DTensor's cache of other operands sometimes claims so for `x + 0.5`, which would then be added to every term.
    """
    name = function._opname.removesuffix("_").removeprefix("_foreach_")
    shifts = ("add", "sub", "rsub") if getattr(placement, "reduce_op", None) == "avg" else ()
    return not placement.is_partial() or name in (*_LINEAR_OPS, *shifts)


def _is_sharded(placement: Any) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _is_strided_shard(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _mutated_inputs(function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the inputs that the operation changes, according to its schema."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    mutated: list[int] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, (list, tuple)) else [value]:
            mutated += [at for at, tensor in enumerate(inputs) if tensor is leaf]
    return tuple(dict.fromkeys(mutated))


def _view_kind(function: Any, inputs: Sequence[Any], empties: dict[int, Any], results: list[Any]) -> tuple[bool, bool]:
    """Return whether the results are views of the first input, and whether they share its storage, as views should."""
    if function in (as_global, as_local):
        return True, True
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable or not inputs:
        return False, False
    if not any(output.alias_info is not None for output in schema.returns):
        return False, False
    source = _storage_id(empties[id(inputs[0])])
    return True, all(_storage_id(result) == source for result in results if isinstance(result, torch.Tensor))


def _storage_id(tensor: Any) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found: int = local.untyped_storage()._cdata
    return found


class _PlanningFlag(threading.local):
    """Whether this thread is planning an operation."""

    is_active = False


_planning = _PlanningFlag()


@contextlib.contextmanager
def _as_rank_0() -> Iterator[None]:
    """Report rank 0 while planning: DTensor sometimes reads its rank in the default group, which is missing here."""
    before, _planning.is_active = _planning.is_active, True
    try:
        yield
    finally:
        _planning.is_active = before


class _DistributedProxy:
    """`torch.distributed` as DTensor's convolutions see it; a rank cannot be passed to them in any other way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: Any = None) -> int:
        return 0 if _planning.is_active and not dist.is_initialized() else dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return 1 if _planning.is_active and not dist.is_initialized() else dist.get_world_size(group)


_tp_conv.dist = _DistributedProxy()  # type: ignore[assignment, attr-defined]


class _FakeDeviceMesh(DeviceMesh):
    """A device mesh in which this process has rank 0, whatever groups it is in."""

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


class _OpObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects collectives, and writes of local operations."""

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False
        self._function = function
        schema = getattr(function, "_schema", None)
        arguments = schema.arguments if schema is not None and schema.is_mutable else ()
        self._mutated_args = [
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._mutated_storages: list[tuple[int, torch.Size]] = []  # storages and shapes that local operations wrote to

    def missed_mutation(self, tensors: Sequence[Any]) -> bool:
        """Whether an operation did not change one of these tensors completely, although it should.

        DTensor brings operands to common placements; the operation then changes a copy or a shard of its argument.
        """
        expected = [
            (_storage_id(tensor), tensor._local_tensor.shape) for tensor in tensors if isinstance(tensor, DTensor)
        ]
        return bool(self._mutated_storages) and any(one not in self._mutated_storages for one in expected)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            self.communicates = True
        if func is self._function:
            for position, name in self._mutated_args:
                written = args[position] if position < len(args) else (kwargs or {}).get(name)
                for leaf in pytree.tree_leaves(written):
                    if isinstance(leaf, torch.Tensor):
                        self._mutated_storages.append((_storage_id(leaf), leaf.shape))
        return func(*args, **(kwargs or {}))


def _fake_device_mesh(axes: MeshAxes) -> DeviceMesh:
    """Return a DeviceMesh of these axes with fake groups. This process joins no group: `dist` stays unused."""
    mesh = _FakeDeviceMesh(
        "cpu",
        torch.arange(axes.size).reshape(axes.shape or (1,)),
        mesh_dim_names=axes.names or ("rank",),
        _init_backend=False,
        _rank=0,
    )
    names: list[Any] = []
    groups = []
    for size in axes.shape or (1,):
        group: Any = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
        backend = FakeProcessGroup._create_internal(0, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        name: Any = f"meshbook-plan-{next(_group_numbers)}"
        group._set_group_name(name)
        _register_process_group(name, group)
        names.append(name)
        groups.append(group)
    mesh._dim_group_names = names
    mesh._meshbook_groups = groups  # type: ignore[attr-defined]  # torch's registry holds them weakly
    return mesh


def _dense_strides(local: Sequence[int], spec: TensorSpec) -> list[int]:
    """Return dense strides of a shard of this shape, with the dims in the global tensor's order."""
    order = sorted(range(len(local)), key=lambda dim: (-spec.stride[dim], -(spec.shape[dim] != 1), dim))
    strides, step = [0] * len(local), 1
    for dim in reversed(order):
        if spec.stride[dim] == 0 and local[dim] != 1:
            continue
        strides[dim] = step
        step *= max(local[dim], 1)
    return strides


def local_shape(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, position: int = 0) -> tuple[int, ...]:
    """Return the shape of the shard of the rank at this position in the mesh's order."""
    return tuple(stop - start for start, stop in spans_of(shape, placements, axes, position))


def spans_of(
    shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, position: int
) -> tuple[tuple[int, int], ...]:
    """Return the box, as (start, stop) for each dim, of the rank at this position in the mesh's order."""
    from meshbook.placement import Replicate as Replicated

    mesh_placements = [Cut(placement.dim) if _is_sharded(placement) else Replicated() for placement in placements]
    point = []
    for size in reversed(axes.shape or (1,)):
        point.append(position % size)
        position //= size
    return local_spans(shape, mesh_placements, axes.shape or (1,), tuple(reversed(point)))


def _actual_strides(tensor: DTensor) -> tuple[int, ...]:
    """Return the global strides, in the order of the local tensor's.

    DTensor sometimes reports others; torch would then allow views here that the ranks cannot make.
    """
    reported, local = tensor.stride(), tensor._local_tensor
    dims = [dim for dim in range(local.dim()) if local.shape[dim] > 1]
    order = sorted(dims, key=local.stride, reverse=True)
    if all(reported[one] >= reported[other] for one, other in itertools.pairwise(order)):
        return tuple(reported)
    strides, step = [0] * local.dim(), 1
    for dim in reversed([dim for dim in range(local.dim()) if dim not in dims] + order):
        strides[dim] = step if dim not in dims or local.stride(dim) else 0
        step *= max(tensor.shape[dim], 1) if strides[dim] else 1
    return tuple(strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in items."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(int(length), 1)
    return tuple(reversed(strides))


def format_placements(placements: Sequence[Any] | None) -> str:
    """Format placements for people to read."""
    if placements is None:
        return "per rank"
    return f"({', '.join(str(placement) for placement in placements)})"
