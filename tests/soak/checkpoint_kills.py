"""kill -9 at any moment of a save: what is restored afterwards is always a whole checkpoint.

A small run saves again and again; at a moment that a seed chooses, a rank, the supervisor, or everything is killed. The
moment is one of the save's own: how many bytes of it are on the disk, whether `.metadata` is there, whether it is
committed. Then a new mesh restores from the folder, and compares every number.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import MeshbookError
from meshbook.wire import checkpoint_folders
from meshbook.wire.processes import forks_of
from tests.budget import WAIT_S

RANKS = 2
STATE = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
def fill(number):
    global step
    step = number
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
fill(0)
"""
CHECK = "(step, sorted({value for p in model.parameters() for value in p.full_tensor().unique().tolist()}))"
_TOTAL_BYTES = 4 * 512 * 512 * 4
_TIMEOUT_S = WAIT_S


def kill_during_a_save(seed: int, path: Path) -> str:
    """Save step 1, kill during the save of step 2, and restore. Return what was done; raise AssertionError.

    Args:
        path: a folder that does not exist yet.
    """
    chance = random.Random(seed)
    victim = chance.choice(["rank 0", "rank 1", "supervisor", "everything"])
    moment = chance.choice(["asked", "bytes", "bytes", "bytes", "metadata", "committed"])
    num_bytes = chance.randrange(_TOTAL_BYTES)
    told = f"seed {seed}: kill -9 of {victim} at {moment}" + (f" {num_bytes:,}" if moment == "bytes" else "")
    with contextlib.suppress(MeshbookError), create_mesh(RANKS) as mesh:
        mesh.run(STATE + "fill(1)")
        mesh.checkpoint(path, "model", "step", step=1).result(_TIMEOUT_S)
        mesh.run("fill(2)")
        pids = _pids(mesh, victim)
        mesh.checkpoint(path, "model", "step", step=2)
        _wait_for(moment, num_bytes, path)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait_until_decided(mesh, path, victim)
    entry = checkpoint_folders.find_checkpoint(path)
    assert entry.manifest.step in (1, 2), told
    assert moment != "committed" or entry.manifest.step == 2, told
    checkpoint_folders.check_sizes(entry)
    checkpoint_folders.check_digests(entry, [file.name for file in entry.manifest.files])
    with create_mesh(RANKS) as mesh:
        mesh.run(STATE)
        restored = mesh.restore(path)
        for step, values in mesh.run(CHECK, echo=False).values.values():
            assert (step, values) == (restored.step, [restored.step]), told
        mesh.run("fill(3)")
        mesh.checkpoint(path, "model", "step", step=3).result(_TIMEOUT_S)
    left = [name for name in os.listdir(path) if name.startswith(".")]
    assert not left, f"{told}: {left} are left after the next save"
    return f"{told}; step {restored.step} was restored"


def _pids(mesh: Mesh, victim: str) -> list[int]:
    info = mesh.status()
    ranks = [rank.pid for rank in info.ranks if rank.pid is not None]
    match victim:
        case "supervisor":
            return [info.supervisor_pid]
        case "everything":
            return [*forks_of(info.supervisor_pid), info.supervisor_pid, *ranks]
    return [ranks[int(victim[-1])]]


def _wait_for(moment: str, num_bytes: int, path: Path) -> None:
    """Wait until the save has come so far; or further, when it was quicker than the look."""
    deadline = time.monotonic() + _TIMEOUT_S
    final = path / "step-00000002"
    while moment != "asked" and not final.exists() and time.monotonic() < deadline:
        for folder in path.glob(".saving-*"):
            with contextlib.suppress(OSError):
                if moment == "metadata" and (folder / ".metadata").exists():
                    return
                if moment == "bytes" and sum(file.stat().st_size for file in folder.iterdir()) >= num_bytes:
                    return


def _wait_until_decided(mesh: Mesh, path: Path, victim: str) -> None:
    """Wait until the save is committed, or was thrown away, or nobody is left to do either."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and mesh.session.ended is None:
        if (path / "step-00000002").exists() or not list(path.glob(".saving-*")):
            return
        time.sleep(0.002)
