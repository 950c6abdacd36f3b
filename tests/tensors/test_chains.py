"""Chains of operations on placed tensors that were wrong once give what plain torch gives. The soak makes new ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import Shard

import meshbook
from meshbook.controller.mesh import Mesh
from tests.tensors.chains import Chain, check

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("starts_meshes")]

# Each was wrong, or did not end, before.
TWO_RANKS: dict[str, Chain] = {
    "truth values in parts": [
        "v0 = leaf((5, 3), 'bool', [S(0)], 1)",
        "v1 = v0.any(0)",
        "v2 = v1 + 1.5",
        "v3 = torch.where(v1, 2.0, v2).exp()",
        "v4 = v0.all(1).sum() + v0.any()",
        "v5 = v0.max()",
        "v6 = v0.min()",
    ],
    "integers in parts": [
        "v0 = leaf((4, 3), 'int64', [S(0)], 2)",
        "v1 = leaf((3,), 'bool', [R], 3)",
        "v2 = v0.sum(0)",
        "v3 = v2 * v1",
        "v4 = v2 + v1",
        "v5 = v2 + v0",
        "v6 = v2.sum().item()",
        "v7 = v0.prod(0) + v2",
    ],
    "a norm changed in place, through a view": [
        "v0 = leaf((4,), 'float32', [S(0)], 586)",
        "v1 = v0.norm(1)",
        "v1.t().add_(1)",
    ],
    "a rank without a row": [
        "v0 = leaf((1,), 'uint8', [S(0)], 987)",
        "v1 = v0.argmax(0)",
        "v2 = v0.max(0).indices",
        "v3 = v0.amin() + v0.median()",
        "v4 = v0.diff().sum().item()",
    ],
    "the first of equal ones": ["v0 = leaf((5, 3, 2), 'float32', [S(2)], 156)", "v4 = v0.argmax()"],
    "no element at all": ["v0 = leaf((2, 4, 1), 'bool', [S(1)], 720)", "v1 = v0[:0].diff().flatten()[:1].sum().item()"],
    "in place, of another dtype": [
        "v0 = leaf((4,), 'int32', [S(0)], 635)",
        "v0.cumsum_(0)",
        "v1 = leaf((2,), 'float32', [S(0)], 311).mean(-1)",
        "v1.logical_not_()",
    ],
    "a median of what is expanded": [
        "v0 = leaf((2, 3), 'float32', [S(0)], 5, True)",
        "v1 = median(v0.expand(64, 2, 3), 0)",
        "v2 = nanmedian(v0.expand(64, 2, 3), 0)",
        "v3 = median(v0.t()[..., None].expand(3, 2, 7), -1)",
        "backward(v1, v2, v3)",
    ],
    "losses of two dtypes": [
        "v0 = leaf((6, 4), 'float32', [S(0)], 850)",
        "v1 = leaf((6, 4), 'float64', [S(1)], 995)",
        "v2 = F.huber_loss(v0, v1)",
        "v3 = F.soft_margin_loss(v0, v1.sign())",
    ],
    "a loss of truth values": [
        "v0 = leaf((3,), 'float32', [S(0)], 1)",
        "v1 = leaf((3,), 'bool', [S(0)], 3)",
        "v2 = F.mse_loss(v0, v1)",
    ],
}  # fmt: skip
FOUR_RANKS: dict[str, Chain] = {
    "a mean in parts, beside another cut": [
        "v2 = leaf((4, 5, 2), 'float32', [S(0), S(2)], 499, True)",
        "v7 = F.rms_norm(v2, (2,))",
    ],
    "integers beside a sum in parts": [
        "v0 = leaf((2,), 'bfloat16', [S(0), R], 2)",
        "v1 = leaf((0,), 'bool', [R, R], 1)",
        "v2 = v1 + v0.sum(0)",
    ],
    "a product of windows that overlap": [
        "v0 = leaf((6, 4), 'float64', [R, R], 1)",
        "v1 = torch.matmul(v0.unfold(-2, 2, 1), leaf((2, 2), 'float64', [R, R], 509))",
    ],
    "a view of what lies otherwise than DTensor says": [
        "v0 = leaf((6, 6), 'bool', [S(1), S(0)], 807)",
        "v1 = v0.rot90().diff().flatten()[:1].sum().item()",
    ],
    "places in pieces of two lengths": [
        "v1 = leaf((3, 4), 'float32', [S(0), S(1)], 957)",
        "v3 = v1.argmax(-1)",
    ],
    "a mean of what DTensor cuts by itself": [
        "v2 = leaf((3, 4, 4), 'float32', [R, R], 116)",
        "v7 = leaf((3, 4, 4), 'float32', [R, S(1)], 904)",
        "v8 = F.binary_cross_entropy_with_logits(v2, (v7 > 0).to(v2.dtype))",
    ],
    "truth values that are bytes": [
        "v0 = leaf((2, 3, 2), 'uint8', [S(1), S(0)], 195)",
        "v1 = v0.any()",
        "v2 = v0.all(0)",
    ],
    "changed with what lies elsewhere": [
        "v0 = leaf((3, 1, 4), 'float32', [R, R], 870, True)",
        "v1 = v0.max(0).indices",
        "v2 = leaf((1, 4), 'int64', [S(0), S(1)], 843)",
        "v1.scatter_(-1, torch.zeros(v1.shape, dtype=torch.long), v2)",
    ],
    "places in a dim that is cut twice": [
        "v0 = leaf((6, 2), 'float32', [S(0), S(0)], 5)",
        "v1 = v0.argmax(0)",
        "v2 = v0.argmin()",
        "v3 = v0.max(0).indices",
    ],
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_chain_that_was_wrong_is_right(name: str, mesh2: Mesh) -> None:
    holds(TWO_RANKS[name], mesh2)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_chain_that_was_wrong_on_two_axes_is_right(name: str, mesh22: Mesh) -> None:
    holds(FOUR_RANKS[name], mesh22)


def test_a_shape_is_not_changed_in_place_under_views_that_autograd_knows(mesh2: Mesh) -> None:
    weight = meshbook.distribute(torch.arange(4.0).reshape(2, 2), mesh2, [Shard(0)]).requires_grad_()
    product = weight * 2
    view = product.t()
    with pytest.raises(NotImplementedError, match=r"x = x.t\("):
        product.t_()
    view[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2, 0], [2, 0]]


def holds(chain: Chain, mesh: Mesh) -> None:
    refusals: Counter[str] = Counter()
    failure = check(chain, mesh, refusals)
    assert failure is None, f"line {failure.line + 1}: {failure.text}"
    assert not refusals
