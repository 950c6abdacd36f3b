"""`meshbook repl` and `meshbook attach`: jupyter-console on the Meshbook kernel.

The console is Jupyter's own. This module adds the kernel, the first line from the command line, and an exit that waits
until the kernel, and with it the mesh, has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from typing import Any, NoReturn

from jupyter_client.consoleapp import JupyterConsoleApp
from jupyter_client.manager import KernelManager
from jupyter_console.app import ZMQTerminalIPythonApp
from jupyter_console.ptshell import ZMQTerminalInteractiveShell
from traitlets import Unicode
from traitlets.config import Config

from meshbook.cli import kernels
from meshbook.cli.output import CellOutputWriter

# Seconds that the kernel may take to stop its mesh and exit: a supervisor gives its ranks 1 s, a loaded machine needs
# more.
_SHUTDOWN_TIMEOUT_S = 60.0


class _MeshbookKernelManager(KernelManager):
    """Starts the Meshbook kernel, installed or not, with sockets that only this user can open."""

    def __init__(self, *, connection_file: str, **options: Any) -> None:
        private = kernels.ipc_connection_options(os.path.dirname(connection_file), "repl")
        kernel_options = {
            "kernel_name": kernels.KERNEL_NAME,
            "kernel_spec_manager": kernels.MeshbookKernelSpecManager(),
            **private,
        }
        super().__init__(**{**options, **kernel_options})

    def interrupt_kernel(self) -> None:
        """Send the kernel an interrupt. Without an event loop: a signal's handler calls it, in whatever one does."""
        if self.has_kernel:
            self._connect_control_socket()
            self.session.send(self._control_socket, self.session.msg("interrupt_request", content={}))


class _ConsoleShell(ZMQTerminalInteractiveShell):  # type: ignore[misc]  # jupyter_console ships no types
    """The console's shell, with support for displays that are updated: progress bars."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._output = CellOutputWriter(sys.stdout)

    def init_kernel_info(self) -> None:
        """Wait for the kernel and its iopub channel: a cell whose idle status is missed would never end."""
        self.client.wait_for_ready(self.kernel_timeout)
        super().init_kernel_info()

    def include_output(self, msg: dict[str, Any]) -> bool:
        """Return whether the console shows this message; messages printed here are not shown again."""
        kind, content = msg["msg_type"], msg["content"]
        if not super().include_output(msg):
            return False
        if kind in ("display_data", "update_display_data") and (content.get("transient") or {}).get("display_id"):
            return not self._output.show_message(kind, content)
        if kind in ("stream", "display_data", "execute_result", "error") or (
            kind == "status" and content["execution_state"] == "idle"
        ):
            self._output.end_line()
        return True


class _ConsoleApp(ZMQTerminalIPythonApp):  # type: ignore[misc]  # jupyter_console ships no types
    """The console, with a line to run before its first prompt."""

    kernel_manager_class = _MeshbookKernelManager
    first_line = Unicode("", help="run before the first prompt")

    def init_shell(self) -> None:
        # As the base class does, except for the shell's class.
        JupyterConsoleApp.initialize(self)
        signal.signal(signal.SIGINT, self.handle_sigint)
        self.shell = _ConsoleShell.instance(
            parent=self, manager=self.kernel_manager, client=self.kernel_client, confirm_exit=self.confirm_exit
        )
        self.shell.own_kernel = True

    def start(self) -> None:
        if self.first_line:
            self.shell.run_cell(self.first_line, store_history=False)
        super().start()


def run(first_line: str = "", *, simple: bool = False) -> int:
    """Run the console on a mesh until the user exits. Blocks.

    Args:
        first_line: code to run before the first prompt.
        simple: plain prompts, without colours and completion, for pipes and dumb terminals.

    Returns:
        The exit status.
    """
    os.environ.pop("JPY_SESSION_NAME", None)  # may be set if the terminal belongs to a notebook server
    private = tempfile.mkdtemp(prefix="meshbook-")
    console = _ConsoleApp.instance(first_line=first_line, connection_file=os.path.join(private, "repl.json"))
    shell: dict[str, Any] = {"banner": "{kernel_banner}\n", "simple_prompt": simple}
    shell["image_handler"] = None  # no image viewer: a figure is named by its text
    console.update_config(Config({"ZMQTerminalInteractiveShell": shell}))

    def end() -> None:
        """Shut down the kernel, and its mesh with it, and wait until it has exited."""
        manager = getattr(console, "kernel_manager", None)
        if manager is not None and manager.has_kernel:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with contextlib.suppress(Exception):  # it may have exited already
                console.kernel_client.shutdown()
            manager.finish_shutdown(waittime=_SHUTDOWN_TIMEOUT_S)
            console.kernel_client.stop_channels()
            manager.cleanup_resources()
        shutil.rmtree(private, ignore_errors=True)

    def leave(number: int, frame: object) -> NoReturn:
        # Not by an exception: a thread that reads the terminal cannot be stopped, and the exit would wait for it.
        end()
        os._exit(128 + number)

    # A closed terminal must not leave a kernel running; by default both signals end this process immediately.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, leave)
    try:
        console.initialize([])
        console.start()
    finally:
        end()
    return 0
