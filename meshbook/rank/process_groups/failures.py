"""Why a process group cannot be used any more, and what its users get."""

from __future__ import annotations

import copy

from torch.distributed import DistBackendError

from meshbook.errors import MeshbookError, message_of


class GroupBroken(MeshbookError, RuntimeError):
    """Raised for a collective on a process group whose connections were aborted. The collective was not started."""


def is_transport_error(error: BaseException) -> bool:
    """Whether an error comes from a backend's own library: its connections or its communicator cannot be used."""
    return isinstance(error, DistBackendError) or "gloo/transport" in message_of(error)


class GroupFailure:
    """Why a group cannot be used any more.

    Attributes:
        error: what threads that wait in the group raise; None if each has an error of its own.
        reason: one line for every later caller.
        for_good: the group is not formed again.
    """

    def __init__(self, reason: str, error: BaseException | None = None, *, for_good: bool = False) -> None:
        self.reason = reason
        self.error = error
        self.for_good = for_good
        self.was_raised = False  # a thread has raised the error

    def error_to_raise(self) -> BaseException | None:
        """Return a copy of the error for one more thread, because raising writes a traceback into an exception."""
        if self.error is None:
            return None
        self.was_raised = True
        try:
            again = copy.copy(self.error)
        except Exception:  # its constructor does not accept its own args
            return self.error
        return again if type(again) is type(self.error) else self.error
