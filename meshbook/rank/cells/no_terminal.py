"""Replaces what needs a terminal, which a rank has not: input(), getpass(), debuggers, `exit`."""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import builtins
import contextlib
import getpass
import os
import pdb
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from IPython.core.autocall import ExitAutocall

from meshbook.errors import MeshbookError


class TerminalReplacement:
    """The process's input and debuggers without a terminal.

    Attributes:
        request_input: called by input() and getpass() with the prompt and whether to hide what is typed; returns the
            text, or raises EOFError or KeyboardInterrupt.
    """

    def __init__(self, presets: Mapping[str, Any]) -> None:
        """
        Args:
            presets: has the number of this rank as `rank`, once that is known.
        """
        self.request_input: Callable[[str, bool], str] = _refuse_input
        self._presets = presets

    def install(self, undo: contextlib.ExitStack) -> None:
        """Install the replacements in the process, and their removal in `undo`."""
        for owner, name, value in (
            (sys, "breakpointhook", self._breakpoint),
            (pdb, "set_trace", self._set_trace),
            (builtins, "input", self._input),
            (getpass, "getpass", self._getpass),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def debug_advice(self) -> str:
        """Return how to inspect a failure without a debugger."""
        return (
            f"{self._rank_title()} has no terminal for a debugger. What the failure left is still there: in a cell "
            f"that runs on this rank only ({self._magic_for_this_rank()}), `%tb Verbose` shows the variables of each "
            f"frame, and sys.last_value is the exception. From outside, the process is pid {os.getpid()}."
        )

    def refuse_exit(self) -> NoReturn:
        raise MeshbookError(
            "exit does not end a rank: the mesh would lose its state. `%mesh stop` ends the mesh, `%mesh kill "
            f"{self._presets.get('rank', 0)}` this rank; os._exit() ends its process for good"
        )

    def _input(self, prompt: object = "", /) -> str:
        return self.request_input(str(prompt), False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None, **_options: Any) -> str:
        return self.request_input(str(prompt), True)

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Handle breakpoint(): call what PYTHONBREAKPOINT names, unless it is pdb; else `_set_trace`."""
        if os.environ.get("PYTHONBREAKPOINT", "pdb.set_trace") not in ("", "pdb.set_trace"):
            return sys.__breakpointhook__(*args, **kwargs)
        return self._set_trace()

    def _set_trace(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise MeshbookError(
            f"{self._rank_title()} has no terminal for a debugger, so a breakpoint cannot stop here. Look at the "
            "variables of this frame with `%tb Verbose` in a cell that runs on this rank only "
            f"({self._magic_for_this_rank()}), or print them here; PYTHONBREAKPOINT=0 passes breakpoints by"
        )

    def _rank_title(self) -> str:
        rank = self._presets.get("rank")
        return "A rank" if rank is None else f"Rank {rank}"

    def _magic_for_this_rank(self) -> str:
        return f"%%mesh --ranks {self._presets.get('rank', 0)}"


class Exiter(ExitAutocall):
    """`exit` and `quit`, with or without parentheses."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell

    def __call__(self, *_args: Any) -> None:
        self._shell.ask_exit()


def _refuse_input(_prompt: str, _password: bool) -> str:
    raise EOFError("there is nobody to ask for input() here")
