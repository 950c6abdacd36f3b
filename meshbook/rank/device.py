"""Which device a rank computes on, and how a thread of it selects that."""

from __future__ import annotations

from meshbook.errors import StartError
from meshbook.wire.spawn import RankConfig


def choose_device(config: RankConfig) -> str:
    """Return `cuda:<local rank>` if there is a GPU for every rank of this host, else `cpu`; or what the user asks for.

    Ranks that are to be on GPUs and are more than those share them in turn.

    Raises:
        StartError: CUDA is asked for, and there is no GPU.
    """
    spec = config.spec
    if spec.torch and spec.device != "cpu":
        import torch

        num_gpus = torch.cuda.device_count()
        if spec.device == "cuda" and not num_gpus:
            raise StartError("cuda was asked for, and this host has no GPU that torch can use; try --device cpu")
        if num_gpus >= config.local_world_size or spec.device == "cuda":
            return f"cuda:{config.local_rank % max(1, num_gpus)}"
    return "cpu"


def choose_backend(config: RankConfig, device: str) -> str:
    """Return the backend of the rank's process groups: NCCL if each rank has a GPU of its own, else gloo.

    NCCL refuses two ranks on one GPU; gloo copies CUDA tensors through the CPU's memory.
    """
    if not device.startswith("cuda:"):
        return "gloo"
    import torch

    return "nccl" if torch.cuda.device_count() >= config.local_world_size else "gloo"


def select_device(device: str) -> None:
    """Make a rank's GPU the calling thread's current device. A new thread has GPU 0; no-op for a rank on the CPU."""
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)
