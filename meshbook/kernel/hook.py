"""IPython's hook on every cell: whether the user ran it, and its rewriting.

Knows the shell and the current request; `transform` decides where a cell runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from meshbook.controller.futures import MeshFuture
from meshbook.kernel import transform

# The result of an earlier cell, optionally with one of a future's methods.
_FUTURE_EXPRESSION = re.compile(
    r"(?:(?P<name>_{1,3}|_\d+)|Out\[(?P<number>\d+)\])(?:\.(?:result|exception|done|interrupt)\([^()]*\))?;?\Z"
)


class CellHook:
    """IPython's hook on every cell: rewrites the cells that run on the ranks.

    Only cells that the user runs: not those that a front end runs silently or outside of history (VS Code, debuggers,
    variable viewers), and not code that a running cell passes to the shell.
    """

    # IPython's check for completeness then skips this hook, and checks the user's own code.
    has_side_effects = True

    def __init__(self, shell: InteractiveShell, is_auto: Callable[[], bool]) -> None:
        """Create the hook, not installed yet.

        Args:
            is_auto: whether plain cells run on the ranks.
        """
        self._shell, self._is_auto = shell, is_auto
        self._nesting_depth = 0  # depth of nested cells
        self._request_id: Any = None  # the request that the depth belongs to
        self._is_rerun = False  # the cell runs earlier cells again
        self.last_rewritten = ""  # the user's last cell after rewriting; still contains magics

    def install(self) -> None:
        """Install the hook in the shell."""
        self._shell.input_transformers_cleanup.append(self)
        self._shell.events.register("pre_execute", self._cell_begins)
        self._shell.events.register("post_execute", self._cell_ends)

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines)
        self.last_rewritten = ""
        if not self._is_user_cell():
            return lines
        self._is_rerun = source.lstrip().startswith("%rerun")
        if self._is_future_expression(source):
            return lines
        self.last_rewritten = transform.rewrite(source, auto=self._is_auto())
        return self.last_rewritten.splitlines(keepends=True)

    def _is_user_cell(self) -> bool:
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            parent = kernel.get_parent("shell")
            content = parent.get("content", {})
            if content.get("silent", False) or not content.get("store_history", True):
                return False
            request_id = parent.get("header", {}).get("msg_id")
            if request_id != self._request_id:
                self._request_id, self._nesting_depth, self._is_rerun = request_id, 0, False
        return self._nesting_depth == 0 or self._is_rerun

    def _is_future_expression(self, source: str) -> bool:
        """Whether the cell is `_`, `Out[7].result()` or similar, of a background cell: ranks have no such future."""
        found = _FUTURE_EXPRESSION.match(source.strip())
        if found is None:
            return False
        names = self._shell.user_ns
        value = names.get("Out", {}).get(int(found["number"])) if found["number"] else names.get(found["name"])
        return isinstance(value, MeshFuture)

    def _cell_begins(self) -> None:
        self._nesting_depth += 1

    def _cell_ends(self) -> None:
        self._nesting_depth = max(0, self._nesting_depth - 1)
