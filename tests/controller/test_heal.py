"""Ranks that are killed for real, and the new processes in their place: which those are, and that the others go on."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import meshbook
from meshbook.actor import SupervisionError
from meshbook.controller import healing
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.controller.tables import status_table
from meshbook.errors import CellError, CellInterrupted, HealError, MeshShapeError, RankLost
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when, when_printed
from tests.gate import Gate
from tests.host_processes import pid_of

pytestmark = pytest.mark.usefixtures("starts_meshes")

HELD_UP_S = 60.0  # how long ranks wait for each other to connect


def kill(mesh: Mesh, *ranks: int) -> None:
    """Kill ranks, and wait until their death is known here."""
    for rank in ranks:
        os.kill(pid_of(mesh, rank), signal.SIGKILL)
    when(lambda: set(ranks) <= set(mesh.session.lost))


def values(mesh: Mesh, source: str) -> dict[int, Any]:
    return dict(mesh.run(source, echo=False).values)


def pids(mesh: Mesh) -> dict[int, int | None]:
    return {rank.rank: rank.pid for rank in mesh.status().ranks}


# ---- the new process, and those that stay


def test_a_new_process_takes_the_number_of_the_dead_one_and_the_others_keep_theirs(trio: Mesh) -> None:
    trio.run("mine = rank * 10", echo=False)
    before = pids(trio)
    kill(trio, 1)
    healed = trio.heal()
    after = pids(trio)
    assert (healed.ranks, trio.session.lost) == ((1,), ())
    assert [rank for rank in before if before[rank] != after[rank]] == [1]
    assert values(trio, "rank, local_rank, world_size, mine") == {rank: (rank, rank, 3, rank * 10) for rank in range(3)}
    assert values(trio, "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nint(t)") == dict.fromkeys(range(3), 6)


def test_a_rank_that_lives_is_replaced_when_it_is_named_and_a_rank_that_is_not_there_is_refused(trio: Mesh) -> None:
    trio.run("mine = rank * 10", echo=False)
    before = pids(trio)
    assert trio.heal(1).ranks == (1,)
    after = pids(trio)
    assert [rank for rank in before if before[rank] != after[rank]] == [1]
    assert values(trio, "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nint(t)") == dict.fromkeys(range(3), 6)
    with pytest.raises(MeshShapeError, match="rank 7"):
        trio.heal([1, 7])
    assert pids(trio) == after


@pytest.mark.thorough
def test_a_rank_whose_cuda_context_is_dead_is_named_shown_and_replaced(pair: Mesh) -> None:
    before = pids(pair)
    with pytest.raises(CellError) as raised:  # the words of CUDA's error are all that is known of it
        pair.run("if rank: raise RuntimeError('CUDA error: device-side assert triggered')", echo=False)
    assert "rank 1's CUDA context is dead (device-side assert triggered)" in "".join(raised.value.__notes__)
    assert pair.status().ranks[1].problem == "its CUDA context is dead (device-side assert triggered)"
    status = str(status_table(pair.status()))
    assert "idle, its CUDA context is dead" in status
    assert "%mesh heal 1 has new processes" in status
    assert pair.heal().ranks == (1,)
    after = pids(pair)
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert [rank.problem for rank in pair.status().ranks] == [None, None]
    assert str(pair.heal()) == "nothing to heal: all 2 ranks are alive"


def test_what_it_says_names_the_rank_what_came_from_where_and_what_did_not(trio: Mesh) -> None:
    trio.run("import math\ndef half(x): return x / 2", echo=False)
    trio.run("step = 5\nshare = torch.arange(3) * rank", echo=False)
    trio.run("step += 1", echo=False)
    kill(trio, 2)
    text = str(trio.heal())
    first, *rest = text.splitlines()
    assert re.fullmatch(
        r"rank 2 is back \(fresh process, .*s\) · imports and definitions of 2 cells · groups formed anew",
        first,
    ), first
    assert rest == [
        "not on rank 2: step (cells have changed it since it was defined; alike on ranks 0-1)",
        "not on rank 2: share (it differs between the other ranks)",
        "flags and counters may differ by rank; if these do not: %mesh heal --copy step",
    ]
    assert str(trio.heal(copy=True)) == "step from rank 0 (alike on ranks 0-1), copied to rank 2"
    assert values(trio, "half(step)") == dict.fromkeys(range(3), 3.0)


@pytest.mark.parametrize("lost", [(0,), (0, 2), (0, 1, 2)])
@pytest.mark.thorough
def test_any_ranks_can_be_replaced_at_once(trio: Mesh, lost: tuple[int, ...]) -> None:
    trio.run("mine = rank", echo=False)
    kill(trio, *lost)
    assert trio.heal().ranks == lost
    assert values(trio, "t = torch.ones(1) * rank\ndist.all_reduce(t)\nint(t)") == dict.fromkeys(range(3), 3)
    assert values(trio, "mine") == {0: 0, 1: 1, 2: 2}


@pytest.mark.thorough
def test_a_mesh_whose_fork_server_died_gets_another_one(pair: Mesh) -> None:
    (server,) = set(values(pair, "__import__('os').getppid()").values())
    pair.run("again = 1", setup=True, echo=False)
    pair.run("again += 1", echo=False)
    pair.run("kept = list([rank])", echo=False)
    os.kill(server, signal.SIGKILL)
    assert values(pair, "again") == {0: 2, 1: 2}  # the ranks outlive it
    kill(pair, 0, 1)
    healed = pair.heal()
    assert healed.missing == {rank: {"kept": "no other rank was left that held it"} for rank in (0, 1)}
    assert "not on ranks 0-1: kept (no other rank was left that held it)" in str(healed)
    assert values(pair, "again") == {0: 1, 1: 1}
    assert "all ranks were lost: names have what these cells gave them, and not what later cells made" in str(healed)
    assert set(values(pair, "__import__('os').getppid()").values()) != {server}
    assert values(pair, "t = torch.ones(1)\ndist.all_reduce(t)\nint(t)") == {0: 2, 1: 2}


@pytest.mark.thorough
def test_ranks_in_fresh_interpreters_and_on_several_hosts_are_replaced() -> None:
    with create_mesh(3, num_hosts=2, start_method="fresh") as mesh:
        kill(mesh, 2)
        mesh.heal()
        assert values(mesh, "t = torch.ones(1) * rank\ndist.all_reduce(t)\nint(t), local_rank") == {
            0: (3, 0), 1: (3, 1), 2: (3, 0),
        }  # fmt: skip


def test_ranks_without_process_groups_are_replaced_and_nothing_is_copied() -> None:
    with create_mesh(2, process_group=False) as mesh:
        mesh.run("x = 7\ny = list([x])", echo=False)
        kill(mesh, 1)
        healed = mesh.heal()
        assert healed.restored == {}
        assert healed.missing == {1: {"y": "nothing is copied without process groups"}}
        assert values(mesh, "rank, 'y' in globals()") == {0: (0, True), 1: (1, False)}


def test_a_mesh_that_lost_nobody_says_that_there_is_nothing_to_heal(mesh: Mesh) -> None:
    healed = mesh.heal()
    assert (healed.ranks, str(healed)) == ((), "nothing to heal: all 4 ranks are alive")


def test_a_loop_that_catches_the_loss_heals_and_runs_the_failed_step_again(
    pair: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(
        "def step(i):\n    t = torch.full((1,), float(i))\n    dist.all_reduce(t)\n    return t.item()", echo=False
    )
    found = []
    for i in range(4):
        try:
            if i == 2 and not pair.session.lost:
                os.kill(pids(pair)[1], signal.SIGKILL)  # type: ignore[arg-type]
                pair.run("dist.barrier()", echo=False)
            found.append(values(pair, f"step({i})"))
        except RankLost:
            assert meshbook.heal_mesh(pair) is pair
            assert capsys.readouterr().out.startswith("rank 1 is back (fresh process")
            found.append(values(pair, f"step({i})"))
    assert found == [{0: 2.0 * i, 1: 2.0 * i} for i in range(4)]


# ---- cells that are replayed


def test_setup_cells_run_whole_and_of_others_what_defines(trio: Mesh) -> None:
    trio.run("built = [f'on {rank}']\nprint('building')", setup=True, echo=False)
    trio.run(
        "from math import pi\nLIMIT = 2 * 3\ncalls = []\nclass Box:\n    size = LIMIT\ncalls.append(1)", echo=False
    )
    kill(trio, 1)
    healed = trio.heal(copy=["calls"])
    assert (healed.replayed, healed.num_defined, healed.failed) == (("the cell",), 1, {})
    assert values(trio, "built, pi > 3, LIMIT, Box.size, calls") == {
        rank: ([f"on {rank}"], True, 6, 6, [1]) for rank in range(3)
    }


@pytest.mark.thorough
def test_a_setup_cell_may_use_collectives_and_build_models_without_the_others(trio: Mesh) -> None:
    trio.run(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "t = torch.ones(1)\ndist.all_reduce(t)\ndist.barrier()\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n",
        setup=True,
        echo=False,
    )
    kill(trio, 1)
    healed = trio.heal()
    assert healed.failed == {}
    assert healed.missing[1]["t"] == "alike on ranks 0,2"  # made of this rank's own value: so it is said
    assert "t" in healed.alike
    trio.heal(copy="t")
    assert values(trio, "int(t)") == dict.fromkeys(range(3), 3)
    weights = values(trio, "model.module.weight.detach().sum().item()")
    assert len(set(weights.values())) == 1


def test_a_setup_cell_that_fails_on_the_new_rank_is_named_and_the_rest_is_done(pair: Mesh, gate: Gate) -> None:
    pair.run(
        f"import os\nassert not os.path.exists({str(gate.path)!r}), 'no second time'\na = 1", setup=True, echo=False
    )
    pair.run("b = rank", setup=True, echo=False)
    gate.open()
    kill(pair, 1)
    healed = pair.heal()
    assert healed.failed == {"the cell": "AssertionError: no second time"}
    assert "not replayed: the cell: AssertionError: no second time" in str(healed)
    assert not healed.complete
    assert values(pair, "b") == {0: 0, 1: 1}


@pytest.mark.thorough
def test_the_replay_can_be_left_out(pair: Mesh) -> None:
    pair.run("def f(): return 1", echo=False)
    pair.run("ran = rank", setup=True, echo=False)
    kill(pair, 1)
    healed = pair.heal(replay=False, share=False)
    assert (healed.replayed, healed.num_defined, healed.restored) == ((), 0, {})
    assert healed.missing == {1: {"f": "copying was turned off", "ran": "copying was turned off"}}
    assert values(pair, "'f' in globals(), 'ran' in globals()") == {0: (True, True), 1: (False, False)}


# ---- at a bad moment


def start(change: Callable[[], Any], reached: Callable[[], bool]) -> Future[Any]:
    """Begin to heal or to resize in the background, and wait until it has come to some stage."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(change)
    executor.shutdown(wait=False)
    when(lambda: reached() or future.done())
    assert not future.done(), future
    return future


SECOND_TIME = """
import os, sys
if os.path.exists({path!r} + '.second'):
    os.write(1, b'again\\n')
    {wait}
"""


@pytest.fixture
def stuck_setup(trio: Mesh, gate: Gate) -> Gate:
    """A setup cell that waits at a gate when it runs on a new rank."""
    trio.run(SECOND_TIME.format(path=str(gate.path), wait=gate.wait), setup=True, echo=False)
    marker = gate.path.with_name(gate.path.name + ".second")
    marker.touch()
    return gate


def test_a_cell_that_is_sent_while_the_mesh_is_healed_runs_afterwards(trio: Mesh, stuck_setup: Gate) -> None:
    trio.run("step = 1", echo=False)
    kill(trio, 1)
    healing = start(trio.heal, lambda: "again" in trio.logs(1))
    late = trio.run("step + rank", wait=False, echo=False, ranks=None)
    with pytest.raises(HealError, match="being healed already"):
        trio.heal()
    stuck_setup.open()
    assert healing.result(WAIT_S).ranks == (1,)
    assert dict(late.result(WAIT_S).values) == {0: 1, 1: 2, 2: 3}


# Ranks that end as one of them connects its groups: that has published its address, for which its peers wait in C++.
END_AS_ONE_CONNECTS = """
from meshbook.rank.process_groups import store
def end_after(read):
    def read_and_end(self, *args):
        read(self, *args)
        for pid in {pids}: __import__('os').kill(pid, 9)
    return read_and_end
for name in ("get", "multi_get"): setattr(store.MeshStore, name, end_after(getattr(store.MeshStore, name)))
"""


@pytest.mark.thorough
def test_ranks_that_are_lost_while_groups_are_formed_hold_up_nobody(trio: Mesh) -> None:
    victims = [pids(trio)[2], pids(trio)[1]]
    trio.run(END_AS_ONE_CONNECTS.format(pids=victims), ranks=[1], echo=False)
    with pytest.raises(CellError, match="ZeroDivisionError"):  # breaks the groups: they are formed again
        trio.run("if rank == 0: 1 / 0\ndist.all_reduce(torch.ones(1))", echo=False)
    when(lambda: trio.session.lost == (1, 2))
    assert dict(trio.run("rank", wait=False, echo=False).result(HELD_UP_S / 2).values) == {0: 0}
    trio.heal()
    trio.run("dist.all_reduce(torch.ones(1))", echo=False)


@pytest.mark.parametrize("victim", [1, 2], ids=["the new rank", "another rank"])
@pytest.mark.thorough
def test_a_rank_that_is_lost_while_the_mesh_is_healed_ends_the_attempt_and_the_next_one_succeeds(
    trio: Mesh, stuck_setup: Gate, victim: int
) -> None:
    trio.run("step = 1", echo=False)
    kill(trio, 1)
    healing = start(trio.heal, lambda: "again" in trio.logs(1))
    kill(trio, victim)
    stuck_setup.open()
    with pytest.raises(HealError, match="%mesh heal"):
        healing.result(WAIT_S)
    healed = trio.heal()
    assert healed.ranks == tuple(sorted({1, victim}))
    assert values(trio, "t = torch.ones(1)\ndist.all_reduce(t)\nint(t), step") == dict.fromkeys(range(3), (3, 1))


def press_stop_when(reached: Callable[[], bool]) -> None:
    """Press Stop from another thread, as soon as that is so."""

    def press() -> None:
        when(reached)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


def test_a_stop_ends_the_waiting_for_a_heal_and_says_that_it_is_done(
    trio: Mesh, stuck_setup: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "AFTER_STOP_S", WAIT_S)  # on a machine that has other work too
    trio.run("step = 1", echo=False)
    kill(trio, 1)
    press_stop_when(lambda: "again" in trio.logs(1))
    with pytest.raises(CellInterrupted, match=r"^the heal was stopped, and was completed all the same:\nrank 1 is"):
        trio.heal(copy="step")
    assert values(trio, "step") == dict.fromkeys(range(3), 1)


@pytest.mark.thorough
def test_a_stop_ends_the_waiting_for_a_heal_that_cannot_be_ended_and_says_that_it_goes_on(
    trio: Mesh, gate: Gate
) -> None:
    says = "os.write(1, b'again')"  # where a Stop that comes right behind it is caught
    stays = f"def stay():\n    try:\n        {says}\n        {gate.wait}\n    except KeyboardInterrupt:\n        stay()"
    second_time = f"if os.path.exists({str(gate.path)!r} + '.second'): stay()"
    trio.run(f"import os\n{stays}\n{second_time}", setup=True, echo=False)
    gate.path.with_name(gate.path.name + ".second").touch()
    kill(trio, 1)
    press_stop_when(lambda: "again" in trio.logs(1))
    with pytest.raises(CellInterrupted, match=r"^the heal was stopped here, and goes on in the mesh; cells wait"):
        trio.heal()
    waiting = trio.run("t = torch.ones(1)\ndist.all_reduce(t)\nint(t)", wait=False, echo=False)
    gate.open()
    assert dict(waiting.result(WAIT_S).values) == dict.fromkeys(range(3), 3)


@pytest.mark.thorough
def test_a_dead_ranks_log_goes_on_in_that_of_the_new_process(pair: Mesh) -> None:
    pair.run("print('first life')", echo=False)
    kill(pair, 1)
    pair.heal()
    pair.run("print('second life')", echo=False)
    assert re.search("first life.*second life", pair.logs(1), re.DOTALL)


@pytest.mark.thorough
def test_an_error_of_a_cell_after_healing_is_the_cells_own(pair: Mesh) -> None:
    kill(pair, 1)
    pair.heal()
    with pytest.raises(CellError, match="ZeroDivisionError"):
        pair.run("1 / 0")


# ---- remote tensors and actors


def test_actors_of_the_lost_rank_are_lost_the_others_live_and_new_ones_start_on_the_new_process(
    pair: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by default a failure that is reported before the heal stops what runs then: this test
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", lambda failure: None)
    counters = pair.spawn("counters", Counter)
    assert [value for _, value in counters.add.call().get().items()] == [1, 1]
    kill(pair, 1)
    pair.heal()
    assert counters.slice(rank=0).add.call_one().get() == 2
    with pytest.raises(SupervisionError, match="rank 1 of 'counters' is lost"):
        counters.add.call().get()
    anew = pair.spawn("counters_again", Counter)
    assert [value for _, value in anew.add.call().get().items()] == [1, 1]


@pytest.mark.thorough
def test_a_heal_is_not_stopped_by_the_failure_of_an_actor_on_the_rank_that_it_replaces(
    trio: Mesh, stuck_setup: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    counters = trio.spawn("counters", Counter)
    counters.add.call().get()
    kill(trio, 1)
    # what stops a cell that nobody has told of the loss
    reported = threading.Thread(
        target=lambda: (when_printed("no __supervise__ has handled it", capsys), stuck_setup.open())
    )
    reported.start()
    assert trio.heal().ranks == (1,)
    reported.join()
