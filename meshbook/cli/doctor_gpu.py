"""`meshbook doctor --gpu`: what can only be shown by doing it on the GPUs of this machine. Takes a minute or two.

A mesh with a rank on each GPU goes through what goes wrong in training (a stuck collective, memory that runs out, a
kernel that fails) and through what Meshbook does on a device (attention on remote tensors, FSDP, CUDA IPC). On a
machine with one GPU two ranks share it for those that need two.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshbook.actor import Actor, endpoint
from meshbook.actors.buffer import Buffer
from meshbook.cli.doctor import CheckResult
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.controller.tables import format_bytes
from meshbook.errors import CellError, MeshbookError, MeshTimeout
from meshbook.host.gpus import Nvml, count_gpus
from meshbook.tensors.api import distribute
from meshbook.tensors.modules import module_to_mesh

# No cell here takes more than a few seconds on a sound machine; the first collective of NCCL may take some.
_TIMEOUT_S = 60.0
# How long a cell that cannot end runs before it is stopped.
_STUCK_S = 2.0
# Several beats of the service thread, which asks the device what has ended.
_CAPTURE_S = 2.5
# Every pair of more ranks than this would be hundreds of communicators: then each rank and its neighbour.
_MAX_RANKS_OF_ALL_PAIRS = 8
# What a GPU's own rounding may make of three steps of these sizes; torch uses TF32 only if it is asked to.
_TOLERANCE = 1e-3


class CheckFailed(Exception):
    """What was found instead of what should be."""


def check_gpus(device: str = "cuda", num_ranks: int | None = None) -> Iterator[CheckResult]:
    """Run the checks one after the other, each on a whole mesh, and yield their results. Blocks for a minute or two.

    Args:
        device: "cpu" runs those that any device can.
        num_ranks: None: one on each GPU.
    """
    if device == "cuda" and not count_gpus():
        yield CheckResult(
            "missing",
            "GPUs",
            "no NVIDIA GPU here that this process may use",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
        return
    num_ranks = num_ranks or count_gpus()
    checks = [*_ON_ANY_DEVICE, *(_ON_CUDA if device == "cuda" else ())]
    if num_ranks > 1:
        yield from _run_on_mesh(num_ranks, device, [*checks, *_OF_SEVERAL_RANKS])
    else:
        yield from _run_on_mesh(1, device, checks)
        yield from _run_on_mesh(2, device, _OF_SEVERAL_RANKS)


def _run_on_mesh(num_ranks: int, device: str, checks: list[Check]) -> Iterator[CheckResult]:
    began = time.monotonic()
    try:
        mesh = create_mesh(num_ranks, device=device)
    except MeshbookError as error:
        yield CheckResult("missing", "mesh", f"{num_ranks} ranks on {device} did not start: {error}")
        return
    with mesh:
        devices = mesh.run("str(device), dist.get_backend()", echo=False).values
        where = ", ".join(f"{rank} on {placed}" for rank, (placed, _) in devices.items())
        seconds = time.monotonic() - began
        yield CheckResult("ok", "mesh", f"ranks {where}, with {devices[0][1]}, started in {seconds:.1f} s")
        for about, check in checks:
            began = time.monotonic()
            try:
                says = check(mesh)
            except CheckFailed as failure:
                yield CheckResult("poor", about, str(failure))
            except (MeshbookError, RuntimeError) as error:
                yield CheckResult("poor", about, f"{type(error).__name__}: {error}")
            else:
                yield CheckResult("ok", about, f"{says} ({time.monotonic() - began:.1f} s)")
            try:
                if not _is_whole(mesh):
                    mesh.heal()
            except MeshbookError as error:
                yield CheckResult(
                    "poor", "mesh", f"it could not be healed, and the other checks were left out: {error}"
                )
                return


def _is_whole(mesh: Mesh) -> bool:
    try:
        _run(mesh, "torch.ones(1, device=device).item()", ranks=mesh.ranks)
    except MeshbookError:
        return False
    return True


def _run(mesh: Mesh, source: str, **options: Any) -> Any:
    return mesh.run(source, echo=False, timeout=_TIMEOUT_S, **options).values


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise CheckFailed(otherwise)


# ---------------------------------------------------------------------------------------------------------------------
# Checks. Each returns what it found, and raises if that is not as it should be.


def _memory(mesh: Mesh) -> str:
    source = """
        properties = torch.cuda.get_device_properties(device)
        properties.name, properties.total_memory, torch.cuda.mem_get_info(device)[0]
    """
    found = _run(mesh, source)
    nvml = Nvml.load()
    driver = f", driver {nvml.driver_version()}" if nvml else ""
    names = sorted({name for name, _, _ in found.values()})
    free, total = min(free for _, _, free in found.values()), min(total for _, total, _ in found.values())
    return f"{len(found)} x {', '.join(names)}, {format_bytes(free)} of {format_bytes(total)} free{driver}"


def _collective(mesh: Mesh) -> str:
    total = sum(range(1, mesh.size() + 1))
    values = _run(mesh, "x = torch.full((1 << 20,), rank + 1.0, device=device)\ndist.all_reduce(x)\nx.mean().item()")
    _expect(set(values.values()) == {float(total)}, f"an all_reduce of 1 to {mesh.size()} gave {dict(values)}")
    return f"an all_reduce of {mesh.size()} is right"


def _pairs(mesh: Mesh) -> str:
    ranks = mesh.ranks
    if len(ranks) <= _MAX_RANKS_OF_ALL_PAIRS:
        pairs = [(a, b) for a in ranks for b in ranks if a < b]
    else:
        pairs = list(itertools.pairwise(ranks))
    mesh.push(_pairs=pairs)
    source = """
        import time
        _rates = {}
        for pair in _pairs:
            group = dist.new_group(list(pair))
            if rank in pair:
                x = torch.full((1 << 24,), rank + 1.0, device=device)
                dist.all_reduce(x, group=group)
                assert x[-1].item() == sum(pair) + 2, f"all_reduce of {pair} gave {x[-1].item()}"
                began = time.perf_counter()
                dist.all_reduce(x, group=group)
                x[-1].item()
                _rates[pair] = x.nbytes / (time.perf_counter() - began)
            dist.destroy_process_group(group)
        _rates
    """
    rates: dict[tuple[int, int], float] = {}
    for found in _run(mesh, source).values():
        for pair, rate in found.items():
            rates[tuple(pair)] = min(rate, rates.get(tuple(pair), rate))
    slowest = min(rates, key=lambda pair: rates[pair])
    rate = format_bytes(int(rates[slowest]))
    return f"all_reduce of 64 MiB, {len(pairs)} pair{'s' * (len(pairs) > 1)} of ranks; the slowest, {slowest}, {rate}/s"


def _stop_in_collective(mesh: Mesh) -> str:
    """Rank 0 is in a collective alone, as where ranks take different branches."""
    began = time.monotonic()
    source = "x = torch.ones(8, device=device)\ndist.all_reduce(x)\nx.sum().item()"
    try:
        mesh.run(source, ranks=[0], echo=False, timeout=_STUCK_S)
    except (CellError, MeshTimeout):
        seconds = time.monotonic() - began
    else:
        raise CheckFailed("rank 0 ended a collective that no other rank had joined")
    _collective(mesh)
    return f"a rank that waits for the others was released after {seconds:.1f} s; collectives work again"


def _stop_in_kernels(mesh: Mesh) -> str:
    source = "while True:\n    torch.cuda._sleep(50_000_000)\n    torch.cuda.synchronize()"
    began = time.monotonic()
    try:
        mesh.run(source, echo=False, timeout=_STUCK_S)
    except (CellError, MeshTimeout):
        seconds = time.monotonic() - began - _STUCK_S
    _collective(mesh)
    return f"a loop of kernels ended {max(seconds, 0.0):.2f} s after Stop"


def _error_of(mesh: Mesh, source: str, otherwise: str) -> str:
    """Return the text of the error that a cell ends with. Raises CheckFailed if it ends without one."""
    try:
        _run(mesh, source)
    except CellError as error:
        return "".join(traceback.format_exception_only(error))
    raise CheckFailed(otherwise)


def _out_of_memory(mesh: Mesh) -> str:
    last = mesh.ranks[-1]
    source = f"""
        if rank == {last}:
            torch.empty(2 * torch.cuda.get_device_properties(device).total_memory, dtype=torch.uint8, device=device)
    """
    text = _error_of(mesh, source, "twice the memory that there is could be allocated")
    _expect("out of memory" in text and f"rank {last}" in text, f"the error does not say so: {text}")
    _collective(mesh)
    return f"rank {last} is named, and works on"


def _failing_kernel(mesh: Mesh) -> str:
    last = mesh.ranks[-1]
    source = f"""
        if rank == {last}:
            torch.ones(4, device=device)[torch.tensor([7], device=device)].sum().item()
    """
    text = _error_of(mesh, source, "an index out of range went unnoticed")
    _expect("heal" in text, f"the error does not say what to do: {text}")
    began = time.monotonic()
    healed = mesh.heal()
    seconds = time.monotonic() - began
    _expect(last in healed.ranks, f"mesh.heal() did not replace rank {last}: {healed}")
    _collective(mesh)
    return f"the error names rank {last} and its remedy; mesh.heal() took {seconds:.1f} s"


def _graph_capture(mesh: Mesh) -> str:
    has_nccl = _run(mesh, "dist.get_backend()")[mesh.ranks[0]] == "nccl"
    sum_up = "dist.all_reduce(y)" if has_nccl else "y *= world_size"  # gloo's collectives go through the CPU
    source = f"""
        import time
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        x = torch.ones(1 << 16, device=device)
        with torch.cuda.stream(stream):
            y = 2 * x + 1
            {sum_up}
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            y = 2 * x + 1
            {sum_up}
            until = time.monotonic() + {_CAPTURE_S}
            while time.monotonic() < until:
                pass
        x.fill_(2)
        graph.replay()
        y.mean().item()
    """
    values = _run(mesh, source)
    wanted = 5.0 * mesh.size()
    _expect(set(values.values()) == {wanted}, f"the graph's replay gave {dict(values)} instead of {wanted}")
    return f"a graph{' with an all_reduce' if has_nccl else ''} was captured beside the service thread, and replays"


class _Attention(nn.Module):
    """(batch, length, 32) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


@torch.no_grad()
def _compare(got: list[torch.Tensor], wanted: nn.Module) -> str:
    difference = max(
        float((ours.cpu() - theirs).abs().max()) for ours, theirs in zip(got, wanted.parameters(), strict=True)
    )
    _expect(difference < _TOLERANCE, f"three steps differ from those of one process on the CPU by {difference:.1g}")
    return f"three steps are those of one process on the CPU{f', to {difference:.1g}' if difference else ''}"


def _train(model: Any, x: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam divides rounding by rounding
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _remote_attention(mesh: Mesh) -> str:
    torch.manual_seed(0)
    alone, x = _Attention(), torch.randn(2, 8, 32)
    remote = _Attention()
    remote.load_state_dict(alone.state_dict())
    model = module_to_mesh(remote, mesh)
    _train(alone, x)
    _train(model, distribute(x, mesh))
    parameters: list[Any] = list(model.parameters())
    return _compare([parameter.full_tensor() for parameter in parameters], alone)


def _dropout(mesh: Mesh) -> str:
    dropped: Any = F.dropout(distribute(torch.ones(4096), mesh), 0.5)
    copies = {rank: dropped.local(rank).cpu() for rank in mesh.ranks}
    _expect(
        all(torch.equal(copy, copies[0]) for copy in copies.values()), "replicas of one tensor drop different items"
    )
    share = float(copies[0].count_nonzero()) / 4096
    _expect(0.4 < share < 0.6, f"dropout with p=0.5 kept {share:.0%}")
    return f"kept {share:.0%} of a tensor, the same on {mesh.size()} ranks"


def _fsdp(mesh: Mesh) -> str:
    torch.manual_seed(0)
    alone, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32)
    cut = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    cut.load_state_dict(alone.state_dict())
    model = distribute(cut, mesh, strategy="fsdp")
    _train(alone, x)
    _train(model, x)
    return _compare(list(model.state_dict(full=True).values()), alone)


class _Owner(Actor):
    """Has a tensor on its rank's device, and copies another's to there."""

    def __init__(self, device: str) -> None:
        self.numbers = torch.arange(1 << 20, dtype=torch.float32, device=device)
        self.buffer: Any = None

    @endpoint
    def where(self) -> str:
        return str(self.numbers.device)

    @endpoint
    def publish(self) -> Any:
        self.numbers.mul_(2)
        self.buffer = Buffer(self.numbers)
        return self.buffer

    @endpoint
    def read(self, buffer: Any) -> float:
        copy = torch.empty_like(self.numbers)
        buffer.read_into(copy).get(_TIMEOUT_S)
        return float((copy - 2 * torch.arange(1 << 20, device=copy.device)).abs().max())


def _actors(mesh: Mesh) -> str:
    devices = {rank: placed for rank, (placed,) in _run(mesh, "(str(device),)").items()}
    kind = devices[mesh.ranks[0]].partition(":")[0]
    actors = mesh.spawn("doctor", _Owner, kind)
    try:
        placed = dict(enumerate(actors.where.call().get(_TIMEOUT_S).values()))
        _expect(placed == devices, f"actors are on {placed}, and their ranks on {devices}")
        buffer = actors.slice(rank=0).publish.call_one().get(_TIMEOUT_S)
        difference = actors.slice(rank=1).read.call_one(buffer).get(_TIMEOUT_S)
        _expect(difference == 0, f"a buffer that rank 1 read from rank 0 differs by {difference:.3g}")
        return f"each on its rank's device; rank 1 read rank 0's buffer through {buffer.backend}"
    finally:
        actors.stop().get(_TIMEOUT_S)


Check = tuple[str, Callable[[Mesh], str]]
_ON_ANY_DEVICE: list[Check] = [
    ("collective", _collective),
    ("attention", _remote_attention),
    ("dropout", _dropout),
    ("fsdp", _fsdp),
]
_ON_CUDA: list[Check] = [
    ("memory", _memory),
    ("graphs", _graph_capture),
    ("Stop, kernels", _stop_in_kernels),
    ("out of memory", _out_of_memory),
    ("failing kernel", _failing_kernel),
]
_OF_SEVERAL_RANKS: list[Check] = [
    ("pairs", _pairs),
    ("Stop, collective", _stop_in_collective),
    ("actors", _actors),
]
