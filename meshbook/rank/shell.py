"""The IPython shell of a rank: runs cells, records their values, and never exits the process.

It is an `InteractiveShell` without a terminal, without files and without a kernel. Output and displays go to the rank's
`OutputBuffer`, the value of the last expression is returned, and input() calls a function that the rank sets. Cells run
through a custom path that is leaner than `run_cell` and arms interrupts around user code only. Everything that IPython
itself starts (`%run`, `%rerun`, extensions) uses the inherited path.

Does not depend on messages beyond the types of its arguments, nor on process groups, hosts or other ranks.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import fnmatch
import getpass
import importlib.util
import inspect
import os
import pdb
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, ModuleType, TracebackType
from typing import Any, Final, Literal, NoReturn

# Imported here for the ranks that are forked from a process that has imported this module. Otherwise IPython would
# import these in every rank, at its first traceback, completion or inspection, at 20 to 200 ms and some MiB each.
import IPython.core.completer
import IPython.core.display_functions
import IPython.core.magics.basic
import IPython.core.magics.execution
import IPython.core.oinspect
import IPython.core.ultratb
import stack_data  # noqa: F401
import traitlets
from IPython.core.autocall import ExitAutocall
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.display_trap import DisplayTrap
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from IPython.core.macro import Macro
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from traitlets.config import Config

from meshbook.clock import perf_counter
from meshbook.errors import MeshbookError
from meshbook.rank import shell_commands, tracebacks
from meshbook.rank.capture import OutputBuffer
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.namespace import NamespaceTracker
from meshbook.rank.preview import encode_mime, preview, to_json_data, type_name
from meshbook.wire.messages import ClearOutput, Display, Notice, Preview, RankError, RunCell

# How many of `_1`, `_i1`, `_2`, ... exist at a time.
MAX_NUMBERED_NAMES: Final = 200

_INLINE_BACKEND: Final = "module://matplotlib_inline.backend_inline"
# Views of widgets: the objects behind them are on the rank, where no front end can reach them.
_WIDGET_VIEW: Final = "application/vnd.jupyter.widget-view+json"

# Saved separately, because the code that uses `_BUILTINS` runs when builtins are missing.
_is_callable: Final = callable
_BUILTINS: Final = [
    (name, thing) for name, thing in vars(builtins).items() if isinstance(thing, type | BuiltinFunctionType)
]

# Text that IPython's input transformations may change: magics, shell commands, help, pasted prompts, quoting calls, an
# indented first line. The pattern matches a superset, so a false match costs only time. Text without a match is already
# Python, and tokenizing it several times (30 us a line) changes nothing.
_MAY_NEED_TRANSFORM: Final = re.compile(r"\A\s|\?|^\s*(?:[%!,;/]|>>>|\.\.\.|In ?\[|\[)|=\s*[%!]", re.MULTILINE)
_FIRST_WORD: Final = re.compile(r"[\w.]*")


@dataclass(slots=True)
class CellRun:
    """How a cell or a function call ended."""

    status: Literal["ok", "error", "interrupted"]
    has_result: bool = False  # whether the last expression had a value other than None
    result: Any = None
    error: RankError | None = None  # for "error" and "interrupted"
    bound: tuple[str, ...] = ()  # names that it bound in the namespace; cells only
    unbound: tuple[str, ...] = ()  # names that it deleted; cells only
    seconds: float = 0.0


class RankShell(InteractiveShell):
    """The shell in which a rank's user code runs. One per process: create it with `RankShell.make`.

    Attributes:
        output: receives everything that cells print and display.
        gate: what SIGINT does.
        request_input: called by input() and getpass() with the prompt and whether to hide what is typed; returns the
            text, or raises EOFError or KeyboardInterrupt.
        allow_input: whether the running cell may request input; read by `request_input`.
        running_file: the file name that the running cell was compiled under; None between cells.
        awaited_coroutine: the coroutine that the shell's event loop runs; None when it runs none.
    """

    displayhook: RankDisplayHook
    # Traits and attributes of IPython whose annotations are too narrow for their use here.
    compile: Any
    configurables: Any
    history_manager: Any
    InteractiveTB: Any
    SyntaxTB: Any

    @classmethod
    def make(cls, *, output: OutputBuffer, gate: InterruptGate | None = None) -> RankShell:
        """Create and install the shell of this process: `get_ipython()` returns it, and input() goes through it."""
        cls.clear_instance()
        InteractiveShell.clear_instance()  # an instance of another class, inherited by a fork
        config = Config()
        # Jedi is slow, imports what it completes, and is not needed where the objects themselves are available.
        config.IPCompleter.use_jedi = False
        config.IPCompleter.evaluation = "limited"
        # Longer files are not parsed completely for a traceback: those of torch would take half a second.
        IPython.core.ultratb.FAST_THRESHOLD = 1000
        shell = cls.instance(config=config, output=output, gate=gate or InterruptGate())
        shell.install()
        return shell

    def __init__(self, *, output: OutputBuffer, gate: InterruptGate, **kwargs: Any) -> None:
        self.output = output
        self.gate = gate
        self.request_input: Callable[[str, bool], str] = _refuse_input
        self.allow_input = False
        self.running_file: str | None = None
        self.awaited_coroutine: Coroutine[Any, Any, Any] | None = None
        self._last_call_id = ""
        self._num_displays = 0  # displays of the last cell that have an id made here
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undo_patches: list[Callable[[], object]] = []
        self._preset_names: dict[str, Any] = {}
        self._preset_modules: dict[str, ModuleType] = {}  # modules that existed when the presets were bound
        self._numbered_names: deque[str] = deque()
        with _without_database():
            # display_page: pager output is displayed instead, because `less` would wait for a terminal forever.
            super().__init__(display_page=True, **kwargs)
        self.db = _MemoryStore()
        self.loop_runner = self.run_coroutine
        self.InteractiveTB.tb_offset = 0  # frames that are not the user's are removed by file name, not by count
        self._namespace_tracker = NamespaceTracker(self.user_ns, self.user_ns_hidden)
        self._default_transforms = self._current_transforms()

    # -----------------------------------------------------------------------------------------------------------------
    # Construction: replaces what InteractiveShell does with files and terminals

    def init_ipython_dir(self, ipython_dir: str | None) -> None:
        """Create no folder: a rank stores nothing on disk."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        self.profile_dir = _InMemoryProfileDir()

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
        # Matplotlib reads this when it is imported; figures then become displays at the end of the cell.
        if importlib.util.find_spec("matplotlib_inline") is not None:
            os.environ.setdefault("MPLBACKEND", _INLINE_BACKEND)

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
        return _Exiter(self)

    def install(self) -> None:
        """Install this shell's input(), breakpoint() and hooks in the process."""
        self.builtin_trap.activate()
        for owner, name, value in (
            (sys, "excepthook", self.excepthook),
            (sys, "breakpointhook", self._breakpoint),
            (pdb, "set_trace", self._set_trace),
            (builtins, "input", self._input),
            (getpass, "getpass", self._getpass),
            (IPython.core.display_functions, "_new_id", self._new_display_id),
        ):
            self._undo_patches.append(partial(setattr, owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def close(self) -> None:
        """Undo `install`, so that another shell can be created in this process."""
        for undo in reversed(self._undo_patches):
            undo()
        self._undo_patches.clear()
        self.builtin_trap.deactivate()
        self.restore_sys_module_state_of_main()
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            asyncio.set_event_loop(None)
        type(self).clear_instance()

    def restore_sys_module_state_of_main(self) -> None:
        """Make `__main__` the module again that it was before this shell."""
        if self._orig_sys_modules_main_mod is not None:
            sys.modules[self._orig_sys_modules_main_name] = self._orig_sys_modules_main_mod

    def bind_presets(self, **names: Any) -> None:
        """Bind the names that exist from the start: `%who` does not list them, and no cell reports them as bound."""
        self._preset_names.update(names)
        self._preset_modules = dict(sys.modules)
        self.push(names, interactive=False)
        self._namespace_tracker.snapshot()

    def register_numbered_name(self, name: str) -> None:
        """Record a name like `_7` or `_i7`, and delete the oldest of them.

        Two more with every cell would make the namespace slow to scan. `In` and `Out` retain the values.
        """
        self._numbered_names.append(name)
        while len(self._numbered_names) > MAX_NUMBERED_NAMES:
            oldest = self._numbered_names.popleft()
            value = self.user_ns_hidden.get(oldest, self)
            if oldest not in self._numbered_names and self.user_ns.get(oldest) is value:
                del self.user_ns[oldest], self.user_ns_hidden[oldest]

    def reset(self, new_session: bool = True, aggressive: bool = False) -> None:
        """Run `%reset`: delete everything but the rank's own names."""
        super().reset(new_session, aggressive)
        self.push(self._preset_names, interactive=False)

    # -----------------------------------------------------------------------------------------------------------------
    # Running

    def run(self, cell: RunCell) -> CellRun:
        """Run a cell on the main thread. Blocks until it ends; raises nothing.

        A SIGINT ends it with status "interrupted", unless its code catches KeyboardInterrupt and continues.
        """
        started = perf_counter()
        self._last_call_id, self._num_displays = cell.call, 0
        self.allow_input = cell.allow_input
        self._namespace_tracker.snapshot()
        if "_oh" not in self.user_ns:  # a cell has cleared its globals()
            self.init_user_ns()
            self.push(self._preset_names, interactive=False)
        gate = self.gate
        gate.begin()
        try:
            if cell.silent:
                with self.output.muted():
                    run, codes = self._run_source(cell)
            else:
                run, codes = self._run_source(cell)
        finally:
            gate.end()
            self.allow_input = False
        run.bound, run.unbound = self._namespace_tracker.pop_changes(codes)
        run.seconds = perf_counter() - started
        return run

    def call(self, function: Callable[[], Any]) -> CellRun:
        """Call a user function as a cell is run: interruptible, with its exception and its value in the result."""
        started = perf_counter()
        gate = self.gate
        gate.begin()
        try:
            try:
                try:
                    gate.arm()
                    with _ExitForkedChildren():
                        result = function()
                finally:
                    gate.disarm()
            except BaseException as error:
                gate.disarm()
                run = self._make_failed_run(error)
            else:
                run = CellRun("ok", has_result=True, result=result)
        finally:
            gate.end()
        run.seconds = perf_counter() - started
        return run

    def preview(self, value: Any) -> Preview:
        """Return the preview of a value, by the user's formatters and `__repr__`s. Interruptible; raises nothing."""
        gate = self.gate
        gate.begin()
        try:
            try:
                gate.arm()
                return preview(value, formatter=self.display_formatter)
            finally:
                gate.disarm()
        except KeyboardInterrupt:
            gate.disarm()
            kind = type_name(type(value))
            return Preview(kind="object", type=kind, text=f"<{kind}: interrupted while it was being shown>")
        finally:
            gate.end()

    def _run_source(self, cell: RunCell) -> tuple[CellRun, list[CodeType]]:
        source = cell.source
        if not source or source.isspace():
            return CellRun("ok"), []
        gate = self.gate
        hook = self.displayhook
        number = cell.execution_count if cell.execution_count is not None else self.execution_count
        stores_history = cell.store_history and not cell.silent
        codes: list[CodeType] = []
        info = _make_execution_info(cell)
        outcome = ExecutionResult(info)
        outcome.execution_count = number
        try:
            try:
                text = self._transform_source(source)
                info.transformed_cell = text
                name = cell.filename or self.compile.get_code_name(source, text, number)
                self._cache_source(name, number, text)
                self.execution_count = number
                if stores_history:
                    self.history_manager.store_inputs(number, text, source)
                hook.begin_cell(number, text, silent=cell.silent)
                codes += self._compile_cell(text, name, silent=cell.silent)
                self.running_file = name
                gate.arm()
                with self.display_trap:
                    self.events.trigger("pre_execute")
                    if not cell.silent:
                        self.events.trigger("pre_run_cell", info)
                    self._execute(codes)
            finally:
                gate.disarm()
                self.running_file = None
                if stores_history:
                    self.execution_count = number + 1
        except BaseException as error:
            gate.disarm()
            hook.end_cell()
            run = self._make_failed_run(error)
            outcome.error_in_exec = error
        else:
            has_result, result = hook.end_cell()
            run = CellRun("ok", has_result=has_result, result=result)
            outcome.result = result
        self._run_post_hooks(outcome, silent=cell.silent)
        outcome.error_in_exec = None  # an exception references its frames, and these reference the cell's locals
        return run, codes

    def _execute(self, codes: list[CodeType]) -> None:
        try:
            with _ExitForkedChildren():
                if any(map(_has_top_level_await, codes)):
                    self.run_coroutine(self._execute_async(codes))
                    return
                for code in codes:
                    exec(code, self.user_ns)
        finally:
            self._restore_builtins()

    def _restore_builtins(self) -> None:
        """Restore what this process and its libraries need, where user code has overwritten it.

        That is: built-in functions that are no longer callable, and modules if all are missing. A user function that
        replaces a built-in one stays.
        """
        current = builtins.__dict__
        lost = [
            name
            for name, original in _BUILTINS
            if current.get(name) is not original and not _is_callable(current.get(name))
        ]
        if lost:
            current.update([(name, original) for name, original in _BUILTINS if name in lost])
            self.output.put(
                Notice(
                    f"put back what the cell had made of builtins: {', '.join(lost)} could not be called any more, and "
                    "all code of this process needs them"
                )
            )
        if "sys" not in sys.modules:
            for name, module in self._preset_modules.items():
                sys.modules.setdefault(name, module)
            self.output.put(
                Notice(
                    "put modules back into sys.modules: the cell had cleared it, and without `sys` in it Python cannot "
                    "import anything. importlib.reload(module) loads one anew"
                )
            )

    async def _execute_async(self, codes: list[CodeType]) -> None:
        for code in codes:
            result = eval(code, self.user_ns)
            if _has_top_level_await(code):
                await result

    def _run_post_hooks(self, outcome: ExecutionResult, *, silent: bool) -> None:
        """Run the hooks after a cell: matplotlib shows its figures in one of them, and drawing may take a while."""
        gate = self.gate
        self.last_execution_succeeded = outcome.success
        self.last_execution_result = outcome
        try:
            try:
                gate.arm()
                self.events.trigger("post_execute")
                if not silent:
                    self.events.trigger("post_run_cell", outcome)
            finally:
                gate.disarm()
        except KeyboardInterrupt:
            gate.disarm()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the shell's own event loop until it is done.

        A SIGINT ends it at once: the awaited operation is cancelled, and its `finally:` blocks run.
        """
        loop = self._event_loop()
        task = loop.create_task(coroutine)
        outer_coroutine, self.awaited_coroutine = self.awaited_coroutine, coroutine
        try:
            with self._wake_loop_on_signals(loop):
                return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.done():  # it was computing, and raised the exception itself
                if not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not report it as never retrieved
                raise
            task.cancel()
            where: TracebackType | None = None
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError as cancelled:
                where = cancelled.__traceback__  # contains the line that awaited
            raise KeyboardInterrupt().with_traceback(where) from None
        finally:
            self.awaited_coroutine = outer_coroutine

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    @contextlib.contextmanager
    def _wake_loop_on_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Have a signal that arrives just before the loop sleeps wake it, instead of waiting for its next timer."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        readable, writable = socket.socketpair()
        with readable, writable:
            readable.setblocking(False)
            writable.setblocking(False)
            before = -1
            try:  # a SIGINT may arrive at any of these lines
                before = signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
                loop.add_reader(readable, readable.recv, 4096)
                yield
            finally:
                try:
                    loop.remove_reader(readable)
                finally:
                    signal.set_wakeup_fd(before)

    # -----------------------------------------------------------------------------------------------------------------
    # From text to code

    def _current_transforms(self) -> tuple[Any, ...]:
        manager = self.input_transformer_manager
        return (
            *manager.cleanup_transforms,
            *manager.line_transforms,
            *manager.token_transformers,
            *self.input_transformers_post,
        )

    def _transform_source(self, source: str) -> str:
        """Return the Python source of a cell, with magics and shell commands expanded."""
        if _MAY_NEED_TRANSFORM.search(source) or self._current_transforms() != self._default_transforms:
            return str(self.transform_cell(source))
        text = source if source.endswith("\n") else source + "\n"
        # A single line may be a magic without its %, a macro, or a bare `exit`.
        if text.count("\n") == 1 and self._may_need_rewrite(text):
            return str(self.transform_cell(source))
        return text

    def _may_need_rewrite(self, line: str) -> bool:
        word = _FIRST_WORD.match(line).group()  # type: ignore[union-attr]  # it matches the empty string as well
        if not word:
            return False
        value = self.user_ns.get(word)
        return (
            bool(self.autocall)
            or isinstance(value, (Macro, IPython.core.autocall.IPyAutocall))
            or (self.automagic and self.find_line_magic(word) is not None)
            or (self.automagic and self.find_cell_magic(word) is not None)
        )

    def _cache_source(self, name: str, number: int, text: str) -> None:
        """Register the source of this cell as `Cell In[number]`, for tracebacks, `??` and debuggers."""
        compiler = self.compile
        get_name = compiler.get_code_name
        compiler.get_code_name = lambda *_: name
        try:
            compiler.cache(text, number, raw_code=text)
        finally:
            compiler.get_code_name = get_name

    def _compile_cell(self, text: str, name: str, *, silent: bool) -> list[CodeType]:
        """Return the code of a cell: what is executed, then what is displayed."""
        compiler = self.compile
        tree = compiler.ast_parse(text, filename=name)
        if self.ast_transformers:
            tree = self.transform_ast(tree)
        body: list[ast.stmt] = tree.body
        executed, shown = self._split_statements(body, "none" if silent else self.ast_node_interactivity)
        # `from __future__` must be the first statement of a compilation unit; after a magic it is not.
        late_future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in executed[1:])
        statement_groups = [[node] for node in executed] if late_future else [executed] if executed else []
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.autoawait else 0
        with compiler.extra_flags(flags):
            return [
                *(compiler(ast.Module(statements, []), name, "exec") for statements in statement_groups),
                *(compiler(ast.Interactive([node]), name, "single") for node in shown),
            ]

    @staticmethod
    def _split_statements(body: list[ast.stmt], interactivity: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Return the statements to execute, and those whose values are displayed."""
        if not body or interactivity == "none":
            return body, []
        if interactivity == "all":
            return [], body
        last = body[-1]
        if interactivity == "last_expr_or_assign":
            target = None
            if isinstance(last, ast.Assign) and len(last.targets) == 1:
                target = last.targets[0]
            elif isinstance(last, (ast.AugAssign, ast.AnnAssign)):
                target = last.target
            if isinstance(target, ast.Name):
                show = ast.copy_location(ast.Expr(ast.Name(target.id, ast.Load())), last)
                return body, [ast.fix_missing_locations(show)]
        if isinstance(last, ast.Expr) or interactivity == "last":
            return body[:-1], [last]
        return body, []

    # -----------------------------------------------------------------------------------------------------------------
    # Failures

    def _make_failed_run(self, error: BaseException) -> CellRun:
        rank_error = self.describe_error(error)
        return CellRun("interrupted" if isinstance(error, KeyboardInterrupt) else "error", error=rank_error)

    def describe_error(self, error: BaseException) -> RankError:
        """Return the report of an exception, and make it the one that `%tb` shows. Raises nothing."""
        rank_error = tracebacks.to_rank_error(error, self)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return rank_error

    def render(self, error: BaseException) -> list[str]:
        """Return IPython's traceback of the exception."""
        kind, tb = type(error), error.__traceback__
        if isinstance(error, UsageError):
            return [f"UsageError: {error}"]
        own = getattr(error, "_render_traceback_", None)
        if callable(own):
            return [str(part) for part in own()]
        if isinstance(error, SyntaxError) and not _has_user_frames(tb):
            return list(self.SyntaxTB.structured_traceback(kind, error, []))
        if _has_exception_group(error):  # IPython cannot render them
            return ["".join(traceback.format_exception(kind, error, tb)).rstrip("\n")]
        if isinstance(error, SyntaxError):
            return list(self.SyntaxTB.structured_traceback(kind, error, traceback.extract_tb(tb)))
        return list(self.InteractiveTB.structured_traceback(kind, error, tb, tb_offset=0))

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        """Return the exception that `%tb` and failed magics show, without Meshbook's frames."""
        kind, value, _ = super()._get_exc_info(exc_tuple)
        tracebacks.strip_meshbook_frames(value)
        sys.last_traceback = value.__traceback__
        return kind, value, value.__traceback__

    def debugger(self, force: bool = False) -> None:
        """Handle `%debug`: print how to inspect the failure, because a rank has no terminal."""
        if not (force or self.call_pdb):
            return
        if getattr(sys, "last_value", None) is None:
            print("Nothing has failed on this rank yet.")
            return
        self.showtraceback()
        print(
            f"{self._rank_title()} has no terminal for a debugger. What the failure left is still there: in a cell "
            f"that runs on this rank only ({self._magic_for_this_rank()}), `%tb Verbose` shows the variables of each "
            f"frame, and sys.last_value is the exception. From outside, the process is pid {os.getpid()}."
        )

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
        rank = self.user_ns_hidden.get("rank")
        return "A rank" if rank is None else f"Rank {rank}"

    def _magic_for_this_rank(self) -> str:
        return f"%%mesh --ranks {self.user_ns_hidden.get('rank', 0)}"

    # -----------------------------------------------------------------------------------------------------------------
    # Replacements for a terminal

    def _new_display_id(self) -> str:
        """Return an id for a display that can be updated.

        IPython's ids are random, so equal displays of ranks would not fold.
        """
        self._num_displays += 1
        return f"{self._last_call_id}-{self._num_displays}"

    def _input(self, prompt: object = "", /) -> str:
        return self.request_input(str(prompt), False)

    def _getpass(self, prompt: str = "Password: ", stream: Any = None, **_options: Any) -> str:
        return self.request_input(str(prompt), True)

    def enable_gui(self, gui: str | None = None) -> None:
        """Accept only what needs no event loop: figures are drawn inline."""
        if gui not in (None, "inline", "agg"):
            raise UsageError(f"a rank has no screen for {gui} windows; use %matplotlib inline")

    def ask_exit(self) -> NoReturn:
        """Refuse `exit`, `quit` and `%exit`."""
        raise MeshbookError(
            "exit does not end a rank: the mesh would lose its state. `%mesh stop` ends the mesh, `%mesh kill "
            f"{self.user_ns_hidden.get('rank', 0)}` this rank; os._exit() ends its process for good"
        )

    def system_piped(self, cmd: str) -> None:
        """Run `!cmd`: stream its output and set `_exit_code`. A SIGINT ends the command and the cell."""
        if cmd.rstrip().endswith("&"):
            raise OSError("a command in the background would outlive its output; use subprocess.Popen for that")
        code = shell_commands.run_streaming(self.var_expand(cmd, depth=1), self.gate)
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


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the shell


class RankDisplayHook(DisplayHook):
    """Retains the value of a cell's last expression instead of printing it."""

    shell: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = 0
        self._text = ""
        self._is_capturing = False  # between `begin_cell` and `end_cell`
        self._has_value = False
        self._value: Any = None
        super().__init__(*args, **kwargs)

    @property
    def prompt_count(self) -> int:
        return self._number

    def begin_cell(self, number: int, text: str, *, silent: bool) -> None:
        """Start a cell: the value displayed from now on is its result."""
        self._number, self._text = number, text
        self._has_value, self._value = False, None
        self._is_capturing = not silent

    def end_cell(self) -> tuple[bool, Any]:
        """Return whether the cell had a value, and the value, and drop the reference to it."""
        found = self._has_value, self._value
        self._is_capturing = self._has_value = False
        self._value = None
        return found

    def quiet(self) -> bool:
        return ";" in self._text and self.semicolon_at_end_of_expression(self._text)

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        if self._has_value:  # a second value is displayed (ast_node_interactivity = "all", or a cell within a cell)
            self._display(self._value)
        self.update_user_ns(result)
        self.shell.register_numbered_name(f"_{self._number}")
        self.fill_exec_result(result)
        if self._is_capturing:
            self._has_value, self._value = True, result
        else:
            self._display(result)

    def _display(self, value: Any) -> None:
        data, metadata = self.compute_format_data(value)
        if data:
            self.shell.display_pub.publish(data, metadata)


class RankDisplayPublisher(DisplayPublisher):
    """Puts displays into the rank's output, in order with its text."""

    shell: Any

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_kwargs: Any,
    ) -> None:
        self._validate_data(data, metadata)
        shown = {mime: encode_mime(mime, value) for mime, value in data.items() if mime != _WIDGET_VIEW}
        display_id = (transient or {}).get("display_id")
        self.shell.output.put(
            Display(
                data=shown,
                metadata=to_json_data(metadata or {}),
                display_id=None if display_id is None else str(display_id),
                update=update,
            )
        )

    def clear_output(self, wait: bool = False) -> None:
        self.shell.output.put(ClearOutput(bool(wait)))


class RankHistory(HistoryManager):
    """The history of this rank's cells, in memory, each at its own number."""

    def store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        raw = source if source_raw is None else source_raw
        parsed_list, raw_list = self.input_hist_parsed, self.input_hist_raw
        # A cell that did not run here leaves a gap; a cell that runs again under its number replaces its entry.
        for entries, text in ((parsed_list, source), (raw_list, raw)):
            while len(entries) < line_num:
                entries.append("")
            entries[line_num : line_num + 1] = [text.rstrip("\n")]
        self._iii, self._ii, self._i, self._i00 = self._ii, self._i, self._i00, raw.rstrip("\n")
        names = {"_i": self._i, "_ii": self._ii, "_iii": self._iii, f"_i{line_num}": self._i00}
        self.shell.user_ns.update(names)
        self.shell.user_ns_hidden.update(names)
        self.shell.register_numbered_name(f"_i{line_num}")


class _PersistentBuiltinTrap(BuiltinTrap):
    """Leaves `get_ipython` in the builtins permanently.

    IPython's own trap adds and removes it around each use and counts the uses; the main and the service thread would
    corrupt the count.
    """

    def __enter__(self) -> _PersistentBuiltinTrap:
        return self

    def __exit__(self, *_exc_info: object) -> Literal[False]:
        return False


class _Exiter(ExitAutocall):
    """`exit` and `quit`, with or without parentheses."""

    def __init__(self, shell: RankShell) -> None:
        super().__init__(shell)
        self._shell = shell

    def __call__(self, *_args: Any) -> None:
        self._shell.ask_exit()


class _InMemoryProfileDir(ProfileDir):
    """A profile without a folder."""

    def _location_changed(self, change: Any) -> None:
        """Create nothing."""


@contextlib.contextmanager
def _without_database() -> Iterator[None]:
    """Stop older IPython (9.0) from creating its database folder whenever a shell is created."""
    module: Any = IPython.core.interactiveshell
    eager = getattr(module, "PickleShareDB", None)
    if eager is None:
        yield
        return
    module.PickleShareDB = lambda *_: _MemoryStore()
    try:
        yield
    finally:
        module.PickleShareDB = eager


class _MemoryStore(dict[str, Any]):
    """Stores in memory what `%bookmark`, `%store` and import completion store in a folder."""

    def keys(self, pattern: str | None = None) -> Any:
        names = super().keys()
        return names if pattern is None else fnmatch.filter(names, pattern)


def _refuse_input(_prompt: str, _password: bool) -> str:
    raise EOFError("there is nobody to ask for input() here")


def _make_execution_info(cell: RunCell) -> Any:
    """Return IPython's description of a cell, for the hooks of extensions.

    It bypasses the constructor, whose arguments differ between versions.
    """
    info: Any = ExecutionInfo.__new__(ExecutionInfo)
    info.raw_cell, info.transformed_cell = cell.source, None
    info.store_history, info.silent, info.shell_futures = cell.store_history, cell.silent, True
    info.cell_id = info.cell_meta = None
    return info


class _ExitForkedChildren:
    """Exits a process that user code forks in this block at the block's end, as at the end of a script.

    Otherwise the child would continue as a second rank on its parent's sockets.
    """

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, _kind: object, error: BaseException | None, _tb: object) -> None:
        if os.getpid() != self._pid:
            _exit_child(error)


def _exit_child(error: BaseException | None) -> NoReturn:
    """Exit this process with the status that Python would use."""
    status = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code
            status = 0 if code is None else code if isinstance(code, int) else 1
            if isinstance(code, str):
                print(code, file=sys.stderr)
        elif error is not None:
            status = 1
            tracebacks.strip_meshbook_frames(error)
            traceback.print_exception(error)
    finally:
        os._exit(status & 0xFF)


def _has_top_level_await(code: CodeType) -> bool:
    """Whether the code has a top-level `await`, so that evaluating it returns a coroutine."""
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _has_user_frames(tb: TracebackType | None) -> bool:
    """Whether any code but IPython's and Meshbook's ran. If so, a SyntaxError is that of a module, not of the cell."""
    while tb is not None:
        module = tb.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("IPython", "codeop", "meshbook"):
            return True
        tb = tb.tb_next
    return False


def _has_exception_group(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BaseExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
