"""Actors on several machines, and the notebook's own process on one more."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import meshbook
from meshbook.actor import Actor, ActorError, ActorMesh, Buffer, Channel, SupervisionError, endpoint, pull
from meshbook.actors.procs import ProcMesh, list_actors
from meshbook.actors.runtime.registry import local_registry
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import TransferError
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]

LARGE = 24 << 20  # bytes; several times what may be on its way


class Worker(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.failures: list[str] = []

    @endpoint
    def machine(self) -> str:
        import socket

        return socket.gethostname()

    @endpoint
    def pid(self) -> int:
        import os

        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def note(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def ask(self, others: Any, value: Any) -> list[Any]:
        return [answer for _, answer in others.echo.call(value).get(WAIT_S)]

    @endpoint
    def wait_for(self, others: Any) -> str:
        try:
            others.hang.call().get(WAIT_S)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    @endpoint
    def send(self, port: Any, value: Any) -> None:
        port.send(value)

    @endpoint
    def hang(self) -> None:
        import time

        while True:
            time.sleep(0.01)

    @endpoint
    def spawn_on(self, procs: Any) -> None:
        self.children = procs.spawn("children", type(self))
        self.children.echo.call(0).get(WAIT_S)

    @endpoint
    def told(self) -> list[str]:
        return self.failures

    def __supervise__(self, failure: Any) -> bool:
        self.failures.append(str(failure))
        return True


class Owner(Actor):
    def __init__(self) -> None:
        import torch

        self.tensor = torch.arange(6 << 20, dtype=torch.float32)  # 24 MiB

    @endpoint
    def buffer(self) -> Any:
        from meshbook.actor import Buffer

        return Buffer(self.tensor)

    @endpoint
    def first(self) -> float:
        return float(self.tensor[0])

    @endpoint
    def read(self, buffer: Any) -> float:
        import torch

        here = torch.empty(buffer.shape, dtype=buffer.dtype)
        buffer.read_into(here).get(WAIT_S)
        return float(here[-1])

    @endpoint
    def write(self, buffer: Any, value: float) -> None:
        import torch

        buffer.write_from(torch.full(buffer.shape, value)).get(WAIT_S)


@pytest.fixture(scope="module")
def mesh(bed: Bed) -> Iterator[Mesh]:
    with create_mesh(4, on="ssh://n1,n2") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def workers(mesh: Mesh) -> ActorMesh[Worker]:
    return mesh.spawn("workers", Worker)


def values(answers: Any) -> list[Any]:
    return [value for _, value in answers.get(WAIT_S)]


def test_they_are_called_on_all_machines(workers: ActorMesh[Worker]) -> None:
    assert values(workers.machine.call()) == ["n1", "n1", "n2", "n2"]
    assert workers.slice(rank=3).machine.call_one().get(WAIT_S) == "n2"


def test_their_errors_name_ranks(workers: ActorMesh[Worker]) -> None:
    with pytest.raises(ActorError, match="on purpose") as raised:
        workers.fail.call().get(WAIT_S)
    assert raised.value.ranks == (0, 1, 2, 3)


def test_messages_keep_their_order_and_state_is_read(workers: ActorMesh[Worker]) -> None:
    for number in range(200):
        workers.note.broadcast(number)
    values(workers.echo.call(None))
    assert [seen for _, seen in pull(workers.state.seen)] == [list(range(200))] * 4


def test_large_arguments_and_results_go_there_and_back(workers: ActorMesh[Worker]) -> None:
    large = np.random.default_rng(7).random(LARGE // 8)
    assert all(np.array_equal(value, large) for value in values(workers.echo.call(large)))


def test_actors_of_one_machine_call_those_of_the_other(mesh: Mesh, workers: ActorMesh[Worker]) -> None:
    callers = mesh.spawn("callers", Worker)
    assert values(callers.ask.call(workers, 7)) == [[7] * 4] * 4
    large = os.urandom(LARGE)
    assert callers.slice(rank=0).ask.call_one(workers.slice(rank=3), large).get(WAIT_S) == [large]
    callers.stop().get(WAIT_S)


WAYS = """
from meshbook.actors.runtime.transport import local_transport
sorted({type(peer.carrier).__name__ for peer in local_transport().machines._streams.values() if peer.node in nodes})
"""


def ways(mesh: Mesh, actors: ActorMesh[Worker]) -> set[str]:
    """How ranks reach those of the other machine."""
    mesh.push(nodes={address.node for address in actors._ref.addresses})
    return {way for ways in mesh.run(WAYS).values.values() for way in ways}


def test_ranks_connect_to_each_other_without_the_supervisor(mesh: Mesh, workers: ActorMesh[Worker]) -> None:
    values(mesh.spawn("askers", Worker).ask.call(workers, 0))
    assert ways(mesh, workers) == {"_AcceptedLink", "_DialedLink"}


def test_where_machines_cannot_connect_the_supervisor_carries_what_they_say(bed: Bed) -> None:
    blocked = [("n1", "10.77.0.2"), ("n2", "10.77.0.1")]
    for name, other in blocked:
        bed.run(name, "ip", "route", "add", "blackhole", other)
    try:
        with create_mesh(4, on="ssh://n1,n2", torch=False) as mesh:
            workers = mesh.spawn("workers", Worker)
            large = os.urandom(LARGE)
            callers = mesh.spawn("callers", Worker)
            assert values(callers.ask.call(workers, 7)) == [[7] * 4] * 4
            assert callers.slice(rank=0).ask.call_one(workers.slice(rank=3), large).get(WAIT_S) == [large]
            assert ways(mesh, workers) == {"_RankRelay"}
    finally:
        for name, other in blocked:
            bed.run(name, "ip", "route", "del", "blackhole", other)


def test_ports_and_remote_names_travel(mesh: Mesh, workers: ActorMesh[Worker]) -> None:
    port, receiver = Channel.open()
    workers.send.call(port, "hello").get(WAIT_S)
    assert [receiver.recv().get(WAIT_S) for _ in range(4)] == ["hello"] * 4
    mesh.run("here = 10 + rank")
    assert values(workers.echo.call(mesh["here"])) == [10, 11, 12, 13]


def test_a_mesh_that_is_left_and_attached_again_has_its_actors(bed: Bed) -> None:
    mesh = create_mesh(2, on="ssh://n1,n2", torch=False)
    waiting = mesh.spawn("workers", Worker).slice(rank=1).hang.call_one()
    when(lambda: runs(mesh, "workers", "hang"))
    mesh.detach()
    with pytest.raises(SupervisionError, match="this program has left its mesh"):
        waiting.get(WAIT_S)
    with meshbook.attach(mesh.name) as again:
        others = again.spawn("others", Worker)
        assert values(others.echo.call(1)) == [1, 1]
        assert again.actors()["workers"].slice(rank=0).echo.call_one(2).get(WAIT_S) == 2
        again.stop()


def test_an_endpoint_on_another_machine_is_interrupted(mesh: Mesh, workers: ActorMesh[Worker]) -> None:
    future = workers.slice(rank=3).hang.call_one()
    when(lambda: runs(mesh, "workers", "hang"))
    future.interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        future.get(WAIT_S)
    assert workers.slice(rank=3).echo.call_one(1).get(WAIT_S) == 1


def runs(mesh: Mesh, actor: str, endpoint: str) -> bool:
    return any(row["actor"] == actor and row["running"] == endpoint for row in list_actors(mesh))


def test_a_buffer_is_read_and_written_from_other_machines(mesh: Mesh) -> None:
    owners = mesh.spawn("owners", Owner)
    first, last = owners.slice(rank=0), owners.slice(rank=3)
    buffer: Buffer = first.buffer.call_one().get(WAIT_S)
    assert buffer.backend == "messages"
    here = bytearray(8)
    buffer.read_into(here, offset=4).get(WAIT_S)
    assert np.frombuffer(here, np.float32).tolist() == [1.0, 2.0]
    assert last.read.call_one(buffer).get(WAIT_S) == (6 << 20) - 1
    last.write.call_one(buffer, 5.0).get(WAIT_S)
    assert first.first.call_one().get(WAIT_S) == 5.0
    assert owners.slice(rank=1).read.call_one(buffer).get(WAIT_S) == 5.0  # on its own machine: out of its memory
    buffer.drop().get(WAIT_S)
    with pytest.raises(TransferError, match="was dropped, by its owner"):
        buffer.read_into(here, offset=0).get(WAIT_S)
    owners.stop().get(WAIT_S)


def test_processes_of_another_machine_that_are_no_ranks_are_refused_with_why(mesh: Mesh) -> None:
    class Starter(Actor):
        @endpoint
        def start(self) -> Any:
            from meshbook.actor import this_host

            self.procs = this_host().spawn_procs({"gpus": 1})
            self.children = self.procs.spawn("children", Worker)
            return self.children, self.children.machine.call_one().get(WAIT_S)

        @endpoint
        def stop_procs(self) -> None:
            self.procs.stop().get(WAIT_S)

    starter = mesh.slice(rank=3).spawn("starter", Starter)
    children, machine = starter.start.call_one().get(WAIT_S)
    assert machine == "n2"
    with pytest.raises(SupervisionError, match="is on another machine, and is neither a rank of"):
        children.machine.call_one().get(WAIT_S)
    starter.stop_procs.call_one().get(WAIT_S)


# ---- faults


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Failures that no actor has handled, which would stop the test's own cell."""
    heard: list[str] = []
    monkeypatch.setattr(local_registry(), "on_unhandled_failure", lambda failure: heard.append(str(failure)))
    return heard


@pytest.fixture
def fragile(unhandled: list[str], bed: Bed) -> Iterator[Mesh]:
    with create_mesh(4, on="ssh://n1,n2", torch=False) as mesh:
        yield mesh


def test_calls_to_a_process_that_is_killed_end_wherever_they_come_from(fragile: Mesh, bed: Bed) -> None:
    workers, others = fragile.spawn("workers", Worker), fragile.spawn("others", Worker)
    victim = others.slice(rank=3)
    waiting = victim.hang.call_one()
    from_afar = workers.slice(rank=0).wait_for.call_one(others.slice(rank=slice(2, 4)))
    when(lambda: runs(fragile, "others", "hang") and runs(fragile, "workers", "wait_for"))
    fragile.kill(3)
    with pytest.raises(SupervisionError, match="was killed by SIGKILL"):
        waiting.get(WAIT_S)
    assert "SupervisionError: others.hang: rank 1 of 'others' is lost" in from_afar.get(WAIT_S)
    assert "was killed by SIGKILL" in from_afar.get(WAIT_S)
    assert values(workers.slice(rank=slice(0, 3)).echo.call(1)) == [1, 1, 1]


def test_an_owner_on_one_machine_hears_of_a_death_on_the_other(fragile: Mesh) -> None:
    managers = fragile.spawn("managers", Worker)
    manager = managers.slice(rank=0)
    manager.spawn_on.call_one(ProcMesh.from_mesh(fragile.slice(rank=slice(2, 4)))).get(WAIT_S)
    fragile.kill(2)
    when(lambda: manager.told.call_one().get(WAIT_S))
    (told,) = manager.told.call_one().get(WAIT_S)
    assert "'children'" in told
    assert "was killed by SIGKILL" in told


def test_a_machine_without_power_ends_calls_with_its_name(fragile: Mesh, bed: Bed) -> None:
    workers, others = fragile.spawn("workers", Worker), fragile.spawn("others", Worker)
    values(workers.ask.call(others, 1))
    waiting = others.slice(rank=2).hang.call_one()
    from_afar = workers.slice(rank=0).wait_for.call_one(others.slice(rank=slice(2, 4)))
    bed.power_off("n2")
    try:
        with pytest.raises(SupervisionError, match="machine n2 has not answered for"):
            waiting.get(WAIT_S)
        assert "machine n2 has not answered for" in from_afar.get(WAIT_S)
        assert values(workers.slice(rank=slice(0, 2)).machine.call()) == ["n1", "n1"]
    finally:
        bed.power_on("n2")


def test_messages_wait_while_a_cable_is_pulled(fragile: Mesh, bed: Bed) -> None:
    workers = fragile.spawn("workers", Worker)
    values(workers.machine.call())
    large = os.urandom(LARGE)
    future = workers.echo.call(large)
    bed.cut("n2")
    pulled = threading.Event()
    try:
        pulled.wait(1.0)  # less than what makes a machine count as lost
    finally:
        bed.restore("n2")
    assert all(value == large for value in values(future))


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_messages_on_their_way_when_the_supervisor_is_killed_arrive(fragile: Mesh, delay_s: float) -> None:
    workers = fragile.spawn("workers", Worker)
    values(workers.machine.call())
    large = os.urandom(LARGE)
    future, former = workers.echo.call(large), fragile.session.info.supervisor_pid
    threading.Event().wait(delay_s)  # any moment will do
    os.kill(former, signal.SIGKILL)
    assert all(value == large for value in values(future))
    callers = fragile.spawn("callers", Worker)
    assert values(callers.ask.call(workers, 7)) == [[7] * 4] * 4


def test_reading_a_buffer_of_a_process_that_ends_meanwhile_is_an_error(unhandled: list[str], bed: Bed) -> None:
    with create_mesh(2, on="ssh://n1,n2") as mesh:
        owners = mesh.spawn("owners", Owner)
        buffer: Buffer = owners.slice(rank=1).buffer.call_one().get(WAIT_S)
        here = np.empty(6 << 20, np.float32)
        copies = [buffer.read_into(here) for _ in range(4)]
        mesh.kill(1)
        failures = [_failure_of(lambda copy=copy: copy.get(WAIT_S)) for copy in copies]
        assert any(failures)  # the first may have been quick enough
        assert all(failure is None or "cannot be copied" in failure for failure in failures)
        buffer.drop().get(WAIT_S)  # there is nothing left to drop


def _failure_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except TransferError as error:
        return str(error)
    return None
