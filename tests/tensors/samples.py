"""torch's own operators on torch's own samples, on a mesh as in one process: a wide net beside the table of operations.

    python -m tests.tensors.samples [--part 0/4] [--samples 2] [--only add,mul]

Each operator's first samples are cut along the first and the last dim in turn, forward and backward. It says which give
other numbers, or an error that is none of Meshbook's own refusals, and ends with 1 if there are any. Worth a run with
`--samples 8` when torch has a new version. In a process of its own, for torch's testing code changes settings as it is
imported.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

import meshbook
from meshbook.errors import PlacementError
from meshbook.tensors.remote import RemoteTensor

# What draws numbers, and what leaves them as they come.
RANDOM = {
    "bernoulli", "cauchy", "empty", "empty_like", "empty_permuted", "empty_strided", "exponential", "geometric",
    "log_normal", "multinomial", "new_empty", "new_empty_strided", "nn.functional.alpha_dropout",
    "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward", "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention", "normal", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "uniform",
}  # fmt: skip

# Sparse operands; indices that torch's own code reads from the tensor's memory; vectors that are told but for a phase;
# an operand that the kernel broadcasts, and not the operator; what torch registers as it is called.
SKIPPED = {
    "sparse.mm.reduce", "sparse.sampled_addmm", "tensor_split", "linalg.eig", "addbmm",
    "nn.functional.linear_cross_entropy",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1", help="such a part of the operators: 0/4 is the first of four")
    parser.add_argument("--samples", type=int, default=2, help="of each operator, at most")
    parser.add_argument("--only", default="", help="names of operators")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    part, parts = map(int, options.part.split("/"))
    only = set(filter(None, options.only.split(",")))
    found: Counter[str] = Counter()
    with meshbook.create_mesh({"dp": 2}) as mesh:
        for operator in op_db[part::parts]:
            if operator.name in SKIPPED or (only and operator.name not in only):
                continue
            for number, sample in enumerate(samples_of(operator, options.samples)):
                way = (Shard(0), Shard(-1))[number % 2]
                try:
                    came = check(operator, sample, mesh, way)
                except Exception as error:
                    came = "wrong"
                    print(f"{operator.name} {operator.variant_test_name}, sample {number}, {way}: {str(error)[:500]}")
                found[came] += 1
    print(", ".join(f"{count} {came}" for came, count in sorted(found.items())))
    return int(found["wrong"] > 0)


def samples_of(operator: Any, count: int) -> Iterator[Any]:
    kinds = operator.supported_dtypes("cpu")
    for kind in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if kind in kinds:
            differentiable = operator.supports_autograd and kind is torch.float32
            return itertools.islice(operator.sample_inputs("cpu", kind, requires_grad=differentiable), count)
    return iter(())


def check(operator: Any, sample: Any, mesh: meshbook.Mesh, placement: Shard) -> str:
    """ "right", "refused", or "not done" where plain torch does not do it; raises what is wrong."""
    given = ((sample.input, *sample.args), sample.kwargs)
    plain = pytree.tree_map(_clone, given)
    torch.manual_seed(0)
    try:
        wanted = operator.op(*plain[0], **plain[1])
    except Exception:
        return "not done"
    placed = pytree.tree_map(lambda leaf: _distribute(leaf, mesh, placement), given)
    try:
        results = operator.op(*placed[0], **placed[1])
        pairs = list(zip(pytree.tree_leaves(wanted), pytree.tree_leaves(results), strict=True))
        for one, other in pairs:
            _compare(one, other, numbers=operator.name not in RANDOM, alike="empty" not in operator.name)
        if operator.name not in RANDOM:
            _compare_gradients(plain, placed, [pair for pair in pairs if getattr(pair[0], "requires_grad", False)])
    except (NotImplementedError, PlacementError):
        return "refused"
    return "right"


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _distribute(leaf: Any, mesh: meshbook.Mesh, way: Shard) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    dim = way.dim % max(leaf.dim(), 1)
    cut = leaf.dim() > dim and leaf.shape[dim] > 0
    there = meshbook.distribute(leaf.detach(), mesh, [Shard(dim) if cut else Replicate()])
    return there.requires_grad_(leaf.requires_grad)


def _compare(wanted: Any, got: Any, *, numbers: bool = True, alike: bool = True) -> None:
    if not isinstance(wanted, torch.Tensor):
        assert got == wanted or got != got, f"{got!r} and not {wanted!r}"
        return
    whole = got.full_tensor() if isinstance(got, RemoteTensor) else got
    assert (got.shape, whole.shape, whole.dtype) == (wanted.shape, wanted.shape, wanted.dtype), (
        f"{tuple(got.shape)}, brought {tuple(whole.shape)} {whole.dtype}, and not {tuple(wanted.shape)} {wanted.dtype}"
    )
    if alike and isinstance(got, RemoteTensor) and all(place.is_replicate() for place in got.placements or ()):
        assert torch.equal(got.local(1).nan_to_num(), whole.nan_to_num()), "ranks hold different numbers"
    if numbers:
        torch.testing.assert_close(whole, wanted.detach(), rtol=1e-3, atol=1e-4, equal_nan=True)


def _compare_gradients(plain: Any, placed: Any, results: list[tuple[Any, Any]]) -> None:
    if not results:
        return
    torch.manual_seed(0)
    weights = [torch.randn_like(one) for one, _ in results]
    for side in (0, 1):
        outputs = [pair[side] for pair in results]
        sum((output * weight).sum().abs() for output, weight in zip(outputs, weights, strict=True)).backward()
    for one, other in zip(pytree.tree_leaves(plain), pytree.tree_leaves(placed), strict=True):
        if isinstance(one, torch.Tensor) and one.grad is not None:
            assert other.grad is not None, "no gradient came"
            _compare(one.grad, other.grad)


if __name__ == "__main__":
    sys.exit(main())
