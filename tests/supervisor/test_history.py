"""The history of a mesh that lives for months fits a message."""

from __future__ import annotations

from meshbook.supervisor.history import History
from meshbook.wire.messages import HistoryEntry


def entry(source: str, number: int = 1) -> HistoryEntry:
    return HistoryEntry(
        number=number, label="", source=source, ranks=(0,), started_at=0.0, seconds=None, status="running"
    )


def test_the_oldest_cells_go_when_there_are_too_many_characters() -> None:
    history = History(max_chars=100)
    for number in range(10):
        history.add(entry("x" * 30, number))
    assert [kept.number for kept in history.entries()] == [7, 8, 9]


def test_the_oldest_cells_go_when_there_are_too_many() -> None:
    history = History(max_entries=2)
    for number in range(5):
        history.add(entry("x", number))
    assert [kept.number for kept in history.entries()] == [3, 4]


def test_of_a_source_that_is_data_the_beginning_is_kept_with_its_size() -> None:
    history = History(max_source_chars=5)
    history.add(entry("x = " + "1" * 2000))
    assert history.entries()[0].source == "x = 1\n# ... 2,004 characters in all"


def test_how_a_cell_ended_is_noted_also_when_its_source_was_cut_and_forgotten_cells_are_no_trouble() -> None:
    history = History(max_entries=1, max_source_chars=5)
    gone = history.add(entry("first", 1))
    kept = history.add(entry("x = 12345", 2))
    history.finish(gone, seconds=1.0, status="ok")
    history.finish(kept, seconds=2.0, status="error")
    assert [(one.number, one.status, one.seconds) for one in history.entries()] == [(2, "error", 2.0)]
