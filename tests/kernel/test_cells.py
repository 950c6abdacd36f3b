"""Cells of a real Meshbook kernel, as a front end sees them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.budget import WAIT_S, when
from tests.gate import Gate
from tests.kernel.frontend import Cell, FrontEnd
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_kernels")

# ---------------------------------------------------------------------------------------------------------------------
# Running, numbering, history


def test_a_method_of_meshbooks_mesh_on_torchs_device_mesh_is_told_where_it_belongs(shared: FrontEnd) -> None:
    cell = shared.run("mesh.pull('x')")
    assert cell.reply["ename"] == "AttributeError"
    assert "mesh.pull is Meshbook's own: call it in a %%controller cell" in cell.traceback
    assert "Meshbook's own" not in shared.run("mesh.nothing_of_ours").traceback


def test_the_last_expressions_value_is_the_cells_and_underscore_is_there_next(shared: FrontEnd) -> None:
    assert shared.run("20 + 1").result == "21"
    assert shared.run("_ * 2").result == "42"


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("import asyncio\nawait asyncio.sleep(0.001, 'slept')", "'slept'"),
        ("lines = !echo a; echo b\nlines", "['a', 'b']"),
        ("world_size", "2"),
        ("rank * 10", "[0] 0\n[1] 10"),
        ("5 if rank else None", "[1] 5"),
        *((source, None) for source in ("None", "x = 1", "x;", "print()", "# nothing")),
    ],
)
def test_a_cells_value_is_shown_once_where_ranks_agree_with_its_ranks_elsewhere_and_none_is_not(
    shared: FrontEnd, source: str, result: str | None
) -> None:
    assert shared.run(source).result == result


@pytest.mark.parametrize(
    ("head", "parts"),
    [("%%mesh --ranks 0", ("----> 3 1 / 0", "# %%mesh --ranks 0")), ("%%controller", ())],
    ids=["ranks", "controller"],
)
def test_tracebacks_of_a_cell_with_a_magic_have_the_cells_line_numbers(
    shared: FrontEnd, head: str, parts: tuple[str, ...]
) -> None:
    cell = shared.run(f"{head}\nx = 1\n1 / 0")
    assert f"Cell In[{cell.reply['execution_count']}], line 3" in cell.traceback
    assert all(part in cell.traceback for part in parts)


def test_cells_are_numbered_and_remembered_as_they_were_written(shared: FrontEnd) -> None:
    source = "%%controller\nlen(In)"
    number = shared.run("'numbered'\n").reply["execution_count"]
    assert shared.run(source).reply["execution_count"] == number + 1
    assert shared.value(f"In[{number}]") == "'numbered'"
    assert shared.value(f"Out[{number}].same()") == "numbered"
    content = {"hist_access_type": "tail", "n": 2, "output": False, "raw": True}
    assert [entry[2] for entry in shared.request("history_request", content)["history"]] == ["'numbered'", source]


def test_tracebacks_name_the_cell_its_line_and_its_number(shared: FrontEnd) -> None:
    cell = shared.run("def f():\n    return 1 / 0\n\nf()")
    assert f"Cell In[{cell.reply['execution_count']}], line 4" in cell.traceback
    assert "----> 2     return 1 / 0" in cell.traceback


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("!echo hello from $HOME", "hello from /"),
        ("%timeit -n1 -r1 pass", "per loop"),
        ("%%time\nx = 1", "Wall time"),
        ("%who", "os"),
        ("%%bash\necho from bash", "from bash"),
    ],
)
def test_magics_and_shell_commands_run_on_the_ranks(shared: FrontEnd, source: str, said: str) -> None:
    cell = shared.run(source)
    assert cell.status == "ok"
    assert said in cell.stdout


def test_autoreload_brings_a_changed_module_to_the_ranks(shared: FrontEnd, tmp_path: object) -> None:
    shared.run(f"%%controller\nfrom pathlib import Path\nmodule = Path({str(tmp_path)!r}) / 'reloaded_by_test.py'")
    shared.run("%%controller\nmodule.write_text('answer = 1')")
    shared.run(f"import sys\nsys.dont_write_bytecode = True\nsys.path.insert(0, {str(tmp_path)!r})")
    assert shared.run("%autoreload 2").traceback.endswith("\n%load_ext autoreload brings it")
    assert shared.run("%load_ext autoreload\n%autoreload 2\nimport reloaded_by_test").status == "ok"
    shared.run("%%controller\nmodule.write_text('answer = 42')")
    try:
        assert shared.run("reloaded_by_test.answer").result == "42"
    finally:
        shared.run("%autoreload 0\ndel sys.path[0]")


def test_modules_of_the_folder_that_a_cell_has_gone_to_are_found(shared: FrontEnd, tmp_path: Path) -> None:
    (tmp_path / "beside_a_test.py").write_text("answer = 42")
    shared.run("import os\nbefore = os.getcwd()")
    try:
        assert shared.run(f"%cd {tmp_path}\nimport beside_a_test").status == "ok"
        assert shared.run("beside_a_test.answer").result == "42"
    finally:
        shared.run("os.chdir(before)")


def test_a_controller_cell_runs_in_the_notebooks_own_process(shared: FrontEnd) -> None:
    assert shared.run("%%controller\nimport os; os.getpid()").result == str(shared.pid)
    assert shared.run("%%local\nos.getpid()").result == str(shared.pid)
    assert shared.run("os.getpid()").result != str(shared.pid)


def test_a_controller_cell_that_awaits_runs_in_the_kernels_loop(shared: FrontEnd) -> None:
    source = "%%controller\nimport asyncio\nawait asyncio.sleep(0.001)\nawait mesh.run('rank + 1', wait=False)"
    assert shared.run(source).result == "[0] 1\n[1] 2"


def test_what_a_front_end_runs_silently_or_apart_from_history_is_not_broadcast(shared: FrontEnd) -> None:
    helper = "import os; where = os.getpid()"
    shared.run(helper, store_history=False)
    assert shared.value("where") == shared.pid
    shared.run("%%controller\ndel where")
    shared.run(helper, silent=True)
    assert shared.value("where") == shared.pid
    shared.run("%%controller\ndel where")


def test_user_expressions_are_evaluated_in_the_notebooks_own_process(shared: FrontEnd) -> None:
    reply = shared.run("1", user_expressions={"pid": "__import__('os').getpid()"}).reply
    assert reply["user_expressions"]["pid"]["data"]["text/plain"] == str(shared.pid)


def test_code_that_a_controller_cell_hands_to_the_shell_stays_there(shared: FrontEnd) -> None:
    shared.run("%%controller\nget_ipython().run_cell('import os; inner = os.getpid()')")
    assert shared.value("inner") == shared.pid
    shared.run("%%controller\ndel inner")


def test_rerun_sends_the_cell_where_it_ran_before(shared: FrontEnd) -> None:
    shared.run("times_run = globals().get('times_run', 0) + 1")
    shared.run("%rerun")
    assert shared.run("times_run").result == "2"


def test_code_before_and_after_runs_where_it_belongs(shared: FrontEnd) -> None:
    cell = shared.run("%mesh push shared_by_test\nshared_by_test + 1")
    assert cell.reply["ename"] == "MeshNameError"
    shared.run("%%controller\nshared_by_test = 41")
    assert shared.run("%mesh push shared_by_test\nshared_by_test + 1").result == "42"
    shared.run("%%controller\ndel shared_by_test")


# ---------------------------------------------------------------------------------------------------------------------
# Values and displays


def test_what_comes_back_can_be_taken_apart_here(shared: FrontEnd) -> None:
    number = shared.run("torch.full((3,), rank)").reply["execution_count"]
    assert shared.run(f"%%controller\nOut[{number}][1].tolist()").result == "[1, 1, 1]"


def test_a_figure_that_ranks_draw_alike_comes_once(shared: FrontEnd) -> None:
    cell = shared.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    figures = [data for data in cell.displays if "image/png" in data]
    assert len(figures) == 1
    # Where ranks draw far apart in time a heading says whose it is: in the end, everybody's.
    assert {data["text/plain"] for data in cell.displays if "image/png" not in data} <= {"ranks 0-1:"}


def test_figures_that_differ_come_with_their_ranks(shared: FrontEnd) -> None:
    cell = shared.run("import matplotlib.pyplot as plt\nplt.plot([1, rank]);")
    labels = [data["text/plain"] for data in cell.displays if "image/png" not in data]
    assert sorted(labels) == ["rank 0:", "rank 1:"]
    assert sum("image/png" in data for data in cell.displays) == 2


def test_a_table_comes_as_html(shared: FrontEnd) -> None:
    cell = shared.run("import pandas\npandas.DataFrame({'a': [1, 2]})")
    (found,) = [output for output in cell.outputs if output["type"] == "execute_result"]
    assert "<table" in found["data"]["text/html"]


def test_images_that_differ_are_all_drawn_with_their_ranks(shared: FrontEnd) -> None:
    source = "from PIL import Image\nImage.new('RGB', (2, 2), (100 * rank, 0, 0))"
    (found,) = [output["data"] for output in shared.run(source).outputs if output["type"] == "execute_result"]
    assert found["text/html"].count("<img src=") == 2
    assert "rank 1" in found["text/html"]
    alike = shared.run("Image.new('RGB', (2, 2))").outputs[0]["data"]
    assert "image/png" in alike
    assert "text/html" not in alike


def test_a_display_that_is_updated_changes_in_place(shared: FrontEnd) -> None:
    cell = shared.run("handle = display('first', display_id='test-display')\nhandle.update('second')")
    assert "'second'" in cell.text
    assert "'first'" not in cell.text
    assert shared.run("handle.update('third')").status == "ok"
    assert shared.cells[cell.request].displays


def test_an_update_of_a_later_cell_reaches_the_earlier_ones_display(shared: FrontEnd) -> None:
    first = shared.run_until("handle = display('mine', display_id='later')", lambda cell: len(cell.displays) == 1)
    (shown,) = [output["id"] for output in first.outputs if output["type"] == "display_data"]
    second = shared.send("handle.update('changed')")
    updated = []
    while not updated:
        message = shared.client.get_iopub_msg(timeout=WAIT_S)
        if message["msg_type"] == "update_display_data":
            updated.append(message["content"]["transient"]["display_id"])
    assert updated == [shown]
    shared.wait(second) if not second.reply else None


def test_cleared_output_is_gone(shared: FrontEnd) -> None:
    source = "from IPython.display import clear_output\nprint('a')\nclear_output()\nprint('b')"
    shared.run_until(source, lambda cell: cell.stdout == "b\n")


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_output_comes_while_the_cell_runs(shared: FrontEnd, gate: Gate) -> None:
    cell = shared.send(f"if rank == 0: print('early', flush=True)\n{gate.wait}\nif rank == 0: print('late')")
    shared.wait_until_shown(cell, lambda cell: "early" in cell.stdout)
    assert not cell.reply
    gate.open()
    assert shared.wait(cell).stdout == "[0] early\n[0] late\n"


def test_folding_can_be_limited_to_equal_lines_and_turned_off(shared: FrontEnd) -> None:
    cell = "print('same')\nprint(f'loss {rank + 1}.5')"
    assert "Equal lines" in shared.run("%mesh fold equal").stdout
    shared.run_until(cell, lambda cell: cell.stdout == "same\n[0] loss 1.5\n[1] loss 2.5\n")
    shared.run("%mesh fold off")
    by_rank = shared.run(cell).stdout.splitlines()
    assert [line for line in by_rank if line.startswith("[0]")] == ["[0] same", "[0] loss 1.5"]
    assert [line for line in by_rank if line.startswith("[1]")] == ["[1] same", "[1] loss 2.5"]
    assert len(by_rank) == 4
    assert "with the ranks' numbers" in shared.run("%mesh fold numbers").stdout
    shared.run_until(cell, lambda cell: cell.stdout == "same\nloss {1.5, 2.5}\n")


def test_what_c_code_writes_to_the_descriptors_is_shown(shared: FrontEnd) -> None:
    assert "from a descriptor" in shared.run("import os\nos.write(1, b'from a descriptor\\n');").stdout


def test_a_progress_bar_is_one_output(shared: FrontEnd) -> None:
    # Each step is one of all ranks, so that no bar is over before another has begun.
    step = "time.sleep(0.15); dist.barrier()"
    cell = shared.run(f"from tqdm import tqdm\nimport time\ndist.barrier()\nfor i in tqdm(range(4)): {step}")
    assert len(cell.displays) == 1
    assert "4/4" in cell.displays[0]["text/plain"]
    assert cell.stderr == ""


def test_a_flood_is_cut_and_said_so_and_stays_within_the_front_ends_limits(shared: FrontEnd) -> None:
    # In large pieces: line by line a loaded machine may be too slow for a flood.
    lines = "f'{1000 * i + n} ' + 'x' * 40 for n in range(1000)"
    cell = shared.run(f"for i in range(200): print('\\n'.join({lines}))")
    assert cell.status == "ok"
    # jupyter_server: 1,000 messages/s and 1 MB/s, over windows of 3 s.
    assert len(cell.stdout) < 1_000_000 * max(3.0, cell.seconds)
    assert cell.num_messages < 1_000 * max(3.0, cell.seconds)
    assert "[meshbook]" in cell.text
    assert "199999 " in cell.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Names of the ranks, here


def test_a_name_bound_on_the_ranks_is_a_handle_here_that_shows_their_values(shared: FrontEnd) -> None:
    shared.run("value_by_test = [rank, 1]")
    assert shared.run("%%controller\nvalue_by_test").result == "[0] [0, 1]\n[1] [1, 1]"
    assert shared.run("%%controller\nvalue_by_test[1], len(value_by_test)").result == "(1, 2)"
    assert shared.run("%%controller\nmesh.pull('value_by_test')[1]").result == "[1, 1]"
    shared.run("del value_by_test")
    assert shared.run("%%controller\nvalue_by_test").reply["ename"] == "NameError"


def test_the_users_own_name_wins_here_and_the_user_is_told(shared: FrontEnd) -> None:
    shared.run("%%controller\nboth_by_test = 1")
    cell = shared.run("both_by_test = 2")
    assert "both_by_test is bound here and on the ranks" in cell.notes
    assert shared.run("both_by_test = 3").notes == ""
    assert shared.run("%%controller\nboth_by_test").result == "1"
    assert shared.run("both_by_test").result == "3"
    shared.run("%%controller\ndel both_by_test")
    shared.run("del both_by_test")


def test_a_name_that_is_missing_on_the_ranks_and_lives_here_is_named(shared: FrontEnd) -> None:
    shared.run("%%controller\nonly_here = 1")
    cell = shared.run("only_here")
    assert "`only_here` lives on the controller; %mesh push only_here" in cell.traceback
    shared.run("%%controller\ndel only_here")


def test_a_module_that_is_missing_here_and_lives_on_the_ranks_is_named(shared: FrontEnd) -> None:
    cell = shared.run("%%controller\ntorch.ones(1)")
    assert cell.reply["ename"] == "NameError"
    assert "`torch` is there on the ranks" in cell.traceback


def completes(front: FrontEnd, code: str, match: str) -> None:
    """A rank has 0.3 s for its answer, which a loaded machine does not always give it: it is asked again."""
    when(lambda: match in front.complete(code)["matches"], f"{match} for {code}")


def finds(front: FrontEnd, code: str) -> dict[str, Any]:
    """What a rank knows of a name, once it has answered within the 0.3 s that it has."""
    reply: dict[str, Any] = {}
    when(lambda: reply.update(front.inspect(code)) or reply["found"], f"an answer about {code}")
    return reply


def test_completion_knows_what_lives_on_the_ranks(shared: FrontEnd) -> None:
    shared.run("net = torch.nn.Linear(2, 2)")
    completes(shared, "net.wei", "weight")
    completes(shared, "%%controller\nnet.wei", "weight")
    completes(shared, "x = ne", "net")
    completes(shared, "torch.ar", "arange")
    assert "%timeit" in shared.complete("%time")["matches"]
    assert "status" in shared.complete("%mesh st")["matches"]


def test_inspection_knows_what_lives_on_the_ranks(shared: FrontEnd) -> None:
    shared.run("def documented(a, b=1):\n    'What it does.'")
    assert "What it does." in finds(shared, "documented(")["data"]["text/plain"]
    assert finds(shared, "torch.nn.Linear")
    assert not shared.inspect("no_such_name")["found"]


def test_question_marks_ask_the_ranks(shared: FrontEnd) -> None:
    shared.run("def documented(a, b=1):\n    'What it does.'")
    assert "What it does." in shared.run("documented?").text
    assert "def documented(a, b=1):" in shared.run("documented??").text
    assert "not found" in shared.run("no_such_name?").text
    assert "Start, watch and steer the ranks" in shared.run("%mesh?").text


def test_a_question_mark_whose_rank_does_not_answer_is_not_answered_with_not_found(shared: FrontEnd) -> None:
    shared.run("def documented(a, b=1):\n    'What it does.'")
    pid = shared.pids()["rank 0"]
    with stopped(pid):
        text = shared.run("documented?").text
    assert "Rank 0, which would know `documented`, does not answer now" in text
    assert "not found" not in text
    assert "What it does." in shared.run("documented?").text


def test_questions_are_answered_while_a_cell_runs(shared: FrontEnd, gate: Gate) -> None:
    shared.run("net = torch.nn.Linear(2, 2)")
    cell = shared.send(f"{gate.wait}\nif rank == 0: print('through')")
    shared.wait_until_shown(cell, lambda _: shared.request("kernel_info_request", {})["status"] == "ok")
    completes(shared, "net.wei", "weight")
    assert finds(shared, "net")
    assert shared.request("is_complete_request", {"code": "x ="})["status"] in ("incomplete", "invalid")
    assert shared.request("comm_info_request", {})["status"] == "ok"
    tail = {"hist_access_type": "tail", "n": 1, "output": False, "raw": True}
    assert "print('through')" in shared.request("history_request", tail)["history"][0][2]
    assert not cell.reply, "they waited for the cell"
    gate.open()
    assert shared.wait(cell).stdout == "[0] through\n"


def test_where_the_kernels_subshells_are_not_as_expected_questions_wait_and_are_answered(shared: FrontEnd) -> None:
    quick = "get_ipython().kernel._subshell_router"
    shared.run(f"%%controller\n{quick}.is_supported = False")
    try:
        cell = shared.send("import time\ntime.sleep(0.5)")
        assert "sleep" in shared.complete("time.sle")["matches"]
        assert cell.reply, "it did not wait"
    finally:
        shared.run(f"%%controller\n{quick}.is_supported = True")


def test_a_rank_that_does_not_answer_holds_completion_up_for_a_moment_only(shared: FrontEnd) -> None:
    # A call into C that keeps the GIL of rank 0, whose service thread then cannot answer. Stop ends it.
    cell = shared.send("import ctypes\nctypes.PyDLL(None).sleep(100) if rank == 0 else None;")
    shared.wait_until_shown(cell, lambda _: shared.request("kernel_info_request", {})["status"] == "ok")
    assert shared.complete("pri", timeout_s=WAIT_S)["matches"]
    shared.interrupt()
    shared.wait(cell)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_equal_failures_are_one_and_the_reply_names_what_was_raised(shared: FrontEnd) -> None:
    cell = shared.run("1 / 0")
    assert cell.status == "error"
    assert (cell.reply["ename"], cell.reply["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert cell.traceback.count("Traceback (most recent call last)") == 1
    assert cell.traceback.startswith("ranks 0-1: ZeroDivisionError")
    (shown,) = [output for output in cell.outputs if output["type"] == "error"]
    assert shown["ename"] == "ZeroDivisionError"


def test_a_failure_of_one_rank_names_it_and_those_that_succeeded(shared: FrontEnd) -> None:
    cell = shared.run("if rank == 1: raise KeyError('left')")
    assert cell.reply["ename"] == "KeyError"
    assert "rank 1: KeyError" in cell.traceback
    assert "rank 0 ran to its end" in cell.traceback


def test_ranks_that_wait_for_one_that_raised_end_with_its_error_and_keep_what_they_hold(shared: FrontEnd) -> None:
    cell = shared.run("held = rank\nif rank == 1: raise ValueError('no')\ndist.all_reduce(torch.ones(1))")
    assert cell.reply["ename"] == "ValueError"
    assert cell.reply["evalue"].startswith("rank 1: ValueError: no; rank 0 waited in all_reduce at line 3")
    released = cell.traceback.index("rank 0 waited in all_reduce at line 3 and was released; its variables are kept")
    assert cell.traceback.index("rank 1: ValueError") < released
    assert "distributed_c10d" not in cell.traceback
    assert "KeyboardInterrupt" not in cell.traceback
    assert shared.run("t = torch.full((1,), held + 1.)\ndist.all_reduce(t)\nt.item()").result == "3.0"


def test_different_failures_come_under_one_name(shared: FrontEnd) -> None:
    cell = shared.run("1 / 0 if rank else int('x')")
    assert cell.reply["ename"] == "CellError"
    assert "rank 0: ValueError" in cell.traceback
    assert "rank 1: ZeroDivisionError" in cell.traceback


def test_after_an_error_cells_that_wait_are_not_run(shared: FrontEnd, gate: Gate) -> None:
    first, second = shared.send(f"print('begun', flush=True)\n{gate.wait}\n1 / 0"), shared.send("ran_after_error = 1")
    shared.wait_until_shown(first, lambda cell: "begun" in cell.stdout)
    gate.open()
    shared.wait(first)
    assert shared.wait(second).status == "aborted"


def test_a_syntax_error_is_one(shared: FrontEnd) -> None:
    cell = shared.run("x = = 1")
    assert cell.reply["ename"] == "SyntaxError"
    assert "x = = 1" in cell.traceback


def test_tb_shows_the_failure_again_and_how_to_get_at_a_rank(shared: FrontEnd) -> None:
    shared.run("inner = 41\nif rank == 1: raise KeyError(inner)")
    cell = shared.run("%tb")
    assert "rank 1: KeyError" in cell.text
    assert "%%mesh --ranks 1" in cell.text
    assert "KeyError" in shared.run("%tb Verbose").text
    assert "sys.last_value" in shared.run("%debug", allow_stdin=False).text


def test_bad_selections_and_words_are_one_sentence_and_change_nothing(shared: FrontEnd) -> None:
    for source, ename in (("%%mesh --ranks 7\nx_bad = 1", "MeshShapeError"), ("%mesh foo", "UsageError")):
        cell = shared.run(source)
        assert cell.reply["ename"] == ename
        assert len(cell.reply["traceback"]) == 1
    assert shared.run("'x_bad' in globals()").result == "False"


def test_a_magic_of_the_notebook_below_code_says_where_it_belongs(shared: FrontEnd) -> None:
    for magic in ("%mesh status", "%store x"):
        assert "it stands at the top of a cell" in shared.run(f"x = 1\n{magic}").traceback


def test_a_magic_above_code_shows_its_value(shared: FrontEnd) -> None:
    cell = shared.run("%mesh status\nprint('below')")
    assert "2 ranks" in cell.text
    assert "below" in cell.stdout


def test_a_name_that_one_rank_lacks_is_named_with_that_rank(shared: FrontEnd) -> None:
    shared.run("%%mesh --ranks 0\nonly_on_0 = 3")
    expected = ["rank 1: NameError: name 'only_on_0' is not defined on rank 1", "rank 0 ran to its end"]
    assert shared.run("%mesh pull only_on_0").traceback.splitlines() == expected


def test_a_magic_with_a_typo_is_one_line_and_the_name_that_was_meant(shared: FrontEnd) -> None:
    for source, meant in (("%mehs why", "%mesh"), ("%%controler\n1", "%%controller"), ("%autorelod 2", "%autoreload")):
        cell = shared.run(source)
        assert cell.traceback.count("UsageError") == 1
        assert cell.traceback.endswith(f"\ndid you mean {meant}?")


def test_an_error_of_meshbooks_in_a_controller_cell_shows_the_users_lines_alone(shared: FrontEnd) -> None:
    pushed = shared.run("%%controller\nimport threading\nmesh.push(good=1, bad=threading.Lock())")
    assert "TransferError: `bad` (a _thread.lock) cannot be pickled" in pushed.traceback
    named = shared.run("%%controller\ndef pull():\n    return mesh.pull('nothing')\n\npull()")
    assert "----> 3     return mesh.pull('nothing')" in named.traceback
    assert "MeshNameError: no rank of" in named.traceback
    resized = shared.run("%%controller\nmesh.resize(2)")
    assert "ResizeError: the mesh has rank=2 already" in resized.traceback
    assert not re.search(r"File .*\.py", pushed.traceback + named.traceback + resized.traceback)


def test_a_value_that_cannot_be_pulled_is_one_line(shared: FrontEnd) -> None:
    shared.run("import threading\nunsendable = threading.Lock()")
    cell = shared.run("%mesh pull unsendable")
    assert cell.traceback.startswith("ranks 0-1: TransferError: a _thread.lock cannot be pickled")
    assert "\n" not in cell.traceback
    shared.run(
        "class Unsendable:\n    def __reduce__(self):\n        raise RuntimeError('mine')\n\nunsendable = Unsendable()"
    )
    assert "----> 3         raise RuntimeError('mine')" in shared.run("%mesh pull unsendable").traceback


def test_an_anomaly_shows_the_stack_of_the_forward_from_the_cell_on(shared: FrontEnd) -> None:
    cell = shared.run(
        "with torch.autograd.detect_anomaly():\n"
        "    root = torch.sqrt(torch.tensor([-1.0], requires_grad=True))\n"
        "    root.backward()"
    )
    assert "Traceback of forward call" in cell.stderr
    assert "    root = torch.sqrt(" in cell.stderr
    assert "meshbook" not in cell.stderr.partition("Traceback of forward call")[2]


def test_a_setting_at_the_top_of_a_cell_holds_in_the_notebooks_process_and_on_the_ranks(shared: FrontEnd) -> None:
    shown = shared.run("%precision 3")
    try:
        assert shared.run("1 / 3").result == "0.333"
        assert shared.run("%%controller\n1 / 3").result == "0.333"
    finally:
        shared.run("%precision")
    assert shown.result == "'%.3f'"
    assert shared.run("1 / 3").result.startswith("0.33333")


def test_equal_svg_figures_are_shown_once(shared: FrontEnd) -> None:
    shared.run("%config InlineBackend.figure_format = 'svg'\nimport matplotlib.pyplot as plt")
    try:
        cell = shared.run("plt.plot([1, 2], marker='o');")
    finally:
        shared.run("%config InlineBackend.figure_format = 'png'")
    assert sum("image/svg+xml" in data for data in cell.displays) == 1


def test_a_setting_that_fails_here_says_so_and_the_ranks_decide(shared: FrontEnd) -> None:
    cell = shared.run("%load_ext no_such_extension")
    assert cell.reply["ename"] == "ModuleNotFoundError"
    assert any("failed in the notebook's own process" in data["text/plain"] for data in cell.displays)


def test_what_ranks_put_into_the_next_cell_comes_to_the_front_end(shared: FrontEnd) -> None:
    cell = shared.run("get_ipython().set_next_input('x = 5')")
    assert [(part["source"], part["text"]) for part in cell.reply["payload"]] == [("set_next_input", "x = 5")]


def test_a_reset_of_the_notebooks_process_leaves_the_mesh_and_the_ranks_names(shared: FrontEnd) -> None:
    shared.run("kept_by_ranks = 7")
    shared.run("%%controller\nlost_here = 1\n%reset -f")
    assert shared.run("%%controller\nmesh.size(), kept_by_ranks").result == "(2, 7)"
    assert shared.run("%%controller\nlost_here").reply["ename"] == "NameError"


# ---------------------------------------------------------------------------------------------------------------------
# In the background, and questions to the user


def test_a_background_cell_returns_at_once_and_its_output_goes_on_under_it(shared: FrontEnd, gate: Gate) -> None:
    cell = shared.run(f"%%mesh --bg\n{gate.wait}\nif rank == 0: print('from behind')\nlate_by_test = 17\nlate_by_test")
    assert "is running" in (cell.result or "")
    assert cell.stdout == ""
    gate.open()
    assert shared.run("_.result()").result == "17"
    shared.wait_until_shown(cell, lambda cell: "is done after" in cell.notes)
    assert cell.stdout == "[0] from behind\n"
    assert shared.run("%%controller\nlate_by_test").result == "17"


def test_a_cell_that_waits_for_a_background_cell_says_so(shared: FrontEnd, gate: Gate) -> None:
    behind = shared.run(f"%%mesh --bg\n{gate.wait}")
    cell = shared.send("'next'")
    waits = f"waits for cell {behind.reply['execution_count']}, which runs in the background"
    shared.wait_until_shown(cell, lambda cell: waits in cell.notes)
    gate.open()
    assert shared.wait(cell).result == "'next'"


def test_a_background_cells_failure_is_shown_under_it(shared: FrontEnd) -> None:
    cell = shared.run("%%mesh --bg\n1 / 0")
    shared.wait_until_shown(cell, lambda cell: "ZeroDivisionError" in cell.stderr)
    assert shared.run("_").status == "ok"


def test_an_equal_question_of_all_ranks_is_asked_once_and_each_of_unlike_ones_names_its_rank(shared: FrontEnd) -> None:
    shared.input_requests.clear()
    shared.input_replies[:] = ["yes", "no", "no"]
    assert shared.run("input('go on? ')").result == "'yes'"
    assert shared.run("input(f'part {rank}? ')").result == "'no'"
    asked = [request["prompt"] for request in shared.input_requests]
    assert asked[0] == "[ranks 0-1] go on? "
    assert sorted(asked[1:]) == ["[rank 0] part 0? ", "[rank 1] part 1? "]


def test_getpass_on_a_rank_hides_what_is_typed(shared: FrontEnd) -> None:
    shared.input_requests.clear()
    shared.input_replies[:] = ["secret"]
    cell = shared.run("import getpass\nlen(getpass.getpass('token: ')) if rank == 1 else None")
    assert cell.result == "[1] 6"
    assert shared.input_requests == [{"prompt": "[rank 1] token: ", "password": True}]


def test_input_where_nobody_can_be_asked_is_an_error_and_no_hang(shared: FrontEnd) -> None:
    request = shared.client.execute("input('anybody?')", allow_stdin=False)
    cell = shared.cells[request] = Cell(request)
    assert shared.wait(cell).reply["ename"] == "EOFError"


def test_a_display_with_an_id_of_its_own_is_one_on_all_ranks(shared: FrontEnd) -> None:
    cell = shared.run("handle = display('first', display_id=True)\nhandle.update('second')")
    assert [data["text/plain"] for data in cell.displays if data["text/plain"] != "ranks 0-1:"] == ["'second'"]


def test_what_a_thread_prints_after_its_cell_stands_in_the_notebook(shared: FrontEnd, gate: Gate) -> None:
    cell = shared.run(
        f"""
        import threading
        def report():
            {gate.wait}
            print("step 1000 is done")
        thread = threading.Thread(target=report)
        thread.start()
        """
    )
    assert cell.stdout == ""
    gate.open()
    shared.wait_until_shown(cell, lambda cell: "step 1000 is done\n" in cell.stdout)
    assert shared.run("thread.join()").status == "ok"
