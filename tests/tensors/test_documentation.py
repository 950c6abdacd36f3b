"""docs/tensors.md says what is not supported, and it is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import meshbook
from meshbook.controller.mesh import Mesh

pytestmark = pytest.mark.usefixtures("starts_meshes")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensors.md"


def test_what_the_page_lists_as_not_supported_is_refused_with_a_way_round(mesh2: Mesh) -> None:
    table = PAGE.read_text().split("## What is not supported")[1]
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(listed) > 10
    wrong = []
    for expression in listed:
        x = meshbook.distribute(torch.rand(8, 12), mesh2, sharding_spec=["dp", None])
        n = meshbook.distribute(torch.arange(8), mesh2, sharding_spec=["dp"])
        try:
            eval(expression, {"x": x, "n": n, "torch": torch, "F": F})
        except NotImplementedError as error:
            if len(str(error)) < 60:
                wrong.append(f"{expression}: {error}")
        except Exception as error:
            wrong.append(f"{expression}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{expression}: works")
    assert wrong == []


def test_examples_of_the_page_run(mesh2: Mesh) -> None:
    mesh, local = mesh2, torch.arange(24.0).reshape(6, 4)
    for example in re.findall(r"```python\n(x = .*?)```", PAGE.read_text(), re.DOTALL):
        exec(example, {"meshbook": meshbook, "mesh": mesh, "local": local})
