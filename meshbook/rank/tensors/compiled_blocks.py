"""`compile=`: torch compiles the repeated blocks of a module on the ranks; what it left uncompiled is reported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from meshbook.errors import UsageError


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block. Hooks, such as those by which FSDP2 gathers parameters, stay outside of it.

    Raises:
        UsageError: torch has no such backend.
    """
    from torch import _dynamo  # takes seconds to import

    known = _dynamo.list_backends(exclude_tags=("debug",))
    if backend not in _dynamo.list_backends(exclude_tags=()):
        raise UsageError(f"torch.compile has no backend {backend!r}; known: {', '.join(known)}")
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)


def without_compiler() -> AbstractContextManager[object]:
    """Return a context in which compiled code runs operation by operation."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import, and without which nothing is compiled
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Context at whose end the list has why torch could not compile something meanwhile, and where."""
    from torch._dynamo.utils import counters

    kinds = ("graph_break", "unimplemented")  # earlier versions of torch, and later ones
    before = {kind: counters[kind].copy() for kind in kinds}
    reasons: list[str] = []
    yield reasons
    for kind in kinds:
        reasons += [_in_a_line(reason) for reason in counters[kind] - before[kind]]


def _in_a_line(reason: str) -> str:
    """Return why torch could not compile something, and where: `Data-dependent branching (model.py:8)`."""
    what = reason.strip().partition("\n")[0].rstrip(".")
    where = re.search(r'File "([^"]+)", line (\d+)', reason)
    return what if where is None else f"{what} ({os.path.basename(where[1])}:{where[2]})"
