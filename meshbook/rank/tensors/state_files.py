"""Folders of torch.distributed.checkpoint with the state of a remote module: each rank writes and reads its parts."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.errors import UsageError


def save_state(state: dict[str, Any], folder: str) -> None:
    """Write a folder beside the one that is there, and put it in its place. A collective.

    Args:
        state: nested dicts of this rank's DTensors, and of plain values that are alike on all ranks.
    """
    unfinished = f"{folder}.saving"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    dist.barrier()
    if not os.path.isdir(unfinished):
        raise UsageError(f"rank {dist.get_rank()} does not see {unfinished}; give a folder that all machines share")
    state_dict_saver.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        replaced = f"{folder}.replaced"
        if os.path.isdir(folder):
            os.rename(folder, replaced)
        os.rename(unfinished, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


def load_state(state: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """Read a folder into this rank's DTensors. A collective.

    Returns:
        On the first rank the state without DTensors, as it was saved.
    """
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        former = f"; {folder}.replaced is what was there before a save that was cut off: rename it"
        raise UsageError(
            f"{folder} on rank {dist.get_rank()} is no folder that save_checkpoint has written"
            f"{former if os.path.isdir(f'{folder}.replaced') else ''}"
        )
    _check_all_is_taken(state, folder)
    state_dict_loader.load(state, checkpoint_id=folder)
    if dist.get_rank() > 0:
        return None
    return pytree.tree_map(lambda leaf: None if isinstance(leaf, DTensor) else leaf, state)  # type: ignore[no-any-return]


def _check_all_is_taken(state: dict[str, Any], folder: str) -> None:
    """Raise UsageError: the folder has something of the module or the optimizer that nothing here would take."""
    own, _ = flatten_state_dict(state)
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefixes = tuple(f"{part}." for part in state if part != "groups")
    left = sorted(name for name in saved if name.startswith(prefixes) and name not in own)
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UsageError(
            f"{folder} has {', '.join(left[:3])}{more}, for which there is nothing here: give the model that was "
            "saved, and its optimizer as it is new or after a step of all its parameters"
        )
