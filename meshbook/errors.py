"""Exceptions, by who must act.

`CellError` is for the user to fix, `RankLost` for the operator, `ProtocolError` for Meshbook's developers. Every
message states the problem, with the numbers, and what to type next. Standard library only.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def escape_surrogates(text: str) -> str:
    """Return text whose lone surrogates (of an undecodable file name, for example) are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """Return `str(error)`, with lone surrogates escaped; `<unprintable Odd>` if its `__str__` raises."""
    return _text_of(error, str)


def repr_of(obj: object) -> str:
    """Return `repr(obj)`, with lone surrogates escaped; `<unprintable Odd>` if its `__repr__` raises."""
    return _text_of(obj, repr)


def _text_of(obj: object, show: Callable[[object], str]) -> str:
    try:
        return escape_surrogates(show(obj))
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code may raise anything
        return f"<unprintable {type(obj).__name__}>"


def traceback_of(error: BaseException, *, skip: int = 0, limit: int | None = None, chain: bool = True) -> str:
    """Return Python's traceback of an exception; its class and message if that cannot be formatted.

    Args:
        skip: number of outermost frames to leave out.
        limit, chain: as for `traceback.format_exception`.
    """
    try:
        frames = error.__traceback__
        for _ in range(skip):
            frames = frames and frames.tb_next
        lines = traceback.format_exception(type(error), error, frames, limit=limit, chain=chain)
        return escape_surrogates("".join(lines))
    except KeyboardInterrupt:
        raise
    except BaseException:  # from a user's `__notes__` or `__getattr__`
        return f"{type(error).__name__}: {message_of(error)}\n"


class MeshbookError(Exception):
    """Any error that Meshbook raises deliberately."""


class MeshShapeError(MeshbookError, ValueError):
    """Axes, sizes or ranks do not match the mesh."""


class PlacementError(MeshbookError, ValueError):
    """A tensor cannot be placed on the mesh as requested."""


class NotAttached(MeshbookError):
    """The mesh was stopped, or this process has detached from it."""


class VersionMismatch(MeshbookError):
    """The two ends use different versions of the protocol."""


class ProtocolError(MeshbookError):
    """A peer sent an invalid message: a defect of Meshbook, or a foreign client on the socket."""


class MeshNameError(MeshbookError, KeyError):
    """A name does not exist where it was looked up."""

    def __str__(self) -> str:  # KeyError would show its message in quotes
        return str(self.args[0]) if self.args else ""


class MeshInUse(MeshbookError):
    """A mesh of that name is running already, or differs from the requested one."""


class StartError(MeshbookError):
    """The mesh did not start."""


class TransferError(MeshbookError, TypeError):
    """A value cannot be sent between the controller and the ranks."""


class SyncError(MeshbookError):
    """The project folder could not be brought to a machine; what it had before is there still."""


class ValuesDiffer(MeshbookError, ValueError):
    """One value was requested, and the ranks hold different ones."""


class CheckpointError(MeshbookError):
    """A checkpoint cannot be saved, or not be restored as requested. What was there before is unchanged."""


class UsageError(MeshbookError, ValueError):
    """A magic, command or call was used incorrectly; the message shows the correct form."""


class Preempted(MeshbookError):
    """A loop was ended at the end of a step, because a process of the mesh received SIGTERM."""


class MeshTimeout(MeshbookError, TimeoutError):
    """The ranks did not reply within the timeout. What they run continues."""


class CollectiveAborted(MeshbookError, RuntimeError):
    """A collective cannot complete, because a rank that it needs has left the cell.

    That rank raised, or ended without joining. The waiting rank is released and keeps its variables.

    Attributes:
        ranks: the ranks that have left.
        cause: why, "rank 1 raised ValueError: no at line 3".
        where: the waiting call, "all_reduce at line 4".
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), cause: str = "", where: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.cause = cause
        self.where = where


def describe_exit(signal_number: int | None, exit_code: int | None) -> str:
    """Return how a process ended, in words: `was killed by SIGKILL`, or `exited with status 3`."""
    if signal_number is None:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(signal_number).name}"
    except ValueError:
        return f"was killed by signal {signal_number}"


@dataclass(frozen=True)
class Failure:
    """One distinct failure and the ranks that had it."""

    ranks: tuple[int, ...]
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class Released:
    """Ranks that waited in a collective for a rank that had left the cell."""

    ranks: tuple[int, ...]
    where: str  # "all_reduce at line 4"


class CellError(MeshbookError):
    """Code raised on ranks: one entry per distinct failure.

    Attributes:
        failures: the distinct failures: exceptions before interruptions, the one on most ranks first.
        succeeded: ranks on which the same code completed.
        released: ranks that waited in a collective for those that failed, by where they waited.
    """

    rendered: tuple[str, ...] = ()  # the ranks' tracebacks, grouped, with ANSI colours

    def __init__(
        self,
        failures: Sequence[Failure],
        succeeded: Sequence[int] = (),
        *,
        released: Sequence[Released] = (),
        summary: str = "",
    ) -> None:
        self.failures = tuple(failures)
        self.succeeded = tuple(succeeded)
        self.released = tuple(released)
        super().__init__(summary or "; ".join(f"{failure.ename}: {failure.evalue}" for failure in self.failures))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of the controller's own stack, which does not explain the failure."""
        return list(self.rendered) or [f"{type(self).__name__}: {self}"]


class CellInterrupted(CellError, KeyboardInterrupt):
    """The user interrupted the cell on the ranks."""


class OperationFailed(CellError):
    """An operation on remote tensors failed on ranks.

    Raised when its result, or a result that depends on it, is waited for. The message has the line in this process that
    issued it and the rank's own traceback. Other tensors stay valid.
    """


class HealError(MeshbookError):
    """The mesh could not be healed now, or a call was sent before its process had heard of a heal, and was not run.

    The message says why and what to do. Living ranks keep what they hold.
    """


class ResizeError(MeshbookError):
    """The mesh could not be resized now, or a call was sent before its process had heard of a resize, and was not run.

    The message says why, how many ranks there are, and what to do.
    """


class RankLost(MeshbookError):
    """A rank's process has exited.

    Attributes:
        ranks: the lost ranks.
        host, pid, signal, exit_code, last_lines, last_collective: of the first of them.
        survivors: ranks that live and keep their state.
    """

    rendered: tuple[str, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        host: str = "",
        pid: int | None = None,
        signal: str | None = None,
        exit_code: int | None = None,
        last_lines: Sequence[str] = (),
        last_collective: str | None = None,
        survivors: Sequence[int] = (),
        failures: Sequence[Failure] = (),
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.host = host
        self.pid = pid
        self.signal = signal
        self.exit_code = exit_code
        self.last_lines = tuple(last_lines)
        self.last_collective = last_collective
        self.survivors = tuple(survivors)
        self.failures = tuple(failures)

    def _render_traceback_(self) -> list[str]:
        return list(self.rendered) or [f"{type(self).__name__}: {self}"]
