"""The caches of keys and values of a model whose blocks stages compute: each stage has the keys of its own blocks.

A model makes masks and positions of a cache's lengths, those of any layer. So the layers of other stages' blocks have
the same length, with one number for each position. Knows caches of transformers by their methods.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshbook.errors import UsageError

# Of transformers: those that grow by `update` alone.
_GROWING_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def is_cache(leaf: Any) -> bool:
    """Whether an argument of a block is a cache, into which the block puts keys and values."""
    return callable(getattr(leaf, "update", None)) and callable(getattr(leaf, "get_seq_length", None))


def copies_of_caches(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with a copy of each cache, which a block that is only tried may fill."""
    return [copy.deepcopy(leaf) if is_cache(leaf) else leaf for leaf in leaves]


def grow(cache: Any, block: nn.Module, name: str, hidden: torch.Tensor) -> None:
    """Have the layers of a block that another stage computes grow by as many positions as it is called with.

    Args:
        hidden: what the blocks are called with, of the shape rows x positions x width.

    Raises:
        UsageError: they do not grow by keys and values alone.
    """
    cache = getattr(cache, "self_attention_cache", cache)  # an encoder's keys are asked for by their own block only
    layers = {one.layer_idx for one in block.modules() if isinstance(getattr(one, "layer_idx", None), int)}
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    if not layers or kinds.difference(_GROWING_LAYERS):
        raise UsageError(
            f"{name} is called with a {type(cache).__name__} of {', '.join(sorted(kinds)) or 'no layers'}, and the "
            "stages of a pipeline have caches that grow by keys and values, a layer for each block; give "
            "use_cache=False, or take another strategy"
        )
    for layer in layers:
        empty = hidden.new_zeros(len(hidden), 1, hidden.shape[1], 1)
        cache.update(empty, empty, layer)
