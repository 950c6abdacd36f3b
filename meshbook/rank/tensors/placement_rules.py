"""Placements that inputs of an operation must be brought to first, where DTensor would compute wrong results.

Pure functions of specs. Each returns moves: for the index of an input, its placements; empty: none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshbook.mesh_axes import MeshAxes
from meshbook.placement import shard_spans
from meshbook.rank.tensors.dtensor_patches import is_strided_shard
from meshbook.rank.tensors.operators import may_stay_partial
from meshbook.rank.tensors.schemas import has_tag
from meshbook.rank.tensors.shards import Spec, empty_shard_dims, is_sharded

aten = torch.ops.aten

Moves = tuple[tuple[int, tuple[Any, ...]], ...]
Specs = Sequence[Spec]

# Names of operations that may be applied to each term of a partial sum separately.
_LINEAR_OPS = ("mul", "div", "neg", "positive", "clone", "_to_copy", "to", "copy", "zero", "conj", "_conj_physical")

# Operations that are correct on empty shards too, besides pointwise ones.
_SAFE_ON_EMPTY_SHARDS = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.sum.default, aten.sum.dim_IntList, aten.clone.default,
    aten._to_copy.default, aten.copy_.default, aten.fill_.Scalar, aten.zero_.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.detach.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip


def replicate(specs: Specs, mesh_ndim: int) -> Moves:
    """Replicate all inputs."""
    return _moves_to(specs, [(Replicate(),) * mesh_ndim] * len(specs))


def replicate_axis(specs: Specs, axis: int) -> Moves:
    """Replicate all inputs along one axis."""
    placements = (spec.placements or () for spec in specs)
    return _moves_to(specs, [(*of_input[:axis], Replicate(), *of_input[axis + 1 :]) for of_input in placements])


def reduce_partial(specs: Specs) -> Moves:
    """Reduce those inputs that are Partial."""
    return tuple((at, _replicated_where(spec, _is_partial)) for at, spec in enumerate(specs) if spec.has_partial)


def _moves_to(specs: Specs, required: Iterable[tuple[Any, ...] | None]) -> Moves:
    pairs = enumerate(zip(specs, required, strict=True))
    return tuple((at, placements) for at, (spec, placements) in pairs if placements not in (None, spec.placements))


def _replicated_where(spec: Spec, condition: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return the spec's placements, with Replicate where the condition holds."""
    return tuple(Replicate() if condition(placement) else placement for placement in spec.placements or ())


def _is_partial(placement: Any) -> bool:
    return bool(placement.is_partial())


# ---------------------------------------------------------------------------------------------------------------------
# By operator


def _scan(args: Any, specs: Specs, mesh_shape: Sequence[int], dims: Callable[[Any, int], Any]) -> Moves:
    """Of an operation along dims: replicate the first input along axes that shard one of them."""
    if not specs or specs[0].placements is None:
        return ()
    num_dims = max(len(specs[0].shape), 1)
    along = {dim % num_dims for dim in dims(args, num_dims)}
    required = _replicated_where(
        specs[0],
        lambda placement: placement.is_partial() or (is_sharded(placement) and placement.dim % num_dims in along),
    )
    return _moves_to(specs[:1], [required])


def _dim_arg(args: Any, num_dims: int, *, default: Iterable[int] = ()) -> Iterable[int]:
    """Return the dims that the second argument names."""
    dims = args[1] if len(args) > 1 else None
    return default if dims is None else [dims] if isinstance(dims, int) else dims


def _dim_arg_or_all(args: Any, num_dims: int) -> Iterable[int]:
    return _dim_arg(args, num_dims, default=range(num_dims))


def _roll_dims(args: Any, num_dims: int) -> Iterable[int]:
    return args[2] if len(args) > 2 else range(num_dims)


def _all_dims(args: Any, num_dims: int) -> Iterable[int]:
    return range(num_dims)


def _convolution(args: Any, specs: Specs, mesh_shape: Sequence[int], image: int) -> Moves:
    """Shard the image and the gradient of the output by rows only, replicate weight and bias.

    DTensor's convolution accepts any shards, and exchanges edges by ranks of the default group.
    """
    placements, length = specs[image].placements, specs[image].shape[0]
    if placements is None:
        return ()
    by_rows = tuple(  # a rank without a row would fail, or its result would be used
        placement if placement == Shard(0) and shard_spans(length, size)[-1][0] < length else Replicate()
        for placement, size in zip(placements, mesh_shape, strict=True)
    )
    replicated = (Replicate(),) * len(mesh_shape)
    return _moves_to(specs, [by_rows if at <= image else replicated for at in range(len(specs))])


def _equal_placements(args: Any, specs: Specs, mesh_shape: Sequence[int]) -> Moves:
    """Replicate operands whose placements differ: DTensor takes shards of one and all of the other."""
    return replicate(specs, len(mesh_shape)) if len({spec.placements for spec in specs}) > 1 else ()


def _logical_reduction(args: Any, specs: Specs, mesh_shape: Sequence[int]) -> Moves:
    """Reduce first: DTensor tests each term of a partial sum or product, as if a nonzero term made the sum nonzero."""
    return reduce_partial(specs[:1])


def _products_of_integers(args: Any, specs: Specs, mesh_shape: Sequence[int]) -> Moves:
    """Replicate integers: DTensor would divide what is added by the number of the sum's terms, to a fraction."""
    return () if specs[0].is_inexact or specs[0].placements is None else replicate(specs, len(mesh_shape))


def _complex_product(args: Any, specs: Specs, mesh_shape: Sequence[int]) -> Moves:
    """Replicate complex numbers along what is multiplied: no backend multiplies them over ranks."""
    return _scan(args, specs, mesh_shape, _dim_arg_or_all) if specs[0].dtype.is_complex else ()


def _embedding(args: Any, specs: Specs, mesh_shape: Sequence[int]) -> Moves:
    """Replicate the indices along axes that shard rows of the weight.

    DTensor would shard them arbitrarily, and sometimes mask rows by the mask of another sharding.
    """
    weight, indices = specs
    if weight.placements is None or indices.placements is None or Shard(0) not in weight.placements:
        return ()
    uncut = tuple(
        index_placement if weight_placement.is_replicate() else Replicate()
        for weight_placement, index_placement in zip(weight.placements, indices.placements, strict=True)
    )
    return _moves_to(specs, (None, uncut))


# By operator: (args, specs of the inputs, shape of the mesh) -> moves.
_RULES: dict[Any, Callable[[Any, Specs, Sequence[int]], Moves]] = {
    aten.convolution.default: partial(_convolution, image=0),
    aten.convolution_backward.default: partial(_convolution, image=1),
    aten.linalg_solve_triangular.default: _equal_placements,
    aten.embedding.default: _embedding,
    aten.addmm.default: _products_of_integers,
    aten.addmv.default: _products_of_integers,
    aten.baddbmm.default: _products_of_integers,
    aten.prod.default: _complex_product,
    aten.prod.dim_int: _complex_product,
    aten.any.default: _logical_reduction,
    aten.any.dim: _logical_reduction,
    aten.any.dims: _logical_reduction,
    aten.all.default: _logical_reduction,
    aten.all.dim: _logical_reduction,
    aten.all.dims: _logical_reduction,
    # DTensor computes these shard by shard although an element depends on other shards.
    aten.cumsum.default: partial(_scan, dims=_dim_arg),
    aten.cumprod.default: partial(_scan, dims=_dim_arg),
    aten.logcumsumexp.default: partial(_scan, dims=_dim_arg),
    aten.cummax.default: partial(_scan, dims=_dim_arg),
    aten.cummin.default: partial(_scan, dims=_dim_arg),
    aten.flip.default: partial(_scan, dims=_dim_arg),
    aten.median.dim: partial(_scan, dims=_dim_arg),
    aten.mode.default: partial(_scan, dims=_dim_arg),
    aten.roll.default: partial(_scan, dims=_roll_dims),
    aten.kthvalue.default: partial(_scan, dims=_all_dims),
    aten.renorm.default: partial(_scan, dims=_all_dims),
    # Of equal elements DTensor returns the first rank's index, and it fails where shards differ in length.
    aten.argmax.default: partial(_scan, dims=_dim_arg_or_all),
    aten.argmin.default: partial(_scan, dims=_dim_arg_or_all),
}


def moves_for_op(function: Any, args: Any, specs: Specs, axes: MeshAxes) -> Moves:
    """Return the moves that an operation needs whatever its results are."""
    rule = _RULES.get(function)
    moves = rule(args, specs, axes.shape) if rule is not None else ()
    return moves or _moves_from_unsafe(function, specs, axes)


def _moves_from_unsafe(function: Any, specs: Specs, axes: MeshAxes) -> Moves:
    """Replace placements with which DTensor computes wrongly, whatever the operation.

    These are Partial placements that may not stay, and shardings with empty shards: a rank with an empty shard
    raises what others do not, or skips a collective.
    """
    if not isinstance(function, torch._ops.OpOverload):
        return ()
    is_safe = (
        has_tag(function, torch.Tag.pointwise) or function in _SAFE_ON_EMPTY_SHARDS or "foreach" in function._opname
    )

    def safe_placements(spec: Spec) -> tuple[Any, ...] | None:
        if spec.placements is None:
            return None
        empty_dims = set() if is_safe else empty_shard_dims(spec, axes)
        return _replicated_where(
            spec,
            lambda placement: (
                not may_stay_partial(placement, spec.dtype) or (is_sharded(placement) and placement.dim in empty_dims)
            ),
        )

    return _moves_to(specs, map(safe_placements, specs))


# ---------------------------------------------------------------------------------------------------------------------
# By what DTensor made


def is_linear(function: Any, specs: Specs, results: Sequence[DTensor]) -> bool:
    """Whether an operation may be applied to each term of its Partial results separately; True unless it is unary.

    DTensor's cache of other operands sometimes claims so for `x + 0.5`, which would then be added to every term.
    """
    if len(specs) != 1 or not has_tag(function, torch.Tag.pointwise):
        return True
    name = getattr(function, "_opname", "").removesuffix("_").removeprefix("_foreach_")
    return all(
        name in _LINEAR_OPS or (name in ("add", "sub", "rsub") and getattr(placement, "reduce_op", None) == "avg")
        for result in results
        for placement in result.placements
        if placement.is_partial()
    )


def loses_precision(specs: Specs, results: Sequence[DTensor]) -> bool:
    """Whether a partial sum gets a less precise dtype: its terms would lose digits that the sum need not lose."""
    epsilons = [torch.finfo(spec.dtype).eps for spec in specs if spec.is_inexact and spec.has_partial]
    return bool(epsilons) and any(
        (result.dtype.is_floating_point or result.dtype.is_complex)
        and torch.finfo(result.dtype).eps > min(epsilons)
        and any(placement.is_partial() for placement in result.placements)
        for result in results
    )


def moves_for_results(function: Any, specs: Specs, results: Sequence[DTensor], axes: MeshAxes) -> Moves:
    """Return the moves that an operation needs because of the placements that DTensor gave to its results."""
    for result in results:
        if any(is_strided_shard(placement) for placement in result.placements):
            # A dim made of a sharded inner dim: DTensor's backward of such a shard is wrong, so replicate it.
            pairs = zip(specs[0].placements or (), result.placements, strict=True)
            return ((0, tuple(Replicate() if is_strided_shard(after) else before for before, after in pairs)),)
        if moves := _moves_from_uneven_means(function, specs, result.placements, axes.shape):
            return moves
    return _moves_from_random(specs, results) if has_tag(function, torch.Tag.nondeterministic_seeded) else ()


def _moves_from_uneven_means(
    function: Any, specs: Specs, placements: Sequence[Any], mesh_shape: Sequence[int]
) -> Moves:
    """Replicate inputs where DTensor would average the means of uneven shards."""
    mean_axes = [axis for axis, placement in enumerate(placements) if getattr(placement, "reduce_op", None) == "avg"]
    if not mean_axes:
        return ()
    all_placements = [spec.placements or () for spec in specs]
    if isinstance(function, torch._ops.OpOverload) and any(
        all(of_input[axis].is_replicate() for of_input in all_placements) for axis in mean_axes
    ):  # DTensor sharded it by itself
        return replicate(specs, len(mesh_shape))

    def is_uneven(spec: Spec, axis: int, placement: Any) -> bool:
        return axis in mean_axes and placement.is_shard() and spec.shape[placement.dim] % mesh_shape[axis] != 0

    return _moves_to(
        specs,
        [
            tuple(
                Replicate() if is_uneven(spec, axis, placement) else placement
                for axis, placement in enumerate(spec.placements or ())
            )
            for spec in specs
        ],
    )


def _moves_from_random(specs: Specs, results: Sequence[DTensor]) -> Moves:
    """Replicate the first input along axes where the result is replicated.

    Ranks draw random numbers by the shards that they are given, and would draw different ones where DTensor assumes
    equal values.
    """
    if not specs or not results or specs[0].placements is None:
        return ()
    pairs = zip(specs[0].placements, results[0].placements, strict=True)
    required = tuple(Replicate() if after.is_replicate() and is_sharded(before) else before for before, after in pairs)
    return _moves_to(specs[:1], [required])
