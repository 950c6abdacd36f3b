"""The repeated blocks of a model: what is gathered, computed again, compiled or put into stages as one unit."""

from __future__ import annotations

from typing import Any

from torch import nn


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, outermost first.

    Blocks are at least two siblings of one class with submodules of their own, and with parameters of the same names
    and shapes.
    """
    found: list[nn.Module] = []
    groups: dict[Any, list[nn.Module]] = {}
    for child in module.children():
        groups.setdefault(_block_signature(child), []).append(child)
    for group in groups.values():
        if len(group) >= 2 and any(True for _ in group[0].children()) and any(True for _ in group[0].parameters()):
            found.extend(group)
        else:
            for child in group:
                found.extend(find_blocks(child))
    return found


def find_chains(module: nn.Module) -> list[list[nn.Module]]:
    """Return the repeated blocks in their order, those of each container by themselves: an encoder's, a decoder's."""
    block_ids = {id(block) for block in find_blocks(module)}
    chains = ([child for child in parent.children() if id(child) in block_ids] for parent in module.modules())
    return [chain for chain in chains if chain]


def block_names(module: nn.Module) -> list[str]:
    """Return the names of the repeated blocks."""
    names = {id(submodule): name for name, submodule in module.named_modules()}
    return [names[id(block)] for block in find_blocks(module)]


def _block_signature(module: nn.Module) -> Any:
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters())
    return type(module), shapes
