"""`meshbook doctor`: what this machine lacks, what it is needed for, and how to get it.

Checks are independent and read-only, with one exception: stale files of dead meshes are removed. An unexpected error in
a check is a result too, never a traceback.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from meshbook.controller.config import read_defaults
from meshbook.controller.tables import format_bytes
from meshbook.errors import MeshbookError
from meshbook.host.gpus import count_gpus
from meshbook.wire import keys

_ROOT = Path(__file__).resolve().parents[2]  # of a source tree
_EXTRAS = {
    "jupyterlab": "pip install jupyterlab, to work in a browser",
    "marimo": "pip install 'marimo>=0.20', for marimo notebooks",
    "matplotlib": "pip install matplotlib, for the plots of the quickstart",
    "ipywidgets": "pip install ipywidgets, for progress bars and widgets of the notebook's own process",
}
# Open files that a supervisor with some hundred ranks needs: a few per rank.
_MIN_OPEN_FILES = 1024
# Docker gives containers 64 MiB, which NCCL and DataLoader workers fill quickly.
_MIN_SHARED_MEMORY_BYTES = 1 << 30
_MIN_FREE_DISK_BYTES = 100 << 20


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        state: "ok"; "note" for optional or useful information; "poor" for what works, but badly; "missing" for what
            Meshbook needs and does not have.
        about: the subject, in two or three words.
        says: what was found.
        remedy: what to do; empty if nothing is needed.
    """

    state: Literal["ok", "note", "poor", "missing"]
    about: str
    says: str
    remedy: str = ""


def run_checks() -> list[CheckResult]:
    """Run all checks; takes some seconds, mostly for importing torch."""
    results: list[CheckResult] = []
    for check in CHECKS:
        try:
            results.extend(check())
        except Exception as error:
            results.append(CheckResult("missing", check.__name__.strip("_"), f"the check itself failed: {error!r}"))
    return results


def format_report(results: list[CheckResult]) -> str:
    """Format results as text: a line for each, its remedy below it, and a summary at the end."""
    marks = {"ok": "ok", "note": "note", "poor": "POOR", "missing": "MISSING"}
    width = max(len(result.about) for result in results)
    lines = []
    for result in results:
        lines.append(f"{marks[result.state]:8}{result.about:{width}}  {result.says}")
        if result.remedy:
            lines.append(f"{'':8}{'':{width}}  -> {result.remedy}")
    missing = sum(result.state == "missing" for result in results)
    poor = sum(result.state == "poor" for result in results)
    if missing:
        verdict = f"Meshbook cannot work here yet: {missing} {'thing is' if missing == 1 else 'things are'} missing."
    elif poor:
        verdict = f"Meshbook works here; {poor} {'thing' if poor == 1 else 'things'} could be better."
    else:
        verdict = "Meshbook has all it needs here."
    return "\n".join([*lines, "", verdict])


# ---------------------------------------------------------------------------------------------------------------------
# Checks. Each yields one or more results.


def _system() -> Iterator[CheckResult]:
    if sys.platform == "linux":
        memory = format_bytes(psutil.virtual_memory().total)
        yield CheckResult("ok", "system", f"Linux {platform.release()}, {os.cpu_count()} cores, {memory}")
    else:
        yield CheckResult(
            "missing", "system", f"{sys.platform} is not Linux", "use a Linux machine, a container or WSL 2"
        )


def _python() -> Iterator[CheckResult]:
    # Always supported: the package itself requires 3.11.
    yield CheckResult("ok", "Python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[CheckResult]:
    wanted = _requirements()
    del wanted["torch"]  # checked by itself
    lacking = [(one, problem) for one in wanted.values() if (problem := _package_problem(one))]
    for one, problem in lacking:
        yield CheckResult("missing", one.name, problem, f"pip install '{one.name}{_constraint(one)}'")
    if not lacking:
        yield CheckResult("ok", "packages", f"all {len(wanted)} that Meshbook needs beside torch")


def _torch() -> Iterator[CheckResult]:
    wanted = _requirements()["torch"]
    install = f"pip install 'torch{_constraint(wanted)}'"
    if importlib.util.find_spec("torch") is None:
        yield CheckResult(
            "missing",
            "torch",
            "not installed",
            f"{install}; without a GPU add --index-url https://download.pytorch.org/whl/cpu",
        )
        return
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield CheckResult(
            "missing", "torch", f"cannot be imported: {error}", "install it anew, see https://pytorch.org"
        )
        return
    if not dist.is_available() or not dist.is_gloo_available():
        yield CheckResult(
            "missing", "torch", f"{torch.__version__} has no gloo", "install a build from https://pytorch.org"
        )
    elif not _satisfies(torch.__version__, wanted.specifier):
        tested = f"{torch.__version__}; Meshbook was tested with {_constraint(wanted)}"
        yield CheckResult("poor", "torch", tested, install)
    else:
        yield CheckResult(
            "ok", "torch", f"{torch.__version__}, with gloo{' and NCCL' if dist.is_nccl_available() else ''}"
        )
    yield from _gpus(torch.cuda.is_available(), torch.cuda.device_count(), dist.is_nccl_available())


def _gpus(usable: bool, seen_by_torch: int, nccl: bool) -> Iterator[CheckResult]:
    seen = count_gpus()
    has_driver = Path("/dev/nvidiactl").exists()
    if not seen and not has_driver:
        yield CheckResult("note", "GPUs", "no NVIDIA GPU here; ranks run on the CPU, with gloo")
    elif not seen:
        yield CheckResult(
            "note",
            "GPUs",
            "there is an NVIDIA driver, but no GPU to be seen; ranks run on the CPU",
            "look at nvidia-smi --list-gpus and at CUDA_VISIBLE_DEVICES",
        )
    elif not usable:
        yield CheckResult(
            "poor",
            "GPUs",
            f"{seen} to be seen, none usable by this torch; ranks run on the CPU",
            "install a CUDA build that fits the driver, see https://pytorch.org",
        )
    elif not nccl:
        yield CheckResult(
            "poor", "GPUs", f"{seen_by_torch} usable, but torch has no NCCL", "install a build that has it"
        )
    else:
        yield CheckResult("ok", "GPUs", f"{seen_by_torch} usable, with NCCL")


def _kernel() -> Iterator[CheckResult]:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from meshbook.cli import kernels

    if not kernels.is_installed():
        yield CheckResult(
            "note",
            "meshbook",
            f"found in {kernels.PACKAGE_DIR.parent}, not installed",
            "pip install it, so that every Python of this environment finds it",
        )
    else:
        yield CheckResult("ok", "meshbook", f"{importlib.metadata.version('meshbook')} in {kernels.PACKAGE_DIR.parent}")
    try:
        spec = KernelSpecManager().get_kernel_spec(kernels.KERNEL_NAME)
    except NoSuchKernel:
        yield CheckResult(
            "poor",
            "kernel",
            "Jupyter does not know the kernel Meshbook; the terminal and %load_ext do without",
            "meshbook install --user",
        )
        return
    program = spec.argv[0]
    if os.path.isabs(program) and not os.access(program, os.X_OK):
        says = f"{spec.resource_dir} starts {program}, which is gone"
        yield CheckResult("poor", "kernel", says, "meshbook install --user")
    else:
        yield CheckResult("ok", "kernel", f"Jupyter finds it in {spec.resource_dir}")


def _runtime_folder() -> Iterator[CheckResult]:
    try:
        folder = keys.runtime_folder()
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as inner, socket.socket(socket.AF_UNIX) as s:
            s.bind(os.path.join(inner, "h1234-service.sock"))
    except MeshbookError as error:
        yield CheckResult("missing", "runtime folder", str(error))
        return
    except OSError as error:
        yield CheckResult(
            "missing",
            "runtime folder",
            f"no socket can be made in {folder}: {error.strerror or error}",
            "set MESHBOOK_RUNTIME_DIR to a folder of yours on a local disk, with a short path",
        )
        return
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_DISK_BYTES:
        yield CheckResult(
            "poor",
            "runtime folder",
            f"{folder} has {format_bytes(free)} left; sockets and logs go there",
            "free some space, or set MESHBOOK_RUNTIME_DIR to another disk",
        )
    else:
        yield CheckResult("ok", "runtime folder", f"{folder}")


def _shared_memory() -> Iterator[CheckResult]:
    if problem := _memfd_problem():
        yield CheckResult(
            "missing",
            "shared memory",
            f"values go to the ranks through memory files, and {problem}",
            "a Linux of 3.17 or newer, with /proc mounted as usual",
        )
    else:
        yield CheckResult("ok", "shared memory", "memory files can be handed to other processes")
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if size < _MIN_SHARED_MEMORY_BYTES:
        yield CheckResult(
            "poor",
            "/dev/shm",
            f"{format_bytes(size)}; NCCL and DataLoader workers need more" if size else "not there",
            "in Docker: docker run --shm-size 8g, or --ipc=host",
        )


def _memfd_problem() -> str:
    """Create a memory file and open it by path in a child process, as ranks do; return what failed."""
    if not hasattr(os, "memfd_create"):
        return "this system has none"
    try:
        fd = os.memfd_create("meshbook-doctor")
    except OSError as error:
        return f"none can be made: {error.strerror}"
    path = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        child = os.fork()
        if child == 0:
            try:
                os.close(os.open(path, os.O_RDONLY))
                os._exit(0)
            except BaseException:
                os._exit(1)
        return "" if os.waitpid(child, 0)[1] == 0 else "another process cannot open ours through /proc"
    finally:
        os.close(fd)


def _loopback() -> Iterator[CheckResult]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname(), timeout=2):
                yield CheckResult("ok", "loopback", "ranks can meet at 127.0.0.1")
    except OSError as error:
        yield CheckResult(
            "missing", "loopback", f"nothing can listen at 127.0.0.1: {error.strerror or error}", "ip link set lo up"
        )


def _limits() -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        yield CheckResult(
            "poor",
            "open files",
            f"at most {soft}; some hundred ranks need {_MIN_OPEN_FILES}",
            f"ulimit -n {min(65536, hard) if hard > 0 else 65536}, before Jupyter or the terminal starts a mesh",
        )
    else:
        yield CheckResult("ok", "open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}")


def _settings() -> Iterator[CheckResult]:
    try:
        defaults = read_defaults()
    except MeshbookError as error:
        yield CheckResult("missing", "settings", str(error), "mend it; every start of a mesh reads it")
    else:
        yield CheckResult("ok", "settings", f"a mesh has {defaults.num_ranks()} ranks here unless you say otherwise")


def _extras() -> Iterator[CheckResult]:
    for name, remedy in _EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield CheckResult("note", name, "not installed; you may not need it", remedy)
    if shutil.which("py-spy") is None and importlib.util.find_spec("py_spy") is None:
        yield CheckResult(
            "note",
            "py-spy",
            "not installed; it shows where a process hangs in C code",
            "pip install py-spy, then py-spy dump --native --pid PID (%mesh status has the pids)",
        )


def _meshes() -> Iterator[CheckResult]:
    try:
        folder = keys.runtime_folder()
    except MeshbookError:
        return  # already reported
    dead = keys.remove_stale_folders()
    living = keys.list_connections()
    if dead:
        yield CheckResult("note", "dead meshes", f"removed what {', '.join(dead)} had left in {folder}")
    if living:
        names = ", ".join(connection.name for connection in living)
        yield CheckResult("ok", "meshes", f"{len(living)} running: {names}")
    else:
        yield CheckResult("ok", "meshes", "none running, nothing left of others")


# In the order of the report. Memory files are checked before torch is imported: that check forks, and torch has
# threads.
CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
    _system,
    _python,
    _packages,
    _shared_memory,
    _torch,
    _kernel,
    _runtime_folder,
    _loopback,
    _limits,
    _settings,
    _extras,
    _meshes,
)


# ---------------------------------------------------------------------------------------------------------------------


def _requirements() -> dict[str, Requirement]:
    """Return what Meshbook depends on, by name: as a source tree's pyproject.toml says it, else the metadata."""
    try:
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"] if project["name"] == "meshbook" else ()
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        lines = ()
    wanted = [Requirement(line) for line in lines or importlib.metadata.requires("meshbook") or ()]
    return {one.name: one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}


def _package_problem(wanted: Requirement) -> str:
    """Return what is wrong with a package; empty if it is installed in a supported version."""
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return "" if _satisfies(version, wanted.specifier) else f"{version} is installed, {_constraint(wanted)} is wanted"


def _constraint(wanted: Requirement) -> str:
    """Return `>=2.11,<2.14`, the lower bound first."""
    return ",".join(sorted(map(str, wanted.specifier), reverse=True))


def _satisfies(version: str, specifier: SpecifierSet) -> bool:
    """Whether `2.13.0+cpu` is within `>=2.11,<2.14`. A pre-release counts as the release."""
    return specifier.contains(Version(version).base_version)
