"""A loss that is not finite, computed from finite outputs: which operation, from what autograd has saved.

Reads the graph that the loss hangs in, before backward frees it. Knows the operations that can leave their domain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from meshbook.rank.differences.numbers import kinds, largest
from meshbook.rank.differences.rerun import BadOperation

_MAX_NODES = 2000

# By node of autograd's: the tensor that it has saved, and whether a number in it makes a result that is not finite.
_DOMAINS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Log": ("_saved_self", lambda x: x <= 0),
    "Log2": ("_saved_self", lambda x: x <= 0),
    "Log10": ("_saved_self", lambda x: x <= 0),
    "Log1P": ("_saved_self", lambda x: x <= -1),
    "Sqrt": ("_saved_result", torch.isnan),
    "Rsqrt": ("_saved_result", lambda x: ~torch.isfinite(x)),
    "Reciprocal": ("_saved_result", lambda x: ~torch.isfinite(x)),
    "Exp": ("_saved_result", lambda x: ~torch.isfinite(x)),
    "Div": ("_saved_other", lambda x: x == 0),
    "Pow": ("_saved_self", lambda x: ~torch.isfinite(x * x)),
    "Acos": ("_saved_self", lambda x: x.abs() > 1),
    "Asin": ("_saved_self", lambda x: x.abs() > 1),
    "Softmax": ("_saved_result", torch.isnan),
    "LogSoftmax": ("_saved_result", torch.isnan),
}


def operation_in(loss: torch.Tensor, is_in_module: Callable[[int], bool]) -> BadOperation | None:
    """Return the operation nearest to the inputs that left its domain; None: none of those that are known.

    Args:
        is_in_module: whether the node of this number was made in a module's call, beyond which nothing is looked at.
    """
    found: list[tuple[int, Any]] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting and len(seen) < _MAX_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen or is_in_module(node._sequence_nr()):
            continue
        seen.add(node)
        if _leaves_domain(node):
            found.append((node._sequence_nr(), node))
        waiting += [following for following, _ in node.next_functions]
    if not found:
        return None
    node = min(found, key=lambda pair: pair[0])[1]
    saved = getattr(node, _DOMAINS[_kind(node)][0])
    dtype, size = largest([saved])
    return BadOperation("", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _kind(node)).lower(), "loss", None, dtype, size)


def _kind(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", str(node.name()))


def _leaves_domain(node: Any) -> bool:
    attribute, leaves = _DOMAINS.get(_kind(node), ("", torch.isnan))
    try:
        saved = getattr(node, attribute, None)
        return isinstance(saved, torch.Tensor) and bool(leaves(saved.detach()).any()) and "nan" not in _inputs(node)
    except RuntimeError:  # freed, or changed in place since
        return False


def _inputs(node: Any) -> set[str]:
    saved = getattr(node, "_saved_self", None)
    return kinds([saved]) if isinstance(saved, torch.Tensor) else set()
