"""What the ranks of one call ask their user by input(): the same question of several ranks is one, with one answer.

Pure: the time is passed in as seconds; the caller asks and sends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from meshbook.ids import Ranks
from meshbook.wire.messages import InputRequest

# Seconds that a question waits for further ranks to ask the same, after the last that did.
_PATIENCE_S = 0.15


@dataclass
class Question:
    """A question of one rank or several.

    Attributes:
        number: how many equal questions each of these ranks has asked before.
        requests: by rank.
    """

    prompt: str
    password: bool
    number: int
    requests: dict[int, InputRequest] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(self.requests))


class InputQuestions:
    """The questions of one call. A rank that comes later to a question that was answered gets that answer."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open: list[Question] = []  # oldest first
        self._due_at = 0.0
        self._answers: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
        self._num_asked: defaultdict[tuple[int, str, bool], int] = defaultdict(int)

    def add(self, request: InputRequest, now: float) -> str | None:
        """Record a rank's question; return the answer to it if it has been answered already."""
        prompt, password, rank = request.prompt, request.password, request.rank
        number = self._num_asked[rank, prompt, password]
        self._num_asked[rank, prompt, password] += 1
        answers = self._answers[prompt, password]
        if number < len(answers):
            return answers[number]
        for question in self._open:
            if (question.prompt, question.password, question.number) == (prompt, password, number):
                break
        else:
            question = Question(prompt, password, number)
            self._open.append(question)
        question.requests[rank] = request
        self._due_at = now + _PATIENCE_S
        return None

    def seconds_until_due(self, now: float) -> float | None:
        """Return how long the oldest question is to wait for other ranks; None: there is none."""
        if not self._open:
            return None
        has_all = sum(len(question.requests) for question in self._open) >= len(self._ranks)
        return 0.0 if has_all else max(0.0, self._due_at - now)

    def pop(self) -> Question:
        """Return the oldest question, which is then no longer open."""
        return self._open.pop(0)

    def answered(self, question: Question, text: str | None) -> None:
        """Keep the answer for the ranks that have not come to this question; None: there is none."""
        if text is not None:
            self._answers[question.prompt, question.password].append(text)
