"""The debugger of a rank: Python's pdb, whose commands come from the client that runs the cell, as replies to input().

What pdb would print goes with the next request for a command, so that the client can fold the answers of all ranks and
show them before it prompts again.
"""

# mypy: allow-untyped-calls, allow-untyped-defs
# (pdb has no annotations)

from __future__ import annotations

import contextlib
import ctypes
import io
import linecache
import os
import pdb
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from meshbook.diagnose.source_files import is_cell_file, is_user_file, library_of, short_path
from meshbook.errors import message_of
from meshbook.wire.messages import DebuggerStop

# Called with where the rank is stopped; returns a command. Raises EOFError if nobody can give one.
AskCommand = Callable[[DebuggerStop], str]
# Returns the title of the cell with a file name, "cell 12"; None: it is no cell's.
CellTitle = Callable[[str], str | None]

# Modules that stepping passes over: what runs a cell, and the wrapper of collectives.
_SKIPPED: Final = ("meshbook", "meshbook.*", "IPython.*", "contextlib", "torch.distributed.*", "torch._ops")
_RUNNER_FILE: Final = os.path.join("meshbook", "rank", "cells", "code_runner.py")  # calls the user's code
_MAX_VARIABLES: Final = 8
_MAX_TEXT_CHARS: Final = 30
_PRESETS: Final = ("rank", "local_rank", "world_size")


class RankDebugger(pdb.Pdb):
    """A debugger without a terminal. Main thread only."""

    def __init__(self, ask: AskCommand, cell_title: CellTitle) -> None:
        self._printed = io.StringIO()
        super().__init__(
            stdin=_Commands(self),  # type: ignore[arg-type]
            stdout=self._printed,
            skip=list(_SKIPPED),
            nosigint=True,
            readrc=False,
        )
        self.prompt = ""
        self._ask, self._cell_title = ask, cell_title
        self._arrived = ""  # "stopped at": it stopped somewhere, and this is not shown yet
        self._seeks_user_code = False  # it stops at the next line of user code
        self._is_stop_wanted: Callable[[], bool] = lambda: True
        self._looked_at: FrameType | None = None  # the frame that commands look at first; None: the innermost
        self._is_post_mortem = False  # `%debug` looks at a failure
        self._due: FrameType | None = None  # of a breakpoint that has come, and at which it has not stopped yet

    # ---- entering and leaving

    def stop_at(self, frame: FrameType, header: str | None = None) -> None:
        """Stop before the next line of a frame."""
        if header is not None:
            self.message(header)
        self._due = frame
        self.set_trace(frame)

    def stop_at_end(self) -> None:
        """Stop at the end of a cell whose last line is a breakpoint: no line comes after it to stop at."""
        if self._due is not None:
            sys.settrace(None)  # it would trace the debugger from here on
            self.interaction(self._due, None)

    def stop_at_first_line(self) -> None:
        """Stop at the first line of what the caller executes next."""
        self.reset()
        self.botframe = None  # the first frame that is called
        self.set_step()
        sys.settrace(self.trace_dispatch)

    def stop_at_next_line(self, frame: FrameType | None, is_wanted: Callable[[], bool]) -> None:
        """Stop at the next line of user code that this thread comes to.

        Args:
            frame: the thread's innermost one now.
            is_wanted: whether it is still to stop there.
        """
        self._trace_from(frame)
        self._seeks_user_code, self._is_stop_wanted = True, is_wanted
        self.set_step()
        sys.settrace(self.trace_dispatch)

    def stop_now(self, frame: FrameType, user_frame: FrameType) -> None:
        """Stop within a line, from a signal handler.

        Args:
            frame: the innermost one of the interrupted thread, this one.
            user_frame: on its stack; commands look at it first.
        """
        sys.settrace(None)  # a debugger that steps through this thread would trace what follows here
        self._trace_from(frame)
        self._looked_at, self._arrived = user_frame, "stopped within"
        self.interaction(frame, None)
        if self.breaks or self.stoplineno != -1:  # not "continue"
            sys.settrace(self.trace_dispatch)

    def _trace_from(self, frame: FrameType | None) -> None:
        """Have these frames traced once there is a trace function, this one and all that have called it."""
        self.reset()
        while frame is not None:
            frame.f_trace = self.trace_dispatch
            self.botframe = frame
            frame = frame.f_back

    def inspect(self, error: BaseException, *, is_all: bool) -> None:
        """Look at the frames in which an exception was raised.

        Args:
            is_all: the running cell does nothing else. A Stop ends the look, and is not raised: it would be the last
                failure from then on.
        """
        self.message(f"{type(error).__name__}: {message_of(error)}".partition("\n")[0][:500])
        self.reset()
        self._is_post_mortem = is_all
        try:
            self.interaction(None, error.__traceback__)
        except KeyboardInterrupt:
            if not is_all:
                raise
        finally:
            self._is_post_mortem = False

    def end(self) -> None:
        """Stop tracing, at the end of a cell: breakpoints end with it."""
        self._due = None
        is_tracing = sys.gettrace() == self.trace_dispatch  # another debugger's trace function stays
        if not is_tracing and not self.breaks:
            return
        if is_tracing:
            sys.settrace(None)
        self.clear_all_breaks()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    # ---- the dialogue

    def next_command(self) -> str:
        """Request a command from the client; without one, go on."""
        text = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        frame, line = self.stack[self.curindex]
        try:
            place = describe_place(frame, line, self._cell_title)
            has_breakpoints, is_post_mortem = bool(self.breaks), self._is_post_mortem
            return self._ask(DebuggerStop(place, text, has_breakpoints, is_post_mortem))
        except EOFError:
            self.clear_all_breaks()
            return "continue"
        except KeyboardInterrupt:  # anew, without the frames of the request
            raise KeyboardInterrupt from None

    def stop_here(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        if self._due is not None and is_user_file(self._due.f_code.co_filename) and not is_user_file(file):
            return False  # of the event loop, in which a cell ends
        if not self._seeks_user_code:
            return bool(super().stop_here(frame)) and _is_for_user(frame)
        if self._is_stop_wanted():
            return is_user_file(file)
        self._seeks_user_code = False
        self.set_continue()
        return False

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        # A cell begins at its first line.
        if frame.f_code.co_name != "<module>" and not self._seeks_user_code:
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        # ... and a step from its last line ends it.
        if frame.f_code.co_name != "<module>" and not self._seeks_user_code:
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        if not self._seeks_user_code:
            super().user_exception(frame, exc_info)

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        self._arrived = self._arrived or "stopped at"
        self._seeks_user_code, self._due = False, None
        super().interaction(frame, tb_or_exc)

    def _cmdloop(self) -> None:
        try:
            self.cmdloop()
        except KeyboardInterrupt:  # Stop: it ends the cell, not a command of the debugger
            self.end()
            raise

    def get_stack(self, f: Any, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack from the outermost frame of the cell on."""
        stack, index = super().get_stack(f, t)
        runners = [at for at, (frame, _) in enumerate(stack) if frame.f_code.co_filename.endswith(_RUNNER_FILE)]
        first = runners[-1] + 1 if runners and runners[-1] < index else 0
        last, looked_at = len(stack), self._looked_at
        if looked_at is not None:  # without Meshbook's own code below the user's line
            self._looked_at = None
            index = next(at for at, (frame, _) in enumerate(stack) if frame is looked_at)
            inner = (at for at in range(index, last) if library_of(stack[at][0].f_code.co_filename) == "meshbook")
            last = next(inner, last)
        return stack[first:last], index - first

    def print_stack_entry(self, frame_lineno: tuple[FrameType, int], *_: Any) -> None:
        frame, line = frame_lineno
        place = describe_place(frame, line, self._cell_title)
        if self._arrived:
            self.message(" · ".join([f"{self._arrived} {place}", *_scalars_of(frame)]))
            self._arrived = ""
        else:
            self.message(f"{'>' if frame is self.curframe else ' '} {place}")
        if source := linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip():
            self.message(f"-> {source}")

    def default(self, line: str) -> None:
        """Run a statement. What it assigns to a function's variables is theirs, whichever frame is looked at."""
        super().default(line)
        if sys.version_info < (3, 13):  # where f_locals is a copy, written back only by a trace function
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))

    def do_quit(self, arg: str) -> bool | None:
        """End the cell. Clients end it on all ranks; this is for one that is not Meshbook's."""
        self.end()
        raise KeyboardInterrupt

    do_q = do_exit = do_EOF = do_quit

    def do_interact(self, arg: str) -> None:
        self.error("interact needs a terminal; type expressions and statements here")

    def do_debug(self, arg: str) -> None:
        self.error("debug is not served; use s to step into a call")

    do_run = do_restart = do_interact


class _Commands:
    """Standard input of the debugger."""

    def __init__(self, debugger: RankDebugger) -> None:
        self._debugger = debugger

    def readline(self) -> str:
        return self._debugger.next_command() + "\n"


def describe_place(frame: FrameType, line: int, cell_title: CellTitle) -> str:
    """Return "cell 12, line 40 in train"."""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    where = cell_title(file) or ("a notebook cell" if is_cell_file(file) else short_path(file))
    return f"{where}, line {line}" + ("" if function == "<module>" else f" in {function}")


def innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code on a stack; None: there is none."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _scalars_of(frame: FrameType) -> list[str]:
    """Return the numbers and short texts that the code of a frame names, "loss=2.31"; those used last come last."""
    code = frame.f_code
    names = code.co_names if code.co_name == "<module>" else code.co_varnames + code.co_freevars
    values = frame.f_locals
    found = []
    for name in names:
        if name in _PRESETS:
            continue
        with contextlib.suppress(Exception):  # of a user's __repr__
            if name in values and (text := _describe_scalar(values[name])) is not None:
                found.append(f"{name}={text}")
    return found[-_MAX_VARIABLES:]


def _describe_scalar(value: Any) -> str | None:
    """Return a number, a short text, or a tensor of one number in the CPU's memory as text; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.dim() or value.device.type != "cpu":  # reading another device's memory may wait for a collective
            return None
        value = value.item()
    if isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and len(value) <= _MAX_TEXT_CHARS else None


def _is_for_user(frame: FrameType | None) -> bool:
    """Whether a frame is the user's or was called by one; the event loop, into which a step may leave, is not."""
    while frame is not None and not frame.f_code.co_filename.endswith(_RUNNER_FILE):
        if is_user_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
