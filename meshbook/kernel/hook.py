"""IPython's hook on every cell: whether the user ran it, and what becomes of it then.

Knows the shell and the request that it works on; where a cell's text belongs is `transform`'s to decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from meshbook.controller.futures import MeshFuture
from meshbook.kernel import transform

# The result of an earlier cell, and what a future can be asked.
_FUTURE_EXPRESSION = re.compile(
    r"(?:(?P<name>_{1,3}|_\d+)|Out\[(?P<number>\d+)\])(?:\.(?:result|exception|done|interrupt)\([^()]*\))?;?\Z"
)


class CellHook:
    """IPython's hook on every cell: rewrites those that go to the ranks, and no other.

    Only what the user runs: not what a front end runs silently or apart from history (VS Code, debuggers, variable
    viewers), and not code that a running cell hands to the shell.
    """

    # IPython's check for completeness then skips it, and judges the user's own code.
    has_side_effects = True

    def __init__(self, shell: InteractiveShell, is_auto: Callable[[], bool]) -> None:
        """
        Args:
            is_auto: whether plain cells go to the ranks.
        """
        self._shell, self._is_auto = shell, is_auto
        self._nesting_depth = 0  # cells that run within one another
        self._request_id: Any = None  # the front end's message that the depth belongs to
        self._is_rerun = False  # the cell runs earlier cells again
        self.last_rewritten = ""  # the last of the user's cells, as the shell is to run it; magics are still in it

    def install(self) -> None:
        """Have the shell call it for every cell from now on."""
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
        """Whether the cell is `_`, `Out[7].result()` or the like, of a background cell: no rank has such a future."""
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
