"""The operations that a transformer, a CNN and an optimizer are made of: each a line that plain torch runs too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(frozen=True)
class Operation:
    """A case of the table.

    Attributes:
        run: takes the operands, gives a tensor or several.
        data: shapes of the operands that the layout cuts.
        whole: shapes of those that every rank has all of, as parameters mostly are.
        exact: equal to plain torch bit for bit wherever no sum is taken in another order.
        kind: of the operands' numbers.
        grads: floats have gradients, which are compared too.
    """

    run: Callable[..., Any]
    data: tuple[tuple[int, ...], ...]
    replicated: tuple[tuple[int, ...], ...] = ()
    exact: bool = False
    kind: str = "normal"  # "positive", "index" (ints below 4), "mask"
    grads: bool = True


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v


def heads(x: Tensor) -> Tensor:
    batch, length, width = x.shape
    return x.reshape(batch, length, 2, width // 2).transpose(1, 2)


def set_column(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, 1] = 0.0
    return y


def fill_sums(x: Tensor) -> Tensor:
    sums = x.sum(1)
    sums[1:3] = 5.0
    return sums + torch.empty_like(sums).fill_(2.0) + x.sum(1).fill_(3.0)


def add_to_slice(x: Tensor) -> Tensor:
    y = x * 1.0
    y[..., 1:3] += 2.0
    return y


def set_block(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.0
    z[1:6:2, 4:7] = y
    return z


def rows_from_rows(x: Tensor) -> Tensor:
    y = x * 1.0
    for row in range(1, len(x)):
        y[row] += 0.5 * y[row - 1]
    return y


def through_views(x: Tensor) -> Tensor:
    y = x * 1.0
    y[1:6].t()[2:9, 1:].mul_(2.0)
    y.diagonal().fill_(3.0)
    y.flatten()[5:20].sub_(1.0)
    y[-1].copy_(y[0])
    return y


def through_uneven_view(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1.0
    by_three = y.view(3, 32)
    y.add_(1.0)
    by_three[1].mul_(2.0)
    return y, by_three * 1.0


def views_that_stay(x: Tensor) -> tuple[Tensor, ...]:
    """What is changed in one is changed in all, whichever lies as a copy."""
    y = x * 1.0
    rows, diagonal = y[2:5], y.diagonal()
    across = rows.t()
    inner = across[3:7]
    y.add_(1.0)
    total = rows.sum()
    across.mul_(2.0)
    inner.add_(5.0)
    rows[1].zero_()
    diagonal.fill_(3.0)
    first, second = y.chunk(2, 1)
    second.copy_(first)
    torch._foreach_add_([first, second], [1.0, 2.0])
    return y, total, rows + rows, across.clone(), torch.stack([inner, inner]), diagonal * 2


def with_statistics(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    noted = mean * 1.0, var.abs() + 1.0
    return F.batch_norm(x, *noted, training=True), *noted


def set_where(x: Tensor) -> Tensor:
    y = x * 1.0
    y[y > 0] = -1.0
    y[:, torch.arange(12) > 9] = 2.0
    return y


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2.0).add_(1.0).clamp_(-1.0, 2.0)
    return y


def through_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.unsqueeze(0).mul_(3.0)
    return y


def into_out(x: Tensor) -> list[Tensor]:
    found = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0], dtype=torch.long)
    return [
        torch.add(x, 1.0, out=torch.zeros_like(x)),
        torch.amax(x, 0, out=torch.zeros_like(x[0])),
        *torch.max(x, 1, out=found),
        torch.sum(x, 0, out=torch.zeros_like(x[0])),
        torch.linalg.matrix_rank(x.unsqueeze(0), atol=0.1, out=torch.zeros_like(x[:1, 0], dtype=torch.long)),
    ]


def repeated_products(x: Tensor) -> Tensor:
    return x + x.t() @ x @ x.t() @ x / 64


def pair(*shape: int) -> tuple[tuple[int, ...], ...]:
    return (shape, shape)


OPERATIONS: dict[str, Operation] = {
    # ---- element by element
    "add": Operation(torch.add, pair(8, 12), exact=True),
    "add alpha": Operation(lambda x, y: torch.add(x, y, alpha=0.5), pair(8, 12), exact=True),
    "sub number": Operation(lambda x: 1.5 - x, ((8, 12),), exact=True),
    "mul": Operation(torch.mul, pair(8, 12), exact=True),
    "div": Operation(torch.div, pair(8, 12), kind="positive", exact=True),
    "broadcast row": Operation(lambda x, b: x * b + 1, ((8, 12),), ((12,),)),
    "broadcast column": Operation(lambda x, y: x + y, ((8, 12), (8, 1))),
    "pow": Operation(lambda x: x.pow(3), ((8, 12),), exact=True),
    "exp": Operation(torch.exp, ((8, 12),)),
    "log": Operation(torch.log, ((8, 12),), kind="positive"),
    "sqrt": Operation(torch.sqrt, ((8, 12),), kind="positive", exact=True),
    "rsqrt": Operation(torch.rsqrt, ((8, 12),), kind="positive"),
    "reciprocal": Operation(torch.reciprocal, ((8, 12),), kind="positive", exact=True),
    "abs": Operation(torch.abs, ((8, 12),), exact=True),
    "neg": Operation(torch.neg, ((8, 12),), exact=True),
    "sign": Operation(torch.sign, ((8, 12),), grads=False, exact=True),
    "clamp": Operation(lambda x: x.clamp(-0.5, 0.5), ((8, 12),), exact=True),
    "maximum": Operation(torch.maximum, pair(8, 12), exact=True),
    "sin cos": Operation(lambda x: x.sin() * x.cos(), ((8, 12),)),
    "tanh": Operation(torch.tanh, ((8, 12),)),
    "sigmoid": Operation(torch.sigmoid, ((8, 12),)),
    "relu": Operation(F.relu, ((8, 12),), exact=True),
    "gelu": Operation(F.gelu, ((8, 12),)),
    "gelu tanh": Operation(lambda x: F.gelu(x, approximate="tanh"), ((8, 12),)),
    "silu": Operation(F.silu, ((8, 12),)),
    "leaky relu": Operation(lambda x: F.leaky_relu(x, 0.1), ((8, 12),), exact=True),
    "elu": Operation(F.elu, ((8, 12),)),
    "softplus": Operation(F.softplus, ((8, 12),)),
    "hardswish": Operation(F.hardswish, ((8, 12),), exact=True),
    "erf": Operation(torch.erf, ((8, 12),)),
    "lerp": Operation(lambda x, y: torch.lerp(x, y, 0.3), pair(8, 12), exact=True),
    "addcmul": Operation(lambda x, y: torch.addcmul(x, x, y, value=0.5), pair(8, 12), exact=True),
    "addcdiv": Operation(lambda x, y: torch.addcdiv(x, x, y, value=0.5), pair(8, 12), kind="positive", exact=True),
    "where": Operation(lambda x, y: torch.where(x > y, x, y), pair(8, 12), exact=True),
    "masked fill": Operation(lambda x: x.masked_fill(x > 0, 0.0), ((8, 12),), exact=True),
    "compare": Operation(lambda x, y: (x > y) | (x == y) & ~(x < 0), pair(8, 12), grads=False, exact=True),
    "isnan": Operation(lambda x: x.isnan() | x.isinf(), ((8, 12),), grads=False, exact=True),
    "to double": Operation(lambda x: x.double() * 2, ((8, 12),), exact=True),
    "to bfloat16": Operation(lambda x: x.bfloat16().float(), ((8, 12),), exact=True),
    "in place": Operation(in_place, ((8, 12),), exact=True),
    "through a view": Operation(through_view, ((8, 12),), exact=True),
    "zeros like": Operation(
        lambda x: torch.zeros_like(x) + torch.ones_like(x) * 2, ((8, 12),), grads=False, exact=True
    ),
    "full like": Operation(lambda x: torch.full_like(x, 3.5), ((8, 12),), grads=False, exact=True),
    "with a local tensor": Operation(lambda x: x + torch.arange(12.0), ((8, 12),), exact=True),
    "with a local number": Operation(lambda x: x * torch.tensor(2.0), ((8, 12),), exact=True),
    # ---- sums
    "sum": Operation(torch.sum, ((8, 12),)),
    "sum 0": Operation(lambda x: x.sum(0), ((8, 12),)),
    "sum 1 keepdim": Operation(lambda x: x.sum(1, keepdim=True), ((8, 12),)),
    "mean": Operation(torch.mean, ((8, 12),)),
    "mean 0": Operation(lambda x: x.mean(0), ((8, 12),)),
    "mean 1": Operation(lambda x: x.mean(1), ((8, 12),)),
    "mean uneven": Operation(torch.mean, ((7, 5),)),
    "mean of dims, uneven": Operation(lambda x: x.mean((0, 1)), ((7, 5),)),
    "mean 0 uneven": Operation(lambda x: x.mean(0), ((7, 5),)),
    "var": Operation(lambda x: x.var(0), ((8, 12),)),
    "std": Operation(lambda x: x.std(1), ((8, 12),)),
    "var mean": Operation(lambda x: torch.var_mean(x, 1), ((8, 12),)),
    "max": Operation(torch.max, ((8, 12),), exact=True),
    "min dim": Operation(lambda x: x.min(1).values, ((8, 12),), exact=True),
    "sgn": Operation(torch.sgn, ((8, 12),), exact=True),  # its gradient has no memory
    "conv2d of one image": Operation(F.conv2d, ((1, 4, 8, 8),), ((6, 4, 3, 3), (6,))),
    "sums that are filled": Operation(fill_sums, ((8, 12),)),
    "amax of all": Operation(lambda x: x.amax(), ((8, 12),), exact=True),
    "amin of all": Operation(lambda x: x.amin(keepdim=True), ((7, 5),), exact=True),
    "sum of all": Operation(lambda x: x.sum(()) * x.sum((), keepdim=True), ((7, 5),)),
    "norm of all": Operation(lambda x: torch.linalg.vector_norm(x, 3, ()), ((7, 5),)),
    "amax": Operation(lambda x: x.amax(0), ((8, 12),), exact=True),
    "argmax": Operation(lambda x: x.argmax(1), ((8, 12),), grads=False, exact=True),
    "argmax 0": Operation(lambda x: x.argmax(0), ((8, 12),), grads=False, exact=True),
    "argmax of all": Operation(lambda x: x.argmax(), ((8, 12),), grads=False, exact=True),
    "all any": Operation(lambda x: (x > -9).all() & (x > 9).any(), ((8, 12),), grads=False, exact=True),
    "prod": Operation(lambda x: x.prod(1), ((8, 4),)),
    "norm": Operation(lambda x: torch.linalg.vector_norm(x), ((8, 12),)),
    "norm 1": Operation(lambda x: x.norm(dim=1), ((8, 12),)),
    "logsumexp": Operation(lambda x: x.logsumexp(1), ((8, 12),)),
    "cumsum 0": Operation(lambda x: x.cumsum(0), ((8, 12),)),
    "cumsum 1": Operation(lambda x: x.cumsum(1), ((8, 12),)),
    "cumprod 0": Operation(lambda x: x.cumprod(0), ((8, 4),), kind="positive"),
    "topk": Operation(lambda x: x.topk(3, 1).values, ((8, 12),), exact=True),
    "topk of other lengths": Operation(lambda x: [x.topk(k, 1).values for k in (1, 2)], ((8, 12),), exact=True),
    "sort": Operation(lambda x: x.sort(1).values, ((8, 12),), exact=True),
    "sort 0": Operation(lambda x: x.sort(0).values, ((8, 12),), exact=True),
    # ---- shapes
    "view": Operation(lambda x: x.view(8, 4, 3), ((8, 12),), exact=True),
    "view of uneven pieces": Operation(lambda x: x.view(8, 3, 4), ((8, 12),), exact=True),
    "reshape to odd rows": Operation(lambda x: x.reshape(3, 32), ((8, 12),), exact=True),
    "unflatten both into odd parts": Operation(
        lambda x: x.unflatten(0, (3, 4)).unflatten(-1, (3, 2)) * 2, ((12, 6),), exact=True
    ),
    "through a view of uneven pieces": Operation(through_uneven_view, ((8, 12),), exact=True),
    "flatten": Operation(lambda x: x.flatten(0, 1) * 2, ((4, 6, 4),), exact=True),
    "flatten inner": Operation(lambda x: x.flatten(1, 2) * 2, ((4, 6, 4),), exact=True),
    "flatten, then a product": Operation(lambda x, w: x.flatten(0, 1) @ w, ((4, 6, 4),), ((4, 3),)),
    "unflatten": Operation(lambda x: x.unflatten(0, (4, 2)), ((8, 12),), exact=True),
    "heads": Operation(heads, ((4, 6, 8),), exact=True),
    "heads and back": Operation(lambda x: heads(x).transpose(1, 2).reshape(x.shape) * 2, ((4, 6, 8),), exact=True),
    "transpose": Operation(lambda x: x.t() * 2, ((8, 12),), exact=True),
    "permute": Operation(lambda x: x.permute(2, 0, 1) * 2, ((4, 6, 8),), exact=True),
    "unsqueeze": Operation(lambda x: x.unsqueeze(1), ((8, 12),), exact=True),
    "squeeze": Operation(lambda x: x.unsqueeze(0).squeeze(0), ((8, 12),), exact=True),
    "expand": Operation(lambda x: x.unsqueeze(1).expand(8, 3, 12) * 2, ((8, 12),)),
    "repeat": Operation(lambda x: x.repeat(1, 2), ((8, 12),)),
    "repeat interleave": Operation(lambda x: x.repeat_interleave(2, 1), ((8, 12),)),
    "slice": Operation(lambda x: x[:, 2:7] * 2, ((8, 12),), exact=True),
    "slice 0": Operation(lambda x: x[2:5] * 2, ((8, 12),), exact=True),
    "select": Operation(lambda x: x[3] * 2, ((8, 12),), exact=True),
    "select 1": Operation(lambda x: x[:, 3] * 2, ((8, 12),), exact=True),
    "step": Operation(lambda x: x[:, ::2] * 2, ((8, 12),), exact=True),
    "narrow": Operation(lambda x: x.narrow(1, 1, 4), ((8, 12),), exact=True),
    "split": Operation(lambda x: x.split(4, 1), ((8, 12),), exact=True),
    "chunk": Operation(lambda x: [part * 2 for part in x.chunk(3, -1)], ((8, 12),), exact=True),
    "unbind": Operation(lambda x: [part * 2 for part in x.unbind(1)], ((8, 3),), exact=True),
    "row by row": Operation(lambda x: torch.stack([row * 2 for row in x]), ((5, 3),), exact=True),
    "cat": Operation(lambda x, y: torch.cat([x, y], 1), pair(8, 12), exact=True),
    "cat 0": Operation(lambda x, y: torch.cat([x, y], 0), pair(8, 12), exact=True),
    "stack": Operation(lambda x, y: torch.stack([x, y]), pair(8, 12), exact=True),
    "pad": Operation(lambda x: F.pad(x, (1, 2)), ((8, 12),), exact=True),
    "roll": Operation(lambda x: x.roll(2, 1), ((8, 12),), exact=True),
    "roll 0": Operation(lambda x: x.roll(1, 0), ((8, 12),), exact=True),
    "flip": Operation(lambda x: x.flip(1), ((8, 12),), exact=True),
    "flip 0": Operation(lambda x: x.flip(0), ((8, 12),), exact=True),
    "tril": Operation(torch.tril, ((8, 8),), exact=True),
    "triu": Operation(lambda x: torch.triu(x, 1), ((8, 8),), exact=True),
    "diagonal": Operation(lambda x: x.diagonal() * 2, ((8, 8),), exact=True),
    "contiguous": Operation(lambda x: x.t().contiguous().view(-1), ((8, 12),), exact=True),
    "clone": Operation(lambda x: x.clone(), ((8, 12),), exact=True),
    "into out=": Operation(into_out, ((8, 12),), grads=False),
    # ---- changed through views, which may cut across pieces
    "set a column": Operation(set_column, ((8, 12),), exact=True),
    "add to a slice": Operation(add_to_slice, ((8, 12),), exact=True),
    "set a block": Operation(set_block, ((8, 12), (3, 3)), exact=True),
    "rows from rows": Operation(rows_from_rows, ((7, 4),)),
    "through several views": Operation(through_views, ((8, 12),), exact=True),
    "views stay views": Operation(views_that_stay, ((8, 12),), grads=False, exact=True),
    "lower part in place": Operation(lambda x: (x * 1.0).tril_().cumsum_(0), ((8, 8),)),
    "set where": Operation(set_where, ((8, 12),), exact=True),
    "put": Operation(lambda x, y: x.index_put((torch.tensor([0, 3, 3]),), y, accumulate=True), ((8, 12), (3, 12))),
    # ---- looking things up
    "gather": Operation(lambda x: x.gather(1, torch.zeros(8, 2, dtype=torch.long)), ((8, 12),), exact=True),
    "gather a row's own": Operation(lambda x: x.gather(1, torch.arange(8)[:, None] % 5), ((8, 12),), exact=True),
    "gather fewer": Operation(lambda x: x.gather(0, torch.tensor([[0, 1], [2, 3]])), ((8, 12),), exact=True),
    "scatter": Operation(lambda x, y: x.scatter(1, torch.tensor([[0, 1], [2, 3]]), y), ((8, 12), (2, 2)), exact=True),
    "select from the end": Operation(lambda x: x.select(-1, 3) * 2, ((8, 12),), exact=True),
    "index select": Operation(lambda x: x.index_select(1, torch.tensor([0, 3, 3])), ((8, 12),)),
    "index": Operation(lambda x: x[torch.tensor([0, 2, 2])], ((8, 12),)),
    "index pairs": Operation(lambda x: x[torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])], ((8, 12),)),
    "scatter add": Operation(
        lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(8, 12, dtype=torch.long), x), ((8, 12),)
    ),
    "one hot": Operation(lambda i: F.one_hot(i, 4), ((8, 6),), kind="index", grads=False, exact=True),
    "embedding, rows in pieces": Operation(lambda w: F.embedding(torch.arange(5) % 4, w).pow(2), ((8, 12),)),
    "embedding": Operation(lambda i, w: F.embedding(i, w), ((8, 6),), ((4, 12),), kind="index"),
    # ---- products
    "mm": Operation(torch.mm, ((8, 12),), ((12, 6),)),
    "mm of both": Operation(lambda x, y: x @ y.t(), pair(8, 12)),
    "with itself": Operation(repeated_products, ((8, 8),)),
    "linear": Operation(F.linear, ((8, 12),), ((6, 12), (6,))),
    "linear 3-d": Operation(F.linear, ((4, 6, 12),), ((6, 12), (6,))),
    "addmm": Operation(lambda x, b, w: torch.addmm(b, x, w), ((8, 12),), ((6,), (12, 6))),
    "products of integers": Operation(
        lambda i, j: [
            torch.addmm(i[:1, :1], i, j.t(), alpha=2),
            torch.addmv(i[:, 0], i, j[0]),
            torch.baddbmm(i[None], i[None], j[None, :6]),
        ],
        pair(8, 6),
        kind="index",
        grads=False,
        exact=True,
    ),
    "product of complex numbers": Operation(
        lambda x: [torch.complex(x, x + 1).prod(d).abs() for d in (0, 1)], ((4, 3),)
    ),
    "bmm": Operation(lambda x, y: torch.bmm(x, y.transpose(1, 2)), pair(4, 6, 8)),
    "matmul 4-d": Operation(lambda x, y: x @ y.transpose(-1, -2), pair(4, 2, 6, 8)),
    "mv": Operation(lambda x, v: x @ v, ((8, 12),), ((12,),)),
    "dot": Operation(lambda x, y: (x[0] * y[0]).sum(), pair(8, 12)),
    "outer": Operation(lambda x, w: torch.outer(x[0], w), ((8, 12),), ((6,),)),
    "einsum": Operation(lambda x, w: torch.einsum("bth,hk->btk", x, w), ((4, 6, 8),), ((8, 10),)),
    "einsum attention": Operation(lambda x, y: torch.einsum("bth,bsh->bts", x, y), pair(4, 6, 8)),
    "baddbmm": Operation(lambda x, y: torch.baddbmm(x, x, y), pair(4, 6, 6)),
    # ---- a transformer's
    "layer norm": Operation(lambda x, w, b: F.layer_norm(x, (12,), w, b), ((8, 6, 12),), ((12,), (12,))),
    "rms norm": Operation(lambda x, w: F.rms_norm(x, (12,), w), ((8, 6, 12),), ((12,),)),
    "softmax": Operation(lambda x: F.softmax(x, -1), ((8, 12),)),
    "softmax 0": Operation(lambda x: F.softmax(x, 0), ((8, 12),)),
    "log softmax": Operation(lambda x: F.log_softmax(x, -1), ((8, 12),)),
    "attention": Operation(attention, (*pair(4, 2, 8, 8), (4, 2, 8, 8))),
    "attention by hand": Operation(attention_by_hand, (*pair(4, 2, 8, 8), (4, 2, 8, 8))),
    "glu": Operation(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], ((8, 12),)),
    "rotary": Operation(
        lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1) * torch.arange(8.0).sin() + x * torch.arange(8.0).cos(),
        ((4, 6, 8),),
    ),
    "causal mask": Operation(
        lambda x: F.softmax(x.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf")), -1), ((4, 8, 8),)
    ),
    # ---- a CNN's
    "conv2d": Operation(lambda x, w, b: F.conv2d(x, w, b, padding=1), ((4, 4, 8, 8),), ((6, 4, 3, 3), (6,))),
    "conv2d of cut weights": Operation(F.conv2d, ((4, 4, 8, 8), (6, 4, 3, 3), (6,))),
    "conv2d stride": Operation(lambda x, w: F.conv2d(x, w, stride=2), ((4, 4, 8, 8),), ((6, 4, 3, 3),)),
    "conv1d": Operation(lambda x, w: F.conv1d(x, w, padding=1), ((4, 4, 8),), ((6, 4, 3),)),
    "max pool": Operation(lambda x: F.max_pool2d(x, 2), ((4, 4, 8, 8),), exact=True),
    "pools of other sizes": Operation(
        lambda x: [pool(x, size) for pool in (F.max_pool2d, F.avg_pool2d) for size in (2, 4)], ((4, 4, 8, 8),)
    ),
    "avg pool": Operation(lambda x: F.avg_pool2d(x, 2), ((4, 4, 8, 8),)),
    "adaptive pool": Operation(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), ((4, 4, 8, 8),)),
    "adaptive pool of one image": Operation(lambda x: F.adaptive_avg_pool2d(x, 5), ((8, 4, 3),)),
    "interpolate": Operation(lambda x: F.interpolate(x, scale_factor=2), ((4, 4, 4, 4),)),
    "batch norm": Operation(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), ((4, 4, 8, 8),), ((4,), (4,))
    ),
    "batch norm with statistics": Operation(with_statistics, ((4, 4, 8, 8),), ((4,), (4,)), grads=False),
    "reflected": Operation(lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"), ((4, 4, 8, 8),)),
    "prelu": Operation(F.prelu, ((4, 4, 8, 8),), ((4,),)),
    "group norm": Operation(lambda x, w, b: F.group_norm(x, 2, w, b), ((4, 4, 8, 8),), ((4,), (4,))),
    # ---- losses
    "cross entropy": Operation(lambda x: F.cross_entropy(x, torch.arange(8) % 6), ((8, 6),)),
    "cross entropy, uneven": Operation(lambda x: F.cross_entropy(x, torch.arange(7) % 5), ((7, 5),)),
    "cross entropy sum": Operation(lambda x: F.cross_entropy(x, torch.arange(8) % 6, reduction="sum"), ((8, 6),)),
    "cross entropy none": Operation(lambda x: F.cross_entropy(x, torch.arange(8) % 6, reduction="none"), ((8, 6),)),
    "cross entropy, ignored": Operation(
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, -100, 2, -100, 3, 4, 5])), ((8, 6),)
    ),
    "cross entropy, unequally ignored": Operation(
        lambda x: F.cross_entropy(x, torch.tensor([-100, -100, -100, 2, 1, 3, 4, 5])), ((8, 6),)
    ),
    "cross entropy, weights": Operation(
        lambda x: F.cross_entropy(x, torch.tensor([5, 5, 0, 1, 5, 0, 1, -100]), weight=torch.arange(1.0, 7.0)),
        ((8, 6),),
    ),
    "label smoothing": Operation(lambda x: F.cross_entropy(x, torch.arange(8) % 6, label_smoothing=0.1), ((8, 6),)),
    "nll": Operation(lambda x: F.nll_loss(F.log_softmax(x, 1), torch.arange(8) % 6), ((8, 6),)),
    "mse": Operation(F.mse_loss, pair(8, 12)),
    "mse uneven": Operation(F.mse_loss, pair(7, 5)),
    "mse sum": Operation(lambda x, y: F.mse_loss(x, y, reduction="sum"), pair(8, 12)),
    "l1": Operation(F.l1_loss, pair(8, 12)),
    "smooth l1": Operation(F.smooth_l1_loss, pair(8, 12)),
    "huber": Operation(F.huber_loss, pair(8, 12)),
    "bce with logits": Operation(lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), pair(8, 12)),
    "bce with logits uneven": Operation(lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), pair(7, 5)),
    "soft margin": Operation(lambda x, y: F.soft_margin_loss(x, y.detach().sign()), pair(7, 5), grads=False),
    "soft margin's gradient": Operation(lambda x: F.soft_margin_loss(x, torch.ones(8, 12)), ((8, 12),)),
    "matmul uneven": Operation(lambda x, w: x @ w, ((5, 3, 4),), ((4,),)),
    "multi margin": Operation(lambda x: F.multi_margin_loss(x, torch.arange(8) % 6), ((8, 6),)),
    "dropout of sums": Operation(lambda x: F.dropout(x.sum(1), 0.5) * 0.0, ((8, 12),), exact=True, grads=False),
    "bce": Operation(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), pair(8, 12)),
    "kl": Operation(lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"), pair(8, 12)),
    "cosine": Operation(lambda x, y: F.cosine_similarity(x, y, 1), pair(8, 12)),
    "cosine embedding": Operation(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([1.0, -1.0] * 4), reduction="none"), pair(8, 12)
    ),
    "loss of a mean": Operation(lambda x, y: F.mse_loss(x.mean(0), y.mean(0)), pair(8, 12)),
    # ---- matrices
    "linalg inv": Operation(lambda x: torch.linalg.inv(x @ x.t() + 8 * torch.eye(8)), ((8, 8),), grads=False),
    "bits": Operation(lambda i: (i << 2) + (i >> 1) * (i & 1), ((8, 6),), kind="index", grads=False, exact=True),
    "without a rule": Operation(lambda x: F.fold(F.unfold(x, 2) ** 2, (4, 4), 2), ((4, 4, 4, 4),)),
    "windows": Operation(lambda x: x.unfold(1, 3, 2) * 2, ((8, 12),)),
    "solve triangular": Operation(
        lambda x, w: torch.linalg.solve_triangular(w.triu() + 4 * torch.eye(3), x, upper=True),
        ((4, 3, 2),),
        ((4, 3, 3),),
    ),
    "conjugate": Operation(lambda x: torch.fft.rfft(x).conj().imag, ((8, 12),)),
    "conjugate inside": Operation(lambda x: torch.fft.ihfft(x).abs(), ((8, 12),)),
    "trace": Operation(lambda x: x.diagonal().sum(), ((8, 8),)),
    "allclose": Operation(lambda x: x * float(torch.allclose(x, x * 1.0)), ((8, 12),), grads=False, exact=True),
    "equal": Operation(lambda x: x * float(torch.equal(x, x * 1.0)), ((8, 12),), grads=False, exact=True),
    "number": Operation(lambda x: x * x.sum().item(), ((8, 12),), grads=False),
}
