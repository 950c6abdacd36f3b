"""What a user should know about the devices of a mesh that has started. Pure."""

from __future__ import annotations

from collections import Counter

from meshbook.ids import name_ranks
from meshbook.wire.messages import MeshInfo


def device_note(info: MeshInfo, num_gpus: int) -> str | None:
    """Return the note that ranks share GPUs, or are on the CPU beside GPUs; None if each has what one would expect.

    Args:
        num_gpus: how many ranks could have one of their own on the machines of the mesh.
    """
    on_gpu = [rank for rank in info.ranks if rank.device != "cpu"]
    num_sharing = Counter((rank.host, rank.device) for rank in on_gpu)
    sharing = tuple(rank.rank for rank in on_gpu if num_sharing[rank.host, rank.device] > 1)
    if sharing:
        text = f"{len(on_gpu)} ranks and {_gpus(len(num_sharing))}: {name_ranks(sharing)} share"
        if info.backend is not None:
            text += (
                ". NCCL refuses that, so the process groups use gloo, which copies through the CPU's memory: good for "
                "trying things out, not for speed"
            )
        return text
    if info.spec is not None and info.spec.torch and info.spec.device == "auto" and not on_gpu and num_gpus:
        return (
            f"{len(info.ranks)} ranks and {_gpus(num_gpus)}: the ranks are on the CPU, because there is not a GPU for "
            f"each. Ask for {num_gpus}, or for device cuda: then they share"
        )
    return None


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"
