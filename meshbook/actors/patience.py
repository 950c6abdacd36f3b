"""A cell waits for an actor that waits for itself: told unasked, as ranks' own hangs are.

The supervisor watches what ranks run. A cell of the notebook's that waits for an actor's answer runs nothing there, so
this process watches its own calls, and looks at the ranks when one is not answered for a while. What it finds is told
only if it is a circle of actors: an endpoint that takes its time is none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from meshbook.actors.runtime.post import Post, for_user_code
from meshbook.wire.messages import AnswerAwaited

log = logging.getLogger("meshbook.actors")


class Patience:
    """Watches the calls that code outside any actor waits for.

    Args:
        explain: asked on a thread of its own what an answer waits for, and tells people; whether there was anything.
        after_s: age of a call at which it is looked into; then again at twice that age, and so on.
    """

    def __init__(self, post: Post, explain: Callable[[AnswerAwaited], bool], *, after_s: float) -> None:
        self._post, self._explain, self._after_s = post, explain, after_s
        self._watches = False
        self._look_at_s: dict[int, float] = {}  # age of a call, by its number, at which it is looked at again
        post.on_expect = self._begin

    def _begin(self) -> None:
        if not self._watches:
            self._watches = True
            self._post.call_later(self._after_s, self._look)

    def _look(self) -> None:
        """On the reading thread."""
        waiting = {answers[0].call: answers[0] for caller, answers in self._post.awaited() if caller is None}
        self._look_at_s = {call: age for call, age in self._look_at_s.items() if call in waiting}
        for call, answer in waiting.items():
            if answer.since_s >= self._look_at_s.get(call, self._after_s):
                self._look_at_s[call] = 2 * answer.since_s  # a look costs the ranks some milliseconds
                threading.Thread(target=self._ask, args=(answer,), name="meshbook-patience", daemon=True).start()
        self._watches = self._post.has_open_calls
        if self._watches:
            self._post.call_later(min(1.0, self._after_s), self._look)

    def _ask(self, answer: AnswerAwaited) -> None:
        for_user_code()  # what it prints may be the user's own stream
        try:
            if self._explain(answer):
                self._look_at_s[answer.call] = float("inf")  # once is enough
        except Exception:  # the mesh has ended meanwhile, say: then the call ends by that
            log.debug("an answer that does not come could not be explained", exc_info=True)
