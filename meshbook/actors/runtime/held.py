"""What an actor of this process holds, under a key that travels as text: `state.model[0].weight of trainers-1a2b3c4d`.

For who works with an actor's tensors beside the actor: the rank's main thread, which runs remote tensors' operations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from meshbook.actors.runtime.life import life

KIND = "actor"  # of reference, before the key
_OF = " of "


def key_of(actor: str, steps: Iterable[tuple[str, Any]]) -> str | None:
    """The key of what a path of attributes and keys leads to; None where a key on it is not a plain number or string.

    Args:
        actor: its id.
        steps: ("attr", name) or ("item", key).
    """
    path = "state"
    for kind, key in steps:
        if kind == "item" and type(key) not in (int, str):
            return None
        path += f".{key}" if kind == "attr" else f"[{key!r}]"
    return None if _OF in actor else f"{path}{_OF}{actor}"


def find(key: str) -> Any:
    """What is there now.

    Raises:
        NameError: the actor has ended.
        AttributeError, LookupError: it holds no such thing any more.
    """
    path, _, actor = key.rpartition(_OF)
    cabin = life().actors.get(actor)
    if cabin is None or cabin.actor is None:
        raise NameError(f"the actor that held it has ended: {key}")
    return _follow(ast.parse(path, mode="eval").body, cabin.actor)


def _follow(path: ast.expr, actor: Any) -> Any:
    if isinstance(path, ast.Attribute):
        return getattr(_follow(path.value, actor), path.attr)
    if isinstance(path, ast.Subscript):
        return _follow(path.value, actor)[ast.literal_eval(path.slice)]
    return actor
