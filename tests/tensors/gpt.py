"""A small GPT, as people write it, and one step of training it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH = 64, 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, -1)
        )
        weights = F.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Any, places: Any) -> Any:
        x = self.tokens(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(count: int, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(0, VOCABULARY, (rows, LENGTH), generator=numbers),
            torch.randint(0, VOCABULARY, (rows * LENGTH,), generator=numbers),
        )
        for _ in range(count)
    ]


def loss_of(model: Any, x: Any, y: Any, places: Any) -> Any:
    return F.cross_entropy(model(x, places).reshape(-1, VOCABULARY), y)


class Trainer:
    """AdamW with a schedule and clipped gradients: floats that change from step to step.

    Its eps is large: the gradient of a key's bias is zero but for rounding, which a small one would make a step of.
    """

    def __init__(self, model: Any, places: Any) -> None:
        self.model, self.places = model, places
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=True)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, x, y, self.places)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()
