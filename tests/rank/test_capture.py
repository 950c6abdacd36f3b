from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from meshbook.rank.output.capture import OutputBuffer
from meshbook.wire.messages import ClearOutput, Display, Notice, OutputItem, Text
from tests.budget import WAIT_S, when

DEADLINE_S = WAIT_S


def with_output(test: Callable[[OutputBuffer], None]) -> Callable[[], None]:
    """Runs a test with a buffer behind this process's own streams and descriptors. No fixture: pytest's own capturing
    takes the streams back between setup and test.
    """

    def run() -> None:
        output = OutputBuffer()
        output.install()
        try:
            test(output)
        finally:
            output.uninstall()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def text_of(items: tuple[OutputItem, ...], stream: str = "stdout") -> str:
    return "".join(item.text for item in items if isinstance(item, Text) and item.stream == stream)


def readable(output: OutputBuffer) -> list[int]:
    return select.select(list(output.poll_fds()), [], [], 0)[0]


@pytest.mark.usefixtures("starts_processes")
@with_output
def test_python_c_and_children_come_in_the_order_they_wrote(output: OutputBuffer) -> None:
    print("python 1")
    os.write(1, b"descriptor\n")
    print("python 2")
    ctypes.CDLL(None).printf(b"printf\n")
    subprocess.run(["echo", "child"], check=True, timeout=WAIT_S)
    os.system("echo shell")
    print("python 3")
    output.flush()
    assert output.pop_items() == (Text("stdout", "python 1\ndescriptor\npython 2\nprintf\nchild\nshell\npython 3\n"),)


@with_output
def test_neighbours_of_one_stream_come_as_one_item_and_streams_stay_apart(output: OutputBuffer) -> None:
    print("a")
    print("b")
    print("c", file=sys.stderr)
    os.write(2, b"d\n")
    output.put(Display({"text/plain": "shown"}))
    print("e")
    output.flush()
    assert output.pop_items() == (
        Text("stdout", "a\nb\n"),
        Text("stderr", "c\nd\n"),
        Display({"text/plain": "shown"}),
        Text("stdout", "e\n"),
    )
    assert output.pop_items() == ()


@with_output
def test_what_c_holds_back_arrives_at_the_end_of_the_call(output: OutputBuffer) -> None:
    ctypes.CDLL(None).printf(b"no line end")
    output.flush()
    assert text_of(output.pop_items()) == "no line end"


@with_output
def test_a_character_in_two_pieces_arrives_whole(output: OutputBuffer) -> None:
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    os.write(1, first)
    output.pump()
    os.write(1, second)
    sys.stdout.buffer.write(first)
    sys.stdout.buffer.write(second)
    output.flush()
    assert text_of(output.pop_items()) == "üü"


@with_output
def test_bytes_that_are_not_utf8_are_replaced_and_do_not_reach_into_the_next_call(output: OutputBuffer) -> None:
    os.write(1, b"a\xffb\xc3")
    output.flush()
    assert text_of(output.pop_items()) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    os.write(1, b"next")
    output.flush()
    assert text_of(output.pop_items()) == "next"


@with_output
def test_lone_surrogates_can_travel(output: OutputBuffer) -> None:
    print(os.fsdecode(b"file-\xff"))
    items = output.pop_items()
    assert text_of(items) == "file-\\udcff\n"
    msgspec.msgpack.encode(items)


@pytest.mark.usefixtures("starts_processes")
@with_output
def test_the_streams_behave_like_text_files(output: OutputBuffer) -> None:
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        assert not stream.isatty()
        assert stream.fileno() == stream.buffer.fileno() == fd
        assert stream.encoding == "utf-8"
        assert stream.writable()
        stream.flush()
        stream.close()
        assert not stream.closed
        stream.writelines(["still ", "open\n"])
        with pytest.raises(TypeError, match="must be str, not bytes"):
            stream.write(b"bytes")  # type: ignore[arg-type]
    subprocess.run(["echo", "child"], stdout=sys.stdout, check=True, timeout=WAIT_S)
    output.flush()
    items = output.pop_items()
    assert text_of(items) == "still open\nchild\n"
    assert text_of(items, "stderr") == "still open\n"


@pytest.mark.usefixtures("starts_processes")
@with_output
def test_a_forked_child_prints_into_its_parents_output(output: OutputBuffer) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            print("from the child")
            output.put(Display({"text/plain": "a display"}))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    print("from the parent")
    output.flush()
    assert output.pop_items() == (Text("stdout", "from the child\na display\nfrom the parent\n"),)


def test_pipes_that_the_parent_made_are_read_and_not_replaced() -> None:
    """As a rank gets them: the write ends are on 1 and 2 before Python code of ours runs."""
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    output = OutputBuffer(fds=(read, os.dup(read)))
    output.install()
    try:
        os.write(1, b"through the given pipe\n")
        print("and python")
        output.flush()
        items = output.pop_items()
    finally:
        output.uninstall()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(write)
    assert text_of(items) == "through the given pipe\nand python\n"


@with_output
def test_the_bell_rings_when_the_buffer_stops_being_empty(output: OutputBuffer) -> None:
    assert readable(output) == []
    print("one")
    print("two")
    assert readable(output) == [output.poll_fds()[0]]
    output.pump()
    assert readable(output) == []  # rung once; what waits is told by pending()
    assert output.has_pending()
    output.pop_items()
    assert not output.has_pending()
    print("three")
    assert readable(output) == [output.poll_fds()[0]]


@with_output
def test_descriptor_output_wakes_whoever_polls_and_pump_brings_it_in(output: OutputBuffer) -> None:
    os.write(2, b"from C\n")
    assert readable(output)
    assert output.pump()
    assert text_of(output.pop_items(), "stderr") == "from C\n"
    output.pump()
    assert readable(output) == []


@with_output
def test_closing_descriptor_1_keeps_nobody_awake(output: OutputBuffer) -> None:
    os.close(1)
    assert readable(output) == []
    print("python goes on")
    assert text_of(output.pop_items()) == "python goes on\n"


@with_output
def test_a_muted_thread_says_nothing_and_the_others_go_on(output: OutputBuffer) -> None:
    with output.muted():
        print("nobody hears this")
        output.put(ClearOutput())
        other = threading.Thread(target=print, args=("another thread",))
        other.start()
        other.join(WAIT_S)
    print("aloud")
    assert text_of(output.pop_items()) == "another thread\naloud\n"


def test_uninstall_gives_streams_and_descriptors_back() -> None:
    stdout, identity = sys.stdout, os.fstat(1).st_ino
    open_before = set(os.listdir("/proc/self/fd"))
    output = OutputBuffer()
    output.install()
    assert os.fstat(1).st_ino != identity
    print("captured")
    output.uninstall()
    assert sys.stdout is stdout
    assert os.fstat(1).st_ino == identity
    assert text_of(output.pop_items()) == "captured\n"
    del output
    when(lambda: set(os.listdir("/proc/self/fd")) <= open_before)  # other threads may be using some of their own


@with_output
def test_text_total_counts_every_character(output: OutputBuffer) -> None:
    before = output.total_chars
    print("12345")
    os.write(1, b"678")
    output.flush()
    output.pop_items()
    assert output.total_chars - before == 9


# ---------------------------------------------------------------------------------------------------------------------
# Floods


def test_a_writer_waits_for_room_and_nothing_is_lost_while_somebody_takes() -> None:
    output = OutputBuffer(redirect_fds=False, max_chars=10_000, block_timeout_s=DEADLINE_S)
    line = "x" * 99 + "\n"
    writer = threading.Thread(target=lambda: [output.write("stdout", line) for _ in range(1000)])
    writer.start()
    received = ""

    def held_or_over() -> bool:
        return output.total_chars - len(received) > 9_000 or not writer.is_alive()

    while writer.is_alive() or output.has_pending():
        when(held_or_over)
        items = output.pop_items()
        assert all(isinstance(item, Text) for item in items)
        assert len(text_of(items)) <= 10_200
        received += text_of(items)
    writer.join(WAIT_S)
    assert received == line * 1000


def test_a_flood_that_nobody_takes_is_cut_in_the_middle_and_says_how_much() -> None:
    output = OutputBuffer(redirect_fds=False, max_chars=100_000, block_timeout_s=0.01)
    for number in range(100_000):
        output.write("stdout", f"{number}\n")
    head, notice, tail = output.pop_items()
    assert isinstance(head, Text)
    assert isinstance(tail, Text)
    assert isinstance(notice, Notice)
    assert head.text.startswith("0\n1\n")
    assert head.text.endswith("\n")
    assert tail.text.endswith("99998\n99999\n")
    kept = head.text.splitlines() + tail.text.splitlines()
    assert all(line.isdecimal() for line in kept)
    total_bytes = sum(len(f"{number}\n") for number in range(100_000))
    lines_cut = 100_000 - len(kept)
    bytes_cut = total_bytes - len(head.text) - len(tail.text)
    assert notice.text.startswith(f"{lines_cut:,} lines ({bytes_cut:,} bytes) left out here")
    assert len(head.text) + len(tail.text) <= 110_000


def test_after_a_take_writers_wait_again_and_nothing_is_cut() -> None:
    output = OutputBuffer(redirect_fds=False, max_chars=1000, block_timeout_s=0.01)
    for _ in range(100):
        output.write("stdout", "y" * 100)
    assert any(isinstance(item, Notice) for item in output.pop_items())
    output.write("stdout", "short")
    assert output.pop_items() == (Text("stdout", "short"),)


def test_one_enormous_print_is_bounded_too() -> None:
    output = OutputBuffer(redirect_fds=False, max_chars=200_000, block_timeout_s=0.01)
    output.write("stdout", "z" * 5_000_000)
    items = output.pop_items()
    assert sum(len(item.text) for item in items if isinstance(item, Text)) <= 300_000
    assert output.total_chars == 5_000_000


def test_displays_without_end_are_bounded_and_counted() -> None:
    output = OutputBuffer(redirect_fds=False, max_chars=10_000, block_timeout_s=0.01)
    for _ in range(100):
        output.put(Display({"text/html": "<b>" * 300}))
    items = output.pop_items()
    shown = sum(isinstance(item, Display) for item in items)
    (notice,) = [item for item in items if isinstance(item, Notice)]
    assert notice.text.startswith(f"{100 - shown} displays left out here")
    assert shown < 20


@pytest.mark.usefixtures("starts_processes")
def test_a_flood_through_the_descriptors_stays_bounded_while_nobody_takes() -> None:
    output = OutputBuffer(max_chars=100_000, block_timeout_s=DEADLINE_S)
    output.install()
    try:
        child = subprocess.Popen(["head", "-c", "5000000", "/dev/zero"])
        deadline = time.monotonic() + DEADLINE_S
        while child.poll() is None:
            assert time.monotonic() < deadline
            select.select(list(output.poll_fds()), [], [], 0.1)
            output.pump()
        output.pump()
        output.flush()
    finally:
        output.uninstall()
    items = output.pop_items()
    assert output.total_chars == 5_000_000
    assert len(text_of(items)) <= 250_000
    assert any(isinstance(item, Notice) for item in items)


@with_output
def test_a_sigint_ends_a_print_that_waits_for_room(output: OutputBuffer) -> None:
    full = OutputBuffer(redirect_fds=False, max_chars=1000, block_timeout_s=DEADLINE_S * 10)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop() -> None:
        when(lambda: full.total_chars > 1000)
        os.kill(os.getpid(), signal.SIGINT)

    def print_without_end() -> None:
        while True:
            full.write("stdout", "endless\n")

    helper = threading.Thread(target=stop)
    helper.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            print_without_end()
    finally:
        signal.signal(signal.SIGINT, previous)
        helper.join(WAIT_S)
    assert time.monotonic() - started < DEADLINE_S
    assert full.pop_items()  # the lock is free
    full.write("stdout", "and on")
    assert full.pop_items() == (Text("stdout", "and on"),)
