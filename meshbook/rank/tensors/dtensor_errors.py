"""What DTensor's errors mean, by their texts, and how they read in terms of the mesh.

The one place that depends on the wording of torch's messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import placement_rules as rules
from meshbook.rank.tensors.operators import name_of
from meshbook.rank.tensors.shards import Spec

aten = torch.ops.aten

_UNEVEN = re.compile(r"is not evenly divisible by mesh dimension (?P<axis>\d+)")
_SHARDED_DIM = re.compile(
    r"along the sharded dimension|without redistribution, which is disallowed|redistribute the tensor before"
)
_NO_RULE = re.compile(r"does not have a sharding strategy|not supported with DTensor|Meta tensors|^aten.nonzero")


def is_placement_change(error: Exception) -> bool:
    """Whether an in-place operation would need other placements of the tensor that it changes."""
    return "in-place operations that require placement changes" in str(error)


def moves_after_error(error: Exception, specs: Sequence[Spec], mesh_ndim: int) -> rules.Moves:
    """Return to where the first input is brought for an operation that has failed; empty: no move helps."""
    if (axis := _uneven_axis(error)) is not None:
        return rules.replicate_axis(specs[:1], axis)
    return rules.replicate(specs[:1], mesh_ndim) if _is_about_sharded_dim(error) else ()


def _uneven_axis(error: Exception) -> int | None:
    """Return the axis whose shards of the first input the operation could not cut evenly; None if it is not that."""
    uneven = _UNEVEN.search(str(error))
    return None if uneven is None else int(uneven["axis"])


def _is_about_sharded_dim(error: Exception) -> bool:
    """Whether the operation would work if its first input were replicated."""
    return _SHARDED_DIM.search(str(error)) is not None


def is_missing_rule(function: Any, error: Exception) -> bool:
    """Whether DTensor has no rule for the operation."""
    text = str(error).strip()
    return (
        isinstance(error, NotImplementedError)
        or _NO_RULE.search(text) is not None
        or text.split("\n\n")[0] == name_of(function).replace("::", ".")
        or type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException")
    )


def translate(function: Any, error: Exception, specs: Sequence[Spec], axes: MeshAxes) -> Exception:
    """Return torch's error, restated in terms of the tensors as the user knows them."""
    text = str(error).strip().split("\n\nSharding propagation failed")[0].strip()
    operands = ", ".join(map(repr, specs[:4]))
    mesh_text = f"on a mesh of {axes}"
    op_name = name_of(function).partition("::")[2].partition(".")[0]
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
    if is_missing_rule(function, error):
        return NotImplementedError(
            f"{op_name} of {operands} {mesh_text}: DTensor has no rule for it (or the shape of its result depends "
            f"on data). Ways round: run it on the ranks, mesh.execute(fn, x); or on the whole tensor here, "
            f"x.full_tensor(); or first bring x to every rank, x.redistribute([Replicate()] * {len(axes.shape)})"
        )
    text = f"{text} ({op_name} of {operands} {mesh_text})"
    try:
        return type(error)(text)
    except Exception:
        return RuntimeError(text)
