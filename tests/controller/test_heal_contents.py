"""What a new rank holds after a heal: what is proven to be what the lost rank held, and what the user says to copy.

Training after a heal is compared with the same training on a mesh that lost nobody.
"""

from __future__ import annotations

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import HealError, UsageError
from tests.budget import WAIT_S
from tests.controller.test_heal import kill, values

pytestmark = pytest.mark.usefixtures("starts_meshes")


TRAINING = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard

def batch(number):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(6, 8, generator=generator)

def train(number):
    loss = model(batch(number)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()
"""
DDP = """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
"""
HSDP = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
"""


@pytest.mark.parametrize(
    "in_setup", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["built by a setup cell", "copied whole"]
)
def test_ddp_training_goes_on_as_if_nobody_had_been_lost(in_setup: bool) -> None:
    with create_mesh(2) as mesh, create_mesh(2) as calm:
        for each in (mesh, calm):
            each.run(TRAINING, echo=False)
            each.run(DDP, setup=in_setup, echo=False)
        steps = [[values(each, f"train({number})") for number in range(3)] for each in (mesh, calm)]
        assert steps[0] == steps[1]
        kill(mesh, 1)
        healed = mesh.heal()
        assert {"model", "opt"} <= healed.restored[1].keys(), healed
        assert healed.missing[1].keys() <= {"torch's random state"}, healed
        for number in range(3, 8):
            assert values(mesh, f"train({number})") == values(calm, f"train({number})")


@pytest.mark.parametrize(
    "in_setup", [pytest.param(True, marks=pytest.mark.thorough), False], ids=["built by a setup cell", "copied whole"]
)
def test_a_step_whose_gradients_an_earlier_cell_has_computed_is_the_same_on_all_ranks(in_setup: bool) -> None:
    weight = "weight = torch.arange(64.0).requires_grad_()\nown = torch.optim.SGD([weight], lr=0.1)"
    with create_mesh(3) as mesh, create_mesh(3) as calm:
        for each in (mesh, calm):
            each.run(TRAINING, echo=False)
            each.run(f"{DDP}\n{weight}", setup=in_setup, echo=False)
            each.run("train(0); model(batch(1)).sum().backward(); weight.square().sum().backward()", echo=False)
        kill(mesh, 1)
        healed = mesh.heal()
        assert {"model", "opt", "weight"} <= healed.restored[1].keys(), healed
        for each in (mesh, calm):
            each.run("opt.step(); own.step()", echo=False)
        state = "[p.tolist() for p in (*model.parameters(), weight)]"
        assert values(mesh, state) == values(calm, state)


def test_a_model_with_buffers_that_was_evaluated_before_a_loss_trains_on(pair: Mesh) -> None:
    pair.run(
        "torch.manual_seed(0)\n"
        "layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))\n"
        "model = torch.nn.parallel.DistributedDataParallel(layers)",
        setup=True,
        echo=False,
    )
    pair.run("with torch.no_grad(): model(torch.ones(2, 4))", echo=False)
    kill(pair, 1)
    pair.heal()
    step = "model(torch.arange(8.0).reshape(2, 4) + rank).square().sum().backward()"
    pair.run(step, echo=False, timeout=WAIT_S)
    first, second = values(pair, "[p.grad.tolist() for p in model.parameters()]").values()
    assert first == second


@pytest.mark.thorough
def test_ddp_steps_are_right_after_a_second_loss_without_a_step_since_the_first(trio: Mesh) -> None:
    trio.run(
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)",
        setup=True,
        echo=False,
    )
    step = "wrapped(torch.ones(1, 4, dtype=torch.float64) * rank).sum().backward()"
    trio.run(f"for _ in range(3): {step}", echo=False, timeout=WAIT_S)
    for lost in (2, 0):
        kill(trio, lost)
        trio.heal()
    trio.run(f"for _ in range(3):\n    wrapped.zero_grad()\n    {step}", echo=False, timeout=WAIT_S)
    first = values(trio, "[p.grad.tolist() for p in model.parameters()]")
    assert first[0] == first[1] == first[2]


@pytest.mark.thorough
def test_a_model_that_is_sharded_and_replicated_comes_from_its_replica() -> None:
    axes = {"dp": 2, "tp": 2}
    with create_mesh(axes) as mesh, create_mesh(axes) as calm:
        for each in (mesh, calm):
            each.run(TRAINING, echo=False)
            each.run(HSDP, setup=True, echo=False)
            for number in range(2):
                each.run(f"train({number})", echo=False)
        kill(mesh, 1)
        healed = mesh.heal()
        assert (healed.restored[1]["model"], healed.restored[1]["opt"]) == (3, 3)
        assert "model, layer, opt from rank 3 (a replica)" in str(healed)
        for number in range(2, 5):
            assert values(mesh, f"train({number})") == values(calm, f"train({number})")


@pytest.mark.thorough
def test_replicas_are_found_where_no_two_of_one_part_are_left() -> None:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        mesh.run(TRAINING, echo=False)
        mesh.run(HSDP, setup=True, echo=False)
        mesh.run("train(0)", echo=False)
        checksum = "sum(p.to_local().double().sum().item() for p in model.parameters())"
        before = values(mesh, checksum)
        kill(mesh, 0, 3)
        healed = mesh.heal()
        assert {rank: healed.restored[rank]["model"] for rank in (0, 3)} == {0: 2, 3: 1}
        assert values(mesh, checksum) == before


def test_a_model_that_no_other_rank_has_is_named_as_missing(trio: Mesh) -> None:
    trio.run(TRAINING, echo=False)
    trio.run(HSDP, setup=True, echo=False)
    trio.run("train(0)", echo=False)
    kill(trio, 1)
    healed = trio.heal()
    assert set(healed.missing[1]) == {"model", "layer", "opt"}
    assert "as setup cells made it on rank 1: model, layer, opt (it differs between the other ranks)" in str(healed)


# What others agree on by chance. Rank 0 is the one that is different.
OF_RANK_0 = """
def is_first(): return dist.get_rank() == 0
first, log_level = is_first(), 'info' if is_first() else 'off'
kept = ['rank 0'] if first else []
"""
SETUP_OF_RANK_0 = """
from_setup = dist.get_rank() == 0
total = torch.ones(1) * (1 + rank)
dist.all_reduce(total)
total = int(total)
"""


def test_what_the_others_agree_on_by_chance_is_named_and_not_copied(trio: Mesh) -> None:
    trio.run(SETUP_OF_RANK_0, setup=True, echo=False)
    trio.run(OF_RANK_0, echo=False)
    kill(trio, 0)
    healed = trio.heal()
    assert values(trio, "from_setup") == {0: True, 1: False, 2: False}
    names = "[name for name in ('first', 'log_level', 'kept') if name in globals()]"
    assert values(trio, names)[0] == []
    assert healed.missing[0] == dict.fromkeys(("first", "log_level", "kept"), "alike on ranks 1-2")
    assert healed.kept[0] == dict.fromkeys(("from_setup", "total"), "cells compute it from the rank")
    assert healed.alike == ("first", "log_level", "kept")


def test_names_are_copied_later_too_if_the_user_says_so(trio: Mesh) -> None:
    with pytest.raises(HealError, match="no rank has been healed, so that there is none to copy to"):
        trio.heal(copy="best")
    trio.run(
        "cfg = {'lr': 0.1}\nclass Trainer:\n    def __init__(self): self.cfg = cfg\ntrainer = Trainer()", setup=True
    )
    trio.run(
        "import os, threading\ncfg['lr'] = 0.05; best, mine, trainer.lock = max(3, 4), os.getpid(), threading.Lock()",
        echo=False,
    )
    kill(trio, 1)
    text = str(trio.heal())
    assert "not on rank 1: best (alike on ranks 0,2)" in text
    assert "as setup cells made it on rank 1: cfg (alike on ranks 0,2)" in text
    assert "as setup cells made it on rank 1: trainer (whether it is equal on the others is not known (lock))" in text
    assert "if these do not: %mesh heal --copy cfg best" in text
    copied = trio.heal(copy="cfg,best mine bset")
    assert copied.restored == {1: {"cfg": 0, "best": 0}}
    assert copied.missing == {1: {"mine": "it differs between the other ranks", "bset": "no other rank has it"}}
    assert values(trio, "best, trainer.cfg, trainer.cfg is cfg") == dict.fromkeys(range(3), (4, {"lr": 0.05}, True))
    with pytest.raises(UsageError, match="which names"):
        trio.heal(copy="2")


@pytest.mark.thorough
def test_objects_that_refer_to_each_other_do_so_on_the_new_rank(trio: Mesh) -> None:
    trio.run(
        "class Trainer:\n    def __init__(self, net, scale): self.net, self.scale = net, scale\n"
        "    def run(self): return self.scale(self.net.weight.sum().item())",
        echo=False,
    )
    trio.run(
        "torch.manual_seed(1)\nfactor = 4\nnet = torch.nn.Linear(2, 2)\nscale = lambda x: x * factor\n"
        "trainer = Trainer(net, scale)\nopt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
        echo=False,
    )
    kill(trio, 1)
    assert trio.heal(copy=True).complete
    trio.run("factor = 5", echo=False)
    found = values(trio, "trainer.net is net, opt.param_groups[0]['params'][0] is net.weight, trainer.run()")
    assert found[1] == found[0] == (True, True, found[0][2])
    assert values(trio, "scale(1)") == dict.fromkeys(range(3), 5)


@pytest.mark.thorough
def test_an_optimizer_refers_to_the_parameters_that_a_setup_cell_has_built(trio: Mesh) -> None:
    trio.run("torch.manual_seed(0); net = torch.nn.Linear(8, 2)", setup=True, echo=False)
    trio.run("opt = torch.optim.SGD(net.parameters(), lr=0.5)", echo=False)
    kill(trio, 2)
    assert trio.heal().complete
    trio.run("before = net.bias.tolist(); net(torch.ones(8)).sum().backward(); opt.step()", echo=False)
    assert values(trio, "[round(b - a, 4) for a, b in zip(before, net.bias.tolist())]") == {
        rank: [-0.5, -0.5] for rank in range(3)
    }


EXTRA_STATE = """
class Scaled(torch.nn.Linear):
    def __init__(self): super().__init__(8, 2); self.amax, self.tau = [0.0], 1.0
    def get_extra_state(self): return self.amax[0]
    def set_extra_state(self, state): self.amax = [state]
torch.manual_seed(0)
net = Scaled()
"""


def test_a_module_gets_its_extra_state_and_attributes_and_a_group_without_members_is_named(trio: Mesh) -> None:
    trio.run(EXTRA_STATE, setup=True, echo=False)
    trio.run("net.amax, net.tau = [7.0], 0.5\nalone = dist.new_group([1])\nphase = torch.arange(9).cfloat().conj()")
    kill(trio, 1)
    healed = trio.heal()
    assert values(trio, "net.amax, phase.sum().item()") == dict.fromkeys(range(3), ([7.0], 36))
    assert healed.missing[1]["net.tau"] == "1.0 as it was made here, 0.5 on the others"
    trio.heal(copy="net.tau")
    assert values(trio, "net.tau") == dict.fromkeys(range(3), 0.5)
    assert "whether this rank was one is not known" in healed.missing[1]["alone"]
    assert values(trio, "'alone' in globals()")[1] is False


HOLDERS = """
from torch.utils.data import DataLoader, IterableDataset
class Stream(IterableDataset):
    def __init__(self): self.epoch, self.seed = torch.zeros(1).share_memory_(), 0
    def set_epoch(self, epoch): self.epoch[0] = epoch
    def __iter__(self):
        for i in range(4): yield 100 * int(self.epoch) + i
class Trainer:
    def __init__(self, cfg): self.cfg, self.lock = cfg, __import__('threading').Lock()
stream, cfg, names, weight = Stream(), {'lr': 0.1}, ['a'], torch.ones(3, requires_grad=True)
loader = DataLoader(stream, batch_size=2, num_workers=1, persistent_workers=True)
trainer, opt = Trainer(cfg), torch.optim.SGD([weight], lr=1.0)
list(loader)
"""


def test_what_holds_an_object_that_a_setup_cell_has_built_has_its_contents_too(trio: Mesh) -> None:
    trio.run(HOLDERS, setup=True, echo=False)
    trio.run("stream.set_epoch(1); stream.seed = 5; cfg['lr'] = 0.05; names.append('b')", echo=False)
    trio.run("weight.sum().backward(); opt.step()", echo=False)
    kill(trio, 1)
    trio.heal(copy=True)
    trio.run("stream.set_epoch(int(stream.epoch) + 1)", echo=False)
    found = values(trio, "[b.tolist() for b in loader], stream.seed, trainer.cfg, names, weight.tolist()")
    assert found == dict.fromkeys(range(3), ([[200, 201], [202, 203]], 5, {"lr": 0.05}, ["a", "b"], [0.0, 0.0, 0.0]))
    held = (
        "loader.dataset is stream, trainer.cfg is cfg, opt.param_groups[0]['params'][0] is weight, weight.requires_grad"
    )
    assert values(trio, held) == dict.fromkeys(range(3), (True,) * 4)


def test_groups_and_meshes_of_the_users_own_work_again_without_touching_the_objects(trio: Mesh) -> None:
    trio.run(
        "pair = dist.new_group([0, 1])\nends = dist.new_group([0, 2])\nthird = dist.new_group([2])\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "line = init_device_mesh('cpu', (3,), mesh_dim_names=('x',))",
        echo=False,
    )
    before = values(trio, "id(pair), id(line)")
    kill(trio, 1)
    assert trio.heal().complete
    after = values(trio, "id(pair), id(line)")
    assert (before[0], before[2]) == (after[0], after[2])
    trio.run("""
def total(group):
    t = torch.ones(1) * (rank + 1)
    dist.all_reduce(t, group=group)
    return int(t)
""", echo=False)  # fmt: skip
    assert values(trio, "total(pair) if rank in (0, 1) else None") == {0: 3, 1: 3}
    assert values(trio, "total(ends) if rank in (0, 2) else None") == {0: 4, 2: 4}
    assert values(trio, "total(line.get_group('x'))") == dict.fromkeys(range(3), 6)
    assert values(trio, "total(dist.new_group([0, 1, 2]))") == dict.fromkeys(range(3), 6)


@pytest.mark.thorough
def test_a_process_group_in_a_setup_cell_keeps_its_name_beside_those_of_other_cells(trio: Mesh) -> None:
    trio.run("unused = dist.new_group([0, 1, 2])", echo=False)
    trio.run("everyone = dist.new_group([0, 1, 2])\npair = dist.new_group([1, 2])", setup=True, echo=False)
    kill(trio, 1)
    trio.heal()
    source = "t = torch.ones(1)\ndist.all_reduce(t, group=everyone)\nif rank: dist.all_reduce(t, group=pair)\nint(t)"
    assert values(trio, source) == {0: 3, 1: 6, 2: 6}
