"""A front end for tests: a real kernel in a process of its own, and what a notebook would show of each cell.

Nothing in it sleeps: it waits for messages, with a deadline. What a cell shows can be read as text, as somebody at a
notebook would read it.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.budget import WAIT_S, when

TIMEOUT_S = WAIT_S
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def strip_ansi(text: str) -> str:
    """Without colours."""
    return _COLOUR.sub("", text)


@dataclass
class Cell:
    """What came back of one cell.

    Attributes:
        reply: content of the execute_reply.
        outputs: as a notebook file would keep them, but for merging: updated in place, cleared when asked to.
        seconds: from sending to the reply.
    """

    request: str
    reply: dict[str, Any] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    num_messages: int = 0
    seconds: float = 0.0
    idle: bool = False  # its last output has come
    _clear: bool = False

    @property
    def status(self) -> str:
        return str(self.reply.get("status"))

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def result(self) -> str | None:
        """text/plain of `Out[n]`; None when there is none."""
        found = [output for output in self.outputs if output["type"] == "execute_result"]
        return strip_ansi(found[0]["data"]["text/plain"]) if found else None

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [output["data"] for output in self.outputs if output["type"] == "display_data"]

    @property
    def notes(self) -> str:
        """What Meshbook itself said, quietly."""
        return "\n".join(data["text/plain"] for data in self.displays if "meshbook-note" in data.get("text/html", ""))

    @property
    def traceback(self) -> str:
        return strip_ansi("\n".join(self.reply.get("traceback", [])))

    @property
    def text(self) -> str:
        """All of it, as it would be read."""
        pages = [page["data"]["text/plain"] for page in self.reply.get("payload", ()) if "data" in page]
        return "".join([*map(_as_text, self.outputs), *(f"{strip_ansi(page)}\n" for page in pages)])

    def handle_message(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind in ("status", "execute_input"):
            return
        self.num_messages += 1
        if kind == "clear_output":
            self._clear = True
            if not content["wait"]:
                self.outputs.clear()
                self._clear = False
            return
        if kind == "update_display_data":
            for output in self.outputs:
                if output.get("id") == content["transient"]["display_id"]:
                    output["data"] = content["data"]
            return
        if self._clear:
            self.outputs.clear()
            self._clear = False
        if kind == "stream":
            self.outputs.append({"type": "stream", "name": content["name"], "text": content["text"]})
        elif kind in ("display_data", "execute_result"):
            shown = (content.get("transient") or {}).get("display_id")
            self.outputs.append({"type": kind, "data": content["data"], "id": shown})
        elif kind == "error":
            self.outputs.append({"type": "error", **content})

    def _stream(self, name: str) -> str:
        return strip_ansi("".join(output["text"] for output in self.outputs if output.get("name") == name))


def _as_text(output: dict[str, Any]) -> str:
    match output["type"]:
        case "stream":
            return strip_ansi(output["text"])
        case "error":
            return strip_ansi("\n".join(output["traceback"])) + "\n"
    others = [mime for mime in output["data"] if mime != "text/plain"]
    return strip_ansi(output["data"].get("text/plain", "")) + (f"  <{', '.join(others)}>" if others else "") + "\n"


class FrontEnd:
    """A client of one kernel."""

    def __init__(self, manager: KernelManager, *, own_session: bool = False) -> None:
        """Connect to a kernel; `own_session`: as another page does, with a session that the kernel does not know."""
        self.manager = manager
        self.client: BlockingKernelClient = manager.client()
        if own_session:
            self.client = BlockingKernelClient()
            self.client.load_connection_info(manager.get_connection_info(session=False))
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=TIMEOUT_S)
        except BaseException:
            self.client.stop_channels()
            raise
        self.cells: dict[str, Cell] = {}
        self.input_replies: list[str] = []
        self.input_requests: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def send(self, code: str, **options: Any) -> Cell:
        """Start a cell, without waiting for it."""
        cell = Cell(self.client.execute(code, **{"allow_stdin": True, **options}))
        self.cells[cell.request] = cell
        return cell

    def run(self, code: str, *, timeout_s: float = TIMEOUT_S, **options: Any) -> Cell:
        """Run a cell to its end."""
        return self.wait(self.send(code, **options), timeout_s=timeout_s)

    def run_until(self, code: str, seen: Callable[[Cell], bool], *, timeout_s: float = TIMEOUT_S) -> Cell:
        """Run a cell again and again, until it shows what depends on how far the ranks are apart.

        Equal lines of ranks are one where they come within a tenth of a second, which no single run on a loaded machine
        can promise.
        """
        deadline = time.monotonic() + timeout_s
        while not seen(cell := self.run(code)):
            assert time.monotonic() < deadline, f"not seen within {timeout_s} s; last:\n{cell.text}"
        return cell

    def wait(self, cell: Cell, *, timeout_s: float = TIMEOUT_S) -> Cell:
        """Take messages until this cell's reply and its last output have come."""
        started = time.monotonic()
        deadline = started + timeout_s
        while not (cell.idle and cell.reply):
            left = deadline - time.monotonic()
            assert left > 0, f"no end after {timeout_s} s; so far:\n{cell.text}"
            if self.client.stdin_channel.msg_ready():
                self._reply_to_input()
            if self.client.shell_channel.msg_ready():
                message = self.client.get_shell_msg()
                self._cell_of(message).reply = message["content"]
                cell.seconds = cell.seconds or time.monotonic() - started
            self._iopub(min(left, 0.02))
        return cell

    def wait_until_shown(self, cell: Cell, seen: Callable[[Cell], bool], *, timeout_s: float = TIMEOUT_S) -> Cell:
        """Take messages until a cell shows something."""
        deadline = time.monotonic() + timeout_s
        while not seen(cell):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen within {timeout_s} s; so far:\n{cell.text}"
            self._iopub(min(left, 0.2))
        return cell

    def request(self, kind: str, content: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Send a request on the shell channel and wait for its reply, while a cell may run."""
        message = self.client.session.msg(kind, content)
        self.client.shell_channel.send(message)
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.01, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                found: dict[str, Any] = reply["content"]
                return found
            self._cell_of(reply).reply = reply["content"]

    def complete(self, code: str, cursor: int | None = None, **options: Any) -> dict[str, Any]:
        cursor = len(code) if cursor is None else cursor
        return self.request("complete_request", {"code": code, "cursor_pos": cursor}, **options)

    def inspect(self, code: str, cursor: int | None = None, detail: int = 0, **options: Any) -> dict[str, Any]:
        cursor = len(code) if cursor is None else cursor
        return self.request("inspect_request", {"code": code, "cursor_pos": cursor, "detail_level": detail}, **options)

    def interrupt(self) -> None:
        """What the Stop button does. Returns once the kernel has taken it: the cell after this one is not struck."""
        if self.manager.kernel_spec.interrupt_mode != "message":
            self.manager.interrupt_kernel()
            return
        request = self.client.session.msg("interrupt_request", {})
        self.client.control_channel.send(request)
        while self.client.get_control_msg(timeout=TIMEOUT_S)["parent_header"].get("msg_id") != request["msg_id"]:
            pass

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel's own process, as its repr is read back by Python."""
        reply = self.run("", user_expressions={"found": expression}, silent=True).reply["user_expressions"]["found"]
        assert reply["status"] == "ok", reply
        return eval(reply["data"]["text/plain"])  # numbers, strings and containers that the test itself asked for

    def pids(self) -> dict[str, int]:
        """The processes of the current mesh: `supervisor`, `rank 0`, ... Waits for the first beat of its host."""
        found: dict[str, int] = {}

        def known() -> bool:
            found.update(
                self.value(
                    "(lambda info: [('supervisor', info.supervisor_pid)]"
                    " + [(f'rank {rank.rank}', rank.pid) for rank in info.ranks])(get_ipython().meshbook.mesh.status())"
                )
            )
            return None not in found.values()

        when(known, "the first beat")
        return found

    def close(self) -> None:
        self.client.stop_channels()

    def _iopub(self, timeout_s: float) -> dict[str, Any] | None:
        if not self.client.iopub_channel.socket.poll(int(timeout_s * 1000)):  # type: ignore[union-attr]
            return None
        message = self.client.get_iopub_msg(timeout=1)
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.handle_message(message)
            # Noted for whichever cell it is: that of a cell which waits its turn may come while another is waited for.
            cell.idle = cell.idle or message["content"].get("execution_state") == "idle"
        return message

    def _reply_to_input(self) -> None:
        question = self.client.get_stdin_msg(timeout=1)["content"]
        self.input_requests.append(question)
        if self.input_replies:
            self.client.input(self.input_replies.pop(0))

    def _cell_of(self, message: dict[str, Any]) -> Cell:
        return self.cells.get(message["parent_header"].get("msg_id", ""), Cell(""))


@contextmanager
def kernel(
    *, ranks: int = 2, env: dict[str, str] | None = None, name: str = "meshbook", cwd: Path | None = None
) -> Iterator[FrontEnd]:
    """A kernel that ends when the block does, if it has not before."""
    # Not over TCP, whose ports are chosen long before the kernel listens: others may have taken them by then.
    with tempfile.TemporaryDirectory(prefix="mbk", dir="/tmp") as sockets:
        manager = KernelManager(kernel_name=name, transport="ipc", ip=f"{sockets}/k")
        manager.shutdown_wait_time = 2 * TIMEOUT_S  # a kernel ends its mesh first, and is killed after half of that
        manager.start_kernel(
            env={**os.environ, "MESHBOOK_RANKS": str(ranks), **(env or {})}, **({"cwd": str(cwd)} if cwd else {})
        )
        front = None
        try:
            front = FrontEnd(manager)
            yield front
        finally:
            if front is not None:
                front.close()
            if manager.has_kernel:
                manager.shutdown_kernel()
            manager.cleanup_resources()


def shows(text: str, folded: str, *by_rank: str) -> bool:
    """Whether a text has the line that ranks have printed: folded, or that of each, for they were some time apart."""
    return folded in text or all(line in text for line in by_rank)


def printed_by_both(cell: Cell, line: str) -> bool:
    """Whether ranks 0 and 1 have printed this line, together or one after the other."""
    lines = cell.stdout.splitlines()
    return line in lines or {f"[0] {line}", f"[1] {line}"} <= set(lines)


def has_exited(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
