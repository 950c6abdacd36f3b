"""Steps that repeat are recorded by themselves, and give bit for bit what they give operation by operation."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh, create_mesh
from meshbook.errors import MeshbookError, RankLost
from meshbook.rank.tensors import lowering
from meshbook.tensors import recording
from meshbook.tensors.creation import engine_of
from tests.tensors import gpt


@pytest.fixture(autouse=True)
def by_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # However busy the machine is, a step is not parted because nothing came for a while.
    monkeypatch.setattr("meshbook.tensors.engine._HELD_IDLE_S", 5.0)
    meshbook.record.auto(True)
    yield
    meshbook.record.auto(True)


def both(mesh: Mesh, run: Callable[[], Any]) -> tuple[Any, Any, recording.Stats]:
    """What a loop gives op by op, and recorded; and how its steps were carried out then."""
    meshbook.record.auto(False)
    torch.manual_seed(3)
    plain = run()
    meshbook.record.auto(True)
    watcher: Any = engine_of(mesh).watcher
    watcher.stats = recording.Stats()
    torch.manual_seed(3)
    return plain, run(), watcher.stats


def chain(x: Any, length: int = 24) -> Any:
    """Some operations."""
    for number in range(length // 2):
        x = (x + 0.5 * number).tanh()
    return x


def test_a_training_loop_with_schedule_clipping_and_fed_batches_is_one_message_a_step(mesh2: Mesh) -> None:
    engine, sent = engine_of(mesh2), []

    def train() -> Any:
        model = meshbook.module_to_mesh(gpt.GPT(), mesh2)
        trainer = gpt.Trainer(model, meshbook.distribute(torch.arange(gpt.LENGTH), mesh2))
        losses = []
        sent.clear()
        for x, y in mesh2.feed(gpt.batches(10)):
            before = engine.num_ops
            losses.append(trainer.step(x, y).item())
            sent.append(engine.num_ops - before)
        return losses, [parameter.full_tensor() for parameter in model.parameters()]

    (losses, weights), (again, others), stats = both(mesh2, train)
    assert losses == again
    assert all(map(torch.equal, weights, others))
    assert stats.replayed + stats.recorded >= 6
    # The first step makes the optimizer's state, two are seen, the fourth is recorded.
    assert sum(sent[3:]) <= 3 * len(sent[3:])


@pytest.fixture
def to_the_bit() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_sums_of_more_than_two_parts_are_those_of_op_by_op_where_torch_is_to_be_deterministic(to_the_bit: None) -> None:
    with create_mesh({"dp": 3}) as mesh:
        x = meshbook.distribute(torch.randn(6, 96), mesh, [Shard(0)])

        def run() -> Any:
            layers = [torch.nn.Linear(96, 96) for _ in range(3)]
            model = meshbook.module_to_mesh(torch.nn.Sequential(*layers), mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(7):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        plain, again, stats = both(mesh, run)
        assert plain == again
        assert stats.replayed >= 3


def test_another_shape_and_a_branch_on_data_are_steps_of_their_own(mesh2: Mesh) -> None:
    def run() -> Any:
        got = []
        for number in range(24):
            x = meshbook.distribute(torch.randn(4 + 2 * (number % 2), 3), mesh2, [Shard(0)])
            total = chain(x).sum()
            if total > 0:  # waits
                got.append((chain(x * 2.0) + 1.0).sum().item())
            else:
                got.append((chain(x) * 3.0).sum().item())
        return got

    plain, again, stats = both(mesh2, run)
    assert plain == again
    assert stats.replayed >= 20


def test_random_numbers_are_new_in_each_step_and_those_of_op_by_op(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(64), mesh2, [Shard(0)])

    def run() -> Any:
        return [torch.nn.functional.dropout(chain(x), 0.5).tolist() for _ in range(7)]

    plain, again, stats = both(mesh2, run)
    assert plain == again
    assert len({tuple(drawn) for drawn in again}) == 7
    assert stats.replayed >= 4


def test_a_loop_that_nothing_ends_is_found_in_its_operations(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.randn(8, 8), mesh2, [Shard(0)])
    engine, sent = engine_of(mesh2), []

    def run() -> Any:
        before = engine.num_ops
        w = meshbook.distribute(torch.ones(8, 1), mesh2)
        for number in range(400):
            w = (x @ w).redistribute([Replicate()])
            w = w / w.norm() + 1.0 / (1 + number)
        sent.append(engine.num_ops - before)
        return w.tolist()

    plain, again, stats = both(mesh2, run)
    assert plain == again
    assert stats.replayed >= 5
    assert sent[1] < sent[0] / 2


def test_ranks_with_nothing_to_do_do_not_wait_for_the_end_of_a_long_step(
    mesh2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshbook.tensors.engine._HELD_IDLE_S", 0.05)
    monkeypatch.setattr("meshbook.tensors.engine._MAX_HELD_S", 0.1)
    x, engine = meshbook.distribute(torch.zeros(4), mesh2), engine_of(mesh2)
    for _ in range(2):  # seen twice
        for _ in range(200):
            x.add_(1)
        engine.wait()
    before, issued = engine.num_ops, 0
    while engine.num_ops == before and issued < 200:  # more and more comes, as slowly as data does
        x.add_(1)
        issued += 1
        with engine._changed:
            engine._changed.wait_for(lambda: engine._ahead, 0.02)
    assert issued < 200
    assert x.full_tensor().tolist() == [400 + issued] * 4


def test_an_exception_and_a_stop_in_the_middle_of_a_step_leave_done_what_was_issued(mesh2: Mesh) -> None:
    def run() -> Any:
        state, got = meshbook.distribute(torch.zeros(2), mesh2), []
        for number in range(12):
            try:
                state.add_(1.0)
                state.add_(chain(state) * 0.0)
                if number == 6:
                    raise KeyError("mine")
                if number == 8:
                    signal.raise_signal(signal.SIGINT)
                state.mul_(2.0)
            except (KeyError, KeyboardInterrupt):
                continue
            finally:
                got.append(state.tolist())
        return got

    plain, again, stats = both(mesh2, run)
    assert plain == again
    assert stats.replayed >= 4


def test_tensors_of_recorded_steps_are_freed(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(16), mesh2, [Shard(0)])
    engine = engine_of(mesh2)

    def live() -> int:
        engine.wait()  # what is let go of goes with the next
        return int(engine.wait()[0]["live"])

    before, kept = live(), None
    for _ in range(12):
        kept = chain(x) + (0.0 if kept is None else kept)
        kept.sum().item()
    assert live() == before + 1
    del kept
    assert live() == before


def test_operations_of_another_thread_in_the_middle_of_a_step_come_in_their_order(mesh2: Mesh) -> None:
    state = meshbook.distribute(torch.zeros(2), mesh2)
    got = []
    for number in range(8):
        state.add_(1.0)
        held = chain(state)
        if number == 6:
            other = threading.Thread(target=lambda held=held: state.add_(held * 0.0 + 10.0))
            other.start()
            other.join(30.0)
        state.add_(held * 0.0)
        got.append(state.tolist()[0])
    assert got == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 17.0, 18.0]


def test_what_finds_errors_in_the_data_is_left_alone_so_that_its_neighbours_live(mesh2: Mesh) -> None:
    state = meshbook.distribute(torch.zeros(2), mesh2)
    for number in range(6):
        sign = -1.0 if number == 5 else 1.0
        state.add_(chain(state) * 0.0 + 1.0)
        factor = torch.linalg.cholesky(meshbook.distribute(sign * torch.eye(2), mesh2))
        if number < 5:
            assert factor.sum().item() == 2.0
    with pytest.raises(MeshbookError, match="cholesky"):
        factor.sum().item()
    assert state.tolist() == [6.0, 6.0]


def test_it_is_off_where_it_is_not_wanted(mesh2: Mesh) -> None:
    x = meshbook.distribute(torch.ones(4), mesh2)
    engine = engine_of(mesh2)
    meshbook.record.auto(False)
    before = engine.num_ops
    for _ in range(6):
        chain(x, 24).sum().item()
    assert engine.num_ops - before >= 6 * 25
    assert not recording._is_wanted({"MESHBOOK_AUTO_RECORD": "0"})
    assert recording._is_wanted({})


def test_a_rank_that_dies_in_a_step_recorded_by_itself_is_told_at_the_next_wait() -> None:
    with create_mesh({"dp": 2}) as mesh:
        x = meshbook.distribute(torch.ones(8, 8), mesh, [Shard(0)])
        watcher: Any = engine_of(mesh).watcher
        for _ in range(5):
            chain(x @ x.T).sum().item()
        assert watcher.stats.replayed >= 1
        held = chain(x @ x.T, 12)
        mesh.kill([1])
        with pytest.raises(RankLost, match="rank 1"):
            chain(held, 12).sum().item()


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [(1.0, 1.0, True), (0.0, 0.0, True), (0.0, -0.0, False), (-0.0, 0.0, False), (float("nan"), float("nan"), True)],
)
def test_a_number_written_into_a_step_is_the_same_down_to_the_sign_of_zero(
    before: float, now: float, same: bool
) -> None:
    assert lowering.is_same_number(now, before) is same
