"""Ranks on a real GPU: one with NCCL, and two that share a GPU with gloo; faults of a GPU, Stop, and graph capture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted
from tests.budget import when

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_meshes")]

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def alone() -> Iterator[Mesh]:
    """One rank, with NCCL."""
    with create_mesh(1, device="cuda") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def sharing() -> Iterator[Mesh]:
    """Two ranks on the first GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with create_mesh(2, device="cuda") as mesh:
            yield mesh


def values(mesh: Mesh, source: str) -> dict[int, Any]:
    return dict(mesh.run(source, echo=False, timeout=DEADLINE_S).values)


def begun(mesh: Mesh, source: str) -> Future[Any]:
    """Start a cell in the background, and wait until every rank is in it."""
    mark = f"begun at {time.monotonic()}"
    future = mesh.run(f"print({mark!r})\n{source}", wait=False, echo=False)
    when(lambda: all(mark in mesh.logs(rank) for rank in mesh.ranks))
    return future  # type: ignore[return-value]


def shown(error: CellError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


# ---- one rank, NCCL


def test_a_rank_with_a_gpu_of_its_own_has_nccl_connected_and_gloo_for_cpu_tensors(alone: Mesh) -> None:
    source = "t = torch.ones(4, device=device); dist.all_reduce(t); u = torch.ones(4); dist.all_reduce(u)\n"
    source += "objects = [None]; dist.all_gather_object(objects, 'x'); dist.barrier()\n"
    source += "(str(device), dist.get_backend(), torch.cuda.current_device(), t.tolist(), u.tolist(), objects)"
    assert values(alone, source) == {0: ("cuda:0", "nccl", 0, [1.0] * 4, [1.0] * 4, ["x"])}
    assert alone.session.info.backend == "nccl"


def test_out_of_memory_names_the_rank_and_leaves_it_usable(alone: Mesh) -> None:
    with pytest.raises(CellError, match=r"rank 0: OutOfMemoryError: CUDA out of memory") as raised:
        alone.run("torch.empty(1 << 42, dtype=torch.uint8, device=device)", echo=False)
    assert "context" not in shown(raised.value)
    assert values(alone, "t = torch.ones(4, device=device); dist.all_reduce(t); t.sum().item()") == {0: 4.0}


def test_stop_in_a_long_queue_of_kernels_gives_the_cell_back_and_keeps_the_groups(alone: Mesh) -> None:
    generation = alone.status().group_generation
    source = (
        "t = torch.ones(4, device=device)\nfor _ in range(4):\n    torch.cuda._sleep(1_000_000_000)\nt.sum().item()"
    )
    future = begun(alone, source)
    alone.interrupt()
    assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
    assert values(alone, "t = torch.ones(4, device=device); dist.all_reduce(t); t.sum().item()") == {0: 4.0}
    assert alone.status().group_generation == generation


def test_stop_while_collectives_advance_behind_each_other_does_not_abort_them(alone: Mesh) -> None:
    generation = alone.status().group_generation
    source = "t = torch.ones(4, device=device)\nfor _ in range(20):\n    torch.cuda._sleep(100_000_000)\n"
    source += "    dist.all_reduce(t)\nt.sum().item()"
    future = begun(alone, source)
    alone.interrupt()
    assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
    assert values(alone, "t = torch.ones(4, device=device); dist.all_reduce(t); t.sum().item()") == {0: 4.0}
    assert alone.status().group_generation == generation


def test_an_aborted_nccl_group_is_formed_again_in_place(alone: Mesh) -> None:
    generation = alone.status().group_generation
    source = "t = torch.ones(4, device=device)\ntorch.cuda._sleep(20_000_000_000)\ndist.all_reduce(t)\nt.sum().item()"
    future = begun(alone, source)
    alone.interrupt()
    assert isinstance(future.exception(DEADLINE_S), (CellInterrupted, CellError))
    assert values(alone, "t = torch.ones(4, device=device); dist.all_reduce(t); t.sum().item()") == {0: 4.0}
    assert alone.status().group_generation > generation


CAPTURE = """
import time
x = torch.ones(1024, device=device)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    dist.all_reduce(x)
torch.cuda.synchronize()
{before}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.mul_(2)
    dist.all_reduce(x)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:  # beats fall into the capture
        {meanwhile}
    x.add_(1)
graph.replay()
torch.cuda.synchronize()
{after}
x[0].item()
"""


def test_beats_do_not_invalidate_a_graph_that_is_captured(alone: Mesh) -> None:
    assert values(alone, CAPTURE.format(before="", meanwhile="time.sleep(0.01)", after="")) == {0: 3.0}


def test_queries_from_their_own_thread_do_not_invalidate_a_capture_even_if_they_are_asked(alone: Mesh) -> None:
    before = "ring = dist.group.WORLD._ring; event = torch.cuda.Event(); event.record()"
    meanwhile = "asked = []; ring.run_device_queries(lambda: asked.append(event.query())); time.sleep(0.05)"
    assert values(alone, CAPTURE.format(before=before, meanwhile=meanwhile, after="assert asked, asked")) == {0: 3.0}


def test_a_module_compiled_with_cuda_graphs_runs_while_beats_are_sent(alone: Mesh) -> None:
    pytest.importorskip("triton")
    source = "model = torch.compile(torch.nn.Linear(64, 64, device=device), mode='reduce-overhead')\n"
    source += "import time\ndeadline = time.monotonic() + 3\nnum_steps = 0\n"
    source += "while time.monotonic() < deadline or num_steps < 10:\n    torch.compiler.cudagraph_mark_step_begin()\n"
    source += (
        "    model(torch.ones(8, 64, device=device)).sum().backward()\n    model.zero_grad()\n    num_steps += 1\n"
    )
    source += "torch.cuda.synchronize()\nnum_steps >= 10"
    assert values(alone, source) == {0: True}


def test_the_memory_of_the_gpu_is_reported(alone: Mesh) -> None:
    alone.run("held = torch.empty(64 << 20, dtype=torch.uint8, device=device)", echo=False)

    def is_reported() -> bool:
        row = alone.memory(kind="dict")
        return (row["gpu_allocated_bytes"][0] or 0) >= 64 << 20 and (row["gpu_total_bytes"][0] or 0) > 1 << 30

    when(is_reported)
    alone.run("del held", echo=False)


def test_all_the_collectives_of_a_loop_are_seen_to_end_and_their_events_are_used_again(alone: Mesh) -> None:
    source = (
        "t = torch.ones(4, device=device)\nring = dist.group.WORLD._ring\nfor _ in range(2 * ring.size):\n"
        "    dist.all_reduce(t)\ntorch.cuda.synchronize()\n"
    )
    source += "(len(ring.running()), 0 < len(ring.slot_events) <= ring.size)"
    assert values(alone, source) == {0: (0, True)}


# ---- two ranks that share a GPU


def test_ranks_that_share_a_gpu_have_gloo_and_a_note_says_so(sharing: Mesh) -> None:
    assert values(sharing, "(str(device), dist.get_backend(), dist.get_backend(mesh.get_group()))") == dict.fromkeys(
        (0, 1), ("cuda:0", "gloo", "gloo")
    )


def test_collectives_of_ranks_that_share_a_gpu_take_cuda_tensors(sharing: Mesh) -> None:
    source = "t = torch.ones(4, device=device) * (rank + 1); dist.all_reduce(t)\n"
    source += "parts = [torch.empty(1, device=device) for _ in range(2)]; dist.all_gather(parts, t[:1] * (rank + 1))\n"
    source += "b = torch.full((2,), float(rank), device=device); dist.broadcast(b, 1)\ndist.barrier()\n"
    source += "(t.tolist(), [part.item() for part in parts], b.tolist(), str(t.device))"
    assert values(sharing, source) == dict.fromkeys((0, 1), ([3.0] * 4, [3.0, 6.0], [1.0] * 2, "cuda:0"))


def test_ranks_that_share_a_gpu_send_each_other_cuda_tensors(sharing: Mesh) -> None:
    source = "x = torch.full((3,), rank + 1.0, device=device); got = torch.zeros_like(x)\n"
    source += "ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]\n"
    source += "for work in dist.batch_isend_irecv(ops): work.wait()\n"
    source += "(got.tolist(), str(got.device))"
    assert values(sharing, source) == {0: ([2.0] * 3, "cuda:0"), 1: ([1.0] * 3, "cuda:0")}


def test_ddp_trains_on_ranks_that_share_a_gpu(sharing: Mesh) -> None:
    source = "from torch.nn.parallel import DistributedDataParallel\ntorch.manual_seed(0)\n"
    source += "model = DistributedDataParallel(torch.nn.Linear(4, 4).to(device))\n"
    source += "model(torch.full((2, 4), float(rank), device=device)).sum().backward()\n"
    source += "model.module.weight.grad.sum().item()"
    found = values(sharing, source)
    assert found[0] == found[1] == 16.0


def test_stop_in_a_collective_that_a_rank_never_joins_frees_the_others_on_a_shared_gpu(sharing: Mesh) -> None:
    future = begun(
        sharing, "import time\ndist.all_reduce(torch.ones(4, device=device)) if rank == 0 else time.sleep(1000)"
    )
    sharing.interrupt()
    assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
    assert values(sharing, "t = torch.ones(1, device=device); dist.all_reduce(t); t.item()") == {0: 2.0, 1: 2.0}


def test_a_device_assert_names_its_rank_and_a_heal_replaces_that_rank_alone(sharing: Mesh) -> None:
    sharing.run("kept = torch.ones(4, device=device) * 7", echo=False)
    before = {rank.rank: rank.pid for rank in sharing.status().ranks}
    bad = "if rank == 1:\n    torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()"
    with pytest.raises(CellError) as raised:
        sharing.run(bad, echo=False)
    assert "rank 1's CUDA context is dead (device-side assert triggered)" in shown(raised.value)
    assert "%mesh heal 1 puts a new process in its place" in shown(raised.value)
    alive_at = time.monotonic()
    when(lambda: time.monotonic() > alive_at + 3)  # beats go on, and the rank is not taken for silent
    assert {rank.state for rank in sharing.status().ranks} == {"idle"}
    healed = sharing.heal(1)
    assert healed.ranks == (1,)
    after = {rank.rank: rank.pid for rank in sharing.status().ranks}
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert values(sharing, "t = torch.ones(1, device=device); dist.all_reduce(t); t.item()") == {0: 2.0, 1: 2.0}
    assert sharing.run("kept.sum().item()", ranks=0, echo=False).values[0] == 28.0


# ---- what must not touch a GPU

_IS_ACTIVE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
def is_active(index):
    found, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDeviceGet(ctypes.byref(found), index) == 0
    assert cuda.cuDevicePrimaryCtxGetState(found, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
[index for index in range(torch.cuda.device_count()) if is_active(index)]
"""


def test_ranks_on_the_cpu_have_no_context_on_a_gpu_though_their_mesh_beats_and_is_watched() -> None:
    with create_mesh(2, device="cpu") as mesh:
        assert values(mesh, "t = torch.ones(1); dist.all_reduce(t); (t.item(), dist.get_backend())") == dict.fromkeys(
            (0, 1), (2.0, "gloo")
        )
        mesh.why()
        mesh.health()
        assert values(mesh, _IS_ACTIVE) == {0: [], 1: []}


def test_a_rank_has_a_context_on_its_own_gpu_only() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with create_mesh(2, device="cuda") as mesh:
        values(mesh, "t = torch.ones(1, device=device); dist.all_reduce(t); t.item()")
        mesh.why()
        since = time.monotonic()
        when(lambda: time.monotonic() > since + 3)
        assert values(mesh, _IS_ACTIVE) == {0: [0], 1: [1]}
