"""Replaces what needs a terminal, which a rank has not: input(), getpass(), pdb, `exit`."""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import builtins
import contextlib
import getpass
import os
import pdb
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from IPython.core.autocall import ExitAutocall

from meshbook.errors import MeshbookError
from meshbook.rank.cells.debugger import AskCommand, RankDebugger
from meshbook.wire.messages import DebuggerStop


class TerminalReplacement:
    """The process's input and debugger without a terminal.

    Attributes:
        request_input: called by input() and getpass() with the prompt and whether to hide what is typed; returns the
            text, or raises EOFError or KeyboardInterrupt.
        ask_command: called by the debugger.
        stop_elsewhere: stops the thread of a breakpoint() in another debugger, and returns whether one is attached.
        can_ask: whether a client gives the debugger commands.
    """

    def __init__(self, cell_title: Callable[[str], str | None]) -> None:
        """
        Args:
            cell_title: of the cell with a file name, "cell 12"; None: it is no cell's.
        """
        self.request_input: Callable[[str, bool], str] = _refuse_input
        self.ask_command: AskCommand = _refuse_command
        self.can_ask: Callable[[], bool] = lambda: False
        self.stop_elsewhere: Callable[[FrameType], bool] = lambda _frame: False
        self._cell_title = cell_title
        self._debugger: RankDebugger | None = None
        self._pid = os.getpid()

    def install(self, undo: contextlib.ExitStack) -> None:
        """Install the replacements in the process, and their removal in `undo`."""
        for owner, name, value in (
            (sys, "breakpointhook", self._breakpoint),
            (pdb, "set_trace", self._set_trace),
            (pdb, "post_mortem", self._post_mortem),
            (pdb, "pm", self._post_mortem),
            (builtins, "input", self._input),
            (getpass, "getpass", self._getpass),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def stop_now(self, frame: FrameType, user_frame: FrameType) -> None:
        """Stop within a line, from a signal handler; see `RankDebugger.stop_now`."""
        self._get_debugger().stop_now(frame, user_frame)

    def stop_at_next_line(self, frame: FrameType | None, is_wanted: Callable[[], bool]) -> None:
        """Stop at the next line of user code; see `RankDebugger.stop_at_next_line`."""
        self._get_debugger().stop_at_next_line(frame, is_wanted)

    def inspect(self, error: BaseException, *, is_all: bool = False) -> bool:
        """Look at the frames of an exception in the debugger. Return False if there is nobody to give it commands.

        Args:
            is_all: see `RankDebugger.inspect`.
        """
        if not self._can_debug():
            return False
        self._get_debugger().inspect(error, is_all=is_all)
        return True

    def stop_at_first_line(self) -> None:
        """Have the debugger stop at the first line of what the caller executes next.

        Raises:
            MeshbookError: there is nobody to give it commands.
        """
        if _passes_breakpoints_by():
            return
        if not self._can_debug():
            raise MeshbookError(self._nobody_to_ask("a cell cannot stop at its first line"))
        self._get_debugger().stop_at_first_line()

    def stop_at_end(self) -> None:
        """Stop in the debugger at the end of a cell, if a breakpoint is its last line."""
        if self._debugger is not None:
            self._debugger.stop_at_end()

    def end_debugging(self) -> None:
        """Remove what the debugger has left in the process, at the end of a cell."""
        if self._debugger is not None:
            self._debugger.end()

    def debug_advice(self) -> str:
        """Return how to inspect a failure without the debugger."""
        return (
            "There is nobody to give the debugger commands. What the failure left is still there: `%debug` in a "
            "notebook or a terminal looks into it, and sys.last_value is the exception."
        )

    def refuse_exit(self) -> NoReturn:
        raise MeshbookError(
            "exit does not end a rank: the mesh would lose its state. `%mesh stop` ends the mesh, `%mesh kill` with a "
            "rank's number that rank; os._exit() ends its process for good"
        )

    def _input(self, prompt: object = "", /) -> str:
        return self._ask(str(prompt), False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None, **_options: Any) -> str:
        return self._ask(str(prompt), True)

    def _ask(self, prompt: str, password: bool) -> str:
        try:
            return self.request_input(prompt, password)
        except KeyboardInterrupt:  # anew, without the frames of the request
            raise KeyboardInterrupt from None

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Handle breakpoint(): call what PYTHONBREAKPOINT names, unless it is pdb; else stop in the debugger."""
        if os.environ.get("PYTHONBREAKPOINT", "pdb.set_trace") not in ("", "pdb.set_trace"):
            return sys.__breakpointhook__(*args, **kwargs)
        return self._set_trace(_depth=2, header=kwargs.get("header"))

    def _set_trace(self, *, header: str | None = None, _depth: int = 1, **_options: Any) -> None:
        if _passes_breakpoints_by() or self.stop_elsewhere(sys._getframe(_depth)):
            return
        if not self._can_debug():
            raise MeshbookError(self._nobody_to_ask("a breakpoint cannot stop here"))
        self._get_debugger().stop_at(sys._getframe(_depth), header)

    def _post_mortem(self, error: Any = None, *_args: Any) -> None:
        if _passes_breakpoints_by():
            return
        if error is None:
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            raise ValueError("pdb.post_mortem() takes the exception on a rank; without one, there must have been one")
        if not self.inspect(error):
            raise MeshbookError(self._nobody_to_ask("a failure cannot be looked at here"))

    def _can_debug(self) -> bool:
        """Whether the debugger can stop this thread: the main one of a rank, not of a child, whose client replies."""
        return threading.current_thread() is threading.main_thread() and os.getpid() == self._pid and self.can_ask()

    def _get_debugger(self) -> RankDebugger:
        if self._debugger is None:
            self._debugger = RankDebugger(self.ask_command, self._cell_title)
        return self._debugger

    def _nobody_to_ask(self, consequence: str) -> str:
        return (
            f"there is nobody to give the debugger commands here, so {consequence}: it takes them from the notebook or "
            "terminal that waits for the cell, on the main thread. MESHBOOK_BREAKPOINT=0 (in the ranks' environment) "
            "passes breakpoints by"
        )


class Exiter(ExitAutocall):
    """`exit` and `quit`, with or without parentheses."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell

    def __call__(self, *_args: Any) -> None:
        self._shell.ask_exit()


def _passes_breakpoints_by() -> bool:
    return os.environ.get("MESHBOOK_BREAKPOINT") == "0"


def _refuse_command(_stop: DebuggerStop) -> str:
    raise EOFError("there is nobody to give the debugger commands")


def _refuse_input(_prompt: str, _password: bool) -> str:
    raise EOFError("there is nobody to ask for input() here")
