"""Tensors of a model on several ranks, as they are written into files: each is gathered when its file takes it.

On the first rank a library's own code renames and converts them and divides them among files, as it does with those of
one process: by their shapes. The other ranks take part where one is gathered. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.errors import UsageError

_END = -1


class GatheredTensors:
    """Tensors on all ranks, which are gathered on the first one by one. Every rank makes it alike."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        # The tensor that was gathered last, by its index, and what was made of it: experts are parts of one tensor.
        self._computed: dict[Any, list[torch.Tensor]] = {}

    def for_files(self) -> list[FileTensor]:
        """Return them without data."""
        return [FileTensor(tensor, self, at, 0) for at, tensor in enumerate(self._tensors)]

    def take_part(self) -> None:
        """Gather with the first rank, until that calls `end`."""
        while (at := self._agree(_END)) != _END:
            self._whole(at)

    def end(self) -> None:
        """Let the other ranks go on."""
        self._computed.clear()
        self._agree(_END)

    def compute(self, what: int | _Operation) -> list[torch.Tensor]:
        """Return a tensor, or the results of an operation, on the CPU. It is kept until another one is gathered."""
        if what not in self._computed:
            if isinstance(what, int):
                self._computed.clear()
                if isinstance(self._tensors[what], DTensor):
                    self._agree(what)
                self._computed[what] = [self._whole(what).cpu()]
            else:
                args = pytree.tree_map_only(FileTensor, FileTensor.bring, what.args)
                self._computed[what] = pytree.tree_leaves(what.function(*args, **what.kwargs))
        return self._computed[what]

    def _whole(self, at: int) -> torch.Tensor:
        tensor = self._tensors[at].detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _agree(self, number: int) -> int:
        """Return the number that the first rank gives. A collective."""
        agreed = torch.tensor(number, device=self._device)
        dist.broadcast(agreed, src=0)
        return int(agreed)


@dataclass(frozen=True, eq=False)
class _Operation:
    """An operation on FileTensors, which is run when one of its results is brought."""

    function: Any
    args: Any
    kwargs: dict[str, Any]


class FileTensor(torch.Tensor):
    """A tensor without data, on the device meta: `cpu()` brings the numbers, and this keeps none.

    What an operation makes of it is such a tensor too.
    """

    _source: GatheredTensors
    _what: int | _Operation
    _at: int  # which of the results of `_what`
    _empty: torch.Tensor  # of the same shape

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: GatheredTensors, what: int | _Operation, at: int) -> FileTensor:
        # Views have storages of their own: what they view is not in their file.
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        made: FileTensor = torch.Tensor._make_subclass(cls, empty)
        made._source, made._what, made._at, made._empty = source, what, at, empty
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
            brought = args[0].bring()
            return brought.to(kwargs.get("dtype") or brought.dtype).contiguous()
        if func._schema.is_mutable:
            raise UsageError(
                f"the model's save_pretrained runs {func} on a tensor that lies on several ranks, and what it writes "
                "would be lost; save model.state_dict(full=True)"
            )
        results = func(*pytree.tree_map_only(FileTensor, lambda leaf: leaf._empty, args), **kwargs)
        source = next(leaf._source for leaf in pytree.tree_leaves(args) if isinstance(leaf, FileTensor))
        leaves, spec = pytree.tree_flatten(results)
        operation = _Operation(func, args, kwargs)
        made = [FileTensor(leaf, source, operation, at) for at, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(made, spec)

    def bring(self) -> torch.Tensor:
        return self._source.compute(self._what)[self._at]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch.save writes numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FileTensor({list(self.shape)}, {self.dtype})"
