"""Completion and help from a rank: the same name may mean something else there, or exist there only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from IPython.core import page
from IPython.core.interactiveshell import InteractiveShell

from meshbook.errors import MeshbookError
from meshbook.ids import CallId, Ranks
from meshbook.kernel import completion, transform
from meshbook.kernel.handles import HandleNamespace
from meshbook.kernel.meshes import NotebookMeshes
from meshbook.wire import messages

# Seconds that completion and inspection wait for a rank. A longer delay looks like a hang to the user, and a rank that
# holds the GIL may not reply for minutes.
QUERY_TIMEOUT_S = 0.3


class RankQueries:
    """Queries one rank's service thread, beside its cell, and merges the reply with this process's."""

    def __init__(self, shell: InteractiveShell, handles: HandleNamespace, meshes: NotebookMeshes) -> None:
        self._shell, self._handles, self._meshes = shell, handles, meshes

    def complete(self, local: dict[str, Any], code: str, cursor: int) -> dict[str, Any]:
        """Return a `complete_reply`'s content: this process's matches, and a rank's if it replies in time."""
        if code.lstrip().startswith(("%mesh", "%%mesh")) and "\n" not in code[:cursor]:
            return local
        remote = self._query_rank(
            completion.root_name(code, cursor), lambda call, ranks: messages.Complete(call, ranks, code, cursor)
        )
        return completion.merge_completions(local, remote, code, remote_first=transform.is_for_ranks(code))

    def hidden_handles(self) -> contextlib.AbstractContextManager[None]:
        """Hide the handles from the shell's own completer during this block, so that it sends no queries to ranks."""
        return completion.completer_namespace(self._shell.Completer, self._handles.without_handles())

    def inspect(self, code: str, cursor: int, detail: int = 0) -> dict[str, Any] | None:
        """Return a rank's inspection of the name at the cursor, as a MIME bundle; None: not found or no reply."""
        root = completion.root_name(code, cursor)
        reply = self._query_rank(root, lambda call, ranks: messages.Inspect(call, ranks, code, cursor, detail))
        if not reply or not reply["found"]:
            return None
        data: dict[str, Any] = reply["data"]
        return data

    def is_handle(self, name: str | None) -> bool:
        """Whether this name is a handle here, so that inspecting it would query the ranks."""
        return name is not None and self._handles.get_handle(name) is not None

    def show_help(self, name: str, detail: int = 0) -> None:
        """Show the help for `x?` and `x??`: a rank's reply, else this process's."""
        self._meshes.reattach()
        found = self.inspect(name, len(name), detail)
        if found is None and not self.is_handle(completion.root_name(name, len(name))):
            with contextlib.suppress(KeyError):
                found = self._shell.object_inspect_mime(name, detail_level=detail)  # type: ignore[no-untyped-call]
        if found is None:
            print(f"Object `{name}` not found.")
        else:
            page.page(found)

    def _query_rank(self, name: str | None, make_command: Callable[[CallId, Ranks], Any]) -> dict[str, Any] | None:
        """Send a query to one rank, one that has the name if it is a handle, and return the reply."""
        mesh = self._meshes.current
        if mesh is None or mesh.session.ended is not None:
            return None
        handle = self._handles.get_handle(name) if name is not None else None
        living = mesh.session.living(handle._meshbook_ranks if handle is not None else mesh.ranks)
        if not living:
            return None
        command = make_command(mesh.session.connection.next_call_id(), living[:1])
        try:
            parts = mesh.session.query(command, QUERY_TIMEOUT_S)
        except MeshbookError:
            return None
        return next((part.outcome.reply for part in parts if part.outcome.reply), None)
