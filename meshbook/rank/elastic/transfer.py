"""Carries bytes between the ranks of a loop, over the world group, from memory of the host.

A rank that is lost or has left the cell ends these waits as it ends any collective's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshbook.rank.process_groups.memory_transfer import split_memory


def gather(data: bytes) -> list[bytes]:
    """Return what each rank passes to this, by rank. Blocks until all have."""
    size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = int(max(map(int, lengths)))
    if not longest:
        return [b""] * size
    own = torch.zeros(longest, dtype=torch.uint8)
    if data:
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, own)
    return [memory[: int(length)].numpy().tobytes() for memory, length in zip(found, lengths, strict=True)]


def wait_for_all() -> None:
    """Block until all ranks have called this. Not `dist.barrier`, which on NCCL waits for the device."""
    size = dist.get_world_size()
    dist.all_gather([torch.zeros(1) for _ in range(size)], torch.zeros(1))


def pass_on(outgoing: Sequence[torch.Tensor], to: int, incoming: Sequence[torch.Tensor], source: int) -> None:
    """Send memory to one rank, and receive what another sends. Blocks until both are done."""
    works = [dist.isend(piece, to) for piece in split_memory(outgoing)]
    works += [dist.irecv(piece, source) for piece in split_memory(incoming)]
    for work in works:
        assert work is not None  # this rank is a member of the world
        work.wait()
