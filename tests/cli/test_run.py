"""`meshbook run`: notebooks and scripts executed without anyone watching."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode, v4

from meshbook.cli.run import notebook_of
from tests.budget import WAIT_S
from tests.cli.commands import meshbook, typed
from tests.kernel.frontend import shows

pytestmark = pytest.mark.usefixtures("starts_kernels")


def notebook(folder: Path, *cells: str | tuple[str, str], name: str = "book.ipynb") -> Path:
    """A notebook file; a cell with a tag is a pair."""
    made: NotebookNode = v4.new_notebook()
    made.cells.append(v4.new_markdown_cell("# A heading"))
    for cell in cells:
        source, tag = cell if isinstance(cell, tuple) else (cell, "")
        made.cells.append(v4.new_code_cell(source, metadata={"tags": [tag]} if tag else {}))
    path = folder / name
    nbformat.write(made, path)
    return path


def outputs(path: Path) -> list[str]:
    """What each code cell of an executed notebook shows, as text."""
    shown = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            texts = [
                output.get("text") or output.get("ename") or output["data"]["text/plain"] for output in cell.outputs
            ]
            shown.append(re.sub(r"\x1b\[[\d;]*m", "", "".join(texts)))
    return shown


# ---- notebooks


def test_a_notebook_is_executed_shown_and_written(tmp_path: Path) -> None:
    """In its own folder; as nobody's notebook, though it was started in a notebook server's terminal."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "beside.py").write_text("value = 5\n")
    path = notebook(
        tmp_path / "books",
        "print('from', rank)\nrank * 10",
        "%%controller\nimport os\nprint(len(mesh), os.environ.get('JPY_SESSION_NAME'))",
        "x = 1",
        "import beside, os\n(beside.value, os.path.basename(os.getcwd()))",
        ("1 / rank", "raises-exception"),
        "for i in range(300):\n    print(f'\\rstep {i}', end='')\nprint()\nprint('done')",
        # As when a checkpoint is being written, or the machine is busy: the end of the mesh is waited for.
        "%%controller\nimport time\nstop = mesh.session.stop\nmesh.session.stop = lambda: (time.sleep(4), stop())",
    )
    done = meshbook("run", str(path), "-n", "2", cwd=tmp_path, env={"JPY_SESSION_NAME": "/somebodys/notebook.ipynb"})
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "[1/7] print('from', rank)"
    assert shows(done.out, "      from 0…1\n", "      [0] from 0\n", "      [1] from 1\n")
    assert lines[lines.index("      [0] 0") + 1] == "      [1] 10"
    assert "      2 None" in lines
    assert "(5, 'books')" in done.out
    assert re.search(r"^      raised, as expected: .*ZeroDivisionError: division by zero", done.out, re.MULTILINE)
    assert [line.strip() for line in lines if line.strip().startswith("step")] == ["step 299"]
    assert re.fullmatch(r"7 cells in [\d.]+ s", lines[-3])
    assert lines[-2:] == ["executed notebook: build/book.ipynb", "as a web page: build/book.html"]
    assert done.err == ""
    assert outputs(tmp_path / "build" / "book.ipynb")[1:3] == ["2 None\n", ""]
    page = (tmp_path / "build" / "book.html").read_text()
    assert "A heading" in page
    assert shows(page, "from 0…1", "from 0\n", "from 1\n")
    assert nbformat.read(path, as_version=4).cells[1].outputs == []  # the file itself is as it was
    assert typed("list").out == "no mesh is running\n"


def test_a_failing_cell_ends_the_run_with_its_error_first_and_what_there_is_so_far(tmp_path: Path) -> None:
    waits = "print('before')\nif rank == 1: raise ValueError('no')\ndist.all_reduce(torch.ones(1))"
    path = notebook(tmp_path, "print('fine')", waits, "print('never')")
    done = typed("run", str(path), "-n", "2", "--out", "made", cwd=tmp_path)
    assert done.status == 1
    assert done.err.startswith("cell 2 of 3 failed:\n")
    released = done.err.index("rank 0 waited in all_reduce at line 3 and was released")
    assert done.err.index("rank 1: ValueError") < released
    assert "torch/distributed" not in done.err
    assert "\x1b" not in done.err + done.out
    assert "never" not in done.out
    assert outputs(tmp_path / "made" / "book.ipynb")[1:] == ["before\nValueError", ""]
    assert (tmp_path / "made" / "book.html").exists()


def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    # Here, and the first: starting ranks may take its time, and so may whatever comes before it.
    path = notebook(tmp_path, "%%controller\nimport time\nwhile True: time.sleep(60)")
    done = typed("run", str(path), "--timeout", "2", cwd=tmp_path)
    assert done.status == 1
    assert done.err == "cell 1 took longer than 2 s and was stopped (--timeout)\n"
    assert typed("list").out == "no mesh is running\n"


@pytest.mark.parametrize(("number", "tag"), [(signal.SIGTERM, ""), (signal.SIGINT, "raises-exception")])
def test_an_interrupt_stops_the_ranks_and_keeps_what_there_is(tmp_path: Path, number: signal.Signals, tag: str) -> None:
    path = notebook(tmp_path, ("print('begun')\nimport time\nwhile True: time.sleep(60)", tag), "print('never')")
    running = subprocess.Popen(
        [sys.executable, "-m", "meshbook", "run", str(path), "-n", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.strip().endswith("begun"):  # of both ranks, or of one that is a little ahead
            break
    running.send_signal(number)
    out, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    assert err == "interrupted\n"
    assert "never" not in out
    assert outputs(tmp_path / "build" / "book.ipynb")[0].endswith("begun\nKeyboardInterrupt")
    assert typed("list").out == "no mesh is running\n"


def test_a_kernel_that_dies_is_said_to_have_died(tmp_path: Path) -> None:
    path = notebook(tmp_path, "x = 1", "%%controller\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    done = typed("run", str(path), "-n", "1", cwd=tmp_path)
    assert done.status == 1
    assert done.err.splitlines()[-1] == "the kernel has died; what it printed last is above"
    typed("stop", "--all")  # the mesh outlives a kernel that dies


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.ipynb", None, "missing.ipynb cannot be read: No such file or directory"),
        ("words.ipynb", "no notebook", "words.ipynb is not a notebook: "),
        ("notes.txt", "x", "notes.txt is neither a notebook (.ipynb) nor a script (.py)"),
        ("bytes.py", b"\xff\xfe", "bytes.py cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(
    tmp_path: Path, name: str, content: str | bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    done = typed("run", name, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"meshbook: {sentence}")
    assert os.listdir(tmp_path) == ([name] if content is not None else [])


def test_a_run_compiles_no_grammar_before_it_begins() -> None:
    code = "import sys; from meshbook.cli.main import main; main(['run', 'missing.py']); print('lark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("words", "has_run", "sentence"),
    [
        (("--out", "."), False, "would be written over with what comes out of it"),
        (("--out", "taken"), True, r"meshbook: taken\S* cannot be written: .*; name another folder with --out"),
        (("--", "--lr", "0.1"), False, r"book.ipynb takes no arguments \(--lr 0.1\)"),
    ],
)
def test_a_notebook_that_cannot_be_run_in_this_way_is_refused(
    tmp_path: Path, words: tuple[str, ...], has_run: bool, sentence: str
) -> None:
    notebook(tmp_path, "%mesh")
    (tmp_path / "taken").write_text("")
    done = typed("run", "book.ipynb", *words, cwd=tmp_path)
    assert (done.status, done.out != "") == (2, has_run)
    assert re.search(sentence, done.err)


# ---- scripts


def test_a_script_is_one_cell_on_every_rank_with_its_arguments_and_its_file(tmp_path: Path) -> None:
    source = (
        "import argparse, os, sys, torch\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\nparser.add_argument('words', nargs='*')\n"
        "options = parser.parse_args()\ntotal = torch.tensor([rank + 1])\ndist.all_reduce(total)\n"
        "print(options.lr, options.words, os.path.basename(__file__), sys.argv[0] == __file__, total.item())\n"
    )
    (tmp_path / "train.py").write_text(source)
    done = typed("run", "train.py", "-n", "2", "--", "--lr", "0.1", "a b", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1] == "0.1 ['a b'] train.py True 3"
    assert "[1/1]" not in done.out
    assert os.listdir(tmp_path) == ["train.py"]


def test_the_cells_of_a_script_share_their_names_and_arguments_and_are_not_shown_if_it_is_to_be_quiet(
    tmp_path: Path,
) -> None:
    source = (
        '"""A script."""\n# %% set up\nx = rank + 1\n\n# %% [markdown]\n# Some *prose*.\n\n'
        '# %%\n# %%controller\nimport sys\nprint("here", mesh.pull(x)[1], sys.argv[1:])\n'
    )
    (tmp_path / "steps.py").write_text(source)
    done = typed("run", "steps.py", "-n", "2", "--out", "made", "--quiet", "--", "--lr", "0.1", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out == ""
    assert outputs(tmp_path / "made" / "steps.ipynb")[-1] == "here 2 ['--lr', '0.1']\n"
    made = nbformat.read(tmp_path / "made" / "steps.ipynb", as_version=4)
    assert [cell.cell_type for cell in made.cells] == ["code", "code", "markdown", "code"]
    assert made.cells[2].source == "Some *prose*."
    assert "<em>prose</em>" in (tmp_path / "made" / "steps.html").read_text()


def test_a_script_that_fails_ends_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("print('so far')\nimport sys\nraise ValueError(f'not so: {sys.argv[1:]}')\n")
    done = typed("run", "bad.py", "-n", "2", "--", "-n", "--", cwd=tmp_path)
    assert done.status == 1
    assert "so far" in done.out
    assert "ranks 0-1: ValueError: not so: ['-n', '--']" in done.err


def test_marks_are_read_as_editors_write_them() -> None:
    source = "import os\n#%%\na = 1\n# %% A title\nb = 2\n# %% [md]\n# text\n# more\n# %%time is a remark\nc = 3\n"
    cells = notebook_of(source).cells
    assert [cell.source for cell in cells] == ["import os", "a = 1", "b = 2", "text\nmore\n%%time is a remark\nc = 3"]
    assert [cell.cell_type for cell in cells] == ["code", "code", "code", "markdown"]


def test_our_magics_may_be_written_as_remarks() -> None:
    source = "# %mesh start -n 2\n# %%\n# %%mesh --ranks 0\nx = 1\n# a remark\n"
    assert [cell.source for cell in notebook_of(source).cells] == [
        "%mesh start -n 2",
        "%%mesh --ranks 0\nx = 1\n# a remark",
    ]


def test_an_empty_script_is_an_empty_notebook() -> None:
    assert notebook_of("\n\n").cells == []
    assert json.loads(nbformat.writes(notebook_of("")))["cells"] == []
