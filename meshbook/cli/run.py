"""`meshbook run FILE`: run a notebook or a script on a mesh, non-interactively.

A notebook's cells run on the Meshbook kernel, their output is printed as it arrives, and the executed notebook is
written together with its HTML. A script is treated as a notebook: its `# %%` cells, or the complete file as one cell.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode, v4

from meshbook.cli import kernels
from meshbook.cli.output import CellOutputWriter, strip_ansi
from meshbook.controller.tables import first_line, format_seconds
from meshbook.errors import UsageError

# Seconds after which a kernel that does not end by itself is killed; after half of them it is sent SIGTERM and leaves a
# mesh that it has not stopped yet. It stops its mesh first, after checkpoints that are being written (up to a minute).
_KERNEL_ENDS_S = 180.0
# ... after a second Ctrl-C: jupyter_client's own.
_KERNEL_ENDS_AFTER_CTRL_C_S = 5.0
EXIT_INTERRUPTED = 130  # as shells count a program that SIGINT ended
_CELL_MARK = re.compile(r"#\s*%%(?:\s+(?P<title>.*))?\s*")
# Magics written as comments, because editors reject them. Only Meshbook's: `# %%time` may be a cell marker.
_COMMENTED_MAGIC = re.compile(r"#\s?(?=%%?(?:mesh|controller|local)\b)")


def run_file(
    path: Path,
    *,
    arguments: Sequence[str] = (),
    out: Path | None = None,
    ranks: int | None = None,
    timeout_s: float | None = None,
    quiet: bool = False,
) -> int:
    """Execute a file, printing its progress on stdout. Blocks.

    Args:
        arguments: of a script, for its `sys.argv`.
        out: the folder for the executed notebook and its HTML. None: `build` in the current folder for a notebook, no
            output for a script.
        ranks: number of ranks unless the file sets it; None: the default.
        timeout_s: seconds a cell may take; None: no limit.
        quiet: show neither cells nor output.

    Returns:
        The exit status: 0, 1 when a cell failed unexpectedly, 130 when interrupted.

    Raises:
        UsageError: the file cannot be read, or the results cannot be written; a notebook was given arguments.
    """
    is_script = path.suffix == ".py"
    if arguments and not is_script:
        raise UsageError(f"{path} takes no arguments ({' '.join(arguments)}): a notebook has its settings in a cell")
    notebook = read(path)
    if out is None and not is_script:
        out = Path("build")
    if out is not None and (out / path.name).resolve() == path.resolve():
        raise UsageError(f"{path} would be written over with what comes out of it; name another folder with --out")
    printer = _RunPrinter(sys.stdout, framed=not is_script, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="meshbook-") as private:
        environment = kernels.kernel_environment(ranks, [str(path.resolve()), *arguments] if is_script else ())
        client = _NotebookRunner(notebook, printer, path.resolve(), private, environment, timeout_s=timeout_s)
        problem = client.execute_all()
    if out is not None:
        for what, location in write(notebook, out, path.stem).items():
            printer.print_notice(f"{what}: {location}")
    if problem:
        print(problem if sys.stderr.isatty() else strip_ansi(problem), file=sys.stderr)
    return EXIT_INTERRUPTED if client.interrupted else 1 if problem else 0


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read(path: Path) -> NotebookNode:
    """Read a notebook, or a script as a notebook.

    Raises:
        UsageError: there is no such file, or it is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".py":
        return notebook_of(text)
    if path.suffix != ".ipynb":
        raise UsageError(f"{path} is neither a notebook (.ipynb) nor a script (.py)")
    try:
        notebook: NotebookNode = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
        return notebook
    except Exception as error:  # nbformat does not wrap its dependencies' errors
        raise UsageError(f"{path} is not a notebook: {str(error).splitlines()[0]}") from error


def notebook_of(source: str) -> NotebookNode:
    """Convert a script to a notebook: a cell per `# %%`, `# %% [markdown]` as text, or one cell without markers."""
    cells: list[tuple[str, list[str]]] = [("", [])]
    for line in source.splitlines():
        mark = _CELL_MARK.fullmatch(line)
        if mark is not None:
            cells.append((mark["title"] or "", []))
        else:
            cells[-1][1].append(_COMMENTED_MAGIC.sub("", line) if line.startswith("#") else line)
    notebook: NotebookNode = v4.new_notebook()  # type: ignore[no-untyped-call]
    for title, lines in cells:
        text = "\n".join(lines).strip("\n")
        if title.startswith(("[markdown]", "[md]")):
            prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            notebook.cells.append(v4.new_markdown_cell(prose))  # type: ignore[no-untyped-call]
        elif text.strip():
            notebook.cells.append(v4.new_code_cell(text))  # type: ignore[no-untyped-call]
    return notebook


def write(notebook: NotebookNode, folder: Path, stem: str) -> dict[str, Path]:
    """Write the executed notebook and its HTML.

    Returns:
        What was written, and where.

    Raises:
        UsageError: the folder cannot be written.
    """
    from nbconvert import HTMLExporter  # takes most of a second to import

    notebook.metadata["kernelspec"] = {"name": kernels.KERNEL_NAME, "display_name": "Meshbook", "language": "python"}
    exporter = HTMLExporter()  # type: ignore[no-untyped-call]
    page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": stem}})
    written = {"executed notebook": folder / f"{stem}.ipynb", "as a web page": folder / f"{stem}.html"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
        written["executed notebook"].write_text(text, encoding="utf-8")
        written["as a web page"].write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be written: {error.strerror}; name another folder with --out"
        ) from error
    return written


# ---------------------------------------------------------------------------------------------------------------------
# Execution


class _NotebookRunner(NotebookClient):
    """nbclient on the Meshbook kernel, printing output as it arrives.

    Ctrl-C interrupts the cell, a second one shuts down the kernel.
    """

    def __init__(
        self,
        notebook: NotebookNode,
        printer: _RunPrinter,
        path: Path,
        private: str,
        environment: dict[str, str],
        *,
        timeout_s: float | None,
    ) -> None:
        super().__init__(
            notebook,
            timeout=None if timeout_s is None else max(1, round(timeout_s)),
            interrupt_on_timeout=True,
            error_on_timeout={"ename": "TimeoutError", "evalue": f"stopped after {timeout_s} s", "traceback": []},
            kernel_name=kernels.KERNEL_NAME,
            resources={"metadata": {"path": str(path.parent)}},
            on_notebook_start=self._kernel_started,
            on_cell_execute=self._cell_begins,
            on_cell_executed=self._cell_ended,
            on_cell_error=self._cell_failed,
        )
        self.interrupted = False
        self._is_cell_running = False  # the kernel has started the cell
        self._printer, self._environment, self._private, self._stem = printer, environment, private, path.stem
        self._num_cells = sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)
        self._cell_started_at = 0.0
        self._last_error_reply: dict[str, Any] = {}  # the reply of the last failed cell

    def execute_all(self) -> str:
        """Run every cell until one fails. Return the text to print about the failure; empty if there was none."""
        began = time.monotonic()
        try:
            self.execute(env=self._environment)
        except CellExecutionError as error:
            if self.interrupted:
                return "interrupted"
            if error.ename == "TimeoutError" and not self._last_error_reply.get("traceback"):
                return f"cell {self.code_cells_executed} took longer than {self.timeout} s and was stopped (--timeout)"
            details = "\n".join(self._last_error_reply.get("traceback", ())) or f"{error.ename}: {error.evalue}"
            return f"cell {self.code_cells_executed} of {self._num_cells} failed:\n{details}"
        except KeyboardInterrupt:
            return "interrupted"
        except RuntimeError as error:  # raised by nbclient and jupyter_client if the kernel exited, or never started
            if self.interrupted:
                return "interrupted"
            if isinstance(error, DeadKernelError):
                return "the kernel has died; what it printed last is above"
            return f"the kernel did not start: {error}"
        cells = "1 cell" if self._num_cells == 1 else f"{self._num_cells} cells"
        self._printer.print_notice(f"{cells} in {format_seconds(time.monotonic() - began)}", blank_line_before=True)
        return ""

    def create_kernel_manager(self) -> AsyncKernelManager:
        self.km = AsyncKernelManager(
            kernel_name=kernels.KERNEL_NAME,
            kernel_spec_manager=kernels.MeshbookKernelSpecManager(),
            shutdown_wait_time=_KERNEL_ENDS_S,
            **kernels.ipc_connection_options(self._private, self._stem),
        )
        return self.km

    def _kernel_started(self, notebook: NotebookNode) -> None:
        # nbclient's own handler shuts the kernel down immediately, which loses the report of where the ranks were.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_signalled)

    def _stop_signalled(self) -> None:
        assert self.km is not None
        if self.interrupted:
            self.km.shutdown_wait_time = _KERNEL_ENDS_AFTER_CTRL_C_S
            self._schedule(self.km.shutdown_kernel())
        elif self._is_cell_running:
            self._schedule(self.km.interrupt_kernel())
        self.interrupted = True  # a cell that the kernel has not started yet is interrupted when it does

    def _schedule(self, coroutine: Any) -> None:
        self._stop_task = asyncio.ensure_future(coroutine)

    def _cell_begins(self, cell: NotebookNode, cell_index: int) -> None:
        if self.interrupted:  # the previous cell was allowed to fail, so execution continued
            raise KeyboardInterrupt
        self._cell_started_at = time.monotonic()
        self._printer.begin_cell(self.code_cells_executed + 1, self._num_cells, cell.source)

    def _cell_ended(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        self._is_cell_running = False
        expected = self.allow_errors or "raises-exception" in cell.metadata.get("tags", [])
        self._printer.end_cell(execute_reply["content"], expected, time.monotonic() - self._cell_started_at)

    def _cell_failed(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        self._last_error_reply = execute_reply["content"]

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        if msg["msg_type"] == "execute_input":
            self._is_cell_running = True
            if self.interrupted and self.km is not None:
                self._schedule(self.km.interrupt_kernel())
        self._printer.show_message(msg["msg_type"], msg["content"])
        return super().process_message(msg, cell, cell_index)


class _RunPrinter:
    """Prints the progress: each cell's first line, its output indented below it, and how it ended."""

    def __init__(self, stream: TextIO, *, framed: bool, quiet: bool) -> None:
        self._output = CellOutputWriter(stream)
        self._framed, self._quiet = framed, quiet

    def print_notice(self, text: str, *, blank_line_before: bool = False) -> None:
        """Print a notice of the command's own; `blank_line_before`: after an empty line, if cells are shown."""
        if self._framed:
            self._output.write_line(f"\n{text}" if blank_line_before and not self._quiet else text)

    def begin_cell(self, number: int, total: int, source: str) -> None:
        if self._framed and not self._quiet:
            head = f"[{number:{len(str(total))}}/{total}] "
            self._output.write_line(head + first_line(source))
            self._output.indent = " " * len(head)

    def show_message(self, kind: str, content: dict[str, Any]) -> None:
        if not self._quiet:
            self._output.show_message(kind, content)

    def end_cell(self, reply: dict[str, Any], expected: bool, seconds: float) -> None:
        self._output.end_line()
        if not self._framed or self._quiet:
            return
        if reply["status"] == "error" and expected:
            name, summary = reply["ename"], strip_ansi(reply["evalue"])
            summary = (summary if name in summary else f"{name}: {summary}").partition("\n")[0].rstrip(": ")
            self._output.write_line(f"{self._output.indent}raised, as expected: {summary}")
        if seconds >= 1:
            self._output.write_line(f"{self._output.indent}({format_seconds(seconds)})")
