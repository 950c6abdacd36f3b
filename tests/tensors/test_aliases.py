"""What is one storage in torch is one here: views, detached tensors, and a name that is looked up twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.tensors.remote import RemoteTensor

pytestmark = pytest.mark.usefixtures("starts_meshes")

WAYS = {"rows": "Shard(0)", "columns": "Shard(1)", "copies": "Replicate()"}
CELL = (
    "from torch.distributed.tensor import distribute_tensor, Replicate, Shard\n"
    "w = distribute_tensor(torch.arange(24.).reshape(6, 4), mesh, [{}], src_data_rank=None)\n"
    "first, again = w, w.detach()"
)

# Another tensor of the same storage; None: it has no such.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "itself": lambda x: x.view(x.shape),
    "rows": lambda x: x[1:3] if x.dim() and x.shape[0] > 3 else None,
    "every second row": lambda x: x[::2] if x.dim() and x.shape[0] > 2 else None,
    "a row": lambda x: x[1] if x.dim() > 1 and x.shape[0] > 1 else None,
    "columns": lambda x: x[:, 1:] if x.dim() > 1 and x.shape[1] > 1 else None,
    "a column": lambda x: x[:, 0] if x.dim() > 1 else None,
    "transposed": lambda x: x.t() if x.dim() == 2 else None,
    "diagonal": lambda x: x.diagonal() if x.dim() == 2 else None,
    "one more dim": lambda x: x.unsqueeze(0) if x.dim() < 3 else None,
    "chunk": lambda x: x.chunk(2)[-1] if x.dim() and x.shape[0] > 1 else None,
}

CHANGES: dict[str, Callable[[Any, float], Any]] = {
    "add_": lambda x, number: x.add_(number),
    "mul_": lambda x, number: x.mul_(0.5),
    "fill_": lambda x, number: x.fill_(number),
    "assignment": lambda x, number: x.__setitem__(slice(0, 1), number) if x.dim() else None,
    "from itself": lambda x, number: x.copy_(x * 0.25 + number),
    "data": lambda x, number: x.data.add_(number),
}

# A tensor that becomes another: its views stay those of what it was. Not by `x.data = other`, which writes into what a
# name of the ranks refers to.
BECOMES: dict[str, Callable[[Any, Any], Any]] = {
    "unsqueeze_": lambda x, other: x.unsqueeze_(0) if x.dim() < 3 else None,
    "squeeze_": lambda x, other: x.squeeze_(),
    "t_": lambda x, other: x.t_() if x.dim() == 2 else None,
}


def same(there: list[Any], here: list[torch.Tensor], story: list[str]) -> None:
    for at, (mine, reference) in enumerate(zip(there, here, strict=True)):
        whole = mine.full_tensor() if isinstance(mine, RemoteTensor) else mine
        assert torch.allclose(whole, reference), (at, story)


def program(mesh: Mesh, seed: int, way: str) -> None:
    choose = random.Random(seed)
    mesh.run(CELL.format(WAYS[way]))
    w = torch.arange(24.0).reshape(6, 4)
    here = [w.detach()]
    there: list[Any] = [mesh["w"]]
    story: list[str] = []
    for _ in range(14):
        what = choose.choice(["name", "view", "view", "change", "change", "becomes", "read", "cell"])
        at = choose.randrange(len(here))
        if what == "name":
            name = choose.choice(["w", "first", "again"])
            there.append(mesh[name])
            here.append(w.detach())
            story.append(f"{len(here) - 1} = mesh[{name!r}]")
        elif what == "view":
            name = choose.choice(list(VIEWS))
            view = VIEWS[name](here[at])
            if view is not None:
                here.append(view)
                there.append(VIEWS[name](there[at]))
                story.append(f"{len(here) - 1} = {name} of {at}")
        elif what == "change":
            name, number = choose.choice(list(CHANGES)), float(choose.randrange(1, 9))
            CHANGES[name](here[at], number)
            CHANGES[name](there[at], number)
            story.append(f"{name} of {at} with {number}")
        elif what == "becomes":
            name, other = choose.choice(list(BECOMES)), choose.randrange(len(here))
            BECOMES[name](here[at], here[other])
            BECOMES[name](there[at], there[other])
            story.append(f"{at} {name} {other}")
        elif what == "cell":
            mesh.run("w.add_(1.0)")
            w.add_(1.0)
            story.append("a cell adds 1")
        else:
            same(there[at : at + 1], here[at : at + 1], story)
            story.append(f"read {at}")
    same(there, here, story)


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_on_aliases_give_what_plain_torch_gives(mesh2: Mesh, way: str) -> None:
    for seed in range(12):
        program(mesh2, seed, way)


@pytest.mark.parametrize("way", WAYS.values())
def test_views_stay_those_of_what_a_tensor_was(mesh2: Mesh, way: str) -> None:
    def run(x: Any, other: Any) -> Any:
        rows, kept = x[1:3], x[:, 1:3]
        x.data = other
        rows.fill_(-1.0)  # not of the other
        other.unsqueeze_(0)
        row = rows[-1]
        row.unsqueeze_(0)
        row.mul_(3.0)
        return x, rows, kept, other, row

    x, other = torch.arange(24.0).reshape(6, 4), torch.ones(6, 4)
    places = [eval(way, {"Shard": Shard, "Replicate": Replicate})]
    there = run(meshbook.distribute(x, mesh2, places), meshbook.distribute(other, mesh2, places))
    same(list(there), list(run(x, other)), [])


def test_a_view_taken_by_one_look_at_a_name_follows_a_change_by_another(mesh2: Mesh) -> None:
    mesh2.run(CELL.format("Shard(0)"))
    one, other = mesh2["w"], mesh2["again"]
    view = one[2:5]
    assert view.sum().item() == sum(range(8, 20))
    other.fill_(5.0)
    assert view.sum().item() == 60.0
    view.fill_(1.0)
    assert other[1:3].sum().item() == 24.0
    mesh2.run("w.zero_()")
    assert view.sum().item() == 0.0


def test_detached_aliases_of_a_norm_follow_a_change_in_place(mesh2: Mesh) -> None:
    def run(x: Any) -> Any:
        norm = x.norm(dim=0)
        alias = norm.detach()
        norm.sub_(10.0)
        norm.mul_(2.0)
        return norm, alias, norm.detach()

    x = torch.ones(8, 4)
    for mine, reference in zip(run(meshbook.distribute(x, mesh2, [Shard(0)])), run(x), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference)


class Counting(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4, 2))

    def forward(self, x: Any) -> Any:
        self.count.add_(1.0)
        return x * 1.0


def cut(module: Counting, mesh: Any) -> None:
    module.count = distribute_tensor(module.count, mesh, [Shard(0)], src_data_rank=None)


def test_a_view_of_a_modules_buffer_follows_what_the_module_does_to_it(mesh2: Mesh) -> None:
    there = meshbook.distribute(Counting(), mesh2, strategy=cut)
    count = there.get_buffer("count")
    view = count[1:3]
    for number in range(1, 3):
        there(meshbook.distribute(torch.ones(4), mesh2))
        assert count.full_tensor().min().item() >= number
        assert torch.equal(view.full_tensor(), count.full_tensor()[1:3])
