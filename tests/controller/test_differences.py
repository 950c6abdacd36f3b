"""What ranks hold differently that should be equal: from descriptions alone, and on real ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from meshbook.controller.differences import find_differences, first_difference, fold_differences, plan_comparisons
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, MeshNameError, MeshShapeError, UsageError
from meshbook.wire.messages import StateDescription, StateEntry
from tests.controller.test_heal import kill
from tests.standstill import stop


def described(**digests: str) -> StateDescription:
    entries = tuple(StateEntry(path.replace("__", "."), "float32", digest, (2,)) for path, digest in digests.items())
    return StateDescription({"model": "Net"}, {"model": entries}, "all_reduce #7")


def test_the_digest_that_most_ranks_have_is_taken_for_right() -> None:
    replies = {rank: described(model__w="odd" if rank == 2 else "usual") for rank in range(4)}
    (found,) = find_differences(["model"], replies).differences
    assert (found.path, found.ranks, found.others, found.since) == ("model.w", (2,), (0, 1, 3), "all_reduce #7")


def test_only_ranks_along_an_axis_are_compared_with_each_other() -> None:
    replies = {rank: described(model__w=str(rank % 2)) for rank in range(4)}
    assert find_differences(["model"], replies, over=[(0, 2), (1, 3)])
    assert not find_differences(["model"], replies, over=[(0, 1), (2, 3)])


def test_each_kind_of_odd_tensor_is_compared_once() -> None:
    replies = {rank: described(model__w={2: "a", 3: "a", 4: "b"}.get(rank, "usual")) for rank in range(6)}
    replies[6] = replies[0]
    found = find_differences(["model"], replies)
    (planned,) = plan_comparisons(found, replies)
    assert (planned.source, planned.targets) == (0, (2, 4))


def test_parts_of_repeated_layers_are_one_line() -> None:
    names = {f"model__{layer}__w": "x" for layer in range(5)}
    found = find_differences(["model"], {0: described(**names), 1: described(**dict.fromkeys(names, "y"))})
    assert fold_differences(found.differences) == ["model.*.w (5 names) on rank 1: differ"]


def test_a_name_that_some_ranks_lack_is_a_difference() -> None:
    replies = {0: described(model__w="x"), 1: described(model__w="x"), 2: StateDescription({}, {})}
    assert "nothing, and Net on ranks 0-1" in find_differences(["model"], replies).text


def test_the_first_difference_of_a_forward_is_the_one_before_which_all_is_equal() -> None:
    def forward(**digests: str) -> StateDescription:
        entries = described(**digests).entries["model"]
        return StateDescription({"f(x)": "forward"}, {"f(x)": entries})

    usual = forward(a__w="1", input="2", output="3", later="4")
    replies = {0: usual, 1: usual, 2: forward(a__w="1", input="2", output="odd", later="odd")}
    found = first_difference("f(x)", replies)
    assert [(one.path, one.ranks) for one in found.differences] == [("output", (2,))]
    assert "the first difference between ranks 0-2, of 4 tensors and values in the order of the forward:" in found.text
    assert found.notes == ("Equal up to input.",)
    assert first_difference("f(x)", replies, over=[(0, 1)])


# ---------------------------------------------------------------------------------------------------------------------


MODEL = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
opt = torch.optim.AdamW(model.parameters())
with torch.no_grad():
    model[1].running_mean += rank
model(torch.ones(2, 8)).sum().backward()
opt.step()
t = torch.ones(1)
dist.all_reduce(t)
"""


def test_a_flipped_bit_is_found_with_its_rank_its_name_and_its_size(mesh: Mesh) -> None:
    mesh.run(MODEL)
    healthy = mesh.same("model", "opt")
    assert healthy, healthy.text
    assert "model.1.running_mean" in healthy.text  # each rank's own statistics
    mesh.run("""
if rank == 2:
    with torch.no_grad():
        model[2].bias.view(torch.int32)[1] ^= 1 << 20
dist.all_reduce(t)""")
    found = mesh.same("model", "opt")
    (one,) = found.differences
    assert (one.path, one.ranks, one.num_differing, one.num_elements) == ("model.2.bias", (2,), 1, 4)
    assert one.max_difference is not None
    assert 0 < one.max_difference < 1
    assert one.since.startswith("all_reduce #")
    assert one.before.startswith("all_reduce #")
    assert one.since != one.before
    assert mesh.same("model.0")
    assert not mesh.same("model.2")


FORWARD = """
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("calls", torch.zeros(1))
    def forward(self, x, *, mask=None):
        self.calls += 1
        x = self.drop(torch.relu_(self.a(x))) + extra
        return self.b(x * self.scale)
net, x, extra = Net(), torch.randn(16, 8), 0.0
"""
# By the fault that rank 2 gets: where the forward begins to differ, and up to where it is equal.
FAULTS = {
    "torch.manual_seed(7)": ("output of net.drop", "Equal up to input of net.drop."),
    "extra = 1e-3": ("input of net.b", "Equal up to net.b.bias."),
    "net.scale[3] = 2": ("net.scale", "Nothing is before it."),
    "net.b.weight.data[0, 0] += 1": ("net.b.weight", "Equal up to output of net.drop."),
    "x[0] = 0": ("input of net", "It is what the forward is given"),
    "net.a.register_forward_hook(lambda m, args, out: out + 1)": ("input of net.drop", "Equal up to output of net.a."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forward_says_which_module_ranks_begin_to_differ_in(mesh: Mesh, fault: str) -> None:
    where, up_to = FAULTS[fault]
    mesh.run(f"{FORWARD}\nif rank == 2: {fault}\nrandom = torch.get_rng_state()")
    found = mesh.same(forward="net(x)")
    (one,) = found.differences
    assert (one.path, one.ranks) == (where, (2,))
    assert one.num_differing
    assert up_to in found.text
    assert mesh.run("torch.equal(random, torch.get_rng_state()), int(net.calls)").values.same() == (True, 0)


def test_a_forward_without_a_difference_is_equal_and_has_compared_each_call(mesh: Mesh) -> None:
    mesh.run(FORWARD)
    found = mesh.same(forward="net(x).sum() + net(x, mask=x).sum()")
    assert found, found.text
    # In the first call 6 parameters and buffers, and what the model and its 3 layers take and give; then also a mask.
    assert found.num_compared == 6 + 8 + 9


def test_a_forward_of_a_parallel_model_is_compared_along_the_axis_that_has_replicas(mesh: Mesh) -> None:
    mesh.run(f"""
{FORWARD}
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
pair = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
parallelize_module(pair, mesh["tp"], {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
torch.manual_seed(rank)
""")
    found = mesh.same(forward="ddp(x)")
    assert {one.path for one in found.differences} == {"output of ddp.1"}
    cut = mesh.same(forward="pair(x)")
    assert {one.path for one in cut.differences} == {"input of pair.1"}
    assert '%mesh same --forward "pair(x)" --over dp' in cut.text
    assert mesh.same(forward="pair(x)", over="dp")
    mesh.run("if rank == 3: x = x + 1")
    assert [one.path for one in mesh.same(forward="pair(x)", over="dp").differences] == ["input of pair"]


def test_two_ranks_are_compared_whatever_their_placements(mesh: Mesh) -> None:
    mesh.run("w = torch.arange(6.0); w[rank:] += 1; h = torch.ones(rank + 1)")
    (one,) = mesh.diff(0, 2, "w").differences
    assert (one.ranks, one.num_differing, one.max_difference) == ((2,), 2, 1.0)
    assert "shape (3,) instead of (1,)" in mesh.diff(0, 2, "h").text


def test_placements_say_which_parts_must_be_equal(mesh: Mesh) -> None:
    mesh.run("""
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
torch.manual_seed(0)
sharded = torch.nn.Linear(8, 8)
fully_shard(sharded, mesh=mesh)                                       # replicated along dp, cut along tp
part = torch.full((2, 2), float(mesh.get_coordinate()[1]))
d = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)
""")
    assert mesh.same("sharded", "d").num_compared == 6
    mesh.run("if rank == 3: d.to_local()[0, 0] = 9")
    (one,) = mesh.same("sharded", "d").differences
    assert (one.path, set(one.ranks) | set(one.others), one.num_differing) == ("d", {1, 3}, 1)


def test_ddp_models_are_equal_on_the_ranks_of_their_group(mesh: Mesh) -> None:
    mesh.run("""
torch.manual_seed(rank % 2)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=mesh.get_group("dp"))
""")
    assert mesh.same("net").num_compared == 4
    mesh.run("if rank == 1: net.module.weight.data[0, 0] += 1")
    (one,) = mesh.same("net").differences
    assert one.path == "net.weight"
    assert {*one.ranks, *one.others} == {1, 3}


def test_other_parts_along_an_axis_are_told_with_the_way_to_compare_along_it(mesh: Mesh) -> None:
    mesh.run("part = torch.full((2,), float(mesh.get_coordinate()[1]))")
    assert "%mesh same part --over dp" in mesh.same("part").text
    assert mesh.same("part", over="dp")


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda mesh: mesh.same("nope"), MeshNameError, "`nope` is not on ranks 0-3; they have"),
        (lambda mesh: mesh.same("rank.nope"), MeshNameError, "`rank.nope` is not on ranks 0-3"),
        (lambda mesh: mesh.same(), UsageError, "which names"),
        (lambda mesh: mesh.same("a b."), UsageError, "is not a name on the ranks"),
        (lambda mesh: mesh.same("w", over="zz"), MeshShapeError, "no axis 'zz'"),
        (lambda mesh: mesh.same("w", forward="w"), UsageError, "names or a forward"),
        (lambda mesh: mesh.same(forward="w("), UsageError, "is no expression"),
        (lambda mesh: mesh.same(forward="w + 1"), CellError, "`w \\+ 1` calls no module"),
        (lambda mesh: mesh.diff(0, 0, "w"), UsageError, "rank 0 twice"),
        (lambda mesh: mesh.diff(0, 9, "w"), MeshShapeError, "rank 9 is not in this mesh"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(mesh: Mesh, ask: Any, error: type[Exception], said: str) -> None:
    mesh.run("w = torch.ones(2)")
    with pytest.raises(error, match=said):
        ask(mesh)


@pytest.mark.usefixtures("starts_meshes")
def test_a_new_process_of_a_rank_is_watched_as_the_others_are() -> None:
    with create_mesh(2) as mesh:
        mesh.nan(True)
        kill(mesh, 1)
        mesh.heal()
        assert mesh.nan().on == (0, 1)
        # A rank that does not answer meanwhile keeps its sentinel, with what that has found.
        mesh.run("model = torch.nn.Linear(2, 2)\nmodel.weight.data.fill_(torch.nan)\nmodel(torch.ones(1, 2))")
        found = [finding for rank, finding in mesh.nan().findings if rank == 0]
        assert found
        kill(mesh, 1)
        survivor, hooks = mesh.status().ranks[0].pid, mesh.session.healed_hooks
        assert survivor is not None
        hooks.insert(0, lambda: stop(survivor))
        hooks.append(lambda: os.kill(survivor, signal.SIGCONT))
        mesh.heal()
        assert mesh.nan().on == (0, 1)
        assert [finding for rank, finding in mesh.nan().findings if rank == 0] == found
        before = mesh.nan(False).findings
        mesh.run("torch.nn.Linear(2, 2)(torch.full((1, 2), torch.nan))", echo=False)
        assert (mesh.nan().on, mesh.nan().findings) == ((), before)
