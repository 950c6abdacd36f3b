"""Buffers between real processes: what a reader sees of memory that stays its owner's, and what it is told instead."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from meshbook import rdma
from meshbook.actors.buffer import Buffer, RDMABuffer
from meshbook.errors import TransferError
from meshbook.host.shared_files import unlink_shared_files
from meshbook.wire.regions import RegionPublisher, create_memory_file
from tests.budget import WAIT_S
from tests.wire.other_process import OtherProcess

pytestmark = pytest.mark.usefixtures("starts_processes")

OWNER = """
import torch
from meshbook.actors.memory import sharing
from meshbook import rdma
from meshbook.actors.buffer import Buffer
"""


@pytest.fixture(scope="module")
def shared_owner() -> Iterator[OtherProcess]:
    with OtherProcess() as other:
        other.evaluate(OWNER)
        yield other


@pytest.fixture
def owner(shared_owner: OtherProcess) -> Iterator[OtherProcess]:
    """A process that owns nothing, at the start and in the end."""
    yield shared_owner
    shared_owner.evaluate("[each.drop() for each in list(globals().values()) if isinstance(each, Buffer)]; None")
    shared_owner.evaluate("for name in ('t', 'model', 'buffer', 'other'): globals().pop(name, None)")
    assert shared_owner.evaluate("len(sharing.published)") == 0


def read(buffer: Buffer, **kwargs: Any) -> torch.Tensor:
    dst = torch.zeros(buffer.shape, dtype=buffer.dtype)
    buffer.read_into(dst, **kwargs).get(WAIT_S)
    return dst


def test_a_reader_sees_what_the_owner_has_written_since(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.arange(6.).reshape(2, 3); buffer = Buffer(t); buffer")
    assert torch.equal(read(buffer), torch.arange(6.0).reshape(2, 3))
    owner.evaluate("t.mul_(10)")
    assert torch.equal(read(buffer), 10 * torch.arange(6.0).reshape(2, 3))
    assert (buffer.size(), buffer.nbytes, buffer.shape, buffer.dtype) == (24, 24, (2, 3), torch.float32)
    assert str(owner.pid) in buffer.owner
    assert RDMABuffer is Buffer


def test_what_is_written_from_afar_is_in_the_owners_tensor_and_in_all_that_share_its_storage(
    owner: OtherProcess,
) -> None:
    buffer = owner.evaluate(
        "model = torch.nn.Linear(3, 2); flat = model.weight.view(-1); buffer = Buffer(model.weight.detach()[1]); buffer"
    )
    before = owner.evaluate("model.weight.tolist()")
    buffer.write_from(torch.tensor([1.0, 2.0, 3.0])).get(WAIT_S)
    assert owner.evaluate("model.weight.tolist()") == [before[0], [1, 2, 3]]
    assert owner.evaluate("flat.tolist()[3:]") == [1, 2, 3]
    buffer.write_from(torch.tensor([7.0]), offset=8).get(WAIT_S)
    assert owner.evaluate("model(torch.ones(3)).sum().backward(); model.weight[1].tolist()") == [1, 2, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_bytes_arrive_as_they_are_whatever_they_mean(owner: OtherProcess, dtype: torch.dtype) -> None:
    buffer = owner.evaluate(
        f"t = torch.arange(64, dtype=torch.uint8).view({dtype}).clone(); buffer = Buffer(t); buffer"
    )
    raw = torch.zeros(64, dtype=torch.uint8)
    buffer.read_into(raw).get(WAIT_S)
    assert raw.tolist() == list(range(64))
    assert torch.equal(read(buffer).view(torch.uint8), raw)


def test_anything_with_the_buffer_protocol_can_be_read_into_and_written_from(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.arange(4.); buffer = Buffer(t); buffer")
    array, raw = np.zeros(4, np.float32), bytearray(16)
    buffer.read_into(array).get(WAIT_S)
    buffer.read_into(memoryview(raw)).get(WAIT_S)
    assert array.tolist() == [0, 1, 2, 3]
    assert np.frombuffer(raw, np.float32).tolist() == [0, 1, 2, 3]
    buffer.write_from(np.float32([5, 6]).tobytes(), offset=4).get(WAIT_S)
    assert owner.evaluate("t.tolist()") == [0, 5, 6, 3]
    buffer.read_into(piece := np.zeros(2, np.float32), offset=8).get(WAIT_S)
    assert piece.tolist() == [6, 3]
    buffer.read_into(longer := np.zeros(6, np.float32)).get(WAIT_S)
    assert longer.tolist() == [0, 5, 6, 3, 0, 0]


def test_a_large_copy_leaves_the_event_loop_free(owner: OtherProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = owner.evaluate("t = torch.ones(1 << 24); buffer = Buffer(t); buffer")
    loop_turned = threading.Event()
    copy_now = Buffer._copy

    def copy_later(*args: Any, **kwargs: Any) -> None:
        assert loop_turned.wait(WAIT_S)
        copy_now(*args, **kwargs)

    monkeypatch.setattr(Buffer, "_copy", copy_later)

    async def both() -> torch.Tensor:
        dst = torch.zeros(1 << 24)
        asyncio.get_running_loop().call_soon(loop_turned.set)
        await buffer.read_into(dst)
        return dst

    assert asyncio.run(both()).sum() == 1 << 24


def test_copies_on_many_threads_at_once_disturb_each_other_in_nothing(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.arange(6.); buffer = Buffer(t); buffer")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: read(buffer).tolist(), range(4000)))
    assert found == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 4000


def test_a_buffer_can_be_made_again_and_again_without_moving_anything(owner: OtherProcess) -> None:
    owner.evaluate("t = torch.zeros(1000); buffer = Buffer(t); address = t.data_ptr()")
    again = owner.evaluate("t.fill_(2); other = Buffer(t[500:]); buffer.drop().get(); other")
    assert owner.evaluate("t.data_ptr() == address")
    assert read(again).sum() == 1000
    again.drop()


def test_a_tensor_that_was_made_in_shared_memory_is_not_moved(owner: OtherProcess) -> None:
    owner.evaluate("t = Buffer.empty(10, 20, dtype=torch.int32).fill_(3); address = t.data_ptr()")
    buffer = owner.evaluate("buffer = Buffer(t); buffer")
    assert owner.evaluate("t.data_ptr() == address")
    assert read(buffer).sum() == 600


@pytest.mark.gpu
def test_a_cuda_tensor_is_read_and_written_from_another_process() -> None:
    with OtherProcess() as owner:
        owner.evaluate(OWNER)
        buffer = owner.evaluate("t = torch.arange(8., device='cuda')[2:]; buffer = Buffer(t); buffer")
        assert buffer.backend == "cuda ipc"
        assert read(buffer).tolist() == [2, 3, 4, 5, 6, 7]
        on_gpu = torch.zeros(6, device="cuda")
        buffer.read_into(on_gpu).get(WAIT_S)
        assert on_gpu.tolist() == [2, 3, 4, 5, 6, 7]
        buffer.write_from(10 * on_gpu[:2], offset=4).get(WAIT_S)
        assert owner.evaluate("t.tolist()") == [2, 20, 30, 5, 6, 7]
        del on_gpu
        owner.evaluate("buffer.drop().get()")
        with pytest.raises(TransferError, match="was dropped"):
            read(buffer)
    unlink_shared_files(owner.pid, 0.0)  # as the host of a rank does; CUDA leaves its events' file


# ---------------------------------------------------------------------------------------------------------------------
# What is gone


@pytest.mark.parametrize("by", ["owner", "reader"])
def test_a_dropped_buffer_is_refused_whoever_dropped_it_and_the_tensor_is_the_owners_alone(
    owner: OtherProcess, by: str
) -> None:
    buffer = owner.evaluate("t = torch.arange(3.); buffer = Buffer(t); buffer")
    read(buffer)
    if by == "owner":
        owner.evaluate("buffer.drop().get()")
    else:
        buffer.drop().get(WAIT_S)
    with pytest.raises(TransferError, match=re.escape(f"was dropped, by its owner (process {owner.pid}) or by")):
        read(buffer)
    with pytest.raises(TransferError, match="was dropped"):
        buffer.write_from(torch.zeros(3)).get(WAIT_S)
    buffer.drop().get(WAIT_S)  # twice is the same as once
    assert owner.evaluate("t.tolist()") == [0, 1, 2]
    assert owner.evaluate("len(sharing.published)") == 0


def test_a_reader_lets_go_of_what_was_dropped_when_it_next_reads(owner: OtherProcess) -> None:
    owner.evaluate("t = torch.ones(1 << 20); other = torch.ones(4); gone, kept = Buffer(t), Buffer(other)")
    gone, kept = owner.evaluate("(gone, kept)")
    read(gone)
    num_mapped = mapped_shared_memory()
    owner.evaluate("gone.drop().get(); del t, gone")
    read(kept)
    assert mapped_shared_memory() == num_mapped  # one more for `kept`, one less for `gone`
    owner.evaluate("kept.drop().get()")


def mapped_shared_memory() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/torch_" in line for line in maps)


def test_a_dead_owner_is_named_and_nothing_of_it_is_taken_for_its_state() -> None:
    with OtherProcess() as owner:
        owner.evaluate(OWNER)
        known, unknown = owner.evaluate("t = torch.ones(5); (Buffer(t), Buffer(t))")
        read(known)
        owner.kill()
        for buffer in (known, unknown):
            with pytest.raises(TransferError, match=f"process {owner.pid}, whose memory .* has ended"):
                read(buffer)
        known.drop().get(WAIT_S)


def test_a_forked_child_offers_nothing_of_its_parents(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.ones(5); buffer = Buffer(t); buffer")
    assert (
        owner.evaluate(
            "end, start = os.pipe(); pid = os.fork()\n"
            "if pid == 0:\n"
            "    os.write(start, bytes([len(sharing.published)])); buffer.drop().get(); os._exit(0)\n"
            "os.waitpid(pid, 0); os.read(end, 1)[0]"
        )
        == 0
    )
    with pytest.raises(TransferError, match="was dropped"):  # the child may drop it, as any reader may
        read(buffer)


def test_memory_of_another_machine_that_no_message_between_actors_has_brought_is_refused(
    owner: OtherProcess,
) -> None:
    buffer = owner.evaluate("t = torch.ones(5); buffer = Buffer(t); buffer")
    buffer._region = buffer._region._replace(machine="another")
    with pytest.raises(TransferError, match=r"another machine.*by a message between actors; return it from an"):
        read(buffer)


def test_a_region_that_lies_outside_its_file_is_refused(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.ones(5); buffer = Buffer(t); buffer")
    buffer._region = buffer._region._replace(offset=4096)
    with pytest.raises(TransferError, match="not a buffer: 20 bytes from 4096 of a file of 20 bytes"):
        read(buffer)


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.ones(3, 4).T, r"contiguous tensor, .* shape \[4, 3\] and strides \[1, 4\]; .contiguous\(\) makes"),
        (torch.ones(0, 4), r"has elements, and this one has shape \[0, 4\]"),
        (torch.ones(2).to_sparse(), "plain tensor"),
        (np.ones(3), r"a tensor, and this is a ndarray; torch.as_tensor\(...\)"),
        (torch.empty(3, device="meta"), "CPU or CUDA tensor, and this one is on meta"),
    ],
)
def test_a_buffer_is_made_of_memory_in_one_piece(tensor: Any, complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        Buffer(tensor)


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda b: b.read_into(torch.zeros(5)), r"has 24 bytes \(torch.float32, \[2, 3\]\), .* read into has 20"),
        (lambda b: b.write_from(torch.zeros(7)), r"has 24 bytes .* written from has 28"),
        (lambda b: b.write_from(torch.zeros(3), offset=16), r"has 24 bytes, 8 from offset 16 on .* from has 12"),
        (lambda b: b.read_into(torch.zeros(1), offset=25), "offset 25 is outside this buffer of 24 bytes"),
        (lambda b: b.read_into(torch.zeros(1), offset=-4), "offset -4 is outside"),
        (lambda b: b.read_into(torch.zeros(6).half()), r"has torch.float32 and this tensor torch.float16; .*uint8"),
        (lambda b: b.read_into(torch.zeros(4, 3).T), "contiguous"),
        (lambda b: b.read_into(bytes(24)), "this bytes is read-only"),
        (lambda b: b.read_into(np.zeros((6, 2), np.float32)[:, 0]), "a contiguous ndarray is needed"),
        (lambda b: b.read_into([0.0] * 6), "something with the buffer protocol"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(act: Any, complaint: str) -> None:
    buffer = Buffer(torch.ones(2, 3))
    try:
        with pytest.raises(TransferError, match=complaint):
            act(buffer)
    finally:
        buffer.drop()


def test_a_storage_that_does_not_fit_into_shared_memory_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        f_bavail, f_frsize = 16, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(TransferError, match=r"has 131,072 bytes, and /dev/shm has 65,536 free; .*--shm-size.*empty"):
        Buffer(torch.ones(1 << 15))


def test_several_copies_are_one_action(owner: OtherProcess) -> None:
    a, b = owner.evaluate("t = torch.arange(4.); other = torch.zeros(1 << 20); (Buffer(t), Buffer(other))")
    dst = torch.zeros(4)
    action = rdma.RDMAAction().read_remote(dst, a).write_remote(b, torch.ones(1 << 20))
    action.submit().get(WAIT_S)
    assert dst.tolist() == [0, 1, 2, 3]
    assert owner.evaluate("float(other.sum())") == 1 << 20
    b.drop()
    with pytest.raises(TransferError, match="was dropped"):
        action.submit().get(WAIT_S)
    a.drop()


def test_a_process_that_offers_a_thousand_buffers_makes_and_reads_them_in_no_time(owner: OtherProcess) -> None:
    started = time.monotonic()
    many = owner.evaluate("t = torch.arange(300.); many = [Buffer(t[i:i + 1]) for i in range(300)]; many")
    assert [int(read(buffer)) for buffer in many] == list(range(300))
    owner.evaluate("[buffer.drop() for buffer in many]; many.clear(); None")
    assert time.monotonic() - started < WAIT_S


class Thing:
    """Something that can be referred to weakly."""


def test_a_place_on_the_board_rests_before_another_region_gets_it() -> None:
    regions, fd, owner = RegionPublisher(), create_memory_file(1), Thing()
    try:
        slots = []
        for _ in range(1200):
            region = regions.publish(fd, 0, 1, owner)
            regions.drop(region)
            slots.append(region.slot)
        assert len(set(slots[:500])) == 500
        assert len(set(slots)) < 600
    finally:
        os.close(fd)
        regions._reset_after_fork()


# ---------------------------------------------------------------------------------------------------------------------
# What it costs, and whose memory it is


LOW_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"


def test_thousands_of_buffers_cost_a_descriptor_for_each_tensor_that_lives_and_no_more() -> None:
    with OtherProcess() as owner:
        owner.evaluate(OWNER + LOW_LIMIT)
        num_open = owner.evaluate("t = torch.zeros(100); buffer = Buffer(t); len(os.listdir('/proc/self/fd'))")
        owner.evaluate("for _ in range(5000): buffer = Buffer(t)")
        assert owner.evaluate("len(os.listdir('/proc/self/fd'))") == num_open
        owner.evaluate("for n in range(5000): t = torch.full((10,), float(n)); buffer = Buffer(t)")
        assert owner.evaluate("len(os.listdir('/proc/self/fd'))") == num_open
        assert read(owner.evaluate("buffer")).tolist() == [4999] * 10
        owner.evaluate("del t, buffer")
        assert owner.evaluate("len(sharing.published)") == 0


def test_without_a_descriptor_a_buffer_is_refused_and_those_that_are_there_live_on() -> None:
    with OtherProcess() as owner:
        owner.evaluate(OWNER + LOW_LIMIT)
        owner.evaluate("tensors = [torch.ones(1) for _ in range(300)]; kept = []")
        reported = owner.evaluate(
            "told = None\n"
            "try:\n"
            "    for t in tensors: kept.append(Buffer(t))\n"
            "except Exception as error: told = type(error).__name__\n"
            "told"
        )
        assert reported == "TransferError"
        owner.evaluate("del tensors[200:], kept[200:], t")
        assert read(owner.evaluate("kept[0]")).tolist() == [1]


def test_buffers_of_one_tensor_are_dropped_apart_from_each_other(owner: OtherProcess) -> None:
    first, second = owner.evaluate("t = torch.arange(3.); many = [Buffer(t), Buffer(t)]; many")
    first.drop().get(WAIT_S)
    assert read(second).tolist() == [0, 1, 2]
    assert read(owner.evaluate("many.append(Buffer(t)); many[-1]")).tolist() == [0, 1, 2]
    owner.evaluate("[buffer.drop() for buffer in many]; many.clear(); None")


def test_a_buffer_whose_tensor_is_gone_is_refused_with_what_to_do(owner: OtherProcess) -> None:
    buffer = owner.evaluate("t = torch.ones(3); Buffer(t)")
    assert read(buffer).tolist() == [1, 1, 1]
    owner.evaluate("_ = t = None")
    with pytest.raises(TransferError, match=r"or its tensor is gone there; .* keep the tensor"):
        read(buffer)


def test_a_buffer_keeps_a_temporary_tensor_where_it_was_made(owner: OtherProcess) -> None:
    buffer = owner.evaluate("buffer = Buffer(torch.arange(3.) + 1); buffer")
    assert read(buffer).tolist() == [1, 2, 3]


TAKEN_BEFORE = {
    "numpy": "a = t.numpy()",
    "dlpack": "import numpy; a = numpy.from_dlpack(t)",
    "address": "import ctypes; a = (ctypes.c_float * t.numel()).from_address(t.data_ptr())",
}


@pytest.mark.parametrize("how", TAKEN_BEFORE)
def test_what_looks_at_a_tensors_old_memory_is_left_behind_and_never_reads_freed_memory(
    owner: OtherProcess, how: str
) -> None:
    owner.evaluate("t = torch.ones(1 << 23)")  # so large that its memory goes back to the system when it is freed
    owner.evaluate(TAKEN_BEFORE[how])
    said = owner.evaluate(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as said: warnings.simplefilter('always'); buffer = Buffer(t)\n"
        "[str(each.message) for each in said]"
    )
    owner.evaluate("t.fill_(7)")
    assert owner.evaluate("float(sum(a[:1000]))") == 1000
    assert read(owner.evaluate("buffer")).sum() == 7 << 23
    owner.evaluate("del a")
    if how == "numpy":
        (text,) = said
        assert re.search(r"numpy array made of it before does not go along.*Buffer.empty", text)
    else:
        assert not said  # nothing tells


def test_the_old_memory_goes_when_the_tensor_goes(owner: OtherProcess) -> None:
    rounds = (
        "for _ in range(10): t = torch.ones(1 << 22); buffer = Buffer(t)\n"
        "int(open('/proc/self/statm').read().split()[1]) * 4096"
    )
    before = owner.evaluate(rounds)
    assert owner.evaluate(rounds) - before < 10 * (1 << 24) / 2


@pytest.mark.parametrize("how", ["torch.from_numpy(numpy.ones(4))", "torch.frombuffer(bytearray(16))", "mapped"])
def test_memory_that_is_not_torchs_own_is_refused_with_two_ways_on(how: str, tmp_path: Any) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(16))
    tensor = {
        "torch.from_numpy(numpy.ones(4))": lambda: torch.from_numpy(np.ones(4)),
        "torch.frombuffer(bytearray(16))": lambda: torch.frombuffer(bytearray(16), dtype=torch.uint8),
        "mapped": lambda: torch.from_file(str(path), size=4),
    }[how]()
    with pytest.raises(TransferError, match=r"Buffer\(tensor.clone\(\)\), .* Buffer.empty"):
        Buffer(tensor)


def test_sending_a_tensor_leaves_its_storage_resizable() -> None:
    from meshbook.wire import pickling
    from meshbook.wire.buffers import SegmentPool

    tensor, pool = torch.ones(1 << 16), SegmentPool()
    try:
        pickling.dump(tensor, pool=pool, readers=[1], name="it")
    finally:
        pool.close()
    assert tensor.untyped_storage().resizable()
