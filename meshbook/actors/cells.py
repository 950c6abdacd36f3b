"""Run a cell inside actors, between their messages, with `self` bound: `%%mesh --actor trainers`."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import linecache
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from meshbook.actors.mesh import ActorMesh
from meshbook.controller.remote import PreviewDisplay, group_previews
from meshbook.ids import Ranks
from meshbook.wire.messages import OutcomeGroup, Preview

_cell_numbers = itertools.count(1)


class ActorCellValues(PreviewDisplay):
    """The displayed values of a cell's last expression, one per actor."""

    def __init__(self, previews: Sequence[Preview]) -> None:
        self._previews = previews

    def _meshbook_previews(self) -> tuple[tuple[OutcomeGroup, ...], Ranks]:
        return group_previews(dict(enumerate(self._previews))), tuple(range(len(self._previews)))


def run_in_actors(actors: ActorMesh[Any], source: str) -> ActorCellValues | None:
    """Run source in each actor as one of its ordinary messages. Blocks.

    Its globals belong to the actor: names of earlier such cells, then those of the rank's cells; `self` is the actor.

    Returns:
        The values of the last expression; None if there is none, or if it is None on every actor.

    Raises:
        SyntaxError: before anything is sent.
        ActorError: the cell raised; with its traceback and the ranks.
    """
    number = next(_cell_numbers)
    file_name = f"<cell {number} in {actors._ref.name}>"
    compile(source, file_name, "exec", ast.PyCF_ONLY_AST)
    previews = list(actors._apply(run_cell, source, file_name).get().values())
    if all(answer is None for answer in previews):
        return None
    nothing = Preview(kind="none", type="NoneType", text="None")
    return ActorCellValues([nothing if raw is None else msgspec.convert(raw, Preview) for raw in previews])


# ---------------------------------------------------------------------------------------------------------------------
# In the actors' processes

_namespaces: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def run_cell(actor: Any, source: str, file_name: str) -> Any:
    """Run a cell; return a preview of its last expression as plain data, or None.

    In an actor with an event loop the cell may await; then this returns a coroutine.
    """
    namespace = _namespace_of(actor)
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    tree = ast.parse(source, file_name)
    last: ast.expr | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body.pop().value  # type: ignore[attr-defined]
    code_objects = [compile(tree, file_name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    if last is not None:
        code_objects.append(compile(ast.Expression(last), file_name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    if any(code.co_flags & inspect.CO_COROUTINE for code in code_objects):
        return _run_async(code_objects, namespace)
    value = None
    for code in code_objects:
        value = eval(code, namespace)
    return _preview_or_none(value if last is not None else None)


async def _run_async(code_objects: list[Any], namespace: dict[str, Any]) -> Any:
    value = None
    for code in code_objects:
        value = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return _preview_or_none(value if len(code_objects) > 1 else None)


def _preview_or_none(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    from meshbook.rank.previews.preview import preview

    shown: dict[str, Any] = msgspec.to_builtins(preview(value, text_limit=2000, rich=False))
    return shown


def _namespace_of(actor: Any) -> dict[str, Any]:
    """Return the namespace of an actor's cells, with the names of the rank's cells that it does not define added."""
    namespace = _namespaces.setdefault(actor, {"__builtins__": builtins, "__name__": "__main__"})
    for name, value in vars(sys.modules["__main__"]).items():
        namespace.setdefault(name, value)
    namespace["self"] = actor
    return namespace
