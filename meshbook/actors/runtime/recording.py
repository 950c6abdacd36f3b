"""Where the messages of this process's actors are noted, so that a failure can be replayed."""

from __future__ import annotations

from typing import Any, Protocol

from meshbook.actors.shape import Point


class MessageRecorder(Protocol):
    """Notes actors' messages, on their threads."""

    def message_begun(self, runner: Any, method: str, function: Any, args: Any, kwargs: Any, point: Point) -> None:
        """Called before a message runs; the first of its arguments is the actor."""

    def message_failed(self, runner: Any, error: BaseException) -> None:
        """Called when it has raised."""


class Recording:
    """Who notes messages; None: nobody."""

    recorder: MessageRecorder | None = None


recording = Recording()  # of this process
