"""Runs the user's code on the main thread of a rank: cells, functions and previews, interruptible, never raising.

Cells do not go through IPython's `run_cell`. That would compile them more slowly (`cell_compiler`); and since IPython
9, it stores all that a cell prints for its history, and renders each exception a second time for it. Everything that
IPython itself starts (`%run`, `%rerun`, extensions) uses the inherited path.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, TypeVar

import IPython.core.display_functions
import zmq
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

from meshbook.rank.cells import tracebacks
from meshbook.rank.cells.compiler import CellCompiler, SelectStatements, has_top_level_await
from meshbook.rank.cells.namespace import NamespaceTracker
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.previews.preview import preview
from meshbook.rank.previews.static_descriptions import type_name
from meshbook.rank.process_guard import ExitForkedChildren, ProcessGuard
from meshbook.wire.messages import Preview, RankError, RunCell

T = TypeVar("T")


@dataclass(slots=True)
class CellRun:
    """How a cell or a function call ended."""

    status: Literal["ok", "error", "interrupted"]
    has_result: bool = False  # whether the last expression had a value other than None
    result: Any = None
    error: RankError | None = None  # for "error" and "interrupted"
    bound: tuple[str, ...] = ()  # names that it bound in the namespace; cells only
    unbound: tuple[str, ...] = ()  # names that it deleted; cells only
    next_input: str | None = None  # what it puts into the next cell; cells only


class CodeRunner:
    """Runs cells and functions in a shell. Main thread only.

    Attributes:
        allow_input: whether the running cell or function may request input.
        running_file: the file name that the running cell was compiled under; None between cells.
    """

    def __init__(self, shell: RankShell, output: OutputBuffer, gate: InterruptGate) -> None:
        self.allow_input = False
        self.running_file: str | None = None
        self._shell, self._output, self._gate = shell, output, gate
        self._compiler = CellCompiler(shell)
        self._namespace_tracker = NamespaceTracker(shell.user_ns, shell.user_ns_hidden)
        self._guard = ProcessGuard(output.put)
        self._last_call_id = ""
        self._num_displays = 0  # displays of the last cell that have an id made here
        shell.undo.callback(setattr, IPython.core.display_functions, "_new_id", IPython.core.display_functions._new_id)
        IPython.core.display_functions._new_id = self._new_display_id

    @property
    def awaited_coroutine(self) -> Coroutine[Any, Any, Any] | None:
        """The coroutine that the cells' event loop runs; None when it runs none."""
        return self._shell.event_loop.awaited_coroutine

    def run(
        self,
        cell: RunCell,
        *,
        select: SelectStatements | None = None,
        before: Callable[[Sequence[CodeType], str], None] | None = None,
    ) -> CellRun:
        """Run a cell. Blocks until it ends; raises nothing.

        A SIGINT ends it with status "interrupted", unless its code catches KeyboardInterrupt and continues.

        Args:
            select: returns those of the cell's statements that are to be run; None: all.
            before: called with the cell's code and file name before it runs. Interruptible.
        """
        self._last_call_id, self._num_displays = cell.call, 0
        self.allow_input = cell.allow_input
        self._guard.snapshot_modules()
        self._namespace_tracker.snapshot()
        self._shell.restore_namespace()
        self._gate.begin()
        try:
            with self._output.muted() if cell.silent else contextlib.nullcontext():
                run, codes = self._run_source(cell, select, before)
        finally:
            self._gate.end()
            self.allow_input = False
        run.bound, run.unbound = self._namespace_tracker.pop_changes(codes)
        run.next_input, self._shell.rl_next_input = self._shell.rl_next_input, None
        return run

    def has_statements(self, source: str, select: SelectStatements) -> bool:
        """Whether some of a cell's statements are selected. A cell that cannot be read has none."""
        try:
            return bool(select(ast.parse(self._compiler.transform(source)).body))
        except (SyntaxError, ValueError, RecursionError):
            return False

    def call(self, function: Callable[[], Any], *, allow_input: bool = False) -> CellRun:
        """Call a user function as a cell is run: interruptible, with its exception and its value in the result."""

        def run() -> Any:
            with ExitForkedChildren():
                return function()

        allowed_before, self.allow_input = self.allow_input, allow_input
        self._gate.begin()
        try:
            result = self._armed(run)
        except BaseException as error:
            return self._make_failed_run(error)
        finally:
            self._gate.end()
            self._shell.terminal.end_debugging()
            self.allow_input = allowed_before
        return CellRun("ok", has_result=True, result=result)

    def run_tasks_until_readable(self, socket: zmq.Socket[bytes]) -> None:
        """Run the asyncio tasks that cells have left behind, until a socket has a message. A Stop ends one of them."""
        loop = self._shell.event_loop

        def is_readable() -> bool:
            return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

        while loop.has_work and not is_readable():
            self._gate.begin()
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    self._armed(lambda: loop.run_until_readable(int(socket.getsockopt(zmq.FD)), is_readable))
            finally:
                self._gate.end()

    def preview(self, value: Any) -> Preview:
        """Return the preview of a value, by the user's formatters and `__repr__`s. Interruptible; raises nothing."""
        self._gate.begin()
        try:
            return self._armed(lambda: preview(value, formatter=self._shell.display_formatter))
        except KeyboardInterrupt:
            kind = type_name(type(value))
            return Preview(kind="object", type=kind, text=f"<{kind}: interrupted while it was being shown>")
        finally:
            self._gate.end()

    def describe_error(self, error: BaseException) -> RankError:
        """Return the report of an exception, and make it the one that `%tb` shows. Raises nothing."""
        rank_error = tracebacks.to_rank_error(error, self._shell)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return rank_error

    def _make_failed_run(self, error: BaseException) -> CellRun:
        rank_error = self.describe_error(error)
        return CellRun("interrupted" if isinstance(error, KeyboardInterrupt) else "error", error=rank_error)

    def _armed(self, function: Callable[[], T]) -> T:
        """Call user code with interrupts armed."""
        gate = self._gate
        try:
            try:
                gate.arm()
                result = function()
                gate.raise_postponed()
                return result
            finally:
                gate.disarm()
        except BaseException:
            gate.disarm()  # again: a SIGINT may arrive at the `finally:`
            raise

    # ---- cells

    def _run_source(
        self,
        cell: RunCell,
        select: SelectStatements | None,
        before: Callable[[Sequence[CodeType], str], None] | None,
    ) -> tuple[CellRun, list[CodeType]]:
        source = cell.source
        if not source or source.isspace():
            return CellRun("ok"), []
        shell, hook = self._shell, self._shell.displayhook
        number = cell.execution_count if cell.execution_count is not None else shell.execution_count
        stores_history = cell.store_history and not cell.silent
        codes: list[CodeType] = []
        info = _make_execution_info(cell)
        outcome = ExecutionResult(info)
        outcome.execution_count = number
        try:
            try:
                text = info.transformed_cell = self._compiler.transform(source)
                name = self._compiler.register(cell.filename, number, source, text)
                shell.execution_count = number
                if stores_history:
                    shell.history_manager.store_inputs(number, text, source)
                hook.begin_cell(number, text, silent=cell.silent)
                codes += self._compiler.compile(text, name, silent=cell.silent, select=select)
                self.running_file = name
                if before is not None:
                    self._armed(lambda: before(codes, name))
                self._armed(lambda: self._execute(codes, None if cell.silent else info, cell.stop_first))
            finally:
                shell.terminal.end_debugging()
                self.running_file = None
                if stores_history:
                    shell.execution_count = number + 1
        except BaseException as error:
            hook.end_cell()
            run = self._make_failed_run(error)
            outcome.error_in_exec = error
            if run.status == "error":
                with contextlib.suppress(KeyboardInterrupt):
                    self._armed(shell.debugger)  # with `%pdb on`
        else:
            has_result, result = hook.end_cell()
            run = CellRun("ok", has_result=has_result, result=result)
            outcome.result = result
        self._run_post_hooks(outcome, silent=cell.silent)
        outcome.error_in_exec = None  # an exception references its frames, and these reference the cell's locals
        return run, codes

    def _execute(self, codes: list[CodeType], info: Any, stop_first: bool) -> None:
        """
        Args:
            info: IPython's description of the cell, for hooks; None: of a silent cell.
            stop_first: the debugger stops at the first line.
        """
        shell = self._shell
        with shell.display_trap:
            self._trigger("pre_execute")
            if info is not None:
                self._trigger("pre_run_cell", info)
            try:
                with ExitForkedChildren():
                    if stop_first:
                        shell.terminal.stop_at_first_line()
                    if any(map(has_top_level_await, codes)):
                        shell.event_loop.run(self._execute_async(codes))
                    else:
                        for code in codes:
                            exec(code, shell.user_ns)
                    shell.terminal.stop_at_end()
            finally:
                self._guard.restore()

    def _trigger(self, event: str, *args: Any) -> None:
        """Run the hooks before a cell. IPython catches what they raise, also the interrupt of the cell.

        Raises:
            KeyboardInterrupt: the cell was interrupted meanwhile.
        """
        num_raised = self._gate.num_raised
        self._shell.events.trigger(event, *args)
        if self._gate.num_raised != num_raised:
            raise KeyboardInterrupt

    async def _execute_async(self, codes: list[CodeType]) -> None:
        for code in codes:
            result = eval(code, self._shell.user_ns)
            if has_top_level_await(code):
                await result

    def _run_post_hooks(self, outcome: ExecutionResult, *, silent: bool) -> None:
        """Run the hooks after a cell: matplotlib shows its figures in one of them, and drawing may take a while."""
        shell = self._shell
        shell.last_execution_succeeded = outcome.success
        shell.last_execution_result = outcome

        def trigger() -> None:
            shell.events.trigger("post_execute")
            if not silent:
                shell.events.trigger("post_run_cell", outcome)

        with contextlib.suppress(KeyboardInterrupt):
            self._armed(trigger)

    def _new_display_id(self) -> str:
        """Return an id for a display that can be updated.

        IPython's ids are random, so equal displays of ranks would not fold.
        """
        self._num_displays += 1
        return f"{self._last_call_id}-{self._num_displays}"


def _make_execution_info(cell: RunCell) -> Any:
    """Return IPython's description of a cell, for the hooks of extensions.

    It bypasses the constructor, whose arguments differ between versions.
    """
    info: Any = ExecutionInfo.__new__(ExecutionInfo)
    info.raw_cell, info.transformed_cell = cell.source, None
    info.store_history, info.silent, info.shell_futures = cell.store_history, cell.silent, True
    info.cell_id = info.cell_meta = None
    return info
