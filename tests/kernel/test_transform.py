"""Where a cell runs, decided from its text alone."""

from __future__ import annotations

import pytest

from meshbook.kernel import transform
from meshbook.kernel.transform import NOTEBOOK_EXPRESSION, CellPlan, pad_to_cell_lines, plan_cell, rewrite


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "await step()",
        "!nvidia-smi",
        "files = !ls",
        "%timeit f()",
        "%%time\nx = 1",
        "%%timeit\nf()",
        "%%bash\nhostname",
        "%%capture out\nprint(1)",
        "%env A=1",
        "%who",
        "%run script.py",
        "def f():\n    return '''\n%mesh status\n'''",
        "x = 1\n%mesh status",
        "pip = 3\npip - 1",
    ],
)
def test_code_and_magics_run_on_the_ranks(source: str) -> None:
    assert plan_cell(source).target == "ranks"
    assert plan_cell(source).remote_source == source


@pytest.mark.parametrize(
    "source",
    [
        "",
        "  \n\n",
        "%mesh status",
        "%mesh stop\n%mesh start -n 2",
        "%%mesh --ranks 0\nx = 1",
        "%%writefile a.py\nx = 1",
        "%%html\n<b>hi</b>",
        "%%javascript\n1",
        "%history",
        "%lsmagic",
        "# a comment\n%load_ext meshbook\n",
        "%pip install a",
        "!pip install a",
        "!python -m pip install a",
        "pip install a",
        "!apt-get install a",
        "exit",
        "quit()",
        "%mesh?",
    ],
)
def test_what_is_the_notebooks_own_stays(source: str) -> None:
    assert plan_cell(source).target == "here"


@pytest.mark.parametrize("magic", ["%%controller", "%%local"])
def test_a_controller_cell_keeps_its_line_numbers(magic: str) -> None:
    assert rewrite(f"\n{magic}\nx = 1\n1 / 0").splitlines()[2:] == ["x = 1", "1 / 0"]


def test_a_controller_cell_may_hold_any_cell_magic() -> None:
    assert rewrite("%%controller\n%%time\nx = 1") == "%%time\nx = 1"


def test_a_controller_line_with_options_is_left_to_the_magic_which_says_why_not() -> None:
    assert rewrite("%%controller --ranks 0\nx = 1") == "%%controller --ranks 0\nx = 1"


def test_magics_of_the_notebook_may_stand_above_code_for_the_ranks() -> None:
    decided = plan_cell("# two of them\n%mesh stop\n%mesh start -n 2\n\nx = rank\n")
    assert decided.target == "both"
    assert decided.local_source == "%mesh stop\n%mesh start -n 2\n"
    assert decided.remote_source == "# two of them\n# %mesh stop\n# %mesh start -n 2\n\nx = rank\n"


def test_an_extension_is_loaded_on_both_sides() -> None:
    decided = plan_cell("%load_ext autoreload\n%autoreload 2\n")
    assert decided.target == "both"
    assert decided.local_source.splitlines() == [
        f"{NOTEBOOK_EXPRESSION}.run_setting('load_ext', 'autoreload')",
        f"{NOTEBOOK_EXPRESSION}.run_setting('autoreload', '2')",
    ]
    assert decided.remote_source == "%load_ext autoreload\n%autoreload 2\n"


@pytest.mark.parametrize(
    "line",
    [
        "%cd /tmp",
        "%pushd /tmp",
        "%matplotlib inline",
        "%config InlineBackend.figure_format = 'svg'",
        "%config InteractiveShell.ast_node_interactivity='all'",
        "%xmode Minimal",
        "%precision 3",
        "%colors nocolor",
        "%alias_magic t timeit",
    ],
)
def test_what_sets_something_in_the_shell_does_so_on_both_sides(line: str) -> None:
    name, _, arguments = line[1:].partition(" ")
    decided = plan_cell(f"{line}\nx = 1")
    assert decided.target == "both"
    assert decided.local_source == f"{NOTEBOOK_EXPRESSION}.run_setting({name!r}, {arguments!r})\n"
    assert decided.remote_source == f"{line}\nx = 1"


def test_a_question_about_the_configuration_is_answered_here() -> None:
    for source in ("%config", "%config InlineBackend", "%config InlineBackend.rc"):
        assert plan_cell(source).target == "here"


def test_a_question_about_a_cell_magic_of_meshbooks_is_answered_here() -> None:
    for source in ("%%mesh?", "%%controller?", "?%%mesh"):
        assert plan_cell(source) == CellPlan("here", local_source=source)


@pytest.mark.parametrize(
    ("source", "name", "detail"),
    [
        ("x?", "x", 0),
        ("?x", "x", 0),
        ("model.fc??", "model.fc", 1),
        ("%timeit?", "%timeit", 0),
        ("a[0].b?", "a[0].b", 0),
    ],
)
def test_questions_about_names_are_asked_and_not_run(source: str, name: str, detail: int) -> None:
    decided = plan_cell(source)
    assert (decided.target, decided.name, decided.detail) == ("help", name, detail)


@pytest.mark.parametrize(
    ("source", "name", "how"), [("%tb", "tb", ""), ("%tb Verbose", "tb", "Verbose"), ("%debug", "debug", "")]
)
def test_questions_about_the_last_failure_go_to_whom_it_concerns(source: str, name: str, how: str) -> None:
    decided = plan_cell(source)
    assert (decided.target, decided.name, decided.remote_source) == ("failure", name, how)


def test_without_auto_only_controller_cells_are_touched() -> None:
    assert plan_cell("x = 1", auto=False).target == "here"
    assert plan_cell("%%time\nx = 1", auto=False).target == "here"
    assert rewrite("x = 1", auto=False) == "x = 1"
    assert rewrite("%%controller\nx = 1", auto=False) == "# %%controller\nx = 1"


def test_a_cell_for_the_ranks_becomes_one_call_that_has_its_source() -> None:
    source = "x = 'it\\'s'\n'''y'''\n"
    call = rewrite(source)
    assert call.count("\n") == 1
    assert eval(call.removeprefix(f"{transform.NOTEBOOK_EXPRESSION}.run_cell")) == source


def test_a_part_of_a_cell_is_numbered_as_in_the_cell() -> None:
    assert pad_to_cell_lines("%%mesh --ranks 0\nx\ny\n", "x\ny\n") == "# %%mesh --ranks 0\nx\ny\n"
    assert pad_to_cell_lines("x\ny", "x\ny") == "x\ny"
    assert pad_to_cell_lines("%%mesh\n%%time\nx\n", "%%time\nx\n") == "%%time\nx\n"
    assert pad_to_cell_lines("something else", "x\ny") == "x\ny"
    assert pad_to_cell_lines("z = mesh.run('x')", "x') ") == "x') "


def test_cells_that_install_packages_are_known() -> None:
    for source in ("%pip install a", "!pip install a", "%mesh stop\n\npip install a", "%uv pip install a"):
        assert transform.installs(source)
    for source in ("x = 1", "pip = 3\npip - 1", "%pip_like x", "x = 1\n%pip install a"):
        assert not transform.installs(source)


def test_every_decision_is_in_the_table_that_users_read() -> None:
    table = transform.__doc__ or ""
    for name in ("%%controller", "%mesh", "%pip", "%%writefile", "%load_ext", "%cd", "%debug", "x?", "exit"):
        assert name in table
