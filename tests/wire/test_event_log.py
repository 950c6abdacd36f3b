"""The pipe between a supervisor and its standby: events come whole and in order, and its end is the writer's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from meshbook.wire import event_log
from meshbook.wire.event_log import EventLog, LoggedEvent


@pytest.fixture
def pipes() -> Iterator[Callable[[], EventLog]]:
    made: list[EventLog] = []

    def make() -> EventLog:
        made.append(EventLog())
        return made[-1]

    yield make
    for log in made:
        log.close()


def event(number: int, *frames: bytes) -> LoggedEvent:
    return LoggedEvent(1, number, 0.5, number, 2 * number, list(frames))


@pytest.mark.usefixtures("starts_processes")
def test_events_come_whole_and_in_order_and_the_end_is_that_of_the_writer(pipes: Callable[[], EventLog]) -> None:
    log, sent = pipes(), [event(1), event(2, b"a", b""), event(3, b"x" * 3_000_000, b"y"), event(4, b"z")]
    writer = os.fork()
    if writer == 0:
        log.keep_writing_end()
        os._exit(0 if all(log.write(one) for one in sent) else 1)
    log.keep_reading_end(writer)
    received = []
    while (found := log.read()) is not None:
        received.append(found)
    log.wait_for_writer()
    assert received == sent
    assert os.waitpid(writer, 0)[1] == 0


def test_an_event_of_which_a_part_was_written_is_none(pipes: Callable[[], EventLog]) -> None:
    log = pipes()
    whole = pipes()
    assert whole.write(event(1, b"abc"))
    data = os.read(whole._read_fd, 1000)
    os.write(log._write_fd, data + data[:-1])
    log.keep_reading_end(os.getpid())
    assert log.read() == event(1, b"abc")
    assert log.read() is None


def test_a_reader_that_has_ended_or_does_not_read_is_noticed(
    pipes: Callable[[], EventLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_STUCK_S", 0.05)
    log = pipes()
    reader = os.dup(log._read_fd)
    log.keep_writing_end()
    assert not log.write(event(1, b"x" * 3_000_000))
    os.close(reader)
    assert not log.write(event(2))
