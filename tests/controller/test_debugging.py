"""The prompt of the debugger, for all ranks that it has stopped."""

from __future__ import annotations

import pytest

from meshbook.controller.debugging import DebuggerPrompt
from meshbook.fold.rendering import render_line
from meshbook.wire.messages import DebuggerStop, FoldedItem, Line

RANKS = (0, 1, 2, 3)


def stop_at(line: int, text: str = "") -> DebuggerStop:
    return DebuggerStop(place=f"cell 1, line {line}", text=text)


def stopped(*ranks: int) -> DebuggerPrompt:
    """The prompt of a call on four ranks, of which these are stopped."""
    prompt = DebuggerPrompt(RANKS)
    for rank in ranks:
        prompt.add(rank, stop_at(4), 0.0)
    return prompt


def shown(items: tuple[FoldedItem, ...]) -> list[str]:
    return [render_line(item, RANKS, colour=False) for item in items if isinstance(item, Line)]


def test_the_prompt_comes_at_once_when_all_ranks_have_stopped() -> None:
    prompt = stopped(0, 1, 2)
    assert prompt.seconds_until_due(0.0) == 0.2
    prompt.add(3, stop_at(4), 0.1)
    assert prompt.seconds_until_due(0.1) == 0


def test_the_prompt_waits_a_little_for_ranks_that_may_stop_too() -> None:
    assert DebuggerPrompt(RANKS).seconds_until_due(5.0) is None
    prompt = stopped(1)
    assert prompt.seconds_until_due(0.15) == pytest.approx(0.05)
    prompt.add(0, stop_at(4), 0.15)
    assert prompt.seconds_until_due(0.2) == 0  # after the first that stopped: the prompt is there within 0.3 s
    assert prompt.prompt() == "(ranks 0-1 · h lists the commands · 2-3 not stopped) "
    assert prompt.prompt() == "(ranks 0-1 · 2-3 not stopped) "


def test_what_ranks_say_is_folded() -> None:
    prompt = DebuggerPrompt(RANKS)
    for rank in RANKS:
        prompt.add(rank, stop_at(4, f"stopped at cell 1, line 4 · step=3 · loss={2.5 if rank else 9.5}\n"), 0.0)
    assert shown(prompt.pop_text(1.0)) == ["stopped at cell 1, line 4 · step=3 · loss=2.5 (rank 0: 9.5)"]
    assert prompt.pop_text(1.0) == ()


def test_a_command_goes_to_all_that_are_stopped_and_the_prompt_waits_for_their_answers() -> None:
    prompt = stopped(*RANKS)
    assert prompt.typed("p x", 10.0).replies == dict.fromkeys(RANKS, "p x")
    assert prompt.stopped == ()
    assert prompt.seconds_until_due(10.0) is None
    prompt.add(0, stop_at(4, "1\n"), 10.1)
    assert prompt.seconds_until_due(10.1) is not None
    assert prompt.seconds_until_due(11.1) == 0  # one computes for long; the others can be looked at
    for rank in (1, 2, 3):
        prompt.add(rank, stop_at(4, "1\n"), 10.2)
    assert prompt.seconds_until_due(10.2) == 0
    assert shown(prompt.pop_text(10.2)) == ["1"]


def test_commands_go_to_the_ranks_that_were_chosen() -> None:
    prompt = stopped(*RANKS)
    assert prompt.typed("ranks 1-2", 0.0).replies == {}
    assert prompt.typed("n", 0.0).replies == {1: "n", 2: "n"}
    prompt.add(1, stop_at(5), 0.1)
    prompt.add(2, stop_at(5), 0.1)
    assert "0,3 stopped too" in prompt.prompt()
    assert prompt.typed("all n", 0.2).replies == dict.fromkeys(RANKS, "n")
    for rank in RANKS:
        prompt.add(rank, stop_at(6), 0.3)
    prompt.typed("ranks all", 0.4)
    assert prompt.typed("w", 0.4).replies == dict.fromkeys(RANKS, "w")


def test_the_others_are_prompted_for_when_the_chosen_ranks_have_gone_on() -> None:
    prompt = stopped(*RANKS)
    prompt.typed("rank 2", 0.0)
    assert prompt.typed("c", 0.0).replies == {2: "c"}
    assert prompt.seconds_until_due(2.0) == 0
    assert prompt.prompt().startswith("(ranks 0-1,3 · ")
    assert prompt.typed("c", 2.0).replies == {0: "c", 1: "c", 3: "c"}


def test_a_choice_of_ranks_that_are_not_stopped_says_which_are() -> None:
    prompt = stopped(0, 1)
    assert shown(prompt.typed("ranks 1-2", 0.0).items) == ["rank 2: not stopped; stopped: 0-1"]
    assert prompt.typed("p 1", 0.0).replies == {0: "p 1", 1: "p 1"}


def test_names_of_the_program_that_are_words_of_the_prompt_go_to_the_ranks() -> None:
    for line in ("rank", "rank + 1", "rank - 1", "all(x)", "ranks = 3", "all = 1", "help(x)", "quit_early"):
        assert stopped(0).typed(line, 0.0).replies == {0: line}


def test_quitting_ends_the_call_for_all() -> None:
    for line in ("q", " quit", "exit"):
        typed = stopped(0, 2).typed(line, 0.0)
        assert typed.ends_call
        assert typed.replies == {0: None, 2: None}


def test_quitting_a_look_at_a_failure_has_the_ranks_end_it_by_themselves() -> None:
    prompt = DebuggerPrompt(RANKS)
    for rank in (0, 1):
        prompt.add(rank, DebuggerStop(place="cell 1, line 4", text="", is_post_mortem=True), 0.0)
    typed = prompt.typed("q", 1.0)
    assert not typed.ends_call
    assert typed.replies == {0: "c", 1: "c"}


def test_places_are_listed() -> None:
    prompt = stopped(0)
    prompt.add(2, stop_at(9), 0.0)
    assert shown(prompt.typed("ranks", 0.0).items) == [
        "rank 0: cell 1, line 4",
        "rank 2: cell 1, line 9",
        "ranks 1,3: not stopped",
    ]


def test_without_anybody_to_type_the_ranks_are_told() -> None:
    prompt = stopped(0, 1)
    assert prompt.typed(None, 0.0).replies == {0: None, 1: None}
    assert prompt.stopped == ()


def test_a_prompt_is_over_when_all_ranks_go_on_and_none_has_a_breakpoint() -> None:
    prompt = stopped(0, 1)
    assert not prompt.is_over  # nobody was asked yet
    prompt.prompt()
    prompt.typed("n", 1.0)
    assert not prompt.is_over
    prompt.add(0, stop_at(5), 1.1)
    prompt.add(1, DebuggerStop(place="cell 1, line 5", text="", has_breakpoints=True), 1.1)
    prompt.typed("c", 1.2)
    assert not prompt.is_over  # rank 1 may come to its breakpoint
    prompt.add(1, stop_at(9), 1.3)
    prompt.typed("c", 1.4)
    assert prompt.is_over


def test_a_rank_that_was_lost_is_not_waited_for() -> None:
    prompt = DebuggerPrompt(RANKS, asked=(0, 1))
    prompt.add(0, stop_at(4), 0.0)
    assert prompt.seconds_until_due(0.1) != 0
    prompt.remove(1)
    assert prompt.seconds_until_due(0.1) == 0
    prompt.prompt()
    prompt.remove(0)
    assert prompt.is_over


def test_places_of_ranks_that_have_not_stopped_are_listed() -> None:
    prompt = stopped(0)
    prompt.places[2] = "in recv #1 at cell 1, line 3"
    assert shown(prompt.typed("ranks", 1.0).items) == [
        "rank 0: cell 1, line 4",
        "rank 2: not stopped, in recv #1 at cell 1, line 3",
        "ranks 1,3: not stopped",
    ]
