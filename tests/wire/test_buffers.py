"""Shared memory between real processes: who may read, who may write again, and what is left when somebody dies."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from meshbook.clock import ManualClock
from meshbook.errors import TransferError
from meshbook.wire.buffers import MAX_FREE_SEGMENTS, SegmentPool, SegmentReader
from meshbook.wire.messages import InlineBuffer, SharedBuffer
from meshbook.wire.segments import OWN_SEGMENT_BYTES
from tests.budget import WAIT_S
from tests.wire.other_process import OtherProcess

MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(nbytes))


def write(pool: SegmentPool, buffer: memoryview, readers: int | range = 1) -> SharedBuffer:
    """One buffer, which is to be shared."""
    (shared,) = pool.write([buffer], readers)
    assert isinstance(shared, SharedBuffer)
    return shared


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process and what they are."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:meshbook")


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with SegmentPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_other(starts_processes: None) -> Iterator[OtherProcess]:
    with OtherProcess() as other:
        yield other


@pytest.fixture
def other(shared_other: OtherProcess) -> OtherProcess:
    """A reader that does not get killed, with nothing open."""
    shared_other.evaluate("view = views = None; gc.collect(); reader.drain_released()")
    return shared_other


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 3 * MIB + 5, 9 * MIB])
@pytest.mark.usefixtures("starts_processes")
def test_another_process_reads_what_was_written(pool: SegmentPool, other: OtherProcess, nbytes: int) -> None:
    data = noise(nbytes)
    assert other.evaluate("view = reader.open(buffer); bytes(view)", buffer=write(pool, data)) == data


def test_many_buffers_arrive_in_order_and_aligned(pool: SegmentPool, other: OtherProcess) -> None:
    sizes = [10, OWN_SEGMENT_BYTES, 0, 70_001, OWN_SEGMENT_BYTES - 1, 3]
    data = [noise(size, seed) for seed, size in enumerate(sizes)]
    shared = pool.write(data)
    assert other.evaluate("views = reader.open_all(buffers); [bytes(view) for view in views]", buffers=shared) == data
    assert all(isinstance(buffer, SharedBuffer) and buffer.offset % 64 == 0 for buffer in shared)


def test_a_thousand_small_buffers_cost_a_few_descriptors(pool: SegmentPool) -> None:
    before = len(open_files())
    pool.write([noise(65_536)] * 1000)
    assert len(open_files()) - before <= 2


def test_any_item_type_and_shape_is_bytes_to_the_pool(pool: SegmentPool) -> None:
    matrix = np.arange(200_000.0).reshape(500, 400)
    view = SegmentReader().open(write(pool, matrix.data))
    assert np.array_equal(np.frombuffer(view).reshape(500, 400), matrix)
    assert SegmentReader().open(write(pool, np.empty((0, 3)).data)).nbytes == 0


@pytest.mark.usefixtures("starts_processes")
def test_a_reader_that_writes_does_not_disturb_the_others(pool: SegmentPool, other: OtherProcess) -> None:
    data = noise(4 * MIB)
    shared = write(pool, data, readers=2)
    other.evaluate("view = reader.open(buffer); view[:] = bytes(len(view)); bytes(view[:3])", buffer=shared)
    with OtherProcess() as third:
        assert third.evaluate("view = reader.open(buffer); view[5] = 7; bytes(view[6:])", buffer=shared) == data[6:]
    assert other.evaluate("any(view)") is False
    assert SegmentReader().open(shared) == data


def test_memory_is_written_again_only_when_every_reader_has_let_go(pool: SegmentPool) -> None:
    first = write(pool, noise(MIB), readers=2)
    pool.release(first.segment)
    second = write(pool, noise(MIB))
    assert second.fd != first.fd
    pool.release(first.segment)
    third = write(pool, noise(MIB))
    assert third.fd == first.fd
    assert third.segment != first.segment


def test_a_late_release_of_an_earlier_use_releases_nothing(pool: SegmentPool) -> None:
    first = write(pool, noise(MIB))
    pool.release(first.segment)
    second = write(pool, noise(MIB))
    assert second.fd == first.fd
    pool.release(first.segment)
    assert write(pool, noise(MIB)).fd != second.fd


def test_a_reader_that_comes_too_late_is_told_so(pool: SegmentPool) -> None:
    first = write(pool, noise(MIB))
    pool.release(first.segment)
    second = write(pool, noise(MIB))
    reader = SegmentReader()
    with pytest.raises(TransferError, match="came too late; resend it"):
        reader.open(first)
    assert reader.open(second)


@pytest.mark.parametrize(
    "sizes",
    [
        [100_000, 100_000, 60_000],
        [9 * MIB, 9 * MIB, 9 * MIB, 8 * MIB + 3, 9 * MIB + 99, 6 * MIB],  # fresh, used and huge pages; parts, and more
        [40 * MIB + 1] * 3,  # more than is copied at once
    ],
    ids=["small", "large", "very large"],
)
def test_every_reuse_has_the_new_content_and_nothing_of_the_old(
    pool: SegmentPool, other: OtherProcess, sizes: list[int]
) -> None:
    fds = set()
    for seed, nbytes in enumerate(sizes):
        data = noise(nbytes, seed)
        shared = write(pool, data)
        fds.add(shared.fd)
        assert other.evaluate("view = reader.open(buffer); bytes(view)", buffer=shared) == data
        for segment in other.evaluate("view = None; reader.drain_released()"):
            pool.release(segment)
    assert len(fds) == 1


def test_the_best_fit_is_reused_and_nothing_more_than_twice_too_large(pool: SegmentPool) -> None:
    sizes = [MIB, 3 * MIB, 8 * MIB]
    made = [write(pool, noise(size)) for size in sizes]
    for shared in made:
        pool.release(shared.segment)
    assert write(pool, noise(2 * MIB)).fd == made[1].fd
    assert write(pool, noise(2 * MIB)).fd not in {made[0].fd, made[2].fd}


def test_a_segment_is_released_once_when_the_last_view_is_gone(pool: SegmentPool) -> None:
    reader = SegmentReader()
    before = mapped_segments()
    shared = pool.write([noise(100_000), noise(200_000)])
    first, second = reader.open_all(shared)
    array = np.frombuffer(first, np.uint8)[10:]
    del first, second
    assert reader.drain_released() == ()
    del array
    assert reader.drain_released() == (shared[0].segment,)  # type: ignore[union-attr]
    assert reader.drain_released() == ()
    assert mapped_segments() == before


def test_a_view_in_a_reference_cycle_is_released_by_the_garbage_collector(pool: SegmentPool) -> None:
    reader = SegmentReader()
    shared = write(pool, noise(100_000))
    cycle: list[object] = [reader.open(shared)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert reader.drain_released() == (shared.segment,)


def test_a_message_that_is_not_opened_can_be_discarded(pool: SegmentPool) -> None:
    reader = SegmentReader()
    shared = pool.write([noise(100_000), noise(100_000), noise(OWN_SEGMENT_BYTES)])
    reader.discard([*shared, InlineBuffer(b"x")])
    for segment in reader.drain_released():
        pool.release(segment)
    assert pool.used_bytes == 0


@pytest.mark.usefixtures("starts_processes")
def test_a_killed_reader_keeps_nothing_back(pool: SegmentPool) -> None:
    shared = write(pool, noise(MIB), readers=range(2))
    with OtherProcess() as victim, OtherProcess() as survivor:
        for process in (victim, survivor):
            process.evaluate("view = reader.open(buffer); view[0]", buffer=shared)
        victim.kill()
        pool.remove_reader(1)
        pool.remove_reader(1)
        assert write(pool, noise(MIB)).fd != shared.fd
        assert survivor.evaluate("bytes(view)") == noise(MIB)
        (released,) = survivor.evaluate("view = None; reader.drain_released()")
    pool.release(released, reader=0)
    assert write(pool, noise(MIB)).fd == shared.fd


def test_dropping_a_segment_forgets_all_its_readers(pool: SegmentPool) -> None:
    shared = write(pool, noise(MIB), readers=4)
    pool.release_all(shared.segment)
    assert (pool.used_bytes, pool.free_bytes > MIB) == (0, True)
    pool.release_all(shared.segment)


@pytest.mark.usefixtures("starts_processes")
def test_a_killed_owner_takes_nothing_from_those_who_have_it_and_is_named_to_those_who_come_later() -> None:
    reader = SegmentReader()
    with OtherProcess() as owner:
        early, late = owner.evaluate("pool.write([memoryview(bytes([7]) * 9_000_000)] * 2)")
        view = reader.open(early)
        owner.kill()
        assert bytes(view) == bytes([7]) * 9_000_000
        with pytest.raises(TransferError, match=rf"process {owner.pid}, which held the 8.6 MiB of this value, is gone"):
            reader.open(late)


@pytest.mark.usefixtures("starts_processes")
def test_an_owner_that_has_died_and_is_not_yet_reaped_is_gone_too() -> None:
    reader = SegmentReader()
    with OtherProcess() as owner:
        (shared,) = owner.evaluate("pool.write([memoryview(bytes(100_000))])")
        os.kill(owner.pid, 9)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(TransferError, match="is gone"):
            reader.open(shared)


def test_a_closed_pool_leaves_mapped_memory_and_refuses_the_rest() -> None:
    reader = SegmentReader()
    with SegmentPool() as pool:
        opened, unopened = write(pool, noise(MIB)), write(pool, noise(MIB))
        view = reader.open(opened)
    assert view == noise(MIB)
    with pytest.raises(TransferError, match="no longer holds the data"):
        reader.open(unopened)
    with pytest.raises(TransferError, match="is closed"):
        pool.write([noise(MIB)])
    pool.release(opened.segment)


def test_somebody_elses_descriptor_is_not_taken_for_a_segment(pool: SegmentPool, tmp_path: Path) -> None:
    shared = write(pool, noise(100_000))
    path = tmp_path / "other"
    path.write_bytes(bytes(200_000))
    pipe = os.pipe()
    with path.open("rb") as file:
        for fd in (file.fileno(), pipe[0]):
            stranger = SharedBuffer(os.getpid(), fd, shared.offset, 100_000, shared.segment)
            with pytest.raises(TransferError, match="no longer holds the data"):
                SegmentReader().open(stranger)
    for fd in pipe:
        os.close(fd)


@pytest.mark.parametrize(("offset", "nbytes"), [(4096, 10 * MIB), (1 << 50, 8), (4096, -1), (0, 8), (-4096, 8)])
def test_a_buffer_outside_its_segment_is_refused_before_it_is_touched(
    pool: SegmentPool, offset: int, nbytes: int
) -> None:
    shared = write(pool, noise(MIB))
    with pytest.raises(TransferError, match="not a shared buffer"):
        SegmentReader().open(SharedBuffer(shared.pid, shared.fd, offset, nbytes, shared.segment))


def test_a_segment_cannot_be_shrunk_under_its_readers(pool: SegmentPool) -> None:
    shared = write(pool, noise(MIB))
    fd = os.open(f"/proc/{shared.pid}/fd/{shared.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_a_buffer_without_readers_is_a_mistake(pool: SegmentPool) -> None:
    for nobody in (0, -1, range(0)):
        with pytest.raises(ValueError, match="at least one reader"):
            pool.write([noise(10)], nobody)


def test_inline_buffers_open_as_writable_bytes_too() -> None:
    view = SegmentReader().open(InlineBuffer(b"abc"))
    view[0] = ord("x")
    assert bytes(view) == b"xbc"


def test_without_file_descriptors_buffers_go_inline_and_nothing_is_kept(other: OtherProcess) -> None:
    assert other.evaluate(
        """
import resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
before = os.listdir("/proc/self/fd")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    os.close(taken.pop())  # one descriptor may be had: for the first segment, not for the second
buffers = pool.write([memoryview(bytes(9_000_000))] * 3)
for fd in taken:
    os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
[type(buffer).__name__ for buffer in buffers], len(taken) > 10, len(os.listdir("/proc/self/fd")) - len(before)
"""
    ) == (["InlineBuffer"] * 3, True, 0)


def test_where_there_are_no_memory_files_buffers_go_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with SegmentPool() as pool:
        assert not pool.is_available
        assert pool.write([noise(100), noise(9)]) == [InlineBuffer(bytes(noise(100))), InlineBuffer(bytes(noise(9)))]


@pytest.mark.usefixtures("starts_processes")
def test_a_reader_without_address_space_says_how_much_it_needed(pool: SegmentPool) -> None:
    shared = write(pool, noise(64 * MIB))
    with OtherProcess() as cramped:
        cramped.evaluate("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))")
        with pytest.raises(TransferError, match=r"the 64.0 MiB of this value, .* cannot be mapped here: Cannot"):
            cramped.evaluate("view = reader.open(buffer)", buffer=shared)


def test_segments_idle_for_long_are_given_back() -> None:
    clock = ManualClock()
    with SegmentPool(clock=clock) as pool:
        before = open_files()
        old, young, used = (write(pool, noise(MIB)) for _ in range(3))
        pool.release(old.segment)
        clock.advance(10)
        pool.release(young.segment)
        pool.trim(5)
        assert len(open_files() - before) == 2
        clock.advance(60)
        pool.trim(5)
        assert len(open_files() - before) == 1
        assert SegmentReader().open(used) == noise(MIB)


def test_free_memory_is_bounded_and_what_is_too_large_to_keep_goes_first() -> None:
    with SegmentPool(max_free_bytes=6 * MIB) as pool:  # large ones have whole huge pages, of 2 MiB
        made = [write(pool, noise(size)) for size in (2 * MIB, MIB, 9 * MIB, 3 * MIB)]
        for shared in made:
            pool.release(shared.segment)
        assert pool.free_bytes <= 6 * MIB
        assert write(pool, noise(3 * MIB)).fd == made[3].fd
        assert write(pool, noise(MIB)).fd == made[1].fd
        assert pool.free_bytes == 0


def test_the_number_of_free_segments_is_bounded(pool: SegmentPool) -> None:
    before = len(open_files())
    made = [write(pool, noise(5_000)) for _ in range(MAX_FREE_SEGMENTS + 10)]
    for shared in made:
        pool.release(shared.segment)
    assert len(open_files()) - before == MAX_FREE_SEGMENTS


@pytest.mark.usefixtures("starts_processes")
def test_the_owners_memory_does_not_grow_by_what_it_shares() -> None:
    with OtherProcess() as owner:
        grown, shared = owner.evaluate(
            """
def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
data = memoryview(bytearray(64 << 20))
data[::4096] = bytes(len(data[::4096]))
before = resident_mib()
for _ in range(4):  # cold, then in each of the ways in which used memory is written again
    (buffer,) = pool.write([data])
    pool.release(buffer.segment)
resident_mib() - before, pool.free_bytes >> 20
"""
        )
    assert (grown < 16, shared >= 64) == (True, True)


@pytest.mark.usefixtures("starts_processes")
def test_nothing_is_left_open_or_mapped() -> None:
    files, segments = open_files(), mapped_segments()
    reader = SegmentReader()
    with SegmentPool() as pool, OtherProcess() as other:
        for _ in range(3):
            shared = pool.write([noise(MIB), noise(9 * MIB)], readers=2)
            views = reader.open_all(shared)
            other.evaluate("views = reader.open_all(buffers); len(views)", buffers=shared)
            del views
            for segment in (*reader.drain_released(), *other.evaluate("views = None; reader.drain_released()")):
                pool.release(segment)
        assert pool.used_bytes == 0
    assert (open_files() - files, mapped_segments()) == (set(), segments)


def test_a_forked_child_neither_keeps_nor_touches_its_parents_segments(other: OtherProcess) -> None:
    assert other.evaluate(
        """
def held():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:meshbook" in os.readlink(path) for path in paths if os.path.lexists(path))
buffers = pool.write([memoryview(bytes([1]) * 9_000_000)])
pool.release(pool.write([memoryview(bytes(9_000_000))])[0].segment)
ours, theirs = os.pipe()
child = os.fork()
if child == 0:
    inherited = held()
    (own,) = pool.write([memoryview(bytes([2]) * 9_000_000)])
    os.write(theirs, bytes([inherited, own.pid == os.getpid(), reader.open(own)[-1]]))
    os._exit(0)
os.waitpid(child, 0)
answer = list(os.read(ours, 3)), reader.open(buffers[0])[-1]
os.close(ours), os.close(theirs), pool.release_all(buffers[0].segment)
answer
"""
    ) == ([0, True, 2], 1)


def test_threads_can_write_read_and_release_at_once(pool: SegmentPool) -> None:
    reader = SegmentReader()
    wrong: list[int] = []

    def work(seed: int) -> None:
        data = noise(300_000, seed)
        for _ in range(20):
            view = reader.open(write(pool, data))
            if view != data:
                wrong.append(seed)
            del view
            for segment in reader.drain_released():
                pool.release(segment)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (wrong, pool.used_bytes) == ([], 0)


# ---- rooms: memory of one process that others fill


def fill(other: OtherProcess, place: SharedBuffer, start: int, stop: int, byte: int) -> None:
    other.evaluate(
        """
from meshbook.wire.buffers import map_for_writing
with map_for_writing(place, start, stop) as memory:
    memory[start:stop] = bytes([byte]) * (stop - start)
""",
        **{"place": place, "start": start, "stop": stop, "byte": byte},
    )


@pytest.mark.parametrize("nbytes", [100, 5 * MIB + 3])
def test_what_others_write_into_a_room_is_kept_and_its_memory_used_again_afterwards(
    pool: SegmentPool, other: OtherProcess, nbytes: int
) -> None:
    half = nbytes // 2
    with pool.receive_buffer(nbytes) as room:
        fill(other, room.memory, 0, half, 1)
        fill(other, room.memory, half, nbytes, 2)
        kept = room.claim()
    assert kept == bytes([1]) * half + bytes([2]) * (nbytes - half)
    kept[0] = 9  # it is ours alone
    tail = kept[half:]
    del kept
    with pool.receive_buffer(nbytes) as second:  # the first is still looked at
        assert second.memory.fd != room.memory.fd
        fill(other, second.memory, 0, nbytes, 3)
    assert tail == bytes([2]) * (nbytes - half)
    del tail
    assert pool.used_bytes == 0
    with pool.receive_buffer(nbytes) as third:
        assert third.memory.fd == room.memory.fd
        with pytest.raises(TransferError, match="too late"):
            fill(other, room.memory, 0, nbytes, 4)


def test_a_room_that_was_not_kept_is_gone_for_whoever_comes_to_fill_it(pool: SegmentPool, other: OtherProcess) -> None:
    files, segments = open_files(), mapped_segments()
    with pytest.raises(KeyboardInterrupt), pool.receive_buffer(MIB) as room:
        raise KeyboardInterrupt
    assert (open_files() - files, mapped_segments()) == (set(), segments)
    assert (pool.used_bytes, pool.free_bytes) == (0, 0)
    with pytest.raises(TransferError, match="no longer holds"):
        fill(other, room.memory, 0, MIB, 1)


def test_a_room_outlives_its_pool_for_those_who_hold_it(other: OtherProcess) -> None:
    files, segments = open_files(), mapped_segments()
    with SegmentPool() as pool, pool.receive_buffer(MIB) as room:
        fill(other, room.memory, 0, MIB, 1)
        kept = room.claim()
    assert kept == bytes([1]) * MIB
    del kept
    assert (open_files() - files, mapped_segments()) == (set(), segments)


def test_memory_that_a_forked_child_sees_is_not_used_again(other: OtherProcess) -> None:
    assert (
        other.evaluate(
            """
with pool.receive_buffer(5_000_000) as room:
    kept = room.claim()
kept[:] = bytes([7]) * len(kept)
asked, asks = os.pipe()
told, tells = os.pipe()
child = os.fork()
if child == 0:
    os.read(asked, 1)
    os.write(tells, bytes([kept[-1]]))
    os._exit(0)
del kept
with pool.receive_buffer(5_000_000) as again:
    again.claim()[:] = bytes(5_000_000)
os.write(asks, b".")
seen = os.read(told, 1)[0]
os.waitpid(child, 0)
[os.close(fd) for fd in (asked, asks, told, tells)]
seen
"""
        )
        == 7
    )


def test_an_interrupted_write_keeps_nothing(pool: SegmentPool) -> None:
    before = open_files()
    fills = 0

    def interrupt_the_second(frame: FrameType, event: str, argument: object) -> None:
        nonlocal fills
        fills += frame.f_code.co_name == "fill"
        if fills == 2:
            raise KeyboardInterrupt

    traced_by = sys.gettrace()
    sys.settrace(interrupt_the_second)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.write([noise(9 * MIB)] * 3)
    finally:
        sys.settrace(traced_by)
    assert (fills, open_files() - before, pool.used_bytes, pool.free_bytes) == (2, set(), 0, 0)
