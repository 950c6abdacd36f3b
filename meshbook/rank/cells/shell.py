"""The IPython shell of a rank: magics, formatters, history and hooks, without a terminal, files or a kernel.

Displays go to the rank's `OutputBuffer`, the value of the last expression is returned, and nothing in it exits the
process. Cells run in it by way of `code_runner`. Does not depend on messages, process groups, hosts or other ranks.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from typing import Any, Final, Literal, NoReturn

# Imported here for the ranks that are forked from a process that has imported this module. Otherwise IPython would
# import these in every rank, at its first traceback, completion or inspection, at 20 to 200 ms and some MiB each.
import IPython.core.completer
import IPython.core.magics.basic
import IPython.core.magics.execution
import IPython.core.oinspect
import IPython.core.ultratb
import stack_data  # noqa: F401
import traitlets
from IPython.core.autocall import ExitAutocall
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.display_trap import DisplayTrap
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.text import LSString, SList
from traitlets.config import Config

from meshbook.rank.cells import shell_commands, tracebacks
from meshbook.rank.cells.displays import RankDisplayHook, RankDisplayPublisher
from meshbook.rank.cells.event_loop import CellEventLoop
from meshbook.rank.cells.namespace import is_user_name
from meshbook.rank.cells.no_terminal import Exiter, TerminalReplacement
from meshbook.rank.cells.shell_storage import InMemoryProfileDir, MemoryStore, RankHistory, without_database
from meshbook.rank.cells.text_bars import TextBars
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.previews import import_completion

_INLINE_BACKEND: Final = "module://matplotlib_inline.backend_inline"


class RankShell(InteractiveShell):
    """The shell in which a rank's user code runs. One per process: create it with `RankShell.make`.

    Attributes:
        output: receives everything that cells print and display.
        event_loop: runs the coroutines of cells.
        terminal: input and debuggers without a terminal.
        undo: what `close` undoes.
    """

    displayhook: RankDisplayHook
    # Traits and attributes of IPython whose annotations are too narrow for their use here.
    compile: Any
    configurables: Any
    history_manager: Any
    InteractiveTB: Any
    SyntaxTB: Any

    @classmethod
    def make(cls, *, output: OutputBuffer, gate: InterruptGate) -> RankShell:
        """Create and install the shell of this process: `get_ipython()` returns it, and input() goes through it."""
        cls.clear_instance()
        InteractiveShell.clear_instance()  # an instance of another class, inherited by a fork
        config = Config()
        # Jedi is slow, imports what it completes, and is not needed where the objects themselves are available.
        config.IPCompleter.use_jedi = False
        config.IPCompleter.evaluation = "limited"
        # Longer files are not parsed completely for a traceback: those of torch would take half a second.
        IPython.core.ultratb.FAST_THRESHOLD = 1000
        shell = cls.instance(config=config, output=output, gate=gate)
        shell.install()
        return shell

    def __init__(self, *, output: OutputBuffer, gate: InterruptGate, **kwargs: Any) -> None:
        self.output = output
        self.event_loop = CellEventLoop()
        self.undo = contextlib.ExitStack()
        self._gate = gate
        self.rl_next_input: str | None = None  # what a cell has put into the next one
        self._preset_names: dict[str, Any] = {}
        self.terminal = TerminalReplacement(self.cell_title)
        with without_database():
            # display_page: pager output is displayed instead, because `less` would wait for a terminal forever.
            super().__init__(display_page=True, **kwargs)
        import_completion.install(self)
        self.db = MemoryStore()
        self.loop_runner = self.event_loop.run
        self.InteractiveTB.tb_offset = 0  # frames that are not the user's are removed by file name, not by count

    # -----------------------------------------------------------------------------------------------------------------
    # Construction: replaces what InteractiveShell does with files and terminals

    def init_prompts(self) -> None:
        """Leave `sys.ps1` unset: a rank is a process of a job, and libraries that find a prompt refuse to run there."""

    def init_ipython_dir(self, ipython_dir: str | None) -> None:
        """Create no folder: a rank stores nothing on disk."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        self.profile_dir = InMemoryProfileDir()

    def init_environment(self) -> None:
        """Set the environment that ipykernel gives its subprocesses: colours on, pagers off."""
        for name, value in {
            "TERM": "xterm-color",
            "CLICOLOR": "1",
            "FORCE_COLOR": "1",
            "CLICOLOR_FORCE": "1",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
        }.items():
            os.environ[name] = value
        # Matplotlib and plotly read these when they are imported; figures then become displays.
        if importlib.util.find_spec("matplotlib_inline") is not None:
            os.environ.setdefault("MPLBACKEND", _INLINE_BACKEND)
        os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")  # else it sends its whole script with each figure

    def init_history(self) -> None:
        self.history_manager = RankHistory(shell=self, parent=self, enabled=False, hist_file=":memory:")
        self.configurables.append(self.history_manager)

    def init_builtins(self) -> None:
        super().init_builtins()
        self.builtin_trap = _PersistentBuiltinTrap(shell=self)

    def init_display_pub(self) -> None:
        self.display_pub = RankDisplayPublisher(parent=self, shell=self)
        self.configurables.append(self.display_pub)

    def init_displayhook(self) -> None:
        self.displayhook = RankDisplayHook(parent=self, shell=self, cache_size=self.cache_size)
        self.configurables.append(self.displayhook)
        self.display_trap = DisplayTrap(hook=self.displayhook)

    @traitlets.default("exiter")
    def _exiter_default(self) -> ExitAutocall:
        return Exiter(self)

    def install(self) -> None:
        """Install this shell's hooks, input() and breakpoint() in the process."""
        self.builtin_trap.activate()
        self.undo.callback(setattr, sys, "excepthook", sys.excepthook)
        sys.excepthook = self.excepthook
        self.terminal.install(self.undo)
        TextBars().install(self.undo)

    def close(self) -> None:
        """Undo `install`, so that another shell can be created in this process."""
        self.undo.close()
        self.builtin_trap.deactivate()
        self.restore_sys_module_state_of_main()
        self.event_loop.close()
        type(self).clear_instance()

    def restore_sys_module_state_of_main(self) -> None:
        """Make `__main__` the module again that it was before this shell."""
        if self._orig_sys_modules_main_mod is not None:
            sys.modules[self._orig_sys_modules_main_name] = self._orig_sys_modules_main_mod

    def bind_presets(self, **names: Any) -> None:
        """Bind the names that exist from the start: `%who` does not list them, and no cell reports them as bound."""
        self._preset_names.update(names)
        self.push(names, interactive=False)

    def rebind_presets(self, **names: Any) -> None:
        """Give names that exist from the start other values, but for those that user code has bound to its own."""
        missing = object()
        kept = {name for name, value in self._preset_names.items() if self.user_ns.get(name, missing) is not value}
        self._preset_names.update(names)
        self.push({name: value for name, value in names.items() if name not in kept}, interactive=False)

    def user_names(self) -> list[str]:
        """Return the names in the namespace that user code has bound."""
        hidden, missing = self.user_ns_hidden, object()
        return [
            name
            for name, value in list(self.user_ns.items())
            if is_user_name(name) and hidden.get(name, missing) is not value
        ]

    def restore_namespace(self) -> None:
        """Bind the shell's and the rank's own names again if a cell has cleared its globals()."""
        if "_oh" not in self.user_ns:
            self.init_user_ns()
            self.push(self._preset_names, interactive=False)

    def reset(self, new_session: bool = True, aggressive: bool = False) -> None:
        """Run `%reset`: delete everything but the rank's own names."""
        super().reset(new_session, aggressive)
        self.push(self._preset_names, interactive=False)

    # -----------------------------------------------------------------------------------------------------------------
    # Failures

    def render(self, error: BaseException) -> list[str]:
        """Return IPython's traceback of the exception."""
        return tracebacks.render(error, self.InteractiveTB, self.SyntaxTB)

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        """Return the exception that `%tb` and failed magics show, without Meshbook's frames."""
        kind, value, _ = super()._get_exc_info(exc_tuple)
        tracebacks.strip_meshbook_frames(value)
        sys.last_traceback = value.__traceback__
        return kind, value, value.__traceback__

    def cell_title(self, file: str) -> str | None:
        """Return "cell 12" for the file name of a cell."""
        kind_and_name = self.compile.format_code_name(file)
        return None if kind_and_name is None else f"cell {kind_and_name[1].removeprefix('In[').removesuffix(']')}"

    def debugger(self, force: bool = False) -> None:
        """Handle `%debug`, and `%pdb on` after a failure: look at the last failure of this rank in the debugger."""
        if not (force or self.call_pdb):
            return
        error = getattr(sys, "last_value", None)
        if error is None:
            print("Nothing has failed on this rank yet.")
        elif not self.terminal.inspect(error, is_all=force) and force:
            wanted, self.call_pdb = self.call_pdb, False  # with which IPython would call this method again
            try:
                self.showtraceback()
            finally:
                self.call_pdb = wanted
            print(self.terminal.debug_advice())

    # -----------------------------------------------------------------------------------------------------------------
    # Replacements for a terminal

    def enable_gui(self, gui: str | None = None) -> None:
        """Accept only what needs no event loop: figures are drawn inline."""
        if gui not in (None, "inline", "agg"):
            raise UsageError(f"a rank has no screen for {gui} windows; use %matplotlib inline")

    def ask_exit(self) -> NoReturn:
        """Refuse `exit`, `quit` and `%exit`."""
        self.terminal.refuse_exit()

    def system_piped(self, cmd: str) -> None:
        """Run `!cmd`: stream its output and set `_exit_code`. A SIGINT ends the command and the cell."""
        if cmd.rstrip().endswith("&"):
            raise OSError("a command in the background would outlive its output; use subprocess.Popen for that")
        code = shell_commands.run_streaming(self.var_expand(cmd, depth=1), self._gate)
        self.user_ns["_exit_code"] = code
        if getattr(self, "system_raise_on_error", False) and code != 0:
            raise subprocess.CalledProcessError(code, cmd)

    system = system_piped

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run `x = !cmd` and return its output as lines."""
        if cmd.rstrip().endswith("&"):
            raise OSError("a command in the background has no output to wait for")
        completed = shell_commands.run_captured(self.var_expand(cmd, depth=depth + 1))
        self.user_ns["_exit_code"] = completed.returncode
        if getattr(self, "system_raise_on_error", False) and completed.returncode != 0:
            raise subprocess.CalledProcessError(completed.returncode, cmd)
        return SList(completed.stdout.splitlines()) if split else LSString(completed.stdout)


class _PersistentBuiltinTrap(BuiltinTrap):
    """Leaves `get_ipython` in the builtins permanently.

    IPython's own trap adds and removes it around each use and counts the uses; the main and the service thread would
    corrupt the count.
    """

    def __enter__(self) -> _PersistentBuiltinTrap:
        return self

    def __exit__(self, *_exc_info: object) -> Literal[False]:
        return False
