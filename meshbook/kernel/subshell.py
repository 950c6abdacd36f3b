"""Replies while a cell runs: routes requests that need not wait to a thread of the kernel.

ipykernel handles requests sequentially, so completion, hover and history wait for the running cell, unless the front
end addresses a subshell, and none does for these. The kernel supports subshells, though, and this module routes such
requests to one of its own. It also routes a cell that inspects the running one. All of it uses private ipykernel 7
attributes, which are checked before use; if anything differs, requests wait, as they do in any other kernel.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger("meshbook.kernel")

# Requests that can be handled beside a running cell. Not execute_request, whose order matters (but see
# `_INSPECTION_MAGIC`), and not comms, which belong to widgets that may not be thread-safe. One comm is an exception:
# through it a newly opened page requests the existing widgets; without a reply it shows none, including the dashboard,
# until the cell has ended.
ROUTED_REQUESTS = frozenset(
    {
        "complete_request",
        "inspect_request",
        "is_complete_request",
        "history_request",
        "comm_info_request",
        "kernel_info_request",
    }
)
# A cell with only this line inspects the current mesh, for example why the running cell hangs.
_INSPECTION_MAGIC = re.compile(
    r"\s*%mesh\s+(why|stacks|health|memory|status|logs|history|actors|debug|interrupt|kill|dashboard|report)\b"
    r"[^\n]*\s*\Z"
)
# Minimum age in seconds of the running cell, which must be the only open one. The cells of Run All arrive together and
# must run in order.
_MIN_CELL_AGE_S = 2.0
_WIDGET_CONTROL = "jupyter.widget.control"


class SubshellRouter:
    """Routes requests of one kernel.

    Attributes:
        subshell_id: the subshell that replies; None before its first use.
        is_supported: False once anything differed from ipykernel 7.4.
    """

    def __init__(self, kernel: Any, on_session: Callable[[str], object]) -> None:
        """Route requests of one kernel.

        Args:
            on_session: called with the session of each request that arrives.
        """
        self._kernel, self._on_session = kernel, on_session
        self._open_cells: dict[str, float] = {}  # open execute requests -> arrival time
        self._widget_control_comms: set[str] = set()  # comms of pages that request widgets, opened beside a cell
        self.subshell_id: str | None = None
        self.is_supported = all(
            hasattr(owner, name)
            for owner, names in (
                (kernel, ("shell_channel_thread", "shell_channel_thread_main", "dispatch_shell")),
                (kernel.session, ("feed_identities", "deserialize", "serialize", "unpack")),
            )
            for name in names
        )

    def route(self, message: Sequence[Any]) -> bool:
        """Forward a request to the subshell if it would otherwise wait for a cell. Runs on the shell channel's thread.

        Args:
            message: zmq frames, as received.

        Returns:
            Whether it was forwarded; otherwise ipykernel handles the message as usual.
        """
        if not self.is_supported:
            return False
        try:
            return self._route(message)
        except Exception:
            log.warning("completion will wait for running cells: ipykernel is not as expected", exc_info=True)
            self.is_supported = False
            return False

    def get_subshell(self) -> str:
        """Return the subshell that replies, creating it on first use. Runs on the shell channel's thread."""
        if self.subshell_id is None:
            self.subshell_id = self._kernel.shell_channel_thread.manager._create_subshell()
        return self.subshell_id

    def request_done(self, request: str) -> None:
        """Record that the main shell has finished the request with this id."""
        self._open_cells.pop(request, None)

    def _route(self, message: Sequence[Any]) -> bool:
        session = self._kernel.session
        identities, frames = session.feed_identities(list(message), copy=False)
        header = session.unpack(frames[1].bytes)
        self._on_session(header.get("session", ""))
        if header.get("subshell_id"):
            return False
        is_cell = header["msg_type"] == "execute_request"
        if is_cell and not self._is_inspection_cell(frames):
            # Counts from arrival: a cell that waits for the main thread blocks requests as a running one does.
            self._open_cells[header["msg_id"]] = time.monotonic()
            return False
        if not is_cell and not self._is_routable(header["msg_type"], frames):
            return False
        request = session.deserialize(frames, content=True, copy=False)
        if is_cell:
            request["content"]["store_history"] = False  # must not use up an execution count
        manager = self._kernel.shell_channel_thread.manager
        subshell = self.get_subshell()
        # A subshell accepts only messages addressed to it, and the signature covers the address.
        request["header"]["subshell_id"] = subshell
        parts = {part: request[part] for part in ("header", "parent_header", "metadata", "content")}
        signed = session.serialize(parts, ident=[getattr(identity, "bytes", identity) for identity in identities])
        manager.get_shell_channel_to_subshell_socket(subshell).send_multipart(signed)
        return True

    def _is_inspection_cell(self, frames: Sequence[Any]) -> bool:
        if len(self._open_cells) != 1 or time.monotonic() - next(iter(self._open_cells.values())) < _MIN_CELL_AGE_S:
            return False
        return _INSPECTION_MAGIC.match(self._kernel.session.unpack(frames[4].bytes).get("code", "")) is not None

    def _is_routable(self, kind: str, frames: Sequence[Any]) -> bool:
        if kind in ROUTED_REQUESTS:
            return bool(self._open_cells)
        if kind not in ("comm_open", "comm_msg", "comm_close"):
            return False
        content = self._kernel.session.unpack(frames[4].bytes)
        comm = content.get("comm_id")
        if kind == "comm_open" and content.get("target_name") == _WIDGET_CONTROL and self._open_cells:
            self._widget_control_comms.add(comm)
        # Later messages of the same comm follow, to preserve their order.
        return comm in self._widget_control_comms
