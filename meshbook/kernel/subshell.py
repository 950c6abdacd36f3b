"""Answers while a cell runs: requests that need not wait go to a thread of the kernel's own.

ipykernel takes requests one after the other, so completion, hover and history wait for the running cell, unless the
front end asks on a subshell, and none does for these. The kernel has subshells, though, and this routes such requests
to one that it keeps for itself. So it does with a cell that asks what is wrong with the one that runs. All of it is
private to ipykernel 7 and tried before it is used; where anything is different, requests wait, as they do in any other
kernel.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("meshbook.kernel")

# What can be answered beside a running cell. Not execute_request, whose order counts (but see `_INSPECTION_MAGIC`), and
# not comms, which belong to widgets that may not be thread-safe. But for one comm: through it a page that is opened
# asks for the widgets there are, and without an answer it shows none, the dashboard neither, until the cell has ended.
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
# A cell that is one such line and nothing else asks about the mesh as it is now: why the running cell hangs, say.
_INSPECTION_MAGIC = re.compile(
    r"\s*%mesh\s+(why|stacks|health|memory|status|logs|actors|interrupt|kill|dashboard)\b[^\n]*\s*\Z"
)
# Seconds that the running cell, and no other before this one, must have been there. The cells of Run All come at once,
# and are meant to be run one after the other.
_MIN_CELL_AGE_S = 2.0
_WIDGET_CONTROL = "jupyter.widget.control"


class SubshellRouter:
    """Routes requests of one kernel.

    Attributes:
        subshell_id: the subshell that answers; None before it was first needed.
        works: False once anything went otherwise than ipykernel 7.4 has it.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._open_cells: dict[str, float] = {}  # execute requests that have come and are not done, and when they came
        self._widget_control_comms: set[str] = set()  # comms of pages that ask for widgets, opened beside a cell
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
        """Send a request on to the subshell, if it need not wait and would. Runs in the shell channel's thread.

        Args:
            message: zmq frames, as they came.

        Returns:
            Whether that was done; otherwise the message goes its usual way.
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
        """The subshell that answers, made now if there is none. Runs in the shell channel's thread."""
        if self.subshell_id is None:
            self.subshell_id = self._kernel.shell_channel_thread.manager._create_subshell()
        return self.subshell_id

    def request_done(self, request: str) -> None:
        """The main shell is done with the request of this id."""
        self._open_cells.pop(request, None)

    def _route(self, message: Sequence[Any]) -> bool:
        session = self._kernel.session
        identities, frames = session.feed_identities(list(message), copy=False)
        header = session.unpack(frames[1].bytes)
        if header.get("subshell_id"):
            return False
        is_cell = header["msg_type"] == "execute_request"
        if is_cell and not self._is_inspection_cell(frames):
            # From here on: a cell that waits for the main thread is as much in the way as one that runs.
            self._open_cells[header["msg_id"]] = time.monotonic()
            return False
        if not is_cell and not self._is_routable(header["msg_type"], frames):
            return False
        request = session.deserialize(frames, content=True, copy=False)
        if is_cell:
            request["content"]["store_history"] = False  # the number that is next belongs to the cell that is next
        manager = self._kernel.shell_channel_thread.manager
        subshell = self.get_subshell()
        # A subshell takes only what is addressed to it, and the address is part of what is signed.
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
        # Once there, always there: its messages keep their order.
        return comm in self._widget_control_comms
