"""Failures of actors, as exceptions and reports. Plain data: nothing here sends or waits."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

import msgspec

from meshbook.clock import monotonic
from meshbook.diagnose.source_files import is_user_file
from meshbook.errors import MeshbookError, ProtocolError, message_of, traceback_of
from meshbook.ids import name_ranks
from meshbook.wire import messages, pickling


class ActorError(MeshbookError):
    """An endpoint raised. The actor stays alive.

    Attributes:
        exception: what the endpoint raised; a RemoteFailure with its text if it cannot be rebuilt here.
        ranks: ranks in the called mesh on which this happened.
        traceback: the remote traceback, as text.
        others: other, different failures of the same call, as (ranks, exception, traceback).
    """

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        *,
        ranks: Sequence[int] = (),
        traceback: str = "",
        others: Sequence[tuple[tuple[int, ...], BaseException, str]] = (),
    ) -> None:
        self.exception = exception
        self.message = message
        self.ranks = tuple(ranks)
        self.traceback = with_source(traceback) if traceback else _format_exception(exception)
        self.others = tuple((ranks, other, with_source(text)) for ranks, other, text in others)
        super().__init__(message)

    @property
    def exception_formatted(self) -> str:
        """Monarch's name for the remote traceback."""
        return self.traceback

    def __str__(self) -> str:
        parts = [self.message]
        for ranks, exception, text in [(self.ranks, self.exception, self.traceback), *self.others]:
            summary = message_of(exception)
            if not isinstance(exception, RemoteFailure):
                summary = f"{type(exception).__name__}: {summary}"
            if text:  # the traceback ends with the complete message
                summary = summary.partition("\n")[0]
            parts.append(f"{name_ranks(ranks)}: {summary}" if ranks else summary)
            if text:
                parts.append(text.rstrip())
        return "\n".join(parts)

    def _render_traceback_(self) -> list[str]:
        """Return the lines for IPython: the user's frames, without those that wait for the reply."""
        lines: list[str] = _shell().InteractiveTB.structured_traceback(
            type(self), self, _user_frames(self.__traceback__), tb_offset=0
        )
        return lines

    def __reduce__(self) -> Any:
        rebuild = functools.partial(ActorError, ranks=self.ranks, traceback=self.traceback, others=self.others)
        return rebuild, (self.exception, self.message)


class RemoteFailure(Exception):
    """Substitute for an exception that could not be rebuilt here."""


class SupervisionError(ActorError, RuntimeError):
    """An actor or its process has ended or failed to start; the call cannot be answered. A RuntimeError, as Monarch's.

    Attributes:
        endpoint: the called endpoint, "trainers.step".
        mesh_name: the mesh that failed.
    """

    endpoint: str = ""
    mesh_name: str = ""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), mesh_name: str = "", traceback: str = "") -> None:
        super().__init__(RemoteFailure(message), message, ranks=ranks, traceback=traceback or " ")
        self.mesh_name = mesh_name

    def __str__(self) -> str:
        return "\n".join([self.message, *([self.traceback.rstrip()] if self.traceback.strip() else [])])

    def __reduce__(self) -> Any:
        rebuild = functools.partial(type(self), ranks=self.ranks, mesh_name=self.mesh_name, traceback=self.traceback)
        return rebuild, (self.message,)


class ActorStopped(SupervisionError):
    """The actor was stopped, by `stop()` or with its processes."""


class MeshFailure:
    """The failure that `__supervise__` and `unhandled_fault_hook` receive.

    Attributes:
        mesh_name: the mesh of actors or processes that failed, as named in `spawn`.
        ranks: its failed ranks.
        traceback: of the actor, as text; "" if a process has exited.
        occurred_at: when this process saw it, `time.monotonic()`; how a process has exited may be known only later.
    """

    def __init__(
        self, mesh_name: str, ranks: Sequence[int], text: str, traceback: str = "", *, occurred_at: float | None = None
    ) -> None:
        self.mesh_name, self.ranks = mesh_name, tuple(ranks)
        self.occurred_at = monotonic() if occurred_at is None else occurred_at
        self._text, self.traceback = text, with_source(traceback)

    @property
    def mesh(self) -> str:
        return self.mesh_name

    def report(self) -> str:
        """Return the message and the traceback as text."""
        return "\n".join([self._text, *([self.traceback.rstrip()] if self.traceback else [])])

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<MeshFailure of {self.mesh_name!r}: {self._text}>"


# ---------------------------------------------------------------------------------------------------------------------

_MAX_PICKLED_BYTES = 64 << 10
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')
# A frame as IPython shows it, and what it shows in place of a line that it cannot find.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_IPYTHON_FRAME = re.compile(r"File (\S.*?):(\d+)(?=,|$)")
_NO_SOURCE = "Could not get source, probably due dynamically evaluated source code."


def describe_exception(
    error: BaseException, *, call: int, kind: str = "raised", rank: int | None = None
) -> messages.ActorFailure:
    """Encode an exception as a message, without its outermost frame, which is Meshbook's own.

    An error of Meshbook's that no user code has led to has no traceback: its message says it all.
    """
    is_explained = isinstance(error, MeshbookError) and not isinstance(error, ProtocolError)
    text = "" if is_explained and not _has_user_frames(error) else traceback_of(error, skip=1)
    try:
        payload = pickling.dump_small(error, _MAX_PICKLED_BYTES)
    except KeyboardInterrupt:
        raise
    except BaseException:  # from a user's `__reduce__`
        payload = None
    pickled = None if payload is None else payload.pickled
    return messages.ActorFailure(call, kind, type(error).__name__, message_of(error), text, pickled, rank)


def _has_user_frames(error: BaseException | None) -> bool:
    """Whether user code has raised an exception, or its cause."""
    if error is None:
        return False
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(map(is_user_file, files)) or _has_user_frames(error.__cause__)


def summary_of(failure: messages.ActorFailure) -> str:
    """Return the class and the text of what was raised."""
    return f"{failure.ename}{failure.text and ': '}{failure.text}"


def ended_failure(failure: messages.ActorFailure, endpoint: str) -> messages.ActorFailure:
    """Return the reply of an endpoint that has ended its actor. Without its rank, so that equal ones become one."""
    text = f"{endpoint} failed, and its actor has ended: {summary_of(failure)}"
    return msgspec.structs.replace(failure, kind="ended", text=text)


def stopped_failure(name: str, reason: str) -> messages.ActorFailure:
    """Return the reply to messages for an actor that has ended."""
    return messages.ActorFailure(0, "stopped", "ActorStopped", f"the actor {name!r} has ended: {reason}")


def rebuild_exception(failure: messages.ActorFailure) -> BaseException:
    """Return the exception behind a failure, or a RemoteFailure in its place."""
    if failure.pickled is not None:
        try:
            found = pickling.load(messages.Payload(failure.pickled))
            if isinstance(found, BaseException):
                return found
        except Exception:
            pass
    return RemoteFailure(summary_of(failure))


def combine_failures(failures: dict[int, messages.ActorFailure], endpoint: str, mesh_name: str) -> ActorError:
    """Combine the failures of a call, by rank, into one error.

    Equal failures become one, with its ranks; the failure of most ranks comes first.
    """
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, failure in sorted(failures.items()):
        groups.setdefault((failure.kind, failure.ename, failure.text, failure.traceback), []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] == "raised", -len(item[1]), item[1]))
    (kind, _, text, trace), ranks = ordered[0]
    if kind != "raised":
        error_type = ActorStopped if kind == "stopped" else SupervisionError
        error = error_type(text, ranks=ranks, mesh_name=mesh_name, traceback=trace)
        error.endpoint = endpoint
        return error
    first = failures[ranks[0]]
    others = [
        (tuple(other_ranks), rebuild_exception(failures[other_ranks[0]]), key[3]) for key, other_ranks in ordered[1:]
    ]
    return ActorError(rebuild_exception(first), f"{endpoint} failed.", ranks=ranks, traceback=trace, others=others)


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drop IPython's leading frames and Meshbook's trailing ones."""
    while trace is not None and _module(trace).startswith("IPython."):
        trace = trace.tb_next
    return _drop_trailing_own_frames(trace)


def _drop_trailing_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    if trace is None:
        return None
    rest = _drop_trailing_own_frames(trace.tb_next)
    if rest is None and _module(trace).startswith("meshbook.actors."):
        return None
    # An interrupt may arrive at an instruction that has no line.
    line = -1 if trace.tb_lineno is None else trace.tb_lineno
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, line)


def _module(trace: types.TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", ""))


def with_source(text: str) -> str:
    """Complete a remote traceback with source lines and numbers of notebook cells, which only this process knows.

    It may be IPython's or Python's own.
    """
    lines = text.split("\n")  # keeps the empty one at its end
    shown: list[str] = []
    for number, line in enumerate(lines):
        if _NO_SOURCE in line and shown and (found := _IPYTHON_FRAME.match(head := _COLOUR.sub("", shown[-1]))):
            source = linecache.getline(found[1], int(found[2])).rstrip()
            if source:
                shown[-1] = f"{_format_location(found[1])}, line {found[2]}{head[found.end() :]}"
                line = f"----> {found[2]} {source}"
        frame, below = _FRAME.match(line), "".join(lines[number + 1 : number + 2])
        shown.append(line if frame is None else f"  {_format_location(frame[1])}, line {frame[2]}{line[frame.end() :]}")
        if frame and not below.startswith("    ") and (source := linecache.getline(frame[1], int(frame[2])).strip()):
            shown.append(f"    {source}")
    return "\n".join(shown)


def _shell() -> Any:
    """Return the IPython shell, or None outside IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _format_location(file: str) -> str:
    """Return `Cell In[3]`, or `File "…"` as in any traceback."""
    shell = _shell()
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else f'File "{file}"'


def _format_exception(exception: BaseException) -> str:
    return traceback_of(exception) if exception.__traceback__ is not None else ""
