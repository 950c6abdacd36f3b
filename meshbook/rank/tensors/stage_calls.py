"""How a forward calls the blocks of a pipeline, and what they give: recorded, and run again by parts of the rows."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshbook.errors import UsageError
from meshbook.rank.tensors.cut_checks import evaluation, largest_difference
from meshbook.rank.tensors.stage_caches import copies_of_caches, is_cache


class PendingTensor(torch.Tensor):
    """What a block will give: its shape and dtype are known, its numbers are not there before the last block's call."""

    _block_name: str

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, block_name: str) -> PendingTensor:
        made: PendingTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._block_name = block_name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingTensor):
                leaf.refuse(func)
        raise AssertionError

    def refuse(self, operation: Any = None) -> None:
        """Raise a UsageError: only the next block may be called with this."""
        done = "is called again with" if operation is None else f"runs {operation} on"
        raise UsageError(
            f"forward {done} what {self._block_name} gave, and a pipeline takes blocks that are called one after the "
            "other, each with what the one before gave and with nothing in between; another strategy, such as "
            '"fsdp", takes any forward'
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingTensor({self._block_name}, {list(self.shape)})"


@dataclass
class BlockCall:
    """One call of a block: its arguments as leaves of a pytree, of which the first tensor is what blocks pass on."""

    index: int
    leaves: list[Any]
    spec: pytree.TreeSpec
    hidden_at: int

    @property
    def hidden(self) -> torch.Tensor:
        found: torch.Tensor = self.leaves[self.hidden_at]
        return found

    @property
    def caches(self) -> list[Any]:
        """The caches that blocks fill."""
        return [leaf for leaf in self.leaves if is_cache(leaf)]

    @property
    def kind(self) -> Any:
        """What the result depends on beside the numbers."""
        # With a cache shapes differ from call to call, and rows are not computed by parts.
        shapes = [
            (() if self.caches else tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else type(one)
            for one in self.leaves
        ]
        casts = torch.is_autocast_enabled(self.hidden.device.type)
        cast = torch.get_autocast_dtype(self.hidden.device.type) if casts else None
        return str(self.spec), tuple(shapes), cast

    def with_rows(self) -> list[int]:
        """Return which leaves beside the first tensor have as many rows as that: tensors of rows, or by chance."""
        num_rows = len(self.hidden)
        return [
            at
            for at, leaf in enumerate(self.leaves)
            if at != self.hidden_at and isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == num_rows
        ]

    def extras_with_grad(self) -> list[torch.Tensor]:
        """Return the other tensors through which gradients flow."""
        return [
            leaf
            for at, leaf in enumerate(self.leaves)
            if at != self.hidden_at and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def with_random_numbers(self) -> BlockCall:
        """Return the call with copies of caches, and random numbers in every tensor of rows of floats or bools."""
        leaves = copies_of_caches(self.leaves)
        for at in (self.hidden_at, *self.with_rows()):
            if leaves[at].is_floating_point():
                leaves[at] = torch.randn_like(leaves[at])
            elif leaves[at].dtype == torch.bool:
                leaves[at] = torch.rand_like(leaves[at], dtype=torch.float32) < 0.8
        return replace(self, leaves=leaves)

    def with_leaves(self, by_id: Mapping[int, Any]) -> BlockCall:
        """Return the call with other leaves in place of some."""
        return replace(self, leaves=[by_id.get(id(leaf), leaf) for leaf in self.leaves])

    def arguments(self, hidden: torch.Tensor, rows: slice | None, cut: Sequence[int]) -> tuple[Any, Any]:
        """Return the arguments for some rows.

        Args:
            cut: which other leaves have rows.
        """
        leaves = list(self.leaves)
        for at in cut if rows is not None else ():
            leaves[at] = leaves[at][rows]
        leaves[self.hidden_at] = hidden
        found: tuple[Any, Any] = pytree.tree_unflatten(leaves, self.spec)
        return found


def describe_call(index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    """Return the call of a block with these arguments.

    Raises:
        UsageError: there is no tensor among them that has rows.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if not leaf.dim():
                break
            return BlockCall(index, leaves, spec, at)
    raise UsageError(f"{name} is called without a tensor of rows first, which a pipeline's blocks pass on")


@dataclass(frozen=True)
class _Input:
    """Stands in a result for an argument that the block passes on as it is."""

    at: int


class _Mark(enum.Enum):
    """Stands in a result for a tensor."""

    HIDDEN = "what the next block is called with"
    OTHER = "what only the block's own stage has"


@dataclass
class BlockResult:
    """What a block gives for a kind of call: a tensor of rows, which may stand first in a container.

    Attributes:
        template: the result, with marks for tensors.
        cut: the leaves beside the first tensor that are cut into microbatches too.
    """

    template: Any
    dtype: torch.dtype
    cut: Sequence[int]

    @classmethod
    def find(
        cls, block: nn.Module, parameters: Mapping[str, torch.Tensor], name: str, call: BlockCall, rows: Sequence[slice]
    ) -> BlockResult:
        """Return what a block gives, and what of a call is cut so that it gives the same when it computes by parts.

        Random numbers stand for those of the call: equal rows, or a mask of zeros, would hide that rows are mixed.

        Raises:
            UsageError: it does not give the same, or nothing for the next block.
        """
        call = call.with_random_numbers()
        leaves, spec = pytree.tree_flatten(_call_block(block, parameters, *call.arguments(call.hidden, None, ())))
        if not leaves or not isinstance(leaves[0], torch.Tensor) or leaves[0].shape != call.hidden.shape:
            raise UsageError(
                f"{name} is called with a tensor of the shape {list(call.hidden.shape)} and does not give one first, "
                'which a pipeline\'s blocks pass on; another strategy, such as "fsdp", takes any forward'
            )
        template = pytree.tree_unflatten([_mark(at, leaf, call) for at, leaf in enumerate(leaves)], spec)
        if call.caches:
            return cls(template, leaves[0].dtype, [])
        with evaluation(block):  # without dropout
            whole = pytree.tree_leaves(_call_block(block, parameters, *call.arguments(call.hidden, None, ())))[0]
            # A tensor may have as many rows as the first by chance: one of them, or all.
            candidates = call.with_rows()
            ways = [candidates, *([at for at in candidates if at != whole_at] for whole_at in candidates), []]
            for cut in ways if candidates else ways[:1]:
                found = cls(template, leaves[0].dtype, cut)
                if found._is_same_by_parts(block, parameters, call, whole, rows):
                    return found
        raise UsageError(
            f"{name} gives other numbers when it computes the rows (dim 0) of {list(call.hidden.shape)} by parts, as "
            "stages do, or cannot: they depend on each other. Put batches first, or take another strategy, such as "
            '"fsdp"'
        )

    def _is_same_by_parts(
        self,
        block: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        call: BlockCall,
        whole: torch.Tensor,
        rows: Sequence[slice],
    ) -> bool:
        try:
            parts = torch.cat([self.run(block, parameters, call, call.hidden[part], part) for part in rows])
        except (RuntimeError, ValueError, IndexError, UsageError):
            return False
        return largest_difference([parts.nan_to_num()], [whole.nan_to_num()]) <= 1.0

    def run(
        self,
        block: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        call: BlockCall,
        hidden: torch.Tensor,
        rows: slice,
    ) -> torch.Tensor:
        """Compute some rows.

        Args:
            hidden: these rows of what the block is called with.
        """
        leaves = pytree.tree_leaves(_call_block(block, parameters, *call.arguments(hidden, rows, self.cut)))
        found = leaves[0] if leaves else None
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (hidden.shape, self.dtype):
            got = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise UsageError(
                f"a block gave {got} where the first gave {self.dtype} {list(hidden.shape)}; a pipeline's blocks all "
                "pass on the same"
            )
        return found

    def rebuild(self, hidden: torch.Tensor, call: BlockCall, name: str) -> Any:
        """Return the result of a call, with the tensor that blocks pass on."""

        def fill(leaf: Any) -> Any:
            if leaf is _Mark.HIDDEN:
                return hidden
            if leaf is _Mark.OTHER:
                return PendingTensor((0,), hidden.dtype, hidden.device, name)
            return call.leaves[leaf.at] if isinstance(leaf, _Input) else leaf

        return pytree.tree_map(fill, self.template)


def _mark(at: int, leaf: Any, call: BlockCall) -> Any:
    if at == 0:
        return _Mark.HIDDEN
    passed_on = [_Input(index) for index, given in enumerate(call.leaves) if given is leaf]
    return passed_on[0] if passed_on else _Mark.OTHER if isinstance(leaf, torch.Tensor) else leaf


def _call_block(block: nn.Module, parameters: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    return torch.func.functional_call(block, dict(parameters), args, kwargs)
