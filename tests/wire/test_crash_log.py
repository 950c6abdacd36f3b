"""What a process said last outlives it."""

from __future__ import annotations

import os
import signal

import pytest

from meshbook.wire.crash_log import RING_BYTES, CrashLog


@pytest.mark.usefixtures("starts_processes")
def test_words_of_a_process_that_was_killed_are_read_by_the_one_that_made_the_ring() -> None:
    ring = CrashLog()
    pid = os.fork()
    if pid == 0:
        CrashLog(ring.fd).write("the end\n")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert ring.read() == "the end\n"
    ring.close()


def test_when_the_ring_is_full_the_oldest_lines_go() -> None:
    ring = CrashLog()
    for number in range(10_000):
        ring.write(f"line {number}\n")
    lines = ring.read().splitlines()
    assert lines[-1] == "line 9999"
    assert lines == [f"line {number}" for number in range(10_000 - len(lines), 10_000)]
    ring.close()


def test_a_text_longer_than_the_ring_leaves_its_end() -> None:
    ring = CrashLog()
    ring.write("x" * RING_BYTES + "\nthe end")
    assert ring.read().endswith("\nthe end")
    ring.close()


def test_the_last_note_stands_beside_the_words() -> None:
    ring = CrashLog()
    writer = CrashLog(os.dup(ring.fd))
    writer.set_note("first")
    writer.write("words\n")
    writer.set_note("second " + "x" * 1000)
    assert ring.read_note() == ("second " + "x" * 1000)[:255]
    assert ring.read() == "words\n"
    writer.close()
    ring.close()


def test_a_new_ring_is_empty() -> None:
    ring = CrashLog()
    assert ring.read() == ""
    assert ring.read_note() is None
    ring.close()


def test_who_writes_notes_and_who_writes_text_do_not_touch_what_is_the_others() -> None:
    words = CrashLog()
    notes = CrashLog(os.dup(words.fd))  # as a thread whose view of the text is an old one
    words.write("the text")
    notes.set_note("all_reduce #1")
    assert (words.read(), words.read_note()) == ("the text", "all_reduce #1")
    words.write(" goes on")
    assert (notes.read(), notes.read_note()) == ("the text goes on", "all_reduce #1")
    words.close()
    notes.close()
