"""What a module gives beside tensors: dataclasses, values, and objects that stay on the ranks, such as caches.

On a rank a small tensor, the *object token*, retains such an object; the controller gives it back to the module as an
argument, and lets go of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from meshbook.rank.tensors.operators import TENSOR

# Leaves of a result that are sent by value.
_BY_VALUE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class ObjectThere:
    """Stands in the tree of a result for an object of this class, which stays on the ranks."""

    type_name: str


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree. Dataclasses with tensors, or what stands for these, become nodes of pytrees."""
    while True:
        leaves = pytree.tree_leaves(tree)
        found = {type(leaf) for leaf in leaves if _is_node(leaf)}
        if not found:
            return leaves
        for kind in found:
            pytree.register_dataclass(kind)


def _is_node(leaf: Any) -> bool:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, ObjectThere)):
        return False
    fields = dataclasses.fields(leaf)
    held = pytree.tree_leaves([getattr(leaf, field.name, None) for field in fields])
    has_tensor = any(isinstance(one, (torch.Tensor, ObjectThere)) or one is TENSOR or _is_node(one) for one in held)
    return has_tensor and all(field.init for field in fields)  # else it could not be made anew


def stays(leaf: Any) -> bool:
    """Whether a leaf of a result is an object that stays on the ranks."""
    return not isinstance(leaf, (torch.Tensor, *_BY_VALUE))


def make_token(value: Any, device: str) -> torch.Tensor:
    """Return a tensor that retains an object."""
    token = torch.empty(0, device=device)
    token._meshbook_object = value  # type: ignore[attr-defined]
    return token


def is_token(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_meshbook_object")


def object_of(token: torch.Tensor) -> Any:
    """Return the object that a token retains.

    Raises:
        RuntimeError: this rank does not have it: it has taken the place of one that was lost.
    """
    if not is_token(token):
        raise RuntimeError(
            "an object that the module gave is not on this rank any more, which has replaced one that was lost; call "
            "the module again for a new one"
        )
    return token._meshbook_object  # type: ignore[attr-defined]


def output_placement(output: torch.Tensor, rows: Collection[int]) -> Placement:
    """Return the placement of the ranks' outputs as one tensor: rows of it or, for a scalar, their mean.

    Args:
        rows: how many this rank has of the inputs that are cut; empty: it has whole inputs.

    Raises:
        ValueError: a scalar that has no mean, or a tensor whose dim 0 cannot be rows.
    """
    if not rows:
        return Replicate()
    if output.dim():
        _check_rows(output.shape, rows)
        return Shard(0)
    if not (output.is_floating_point() or output.is_complex()):
        raise ValueError(
            f"the module gives one {output.dtype} number for the rows of each rank, and whether the whole batch's is "
            "their sum or their maximum is not known: have it give one for each row (pred == y, without .sum()), or a "
            "float, of which the mean is taken"
        )
    return Partial("avg")


def _check_rows(shape: torch.Size, rows: Collection[int]) -> None:
    """Check that dim 0 of an output counts rows, pieces of rows (each token of a text) or groups of rows (pairs)."""
    size, others = shape[0], shape[1:]
    if size in rows:
        return
    has_rows_second = len(others) > 1 and others[0] in rows  # (tokens, rows, features)
    if not has_rows_second and any(count and size % count == 0 for count in rows):
        return
    if size and any(count % size == 0 for count in rows) and not any(count in others for count in rows):
        return
    have = " or ".join(map(str, sorted(rows)))
    raise ValueError(
        f"the module gives a tensor of shape {tuple(shape)} where each rank has {have} rows of the batch, and the "
        "ranks' tensors are joined along dim 0: have it give rows first (h.transpose(0, 1) of an LSTM's state), or one "
        "number, of which the mean over ranks is taken. meshbook.module_to_mesh has no such limit"
    )
