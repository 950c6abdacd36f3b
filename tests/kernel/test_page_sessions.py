"""Which cells' output a page has missed, by the sessions of messages. No kernel."""

from __future__ import annotations

import pytest

from meshbook.kernel import page_sessions
from meshbook.kernel.page_sessions import PageSessions, missed_output_note


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time."""
    now = [1000.0]
    monkeypatch.setattr(page_sessions, "monotonic", lambda: now[0])
    return now


class Notebook:
    """Cells of one notebook, one after the other."""

    def __init__(self) -> None:
        self.pages = PageSessions()
        self.number = 0

    def begin(self, page: str) -> tuple[int, ...]:
        self.number += 1
        return self.pages.cell_began(page)

    def end(self, page: str, *, on_ranks: bool = True) -> None:
        self.pages.cell_ended(page, self.number if on_ranks else None)

    def run(self, page: str, **options: bool) -> tuple[int, ...]:
        missed = self.begin(page)
        self.end(page, **options)
        return missed


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def test_a_page_that_is_new_while_a_cell_runs_has_missed_that_cell_and_hears_it_once(notebook: Notebook) -> None:
    assert notebook.run("a") == ()
    assert notebook.begin("a") == ()
    notebook.pages.saw("b")
    notebook.end("a")
    assert notebook.run("b") == (2,)
    assert notebook.run("b") == ()


def test_it_has_missed_the_cells_that_were_queued_too_but_none_from_before(notebook: Notebook) -> None:
    notebook.run("a")
    notebook.begin("a")
    notebook.pages.saw("b")
    notebook.end("a")
    notebook.run("a")
    notebook.run("a", on_ranks=False)
    notebook.run("a")
    assert notebook.run("b") == (2, 3, 5)


def test_a_page_that_is_opened_while_nothing_runs_has_missed_nothing_that_is_known(clock: list[float]) -> None:
    notebook = Notebook()
    notebook.run("a")
    clock[0] += 60.0
    notebook.pages.saw("b")
    assert notebook.run("b") == ()
    assert Notebook().run("first") == ()


def test_a_page_that_is_slow_to_send_its_first_request_has_missed_the_cell_that_has_just_ended(
    notebook: Notebook, clock: list[float]
) -> None:
    notebook.run("a")
    notebook.run("a")
    clock[0] += 5.0
    notebook.pages.saw("b")
    assert notebook.run("b") == (2,)
    assert notebook.run("b") == ()


def test_the_page_whose_cell_ran_has_missed_nothing_when_another_is_opened(notebook: Notebook) -> None:
    notebook.begin("a")
    notebook.pages.saw("b")
    notebook.end("a")
    assert notebook.run("a") == ()


def test_a_page_that_was_reloaded_twice_has_missed_all_since_it_was_first_seen(notebook: Notebook) -> None:
    notebook.begin("a")
    notebook.pages.saw("b")
    notebook.pages.saw("c")
    notebook.end("a")
    assert notebook.run("c") == (1,)


def test_a_cell_that_ran_in_the_notebooks_own_process_is_not_in_the_history(notebook: Notebook) -> None:
    notebook.begin("a")
    notebook.pages.saw("b")
    notebook.end("a", on_ranks=False)
    assert notebook.run("b") == ()


def test_a_thousand_other_sessions_do_not_make_a_known_page_a_new_one(notebook: Notebook) -> None:
    for number in range(5000):
        notebook.pages.saw(f"probe {number}")
        assert notebook.run("a") == ()
    notebook.begin("a")
    notebook.pages.saw("b")
    notebook.end("a")
    assert notebook.run("a") == ()
    assert notebook.run("b") == (5001, 5002)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((7,), "while cell 7 ran, or just after; its whole output: %mesh history 7"),
        ((7, 8), "while cells 7-8 ran, or just after; their whole output: %mesh history 7, %mesh history 8"),
        (
            (1, 2, 3, 9),
            "cells 1-3,9 ran, or just after; their whole output: %mesh history 1, %mesh history 2, %mesh history 3, …",
        ),
    ],
)
def test_the_note_says_where_the_output_is(numbers: tuple[int, ...], expected: str) -> None:
    assert missed_output_note(numbers).endswith(expected)
