"""Sets up what a bundle's cell had, in this process, and runs it: its names, generators, groups and file names.

IPython runs the cell, as on the rank, so that magics work and tracebacks look alike.
"""

from __future__ import annotations

import asyncio
import linecache
import math
import os
import pdb
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import IPython.core.ultratb
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell

from meshbook.diagnose.source_files import is_user_file
from meshbook.errors import TransferError
from meshbook.rank import preemption, scalars
from meshbook.rank.cells import tracebacks
from meshbook.rank.cells.compiler import CellCompiler, has_top_level_await
from meshbook.rank.recording.bundle import BundleError, BundleFile, BundleHeader
from meshbook.rank.recording.references import ReplayedObjects
from meshbook.rank.state.random_states import set_random_states
from meshbook.replay import actors
from meshbook.replay.groups import RecordedAnswers, ReplayedGroups
from meshbook.wire import pickling

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

# How much a number of a GPU and one of a CPU may differ, relative to it: float32 has 7 digits, and training loses some.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ReplayedEnd:
    """How a cell ended here.

    Attributes:
        error: what it raised; None: nothing.
        file, line, function: of the innermost line of the user's.
        divergence: where the replay asked for another collective than was recorded; "": it did not.
    """

    error: BaseException | None
    file: str
    line: int
    function: str
    divergence: str

    def differs(self, header: BundleHeader) -> str:
        """Return how it differs from what was recorded, as a sentence; "": it does not."""
        recorded = header.end
        if self.divergence:
            return self.divergence
        ename = "" if self.error is None else type(self.error).__name__
        text = "" if self.error is None else tracebacks.error_text(self.error)
        if ename != recorded.ename:
            return f"here it {_ended(ename)}, on the mesh it {_ended(recorded.ename, recorded.status)}"
        if (self.file, self.line) != (recorded.file, recorded.line):
            return f"here it is at line {self.line}, on the mesh it was at line {recorded.line} of {recorded.file}"
        is_elsewhere = header.device.startswith("cuda") and not torch.cuda.is_available()
        if text != recorded.evalue and not (is_elsewhere and differ_in_digits(text, recorded.evalue)):
            return f"the messages differ: on the mesh it was {recorded.evalue!r}"
        return ""


def differ_in_digits(text: str, other: str) -> bool:
    """Whether two messages are the same but for the last digits of numbers, as of a GPU's and a CPU's."""
    if _NUMBER.sub("0", text) != _NUMBER.sub("0", other):
        return False
    numbers = zip(_NUMBER.findall(text), _NUMBER.findall(other), strict=True)
    return all(math.isclose(float(one), float(two), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) for one, two in numbers)


def _ended(ename: str, status: str = "") -> str:
    return f"raised {ename}" if ename else "had not ended" if status == "running" else "ran to its end"


class ReplayProcess:
    """This process as the rank of a bundle. A context: torch.distributed is as before at its end.

    Attributes:
        namespace: of the cell.
        notes: what is not as it was on the rank.
    """

    def __init__(self, bundle: BundleFile) -> None:
        self.header, self.notes = bundle.header, list[str]()
        self._bundle = bundle

    def __enter__(self) -> ReplayProcess:
        """
        Raises:
            BundleError: the bundle cannot be loaded; the message says why, and what to do.
        """
        header = self.header
        check_versions(header, self.notes)
        os.environ.update(header.environment)
        self._argv, sys.argv = sys.argv, list(header.argv or [""])
        torch.set_num_threads(header.num_threads)
        scalars.install(scalars.ScalarLog())  # what the cell logs goes nowhere
        preemption.install(preemption.PreemptionPoint())
        self._main = sys.modules["__main__"]
        self.shell = _make_shell()
        self.namespace: dict[str, Any] = self.shell.user_ns
        device = torch.device(header.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            self.notes.append(
                "the rank computed on a GPU and this process on the CPU: numbers differ in their last digits, and code "
                "that names cuda fails"
            )
            device = torch.device("cpu")
        self.namespace |= {"rank": header.rank, "local_rank": int(header.environment.get("LOCAL_RANK", header.rank))}
        self.namespace |= {"world_size": header.world_size, "device": device, "torch": torch, "dist": dist}
        for file, text in header.sources.items():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        self.record = RecordedAnswers(_load(self._bundle.body.collectives, None))
        self.groups = ReplayedGroups(self.record, header.rank, header.world_size)
        if header.groups:
            self.groups.form(header.groups, header.num_groups_created)
        self._objects = ReplayedObjects(self.groups.table)
        content = _load(self._bundle.body.names, self._objects)
        self._identity = content.get("identity")
        self.namespace.update(content["values"])
        for tensor, gradient in content["gradients"]:
            tensor.grad = gradient
        set_random_states(content["random"])
        if header.left_out:
            listed = "; ".join(f"{name} ({why})" for name, why in header.left_out.items())
            self.notes.append(f"the cell reads names that could not be kept: {listed}")
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        scalars.install(None)
        preemption.install(None)
        self.groups.close()
        self.shell.restore_sys_module_state()
        InteractiveShell.clear_instance()
        sys.modules["__main__"], sys.argv = self._main, self._argv

    def run(self, source: str | None = None, *, stop_at: tuple[str, int] | None = None) -> ReplayedEnd:
        """Run the cell; its error is returned, and shown as a notebook shows it.

        Args:
            source: another text of the cell; None: as it was.
            stop_at: file and line at which the debugger stops the first time.
        """
        header, error = self.header, None
        try:
            if header.actor:
                with _debugging(stop_at):
                    self._run_messages()
                return self._end(None)
            compiler = CellCompiler(self.shell)
            text = compiler.transform(header.source if source is None else source)
            compiler.register(header.file, header.execution_count, text, text)
            self.shell.execution_count = header.execution_count
            codes = compiler.compile(text, header.file, silent=False)
            with self.shell.display_trap, _debugging(stop_at):
                self._execute(codes)
        except BaseException as raised:
            error = raised
        return self._end(error)

    def _end(self, error: BaseException | None) -> ReplayedEnd:
        if error is not None:
            self._show(error)
        frame = None if error is None else _user_frame(error)
        file, line, function = ("", 0, "") if frame is None else _place(error, frame)
        return ReplayedEnd(error, file, line, function, self.record.divergence)

    def _run_messages(self) -> None:
        """Send a recorded actor its messages again, in their order; raise what the last one raises."""
        actor = self.namespace["actor"]
        messages = (_load(message, self._objects) for message in self._bundle.body.messages)
        actors.run_messages(actor, self._identity, messages, num=len(self._bundle.body.messages))

    def _execute(self, codes: list[CodeType]) -> None:
        if any(map(has_top_level_await, codes)):
            asyncio.run(self._execute_async(codes))
            return
        for code in codes:
            exec(code, self.namespace)

    async def _execute_async(self, codes: list[CodeType]) -> None:
        for code in codes:
            result = eval(code, self.namespace)
            if has_top_level_await(code):
                await result

    def _show(self, error: BaseException) -> None:
        tracebacks.strip_meshbook_frames(error)
        lines = tracebacks.render(error, self.shell.InteractiveTB, self.shell.SyntaxTB)
        print("\n".join(lines), file=sys.stderr)


def check_versions(header: BundleHeader, notes: list[str]) -> None:
    """
    Raises:
        BundleError: the bundle's code cannot run under this Python.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if header.python != python:
        raise BundleError(
            f"this bundle was made by Python {header.python}, and its functions cannot be loaded by Python {python}; "
            f"replay it with Python {header.python}"
        )
    here = {"torch": str(torch.__version__)} | {
        name: str(sys.modules[name].__version__) for name in header.versions if name in sys.modules
    }
    for name, version in {"torch": header.torch, **header.versions}.items():
        if here.get(name, version) != version:
            notes.append(f"{name} is {here[name]} here and was {version} on the rank")


def _make_shell() -> Any:
    InteractiveShell.clear_instance()
    IPython.core.ultratb.FAST_THRESHOLD = 1000  # as on ranks: longer files are not parsed for a traceback
    shell: Any = InteractiveShell.instance(colors="NoColor" if not sys.stderr.isatty() else "Linux")
    shell.history_manager.enabled = False
    shell.InteractiveTB.tb_offset = 0  # frames that are not the user's are removed by file name
    shell.builtin_trap.activate()
    return shell


def _load(payload: Any, objects: ReplayedObjects | None) -> Any:
    try:
        return pickling.load(payload, resolve=objects)
    except TransferError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError):
            raise BundleError(
                f"the cell uses the module {cause.name!r}, which is not here; install it, or put its folder into "
                "PYTHONPATH, and replay again"
            ) from error
        raise BundleError(f"the bundle cannot be loaded here: {cause or error}") from error


def _user_frame(error: BaseException) -> Any:
    tb, found = error.__traceback__, None
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found = tb.tb_frame
        tb = tb.tb_next
    return found


def _place(error: BaseException | None, frame: Any) -> tuple[str, int, str]:
    """Return file, line and function of a frame of an exception."""
    tb: TracebackType | None = None if error is None else error.__traceback__
    line = 0
    while tb is not None:
        if tb.tb_frame is frame:
            line = tb.tb_lineno
        tb = tb.tb_next
    return frame.f_code.co_filename, line, frame.f_code.co_name


@contextmanager
def _debugging(stop_at: tuple[str, int] | None) -> Iterator[None]:
    if stop_at is None:
        yield
        return
    debugger = pdb.Pdb(nosigint=True)
    if problem := debugger.set_break(*stop_at, temporary=True):
        raise BundleError(f"it cannot stop at line {stop_at[1]}: {problem}")
    debugger._wait_for_mainpyfile = False
    debugger.reset()
    debugger.botframe = sys._getframe()
    debugger.stopframe, debugger.returnframe, debugger.quitting, debugger.stoplineno = (
        debugger.botframe,
        None,
        False,
        -1,
    )
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(None)
