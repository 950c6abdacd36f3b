"""What users' objects hold comes back the same on all four ways: elastic loops, heals, checkpoints, remote loops."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshbook.rank.checkpoints.named_state import read_state
from meshbook.rank.checkpoints.targets import make_target
from meshbook.rank.elastic import contents
from meshbook.rank.healing import sharing
from meshbook.rank.healing.choice import Choice
from meshbook.rank.healing.contents import describe
from meshbook.rank.state.random_states import random_states, set_random_states
from meshbook.tensors import loop_states
from meshbook.wire.messages import SavedName


class Kind(NamedTuple):
    """A kind of object.

    Attributes:
        make: returns one, and what else it needs, by name; "it" is the object.
        change: as steps change it.
        read: returns what is to come back, by what it is called.
        not_saved: what a checkpoint leaves out, as torch's state dicts do.
        replaced_by: the ways that bind the name to an equal one instead.
    """

    make: Callable[[], dict[str, Any]]
    change: Callable[[dict[str, Any]], object]
    read: Callable[[Any], dict[str, Any]]
    not_saved: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()


class Noisy(nn.Module):
    """A module with all that one can have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.dropout, self.norm = nn.Linear(2, 2), nn.Dropout(0.1), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.tau, self._amax = 1.0, [0.5]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(self.fc(inputs))) * self.scale

    def get_extra_state(self) -> Any:
        return list(self._amax)

    def set_extra_state(self, state: Any) -> None:
        self._amax = state


class Averages:
    def __init__(self) -> None:
        self.mean = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def change_module(names: dict[str, Any]) -> None:
    module = names["it"]
    module.train()
    module(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        module.fc.weight.add_(1)
    module.scale += 1
    module.dropout.p, module.tau, module._amax = 0.9, module.tau / 2, [module._amax[0] * 2]
    module.fc.eval()


def read_module(module: Any) -> dict[str, Any]:
    return {
        "parameters": [parameter.detach().clone() for parameter in module.parameters()],
        "gradients": [None if one.grad is None else one.grad.clone() for one in module.parameters()],
        "buffers": [buffer.clone() for buffer in module.norm.buffers()],
        "buffers that are not persistent": module.scale.clone(),
        "attributes": (module.dropout.p, module.tau),
        "modes": [one.training for one in module.modules()],
        "extra state": list(module._amax),
    }


def make_optimizer() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "it": torch.optim.AdamW(model.parameters(), lr=0.1)}


def step(names: dict[str, Any]) -> None:
    optimizer = getattr(names["it"], "optimizer", names["it"])
    names["model"](torch.randn(4, 2)).sum().backward()
    optimizer.step()
    if optimizer is not names["it"]:
        names["it"].step()
    else:
        optimizer.param_groups[0]["lr"] /= 2


def make_scheduler() -> dict[str, Any]:
    names = make_optimizer()
    return {**names, "opt": names["it"], "it": torch.optim.lr_scheduler.StepLR(names["it"], 1, gamma=0.5)}


def make_scaler() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))  # makes the scale
    return {"it": scaler}


def make_average() -> dict[str, Any]:
    return {"it": torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))}


def make_leaf() -> dict[str, Any]:
    return {"it": torch.ones(2, requires_grad=True)}


def change_leaf(names: dict[str, Any]) -> None:
    (names["it"] * torch.randn(2)).sum().backward()
    with torch.no_grad():
        names["it"].mul_(3)


def read_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    gradient = tensor.grad if tensor.is_leaf else None
    full = [None if one is None else part_of(one).clone() for one in (tensor, gradient)]
    return {"tensor": full[0], "gradients": full[1]}


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


KINDS = {
    "module": Kind(
        lambda: {"it": Noisy()},
        change_module,
        read_module,
        not_saved=("gradients", "buffers that are not persistent", "attributes", "modes"),
    ),
    "optimizer": Kind(
        make_optimizer,
        step,
        lambda it: copy.deepcopy({"state": list(it.state.values()), "lr": it.param_groups[0]["lr"]}),
    ),
    "scheduler": Kind(make_scheduler, step, lambda it: {"epoch": it.last_epoch, "lr": it.get_last_lr()}),
    "gradient scaler": Kind(
        make_scaler,
        lambda names: names["it"].update(float(torch.rand(()))),
        lambda it: {"scale": it.get_scale()},
    ),
    "average of weights": Kind(
        make_average,
        lambda names: names["it"].update_parameters(nn.Linear(2, 1)),
        lambda it: {"tensors": copy.deepcopy(list(it.state_dict().values()))},
    ),
    "generator": Kind(
        lambda: {"it": torch.Generator().manual_seed(1)},
        lambda names: torch.rand(1, generator=names["it"]),
        lambda it: {"numbers": torch.rand(2, generator=copy_of(it))},
    ),
    "tensor": Kind(
        lambda: {"it": torch.zeros(3)}, lambda names: names["it"].add_(torch.rand(3)), read_tensor
    ),
    "leaf": Kind(make_leaf, change_leaf, read_tensor, not_saved=("gradients",)),
    "DTensor": Kind(
        lambda: {"it": distribute_tensor(torch.zeros(4), the_mesh(), [Shard(0)])},
        lambda names: names["it"].add_(float(torch.rand(()))),
        read_tensor,
        replaced_by=("a heal",),
    ),
    "object with a state_dict": Kind(
        lambda: {"it": Averages()},
        lambda names: vars(names["it"]).update(mean=random.random()),
        lambda it: {"mean": it.mean},
    ),
    "list": Kind(
        lambda: {"it": [1, torch.zeros(2)]},
        lambda names: names["it"].append(random.random()),
        lambda it: {"items": [one.tolist() if isinstance(one, torch.Tensor) else one for one in it]},
        replaced_by=("an elastic loop", "a checkpoint"),
    ),
}  # fmt: skip


def copy_of(generator: torch.Generator) -> torch.Generator:
    found = torch.Generator()
    found.set_state(generator.get_state())
    return found


@functools.cache
def the_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0], mesh_dim_names=("dp",))


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- the four ways: each captures, and returns what brings the state into the names that it is given


def by_elastic(names: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    mesh = the_mesh()
    part = contents.capture(names["it"], "it", contents.name_meshes(names, ["it"], mesh))
    part.tensors = [tensor.clone() for tensor in part.tensors]

    def restore(into: dict[str, Any]) -> None:
        contents.restore("it", part, into, contents.meshes_by_key(into, ["it"], mesh))

    return restore


def by_heal(names: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """The names are those of rank 0, and what they are restored into is rank 1's."""
    held = {name: describe(value) for name, value in names.items()}
    sent: list[Any] = []
    reply: dict[str, Any] = {"restored": {}, "missing": {}, "kept": {}, "alike": []}
    groups: Any = SimpleNamespace(mesh=the_mesh(), table=None)

    def share(rank: int, namespace: dict[str, Any]) -> None:
        one = sharing._Sharing(namespace, {}, groups, reply, with_shards=True)
        choices = {"it": Choice(0, "equal on all others", with_attributes=True)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharing.transfer, "send", lambda *args: sent.append(copy.deepcopy(args[:2])))
            patch.setattr(sharing.transfer, "receive", lambda source: sent.pop())
            one.share_names(choices, {0: held}, held, (rank, 1))

    def restore(into: dict[str, Any]) -> None:
        into["mesh"] = the_mesh()
        share(1, into)
        assert (list(reply["restored"]), reply["missing"]) == (["it"], {})

    share(0, names)
    return restore


def by_checkpoint(names: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    state = read_state("it", names)
    saved = {path: part_of(tensor).clone() for path, tensor in state.tensors.items()}
    values = copy.deepcopy(state.values)
    entries = {path: metadata_of(tensor) for path, tensor in state.tensors.items()} | dict.fromkeys(values)
    saved_name = SavedName("it", state.kind)

    def restore(into: dict[str, Any]) -> None:
        target = make_target(saved_name, into, entries, torch.device("cpu"))
        for path, tensor in target.tensors.items():
            part_of(tensor).copy_(saved[path])
        target.values = {path: values[path] for path in target.value_paths}
        assert [*target.problems, *target.compare_values()] == []
        target.apply()

    return restore


def metadata_of(tensor: torch.Tensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])


def by_remote_loop(names: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    state, tensors = loop_states.capture([names["it"]])
    assert tensors == []  # of the remote ones
    return lambda into: loop_states.restore(state, [into["it"]], {})


WAYS = {
    "an elastic loop": by_elastic,
    "a heal": by_heal,
    "a checkpoint": by_checkpoint,
    "a remote loop": by_remote_loop,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_object_of_any_kind_holds_comes_back_into_it_on_any_way(kind: str, way: str) -> None:
    torch.manual_seed(0)
    make, change, read, not_saved, replaced_by = KINDS[kind]
    names = make()
    change(names)
    expected = read(names["it"])
    restore = WAYS[way](names)
    change(names)
    other = names if way != "a heal" else make()  # a heal's goes to another process
    before = other["it"]
    restore(other)
    found = read(other["it"])
    compared = [what for what in expected if way != "a checkpoint" or what not in not_saved]
    for what in compared:
        torch.testing.assert_close(found[what], expected[what], rtol=0, atol=0)
    assert (other["it"] is before) == (way not in replaced_by)


def test_the_random_numbers_of_all_generators_come_back() -> None:
    import numpy

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    states = random_states()
    expected = draw()
    set_random_states(states)
    assert draw() == expected
