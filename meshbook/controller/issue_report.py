"""A file for an issue: versions, machines, what the mesh does and said last, and nothing that is nobody else's."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from meshbook.controller.config import current_folder
from meshbook.controller.hosts import hosts_table
from meshbook.controller.logs import search
from meshbook.controller.mesh import Mesh
from meshbook.controller.redaction import redact
from meshbook.controller.tables import format_bytes, history_table, status_table
from meshbook.errors import MeshbookError, UsageError
from meshbook.host.facts import gather_facts
from meshbook.version import __version__
from meshbook.wire import codec, folders
from meshbook.wire.messages import HistoryEntry, HostInfo

_PACKAGES = (
    "torch", "numpy", "pyzmq", "msgspec", "cloudpickle", "psutil", "ipython", "ipykernel", "jupyter-client",
    "jupyterlab", "notebook", "ipywidgets", "anywidget", "marimo", "textual", "py-spy", "ray", "torchmonarch",
)  # fmt: skip
# The variables whose values are shown: what changes how Meshbook, torch or NCCL behave.
_VARIABLES = (
    "MESHBOOK_RANKS", "MESHBOOK_ENGINE", "MESHBOOK_END_ON_ERROR", "MESHBOOK_STALL_S", "MESHBOOK_LOG_MB",
    "MESHBOOK_BREAKPOINT", "MESHBOOK_RUNTIME_DIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_MAX_CELLS, _MAX_ERRORS, _MAX_ERROR_LINES = 20, 3, 40
_MAX_LOG_LINES, _MAX_SUPERVISOR_LOG_BYTES = 100, 8 << 10


@dataclass(frozen=True)
class IssueReport:
    """A report that was written.

    Attributes:
        path: of the file.
        sections: their titles.
        num_bytes: its size.
    """

    path: str
    sections: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path} ({format_bytes(self.num_bytes)}) has: {', '.join(self.sections)}.\n"
            "Left out: values, the code of cells but for lines in tracebacks, tokens and keys, and all but a few "
            "environment variables; ~ stands for the home folder. It has what ranks printed last: read it before you "
            "publish it."
        )

    __repr__ = __str__


def write_report(
    mesh: Mesh | None, doctor: Callable[[], str], *, folder: Path | None = None, problem: str = ""
) -> IssueReport:
    """Write a report about a mesh, or without one about this machine. Blocks for some seconds.

    Args:
        doctor: returns what `meshbook doctor` says.
        folder: where the file is created; None: the current folder.
        problem: why there is no mesh, if one was wanted.

    Raises:
        UsageError: the file cannot be written.
    """
    sections = [("Versions", _versions), ("Platform", _platform)]
    secrets: tuple[str, ...] = ()
    if mesh is not None:
        connection = mesh.session.connection.connection_info
        secrets = (connection.token, connection.server_key or "")
        sections += [
            ("Mesh", lambda: _mesh(mesh)),
            ("Findings", lambda: mesh.why().text),
            ("Cells", lambda: _cells(mesh.history())),
            ("Last errors", lambda: _last_errors(mesh)),
            ("What ranks printed last", lambda: search(mesh.session, limit=_MAX_LOG_LINES).as_text()),
            ("The supervisor's log", lambda: _supervisor_log(mesh.name)),
        ]
    elif problem:
        sections.append(("Mesh", lambda: problem))
    sections.append(("Doctor", doctor))
    parts = [f"# Meshbook report, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"]
    for title, text in sections:
        parts.append(f"## {title}\n\n```\n{_guarded(text).replace('```', '` ` `')}\n```")
    content = redact("\n\n".join(parts), home=str(Path.home()), environment=os.environ, secrets=secrets) + "\n"
    name = f"meshbook-report-{'' if mesh is None else mesh.name + '-'}{time.strftime('%Y%m%d-%H%M%S')}.md"
    path = (current_folder() if folder is None else folder) / name
    try:
        folders.write_atomically(path, content.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; change to a folder of yours") from None
    return IssueReport(str(path), tuple(title for title, _ in sections), len(content.encode()))


def _guarded(text: Callable[[], str]) -> str:
    """Return a section's text, or why there is none: the mesh may be what does not work."""
    try:
        return text().rstrip("\n")
    except MeshbookError as error:
        return f"({error})"
    except Exception as error:
        return f"(this could not be found out: {type(error).__name__}: {error})"


def _versions() -> str:
    lines = [f"meshbook {__version__} ({codec.PROTOCOL.decode()})", f"Python {sys.version}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    facts = gather_facts()
    lines += [f"libzmq {zmq.zmq_version()}", f"NCCL {facts.nccl or 'none'}", f"driver {facts.driver or 'none'}"]
    return "\n".join(lines)


def _platform() -> str:
    facts = gather_facts()
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_bytes)})" for gpu in facts.gpus)
    lines = [
        platform.platform(),
        f"{facts.num_cpus} cores, {format_bytes(facts.free_memory_bytes)} of memory free, GPUs: {gpus or 'none'}",
        *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
    ]
    return "\n".join(lines)


def _mesh(mesh: Mesh) -> str:
    info = mesh.status()
    lines = [str(status_table(info))]
    if info.spec is not None:
        shown = ("engine", "on", "num_hosts", "start_method", "device", "process_group", "torch", "end_on_error")
        lines.append(", ".join(f"{name}={getattr(info.spec, name)!r}" for name in shown))
        lines.append(f"variables set for ranks: {', '.join(sorted(info.spec.env)) or 'none'}")
        infos: Sequence[HostInfo] = mesh.hosts().infos
        lines.append(str(hosts_table(mesh.name, infos)))
    return "\n".join(lines)


def _cells(entries: Sequence[HistoryEntry]) -> str:
    """The last cells, without their source."""
    shown = [msgspec.structs.replace(entry, source="") for entry in entries[-_MAX_CELLS:]]
    return str(history_table(shown))


def _last_errors(mesh: Mesh) -> str:
    failed = [
        entry.number for entry in mesh.history() if entry.status in ("error", "lost") and entry.number is not None
    ]
    texts = []
    for number in list(dict.fromkeys(failed))[-_MAX_ERRORS:]:
        cell = mesh.history(number)
        texts.append("\n".join([cell.heading, *cell.text.splitlines()[-_MAX_ERROR_LINES:]]))
    return "\n\n".join(texts) or "(no cell has failed)"


def _supervisor_log(name: str) -> str:
    path = folders.runtime_folder() / name / "supervisor.log"
    return path.read_bytes()[-_MAX_SUPERVISOR_LOG_BYTES:].decode("utf-8", "replace") or "(empty)"
