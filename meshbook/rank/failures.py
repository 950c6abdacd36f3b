"""An exception as a `RankError`: rendered by the rank's own IPython, with Meshbook's frames left out, bounded.

Nothing here raises for what a user's exception does: a broken `__str__`, a recursion a thousand frames deep, arguments
that cannot be pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Protocol

import IPython

from meshbook.diagnose.code import is_user
from meshbook.errors import CollectiveAborted
from meshbook.rank import limits
from meshbook.wire.messages import Frame, RankError

# A message of a CUDA or compiler error can be megabytes; a notebook shows the beginning and the end of it.
EVALUE_CHARS: Final = 8_000
TRACEBACK_CHARS: Final = 100_000
# Of a deep recursion the outermost and innermost frames tell what happened.
NUM_FRAMES: Final = 100
# IPython reads and parses the file of each frame that it draws: 0.02 to 0.2 s for one of a library's, several times as
# much where ranks share their cores. Somebody who pressed Stop waits for it, and asked only where the work was.
NUM_DRAWN: Final = 30
NUM_DRAWN_OF_STOP: Final = 2  # of libraries, innermost
# Exceptions hold messages; whatever is larger holds data that should be asked for as data.
PICKLE_BYTES: Final = 16 << 10

_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IPYTHON_FOLDER: Final = os.path.dirname(os.path.abspath(IPython.__file__)) + os.sep
_ASYNCIO_FOLDER: Final = os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep
# Files of ours whose frames stand for the user's own doing: a name that is missing on a path, a cell that does not
# compile, a Stop before its first line. An exception with frames of ours only, from anywhere else, is our own defect
# and keeps them.
_STANDS_FOR_USER: Final = tuple(
    os.path.join(_OWN_FOLDER, "rank", name) for name in ("paths.py", "shell.py", "interrupt.py")
)


class Renderer(Protocol):
    """What renders tracebacks: a RankShell."""

    def render(self, error: BaseException) -> list[str]:
        """IPython's traceback of the exception, a list of strings with ANSI colours."""


def describe(error: BaseException, renderer: Renderer) -> RankError:
    """What is told of an exception. Cuts Meshbook's frames out of it, and out of those that it came from."""
    cut_own_frames(error)
    text = _text(error)
    if isinstance(error, CollectiveAborted):  # where it waited says all: the fault is another rank's, and shown there
        return RankError(
            ename=type(error).__name__,
            evalue=text,
            traceback=(),
            pickled=_pickled(error),
            released=error.where,
        )
    if (full := limits.full_folder_behind(text)) is not None:
        with contextlib.suppress(Exception):
            error.add_note(full)
    try:
        with _few_frames(error):
            rendered = renderer.render(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a traceback that IPython cannot draw: Python's own is plainer and sturdier
        rendered = _plain(error, text)
    return RankError(
        ename=type(error).__name__,
        evalue=text,
        traceback=_bounded(rendered),
        frames=_frames(error.__traceback__),
        pickled=_pickled(error),
        notes=tuple(_clean(_shortened(note)) for note in _notes(error)),
    )


def cut_own_frames(error: BaseException) -> None:
    """Take the frames of Meshbook out of the tracebacks of an exception and of all those that it came from."""
    for one in _family(error):
        one.__traceback__ = _without_own(one.__traceback__)


def _family(error: BaseException) -> Iterator[BaseException]:
    """An exception and all those that it came from, each once."""
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
def _few_frames(error: BaseException) -> Iterator[None]:
    """While an exception is drawn, it has only the frames that say most. `%tb` draws all of them."""
    stopped = isinstance(error, KeyboardInterrupt)
    whole = [(one, one.__traceback__) for one in _family(error)]
    for one, tb in whole:
        one.__traceback__ = _rebuilt(_telling(list(_links(tb)), stopped=stopped))
    try:
        yield
    finally:
        for one, tb in whole:
            one.__traceback__ = tb


def _telling(links: list[TracebackType], *, stopped: bool) -> list[TracebackType]:
    """Of a Stop the user's frames and the innermost two; of another exception all, if they are not too many."""
    if stopped:
        inner = len(links) - NUM_DRAWN_OF_STOP
        links = [
            link for place, link in enumerate(links) if place >= inner or is_user(link.tb_frame.f_code.co_filename)
        ]
    if len(links) > NUM_DRAWN:
        links = links[: NUM_DRAWN // 2] + links[-NUM_DRAWN // 2 :]
    return links


def _without_own(tb: TracebackType | None) -> TracebackType | None:
    links = list(_links(tb))
    kept = [link for link in links if not link.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER)]
    if len(kept) == len(links):
        return tb
    while kept and kept[0].tb_frame.f_code.co_filename.startswith(_ASYNCIO_FOLDER):
        del kept[0]  # the loop in which an `await` of the cell ran
    if not kept and links[-1].tb_frame.f_code.co_filename not in _STANDS_FOR_USER:
        return tb
    return _rebuilt(kept)


def _rebuilt(links: list[TracebackType]) -> TracebackType | None:
    rebuilt: TracebackType | None = None
    for link in reversed(links):
        # A Stop may come at an instruction that has no line.
        line = -1 if link.tb_lineno is None else link.tb_lineno
        rebuilt = TracebackType(rebuilt, link.tb_frame, link.tb_lasti, line)
    return rebuilt


def _links(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _frames(tb: TracebackType | None) -> tuple[Frame, ...]:
    """Outermost first, without IPython's, which differ between versions and say nothing."""
    frames = [
        Frame(file=link.tb_frame.f_code.co_filename, line=link.tb_lineno, function=link.tb_frame.f_code.co_name)
        for link in _links(tb)
        if not link.tb_frame.f_code.co_filename.startswith(_IPYTHON_FOLDER)
    ]
    if len(frames) > NUM_FRAMES:
        frames = frames[: NUM_FRAMES // 2] + frames[-NUM_FRAMES // 2 :]
    return tuple(frames)


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as failure:
        text = f"<its __str__ raised {type(failure).__name__}>"
    return _clean(_shortened(text))


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, (list, tuple)) else []


def _plain(error: BaseException, text: str) -> list[str]:
    try:
        return ["".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip("\n")]
    except Exception:
        return [f"{type(error).__name__}: {text}"]


def _shortened(text: str) -> str:
    if len(text) <= EVALUE_CHARS:
        return text
    half = EVALUE_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _bounded(rendered: list[str]) -> tuple[str, ...]:
    """The strings of a traceback; of one that is too long, the first and the last of them."""
    strings = [_clean(part if len(part) <= TRACEBACK_CHARS // 2 else _shortened(part)) for part in rendered]
    total = sum(map(len, strings))
    if total <= TRACEBACK_CHARS:
        return tuple(strings)
    first: list[str] = []
    last: list[str] = []
    room = TRACEBACK_CHARS // 2
    while strings and len(strings[0]) <= room:
        room -= len(strings[0])
        first.append(strings.pop(0))
    room = TRACEBACK_CHARS // 2
    while strings and len(strings[-1]) <= room:
        room -= len(strings[-1])
        last.append(strings.pop())
    return (*first, f"    [... {len(strings)} parts of this traceback left out]\n", *reversed(last))


def _clean(text: str) -> str:
    """Without lone surrogates, which cannot travel."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class _TooLarge(Exception):
    pass


class _Bounded(io.BytesIO):
    def write(self, data: object, /) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if self.tell() + view.nbytes > PICKLE_BYTES:
            raise _TooLarge
        return super().write(view)


def _pickled(error: BaseException) -> bytes | None:
    """The exception itself, if its class can be imported elsewhere, it is small, and it comes back to life."""
    kind = type(error)
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or module is None or getattr(module, kind.__qualname__, None) is not kind:
        return None
    sink = _Bounded()
    try:
        pickle.Pickler(sink, protocol=5).dump(error)
        data = sink.getvalue()
        return data if type(pickle.loads(data)) is kind else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever a user's __reduce__ or __init__ does
        return None
