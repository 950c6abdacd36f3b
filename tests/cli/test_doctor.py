"""`meshbook doctor`: what it says of this machine, and of machines that lack something."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from meshbook.cli import doctor
from meshbook.cli.main import main
from tests.budget import WAIT_S
from tests.cli.commands import meshbook

pytestmark = pytest.mark.usefixtures("starts_processes")

Findings = Callable[[], tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def findings(capsys: pytest.CaptureFixture[str]) -> Findings:
    """The doctor's exit status and its findings by what they are about."""

    def look() -> tuple[int, dict[str, dict[str, str]]]:
        status = main(["doctor", "--json"])
        said = capsys.readouterr()
        assert said.err == ""
        return status, {finding["about"]: finding for finding in json.loads(said.out)}

    return look


def test_a_machine_that_runs_the_tests_lacks_nothing() -> None:
    done = meshbook("doctor")
    assert done.status == 0
    for about in ("system", "Python", "packages", "torch", "kernel", "runtime folder", "shared memory", "loopback"):
        assert re.search(rf"^ok +{about} ", done.out, re.MULTILINE), done.out
    assert "MISSING" not in done.out
    assert done.out.splitlines()[-1].startswith("Meshbook ")


def test_torch_that_is_not_there_is_missing_and_how_to_get_it_is_said(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "torch" else find(name, *args))
    status, found = findings()
    assert status == 1
    assert found["torch"]["state"] == "missing"
    assert "pip install 'torch>=2.11,<2.14'" in found["torch"]["remedy"]


def test_a_package_that_is_too_old_is_missing(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7.3.1" if name == "ipykernel" else "99")
    status, found = findings()
    assert status == 1
    assert found["ipykernel"]["says"] == "7.3.1 is installed, >=7.4,<8 is wanted"
    assert found["ipykernel"]["remedy"] == "pip install 'ipykernel>=7.4,<8'"


def test_a_kernel_that_jupyter_does_not_know_is_no_obstacle_but_said(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    status, found = findings()
    assert status == 0
    if found["kernel"]["state"] != "ok":  # it is installed in this environment's own folder where it is ok
        assert found["kernel"]["state"] == "poor"
        assert found["kernel"]["remedy"] == "meshbook install --user"


def test_a_kernelspec_whose_python_is_gone_is_told_of(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels" / "meshbook"
    folder.mkdir(parents=True)
    spec = {"argv": ["/gone/python"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    status, found = findings()
    assert status == 0
    assert found["kernel"]["says"] == f"{folder} starts /gone/python, which is gone"


def test_a_runtime_folder_that_is_open_to_others_is_missing(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meshbook").mkdir(mode=0o755)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(tmp_path))
    status, found = findings()
    assert status == 1
    assert f"chmod 700 {tmp_path}/meshbook" in found["runtime folder"]["says"]


def test_a_runtime_folder_too_deep_for_sockets_is_missing(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(deep))
    status, found = findings()
    assert status == 1
    assert "with a short path" in found["runtime folder"]["remedy"]


def test_few_open_files_are_poor(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", {resource.RLIMIT_NOFILE: (256, 4096)}.__getitem__)
    status, found = findings()
    assert status == 0
    assert found["open files"]["state"] == "poor"
    assert found["open files"]["remedy"].startswith("ulimit -n 4096,")


def test_settings_that_cannot_be_read_are_missing(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_RANKS", "many")
    status, found = findings()
    assert status == 1
    assert "MESHBOOK_RANKS='many' is not a number of ranks" in found["settings"]["says"]


def test_a_gpu_that_torch_cannot_use_is_told_of(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = findings()[1]
    assert found["GPUs"]["state"] == "poor"
    assert found["GPUs"]["says"] == "1 to be seen, none usable by this torch; ranks run on the CPU"


@pytest.mark.usefixtures("starts_meshes")
def test_what_dead_meshes_left_is_removed_and_said(
    findings: Findings, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    # Left first: who is attached when a supervisor dies removes what it leaves.
    program = (
        "import meshbook; m = meshbook.create_mesh(1, name='dead'); m.detach(60); "
        "meshbook.wire.process_control.kill_supervisor(m.session.info.supervisor_pid)"
    )
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(folder))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)
    status, found = findings()
    assert status == 0
    assert found["dead meshes"]["says"] == f"removed what dead had left in {folder}/meshbook"
    assert os.listdir(folder / "meshbook") == []
    assert "dead meshes" not in findings()[1]


def test_a_check_that_fails_itself_is_a_finding(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.create_connection")
    status, found = findings()
    assert status == 1
    assert "the check itself failed: AttributeError" in found["loopback"]["says"]


@pytest.mark.parametrize(
    ("version", "constraint", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("8", ">=8.0", True),
        ("7.4.0rc1", ">=7.4,<8", True),
        ("10.1", ">=9", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, constraint: str, fits: bool) -> None:
    assert doctor._satisfies(version, SpecifierSet(constraint)) is fits


def test_the_packages_it_looks_for_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found = {f"{name}{doctor._constraint(wanted)}" for name, wanted in doctor._requirements().items()}
    assert found == set(project["dependencies"])


def test_without_a_source_tree_the_packages_are_those_of_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["torch>=2.11,<2.14", "ray>=2.50; extra == 'ray'"]
    monkeypatch.setattr("importlib.metadata.requires", {"meshbook": lines}.get)
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    assert list(doctor._requirements()) == ["torch"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\ndependencies = []\n')
    assert list(doctor._requirements()) == ["torch"]
