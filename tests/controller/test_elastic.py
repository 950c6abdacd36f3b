"""`mesh.elastic`: what is computed with faults is, bit for bit, what is computed without.

One mesh of three ranks, healed after each test. Faults are real, and each strikes once: a file says that it has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted, RankLost
from tests.budget import WAIT_S, when
from tests.controller.elastic_training import CELL, MODELS, OPTIMIZER, curve, set_up, train_with_kills
from tests.controller.test_heal import kill

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("starts_meshes")]


@pytest.fixture
def mesh(three: Mesh) -> Iterator[Mesh]:
    # A loop that a failed test has left interrupted would be gone on with: it is found by the names of its state.
    three.run("from meshbook.rank.elastic import loop\nloop._installed.runs.clear()", echo=False)
    yield three
    three.heal()


def once(marker: Path, condition: str, what: str) -> str:
    """Return source that does something the first time that a condition holds, on one rank, over all its processes."""
    return f"if {condition} and not os.path.exists({str(marker)!r}): open({str(marker)!r}, 'w').close(); {what}"


KILL = "os.kill(os.getpid(), 9)"


def expected_curve(mesh: Mesh, model: str = "ddp") -> dict[int, Any]:
    set_up(mesh, model)
    mesh.run(CELL)
    return curve(mesh)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("ddp", 3),
        pytest.param("static", 3, marks=pytest.mark.thorough),
        pytest.param("fsdp", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_training_that_is_killed_twice_has_the_losses_of_one_that_is_not(model: str, ranks: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with create_mesh(ranks) as mesh:
        expected = expected_curve(mesh, model)
        set_up(mesh, model, fault="__import__('time').sleep(0.01)")
        train_with_kills(mesh, 2, random.Random(seed))
        assert curve(mesh) == expected


@pytest.mark.parametrize("function", ["gather", "pass_on", "wait_for_all"])
@pytest.mark.parametrize("when_killed", ["before", "after"])
@pytest.mark.thorough
def test_a_rank_that_dies_while_a_snapshot_is_taken_loses_none(
    mesh: Mesh, tmp_path: Path, function: str, when_killed: str
) -> None:
    expected = expected_curve(mesh)
    set_up(mesh, "ddp")
    kill = once(tmp_path / "killed", "rank == 1 and losses and len(losses) == 20", KILL)
    mesh.run(f"""
from meshbook.rank.elastic import transfer
original = transfer.{function}
def dying(*arguments):
    if {when_killed == "before"}:
        {kill}
    found = original(*arguments)
    {kill}
    return found
transfer.{function} = dying
""")
    with pytest.raises(RankLost):
        mesh.run(CELL)
    mesh.run(f"transfer.{function} = original")
    mesh.heal()
    mesh.run(CELL)
    assert curve(mesh) == expected


def test_a_rank_that_is_lost_and_a_stop_while_it_goes_on_lose_no_step(mesh: Mesh, tmp_path: Path) -> None:
    expected = expected_curve(mesh)
    kill = once(tmp_path / "killed", "rank == 2 and step == 17", KILL)
    stop = once(tmp_path / "stopped", "rank == 0 and step == 18", "print('here again'); __import__('time').sleep(1000)")
    set_up(mesh, "ddp", fault=f"{kill}\n    {stop}")
    with pytest.raises(RankLost):
        mesh.run(CELL)
    mesh.heal()
    future = mesh.run(CELL, wait=False, echo=False)
    when(lambda: "here again" in mesh.logs(0))
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    mesh.run(CELL)
    assert curve(mesh) == expected


@pytest.mark.parametrize("loader", ["enumerate(loader)", "loader"])
@pytest.mark.thorough
def test_what_a_loader_draws_when_it_is_iterated_is_drawn_again_after_a_loss_in_the_first_steps(
    mesh: Mesh, tmp_path: Path, loader: str
) -> None:
    cell = CELL
    if loader == "loader":
        cell = "step = 0\n" + CELL.replace(
            "for step, (x, y) in mesh.elastic(enumerate(loader)", "for x, y in mesh.elastic(loader"
        )
    set_up(mesh, "ddp")
    mesh.run(cell)
    expected = curve(mesh)
    set_up(mesh, "ddp", fault=once(tmp_path / "killed", "rank == 2 and len(losses) == 3", KILL))
    with pytest.raises(RankLost):
        mesh.run(cell)
    mesh.heal()
    assert "(snapshot of step 0; " in mesh.run(cell).output
    assert curve(mesh) == expected


def test_an_exception_in_the_body_leaves_the_snapshots_as_they_are(mesh: Mesh, tmp_path: Path) -> None:
    expected = expected_curve(mesh)
    set_up(mesh, "ddp", fault=once(tmp_path / "raised", "rank == 1 and step == 33", "1 / 0"))
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run(CELL)
    result = mesh.run(CELL)
    assert "elastic: goes on at step 34 (snapshot of step 30; 4 steps are computed again)" in result.output
    assert curve(mesh) == expected


@pytest.mark.thorough
def test_a_model_that_no_setup_cell_builds_is_had_where_the_loss_left_the_others_unlike(
    mesh: Mesh, tmp_path: Path
) -> None:
    expected = expected_curve(mesh)
    mesh.run("del network, model, opt, schedule", setup=True)
    mesh.run(f"{MODELS['ddp']}{OPTIMIZER}\npass")  # another text than that of the setup cell
    # as a step that only rank 0 has done
    cut = once(tmp_path / "cut", "rank == 0 and step == 25", "next(model.parameters()).data.add_(1)")
    mesh.run(
        f"EVERY = 10\ndef fault(step):\n    {cut}\n    {once(tmp_path / 'killed', 'rank == 2 and step == 25', KILL)}"
    )
    with pytest.raises(RankLost):
        mesh.run(CELL)
    healed = mesh.heal(copy="loader,said")
    assert healed.missing[2]["model"] == "its replicas on ranks 0-1 differ"
    # Equal on the others, and of no use without the model: with parameters of its own it would train nothing.
    assert (
        healed.missing[2]["opt"] == healed.missing[2]["schedule"] == "it uses `model`, which the new rank does not have"
    )
    mesh.run(CELL)
    assert curve(mesh) == expected
    assert mesh.run(
        "opt.param_groups[0]['params'][0] is next(model.parameters()) and schedule.optimizer is opt"
    ).values.same()


def test_a_rank_lost_with_the_next_one_is_an_error_where_each_had_its_own_state(mesh: Mesh) -> None:
    mesh.run("own = torch.full((5000,), float(rank))", setup=True)
    kill = "    if rank == 1 and i == 5 and FAULT: [os.kill(pid, 9) for pid in pids]"
    body = f"for i in mesh.elastic(range(9), state='own', every=4):\n    own += 1\n{kill}"
    # by one of them: the loss of the first stops the other, wherever it is
    mesh.run(f"import os\nFAULT, pids = True, {[mesh.status().ranks[rank].pid for rank in (2, 1)]}")
    with pytest.raises(RankLost):
        mesh.run(body)
    when(lambda: mesh.session.lost == (1, 2))
    mesh.heal()
    mesh.run("FAULT = False")
    with pytest.raises(CellError, match="the state of rank 1 was held by ranks 1-2, and what they held is lost"):
        mesh.run(body)
    mesh.run("own = torch.full((5000,), float(rank))")
    mesh.run(body.replace("every=4", "every=4, restart=True"))
    assert mesh.run("own[0].item()").values == {0: 9.0, 1: 10.0, 2: 11.0}


def test_a_second_loss_of_the_next_rank_right_after_going_on_is_made_good(mesh: Mesh) -> None:
    mesh.run("import os\nown = torch.full((5000,), float(rank))", setup=True)
    cell = f"""
for i in mesh.elastic(range(9), state="own", every=4):
    own += 1
    if (attempt, rank, i) in ((0, 1, 5), (1, 0, 4)):
        {KILL}
"""
    for attempt in range(2):
        mesh.run(f"attempt = {attempt}")
        with pytest.raises(RankLost):
            mesh.run(cell)
        mesh.heal()
    mesh.run("attempt = 2")
    mesh.run(cell)
    assert mesh.run("own[0].item()").values == {0: 9.0, 1: 10.0, 2: 11.0}


LOADERS = {
    "torch's random state": "DataLoader(range(48), batch_size=4, shuffle=True)",
    "a generator of its own": "DataLoader(range(48), batch_size=4, shuffle=True, generator=own)",
    "a sampler": "DataLoader(range(48), batch_size=4, sampler=RandomSampler(range(48), generator=own))",
    "weights": "DataLoader(range(48), batch_size=4, sampler=WeightedRandomSampler([1.0] * 48, 48))",
    "a worker": "DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)",
    "noise at each batch": "noise()",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.thorough] if kind in ("a sampler", "weights") else []) for kind in LOADERS],
)
def test_batches_come_in_the_order_of_the_run_without_a_fault(mesh: Mesh, tmp_path: Path, kind: str) -> None:
    mesh.run("""
import os
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler
class Noisy(Dataset):
    def __len__(self): return 48
    def __getitem__(self, at): return at + torch.rand(())
def noise():
    for at in range(12):
        yield torch.rand(2)
def begin():
    global own, loader
    torch.manual_seed(rank)
    own = torch.Generator().manual_seed(rank)
""")
    body = f"""
begin()
taken = []
for at, batch in mesh.elastic(enumerate({LOADERS[kind]}), state=("taken", "own"), every=5):
    taken.append((batch.tolist(), torch.rand(()).item(), torch.rand((), generator=own).item()))
    FAULT
"""
    mesh.run(body.replace("FAULT", ""))
    expected = dict(mesh.run("taken").values)
    cell = body.replace("FAULT", once(tmp_path / "killed", "rank == 1 and at == 8", KILL))
    with pytest.raises(RankLost):
        mesh.run(cell)
    mesh.heal()
    mesh.run(cell)
    assert dict(mesh.run("taken").values) == expected
    assert len(expected[0]) == 12


def test_a_loader_in_the_state_knows_by_itself_where_it_is(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run("""
import os
class Source:
    def __init__(self): self.at, self.num_read = 0, 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def __iter__(self):
        while self.at < 10:
            self.at += 1
            self.num_read += 1
            yield self.at
""")
    cell = f"""
source, taken = Source(), []
for at in mesh.elastic(source, state=("source", "taken"), every=4):
    taken.append(at)
    {once(tmp_path / "raised", "at == 7", "1 / 0")}
"""
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run(cell)
    mesh.run(cell)
    assert mesh.run("taken").values.same() == list(range(1, 11))
    assert mesh.run("source.num_read").values.same() == 6  # the four before the snapshot are not read again


def test_epochs_one_after_the_other_go_on_in_the_one_that_was_interrupted(mesh: Mesh, tmp_path: Path) -> None:
    cell = f"""
import os
done = []
for epoch in range(4):
    for i in mesh.elastic(range(6), state="done", every=4):
        done.append((epoch, i))
        {once(tmp_path / "killed", "rank == 1 and (epoch, i) == (2, 5)", KILL)}
"""
    mesh.run("import os\ndone = []", setup=True)
    with pytest.raises(RankLost):
        mesh.run(cell)
    mesh.heal()
    mesh.run(cell)
    assert mesh.run("done").values.same() == [(epoch, i) for epoch in range(4) for i in range(6)]


def test_a_fault_after_the_loop_computes_none_of_it_again(mesh: Mesh, tmp_path: Path) -> None:
    cell = f"""
import os
done, steps = [], 0
for i in mesh.elastic(range(6), state="done", every=4):
    done.append(i)
    steps += 1
{once(tmp_path / "killed", "rank == 2", KILL)}
"""
    with pytest.raises(RankLost):
        mesh.run(cell)
    mesh.heal()
    mesh.run(cell)
    assert mesh.run("(done, steps)").values.same() == (list(range(6)), 0)
    assert "this loop had ended at step 6, and its end is restored" in mesh.logs(0)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("mesh.elastic([1], state=('modle',))", r"there is no `modle`; names with a state are .*there_is"),
        ("mesh.elastic([1], state='there_is', every=0)", "every is a number of steps, 1 or more, not 0"),
        ("mesh.elastic([1], state=())", "state is the names of what the steps change"),
        ("mesh.elastic([1], state=there_is)", "state is the names"),
        ("mesh.elastic(5, state='there_is')", "a int cannot be"),
        ("mesh.elastic([1], state='a_file')", "the state `a_file` .* cannot be copied: TypeError"),
        ("mesh.elastic([1], state='holder')", "`holder` cannot be copied: it holds a Linear; give that a name"),
        ("mesh.elastic([1], state='there_is', every=1 + rank)", "every differs: 1 on rank 0; 2 on rank 1; 3 on rank 2"),
        ("mesh.elastic([1], state='only_here')", r"ranks? 0(-1)?: there is no `only_here`"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(mesh: Mesh, call: str, complaint: str) -> None:
    mesh.run("there_is, a_file, holder = torch.ones(2), open('/dev/null'), [torch.nn.Linear(1, 1)]")
    mesh.run("if rank == 2: only_here = 1")
    with pytest.raises(CellError, match=complaint):
        mesh.run(call)


@pytest.mark.parametrize(("every", "when_noticed"), [(5, "step 5"), (50, "step 7")])
def test_ranks_that_do_unequal_numbers_of_steps_are_an_error(mesh: Mesh, every: int, when_noticed: str) -> None:
    mesh.run("seen = 0")
    with pytest.raises(CellError, match=f"equally many steps .* ended after step 4.*after {when_noticed}"):
        mesh.run(
            f"for i in mesh.elastic(range(4 + (rank == 2) * 3), state='seen', every={every}, name='x{every}'): pass"
        )


def test_a_setup_cell_with_an_elastic_loop_does_not_train_on_a_new_rank_alone() -> None:
    with create_mesh(2) as mesh:
        mesh.run("total = 0\nfor i in mesh.elastic(range(3), state='total'): total += i", setup=True)
        kill(mesh, 1)
        assert "an elastic loop in a setup cell is not run again" in str(mesh.heal().failed)
        assert mesh.run("total").values.same() == 3


def test_the_memory_of_a_loop_that_has_ended_is_free_when_another_has_begun(mesh: Mesh) -> None:
    mesh.run("weights = torch.arange(100.0)")
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run("for i in mesh.elastic(range(2), state='weights', name='open', every=1):\n    if i: 1 / 0")
    for name in "abc":
        mesh.run(f"for i in mesh.elastic(range(3), state='weights', name={name!r}): pass")
    kept = (
        "import gc\nfrom meshbook.rank.elastic.runs import ElasticRuns\n"
        "[list(one.runs) for one in gc.get_objects() if type(one) is ElasticRuns][0][-2:]"
    )
    assert mesh.run(kept, echo=False).values.same() == ["open", "c"]


def test_a_model_that_a_snapshot_does_not_fit_is_named_and_the_snapshot_is_kept(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run("import os\nnetwork = torch.nn.Linear(3, 3)\ntorch.nn.init.zeros_(network.weight)")
    cell = f"""
for i in mesh.elastic(range(6), state="network", every=2):
    with torch.no_grad(): network.weight += 1
    {once(tmp_path / "raised", "i == 3", "1 / 0")}
"""
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run(cell)
    mesh.run("if rank == 1: network = torch.nn.Linear(4, 3)")
    with pytest.raises(
        CellError, match=r"rank 1: the state `network` could not be loaded .* another structure: weight"
    ):
        mesh.run(cell)
    mesh.run("if rank == 1: network = torch.nn.Linear(3, 3)")
    mesh.run(cell)
    assert mesh.run("network.weight[0, 0].item()").values.same() == 6.0


def test_a_loader_that_is_used_up_or_too_short_is_an_error(mesh: Mesh, tmp_path: Path) -> None:
    mesh.run("import os\nbatches, total = iter(range(9)), 0")
    cell = "for i in mesh.elastic(batches, state='total', every=2):\n    total += i\n    if i == 5: 1 / 0"
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run(cell)
    with pytest.raises(CellError, match="the loader is an iterator, and what the interrupted run has taken"):
        mesh.run(cell)
    mesh.run("batches = range(3)")
    with pytest.raises(CellError, match="the loader has 3 batches, and the loop that was interrupted had done 4 steps"):
        mesh.run(cell)


def test_the_device_mesh_is_what_it_was_and_has_the_function_after_the_groups_are_formed_again(mesh: Mesh) -> None:
    mesh.run("""
import meshbook, copy, pickle
from torch.distributed.device_mesh import init_device_mesh
other = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
same = mesh == other and hash(mesh) == hash(other) and "elastic" not in vars(mesh)
same = same and mesh.elastic is meshbook.elastic
""")
    assert mesh.run("same").values.same() is True
    kill(mesh, 1)
    mesh.heal()
    mesh.run("count = 0\nfor i in mesh.elastic(range(3), state='count'): count += i")
    assert mesh.run("count").values.same() == 3
