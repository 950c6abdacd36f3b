"""Opens a debugpy port in the process of a rank, for VS Code and other clients of the Debug Adapter Protocol.

Meshbook's own threads go on when a client stops the rank. debugpy is imported with the first request, never before.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from types import FrameType
from typing import Any

from meshbook.diagnose.source_files import is_cell_file
from meshbook.errors import message_of
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.text import sanitize_text
from meshbook.wire.messages import DebugPort, OpenDebugPort

# Only this machine can connect. debugpy asks for no password.
_HOST = "127.0.0.1"


class DebugPortDoor:
    """The debugpy port of this rank."""

    def __init__(self, shell: RankShell) -> None:
        self._shell = shell
        self._opener: threading.Thread | None = None
        self._opened = DebugPort()
        self._written: set[str] = set()  # files of cells

    def open(self, command: OpenDebugPort) -> DebugPort:
        """Return where debugpy listens; without a port and a problem while it is being opened. Service thread."""
        if self._opener is None or (self._opened.problem and not self._opener.is_alive()):
            self._opened = DebugPort()
            self._opener = threading.Thread(
                target=self._open, args=(command.port,), name="meshbook-debugpy", daemon=True
            )
            _hide(self._opener)
            self._opener.start()
        return self._opened

    def _open(self, port: int) -> None:
        hook = sys.breakpointhook
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a harmless warning about frozen modules
        try:
            import debugpy

            debugpy.configure(subProcess=False)  # DataLoader workers are let alone
            _, port = debugpy.listen((_HOST, port))
        except ImportError:
            problem = f"debugpy is not installed there; {sys.executable} -m pip install debugpy"
            self._opened = DebugPort(problem=problem)
            return
        except Exception as error:
            self._opened = DebugPort(problem=sanitize_text(f"{type(error).__name__}: {message_of(error)}"))
            return
        finally:
            sys.breakpointhook = hook  # debugpy has put its own there
        for thread in threading.enumerate():
            if thread.name.startswith("meshbook-"):
                _hide(thread)
        self._shell.terminal.stop_elsewhere = _stop_in_client
        self._shell.events.register("pre_run_cell", self._write_cells)
        self._write_cells()
        self._opened = DebugPort(_HOST, port, os.uname().nodename, os.getcwd())

    def _write_cells(self, _info: Any = None) -> None:
        """Write the cells that have run to the files whose names they were compiled under: a client shows these."""
        for name in [name for name in list(linecache.cache) if is_cell_file(name) and os.path.isabs(name)]:
            if name not in self._written and not os.path.exists(name):
                with contextlib.suppress(OSError):
                    self._write(name, "".join(linecache.getlines(name)))
                    self._written.add(name)

    def _write(self, name: str, source: str) -> None:
        folder = os.path.dirname(name)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.stat(folder, follow_symlinks=False).st_uid == os.getuid():
            with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(source)

    def close(self) -> None:
        """Remove what was written, as the process ends."""
        for name in self._written:
            with contextlib.suppress(OSError):
                os.unlink(name)
        for folder in {os.path.dirname(name) for name in self._written}:
            with contextlib.suppress(OSError):  # others have files there
                os.rmdir(folder)


def _hide(thread: threading.Thread) -> None:
    """Have debugpy neither trace nor stop a thread."""
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def _stop_in_client(frame: FrameType) -> bool:
    """Stop at a breakpoint() in the client, if there is one."""
    debugpy: Any = sys.modules["debugpy"]
    if not debugpy.is_client_connected():
        return False
    pydevd: Any = sys.modules["pydevd"]
    pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
    return True
