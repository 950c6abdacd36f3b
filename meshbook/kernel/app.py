"""The Meshbook kernel: IPython's kernel, whose cells run on the ranks of a mesh.

It adds to `Notebook` what needs a kernel: Stop that reaches the ranks whatever this process does, replies beside a
running cell, and meshes that outlive a restart.
"""

# mypy: allow-untyped-calls
# (most of ipykernel's methods have no annotations)

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from IPython.utils.tokenutil import token_at_cursor

from meshbook.controller import script
from meshbook.kernel import completion, magics
from meshbook.kernel.notebook import Notebook
from meshbook.kernel.page_sessions import PageSessions, missed_output_note
from meshbook.kernel.subshell import SubshellRouter
from meshbook.rank.previews import import_completion
from meshbook.version import __version__

# ipykernel's own delay, for cells that ran in this process.
_REPLY_SLEEP_S = 0.0005


class MeshKernel(IPythonKernel):
    """The kernel of one notebook. A cell runs on the ranks unless `transform` keeps it in this process."""

    implementation = "meshbook"
    implementation_version = __version__

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        script.take_over()
        assert self.shell is not None
        self.notebook = Notebook.of(self.shell)
        self.notebook.auto = True
        import_completion.install(self.shell)
        magics.register(self.shell)
        self._pages = PageSessions()
        self._subshell_router = SubshellRouter(self, self._pages.saw)
        self._running_request: dict[str, Any] | None = None  # the request whose cell runs on the main thread
        self._is_handling_message = False  # the main thread handles a message
        self._defers_sigint = False  # the main thread is before or after a cell's code
        self._sigint_deferred = False  # a SIGINT arrived meanwhile

    @property
    def banner(self) -> str:  # type: ignore[override]  # as IPythonKernel's own is
        version = sys.version.split()[0]
        return (
            f"Meshbook {__version__}, Python {version}. Cells run on every rank of a mesh, %%controller cells "
            "here; `%mesh` says how it is, `%mesh help` what there is."
        )

    @property
    def kernel_info(self) -> dict[str, Any]:
        """What front ends may use. Not Jupyter's debugger: it would stop this process, and cells run on ranks."""
        info: dict[str, Any] = super().kernel_info
        return {**info, "supported_features": [one for one in info["supported_features"] if one != "debugger"]}

    def start(self) -> None:
        super().start()
        self.notebook.meshes.begin_warm_start(warm=True)

    # ---- cells

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            await super().execute_request(stream, ident, parent)
            return
        self._defers_sigint, self._sigint_deferred = True, False  # until `do_execute`, and from its end on
        await super().execute_request(stream, ident, parent)

    async def do_execute(self, code: str, silent: bool, store_history: bool = True, *args: Any, **kwargs: Any) -> Any:
        outermost = self._running_request is None and threading.current_thread() is threading.main_thread()
        broadcast = self.notebook.cells.num_broadcast
        page = self.get_parent("shell").get("header", {}).get("session", "")
        try:
            if outermost:
                self._defers_sigint = False
                if self._sigint_deferred:
                    raise KeyboardInterrupt
                # Reattached meshes are available to every cell, also to those that run in this process.
                self.notebook.meshes.reattach()
                self._running_request = self.get_parent("shell")
                if store_history and not silent:
                    if missed := self._pages.cell_began(page):
                        self.notebook.front_end.add_notice(missed_output_note(missed))
                    self.notebook.front_end.show_notices()
            return await super().do_execute(code, silent, store_history, *args, **kwargs)
        except KeyboardInterrupt:  # not from the cell's code, whose errors IPython shows: from before or after it
            self._defers_sigint = True
            return self._interrupted_reply()
        finally:
            # ipykernel sleeps before each reply, to flush its own streams; the ranks' output does not pass through
            # them.
            self._execute_sleep = 0.0 if self.notebook.cells.num_broadcast > broadcast else _REPLY_SLEEP_S
            if outermost:
                is_on_ranks = store_history and not silent and self.notebook.cells.num_broadcast > broadcast
                self._pages.cell_ended(page, self.notebook.cells.last_number if is_on_ranks else None)
                self._running_request = None
                self._defers_sigint = True
                # Before the reply: the next cell is not taken for one that inspects this one.
                self._request_done()

    def _interrupted_reply(self) -> dict[str, Any]:
        """Return the reply to a cell that Stop ended outside its code.

        ipykernel would send no reply, and the cell's client would wait forever.
        """
        assert self.shell is not None
        error = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}
        self.send_response(self.iopub_socket, "error", error)
        count = self.shell.execution_count - 1
        return {"status": "error", **error, "execution_count": count, "user_expressions": {}, "payload": []}

    # ---- Stop

    def pre_handler_hook(self) -> None:
        # ipykernel ends when a KeyboardInterrupt leaves one of these two hooks.
        self._defers_sigint = threading.current_thread() is threading.main_thread() or self._defers_sigint
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._on_sigint)  # raises on other threads
        self._is_handling_message = True
        self._defers_sigint = False

    def post_handler_hook(self) -> None:
        self._defers_sigint = threading.current_thread() is threading.main_thread() or self._defers_sigint
        super().post_handler_hook()
        self._is_handling_message = False

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._defers_sigint:
            self._sigint_deferred = True
        else:
            signal.default_int_handler(signum, frame)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Interrupt the ranks. Runs on the control channel's thread, so it works while the main thread is in C code."""
        handling = self._is_handling_message
        self.notebook.meshes.interrupt_foreground()
        if handling:
            await super().interrupt_request(stream, ident, parent)
        elif self.session:  # no signal: it would interrupt a cell that begins now
            self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    def do_shutdown(self, restart: bool) -> Any:
        self.notebook.meshes.close(restart=restart)
        return super().do_shutdown(restart)

    # ---- completion and inspection

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:
        cursor = len(code) if cursor_pos is None else cursor_pos
        line = completion.line_before(code, cursor)
        if line.startswith(("%mesh ", "%%mesh ")):
            return completion.plain_reply(magics.complete_line(self.notebook, line), line, cursor)
        with self.notebook.queries.hidden_handles():
            local = super().do_complete(code, cursor)
        return self.notebook.queries.complete(local, code, cursor)

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Inspect on the ranks first, because the code will run there; then names that only this process has."""
        if (line := completion.line_before(code, cursor_pos)).startswith(("%mesh", "%%mesh")):
            data = {"text/plain": magics.help_for(line)}
            return {"status": "ok", "found": True, "data": data, "metadata": {}}
        found = self.notebook.queries.inspect(code, cursor_pos, detail_level)
        if found is not None:
            return {"status": "ok", "found": True, "data": found, "metadata": {}}
        root = (token_at_cursor(code, cursor_pos) or "").partition(".")[0]
        if self.notebook.queries.is_handle(root) or self.notebook.queries.is_handle(
            completion.root_name(code, cursor_pos)
        ):
            return {"status": "ok", "found": False, "data": {}, "metadata": {}}
        return super().do_inspect(code, cursor_pos, detail_level, omit_sections)

    # ---- replies beside a running cell

    async def shell_channel_thread_main(self, msg: Any) -> None:
        if not self._subshell_router.route(msg):
            await super().shell_channel_thread_main(msg)

    def quick_subshell(self) -> str:
        """Return the subshell that replies beside cells, for widgets whose messages may be handled there.

        Their messages then do not make front ends show the kernel as idle. Runs on the shell channel's thread.
        """
        return self._subshell_router.get_subshell()

    def _request_done(self) -> None:
        self._subshell_router.request_done(self.get_parent("shell").get("header", {}).get("msg_id", ""))

    async def dispatch_shell(self, msg: Any, /, subshell_id: str | None = None, **kwargs: Any) -> None:
        await super().dispatch_shell(msg, subshell_id=subshell_id, **kwargs)
        if subshell_id is None:
            self._request_done()
            return
        running = self._running_request
        if subshell_id == self._subshell_router.subshell_id and running is not None:
            # The reply ended with status "idle", which front ends apply to the whole kernel.
            self._publish_status("busy", "shell", parent=running)
