"""From the text of a cell to code objects: magics expanded, and the last expression apart from the statements before.

IPython's `run_cell` does the same, at 0.1 ms a line: it tokenizes each cell several times, compiles each statement by
itself, and parses the cell once more to see whether it awaits.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

from IPython.core.autocall import IPyAutocall
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro

# Returns some of a cell's statements.
SelectStatements = Callable[[list[ast.stmt]], list[ast.stmt]]

# Text that IPython's input transformations may change: magics, shell commands, help, pasted prompts, quoting calls, an
# indented first line. The pattern matches a superset, so a false match costs only time. Text without a match is already
# Python, and tokenizing it several times (30 us a line) changes nothing.
_MAY_NEED_TRANSFORM: Final = re.compile(r"\A\s|\?|^\s*(?:[%!,;/]|>>>|\.\.\.|In ?\[|\[)|=\s*[%!]", re.MULTILINE)
_FIRST_WORD: Final = re.compile(r"[\w.]*")


class CellCompiler:
    """Compiles cells as a shell is configured to."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._default_transforms = self._current_transforms()

    def transform(self, source: str) -> str:
        """Return the Python source of a cell, with magics and shell commands expanded."""
        if _MAY_NEED_TRANSFORM.search(source) or self._current_transforms() != self._default_transforms:
            return str(self._shell.transform_cell(source))
        text = source if source.endswith("\n") else source + "\n"
        # A single line may be a magic without its %, a macro, or a bare `exit`.
        if text.count("\n") == 1 and self._may_need_rewrite(text):
            return str(self._shell.transform_cell(source))
        return text

    def register(self, name: str | None, number: int, source: str, text: str) -> str:
        """Register the source of this cell as `Cell In[number]`, for tracebacks, `??` and debuggers.

        Args:
            name: the file name; None: one by number and content.

        Returns:
            The file name.
        """
        compiler = self._shell.compile
        name = name or compiler.get_code_name(source, text, number)
        get_name = compiler.get_code_name
        compiler.get_code_name = lambda *_: name
        try:
            compiler.cache(text, number, raw_code=text)
        finally:
            compiler.get_code_name = get_name
        return name

    def compile(self, text: str, name: str, *, silent: bool, select: SelectStatements | None = None) -> list[CodeType]:
        """Return the code of a cell: what is executed, then what is displayed.

        Args:
            select: returns those of the cell's statements that are wanted; None: all.
        """
        shell = self._shell
        tree = shell.compile.ast_parse(text, filename=name)
        if select is not None:
            tree.body = select(tree.body)
        if shell.ast_transformers:
            tree = shell.transform_ast(tree)
        executed, shown = _split_statements(tree.body, "none" if silent else shell.ast_node_interactivity)
        # `from __future__` must be the first statement of a compilation unit; after a magic it is not.
        late_future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in executed[1:])
        statement_groups = [[node] for node in executed] if late_future else [executed] if executed else []
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0):
            return [
                *(shell.compile(ast.Module(statements, []), name, "exec") for statements in statement_groups),
                *(shell.compile(ast.Interactive([node]), name, "single") for node in shown),
            ]

    def _current_transforms(self) -> tuple[Any, ...]:
        manager = self._shell.input_transformer_manager
        return (
            *manager.cleanup_transforms,
            *manager.line_transforms,
            *manager.token_transformers,
            *self._shell.input_transformers_post,
        )

    def _may_need_rewrite(self, line: str) -> bool:
        shell = self._shell
        word = _FIRST_WORD.match(line).group()  # type: ignore[union-attr]  # it matches the empty string as well
        if not word:
            return False
        return (
            bool(shell.autocall)
            or isinstance(shell.user_ns.get(word), (Macro, IPyAutocall))
            or (shell.automagic and shell.find_line_magic(word) is not None)
            or (shell.automagic and shell.find_cell_magic(word) is not None)
        )


def has_top_level_await(code: CodeType) -> bool:
    """Whether the code has a top-level `await`, so that evaluating it returns a coroutine."""
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _split_statements(body: list[ast.stmt], interactivity: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements to execute, and those whose values are displayed."""
    if not body or interactivity == "none":
        return body, []
    if interactivity == "all":
        return [], body
    last = body[-1]
    if interactivity == "last_expr_or_assign":
        target = None
        if isinstance(last, ast.Assign) and len(last.targets) == 1:
            target = last.targets[0]
        elif isinstance(last, (ast.AugAssign, ast.AnnAssign)):
            target = last.target
        if isinstance(target, ast.Name):
            show = ast.copy_location(ast.Expr(ast.Name(target.id, ast.Load())), last)
            return body, [ast.fix_missing_locations(show)]
    if isinstance(last, ast.Expr) or interactivity == "last":
        return body[:-1], [last]
    return body, []
