"""What is kept of one collective of a recorded cell."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch

from meshbook.errors import message_of


@dataclass
class CollectiveError:
    """What a collective raised."""

    ename: str
    text: str
    pickled: bytes | None  # None: the exception cannot be pickled

    @classmethod
    def of(cls, error: BaseException) -> CollectiveError:
        try:
            pickled: bytes | None = pickle.dumps(error)
            pickle.loads(pickled or b"")
        except Exception:
            pickled = None
        return cls(type(error).__name__, message_of(error), pickled)

    def restore(self) -> BaseException:
        if self.pickled is not None:
            error = pickle.loads(self.pickled)
            assert isinstance(error, BaseException)
            return error
        return RuntimeError(f"{self.ename}: {self.text}")


@dataclass
class CollectiveEntry:
    """One collective, send or receive.

    Attributes:
        group: the name of its process group.
        peer: the global rank of the other side, of a send or receive.
        line: where it was called.
        shapes: of the tensors that it writes into (a send's: that it sends), with their dtypes.
        outputs: what these held when it had completed; None: nobody waited for it, or it failed.
        source: the rank in the group that a receive from any rank received from.
    """

    group: str
    op: str
    peer: int | None
    line: str
    shapes: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    error: CollectiveError | None = None
    source: int | None = None


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, in order."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [tensor for item in argument for tensor in tensors_in(item)]
    return []
