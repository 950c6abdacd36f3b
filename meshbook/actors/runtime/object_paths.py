"""Keys for objects that an actor of this process holds: `state.model[0].weight of trainers-1a2b3c4d`.

Used by code that accesses an actor's tensors from outside the actor: the rank's main thread, which runs the operations
of remote tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from meshbook.actors.runtime.registry import local_registry

REFERENCE_KIND = "actor"  # the reference kind, which precedes the key
_SEPARATOR = " of "


def format_key(actor_id: str, steps: Iterable[tuple[str, Any]]) -> str | None:
    """Return the key for a path of attributes and items; None if an item key is not a plain number or string.

    Args:
        actor_id: the actor that holds the object.
        steps: ("attr", name) or ("item", key).
    """
    path = "state"
    for kind, key in steps:
        if kind == "item" and type(key) not in (int, str):
            return None
        path += f".{key}" if kind == "attr" else f"[{key!r}]"
    return None if _SEPARATOR in actor_id else f"{path}{_SEPARATOR}{actor_id}"


def resolve_key(key: str) -> Any:
    """Return the object that the key refers to now.

    Raises:
        NameError: the actor has ended.
        AttributeError, LookupError: it no longer holds such an object.
    """
    path, _, actor_id = key.rpartition(_SEPARATOR)
    runner = local_registry().actors.get(actor_id)
    if runner is None or runner.actor is None:
        raise NameError(f"the actor that held it has ended: {key}")
    return _evaluate_path(ast.parse(path, mode="eval").body, runner.actor)


def _evaluate_path(path: ast.expr, actor: Any) -> Any:
    if isinstance(path, ast.Attribute):
        return getattr(_evaluate_path(path.value, actor), path.attr)
    if isinstance(path, ast.Subscript):
        return _evaluate_path(path.value, actor)[ast.literal_eval(path.slice)]
    return actor
