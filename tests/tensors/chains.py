"""Random chains of operations on randomly placed tensors, on a mesh as in one process.

A chain is a list of lines of Python that plain torch runs too; equal seeds give equal chains. Each value of it is
compared with plain torch's, dtypes and shapes as well, and the gradients of its leaves. A wrong number, an error that
is none of Meshbook's refusals, and a chain that does not end are failures. The soak (tests/soak) runs new ones.

A line whose result depends on the last bits of its operands is left out: chains run once more with slightly
other numbers, and a line is kept if both runs agree. What differs on the mesh then is no matter of rounding.
"""

from __future__ import annotations

import random
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.errors import PlacementError
from meshbook.tensors.remote import RemoteTensor

Chain = list[str]

AXES = {2: {"rank": 2}, 4: {"dp": 2, "tp": 2}}
DTYPES = ["float32"] * 9 + ["int64"] * 3 + ["bool"] * 3 + ["float64"] * 2 + ["bfloat16", "int32", "uint8"]
LENGTHS = [1, 2, 2, 3, 4, 4, 5, 6]

# Relative: how much the second run's numbers are off, and how much a result on the mesh may be.
NOISE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 6e-2}

# What has roots and quotients in it: a result of these that looks exact, 1.0 for one, may be a bit less elsewhere.
ROUNDED = re.compile(r"cosine|norm|softmax|var\(|std\(|layer_|loss|entropy|kl_div|attention")

# {a} any tensor, {x} one with a gradient's dtype, {m} a mask, {i} integers, {b} and {c} something that broadcasts with
# the first, {s} something of the first's shape, {w} a matrix that it can be multiplied by; {d}, {e} dims of it, {n} one
# of its lengths' indices, {z} a small whole number, {q} a number with a fraction, {k} a truth value, {t} a dtype, {y}
# placements.
VALUES = """
{a} + {b} | {a} - {b} | {a} * {b} | {a} / ({b} + 7.5) | {a} // 2 | {a} % 3 | {a} + {z} | {a} * {q} | {q} - {a} | -{x}
{x}.abs() | {x}.exp() | {x}.sigmoid() | {x}.tanh() | F.relu({x}) | F.gelu({x}) | F.silu({x}) | {x}.sin() | {x}.sqrt()
{x}.log1p() | {x}.square() | {x}.pow(3) | {x}.clamp(-1, 2) | {x}.clamp(min=0.5) | {a}.sign() | {x}.floor()
{x}.round() | {a}.abs() | {x}.reciprocal() | {x}.rsqrt() | F.softplus({x}) | F.leaky_relu({x}, 0.1) | F.elu({x})
F.hardtanh({x}) | {x}.erf() | {x}.trunc() | torch.maximum({a}, {b}) | torch.minimum({a}, {b})
torch.add({a}, {b}, alpha=2) | torch.atan2({x}, {b}) | torch.fmod({x}, 2) | torch.lerp({x}, {s}, 0.25)
torch.lerp({x}, {s}, {s}) | torch.addcmul({x}, {b}, {c}, value=0.5) | torch.addcdiv({x}, {b}, {c} + 9) | {a} > {b}
{a} == {b} | {a} <= 0 | {a} != {z} | {a} >= {b} | {a} < {q} | ~{m} | {m} & {b} | {m}.bitwise_or({b}) | {m} ^ {b}
{i} & {b} | {i} << 1 | torch.logical_and({a}, {b}) | torch.logical_not({a}) | torch.logical_or({a}, {b}) | {x}.isnan()
torch.isclose({x}, {b}) | {a}.bool() | torch.where({m}, {b}, {c}) | torch.where({a} > 0, {a}, {b})
torch.where({m}, {b}, {z}) | torch.where({m}, {q}, {b}) | {a}.masked_fill({a} > 0, {z})
{x}.masked_fill({s} < 0, {q}) | {m} * {b} | {m} + {b} | {m}.float() * {b} | {a}.to({t}) | {a}.float() | {a}.double()
{a}.long() | {a}.int() | {a}.bfloat16() | {a}.to({t}) * {q} | {a}.type_as({b}) | {a}.clone() | {a}.contiguous()
{a}.sum() | {a}.sum({d}) | {a}.sum({d}, keepdim={k}) | {a}.sum(({d}, {e})) | {a}.sum({d}, dtype=torch.float64)
{x}.mean() | {x}.mean({d}) | {x}.mean({d}, keepdim={k}) | {a}.any() | {a}.any({d}) | {a}.all()
{a}.all({d}, keepdim={k}) | {a}.argmax() | {a}.argmin({d}) | {a}.argmax({d}) | {a}.argmax({d}, keepdim={k})
{a}.max() | {a}.min() | {a}.max({d}).values | {a}.max({d}).indices | {a}.min({d}).values | {a}.min({d}).indices
{a}.amax({d}) | {a}.amin({d}, keepdim={k}) | {a}.amax(({d}, {e})) | {a}.aminmax().max | {a}.prod({d}) | {a}.prod()
{x}.norm() | {x}.norm(dim={d}) | {x}.norm(1) | torch.linalg.vector_norm({x}, 3, {d})
torch.linalg.vector_norm({x}, float("inf")) | {x}.var({d}) | torch.linalg.vector_norm({x}, 0) | {x}.var()
{x}.std({d}) | torch.var_mean({x}, {d})[1] | {x}.var({d}, correction=0) | {a}.cumsum({d}) | {x}.cumprod({d})
{x}.cummax({d}).values | {x}.cummax({d}).indices | {x}.logcumsumexp({d}) | {a}.count_nonzero()
{a}.count_nonzero({d}) | {x}.logsumexp({d}) | {x}.logsumexp(({d}, {e})) | {x}.softmax({d}) | {x}.log_softmax({d})
{x}.nansum({d}) | {x}.median() | median({x}, {d}) | nanmedian({x}, {d})
F.softmax({x}.masked_fill({s} > 1, float("-inf")), {d})
F.normalize({x}, dim={d}) | F.cosine_similarity({x}, {s}, dim={d}) | {x} @ {w} | torch.matmul({x}, {w})
{x} @ {s}.transpose(-1, -2) | F.linear({x}, {w}.t()) | F.linear({x}, {w}.t(), {w}[0]) | {x}.mv({w}[:, 0])
torch.mm({x}, {w}) | torch.bmm({x}, {s}.transpose(1, 2)) | torch.einsum("ij,jk->ik", {x}, {w})
torch.einsum("bij,bkj->bik", {x}, {s}) | torch.einsum("...i,ij->...j", {x}, {w}) | torch.outer({x}, {x})
torch.dot({x}, {s}) | torch.addmm({w}[0], {x}, {w}) | torch.einsum("ij,ij->i", {x}, {s})
torch.baddbmm({x}, {x}, {s}.transpose(1, 2) @ {x}) | F.scaled_dot_product_attention({x}[None], {s}[None], {s}[None])
torch.einsum("ij->ji", {x}) | F.conv1d({x}, leaf((2, {n}, 2), "float32", {r}, {u}))
F.conv2d({x}[None], leaf((3, {n}, 1, 2), "float32", {r}, {u})) | F.layer_norm({x}, ({l},))
F.layer_norm({x}, ({l},), {w}[:, 0], {w}[:, -1]) | F.batch_norm({x}, None, None, training=True) | F.group_norm({x}, 1)
F.rms_norm({x}, ({l},)) | F.batch_norm({x}, torch.zeros({n}), torch.ones({n})) | F.max_pool1d({x}, 2)
F.avg_pool1d({x}, 2) | F.adaptive_avg_pool1d({x}, 1) | F.glu({x}, {d}) | F.cross_entropy({x}, {s}.argmax(1))
F.cross_entropy({x}, {x}.argmin(1), reduction="sum") | F.cross_entropy({x}, {x}.argmin(1), reduction="none")
F.cross_entropy({x}, {s}.softmax(1)) | F.cross_entropy({x}, {x}.argmax(1), label_smoothing=0.1)
F.cross_entropy({x}, {x}.argmax(1), {w}[0].abs()) | F.mse_loss({x}, {s}) | F.mse_loss({x}, {s}, reduction="sum")
F.l1_loss({x}, {s}) | F.smooth_l1_loss({x}, {s}) | F.huber_loss({x}, {s})
F.binary_cross_entropy_with_logits({x}, ({s} > 0).to({x}.dtype))
F.binary_cross_entropy({x}.sigmoid(), {s}.sigmoid()) | F.kl_div({x}, {s}.softmax({d}))
F.nll_loss({x}.log_softmax(1), {s}.argmax(1)) | F.soft_margin_loss({x}, {s}.sign()) | F.one_hot({i} % 3, 3)
F.embedding({i} % 4, leaf((4, 3), "float32", {r}, {u})) | {a}.reshape(-1) | {a}.flatten() | {a}.flatten(0, 1)
{a}.reshape({l}, -1) | {a}.reshape(-1, {l}) | {a}.unflatten({d}, (-1, 2)) | {a}.view(-1) | {a}.view(*{a}.shape, 1)
{a}.t() | {a}.transpose({d}, {e}) | {a}.permute(*range({a}.dim())[::-1]) | {a}.movedim({d}, {e}) | {a}.mT
{a}.unsqueeze({d}) | {a}.squeeze() | {a}.squeeze({d}) | {a}.unsqueeze(-1) | {a}.expand(2, *{a}.shape)
{a}.repeat(2, *[1] * {a}.dim()) | {a}.tile(2) | {a}[0] | {a}[-1] | {a}[1:] | {a}[:1] | {a}[:, 1:3] | {a}[..., ::2]
{a}[..., 0] | {a}[None] | {a}[1:-1] | {a}[:, -1:] | {a}[:0] | {a}.select({d}, 0) | {a}.narrow({d}, 0, 1)
{a}.select({d}, -1) | torch.cat([{a}, {s}], {d}) | torch.cat([{a}, {s}, {a}], {d}) | torch.stack([{a}, {s}], {d})
torch.stack([{a}, {s}]) | torch.cat([{a}[:1], {s}]) | {a}.split(2, {d})[0] | {a}.split(2, {d})[-1]
{a}.chunk(2, {d})[0] | {a}.chunk(3, {d})[-1] | {a}.unbind({d})[0] | torch.hstack([{a}, {s}])
{a}.tensor_split(2, {d})[1] | {a}.gather({d}, {s}.argsort({d}))
{a}.gather({d}, torch.zeros({a}.shape, dtype=torch.long)) | {a}.index_select({d}, torch.tensor([0, 0]))
{a}.scatter({d}, torch.zeros({a}.shape, dtype=torch.long)[:1], {s})
{a}.scatter_add({d}, torch.zeros({a}.shape, dtype=torch.long), {s}) | {a}[torch.tensor([0, -1])]
{a}[:, torch.tensor([0, 0, -1])] | {a}[torch.tensor([0]), torch.tensor([-1])]
{a}.index_add({d}, torch.tensor([0]), {s}.narrow({d}, 0, 1)) | {a}.scatter({d}, {s}.argsort({d}), {s})
{a}.take_along_dim({s}.argsort({d}), {d}) | {a}.index_fill({d}, torch.tensor([0]), {z})
{a}.masked_scatter({a} > 0, {s}) | {a}.diff() | {a}.diff(dim={d}) | {a}.roll(1) | {a}.roll(1, {d})
{a}.roll((1, -1), ({d}, {e})) | {a}.flip({d}) | {a}.flip(({d}, {e})) | {a}.rot90() | {a}.sort({d}).values
{a}.sort({d}, stable=True).indices | {a}.argsort({d}, descending=True, stable=True) | {a}.topk(1, {d}).values
{a}.topk(2).values | {a}.kthvalue(1, {d}).values | {a}.tril() | {a}.triu(1) | {a}.diagonal() | {a}.diag()
{a}.trace() | F.pad({a}, (1, 2)) | F.pad({a}, (0, 1, 1, 0), value={z}) | {a}.repeat_interleave(2, {d})
{a}.unfold({d}, 2, 1) | torch.zeros_like({a}) + {b} | torch.full_like({a}, {z}) * {b} | torch.ones_like({m})
{a}.new_zeros({l}) + {z} | torch.zeros_like({x}).masked_fill({s} > 0, 1.0) | place({a}, {y}) | place({a}, {y})
place({a}, {y}) | place({a}, {y}) | place({a}, {y}) | place({a}, {y}) | parts({a}, {u}) | parts({a}, {u})
parts({a}, {u}) | parts({x}, {u}) | {x}.detach() | {a}.sum() * {b} | {b} / ({a}.sum() + 0.5) | ({a} > 0).sum({d})
({a} > 0).any({d}) * {b} | ({a} != 0).sum() + {b} | {a}.sum({d}, keepdim=True) + {a}
{x} - {x}.mean({d}, keepdim=True) | {a}.sum(0) > {z} | {a}.sum(0) * {m} | torch.where({a}.sum() > 0, {b}, 0)
{x}.sum(0).softmax(-1) | {a}.cumsum(0).sum(0) | {a}.sum({d}).item() | {a}.sum().item() | {x}.diff().sum().item()
{x}.mean().item() | {a}.any().item() | {a}.max().item() | {a}.diff().flatten()[:1].sum().item() | int({i}.sum())
bool({a}.any()) | float({x}.norm()) | torch.equal({a}, {s}) | torch.allclose({x}, {s}) | {a}.sum(0).tolist()
{a}.select({d}, 0).flatten()[:1].sum().item()
""".replace("\n", " | ")

# These change {v}, which is no leaf with a gradient.
MUTATIONS = """
{v}.add_({z}) ; {v}.mul_(2) ; {v}.add_({b}) ; {v}.mul_({b}) ; {v}.sub_({b}, alpha=2) ; {v}.clamp_(-1, 2) ; {v}.zero_()
{v}.fill_({z}) ; {v}.copy_({b}) ; {v}[0] = {z} ; {v}[1:] += {z} ; {v}[:, :1] = {z} ; {v}[..., -1] *= 2
{v}.masked_fill_({v} > 0, {z}) ; {v}.relu_() ; {v}.neg_() ; {v}.select({d}, 0).add_({z})
{v}.narrow({d}, 0, 1).mul_(3) ; {v}.flatten()[:2].fill_({z}) ; {v}.t().add_({z}) ; {v}[{v} > 0] = {z}
{v}.lerp_({s}, 0.5) ; {v}.addcmul_({b}, {b}) ; {v}.cumsum_({d}) ; {v}.tril_() ; {v}.logical_not_() ; {v} &= {b}
{v} |= {b} ; {v}.sigmoid_() ; {v}.scatter_({d}, torch.zeros({v}.shape, dtype=torch.long), {s})
{v}.index_add_({d}, torch.tensor([0]), {s}.narrow({d}, 0, 1)) ; {v}.div_(2) ; {v}.unsqueeze_(0)
{v}.index_fill_({d}, torch.tensor([0]), {z}) ; {v}[torch.tensor([0])] = {z} ; {v}.diagonal().fill_({z}) ; {v}.exp_()
{v}.gt_({z}) ; {v}.sum().add_({z})
""".replace("\n", ";")

VALUE_PATTERNS = [line.strip() for line in VALUES.split(" | ") if line.strip()]
MUTATION_PATTERNS = [line.strip() for line in MUTATIONS.split(";") if line.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# The two ways to run a line


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Small numbers, most of them exact in any dtype, so that sums are exact in any order."""
    kind = getattr(torch, dtype)
    source = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    whole = torch.randint(0 if kind is torch.uint8 else -3, 4, shape, generator=source)
    return (
        (whole + 0.25 * torch.randint(0, 3, shape, generator=source)).to(kind)
        if kind.is_floating_point
        else whole.to(kind)
    )


def weights(tensor: Any) -> torch.Tensor:
    return ((torch.arange(tensor.numel()) % 3) - 1.0).reshape(tensor.shape)


class PlainRunner:
    """What a chain's names mean in one process.

    Args:
        noise: the seed of slight changes of every result; None: none.
    """

    def __init__(self, noise: int | None = None) -> None:
        self.leaves: list[Any] = []
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)
        self.names: dict[str, Any] = {
            "torch": torch, "F": F, "S": Shard, "R": Replicate(), "leaf": self.leaf, "place": self.place,
            "parts": self.parts, "backward": self.backward,
            "median": self.median, "nanmedian": self.nanmedian,
        }  # fmt: skip

    def leaf(self, shape: tuple[int, ...], dtype: str, places: Any, seed: int, grad: bool = False) -> Any:
        made = self.put(numbers(shape, dtype, seed), places).requires_grad_(grad)
        self.leaves.append(made)
        return made

    def put(self, tensor: torch.Tensor, places: Any) -> Any:
        return tensor

    def place(self, tensor: Any, places: Any) -> Any:
        return tensor.clone()

    def parts(self, tensor: Any, seed: int) -> Any:
        """The tensor as a sum of two."""
        return tensor.clone()

    def backward(self, *tensors: Any) -> None:
        sum((tensor * weights(tensor)).sum().double() for tensor in tensors).backward()  # type: ignore[union-attr]

    def median(self, tensor: Any, dim: int) -> Any:
        return self.own(tensor).median(dim).values

    def nanmedian(self, tensor: Any, dim: int) -> Any:
        return self.own(tensor).nanmedian(dim).values

    def own(self, tensor: Any) -> Any:
        """With memory for each element: torch's median (2.13) reads beside that of an expanded tensor."""
        return tensor.contiguous()

    def run(self, line: str) -> Any:
        """The line's value, where it has one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, self.names)
        name = line.partition(" = ")[0]
        value = self.names[name] if name.isidentifier() else None
        if self._noise is not None and isinstance(value, torch.Tensor) and "leaf(" not in line:
            _add_noise(value, self._noise, rounded=ROUNDED.search(line) is not None)
        return value

    def number(self, value: Any) -> Any:
        return value


def _add_noise(value: torch.Tensor, source: torch.Generator, *, rounded: bool) -> None:
    amount = NOISE.get(value.dtype)
    if amount is None or 0 in value.stride():
        return
    data = value.detach()
    # Sums of quarters, as leaves are made of, are exact in any order; of bfloat16 only small ones.
    grain = 4 if value.dtype is torch.bfloat16 else 64
    exact = data.double() * grain == (data.double() * grain).round()
    if value.dtype is torch.bfloat16:
        exact &= data.double().abs() < 32
    noise = amount * (2 * torch.rand(data.shape, generator=source, dtype=torch.float64) - 1)
    other = data.double() * (1 + noise) + (noise if rounded else 0.0)
    with torch.no_grad():
        value.data.copy_(other if rounded else torch.where(exact, data.double(), other))


class MeshRunner(PlainRunner):
    """What they mean on a mesh."""

    def __init__(self, mesh: meshbook.Mesh) -> None:
        super().__init__()
        self._mesh, self.axes = mesh, len(mesh.grid.names)

    def put(self, tensor: torch.Tensor, places: Any) -> Any:
        return meshbook.distribute(tensor, self._mesh, list(places))

    def place(self, tensor: Any, places: Any) -> Any:
        return tensor.redistribute(list(places)).clone()

    def own(self, tensor: Any) -> Any:
        return tensor

    def parts(self, tensor: Any, seed: int) -> Any:
        one = torch.ones((2,) + (1,) * tensor.dim(), dtype=tensor.dtype)
        one[seed % 2] = 0
        if tensor.dtype in (torch.float32, torch.float64, torch.int64, torch.int32) and seed % 3:
            one[seed % 2], one[1 - seed % 2] = 3, -2  # no part is like the sum
        num_axes = len(tensor.placements)
        shards = meshbook.distribute(
            one, self._mesh, [Shard(0) if axis == seed % num_axes else Replicate() for axis in range(num_axes)]
        )
        return (shards * tensor).sum(0, dtype=tensor.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Making chains


def generate_chain(seed: int, ranks: int) -> Chain:
    """The chain of this seed."""
    return _ChainGenerator(seed, ranks).make()


class _ChainGenerator:
    def __init__(self, seed: int, ranks: int) -> None:
        self.random = random.Random(seed)
        self.axes = len(AXES[ranks])
        self.plain, self.noisy = PlainRunner(), PlainRunner(seed)
        self.lines: Chain = []
        self.pool: list[str] = []
        self.fresh: Chain = []

    def make(self) -> Chain:
        grads = self.random.random() < 0.4
        for _ in range(self.random.randint(1, 3)):
            shape = tuple(self.random.choice(LENGTHS) for _ in range(self.random.choice([0, 1, 1, 2, 2, 2, 3, 3])))
            dtype = "float32" if grads else self.random.choice(DTYPES)
            self._leaf(shape, dtype, grads)
            self._commit_fresh()
        wanted = self.random.randint(3, 12)
        for _ in range(wanted * 12):
            if wanted == 0:
                break
            wanted -= self._step(grads)
        if grads:
            self._backward()
        return self.lines

    def _step(self, grads: bool) -> bool:
        changes = self.random.random() < 0.12
        pattern = self.random.choice(MUTATION_PATTERNS if changes else VALUE_PATTERNS)
        before = len(self.plain.leaves)
        names = dict(self.plain.names), dict(self.noisy.names)
        self.fresh = []
        try:
            text = self._fill_pattern(pattern)
            if text is None:
                raise ValueError
            if not changes:
                text = f"{self._name()} = {text}"
            self.fresh.append(text)
            value, other = self.plain.run(text), self.noisy.run(text)
            if changes:  # of everything that shares its memory
                assert all(self._is_stable(self.plain.names[name], self.noisy.names[name]) for name in self.pool)
            else:
                assert self._is_stable(value, other)
            if isinstance(value, torch.Tensor):
                self.pool.append(text.partition(" = ")[0])
        except Exception:
            self.plain.names, self.noisy.names = names
            if changes:  # half of it may have been done
                self._rerun()
            del self.plain.leaves[before:], self.noisy.leaves[before:]
            self.pool = [name for name in self.pool if name in self.plain.names]
            return False
        self.lines += self.fresh
        return True

    def _rerun(self) -> None:
        self.plain, self.noisy = PlainRunner(), PlainRunner(1)
        for line in self.lines:
            self.plain.run(line), self.noisy.run(line)

    def _is_stable(self, value: Any, other: Any) -> bool:
        grain = coarsest_tolerance(self.plain.names)
        if isinstance(value, torch.Tensor):
            limit = 1e4 if value.is_floating_point() else 1e6
            small = value.numel() <= 4000 and bool((value.detach().double().abs() <= limit).all())
            return small and describe_difference(value, other, 0.3, grain) is None
        return describe_difference(value, other, 0.3, grain) is None

    def _backward(self) -> None:
        try:
            outs = [name for name in self.pool if _has_history(self.plain.names[name])]
        except RuntimeError:  # a view that torch has made invalid
            return
        if not outs:
            return
        chosen = {*self.random.sample(outs, min(len(outs), 2)), outs[-1]}
        line = f"backward({', '.join(sorted(chosen))})"
        try:
            self.plain.run(line), self.noisy.run(line)
            for one, other in zip(self.plain.leaves, self.noisy.leaves, strict=True):
                assert one.grad is None or self._is_stable(one.grad, other.grad)
        except Exception:
            return
        self.lines.append(line)

    def _name(self) -> str:
        return f"v{sum(key[0] == 'v' and key[1:].isdigit() for key in self.plain.names)}"

    def _commit_fresh(self) -> None:
        self.lines += self.fresh
        self.fresh = []

    def _leaf(self, shape: tuple[int, ...], dtype: str, grad: bool = False) -> str:
        name = self._name()
        places = self._places(len(shape))
        grad = grad and dtype.startswith(("float", "bfloat"))
        line = f"{name} = leaf({shape}, {dtype!r}, {places}, {self.random.randrange(1000)}{', True' if grad else ''})"
        self.plain.run(line), self.noisy.run(line)
        self.fresh.append(line)
        self.pool.append(name)
        return name

    def _places(self, dims: int) -> str:
        ways = ["R", *[f"S({dim})" for dim in range(dims)] * 2]
        return f"[{', '.join(self.random.choice(ways) for _ in range(self.axes))}]"

    def _fill_pattern(self, pattern: str) -> str | None:
        names = self.plain.names
        chosen: dict[str, str] = {}
        first: Any = None
        for letter in re.findall(r"{(\w)}", pattern):
            if letter in "axmiv":
                fitting = [name for name in self.pool if _matches_letter(letter, names[name])]
                if not fitting:
                    return None
                # What came last is what chains are made of.
                chosen[letter] = fitting[-1] if self.random.random() < 0.6 else self.random.choice(fitting)
                first = names[chosen[letter]]
                break
        dims = 0 if first is None else first.dim()
        # What torch writes from the memory that it reads is undefined, and of these two it does not say so.
        apart = re.search(r"index_add_|scatter_\(", pattern) is not None

        def fill(match: re.Match[str]) -> str:
            letter = match[1]
            if letter in chosen:
                return chosen[letter]
            pick: Any = ""
            if letter in "axmiv":
                raise ValueError
            elif letter in "bcs":
                pick = self._other(first, same=letter == "s", apart=apart)
            elif letter == "w":
                pick = chosen[letter] = self._leaf(
                    (first.shape[-1], self.random.choice(LENGTHS)), str(first.dtype)[6:], first.requires_grad
                )
            elif letter in "de":
                pick = self.random.randrange(-dims, dims)
            elif letter == "n":
                pick = first.shape[-2 if "conv1d" in pattern else 1 if "batch" in pattern else 0]
            elif letter == "l":
                pick = first.shape[-1] if "norm" in pattern else self.random.choice([*first.shape, 2])
            elif letter == "z":
                pick = self.random.choice([-1, 0, 1, 2])
            elif letter == "q":
                pick = self.random.choice([0.5, 1.5, -0.25])
            elif letter == "k":
                pick = self.random.choice([True, False])
            elif letter == "t":
                pick = f"torch.{self.random.choice(DTYPES)}"
            elif letter == "y":
                pick = self._places(dims)
            elif letter == "r":
                pick = self._places(2)
            elif letter == "u":
                pick = self.random.randrange(1000)
            if letter == "d":
                chosen[letter] = str(pick)
            return str(pick)

        return re.sub(r"{(\w)}", fill, pattern)

    def _other(self, first: Any, *, same: bool, apart: bool) -> str:
        names = self.plain.names
        fitting = [
            name
            for name in self.pool
            if (names[name].shape == first.shape if same else _broadcast(names[name], first))
            and not (apart and names[name].untyped_storage().data_ptr() == first.untyped_storage().data_ptr())
        ]
        if fitting and self.random.random() < 0.6:
            return self.random.choice(fitting)
        shape = list(first.shape)
        if not same:
            shape = [1 if self.random.random() < 0.2 else length for length in shape][
                self.random.choice([0, 0, 0, 1]) :
            ]
        dtype = str(first.dtype)[6:] if same or self.random.random() < 0.6 else self.random.choice(DTYPES)
        return self._leaf(tuple(shape), dtype, bool(first.requires_grad))


def _matches_letter(letter: str, tensor: torch.Tensor) -> bool:
    if letter == "x":
        return tensor.is_floating_point()
    if letter == "m":
        return tensor.dtype is torch.bool
    if letter == "i":
        return not tensor.is_floating_point() and tensor.dtype is not torch.bool
    if letter == "v":
        return not (tensor.is_leaf and tensor.requires_grad) and not _overlaps(tensor)
    return True


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether some of its elements share memory: what torch leaves there, if such a tensor is changed, is undefined."""
    places = torch.zeros((), dtype=torch.long)
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(length) * step
    return places.unique().numel() < tensor.numel()


def _has_history(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.grad_fn is not None


def _broadcast(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def describe_difference(wanted: Any, got: Any, share: float = 1.0, grain: float = 0.0) -> str | None:
    """How `got` differs from what is wanted, or None.

    Args:
        share: of what is allowed.
        grain: what is allowed at least, for numbers that were computed from coarser ones.
    """
    if not isinstance(wanted, torch.Tensor):
        if type(wanted) is not type(got):
            return f"{got!r} and not {wanted!r}"
        wanted, got = torch.tensor(wanted), torch.tensor(got)
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
        return f"{tuple(got.shape)} of {got.dtype} and not {tuple(wanted.shape)} of {wanted.dtype}"
    wanted, got = wanted.detach(), got.detach()
    allowed = share * max(TOLERANCE[wanted.dtype], grain) if wanted.dtype in TOLERANCE else 0.0
    scale = max(1.0, float(wanted.double().abs().max())) if allowed and wanted.numel() else 0.0
    if torch.allclose(got.double(), wanted.double(), rtol=allowed, atol=allowed * scale * 0.1, equal_nan=True):
        return None
    return f"{got.tolist()} and not {wanted.tolist()}"


@dataclass(frozen=True)
class ChainFailure:
    """What is wrong with a chain.

    Attributes:
        kind: "wrong", "error" or "hang".
        line: the number of the line where it shows.
    """

    kind: str
    line: int
    text: str


class ChainHung(BaseException):
    """A chain did not end in time."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `ChainHung` in the main thread after so long."""

    def late(*_: Any) -> None:
        raise ChainHung

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(
    chain: Chain, mesh: meshbook.Mesh, refusals: Counter[str] | None = None, limit_s: int = 60
) -> ChainFailure | None:
    """Run the chain in both ways; what is wrong, if anything.

    Args:
        refusals: counts the operations that are refused; the chain goes on with plain torch's values in their place.
    """
    at, refused = 0, False
    try:
        with time_limit(limit_s):
            plain, there = PlainRunner(), MeshRunner(mesh)
            half: PlainRunner | None = None
            seen: list[tuple[int, Any, Any]] = []
            for at, line in enumerate(chain):
                # What is in place of a refused value has no history, and shares no memory with what it would be of.
                if refused and not re.match(r"v\d+ = ", line):
                    chain = chain[:at]
                    break
                wanted = plain.run(line)
                try:
                    got = there.run(line)
                except (NotImplementedError, PlacementError) as error:
                    refused = True
                    if refusals is None:
                        refusals = Counter()
                    refusals[_kind_of(line, error)] += 1
                    if wanted is None:  # of a line that changes twice, one half may have been done
                        half = PlainRunner()
                        for done in chain[:at]:
                            half.run(done)
                        break
                    there.names[line.partition(" = ")[0]] = got = _as_remote(wanted, there)
                if wanted is not None:
                    seen.append((at, wanted.detach().clone() if isinstance(wanted, torch.Tensor) else wanted, got))
                    if isinstance(got, RemoteTensor) and (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
                        said = f"{tuple(got.shape)} of {got.dtype}, and not {tuple(wanted.shape)} of {wanted.dtype}"
                        return ChainFailure("wrong", at, f"said to be {said}")
            grain = coarsest_tolerance(plain.names)
            changed = any(not re.match(r"v\d+ = |backward", line) for line in chain)
            for at, wanted, got in seen:
                name = chain[at].partition(" = ")[0]
                text = _describe_remote_difference(plain.names[name] if changed else wanted, got, grain)
                if text and half is not None:
                    text = _describe_remote_difference(half.names[name], got, grain)
                if text:
                    return ChainFailure("wrong", at, text)
            for number, (one, other) in enumerate(zip(plain.leaves, there.leaves, strict=True)):
                if one.grad is not None and not refused:
                    text = (
                        "no gradient"
                        if other.grad is None
                        else _describe_remote_difference(one.grad, other.grad, grain)
                    )
                    if text:
                        return ChainFailure("wrong", len(chain) - 1, f"gradient of leaf {number}: {text}")
    except ChainHung:
        return ChainFailure("hang", at, "does not end")
    except Exception as error:
        return ChainFailure("error", at, f"{type(error).__name__}: {str(error)[:1500]}")
    return None


def _as_remote(wanted: Any, there: MeshRunner) -> Any:
    if not isinstance(wanted, torch.Tensor):
        return wanted
    return there.put(wanted.detach().clone(), [Replicate()] * there.axes)


def _kind_of(line: str, error: Exception) -> str:
    name = re.search(r"v\d+\.(\w+)|(?:F|torch|linalg)\.(\w+)\(", line)
    return f"{name[1] or name[2] if name else line}: {type(error).__name__}"


def coarsest_tolerance(names: dict[str, Any]) -> float:
    """What is allowed for the coarsest of these."""
    return max(
        (TOLERANCE.get(value.dtype, 0.0) for value in names.values() if isinstance(value, torch.Tensor)), default=0.0
    )


def _describe_remote_difference(wanted: Any, got: Any, grain: float) -> str | None:
    if not isinstance(got, RemoteTensor):
        return describe_difference(wanted, got, grain=grain)
    whole = got.detach().full_tensor()
    text = describe_difference(wanted, whole, grain=grain)
    if text is None and got.placements and all(place.is_replicate() for place in got.placements):
        copies = [got.local(rank) for rank in got.mesh.ranks[1:]]
        if any(describe_difference(wanted, copy, grain=grain) for copy in copies):
            text = f"ranks hold different numbers: {[copy.tolist() for copy in copies]} and not {wanted.tolist()}"
    return None if text is None else f"{text}, placed {got.placements}"


def shrink(chain: Chain, fails: Callable[[Chain], bool]) -> Chain:
    """The chain without what can be left out while it still fails: lines, and cuts of its leaves."""
    tried = set()

    def holds(other: Chain) -> bool:
        text = "\n".join(other)
        if text in tried:
            return False
        tried.add(text)
        plain = PlainRunner()
        try:
            for line in other:
                plain.run(line)
        except Exception:
            return False
        return fails(other)

    again = True
    while again:
        again = False
        for at in range(len(chain) - 1, -1, -1):
            rest = chain[:at] + chain[at + 1 :]
            name, _, text = chain[at].partition(" = ")
            used = re.findall(r"v\d+", text)
            replaced = (
                [[re.sub(rf"\b{name}\b", one, line) for line in rest] for one in dict.fromkeys(used)]
                if name.isidentifier()
                else []
            )
            whole = [*chain[:at], re.sub(r"S\(\d\)", "R", chain[at]), *chain[at + 1 :]]
            for other in (rest, *replaced, whole):
                if other != chain and holds(other):
                    chain, again = other, True
                    break
    return chain
