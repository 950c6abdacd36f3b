"""`meshbook install`, and the kernel as the command itself starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from meshbook.cli import kernels
from tests.budget import WAIT_S
from tests.cli.commands import meshbook

pytestmark = pytest.mark.usefixtures("starts_kernels")


def test_install_writes_the_absolute_path_of_this_python_and_what_starts_from_any_folder(tmp_path: Path) -> None:
    """Even where the package is only on the path of the one who installed it."""
    done = meshbook("install", "--prefix", str(tmp_path))
    folder = tmp_path / "share" / "jupyter" / "kernels" / "meshbook"
    assert (done.status, done.out) == (0, f"the kernel Meshbook is in {folder}\n")
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"] == [sys.executable, "-m", "meshbook.kernel", "-f", "{connection_file}"]
    assert spec["interrupt_mode"] == "message"
    assert sorted(file.name for file in folder.iterdir()) == [
        "kernel.json",
        "logo-32x32.png",
        "logo-64x64.png",
        "logo-svg.svg",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | spec.get("env", {})
    command = [*spec["argv"][:3], "--help"]
    started = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert started.returncode == 0, started.stderr


def test_install_for_the_user_is_found_by_jupyter(tmp_path: Path) -> None:
    done = meshbook("install", "--user", env={"JUPYTER_DATA_DIR": str(tmp_path)})
    assert done.status == 0
    found = KernelSpecManager(kernel_dirs=[str(tmp_path / "kernels")]).get_kernel_spec("meshbook")
    assert found.argv[0] == sys.executable
    assert found.display_name == "Meshbook"


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("a file where a folder should be")
    done = meshbook("install", "--prefix", str(tmp_path))
    assert done.status == 2
    assert "cannot be written" in done.err
    assert "meshbook install --user" in done.err


def test_the_kernel_speaks_encrypted_with_a_server_that_demands_it(tmp_path: Path) -> None:
    specs = kernels.MeshbookKernelSpecManager()
    manager = KernelManager(
        kernel_name="meshbook",
        kernel_spec_manager=specs,
        transport="ipc",
        ip=f"{tmp_path}/k",
        transport_encryption="required",
    )
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(WAIT_S)
        reply = client.execute_interactive("%%controller\n1", timeout=WAIT_S)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()


def test_the_commands_own_kernel_needs_no_installation() -> None:
    spec = kernels.MeshbookKernelSpecManager(kernel_dirs=[]).get_kernel_spec("meshbook")
    assert spec.argv[:3] == [sys.executable, "-m", "meshbook.kernel"]
    assert spec.interrupt_mode == "message"
