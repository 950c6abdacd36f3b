"""`mesh.resilient`: what is computed with faults is, bit for bit, what is computed without.

Faults are real; each strikes once, at a step of the notebook's or at an operation of a rank's.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellInterrupted, OperationFailed, RankLost, UsageError
from meshbook.tensors.resilient import MAX_FAULTS
from tests.budget import WAIT_S, when
from tests.controller.test_heal import kill, press_stop_when
from tests.tensors.resilient_training import STEPS, Training, train_with_kills
from tests.tensors.test_heal import DIE_AT

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("starts_meshes")]

DIES = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def duo() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def quad() -> Iterator[Mesh]:
    with create_mesh({"dp": 4}) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


_expected: dict[Any, Any] = {}


def check(training: Training) -> None:
    """Compare losses and parameters with those of the same training without `mesh.resilient`."""
    key = training.mesh.size(), training.kind
    if key not in _expected:
        _expected[key] = Training(training.mesh, training.kind).run_plain().result()
    assert training.result() == _expected[key]


def at_step(number: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Return a fault that acts once, in this step."""
    left = [act]

    def fault(step: int) -> None:
        if step == number and left:
            left.pop()()

    return fault


# ---- a rank is lost


@pytest.mark.parametrize("model", [pytest.param("replicated", marks=pytest.mark.thorough), "cut", "fsdp"])
def test_a_training_whose_ranks_are_killed_has_the_losses_of_one_whose_are_not(duo: Mesh, model: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    training = Training(duo, model)
    train_with_kills(training, 2, random.Random(seed))
    duo.heal()
    check(training)


@pytest.mark.thorough
def test_ddp_sums_gradients_of_three_ranks_and_more_in_the_same_order_after_a_loss(quad: Mesh) -> None:
    training = Training(quad, "ddp")
    training.run(at_step(25, lambda: kill(quad, 3)))
    check(training)


def test_a_loop_says_where_it_goes_on(duo: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(duo, "cut")
    training.run(at_step(13, lambda: kill(duo, 1)))
    found = capsys.readouterr().out
    assert "rank 1 is back" in found
    assert (
        "resilient: goes on at step 13 (snapshot of step 10; 3 steps are computed again; what rank 1 held came from "
        "the others)" in found
    )
    check(training)


@pytest.mark.thorough
def test_a_loop_whose_body_is_in_no_step_goes_on_when_it_is_run_again(
    duo: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(duo, "cut")
    with pytest.raises(RankLost):
        training.run(at_step(27, lambda: kill(duo, 0)), heals=False)
    duo.heal()
    training.run(heals=False)
    assert "resilient: goes on at step 27 (snapshot of step 20; 7 steps" in capsys.readouterr().out
    check(training)


MOMENTS = {
    "in the optimizer's step": ("aten::addcdiv_", 60),
    "before a snapshot": ("meshbook::take_snapshot", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.thorough
def test_a_rank_that_is_lost_at_any_moment_of_a_step_costs_no_step(duo: Mesh, moment: str) -> None:
    training = Training(duo, "cut")
    name, count = MOMENTS[moment]
    duo.run(DIE_AT.format(name=name, count=count), ranks=1, echo=False)
    incarnation = duo.status().ranks[1].pid
    training.run()
    assert duo.status().ranks[1].pid != incarnation
    check(training)


@pytest.mark.parametrize("name", ["meshbook::collect_snapshot", "meshbook::load_snapshot"])
@pytest.mark.thorough
def test_a_rank_that_is_lost_while_the_loop_goes_back_costs_no_step(quad: Mesh, name: str) -> None:
    training = Training(quad, "cut")
    quad.run(DIE_AT.format(name=name, count=1), ranks=3, echo=False)
    training.run(at_step(16, lambda: kill(quad, 1)))
    check(training)


@pytest.mark.thorough
def test_two_ranks_of_which_one_held_the_others_copy_end_the_loop_with_what_to_do(quad: Mesh) -> None:
    training = Training(quad, "cut")
    with pytest.raises(
        UsageError,
        match=r"snapshot of step 30 cannot be put together: the state of rank 1 was held by ranks 1-2, .* checkpoint, "
        r"and call mesh\.resilient\(\.\.\., restart=True\)",
    ):
        training.run(at_step(33, lambda: kill(quad, 1, 2)))
    training = Training(quad, "replicated")
    training.run(at_step(33, lambda: kill(quad, 1, 2)))  # what every rank has lives on
    check(training)


def test_all_ranks_lost_end_the_loop_with_what_to_do(duo: Mesh) -> None:
    training = Training(duo, "replicated")
    with pytest.raises(UsageError, match=r"there is no snapshot to go back to: .* restart=True"):
        training.run(at_step(12, lambda: kill(duo, 0, 1)))
    again = Training(duo, "replicated")
    again.run()
    check(again)


@pytest.mark.thorough
def test_a_loop_that_is_struck_again_and_again_ends(duo: Mesh) -> None:
    training = Training(duo, "replicated")
    faults = []

    def fault(step: int) -> None:
        if step == 15 and len(faults) <= MAX_FAULTS:
            faults.append(step)
            kill(duo, 1)

    with pytest.raises(RankLost, match=r"fault number 4 since the snapshot of step 10, .* run the loop again"):
        training.run(fault)
    duo.heal()
    training.run()
    check(training)


# ---- Stop, exceptions


def stop_when_stuck(mesh: Mesh, training: Training, sign: Path, name: str, count: int) -> None:
    """Train until rank 1 is stuck at an operation of that name; then press Stop."""
    stuck = f"open({str(sign)!r}, 'w').close(); __import__('time').sleep(1000)"
    source = DIE_AT.format(name=name, count=count)
    assert DIES in source
    mesh.run(source.replace(DIES, stuck), ranks=1, echo=False)

    def stop() -> None:
        when(lambda: sign.exists() and not mesh.session.foreground.is_idle)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(CellInterrupted):
        training.run()
    stopper.join()


def test_an_exception_in_the_body_leaves_the_snapshots_as_they_are(
    duo: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(duo, "cut")
    with pytest.raises(ZeroDivisionError):
        training.run(at_step(34, lambda: 1 / 0))
    with torch.no_grad():
        training.model[0].weight.zero_()  # taken back
    training.losses.clear()
    training.run()
    assert "resilient: goes on at step 34 (snapshot of step 30; 4 steps are computed again)" in capsys.readouterr().out
    check(training)


@pytest.mark.thorough
def test_a_stop_and_then_a_loss_before_the_loop_is_run_again_cost_no_step(duo: Mesh) -> None:
    training = Training(duo, "fsdp")
    with pytest.raises(KeyboardInterrupt):
        training.run(at_step(15, lambda: signal.raise_signal(signal.SIGINT)))
    kill(duo, 1)
    duo.heal()
    training.run()
    check(training)


def test_a_stop_while_a_loop_heals_the_mesh_ends_the_block(duo: Mesh) -> None:
    training, pid = Training(duo, "cut"), duo.status().ranks[1].pid

    def has_new_process() -> bool:
        return duo.session.info.ranks[1].pid not in (None, pid)

    def lose_a_rank_and_stop() -> None:
        kill(duo, 1)
        press_stop_when(has_new_process)

    lose, stopped = at_step(15, lose_a_rank_and_stop), threading.Event()

    def fault(step: int) -> None:
        lose(step)
        if has_new_process():  # the heal was quicker than the Stop, which then comes here
            stopped.wait(WAIT_S)

    with pytest.raises(KeyboardInterrupt):
        training.run(fault)
    training.run()
    check(training)


# ---- what a snapshot has


def small(mesh: Mesh, **options: Any) -> Any:
    return meshbook.distribute(torch.zeros(4), mesh, **options)


def test_tensors_lists_generators_and_random_states_go_back_with_it(duo: Mesh) -> None:
    cut, local = small(duo, sharding_spec=["dp"]), torch.zeros(2)
    with duo.activate():
        own = torch.zeros(3)
    drawn: dict[str, list[Any]] = {"torch": [], "own": []}
    remote: list[Any] = []
    generator = torch.Generator().manual_seed(3)
    fault = at_step(5, lambda: kill(duo, 1))
    with duo.resilient(cut, local, own, drawn, remote, generator, every=2) as run:
        for number in run.steps(range(8)):
            with run.step():
                cut.add_(1)
                own.add_(2)
                local.add_(3)
                drawn["torch"].append(torch.rand(()).item())
                drawn["own"].append(torch.rand((), generator=generator).item())
                remote.append((cut * number).detach())
                fault(number)
    assert cut.full_tensor().tolist() == [8.0] * 4
    assert [own.local(rank)[0].item() for rank in (0, 1)] == [16.0, 16.0]
    assert local.tolist() == [24.0, 24.0]
    expected = torch.Generator().manual_seed(3)
    assert drawn["own"] == [torch.rand((), generator=expected).item() for _ in range(8)]
    assert len(set(drawn["torch"])) == 8
    assert [one.full_tensor()[3].item() for one in remote] == [(number + 1.0) * number for number in range(8)]


def test_gradients_that_are_added_up_over_steps_are_part_of_a_snapshot(duo: Mesh) -> None:
    weight = meshbook.distribute(torch.ones(4, requires_grad=True), duo, sharding_spec=["dp"])
    fault = at_step(5, lambda: kill(duo, 0))
    with duo.resilient(weight, every=3) as run:
        for number in run.steps(range(7)):
            with run.step():
                (weight * (number + 1)).sum().backward()
                fault(number)
    assert weight.grad is not None
    assert weight.grad.full_tensor().tolist() == [28.0] * 4


@pytest.mark.thorough
def test_a_recorded_step_goes_on_after_a_stop_and_a_loss(duo: Mesh, tmp_path: Path) -> None:
    training = Training(duo, "cut", record=True)
    stop_when_stuck(duo, training, tmp_path / "stuck", "meshbook::replay", 14)
    duo.run(DIE_AT.format(name="meshbook::replay", count=9), ranks=0, echo=False)
    training.run()
    assert training.compute.stats().replayed > STEPS // 2
    check(training)


def test_a_loop_that_was_stopped_goes_on_with_an_optimizer_and_a_list_that_the_cell_has_made_anew(
    duo: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(duo, "cut")
    with pytest.raises(KeyboardInterrupt):
        training.run(at_step(25, lambda: signal.raise_signal(signal.SIGINT)))
    training.opt = torch.optim.AdamW(training.model.parameters(), lr=3.0)
    training.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.opt, 100)
    training.losses = []
    training.run()
    assert "resilient: goes on at step 25 (snapshot of step 20; 5 steps are computed again)" in capsys.readouterr().out
    check(training)


# ---- several loops, beginning anew


def test_loops_that_had_ended_yield_nothing_when_the_block_is_run_again(duo: Mesh) -> None:
    total, seen = small(duo), []

    def train(fault: Callable[[int], object]) -> None:
        with duo.resilient(total, every=2) as run:
            for epoch in range(3):
                for number in run.steps(range(4)):
                    total.add_(1)
                    seen.append((epoch, number))
                    fault(4 * epoch + number)

    with pytest.raises(ZeroDivisionError):
        train(at_step(7, lambda: 1 / 0))
    del seen[:]
    train(lambda number: None)
    assert seen == [(1, 2), (1, 3), *((2, number) for number in range(4))]
    assert total.full_tensor().tolist() == [12.0] * 4


def test_a_loss_at_the_end_of_a_loop_is_made_good_in_it(duo: Mesh) -> None:
    total = small(duo, sharding_spec=["dp"])
    duo.run(DIE_AT.format(name="aten::add_", count=9), ranks=1, echo=False)
    with duo.resilient(total, every=4) as run:
        for _ in run.steps(range(10)):
            with run.step():
                total.add_(1)
    assert total.full_tensor().tolist() == [10.0] * 4


def test_a_loop_in_which_an_operation_fails_on_one_rank_in_the_last_step_has_not_ended(duo: Mesh) -> None:
    total, counts = small(duo, sharding_spec=["dp"]), []

    def train() -> None:
        with duo.resilient(total, counts, every=4) as run:
            for _ in range(2):
                for number in run.steps(range(10)):
                    total.add_(1)
                    counts.append(number)

    fails = DIE_AT.format(name="aten::add_", count=10).replace(DIES, "raise ValueError('by the test')")
    duo.run(fails, ranks=1, echo=False)
    with pytest.raises(OperationFailed, match="ValueError: by the test"):
        train()
    train()
    assert total.full_tensor().tolist() == [20.0] * 4
    assert counts == [*range(10), *range(10)]


def test_a_block_that_has_ended_well_begins_anew(duo: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    total = small(duo)
    for _ in range(2):
        with duo.resilient(total, every=2) as run:
            for _ in run.steps(range(3)):
                total.add_(1)
    assert total.full_tensor().tolist() == [6.0] * 4
    assert capsys.readouterr().out == ""


def test_an_interrupted_run_is_dropped_by_another_one_and_by_restart(
    duo: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = small(duo), meshbook.distribute(torch.zeros(5), duo)

    def begin(tensor: Any, **options: Any) -> None:
        with duo.resilient(tensor, every=2, **options) as run:
            for number in run.steps(range(9)):
                tensor.add_(1)
                at_step(3, lambda: 1 / 0)(number)

    def interrupted(tensor: Any, **options: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            begin(tensor, **options)

    interrupted(first)
    interrupted(second)
    assert capsys.readouterr().out == "resilient: begins anew; the run that was interrupted at step 3 is dropped\n"
    interrupted(second, restart=True)
    assert capsys.readouterr().out == "resilient: begins anew; the run that was interrupted at step 3 is dropped\n"
    assert second.full_tensor()[0].item() == 8.0


# ---- bad input


def test_bad_input_says_what_to_do(duo: Mesh) -> None:
    total = small(duo)
    model = meshbook.module_to_mesh(torch.nn.Linear(2, 2), duo)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with duo.activate():
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: duo.resilient(total, every=0), "every is a number of steps, 1 or more, not 0"),
            (lambda: duo.resilient(total, 3), "a int cannot be put back in place; give modules"),
            (lambda: duo.resilient([1]), "for loops on remote tensors, and there is none .* mesh.elastic"),
            (lambda: duo.resilient(opt, total), "2 of the 2 parameters that the SGD changes .* give their module too"),
            (lambda: duo.resilient(total).steps([1]), "use it as a block"),
        ]
    for act, text in cases:
        with pytest.raises(UsageError, match=text):
            act()


def test_bad_input_in_a_block_says_what_to_do(duo: Mesh) -> None:
    total = small(duo)
    with duo.resilient(total) as run:
        with pytest.raises(UsageError, match=r"the loader is an iterator, .* run\.steps\(lambda: enumerate"):
            run.steps(enumerate([1]))
        with pytest.raises(UsageError, match="a int cannot be"):
            run.steps(3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="for the body of a loop"), run.step():
            pass
        with pytest.raises(UsageError, match=r"another mesh\.resilient runs"), duo.resilient(total):
            pass


def test_state_that_cannot_be_copied_says_why(duo: Mesh) -> None:
    def begin(*things: Any) -> None:
        with duo.resilient(*things) as run:
            run.steps([1])

    with pytest.raises(UsageError, match=r"the state of the list cannot be copied: .*Linear; give that itself"):
        begin(small(duo), [torch.nn.Linear(2, 2)])
    duo.run("w = torch.ones(2)", echo=False)
    with pytest.raises(OperationFailed, match="belongs to a cell"):
        begin(duo["w"] + 0, duo["w"].data)
    with pytest.raises(UsageError, match="is a view that the ranks hold as a copy"):
        begin(small(duo, sharding_spec=["dp"])[1:3])
