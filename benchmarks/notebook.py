"""A notebook's front end, as far as a benchmark needs one: starts a kernel, runs cells, times what comes back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

_START_TIMEOUT_S = 60.0
_CELL_TIMEOUT_S = 60.0

Message = dict[str, Any]


class Notebook:
    """An open notebook on a kernel of its own; see `opened`."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    @property
    def pid(self) -> int:
        """The kernel's process."""
        found: int = self.manager.provisioner.pid  # type: ignore[union-attr]
        return found

    def run(self, source: str) -> float:
        """Run a cell to its end; seconds from the request until both its reply and the kernel's `idle` are here.

        Raises:
            RuntimeError: the cell failed, with its traceback.
            TimeoutError: no end within a minute.
        """
        started = time.perf_counter()
        request = self.send(source)
        self.listen(request, lambda message: None)
        reply = self.reply_to(request)
        seconds = time.perf_counter() - started
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"].get("traceback", [reply["content"]["status"]])))
        return seconds

    def send(self, source: str) -> str:
        """Ask for a cell to be run; the request's id. Does not wait."""
        request: str = self.client.execute(source, allow_stdin=False)
        return request

    def listen(self, request: str, heard: Callable[[Message], None]) -> None:
        """Pass every message that the request brings about to `heard`, until the kernel is idle again."""
        deadline = time.monotonic() + _CELL_TIMEOUT_S
        while True:
            message = self.next_message(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise TimeoutError(f"the cell did not end within {_CELL_TIMEOUT_S:.0f} s")
            if message["parent_header"].get("msg_id") != request:
                continue
            heard(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return

    def next_message(self, timeout_s: float) -> Message | None:
        """What the kernel tells all its front ends next; None: nothing within the time."""
        if not self.client.iopub_channel.socket.poll(int(timeout_s * 1000)):
            return None
        message: Message = self.client.iopub_channel.get_msg(timeout=0)
        return message

    def reply_to(self, request: str) -> Message:
        while True:
            reply: Message = self.client.get_shell_msg(timeout=_CELL_TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == request:
                return reply

    def ask_control(self) -> float:
        """Seconds until the kernel answers on its control channel, which is open also while a cell runs."""
        started = time.perf_counter()
        request = self.client.session.msg("kernel_info_request", {})
        self.client.control_channel.send(request)
        self._control_reply(request)
        return time.perf_counter() - started

    def _control_reply(self, request: Message) -> None:
        while True:
            reply = self.client.get_control_msg(timeout=_CELL_TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                return


@contextlib.contextmanager
def opened(kernel: str, folder: Path, *, env: dict[str, str] | None = None) -> Iterator[Notebook]:
    """A notebook on a new kernel of this name, which is shut down at the end as a front end would.

    Args:
        folder: the notebook's; the kernel starts there.
        env: for the kernel, on top of our own environment.
    """
    manager = KernelManager(kernel_name=kernel)
    # Above the level at which every kernel on TCP says that TCP is not encrypted.
    manager.start_kernel(cwd=str(folder), env={**os.environ, **(env or {})}, extra_arguments=["--log-level=40"])
    try:
        client: BlockingKernelClient = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=_START_TIMEOUT_S)
            yield Notebook(manager, client)
        finally:
            client.stop_channels()
    finally:
        manager.shutdown_kernel()
