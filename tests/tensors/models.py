"""Small models as people write them: their attention, MLPs and blocks in the ways that tensor parallelism meets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import meshbook

if TYPE_CHECKING:
    from meshbook.controller.mesh import Mesh

WORDS = 32


class Attention(nn.Module):
    """As Llama has it: q, k and v by themselves, fewer heads of keys, norms of each head, a rotary-like mask buffer."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.repeats = heads // kv_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q * scale, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width)
        self.down_proj = nn.Linear(3 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.attn_norm(x), scale=0.5)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Any) -> Any:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """Names as Hugging Face's BERT has them: attention and MLP lie in several modules."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.layer = (
            nn.Embedding(WORDS, width),
            nn.ModuleList(_BertLayer(width, heads) for _ in range(layers)),
        )
        self.cls = nn.Linear(width, WORDS)

    def forward(self, words: Any) -> Any:
        x = self.embed(words)
        for layer in self.layer:
            x = layer(x)
        return self.cls(x)


class _BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = _BertAttention(width, heads)
        self.intermediate, self.output = _Dense(width, 4 * width), _Dense(4 * width, width, norm=True)

    def forward(self, x: Any) -> Any:
        x = self.attention(x)
        return self.output(F.gelu(self.intermediate(x)), x)


class _BertAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self, self.output = _BertSelf(width, heads), _Dense(width, width, norm=True)

    def forward(self, x: Any) -> Any:
        return self.output(self.self(x), x)


class _BertSelf(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Any) -> Any:
        shape = (*x.shape[:2], self.num_attention_heads, self.attention_head_size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class _Dense(nn.Module):
    def __init__(self, inner: int, outer: int, *, norm: bool = False) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, outer)
        self.norm = nn.LayerNorm(outer) if norm else None

    def forward(self, x: Any, residual: Any = None) -> Any:
        x = self.dense(x)
        return x if self.norm is None else self.norm(x + residual)


def batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(0, WORDS, (rows, 6), generator=numbers),
            torch.randint(0, WORDS, (rows * 6,), generator=numbers),
        )
        for _ in range(count)
    ]


def trained(model: Any, data: Any) -> list[float]:
    """The losses of some steps, with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for words, following in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).reshape(-1, WORDS), following)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(wanted), rtol=1e-4, atol=2e-5)


def compare(
    mesh: Mesh, factory: Callable[[], nn.Module], strategy: Any, *, axis: str | None = "dp", given: str = "factory"
) -> Any:
    """Train a model on the mesh and in this process; losses and weights are the same.

    Args:
        axis: over which batches are cut; None: they are whole.
        given: "factory", or "module": what the mesh gets.
    """
    torch.manual_seed(5)
    alone = factory()
    torch.manual_seed(5)
    model = meshbook.distribute(factory if given == "factory" else copy.deepcopy(alone), mesh, strategy=strategy)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), tensor), name
    data = batches(3)
    close(trained(model, data if axis is None else mesh.feed(data, axis=axis)), trained(alone, data))
    for name, tensor in model.state_dict(full=True).items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-3, atol=1e-4)
    return model
