"""What the campaign runs on ranks: its works, and a thread that carries out faults from within. Imported by ranks.

A work goes on until the file `over` is in its folder, and marks with a file `begun-RANK` that it runs. Works with
collectives agree in each turn whether they go on.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.budget import WAIT_S
from tests.campaign import arithmetic
from tests.connections import cut, cut_tcp

ROWS_PER_RANK = 2
LEARNING_RATE = 0.05
_FILE_BYTES = 1 << 18
_LOADED_ROWS = 1 << 16  # of a batch, float32: what a worker of a DataLoader sends through /dev/shm

# ---------------------------------------------------------------------------------------------------------------------
# Works


def _begin(folder: str, rank: int) -> Callable[[], bool]:
    """Mark that the work runs here; return whether it is to end."""
    (Path(folder) / f"begun-{rank}").touch()
    over = Path(folder) / "over"
    return over.exists


def _all_over(is_over: bool) -> bool:
    flag = torch.tensor([int(is_over)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def loop(folder: str, seed: int, rank: int) -> tuple[int, int]:
    """Compute alone; return the number of turns and the number that they came to."""
    is_over = _begin(folder, rank)
    number, turns = arithmetic.first_number(seed, rank), 0
    while not is_over():
        number = (number * 13 + turns) % arithmetic.PRIME
        turns += 1
        torch.ones(1 << 12).sum()
        if turns % 64 == 0:
            print(f"turn {turns}")
        time.sleep(0.001)
    return turns, number


def collectives(folder: str, seed: int, rank: int, turns: int | None = None) -> tuple[int, int]:
    """Mix numbers with the others' by collectives of several kinds; `turns`: so many instead of until it is over."""
    is_over = _begin(folder, rank)
    number, turn = arithmetic.first_number(seed, rank), 0
    while (turn < turns) if turns is not None else not _all_over(is_over()):
        kind = arithmetic.kind_of(turn)
        number = arithmetic.mix(kind, number, _collect(kind, number, rank, turn), rank)
        turn += 1
    return turn, number


def _collect(kind: str, number: int, rank: int, turn: int) -> int:
    own, size = torch.tensor([number]), dist.get_world_size()
    match kind:
        case "all_reduce":
            dist.all_reduce(own)
        case "all_gather":
            found = [torch.zeros_like(own) for _ in range(size)]
            dist.all_gather(found, own)
            return arithmetic.weighted_sum([int(one) for one in found])
        case "broadcast":
            dist.broadcast(own, turn % size)
        case _:
            heard = torch.zeros_like(own)
            sends = dist.isend(own, (rank + 1) % size)
            dist.recv(heard, (rank - 1) % size)
            assert sends is not None
            sends.wait()
            return int(heard)
    return int(own)


def elastic_turn(number: int, rank: int, turn: int) -> int:
    """One turn of `collectives`."""
    kind = arithmetic.kind_of(turn)
    return arithmetic.mix(kind, number, _collect(kind, number, rank, turn), rank)


def end_elastic_turn(folder: str, rank: int, turns: int) -> bool:
    """Note how many turns all ranks have come to; return whether the loop is to end."""
    is_over = _begin(folder, rank)
    if rank == 0:
        (Path(folder) / "turns").write_text(str(turns))
    return _all_over(is_over())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def wrap_model(model: nn.Module) -> nn.Module:
    """Return the model under DDP, with a bucket for each parameter or two: several collectives in a step."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)  # type: ignore[arg-type]


def reset(model: nn.Module, seed: int) -> None:
    """Give a model the first weights of a seed, whatever it had."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
            parameter.grad = None


def train_step(model: nn.Module, seed: int, turn: int, rank: int | None, world_size: int) -> None:
    """One step on the rows of a rank; None: on those of all ranks."""
    draw = torch.Generator().manual_seed(seed * 10_007 + turn)
    x = torch.randn(ROWS_PER_RANK * world_size, 4, generator=draw, dtype=torch.float64)
    y = torch.randn(ROWS_PER_RANK * world_size, 2, generator=draw, dtype=torch.float64)
    if rank is not None:
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    (model(x) - y).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= LEARNING_RATE * parameter.grad
            parameter.grad = None


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def ddp(folder: str, seed: int, rank: int, model: nn.Module, turns: int | None = None) -> tuple[int, torch.Tensor]:
    """Train a model under DDP from the first weights of a seed; return the number of steps, and the weights."""
    is_over = _begin(folder, rank)
    reset(model, seed)
    turn = 0
    while (turn < turns) if turns is not None else not _all_over(is_over()):
        train_step(model, seed, turn, rank, dist.get_world_size())
        turn += 1
    return turn, weights(model)


def checkpoint_state(seed: int, turn: int) -> dict[str, Any]:
    """What the checkpoint of that turn holds."""
    return {"turn": torch.tensor([turn]), "weights": torch.full((1000,), float(seed + turn), dtype=torch.float64)}


def checkpoints(folder: str, seed: int, rank: int, disk: str) -> int:
    """Save one checkpoint after the other with torch.distributed.checkpoint; the last two are kept. Return how many."""
    import torch.distributed.checkpoint as dcp

    is_over, turn = _begin(folder, rank), 0
    while not _all_over(is_over()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(checkpoint_state(seed, turn), checkpoint_id=f"{disk}/checkpoint-{turn}")
        if rank == 0:
            shutil.rmtree(f"{disk}/checkpoint-{turn - 2}", ignore_errors=True)
        turn += 1
    return turn


def files(folder: str, seed: int, rank: int, disk: str) -> int:
    """Write a file and read it again; return how often."""
    is_over, turn = _begin(folder, rank), 0
    path = Path(disk) / f"file-{rank}"
    try:
        while not is_over():
            content = (seed + turn).to_bytes(8, "little") * (_FILE_BYTES // 8)
            path.write_bytes(content)
            if path.read_bytes() != content:
                raise AssertionError(f"{path} holds something else than was written into it")
            turn += 1
            time.sleep(0.001)
    finally:
        path.unlink(missing_ok=True)
    return turn


class Rows(Dataset[torch.Tensor]):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_LOADED_ROWS,), float(self.seed % 1000 + index))


def loader(folder: str, seed: int, rank: int) -> int:
    """Load batches through worker processes, whose memory is in /dev/shm; return how many epochs."""
    is_over, turn = _begin(folder, rank), 0
    while not is_over():
        try:
            for index, batch in enumerate(DataLoader(Rows(seed), num_workers=1, timeout=WAIT_S)):
                if not bool((batch == seed % 1000 + index).all()):
                    raise AssertionError(f"batch {index} holds other rows than its worker has made")
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the iterator in them would keep its worker
            raise
        turn += 1
    return turn


# ---------------------------------------------------------------------------------------------------------------------
# Faults from within


def listen(folder: str, rank: int) -> None:
    """Start the thread that does what is asked of it in the datagram socket `rank-RANK`."""
    path = f"{folder}/rank-{rank}"
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(path)

    def serve() -> None:
        while True:
            what, _, argument = listener.recv(256).decode().partition(" ")
            _FAULTS[what](argument)

    threading.Thread(target=serve, name="faults", daemon=True).start()


def _segfault(argument: str) -> None:
    ctypes.string_at(8)


def _exit(argument: str) -> None:
    os._exit(int(argument))


def _use_memory(argument: str) -> None:
    """Use memory until the system ends this process; with a limit in MiB, until that, then as the system does."""
    if argument:
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = size + (int(argument) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    try:
        while True:
            held.append(b"x" * (1 << 20))
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)


def _cut_tcp(argument: str) -> None:
    """Shut down every TCP connection of this process: gloo's, as nothing else here has any."""
    cut_tcp()


def _cut_zmq(argument: str) -> None:
    """Shut down this process's connections to the sockets of that name: "work", "service" or "store"."""
    cut(f"{argument}.sock")


_FAULTS: dict[str, Callable[[str], None]] = {
    "segfault": _segfault,
    "exit": _exit,
    "memory": _use_memory,
    "cut-tcp": _cut_tcp,
    "cut-zmq": _cut_zmq,
}
