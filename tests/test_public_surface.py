"""What a user may rely on: the names, where they are, and that asking for them is quick.

A name is added to these lists when it is added to Meshbook, and leaves them only with a way back in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import meshbook
import meshbook.errors
from tests.budget import WAIT_S

ROOT = Path(__file__).resolve().parent.parent

# Exactly these: a name that is public by accident is a promise by accident.
PUBLIC = {
    "Buffer", "ElasticSampler", "Mesh", "Plan", "RDMABuffer", "RankValues", "attach", "create_mesh", "distribute",
    "elastic", "errors", "exceptions", "heal_mesh", "list_meshes", "log", "module_to_mesh", "preempted", "record",
    "recover",
}  # fmt: skip

ERRORS = {
    "CellError",
    "CellInterrupted",
    "CheckpointError",
    "CollectiveAborted",
    "Failure",
    "HealError",
    "MeshInUse",
    "MeshNameError",
    "MeshShapeError",
    "MeshTimeout",
    "MeshbookError",
    "NotAttached",
    "OperationFailed",
    "PlacementError",
    "Preempted",
    "ProtocolError",
    "RankLost",
    "ResizeError",
    "Released",
    "StartError",
    "SyncError",
    "TransferError",
    "UsageError",
    "ValuesDiffer",
    "VersionMismatch",
}

# At least these, on every mesh and slice of one.
MESH = {
    # what it is
    "axes",
    "flatten",
    "heal",
    "spare",
    "name",
    "ranks",
    "rename",
    "size",
    "slice",
    # running code on it
    "cell",
    "execute",
    "remote",
    "run",
    # moving values
    "feed",
    "gather",
    "pull",
    "push",
    "scatter",
    # checkpoints of what is on it
    "checkpoint",
    "checkpoints",
    "on_preemption",
    "restore",
    # tensors and actors on it
    "activate",
    "actors",
    "spawn",
    # its life
    "detach",
    "history",
    "interrupt",
    "kill",
    "logs",
    "status",
    "stop",
    # what it says of itself
    "dashboard",
    "health",
    "memory",
    "metrics",
    "stacks",
    "why",
}

# Slow to import, and each needed by some user only or not before the first mesh: not paid for by `import meshbook`.
NOT_ON_IMPORT = {
    "IPython",
    "ipykernel",
    "jupyter_client",
    "marimo",
    "matplotlib",
    "monarch",
    "nbclient",
    "nbconvert",
    "numpy",
    "pandas",
    "ray",
    "torch",
}


def public(module: object) -> set[str]:
    return {name for name in getattr(module, "__all__", ()) if not name.startswith("_")}


def test_the_front_door_has_exactly_the_promised_names() -> None:
    assert public(meshbook) == PUBLIC
    assert {name for name in PUBLIC if not hasattr(meshbook, name)} == set()


def test_the_promised_names_complete() -> None:
    assert set(dir(meshbook)) >= PUBLIC


def test_a_name_that_is_not_there_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="create_meshh"):
        meshbook.create_meshh  # noqa: B018  (asking is the test)


@pytest.mark.parametrize("name", sorted(MESH))
def test_a_mesh_has_the_promised_name(name: str) -> None:
    assert hasattr(meshbook.Mesh, name)
    assert inspect.getdoc(getattr(meshbook.Mesh, name)), f"Mesh.{name} says nothing of itself"


def test_a_mesh_is_indexed_assigned_to_and_used_as_a_context() -> None:
    for protocol in ("__getitem__", "__setitem__", "__enter__", "__exit__"):
        assert hasattr(meshbook.Mesh, protocol), protocol


def test_every_error_is_a_meshbook_error_and_promised() -> None:
    defined = {
        name
        for name, thing in vars(meshbook.errors).items()
        if inspect.isclass(thing) and thing.__module__ == "meshbook.errors"
    }
    assert defined == ERRORS
    strangers = {
        name
        for name in ERRORS - {"Failure", "Released"}  # what a CellError consists of, and no exception itself
        if not issubclass(getattr(meshbook.errors, name), meshbook.errors.MeshbookError)
    }
    assert strangers == set()


def test_a_lost_rank_is_also_known_by_monarchs_name() -> None:
    assert importlib.import_module("meshbook.exceptions").DeviceMeshError is meshbook.errors.RankLost


@pytest.mark.usefixtures("starts_processes")
def test_importing_meshbook_imports_nothing_slow() -> None:
    program = "import json, sys, meshbook; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert set(json.loads(done.stdout)) & NOT_ON_IMPORT == set()


@pytest.mark.usefixtures("starts_processes")
def test_importing_meshbook_starts_no_thread_and_no_process() -> None:
    program = "import os, meshbook; print(os.listdir('/proc/self/task') == [str(os.getpid())]); os.wait()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "True\n"
    assert "ChildProcessError" in done.stderr  # os.wait: there is no child to wait for


def test_it_is_an_ipython_extension() -> None:
    assert callable(meshbook.load_ipython_extension)
    assert callable(meshbook.unload_ipython_extension)


def test_the_entry_points_lead_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {**project["scripts"], **project["entry-points"]["marimo.cell.executor"]}
    for name, value in named.items():
        point = importlib.metadata.EntryPoint(name, value, group="meshbook")
        assert callable(point.load()), value


def test_the_kernelspec_starts_the_kernel_and_can_be_interrupted_by_message() -> None:
    spec = json.loads((ROOT / "kernelspec" / "kernel.json").read_text())
    assert spec["argv"][:3] == ["python", "-m", "meshbook.kernel"]
    assert spec["interrupt_mode"] == "message"  # a signal would reach the notebook's process only, not the ranks
    assert spec["language"] == "python"
    for size in (32, 64):
        header = (ROOT / "kernelspec" / f"logo-{size}x{size}.png").read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert header[16:24] == size.to_bytes(4, "big") * 2


def test_type_checkers_read_the_annotations() -> None:
    assert (Path(meshbook.__file__).parent / "py.typed").is_file()
