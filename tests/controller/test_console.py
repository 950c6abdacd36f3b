"""Output as text: what is written where."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from meshbook.controller.console import Console, find_prompter, prompt_on_terminal
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
