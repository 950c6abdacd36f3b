"""Actors on a real GPU: the device of their threads, tensors in their messages, and buffers read through CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshbook.actor import Actor, endpoint
from meshbook.actors.buffer import Buffer
from meshbook.controller.starting import create_mesh
from meshbook.errors import TransferError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_meshes")]

WAIT_S = 120


class Owner(Actor):
    """Holds a tensor on its GPU."""

    def __init__(self, size: int) -> None:
        self.held = torch.zeros(size, device="cuda")
        self.buffer: Any = None

    @endpoint
    def device(self) -> tuple[int, str]:
        return torch.cuda.current_device(), str(torch.empty(1, device="cuda").device)

    @endpoint
    def fill(self, value: float, *, slowly: bool = False) -> Buffer:
        """Enqueue the change, and answer before it has run."""
        if slowly:
            torch.cuda._sleep(500_000_000)
        self.held.fill_(value)
        self.buffer = Buffer(self.held)
        return self.buffer

    @endpoint
    def send_again(self, value: float) -> Buffer:
        torch.cuda._sleep(500_000_000)
        self.held.fill_(value)
        return self.buffer

    @endpoint
    def fill_again(self, value: float) -> None:
        """Enqueue a change of what others can read already, and answer before it has run, without the buffer."""
        torch.cuda._sleep(500_000_000)
        self.held.fill_(value)

    @endpoint
    def fill_on_two_streams(self, value: float) -> None:
        """Enqueue the change of one half behind a slow kernel on another stream, and of the other half on this one."""
        half = len(self.held) // 2
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(500_000_000)
            self.held[half:].fill_(value)
            Buffer(self.held)
        self.held[:half].fill_(value)

    @endpoint
    def ends(self) -> list[float]:
        return [self.held[0].item(), self.held[-1].item()]

    @endpoint
    def echo(self, value: torch.Tensor) -> tuple[str, torch.Tensor]:
        return str(value.device), value.to("cuda") * 2

    @endpoint
    def allocated_after_dropping(self) -> int:
        self.buffer.drop().get(WAIT_S)
        self.buffer = None
        self.held = torch.zeros(1, device="cuda")
        return torch.cuda.memory_allocated()


class Reader(Actor):
    def __init__(self, size: int) -> None:
        self.mine = torch.zeros(size, device="cuda")

    @endpoint
    async def read(self, buffer: Buffer) -> tuple[bool, float, str]:
        """Whether all numbers are equal, the first, and where they are."""
        await buffer.read_into(self.mine)
        return bool((self.mine == self.mine[0]).all()), self.mine[0].item(), buffer.backend

    @endpoint
    async def read_after_own_work(self, buffer: Buffer) -> float:
        """Read into memory that kernels on a stream of its own still write."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)
            self.mine.fill_(-1)
            await buffer.read_into(self.mine)
        torch.cuda.synchronize()
        return self.mine[0].item()

    @endpoint
    async def read_to_cpu(self, buffer: Buffer) -> list[float]:
        here = torch.zeros(buffer.shape)
        await buffer.read_into(here)
        return [here[0].item(), here[-1].item()]

    @endpoint
    async def write(self, buffer: Buffer, value: float) -> None:
        torch.cuda._sleep(500_000_000)
        self.mine.fill_(value)
        await buffer.write_from(self.mine)


SIZE = 4 << 20


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with create_mesh({"dp": 2}, device="cuda") as mesh:
            yield mesh


@pytest.fixture(scope="module")
def owner(mesh: Any) -> Any:
    return mesh.spawn("owners", Owner, SIZE)


@pytest.fixture(scope="module")
def reader(mesh: Any) -> Any:
    return mesh.spawn("readers", Reader, SIZE)


def first(actors: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the endpoint of the actor on rank 0."""
    return getattr(actors.slice(dp=0), name).call_one(*args, **kwargs).get(WAIT_S)


def last(actors: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the endpoint of the actor on rank 1."""
    return getattr(actors.slice(dp=1), name).call_one(*args, **kwargs).get(WAIT_S)


def test_an_actors_thread_has_the_gpu_of_its_rank(owner: Any) -> None:
    assert [first(owner, "device"), last(owner, "device")] == [(0, "cuda:0")] * 2


def test_cuda_tensors_in_messages_arrive_on_the_cpu(owner: Any) -> None:
    where, doubled = first(owner, "echo", torch.ones(3))
    assert (where, str(doubled.device), doubled.tolist()) == ("cpu", "cpu", [2.0] * 3)


def test_a_reader_waits_on_the_device_for_what_its_owner_had_enqueued(owner: Any, reader: Any) -> None:
    assert last(reader, "read", first(owner, "fill", 1.0, slowly=True)) == (True, 1.0, "cuda ipc")
    assert last(reader, "read", first(owner, "fill", 2.0, slowly=True)) == (True, 2.0, "cuda ipc")
    assert last(reader, "read", first(owner, "send_again", 3.0)) == (True, 3.0, "cuda ipc")


def test_a_reader_waits_for_what_the_owner_had_enqueued_when_it_answered(owner: Any, reader: Any) -> None:
    buffer = first(owner, "fill", 1.0)
    assert last(reader, "read", buffer) == (True, 1.0, "cuda ipc")
    first(owner, "fill_again", 2.0)
    assert last(reader, "read", buffer) == (True, 2.0, "cuda ipc")
    first(owner, "fill_again", 3.0)
    assert last(reader, "read_to_cpu", buffer) == [3.0, 3.0]
    first(owner, "fill_on_two_streams", 4.0)
    assert last(reader, "read", buffer) == (True, 4.0, "cuda ipc")


def test_a_reader_in_the_owners_process_waits_too_if_it_reads_to_the_cpu(owner: Any, reader: Any) -> None:
    buffer = first(owner, "fill", 5.0)
    first(owner, "fill_again", 6.0)
    assert first(reader, "read_to_cpu", buffer) == [6.0, 6.0]


def test_a_reader_waits_for_what_a_cell_had_enqueued_when_it_ended(mesh: Any, reader: Any) -> None:
    mesh.run("x = torch.zeros(1 << 20, device=device); buffer = __import__('meshbook').Buffer(x)", ranks=0)
    buffer = mesh.pull("buffer", ranks=0)[0]
    mesh.run("torch.cuda._sleep(500_000_000); _ = x.fill_(7)", ranks=0)
    assert last(reader, "read_to_cpu", buffer) == [7.0, 7.0]


def test_a_copy_comes_after_what_the_reader_had_enqueued_on_its_stream(owner: Any, reader: Any) -> None:
    assert last(reader, "read_after_own_work", first(owner, "fill", 4.0)) == 4.0


def test_a_buffer_is_read_to_the_cpu_and_written_from_afar(owner: Any, reader: Any) -> None:
    buffer = first(owner, "fill", 5.0, slowly=True)
    assert last(reader, "read_to_cpu", buffer) == [5.0, 5.0]
    last(reader, "write", buffer, 6.0)
    assert first(owner, "ends") == [6.0, 6.0]


def test_a_buffer_is_read_in_its_own_process_too(owner: Any, reader: Any) -> None:
    assert first(reader, "read", first(owner, "fill", 7.0, slowly=True)) == (True, 7.0, "cuda ipc")


def test_a_dropped_buffer_is_refused_and_its_memory_is_the_owners_again(owner: Any, reader: Any) -> None:
    buffer = first(owner, "fill", 8.0)
    last(reader, "read", buffer)
    left = first(owner, "allocated_after_dropping")
    with pytest.raises(Exception, match="was dropped") as raised:
        last(reader, "read", buffer)
    assert isinstance(raised.value, TransferError) or "TransferError" in str(raised.value)
    assert left < 2 * SIZE * 4  # the reader's own tensor is in this process too
