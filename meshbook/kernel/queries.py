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
# ... and that `x?` does, which the user has run as a cell. Its rank's host gives up on a rank after a second.
_HELP_TIMEOUT_S = 5.0


class RankQueries:
    """Queries one rank's service thread, beside its cell, and merges the reply with this process's."""

    def __init__(self, shell: InteractiveShell, handles: HandleNamespace, meshes: NotebookMeshes) -> None:
        self._shell, self._handles, self._meshes = shell, handles, meshes

    def complete(self, local: dict[str, Any], code: str, cursor: int) -> dict[str, Any]:
        """Return a `complete_reply`'s content: this process's matches, and a rank's if it replies in time."""
        remote = self._query_rank(
            completion.root_name(code, cursor), lambda call, ranks: messages.Complete(call, ranks, code, cursor)
        )
        return completion.merge_completions(local, remote, code, remote_first=transform.is_for_ranks(code))

    def hidden_handles(self) -> contextlib.AbstractContextManager[None]:
        """Hide the handles from the shell's own completer during this block, so that it sends no queries to ranks."""
        return completion.completer_namespace(self._shell.Completer, self._handles.without_handles())

    def inspect(self, code: str, cursor: int, detail: int = 0) -> dict[str, Any] | None:
        """Return a rank's inspection of the name at the cursor, as a MIME bundle; None: not found or no reply."""
        reply = self._query_inspection(code, cursor, detail, QUERY_TIMEOUT_S)
        return reply["data"] if reply and reply["found"] else None

    def is_handle(self, name: str | None) -> bool:
        """Whether this name is a handle here, so that inspecting it would query the ranks."""
        return name is not None and self._handles.get_handle(name) is not None

    def show_help(self, name: str, detail: int = 0) -> None:
        """Show the help for `x?` and `x??`: a rank's reply, else this process's."""
        self._meshes.reattach()
        reply = self._query_inspection(name, len(name), detail, _HELP_TIMEOUT_S)
        found = reply["data"] if reply and reply["found"] else None
        if found is None and not self.is_handle(completion.root_name(name, len(name))):
            with contextlib.suppress(KeyError):
                found = self._shell.object_inspect_mime(name, detail_level=detail)  # type: ignore[no-untyped-call]
        if found is not None:
            page.page(found)
        elif reply is not None or not (asked := self._rank_to_ask(completion.root_name(name, len(name)))):
            print(f"Object `{name}` not found.")
        else:
            print(f"Rank {asked[0]}, which would know `{name}`, does not answer now; %mesh why may tell what it does.")

    def _query_inspection(self, code: str, cursor: int, detail: int, timeout_s: float) -> dict[str, Any] | None:
        root = completion.root_name(code, cursor)
        return self._query_rank(
            root, lambda call, ranks: messages.Inspect(call, ranks, code, cursor, detail), timeout_s=timeout_s
        )

    def _query_rank(
        self,
        name: str | None,
        make_command: Callable[[CallId, Ranks], Any],
        *,
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> dict[str, Any] | None:
        """Send a query to one rank and return the reply; None: it does not reply, or there is none to ask."""
        mesh, ranks = self._meshes.current, self._rank_to_ask(name)
        if mesh is None or not ranks:
            return None
        command = make_command(mesh.session.connection.next_call_id(), ranks)
        try:
            parts = mesh.session.query(command, timeout_s)
        except MeshbookError:
            return None
        return next((part.outcome.reply for part in parts if part.outcome.reply), None)

    def _rank_to_ask(self, name: str | None) -> Ranks:
        """Return one living rank, one that has the name if it is a handle; none if there is none."""
        mesh = self._meshes.current
        if mesh is None or mesh.session.ended is not None:
            return ()
        handle = self._handles.get_handle(name) if name is not None else None
        return mesh.session.living(handle._meshbook_ranks if handle is not None else mesh.ranks)[:1]
