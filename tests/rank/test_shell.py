from __future__ import annotations

import gc
import importlib
import linecache
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import IPython
import msgspec
import pytest
from IPython.core.interactiveshell import InteractiveShell

from meshbook.ids import CallId
from meshbook.rank import interrupt
from meshbook.rank.cells import shell_commands, shell_storage, tracebacks
from meshbook.rank.cells.code_runner import CellRun, CodeRunner
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.preload import preload
from meshbook.wire.messages import ClearOutput, DebuggerStop, Display, Notice, RankError, RunCell, Text
from tests.budget import WAIT_S

DEADLINE_S = WAIT_S


class Rank:
    """A shell with its output, as a rank has them."""

    def __init__(self) -> None:
        self.output = OutputBuffer(redirect_fds=False)
        self.gate = InterruptGate()
        self.gate.install()
        self.shell = RankShell.make(output=self.output, gate=self.gate)
        self.runner = CodeRunner(self.shell, self.output, self.gate)

    def run(self, source: str, **fields: Any) -> CellRun:
        self.output.pop_items()
        stdout, stderr = sys.stdout, sys.stderr
        self.output.install()
        try:
            return self.runner.run(RunCell(CallId("c-1"), (0,), textwrap.dedent(source), **fields))
        finally:
            self.output.uninstall()
            sys.stdout, sys.stderr = stdout, stderr

    def ok(self, source: str, **fields: Any) -> CellRun:
        run = self.run(source, **fields)
        assert run.status == "ok", run.error
        return run

    def error(self, source: str, **fields: Any) -> RankError:
        run = self.run(source, **fields)
        assert run.status == "error"
        assert run.error is not None
        return run.error

    def said(self) -> str:
        return "".join(item.text for item in self.output.pop_items() if isinstance(item, Text))

    def line(self, thread: int) -> int | None:
        """The line of the running cell that a thread is at, below whatever it called."""
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code.co_filename != self.runner.running_file:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno

    def interrupted(self, act: Callable[[], CellRun], *, at_line: int | None = None) -> CellRun:
        """Do something that prints, and SIGINT once it has (and is at that line of its cell): again and again, as a
        host does, until it has ended.
        """
        over = threading.Event()
        main = threading.get_ident()

        def stop() -> None:
            select.select(self.output.poll_fds()[:1], [], [], DEADLINE_S)
            while at_line is not None and self.line(main) != at_line and not over.is_set():
                os.sched_yield()
            while not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                over.wait(0.7)

        helper = threading.Thread(target=stop)
        helper.start()
        started = time.monotonic()
        try:
            run = act()
        finally:
            over.set()
            helper.join(WAIT_S)
        assert time.monotonic() - started < DEADLINE_S
        return run

    def interrupted_cell(self, source: str, *, at_line: int | None = None) -> CellRun:
        return self.interrupted(lambda: self.run(source), at_line=at_line)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    for name in ("TERM", "CLICOLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PAGER", "GIT_PAGER", "MPLBACKEND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and so it is what it was, after the shell has set it
    monkeypatch.setattr(sys, "ps1", "", raising=False)
    monkeypatch.setattr(sys, "ps2", "", raising=False)
    monkeypatch.setattr(sys, "ps3", "", raising=False)
    rank = Rank()
    yield rank
    rank.shell.close()
    rank.gate.uninstall()


def plain(error: RankError) -> str:
    """The traceback without colours."""
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


# ---------------------------------------------------------------------------------------------------------------------
# Values


def test_the_last_expression_is_the_value_and_is_not_printed(rank: Rank) -> None:
    run = rank.ok("x = 20\nx + 22")
    assert (run.has_result, run.result) == (True, 42)
    assert rank.output.pop_items() == ()


@pytest.mark.parametrize("source", ["x = 1", "None", "1 + 1;", "1 + 1;  # quiet", "for i in range(3): i", "", "  \n"])
def test_some_cells_have_no_value(rank: Rank, source: str) -> None:
    assert not rank.ok(source).has_result


def test_earlier_values_and_cells_are_at_hand_under_their_numbers(rank: Rank) -> None:
    rank.ok("'first'", execution_count=3)
    rank.ok("'second'", execution_count=8)
    assert rank.ok("_, __, Out[3], Out[8], _3, In[3], In[8], len(In)", execution_count=9).result == (
        "second",
        "first",
        "first",
        "second",
        "first",
        "'first'",
        "'second'",
        10,
    )
    assert rank.shell.execution_count == 10


def test_a_cell_that_runs_again_under_its_number_replaces_itself_and_nothing_else(rank: Rank) -> None:
    rank.ok("'a'", execution_count=1)
    rank.ok("'b'", execution_count=2)
    rank.ok("'c'", execution_count=1)
    assert rank.ok("In[:3], Out[1], Out[2]", execution_count=3).result == (["", "'c'", "'b'"], "c", "b")


def test_the_namespace_does_not_grow_with_every_cell(rank: Rank) -> None:
    for number in range(1, 400):
        rank.ok(f"{number}", execution_count=number)
    assert len(rank.shell.user_ns) < shell_storage.MAX_NUMBERED_NAMES + 50
    assert rank.ok("_399, _i399, In[5], Out[5]", execution_count=400).result == (399, "399", "5", 5)


def test_a_cell_without_a_number_takes_the_ranks_next(rank: Rank) -> None:
    rank.ok("1", execution_count=5)
    rank.ok("'six'")
    assert rank.ok("Out[6]").result == "six"


def test_a_cell_outside_of_history_leaves_no_trace_of_itself(rank: Rank) -> None:
    rank.ok("x = 1", execution_count=4, store_history=False)
    assert rank.shell.execution_count == 4
    assert rank.ok("'x = 1' in In").result is False


def test_a_silent_cell_runs_and_says_nothing(rank: Rank) -> None:
    run = rank.ok("x = 5\nprint('loud')\ndisplay(x)\nx", silent=True)
    assert not run.has_result
    assert rank.output.pop_items() == ()
    assert rank.ok("x").result == 5


def test_values_that_are_not_the_last_are_displayed_when_all_are_wanted(rank: Rank) -> None:
    rank.ok("get_ipython().ast_node_interactivity = 'all'")
    run = rank.ok("1\n2\n3")
    assert run.result == 3
    assert [item.data["text/plain"] for item in rank.output.pop_items() if isinstance(item, Display)] == ["1", "2"]


def test_the_value_is_not_kept_by_the_shell_once_the_user_lets_go(rank: Rank) -> None:
    run = rank.ok("class Big: pass\nBig()")
    gone = weakref.ref(run.result)
    del run
    for value in range(3):  # _, __ and ___ are somebody else's
        rank.ok(str(value))
    rank.ok("%reset -f out")
    gc.collect()
    assert gone() is None


def test_get_ipython_finds_this_shell_from_cells_and_from_libraries(rank: Rank) -> None:
    assert rank.ok("get_ipython()").result is rank.shell
    assert IPython.get_ipython() is rank.shell
    assert rank.ok("import IPython; IPython.get_ipython() is get_ipython()").result is True


def test_classes_of_cells_are_in_main_and_can_be_pickled(rank: Rank) -> None:
    assert rank.ok("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A").result is True


def test_future_imports_hold_for_the_cells_after(rank: Rank) -> None:
    rank.ok("%matplotlib --list\nfrom __future__ import annotations")
    assert rank.ok("def f(x: not_there): pass\nf.__annotations__['x']").result == "not_there"


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_a_cell_tells_which_names_it_bound_and_deleted(rank: Rank) -> None:
    rank.shell.bind_presets(rank=0, mesh="m")
    run = rank.ok("x = 1\nimport json\n_private = 2\n_, In, Out")
    assert (run.bound, run.unbound) == (("x", "json"), ())
    run = rank.ok("x = 2\ndel json")
    assert (run.bound, run.unbound) == (("x",), ("json",))
    run = rank.ok("rank, mesh, x")
    assert (run.bound, run.unbound) == ((), ())
    assert rank.ok("rank = 7").bound == ("rank",)


def test_reset_forgets_what_cells_bound_and_keeps_the_ranks_own_names(rank: Rank) -> None:
    rank.shell.bind_presets(rank=3)
    rank.ok("x = 1; rank = 9")
    assert rank.ok("%reset -f").unbound == ("x",)
    assert rank.ok("rank, 'x' in globals()").result == (3, False)


def test_a_failing_cell_tells_what_it_bound_before(rank: Rank) -> None:
    run = rank.run("a = 1\n1 / 0\nb = 2")
    assert run.status == "error"
    assert run.bound == ("a",)


def test_names_that_others_bind_between_cells_are_not_news_of_the_next_cell(rank: Rank) -> None:
    rank.shell.user_ns["pushed"] = [1]
    assert rank.ok("x = pushed").bound == ("x",)


def test_a_deleted_object_is_gone_while_the_cell_still_runs(rank: Rank) -> None:
    rank.ok("import weakref\nclass Big: pass\nbig = Big()\ngone = weakref.ref(big)")
    assert rank.ok("del big\ngone() is None").result is True


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def test_a_failure_shows_the_cells_lines_and_only_the_users_frames(rank: Rank) -> None:
    error = rank.error(
        """\
        def divide(a):
            return a / 0

        divide(1)
        """,
        execution_count=7,
    )
    assert (error.ename, error.evalue) == ("ZeroDivisionError", "division by zero")
    text = plain(error)
    assert "Cell In[7], line 4" in text
    assert "Cell In[7], line 2, in divide(a)" in text
    assert "----> 2     return a / 0" in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "meshbook" not in text
    assert [(frame.line, frame.function) for frame in error.frames] == [(4, "<module>"), (2, "divide")]
    assert any("\x1b[" in part for part in error.traceback)
    assert error.pickled is not None
    assert type(pickle.loads(error.pickled)) is ZeroDivisionError


def test_a_cell_is_compiled_under_the_name_that_the_controller_gives_it(rank: Rank) -> None:
    error = rank.error("x = 1\nx.nope", execution_count=2, filename="/tmp/ipykernel_1/2.py")
    assert error.frames[-1].file == "/tmp/ipykernel_1/2.py"
    assert "Cell In[2], line 2" in plain(error)
    assert linecache.getline("/tmp/ipykernel_1/2.py", 2) == "x.nope\n"


def test_without_a_name_equal_cells_have_equal_names_on_every_rank(rank: Rank) -> None:
    first = rank.error("1 / 0", execution_count=5)
    rank.ok("something_else = 1")
    assert rank.error("1 / 0", execution_count=5).frames == first.frames


def test_an_instruction_without_a_line_fails_where_its_function_begins(rank: Rank) -> None:
    """As an interrupt may, between the lines of `with` or `for`."""
    source = (
        "def fails():\n    raise ValueError('odd')\nfails.__code__ = fails.__code__.replace(co_linetable=b'')\nfails()"
    )
    error = rank.error(source, execution_count=6)
    assert [(frame.line, frame.function) for frame in error.frames] == [(4, "<module>"), (1, "fails")]


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [("None.nothing", True), ("{}['k']", True), ("assert False", True), ("raise AttributeError('x')", False),
     ("raise KeyError('x')", False), ("int('x')", False)],
)  # fmt: skip
def test_frames_of_meshbook_are_shown_of_its_own_defects_only(rank: Rank, line: str, is_shown: bool) -> None:
    file = os.path.join(os.path.dirname(tracebacks.__file__), "odd.py")
    source = compile(f"def odd():\n    {line}\n", file, "exec")
    rank.ok("")
    rank.shell.user_ns["source"] = source
    error = rank.error("exec(source)\nodd()")
    assert [frame.function for frame in error.frames] == ["<module>", *(["odd"] if is_shown else [])]


def test_frames_of_libraries_are_shown(rank: Rank) -> None:
    error = rank.error("import json\njson.loads('{')")
    assert error.frames[0].function == "<module>"
    assert error.frames[-1].file.endswith("json/decoder.py")


def test_a_cell_that_does_not_compile_fails_before_its_first_line(rank: Rank) -> None:
    error = rank.error("x = 1\nprint('ran')\ny = = 2", execution_count=4)
    assert error.ename == "SyntaxError"
    assert "Cell In[4], line 3" in plain(error)
    assert "y = = 2" in plain(error)
    assert error.frames == ()
    assert rank.said() == ""
    assert "x" not in rank.shell.user_ns
    assert rank.error("return 1").ename == "SyntaxError"


def test_a_syntax_error_in_an_imported_module_shows_where_it_was_imported(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "broken_module_of_a_test.py").write_text("a = = 1\n")
    error = rank.error(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport broken_module_of_a_test", execution_count=3
    )
    sys.path.remove(str(tmp_path))
    assert "line 3" in plain(error)
    assert "a = = 1" in plain(error)


def test_exceptions_that_led_to_one_another_are_all_shown(rank: Rank) -> None:
    text = plain(rank.error("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e"))
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("KeyError: 'x'")


def test_exception_groups_are_shown_with_their_members(rank: Rank) -> None:
    text = plain(rank.error("raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])"))
    assert "ValueError: a" in text
    assert "TypeError: b" in text
    assert "meshbook" not in text


def test_sys_exit_is_an_error_of_its_cell(rank: Rank) -> None:
    error = rank.error("import sys\nsys.exit(3)")
    assert (error.ename, error.evalue) == ("SystemExit", "3")
    assert rank.ok("1 + 1").result == 2


@pytest.mark.parametrize("source", ["exit", "quit", "exit()", "quit()", "exit(2)", "if True:\n    quit()"])
def test_exit_says_how_to_end_the_mesh_and_ends_nothing(rank: Rank, source: str) -> None:
    assert "%mesh stop" in rank.error(source).evalue
    assert rank.ok("1 + 1").result == 2


@pytest.mark.usefixtures("starts_processes")
def test_os_exit_ends_the_process() -> None:
    alone("run('import os; os._exit(7)')", status=7)


def test_an_unknown_magic_is_told_in_one_line(rank: Rank) -> None:
    error = rank.error("%no_such_magic")
    assert error.traceback == ("UsageError: Line magic function `%no_such_magic` not found.",)


def test_tb_shows_the_last_failure_again(rank: Rank) -> None:
    rank.error("1 / 0")
    rank.ok("%tb")
    said = rank.said()
    assert "ZeroDivisionError" in said
    assert "meshbook" not in said


def test_of_a_stop_deep_in_a_library_few_frames_are_drawn_and_tb_has_them_all(rank: Rank) -> None:
    source = """
        import copy
        class Last:
            def __deepcopy__(self, memo):
                raise KeyboardInterrupt
        def nest(depth):
            return [nest(depth - 1)] if depth else Last()
        copy.deepcopy(nest(20))
        """
    run = rank.run(source)
    assert run.status == "interrupted"
    assert run.error is not None
    drawn = "\n".join(run.error.traceback)
    assert len(run.error.frames) > 20
    assert drawn.count("copy.py") == 1  # beside the innermost frame, which is the user's
    assert "__deepcopy__" in drawn
    rank.ok("%tb")
    assert rank.said().count("copy.py") > 1


def test_debug_and_breakpoints_say_how_to_look_where_nobody_gives_commands(rank: Rank) -> None:
    rank.shell.bind_presets(rank=2)
    rank.ok("%debug")
    assert "Nothing has failed" in rank.said()
    for source in ("breakpoint()", "import pdb; pdb.set_trace()", "from pdb import set_trace; set_trace()"):
        error = rank.error(source)
        assert "there is nobody to give the debugger commands here" in error.evalue
        assert "MESHBOOK_BREAKPOINT=0" in error.evalue
    assert "cannot stop at its first line" in rank.error("1", stop_first=True).evalue
    rank.error("secret = 41\n1 / 0")
    rank.ok("%debug")
    said = rank.said()
    assert "ZeroDivisionError" in said
    assert "sys.last_value is the exception" in said


def test_with_pdb_on_a_failure_that_nobody_can_look_into_is_shown_once(rank: Rank) -> None:
    rank.ok("%pdb on")
    rank.said()
    rank.error("1 / 0")
    assert rank.said() == ""
    rank.ok("%debug")
    assert rank.said().count("division by zero") == 1
    assert rank.shell.call_pdb


@pytest.mark.parametrize("variable", ["PYTHONBREAKPOINT", "MESHBOOK_BREAKPOINT"])
def test_breakpoints_are_passed_by_where_the_environment_says_so(
    rank: Rank, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    assert rank.ok("breakpoint()\n5").result == 5


def test_what_else_would_stop_is_passed_by_too_as_the_error_promises(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHBOOK_BREAKPOINT", "0")
    assert rank.ok("5", stop_first=True).result == 5
    source = "import pdb\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    pdb.post_mortem(error)\n6"
    assert rank.ok(source).result == 6
    assert rank.ok("import pdb; pdb.pm()").status == "ok"


class Dialogue:
    """Gives the debugger of a rank commands, and stores what it said before each."""

    def __init__(self, rank: Rank, *commands: str) -> None:
        self.commands = list(commands)
        self.stops: list[DebuggerStop] = []
        rank.shell.terminal.can_ask = lambda: True
        rank.shell.terminal.ask_command = self.ask

    def ask(self, stop: DebuggerStop) -> str:
        self.stops.append(stop)
        if not self.commands:
            raise EOFError
        return self.commands.pop(0)


# breakpoint() stops before the next line; from Python 3.13 on in its own.
STOPS_IN_ITS_OWN_LINE = sys.version_info >= (3, 13)


def line_of_stop(line: int) -> int:
    """Return the line at which breakpoint() in a line stops."""
    return line if STOPS_IN_ITS_OWN_LINE else line + 1


def test_a_breakpoint_stops_in_the_cells_frame_and_the_cell_goes_on(rank: Rank) -> None:
    to_next_line = ["n"] if STOPS_IN_ITS_OWN_LINE else []
    dialogue = Dialogue(rank, *to_next_line, "p x", "x = 7", "n", "c")
    run = rank.ok("def f(x):\n    breakpoint()\n    y = x + 1\n    return y\nf(5)", execution_count=4)
    assert run.result == 8
    assert dialogue.stops[0].place == f"cell 4, line {line_of_stop(2)} in f"
    first, answer, changed, stepped = dialogue.stops[len(to_next_line) :]
    assert first.text == "stopped at cell 4, line 3 in f · x=5\n-> y = x + 1\n"
    assert answer.text == "5\n"
    assert changed.text == ""
    assert stepped.text == "stopped at cell 4, line 4 in f · x=7 · y=8\n-> return y\n"


@pytest.mark.parametrize(
    "source", ["a = 7\nbreakpoint()", "a = 7\nif a: breakpoint()", "a = 7\nawait g()\nbreakpoint()"]
)
def test_a_breakpoint_in_the_last_line_stops_too_and_once(rank: Rank, source: str) -> None:
    rank.ok("async def g(): pass")
    dialogue = Dialogue(rank, "p a", "n")
    rank.ok(source, execution_count=4)
    line = source.count("\n") + 1
    assert [stop.place for stop in dialogue.stops] == [f"cell 4, line {line}"] * 2
    assert dialogue.stops[0].text.startswith(f"stopped at cell 4, line {line}")
    assert dialogue.stops[1].text == "7\n"
    assert sys.gettrace() is None


def test_where_shows_the_users_frames_only(rank: Rank) -> None:
    dialogue = Dialogue(rank, "w", "c")
    rank.ok("def f():\n    breakpoint()\n    return 1\nf()", execution_count=4)
    places = [line for line in dialogue.stops[1].text.splitlines() if not line.startswith("->")]
    assert places == ["  cell 4, line 4", f"> cell 4, line {line_of_stop(2)} in f"]


def test_a_step_out_of_the_last_line_ends_the_cell_and_the_next_is_not_traced(rank: Rank) -> None:
    Dialogue(rank, *["s"] * 30)
    assert rank.ok("breakpoint()\na = 1\nb = 2\na + b").result == 3
    assert sys.gettrace() is None
    dialogue = Dialogue(rank)
    assert rank.ok("a * 10").result == 10
    assert dialogue.stops == []


def test_breakpoints_of_the_debugger_end_with_the_cell(rank: Rank) -> None:
    dialogue = Dialogue(rank, "b 4", "c", "c")
    rank.ok("breakpoint()\na = 1\na = 2\na = 3", execution_count=4)
    assert [stop.place for stop in dialogue.stops] == [f"cell 4, line {line_of_stop(1)}"] * 2 + ["cell 4, line 4"]
    assert sys.gettrace() is None
    later = Dialogue(rank)
    rank.ok("a = 1\na = 1\na = 1\na = 1", execution_count=4)
    assert later.stops == []


def test_a_cell_goes_on_when_its_debuggers_client_has_left(rank: Rank) -> None:
    dialogue = Dialogue(rank)
    assert rank.ok("for i in range(3):\n    breakpoint()\ni").result == 2
    assert len(dialogue.stops) == 3


def test_a_cell_stops_at_its_first_line(rank: Rank) -> None:
    dialogue = Dialogue(rank, "n", "p a", "c")
    assert rank.ok("a = 1\na + 1", execution_count=4, stop_first=True).result == 2
    assert [stop.place for stop in dialogue.stops] == ["cell 4, line 1", "cell 4, line 2", "cell 4, line 2"]
    assert dialogue.stops[2].text == "1\n"


def test_debug_looks_into_the_frames_of_the_last_failure(rank: Rank) -> None:
    rank.error("def f(secret):\n    return 1 / 0\nf(41)", execution_count=4)
    dialogue = Dialogue(rank, "p secret", "u", "c")
    rank.ok("%debug")
    first, answer, up = dialogue.stops
    assert first.text.startswith("ZeroDivisionError: division by zero\nstopped at cell 4, line 2 in f · secret=41\n")
    assert answer.text == "41\n"
    assert up.place == "cell 4, line 3"


def test_pdb_on_opens_the_debugger_at_each_failure_and_the_failure_is_still_the_cells(rank: Rank) -> None:
    rank.ok("%pdb on")
    dialogue = Dialogue(rank, "p 1 + 1", "c")
    assert rank.error("1 / 0").ename == "ZeroDivisionError"
    assert dialogue.stops[1].text == "2\n"
    rank.ok("%pdb off")
    assert rank.error("1 / 0").ename == "ZeroDivisionError"
    assert len(dialogue.stops) == 2


def test_a_stop_at_the_prompt_ends_the_cell_at_the_users_line(rank: Rank) -> None:
    dialogue = Dialogue(rank)

    def interrupt(stop: DebuggerStop) -> str:
        raise KeyboardInterrupt

    rank.shell.terminal.ask_command = interrupt
    run = rank.run("def f():\n    breakpoint()\n    return 1\nf()")
    assert run.status == "interrupted"
    assert run.error is not None
    assert [frame.function for frame in run.error.frames] == ["<module>", "f"]
    assert sys.gettrace() is None
    assert dialogue.stops == []


@pytest.mark.usefixtures("starts_processes")
def test_a_child_process_and_another_thread_cannot_stop_at_breakpoints(rank: Rank) -> None:
    Dialogue(rank, "c")
    source = """
    import threading
    told = []
    def work():
        try:
            breakpoint()
        except Exception as error:
            told.append(str(error))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    """
    rank.ok(source)
    assert "on the main thread" in rank.ok("told[0]").result
    status = rank.ok("import os\npid = os.fork()\nif not pid:\n    work()\n    os._exit(len(told))\nos.waitpid(pid, 0)")
    assert os.waitstatus_to_exitcode(status.result[1]) == 2


def test_enormous_messages_and_deep_recursions_are_told_in_bounds(rank: Rank) -> None:
    error = rank.error("raise ValueError('x' * 10_000_000)")
    assert len(error.evalue) < 2 * tracebacks.MAX_EVALUE_CHARS
    assert sum(map(len, error.traceback)) < 2 * tracebacks.MAX_TRACEBACK_CHARS
    assert error.pickled is None
    error = rank.error("def f(n):\n    return f(n + 1)\nf(0)")
    assert error.ename == "RecursionError"
    assert len(error.frames) <= tracebacks.MAX_FRAMES
    assert error.frames[0].function == "<module>"
    assert sum(map(len, error.traceback)) < 2 * tracebacks.MAX_TRACEBACK_CHARS


def test_an_exception_that_cannot_even_be_printed_is_told(rank: Rank) -> None:
    error = rank.error("class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd")
    assert error.ename == "Odd"
    assert error.evalue == "<unprintable Odd>"
    assert error.pickled is None  # its class is this rank's alone
    msgspec.msgpack.encode(error)


def test_an_exception_that_raises_when_it_is_looked_at_is_reported_by_its_class(rank: Rank) -> None:
    error = rank.error(
        "class Odd(Exception):\n    def __getattr__(self, name): return getattr(self.response, name)\nraise Odd('lost')"
    )
    assert (error.ename, error.evalue, error.notes) == ("Odd", "lost", ())


def test_notes_of_an_exception_come_along(rank: Rank) -> None:
    error = rank.error("e = ValueError('v')\ne.add_note('remember this')\nraise e")
    assert error.notes == ("remember this",)
    assert "remember this" in plain(error)


def test_a_failing_cell_does_not_hold_its_objects_once_another_has_failed(rank: Rank) -> None:
    rank.ok("import weakref\nclass Big: pass")
    rank.error("def f():\n    global gone\n    big = Big()\n    gone = weakref.ref(big)\n    1 / 0\nf()")
    rank.error("1 / 0")
    gc.collect()
    assert rank.ok("gone() is None").result is True


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts


def test_sigint_ends_a_sleep_and_the_next_cell_runs(rank: Rank) -> None:
    run = rank.interrupted_cell("import time\nprint('ready')\ntime.sleep(1000)", at_line=3)
    assert run.status == "interrupted"
    assert run.error is not None
    assert run.error.ename == "KeyboardInterrupt"
    assert "line 3" in plain(run.error)
    assert "meshbook" not in plain(run.error)
    assert rank.ok("1 + 1").result == 2


def test_sigint_ends_an_await_at_once_and_shows_the_line_that_awaited(rank: Rank) -> None:
    run = rank.interrupted_cell(
        """\
        import asyncio
        async def nap():
            asyncio.get_running_loop().call_soon(print, 'asleep')
            try:
                await asyncio.sleep(1000)
            finally:
                print('cleaned up')
        await nap()
        """
    )
    assert run.status == "interrupted"
    assert run.error is not None
    assert [(frame.line, frame.function) for frame in run.error.frames[:2]] == [(8, "<module>"), (5, "nap")]
    assert "cleaned up" in rank.said()
    assert rank.ok("await asyncio.sleep(0, 'again')").result == "again"


def test_sigint_ends_a_coroutine_that_computes(rank: Rank) -> None:
    run = rank.interrupted_cell("import asyncio\nawait asyncio.sleep(0)\nprint('ready')\nwhile True:\n    pass")
    assert run.status == "interrupted"
    assert run.error is not None
    assert run.error.frames[0].function == "<module>"


@pytest.mark.usefixtures("starts_processes")
def test_sigint_ends_a_shell_command_with_its_children_and_the_cell(rank: Rank) -> None:
    run = rank.interrupted_cell("!echo $$; sleep 1000\nafter = 1")
    assert run.status == "interrupted"
    assert "after" not in rank.shell.user_ns
    pid = int(rank.said().split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_code_that_catches_the_interrupt_goes_on(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "SIGINT_DEBOUNCE_S", DEADLINE_S)  # what is repeated is the same stop
    run = rank.interrupted_cell(
        "import time\ntry:\n    print('ready')\n    time.sleep(1000)\nexcept KeyboardInterrupt:\n    saved = 1\nsaved"
    )
    assert (run.status, run.result) == ("ok", 1)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def test_a_call_gives_its_value_or_its_failure(rank: Rank) -> None:
    called = rank.runner.call(lambda: {"a": 1})
    assert (called.status, called.has_result, called.result) == ("ok", True, {"a": 1})
    called = rank.runner.call(lambda: None)
    assert (called.has_result, called.result) == (True, None)
    called = rank.runner.call(lambda: 1 / 0)
    assert called.status == "error"
    assert called.error is not None
    assert called.error.frames[-1].file == __file__


def test_a_failure_at_an_instruction_that_has_no_line_is_told(rank: Rank) -> None:
    def fail() -> None:
        raise ValueError("no")

    fail.__code__ = fail.__code__.replace(co_linetable=b"")
    called = rank.runner.call(fail)
    assert called.error is not None
    assert (called.error.ename, called.error.evalue) == ("ValueError", "no")


def test_a_call_is_interruptible(rank: Rank) -> None:
    def spin() -> None:
        rank.output.write("stdout", "ready")
        while True:
            pass

    assert rank.interrupted(lambda: rank.runner.call(spin)).status == "interrupted"
    assert rank.runner.call(lambda: 5).result == 5


def test_a_preview_by_the_users_own_repr_is_interruptible(rank: Rank) -> None:
    class Endless:
        def __repr__(self) -> str:
            signal.raise_signal(signal.SIGINT)
            return "never"

    shown = rank.runner.preview(Endless())
    assert "interrupted while it was being shown" in shown.text
    assert rank.runner.preview([1]).text == "[1]"


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def test_input_and_getpass_ask_whoever_composed_the_rank(rank: Rank) -> None:
    asked: list[tuple[str, bool, bool]] = []

    def ask(prompt: str, password: bool) -> str:
        asked.append((prompt, password, rank.runner.allow_input))
        return "answer"

    rank.shell.terminal.request_input = ask
    run = rank.ok("import getpass\ninput('name? '), input(), getpass.getpass()", allow_input=True)
    assert run.result == ("answer", "answer", "answer")
    assert asked == [("name? ", False, True), ("", False, True), ("Password: ", True, True)]
    assert not rank.runner.allow_input


def test_input_with_nobody_to_ask_is_an_error_of_the_cell(rank: Rank) -> None:
    error = rank.error("input('?')")
    assert error.ename == "EOFError"
    assert [frame.function for frame in error.frames] == ["<module>"]


# ---------------------------------------------------------------------------------------------------------------------
# Magics and shell commands


@pytest.mark.usefixtures("starts_processes")
def test_a_shell_command_prints_and_leaves_its_exit_code(rank: Rank) -> None:
    rank.shell.user_ns["word"] = "hello"
    run = rank.ok("!echo {word}; echo oops >&2; exit 3")
    assert rank.said() == "hello\noops\n"
    assert run.bound == ()
    assert rank.ok("_exit_code").result == 3


@pytest.mark.usefixtures("starts_processes")
def test_a_shell_command_ended_by_a_signal_has_a_negative_code(rank: Rank) -> None:
    rank.ok("!kill -9 $$")
    assert rank.ok("_exit_code").result == -9


@pytest.mark.usefixtures("starts_processes")
def test_a_shell_commands_output_can_be_assigned(rank: Rank) -> None:
    run = rank.ok("lines = !printf 'a\\nb\\n'\nlines")
    assert list(run.result) == ["a", "b"]
    assert run.bound == ("lines",)


@pytest.mark.usefixtures("starts_processes")
def test_what_a_shell_command_prints_just_before_it_ends_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    process = subprocess.Popen(["echo", "said"], stdout=slave)

    def find_nothing(*_: Any) -> tuple[list[int], list[int], list[int]]:
        """There is nothing to read yet; before anybody looks again, the command prints and ends."""
        monkeypatch.undo()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return [], [], []

    monkeypatch.setattr(select, "select", find_nothing)
    assert b"".join(shell_commands._read_chunks(master, process)) == b"said\r\n"
    os.close(master)
    os.close(slave)


@pytest.mark.usefixtures("starts_processes")
def test_shell_commands_see_no_keyboard(rank: Rank) -> None:
    rank.ok("!read x; echo got $?")
    assert rank.said() == "got 1\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("%timeit -n1 -r1 pass", "per loop"),
        ("%%time\nx = 1", "Wall time"),
        ("%time 1 + 1", "Wall time"),
        ("%who", "Interactive namespace is empty"),
        ("%pwd", ""),
        ("time 1 + 1", "Wall time"),
    ],
)
def test_magics_run_on_the_rank(rank: Rank, source: str, said: str) -> None:
    rank.ok(source)
    assert said in rank.said()


def test_automagic_yields_to_a_variable_of_that_name(rank: Rank) -> None:
    rank.ok("time = 5")
    assert rank.ok("time").result == 5


def test_cd_changes_the_folder(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    rank.ok("%cd sub")
    assert Path.cwd() == tmp_path / "sub"


def test_capture_keeps_the_output_of_its_cell(rank: Rank) -> None:
    rank.ok("%%capture kept\nprint('inside')\ndisplay(5)\n6")
    assert rank.said() == ""
    assert rank.ok("kept.stdout, len(kept.outputs)").result == ("inside\n", 2)


def test_autoreload_brings_in_a_changed_module(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "changing_module_of_a_test.py"
    module.write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rank.ok("%load_ext autoreload\n%autoreload 2\nimport changing_module_of_a_test as m")
    assert rank.ok("m.value").result == 1
    module.write_text("value = 22\n")
    os.utime(module, (time.time() + 5, time.time() + 5))
    importlib.invalidate_caches()
    assert rank.ok("m.value").result == 22


def test_history_is_in_memory_only(rank: Rank) -> None:
    rank.ok("x = 1", execution_count=1)
    rank.ok("y = 2", execution_count=2)
    rank.ok("%history -n 1-2", execution_count=3)
    assert rank.said().split() == ["1:", "x", "=", "1", "2:", "y", "=", "2"]
    assert not rank.shell.history_manager.enabled
    assert rank.shell.history_manager.db_input_cache == []


def test_help_is_displayed_and_no_pager_waits(rank: Rank) -> None:
    rank.ok("len?")
    (shown,) = rank.output.pop_items()
    assert isinstance(shown, Display)
    assert "Return the number of items" in shown.data["text/plain"]


def test_a_run_script_binds_its_names(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("made = 7\nprint('script ran')\n")
    run = rank.ok(f"%run {tmp_path / 'script.py'}")
    assert run.bound == ("made",)
    assert rank.said() == "script ran\n"


# ---------------------------------------------------------------------------------------------------------------------
# await


def test_cells_may_await_and_share_one_loop(rank: Rank) -> None:
    rank.ok("import asyncio\nready = asyncio.Event()\nasync def work():\n    await ready.wait()\n    return 'done'")
    rank.ok("task = asyncio.create_task(work())\nawait asyncio.sleep(0)")
    assert rank.ok("ready.set()\nawait task").result == "done"
    error = rank.error("await asyncio.sleep(0)\n1 / 0", execution_count=3)
    assert error.frames[0].line == 2
    assert "asyncio" not in plain(error).replace("await asyncio.sleep(0)", "")


def test_asyncio_run_works_in_a_cell(rank: Rank) -> None:
    assert rank.ok("import asyncio\nasync def f():\n    return 4\nasyncio.run(f())").result == 4


# ---------------------------------------------------------------------------------------------------------------------
# Displays


def test_displays_come_in_order_with_text(rank: Rank) -> None:
    rank.ok("from IPython.display import HTML\nprint('before')\ndisplay(HTML('<b>bold</b>'))\nprint('after')")
    before, shown, after = rank.output.pop_items()
    assert (before, after) == (Text("stdout", "before\n"), Text("stdout", "after\n"))
    assert isinstance(shown, Display)
    assert shown.data["text/html"] == "<b>bold</b>"


def test_displays_can_be_updated_and_cleared(rank: Rank) -> None:
    rank.ok(
        "from IPython.display import clear_output\n"
        "handle = display('one', display_id='bar')\nhandle.update('two')\nclear_output(wait=True)"
    )
    first, second, clear = rank.output.pop_items()
    assert first == Display({"text/plain": "'one'"}, display_id="bar")
    assert second == Display({"text/plain": "'two'"}, display_id="bar", update=True)
    assert clear == ClearOutput(wait=True)


def test_display_data_is_fit_to_travel(rank: Rank) -> None:
    rank.ok(
        "from IPython.display import publish_display_data\nimport numpy as np\n"
        "publish_display_data({'image/png': b'\\x89PNG', 'application/json': {'a': (1, np.float32(2)), 3: {4}},"
        " 'application/vnd.jupyter.widget-view+json': {'model_id': 'x'}, 'text/plain': 'p'}, {'m': (1,)})"
    )
    *_, shown = rank.output.pop_items()  # behind a notice on widgets
    assert shown == Display(
        {"image/png": "iVBORw==", "application/json": {"a": [1, 2.0], "3": [4]}, "text/plain": "p"}, {"m": [1]}
    )
    msgspec.msgpack.encode(shown)


@pytest.mark.usefixtures("starts_processes")
def test_tqdm_is_text_here() -> None:
    """In a process of its own: tqdm.auto settles on a kind of bar once."""
    alone("""
        run("from tqdm.auto import tqdm")
        (item,) = run("for i in tqdm(range(3), desc='steps'): pass")
        assert isinstance(item, Text), item
        assert item.stream == "stderr" and "steps: 100%" in item.text
        """)


@pytest.mark.usefixtures("starts_processes")
def test_bars_of_tqdm_notebook_are_text_here_and_end_at_their_last_state() -> None:
    """In a process of its own: which kind of bar tqdm.notebook has is decided when it is imported."""
    alone("""
        run("from tqdm.notebook import tqdm, trange\\nimport tqdm.notebook as bars")
        (item,) = run("for i in tqdm(range(3), desc='steps', ncols='100%', display=True): pass")
        assert isinstance(item, Text), item
        assert item.stream == "stderr" and "steps: 100%" in item.text
        (item,) = run("for i in bars.tnrange(5):\\n    if i == 3: break")
        assert "60%" in item.text or "3/5" in item.text, item
        (item,) = run("import tqdm\\nfor i in tqdm.tqdm_notebook([1, 2]): pass")
        assert "2/2" in item.text, item
        """)


@pytest.mark.parametrize("first", ["pass", "%matplotlib inline"])
@pytest.mark.usefixtures("starts_processes")
def test_figures_are_shown_at_the_end_of_the_cell(first: str) -> None:
    """In a process of its own: matplotlib settles on a backend once."""
    alone(f"""
        assert run({first!r}) == ()
        assert "matplotlib" not in sys.modules or {first!r} != "pass"
        for _ in range(2):
            (shown,) = run("import matplotlib.pyplot as plt\\nplt.plot([1, 2])\\nNone")
            assert isinstance(shown, Display) and shown.data["image/png"].startswith("iVBOR"), shown
        assert run("1 + 1") == ()
        """)


def alone(source: str, status: int = 0) -> None:
    """Run source in a new process that has a rank's shell: `run(cell)` gives what the cell showed."""
    begin = """
        import sys
        from meshbook.rank.output.capture import OutputBuffer
        from meshbook.rank.cells.code_runner import CodeRunner
        from meshbook.rank.interrupt import InterruptGate
        from meshbook.rank.cells.shell import RankShell
        from meshbook.wire.messages import Display, RunCell, Text
        output, gate = OutputBuffer(redirect_fds=False), InterruptGate()
        runner = CodeRunner(RankShell.make(output=output, gate=gate), output, gate)
        def run(source):
            output.install()
            try:
                done = runner.run(RunCell("c", (), source))
            finally:
                output.uninstall()
            assert done.status == "ok", done.error
            return output.pop_items()
        """
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    source = textwrap.dedent(begin) + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, timeout=WAIT_S)
    assert done.returncode == status, done.stderr.decode()


# ---------------------------------------------------------------------------------------------------------------------
# Before and after


def test_preloading_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    vars(sys).pop("last_value", None)
    before: Callable[[], Any] = lambda: (  # noqa: E731
        getattr(sys, "last_value", None),
        sys.stdout,
        sys.displayhook,
        sys.modules["__main__"],
        dict(os.environ),
        threading.active_count(),
        InteractiveShell.initialized(),
        input,
    )
    was = before()
    preload()
    assert before() == was
    assert capfd.readouterr() == ("", "")


def test_closing_a_shell_gives_the_process_back(rank: Rank) -> None:
    hook, ask = sys.breakpointhook, input
    other = RankShell.make(output=OutputBuffer(redirect_fds=False), gate=InterruptGate())
    assert sys.breakpointhook != hook
    assert input != ask
    other.close()
    assert sys.breakpointhook == hook
    assert input == ask


def test_no_event_loop_is_made_before_a_cell_awaits(rank: Rank) -> None:
    rank.ok("1 + 1")
    assert not rank.shell.event_loop.exists
    rank.ok("import asyncio\nawait asyncio.sleep(0)")
    assert rank.shell.event_loop.exists


def test_a_widget_says_once_in_a_cell_where_widgets_work(rank: Rank) -> None:
    pytest.importorskip("ipywidgets")
    rank.ok("from ipywidgets import IntSlider\ndisplay(IntSlider())\nIntSlider()")
    notices = [item.text for item in rank.output.pop_items() if isinstance(item, Notice)]
    assert len(notices) == 1
    assert "%%controller" in notices[0]
