"""Errors after which a process cannot use its GPU any more. Pure."""

from __future__ import annotations

import re

from meshbook.ids import Ranks, format_ranks, name_ranks

# CUDA's errors that stay with a context: every later call returns them. HIP words them in the same way.
_LASTING = re.compile(
    r"\b(CUDA|HIP) error: (device-side assert triggered|an illegal memory access was encountered|"
    r"unspecified launch failure|unspecified launch error|an illegal instruction was encountered|misaligned address|"
    r"operation not supported on global/shared address space|invalid program counter|hardware stack error|"
    r"uncorrectable (?:NVLink|ECC) error[a-z ]*|the launch timed out and was terminated|invalid device context)"
)


def dead_context(message: str) -> str | None:
    """Return `CUDA context is dead (device-side assert triggered)` for such an error; None for another."""
    found = _LASTING.search(message)
    return None if found is None else f"{found[1]} context is dead ({found[2]})"


def dead_context_note(ranks: Ranks, message: str) -> str | None:
    """Return the sentence for ranks whose error has ended their CUDA context; None for another error.

    Args:
        message: of the exception.
    """
    found = _LASTING.search(message)
    if found is None:
        return None
    library, error = found.groups()
    one = len(ranks) == 1
    return (
        f"{name_ranks(ranks)}'{'s' if one else ''} {library} context{' is' if one else 's are'} dead ({error}): "
        f"every further use of the GPU fails there. %mesh heal {format_ranks(ranks)} puts "
        f"{'a new process in its' if one else 'new processes in their'} place. The error may be of an earlier line; "
        "CUDA_LAUNCH_BLOCKING=1 in the ranks' environment shows which"
    )
