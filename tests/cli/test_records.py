"""`meshbook logs`, `history`, `hosts`, `checkpoints`, `report`, `completion`: in words, and as JSON."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook import create_mesh
from meshbook.controller.mesh import Mesh
from tests.budget import WAIT_S
from tests.cli.commands import CommandResult, meshbook, typed

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh(run: object) -> Iterator[Mesh]:
    with create_mesh(2, name="said") as mesh:
        mesh.run("x = torch.ones(2)\nprint('loss=nan')\nprint('fine')", echo=False)
        yield mesh


def as_json(done: CommandResult) -> Any:
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


def test_logs_are_searched(mesh: Mesh) -> None:
    done = meshbook("logs", "--grep", "loss=nan")
    assert (done.status, done.err) == (0, "")
    assert done.out.endswith(" [0-1] loss=nan\n")
    found = as_json(typed("logs", "said", "--since", "1h", "--ranks", "1", "--last", "1", "--json"))
    assert [(hit["ranks"], hit["text"]) for hit in found["hits"]] == [([1], "fine")]
    assert found["num_left_out"] == 1
    assert typed("logs", "--grep", "no such line").status == 0


def test_logs_are_followed_until_ctrl_c(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "meshbook", "logs", "-f", "--grep", "loss", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["text"] == "loss=nan"
    mesh.run("if rank == 0: print('loss=inf')", echo=False)
    assert json.loads(process.stdout.readline())["text"] == "loss=inf"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=WAIT_S) == ("", "")
    assert process.returncode == 130


def test_history_hosts_and_checkpoints(mesh: Mesh, tmp_path: Path) -> None:
    assert as_json(typed("history", "--json"))[0]["status"] == "ok"
    assert as_json(typed("history", "--cell", "1", "--json"))["text"].splitlines() == ["loss=nan", "fine"]
    assert "loss=nan" in typed("history", "--cell", "1").out
    assert [host["ranks"] for host in as_json(typed("hosts", "--json"))] == [[0, 1]]
    assert "Mesh said: 1 machine." in typed("hosts").out
    mesh.checkpoint(str(tmp_path), "x", step=7).result(WAIT_S)
    (found,) = as_json(typed("checkpoints", str(tmp_path), "--json"))
    assert (found["folder"], found["step"], found["names"]) == (str(tmp_path / "step-00000007"), 7, ["x"])
    assert "1 checkpoint" in typed("checkpoints", str(tmp_path)).out


def test_a_report_is_written_where_one_is(mesh: Mesh, tmp_path: Path) -> None:
    done = meshbook("report", "--json", cwd=tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(done.out)["path"] == str(path)
    assert "loss=nan" in path.read_text()


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("logs", "--grep", "loss=("), 2, "unterminated subpattern at position 5"),
        (("logs", "--since", "noon"), 2, "'noon' is not a time"),
        (("logs", "--ranks", "9"), 1, "rank 9 is not in this mesh"),
        (("logs", "nobody"), 1, "no mesh is named 'nobody'; running: said"),
        (("history", "--cell", "99"), 2, "no output of a cell 99 is kept"),
        (("checkpoints", "/nowhere"), 1, "/nowhere has no checkpoints"),
        (("completion", "fish"), 2, "invalid choice: 'fish'"),
    ],
)
def test_a_mistake_is_a_sentence_and_a_status(mesh: Mesh, words: tuple[str, ...], status: int, sentence: str) -> None:
    done = typed(*words)
    assert done.status == status, done.err
    assert sentence in done.err


# ---- completion


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"source '{script}'; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p meshbook | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_the_names_of_meshes(mesh: Mesh, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "meshbook.bash"
    script.write_text(typed("completion", "bash").out)
    assert completed(script, "meshbook", "lo") == {"logs"}
    assert {"--grep", "--since", "--follow"} <= completed(script, "meshbook", "logs", "--")
    assert completed(script, "meshbook", "status", "sa") == {"said"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_reads_its_script(mesh: Mesh, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "_meshbook"
    script.write_text(typed("completion", "zsh").out)
    subprocess.run(["zsh", "-n", str(script)], check=True, timeout=WAIT_S)
