"""Remote tensors on ranks whose device is not the CPU: what is planned here for a CPU runs there (`mock_device`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.tensors.operations import OPERATIONS
from tests.tensors.test_conformance import LAYOUTS, check

pytestmark = pytest.mark.usefixtures("starts_meshes")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        mesh.run(
            f"import sys, warnings; sys.path.insert(0, {str(ROOT)!r}); warnings.simplefilter('ignore')\n"
            "from tests.tensors import mock_device\n"
            "mesh = mock_device.take_over_rank()"
        )
        yield mesh


def per_rank(mesh: Mesh, function: Any, *args: Any) -> list[Any]:
    values = mesh.execute(function, *args)
    return [values[rank] for rank in range(mesh.size())]


def largest_operand() -> int:
    from tests.tensors import mock_device

    return max(size for _, size in mock_device.calls)


def num_waits() -> int:
    return torch.mock.num_waits  # type: ignore[attr-defined]


def heads() -> torch.Tensor:
    return torch.randn(4, 2, 8, 16)


# Of the table, what has kernels by device, random numbers, indices, new tensors, views or Partial results.
CHOSEN = (
    "add", "broadcast row", "to bfloat16", "through a view", "full like", "with a local tensor", "sum 0", "mean uneven",
    "var mean", "argmax 0", "cumsum 0", "topk", "heads and back", "cat 0", "roll 0", "tril", "set a block", "put",
    "gather", "index pairs", "scatter add", "one hot", "embedding, rows in pieces", "mm of both", "einsum attention",
    "layer norm", "rms norm", "log softmax", "attention", "attention by hand", "conv2d", "max pool", "interpolate",
    "batch norm with statistics", "group norm", "cross entropy, uneven", "bce with logits", "linalg inv", "equal",
)  # fmt: skip


def test_operations_planned_here_run_there(mesh: Mesh) -> None:
    wrong = []
    for name in CHOSEN:
        try:
            check(OPERATIONS[name], LAYOUTS["shard 0"], mesh)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_values_lie_there_and_are_read_from_there(mesh: Mesh) -> None:
    x = torch.arange(24.0).view(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        remote = meshbook.distribute(x, mesh, [placement])
        assert per_rank(mesh, lambda tensor: str(tensor.to_local().device), remote) == ["mock:0"] * 2
        assert torch.equal(remote.full_tensor(), x)
        assert remote.stats().mean == pytest.approx(11.5)
        assert "23." in repr(remote)


def test_a_device_that_is_named_here_is_not_looked_for_here(mesh: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4, 2), mesh, [Shard(0)])
    assert x.to("cuda") is x
    assert x.to(device="cuda:1") is x
    assert x.cuda(1) is x
    halves = x.to("cuda", torch.float16)
    assert (halves.dtype, halves.placements) == (torch.float16, (Shard(0),))
    assert x.to(torch.float64).dtype is torch.float64
    assert x.to("meta").is_meta
    model = meshbook.module_to_mesh(nn.Linear(2, 3), mesh)
    assert model.to("cuda", torch.float64).cuda()(x.to(torch.float64)).full_tensor().dtype is torch.float64


def test_waiting_for_the_ranks_waits_for_their_devices(mesh: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4, 2), mesh)
    before = per_rank(mesh, num_waits)
    (x + x).engine.wait()
    assert per_rank(mesh, num_waits) == [count + 1 for count in before]


def test_only_its_own_shard_of_a_tensor_is_moved_to_a_ranks_device(mesh: Mesh) -> None:
    mesh.run("mock_device.calls.clear()")
    x = torch.randn(64, 64)
    remote = meshbook.distribute(x, mesh, [Shard(0)])
    assert torch.equal(remote.full_tensor(), x)
    largest = per_rank(mesh, largest_operand)
    assert largest == [64 * 64 * 4 // 2] * 2


@pytest.mark.parametrize("mask_shape", [None, (8, 8), (4, 1, 8, 8), (4, 2, 8, 8)])
def test_attention_is_that_of_the_ranks_device(mesh: Mesh, mask_shape: tuple[int, ...] | None) -> None:
    torch.manual_seed(1)
    mask = None if mask_shape is None else torch.randn(mask_shape)
    data = [heads().transpose(1, 2).contiguous().transpose(1, 2), heads(), heads()]
    remote = [meshbook.distribute(x, mesh, [Shard(0)]).requires_grad_() for x in data]
    plain = [x.requires_grad_() for x in data]
    named = {"is_causal": mask is None, "scale": 0.3}
    got = F.scaled_dot_product_attention(
        *remote, attn_mask=None if mask is None else meshbook.distribute(mask, mesh), **named
    )
    wanted = F.scaled_dot_product_attention(*plain, attn_mask=mask, **named)
    assert got.placements == (Shard(0),)  # whatever the mask is
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-5, atol=1e-5)
    for _ in range(2):  # the graph stays on the ranks as long as it does here
        got.sum().backward(retain_graph=True)
        wanted.sum().backward(retain_graph=True)
    for own, other in zip(remote, plain, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        without = F.scaled_dot_product_attention(
            *remote, attn_mask=None if mask is None else meshbook.distribute(mask, mesh), **named
        )
    assert torch.equal(without.full_tensor(), got.full_tensor())


def test_random_numbers_are_equal_on_replicas_and_differ_between_shards(mesh: Mesh) -> None:
    torch.manual_seed(3)
    whole = meshbook.distribute(torch.ones(64, 4), mesh)
    rows = meshbook.distribute(torch.ones(64, 4), mesh, [Shard(0)])
    for tensor, are_equal in ((whole, True), (rows, False)):
        for drawn in (
            F.dropout(tensor, 0.5),
            torch.rand_like(tensor),
            tensor.clone().normal_(),
            torch.bernoulli(tensor * 0.5),
        ):
            one, other = (drawn.local(rank) for rank in range(2))
            assert torch.equal(one, other) == are_equal
    torch.manual_seed(4)
    first = torch.rand_like(rows).full_tensor()
    torch.manual_seed(4)
    assert torch.equal(torch.rand_like(rows).full_tensor(), first)


def test_dtensors_of_cells_draw_by_torchs_own_tracker_before_and_after(mesh: Mesh) -> None:
    def draw() -> list[tuple[str, float]]:
        mesh.run(
            "from torch.distributed.tensor import DTensor, Replicate, _random\n"
            "torch.manual_seed(5)\n"
            "whole = DTensor.from_local(torch.ones(64, device='mock'), mesh, [Replicate()], run_check=False)\n"
            "drawn = type(_random._rng_tracker).__name__, torch.rand_like(whole).to_local().sum().item()"
        )
        return list(mesh.pull("drawn").values())

    mesh.run("import torch")
    before = draw()
    torch.rand_like(meshbook.distribute(torch.ones(4, 4), mesh)).full_tensor()
    after = draw()
    assert len({number for _, number in before + after}) == 1
    assert {name for name, _ in after} == {"OffsetBasedRNGTracker"}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["each", "foreach", "fused"])
def test_steps_of_a_module_that_was_brought_there_are_those_of_plain_torch(mesh: Mesh, options: dict[str, Any]) -> None:
    torch.manual_seed(6)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options) for model in (plain, remote)]
    for _ in range(2):
        x = torch.randn(4, 8, 16)
        for model, optimizer, batch in zip(
            (plain, remote), optimizers, (x, meshbook.distribute(x, mesh, [Shard(0)])), strict=True
        ):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for own, other in zip(remote.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), other, rtol=1e-3, atol=1e-3)


def train(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_recorded_step_gives_the_losses_of_one_process(mesh: Mesh) -> None:
    torch.manual_seed(3)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    batches = [torch.randn(4, 8, 16) for _ in range(5)]

    own, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (remote, plain))
    step = meshbook.record(lambda x: train(remote, own, x))
    got = [step(meshbook.distribute(x, mesh, [Shard(0)])).item() for x in batches]
    assert step.stats().replayed >= 2
    wanted = [train(plain, other, x).item() for x in batches]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["batch norm", "lstm", "weight norm"])
def test_modules_for_which_torch_has_kernels_by_device(mesh: Mesh, name: str, training: bool) -> None:
    torch.manual_seed(7)
    plain, x, placement = {
        "batch norm": (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5), Shard(0)),
        "lstm": (nn.LSTM(8, 8, batch_first=True), torch.randn(4, 5, 8), Replicate()),
        "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), torch.randn(4, 8), Shard(0)),
    }[name]
    plain.train(training)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)

    def run(model: Any, batch: Any) -> Any:
        with torch.set_grad_enabled(training):
            result = model(batch)
        return result[0] if isinstance(result, tuple) else result

    got, wanted = run(remote, meshbook.distribute(x, mesh, [placement])), run(plain, x)
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-4, atol=1e-4)
    if training:
        got.square().sum().backward()
        wanted.square().sum().backward()
        for own, other in zip(remote.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=1e-3, atol=1e-3)


class CpuOnly:
    """gloo's group, which on a GPU fails with the address of a tensor that is not in the CPU's memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in ("send", "recv", "recv_anysource"):
            return method

        def checked(tensors: list[torch.Tensor], *args: Any) -> Any:
            if not all(tensor.is_cpu for tensor in tensors):
                raise RuntimeError("Bad address")
            return method(tensors, *args)

        return checked


def exchange() -> tuple[list[float], list[float], int]:
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    real, rank = world.inner, dist.get_rank()
    world.replace_inner(CpuOnly(real))
    try:
        x = torch.full((3,), rank + 1.0).to("mock")
        got, from_any = torch.zeros(3).to("mock"), torch.zeros(3).to("mock")
        works: list[Any] = [dist.isend(x, 1 - rank), dist.irecv(got, 1 - rank)]
        for work in works:
            work.wait()
        if rank == 0:
            sender = dist.recv(from_any)
        else:
            dist.send(x * 10, 0)
            sender = -1
    finally:
        world.replace_inner(real)
    return got.cpu().tolist(), from_any.cpu().tolist(), sender


def test_tensors_of_a_device_are_sent_and_received_on_gloo_which_knows_the_cpu_only(mesh: Mesh) -> None:
    assert per_rank(mesh, exchange) == [([2.0] * 3, [20.0] * 3, 1), ([1.0] * 3, [0.0] * 3, -1)]
