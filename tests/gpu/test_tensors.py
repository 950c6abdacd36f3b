"""Remote tensors on ranks with a GPU, compared with plain torch on the same GPU.

One rank has NCCL for its group. Two ranks share the GPU if the mesh has only one: then their group is gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.tensors import gpt
from tests.tensors.test_mock_device import train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("starts_meshes")]


@pytest.fixture(scope="module", params=[1, 2])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    with create_mesh({"dp": request.param}, device="cuda") as mesh:
        yield mesh


def close(remote: Any, local: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(remote.full_tensor(), local.detach().cpu(), rtol=tolerance, atol=tolerance)


def compare(function: Callable[..., Any], mesh: Mesh, *local: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Compare results and gradients of a function, for batches that are sharded."""
    remote = [meshbook.distribute(x, mesh, [Shard(0)]).requires_grad_(x.is_floating_point()) for x in local]
    plain = [x.cuda().requires_grad_(x.is_floating_point()) for x in local]
    got, wanted = function(*remote), function(*plain)
    close(got, wanted, tolerance)
    slope = torch.linspace(-1, 1, wanted.numel(), device="cuda").view(wanted.shape)
    (wanted * slope.to(wanted.dtype)).sum().backward()
    (got * meshbook.distribute(slope.to(wanted.dtype).cpu(), mesh)).sum().backward()
    for x, y in zip(remote, plain, strict=True):
        if y.grad is not None:
            close(x.grad, y.grad, tolerance)


def heads(width: int = 16, length: int = 8, num: int = 2) -> torch.Tensor:
    return torch.randn(4, num, length, width)


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "of transposed": lambda q, k, v: F.scaled_dot_product_attention(q * 1, k * 2, v).transpose(1, 2).reshape(4, 8, -1),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(mesh: Mesh, name: str) -> None:
    torch.manual_seed(1)
    compare(ATTENTIONS[name], mesh, heads(), heads(), heads())


@pytest.mark.parametrize("shape", [(8, 8), (1, 1, 8, 8), (4, 1, 8, 8), (4, 2, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_with_a_mask(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    mask = mask if dtype is torch.bool else torch.zeros(shape).masked_fill(~mask, -1e4)
    q, k, v = heads(), heads(), heads()
    remote = [meshbook.distribute(x, mesh, [Shard(0)]).requires_grad_() for x in (q, k, v)]
    plain = [x.cuda().requires_grad_() for x in (q, k, v)]
    got = F.scaled_dot_product_attention(*remote, attn_mask=meshbook.distribute(mask, mesh))
    wanted = F.scaled_dot_product_attention(*plain, attn_mask=mask.cuda())
    close(got, wanted)
    got.sum().backward()
    wanted.sum().backward()
    for x, y in zip(remote, plain, strict=True):
        close(x.grad, y.grad)


def test_attention_of_odd_widths_and_of_half_precision(mesh: Mesh) -> None:
    torch.manual_seed(1)
    compare(ATTENTIONS["causal"], mesh, heads(13), heads(13), heads(13))
    compare(ATTENTIONS["causal"], mesh, *(heads(64, 128).bfloat16() for _ in range(3)), tolerance=3e-2)


def test_attention_backward_runs_twice_and_in_checkpoints(mesh: Mesh) -> None:
    q = meshbook.distribute(heads(), mesh, [Shard(0)]).requires_grad_()
    out = F.scaled_dot_product_attention(q, q, q).sum()
    first = torch.autograd.grad(out, q, retain_graph=True)[0].full_tensor()
    assert torch.equal(torch.autograd.grad(out, q)[0].full_tensor(), first)
    again = torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), q)[0].full_tensor(), first)


def test_attention_with_dropout_runs(mesh: Mesh) -> None:
    torch.manual_seed(2)
    q = meshbook.distribute(heads(), mesh, [Shard(0)]).requires_grad_()
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True).sum().backward()
    assert q.grad.full_tensor().isfinite().all()


def test_random_numbers_are_equal_on_replicas_and_differ_between_shards(mesh: Mesh) -> None:
    torch.manual_seed(3)
    whole = meshbook.distribute(torch.ones(64, 4), mesh)
    for result in (
        F.dropout(whole, 0.5), torch.rand_like(whole), torch.randn_like(whole), whole.clone().normal_(),
        torch.bernoulli(whole * 0.5),
    ):  # fmt: skip
        parts = [result.local(rank) for rank in range(mesh.size())]
        assert len(parts[0].unique()) > 1
        assert all(torch.equal(part, parts[0]) for part in parts)
    rows = meshbook.distribute(torch.ones(64, 4), mesh, [Shard(0)])
    for result in (F.dropout(rows, 0.5), torch.rand_like(rows), rows.clone().normal_()):
        parts = [result.local(rank) for rank in range(mesh.size())]
        assert all(not torch.equal(part, parts[0]) for part in parts[1:])
    torch.manual_seed(4)
    first = torch.rand_like(rows).full_tensor()
    torch.manual_seed(4)
    assert torch.equal(torch.rand_like(rows).full_tensor(), first)


def test_dtensors_of_a_users_cell_draw_by_torchs_own_tracker_afterwards(mesh: Mesh) -> None:
    torch.rand_like(meshbook.distribute(torch.ones(4, 4), mesh)).full_tensor()
    mesh.run(
        "import torch\nfrom torch.distributed.tensor import Shard, Replicate, distribute_tensor\n"
        "torch.manual_seed(5)\n"
        "x = distribute_tensor(torch.ones(8, 4, device='cuda'), mesh, [Replicate()] * mesh.ndim)\n"
        "y = torch.nn.functional.dropout(x, 0.5).to_local().sum().item()\n"
        "z = torch.rand_like(x).to_local().sum().item()\n"
        "kind = type(torch.distributed.tensor._random._rng_tracker).__name__"
    )
    ys, zs, kinds = (list(mesh.pull(name).values()) for name in ("y", "z", "kind"))
    assert len(set(ys)) == len(set(zs)) == 1
    assert set(kinds) == {"OffsetBasedRNGTracker"}


class SdpaBlock(nn.Module):
    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["each", "foreach", "fused"])
def test_training_steps_of_a_block_are_those_of_plain_torch(mesh: Mesh, options: dict[str, Any]) -> None:
    torch.manual_seed(6)
    plain = SdpaBlock()
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, **options) for model in (plain, remote)]
    for _ in range(3):
        x = torch.randn(4, 8, 32)
        losses = []
        for model, optimizer, batch in zip(
            (plain, remote), optimizers, (x.cuda(), meshbook.distribute(x, mesh, [Shard(0)])), strict=True
        ):
            optimizer.zero_grad()
            losses.append(model(batch).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4)
    for own, other in zip(remote.parameters(), plain.parameters(), strict=True):
        close(own, other, 1e-3)


def test_a_recorded_step_with_attention_gives_the_losses_of_one_process(mesh: Mesh) -> None:
    torch.manual_seed(3)
    plain = SdpaBlock(16, 2)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()
    batches = [torch.randn(4, 8, 16) for _ in range(6)]
    own, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (remote, plain))

    step = meshbook.record(lambda x: train(remote, own, x))
    got = [step(meshbook.distribute(x, mesh, [Shard(0)])).item() for x in batches]
    assert step.stats().replayed >= 2
    wanted = [train(plain, other, x.cuda()).item() for x in batches]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-3, atol=1e-4)


def modules() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(7)
    return {
        "batch norm": (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
        "convolutions": (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            torch.randn(4, 3, 8, 8),
        ),
        "lstm": (nn.LSTM(8, 8, batch_first=True), torch.randn(4, 5, 8)),
        "gru": (nn.GRU(8, 8, batch_first=True), torch.randn(4, 5, 8)),
        "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), torch.randn(4, 8)),
        "layers": (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(4, 8, 16)),
        "rms norm": (nn.RMSNorm(8), torch.randn(4, 8)),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(modules()))
def test_modules(mesh: Mesh, name: str, training: bool) -> None:
    plain, x = modules()[name]
    plain.train(training)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()

    def run(model: nn.Module, batch: Any) -> Any:
        result = model(batch)
        return result[0] if isinstance(result, tuple) else result

    placements = [Replicate()] if name in ("lstm", "gru") else [Shard(0)]
    got = run(remote, meshbook.distribute(x, mesh, placements))
    wanted = run(plain, x.cuda())
    close(got, wanted, 1e-3)
    if training:
        got.square().sum().backward()
        wanted.square().sum().backward()
        for own, other in zip(remote.parameters(), plain.parameters(), strict=True):
            close(own.grad, other.grad, 2e-3)
    for own, other in zip(remote.buffers(), plain.buffers(), strict=True):
        close(own, other, 1e-3)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_model_of_hugging_face(mesh: Mesh, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(8)
    if kind == "GPT2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=32,
            vocab_size=64,
            n_positions=32,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        )
        plain = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=32,
        )  # fmt: skip
        plain = transformers.LlamaForCausalLM(config)
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()
    ids = torch.randint(0, 64, (4, 16))
    got = remote(meshbook.distribute(ids, mesh, [Shard(0)]), use_cache=False).logits
    wanted = plain(ids.cuda(), use_cache=False).logits
    close(got, wanted, 1e-3)
    F.cross_entropy(got.view(-1, 64), meshbook.distribute(ids.view(-1), mesh, [Shard(0)])).backward()
    F.cross_entropy(wanted.view(-1, 64), ids.view(-1).cuda()).backward()
    for own, other in zip(remote.parameters(), plain.parameters(), strict=True):
        close(own.grad, other.grad, 1e-3)


def test_autocast_here_casts_there(mesh: Mesh) -> None:
    torch.manual_seed(9)
    plain = SdpaBlock()
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()
    x = torch.randn(4, 8, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # remote tensors report a CPU
        got = remote(meshbook.distribute(x, mesh, [Shard(0)]))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wanted = plain(x.cuda())
    close(got.float(), wanted.float(), 5e-2)
    got.float().sum().backward()
    assert all(parameter.grad.full_tensor().isfinite().all() for parameter in remote.parameters())


def test_values_come_and_go(mesh: Mesh) -> None:
    x = torch.arange(24.0).view(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        remote = meshbook.distribute(x, mesh, [placement])
        devices = mesh.execute(lambda tensor: tensor.to_local().device.type, remote)
        assert [devices[rank] for rank in range(mesh.size())] == ["cuda"] * mesh.size()
        assert torch.equal(remote.full_tensor(), x)
        assert remote.sum().item() == x.sum().item()
        assert remote.stats().mean == pytest.approx(x.mean().item())
        assert "RemoteTensor" in repr(remote) or "tensor" in repr(remote)
    remote[1:3] = 7.0
    x[1:3] = 7.0
    assert torch.equal(remote.full_tensor(), x)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
def test_distributed_modules_train_as_plain_torch(mesh: Mesh, strategy: str) -> None:
    torch.manual_seed(10)
    plain = SdpaBlock()
    remote = meshbook.distribute(copy.deepcopy(plain), mesh, strategy=strategy)
    plain.cuda()
    own, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (remote, plain))
    for _ in range(2):
        x = torch.randn(4, 8, 32)
        for model, optimizer, batch in (
            (remote, own, meshbook.distribute(x, mesh, [Shard(0)])), (plain, other, x.cuda()),
        ):  # fmt: skip
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for one, two in zip(remote.parameters(), plain.parameters(), strict=True):
        close(one, two, 1e-3)


def test_the_gpt_of_the_other_tests(mesh: Mesh) -> None:
    torch.manual_seed(11)
    plain = gpt.GPT()
    remote = meshbook.module_to_mesh(copy.deepcopy(plain), mesh)
    plain.cuda()
    places = torch.arange(gpt.LENGTH)
    own = gpt.Trainer(remote, meshbook.distribute(places, mesh))
    other = gpt.Trainer(plain, places.cuda())
    for x, y in gpt.batches(3):
        got = own.step(meshbook.distribute(x, mesh, [Shard(0)]), meshbook.distribute(y, mesh, [Shard(0)]))
        assert got.item() == pytest.approx(other.step(x.cuda(), y.cuda()).item(), rel=1e-3)


def test_batches_that_are_fed_while_the_device_computes_are_those_that_were_given(mesh: Mesh) -> None:
    weight = meshbook.distribute(torch.eye(2048), mesh)
    batches = [torch.full((2048, 2048), float(number)) for number in range(12)]
    means = []
    for rows in mesh.feed(batches):
        for _ in range(20):  # so that the next batch arrives while these run
            rows = rows @ weight
        means.append(rows.mean())
    assert [mean.item() for mean in means] == list(range(12))
