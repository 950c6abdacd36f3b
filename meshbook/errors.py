"""What can go wrong, sorted by who acts next.

`CellError` is the user's to mend, `RankLost` the operator's, `ProtocolError` ours. Every message says what is the case,
with the numbers, and what to type next. Standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


class MeshbookError(Exception):
    """Any error that Meshbook raises on purpose."""


class MeshShapeError(MeshbookError, ValueError):
    """Axes, sizes or ranks that do not fit the mesh."""


class PlacementError(MeshbookError, ValueError):
    """A tensor that cannot be placed on the mesh as asked."""


class NotAttached(MeshbookError):
    """There is no mesh behind this object: it was stopped, or this process has left it."""


class VersionMismatch(MeshbookError):
    """The two ends speak different versions of the protocol."""


class ProtocolError(MeshbookError):
    """A peer said something it must not say: a defect of Meshbook, or a stranger on the socket."""


class MeshNameError(MeshbookError, KeyError):
    """A name that does not exist where it was looked for."""

    def __str__(self) -> str:  # KeyError would show its message in quotes
        return str(self.args[0]) if self.args else ""


class MeshInUse(MeshbookError):
    """A mesh of that name is running already."""


class StartError(MeshbookError):
    """The mesh did not come up."""


class TransferError(MeshbookError, TypeError):
    """A value that cannot travel between the controller and the ranks."""


class ValuesDiffer(MeshbookError, ValueError):
    """One value was asked for, and the ranks hold different ones."""


class UsageError(MeshbookError, ValueError):
    """A magic or a command that was typed wrongly; the message shows how it is written."""


class MeshTimeout(MeshbookError, TimeoutError):
    """The ranks did not answer in the time given. What they run goes on."""


class CollectiveAborted(MeshbookError, RuntimeError):
    """A collective that cannot be completed, because a rank that it needs has left the cell: it raised, or ended
    without coming. The waiting rank is released and keeps its variables.

    Attributes:
        ranks: who has left.
        cause: why, "rank 1 raised ValueError: no at line 3".
        where: what waited, "all_reduce at line 4".
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), cause: str = "", where: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.cause = cause
        self.where = where


def describe_exit(signal_number: int | None, exit_code: int | None) -> str:
    """How a process ended, in words: `was killed by SIGKILL`, or `exited with status 3`."""
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
    """Ranks that waited in a collective for one that had left the cell."""

    ranks: tuple[int, ...]
    where: str  # "all_reduce at line 4"


class CellError(MeshbookError):
    """Code that raised on ranks: one entry per distinct failure.

    Attributes:
        failures: the distinct failures: what was raised before what was stopped, the one on most ranks first.
        succeeded: ranks on which the same code ran to its end.
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
        """What IPython shows instead of the controller's own stack, which says nothing about the fault."""
        return list(self.rendered) or [f"{type(self).__name__}: {self}"]


class CellInterrupted(CellError, KeyboardInterrupt):
    """The cell was stopped on the ranks, by the user."""


class OperationFailed(CellError):
    """An operation on remote tensors that failed on ranks. Told when its result, or what depends on it, is waited for;
    the message has the line here that issued it and the rank's own traceback. Other tensors live on."""


class RankLost(MeshbookError):
    """A rank's process is gone.

    Attributes:
        ranks: the lost ranks.
        host, pid, signal, exit_code, last_lines, last_collective: of the first of them.
        survivors: ranks that live on with their state.
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
