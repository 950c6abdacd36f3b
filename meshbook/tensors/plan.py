"""Plans an operation on remote tensors, once for each kind of operands and without the ranks.

The operation runs on DTensors that have shapes and no data (`meta_run`). This yields shape, stride, dtype and
placements of the results, and raises errors about shapes or placements here, at the user's line. The result is a
`Template`, which equal operations find by a dictionary look-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.errors import PlacementError
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import dtensor_errors, dtensor_patches
from meshbook.rank.tensors import placement_rules as rules
from meshbook.rank.tensors.operators import (
    FLOAT,
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
from meshbook.rank.tensors.schemas import (
    expand_reduction_dims,
    functional_variant,
    has_tag,
    makes_views,
    mutated_inputs,
    out_names,
)
from meshbook.rank.tensors.shards import actual_strides
from meshbook.tensors.meta_run import MetaRun, MetaRunner, OwnGeneratorError, run_on_plain_tensors, storage_id
from meshbook.tensors.specs import SpecTable, Template, TensorSpec
from meshbook.wire.pickler import dump_message

aten = torch.ops.aten

# Operations that return other tensors on some machines than here, and those that depend on the memory layout.
_NEVER_REPLICATED = {aten.mkldnn_rnn_layer.default, aten.as_strided.default}

# Operations whose DTensor rules fail where a dim has length 0: those of a view search endlessly for a divisor of it,
# and those of a squeeze drop the dim.
_FAILS_ON_EMPTY = {
    aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip


class Planner:
    """Plans operations for one mesh. As thread-safe as the interpreter: two threads may plan the same operation."""

    def __init__(self, axes: MeshAxes, engine: Any, specs: SpecTable) -> None:
        dtensor_patches.install()
        self.axes = axes
        self._engine, self._specs = engine, specs
        self._runner = MetaRunner(axes)
        self.next_number = itertools.count(1).__next__  # 0 frees ids

    def plan(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        """Return the template of this operation.

        Args:
            args, kwargs: the operation's own, with RemoteTensors (anything with a `_spec`) for tensors.
            inputs: those tensors, in order.

        Raises:
            NotImplementedError: DTensor has no rule for it; the text names an alternative.
            RuntimeError and others: torch's own, about shapes and dtypes.
        """
        _check_operands(function, inputs, self._engine)
        # DTensor writes into the piece of `out` what has other placements.
        outs = pytree.tree_leaves([kwargs[name] for name in out_names(function)])
        if any(out._spec.placements is not None for out in outs):
            return _plan_functional_variant(function)
        template = self._plan_op(function, args, kwargs, inputs)
        if template.redistributions and {at for at, _ in template.redistributions}.intersection(
            mutated_inputs(function, args, kwargs, inputs)
        ):
            return _plan_functional_variant(function)  # a redistributed input is a copy
        return template

    def plan_rank_function(
        self,
        name: str,
        args: tuple[Any, ...],
        outputs: Sequence[TensorSpec] = (),
        *,
        returns: str = "none",
        mutates: tuple[int, ...] = (),
        communicates: bool = False,
        overwrites: bool = False,
    ) -> Template:
        """Return the template of a Meshbook function of the ranks (`meshbook::name`), whose results are known.

        Args:
            args: with TENSOR, FLOAT and MESH for what is given with each operation.
            outputs: the specs of its results, all new.
            returns: "none", "one" or "list".
        """
        message = TemplateMessage(
            number=self.next_number(),
            function=f"meshbook::{name}",
            args=args,
            kwargs={},
            outputs=(-1,) * len(outputs),
            placements=tuple(spec.placements for spec in outputs),
            returns="many" if returns == "list" else returns,
            mutates=mutates,
            communicates=communicates,
            seeded=False,
            overwrites=overwrites,
        )
        return Template(
            number=message.number,
            outputs=tuple(outputs),
            returns=returns,
            mutates=mutates,
            overwrites=overwrites,
            body=dump_message(message),
            name=message.function,
        )

    def _plan_op(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        specs = [tensor._spec for tensor in inputs]
        if moves := rules.moves_for_op(function, args, specs, self.axes):
            return Template(0, redistributions=moves)
        if (
            function in _FAILS_ON_EMPTY
            and 0 in specs[0].shape
            and (found := self._plan_replicated(function, args, kwargs, inputs))
        ):
            return found
        args = expand_reduction_dims(function, args)
        try:
            run = self._runner.run(function, args, kwargs, inputs)
        except Exception as error:
            return self._plan_after_error(function, args, kwargs, inputs, error)
        if moves := self._moves_for_partial_results(function, args, kwargs, specs, run.dtensors):
            return Template(0, redistributions=moves)
        if isinstance(function, torch._ops.OpOverload) and any(
            not may_stay_partial(placement, leaf.dtype) for leaf in run.dtensors for placement in leaf.placements
        ):
            for placement in itertools.chain.from_iterable(leaf.placements for leaf in run.dtensors):
                if hasattr(placement, "mask_buffer"):  # DTensor shares it among all operations of this kind
                    placement.mask_buffer.release_mask()
            return self._plan_op(ReducedOp(function), args, kwargs, inputs)
        if run.missed_mutation:
            return _plan_functional_variant(function)
        if moves := rules.moves_for_results(function, specs, run.new_dtensors, self.axes):
            return Template(0, redistributions=moves)
        return self._build_template(function, args, kwargs, inputs, run)

    def _plan_after_error(
        self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any], error: Exception
    ) -> Template:
        """Plan an operation otherwise, after DTensor has failed.

        Raises:
            Exception: the error, where there is no other way.
        """
        specs = [tensor._spec for tensor in inputs]
        if dtensor_errors.is_placement_change(error):
            return _plan_functional_variant(function)
        if moves := dtensor_errors.moves_after_error(error, specs, self.mesh_ndim):
            return Template(0, redistributions=moves)
        if dtensor_errors.is_missing_rule(function, error) or _works_on_plain_tensors(function, args, kwargs):
            if (other := functional_variant(function)) is not None:
                return Template(0, functional_op=other)
            if found := self._plan_replicated(function, args, kwargs, inputs):
                return found
        if isinstance(error, OwnGeneratorError):
            raise error
        raise dtensor_errors.translate(function, error, specs, self.axes) from None

    def _plan_replicated(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Template | None:
        """Plan an operation that DTensor has no rule for: every rank runs it on replicated operands, if possible."""
        if not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable or not inputs:
            return None
        specs = [tensor._spec for tensor in inputs]
        if function in _NEVER_REPLICATED or any(spec.placements is None for spec in specs):
            return None
        replicated_op = ReplicatedOp(function)
        try:
            run = self._runner.run_replicated(replicated_op, args, kwargs, inputs)
        except Exception:
            return None
        if not all(isinstance(leaf, (DTensor, type(None))) for leaf in pytree.tree_leaves(run.results)):
            return None
        if moves := rules.replicate(specs, self.mesh_ndim):
            return Template(0, redistributions=moves)
        return self._build_template(replicated_op, args, kwargs, inputs, run)

    @property
    def mesh_ndim(self) -> int:
        """The number of placements that a tensor has."""
        return len(self.axes.shape)

    def _moves_for_partial_results(
        self, function: Any, args: Any, kwargs: Any, specs: rules.Specs, results: Sequence[DTensor]
    ) -> rules.Moves:
        """Return the moves that an operation needs where DTensor wrongly gives it Partial results."""
        if not rules.is_linear(function, specs, results) or _has_wrong_dtype(function, args, kwargs, results):
            return rules.replicate(specs, self.mesh_ndim)
        return rules.reduce_partial(specs) if rules.loses_precision(specs, results) else ()

    def _build_template(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any], run: MetaRun) -> Template:
        results = run.results
        is_sequence = isinstance(results, (tuple, list))
        flat = list(results) if is_sequence else [] if results is None else [results]
        is_view, shares = _view_kind(function, inputs, run, flat)
        is_copied_view = is_view and (not shares or inputs[0]._spec.is_copied_view)
        index_of_empty = {id(run.empties[id(tensor)]): at for at, tensor in reversed(list(enumerate(inputs)))}
        outputs = tuple(
            index_of_empty[id(result)]
            if id(result) in index_of_empty
            else self._spec_of(function, result, is_copied_view)
            for result in flat
        )
        returns = (
            ("list" if isinstance(results, list) else "tuple") if is_sequence else "none" if results is None else "one"
        )
        mutates = mutated_inputs(function, args, kwargs, inputs)
        message_args, message_kwargs = pytree.tree_map(_placeholder_of, (tuple(args), dict(kwargs)))
        message = TemplateMessage(
            number=self.next_number(),
            function=name_of(function),
            args=message_args,
            kwargs=message_kwargs,
            outputs=tuple(-1 if isinstance(output, TensorSpec) else output for output in outputs),
            placements=tuple(output.placements for output in outputs if isinstance(output, TensorSpec)),
            returns="many" if is_sequence else returns,
            mutates=mutates,
            communicates=run.communicates,
            seeded=has_tag(function, torch.Tag.nondeterministic_seeded) and bool(inputs or flat),
            default_dtype=_default_dtype_name(inputs, outputs, kwargs),
            overwrites=bool(mutates) and overwrites(function),
            is_view=is_view and shares,
        )
        return Template(
            number=message.number,
            outputs=outputs,
            returns=returns,
            mutates=mutates,
            seeded=message.seeded,
            is_view=is_view,
            shares_storage=shares,
            overwrites=message.overwrites,
            body=dump_message(message),
            name=message.function,
        )

    def _spec_of(self, function: Any, result: Any, is_copied_view: bool) -> TensorSpec | None:
        """Return the spec of a new result."""
        if result is None:
            return None
        if not isinstance(result, torch.Tensor):
            raise NotImplementedError(f"{name_of(function)} gives a {type(result).__name__}, not tensors")
        placements, stride = None, result.stride()
        if isinstance(result, DTensor):
            placements, stride = tuple(result.placements), actual_strides(result)
        return self._specs.intern(result.shape, result.dtype, placements, stride, is_copied_view)


# ---------------------------------------------------------------------------------------------------------------------


def _check_operands(function: Any, inputs: Sequence[Any], engine: Any) -> None:
    """Check that an operation on these tensors can be planned at all.

    Raises:
        ValueError, PlacementError, NotImplementedError: it cannot.
    """
    for tensor in inputs:
        if tensor._spec.engine is not engine:
            raise ValueError(
                f"{name_of(function)} has operands of two meshes, {engine.axes} and {tensor._spec.engine.axes}; "
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
    if has_tag(function, torch.Tag.inplace_view) and function is not aten.detach_.default:
        raise NotImplementedError(
            f"{function._opname} changes the shape of a tensor in place, and its shape is here while its numbers "
            "are there; use the one that makes a view (without the trailing underscore), x = x.t(), or, where "
            "torch's own code does it, mesh.execute(fn, x) or x.full_tensor()"
        )


def _plan_functional_variant(function: Any) -> Template:
    """Return the plan of an in-place operation by means of its out-of-place variant."""
    if function._opname.startswith("_fused_"):
        raise NotImplementedError(
            f"{function._opname}: parameters with fewer rows than there are ranks, or with gradients that are placed "
            "otherwise, have no fused step on a mesh; leave fused=True out, or say foreach=True"
        )
    other = functional_variant(function)
    if other is None:
        raise NotImplementedError(
            f"{function._opname} with operands that are placed otherwise than the tensor it changes: bring them to its "
            "placements first, y.redistribute(x.placements)"
        )
    return Template(0, functional_op=other)


def _works_on_plain_tensors(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation works in plain torch, so that a failure is DTensor's fault and not the user's."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    try:
        run_on_plain_tensors(function, args, kwargs)
    except Exception:
        return False
    return True


def _has_wrong_dtype(function: Any, args: Any, kwargs: Any, results: Sequence[DTensor]) -> bool:
    """Whether a Partial result of DTensor has another dtype than torch's result.

    DTensor divides integers beside a partial sum by the number of ranks.
    """
    partial_results = [leaf for leaf in results if any(placement.is_partial() for placement in leaf.placements)]
    if len(partial_results) != 1 or not has_tag(function, torch.Tag.pointwise):
        return False
    try:
        expected = run_on_plain_tensors(function, args, kwargs)
    except Exception:
        return False
    return isinstance(expected, torch.Tensor) and expected.dtype != partial_results[0].dtype


def _view_kind(function: Any, inputs: Sequence[Any], run: MetaRun, results: list[Any]) -> tuple[bool, bool]:
    """Return whether the results are views of the first input, and whether they share its storage, as views should."""
    if function in (as_global, as_local):
        return True, True
    if not inputs or not makes_views(function):
        return False, False
    source = storage_id(run.empties[id(inputs[0])])
    return True, all(storage_id(result) == source for result in results if isinstance(result, torch.Tensor))


def _placeholder_of(leaf: Any) -> Any:
    if getattr(leaf, "_spec", None) is not None:
        return TENSOR
    return FLOAT if leaf.__class__ is float else leaf


def _default_dtype_name(inputs: Sequence[Any], outputs: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the default dtype where the ranks need it; None: their usual one is right."""
    default = torch.get_default_dtype()
    if default is torch.float32 or kwargs.get("dtype") is not None:
        return None
    if any(tensor._spec.is_inexact for tensor in inputs):
        return None
    made = any(isinstance(output, TensorSpec) and output.is_inexact for output in outputs)
    return str(default).removeprefix("torch.") if made else None
