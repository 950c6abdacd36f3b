"""How a rank calls an operation's function: with the tensors and floats of the stream where its template has places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from meshbook.rank.tensors import templates
from meshbook.rank.tensors.operators import FLOAT, FUNCTIONS, TENSOR, TemplateMessage
from meshbook.rank.tensors.templates import CompiledTemplate

X, Y, Z = (torch.full((2,), float(number)) for number in range(3))


def called_with(
    monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...], kwargs: dict[str, Any], floats: Sequence[float]
) -> Any:
    """What the function of a template gets, with X, Y and Z for its tensors."""
    monkeypatch.setitem(FUNCTIONS, "got", lambda *args, **kwargs: (args, kwargs))
    message = TemplateMessage(1, "meshbook::got", args, kwargs, (), "none", (), communicates=False, seeded=False)
    template = CompiledTemplate(message, None, torch.device("cpu"))
    return template.run([X, Y, Z][: template.num_in], floats)


@pytest.mark.parametrize(
    ("args", "kwargs", "floats", "wanted"),
    [
        ((TENSOR, TENSOR), {}, [], ((X, Y), {})),
        ((TENSOR, 3, FLOAT), {}, [0.5], ((X, 3, 0.5), {})),
        (([TENSOR, TENSOR], FLOAT), {}, [0.5], (([X, Y], 0.5), {})),
        (([TENSOR, TENSOR], [TENSOR]), {"alpha": FLOAT}, [2.0], (([X, Y], [Z]), {"alpha": 2.0})),
        (([], [FLOAT, FLOAT], None), {"dims": [0, 1]}, [1.0, 2.0], (([], [1.0, 2.0], None), {"dims": [0, 1]})),
        ((TENSOR,), {"out": (TENSOR, [TENSOR]), "n": 1}, [], ((X,), {"out": (Y, [Z]), "n": 1})),
        (({"a": [TENSOR]}, (TENSOR,)), {}, [], (({"a": [X]}, (Y,)), {})),
    ],
)
def test_tensors_and_floats_come_to_their_places_in_lists_and_other_containers(
    monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any, floats: list[float], wanted: Any
) -> None:
    got = called_with(monkeypatch, args, kwargs, floats)
    assert pytree.tree_structure(got) == pytree.tree_structure(wanted)
    assert all(one is other or one == other for one, other in zip(*map(pytree.tree_leaves, (got, wanted)), strict=True))


def test_lists_of_tensors_are_filled_without_pytree(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(templates.pytree, "tree_unflatten", fail)
    assert called_with(monkeypatch, ([TENSOR, TENSOR], FLOAT), {}, [0.5]) == (([X, Y], 0.5), {})
