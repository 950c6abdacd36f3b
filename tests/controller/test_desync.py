"""After a call that did not end well the next one computes right numbers, whatever was under way; and where one rank
fails, those that wait for it are released, with the cause first.

Three real ranks, which all of these tests share: what one leaves behind would show in the next.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted, RankLost, Released
from tests.budget import WAIT_S, when
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")

SETUP = """
import time, copy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
sharded = copy.deepcopy(net)
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer)
ddp = DistributedDataParallel(copy.deepcopy(net))
batch = torch.full((2, 8), float(rank + 1))

def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

def gradients(model):
    model.zero_grad()
    model(batch).square().mean().backward()
    return [whole(p.grad).clone() for p in model.parameters()]

def train_the_same():
    now = [gradients(ddp), gradients(sharded)]
    return all(torch.allclose(a, b) for was, new in zip(expected, now) for a, b in zip(was, new))

def sums():
    out = []
    for i in range(3):
        y = torch.full((4,), 100.0 * i + rank + 1)
        dist.all_reduce(y)
        out.append(y[0].item())
    z = torch.full((2,), 5.0) if rank == 0 else torch.zeros(2)
    dist.broadcast(z, 0)
    out.append(z[0].item())
    told = torch.zeros(1)
    requests = [dist.isend(torch.full((1,), 10.0 + rank), (rank + 1) % 3), dist.irecv(told, (rank - 1) % 3)]
    for request in requests:
        request.wait()
    return [*out, told.item()]
"""

# What a cell has under way when it ends: each leaves ranks at different places in the order of their collectives.
UNDER_WAY = {
    "an asynchronous all_reduce of one rank": """
x = torch.full((4,), 7.0)
if rank == 0: work = dist.all_reduce(x, async_op=True)
""",
    "one that nobody holds": "x = torch.full((4,), 7.0)\nif rank == 0: dist.all_reduce(x, async_op=True)",
    "a send that is not received": "x = torch.full((1,), 7.0)\nif rank == 0: work = dist.isend(x, 1)",
    "a receive that is not sent": "x = torch.full((1,), 7.0)\nif rank == 1: work = dist.irecv(x, 0)",
    "the forward pass of FSDP": "if rank == 0: sharded(batch)",
    "the backward pass of FSDP": "loss = sharded(batch).sum()\nif rank == 0: loss.backward()",
    "the backward pass of DDP": "loss = ddp(batch).sum()\nif rank == 0: loss.backward()",
    "a group of some of them": """
pair = dist.new_group([0, 1])
if rank == 0: work = dist.all_reduce(torch.ones(4), group=pair, async_op=True)
""",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Mesh]:
    with create_mesh(3) as mesh:
        mesh.run(SETUP, echo=False)
        mesh.run("expected = [gradients(ddp), gradients(sharded)]", echo=False)
        yield mesh


@pytest.fixture
def mesh(shared: Mesh) -> Iterator[Mesh]:
    """The shared mesh, whose next cell computes right numbers after each test."""
    yield shared
    works(shared)


def works(mesh: Mesh) -> None:
    """The next cell's numbers are right, and models that were in the middle of a step train."""
    got = mesh.run("sums()", echo=False, timeout=WAIT_S).values
    assert dict(got) == {rank: [6.0, 306.0, 606.0, 5.0, 10.0 + (rank - 1) % 3] for rank in range(3)}
    same = mesh.run("train_the_same()", echo=False, timeout=WAIT_S).values
    assert set(same.values()) == {True}
    assert mesh.status().groups == "ready"


def failure_of(mesh: Mesh, source: str, **options: Any) -> Any:
    with pytest.raises((CellError, RankLost)) as caught:
        mesh.run(source, echo=False, timeout=WAIT_S, **options)
    return caught.value


@pytest.mark.parametrize(
    ("under_way", "ends"),
    [
        *((under_way, "an exception") for under_way in UNDER_WAY),
        ("an asynchronous all_reduce of one rank", "Stop"),
        ("the backward pass of FSDP", "Stop"),
    ],
)
def test_the_cell_after_one_that_did_not_end_well_computes_right_numbers(mesh: Mesh, under_way: str, ends: str) -> None:
    if ends == "Stop":
        waits = "import time\nprint('here', flush=True)\nwhile True: time.sleep(0.01)"
        source = f"if rank == 2: print('there')\n{UNDER_WAY[under_way]}\n{waits}"
        before = mesh.logs(1).count("here")
        future = mesh.run(source, wait=False, echo=False)
        when(lambda: mesh.logs(1).count("here") > before)
        future.interrupt()
        assert isinstance(future.exception(WAIT_S), CellInterrupted)
    else:
        error = failure_of(mesh, f"{UNDER_WAY[under_way]}\nraise ValueError('bad batch')")
        assert error.failures[0].ename == "ValueError"


# A step of a model that all ranks leave at the same place: nobody waits, and no collective tells them apart.
LEFT = {
    "the forward pass of FSDP": "hook = sharded[2].register_forward_pre_hook(leave)\nsharded(batch)",
    "the backward pass of FSDP": (
        "hook = sharded[0].register_full_backward_hook(leave)\nsharded(batch).sum().backward()"
    ),
    "the backward pass of DDP": (
        "hook = ddp.module[0].register_full_backward_hook(leave)\nddp(batch).sum().backward()"
    ),
}
AFTER_LEAVING = """
hook.remove()
ddp.zero_grad()
with torch.no_grad():
    for model in (net, ddp, sharded):
        for p in model.parameters(): p.mul_(2)
    alike = all(torch.allclose(model(batch), net(batch)) for model in (ddp, sharded))
    for model in (net, ddp, sharded):
        for p in model.parameters(): p.mul_(0.5)
alike
"""


@pytest.mark.parametrize(
    ("left", "ends"), [*((left, "an exception") for left in LEFT), ("the backward pass of FSDP", "Stop")]
)
def test_a_model_whose_step_all_ranks_leave_at_one_place_starts_the_next_one_afresh(
    mesh: Mesh, left: str, ends: str
) -> None:
    if ends == "Stop":
        leave = "def leave(*_):\n    print('in the step', flush=True)\n    while True: time.sleep(0.01)\n"
        before = [mesh.logs(rank).count("in the step") for rank in range(3)]
        future = mesh.run(leave + LEFT[left], wait=False, echo=False)
        when(lambda: all(mesh.logs(rank).count("in the step") > before[rank] for rank in range(3)))
        future.interrupt()
        assert isinstance(future.exception(WAIT_S), CellInterrupted)
    else:
        error = failure_of(mesh, "def leave(*_): raise ValueError('in the step')\n" + LEFT[left])
        assert error.failures[0].ename == "ValueError"
    # What had been gathered is of other weights than the model has now.
    assert set(mesh.run(AFTER_LEAVING, echo=False, timeout=WAIT_S).values.values()) == {True}


def test_a_stop_that_torch_makes_into_a_runtime_error_is_a_stop(mesh: Mesh) -> None:
    source = """
import io, os, signal, types, torch._jit_internal

def pressed():  # what DDP's backward pass in C++ calls opens a file
    torch._jit_internal.io = io
    os.kill(os.getpid(), signal.SIGINT)
    return io.BytesIO()

torch._jit_internal.io = types.SimpleNamespace(BytesIO=pressed)
ddp(batch).sum().backward()
"""
    with pytest.raises(CellInterrupted):
        mesh.run(source, echo=False, timeout=WAIT_S)


def test_a_stop_leaves_autograd_as_the_cell_found_it(mesh: Mesh) -> None:
    fake = "from torch._subclasses.fake_tensor import FakeTensorMode\nFakeTensorMode().__enter__()\n"
    source = f"import os, signal\n{fake}torch.set_grad_enabled(False)\nos.kill(os.getpid(), signal.SIGINT)\nrank"
    with pytest.raises(CellInterrupted):
        mesh.run(source, echo=False)
    assert set(mesh.run("torch.is_grad_enabled()", echo=False).values.values()) == {True}
    assert set(mesh.run("type(torch.ones(1)).__name__", echo=False).values.values()) == {"Tensor"}


def test_a_stop_in_the_first_forward_pass_of_fsdp_leaves_a_model_that_trains(mesh: Mesh) -> None:
    source = """
import os, signal
from torch.distributed.fsdp._fully_shard import _fsdp_state
first = copy.deepcopy(net)
for layer in (first[0], first[2], first):
    fully_shard(layer)
init = _fsdp_state.FSDPState._init_fqns

def pressed(state):
    _fsdp_state.FSDPState._init_fqns = init
    if rank == 2: os.kill(os.getpid(), signal.SIGINT)
    return init(state)

_fsdp_state.FSDPState._init_fqns = pressed
first(batch)
"""
    with pytest.raises(CellInterrupted):
        mesh.run(source, echo=False, timeout=WAIT_S)
    mesh.run("first(batch).square().mean().backward()", echo=False, timeout=WAIT_S)
    same = mesh.run("torch.allclose(first(batch), net(batch))", echo=False, timeout=WAIT_S).values
    assert set(same.values()) == {True}


def test_ranks_that_fail_in_step_keep_their_groups(mesh: Mesh) -> None:
    works(mesh)
    epoch = mesh.status().group_generation
    failure_of(mesh, "sums()\nraise ValueError('after the step')")
    works(mesh)
    assert mesh.status().group_generation == epoch


def test_a_cell_of_some_ranks_that_fails_out_of_step_leaves_all_of_them_right(mesh: Mesh) -> None:
    failure_of(
        mesh, "if rank == 0: work = dist.all_reduce(torch.ones(4), async_op=True)\nraise ValueError", ranks=(0, 2)
    )


def test_cells_sent_ahead_never_compute_with_ranks_out_of_step(mesh: Mesh) -> None:
    source = UNDER_WAY["an asynchronous all_reduce of one rank"] + "if rank == 1: raise ValueError('no')"
    first = mesh.run(source, wait=False, echo=False)
    second = mesh.run("ahead = sums()", wait=False, echo=False)
    assert isinstance(first.exception(WAIT_S), CellError)
    error = second.exception(WAIT_S)  # it may come so late that the groups are formed anew before it
    if error is None:
        ahead = mesh.run("ahead", echo=False).values
        assert dict(ahead) == {rank: [6.0, 306.0, 606.0, 5.0, 10.0 + (rank - 1) % 3] for rank in range(3)}


def test_a_failure_that_a_user_caught_in_a_cell_that_ended_well_has_groups_formed_anew(mesh: Mesh) -> None:
    source = "if rank == 1: raise KeyError('a')\ntry: dist.barrier()\nexcept RuntimeError as error: said = str(error)"
    failure_of(mesh, source)


# ---- one rank's error ends the cell


WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(1))",
    "recv": "dist.recv(torch.ones(1), 1)",
    "a group that is made": "dist.new_group([0, 1, 2])",
    "FSDP": "sharded(batch)",
    "DDP": "ddp(batch).sum().backward()",
}


@pytest.mark.parametrize("waits", WAITS)
def test_whatever_ranks_wait_in_is_broken_when_one_has_raised(mesh: Mesh, waits: str) -> None:
    error = failure_of(mesh, f"if rank == 1: raise ValueError('no')\n{WAITS[waits]}")
    assert [(one.ranks, one.ename) for one in error.failures] == [((1,), "ValueError")]
    # of DDP, one may wait in the next collective already
    assert sorted(rank for one in error.released for rank in one.ranks) == [0, 2]


def test_ranks_are_released_from_one_that_has_run_later_cells_meanwhile(mesh: Mesh) -> None:
    source = """
import threading
begun, may_end, own = threading.Event(), threading.Event(), [dist.new_group([each]) for each in range(3)][rank]
def other():
    dist.barrier(group=own)
    begun.set()
    may_end.wait()
if rank == 1:
    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    raise ValueError('no')
dist.recv(torch.ones(1), 1)
"""
    first = mesh.run(source, wait=False, echo=False)
    # That thread might yet send what the others wait for. It ends in a cell that begins after the error.
    second = mesh.run("if rank == 1: may_end.set(); thread.join()", wait=False, echo=False)
    error = first.exception(WAIT_S)
    assert isinstance(error, CellError)
    assert [(one.ranks, one.ename) for one in error.failures] == [((1,), "ValueError")]
    assert sorted(rank for one in error.released for rank in one.ranks) == [0, 2]
    second.result(WAIT_S)
    works(mesh)


def test_one_collective_too_many_on_a_rank_is_named_with_the_first_that_differs(mesh: Mesh) -> None:
    mesh.run("def log_all(values):\n    for value in values.values():\n        dist.all_reduce(torch.tensor(value))")
    source = """
    values = {'loss': 1.0, 'accuracy': 2.0}
    if rank == 2: values['lr'] = 3.0
    log_all(values)
    log_all({'norm': 5.0})
    """
    error = failure_of(mesh, textwrap.dedent(source).strip())
    assert [(one.ranks, one.ename) for one in error.failures] == [((2,), "CollectiveAborted")]
    first, second = error.failures[0].evalue.splitlines()
    assert first.endswith("ended the cell without coming to it")
    number = re.match(r"rank 2 came to (\d+) collectives, ", second)
    assert number is not None
    assert f"They differ from #{int(number[1]) - 1} on: all_reduce of scalar float32 at line 3 of cell" in second
    assert "called at line 3 on rank 2" in second
    assert "called at line 4 on rank" in second
    assert second in "\n".join(error.rendered)  # what a notebook shows


def test_a_collective_that_the_rank_had_joined_before_it_raised_is_completed(mesh: Mesh) -> None:
    error = failure_of(
        mesh,
        "x = torch.full((1,), float(rank + 1))\n"
        "work = dist.all_reduce(x, async_op=True)\n"
        "if rank == 1: raise ValueError('no')\n"
        "time.sleep(1.0)\n"  # the others come to it when it is known that rank 1 has left
        "work.wait()\njoined = x.item()",
    )
    assert (error.succeeded, error.released) == ((0, 2), ())
    assert set(mesh.run("joined", ranks=(0, 2), echo=False).values.values()) == {6.0}


def test_ranks_that_compute_go_on_to_their_end(mesh: Mesh) -> None:
    source = "if rank == 1: raise ValueError('no')\nif rank == 0: dist.barrier()\ntime.sleep(1.0)\nfar = rank"
    error = failure_of(mesh, source)
    assert (error.succeeded, error.released) == ((2,), (Released((0,), "barrier at line 2"),))
    assert mesh.run("far", ranks=2, echo=False).values[2] == 2


def test_a_rank_that_waits_for_one_that_was_released_is_told_the_first_cause(mesh: Mesh) -> None:
    error = failure_of(
        mesh,
        "pair = dist.new_group([0, 2])\n"
        "if rank == 1: raise ValueError('no')\n"
        "try:\n    dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(1), group=pair)\n"
        "except RuntimeError as error:\n    why = error\n    raise",
    )
    assert [(one.ranks, one.ename) for one in error.failures] == [((1,), "ValueError")]
    assert {rank for one in error.released for rank in one.ranks} == {0, 2}
    reported = mesh.run("[why.cause, why.ranks]", ranks=2, echo=False).values[2]
    assert reported[0] == "rank 1 raised ValueError: no at line 2"


def test_an_except_around_the_collective_sees_the_cause_and_so_does_the_next_collective(mesh: Mesh) -> None:
    source = """
from meshbook.errors import CollectiveAborted
said = []
if rank == 1:
    raise ValueError("no")
for _ in range(2):
    try:
        dist.barrier()
    except CollectiveAborted as error:
        said.append([str(error), error.ranks, error.cause, error.where])
"""
    error = failure_of(mesh, source)
    assert error.succeeded == (0, 2)
    first, second = mesh.run("said", ranks=0, echo=False).values[0]
    assert first == second
    assert first[0].endswith("cannot be completed: rank 1 raised ValueError: no at line 4")
    assert first[1:] == [(1,), "rank 1 raised ValueError: no at line 4", "barrier at line 7"]


def test_a_function_on_ranks_that_fails_on_one_ends_on_all(mesh: Mesh) -> None:
    def step(here: int) -> None:
        import torch.distributed as dist

        if dist.get_rank() == here:
            raise ValueError("no")
        dist.barrier()

    with pytest.raises(CellError) as caught:
        mesh.execute(step, 1)
    assert [(one.ranks, one.ename) for one in caught.value.failures] == [((1,), "ValueError")]
    assert [one.ranks for one in caught.value.released] == [(0, 2)]


def test_a_rank_that_is_stopped_before_it_begins_a_cell_releases_those_that_wait_for_it(mesh: Mesh, gate: Gate) -> None:
    earlier = mesh.run(gate.wait, ranks=0, wait=False, echo=False)
    source = """
print("begun without rank 0")
try:
    dist.barrier()
except RuntimeError as error:
    why = error
    raise
"""
    # One that waits: of two, the one released later may see the other's connections close, which does not name rank 0.
    future = mesh.run(source, ranks=(0, 1), wait=False, echo=False)
    when(lambda: "begun without rank 0" in mesh.logs(1))
    mesh.interrupt(0)
    assert isinstance(earlier.exception(WAIT_S), CellInterrupted)
    error = future.exception(WAIT_S)
    assert isinstance(error, CellInterrupted)
    assert error.released == (Released((1,), "barrier at line 3"),)
    cause = mesh.run("[why.cause, why.ranks]", ranks=1, echo=False).values[1]
    assert cause == ["rank 0 was stopped before it began the cell", (0,)]


def test_a_thread_that_still_takes_part_for_its_rank_is_waited_for(mesh: Mesh) -> None:
    source = """
import re
import textwrap
import threading
go = threading.Event()

def join_in():
    dist.all_reduce(torch.ones(1))
    go.wait(20)
    time.sleep(2.0)
    dist.all_reduce(torch.ones(1))

if rank == 1:
    thread = threading.Thread(target=join_in)
    thread.start()
else:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
if rank == 1: go.set()
"""
    mesh.run(source, echo=False, timeout=WAIT_S)
    mesh.run("if rank == 1: thread.join()", echo=False, timeout=WAIT_S)
