"""Runs cells of before on a new rank: setup cells as they are, of others the imports and definitions.

Of other cells, only statements that bind a name and do nothing else are run: imports, functions, classes, constants.
What a cell computes is not repeated; it comes from the other ranks, or from a checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from meshbook.ids import CallId
from meshbook.rank.cells.code_runner import CellRun, CodeRunner
from meshbook.wire.messages import CellToReplay, ReplayCells, RunCell

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def replay_cells(
    command: ReplayCells, runner: CodeRunner, without_others: Callable[[], AbstractContextManager[None]]
) -> dict[str, Any]:
    """Run the cells in order, and return the reply. A cell that fails does not keep the next ones from running.

    Args:
        without_others: context in which collectives return at once.
    """
    ran: list[str] = []
    failed: list[tuple[str, str]] = []
    bound: dict[str, None] = {}
    built: dict[str, None] = {}
    num_defined = 0
    with without_others():
        for cell in command.cells:
            run = _replay(cell, command.call, runner)
            if run is None:
                continue
            bound.update(dict.fromkeys(run.bound))
            if cell.setup:
                built.update(dict.fromkeys(run.bound))
            if run.status == "ok":
                if cell.setup:
                    ran.append(_label(cell))
                else:
                    num_defined += 1
            elif run.status == "interrupted":
                failed.append((_label(cell), "was stopped, and the cells after it were not replayed"))
                break
            else:
                error = run.error
                failed.append((_label(cell), "failed" if error is None else f"{error.ename}: {error.evalue}"))
    return {"ran": ran, "defined": num_defined, "failed": failed, "bound": list(bound), "built": list(built)}


def _replay(cell: CellToReplay, call: CallId, runner: CodeRunner) -> CellRun | None:
    """Run one cell; None: there is nothing in it to run."""
    select = None if cell.setup else keep_definitions
    command = RunCell(
        call=call,
        ranks=(),
        source=cell.source,
        execution_count=cell.number,
        label=cell.label,
        store_history=False,
        silent=True,
    )
    if select is not None and not runner.has_statements(cell.source, select):
        return None
    return runner.run(command, select=select)


def _label(cell: CellToReplay) -> str:
    return cell.label or ("a cell" if cell.number is None else f"cell {cell.number}")


def keep_definitions(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that only bind names: imports, functions, classes, and constants."""
    return [node for node in body if _only_defines(node)]


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS):
        return True
    if isinstance(node, ast.Try):  # an optional import
        handlers = (statement for handler in node.handlers for statement in handler.body)
        return all(_only_defines(inner) or isinstance(inner, ast.Pass) for inner in (*node.body, *handlers))
    if isinstance(node, ast.If):
        return _is_constant(node.test) and all(map(_only_defines, (*node.body, *node.orelse)))
    if isinstance(node, ast.AnnAssign):
        return node.value is not None and _is_constant(node.value) and isinstance(node.target, ast.Name)
    return (
        isinstance(node, ast.Assign)
        and _is_constant(node.value)
        and all(isinstance(target, ast.Name) for target in node.targets)
    )


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression is made of literals and names, without calls."""
    allowed = (
        ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
        ast.Compare, ast.unaryop, ast.operator, ast.boolop, ast.cmpop, ast.expr_context,
    )  # fmt: skip
    return all(isinstance(inner, allowed) for inner in ast.walk(node))
