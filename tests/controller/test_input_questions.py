"""Which questions of ranks are one, whom it is asked for, and who gets an earlier answer."""

from __future__ import annotations

import pytest

from meshbook.controller.input_questions import InputQuestions, Question
from meshbook.wire.messages import InputRequest


@pytest.fixture
def questions() -> InputQuestions:
    return InputQuestions((0, 1, 2))


def ask(questions: InputQuestions, rank: int, prompt: str = "go on? ", now: float = 0.0) -> str | None:
    return questions.add(InputRequest(call="c1", rank=rank, prompt=prompt, password=False), now)


def due(questions: InputQuestions) -> list[Question]:
    """All open questions, oldest first."""
    found = []
    while questions.seconds_until_due(1e9) is not None:
        found.append(questions.pop())
    return found


def test_equal_questions_are_one(questions: InputQuestions) -> None:
    for rank in (2, 0, 1):
        assert ask(questions, rank) is None
    (question,) = due(questions)
    assert question.ranks == (0, 1, 2)


def test_unlike_questions_are_asked_one_after_the_other(questions: InputQuestions) -> None:
    for rank in (1, 0, 2):
        ask(questions, rank, f"rank {rank}? ")
    assert [question.ranks for question in due(questions)] == [(1,), (0,), (2,)]


def test_a_question_waits_a_moment_for_other_ranks_and_not_once_all_have_asked(questions: InputQuestions) -> None:
    assert questions.seconds_until_due(0.0) is None
    ask(questions, 0)
    ask(questions, 1)
    assert 0.0 < (questions.seconds_until_due(0.0) or 0.0) < 1.0
    assert questions.seconds_until_due(1.0) == 0.0
    ask(questions, 2)
    assert questions.seconds_until_due(0.0) == 0.0


def test_a_rank_that_has_asked_while_the_user_typed_gets_the_answer(questions: InputQuestions) -> None:
    ask(questions, 0)
    question = questions.pop()
    questions.answered(question, "yes")
    assert ask(questions, 1) == "yes"
    assert questions.seconds_until_due(0.0) is None


def test_the_same_words_later_are_another_question(questions: InputQuestions) -> None:
    ask(questions, 0)
    question = questions.pop()
    questions.answered(question, "yes")
    questions.forget(question)
    assert ask(questions, 1) is None
    assert ask(questions, 0) is None
    assert due(questions)[0].ranks == (0, 1)


def test_a_question_without_an_answer_leaves_none(questions: InputQuestions) -> None:
    ask(questions, 0)
    questions.answered(questions.pop(), None)
    assert ask(questions, 1) is None
