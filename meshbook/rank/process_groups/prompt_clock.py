"""The time that counts for timeouts: it stands still while somebody is at a prompt of the mesh."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.clock import monotonic


class PromptClock:
    """Monotonic seconds without those in which a prompt of the mesh was open. Any thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # since when a prompt is open, None: none is; and for how long others were. One object, which is replaced whole.
        self._prompts: tuple[float | None, float] = None, 0.0

    def hold(self, is_prompt_open: bool) -> None:
        """Stand still while a prompt is open."""
        since, total_s = self._prompts
        if is_prompt_open and since is None:
            self._prompts = self._clock(), total_s
        elif not is_prompt_open and since is not None:
            self._prompts = None, total_s + self._clock() - since

    def now(self) -> float:
        since, total_s = self._prompts
        return (self._clock() if since is None else since) - total_s
