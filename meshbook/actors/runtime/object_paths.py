"""What an actor of this process holds, under a key that travels as text: `state.model[0].weight of trainers-1a2b3c4d`.

For who works with an actor's tensors beside the actor: the rank's main thread, which runs remote tensors' operations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from meshbook.actors.runtime.registry import local_registry

REFERENCE_KIND = "actor"  # of reference, before the key
_SEPARATOR = " of "


def format_key(actor_id: str, steps: Iterable[tuple[str, Any]]) -> str | None:
    """The key of what a path of attributes and keys leads to; None where a key on it is not a plain number or string.

    Args:
        actor_id: its id.
        steps: ("attr", name) or ("item", key).
    """
    path = "state"
    for kind, key in steps:
        if kind == "item" and type(key) not in (int, str):
            return None
        path += f".{key}" if kind == "attr" else f"[{key!r}]"
    return None if _SEPARATOR in actor_id else f"{path}{_SEPARATOR}{actor_id}"


def resolve_key(key: str) -> Any:
    """What is there now.

    Raises:
        NameError: the actor has ended.
        AttributeError, LookupError: it holds no such thing any more.
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
