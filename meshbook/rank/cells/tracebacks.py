"""Conversion of an exception to a `RankError`: rendered by the rank's IPython, without Meshbook's frames, bounded.

Nothing here raises because of a user's exception: a broken `__str__`, a recursion a thousand frames deep, arguments
that cannot be pickled.
"""

from __future__ import annotations

import asyncio
import bdb
import cmd
import contextlib
import dis
import io
import itertools
import os
import pdb
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import IPython
from IPython.core.error import UsageError

from meshbook.diagnose.source_files import is_user_file, library_of
from meshbook.errors import (
    CollectiveAborted,
    MeshbookError,
    ProtocolError,
    escape_surrogates,
    message_of,
    traceback_of,
)
from meshbook.rank import limits
from meshbook.wire.messages import Frame, RankError

# The message of a CUDA or compiler error can be megabytes; a notebook shows its beginning and its end.
MAX_EVALUE_CHARS: Final = 8_000
MAX_TRACEBACK_CHARS: Final = 100_000
# Of a deep recursion the outermost and innermost frames are sufficient.
MAX_FRAMES: Final = 100
# IPython reads and parses the file of each frame that it renders: 0.02 to 0.2 s for one of a library's, several times
# as much where ranks share their cores. After an interrupt the user waits for it, and needs only the location.
MAX_RENDERED_FRAMES: Final = 30
INNERMOST_FRAMES_OF_INTERRUPT: Final = 2  # number of innermost frames shown although they are a library's
# Exceptions contain messages; larger ones contain data that should be fetched as data.
MAX_PICKLE_BYTES: Final = 16 << 10

_MESHBOOK_FOLDER: Final = str(Path(__file__).resolve().parents[2]) + os.sep
_IPYTHON_FOLDER: Final = os.path.dirname(os.path.abspath(IPython.__file__)) + os.sep
_ASYNCIO_FOLDER: Final = os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep
_DEBUGGER_FILES: Final = tuple(str(module.__file__) for module in (bdb, pdb, cmd))
_RUNNER_FILE: Final = os.path.join(_MESHBOOK_FOLDER, "rank", "cells", "code_runner.py")  # calls the user's code
_MODULES_FILE: Final = os.path.join(_MESHBOOK_FOLDER, "rank", "tensors", "modules.py")  # runs modules of the notebook
# Meshbook's files whose frames represent an action of the user: a missing name in an expression, a cell that does not
# compile, an interrupt before its first line. An exception that has only Meshbook's frames and ends in another file is
# a defect of Meshbook and retains them.
_USER_FACING_FILES: Final = tuple(
    os.path.join(_MESHBOOK_FOLDER, "rank", name)
    for name in (
        "objects.py",
        "previews/expressions.py",
        "cells/code_runner.py",
        "cells/compiler.py",
        "cells/debugger.py",
        "cells/no_terminal.py",
        "interrupt.py",
    )
)

# What Meshbook's code raises by a mistake of its own, unless by a `raise`: for a name that the user has misspelt.
_DEFECTS: Final = (AssertionError, AttributeError, KeyError, NameError)
_RAISE: Final = dis.opmap["RAISE_VARARGS"]


class Renderer(Protocol):
    """Renders tracebacks: a RankShell."""

    def render(self, error: BaseException) -> list[str]:
        """Return IPython's traceback of the exception, a list of strings with ANSI colours."""


def to_rank_error(error: BaseException, renderer: Renderer) -> RankError:
    """Return the report of an exception. Removes Meshbook's frames from it, and from its causes and contexts."""
    # As for operations on remote tensors: the notebook's line called it, and torch's frames say no more than the error.
    is_of_module = any(
        entry.tb_frame.f_code.co_filename == _MODULES_FILE for entry in _iter_traceback(error.__traceback__)
    )
    strip_meshbook_frames(error)
    text = error_text(error)
    if isinstance(error, CollectiveAborted):  # its location is sufficient: the fault is another rank's, and shown there
        return RankError(
            ename=type(error).__name__,
            evalue=text,
            traceback=(),
            pickled=_pickle_error(error),
            released_from=error.where,
        )
    if (full_folder := limits.explain_full_folder(text)) is not None:
        with contextlib.suppress(Exception):
            error.add_note(full_folder)
    try:
        with _truncated_tracebacks(error, without_torch=is_of_module):
            rendered = renderer.render(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # IPython cannot render it: Python's own traceback is more robust
        rendered = [traceback_of(error).rstrip("\n")]
    return RankError(
        ename=type(error).__name__,
        evalue=text,
        traceback=_truncate_rendered(rendered),
        frames=to_frames(error.__traceback__),
        pickled=_pickle_error(error),
        notes=tuple(escape_surrogates(_truncate_text(note)) for note in _error_notes(error)),
    )


def render(error: BaseException, interactive_tb: Any, syntax_tb: Any) -> list[str]:
    """Return IPython's traceback of an exception.

    Args:
        interactive_tb: the shell's formatter of tracebacks.
        syntax_tb: its formatter of syntax errors.
    """
    kind, tb = type(error), error.__traceback__
    if isinstance(error, UsageError):
        return [f"UsageError: {error}"]
    own = getattr(error, "_render_traceback_", None)
    if callable(own):
        return [str(part) for part in own()]
    if isinstance(error, SyntaxError) and not _has_user_frames(tb):
        return list(syntax_tb.structured_traceback(kind, error, []))
    if tb is None and error.__cause__ is None and (error.__context__ is None or error.__suppress_context__):
        return ["\n".join([": ".join(filter(None, (kind.__name__, message_of(error)))), *_error_notes(error)])]
    if _has_exception_group(error):  # IPython cannot render them
        return ["".join(traceback.format_exception(kind, error, tb)).rstrip("\n")]
    if isinstance(error, SyntaxError):
        return list(syntax_tb.structured_traceback(kind, error, traceback.extract_tb(tb)))
    return list(interactive_tb.structured_traceback(kind, error, tb, tb_offset=0))


def strip_meshbook_frames(error: BaseException) -> None:
    """Remove Meshbook's frames from the tracebacks of an exception and of its causes and contexts.

    Removes a cause of an error of Meshbook's too if no user code is in it: the message has it.
    """
    for chained in _iter_exception_chain(error):
        chained.__traceback__ = _without_meshbook_frames(chained)
        cause = chained.__cause__
        if isinstance(chained, MeshbookError) and cause is not None and not _has_frames_of_user(cause):
            chained.__cause__ = None


def shorten_anomaly_stacks() -> None:
    """Have `torch.autograd.detect_anomaly` show the stack of a forward from the cell's frame on."""
    fx_traceback: Any = sys.modules.get("torch.fx.traceback")
    if fx_traceback is None:
        return
    format_stack = fx_traceback.format_stack
    if format_stack.__module__ == __name__:  # a spare has become a rank
        return

    def format_cell_stack() -> list[str]:
        stack: list[str] = format_stack()
        runners = [at for at, entry in enumerate(stack) if _RUNNER_FILE in entry]
        return stack[runners[-1] + 1 : -1] if runners else stack

    fx_traceback.format_stack = format_cell_stack


def _iter_exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all its causes and contexts, each once."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
        yield current


@contextlib.contextmanager
def _truncated_tracebacks(error: BaseException, *, without_torch: bool) -> Iterator[None]:
    """Reduce the tracebacks to the most relevant frames while they are rendered. `%tb` renders all of them."""
    interrupted = isinstance(error, KeyboardInterrupt)
    originals = [(chained, chained.__traceback__) for chained in _iter_exception_chain(error)]
    for chained, tb in originals:
        entries = [
            entry
            for entry in _iter_traceback(tb)
            if not (without_torch and library_of(entry.tb_frame.f_code.co_filename) == "torch")
        ]
        chained.__traceback__ = _rebuild_traceback(_select_frames(entries, interrupted=interrupted))
    try:
        yield
    finally:
        for chained, tb in originals:
            chained.__traceback__ = tb


def _select_frames(entries: list[TracebackType], *, interrupted: bool) -> list[TracebackType]:
    """Select an interrupt's user frames and innermost two; for another exception all, up to a limit."""
    if interrupted:
        first_innermost = len(entries) - INNERMOST_FRAMES_OF_INTERRUPT
        entries = [
            entry
            for index, entry in enumerate(entries)
            if index >= first_innermost or is_user_file(entry.tb_frame.f_code.co_filename)
        ]
    if len(entries) > MAX_RENDERED_FRAMES:
        entries = entries[: MAX_RENDERED_FRAMES // 2] + entries[-MAX_RENDERED_FRAMES // 2 :]
    return entries


def _without_meshbook_frames(error: BaseException) -> TracebackType | None:
    tb = error.__traceback__
    entries = list(_iter_traceback(tb))
    remaining = [entry for entry in entries if not _is_meshbooks(entry)]
    if len(remaining) == len(entries):
        return tb
    if _is_defect(error, entries[-1]):
        remaining = list(itertools.dropwhile(_is_meshbooks, entries))
    while remaining and remaining[0].tb_frame.f_code.co_filename.startswith(_ASYNCIO_FOLDER):
        del remaining[0]  # the event loop in which an `await` of the cell ran
    while remaining and remaining[-1].tb_frame.f_code.co_filename in _DEBUGGER_FILES:
        del remaining[-1]  # the rank's debugger, from which the cell was ended
    is_users = isinstance(error, MeshbookError) and not isinstance(error, ProtocolError)
    while is_users and remaining and not is_user_file(remaining[-1].tb_frame.f_code.co_filename):
        del remaining[-1]  # a library's, between Meshbook's: of a future, for example
    if not remaining and not is_users and entries[-1].tb_frame.f_code.co_filename not in _USER_FACING_FILES:
        return tb
    return _rebuild_traceback(remaining)


def _is_meshbooks(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_MESHBOOK_FOLDER)


def _is_defect(error: BaseException, innermost: TracebackType) -> bool:
    """Whether Meshbook's own code, whose frames explain it, has raised an exception, and not on purpose."""
    code = innermost.tb_frame.f_code
    if not isinstance(error, _DEFECTS) or isinstance(error, MeshbookError) or not _is_meshbooks(innermost):
        return False
    is_raised = code.co_code[innermost.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
    return not is_raised and code.co_filename not in _USER_FACING_FILES


def _has_exception_group(error: BaseException | None) -> bool:
    """Whether an exception, or one that is shown as its cause or context, is a group."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BaseExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _has_frames_of_user(error: BaseException) -> bool:
    """Whether user code has raised an exception, or one of its causes and contexts."""
    entries = (entry for chained in _iter_exception_chain(error) for entry in _iter_traceback(chained.__traceback__))
    return any(is_user_file(entry.tb_frame.f_code.co_filename) for entry in entries)


def _has_user_frames(tb: TracebackType | None) -> bool:
    """Whether any code but IPython's and Meshbook's ran. If so, a SyntaxError is that of a module, not of the cell."""
    return any(
        entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("IPython", "codeop", "meshbook")
        for entry in _iter_traceback(tb)
    )


def _rebuild_traceback(entries: list[TracebackType]) -> TracebackType | None:
    rebuilt: TracebackType | None = None
    for entry in reversed(entries):
        # An interrupt may arrive at an instruction that has no line.
        line = -1 if entry.tb_lineno is None else entry.tb_lineno
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, line)
    return rebuilt


def _iter_traceback(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def to_frames(tb: TracebackType | None) -> tuple[Frame, ...]:
    """Return the frames, outermost first, without IPython's, which differ between versions."""
    frames = [
        Frame(
            file=entry.tb_frame.f_code.co_filename,
            line=entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno,  # as in `_rebuild_traceback`
            function=entry.tb_frame.f_code.co_name,
        )
        for entry in _iter_traceback(tb)
        if not entry.tb_frame.f_code.co_filename.startswith(_IPYTHON_FOLDER)
    ]
    if len(frames) > MAX_FRAMES:
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    return tuple(frames)


def error_text(error: BaseException) -> str:
    """Return the message of an exception as it is reported."""
    return escape_surrogates(_truncate_text(message_of(error)))


def _error_notes(error: BaseException) -> list[str]:
    notes = vars(error).get("__notes__")  # `getattr` would call a class's own `__getattr__`
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, (list, tuple)) else []


def _truncate_text(text: str) -> str:
    if len(text) <= MAX_EVALUE_CHARS:
        return text
    half = MAX_EVALUE_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _truncate_rendered(rendered: list[str]) -> tuple[str, ...]:
    """Return the strings of a traceback; if it is too long, only the first and the last of them."""
    strings = [
        escape_surrogates(text if len(text) <= MAX_TRACEBACK_CHARS // 2 else _truncate_text(text)) for text in rendered
    ]
    total = sum(map(len, strings))
    if total <= MAX_TRACEBACK_CHARS:
        return tuple(strings)
    first: list[str] = []
    last: list[str] = []
    remaining_chars = MAX_TRACEBACK_CHARS // 2
    while strings and len(strings[0]) <= remaining_chars:
        remaining_chars -= len(strings[0])
        first.append(strings.pop(0))
    remaining_chars = MAX_TRACEBACK_CHARS // 2
    while strings and len(strings[-1]) <= remaining_chars:
        remaining_chars -= len(strings[-1])
        last.append(strings.pop())
    return (*first, f"    [... {len(strings)} parts of this traceback left out]\n", *reversed(last))


class _PickleTooLarge(Exception):
    pass


class _BoundedBuffer(io.BytesIO):
    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if self.tell() + view.nbytes > MAX_PICKLE_BYTES:
            raise _PickleTooLarge
        return super().write(view)


def _pickle_error(error: BaseException) -> bytes | None:
    """Return the pickled exception if its class can be imported elsewhere, it is small, and it can be unpickled."""
    kind = type(error)
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or module is None or getattr(module, kind.__qualname__, None) is not kind:
        return None
    sink = _BoundedBuffer()
    try:
        pickle.Pickler(sink, protocol=5).dump(error)
        data = sink.getvalue()
        return data if type(pickle.loads(data)) is kind else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # from a user's __reduce__ or __init__
        return None
