"""Starts the Meshbook kernel with this interpreter, whether or not Jupyter knows the kernel.

`install` registers it with Jupyter, for a server in another environment or for a Meshbook that is not installed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from meshbook.controller import script
from meshbook.errors import UsageError

KERNEL_NAME = "meshbook"
PACKAGE_DIR = Path(__file__).resolve().parent.parent


def kernel_spec() -> KernelSpec:
    """Return the kernelspec that uses this interpreter."""
    return KernelSpec(**_kernel_json(), resource_dir=str(_find_resources() or ""))


class MeshbookKernelSpecManager(KernelSpecManager):
    """Resolves the Meshbook kernel by name without a search; other kernels as Jupyter does."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return kernel_spec() if kernel_name == KERNEL_NAME else super().get_kernel_spec(kernel_name)


def ipc_connection_options(folder: str, name: str) -> dict[str, Any]:
    """Return kernel manager options for sockets in a folder that only this user can open, without TCP ports.

    Args:
        folder: its path must be short, because of the limit on socket paths.
        name: the stem of the mesh's name.
    """
    return {
        "transport": "ipc",
        "ip": os.path.join(folder, "socket"),
        "connection_file": os.path.join(folder, f"{name}.json"),
    }


def kernel_environment(ranks: int | None = None, argv: Sequence[str] = ()) -> dict[str, str]:
    """Return the kernel's environment: this process's, without the owning notebook of a notebook server's terminal.

    Args:
        ranks: number of ranks of its mesh unless a cell sets it; None: the default.
        argv: `sys.argv` of the script whose cells it runs.
    """
    variables = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
    if ranks is not None:
        variables["MESHBOOK_RANKS"] = str(ranks)
    return variables | script.environment(argv)


def install(*, user: bool = False, prefix: str | None = None) -> Path:
    """Install the kernelspec where Jupyter searches, with the absolute path of this interpreter.

    Args:
        user: in this user's Jupyter folder.
        prefix: in an environment's folder, such as the one of a Jupyter server; None (and not `user`): this one's.

    Returns:
        The folder of the installed kernelspec.

    Raises:
        UsageError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as draft:
        resources = _find_resources()
        if resources is not None:
            for file in resources.glob("logo-*"):
                shutil.copy(file, draft)
        (Path(draft) / "kernel.json").write_text(json.dumps(_kernel_json(), indent=2) + "\n")
        try:
            destination = KernelSpecManager().install_kernel_spec(
                draft, KERNEL_NAME, user=user, prefix=None if user else prefix or sys.prefix
            )
        except OSError as error:
            raise UsageError(
                f"{error.filename or 'the folder of kernels'} cannot be written ({error.strerror}); "
                "try meshbook install --user"
            ) from error
    return Path(destination)


def _kernel_json() -> dict[str, Any]:
    spec: dict[str, Any] = {"display_name": "Meshbook", "language": "python", "interrupt_mode": "message"}
    resources = _find_resources()
    if resources is not None:
        spec |= json.loads((resources / "kernel.json").read_text())
    spec["argv"] = [sys.executable, "-m", "meshbook.kernel", "-f", "{connection_file}"]
    # ipykernel's debugger prints a harmless warning about Python's frozen modules on stderr.
    spec["env"] = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", **spec.get("env", {})}
    if not is_installed():
        spec["env"]["PYTHONPATH"] = str(PACKAGE_DIR.parent)
    return spec


def is_installed() -> bool:
    """Whether this interpreter finds Meshbook in any folder, not only in the one it was started in."""
    site_packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return PACKAGE_DIR.parent in site_packages or any(
        str(PACKAGE_DIR.parent) in file.read_text(errors="replace")
        for folder in site_packages
        for file in folder.glob("*.pth")
    )


def _find_resources() -> Path | None:
    """Return the folder with kernel.json and the logos: of a source tree, else of the installed wheel."""
    candidates = (PACKAGE_DIR.parent / "kernelspec", Path(sys.prefix) / "share" / "jupyter" / "kernels" / KERNEL_NAME)
    return next((candidate for candidate in candidates if (candidate / "kernel.json").is_file()), None)
