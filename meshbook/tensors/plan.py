"""What an operation comes to, found out once for each kind of operands, without the ranks.

The operation is run on DTensors that have shapes and no data, on a mesh of as many places whose groups carry nothing.
That gives shape, stride, dtype and placements of the results, and raises here, at the user's line, whatever is wrong
with shapes or placements. What it found is a `Template`; equal operations find it again by a dictionary look-up.
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
from meshbook.mesh import MeshAxes
from meshbook.placement import Shard as Cut
from meshbook.placement import local_spans
from meshbook.rank.tensors import rules
from meshbook.rank.tensors.calls import (
    FLOAT,
    MESH,
    TENSOR,
    Reduced,
    Sent,
    Whole,
    as_global,
    as_local,
    may_stay,
    name_of,
    overwrites,
)

aten = torch.ops.aten

_group_numbers = itertools.count()

# Operations that DTensor computes shard by shard although an element needs what lies in other shards.
_SCANS = {
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    aten.flip.default, aten.roll.default, aten.median.dim,
    aten.kthvalue.default, aten.mode.default, aten.renorm.default,
}  # fmt: skip


# Places of elements: of equal ones DTensor takes the first rank's, and it fails where pieces differ in length.
_PLACES = {aten.argmax.default, aten.argmin.default}

# What DTensor asks each part of a sum, or of a product, as if the sum were not 0 where a part is not.
_TRUTHS = {aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims}

# torch's words for what Meshbook says in the mesh's.
_UNEVEN = re.compile(
    r"output dimension (?P<dim>\d+) \(size (?P<length>\d+)\) is not evenly divisible by mesh dimension (?P<axis>\d+)"
)
_ALONG = re.compile(
    r"along the sharded dimension|without redistribution, which is disallowed|redistribute the tensor before"
)

# What gives other tensors on some machines than it says here, and what counts on where elements lie in memory.
_NOT_ON_THE_WHOLE = {aten.mkldnn_rnn_layer.default, aten.as_strided.default}

# What DTensor's rules fail at where a dim has length 0: of a view they look for a divisor of it without end, and a
# squeeze drops it.
_NOT_OF_NOTHING = {
    aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip

# What can only be computed, and not be told the shape of without data: it is that of this input.
_SHAPED_AS = {
    aten.multi_margin_loss_backward.default: 1, aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1, aten._sample_dirichlet.default: 0, aten._dirichlet_grad.default: 0,
    aten._standard_gamma.default: 0, aten._standard_gamma_grad.default: 1, aten.binomial.default: 0,
    aten.poisson.default: 0,
}  # fmt: skip

# Reductions, and which of their arguments are the dims. None at all are all of them; DTensor leaves some undone then.
_REDUCTIONS = {
    aten.sum.dim_IntList: 1, aten.nansum.default: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1,
    aten.logsumexp.default: 1, aten.count_nonzero.dim_IntList: 1, aten.var.correction: 1, aten.std.correction: 1,
    aten.var_mean.correction: 1, aten.std_mean.correction: 1, aten.linalg_vector_norm.default: 2,
    aten.norm.ScalarOpt_dim: 2, aten.norm.ScalarOpt_dim_dtype: 2,
}  # fmt: skip

# What may be done on each part of a sum by itself, by name.
_LINEAR = ("mul", "div", "neg", "positive", "clone", "_to_copy", "to", "copy", "zero", "conj", "_conj_physical")

# What is right on empty pieces, too, beside what works on each element by itself.
_PIECE_BY_PIECE = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.sum.default, aten.sum.dim_IntList, aten.clone.default,
    aten._to_copy.default, aten.copy_.default, aten.fill_.Scalar, aten.zero_.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.detach.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip

# What DTensor computes with pieces of one operand and all of the other.
_ALL_ALIKE = {aten.linalg_solve_triangular.default}

# Convolutions, and which of their tensors is the image; the weight is the next.
_CONVOLUTIONS = {aten.convolution.default: 0, aten.convolution_backward.default: 1}


class Spec:
    """Everything about a tensor but its data. Interned: equal specs of an engine are one object.

    Attributes:
        shape, stride, offset: of the whole tensor; of each rank's own where `placements` is None.
        placements: torch's, one per axis of the mesh; None: the per-rank view.
        copied: a view that shares nothing: DTensor had to copy.
        engine: whose tensor it is.
        making: what torch is given to make such a tensor; None until there is one.
    """

    __slots__ = (
        "__weakref__", "copied", "device", "dtype", "engine", "making", "offset", "placements", "shape", "stride",
    )  # fmt: skip

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    placements: tuple[Any, ...] | None
    copied: bool
    engine: Any
    device: torch.device
    making: tuple[Any, ...] | None

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {words_of(self.placements)}"


@dataclass(slots=True)
class Template:
    """A kind of operation, planned.

    Attributes:
        number: by which the ranks know it.
        single: the one new tensor it makes, where that is all of its result; the common case.
        outputs: per result a Spec (new), the index of an input (changed in place), or None.
        returns: "none", "one", "list", "tuple".
        first: placements that inputs must be brought to before, by index; empty where they are as they should be.
        mutates: indices of inputs that are changed.
        is_view: results are views of the first input.
        shares: ... and share its storage.
        instead: the operation that makes a new tensor, to be copied into the first input, where DTensor would change
            only a part of it.
        seeded: draws random numbers; its last float is the seed.
        body: what the ranks are told of it.
        overwrites: nothing is left of what it changes.
    """

    number: int
    single: Spec | None
    outputs: tuple[Spec | int | None, ...]
    returns: str
    first: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    mutates: tuple[int, ...] = ()
    instead: Any = None
    seeded: bool = False
    is_view: bool = False
    shares: bool = False
    special: bool = False  # anything of the above: off the hot path
    quick: Spec | None = field(init=False)  # `single`, where that is all there is to do
    communicates: bool = False
    body: bytes = b""
    name: str = ""
    overwrites: bool = False

    def __post_init__(self) -> None:
        self.quick = None if self.special else self.single


class Planner:
    """Plans for one mesh. Thread-safe as far as the interpreter is: two threads may plan the same thing twice."""

    def __init__(self, axes: MeshAxes, engine: Any) -> None:
        rules.install()
        self.axes, self.engine = axes, engine
        self.device = torch.device("cpu")  # what wrappers report; any other would make torch look for its backend
        self.mesh = _empty_mesh(axes)
        self._specs: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)  # 0 frees ids

    def spec(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        placements: Any,
        copied: bool = False,
    ) -> Spec:
        """The one spec of these."""
        key = (tuple(shape), tuple(stride), offset, dtype, placements, copied)
        found = self._specs.get(key)
        if found is None:
            found = Spec()
            found.shape, found.stride, found.offset, found.dtype, found.placements, found.copied = key
            found.engine, found.device, found.making = self.engine, self.device, None
            self._specs[key] = found
        return found

    def copied(self, spec: Spec) -> Spec:
        """The same, of a view that is a copy."""
        return self.spec(spec.shape, spec.stride, spec.offset, spec.dtype, spec.placements, True)

    def spec_of(self, tensor: torch.Tensor, placements: Any) -> Spec:
        """The spec of a contiguous tensor like this local one."""
        return self.spec(tensor.shape, contiguous(tensor.shape), 0, tensor.dtype, placements)

    def empty(self, spec: Spec) -> torch.Tensor:
        """A tensor like that without data; a DTensor, unless the spec is per rank."""
        if spec.placements is None:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        local = local_shape(spec.shape, spec.placements, self.axes)
        strides = list(spec.stride) if local == tuple(spec.shape) else _dense(local, spec)
        piece = torch.empty_strided(local, strides, dtype=spec.dtype, device="meta")
        meta = TensorMeta(torch.Size(spec.shape), tuple(spec.stride), spec.dtype)
        place = DTensorSpec(self.mesh, spec.placements, tensor_meta=meta)
        return DTensor(piece, place, requires_grad=False)  # type: ignore[no-untyped-call]

    def plan(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        """What this operation comes to.

        Args:
            args, kwargs: the operation's own, with RemoteTensors (anything with a `_spec`) where tensors go.
            inputs: those tensors, in order.

        Raises:
            NotImplementedError: DTensor has no rule for it; the text says which way there is.
            RuntimeError and others: torch's own, about shapes and dtypes.
        """
        template = self._plan(function, args, kwargs, inputs)
        if template.first and {at for at, _ in template.first}.intersection(_mutated(function, args, kwargs, inputs)):
            return _not_in_place(function)  # what is brought elsewhere is a copy
        return template

    def _plan(self, function: Any, args: Any, kwargs: dict[str, Any], inputs: Sequence[Any]) -> Template:
        for tensor in inputs:
            if tensor._spec.engine is not self.engine:
                raise ValueError(
                    f"{name_of(function)} has operands of two meshes, {self.axes} and {tensor._spec.engine.axes}; "
                    "bring one over: meshbook.distribute(x.full_tensor(), mesh, ...)"
                )
        # A PlacementError, for Python would take a TypeError for "try the other operand".
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
        first = _to_be_moved(function, args, inputs, self.mesh) or self._untrusted(function, inputs)
        if first:
            return Template(0, None, (), "none", first=first, special=True)
        if (
            function in _NOT_OF_NOTHING
            and 0 in inputs[0]._spec.shape
            and (found := self._on_the_whole(function, args, kwargs, inputs))
        ):
            return found
        args = _with_all_dims(function, args)
        empties: dict[int, Any] = {}

        def empty_of(leaf: Any) -> Any:
            spec = getattr(leaf, "_spec", None)
            if spec is not None:
                if id(leaf) not in empties:
                    empties[id(leaf)] = self.empty(spec)
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

        rules.tell_numbers_apart(function)
        watch = _Watch(function)
        try:
            # Whatever watches the user's operations, `mesh.activate()` for one, has nothing to do with these.
            with _disable_current_modes(), torch.no_grad(), rules.quiet(), _as_rank_0(), watch:
                empty_args, empty_kwargs = pytree.tree_map(empty_of, (args, kwargs))
                results = function(*empty_args, **empty_kwargs)
        except Exception as error:
            if "in-place operations that require placement changes" in str(error):
                return _not_in_place(function)
            # Nobody writes _unsafe_view: it is inside a matmul, where the user can do nothing about it.
            uneven = _UNEVEN.search(str(error)) is not None and function is not aten._unsafe_view.default
            if _ALONG.search(str(error)) is not None and not uneven and (moves := self._made_whole(inputs[:1])):
                return Template(0, None, (), "none", first=moves, special=True)
            if _lacks_a_rule(function, error) or (not uneven and _goes_on_one_process(function, args, kwargs)):
                if (other := _that_makes_a_new_one(function)) is not None:
                    return Template(0, None, (), "none", instead=other, special=True)
                if found := self._on_the_whole(function, args, kwargs, inputs):
                    return found
            raise self._told(function, error, inputs) from None
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, DTensor)]
        unary = len(inputs) == 1 and torch.Tag.pointwise in getattr(function, "tags", ())
        linear = not unary or all(_is_linear(function, place) for leaf in made for place in leaf.placements)
        trusted = linear and not self._is_other_kind(function, args, kwargs, made)
        if moves := _summed(inputs) if _is_coarser(inputs, made) else () if trusted else self._made_whole(inputs):
            return Template(0, None, (), "none", first=moves, special=True)
        if isinstance(function, torch._ops.OpOverload) and any(
            not may_stay(place, leaf.dtype) for leaf in made for place in leaf.placements
        ):
            for place in itertools.chain.from_iterable(leaf.placements for leaf in made):
                if hasattr(place, "mask_buffer"):  # DTensor keeps it for all operations of this kind
                    place.mask_buffer.release_mask()
            return self._plan(Reduced(function), args, kwargs, inputs)
        if watch.missed([empties[id(inputs[at])] for at in _mutated(function, args, kwargs, inputs)]):
            return _not_in_place(function)
        return self._template(function, args, kwargs, inputs, empties, results, watch.communicates)

    def _on_the_whole(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Template | None:
        """An operation that DTensor has no rule for, done by every rank on all of every operand, if that can be."""
        everywhere = (Replicate(),) * self.mesh.ndim
        if not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable or not inputs:
            return None
        if function in _NOT_ON_THE_WHOLE:
            return None
        if any(tensor._spec.placements is None for tensor in inputs):
            return None
        empties = {
            id(tensor): self.empty(
                self.spec(tensor._spec.shape, tensor._spec.stride, 0, tensor._spec.dtype, everywhere)
            )
            for tensor in inputs
        }
        whole = Whole(function)
        try:
            with _disable_current_modes(), torch.no_grad(), rules.quiet():
                given = pytree.tree_map(lambda leaf: empties.get(id(leaf), leaf), (args, kwargs))
                shaped_as = _SHAPED_AS.get(function)
                results = whole(*given[0], **given[1]) if shaped_as is None else torch.empty_like(given[0][shaped_as])
        except Exception:
            return None
        if not all(isinstance(leaf, (DTensor, type(None))) for leaf in pytree.tree_leaves(results)):
            return None
        if moves := self._made_whole(inputs):
            return Template(0, None, (), "none", first=moves, special=True)
        return self._template(whole, args, kwargs, inputs, empties, results, communicates=False)

    def _made_whole(self, inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """What brings to every rank all of those of these tensors that are not there yet."""
        everywhere = (Replicate(),) * self.mesh.ndim
        return tuple((at, everywhere) for at, tensor in enumerate(inputs) if tensor._spec.placements != everywhere)

    def _untrusted(self, function: Any, inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Placements that inputs need first, because DTensor computes wrongly with theirs, whatever the operation:
        parts that may not stay, and pieces of which some are empty. A rank with an empty one raises what others do not,
        or takes no part in a collective."""
        if not isinstance(function, torch._ops.OpOverload):
            return ()
        safe = torch.Tag.pointwise in function.tags or function in _PIECE_BY_PIECE or "foreach" in function._opname
        moves: list[tuple[int, tuple[Any, ...]]] = []
        for at, tensor in enumerate(inputs):
            spec = tensor._spec
            places = spec.placements
            if places is None:
                continue
            empty = set() if safe else {dim for dim in range(len(spec.shape)) if self._lacks_rows(spec, dim)}
            wanted = tuple(
                Replicate() if not may_stay(place, spec.dtype) or (_is_cut(place) and place.dim in empty) else place
                for place in places
            )
            if wanted != places:
                moves.append((at, wanted))
        return tuple(moves)

    def _is_other_kind(self, function: Any, args: Any, kwargs: Any, made: Sequence[Any]) -> bool:
        """Whether DTensor has made another dtype of parts than torch does. Integers beside parts of a sum it divides by
        the number of ranks."""
        in_parts = [leaf for leaf in made if any(place.is_partial() for place in leaf.placements)]
        if len(in_parts) != 1 or torch.Tag.pointwise not in getattr(function, "tags", ()):
            return False
        try:
            with _disable_current_modes(), torch.no_grad():
                whole = function(*(pytree.tree_map(_without_data, args)), **pytree.tree_map(_without_data, kwargs))
        except Exception:
            return False
        return isinstance(whole, torch.Tensor) and whole.dtype != in_parts[0].dtype

    def _lacks_rows(self, spec: Spec, dim: int) -> bool:
        """Whether some rank has no row of this dim."""
        ranks = 1
        for place, size in zip(spec.placements or (), self.mesh.shape, strict=True):
            ranks *= size if _is_cut(place) and place.dim == dim else 1
        if ranks == 1:
            return False
        last = local_shape(spec.shape, spec.placements or (), self.axes, self.axes.size - 1)
        return last[dim] == 0

    def _unlike_means(
        self, function: Any, inputs: Sequence[Any], placements: Sequence[Any]
    ) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """What makes inputs whole along an axis where DTensor would take the mean of means of pieces unlike in size."""
        means = [axis for axis, place in enumerate(placements) if getattr(place, "reduce_op", None) == "avg"]
        for axis in means if isinstance(function, torch._ops.OpOverload) else ():
            if all(tensor._spec.placements[axis].is_replicate() for tensor in inputs):  # DTensor has cut it by itself
                return self._made_whole(inputs)
        moves: list[tuple[int, tuple[Any, ...]]] = []
        for at, tensor in enumerate(inputs) if means else ():
            placed = list(tensor._spec.placements)
            for axis in means:
                place = placed[axis]
                if place.is_shard() and tensor._spec.shape[place.dim] % self.mesh.shape[axis]:
                    placed[axis] = Replicate()
            if placed != list(tensor._spec.placements):
                moves.append((at, tuple(placed)))
        return tuple(moves)

    def plan_own(self, name: str, args: tuple[Any, ...], output: Spec) -> Template:
        """A template of a function of ours that makes one tensor out of none, whose spec the caller knows."""
        number = next(self._numbers)
        sent = Sent(number, f"meshbook::{name}", args, {}, (-1,), "one", (), False, False)
        return Template(number, output, (output,), "one", body=pickle.dumps(sent, 5), name=sent.function)

    def plan_none(self, name: str, args: tuple[Any, ...]) -> Template:
        """A template of a function of ours that takes no tensor and makes none."""
        number = next(self._numbers)
        sent = Sent(number, f"meshbook::{name}", args, {}, (), "none", (), False, False)
        return Template(number, None, (), "none", body=pickle.dumps(sent, 5), name=sent.function)

    def _template(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Any],
        empties: dict[int, Any],
        results: Any,
        communicates: bool,
    ) -> Template:
        given = {id(empty): tensor for tensor in inputs if (empty := empties.get(id(tensor))) is not None}
        several = isinstance(results, (tuple, list))
        flat = list(results) if several else [] if results is None else [results]
        outputs: list[Spec | int | None] = []
        for result in flat:
            if id(result) in given:
                outputs.append(next(at for at, tensor in enumerate(inputs) if tensor is given[id(result)]))
            elif isinstance(result, DTensor):
                placements = tuple(result.placements)
                if any(_is_strided(place) for place in placements):
                    # A dim made of a cut inner dim: DTensor's backward of such a piece is wrong, so it is made whole.
                    whole = tuple(
                        Replicate() if _is_strided(after) else before
                        for before, after in zip(inputs[0]._spec.placements, placements, strict=True)
                    )
                    return Template(0, None, (), "none", first=((0, whole),), special=True)
                if moves := self._unlike_means(function, inputs, placements):
                    return Template(0, None, (), "none", first=moves, special=True)
                stride = _strides_as_laid_out(result)
                outputs.append(self.spec(result.shape, stride, 0, result.dtype, placements))
            elif isinstance(result, torch.Tensor):
                outputs.append(self.spec(result.shape, result.stride(), 0, result.dtype, None))
            elif result is None:
                outputs.append(None)
            else:
                raise NotImplementedError(f"{name_of(function)} gives a {type(result).__name__}, not tensors")
        mutates = _mutated(function, args, kwargs, inputs)
        is_view, shares = _sharing(function, inputs, empties, flat)
        copied = is_view and (not shares or inputs[0]._spec.copied)
        if copied:
            outputs = [self.copied(output) if isinstance(output, Spec) else output for output in outputs]
        seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()) and bool(inputs or flat)
        if seeded and (moves := _drawn_alike(inputs, outputs)):
            return Template(0, None, (), "none", first=moves, special=True)
        returns = (
            ("list" if isinstance(results, list) else "tuple") if several else "none" if results is None else "one"
        )
        single = outputs[0] if returns == "one" and isinstance(outputs[0], Spec) else None

        def placeholder(leaf: Any) -> Any:
            if getattr(leaf, "_spec", None) is not None:
                return TENSOR
            return FLOAT if leaf.__class__ is float else leaf

        number = next(self._numbers)
        sent_args, sent_kwargs = pytree.tree_map(placeholder, (tuple(args), dict(kwargs)))
        sent = Sent(
            number=number,
            function=name_of(function),
            args=sent_args,
            kwargs=sent_kwargs,
            outputs=tuple(-1 if isinstance(output, Spec) else output for output in outputs),
            returns={"list": "many", "tuple": "many"}.get(returns, returns),
            mutates=mutates,
            communicates=communicates,
            seeded=seeded,
            default=_default_of(inputs, outputs, kwargs),
            overwrites=bool(mutates) and overwrites(function),
            views=is_view and shares,
        )
        return Template(
            number=number,
            single=single,
            outputs=tuple(outputs),
            returns=returns,
            mutates=mutates,
            seeded=seeded,
            special=copied or bool(mutates) or seeded,
            is_view=is_view,
            shares=shares,
            communicates=communicates,
            body=pickle.dumps(sent, 5),
            name=name_of(function),
            overwrites=sent.overwrites,
        )

    def _told(self, function: Any, error: Exception, inputs: Sequence[Any]) -> Exception:
        """torch's complaint, about the tensors as the user knows them."""
        text = str(error).strip().split("\n\nSharding propagation failed")[0].strip()
        name = name_of(function)
        operands = ", ".join(repr(tensor._spec) for tensor in inputs[:4])
        where = f"on a mesh of {self.axes}"
        plain = name.partition("::")[2].partition(".")[0]
        if text.startswith("aten.nonzero") and plain == "index":
            return NotImplementedError(
                f"x[mask] of {operands} {where}: the shape of its result depends on the data, which is on the ranks. "
                "torch.where(mask, x, other) keeps the shape, and x[mask] = value changes x; or run it where the data "
                "is, mesh.execute(fn, x), or on the whole tensor here, x.full_tensor()"
            )
        if function is aten.mkldnn_rnn_layer.default:
            return NotImplementedError(
                f"lstm of {operands} {where}: on a CPU it is one operation of oneDNN's, for which DTensor has no rule. "
                "`with torch.backends.mkldnn.flags(enabled=False):` it is made of others; "
                "meshbook.module_to_mesh(module, mesh) sees to that by itself"
            )
        if _lacks_a_rule(function, error):
            return NotImplementedError(
                f"{plain} of {operands} {where}: DTensor has no rule for it (or the shape of its result depends on "
                f"data). Ways round: run it on the ranks, mesh.execute(fn, x); or on the whole tensor here, "
                f"x.full_tensor(); or first bring x to every rank, x.redistribute([Replicate()] * {self.mesh.ndim})"
            )
        uneven = _UNEVEN.search(text)
        if uneven is not None:
            dim, length, axis = uneven["dim"], int(uneven["length"]), int(uneven["axis"])
            size = self.axes.shape[axis]
            return PlacementError(
                f"{plain} of {operands}: dim {dim} of {length} rows cannot be sharded evenly over "
                f"{self.axes.names[axis]}={size}: {length} = {size} * {length // size} + {length % size}. "
                f"Redistribute the tensor first so that {self.axes.names[axis]} cuts another dim, or none"
            )
        text = f"{text} ({plain} of {operands} {where})"
        try:
            return type(error)(text)
        except Exception:
            return RuntimeError(text)


# ---------------------------------------------------------------------------------------------------------------------


def _to_be_moved(
    function: Any, args: Any, inputs: Sequence[Any], mesh: DeviceMesh
) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """Placements that inputs need first, where DTensor would compute a wrong number as they are."""
    if function in _CONVOLUTIONS:
        # DTensor's own way takes shards as they come, and trades edges by the ranks of the whole world.
        image = _CONVOLUTIONS[function]
        places = inputs[image]._spec.placements
        if places is None:
            return ()
        length = inputs[image]._spec.shape[0]
        rows = tuple(  # a rank without a row would fail, or be believed
            place if isinstance(place, Shard) and place.dim == 0 and _all_have_some(length, size) else Replicate()
            for place, size in zip(places, mesh.shape, strict=True)
        )
        # The images and the gradient of what came out by rows; weight and bias are needed whole.
        wanted = [rows if at <= image else (Replicate(),) * mesh.ndim for at in range(len(inputs))]
        return tuple(
            (at, places)
            for at, (tensor, places) in enumerate(zip(inputs, wanted, strict=True))
            if tensor._spec.placements != places
        )
    if function in _ALL_ALIKE and len({tensor._spec.placements for tensor in inputs}) > 1:
        everywhere = (Replicate(),) * mesh.ndim
        return tuple((at, everywhere) for at, tensor in enumerate(inputs) if tensor._spec.placements != everywhere)
    if function in _TRUTHS:
        return _summed(inputs[:1])
    if function is aten.embedding.default and Shard(0) in (inputs[0]._spec.placements or ()):
        # DTensor cuts the indices as it likes then, and now and then masks rows by those of another cut.
        weight, indices = (tensor._spec.placements for tensor in inputs)
        uncut = tuple(
            there if here.is_replicate() else Replicate() for here, there in zip(weight, indices, strict=True)
        )
        return ((1, uncut),) if uncut != indices else ()
    if (function in _SCANS or function in _PLACES) and inputs and inputs[0]._spec.placements is not None:
        spec = inputs[0]._spec
        rank = max(len(spec.shape), 1)
        named = args[1] if len(args) > 1 else None
        dims = {dim % rank for dim in (named if isinstance(named, (list, tuple)) else [named]) if isinstance(dim, int)}
        if function in (aten.roll.default,):
            dims = {dim % rank for dim in (args[2] if len(args) > 2 else range(rank))}
        if function in _PLACES and named is None:
            dims = set(range(rank))
        if function is aten.kthvalue.default or function is aten.renorm.default:
            dims = set(range(rank))
        places = tuple(
            Replicate() if place.is_partial() or (_is_cut(place) and place.dim % rank in dims) else place
            for place in spec.placements
        )
        if places != spec.placements:
            return ((0, places),)
    return ()


def _summed(inputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """What sums up those of these tensors that are in parts."""
    return tuple(
        (at, tuple(Replicate() if place.is_partial() else place for place in tensor._spec.placements))
        for at, tensor in enumerate(inputs)
        if any(place.is_partial() for place in tensor._spec.placements or ())
    )


def _is_coarser(inputs: Sequence[Any], made: Sequence[Any]) -> bool:
    """Whether parts of a sum become parts of a dtype with fewer digits: what those lose, the sum need not have lost."""
    digits = [
        torch.finfo(tensor._spec.dtype).eps
        for tensor in inputs
        if _is_inexact(tensor._spec) and any(place.is_partial() for place in tensor._spec.placements or ())
    ]
    return bool(digits) and any(
        (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        and torch.finfo(leaf.dtype).eps > min(digits)
        and any(place.is_partial() for place in leaf.placements)
        for leaf in made
    )


def _drawn_alike(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """What makes the first input whole along axes where the result is: ranks draw by the shards that they are given,
    and would draw differently what DTensor takes for the same."""
    made = next((output for output in outputs if isinstance(output, Spec)), None)
    if made is None or not inputs or made.placements is None:
        return ()
    given = inputs[0]._spec.placements
    wanted = tuple(
        Replicate() if after.is_replicate() and _is_cut(before) else before
        for before, after in zip(given, made.placements, strict=True)
    )
    return ((0, wanted),) if wanted != given else ()


def _all_have_some(length: int, ranks: int) -> bool:
    """Whether no rank's piece is empty when so many rows are cut as `torch.chunk` cuts them."""
    return -(-length // ranks) * (ranks - 1) < length


def _with_all_dims(function: Any, args: Any) -> Any:
    """A reduction's arguments, with the dims written out."""
    at = _REDUCTIONS.get(function)
    if at is None or len(args) < at or (len(args) > at and (args[at] is None or args[at])):
        return args
    return (*args[:at], list(range(args[0].dim())), *args[at + 1 :])


def _default_of(inputs: Sequence[Any], outputs: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The default dtype, where ranks must be told: theirs is the usual one."""
    default = torch.get_default_dtype()
    if default is torch.float32 or kwargs.get("dtype") is not None:
        return None
    if any(_is_inexact(tensor._spec) for tensor in inputs):
        return None
    made = any(isinstance(output, Spec) and _is_inexact(output) for output in outputs)
    return str(default).removeprefix("torch.") if made else None


def _is_inexact(spec: Spec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _lacks_a_rule(function: Any, error: Exception) -> bool:
    """Whether this is DTensor's way of saying so."""
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


def _goes_on_one_process(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch does the operation, so that it is DTensor's fault, and not the user's, if it does not."""
    if not isinstance(function, torch._ops.OpOverload):
        return False

    try:
        with _disable_current_modes(), torch.no_grad():
            whole_args, whole_kwargs = pytree.tree_map(_without_data, (args, kwargs))
            function(*whole_args, **whole_kwargs)
    except Exception:
        return False
    return True


def _without_data(leaf: Any) -> Any:
    """A tensor like this remote one, of all of its rows, without data; anything else as it is."""
    spec = getattr(leaf, "_spec", None)
    if spec is not None:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _that_makes_a_new_one(function: Any) -> Any:
    """The operation that gives a new tensor with what this one would have left in the tensor it changes, or None."""
    name = getattr(function, "_opname", "")
    if not name.endswith("_") or name.startswith("_foreach"):
        return None
    other = getattr(getattr(torch.ops, function.namespace), name.removesuffix("_"), None)
    if other is None:
        return None
    taken = [str(argument.type) for argument in function._schema.arguments]
    named = [function._overloadname, *other.overloads()]  # pow_.Scalar is pow.Tensor_Scalar's; pow.Scalar is another
    overloads = [getattr(other, name) for name in named if hasattr(other, name)]
    fitting = (one for one in overloads if [str(argument.type) for argument in one._schema.arguments] == taken)
    return next(fitting, None)


def _not_in_place(function: Any) -> Template:
    """The plan of an operation in place by way of the one that makes a new tensor."""
    other = _that_makes_a_new_one(function)
    if other is None:
        raise NotImplementedError(
            f"{function._opname} with operands that are placed otherwise than the tensor it changes: bring them to its "
            "placements first, y.redistribute(x.placements)"
        )
    return Template(0, None, (), "none", instead=other, special=True)


def _is_linear(function: Any, place: Any) -> bool:
    """Whether the operation, of one tensor and numbers, may be done on each of such parts by itself. What DTensor has
    cached of other operands now and then says so of `x + 0.5`, which then is added in every part."""
    name = function._opname.removesuffix("_").removeprefix("_foreach_")
    shifts = ("add", "sub", "rsub") if getattr(place, "reduce_op", None) == "avg" else ()
    return not place.is_partial() or name in (*_LINEAR, *shifts)


def _is_cut(place: Any) -> bool:
    return not place.is_replicate() and not place.is_partial()


def _is_strided(place: Any) -> bool:
    return type(place).__name__ == "_StridedShard"


def _mutated(function: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the inputs that the operation changes, by its schema."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    changed: list[int] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, (list, tuple)) else [value]:
            changed += [at for at, tensor in enumerate(inputs) if tensor is leaf]
    return tuple(dict.fromkeys(changed))


def _sharing(function: Any, inputs: Sequence[Any], empties: dict[int, Any], results: list[Any]) -> tuple[bool, bool]:
    """Whether the results are views of the first input, and whether they share its storage, as views should."""
    if function in (as_global, as_local):
        return True, True
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable or not inputs:
        return False, False
    if not any(output.alias_info is not None for output in schema.returns):
        return False, False
    source = _storage(empties[id(inputs[0])])
    return True, all(_storage(result) == source for result in results if isinstance(result, torch.Tensor))


def _storage(tensor: Any) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found: int = local.untyped_storage()._cdata
    return found


class _Planning(threading.local):
    """Whether this thread plans an operation."""

    now = False


_planning = _Planning()


@contextlib.contextmanager
def _as_rank_0() -> Iterator[None]:
    """DTensor asks for its own rank in the default group here and there; this process is in none."""
    before, _planning.now = _planning.now, True
    try:
        yield
    finally:
        _planning.now = before


class _Distributed:
    """`torch.distributed` as DTensor's convolutions see it, which have no other way to be told a rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: Any = None) -> int:
        return 0 if _planning.now and not dist.is_initialized() else dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        return 1 if _planning.now and not dist.is_initialized() else dist.get_world_size(group)


_tp_conv.dist = _Distributed()  # type: ignore[assignment, attr-defined]


class _EmptyMesh(DeviceMesh):
    """A mesh that this process is the first place of, whatever it is in."""

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether ranks would speak to each other."""

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False
        self._function = function
        schema = getattr(function, "_schema", None)
        arguments = schema.arguments if schema is not None and schema.is_mutable else ()
        self._written = [
            (place, argument.name)
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._changed: list[tuple[int, torch.Size]] = []  # storages and shapes that local operations wrote to

    def missed(self, tensors: Sequence[Any]) -> bool:
        """Whether one of these, which were to be changed, was not, or only a part of it was: DTensor brings operands
        to common placements, and then the operation changes a copy, or a shard, of what it was given."""
        wanted = [(_storage(tensor), tensor._local_tensor.shape) for tensor in tensors if isinstance(tensor, DTensor)]
        return bool(self._changed) and any(one not in self._changed for one in wanted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            self.communicates = True
        if func is self._function:
            for place, name in self._written:
                written = args[place] if place < len(args) else (kwargs or {}).get(name)
                for leaf in pytree.tree_leaves(written):
                    if isinstance(leaf, torch.Tensor):
                        self._changed.append((_storage(leaf), leaf.shape))
        return func(*args, **(kwargs or {}))


def _empty_mesh(axes: MeshAxes) -> DeviceMesh:
    """A DeviceMesh of these axes with groups that carry nothing. This process joins no group: `dist` stays unused."""
    mesh = _EmptyMesh(
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


def _dense(local: Sequence[int], spec: Spec) -> list[int]:
    """Strides of a piece of this shape that leaves no room between elements, its dims in the whole tensor's order."""
    order = sorted(range(len(local)), key=lambda dim: (-spec.stride[dim], -(spec.shape[dim] != 1), dim))
    strides, step = [0] * len(local), 1
    for dim in reversed(order):
        if spec.stride[dim] == 0 and local[dim] != 1:
            continue
        strides[dim] = step
        step *= max(local[dim], 1)
    return strides


def local_shape(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, place: int = 0) -> tuple[int, ...]:
    """The shape of what one rank holds, by its place in the mesh's order."""
    return tuple(stop - start for start, stop in spans_of(shape, placements, axes, place))


def spans_of(
    shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, place: int
) -> tuple[tuple[int, int], ...]:
    """The box that the rank at that place holds."""
    from meshbook.placement import Replicate as Whole

    cuts = [Cut(where.dim) if _is_cut(where) else Whole() for where in placements]
    point = []
    for size in reversed(axes.shape or (1,)):
        point.append(place % size)
        place //= size
    return local_spans(shape, cuts, axes.shape or (1,), tuple(reversed(point)))


def _strides_as_laid_out(tensor: DTensor) -> tuple[int, ...]:
    """Strides of the whole, in the order in which the pieces have theirs. DTensor now and then says others; torch here
    would then take a view for possible that the ranks cannot make."""
    said, local = tensor.stride(), tensor._local_tensor
    dims = [dim for dim in range(local.dim()) if local.shape[dim] > 1]
    order = sorted(dims, key=local.stride, reverse=True)
    if all(said[one] >= said[other] for one, other in itertools.pairwise(order)):
        return tuple(said)
    strides, step = [0] * local.dim(), 1
    for dim in reversed([dim for dim in range(local.dim()) if dim not in dims] + order):
        strides[dim] = step if dim not in dims or local.stride(dim) else 0
        step *= max(tensor.shape[dim], 1) if strides[dim] else 1
    return tuple(strides)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape, in items."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(int(length), 1)
    return tuple(reversed(strides))


def words_of(placements: Sequence[Any] | None) -> str:
    """Placements as people read them."""
    if placements is None:
        return "per rank"
    return f"({', '.join(str(place) for place in placements)})"
