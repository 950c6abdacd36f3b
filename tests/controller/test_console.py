"""Output as text: what is written where."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from meshbook.controller.console import Console, StatusLine, find_prompter, prompt_on_terminal
from meshbook.marimo import page
from meshbook.wire import messages


def test_a_long_notice_is_wrapped_below_a_marimo_cell_which_would_cut_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "  rank 0 waits in all_reduce #1 at the cell, line 5, for " + "a rank that sleeps " * 4
    items = (messages.RankDisplay(ranks=(0,), item=messages.Notice(f"it stands still\n{sentence.rstrip()}")),)
    console = Console((0,), echo=True)
    console(items)
    assert len(capsys.readouterr().err.splitlines()) == 2
    monkeypatch.setattr(page, "running_cell", SimpleNamespace)
    console(items)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "[meshbook] it stands still"
    assert [len(line) <= 80 for line in rest] == [True, True]
    assert rest[1].startswith("    ")
    assert " ".join(" ".join(rest).split()) == sentence.strip()


@pytest.mark.parametrize(
    ("mode", "prompts"), [(None, True), ("script", True), ("edit", True), ("run", False)]
)  # of marimo; None: no marimo
def test_prompts_go_to_whoever_can_type(mode: str | None, prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = None if mode is None else SimpleNamespace(mode=mode)
    monkeypatch.setattr(page, "running_cell", lambda: cell)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert (find_prompter() is not None) == prompts
    assert (find_prompter() is prompt_on_terminal) == (mode in (None, "script"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert (find_prompter() is not None) == (mode == "edit")


def test_a_notebook_has_one_display_of_what_a_start_waits_for_and_it_is_empty_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published: list[tuple[str, str, bool]] = []

    def publish(data: dict[str, str], *, transient: dict[str, str], update: bool) -> None:
        published.append((data["text/plain"], transient["display_id"], update))

    shell = SimpleNamespace(kernel=object(), display_pub=SimpleNamespace(publish=publish))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with StatusLine() as line:
        line.show("1 of 2 ranks are ready")
        line.show("2 of 2 ranks are ready")
    assert [(text, update) for text, _, update in published] == [
        ("1 of 2 ranks are ready", False),
        ("2 of 2 ranks are ready", True),
        ("", True),
    ]
    assert len({name for _, name, _ in published}) == 1
    line = StatusLine()
    line.show("1 of 2 ranks are ready")
    line.__exit__(TimeoutError)
    assert published[-1][0] == "1 of 2 ranks are ready", "what it waited for stays under a start that failed"
    with StatusLine():
        assert len(published) == 4, "a start that did not wait shows nothing"
    assert capsys.readouterr().out == ""


def test_a_terminal_has_one_line_of_what_a_start_waits_for_and_a_file_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    with StatusLine() as line:
        line.show("PENDING")
        assert not line.is_updated
    assert capsys.readouterr().out == "PENDING\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with StatusLine() as line:
        line.show("1 of 2 ranks are ready")
        assert line.is_updated
    assert capsys.readouterr().out == "\r1 of 2 ranks are ready\x1b[K\r\x1b[K"
