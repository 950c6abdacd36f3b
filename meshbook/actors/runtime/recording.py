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
    """Passes messages on to a recorder.

    Attributes:
        recorder: None: nobody notes them.
    """

    recorder: MessageRecorder | None = None

    def begun(self, runner: Any, method: str, function: Any, args: Any, kwargs: Any, point: Point) -> None:
        if self.recorder is not None:
            self.recorder.message_begun(runner, method, function, args, kwargs, point)

    def failed(self, runner: Any, error: BaseException) -> None:
        if self.recorder is not None and runner.actor is not None:
            self.recorder.message_failed(runner, error)


recording = Recording()  # of this process
