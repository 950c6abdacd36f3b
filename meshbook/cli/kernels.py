"""How the command starts the Meshbook kernel: with this interpreter, whether or not Jupyter knows the kernel.

`install` tells Jupyter of it, for a server that lives in another environment or for a Meshbook that is not installed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from meshbook.errors import UsageError

KERNEL_NAME = "meshbook"
PACKAGE_DIR = Path(__file__).resolve().parent.parent


def kernel_spec() -> KernelSpec:
    """The kernel as this interpreter runs it."""
    return KernelSpec(**_kernel_json(), resource_dir=str(_find_resources() or ""))


class MeshbookKernelSpecManager(KernelSpecManager):
    """Knows the Meshbook kernel under its name without looking for it; everything else as Jupyter does."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return kernel_spec() if kernel_name == KERNEL_NAME else super().get_kernel_spec(kernel_name)


def ipc_connection_options(folder: str, name: str) -> dict[str, Any]:
    """Options of a kernel manager whose sockets are in a folder that only this user can open: no port on the machine,
    and nothing to be read on the way.

    Args:
        folder: its path is to be short, for sockets.
        name: what the kernel's mesh is named after.
    """
    return {
        "transport": "ipc",
        "ip": os.path.join(folder, "socket"),
        "connection_file": os.path.join(folder, f"{name}.json"),
    }


def kernel_environment(ranks: int | None = None) -> dict[str, str]:
    """The kernel's: ours, but it is nobody's notebook, even if the command is run in one's terminal.

    Args:
        ranks: how many its mesh has unless a cell says; None: as always.
    """
    variables = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
    return variables if ranks is None else {**variables, "MESHBOOK_RANKS": str(ranks)}


def install(*, user: bool = False, prefix: str | None = None) -> Path:
    """Put the kernelspec where Jupyter looks, with the absolute path of this interpreter.

    Args:
        user: in this user's Jupyter folder.
        prefix: in an environment's folder, such as the one of a Jupyter server; None (and not `user`): this one's.

    Returns:
        The folder it is in now.

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
    # The debugger that ipykernel brings warns on stderr of Python's frozen modules, and then works.
    spec["env"] = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", **spec.get("env", {})}
    if not is_installed():
        spec["env"]["PYTHONPATH"] = str(PACKAGE_DIR.parent)
    return spec


def is_installed() -> bool:
    """Whether this interpreter finds Meshbook without help, and not only because of the folder it was started in."""
    site_packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return PACKAGE_DIR.parent in site_packages or any(
        str(PACKAGE_DIR.parent) in file.read_text(errors="replace")
        for folder in site_packages
        for file in folder.glob("*.pth")
    )


def _find_resources() -> Path | None:
    """The folder with kernel.json and the logos: of a source tree, else of the installed wheel."""
    candidates = (PACKAGE_DIR.parent / "kernelspec", Path(sys.prefix) / "share" / "jupyter" / "kernels" / KERNEL_NAME)
    return next((candidate for candidate in candidates if (candidate / "kernel.json").is_file()), None)
