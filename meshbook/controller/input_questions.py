"""What the ranks of one call ask their user by input(): the same question of several ranks is one, with one answer.

Pure: the time is passed in as seconds; the caller asks and sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshbook.ids import Ranks
from meshbook.wire.messages import InputRequest

# Seconds that a question waits for further ranks to ask the same, after the last that did.
_PATIENCE_S = 0.15


@dataclass
class Question:
    """A question of one rank or several; `requests` are by rank."""

    prompt: str
    password: bool
    requests: dict[int, InputRequest] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(self.requests))


class InputQuestions:
    """The questions of one call. An answer is for the ranks that have asked when it is given, and for no later ones."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open: dict[tuple[str, bool], Question] = {}  # oldest first
        self._answers: dict[tuple[str, bool], str] = {}  # given, while requests from before are still read
        self._due_at = 0.0

    def add(self, request: InputRequest, now: float) -> str | None:
        """Record a rank's question; return the answer to it if it has been answered meanwhile."""
        key = request.prompt, request.password
        if key in self._answers:
            return self._answers[key]
        self._open.setdefault(key, Question(*key)).requests[request.rank] = request
        self._due_at = now + _PATIENCE_S
        return None

    def seconds_until_due(self, now: float) -> float | None:
        """Return how long the oldest question is to wait for other ranks; None: there is none."""
        if not self._open:
            return None
        has_all = sum(len(question.requests) for question in self._open.values()) >= len(self._ranks)
        return 0.0 if has_all else max(0.0, self._due_at - now)

    def pop(self) -> Question:
        """Return the oldest question, which is then no longer open."""
        return self._open.pop(next(iter(self._open)))

    def answered(self, question: Question, text: str | None) -> None:
        """Keep the answer for ranks that have asked the same meanwhile; None: there is none."""
        if text is not None:
            self._answers[question.prompt, question.password] = text

    def forget(self, question: Question) -> None:
        """Forget the answer: what ranks asked before it was given has been read."""
        self._answers.pop((question.prompt, question.password), None)
