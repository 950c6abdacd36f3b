"""Remote tensors as their users meet them: values, views of both kinds, autograd, optimizers, faults, memory."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach, create_mesh
from meshbook.errors import CellInterrupted, OperationFailed, PlacementError, RankLost, TransferError
from meshbook.tensors import template_cache
from meshbook.tensors.batches import MAX_IN_FLIGHT
from meshbook.tensors.call_sites import CallSite, capture_call_site
from meshbook.tensors.creation import distribute, engine_of
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.remote import RemoteTensor
from tests.budget import WAIT_S, when
from tests.standstill import stop

pytestmark = pytest.mark.usefixtures("starts_meshes")


def live(mesh: Mesh) -> set[int]:
    """How many tensors of ours each rank holds."""
    gc.collect()
    return {answer["live"] for answer in engine_of(mesh).wait().values()}


def resident(mesh: Mesh) -> list[int]:
    """Bytes of memory of this process and of each rank."""
    source = "__import__('psutil').Process().memory_info().rss"
    return [eval(source), *mesh.run(source, echo=False).values.values()]


# ---- values


def test_a_dtensor_on_a_device_mesh_of_a_cells_own_is_one_of_this_mesh_if_it_has_its_shape(mesh2: Mesh) -> None:
    mesh2.run(
        "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "own = distribute_tensor(torch.arange(5.0), init_device_mesh('cpu', (world_size,)), [Shard(0)])\n"
        "total, turned = own.sum(), distribute_tensor(torch.ones(2), DeviceMesh('cpu', [1, 0]), [Shard(0)])"
    )
    own: Any = mesh2["own"]
    assert own.placements == (Shard(0),)
    assert own.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert f"{mesh2['total']:.1f}" == "10.0"
    own.mul_(2)
    assert mesh2.run("own.full_tensor().tolist()").values.same() == [0.0, 2.0, 4.0, 6.0, 8.0]
    with pytest.raises(OperationFailed, match=r"not along the axes of this mesh; take turned.full_tensor\(\)"):
        (mesh2["turned"] + 1).tolist()


def test_an_array_has_the_shape_of_its_tensor_and_is_one_only_where_all_ranks_agree(mesh2: Mesh) -> None:
    mesh2.run("own, equal = torch.arange(3.0) + rank, torch.tensor([1.0, float('nan')])")
    assert numpy.array_equal(numpy.asarray(mesh2["equal"]), [1.0, float("nan")], equal_nan=True)
    with pytest.raises(TransferError, match=r"t\.local\(0\) is rank 0's, t\.full_tensor\(\) has a row per rank"):
        numpy.asarray(mesh2["own"])
    assert numpy.asarray(distribute(torch.ones(4), mesh2, [Shard(0)])).shape == (4,)


def test_a_tensor_is_read_back_as_it_was_placed(mesh2: Mesh, mesh22: Mesh) -> None:
    x = torch.randn(7, 5)
    for mesh, spec in ((mesh2, ["dp"]), (mesh2, [None, "dp"]), (mesh22, [("dp", "tp")]), (mesh22, ["tp", "dp"])):
        placed = distribute(x, mesh, sharding_spec=spec)
        assert placed.shape == x.shape
        assert torch.equal(placed.full_tensor(), x)
    assert torch.equal(distribute(x, mesh2, [Shard(0)]).local(1), x[4:])
    assert distribute(x, mesh2, [Shard(0)]).tolist() == x.tolist()


def test_numbers_of_sums_in_parts_are_of_the_whole(mesh22: Mesh) -> None:
    x = distribute(torch.arange(12.0).reshape(4, 3), mesh22, [Shard(0), Replicate()])
    total = x.sum()
    assert any(place.is_partial() for place in total.placements)
    assert total.item() == 66.0
    assert total > 65.0
    assert not total > 67.0
    assert float(x.max()) == 11.0
    assert "66." in repr(total)
    assert f"{x.mean():.1f}" == "5.5"


def test_a_norm_over_what_is_cut_can_be_changed_in_place_also_where_a_view_looks_at_it(mesh2: Mesh) -> None:
    x = torch.randn(8, 4)
    norm, plain = distribute(x, mesh2, [Shard(0)]).norm(dim=0), x.norm(dim=0)
    row = norm[None]
    changed = norm.square_().sub_(9.0).pow_(3)
    assert changed is norm
    plain.square_().sub_(9.0).pow_(3)
    torch.testing.assert_close(norm.full_tensor(), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(row.full_tensor()[0], plain, rtol=1e-4, atol=1e-4)


def test_a_whole_tensor_that_is_large_is_brought_on_demand_only(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook.tensors.values.FULL_TENSOR_BYTES", 1000)
    x = distribute(torch.ones(1000), mesh2, [Shard(0)])
    with pytest.raises(MemoryError, match=r"force=True"):
        x.full_tensor()
    assert x.full_tensor(force=True).sum() == 1000


def test_a_local_operand_is_sent_along_if_it_is_small(mesh2: Mesh) -> None:
    x = distribute(torch.ones(4, 3), mesh2, [Shard(0)])
    assert torch.equal((x + torch.arange(3.0)).full_tensor(), torch.ones(4, 3) + torch.arange(3.0))
    with pytest.raises(ValueError, match="place it on the mesh once"):
        x.sum() + torch.ones(1 << 20)
    kept = torch.zeros(4, 3)
    kept.copy_(x)
    assert kept.sum() == 12
    with pytest.raises(TypeError, match="bring it here first"):
        kept.add_(x)


def test_a_sparse_or_nested_tensor_is_no_remote_tensor_and_a_name_of_one_is_a_handle(mesh2: Mesh) -> None:
    x = distribute(torch.ones(3, 3), mesh2, sharding_spec=["dp", None])
    for place in (lambda: x @ torch.eye(3).to_sparse(), lambda: distribute(torch.eye(3).to_sparse(), mesh2)):
        with pytest.raises(ValueError, match=r"a sparse tensor cannot be on a mesh.*x\.to_dense\(\) can"):
            place()
    with pytest.raises(ValueError, match=r"a nested tensor cannot be on a mesh.*to_padded_tensor"):
        distribute(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), mesh2)
    mesh2.run("sparse = torch.eye(3).to_sparse()")
    assert torch.equal(mesh2.pull(mesh2["sparse"] @ torch.ones(3, 2))[1], torch.ones(3, 2))


def test_a_generator_of_ones_own_draws_as_in_one_process_or_is_refused_with_what_to_write(mesh2: Mesh) -> None:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    halves = torch.full((4, 4), 0.5)
    x = distribute(halves, mesh2, sharding_spec=["dp", None])
    drawn, here = seeded(), seeded()
    for _ in range(2):
        whole = torch.bernoulli(x, generator=drawn).full_tensor()
        assert torch.equal(whole, torch.bernoulli(halves, generator=here))
    with pytest.raises(NotImplementedError, match=r"torch.manual_seed sets here; leave generator= out"):
        x.normal_(generator=seeded())


def test_a_local_gradient_becomes_the_tensors_own(mesh2: Mesh) -> None:
    x = distribute(torch.ones(4, 3), mesh2, [Shard(0)]).requires_grad_()
    for backward in (lambda y, grad: y.backward(grad), lambda y, grad: torch.autograd.backward([y], [grad])):
        x.grad = None
        backward(x * 1.0 + 1.0, torch.arange(12.0).view(4, 3))
        assert isinstance(x.grad, RemoteTensor)
        assert x.grad.placements == (Shard(0),)
        assert torch.equal(x.grad.full_tensor(), torch.arange(12.0).view(4, 3))
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        (x * 1.0).backward(torch.ones(3, 4))


def test_requires_grad_said_twice_brings_the_gradient_to_its_placement_once(mesh2: Mesh) -> None:
    x = distribute(torch.ones(4), mesh2, [Shard(0)]).requires_grad_().requires_grad_()
    assert len(x._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.expand(4, 3),
        lambda x: x + torch.ones(4, 3),
        lambda x: x.squeeze(0),
        lambda x: x.view(3),
        lambda x: x.reshape(3, 1),
        lambda x: x.mean(0, keepdim=True).expand(2, 3),
    ],
    ids=["expand", "broadcast", "squeeze", "view", "reshape", "keepdim"],
)
def test_a_dim_of_one_row_may_be_cut(operation: Callable[[torch.Tensor], torch.Tensor], mesh2: Mesh) -> None:
    local = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(operation(distribute(local, mesh2, [Shard(0)])).full_tensor(), operation(local))


def test_an_operator_that_only_the_notebook_knows_fails_alone_and_works_once_the_ranks_know_it(mesh2: Mesh) -> None:
    define = """
        import torch
        @torch.library.custom_op("meshbook_tests::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        @twice.register_fake
        def _(x):
            return torch.empty_like(x)
        """
    exec(textwrap.dedent(define), {})
    x = distribute(torch.ones(4, 3), mesh2, [Shard(0)])
    doubled, other = torch.ops.meshbook_tests.twice(x), x + 1
    assert other.sum().item() == 24.0
    with pytest.raises(OperationFailed, match=r"meshbook_tests\.twice is registered in the notebook"):
        doubled.sum().item()
    mesh2.run(define)
    assert torch.ops.meshbook_tests.twice(x).sum().item() == 24.0


def test_an_operator_in_place_that_returns_nothing_may_be_done_by_one_that_makes_a_new_tensor(mesh2: Mesh) -> None:
    define = """
        import torch
        @torch.library.custom_op("meshbook_tests::shift", mutates_args=())
        def shift(x: torch.Tensor) -> torch.Tensor:
            return x + 1
        @shift.register_fake
        def _(x):
            return torch.empty_like(x)
        @torch.library.custom_op("meshbook_tests::shift_", mutates_args={"x"})
        def shift_(x: torch.Tensor) -> None:
            x.add_(1)
        @shift_.register_fake
        def _(x):
            return None
        """
    exec(textwrap.dedent(define), {})
    mesh2.run(define)
    x = distribute(torch.ones(4, 3), mesh2, [Shard(0)])
    assert torch.ops.meshbook_tests.shift_(x) is None
    assert torch.ops.meshbook_tests.shift_(x[1:3]) is None  # across the pieces
    assert x.full_tensor().sum(1).tolist() == [6.0, 9.0, 9.0, 6.0]


def test_out_is_written_wherever_it_is_placed_and_keeps_its_shape(mesh2: Mesh) -> None:
    local = torch.randn(6, 4)
    x = meshbook.distribute(local, mesh2, [Shard(1)])
    for place in (Shard(0), Shard(1), Replicate()):
        out = meshbook.distribute(torch.zeros(6, 4), mesh2, [place])
        assert torch.mul(x, 2, out=out) is out
        assert out.placements == (place,)
        assert torch.equal(out.full_tensor(), local * 2)
        row = meshbook.distribute(torch.zeros(4), mesh2, [place if place == Replicate() else Shard(0)])
        torch.amin(x, 0, out=row)
        assert torch.equal(row.full_tensor(), local.amin(0))
    parts = [meshbook.distribute(torch.zeros(6, 2), mesh2) for _ in range(2)]
    torch.split_with_sizes_copy(x, [2, 2], 1, out=parts)
    assert torch.equal(parts[1].full_tensor(), local[:, 2:])
    with pytest.raises(RuntimeError, match=r"out= has shape \(6, 2\), and the result \(6, 4\)"):
        torch.mul(x, 2, out=parts[0])


def test_shape_and_placement_errors_are_raised_at_their_line(mesh2: Mesh) -> None:
    x = distribute(torch.ones(6, 4), mesh2, [Shard(1)])
    with pytest.raises(RuntimeError, match=r"\[6, 4\] X \[3, 3\].*on a mesh of dp=2"):
        x @ distribute(torch.ones(3, 3), mesh2)
    with pytest.raises(PlacementError, match="has 2 dims"):
        distribute(torch.ones(6, 4), mesh2, [Shard(2)])
    with pytest.raises(NotImplementedError, match=r"mesh\.execute"):
        x.nonzero()
    assert x.sum().item() == 24


def test_what_is_brought_here_is_local_also_where_new_tensors_are_remote(mesh2: Mesh) -> None:
    def make() -> dict[str, torch.Tensor]:
        return {"small": torch.ones(2), "large": torch.ones(300, 300)[:, 1:], "weight": nn.Linear(2, 2).weight}

    with mesh2.activate():
        brought = mesh2.execute(make)[1]
        assert isinstance(torch.ones(2), RemoteTensor)
    assert not any(isinstance(tensor, RemoteTensor) for tensor in brought.values())
    assert brought["large"].sum() == 300 * 299


# ---- random numbers


def test_random_numbers_differ_between_shards_agree_between_replicas_and_repeat(mesh22: Mesh) -> None:
    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        x = distribute(torch.zeros(64, 8), mesh22, [Shard(0), Replicate()])
        drawn = torch.rand_like(x)
        dropped = F.dropout(x + 1, 0.5)
        assert torch.equal(drawn.local(0), drawn.local(1))  # replicas
        assert not torch.equal(drawn.local(0), drawn.local(2))  # shards
        return drawn.full_tensor(), dropped.full_tensor()

    (first, dropped), (second, again) = draw(), draw()
    assert torch.equal(first, second)
    assert torch.equal(dropped, again)
    assert first.unique().numel() > 400
    assert 0.3 < (dropped == 0).float().mean() < 0.7


@pytest.mark.parametrize("channels", [6, 20_000])  # of many, DTensor cuts the channels
def test_the_statistics_of_a_batch_norm_are_those_of_the_whole_batch_on_every_rank(channels: int, mesh2: Mesh) -> None:
    x, alone = torch.randn(4, channels, 3), nn.BatchNorm1d(channels)
    model = meshbook.module_to_mesh(copy.deepcopy(alone), mesh2)
    torch.testing.assert_close(model(distribute(x, mesh2, [Shard(0)])).full_tensor(), alone(x).detach())
    for name, buffer in alone.named_buffers():
        for rank in mesh2.ranks:
            torch.testing.assert_close(model.get_buffer(name).local(rank), buffer)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.empty_like(x).random_(1000),
        lambda x: torch.poisson(x * 1000),
        lambda x: torch.multinomial(x, 5),
        lambda x: torch.multinomial(x[0], 5, replacement=True),
        lambda x: torch.distributions.Beta(x, x).sample(),
        lambda x: torch.distributions.Categorical(logits=x).sample((9,)),
        lambda x: F.rrelu(-x, training=True),
        lambda x: F.dropout(x.sum(0), 0.5),
    ],
    ids=["exponential", "random", "poisson", "rows", "one row", "beta", "categorical", "rrelu", "sums"],
)
def test_whatever_draws_numbers_draws_alike_on_replicas(
    draw: Callable[[torch.Tensor], torch.Tensor], mesh22: Mesh
) -> None:
    def drawn() -> RemoteTensor:
        torch.manual_seed(5)
        return cast(RemoteTensor, draw(distribute(torch.ones(64, 8), mesh22, [Shard(0), Replicate()])))

    first, again = drawn(), drawn()
    assert torch.equal(first.full_tensor(), again.full_tensor())
    assert torch.equal(first.local(0), first.local(1))
    if first.placements[0].is_shard():
        assert not torch.equal(first.local(0), first.local(2))
    else:
        assert torch.equal(first.redistribute([Replicate(), Replicate()]).local(0), first.full_tensor())
        assert torch.equal(first.redistribute([Replicate(), Replicate()]).local(3), first.full_tensor())


# ---- autograd


def test_a_model_trains_as_in_one_process(mesh22: Mesh) -> None:
    """Embedding, attention, norms, dropout-free blocks; AdamW as torch picks it, and foreach; clipping; a schedule."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 32)
    )
    tokens, targets = torch.randint(0, 32, (8, 6)), torch.randint(0, 32, (8, 6))
    here = copy.deepcopy(plain)
    for module in here.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = distribute(parameter, mesh22)
    mine, theirs = distribute(tokens, mesh22, sharding_spec=["dp"]), distribute(targets, mesh22, sharding_spec=["dp"])

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    for make in (lambda p: torch.optim.AdamW(p, 1e-2), lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
                 lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True)):  # fmt: skip
        found = train(here, mine, theirs, make(here.parameters()))
        wanted = train(plain, tokens, targets, make(plain.parameters()))
        assert found == pytest.approx(wanted, abs=2e-5)
    for (name, ours), other in zip(here.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("in_proj_bias"):  # a third of it, the keys', has no gradient but noise, which Adam makes large
            continue
        torch.testing.assert_close(ours.detach().full_tensor(), other.detach(), rtol=1e-4, atol=1e-4)
        assert ours.grad.placements == ours.placements  # reduced once, as it came


def test_hooks_no_grad_autocast_and_functional_transforms(mesh2: Mesh) -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 3)
    mine = distribute(x, mesh2, [Shard(0)])
    parameter = distribute(nn.Parameter(w), mesh2)
    seen = []
    parameter.register_hook(lambda grad: seen.append(tuple(grad.shape)) or grad * 2)
    (mine @ parameter).sum().backward()
    assert seen == [(4, 3)]
    torch.testing.assert_close(parameter.grad.full_tensor(), 2 * x.sum(0)[:, None].expand(4, 3))
    with torch.no_grad():
        assert not (mine @ parameter).requires_grad
        parameter -= 0.5 * parameter.grad
    torch.testing.assert_close(parameter.detach().full_tensor(), w - x.sum(0)[:, None])
    with torch.autocast("cpu", torch.bfloat16):
        assert (mine @ parameter).dtype is torch.bfloat16
    (grad,) = torch.autograd.grad(mine.requires_grad_().pow(3).sum(), mine, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), mine)
    torch.testing.assert_close(second.full_tensor(), 6 * x)


def test_placements_may_change_under_autograd(mesh22: Mesh) -> None:
    x = torch.randn(8, 4, requires_grad=True)
    mine = distribute(x, mesh22, [Shard(0), Replicate()])
    moved = (mine * 2).redistribute([Replicate(), Shard(1)])
    assert moved.placements == (Replicate(), Shard(1))
    moved.pow(2).sum().backward()
    (x * 2).pow(2).sum().backward()
    torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
    assert mine.grad.placements == mine.placements


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x.redistribute([Replicate()]).clone().gt_(2),
        lambda x: x.as_local().clone().gt_(2).as_global([Shard(0)]),
        lambda x: x.as_local().as_global([Shard(0)]).clone().gt_(2),
        lambda x: x.as_local().reduce("dp").clone().gt_(2).as_global([Replicate()]),
        lambda x: x.as_local().slice_mesh(dp=1).clone().gt_(2).as_global([Replicate()]),
    ],
    ids=["redistribute", "as_local", "as_global", "reduce", "slice_mesh"],
)
def test_the_zeros_that_torch_makes_here_for_a_gradient_are_taken_along(way: Callable[[Any], Any], mesh2: Mesh) -> None:
    x = distribute(torch.arange(6.0), mesh2, [Shard(0)]).requires_grad_()
    way(x * 1.0).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.zeros(6))


# ---- the two views


@pytest.mark.parametrize("places", [[Replicate()], [Shard(0)]], ids=["whole", "cut"])
def test_a_sum_of_a_dtype_of_its_own_is_of_that_dtype_on_the_ranks_too(mesh2: Mesh, places: Any) -> None:
    x = distribute(torch.tensor([1, 2]), mesh2, places)
    assert x.sum(0).item() == 3
    y = x.sum(0, dtype=torch.float64)
    assert torch.nn.functional.mse_loss(y, y + 1).item() == 1.0  # DTensor had a mean of integers here


def test_a_sum_of_nothing_but_parts_that_are_something_is_false(mesh2: Mesh) -> None:
    x = distribute(torch.tensor([[1.0, -2.0], [-1.0, 2.0]]), mesh2, [Shard(0)]).sum(0)
    assert x.placements == (Partial(),)
    for truth in (x.any(), x.any(0), torch.any(x, (0,)), x.any(0, keepdim=True), x.all(), x.all(0)):
        assert not truth.item()  # DTensor asks each rank's part
    assert (x + 1).all().item()


@pytest.mark.parametrize("number_first", [True, False], ids=["a number first", "a tensor first"])
def test_a_number_is_not_taken_for_a_tensor_without_dims(mesh2: Mesh, number_first: bool) -> None:
    x, y = distribute(torch.ones(()), mesh2), distribute(torch.ones((), dtype=torch.float64), mesh2)
    operator = torch.fmod if number_first else torch.mul  # what DTensor has seen, it knows
    for other in (0.5, y) if number_first else (y, 0.5):
        made = operator(x, other)
        assert torch.lerp(made, y if other is y else x, 0.5).full_tensor().dtype == made.dtype


def test_parts_of_a_sum_do_not_lose_digits_that_the_sum_keeps(mesh2: Mesh) -> None:
    local = torch.tensor([300.0, 0.25, -300.0, 0.5])
    x = distribute(local, mesh2, [Shard(0)])
    small = distribute(torch.full((3,), 3.0, dtype=torch.bfloat16), mesh2)
    for run in (lambda x, y: x.sum() * y, lambda x, y: x.sum().bfloat16(), lambda x, y: x.sum().bfloat16() * y):
        here = run(local, torch.full((3,), 3.0, dtype=torch.bfloat16))
        assert torch.equal(run(x, small).full_tensor(), here)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_rows_of_a_weight_that_is_cut_both_ways_are_looked_up(mesh22: Mesh, rows: int) -> None:
    weight, indices = torch.arange(12.0).view(4, 3), torch.arange(rows)
    there = distribute(weight, mesh22, [Shard(1), Shard(0)]).requires_grad_()
    found = torch.nn.functional.embedding(distribute(indices, mesh22, [Shard(0), Replicate()]), there)
    assert torch.equal(found.full_tensor(), weight[indices])
    found.sum().backward()
    assert torch.equal(there.grad.full_tensor(), (torch.arange(4) < rows).float()[:, None].expand(4, 3))


@pytest.mark.parametrize("places", [[Replicate()], [Shard(0)]], ids=["whole", "cut"])
def test_an_index_that_no_rank_has_a_row_for_is_an_error_and_not_a_row_of_zeros(mesh2: Mesh, places: Any) -> None:
    x = distribute(torch.ones(6, 4), mesh2, [Shard(0)])
    for index in (6, -1):
        rows = distribute(torch.tensor([[0, 1], [index, 3]]), mesh2, places)
        with pytest.raises(OperationFailed, match=f"index out of range: {index}, and dim 0 has 6 rows"):
            torch.nn.functional.embedding(rows, x).full_tensor()
    with pytest.raises(OperationFailed, match="out of"):
        x.gather(0, distribute(torch.tensor([[0, 1], [9, 3]]), mesh2, places)).full_tensor()


def test_a_squeeze_keeps_the_dims_of_a_tensor_without_rows(mesh2: Mesh) -> None:
    x = distribute(torch.ones(0, 5), mesh2, [Shard(1)])
    for squeezed in (x.squeeze(), x.squeeze(0), x[None].squeeze((0, 1))):
        assert squeezed.mv(distribute(torch.ones(5), mesh2)).full_tensor().shape == (0,)


def test_what_a_factory_or_a_division_gives_follows_from_its_numbers_and_the_default_dtype(mesh2: Mesh) -> None:
    with mesh2.activate():
        for stop in (5.0, 7.0):  # printing and reading work in there, too
            assert torch.equal(torch.arange(0.0, stop).local(1), torch.arange(stop, device="cpu").full_tensor()[0])
    whole = torch.arange(4)
    x = distribute(whole, mesh2, [Shard(0)])
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with mesh2.activate():
                assert torch.rand(2).local(0).dtype is dtype
            assert torch.equal((x / 3).full_tensor(), whole / 3)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_shape_changes_in_place_as_far_as_it_is_that_of_a_view(mesh2: Mesh) -> None:
    x, y = torch.arange(8.0).reshape(4, 2), distribute(torch.arange(8.0).reshape(4, 2), mesh2, [Shard(0)])
    for tensor in (x, y):
        rows = tensor[1:3]
        tensor.t_().unsqueeze_(0).mul_(2.0).squeeze_(0).transpose_(0, 1)
        rows.add_(1.0)
    assert y.shape == (4, 2)
    assert torch.equal(y.full_tensor(), x)
    for change in (lambda: y.resize_(2, 2), lambda: y.as_local().resize_(2, 2)):
        with pytest.raises(NotImplementedError, match="changes the shape of a tensor in place"):
            change()


def test_the_per_rank_view(mesh22: Mesh) -> None:
    with mesh22.activate():
        t = torch.rand(2, 3)
        ones = torch.ones(3) * 2
    assert t.placements is None
    own = {rank: t.local(rank) for rank in range(4)}
    assert not torch.equal(own[0], own[1])
    assert torch.equal(t.full_tensor(), torch.stack([own[rank] for rank in range(4)]))
    torch.testing.assert_close(t.reduce("dp", "sum").local(3), own[1] + own[3])
    torch.testing.assert_close(t.reduce("tp", "max").local(0), torch.maximum(own[0], own[1]))
    assert torch.equal(t.slice_mesh(dp=1, tp=0).local(1), own[2])
    leaf = t.detach().requires_grad_()
    (leaf.slice_mesh(dp=1, tp=0) * 3.0).sum().backward()
    assert leaf.grad is not None
    assert [leaf.grad.local(rank).sum().item() for rank in range(4)] == [0.0, 0.0, 4 * 3.0 * 6, 0.0]
    whole = t.as_global([Shard(0), Shard(1)])
    assert whole.shape == (4, 6)
    assert torch.equal(whole.full_tensor()[2:, :3], own[2])
    assert torch.equal(t.as_global([Partial(), Shard(0)]).full_tensor()[:2], own[0] + own[2])
    whole.mul_(2)
    assert torch.equal(t.local(2), own[2] * 2)  # one storage
    assert torch.equal(whole.as_local().local(2), own[2] * 2)
    assert ones.sum().item() == 6
    with pytest.raises(ValueError, match="a number of its own"):
        t.sum().item()
    with pytest.raises(PlacementError, match="as_global"):
        t + distribute(torch.ones(2, 3), mesh22)


# ---- cells and the controller share tensors


def test_a_tensor_of_a_cell_is_one_here_and_changes_are_seen_by_both(mesh2: Mesh) -> None:
    mesh2.run(
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "w = distribute_tensor(torch.arange(8.).reshape(4, 2), mesh, [Shard(0)], src_data_rank=None)\n"
        "own = torch.full((3,), float(rank))"
    )
    w, own = mesh2["w"], mesh2["own"]
    assert isinstance(w, RemoteTensor)
    assert w.placements == (Shard(0),)
    w.add_(1)
    assert torch.equal(w.full_tensor(), torch.arange(8.0).reshape(4, 2) + 1)
    assert mesh2.run("w.to_local().sum().item()").values[0] == 10.0
    mesh2.run("w.mul_(0)")
    assert w.sum().item() == 0.0
    assert own.placements is None
    assert [own.local(rank)[0].item() for rank in (0, 1)] == [0.0, 1.0]
    assert torch.equal(own.reduce("dp").local(0), torch.ones(3))


def test_a_dtensor_of_a_cell_that_no_remote_tensor_can_be_says_its_placements_and_what_gives_it_others(
    mesh2: Mesh,
) -> None:
    mesh2.run(
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "x = distribute_tensor(torch.arange(24.).reshape(3, 4, 2), mesh, [Shard(1)], src_data_rank=None)\n"
        "flat = x.flatten(0, 1)"
    )
    flat = mesh2["flat"]
    for use in (lambda: torch.relu(flat), lambda: distribute(torch.ones(2), mesh2) + flat):
        with pytest.raises(PlacementError, match=r"placements \(_StridedShard.*flat.full_tensor\(\) is all of it"):
            use()
    whole = torch.relu(flat.redistribute(placements=[Replicate()]))
    assert torch.equal(whole.full_tensor(), torch.arange(24.0).reshape(12, 2))


def test_remote_tensors_arrive_in_cells_as_the_ranks_own(mesh2: Mesh) -> None:
    x = distribute(torch.arange(6.0).reshape(6, 1), mesh2, [Shard(0)])
    kinds = mesh2.execute(lambda t: (type(t).__name__, tuple(t.to_local().shape)), x * 2)
    assert kinds.same() == ("DTensor", (3, 1))
    mesh2["pushed"] = x
    mesh2.run("pushed.to_local().add_(1)")
    assert torch.equal(x.full_tensor(), torch.arange(6.0).reshape(6, 1) + 1)
    with pytest.raises(TransferError, match=r"full_tensor\(\)"):
        copy.copy(x).__reduce_ex__(5)


# ---- faults


def test_an_operation_that_fails_on_the_ranks_is_told_where_its_result_is_used(mesh2: Mesh) -> None:
    table, x = distribute(torch.ones(4, 4), mesh2), distribute(torch.ones(4), mesh2)
    with engine_of(mesh2).sender.lock:  # before the fault is known here: else it is told at the next use of `bad`
        bad = F.embedding(distribute(torch.tensor([1, 9]), mesh2), table)  # the line in question
        after = (bad + 1).sum()
    assert (x * 2).sum().item() == 8  # others live on
    with pytest.raises(OperationFailed) as reported:
        after.item()
    assert "the line in question" in str(reported.value)
    assert "index out of range" in str(reported.value)
    assert reported.value.failures[0].ranks == (0, 1)
    with pytest.raises(OperationFailed, match="the line in question"):
        bad.full_tensor()
    table.add_(1)
    assert table.sum().item() == 32


def test_the_lines_of_a_cell_end_with_it() -> None:
    space: dict[str, Any] = {"here": capture_call_site}
    exec(compile("def inner():\n    return here(1)\nfound = inner()", "a cell", "exec"), space)
    assert [(code.co_filename, code.co_name) for code, _ in space["found"]] == [
        ("a cell", "inner"), ("a cell", "<module>"),
    ]  # fmt: skip


def test_operations_of_a_backward_have_the_lines_that_called_it_and_those_of_a_hook_its_own(
    mesh2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, wheres, emit = distribute(torch.ones(4), mesh2).requires_grad_(), [], TensorEngine.emit

    def noted(engine: TensorEngine, numbers: list[int | float], where: CallSite) -> None:
        wheres.append([code.co_name for code, _ in where])
        emit(engine, numbers, where)

    def once() -> None:
        (weights * 2).sum().backward()

    def again() -> None:
        (weights * 3).sum().backward()

    def doubled(grad: torch.Tensor) -> torch.Tensor:
        return grad * 2

    monkeypatch.setattr(TensorEngine, "emit", noted)
    once()
    assert {where[0] for where in wheres} == {"once"}
    wheres.clear()
    weights.register_hook(doubled)
    again()
    assert {where[0] for where in wheres} == {"again", "doubled"}
    assert {where[1] for where in wheres if where[0] == "doubled"} == {"again"}
    assert weights.grad is not None
    assert weights.grad.tolist() == [8.0] * 4


def test_a_check_without_a_result_is_told_at_the_next_wait_and_once(mesh2: Mesh) -> None:
    x = distribute(torch.ones(4, 4), mesh2)
    torch.linalg.cholesky(-x)
    with pytest.raises(OperationFailed, match="not positive-definite"):
        x.sum().item()
    assert x.sum().item() == 16


def test_a_fault_of_one_rank_frees_the_others_from_their_collective(mesh2: Mesh) -> None:
    mesh2.run("mine = torch.eye(4) * (-1 if rank else 1)")
    with engine_of(mesh2).sender.lock:  # before the fault is known here
        root = torch.linalg.cholesky(mesh2["mine"])
        total = root.reduce("dp")
    with pytest.raises(OperationFailed, match="not positive-definite") as reported:
        total.full_tensor()
    assert 1 in reported.value.failures[0].ranks
    assert mesh2.run("torch.distributed.all_reduce(torch.ones(1))") is not None  # groups are formed again
    assert distribute(torch.ones(4), mesh2, [Shard(0)]).sum().item() == 4


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), RemoteTensor.full_tensor], ids=["a number", "4 MiB"])
def test_stop_ends_operations_and_the_mesh_goes_on(
    mesh2: Mesh, press: Callable[[Mesh], None], read: Callable[[Any], Any]
) -> None:
    mesh2.run("import time\nclass Slow: pass")
    x = distribute(torch.ones(1 << 20), mesh2, [Shard(0)])
    read(x + 1)
    future = mesh2.run("time.sleep(600)", wait=False)
    later = x + 1
    press(mesh2)
    with pytest.raises(CellInterrupted):  # in the wait: whatever has to be planned for it has been
        read(later)
    future.interrupt()
    future.exception(WAIT_S)
    assert not mesh2.session.transfer._pool._receiving
    assert (x + 1).sum().item() == 2 << 20


@pytest.fixture
def press() -> Iterator[Callable[[Mesh], None]]:
    """Ctrl-C, as soon as the main thread waits for a mesh."""
    pressing: list[threading.Thread] = []

    def later(mesh: Mesh) -> None:
        def strike() -> None:
            when(lambda: not mesh.session.foreground.is_idle)
            os.kill(os.getpid(), signal.SIGINT)

        pressing.append(threading.Thread(target=strike))
        pressing[-1].start()

    yield later
    for thread in pressing:
        thread.join(WAIT_S)


def train_for_ever(x: torch.Tensor) -> None:
    for _ in range(100_000):
        x = x @ x.t() / 64
        x.sum().item()


def test_a_signal_that_ends_idle_ranks_is_named_by_the_next_operation_on_their_tensors() -> None:
    with create_mesh({"dp": 3}) as mesh:
        x = distribute(torch.ones(4, 4), mesh, [Shard(0)])
        x.sum().item()
        pids = dict(mesh.execute(os.getpid))
        for rank, number in ((0, signal.SIGALRM), (1, signal.SIGUSR2), (2, signal.SIGUSR1)):
            os.kill(pids[rank], number)
            when(lambda rank=rank: rank in mesh.session.lost)
        with pytest.raises(
            RankLost, match=r"%mesh heal puts new processes in their place, .* says of which a part is gone"
        ) as raised:
            (x + 1).sum().item()
        for rank, name in ((0, "SIGALRM"), (1, "SIGUSR2"), (2, "SIGUSR1")):
            assert f"rank {rank} (pid {pids[rank]} on" in str(raised.value)
            assert f"was killed by {name}" in str(raised.value)


def test_a_killed_rank_is_told_at_the_next_wait() -> None:
    with create_mesh({"dp": 2}) as mesh:
        x = distribute(torch.ones(64, 64), mesh, [Shard(0)])
        x.sum().item()
        large = distribute(torch.ones(4 << 20), mesh, [Shard(0)])
        kept = large.full_tensor()
        (pid,) = mesh.slice(dp=1).execute(os.getpid).values()
        stop(pid)
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RankLost, match="rank 1"):  # in the middle of a read
            large.full_tensor()
        killer.join(WAIT_S)
        with pytest.raises(RankLost, match="rank 1"):
            train_for_ever(x)
        with pytest.raises(RankLost):
            x.full_tensor()
        assert torch.equal(kept, torch.ones(4 << 20))
        del kept
        mesh.session.transfer._pool.trim(0)
        assert not mesh.session.transfer._pool._receiving
        with pytest.raises(RankLost):
            x + x
        del x, large  # ids that nobody can be told of any more
        assert mesh.run("rank + 1", ranks=0, echo=False).values[0] == 1


# ---- memory


@pytest.mark.thorough
def test_a_million_temporaries_leave_nothing_behind(mesh2: Mesh) -> None:
    a = distribute(torch.ones(2), mesh2)
    before = live(mesh2)
    for turn in range(10):
        for _ in range(5_000):
            a + a
        for _ in range(950):
            torch._foreach_mul([a] * 100, 2.0)
        a.sum().item()
        if turn == 3:  # what is kept for all of them, such as templates and buffers, is there by then
            at_first = resident(mesh2)
    grown = [now - then for now, then in zip(resident(mesh2), at_first, strict=True)]
    assert max(grown) < 32 << 20, grown
    ring: list[object] = [a * 2]
    ring.append(ring)  # a cycle
    del ring
    with pytest.raises(OperationFailed):
        torch.linalg.cholesky(-torch.outer(a, a)).sum().item()
    assert live(mesh2) == before
    engine = engine_of(mesh2)
    assert len(engine.queue) == len(engine.queue.freed_ids) == 0
    assert engine.sender.in_flight.wait_until_fewer(1, WAIT_S)  # another thread counts, perhaps after the value is here


def test_kinds_of_operations_that_are_not_used_any_more_are_forgotten_on_both_sides(
    mesh2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_cache, "_MAX_TEMPLATES", 40)
    engine = engine_of(mesh2)
    x = distribute(torch.arange(4), mesh2, [Shard(0)])
    before = max(answer["templates"] for answer in engine.wait().values())  # with those of steps that are recorded
    used: list[RemoteTensor] = []
    for number in range(200):
        used.append(x * number)
        x.sum()  # in every round, so that it stays
    assert torch.equal(torch.stack(used).full_tensor(), torch.outer(torch.arange(200), torch.arange(4)))
    engine.wait()
    assert len(engine.templates) == len(engine.templates.by_number) <= 80
    assert all(len(engine.templates) <= answer["templates"] <= before + 80 for answer in engine.wait().values())
    assert (x * 3).tolist() == [0, 3, 6, 9]  # was forgotten
    assert torch.equal((x * 199).full_tensor(), torch.arange(4) * 199)


def test_a_batch_that_stop_meets_on_its_way_out_is_not_sent_twice(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, connection = engine_of(mesh2), mesh2.session.connection
    x = distribute(torch.zeros(4), mesh2)
    engine.wait()
    send = connection.send

    def stopped(command: Any) -> None:
        send(command)
        signal.raise_signal(signal.SIGINT)

    x.add_(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "send", stopped)
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
    assert x.tolist() == [1.0] * 4
    assert engine.sender.in_flight.wait_until_fewer(1, WAIT_S)


def test_no_python_runs_as_a_tensor_is_let_go_of_where_a_ctrl_c_would_be_dropped(mesh2: Mesh) -> None:
    x = distribute(torch.zeros(4), mesh2) + 1
    seen: list[str] = []
    gc.collect()  # not while one looks
    sys.setprofile(lambda frame, event, arg: seen.append(f"{event} {frame.f_code.co_name}"))
    del x
    sys.setprofile(None)
    assert [one for one in seen if one.startswith("call")] == []


@pytest.mark.thorough
def test_python_does_not_run_away_from_the_ranks(mesh2: Mesh) -> None:
    x = distribute(torch.ones(2), mesh2)
    engine = engine_of(mesh2)
    pids = mesh2.execute(os.getpid)
    x.sum().item()
    seen: list[int] = []
    stop(*pids.values())

    def go_on() -> None:
        deadline = time.monotonic() + 60
        while len(engine.sender.in_flight) < MAX_IN_FLIGHT and time.monotonic() < deadline:
            engine.sender.in_flight.wait_until_fewer(1, 0.05)  # nobody tells when a batch is sent
        seen.append(len(engine.sender.in_flight))
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)

    resumed = threading.Thread(target=go_on)
    try:
        resumed.start()
        for _ in range(20_000):
            x = x * 1.0
            seen.append(len(engine.sender.in_flight))
        resumed.join(WAIT_S)
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
    # Two threads send: this one, and the one for batches that are not full. Each waits for room before it sends.
    assert MAX_IN_FLIGHT <= max(seen) <= MAX_IN_FLIGHT + 1
    assert x.sum().item() == 2


def test_a_client_that_leaves_takes_its_tensors_with_it(mesh2: Mesh) -> None:
    def num_spaces() -> set[int]:
        return set(mesh2.execute(spaces_of_this_rank).values())

    before = num_spaces()
    other = attach(mesh2.name)
    x = distribute(torch.ones(4), other)
    assert x.sum().item() == 4
    assert num_spaces() == {count + 1 for count in before}
    other.detach()
    when(lambda: num_spaces() == before)


def spaces_of_this_rank() -> int:
    """How many clients' tensors this rank holds."""
    import gc

    from meshbook.rank.tensors.tensor_store import TensorStore

    gc.collect()
    return sum(type(thing) is TensorStore for thing in gc.get_objects())


def test_large_tensors_come_whole_in_any_dtype(mesh2: Mesh) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        mine = (torch.arange(6 << 20).reshape(6, -1) % 251).to(dtype)
        for spec in (["dp", None], [None, "dp"]):
            whole = distribute(mine, mesh2, sharding_spec=spec).full_tensor()
            assert whole.dtype == dtype
            assert torch.equal(whole, mine)
            whole.zero_()


def test_targets_of_a_mean_loss_are_counted_over_the_mesh_once_for_both_directions(mesh2: Mesh) -> None:
    scores = distribute(torch.randn(8, 6).log_softmax(1), mesh2, sharding_spec=["dp"])
    targets = distribute(torch.tensor([0, 1, -100, 2, -100, 3, 4, 5]), mesh2, sharding_spec=["dp"])
    _, counted = torch.ops.aten.nll_loss_forward(scores, targets, None, 1, -100)
    assert str(counted.placements) == "(Replicate(),)"
    assert counted.item() == 6
