"""A recorded step gives what it gives without recording, and is one message; what differs is run as it is."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.rank.tensors import lowering
from meshbook.tensors.creation import engine_of
from tests.budget import WAIT_S
from tests.tensors import gpt

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(autouse=True)
def alike() -> None:
    torch.manual_seed(3)


def players(mesh: Mesh) -> list[dict[str, Any]]:
    def ask() -> Any:
        from meshbook.rank.tensors import replay

        return [replayer.describe() for replayer in replay.REPLAYERS.values()]

    return mesh.execute(ask)[0]


def forget(mesh: Mesh) -> None:
    def clear() -> None:
        from meshbook.rank.tensors import replay

        replay.REPLAYERS.clear()

    mesh.execute(clear)


def test_a_training_step_with_schedule_and_clipping_is_one_message_and_gives_the_losses_of_one_process(
    mesh2: Mesh,
) -> None:
    forget(mesh2)
    alone = gpt.GPT()
    model = meshbook.module_to_mesh(copy.deepcopy(alone), mesh2)
    places = torch.arange(gpt.LENGTH)
    here, there = gpt.Trainer(alone, places), gpt.Trainer(model, meshbook.distribute(places, mesh2))
    step = meshbook.record(there.step)
    data = gpt.batches(8)
    wanted = [here.step(*batch).item() for batch in data]
    engine = engine_of(mesh2)
    got, sent = [], []
    for x, y in mesh2.feed(data):
        before = engine.sender.num_ops
        loss = step(x, y)
        sent.append(engine.sender.num_ops - before)
        got.append(loss.item())
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference.detach(), rtol=1e-4, atol=1e-5)
    # The first call makes the optimizer's state, the second is the first of its kind, the third is recorded.
    stats = step.stats()
    assert (stats.one_by_one, stats.recorded, stats.replayed) == (2, 1, 5)
    assert stats.num_ops > 200
    assert max(sent[3:]) <= 4  # the step, what was let go of, and the gradients of the step before
    (player,) = players(mesh2)
    assert player["lowered"]
    assert player["tries"] == 1
    assert player["merged"][0] > 20  # all-reduces of gradients, as one


def test_another_shape_and_another_branch_are_recorded_for_themselves(mesh2: Mesh) -> None:
    @meshbook.record
    def step(x: Any, *, double: bool) -> Any:
        y = x * 2.0 if double else x + 1.0
        return y.sum()

    for _ in range(4):
        for rows in (4, 6):
            for double in (True, False):
                x = torch.randn(rows, 3)
                wanted = (x * 2 if double else x + 1).sum()
                there = meshbook.distribute(x, mesh2, [Shard(0)])
                torch.testing.assert_close(step(there, double=double).item(), wanted.item(), rtol=1e-5, atol=1e-5)
    assert (step.stats().one_by_one, step.stats().recorded, step.stats().replayed) == (4, 4, 8)


def test_numbers_of_python_are_those_of_this_call(mesh2: Mesh) -> None:
    scale = 1.0

    @meshbook.record
    def step(x: Any) -> Any:
        return (x * scale).clamp(-scale, scale).sum()

    x = torch.linspace(-3, 3, 8)
    there = meshbook.distribute(x, mesh2, [Shard(0)])
    for number in (1.0, 1.0, 1.0, 0.5, 2.0, 2.0, float("inf"), 0.25):
        scale = number
        wanted = (x * scale).clamp(-scale, scale).sum()
        torch.testing.assert_close(step(there).item(), wanted.item(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert step.stats().replayed >= 6


def test_in_place_changes_and_tensors_kept_from_the_step_before_are_followed(mesh2: Mesh) -> None:
    state = meshbook.distribute(torch.zeros(4, 2), mesh2, [Shard(0)])
    kept: list[Any] = []

    @meshbook.record
    def step(x: Any) -> Any:
        state.add_(x)
        state[:, 0].mul_(0.5)
        if kept:
            state.add_(kept.pop())
        kept.append(state * 0.1)
        return state.sum()

    alone, before = torch.zeros(4, 2), None
    for number in range(7):
        x = torch.full((4, 2), float(number))
        alone.add_(x)
        alone[:, 0].mul_(0.5)
        if before is not None:
            alone.add_(before)
        before = alone * 0.1
        got = step(meshbook.distribute(x, mesh2, [Shard(0)]))
        torch.testing.assert_close(got.item(), alone.sum().item(), rtol=1e-5, atol=1e-5)
    assert step.stats().replayed >= 3
    torch.testing.assert_close(kept[0].full_tensor(), before)


def test_views_of_another_dtype_norms_of_other_orders_and_other_ranks_tensors_are_those_of_this_call(
    mesh2: Mesh,
) -> None:
    forget(mesh2)

    @meshbook.record
    def bits(x: Any) -> Any:
        return x.view(torch.int32) + 1

    @meshbook.record
    def norm(x: Any, order: float) -> Any:
        return torch.linalg.vector_norm(x, order) * 2.0

    @meshbook.record
    def of_rank_1(x: Any) -> Any:
        return x.slice_mesh(dp=1) * 2.0

    alone = torch.arange(1.0, 9.0)
    x = meshbook.distribute(alone, mesh2, [Shard(0)])
    with mesh2.activate():
        own = torch.rand(1 << 16)  # large enough that a broadcast is seen while it is under way
    other = own.local(1)
    for _ in range(4):
        assert torch.equal(bits(x).full_tensor(), alone.view(torch.int32) + 1)
        assert torch.equal(of_rank_1(own).local(0), other * 2.0)
    for order in (2.0, 2.0, 2.0, 3.0, 1.0, float("inf")):
        torch.testing.assert_close(norm(x, order).full_tensor(), torch.linalg.vector_norm(alone, order) * 2.0)
    assert all(player["lowered"] for player in players(mesh2))
    assert norm.stats().replayed == 1


def test_a_local_operand_does_not_end_the_holding_back_of_a_step(mesh2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # As when ranks have enough to do.
    monkeypatch.setattr("meshbook.tensors.engine.TensorEngine._should_send_steps", lambda self: False)

    @meshbook.record
    def step(x: Any, there: torch.Tensor) -> Any:
        return (x * 2.0 + there).sum()

    x = meshbook.distribute(torch.ones(4), mesh2, [Shard(0)])
    made = [step(x, torch.full((4,), float(number))) for number in range(5)]
    assert step.stats().broken == 0
    assert step.stats().replayed == 3
    assert [each.item() for each in made] == [8.0, 12.0, 16.0, 20.0, 24.0]


def test_where_one_rank_cannot_write_a_step_down_no_rank_merges_its_collectives(mesh2: Mesh) -> None:
    forget(mesh2)

    def spoil(rank: int, back: bool) -> None:
        from meshbook.rank.tensors.lowering import CannotLower, Lowering

        def refuse(self: Any, results: Any, **options: Any) -> Any:
            raise CannotLower("this rank has a reason of its own")

        if rank == 1:
            if back:
                Lowering.compile = Lowering.kept
            else:
                Lowering.kept, Lowering.compile = Lowering.compile, refuse

    @meshbook.record
    def step(x: Any) -> Any:
        sums = [(x * factor).sum() for factor in (2.0, 3.0)]  # parts on each rank
        return [each.redistribute([Replicate()]) for each in sums]

    x = meshbook.distribute(torch.ones(4), mesh2, [Shard(0)])
    mesh2.execute(spoil, mesh2["rank"], False)
    try:
        for _ in range(4):
            assert [each.item() for each in step(x)] == [8.0, 12.0]
    finally:
        mesh2.execute(spoil, mesh2["rank"], True)
    (player,) = players(mesh2)
    assert player["why_not"] == "ranks would come to their collectives in different orders"
    step.forget()
    for _ in range(4):
        assert [each.item() for each in step(x)] == [8.0, 12.0]
    assert players(mesh2)[0]["merged"] == [2]


def test_a_step_goes_on_with_another_mesh(mesh2: Mesh) -> None:
    @meshbook.record
    def step(x: Any) -> Any:
        return (x * 3.0 + 1.0).sum()

    for number in range(2):  # both name their operations by the same numbers
        with create_mesh({"dp": 2}) as mesh:
            x = meshbook.distribute(torch.full((4,), float(number)), mesh, [Shard(0)])
            for _ in range(3):
                assert step(x).item() == 4 * (3.0 * number + 1.0)


def test_of_several_meshes_a_step_is_recorded_on_that_of_what_it_names(mesh2: Mesh, mesh22: Mesh) -> None:
    x, other = meshbook.distribute(torch.ones(4), mesh2, [Shard(0)]), meshbook.distribute(torch.ones(4), mesh22)
    model = meshbook.module_to_mesh(torch.nn.Linear(4, 1, bias=False), mesh2)

    @meshbook.record
    def by_tensor() -> Any:
        return (x * 2 + 1).sum()

    @meshbook.record
    def by_model() -> Any:
        return model(torch.ones(4)).sum() * 2

    @meshbook.record
    def of_two() -> Any:
        return (x * 2).sum(), (other * 2).sum()

    for _ in range(4):
        assert by_tensor().item() == 12
        by_model().item()
        assert [total.item() for total in of_two()] == [8, 8]
    assert by_tensor.stats().replayed
    assert by_model.stats().replayed
    assert not of_two.stats().replayed


def test_the_same_tensor_given_twice_is_no_case_of_two_tensors(mesh2: Mesh) -> None:
    @meshbook.record
    def step(a: Any, b: Any) -> Any:
        a.add_(1.0)
        return (a * b).sum()

    def make() -> Any:
        return meshbook.distribute(torch.ones(4), mesh2, [Shard(0)])

    for _ in range(3):
        assert step(make(), make()).item() == 8.0
        both = make()
        assert step(both, both).item() == 16.0


def test_random_numbers_of_a_recorded_step_are_new_each_time_and_those_of_the_seed(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(64), mesh2, [Shard(0)])

    def step(x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5) * 1.0

    def run(function: Any) -> list[list[float]]:
        torch.manual_seed(11)
        return [function(x).tolist() for _ in range(5)]

    recorded = meshbook.record(step)
    plain, again = run(step), run(recorded)
    assert plain == again
    assert len({tuple(drawn) for drawn in again}) == 5
    assert recorded.stats().replayed == 3


def test_a_value_asked_for_in_the_middle_is_right_and_the_step_is_not_held_back(mesh2: Mesh) -> None:
    @meshbook.record
    def step(x: Any) -> Any:
        total = x.sum()
        if total.item() > 5:  # the user's own branch on data
            return x * 2
        return x * 3

    def run() -> list[float]:
        numbers = (1.0, 2.0, 1.0, 2.0, 1.0)
        there = [meshbook.distribute(torch.full((4,), number), mesh2, [Shard(0)]) for number in numbers]
        return [step(x).full_tensor()[0].item() for x in there]

    with pytest.warns(UserWarning, match="asks for a value before it ends"):
        got = run()
    assert got == [3.0, 4.0, 3.0, 4.0, 3.0]
    assert (step.stats().broken, step.stats().replayed) == (3, 0)


def test_an_error_in_a_step_leaves_what_was_issued_before_it_done(mesh2: Mesh) -> None:
    state = meshbook.distribute(torch.zeros(2), mesh2)

    @meshbook.record
    def step(fail: bool) -> None:
        state.add_(1.0)
        if fail:
            raise KeyError("mine")

    for fail in (False, False, True, False):
        if fail:
            with pytest.raises(KeyError, match="mine"):
                step(fail)
        else:
            step(fail)
    assert state.tolist() == [4.0, 4.0]


def test_a_failure_on_the_ranks_names_the_operation_and_the_line(mesh2: Mesh) -> None:
    @meshbook.record
    def step(x: Any) -> Any:
        return torch.linalg.cholesky(x).sum()  # this line

    good = meshbook.distribute(torch.eye(2), mesh2)
    bad = meshbook.distribute(-torch.eye(2), mesh2)
    for _ in range(3):
        assert step(good).item() == 2.0
    failed = step(bad)
    with pytest.raises(meshbook.errors.MeshbookError) as caught:
        failed.item()
    assert "return torch.linalg.cholesky(x).sum()  # this line" in str(caught.value)
    (failure,) = caught.value.failures
    assert "in operation 1 of the recorded step" in failure.traceback[-1]
    assert step(good).item() == 2.0


def test_forgetting_leaves_nothing_on_the_ranks(mesh2: Mesh) -> None:
    forget(mesh2)

    @meshbook.record
    def step(x: Any) -> Any:
        return (x + 1).sum()

    x = meshbook.distribute(torch.ones(4), mesh2)
    for _ in range(3):
        step(x)
    assert len(players(mesh2)) == 1
    step.forget()
    assert players(mesh2) == []
    assert step(x).item() == 8.0
    engine = engine_of(mesh2)

    def reported() -> int:
        engine.wait()  # what it lets go of goes with the next
        return int(engine.wait()[0]["templates"])

    before = reported()
    for _ in range(3):
        step(x)
    assert reported() == before + 1
    step.forget()
    assert reported() == before


def test_a_recorded_function_that_is_gone_leaves_nothing_on_the_ranks(mesh2: Mesh) -> None:
    forget(mesh2)
    x = meshbook.distribute(torch.ones(4), mesh2)

    def run() -> None:
        @meshbook.record
        def step(x: Any) -> Any:
            return (x + 1).sum()

        for _ in range(3):
            made = step(x)
        assert made.item() == 8.0
        assert len(players(mesh2)) == 1

    run()
    gc.collect()
    assert players(mesh2) == []
    assert (x + 1).sum().item() == 8.0


@pytest.fixture
def to_the_bit() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_sums_of_more_than_two_parts_are_those_of_op_by_op_where_torch_is_to_be_deterministic(to_the_bit: None) -> None:
    with create_mesh({"dp": 3}) as mesh:
        x = meshbook.distribute(torch.randn(6, 96), mesh, [Shard(0)])

        def run(record: bool) -> Any:
            torch.manual_seed(3)
            layers = [torch.nn.Linear(96, 96) for _ in range(3)]
            model = meshbook.module_to_mesh(torch.nn.Sequential(*layers), mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @meshbook.record(enabled=record)
            def step() -> Any:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            losses = [step().item() for _ in range(7)]
            return losses, step.stats().replayed

        plain, again = run(False), run(True)
        assert plain[0] == again[0]
        assert again[1] >= 3


def test_operations_of_another_thread_in_the_middle_of_a_step_come_in_their_order(mesh2: Mesh) -> None:
    state = meshbook.distribute(torch.zeros(2), mesh2)

    @meshbook.record
    def step(number: int) -> Any:
        state.add_(1.0)
        held = state * 0.0 + 10.0
        if number == 3:
            other = threading.Thread(target=lambda: state.add_(held))
            other.start()
            other.join(WAIT_S)
        state.add_(held * 0.0)
        return state * 1.0

    assert [step(number).tolist()[0] for number in range(5)] == [1.0, 2.0, 3.0, 14.0, 15.0]
    assert step.stats().replayed == 2


def test_a_step_may_take_more_batches_of_a_feed_than_are_sent_ahead(mesh2: Mesh) -> None:
    @meshbook.record
    def step(feed: Any) -> Any:
        return sum((next(feed) * 2.0).sum() for _ in range(8))

    for _ in range(3):
        assert step(mesh2.feed((torch.full((2,), float(number)) for number in range(8)), prefetch=1)).item() == 112


def test_a_recorded_function_within_another_is_a_part_of_it(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4), mesh2)

    @meshbook.record
    def inner(x: Any) -> Any:
        return x * 2.0

    @meshbook.record
    def outer(x: Any) -> Any:
        return inner(inner(x)).sum()

    assert [outer(x).item() for _ in range(4)] == [16.0] * 4
    assert outer.stats().replayed == 2
    assert (inner.stats().replayed, inner.stats().one_by_one) == (0, 0)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [(1.0, 1.0, True), (0.0, 0.0, True), (0.0, -0.0, False), (-0.0, 0.0, False), (float("nan"), float("nan"), True)],
)
def test_a_number_written_into_a_step_is_the_same_down_to_the_sign_of_zero(
    before: float, now: float, same: bool
) -> None:
    assert lowering.is_same_number(now, before) is same
