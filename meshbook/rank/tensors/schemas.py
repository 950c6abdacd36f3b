"""What the schema of an operator says of an operation: what it writes, whether it makes views, its other variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten

# Reductions, and the index of their dims argument. No dims means all dims; DTensor leaves some of them unreduced then.
_REDUCTION_DIM_ARG = {
    aten.sum.dim_IntList: 1, aten.nansum.default: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1,
    aten.logsumexp.default: 1, aten.count_nonzero.dim_IntList: 1, aten.var.correction: 1, aten.std.correction: 1,
    aten.var_mean.correction: 1, aten.std_mean.correction: 1, aten.linalg_vector_norm.default: 2,
    aten.norm.ScalarOpt_dim: 2, aten.norm.ScalarOpt_dim_dtype: 2,
}  # fmt: skip


def has_tag(function: Any, tag: torch.Tag) -> bool:
    return tag in getattr(function, "tags", ())


def written_leaves(function: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield what an operation is given for the arguments that it writes to, with lists flattened."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if (schema.name, argument.name) == ("aten::_fused_adagrad_", "state_steps"):
            continue  # said to be written by mistake: its kernels read the counts, as those of Adam do
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from pytree.tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name))


def mutated_inputs(function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the inputs that the operation changes."""
    found = (
        at for leaf in written_leaves(function, args, kwargs) for at, tensor in enumerate(inputs) if tensor is leaf
    )
    return tuple(dict.fromkeys(found))


def makes_views(function: Any) -> bool:
    """Whether the results are views of the first argument."""
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(output.alias_info is not None for output in schema.returns)


def out_names(function: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operation writes its results to: `out`, where it has one."""
    schema = getattr(function, "_schema", None)
    return tuple(argument.name for argument in schema.arguments if argument.is_out) if schema is not None else ()


def functional_variant(function: Any) -> Any:
    """Return the variant that makes new tensors, of an operation in place or with `out=`; or None."""
    name = getattr(function, "_opname", "")
    if name.startswith("_foreach") or not (name.endswith("_") or out_names(function)):
        return None
    other = getattr(getattr(torch.ops, function.namespace), name.removesuffix("_"), None)
    if other is None:
        return None
    argument_types = [str(argument.type) for argument in function._schema.arguments if not argument.is_out]
    # pow_.Scalar corresponds to pow.Tensor_Scalar; pow.Scalar is a different operation.
    overload_names = [function._overloadname, *other.overloads()]
    overloads = [getattr(other, name) for name in overload_names if hasattr(other, name)]
    matching = (
        one
        for one in overloads
        if one is not function and [str(argument.type) for argument in one._schema.arguments] == argument_types
    )
    return next(matching, None)


def expand_reduction_dims(function: Any, args: Any) -> Any:
    """Return a reduction's arguments with the dims written out."""
    at = _REDUCTION_DIM_ARG.get(function)
    if at is None or len(args) < at or (len(args) > at and (args[at] is None or args[at])):
        return args
    return (*args[:at], list(range(args[0].dim())), *args[at + 1 :])
