"""Views that the mesh can only make as copies, but that behave like views.

`x[2:5]` of a tensor whose rows are sharded is a copy on the ranks. Its handle is a `FunctionalView`: it knows its base,
is read again if the base has changed since, and writes its own changes back, each rank into its own shard. Strides
define which elements it has: those of the same view of an unsharded tensor.

Knows handles and plans; operations are issued by functions that are passed to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.controller.sigint import defer_sigint
from meshbook.rank.tensors import operators
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import TensorHandle, TensorSpec, contiguous_strides

aten = torch.ops.aten

# Views whose elements differ from those of their base.
_VALUE_CHANGING_VIEWS = (aten._conj.default, aten._neg_view.default)


@dataclass(frozen=True)
class ViewMeta:
    """The elements of a tensor that a view has: its strides and offset in that tensor, as if this were not sharded.

    Attributes:
        box: for each dim of the tensor, the view's dim (None: it has none), the first index, the step and the length;
            None altogether where the elements are no such box (a diagonal, a part of a flattened tensor).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    box: tuple[tuple[int | None, int, int, int], ...] | None


class FunctionalView:
    """The handle of such a view, or of a view of one.

    Attributes:
        base: the tensor that it is a view of.
        view_meta: its elements in that tensor; None: it shares the base's storage.
        version_counter: shared by the base and all its views.
    """

    is_functional_view = True

    def __init__(self, handle: Any, base: Any, view_meta: ViewMeta | None, regenerate: Callable[[], Any]) -> None:
        self._copy: TensorHandle = handle._copy if handle.is_functional_view else handle
        self.spec: TensorSpec = handle.spec
        self.base, self.view_meta, self._regenerate = base, view_meta, regenerate
        self.version_counter: list[int] = base._handle.get_version_counter()
        self.seen_version = self.version_counter[0]

    @property
    def id(self) -> int:
        """The id of an up-to-date copy, which is read again if the base has changed since."""
        now = self.version_counter[0]
        if self.seen_version != now:
            fresh = self._regenerate()
            self.seen_version = now
            self._copy = fresh._copy if fresh.is_functional_view else fresh
        return self._copy.id

    def get_version_counter(self) -> list[int]:
        return self.version_counter


def track_views(
    results: Sequence[Any],
    base: Any,
    base_alias: Any,
    function: Any,
    args: Any,
    kwargs: Any,
    *,
    shares_storage: bool,
    run_op: Any,
) -> None:
    """Make these results of a view of `base` functional views of it.

    Args:
        base_alias: another object for the tensor that `base` is now; `base` may become another (`unsqueeze_`,
            `data =`).
        shares_storage: they share the storage of `base`, which is a functional view itself.
        run_op: runs the operation again, (function, args, kwargs) -> its results.
    """
    args = tuple(base_alias if arg is base else arg for arg in args)

    def regenerate(at: int) -> Any:
        found = run_op(function, args, kwargs)
        return (found[at] if isinstance(found, (list, tuple)) else found)._handle

    view_metas = [None] * len(results) if shares_storage else _view_metas(function, base_alias._spec, args, kwargs)
    for at, tensor in enumerate(results):
        view_meta = view_metas[at] if at < len(view_metas) else None
        if not shares_storage and view_meta is None:  # its elements are not those of the base
            continue
        tensor._handle = FunctionalView(tensor._handle, base_alias, view_meta, functools.partial(regenerate, at))


def _view_metas(function: Any, spec: TensorSpec, args: Any, kwargs: Any) -> list[ViewMeta | None]:
    if function in _VALUE_CHANGING_VIEWS:
        return []
    with defer_sigint(), _disable_current_modes(), torch.no_grad():
        meta_tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        found = function(meta_tensor, *args[1:], **(kwargs or {}))
    views = found if isinstance(found, (list, tuple)) else [found]
    return [
        ViewMeta(tuple(view.shape), view.stride(), int(view.storage_offset()), box_of(spec.shape, view))
        if view.dtype == spec.dtype
        else None
        for view in views
    ]


def box_of(shape: Sequence[int], view: torch.Tensor) -> tuple[tuple[int | None, int, int, int], ...] | None:
    """Return, for each dim of a contiguous tensor of that shape: the view's dim, first index, step and length."""
    steps, remainder = contiguous_strides(tuple(shape)), int(view.storage_offset())
    box: list[tuple[int | None, int, int, int]] = []
    for step in steps:
        box.append((None, remainder // step, 1, 1))
        remainder %= step
    for dim, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if length == 1:
            continue
        for at, step in enumerate(steps):
            taken, first, _, _ = box[at]
            fits = stride > 0 and stride % step == 0 and first + stride // step * (length - 1) < shape[at]
            if taken is None and shape[at] > 1 and fits:
                box[at] = (dim, first, stride // step, length)
                break
        else:
            return None
    return tuple(box)


# ---------------------------------------------------------------------------------------------------------------------
# Writing back


def check_disjoint(tensors: Sequence[Any], name: str) -> None:
    """Check that the tensors an operation changes, where they are copies of one storage, have no common element.

    Raises:
        NotImplementedError: they may have one.
    """
    handles = [tensor._handle for tensor in tensors]
    if not any(handle.is_functional_view for handle in handles):
        return
    for one, other in itertools.combinations(handles, 2):
        if (
            not (one.is_functional_view or other.is_functional_view)
            or one.get_version_counter() is not other.get_version_counter()
        ):
            continue
        siblings = one.is_functional_view and other.is_functional_view and one.base._handle is other.base._handle
        if not (
            siblings and (one.view_meta is other.view_meta is None or _are_disjoint(one.view_meta, other.view_meta))
        ):
            raise NotImplementedError(
                f"{name.partition('::')[2]} would change parts of one tensor that may have elements in common, and cut "
                "across a dim that lies in pieces; change one after the other (foreach=False)"
            )


def _are_disjoint(one: ViewMeta | None, other: ViewMeta | None) -> bool:
    if one is None or other is None or one.box is None or other.box is None:
        return False
    return any(
        first + step * (count - 1) < start or start + stride * (number - 1) < first
        for (_, first, step, count), (_, start, stride, number) in zip(one.box, other.box, strict=True)
    )


def write_back(tensor: Any, redistribute: Callable[[Any, Any], Any]) -> None:
    """Write a change of a functional view into its base, and so on along the chain of bases.

    Args:
        redistribute: (tensor, placements) -> the tensor with these placements.
    """
    handle = tensor._handle
    chain = []
    while handle.is_functional_view:
        handle.seen_version = handle.version_counter[0]  # the change came from it: no need to read it again
        chain.append((tensor, handle))
        tensor = handle.base
        handle = tensor._handle
    for tensor, handle in chain:
        if handle.view_meta is not None:
            _write_to_base(handle.base, tensor, handle.view_meta, redistribute)


def _write_to_base(base: Any, tensor: Any, view_meta: ViewMeta, redistribute: Callable[[Any, Any], Any]) -> None:
    if 0 in view_meta.size:
        return
    placements = _placements_for_write(base._spec, view_meta)
    if tensor._spec.placements != placements:
        tensor = redistribute(tensor, placements)
    engine: TensorEngine = tensor._spec.engine
    key = ("write_view", base._spec, tensor._spec, view_meta)
    args = (operators.TENSOR, operators.TENSOR, view_meta.box, view_meta.size, view_meta.stride, view_meta.offset)
    template = engine.templates.find_or_plan(key, engine.planner.plan_rank_function, "write_view", args, mutates=(0,))
    engine.emit([template.number, base._handle.id, tensor._handle.id], capture_call_site())


def _placements_for_write(base_spec: TensorSpec, view_meta: ViewMeta) -> tuple[Any, ...]:
    """Return the placements of the view that give every rank the elements of its own shard of the base."""
    placements: list[Any] = []
    for placement in base_spec.placements or ():
        if placement.is_replicate() or placement.is_partial():
            placements.append(placement)
        else:
            is_full = view_meta.box is not None and operators.is_full_span(
                view_meta.box[placement.dim], base_spec.shape[placement.dim]
            )
            placements.append(Shard(view_meta.box[placement.dim][0]) if is_full else Replicate())  # type: ignore[index]
    return tuple(placements)
