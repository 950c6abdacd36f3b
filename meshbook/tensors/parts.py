"""Views that the mesh can only make as copies, and that behave as views all the same.

`x[2:5]` of a tensor whose rows lie in pieces is a copy on the ranks. Its handle is a `Part`: it knows of what it is a
part, is read again when that has changed since, and what is changed in it is written back, by every rank into its own
piece. Where its elements come from is said by strides: those of the same view of a tensor that lies in one piece.

Knows handles and plans; operations are issued by functions that it is given.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.controller.presses import uninterrupted
from meshbook.rank.tensors import calls
from meshbook.tensors.engine import Engine, Handle, here
from meshbook.tensors.plan import Spec, Template, contiguous

aten = torch.ops.aten

# Views whose elements are not those of what they are a view of.
_OTHER_ELEMENTS = (aten._conj.default, aten._neg_view.default)


@dataclass(frozen=True)
class Where:
    """Which elements of a tensor a view has: its strides and offset in that tensor as if it lay in one piece.

    Attributes:
        box: per dim of the tensor the view's dim (None: it has none), the first place, the step and how many; None
            altogether where the elements are no such box (a diagonal, a part of a flattened tensor).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    box: tuple[tuple[int | None, int, int, int], ...] | None


class Part:
    """In place of a handle: that of such a view, or of a view of one.

    Attributes:
        of: the tensor that it is a view of.
        where: its elements in that tensor; None: it shares the other's storage.
        changes: of what it is a view of, and of all its other views.
    """

    is_part = True

    def __init__(self, made: Any, of: Any, where: Where | None, again: Callable[[], Any]) -> None:
        self._copy: Handle = made._copy if made.is_part else made
        self.spec: Spec = made.spec
        self.of, self.where, self._again = of, where, again
        self.changes: list[int] = of._handle.family()
        self.seen = self.changes[0]

    @property
    def id(self) -> int:
        """Of the copy as it should be now: read again, if there have been changes since."""
        now = self.changes[0]
        if self.seen != now:
            fresh = self._again()
            self.seen = now
            self._copy = fresh._copy if fresh.is_part else fresh
        return self._copy.id

    def family(self) -> list[int]:
        return self.changes


def follow(
    made: Sequence[Any], of: Any, same: Any, function: Any, args: Any, kwargs: Any, *, shares: bool, issue: Any
) -> None:
    """Have these results of a view of `of` be parts of it.

    Args:
        same: another object for the tensor that `of` is now; `of` may become another (`unsqueeze_`, `data =`).
        shares: they share its storage; it is a part itself.
        issue: runs the operation again, (function, args, kwargs) -> its results.
    """
    args = tuple(same if arg is of else arg for arg in args)

    def again(at: int) -> Any:
        found = issue(function, args, kwargs)
        return (found[at] if isinstance(found, (list, tuple)) else found)._handle

    places = [None] * len(made) if shares else _places(function, same._spec, args, kwargs)
    for at, tensor in enumerate(made):
        where = places[at] if at < len(places) else None
        if not shares and where is None:  # of elements that are not in it
            continue
        tensor._handle = Part(tensor._handle, same, where, functools.partial(again, at))


def _places(function: Any, spec: Spec, args: Any, kwargs: Any) -> list[Where | None]:
    if function in _OTHER_ELEMENTS:
        return []
    with uninterrupted(), _disable_current_modes(), torch.no_grad():
        whole = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        found = function(whole, *args[1:], **(kwargs or {}))
    views = found if isinstance(found, (list, tuple)) else [found]
    return [
        Where(tuple(view.shape), view.stride(), int(view.storage_offset()), box_of(spec.shape, view))
        if view.dtype == spec.dtype
        else None
        for view in views
    ]


def box_of(shape: Sequence[int], view: torch.Tensor) -> tuple[tuple[int | None, int, int, int], ...] | None:
    """Per dim of a contiguous tensor of that shape: the view's dim, the first place, the step, how many."""
    steps, rest = contiguous(shape), int(view.storage_offset())
    box: list[tuple[int | None, int, int, int]] = []
    for step in steps:
        box.append((None, rest // step, 1, 1))
        rest %= step
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


def check_apart(tensors: Sequence[Any], name: str) -> None:
    """For an operation that changes several tensors: copies of what is one storage must have no element in common.

    Raises:
        NotImplementedError: they may have.
    """
    handles = [tensor._handle for tensor in tensors]
    if not any(handle.is_part for handle in handles):
        return
    for one, other in itertools.combinations(handles, 2):
        if not (one.is_part or other.is_part) or one.family() is not other.family():
            continue
        siblings = one.is_part and other.is_part and one.of._handle is other.of._handle
        if not (siblings and (one.where is other.where is None or _apart(one.where, other.where))):
            raise NotImplementedError(
                f"{name.partition('::')[2]} would change parts of one tensor that may have elements in common, and cut "
                "across a dim that lies in pieces; change one after the other (foreach=False)"
            )


def _apart(one: Where | None, other: Where | None) -> bool:
    if one is None or other is None or one.box is None or other.box is None:
        return False
    return any(
        first + step * (count - 1) < start or start + stride * (number - 1) < first
        for (_, first, step, count), (_, start, stride, number) in zip(one.box, other.box, strict=True)
    )


def write_back(tensor: Any, move: Callable[[Any, Any], Any]) -> None:
    """Write what has just been changed in a part into what it is a part of, and so on.

    Args:
        move: (tensor, placements) -> the tensor, placed so.
    """
    part = tensor._handle
    family = []
    while part.is_part:
        part.seen = part.changes[0]  # it has what is new, and is not to be read again
        family.append((tensor, part))
        tensor = part.of
        part = tensor._handle
    for tensor, part in family:
        if part.where is not None:
            _write(part.of, tensor, part.where, move)


def _write(of: Any, tensor: Any, where: Where, move: Callable[[Any, Any], Any]) -> None:
    if 0 in where.size:
        return
    wanted = _wanted(of._spec, where)
    if tensor._spec.placements != wanted:
        tensor = move(tensor, wanted)
    engine: Engine = tensor._spec.engine
    key = ("write_part", of._spec, tensor._spec, where)
    template = engine.cache.get(key)
    if template is None:
        template = engine.learn(key, _planned, engine, where)
    engine.emit([template.number, of._handle.id, tensor._handle.id], here())


def _planned(engine: Engine, where: Where) -> Template:
    number = next(engine.planner._numbers)
    args = (calls.TENSOR, calls.TENSOR, where.box, where.size, where.stride, where.offset)
    sent = calls.Sent(number, "meshbook::write_part", args, {}, (), "none", (0,), False, False)
    return Template(number, None, (), "none", mutates=(0,), body=pickle.dumps(sent, 5), name=sent.function)


def _wanted(of: Spec, where: Where) -> tuple[Any, ...]:
    """How the part must lie so that every rank has what belongs into its piece."""
    wanted: list[Any] = []
    for mine in of.placements or ():
        if mine.is_replicate() or mine.is_partial():
            wanted.append(mine)
        else:
            whole = where.box is not None and calls.is_whole(where.box[mine.dim], of.shape[mine.dim])
            wanted.append(Shard(where.box[mine.dim][0]) if whole else Replicate())  # type: ignore[index]
    return tuple(wanted)
