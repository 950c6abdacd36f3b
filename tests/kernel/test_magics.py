"""`%mesh` and `%%mesh` as typed into a shell: what each does, and what a slip of the keyboard is answered with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from meshbook import attach, create_mesh
from meshbook.controller.futures import MeshFuture
from meshbook.controller.mesh import Mesh
from meshbook.controller.tables import Table
from meshbook.errors import (
    CellError,
    CheckpointError,
    MeshbookError,
    MeshInUse,
    MeshNameError,
    MeshShapeError,
    NotAttached,
    RankLost,
    StartError,
    TransferError,
    UsageError,
)
from meshbook.kernel import magics
from meshbook.kernel.notebook import Notebook
from tests.budget import WAIT_S, when
from tests.kernel.frontend import FrontEnd, strip_ansi

pytestmark = pytest.mark.usefixtures("starts_kernels")


class Terminal:
    """A shell with the magics, and nobody's history."""

    def __init__(self) -> None:
        self.shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
        magics.register(self.shell)
        self.notebook = Notebook.of(self.shell)

    def __call__(self, cell: str) -> Any:
        """Run a cell; its value. What it raises is raised here."""
        result = self.shell.run_cell(cell, store_history=False)
        result.raise_error()
        return result.result

    def close(self) -> None:
        for mesh in list(self.notebook.meshes.values()):
            mesh.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Terminal]:
    terminal = Terminal()
    terminal("%mesh start --axes dp=2,tp=1 --name magics")
    yield terminal
    terminal.close()


@pytest.fixture
def typed(running: Terminal, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    """The shared shell, whose mesh must be whole and idle again after the test."""
    capsys.readouterr()
    yield running
    assert list(running.notebook.meshes) == ["magics"]
    assert running.notebook.mesh is not None
    assert not running.notebook.mesh.session.lost


@pytest.fixture
def fresh() -> Iterator[Terminal]:
    """A shell without a mesh, that may do what it likes."""
    terminal = Terminal()
    yield terminal
    terminal.close()


def mesh_of(terminal: Terminal) -> Mesh:
    assert terminal.notebook.mesh is not None
    return terminal.notebook.mesh


def test_spares_are_asked_for_and_shown(typed: Terminal) -> None:
    assert "keeps no spares" in str(typed("%mesh spare"))
    assert "Mesh magics keeps 1 spare" in str(typed("%mesh spare 1"))
    assert "Spares: 1, of which" in str(typed("%mesh status"))
    assert "keeps no spares" in str(typed("%mesh spare 0"))


# ---- a mesh of one's own


def test_a_notebook_without_a_mesh_is_told_how_to_get_one(fresh: Terminal) -> None:
    table = fresh("%mesh")
    assert "no mesh yet" in str(table)
    assert "%mesh start -n 4" in str(table)
    with pytest.raises(NameError) as raised:
        fresh("mesh.pull('x')")
    _, shown, _ = fresh.shell._get_exc_info((NameError, raised.value, raised.tb))
    assert shown.__notes__ == ["there is no mesh yet: %mesh start starts one, and a cell for the ranks does"]


def test_start_in_new_interpreters_says_so_to_the_supervisor(fresh: Terminal) -> None:
    fresh("%mesh start -n 1 --fresh")
    spec = mesh_of(fresh).session.info.spec
    assert spec is not None
    assert spec.start_method == "fresh"


def test_a_second_mesh_needs_a_name_of_its_own(typed: Terminal) -> None:
    with pytest.raises(MeshInUse, match=r"%mesh restart, with the same options, .* %mesh start --name OTHER"):
        typed("%mesh start -n 1")


def test_a_mesh_name_in_use_is_refused_with_the_ways_out(fresh: Terminal, running: Terminal) -> None:
    with pytest.raises(MeshInUse, match="%mesh attach magics") as raised:
        fresh("%mesh start -n 1 --name magics")
    assert "another name" in str(raised.value)
    assert fresh.notebook.mesh is None


def test_ranks_on_cuda_without_a_gpu_are_refused(fresh: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match="cuda is asked for, and no GPU is visible here; ask for device cpu"):
        fresh("%mesh start -n 2 --device cuda")
    assert fresh.notebook.mesh is None


def test_several_meshes_live_in_one_notebook(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    typed("%mesh start -n 1 --name beside")
    assert len(typed("%%mesh\nworld_size")) == 1
    assert len(typed("%%mesh -m magics\nworld_size")) == 2
    typed("%mesh use magics")
    assert "Cells run on mesh magics with 2 ranks (dp=2, tp=1)." in capsys.readouterr().out
    assert len(typed("%%mesh\nworld_size")) == 2
    typed("%mesh use beside")
    typed("%mesh stop")
    assert "Mesh beside has ended." in capsys.readouterr().out
    assert len(typed("%%mesh\nworld_size")) == 2


def test_a_mesh_that_was_left_runs_on_and_is_found_again(fresh: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    fresh("%mesh start -n 1 --name left")
    fresh("%%mesh\nkept = 41")
    fresh("%mesh detach --ttl 100")
    assert "runs on for 100 s" in capsys.readouterr().out
    assert "%mesh attach left" in str(fresh("%mesh status"))
    with pytest.raises(MeshNameError, match="runs, but not in this notebook; %mesh attach left"):
        fresh("%mesh stop left")
    fresh("%mesh attach left")
    assert fresh("%%mesh\nkept + 1").same() == 42
    fresh("%mesh stop")


# ---- cells


def test_a_cell_runs_on_ranks_by_number_or_by_axis(typed: Terminal) -> None:
    assert dict(typed("%%mesh\nrank")) == {0: 0, 1: 1}
    assert dict(typed("%%mesh --ranks 1\nrank")) == {1: 1}
    assert dict(typed("%%mesh 0-1\nrank")) == {0: 0, 1: 1}
    assert dict(typed("%%mesh dp=1\nrank")) == {1: 1}
    assert dict(typed("%%mesh dp=0 tp=0\nrank")) == {0: 0}


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("%%mesh --ranks 0,5", "rank 5 is not in this mesh of 2 ranks (0-1)"),
        ("%%mesh pp=0", "there is no axis 'pp' in the mesh dp=2,tp=1"),
        ("%%mesh dp=2", "dp=2 is out of range: axis dp has size 2 (0-1)"),
        ("%%mesh nonsense", "'nonsense' is not a list of ranks; write it like 0 or 0,2-3"),
    ],
)
def test_ranks_that_are_not_there_run_nothing(typed: Terminal, head: str, sentence: str) -> None:
    typed("%%mesh\ncount = 0")
    with pytest.raises(MeshShapeError) as raised:
        typed(f"{head}\ncount += 1")
    assert sentence in str(raised.value)
    assert typed("%%mesh\ncount").same() == 0


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("%%mesh --sutup\n1", "unrecognized arguments: --sutup. Write it like: %%mesh [--ranks"),
        ("%%mesh --ranks 0 dp=1\n1", "--ranks 0 and dp=1 both say where; keep one"),
        ("%%mesh --ranks\n1", "argument --ranks: expected one argument"),
        ("%%mesh status\n1", "%mesh status is a line of its own, with one %"),
        ("%%mesh -m 'a\n1", "cannot be read: no closing quotation"),
        ("%%mesh\n  \n", "the cell is empty"),
        ("%mesh statsu", "did you mean %mesh status?"),
        ("%mesh stat", "did you mean %mesh status?"),
        ("%mesh shutdown", "did you mean %mesh stop?"),
        ("%mesh start 4", "unrecognized arguments: 4. Write it like: %mesh start -n 4"),
        ("%mesh frobnicate", "there is no %mesh frobnicate; there is start, restart, status"),
        ("%mesh start -n many", "-n takes a number of ranks, not 'many'. Write it like: %mesh start -n 4"),
        ("%mesh start -n 2 --nam x", "unrecognized arguments: --nam x. Write it like: %mesh start"),
        ("%mesh start --hosts two", "argument --hosts: invalid int value: 'two'"),
        ("%mesh start --name other --device tpu", "there is no device 'tpu'; known: auto, cpu, cuda"),
        ("%mesh start --name other --engine pbs", "there is no engine 'pbs'"),
        ("%mesh start -n 1 --name a/b", "'a/b' cannot name a mesh"),
        ("%mesh auto maybe", "argument state: invalid choice: 'maybe'"),
        ("%mesh kill", "which ranks? Write it like: %mesh kill 2, or %mesh kill all. This mesh has ranks 0-1."),
        ("%mesh push", "the following arguments are required: names"),
        ("%mesh record maybe", "argument what: invalid choice: 'maybe'"),
        ("%mesh record on --limit lots", "--limit 'lots' is no amount of memory; write it like --limit 4G"),
        ("%mesh record save --limit 1G", "--limit is for %mesh record on"),
        ("%mesh logs host:gpu7", "there is no host 'gpu7' in this mesh; its hosts: host 0"),
        ("%mesh logs host:0 --grep x", "the log of a host is shown alone: %mesh logs host:0"),
        ("%mesh logs --context many", "argument --context/-C: invalid int value: 'many'"),
    ],
)
def test_a_slip_of_the_keyboard_shows_how_it_is_written(typed: Terminal, cell: str, sentence: str) -> None:
    cells_before = mesh_of(typed).status().cells_run
    with pytest.raises(UsageError) as raised:
        typed(cell)
    assert sentence in str(raised.value)
    assert mesh_of(typed).status().cells_run == cells_before


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("%mesh start -n 0", "axis rank has size 0"),
        ("%mesh start -n 2 --axes dp=3", "axes dp=3 make 3 ranks, but -n asks for 2; leave -n out, or change an axis"),
        ("%mesh start --axes dp:2", "'dp:2' does not name the axes of a mesh; write them like dp=2,tp=2"),
        ("%mesh start -n 999999", "a mesh has at most 131,072"),
        ("%mesh interrupt 7", "rank 7 is not in this mesh of 2 ranks (0-1)"),
        ("%mesh kill pp=0", "there is no axis 'pp'"),
        ("%mesh logs 7", "rank 7 is not in this mesh"),
        ("%mesh logs first", "'first' is not a list of ranks; write it like 0 or 0,2-3"),
    ],
)
def test_a_shape_that_does_not_fit_is_answered_with_the_sum(typed: Terminal, line: str, sentence: str) -> None:
    with pytest.raises(MeshShapeError) as raised:
        typed(line)
    assert sentence in str(raised.value)


def test_an_error_of_a_magic_is_shown_as_its_sentence(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        typed("%mesh statsu")
    shown = strip_ansi(capsys.readouterr().out).strip().splitlines()
    assert shown == ["UsageError: there is no %mesh statsu; did you mean %mesh status?"]


def test_a_cell_in_the_background_gives_a_future_at_once(typed: Terminal) -> None:
    future = typed("%%mesh --bg\nwhile not globals().get('go_on'): pass\nrank * 10")
    assert isinstance(future, MeshFuture)
    assert not future.done()
    mesh_of(typed).interrupt()
    assert type(future.exception(WAIT_S)).__name__ == "CellInterrupted"
    assert dict(typed("%%mesh --bg\nrank * 10").result(WAIT_S).values) == {0: 0, 1: 10}


def test_show_where_nothing_was_left_out_says_so_and_is_no_error(
    typed: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("%mesh show")
    assert "Nothing to show: every display of the cells that ran is shown already." in capsys.readouterr().out


def test_a_setup_cell_is_known_as_one(typed: Terminal) -> None:
    typed("%%mesh --setup\nprepared = True")
    assert mesh_of(typed).history()[-1].setup
    assert "ok, setup" in str(typed("%mesh history"))


def test_an_unknown_mesh_is_answered_with_those_that_are_there(typed: Terminal) -> None:
    with pytest.raises(MeshNameError, match="no mesh is named 'other'; this notebook's: magics"):
        typed("%%mesh -m other\n1")


def test_a_controller_cell_stays_here(typed: Terminal) -> None:
    typed("%%controller\nhere_only = rank_here = 5")
    assert typed.shell.user_ns["here_only"] == 5
    with pytest.raises(MeshbookError, match="here_only"):
        typed("%%mesh\nhere_only")
    assert typed("%%local\nhere_only + 1") == 6


def test_a_controller_magic_takes_no_options(typed: Terminal) -> None:
    with pytest.raises(UsageError, match="%%controller stands alone on its line, and 'dp=0' stands behind it"):
        typed.shell.run_cell_magic("controller", "dp=0", "1")


def test_auto_decides_where_a_plain_cell_runs(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("1 + 1") == 2
    typed("%mesh auto on")
    assert "Cells run on the ranks" in capsys.readouterr().out
    try:
        assert dict(typed("rank + 1")) == {0: 1, 1: 2}
    finally:
        typed("%mesh auto off")
    with pytest.raises(NameError):
        typed("undefined_anywhere")


# ---- names


def test_push_copies_variables_to_every_rank(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    typed("lr, batch = 0.5, [1, 2]")
    typed("%mesh push lr, batch")
    assert "lr, batch are on ranks 0-1." in capsys.readouterr().out
    assert typed("%%mesh\n(lr, batch)").same() == (0.5, [1, 2])


def test_pull_brings_what_the_ranks_hold(typed: Terminal) -> None:
    typed("%%mesh\nheld = [rank, rank * 2]\nclass Box: pass\nbox = Box(); box.side = rank + 3")
    assert dict(typed("%mesh pull held")) == {0: [0, 0], 1: [1, 2]}
    assert typed("%mesh pull held --rank 1") == [1, 2]
    assert dict(typed("%mesh pull box.side")) == {0: 3, 1: 4}
    typed("mine = %mesh pull held --rank 0")
    assert typed.shell.user_ns["mine"] == [0, 0]


def test_a_name_that_lives_on_the_other_side_is_told_of(typed: Terminal) -> None:
    typed("only_here = 1")
    typed("%%mesh\nonly_there = 1")
    with pytest.raises(MeshNameError) as raised:
        typed("%mesh pull only_here")
    assert str(raised.value) == "`only_here` lives on the controller, not on the ranks; %mesh push only_here"
    with pytest.raises(MeshNameError) as raised:
        typed("%mesh push only_there")
    assert str(raised.value) == (
        "`only_there` lives on the ranks already; a %%controller cell brings it here: values = %mesh pull only_there"
    )


def test_a_name_that_lives_nowhere_is_answered_with_the_nearest(typed: Terminal) -> None:
    typed("learning_rate = 1")
    typed("%%mesh\nmodel_weights = 1")
    with pytest.raises(MeshNameError, match=r"neither here nor on the ranks; did you mean learning_rate\?"):
        typed("%mesh push learning_rat")
    with pytest.raises(MeshNameError, match=r"is not on the ranks; did you mean model_weights\?"):
        typed("%mesh pull model_weight")


def test_a_push_that_cannot_be_pickled_names_the_part(typed: Terminal) -> None:
    typed("import threading\nclass Net: pass\nnet = Net(); net.guard = threading.Lock()")
    with pytest.raises(TransferError, match="guard"):
        typed("%mesh push net")


# ---- looking at it


def test_status_tells_each_ranks_state_and_the_names(typed: Terminal) -> None:
    typed("%%mesh\nseen_in_status = 1")
    mesh = mesh_of(typed)
    when(lambda: all(rank.pid for rank in mesh.status().ranks), "the first beat")
    table = typed("%mesh status")
    assert isinstance(table, Table)
    text = str(table)
    assert text.startswith("Mesh magics: 2 ranks (dp=2, tp=1), process group ready (gloo), up ")
    assert re.search(r"^rank +state +device +memory +peak +host +pid$", text, re.MULTILINE)
    assert re.search(r"^0 +idle +cpu ", text, re.MULTILINE)
    assert "seen_in_status" in text
    assert "Attached: ipython (pid " in text
    shown = [
        [re.sub(r"\d+ MiB", "MiB", line) for line in shown.splitlines()[1:3]]  # what is used is another with each beat
        for shown in (str(typed("%mesh")), text)
    ]
    assert shown[0] == shown[1]
    assert str(typed("%mesh status magics")).startswith("Mesh magics: ")


def test_a_magic_shows_its_value_wherever_it_stands_in_a_cell(typed: Terminal) -> None:
    def shown(cell: str) -> list[str]:
        with capture_output() as captured:
            value = typed(cell)
        displayed = [captured.stdout, *map(str, captured.outputs)]
        return [*re.findall(r"Mesh magics: 2 ranks|\b4[12]\b", "\n".join(displayed)), str(value)]

    status = "Mesh magics: 2 ranks"
    assert shown("for _ in range(2):\n    %mesh status") == [status, status, "None"]
    assert shown("def look():\n    if True:\n        %mesh status\nlook()") == [status, "None"]
    assert shown("%mesh status\n1 + 1") == [status, "2"]
    assert shown("table = %mesh status\nlen(table.rows)") == ["2"]
    typed("%%mesh\na, b = 41, 42")
    assert shown("def pulled(name):\n    %mesh pull $name\npulled('a'), pulled('b')") == ["41", "42", "(None, None)"]


def test_status_knows_meshes_of_others_by_name(typed: Terminal) -> None:
    with create_mesh(1, name="of-others"):
        assert str(typed("%mesh status of-others")).startswith("Mesh of-others: 1 rank,")
    with pytest.raises(MeshNameError, match="no mesh is named 'of-others'"):
        typed("%mesh status of-others")


def test_history_shows_the_cells_that_ran(typed: Terminal) -> None:
    typed("%%mesh --ranks 1\n# a remark\nanswer = 6 * 7")
    lines = str(typed("%mesh history")).splitlines()
    assert re.fullmatch(r"cell +began +took +ranks +ended +output +source", lines[0])
    assert re.fullmatch(r"\d* +\d\d:\d\d:\d\d +[\d.]+ m?s +1 +ok +answer = 6 \* 7", lines[-1])


def test_list_marks_this_notebooks_own(typed: Terminal) -> None:
    with create_mesh(1, name="another"):
        rows = {line.split()[0]: line for line in str(typed("%mesh list")).splitlines()}
    assert "this notebook" in rows["magics"]
    assert "2 ranks (dp=2, tp=1)" in rows["magics"]
    assert "this notebook" not in rows["another"]


def test_of_several_meshes_the_list_says_on_which_one_cells_run(fresh: Terminal) -> None:
    fresh("%mesh start -n 1 --name one")
    fresh("%mesh start -n 1 --name two")
    fresh("%mesh use one")
    rows = {line.split()[0]: line for line in str(fresh("%mesh list")).splitlines()}
    assert "this notebook, whose cells run on it" in rows["one"]
    assert "whose cells" not in rows["two"]
    fresh("%%mesh\nnot_on_two = 1")
    fresh("%mesh use two")
    with pytest.raises(NameError) as caught:
        fresh("not_on_two")
    assert caught.value.__notes__ == ["`not_on_two` is a name on the ranks of one: %mesh use one"]


def test_logs_show_what_a_rank_printed(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    typed("%%mesh\nprint('said by', rank)")
    capsys.readouterr()
    typed("%mesh logs 1")
    assert "said by 1" in capsys.readouterr().out
    typed("%mesh logs")
    text = capsys.readouterr().out
    assert text.index("---- rank 0") < text.index("said by 0") < text.index("---- rank 1") < text.index("said by 1")


def test_logs_of_a_host_are_shown_by_its_number_too(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    typed("%mesh logs host:0")
    assert capsys.readouterr().out.strip()


def test_logs_with_an_option_search_in_all_that_was_printed(typed: Terminal) -> None:
    def both_found() -> bool:
        """They are one hit if the ranks are not a second apart."""
        typed("%%mesh\nprint('before it')\nprint('found', rank)")
        found = typed("%mesh logs --grep '^found' --since 1h --context 1 --last 1")
        return [(hit.ranks, hit.text) for hit in found] == [((0, 1), "before it\nfound 0…1")]

    when(both_found)
    assert {hit.ranks for hit in typed("%mesh logs 1 --grep '^found'")} == {(1,)}
    assert {hit.ranks for hit in typed("%mesh logs --ranks dp=0 --grep '^found'")} == {(0,)}


def test_same_with_a_forward_says_where_ranks_begin_to_differ(typed: Terminal) -> None:
    typed("%%mesh\nlayer = torch.nn.Dropout(0.5)\ntorch.manual_seed(rank)")
    found = typed('%mesh same --forward "layer(torch.ones(64))"')
    assert [one.path for one in found.differences] == ["output of layer"]
    with pytest.raises(UsageError, match="names or a forward"):
        typed("%mesh same layer --forward layer(1)")


def test_interrupt_stops_a_cell_in_the_background(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    future = typed("%%mesh --bg\nimport time\nwhile True: time.sleep(10)")
    typed("%mesh interrupt dp=0-1")
    assert "Stop was sent to ranks 0-1." in capsys.readouterr().out
    assert type(future.exception(WAIT_S)).__name__ == "CellInterrupted"


def test_a_killed_rank_is_dead_in_the_status_and_named_in_its_note(
    fresh: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh("%mesh start -n 2")
    assert re.search(r"Mesh \S+ with 2 ranks is ready, after [\d.]+ m?s\.", capsys.readouterr().out)
    fresh("%mesh kill 1")
    assert "Killed rank 1." in capsys.readouterr().out
    mesh = mesh_of(fresh)
    when(lambda: mesh.status().ranks[1].state == "dead", "the end of rank 1")
    text = str(fresh("%mesh"))
    assert re.search(r"^1 +dead, was killed by SIGKILL", text, re.MULTILINE)
    assert "Rank 1 is gone; cells run on the others (%%mesh --ranks 0)" in text
    fresh("%mesh interrupt")
    assert "Stop was sent to rank 0." in capsys.readouterr().out
    with pytest.raises(RankLost, match=r"of ranks 1 of .* none is left"):
        fresh("%mesh interrupt 1")


def test_a_mesh_that_ended_elsewhere_says_so(fresh: Terminal) -> None:
    fresh("%mesh start -n 1 --name ended-elsewhere")
    attach("ended-elsewhere").stop()
    session = mesh_of(fresh).session
    when(lambda: session.ended is not None, "word of the end")
    assert str(fresh("%mesh")).startswith("Mesh ended-elsewhere has ended: ")
    with pytest.raises(NotAttached):
        fresh("%%mesh\n1")


# ---- checkpoints


def test_a_cell_that_is_recorded_alone_leaves_a_bundle_and_the_next_leaves_none(
    typed: Terminal, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CellError):
        typed("%%mesh --record --ranks 0\n1 / 0")
    assert "bundle failures/f1 (" in capsys.readouterr().out
    with pytest.raises(CellError):
        typed("%%mesh --ranks 0\n1 / 0")
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["f1"]
    typed("%mesh record on --limit 64M")
    assert "up to 64 MiB of memory" in capsys.readouterr().out
    typed("%mesh record off")


def test_a_checkpoint_is_saved_listed_and_restored_by_magics(
    typed: Terminal, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed("%%mesh\nkept = torch.ones(4)\nstep = 7")
    typed("%mesh checkpoint run1 kept step --step 7 --wait")
    assert f"Checkpoint {tmp_path}/run1/step-00000007 is committed" in capsys.readouterr().out
    table = typed("%mesh checkpoints run1")
    assert "run1: 1 checkpoint." in str(table)
    assert "kept, step" in str(table)
    typed("%%mesh\nkept += 1\nstep = 8")
    with pytest.raises(CheckpointError, match=r"is there already.*--overwrite"):
        typed("%mesh checkpoint run1 --step 7 kept step")
    typed("%mesh restore run1 --step 7")
    assert f"kept, step are as in {tmp_path}/run1/step-00000007." in capsys.readouterr().out
    assert mesh_of(typed).run("(kept.tolist(), step)").values.same() == ([1] * 4, 7)


def test_a_checkpoint_in_the_background_says_how_to_see_it(
    typed: Terminal, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    typed("%%mesh\nkept = torch.ones(4)")
    typed(f"%mesh checkpoint {tmp_path}/run1 kept")
    assert f"%mesh checkpoints {tmp_path}/run1 lists it when it is committed" in capsys.readouterr().out
    when(lambda: "save-0001" in str(typed(f"%mesh checkpoints {tmp_path}/run1")))


def test_a_checkpoint_without_names_or_folder_is_answered_with_the_right_form(typed: Terminal, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="%mesh checkpoint run1 model opt --step 800"):
        typed("%mesh checkpoint run1")
    with pytest.raises(CheckpointError, match="has no checkpoints: No such file"):
        typed(f"%mesh restore {tmp_path}/none")


def test_a_checkpoint_on_preemption_is_saved_when_it_comes_and_not_before(
    typed: Terminal, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    typed("%%mesh\nkept = torch.ones(4)")
    typed(f"%mesh checkpoint {tmp_path}/run1 kept --on-preemption --grace 60")
    expected = f"kept will be saved in {tmp_path}/run1 when ranks of the mesh receive SIGTERM.\n"
    assert capsys.readouterr().out == expected
    assert not (tmp_path / "run1").exists()
    for line, text in [
        ("--on-preemption --step 7", "leave out --step, --wait, --overwrite"),
        ("--grace 60", "--grace is for --on-preemption"),
        ("--on-preemption --grace 0", "grace_s is the number of seconds between SIGTERM and SIGKILL"),
    ]:
        with pytest.raises(UsageError, match=text):
            typed(f"%mesh checkpoint {tmp_path}/run1 kept {line}")
    mesh_of(typed).on_preemption()


# ---- the list of commands


def test_every_word_is_in_the_help_and_shows_its_usage(typed: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    typed("%mesh help")
    overview = capsys.readouterr().out
    for word, command in magics.COMMANDS.items():
        assert re.search(rf"%mesh {word} +{re.escape(command.summary)}", overview)
        assert command.usage.startswith(f"%mesh {word}")
        typed(f"%mesh {word} --help")
        assert command.usage in capsys.readouterr().out
    assert overview.strip() == (typed.shell.find_line_magic("mesh").__doc__ or "").strip()


def test_what_follows_percent_mesh_is_completed(typed: Terminal) -> None:
    def after(line: str) -> list[str]:
        class Event:
            def __init__(self) -> None:
                self.line = line

        return magics.complete(typed.shell, Event())

    assert set(after("%mesh st")) == {"start", "status", "stacks", "stop"}
    assert after("%mesh stop ") == ["magics", "--now"]
    assert after("%mesh start --f") == ["--fresh"]
    assert after("%mesh kill ") == ["0", "1"]
    assert after("%mesh auto o") == ["on", "off"]
    assert after("%%mesh --b") == ["--bg", "--break"]
    assert after("%mesh nothing ") == []
    assert "magics" in after("%mesh attach m")
    typed("to_be_pushed = 1")
    assert "to_be_pushed" in after("%mesh push ")
    assert "get_ipython" not in after("%mesh push ")


# ---- in a kernel


def test_in_a_kernel_words_and_names_are_completed(shared: FrontEnd) -> None:
    assert {"start", "status", "stop"} <= set(shared.complete("%mesh st")["matches"])
    shared.run("completed_by_pull = 1")
    assert shared.complete("%mesh pull completed_by_p")["matches"] == ["completed_by_pull"]
    reply = shared.complete("x = 1\n%mesh start --fr")
    assert (reply["matches"], reply["cursor_start"]) == (["--fresh"], len("x = 1\n%mesh start "))
    assert "%mesh kill RANKS" in shared.inspect("%mesh kill")["data"]["text/plain"]
    assert "--setup" in shared.inspect("%%mesh")["data"]["text/plain"]


def test_in_a_kernel_tables_are_html_too(shared: FrontEnd) -> None:
    cell = shared.run("%mesh status")
    (shown,) = [output["data"] for output in cell.outputs if output["type"] == "execute_result"]
    assert "<table>" in shown["text/html"]
    assert shown["text/plain"].startswith("Mesh ")


def test_the_doctor_answers_in_a_notebook(shared: FrontEnd) -> None:
    cell = shared.run("%mesh doctor")
    assert cell.status == "ok"
    assert re.search(r"ok +Python", cell.stdout)
